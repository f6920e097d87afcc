"""Our client, the same scenarios with the same expectations on every server.

CometMQ runs inside the process and needs nothing, so these run with every `make test`; Apache
RocketMQ 4.9 and 5.x are the control, in `make interop`. What CometMQ's broker does not have yet is
skipped there by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cometmq import aio
from cometmq.client.blocking import Consumer, Producer, TransactionProducer
from cometmq.client.compression import Compression
from cometmq.client.handling import Later
from cometmq.client.received import ReceivedMessage
from cometmq.client.transaction import Outcome
from cometmq.errors import RequestTimeout
from cometmq.message import Message, SendStatus
from cometmq.testing import LocalBroker

from .servers import Settings, selected_servers, start
from .toolchain import Unavailable, prepare
from .versions import APACHE_SERVERS

NOT_YET: dict[str, str] = {}
IMPATIENCE = {"transactionTimeOut": "1000", "transactionCheckInterval": "1000"}
SETTINGS = {
    **IMPATIENCE,
    "enablePropertyFilter": "true",
    "mappedFileSizeCommitLog": str(64 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 5000),
    "maxHashSlotNum": "10000",
    "maxIndexNum": "40000",
}
_numbers = itertools.count(1)


@dataclass
class Cluster:
    """A server of one kind."""

    kind: str
    namesrv: str

    def need(self, *features: str) -> None:
        for feature in features:
            if self.kind == "comet" and feature in NOT_YET:
                pytest.skip(NOT_YET[feature])
            if feature == "timer" and self.kind == "apache-4":
                pytest.skip("RocketMQ 4.9 has no timers")

    def topic(self, queues: int = 4) -> str:
        """A new topic."""

        async def create(name: str) -> str:
            async with aio.Admin(namesrv=self.namesrv) as admin:
                await admin.create_topic(name, queues)
            return name

        return asyncio.run(create(f"topic-{next(_numbers)}-{time.time_ns() % 10**9}"))

    def group(self) -> str:
        return f"group-{next(_numbers)}-{time.time_ns() % 10**9}"


@pytest.fixture(
    scope="module",
    params=[
        "comet",
        *(pytest.param(name, marks=pytest.mark.interop) for name in APACHE_SERVERS),
    ],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    kind: str = request.param
    if kind == "comet":
        with LocalBroker(store="memory", settings=IMPATIENCE) as broker:
            yield Cluster(kind, broker.namesrv)
        return
    if kind not in selected_servers():
        pytest.skip(f"{kind} is not in COMETMQ_INTEROP_SERVERS")
    try:
        toolchain = prepare()
    except Unavailable as reason:
        pytest.skip(f"interop: {reason}")
    folder: Path = tmp_path_factory.mktemp(kind)
    server = start(kind, toolchain, Settings(folder, folder / "store", sizes=SETTINGS))
    try:
        yield Cluster(kind, server.namesrv)
    finally:
        server.kill()


class Seen:
    """What handlers got, in order."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []
        self._changed = threading.Condition()

    def __call__(self, message: ReceivedMessage) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in self.messages]

    def wait(
        self, is_enough: Callable[[list[ReceivedMessage]], bool], timeout_s: float = 40
    ) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: is_enough(self.messages), timeout_s):
                raise AssertionError(f"after {timeout_s} s: {self.messages}")

    def wait_count(self, count: int, timeout_s: float = 40) -> None:
        self.wait(lambda messages: len(messages) >= count, timeout_s)


@contextlib.contextmanager
def consuming(
    cluster: Cluster, group: str, topic: str, handler: object, tags: str = "*", **keywords: object
) -> Iterator[Consumer]:
    sql = str(keywords.pop("sql", ""))
    with Consumer(group, namesrv=cluster.namesrv, start="first", **keywords) as consumer:
        consumer.subscribe(topic, tags, handler, sql=sql)  # type: ignore[arg-type]
        consumer.start()
        yield consumer


