"""SimLoop: ordinary asyncio code in virtual time, on a network in memory, under one seed.

Owns: the virtual clock, the connections between programs on the loop, and the trace of what they
did. One rule: the seed decides everything. No thread, no socket, no real clock; sets of tasks have
one order whatever the process; nothing waits: where nothing is due, the clock jumps ahead.

    trace = simulate(7, main)       # main(loop) is a coroutine function; same seed, same trace
    loop.network.cut("10.0.1.1")    # faults name a host or host:port, at either end of a connection

What a connection does is TCP's promise and no more: a prefix of what was written, in order, in
pieces of any size. `Process` gives programs a host of their own and an end without a goodbye.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import gc
import hashlib
import math
import random
import socket
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from ipaddress import ip_address
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack, cast

import msgspec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

US = 1_000_000  # microseconds in a second; the clock counts them, asyncio sees seconds
DAY_S = 86_400.0
LONGEST_S = 2.0**22  # 48 days: past that a float of seconds is coarser than asyncio's nanosecond
MOST_TURNS = 20_000_000
MOST_TURNS_AT_ONCE = 100_000  # turns of the loop in which no time passes: something spins
COLLECT_TURNS = 100_000  # garbage goes at set turns: what __del__ does is part of the run
SOCKET_BYTES = 64 * 1024  # what a system takes off a transport's hands before the peer reads it
CHUNK_BYTES = 256 * 1024  # asyncio reads no more at once
HIGH_BYTES = 64 * 1024  # asyncio's own default
SYN_WAITS_S = (1, 2, 4, 8, 16, 32, 64)  # as Linux: a connect nobody answers fails after 127 s
FIRST_PORT = 40_001
MOST_CANCELS = 100  # of what a killed process has left
EXECUTOR_US = 2_000  # what is run in an executor takes up to this long

_EOF = b""  # in an inbox: the stream ends
_RST = None  # in an inbox: the connection breaks once what stands before it was read


class SimulationError(Exception):
    """The run can't go on, or something broke in it that nobody looked at."""


class Trace(msgspec.Struct, frozen=True):
    """What a run came to. Equal seeds give equal traces."""

    seed: int
    time_s: float
    events: int
    hash: str


