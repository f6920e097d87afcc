"""The sink: `df.write` and `df.writeStream` with `.format("rocketmq")`.

Owns: what Spark calls, and who a task is to the brokers. One rule: a message of a micro-batch is
stored once in a CometMQ topic, however often its task, its worker or the driver is killed and run
again; in Apache RocketMQ it is stored at least once, always with the same unique key.

Who writes what (see sink_task.py for the numbers, sink_place.py for the queues):

    writeStream                         query id (+ writerId), batch id of the query, partition
    write in foreachBatch, writerId     the same; without writerId as below
    write with writerId and batchId     writerId, batchId, partition: a job that is run again
    write                               an id made for this job: its tasks may be run again; when
                                        it has ended, the brokers are told (sink_end.py)

What must hold: the rows of a task that is run again are the same, in the same order and in the
same partition. Sources with offsets (ours, Kafka's, files) and row by row work on them give that.
A shuffle does not promise an order: sort within partitions after it (`sortWithinPartitions` by
columns that tell rows apart), and leave spark.sql.shuffle.partitions as it is while a batch is
unfinished.
If the queues that can be written change between two attempts (a topic is expanded, a broker goes),
the second attempt writes under another producer id: nothing is lost, and what the first attempt had
written of that one batch is there twice, with equal unique keys.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from cometmq.errors import UsageError
from cometmq.spark import sink_bad
from cometmq.spark.sink_columns import check_schema
from cometmq.spark.sink_end import end_job
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.sink_send import TaskSender
from cometmq.spark.sink_task import Identity, Task
from cometmq.spark.worker import get_ready

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger("cometmq.spark")

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"


@dataclass
class SinkCommit(WriterCommitMessage):
    """What one task has written."""

    writer: str
    batch: int
    partition: int
    messages: int
    duplicates: int
    bytes: int
    refusals: int
    is_sequenced: bool
    bad: int
    bad_file: sink_bad.BadFile | None
    topics: tuple[str, ...]


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    return BatchWriter(*_checked(options, schema, overwrite))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    read, fields = _checked(options, schema, overwrite)
    if read.batch_id is not None:
        raise UsageError("batchId is for df.write: a streaming query has its own batch ids")
    return StreamWriter(read, fields)


def _checked(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> tuple[SinkOptions, list[str]]:
    if overwrite:
        raise UsageError(
            "the rocketmq sink appends: a topic can't be overwritten. Use mode('append') with "
            "df.write, and the output mode append with writeStream"
        )
    read = SinkOptions.read(options)
    if read.bad_records_path is not None:
        sink_bad.place(read.bad_records_path)
    return read, check_schema(schema, read)


class _Writer:
    """What both kinds of writer do; pickled to every task."""

    def __init__(self, options: SinkOptions, fields: list[str]) -> None:
        self._options = options
        self._fields = fields

    def _write(self, identity: Identity, rows: Iterator[pa.RecordBatch]) -> SinkCommit:
        get_ready()
        task = Task(self._options, self._fields, identity, TaskSender.open(self._options))
        totals, file, bad = task.write(rows)
        return SinkCommit(
            identity.writer,
            identity.batch,
            identity.partition,
            totals.messages,
            totals.duplicates,
            totals.bytes,
            totals.refusals,
            totals.is_sequenced,
            bad,
            file,
            task.topics,
        )

    def _commit(self, messages: list[WriterCommitMessage | None]) -> None:
        get_ready()
        done = [one for one in messages if isinstance(one, SinkCommit)]
        path = self._options.bad_records_path
        if path is not None and done:
            sink_bad.publish(path, [one.bad_file for one in done if one.bad_file is not None])
            sink_bad.sweep(path, done[0].writer, done[0].batch)
        written, known = sum(one.messages for one in done), sum(one.duplicates for one in done)
        log.info(
            "sink_committed writer=%s batch=%s tasks=%d messages=%d duplicates=%d bytes=%d bad=%d "
            "sent_again=%d",
            done[0].writer if done else "",
            done[0].batch if done else "",
            len(done),
            written,
            known,
            sum(one.bytes for one in done),
            sum(one.bad for one in done),
            sum(one.refusals for one in done),
        )
        if not all(one.is_sequenced for one in done):
            log.info(
                "sink_at_least_once reason=a broker does not number messages (Apache RocketMQ)"
            )

    def _abort(self, messages: list[WriterCommitMessage | None]) -> None:
        path = self._options.bad_records_path
        done = [one for one in messages if isinstance(one, SinkCommit)]
        if path is not None:
            sink_bad.drop(path, [one.bad_file for one in done if one.bad_file is not None])
        log.warning("sink_aborted finished_tasks=%d of %d", len(done), len(messages))


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Of one micro-batch."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommit:
        context = _context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not batch:
            raise UsageError(
                f"Spark does not say which micro-batch this is ({QUERY_ID}={query!r}, "
                f"{BATCH_ID}={batch!r}): without it nothing can be written exactly once"
            )
        writer = f"{query}.{self._options.writer_id}" if self._options.writer_id else query
        return self._write(_identity(context, writer, int(batch)), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._abort(messages)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Of one job. Made on the driver, so that all tasks share the id of the job."""

    def __init__(self, options: SinkOptions, fields: list[str]) -> None:
        super().__init__(options, fields)
        self._job = f"job-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommit:
        context = _context()
        own, batch = self._options.writer_id, self._options.batch_id
        if own is None:
            return self._write(_identity(context, self._job, 0), iterator)
        if batch is not None:
            return self._write(_identity(context, own, batch), iterator)
        query, current = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not current:
            raise UsageError(
                "writerId makes a write that is run again the same write: outside foreachBatch it "
                "needs the option batchId too, which must grow from run to run"
            )
        return self._write(_identity(context, f"{query}.{own}", int(current)), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages)
        self._end(messages, ())

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)
        # Of a task that failed nobody knows where its rows went, but for the option.
        self._end(messages, filter(None, [self._options.topic]))

    def _end(self, messages: list[WriterCommitMessage | None], more: Iterable[str]) -> None:
        if self._options.writer_id is not None:
            return  # it may come again
        done = [one for one in messages if isinstance(one, SinkCommit)]
        if done and not any(one.is_sequenced for one in done):
            return
        end_job(self._options, self._job, {*more, *(topic for one in done for topic in one.topics)})


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise UsageError("the sink writes inside a Spark task only")
    return context


def _identity(context: TaskContext, writer: str, batch: int) -> Identity:
    return Identity(writer, batch, context.partitionId(), context.taskAttemptId())
