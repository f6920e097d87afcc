"""Where a pipeline's rows go: a topic, a lake, the terminal.

Owns: one way to start a stream into any of them. One rule: every lake is written exactly once per
batch; what each format costs and promises stands in docs/spark.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cometmq.errors import UsageError
from cometmq.pipelines.files import Files
from cometmq.pipelines.lake import ParquetLake, writer_of
from cometmq.pipelines.outbox import Outbox, is_row_by_row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

AVAILABLE_NOW = "available-now"
_LENGTH = re.compile(
    r"(interval\s+)?(\d+\s*(microsecond|millisecond|second|minute|hour|day|week)s?\s*)+",
    re.IGNORECASE,
)
_INTERVAL = re.compile(r"\d+\s+(milliseconds?|seconds?|minutes?|hours?)", re.IGNORECASE)


class Lake(Protocol):
    """What every format has."""

    path: str
    files_written: int

    def write(self, rows: DataFrame, batch_id: int) -> int:
        """Publish a batch; 0 if it had been published before."""
        ...


def start_to(
    spark: SparkSession,
    frame: DataFrame,
    *,
    format: str,
    checkpoint: str,
    name: str,
    path: str | None = None,
    partition_by: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    mode: str = "append",
    trigger: str = AVAILABLE_NOW,
) -> DataStreamWriter:
    """A stream that is ready to start."""
    writer = frame.writeStream.queryName(name).option("checkpointLocation", checkpoint)
    writer = with_trigger(writer.outputMode(mode), trigger)
    for key, value in (options or {}).items():
        writer = writer.option(key, value)
    if format == "rocketmq" and not is_row_by_row(frame):
        return writer.foreachBatch(Outbox(spark, checkpoint, options or {}).write)
    if format in ("rocketmq", "console"):
        return writer.format(format)
    if path is None:
        raise UsageError(f"a lake of format {format} needs a path")
    lake = open_lake(spark, format, path, checkpoint, partition_by, options)

    def write(rows: DataFrame, batch_id: int) -> None:
        lake.write(rows, batch_id)

    return writer.foreachBatch(write)


def open_lake(
    spark: SparkSession,
    format: str,
    path: str,
    checkpoint: str,
    partition_by: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> Lake:
    """The lake of a format, with the hand of the stream that has this checkpoint. `options`: of
    Spark's Parquet writer (compression)."""
    check_partitions(format, partition_by)
    from cometmq.pipelines.lake_tables import DeltaLake, IcebergLake, check_kind, is_on_this_machine

    if format == "parquet" or (is_on_this_machine(path) and not path.startswith("catalog:")):
        check_kind(Files(spark, path), format)
    if format == "parquet":
        return ParquetLake(spark, path, writer_of(spark, checkpoint), partition_by, options)
    if format in ("delta", "iceberg"):
        kind = DeltaLake if format == "delta" else IcebergLake
        return kind(path, writer_of(spark, checkpoint), partition_by)
    raise UsageError(f"unknown lake format {format!r}: it is parquet, delta or iceberg")


def check_partitions(format: str, columns: Sequence[str]) -> None:
    """UsageError for a column whose folders no reader would look into."""
    hidden = [name for name in columns if name.startswith(("_", "."))]
    if format == "parquet" and hidden:
        raise UsageError(
            f"partition_by {hidden[0]!r}: readers of Parquet pass over folders that begin with _ "
            "or a dot, with all rows in them: name the column otherwise (SELECT ... AS)"
        )


def with_trigger(writer: DataStreamWriter, trigger: str) -> DataStreamWriter:
    """`available-now`, or an interval such as `10 seconds`."""
    text = checked_trigger(trigger)
    if text == AVAILABLE_NOW:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=text)


def checked_trigger(trigger: str) -> str:
    """As Spark takes it; UsageError if it is neither of the two kinds."""
    text = trigger.strip().lower()
    if text != AVAILABLE_NOW and not _INTERVAL.fullmatch(text):
        raise UsageError(
            f"trigger {trigger!r}: write {AVAILABLE_NOW!r} (what is there, then end) or an "
            "interval such as '10 seconds'"
        )
    return text


def checked_length(name: str, text: str, *, above_zero: bool = False) -> str:
    """A length of time as it is; UsageError if it is none."""
    is_zero = not re.search("[1-9]", text)
    if not _LENGTH.fullmatch(text.strip()) or (is_zero and above_zero):
        raise UsageError(f"{name} {text!r}: write a length of time such as '10 minutes'")
    return text
