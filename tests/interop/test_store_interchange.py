"""One store directory handed from server to server: all see every message and go on without a gap.

Each step opens the directory, verifies everything the steps before it wrote (bodies, tags, keys,
queue and committed offsets, look-ups by key, id and time), appends, commits offsets and stops,
cleanly or by kill -9. What is verified is in `Interchange.java`. Chains without CometMQ prove the
test itself.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from .driver import Driver
from .servers import Launcher, Settings, free_broker_port, selected_servers
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

TOPIC, GROUP = "Exchange", "ExchangeGroup"
APPENDED = (1000, 300, 200)
# Small files, so that a few thousand messages roll every kind of file several times.
SIZES = {
    "mappedFileSizeCommitLog": str(1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 256),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
}
# Release 4 picks a queue file by its modification time, which small files and copies make a guess.
ROUGH_IN_TIME = {"apache-4"}
# Brokers write committed offsets every 5 s.
OFFSETS_SAVED_WITHIN_S = 20
BARE_KEY = re.compile(r"([{,]\s*)(\d+)\s*:")


@dataclass(frozen=True)
class Chain:
    """Who owns the directory in turn, which client looks, and how each owner is stopped."""

    owners: tuple[str, ...]
    client: str
    is_killed: bool = False

    def __str__(self) -> str:
        return ("-killed-" if self.is_killed else "-then-").join(self.owners)


CHAINS = (
    Chain(("comet", "apache-4", "comet"), "client-4"),
    Chain(("comet", "apache-5", "comet"), "client-5"),
    Chain(("apache-4", "comet", "apache-4"), "client-4"),
    Chain(("apache-5", "comet", "apache-5"), "client-5"),
    Chain(("comet", "apache-4", "comet"), "client-4", is_killed=True),
    Chain(("comet", "apache-5", "comet"), "client-5", is_killed=True),
    # A 4.x broker overwrites the unique ids in a 5.x client's batch, so here the 4.x client looks.
    Chain(("apache-4", "apache-5"), "client-4"),
    Chain(("apache-4", "apache-5"), "client-4", is_killed=True),
)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_store_goes_from_server_to_server(
    chain: Chain, launcher: Launcher, toolchain: Toolchain, tmp_path: Path
) -> None:
    if not set(chain.owners) <= selected_servers():
        pytest.skip("COMETMQ_INTEROP_SERVERS leaves out one of them")
    store, port = tmp_path / "store", free_broker_port()
    total = 0
    for step, owner in enumerate(chain.owners):
        folder = tmp_path / f"step-{step}-{owner}"
        server = launcher.start(owner, Settings(folder, store, port, SIZES))
        driver = Driver(chain.client, server, toolchain, folder)
        facts = driver.scenario(
            "interchange",
            topic=TOPIC,
            group=GROUP,
            expect=total,
            append=APPENDED[step],
            search_by_time="rough" if owner in ROUGH_IN_TIME else "exact",
        )
        total = facts["total"]
        if step == len(chain.owners) - 1:
            server.kill()
        elif chain.is_killed:
            await_saved_offsets(store, facts["committed"])
            server.kill()
            assert (store / "abort").exists()
        else:
            server.stop()
            assert not (store / "abort").exists()
            await_saved_offsets(store, facts["committed"])
    assert len(list((store / "commitlog").iterdir())) > 3
    assert len(list((store / "index").iterdir())) > 1
    assert len(list((store / "consumequeue" / f"{TOPIC}_batched" / "0").iterdir())) > 3


def await_saved_offsets(store: Path, committed: dict[str, dict[str, int]]) -> None:
    """Wait until config/consumerOffset.json holds what the group committed."""
    expected = {f"{topic}@{GROUP}": offsets for topic, offsets in committed.items()}
    deadline = time.monotonic() + OFFSETS_SAVED_WITHIN_S
    while (saved := saved_offsets(store, expected)) != expected:
        assert time.monotonic() < deadline, f"saved {saved}, expected {expected}"
        time.sleep(0.2)


def saved_offsets(store: Path, wanted: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The wanted part of consumerOffset.json; RocketMQ writes queue numbers as bare JSON keys."""
    file = store / "config" / "consumerOffset.json"
    if not file.exists():
        return {}
    table = json.loads(BARE_KEY.sub(r'\1"\2":', file.read_text()))["offsetTable"]
    return {name: table[name] for name in wanted if name in table}
