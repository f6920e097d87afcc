"""Assembles programs: settings -> files -> store -> core -> driver. The only place that does.

Owns: sockets, signals, the ready line, and the order of start and stop. One rule: everything that
can be wrong with settings, ports or the store is found before the ready line is printed, and said
in one sentence that names the way out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq import _fast
from cometmq.broker.broker import Broker, Identity, store_config
from cometmq.config import BrokerConfig, NameServerConfig
from cometmq.errors import CometError, ConfigError
from cometmq.nameserver.nameserver import NameServer
from cometmq.net.clock import Clock
from cometmq.net.driver import Driver, Limits
from cometmq.ports import Core, Files
from cometmq.store.files import RealFiles
from cometmq.store.store import Store
from cometmq.wire.bodies import GroupConfig, TopicConfig

if TYPE_CHECKING:
    from cometmq._fast.hot import Hot

log = logging.getLogger("cometmq.run")

VIP_DISTANCE = 2  # clients up to 4.4 send to the broker's port minus two
REACH_TIMEOUT_S = 2.0
REGISTER_WAIT_S = 5.0
KV_FILE = "kvConfig.json"


class Listening(msgspec.Struct):
    """The sockets of one server; the VIP one may be missing."""

    main: socket.socket
    vip: socket.socket | None = None

    @property
    def port(self) -> int:
        return int(self.main.getsockname()[1])

    def close(self) -> None:
        self.main.close()
        if self.vip is not None:
            self.vip.close()


Around = Callable[[Core], Core]
"""What a test may put between a core and its driver."""


def _nothing_around(core: Core) -> Core:
    return core


# ------------------------------------------------------------------------------------- addresses


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = "something else listens there; stop it, or choose another port"
        else:
            why = error.strerror or str(error)
        raise ConfigError(
            f"can't listen on {host}:{port}: {why} ({flag}; 0 picks a free port)"
        ) from None
    return listener


def _bind_broker(host: str, port: int, *, has_vip: bool) -> Listening:
    """The broker's port and, if it is wanted and free, the VIP port below it."""
    if not has_vip:
        return Listening(_bind(host, port, "listenPort"))
    for attempt in range(20):
        main = _bind(host, port, "listenPort or --broker-port")
        actual = int(main.getsockname()[1])
        try:
            return Listening(main, _bind(host, actual - VIP_DISTANCE, "VIP port"))
        except (ConfigError, OverflowError) as error:
            if port != 0 or attempt == 19:
                log.warning("no VIP port: %s. Only clients up to 4.4 need it", error)
                return Listening(main)
            main.close()
    raise AssertionError("unreachable")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_ip(host) and ip_address(host).is_loopback)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _advertised(config: BrokerConfig) -> str:
    """The address told to clients: brokerIP1, else the one listened on, else this host's own."""
    host = config.advertised_host or config.bind_host
    if _is_ip(host) and ip_address(host).is_unspecified:
        try:
            addresses = socket.gethostbyname_ex(socket.gethostname())[2]
        except OSError:
            addresses = []
        outside = [one for one in addresses if not ip_address(one).is_loopback]
        return (outside or addresses or ["127.0.0.1"])[0]
    if _is_ip(host):
        return host
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            f"brokerIP1={host!r} can't be resolved ({error}); set it to an address of this host "
            "that clients can reach"
        ) from None


def _warn_if_open(host: str, what: str) -> None:
    if not _is_loopback(host):
        log.warning(
            "%s listens on %s without access control: whoever can reach that address can read, "
            "write and delete everything. Listen on 127.0.0.1 or put a firewall in front",
            what,
            host,
        )


