"""The producer against a real broker: what is sent is there, what fails says why."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cometmq.client import blocking
from cometmq.client.outgoing import split_batch
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.remote import Remote
from cometmq.client.selector import hash_of
from cometmq.errors import BodyError, NoRoute, SendFailed, Unreachable, UsageError, WindowFull
from cometmq.message import Message, MessageQueue, SendResult, SendStatus
from cometmq.testing.local import LocalBroker
from cometmq.testing.proxy import Proxy
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode
from cometmq.wire.frame import Frame


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory") as one:
        yield one


def stored(broker: LocalBroker, topic: str, queues: int = 4) -> list[ReceivedMessage]:
    """Everything in a topic, queue by queue, read the plainest way."""
    found: list[ReceivedMessage] = []
    with Remote(broker.broker_address) as remote:
        for queue_id in range(queues):
            offset = 0
            while True:
                ext = {
                    "consumerGroup": "reader",
                    "topic": topic,
                    "queueId": str(queue_id),
                    "queueOffset": str(offset),
                    "maxMsgNums": "32",
                    "sysFlag": str(PullFlag.SUBSCRIPTION),
                    "commitOffset": "0",
                    "suspendTimeoutMillis": "0",
                    "subscription": "*",
                    "subVersion": "0",
                }
                answer = remote.ask(RequestCode.PULL_MESSAGE, ext)
                if answer.code != 0:
                    break
                found += read_all(answer.body, broker.broker_name)
                offset = int(answer.ext["nextBeginOffset"])
    return found


def test_what_is_sent_is_stored_as_it_was(broker: LocalBroker) -> None:
    broker.create_topic("whole", queues=4)
    message = Message(
        "whole", b"\x00body\xff", tags="paid", keys=["o-1", "o-2"], properties={"färbe": "grün"}
    )
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        result = producer.send(message)
        assert result.status is SendStatus.SEND_OK
    (found,) = stored(broker, "whole")
    assert found.body == b"\x00body\xff"
    assert (found.tags, found.keys) == ("paid", ["o-1", "o-2"])
    assert found.properties["färbe"] == "grün"
    assert (found.message_id, found.offset_id) == (result.message_id, result.offset_id)
    assert (found.queue_id, found.queue_offset) == (result.queue.queue_id, result.queue_offset)


def test_queues_take_turns(broker: LocalBroker) -> None:
    broker.create_topic("turns", queues=4)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        ids = [producer.send(Message("turns", b"x")).queue.queue_id for _ in range(8)]
    assert sorted(ids) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert ids[:4] == ids[4:]


def test_each_thread_goes_round_all_queues(broker: LocalBroker) -> None:
    """However its sends alternate with those of others, and with those to other topics."""
    broker.create_topic("rounds", queues=4)
    broker.create_topic("rounds-2", queues=4)
    seen: dict[int, list[int]] = {0: [], 1: []}
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    kinds: list[Callable[[Message], SendResult]] = []

    def work(mine: int) -> None:
        for send in kinds:
            for _ in range(4):
                assert turns[mine].acquire(timeout=5)
                seen[mine].append(send(Message("rounds", b"x")).queue.queue_id)
                send(Message("rounds-2", b"x"))
                turns[1 - mine].release()

    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        kinds = [
            producer.send,
            lambda one: producer.send_async(one).result(5),
            lambda one: producer.send_batch([one]),
        ]
        threads = [threading.Thread(target=work, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for ids in seen.values():
        assert len(ids) == 12
        assert all(sorted(ids[at : at + 4]) == [0, 1, 2, 3] for at in (0, 4, 8))
        assert ids[:4] == ids[4:8]


def test_each_thread_goes_round_all_queues_oneway(broker: LocalBroker) -> None:
    broker.create_topic("rounds-1", queues=4)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        for n in range(4):
            producer.send_oneway(Message("rounds-1", b"here"))
            other = threading.Thread(
                target=lambda: producer.send_oneway(Message("rounds-1", b"there"))
            )
            other.start()
            other.join()
            producer.send(Message("rounds", b"%d" % n))
    time.sleep(0.1)
    found = [one.queue_id for one in stored(broker, "rounds-1") if one.body == b"here"]
    assert found == [0, 1, 2, 3]


def test_a_selector_a_sharding_key_and_a_queue_decide(broker: LocalBroker) -> None:
    broker.create_topic("chosen", queues=4)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        by_key = {
            producer.send(Message("chosen", b"x", sharding_key="customer-7")).queue
            for _ in range(5)
        }
        queues = producer.queues("chosen")
        assert by_key == {hash_of("customer-7")(queues)}
        last = producer.send(Message("chosen", b"x"), selector=lambda all_: all_[-1])
        assert last.queue == queues[-1]
        given = MessageQueue("chosen", broker.broker_name, 2)
        assert producer.send(Message("chosen", b"x"), queue=given).queue == given
        with pytest.raises(UsageError, match="selector returned None"):
            producer.send(Message("chosen", b"x"), selector=lambda all_: None)  # type: ignore


def test_a_batch_is_stored_together_and_too_much_is_cut(broker: LocalBroker) -> None:
    broker.create_topic("batch", queues=1)
    messages = [Message("batch", b"%d" % n, tags="t", keys=f"k{n}") for n in range(100)]
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        result = producer.send_batch(messages[:10])
        assert result.message_id.count(",") == 9
        for part in split_batch(messages[10:], most_count=7):
            producer.send_batch(part)
        with pytest.raises(UsageError, match="one topic"):
            producer.send_batch([Message("batch", b"1"), Message("other", b"2")])
        with pytest.raises(UsageError, match="split_batch"):
            producer.send_batch([Message("batch", b"x" * 3_000_000)] * 2)
    found = stored(broker, "batch", 1)
    assert [one.body for one in found] == [b"%d" % n for n in range(100)]
    assert ",".join(one.message_id for one in found[:10]) == result.message_id


def test_large_bodies_travel_compressed_and_arrive_whole(broker: LocalBroker) -> None:
    broker.create_topic("large", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        producer.send(Message("large", b"abc" * 5_000))
        producer.send(Message("large", b"abc" * 10))
    whole, small = stored(broker, "large", 1)
    assert whole.body == b"abc" * 5_000
    assert whole.sys_flag & 1
    assert whole.size < 1_000
    assert not small.sys_flag & 1


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message("orders", b""), "must not be empty"),
        (Message("orders", "text"), "got str; use .encode"),  # type: ignore[arg-type]
        (Message("orders", b"x" * 5_000_000), "5000000 bytes; at most 4194304"),
        (Message("", b"x"), "topic must be a text"),
        (Message("a b", b"x"), "only letters, digits"),
        (Message("t" * 128, b"x"), "128 characters; at most 127"),
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), "belongs to the system"),
        (Message("orders", b"x", tags="a||b"), "one tag"),
        (Message("orders", b"x", tags="a\x01b"), "byte 1 or 2"),
        (Message("orders", b"x", properties={"KEYS": "k"}), "use the field keys"),
        (Message("orders", b"x", properties={"a": ""}), "not empty"),
        (Message("orders", b"x", properties={"a": "x" * 40_000}), "at most 32767"),
        (Message("orders", b"x", delay_level=19), "must be 1 to 18"),
        (Message("orders", b"x", keys=["a b"]), "one word"),
        (Message("orders", b"x", flag="1"), "flag '1' must be a whole number"),  # type: ignore[arg-type]
        (Message("orders", b"x", flag=None), "flag None must be a whole number"),  # type: ignore[arg-type]
        (Message("orders", b"x", flag=2**31), "flag 2147483648 .* of 32 bits"),
        (Message("orders", b"x", unique_id="a\x02TAGS\x01b"), "unique_id .* byte 1 or 2"),
        (Message("orders", b"x", unique_id="a\x01b", delay_level=1), "unique_id .* byte 1 or 2"),
        (Message("orders", b"x", unique_id=7), "unique_id 7 must be a text"),  # type: ignore[arg-type]
        (Message("orders", b"x", tags=["a"]), r"tags \['a'\] must be a text"),  # type: ignore[arg-type]
        (Message("orders", b"x", tags=None), "tags None must be a text"),  # type: ignore[arg-type]
        (Message("orders", b"x", sharding_key=7), "sharding_key 7 must be a text"),  # type: ignore[arg-type]
        (Message("orders", b"x", keys=[7]), "key 7: a key is one word"),  # type: ignore[list-item]
        (Message("orders", b"x", delay_level="3"), "delay_level '3'; must be 1 to 18"),  # type: ignore[arg-type]
        (Message("orders", b"x", deliver_at=3), "deliver_at 3 must be a datetime"),  # type: ignore[arg-type]
        (Message("orders", b"x", ttl=3), "ttl 3 must be a timedelta"),  # type: ignore[arg-type]
        (Message("orders", b"x", properties={7: "x"}), "property 7='x'"),  # type: ignore[dict-item]
        (Message("orders", b"x", properties=["a"]), "must be a dict of texts"),  # type: ignore[arg-type]
    ],
)
def test_what_can_never_be_sent_is_refused_before(
    broker: LocalBroker, message: Message, why: str
) -> None:
    with (
        blocking.Producer("shop", namesrv=broker.namesrv) as producer,
        pytest.raises(UsageError, match=why),
    ):
        producer.send(message)


@pytest.mark.parametrize(
    ("queue_id", "why"),
    [("0", "whole number"), (None, "whole number"), (-1, "from 0 on"), (True, "whole number")],
)
def test_a_queue_that_is_none_is_refused_and_stops_nobody(
    broker: LocalBroker, queue_id: Any, why: str
) -> None:
    broker.create_topic("queues", queues=1)
    wrong = MessageQueue("queues", broker.broker_name, queue_id)
    other = MessageQueue("other", broker.broker_name, 0)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        with pytest.raises(UsageError, match=why):
            producer.send(Message("queues", b"x"), queue=wrong)
        with pytest.raises(UsageError, match=f"the selector returned .*{why}"):
            producer.send(Message("queues", b"x"), selector=lambda _: wrong)
        with pytest.raises(UsageError, match=r"selector returned .* of another topic"):
            producer.send(Message("queues", b"x"), selector=lambda _: other)
        with pytest.raises(UsageError, match="which is not a MessageQueue"):
            producer.send(Message("queues", b"x"), queue=("queues", "b", 0))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=why):
            producer.send_batch([Message("queues", b"x")], queue=wrong)
        assert producer.send_async(Message("queues", b"x")).result(5)
        assert producer._inner.under_way == 0


def test_a_batch_checks_each_message(broker: LocalBroker) -> None:
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        for wrong in ({"flag": "1"}, {"unique_id": "a\x01b"}):
            with pytest.raises(UsageError, match=next(iter(wrong))):
                producer.send_batch([Message("orders", b"x"), Message("orders", b"x", **wrong)])  # type: ignore[arg-type]


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_send_that_breaks_is_the_only_one_that_ends_so(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, is_warm: bool
) -> None:
    """What no check foresees: one of several that are begun together can't be made into bytes; with
    a connection there already, and while all of them wait for one."""
    broker.create_topic("breaks", queues=1)
    real = Producer.make

    def make(self: Producer, message: Message, *more: Any, **keywords: Any) -> Any:
        sending = real(self, message, *more, **keywords)
        if message.body == b"2":
            sending.born_ms = "never"  # type: ignore[assignment]
        return sending

    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        for _ in range(4 if is_warm else 0):
            producer.send(Message("breaks", b"warm"))
        monkeypatch.setattr(Producer, "make", make)
        futures = [producer.send_async(Message("breaks", b"%d" % n)) for n in range(5)]
        assert isinstance(futures[2].exception(5), TypeError)
        for future in futures[:2] + futures[3:]:
            assert future.result(5).status is SendStatus.SEND_OK
        assert producer._inner.under_way == 0


def test_no_route_tells_the_cause() -> None:
    with (
        LocalBroker(store="memory", settings={"autoCreateTopicEnable": "false"}) as broker,
        blocking.Producer("shop", namesrv=broker.namesrv) as producer,
    ):
        with pytest.raises(NoRoute) as failed:
            producer.send(Message("orders", b"x"))
        assert str(failed.value) == (
            f"no route for topic 'orders': name server {broker.namesrv} answered, topic does not "
            f"exist, auto-creation is off on {broker.broker_name} (autoCreateTopicEnable)"
        )


def test_a_topic_is_made_by_its_first_message(broker: LocalBroker) -> None:
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        assert producer.send(Message("made-by-sending", b"x")).status is SendStatus.SEND_OK
    assert len(stored(broker, "made-by-sending")) == 1


def test_no_name_server_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"  # nobody listens
        with (
            blocking.Producer("shop", namesrv=address, send_timeout_ms=500) as producer,
            pytest.raises(SendFailed, match=f"no name server answered.*{address} refused"),
        ):
            producer.send(Message("orders", b"x"))


def test_a_broker_that_can_not_be_reached_is_named_with_who_says_so() -> None:
    with LocalBroker(store="memory", settings={"brokerIP1": "127.0.0.9"}) as broker:
        port = broker.broker_address.rpartition(":")[2]
        with blocking.Producer("shop", namesrv=broker.namesrv, retries=0) as producer:
            with pytest.raises(SendFailed) as failed:
                producer.send(Message("TBW102x", b"x"))
            text = str(failed.value)
            assert f"TCP connect to 127.0.0.9:{port} refused" in text
            assert f"{broker.broker_name} advertises that address (brokerIP1)" in text
            assert not failed.value.is_maybe_stored
            assert isinstance(failed.value.__cause__, Unreachable)


def test_the_vip_channel_is_two_ports_below() -> None:
    def send(namesrv: str, way: dict[str, Any]) -> None:
        with blocking.Producer("shop", namesrv=namesrv, retries=0, **way) as producer:
            for _ in range(9):
                producer.send(Message("vip", b"1"))
            producer.send_oneway(Message("vip", b"2"))

    # Nobody listens where this broker says it is; its VIP port is the proxy's.
    with LocalBroker(store="memory", settings={"brokerIP1": "127.0.0.2"}) as broker:
        broker.create_topic("vip", queues=4)
        vip = f"127.0.0.2:{int(broker.broker_address.rpartition(':')[2]) - 2}"
        with pytest.raises(SendFailed, match="advertises that address"):
            send(broker.namesrv, {})
        with pytest.raises(SendFailed, match=f"{vip} refused.*VIP port of broker-a.*vip_channel"):
            send(broker.namesrv, {"vip_channel": True})
        with Proxy(broker.broker_address, listen=vip):
            send(broker.namesrv, {"vip_channel": True})
            give_up = time.monotonic() + 10
            while len(stored(broker, "vip")) < 10 and time.monotonic() < give_up:
                time.sleep(0.01)
        assert len(stored(broker, "vip")) == 10


def test_refusals_are_tried_again_and_told(broker: LocalBroker) -> None:
    broker.create_topic("again", queues=1)
    send = RequestCode.SEND_MESSAGE_V2
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        broker.fail(send, times=2, response_code=ResponseCode.SYSTEM_ERROR, remark="made up")
        assert producer.send(Message("again", b"third time")).status is SendStatus.SEND_OK
        broker.fail(send, times=9, response_code=ResponseCode.SYSTEM_ERROR, remark="made up")
        with pytest.raises(SendFailed) as failed:
            producer.send(Message("again", b"never"))
        assert len(failed.value.attempts) == 3
        assert failed.value.code == ResponseCode.SYSTEM_ERROR
        broker.clear_faults()
        # A refusal by async send, and flow control, are final.
        broker.fail(send, times=1, response_code=ResponseCode.SYSTEM_ERROR, remark="made up")
        with pytest.raises(SendFailed, match="1 attempt "):
            producer.send_async(Message("again", b"x")).result()
        broker.fail(send, times=1, response_code=ResponseCode.SYSTEM_BUSY, remark="busy")
        with pytest.raises(SendFailed) as failed:
            producer.send(Message("again", b"x"))
        assert failed.value.code == ResponseCode.SYSTEM_BUSY
    with blocking.Producer("shop", namesrv=broker.namesrv, retry_busy=True) as patient:
        broker.fail(send, times=2, response_code=ResponseCode.SYSTEM_BUSY, remark="busy")
        assert patient.send(Message("again", b"busy")).status is SendStatus.SEND_OK
    assert [one.body for one in stored(broker, "again", 1)] == [b"third time", b"busy"]


def test_an_answer_that_never_comes_is_maybe_stored(broker: LocalBroker) -> None:
    broker.create_topic("silent", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv, send_timeout_ms=300) as producer:
        producer.send(Message("silent", b"warm"))
        broker.drop(RequestCode.SEND_MESSAGE_V2, times=1)
        began = time.monotonic()
        with pytest.raises(SendFailed, match="may have been stored") as failed:
            producer.send(Message("silent", b"x"))
        assert failed.value.is_maybe_stored
        assert 0.25 < time.monotonic() - began < 2


def test_a_failed_flush_is_maybe_stored(broker: LocalBroker) -> None:
    """The broker's own words for messages that are in its log, and not known to be on its disk."""
    broker.create_topic("flushed", queues=1)
    unavailable = ResponseCode.SERVICE_NOT_AVAILABLE
    with blocking.Producer("shop", namesrv=broker.namesrv, retries=0) as producer:
        for remark, is_maybe in (
            ("flush to disk failed (EIO): this message may or may not survive; no more", True),
            ("the store is read-only", False),
        ):
            send = RequestCode.SEND_MESSAGE_V2
            broker.fail(send, times=1, response_code=unavailable, remark=remark)
            with pytest.raises(SendFailed) as failed:
                producer.send(Message("flushed", b"x"))
            assert failed.value.is_maybe_stored is is_maybe
            assert ("may have been stored" in str(failed.value)) is is_maybe


