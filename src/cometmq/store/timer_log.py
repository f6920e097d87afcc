"""The timer log: one unit for each message that waits in the timer wheel, in files of one size.

     0 i32 52                     4 i64 unit before in the same slot, -1 none
    12 i32 1, +2 rolled, +4 deletes another          16 i64 write ms (floored to the precision)
    24 i32 slot's time - write ms       28 i64 log offset of the message       36 i32 its size
    40 i32 Java's hash of its real topic             44 i64 0
    ... i32 bytes left, i64 0, i32 0xCBD43194        if 52 + 16 > bytes left: the file is closed

    00000034 ffffffffffffffff 00000001 0000018bcfe56800 000007d0 0000000000000400 0000012c ...
        first of its slot, written at 1700000000000, due 2 s later, a record of 300 bytes at 1024

Owns: these files. One rule: units are only added, a slot's chain runs backwards through them, and
after the end there are zeros: what recovery cuts can't come back. It knows no slots and no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec

from cometmq.ports import Files, SyncTarget
from cometmq.store.layout import TIMER_LOG
from cometmq.store.segment import MappedPool, Segment, Segments

UNIT_BYTES = 52
DEFAULT_BIT, ROLL_BIT, DELETE_BIT = 1, 2, 4
BLANK_MAGIC = -0x342BCE6C  # 0xCBD43194, signed
NO_UNIT = -1

_UNIT = struct.Struct(">iqiqiqiiq")
_BLANK = struct.Struct(">iqi")
_MAX_OPEN_FILES = 16  # 100 MiB each; old ones are mapped again when a slot reaches back to them


class Unit(msgspec.Struct, frozen=True, gc=False):
    """One timer."""

    prev: int
    magic: int
    write_ms: int
    delay_ms: int
    log_offset: int
    size: int
    topic_hash: int

    @property
    def slot_ms(self) -> int:
        return self.write_ms + self.delay_ms


class TimerLog:
    """Adds units and reads them back. `load`, then `recover`, before anything else."""

    def __init__(self, files: Files, file_bytes: int) -> None:
        assert file_bytes >= UNIT_BYTES + _BLANK.size, file_bytes
        self._pool = MappedPool(files, _MAX_OPEN_FILES)
        self._segments = Segments(self._pool, TIMER_LOG, file_bytes)
        self._dirty: dict[Segment, None] = {}
        self._most = (file_bytes - _BLANK.size) // UNIT_BYTES * UNIT_BYTES
        self.file_bytes = file_bytes
        self.end = 0

    def load(self) -> None:
        """Take the files on disk; StoreCorrupt if one has another size."""
        self._segments.load()
        self.end = self._segments.end

    @property
    def is_empty(self) -> bool:
        """Whether there is no file yet."""
        return not self._segments.items

    @property
    def unit_bytes(self) -> int:
        """What the units of a file take."""
        return self._most

    @property
    def start(self) -> int:
        return self._segments.start

    # ---------------------------------------------------------------------------------- in and out

    def append(self, unit: Unit) -> int:
        """Add a unit; returns its position, before it is durable. OSError if there is no room."""
        segment = self._segments.find(self.end)
        if segment is not None and self.end - segment.start >= self._most:
            following = self._segments.find(segment.end) or self._segments.create(segment.end)
            buffer = following.buffer  # made before the blank: if the disk refuses, nothing changed
            at = self.end - segment.start
            _BLANK.pack_into(segment.buffer, at, segment.size - at, 0, BLANK_MAGIC)
            self._dirty[segment] = None
            self.end, segment = following.start, following
        elif segment is None:
            segment = self._segments.create(self.end)
            buffer = segment.buffer
        else:
            buffer = segment.buffer
        position = self.end
        _UNIT.pack_into(
            buffer,
            position - segment.start,
            UNIT_BYTES,
            unit.prev,
            unit.magic,
            unit.write_ms,
            unit.delay_ms,
            unit.log_offset,
            unit.size,
            unit.topic_hash,
            0,
        )
        self._dirty[segment] = None
        self.end = position + UNIT_BYTES
        return position

    def tail(self) -> tuple[memoryview, int, int] | None:
        """The file that units are added to, its first byte and where its units must end; None
        if the next unit needs another file."""
        segment = self._segments.find(self.end)
        if segment is None or self.end - segment.start >= self._most:
            return None
        return segment.buffer, segment.start, segment.start + self._most

    def grown(self, count: int) -> None:
        """So many units were written into the tail by compiled code."""
        segment = self._segments.find(self.end)
        assert segment is not None, self.end
        self._dirty[segment] = None
        self.end += count * UNIT_BYTES

    def file_of(self, position: int) -> tuple[memoryview, int, int] | None:
        """The file that holds a unit, its first byte and where its units end."""
        segment = self._segments.find(position)
        if segment is None:
            return None
        return segment.buffer, segment.start, min(self.end, segment.start + self._most)

    def unit(self, position: int) -> Unit | None:
        """The unit at a position; None if none is there."""
        segment = self._segments.find(position)
        if segment is None or position >= self.end or position - segment.start >= self._most:
            return None
        size, *fields, _ = _UNIT.unpack_from(segment.buffer, position - segment.start)
        return Unit(*fields) if size == UNIT_BYTES and is_magic(fields[1]) else None

    def last(self) -> Unit | None:
        """The newest unit; None if there is none."""
        segment = self._segments.find(max(self.end - 1, 0))
        if segment is None:
            return None
        return self.unit(segment.start + min(self._most, self.end - segment.start) - UNIT_BYTES)

    def units(self, begin: int) -> Iterator[tuple[int, Unit]]:
        """All units from the file of `begin` on, with their positions."""
        for segment in self._from(begin):
            most = min(self._most, self.end - segment.start)
            whole = segment.buffer[: max(most, 0) // UNIT_BYTES * UNIT_BYTES]
            position = segment.start
            for fields in _UNIT.iter_unpack(whole):
                if fields[2] == BLANK_MAGIC:
                    break
                yield position, Unit(*fields[1:8])
                position += UNIT_BYTES

    def _from(self, begin: int) -> list[Segment]:
        return [segment for segment in self._segments.items if segment.end > begin]

    # ------------------------------------------------------------------------------------ recovery

    def recover(
        self,
        begin: int,
        durable: int,
        is_good: Callable[[int, Unit], bool],
        pass_over: Callable[[memoryview, int, int], int] | None = None,
    ) -> int:
        """Find the end, walking from the file of `begin` on: units are believed as long as they
        are whole and `is_good` says so. The rest is cut, durably. Units from `durable` on may be in
        the system's memory only, left by a process that was killed: they count as added anew.
        Returns how many were cut off, as far as they can be told.

        `pass_over` is given a file, where it begins and a unit, and tells the next one that has to
        be looked at: those before are known to be good."""
        end = self._find_end(min(begin, max(self._segments.end - 1, 0)), is_good, pass_over)
        cut = 0
        segment = self._segments.find(end)
        if segment is not None:
            tail = segment.buffer[end - segment.start :]
            for fields in _UNIT.iter_unpack(tail[: len(tail) // UNIT_BYTES * UNIT_BYTES]):
                if fields[0] != UNIT_BYTES:
                    break
                cut += 1
            tail.release()
            segment.zero_from(end - segment.start)
        self._segments.remove_after(end)
        self.end = end
        self._dirty |= dict.fromkeys(self._from(durable))
        return cut

    def _find_end(
        self,
        begin: int,
        is_good: Callable[[int, Unit], bool],
        pass_over: Callable[[memoryview, int, int], int] | None,
    ) -> int:
        position = self._segments.start
        for segment in self._from(begin):
            position, buffer, most = segment.start, segment.buffer, segment.start + self._most
            while True:
                if pass_over is not None:
                    position = pass_over(buffer, segment.start, position)
                if position >= most:
                    break
                fields = _UNIT.unpack_from(buffer, position - segment.start)
                if fields[2] == BLANK_MAGIC:
                    break
                if fields[0] != UNIT_BYTES or not is_magic(fields[2]) or fields[8]:
                    return position
                if not is_good(position, Unit(*fields[1:8])):
                    return position
                position += UNIT_BYTES
            if position >= most:
                _, _, magic = _BLANK.unpack_from(buffer, self._most)
                if magic != BLANK_MAGIC:
                    return position  # full, and not closed yet
            position = segment.end
        return position

    # -------------------------------------------------------------------------------- ends of life

    def take_dirty(self) -> list[SyncTarget]:
        """What makes all units durable that were added since this was last asked."""
        targets = [segment.target() for segment in self._dirty]
        self._dirty.clear()
        return targets

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    def remove_expired(self, log_min: int) -> int:
        """Delete the oldest files while even their last message has left the log."""
        removed = 0
        while len(self._segments.items) > 1:
            first = self._segments.items[0]
            last = self.unit(first.start + self._most - UNIT_BYTES)
            if last is not None and last.log_offset >= log_min:
                break
            self._dirty.pop(first, None)
            self._segments.remove_first()
            removed += 1
        return removed

    def close(self) -> None:
        self._pool.close()


def is_magic(magic: int) -> bool:
    return 0 <= magic <= 0xF
