"""The pipeline `trace`: what clients told in the trace topic, as latencies, failures and retries.

Owns: that pipeline, and reading trace records in Spark. One rule: a record is read by the layout in
client/trace_record.py, with Spark's own functions; one that breaks it is passed over. Records go
into a table first, exactly once; everything else is computed from the table anew, because the end
of a message may come hours after its beginning.

    <lake>/records/trace_date=2026-03-01/*.parquet   every record
    <lake>/latency/      by window, topic and consumer group: handled, failures, retries,
                         p50_ms p95_ms p99_ms max_ms from the send to the end of its handler,
                         handler_p95_ms of the handler alone
    <lake>/sends/        by window, topic and producer group: sends, failures, p50_ms p95_ms p99_ms
    <lake>/slowest/      by window, topic and group: the slowest messages with their keys
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cometmq.client.trace_story import TRACE_TOPIC
from cometmq.errors import UsageError
from cometmq.pipelines.files import Files, write_file
from cometmq.pipelines.reaching import access_options, source_checked
from cometmq.pipelines.report import Plot, Report, Table
from cometmq.pipelines.running import Outcome, Tell, explained, run_stream, to_stderr
from cometmq.pipelines.sinks import AVAILABLE_NOW, checked_trigger, open_lake, with_trigger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIELD_END, RECORD_END = "\x01", "\x02"
FRESH_S = 60.0
"""How often the tables are computed anew while a stream runs on."""
MOST_PLOTS = 12
MOST_ROWS = 50
TABLES = ("latency", "sends", "slowest")
_PERCENTS = (0.5, 0.95, 0.99)
_NAMES = ("p50_ms", "p95_ms", "p99_ms")


def trace(
    spark: SparkSession,
    *,
    namesrv: str,
    lake: str,
    topic: str = TRACE_TOPIC,
    window: str = "1 minute",
    hours: int = 24,
    slowest: int = 10,
    report: str | None = None,
    checkpoint: str | None = None,
    starting_offsets: str = "earliest",
    trigger: str = AVAILABLE_NOW,
    access: str | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Latency percentiles, failures, retries and slowest keys by window, from the trace topic.

    Latency is from the send of a message to the end of the handler that succeeded with it, by the
    clocks of the two clients; both must have `trace` on. The last `hours` are computed (from the
    newest record back), into Parquet tables below `lake` and into `report`: one HTML file with
    plots, or text if its name does not end in .html. Of each window, topic and group the `slowest`
    messages are kept. `access`: a file with ACL keys and TLS settings.
    """
    checked_trigger(trigger)
    if hours < 1 or slowest < 1:
        raise UsageError(f"trace: hours {hours} and slowest {slowest} must be at least 1")
    read = source_checked(
        {
            "namesrv": namesrv,
            **access_options(access),
            "topic": topic,
            "startingOffsets": starting_offsets,
            "columns": "body,store_time",
        }
    )
    root = lake.rstrip("/")
    analysis = Analysis(spark, root, window, hours, slowest, report or f"{root}/report.html")
    home = checkpoint or f"{root}/_checkpoint"
    with explained("trace"):
        analysis.check()
        rows = spark.readStream.format("rocketmq").options(**read).load()
        table = open_lake(spark, "parquet", f"{root}/records", home, ["trace_date"])
        is_endless = trigger.strip().lower() != AVAILABLE_NOW

        def write(batch: DataFrame, batch_id: int) -> None:
            table.write(batch, batch_id)
            if is_endless and time.monotonic() - analysis.done_s > FRESH_S:
                analysis.run()

        writer = records(rows).writeStream.queryName("trace").foreachBatch(write)
        writer = with_trigger(writer.option("checkpointLocation", home), trigger)
    outcome = run_stream("trace", writer, tell=tell, stop=stop)
    with explained("trace"):
        outcome.figures |= analysis.run()
    return outcome


