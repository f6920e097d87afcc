"""The pipeline `replay`: what a lake or a topic has of a span of time, sent into a topic again.

Owns: that pipeline. One rule: every message of the plan (replay_plan.py) is sent once, in the order
that its queue had; a replay that is cut off goes on where it was when it is run again with the same
checkpoint.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from cometmq.errors import UsageError
from cometmq.message import MessageQueue
from cometmq.pipelines.archiving import SCHEMA
from cometmq.pipelines.compacting import state_of
from cometmq.pipelines.copying import COLUMNS, Order, as_copies, check_order
from cometmq.pipelines.files import Files
from cometmq.pipelines.lake import writer_of
from cometmq.pipelines.lake_tables import live_files, table_kind
from cometmq.pipelines.reaching import (
    access_options,
    other_access,
    sink_checked,
    source_checked,
    target_queues,
    topic_names,
    words_to_options,
)
from cometmq.pipelines.replay_plan import MAX_SLICES, Bucket, Plan, Progress, Slice, slices_of
from cometmq.pipelines.running import Outcome, PipelineFailed, Tell, reason_of, to_stderr
from cometmq.spark.plan import nested
from cometmq.spark.source_options import time_ms

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FAST = "fast"
STEP_MS = 1000
"""With a pace: so much time of the clock goes into one slice, at least."""
MERGED_FROM = 1000
"""Without one: so many stretches of time, neighbours of which make a slice."""
WAITS_S = (0.0, 0.2, 1.0, 3.0, 10.0, 30.0)
"""How long a compaction of the lake is waited for: a swap is a few renames."""
_PACE = re.compile(r"(\d+(?:\.\d+)?)x")
_TOPIC = "{topic}"
T = TypeVar("T")


def replay(
    spark: SparkSession,
    *,
    namesrv: str,
    to_topic: str,
    checkpoint: str,
    lake: str | None = None,
    topic: str | None = None,
    begin: str | None = None,
    end: str | None = None,
    where: str | None = None,
    pace: str = FAST,
    order: Order = "queue",
    queues: int | None = None,
    from_namesrv: str | None = None,
    rows_per_batch: int = 200_000,
    bad_records: str | None = None,
    access: str | None = None,
    from_access: str | None = None,
    source_options: list[str] | None = None,
    sink_options: list[str] | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Send what a lake or a topic has of a span of time into a topic again, in order, once.

    From the `lake` of `archive`, where `topic` (names, separated by commas) chooses some;
    or without `lake` from `topic` itself. `begin` and `end` (not included) are store times: ISO
    8601 or milliseconds. `where` is a condition in SQL on the lake's (or source's) columns. `pace`:
    fast, original, or a factor of it such as 2x or 0.5x, by store time, in steps of a second.
    `order` says what stays in order, as in mirror. `{topic}` in `to_topic` stands for the topic
    that a message comes from. Run again with the same checkpoint it goes on where it ended.
    `access`: a file with ACL keys and TLS settings; `from_access`: the one of `from_namesrv`.
    """
    factor = _factor(pace)
    home = from_namesrv or namesrv
    keys = access_options(access)
    source = other_access(from_access, keys, "FROM", home != namesrv)
    source |= words_to_options(source_options, "source_options")
    sink = keys | words_to_options(sink_options, "sink_options")
    check_order(order, source)
    topics = _topics(lake, topic)
    span = _span(begin, end)
    itself = [one for one in topics if to_topic.replace(_TOPIC, one) == one]
    if lake is None and home == namesrv and itself:
        raise UsageError(
            f"replay: {itself[0]!r} would be replayed into itself, where its consumers can't tell "
            "copies from originals: use another topic"
        )
    write = sink_checked(
        {
            "namesrv": namesrv,
            "dropReservedProperties": "true",
            **({} if _TOPIC in to_topic else {"topic": to_topic}),
            **({"badRecordsPath": bad_records} if bad_records else {}),
            **sink,
        }
    )
    reading: _Lake | _Topics
    if lake is not None:
        reading = _Lake(spark, lake, topics, span, where)
    else:
        read = {"namesrv": home, **source}
        source_checked({**read, "topic": ",".join(topics)}, streaming=False)
        reading = _Topics(spark, read, topics, span, where)
    settings = {
        "from": lake or home,
        "topic": ",".join(topics),
        "begin": str(span[0]),
        "end": str(span[1]),
        "where": where or "",
        "to": f"{to_topic} at {namesrv}",
        "order": order,
    }
    progress = Progress(Files(spark, checkpoint))
    former = progress.plan(settings)
    if former is None:
        tell("replay: planning")
        plan = reading.steadily(
            lambda: _make_plan(spark, reading, settings, factor, rows_per_batch), tell
        )
    else:
        plan = former
    named = sorted({queue.topic for one in plan.slices for queue, _, _ in one.spans()})
    targets = {
        name: target_queues(namesrv, sink, to_topic.replace(_TOPIC, name), queues)
        for name in (named if _TOPIC in to_topic else [""])
        if plan.slices
    }
    # Kept when there is something to send and a target for it: what was mistyped before that must
    # not bind the checkpoint.
    if former is None and plan.slices:
        writer_of(spark, checkpoint)
        progress.keep(plan)
    write = {"writerId": f"replay-{writer_of(spark, checkpoint)}", **write}

    def send(one: Slice, number: int) -> None:
        reading.steadily(lambda: send_once(one, number), tell)

    def send_once(one: Slice, number: int) -> None:
        rows = reading.slice(one, plan.tasks)
        if isinstance(reading, _Lake):
            count = rows.count()
            reading.check()
            progress.begin(number, count)
        copies = _copies(rows, order, targets, to_topic)
        options = {**write, "batchId": str(number)}
        copies.write.format("rocketmq").options(**options).mode("append").save()
        progress.done(number)

    if not plan.slices:
        tell(f"replay: nothing to send: {lake or home} has no such messages ({_what(settings)})")
    outcome = _run(plan, progress.next(), factor, send, tell, stop or threading.Event())
    outcome.figures |= {"into": to_topic, "pace": pace, "planned": plan.rows}
    return outcome


