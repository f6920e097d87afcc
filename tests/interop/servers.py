"""The servers under test: Apache's name server with its broker, and CometMQ's `up`, one interface.

Both are told the same identity and file sizes, so that either can open what the other wrote.
"""

import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from .jvm import jvm_home, jvm_options
from .processes import Child, ProcessError
from .toolchain import Toolchain
from .versions import APACHE_SERVERS

T = TypeVar("T")

HOST = "127.0.0.1"
START_TIMEOUT_S = 180  # some ten when the machine has nothing else to do
PORT_TRIES = 3
BROKER_PORTS = (12_000, 30_000)
# Apache 5 alone waits about 15 s for its own threads; CometMQ promises 5 s.
APACHE_STOP_TIMEOUT_S = 60
COMET_STOP_TIMEOUT_S = 5

CLUSTER = "InteropCluster"
BROKER_NAME = "interop-a"
IDENTITY = {"brokerClusterName": CLUSTER, "brokerName": BROKER_NAME, "brokerIP1": HOST}

# Settings that only keep the control from refusing work on a slow, small or well filled machine.
APACHE_PATIENCE = {
    "brokerFastFailureEnable": "false",
    "diskMaxUsedSpaceRatio": "95",
    "osPageCacheBusyTimeOutMills": "60000",
}
# What CometMQ has switched on by default and RocketMQ has not.
APACHE_FEATURES = {"enablePropertyFilter": "true"}
APACHE_FLAGS = (
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
    # Making a throw-away certificate costs 3 s per listening port, and nobody here speaks TLS.
    "-Dtls.server.mode=disabled",
)


@dataclass
class Settings:
    """What a test asks of a server: where it stores, on which port, with which file sizes."""

    folder: Path
    store: Path
    port: int = 0
    sizes: Mapping[str, str] = field(default_factory=dict)


class Server(Protocol):
    """A running name server and broker."""

    name: str
    namesrv: str
    broker: str
    store: Path
    logs: list[Path]

    def stop(self) -> None:
        """Shut down cleanly; the store is complete afterwards."""

    def kill(self) -> None:
        """kill -9: no goodbye, no flush."""


class ApacheServer:
    """One Apache name server and one broker, each in a JVM."""

    def __init__(self, name: str, toolchain: Toolchain, settings: Settings) -> None:
        self.name, self.store = name, settings.store
        port = settings.port or free_broker_port()
        self.namesrv, self.broker = f"{HOST}:{free_port()}", f"{HOST}:{port}"
        home = jvm_home(settings.folder / f"{name}-home", "INFO")
        self.logs = [settings.folder / f"{name}-{part}.log" for part in ("broker", "namesrv")]
        java = [toolchain.java, *APACHE_FLAGS]
        java += jvm_options(home, toolchain.server_classpath(name))
        environment = {"ROCKETMQ_HOME": str(home)}

        namesrv_conf = write_conf(
            settings.folder / f"{name}-namesrv.conf",
            {"listenPort": self.namesrv.split(":")[1], "bindAddress": HOST},
        )
        broker_conf = write_conf(
            settings.folder / f"{name}-broker.conf",
            {
                **IDENTITY,
                **settings.sizes,
                **APACHE_PATIENCE,
                **APACHE_FEATURES,
                "listenPort": str(port),
                "bindAddress": HOST,
                "brokerIP2": HOST,
                "namesrvAddr": self.namesrv,
                "storePathRootDir": str(settings.store),
                "storePathCommitLog": str(settings.store / "commitlog"),
            },
        )
        namesrv = [*java, "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", str(namesrv_conf)]
        broker = [*java, "org.apache.rocketmq.broker.BrokerStartup", "-c", str(broker_conf)]
        self._namesrv = Child(namesrv, self.logs[1], environment)
        self._namesrv.await_line(_says("boot success"), START_TIMEOUT_S)
        self._broker = Child(broker, self.logs[0], environment)
        self._broker.await_line(_says("boot success"), START_TIMEOUT_S)
        # On a busy machine the first registration may fail; it is tried again within 30 s.
        self._namesrv.await_line(_says("new broker registered"), START_TIMEOUT_S)

    def stop(self) -> None:
        self._broker.terminate(APACHE_STOP_TIMEOUT_S)
        self._namesrv.kill()

    def kill(self) -> None:
        self._broker.kill()
        self._namesrv.kill()


