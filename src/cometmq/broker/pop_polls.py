"""Pops that wait for messages.

Owns: the waiting pops by topic, group and queue, their deadlines, and which queues they listen to.
One rule: a poll ends exactly once: by a message that its filter may want, by its deadline, by an
ordered queue that is free again, by its connection closing, or by shutdown. One that was woken and
found nothing may wait again, but not longer than it asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cometmq.broker.filters import Filter
from cometmq.ports import NEVER_MS, ConnId, Out
from cometmq.requests import Call

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

PollKey = tuple[str, str, int]
"""Topic, group, queue; -1 is any queue."""

_Queue = tuple[str, int]
K = TypeVar("K")


class Poll(msgspec.Struct, eq=False):
    """One waiting pop: the call, what it wants, which queues may bring it, when it gives up."""

    call: Call
    key: PollKey
    wants: Filter
    queues: tuple[_Queue, ...]
    until_ms: int
    again: Callable[[Broker, Poll, int, Out], bool]
    """Tries once more, and answers or parks again; whether another of its key should try too."""
    look_ms: int = NEVER_MS
    """When to look again though nothing came: an ordered queue is free then."""
    is_over: bool = False
    number: int = 0


class Polls:
    """All waiting pops of a broker."""

    def __init__(
        self,
        watch: Callable[[str, int, bool], None],
        text_at: Callable[[int], str | None],
    ) -> None:
        self._watch = watch
        self._text_at = text_at
        self.count = 0
        self.refused_by_limit = 0
        self._keys: dict[PollKey, dict[int, Poll]] = {}
        self._listeners: dict[_Queue, dict[PollKey, int]] = {}  # how many polls of each key
        self._by_conn: dict[ConnId, dict[int, Poll]] = {}
        self._deadlines: list[tuple[int, int, Poll]] = []
        self._number = 0

    def of_key(self, key: PollKey) -> int:
        return len(self._keys.get(key, ()))

    def park(self, poll: Poll, most: int, most_of_key: int) -> bool:
        """Let a pop wait; False when there is no room."""
        if self.count >= most or self.of_key(poll.key) >= most_of_key:
            self.refused_by_limit += 1
            return False
        self._number += 1
        poll.number = self._number
        poll.is_over = False
        self.count += 1
        self._keys.setdefault(poll.key, {})[poll.number] = poll
        self._by_conn.setdefault(poll.call.conn, {})[poll.number] = poll
        for queue in poll.queues:
            listeners = self._listeners.get(queue)
            if listeners is None:
                listeners = self._listeners[queue] = {}
                self._watch(*queue, True)
            listeners[poll.key] = listeners.get(poll.key, 0) + 1
        heapq.heappush(self._deadlines, (min(poll.until_ms, poll.look_ms), poll.number, poll))
        return True

    def arrived(self, topic: str, queue_id: int, tags_code: int, log_offset: int) -> list[PollKey]:
        """The keys of which a poll wants this message."""
        listeners = self._listeners.get((topic, queue_id))
        if not listeners:
            return []
        text: str | None = None
        found: list[PollKey] = []
        for key in listeners:
            for poll in self._keys[key].values():
                if not poll.wants.accepts_code(tags_code):
                    continue
                if poll.wants.needs_record:
                    text = self._text_at(log_offset) if text is None else text
                    if text is None or not poll.wants.accepts_record(text):
                        continue
                found.append(key)
                break
        return found

    def take(self, key: PollKey) -> Poll | None:
        """The poll of a key that waits longest, ended."""
        polls = self._keys.get(key)
        if not polls:
            return None
        poll = next(iter(polls.values()))
        self.end(poll)
        return poll

    def look_at(self, key: PollKey, at_ms: int) -> None:
        """Those of a key look again at this time, too."""
        for poll in self._keys.get(key, {}).values():
            if at_ms < min(poll.until_ms, poll.look_ms):
                poll.look_ms = at_ms
                heapq.heappush(self._deadlines, (at_ms, poll.number, poll))

    def due(self, now_ms: int) -> list[Poll]:
        """Those whose time has come, ended."""
        found: list[Poll] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, number, poll = heapq.heappop(self._deadlines)
            if not poll.is_over and poll.number == number:
                self.end(poll)
                found.append(poll)
        return found

    def drop_connection(self, conn: ConnId) -> None:
        for poll in list(self._by_conn.get(conn, {}).values()):
            self.end(poll)

    def drain(self) -> list[Poll]:
        """Everything that waits, ended: the broker is stopping."""
        found = [poll for polls in self._keys.values() for poll in polls.values()]
        for poll in found:
            self.end(poll)
        return found

    def keys_of(self, topic: str, group: str) -> list[PollKey]:
        return [key for key in self._keys if key[0] == topic and key[1] == group]

    @property
    def next_ms(self) -> int:
        while self._deadlines:
            _, number, poll = self._deadlines[0]
            if not poll.is_over and poll.number == number:
                return self._deadlines[0][0]
            heapq.heappop(self._deadlines)
        return NEVER_MS

    def end(self, poll: Poll) -> None:
        if poll.is_over:
            return
        poll.is_over = True
        self.count -= 1
        _drop(self._keys, poll.key, poll.number)
        _drop(self._by_conn, poll.call.conn, poll.number)
        for queue in poll.queues:
            listeners = self._listeners[queue]
            listeners[poll.key] -= 1
            if not listeners[poll.key]:
                del listeners[poll.key]
                if not listeners:
                    del self._listeners[queue]
                    self._watch(*queue, False)


def _drop(table: dict[K, dict[int, Poll]], key: K, number: int) -> None:
    polls = table[key]
    del polls[number]
    if not polls:
        del table[key]
