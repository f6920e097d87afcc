"""Popped messages in the simulated cluster: received by anybody, hidden for a while, back unless
acknowledged.

Owns: a group that pops, and the check of what became of its messages, read off the log, which holds
every checkpoint and every acknowledgement. One rule of theirs: what was acknowledged in time does
not come back, whatever crashes; what was not comes back, one try higher and never early, until it
is acknowledged or a dead letter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cometmq.broker import names, pop_records
from cometmq.broker.pop_receipts import retry_v1, retry_v2
from cometmq.broker.pop_records import EARLIER_MS, Ack, Checkpoint, Key
from cometmq.errors import BodyError
from cometmq.message import LogOffset, QueueOffset, StoredMessage
from cometmq.testing.client import Answer, Client
from cometmq.testing.history import Sent
from cometmq.testing.kind_sql import SqlProducer
from cometmq.testing.kinds_base import (
    LATE_MS,
    Ledger,
    Letter,
    Promise,
    Record,
    View,
    check_promises,
    ledger_of,
    lot,
)
from cometmq.testing.poppers import MOST_TIMES, Broker, Got, Popper, is_wanted, renewed
from cometmq.testing.traffic import ConsumerPlan
from cometmq.wire import properties
from cometmq.wire.headers import PopHeader

TOPIC = "KPop"
GROUP = "GPop"
RETRIES = (retry_v1(GROUP, TOPIC), retry_v2(GROUP, TOPIC))
DEAD = names.DEAD_LETTER_PREFIX + GROUP
REVIVE = names.revive_topic("DefaultCluster")
USUAL_TIMES = 16
"""What a broker that has forgotten the group makes of it."""
SOON_MS = 15_000  # what comes back later than this a run does not wait for
TAGS = ("red", "red || blue")
MARKS = 2**31  # of something that may be asked for again and again


class PopProducer(SqlProducer):
    """Messages with tags, sizes and colors, or without."""

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        letter = super().make(client, token, body)
        tags = self.rng.choice(("", "red", "blue", "red"))
        if tags:
            letter.table[properties.TAGS] = tags
        return letter


class PopConsumer(Popper):
    """Acknowledges most messages, alone or together, some too late; puts some off; forgets some."""

    def wake(self, client: Client) -> None:
        ledger_of(client.history).own["pop plan"] = self.plan
        super().wake(client)

    def take(self, client: Client, broker: Broker, header: PopHeader, some: list[Got]) -> None:
        ledger = ledger_of(client.history)
        together: list[Got] = []
        for got in some:
            self._note(client, ledger, got)
            if lot(got.token, 8) == 0:
                continue  # nobody can handle it
            what = self.rng.randrange(100)
            wait_ms = self.rng.choice((0, 0, 100, header.invisibleTime))
            if what < 50:
                self.later(client, wait_ms, partial(self._ack, got, 3))
            elif what < 70:
                together.append(got)
            elif what < 85:
                self.later(client, wait_ms, partial(self._change, got))
        if together:
            self.later(client, 1, partial(self._ack_all, together))

    def _note(self, client: Client, ledger: Ledger, got: Got) -> None:
        given: dict[tuple[Any, ...], Got] = ledger.own.setdefault("given", {})
        once = (*got.place, got.boot)
        if once in given:
            client.history.problem(f"{GROUP} received {got.attempt} at {got.place} twice")
        given[once] = got
        self._promise(ledger, got, "pop give", got.receipt.pop_ms, is_firm=False)

    def _promise(
        self, ledger: Ledger, got: Got, kind: str, pop_ms: int, *, is_firm: bool, boot: int = -1
    ) -> None:
        _, topic, queue_id, offset = got.place
        key = (kind, "", topic, queue_id, offset, pop_ms)
        boot = got.boot if boot < 0 else boot
        ledger.promises.append(Promise(got.broker, boot, is_firm, key))

    def _acked(self, client: Client, some: list[Got], answer: Answer) -> None:
        history = client.history
        for got in some:
            is_firm = history.sync_brokers[got.broker]
            self._promise(
                ledger_of(history),
                got,
                "pop ack",
                got.receipt.pop_ms,
                is_firm=is_firm,
                boot=answer.boot,
            )

    def _ack(self, got: Got, tries: int, client: Client) -> None:
        def done(answer: Answer) -> None:
            if answer.is_ok:
                self._acked(client, [got], answer)
            elif tries > 1:
                self.later(client, 200, partial(self._ack, got, tries - 1))

        self.ack(client, got, done)

    def _ack_all(self, some: list[Got], client: Client) -> None:
        def done(answer: Answer) -> None:
            if answer.is_ok:
                self._acked(client, some, answer)

        self.ack_all(client, some, done)

    def _change(self, got: Got, client: Client) -> None:
        def done(answer: Answer) -> None:
            if not answer.is_ok:
                return
            new = renewed(got, answer)
            ledger = ledger_of(client.history)
            is_firm = client.history.sync_brokers[got.broker]
            self._promise(ledger, new, "pop give", new.receipt.pop_ms, is_firm=is_firm)
            self._acked(client, [got], answer)
            ledger.ask("changed", got.broker)
            if self.rng.randrange(3):
                self.later(client, 100, partial(self._ack, new, 2))

        invisible_ms = self.rng.choice((0, 500, 2_000))
        self.change(client, got, invisible_ms, done, suspend=self.rng.randrange(4) == 0)


# ---------------------------------------------------------------------------------- what is in logs


def read(table: dict[str, str], topic: str, body: bytes, broker: str) -> Checkpoint | Ack | None:
    """What a record says of a pop, if it is on its way to the revive topic or there."""
    is_waiting = topic == names.TIMER_TOPIC and table.get(properties.REAL_TOPIC) == REVIVE
    if topic != REVIVE and not is_waiting:
        return None
    text = properties.build({properties.TAGS: table.get(properties.TAGS, "")})
    no_offset, no_host = (QueueOffset(0), LogOffset(0)), b""
    stored = StoredMessage(
        topic, 0, *no_offset, body, text, 0, 0, 0, no_host, 0, no_host, 0, 0, 0, 0
    )
    try:
        return pop_records.read(stored, broker)
    except BodyError:
        return None


def explains(ledger: Ledger, sent: Sent | None, message: StoredMessage) -> bool:
    """A checkpoint or an acknowledgement of this group."""
    found = read(properties.parse(message.properties), message.topic, message.body, "")
    return found is not None and found.group == GROUP and bool(found.broker)


class Point:
    """A checkpoint: where its copies stand in the revive topic, and what was acknowledged of it."""

    def __init__(self, point: Checkpoint) -> None:
        self.point = point
        self.deliveries: list[int] = []
        self.acks: dict[int, Record] = {}

    def is_done(self, offset: int, before: Record) -> bool:
        """Whether an acknowledgement that was in time stands before a record."""
        ack = self.acks.get(offset)
        if ack is None or ack.log_offset > before.log_offset:
            return False
        return ack.store_ms < self.point.revive_ms


class Walk:
    """Pairs messages with their checkpoints, and those with what came back."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.points: dict[Key, Point] = {}
        self.by_place: dict[tuple[str, int, int], list[Point]] = {}
        self.records: dict[tuple[str, int, int], Record] = {}
        self.by_attempt: dict[tuple[str, int], list[Record]] = {}
        self.early_acks: dict[Key, dict[int, Record]] = {}
        self.back: dict[tuple[str, int], list[Record]] = {}
        self._known: dict[bytes, Checkpoint | Ack | None] = view.ledger.own.setdefault("read", {})
        for one in view.records:
            self._look(one)

    def _look(self, one: Record) -> None:
        if one.topic == TOPIC or one.topic in RETRIES:
            self.records[one.topic, one.queue_id, one.queue_offset] = one
            self.by_attempt.setdefault((one.attempt, one.reconsume_times), []).append(one)
        if one.topic in RETRIES or one.topic == DEAD:
            self.back.setdefault((one.attempt, one.reconsume_times), []).append(one)
        if one.topic not in (REVIVE, names.TIMER_TOPIC):
            return
        if one.body not in self._known:
            self._known[one.body] = read(one.table, one.topic, one.body, self.view.name)
        found = self._known[one.body]
        if isinstance(found, Checkpoint):
            self._keep(one, found)
        elif isinstance(found, Ack):
            point = self.points.get(found.key)
            acks = self.early_acks.setdefault(found.key, {}) if point is None else point.acks
            for offset in found.offsets:
                acks.setdefault(offset, one)

    def _keep(self, one: Record, found: Checkpoint) -> None:
        point = self.points.get(found.key)
        if point is None:
            point = self.points[found.key] = Point(found)
            point.acks = self.early_acks.pop(found.key, {})
            for offset in found.offsets:
                place = (found.topic, found.queue_id, offset)
                self.by_place.setdefault(place, []).append(point)
        if one.topic == REVIVE:
            point.deliveries.append(one.log_offset)

    def points_of(self, one: Record) -> list[Point]:
        return self.by_place.get((one.topic, one.queue_id, one.queue_offset), [])

    def sources(self, back: Record) -> list[tuple[Record, Point]]:
        """The messages, and their checkpoints, that may have brought a record back."""
        times = back.reconsume_times
        return [
            (one, point)
            for before, is_suspended in ((times - 1, False), (times, True))
            for one in self.by_attempt.get((back.attempt, before), ())
            if one.log_offset < back.log_offset
            for point in self.points_of(one)
            if point.point.is_suspended == is_suspended
        ]


