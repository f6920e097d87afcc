"""Messages that expire in the simulated cluster: TTL_MS, and a topic for those that did.

Owns: their traffic, and the check of who got them and where they went. One rule of theirs: nobody
is given one after its time and nobody misses one before it, by the broker's own clock; each that
expired is moved once, whatever crashes.
"""

from __future__ import annotations

import random

import msgspec

from cometmq.broker import names
from cometmq.message import StoredMessage
from cometmq.testing.client import Client, RouteCache
from cometmq.testing.history import Queue, Sent
from cometmq.testing.kind_levels import MOST_LEVEL
from cometmq.testing.kinds_base import (
    ATTEMPT,
    Attempt,
    KindProducer,
    Ledger,
    Letter,
    Record,
    View,
    copies,
    ledger_of,
)
from cometmq.testing.traffic import Consumer, ConsumerPlan, Share
from cometmq.wire import properties, record
from cometmq.wire.codes import ResponseCode
from cometmq.wire.frame import Frame

TOPIC = "KTtl"
GROUP = "GTtl"
OLD = "KTtlOld"
ATTRIBUTES = f"+expired.topic={OLD}"
WAY_MS = 100  # how long an answer is on its way on a sound network, at most
MOVED_MS = 3_000  # so long after its end a message is surely moved


class TtlProducer(KindProducer):
    """Messages that live for ever, for long or hardly at all; some begin to live later."""

    template = "NoTemplate"  # a topic that is made by a send would keep what expired

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        rng = self.rng
        table = {}
        if rng.randrange(6):
            table[properties.TTL_MS] = str(rng.choice((1, 50, 300, 1_000, 4_000, 600_000)))
        if rng.randrange(5) == 0:
            table[properties.DELAY] = str(rng.choice((1, 2)))
        return Letter(token, table, body)

    def place_of(self, attempt: Attempt, ext: dict[str, str]) -> tuple[str, int]:
        level = int(attempt.table.get(properties.DELAY, "0"))
        if not level:
            return super().place_of(attempt, ext)
        return names.SCHEDULE_TOPIC, min(level, MOST_LEVEL) - 1


class Passed(msgspec.Struct, frozen=True):
    """A member was told to go on behind these offsets; by then it was so late at the broker."""

    broker: str
    boot: int
    queue_id: int
    begin: int
    end: int
    at_ms: int


