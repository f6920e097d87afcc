"""Message trace against a real broker: what traced clients did is found by a message's id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from cometmq.client import trace
from cometmq.client.admin import Admin
from cometmq.client.consumer import Consumer
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage
from cometmq.client.session import Options
from cometmq.client.trace import (
    HandledCode,
    MessageKind,
    Pub,
    SubAfter,
    SubBefore,
    Tracer,
    TraceRecord,
    encode,
    story,
)
from cometmq.errors import NoRoute, SendFailed, UsageError
from cometmq.message import Message
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory") as running:
        running.create_topic("orders")
        yield running


def run(work: Coroutine[Any, Any, None], timeout_s: float = 40) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await work

    asyncio.run(bounded())


async def told(
    broker: LocalBroker, message_id: str, count: int, topic: str = trace.TRACE_TOPIC
) -> list[TraceRecord]:
    """The story, as soon as it has so many records: the index comes a moment later."""
    async with Admin(broker.namesrv) as admin:
        give_up = time.monotonic() + 10
        while True:
            found = await story(admin, message_id, topic)
            if len(found) >= count or time.monotonic() > give_up:
                return found
            await asyncio.sleep(0.02)


async def until(claim: Callable[[], object], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not claim():
            await asyncio.sleep(0.005)


def test_the_whole_story_of_a_message(broker: LocalBroker) -> None:
    seen: list[ReceivedMessage] = []

    async def work() -> None:
        async with (
            Producer("shop", namesrv=broker.namesrv) as producer,
            Consumer("billing", namesrv=broker.namesrv, start="first") as consumer,
            Tracer(producer.session) as tracer,
        ):
            tracer.watch_producer(producer)
            tracer.watch_consumer(consumer)
            consumer.subscribe("orders", "*", seen.append)
            await consumer.start()
            sent = await producer.send(Message("orders", b"x" * 10, tags="paid", keys="o-1 o-2"))
            other = await producer.send(Message("orders", b"y"))
            await until(lambda: tracer.stats.recorded == 6)
            await tracer.flush()
            assert tracer.stats == trace.Stats(recorded=6, sent=6)

            pub, before, after = await told(broker, sent.message_id, 3)
            assert isinstance(pub, Pub)
            assert isinstance(before, SubBefore)
            assert isinstance(after, SubAfter)
            assert pub == Pub(
                time_ms=pub.time_ms,
                region="DefaultRegion",
                group="shop",
                topic="orders",
                message_id=sent.message_id,
                tags="paid",
                keys="o-1 o-2",
                store_host=broker.broker_address,
                body_bytes=10,
                cost_ms=pub.cost_ms,
                kind=MessageKind.NORMAL,
                offset_id=sent.offset_id,
            )
            assert abs(time.time() * 1e3 - pub.time_ms) < 30_000
            assert before == SubBefore(
                time_ms=before.time_ms,
                region="DefaultRegion",
                group="billing",
                request_id=before.request_id,
                message_id=sent.message_id,
                keys="o-1 o-2",
            )
            assert len(before.request_id) == 32
            assert (after.request_id, after.group) == (before.request_id, "billing")
            assert (after.code, after.is_success) == (HandledCode.SUCCESS, True)
            assert after.time_ms >= before.time_ms

            assert len(await told(broker, other.message_id, 3)) == 3
            assert await told(broker, "NOBODY", 0) == []

    run(work())
    assert len(seen) == 2


def test_every_message_of_a_batch_is_found(broker: LocalBroker) -> None:
    async def work() -> None:
        async with (
            Producer("shop", namesrv=broker.namesrv) as producer,
            Tracer(producer.session) as tracer,
        ):
            tracer.watch_producer(producer)
            sent = await producer.send_batch([Message("orders", b"x") for _ in range(300)])
            ids = sent.message_id.split(",")
            await tracer.close()
            assert tracer.stats.sent == 2
            for message_id in (ids[0], ids[-1]):
                (pub,) = await told(broker, message_id, 1)
                assert isinstance(pub, Pub)
                assert message_id in pub.message_id.split(",")
                assert pub.offset_id.count(",") == pub.message_id.count(",")

    run(work())


def test_a_failed_send_is_told(broker: LocalBroker) -> None:
    async def work() -> None:
        async with (
            Producer("shop", namesrv=broker.namesrv, retries=0) as producer,
            Tracer(producer.session) as tracer,
        ):
            tracer.watch_producer(producer)
            broker.fail(RequestCode.SEND_MESSAGE_V2, response_code=ResponseCode.MESSAGE_ILLEGAL)
            with pytest.raises(SendFailed):
                await producer.send(Message("orders", b"x", unique_id="F" * 32))
            await tracer.close()
            (pub,) = await told(broker, "F" * 32, 1)
            assert isinstance(pub, Pub)
            assert (pub.is_success, pub.offset_id) == (False, "")

    run(work())


def test_another_topic_and_a_namespace(broker: LocalBroker) -> None:
    async def work() -> None:
        options: dict[str, Any] = {"namesrv": broker.namesrv, "namespace": "space"}
        async with (
            Producer("shop", **options) as producer,
            Tracer(producer.session, topic="history") as tracer,
        ):
            tracer.watch_producer(producer)
            sent = await producer.send(Message("orders", b"x"))
            await tracer.close()
            (pub,) = await told(broker, sent.message_id, 1, "history")
            assert isinstance(pub, Pub)
            assert (pub.group, pub.topic) == ("shop", "orders")
            assert await story(producer.session, sent.message_id, "history") == [pub]
            with pytest.raises(NoRoute):
                await story(producer.session, sent.message_id)
            with pytest.raises(UsageError):
                await story(producer.session, "")

    run(work())


def test_a_long_story_is_read_in_pages(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Producer("shop", namesrv=broker.namesrv) as producer:
            for number in range(80):
                if number == 40:
                    broker.move_clock(5)
                record = SubBefore(
                    time_ms=number, region="", group="g", request_id=f"q{number}", message_id="m"
                )
                await producer.send(Message(trace.TRACE_TOPIC, encode(record), keys="m"))
        found = await told(broker, "m", 80)
        assert [one.time_ms for one in found] == list(range(80))

    run(work())


def test_tracing_that_fails_costs_the_client_nothing(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Producer("shop", namesrv=broker.namesrv) as producer:
            nowhere = Tracer(Options(namesrv="127.0.0.1:1"), flush_s=0.01)
            nowhere.watch_producer(producer)
            for _ in range(3):
                await producer.send(Message("orders", b"x"))
            began = time.monotonic()
            await nowhere.close()
            assert time.monotonic() - began < 12
            assert nowhere.stats == trace.Stats(recorded=3, lost=3)

            refused = Tracer(producer.session, topic="history")
            refused.watch_producer(producer)
            await producer.send(Message("orders", b"x"))
            broker.fail(RequestCode.SEND_MESSAGE_V2, response_code=ResponseCode.MESSAGE_ILLEGAL)
            await refused.close()
            assert refused.stats == trace.Stats(recorded=1, lost=1)
            await producer.send(Message("orders", b"x"))

    run(work())


def test_many_records_go_in_few_messages(broker: LocalBroker) -> None:
    async def work() -> None:
        async with (
            Producer("shop", namesrv=broker.namesrv) as producer,
            Tracer(producer.session) as tracer,
        ):
            tracer.watch_producer(producer)
            sends = [producer.send(Message("orders", b"%d" % n)) for n in range(1_000)]
            results = await asyncio.gather(*sends)
            await tracer.close()
            assert tracer.stats == trace.Stats(recorded=1_000, sent=1_000)
            for result in (results[0], results[-1]):
                assert len(await told(broker, result.message_id, 1)) == 1

    run(work())
