"""SystemExit and KeyboardInterrupt in user code: raised where somebody waits, harming no one else.

All blocking clients of a process share one loop, which asyncio would stop for either of the two.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cometmq import Consumer, Message, Outcome, Producer, PullConsumer, TransactionProducer, aio
from cometmq.client.background import background
from cometmq.client.received import ReceivedMessage
from cometmq.testing.local import LocalBroker

EXITS = [SystemExit, KeyboardInterrupt]


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    settings = {"transactionTimeOut": "300", "transactionCheckInterval": "300"}
    with LocalBroker(store="memory", settings=settings) as running:
        running.create_topic("orders", queues=1)
        yield running


def until(claim: Callable[[], object], timeout_s: float = 10) -> None:
    give_up = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < give_up, "did not come true"
        time.sleep(0.01)


def within(act: Callable[[], object], timeout_s: float = 20) -> BaseException | None:
    """What it raises, on a thread of its own: one that hangs must not hang the tests."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "hangs"
    return raised[0] if raised else None


def handler_of(kind: type[BaseException], is_async: bool) -> Callable[[ReceivedMessage], object]:
    """Raises for the message "1"."""

    def plain(message: ReceivedMessage) -> None:
        if message.body == b"1":
            raise kind("from a handler")

    async def coroutine(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        plain(message)

    return coroutine if is_async else plain


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_handler_ends_run_and_nobody_else(
    broker: LocalBroker, kind: type[BaseException], is_async: bool, ordered: bool
) -> None:
    with Producer("shop", namesrv=broker.namesrv) as producer:
        for number in range(3):
            producer.send(Message("orders", b"%d" % number))

        def consume() -> None:
            with Consumer("g", namesrv=broker.namesrv, start="first", ordered=ordered) as consumer:
                consumer.subscribe("orders", handler_of(kind, is_async))
                consumer.run()

        error = within(consume)
        assert type(error) is kind and str(error) == "from a handler"
        assert within(lambda: producer.send(Message("orders", b"3"))) is None
        seen: list[bytes] = []
        with Consumer("g", namesrv=broker.namesrv, start="first", ordered=ordered) as consumer:
            consumer.subscribe("orders", lambda message: seen.append(message.body))
            consumer.start()
            until(lambda: b"3" in seen)
        assert b"1" in seen  # it was not acknowledged


@pytest.mark.parametrize("is_async", [False, True])
def test_the_asyncio_run_raises_it_too(broker: LocalBroker, is_async: bool) -> None:
    async def work() -> None:
        async with aio.Producer("shop", namesrv=broker.namesrv) as producer:
            await producer.send(Message("orders", b"1"))
        async with aio.Consumer("g", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders", handler_of(SystemExit, is_async))
            with pytest.raises(SystemExit, match="from a handler"):
                await consumer.run()

    asyncio.run(work())


def test_without_run_an_exit_ends_the_programs_own_loop_only(
    broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with Producer("shop", namesrv=broker.namesrv) as producer:
        producer.send(Message("orders", b"1"))
        with Consumer("g", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders", handler_of(SystemExit, is_async=True))
            consumer.start()
            until(lambda: "exit_ignored group=g" in caplog.text)
            assert within(lambda: producer.send(Message("orders", b"2"))) is None

    async def work() -> None:
        async with aio.Consumer("h", namesrv=broker.namesrv, start="first") as own:
            own.subscribe("orders", handler_of(SystemExit, is_async=True))
            await own.start()
            await asyncio.sleep(20)

    with pytest.raises(SystemExit, match="from a handler"):
        asyncio.run(work())


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_work_of_a_transaction_is_rolled_back(
    broker: LocalBroker, kind: type[BaseException], is_async: bool
) -> None:
    checked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> Outcome:
        checked.append(message)
        return Outcome.COMMIT

    def work(message: Message) -> None:
        raise kind("from work")

    async def coroutine(message: Message) -> None:
        work(message)

    with TransactionProducer("shop", check, namesrv=broker.namesrv) as producer:
        message = Message("orders", b"rolled back")
        error = within(lambda: producer.send(message, coroutine if is_async else work))
        assert type(error) is kind and str(error) == "from work"
        assert within(lambda: producer.send(Message("orders", b"kept"), lambda _: None)) is None
        time.sleep(1)
        with PullConsumer("g", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders")
            assert [one.body for one in consumer.poll()] == [b"kept"]
    assert not checked


def test_stop_iteration_in_the_work_of_a_transaction_is_an_error(broker: LocalBroker) -> None:
    with TransactionProducer("shop", lambda _: Outcome.UNKNOWN, namesrv=broker.namesrv) as one:
        error = within(lambda: one.send(Message("orders", b"x"), lambda _: next(iter(()))))
        assert isinstance(error, RuntimeError)  # what Python makes of it in a coroutine


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_check_that_exits_knows_nothing(
    broker: LocalBroker,
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
    is_async: bool,
) -> None:
    asked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> Outcome:
        asked.append(message)
        if len(asked) == 1:
            raise kind("from check")
        return Outcome.COMMIT

    async def coroutine(message: ReceivedMessage) -> Outcome:
        return check(message)

    with TransactionProducer(
        "shop", coroutine if is_async else check, namesrv=broker.namesrv
    ) as producer:
        message = Message("orders", b"asked for")
        assert within(lambda: producer.send(message, lambda _: Outcome.UNKNOWN)) is None
        until(lambda: len(asked) == 2)
        with PullConsumer("g", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders")
            assert [one.body for one in consumer.poll()] == [b"asked for"]
    assert "check_failed" in caplog.text


def test_a_callback_on_the_background_loop_does_not_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def leave() -> None:
        raise SystemExit("from a callback")

    async def alive() -> str:
        return "alive"

    background.get().call_soon_threadsafe(leave)
    found: list[str] = []
    assert within(lambda: found.append(background.run(alive()))) is None
    assert found == ["alive"] and "exit_ignored" in caplog.text
