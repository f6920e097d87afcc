"""Wrong variants of the client that runs on the virtual-time loop must catch.

One rule: a mutant is a mistake somebody could make, in one place; a mutant that lives is a missing
checker. `pins` are the fields of a plan without which the mistake can't show, or shows rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from cometmq.client.in_flight import InFlight
from cometmq.client.pulling import PulledQueue
from cometmq.client.rebalance import Rebalance
from cometmq.client.sending import Sending
from cometmq.client.settling import Settling
from cometmq.client.workers import Tasks
from cometmq.message import MessageQueue, SendResult, SendStatus


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: type
    member: str
    make: Callable[[Any], Any]
    """What stands in the place of the real one, which it is given."""
    pins: dict[str, Any] = field(default_factory=dict)
    within: int = 10

    @contextmanager
    def applied(self) -> Iterator[None]:
        real = getattr(self.owner, self.member)
        with mock.patch.object(self.owner, self.member, self.make(real)):
            yield


def _end_of_window(real: Any) -> Any:
    return property(lambda window: None if window._end < 0 else window._end)


def _skip_failed(real: Any) -> Any:
    def failed(self: Settling, job: Any, verdict: Any) -> None:
        given, owned, _ = job
        messages = given if isinstance(given, list) else [given]
        self._finish(owned, [one.queue_offset for one in messages])

    return failed


def _always(real: Any) -> Any:
    return property(lambda queue: True)


def _forget_in_flight(real: Any) -> Any:
    def drop(self: PulledQueue) -> None:
        self.window.finish(list(self.window._order))
        real(self)

    return drop


def _all_granted(real: Any) -> Any:
    async def lock(self: Rebalance, queues: Any) -> Any:
        queues = list(queues)
        await real(self, queues)
        return set(queues), set()

    return lock


def _forget_to_hand_again(real: Any) -> Any:
    return lambda self, owned, messages: None


def _leave_tasks(real: Any) -> Any:
    async def close(self: Tasks, asker: Any) -> None:
        self._jobs.clear()

    return close


def _believe_in_luck(real: Any) -> Any:
    def give_up(self: Sending, cause: Exception) -> None:
        self.producer.ended()
        queue = self.queue or MessageQueue(self.topic, "broker-a", 0)
        self.future.set_result(SendResult(SendStatus.SEND_OK, "", "", queue, 0))

    return give_up


def _forget_the_first(real: Any) -> Any:
    def add(self: InFlight[Any], messages: Any) -> Any:
        return real(self, messages)[1:] if len(messages) > 3 else real(self, messages)

    return add


def _line_up_twice(real: Any) -> Any:
    """A line whose worker has not ended is given to another one."""

    def resume(self: Settling, owned: PulledQueue) -> None:
        owned.is_in_hand = False
        owned.line.rotate(-1)
        real(self, owned)

    return resume


BUSY = {"gap_s": 0.01, "messages": 20, "slow_percent": 40, "slow_s": 5.0}
MUTANTS = [
    Mutant("commit before handling", InFlight, "commit_offset", _end_of_window, within=3),
    Mutant(
        "skip a failed message",
        Settling,
        "_failed",
        _skip_failed,
        {"fail_percent": 25},
        within=4,
    ),
    Mutant(
        "ignore the end of a lock",
        PulledQueue,
        "is_lock_alive",
        _always,
        {
            **BUSY,
            "is_ordered": True,
            "faults": ("cut", "stall"),
            "trouble_s": 150.0,
            "calm_s": 10.0,
            "slow_s": 25.0,
        },
        within=15,
    ),
    Mutant(
        "forget what is in flight on a rebalance",
        PulledQueue,
        "drop",
        _forget_in_flight,
        {**BUSY, "is_ordered": False, "faults": ("join", "leave"), "calm_s": 2.0},
        within=5,
    ),
    Mutant(
        "take queues without a lock",
        Rebalance,
        "_lock",
        _all_granted,
        {**BUSY, "is_ordered": True, "faults": ("kill", "cut"), "trouble_s": 150.0},
        within=10,
    ),
    Mutant(
        "drop what no broker takes back",
        Settling,
        "_hand_again",
        _forget_to_hand_again,
        {**BUSY, "is_ordered": False, "fail_percent": 25, "faults": ("crash",), "calm_s": 2.0},
        within=10,
    ),
    Mutant("leave tasks behind", Tasks, "close", _leave_tasks, within=3),
    Mutant(
        "call a failed send a success",
        Sending,
        "_give_up",
        _believe_in_luck,
        {"faults": ("crash", "cut"), "calm_s": 2.0, "gap_s": 0.3, "is_sync": True},
        within=5,
    ),
    Mutant(
        "hand out all but the first of a pull",
        InFlight,
        "add",
        _forget_the_first,
        {**BUSY, "pull_batch": 32},
        within=5,
    ),
    Mutant(
        "another message first after a failure",
        Settling,
        "_resume",
        _line_up_twice,
        {**BUSY, "is_ordered": True, "fail_percent": 25, "batch": 1},
        within=5,
    ),
]
