"""SimLoop: ordinary asyncio code in virtual time, on a network in memory, under one seed.

Owns: the virtual clock and the trace of what the programs on the loop did; their connections are
`loop_network.py`'s. One rule: the seed decides everything. No thread, socket or real clock; sets
of tasks have one order whatever the process; nothing waits: where nothing is due, the clock jumps
ahead.

    trace = simulate(7, main)       # main(loop) is a coroutine function; same seed, same trace
    loop.network.cut("10.0.1.1")    # faults name a host or host:port, at either end of a connection
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
import math
import random
import socket
from collections.abc import Callable, Coroutine
from ipaddress import ip_address
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack, cast

import msgspec

from cometmq.testing.loop_network import US, Listener, LoopNetwork, running_process

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DAY_S = 86_400.0
LONGEST_S = 2.0**22  # 48 days: past that a float of seconds is coarser than asyncio's nanosecond
MOST_TURNS = 20_000_000
MOST_TURNS_AT_ONCE = 100_000  # turns of the loop in which no time passes: something spins
COLLECT_TURNS = 100_000  # garbage goes at set turns: what __del__ does is part of the run
EXECUTOR_US = 2_000  # what is run in an executor takes up to this long


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
        self.process = running_process(context)
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
