"""SimServer: a real core, run by the real net.driver, on a SimLoop.

Owns: the life of one server: start, kill -9, start again on the same files. One rule: everything
between a client's bytes and the core is the product's own code (Driver and its connections); only
what lies below it is simulated: transports, time, files, and the two threads that sync.

The driver makes real threads when it is built. They are ended before they had anything to do, and
workers that run the same jobs at virtual moments take their places.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable
from socket import socket
from typing import cast

import msgspec

from cometmq.broker.broker import Broker, Identity, store_config
from cometmq.config import BrokerConfig, NameServerConfig
from cometmq.nameserver.nameserver import NameServer
from cometmq.net.clock import Clock
from cometmq.net.driver import Driver, Limits
from cometmq.net.worker import Done, Job, Worker
from cometmq.ports import NEVER_MS, ConnId, Core, Out, Peer
from cometmq.store.store import Store
from cometmq.testing.cluster import _compiled_path
from cometmq.testing.disk import ProcessEnded, SimulatedFiles
from cometmq.testing.loop import SimLoop
from cometmq.testing.loop_network import US, Listener, Process
from cometmq.testing.node import DiskPace, SimulatedClock
from cometmq.wire.frame import Frame

MakeCore = Callable[["SimServer"], Core]
IN_MEMORY_BYTES = 1 << 30  # of a store's newest bytes, these count as cheap to read


class SimServer:
    """A server at `address`; `make_core` opens whatever it needs and returns the core it runs."""

    def __init__(
        self, loop: SimLoop, make_core: MakeCore, address: str, limits: Limits | None = None
    ) -> None:
        self.loop = loop
        self.address = address
        self.boot = 0
        self.clock = SimulatedClock()
        self.pace = DiskPace()
        self.files = SimulatedFiles(loop.rng(f"disk:{address}"), lambda: self.now_ms)
        self.core: Core | None = None
        self.driver: Driver | None = None
        self.failure: str | None = None
        """Why it is down, if a sync ended it."""
        self._make_core = make_core
        self._limits = limits or limits_of(BrokerConfig())
        self._rng = loop.rng(f"process:{address}")
        self._process: Process | None = None
        self._workers: list[SimWorker] = []

    @property
    def now_ms(self) -> int:
        return self.clock.read_ms(self.loop.now_us)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    async def start(self) -> None:
        """Begin a new boot; raises what the core raises when it can't start."""
        assert self.core is None, f"{self.address} is up"
        self.boot += 1
        self.failure = None
        self.clock.restart()
        self._process = self.loop.network.process(self.place[0])
        try:
            await self._process.spawn(self._begin())
        except BaseException:
            if self.core is None:  # else only whoever waited for it was cancelled
                self.files.kill()
            raise

    async def _begin(self) -> None:
        core = self._make_core(self)
        driver = Driver(core, self._limits, self.files, cast(Clock, lambda: self.now_ms))
        for thread in (driver._log_worker, driver._state_worker):
            thread.close()
        log_worker, state_worker = (SimWorker(self.loop, self._rng, self) for _ in range(2))
        self._workers = [log_worker, state_worker]
        driver._log_worker = cast(Worker, log_worker)
        driver._state_worker = cast(Worker, state_worker)
        if isinstance(core, Broker):
            core.net_figures = driver.figures
        self.core, self.driver = core, driver
        try:
            await driver.listen(cast(socket, Listener(*self.place)))
        except OSError:
            self.crash()
            raise
        driver.start()
        self.loop.note(f"{self.address} started, boot {self.boot}")

    def crash(self) -> None:
        """kill -9: connections are reset, jobs of its threads stop where they are, and the files
        are what the system holds. Power loss: call files.lose_power right after."""
        driver, process = self.driver, self._process
        assert driver is not None and process is not None, f"{self.address} is down"
        self.loop.note(f"{self.address} crashes")
        driver.core = _Gone()
        self.core = self.driver = None
        process.kill()
        for worker in self._workers:
            worker.die()
        self.files.kill()
        # Ends the timers and dials that it left on the loop; no core hears of it. Outside of the
        # killed process, in which nothing runs to its end.
        self.loop.create_task(driver.stop(0), context=contextvars.Context())

    async def restart(self) -> None:
        """Crash, if it is up, and start on the same files."""
        if self.driver is not None:
            self.crash()
        await self.start()

    async def stop(self) -> None:
        """An orderly end, as a signal causes it."""
        driver = self.driver
        assert driver is not None, f"{self.address} is down"
        await driver.stop()
        self.core = self.driver = None
        self.loop.note(f"{self.address} stopped")