def wait_until_shared(topic: str, *consumers: Consumer) -> None:
    """Until all have as many of the topic's queues, and none has another's."""
    deadline = time.monotonic() + 40
    while True:
        shares = [{queue for queue in one.queues if queue.topic == topic} for one in consumers]
        sizes = {len(share) for share in shares}
        if len(sizes) == 1 and sizes != {0} and len(set().union(*shares)) == sum(map(len, shares)):
            return
        assert time.monotonic() < deadline, shares
        time.sleep(0.05)


def test_every_kind_of_send_arrives_as_it_was_sent(cluster: Cluster) -> None:
    topic, seen = cluster.topic(), Seen()
    with Producer("shop", namesrv=cluster.namesrv) as producer:
        sent = producer.send(Message(topic, b"sync", tags="a", keys=["k1", "k2"], flag=7))
        assert sent.status is SendStatus.SEND_OK
        producer.send_async(Message(topic, b"async", properties={"city": "Köln"})).result(10)
        producer.send_oneway(Message(topic, b"oneway"))
        producer.send_batch([Message(topic, b"batch-1", tags="b"), Message(topic, b"batch-2")])
        producer.send(Message(topic, b"large" * 2_000))
        with consuming(cluster, cluster.group(), topic, seen):
            seen.wait_count(6)
    by_body = {one.body: one for one in seen.messages}
    assert set(by_body) == {b"sync", b"async", b"oneway", b"batch-1", b"batch-2", b"large" * 2_000}
    first = by_body[b"sync"]
    assert (first.tags, first.keys, first.flag) == ("a", ["k1", "k2"], 7)
    assert (first.message_id, first.offset_id) == (sent.message_id, sent.offset_id)
    assert first.topic == topic
    assert by_body[b"async"].properties["city"] == "Köln"
    assert by_body[b"batch-1"].tags == "b"
    age = datetime.now(UTC) - first.store_time
    assert timedelta(minutes=-1) < age < timedelta(minutes=5)


@pytest.mark.parametrize("kind", Compression)
def test_compressed_bodies(cluster: Cluster, kind: Compression) -> None:
    topic, seen = cluster.topic(1), Seen()
    body = b"0123456789" * 1_000
    with Producer("shop", namesrv=cluster.namesrv, compression=kind) as producer:
        producer.send(Message(topic, body))
        with consuming(cluster, cluster.group(), topic, seen):
            seen.wait_count(1)
    assert seen.bodies == [body]
    assert seen.messages[0].size < 1_000


def test_tags_choose(cluster: Cluster) -> None:
    topic, seen = cluster.topic(), Seen()
    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, seen, "paid || refunded"),
    ):
        for n in range(30):
            tag = ("paid", "refunded", "open")[n % 3]
            producer.send(Message(topic, b"%d" % n, tags=tag))
        seen.wait_count(20)
        time.sleep(0.3)
    assert sorted(int(body) for body in seen.bodies) == [n for n in range(30) if n % 3 != 2]


def test_two_members_share_and_one_takes_over(cluster: Cluster) -> None:
    topic, group = cluster.topic(8), cluster.group()
    first, second = Seen(), Seen()
    with Producer("shop", namesrv=cluster.namesrv) as producer:  # noqa: SIM117 - in turn
        with consuming(cluster, group, topic, first) as one:
            with consuming(cluster, group, topic, second) as other:
                wait_until_shared(topic, one, other)
                for n in range(80):
                    producer.send(Message(topic, b"%d" % n))
                first.wait(lambda _: len(first.messages) + len(second.messages) >= 80)
                assert len(first.messages) == len(second.messages) == 40
            began = time.monotonic()
            for n in range(80, 160):
                producer.send(Message(topic, b"%d" % n))
            first.wait_count(120)
            assert time.monotonic() - began < 5
    assert sorted(int(body) for body in first.bodies + second.bodies) == list(range(160))


