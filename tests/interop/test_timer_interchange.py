"""Timed messages in a store that changes hands: whoever has it when they are due delivers them.

The first owner takes messages for the next half minute, delivers some, and stops, cleanly or by
kill -9; one message it is asked to take back. The second delivers the rest from the wheel it finds,
and the recall of one more. The third must find nothing left to do. After a clean stop every
message comes exactly once; after a kill at least once.
"""

import time
from collections import Counter
from pathlib import Path

import pytest

from cometmq.client.remote import Remote
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import PullFlag, RequestCode

from .servers import (
    Chain,
    Launcher,
    Server,
    Settings,
    free_broker_port,
    selected_chains,
    selected_servers,
)

pytestmark = pytest.mark.interop

TOPIC = "Timed"
COUNT = 300
FIRST_MS, LAST_MS = 2_000, 45_000
# Small files, so that the chains of slots run through several of them.
SIZES = {
    "mappedFileSizeCommitLog": str(1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 256),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "mappedFileSizeTimerLog": str(52 * 100 + 30),
    "timerRollWindowSlot": "20",
    "recallMessageEnable": "true",
}


CHAINS = (
    Chain(("comet", "apache-5", "comet")),
    Chain(("apache-5", "comet", "apache-5")),
    Chain(("comet", "apache-5", "comet"), is_killed=True),
    Chain(("apache-5", "comet", "apache-5"), is_killed=True),
)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.mark.parametrize("chain", selected_chains(CHAINS), ids=str)
def test_pending_timers_go_from_server_to_server(
    chain: Chain, launcher: Launcher, tmp_path: Path
) -> None:
    if not set(chain.owners) <= selected_servers():
        pytest.skip("COMETMQ_INTEROP_SERVERS leaves out one of them")
    store, port = tmp_path / "store", free_broker_port()

    def start(step: int) -> Server:
        folder = tmp_path / f"step-{step}-{chain.owners[step]}"
        return launcher.start(chain.owners[step], Settings(folder, store, port, SIZES))

    def end(server: Server) -> None:
        if chain.is_killed:
            time.sleep(3)  # what was delivered is noted every second
            server.kill()
        else:
            server.stop()

    first = start(0)
    make_topic(first)
    due, handles = send_all(first)
    wait_for(first, COUNT // 8)
    recall(first, handles.pop(COUNT - 1))
    end(first)
    second = start(1)
    recall(second, handles.pop(COUNT - 2))
    expected = {b"%d" % number for number in range(COUNT - 2)}
    found = wait_for(second, len(expected))
    time.sleep(3)
    found = pulled(second)
    counts = Counter(one.body for one in found)
    assert set(counts) == expected
    if not chain.is_killed:
        assert set(counts.values()) == {1}, counts.most_common(5)
    for one in found:
        assert one.store_ms >= due[one.body] - 1000, "a server's precision is a second"
    end(second)
    third = start(2)
    time.sleep(5)
    again = pulled(third)
    if not chain.is_killed:
        assert len(again) == len(found)
    assert {one.body for one in again} == expected
    third.kill()
    assert len(list((store / "timerlog").iterdir())) > 2


def make_topic(server: Server) -> None:
    header = headers.CreateTopicHeader(TOPIC, 1, 1, 6, defaultTopic="TBW102")
    with Remote(server.broker, timeout_ms=10_000) as remote:
        remote.call(RequestCode.UPDATE_AND_CREATE_TOPIC, headers.to_ext(header))


def send_all(server: Server) -> tuple[dict[bytes, int], dict[int, str]]:
    """When each is due, and its recall handle."""
    due: dict[bytes, int] = {}
    handles: dict[int, str] = {}
    begin_ms = now_ms()
    with Remote(server.broker, timeout_ms=10_000) as remote:
        for number in range(COUNT):
            body = b"%d" % number
            due[body] = begin_ms + FIRST_MS + (LAST_MS - FIRST_MS) * number // COUNT
            table = {"TIMER_DELIVER_MS": str(due[body]), "UNIQ_KEY": f"KEY{number:05d}"}
            header = headers.SendHeader(
                producerGroup="timers",
                topic=TOPIC,
                defaultTopic="TBW102",
                defaultTopicQueueNums=1,
                queueId=0,
                sysFlag=0,
                bornTimestamp=now_ms(),
                flag=0,
                properties=properties.build(table),
            )
            ext = headers.send_v2_ext(header)
            answer = remote.call(RequestCode.SEND_MESSAGE_V2, ext, body)
            handles[number] = answer.ext["recallHandle"]
    return due, handles


def recall(server: Server, handle: str) -> None:
    with Remote(server.broker, timeout_ms=10_000) as remote:
        header = headers.RecallHeader(TOPIC, handle, "timers")
        remote.call(RequestCode.RECALL_MESSAGE, headers.to_ext(header))


def pulled(server: Server) -> list[record.StoredMessage]:
    """All that the topic's queue holds."""
    found: list[record.StoredMessage] = []
    with Remote(server.broker, timeout_ms=10_000) as remote:
        while True:
            header = headers.PullHeader(
                consumerGroup="TOOLS_CONSUMER",
                topic=TOPIC,
                queueId=0,
                queueOffset=len(found),
                maxMsgNums=32,
                sysFlag=int(PullFlag.SUBSCRIPTION),
                subscription="*",
            )
            answer = remote.ask(RequestCode.PULL_MESSAGE, headers.to_ext(header))
            if answer.code != 0:
                return found
            found += record.decode_all(answer.body)


def wait_for(server: Server, count: int) -> list[record.StoredMessage]:
    """Wait until so many different messages were delivered."""
    give_up = time.monotonic() + 120
    while True:
        found = pulled(server)
        if len({one.body for one in found}) >= count:
            return found
        assert time.monotonic() < give_up, f"{len(found)} of {count} delivered"
        time.sleep(0.3)
