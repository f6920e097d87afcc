"""How far each group has popped each queue, and how many of its messages are out.

Owns: the part of a group's progress that is not in consumerOffset.json yet. One rule: an offset
goes into that file only when the checkpoint that makes up for it is durable, so that a power cut
gives messages out again and never skips one; and what was first comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from cometmq.broker.offsets import Offsets
from cometmq.broker.pop_order import Place
from cometmq.ports import NEVER_MS

HURRY_MS = 1_000  # so long an offset waits for the log's own flushes

Commit = Callable[[Place, int], None]


class _Step(msgspec.Struct, gc=False):
    """A group may be noted at `offset` once the log is durable up to `end`."""

    end: int
    place: Place
    offset: int
    hurry_ms: int
    is_void: bool = False


class Places:
    """The positions of popping groups, and of the revive queues' reader."""

    def __init__(self, offsets: Offsets) -> None:
        self._offsets = offsets
        self._steps: deque[_Step] = deque()
        self._latest: dict[Place, _Step] = {}
        self._in_flight: dict[Place, int] = {}
        self.in_flight_sum = 0

    # ------------------------------------------------------------------------------------ position

    def get(self, place: Place) -> int | None:
        """The next offset to give out; None for a group that was never here."""
        committed = self._offsets.get(*place)
        latest = self._latest.get(place)
        if latest is None:
            return committed
        return latest.offset if committed is None else max(latest.offset, committed)

    def move(self, place: Place, offset: int, end: int, now_ms: int) -> None:
        """The group is at `offset` now; noted when the log is durable up to `end`."""
        step = _Step(end, place, offset, now_ms + HURRY_MS)
        self._steps.append(step)
        self._latest[place] = step

    def reset(self, place: Place) -> None:
        """Nothing that waits counts any more: somebody has set the offset."""
        if self._latest.pop(place, None) is not None:
            for step in self._steps:
                if step.place == place:
                    step.is_void = True
        self.clear(place)

    def release(self, flushed: int, commit: Commit) -> None:
        """Note what is safe now."""
        steps = self._steps
        while steps and steps[0].end <= flushed:
            step = steps.popleft()
            if step.is_void:
                continue
            commit(step.place, step.offset)
            if self._latest.get(step.place) is step:
                del self._latest[step.place]

    @property
    def is_settled(self) -> bool:
        return not self._steps

    def next_ms(self, flushed: int, now_ms: int) -> int:
        """When to look at it: now, or when the log should be hurried."""
        if not self._steps:
            return NEVER_MS
        step = self._steps[0]
        return now_ms if step.end <= flushed else max(step.hurry_ms, now_ms)

    def wants_hurry(self, now_ms: int) -> bool:
        return bool(self._steps) and self._steps[0].hurry_ms <= now_ms

    def hurried(self, now_ms: int) -> None:
        if self._steps:
            self._steps[0].hurry_ms = now_ms + HURRY_MS

    # ----------------------------------------------------------------------------------- in flight

    def out(self, place: Place) -> int:
        return self._in_flight.get(place, 0)

    def add(self, place: Place, count: int) -> None:
        self._in_flight[place] = self._in_flight.get(place, 0) + count
        self.in_flight_sum += count

    def remove(self, place: Place, count: int) -> None:
        before = self._in_flight.get(place, 0)
        left = max(before - count, 0)
        self.in_flight_sum -= before - left
        if left:
            self._in_flight[place] = left
        else:
            self._in_flight.pop(place, None)

    def clear(self, place: Place) -> None:
        self.in_flight_sum -= self._in_flight.pop(place, 0)

    def forget(self, *, topic: str = "", group: str = "") -> None:
        """A topic or a group is gone."""
        for place in [one for one in self._in_flight if topic in ("", one[0])]:
            if group in ("", place[1]):
                self.clear(place)
        for place in [one for one in self._latest if topic in ("", one[0])]:
            if group in ("", place[1]):
                self.reset(place)
