"""What all message kinds of the simulated cluster share: the ledger, a look at a log, a producer.

Owns: what clients asked brokers to do with a message, request by request, and how a broker's log is
shown to the checks. One rule: every request that may store a message carries a name of its own
(SIM_ATTEMPT), which all copies of it keep; so whatever stands in a log can be traced to the one
request that brought it there, and counted.

A kind is one file beside this one: its traffic, its model and its checks; kinds.py has the table.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from cometmq.broker import names
from cometmq.broker.broker import Broker
from cometmq.message import StoredMessage
from cometmq.testing.client import GRACE_US, Answer, Client, RouteCache, Target
from cometmq.testing.history import Found, History, Queue, Sent
from cometmq.wire import message_id, properties
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import SendHeader, send_v2_ext

ATTEMPT = "SIM_ATTEMPT"
LATE_MS = 100  # how late a broker may be that has nothing in its way
IDLE_MS = 400
KEPT_ELSEWHERE = frozenset(
    (names.SCHEDULE_TOPIC, names.TIMER_TOPIC, names.HALF_TOPIC, names.CHECK_MAX_TOPIC)
)
"""Topics in which a broker keeps messages of others."""


def lot(token: str, sides: int) -> int:
    """A throw of dice that is the same for everybody who knows the token."""
    return zlib.crc32(token.encode()) % sides


# -------------------------------------------------------------------------------------- the ledger


class Attempt(msgspec.Struct):
    """One request to store a message, as it was asked."""

    name: str
    token: str
    topic: str
    broker: str
    queue_id: int
    table: dict[str, str]


class Promise(msgspec.Struct, frozen=True):
    """A broker said yes to something that leaves a mark in its log."""

    broker: str
    boot: int
    is_firm: bool
    key: tuple[Any, ...]


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record of a log, decoded."""

    attempt: str
    topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    store_ms: int
    sys_flag: int
    reconsume_times: int
    prepared_offset: int
    body: bytes
    table: dict[str, str]

    @property
    def delay_level(self) -> int:
        text = self.table.get(properties.DELAY, "0")
        return int(text) if text.isdecimal() else 0


class Ledger:
    """What the kinds of one run did and were told; a part of the History."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.attempts: dict[str, Attempt] = {}
        self.promises: list[Promise] = []
        self.excused: dict[tuple[str, str], None] = {}
        """(broker, attempt): a power loss took an answer back that had not promised to survive."""
        self.asked: dict[tuple[Any, ...], int] = {}
        """How often something was asked for that each time may leave a mark."""
        self.own: dict[str, Any] = {}
        """What single kinds note, under their names."""
        self.clock: Callable[[str], int] = lambda name: 0
        """A broker's own time."""
        self.is_true_time = True
        """No clock is set in this run."""
        self.healed_ms: dict[str, int] = {}
        self.boots: dict[str, list[int]] = {}
        """By broker, when each of its boots that came so far began; one for each Recovery."""

    def ask(self, *key: Any) -> None:
        self.asked[key] = self.asked.get(key, 0) + 1

    def is_explained(self, sent: Sent | None, message: StoredMessage) -> bool:
        """Whether a record that is not simply as it was sent may stand in a log."""
        table = properties.parse(message.properties)
        if message.topic == names.OP_TOPIC:
            return all(one.isdigit() for one in message.body.decode().rstrip(",").split(","))
        if properties.TIMER_DELETES in table:
            return ("recall", table[properties.TIMER_DELETES]) in self.asked
        attempt = self.attempts.get(table.get(ATTEMPT, ""))
        if sent is None or attempt is None or attempt.token != sent.token:
            return False
        is_place = message.topic in KEPT_ELSEWHERE or message.topic.startswith(
            (names.RETRY_PREFIX, names.DEAD_LETTER_PREFIX)
        )
        return is_place and bytes(message.body) == sent.body


def record_of(message: StoredMessage) -> Record:
    table = properties.parse(message.properties)
    return Record(
        table.get(ATTEMPT, ""),
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.log_offset,
        message.store_ms,
        message.sys_flag,
        message.reconsume_times,
        message.prepared_offset,
        bytes(message.body),
        table,
    )


