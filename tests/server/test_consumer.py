"""The consumer against a real broker over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import rebalance, settling
from cometmq.client.consumer import Consumer
from cometmq.client.handling import Later
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote import Remote
from cometmq.client.send_back import SendBack
from cometmq.client.workers import Outcome
from cometmq.errors import UsageError
from cometmq.message import MessageQueue
from cometmq.testing.local import LocalBroker
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import RequestCode, ResponseCode
from programs import send

QUEUES = 4


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        running.create_topic("orders", queues=QUEUES)
        yield running


def run(work: Coroutine[Any, Any, None], timeout_s: float = 40) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await work

    asyncio.run(bounded())


def fill(broker: LocalBroker, count: int, *, topic: str = "orders", tag: str = "") -> list[bytes]:
    """`count` messages spread over the queues; their bodies."""
    sent = [f"{tag}{number}".encode() for number in range(count)]
    with Remote(broker.broker_address) as remote:
        for number, body in enumerate(sent):
            assert send(remote, topic, body, queue_id=number % QUEUES, tag=tag).code == 0
    return sent


async def until(claim: Callable[[], object], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not claim():
            await asyncio.sleep(0.005)


def committed(broker: LocalBroker, group: str, topic: str = "orders") -> list[int]:
    """The group's offset of each queue; -1 where there is none."""
    found = []
    with Remote(broker.broker_address) as remote:
        for number in range(QUEUES):
            ext = {"consumerGroup": group, "topic": topic, "queueId": str(number)}
            ext["setZeroIfNotFound"] = "false"
            answer = remote.ask(RequestCode.QUERY_CONSUMER_OFFSET, ext)
            found.append(int(answer.ext["offset"]) if answer.code == 0 else -1)
    return found