def records(rows: DataFrame) -> DataFrame:
    """The records in the bodies of trace messages, one a row."""
    from pyspark.sql import functions as f

    text = f.col("body").cast("string")
    pieces = rows.select("store_time", f.explode(f.split(text, RECORD_END)).alias("piece"))
    fields = pieces.select("store_time", f.split("piece", FIELD_END).alias("at"))

    def word(place: int) -> Any:
        return f.nullif(f.nullif(f.get("at", f.lit(place)), f.lit("null")), f.lit(""))

    def number(place: int) -> Any:
        return word(place).try_cast("long")

    def of(pub: Any, before: Any, after: Any) -> Any:
        chosen = f.when(f.col("kind") == "Pub", pub)
        return chosen.when(f.col("kind") == "SubBefore", before).otherwise(after)

    none = f.lit(None)
    was_sent = f.when(f.size("at") > 13, word(13)).otherwise(word(12))
    read = fields.withColumn("kind", f.get("at", f.lit(0))).where(
        f.col("kind").isin("Pub", "SubBefore", "SubAfter")
    )
    made = read.select(
        "kind",
        f.timestamp_millis(of(number(1), number(1), f.nullif(number(7), f.lit(0)))).alias("time"),
        of(word(3), word(3), word(8)).alias("group"),
        of(word(4), none, none).alias("topic"),
        of(none, word(4), word(1)).alias("request_id"),
        # A batch is told in one record, with all its ids.
        f.explode(f.split(of(word(5), word(5), word(2)), ",")).alias("msg_id"),
        of(word(6), none, none).alias("tags"),
        of(word(7), word(7), word(5)).alias("keys"),
        of(number(10), none, number(3)).alias("cost_ms"),
        f.lower(of(was_sent, none, word(4))).eqNullSafe(f.lit("true")).alias("is_success"),
        of(none, none, number(6)).cast("int").alias("code"),
        of(none, number(6), none).cast("int").alias("retry_times"),
        "store_time",
        f.to_date("store_time").alias("trace_date"),
    )
    is_whole = f.when(f.col("kind") == "SubAfter", f.col("cost_ms").isNotNull())
    return made.where(is_whole.otherwise(f.col("time").isNotNull()) & (f.col("msg_id") != ""))


