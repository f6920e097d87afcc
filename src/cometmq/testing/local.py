"""LocalBroker: a name server and a broker inside this process, for tests of whatever uses them.

Owns: where they keep their files and ports, and the thread they run in. One rule: it is the product
itself, with small files: the same cores on the same driver and real sockets; and when it has
stopped, nothing is left: no thread, no socket, no temporary file.

    with LocalBroker() as broker:
        ...                                       # a client of broker.namesrv
        broker.fail(RequestCode.SEND_MESSAGE_V2)  # the next send is refused
        broker.restart(kill=True)                 # a crash; the same port, the same messages
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cometmq import config as table
from cometmq.broker import names
from cometmq.broker.broker import Broker
from cometmq.client.remote import Remote
from cometmq.config import MIB, BrokerConfig, NameServerConfig
from cometmq.errors import ConfigError, UsageError
from cometmq.net.clock import Clock
from cometmq.ports import Core, Files
from cometmq.run import RunningBroker, RunningNameServer
from cometmq.store.files import RealFiles
from cometmq.testing.background import Background, bind
from cometmq.testing.memory import MemoryFiles
from cometmq.testing.tampering import (
    Act,
    Fault,
    Faults,
    HoldBack,
    Refuse,
    TamperedCore,
    Weaken,
    Withhold,
)
from cometmq.wire.codes import Perm, RequestCode, ResponseCode
from cometmq.wire.headers import CreateTopicHeader, to_ext

MEMORY = "memory"
LOG_FILE_BYTES = 8 * MIB  # at least two messages of RocketMQ's default limit
TEST_SETTINGS = {
    # Small files: a test makes many stores.
    "mappedFileSizeConsumeQueue": "200000",
    "maxHashSlotNum": "10000",
    "maxIndexNum": "40000",
    "mappedFileSizeTimerLog": "1048576",
    # The broker shares its interpreter with the test: sends that wait are no sign of overload.
    "waitTimeMillsInSendQueue": "10000",
}
SPARE_BYTES = 256 * MIB
"""A test's disk counts as full with less than this free, not at 90 %: a developer's nearly full
disk must not fail the tests. In the end it must: writing to a mapped file with no room kills."""

_DISK_LIMITS = (
    "diskMaxUsedSpaceRatio",
    "diskSpaceCleanForciblyRatio",
    "diskSpaceWarningLevelRatio",
)
_OURS = {
    "namesrvAddr": "it is its own name server",
    "storePathRootDir": "say LocalBroker(store=...)",
}
_SENDS = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
)
_WEAK = (
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)
_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_NAME_SERVER_STOP_MS = 500


class LocalBroker:
    """A name server and a broker on free ports of 127.0.0.1, from `start` (or `with`) to `stop`.

    `store`: None for a temporary folder, "memory" for no disk at all, else a folder that is kept.
    `settings`: keys of RocketMQ's broker.conf; docs/config.md lists them.

    Methods may be called from any thread. Each returns when its effect is there.
    """

    def __init__(
        self,
        *,
        store: str | os.PathLike[str] | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        self._settings = dict(settings or {})
        self._config = _config(self._settings)
        self._store = store
        self._life: _Life | None = None
        self.broker_name = self._config.name
        self.namesrv = ""
        """`host:port` for clients."""
        self.broker_address = ""
        """Where the broker listens; with brokerIP1 it tells its clients another host."""
        self.store_path: Path | None = None
        """The store's folder; None if it is in memory."""

    # -------------------------------------------------------------------------------------- life

    def __enter__(self) -> LocalBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> LocalBroker:
        life = self._begin()
        with self._ending_if_it_fails():
            await life.background.wait(life.up())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._life is not None:
            try:
                await self._life.background.wait(self._life.down())
            finally:
                errors = self._end()
            _raise_first(errors)

    def start(self) -> LocalBroker:
        """Returns when both serve and the name server knows the broker."""
        life = self._begin()
        with self._ending_if_it_fails():
            life.background.run(life.up())
        return self

    def stop(self) -> None:
        """An orderly end; raises what went wrong in the background, if anything did."""
        if self._life is not None:
            try:
                self._life.background.run(self._life.down())
            finally:
                errors = self._end()
            _raise_first(errors)

    def restart(self, *, kill: bool = False) -> None:
        """Stop the broker and start it again: same port, same store; the name server goes on.

        `kill`: without a clean stop. Its files are then what a killed process leaves behind.
        """
        life = self._living()
        life.background.run(life.restart(kill))

    def _begin(self) -> _Life:
        if self._life is not None:
            raise UsageError("this LocalBroker runs already")
        is_limited = any(key in self._settings for key in _DISK_LIMITS)
        life = _Life(self._config, self._store, 0 if is_limited else SPARE_BYTES)
        self._life = life
        self.namesrv, self.broker_address = life.namesrv, life.broker_address
        self.store_path = life.store_path
        return life

    def _end(self) -> list[Exception]:
        life, self._life = self._living(), None
        return life.close()

    @contextlib.contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            try:
                self._living().background.run(self._living().down())
            finally:
                self._end()
            raise

    def _living(self) -> _Life:
        if self._life is None:
            raise UsageError("this LocalBroker does not run; use it in a `with` block")
        return self._life

    # -------------------------------------------------------------------------------------- work

    def create_topic(self, name: str, queues: int = 4) -> None:
        """Returns when the broker has it and the name server knows; it may exist already."""
        self._living()
        header = CreateTopicHeader(
            topic=name,
            readQueueNums=queues,
            writeQueueNums=queues,
            perm=Perm.READ | Perm.WRITE,
        )
        with Remote(self.broker_address) as remote:
            remote.call(RequestCode.UPDATE_AND_CREATE_TOPIC, to_ext(header))

    def fail(
        self,
        code: int,
        *,
        times: int = 1,
        after: int = 0,
        response_code: int = ResponseCode.SYSTEM_ERROR,
        remark: str | None = None,
    ) -> Fault:
        """Let `after` requests of this code pass, then refuse `times` of them unexecuted.

        A send with one of the codes that mean "stored, but not as safely as asked for"
        (FLUSH_DISK_TIMEOUT, SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT) is executed, and answered so.
        """
        if code in _SENDS and response_code in _WEAK:
            act: Act = Weaken(response_code, remark or "weakened by LocalBroker.fail")
        else:
            act = Refuse(response_code, remark or "refused by LocalBroker.fail")
        return self._add(code, act, times, after)

    def delay(self, code: int, seconds: float, *, times: int = 1, after: int = 0) -> Fault:
        """Hold the answer back so long; the request is executed at once."""
        return self._add(code, HoldBack(round(seconds * 1000)), times, after)

    def drop(self, code: int, times: int = 1, *, after: int = 0) -> Fault:
        """Execute the request and never answer it."""
        return self._add(code, Withhold(), times, after)

    def _add(self, code: int, act: Act, times: int, after: int) -> Fault:
        if times < 1 or after < 0:
            raise UsageError(f"times={times} must be at least 1 and after={after} at least 0")
        fault = Fault(code, act, after, times)
        life = self._living()
        life.change(lambda: life.faults.add(fault))
        return fault

    def clear_faults(self) -> None:
        """Forget what `fail`, `delay` and `drop` asked for and has not happened yet."""
        life = self._living()
        life.change(life.faults.clear)

    def cut_connections(self) -> None:
        """Close every client's connection, to the broker and to the name server."""
        life = self._living()
        life.change(life.cut)

    def move_clock(self, seconds: float) -> None:
        """Set the broker's clock forward; that of the name server and of this process stay."""
        if seconds < 0:
            raise UsageError(f"move_clock({seconds}): a broker's clock never runs backwards")
        life = self._living()
        life.change(lambda: life.move_clock(round(seconds * 1000)))


