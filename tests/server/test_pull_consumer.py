"""PullConsumer against a running CometMQ, over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime

import pytest

from cometmq.client.blocking_pull import PullConsumer as BlockingPullConsumer
from cometmq.client.in_flight import FlowLimits
from cometmq.client.pull_consumer import PullConsumer
from cometmq.client.reading import PullStatus
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.remote import Remote
from cometmq.errors import NoRoute, RequestRefused, Unreachable, UsageError
from cometmq.message import MessageQueue
from cometmq.testing.local import LocalBroker
from cometmq.wire import headers
from cometmq.wire.codes import RequestCode, ResponseCode
from programs import send

TOPIC = "orders"


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        running.create_topic(TOPIC, queues=4)
        yield running


def put(broker: LocalBroker, count: int, *, queue_id: int = -1, tag: str = "", at: int = 0) -> None:
    """So many messages with bodies `at`, `at + 1`, ..., over all four queues or into one."""
    with Remote(broker.broker_address) as remote:
        for number in range(at, at + count):
            where = number % 4 if queue_id < 0 else queue_id
            assert send(remote, TOPIC, b"%d" % number, queue_id=where, tag=tag).code == 0


def consumer(broker: LocalBroker, group: str = "group", **options: object) -> PullConsumer:
    return PullConsumer(group, namesrv=broker.namesrv, **options)


def queue(broker: LocalBroker, number: int) -> MessageQueue:
    return MessageQueue(TOPIC, broker.broker_name, number)


def numbers(messages: list[ReceivedMessage]) -> list[int]:
    return [int(one.body) for one in messages]


async def collect(one: PullConsumer, count: int, timeout_s: float = 10) -> list[int]:
    found: list[int] = []
    give_up = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < give_up:
        found += numbers(await one.poll(timeout_s=0.5))
    return found


async def until(holds: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10) -> None:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("did not come true")


# ------------------------------------------------------------------------------------------- poll


def test_poll_gives_every_message_in_the_order_of_its_queue(broker: LocalBroker) -> None:
    put(broker, 100)

    async def run() -> None:
        one = consumer(broker)
        one.subscribe(TOPIC)
        async with one:
            found = await collect(one, 100)
            assert sorted(found) == list(range(100))
            for number in range(4):
                mine = [each for each in found if each % 4 == number]
                assert mine == sorted(mine)
            assert await one.poll(timeout_s=0.2) == []

    asyncio.run(run())


def test_two_members_share_the_queues_and_one_takes_over(broker: LocalBroker) -> None:
    async def run() -> None:
        changes: list[tuple[int, int]] = []
        async with consumer(broker) as first:
            first.on_queues_changed = lambda gained, lost: changes.append((len(gained), len(lost)))
            first.subscribe(TOPIC)
            await until(lambda: len(first.assigned()) == 4)
            async with consumer(broker) as second:
                second.subscribe(TOPIC)
                await until(lambda: len(first.assigned()) == 2 == len(second.assigned()))
                assert not set(first.assigned()) & set(second.assigned())
                put(broker, 40)
                got = await asyncio.gather(collect(first, 20), collect(second, 20))
                assert sorted(got[0] + got[1]) == list(range(40))
                assert len(got[0]) == len(got[1]) == 20
            # The second has left, and said so: nobody waits for a timeout.
            await until(lambda: len(first.assigned()) == 4, 5)
            assert changes == [(4, 0), (0, 2), (2, 0)]
            put(broker, 8, at=100)
            found: set[int] = set()
            while not found >= set(range(100, 108)):  # after what the second has not confirmed
                more = await first.poll()
                assert more
                found |= set(numbers(more))

    asyncio.run(run())


def test_assigned_queues_only_and_no_membership(broker: LocalBroker) -> None:
    put(broker, 40)

    async def run() -> None:
        async with consumer(broker) as one:
            queues = await one.queues(TOPIC)
            assert queues == [queue(broker, number) for number in range(4)]
            await one.assign(queues[1:2])
            assert await collect(one, 10) == list(range(1, 40, 4))
            await one.assign(queues[2:3])
            assert await collect(one, 10) == list(range(2, 40, 4))
            assert one.assigned() == queues[2:3]
            with pytest.raises(UsageError, match="after assign"):
                one.subscribe(TOPIC)
            with Remote(broker.broker_address) as remote:
                code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
                assert remote.ask(code, {"consumerGroup": "group"}).code != 0

    asyncio.run(run())


def test_subscribe_then_assign_is_refused(broker: LocalBroker) -> None:
    async def run() -> None:
        async with consumer(broker) as one:
            one.subscribe(TOPIC)
            with pytest.raises(UsageError, match="after subscribe"):
                await one.assign([queue(broker, 0)])

    asyncio.run(run())


def test_tags_are_picked_and_positions_pass_what_is_left_out(broker: LocalBroker) -> None:
    put(broker, 10, queue_id=0, tag="blue")
    put(broker, 5, queue_id=0, tag="red", at=10)
    put(broker, 10, queue_id=0, tag="green", at=15)

    async def run() -> None:
        one = consumer(broker)
        one.subscribe(TOPIC, "red || purple")
        async with one:
            assert await collect(one, 5) == list(range(10, 15))
            await until(lambda: one.position(queue(broker, 0)) == 25)
            one.subscribe(TOPIC, "green")  # from here on
            put(broker, 1, queue_id=0, tag="green", at=30)
            put(broker, 1, queue_id=0, tag="red", at=31)
            assert await collect(one, 1) == [30]

    asyncio.run(run())


def test_tags_with_the_same_hash_are_told_apart(broker: LocalBroker) -> None:
    put(broker, 1, queue_id=0, tag="Aa")
    put(broker, 1, queue_id=0, tag="BB", at=1)

    async def run() -> None:
        async with consumer(broker) as one:
            pulled = await one.pull(queue(broker, 0), 0, tags="BB")
            assert numbers(pulled.messages) == [1]
            assert (await one.pull(queue(broker, 0), 0, 1, tags="BB")).next_offset == 1

    asyncio.run(run())


def test_one_message_at_a_time(broker: LocalBroker) -> None:
    put(broker, 20, queue_id=3)

    async def run() -> None:
        found = []
        async with consumer(broker) as one:
            one.subscribe(TOPIC)
            async for message in one:
                found.append(int(message.body))
                if len(found) == 20:
                    break
            assert one.position(queue(broker, 3)) == 20
        assert found == list(range(20))
        async with consumer(broker) as one:
            assert await one.committed(queue(broker, 3)) == 19  # the last one was never confirmed

    asyncio.run(run())


# -------------------------------------------------------------------- the blocking one, iterated


def loop_of(one: BlockingPullConsumer, count: int) -> list[int]:
    """So many messages of a `for` that is left with `break`; a loop that lacks some is ended."""
    found: list[int] = []
    give_up = threading.Timer(15, one.close)
    give_up.start()
    for message in one:
        found.append(int(message.body))
        if len(found) == count:
            break
    give_up.cancel()
    return found


def blocking(broker: LocalBroker, **options: object) -> BlockingPullConsumer:
    return BlockingPullConsumer("group", namesrv=broker.namesrv, start="first", **options)


def test_a_loop_that_is_left_commits_only_what_it_handed_out(broker: LocalBroker) -> None:
    put(broker, 10, queue_id=0)
    with blocking(broker) as one:
        one.subscribe(TOPIC)
        assert loop_of(one, 3) == [0, 1, 2]
        one.commit()
        assert one.committed(queue(broker, 0)) == 3
    with blocking(broker) as one:
        one.subscribe(TOPIC)
        assert loop_of(one, 2) == [3, 4]  # and close: the last one is not known to be done
    with blocking(broker) as one:
        one.subscribe(TOPIC)
        assert loop_of(one, 6) == [4, 5, 6, 7, 8, 9]


def test_a_loop_that_is_left_loses_nothing_to_polls_and_later_loops(broker: LocalBroker) -> None:
    put(broker, 12)
    with blocking(broker) as one:
        one.subscribe(TOPIC)
        found = loop_of(one, 3) + loop_of(one, 1) + numbers(one.poll(most=2)) + loop_of(one, 2)
        while len(found) < 12:
            found += numbers(one.poll())
    assert sorted(found) == list(range(12))
    for first in range(4):
        of_queue = [number for number in found if number % 4 == first]
        assert of_queue == sorted(of_queue)


def test_seek_pause_and_position_count_within_a_loop(broker: LocalBroker) -> None:
    put(broker, 6, queue_id=0)
    put(broker, 6, queue_id=1, at=10)
    with blocking(broker) as one:
        zero, other = queue(broker, 0), queue(broker, 1)
        one.assign([zero, other])
        one.pause([other])
        one.seek(zero, 0)
        found: list[int] = []
        for message in one:
            found.append(int(message.body))
            if found == [0, 1]:
                assert one.position(zero) == 2
                one.seek(zero, 4)
            if found == [0, 1, 4]:
                one.pause([zero])
                one.resume([other])
            if len(found) == 5:
                break
        assert found == [0, 1, 4, 10, 11]
        one.commit()
        assert (one.committed(zero), one.committed(other)) == (5, 2)


def test_auto_commit_within_a_loop_never_passes_the_message_in_hand(broker: LocalBroker) -> None:
    put(broker, 10, queue_id=0)
    with blocking(broker, auto_commit_s=0.05) as one:
        one.subscribe(TOPIC)
        loop = iter(one)
        assert [int(next(loop).body) for _ in range(4)] == [0, 1, 2, 3]
        give_up = time.monotonic() + 10
        while one.committed(queue(broker, 0)) != 3 and time.monotonic() < give_up:
            time.sleep(0.02)
        time.sleep(0.2)
        assert one.committed(queue(broker, 0)) == 3
        assert [int(next(loop).body) for _ in range(6)] == [4, 5, 6, 7, 8, 9]


def test_close_on_another_thread_ends_a_loop(broker: LocalBroker) -> None:
    put(broker, 10, queue_id=0)
    with blocking(broker) as one:
        one.subscribe(TOPIC)
        found: list[int] = []
        for message in one:
            found.append(int(message.body))
            if len(found) == 4:
                closing = threading.Thread(target=one.close)
                closing.start()
                closing.join(10)
    assert found == [0, 1, 2, 3]


def test_a_waiting_poll_wakes_at_once(broker: LocalBroker) -> None:
    async def run() -> None:
        async with consumer(broker) as one:
            await one.assign([queue(broker, 0)])
            waiting = asyncio.create_task(one.poll(timeout_s=10))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            sent_at = time.monotonic()
            await asyncio.to_thread(put, broker, 1, queue_id=0)
            assert numbers(await waiting) == [0]
            assert time.monotonic() - sent_at < 5  # woken: it would have waited ten

    asyncio.run(run())


def test_two_polls_at_a_time_are_refused_and_close_ends_a_waiting_one(broker: LocalBroker) -> None:
    async def run() -> None:
        one = consumer(broker)
        with pytest.raises(UsageError, match="not started"):
            await one.poll()
        await one.start()
        waiting = asyncio.create_task(one.poll(timeout_s=30))
        await asyncio.sleep(0.1)
        with pytest.raises(UsageError, match="another poll"):
            await one.poll()
        await one.close()
        assert await asyncio.wait_for(waiting, 2) == []
        with pytest.raises(UsageError, match="closed"):
            await one.poll()
        assert [message async for message in one] == []

    asyncio.run(run())


# -------------------------------------------------------------------------------------- positions


def test_seek(broker: LocalBroker) -> None:
    put(broker, 50, queue_id=0)

    async def run() -> None:
        async with consumer(broker) as one:
            zero = queue(broker, 0)
            await one.assign([zero])
            assert await collect(one, 50) == list(range(50))
            one.seek(zero, 45)
            assert one.position(zero) == 45
            assert await collect(one, 5) == list(range(45, 50))
            await one.seek_to_begin(zero)
            assert (await collect(one, 50))[:2] == [0, 1]
            one.seek(zero, 10)
            await one.seek_to_end()
            put(broker, 1, queue_id=0, at=70)
            assert await collect(one, 1) == [70]
            one.seek(zero, 10_000)  # there is no such offset: the end
            await until(lambda: one.position(zero) == 51)
            with pytest.raises(UsageError, match="not assigned"):
                one.seek(queue(broker, 1), 0)
            with pytest.raises(UsageError, match="0 or more"):
                one.seek(zero, -1)

    asyncio.run(run())


def test_a_new_owner_may_seek_before_anything_is_read(broker: LocalBroker) -> None:
    put(broker, 40)

    async def run() -> None:
        one = consumer(broker)
        one.subscribe(TOPIC)

        async def changed(gained: list[MessageQueue], lost: list[MessageQueue]) -> None:
            await one.seek_to_end(*gained)

        one.on_queues_changed = changed
        async with one:
            put(broker, 4, at=100)
            assert sorted(await collect(one, 4)) == [100, 101, 102, 103]

    asyncio.run(run())


def test_paused_queues_give_nothing_until_resumed(broker: LocalBroker) -> None:
    put(broker, 40)

    async def run() -> None:
        async with consumer(broker) as one:
            queues = await one.queues(TOPIC)
            await one.assign(queues)
            await until(lambda: one._fetching._count == 40)
            one.pause(queues[:2])  # although their messages are here already
            found = await collect(one, 40, timeout_s=1)
            assert sorted(found) == [each for each in range(40) if each % 4 >= 2]
            one.resume(queues[:1])
            assert await collect(one, 10) == list(range(0, 40, 4))
            put(broker, 4, at=40)
            assert sorted(await collect(one, 4, timeout_s=1)) == [40, 42, 43]
            one.resume(queues)
            assert await collect(one, 11) == list(range(1, 44, 4))

    asyncio.run(run())


def test_offsets_by_time_and_ends(broker: LocalBroker) -> None:
    put(broker, 10, queue_id=0)
    time.sleep(0.05)
    middle = datetime.now(UTC)
    time.sleep(0.05)
    put(broker, 5, queue_id=0, at=10)

    async def run() -> None:
        zero = queue(broker, 0)
        async with consumer(broker) as one:
            assert await one.begin_offset(zero) == 0
            assert await one.end_offset(zero) == 15
            assert await one.offset_for_time(zero, middle) == 10
            assert await one.offset_for_time(zero, int(middle.timestamp() * 1000)) == 10
            assert await one.offset_for_time(zero, 0) == 0
            assert await one.offset_for_time(zero, time.time_ns() // 10**6 + 60_000) == 15
        async with consumer(broker, "fresh", start=middle) as one:
            await one.assign([zero])
            assert await collect(one, 5) == list(range(10, 15))

    asyncio.run(run())


# ---------------------------------------------------------------------------------------- commits


def test_commit_and_resume_after_a_restart(broker: LocalBroker) -> None:
    put(broker, 100, queue_id=0)

    async def run() -> None:
        zero = queue(broker, 0)
        async with consumer(broker, auto_commit=False) as one:
            await one.assign([zero])
            assert await one.committed(zero) is None
            assert numbers(await one.poll(most=30)) == list(range(30))
            await one.commit()
            assert await one.committed(zero) == 30
            await one.poll(most=10)
        broker.restart()
        async with consumer(broker, auto_commit=False) as one:
            assert await one.committed(zero) == 30
            await one.assign([zero])
            assert numbers(await one.poll(most=5)) == list(range(30, 35))
            await one.commit({zero: 7, queue(broker, 1): 0})
            assert await one.committed(zero) == 7
        async with consumer(broker) as one:  # auto commit does not undo it
            await one.assign([zero])
            assert numbers(await one.poll(most=5)) == list(range(7, 12))
            await one.commit({zero: 9})
            await one._commit_confirmed(one._flows.values())
            assert await one.committed(zero) == 9
            await one.commit()
        async with consumer(broker) as one:
            assert await one.committed(zero) == 12
            with pytest.raises(UsageError, match="0 or more"):
                await one.commit({zero: -1})

    asyncio.run(run())


def test_auto_commit_never_passes_what_the_last_poll_gave(broker: LocalBroker) -> None:
    put(broker, 100, queue_id=0)

    async def run() -> None:
        zero = queue(broker, 0)
        async with consumer(broker, "watcher") as watcher:
            watcher._reader.group = "group"
            async with consumer(broker, auto_commit_s=0.05) as one:
                await one.assign([zero])
                assert len(await one.poll(most=10)) == 10
                await asyncio.sleep(0.3)
                assert await watcher.committed(zero) == 0
                assert len(await one.poll(most=5)) == 5
                await asyncio.sleep(0.3)
                assert await watcher.committed(zero) == 10
                one.pause([zero])
                one.resume([zero])
                await asyncio.sleep(0.3)
                assert await watcher.committed(zero) == 10
                await one.poll(most=85)
                await until(lambda: _is(watcher.committed(zero), 15))
            assert await watcher.committed(zero) == 15  # nor does closing commit it

    asyncio.run(run())


async def _is(asked: Awaitable[object], value: object) -> bool:
    return await asked == value


def test_a_lost_queue_keeps_what_was_not_confirmed(broker: LocalBroker) -> None:
    """The next owner gets again what the last poll of the former owner gave."""
    put(broker, 40)

    async def run() -> None:
        first = consumer(broker, auto_commit_s=0.1)
        first.subscribe(TOPIC)
        async with first:
            assert len(await collect(first, 40)) == 40
            await first.poll(timeout_s=0)  # confirms all
            put(broker, 4, at=40)
            await until(lambda: first._fetching._count == 4)
            assert sorted(numbers(await first.poll())) == [40, 41, 42, 43]
            await asyncio.sleep(0.3)
            async with consumer(broker) as second:
                second.subscribe(TOPIC)
                again = await collect(second, 2, timeout_s=5)
                assert again in ([40, 41], [41, 40], [42, 43], [43, 42])
            assert first.position(first.assigned()[0]) == 11

    asyncio.run(run())


def test_another_filter_confirms_nothing(broker: LocalBroker) -> None:
    put(broker, 20, queue_id=0, tag="red")

    async def run() -> None:
        zero = queue(broker, 0)
        one = consumer(broker, auto_commit_s=0.05)
        one.subscribe(TOPIC)
        async with one:
            assert len(await one.poll(most=5)) == 5
            one.subscribe(TOPIC, "red")
            await asyncio.sleep(0.3)
            assert await one.committed(zero) == 0
            assert await collect(one, 15) == list(range(5, 20))

    asyncio.run(run())


def test_a_commit_that_fails_is_said_and_made_up_for(broker: LocalBroker) -> None:
    put(broker, 20, queue_id=0)

    async def run() -> None:
        zero = queue(broker, 0)
        async with consumer(broker, auto_commit_s=0.2) as one:
            await one.assign([zero])
            await one.poll()
            broker.fail(RequestCode.UPDATE_CONSUMER_OFFSET, times=2)
            with pytest.raises(RequestRefused, match="LocalBroker"):
                await one.commit()
            await one.poll(timeout_s=0)
            await until(lambda: _is(one.committed(zero), 20))

    asyncio.run(run())


def test_an_offset_that_is_reset_counts_at_once(broker: LocalBroker) -> None:
    put(broker, 40, queue_id=0)

    async def run() -> None:
        one = consumer(broker, auto_commit_s=0.1)
        one.subscribe(TOPIC)
        async with one:
            assert len(await collect(one, 40)) == 40
            await one.poll(timeout_s=0)
            await until(lambda: _is(one.committed(queue(broker, 0)), 40))
            header = headers.ResetOffsetHeader(TOPIC, "group", queueId=0, offset=30)
            with Remote(broker.broker_address) as remote:
                remote.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, headers.to_ext(header))
            put(broker, 1, queue_id=0, at=40)  # wakes the pull that the broker holds
            found = await collect(one, 12, timeout_s=3)
            assert found[-11:] == list(range(30, 41))
            await one.poll(timeout_s=0)
            await until(lambda: _is(one.committed(queue(broker, 0)), 41))

    asyncio.run(run())


def test_names_within_a_namespace(broker: LocalBroker) -> None:
    broker.create_topic("space%things", queues=1)
    with Remote(broker.broker_address) as remote:
        assert send(remote, "space%things", b"1").code == 0

    async def run() -> None:
        one = consumer(broker, namespace="space")
        one.subscribe("things")
        async with one:
            (message,) = await one.poll()
            assert (message.topic, message.stored_topic) == ("things", "space%things")
            (mine,) = await one.queues("things")
            assert one.position(mine) == one.position(MessageQueue("things", mine.broker, 0)) == 1
            await one.commit()
        async with consumer(broker, "space%group") as other:
            assert await other.committed(MessageQueue("space%things", mine.broker, 0)) == 1

    asyncio.run(run())


# ------------------------------------------------------------------------------------- plain pull


def test_the_outcomes_of_a_plain_pull(broker: LocalBroker) -> None:
    put(broker, 40, queue_id=0, tag="blue")

    async def run() -> None:
        zero = queue(broker, 0)
        async with consumer(broker) as one:
            pulled = await one.pull(zero, 5, most=10)
            assert pulled.status is PullStatus.FOUND
            assert numbers(pulled.messages) == list(range(5, 15))
            assert (pulled.next_offset, pulled.min_offset, pulled.max_offset) == (15, 0, 40)
            assert pulled.messages[0].queue == zero
            assert pulled.messages[0].queue_offset == 5

            raw = await one.pull_raw(zero, 5, most=10)
            assert numbers(read_all(raw.body, zero.broker)) == list(range(5, 15))

            pulled = await one.pull(zero, 40)
            assert (pulled.status, pulled.messages) == (PullStatus.NO_NEW, [])
            assert pulled.next_offset == 40
            pulled = await one.pull(zero, 0, tags="red")
            assert (pulled.status, pulled.messages) == (PullStatus.NO_MATCH, [])
            assert pulled.next_offset > 0
            pulled = await one.pull(zero, 41)
            assert (pulled.status, pulled.next_offset) == (PullStatus.OFFSET_ILLEGAL, 40)

            with pytest.raises(RequestRefused) as refused:
                await one.pull(queue(broker, 99), 0)
            assert refused.value.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.INVALID_PARAMETER)
            with pytest.raises(NoRoute):
                await one.pull(MessageQueue("nowhere", broker.broker_name, 0), 0)
            with pytest.raises(UsageError):
                await one.pull(zero, -1)

    asyncio.run(run())


def test_a_plain_pull_may_wait(broker: LocalBroker) -> None:
    async def run() -> None:
        zero = queue(broker, 0)
        async with consumer(broker) as one:
            began = time.monotonic()
            pulled = await one.pull(zero, 0, suspend_ms=300)
            assert pulled.status is PullStatus.NO_NEW
            assert 0.25 < time.monotonic() - began < 6
            waiting = asyncio.create_task(one.pull(zero, 0, suspend_ms=10_000))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            await asyncio.to_thread(put, broker, 1, queue_id=0)
            assert numbers((await waiting).messages) == [0]
            assert time.monotonic() - began < 5  # woken: it would have waited ten

    asyncio.run(run())


def test_sql_is_sent_with_the_pull(broker: LocalBroker) -> None:
    put(broker, 2, queue_id=0, tag="red")
    put(broker, 2, queue_id=0, tag="blue", at=2)

    async def run() -> None:
        async with consumer(broker) as one:
            pulled = await one.pull(queue(broker, 0), 0, sql="TAGS = 'blue'")
            assert [message.tags for message in pulled.messages] == ["blue", "blue"]
            with pytest.raises(RequestRefused) as refused:
                await one.pull(queue(broker, 0), 0, sql="TAGS = = 'blue'")
            assert refused.value.code == 23
            with pytest.raises(UsageError, match="choose one"):
                await one.pull(queue(broker, 0), 0, tags="a", sql="TAGS = 'blue'")
        polling = consumer(broker, "sql")
        polling.subscribe(TOPIC, sql="TAGS = 'blue'")
        async with polling:
            found = await polling.poll(timeout_s=5)
            assert {message.tags for message in found} == {"blue"}

    asyncio.run(run())


def test_a_refusal_is_said_aloud_and_not_an_empty_answer_for_ever() -> None:
    with LocalBroker(store="memory", settings={"enablePropertyFilter": "false"}) as broker:
        broker.create_topic(TOPIC, queues=2)

        async def run() -> None:
            polling = consumer(broker, "sql")
            polling.subscribe(TOPIC, sql="TAGS = 'blue'")
            async with polling:
                with pytest.raises(RequestRefused):
                    await polling.poll(timeout_s=1)

        asyncio.run(run())


# ---------------------------------------------------------------------------------------- trouble


def test_a_broker_restarted_in_the_middle(broker: LocalBroker) -> None:
    put(broker, 40)

    async def run() -> None:
        one = consumer(broker, auto_commit_s=0.1)
        one.subscribe(TOPIC)
        async with one:
            found = await collect(one, 40)
            await one.poll(timeout_s=0)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(broker.restart)
            put(broker, 40, at=40)
            found += await collect(one, 40, timeout_s=15)
            assert sorted(set(found)) == list(range(80))
            await asyncio.to_thread(broker.cut_connections)
            put(broker, 4, at=80)
            assert set(await collect(one, 4)) >= {80, 81, 82, 83}

    asyncio.run(run())


def test_a_topic_that_comes_later_is_waited_for(broker: LocalBroker) -> None:
    async def run() -> None:
        one = consumer(broker)
        one.subscribe("later")
        async with one:
            assert await one.poll(timeout_s=0.2) == []
            broker.create_topic("later", queues=1)
            with Remote(broker.broker_address) as remote:
                assert send(remote, "later", b"7").code == 0
            assert await collect(one, 1) == [7]

    asyncio.run(run())


def test_no_name_server_is_said_at_the_start() -> None:
    async def run() -> None:
        one = PullConsumer("group", namesrv="127.0.0.1:1")
        one.subscribe(TOPIC)
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            await one.start()

    asyncio.run(run())


def test_what_is_fetched_ahead_is_bounded(broker: LocalBroker) -> None:
    put(broker, 800)

    async def run() -> None:
        limits = FlowLimits(message_count=50)
        async with consumer(broker, limits=limits, pull_count=10) as one:
            await one.assign(await one.queues(TOPIC))
            await asyncio.sleep(0.5)
            assert one._fetching._count == 4 * 50
            assert all(flow.count == 50 for flow in one._flows.values())
            assert sorted(await collect(one, 800)) == list(range(800))
        async with consumer(broker, "all", messages_for_all=100, pull_count=10) as one:
            await one.assign(await one.queues(TOPIC))
            await asyncio.sleep(0.5)
            assert 100 <= one._fetching._count < 100 + 4 * 10
            assert sorted(await collect(one, 800)) == list(range(800))
        async with consumer(broker, "size", limits=FlowLimits(size_bytes=500), pull_count=1) as one:
            await one.assign([queue(broker, 0)])
            await asyncio.sleep(0.5)
            assert 2 < one._fetching._count < 10
            assert await collect(one, 200) == list(range(0, 800, 4))
        async with consumer(broker, "span", limits=FlowLimits(span=20), pull_count=1) as one:
            await one.assign([queue(broker, 0)])
            await asyncio.sleep(0.5)
            assert one._fetching._count == 21
            assert await collect(one, 200) == list(range(0, 800, 4))

    asyncio.run(run())


def test_wrong_options_are_named() -> None:
    for wrong in ({"start": "middle"}, {"nonsense": 1}, {"pull_count": 0}):
        with pytest.raises(UsageError):
            PullConsumer("group", namesrv="127.0.0.1:1", **wrong)
    with pytest.raises(UsageError):
        PullConsumer("", namesrv="127.0.0.1:1")
