"""The pipeline `archive`: topics to a lake, partitioned by topic, date and hour.

Owns: that pipeline, and the schema of its lake. One rule: columns are only ever added, at the end
of COLUMNS; none changes its name, type or meaning.

    topic            string     partition
    date             string     partition: of the event, UTC, as 2026-03-01 (engines may see a date)
    hour             string     partition: of the event, UTC, 00 to 23 (engines may see a number)
    broker           string
    queue_id         int
    queue_offset     bigint     with topic, broker and queue_id: what a row is told apart by
    keys             string
    tags             string
    body             binary
    born_time        timestamp  microseconds, UTC
    store_time       timestamp
    event_time       timestamp  what date and hour are of; null if the body did not say it, and then
                                they are of store_time
    reconsume_times  int
    msg_id           string
    properties       map of strings
    sys_flag         int
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Literal

from cometmq.errors import UsageError
from cometmq.pipelines.compacting import compact as compact_lake
from cometmq.pipelines.files import Files
from cometmq.pipelines.reaching import access_options, source_checked, words_to_options
from cometmq.pipelines.retention import RetentionWatch, shown
from cometmq.pipelines.running import Outcome, Tell, run_stream, to_stderr
from cometmq.pipelines.sinks import AVAILABLE_NOW, checked_trigger, open_lake, with_trigger

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS = ("topic", "date", "hour")
COLUMNS = {
    "topic": "string",
    "date": "string",
    "hour": "string",
    "broker": "string",
    "queue_id": "int",
    "queue_offset": "bigint",
    "keys": "string",
    "tags": "string",
    "body": "binary",
    "born_time": "timestamp",
    "store_time": "timestamp",
    "event_time": "timestamp",
    "reconsume_times": "int",
    "msg_id": "string",
    "properties": "map<string,string>",
    "sys_flag": "int",
}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
_JSON_PATH = re.compile(r"\$(\.[A-Za-z_][A-Za-z0-9_-]*|\[\d+\])+")
_WITH_ZONE = r":\d\d(\.\d+)?\s*([zZ]|UTC|GMT|[+-]\d\d?(:?\d\d)?|[A-Za-z]+/[A-Za-z_/]+)\s*$"
_CHECKPOINT = "_cometmq/checkpoint"
LATEST_MS = 253_402_300_800_000  # the year 10000


def archive(
    spark: SparkSession,
    *,
    namesrv: str,
    lake: str,
    topic: str | None = None,
    topic_pattern: str | None = None,
    checkpoint: str | None = None,
    format: Literal["parquet", "delta", "iceberg"] = "parquet",
    event_time: str = "store_time",
    starting_offsets: str = "earliest",
    rows_per_batch: int = 1_000_000,
    compact: bool = False,
    before_retention: bool = False,
    retention_margin: float = 0.25,
    fail_on_data_loss: bool = True,
    trigger: str = AVAILABLE_NOW,
    access: str | None = None,
    source_options: list[str] | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Topics to a lake, by topic, date and hour of the event, every message exactly once.

    `topic` names topics (separated by commas), or `topic_pattern` a regular expression; new ones
    that match are taken up. `event_time`: store_time, born_time or a JSON path into the body such
    as $.created (ISO 8601, or a number of seconds or milliseconds). `compact` merges the small
    files of closed hours at the end of the run. `before_retention` tells after every batch how much
    time is left until brokers delete what is not archived, and warns below `retention_margin` of
    their retention; what they did delete fails the run, or is counted with
    `fail_on_data_loss=false`. The checkpoint is kept in the lake unless you say where: two archives
    into one lake need one each. Delta and Iceberg batches pass through the driver's memory.
    `access`: a file with ACL keys and TLS settings.
    """
    when = _event_time(event_time)
    if (topic is None) == (topic_pattern is None):
        raise UsageError("archive needs topic (names, separated by commas) or topic_pattern: one")
    if compact and checked_trigger(trigger) != AVAILABLE_NOW:
        raise UsageError(
            f"compact merges at the end of a run, and one with trigger {trigger!r} has none: let "
            "the pipeline compact run beside it"
        )
    if compact and format == "iceberg":
        raise UsageError("compact: pyiceberg does not merge files; use an engine that does")
    if not 0 <= retention_margin <= 1:
        raise UsageError(f"retention_margin {retention_margin} is a part of the time: 0 to 1")
    if checkpoint is None:
        if format == "iceberg" and lake.startswith("catalog:"):
            raise UsageError("archive into a catalogue's table needs a checkpoint")
        checkpoint = f"{lake.rstrip('/')}/{_CHECKPOINT}"
    more = access_options(access) | words_to_options(source_options, "source_options")
    options = source_checked(
        {
            "namesrv": namesrv,
            "startingOffsets": starting_offsets,
            "maxOffsetsPerTrigger": str(rows_per_batch),
            "failOnDataLoss": str(fail_on_data_loss).lower(),
            **({"topic": topic} if topic is not None else {"topicPattern": str(topic_pattern)}),
            **more,
        }
    )
    rows = as_archived(spark.readStream.format("rocketmq").options(**options).load(), when)
    name = "archive"
    into = open_lake(spark, format, lake, checkpoint, PARTITIONS)
    watch = None
    if before_retention:
        watch = RetentionWatch(
            name,
            namesrv,
            more,
            Files(spark, checkpoint),
            tell,
            margin=retention_margin,
            fails_on_loss=fail_on_data_loss,
        )

    def write(batch: DataFrame, batch_id: int) -> None:
        # The session of a stream is its own: nobody else's files change.
        batch.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        into.write(batch, batch_id)
        if watch is not None:
            watch.check(batch_id)

    try:
        stream = rows.writeStream.queryName(name).option("checkpointLocation", checkpoint)
        outcome = run_stream(
            name, with_trigger(stream, trigger).foreachBatch(write), tell=tell, stop=stop
        )
    finally:
        if watch is not None:
            watch.close()
    outcome.figures["files written"] = into.files_written
    if watch is not None:
        least = "nothing waited" if watch.least is None else shown(watch.least.seconds)
        outcome.figures |= {"least time left": least, "retention warnings": watch.warnings}
    if compact and not outcome.is_stopped:
        _compact(spark, format, lake, into, outcome, tell, stop)
    return outcome


