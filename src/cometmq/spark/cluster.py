"""What the driver asks of a cluster: which queues there are, where they begin and end.

Owns: one client of the connector and its questions. One rule: a broker that does not answer is
"away", which is no loss; "gone" is only what a broker that answers does not have any more. While no
name server answers, what they said before holds: they only know where brokers are.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from cometmq.client import admin_topics
from cometmq.client.admin_asking import own_names, topic_names
from cometmq.client.background import background
from cometmq.client.reading import Filter, Reader
from cometmq.client.received import read_all
from cometmq.client.routes import Route
from cometmq.client.session import Options, Session
from cometmq.errors import (
    CometError,
    ConnectionLost,
    NoRoute,
    RequestRefused,
    RequestTimeout,
    UsageError,
)
from cometmq.message import MessageQueue
from cometmq.spark.plan import Positions, text_of
from cometmq.spark.source_options import EARLIEST, GROUP, LATEST, Offsets, SourceOptions
from cometmq.wire import bodies
from cometmq.wire.codes import RequestCode, ResponseCode

log = logging.getLogger("cometmq.spark")

AT_ONCE = 64  # questions under way
_BUSY = frozenset(
    (
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    )
)
"""Refusals that pass by themselves."""
SAMPLE_COUNT = 32
T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """A cluster's queues at one moment."""

    begins: Positions = field(default_factory=dict)
    ends: Positions = field(default_factory=dict)
    addresses: dict[MessageQueue, str] = field(default_factory=dict)
    away: dict[MessageQueue, str] = field(default_factory=dict)
    """Queues that nobody answers for at the moment, and why."""
    gone: dict[MessageQueue, str] = field(default_factory=dict)
    """Queues that were known and that their broker does not have any more, and why."""
    stale: str = ""
    """Why the queues are those of a look before, if they are: no name server answers."""


