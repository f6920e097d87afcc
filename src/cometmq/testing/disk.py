"""SimulatedFiles: a store directory in memory, on a disk that forgets what was not synced.

Owns: what a process sees, what the disk would still hold after a power loss, and the ways a disk
fails. One rule: nothing becomes durable but by a sync that succeeded, and a crash may keep any part
of the rest: that is what POSIX promises, and no more.

    bytes      every 512-byte sector that was not synced is kept or lost on its own (torn writes)
    names      creations, renames and removals form a journal in order; a folder's sync commits the
               changes in that folder, a power loss keeps any prefix of what is left
    staged     memory that a process wrote to and did not commit ends with it; a commit may be cut
    failures   no space for new files; a failed sync, after which the sectors it could not write are
               never written by a later one; flipped bits in sectors that were not synced

It never reads a clock and draws only from the Random it is given.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator

from cometmq.errors import StoreLocked

SECTOR_BYTES = 512


class ProcessEnded(BaseException):
    """The process dies at this sync; no handler of the product may stop it."""


Flippable = Callable[[str, bytearray, int], bool]
"""(file name, what the process saw, position): whether a flip there must be survived."""


class _Inode:
    """One file's bytes, twice: as the process sees them and as the disk holds them."""

    __slots__ = ("durable", "lost", "modified_ms", "seen")

    def __init__(self, seen: bytearray, durable: bytearray) -> None:
        self.seen = seen
        self.durable = durable
        self.lost: dict[int, bytes] = {}  # sectors that a failed sync gave up on, as they were
        self.modified_ms = 0

    def dirty_sectors(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of the sectors in which the two differ."""
        seen, durable = self.seen, self.durable
        if len(durable) < len(seen):
            durable = durable + bytes(len(seen) - len(durable))
        if seen == durable:
            return
        for begin in range(0, len(seen), SECTOR_BYTES):
            end = min(begin + SECTOR_BYTES, len(seen))
            if seen[begin:end] != durable[begin:end]:
                yield begin, end

    def size_up(self, size: int) -> None:
        if len(self.durable) < size:
            self.durable += bytes(size - len(self.durable))

    def write_back(self) -> None:
        """A sync that succeeds; what an earlier one lost stays lost unless written again."""
        if not self.lost:
            self.durable = bytearray(self.seen)
            return
        self.size_up(len(self.seen))
        for begin, end in list(self.dirty_sectors()):
            if self.lost.get(begin) != bytes(self.seen[begin:end]):
                self.lost.pop(begin, None)
                self.durable[begin:end] = self.seen[begin:end]


class _Change:
    """One step of the journal: names that appear or go, or a file that gets its size."""

    __slots__ = ("folder", "inode", "made_folder", "names", "size")

    def __init__(
        self,
        folder: str,
        names: dict[str, _Inode | None] | None = None,
        *,
        made_folder: str | None = None,
        inode: _Inode | None = None,
        size: int = 0,
    ) -> None:
        self.folder = folder
        self.names = names or {}
        self.made_folder = made_folder
        self.inode = inode
        self.size = size


class SimulatedFiles:
    """ports.Files in memory; see there for the contract of each method."""

    def __init__(self, rng: random.Random, clock: Callable[[], int] = lambda: 0) -> None:
        self._rng = rng
        self._clock = clock
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._folders: dict[str, None] = {"": None}
        self._durable_folders: dict[str, None] = {"": None}
        self._journal: list[_Change] = []
        self._unsynced_folders: dict[str, list[str]] = {}
        self._synced_folders: dict[str, None] = {}
        self._failed: set[str] = set()
        self._is_locked = False
        self.ratio = 0.10
        self.is_full = False
        self.failing_syncs = 0
        """How many of the next syncs fail."""
        self.ends_in = -1
        """The process ends at the sync after so many more; below zero: it does not."""
        self.syncs = 0
        self.failures = 0

    # -------------------------------------------------------------------------------- the crashes

    def kill(self) -> None:
        """The process ends, the machine goes on: every page stays, except the lost ones."""
        inodes = [*self._names.values(), *self._durable_names.values()]
        for change in self._journal:
            inodes += [one for one in (*change.names.values(), change.inode) if one is not None]
        fresh = {inode: _copy(inode) for inode in dict.fromkeys(inodes)}
        for change in self._journal:
            change.names = {k: None if v is None else fresh[v] for k, v in change.names.items()}
            change.inode = None if change.inode is None else fresh[change.inode]
        self._names = {name: fresh[inode] for name, inode in self._names.items()}
        self._durable_names = {name: fresh[i] for name, i in self._durable_names.items()}
        self._forget_process()

    def lose_power(
        self,
        keep_percent: int,
        flips: int = 0,
        may_flip: Flippable | None = None,
        *,
        loses_only: str | None = None,
    ) -> None:
        """Only the disk remains. Of sectors that were not synced `keep_percent` made it, by lot;
        up to `flips` of these come back with a flipped bit, where `may_flip` allows it.

        `loses_only`: all names and all sectors made it, except those of files whose name begins so.
        """
        rng = self._rng
        kept = len(self._journal) if loses_only else rng.randrange(len(self._journal) + 1)
        for change in self._journal[:kept]:
            self._commit(change)
        self._journal = []
        # A folder may be on disk before its own entry in the one above: then nobody finds it.
        self._durable_folders = {
            folder: None for folder in self._durable_folders if self._is_found(folder)
        }
        names = {
            name: inode
            for name, inode in self._durable_names.items()
            if _folder_of(name) in self._durable_folders
        }
        after: dict[_Inode, _Inode] = {}
        for name, inode in names.items():
            if inode in after:
                continue
            content = bytearray(inode.durable)
            percent = keep_percent
            if loses_only is not None and not name.startswith(loses_only):
                percent = 100
            for begin, end in inode.dirty_sectors():
                if end > len(content) or begin in inode.lost or rng.randrange(100) >= percent:
                    continue
                content[begin:end] = inode.seen[begin:end]
                if flips and may_flip is not None:
                    at = rng.randrange(begin, end)
                    is_synced = inode.durable[at] == inode.seen[at]
                    if not is_synced and may_flip(name, inode.seen, at):
                        content[at] ^= 1 << rng.randrange(8)
                        flips -= 1
            after[inode] = _Inode(content, bytearray(content))
            after[inode].modified_ms = inode.modified_ms
        self._names = {name: after[inode] for name, inode in names.items()}
        self._durable_names = dict(self._names)
        self._folders = dict(self._durable_folders)
        self._forget_process()

    @property
    def has_lost_sectors(self) -> bool:
        """Whether a failed sync left pages behind that the next process won't see."""
        return any(inode.lost for inode in self._names.values())

    def is_durable(self, name: str, at: int, size: int) -> bool:
        """Whether these bytes, as the process sees them, would survive a power loss right now."""
        inode = self._names.get(name)
        return (
            inode is not None
            and self._durable_names.get(name) is inode
            and self._is_found(_folder_of(name))
            and inode.durable[at : at + size] == inode.seen[at : at + size]
        )

    def _is_found(self, folder: str) -> bool:
        """Whether a folder, and all that it stands in, are on disk."""
        while folder in self._durable_folders:
            if not folder:
                return True
            folder = _folder_of(folder)
        return False

    def _forget_process(self) -> None:
        self._failed.clear()
        self._unsynced_folders.clear()
        self._synced_folders.clear()
        self._is_locked = False

    # ---------------------------------------------------------------------------------- the port

    def folders(self, folder: str) -> list[str]:
        prefix = folder + "/"
        return sorted(
            name[len(prefix) :]
            for name in self._folders
            if name.startswith(prefix) and "/" not in name[len(prefix) :]
        )

    def files(self, folder: str) -> list[tuple[str, int]]:
        prefix = folder + "/"
        return sorted(
            (name[len(prefix) :], len(inode.seen))
            for name, inode in self._names.items()
            if name.startswith(prefix) and "/" not in name[len(prefix) :]
        )

    def map(self, name: str, size: int) -> SimulatedMappedFile:
        inode = self._names.get(name)
        if inode is None:
            self._check_room(name)
            folder = _folder_of(name)
            self._unsynced_folders[name] = self._make_folders(folder)
            inode = self._new_inode(bytearray(size))
            self._enter(folder, {name: inode})
            self._journal.append(_Change(folder, inode=inode, size=size))
        elif not inode.seen:  # a power loss came between the file and its size
            inode.seen = bytearray(size)
            self._journal.append(_Change(_folder_of(name), inode=inode, size=size))
        if len(inode.seen) != size:
            raise AssertionError(f"{name} is {len(inode.seen)} bytes, mapped as {size}")
        return SimulatedMappedFile(self, name, inode)

    @property
    def queue_map_limit(self) -> int:
        return 4096

    def target(self, name: str) -> _NamedTarget:
        return _NamedTarget(self, name)

    def stage(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def writing(self, name: str, at: int, data: memoryview) -> _Write:
        return _Write(self, name, at, data)

    def making(self, name: str, size: int) -> _Making:
        return _Making(self, name, size)

    def zero_from(self, name: str, at: int, size: int, *, is_durable: bool = True) -> None:
        inode = self._names[name]
        assert len(inode.seen) == size, (name, len(inode.seen), size)
        inode.seen[at:] = bytes(size - at)
        if is_durable:
            self.sync(name, inode)

    def read(self, name: str) -> bytes | None:
        inode = self._names.get(name)
        return None if inode is None else bytes(inode.seen)

    def replace(self, name: str, content: bytes) -> None:
        for _ in self.replacing(name, content):
            pass

    def replacing(self, name: str, content: bytes) -> Iterator[None]:
        """replace() in steps, so that a crash may come between them."""
        yield from self._write_beside(name, content)
        folder = _folder_of(name)
        former = self._names.get(name)
        if former is not None:
            self._enter(folder, {name + ".bak": former})
            yield
        self._enter(folder, {name + ".tmp": None, name: self._names[name + ".tmp"]})
        yield
        self._sync_folder(folder)

    def write(self, name: str, content: bytes) -> None:
        for _ in self._write_beside(name, content):
            pass
        folder = _folder_of(name)
        self._enter(folder, {name + ".tmp": None, name: self._names[name + ".tmp"]})
        self._sync_folder(folder)

    def remove(self, name: str) -> None:
        self._unsynced_folders.pop(name, None)
        if name in self._names:
            self._enter(_folder_of(name), {name: None})

    def remove_folder(self, folder: str) -> None:
        inside = folder + "/"
        for name in [name for name in self._names if name.startswith(inside)]:
            self.remove(name)
        for name in [n for n in self._folders if n == folder or n.startswith(inside)]:
            del self._folders[name]  # a folder that stays behind empty harms nobody

    def rename(self, name: str, new_name: str) -> None:
        self._enter(_folder_of(name), {new_name: self._names[name], name: None})
        self._sync_folder(_folder_of(new_name))

    def modified_ms(self, name: str) -> int:
        return self._names[name].modified_ms

    def used_ratio(self) -> float:
        return self.ratio

    def lock(self) -> None:
        if self._is_locked:
            raise StoreLocked("the simulated store is locked")
        self._is_locked = True

    def unlock(self) -> None:
        self._is_locked = False

    # ------------------------------------------------------------------------------------ inside

    def sync(self, name: str, inode: _Inode | None = None) -> None:
        """fdatasync and, for a new file, its folders."""
        inode = self._names.get(name) if inode is None else inode
        if inode is None:
            return
        if name in self._failed:
            raise OSError(errno.EIO, f"an earlier sync of {name} failed")
        self._count_sync()
        if self.failing_syncs:
            self.failing_syncs -= 1
            self.failures += 1
            self._failed.add(name)
            self._fail(inode)
            raise OSError(errno.EIO, f"input/output error on {name}")
        inode.write_back()
        inode.modified_ms = self._clock()
        for folder in self._folders_to_sync(name):
            self._sync_folder(folder)
            self._synced_folders[folder] = None

    def commit(self, name: str, at: int, data: memoryview) -> None:
        """pwrite: into the page cache. A process that ends in it, or an error, cuts it short."""
        inode = self._names.get(name)
        if inode is None:
            raise OSError(errno.ENOENT, f"no such file: {name}")
        assert at + len(data) <= len(inode.seen), (name, at, len(data))
        if self.ends_in == 0 or self.failing_syncs:
            part = self._rng.randrange(len(data))
            inode.seen[at : at + part] = data[:part]
        self._count_sync()
        if self.failing_syncs:
            self.failing_syncs -= 1
            self.failures += 1
            raise OSError(errno.EIO, f"input/output error on {name}")
        inode.seen[at : at + len(data)] = data

    def _folders_to_sync(self, name: str) -> list[str]:
        """As RealFiles: what changed for a new file; of an old one what we never synced."""
        changed = self._unsynced_folders.pop(name, None)
        if changed is not None:
            return changed
        chain = [_folder_of(name)]
        while chain[-1]:
            chain.append(_folder_of(chain[-1]))
        return [folder for folder in chain if folder not in self._synced_folders]

    def _count_sync(self) -> None:
        self.syncs += 1
        if self.ends_in >= 0:
            self.ends_in -= 1
            if self.ends_in < 0:
                raise ProcessEnded

    def _fail(self, inode: _Inode) -> None:
        """Some sectors made it; of the others the system says nothing ever again."""
        for begin, end in list(inode.dirty_sectors()):
            if end <= len(inode.durable) and self._rng.randrange(2):
                inode.durable[begin:end] = inode.seen[begin:end]
            else:
                inode.lost[begin] = bytes(inode.seen[begin:end])

    def _new_inode(self, content: bytearray) -> _Inode:
        inode = _Inode(content, bytearray())
        inode.modified_ms = self._clock()
        return inode

    def _check_room(self, name: str) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, f"no space left on device: {name}")

    def _write_beside(self, name: str, content: bytes) -> Iterator[None]:
        self._check_room(name)
        folder = _folder_of(name)
        for changed in self._make_folders(folder)[1:]:
            self._sync_folder(changed)
        inode = self._new_inode(bytearray(content))
        self._enter(folder, {name + ".tmp": inode})
        yield
        self._count_sync()
        if self.failing_syncs:
            self.failing_syncs -= 1
            self.failures += 1
            raise OSError(errno.EIO, f"input/output error on {name}.tmp")
        inode.write_back()

    def _make_folders(self, folder: str) -> list[str]:
        """As RealFiles: the folders whose entries changed or are about to."""
        changed = [folder]
        while changed[-1] not in self._folders:
            changed.append(_folder_of(changed[-1]))
        for made in reversed(changed[:-1]):
            self._folders[made] = None
            self._journal.append(_Change(_folder_of(made), made_folder=made))
        return changed

    def _enter(self, folder: str, names: dict[str, _Inode | None]) -> None:
        for name, inode in names.items():
            if inode is None:
                self._names.pop(name, None)
            else:
                self._names[name] = inode
        self._journal.append(_Change(folder, names))

    def _sync_folder(self, folder: str) -> None:
        left: list[_Change] = []
        for change in self._journal:
            if change.folder == folder:
                self._commit(change)
            else:
                left.append(change)
        self._journal = left

    def _commit(self, change: _Change) -> None:
        if change.made_folder is not None:
            self._durable_folders[change.made_folder] = None
        if change.inode is not None:
            change.inode.size_up(change.size)
        for name, inode in change.names.items():
            if inode is None:
                self._durable_names.pop(name, None)
            else:
                self._durable_names[name] = inode


class SimulatedMappedFile:
    """ports.MappedFile on a SimulatedFiles."""

    __slots__ = ("_files", "_inode", "buffer", "name")

    def __init__(self, files: SimulatedFiles, name: str, inode: _Inode) -> None:
        self.name = name
        self.buffer = memoryview(inode.seen)
        self._files = files
        self._inode = inode

    def sync(self) -> None:
        self._files.sync(self.name, self._inode)

    def close(self) -> bool:
        self.buffer.release()
        try:  # a bytearray refuses to change its size while a view of it lives
            self._inode.seen.append(0)
            self._inode.seen.pop()
        except BufferError:
            self.buffer = memoryview(self._inode.seen)
            return False
        return True


class _Making:
    __slots__ = ("_files", "_name", "_size")

    def __init__(self, files: SimulatedFiles, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size

    def sync(self) -> None:
        self._files.map(self._name, self._size)


class _NamedTarget:
    __slots__ = ("_files", "_name")

    def __init__(self, files: SimulatedFiles, name: str) -> None:
        self._files = files
        self._name = name

    def sync(self) -> None:
        self._files.sync(self._name)


class _Write:
    __slots__ = ("_at", "_data", "_files", "_name")

    def __init__(self, files: SimulatedFiles, name: str, at: int, data: memoryview) -> None:
        self._files = files
        self._name = name
        self._at = at
        self._data = data

    def sync(self) -> None:
        self._files.commit(self._name, self._at, self._data)


def _copy(inode: _Inode) -> _Inode:
    """The same file for the next process; pages that were lost are read from the disk again."""
    seen = bytearray(inode.seen)
    for begin, content in inode.lost.items():
        end = begin + len(content)
        if seen[begin:end] == content and end <= len(inode.durable):
            seen[begin:end] = inode.durable[begin:end]
    copied = _Inode(seen, bytearray(inode.durable))
    copied.modified_ms = inode.modified_ms
    return copied


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]