class Analysis:
    """Tables and report from the table of records."""

    def __init__(
        self, spark: SparkSession, root: str, window: str, hours: int, slowest: int, report: str
    ) -> None:
        self._spark, self._root = spark, root
        self._window, self._hours, self._slowest = window, hours, slowest
        self._report = report
        self._files = Files(spark, root)
        self.done_s = 0.0

    def check(self) -> None:
        """UsageError if the window's length is none."""
        from pyspark.sql import functions as f

        try:
            empty = self._spark.range(0).select(f.timestamp_millis("id").alias("time"))
            empty.groupBy(f.window("time", self._window)).count().schema  # noqa: B018
        except Exception:
            raise UsageError(
                f"trace: window {self._window!r}; write a length such as '1 minute'"
            ) from None

    def run(self) -> dict[str, Any]:
        """Compute all anew; figures for the summary."""
        self.done_s = time.monotonic()
        if not self._files.files_below("records", ".parquet"):
            return {"records": 0}
        every = self._spark.read.parquet(f"{self._root}/records")
        newest_ms = every.selectExpr("unix_millis(max(store_time)) AS at").collect()[0]["at"]
        since_ms = newest_ms - self._hours * 3_600_000
        recent = every.where(f"store_time >= timestamp_millis({since_ms})").cache()
        try:
            handled = self._handled(recent).cache()
            self._replace("latency", self._latency(handled))
            self._replace("sends", self._sends(recent))
            self._replace("slowest", self._slow(handled))
            figures = {"records": recent.count(), "handled": handled.where("is_success").count()}
            handled.unpersist()
        finally:
            recent.unpersist()
        write_file(self._spark, self._report, self._told().at(self._report))
        self.done_s = time.monotonic()
        return figures | {"report": self._report}

    # ---------------------------------------------------------------------------------- the tables

    def _handled(self, recent: DataFrame) -> DataFrame:
        """Every end of a handler, with its message's send. Records come at least once."""
        from pyspark.sql import functions as f

        after = recent.where("kind = 'SubAfter'").dropDuplicates(["request_id", "msg_id"])
        before = recent.where("kind = 'SubBefore'").dropDuplicates(["request_id", "msg_id"])
        sent = (
            recent.where("kind = 'Pub' AND is_success")
            .groupBy("msg_id")
            .agg(
                f.min_by("topic", "time").alias("topic"),
                f.min_by("keys", "time").alias("sent_keys"),
                f.min("time").alias("sent_time"),
            )
        )
        begun = before.select(
            "request_id",
            "msg_id",
            f.col("group").alias("begun_group"),
            f.col("time").alias("begun_time"),
            "retry_times",
        )
        ends = after.drop("topic", "retry_times").join(begun, ["request_id", "msg_id"], "left")
        whole = ends.join(sent, "msg_id", "left")
        began_ms = f.unix_millis("begun_time")
        # Old clients don't tell the end's time, nor its group.
        ended = f.coalesce("time", f.timestamp_millis(began_ms + f.col("cost_ms")), "store_time")
        late_ms = f.unix_millis(ended) - f.unix_millis("sent_time")
        return whole.select(
            ended.alias("ended"),
            "topic",
            f.coalesce("group", "begun_group").alias("group"),
            "msg_id",
            f.coalesce("sent_keys", "keys").alias("keys"),
            "is_success",
            "cost_ms",
            f.coalesce("retry_times", f.lit(0)).alias("retry_times"),
            # Clocks differ: no less than 0. (greatest would make 0 of one that nobody knows.)
            f.when(f.col("is_success") & late_ms.isNotNull(), f.greatest(late_ms, f.lit(0))).alias(
                "latency_ms"
            ),
        )

    def _latency(self, handled: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        counted = handled.groupBy(f.window("ended", self._window), "topic", "group").agg(
            _count("is_success", "handled"),
            _count("NOT is_success", "failures"),
            _count("retry_times > 0", "retries"),
            f.percentile_approx("latency_ms", list(_PERCENTS), 10_000).alias("percents"),
            f.max("latency_ms").alias("max_ms"),
            f.percentile_approx("cost_ms", 0.95, 10_000).alias("handler_p95_ms"),
        )
        counts = ["handled", "failures", "retries"]
        return counted.select(
            *_bounds(), "topic", "group", *counts, *_spread(), "max_ms", "handler_p95_ms"
        ).orderBy("window_start", "topic", "group")

    def _sends(self, recent: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        sends = recent.where("kind = 'Pub'").dropDuplicates(["msg_id", "time", "group"])
        counted = sends.groupBy(f.window("time", self._window), "topic", "group").agg(
            _count("is_success", "sends"),
            _count("NOT is_success", "failures"),
            f.percentile_approx("cost_ms", list(_PERCENTS), 10_000).alias("percents"),
        )
        return counted.select(
            *_bounds(), "topic", "group", "sends", "failures", *_spread()
        ).orderBy("window_start", "topic", "group")

    def _slow(self, handled: DataFrame) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        timed = handled.where("latency_ms IS NOT NULL").withColumn(
            "window", f.window("ended", self._window)
        )
        by = Window.partitionBy("window", "topic", "group").orderBy(f.desc("latency_ms"), "msg_id")
        ranked = timed.withColumn("rank", f.row_number().over(by)).where(f"rank <= {self._slowest}")
        return ranked.select(
            *_bounds(), "topic", "group", "rank", "keys", "msg_id", "latency_ms", "retry_times"
        ).orderBy("window_start", "topic", "group", "rank")

    def _replace(self, name: str, table: DataFrame) -> None:
        """Written aside, then put in the place of the former one: readers see one or the other,
        or for a moment none."""
        aside = f"_staging/{name}"
        self._files.delete(aside)
        table.coalesce(1).write.parquet(self._files.at(aside))
        self._files.delete(name)
        self._files.move(aside, name)

    # ---------------------------------------------------------------------------------- the report

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Of a table, with the windows' beginnings as text and in ms: a datetime that Spark hands
        out depends on this process's zone."""
        from pyspark.sql import functions as f

        table = self._spark.read.parquet(self._files.at(name)).select(
            "*",
            f.date_format("window_start", "yyyy-MM-dd HH:mm:ss").alias("window"),
            f.unix_millis("window_start").alias("start_ms"),
        )
        return [one.asDict() for one in table.orderBy("window_start", "topic", "group").collect()]

    def _told(self) -> Report:
        latency, sends, slow = map(self._rows, TABLES)
        pairs: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        for row in latency:
            pairs.setdefault((row["topic"], row["group"]), []).append(row)
        busiest = sorted(pairs.items(), key=lambda pair: -sum(row["handled"] for row in pair[1]))
        slow.sort(key=lambda row: -row["latency_ms"])
        parts: list[Table | Plot] = [
            _totals("Handled, by topic and group", latency, ("handled", "failures", "retries")),
            _totals("Sent, by topic and producer group", sends, ("sends", "failures")),
        ]
        for (topic, group), rows in busiest[:MOST_PLOTS]:
            where = f"{topic or '(its producer does not trace)'} → {group}"
            parts.append(Plot(f"Latency: {where}", "ms", _lines(rows, (*_NAMES,))))
            if any(row["failures"] or row["retries"] for row in rows):
                counts = ("handled", "failures", "retries")
                parts.append(Plot(f"Calls: {where}", "", _lines(rows, counts)))
        columns = ["window", "topic", "group", "keys", "msg_id", "latency_ms", "retry_times"]
        parts.append(Table("Slowest messages", columns, _cells(slow[:MOST_ROWS], columns)))
        columns = ["window", "topic", "group", "handled", "failures", "retries", *_NAMES]
        parts.append(
            Table(
                "By window",
                columns,
                _cells(latency[-MOST_ROWS:], columns),
                f"the newest {MOST_ROWS} rows; all are in {self._root}/latency",
            )
        )
        zone = self._spark.conf.get("spark.sql.session.timeZone")
        note = f"windows of {self._window}, the last {self._hours} h; times of {zone}, plots in UTC"
        return Report("Message trace", note, parts)


def _count(condition: str, name: str) -> Any:
    from pyspark.sql import functions as f

    return f.count(f.when(f.expr(condition), 1)).alias(name)


def _bounds() -> list[Any]:
    from pyspark.sql import functions as f

    starts, ends = f.col("window.start"), f.col("window.end")
    return [starts.alias("window_start"), ends.alias("window_end")]


def _spread() -> list[Any]:
    from pyspark.sql import functions as f

    return [f.get("percents", f.lit(at)).alias(name) for at, name in enumerate(_NAMES)]


def _cells(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in rows]


def _lines(
    rows: Sequence[dict[str, Any]], names: Sequence[str]
) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(row["start_ms"], float(row[name])) for row in rows if row[name] is not None]
        for name in names
    }


def _totals(title: str, rows: Sequence[dict[str, Any]], counts: Sequence[str]) -> Table:
    """Over all windows: counts summed, and the worst window's percentiles."""
    found: dict[tuple[Any, Any], list[Any]] = {}
    for row in rows:
        sums = found.setdefault((row["topic"], row["group"]), [0] * len(counts) + [None] * 2)
        for at, name in enumerate(counts):
            sums[at] += row[name]
        for at, name in enumerate(("p50_ms", "p99_ms"), len(counts)):
            values = [one for one in (sums[at], row[name]) if one is not None]
            sums[at] = max(values, default=None)
    columns = ("topic", "group", *counts, "worst p50, ms", "worst p99, ms")
    ordered = sorted(found.items(), key=lambda pair: -pair[1][0])[:MOST_ROWS]
    return Table(title, columns, [(*names, *sums) for names, sums in ordered])
