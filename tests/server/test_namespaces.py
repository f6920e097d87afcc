"""What a client within a namespace shows to its user: topics without it, everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cometmq import Later, Message, MessageQueue, Outcome, aio
from cometmq.client import assignment
from cometmq.client.received import ReceivedMessage
from cometmq.client.session import Options, Session
from cometmq.testing.local import LocalBroker

SPACE = "test"


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    settings = {"transactionTimeOut": "300", "transactionCheckInterval": "300"}
    with LocalBroker(store="memory", settings=settings) as running:
        running.create_topic(f"{SPACE}%orders", queues=2)
        yield running


def run(work: Callable[[dict[str, Any]], Any], broker: LocalBroker) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(40):
            await work({"namesrv": broker.namesrv, "namespace": SPACE})

    asyncio.run(bounded())


def queue(number: int, topic: str = "orders") -> MessageQueue:
    return MessageQueue(topic, "broker-a", number)


async def until(claim: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not claim():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ordered", [False, True])
def test_of_a_push_consumer(broker: LocalBroker, ordered: bool) -> None:
    async def work(options: dict[str, Any]) -> None:
        seen: list[tuple[str, MessageQueue]] = []

        def handle(message: ReceivedMessage) -> Later | None:
            seen.append((message.topic, message.queue))
            return Later(delay_level=1) if len(seen) == 1 and not ordered else None

        async with aio.Producer("shop", **options) as producer:
            await producer.send(Message("orders", b"1"), queue=queue(1))
        async with aio.Consumer("g", start="first", ordered=ordered, **options) as consumer:
            consumer.subscribe("orders", handle)
            await consumer.start()
            own = [queue(0), queue(1)]
            assert [one for one in consumer.queues if one.topic == "orders"] == own
            await until(lambda: len(seen) == (1 if ordered else 2))
            topics = {one.topic for one in consumer.queues}
        assert topics == {"orders", "%RETRY%g"}
        assert seen == [("orders", queue(1)), ("orders", queue(0, "%RETRY%g"))][: len(seen)]

    run(work, broker)


def test_a_strategy_may_name_queues_either_way(broker: LocalBroker) -> None:
    async def work(options: dict[str, Any]) -> None:
        for number, topic in enumerate(("orders", f"{SPACE}%orders")):
            mine = assignment.fixed([queue(1, topic)])
            async with aio.PullConsumer(f"p{number}", strategy=mine, **options) as pulling:
                pulling.subscribe("orders")
                await until(lambda pulling=pulling: pulling.assigned() == [queue(1)])
            async with aio.Consumer(f"g{number}", strategy=mine, **options) as consumer:
                consumer.subscribe("orders", print)
                await consumer.start()
                assert consumer.queues == [queue(1)]

    run(work, broker)


def test_of_a_pull_consumer(broker: LocalBroker) -> None:
    async def work(options: dict[str, Any]) -> None:
        gained: list[MessageQueue] = []

        def changed(new: list[MessageQueue], _: list[MessageQueue]) -> None:
            gained.extend(new)
            for one in new:
                pulling.seek(one, 1)

        async with aio.Producer("shop", **options) as producer:
            for body in (b"0", b"1"):
                await producer.send(Message("orders", body), queue=queue(1))
        pulling = aio.PullConsumer("g", start="first", on_queues_changed=changed, **options)
        pulling.subscribe("orders")
        async with pulling:
            assert gained == pulling.assigned() == await pulling.queues("orders")
            assert gained == [queue(0), queue(1)]
            (message,) = await pulling.poll()
            assert (message.body, message.topic, message.queue) == (b"1", "orders", queue(1))
            await pulling.commit({message.queue: 2})
            assert await pulling.committed(queue(1)) == 2
            assert pulling.position(queue(1)) == pulling.position(queue(1, "test%orders")) == 2
            assert (await pulling.pull(queue(1), 0)).messages[0].queue == queue(1)
            assert await pulling.end_offset(queue(1)) == 2
        async with aio.PullConsumer("h", **options) as by_hand:
            await by_hand.assign([queue(1)])
            await by_hand.seek_to_begin()
            by_hand.pause([queue(1)])
            by_hand.resume([queue(1)])
            assert [one.queue for one in await by_hand.poll()] == [queue(1)] * 2

    run(work, broker)


def test_of_a_simple_consumer_and_an_admin(broker: LocalBroker) -> None:
    async def work(options: dict[str, Any]) -> None:
        async with aio.Producer("shop", **options) as producer:
            sent = await producer.send(Message("orders", b"1", keys="k"), queue=queue(1))
        async with aio.SimpleConsumer("g", "orders", **options) as simple:
            (message,) = await simple.receive(wait_s=5)
            assert (message.topic, message.queue) == ("orders", queue(1))
            await simple.ack(message)
        async with aio.Admin(broker.namesrv, namespace=SPACE) as admin:
            route = await admin.topic_route("orders")
            assert route.topic == "orders"
            assert set(route.to_read) == set(route.to_send) == {queue(0), queue(1)}
            (found,) = await admin.queue_messages(queue(1))
            assert (found.topic, found.queue) == ("orders", queue(1))
            for message_id in (sent.message_id, sent.offset_id):
                assert (await admin.message(message_id, "orders")).queue == queue(1)
                story = await admin.story(message_id, "orders")
                assert story.topic == "orders"
                assert all("no trace of" in one for one in story.unknown)

    run(work, broker)


def test_of_a_check(broker: LocalBroker) -> None:
    async def work(options: dict[str, Any]) -> None:
        asked: list[tuple[str, str]] = []

        def check(message: ReceivedMessage) -> Outcome:
            asked.append((message.topic, message.queue.topic))
            return Outcome.COMMIT

        async with aio.TransactionProducer("shop", check, **options) as producer:
            await producer.send(Message("orders", b"1"), lambda _: Outcome.UNKNOWN)
            await until(lambda: asked)
            async with aio.PullConsumer("g", start="first", **options) as pulling:
                pulling.subscribe("orders")
                assert [one.body for one in await pulling.poll()] == [b"1"]
        assert asked == [("orders", "orders")]

    run(work, broker)


def test_names_are_stripped_once_and_only_in_front() -> None:
    async def work() -> None:
        session = Session(Options(namesrv="127.0.0.1:1", namespace="test"))
        for shown, wire in (
            ("orders", "test%orders"),
            ("latest%orders", "test%latest%orders"),
            ("%RETRY%g", "%RETRY%test%g"),
            ("%DLQ%g", "%DLQ%test%g"),
            ("SCHEDULE_TOPIC_XXXX", "SCHEDULE_TOPIC_XXXX"),
        ):
            assert session.wrap(shown) == session.wrap(wire) == wire
            assert session.unwrap(wire) == session.unwrap(shown) == shown

    asyncio.run(work())
