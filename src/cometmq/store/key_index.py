"""The key index: from a message's key and time to its place in the log.

    0 i64 begin ms   8 i64 end ms   16 i64 begin log offset   24 i64 end log offset
   32 i32 slots in use             36 i32 count              then slots x i32, then entries x 20:
    0 i32 key hash   4 i64 log offset   12 i32 seconds since begin   16 i32 previous in this slot

Entry 0 is never used, so count starts at 1 and a slot of 0 is empty. Keys hash as `topic#key`.
Files are named by the local time of their creation and are made of holes until used.

Owns: these files. One rule: a record enters once, in log order, all its keys at a time; the end
offset of the newest file says how far the index has come. Hashes may collide: whoever asks checks
the records.
"""

from __future__ import annotations

import array
import datetime
import logging
import struct
import sys
from collections.abc import Iterator
from functools import lru_cache
from operator import mul

from cometmq.errors import StoreCorrupt
from cometmq.ports import Files, SyncTarget
from cometmq.store.ends import PLAIN, IndexHead, Makers
from cometmq.store.layout import (
    INDEX,
    INDEX_ENTRY_BYTES,
    INDEX_HEAD_BYTES,
    INDEX_SLOT_BYTES,
    StoreConfig,
)
from cometmq.store.segment import MappedPool, Segment
from cometmq.wire.hashing import java_hash

log = logging.getLogger("cometmq.store")

_HEAD = struct.Struct(">qqqqii")
_SLOT = struct.Struct(">i")
_ENTRY = struct.Struct(">iqii")
_MAX_I32 = 2**31 - 1
_MAX_I64 = 2**63 - 1


class KeyIndex:
    """Index files, oldest first."""

    def __init__(self, files: Files, config: StoreConfig, make: Makers = PLAIN) -> None:
        self._files = files
        self._config = config
        self._make_head = make.index_head
        self._pool = MappedPool(files, config.max_open_index_files)
        self.items: list[IndexFile] = []

    def load(self) -> None:
        """Take the files on disk; StoreCorrupt names one whose size can't be right."""
        found = self._files.files(INDEX)
        expected = self._config.index_file_bytes
        for position, (name, size) in enumerate(found):
            if not name.isdigit():
                log.warning("stray_file name=%s/%s action=ignored", INDEX, name)
            elif size == expected:
                self.items.append(self._file(name))
            elif size == 0 and position == len(found) - 1:
                self._files.remove(f"{INDEX}/{name}")
            else:
                raise StoreCorrupt(
                    f"{INDEX}/{name} is {size} bytes, expected exactly {expected}; set "
                    f"index_slots and index_entries as they were, or remove the file"
                )

    @property
    def end_offset(self) -> int:
        """The log offset of the last record in the index; -1 if there is none."""
        return self.items[-1].head.end_offset if self.items else -1

    @property
    def end_ms(self) -> int:
        return self.items[-1].head.end_ms if self.items else 0

    def put(self, topic: str, keys: list[str], log_offset: int, store_ms: int, now_ms: int) -> None:
        """Enter all keys of one record; ignored if the index is past it already."""
        if self.items and log_offset <= self.items[-1].head.end_offset:
            if log_offset < self.items[-1].head.end_offset:
                return
            # The last record in the index: its keys may have straddled two files, the second of
            # which was removed after an unclean stop.
            keys = [key for key in keys if not self._holds(topic, key, log_offset)]
        for key in keys:
            if not self.items or self.items[-1].is_full:
                self._add(now_ms)
            self.items[-1].put(key_hash(topic, key), log_offset, store_ms)

    def _holds(self, topic: str, key: str, log_offset: int) -> bool:
        hashed = key_hash(topic, key)
        for item in self.items[-2:]:
            for found in item.find(hashed, 0, _MAX_I64):
                if found == log_offset:
                    return True
                if found < log_offset:
                    break
        return False

    def _add(self, now_ms: int) -> None:
        """A new file; until its first entry it carries its forerunner's end."""
        former = self.items[-1] if self.items else None
        name = _name_at(now_ms)
        if former is not None and name <= former.name:
            name = str(int(former.name) + 1).zfill(17)
        self.items.append(self._file(name))
        if former is not None:
            self.items[-1].preset(former.head.end_ms, former.head.end_offset)

    def _file(self, name: str) -> IndexFile:
        segment = Segment(self._pool, f"{INDEX}/{name}", 0, self._config.index_file_bytes)
        return IndexFile(segment, self._config, self._make_head())

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Log offsets that may match, newest first; times are true to the second only."""
        wanted = key_hash(topic, key)
        for item in reversed(self.items):
            if (
                item.head.count > 1
                and item.head.begin_ms <= end_ms
                and item.head.end_ms >= begin_ms
            ):
                yield from item.find(wanted, begin_ms, end_ms)
            if item.head.begin_ms < begin_ms and item.head.count > 1:
                return

    def remove_newer(self, index_ms: int) -> int:
        """After an unclean stop: drop the files that may have lost pages since `index_ms`.

        They are not lost: recovery walks the log from the end of the last file that stays. A file
        without an entry goes as well: a kill may have come before it was told where to begin. And
        so do all behind the first that goes: the time in a head that was never synced may be any.
        """
        kept = 0
        for item in self.items:
            head = item.head
            if item.is_empty or not head.begin_ms <= head.end_ms <= index_ms:
                break
            kept += 1
        removed = len(self.items) - kept
        while len(self.items) > kept:
            self.items.pop().remove()
        return removed

    def repair(self) -> None:
        """After an unclean stop: make the newest file's slots agree with its count."""
        if self.items:
            self.items[-1].repair_slots()

    def durable_ms(self, *, is_ms_over: bool) -> int:
        """The time that syncing the index now would prove: files that end no later are whole.

        While a record of the same millisecond may still enter, only the one before.
        """
        return self.end_ms if is_ms_over else self.end_ms - 1

    def remove_expired(self, log_min: int) -> int:
        """Delete files (never the last) that only point below `log_min`."""
        removed = 0
        while len(self.items) > 1 and self.items[0].head.end_offset < log_min:
            self.items.pop(0).remove()
            removed += 1
        return removed

    def cut(self, log_offset: int) -> int:
        """Drop files that point at or beyond `log_offset`, where the log now ends."""
        removed = 0
        while self.items and self.items[-1].head.end_offset >= log_offset:
            self.items.pop().remove()
            removed += 1
        return removed

    def take_dirty(self) -> list[SyncTarget]:
        targets: list[SyncTarget] = []
        for item in self.items:
            if item.segment.is_dirty:
                item.segment.is_dirty = False
                targets.append(item.segment.target())
        return targets

    @property
    def is_dirty(self) -> bool:
        return any(item.segment.is_dirty for item in self.items[-2:])

    def close(self) -> None:
        self._pool.close()