def test_order_is_kept_for_each_key(cluster: Cluster) -> None:
    topic, seen = cluster.topic(4), Seen()
    failed: set[bytes] = set()

    def handle(message: ReceivedMessage) -> Later | None:
        if message.body.endswith(b"-7") and message.body not in failed:
            failed.add(message.body)
            return Later(delay_ms=100)
        seen(message)
        return None

    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, handle, ordered=True),
    ):
        for n in range(20):
            for key in ("a", "b", "c", "d", "e"):
                producer.send(Message(topic, f"{key}-{n}".encode(), sharding_key=key))
        seen.wait_count(100)
    for key in (b"a", b"b", b"c", b"d", b"e"):
        assert [body for body in seen.bodies if body.startswith(key)] == [
            b"%b-%d" % (key, n) for n in range(20)
        ]
    assert len(failed) == 5


def test_broadcasting_reaches_everybody(cluster: Cluster, tmp_path: Path) -> None:
    topic, group = cluster.topic(2), cluster.group()
    seen = [Seen(), Seen()]
    with contextlib.ExitStack() as stack:
        for n, one in enumerate(seen):
            stack.enter_context(
                consuming(
                    cluster,
                    group,
                    topic,
                    one,
                    model="broadcasting",
                    offsets_folder=tmp_path / str(n),
                    instance=f"member-{n}",
                )
            )
        producer = stack.enter_context(Producer("shop", namesrv=cluster.namesrv))
        for n in range(10):
            producer.send(Message(topic, b"%d" % n))
        for one in seen:
            one.wait_count(10)
    for one in seen:
        assert sorted(int(body) for body in one.bodies) == list(range(10))


def test_a_group_goes_on_where_it_was(cluster: Cluster) -> None:
    topic, group = cluster.topic(2), cluster.group()
    with Producer("shop", namesrv=cluster.namesrv) as producer:
        for part in range(3):
            seen = Seen()
            for n in range(20):
                producer.send(Message(topic, b"%d-%d" % (part, n)))
            with consuming(cluster, group, topic, seen):
                seen.wait_count(20)
            assert all(body.startswith(b"%d-" % part) for body in seen.bodies)
            assert len(set(seen.bodies)) == len(seen.bodies) == 20


def test_a_failed_message_comes_again_with_its_count(cluster: Cluster) -> None:
    cluster.need("retry")
    topic, seen = cluster.topic(1), Seen()

    def handle(message: ReceivedMessage) -> Later | None:
        seen(message)
        if message.reconsume_times == 0:
            raise RuntimeError("not now")
        return Later(delay_level=1) if message.reconsume_times == 1 else None

    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, handle),
    ):
        sent = producer.send(Message(topic, b"again", tags="t", keys="k"))
        seen.wait_count(3, 60)
    assert [one.reconsume_times for one in seen.messages] == [0, 1, 2]
    assert {one.topic for one in seen.messages} == {topic}
    assert {one.message_id for one in seen.messages} == {sent.message_id}
    assert {one.body for one in seen.messages} == {b"again"}


def test_dead_letters_are_found_and_sent_again(cluster: Cluster) -> None:
    cluster.need("retry")
    topic, group, seen = cluster.topic(1), cluster.group(), Seen()

    def handle(message: ReceivedMessage) -> Later | None:
        seen(message)
        return Later(delay_level=-1) if len(seen.messages) == 1 else None

    async def revive() -> int:
        async with aio.Admin(namesrv=cluster.namesrv) as admin:
            for _ in range(100):
                with contextlib.suppress(Exception):
                    letters = await admin.dead_letters(group)
                    if letters:
                        await admin.resend_dead_letter(letters[0], group)
                        return len(letters)
                await asyncio.sleep(0.2)
        return 0

    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, group, topic, handle),
    ):
        producer.send(Message(topic, b"poison", keys="p"))
        seen.wait_count(1)
        assert asyncio.run(revive()) == 1
        seen.wait_count(2)
    assert seen.bodies == [b"poison", b"poison"]
    assert seen.messages[1].keys == ["p"]


