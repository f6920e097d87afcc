"""Which brokers a producer had better leave alone for a while.

Owns: what was seen of each broker and the choice that follows from it. One rule: a broker that just
failed is never chosen while there is any other, however bad the other looks.

RocketMQ breaks that rule when its latencyFaultTolerance is on. Its early 4.x compared the candidate
with the broker that failed by "equals" where "differs" was meant, so a retry went to the same
broker for sure; later 4.x forgot the failed broker in this mode, and its way out (pickOneAtLeast)
may name it; 5.x's last resort is the next queue in turn, whoever holds it. Here the last resort is
the broker that becomes available first, and only among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from cometmq.errors import UsageError
from cometmq.message import MessageQueue

PROBE_INTERVAL_MS = 3_000  # RocketMQ 5's detector looks every 3 s


class Penalties(msgspec.Struct, frozen=True):
    """How long a broker is left alone after a send of some latency."""

    steps: tuple[tuple[int, int], ...]
    """(latency in ms from which on, not available for ms), slowest first."""
    isolation_latency_ms: int
    """The latency that a failed send counts as."""
    is_last_word: bool
    """True: the newest send alone decides (4.9), so a fast one sets a broker free; False: a send
    can only make the time longer (5.x)."""

    def not_available_ms(self, latency_ms: int) -> int:
        """The duration for a latency; 0 below the lowest step."""
        for from_ms, duration_ms in self.steps:
            if latency_ms >= from_ms:
                return duration_ms
        return 0


PENALTIES_4_9 = Penalties(
    (
        (15_000, 600_000),
        (3_000, 180_000),
        (2_000, 120_000),
        (1_000, 60_000),
        (550, 30_000),
        (100, 0),
        (50, 0),
    ),
    isolation_latency_ms=30_000,
    is_last_word=True,
)

PENALTIES_5 = Penalties(
    (
        (15_000, 30_000),
        (5_000, 10_000),
        (3_000, 6_000),
        (1_800, 5_000),
        (550, 2_000),
        (100, 0),
        (50, 0),
    ),
    isolation_latency_ms=10_000,
    is_last_word=False,
)


class _Ailment(msgspec.Struct):
    """What is wrong with one broker; a healthy one has none."""

    not_before_ms: int
    is_reachable: bool
    next_probe_ms: int = 0


class BrokerHealth:
    """Remembers brokers that were slow or failed, by name; a healthy broker costs nothing."""

    def __init__(self, penalties: Penalties = PENALTIES_5) -> None:
        self._penalties = penalties
        self._ailing: dict[str, _Ailment] = {}

    def observed(
        self,
        broker: str,
        latency_ms: int,
        *,
        is_isolated: bool,
        now_ms: int,
        is_reachable: bool | None = None,
    ) -> None:
        """A send took `latency_ms`; `is_isolated` if it failed so that the broker is to blame.

        `is_reachable`: whether it answered at all; unless told, an isolated one did not.
        """
        penalties = self._penalties
        counted_ms = penalties.isolation_latency_ms if is_isolated else latency_ms
        not_before_ms = now_ms + penalties.not_available_ms(counted_ms)
        if is_reachable is None:
            is_reachable = not is_isolated
        known = self._ailing.get(broker)
        if known is not None and not penalties.is_last_word:
            not_before_ms = max(not_before_ms, known.not_before_ms)
        if is_reachable and not_before_ms <= now_ms:
            self._ailing.pop(broker, None)
        elif known is None:
            self._ailing[broker] = _Ailment(not_before_ms, is_reachable)
        else:
            known.not_before_ms = not_before_ms
            known.is_reachable = is_reachable

    def is_available(self, broker: str, now_ms: int) -> bool:
        """Whether its time of being left alone is over (or never was)."""
        known = self._ailing.get(broker)
        return known is None or now_ms >= known.not_before_ms

    def is_reachable(self, broker: str) -> bool:
        """Whether it answered when last heard of; a broker never heard of is given credit."""
        known = self._ailing.get(broker)
        return known is None or known.is_reachable

    def to_probe(self, now_ms: int) -> list[str]:
        """Unreachable brokers whose check is due; each is named once in PROBE_INTERVAL_MS."""
        due = [
            broker
            for broker, known in self._ailing.items()
            if not known.is_reachable and now_ms >= known.next_probe_ms
        ]
        for broker in due:
            self._ailing[broker].next_probe_ms = now_ms + PROBE_INTERVAL_MS
        return due

    def probed(self, broker: str, is_reachable: bool, now_ms: int) -> None:
        """What a probe found. A failed one keeps the broker unavailable until the next is due.

        RocketMQ forgets the failed probe: its dead broker gets a send whenever its time is over.
        """
        known = self._ailing.get(broker)
        if known is None:
            return
        if not is_reachable:
            known.is_reachable = False
            known.not_before_ms = max(known.not_before_ms, now_ms + PROBE_INTERVAL_MS)
        elif now_ms >= known.not_before_ms:
            del self._ailing[broker]
        else:
            known.is_reachable = True

    def choose(
        self, queues: Sequence[MessageQueue], avoid_broker: str, start_index: int, now_ms: int
    ) -> MessageQueue:
        """The first queue from `start_index` on that is on the best broker there is.

        Best: available; else reachable; else available soonest. `avoid_broker` ("" for none) is the
        one that just failed.
        """
        if not queues:
            raise UsageError("there is no queue to choose from")
        count = len(queues)
        ailing = self._ailing
        first = queues[start_index % count]
        if first.broker not in ailing and first.broker != avoid_broker:
            return first
        in_turn = [queues[at % count] for at in range(start_index, start_index + count)]
        others = [queue for queue in in_turn if queue.broker != avoid_broker]
        if not others:
            return first
        is_good: Callable[[str], bool]
        for is_good in (lambda broker: self.is_available(broker, now_ms), self.is_reachable):
            for queue in others:
                if is_good(queue.broker):
                    return queue
        return min(others, key=lambda queue: ailing[queue.broker].not_before_ms)

    def keep_only(self, brokers: Collection[str]) -> None:
        """Forget the brokers that no route names any more."""
        for broker in [one for one in self._ailing if one not in brokers]:
            del self._ailing[broker]