class Cluster:
    """A client of one cluster, blocking, for one thread; begins with its first question."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._session: Session | None = None
        self._reader: Reader | None = None
        self._system: set[str] = set()
        """Topics that brokers have for themselves, as far as they told."""
        self._names: list[str] | None = None
        """What a pattern was held against the last time."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            background.run(session.close())

    def _run(self, ask: Callable[[Session, Reader], Awaitable[T]]) -> T:
        async def run() -> T:
            if self._session is None:
                session = Session(
                    Options(
                        namesrv=self._options.namesrv,
                        timeout_ms=self._options.timeout_ms,
                        **self._options.access.client_keywords(),
                    )
                )
                await session.start()
                self._session, self._reader = session, Reader(session, self._options.group)
            assert self._reader is not None
            return await ask(self._session, self._reader)

        return background.run(run())

    # -------------------------------------------------------------------------------------- queues

    def look(self, known: Iterable[MessageQueue] | None = None) -> Look:
        """All queues that are to be read, with their ends. `known`: those that must be told of;
        None: this is the first look, and a topic that does not exist is NoRoute."""
        queues = None if known is None else set(known)
        return self._run(lambda session, reader: self._look(session, reader, queues))

    async def _look(
        self, session: Session, reader: Reader, queues: set[MessageQueue] | None
    ) -> Look:
        known = queues or set()
        routes, missing, stale = await self._routes(session, known)
        if missing and queues is None and self._options.topic_pattern is None:
            topic = min(missing)
            raise NoRoute(topic, missing[topic])
        found: dict[MessageQueue, str] = {}
        for route in routes.values():
            for queue in route.to_read:
                if self._is_chosen(queue):
                    broker = route.brokers[queue.broker]
                    found[queue] = broker.leader or broker.any or ""
        look = Look(addresses=found, stale=stale)

        async def ask(queue: MessageQueue) -> None:
            try:
                begin, end = await asyncio.gather(reader.begin(queue), reader.end(queue))
            except (ConnectionLost, RequestTimeout, NoRoute) as error:
                look.away[queue] = str(error)
                return
            except RequestRefused as error:
                if error.code in _BUSY:
                    look.away[queue] = str(error)
                elif error.code == ResponseCode.TOPIC_NOT_EXIST:
                    look.gone[queue] = f"its broker says {error.remark}"
                else:
                    raise
                return
            # An empty queue whose file is yet to be made may tell an end of 0 and a begin of -1.
            look.begins[queue], look.ends[queue] = max(begin, 0), max(end, begin, 0)

        await _each(ask, found)
        lacking = sorted(known - set(found))
        wanted = sorted(self._assigned() - set(found) - set(lacking))
        if lacking or wanted:
            await self._explain(session, look, [*lacking, *wanted], routes, missing)
        return look

    async def _routes(
        self, session: Session, known: set[MessageQueue]
    ) -> tuple[dict[str, Route], dict[str, str], str]:
        """Routes asked for anew; the topics that have none, with the reason; and why some routes
        are those of before, if no name server answers."""
        options = self._options
        if options.assign is not None:
            names = list(options.assign)
        elif options.topics is not None:
            names = list(options.topics)
        else:
            assert options.topic_pattern is not None
            wanted = re.compile(options.topic_pattern)
            try:
                self._names = await self._listed(session)
            except (ConnectionLost, RequestTimeout):
                if self._names is None:
                    raise
            listed = {*self._names, *(queue.topic for queue in known)}
            names = sorted(name for name in listed if wanted.fullmatch(name))
        routes: dict[str, Route] = {}
        missing: dict[str, str] = {}
        untold: dict[str, str] = {}

        async def ask(topic: str) -> None:
            try:
                await session.routes.refresh(topic)
                found = session.routes.get(topic)
                if found is not None:
                    routes[topic] = found
            except NoRoute as error:
                session.routes.forget(topic)
                missing[topic] = error.reason
            except (ConnectionLost, RequestTimeout) as error:
                former = session.routes.get(topic)
                if former is None:
                    raise
                routes[topic] = former
                untold[topic] = str(error)

        await _each(ask, names)
        return routes, missing, next(iter(untold.values()), "")

    async def _listed(self, session: Session) -> list[str]:
        """What a pattern is held against: users' topics, and those of retries and dead letters if
        it has the % that their names begin with."""
        assert self._options.topic_pattern is not None
        found, failed = await admin_topics.try_system_topics(session)
        for name, error in sorted(failed.items()):
            if not isinstance(error, ConnectionLost | RequestTimeout):
                raise error
            # It is away: what it told before still holds, and the others go on.
            log.info("system_topics_untold broker=%s reason=%s", name, error)
        self._system |= found
        names = [one for one in await topic_names(session) if one not in self._system]
        if "%" not in self._options.topic_pattern:
            hidden = (admin_topics.RETRY_PREFIX, admin_topics.DLQ_PREFIX)
            names = [one for one in names if not one.startswith(hidden)]
        return own_names(session, names)

    def _is_chosen(self, queue: MessageQueue) -> bool:
        assign = self._options.assign
        if assign is None:
            return True
        return queue.queue_id in assign.get(queue.topic, {}).get(queue.broker, ())

    def _assigned(self) -> set[MessageQueue]:
        return {
            MessageQueue(topic, broker, number)
            for topic, brokers in (self._options.assign or {}).items()
            for broker, queues in brokers.items()
            for number in queues
        }

    async def _explain(
        self,
        session: Session,
        look: Look,
        lacking: Iterable[MessageQueue],
        routes: Mapping[str, Route],
        missing: Mapping[str, str],
    ) -> None:
        """Queues that no route has: their broker is away, or it does not have them any more. Or a
        query was started again with options that leave them out."""
        try:
            answer = await session.call_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, {})
        except (ConnectionLost, RequestTimeout) as error:
            look.away.update(dict.fromkeys(lacking, str(error)))
            return
        table = bodies.load_object(answer.body, "cluster").get("brokerAddrTable") or {}
        for queue in lacking:
            is_asked = queue.topic in routes or queue.topic in missing
            if not is_asked or not self._is_chosen(queue):
                look.gone[queue] = (
                    "the checkpoint has it, and the options topic, topicPattern or assign do not "
                    "choose it any more (failOnDataLoss=false lets it go)"
                )
            elif queue.broker not in table:
                look.away[queue] = f"broker {queue.broker} is not registered"
            elif queue.topic in missing:
                look.gone[queue] = f"the topic does not exist: {missing[queue.topic]}"
            else:
                look.gone[queue] = f"broker {queue.broker} has no such queue to read"

    def address_of(self, queue: MessageQueue) -> str:
        """Where to read a queue; NoRoute if nobody knows."""

        async def ask(session: Session, reader: Reader) -> str:
            await session.routes.refresh(queue.topic)
            route = session.routes.get(queue.topic)
            broker = None if route is None else route.brokers.get(queue.broker)
            address = None if broker is None else broker.leader or broker.any
            if address is None:
                raise NoRoute(queue.topic, f"broker {queue.broker} is not registered")
            return address

        return self._run(ask)

    # ------------------------------------------------------------------------------------- offsets

    def resolve(self, wanted: str | int | Offsets, look: Look, *, what: str) -> Positions:
        """Offsets of all queues by a word, by a time (ms) or by queue; `what` is the option."""
        if look.away:
            queue = min(look.away)
            raise ConnectionLost(f"{what} can't be told for {text_of(queue)}: {look.away[queue]}")
        if look.gone:
            queue = min(look.gone)
            raise UsageError(f"{text_of(queue)} can't be read: {look.gone[queue]}")
        if isinstance(wanted, dict):
            return self._by_queue(wanted, look, what)
        return self._by_rule(dict.fromkeys(look.begins, wanted), look)

    def _by_queue(self, wanted: Offsets, look: Look, what: str) -> Positions:
        rules: dict[MessageQueue, str | int] = {}
        exact: Positions = {}
        for topic, brokers in wanted.items():
            for broker, queues in brokers.items():
                for number, offset in queues.items():
                    queue = MessageQueue(topic, broker, number)
                    if queue not in look.begins:
                        raise UsageError(f"{what} names {text_of(queue)}, which is not read here")
                    if isinstance(offset, int):
                        exact[queue] = offset
                    else:
                        rules[queue] = offset
        silent = sorted(set(look.begins) - set(rules) - set(exact))
        if silent:
            raise UsageError(f"{what} does not name {'; '.join(map(text_of, silent[:10]))}")
        return exact | self._by_rule(rules, look)

    def _by_rule(self, rules: Mapping[MessageQueue, str | int], look: Look) -> Positions:
        found: Positions = {}
        to_ask: dict[MessageQueue, str | int] = {}
        for queue, rule in rules.items():
            if rule == EARLIEST:
                found[queue] = look.begins[queue]
            elif rule == LATEST:
                found[queue] = look.ends[queue]
            else:
                to_ask[queue] = rule

        async def all_of_them(session: Session, reader: Reader) -> None:
            async def ask(queue: MessageQueue) -> None:
                rule = to_ask[queue]
                begin, end = look.begins[queue], look.ends[queue]
                if rule == GROUP:
                    stored = await reader.committed(queue)
                    found[queue] = begin if stored is None else stored
                else:
                    assert isinstance(rule, int)
                    found[queue] = begin
                    if begin < end:
                        at = min(max(await reader.at_time(queue, rule), begin), end)
                        found[queue] = await self._exactly(reader, queue, at, rule, look)

            await _each(ask, to_ask)

        if to_ask:
            self._run(all_of_them)
        return found

    async def _exactly(
        self, reader: Reader, queue: MessageQueue, at: int, stamp_ms: int, look: Look
    ) -> int:
        """The first message stored at this time or later, from a broker's answer that is near it.

        Apache RocketMQ 4.9 answers with the nearest message in time, which may be the one before,
        with any of several that have the very time, and for a time behind the last message with
        the last message.
        """
        begin, end = look.begins[queue], look.ends[queue]
        while at > begin:
            low = max(begin, at - SAMPLE_COUNT)
            first = _first_since(await self._stored(reader, queue, low, at), stamp_ms)
            if first is None:
                break
            at = first
            if at > low:
                return at
        while at < end:
            some = await self._stored(reader, queue, at, min(end, at + SAMPLE_COUNT))
            first = _first_since(some, stamp_ms)
            if first is not None or not some:
                return at if first is None else first
            at = some[-1][0] + 1
        return end

    async def _stored(
        self, reader: Reader, queue: MessageQueue, begin: int, end: int
    ) -> list[tuple[int, int]]:
        """Offset and store time of the messages between two offsets, as far as they are there."""
        found: list[tuple[int, int]] = []
        while begin < end:
            pulled = await reader.pull_raw(
                *(queue, begin, Filter()),
                most=end - begin,
                suspend_ms=0,
                timeout_ms=self._options.timeout_ms,
            )
            some = read_all(pulled.body, queue.broker)
            found += [(one.queue_offset, one.store_ms) for one in some if one.queue_offset < end]
            if not some:
                break
            begin = some[-1].queue_offset + 1
        return found

    def commit(self, positions: Positions, fresh: Collection[MessageQueue] = ()) -> list[str]:
        """Store the group's offsets; returns what went wrong, queue by queue. `fresh`: those that
        are stored for the first time. Apache's broker makes the table of a group that is new to it
        without a lock, and of several first offsets it may lose some: so these are looked at."""
        failed: list[str] = []

        async def all_of_them(session: Session, reader: Reader) -> None:
            async def ask(queue: MessageQueue) -> None:
                try:
                    await reader.commit(queue, positions[queue])
                except CometError as error:
                    failed.append(f"{text_of(queue)}: {error}")

            async def look(queue: MessageQueue) -> None:
                try:
                    if await reader.committed(queue) != positions[queue]:
                        await reader.commit(queue, positions[queue])
                except CometError as error:
                    failed.append(f"{text_of(queue)}: {error}")

            await _each(ask, positions)
            await _each(look, [queue for queue in fresh if queue in positions])

        self._run(all_of_them)
        return failed

    def committed(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | None]:
        """The group's stored offsets."""
        found: dict[MessageQueue, int | None] = {}

        async def all_of_them(session: Session, reader: Reader) -> None:
            async def ask(queue: MessageQueue) -> None:
                found[queue] = await reader.committed(queue)

            await _each(ask, list(queues))

        self._run(all_of_them)
        return found

    def mean_bytes(self, starts: Positions) -> dict[MessageQueue, float]:
        """About how large messages are at these places of their queues, by a sample of each."""
        found: dict[MessageQueue, float] = {}

        async def all_of_them(session: Session, reader: Reader) -> None:
            async def ask(queue: MessageQueue) -> None:
                try:
                    sample = await reader.pull_raw(
                        queue,
                        starts[queue],
                        Filter(),
                        most=SAMPLE_COUNT,
                        suspend_ms=0,
                        timeout_ms=self._options.timeout_ms,
                    )
                except (ConnectionLost, RequestTimeout, RequestRefused) as error:
                    log.warning("no_sample queue=%s reason=%s", queue, error)
                    return
                count = sample.next_offset - starts[queue]
                if sample.body and count > 0:
                    found[queue] = len(sample.body) / count

            await _each(ask, starts)

        self._run(all_of_them)
        return found


def _first_since(stored: Iterable[tuple[int, int]], stamp_ms: int) -> int | None:
    return min((offset for offset, stored_ms in stored if stored_ms >= stamp_ms), default=None)


async def _each(ask: Callable[[T], Awaitable[None]], things: Iterable[T]) -> None:
    """Many questions, some at a time; the first error is raised when all have ended."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(thing: T) -> None:
        async with gate:
            await ask(thing)

    results = await asyncio.gather(*(one(thing) for thing in things), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
