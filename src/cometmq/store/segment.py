"""Fixed-size files, alone and in a row.

Owns: Segment (one file, mapped on first use), Segments (neighbours that form one byte space) and
MappedPool (how many may be mapped at once). One rule: a file has exactly its configured size from
its first moment; anything else on disk stops the start, because offsets would point elsewhere.

    00000000000000000000  00000000001073741824  ...     name = first byte, 20 digits
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from cometmq.errors import StoreCorrupt
from cometmq.ports import Files, MappedFile, SyncTarget
from cometmq.store.layout import segment_name

if TYPE_CHECKING:
    from cometmq._fast.hot import Pin

log = logging.getLogger("cometmq.store")


class Segment:
    """One fixed-size file. Reading `buffer` maps it; the pool may unmap it when others need room.

    Who keeps a buffer across calls must keep a slice of it (`buffer[:]`): the file then refuses
    to be unmapped until the slice is gone.
    """

    __slots__ = ("_mapped", "_pin", "_pool", "is_dirty", "is_used", "name", "size", "start")

    def __init__(self, pool: MappedPool, name: str, start: int, size: int) -> None:
        self.name = name
        self.start = start
        self.size = size
        self.is_dirty = False
        self.is_used = False
        self._pool = pool
        self._mapped: MappedFile | None = None
        self._pin: Pin | None = None

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def buffer(self) -> memoryview:
        self.is_used = True
        mapped = self._mapped
        if mapped is None:
            mapped = self._mapped = self._pool.map(self)
        return mapped.buffer

    def pin(self) -> Pin | None:
        """The file's memory for compiled code, which loses it when the file is unmapped; None
        where no such code runs."""
        if self._pool.make_pin is not None and self._pin is None:
            self._pin = self._pool.make_pin(self.buffer, self.start)
        return self._pin

    def take_used(self) -> bool:
        """Whether somebody used it since this was last asked."""
        is_used, self.is_used = self.is_used, False
        return (self._pin is not None and self._pin.take_used()) or is_used

    def unmap(self) -> bool:
        """Unmap; False while a slice of the buffer is in use."""
        if self._pin is not None:
            self._pin.release()
            self._pin = None
        if self._mapped is not None:
            if not self._mapped.close():
                return False
            self._mapped = None
            self._pool.forget(self)
        return True

    def target(self) -> SyncTarget:
        """What makes this file durable, whether it stays mapped or not."""
        return self._mapped if self._mapped is not None else self._pool.files.target(self.name)

    def zero_from(self, at: int, *, is_durable: bool = True) -> None:
        """Turn bytes [at, size) into zeros; nobody may hold a slice."""
        is_free = self.unmap()
        assert is_free, f"{self.name} is in use while its tail is cut"
        self._pool.files.zero_from(self.name, at, self.size, is_durable=is_durable)

    def remove(self) -> None:
        """Delete the file. Slices that are out stay readable; the memory goes with the last."""
        if not self.unmap():
            self._pool.abandon(self)
        self._pool.files.remove(self.name)


class MappedPool:
    """Bounds how many files are mapped: a second-chance ring, so that a hit costs one store."""

    def __init__(
        self,
        files: Files,
        limit: int,
        make_pin: Callable[[memoryview, int], Pin] | None = None,
    ) -> None:
        self.files = files
        self.limit = limit
        self.make_pin = make_pin
        self._ring: OrderedDict[Segment, None] = OrderedDict()
        self._abandoned: list[Segment] = []

    def __len__(self) -> int:
        return len(self._ring)

    def map(self, segment: Segment) -> MappedFile:
        while len(self._ring) >= self.limit and self._evict():
            pass
        try:
            mapped = self.files.map(segment.name, segment.size)
        except OSError as error:
            # Out of descriptors or mappings before our own limit: live with half of what we have.
            if len(self._ring) < 8:
                raise
            self.limit = len(self._ring) // 2
            log.warning("open_files_limited limit=%d reason=%s", self.limit, error)
            while len(self._ring) >= self.limit and self._evict():
                pass
            mapped = self.files.map(segment.name, segment.size)
        self._ring[segment] = None
        return mapped

    def forget(self, segment: Segment) -> None:
        self._ring.pop(segment, None)

    def abandon(self, segment: Segment) -> None:
        """A removed file that a reader still holds: try to unmap it later."""
        self._abandoned.append(segment)

    def sweep(self) -> None:
        self._abandoned = [segment for segment in self._abandoned if not segment.unmap()]

    def close(self) -> None:
        for segment in [*self._ring, *self._abandoned]:
            segment.unmap()

    def _evict(self) -> bool:
        """Unmap the first file that was not used since it was last passed over."""
        for _ in range(2 * len(self._ring)):
            segment, _none = self._ring.popitem(last=False)
            self._ring[segment] = None
            if not segment.take_used() and segment.unmap():
                return True
        return False


class Segments:
    """Neighbouring files of one size that together form one space of bytes."""

    __slots__ = ("_pool", "file_bytes", "folder", "items")

    def __init__(self, pool: MappedPool, folder: str, file_bytes: int) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
        self.items: list[Segment] = []
        self._pool = pool

    def load(self) -> None:
        """Take the files on disk as they are; StoreCorrupt names the first that can't be right."""
        found = self._pool.files.files(self.folder)
        for position, (name, size) in enumerate(found):
            path = f"{self.folder}/{name}"
            if len(name) != 20 or not name.isdigit():
                log.warning("stray_file name=%s action=ignored", path)
                continue
            if size != self.file_bytes:
                # A crash between creating a file and sizing it leaves an empty last one.
                if size == 0 and position == len(found) - 1:
                    log.info("empty_file_removed name=%s", path)
                    self._pool.files.remove(path)
                    continue
                raise StoreCorrupt(
                    f"{path} is {size} bytes, expected exactly {self.file_bytes}; was the store "
                    f"written with another file size? set the same size, or move the file away"
                )
            start = int(name)
            if self.items and start != self.items[-1].end:
                raise StoreCorrupt(
                    f"{path} should start at {self.items[-1].end}, the end of "
                    f"{self.items[-1].name}: a file between them is missing"
                )
            self.items.append(Segment(self._pool, path, start, size))

    @property
    def start(self) -> int:
        return self.items[0].start if self.items else 0

    @property
    def end(self) -> int:
        return self.items[-1].end if self.items else 0

    def find(self, offset: int) -> Segment | None:
        """The file that holds this byte."""
        items = self.items
        if not items:
            return None
        position = (offset - items[0].start) // self.file_bytes
        return items[position] if 0 <= position < len(items) else None

    def create(self, start: int) -> Segment:
        """Add the next file; on disk when it is first used."""
        assert start % self.file_bytes == 0, (self.folder, start)
        assert not self.items or start == self.items[-1].end, (self.folder, start)
        segment = Segment(self._pool, segment_name(self.folder, start), start, self.file_bytes)
        self.items.append(segment)
        return segment

    def remove_after(self, offset: int) -> list[Segment]:
        """Delete files that start beyond this byte, last one first."""
        removed: list[Segment] = []
        while self.items and self.items[-1].start > offset:
            removed.append(self.items.pop())
            removed[-1].remove()
        return removed

    def remove_first(self) -> Segment:
        """Delete the oldest file; never the last one."""
        assert len(self.items) > 1, self.folder
        segment = self.items.pop(0)
        segment.remove()
        return segment
