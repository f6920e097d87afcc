"""Messages popped in order in the simulated cluster.

Owns: a group that pops in order, with attempts that are repeated when their answer was lost, and
the check of what it is given. One rule of theirs: while a message of a queue is out nothing more of
that queue is, but for the attempt that has it; and none is passed over that nobody acknowledged.
"""

from __future__ import annotations

import random
from functools import partial

import msgspec

from cometmq.testing.client import Answer, Client, RouteCache
from cometmq.testing.kinds_base import View, ledger_of
from cometmq.testing.poppers import LEAST_INVISIBLE_MS, Broker, Got, Popper
from cometmq.testing.traffic import ConsumerPlan
from cometmq.wire.headers import PopHeader

TOPIC = "KPopOrdered"
GROUP = "GPopOrdered"


class Give(msgspec.Struct):
    """What one pop took out of one queue."""

    broker: str
    boot: int
    queue_id: int
    pop_ms: int
    attempt: str
    is_repeated: bool
    """The attempt was made before, and its answer lost."""
    times: dict[int, int]
    """By offset: how often it was out before."""
    until_ms: dict[int, int]
    """By offset: it is out until then at least, if nobody acknowledges it."""
    asked: dict[int, None] = {}
    """What somebody asked to acknowledge."""


class OrderedPopper(Popper):
    """Acknowledges one after the other, stops in the middle, puts one off, forgets all."""

    is_ordered = True

    def __init__(
        self, name: str, plan: ConsumerPlan, routes: RouteCache, rng: random.Random
    ) -> None:
        super().__init__(name, plan, routes, rng)
        self._count = 0

    def _attempt(self, broker: Broker) -> str | None:
        if not broker.attempt:
            self._count += 1
            broker.attempt = f"{self.name}/{broker.name}/{self._count}"
            broker.tries = 0
        broker.tries += 1
        return broker.attempt

    def missed(self, broker: Broker) -> None:
        broker.attempt = ""

    def take(self, client: Client, broker: Broker, header: PopHeader, some: list[Got]) -> None:
        attempt, broker.attempt = broker.attempt, ""
        by_queue: dict[int, list[Got]] = {}
        for got in some:
            by_queue.setdefault(got.receipt.queue_id, []).append(got)
        ledger = ledger_of(client.history)
        for queue_id, gots in by_queue.items():
            first = gots[0]
            over_ms = first.receipt.pop_ms + first.receipt.invisible_ms
            give = Give(
                broker.name,
                first.boot,
                queue_id,
                first.receipt.pop_ms,
                attempt,
                broker.tries > 1,
                {got.receipt.offset: got.times for got in gots},
                {got.receipt.offset: over_ms for got in gots},
            )
            ledger.own.setdefault("ordered pops", []).append(give)
            offsets = list(give.times)
            if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
                client.history.problem(f"{GROUP} received {offsets} of one queue")
            self._handle(client, give, gots)

    def _handle(self, client: Client, give: Give, gots: list[Got]) -> None:
        what = self.rng.randrange(10)
        wait_ms = self.rng.choice((0, 0, 50, 1_000))
        if what < 5:
            self.later(client, wait_ms, partial(self._ack_next, give, gots))
        elif what < 7:
            self.later(client, wait_ms, partial(self._ack_some, give, gots))
        elif what < 8:
            half = gots[: max(len(gots) // 2, 1)]
            self.later(client, wait_ms, partial(self._ack_next, give, half))
        elif what < 9:
            self.later(client, wait_ms, partial(self._hide, give, gots[-1]))

    def _ack_next(self, give: Give, gots: list[Got], client: Client) -> None:
        got, rest = gots[0], gots[1:]

        def done(answer: Answer) -> None:
            if answer.is_ok:
                self._reached(client, got, answer)
                if rest:
                    self.later(client, 1, partial(self._ack_next, give, rest))

        give.asked[got.receipt.offset] = None
        self.ack(client, got, done)

    def _ack_some(self, give: Give, gots: list[Got], client: Client) -> None:
        def done(answer: Answer) -> None:
            if answer.is_ok:
                self._reached(client, gots[-1], answer)

        give.asked.update({got.receipt.offset: None for got in gots})
        self.ack_all(client, gots, done)

    def _reached(self, client: Client, got: Got, answer: Answer) -> None:
        place = (got.broker, TOPIC, got.receipt.queue_id)
        client.history.reach(GROUP, place, got.receipt.offset + 1, answer.boot)

    def _hide(self, give: Give, got: Got, client: Client) -> None:
        invisible_ms = self.rng.choice((200, 2_000))
        offset = got.receipt.offset
        give.until_ms[offset] = min(give.until_ms[offset], give.pop_ms + invisible_ms)
        self.change(client, got, invisible_ms, lambda answer: None)


def check(view: View) -> None:
    queues: dict[tuple[int, int], list[Give]] = {}
    asked: dict[tuple[int, int], None] = {}
    for give in view.ledger.own.get("ordered pops", ()):
        if give.broker == view.name:
            queues.setdefault((give.boot, give.queue_id), []).append(give)
            asked.update({(give.queue_id, offset): None for offset in give.asked})
    for gives in queues.values():
        gives.sort(key=lambda give: give.pop_ms)
        for number, later in enumerate(gives):
            for give in gives[:number]:
                if give.pop_ms < later.pop_ms:
                    _judge(view, give, later, asked)
            if number and gives[number - 1].pop_ms < later.pop_ms:
                _judge_times(view, gives[number - 1], later)


def _judge(view: View, give: Give, later: Give, asked: dict[tuple[int, int], None]) -> None:
    is_same = give.attempt == later.attempt
    first, queue_id = min(later.times), give.queue_id
    for offset, until_ms in give.until_ms.items():
        is_passed = offset < first and (queue_id, offset) not in asked
        if is_passed and not view.has_lost_begin:
            view.problem(f"{GROUP} received {first} of queue {queue_id} and never ended {offset}")
        if offset not in give.asked and later.pop_ms < until_ms and not is_same:
            view.problem(
                f"{GROUP} received {list(later.times)} of queue {queue_id} "
                f"{until_ms - later.pop_ms} ms before the time of {offset} was over"
            )


def _judge_times(view: View, give: Give, later: Give) -> None:
    """Each time counts, of a message that was out in the pop just before. If the answer of one in
    between was lost, the queue was taken for its time as well."""
    left = {at: until_ms for at, until_ms in give.until_ms.items() if at not in give.asked}
    is_next = later.pop_ms < max(left.values(), default=0) + LEAST_INVISIBLE_MS
    if not is_next or later.is_repeated:
        return
    for offset in left:
        if offset in later.times and later.times[offset] != give.times[offset] + 1:
            view.problem(
                f"{GROUP} received {offset} of queue {give.queue_id} as try {later.times[offset]} "
                f"after try {give.times[offset]}"
            )


def unmet(view: View) -> list[str]:
    """All is acknowledged, and noted as such."""
    store, texts = view.broker.store, []
    for queue_id in store.queue_ids(TOPIC):
        noted = view.broker.offsets.get(TOPIC, GROUP, queue_id) or 0
        if noted < store.max_offset(TOPIC, queue_id):
            texts.append(f"{view.name}: {GROUP} has come to {noted} of queue {queue_id}")
    return texts
