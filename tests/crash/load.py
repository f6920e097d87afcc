"""Eight producers and four consumers on one broker, and what they were promised.

Owns: History, the only truth of a crash test, and the threads that write it. One rule: a promise is
noted only after its answer has arrived, an attempt always before it is made; so what History does
not know was never sent, and what it calls acknowledged was.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cometmq.client.remote import Remote
from cometmq.errors import CometError
from cometmq.message import StoredMessage
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from cometmq.wire.frame import JSON, ROCKETMQ, Frame
from programs import pull_ext

PRODUCERS = 8
CONSUMERS = 4
QUEUES = 4  # of each topic; consumer n reads queue n of every topic
GROUP = "readers"
TOPICS = ("orders", "payments")
KEPT_LOG_FILES = 24
WINDOW = 4  # sends a producer has under way

Place = tuple[str, int]


@dataclass(frozen=True)
class Promise:
    """A message that must be there; `log_offset` is -1 if only its queue offset is known."""

    number: int
    log_offset: int
    key: str = ""


@dataclass
class History:
    """What was sent, acknowledged, seen and committed on one store, over all its crashes."""

    seed: int
    sent: dict[int, int] = field(default_factory=dict)
    acked: dict[Place, dict[int, Promise]] = field(default_factory=dict)
    seen: dict[Place, dict[int, int]] = field(default_factory=dict)
    committed: dict[Place, int] = field(default_factory=dict)
    tried_commits: dict[Place, set[int]] = field(default_factory=dict)
    topics: set[str] = field(default_factory=lambda: set(TOPICS))
    faults: list[str] = field(default_factory=list)
    refusals: dict[int, int] = field(default_factory=dict)
    aged_to: int = 0  # the log before this may be gone
    acked_count: int = 0
    seen_count: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def new_body(self, rng: random.Random) -> tuple[int, bytes]:
        number = next(self._numbers)
        size = rng.randrange(20_000, 60_000) if rng.random() < 0.02 else rng.randrange(900)
        body = b"%010d" % number + rng.randbytes(size)
        self.sent[number] = hash(body)
        return number, body

    def number_of(self, body: bytes) -> int | None:
        """Which message this is, byte for byte; None if nobody ever sent it."""
        try:
            number = int(body[:10])
        except ValueError:
            return None
        return number if self.sent.get(number) == hash(body) else None

    def acknowledge(self, place: Place, offset: int, promise: Promise) -> None:
        with self._lock:
            queue = self.acked.setdefault(place, {})
            if offset in queue:
                self.faults.append(f"{place} number {offset} was given twice")
            queue[offset] = promise
            self.acked_count += 1

    def see(self, place: Place, message: StoredMessage) -> None:
        number = self.number_of(message.body)
        if number is None:
            self.faults.append(f"{place} {message.queue_offset} was never sent")
            return
        with self._lock:
            queue = self.seen.setdefault(place, {})
            before = queue.setdefault(message.queue_offset, number)
            self.seen_count += 1
        if before != number:
            self.faults.append(f"{place} {message.queue_offset} was {before} and is {number}")


class Load:
    """All threads on one broker, until it dies or `stop` is called.

    The log is kept at `kept_log_files` by ageing what is older (None: nobody does that).
    """

    def __init__(
        self,
        address: str,
        history: History,
        store: Path,
        round_: int,
        kept_log_files: int | None = KEPT_LOG_FILES,
    ) -> None:
        self.address = address
        self.history = history
        self.store = store
        self.stopped = threading.Event()
        self.fresh_topic = f"fresh-{round_}"  # so that topics are born under load too
        history.topics.add(self.fresh_topic)
        seeds = [history.random.randrange(2**32) for _ in range(PRODUCERS)]
        self._threads = [
            *(self._thread(self._produce, number, seeds[number]) for number in range(PRODUCERS)),
            *(self._thread(self._consume, number) for number in range(CONSUMERS)),
        ]
        if kept_log_files is not None:
            self._threads.append(self._thread(self._expire, kept_log_files))
        for thread in self._threads:
            thread.start()

    def _thread(self, work: object, *arguments: object) -> threading.Thread:
        return threading.Thread(target=self._run, args=(work, *arguments), daemon=True)

    def _run(self, work: object, *arguments: object) -> None:
        try:
            work(*arguments)  # type: ignore[operator]
        except CometError:
            pass  # the broker died under us: what was not answered may or may not be there
        except Exception as error:
            self.history.faults.append(f"{work}: {error!r}")

    def stop(self) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), thread

    # ------------------------------------------------------------------------------------ producing

    def _produce(self, number: int, seed: int) -> None:
        rng = random.Random(seed)
        with Remote(self.address, serialize=ROCKETMQ if number % 2 else JSON) as remote:
            while not self.stopped.is_set():
                topic = self.fresh_topic if rng.random() < 0.1 else rng.choice(TOPICS)
                place = (topic, rng.randrange(QUEUES))
                kind = rng.random()
                if kind < 0.15:
                    self._send_batch(remote, place, rng)
                elif kind < 0.25:
                    self._send_oneway(remote, place, rng)
                else:
                    self._send_some(remote, place, rng)

    def _send_some(self, remote: Remote, place: Place, rng: random.Random) -> None:
        under_way = []
        for _ in range(rng.randint(1, WINDOW)):
            number, body = self.history.new_body(rng)
            ext = _send_ext(place, _table(number))
            under_way.append((number, remote.send(RequestCode.SEND_MESSAGE_V2, ext, body)))
        for number, opaque in under_way:
            answer = remote.wait(opaque, 10_000)
            if self._is_stored(answer):
                at = int(answer.ext["msgId"][-16:], 16)
                promise = Promise(number, at, f"k{number}")
                self.history.acknowledge(place, int(answer.ext["queueOffset"]), promise)

    def _send_batch(self, remote: Remote, place: Place, rng: random.Random) -> None:
        bodies = [self.history.new_body(rng) for _ in range(rng.randint(2, 8))]
        pieces = [
            record.Piece(0, body, properties.build(_table(number))) for number, body in bodies
        ]
        ext = _send_ext(place, {}, is_batch=True)
        answer = remote.ask(
            RequestCode.SEND_BATCH_MESSAGE, ext, record.join_batch(pieces), timeout_ms=10_000
        )
        if self._is_stored(answer):
            first = int(answer.ext["queueOffset"])
            ids = answer.ext["msgId"].split(",")
            for at, ((number, _), id_) in enumerate(zip(bodies, ids, strict=True)):
                promise = Promise(number, int(id_[-16:], 16), f"k{number}")
                self.history.acknowledge(place, first + at, promise)

    def _send_oneway(self, remote: Remote, place: Place, rng: random.Random) -> None:
        number, body = self.history.new_body(rng)
        ext = _send_ext(place, _table(number))
        remote.send(RequestCode.SEND_MESSAGE_V2, ext, body, flag=FLAG_ONEWAY)

    def _is_stored(self, answer: Frame) -> bool:
        if answer.code != ResponseCode.SUCCESS:
            count = self.history.refusals.get(answer.code, 0)
            self.history.refusals[answer.code] = count + 1
            time.sleep(0.002)
        return answer.code == ResponseCode.SUCCESS

    # ------------------------------------------------------------------------------------ consuming

    def _consume(self, queue_id: int) -> None:
        positions: dict[str, int] = {}
        with Remote(self.address) as remote:
            for turn in itertools.count():
                if self.stopped.is_set():
                    return
                moved = 0
                for topic in (*TOPICS, self.fresh_topic):
                    if topic not in positions:
                        positions[topic] = start_offset(remote, topic, queue_id)
                    before = positions[topic]
                    positions[topic] = self._pull(remote, (topic, queue_id), before)
                    moved += positions[topic] - before
                    if turn % 4 == 0 and positions[topic] > 0:
                        self._commit(remote, (topic, queue_id), positions[topic])
                if not moved:
                    time.sleep(0.005)

    def _pull(self, remote: Remote, place: Place, offset: int) -> int:
        topic, queue_id = place
        answer = remote.ask(
            RequestCode.PULL_MESSAGE, pull_ext(topic, queue_id, offset, group=GROUP)
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return offset
        if "nextBeginOffset" not in answer.ext:
            self.history.faults.append(f"{place}: a pull of {offset} was answered {answer}")
            return offset
        following = int(answer.ext["nextBeginOffset"])
        if answer.code == ResponseCode.SUCCESS:
            expected = offset
            for message in record.decode_all(answer.body):
                if message.queue_offset != expected:
                    self.history.faults.append(
                        f"{place}: got {message.queue_offset}, expected {expected}"
                    )
                self.history.see(place, message)
                expected = message.queue_offset + 1
        elif following < offset:
            self.history.faults.append(f"{place}: sent back from {offset} to {following}")
        return following

    def _commit(self, remote: Remote, place: Place, offset: int) -> None:
        self.history.tried_commits.setdefault(place, set()).add(offset)
        where = {"topic": place[0], "queueId": str(place[1]), "consumerGroup": GROUP}
        remote.call(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": str(offset)})

    # ------------------------------------------------------------------------------------ retention

    def _expire(self, kept: int) -> None:
        """Make old log files look old, and have them dropped."""
        with Remote(self.address) as remote:
            while not self.stopped.wait(0.15):
                files = sorted((self.store / "commitlog").glob("[0-9]*"))
                if len(files) <= kept:
                    continue
                self.history.aged_to = int(files[-kept].name)
                for path in files[:-kept]:
                    _age(path)
                remote.call(RequestCode.DELETE_EXPIRED_COMMITLOG)


def _age(path: Path) -> None:
    two_hours_ago = time.time() - 7200
    with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
        os.utime(path, (two_hours_ago, two_hours_ago))


def start_offset(remote: Remote, topic: str, queue_id: int) -> int:
    """Where the group stands, else the queue's begin."""
    where = {"topic": topic, "queueId": str(queue_id)}
    answer = remote.ask(RequestCode.QUERY_CONSUMER_OFFSET, where | {"consumerGroup": GROUP})
    if answer.code == ResponseCode.SUCCESS:
        return int(answer.ext["offset"])
    return int(remote.call(RequestCode.GET_MIN_OFFSET, where).ext["offset"])


def _table(number: int) -> dict[str, str]:
    """Properties as a client sends them; some come without a unique key, and get the broker's."""
    table = {"TAGS": f"t{number % 5}", "KEYS": f"k{number}"}
    if number % 8:
        table["UNIQ_KEY"] = f"7F0000010A2C18B4AAC2{number:012X}"
    return table


def _send_ext(place: Place, table: dict[str, str], *, is_batch: bool = False) -> dict[str, str]:
    return headers.send_v2_ext(
        headers.SendHeader(
            producerGroup="crash-producer",
            topic=place[0],
            defaultTopic="TBW102",
            defaultTopicQueueNums=QUEUES,
            queueId=place[1],
            sysFlag=0,
            bornTimestamp=int(time.time() * 1000),
            flag=0,
            properties=properties.build(table),
            batch=is_batch,
        )
    )
