"""The network of a SimLoop: programs with hosts of their own, listeners, connections, faults.

Owns: what a connection does between two programs on one loop. One rule: TCP's promise and no more:
a prefix of what was written, in order, in pieces of any size; the rest is drawn from the loop's
seed. `Process` gives programs a host of their own and an end without a goodbye.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from cometmq.testing.loop import SimLoop

T = TypeVar("T")

US = 1_000_000  # microseconds in a second; the clock counts them, asyncio sees seconds
SOCKET_BYTES = 64 * 1024  # what a system takes off a transport's hands before the peer reads it
CHUNK_BYTES = 256 * 1024  # asyncio reads no more at once
HIGH_BYTES = 64 * 1024  # asyncio's own default
SYN_WAITS_S = (1, 2, 4, 8, 16, 32, 64)  # as Linux: a connect nobody answers fails after 127 s
FIRST_PORT = 40_001
MOST_CANCELS = 100  # of what a killed process has left

_EOF = b""  # in an inbox: the stream ends
_RST = None  # in an inbox: the connection breaks once what stands before it was read


# --------------------------------------------------------------------------------------- processes


class Process:
    """A program on a host of its own: what it spawns dials from there, and ends with it."""

    def __init__(self, loop: SimLoop, host: str) -> None:
        self.host = host
        self.is_up = True
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as part of this program."""
        assert self.is_up, "a killed process runs nothing"
        return self._loop.create_task(work, context=self._context.copy())

    def tasks(self) -> list[asyncio.Task[Any]]:
        """What it has begun and not ended, the tasks of its tasks included; oldest first."""
        return [one for one in self._loop.pending() if getattr(one, "process", None) is self]

    def timers(self) -> list[asyncio.TimerHandle]:
        """What it has scheduled for later; not what its system does for its connections."""
        found = []
        for timer in cast(Any, self._loop)._scheduled:
            if timer.cancelled() or timer._context.get(_PROCESS) is not self:
                continue
            if not isinstance(getattr(timer._callback, "__self__", None), _SYSTEM):
                found.append(timer)
        return found

    def kill(self) -> None:
        """kill -9: peers see a reset, the program hears nothing more. Its tasks are cancelled,
        which is the one thing of it that a real process would not see; what they do then reaches
        nobody, and tasks that its timers begin later are cancelled at once."""
        if self.is_up:
            self.is_up = False
            self._loop.network.died(self)
            self._cancel(MOST_CANCELS)

    def _cancel(self, times: int) -> None:
        """Some take a cancellation for the end of one piece of work, and go on with the next."""
        left = self.tasks()
        for task in left:
            task.cancel()
        if left and times:
            self._loop.call_soon(self._cancel, times - 1, context=contextvars.Context())


def running_process(context: contextvars.Context | None = None) -> Process | None:
    """The program whose code runs now (or in a context), if it was given a process of its own."""
    return _PROCESS.get() if context is None else context.get(_PROCESS)


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Listener:
    """Stands where a bound socket would: `create_server(sock=...)`, `server.sockets`."""

    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)

    def getsockname(self) -> tuple[str, int]:
        return self._name


# ----------------------------------------------------------------------------------------- network


