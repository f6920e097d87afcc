"""The messages of one queue that were pulled and are not yet finished.

Owns: what RocketMQ calls a ProcessQueue, without its locks and clocks: which offset may be
committed, whether there is room for another pull, what a slow listener holds. One rule: the commit
offset never passes an unfinished message, in whatever order messages finish.

A consumer passes every message through here, so the usual case (offsets ascend from pull to pull)
costs a dict and a deque: `_unfinished` knows what is left, `_order` the offsets as they came, and
finished ones leave the deque only once they stand at one of its ends. A sorted container was not
needed; offsets that come again or out of order are sorted in, slowly. Not for several threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from operator import lt
from typing import Generic, Protocol, TypeVar

import msgspec


class Pulled(Protocol):
    """What is asked of a message; StoredMessage has it."""

    @property
    def queue_offset(self) -> int: ...

    @property
    def size(self) -> int: ...


M = TypeVar("M", bound=Pulled)


class FlowLimits(msgspec.Struct, frozen=True):
    """How much of one queue may be in flight before pulling pauses; RocketMQ's defaults.

    As there, a pull is still made when a limit is met exactly, so one pull's worth comes on top.
    """

    message_count: int = 1_000
    size_bytes: int = 100 * 1024 * 1024
    span: int | None = 2_000
    """Between the lowest and the highest unfinished offset; None for orderly consumption."""


class NoRoom(Enum):
    """The limit that holds the next pull back."""

    COUNT = "message_count"
    SIZE = "size_bytes"
    SPAN = "span"


class InFlight(Generic[M]):
    """One queue's pulled and unfinished messages."""

    __slots__ = (
        "_end",
        "_order",
        "_started_ms",
        "_taken",
        "_unfinished",
        "is_dropped",
        "size_bytes",
    )

    def __init__(self) -> None:
        self.is_dropped = False
        """The queue belongs to another consumer now: nothing comes in, nothing is committed."""
        self.size_bytes = 0
        self._unfinished: dict[int, M] = {}
        self._order: deque[int] = deque()
        self._end = -1
        self._started_ms: dict[int, int] = {}
        self._taken: list[int] = []

    @property
    def message_count(self) -> int:
        """How many messages are unfinished, those taken among them."""
        return len(self._unfinished)

    def __contains__(self, queue_offset: int) -> bool:
        return queue_offset in self._unfinished

    @property
    def commit_offset(self) -> int | None:
        """The lowest unfinished offset, else one past the highest ever seen; None before any."""
        if self._order:
            return self._order[0]
        return None if self._end < 0 else self._end

    @property
    def span(self) -> int:
        """From the lowest to the highest unfinished offset; 0 if there are less than two."""
        return self._order[-1] - self._order[0] if self._order else 0

    def room(self, limits: FlowLimits) -> NoRoom | None:
        """Why the next pull must wait; None if it need not."""
        if len(self._unfinished) > limits.message_count:
            return NoRoom.COUNT
        if self.size_bytes > limits.size_bytes:
            return NoRoom.SIZE
        if limits.span is not None and self.span > limits.span:
            return NoRoom.SPAN
        return None

    def add(self, messages: Sequence[M]) -> Sequence[M]:
        """Take in what a pull brought; returns those that are new, which are to be consumed.

        One that is unfinished already is not new; one that had finished is, since it was asked for
        again.
        """
        if self.is_dropped or not messages:
            return ()
        offsets = [message.queue_offset for message in messages]
        if offsets[0] < self._end or not all(map(lt, offsets, islice(offsets, 1, None))):
            return self._add_unsorted(messages)
        self._unfinished.update(zip(offsets, messages, strict=True))
        self._order.extend(offsets)
        self._end = offsets[-1] + 1
        self.size_bytes += sum([message.size for message in messages])
        return messages

    def _add_unsorted(self, messages: Sequence[M]) -> Sequence[M]:
        fresh: dict[int, M] = {}
        for message in messages:
            if message.queue_offset not in self._unfinished:
                fresh.setdefault(message.queue_offset, message)
        if not fresh:
            return ()
        self._unfinished.update(fresh)
        self._order = deque(sorted(self._unfinished))
        self._end = max(self._end, max(fresh) + 1)
        self.size_bytes += sum(message.size for message in fresh.values())
        return [fresh[offset] for offset in sorted(fresh)]

    def advance_to(self, next_offset: int) -> None:
        """All below `next_offset` was looked at: what was not added, the filter left out.

        So a queue whose messages are all filtered out still moves its commit offset.
        """
        if next_offset > self._end:
            self._end = next_offset

    def finish(self, queue_offsets: Iterable[int]) -> None:
        """These are done with, for good or ill; offsets that are not in flight are passed over."""
        take_out, started_ms = self._unfinished.pop, self._started_ms
        freed_bytes = 0
        for offset in queue_offsets:
            message = take_out(offset, None)
            if message is not None:
                freed_bytes += message.size
                if started_ms:
                    started_ms.pop(offset, None)
        self.size_bytes -= freed_bytes
        self._trim()

    def finish_one(self, queue_offset: int) -> None:
        """finish() of a single message, cheaper: by default listeners get one at a time."""
        unfinished, order = self._unfinished, self._order
        message = unfinished.pop(queue_offset, None)
        if message is None:
            return
        self.size_bytes -= message.size
        if self._started_ms:
            self._started_ms.pop(queue_offset, None)
        if queue_offset == order[0]:
            order.popleft()
            while order and order[0] not in unfinished:
                order.popleft()
        elif queue_offset == order[-1]:
            self._trim()

    def _trim(self) -> None:
        """Take finished offsets off both ends of the order."""
        unfinished, order = self._unfinished, self._order
        if not unfinished:
            assert self.size_bytes == 0, f"{self.size_bytes} bytes in flight without a message"
            order.clear()
            return
        while order[0] not in unfinished:
            order.popleft()
        while order[-1] not in unfinished:
            order.pop()

    def started(self, queue_offsets: Iterable[int], now_ms: int) -> None:
        """The listener gets these now; from here on their consume timeout runs."""
        unfinished = self._unfinished
        self._started_ms.update(
            {offset: now_ms for offset in queue_offsets if offset in unfinished}
        )

    def overdue(self, now_ms: int, timeout_ms: int) -> list[M]:
        """Messages whose listener has been at it for longer than the timeout, lowest first."""
        return [
            self._unfinished[offset]
            for offset in sorted(
                offset
                for offset, started_ms in self._started_ms.items()
                if now_ms - started_ms > timeout_ms
            )
        ]

    def take(self, count: int) -> list[M]:
        """Orderly: the lowest `count` messages, which stay in flight until finished or put back."""
        assert not self._taken, f"{len(self._taken)} messages are still taken"
        unfinished = self._unfinished
        self._taken = list(islice((one for one in self._order if one in unfinished), count))
        return [unfinished[offset] for offset in self._taken]

    def finish_taken(self) -> None:
        """Orderly: what was taken is done with."""
        taken, self._taken = self._taken, []
        self.finish(taken)

    def put_back(self) -> None:
        """Orderly: what was taken will be taken again, before all others."""
        for offset in self._taken:
            self._started_ms.pop(offset, None)
        self._taken = []

    def clear(self) -> None:
        """Forget everything, the highest offset too: the queue is read from elsewhere now."""
        self._unfinished.clear()
        self._order.clear()
        self._started_ms.clear()
        self._taken = []
        self._end = -1
        self.size_bytes = 0