def _what(settings: dict[str, str]) -> str:
    chosen = {name: settings[name] for name in ("topic", "begin", "end", "where")}
    return ", ".join(f"{name} {text}" for name, text in chosen.items() if text not in ("", "None"))


def _copies(
    rows: DataFrame,
    order: Order,
    targets: dict[str, tuple[MessageQueue, ...]],
    to_topic: str,
) -> DataFrame:
    from pyspark.sql import functions as f

    if _TOPIC not in to_topic:
        queues = targets.get("", ())
        return as_copies(rows, order=order, queues=queues, with_requests=False)
    column = f.replace(f.lit(to_topic), f.lit(_TOPIC), f.col("topic"))
    # Topics may differ in their queues: those that all of them have keep to the promise.
    places = [{(one.broker, one.queue_id) for one in found} for found in targets.values()]
    common = set.intersection(*places) if places else set()
    if order == "queue" and not common:
        raise UsageError("replay: the target topics have no queue in common: use another order")
    queues = tuple(MessageQueue("", broker, number) for broker, number in sorted(common))
    return as_copies(rows, order=order, queues=queues, with_requests=False, to_topic=column)


def _run(
    plan: Plan,
    first: int,
    factor: float | None,
    send: Callable[[Slice, int], None],
    tell: Tell,
    stop: threading.Event,
) -> Outcome:
    """Slice after slice, each when its time has come."""
    outcome = Outcome("replay")
    began = time.monotonic()
    if first:
        tell(f"replay: {first} of {len(plan.slices)} slices were sent before")
    late_s = 0.0
    for number in range(first, len(plan.slices)):
        one = plan.slices[number]
        if factor is not None:
            due_s = began + (one.first_ms - plan.slices[first].first_ms) / 1000 / factor
            stop.wait(max(0.0, due_s - time.monotonic()))
            late_s = max(late_s, time.monotonic() - due_s)
        if stop.is_set():
            outcome.is_stopped = True
            break
        step_s = time.monotonic()
        try:
            send(one, number)
        except (UsageError, PipelineFailed):
            raise
        except Exception as error:
            raise PipelineFailed(f"replay: slice {number}: {reason_of(error)}") from error
        outcome.rows += one.rows
        outcome.batches += 1
        took_s = max(time.monotonic() - step_s, 0.001)
        tell(
            f"replay: slice {number + 1} of {len(plan.slices)}  {one.rows:,} rows  "
            f"{one.rows / took_s:,.0f} rows/s  total {outcome.rows:,}"
        )
    outcome.seconds = time.monotonic() - began
    if factor is not None:
        outcome.figures["behind the pace"] = f"{late_s:.1f} s at most"
    return outcome