def simulate(
    seed: int,
    main: Callable[[SimLoop], Coroutine[Any, Any, object]],
    *,
    longest_s: float = DAY_S,
    most_turns: int = MOST_TURNS,
    tell: Callable[[str], None] | None = None,
) -> Trace:
    """Run main to its end on a loop of its own, cancel what it left, and tell what happened.

    Raises what main raises; SimulationError for a deadlock, a spin, too much virtual time (where a
    server ticks, a wait for ever ends there), and for exceptions in callbacks and tasks that nobody
    saw.
    """
    loop = SimLoop(seed, longest_s=longest_s, most_turns=most_turns, tell=tell)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        try:
            loop.run_until_complete(main(loop))
            trace = loop.trace
        finally:
            loop.end()
    finally:
        loop.close()
        if was_collecting:
            gc.enable()
    if loop.unhandled:
        raise SimulationError("nobody looked at: " + "; ".join(loop.unhandled))
    return trace


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time is virtual and whose network is `network`.

    `run_in_executor` runs the function inline, at a later virtual moment: no thread is made, and
    the executor that is given is not used. Signals, TLS, datagrams, pipes and subprocesses are not
    there. `tell` is called with a line for everything that enters the trace.
    """

    def __init__(
        self,
        seed: int,
        *,
        longest_s: float = DAY_S,
        most_turns: int = MOST_TURNS,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        assert 0 < longest_s <= LONGEST_S, longest_s
        super().__init__()
        self.seed = seed
        self.now_us = 0
        self.unhandled: list[str] = []
        self._number = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._most_tasks = 64
        self._tell = tell
        self._events = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._executor_rng = self.rng("executor")
        self._clock_resolution = 1e-9
        self._selector = _Clockwork(self, int(longest_s * US), most_turns)
        self.set_task_factory(cast(Any, _new_task))
        self.network = LoopNetwork(self, self.rng("loop network"))

    def rng(self, concern: str) -> random.Random:
        """A source of chance of its own: one more draw in it does not shift the others."""
        return random.Random(f"{self.seed}:{concern}")

    @property
    def trace(self) -> Trace:
        return Trace(self.seed, self.time(), self._events, self._hash.hexdigest())

    def note(self, what: str) -> None:
        """Something that the trace should tell."""
        self._events += 1
        self._hash.update(f"{self.now_us} {what}\n".encode())
        if self._tell is not None:
            self._tell(f"{self.now_us / US:14.6f}  {what}")

    def number(self) -> int:
        self._number += 1
        return self._number

    def pending(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, the oldest first."""
        return [task for task in self._tasks if not task.done()]

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Tasks live until they are done: the garbage collector has no say in a run."""
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = self.pending()
            self._most_tasks = 2 * len(self._tasks) + 64

    def end(self) -> None:
        """Cancel what is left, oldest first, and end all connections."""
        left = self.pending()
        for task in left:
            task.cancel()
        self._selector.begin_end()
        try:
            if left:
                ends = self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
                self.unhandled += [f"{end!r} at the end" for end in ends if _is_bug(end)]
            self.run_until_complete(self.shutdown_asyncgens())
        except SimulationError as error:
            self.unhandled.append(f"after main had ended: {error}")
        self.network.vanish()
        self._tasks.clear()
        gc.collect(0)  # tasks whose exception nobody asked for say so now

    # ----------------------------------------------------------------------- asyncio's own surface

    def time(self) -> float:
        return self.now_us / US

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self)

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self.is_running() and asyncio._get_running_loop() is not self:
            raise SimulationError("a SimLoop has one thread: nothing comes from another one")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._executor_rng.randrange(EXECUTOR_US) / US, run)
        return future

    async def getaddrinfo(  # type: ignore[override]
        self,
        host: str | None,
        port: int | str | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        """Literal addresses and localhost; there are no other names."""
        found = _resolve(host)
        version = socket.AF_INET6 if ":" in found else socket.AF_INET
        return [(version, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (found, int(port or 0)))]

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: object = None,
        local_addr: tuple[str, int] | None = None,
        **ignored: object,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if ssl or sock or port is None:
            raise NotImplementedError("a SimLoop connects to a host and port, without TLS")
        return await self.network.connect(protocol_factory, _resolve(host), int(port), local_addr)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: Listener | None = None,
        start_serving: bool = True,
        **ignored: object,
    ) -> asyncio.AbstractServer:
        if ssl:
            raise NotImplementedError("a SimLoop has no TLS")
        if sock is not None:
            host, port = sock.getsockname()[:2]
        elif host in (None, ""):
            host = "0.0.0.0"
        server = self.network.bind(protocol_factory, _resolve(host), int(port or 0))
        if start_serving:
            await server.start_serving()
        return server

    async def create_datagram_endpoint(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("a SimLoop has no datagrams")

    async def getnameinfo(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("a SimLoop has no names")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """simulate() raises these when main has ended."""
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # the streams of Python 3.11 ask cancelled tasks for their exception
        said = context.get("message") or "unhandled"
        self.unhandled.append(said if error is None else f"{said}: {error!r}")

    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """There is no selector to wake."""


class _Clockwork:
    """What BaseEventLoop takes for its selector: asked to wait, it moves the clock."""

    def __init__(self, loop: SimLoop, longest_us: int, most_turns: int) -> None:
        self._loop = loop
        self._longest_us = longest_us
        self._most_turns = most_turns
        self._turns = 0
        self._turns_at_once = 0

    def begin_end(self) -> None:
        """What main left behind gets a little more of everything, to end."""
        self._most_turns = self._turns + MOST_TURNS_AT_ONCE
        self._longest_us = self._loop.now_us + 3_600 * US
        self._turns_at_once = 0

    def select(self, timeout: float | None) -> list[object]:
        self._turns += 1
        if self._turns % COLLECT_TURNS == 0:
            gc.collect()
        if timeout is None:
            raise SimulationError(f"deadlock: nothing is scheduled; pending: {self._pending()}")
        if self._turns > self._most_turns:
            raise SimulationError(
                f"more than {self._most_turns} turns of the loop; pending: {self._pending()}"
            )
        if timeout <= 0:
            self._turns_at_once += 1
            if self._turns_at_once > MOST_TURNS_AT_ONCE:
                raise SimulationError(
                    f"spin: {MOST_TURNS_AT_ONCE} turns at {self._loop.time()} s without any time "
                    f"passing; pending: {self._pending()}"
                )
            return []
        self._turns_at_once = 0
        # Up, so that no timer comes early, but for what floats add to whole microseconds.
        self._loop.now_us += max(math.ceil(timeout * US - 0.001), 1)
        if self._loop.now_us > self._longest_us:
            raise SimulationError(
                f"more than {self._longest_us / US} s of virtual time; pending: {self._pending()}"
            )
        return []

    def close(self) -> None:
        """Nothing is open."""

    def _pending(self) -> str:
        return ", ".join(_describe(task) for task in self._loop.pending()) or "no task"


def _is_bug(end: object) -> bool:
    return isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError)


def _describe(task: asyncio.Task[Any]) -> str:
    name = getattr(task.get_coro(), "__qualname__", "?")
    stack = task.get_stack(limit=1)
    if not stack:
        return f"{task.get_name()} {name}"
    file = stack[0].f_code.co_filename.rpartition("/")[2]
    return f"{task.get_name()} {name} at {file}:{stack[0].f_lineno}"


class _Task(asyncio.Task[T]):
    """A task with a number for a hash: sets of tasks have the same order in every process."""

    def __init__(self, coro: Coroutine[Any, Any, T], *, loop: SimLoop, **options: Any) -> None:
        self.number = loop.number()
        context = options.get("context")
        self.process = _PROCESS.get() if context is None else context.get(_PROCESS)
        super().__init__(coro, loop=loop, **options)
        loop.keep(self)
        if self.process is not None and not self.process.is_up:
            self.cancel()  # a timer of a killed program made it

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[T]):
    """As _Task."""

    def __init__(self, loop: SimLoop) -> None:
        self.number = loop.number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


def _new_task(loop: SimLoop, coro: Coroutine[Any, Any, T], **options: Any) -> _Task[T]:
    return _Task(coro, loop=loop, **options)


def _resolve(host: str | None) -> str:
    if host in (None, "", "localhost"):
        return "127.0.0.1"
    try:
        return str(ip_address(host))
    except ValueError:
        raise socket.gaierror(
            socket.EAI_NONAME, f"a SimLoop knows literal addresses and localhost, not {host!r}"
        ) from None


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


def running_process() -> Process | None:
    """The program whose code runs now, if it was given a process of its own."""
    return _PROCESS.get()


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