def sim_name_server(
    loop: SimLoop, address: str, config: NameServerConfig | None = None
) -> SimServer:
    """A name server; start it yourself."""
    settings = config or NameServerConfig()

    def make(server: SimServer) -> Core:
        return NameServer(settings, server.files.read("kvConfig.json"))

    return SimServer(loop, make, address, limits_of(settings))


def sim_broker(loop: SimLoop, address: str, config: BrokerConfig) -> SimServer:
    """A broker with its store; give it small files (log_file_bytes and so on), they are memory."""

    def make(server: SimServer) -> Core:
        hot = _compiled_path() if config.is_compiled_path_enabled else None
        now_ms = server.now_ms
        settings = store_config(config, IN_MEMORY_BYTES)
        store = Store.open(server.files, settings, now_ms, hot=hot)
        return Broker(config, Identity(*server.place, 1, server.boot), store, now_ms)

    return SimServer(loop, make, address, limits_of(config))


def limits_of(config: BrokerConfig | NameServerConfig) -> Limits:
    """What run.py makes of the settings."""
    return msgspec.convert(config, Limits, from_attributes=True)


class SimWorker:
    """net.worker.Worker without its thread: a job runs at a moment after it was submitted, when
    the one before has ended, and the loop hears of it a little later."""

    def __init__(self, loop: SimLoop, rng: random.Random, server: SimServer) -> None:
        self._loop = loop
        self._rng = rng
        self._server = server
        self._free_us = 0
        self._left: dict[int, _Work] = {}
        self._next = 0

    def submit(self, job: Job, done: Done) -> None:
        pace, rng = self._server.pace, self._rng
        duration_us = pace.least_us + rng.randrange(2 * pace.mean_us)
        if pace.slow_percent and rng.randrange(100) < pace.slow_percent:
            duration_us += rng.randrange(pace.slow_us)
        begin_us = max(self._loop.now_us, self._free_us)
        self._free_us = begin_us + duration_us
        self._next += 1
        self._left[self._next] = _Work(job, done)
        self._loop.call_at((begin_us + rng.randrange(duration_us)) / US, self._run, self._next)
        self._loop.call_at(self._free_us / US, self._tell, self._next)

    def close(self) -> None:
        """Finish what was submitted, now."""
        for number in list(self._left):
            self._run(number)
            self._loop.call_soon(self._tell, number)

    def die(self) -> None:
        """The process is gone: nothing runs and nobody is told."""
        self._left.clear()

    def _run(self, number: int) -> None:
        work = self._left.get(number)
        if work is None or work.has_run:
            return
        work.has_run = True
        try:
            work.job()
        except ProcessEnded:
            self._server.crash()
            self._server.failure = "the process ended at a sync"
        except Exception as error:
            work.reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, OSError):
                raise  # a bug: simulate() tells

    def _tell(self, number: int) -> None:
        work = self._left.pop(number, None)
        if work is not None:
            work.done(work.reason)


class _Work(msgspec.Struct):
    job: Job
    done: Done
    has_run: bool = False
    reason: str | None = None


class _Gone:
    """What a driver holds whose process was killed: a core that neither hears nor says anything."""

    deadline_ms = NEVER_MS
    is_stopped = True

    def opened(self, conn: ConnId, peer: Peer, now_ms: int, out: Out) -> None: ...
    def handle(self, conn: ConnId, frame: Frame, waited_ms: int, now_ms: int, out: Out) -> None: ...
    def receive(self, conn: ConnId, data: bytes, now_ms: int, out: Out) -> tuple[int, int]:
        return len(data), 0

    def settle(self, now_ms: int, out: Out) -> None: ...
    def closed(self, conn: ConnId, now_ms: int, out: Out) -> None: ...
    def dial_failed(self, address: str, reason: str, now_ms: int, out: Out) -> None: ...
    def flushed(self, kind: str, now_ms: int, out: Out) -> None: ...
    def flush_failed(self, kind: str, reason: str, now_ms: int, out: Out) -> None: ...
    def saved(self, name: str, reason: str | None, now_ms: int, out: Out) -> None: ...
    def stalled(self, duration_ms: int, now_ms: int, out: Out) -> None: ...
    def tick(self, now_ms: int, out: Out) -> None: ...
    def stop(self, now_ms: int, out: Out) -> None: ...
    def close(self, now_ms: int) -> None: ...