def test_delay_levels(cluster: Cluster) -> None:
    cluster.need("delay")
    topic, seen = cluster.topic(1), Seen()
    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, seen),
    ):
        began = time.monotonic()
        producer.send(Message(topic, b"later", delay_level=2))
        producer.send(Message(topic, b"now"))
        seen.wait_count(2)
        took = time.monotonic() - began
    assert seen.bodies == [b"now", b"later"]
    assert 4.9 < took < 9


def test_timers(cluster: Cluster) -> None:
    cluster.need("timer")
    topic, seen = cluster.topic(1), Seen()
    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, seen),
    ):
        due = datetime.now(UTC) + timedelta(seconds=3)
        producer.send(Message(topic, b"later", deliver_at=due))
        seen.wait_count(1)
    assert datetime.now(UTC) > due - timedelta(seconds=1.1)


def test_transactions(cluster: Cluster) -> None:
    cluster.need("transactions")
    topic, group, seen = cluster.topic(1), cluster.group(), Seen()
    asked = Seen()

    def check(message: ReceivedMessage) -> Outcome:
        asked(message)
        return Outcome.COMMIT if message.body == b"asked-commit" else Outcome.ROLLBACK

    with (
        TransactionProducer(group, check, namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, seen),
    ):
        with producer.transaction(Message(topic, b"committed", tags="t")):
            time.sleep(0.5)
            assert seen.bodies == []
        with (
            pytest.raises(ZeroDivisionError),
            producer.transaction(Message(topic, b"rolled back")),
        ):
            raise ZeroDivisionError
        producer.send(Message(topic, b"by function"), lambda message: Outcome.COMMIT)
        producer.send(Message(topic, b"asked-commit"), lambda message: Outcome.UNKNOWN)
        producer.send(Message(topic, b"asked-rollback"), lambda message: Outcome.UNKNOWN)
        seen.wait_count(3, 90)
        asked.wait(lambda messages: {one.body for one in messages} >= {b"asked-rollback"}, 90)
        time.sleep(1)
    committed = [b"asked-commit", b"by function", b"committed"]
    if cluster.kind == "comet":
        assert sorted(seen.bodies) == committed
    else:  # which delivers twice if it asks while the answer to its last question is on the way
        assert sorted(set(seen.bodies)) == committed
    assert {one.topic for one in asked.messages} == {topic}


def test_sql92_chooses(cluster: Cluster) -> None:
    topic, seen = cluster.topic(2), Seen()
    with (
        Producer("shop", namesrv=cluster.namesrv) as producer,
        consuming(cluster, cluster.group(), topic, seen, sql="amount > 5 AND city = 'Rome'"),
    ):
        for n in range(10):
            city = "Rome" if n % 2 else "Oslo"
            properties = {"amount": str(n), "city": city}
            producer.send(Message(topic, b"%d" % n, properties=properties))
        seen.wait_count(2)
        time.sleep(0.5)
    assert sorted(seen.bodies) == [b"7", b"9"]


def test_request_and_reply(cluster: Cluster) -> None:
    cluster.need("reply")
    topic = cluster.topic(1)
    with Producer("asker", namesrv=cluster.namesrv) as asker:
        with Producer("answerer", namesrv=cluster.namesrv) as answerer:

            def handle(message: ReceivedMessage) -> None:
                answerer.reply(message, b"re: " + message.body)

            with consuming(cluster, cluster.group(), topic, handle):
                replied = asker.request(Message(topic, b"how many?"), timeout_ms=20_000)
                assert replied.body == b"re: how many?"
        with pytest.raises(RequestTimeout, match="no reply"):
            asker.request(Message(topic, b"anybody?"), timeout_ms=300)