class Seen:
    """A plain handler that remembers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.messages: list[ReceivedMessage] = []

    def __call__(self, message: ReceivedMessage) -> None:
        self.bodies.append(message.body)
        self.messages.append(message)

    @property
    def count(self) -> int:
        return len(self.bodies)


def test_every_message_comes_once(broker: LocalBroker) -> None:
    sent, seen = fill(broker, 500), Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, start="first") as consumer:
            assert repr(consumer) == (
                f"<Consumer billing topics= queues=0 not started {broker.namesrv}>"
            )
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            assert repr(consumer) == (
                f"<Consumer billing topics=orders queues=5 running {broker.namesrv}>"
            )
            await until(lambda: seen.count >= len(sent))
            more = await asyncio.to_thread(fill, broker, 50, tag="more")
            sent.extend(more)
            await until(lambda: seen.count >= len(sent))
            await asyncio.sleep(0.05)
            assert consumer.stats.handled == len(sent)
        assert repr(consumer).endswith(f" closed {broker.namesrv}>")

    run(work())
    assert Counter(seen.bodies) == Counter(sent)
    one = seen.messages[0]
    assert one.topic == "orders"
    assert one.broker == broker.broker_name
    assert committed(broker, "billing") == [(500 + 50) // 4 + (number < 2) for number in range(4)]
    left = [one.name for one in threading.enumerate() if one.name.startswith("consumer-")]
    assert not left or _ends(left)


def _ends(names: list[str]) -> bool:
    give_up = time.monotonic() + 2
    while time.monotonic() < give_up:
        if not {one.name for one in threading.enumerate()} & set(names):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("waits", [False, True])
def test_async_handlers_run_side_by_side(broker: LocalBroker, waits: bool) -> None:
    sent = fill(broker, 200)
    seen: list[bytes] = []
    at_once, most = 0, 0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if waits:
            await asyncio.sleep(0.01)
        at_once -= 1
        seen.append(message.body)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, concurrency=7) as consumer:
            consumer.subscribe("orders", handle)
            await consumer.start()
            await until(lambda: len(seen) >= len(sent))

    run(work())
    assert Counter(seen) == Counter(sent)
    assert most == (7 if waits else 1)


def test_slow_plain_handlers_get_all_threads(broker: LocalBroker) -> None:
    sent, seen = fill(broker, 60), Seen()
    names = set()

    def handle(message: ReceivedMessage) -> None:
        time.sleep(0.2)
        names.add(threading.current_thread().name)
        seen(message)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, concurrency=20) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            began = time.monotonic()
            await until(lambda: seen.count >= len(sent))
            assert time.monotonic() - began < 6  # one thread would need 12 s

    run(work())
    assert len(names) == 20


def test_batches_come_as_lists(broker: LocalBroker) -> None:
    sent = fill(broker, 100)
    seen: list[bytes] = []
    sizes: list[int] = []

    def handle(messages: list[ReceivedMessage]) -> None:
        assert len({one.queue_id for one in messages}) == 1
        sizes.append(len(messages))
        seen.extend(one.body for one in messages)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, batch=10) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            await until(lambda: len(seen) >= len(sent))

    run(work())
    assert Counter(seen) == Counter(sent)
    assert max(sizes) == 10
    assert committed(broker, "billing") == [25] * 4


def test_tags_choose(broker: LocalBroker) -> None:
    paid, opened = fill(broker, 20, tag="paid"), fill(broker, 20, tag="opened")
    refunded = fill(broker, 20, tag="refunded")
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "paid || refunded", seen)
            await consumer.start()
            await until(lambda: seen.count >= 40)
            await asyncio.sleep(0.1)

    run(work())
    assert Counter(seen.bodies) == Counter(paid + refunded)
    assert not set(opened) & set(seen.bodies)
    assert committed(broker, "billing") == [15] * 4  # also past what was filtered


def test_tags_with_the_same_hash_are_told_apart(broker: LocalBroker) -> None:
    fill(broker, 4, tag="Aa")
    wanted, seen = fill(broker, 4, tag="BB"), Seen()  # "Aa" and "BB" have one Java hash

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "BB", seen)
            await consumer.start()
            await until(lambda: seen.count >= 4)
            await asyncio.sleep(0.05)

    run(work())
    assert Counter(seen.bodies) == Counter(wanted)
    assert committed(broker, "billing") == [2] * 4


def test_two_share_and_one_takes_over_after_a_close(broker: LocalBroker) -> None:
    first, second = Seen(), Seen()

    async def work() -> None:
        one = Consumer("billing", namesrv=broker.namesrv)
        two = Consumer("billing", namesrv=broker.namesrv)
        one.subscribe("orders", "*", first)
        two.subscribe("orders", "*", second)
        await one.start()
        await two.start()

        def of_topic(consumer: Consumer) -> set[int]:
            return {queue.queue_id for queue in consumer.queues if queue.topic == "orders"}

        await until(lambda: len(of_topic(one)) == len(of_topic(two)) == 2)
        assert of_topic(one) | of_topic(two) == {0, 1, 2, 3}
        sent = await asyncio.to_thread(fill, broker, 100)
        await until(lambda: first.count + second.count >= 100)
        assert Counter(first.bodies + second.bodies) == Counter(sent)
        assert first.count == second.count == 50
        await asyncio.sleep(1)
        began = time.monotonic()
        await one.close()
        more = await asyncio.to_thread(fill, broker, 100, tag="more")
        await until(lambda: second.count >= 150)
        assert time.monotonic() - began < 5  # at once, not with the rebalance of every 20 s
        assert Counter(first.bodies + second.bodies) == Counter(sent + more)
        await two.close()

    run(work())


@pytest.mark.parametrize("how", ["raises", "later", "forgotten await"])
def test_a_failing_handler_keeps_its_message(
    broker: LocalBroker, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settling, "HAND_AGAIN_S", 0.2)
    sent = fill(broker, 40)
    broker.fail(RequestCode.CONSUMER_SEND_MSG_BACK, times=1000)
    broker.fail(RequestCode.SEND_MESSAGE_V2, times=1000)
    tries: list[int] = []
    seen = Seen()

    async def late(message: ReceivedMessage) -> None:
        seen(message)

    def handle(message: ReceivedMessage) -> object:
        if message.body != b"5":
            seen(message)
            return "any value acknowledges"
        tries.append(message.reconsume_times)
        if how == "raises":
            raise ValueError("not this one")
        return Later() if how == "later" else late(message)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            await until(lambda: seen.count >= 39 and len(tries) >= 3)
            await consumer.rebalance.store_offsets(waits=True)
            assert committed(broker, "billing") == [10, 1, 10, 10]  # "5" is the second of queue 1

    run(work())
    assert tries[:3] == [0, 1, 2]
    assert Counter(seen.bodies) == Counter(sent) - Counter([b"5"])
    assert committed(broker, "billing") == [10, 1, 10, 10]
    assert sum("send_back_failed" in record.message for record in caplog.records) == 1
    seen.bodies.clear()

    async def after_restart() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            await until(lambda: seen.count >= 9)

    run(after_restart())
    assert committed(broker, "billing") == [10] * 4


def test_a_cancelled_handler_acknowledges_nothing(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "HAND_AGAIN_S", 0.2)
    fill(broker, 1)
    tries = 0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise asyncio.CancelledError

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            await until(lambda: tries == 1)
            await consumer.rebalance.store_offsets(waits=True)
            assert committed(broker, "billing")[0] <= 0
            await until(lambda: tries == 3)

    run(work())
    assert committed(broker, "billing")[0] == 1


def test_an_interrupt_in_a_handler_ends_run(broker: LocalBroker) -> None:
    fill(broker, 1)

    def handle(message: ReceivedMessage) -> None:
        raise SystemExit(3)

    async def work() -> None:
        consumer = Consumer("billing", namesrv=broker.namesrv)
        consumer.subscribe("orders", "*", handle)
        with pytest.raises(BaseException) as caught:
            await consumer.run()
        assert caught.type is SystemExit

    run(work())
    assert committed(broker, "billing")[0] <= 0


_TERMINATED = """
import asyncio, signal, sys
from cometmq.aio import Consumer

