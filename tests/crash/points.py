"""Runs `cometmq` so that it dies, or its disk fails, at one chosen point.

    python tests/crash/points.py POINT NTH -- up --store DIR ...

Owns: the list of points, and how each is reached. One rule: the product knows nothing of this. One
function is wrapped from outside; at its NTH call the process kills itself with SIGKILL, after one
line on standard error (`point reached: POINT`), so that a test can tell this death from another.

With CRASH_CONTROL=FILE in the environment the point sleeps until that file exists, so that a test
can look around first; what the fault points do depends on it too (see FAULTS).
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Function = Callable[..., Any]
Install = Callable[["Trap"], None]


@dataclass(frozen=True)
class Point:
    """`when` it can happen: under load, at a start, or while stopping.

    `nth` is the highest call to die at that is surely reached. `is_plain`: only the path without
    compiled code comes this way; `is_compiled`: only the compiled one. `is_dirty_start`: only a
    start after a kill does.
    """

    name: str
    when: str
    nth: int
    install: Install
    is_plain: bool = False
    is_compiled: bool = False
    is_dirty_start: bool = False


class Trap:
    """Counts the calls that matter and kills at the chosen one."""

    def __init__(self, name: str, nth: int, control: str) -> None:
        self.name = name
        self.control = control
        self._left = nth
        self._is_armed = not control
        self._lock = threading.Lock()

    def is_now(self) -> bool:
        """Counts one call; true at the chosen one."""
        if not self._is_armed:
            if not os.path.exists(self.control):
                return False
            self._is_armed = True
        with self._lock:
            self._left -= 1
            return self._left == 0

    def die(self) -> None:
        os.write(2, f"point reached: {self.name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # on another thread than the one that the signal ends first

    def hit(self) -> None:
        if self.is_now():
            self.die()


POINTS: dict[str, Point] = {}


def point(
    name: str,
    when: str = "load",
    nth: int = 1,
    *,
    is_plain: bool = False,
    is_compiled: bool = False,
    is_dirty_start: bool = False,
) -> Callable[[Install], Install]:
    def add(install: Install) -> Install:
        POINTS[name] = Point(name, when, nth, install, is_plain, is_compiled, is_dirty_start)
        return install

    return add


def before(owner: Any, name: str, trap: Trap, matters: Function = lambda *a, **k: True) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if matters(*args, **kwargs):
            trap.hit()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, trap: Trap, matters: Function = lambda *a, **k: True) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if matters(*args, **kwargs):
            trap.hit()
        return result

    setattr(owner, name, wrapped)


def own_os() -> SimpleNamespace:
    """A copy of `os` for store/files.py alone; its functions can be wrapped one by one."""
    from cometmq.store import files

    files.os = SimpleNamespace(**vars(os))  # type: ignore[attr-defined]
    return files.os  # type: ignore[attr-defined,return-value]


class Packer:
    """A struct.Struct with another pack_into."""

    def __init__(self, original: struct.Struct, pack_into: Function) -> None:
        self._original = original
        self.pack_into = pack_into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


# --------------------------------------------------------------------------------- appending a log


@point("append-before", nth=900, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog

    before(CommitLog, "append", trap)


@point("append-after", nth=900, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog

    after(CommitLog, "append", trap)


def torn(share: Callable[[int], int], has_end: bool = False) -> Install:
    """Only the first share(size) bytes of a record get written, and perhaps all behind its body."""

    def install(trap: Trap) -> None:
        from cometmq.wire import record

        original = record.write

        def write(buffer: memoryview, at: int, encoded: Any, **places: int) -> None:
            if trap.is_now():
                whole = bytearray(encoded.size)
                original(whole, 0, encoded, **places)
                upto = share(encoded.size)
                buffer[at : at + upto] = whole[:upto]
                if has_end:
                    begin = 88 + len(encoded.message.body)
                    buffer[at + begin : at + encoded.size] = whole[begin:]
                trap.die()
            original(buffer, at, encoded, **places)

        record.write = write

    return install


point("append-torn-size", nth=1500, is_plain=True)(torn(lambda size: 4))
point("append-torn-head", nth=1500, is_plain=True)(torn(lambda size: 88))
point("append-torn-body", nth=1500, is_plain=True)(torn(lambda size: 88, has_end=True))
point("append-torn-half", nth=1500, is_plain=True)(torn(lambda size: size // 2))
point("append-torn-last", nth=1500, is_plain=True)(torn(lambda size: size - 1))


@point("batch-middle", nth=200, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog
    from cometmq.wire import record

    append_batch, write = CommitLog.append_batch, record.write
    written = -1

    def count_batch(*args: Any) -> Any:
        nonlocal written
        written = 0
        try:
            return append_batch(*args)
        finally:
            written = -1

    def count_write(*args: Any, **kwargs: Any) -> None:
        nonlocal written
        write(*args, **kwargs)
        if written >= 0:
            written += 1
            if written == 1:
                trap.hit()

    CommitLog.append_batch = count_batch  # type: ignore[method-assign,assignment]
    record.write = count_write


@point("batch-after", nth=200, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog

    after(CommitLog, "append_batch", trap)


# --------------------------------------------------------------------------------- whole turns


def soon(owner: Any, name: str, trap: Trap) -> None:
    """A timer of the kernel ends the process while it is inside, in mid-instruction if need be:
    compiled code can't be wrapped piece by piece. If it comes out first, it dies then."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not trap.is_now():
            return original(*args, **kwargs)
        os.write(2, f"point reached: {trap.name}\n".encode())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-6, 100e-6))
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, wrapped)


