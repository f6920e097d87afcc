"""The official Java client, scenario by scenario, against every server.

What a scenario checks is written in `java/src/main/java/interop`; each runs in one JVM, on topics
of its own.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import SIZES
from .driver import Driver, fail_on_stack_trace
from .servers import Launcher, Server, Settings, free_broker_port
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

SCENARIOS = (
    "sync-async-oneway",
    "batch",
    "ordered-send",
    "push-concurrent",
    "push-orderly",
    "tag-filter",
    "orderly-rebalance",
    "retries",
    "delay-levels",
    "transactions",
    "request-reply",
    "sql-push",
    "sql-pull",
    "broadcast",
    "classic-pull",
    "lite-pull",
    "rebalance",
    "lookup",
    "offsets-by-time",
    "reset-offset",
    "topics",
    "big-bodies",
)
TRACED_WITHIN_S = 60
COMPRESSION_BITS = {"LZ4": 0x100, "ZSTD": 0x200, "ZLIB": 0x300}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(driver: Driver, name: str) -> None:
    driver.scenario(name)


def test_an_ordered_consumer_that_fails(driver: Driver) -> None:
    """What it gives up is a dead letter; release 4 has that wait first, for as long as one more
    retry would: two minutes here."""
    is_delayed = driver.server.name == "apache-4"
    driver.scenario("orderly-failing", is_dead_letter_delayed=int(is_delayed))


@pytest.mark.parametrize(
    "setting",
    ["-Drocketmq.serialize.type=ROCKETMQ", "-Dorg.apache.rocketmq.client.sendSmartMsg=false"],
    ids=["binary-headers", "send-code-10"],
)
def test_core_with_other_encodings(driver: Driver, setting: str) -> None:
    driver.scenario("core", jvm=(setting,))


@pytest.mark.parametrize("compression", COMPRESSION_BITS)
def test_compressed_body(driver: Driver, compression: str) -> None:
    setting = f"-Drocketmq.message.compressType={compression}"
    facts = driver.scenario("compressed-bodies", jvm=(setting,))
    assert facts["sys_flag"] & 0x700 == COMPRESSION_BITS[compression]


def test_the_story_of_a_message(driver: Driver) -> None:
    """Traces that the client wrote, read back by mqadmin: who sent it, who consumed it."""
    facts = driver.scenario("trace")
    deadline = time.monotonic() + TRACED_WITHIN_S
    while True:
        (printed,) = driver.mqadmin(f"queryMsgTraceById -i {facts['id']}")
        fail_on_stack_trace(printed)
        rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
        if {"Pub", "Sub"} <= set(rows):
            break
        assert time.monotonic() < deadline, printed
        time.sleep(1)
    assert "_traced" in rows["Pub"] and "success" in rows["Pub"], printed
    assert "_trace" in rows["Sub"] and "success" in rows["Sub"], printed


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_order_is_kept_through_a_restart(
    pair: tuple[str, str],
    launcher: Launcher,
    toolchain: Toolchain,
    tmp_path: Path,
    is_killed: bool,
) -> None:
    name, client = pair
    port = free_broker_port()

    def start(step: int) -> Server:
        settings = Settings(tmp_path / f"step-{step}", tmp_path / "store", port, SIZES)
        return launcher.start(name, settings)

    server = start(1)
    marker = tmp_path / "restart-now"
    driver = Driver(client, server, toolchain, tmp_path)
    # The scenario has the other thread: a server dies with the one that started it.
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(driver.scenario, "orderly-restart", marker=marker)
        while not marker.exists() and not playing.done():
            time.sleep(0.05)
        if is_killed:
            server.kill()
        else:
            server.stop()
        start(2)
        marker.with_name(marker.name + ".back").touch()
        playing.result()
