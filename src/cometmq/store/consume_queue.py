"""One consume queue: the n-th unit points to the n-th message of a topic's queue.

     0 i64 log offset    8 i32 record size    12 i64 tags code          unit n at byte 20 * n

Owns: the units of one queue, its bounds [min_offset, max_offset) and its numbering. One rule: a
unit stands at its own index or not at all, and a number is never given twice: whatever expires or
is lost, the queue goes on where it was. A blank unit (0, 0x7FFFFFFF, 0) fills the front of a file
that begins in mid-numbering; inside a queue a gap is filled with (end of the record before it,
0x7FFFFFFF, 0), so that offsets stay sorted and expire in turn. Neither points to a record.

The queue is derived from the log: a damaged one is cut and rebuilt, never believed.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable

from cometmq.store.ends import QueueEnds
from cometmq.store.layout import UNIT_BYTES
from cometmq.store.segment import Segment, Segments

log = logging.getLogger("cometmq.store")

BLANK_SIZE = 0x7FFFFFFF
UNIT = struct.Struct(">qiq")
_OFFSET = struct.Struct(">q")
_BLANK_UNIT = UNIT.pack(0, BLANK_SIZE, 0)
_SCAN_FIRST_UNITS = 128  # a page is enough for most queues; each later step takes four times more
_SCAN_MOST_UNITS = 32768
MAX_INDEX = 2**58  # beyond, the byte position leaves 63 bits
MAX_GAP_UNITS = 1_000_000  # a wider gap is not filled: the queue begins anew after it


class ConsumeQueue:
    """Units of one queue; `ends` has its bounds."""

    __slots__ = ("_dirty", "_flushed_at", "_tail", "ends", "segments")

    def __init__(
        self, ends: QueueEnds, segments: Segments, dirty: dict[Segment, ConsumeQueue]
    ) -> None:
        self.ends = ends
        self.segments = segments
        self._tail: Segment | None = None
        self._dirty = dirty
        self._flushed_at = 0  # bytes; only for the rule of least pages

    @property
    def topic(self) -> str:
        return self.ends.topic

    @property
    def queue_id(self) -> int:
        return self.ends.queue_id

    @property
    def min_offset(self) -> int:
        return self.ends.min_offset

    @property
    def max_offset(self) -> int:
        return self.ends.max_offset

    # --------------------------------------------------------------------------------------- write

    def put(self, index: int, log_offset: int, size: int, tags_code: int) -> bool:
        """Write the unit of a record; False if it was ignored because it is there already."""
        ends = self.ends
        if (index != ends.max_offset or log_offset < ends.log_end) and not self._is_next(
            index, log_offset, size
        ):
            return False
        at = index * UNIT_BYTES
        segment = self._tail
        if segment is None or at >= segment.start + segment.size:
            segment = self._tail = self._segment_for(at)
        UNIT.pack_into(segment.buffer, at - segment.start, log_offset, size, tags_code)
        if not segment.is_dirty:
            self._mark(segment)
        ends.max_offset = index + 1
        ends.log_end = log_offset + size
        return True

    def warm(self) -> None:
        """Let compiled code write the units that follow the one just put."""
        if self._tail is not None:
            self.ends.pin_tail(self._tail.pin(), self._mark_tail)
            self.ends.is_marked = self._tail.is_dirty

    def _mark_tail(self) -> None:
        assert self._tail is not None
        self._mark(self._tail)

    def warm_read(self, index: int) -> None:
        """Let compiled code read the units around this one."""
        segment = self.segments.find(index * UNIT_BYTES)
        if segment is not None:
            self.ends.pin_read(segment.pin())

    def _is_next(self, index: int, log_offset: int, size: int) -> bool:
        """The rare cases of put; True once the queue's end has been moved to `index`."""
        if log_offset + size <= self.ends.log_end:
            return False
        if index > MAX_INDEX:
            log.error("queue_number_absurd %s index=%d log_offset=%d", self, index, log_offset)
            return False
        if index < self.ends.max_offset:
            if index == 0:
                # Only a topic that was deleted and made again starts over.
                log.warning("queue_restarted %s former_max=%d", self, self.ends.max_offset)
                self.restart(0)
                return True
            log.error("queue_number_reused %s index=%d log_offset=%d", self, index, log_offset)
            return False
        if index == self.ends.max_offset:
            return True
        if self.segments.items and index - self.ends.max_offset <= MAX_GAP_UNITS:
            log.error("queue_gap_filled %s begin=%d end=%d", self, self.ends.max_offset, index)
            filler = UNIT.pack(self.ends.log_end, BLANK_SIZE, 0)
            for missing in range(self.ends.max_offset, index):
                self._write(missing, filler)
            self.ends.max_offset = index
        else:
            log.info("queue_begins %s index=%d former_max=%d", self, index, self.ends.max_offset)
            self.restart(index)
        return True

    def restart(self, index: int) -> None:
        """Forget all units and go on at `index`; the number survives a restart of the store."""
        for segment in self.segments.items:
            self._dirty.pop(segment, None)
            segment.remove()
        self.segments.items.clear()
        file_bytes = self.segments.file_bytes
        at = index * UNIT_BYTES
        segment = self._tail = self.segments.create(at - at % file_bytes)
        count = (at - segment.start) // UNIT_BYTES
        segment.buffer[: at - segment.start] = _BLANK_UNIT * count
        self._mark(segment)
        self._flushed_at = segment.start
        self.ends.min_offset = self.ends.max_offset = index
        self.ends.next_offset = max(self.ends.next_offset, index)

    def _write(self, index: int, unit: bytes) -> None:
        at = index * UNIT_BYTES
        segment = self._segment_for(at)
        begin = at - segment.start
        segment.buffer[begin : begin + UNIT_BYTES] = unit
        self._mark(segment)

    def _mark(self, segment: Segment) -> None:
        segment.is_dirty = True
        self._dirty[segment] = self

    def _segment_for(self, at: int) -> Segment:
        found = self.segments.find(at)
        return found if found is not None else self.segments.create(at)

    # ---------------------------------------------------------------------------------------- read

    def units(self, index: int, count: int) -> bytes:
        """Up to `count` units from `index` on, of one file; empty if the file is missing."""
        assert self.ends.min_offset <= index < self.ends.max_offset, (str(self), index)
        at = index * UNIT_BYTES
        segment = self.segments.find(at)
        if segment is None:
            return b""
        end = min(at + count * UNIT_BYTES, segment.end, self.ends.max_offset * UNIT_BYTES)
        return bytes(segment.buffer[at - segment.start : end - segment.start])

    def unit(self, index: int) -> tuple[int, int, int]:
        """(log offset, record size, tags code) of one unit that exists."""
        at = index * UNIT_BYTES
        segment = self.segments.find(at)
        assert segment is not None, (str(self), index)
        log_offset, size, tags_code = UNIT.unpack_from(segment.buffer, at - segment.start)
        return log_offset, size, tags_code

    def first(self, begin: int, end: int, is_past: Callable[[int], bool]) -> int:
        """The first index in [begin, end) for which `is_past` holds, else `end`; by halving."""
        while begin < end:
            middle = (begin + end) // 2
            if is_past(middle):
                end = middle
            else:
                begin = middle + 1
        return begin

    def _log_offset(self, index: int) -> int:
        """A unit's log offset; below every real one for the blanks at the front of a file."""
        log_offset, size, _ = self.unit(index)
        return -1 if size == BLANK_SIZE and log_offset == 0 else log_offset

    # -------------------------------------------------------------------------------------- bounds

    def load(self) -> None:
        """Find the end of the queue on disk: the first unit that was never written."""
        self.segments.load()
        items = self.segments.items
        if not items:
            return
        # As RocketMQ: older files than the last three were full long before any crash.
        for segment in items[-3:]:
            used = count_units(segment.buffer, segment.size)
            end = segment.start + used * UNIT_BYTES
            if end < segment.end:
                break
        self._end_at(end // UNIT_BYTES)
        self.ends.min_offset = items[0].start // UNIT_BYTES

    def _end_at(self, index: int) -> None:
        """Make `index` the end: later files go, and the next number follows."""
        at = index * UNIT_BYTES
        keep = max(at, self.segments.start)
        for segment in self.segments.remove_after(keep):
            self._dirty.pop(segment, None)
        self._tail = self.segments.items[-1] if self.segments.items else None
        self._flushed_at = at
        self.ends.max_offset = self.ends.next_offset = index
        self.ends.min_offset = min(self.ends.min_offset, index)
        self.ends.log_end = 0
        if self._tail is not None and at > self.segments.start:
            log_offset, size, _ = self.unit(index - 1)
            if size != BLANK_SIZE:
                self.ends.log_end = log_offset + size
            else:
                self.ends.log_end = log_offset

    def cut(self, log_offset: int) -> bool:
        """Drop the units of records at or after `log_offset`; True if there were any."""
        if self.ends.log_end <= log_offset:
            return False
        first = self.segments.start // UNIT_BYTES
        self.cut_to(
            self.first(
                first, self.ends.max_offset, lambda index: self._log_offset(index) >= log_offset
            )
        )
        return True

    def cut_to(self, index: int) -> None:
        """Drop the units from `index` on."""
        self._end_at(index)
        self.wipe_tail()

    def wipe_tail(self) -> None:
        """Zero what stands behind the end: a stale unit there would be taken for a new one."""
        segment = self._tail
        if segment is not None:
            at = self.ends.max_offset * UNIT_BYTES - segment.start
            if at < segment.size:
                segment.zero_from(at, is_durable=False)
                self._mark(segment)

    def correct_min(self, log_min: int) -> None:
        """Move the lower bound past units whose records have expired; never restarts at 0.

        With all expired it equals max_offset. Asked for when a bound is read, so that dropping a
        log file costs nothing for the thousands of queues that nobody looks at.
        """
        self.ends.log_min = log_min
        begin = max(self.ends.min_offset, self.segments.start // UNIT_BYTES)
        if begin < self.ends.max_offset:
            is_past = self._is_kept(log_min)
            begin = self.first(begin, self.ends.max_offset, is_past)
        self.ends.min_offset = begin

    def _is_kept(self, log_min: int) -> Callable[[int], bool]:
        return lambda index: self._log_offset(index) >= log_min

    def remove_expired(self, log_min: int) -> int:
        """Delete files (never the last) all of whose records have expired."""
        removed = 0
        while len(self.segments.items) > 1:
            last = self.segments.items[0].end // UNIT_BYTES - 1
            if self._log_offset(last) >= log_min:
                break
            self._dirty.pop(self.segments.items[0], None)
            self.segments.remove_first()
            removed += 1
        return removed

    # --------------------------------------------------------------------------------------- flush

    def dirty_pages(self, page_bytes: int) -> int:
        return self.ends.max_offset * UNIT_BYTES // page_bytes - self._flushed_at // page_bytes

    def flush_taken(self) -> None:
        self._flushed_at = self.ends.max_offset * UNIT_BYTES

    def __str__(self) -> str:
        return f"topic={self.ends.topic} queue={self.ends.queue_id}"


def count_units(buffer: memoryview, size: int) -> int:
    """How many units stand before the first hole (record size 0 or below).

    Reads only as far as there are units, in growing steps, because most of a file is a hole of the
    disk that reading would fill with zeros in memory. The four bytes of all sizes of a step are
    taken as four strided copies and searched as one string; a loop per unit takes 100 times longer.
    """
    whole = size // UNIT_BYTES
    at, step = 0, _SCAN_FIRST_UNITS
    while at < whole:
        count = min(step, whole - at)
        begin, end = at * UNIT_BYTES, (at + count) * UNIT_BYTES
        top = buffer[begin + 8 : end : UNIT_BYTES].tobytes()
        sizes = int.from_bytes(top, "big")
        for byte in (9, 10, 11):
            sizes |= int.from_bytes(buffer[begin + byte : end : UNIT_BYTES].tobytes(), "big")
        hole = sizes.to_bytes(count, "big").find(b"\0")
        if not top.isascii():  # a negative size: damage, and an end as well
            bad = next(n for n, byte in enumerate(top) if byte > 127)
            hole = bad if hole < 0 else min(hole, bad)
        if hole >= 0:
            return at + hole
        at += count
        step = min(step * 4, _SCAN_MOST_UNITS)
    return whole
