"""Registrations that are still being applied, a slice of topics a turn.

Owns: the unfinished work, its order and its end. One rule: a turn writes SLICE_TOPICS topics at
most, so that route requests are answered between slices however many topics a broker has; whoever
asked is answered when the last topic is in, or when the work is cut short.

While work goes on, its broker's stored DataVersion is None. If it is cut short (connection lost,
newer registration), the next registration therefore writes every topic again, and no half-written
table is taken for a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from cometmq.nameserver.routes import Key, Routes
from cometmq.nameserver.stats import Stats
from cometmq.ports import Out
from cometmq.requests import Call, Reply
from cometmq.wire.bodies import DataVersion, Registration, TopicConfig
from cometmq.wire.codes import ResponseCode

SLICE_TOPICS = 2_000  # about 2 ms of work: below what a client notices, above the cost of a turn


class Work(msgspec.Struct):
    """A registration on its way into the routes."""

    key: Key
    name: str
    broker_id: int
    calls: list[Call]
    """All are answered when the work is done."""
    version: DataVersion
    can_write: bool
    topics: dict[str, TopicConfig] = {}
    missing: list[str] = []
    """Topics to take out: the broker has them no longer."""
    pending: list[str] = []
    """Topics to write, of `topics`."""
    at: int = 0
    """Position in missing + pending."""

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.missing) + len(self.pending)


class Slices:
    """At most one unfinished Work for a broker name; they take turns."""

    def __init__(self, routes: Routes, stats: Stats) -> None:
        self._routes = routes
        self._stats = stats
        self._works: dict[str, Work] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def get(self, name: str) -> Work | None:
        return self._works.get(name)

    def pending(self) -> Iterator[list[str]]:
        """For each work, the topics it was to write."""
        return (work.pending for work in self._works.values())

    def start(self, work: Work) -> None:
        """Take work on and do its first slice; it may be done then."""
        assert work.name not in self._works
        self._works[work.name] = work
        self._advance(work)

    def step(self) -> Work | None:
        """One slice of the work that has waited longest; the Work if that completed it."""
        work = next(iter(self._works.values()), None)
        if work is None:
            return None
        self._works[work.name] = self._works.pop(work.name)
        self._advance(work)
        return work if work.is_done else None

    def join(self, work: Work, call: Call, later: Registration, *, can_write: bool) -> None:
        """Let a later registration of the same address ride along: what it tells counts."""
        self._stats.registrations_merged += 1
        rest = work.pending[max(work.at - len(work.missing), 0) :]
        work.missing = work.missing[work.at :]
        work.pending = [topic for topic in rest if topic not in later.topics] + list(later.topics)
        work.topics = {**work.topics, **later.topics}
        work.at = 0
        work.version = later.version
        work.can_write = can_write
        work.calls.append(call)
        self._advance(work)

    def cancel(self, which: Callable[[Work], bool], reason: str, out: Out) -> None:
        """Drop work where it stands and tell whoever waits for it."""
        for work in [work for work in self._works.values() if which(work)]:
            del self._works[work.name]
            self._stats.registrations_cancelled += 1
            reply = Reply(ResponseCode.SYSTEM_ERROR, f"register broker failed: {reason}")
            for call in work.calls:
                call.answer(reply, out)

    def _advance(self, work: Work) -> None:
        routes = self._routes
        broker = routes.brokers[work.name]
        self._stats.slices += 1
        end = work.at + SLICE_TOPICS
        for topic in work.missing[work.at : end]:
            if topic not in work.topics:
                routes.remove(topic, broker)
        shift = len(work.missing)
        for topic in work.pending[max(work.at - shift, 0) : max(end - shift, 0)]:
            routes.put(topic, broker, work.topics[topic], can_write=work.can_write)
        work.at = end
        if work.is_done:
            del self._works[work.name]
            routes.members[work.key].version = work.version
            self._stats.registrations += 1
