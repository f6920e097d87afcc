"""What the connector would be without Arrow: a source of tuples and a sink of rows, to measure by.

Owns: the format `rocketmq-rows`. One rule: it asks brokers for the same bytes by the same pulls and
sends as many messages in a request; only what happens to each message between broker and Spark is
done the plain way, one after the other in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import Row, StructType

from cometmq import Message, Producer
from cometmq.client.reading import Filter
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.spark.batch import QueueRanges, make_reader
from cometmq.spark.read import RangeReader
from cometmq.spark.schema import schema_of
from cometmq.spark.source_options import SourceOptions

IN_ONE = 1000  # messages in a request, as the sink's batchMessages


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


FIELDS = {
    "topic": lambda m: m.stored_topic,
    "broker": lambda m: m.broker,
    "queue_id": lambda m: m.queue_id,
    "queue_offset": lambda m: m.queue_offset,
    "keys": lambda m: m.properties.get("KEYS"),
    "tags": lambda m: m.tags,
    "body": lambda m: m.body,
    "born_time": lambda m: _time(m.born_ms),
    "store_time": lambda m: _time(m.store_ms),
    "reconsume_times": lambda m: m.reconsume_times,
    "msg_id": lambda m: m.message_id,
}


class RowReader(DataSourceReader):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._raw = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return make_reader(self._raw, self._schema).partitions()

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, QueueRanges)
        options = SourceOptions.parse(self._raw)
        fields = [FIELDS[name] for name in self._schema.names]
        for one in partition.ranges:
            for window in chain.from_iterable(RangeReader(one, options, Filter()).windows()):
                message: ReceivedMessage
                for body in window.bodies:
                    for message in read_all(body, one.broker):
                        if message.queue_offset < window.end:
                            yield tuple(field(message) for field in fields)


@dataclass
class Written(WriterCommitMessage):
    rows: int


class RowWriter(DataSourceWriter):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def write(self, iterator: Iterator[Row]) -> Written:
        topic, count = self._options["topic"], 0
        waiting: list[Message] = []
        with Producer("rows", namesrv=self._options["namesrv"]) as producer:
            for row in iterator:
                body, tags, keys = row.body, row.tags, row.keys
                waiting.append(Message(topic, bytes(body), tags=tags, keys=keys))
                count += 1
                if len(waiting) == IN_ONE:
                    producer.send_batch(waiting)
                    waiting = []
            if waiting:
                producer.send_batch(waiting)
        return Written(count)


class RowSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "rocketmq-rows"

    def _own(self) -> dict[str, str]:
        return dict(self.options.items())

    def schema(self) -> StructType:
        return schema_of(SourceOptions.parse(self._own()).columns)

    def reader(self, schema: StructType) -> RowReader:
        return RowReader(self._own(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> RowWriter:
        return RowWriter(self._own())
