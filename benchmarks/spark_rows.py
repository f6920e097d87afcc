"""What to measure the connector by: the same without Arrow, and the least that Spark takes.

Owns: the formats `rocketmq-rows`, `rocketmq-lazy-rows` and `floor`. One rule: the first two ask
brokers for the same bytes by the same pulls and send as many messages in a request; only what
happens to each message between broker and Spark is done the plain way, one after the other in
Python. `floor` asks nobody: a stream of rows that are made on the spot, and a sink that drops what
it gets.

`rocketmq-rows` reads each record whole, as the plain codec does; `rocketmq-lazy-rows` with our
client's messages, which leave alone what nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import Row, StructType

from cometmq import Message, Producer
from cometmq.client.compression import decompress
from cometmq.client.reading import Filter
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.spark.batch import QueueRanges, make_reader
from cometmq.spark.gather import joined
from cometmq.spark.read import RangeReader, Round
from cometmq.spark.schema import schema_of
from cometmq.spark.source_options import SourceOptions
from cometmq.wire import properties as props
from cometmq.wire import record
from cometmq.wire.message_id import offset_id

IN_ONE = 1000  # messages in a request, as the sink's batchMessages


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


LAZY = {
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


def lazy_rows(body: bytes, broker: str, end: int, names: list[str]) -> Iterator[tuple[Any, ...]]:
    fields = [LAZY[name] for name in names]
    message: ReceivedMessage
    for message in read_all(body, broker):
        if message.queue_offset < end:
            yield tuple(field(message) for field in fields)


WHOLE = {
    "topic": lambda m, p, broker: m.topic,
    "broker": lambda m, p, broker: broker,
    "queue_id": lambda m, p, broker: m.queue_id,
    "queue_offset": lambda m, p, broker: m.queue_offset,
    "keys": lambda m, p, broker: p.get("KEYS"),
    "tags": lambda m, p, broker: p.get("TAGS"),
    "body": lambda m, p, broker: decompress(m.body, m.sys_flag) if m.sys_flag & 1 else m.body,
    "born_time": lambda m, p, broker: _time(m.born_ms),
    "store_time": lambda m, p, broker: _time(m.store_ms),
    "reconsume_times": lambda m, p, broker: m.reconsume_times,
    "msg_id": lambda m, p, broker: p.get("UNIQ_KEY") or offset_id(m.store_host, m.log_offset),
}


def whole_rows(body: bytes, broker: str, end: int, names: list[str]) -> Iterator[tuple[Any, ...]]:
    fields = [WHOLE[name] for name in names]
    for message in record.decode_all(body):
        if message.queue_offset < end:
            properties = props.parse(message.properties)
            yield tuple(field(message, properties, broker) for field in fields)


def bodies(done: Round) -> Iterator[tuple[bytes, int]]:
    """Of pulls, with the offset that the messages wanted of it are before."""
    for stretch in done.stretches:
        for number, end in enumerate(stretch.ends.tolist()):
            yield joined([(stretch.data, *stretch.places[2 * number : 2 * number + 2])]), end
    for window in done.windows:
        for piece in window.bodies:
            yield joined([piece]), window.end


class RowReader(DataSourceReader):
    def __init__(self, options: dict[str, str], schema: StructType, is_lazy: bool) -> None:
        self._raw = options
        self._schema = schema
        self._is_lazy = is_lazy

    def partitions(self) -> list[InputPartition]:
        return make_reader(self._raw, self._schema).partitions()

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, QueueRanges)
        options = SourceOptions.parse(self._raw)
        rows = lazy_rows if self._is_lazy else whole_rows
        for one in partition.ranges:
            for done in RangeReader(one, options, Filter()).rounds():
                for body, end in bodies(done):
                    yield from rows(body, one.broker, end, self._schema.names)


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
    is_lazy = False

    @classmethod
    def name(cls) -> str:
        return "rocketmq-rows"

    def _own(self) -> dict[str, str]:
        return dict(self.options.items())

    def schema(self) -> StructType:
        return schema_of(SourceOptions.parse(self._own()).columns)

    def reader(self, schema: StructType) -> RowReader:
        return RowReader(self._own(), schema, self.is_lazy)

    def writer(self, schema: StructType, overwrite: bool) -> RowWriter:
        return RowWriter(self._own())


class LazyRowSource(RowSource):
    is_lazy = True

    @classmethod
    def name(cls) -> str:
        return "rocketmq-lazy-rows"


# -------------------------------------------------------------------------------------------- floor


class FloorReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, batches: int, rows: int) -> None:
        self._batches, self._rows = batches, rows

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - the names are Spark's
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"at": min(start["at"] + 1, self._batches)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["at"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        body = pa.array([b"x" * 128] * self._rows, pa.binary())
        tags = pa.array(["paid"] * self._rows, pa.string())
        yield pa.RecordBatch.from_arrays([body, tags], ["body", "tags"])

    def commit(self, end: dict[str, int]) -> None:
        pass


class FloorWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return Written(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


class Floor(DataSource):
    @classmethod
    def name(cls) -> str:
        return "floor"

    def schema(self) -> str:
        return "body binary, tags string"

    def streamReader(self, schema: StructType) -> FloorReader:  # noqa: N802
        return FloorReader(int(self.options["batches"]), int(self.options["rows"]))

    def streamWriter(self, schema: StructType, overwrite: bool) -> FloorWriter:  # noqa: N802
        return FloorWriter()
