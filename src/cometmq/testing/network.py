"""Network: connections between named nodes, as TCP gives them, with the ways they fail.

Owns: which bytes are under way, when they arrive and in what pieces, and who hears of an end. One
rule: what arrives is a prefix of what was sent, in order; everything else may happen: delay, pieces
cut and joined anywhere, silence, a reset, an end that only one side hears of.

    cut (a, b)   nothing passes from a to b; what was sent waits, as TCP would send it again
    half-open    one side is gone, the other learns it when it sends: the answer is a reset
It knows nothing of frames. All randomness comes from the Random it is given.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

MS = 1_000  # microseconds, the unit of virtual time
DIAL_TIMEOUT_US = 3_000 * MS  # as net.driver
RESEND_US = 500 * MS  # how often bytes for a machine without power are sent again


class Host(Protocol):
    """What the network sees of a node."""

    name: str
    address: str
    boot: int

    @property
    def is_up(self) -> bool:
        """Its process runs and listens."""

    @property
    def is_powered(self) -> bool:
        """Its machine runs: bytes for a dead process are answered by a reset."""

    def connected(self, end: End) -> None: ...
    def received(self, end: End, data: bytes) -> None: ...
    def disconnected(self, end: End) -> None: ...
    def unreachable(self, address: str, reason: str) -> None: ...


class World(Protocol):
    """Time and the other nodes."""

    now_us: int

    def later(
        self, delay_us: int, name: str, boot: int | None, label: str, act: Callable[[], None]
    ) -> None:
        """Run `act` at the node; not if it is another boot by then (None: whatever the boot)."""

    def note(self, text: str) -> None:
        """Something that the trace should tell."""

    def host(self, name: str) -> Host: ...
    def host_at(self, address: str) -> Host | None: ...


class End:
    """One side of a connection: what is on its way to it, and whether it is open."""

    __slots__ = (
        "boot",
        "conn",
        "dialled",
        "inbox",
        "is_deaf",
        "is_open",
        "last_us",
        "node",
        "peer",
        "port",
    )

    def __init__(self, node: str, boot: int, port: int, dialled: str | None) -> None:
        self.node = node
        self.boot = boot
        self.port = port
        self.dialled = dialled
        self.conn = 0  # the number its node gives it
        self.is_open = True
        self.is_deaf = False  # a reset is on its way: nothing more arrives
        self.peer: End = self
        self.inbox: deque[tuple[int, bytes]] = deque()  # (ready at, bytes); b"" ends the stream
        self.last_us = 0


class Pace:
    """How bytes travel just now; the faults change it."""

    def __init__(self) -> None:
        self.least_us = 50
        self.mean_us = 300
        self.slow_percent = 0  # of pieces, these take up to slow_us more
        self.slow_us = 0
        self.split_percent = 0


class Network:
    """All connections of a cluster."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self._rng = rng
        self._world = world
        self.pace = Pace()
        self.cuts: dict[tuple[str, str], None] = {}
        self.ends: list[End] = []
        self._next_port = 40_000
        self._hash = hashlib.blake2b(digest_size=8)

    @property
    def hash(self) -> str:
        """All that arrived anywhere: what, where and when."""
        return self._hash.hexdigest()

    # ------------------------------------------------------------------------------ for the nodes

    def dial(self, caller: Host, address: str) -> None:
        boot = caller.boot

        def knock() -> None:
            target = self._world.host_at(address)
            if target is None or target.name == caller.name:
                caller.unreachable(address, "no such host")
            elif self._is_cut_between(caller.name, target.name) or not target.is_powered:
                self._world.later(
                    DIAL_TIMEOUT_US,
                    caller.name,
                    boot,
                    "dial timeout",
                    lambda: caller.unreachable(address, "timed out"),
                )
            elif not target.is_up:
                caller.unreachable(address, "connection refused")
            else:
                self._connect(caller, target, address)

        self._world.later(2 * self._delay(), caller.name, boot, "dial", knock)

    def _connect(self, caller: Host, target: Host, address: str) -> None:
        self._next_port += 1
        near = End(caller.name, caller.boot, int(address.rpartition(":")[2]), address)
        far = End(target.name, target.boot, self._next_port, None)
        near.peer, far.peer = far, near
        self.ends += [near, far]
        # The far side is told first: its first bytes can't come before it knows the connection.
        far.last_us = self._world.now_us
        self._world.later(0, far.node, far.boot, "accept", lambda: target.connected(far))
        caller.connected(near)

    def send(self, end: End, data: bytes) -> None:
        if end.is_open:
            self._push(end.peer, data)

    def close(self, end: End) -> None:
        """An orderly end: the peer gets what was sent before, then hears of it."""
        if end.is_open:
            end.is_open = False
            end.inbox.clear()
            self._push(end.peer, b"")
            self._world.host(end.node).disconnected(end)

    def died(self, name: str, *, has_power: bool) -> None:
        """A process is gone. Its system says goodbye for it, unless the power went."""
        for end in self._of(name):
            if end.is_open:
                end.is_open = False
                end.inbox.clear()
                if has_power:
                    if self._rng.randrange(2):  # unread bytes on the way: a reset overtakes them
                        end.peer.inbox.clear()
                    self._push(end.peer, b"")
        self._tidy()

    # --------------------------------------------------------------------------------- for faults

    def reset(self, end: End) -> None:
        """Both sides lose the connection, at moments of their own; bytes under way are lost."""
        for side in (end, end.peer):
            side.inbox.clear()
            side.is_deaf = True
            self._break(side)

    def half_open(self, end: End) -> None:
        """One side loses the connection, the other is not told."""
        self._break(end)

    def cut(self, source: str, target: str) -> None:
        self.cuts[source, target] = None

    def heal(self) -> None:
        """Everything passes again, and what waited arrives."""
        self.cuts.clear()
        for end in self.ends:
            if end.inbox:
                self._arrive_later(end, self._delay())

    def mend(self) -> None:
        """As heal, and whatever is under way arrives soon."""
        self.pace.slow_percent = self.pace.split_percent = 0
        now = self._world.now_us
        for end in self.ends:
            end.last_us = now
            end.inbox = deque((min(ready, now), data) for ready, data in end.inbox)
        self.heal()

    def stall(self, end: End, duration_us: int) -> None:
        """Nothing arrives at this side for a while."""
        until = self._world.now_us + duration_us
        end.inbox = deque((max(ready, until), data) for ready, data in end.inbox)
        end.last_us = max(end.last_us, until)
        if end.inbox:
            self._arrive_later(end, duration_us)

    def open_ends(self) -> list[End]:
        return [end for end in self.ends if end.is_open]

    # ------------------------------------------------------------------------------------- inside

    def _delay(self) -> int:
        pace, rng = self.pace, self._rng
        delay = pace.least_us + rng.randrange(2 * pace.mean_us)
        if pace.slow_percent and rng.randrange(100) < pace.slow_percent:
            delay += rng.randrange(pace.slow_us)
        return delay

    def _is_cut_between(self, one: str, other: str) -> bool:
        return (one, other) in self.cuts or (other, one) in self.cuts

    def _of(self, name: str) -> list[End]:
        return [end for end in self.ends if end.node == name]

    def _push(self, to: End, data: bytes) -> None:
        if to.is_deaf:
            return
        ready = max(to.last_us, self._world.now_us + self._delay())
        to.last_us = ready
        to.inbox.append((ready, data))
        self._arrive_later(to, ready - self._world.now_us)

    def _arrive_later(self, to: End, delay_us: int) -> None:
        self._world.later(delay_us, to.node, None, "arrive", partial(self._arrive, to))

    def _arrive(self, to: End) -> None:
        now = self._world.now_us
        if not to.inbox or to.inbox[0][0] > now or (to.peer.node, to.node) in self.cuts:
            return
        host = self._world.host(to.node)
        if not to.is_open or host.boot != to.boot:
            self._refuse(to, host)
            return
        parts: list[bytes] = []
        while to.inbox and to.inbox[0][0] <= now and to.inbox[0][1]:
            parts.append(to.inbox.popleft()[1])
        data = b"".join(parts)
        if not data:
            to.inbox.clear()
            to.is_open = False
            to.peer.is_open = False
            host.disconnected(to)
            self._tidy()
            return
        if self.pace.split_percent and self._rng.randrange(100) < self.pace.split_percent:
            at = self._rng.randrange(1, len(data) + 1)
            if at < len(data):
                to.inbox.appendleft((now, data[at:]))
                data = data[:at]
        if to.inbox:
            self._arrive_later(to, max(to.inbox[0][0] - now, self._delay()))
        text = f"{to.peer.node}>{to.node} {len(data)} {zlib.crc32(data):08x}"
        self._hash.update(f"{now} {text}".encode())
        self._world.note(text)
        host.received(to, data)

    def _refuse(self, to: End, host: Host) -> None:
        """Bytes for a side that is gone: answered by a reset, once there is a machine to answer."""
        if not host.is_powered:
            self._arrive_later(to, RESEND_US)
            return
        to.inbox.clear()
        to.is_open = False
        if (to.node, to.peer.node) not in self.cuts:
            self._break(to.peer)

    def _break(self, end: End) -> None:
        def broken() -> None:
            if end.is_open:
                end.is_open = False
                end.inbox.clear()
                host = self._world.host(end.node)
                if host.boot == end.boot:
                    host.disconnected(end)
                self._tidy()

        self._world.later(self._delay(), end.node, end.boot, "broken", broken)

    def _tidy(self) -> None:
        self.ends = [end for end in self.ends if end.is_open or end.peer.is_open]
