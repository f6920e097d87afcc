"""What to believe after a stop, and cutting what can't be believed.

Owns: finding the end of the log, and making queues and index agree with it. One rule: a record
counts only if it is whole, passes its CRC and says itself that it belongs where it stands; behind
the last such record everything becomes zero, on disk, before anything new is written.

Clean stop (no `abort`): queues are complete; the walk begins where the last unit points.
Unclean: nothing newer than the checkpoint is believed. The walk begins
  - for the index: at the end of the last index file that was durable (newer ones are removed and
    built again; RocketMQ 5 removes them and walks too little, its bug 8007);
  - for the queues: at the newest log file that begins before the checkpoint's times, less the
    longest delay of a queue flush (RocketMQ's checkpoint runs ahead of its queues by up to that).
    Units from there on are cut first and written again, so holes heal.
A record whose queue lacks the unit before it shows that this was too late; then all is built again
from the log's first file. The price of being wrong is time, never a message.
A whole record of a queue that can't be (topic and id have no CRC) is left out, and said so; the log
does not end with it, and its queue gets a blank unit in its place.
"""

from __future__ import annotations

import logging

import msgspec

from cometmq.errors import StoreCorrupt
from cometmq.store.checkpoint import Checkpoint
from cometmq.store.commit_log import CommitLog
from cometmq.store.consume_queue import BLANK_SIZE, ConsumeQueue
from cometmq.store.dispatch import INVISIBLE, Dispatcher
from cometmq.store.key_index import KeyIndex
from cometmq.store.layout import UNIT_BYTES, StoreConfig, can_be_queue
from cometmq.store.queues import Queues
from cometmq.wire.codes import TRANSACTION_MASK
from cometmq.wire.record import Blank, Scan

log = logging.getLogger("cometmq.store")

CLOCK_SLACK_MS = 3000  # RocketMQ's own allowance between a store time and a flush
PROGRESS_RECORDS = 1_000_000


class Recovered(msgspec.Struct):
    """What recovery found and did."""

    is_clean: bool = True
    walk_from: int = 0
    log_end: int = 0
    record_count: int = 0
    cut_files: int = 0
    cut_queues: int = 0
    index_files_rebuilt: int = 0
    restarts: int = 0
    last_store_ms: int = 0


