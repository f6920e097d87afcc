"""Reading from the store: fetches, single records, times and keys.

Owns: the answers to a fetch (RocketMQ's table of statuses) and its limits. One rule: bytes leave as
copies, so nothing that a reader holds keeps a file alive, and a unit is believed only if a record
of its size stands where it points.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cometmq.errors import StoreCorrupt
from cometmq.message import StoredMessage
from cometmq.store import layout
from cometmq.store.commit_log import CommitLog
from cometmq.store.consume_queue import BLANK_SIZE, UNIT, ConsumeQueue
from cometmq.store.dispatch import keys_of, unique_of
from cometmq.store.key_index import KeyIndex
from cometmq.store.layout import StoreConfig
from cometmq.store.queues import Queues
from cometmq.store.results import Accept, Fetched, FetchStatus, FoundByKey, StoreStats
from cometmq.wire.codes import SysFlag
from cometmq.wire.record import Blank, Scan, properties_of

if TYPE_CHECKING:
    from cometmq._fast.hot import Hot

log = logging.getLogger("cometmq.store")

_SYS_FLAG = struct.Struct(">i")
_STORE_MS = struct.Struct(">q")
_FLAG_AT = 36  # the highest byte of the flags in a record
_MAY_EXPIRE = SysFlag.MAY_EXPIRE >> 24
_BORN_V6 = int(SysFlag.BORN_HOST_V6)
_MAX_CANDIDATES = 4096  # index entries looked at in one query


class Reading:
    """The reading half of the store's face."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: Queues,
        index: KeyIndex | None,
        config: StoreConfig,
        stats: StoreStats,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._index = index
        self._config = config
        self._stats = stats

    def reconfigure(self, config: StoreConfig) -> None:
        self._config = config

    # --------------------------------------------------------------------------------------- fetch

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        accept: Accept | None,
        max_bytes: int,
        max_scan: int | None,
        is_stale: Callable[[memoryview], bool] | None,
    ) -> Fetched:
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return Fetched(FetchStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        low, high = self._min_offset(queue), queue.max_offset
        if high == 0:
            return Fetched(FetchStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        if offset < low:
            return Fetched(FetchStatus.OFFSET_TOO_SMALL, low, low, high)
        if offset >= high:
            is_one = offset == high
            status = (
                FetchStatus.OFFSET_OVERFLOW_ONE if is_one else FetchStatus.OFFSET_OVERFLOW_BADLY
            )
            return Fetched(status, high, low, high)
        max_count = max(max_count, 1)
        wanted = max_count if accept is None else max(self._config.max_scan_units, max_count)
        if max_scan is not None:
            wanted = min(wanted, max_scan)
        units = queue.units(offset, wanted)
        if not units:
            file_units = self._config.queue_file_bytes // layout.UNIT_BYTES
            following = offset - offset % file_units + file_units
            return Fetched(FetchStatus.OFFSET_FOUND_NULL, min(following, high), low, high)
        found = self._collect(units, offset, max_count, accept, max_bytes, low, high, is_stale)
        if found.count:
            self._stats.fetched_count += found.count
            self._stats.fetched_bytes += len(found.body)
        else:
            self._stats.fetch_misses += 1
        return found

    def _collect(
        self,
        units: bytes,
        offset: int,
        max_count: int,
        accept: Accept | None,
        max_bytes: int,
        low: int,
        high: int,
        is_stale: Callable[[memoryview], bool] | None,
    ) -> Fetched:
        """Walk units until a limit; the first match is taken whatever its size."""
        config, commit_log = self._config, self._log
        hot_from = commit_log.write_at - config.in_memory_bytes
        status = FetchStatus.NO_MATCHED_MESSAGE
        parts: list[memoryview] = []
        size_sum = 0
        skip_below = -1
        is_cold = False
        stale = 0
        for log_offset, size, tags_code in UNIT.iter_unpack(units):
            if log_offset < skip_below or size == BLANK_SIZE:
                offset += 1
                if not parts:
                    status = FetchStatus.MESSAGE_WAS_REMOVING
                continue
            is_cold = log_offset < hot_from
            if parts:
                count_limit = config.max_cold_fetch_count if is_cold else config.max_fetch_count
                size_limit = config.max_cold_fetch_bytes if is_cold else config.max_fetch_bytes
                if (
                    len(parts) >= max_count
                    or len(parts) >= count_limit
                    or size_sum + size > size_limit
                    or size_sum + size > max_bytes
                ):
                    break
            is_wanted = True if accept is None else accept(tags_code, log_offset)
            if is_wanted is None:
                break
            offset += 1
            if not is_wanted:
                continue
            view = commit_log.view(log_offset, size)
            if view is None:
                if not parts:
                    status = FetchStatus.MESSAGE_WAS_REMOVING
                if log_offset < commit_log.min_offset:
                    skip_below = commit_log.next_file_start(log_offset)
                else:
                    self._stats.damaged_units += 1
                continue
            if view[_FLAG_AT] & _MAY_EXPIRE and is_stale is not None and is_stale(view):
                stale += 1
                continue
            parts.append(view)
            size_sum += size
        if not parts:
            return Fetched(status, offset, low, high, is_cold=is_cold, stale=stale)
        body = b"".join(parts)
        return Fetched(FetchStatus.FOUND, offset, low, high, body, len(parts), is_cold, stale)

    # --------------------------------------------------------------------------- bounds and times

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get(topic, queue_id)
        return self._min_offset(queue) if queue is not None else 0

    def _min_offset(self, queue: ConsumeQueue) -> int:
        log_min = self._log.min_offset
        if queue.ends.log_min != log_min:
            queue.correct_min(log_min)
        return queue.min_offset

    def store_ms_at(self, topic: str, queue_id: int, offset: int) -> int | None:
        queue = self._queues.get(topic, queue_id)
        if queue is None or not self._min_offset(queue) <= offset < queue.max_offset:
            return None
        return self._store_ms(queue, offset)

    def _store_ms(self, queue: ConsumeQueue, offset: int) -> int | None:
        log_offset, size, _ = queue.unit(offset)
        view = self._log.view(log_offset, size)
        if view is None:
            return None
        (sys_flag,) = _SYS_FLAG.unpack_from(view, 36)
        (store_ms,) = _STORE_MS.unpack_from(view, 68 if sys_flag & _BORN_V6 else 56)
        assert isinstance(store_ms, int)
        return store_ms

    def first_store_ms(self) -> int | None:
        """The time of the oldest record in the log."""
        if self._log.min_offset >= self._log.committed_at:
            return None
        found = self._log.scan(self._log.min_offset, verify_crc=False)
        return found.store_ms if type(found) is Scan else None

    def offset_by_time(self, topic: str, queue_id: int, at_ms: int, is_upper: bool) -> int:
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        low, high = self._min_offset(queue), queue.max_offset

        def is_past(index: int) -> bool:
            store_ms = self._store_ms(queue, index)
            # A blank has no time; it stands before everything that has one.
            return store_ms is not None and (store_ms > at_ms if is_upper else store_ms >= at_ms)

        found = queue.first(low, high, is_past)
        return max(low, found - 1) if is_upper else found

    # ------------------------------------------------------------------------------ single records

    def record_at(self, log_offset: int) -> bytes | None:
        if not self._log.min_offset <= log_offset < self._log.committed_at:
            return None
        found = self._log.scan(log_offset, verify_crc=True)
        if type(found) is not Scan:
            return None
        view = self._log.view(log_offset, found.size)
        return bytes(view) if view is not None else None

    def scan_at(self, log_offset: int) -> Scan | None:
        if not self._log.min_offset <= log_offset < self._log.committed_at:
            return None
        found = self._log.scan(log_offset, verify_crc=False)
        return found if type(found) is Scan else None

    def records(self, begin: int, having: str, hot: Hot | None) -> Iterator[Scan]:
        end, wanted = self._log.committed_at, having.encode("utf-8")
        while begin < end:
            segment = self._log.segments.find(begin)
            if hot is not None and having and segment is not None:
                begin = hot.pass_over(segment.buffer, segment.start, begin, end, wanted)
                if begin >= end:
                    return
            found = self._log.scan(begin, verify_crc=False)
            if type(found) is Scan:
                if having in found.properties:
                    yield found
            elif type(found) is not Blank:
                raise StoreCorrupt(f"no record begins at {begin} in the log, which ends at {end}")
            begin += found.size

    def message_at(self, log_offset: int) -> StoredMessage | None:
        if not self._log.min_offset <= log_offset < self._log.committed_at:
            return None
        return self._log.message(log_offset)

    def by_properties(self, accepts: Callable[[str], bool], most_chars: int) -> Accept:
        """For `fetch`, in this turn: asks by the property string of each record. One that can't be
        read is let through: the fetch tells what is wrong with it. After so many characters, but
        not before the first string, it has looked at enough."""
        segments, limit = self._log.segments, self._log.committed_at
        begin = end = 0
        buffer = memoryview(b"")

        def accept(tags_code: int, log_offset: int) -> bool | None:
            nonlocal begin, end, buffer, most_chars
            if most_chars <= 0:
                return None
            if not begin <= log_offset < end:
                segment = segments.find(log_offset)
                if segment is None:
                    return True
                begin, end = segment.start, segment.end
                buffer = segment.buffer[:]  # a slice of its own pins the file
            if log_offset >= limit:
                return True
            text = properties_of(buffer, log_offset - begin, end - begin, log_offset)
            if text is None:
                return True
            most_chars -= len(text)
            return accepts(text)

        return accept

    def properties_at(self, log_offset: int) -> str | None:
        commit_log = self._log
        if not commit_log.segments.start <= log_offset < commit_log.committed_at:
            return None
        return commit_log.properties(log_offset)

    def find_by_key(
        self,
        topic: str,
        key: str,
        max_count: int,
        begin_ms: int,
        end_ms: int,
        *,
        is_unique: bool,
    ) -> FoundByKey:
        if self._index is None:
            return FoundByKey([], 0, 0)
        wanted = min(max_count, layout.MAX_FOUND_BY_KEY)
        hits: dict[int, None] = {}
        for looked, log_offset in enumerate(self._index.find(topic, key, begin_ms, end_ms)):
            if len(hits) >= wanted or looked >= _MAX_CANDIDATES:
                break
            if log_offset in hits:
                continue
            if self._has_key(log_offset, topic, key, begin_ms, end_ms, is_unique):
                hits[log_offset] = None
        records = [record for at in sorted(hits) if (record := self.record_at(at)) is not None]
        return FoundByKey(records, self._index.end_ms, max(self._index.end_offset, 0))

    def _has_key(
        self, log_offset: int, topic: str, key: str, begin_ms: int, end_ms: int, is_unique: bool
    ) -> bool:
        """Hashes collide: look at the record itself, and at its exact time."""
        if not self._log.min_offset <= log_offset < self._log.committed_at:
            return False
        found = self._log.scan(log_offset, verify_crc=False)
        return (
            type(found) is Scan
            and found.topic == topic
            and begin_ms <= found.store_ms <= end_ms
            and key in (unique_of if is_unique else keys_of)(found.properties)
        )
