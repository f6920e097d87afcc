"""Clients of every message kind on one broker, and what they were promised.

Owns: Ledger, the truth of a crash test of kinds, and the threads that write it. One rule: an
attempt is noted before it is made, a promise after its answer has arrived; what a message is to
become (its level, its time, its fate) is decided when it gets its number and never changes.

    delayed    a delay level                        work       failed by its consumer, some always
    timed      any time; some taken back            orders     transactions: commit, rollback, open
    events     filtered by SQL92                    steps      consumed in order, under locks
    requests   answered to the one who asked
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from cometmq.client.remote import Remote
from cometmq.errors import CometError, RequestTimeout
from cometmq.message import StoredMessage
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode, SysFlag
from cometmq.wire.frame import Frame
from programs import pull_ext

LEVELS_S = (1, 2, 1, 1, 2)  # a first retry takes level 3
MOST_TRIES = 2  # retries before a message is a dead letter
WORKERS, ORDERED, SELLERS, ASKERS = "workers", "steppers", "sellers", "askers"
RETRY_TOPIC, DEAD_TOPIC = f"%RETRY%{WORKERS}", f"%DLQ%{WORKERS}"
REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
STEP_QUEUES = 2
SQL = "price BETWEEN 3 AND 6 AND colour IN ('red', 'blue')"
COLOURS = ("red", "green", "blue")
TOPICS = ("delayed", "timed", "events", "work", "orders", "steps", "requests")
PAUSE_S = 0.012  # of each producer between messages: what all stores hold is read again and again
TOO_LATE_MS = 300  # before its time: a recall may not be in time any more

SETTINGS = {
    "messageDelayLevel": " ".join(f"{seconds}s" for seconds in LEVELS_S),
    "flushDelayOffsetInterval": "300",
    "timerPrecisionMs": "100",
    "timerFlushIntervalMs": "100",
    "timerRollWindowSlot": "20",
    "mappedFileSizeTimerLog": str(52 * 40 + 30),
    "recallMessageEnable": "true",
    "transactionTimeOut": "300",
    "transactionCheckInterval": "200",
    "transactionCheckMax": "1000000",
}


@dataclass
class Sent:
    """One message: what it is, and what became of it as far as its sender knows."""

    number: int
    topic: str
    level: int = 0
    due_ms: int = 0
    fate: str = ""  # of a transaction: commit, rollback
    is_open: bool = False  # its producer waits to be asked
    price: int = 0
    log_offset: int | None = None  # acknowledged
    is_recall_tried: bool = False
    is_recalled: bool = False
    end_tried: bool = False
    ended_in: int | None = None  # the boot in which its end was acknowledged

    @property
    def colour(self) -> str:
        return COLOURS[self.number % len(COLOURS)]

    @property
    def is_wanted(self) -> bool:
        """Whether the SQL expression selects it."""
        return 3 <= self.price <= 6 and self.colour in ("red", "blue")

    @property
    def fails(self) -> bool:
        """Whether its consumer never manages it."""
        return self.number % 3 != 0


@dataclass
class Ledger:
    """Everything that was tried and promised on one store, over all its boots."""

    seed: int
    sent: dict[int, Sent] = field(default_factory=dict)
    bodies: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    refusals: Counter[tuple[str, int]] = field(default_factory=Counter)
    backs_tried: Counter[tuple[int, int]] = field(default_factory=Counter)
    backs_acked: set[tuple[int, int]] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    holders: dict[int, str] = field(default_factory=dict)
    steps_seen: dict[int, int] = field(default_factory=dict)
    """By queue: the highest offset of `steps` that was handled."""
    step_numbers: dict[int, int] = field(default_factory=dict)
    replies: int = 0
    checks: int = 0
    boot: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._numbers = itertools.count(1)
        self.lock = threading.Lock()

    def new(self, topic: str, rng: random.Random) -> tuple[Sent, bytes]:
        with self.lock:
            one = Sent(next(self._numbers), topic)
        body = b"%010d" % one.number + rng.randbytes(rng.randrange(300))
        self.bodies[one.number] = hash(body)
        self.sent[one.number] = one
        return one, body

    def find(self, body: bytes) -> Sent | None:
        """Which message this is, byte for byte; None if nobody ever sent it."""
        try:
            number = int(body[:10])
        except ValueError:
            return None
        return self.sent.get(number) if self.bodies.get(number) == hash(body) else None

    def fault(self, text: str) -> None:
        self.faults.append(text)

    @property
    def acked_count(self) -> int:
        return sum(1 for one in list(self.sent.values()) if one.log_offset is not None)


class KindLoad:
    """All threads on one broker, until it dies or `stop` is called; with `is_draining` nobody sends
    anything new, and what is open is brought to its end."""

    def __init__(self, address: str, ledger: Ledger, *, is_draining: bool = False) -> None:
        self.address = address
        self.ledger = ledger
        self.stopped = threading.Event()
        self._is_draining = is_draining
        ledger.boot += 1
        ledger.holders.clear()  # locks die with their broker
        works = [self._sell, self._retry, lambda rng: self._step("A", rng)]
        works.append(lambda rng: self._step("B", rng))
        if not is_draining:
            works += [self._delay, self._time, self._produce, self._ask]
        seeds = [ledger.random.randrange(2**32) for _ in works]
        self._threads = [
            threading.Thread(target=self._run, args=(work, seed), daemon=True)
            for work, seed in zip(works, seeds, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, work: object, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stopped.wait(PAUSE_S):
            try:
                work(rng)  # type: ignore[operator]
            except CometError:
                # The broker died under us: what was not answered may or may not be there. While it
                # is drained it lives, and was only held still for too long to be looked at.
                if not self._is_draining:
                    return
            except Exception as error:
                self.ledger.fault(f"{work}: {error!r}")
                return

    def stop(self) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), thread

    # -------------------------------------------------------------------------------------- sending

    def _send(
        self, remote: Remote, one: Sent, body: bytes, table: dict[str, str], flags: int = 0
    ) -> Frame:
        """One message; its answer, noted if it is a promise."""
        table = {"UNIQ_KEY": f"7F0000010A2C18B4AAC2{one.number:012X}", **table}
        ext = headers.send_v2_ext(
            headers.SendHeader(
                producerGroup=SELLERS,
                topic=one.topic,
                defaultTopic="TBW102",
                defaultTopicQueueNums=STEP_QUEUES,
                queueId=one.number % STEP_QUEUES,
                sysFlag=flags,
                bornTimestamp=now_ms(),
                flag=0,
                properties=properties.build(table),
            )
        )
        answer = remote.ask(RequestCode.SEND_MESSAGE_V2, ext, body, timeout_ms=10_000)
        if answer.code == ResponseCode.SUCCESS:
            one.log_offset = int(answer.ext["msgId"][-16:], 16)
        else:
            self._refused("send", answer)
        return answer

    def _refused(self, what: str, answer: Frame) -> None:
        self.ledger.refusals[what, answer.code] += 1
        time.sleep(0.002)

    def _delay(self, rng: random.Random) -> None:
        with Remote(self.address) as remote:
            while not self.stopped.wait(PAUSE_S):
                one, body = self.ledger.new("delayed", rng)
                one.level = rng.randint(1, len(LEVELS_S))
                self._send(remote, one, body, {"DELAY": str(one.level)})

    def _time(self, rng: random.Random) -> None:
        waiting: list[tuple[Sent, str]] = []
        with Remote(self.address) as remote:
            while not self.stopped.wait(PAUSE_S):
                one, body = self.ledger.new("timed", rng)
                one.due_ms = now_ms() + rng.randint(100, 4_000)
                answer = self._send(remote, one, body, {"TIMER_DELIVER_MS": str(one.due_ms)})
                if "recallHandle" in answer.ext and rng.random() < 0.3:
                    waiting.append((one, answer.ext["recallHandle"]))
                if len(waiting) > 5:
                    self._recall(remote, *waiting.pop(rng.randrange(len(waiting))))

    def _recall(self, remote: Remote, one: Sent, handle: str) -> None:
        if one.due_ms - now_ms() < TOO_LATE_MS:
            return
        one.is_recall_tried = True
        ext = headers.to_ext(headers.RecallHeader("timed", handle, SELLERS))
        answer = remote.ask(RequestCode.RECALL_MESSAGE, ext)
        if answer.code == ResponseCode.SUCCESS:
            one.is_recalled = True
        else:
            self._refused("recall", answer)

    def _produce(self, rng: random.Random) -> None:
        """Plain messages for those who filter, fail, or keep the order."""
        with Remote(self.address) as remote:
            while not self.stopped.wait(PAUSE_S):
                one, body = self.ledger.new(rng.choice(("events", "work", "steps")), rng)
                one.price = rng.randrange(10)
                self._send(remote, one, body, {"price": str(one.price), "colour": one.colour})

    # --------------------------------------------------------------------------------- transactions

    def _sell(self, rng: random.Random) -> None:
        with Remote(self.address) as remote:
            _heartbeat(remote, "seller", SELLERS)
            while not self.stopped.is_set():
                if not self._is_draining:
                    one, body = self.ledger.new("orders", rng)
                    one.fate = rng.choice(("commit", "rollback"))
                    one.is_open = rng.random() < 0.4
                    table = {"TRAN_MSG": "true", "PGROUP": SELLERS}
                    answer = self._send(remote, one, body, table, int(SysFlag.PREPARED))
                    if one.log_offset is not None and not one.is_open:
                        self._end(remote, one, int(answer.ext["queueOffset"]), one.log_offset)
                try:
                    while True:
                        self._answer_check(remote, remote.wait_pushed(int(PAUSE_S * 1000)))
                except RequestTimeout:
                    pass

    def _answer_check(self, remote: Remote, frame: Frame) -> None:
        if frame.code != RequestCode.CHECK_TRANSACTION_STATE:
            return
        self.ledger.checks += 1
        one = self.ledger.find(record.decode(frame.body).body)
        if one is None:
            self.ledger.fault(f"asked about a transaction that nobody began: {frame}")
            return
        is_known = one.ended_in is not None and one.ended_in < self.ledger.boot
        if is_known and one.fate == "commit":
            self.ledger.fault(f"asked about {one}, whose commit was answered before the last kill")
        header = headers.parse(headers.CheckTransactionHeader, frame.ext)
        offsets = (header.tranStateTableOffset, header.commitLogOffset)
        self._end(remote, one, *offsets, is_asked=True)

    def _end(
        self, remote: Remote, one: Sent, offset: int, log_offset: int, *, is_asked: bool = False
    ) -> None:
        one.end_tried = True
        flag = SysFlag.COMMIT if one.fate == "commit" else SysFlag.ROLLBACK
        header = headers.EndTransactionHeader(
            producerGroup=SELLERS,
            tranStateTableOffset=offset,
            commitLogOffset=log_offset,
            commitOrRollback=int(flag),
            fromTransactionCheck=is_asked,
        )
        answer = remote.ask(RequestCode.END_TRANSACTION, headers.to_ext(header), timeout_ms=10_000)
        if answer.code == ResponseCode.SUCCESS:
            one.ended_in = self.ledger.boot
        else:
            self._refused("end", answer)

    # -------------------------------------------------------------------------------------- retries

    def _retry(self, rng: random.Random) -> None:
        """Handles a third of what comes and sends the rest back, until it is a dead letter."""
        places = [("work", 0), ("work", 1), (RETRY_TOPIC, 0)]
        with Remote(self.address) as remote:
            positions = {place: _committed(remote, WORKERS, place) for place in places}
            while not self.stopped.wait(PAUSE_S):
                for place in places:
                    offset = positions[place]
                    messages, positions[place] = _pull(remote, WORKERS, place, offset)
                    for message in messages:
                        self._work(remote, message)
                    if positions[place] > offset:
                        _commit(remote, WORKERS, place, positions[place])

    def _work(self, remote: Remote, message: StoredMessage) -> None:
        one = self.ledger.find(message.body)
        if one is None or one.topic != "work":
            self.ledger.fault(f"{message.topic} has {message.body[:10]!r}, which nobody sent there")
        elif not one.fails:
            self.ledger.done.add(one.number)
        else:
            key = (one.number, message.reconsume_times)
            self.ledger.backs_tried[key] += 1
            header = headers.SendBackHeader(
                message.log_offset, WORKERS, 0, originTopic="work", maxReconsumeTimes=MOST_TRIES
            )
            ext = headers.to_ext(header)
            answer = remote.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext, timeout_ms=10_000)
            if answer.code == ResponseCode.SUCCESS:
                self.ledger.backs_acked.add(key)
            else:
                self._refused("back", answer)

    # ------------------------------------------------------------------------------ order and locks

    def _step(self, name: str, rng: random.Random) -> None:
        """One of two members that fight for two queues: who has the lock goes on where the other
        one stopped, and commits before it lets go."""
        ledger = self.ledger
        with Remote(self.address) as remote:
            _heartbeat(remote, f"stepper-{name}", ASKERS, ORDERED)
            while not self.stopped.wait(PAUSE_S):
                queue_id = rng.randrange(STEP_QUEUES)
                with ledger.lock:
                    other = ledger.holders.get(queue_id)
                if not _lock(remote, f"stepper-{name}", queue_id):
                    continue
                with ledger.lock:
                    holder = ledger.holders.get(queue_id)
                    if other not in (None, name) and holder == other:
                        ledger.fault(f"{name} got queue {queue_id}, which {holder} holds")
                    ledger.holders[queue_id] = name
                self._step_on(remote, queue_id)
                with ledger.lock:
                    ledger.holders.pop(queue_id, None)
                _lock(remote, f"stepper-{name}", queue_id, RequestCode.UNLOCK_BATCH_MQ)

    def _step_on(self, remote: Remote, queue_id: int) -> None:
        ledger, place = self.ledger, ("steps", queue_id)
        offset = _committed(remote, ORDERED, place)
        seen = ledger.steps_seen.get(queue_id, -1)
        if offset > seen + 1:
            ledger.fault(f"{place}: the group is at {offset}, and saw nothing after {seen}")
        messages, following = _pull(remote, ORDERED, place, offset)
        for message in messages:
            one = ledger.find(message.body)
            if one is None or one.topic != "steps":
                ledger.fault(f"{place} {message.queue_offset} was never sent there")
                continue
            if message.queue_offset > ledger.steps_seen.get(queue_id, -1):
                if one.number <= ledger.step_numbers.get(queue_id, 0):
                    ledger.fault(f"{place}: {one.number} after {ledger.step_numbers[queue_id]}")
                ledger.steps_seen[queue_id] = message.queue_offset
                ledger.step_numbers[queue_id] = one.number
        if following > offset:
            _commit(remote, ORDERED, place, following)

    # ---------------------------------------------------------------------------- request and reply

    def _ask(self, rng: random.Random) -> None:
        """A client that asks, and one that answers it through the broker."""
        client_id = f"asker-{self.ledger.boot}"
        with Remote(self.address) as asker, Remote(self.address) as worker:
            _heartbeat(asker, client_id, ASKERS)
            place = ("requests", 0)
            while not self.stopped.wait(4 * PAUSE_S):
                one, body = self.ledger.new("requests", rng)
                table = {"REPLY_TO_CLIENT": client_id, "CORRELATION_ID": str(one.number)}
                self._send(asker, one, body, table)
                if one.log_offset is None or one.number % STEP_QUEUES != place[1]:
                    continue
                found, _ = _pull(worker, "answerers", place, _end_of(worker, place) - 1)
                if [message.body for message in found] != [body]:
                    self.ledger.fault(f"request {one.number} is not the last of its queue")
                worker.send(RequestCode.SEND_REPLY_MESSAGE_V2, _reply_ext(table), body)
                pushed = asker.wait_pushed(10_000)
                told = properties.get(pushed.ext.get("properties", ""), "CORRELATION_ID")
                if (pushed.body, told) != (body, str(one.number)):
                    self.ledger.fault(f"the reply to {one.number} is {told}: {pushed.body[:10]!r}")
                self.ledger.replies += 1


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _reply_ext(table: dict[str, str]) -> dict[str, str]:
    return headers.send_v2_ext(
        headers.SendHeader(
            producerGroup=ASKERS,
            topic=REPLY_TOPIC,
            defaultTopic="TBW102",
            defaultTopicQueueNums=1,
            queueId=0,
            sysFlag=0,
            bornTimestamp=now_ms(),
            flag=0,
            properties=properties.build(table),
        )
    )


def _heartbeat(remote: Remote, client_id: str, producers: str, consumers: str = "") -> None:
    body: dict[str, object] = {"clientID": client_id}
    body["producerDataSet"] = [{"groupName": producers}]
    body["consumerDataSet"] = []
    if consumers:
        one = {"groupName": consumers, "consumeType": "CONSUME_PASSIVELY"}
        one |= {"messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET"}
        body["consumerDataSet"] = [one | {"subscriptionDataSet": []}]
    remote.call(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())


def _lock(
    remote: Remote, client_id: str, queue_id: int, code: int = RequestCode.LOCK_BATCH_MQ
) -> bool:
    queue = {"topic": "steps", "brokerName": "broker-a", "queueId": queue_id}
    body = {"consumerGroup": ORDERED, "clientId": client_id, "mqSet": [queue]}
    answer = remote.call(code, {}, json.dumps(body).encode())
    return b'"steps"' in answer.body


def _committed(remote: Remote, group: str, place: tuple[str, int]) -> int:
    where = {"topic": place[0], "queueId": str(place[1]), "consumerGroup": group}
    answer = remote.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
    return int(answer.ext["offset"]) if answer.code == ResponseCode.SUCCESS else 0


def _commit(remote: Remote, group: str, place: tuple[str, int], offset: int) -> None:
    where = {"topic": place[0], "queueId": str(place[1]), "consumerGroup": group}
    remote.call(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": str(offset)})


def _end_of(remote: Remote, place: tuple[str, int]) -> int:
    where = {"topic": place[0], "queueId": str(place[1])}
    return int(remote.call(RequestCode.GET_MAX_OFFSET, where).ext["offset"])


def _pull(
    remote: Remote, group: str, place: tuple[str, int], offset: int
) -> tuple[list[StoredMessage], int]:
    """Some messages from here on, and where to go on."""
    answer = remote.ask(RequestCode.PULL_MESSAGE, pull_ext(*place, offset, group=group))
    if answer.code != ResponseCode.SUCCESS:
        return [], offset
    return list(record.decode_all(answer.body)), int(answer.ext["nextBeginOffset"])


def pull_by_sql(remote: Remote, queue_id: int, offset: int) -> Frame:
    header = headers.PullHeader(
        consumerGroup="choosers",
        topic="events",
        queueId=queue_id,
        queueOffset=offset,
        maxMsgNums=32,
        sysFlag=int(PullFlag.SUBSCRIPTION),
        subscription=SQL,
        expressionType="SQL92",
    )
    return remote.ask(RequestCode.PULL_MESSAGE, headers.to_ext(header), timeout_ms=10_000)
