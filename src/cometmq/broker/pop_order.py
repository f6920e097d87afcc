"""Ordered pop: what of a queue is out, and when the queue is free again.

Owns: consumerOrderInfo.json. One rule: while a message of an earlier pop is neither acknowledged
nor over its time, nothing more is given out of its queue to the same group, except the same
messages again to the very attempt that got them (a client whose answer was lost asks with the same
id).

The group's offset stands at the first message that is not acknowledged, so the next pop begins with
it: an ordered message never goes through a retry topic.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker.state import StateFile
from cometmq.ports import NEVER_MS
from cometmq.wire import fastjson

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

SAVE_MS = 5_000
FORGET_MS = 24 * 3_600_000  # after the last pop of a queue
NOT_OURS = -1  # an offset that is not out
NOT_NOW = -2  # of an earlier pop of the same queue

Place = tuple[str, str, int]
"""Topic, group, queue."""


class Out(msgspec.Struct, gc=False):
    """The messages of a queue that are out."""

    pop_ms: int
    invisible_ms: int
    offsets: tuple[int, ...]
    last_ms: int
    attempt: str | None = None
    acked: int = 0
    visible_ms: dict[int, int] = {}
    """By offset: when it is over, where that was changed."""
    times: dict[int, int] = {}
    """By offset: how often it was out before; only those that were."""

    def is_open(self, at: int) -> bool:
        return not self.acked >> at & 1

    @property
    def free_ms(self) -> int:
        """When the queue is free, if nobody acknowledges anything; 0 if it is."""
        over_ms = self.pop_ms + self.invisible_ms
        return max(
            (
                self.visible_ms.get(offset, over_ms)
                for at, offset in enumerate(self.offsets)
                if self.is_open(at)
            ),
            default=0,
        )

    @property
    def next_offset(self) -> int:
        """The first that is not acknowledged; behind the last if all are."""
        for at, offset in enumerate(self.offsets):
            if self.is_open(at):
                return offset
        return self.offsets[-1] + 1


class OrderedPops:
    """All queues that are popped in order."""

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.table: dict[tuple[str, str], dict[int, Out]] = {}
        self.file = StateFile("config/consumerOrderInfo.json", self.encode, SAVE_MS)
        if stored is not None:
            self._load(stored)

    def get(self, place: Place) -> Out | None:
        queues = self.table.get(place[:2])
        return None if queues is None else queues.get(place[2])

    def blocked_until(self, place: Place, attempt: str | None, now_ms: int) -> int:
        """When more of this queue may be given out; 0: now."""
        out = self.get(place)
        if out is None or (out.attempt is not None and out.attempt == attempt):
            return 0
        free_ms = out.free_ms
        return free_ms if free_ms > now_ms else 0

    def given_out(
        self,
        place: Place,
        attempt: str | None,
        pop_ms: int,
        invisible_ms: int,
        offsets: list[int],
        now_ms: int,
    ) -> tuple[dict[int, int], int]:
        """These messages are out now; how often each was before (only those that were), and the
        least of that."""
        before = self.get(place)
        out = Out(pop_ms, invisible_ms, tuple(offsets), now_ms, attempt)
        if before is None:
            times: dict[int, int] = {}
        elif attempt is not None and before.attempt == attempt:
            times = {at: before.times[at] for at in offsets if at in before.times}
        else:
            times = {at: before.times.get(at, 0) + 1 for at in offsets if at in before.offsets}
        out.times = times
        self.table.setdefault(place[:2], {})[place[2]] = out
        self.file.changed(now_ms)
        least = min(times.values(), default=0) if len(times) == len(offsets) else 0
        return times, least

    def acked(self, place: Place, offset: int, pop_ms: int, now_ms: int) -> int:
        """Note one as done; where the group's offset is to stand, or NOT_OURS or NOT_NOW."""
        out = self.get(place)
        if out is None:
            return offset + 1
        if pop_ms != out.pop_ms:
            return NOT_NOW
        if offset not in out.offsets:
            return NOT_OURS
        out.acked |= 1 << out.offsets.index(offset)
        self.file.changed(now_ms)
        return out.next_offset

    def hide(self, place: Place, offset: int, pop_ms: int, until_ms: int, now_ms: int) -> None:
        """One of those that are out stays so until another time."""
        out = self.get(place)
        if out is None or out.pop_ms != pop_ms or offset not in out.offsets:
            return
        out.visible_ms = {**out.visible_ms, offset: until_ms}
        self.file.changed(now_ms)

    def forget(self, place: Place, now_ms: int) -> None:
        """The queue begins anew somewhere else."""
        queues = self.table.get(place[:2])
        if queues is not None and queues.pop(place[2], None) is not None:
            self.file.changed(now_ms)

    def clean(self, broker: Broker, now_ms: int) -> None:
        """Let go of what nobody will ask for."""
        for topic, group in list(self.table):
            config = broker.topics.get(topic)
            queues = self.table[topic, group]
            if config is None or broker.groups.get(group) is None:
                del self.table[topic, group]
                self.file.changed(now_ms)
                continue
            for queue_id in list(queues):
                out = queues[queue_id]
                if queue_id >= config.readQueueNums or now_ms - out.last_ms > FORGET_MS:
                    self.forget((topic, group, queue_id), now_ms)
            if not queues:
                del self.table[topic, group]

    def soonest_free_ms(self, topic: str, group: str, now_ms: int) -> int:
        """When the first of a topic's blocked queues is free; NEVER_MS if none is blocked."""
        queues = self.table.get((topic, group), {})
        moments = [out.free_ms for out in queues.values()]
        return min((one for one in moments if one > now_ms), default=NEVER_MS)

    # ---------------------------------------------------------------------------------------- file

    def encode(self) -> bytes:
        return fastjson.dumps(
            {
                "table": {
                    f"{topic}@{group}": {at: _wire(out) for at, out in sorted(queues.items())}
                    for (topic, group), queues in self.table.items()
                }
            },
            bare_int_keys=True,
        )

    def _load(self, stored: dict[str, Any]) -> None:
        for key, queues in (stored.get("table") or {}).items():
            topic, mark, group = str(key).partition("@")
            if not mark or not isinstance(queues, dict):
                log.error("ordered pops skipped key=%r", key)
                continue
            for queue_id, raw in queues.items():
                try:
                    out = _out(raw)
                    at = int(queue_id)
                except (TypeError, ValueError, KeyError, AttributeError):
                    log.error(
                        "ordered pops skipped key=%r queue=%r: not as expected", key, queue_id
                    )
                    continue
                if out is not None:
                    self.table.setdefault((topic, group), {})[at] = out


