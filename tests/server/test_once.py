"""Time to live, deduplication and producer sequences over sockets, through kill -9."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from cometmq import Admin, Consumer, Message, MessageQueue, Producer
from cometmq.client.remote import Remote
from cometmq.errors import CometError, SendFailed, UsageError
from cometmq.testing.local import LocalBroker
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame
from programs import SMALL, Program, read_queue, send

Up = Callable[..., Program]
KILLS = 4


def numbered(remote: Remote, values: list[str], queue_id: int = 0) -> Frame:
    """A batch request whose messages are numbered."""
    header = headers.SendHeader(
        producerGroup="sink",
        topic="rows",
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=queue_id,
        sysFlag=0,
        bornTimestamp=int(time.time() * 1000),
        flag=0,
        properties="",
        batch=True,
    )
    pieces = [
        record.Piece(0, one.encode(), properties.build({"PRODUCER_SEQ": one})) for one in values
    ]
    ext = headers.send_v2_ext(header)
    return remote.ask(RequestCode.SEND_BATCH_MESSAGE, ext, record.join_batch(pieces))


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_writer_that_repeats_itself_through_kills_stores_each_row_once(
    up: Up, flush: str
) -> None:
    """Ordinary messages go by beside it, mostly by the compiled path."""
    rng = random.Random(7)
    written = 0
    repeated = 0
    for _ in range(KILLS):
        program = up(SMALL | {"flushDiskType": flush})
        kill = threading.Timer(0.6 + rng.random() * 0.5, program.kill)
        kill.start()
        try:
            with Remote(program.broker) as remote:
                while True:
                    end = written + rng.choice((1, 3, 40))
                    answer = numbered(remote, [f"w 5 {n}" for n in range(written, end)])
                    assert answer.code == 0, answer.remark
                    assert answer.ext["sequenced"] == "true"
                    repeated += "duplicate" in answer.ext
                    if rng.random() < 0.9:  # else its answer was lost on the way
                        written = end
                    send(remote, "rows", b"other", queue_id=1, unique=f"U{rng.random()}")
        except (CometError, OSError):
            pass  # killed
        finally:
            kill.join()
    program = up(SMALL | {"flushDiskType": flush})
    with Remote(program.broker) as remote:
        gap = numbered(remote, [f"w 5 {written + 10**6}"])
        assert gap.code == ResponseCode.MESSAGE_ILLEGAL and "sequence gap" in (gap.remark or "")
        assert numbered(remote, [f"w 5 {n}" for n in range(written, written + 100)]).code == 0
    bodies = [one.body.decode() for one in read_queue(program.broker, "rows", 0)]
    assert bodies == [f"w 5 {n}" for n in range(len(bodies))]
    assert len(bodies) >= written + 100 and repeated


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_key_is_known_after_a_kill(up: Up, flush: str) -> None:
    program = up(SMALL | {"flushDiskType": flush})
    with Admin(program.namesrv) as admin:
        admin.create_topic("payments", queues=2, attributes={"dedup.minutes": "10"})
    with Producer("shop", namesrv=program.namesrv) as producer:
        first = [
            producer.send(Message("payments", b"%d" % n, unique_id=f"pay-{n}")) for n in range(20)
        ]
        again = producer.send(Message("payments", b"7", unique_id="pay-7"))
        assert again.is_duplicate and again.offset_id == first[7].offset_id
    program.kill()
    program = up(SMALL | {"flushDiskType": flush})
    with Producer("shop", namesrv=program.namesrv) as producer:
        for n in range(25):
            result = producer.send(Message("payments", b"%d" % n, unique_id=f"pay-{n}"))
            assert result.is_duplicate == (n < 20)
    stored = [one.body for queue in (0, 1) for one in read_queue(program.broker, "payments", queue)]
    assert sorted(stored, key=int) == [b"%d" % n for n in range(25)]


def test_a_consumer_gets_what_is_in_time_and_goes_on_behind_the_rest() -> None:
    with LocalBroker(store="memory") as broker:
        broker.create_topic("prices", queues=1)
        with Admin(broker.namesrv) as admin:
            admin.create_topic("prices", queues=1, attributes={"expired.topic": "old-prices"})
        with Producer("quotes", namesrv=broker.namesrv) as producer:
            for n in range(60):
                brief = timedelta(milliseconds=300) if n % 2 else None
                producer.send(Message("prices", b"%d" % n, ttl=brief))
            time.sleep(0.4)
            last = producer.send(Message("prices", b"60", ttl=timedelta(minutes=1)))
            broker_name = last.queue.broker
        for group in ("readers", "others"):
            got: list[int] = []
            ended = threading.Event()

            def handle(
                message: object, got: list[int] = got, ended: threading.Event = ended
            ) -> None:
                got.append(int(message.body))  # type: ignore[attr-defined]
                if got[-1] == 60:
                    ended.set()

            consumer = Consumer(group, namesrv=broker.namesrv, start="first")
            consumer.subscribe("prices", handler=handle)
            with consumer:
                consumer.start()
                assert ended.wait(10)
            assert sorted(got) == list(range(0, 61, 2))
        moved: list[bytes] = []
        give_up = time.monotonic() + 10
        with Admin(broker.namesrv) as admin:
            while len(moved) < 30 and time.monotonic() < give_up:
                time.sleep(0.2)
                queue = MessageQueue("old-prices", broker_name, 0)
                moved = [one.body for one in admin.queue_messages(queue)]
        assert moved == [b"%d" % n for n in range(1, 60, 2)]


def test_the_client_refuses_what_makes_no_sense() -> None:
    with (
        LocalBroker(store="memory") as broker,
        Producer("quotes", namesrv=broker.namesrv) as producer,
    ):
        for ttl in (timedelta(0), timedelta(microseconds=5), timedelta(days=4_000)):
            with pytest.raises(UsageError, match="ttl"):
                producer.send(Message("prices", b"x", ttl=ttl))
        with pytest.raises(UsageError, match="use the field ttl"):
            producer.send(Message("prices", b"x", properties={"TTL_MS": "5"}))
        producer.send(Message("prices", b"x"))
        queue = producer.queues("prices")[0]
        number = {"PRODUCER_SEQ": "p 1 4"}
        with pytest.raises(SendFailed, match="expected 0, got 4"):
            producer.send(Message("prices", b"x", properties=number), queue=queue)