class Recovery:
    """One recovery; used once, when a store opens."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: Queues,
        index: KeyIndex | None,
        checkpoint: Checkpoint,
        dispatcher: Dispatcher,
        config: StoreConfig,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._index = index
        self._checkpoint = checkpoint
        self._dispatcher = dispatcher
        self._config = config

    def run(self, *, is_clean: bool, now_ms: int) -> Recovered:
        """Bring log, queues and index to one truth; afterwards the store may append."""
        report = Recovered(is_clean)
        if not self._log.segments.items:
            self._begin_after_lost_log(report)
            return report
        for queue in self._queues:
            report.cut_queues += self._check_last_unit(queue)
        walk_from = self._clean_start() if is_clean else self._unclean_start(report)
        end = self._walk_until_whole(walk_from, report, now_ms)
        self._cut_log(end, report, is_clean=is_clean)
        for queue in self._queues:
            report.cut_queues += queue.cut(end)
        if self._index is not None and self._index.cut(end):
            report.index_files_rebuilt += 1
            self._checkpoint.rewind_index(self._index.end_ms - 1)
            self._walk(self._index_start(), report, now_ms)
        for queue in self._queues:
            queue.ends.next_offset = queue.max_offset
            queue.correct_min(self._log.segments.start)
        self._settle(end, report)
        self._dispatcher.walked()
        log.info("recovered %s", report)
        return report

    # ----------------------------------------------------------------------------- where to begin

    def _begin_after_lost_log(self, report: Recovered) -> None:
        """No log at all. RocketMQ would drop all queues and number from 0 again; we begin the new
        log behind everything the queues point to, so old numbers and offsets are never reused."""
        known = max((queue.ends.log_end for queue in self._queues), default=0)
        if self._index is not None:
            known = max(known, self._index.end_offset + 1)
        start = -(-known // self._log.file_bytes) * self._log.file_bytes
        if start:
            log.error("commit_log_missing queues=%d log_begins_at=%d", len(self._queues), start)
        for queue in self._queues:
            queue.correct_min(start)
        self._settle(start, report)

    def _check_last_unit(self, queue: ConsumeQueue) -> bool:
        """Cut stale units: RocketMQ truncates a queue without wiping it, so units of records
        that are gone or were replaced may follow the real ones."""
        first = queue.segments.start // UNIT_BYTES
        if queue.max_offset == first or self._agrees(queue, queue.max_offset - 1):
            return False
        end = queue.first(first, queue.max_offset, lambda n: not self._agrees(queue, n))
        log.warning("queue_stale_units %s former_max=%d max=%d", queue, queue.max_offset, end)
        queue.cut_to(end)
        return True

    def _agrees(self, queue: ConsumeQueue, index: int) -> bool:
        """Whether a unit points to its own record; below the log's begin only its place among the
        others can tell. A hole, or a unit whose first half was lost, points there, too."""
        log_offset, size, _ = queue.unit(index)
        if size <= 0:
            return False
        if size == BLANK_SIZE:
            return True
        if log_offset < self._log.segments.start:
            if index * UNIT_BYTES == queue.segments.start:
                return True
            former, former_size, _ = queue.unit(index - 1)
            return former_size > 0 and former <= log_offset
        found = self._log.scan(log_offset, verify_crc=False)
        return (
            type(found) is Scan
            and found.size == size
            and found.queue_offset == index
            and found.queue_id == queue.queue_id
            and found.topic == queue.topic
        )

    def _clean_start(self) -> int:
        """All was dispatched: go on behind the last unit's record, whose place is known good."""
        begin = max((queue.ends.log_end for queue in self._queues), default=0)
        return max(begin, self._log.segments.start)

    def _unclean_start(self, report: Recovered) -> int:
        log.warning("unclean_stop action=recover")
        believed_ms = (
            min(self._checkpoint.log_ms, self._checkpoint.queues_ms)
            - CLOCK_SLACK_MS
            - self._config.queue_flush_thorough_ms
        )
        queues_from = self._file_before(believed_ms)
        # What is cut was durable and, once written again, is not: who recovers after a kill that
        # comes before the next flush must not begin any later than we do.
        self._checkpoint.rewind_queues(believed_ms)
        self._cut_queues(queues_from, report)
        if self._index is None:
            return queues_from
        report.index_files_rebuilt = self._index.remove_newer(self._checkpoint.index_ms)
        # What is written again may end at the very time that was vouched for, and is not durable.
        self._checkpoint.rewind_index(self._index.end_ms - 1)
        self._index.repair()
        return min(queues_from, self._index_start())

    def _file_before(self, at_ms: int) -> int:
        """The newest log file whose first record is good and not younger than `at_ms`."""
        for segment in reversed(self._log.segments.items):
            first = self._log.scan(segment.start, verify_crc=self._config.verify_crc_on_recover)
            if type(first) is Scan and 0 < first.store_ms <= at_ms:
                return segment.start
        return self._log.segments.start

    def _index_start(self) -> int:
        """The last record in the index, else the first of the log."""
        assert self._index is not None
        start = max(self._index.end_offset, self._log.segments.start)
        if type(self._log.scan(start, verify_crc=False)) is Scan:
            return start
        segment = self._log.segments.find(start)
        return segment.start if segment is not None else self._log.segments.start

    def _cut_queues(self, log_offset: int, report: Recovered) -> None:
        for queue in self._queues:
            report.cut_queues += queue.cut(log_offset)
            # A torn unit may have misled the search by halving; its neighbours then still stand.
            while self._check_last_unit(queue):
                queue.cut(log_offset)
            # Even with nothing to cut: behind a page that was lost, later ones may have survived.
            queue.wipe_tail()

    # ------------------------------------------------------------------------------------ the walk

    def _walk_until_whole(self, walk_from: int, report: Recovered, now_ms: int) -> int:
        end = self._walk(walk_from, report, now_ms)
        if end is None:
            report.restarts += 1
            begin = self._log.segments.start
            self._checkpoint.rewind_queues(0)
            self._cut_queues(begin, report)
            end = self._walk(begin, report, now_ms)
            assert end is not None, "a walk from the first file can't find a gap"
        return end

    def _walk(self, walk_from: int, report: Recovered, now_ms: int) -> int | None:
        """Dispatch every good record from here on; returns where they end, None at a gap. Long runs
        of good ones are left to compiled code; each doubt is judged here."""
        report.walk_from = position = walk_from
        may_restart = walk_from > self._log.segments.start
        while True:
            position = self._walk_fast(position, report, now_ms)
            found = self._log.scan(position, verify_crc=self._config.verify_crc_on_recover)
            if type(found) is Scan:
                if self._is_torn(found):
                    return position
                if may_restart and self._lacks_units(found):
                    log.warning(
                        "queue_incomplete topic=%s queue=%d index=%d action=walk the whole log",
                        found.topic,
                        found.queue_id,
                        found.queue_offset,
                    )
                    return None
                self._dispatcher.feed_walked(found, now_ms)
                self._count(report, 1, position)
            elif type(found) is not Blank:
                return position
            position += found.size

    def _walk_fast(self, position: int, report: Recovered, now_ms: int) -> int:
        """By compiled code, as far as it takes them."""
        dispatcher, verify_crc = self._dispatcher, self._config.verify_crc_on_recover
        while True:
            before = dispatcher.dispatched_count
            after = dispatcher.walk(position, now_ms, verify_crc=verify_crc)
            self._count(report, dispatcher.dispatched_count - before, after)
            if after == position:
                return position
            position = after

    def _count(self, report: Recovered, records: int, position: int) -> None:
        """So many more were dispatched; say now and then how far it is."""
        if not records:
            return
        former = report.record_count
        report.record_count += records
        report.last_store_ms = self._dispatcher.last_store_ms
        if report.record_count // PROGRESS_RECORDS > former // PROGRESS_RECORDS:
            end = self._log.segments.end
            log.info("recovering records=%d at=%d of=%d", report.record_count, position, end)

    def _lacks_units(self, found: Scan) -> bool:
        if found.sys_flag & TRANSACTION_MASK in INVISIBLE:
            return False
        if not can_be_queue(found.topic, found.queue_id):
            return False
        queue = self._queues.get(found.topic, found.queue_id)
        return found.queue_offset > (queue.max_offset if queue is not None else 0)

    def _is_torn(self, found: Scan) -> bool:
        """Topic and properties have no CRC. Zeros in them mean that a page of a record which was
        never durable got lost; what the checkpoint vouches for is not doubted."""
        if found.store_ms < self._checkpoint.log_ms:
            return False
        text = found.properties
        return "\0" in found.topic or text.endswith("\0") or "\0\0\0\0" in text

    # ------------------------------------------------------------------------------------- the cut

    def _cut_log(self, end: int, report: Recovered, *, is_clean: bool) -> None:
        """Zero the log from `end` on, durably, and drop the files behind."""
        segments = self._log.segments
        self._refuse_to_cut_durable(end)
        report.cut_files = len(segments.remove_after(end))
        segment = segments.find(end)
        if segment is not None:
            segment.zero_from(end - segment.start)
        if not is_clean:
            # A killed process leaves pages that the kernel has but the disk has not.
            for earlier in segments.items:
                if earlier.end > report.walk_from and earlier is not segment:
                    earlier.target().sync()

    def _refuse_to_cut_durable(self, end: int) -> None:
        for segment in self._log.segments.items:
            if segment.start <= end or self._config.is_durable_cut_allowed:
                continue
            first = self._log.scan(segment.start, verify_crc=True)
            # Not <=: a record of the same millisecond may have come after the flush.
            if type(first) is Scan and first.store_ms < self._checkpoint.log_ms:
                raise StoreCorrupt(
                    f"the commit log breaks off at {end}, but {segment.name} behind it holds "
                    f"messages that were durable; restore the damaged file, or set "
                    f"cutDamagedLogEnable=true to lose them"
                )

    def _settle(self, end: int, report: Recovered) -> None:
        report.log_end = end
        self._log.start_at(end)
        self._dispatcher.position = end
        if not report.last_store_ms:
            report.last_store_ms = self._last_store_ms(end)
        self._dispatcher.last_store_ms = report.last_store_ms
        self._checkpoint.rewind(report.last_store_ms)

    def _last_store_ms(self, end: int) -> int:
        """The time of the record that ends the log, known from the queue that points to it."""
        for queue in self._queues:
            if queue.ends.log_end == end and queue.max_offset > queue.min_offset:
                found = self._log.scan(queue.unit(queue.max_offset - 1)[0], verify_crc=False)
                if type(found) is Scan:
                    return found.store_ms
        return 0
