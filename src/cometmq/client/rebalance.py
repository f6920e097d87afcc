"""Which queues this consumer owns, kept true while members, topics and brokers come and go.

Owns: the table of owned queues, their locks, and moving one to another offset. One rule: a queue is
taken only after its offset (and in ordered consumption its lock) is certain; one that is let go has
its offset stored first, and its lock is given back only when its handler has ended.

A round is made at once at the start, after a word of the broker (40) or a changed route, else every
20 s; a second after a round that left something open; and never twice within a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from cometmq.client.assignment import Strategy
from cometmq.client.consumer_offsets import RETRY_PREFIX, Offsets, StartRule
from cometmq.client.pulling import PulledQueue, PullRules
from cometmq.client.routes import Route
from cometmq.client.session import Session
from cometmq.errors import CometError, NoRoute, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire import bodies, fastjson
from cometmq.wire.bodies import Subscription
from cometmq.wire.codes import RequestCode, ResponseCode

log = logging.getLogger("cometmq.client")

ROUND_S = 20.0
LEAST_S = 1.0
OPEN_MOST_S = 8.0  # between rounds while something stays open, e.g. a topic that does not exist
LOCK_S = 20.0
UNLOCK_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
LOCK_TIMEOUT_MS = 1_000
MOVE_WAIT_S = 10.0  # for handlers at work before an offset is set elsewhere


class Rebalance:
    """The owned queues of one consumer."""

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        strategy: Strategy,
        is_shared: bool,
        is_ordered: bool,
        offsets: Offsets,
        start: StartRule,
        rules: PullRules,
        subscriptions: Callable[[], Mapping[str, Subscription]],
    ) -> None:
        self.owned: dict[MessageQueue, PulledQueue] = {}
        self.round_count = 0
        self._session = session
        self._group = group
        self._strategy = strategy
        self._is_shared = is_shared
        """Clustering: the members share the queues; else each reads all."""
        self._locks = is_ordered and is_shared
        self._offsets = offsets
        self._start = start
        self._rules = rules
        self._subscriptions = subscriptions
        self._wanted = asyncio.Event()
        self._leaving: set[MessageQueue] = set()
        self._moved_at: dict[MessageQueue, float] = {}
        self._reasons: dict[str, str] = {}
        self._began = 0.0
        self._is_open = False
        self._is_stopped = False

    def soon(self) -> None:
        self._wanted.set()

    async def follow(self) -> None:
        """Rounds for as long as the consumer runs; the first has been made."""
        loop = asyncio.get_running_loop()
        open_s = LEAST_S
        while not self._is_stopped:
            try:
                # Not wait_for: up to Python 3.11 it may swallow a cancellation.
                async with asyncio.timeout(open_s if self._is_open else ROUND_S):
                    await self._wanted.wait()
                open_s = LEAST_S
            except TimeoutError:
                open_s = min(open_s * 2, OPEN_MOST_S)
            await asyncio.sleep(max(0.0, self._began + LEAST_S - loop.time()))
            try:
                await self.round()
            except Exception:  # a strategy of the user's, say; the queues we have go on
                log.exception("rebalance_failed group=%s", self._group)

    async def round(self) -> None:
        """Compare what is ours with what we have, and change it."""
        self._wanted.clear()
        self._began = asyncio.get_running_loop().time()
        self._is_open = False
        self.round_count += 1
        wanted = self._subscriptions()
        gone = [one for one in self.owned if one.topic not in wanted]
        work: list[Awaitable[None]] = [self._let_go(gone)] if gone else []
        work += [self._balance(subscription) for subscription in wanted.values()]
        await asyncio.gather(*work)

    def stop(self) -> None:
        """No queue is taken any more."""
        self._is_stopped = True

    # --------------------------------------------------------------------------------- whose is it

    async def _balance(self, subscription: Subscription) -> None:
        topic = subscription.topic
        try:
            route = await self._session.routes.need(topic)
            mine = await self._share(topic, route)
        except CometError as error:
            self._is_open = True
            self._say(topic, str(error), error)
            return
        if mine is None:
            self._is_open = True
            return
        self._say(topic, "")
        lost = [one for one in self.owned if one.topic == topic and one not in mine]
        for one in mine & self.owned.keys():
            if self.owned[one].subscription.subVersion != subscription.subVersion:
                self.owned[one].subscribe(subscription)
        if lost:
            await self._let_go(lost)
        new = sorted(mine - self.owned.keys())
        if new:
            await self._take(new, subscription)

    async def _share(self, topic: str, route: Route) -> set[MessageQueue] | None:
        """The queues that are ours; None if that can't be told this time."""
        queues = sorted(route.to_read)
        if not self._is_shared or not queues:
            return set(queues)
        members = await self._members(route)
        if self._session.client_id not in members:  # a broker that has not heard of us yet
            await self._session.beat()
            members = await self._members(route)
        if self._session.client_id not in members:
            return None
        # Names on the wire, as all members of a group, in whatever language, compute with them;
        # a strategy that has queues of its user's (`fixed`) may give them as the user does.
        mine = self._strategy(self._group, self._session.client_id, queues, members)
        return {self._session.wire_queue(one) for one in mine}

    async def _members(self, route: Route) -> Sequence[str]:
        """The group's client ids as a broker of the topic knows them, sorted."""
        problem: CometError = NoRoute(route.topic, "its route names no broker")
        for broker in route.brokers.values():
            if broker.any is None:
                continue
            try:
                answer = await self._session.connections.call(
                    broker.any,
                    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                    {"consumerGroup": self._group},
                    timeout_ms=self._session.options.timeout_ms,
                    advertised_by=broker.name,
                )
                raw = bodies.load_object(answer.body, "members").get("consumerIdList") or []
                return sorted(str(one) for one in raw)
            except CometError as error:
                problem = error
                if isinstance(error, RequestRefused) and error.code == ResponseCode.SYSTEM_ERROR:
                    return []  # nobody is in the group
        raise problem

    def _say(self, topic: str, reason: str, error: CometError | None = None) -> None:
        """Once for each change of the reason why a topic can't be read."""
        if self._reasons.get(topic, "") == reason:
            return
        self._reasons[topic] = reason
        if not reason:
            log.info("topic_found group=%s topic=%s", self._group, topic)
        elif isinstance(error, NoRoute) and topic.startswith(RETRY_PREFIX):
            log.debug("topic_awaited group=%s reason=%s", self._group, reason)
        elif isinstance(error, NoRoute):
            log.warning("topic_awaited group=%s reason=%s action=wait", self._group, reason)
        else:
            log.warning("rebalance_failed group=%s topic=%s reason=%s", self._group, topic, reason)

    # ------------------------------------------------------------------------------ taking, losing

    async def _take(self, queues: Sequence[MessageQueue], subscription: Subscription) -> None:
        free = [one for one in queues if one not in self._leaving]
        if self._locks and free:
            locked, _ = await self._lock(free)
            free = [one for one in free if one in locked]
        if len(free) < len(queues):
            self._is_open = True
        taken = await asyncio.gather(*(self._take_one(one, subscription) for one in free))
        if any(taken):
            log.info(
                "queues_taken group=%s topic=%s queues=%s",
                self._group,
                subscription.topic,
                ",".join(f"{one.broker}/{one.queue_id}" for one in free),
            )

    async def _take_one(self, queue: MessageQueue, subscription: Subscription) -> bool:
        try:
            stored = await self._offsets.read(queue)
            offset = await self._start.offset(queue) if stored is None else stored
        except CometError as error:
            self._is_open = True
            self._say(queue.topic, f"the offset of {queue} is not known: {error}", error)
            return False
        # A broker says 0 of a group, too, that it has nothing of: then 0 is to be stored, or nobody
        # could see how far behind a group is that has consumed nothing yet.
        return self._own(queue, subscription, offset, stored or None)

    def _own(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        offset: int,
        stored: int | None,
    ) -> bool:
        former = self.owned.get(queue)
        if self._is_stopped or (former is not None and not former.is_dropped):
            return False
        owned = PulledQueue(self._rules, queue, subscription, offset=offset, stored_offset=stored)
        if self._locks:
            owned.needs_lock = True
            owned.locked()
        self.owned[queue] = owned
        owned.pull()
        return True

    async def _let_go(self, queues: Iterable[MessageQueue]) -> None:
        """Stop reading, store how far we came; what is at work goes on, and counts for nobody."""
        table: dict[MessageQueue, int] = {}
        for queue in queues:
            owned = self.owned.pop(queue)
            was_dropped = owned.is_dropped
            owned.drop()
            log.info("queue_lost group=%s queue=%s", self._group, owned)
            if self._locks:
                self._leaving.add(queue)
                self._session.spawn(self._release(owned))
            elif not was_dropped and owned.window.commit_offset is not None:
                table[queue] = owned.window.commit_offset
        if table:
            await self._offsets.write(table, waits=False)

    async def _release(self, owned: PulledQueue) -> None:
        """Ordered: when the handler has ended, store the offset and give the lock back."""
        try:
            while owned.is_in_hand:
                await asyncio.sleep(0.02)
            offset = owned.window.commit_offset
            if offset is not None and owned.is_lock_alive:
                await self._offsets.write({owned.queue: offset}, waits=True)
            await self.unlock([owned.queue])
        finally:
            self._leaving.discard(owned.queue)

    # ------------------------------------------------------------------------------------- offsets

    def changed_offsets(self) -> dict[MessageQueue, int]:
        """What is not stored yet."""
        return {
            queue: owned.window.commit_offset
            for queue, owned in self.owned.items()
            if not owned.is_dropped
            and owned.window.commit_offset is not None
            and owned.window.commit_offset != owned.stored_offset
        }

    async def store_offsets(self, *, waits: bool = False) -> None:
        table = self.changed_offsets()
        if not table:
            return
        for queue in await self._offsets.write(table, waits=waits):
            owned = self.owned.get(queue)
            if owned is not None:
                owned.stored_offset = table[queue]

    def move(self, owned: PulledQueue, offset: int) -> None:
        """Read a queue from elsewhere: the broker has moved it, or an administrator wants it."""
        if self.owned.get(owned.queue) is owned and not owned.is_dropped:
            owned.drop()
            owned.line.clear()
            self._session.spawn(self._move(owned, offset))

    async def _move(self, owned: PulledQueue, offset: int) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + MOVE_WAIT_S
        while owned.is_in_hand and loop.time() < give_up:
            await asyncio.sleep(0.02)
        queue = owned.queue
        since = loop.time() - self._moved_at.get(queue, float("-inf"))
        await asyncio.sleep(max(0.0, LEAST_S - since))  # twice in a second: don't spin
        self._moved_at[queue] = loop.time()
        written = await self._offsets.write({queue: offset}, waits=True)
        if self.owned.get(queue) is owned:
            log.info("queue_moved group=%s queue=%s offset=%d", self._group, queue, offset)
            self._own(queue, owned.subscription, offset, offset if queue in written else None)

    # --------------------------------------------------------------------------------------- locks

    async def keep_locks(self) -> None:
        """Ordered: renew what we hold; what we have lost is taken anew, from its stored offset."""
        while True:
            await asyncio.sleep(LOCK_S)
            held = [one for one in self.owned.values() if not one.is_dropped]
            granted, refused = await self._lock([one.queue for one in held])
            for owned in held:
                if owned.queue in granted and owned.is_lock_alive:
                    owned.locked()
                elif owned.queue not in granted and owned.queue not in refused:
                    continue  # nobody answered: the lock lives as long as it lives
                elif self.owned.get(owned.queue) is owned:  # somebody else has it or had it
                    owned.locked_at = None
                    await self._let_go([owned.queue])
                    self.soon()

    async def _lock(
        self, queues: Iterable[MessageQueue]
    ) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """(what is ours now, what a broker refused)"""
        granted: set[MessageQueue] = set()
        refused: set[MessageQueue] = set()
        for broker, some in _by_broker(queues).items():
            try:
                answer = await self._session.call(
                    broker,
                    some[0].topic,
                    RequestCode.LOCK_BATCH_MQ,
                    {},
                    self._lock_body(some),
                    timeout_ms=LOCK_TIMEOUT_MS,
                )
                raw = bodies.load_object(answer.body, "locks").get("lockOKMQSet") or []
                granted.update(queue_of(one) for one in raw)
                refused.update(one for one in some if one not in granted)
            except CometError as error:
                self._say(some[0].topic, f"queues of {broker} can't be locked: {error}", error)
        return granted, refused

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Let others have these queues. Tried again: a lock that stays holds them up for a minute.
        A queue that has become ours again meanwhile is left alone. Who closes tries once; leaving
        the group ends its locks, too."""
        left = _by_broker(queues)
        pauses_s = () if self._is_stopped else UNLOCK_PAUSES_S
        for pause_s in (*pauses_s, None):
            for broker, some in list(left.items()):
                some = [queue for queue in some if queue not in self.owned or self._is_stopped]
                if not some or await self._unlock_at(broker, some):
                    del left[broker]
            if not left or pause_s is None:
                return
            await asyncio.sleep(pause_s)

    async def _unlock_at(self, broker: str, queues: Sequence[MessageQueue]) -> bool:
        try:
            await self._session.call(
                broker,
                queues[0].topic,
                RequestCode.UNLOCK_BATCH_MQ,
                {},
                self._lock_body(queues),
                timeout_ms=LOCK_TIMEOUT_MS,
            )
        except CometError as error:
            log.warning("unlock_failed group=%s broker=%s reason=%s", self._group, broker, error)
            return False
        return True

    def _lock_body(self, queues: Sequence[MessageQueue]) -> bytes:
        return fastjson.dumps(
            {
                "clientId": self._session.client_id,
                "consumerGroup": self._group,
                "mqSet": [
                    {"brokerName": one.broker, "queueId": one.queue_id, "topic": one.topic}
                    for one in queues
                ],
                "onlyThisBroker": False,
            }
        )


def queue_of(raw: object) -> MessageQueue:
    """A queue out of JSON; BodyError if it is none."""
    return bodies.convert(bodies.drop_nulls(raw), _Queue, "queue").queue


class _Queue(msgspec.Struct):
    topic: str
    brokerName: str  # noqa: N815 - the wire's names
    queueId: int  # noqa: N815

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.brokerName, self.queueId)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for one in queues:
        found.setdefault(one.broker, []).append(one)
    return found
