"""A disk in memory that forgets what was not synced, and fails when told to.

FakeFiles keeps two versions of every file: what the process sees and what is durable. crash()
makes the disk a restarted machine would find: sectors that differ are taken from either version.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from cometmq.errors import StoreLocked
from cometmq.message import NewMessage
from cometmq.store.layout import StoreConfig
from cometmq.store.store import Store

SECTOR = 512
T0 = 1_700_000_000_000


def small(**changes: object) -> StoreConfig:
    """Tiny files, so that every boundary is near."""
    values: dict[str, object] = {
        "log_file_bytes": 4096,
        "queue_file_bytes": 20 * 16,
        "index_slots": 50,
        "index_entries": 40,
        "max_message_bytes": 2048,
        "max_open_queue_files": 8,
        "max_open_log_files": 4,
    }
    values.update(changes)
    return StoreConfig(**values)  # type: ignore[arg-type]


def message(
    body: bytes = b"hello", topic: str = "T", queue_id: int = 0, **changes: object
) -> NewMessage:
    return NewMessage(topic, queue_id, body, **changes)  # type: ignore[arg-type]


def keyed(key: str, *words: str, topic: str = "T", queue_id: int = 0) -> NewMessage:
    text = f"UNIQ_KEY\x01{key}\x02" + (f"KEYS\x01{' '.join(words)}\x02" if words else "")
    return NewMessage(topic, queue_id, key.encode(), text)


def flush_all(store: Store, now_ms: int) -> None:
    """Run whatever the store wants synced at this time."""
    for take in (store.take_flush, store.take_queue_flush):
        flush = take(now_ms)
        if flush is not None:
            for target in flush.targets:
                target.sync()
            store.flushed(flush.kind, now_ms)


class FakeMaking:
    """Creates a file ahead."""

    def __init__(self, files: FakeFiles, name: str, size: int) -> None:
        self.files, self.name, self.size = files, name, size

    def sync(self) -> None:
        self.files.map(self.name, self.size).close()


class FakeFiles:
    """ports.Files in memory."""

    def __init__(self) -> None:
        self.seen: dict[str, bytearray] = {}
        self.durable: dict[str, bytes] = {}
        self.mapped: dict[str, int] = {}
        self.modified: dict[str, int] = {}
        self.ratio = 0.1
        self.fail_sync: str | None = None
        self.fail_map: str | None = None
        self.fail_write: str | None = None
        self.failed: set[str] = set()
        self.synced: list[str] = []
        self.most_mapped = 0
        self.is_locked = False

    # ------------------------------------------------------------------------------------- faults

    def crash(self, rng: random.Random | None = None, *, keep_all: bool = False) -> FakeFiles:
        """The disk after a crash: durable sectors, and any or all of the others."""
        after = FakeFiles()
        unsynced = [name for name in self.seen if name not in self.durable]
        # Creations reach the disk in order; the last one to make it may still have no size.
        made = len(unsynced) if keep_all else (rng.randrange(len(unsynced) + 1) if rng else 0)
        for name, seen in self.seen.items():
            if name in self.durable:
                before = self.durable[name]
            elif name in unsynced[:made]:
                before = bytes(len(seen))
            elif name in unsynced[made : made + 1] and rng is not None and rng.random() < 0.5:
                after.seen[name] = bytearray()
                continue
            else:
                continue
            content = bytearray(seen if keep_all else before)
            if rng is not None and not keep_all:
                for at in range(0, len(seen), SECTOR):
                    piece = seen[at : at + SECTOR]
                    if piece != before[at : at + SECTOR] and rng.random() < 0.5:
                        content[at : at + SECTOR] = piece
            after.seen[name] = content
        after.durable = (
            dict(self.durable)  # the kernel has the pages, the disk does not
            if keep_all
            else {name: bytes(content) for name, content in after.seen.items()}
        )
        after.modified = dict(self.modified)
        return after

    def copy(self) -> FakeFiles:
        """kill -9: the kernel keeps every page."""
        return self.crash(keep_all=True)

    # ---------------------------------------------------------------------------------- the port

    def folders(self, folder: str) -> list[str]:
        depth = folder.count("/") + 1
        return sorted(
            {
                name.split("/")[depth]
                for name in self.seen
                if name.startswith(folder + "/") and name.count("/") > depth
            }
        )

    def files(self, folder: str) -> list[tuple[str, int]]:
        depth = folder.count("/") + 1
        return sorted(
            (name.split("/")[-1], len(content))
            for name, content in self.seen.items()
            if name.startswith(folder + "/") and name.count("/") == depth
        )

    def map(self, name: str, size: int) -> FakeMapped:
        if self.fail_map is not None and self.fail_map in name and name not in self.seen:
            raise OSError(28, f"no space left for {name}")
        content = self.seen.setdefault(name, bytearray(size))
        assert len(content) == size, (name, len(content), size)
        self.mapped[name] = self.mapped.get(name, 0) + 1
        self.most_mapped = max(self.most_mapped, sum(self.mapped.values()))
        return FakeMapped(self, name)

    @property
    def queue_map_limit(self) -> int:
        return 4096

    def target(self, name: str) -> FakeTarget:
        return FakeTarget(self, name)

    def sync(self, name: str) -> None:
        if name not in self.seen:
            return
        if name in self.failed or (self.fail_sync is not None and self.fail_sync in name):
            self.failed.add(name)
            raise OSError(5, f"input/output error: {name}")
        self.synced.append(name)
        self.durable[name] = bytes(self.seen[name])

    def stage(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def writing(self, name: str, at: int, data: memoryview) -> FakeWrite:
        return FakeWrite(self, name, at, data)

    def making(self, name: str, size: int) -> FakeMaking:
        return FakeMaking(self, name, size)

    def zero_from(self, name: str, at: int, size: int, *, is_durable: bool = True) -> None:
        assert not self.mapped.get(name), f"{name} is mapped"
        assert len(self.seen[name]) == size
        self.seen[name][at:] = bytes(size - at)
        if is_durable:
            self.sync(name)

    def read(self, name: str) -> bytes | None:
        return bytes(self.seen[name]) if name in self.seen else None

    def replace(self, name: str, content: bytes) -> None:
        if name in self.seen:
            self.write(name + ".bak", bytes(self.seen[name]))
        self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        self.seen[name] = bytearray(content)
        self.durable[name] = content

    def remove(self, name: str) -> None:
        self.seen.pop(name, None)
        self.durable.pop(name, None)

    def remove_folder(self, folder: str) -> None:
        for name in [name for name in self.seen if name.startswith(folder + "/")]:
            self.remove(name)

    def rename(self, name: str, new_name: str) -> None:
        self.write(new_name, bytes(self.seen[name]))
        self.remove(name)

    def modified_ms(self, name: str) -> int:
        return self.modified.get(name, T0)

    def used_ratio(self) -> float:
        return self.ratio

    def lock(self) -> None:
        if self.is_locked:
            raise StoreLocked("locked")
        self.is_locked = True

    def unlock(self) -> None:
        self.is_locked = False

    def total(self, folder: str) -> Iterable[str]:
        return [name for name in self.seen if name.startswith(folder)]


class FakeTarget:
    def __init__(self, files: FakeFiles, name: str) -> None:
        self._files = files
        self.name = name

    def sync(self) -> None:
        self._files.sync(self.name)


class FakeWrite(FakeTarget):
    """Bytes on their way into a file."""

    def __init__(self, files: FakeFiles, name: str, at: int, data: memoryview) -> None:
        super().__init__(files, name)
        self.at = at
        self.data = data

    def sync(self) -> None:
        if self._files.fail_write is not None and self._files.fail_write in self.name:
            raise OSError(28, f"no space left: {self.name}")
        self._files.seen[self.name][self.at : self.at + len(self.data)] = self.data


class FakeMapped(FakeTarget):
    def __init__(self, files: FakeFiles, name: str) -> None:
        super().__init__(files, name)
        self.buffer = memoryview(files.seen[name])

    def close(self) -> bool:
        self.buffer.release()
        try:  # a bytearray refuses to change its size while a view of it lives
            content = self._files.seen.get(self.name)
            if content is not None:
                content.append(0)
                content.pop()
        except BufferError:
            if self._files.mapped[self.name] == 1:
                self.buffer = memoryview(self._files.seen[self.name])
                return False
        self._files.mapped[self.name] -= 1
        return True
