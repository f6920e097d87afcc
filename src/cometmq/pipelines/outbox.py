"""Rows of a stream with state (windows, joins, duplicates dropped) into a topic, exactly once.

Owns: what lies between such a stream and the sink. One rule: a micro-batch is sent from files that
were written once, never from a second computation of it.

The sink writes a message once if a replayed batch has the same rows in the same order. A batch that
went through a shuffle has no order, and of two duplicates a replay may keep the other one; a row
under the number of another would be taken for it, and one of them lost. So the rows are written
down first, numbered, and sent from there.

    <checkpoint>/outbox/<writer>-<batch>-<n>.parquet      the rows of the last batches, with
                                                          _part and _row, which give their order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cometmq.pipelines.files import Files
from cometmq.pipelines.lake import ParquetLake, writer_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SENDERS = 4
"""Tasks that send; the same in every run, whatever the master, as the order hangs on it."""
KEPT_BATCHES = 2
"""Spark replays its last batch only."""
WRITER_ID = "outbox"
_ROW_BY_ROW = frozenset(
    (
        "Project",
        "Filter",
        "SubqueryAlias",
        "View",
        "Generate",
        "EventTimeWatermark",
        "StreamingRelationV2",
        "StreamingRelation",
        "ResolvedHint",
    )
)


def is_row_by_row(frame: DataFrame) -> bool:
    """Whether every row of the stream is made of one row of its source, in the source's order."""
    inner: Any = frame
    to_look = [inner._jdf.queryExecution().analyzed()]
    while to_look:
        plan = to_look.pop()
        if plan.nodeName() not in _ROW_BY_ROW:
            return False
        children = plan.children()
        to_look += [children.apply(at) for at in range(children.size())]
    return True


class Outbox:
    """The files between one stream and its topic."""

    def __init__(
        self,
        spark: SparkSession,
        checkpoint: str,
        options: Mapping[str, str],
        arrange: Callable[[DataFrame], DataFrame] | None = None,
    ) -> None:
        """`arrange` makes the sink's columns of a batch, sorted within partitions as wanted."""
        self._spark = spark
        self._arrange = arrange
        self._options = dict(options)
        self._writer = writer_of(spark, checkpoint)
        path = f"{checkpoint.rstrip('/')}/outbox"
        self._files = Files(spark, path)
        self._lake = ParquetLake(spark, path, self._writer)

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Send a batch; again, it adds what is missing."""
        from pyspark.sql import functions as f

        rows = rows if self._arrange is None else self._arrange(rows)
        order = f.monotonically_increasing_id().alias("_row")
        self._lake.write(rows.select("*", f.spark_partition_id().alias("_part"), order), batch_id)
        files = self._lake.files_of(batch_id)
        if files:
            self._send(files)
        self._forget_before(batch_id - KEPT_BATCHES)

    def _send(self, files: list[str]) -> None:
        from pyspark.sql import functions as f

        found = self._spark.read.parquet(*files)
        in_order = found.repartition(SENDERS, f.col("_part")).sortWithinPartitions("_row")
        writer = in_order.drop("_part", "_row").write.format("rocketmq").mode("append")
        for name, value in (self._options | {"writerId": WRITER_ID}).items():
            writer = writer.option(name, value)
        writer.save()

    def _forget_before(self, batch_id: int) -> None:
        for name in self._files.names(""):
            writer, _, rest = name.partition("-")
            if writer == self._writer and int(rest[:12]) < batch_id:
                self._files.delete(name)
