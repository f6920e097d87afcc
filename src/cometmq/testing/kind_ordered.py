"""Ordered messages in the simulated cluster: each key in one queue, each queue under a lock.

Owns: producers that send a key's messages one after the other, and the judgement of what a group
gets. One rule of theirs: through locks, rebalancing and restarts, no message of a key comes before
an earlier one that its broker still owes.
"""

from __future__ import annotations

import random

from cometmq.message import StoredMessage
from cometmq.testing.client import Answer, Client, RouteCache, Target
from cometmq.testing.history import Queue
from cometmq.testing.kinds_base import Attempt, KindPlan, KindProducer, Letter, ledger_of
from cometmq.testing.traffic import Consumer, Share
from cometmq.wire import properties, record
from cometmq.wire.frame import Frame

TOPIC = "KOrdered"
KEY = "SIM_KEY"
NUMBER = "SIM_NUMBER"
KEYS = 3

Step = tuple[int, Queue, int, str]
"""Number, place, queue offset and token of a message that was acknowledged."""


class OrderedProducer(KindProducer):
    """One message at a time; the next one only when that has an answer."""

    def __init__(self, name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> None:
        super().__init__(name, plan, routes, rng)
        self._homes: dict[str, tuple[str, int]] = {}
        self._number = 0

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        key = f"{self.name}/{self.rng.randrange(KEYS)}"
        self._number += 1
        letter = Letter(token, {KEY: key, NUMBER: str(self._number)}, body)
        letter.queue = self._homes.get(key)
        return letter

    def targets(self, client: Client, letter: Letter) -> list[Target]:
        found = super().targets(client, letter)
        if found and letter.queue is None:
            one = self.rng.choice(found)
            letter.queue = self._homes[letter.table[KEY]] = (one.broker, one.queue_id)
            return [one]
        return found

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
        steps: dict[str, list[Step]] = ledger_of(client.history).own.setdefault("ordered", {})
        place = (target.broker, target.topic, target.queue_id)
        step = (
            int(letter.table[NUMBER]),
            place,
            int(answer.frame.ext["queueOffset"]),
            letter.token,
        )
        steps.setdefault(letter.table[KEY], []).append(step)


class OrderedConsumer(Consumer):
    """Checks each message against the one before it of the same key."""

    def take(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        for message in record.decode_all(frame.body):
            self._judge(client, message, int(frame.ext["minOffset"]))
        self.go_on(client, share, frame, boot)

    def _judge(self, client: Client, message: StoredMessage, least: int) -> None:
        """`least`: what is before it has expired from the log, unread or not."""
        history, group = client.history, self.plan.group
        key = properties.get(message.properties, KEY) or ""
        number = int(properties.get(message.properties, NUMBER) or "0")
        steps: list[Step] = ledger_of(history).own.get("ordered", {}).get(key, [])
        before = [step for step in steps if step[0] < number]
        if not before:
            return
        _, place, offset, token = before[-1]
        ack = history.acks.get(place, {}).get(offset)
        if ack is None or ack.token != token:
            return  # lost, as it may be
        if offset < max(history.excused.get((group, place), 0), least):
            return
        if (*place, offset, token) not in history.consumed.get(group, set()):
            history.problem(
                f"{group} got number {number} of {key} before {token} at {place} offset {offset}"
            )
