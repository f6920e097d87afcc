"""What a batch reads, decided without asking anybody.

Owns: offsets as JSON, the share of each queue in a limited batch, and how ranges become Spark
partitions. One rule: every offset of every range is in exactly one partition.

    {"v": 1, "init": "latest"}                         before anything is read: resolved later
    {"v": 1, "q": {topic: {broker: {"0": 42}}},        up to where all is read
             "from": {topic: {broker: {"0": 17}}},     where this batch begins with a queue, if its
                                                       former end does not say: new, or lost some
             "lost": 12}                               how many offsets were given up so far
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cometmq.errors import UsageError
from cometmq.message import MessageQueue

VERSION = 1
SMALL_ROWS = 16_384
"""A range below this shares its partition: a task costs more than reading so few."""
PACKED_ROWS = 65_536  # and so many rows are enough for one partition

Positions = dict[MessageQueue, int]


@dataclass(frozen=True)
class Range:
    """Some offsets of a queue: [begin, end), and where its broker was when they were planned."""

    topic: str
    broker: str
    queue_id: int
    begin: int
    end: int
    address: str = ""

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker, self.queue_id)

    def __len__(self) -> int:
        return self.end - self.begin


def text_of(queue: MessageQueue) -> str:
    return f"topic {queue.topic!r} broker {queue.broker} queue {queue.queue_id}"


# ------------------------------------------------------------------------------------ offsets


def nested(positions: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """By topic, broker and queue, in order: equal positions are equal text."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(positions):
        of_broker = found.setdefault(queue.topic, {}).setdefault(queue.broker, {})
        of_broker[str(queue.queue_id)] = positions[queue]
    return found


def flat(raw: Mapping[str, Any]) -> Positions:
    return {
        MessageQueue(topic, broker, int(number)): int(offset)
        for topic, brokers in raw.items()
        for broker, queues in brokers.items()
        for number, offset in queues.items()
    }


@dataclass(frozen=True)
class StreamOffset:
    """Up to where a stream has read, as the checkpoint has it."""

    positions: Positions
    begins: Positions
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"v": VERSION, "q": nested(self.positions)}
        if self.begins:
            found["from"] = nested(self.begins)
        if self.lost:
            found["lost"] = self.lost
        return found

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StreamOffset:
        """UsageError if the checkpoint is another source's, or of a newer CometMQ."""
        if raw.get("v") != VERSION or not isinstance(raw.get("q"), dict):
            raise UsageError(
                f"the checkpoint's offset {str(raw)[:200]} is not one of the rocketmq source, or "
                "was written by a newer version: use another checkpoint"
            )
        return cls(flat(raw["q"]), flat(raw.get("from", {})), int(raw.get("lost", 0)))


def initial(start: str | int | Mapping[str, Any]) -> dict[str, Any]:
    """A start that is not resolved yet. It is asked for again when the first batch is replayed, so
    it must not depend on when that is."""
    return {"v": VERSION, "init": start if isinstance(start, (str, int)) else "offsets"}


def is_initial(raw: Mapping[str, Any]) -> bool:
    return "init" in raw


def ranges_between(start: Mapping[str, Any], end: Mapping[str, Any]) -> list[Range]:
    """What a batch from one offset to the next reads, queue by queue."""
    after = StreamOffset.from_json(end)
    before = {} if is_initial(start) else StreamOffset.from_json(start).positions
    found = []
    for queue, stop in sorted(after.positions.items()):
        begin = after.begins.get(queue, before.get(queue))
        if begin is None:
            raise UsageError(f"the checkpoint does not say where {text_of(queue)} begins")
        if begin < stop:
            found.append(Range(queue.topic, queue.broker, queue.queue_id, begin, stop))
    return found


# ------------------------------------------------------------------------------------- limits


def share(available: Mapping[MessageQueue, int], most: int) -> dict[MessageQueue, int]:
    """How many of each queue's rows a batch of at most `most` takes: in proportion, but at least
    one of each as long as there is room, so that no queue waits for ever behind a larger one."""
    waiting = {queue: rows for queue, rows in sorted(available.items()) if rows > 0}
    total = sum(waiting.values())
    if total <= most:
        return waiting
    taken = dict.fromkeys(waiting, 0)
    left = most
    for queue in sorted(waiting, key=lambda one: (-waiting[one], one)):
        if left:
            taken[queue] = 1
            left -= 1
    rest = left
    for queue, rows in waiting.items():
        more = min(rows - taken[queue], rest * rows // total)
        taken[queue] += more
        left -= more
    for queue, rows in waiting.items():  # what rounding left over
        more = min(rows - taken[queue], left)
        taken[queue] += more
        left -= more
    return {queue: rows for queue, rows in taken.items() if rows}


# --------------------------------------------------------------------------------- partitions


def partition(
    ranges: Iterable[Range], *, at_least: int | None = None, at_most_rows: int | None = None
) -> list[list[Range]]:
    """Ranges as Spark partitions: long ones split if asked for, short ones together."""
    whole = [one for one in ranges if len(one) > 0]
    total = sum(map(len, whole))
    if not total:
        return []
    limit = at_most_rows or total
    if at_least is not None:
        limit = min(limit, max(1, -(-total // at_least)))
    pieces = [piece for one in whole for piece in _split(one, limit)]
    room = min(PACKED_ROWS, limit)
    found: list[list[Range]] = []
    open_rows = 0
    packed: list[Range] = []
    for piece in pieces:
        if len(piece) >= min(SMALL_ROWS, limit):
            found.append([piece])
            continue
        if packed and open_rows + len(piece) > room:
            found.append(packed)
            packed, open_rows = [], 0
        packed.append(piece)
        open_rows += len(piece)
    if packed:
        found.append(packed)
    return _spread(found, min(at_least or 1, total))


def _split(one: Range, limit: int) -> list[Range]:
    count = -(-len(one) // limit)
    bounds = [one.begin + len(one) * number // count for number in range(count + 1)]
    return [
        Range(one.topic, one.broker, one.queue_id, begin, end, one.address)
        for begin, end in itertools.pairwise(bounds)
    ]


def _spread(found: list[list[Range]], at_least: int) -> list[list[Range]]:
    """More partitions, if packing or rounding made fewer than asked for."""
    while len(found) < at_least:
        largest = max(found, key=lambda ranges: sum(map(len, ranges)))
        if sum(map(len, largest)) < 2:
            return found
        found.remove(largest)
        if len(largest) > 1:
            found += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
        else:
            found += [[piece] for piece in _split(largest[0], -(-len(largest[0]) // 2))]
    return sorted(found, key=lambda ranges: (ranges[0].queue, ranges[0].begin))
