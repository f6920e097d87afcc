"""What clients did in one run on a SimLoop, and whether they may have done it.

Owns: the record of what was sent, acknowledged and handled, and every checker over it. One rule: a
problem is written down where it is seen and the run goes on; nothing here moves the run.

A place is (broker, topic, queue id, queue offset). Offsets are used again after a power loss took
the end of a queue, so what was handled is remembered by place and token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from cometmq.broker.broker import Broker
from cometmq.message import SendStatus
from cometmq.testing.loop import SimLoop
from cometmq.testing.server_on_loop import SimServer
from cometmq.wire.record import decode

Queue = tuple[str, str, int]
"""Broker, topic as it is stored, queue id."""
Place = tuple[str, str, int, int]

MOST_PROBLEMS = 10  # one mistake is often seen many times
TAIL_S = 120.0  # who takes a queue may have read its offset this long ago
LOCKS_FORGOTTEN_S = 31.0  # a client trusts its lock for 30 s; a restarted broker knows no locks


class Sent(msgspec.Struct, frozen=True):
    """A message that was given to a producer."""

    key: str
    number: int
    at_s: float


class Acked(msgspec.Struct, frozen=True):
    """What the producer was told."""

    place: Place
    status: SendStatus
    at_s: float


class Record:
    """One run as seen from outside."""

    def __init__(
        self,
        loop: SimLoop,
        brokers: dict[str, SimServer],
        *,
        topic: str,
        group: str,
        is_ordered: bool,
        is_sync: bool,
        consume_timeout_s: float,
    ) -> None:
        self.loop = loop
        self.brokers = brokers
        self.topic = topic
        self.group = group
        self.topics = (topic, f"%RETRY%{group}")
        self.is_ordered = is_ordered
        self.is_sync = is_sync
        self.consume_timeout_s = consume_timeout_s
        self.problems: list[str] = []
        self.sent: dict[str, Sent] = {}
        self.acked: dict[str, Acked] = {}
        self.done: dict[str, None] = {}
        """Tokens that a handler has finished with success."""
        self.begins = 0
        self.started_s: dict[str, float] = {}
        """By broker: when its last boot began."""
        self.power_lost_s = -1.0
        """When power was last lost anywhere."""
        self._ok: dict[Place, dict[str, None]] = {}
        self._ended: dict[Place, dict[str, None]] = {}
        self._running: dict[Place, dict[str, float]] = {}
        """Place and member -> since when."""
        self._begun: dict[str, Queue] = {}
        """Tokens with a sharding key in the order in which handlers got them first, and where."""
        self._committed: dict[Queue, deque[tuple[float, int]]] = {}
        self._checked: dict[Queue, int] = {}
        self._finished_to: dict[Queue, int] = {}
        self._unsafe_to: dict[Queue, int] = {}

    def problem(self, text: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"at {self.loop.time():.3f} s: {text}")
            self.loop.note(f"PROBLEM {text}")

    # ------------------------------------------------------------------------------- what happened

    def loses_power(self, broker: str) -> None:
        """Queues of this broker may be shorter after it, and their offsets come again.

        Without synchronous flushes that may go unnoticed: a consumer that lives on goes on from the
        offset that it had, and what has meanwhile been stored below it is passed by. RocketMQ's
        protocol has nothing that would tell; so there these offsets are not looked at any more.
        """
        self.power_lost_s = self.loop.time()
        if not self.is_sync:
            for queue, core in self._queues():
                if queue[0] == broker:
                    end = core.store.max_offset(queue[1], queue[2])
                    self._unsafe_to[queue] = max(end, self._unsafe_to.get(queue, 0))
        tables: tuple[dict[Queue, Any], ...] = (self._checked, self._finished_to, self._committed)
        for table in tables:
            for queue in [queue for queue in table if queue[0] == broker]:
                del table[queue]

    def _is_unsafe(self, place: Place) -> bool:
        return place[3] < self._unsafe_to.get(place[:3], 0)

    def began(self, member: str, given: list[tuple[Place, str]]) -> None:
        """A handler gets messages."""
        if self.is_ordered:
            self._began_in_order(member, [place for place, _ in given])
        for place, token in given:
            self.begins += 1
            self.loop.note(f"{member} begins {token} of {_text(place)}")
            sent = self.sent.get(token)
            if sent is None:
                self.problem(f"{member} was given {token!r}, which nobody sent")
                continue
            if sent.key and token not in self._begun:
                self._begun[token] = place[:3]
            self._running.setdefault(place, {})[member] = self.loop.time()

    def ended(self, member: str, place: Place, token: str, *, is_ok: bool) -> None:
        """Its handler has spoken."""
        self.loop.note(f"{member} {'ends' if is_ok else 'fails'} {token} of {_text(place)}")
        self.cut_off(member, place, token)
        self._ended.setdefault(place, {})[token] = None
        if is_ok:
            self._ok.setdefault(place, {})[token] = None
            self.done[token] = None

    def cut_off(self, member: str, place: Place, token: str) -> None:
        """Its handler was cancelled, or its process killed: that says nothing, but that it may
        have been sent back before, having taken too long."""
        began_s = self._running.get(place, {}).pop(member, self.loop.time())
        if self.loop.time() - began_s > self.consume_timeout_s:
            self._ended.setdefault(place, {})[token] = None

    # ----------------------------------------------------------------------------------- in order

    def _began_in_order(self, member: str, places: list[Place]) -> None:
        place = places[0]
        queue, offset = place[:3], place[3]
        broker = self._broker(queue[0])
        if broker is None or place[1] != self.topic:
            return
        if [one[3] for one in places] != list(range(offset, offset + len(places))):
            self.problem(f"{member} handles {', '.join(_text(one) for one in places)} at once")
        if self.loop.time() - self.started_s[queue[0]] > LOCKS_FORGOTTEN_S:
            now_ms = self.brokers[queue[0]].now_ms
            owner = broker.locks.owner(self.group, place[1], place[2], now_ms)
            if owner != member:
                self.problem(f"{member} handles {_text(place)}, whose lock is held by {owner}")
        finished = self._finished(queue, broker)
        if offset > finished:
            self.problem(f"{member} handles {_text(place)} before offset {finished} was finished")
        elif offset < finished and offset < self._tail(queue):
            tail = self._tail(queue)
            self.problem(f"{member} handles {_text(place)} again, committed were {tail}")

    def _finished(self, queue: Queue, broker: Broker) -> int:
        """The first offset of a queue that no handler has finished."""
        at = self._finished_to.get(queue, 0)
        while True:
            finished = self._ok.get((*queue, at))
            is_finished = finished is not None and _token_at(broker, queue, at) in finished
            if not is_finished and not self._is_unsafe((*queue, at)):
                break
            at += 1
        self._finished_to[queue] = at
        return at

    def _tail(self, queue: Queue) -> int:
        """The lowest offset that was committed in the last while."""
        seen = self._committed.get(queue)
        return min(offset for _, offset in seen) if seen else 0

    def check_keys(self) -> None:
        """Per sharding key the first occurrences are in order, where one queue has them all: a
        route without one of the brokers sends a key elsewhere."""
        if not self.is_ordered:
            return
        firsts: dict[str, list[tuple[Queue, int]]] = {}
        for token, queue in self._begun.items():
            sent = self.sent[token]
            firsts.setdefault(sent.key, []).append((queue, sent.number))
        for key, found in firsts.items():
            numbers = [number for _, number in found]
            queues = {queue for queue, _ in found}
            if len(queues) > 1 or queues & self._unsafe_to.keys():
                continue
            if numbers != sorted(numbers):
                self.problem(f"key {key} was handled as {numbers}")

    # ------------------------------------------------------------------------------------ offsets

    def look(self) -> None:
        """Committed offsets pass nothing that is unfinished."""
        now = self.loop.time()
        for queue, broker in self._queues():
            committed = broker.offsets.table.get((queue[1], self.group), {}).get(queue[2], 0)
            seen = self._committed.setdefault(queue, deque())
            if not seen or seen[-1][1] != committed:
                seen.append((now, committed))
            while len(seen) > 1 and seen[1][0] < now - TAIL_S:
                seen.popleft()
            at = self._checked.get(queue, 0)
            end = min(committed, broker.store.max_offset(queue[1], queue[2]))
            while at < end:
                if not self._is_unsafe((*queue, at)) and not self._is_settled((*queue, at), broker):
                    self.problem(f"offset {committed} of {_text(queue)} passes {at}, unfinished")
                at += 1
            self._checked[queue] = max(at, self._checked.get(queue, 0))

    def _is_settled(self, place: Place, broker: Broker) -> bool:
        token = _token_at(broker, place[:3], place[3])
        if token in self._ok.get(place, ()):
            return True
        if self.is_ordered:
            return False
        if token in self._ended.get(place, ()):  # failed: then it was sent back
            return True
        now = self.loop.time()
        running = self._running.get(place, {})
        return any(now - since > self.consume_timeout_s for since in running.values())

    # --------------------------------------------------------------------------------- at the end

    def missing(self) -> list[str]:
        """What is still to be handled or committed, in words."""
        found = []
        for queue, broker in self._queues():
            most = broker.store.max_offset(queue[1], queue[2])
            committed = broker.offsets.table.get((queue[1], self.group), {}).get(queue[2], 0)
            if committed < most:
                found.append(f"{_text(queue)} is committed to {committed} of {most}")
            if queue[1] != self.topic:
                continue
            for at in range(broker.store.min_offset(queue[1], queue[2]), most):
                token = _token_at(broker, queue, at)
                if self._is_unsafe((*queue, at)) or self._may_be_lost(token):
                    continue
                if token not in self.done:
                    found.append(f"{token} at {_text((*queue, at))} was never handled")
        return found

    def check_acked(self) -> None:
        """Whatever was acknowledged, by a broker that had promised to keep it, was handled."""
        for token, acked in self.acked.items():
            if token in self.done or self._is_unsafe(acked.place):
                continue
            is_kept = self.is_sync and acked.status is SendStatus.SEND_OK
            if is_kept or acked.at_s > self.power_lost_s:
                self.problem(
                    f"{token} was acknowledged at {acked.at_s:.3f} s as {_text(acked.place)} and "
                    f"never handled"
                )

    def _may_be_lost(self, token: str) -> bool:
        """Without synchronous flushes a copy that was sent back is lost with the power."""
        sent = self.sent.get(token)
        return not self.is_sync and sent is not None and sent.at_s <= self.power_lost_s

    def _broker(self, name: str) -> Broker | None:
        core = self.brokers[name].core
        return core if isinstance(core, Broker) else None

    def _queues(self) -> Iterator[tuple[Queue, Broker]]:
        for name in self.brokers:
            broker = self._broker(name)
            if broker is None:
                continue
            for topic in self.topics:
                for queue_id in sorted(broker.store.queue_ids(topic)):
                    yield (name, topic, queue_id), broker


def _token_at(broker: Broker, queue: Queue, offset: int) -> str:
    unit = broker.store.unit(queue[1], queue[2], offset)
    raw = None if unit is None else broker.store.record_at(unit[0])
    return "" if raw is None else token_of(decode(raw).body)


def token_of(body: bytes) -> str:
    """A body begins with its token."""
    return body.partition(b"|")[0].decode("utf-8", "replace")


def _text(place: tuple[object, ...]) -> str:
    return "/".join(str(part) for part in place)