def _compact(
    spark: SparkSession,
    format: str,
    lake: str,
    into: object,
    outcome: Outcome,
    tell: Tell,
    stop: threading.Event | None,
) -> None:
    from cometmq.pipelines.lake_tables import DeltaLake

    if isinstance(into, DeltaLake):
        found = into.compact()
        removed, added = found.get("numFilesRemoved", 0), found.get("numFilesAdded", 0)
        outcome.figures["compacted"] = f"{removed} files to {added}"
        return
    done = compact_lake(spark, lake=lake, tell=tell, stop=stop)
    outcome.figures["compacted"] = f"{done.batches} partitions, {done.figures['files']} files"
    outcome.is_stopped = done.is_stopped


def as_archived(rows: DataFrame, when: Column) -> DataFrame:
    """Rows of the source with the columns and types of the lake."""
    from pyspark.sql import functions as f

    timed = rows.withColumn("event_time", when)
    seconds = f.unix_seconds(f.coalesce("event_time", "store_time"))
    # By arithmetic: functions of dates follow the session's time zone, and this is UTC.
    days = f.floor(seconds / 86400).cast("int")
    date = f.date_add(f.lit("1970-01-01").cast("date"), days)
    hour = f.floor(f.pmod(seconds, f.lit(86400)) / 3600)
    placed = timed.withColumn("date", date.cast("string")).withColumn(
        "hour", f.lpad(hour.cast("string"), 2, "0")
    )
    return placed.select(*(f.col(name).cast(kind).alias(name) for name, kind in COLUMNS.items()))


def _event_time(setting: str) -> Column:
    from pyspark.sql import functions as f

    if setting in ("store_time", "born_time"):
        return f.col(setting)
    if not _JSON_PATH.fullmatch(setting):
        raise UsageError(
            f"event_time {setting!r}: write store_time, born_time or a path into a JSON body such "
            "as $.order.created"
        )
    text = f.get_json_object(f.col("body").cast("string"), setting)
    number = text.try_cast("double")
    # Up to 1e11 it is seconds (until the year 5138), beyond it milliseconds (from 1973 on); what
    # no calendar has is no time, and must not fail the batch.
    size = f.abs(number)
    micros = f.when(size < 1e11, number * 1_000_000).when(size < LATEST_MS, number * 1000)
    # A time without a zone is UTC, whatever the session's zone is.
    in_utc = [f.concat(text, f.lit(end)).try_cast("timestamp") for end in ("Z", "T00:00:00Z")]
    given = text.try_cast("timestamp")
    moment = f.when(text.rlike(_WITH_ZONE), given).otherwise(f.coalesce(*in_utc, given))
    return f.when(number.isNotNull(), f.timestamp_micros(micros.cast("bigint"))).otherwise(moment)
