"""Fixtures of the interop suite: the toolchain, a server per (server, client) pair, a driver on it.

`COMETMQ_INTEROP_SERVERS` restricts which servers are run; without java, mvn or the jars every test
is skipped with the one reason found. `COMETMQ_INTEROP_SECONDS` bounds a run: another file is the
first one every day, and what is left when the time is over is skipped by name.
"""

import math
import os
import time
from collections.abc import Generator, Iterator

import pytest

from .driver import Driver
from .processes import kill_all, tail
from .servers import Launcher, Server, Settings, selected_servers, start
from .toolchain import Toolchain, Unavailable, prepare
from .versions import APACHE_SERVERS, PAIRS

SIZES = {
    "mappedFileSizeCommitLog": str(64 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 5000),
    "maxHashSlotNum": "10000",
    "maxIndexNum": "40000",
}

# Producers are asked soon about open transactions, and traces have a topic.
KINDS = {
    "transactionTimeOut": "1000",
    "transactionCheckInterval": "1000",
    "transactionOpBatchInterval": "100",
    "traceTopicEnable": "true",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `pair`, directly or not, runs once per selected (server, client) pair."""
    if "pair" in metafunc.fixturenames:
        pairs = [pair for pair in PAIRS if pair[0] in selected_servers()]
        metafunc.parametrize("pair", pairs, ids="+".join, indirect=True, scope="session")


MOST_SECONDS = float(os.environ.get("COMETMQ_INTEROP_SECONDS", "inf"))
_began_s = time.monotonic()


@pytest.hookimpl(trylast=True)  # when others have been deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a bound on the time, all files get their turn over some days."""
    if math.isinf(MOST_SECONDS) or not all("interop" in one.keywords for one in items):
        return
    files = list(dict.fromkeys(one.path for one in items))
    first = int(time.time() // 86_400) % max(len(files), 1)
    turn = {path: (number - first) % len(files) for number, path in enumerate(files)}
    items.sort(key=lambda one: turn[one.path])  # stable: fixtures keep their order within a file


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _began_s > MOST_SECONDS:
        pytest.skip(f"interop: {MOST_SECONDS:.0f} s are over (COMETMQ_INTEROP_SECONDS)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the server's logs with a failure."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            for log in getattr(value, "logs", []):
                report.sections.append((f"end of {log.name}", tail(log)))
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    kill_all()


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    try:
        return prepare()
    except Unavailable as reason:
        pytest.skip(f"interop: {reason}")


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="session")
def server(
    pair: tuple[str, str], toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("+".join(pair))
    running = start(pair[0], toolchain, Settings(folder, folder / "store", sizes=SIZES | KINDS))
    yield running
    if pair[0] == "comet":
        running.stop()  # must end well after all this; the control's store is thrown away
    running.kill()


@pytest.fixture(scope="module", params=["comet", *APACHE_SERVERS])
def any_server(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """For clients that are no Java: each server once."""
    kind: str = request.param
    if kind not in selected_servers():
        pytest.skip(f"interop: {kind} is not selected")
    folder = tmp_path_factory.mktemp(kind)
    running = start(kind, toolchain, Settings(folder, folder / "store", sizes=SIZES | KINDS))
    yield running
    running.kill()


@pytest.fixture(scope="session")
def driver(
    pair: tuple[str, str],
    server: Server,
    toolchain: Toolchain,
    tmp_path_factory: pytest.TempPathFactory,
) -> Driver:
    return Driver(pair[1], server, toolchain, tmp_path_factory.mktemp("driver"))


@pytest.fixture
def launcher(toolchain: Toolchain) -> Iterator[Launcher]:
    launched = Launcher(toolchain)
    yield launched
    launched.kill_all()
