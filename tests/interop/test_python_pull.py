"""CometMQ's own PullConsumer and SimpleConsumer against every server.

Pop exists only since RocketMQ 5, so the simple consumer meets CometMQ and that control.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from cometmq.client.pull_consumer import PullConsumer
from cometmq.client.reading import PullStatus
from cometmq.client.receipts import parse_receipt
from cometmq.client.remote import Remote
from cometmq.client.simple_consumer import PoppedMessage, SimpleConsumer
from cometmq.errors import CometError
from cometmq.message import MessageQueue
from cometmq.wire import headers, properties
from cometmq.wire.codes import RequestCode

from .conftest import SIZES
from .servers import BROKER_NAME, Server, Settings, selected_servers, start
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

SERVERS = [name for name in ("comet", "apache-4", "apache-5") if name in selected_servers()]
ROUTE_TIMEOUT_S = 30
REVIVE_TIMEOUT_S = 90


@pytest.fixture(scope="module", params=SERVERS)
def peer(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(f"python-pull-{request.param}")
    running = start(request.param, toolchain, Settings(folder, folder / "store", sizes=SIZES))
    yield running
    running.kill()


def make_topic(server: Server, topic: str) -> None:
    header = headers.CreateTopicHeader(topic, 4, 4, 6, defaultTopic="TBW102")
    with Remote(server.broker, timeout_ms=10_000) as remote:
        remote.call(RequestCode.UPDATE_AND_CREATE_TOPIC, headers.to_ext(header))
    give_up = time.monotonic() + ROUTE_TIMEOUT_S
    with Remote(server.namesrv, timeout_ms=10_000) as remote:
        while remote.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code != 0:
            assert time.monotonic() < give_up, "the name server never heard of the topic"
            time.sleep(0.1)


def put(server: Server, topic: str, count: int, *, at: int = 0, tag: str = "") -> None:
    """Bodies `at`, `at + 1`, ... over the four queues."""
    with Remote(server.broker, timeout_ms=10_000) as remote:
        for number in range(at, at + count):
            header = headers.SendHeader(
                producerGroup="python-pull",
                topic=topic,
                defaultTopic="TBW102",
                defaultTopicQueueNums=4,
                queueId=number % 4,
                sysFlag=0,
                bornTimestamp=time.time_ns() // 1_000_000,
                flag=0,
                properties=properties.build({"TAGS": tag} if tag else {}),
            )
            ext = headers.send_v2_ext(header)
            remote.call(RequestCode.SEND_MESSAGE_V2, ext, b"%d" % number)


async def collect(one: PullConsumer, count: int, timeout_s: float = 30) -> list[int]:
    found: list[int] = []
    give_up = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < give_up:
        found += [int(each.body) for each in await one.poll(timeout_s=1)]
    return found


async def until(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    give_up = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up, "did not come true"
        await asyncio.sleep(0.05)


def test_poll_commit_and_go_on(peer: Server) -> None:
    topic, group = "python-poll", "python-poll-group"
    make_topic(peer, topic)
    put(peer, topic, 100)

    async def run() -> None:
        one = PullConsumer(group, namesrv=peer.namesrv)
        one.subscribe(topic)
        async with one:
            found = await collect(one, 100)
            assert sorted(found) == list(range(100))
            assert [each for each in found if each % 4 == 1] == list(range(1, 100, 4))
            await one.commit()
            assert [await one.committed(each) for each in one.assigned()] == [25] * 4
            waiting = asyncio.create_task(one.poll(timeout_s=20))
            await asyncio.sleep(1)
            began = time.monotonic()
            await asyncio.to_thread(put, peer, topic, 1, at=100)
            assert [each.body for each in await waiting] == [b"100"]
            assert time.monotonic() - began < 3  # the broker's long poll woke
            one.seek(MessageQueue(topic, BROKER_NAME, 2), 20)
            assert await collect(one, 5) == list(range(82, 100, 4))
        again = PullConsumer(group, namesrv=peer.namesrv)
        again.subscribe(topic)
        async with again:
            # 100 was handed out by the poll before the last; the last gave what the seek asked for.
            assert await collect(again, 5) == list(range(82, 100, 4))

    asyncio.run(run())


def test_two_members_share(peer: Server) -> None:
    topic, group = "python-share", "python-share-group"
    make_topic(peer, topic)

    async def run() -> None:
        async with PullConsumer(group, namesrv=peer.namesrv) as first:
            first.subscribe(topic, "red")
            await until(lambda: len(first.assigned()) == 4)
            async with PullConsumer(group, namesrv=peer.namesrv) as second:
                second.subscribe(topic, "red")
                await until(lambda: len(first.assigned()) == 2 == len(second.assigned()))
                await asyncio.to_thread(put, peer, topic, 20, tag="blue")
                await asyncio.to_thread(put, peer, topic, 20, at=20, tag="red")
                got = await asyncio.gather(collect(first, 10), collect(second, 10))
                assert sorted(got[0] + got[1]) == list(range(20, 40))
                assert len(got[0]) == len(got[1])
            await until(lambda: len(first.assigned()) == 4)

    asyncio.run(run())


def test_plain_pull_and_offsets(peer: Server) -> None:
    topic, group = "python-plain", "python-plain-group"
    make_topic(peer, topic)
    put(peer, topic, 40, tag="blue")
    time.sleep(0.1)
    middle = datetime.now(UTC)
    time.sleep(0.1)
    put(peer, topic, 40, at=40, tag="red")

    async def run() -> None:
        async with PullConsumer(group, namesrv=peer.namesrv) as one:
            zero = (await one.queues(topic))[0]
            assert zero == MessageQueue(topic, BROKER_NAME, 0)
            assert (await one.begin_offset(zero), await one.end_offset(zero)) == (0, 20)
            # 4.9 gives the nearest: the message before, if that is closer to the time.
            expected = (9, 10) if peer.name == "apache-4" else (10,)
            assert await one.offset_for_time(zero, middle) in expected
            pulled = await one.pull(zero, 3, most=5)
            assert pulled.status is PullStatus.FOUND
            assert [int(each.body) for each in pulled.messages] == [12, 16, 20, 24, 28]
            assert (pulled.next_offset, pulled.min_offset, pulled.max_offset) == (8, 0, 20)
            assert (await one.pull(zero, 20)).status is PullStatus.NO_NEW
            moved = await one.pull(zero, 99)
            assert (moved.status, moved.next_offset) == (PullStatus.OFFSET_ILLEGAL, 20)
            none = await one.pull(zero, 0, tags="green")
            assert (none.status, none.messages) == (PullStatus.NO_MATCH, [])
            red = await one.pull(zero, 0, tags="red")
            assert [int(each.body) for each in red.messages] == list(range(40, 80, 4))
            raw = await one.pull_raw(zero, 3, most=5)
            assert len(raw.body) == sum(each.size for each in pulled.messages)
            began = time.monotonic()
            assert (await one.pull(zero, 20, suspend_ms=1_000)).status is PullStatus.NO_NEW
            assert 0.9 < time.monotonic() - began < 8
        # 5.x keeps offsets only of groups it knows, and nothing has made this one known.
        async with PullConsumer("python-unknown", namesrv=peer.namesrv) as one:
            await one.commit({zero: 7})
            assert await one.committed(zero) == 7

    asyncio.run(run())


async def receive_until(
    one: SimpleConsumer, count: int, timeout_s: float, **options: float
) -> list[PoppedMessage]:
    found: list[PoppedMessage] = []
    give_up = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < give_up:
        found += await one.receive(most=32, **options)
    return found


@pytest.mark.parametrize("peer", [one for one in SERVERS if one != "apache-4"], indirect=True)
def test_receive_and_ack(peer: Server) -> None:
    topic, group = "python-pop", "python-pop-group"
    make_topic(peer, topic)
    put(peer, topic, 40)

    async def run() -> None:
        async with SimpleConsumer(group, topic, namesrv=peer.namesrv) as one:
            found = await receive_until(one, 40, 30, wait_s=2)
            assert sorted(int(each.body) for each in found) == list(range(40))
            for each in found:
                receipt = parse_receipt(each.receipt)
                assert (receipt.broker, receipt.queue_id) == (BROKER_NAME, each.queue_id)
                assert (receipt.offset, receipt.flag) == (each.queue_offset, "0")
                assert receipt.start_offset <= receipt.offset
                assert each.properties["1ST_POP_TIME"] == str(receipt.pop_ms)
            await one.ack(found[0])
            await one.ack(found[1:])

            # Woken while it waits.
            waiting = asyncio.create_task(one.receive(wait_s=15))
            await asyncio.sleep(1)
            began = time.monotonic()
            await asyncio.to_thread(put, peer, topic, 1, at=40)
            (last,) = await waiting
            assert last.body == b"40"
            assert time.monotonic() - began < 5
            await one.ack(last)
            began = time.monotonic()
            assert await one.receive(wait_s=1) == []
            assert 0.9 < time.monotonic() - began < 8
            assert await one.receive(wait_s=0) == []

    asyncio.run(run())


@pytest.mark.parametrize("peer", [one for one in SERVERS if one != "apache-4"], indirect=True)
def test_what_is_not_acknowledged_returns(peer: Server) -> None:
    topic, group = "python-again", "python-again-group"
    make_topic(peer, topic)
    put(peer, topic, 12)

    async def run() -> None:
        async with SimpleConsumer(group, topic, namesrv=peer.namesrv) as one:
            found = await receive_until(one, 12, 30, wait_s=2, invisible_s=20)
            assert len(found) == 12
            by_number = {int(each.body): each for each in found}
            await one.ack([by_number[number] for number in range(6)])
            for number in (6, 7):  # sooner again; the new receipt is the one that counts
                before = by_number[number].receipt
                await one.change_invisible(by_number[number], 3)
                assert by_number[number].receipt != before
            await one.change_invisible(by_number[8], 300)  # not again in this test
            await one.change_invisible(by_number[9], 30)
            await one.ack(by_number[9])

            again = await receive_until(one, 4, REVIVE_TIMEOUT_S, wait_s=5)
            numbers = [int(each.body) for each in again]
            assert sorted(numbers) == [6, 7, 10, 11]
            assert set(numbers[:2]) == {6, 7}
            for each in again:
                assert each.reconsume_times == 1
                assert each.topic == topic
                assert parse_receipt(each.receipt).flag in ("1", "2")
            await one.ack(again[0])
            await one.ack(again[1:])
            late = await receive_until(one, 1, 15, wait_s=5)
            assert late == []

    asyncio.run(run())


@pytest.mark.parametrize("peer", [one for one in SERVERS if one == "apache-4"], indirect=True)
def test_a_broker_without_pop_says_so(peer: Server) -> None:
    make_topic(peer, "python-no-pop")

    async def run() -> None:
        async with SimpleConsumer("g", "python-no-pop", namesrv=peer.namesrv) as one:
            with pytest.raises(CometError, match="not supported"):
                await one.receive(wait_s=1)

    asyncio.run(run())