class View:
    """One broker's log at one moment, with what is known beside it."""

    def __init__(
        self, history: History, ledger: Ledger, name: str, broker: Broker, found: dict[int, Found]
    ) -> None:
        self.history = history
        self.ledger = ledger
        self.name = name
        self.broker = broker
        self.begin = max(history.log_begins.get(name, 0), broker.store.min_log_offset)
        self.has_lost_begin = self.begin > 0 or broker.config.clean_forcibly
        self.records = [one.detail for one in found.values() if isinstance(one.detail, Record)]
        self.now_ms = ledger.clock(name)
        self._ends = [one.log_end for one in history.recoveries.get(name, ())]

    def problem(self, text: str) -> None:
        self.history.problem(f"{self.name}: {text}")

    def boot_of(self, record: Record) -> int:
        """Which of the broker's boots wrote a record, counted from 1; 0 before the first."""
        for number in range(len(self._ends), 0, -1):
            if self._ends[number - 1] <= record.log_offset:
                return number
        return 0

    def is_after(self, record: Record, boot: int) -> bool:
        """Whether a record was written by a later boot than this, as nodes count them."""
        number = self.boot_of(record)
        return number > 0 and self.history.recoveries[self.name][number - 1].boot > boot

    def is_visible(self, record: Record) -> bool:
        return record.log_offset < self.broker.store.dispatched_offset

    def calm_ms(self, boot: int) -> int | None:
        """By the broker's clock, from when on nothing excuses lateness in a boot; None: never, as
        where clocks step: a moment of one boot says nothing about another's."""
        healed_ms = self.ledger.healed_ms.get(self.name)
        if healed_ms is None or not self.ledger.is_true_time:
            return None
        began = self.ledger.boots.get(self.name, [])
        return max(healed_ms + GRACE_US // 1000, began[boot - 1] + 2_000 if boot else 0)

    def kept(self, promise: Promise) -> bool:
        """Whether a promise still binds: no crash took it back that was allowed to."""
        if promise.is_firm:
            return True
        later = [r for r in self.history.recoveries.get(self.name, ()) if r.boot > promise.boot]
        return all(recovery.is_lossless for recovery in later)


def check_promises(view: View, kind: str, have: dict[tuple[Any, ...], int]) -> None:
    """What a broker said yes to is in its log as often as it said so. `have` counts the marks."""
    need: dict[tuple[Any, ...], int] = {}
    ledger = view.ledger
    for promise in ledger.promises:
        if promise.broker == view.name and promise.key[0] == kind:
            if view.kept(promise):
                need[promise.key] = need.get(promise.key, 0) + 1
            else:
                ledger.excused[view.name, promise.key[1]] = None
    if view.has_lost_begin:
        return
    for key, count in need.items():
        if have.get(key, 0) < count:
            view.problem(f"{key} was acknowledged {count} times and done {have.get(key, 0)} times")


# ------------------------------------------------------------------------------------- the traffic


QUEUES = 2
"""Of a kind's topic, whether an operator makes it or a send: who takes queues away from a topic
takes the messages in them away from everybody."""


class KindPlan(msgspec.Struct, frozen=True):
    """How the producers of a kind behave."""

    kind: str
    topic: str
    window: int
    interval_ms: int
    final_count: int
    firm_brokers: tuple[str, ...]
    option: int
    """A number drawn for the kind to make something of."""


class Letter(msgspec.Struct):
    """A message on its way into a broker."""

    token: str
    table: dict[str, str]
    body: bytes
    sys_flag: int = 0
    unique_key: str = ""
    """Of each attempt its own, unless this is set."""
    queue: tuple[str, int] | None = None
    """Broker and queue id if only that one will do."""
    tries: int = 0


class KindProducer:
    """Sends messages of one kind, and sends again elsewhere when it isn't told that it worked."""

    most_tries = 6
    template = "TBW102"
    """The topic that a missing one is made after."""

    def __init__(self, name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> None:
        self.name = name
        self.plan = plan
        self.rng = rng
        self.next_ms = 0
        self._routes = routes
        self._count = 0
        self._again: list[Letter] = []
        self._in_flight = 0
        self._final = 0

    @property
    def is_done(self) -> bool:
        return self._final >= self.plan.final_count and not self._in_flight and not self._again

    def told(self, client: Client, frame: Frame) -> None:
        """Most producers are told nothing."""

    def wake(self, client: Client) -> None:
        plan = self.plan
        self.next_ms = client.now_ms + 1 + self.rng.randrange(2 * plan.interval_ms)
        if client.is_healed and not self._again:
            self.next_ms = client.now_ms + IDLE_MS
        if self._in_flight >= plan.window:
            return
        if self._again:
            self._post(client, self._again.pop(0))
        elif not client.is_healed:
            self._post(client, self._new(client))
        elif self._final < plan.final_count:
            if self._final < plan.final_count // 2 or client.is_past_grace:
                self._final += 1
                self._post(client, self._new(client))

    def _new(self, client: Client) -> Letter:
        self._count += 1
        token = f"{self.name}-{self._count}"
        body = f"{token}|".encode() + self.rng.randbytes(self.rng.randrange(40))
        letter = self.make(client, token, body)
        client.history.sent[token] = Sent(
            token,
            self.plan.topic,
            body,
            tags=letter.table.get(properties.TAGS, ""),
            attributes=letter.table,
        )
        return letter

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        """A new message; kinds say what it carries."""
        return Letter(token, {}, body)

    def targets(self, client: Client, letter: Letter) -> list[Target]:
        found = self._routes.get(client, self.plan.topic)
        if letter.queue is not None:
            found = [one for one in found if (one.broker, one.queue_id) == letter.queue]
        return found

    def _post(self, client: Client, letter: Letter) -> None:
        targets = self.targets(client, letter)
        if not targets:
            self._again.append(letter)
            return
        target = self.rng.choice(targets)
        letter.tries += 1
        name = f"{letter.token}#{letter.tries}"
        attempt = Attempt(
            name, letter.token, self.plan.topic, target.broker, target.queue_id, letter.table
        )
        ledger = ledger_of(client.history)
        ledger.attempts[name] = attempt
        header = SendHeader(
            producerGroup=self.group,
            topic=self.plan.topic,
            defaultTopic=self.template,
            defaultTopicQueueNums=QUEUES,
            queueId=target.queue_id,
            sysFlag=letter.sys_flag,
            bornTimestamp=client.now_ms,
            flag=0,
            properties=properties.build(
                {
                    **letter.table,
                    ATTEMPT: name,
                    properties.UNIQUE_KEY: letter.unique_key or f"{name:0>32}",
                }
            ),
        )
        self._in_flight += 1
        client.ask(
            target.address,
            RequestCode.SEND_MESSAGE_V2,
            send_v2_ext(header),
            lambda answer: self._answered(client, letter, attempt, target, answer),
            body=letter.body,
        )

    @property
    def group(self) -> str:
        return f"group-{self.plan.kind}"

    def is_firm(self, broker: str) -> bool:
        return broker in self.plan.firm_brokers

    def _answered(
        self, client: Client, letter: Letter, attempt: Attempt, target: Target, answer: Answer
    ) -> None:
        self._in_flight -= 1
        if answer.is_ok:
            self.answered(client, letter, attempt, target, answer)
            return
        if letter.tries < self.most_tries or client.is_healed:
            self._again.append(letter)
            self.next_ms = min(self.next_ms, client.now_ms + 1 + self.plan.interval_ms)
        else:
            self.gave_up(client, letter)

    def answered(
        self, client: Client, letter: Letter, attempt: Attempt, target: Target, answer: Answer
    ) -> None:
        """The broker said yes: it stands where the answer says."""
        assert answer.frame is not None
        ext = answer.frame.ext
        topic, queue_id = self.place_of(attempt, ext)
        place: Queue = (target.broker, topic, queue_id)
        log_offset = message_id.parse_offset_id(ext["msgId"])[2]
        client.history.acked(
            place,
            int(ext["queueOffset"]),
            log_offset,
            letter.token,
            answer.boot,
            is_firm=self.is_firm(target.broker),
        )
        self.stored(client, letter, attempt, target, answer, log_offset)

    def place_of(self, attempt: Attempt, ext: dict[str, str]) -> tuple[str, int]:
        """Topic and queue in which the broker keeps it, by what it answered."""
        return self.plan.topic, int(ext["queueId"])

    def stored(
        self,
        client: Client,
        letter: Letter,
        attempt: Attempt,
        target: Target,
        answer: Answer,
        log_offset: int,
    ) -> None:
        """The broker has it; kinds go on from here."""

    def gave_up(self, client: Client, letter: Letter) -> None:
        """Nobody would take it."""


def beat_body(client_id: str, groups: list[str]) -> bytes:
    """The heartbeat of a client that only produces."""
    return msgspec.json.encode(
        {
            "clientID": client_id,
            "consumerDataSet": [],
            "producerDataSet": [{"groupName": group} for group in groups],
        }
    )


def ledger_of(history: History) -> Ledger:
    ledger = history.ledger
    assert isinstance(ledger, Ledger), "kinds need a ledger"
    return ledger


def copies(view: View, topic: str) -> Iterator[Record]:
    """Records of a real topic, in the order of the log."""
    return (one for one in view.records if one.topic == topic)
