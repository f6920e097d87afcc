"""The batch reader: topics as they are now, as a DataFrame.

Owns: which offsets a batch read covers. One rule: they are fixed when the read is planned; a
DataFrame that is used twice reads the same offsets again (Spark keeps its plan).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from cometmq.errors import DataLost, UsageError
from cometmq.spark.cluster import Cluster, Look
from cometmq.spark.plan import Positions, Range, partition, text_of
from cometmq.spark.read import PartitionReader
from cometmq.spark.schema import check_schema
from cometmq.spark.source_options import SourceOptions
from cometmq.spark.worker import get_ready

log = logging.getLogger("cometmq.spark")


class QueueRanges(InputPartition):
    """What one Spark task reads."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(tuple(ranges))
        self.ranges = tuple(ranges)


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark expects of a RecordBatch, to the letter."""
    return to_arrow_schema(schema, timezone="UTC")


def make_reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    parsed = SourceOptions.parse(options, streaming=False)
    check_schema(schema, parsed.columns)
    return BatchReader(parsed, arrow_schema(schema))


class BatchReader(DataSourceReader):
    """Plans on the driver, reads on executors."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        get_ready()
        options = self._options
        with Cluster(options) as cluster:
            look = cluster.look()
            if not look.begins and not look.away and not look.gone:
                raise UsageError(_nothing_to_read(options))
            starts = cluster.resolve(options.start, look, what="startingOffsets")
            ends = cluster.resolve(options.end, look, what="endingOffsets")
        ranges = list(planned(options, look, starts, ends))
        found = partition(
            ranges, at_least=options.min_partitions, at_most_rows=options.max_per_partition
        )
        # None at all would be taken for "this source does not plan partitions".
        return [QueueRanges(one) for one in found] or [QueueRanges(())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, QueueRanges)
        return PartitionReader(self._options, self._schema).read(partition.ranges)


def _nothing_to_read(options: SourceOptions) -> str:
    if options.topic_pattern is not None:
        return f"no topic matches topicPattern {options.topic_pattern!r}"
    return f"topic {', '.join(options.topics or ())} has no queue that can be read"


def planned(
    options: SourceOptions, look: Look, starts: Positions, ends: Positions
) -> Iterator[Range]:
    """The ranges, checked against what the queues have; DataLost if something is missing."""
    for queue in sorted(starts):
        low, high = look.begins[queue], look.ends[queue]
        begin, end = starts[queue], ends[queue]
        for option, at in (("startingOffsets", begin), ("endingOffsets", end)):
            if at > high:
                raise UsageError(
                    f"{text_of(queue)} ends at {high}: {option} {at} is behind that (of a group: "
                    "the topic was made anew, or its broker lost its end)"
                )
        if begin < low and begin < end:
            lost = DataLost(
                text_of(queue), begin, min(low, end), f"the queue begins at {low} now (retention)"
            )
            if options.fails_on_loss:
                raise lost
            log.warning("data_lost count=%d reason=%s", min(low, end) - begin, lost.what)
            begin = low
        if begin < end:
            address = look.addresses[queue]
            yield Range(queue.topic, queue.broker, queue.queue_id, begin, end, address)


def with_addresses(ranges: Sequence[Range], look: Look) -> list[Range]:
    return [replace(one, address=look.addresses.get(one.queue, "")) for one in ranges]