def at_turn(name: str, wrap: Function) -> Install:
    def install(trap: Trap) -> None:
        from cometmq.store.store import Store

        wrap(Store, name, trap)

    return install


point("feed-before", nth=600, is_compiled=True)(at_turn("feed", before))
point("feed-during", nth=600, is_compiled=True)(at_turn("feed", soon))
point("feed-after", nth=600, is_compiled=True)(at_turn("feed", after))
point("dispatch-before", nth=600)(at_turn("dispatch", before))
point("dispatch-during", nth=600)(at_turn("dispatch", soon))
point("dispatch-after", nth=600)(at_turn("dispatch", after))


# ------------------------------------------------------------------------------------ rolling files


@point("roll-before-blank", nth=4, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.wire import record

    before(record, "write_blank", trap)


@point("roll-after-blank", nth=4, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.wire import record

    after(record, "write_blank", trap)


@point("roll-after", nth=4, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog

    after(CommitLog, "_make_room", trap)


@point("prepare-next-after", nth=4)
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog

    after(CommitLog, "prepared", trap)


def new_file(place: str) -> Install:
    """A file of this place has been created and is still empty."""

    def install(trap: Trap) -> None:
        names = own_os()

        def is_new(fd: int, size: int) -> bool:
            return place in path_of(fd) and os.fstat(fd).st_size == 0

        before(names, "ftruncate", trap, is_new)

    return install


@point("next-log-file-linked", nth=3)
def _(trap: Trap) -> None:
    """The next log file is in its place, and its other name is there as well."""
    after(own_os(), "link", trap, lambda beside, path, **_: "/commitlog/" in path)


point("next-log-file-empty", nth=4)(new_file("/next.tmp"))
point("new-queue-file-empty", nth=6)(new_file("/consumequeue/"))
point("new-index-file-empty", nth=6)(new_file("/index/"))


def new_map(folder: str) -> Install:
    """A new file of this folder has been made and mapped, and holds nothing yet."""

    def install(trap: Trap) -> None:
        from cometmq.store.files import RealFiles

        original = RealFiles.map

        def mapped(files: RealFiles, name: str, size: int) -> Any:
            is_new = not os.path.exists(os.path.join(files.root, name))
            found = original(files, name, size)
            if is_new and name.startswith(folder + "/"):
                trap.hit()
            return found

        RealFiles.map = mapped  # type: ignore[method-assign]

    return install


point("new-queue-file-after", nth=6)(new_map("consumequeue"))
point("new-index-file-after", nth=6)(new_map("index"))


# ----------------------------------------------------------------------------------------- flushing


def sync_of(folder: str) -> Function:
    return lambda files, name, fd, **how: name.startswith(folder)


def at_sync(folder: str, wrap: Function) -> Install:
    def install(trap: Trap) -> None:
        from cometmq.store.files import RealFiles

        wrap(RealFiles, "_sync_fd", trap, sync_of(folder))

    return install


def during(owner: Any, name: str, trap: Trap, matters: Function) -> None:
    """Another thread kills while this one is inside."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if matters(*args, **kwargs) and trap.is_now():
            threading.Timer(0.0002, trap.die).start()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


point("sync-log-before", nth=8)(at_sync("commitlog/", before))
point("sync-log-during", nth=8)(at_sync("commitlog/", during))
point("sync-log-after", nth=8)(at_sync("commitlog/", after))
point("sync-queue-before", nth=8)(at_sync("consumequeue/", before))
point("sync-queue-after", nth=8)(at_sync("consumequeue/", after))
point("sync-index-before", nth=4)(at_sync("index/", before))
point("sync-index-after", nth=4)(at_sync("index/", after))
point("sync-checkpoint-before", nth=3)(at_sync("checkpoint", before))
point("sync-checkpoint-after", nth=3)(at_sync("checkpoint", after))


@point("sync-folder-before", nth=6)
def _(trap: Trap) -> None:
    """Files are new and synced, their names are not."""
    from cometmq.store import files

    before(files, "_sync_folder", trap)


@point("checkpoint-before", nth=6)
def _(trap: Trap) -> None:
    from cometmq.store.checkpoint import Checkpoint

    before(Checkpoint, "_write", trap)


@point("checkpoint-torn", nth=6)
def _(trap: Trap) -> None:
    """The log's time is written, those of queues and index are not."""
    from cometmq.store.checkpoint import Checkpoint

    original = Checkpoint._write

    def write(checkpoint: Checkpoint) -> None:
        if trap.is_now():
            struct.pack_into(">q", checkpoint._mapped.buffer, 0, checkpoint.log_ms)
            trap.die()
        original(checkpoint)

    Checkpoint._write = write  # type: ignore[method-assign]


# --------------------------------------------------------------------------------- queues and index


@point("queue-put-before", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.consume_queue import ConsumeQueue

    before(ConsumeQueue, "put", trap)


@point("queue-put-after", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.consume_queue import ConsumeQueue

    after(ConsumeQueue, "put", trap)


@point("queue-put-torn", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    """The unit has its offset, but no size yet."""
    from cometmq.store import consume_queue

    original = consume_queue.UNIT

    def pack_into(buffer: memoryview, at: int, log_offset: int, size: int, tags: int) -> None:
        if trap.is_now():
            struct.pack_into(">q", buffer, at, log_offset)
            trap.die()
        original.pack_into(buffer, at, log_offset, size, tags)

    consume_queue.UNIT = Packer(original, pack_into)  # type: ignore[assignment]


@point("index-put-before", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.store.key_index import IndexFile

    before(IndexFile, "put", trap)


@point("index-put-after", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    """Often between two keys of one message."""
    from cometmq.store.key_index import IndexFile

    after(IndexFile, "put", trap)


@point("index-before-slot", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    """The entry stands, no slot shows it."""
    from cometmq.store import key_index

    original = key_index._SLOT

    def pack_into(buffer: memoryview, at: int, value: int) -> None:
        trap.hit()
        original.pack_into(buffer, at, value)

    key_index._SLOT = Packer(original, pack_into)  # type: ignore[assignment]


@point("index-before-head", nth=1500, is_plain=True)
def _(trap: Trap) -> None:
    """Entry and slot stand, the count does not know them."""
    from cometmq.store.key_index import IndexFile

    before(IndexFile, "_write_head", trap)


# ---------------------------------------------------------------------------------- saving settings


def is_config(files: Any, path: str, *_: Any) -> bool:
    return "/config/" in path


@point("save-tmp-half", nth=3)
def _(trap: Trap) -> None:
    from cometmq.store.files import RealFiles

    original = RealFiles._write_beside

    def write_beside(files: RealFiles, path: str, content: bytes) -> None:
        if "/config/" in path and trap.is_now():
            with open(path + ".tmp", "wb") as sink:
                sink.write(content[: len(content) // 2])
            trap.die()
        original(files, path, content)

    RealFiles._write_beside = write_beside  # type: ignore[method-assign]


@point("save-after-tmp", nth=3)
def _(trap: Trap) -> None:
    from cometmq.store.files import RealFiles

    after(RealFiles, "_write_beside", trap, is_config)


@point("save-after-link", nth=3)
def _(trap: Trap) -> None:
    after(own_os(), "link", trap)


@point("save-after-backup", nth=3)
def _(trap: Trap) -> None:
    after(own_os(), "rename", trap, lambda old, new: new.endswith(".json.bak"))


@point("save-after-rename", nth=3)
def _(trap: Trap) -> None:
    """Renamed, its folder not synced."""
    after(own_os(), "rename", trap, lambda old, new: new.endswith(".json"))


@point("save-topics", nth=1)
def _(trap: Trap) -> None:
    """A new topic is not saved yet; its first messages are in the log."""
    from cometmq.store.files import RealFiles

    before(RealFiles, "replace", trap, lambda files, name, content: name.endswith("topics.json"))


# ---------------------------------------------------------------------------------------- retention


@point("retention-before", nth=3)
def _(trap: Trap) -> None:
    from cometmq.store.segment import Segments

    before(Segments, "remove_first", trap)


@point("retention-log-removed", nth=3)
def _(trap: Trap) -> None:
    """A log file is gone; the units and keys of its messages are not."""
    from cometmq.store.segment import Segments

    after(Segments, "remove_first", trap, lambda segments: segments.folder == "commitlog")


@point("retention-index-removed", nth=1)
def _(trap: Trap) -> None:
    from cometmq.store.key_index import KeyIndex

    after(KeyIndex, "remove_expired", trap)


@point("retention-queue-removed", nth=3)
def _(trap: Trap) -> None:
    from cometmq.store.segment import Segments

    after(Segments, "remove_first", trap, lambda segments: segments.folder != "commitlog")


# --------------------------------------------------------------------------------- starts, recovery


@point("start-locked", when="start")
def _(trap: Trap) -> None:
    from cometmq.store.files import RealFiles

    after(RealFiles, "lock", trap)


@point("start-loaded", when="start")
def _(trap: Trap) -> None:
    from cometmq.store.recovery import Recovery

    before(Recovery, "run", trap)


@point("recovery-begin-known", when="start", is_dirty_start=True)
def _(trap: Trap) -> None:
    """Queues are cut and newer index files removed; nothing is built again."""
    from cometmq.store.recovery import Recovery

    after(Recovery, "_unclean_start", trap)


@point("recovery-queue-cut", when="start", nth=6, is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.consume_queue import ConsumeQueue

    after(ConsumeQueue, "wipe_tail", trap)


def zeroing(folder: str) -> Install:
    """A file's tail is zeros, and that is not synced."""

    def install(trap: Trap) -> None:
        from cometmq.store import files

        after(files, "_zero", trap, lambda fd, at, size: f"/{folder}/" in path_of(fd))

    return install


point("recovery-zeroing-queue", when="start", nth=4, is_dirty_start=True)(zeroing("consumequeue"))
point("recovery-zeroing-log", when="start", is_dirty_start=True)(zeroing("commitlog"))


@point("recovery-index-removed", when="start", is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.key_index import KeyIndex

    after(KeyIndex, "remove_newer", trap)


@point("recovery-walking", when="start", nth=60, is_plain=True, is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.dispatch import Dispatcher

    before(Dispatcher, "feed", trap)


@point("recovery-walk-during", when="start", nth=6, is_compiled=True, is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.dispatch import Dispatcher

    soon(Dispatcher, "walk", trap)


@point("recovery-walk-after", when="start", nth=6, is_compiled=True, is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.dispatch import Dispatcher

    after(Dispatcher, "walk", trap)


@point("recovery-index-put", when="start", nth=20, is_plain=True, is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.key_index import IndexFile

    after(IndexFile, "put", trap)


@point("recovery-before-cut", when="start", is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.recovery import Recovery

    before(Recovery, "_cut_log", trap)


@point("recovery-sync", when="start", is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.files import RealFiles

    before(RealFiles, "_sync_fd", trap, sync_of("commitlog/"))


@point("recovery-after-cut", when="start", is_dirty_start=True)
def _(trap: Trap) -> None:
    from cometmq.store.recovery import Recovery

    after(Recovery, "_cut_log", trap)


@point("recovery-settled", when="start")
def _(trap: Trap) -> None:
    from cometmq.store.recovery import Recovery

    after(Recovery, "_settle", trap)


@point("start-before-abort", when="start")
def _(trap: Trap) -> None:
    from cometmq.store.files import RealFiles

    before(RealFiles, "write", trap, lambda files, name, content: name == "abort")


@point("start-after-abort", when="start")
def _(trap: Trap) -> None:
    from cometmq.store.store import Store

    after(Store, "_start", trap)


@point("start-settings-read", when="start")
def _(trap: Trap) -> None:
    from cometmq.broker.broker import Broker

    after(Broker, "_clamp_offsets", trap)


# ----------------------------------------------------------------------------------------- stopping


@point("stop-before-close", when="stop")
def _(trap: Trap) -> None:
    from cometmq.store.store import Store

    before(Store, "close", trap)


@point("stop-log-synced", when="stop")
def _(trap: Trap) -> None:
    from cometmq.store.flush import FlushPlan

    after(FlushPlan, "sync_log", trap)


@point("stop-all-synced", when="stop")
def _(trap: Trap) -> None:
    from cometmq.store.flush import FlushPlan

    after(FlushPlan, "sync_queues", trap)


@point("stop-before-abort-removed", when="stop")
def _(trap: Trap) -> None:
    from cometmq.store.commit_log import CommitLog

    after(CommitLog, "remove_unused", trap)


@point("stop-abort-removed", when="stop")
def _(trap: Trap) -> None:
    from cometmq.store.files import RealFiles

    after(RealFiles, "remove", trap, lambda files, name: name == "abort")


# ------------------------------------------------------------------------------------------- faults

FAULTS: dict[str, Install] = {}


def fault(name: str) -> Callable[[Install], Install]:
    def add(install: Install) -> Install:
        FAULTS[name] = install
        return install

    return add


def _before_sync(work: Callable[[int], None]) -> None:
    """Do this with the descriptor before every sync that the store makes."""
    names = own_os()

    def wrap(original: Function) -> Function:
        def sync(fd: int) -> None:
            work(fd)
            original(fd)

        return sync

    names.fdatasync, names.fsync = wrap(os.fdatasync), wrap(os.fsync)


def _eio(folder: str) -> Install:
    """The NTH sync in this folder fails, as on a disk that lost a write; later ones succeed."""

    def install(trap: Trap) -> None:
        def fail(fd: int) -> None:
            if f"/{folder}/" in path_of(fd) and trap.is_now():
                os.write(2, f"point reached: {trap.name}\n".encode())
                raise OSError(5, "Input/output error")

        _before_sync(fail)

    return install


fault("eio-log")(_eio("commitlog"))
fault("eio-queue")(_eio("consumequeue"))


@fault("stalled-disk")
def _(trap: Trap) -> None:
    """No sync of any kind returns while the control file exists."""

    def stall(fd: int) -> None:
        while os.path.exists(trap.control):
            time.sleep(0.02)

    _before_sync(stall)


@fault("clock")
def _(trap: Trap) -> None:
    """The wall clock is off by as many ms as the control file says, now."""
    from cometmq.net import clock

    off_ns = 0

    def watch() -> None:
        nonlocal off_ns
        while True:
            try:
                with open(trap.control, encoding="ascii") as source:
                    off_ns = int(source.read() or 0) * 1_000_000
            except OSError:
                off_ns = 0
            time.sleep(0.01)

    try:
        with open(trap.control, encoding="ascii") as source:
            off_ns = int(source.read()) * 1_000_000
    except OSError:
        pass
    threading.Thread(target=watch, daemon=True).start()
    clock.time = SimpleNamespace(  # type: ignore[attr-defined]
        time_ns=lambda: time.time_ns() + off_ns, monotonic_ns=time.monotonic_ns
    )


def main(arguments: list[str]) -> int:
    name, nth, mark, *rest = arguments
    assert mark == "--", "points.py POINT NTH -- <arguments of cometmq>"
    trap = Trap(name, int(nth), os.environ.get("CRASH_CONTROL", ""))
    from kind_points import KIND_POINTS

    install = FAULTS[name] if name in FAULTS else {**POINTS, **KIND_POINTS}[name].install
    install(trap)
    from cometmq.cli.main import main as cometmq

    return cometmq(rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