async def _warn_if_unreachable(address: str) -> None:
    """An advertised address that this host itself can't reach is nearly always a mistake."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except (OSError, TimeoutError) as error:
        log.warning(
            "the advertised address %s can't be reached from this host (%s): clients will get it "
            "from the name server and fail. Set brokerIP1 in the broker's configuration to an "
            "address that clients can reach",
            address,
            str(error) or type(error).__name__,
        )


# ------------------------------------------------------------------------------------- assembling


def _limits(config: BrokerConfig | NameServerConfig) -> Limits:
    return Limits(
        max_connections=config.max_connections,
        max_frame_bytes=config.max_frame_bytes,
        max_queued_frames=config.max_queued_frames,
        max_outbox_bytes=config.max_outbox_bytes,
        idle_timeout_ms=config.idle_timeout_ms,
        frame_timeout_ms=config.frame_timeout_ms,
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _compiled_path(config: BrokerConfig) -> Hot | None:
    """The compiled path if it is there and wanted; the log says which path runs, and why."""
    module, why_not = _fast.load()
    if not config.is_compiled_path_enabled:
        why_not = "compiledPathEnable=false"
    if module is None or why_not:
        log.info("path=plain reason=%s", why_not)
        return None
    log.info("path=compiled")
    return module.Hot()  # type: ignore[no-any-return]


class RunningNameServer:
    """A name server on its socket; `files` where not on the disk that the settings name."""

    def __init__(
        self,
        config: NameServerConfig,
        clock: Clock,
        files: Files | None = None,
        around: Around = _nothing_around,
    ) -> None:
        folder, name = os.path.split(config.kv_path) if config.kv_path else ("", KV_FILE)
        if name != KV_FILE:
            raise ConfigError(f"kvConfigPath must end with {KV_FILE}, got {config.kv_path!r}")
        self.listening = Listening(
            _bind(config.bind_host, config.listen_port, "listenPort or --namesrv-port")
        )
        self.address = _text(config.bind_host, self.listening.port)
        try:
            if files is None:
                files = RealFiles(Path(folder or default_folder("namesrv")))
            self.core = NameServer(config, files.read(KV_FILE))
            self.driver = Driver(around(self.core), _limits(config), files, clock)
        except BaseException:
            self.listening.close()
            raise

    async def start(self) -> None:
        await self.driver.listen(self.listening.main)
        self.driver.start()


class RunningBroker:
    """A broker on its sockets, with its store open; `files` where not on the settings' disk."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        copied: tuple[list[TopicConfig], list[GroupConfig]] = ([], []),
        files: Files | None = None,
        around: Around = _nothing_around,
        has_vip: bool = True,
    ) -> None:
        self.listening = _bind_broker(config.bind_host, config.listen_port, has_vip=has_vip)
        config = msgspec.structs.replace(config, listen_port=self.listening.port)
        try:
            self._assemble(config, clock, copied, files or RealFiles(config.store_path), around)
        except BaseException:
            self.listening.close()
            raise

    def _assemble(
        self,
        config: BrokerConfig,
        clock: Clock,
        copied: tuple[list[TopicConfig], list[GroupConfig]],
        files: Files,
        around: Around,
    ) -> None:
        host, port = _advertised(config), config.listen_port
        self.address = _text(host, port)
        in_memory = _memory_bytes() * config.in_memory_ratio_percent // 100
        hot = _compiled_path(config)
        self.path = "plain" if hot is None else "compiled"
        store = Store.open(files, store_config(config, in_memory), clock(), str(os.getpid()), hot)
        try:
            node = int.from_bytes(os.urandom(4), "big")
            identity = Identity(host, port, os.getpid(), node)
            self.core = Broker(config, identity, store, clock())
            self.core.adopt(*copied, clock())
            self.driver = Driver(around(self.core), _limits(config), files, clock)
            self.core.net_figures = self.driver.figures
        except BaseException:
            store.close(clock())
            raise

    async def start(self) -> None:
        await self.driver.listen(self.listening.main)
        if self.listening.vip is not None:
            await self.driver.listen(self.listening.vip)
        self.driver.start()

    async def registered(self) -> None:
        """Wait until the name servers know us, or until it is clear that some don't answer."""
        give_up = asyncio.get_running_loop().time() + REGISTER_WAIT_S
        while not self.core.name_servers.has_tried:
            if asyncio.get_running_loop().time() > give_up:
                return
            await asyncio.sleep(0.001)


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_folder(name: str) -> str:
    """Where a program keeps its files unless told otherwise."""
    return str(Path.home() / ".cometmq" / name)


# --------------------------------------------------------------------------------------- programs


async def up(namesrv: NameServerConfig, broker: BrokerConfig) -> None:
    """Name server and broker in one process."""
    stopped = _stop_event()
    clock = Clock()
    _warn_if_open(broker.bind_host, "the server")
    name_server = RunningNameServer(namesrv, clock)
    await name_server.start()
    try:
        running = RunningBroker(msgspec.structs.replace(broker, namesrv=name_server.address), clock)
        try:
            await running.start()
            await running.registered()
            _ready(
                namesrv=name_server.address,
                broker=running.address,
                store=broker.store_path,
                path=running.path,
            )
            check = asyncio.create_task(_warn_if_unreachable(running.address))
            await stopped.wait()
            check.cancel()
        finally:
            await running.driver.stop()
    finally:
        await name_server.driver.stop(500)


async def name_server_alone(config: NameServerConfig) -> None:
    """`cometmq namesrv`."""
    stopped = _stop_event()
    _warn_if_open(config.bind_host, "the name server")
    running = RunningNameServer(config, Clock())
    try:
        await running.start()
        _ready(namesrv=running.address)
        await stopped.wait()
    finally:
        await running.driver.stop(2_000)


async def broker_alone(
    config: BrokerConfig, copied: tuple[list[TopicConfig], list[GroupConfig]]
) -> None:
    """`cometmq broker`."""
    stopped = _stop_event()
    _warn_if_open(config.bind_host, "the broker")
    running = RunningBroker(config, Clock(), copied)
    try:
        await running.start()
        await running.registered()
        _ready(
            broker=running.address,
            store=config.store_path,
            namesrv=config.namesrv or "none",
            path=running.path,
        )
        check = asyncio.create_task(_warn_if_unreachable(running.address))
        await stopped.wait()
        check.cancel()
    finally:
        await running.driver.stop()


def _ready(**places: str) -> None:
    print("ready " + " ".join(f"{key}={value}" for key, value in places.items()), flush=True)


def _stop_event() -> asyncio.Event:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def run(program: Coroutine[Any, Any, None]) -> int:
    """Run a program until a signal; exit code 0, or 1 with one line that says why not."""
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(program)
    except CometError as error:
        print(f"cometmq: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cometmq: {error.strerror}: {error.filename or ''}", file=sys.stderr)
        return 1
    return 0
