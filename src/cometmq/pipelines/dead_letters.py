"""The pipeline `dlq`: dead letters into a table, a report, and back to where they came from.

Owns: that pipeline, and the columns of the table. One rule: a dead letter is in the table once,
under an id that tells its place, and everything else (report, re-drive) starts from the table: the
broker deletes the letter itself after fileReservedTime.

    <lake>/letters/dead_date=2026-03-01/*.parquet      the table
    <lake>/redrive/                                    what was sent again: see redriving.py
    <lake>/_checkpoint/                                how far the dead letter topics were read

    letter_id         string     <dead letter topic>@<broker>/<queue>/<offset>
    group             string     the consumer group that gave up
    reason            string     the property DLQ_REASON, which CometMQ sets; else what the
                                 letter shows of its end
    origin_topic      string     the topic that it was sent to
    origin_msg_id     string     the unique id that it had there
    origin_offset_id  string     its first copy's place in the log of its broker
    retries           int        how often it was sent back (reconsumeTimes)
    redrives          int        how often it was re-driven before it died this time
    redriven_from     string     the letter_id of its former death, if it was
    born_time, dead_time, first_pop_time    timestamp
    msg_id, keys, tags, body, properties, broker, queue_id, queue_offset      as the source has them
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cometmq.client.outgoing import MAX_GROUP_CHARS, check_name
from cometmq.errors import UsageError
from cometmq.pipelines.files import Files, write_file
from cometmq.pipelines.reaching import access_options, client_keywords
from cometmq.pipelines.redriving import REDRIVES, RESENT_FROM, Redrive
from cometmq.pipelines.report import Report, Table
from cometmq.pipelines.running import Outcome, Tell, explained, reason_of, run_stream, to_stderr
from cometmq.pipelines.sinks import AVAILABLE_NOW, checked_trigger, start_to

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PREFIX = "%DLQ%"
MOST_REDRIVEN = 100_000
MOST_ROWS = 100
TOP_KEYS = 20
HOURS = 72
DEFAULT_TRIES = 16
MINUTE, HOUR = "yyyy-MM-dd HH:mm", "yyyy-MM-dd HH:00"


def dlq(
    spark: SparkSession,
    *,
    namesrv: str,
    lake: str,
    groups: list[str] | None = None,
    checkpoint: str | None = None,
    report: str | None = None,
    redrive: bool = False,
    where: str | None = None,
    most: int = 1000,
    abandon: bool = False,
    trigger: str = AVAILABLE_NOW,
    access: str | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Dead letters of groups into a table with origin and history; report; send some again.

    `groups`: all of them unless named. What is new goes into the Parquet table <lake>/letters; then
    counts by group, origin topic and hour and the most frequent keys are told, and written to
    `report` (HTML if it ends in .html, else text).
    `redrive=true` sends letters of the table to the topics they came from: those that `where`, a
    SQL condition over the table's columns, selects ("origin_topic = 'orders' AND keys LIKE 'A%'"),
    oldest first, at most `most`. No letter is sent twice, also if the run is killed and started
    again. What became of each stands in <lake>/redrive/outcomes: sent (with its new offset), failed
    (with the reason; may be tried again), already re-driven. A run that was cut off is finished
    first; `abandon=true` closes its letters whose fate can't be found out (a broker that is gone
    for good) as unknown, and they are not sent again. `access`: a file with ACL keys and TLS
    settings.
    """
    _check(groups, where, most, trigger, redrive)
    keys = access_options(access)
    ended = stop or threading.Event()
    root = lake.rstrip("/")
    with explained("dlq"):
        rows = _source(spark, namesrv, groups, keys)
        if where is not None:
            _check_condition(rows, where)
        writer = start_to(
            spark,
            rows,
            format="parquet",
            path=f"{root}/letters",
            partition_by=["dead_date"],
            checkpoint=checkpoint or f"{root}/_checkpoint",
            trigger=trigger,
            name="dlq",
        )
    outcome = run_stream("dlq", writer, tell=tell, stop=ended)
    with explained("dlq"):
        table = letters(spark, root)
        if table is None:
            tell("dlq: there are no dead letters")
            return outcome
        told = _report(table)
        for line in told.as_text().splitlines():
            tell(line)
        if report is not None:
            write_file(spark, report, told.at(report))
            outcome.figures["report"] = report
        outcome.figures["letters in the table"] = table.count()
        if redrive and not ended.is_set():
            again = Redrive(spark, root, namesrv, tell, ended, client_keywords(keys))
            outcome.figures |= again.run(table, where or "true", most, abandon)
            outcome.is_stopped = outcome.is_stopped or again.is_stopped
    return outcome


def letters(spark: SparkSession, lake: str) -> DataFrame | None:
    """The table; None if there is none yet. A letter that a second stream (another checkpoint)
    has written too counts once."""
    path = f"{lake.rstrip('/')}/letters"
    if not Files(spark, path).files_below("", ".parquet"):
        return None
    return spark.read.parquet(path).dropDuplicates(["letter_id"])


