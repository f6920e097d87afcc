"""The stream reader: topics as they grow, micro-batch by micro-batch.

Owns: what the next micro-batch covers, and what is told to Spark and to the consumer group about
it. One rule: where a queue begins is decided once, and is in the checkpoint before anything of it
is read; so a batch that is repeated reads the same messages, and nothing falls between two.

    start       latestOffset resolves it and puts it into the end offset of the first batch, as
                "from": Spark asks for the initial offset again when the first batch is replayed,
                and "latest" would then be another
    new queue   begins at its first message, "from" in the end offset of the batch that found it
    loss        a queue that begins behind us, ends before us or is gone: DataLost, or a warning
                and a count in the offset ("lost") with failOnDataLoss=false
    away        a broker that does not answer keeps its offsets; the others go on. Without a name
                server the queues that are known go on

Spark hands `latestOffset` the offset up to which all batches have ended. That is when it is
committed to the consumer group: after every batch, the last of an availableNow run included, and
not for a batch that is still under way. (A query that is stopped commits its last batch when it is
started again; Trigger.Once likewise.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cometmq.errors import CometError, DataLost, UsageError
from cometmq.message import MessageQueue
from cometmq.spark.batch import QueueRanges, arrow_schema, with_addresses
from cometmq.spark.cluster import Cluster, Look
from cometmq.spark.plan import (
    Positions,
    StreamOffset,
    initial,
    is_initial,
    nested,
    partition,
    ranges_between,
    share,
    text_of,
)
from cometmq.spark.read import PartitionReader
from cometmq.spark.schema import check_schema
from cometmq.spark.source_options import SourceOptions

log = logging.getLogger("cometmq.spark")


def make_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    try:
        parsed = SourceOptions.parse(options, streaming=True)
        check_schema(schema, parsed.columns)
    except CometError as error:
        # PySpark shows what is raised here only behind an error of its own making.
        return RefusedReader(error)
    return StreamReader(parsed, arrow_schema(schema))


class RefusedReader(DataSourceStreamReader):
    """Says what is wrong with the query, when Spark asks its first question."""

    def __init__(self, error: CometError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[Any]:
        raise self._error


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives on the driver for as long as the query; `read` runs on executors, on a copy."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._cluster = Cluster(options)
        self._look = Look()
        self._target: Positions | None = None
        """With availableNow: where the queues ended when the run began."""
        self._batch_at: float | None = None
        self._committed: Positions = {}
        self._told: set[str] = set()

    def __getstate__(self) -> tuple[SourceOptions, pa.Schema]:
        return self._options, self._schema  # connections stay here

    def __setstate__(self, state: tuple[SourceOptions, pa.Schema]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    # ------------------------------------------------------------------------------------- offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - the names are Spark's
        return initial(self._options.start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """One of the limits, as Spark has no way to say several; latestOffset keeps to all."""
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._look = self._cluster.look(())
        self._target = dict(self._look.ends)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        if is_initial(start):
            return self._first(limit)
        before = StreamOffset.from_json(start)
        self._commit_to_group(before.positions)
        former, self._look = self._look, self._cluster.look(before.positions)
        look = self._look
        begins, lost = self._begins(before, look, former)
        ends = {queue: self._end_of(queue) for queue in begins}
        after = self._limited(begins, ends, limit)
        if after is None:
            return start
        # Queues that are away, or whose messages all are read, keep their place.
        positions = before.positions | after
        changed = {
            queue: begin for queue, begin in begins.items() if before.positions.get(queue) != begin
        }
        for queue in look.gone:
            positions.pop(queue, None)
        if positions == before.positions and not changed:
            return start
        self._batch_at = time.monotonic()
        return StreamOffset(positions, changed, before.lost + lost).to_json()

    def _first(self, limit: ReadLimit) -> dict[str, Any]:
        """The start, resolved: all queues, each with where it begins."""
        self._look = look = self._cluster.look()
        options = self._options
        if not look.begins and not look.away and not look.gone and options.topic_pattern is None:
            raise UsageError(f"topic {options.topics} has no queue that can be read")
        begins = self._cluster.resolve(options.start, look, what="startingOffsets")
        lost = 0
        for queue in sorted(begins):
            low, high, begin = look.begins[queue], look.ends[queue], begins[queue]
            if begin > high:
                what = f"{text_of(queue)} ends at {high}"
                raise UsageError(f"{what}: it can't begin at {begin} (startingOffsets)")
            if begin < low:
                lost += self._lose(queue, begin, low, f"the queue begins at {low} now")
                begins[queue] = low
        ends = {queue: max(begin, self._end_of(queue)) for queue, begin in begins.items()}
        after = self._limited(begins, ends, limit, may_wait=False) or {}
        self._batch_at = time.monotonic()
        return StreamOffset(begins | after, begins, lost).to_json()

    def _begins(self, before: StreamOffset, look: Look, former: Look) -> tuple[Positions, int]:
        """Where the next batch begins with each queue that answers, and how much is lost."""
        lost = 0
        found: Positions = {}
        if look.stale:
            self._tell_once(f"name_server_away reason={look.stale} action=go on with known queues")
        for queue, why in sorted(look.away.items()):
            self._tell_once(f"broker_away queue={text_of(queue)} reason={why}")
        for queue, why in sorted(look.gone.items()):
            if queue in before.positions:
                at = before.positions[queue]
                # How much was unread is known only as far as we saw it.
                lost += self._lose(queue, at, max(at, former.ends.get(queue, at)), why)
        for queue in sorted(look.begins):
            low, high = look.begins[queue], look.ends[queue]
            begin = before.positions.get(queue)
            if begin is None:
                if self._target is not None and queue not in self._target:
                    continue  # it came after an availableNow run began: the next run reads it
                log.info("new_queue queue=%s begins=%d", text_of(queue), low)
                begin = low
            elif begin < low:
                why = f"the queue begins at {low} now (retention), and {begin} was to be read next"
                lost += self._lose(queue, begin, low, why)
                begin = low
            elif begin > high:
                why = (
                    f"the queue ends at {high} now, before {begin}, up to which it was read "
                    "(deleted and made anew, or its broker lost its end)"
                )
                lost += self._lose(queue, high, begin, why)
                begin = low
            found[queue] = begin
        return found, lost

    def _end_of(self, queue: MessageQueue) -> int:
        """Where a queue ends for us."""
        end = self._look.ends[queue]
        return end if self._target is None else min(end, self._target.get(queue, end))

    def _lose(self, queue: MessageQueue, begin: int, end: int, why: str) -> int:
        error = DataLost(text_of(queue), begin, end, why)
        if self._options.fails_on_loss:
            raise error
        log.warning("data_lost count=%d reason=%s", end - begin, error.what)
        return end - begin

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            if len(self._told) > 10_000:
                self._told.clear()
            self._told.add(text)
            log.warning("%s", text)

    # -------------------------------------------------------------------------------------- limits

    def _limited(
        self, begins: Positions, ends: Positions, limit: ReadLimit, *, may_wait: bool = True
    ) -> Positions | None:
        """Ends within the limits; None if the batch is to wait for more."""
        options = self._options
        rows = {queue: max(0, ends[queue] - begin) for queue, begin in begins.items()}
        total = sum(rows.values())
        is_limited = not isinstance(limit, ReadAllAvailable)
        if is_limited and may_wait and options.min_offsets is not None and self._target is None:
            if total < options.min_offsets and not self._is_overdue():
                return None
        most = options.max_offsets if is_limited else None
        if isinstance(limit, ReadMaxRows):
            most = limit.max_rows
        taken = share(rows, most) if most is not None else rows
        max_bytes = options.max_bytes if is_limited else None
        if isinstance(limit, ReadMaxBytes):
            max_bytes = limit.max_bytes
        if max_bytes is not None:
            taken = self._within_bytes(begins, taken, max_bytes)
        return {queue: begin + taken.get(queue, 0) for queue, begin in begins.items()}

    def _is_overdue(self) -> bool:
        """The first batch of a run does not wait: nobody knows how long it has waited already."""
        if self._batch_at is None:
            return True
        return (time.monotonic() - self._batch_at) * 1e3 >= self._options.max_delay_ms

    def _within_bytes(
        self, begins: Positions, rows: dict[MessageQueue, int], max_bytes: int
    ) -> dict[MessageQueue, int]:
        """By a sample of the messages that come next; brokers don't tell how large a range is."""
        waiting = {queue: begins[queue] for queue, count in rows.items() if count}
        sizes = self._cluster.mean_bytes(waiting) if waiting else {}
        if not sizes:
            return rows
        usual = sum(sizes.values()) / len(sizes)
        total = sum(count * sizes.get(queue, usual) for queue, count in rows.items())
        if total <= max_bytes:
            return rows
        return share(rows, max(1, int(sum(rows.values()) * max_bytes / total)))

    # ------------------------------------------------------------------------------------- reading

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        options = self._options
        ranges = ranges_between(start, end)
        if not self._look.addresses and ranges:  # a replay: nothing was asked for yet
            with suppress(CometError):  # executors find out for themselves
                self._look = self._cluster.look(one.queue for one in ranges)
        ranges = with_addresses(ranges, self._look)
        found = partition(
            ranges, at_least=options.min_partitions, at_most_rows=options.max_per_partition
        )
        return [QueueRanges(one) for one in found]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, QueueRanges)
        return PartitionReader(self._options, self._schema).read(partition.ranges)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Where the queues ended when the last batch was planned."""
        return {"v": 1, "q": nested(self._look.ends)} if self._look.ends else None

    # --------------------------------------------------------------------------------------- group

    def commit(self, end: dict[str, Any]) -> None:
        """All up to there is done with; Spark says so when it plans the batch after it."""
        if not is_initial(end):
            self._commit_to_group(StreamOffset.from_json(end).positions)

    def _commit_to_group(self, positions: Positions) -> None:
        """The group's offsets are for people and tools; the checkpoint is what counts. So a commit
        that fails is a warning, and the next one makes up for it."""
        if not self._options.commits:
            return
        new = {queue: at for queue, at in positions.items() if self._committed.get(queue) != at}
        if not new:
            return
        try:
            failed = self._cluster.commit(new, [one for one in new if one not in self._committed])
        except CometError as error:
            failed = [str(error)]
        if failed:
            self._tell_once(f"commit_failed group={self._options.group} reason={failed[0]}")
        else:
            self._committed.update(new)

    def stop(self) -> None:
        self._cluster.close()