# --------------------------------------------------------------------------------------- the checks


def check(view: View) -> None:
    walk = Walk(view)
    for records in walk.back.values():
        for number, one in enumerate(records):
            _judge_back(walk, one, records[:number])
    _check_given(walk)
    _check_answers(walk)


def _judge_back(walk: Walk, one: Record, before: list[Record]) -> None:
    view, name, times = walk.view, one.attempt, one.reconsume_times
    if one.topic == DEAD and times not in (MOST_TIMES + 1, USUAL_TIMES + 1):
        view.problem(f"{name} is a dead letter after {times} tries")
    if one.topic != DEAD and times > USUAL_TIMES:
        view.problem(f"{name} came back for try {times}")
    if view.has_lost_begin:
        return
    sources = walk.sources(one)
    if not sources:
        view.problem(f"{name} came back for try {times}, and nobody had received it")
        return
    left = [(a, b) for a, b in sources if not b.is_done(a.queue_offset, one)]
    if not left:
        view.problem(f"{name} came back for try {times}, though it was acknowledged in time")
        return
    soonest_ms = min(point.point.revive_ms for _, point in left)
    if view.ledger.is_true_time and one.store_ms < soonest_ms:
        view.problem(f"{name} came back {soonest_ms - one.store_ms} ms too early")
    boot = view.boot_of(one)
    count = 1 + sum(view.boot_of(other) == boot for other in before)
    most = sum(sum(at < one.log_offset for at in point.deliveries) for _, point in left)
    if count > most:
        view.problem(f"{name} came back {count} times for try {times} in one boot, not {most}")
    _judge_late(view, one, sources, soonest_ms)