# ---------------------------------------------------------------------------------------- settings


def _factor(pace: str) -> float | None:
    """How much faster than it was; None as fast as possible."""
    word = pace.strip().lower()
    if word == FAST:
        return None
    found = _PACE.fullmatch("1x" if word == "original" else word)
    if found is None or not 0.001 <= float(found[1]) <= 1_000_000:
        raise UsageError(f"pace {pace!r}: write fast, original, or a factor such as 2x or 0.5x")
    return float(found[1])


def _topics(lake: str | None, topic: str | None) -> tuple[str, ...]:
    if topic is None:
        if lake is None:
            raise UsageError("replay needs lake (a Parquet lake of archive) or topic, or both")
        return ()
    return topic_names(topic)


def _span(begin: str | None, end: str | None) -> tuple[int | None, int | None]:
    found: list[int | None] = []
    for name, text in (("begin", begin), ("end", end)):
        try:
            found.append(None if text is None else time_ms(text))
        except ValueError as error:
            raise UsageError(f"{name} {text!r} {error}") from None
    low, high = found
    if low is not None and high is not None and low >= high:
        raise UsageError(f"begin {begin} is not before end {end}")
    return low, high


# -------------------------------------------------------------------------------------------- plan


def _make_plan(
    spark: SparkSession,
    reading: _Lake | _Topics,
    settings: dict[str, str],
    factor: float | None,
    rows_per_batch: int,
) -> Plan:
    from pyspark.sql import functions as f

    rows = reading.whole()
    stored = f.unix_millis("store_time")
    low, high = rows.agg(f.min(stored), f.max(stored)).collect()[0]
    tasks = max(2, spark.sparkContext.defaultParallelism)
    if low is None:
        return Plan(settings, tasks, [])
    if factor is None:
        step_ms, at_least = max(1, (high - low) // MERGED_FROM), rows_per_batch
    else:
        step_ms, at_least = max(1, int(STEP_MS * factor), (high - low) // (MAX_SLICES - 1)), 1
    buckets = _buckets(rows, f.floor((stored - low) / step_ms).cast("bigint"), stored)
    return Plan(settings, tasks, slices_of(buckets, at_least))


def _buckets(rows: DataFrame, number: Column, stored: Column) -> list[Bucket]:
    from pyspark.sql import functions as f

    date = f.col("date") if "date" in rows.columns else f.lit("")
    counted = rows.groupBy(number.alias("n"), "topic", "broker", "queue_id").agg(
        f.min(stored).alias("first_ms"),
        f.min("queue_offset").alias("low"),
        f.max("queue_offset").alias("high"),
        f.count("*").alias("rows"),
        f.min(date).alias("first_date"),
        f.max(date).alias("last_date"),
    )
    return [
        Bucket(
            one.n,
            MessageQueue(one.topic, one.broker, one.queue_id),
            one.first_ms,
            one.low,
            one.high,
            one.rows,
            (one.first_date, one.last_date),
        )
        for one in counted.toLocalIterator()
    ]


class _Chosen:
    """Rows of a span of time that a condition picks."""

    def __init__(self, span: tuple[int | None, int | None], where: str | None) -> None:
        self._span, self._where = span, where

    def _choose(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        low, high = self._span
        if low is not None:
            rows = rows.filter(f.col("store_time") >= f.timestamp_millis(f.lit(low)))
        if high is not None:
            rows = rows.filter(f.col("store_time") < f.timestamp_millis(f.lit(high)))
        return rows if self._where is None else rows.filter(self._where)


class _Changed(Exception):
    """A compaction came between."""


class _Lake(_Chosen):
    """A lake that `archive` wrote, and that `compact` may be at."""

    def __init__(
        self,
        spark: SparkSession,
        path: str,
        topics: tuple[str, ...],
        span: tuple[int | None, int | None],
        where: str | None,
    ) -> None:
        super().__init__(span, where)
        self._spark, self._path, self._topics = spark, path, topics
        self._files = Files(spark, path)
        self._state: str | None = ""
        if not self._files.exists(""):
            raise UsageError(f"there is no lake at {path}")
        self._kind = table_kind(self._files)

    def steadily(self, work: Callable[[], T], tell: Tell) -> T:
        """Do it with a lake whose files stay where they are while it lists them: in the middle of
        a swap a part of an hour is in no folder, and would be left out without a word."""
        for wait_s in WAITS_S:
            time.sleep(wait_s)
            self._state = state_of(self._files)
            if self._state is None:
                tell(f"replay: a compaction is at {self._path}: waiting for it")
                continue
            try:
                made = work()
                self.check()
            except Exception:
                if state_of(self._files) == self._state:
                    raise
                continue
            return made
        raise PipelineFailed(
            f"replay: {self._path} is being compacted all the time, or a compaction was cut off: "
            "end it (cometmq pipeline run compact), then run this again"
        )

    def check(self) -> None:
        """Whether all that was listed since is whole."""
        if state_of(self._files) != self._state:
            raise _Changed

    def whole(self) -> DataFrame:
        from pyspark.sql import functions as f

        rows = self._choose(self._read())
        return rows.filter(f.col("topic").isin(*self._topics)) if self._topics else rows

    def _read(self) -> DataFrame:
        reader = self._spark.read.schema(SCHEMA)
        if self._kind is None:
            return reader.parquet(self._path)
        files = live_files(self._kind, self._path)
        if not files:
            return self._spark.createDataFrame([], SCHEMA)
        if self._kind == "Delta":
            # What its rows are partitioned by is in the names of folders only.
            reader = reader.option("basePath", self._path)
        return reader.parquet(*files)

    def slice(self, one: Slice, tasks: int) -> DataFrame:
        """In the same tasks and in the same order whenever it is read."""
        from functools import reduce

        from pyspark.sql import functions as f

        place = ("topic", "broker", "queue_id")
        offset = f.col("queue_offset")
        chosen = [
            (f.col("topic") == queue.topic)
            & (f.col("broker") == queue.broker)
            & (f.col("queue_id") == queue.queue_id)
            & (offset >= begin)
            & (offset < end)
            for queue, begin, end in one.spans()
        ]
        rows = self.whole().filter(f.col("date").between(*one.dates))
        rows = rows.filter(reduce(lambda left, right: left | right, chosen)).select(*COLUMNS)
        return rows.repartition(tasks, *place).sortWithinPartitions(*place, "queue_offset")


class _Topics(_Chosen):
    """Topics of a cluster, as they are when the replay is planned."""

    def __init__(
        self,
        spark: SparkSession,
        options: dict[str, str],
        topics: tuple[str, ...],
        span: tuple[int | None, int | None],
        where: str | None,
    ) -> None:
        super().__init__(span, where)
        self._spark, self._options, self._topics = spark, options, topics

    def steadily(self, work: Callable[[], T], tell: Tell) -> T:
        """Offsets stay where they are."""
        return work()

    def whole(self) -> DataFrame:
        low, high = self._span
        bounds = {
            **({"startingTimestamp": str(low)} if low is not None else {}),
            **({"endingTimestamp": str(high)} if high is not None else {}),
        }
        # A condition may be on any column; without one the places and times are enough.
        columns = None if self._where else "topic,broker,queue_id,queue_offset,store_time"
        options = {
            **self._options,
            **bounds,
            "topic": ",".join(self._topics),
            **({"columns": columns} if columns else {}),
        }
        return self._choose(self._spark.read.format("rocketmq").options(**options).load())

    def slice(self, one: Slice, tasks: int) -> DataFrame:
        """A queue's range is read by one task, in order."""
        import json

        spans = one.spans()
        assign: dict[str, dict[str, list[int]]] = {}
        for queue, _, _ in spans:
            assign.setdefault(queue.topic, {}).setdefault(queue.broker, []).append(queue.queue_id)
        options = {
            **self._options,
            "assign": json.dumps(assign),
            "startingOffsets": json.dumps(nested({queue: begin for queue, begin, _ in spans})),
            "endingOffsets": json.dumps(nested({queue: end for queue, _, end in spans})),
        }
        rows = self._choose(self._spark.read.format("rocketmq").options(**options).load())
        return rows.select(*COLUMNS)
