"""Where a queue and an index file end: the few numbers that every message moves.

Owns: QueueEnds and IndexHead, plain. One rule: these numbers live in exactly one object; where the
compiled path runs, its own classes of the same shape stand in their place, so that both paths read
and write the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from cometmq._fast.hot import Pin


class QueueEnds:
    """Bounds of one queue. `next_offset` is ahead of `max_offset` until dispatch."""

    __slots__ = (
        "is_marked",
        "is_watched",
        "log_end",
        "log_min",
        "max_offset",
        "min_offset",
        "next_offset",
        "queue_id",
        "topic",
    )

    def __init__(self, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.min_offset = 0
        self.max_offset = 0
        self.next_offset = 0
        self.log_end = 0  # where the last unit's record ends in the log
        self.log_min = 0  # the log's lower bound that min_offset was computed for
        self.is_watched = False  # somebody waits for its next message
        self.is_marked = False  # its last file is known to be dirty; only the compiled path asks

    def pin_tail(self, pin: Pin | None, mark: Callable[[], None]) -> None:
        """For the compiled path only."""

    def pin_read(self, pin: Pin | None) -> None:
        """For the compiled path only."""


class IndexHead:
    """The numbers at the front of an index file."""

    __slots__ = ("begin_ms", "begin_offset", "count", "end_ms", "end_offset", "slots_used")

    def __init__(self) -> None:
        self.begin_ms = 0
        self.end_ms = 0
        self.begin_offset = 0
        self.end_offset = 0
        self.slots_used = 0
        self.count = 0


class Makers(NamedTuple):
    """Which classes hold the numbers; `pin` (None: nobody) gives compiled code a file's memory."""

    queue_ends: Callable[[str, int], QueueEnds]
    index_head: Callable[[], IndexHead]
    pin: Callable[[memoryview, int], Pin] | None


PLAIN = Makers(QueueEnds, IndexHead, None)


def compiled() -> Makers:
    """Those of the compiled path, which must be there."""
    from cometmq._fast import hot

    # Of the same shape, though not of the same type.
    return Makers(
        cast(Callable[[str, int], QueueEnds], hot.QueueEnds),
        cast(Callable[[], IndexHead], hot.IndexHead),
        hot.Pin,
    )