def test_a_cut_connection_is_tried_again(broker: LocalBroker) -> None:
    broker.create_topic("cut", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        producer.send(Message("cut", b"0"))
        futures = []
        for n in range(1, 200):
            futures.append(producer.send_async(Message("cut", b"%d" % n)))
            if n % 50 == 0:
                broker.cut_connections()
        for future in futures:
            assert future.result(10).status is SendStatus.SEND_OK
    bodies = {one.body for one in stored(broker, "cut", 1)}
    assert bodies == {b"%d" % n for n in range(200)}


@pytest.mark.parametrize("topic", ["line-known", "line-made-by-the-first"])
def test_sends_begun_while_connecting_keep_their_order(broker: LocalBroker, topic: str) -> None:
    """One more in every turn of the loop: while the route is asked for, while the connection is
    made, and in the turns in which it is there and those before have not been told yet."""
    if topic == "line-known":
        broker.create_topic(topic, queues=1)

    async def scenario() -> None:
        async with Producer("shop", namesrv=broker.namesrv) as producer:
            waiting = []
            for n in range(600):
                if n == 300:
                    broker.cut_connections()
                waiting.append(
                    producer.send_async(
                        Message(topic, b"%d" % n), selector=lambda queues: queues[0]
                    )
                )
                await asyncio.sleep(0)
            done = await asyncio.gather(*waiting, return_exceptions=True)
        lost = {n for n, one in enumerate(done) if isinstance(one, Exception)}
        kept = [int(one.body) for one in stored(broker, topic, 1)]
        assert kept == sorted(kept)
        assert set(range(600)) - set(kept) <= lost

    asyncio.run(scenario())


def test_one_in_the_line_does_not_wait_longer_than_it_may() -> None:
    """The first may wait for three seconds, those behind it for less."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        async def scenario() -> list[float]:
            began = time.monotonic()
            took: list[float] = []

            def note(_: Any) -> None:
                took.append(time.monotonic() - began)

            async with Producer("shop", namesrv=address) as producer:
                sent = [
                    producer.send_async(Message("t", b"x"), note, timeout_ms=ms)
                    for ms in (3000, 300, 700, 100)
                ]
                for error in await asyncio.gather(*sent, return_exceptions=True):
                    assert isinstance(error, SendFailed) and address in str(error)
            return took

        took = asyncio.run(scenario())
    wanted = (0.1, 0.3, 0.7, 3.0)
    assert all(took_s >= wanted_s for took_s, wanted_s in zip(took, wanted, strict=True))
    assert max(took[:3]) < 3.0  # who may wait longest came first and kept nobody


def test_many_threads_share_a_producer(broker: LocalBroker) -> None:
    broker.create_topic("threads", queues=4)
    failed: list[BaseException] = []

    def work(name: int) -> None:
        try:
            futures = [
                producer.send_async(Message("threads", b"%d-%d" % (name, n))) for n in range(250)
            ]
            for future in futures:
                future.result(10)
        except BaseException as error:
            failed.append(error)

    with blocking.Producer("shop", namesrv=broker.namesrv, window=64) as producer:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    found = stored(broker, "threads")
    assert len({one.body for one in found}) == len(found) == 2000
    assert len({one.message_id for one in found}) == 2000


def test_the_window_is_never_passed(broker: LocalBroker) -> None:
    broker.create_topic("window", queues=1)

    async def main() -> None:
        async with Producer("shop", namesrv=broker.namesrv, window=10) as producer:
            await producer.send(Message("window", b"warm"))
            broker.delay(RequestCode.SEND_MESSAGE_V2, 0.3, times=10)
            futures = [producer.send_async(Message("window", b"x")) for _ in range(10)]
            with pytest.raises(WindowFull, match="window=10"):
                producer.send_async(Message("window", b"x"))
            waiting = asyncio.create_task(producer.send(Message("window", b"waits")))
            await asyncio.sleep(0.05)
            assert producer.under_way == 10
            await asyncio.gather(*futures)
            await waiting

    asyncio.run(main())
    with blocking.Producer("s", namesrv=broker.namesrv, window=2, on_full="raise") as producer:
        producer.send(Message("window", b"warm"))
        broker.delay(RequestCode.SEND_MESSAGE_V2, 0.3, times=2)
        begun = [producer.send_async(Message("window", b"x")) for _ in range(2)]
        with pytest.raises(WindowFull):
            producer.send_async(Message("window", b"x"))
        for future in begun:
            future.result(5)


def test_a_send_that_found_no_room_in_time_is_not_sent(broker: LocalBroker) -> None:
    """Neither face writes it when room comes at last; who waits behind it gets that room."""
    broker.create_topic("roomless", queues=1)
    options: dict[str, Any] = {"namesrv": broker.namesrv, "window": 1, "retries": 0}
    slow = RequestCode.SEND_MESSAGE_V2
    late = Message("roomless", b"late")
    with blocking.Producer("shop", **options) as producer:
        producer.send(Message("roomless", b"1"))
        broker.delay(slow, 0.6, times=1)
        first = producer.send_async(Message("roomless", b"2"))
        began = time.monotonic()
        with pytest.raises(SendFailed, match=r"not sent: .*no room in the window of 1") as failed:
            producer.send(late, timeout_ms=200)
        assert 0.15 < time.monotonic() - began < 0.5
        assert not failed.value.is_maybe_stored and not failed.value.attempts
        with pytest.raises(SendFailed, match="not sent"):
            producer.send_async(late, timeout_ms=100).result(5)
        assert first.result(5)
        assert producer.send(Message("roomless", b"3"))
        assert producer._inner.under_way == 0

    async def main() -> None:
        async with Producer("shop", **options) as producer:
            await producer.send(Message("roomless", b"4"))
            broker.delay(slow, 0.6, times=1)
            first = producer.send_async(Message("roomless", b"5"))
            waits = asyncio.create_task(producer.send(late, timeout_ms=200))
            behind = asyncio.create_task(producer.send(Message("roomless", b"6")))
            with pytest.raises(
                SendFailed, match=r"not sent: .*no room in the window of 1"
            ) as failed:
                await waits
            assert not first.done() and not failed.value.is_maybe_stored
            await asyncio.gather(first, behind)
            assert producer.under_way == 0

    asyncio.run(main())
    assert [one.body for one in stored(broker, "roomless", 1)] == [b"%d" % n for n in range(1, 7)]


def test_a_send_that_the_loop_came_to_too_late_is_not_sent(broker: LocalBroker) -> None:
    broker.create_topic("late", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        producer.send(Message("late", b"warm"))
        assert producer._loop is not None
        producer._loop.call_soon_threadsafe(time.sleep, 0.3)
        with pytest.raises(SendFailed, match="not sent") as failed:
            producer.send(Message("late", b"x"), timeout_ms=100)
        assert not failed.value.is_maybe_stored
    assert len(stored(broker, "late", 1)) == 1


def test_close_waits_for_what_is_under_way(broker: LocalBroker) -> None:
    broker.create_topic("closing", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        futures = [producer.send_async(Message("closing", b"%d" % n)) for n in range(500)]
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(UsageError, match="closed"):
        producer.send(Message("closing", b"late"))
    assert len(stored(broker, "closing", 1)) == 500


def test_close_refuses_those_who_wait_for_room(broker: LocalBroker) -> None:
    broker.create_topic("leaving", queues=1)
    ends: list[object] = []

    def work(producer: blocking.Producer, number: int) -> None:
        try:
            producer.send(Message("leaving", b"%d" % number))
            ends.append(None)
        except Exception as error:
            ends.append(error)

    with blocking.Producer("shop", namesrv=broker.namesrv, window=2) as producer:
        producer.send(Message("leaving", b"warm"))
        broker.delay(RequestCode.SEND_MESSAGE_V2, 0.5, times=2)
        threads = [threading.Thread(target=work, args=(producer, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert not ends
    for thread in threads:
        thread.join(5)
    refused = [one for one in ends if one is not None]
    assert [(type(one), str(one)) for one in refused] == [
        (UsageError, "this producer is closed")
    ] * 4
    assert len(ends) == 6 and len(stored(broker, "leaving", 1)) == 3

    async def main() -> None:
        async with Producer("shop", namesrv=broker.namesrv, window=1) as producer:
            await producer.send(Message("leaving", b"warm"))
            broker.delay(RequestCode.SEND_MESSAGE_V2, 0.3, times=1)
            first = producer.send_async(Message("leaving", b"first"))
            waits = [asyncio.create_task(producer.send(Message("leaving", b"x"))) for _ in range(3)]
            await asyncio.sleep(0.05)
        assert first.done() and first.exception() is None
        for one in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(one, UsageError) and str(one) == "this producer is closed"

    asyncio.run(main())
    assert len(stored(broker, "leaving", 1)) == 5


def test_a_full_window_is_told_where_nobody_can_wait(broker: LocalBroker) -> None:
    """On the background loop's own thread, that is in callbacks and async handlers."""
    broker.create_topic("callback", queues=1)
    told: list[BaseException | None] = []
    is_told = threading.Event()
    with blocking.Producer("shop", namesrv=broker.namesrv, window=2) as producer:
        producer.send(Message("callback", b"warm"))

        def again(_: object) -> None:
            try:
                for _ in range(3):
                    producer.send_async(Message("callback", b"more"))
                told.append(None)
            except WindowFull as error:
                told.append(error)
            is_told.set()

        producer.send_async(Message("callback", b"1"), again)
        assert is_told.wait(5), "the background loop waits for itself"
        assert "on the thread that would make some" in str(told[0])
        assert producer.send_async(Message("callback", b"after")).result(5)
    assert len(stored(broker, "callback", 1)) == 5


def test_an_async_handler_never_stops_the_loop(broker: LocalBroker) -> None:
    broker.create_topic("forwarded", queues=1)
    producer = blocking.Producer("shop", namesrv=broker.namesrv, window=4)
    producer.start()
    for n in range(40):
        producer.send(Message("to-forward", b"%d" % n))
    handled: list[bool] = []

    async def forward(message: ReceivedMessage) -> None:
        try:
            producer.send_async(Message("forwarded", message.body))
            handled.append(True)
        except WindowFull:
            handled.append(False)

    with blocking.Consumer("forwards", namesrv=broker.namesrv, start="first") as consumer:
        consumer.subscribe("to-forward", forward)
        consumer.start()
        until = time.monotonic() + 10
        while len(handled) < 40 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(handled) == 40
    producer.close()
    assert len(stored(broker, "forwarded", 1)) == handled.count(True)


@pytest.mark.parametrize("body", [b"13.50", b"x" * 5_000, random.Random(1).randbytes(5_000)])
def test_a_reply_arrives_as_it_was(broker: LocalBroker, body: bytes) -> None:
    """Small; so large that it travels compressed; so large, and not to be made smaller."""
    with (
        blocking.Producer("shop", namesrv=broker.namesrv) as producer,
        blocking.Consumer("replies", namesrv=broker.namesrv) as consumer,
    ):

        def reply(message: ReceivedMessage) -> None:
            producer.reply(message, body)

        consumer.subscribe("asked", reply)
        consumer.start()
        assert producer.request(Message("asked", b"?"), timeout_ms=10_000).body == body


def test_a_reply_that_can_not_be_read_is_told_to_who_asked() -> None:
    async def main() -> None:
        producer = Producer("shop", namesrv="127.0.0.1:1")
        asked = asyncio.get_running_loop().create_future()
        producer._requests["C"] = asked
        ext = {
            "producerGroup": "g",
            "topic": "t",
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": "4",
            "queueId": "0",
            "sysFlag": "1",
            "bornTimestamp": "0",
            "bornHost": "127.0.0.1:1",
            "storeHost": "127.0.0.1:1",
            "storeTimestamp": "0",
            "flag": "0",
            "properties": "CORRELATION_ID\x01C\x02",
        }
        pushed = Frame(code=RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext=ext, body=b"not zlib")
        assert producer._replied(None, pushed).code == 0  # type: ignore[arg-type]
        with pytest.raises(BodyError, match="not zlib"):
            await asked

    asyncio.run(main())


def test_oneway_arrives(broker: LocalBroker) -> None:
    broker.create_topic("oneway", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        for n in range(20):
            producer.send_oneway(Message("oneway", b"%d" % n))
        producer.send(Message("oneway", b"end"))
    assert [one.body for one in stored(broker, "oneway", 1)] == [
        *(b"%d" % n for n in range(20)),
        b"end",
    ]


def test_oneway_does_not_wait_for_ever_for_a_broker_that_does_not_read() -> None:
    with (
        LocalBroker(store="memory", settings={"brokerIP1": "127.0.0.2"}) as broker,
        Proxy(broker.broker_address) as proxy,
        blocking.Producer("shop", namesrv=broker.namesrv, send_timeout_ms=500) as producer,
    ):
        producer.send(Message("oneway", b"warm"))
        proxy.stall()
        large = Message("oneway", random.Random(2).randbytes(1_000_000))
        with pytest.raises(SendFailed, match="reads slower than is written") as failed:
            for _ in range(60):  # what the buffers of two sockets take, and more
                began = time.monotonic()
                producer.send_oneway(large)
        assert time.monotonic() - began < 2
        assert not failed.value.is_maybe_stored
        proxy.go_on()


def test_a_broker_killed_and_back_loses_nothing_that_was_acknowledged() -> None:
    with LocalBroker() as broker:
        broker.create_topic("kill", queues=2)
        acknowledged: list[bytes] = []
        with blocking.Producer("shop", namesrv=broker.namesrv, send_timeout_ms=10_000) as producer:
            for n in range(100):
                if n == 50:
                    broker.restart(kill=True)
                for _ in range(50):  # a lost broker answers again when it is back
                    try:
                        producer.send(Message("kill", b"%d" % n))
                    except SendFailed:
                        time.sleep(0.1)
                    else:
                        acknowledged.append(b"%d" % n)
                        break
        assert len(acknowledged) == 100
        assert set(acknowledged) <= {one.body for one in stored(broker, "kill", 2)}


def _use_in_child(producer: blocking.Producer, told: Any) -> None:
    try:
        producer.send(Message("fork", b"x"))
        told.put("sent")
    except UsageError as error:
        told.put(str(error))


def test_a_fork_is_noticed(broker: LocalBroker) -> None:
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    with blocking.Producer("shop", namesrv=broker.namesrv) as producer:
        producer.send(Message("fork", b"x"))
        child = fork.Process(target=_use_in_child, args=(producer, told))
        child.start()
        text = told.get(timeout=10)
        child.join()
    assert "was forked from" in text
    assert "make clients after the fork" in text


def test_namespaces_keep_names_apart(broker: LocalBroker) -> None:
    broker.create_topic("space%orders", queues=1)
    with blocking.Producer("shop", namesrv=broker.namesrv, namespace="space") as producer:
        sent = [producer.send(Message("orders", b"inside")) for _ in range(3)]
        assert [one.queue.topic for one in sent] == ["orders"] * 3  # the last one took a lane
        again = producer.send(Message("orders", b"there"), queue=sent[0].queue)
        assert again.queue == sent[0].queue
    found = stored(broker, "space%orders", 1)[0]
    assert found.properties["INSTANCE_ID"] == "space"


def test_usage_is_explained() -> None:
    with pytest.raises(UsageError, match="pass namesrv="):
        blocking.Producer("shop")
    with pytest.raises(UsageError, match=r"'nowhere' is not host:port"):
        blocking.Producer("shop", namesrv="nowhere")
    with pytest.raises(UsageError, match="unknown keyword 'retrys'"):
        blocking.Producer("shop", namesrv="127.0.0.1:1", retrys=3)
    for name, wrong, why in (
        ("window", 0, "from 1 on"),
        ("window", -5, "from 1 on"),
        ("window", "x", "whole number"),
        ("retries", -1, "from 0 on"),
        ("async_retries", 1.5, "whole number"),
        ("default_queues", 0, "from 1 on"),
        ("max_message_bytes", 0, "from 1 on"),
        ("compress_over_bytes", None, "whole number"),
        ("send_timeout_ms", 0, "above 0"),
        ("send_timeout_ms", float("nan"), "above 0"),
        ("send_timeout_ms", "3000", "number"),
        ("retry_busy", "no", "True or False"),
        ("compression", "zlib", "Compression.ZLIB"),
    ):
        with pytest.raises(UsageError, match=f"{name} {wrong!r} must be .*{why}"):
            blocking.Producer("shop", namesrv="127.0.0.1:1", **{name: wrong})
    with pytest.raises(UsageError, match="start the producer first"):
        blocking.Producer("shop", namesrv="127.0.0.1:1").send(Message("t", b"x"))


def test_the_environment_names_the_name_server(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)
    with blocking.Producer("shop") as producer:
        assert producer.send(Message("env", b"x")).status is SendStatus.SEND_OK