def _check(
    groups: list[str] | None, where: str | None, most: int, trigger: str, redrive: bool
) -> None:
    checked_trigger(trigger)
    for group in groups or []:
        check_name(group.removeprefix(PREFIX), "group", MAX_GROUP_CHARS)
    if where is not None and not redrive:
        raise UsageError("dlq: `where` selects what is sent again: give redrive=true too")
    if redrive and checked_trigger(trigger) != AVAILABLE_NOW:
        raise UsageError(
            f"dlq: letters are sent again when what is there is read, and with trigger {trigger!r} "
            "that has no end: re-drive with trigger=available-now"
        )
    if not 1 <= most <= MOST_REDRIVEN:
        raise UsageError(f"dlq: most {most}; must be 1 to {MOST_REDRIVEN}")


def _check_condition(rows: DataFrame, where: str) -> None:
    try:
        rows.where(where)
    except Exception as error:
        raise UsageError(
            f"dlq: where {where!r}: {reason_of(error)}. Columns are {', '.join(rows.columns)}"
        ) from None


def _source(
    spark: SparkSession, namesrv: str, groups: list[str] | None, keys: dict[str, str]
) -> DataFrame:
    reader = spark.readStream.format("rocketmq").option("namesrv", namesrv)
    reader = reader.options(**keys).option("startingOffsets", "earliest")
    if groups:
        names = [PREFIX + one.removeprefix(PREFIX) for one in groups]
        reader = reader.option("topic", ",".join(names))
    else:
        reader = reader.option("topicPattern", f"{PREFIX}.*")
    return as_letters(reader.load())


def as_letters(rows: DataFrame) -> DataFrame:
    """The table's columns from the source's."""
    from pyspark.sql import functions as f

    def of(name: str) -> Any:
        return f.col("properties")[f.lit(name)]

    retries = f.col("reconsume_times")
    shown = (
        f.when(
            of("1ST_POP_TIME").isNotNull(),
            f.format_string("received %d times, never acknowledged", retries),
        )
        .when(retries >= DEFAULT_TRIES, f.format_string("all %d retries failed", retries))
        .otherwise(
            f.format_string(
                "given up after %d retries: the group's limit, or its handler's wish", retries
            )
        )
    )
    place = f.concat_ws("/", "broker", "queue_id", "queue_offset")
    return rows.select(
        f.concat_ws("@", "topic", place).alias("letter_id"),
        f.col("topic").substr(f.lit(len(PREFIX) + 1), f.length("topic")).alias("group"),
        f.coalesce(of("DLQ_REASON"), shown).alias("reason"),
        f.coalesce(of("RETRY_TOPIC"), of("DLQ_ORIGIN_TOPIC")).alias("origin_topic"),
        f.coalesce(of("DLQ_ORIGIN_MESSAGE_ID"), "msg_id").alias("origin_msg_id"),
        of("ORIGIN_MESSAGE_ID").alias("origin_offset_id"),
        retries.alias("retries"),
        f.coalesce(of(REDRIVES).try_cast("int"), f.lit(0)).alias("redrives"),
        of(RESENT_FROM).alias("redriven_from"),
        "born_time",
        f.col("store_time").alias("dead_time"),
        f.timestamp_millis(of("1ST_POP_TIME").try_cast("long")).alias("first_pop_time"),
        "msg_id",
        "keys",
        "tags",
        "body",
        "properties",
        "broker",
        "queue_id",
        "queue_offset",
        f.to_date("store_time").alias("dead_date"),
    )


# ------------------------------------------------------------------------------------------ report


def _report(table: DataFrame) -> Report:
    from pyspark.sql import functions as f

    def most_of(*by: Any, limit: int = MOST_ROWS) -> list[tuple[Any, ...]]:
        counted = table.groupBy(*by).agg(
            f.count("*").alias("letters"),
            f.sum((f.col("redrives") > 0).cast("int")).alias("again"),
            f.date_format(f.max("dead_time"), MINUTE).alias("last"),
        )
        return [tuple(one) for one in counted.orderBy(f.desc("letters")).limit(limit).collect()]

    by_origin = most_of("group", "origin_topic")
    by_hour = table.groupBy(f.date_format("dead_time", HOUR).alias("hour"), "group").count()
    hours = by_hour.orderBy(f.desc("hour"), "group").limit(HOURS).collect()
    words = table.select(f.explode(f.split("keys", " ")).alias("key")).where("key <> ''")
    keys = words.groupBy("key").count().orderBy(f.desc("count"), "key").limit(TOP_KEYS).collect()
    whole = sum(row[2] for row in by_origin)
    note = f"{whole:,} letters of {len({row[0] for row in by_origin}):,} groups"
    columns = ["group", "origin topic", "letters", "died again", "last"]
    return Report(
        "Dead letters",
        note,
        [
            Table("By group and origin topic", columns, by_origin, _cut(by_origin, MOST_ROWS)),
            Table(
                "By hour",
                ["hour", "group", "letters"],
                [tuple(one) for one in hours],
                _cut(hours, HOURS),
            ),
            Table(
                "Most frequent keys",
                ["key", "letters"],
                [tuple(one) for one in keys],
                _cut(keys, TOP_KEYS),
            ),
        ],
    )


def _cut(rows: list[Any], limit: int) -> str:
    return f"the first {limit}; there are more" if len(rows) == limit else ""
