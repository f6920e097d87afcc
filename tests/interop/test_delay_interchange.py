"""Delayed and failed messages in a store that changes hands: the next server carries them on.

The first owner delivers a quick level, keeps a slow one waiting, has messages sent back once and
twice, and makes a dead letter; it stops, cleanly or by kill -9. The second delivers what waits,
takes back what fails again, and makes dead letters of what has failed too often; the third the same
with what the second left. Nothing is early, counts and origins are right, and after a clean stop
all comes exactly once.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cometmq.client.remote import Remote
from cometmq.message import StoredMessage
from cometmq.wire import headers, message_id, properties, record
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
from .test_store_interchange import SIZES

pytestmark = pytest.mark.interop

LATER, WORK, GROUP = "Later", "Work", "Workers"
RETRY, DEAD = f"%RETRY%{GROUP}", f"%DLQ%{GROUP}"
COUNT = 60
WORKS = 12
MOST_TRIES = 2
QUICK, SLOW = 1, 2  # levels
DELAYS_S = (1, 30, 2, 25, 25)  # a first retry takes level 3, a second level 4
PACE = {
    "messageDelayLevel": " ".join(f"{seconds}s" for seconds in DELAYS_S),
    "flushDelayOffsetInterval": "1000",
}
SAVED_S = 12  # RocketMQ saves its delay offsets 10 s after its start for the first time
QUIET_S = 4
WITHIN_S = 90


CHAINS = (
    Chain(("comet", "apache-5", "comet")),
    Chain(("apache-4", "comet", "apache-4")),
    Chain(("comet", "apache-4", "comet"), is_killed=True),
    Chain(("apache-5", "comet", "apache-5"), is_killed=True),
    Chain(("comet", "apache-4", "comet")),
    Chain(("apache-5", "comet", "apache-5")),
    Chain(("comet", "apache-5", "comet"), is_killed=True),
    Chain(("apache-4", "comet", "apache-4"), is_killed=True),
)


@dataclass
class Story:
    """What was sent when, and when it was last sent back."""

    is_killed: bool
    sent_ms: dict[bytes, int] = field(default_factory=dict)
    first_ids: dict[bytes, str] = field(default_factory=dict)
    back_ms: dict[tuple[bytes, int], int] = field(default_factory=dict)
    dead: set[bytes] = field(default_factory=set)


@pytest.mark.parametrize("chain", selected_chains(CHAINS), ids=str)
def test_delays_and_retries_go_from_server_to_server(
    chain: Chain, launcher: Launcher, tmp_path: Path
) -> None:
    if not set(chain.owners) <= selected_servers():
        pytest.skip("COMETMQ_INTEROP_SERVERS leaves out one of them")
    store, port = tmp_path / "store", free_broker_port()
    story = Story(chain.is_killed)

    def start(step: int) -> Server:
        folder = tmp_path / f"step-{step}-{chain.owners[step]}"
        return launcher.start(chain.owners[step], Settings(folder, store, port, {**SIZES, **PACE}))

    def end(server: Server) -> None:
        if chain.is_killed:
            time.sleep(SAVED_S if server.name != "comet" else QUIET_S)
            server.kill()
        else:
            server.stop()

    first = start(0)
    begin(first, story)
    end(first)

    second = start(1)
    go_on(second, story)
    end(second)

    third = start(2)
    finish(third, story)
    if chain.is_killed:
        third.kill()
    else:
        third.stop()


def begin(server: Server, story: Story) -> None:
    """The first owner: quick ones come, slow ones wait, some fail once, some twice, one dies."""
    with Remote(server.broker, timeout_ms=10_000) as remote:
        for topic in (LATER, WORK):
            header = headers.CreateTopicHeader(topic, 1, 1, 6, defaultTopic="TBW102")
            remote.call(RequestCode.UPDATE_AND_CREATE_TOPIC, headers.to_ext(header))
        for number in range(COUNT):
            send(remote, story, LATER, b"slow %d" % number, SLOW)
            send(remote, story, LATER, b"quick %d" % number, QUICK)
        for number in range(WORKS):
            send(remote, story, WORK, b"work %d" % number)
        works = read(remote, WORK)
        assert len(works) == WORKS
        send_back(remote, story, works[0], level=-1)
        for message in works[1:]:
            send_back(remote, story, message)
        quick = {b"quick %d" % number for number in range(COUNT)}
        check_later(wait_for(remote, LATER, quick), story)
        again = {body for body in story.first_ids if body != b"work 0"}
        retried = wait_for(remote, RETRY, again)
        for message in retried[::2]:
            send_back(remote, story, message)
        check_works(remote, story)


def go_on(server: Server, story: Story) -> None:
    """The second: what waited comes, what failed twice dies, what failed once fails again."""
    with Remote(server.broker, timeout_ms=10_000) as remote:
        check_later(wait_for(remote, LATER, set(story.sent_ms)), story)
        twice = {body for body, times in story.back_ms if times == 1}
        for message in wait_for(remote, RETRY, twice, times=2):
            if message.body not in story.dead:
                send_back(remote, story, message)
        for message in read(remote, RETRY):
            if message.reconsume_times == 1 and (message.body, 1) not in story.back_ms:
                send_back(remote, story, message)
        time.sleep(QUIET_S)
        check_later(read(remote, LATER), story)
        check_works(remote, story)


def finish(server: Server, story: Story) -> None:
    """The third: the rest comes a second time, fails, and is dead; nothing is done once more."""
    with Remote(server.broker, timeout_ms=10_000) as remote:
        alive = {body for body in story.first_ids if body not in story.dead}
        assert alive
        for message in wait_for(remote, RETRY, alive, times=2):
            if message.body not in story.dead:
                send_back(remote, story, message)
        assert story.dead == set(story.first_ids)
        time.sleep(QUIET_S)
        check_later(read(remote, LATER), story)
        check_works(remote, story)
        assert {one.body for one in read(remote, DEAD)} == set(story.first_ids)


# ------------------------------------------------------------------------------------------- checks


def check_later(found: list[StoredMessage], story: Story) -> None:
    for one in found:
        level = SLOW if one.body.startswith(b"slow") else QUICK
        early_ms = story.sent_ms[one.body] + DELAYS_S[level - 1] * 1000 - one.store_ms
        assert early_ms <= 0, f"{one.body!r} is {early_ms} ms early"
    check_counts(Counter(one.body for one in found), story)
    bodies = list(dict.fromkeys(one.body for one in found if one.body.startswith(b"slow")))
    assert bodies == [b"slow %d" % number for number in range(len(bodies))], "in their order"


def check_counts(counts: Counter[bytes], story: Story) -> None:
    if not story.is_killed:
        assert set(counts.values()) <= {1}, counts.most_common(5)


def check_works(remote: Remote, story: Story) -> None:
    """All retries and dead letters up to now: who they are, how often they came, how often they
    are there, and that none came early."""
    retries, dead = read(remote, RETRY), read(remote, DEAD)
    for times in (1, 2):
        again = [one for one in retries if one.reconsume_times == times]
        check_counts(Counter(one.body for one in again), story)
        for one in again:
            early_ms = story.back_ms[one.body, times - 1] + DELAYS_S[times + 1] * 1000
            assert one.store_ms >= early_ms, f"retry {times} of {one.body!r} is early"
    assert {one.reconsume_times for one in retries} <= {1, 2}
    assert {one.body for one in dead} == story.dead
    check_counts(Counter(one.body for one in dead), story)
    for one in dead:
        assert one.reconsume_times == (1 if one.body == b"work 0" else MOST_TRIES + 1)
    for one in (*retries, *dead):
        table = properties.parse(one.properties)
        assert table["RETRY_TOPIC"] == WORK
        assert table["ORIGIN_MESSAGE_ID"] == story.first_ids[one.body]
        assert table["colour"] == "blue"


# ---------------------------------------------------------------------------------- what clients do


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send(remote: Remote, story: Story, topic: str, body: bytes, level: int = 0) -> None:
    table = {"colour": "blue", "UNIQ_KEY": body.decode().replace(" ", "-")}
    if level:
        table["DELAY"] = str(level)
        story.sent_ms[body] = now_ms()
    header = headers.SendHeader(
        producerGroup="delays",
        topic=topic,
        defaultTopic="TBW102",
        defaultTopicQueueNums=1,
        queueId=0,
        sysFlag=0,
        bornTimestamp=now_ms(),
        flag=0,
        properties=properties.build(table),
    )
    remote.call(RequestCode.SEND_MESSAGE_V2, headers.send_v2_ext(header), body)


def send_back(remote: Remote, story: Story, message: StoredMessage, level: int = 0) -> None:
    story.first_ids.setdefault(
        message.body, message_id.offset_id(message.store_host, message.log_offset)
    )
    story.back_ms.setdefault((message.body, message.reconsume_times), now_ms())
    if level < 0 or message.reconsume_times >= MOST_TRIES:
        story.dead.add(message.body)
    header = headers.SendBackHeader(
        message.log_offset, GROUP, level, originTopic=WORK, maxReconsumeTimes=MOST_TRIES
    )
    remote.call(RequestCode.CONSUMER_SEND_MSG_BACK, headers.to_ext(header))


def read(remote: Remote, topic: str) -> list[StoredMessage]:
    """All that the topic's queue holds."""
    found: list[StoredMessage] = []
    while True:
        header = headers.PullHeader(
            consumerGroup="TOOLS_CONSUMER",
            topic=topic,
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


def wait_for(
    remote: Remote, topic: str, bodies: set[bytes], times: int | None = None
) -> list[StoredMessage]:
    """What the topic holds, or the part of it that was tried so often, once all of these came."""
    give_up = time.monotonic() + WITHIN_S
    while True:
        found = [one for one in read(remote, topic) if times in (None, one.reconsume_times)]
        missing = bodies - {one.body for one in found}
        if not missing:
            return found
        assert time.monotonic() < give_up, f"{topic}: {len(missing)} did not come: {missing}"
        time.sleep(0.3)