def _judge_late(view: View, one: Record, sources: list[tuple[Record, Point]], due_ms: int) -> None:
    """On a calm broker: at the end of its time, by the precision of the timers later."""
    calm_ms = view.calm_ms(view.boot_of(one))
    if calm_ms is None or len(sources) > 1 or sources[0][1].point.pop_ms < calm_ms:
        return
    late_ms = one.store_ms - due_ms - view.broker.config.timer_precision_ms
    if sources[0][1].point.invisible_ms < EARLIER_MS:
        late_ms -= EARLIER_MS  # it stands behind checkpoints that came before their own time
    if late_ms > LATE_MS:
        view.problem(f"{one.attempt} came back {late_ms} ms late")


def _check_given(walk: Walk) -> None:
    """What was received is what stands there, with its number of tries."""
    view = walk.view
    for (broker, topic, queue_id, offset, boot), got in view.ledger.own.get("given", {}).items():
        if broker != view.name:
            continue
        one = walk.records.get((topic, queue_id, offset))
        if one is None or view.is_after(one, boot):
            continue  # lost, as it may be
        if (one.attempt, one.reconsume_times) != (got.attempt, got.times):
            view.problem(
                f"{GROUP} received {got.attempt} as try {got.times} from {topic} {queue_id} "
                f"{offset}, where {one.attempt} stands as try {one.reconsume_times}"
            )


def _check_answers(walk: Walk) -> None:
    """What was received has its checkpoint; what was acknowledged has its mark."""
    given: dict[tuple[Any, ...], int] = {}
    acked: dict[tuple[Any, ...], int] = {}
    for key, point in walk.points.items():
        for offset in point.point.offsets:
            given["pop give", "", key[0], key[2], offset, key[4]] = MARKS
        for offset in point.acks:
            acked["pop ack", "", key[0], key[2], offset, key[4]] = MARKS
    for key, acks in walk.early_acks.items():  # the checkpoint may be lost
        for offset in acks:
            acked["pop ack", "", key[0], key[2], offset, key[4]] = MARKS
    check_promises(walk.view, "pop give", given)
    check_promises(walk.view, "pop ack", acked)


def unmet(view: View) -> list[str]:
    """Every message that the group wants was acknowledged, came back, or is a dead letter."""
    plan: ConsumerPlan | None = view.ledger.own.get("pop plan")
    walk = Walk(view)
    texts = []
    for one in walk.records.values():
        if one.log_offset < view.begin:
            continue
        sent = view.history.sent[view.ledger.attempts[one.attempt].token]
        if plan is not None and not is_wanted(plan, sent):
            continue
        if not _is_settled(walk, one):
            texts.append(
                f"{view.name}: {one.attempt} is owed to {GROUP}, try {one.reconsume_times}"
            )
    store, offsets = view.broker.store, view.broker.offsets
    for queue_id in store.queue_ids(TOPIC) if not texts else ():
        noted = offsets.get(TOPIC, GROUP, queue_id) or 0
        if noted < store.max_offset(TOPIC, queue_id):
            texts.append(f"{view.name}: {GROUP} is noted at {noted} of queue {queue_id}")
    return texts[:5]


def _is_settled(walk: Walk, one: Record) -> bool:
    """Whether each time that it was received has come to its end."""
    points = walk.points_of(one)
    return bool(points) and all(_is_over(walk, one, point) for point in points)


def _is_over(walk: Walk, one: Record, point: Point) -> bool:
    if one.queue_offset in point.acks or point.point.revive_ms > walk.view.now_ms + SOON_MS:
        return True
    times = one.reconsume_times + (not point.point.is_suspended)
    back = walk.back.get((one.attempt, times), ())
    return any(other.log_offset > one.log_offset for other in back)
