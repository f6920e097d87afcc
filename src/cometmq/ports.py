"""What the pure parts ask of the world, and what the world asks of them.

Owns: the contract between a core (Broker, NameServer) and the driver that runs it, and the Files
that the store writes through. One rule: a core never waits; whatever must be waited for is an
effect that it appends to `out`, and the driver comes back with the outcome.

Two users each: cometmq.net runs cores on sockets, tests run them in memory; RealFiles maps files,
tests inject disks that fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, Protocol

import msgspec

from cometmq.wire.frame import Frame

ConnId = NewType("ConnId", int)

NEVER_MS = 2**63 - 1
"""A deadline that never comes."""


class Peer(msgspec.Struct, frozen=True):
    """The other end of a connection. `dialled` is the address we asked for, if we opened it."""

    host: str
    port: int
    packed: bytes
    dialled: str | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# ---------------------------------------------------------------------------------------- effects


class Send(msgspec.Struct, gc=False):
    """Bytes for a connection; dropped silently if it has gone."""

    conn: ConnId
    data: bytes


class Flush(msgspec.Struct, gc=False):
    """Make these files durable, off the loop, in order. At most one outstanding per `kind`; the
    kinds `commit` (which writes bytes and makes nothing durable) and `log` share one thread."""

    kind: str
    targets: Sequence[SyncTarget]


class Save(msgspec.Struct, gc=False):
    """Replace a small state file: written beside, synced, renamed. One outstanding per name."""

    name: str
    content: bytes


class Dial(msgspec.Struct, gc=False):
    """Open a connection to `host:port`; answered by opened() or dial_failed()."""

    address: str


class Close(msgspec.Struct, gc=False):
    """End a connection after what was sent before has left; `reason` goes to the log."""

    conn: ConnId
    reason: str


Effect = Send | Flush | Save | Dial | Close
Out = list[Effect]


class Core(Protocol):
    """A server's decisions: plain methods, no waiting, no clock, no socket."""

    deadline_ms: int
    """When to call tick next; NEVER_MS if not at all."""

    def opened(self, conn: ConnId, peer: Peer, now_ms: int, out: Out) -> None: ...
    def handle(self, conn: ConnId, frame: Frame, waited_ms: int, now_ms: int, out: Out) -> None:
        """One frame; `waited_ms` is how long it lay in our own queue."""

    def receive(self, conn: ConnId, data: bytes, now_ms: int, out: Out) -> tuple[int, int]:
        """Bytes as they come, before they are cut into frames: a core may take whole frames from
        the front and do at once what `handle` would. Returns how many bytes and frames it took."""

    def settle(self, now_ms: int, out: Out) -> None:
        """Once after a batch of frames: dispatch, wake what waits, ask to flush."""

    def closed(self, conn: ConnId, now_ms: int, out: Out) -> None: ...
    def dial_failed(self, address: str, reason: str, now_ms: int, out: Out) -> None: ...
    def flushed(self, kind: str, now_ms: int, out: Out) -> None: ...
    def flush_failed(self, kind: str, reason: str, now_ms: int, out: Out) -> None: ...
    def saved(self, name: str, reason: str | None, now_ms: int, out: Out) -> None:
        """A Save is done; `reason` says why it failed, None if it did not."""

    def stalled(self, duration_ms: int, now_ms: int, out: Out) -> None:
        """One call into the core took this long (a page fault on a full disk, mostly)."""

    def tick(self, now_ms: int, out: Out) -> None: ...
    def stop(self, now_ms: int, out: Out) -> None:
        """Shut down: answer what waits, say goodbye. `is_stopped` turns true when done."""

    @property
    def is_stopped(self) -> bool: ...
    def close(self, now_ms: int) -> None:
        """The driver is done: last synchronous writes, files closed."""


# ------------------------------------------------------------------------------------------ files


class SyncTarget(Protocol):
    """Something that can be made durable from another thread."""

    def sync(self) -> None:
        """fdatasync; raises OSError, and then nothing since the last good one is believed."""


class MappedFile(SyncTarget, Protocol):
    """A fixed-size file in memory. Writing to `buffer` writes the file."""

    name: str
    buffer: memoryview

    def close(self) -> bool:
        """Unmap; False (and still open) while a slice of the buffer is in use."""


class Files(Protocol):
    """One store directory. Names are relative, with `/`; missing folders are made on write."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders right below, sorted; empty if it is missing."""

    def files(self, folder: str) -> list[tuple[str, int]]:
        """(name, size) of the plain files right below, sorted by name; empty if missing."""

    def map(self, name: str, size: int) -> MappedFile:
        """Map for reading and writing; created sparse at `size` if missing or empty."""

    @property
    def queue_map_limit(self) -> int:
        """How many files of consume queues the system lets us map at once."""

    def target(self, name: str) -> SyncTarget:
        """Make a file durable by name, mapped or not; one that is gone by then counts as done."""

    def stage(self, size: int) -> memoryview:
        """Zeroed memory of this process alone, kept from being swapped out where that can be."""

    def writing(self, name: str, at: int, data: memoryview) -> SyncTarget:
        """Its sync() writes `data` into an existing file from byte `at` on, all of it or OSError.
        A mapping of the file shows it at once; it is not durable by that."""

    def making(self, name: str, size: int) -> SyncTarget:
        """Its sync() creates a file ahead of its first use, as map would; not durable by that."""

    def zero_from(self, name: str, at: int, size: int, *, is_durable: bool = True) -> None:
        """Turn bytes [at, size) into zeros without touching the rest. Not while mapped."""

    def read(self, name: str) -> bytes | None:
        """The whole file; None if missing."""

    def replace(self, name: str, content: bytes) -> None:
        """Durably replace a file, keeping the former one as `<name>.bak`; never a half state."""

    def write(self, name: str, content: bytes) -> None:
        """Durably write a file with no backup."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is missing."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all below it; nothing happens if it is missing."""

    def rename(self, name: str, new_name: str) -> None: ...
    def modified_ms(self, name: str) -> int: ...
    def used_ratio(self) -> float:
        """How full the disk is, 0.0 to 1.0."""

    def lock(self) -> None:
        """Take the store for this process; StoreLocked if another has it."""

    def unlock(self) -> None: ...