class LoopNetwork:
    """All listeners and connections of a loop. An address of a fault is `host` or `host:port`."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.split_percent = 25  # of arrivals, these come in two pieces
        self._loop = loop
        self._rng = rng
        self._least_us = 50
        self._most_us = 1_000
        self._servers: dict[tuple[str, int], SimAsyncServer] = {}
        self._open: dict[SimTransport, None] = {}
        self._stalled: dict[str, None] = {}
        self._cut: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        self._next_port = FIRST_PORT

    # --------------------------------------------------------------------------------- for faults

    def delay(self, least_s: float, most_s: float) -> None:
        """How long bytes travel from now on."""
        assert 0 <= least_s <= most_s
        self._least_us, self._most_us = round(least_s * US), round(most_s * US)

    def stall(self, address: str) -> None:
        """Nothing arrives, to or from there; connecting goes on. What was sent waits."""
        self._stalled[address] = None

    def go_on(self, address: str) -> None:
        """The end of a stall: what waited arrives."""
        self._stalled.pop(address, None)
        self._wake()

    def cut(self, address: str) -> None:
        """As stall, and nobody gets through to connect, nor hears that the other side is gone:
        connections are half-open. Bytes wait, as TCP would send them again."""
        self._cut[address] = None

    def refuse(self, address: str) -> None:
        """Connecting fails at once, as if nobody listened."""
        self._refused[address] = None

    def heal(self, address: str) -> None:
        """The end of cut and refuse: what waited arrives."""
        self._cut.pop(address, None)
        self._refused.pop(address, None)
        self._wake()

    def reset(self, address: str) -> None:
        """Both sides lose the connections, each at a moment of its own, and all that was under
        way."""
        for side in [side for side in self._open if address in side.keys]:
            side.deafen()
            self._break_later(side)

    def _wake(self) -> None:
        for side in self._open:
            for one in (side, side.peer):  # a peer that is gone: whoever writes to it hears that
                if one.inbox:
                    self.arrive_later(one, self._delay_us())

    # -------------------------------------------------------------------------------- for the loop

    def process(self, host: str) -> Process:
        """A program that runs on this host."""
        return Process(self._loop, host)

    def bind(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> SimAsyncServer:
        return SimAsyncServer(self._loop, factory, host, port or self._port())

    def listen(self, server: SimAsyncServer) -> None:
        if server.address in self._servers:
            raise OSError(errno.EADDRINUSE, f"address already in use: {server.address}")
        self._servers[server.address] = server

    def unlisten(self, server: SimAsyncServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    async def connect(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        local: tuple[str, int] | None,
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        process = _PROCESS.get()
        here = local[0] if local else "127.0.0.1" if process is None else process.host
        near, far = (here, (local and local[1]) or self._port()), (host, port)
        keys = _keys(near, far)
        await asyncio.sleep(2 * self._delay_us() / US)
        for wait_s in SYN_WAITS_S:
            if not _has(self._cut, keys):
                break
            await asyncio.sleep(wait_s)
        else:
            self._loop.note(f"{_text(near)} can't reach {_text(far)}")
            raise TimeoutError(errno.ETIMEDOUT, f"Connect call failed {far}")
        if process is not None and not process.is_up:
            raise OSError(errno.ENETDOWN, "the process that dials is gone")
        places = (far, ("0.0.0.0", port), ("::", port))
        server = next((self._servers[place] for place in places if place in self._servers), None)
        if server is None or _has(self._refused, keys):
            self._loop.note(f"{_text(near)} refused by {_text(far)}")
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {far}")
        self._loop.note(f"{_text(near)} connects to {_text(far)}")
        ours = SimTransport(self._loop, self, near, far, keys, process, contextvars.copy_context())
        theirs = SimTransport(self._loop, self, far, near, keys, server.process, server.context)
        ours.peer, theirs.peer = theirs, ours
        self._open[ours] = self._open[theirs] = None
        accept_us = self._delay_us()
        theirs.last_us = self._loop.now_us + accept_us  # bytes can't come before their connection
        self._loop.call_later(accept_us / US, self._accept, server, theirs, context=theirs.context)
        protocol = factory()
        ours.begin(protocol, None)
        return ours, protocol

    def _accept(self, server: SimAsyncServer, side: SimTransport) -> None:
        if side.is_lost:
            return
        if not server.is_serving():
            self.dead(side)
            return
        self._loop.note(f"{_text(side.local)} accepts {_text(side.remote)}")
        side.begin(server.factory(), server)

    def died(self, process: Process) -> None:
        for server in [s for s in self._servers.values() if s.process is process]:
            server.close()
        for side in [side for side in self._open if side.process is process]:
            self.dead(side)

    def dead(self, side: SimTransport) -> None:
        """A side is gone without its program hearing of it; its system answers with a reset."""
        side.end_silently()
        if self._rng.randrange(2):
            self.reset_peer(side)
        elif not _has(self._cut, side.keys):
            self.push(side.peer, _RST)

    def reset_peer(self, side: SimTransport) -> None:
        """A reset that overtakes what is under way; lost where nothing gets through."""
        peer = side.peer
        if not peer.is_lost and not _has(self._cut, side.keys):
            peer.deafen()
            self._break_later(peer)

    def aborted(self, side: SimTransport) -> None:
        """The peer sees a reset, or an end like any other if all had left already."""
        if side.get_write_buffer_size() or self._rng.randrange(2):
            self.reset_peer(side)
        elif not side.has_eof:
            self.push(side.peer, _EOF)

    def forget(self, side: SimTransport) -> None:
        self._open.pop(side, None)

    def vanish(self) -> None:
        """The run is over."""
        for side in list(self._open):
            side.end_silently()

    # ------------------------------------------------------------------------------------- inside

    def _port(self) -> int:
        self._next_port += 1
        return self._next_port - 1

    def _delay_us(self) -> int:
        return self._rng.randint(self._least_us, self._most_us)

    def _break_later(self, side: SimTransport) -> None:
        error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        delay_s = self._delay_us() / US
        self._loop.call_later(delay_s, side.lose, error, context=side.context)

    def push(self, to: SimTransport, data: bytes | None) -> None:
        """Put bytes, or an end, on their way."""
        if to.is_deaf:
            return
        to.last_us = max(to.last_us, self._loop.now_us + self._delay_us())
        to.inbox.append((to.last_us, data))
        to.inbox_bytes += len(data or b"")
        self.arrive_later(to, to.inbox[0][0] - self._loop.now_us)

    def arrive_later(self, to: SimTransport, delay_us: int) -> None:
        """At most one arrival is planned for a side: it plans the next."""
        if not to.is_awaited:
            to.is_awaited = True
            self._loop.call_later(max(delay_us, 0) / US, self._arrive, to, context=to.context)

    def _arrive(self, to: SimTransport) -> None:
        to.is_awaited = False
        if not to.inbox or _has(self._cut, to.keys) or _has(self._stalled, to.keys):
            return  # heal and go_on come back
        if to.is_closing():
            self._refuse(to)
            return
        if to.is_read_paused or not to.has_begun:
            return  # resume_reading and begin come back
        now_us = self._loop.now_us
        if to.inbox[0][0] <= now_us:
            data = self._take(to, now_us)
            if data:
                what = f"{len(data)} {zlib.crc32(data):08x}"
            else:
                what = "reset" if data is _RST else "end"
            self._loop.note(f"{_text(to.remote)}>{_text(to.local)} {what}")
            to.deliver(data)
        if to.inbox:
            self.arrive_later(to, to.inbox[0][0] - now_us)

    def _take(self, to: SimTransport, now_us: int) -> bytes | None:
        """What has arrived: pieces joined, or cut in two, or the mark of an end."""
        inbox = to.inbox
        if not inbox[0][1]:
            return inbox.popleft()[1]
        parts: list[bytes] = []
        size = 0
        while inbox and inbox[0][0] <= now_us and inbox[0][1] and size < CHUNK_BYTES:
            parts.append(inbox.popleft()[1] or b"")
            size += len(parts[-1])
        data = b"".join(parts)
        at = min(size, CHUNK_BYTES)
        if at > 1 and self._rng.randrange(100) < self.split_percent:
            at = self._rng.randrange(1, at)
        if at < size:
            ready_us = now_us + self._delay_us()
            to.last_us = max(to.last_us, ready_us)
            inbox.appendleft((ready_us, data[at:]))
        to.inbox_bytes -= at
        return data[:at]

    def _refuse(self, to: SimTransport) -> None:
        """Bytes for a side that has closed are answered by a reset."""
        has_bytes = to.inbox_bytes > 0
        to.inbox.clear()
        to.inbox_bytes = 0
        if not has_bytes:
            return
        if self._rng.randrange(2):
            self.reset_peer(to)  # and with it what the peer has not read
        elif not to.peer.is_lost:
            self.push(to.peer, _RST)


class SimTransport(asyncio.Transport):
    """One side of a connection. Bytes not yet delivered, past what a system would hold, are its
    write buffer."""

    def __init__(
        self,
        loop: SimLoop,
        network: LoopNetwork,
        local: tuple[str, int],
        remote: tuple[str, int],
        keys: tuple[str, ...],
        process: Process | None,
        context: contextvars.Context,
    ) -> None:
        super().__init__({"peername": remote, "sockname": local, "socket": None})
        self.local = local
        self.remote = remote
        self.keys = keys
        self.process = process
        self.context = context
        self.peer: SimTransport = self
        self.inbox: deque[tuple[int, bytes | None]] = deque()  # (ready at, what)
        self.inbox_bytes = 0
        self.last_us = 0
        self.is_awaited = False  # an arrival is planned
        self.is_deaf = False  # a reset is on its way: nothing more arrives, lest there be a hole
        self.has_begun = False
        self.is_read_paused = False
        self.is_lost = False
        self.has_eof = False
        self._loop = loop
        self._network = network
        self._protocol: asyncio.Protocol = asyncio.Protocol()
        self._server: SimAsyncServer | None = None
        self._is_closing = False
        self._is_ending = False  # connection_lost is on its way
        self._is_write_paused = False
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4

    def begin(self, protocol: asyncio.BaseProtocol, server: SimAsyncServer | None) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)
        self._server = server
        if server is not None:
            server.attach()
        self.has_begun = True
        protocol.connection_made(self)
        if self.inbox:
            self._network.arrive_later(self, self.inbox[0][0] - self._loop.now_us)

    # -------------------------------------------------------------------------------- reading

    def pause_reading(self) -> None:
        self.is_read_paused = True

    def resume_reading(self) -> None:
        if self.is_read_paused and not self._is_closing:
            self.is_read_paused = False
            if self.inbox:
                self._network.arrive_later(self, self.inbox[0][0] - self._loop.now_us)

    def is_reading(self) -> bool:
        return not self.is_read_paused and not self._is_closing

    def deliver(self, data: bytes | None) -> None:
        """Hand over what has arrived; as asyncio, a protocol that raises loses its connection."""
        if data is _RST:
            self.lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            return
        try:
            if data:
                self._loop.call_soon(self.peer.drained, context=self.peer.context)
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()
        except Exception as error:
            message = "Fatal error: protocol.data_received() or eof_received() failed."
            context = {"message": message, "exception": error, "transport": self}
            self._loop.call_exception_handler(context)
            self._abort(error)

    # -------------------------------------------------------------------------------- writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__}")
        if self._is_closing or not data:
            return
        if self.has_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        self._network.push(self.peer, bytes(data))
        if not self._is_write_paused and self.get_write_buffer_size() > self._high:
            self._is_write_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self.has_eof and not self._is_closing:
            self.has_eof = True
            self._network.push(self.peer, _EOF)

    def get_write_buffer_size(self) -> int:
        return max(self.peer.inbox_bytes - SOCKET_BYTES, 0)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low

    def drained(self) -> None:
        """The peer has read something."""
        if self.is_lost:
            return
        if self._is_write_paused and self.get_write_buffer_size() <= self._low:
            self._is_write_paused = False
            self._protocol.resume_writing()
        self._end_if_empty()

    # --------------------------------------------------------------------------------- ending

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """The peer gets what was written, then hears of the end."""
        if not self._is_closing:
            self.write_eof()
            self._is_closing = True
            self._end_if_empty()

    def abort(self) -> None:
        self._abort(None)

    def _abort(self, error: Exception | None) -> None:
        if not self.is_lost and not self._is_ending:
            self._network.aborted(self)
            self._end(error)

    def _end_if_empty(self) -> None:
        if self._is_closing and not self._is_ending and not self.get_write_buffer_size():
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._is_closing = self._is_ending = True
        self._loop.call_soon(self.lose, error, context=self.context)

    def deafen(self) -> None:
        self.inbox.clear()
        self.inbox_bytes = 0
        self.is_deaf = True

    def lose(self, error: Exception | None) -> None:
        """The protocol hears that it is over; once."""
        if self.is_lost:
            return
        self.end_silently()
        if self.has_begun:
            why = type(error).__name__
            self._loop.note(f"{_text(self.local)} lost {_text(self.remote)} {why}")
            self._protocol.connection_lost(error)

    def end_silently(self) -> None:
        self.is_lost = self._is_closing = self._is_ending = True
        self._network.forget(self)
        if self._server is not None:
            self._server.detach()
        if self.inbox:  # nobody reads it any more: the peer shall hear of it
            self._network.arrive_later(self, 0)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)


_SYSTEM = (LoopNetwork, SimTransport)


class SimAsyncServer(asyncio.AbstractServer):
    """What create_server gives. `wait_closed` waits for its connections, as Python 3.12 does."""

    def __init__(
        self, loop: SimLoop, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> None:
        self.address = (host, port)
        self.factory = factory
        self.process = _PROCESS.get()
        self.context = contextvars.copy_context()
        self._loop = loop
        self._is_serving = False
        self._is_closed = False
        self._open = 0
        self._closed: asyncio.Future[None] = loop.create_future()

    @property
    def sockets(self) -> tuple[Listener, ...]:
        return () if self._is_closed else (Listener(*self.address),)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def is_serving(self) -> bool:
        return self._is_serving

    async def start_serving(self) -> None:
        if not self._is_serving and not self._is_closed:
            self._loop.network.listen(self)
            self._is_serving = True

    async def serve_forever(self) -> None:
        await self.start_serving()
        try:
            await self._loop.create_future()
        finally:
            self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed, self._is_serving = True, False
            self._loop.network.unlisten(self)
            self._tell()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def attach(self) -> None:
        self._open += 1

    def detach(self) -> None:
        self._open -= 1
        self._tell()

    def _tell(self) -> None:
        if self._is_closed and not self._open and not self._closed.done():
            self._closed.set_result(None)


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _keys(near: tuple[str, int], far: tuple[str, int]) -> tuple[str, ...]:
    """What a fault may call a connection by."""
    return (near[0], _text(near), far[0], _text(far))


def _has(faults: dict[str, None], keys: tuple[str, ...]) -> bool:
    return bool(faults) and any(key in faults for key in keys)