class IndexFile:
    """One file; its header is kept in numbers and written with every entry."""

    __slots__ = (
        "_entries_at",
        "_most",
        "_slots",
        "head",
        "segment",
    )

    def __init__(self, segment: Segment, config: StoreConfig, head: IndexHead) -> None:
        self.segment = segment
        self.head = head
        self._slots = config.index_slots
        self._most = config.index_entries
        self._entries_at = INDEX_HEAD_BYTES + INDEX_SLOT_BYTES * config.index_slots
        stored = _HEAD.unpack_from(segment.buffer, 0)
        head.begin_ms, head.end_ms, head.begin_offset, head.end_offset = stored[:4]
        head.slots_used, head.count = stored[4:]
        if head.count <= 0:  # new; RocketMQ writes a preset end but no count until the first entry
            head.count = 1
            if head.end_ms == 0 == head.end_offset:
                head.end_offset = -1

    @property
    def name(self) -> str:
        return self.segment.name.rpartition("/")[2]

    @property
    def is_full(self) -> bool:
        return self.head.count >= self._most

    @property
    def is_empty(self) -> bool:
        return self.head.count <= 1

    def preset(self, end_ms: int, end_offset: int) -> None:
        self.head.begin_ms = self.head.end_ms = end_ms
        self.head.begin_offset = self.head.end_offset = end_offset
        self._write_head(self.segment.buffer)

    def put(self, hashed: int, log_offset: int, store_ms: int) -> None:
        head = self.head
        assert head.count < self._most, self.name
        buffer = self.segment.buffer
        slot_at = INDEX_HEAD_BYTES + INDEX_SLOT_BYTES * (hashed % self._slots)
        (former,) = _SLOT.unpack_from(buffer, slot_at)
        count = head.count
        if not 0 < former < count:
            former = 0
            head.slots_used += 1
        if count == 1:
            head.begin_ms, head.begin_offset = store_ms, log_offset
        seconds = 0
        if head.begin_ms > 0:
            seconds = min(max((store_ms - head.begin_ms) // 1000, 0), _MAX_I32)
        entry_at = self._entries_at + INDEX_ENTRY_BYTES * count
        # Entry first, then the slot that shows it, then the count: a kill between them is harmless.
        _ENTRY.pack_into(buffer, entry_at, hashed, log_offset, seconds, former)
        _SLOT.pack_into(buffer, slot_at, count)
        head.count = count + 1
        head.end_ms, head.end_offset = store_ms, log_offset
        self._write_head(buffer)

    def _write_head(self, buffer: memoryview) -> None:
        head = self.head
        _HEAD.pack_into(
            buffer,
            0,
            head.begin_ms,
            head.end_ms,
            head.begin_offset,
            head.end_offset,
            head.slots_used,
            head.count,
        )
        self.segment.is_dirty = True

    def find(self, hashed: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        at = INDEX_HEAD_BYTES + INDEX_SLOT_BYTES * (hashed % self._slots)
        (number,) = _SLOT.unpack_from(self.segment.buffer, at)
        last = self.head.count
        while 0 < number < last:
            last = number  # chains only go down, so a damaged one can't turn in a circle
            entry_at = self._entries_at + INDEX_ENTRY_BYTES * number
            found, log_offset, seconds, number = _ENTRY.unpack_from(self.segment.buffer, entry_at)
            second_ms = self.head.begin_ms + seconds * 1000
            if second_ms + 999 < begin_ms:
                return
            if found == hashed and second_ms <= end_ms:
                yield log_offset

    def repair_slots(self) -> None:
        """Slots may reach the disk before the head that counts their entries. Such a slot hides
        its whole chain; the entries below the count are whole, so all slots follow from them."""
        buffer = self.segment.buffer
        slots = array.array("i", bytes(buffer[INDEX_HEAD_BYTES : self._entries_at]))
        if sys.byteorder == "little":
            slots.byteswap()
        if max(slots) < self.head.count and min(slots) >= 0:
            return
        log.warning("index_slots_repaired name=%s count=%d", self.name, self.head.count)
        slots = array.array("i", bytes(len(slots) * slots.itemsize))
        for number in range(1, self.head.count):
            entry_at = self._entries_at + INDEX_ENTRY_BYTES * number
            (hashed,) = _SLOT.unpack_from(buffer, entry_at)
            slots[abs(hashed) % self._slots] = number
        self.head.slots_used = sum(1 for number in slots if number)
        if sys.byteorder == "little":
            slots.byteswap()
        buffer[INDEX_HEAD_BYTES : self._entries_at] = slots.tobytes()
        self._write_head(buffer)

    def remove(self) -> None:
        self.segment.remove()


# ---------------------------------------------------------------------------------------- key hash

_POWERS = [1]
for _ in range(255):
    _POWERS.append(_POWERS[-1] * 31 & 0xFFFFFFFF)
_BY_LENGTH = [tuple(reversed(_POWERS[:length])) for length in range(129)]
# Of a unique key only the last twelve characters (time and counter) change from message to
# message: the hash of what stands before is worth keeping, and half the work is saved.
_FRESH = 12


def key_hash(topic: str, key: str) -> int:
    """hashing.index_hash(topic + "#" + key), without a loop in Python for plain keys."""
    fresh = key[-_FRESH:]
    if not fresh.isascii():
        value = java_hash(f"{topic}#{key}")
    else:
        raw = fresh.encode("ascii")
        length = len(raw)
        value = int(sum(map(mul, raw, _BY_LENGTH[length])))
        value += _front_hash(f"{topic}#{key[:-_FRESH]}") * _POWERS[length]
        value &= 0xFFFFFFFF
        if value & 0x80000000:
            value -= 0x100000000
    value = abs(value)
    return 0 if value == 0x80000000 else value


@lru_cache(maxsize=4096)
def _front_hash(text: str) -> int:
    if len(text) > 128 or not text.isascii():
        return java_hash(text)
    return int(sum(map(mul, text.encode("ascii"), _BY_LENGTH[len(text)]))) & 0xFFFFFFFF


def _name_at(now_ms: int) -> str:
    """yyyyMMddHHmmssSSS in local time, as RocketMQ names them."""
    moment = datetime.datetime.fromtimestamp(now_ms // 1000)
    return f"{moment:%Y%m%d%H%M%S}{now_ms % 1000:03d}"
