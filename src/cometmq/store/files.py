"""RealFiles: a store directory on a real disk.

Owns: every call to the operating system that the store makes; the only file here that imports os.
One rule: what sync() or replace() reported as done is on the disk, and a file whose sync failed
once never reports success again. After a failed fsync Linux may drop the dirty pages and let the
next fsync succeed, so "try again" would turn loss into a lie.

sync() alone, of a file or of a write, runs on another thread. It never calls mmap.flush, which
holds the GIL; fdatasync flushes a MAP_SHARED mapping as well and releases it. Files are sparse and
created at full size.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cometmq.errors import StoreCorrupt, StoreLocked, UsageError
from cometmq.ports import SyncTarget
from cometmq.store import layout

if TYPE_CHECKING:
    from cometmq._fast.mapping import Mapping

log = logging.getLogger("cometmq.store")

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_ZEROS_BYTES = 1 << 20
_TOUCHED_BYTES = 4 << 20
_MOST_QUEUE_MAPS = 48_000
_OTHER_MAPS = 8_192  # of libraries, threads, heaps and the files that are no queues
_HELD_QUEUE_MAPS = 4_096  # where each mapping holds descriptors


class RealFiles:
    """One store directory; see ports.Files for the contract of each method."""

    def __init__(self, root: str | os.PathLike[str], *, spare_bytes: int = 0) -> None:
        """With `spare_bytes` the disk counts as empty while so much is free, and then as full."""
        self.root = os.path.abspath(os.fspath(root))
        self._spare_bytes = spare_bytes
        os.makedirs(self.root, exist_ok=True)
        self._failed: dict[str, str] = {}
        # Folders that must be synced before a new file in them can be called durable.
        self._unsynced_folders: dict[str, list[str]] = {}
        # Folders that this process has synced. A file found here may have been made by one that
        # was killed before it synced the folder: its first sync here makes up for that.
        self._synced_folders: set[str] = set()
        self._lock_fds: list[int] = []
        self._map_unheld = _find_unheld()
        self._is_lock_refused = False
        _raise_open_file_limit()

    def folders(self, folder: str) -> list[str]:
        with self._scan(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def files(self, folder: str) -> list[tuple[str, int]]:
        with self._scan(folder) as entries:
            return sorted((e.name, e.stat().st_size) for e in entries if e.is_file())

    def map(self, name: str, size: int) -> RealMappedFile | UnheldFile:
        path = self._path(name)
        fd = self._open_sized(name, path, size)
        if self._map_unheld is not None and name.startswith(layout.CONSUME_QUEUE + "/"):
            try:
                unheld = self._map_unheld(fd, size)
            finally:
                os.close(fd)
            unheld.madvise(mmap.MADV_RANDOM)
            return UnheldFile(self, name, unheld)
        try:
            mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        if not name.startswith(layout.COMMIT_LOG + "/"):
            # Queues and index touch a page here and there. With read-ahead the first touch of a
            # hole fills it with zero pages as far as that reaches: 2.5 ms against 20 us measured.
            mapped.madvise(mmap.MADV_RANDOM)
        return RealMappedFile(self, name, fd, mapped)

    @property
    def queue_map_limit(self) -> int:
        if self._map_unheld is None:
            return _HELD_QUEUE_MAPS
        try:
            with open("/proc/sys/vm/max_map_count", encoding="ascii") as source:
                most = int(source.read())
        except (OSError, ValueError):  # not Linux: the first refusal will tell, see MappedPool
            return _MOST_QUEUE_MAPS
        return min(_MOST_QUEUE_MAPS, max(most - _OTHER_MAPS, most // 4, 4))

    def target(self, name: str) -> SyncTarget:
        self._path(name)
        return _NamedTarget(self, name)

    def stage(self, size: int) -> memoryview:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        memory = mmap.mmap(-1, size, flags)
        reason = _lock_memory(memory, size)
        if reason is not None and not self._is_lock_refused:
            self._is_lock_refused = True
            log.warning(
                "memory_not_locked bytes=%d reason=%s: may be swapped out; raise `ulimit -l`",
                *(size, reason),
            )
        return memoryview(memory)

    def writing(self, name: str, at: int, data: memoryview) -> SyncTarget:
        return _Write(self._path(name), at, data)

    def making(self, name: str, size: int) -> SyncTarget:
        self._path(name)
        return _Making(self, name, size)

    def zero_from(self, name: str, at: int, size: int, *, is_durable: bool = True) -> None:
        assert 0 <= at <= size, (name, at, size)
        fd = os.open(self._path(name), os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                raise StoreCorrupt(f"{name} is {os.fstat(fd).st_size} bytes, expected {size}")
            _zero(fd, at, size)
            if is_durable:
                self._sync_fd(name, fd, is_whole=True)
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes | None:
        if name == layout.LOCK:
            # Closing any descriptor of a file drops the process's record locks on it.
            raise UsageError("the lock file must not be read")
        try:
            with open(self._path(name), "rb") as source:
                return source.read()
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        path = self._path(name)
        self._write_beside(path, content)
        backup, spare = path + ".bak", path + ".bak.tmp"
        _remove(spare)
        try:
            os.link(path, spare)
        except FileNotFoundError:
            pass
        else:
            os.rename(spare, backup)
            _remove(spare)  # rename does nothing if both already were the same file
        os.rename(path + ".tmp", path)
        _sync_folder(os.path.dirname(path))

    def write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        self._write_beside(path, content)
        os.rename(path + ".tmp", path)
        _sync_folder(os.path.dirname(path))

    def remove(self, name: str) -> None:
        self._unsynced_folders.pop(name, None)
        _remove(self._path(name))

    def remove_folder(self, folder: str) -> None:
        path = self._path(folder)
        for name in [name for name in self._unsynced_folders if name.startswith(folder + "/")]:
            self._unsynced_folders.pop(name, None)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def rename(self, name: str, new_name: str) -> None:
        os.rename(self._path(name), self._path(new_name))
        _sync_folder(os.path.dirname(self._path(new_name)))

    def modified_ms(self, name: str) -> int:
        return os.stat(self._path(name)).st_mtime_ns // 1_000_000

    def used_ratio(self) -> float:
        """As RocketMQ counts: used over used plus what this user may still take, rounded up."""
        found = os.statvfs(self.root)
        if self._spare_bytes:
            return 0.0 if found.f_bavail * found.f_frsize >= self._spare_bytes else 1.0
        used = found.f_blocks - found.f_bfree
        whole = used + found.f_bavail
        return math.ceil(100 * used / whole) / 100 if whole else 1.0

    def lock(self) -> None:
        """A flock on the folder keeps out a second store in this process, a record lock on the
        file's first byte keeps out other processes, Java's FileChannel.tryLock among them."""
        assert not self._lock_fds, "lock() was called twice"
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fds = [folder]
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = self._path(layout.LOCK)
            fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            fcntl.lockf(fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
            os.pwrite(fds[1], b"lock", 0)
        except BlockingIOError:
            _close_all(fds)
            raise StoreLocked(f"{self.root} is in use by another broker (lock file)") from None
        except BaseException:
            _close_all(fds)
            raise
        self._lock_fds = fds

    def unlock(self) -> None:
        fds, self._lock_fds = self._lock_fds, []
        _close_all(fds)

    # ------------------------------------------------------------------------------------ inside

    def _path(self, name: str) -> str:
        """The full path; a name that could leave the root is refused."""
        parts = name.split("/")
        if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise UsageError(f"{name!r} is not a name below the store's root")
        return os.path.join(self.root, *parts)

    @contextlib.contextmanager
    def _scan(self, folder: str) -> Iterator[Iterable[os.DirEntry[str]]]:
        try:
            entries = os.scandir(self._path(folder))
        except FileNotFoundError:
            yield ()
            return
        with entries:
            yield entries

    def _open_sized(self, name: str, path: str, size: int) -> int:
        """Open a file of exactly `size` bytes, made of holes if it is new or empty."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self._unsynced_folders[name] = self._make_folders(os.path.dirname(path))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(fd, size)
            return fd
        found = os.fstat(fd).st_size
        if not found:  # a kill or a power loss came between the file and its size
            os.ftruncate(fd, size)
        elif found != size:
            os.close(fd)
            raise StoreCorrupt(f"{path} is {found} bytes, expected exactly {size}")
        return fd

    def _make_folders(self, folder: str) -> list[str]:
        """Create a folder; returns the folders whose entries changed or are about to."""
        changed = [folder]
        while not os.path.isdir(changed[-1]) and changed[-1] != self.root:
            changed.append(os.path.dirname(changed[-1]))
        os.makedirs(folder, exist_ok=True)
        return changed

    def _write_beside(self, path: str, content: bytes) -> None:
        for folder in self._make_folders(os.path.dirname(path))[1:]:
            _sync_folder(folder)
        with open(path + ".tmp", "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())

    def _sync_fd(self, name: str, fd: int, *, is_whole: bool = False) -> None:
        """fdatasync, then the folders of a new file; remembers failure for ever."""
        reason = self._failed.get(name)
        if reason is not None:
            raise OSError(f"an earlier sync of {name} failed ({reason}); nothing since is believed")
        try:
            if is_whole:
                os.fsync(fd)
            else:
                os.fdatasync(fd)
            for folder in self._folders_to_sync(name):
                with contextlib.suppress(FileNotFoundError):  # its topic was deleted meanwhile
                    _sync_folder(folder)
                    self._synced_folders.add(folder)
        except OSError as error:
            self._failed[name] = str(error)
            raise

    def _folders_to_sync(self, name: str) -> list[str]:
        """Those that changed for a new file; of an old one those that we never synced."""
        changed = self._unsynced_folders.pop(name, None)
        if changed is not None:
            return changed
        chain = [os.path.dirname(self._path(name))]
        while chain[-1] != self.root:
            chain.append(os.path.dirname(chain[-1]))
        return [folder for folder in chain if folder not in self._synced_folders]

    def _sync_name(self, name: str) -> None:
        try:
            fd = os.open(self._path(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # dropped by retention since; nothing is left to lose
        try:
            self._sync_fd(name, fd)
        finally:
            os.close(fd)


class RealMappedFile:
    """A file in memory. close() on the main thread and sync() on the flusher may meet: whoever
    is last closes the descriptor (each step is one bytecode under the GIL, in this order)."""

    __slots__ = ("_fds", "_files", "_is_closed", "_map", "_syncing", "buffer", "name")

    def __init__(self, files: RealFiles, name: str, fd: int, mapped: mmap.mmap) -> None:
        self.name = name
        self.buffer = memoryview(mapped)
        self._files = files
        self._map = mapped
        self._fds = [fd]
        self._is_closed = False
        self._syncing: list[None] = []  # one item per sync under way: append and pop are atomic

    def sync(self) -> None:
        self._syncing.append(None)
        try:
            if self._is_closed:
                self._files._sync_name(self.name)
            else:
                self._files._sync_fd(self.name, self._fds[0])
        finally:
            self._syncing.pop()
            if self._is_closed and not self._syncing:
                self._close_fd()

    def close(self) -> bool:
        if self._is_closed:
            return True
        self.buffer.release()
        try:
            self._map.close()
        except BufferError:  # a slice is still in use
            self.buffer = memoryview(self._map)
            return False
        self._is_closed = True
        if not self._syncing:
            self._close_fd()
        return True

    def _close_fd(self) -> None:
        with contextlib.suppress(IndexError):
            os.close(self._fds.pop())


class UnheldFile:
    """A file in memory that keeps no descriptor, because there may be tens of thousands of them."""

    __slots__ = ("_files", "_map", "buffer", "name")

    def __init__(self, files: RealFiles, name: str, mapped: mmap.mmap | Mapping) -> None:
        self.name = name
        self.buffer = memoryview(mapped)
        self._files = files
        self._map: mmap.mmap | Mapping | None = mapped

    def sync(self) -> None:
        self._files._sync_name(self.name)

    def close(self) -> bool:
        if self._map is None:
            return True
        self.buffer.release()
        try:
            self._map.close()
        except BufferError:  # a slice is still in use
            self.buffer = memoryview(self._map)
            return False
        self._map = None
        return True


def _find_unheld() -> Callable[[int, int], mmap.mmap | Mapping] | None:
    """How to map a file without keeping a descriptor; None where that can't be had."""
    if sys.version_info >= (3, 13):

        def unheld(fd: int, size: int) -> mmap.mmap:
            return mmap.mmap(fd, size, mmap.MAP_SHARED, trackfd=False)

        return unheld
    try:
        from cometmq._fast.mapping import Mapping
    except ImportError:
        return None
    return Mapping


class _Making:
    """Creates a file before it is needed."""

    __slots__ = ("_files", "_name", "_size")

    def __init__(self, files: RealFiles, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size

    def sync(self) -> None:
        """Made beside and linked into place: whoever looks, or starts after a kill, never finds a
        file that has not its size. A link, because a rename could replace a file in use."""
        path, beside = self._files._path(self._name), self._files._path(layout.NEXT_FILE)
        _remove(beside)  # left by a kill it may be another name of a log file: never write to it
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, self._size)
            # The first touch of a new file fills a large piece of the page cache with zeros, some
            # milliseconds' work that the append which rolls should find done.
            os.posix_fadvise(fd, 0, _TOUCHED_BYTES, os.POSIX_FADV_WILLNEED)
            folders = self._files._make_folders(os.path.dirname(path))
            self._files._unsynced_folders[self._name] = folders
            with contextlib.suppress(FileExistsError):  # an append was quicker
                os.link(beside, path)
        finally:
            os.close(fd)
            _remove(beside)


class _NamedTarget:
    """Makes a file durable that may no longer be mapped; opened only while it syncs."""

    __slots__ = ("_files", "_name")

    def __init__(self, files: RealFiles, name: str) -> None:
        self._files = files
        self._name = name

    def sync(self) -> None:
        self._files._sync_name(self._name)


class _Write:
    """Bytes on their way into the page cache of a file."""

    __slots__ = ("_at", "_data", "_path")

    def __init__(self, path: str, at: int, data: memoryview) -> None:
        self._path = path
        self._at = at
        self._data = data

    def sync(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_all(fd, self._data, self._at)
        finally:
            os.close(fd)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], at + done)
        if count <= 0:
            raise OSError(f"wrote {done} of {len(data)} bytes at {at}, then none")
        done += count


def _lock_memory(memory: mmap.mmap, size: int) -> str | None:
    """Keep memory from being swapped out; returns why that can't be, None if it is done."""
    import ctypes  # only who stages needs it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return None if libc.mlock(address, size) == 0 else os.strerror(ctypes.get_errno())


def _zero(fd: int, at: int, size: int) -> None:
    """Zeros from `at` on, without ever changing the file's size: a kill in between must not leave
    a short file. A hole costs no writing; not every file system can punch one."""
    if at == size:
        return
    import ctypes  # only a recovery that cuts something needs it

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, at, size - at) == 0:
        return
    zeros = bytes(min(size - at, _ZEROS_BYTES))
    while at < size:
        at += os.pwrite(fd, zeros[: size - at], at)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _close_all(fds: list[int]) -> None:
    for fd in reversed(fds):
        os.close(fd)


def _raise_open_file_limit() -> None:
    """A mapped file holds two descriptors; the usual soft limit of 1024 is soon spent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("open_file_limit soft=%d wanted=%d reason=%s", soft, wanted, error)
