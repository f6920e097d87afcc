"""Delay levels in the simulated cluster: messages for later, and what is owed to them.

Owns: their traffic, and the check of SCHEDULE_TOPIC_XXXX, which retries and delayed transactions
pass through as well. One rule of theirs: within a level none early, in order, each once in a boot;
after a crash again rather than never.
"""

from __future__ import annotations

from typing import Any

from cometmq.broker import names
from cometmq.store.layout import delay_ms_by_level
from cometmq.testing.client import Client
from cometmq.testing.kinds_base import (
    KEPT_ELSEWHERE,
    LATE_MS,
    Attempt,
    KindProducer,
    Letter,
    Record,
    View,
)
from cometmq.wire import properties

TOPIC = "KLevels"
LEVELS = "1s 2s 1s 1s 1s 3s"  # retries begin with the third
MOST_LEVEL = 6


class LevelProducer(KindProducer):
    """Asks for every level, and for one more than there are."""

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        level = self.rng.choice((0, 1, 1, 1, 2, 3, 6, 9))
        return Letter(token, {properties.DELAY: str(level)} if level else {}, body)

    def place_of(self, attempt: Attempt, ext: dict[str, str]) -> tuple[str, int]:
        level = int(attempt.table.get(properties.DELAY, "0"))
        if not level:
            return super().place_of(attempt, ext)
        return names.SCHEDULE_TOPIC, min(level, MOST_LEVEL) - 1


class _Walk:
    """Pairs what waits in a level's queue with what was delivered from it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.waiting: dict[tuple[Any, ...], list[Record]] = {}
        self.delivered: dict[tuple[Any, ...], int] = {}
        self.last: dict[tuple[int, int], int] = {}
        self.delays_ms = delay_ms_by_level(view.broker.config.delay_levels)

    def keep(self, record: Record) -> None:
        view, level = self.view, record.queue_id + 1
        attempt = view.ledger.attempts.get(record.attempt)
        if record.delay_level != level:
            view.problem(f"{record.attempt} of level {record.delay_level} waits in level {level}")
        is_plain = attempt is not None and record.reconsume_times == 0
        if is_plain and attempt is not None:
            asked = min(int(attempt.table.get(properties.DELAY, "0")), MOST_LEVEL)
            wanted = (attempt.topic, str(attempt.queue_id), asked)
            table = record.table
            kept = (table.get(properties.REAL_TOPIC), table.get(properties.REAL_QUEUE_ID), level)
            if kept != wanted:
                view.problem(f"{record.attempt} asked for {wanted} and waits for {kept}")
        self.waiting.setdefault(_key(record, level), []).append(record)

    def deliver(self, record: Record) -> None:
        view, level = self.view, record.delay_level
        boot = view.boot_of(record)
        last = self.last.get((boot, level), -1)
        fitting = self.waiting.get(_key(record, level), [])
        ahead = [one for one in fitting if one.queue_offset > last]
        if self._may_lack_twin(record, fitting):
            ahead = [one for one in ahead if self._due_ms(one, level) <= record.store_ms]
        # Several only of messages that were sent back twice; deliveries leave no gap in a boot.
        following = [one for one in ahead if one.queue_offset == last + 1]
        source = next(iter(following or ahead), None)
        if source is None:
            if not view.has_lost_begin:
                why = "again or out of order" if fitting else "without having waited"
                view.problem(f"{record.attempt} was delivered from level {level} {why}")
            return
        self.last[boot, level] = source.queue_offset
        key = _key(record, level)
        self.delivered[key] = self.delivered.get(key, 0) + 1
        place = (source.table.get(properties.REAL_TOPIC), source.table.get("REAL_QID"))
        if place != (record.topic, str(record.queue_id)):
            view.problem(f"{record.attempt} was delivered to {record.topic} {record.queue_id}")
        self._judge_time(record, source, level, boot)

    def _may_lack_twin(self, record: Record, fitting: list[Record]) -> bool:
        """Whether what was delivered may have waited in a record that the log no longer has. A
        message may be sent back twice, as when the answer to the first time was late; if the log's
        begin was dropped with the first one, the second is not to be taken for it."""
        key = (self.view.name, "back", record.attempt, record.reconsume_times)
        is_twice = self.view.ledger.asked.get(key, 0) > len(fitting)
        return is_twice and self.view.has_lost_begin and self.view.ledger.is_true_time

    def _due_ms(self, source: Record, level: int) -> int:
        return source.store_ms + self.delays_ms[level - 1]

    def _judge_time(self, record: Record, source: Record, level: int, boot: int) -> None:
        view = self.view
        due_ms = self._due_ms(source, level)
        early_ms = due_ms - record.store_ms
        if early_ms > 0 and view.ledger.is_true_time:
            view.problem(f"{record.attempt} of level {level} came {early_ms} ms too early")
        calm_ms = view.calm_ms(boot)
        if calm_ms is not None and due_ms > calm_ms and -early_ms > LATE_MS:
            view.problem(f"{record.attempt} of level {level} came {-early_ms} ms late")


def _key(record: Record, level: int) -> tuple[Any, ...]:
    return (record.attempt, record.reconsume_times, level)


def walk(view: View) -> _Walk:
    found = _Walk(view)
    for record in view.records:
        if record.topic == names.SCHEDULE_TOPIC:
            found.keep(record)
        elif record.delay_level > 0 and record.topic not in KEPT_ELSEWHERE:
            found.deliver(record)
    return found


def check(view: View) -> None:
    walk(view)


def unmet(view: View) -> list[str]:
    """What should have come by now, or will soon."""
    found = walk(view)
    return [
        f"{view.name}: {records[0].attempt} was never delivered from level {key[2]}, "
        f"offset {records[0].queue_offset}"
        for key, records in found.waiting.items()
        if records[0].log_offset >= view.begin and found.delivered.get(key, 0) < len(records)
    ][:5]
