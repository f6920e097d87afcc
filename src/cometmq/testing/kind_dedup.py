"""One message for one key in the simulated cluster: a topic with `dedup.minutes`.

Owns: producers that repeat themselves and each other, and the check of what is stored for it. One
rule of theirs: whatever crashes, no key is stored twice within the window, and everybody who sent
it is told where its first message is.
"""

from __future__ import annotations

import random

from cometmq.testing.client import Answer, Client, RouteCache, Target
from cometmq.testing.history import Queue
from cometmq.testing.kinds_base import (
    Attempt,
    KindPlan,
    KindProducer,
    Letter,
    Promise,
    Record,
    View,
    copies,
    ledger_of,
)
from cometmq.wire import message_id, properties

TOPIC = "KDedup"
MINUTES = 1
WINDOW_MS = MINUTES * 60_000
ATTRIBUTES = f"+dedup.minutes={MINUTES}"
KEYS = 12


class DedupProducer(KindProducer):
    """Each key of a small pool has its broker, and is sent again and again, to any queue of it."""

    template = "NoTemplate"  # a topic that is made by a send would compare nothing

    def __init__(self, name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> None:
        super().__init__(name, plan, routes, rng)
        self._mine = 0

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        letter = Letter(token, {}, body)
        if self.rng.randrange(3) == 0:
            self._mine += 1
        owner = self.name if self.rng.randrange(2) else "all"
        letter.unique_key = f"{owner}/{self._mine + self.rng.randrange(KEYS)}"
        return letter

    def _post(self, client: Client, letter: Letter) -> None:
        super()._post(client, letter)
        if letter.tries and self.rng.randrange(3) == 0:  # before the first one is answered
            super()._post(client, letter)

    def targets(self, client: Client, letter: Letter) -> list[Target]:
        """Any queue of the broker that this key belongs to: by the first who sent it."""
        homes: dict[str, str] = ledger_of(client.history).own.setdefault("dedup homes", {})
        found = super().targets(client, letter)
        if found:
            home = homes.setdefault(letter.unique_key, self.rng.choice(found).broker)
            found = [one for one in found if one.broker == home]
        return found

    def answered(
        self, client: Client, letter: Letter, attempt: Attempt, target: Target, answer: Answer
    ) -> None:
        """Whether it was the first or not: where the key stands is a promise."""
        assert answer.frame is not None
        ext, ledger = answer.frame.ext, ledger_of(client.history)
        log_offset = message_id.parse_offset_id(ext["msgId"])[2]
        is_firm = self.is_firm(target.broker)
        place = (int(ext["queueId"]), int(ext["queueOffset"]), log_offset)
        key = ("dedup", letter.unique_key, *place)
        ledger.promises.append(Promise(target.broker, answer.boot, is_firm, key))
        if "duplicate" in ext:
            ledger.ask("duplicates", letter.unique_key)
            if is_firm and not client.history.is_on_disk(target.broker, answer.boot, log_offset):
                client.history.problem(f"{letter.unique_key} answered as known and not on disk")
            return
        where: Queue = (target.broker, TOPIC, place[0])
        client.history.acked(
            where, place[1], log_offset, letter.token, answer.boot, is_firm=is_firm
        )


def _by_key(view: View) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for one in copies(view, TOPIC):
        if one.log_offset >= view.begin:
            found.setdefault(one.table.get(properties.UNIQUE_KEY, ""), []).append(one)
    return found


def check(view: View) -> None:
    found = _by_key(view)
    for key, records in found.items():
        newest_ms = records[0].store_ms
        for one in records[1:]:
            if one.store_ms - newest_ms <= WINDOW_MS:
                view.problem(f"the key {key} is stored twice, {one.store_ms - newest_ms} ms apart")
            newest_ms = max(newest_ms, one.store_ms)
    _check_told(view, found)


def _check_told(view: View, found: dict[str, list[Record]]) -> None:
    """What anybody was told about a key leads to its record."""
    for promise in view.ledger.promises:
        if promise.key[0] != "dedup" or promise.broker != view.name or not view.kept(promise):
            continue
        _, key, queue_id, queue_offset, log_offset = promise.key
        if log_offset < view.begin:
            continue
        if not any(
            (one.queue_id, one.queue_offset, one.log_offset) == (queue_id, queue_offset, log_offset)
            for one in found.get(key, ())
        ):
            view.problem(f"the key {key} was told to be at {promise.key[2:]}, and is not")
