"""Numbered messages in the simulated cluster: PRODUCER_SEQ.

Owns: producers that number what they send to each queue, repeat themselves and overlap, and the
check of the log. One rule of theirs: through crashes each number stands in its queue once, next to
the one before it; what was acknowledged is there, and a gap is only told where a power loss may
have taken something.
"""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import msgspec

from cometmq.testing.client import Answer, Client, RouteCache, Target
from cometmq.testing.kinds_base import (
    ATTEMPT,
    IDLE_MS,
    QUEUES,
    Attempt,
    KindPlan,
    KindProducer,
    Letter,
    Promise,
    View,
    check_promises,
    copies,
    ledger_of,
)
from cometmq.wire import message_id, properties, record
from cometmq.wire.codes import RequestCode
from cometmq.wire.headers import SendHeader, send_v2_ext
from cometmq.wire.record import Piece

TOPIC = "KSequences"
_GAP = re.compile(r"sequence gap: .* batch \d+: expected (\d+), got \d+")


class Lane(msgspec.Struct):
    """What one producer sends to one queue, by its numbers."""

    target: Target
    letters: list[Letter] = []
    next: int = 0
    """The first number that is not acknowledged."""
    busy: int = 0
    """Requests under way."""
    acks: dict[int, Promise] = {}


class SequenceProducer(KindProducer):
    """Sends each number until it is acknowledged, alone or in batches that overlap."""

    def __init__(self, name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> None:
        super().__init__(name, plan, routes, rng)
        # A process that comes back does not know how far it was: it begins a later batch.
        self._producer, _, batch = name.rpartition(".")
        self._batch = int(batch)
        self._lanes: dict[tuple[str, int], Lane] = {}

    @property
    def is_done(self) -> bool:
        lanes = self._lanes.values()
        is_all = all(not one.busy and one.next == len(one.letters) for one in lanes)
        return is_all and self._final >= self.plan.final_count

    def wake(self, client: Client) -> None:
        plan, rng = self.plan, self.rng
        self.next_ms = client.now_ms + 1 + rng.randrange(2 * plan.interval_ms)
        for target in self._routes.get(client, plan.topic):
            self._lanes.setdefault((target.broker, target.queue_id), Lane(target)).target = target
        idle = [lane for lane in self._lanes.values() if not lane.busy]
        if client.is_healed:
            owing = [lane for lane in idle if lane.next < len(lane.letters)]
            if not owing and self._final < plan.final_count:
                if self._final < plan.final_count // 2 or client.is_past_grace:
                    self._final += 1
                    owing = idle[:1] if self._final % 2 else idle[-1:]
                    for lane in owing:
                        self._add(client, lane)
            if not owing:
                self.next_ms = client.now_ms + IDLE_MS
            for lane in owing:
                self._send(client, lane)
        elif idle:
            lane = rng.choice(idle)
            if len(lane.letters) - lane.next < 8:
                for _ in range(rng.choice((0, 1, 1, 3))):
                    self._add(client, lane)
            self._send(client, lane)

    def _add(self, client: Client, lane: Lane) -> None:
        letter = self._new(client)
        number = f"{self._producer} {self._batch} {len(lane.letters)}"
        letter.table = {properties.PRODUCER_SEQ: number, ATTEMPT: letter.token}
        lane.letters.append(letter)
        attempt = Attempt(
            letter.token,
            letter.token,
            TOPIC,
            lane.target.broker,
            lane.target.queue_id,
            letter.table,
        )
        ledger_of(client.history).attempts[letter.token] = attempt

    def _send(self, client: Client, lane: Lane) -> None:
        begin = max(lane.next - self.rng.choice((0, 0, 0, 1, 3)), 0)
        end = min(len(lane.letters), lane.next + self.rng.choice((1, 1, 2, 5)))
        some = lane.letters[begin:end]
        if not some:
            return
        texts = [
            properties.build({**one.table, properties.UNIQUE_KEY: f"{one.token:0>32}"})
            for one in some
        ]
        is_batch = len(some) > 1
        body = some[0].body
        if is_batch:
            pairs = zip(some, texts, strict=True)
            body = record.join_batch(Piece(0, one.body, text) for one, text in pairs)
        header = SendHeader(
            producerGroup=self.group,
            topic=TOPIC,
            defaultTopic=self.template,
            defaultTopicQueueNums=QUEUES,
            queueId=lane.target.queue_id,
            sysFlag=0,
            bornTimestamp=client.now_ms,
            flag=0,
            properties="" if is_batch else texts[0],
            batch=is_batch,
        )
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        for _ in range(self.rng.choice((1, 1, 1, 2))):  # twice: before the first one is answered
            lane.busy += 1
            client.ask(
                lane.target.address,
                code,
                send_v2_ext(header),
                partial(self._told, client, lane, lane.target, begin, end),
                body=body,
            )

    def _told(
        self, client: Client, lane: Lane, target: Target, begin: int, end: int, answer: Answer
    ) -> None:
        lane.busy -= 1
        self.next_ms = min(self.next_ms, client.now_ms + 1 + self.plan.interval_ms)
        frame = answer.frame
        if frame is None:
            return
        if not answer.is_ok:
            gap = _GAP.fullmatch(frame.remark or "")
            if gap is not None:
                ledger_of(client.history).own.setdefault("gaps", []).extend(
                    lane.acks[n] for n in range(int(gap[1]), lane.next) if n in lane.acks
                )
                lane.next = min(int(gap[1]), len(lane.letters))
            return
        lane.next = max(lane.next, end)
        broker, is_firm = target.broker, self.is_firm(target.broker)
        ledger = ledger_of(client.history)
        for n in range(begin, end):
            key = ("seq", lane.letters[n].token, target.queue_id)
            lane.acks[n] = Promise(broker, answer.boot, is_firm, key)
            ledger.promises.append(lane.acks[n])
        if "sequenced" not in frame.ext:
            client.history.problem(f"{self.name} sent a number and was not told that it counts")
        if "duplicate" in frame.ext:
            ledger.ask("numbered again", broker)
            last = message_id.parse_offset_id(frame.ext["msgId"])[2]
            if is_firm and not client.history.is_on_disk(broker, answer.boot, last):
                client.history.problem(f"{self.name} was told of a number that is not on disk")
            return
        ids = frame.ext["msgId"].split(",")
        for number, text in enumerate(ids):
            client.history.acked(
                (broker, TOPIC, target.queue_id),
                int(frame.ext["queueOffset"]) + number,
                message_id.parse_offset_id(text)[2],
                lane.letters[end - len(ids) + number].token,
                answer.boot,
                is_firm=is_firm,
            )


def check(view: View) -> None:
    last: dict[tuple[str, int], tuple[int, int]] = {}
    have: dict[tuple[Any, ...], int] = {}
    for one in copies(view, TOPIC):
        if one.log_offset < view.begin:
            continue
        producer, batch, n = one.table[properties.PRODUCER_SEQ].split(" ")
        place, number = (producer, one.queue_id), (int(batch), int(n))
        before = last.get(place)
        is_first = before is None and (number[1] == 0 or view.has_lost_begin)
        is_next = before is not None and (
            number == (before[0], before[1] + 1) or (number[0] > before[0] and number[1] == 0)
        )
        if not is_first and not is_next:
            view.problem(f"{producer} in queue {one.queue_id}: {number} stands after {before}")
        last[place] = number
        have["seq", one.attempt, one.queue_id] = 2**31  # told as often as it was sent
    check_promises(view, "seq", have)
    for ack in view.ledger.own.get("gaps", ()):
        # A broker may ask for a number again only if it was allowed to lose it; what it drops to
        # have room on its disk it may forget.
        if ack.broker == view.name and view.kept(ack) and not view.has_lost_begin:
            view.problem(f"{ack.key[1]} was acknowledged, and its number asked for again")
