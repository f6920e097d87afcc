"""Which queue a message goes to.

Owns: taking turns, and the selectors a user may give. One rule: a selector gets the queues that can
be written now, in their sorted order, and returns one of them; it knows nothing of brokers' health.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from random import Random

from cometmq.client.assignment import room_of_broker
from cometmq.errors import UsageError
from cometmq.message import MessageQueue
from cometmq.wire.hashing import java_hash

Selector = Callable[[Sequence[MessageQueue]], MessageQueue]
"""From the queues of a topic to the one to send to."""


class RoundRobin:
    """Takes turns over a topic's queues; one for each topic, and for each thread that sends.

    It starts at random, so that a thousand young producers don't all begin with queue 0.
    """

    __slots__ = ("_index", "_rng")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._index: int | None = None

    def __call__(self, queues: Sequence[MessageQueue], avoid_broker: str = "") -> MessageQueue:
        """The next queue; on another broker than `avoid_broker` if there is one."""
        _require_some(queues)
        count = len(queues)
        if avoid_broker:
            for _ in range(count):
                queue = queues[self.next_index() % count]
                if queue.broker != avoid_broker:
                    return queue
        return queues[self.next_index() % count]

    def next_index(self) -> int:
        """The counter after one step: 0 to 2**31 - 1, wrapping."""
        index = self._rng.getrandbits(31) if self._index is None else self._index
        self._index = index = (index + 1) & 0x7FFF_FFFF
        return index


def hash_of(key: object) -> Selector:
    """The queue that a Java producer picks for the text str(key) by SelectMessageQueueByHash.

    Java hashes an Integer or Long key to its value, not to its text's hash: for numbers the two
    agree only if the Java side sends the key as a String.
    """
    # Java: abs(hashCode % n) with a remainder that has the sign of the hash. With integers that
    # don't overflow this is the same, for Integer.MIN_VALUE too.
    value = abs(java_hash(str(key)))

    def select(queues: Sequence[MessageQueue]) -> MessageQueue:
        _require_some(queues)
        return queues[value % len(queues)]

    return select


def random_queue(rng: Random) -> Selector:
    """Any queue, all alike."""

    def select(queues: Sequence[MessageQueue]) -> MessageQueue:
        _require_some(queues)
        return queues[rng.randrange(len(queues))]

    return select


def machine_room(rooms: Collection[str], *, start: int = 0) -> Selector:
    """In turn the queues of brokers named `room@name` with the room in `rooms`; all, if none is.

    RocketMQ has a selector of this name, but it returns null.
    """
    wanted = frozenset(rooms)
    turns = itertools.count(start)  # next() on it is one step for all threads

    def select(queues: Sequence[MessageQueue]) -> MessageQueue:
        _require_some(queues)
        near = [queue for queue in queues if room_of_broker(queue.broker) in wanted] or queues
        return near[next(turns) % len(near)]

    return select


def _require_some(queues: Sequence[MessageQueue]) -> None:
    if not queues:
        raise UsageError("there is no queue to choose from: the topic has none that can be written")
