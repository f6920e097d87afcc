"""Timed messages in the simulated cluster: for any time, rolled on the way, some taken back.

Owns: their traffic and the check of the timers' queue. One rule of theirs: none early, each once in
a boot, in a slot in the order of sending; none that was taken back in time; after a crash again
rather than never.
"""

from __future__ import annotations

import math

import msgspec

from cometmq.broker import names
from cometmq.testing.client import Answer, Client, Target
from cometmq.testing.kinds_base import (
    LATE_MS,
    Attempt,
    KindProducer,
    Letter,
    Record,
    View,
    ledger_of,
)
from cometmq.wire import properties
from cometmq.wire.codes import RequestCode
from cometmq.wire.headers import RecallHeader, to_ext

TOPIC = "KTimers"
SOON_MS = 15_000  # what comes later than this a run does not wait for


class Recall(msgspec.Struct):
    """A message taken back; when the broker said so, by its own clock."""

    broker: str
    boot: int
    is_firm: bool
    told_ms: int


class TimerProducer(KindProducer):
    """Asks for a time in each of the three ways; takes a few messages back."""

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        rng = self.rng
        delay_ms = rng.choice((1, 700, 1_500, 1_500, 3_000, 6_000, 9_000)) + rng.randrange(500)
        table = {
            0: {properties.TIMER_DELIVER_MS: str(client.now_ms + delay_ms)},
            1: {properties.TIMER_DELAY_MS: str(delay_ms)},
            2: {properties.TIMER_DELAY_SEC: str(delay_ms // 1000 + 1)},
        }[rng.randrange(3)]
        return Letter(token, table, body)

    def place_of(self, attempt: Attempt, ext: dict[str, str]) -> tuple[str, int]:
        if "recallHandle" in ext:
            return names.TIMER_TOPIC, 0
        return super().place_of(attempt, ext)  # its time had come already

    def stored(
        self,
        client: Client,
        letter: Letter,
        attempt: Attempt,
        target: Target,
        answer: Answer,
        log_offset: int,
    ) -> None:
        assert answer.frame is not None
        handle = answer.frame.ext.get("recallHandle")
        if handle is None or self.rng.randrange(4):
            return
        ledger = ledger_of(client.history)
        ledger.ask("recall", f"{attempt.name:0>32}")

        def done(answer: Answer) -> None:
            if answer.is_ok:
                ledger.own.setdefault("recalls", {})[attempt.name] = Recall(
                    target.broker,
                    answer.boot,
                    self.is_firm(target.broker),
                    ledger.clock(target.broker),
                )

        header = to_ext(RecallHeader(self.plan.topic, handle, self.group))
        client.ask(target.address, RequestCode.RECALL_MESSAGE, header, done)


class _Walk:
    """Pairs what waits in the timers' queue with what was delivered from it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.waiting: dict[str, list[Record]] = {}
        self.markers: dict[str, Record] = {}
        self.delivered: dict[str, list[Record]] = {}
        self.last: dict[tuple[int, str], int] = {}

    def look(self, record: Record) -> None:
        if record.topic == names.TIMER_TOPIC:
            key = record.table.get(properties.TIMER_DELETES)
            if key is not None:
                self.markers[key.lstrip("0")] = record
            elif record.table.get(properties.REAL_TOPIC) == TOPIC:
                self.waiting.setdefault(record.attempt, []).append(record)
        elif record.topic == TOPIC:
            self._deliver(record)

    def due_ms(self, record: Record) -> int:
        """When a message asked to be delivered, by the broker's clock."""
        table = self.view.ledger.attempts[record.attempt].table
        if properties.TIMER_DELIVER_MS in table:
            return int(table[properties.TIMER_DELIVER_MS])
        if properties.TIMER_ROLL_TIMES in record.table:  # the first one has expired
            return int(record.table[properties.TIMER_OUT_MS]) + 1
        delay_ms = int(table.get(properties.TIMER_DELAY_MS, "0"))
        return record.store_ms + delay_ms + 1000 * int(table.get(properties.TIMER_DELAY_SEC, "0"))

    def _deliver(self, record: Record) -> None:
        view, name = self.view, record.attempt
        is_timed = properties.TIMER_OUT_MS in record.table
        source = self.waiting.get(name, [])
        attempt = view.ledger.attempts[name]
        if str(record.queue_id) != str(attempt.queue_id):
            view.problem(f"{name} was delivered to queue {record.queue_id}")
        if is_timed and not source:
            if not view.has_lost_begin:
                view.problem(f"{name} was delivered without having waited")
            return
        due_ms = self.due_ms(source[0] if source else record)
        if not is_timed and properties.TIMER_DELIVER_MS not in attempt.table:
            view.problem(f"{name} did not wait at all")
        early_ms = due_ms - record.store_ms
        if early_ms > 0 and view.ledger.is_true_time:
            view.problem(f"timer {name} came {early_ms} ms too early")
        if is_timed:
            self._judge(record, source[-1], due_ms)
        self.delivered.setdefault(name, []).append(record)

    def _judge(self, record: Record, source: Record, due_ms: int) -> None:
        view, name, boot = self.view, record.attempt, self.view.boot_of(record)
        before = [one for one in self.delivered.get(name, ()) if view.boot_of(one) == boot]
        if len(before) >= self._most(record, boot):
            view.problem(f"timer {name} was delivered {len(before) + 1} times by one boot")
        slot = record.table[properties.TIMER_OUT_MS]
        if len(self.waiting[name]) == 1 and view.ledger.is_true_time:  # rolled ones enter again
            if source.queue_offset < self.last.get((boot, slot), -1):
                view.problem(f"timer {name} of slot {slot} came after one that was sent later")
            self.last[boot, slot] = source.queue_offset
        calm_ms = view.calm_ms(boot)
        late_ms = record.store_ms - due_ms - view.broker.config.timer_precision_ms
        is_calm = calm_ms is not None and due_ms > calm_ms and source.store_ms > calm_ms
        if is_calm and late_ms > LATE_MS:
            view.problem(f"timer {name} came {late_ms} ms late")
        self._judge_recall(record, int(slot))

    def _most(self, record: Record, boot: int) -> float:
        """How often a message may come in one boot: once; after a crash also from each place of
        the queue to which it had rolled. How many these were nobody knows any more if the log's
        begin was dropped with some of them."""
        if boot <= 1:
            return 1
        if self.view.has_lost_begin and properties.TIMER_ROLL_TIMES in record.table:
            return math.inf
        return len(self.waiting[record.attempt])

    def _judge_recall(self, record: Record, slot_ms: int) -> None:
        view, name = self.view, record.attempt
        recall: Recall | None = view.ledger.own.get("recalls", {}).get(name)
        if recall is None or not view.ledger.is_true_time:
            return
        marker = self.markers.get(f"{name:0>32}".lstrip("0"))
        if marker is None or marker.log_offset > record.log_offset:
            return  # lost, as it may be
        if recall.told_ms < slot_ms:
            view.problem(f"timer {name} was delivered, {slot_ms - recall.told_ms} ms after recall")


def walk(view: View) -> _Walk:
    found = _Walk(view)
    for record in view.records:
        found.look(record)
    return found


def check(view: View) -> None:
    found = walk(view)
    for name, recall in view.ledger.own.get("recalls", {}).items():
        later = [r for r in view.history.recoveries.get(view.name, ()) if r.boot > recall.boot]
        is_kept = recall.is_firm or all(recovery.is_lossless for recovery in later)
        if recall.broker == view.name and is_kept and not view.has_lost_begin:
            if f"{name:0>32}".lstrip("0") not in found.markers:
                view.problem(f"the recall of {name} was acknowledged and is gone")


def unmet(view: View) -> list[str]:
    found = walk(view)
    texts = []
    for name, records in found.waiting.items():
        is_recalled = f"{name:0>32}".lstrip("0") in found.markers
        if view.has_lost_begin:  # a message that rolled outlives the record of its recall
            is_recalled |= ("recall", f"{name:0>32}") in view.ledger.asked
        is_far = found.due_ms(records[0]) > view.now_ms + SOON_MS
        if is_recalled or is_far or records[0].log_offset < view.begin:
            continue
        if name not in found.delivered:
            texts.append(f"{view.name}: timer {name} was never delivered")
    return texts[:5]
