"""The timer wheel: for each second of two weeks, the first and the last unit of that slot.

    slot (time / precision) % slots, 32 bytes:
     0 i64 time / precision      8 i64 first unit      16 i64 last unit     24 i32 count    28 i32 0

    000000006553f100 0000000000000000 0000000000000068 00000003 00000000
        1700000000: three timers; the first at 0 of the timer log, the last at 104

Owns: the file `timerwheel`, one array of a fixed length. One rule: a slot speaks only for the time
that is written in it; whoever asks for another time finds it empty, so nothing is ever cleared. The
count is told to people and to flow control only: a unit that deletes counts as one less.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from cometmq.ports import Files, SyncTarget
from cometmq.store.layout import TIMER_WHEEL

SLOT_BYTES = 32
WHEEL_SLOTS = 2 * 7 * 24 * 3600  # whatever the precision: RocketMQ refuses a file of another length

_SLOT = struct.Struct(">qqqii")
_PAGE_BYTES = 4096
_NO_PAGE = bytes(_PAGE_BYTES)


class Slot(msgspec.Struct, frozen=True, gc=False):
    """What waits for one time."""

    time_ms: int
    first: int
    last: int
    count: int
    magic: int


class TimerWheel:
    """The mapped wheel; StoreCorrupt if the file has another length."""

    def __init__(self, files: Files, precision_ms: int, slots: int = WHEEL_SLOTS) -> None:
        assert slots > 0 < precision_ms, (slots, precision_ms)
        self._mapped = files.map(TIMER_WHEEL, slots * SLOT_BYTES)
        self._buffer = self._mapped.buffer
        self.slots = slots
        self.precision_ms = precision_ms
        self.is_dirty = False

    @property
    def buffer(self) -> memoryview:
        """For compiled code."""
        return self._buffer

    def get(self, time_ms: int) -> Slot | None:
        """The slot of a time; None if nothing was put there for it."""
        number = time_ms // self.precision_ms
        found = _SLOT.unpack_from(self._buffer, number % self.slots * SLOT_BYTES)
        if found[0] != number:
            return None
        return Slot(number * self.precision_ms, *found[1:])

    def put(self, time_ms: int, first: int, last: int, count: int, magic: int = 0) -> None:
        number = time_ms // self.precision_ms
        at = number % self.slots * SLOT_BYTES
        _SLOT.pack_into(self._buffer, at, number, first, last, count, magic)
        self.is_dirty = True

    def add(self, time_ms: int, position: int, count: int) -> None:
        """A unit was added for this time."""
        self.add_to(self.get(time_ms), time_ms, position, count)

    def add_to(self, slot: Slot | None, time_ms: int, position: int, count: int) -> None:
        """The same for who has asked for the slot already."""
        if slot is None:
            self.put(time_ms, position, position, count)
        else:
            first = position if slot.first < 0 else slot.first
            self.put(time_ms, first, position, slot.count + count, slot.magic)

    def live(self, begin_ms: int) -> Iterator[Slot]:
        """All slots for this time and later, in no order; pages never written to cost nothing."""
        begin = begin_ms // self.precision_ms
        size = self.slots * SLOT_BYTES
        for at in range(0, size, _PAGE_BYTES):
            page = bytes(self._buffer[at : at + _PAGE_BYTES])
            if page == _NO_PAGE[: len(page)]:
                continue
            for number, first, last, count, magic in _SLOT.iter_unpack(page):
                if number >= begin and number > 0:
                    yield Slot(number * self.precision_ms, first, last, count, magic)

    @property
    def is_blank(self) -> bool:
        """Whether nothing was ever put: a new file."""
        return next(self.live(0), None) is None

    def target(self) -> SyncTarget:
        return self._mapped

    def close(self) -> None:
        self._buffer = memoryview(b"")
        self._mapped.close()
