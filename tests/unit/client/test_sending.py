"""One send against two brokers whose answers the test gives: which is tried, what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cometmq.client.connection import Connection
from cometmq.client.producer import Producer
from cometmq.client.routes import BrokerOfRoute, Route
from cometmq.errors import SendFailed
from cometmq.message import Message, MessageQueue, SendResult, SendStatus
from cometmq.wire.frame import Frame, FrameReader, encode_frame

STORED = {"queueId": "0", "msgId": "M", "queueOffset": "5"}
TOPIC = "t"


class Broker:
    """A connection whose other side is the test; also its transport."""

    def __init__(self, producer: Producer, name: str) -> None:
        self.name = name
        self.asked: list[Frame] = []
        self._reader = FrameReader()
        self.connection = Connection(name, None, lambda one, frame: None, lambda one: None)
        self.connection.connection_made(self)  # type: ignore[arg-type]
        producer.session.connections._open[f"{name}:1"] = self.connection

    def write(self, data: bytes) -> None:
        self.asked += self._reader.feed(data)

    def is_closing(self) -> bool:
        return False

    def answer(self, code: int, ext: dict[str, str] | None = None) -> None:
        opaque = self.asked.pop(0).opaque
        ext = STORED if ext is None else ext
        answer = Frame(code=code, opaque=opaque, flag=1, ext=ext, remark="r")
        self.connection.data_received(encode_frame(answer))

    def lose(self) -> None:
        """The connection ends before there was an answer."""
        self.asked.clear()
        self.connection.connection_lost(None)


class Clock:
    """The loop as a producer knows it, with a time that the test sets forward."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def time(self) -> float:
        return self._loop.time() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Cluster:
    """A started producer that knows two brokers with one queue each."""

    def __init__(self, **options: Any) -> None:
        self.producer = Producer("g", namesrv="127.0.0.1:1", **options)
        self.clock = Clock(asyncio.get_running_loop())
        self.producer.loop = self.clock  # type: ignore[assignment]
        self.producer.session.is_started = True
        names = ("a", "b")
        self.brokers = [Broker(self.producer, name) for name in names]
        queues = tuple(MessageQueue(TOPIC, name, 0) for name in names)
        ways = {name: BrokerOfRoute(name, "c", {0: f"{name}:1"}) for name in names}
        self.producer.routes[TOPIC] = Route(TOPIC, ways, queues, queues)

    def begin(self, **more: Any) -> asyncio.Task[SendResult]:
        return asyncio.create_task(self.producer.send(Message(TOPIC, b"x"), **more))

    async def asked(self) -> Broker:
        """The one broker that has a request now."""
        await asyncio.sleep(0.001)
        (one,) = [broker for broker in self.brokers if broker.asked]
        return one

    def left_alone_ms(self, broker: Broker) -> int:
        health = self.producer._health
        assert health is not None
        ailment = health._ailing.get(broker.name)
        return 0 if ailment is None else ailment.not_before_ms - int(self.clock.time() * 1e3)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def work() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(work())  # type: ignore[arg-type]


# ----------------------------------------------------------------------- stored, but not so safely


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([10, 1, 1], SendStatus.FLUSH_DISK_TIMEOUT),
        ([10, 13], SendStatus.FLUSH_DISK_TIMEOUT),  # a refusal after which none is tried
        ([10, 11, 1], SendStatus.SLAVE_NOT_AVAILABLE),  # the last that there was
        ([10, 12, 11], SendStatus.SLAVE_NOT_AVAILABLE),
        ([1, 10, 1], SendStatus.FLUSH_DISK_TIMEOUT),
        ([10, 1, 0], SendStatus.SEND_OK),
        ([10, 0], SendStatus.SEND_OK),
    ],
)
def test_a_weaker_status_is_the_result_if_nothing_better_comes(
    codes: list[int], status: SendStatus
) -> None:
    async def test() -> None:
        cluster = Cluster(retry_another_broker_when_not_stored=True)
        sending = cluster.begin()
        for code in codes:
            (await cluster.asked()).answer(code)
        result = await sending
        assert result.status is status
        assert result.offset_id == "M"
        assert cluster.producer.under_way == 0

    run(test)


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_weaker_status_is_tried_again_as_often_as_anything(retries: int) -> None:
    async def test() -> None:
        cluster = Cluster(retry_another_broker_when_not_stored=True, retries=retries)
        sending = cluster.begin()
        for _ in range(1 + retries):
            assert not sending.done()
            (await cluster.asked()).answer(12)
        assert (await sending).status is SendStatus.FLUSH_SLAVE_TIMEOUT

    run(test)


def test_no_time_for_another_attempt_leaves_the_weaker_status() -> None:
    async def test() -> None:
        cluster = Cluster(retry_another_broker_when_not_stored=True)
        sending = cluster.begin()
        (await cluster.asked()).answer(10)
        broker = await cluster.asked()
        cluster.clock.ahead_s = 10
        broker.lose()
        assert (await sending).status is SendStatus.FLUSH_DISK_TIMEOUT

    run(test)


@pytest.mark.parametrize("code", [0, 10])
def test_stored_without_a_place_is_maybe_stored(code: int) -> None:
    async def test() -> None:
        cluster = Cluster(retry_another_broker_when_not_stored=True)
        sending = cluster.begin()
        (await cluster.asked()).answer(code, {"queueId": "0"})
        if code:
            (await cluster.asked()).answer(13)
        with pytest.raises(SendFailed, match="an answer without 'msgId'") as failed:
            await sending
        assert failed.value.is_maybe_stored

    run(test)


# ------------------------------------------------------------------------------------- slow brokers


def test_each_attempt_has_its_own_latency() -> None:
    """The broker that helps at once is not blamed for the time that the first one took."""

    async def test() -> None:
        cluster = Cluster(avoid_slow_brokers=True)
        sending = cluster.begin()
        slow = await cluster.asked()
        cluster.clock.ahead_s = 2
        slow.lose()
        quick = await cluster.asked()
        assert quick is not slow
        quick.answer(0)
        await sending
        assert cluster.left_alone_ms(quick) == 0
        assert 9_000 < cluster.left_alone_ms(slow) <= 10_000

    run(test)


def test_a_slow_answer_counts_from_its_own_attempt() -> None:
    async def test() -> None:
        cluster = Cluster(avoid_slow_brokers=True)
        sending = cluster.begin()
        broker = await cluster.asked()
        cluster.clock.ahead_s = 0.6
        broker.answer(0)
        await sending
        assert 1_500 < cluster.left_alone_ms(broker) <= 2_000

    run(test)


@pytest.mark.parametrize("code", [1, 14, 13, 2])
def test_a_broker_that_refuses_is_left_alone(code: int) -> None:
    async def test() -> None:
        cluster = Cluster(avoid_slow_brokers=True, retries=0)
        sending = cluster.begin()
        broker = await cluster.asked()
        broker.answer(code)
        with pytest.raises(SendFailed):
            await sending
        assert 9_000 < cluster.left_alone_ms(broker) <= 10_000
        health = cluster.producer._health
        assert health is not None and health.is_reachable(broker.name)  # it has answered
        for _ in range(4):
            sending = cluster.begin()
            other = await cluster.asked()
            assert other is not broker
            other.answer(0)
            await sending

    run(test)