class CometServer:
    """CometMQ's name server and broker in one process."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.store = name, settings.store
        self.logs = [settings.folder / f"{name}.log"]
        conf = write_conf(settings.folder / f"{name}.conf", {**IDENTITY, **settings.sizes})
        command = [os.environ.get("COMETMQ_PYTHON", sys.executable), "-m", "cometmq", "up"]
        command += ["--host", HOST, "--namesrv-port", "0", "--broker-port", str(settings.port)]
        command += ["--store", str(settings.store), "--broker-conf", str(conf)]
        self._process = Child(command, self.logs[0])
        line = self._process.await_line(lambda text: text.startswith("ready "), START_TIMEOUT_S)
        addresses = dict(part.split("=", 1) for part in line.split()[1:])
        self.namesrv, self.broker = addresses["namesrv"], addresses["broker"]

    def stop(self) -> None:
        status = self._process.terminate(COMET_STOP_TIMEOUT_S)
        if status != 0:
            raise ProcessError(f"CometMQ ended with status {status} on SIGTERM")

    def kill(self) -> None:
        self._process.kill()


def start(name: str, toolchain: Toolchain, settings: Settings) -> Server:
    """Start the server called `name` and return when it serves."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    if name == "comet":
        return CometServer(name, settings)
    for _ in range(PORT_TRIES - 1):
        try:
            return ApacheServer(name, toolchain, settings)
        except ProcessError as error:
            if settings.port or "Address already in use" not in str(error):
                raise  # else somebody else was faster with one of the ports that were free
    return ApacheServer(name, toolchain, settings)


class Launcher:
    """Starts servers one after the other for one test, and leaves none running."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._toolchain = toolchain
        self._servers: list[Server] = []

    @property
    def logs(self) -> list[Path]:
        """The logs of the server started last."""
        return self._servers[-1].logs if self._servers else []

    def start(self, name: str, settings: Settings) -> Server:
        """Start one more server."""
        server = start(name, self._toolchain, settings)
        self._servers.append(server)
        return server

    def kill_all(self) -> None:
        """Stop what the test left running."""
        for server in self._servers:
            server.kill()


def selected_servers() -> set[str]:
    """The servers this run may start: all, or those in COMETMQ_INTEROP_SERVERS."""
    known = {"comet", *APACHE_SERVERS}
    wanted = os.environ.get("COMETMQ_INTEROP_SERVERS")
    chosen = {name.strip() for name in wanted.split(",")} if wanted else known
    if not chosen <= known:
        raise ValueError(f"COMETMQ_INTEROP_SERVERS: choose from {', '.join(sorted(known))}")
    return chosen


@dataclass(frozen=True)
class Chain:
    """Who owns a store directory in turn, and how each but the last is stopped."""

    owners: tuple[str, ...]
    is_killed: bool = False

    def __str__(self) -> str:
        return ("-killed-" if self.is_killed else "-then-").join(self.owners)


def selected_chains(chains: Sequence[T]) -> Sequence[T]:
    """Which chains of servers a run plays: all, or with COMETMQ_INTEROP_CHAINS=n so many of them,
    spread over the list. A chain takes up to a minute."""
    most = int(os.environ.get("COMETMQ_INTEROP_CHAINS", "0")) or len(chains)
    step = -(-len(chains) // most)
    return chains[::step]


def write_conf(path: Path, settings: Mapping[str, str]) -> Path:
    """A file in broker.conf syntax."""
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return path


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def free_broker_port() -> int:
    """A port whose neighbours are free too: a broker also takes port - 2 and port + 1. Below those
    that the system gives to whoever connects somewhere."""
    while True:
        port = random.randrange(*BROKER_PORTS)
        if all(_is_free(near) for near in (port - 2, port, port + 1)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _says(text: str) -> Callable[[str], bool]:
    return lambda line: text in line
