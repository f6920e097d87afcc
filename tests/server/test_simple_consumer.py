"""SimpleConsumer against a running CometMQ, over real sockets: pop from end to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from cometmq.client.admin import Admin
from cometmq.client.pull_consumer import PullConsumer
from cometmq.client.receipts import parse_receipt
from cometmq.client.remote import Remote
from cometmq.client.simple_consumer import PoppedMessage, SimpleConsumer
from cometmq.errors import RequestRefused
from cometmq.message import MessageQueue
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode
from programs import Program, send

TOPIC = "orders"


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        running.create_topic(TOPIC, queues=4)
        yield running


def put(broker: LocalBroker, count: int, *, queue_id: int = -1, tag: str = "", at: int = 0) -> None:
    with Remote(broker.broker_address) as remote:
        for number in range(at, at + count):
            where = number % 4 if queue_id < 0 else queue_id
            assert send(remote, TOPIC, b"%d" % number, queue_id=where, tag=tag).code == 0


def consumer(broker: LocalBroker, group: str = "billing", **options: object) -> SimpleConsumer:
    tags = str(options.pop("tags", "*"))
    return SimpleConsumer(group, TOPIC, tags, namesrv=broker.namesrv, **options)


def numbers(messages: list[PoppedMessage]) -> list[int]:
    return sorted(int(one.body) for one in messages)


async def receive(
    one: SimpleConsumer, count: int, timeout_s: float = 15, **options: float
) -> list[PoppedMessage]:
    found: list[PoppedMessage] = []
    give_up = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < give_up:
        found += await one.receive(most=32, wait_s=0.5, **options)
    return found


def test_receive_and_ack(broker: LocalBroker) -> None:
    put(broker, 40)

    async def run() -> None:
        async with consumer(broker) as one, consumer(broker) as other:
            first = await one.receive(most=32, wait_s=0)
            second = await other.receive(most=32, wait_s=0)
            assert numbers(first + second) == list(range(40))
            assert len(first) == 32
            await one.ack(first[0])
            await one.ack(first[1:])
            await other.ack(second)
            assert await one.receive(wait_s=0) == []

    asyncio.run(run())


def test_filters(broker: LocalBroker) -> None:
    put(broker, 4, tag="A")
    put(broker, 4, tag="B", at=4)

    async def run() -> None:
        async with consumer(broker, tags="A") as one:
            assert numbers(await receive(one, 4)) == [0, 1, 2, 3]
        async with consumer(broker, "sql", sql="TAGS = 'B'") as two:
            assert numbers(await receive(two, 4)) == [4, 5, 6, 7]

    asyncio.run(run())


@pytest.mark.parametrize("ordered", [False, True])
def test_tags_with_the_same_hash_are_told_apart(broker: LocalBroker, ordered: bool) -> None:
    put(broker, 40, tag="BB", queue_id=0)  # the hash of "Aa"
    put(broker, 2, tag="Aa", queue_id=0, at=40)

    async def run() -> None:
        async with consumer(broker, tags="Aa", ordered=ordered) as one:
            found = await receive(one, 2, invisible_s=1)
            assert numbers(found) == [40, 41]
            await one.ack(found)
            await asyncio.sleep(1.5)
        # The others were acknowledged: they come back to nobody of the group.
        async with consumer(broker, ordered=ordered) as any_tag:
            assert await any_tag.receive(wait_s=1) == []

    asyncio.run(run())


def test_another_filter_given_meanwhile_throws_nothing_away(broker: LocalBroker) -> None:
    async def run() -> None:
        async with consumer(broker, tags="A") as one:
            waiting = asyncio.create_task(one.receive(wait_s=10))
            await asyncio.sleep(0.5)
            one.subscribe(TOPIC, "B")
            await asyncio.to_thread(put, broker, 1, tag="A")
            assert numbers(await waiting) == [0]

    asyncio.run(run())


def test_an_arrival_wakes_who_waits(broker: LocalBroker) -> None:
    async def run() -> None:
        async with consumer(broker) as one:
            await one.receive(wait_s=0)
            waiting = asyncio.create_task(one.receive(wait_s=15))
            await asyncio.sleep(0.5)
            began = time.monotonic()
            await asyncio.to_thread(put, broker, 1)
            assert numbers(await waiting) == [0]
            assert time.monotonic() - began < 3

    asyncio.run(run())


def test_what_is_not_acknowledged_comes_back(broker: LocalBroker) -> None:
    put(broker, 6)

    async def run() -> None:
        async with consumer(broker) as one:
            found = {int(each.body): each for each in await receive(one, 6, invisible_s=2)}
            await one.ack([found[0], found[1], found[2]])
            await one.change_invisible(found[3], 600)
            old = found[4].receipt
            await one.change_invisible(found[4], 3)
            assert found[4].receipt != old
            again = await receive(one, 2, invisible_s=60)
            assert numbers(again) == [4, 5]
            assert {each.reconsume_times for each in again} == {1}
            assert {each.topic for each in again} == {TOPIC}
            assert {parse_receipt(each.receipt).flag for each in again} == {"1"}
            await one.ack(again)
            assert await receive(one, 1, 4) == []

    asyncio.run(run())


def test_the_dead_letters_after_all_tries(broker: LocalBroker) -> None:
    put(broker, 1)

    async def run() -> None:
        async with Admin(namesrv=broker.namesrv) as admin:
            await admin.create_group("billing", retry_max_times=1)
        async with consumer(broker) as one:
            for times in (0, 1):
                (each,) = await receive(one, 1, invisible_s=1)
                assert each.reconsume_times == times
            assert await receive(one, 1, 4) == []
        dead = "%DLQ%billing"
        async with PullConsumer("reader", namesrv=broker.namesrv) as reader:
            found = await reader.pull(MessageQueue(dead, broker.broker_name, 0), 0, 10)
            (letter,) = found.messages
            assert letter.body == b"0"
            assert letter.properties["DLQ_ORIGIN_TOPIC"] == TOPIC

    asyncio.run(run())


def test_in_order(broker: LocalBroker) -> None:
    put(broker, 6, queue_id=1)

    async def run() -> None:
        async with consumer(broker, ordered=True) as one:
            first = await one.receive(most=2, invisible_s=2, wait_s=1)
            assert [each.body for each in first] == [b"0", b"1"]
            assert await one.receive(wait_s=0) == [], "its queue is taken"
            await one.ack(first[0])
            again = await one.receive(most=2, invisible_s=30, wait_s=5)
            assert [each.body for each in again] == [b"1", b"2"]
            assert [each.reconsume_times for each in again] == [1, 0]
            waiting = asyncio.create_task(one.receive(most=3, wait_s=10))
            await asyncio.sleep(0.3)
            await one.ack(again)
            assert [each.body for each in await waiting] == [b"3", b"4", b"5"]

    asyncio.run(run())


def test_both_header_encodings(broker: LocalBroker) -> None:
    """The binary header has 16 bits for a code; pop's need more, and arrive cut off."""
    put(broker, 2)
    ext = {
        "consumerGroup": "billing",
        "topic": TOPIC,
        "queueId": "-1",
        "maxMsgNums": "1",
        "invisibleTime": "60000",
        "pollTime": "0",
        "bornTime": "0",
        "initMode": "0",
    }
    for serialize in (0, 1):
        with Remote(broker.broker_address, serialize=serialize) as remote:
            assert remote.call(RequestCode.POP_MESSAGE, ext).body


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restart_in_the_middle(up: Callable[..., Program], is_killed: bool) -> None:
    """What was acknowledged stays so, the rest comes back, by whatever way the broker ended."""
    program = up()
    topic = "restarted"

    async def before() -> list[int]:
        async with SimpleConsumer("billing", topic, namesrv=program.namesrv) as one:
            found = await receive(one, 8, invisible_s=8)
            assert len(found) == 8
            await asyncio.sleep(6)  # the offsets are saved by then
            await one.ack(found[:4])
            return numbers(found[4:])

    with Remote(program.broker) as remote:
        for number in range(8):
            assert send(remote, topic, b"%d" % number, queue_id=number % 4).code == 0
    expected = asyncio.run(before())
    if is_killed:
        program.kill()
    else:
        assert program.stop() == 0
    program = up()

    async def after() -> None:
        async with SimpleConsumer("billing", topic, namesrv=program.namesrv) as one:
            again = await receive(one, 4, 20, invisible_s=60)
            assert numbers(again) == expected
            assert {each.reconsume_times for each in again} == {1}
            await one.ack(again)
            assert await receive(one, 1, 2) == []

    asyncio.run(after())


def test_a_receipt_of_nothing_is_refused(broker: LocalBroker) -> None:
    put(broker, 1)

    async def run() -> None:
        async with consumer(broker) as one:
            (each,) = await receive(one, 1)
            words = each.receipt.split(" ")
            words[-1] = "77"
            each.receipt = " ".join(words)
            with pytest.raises(RequestRefused, match="offset 77"):
                await one.ack(each)

    asyncio.run(run())