async def handle(message):
    print("handled", flush=True)

async def main():
    if sys.argv[2] == "own":
        say = lambda: print("own", flush=True)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, say)
    one = Consumer("billing", namesrv=sys.argv[1], start="first")
    other = Consumer("shipping", namesrv=sys.argv[1], start="first")
    one.subscribe("orders", handle)
    other.subscribe("orders", handle)
    async with asyncio.TaskGroup() as group:
        group.create_task(one.run())
        group.create_task(other.run())
        if sys.argv[2] == "own":
            await asyncio.sleep(3)
            await one.close()
            await other.close()

asyncio.run(main())
print("ended", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
"""


@pytest.mark.parametrize("handled_by", ["us", "own"])
def test_the_asyncio_run_ends_on_sigterm(broker: LocalBroker, handled_by: str) -> None:
    """All consumers of the loop close in good order; a program's own handler is left alone."""
    fill(broker, 1)
    command = [sys.executable, "-c", _TERMINATED, broker.namesrv, handled_by]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)] == ["handled\n"] * 2
        program.send_signal(signal.SIGTERM)
        try:
            rest, _ = program.communicate(timeout=20)
        finally:
            program.kill()
    expected = "ended True\n" if handled_by == "us" else "own\nended True\n"
    assert (program.returncode, rest) == (0, expected)
    assert committed(broker, "billing")[0] == committed(broker, "shipping")[0] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_ordered_handles_each_queue_in_order_and_a_failure_first(
    broker: LocalBroker, is_async: bool
) -> None:
    fill(broker, 200)
    seen: dict[int, list[int]] = {number: [] for number in range(QUEUES)}
    tries: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        if message.queue_id == 2 and message.queue_offset == 10 and len(tries) < 3:
            tries.append(message.reconsume_times)
            raise ValueError("not yet")
        seen[message.queue_id].append(message.queue_offset)

    async def handle_async(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        handle(message)

    async def work() -> None:
        consumer = Consumer("billing", namesrv=broker.namesrv, ordered=True, suspend_ms=20)
        consumer.subscribe("orders", "*", handle_async if is_async else handle)
        async with consumer:
            await consumer.start()
            await until(lambda: sum(map(len, seen.values())) >= 200)

    run(work())
    assert tries == [0, 1, 2]
    assert list(seen.values()) == [list(range(50))] * 4
    assert committed(broker, "billing") == [50] * 4


def test_ordered_queues_change_hands_in_order(broker: LocalBroker) -> None:
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()
    at_work: set[int] = set()

    def handle(message: ReceivedMessage) -> None:
        with lock:
            assert message.queue_id not in at_work
            at_work.add(message.queue_id)
        time.sleep(0.002)
        with lock:
            at_work.discard(message.queue_id)
            seen.append((message.queue_id, message.queue_offset))

    async def work() -> None:
        fill_later = asyncio.create_task(asyncio.to_thread(fill, broker, 2000))
        one = Consumer("billing", namesrv=broker.namesrv, ordered=True)
        two = Consumer("billing", namesrv=broker.namesrv, ordered=True)
        one.subscribe("orders", "*", handle)
        two.subscribe("orders", "*", handle)
        await one.start()
        await until(lambda: len(seen) > 100)
        await two.start()
        await until(lambda: len(two.queues) >= 2)
        await asyncio.sleep(0.3)
        await one.close()
        await fill_later
        await until(lambda: len(seen) >= 2000, 20)
        await two.close()

    run(work())
    for number in range(QUEUES):
        offsets = [offset for queue_id, offset in seen if queue_id == number]
        assert offsets == list(range(500))


def test_broadcasting_gives_all_to_each_and_resumes_from_its_file(
    broker: LocalBroker, tmp_path: Path
) -> None:
    sent = fill(broker, 40)

    def member(name: str, seen: Seen) -> Consumer:
        consumer = Consumer(
            "billing",
            namesrv=broker.namesrv,
            model="broadcasting",
            start="first",
            instance=name,
            offsets_folder=tmp_path,
        )
        consumer.subscribe("orders", "*", seen)
        return consumer

    first, second = Seen(), Seen()

    async def work() -> None:
        async with member("a", first) as one, member("b", second) as two:
            await one.start()
            await two.start()
            await until(lambda: first.count >= 40 and second.count >= 40)

    run(work())
    assert Counter(first.bodies) == Counter(second.bodies) == Counter(sent)
    assert committed(broker, "billing") == [-1] * 4
    assert len(list(tmp_path.glob("*/billing/offsets.json"))) == 2
    more, again = fill(broker, 8, tag="more"), Seen()

    async def after_restart() -> None:
        async with member("a", again) as one:
            await one.start()
            await until(lambda: again.count >= 8)
            await asyncio.sleep(0.05)

    run(after_restart())
    assert Counter(again.bodies) == Counter(more)


def test_a_failure_in_broadcasting_is_counted_and_passed(
    broker: LocalBroker, tmp_path: Path
) -> None:
    fill(broker, 4)
    calls: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        calls.append(message.body)
        raise ValueError("no")

    async def work() -> None:
        consumer = Consumer(
            "billing",
            namesrv=broker.namesrv,
            model="broadcasting",
            start="first",
            offsets_folder=tmp_path,
        )
        consumer.subscribe("orders", "*", handle)
        async with consumer:
            await consumer.start()
            await until(lambda: consumer.stats.lost_in_broadcast == 4)

    run(work())
    assert len(calls) == 4


def test_a_group_that_has_consumed_nothing_is_seen(broker: LocalBroker) -> None:
    """Its offsets of empty queues are stored as well: lag is told from them."""

    async def work() -> None:
        async with Consumer("idle", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders", "*", lambda message: None)
            await consumer.start()
            await until(lambda: len(consumer.queues) >= QUEUES)
            async with asyncio.timeout(20):
                while await asyncio.to_thread(committed, broker, "idle") != [0] * QUEUES:
                    await asyncio.sleep(0.1)

    run(work())


def test_offsets_are_resumed_after_a_restart(broker: LocalBroker) -> None:
    fill(broker, 40)
    for start, expected in (("first", 40), ("last", 8), ("first", 8)):
        seen = Seen()
        new = [] if expected == 40 else fill(broker, 8, tag=str(start))

        async def work(
            seen: Seen = seen, new: list[bytes] = new, start: Any = start, expected: int = expected
        ) -> None:
            async with Consumer("billing", namesrv=broker.namesrv, start=start) as consumer:
                consumer.subscribe("orders", "*", seen)
                await consumer.start()
                await until(lambda: seen.count >= expected)
                await asyncio.sleep(0.05)
            assert not new or Counter(seen.bodies) == Counter(new)
            assert seen.count == expected

        run(work())


def test_a_new_group_may_start_at_a_time(broker: LocalBroker) -> None:
    fill(broker, 8)
    # The broker answers 0 for a group without an offset while a queue is young; asked directly:
    seen = Seen()
    tomorrow = datetime.now(UTC) + timedelta(days=1)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, start=tomorrow) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            queue = MessageQueue("orders", broker.broker_name, 0)
            assert await consumer.start_rule.offset(queue) == 2
            retry = MessageQueue("%RETRY%billing", broker.broker_name, 0)
            assert await consumer.start_rule.offset(retry) == 0

    run(work())


def test_close_lets_handlers_end_and_drops_what_had_not_begun(broker: LocalBroker) -> None:
    fill(broker, 40)
    began, seen = threading.Event(), Seen()

    def handle(message: ReceivedMessage) -> None:
        began.set()
        time.sleep(0.3)
        seen(message)

    async def work() -> None:
        consumer = Consumer("billing", namesrv=broker.namesrv, concurrency=2)
        consumer.subscribe("orders", "*", handle)
        running = asyncio.create_task(consumer.run())
        await until(began.is_set)
        await consumer.close()
        assert running.done() or not await asyncio.wait_for(running, 1)
        assert 1 <= seen.count <= 4
        at_close = seen.count
        await asyncio.sleep(0.4)
        assert seen.count == at_close

    run(work())
    done = {(one.queue_id, one.queue_offset) for one in seen.messages}
    for number, offset in enumerate(committed(broker, "billing")):
        assert all((number, below) in done for below in range(offset))


def test_close_cancels_async_handlers_only_after_its_timeout(broker: LocalBroker) -> None:
    fill(broker, 1)
    began = asyncio.Event()
    ends: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        began.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def work() -> None:
        consumer = Consumer("billing", namesrv=broker.namesrv, close_timeout_s=0.2)
        consumer.subscribe("orders", "*", handle)
        await consumer.start()
        await until(began.is_set)
        await consumer.close()

    run(work())
    assert ends == ["cancelled"]
    assert committed(broker, "billing")[0] <= 0


def test_run_ends_when_cancelled(broker: LocalBroker) -> None:
    async def work() -> None:
        consumer = Consumer("billing", namesrv=broker.namesrv)
        consumer.subscribe("orders", "*", Seen())
        running = asyncio.create_task(consumer.run())
        await until(lambda: consumer.queues)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert repr(consumer).endswith(f" closed {broker.namesrv}>")
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert [task for task in tasks if "consumer" in repr(task)] == []

    run(work())


def test_a_broker_may_die_and_come_back(
    broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            sent = await asyncio.to_thread(fill, broker, 40)
            await until(lambda: seen.count >= 40)
            await asyncio.to_thread(broker.restart, kill=True)
            sent += await asyncio.to_thread(fill, broker, 40, tag="after")
            await until(lambda: set(sent) <= set(seen.bodies), 20)
            assert seen.count <= 120
        assert committed(broker, "billing") == [20] * 4

    run(work())
    said = [one.message for one in caplog.records if "pull_failed" in one.message]
    assert len(said) <= 3 * (QUEUES + 1)


def test_cut_connections_are_made_again(broker: LocalBroker) -> None:
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            for number in range(3):
                sent = await asyncio.to_thread(fill, broker, 20, tag=str(number))
                await until(lambda sent=sent: set(sent) <= set(seen.bodies))
                await asyncio.to_thread(broker.cut_connections)

    run(work())


def test_a_reset_of_the_broker_is_followed(broker: LocalBroker) -> None:
    sent, seen = fill(broker, 40), Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            await until(lambda: seen.count >= 40)
            await consumer.rebalance.store_offsets(waits=True)
            ext = {"topic": "orders", "group": "billing", "timestamp": "0", "isForce": "true"}
            with Remote(broker.broker_address) as remote:
                remote.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
            await asyncio.to_thread(fill, broker, 4, tag="wake")  # ends the long polls
            await until(lambda: seen.count >= 84)
            assert Counter(seen.bodies)[sent[0]] == 2
        assert committed(broker, "billing") == [11] * 4

    run(work())


def test_requests_of_the_broker_are_answered(broker: LocalBroker) -> None:
    fill(broker, 40)
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            await until(lambda: seen.count >= 40 and consumer.stats.handled >= 40)
            client_id = consumer.session.client_id

            def ask() -> dict[str, Any]:
                ext = {"consumerGroup": "billing", "clientId": client_id, "jstackEnable": "true"}
                with Remote(broker.broker_address) as remote:
                    answer = remote.call(RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
                return dict(bodies.load_object(answer.body, "running info"))

            told = await asyncio.to_thread(ask)
            assert told["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
            assert told["properties"]["PROP_CONSUMEORDERLY"] == "false"
            assert {one["topic"] for one in told["subscriptionSet"]} == {"orders", "%RETRY%billing"}
            assert len(told["mqTable"]) == 5
            key = bodies.queue_key("orders", broker.broker_name, 1)
            assert told["mqTable"][key]["commitOffset"] == 10
            assert "Thread" in told["jstack"] and "task" in told["jstack"]
            assert json.dumps(told["statusTable"]["orders"])

    run(work())


class _FakeConnection:
    """Takes the answers of the consumer."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def reply(self, frame: Any) -> None:
        self.answers.append(frame)


def test_reset_status_and_direct_consumption(broker: LocalBroker) -> None:
    """220, 221 and 309, which CometMQ's broker does not send yet."""
    from cometmq.wire.frame import Frame

    fill(broker, 40)
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            await until(lambda: consumer.stats.handled >= 40)
            fake = _FakeConnection()

            async def ask(code: int, ext: dict[str, str], body: bytes = b"") -> Frame:
                fake.answers.clear()
                consumer.session._requested(fake, Frame(code, ext=ext, body=body))  # type: ignore[arg-type]
                await until(lambda: fake.answers)
                return fake.answers[0]  # type: ignore[no-any-return]

            names = {"topic": "orders", "group": "billing"}
            answer = await ask(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, names)
            table = bodies.load_object(answer.body, "status")["messageQueueTable"]
            assert sorted(table.values()) == [10] * 4

            key = bodies.queue_key("orders", broker.broker_name, 2)
            body = fastjson.dumps({"offsetTable": {key: 4}})
            reset = {**names, "timestamp": "0", "isForce": "true"}
            await ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset, body)
            await until(lambda: seen.count >= 46)
            await asyncio.sleep(0.05)
            assert seen.count == 46
            wrong = await ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {**reset, "group": "x"})
            assert wrong.code == ResponseCode.SYSTEM_ERROR

            with Remote(broker.broker_address) as remote:
                one = {"offset": str(seen.messages[0].log_offset)}
                record = remote.call(RequestCode.VIEW_MESSAGE_BY_ID, one).body
            group = {"consumerGroup": "billing", "brokerName": broker.broker_name}
            answer = await ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, group, record)
            assert bodies.load_object(answer.body, "result")["consumeResult"] == "CR_SUCCESS"
            assert seen.count == 47

    run(work())


def test_a_topic_without_route_is_waited_for(
    broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("not-yet", "*", seen)
            await consumer.start()
            await asyncio.sleep(2.5)
            await asyncio.to_thread(broker.create_topic, "not-yet", queues=QUEUES)
            sent = await asyncio.to_thread(fill, broker, 4, topic="not-yet")
            await until(lambda: seen.count >= 4)
            assert Counter(seen.bodies) == Counter(sent)

    run(work())
    said = [one.message for one in caplog.records if "topic_awaited" in one.message]
    assert len(said) == 1
    assert "does not exist" in said[0]


def test_subscriptions_may_change_while_it_runs(broker: LocalBroker) -> None:
    broker.create_topic("bills", queues=QUEUES)
    orders, bills = Seen(), Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", orders)
            await consumer.start()
            await asyncio.sleep(1)
            consumer.subscribe("bills", "paid", bills)
            await asyncio.to_thread(fill, broker, 8, topic="bills", tag="paid")
            await asyncio.to_thread(fill, broker, 8, topic="bills", tag="open")
            await until(lambda: bills.count >= 8)
            consumer.unsubscribe("orders")
            await until(
                lambda: {one.topic for one in consumer.queues} == {"bills", "%RETRY%billing"}
            )

    run(work())
    assert bills.count == 8


def test_a_paused_consumer_keeps_its_queues_and_asks_for_nothing(broker: LocalBroker) -> None:
    async def work() -> None:
        seen = Seen()
        async with Consumer("pausing", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders", seen)
            consumer.pause()
            await consumer.start()
            first = fill(broker, 40)
            await asyncio.sleep(0.3)
            assert len(consumer.queues) == QUEUES + 1 and "(paused)" in repr(consumer)
            assert seen.bodies == []
            consumer.resume()
            await until(lambda: sorted(seen.bodies) == sorted(first))
            consumer.pause()
            fill(broker, QUEUES, tag="under-way-")  # the pulls that are held may still bring these
            await until(lambda: len(seen.bodies) == 40 + QUEUES)
            later = fill(broker, 40, tag="later-")
            await asyncio.sleep(0.3)
            assert len(seen.bodies) == 40 + QUEUES
            consumer.resume()
            await until(lambda: set(later) <= set(seen.bodies))
            assert len(seen.bodies) == 80 + QUEUES

    run(work())


def test_hooks_hear_of_each_call(broker: LocalBroker) -> None:
    fill(broker, 8)
    told: list[tuple[int, Outcome]] = []

    def hook(messages: list[ReceivedMessage], outcome: Outcome, began: int, ended: int) -> None:
        assert 0 <= ended - began < 5_000
        told.append((len(messages), outcome))

    def handle(message: ReceivedMessage) -> object:
        if message.body == b"1":
            raise ValueError("no")
        return Later() if message.body == b"2" else None

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.on_handled.append(hook)
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            await until(lambda: len(told) >= 8)

    run(work())
    assert Counter(told) == {(1, Outcome.DONE): 6, (1, Outcome.FAILED): 1, (1, Outcome.LATER): 1}


def test_a_handler_that_takes_too_long_loses_its_message(broker: LocalBroker) -> None:
    fill(broker, 1)
    go_on = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        go_on.wait(10)

    async def work() -> None:
        consumer = Consumer("billing", namesrv=broker.namesrv, consume_timeout_s=0.3)
        consumer.subscribe("orders", "*", handle)
        back: list[tuple[int, int]] = []

        async def take_back(message: ReceivedMessage, level: int) -> bool:
            back.append((message.queue_offset, level))
            return True

        consumer._retry.back = take_back  # type: ignore[method-assign]
        async with consumer:
            await consumer.start()
            await until(lambda: consumer.stats.timed_out == 1)
            assert back == [(0, 3)]
            go_on.set()

    run(work())
    assert committed(broker, "billing")[0] == 1


def test_flow_control_stops_pulling(broker: LocalBroker) -> None:
    from cometmq.client.in_flight import FlowLimits

    fill(broker, 400)
    go_on, seen = threading.Event(), Seen()

    def handle(message: ReceivedMessage) -> None:
        go_on.wait(10)
        seen(message)

    async def work() -> None:
        limits = FlowLimits(message_count=20)
        consumer = Consumer("billing", namesrv=broker.namesrv, limits=limits, pull_batch=10)
        consumer.subscribe("orders", "*", handle)
        async with consumer:
            await consumer.start()
            await until(lambda: consumer.flow_waits > 8)
            assert all(one.window.message_count <= 30 for one in consumer.owned.values())
            go_on.set()
            await until(lambda: seen.count >= 400)

    run(work())


def test_namespaces_are_unseen_by_handlers(broker: LocalBroker) -> None:
    broker.create_topic("space%orders", queues=QUEUES)
    fill(broker, 8, topic="space%orders")
    seen = Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, namespace="space") as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            await until(lambda: seen.count >= 8)

    run(work())
    assert {one.topic for one in seen.messages} == {"orders"}
    assert committed(broker, "space%billing", "space%orders") == [2] * 4


def test_mistakes_are_told_before_anything_is_sent() -> None:
    for words in (
        {"model": "both"},
        {"start": "middle"},
        {"batch": 0},
        {"concurrency": 0},
        {"no_such_option": 1},
    ):
        with pytest.raises(UsageError):
            Consumer("billing", namesrv="127.0.0.1:1", **words)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Consumer("", namesrv="127.0.0.1:1")
    consumer = Consumer("billing", namesrv="127.0.0.1:1")
    with pytest.raises(UsageError):
        consumer.subscribe("orders")
    with pytest.raises(UsageError):
        consumer.subscribe("orders", "paid", print, sql="a > 5")


def _skip_without_retries(broker: LocalBroker) -> None:
    with Remote(broker.broker_address) as remote:
        answer = remote.ask(RequestCode.CONSUMER_SEND_MSG_BACK, {})
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        pytest.skip("this broker takes no messages back")


@pytest.mark.parametrize("way", ["asked", "copied"])
def test_a_failed_message_comes_back_from_the_retry_topic(broker: LocalBroker, way: str) -> None:
    _skip_without_retries(broker)
    fill(broker, 8)
    if way == "copied":  # the broker refuses to take it back: a copy is sent, as late as was asked
        broker.fail(RequestCode.CONSUMER_SEND_MSG_BACK, times=1)
    tries: list[tuple[str, str, int]] = []
    seen = Seen()

    def handle(message: ReceivedMessage) -> object:
        if message.body != b"5":
            return seen(message)
        tries.append((message.topic, message.stored_topic, message.reconsume_times))
        return Later(delay_level=1) if len(tries) == 1 else None

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            await until(lambda: len(tries) == 1 and seen.count == 7)
            await until(lambda: consumer.stats.sent_back == 1)
            await consumer.rebalance.store_offsets(waits=True)
            assert committed(broker, "billing") == [2] * 4
            await until(lambda: len(tries) == 2, 7)  # in a second: the count alone would say 10

    run(work())
    assert tries == [("orders", "orders", 0), ("orders", "%RETRY%billing", 1)]


def test_a_copy_may_be_the_last_try(broker: LocalBroker) -> None:
    """Later(-1), and a broker that takes nothing back: the copy goes to the dead letters."""
    fill(broker, 1)
    broker.fail(RequestCode.CONSUMER_SEND_MSG_BACK, times=1)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", lambda message: Later(delay_level=-1))
            await consumer.start()
            await until(lambda: consumer.stats.sent_back == 1)

    run(work())
    with Remote(broker.broker_address) as remote:
        where = {"topic": "%DLQ%billing", "queueId": "0"}
        assert remote.ask(RequestCode.GET_MAX_OFFSET, where).ext["offset"] == "1"


def test_nothing_is_lost_while_members_come_and_go(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "HAND_AGAIN_S", 0.1)
    seen = Seen()
    failed: set[bytes] = set()

    async def refuse(self: SendBack, message: ReceivedMessage, level: int) -> bool:
        return False

    monkeypatch.setattr(SendBack, "back", refuse)

    def handle(message: ReceivedMessage) -> None:
        if message.body.endswith(b"7") and message.body not in failed:
            failed.add(message.body)
            raise ValueError("once")
        seen(message)

    async def member(stay_s: float) -> None:
        async with Consumer("billing", namesrv=broker.namesrv, concurrency=4) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            await asyncio.sleep(stay_s)

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, concurrency=4) as consumer:
            consumer.subscribe("orders", "*", handle)
            await consumer.start()
            filling = asyncio.create_task(asyncio.to_thread(fill, broker, 8000))
            for number in range(3):
                await asyncio.gather(member(0.7), member(0.4 + number / 10))
            sent = await filling
            await asyncio.to_thread(broker.cut_connections)
            sent += await asyncio.to_thread(fill, broker, 400, tag="more")
            await until(lambda: set(sent) <= set(seen.bodies), 20)

    run(work(), 60)
    with Remote(broker.broker_address) as remote:
        ends = [
            int(
                remote.call(
                    RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": str(number)}
                ).ext["offset"]
            )
            for number in range(QUEUES)
        ]
    assert all(
        offset <= end for offset, end in zip(committed(broker, "billing"), ends, strict=True)
    )


def test_ordered_gives_up_after_its_last_try(broker: LocalBroker) -> None:
    fill(broker, 8)
    tries: list[int] = []
    seen = Seen()

    def handle(message: ReceivedMessage) -> None:
        if message.body == b"1":
            tries.append(message.reconsume_times)
            raise ValueError("never")
        seen(message)

    async def work() -> None:
        consumer = Consumer(
            "billing", namesrv=broker.namesrv, ordered=True, suspend_ms=10, max_reconsume_times=2
        )
        consumer.subscribe("orders", "*", handle)
        copies: list[int] = []

        async def take(message: ReceivedMessage, *, max_times: int) -> None:
            copies.append(max_times)

        consumer._retry.send = take  # type: ignore[method-assign]
        async with consumer:
            await consumer.start()
            await until(lambda: seen.count == 7 and consumer.stats.sent_back == 1)
        assert copies == [2]

    run(work())
    assert tries == [0, 1, 2]
    assert committed(broker, "billing") == [2] * 4


def test_it_runs_on_uvloop(broker: LocalBroker) -> None:
    uvloop = pytest.importorskip("uvloop")
    sent, seen = fill(broker, 100), Seen()

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            await until(lambda: seen.count >= 100)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    assert Counter(seen.bodies) == Counter(sent)


def test_a_lock_that_was_lost_is_noticed_and_taken_again(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebalance, "LOCK_S", 0.1)
    seen = Seen()

    def change(code: int, client_id: str) -> None:
        queue = {"brokerName": broker.broker_name, "queueId": 1, "topic": "orders"}
        body = {"clientId": client_id, "consumerGroup": "billing", "mqSet": [queue]}
        with Remote(broker.broker_address) as remote:
            remote.call(code, {}, fastjson.dumps(body))

    async def work() -> None:
        async with Consumer("billing", namesrv=broker.namesrv, ordered=True) as consumer:
            consumer.subscribe("orders", "*", seen)
            await consumer.start()
            queue = MessageQueue("orders", broker.broker_name, 1)
            first = consumer.owned[queue].locked_at
            await until(lambda: consumer.owned[queue].locked_at != first)
            change(RequestCode.UNLOCK_BATCH_MQ, consumer.session.client_id)
            change(RequestCode.LOCK_BATCH_MQ, "thief")
            await until(lambda: queue not in consumer.queues)
            sent = await asyncio.to_thread(fill, broker, 8)
            await until(lambda: seen.count == 6)
            await asyncio.sleep(0.1)
            assert {one.queue_id for one in seen.messages} == {0, 2, 3}
            change(RequestCode.UNLOCK_BATCH_MQ, "thief")
            await until(lambda: seen.count == 8)
            assert Counter(seen.bodies) == Counter(sent)

    run(work())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_suspended_queue_is_left_alone_until_its_time(
    broker: LocalBroker, is_async: bool
) -> None:
    calls: list[float] = []

    def handle(message: ReceivedMessage) -> Later:
        calls.append(time.monotonic())
        return Later(delay_ms=300)

    async def handle_async(message: ReceivedMessage) -> Later:
        return handle(message)

    async def main() -> None:
        with Remote(broker.broker_address) as remote:
            send(remote, "orders", b"again", queue_id=0)
        async with Consumer("g", namesrv=broker.namesrv, ordered=True, start="first") as consumer:
            consumer.subscribe("orders", handle_async if is_async else handle)
            await consumer.start()
            await until(lambda: len(calls) >= 4)

    run(main())
    gaps = [after - before for before, after in itertools.pairwise(calls)]
    assert all(0.29 < gap < 1 for gap in gaps[:3]), gaps


def test_a_prefix_chooses_on_both_sides(broker: LocalBroker) -> None:
    seen = Seen()

    async def main() -> None:
        for tag in ("test-1", "test-2", "other"):
            fill(broker, 4, tag=tag)
        async with Consumer("g", namesrv=broker.namesrv, start="first") as consumer:
            consumer.subscribe("orders", "test-* || paid", seen)
            await consumer.start()
            await until(lambda: len(seen.messages) >= 8)
            await asyncio.sleep(0.2)

    run(main())
    assert Counter(one.tags for one in seen.messages) == {"test-1": 4, "test-2": 4}
