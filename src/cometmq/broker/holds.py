"""Pulls parked until a message arrives.

Owns: the held pull requests by queue, and their deadlines. One rule: a hold ends exactly once: by
an arrival that its filter may want, by its deadline, by its connection closing, or by shutdown; and
the pull that follows never parks again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from cometmq.broker.filters import Filter
from cometmq.ports import NEVER_MS, ConnId
from cometmq.requests import Call

_Key = tuple[str, int]


class Hold(msgspec.Struct, eq=False):
    """One parked pull: the call, where it stands, what it wants, when it gives up."""

    call: Call
    topic: str
    queue_id: int
    offset: int
    wants: Filter
    until_ms: int
    is_over: bool = False


class Holds:
    """All parked pulls of a broker, at most `limit`."""

    def __init__(
        self,
        limit: int,
        watch: Callable[[str, int, bool], None],
        text_at: Callable[[int], str | None],
    ) -> None:
        self.limit = limit
        self._watch = watch  # told when the first hold of a queue comes and the last one goes
        self._text_at = text_at  # the properties of the record at a log offset
        self.count = 0
        self.refused_by_limit = 0
        self._queues: dict[_Key, list[Hold]] = {}
        self._by_conn: dict[ConnId, set[int]] = {}
        self._holds: dict[int, Hold] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._next_id = 0

    def park(self, hold: Hold) -> bool:
        """Hold a pull; False (answer at once) when there is no room."""
        if self.count >= self.limit:
            self.refused_by_limit += 1
            return False
        self._next_id += 1
        self.count += 1
        self._holds[self._next_id] = hold
        holds = self._queues.get((hold.topic, hold.queue_id))
        if holds is None:
            self._queues[hold.topic, hold.queue_id] = [hold]
            self._watch(hold.topic, hold.queue_id, True)
        else:
            holds.append(hold)
        self._by_conn.setdefault(hold.call.conn, set()).add(self._next_id)
        heapq.heappush(self._deadlines, (hold.until_ms, self._next_id))
        return True

    def arrived(
        self, topic: str, queue_id: int, queue_offset: int, tags_code: int, log_offset: int
    ) -> list[Hold]:
        """The holds that a new message wakes; they are no longer held."""
        holds = self._queues.get((topic, queue_id))
        if not holds:
            return []
        woken: list[Hold] = []
        text: str | None = None
        for hold in holds:
            if queue_offset < hold.offset or not hold.wants.accepts_code(tags_code):
                continue
            if hold.wants.needs_record:
                text = self._text_at(log_offset) if text is None else text
                if text is None or not hold.wants.accepts_record(text):
                    continue
            woken.append(hold)
        self._end(woken)
        return woken

    def of_group(self, topic: str, group: str) -> list[Hold]:
        """The holds of one group on one topic, ended (an operator has reset its offsets)."""
        found = [
            hold
            for hold in self._holds.values()
            if hold.topic == topic and hold.call.header.consumerGroup == group
        ]
        self._end(found)
        return found

    def due(self, now_ms: int) -> list[Hold]:
        """The holds whose time is over; they are no longer held."""
        found: list[Hold] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            hold = self._holds.get(heapq.heappop(self._deadlines)[1])
            if hold is not None and not hold.is_over:
                found.append(hold)
                self._end([hold])
        return found

    def drop_connection(self, conn: ConnId) -> None:
        """A held pull of a closed connection is nobody's."""
        ids = self._by_conn.get(conn)
        if ids:
            self._end([self._holds[one] for one in sorted(ids)])

    def drain(self) -> list[Hold]:
        """Everything that is held, ended: the broker is stopping."""
        found = list(self._holds.values())
        self._end(found)
        return found

    @property
    def next_ms(self) -> int:
        while self._deadlines and self._deadlines[0][1] not in self._holds:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else NEVER_MS

    def _end(self, holds: list[Hold]) -> None:
        if not holds:
            return
        for hold in holds:
            hold.is_over = True
        keys = dict.fromkeys((hold.topic, hold.queue_id) for hold in holds)
        for key in keys:
            left = [hold for hold in self._queues.get(key, ()) if not hold.is_over]
            if left:
                self._queues[key] = left
            elif self._queues.pop(key, None) is not None:
                self._watch(*key, False)
        for conn in {hold.call.conn for hold in holds}:
            ids = self._by_conn.get(conn, set())
            over = {one for one in ids if self._holds[one].is_over}
            for one in over:
                del self._holds[one]
            ids -= over
            if not ids:
                self._by_conn.pop(conn, None)
        self.count = len(self._holds)
