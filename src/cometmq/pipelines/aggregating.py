"""The pipeline `aggregate`: counts and sums over windows of event time, from JSON bodies.

Owns: that pipeline; it builds the spec that examples/pipelines/orders-by-minute.toml writes down.
One rule: a window is told once, when it can't change any more; events that come later than the
watermark allows are counted in the summary.
"""

from __future__ import annotations

import difflib
import re
import threading
from typing import TYPE_CHECKING, Literal

from cometmq.errors import UsageError
from cometmq.pipelines.reaching import access_options, refuse_loop, source_checked
from cometmq.pipelines.running import (
    TIMELESS,
    Outcome,
    Tell,
    explained,
    run_stream,
    to_stderr,
    with_figure,
)
from cometmq.pipelines.sinks import AVAILABLE_NOW, checked_length, checked_trigger, start_to
from cometmq.pipelines.spec import Transform, Watermark, transformed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_OWN = ("window_start", "window_end", "messages")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def aggregate(
    spark: SparkSession,
    *,
    namesrv: str,
    topic: str,
    schema: str,
    checkpoint: str,
    window: str = "1 minute",
    by: list[str] | None = None,
    sums: list[str] | None = None,
    event_time: str = "born_time",
    late: str = "10 minutes",
    to_topic: str | None = None,
    lake: str | None = None,
    format: Literal["parquet", "delta", "iceberg"] = "parquet",
    starting_offsets: str = "earliest",
    trigger: str = AVAILABLE_NOW,
    access: str | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Count messages and sum their fields in windows of time, into a topic or a lake.

    `schema` describes the JSON body ("country string, amount double"); `by` and `sums` name fields
    of it. Rows: window_start, window_end, the fields of `by`, `messages`, `sum_<field>` of each of
    `sums`. A window is written when `late` has passed since the newest event; the newest windows of
    a run stay open for the next one. Into a topic each row is a JSON body whose key is the window's
    start and the fields of `by`. `access`: a file with ACL keys and TLS settings.
    """
    if (to_topic is None) == (lake is None):
        raise UsageError("aggregate writes to to_topic or to lake: give one")
    refuse_loop("aggregate", topic, to_topic)
    checked_trigger(trigger)
    checked_length("window", window, above_zero=True)
    checked_length("late", late)
    cluster = {"namesrv": namesrv, **access_options(access)}
    read = source_checked({**cluster, "topic": topic, "startingOffsets": starting_offsets})
    name = f"aggregate-{topic}"
    from pyspark.sql import functions as f

    with explained(name):
        rows = spark.readStream.format("rocketmq").options(**read).load()
        what = Transform(json=schema, watermark=Watermark(event_time, late))
        timed = with_figure(
            transformed(spark, rows, what), TIMELESS, f.count_if(f.col(event_time).isNull())
        )
        counted = _counted(timed, event_time, window, by or [], sums or [])
        writer = _writer(
            spark, counted, name, cluster, by or [], to_topic, lake, format, checkpoint, trigger
        )
    return run_stream(name, writer, tell=tell, stop=stop)


def _writer(
    spark: SparkSession,
    counted: DataFrame,
    name: str,
    cluster: dict[str, str],
    by: list[str],
    to_topic: str | None,
    lake: str | None,
    format: str,
    checkpoint: str,
    trigger: str,
) -> DataStreamWriter:
    if to_topic is not None:
        return start_to(
            spark,
            _as_messages(counted, by),
            format="rocketmq",
            options={**cluster, "topic": to_topic},
            checkpoint=checkpoint,
            trigger=trigger,
            name=name,
        )
    return start_to(
        spark,
        counted,
        format=format,
        path=lake,
        checkpoint=checkpoint,
        trigger=trigger,
        name=name,
    )


def _check_fields(rows: DataFrame, by: list[str], sums: list[str]) -> None:
    from pyspark.sql.types import NumericType

    for name in (*by, *sums):
        if not _NAME.fullmatch(name) or name not in rows.columns:
            near = difflib.get_close_matches(name, rows.columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"aggregate: the schema has no field {name!r}{hint}")
        if name in by and name in _OWN:
            raise UsageError(f"aggregate: by {name!r}: the rows have a column of that name already")
        kind = rows.schema[name].dataType
        if name in sums and not isinstance(kind, NumericType):
            # Spark would cast, and fail at the first text that is no number, again and again.
            raise UsageError(
                f"aggregate: sums {name!r}: its kind is {kind.simpleString()}, and only numbers "
                f"can be summed: say so in the schema ({name} double)"
            )


def _counted(
    rows: DataFrame, event_time: str, window: str, by: list[str], sums: list[str]
) -> DataFrame:
    from pyspark.sql import functions as f

    _check_fields(rows, by, sums)
    totals = [f.sum(name).alias(f"sum_{name}") for name in sums]
    grouped = rows.groupBy(f.window(event_time, window), *by)
    return grouped.agg(f.count("*").alias("messages"), *totals).select(
        f.col("window.start").alias("window_start"),
        f.col("window.end").alias("window_end"),
        *by,
        "messages",
        *(f"sum_{name}" for name in sums),
    )


def _as_messages(counted: DataFrame, by: list[str]) -> DataFrame:
    from pyspark.sql import functions as f

    # By arithmetic: functions of dates follow the session's time zone, in which an hour of autumn
    # comes twice.
    seconds = f.unix_seconds("window_start")
    day = f.date_add(f.lit("1970-01-01").cast("date"), f.floor(seconds / 86400).cast("int"))
    rest = f.pmod(seconds, f.lit(86400))
    clock = f.floor(rest / 3600) * 10000 + f.floor(rest / 60) % 60 * 100 + rest % 60
    time = f.lpad(clock.cast("bigint").cast("string"), 6, "0")
    start = f.concat_ws("T", f.regexp_replace(day.cast("string"), "-", ""), time)
    parts = [f.regexp_replace(f.col(name).cast("string"), r"\s", "_") for name in by]
    key = f.concat_ws("-", start, *parts)
    return counted.select(
        f.to_json(f.struct(*counted.columns)).alias("body"),
        key.alias("keys"),
        key.alias("sharding_key"),
    )
