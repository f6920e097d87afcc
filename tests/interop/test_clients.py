"""The official Java client, scenario by scenario, against every server.

What a scenario checks is written in `java/src/main/java/interop`; each runs in one JVM, on topics
of its own.
"""

import pytest

from .driver import Driver

pytestmark = pytest.mark.interop

SCENARIOS = (
    "sync-async-oneway",
    "batch",
    "ordered-send",
    "push-concurrent",
    "push-orderly",
    "tag-filter",
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
COMPRESSION_BITS = {"LZ4": 0x100, "ZSTD": 0x200, "ZLIB": 0x300}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(driver: Driver, name: str) -> None:
    driver.scenario(name)


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