class TtlConsumer(Consumer):
    """Judges what it is given by the broker's clock, and notes what it was led past."""

    gets_all = False

    def __init__(
        self, name: str, plan: ConsumerPlan, routes: RouteCache, rng: random.Random
    ) -> None:
        super().__init__(name, plan, routes, rng)
        self._asked: dict[Queue, tuple[int, int]] = {}

    def _pull(self, client: Client, share: Share) -> None:
        broker = share.target.broker
        now_ms = ledger_of(client.history).clock(broker)
        self._asked[share.target.place] = (_boot(client, broker), now_ms)
        super()._pull(client, share)

    def take(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        for message in record.decode_all(frame.body):
            self._judge(client, share, message, boot)
        self.go_on(client, share, frame, boot)

    def _judge(self, client: Client, share: Share, message: StoredMessage, boot: int) -> None:
        text = properties.get(message.properties, properties.TTL_UNTIL)
        if text is None:
            return
        broker = share.target.broker
        asked_boot, asked_ms = self._asked[share.target.place]
        late_ms = asked_ms - int(text) if asked_boot == boot else -1
        if client.is_past_grace and _boot(client, broker) == boot:
            late_ms = max(late_ms, ledger_of(client.history).clock(broker) - int(text) - WAY_MS)
        if late_ms >= 0:
            client.history.problem(
                f"{GROUP} was given {broker} queue {message.queue_id} offset "
                f"{message.queue_offset} {late_ms} ms after its time"
            )

    def go_on(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        ledger, broker = ledger_of(client.history), share.target.broker
        begin, end = share.offset, int(frame.ext["nextBeginOffset"])
        is_moved = frame.code == ResponseCode.PULL_OFFSET_MOVED
        if begin < end and not is_moved and _boot(client, broker) == boot:
            passed = Passed(broker, boot, share.target.queue_id, begin, end, ledger.clock(broker))
            ledger.own.setdefault("passed", []).append(passed)
        super().go_on(client, share, frame, boot)


def _boot(client: Client, broker: str) -> int:
    found = client.history.recoveries.get(broker)
    return found[-1].boot if found else 0


def explains(ledger: Ledger, sent: Sent | None, message: StoredMessage) -> bool:
    """A copy of what expired."""
    attempt = ledger.attempts.get(properties.get(message.properties, ATTEMPT) or "")
    is_known = sent is not None and attempt is not None and attempt.token == sent.token
    return is_known and message.topic == OLD and sent is not None and message.body == sent.body


def _until_ms(one: Record) -> int | None:
    text = one.table.get(properties.TTL_UNTIL)
    return None if text is None else int(text)


def check(view: View) -> None:
    mine = {(one.queue_id, one.queue_offset): one for one in copies(view, TOPIC)}
    for one in mine.values():
        ttl, until_ms = one.table.get(properties.TTL_MS), _until_ms(one)
        wanted = None if ttl is None else one.store_ms + int(ttl)
        # By the clock as it was then; the time of storing never goes back, as a clock may.
        if until_ms != wanted and (view.ledger.is_true_time or until_ms is None or wanted is None):
            view.problem(f"{one.attempt} of {ttl} ms, stored at {one.store_ms}, until {until_ms}")
    _check_passed(view, mine)
    _check_moved(view, mine)


def _check_passed(view: View, mine: dict[tuple[int, int], Record]) -> None:
    given = view.history.consumed.get(GROUP, set())
    for one in view.ledger.own.get("passed", ()):
        if one.broker != view.name:
            continue
        for offset in range(one.begin, one.end):
            found = mine.get((one.queue_id, offset))
            if found is None or found.log_offset < view.begin or view.is_after(found, one.boot):
                continue
            until_ms = _until_ms(found)
            token = view.ledger.attempts[found.attempt].token
            is_alive = until_ms is None or until_ms > one.at_ms
            if is_alive and (view.name, TOPIC, one.queue_id, offset, token) not in given:
                view.problem(f"{GROUP} was led past {found.attempt}, which lives until {until_ms}")


def _check_moved(view: View, mine: dict[tuple[int, int], Record]) -> None:
    seen: dict[tuple[int, int], None] = {}
    for one in copies(view, OLD):
        origin = (
            int(one.table[properties.EXPIRED_QUEUE_ID]),
            int(one.table[properties.EXPIRED_OFFSET]),
        )
        found = mine.get(origin)
        if found is None or found.attempt != one.attempt:
            if not view.has_lost_begin:
                view.problem(f"{one.attempt} was moved from {origin}, where it is not")
            continue
        until_ms = _until_ms(found)
        if until_ms is None or (view.ledger.is_true_time and one.store_ms < until_ms):
            view.problem(f"{one.attempt} was moved at {one.store_ms}, it lives until {until_ms}")
        if properties.TTL_UNTIL in one.table or properties.TTL_MS in one.table:
            view.problem(f"{one.attempt} expires again where expired messages go")
        if origin in seen and found.log_offset >= view.begin:
            view.problem(f"{one.attempt} of {origin} was moved twice")
        seen[origin] = None


def unmet(view: View) -> list[str]:
    """Who lives is given to the group; who does not was moved."""
    given = view.history.consumed.get(GROUP, set())
    moved = {
        (one.table[properties.EXPIRED_QUEUE_ID], one.table[properties.EXPIRED_OFFSET])
        for one in copies(view, OLD)
    }
    texts = []
    for one in copies(view, TOPIC):
        until_ms = _until_ms(one)
        token = view.ledger.attempts[one.attempt].token
        place = (view.name, TOPIC, one.queue_id)
        is_excused = one.queue_offset < view.history.excused.get((GROUP, place), 0)
        if one.log_offset < view.begin:
            continue
        if until_ms is None or until_ms > view.now_ms:
            if (*place, one.queue_offset, token) not in given and not is_excused:
                texts.append(f"{GROUP} was never given {one.attempt} at {place}")
        elif until_ms < view.now_ms - MOVED_MS:
            if (str(one.queue_id), str(one.queue_offset)) not in moved:
                texts.append(f"{view.name}: {one.attempt} expired and was not moved")
    return texts[:5]
