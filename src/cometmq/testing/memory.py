"""MemoryFiles: a store directory that is nowhere on a disk.

Owns: the contents by name. One rule: it keeps ports.Files' contract as a disk would that never
fails and is always in time; a sync is a no-op, and everything is gone with the object.

sync(), of a file or of a write, and replace() run on other threads: each changes the table by one
bytecode, and whoever looks through it looks at a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from cometmq.errors import StoreCorrupt, StoreLocked
from cometmq.ports import SyncTarget

_QUEUE_MAPS = 4096  # nothing is really mapped or unmapped: a round number


class MemoryFiles:
    """One store in anonymous memory; a page of it exists once it was written to."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._contents: dict[str, mmap.mmap | bytes] = {}
        self._modified_ms: dict[str, int] = {}
        self._is_locked = False

    def folders(self, folder: str) -> list[str]:
        inside = folder + "/"
        names = [name[len(inside) :] for name in list(self._contents) if name.startswith(inside)]
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def files(self, folder: str) -> list[tuple[str, int]]:
        inside = folder + "/"
        return sorted(
            (name[len(inside) :], len(content))
            for name, content in list(self._contents.items())
            if name.startswith(inside) and "/" not in name[len(inside) :]
        )

    def map(self, name: str, size: int) -> MemoryFile:
        content = self._contents.get(name)
        if not isinstance(content, mmap.mmap):
            memory = _memory(size)
            if not content:
                content = self._contents[name] = memory
                self.touch(name)
            elif len(content) == size:
                memory[:] = content
                content = self._contents[name] = memory
        if not isinstance(content, mmap.mmap) or len(content) != size:
            raise StoreCorrupt(f"{name} is {len(content)} bytes, expected exactly {size}")
        return MemoryFile(self, name, content)

    @property
    def queue_map_limit(self) -> int:
        return _QUEUE_MAPS

    def target(self, name: str) -> SyncTarget:
        return _Touch(self, name)

    def stage(self, size: int) -> memoryview:
        return memoryview(_memory(size))

    def writing(self, name: str, at: int, data: memoryview) -> SyncTarget:
        return _Write(self, name, at, data)

    def making(self, name: str, size: int) -> SyncTarget:
        return _Making(self, name, size)

    def zero_from(self, name: str, at: int, size: int, *, is_durable: bool = True) -> None:
        assert 0 <= at <= size, (name, at, size)
        self.map(name, size).buffer[at:] = bytes(size - at)

    def read(self, name: str) -> bytes | None:
        content = self._contents.get(name)
        return None if content is None else bytes(content)

    def replace(self, name: str, content: bytes) -> None:
        former = self._contents.get(name)
        if former is not None:
            self.write(name + ".bak", bytes(former))
        self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        self._contents[name] = bytes(content)
        self.touch(name)

    def remove(self, name: str) -> None:
        self._contents.pop(name, None)
        self._modified_ms.pop(name, None)

    def remove_folder(self, folder: str) -> None:
        for name in list(self._contents):
            if name.startswith(folder + "/"):
                self.remove(name)

    def rename(self, name: str, new_name: str) -> None:
        self._contents[new_name] = self._contents[name]
        self._modified_ms[new_name] = self._modified_ms[name]
        self.remove(name)

    def modified_ms(self, name: str) -> int:
        return self._modified_ms[name]

    def used_ratio(self) -> float:
        return 0.0

    def lock(self) -> None:
        if self._is_locked:
            raise StoreLocked("this store in memory is in use by another broker")
        self._is_locked = True

    def unlock(self) -> None:
        self._is_locked = False

    def touch(self, name: str) -> None:
        """The file was just written to, if it is there."""
        if name in self._contents:
            self._modified_ms[name] = self._clock()


class MemoryFile:
    """ports.MappedFile on a MemoryFiles."""

    __slots__ = ("_files", "buffer", "name")

    def __init__(self, files: MemoryFiles, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.buffer = memoryview(memory)
        self._files = files

    def sync(self) -> None:
        self._files.touch(self.name)

    def close(self) -> bool:
        """Always done: a slice in use keeps the memory, and the memory is the file."""
        self.buffer.release()
        return True


class _Touch:
    __slots__ = ("_files", "_name")

    def __init__(self, files: MemoryFiles, name: str) -> None:
        self._files = files
        self._name = name

    def sync(self) -> None:
        self._files.touch(self._name)


class _Making:
    __slots__ = ("_files", "_name", "_size")

    def __init__(self, files: MemoryFiles, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size

    def sync(self) -> None:
        self._files.map(self._name, self._size)


class _Write:
    __slots__ = ("_at", "_data", "_files", "_name")

    def __init__(self, files: MemoryFiles, name: str, at: int, data: memoryview) -> None:
        self._files = files
        self._name = name
        self._at = at
        self._data = data

    def sync(self) -> None:
        content = self._files._contents.get(self._name)
        if not isinstance(content, mmap.mmap):
            raise FileNotFoundError(f"no such file: {self._name}")
        content[self._at : self._at + len(self._data)] = bytes(self._data)
        self._files.touch(self._name)


def _memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