class _Life:
    """From one start to its stop: the thread, ports and files; `async` methods run in the thread.

    Ports stay ours by bound sockets that don't listen, so that a restart always finds them free.
    """

    def __init__(
        self, config: BrokerConfig, store: str | os.PathLike[str] | None, spare_bytes: int
    ) -> None:
        self.faults = Faults()
        self.store_path: Path | None = None
        self._clock = Clock()
        self._shift_ms = 0
        self._name_server: RunningNameServer | None = None
        self._broker: RunningBroker | None = None
        self._cores: list[TamperedCore] = []  # also those of brokers before a restart
        with contextlib.ExitStack() as undo:
            self._name_server_files: Files = MemoryFiles(Clock())
            self._broker_files: Files = MemoryFiles(Clock())
            if store != MEMORY:
                folder = (
                    os.fspath(store)
                    if store is not None
                    else undo.enter_context(tempfile.TemporaryDirectory(prefix="cometmq-"))
                )
                self.store_path = Path(folder).expanduser().resolve()
                self._broker_files = RealFiles(self.store_path, spare_bytes=spare_bytes)
                self._name_server_files = RealFiles(self.store_path / "namesrv")
            host = config.bind_host
            held = undo.enter_context(bind(host, 0))
            self._name_server_port = int(held.getsockname()[1])
            port = config.listen_port
            if not port:
                port = int(undo.enter_context(bind(host, 0)).getsockname()[1])
            self._config = msgspec.structs.replace(
                config, listen_port=port, namesrv=_text(host, self._name_server_port)
            )
            self.namesrv = self._config.namesrv
            self.broker_address = _text(host, port)
            self.background = Background("cometmq-local")
            self._undo = undo.pop_all()

    def close(self) -> list[Exception]:
        """Let go of everything; returns what went wrong meanwhile."""
        self.background.close()
        self._undo.close()
        return [*self.background.errors, *(e for core in self._cores for e in core.errors)]

    async def up(self) -> None:
        config = NameServerConfig(
            bind_host=self._config.bind_host, listen_port=self._name_server_port
        )
        self._name_server = RunningNameServer(
            config,
            self._clock,
            self._name_server_files,
            lambda core: self._tampered(core, lambda: None, 0),
        )
        await self._name_server.start()
        await self._start_broker()

    async def down(self) -> None:
        """Stop what runs, be it all, a part or nothing."""
        self.faults.clear()  # they could keep the two from saying goodbye
        broker, self._broker = self._broker, None
        name_server, self._name_server = self._name_server, None
        try:
            if broker is not None:
                await broker.driver.stop()
        finally:
            if name_server is not None:
                await name_server.driver.stop(_NAME_SERVER_STOP_MS)
                await asyncio.sleep(0)  # aborted transports close their sockets now

    async def restart(self, kill: bool) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            core = broker.driver.core
            assert isinstance(core, TamperedCore)
            core.is_killed = kill
            await broker.driver.stop()
        await self._start_broker()

    async def _start_broker(self) -> None:
        self._broker = RunningBroker(
            self._config,
            self._clock,
            files=self._broker_files,
            around=self._around_broker,
            has_vip=False,  # it might be the port that another LocalBroker keeps for its restart
        )
        await self._broker.start()
        await self._broker.registered()

    def _around_broker(self, core: Core) -> Core:
        assert isinstance(core, Broker)
        return self._tampered(core, core.store.abandon, self._shift_ms)

    def _tampered(self, core: Core, abandon: Callable[[], None], shift_ms: int) -> TamperedCore:
        tampered = TamperedCore(core, self.faults, abandon, shift_ms)
        self._cores.append(tampered)
        return tampered

    # ------------------------------------------------------------------------------------ changes

    def change(self, act: Callable[[], None]) -> None:
        """Do this in the thread, and wait until the servers have acted upon it."""

        async def change() -> None:
            act()
            for running in (self._broker, self._name_server):
                if running is not None:
                    running.driver.drain()
            while any(core.is_tick_due for core in self._running_cores()):
                await asyncio.sleep(0)

        self.background.run(change())

    def cut(self) -> None:
        for core in self._running_cores():
            core.cut()

    def move_clock(self, ms: int) -> None:
        self._shift_ms += ms
        if self._broker is not None:
            core = self._broker.driver.core
            assert isinstance(core, TamperedCore)
            core.move_clock(ms)

    def _running_cores(self) -> list[TamperedCore]:
        running = [one.driver.core for one in (self._broker, self._name_server) if one is not None]
        return [core for core in running if isinstance(core, TamperedCore)]


def _config(settings: dict[str, str]) -> BrokerConfig:
    source = "LocalBroker(settings=...)"
    for key, instead in _OURS.items():
        if key in settings:
            raise ConfigError(f"{source}: {key} can't be set: {instead}")
    start = BrokerConfig(listen_port=0, store_path=".")
    config = table.apply(start, TEST_SETTINGS | settings, source=source)
    if "mappedFileSizeCommitLog" not in settings:
        size = max(LOG_FILE_BYTES, 2 * config.max_message_bytes)
        config = msgspec.structs.replace(config, log_file_bytes=size)
    for key, value in (("brokerName", config.name), ("brokerClusterName", config.cluster)):
        problem = names.own_name_problem(value)
        if problem is not None:
            raise ConfigError(f"{source}: {key}={value!r} {problem}")
    return config


def _text(host: str, port: int) -> str:
    host = _UNSPECIFIED.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _raise_first(errors: list[Exception]) -> None:
    for error in errors:
        raise error
