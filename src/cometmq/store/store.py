"""Store: the face of this folder. Append, dispatch, fetch, find, flush, clean, close.

Owns: the order in which the parts act, and whether the store may be written to. One rule: what it
says is true after a crash as well: `flushed_offset` only follows a sync that succeeded, the
checkpoint only covers what is durable, and after a failed sync nothing is ever acknowledged again.

A message's life: append writes its record into the log's memory; dispatch makes it visible (once
it is committed, where records are staged); a Flush taken by the driver and reported back by
flushed() makes it durable. Single threaded: only the targets of a Flush are touched by another
thread. All time comes in as now_ms.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from cometmq.errors import MessageIllegal, StoreBusy, StoreFull, StoreReadOnly
from cometmq.message import NewMessage, StoredMessage
from cometmq.ports import Files, Flush
from cometmq.store import layout, retention
from cometmq.store.checkpoint import Checkpoint
from cometmq.store.commit_log import CommitLog
from cometmq.store.consume_queue import ConsumeQueue
from cometmq.store.dispatch import INVISIBLE, Arrival, Dispatcher
from cometmq.store.ends import PLAIN, QueueEnds, compiled
from cometmq.store.flush import NEXT_FILE, FlushPlan
from cometmq.store.key_index import KeyIndex
from cometmq.store.layout import StoreConfig
from cometmq.store.queues import Queues
from cometmq.store.reading import Reading
from cometmq.store.recovery import Recovery
from cometmq.store.results import Accept, Appended, Entered, Fetched, FoundByKey, StoreStats
from cometmq.store.retention import CleanReport
from cometmq.store.timer_log import TimerLog
from cometmq.store.timer_wheel import TimerWheel
from cometmq.wire.codes import TRANSACTION_MASK
from cometmq.wire.record import Encoded, Scan, prepare

if TYPE_CHECKING:
    from cometmq._fast.hot import Hot, LogPlace
    from cometmq._fast.hot import QueueEnds as HotEnds

log = logging.getLogger("cometmq.store")

_MAY_SEND, _MAY_PULL, _IS_SYNC, _IS_JUDGED = 1, 2, 4, 8  # as in _fast/hot.pyx
_QUEUES_PER_CLEAN = 2000  # each may touch its disk; more would hold up the loop
_NEXT_SLICE_MS = 100  # until the next so many, where there are more


class Store:
    """One open store directory. Made by Store.open."""

    def __init__(self, files: Files, config: StoreConfig, hot: Hot | None = None) -> None:
        self._files = files
        self._config = config
        self.hot = hot
        make = PLAIN if hot is None else compiled()
        self._checkpoint = Checkpoint(files)
        self._log = CommitLog(files, config, make)
        self._queues = Queues(files, config, make)
        self._index = KeyIndex(files, config, make) if config.index_enabled else None
        self._dispatcher = Dispatcher(self._log, self._queues, self._index, config, hot)
        self._flush = FlushPlan(self._log, self._queues, self._index, self._checkpoint, config)
        self.stats = StoreStats()
        self._reading = Reading(self._log, self._queues, self._index, config, self.stats)
        self._last_store_ms = 0
        self._refusal: str | None = None
        self._disk_full_remark: str | None = None
        self._clean_at_ms = 0
        self._unclean_queues: list[ConsumeQueue] = []
        self._is_closed = False
        self._teach_limits()

    @classmethod
    def open(
        cls,
        files: Files,
        config: StoreConfig,
        now_ms: int,
        pid_text: str = "0",
        hot: Hot | None = None,
    ) -> Store:
        """Lock, load, recover; StoreLocked or StoreCorrupt if that can't be.

        With `hot`, ordinary messages may go through the compiled path (see feed).
        """
        files.lock()
        try:
            store = cls(files, config, hot)
        except BaseException:
            files.unlock()
            raise
        try:
            store._start(now_ms, pid_text)
        except BaseException:
            store._release()
            raise
        return store

    def _start(self, now_ms: int, pid_text: str) -> None:
        self._log.segments.load()
        self._queues.load()
        if self._index is not None:
            self._index.load()
        is_clean = self._files.read(layout.ABORT) is None
        recovery = Recovery(
            self._log, self._queues, self._index, self._checkpoint, self._dispatcher, self._config
        )
        self.stats.recovered = recovery.run(is_clean=is_clean, now_ms=now_ms)
        # One later than all before: a time in the checkpoint then never vouches for a new record.
        self._last_store_ms = self.stats.recovered.last_store_ms + 1
        self._clean_at_ms = now_ms + self._config.clean_interval_ms
        # What recovery wrote into queues and index is in memory only.
        is_durable = is_clean and not self._flush.is_queue_work
        self._flush.start(now_ms, queues_at=self._log.write_at if is_durable else 0)
        self._files.write(layout.ABORT, pid_text.encode("ascii"))

    def _release(self) -> None:
        """Unmap everything and give up the lock."""
        self._log.close()
        self._queues.close()
        if self._index is not None:
            self._index.close()
        self._checkpoint.close()
        self._files.unlock()

    @property
    def files(self) -> Files:
        """The directory that this store lives in; small state files live beside it."""
        return self._files

    @property
    def config(self) -> StoreConfig:
        return self._config

    @property
    def read_only_reason(self) -> str | None:
        """Why nothing can be appended until a restart; None while all is well."""
        return self._refusal

    def reconfigure(self, config: StoreConfig) -> None:
        """Take new limits and retention rules; sizes and flush rules stay as they were opened."""
        self._config = config
        self._reading.reconfigure(config)
        self._teach_limits()

    # -------------------------------------------------------------------------------------- append

    def append(self, message: NewMessage, now_ms: int) -> Appended:
        """Write one message; returns before it is durable or visible."""
        if self._refusal is not None or self._disk_full_remark is not None:
            self._refuse()
        encoded = self._encode(message)
        size = encoded.size
        queue = self._queue_for(message, encoded)
        store_ms = now_ms if now_ms > self._last_store_ms else self._last_store_ms
        is_visible = message.sys_flag & TRANSACTION_MASK not in INVISIBLE
        queue_offset = queue.ends.next_offset if is_visible else 0
        try:
            log_offset = self._log.append(encoded, queue_offset, store_ms)
        except OSError as error:
            raise StoreFull(f"no room for the next log file: {error}") from error
        except StoreBusy:
            self.stats.refused_count += 1
            raise
        if is_visible:
            queue.ends.next_offset = queue_offset + 1
        self._last_store_ms = store_ms
        self._remember(message, queue_offset, log_offset, size, store_ms)
        stats = self.stats
        stats.appended_count += 1
        stats.appended_bytes += size
        return Appended(log_offset, queue_offset, size, log_offset + size, store_ms)

    def append_batch(self, messages: list[NewMessage], now_ms: int) -> list[Appended]:
        """Write all or none: one file, one store time, consecutive numbers in each queue."""
        if self._refusal is not None or self._disk_full_remark is not None:
            self._refuse()
        batch = [self._encode(message) for message in messages]
        if sum(len(message.body) for message in messages) > self._config.max_message_bytes:
            self.stats.refused_count += 1
            raise MessageIllegal(f"batch bodies exceed {self._config.max_message_bytes} bytes")
        queues = [
            self._queue_for(message, encoded)
            for message, encoded in zip(messages, batch, strict=True)
        ]
        taken: dict[ConsumeQueue, int] = {}
        queue_offsets: list[int] = []
        for message, queue in zip(messages, queues, strict=True):
            if message.sys_flag & TRANSACTION_MASK in INVISIBLE:
                queue_offsets.append(0)
            else:
                queue_offsets.append(queue.ends.next_offset + taken.get(queue, 0))
                taken[queue] = taken.get(queue, 0) + 1
        store_ms = max(now_ms, self._last_store_ms)
        try:
            log_offsets = self._log.append_batch(batch, queue_offsets, store_ms)
        except OSError as error:
            raise StoreFull(f"no room for the next log file: {error}") from error
        except StoreBusy:
            self.stats.refused_count += 1
            raise
        for queue, count in taken.items():
            queue.ends.next_offset += count
        self._last_store_ms = store_ms
        done: list[Appended] = []
        for encoded, queue_offset, at in zip(batch, queue_offsets, log_offsets, strict=True):
            size = encoded.size
            self._remember(encoded.message, queue_offset, at, size, store_ms)
            done.append(Appended(at, queue_offset, size, at + size, store_ms))
            self.stats.appended_bytes += size
        self.stats.appended_count += len(done)
        return done

    # ------------------------------------------------------------------------- the compiled path

    def feed(
        self,
        data: bytes,
        at: int,
        born_host: bytes,
        now_ms: int,
        may_send: bool,
        may_pull: bool,
        is_judged: bool = False,
    ) -> int:
        """Let compiled code handle the ordinary sends and pulls from byte `at` on; returns where it
        stopped. Its answers are in `hot`; what it appended is as if append had. `is_judged`: that
        messages are numbered makes them no less ordinary."""
        hot, log = self.hot, self._log
        assert hot is not None
        before = log.write_at
        store_ms = now_ms if now_ms > self._last_store_ms else self._last_store_ms
        allowed = _MAY_PULL if may_pull else 0
        if may_send and self.is_writable:
            if not self._flush.since_ms or self.stall_remark(now_ms) is None:
                allowed |= _MAY_SEND
        if self._config.is_sync_flush:
            allowed |= _IS_SYNC
        if is_judged:
            allowed |= _IS_JUDGED
        files = log.segments.items
        try:
            return hot.feed(
                data,
                at,
                log.tail_view,
                log.tail_begin,
                log.tail_end,
                before,
                before if log.staging is None else log.committed_at,
                files[0].start if files else before,
                store_ms,
                now_ms,
                born_host,
                allowed,
            )
        finally:  # what was done is done, whatever comes after it
            if hot.write_at != before:
                log.write_at = hot.write_at
                self._last_store_ms = store_ms

    def deliver_level(self, topic: str, queue_id: int, offset: int, most: int, now_ms: int) -> int:
        """Let compiled code store messages of a delay level once more, in their real places, from
        `offset` on, as long as they are due and it is simple; returns how many."""
        ends = self.queue_ends(topic, queue_id)
        if self.hot is None or ends is None or not self.is_writable:
            return 0
        place = self._log_place(now_ms)
        try:
            return self.hot.deliver_level(cast("HotEnds", ends), offset, most, place)
        finally:
            self._note_written(place)

    def enter_timers(
        self,
        topic: str,
        offset: int,
        most: int,
        now_ms: int,
        wheel: TimerWheel,
        timers: TimerLog,
        *,
        first_ms: int,
        write_ms: int,
        window_ms: int,
    ) -> Entered:
        """Let compiled code put messages of the timers' queue into the wheel, from `offset` on, as
        long as it is simple."""
        ends, tail = self.queue_ends(topic, 0), timers.tail()
        if self.hot is None or ends is None or tail is None:
            return Entered(0, -1, 0, [])
        buffer, begin, limit = tail
        runs: list[tuple[bytes, int]] = []
        count, last_ms, upto = self.hot.enter_timers(
            cast("HotEnds", ends),
            offset,
            most,
            self._log_place(now_ms),
            wheel.buffer,
            wheel.slots,
            wheel.precision_ms,
            buffer,
            begin,
            timers.end,
            limit,
            first_ms,
            write_ms,
            window_ms,
            runs,
        )
        if count:
            wheel.is_dirty = True
            timers.grown(count)
        return Entered(count, last_ms, upto, runs)

    def deliver_timed(
        self, timers: TimerLog, positions: array[int], most: int, now_ms: int
    ) -> Entered:
        """Let compiled code store the messages of these units once more, in their real places, the
        last first, as long as it is simple."""
        found = timers.file_of(positions[-1])
        if self.hot is None or found is None or not self.is_writable:
            return Entered(0, -1, 0, [])
        place = self._log_place(now_ms)
        runs: list[tuple[bytes, int]] = []
        try:
            count = self.hot.deliver_timed(*found, positions, most, place, runs)
        finally:
            self._note_written(place)
        return Entered(count, -1, self._log.write_at, runs)

    def _log_place(self, now_ms: int) -> LogPlace:
        """Where compiled code finds the log."""
        log = self._log
        before = log.write_at
        files = log.segments.items
        return (
            log.tail_view,
            log.tail_begin,
            log.tail_end,
            before,
            before if log.staging is None else log.committed_at,
            files[0].start if files else before,
            max(now_ms, self._last_store_ms),
            now_ms,
        )

    def _note_written(self, place: LogPlace) -> None:
        """What was done is done, whatever comes after it."""
        assert self.hot is not None
        if self.hot.write_at != place[3]:
            self._log.write_at = self.hot.write_at
            self._last_store_ms = place[6]

    def fold(self) -> tuple[int, int, int, int, int, int]:
        """Add to our counters what the compiled path has counted since; returns that."""
        assert self.hot is not None
        sums, stats = self.hot.take_sums(), self.stats
        stats.appended_count += sums[1]
        stats.appended_bytes += sums[2]
        stats.fetched_count += sums[4]
        stats.fetched_bytes += sums[5]
        return sums

    def _teach_limits(self) -> None:
        if self.hot is not None:
            config = self._config
            self.hot.configure_store(
                file_bytes=config.log_file_bytes,
                max_message_bytes=config.max_message_bytes,
                in_memory_bytes=config.in_memory_bytes,
                max_fetch_count=config.max_fetch_count,
                max_fetch_bytes=config.max_fetch_bytes,
                max_cold_fetch_count=config.max_cold_fetch_count,
                max_cold_fetch_bytes=config.max_cold_fetch_bytes,
                max_scan_units=config.max_scan_units,
                index_slots=config.index_slots,
                index_entries=config.index_entries,
                is_indexed=config.index_enabled,
            )

    def queue_ends(self, topic: str, queue_id: int) -> QueueEnds | None:
        """The bounds of a queue as both paths share them; None if it never was."""
        queue = self._queues.get(topic, queue_id)
        return None if queue is None else queue.ends

    def warm_read(self, topic: str, queue_id: int, offset: int) -> None:
        """Let compiled code read this queue around `offset`, which was just fetched."""
        queue = self._queues.get(topic, queue_id)
        if self.hot is None or queue is None or not queue.min_offset <= offset < queue.max_offset:
            return
        queue.warm_read(offset)
        for log_offset in {queue.unit(offset)[0], queue.ends.log_end - 1}:
            self.warm_log(log_offset)

    def warm_log(self, log_offset: int) -> None:
        """Let compiled code read the file of this record."""
        segment = self._log.segments.find(log_offset)
        pin = None if segment is None else segment.pin()
        if self.hot is not None and pin is not None:
            self.hot.learn_log_file(pin)

    def watch(self, topic: str, queue_id: int, is_watched: bool) -> None:
        """Whether somebody waits for messages of this queue; dispatch tells of no others."""
        self._queues.watch(topic, queue_id, is_watched)

    def _encode(self, message: NewMessage) -> Encoded:
        """The record to be; MessageIllegal if it breaks a limit."""
        most = self._config.max_message_bytes
        if len(message.body) > most:
            raise self._illegal("body", len(message.body), most)
        try:
            encoded = prepare(message)
        except ValueError as error:  # a text too long for its field, or not encodable
            self.stats.refused_count += 1
            raise MessageIllegal(str(error)) from None
        if encoded.size > most + layout.RECORD_OVERHEAD_BYTES:
            raise self._illegal("record", encoded.size, most + layout.RECORD_OVERHEAD_BYTES)
        return encoded

    def _illegal(self, what: str, size: int, limit: int) -> MessageIllegal:
        self.stats.refused_count += 1
        return MessageIllegal(f"{what} of {size} bytes; at most {limit}")

    def _queue_for(self, message: NewMessage, encoded: Encoded) -> ConsumeQueue:
        """The queue; a topic is only checked when its queue is new."""
        queue = self._queues.get(message.topic, message.queue_id)
        if queue is None:
            is_retry = message.topic.startswith(layout.RETRY_PREFIX)
            limit = layout.MAX_TOPIC_BYTES if is_retry else layout.MAX_PLAIN_TOPIC_BYTES
            if len(encoded.topic) > limit:
                raise self._illegal("topic", len(encoded.topic), limit)
            try:
                queue = self._queues.need(message.topic, message.queue_id)
            except OSError as error:
                raise StoreFull(f"no room for a queue file: {error}") from error
        return queue

    def _remember(
        self, message: NewMessage, queue_offset: int, log_offset: int, size: int, store_ms: int
    ) -> None:
        """Spare dispatch the reading back of what we just wrote."""
        known = self._dispatcher.known
        if len(known) < self._config.max_undispatched:
            known.append(
                Scan(
                    0,
                    size,
                    message.queue_id,
                    queue_offset,
                    log_offset,
                    message.sys_flag,
                    store_ms,
                    message.topic,
                    message.properties,
                )
            )

    def _refuse(self) -> None:
        self.stats.refused_count += 1
        if self._refusal is not None:
            raise StoreReadOnly(self._refusal)
        assert self._disk_full_remark is not None
        raise StoreFull(self._disk_full_remark)

    # ------------------------------------------------------------------------------------ dispatch

    def dispatch(self, now_ms: int) -> list[Arrival]:
        """Make visible what may be; returns the messages that became so, in log order."""
        limit = self._log.flushed_at if self._config.is_sync_flush else self._log.committed_at
        if self._dispatcher.position >= limit:
            return []
        arrivals = self._dispatcher.run(limit, now_ms)
        self.stats.dispatched_count = self._dispatcher.dispatched_count
        return arrivals

    @property
    def is_dispatch_behind(self) -> bool:
        """Whether the log holds records that no queue shows yet."""
        return self._dispatcher.position < self._log.write_at

    # ------------------------------------------------------------------------------------- reading

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        accept: Accept | None = None,
        *,
        max_bytes: int = 2**31 - 1,
        max_scan: int | None = None,
        is_stale: Callable[[memoryview], bool] | None = None,
    ) -> Fetched:
        """Messages of a queue from `offset` on; `accept(tags_code, log_offset)` may pass over, and
        with None end it: enough was looked at.

        `max_scan`: units looked at, where asking `accept` is dearer than usual. `is_stale` is asked
        of records that may expire (SysFlag.MAY_EXPIRE); those are passed over and counted."""
        return self._reading.fetch(
            topic, queue_id, offset, max_count, accept, max_bytes, max_scan, is_stale
        )

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last visible message; 0 for a queue that never was."""
        queue = self._queues.get(topic, queue_id)
        return queue.max_offset if queue is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first message still there; equals max_offset if all have expired."""
        return self._reading.min_offset(topic, queue_id)

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """The number the next appended message will get."""
        queue = self._queues.get(topic, queue_id)
        return queue.ends.next_offset if queue is not None else 0

    def unit(self, topic: str, queue_id: int, offset: int) -> tuple[int, int, int] | None:
        """(log offset, record size, tags code) of a visible message; None if it is not there."""
        queue = self._queues.get(topic, queue_id)
        if queue is None or not self.min_offset(topic, queue_id) <= offset < queue.max_offset:
            return None
        return queue.unit(offset)

    def store_ms_at(self, topic: str, queue_id: int, offset: int) -> int | None:
        return self._reading.store_ms_at(topic, queue_id, offset)

    def earliest_store_ms(self, topic: str, queue_id: int) -> int | None:
        return self.store_ms_at(topic, queue_id, self.min_offset(topic, queue_id))

    def first_store_ms(self) -> int | None:
        return self._reading.first_store_ms()

    def offset_by_time(self, topic: str, queue_id: int, at_ms: int, is_upper: bool = False) -> int:
        """The first message stored at or after a time; with `is_upper` the last at or before."""
        return self._reading.offset_by_time(topic, queue_id, at_ms, is_upper)

    def record_at(self, log_offset: int) -> bytes | None:
        """A record's bytes, only if exactly a valid record starts there."""
        return self._reading.record_at(log_offset)

    def message_at(self, log_offset: int) -> StoredMessage | None:
        """The message of the record that starts exactly there, its body checked."""
        return self._reading.message_at(log_offset)

    def by_properties(self, accepts: Callable[[str], bool], most_chars: int) -> Accept:
        """An `accept` for `fetch` that asks by records' property strings, so many characters of
        them; for this turn only."""
        return self._reading.by_properties(accepts, most_chars)

    def scan_at(self, log_offset: int) -> Scan | None:
        """What a walk sees of the record that starts exactly there; its body is not checked."""
        return self._reading.scan_at(log_offset)

    def records(self, begin: int, having: str = "") -> Iterator[Scan]:
        """All records from a log offset on, in their order; StoreCorrupt where none begins. Only
        those with a text in their properties, if that is named."""
        return self._reading.records(begin, having, self.hot)

    def properties_at(self, log_offset: int) -> str | None:
        """A record's property string, only if exactly a record starts there; its body is not
        checked."""
        return self._reading.properties_at(log_offset)

    def find_by_key(
        self,
        topic: str,
        key: str,
        max_count: int,
        begin_ms: int,
        end_ms: int,
        *,
        is_unique: bool = False,
    ) -> FoundByKey:
        """Records of a topic that carry this key, at most 64, newest preferred. `is_unique`: as
        their unique key; a word of KEYS does not count."""
        return self._reading.find_by_key(
            topic, key, max_count, begin_ms, end_ms, is_unique=is_unique
        )

    def is_cold(self, log_offset: int) -> bool:
        """Whether a record is too far behind the log's end to expect it in memory."""
        return self._log.write_at - log_offset > self._config.in_memory_bytes

    def queues(self) -> Iterator[tuple[str, int]]:
        return ((queue.topic, queue.queue_id) for queue in self._queues)

    @property
    def queue_set(self) -> object:
        """Another one whenever a queue has come or gone: what was found out about them is old."""
        return self._queues.queue_set

    def queue_ids(self, topic: str) -> list[int]:
        return self._queues.ids(topic)

    def delete_topic(self, topic: str) -> int:
        """Remove a topic's queues; returns how many.

        Records stay in the log until they expire, and an unclean stop soon after may show them
        again, as in RocketMQ. A topic made again in this run goes on numbering where it ended.
        """
        if not self._queues.ids(topic):
            return 0
        if not self._config.is_sync_flush:
            if self._refusal is None:
                try:
                    self._log.commit()
                except OSError as error:
                    self.flush_failed("commit", str(error), self._last_store_ms)
            self.dispatch(self._last_store_ms)
        if self.hot is not None:
            self.hot.forget_records()  # they point to queues that go now; the log has them all
        log.info("topic_deleted topic=%s", topic)
        return self._queues.remove_topic(topic)

    @property
    def min_log_offset(self) -> int:
        return self._log.min_offset

    @property
    def max_log_offset(self) -> int:
        return self._log.write_at

    @property
    def committed_offset(self) -> int:
        """All bytes of the log before this are in its files; the log's end unless staged."""
        return self._log.committed_at

    @property
    def flushed_offset(self) -> int:
        """All bytes of the log before this are durable."""
        return self._log.flushed_at

    @property
    def dispatched_offset(self) -> int:
        return self._dispatcher.position

    @property
    def last_store_ms(self) -> int:
        """No record is older than this from now on."""
        return self._last_store_ms

    # --------------------------------------------------------------------------------------- flush

    def take_flush(self, now_ms: int) -> Flush | None:
        """What to commit or sync of the log now, if anything; answered by flushed or flush_failed,
        and then there may be more."""
        flush = self._flush
        if flush.quiet_from_ms <= now_ms < flush.quiet_until_ms:
            return None
        if self._refusal is not None:
            return None
        if self._log.staging is not None:
            commit = flush.take_commit(self._last_store_ms, now_ms)
            if commit is not None:
                return commit
        return flush.take_log(self._last_store_ms, now_ms)

    def take_next_file(self) -> Flush | None:
        """What creates the next log file ahead, if it is time to; answered as a flush is."""
        return None if self._refusal is not None else self._flush.take_next_file()

    def take_queue_flush(self, now_ms: int) -> Flush | None:
        """What to sync of queues, index and checkpoint now, if anything."""
        if self._refusal is not None:
            return None
        dispatched_ms = self._dispatcher.last_store_ms
        is_ms_over = now_ms > dispatched_ms and not self.is_dispatch_behind
        if is_ms_over and self._last_store_ms == dispatched_ms:
            self._last_store_ms += 1  # stays true should the clock step back
        return self._flush.take_queues(
            self._dispatcher.position, dispatched_ms, now_ms, is_ms_over=is_ms_over
        )

    def flushed(self, kind: str, now_ms: int) -> None:
        """A Flush is done: what it covered is durable, or of a commit, in the files."""
        if self._refusal is not None:
            return  # after a failure no success is believed
        self._flush.done(kind)
        if kind == "log":
            self.stats.log_flushes += 1
        elif kind == "commit":
            self.stats.commits += 1
        elif kind != NEXT_FILE:
            self.stats.queue_flushes += 1

    def flush_failed(self, kind: str, reason: str, now_ms: int) -> None:
        """A Flush failed: read-only until the next start, which recovers from what is on disk."""
        if kind == NEXT_FILE:
            self._flush.next_file_failed(reason, now_ms)
            return
        self._flush.since_ms = 0  # it is not slow, it is over
        log.error("flush_failed kind=%s reason=%s action=read-only", kind, reason)
        self.stats.flush_failures += 1
        if self._refusal is None:
            self._refusal = f"a flush of {kind} failed ({reason}); read-only until restart"

    def hurry_log(self, now_ms: int) -> None:
        """Somebody waits for all that is in the log to be durable."""
        if self.flushed_offset < self.max_log_offset:
            self._flush.hurry_log(now_ms)

    def stall_remark(self, now_ms: int) -> str | None:
        """Why senders had better wait, if the disk does not keep up; None if it does.

        With asynchronous flush only once much waits: the system would soon stop whoever writes to
        a mapped file, and with that everything we do.
        """
        stalled_ms = self._flush.stalled_ms(now_ms)
        limit_ms, most_bytes = self._config.stall_limit_ms, self._config.max_unflushed_bytes
        if stalled_ms <= limit_ms:
            return None
        waiting = self._log.write_at - self._log.flushed_at
        if not self._config.is_sync_flush and waiting <= most_bytes:
            return None
        return (
            f"the disk has not finished a flush for {stalled_ms} ms, limit {limit_ms} ms "
            f"(osPageCacheBusyTimeOutMills); {waiting} bytes wait for it"
        )

    @property
    def is_writable(self) -> bool:
        return self._refusal is None and self._disk_full_remark is None

    # --------------------------------------------------------------------------- cleaning and ends

    def clean(self, now_ms: int, force: bool = False) -> CleanReport:
        """Drop what has expired; `force` does not wait for the hour of `delete_when`."""
        self._clean_at_ms = now_ms + self._config.clean_interval_ms
        ratio = self._files.used_ratio()
        is_full = retention.is_full_after(self._disk_full_remark is not None, ratio, self._config)
        self._set_disk_full(is_full, ratio)
        report = CleanReport(ratio, is_full)
        # Never the file being written, and none whose units are not on disk: a power loss would
        # take them, and with record and unit gone nobody would know where numbering had come to.
        committed_at = self._log.committed_at
        finished = [i for i in self._log.segments.items[:-1] if i.end <= committed_at]
        safe = min(self._log.flushed_at, self._flush.queues_at)
        candidates = [item for item in finished if item.end <= safe]
        count, report.reason = retention.choose(
            [self._files.modified_ms(item.name) for item in candidates],
            now_ms=now_ms,
            used_ratio=ratio,
            is_manual=force,
            config=self._config,
        )
        if report.reason and len(candidates) < len(finished):
            self._flush.hurry_queues(now_ms)
        for _ in range(count):
            removed = self._log.segments.remove_first()
            log.info("log_file_removed name=%s reason=%s", removed.name, report.reason)
        report.log_files = count
        if count:
            self._unclean_queues = list(self._queues)
            if self._index is not None:
                report.index_files = self._index.remove_expired(self._log.min_offset)
        report.queue_files = self._clean_queues()
        if self._unclean_queues:
            self._clean_at_ms = now_ms + _NEXT_SLICE_MS
        self._log.sweep()
        self.stats.removed_log_files += report.log_files
        self.stats.removed_queue_files += report.queue_files
        self.stats.removed_index_files += report.index_files
        return report

    def _clean_queues(self) -> int:
        """Drop expired queue files, so many queues at a time."""
        removed = 0
        for _ in range(min(_QUEUES_PER_CLEAN, len(self._unclean_queues))):
            queue = self._unclean_queues.pop()
            removed += queue.remove_expired(self._log.min_offset)
        self._queues.pool.sweep()
        return removed

    def _set_disk_full(self, is_full: bool, ratio: float) -> None:
        if is_full and self._disk_full_remark is None:
            log.error("disk_full used=%.2f limit=%.2f", ratio, self._config.warning_ratio)
        elif not is_full and self._disk_full_remark is not None:
            log.info("disk_full_over used=%.2f", ratio)
        self._disk_full_remark = (
            f"disk {ratio:.2f} full, above the limit of {self._config.warning_ratio:.2f}; "
            f"appends go on once it is at {self._config.forcible_ratio:.2f} or below"
            if is_full
            else None
        )

    @property
    def clean_due_ms(self) -> int:
        """When clean is to be called next."""
        return self._clean_at_ms

    @property
    def is_disk_full(self) -> bool:
        return self._disk_full_remark is not None

    @property
    def flush_work(self) -> int:
        """What waits to become durable: 1 for the log, 2 for queues (the index goes with them); 4:
        something waits to be committed."""
        log = self._log
        work = (log.write_at > log.flushed_at) | (2 if self._queues.dirty else 0)
        if log.staging is not None and log.write_at > log.committed_at:
            work |= 4
        return work

    def next_deadline_ms(self, now_ms: int) -> int:
        """When take_flush, take_queue_flush or clean next have something to do."""
        if self._refusal is not None:
            return self._clean_at_ms
        return min(self._clean_at_ms, self._flush.next_ms(now_ms))

    def close(self, now_ms: int, last: Callable[[], None] | None = None) -> None:
        """Make everything durable and let go; `abort` stays if that can't be promised. `last` is
        called when messages and queues are durable, for what must not be so before them."""
        if self._is_closed:
            return
        self._is_closed = True
        is_clean = self._refusal is None and self._make_all_durable(now_ms, last)
        self._refusal = self._refusal or "the store is closed"
        if is_clean:
            self._log.remove_unused()
            self._files.remove(layout.ABORT)
        log.info("store_closed is_clean=%s log_end=%d", is_clean, self._log.write_at)
        self._release()

    def abandon(self) -> None:
        """Let go as a killed process would: nothing more is made durable, `abort` stays."""
        if not self._is_closed:
            self._is_closed = True
            self._refusal = self._refusal or "the store was abandoned"
            self._release()

    def _make_all_durable(self, now_ms: int, last: Callable[[], None] | None) -> bool:
        try:
            self._flush.sync_log(self._last_store_ms)
            self.dispatch(now_ms)
            if self.is_dispatch_behind:
                return False
            self._flush.sync_queues(self._dispatcher.position, self._dispatcher.last_store_ms)
            if last is not None:
                last()
        except OSError as error:
            self.flush_failed("close", str(error), now_ms)
            return False
        return True
