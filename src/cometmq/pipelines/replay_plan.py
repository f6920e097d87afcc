"""What a replay sends, slice by slice, decided once.

Owns: the plan and its place in the checkpoint. One rule: a slice is the same messages whenever it
is read: a range of offsets of every queue, chosen before the first one is sent. So a slice that was
cut off is sent again as the same batch, and the sink adds what is missing.

    <checkpoint>/replay-plan.json                  settings and slices, written once
    <checkpoint>/replay/000000000007.begun         how many rows slice 7 has, of a lake
    <checkpoint>/replay/000000000007.done          all of slice 7 is acknowledged
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from cometmq.errors import UsageError
from cometmq.message import MessageQueue
from cometmq.pipelines.files import Files
from cometmq.pipelines.running import PipelineFailed

MAX_SLICES = 10_000
PLAN = "replay-plan.json"
MARKS = "replay"

Span = tuple[int, int]


class Slice(msgspec.Struct, frozen=True):
    """Messages that are sent together."""

    first_ms: int
    """When its first message was stored: what a pace goes by."""
    rows: int
    """About how many: as many as fell into its time when it was planned."""
    ranges: dict[str, dict[str, dict[str, Span]]]
    """By topic, broker and queue: [begin, end)."""
    dates: tuple[str, str] = ("", "")
    """The first and the last date that a lake has them under."""

    def spans(self) -> list[tuple[MessageQueue, int, int]]:
        return [
            (MessageQueue(topic, broker, int(number)), begin, end)
            for topic, brokers in self.ranges.items()
            for broker, queues in brokers.items()
            for number, (begin, end) in queues.items()
        ]


class Plan(msgspec.Struct, frozen=True):
    """All of them, with what they were planned for."""

    settings: dict[str, str]
    tasks: int
    slices: list[Slice]

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.slices)


class Bucket(msgspec.Struct, frozen=True):
    """What one queue has in one stretch of time."""

    number: int
    queue: MessageQueue
    first_ms: int
    low: int
    high: int
    rows: int
    dates: tuple[str, str] = ("", "")


def slices_of(buckets: Iterable[Bucket], rows_at_least: int) -> list[Slice]:
    """Neighbouring buckets together until they have enough rows; every queue's ranges follow each
    other without a gap, also where a broker's clock was set back."""
    ordered = sorted(buckets, key=lambda one: (one.number, one.queue))
    ends: dict[MessageQueue, int] = {}
    for one in ordered:
        ends[one.queue] = min(ends.get(one.queue, one.low), one.low)
    # Where times and offsets disagree a range may hold rows that another bucket counted.
    whole = _dates(ordered) if _is_mixed(ordered) else None
    found: list[Slice] = []
    waiting: list[Bucket] = []
    for _, some in itertools.groupby(ordered, key=lambda one: one.number):
        waiting += some
        if sum(one.rows for one in waiting) >= rows_at_least:
            _close(waiting, ends, whole, found)
            waiting = []
    if waiting:
        _close(waiting, ends, whole, found)
    return found


def _is_mixed(ordered: list[Bucket]) -> bool:
    highest: dict[MessageQueue, int] = {}
    for one in ordered:
        if one.low <= highest.get(one.queue, -1):
            return True
        highest[one.queue] = one.high
    return False


def _dates(some: list[Bucket]) -> tuple[str, str]:
    return min(one.dates[0] for one in some), max(one.dates[1] for one in some)


def _close(
    some: list[Bucket],
    ends: dict[MessageQueue, int],
    whole: tuple[str, str] | None,
    found: list[Slice],
) -> None:
    ranges: dict[str, dict[str, dict[str, Span]]] = {}
    for queue in sorted({one.queue for one in some}):
        begin = ends[queue]
        end = max(one.high for one in some if one.queue == queue) + 1
        if end > begin:  # else an earlier slice has it
            ends[queue] = end
            of_broker = ranges.setdefault(queue.topic, {}).setdefault(queue.broker, {})
            of_broker[str(queue.queue_id)] = (begin, end)
    if ranges:
        first_ms, rows = min(one.first_ms for one in some), sum(one.rows for one in some)
        found.append(Slice(first_ms, rows, ranges, whole or _dates(some)))


class Progress:
    """Plan and marks of one replay."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def plan(self, settings: dict[str, str]) -> Plan | None:
        """The plan that is there; UsageError if it was made for something else."""
        if not self._files.exists(PLAN):
            return None
        found = msgspec.json.decode(self._files.read(PLAN), type=Plan)
        for name, value in settings.items():
            if found.settings.get(name) != value:
                raise UsageError(
                    f"the checkpoint {self._files.root} is of a replay with {name}="
                    f"{found.settings.get(name)!r}, not {value!r}: use another checkpoint"
                )
        return found

    def keep(self, plan: Plan) -> None:
        self._files.make_folder(MARKS)
        self._files.write(PLAN, msgspec.json.encode(plan))

    def next(self) -> int:
        """The first slice that is not done."""
        names = self._files.names(MARKS)
        return max((int(name[:12]) + 1 for name in names if name.endswith(".done")), default=0)

    def begin(self, number: int, rows: int) -> None:
        """Before a slice of a lake is sent; PipelineFailed if it has changed since it was begun."""
        mark = f"{MARKS}/{number:012d}.begun"
        if not self._files.exists(mark):
            self._files.write(mark, msgspec.json.encode({"rows": rows}))
            return
        former: dict[str, Any] = msgspec.json.decode(self._files.read(mark))
        if former["rows"] != rows:
            raise PipelineFailed(
                f"replay: slice {number} had {former['rows']} rows when it was cut off and has "
                f"{rows} now: the lake has changed (a compaction under way, files gone?). When it "
                "is whole again, run this again"
            )

    def done(self, number: int) -> None:
        mark = f"{MARKS}/{number:012d}"
        self._files.write(f"{mark}.done", b"")
        self._files.delete(f"{mark}.begun")
        if number:
            self._files.delete(f"{MARKS}/{number - 1:012d}.done")