def _wire(out: Out) -> dict[str, Any]:
    first = out.offsets[0]
    found: dict[str, Any] = {
        "cm": out.acked - (1 << 64) if out.acked >> 63 else out.acked,
        "i": out.invisible_ms,
        "l": out.last_ms,
        "o": [first, *(one - first for one in out.offsets[1:])],
        "popTime": out.pop_ms,
    }
    if out.attempt is not None:
        found["a"] = out.attempt
    if out.times:
        found["oc"] = out.times
    if out.visible_ms:
        found["ot"] = out.visible_ms
    return found


def _out(raw: dict[str, Any]) -> Out | None:
    """What RocketMQ wrote about a queue; None if nothing of it is out."""
    listed = [int(one) for one in raw.get("o") or ()]
    if not listed:
        return None
    attempt = raw.get("a")
    return Out(
        int(raw["popTime"]),
        int(raw.get("i") or 0),
        (listed[0], *(listed[0] + one for one in listed[1:])),
        int(raw.get("l") or 0),
        attempt if isinstance(attempt, str) else None,
        int(raw.get("cm") or 0) & (1 << 64) - 1,
        {int(at): int(ms) for at, ms in (raw.get("ot") or {}).items()},
        {int(at): int(times) for at, times in (raw.get("oc") or {}).items()},
    )
