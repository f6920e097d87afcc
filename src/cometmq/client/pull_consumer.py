"""The consumer that is asked: `poll` for what comes next, or `pull` at an offset.

Owns: which queues this client reads, how far it has read each, and what is committed for the group.
One rule: what the last `poll` handed out is committed only once the next `poll` is called (or by
`commit`), so that nothing is lost by a crash in between; it may then come twice.

It is RocketMQ's lite pull consumer (subscribe or assign, then poll) and its plain pull consumer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar, Unpack

from cometmq.client import assignment
from cometmq.client.connection import Connection
from cometmq.client.consumer_offsets import StartRule
from cometmq.client.fetching import ANSWER_MS, Fetching, Flow, Lent
from cometmq.client.handling import EXITS
from cometmq.client.in_flight import FlowLimits
from cometmq.client.reading import ALL, Filter, Pulled, PulledRaw, Reader, make_filter
from cometmq.client.received import ReceivedMessage
from cometmq.client.routes import Route
from cometmq.client.session import Options, Session, check_group
from cometmq.client.sharing import Sharing
from cometmq.errors import CometError, NoRoute, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import bodies
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame

if TYPE_CHECKING:
    from cometmq.client.keywords import MoreOfAll

log = logging.getLogger("cometmq.client")

T = TypeVar("T")

POLL_S = 5.0
POLL_COUNT = 500  # what one poll hands out at most; memory is bounded by the limits, not by this
PULL_COUNT = 32  # what one request asks for; more is not given by brokers as shipped
SUSPEND_MS = 20_000
MESSAGES_FOR_ALL = 10_000
REBALANCE_S = 20.0
REBALANCE_AGAIN_S = 1.0  # never sooner; after failed rounds doubled each time up to REBALANCE_S
COMMIT_S = 5.0
YIELD_S = 0.01  # how long polls that need not wait may keep the loop from others

QueuesChanged = Callable[[list[MessageQueue], list[MessageQueue]], Awaitable[None] | None]
"""Called with the queues gained (before they are read, so it may seek) and lost."""


class PullConsumer:
    """Reads queues when asked to; lives on one event loop, and `poll` belongs to one task.

    >>> async with PullConsumer("billing", namesrv="localhost:9876") as consumer:
    ...     consumer.subscribe("orders", tags="paid || refunded")
    ...     async for message in consumer:
    ...         print(message.body)

    `start`: where a group without stored offsets begins: "last", "first" or a time.
    `limits`: what may be fetched ahead of each queue; one pull's worth comes on top.
    Other keywords: those of session.Options.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        start: str | datetime = "last",
        auto_commit: bool = True,
        auto_commit_s: float = COMMIT_S,
        strategy: assignment.Strategy = assignment.average,
        on_queues_changed: QueuesChanged | None = None,
        limits: FlowLimits | None = None,
        messages_for_all: int = MESSAGES_FOR_ALL,
        pull_count: int = PULL_COUNT,
        suspend_ms: int = SUSPEND_MS,
        **options: Unpack[MoreOfAll],
    ) -> None:
        if not isinstance(start, datetime) and start not in ("last", "first"):
            raise UsageError(f"start={start!r} must be 'last', 'first' or a datetime")
        if pull_count < 1 or messages_for_all < 1 or suspend_ms < 1 or auto_commit_s <= 0:
            raise UsageError(
                f"pull_count={pull_count} messages_for_all={messages_for_all} "
                f"suspend_ms={suspend_ms} auto_commit_s={auto_commit_s}: all must be positive"
            )
        try:
            common = Options(namesrv=namesrv, **options)
        except TypeError as error:
            raise UsageError(f"PullConsumer: {error}") from None
        check_group(group, common.namespace)
        self.session = Session(common)
        self.group = self.session.wrap(group)
        self.on_queues_changed = on_queues_changed
        self._reader = Reader(self.session, self.group)
        self._start = StartRule(self.session, start)
        self._is_time_given = isinstance(start, datetime)
        self._auto_commit_s = auto_commit_s if auto_commit else None
        self._sharing = Sharing(self.session, self.group, strategy)
        self._subscribed: dict[str, tuple[Filter, int]] = {}
        self._is_assigned_by_hand = False
        self._flows: dict[MessageQueue, Flow] = {}
        self._fetching = Fetching(
            self.session,
            self._reader,
            limits=limits if limits is not None else FlowLimits(),
            messages_for_all=messages_for_all,
            pull_count=pull_count,
            suspend_ms=suspend_ms,
        )
        self._rebalance_wanted = asyncio.Event()
        self._rebalanced_at = float("-inf")
        self._changing = asyncio.Lock()  # of the set of queues
        self._committing = asyncio.Lock()
        self._is_polling = False
        self._yielded_at = 0.0
        self.session.consumers = self._membership
        self.session.on_route = self._route_changed
        self.session.answers[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED] = self._members_changed

    def __repr__(self) -> str:
        unwrap, queues = self.session.unwrap, list(self._flows)
        names = {queue.topic for queue in queues} | set(self._subscribed)
        topics = ",".join(sorted(unwrap(name) for name in names))
        how = "assigned" if self._is_assigned_by_hand else "queues"
        return (
            f"<PullConsumer {unwrap(self.group)} topics={topics} {how}={len(queues)} "
            f"{self.session.state} {self.session.names}>"
        )

    # ---------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> PullConsumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Join the group if there are subscriptions; Unreachable if no name server answers."""
        if self.session.is_started and not self.session.is_closed:
            return
        try:
            await self.session.start()
            if self._auto_commit_s is not None:
                self.session.spawn(self._keep_committed(self._auto_commit_s))
            for topic in self._subscribed:
                await self._sharing.route(topic)
            if self._subscribed:
                await self.session.beat()
            is_fine = await self._rebalance()
        except BaseException:
            await self.session.close()
            raise
        self.session.spawn(self._keep_rebalanced(is_fine))

    async def close(self) -> None:
        """Commit what is confirmed (with auto_commit), leave the group, end everything."""
        if self.session.is_closed:
            return
        if self.session.is_started:
            async with self._changing:
                lost = list(self._flows.values())
                for flow in lost:
                    self._fetching.stop(flow)
                self._flows.clear()
                if self._auto_commit_s is not None:
                    await self._commit_confirmed(lost)
        await self.session.close()
        self._fetching.arrived.set()

    def _check_running(self) -> None:
        if not self.session.is_started or self.session.is_closed:
            state = "closed" if self.session.is_closed else "not started: use it in `async with`"
            raise UsageError(f"this consumer of group {self.group} is {state}")

    # ------------------------------------------------------------------------------ what to read

    def subscribe(self, topic: str, tags: str = ALL, *, sql: str = "") -> None:
        """Share the topic's queues with the other members of the group; again: another filter."""
        if self._is_assigned_by_hand:
            raise UsageError(
                f"subscribe({topic!r}) after assign(): a consumer does one or the other"
            )
        if not topic:
            raise UsageError("subscribe needs the name of a topic")
        wanted = make_filter(tags, sql)
        wire_topic = self.session.wrap(topic)
        self._subscribed[wire_topic] = (wanted, self.session.now_ms())
        for flow in self._flows.values():
            if flow.queue.topic == wire_topic:
                self._fetching.refilter(flow, wanted)
        self._subscriptions_changed()

    def unsubscribe(self, topic: str) -> None:
        """Leave the topic's queues to the others, from the next rebalance on."""
        if self._subscribed.pop(self.session.wrap(topic), None) is not None:
            self._subscriptions_changed()

    def _subscriptions_changed(self) -> None:
        self.session.beat_soon()
        self._rebalance_wanted.set()

    async def assign(
        self, queues: Iterable[MessageQueue], tags: str = ALL, *, sql: str = ""
    ) -> None:
        """Read exactly these queues, whoever else does; replaces what was assigned before.

        Such a consumer is no member of its group, it only uses the group's offsets.
        """
        self._check_running()
        if self._subscribed:
            raise UsageError("assign() after subscribe(): a consumer does one or the other")
        self._is_assigned_by_hand = True
        wanted = make_filter(tags, sql)
        mine = {self.session.wire_queue(queue): wanted for queue in queues}
        async with self._changing:
            failed = await self._take_over(mine)
        for error in failed:
            raise error

    def assigned(self) -> list[MessageQueue]:
        """The queues that this consumer reads now."""
        return self._queues_shown(self._flows)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic that can be read."""
        self._check_running()
        name = self.session.wrap(topic)
        try:
            await self.session.routes.refresh(name)
        except NoRoute:
            raise
        except CometError:
            if self.session.routes.get(name) is None:
                raise
        return self._queues_shown((await self.session.routes.need(name)).to_read)

    def _queues_shown(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        return sorted(self.session.shown_queue(queue) for queue in queues)

    def _shown(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """With topics as the user calls them."""
        self.session.show(messages)
        return messages

    # ---------------------------------------------------------------------------------------- poll

    async def poll(
        self, timeout_s: float = POLL_S, most: int = POLL_COUNT
    ) -> list[ReceivedMessage]:
        """The next messages, in order within each queue; none after `timeout_s` without any.

        Says that all messages handed out before are done with. RequestRefused if a broker says that
        this consumer may not read a queue, or can't understand its filter.
        """
        if most < 1:
            raise UsageError(f"poll(most={most}): must be at least 1")
        return self._shown(await self._next(lambda: self._fetching.take(most), timeout_s) or [])

    async def lend(self) -> Lent | None:
        """As `poll`, for a thread that hands the messages out one by one (the blocking client)."""
        lent = await self._next(lambda: self._fetching.lend(POLL_COUNT), POLL_S)
        if lent is not None:
            self._shown(lent.messages)
        return lent

    async def _next(self, take: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `take` finds, now or when something has come."""
        self._check_running()
        if self._is_polling:
            raise UsageError("poll() is called while another poll() waits; use one task")
        self._fetching.confirm()
        loop = asyncio.get_running_loop()
        if loop.time() - self._yielded_at > YIELD_S:
            await asyncio.sleep(0)
            self._yielded_at = loop.time()
        found = take()
        if found or timeout_s <= 0:
            return found
        self._is_polling = True
        try:
            async with asyncio.timeout(timeout_s):
                while not found:
                    self._fetching.arrived.clear()
                    await self._fetching.arrived.wait()
                    if self.session.is_closed:
                        return None
                    found = take()
        except TimeoutError:
            refusal = self._fetching.refusal(self._flows.values())
            if refusal is not None:
                raise refusal from None
        finally:
            self._is_polling = False
            self._yielded_at = loop.time()
        return found

    def __aiter__(self) -> PullConsumer:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """One message at a time; asking for the next says that this one is done with."""
        while not self.session.is_closed:
            found = await self.poll(most=1)
            if found:
                return found[0]
        raise StopAsyncIteration

    # ----------------------------------------------------------------------------------- positions

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Hand out from this offset on; one that the queue lacks becomes its nearest end."""
        if offset < 0:
            raise UsageError(f"seek({_text(queue)}, {offset}): an offset is 0 or more")
        self._fetching.seek(self._flow(queue), offset)

    async def seek_to_begin(self, *queues: MessageQueue) -> None:
        """To the oldest message of these queues, or of all that are assigned."""
        for queue in queues or self.assigned():
            self.seek(queue, await self.begin_offset(queue))

    async def seek_to_end(self, *queues: MessageQueue) -> None:
        """Behind the newest message of these queues, or of all that are assigned."""
        for queue in queues or self.assigned():
            self.seek(queue, await self.end_offset(queue))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Hand nothing out of these queues until `resume`; fetching ahead stops too."""
        for queue in queues:
            self._fetching.pause(self._flow(queue))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            self._fetching.resume(self._flow(queue))

    def position(self, queue: MessageQueue) -> int:
        """The offset that poll hands out next."""
        self._fetching.take_back()
        return self._flow(queue).position

    def _flow(self, queue: MessageQueue) -> Flow:
        flow = self._flows.get(self.session.wire_queue(queue))
        if flow is None:
            raise UsageError(f"{_text(queue)} is not assigned to this consumer; see assigned()")
        return flow

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's stored offset; None if there is none. Any queue may be asked for."""
        self._check_running()
        return await self._reader.committed(self.session.wire_queue(queue))

    async def begin_offset(self, queue: MessageQueue) -> int:
        """The least offset that is still there."""
        self._check_running()
        return await self._reader.begin(self.session.wire_queue(queue))

    async def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        self._check_running()
        return await self._reader.end(self.session.wire_queue(queue))

    async def offset_for_time(self, queue: MessageQueue, when: datetime | int) -> int:
        """The first offset stored at this time (or ms since 1970) or later; else the end.

        A RocketMQ 4 broker gives the nearest instead, which may be the message before that time.
        """
        self._check_running()
        return await self._reader.at_time(self.session.wire_queue(queue), when)

    # -------------------------------------------------------------------------------------- commits

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store these offsets, or that all that was handed out is done with; returns when the
        brokers have them. All are tried; then the first error is raised."""
        self._check_running()
        if offsets is None:
            self._fetching.confirm()
            flows = [one for one in self._flows.values() if one.position != one.committed]
            wanted = {flow.queue: flow.position for flow in flows}
        else:
            wanted = {self.session.wire_queue(queue): offset for queue, offset in offsets.items()}
            for queue, offset in wanted.items():
                if offset < 0:
                    text = f"commit of {offset} for {_text(queue)}: an offset is 0 or more"
                    raise UsageError(text)
            self._fetching.take_back()
            for queue, offset in wanted.items():
                if queue in self._flows:
                    self._flows[queue].confirm_before(offset)
        for error in await self._commit(wanted):
            raise error

    async def _commit(self, offsets: Mapping[MessageQueue, int]) -> list[CometError]:
        async with self._committing:
            asked = [self._commit_one(queue, offset) for queue, offset in offsets.items()]
            return [error for error in await asyncio.gather(*asked) if error is not None]

    async def _commit_one(self, queue: MessageQueue, offset: int) -> CometError | None:
        try:
            await self._reader.commit(queue, offset)
        except CometError as error:
            return error
        flow = self._flows.get(queue)
        if flow is not None:
            flow.committed = offset
        return None

    async def _commit_confirmed(self, flows: Iterable[Flow]) -> None:
        self._fetching.take_back()
        offsets = {flow.queue: flow.confirmed for flow in flows if flow.confirmed != flow.committed}
        for error in await self._commit(offsets):
            log.warning("commit_failed group=%s reason=%s", self.group, error)

    async def _keep_committed(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self._commit_confirmed(self._flows.values())

    # ---------------------------------------------------------------------------------- plain pull

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        most: int = PULL_COUNT,
        tags: str = ALL,
        suspend_ms: int = 0,
        timeout_ms: int = ANSWER_MS,
        *,
        sql: str = "",
    ) -> Pulled:
        """One pull of any queue; no subscription is needed and no position is moved.

        `suspend_ms`: how long the broker waits for a message if the offset is the queue's end;
        `timeout_ms` is counted from then on.
        """
        self._check_running()
        pulled = await self._reader.pull(
            self.session.wire_queue(queue),
            offset,
            make_filter(tags, sql),
            most=most,
            suspend_ms=suspend_ms,
            timeout_ms=timeout_ms,
        )
        self._shown(pulled.messages)
        return pulled

    async def pull_raw(
        self,
        queue: MessageQueue,
        offset: int,
        most: int = PULL_COUNT,
        tags: str = ALL,
        suspend_ms: int = 0,
        timeout_ms: int = ANSWER_MS,
        *,
        sql: str = "",
    ) -> PulledRaw:
        """As `pull`, with the records as they came."""
        self._check_running()
        return await self._reader.pull_raw(
            self.session.wire_queue(queue),
            offset,
            make_filter(tags, sql),
            most=most,
            suspend_ms=suspend_ms,
            timeout_ms=timeout_ms,
        )

    # ------------------------------------------------------------------------------------ rebalance

    def _membership(self) -> list[bodies.ConsumerOfHeartbeat]:
        if not self._subscribed:
            return []
        subscriptions = tuple(
            wanted.subscription(topic, version)
            for topic, (wanted, version) in self._subscribed.items()
        )
        return [
            bodies.ConsumerOfHeartbeat(
                self.group,
                "CONSUME_ACTIVELY",
                "CLUSTERING",
                self._start.wire_name,
                subscriptions,
            )
        ]

    def _route_changed(self, route: Route) -> None:
        if route.topic in self._subscribed:
            self._rebalance_wanted.set()

    def _members_changed(self, connection: Connection, frame: Frame) -> None:
        if frame.ext.get("consumerGroup") == self.group:
            self._rebalance_wanted.set()

    async def _keep_rebalanced(self, is_fine: bool) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            wait_s = REBALANCE_S
            if not is_fine:
                wait_s = min(REBALANCE_AGAIN_S * 2**failures, REBALANCE_S)
                failures += 1
            else:
                failures = 0
            try:
                async with asyncio.timeout(wait_s):
                    await self._rebalance_wanted.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(max(0.0, self._rebalanced_at + REBALANCE_AGAIN_S - loop.time()))
            is_fine = await self._rebalance()

    async def _rebalance(self) -> bool:
        """Take the queues that are ours by the present members; whether all could be taken."""
        self._rebalance_wanted.clear()
        if self._is_assigned_by_hand or not (self._subscribed or self._flows):
            return True
        self._rebalanced_at = asyncio.get_running_loop().time()
        async with self._changing:
            mine: dict[MessageQueue, Filter] = {}
            is_fine = True
            for topic, (wanted, _) in list(self._subscribed.items()):
                share = await self._sharing.share(topic)
                if share is None:  # keep what we have of it
                    is_fine = False
                    share = [queue for queue in self._flows if queue.topic == topic]
                mine.update(dict.fromkeys(share, wanted))
            failed = await self._take_over(mine)
        for error in failed:
            log.warning("queue_not_taken group=%s reason=%s", self.group, error)
        return is_fine and not failed

    async def _take_over(self, mine: Mapping[MessageQueue, Filter]) -> list[CometError]:
        """Let go of queues that are not ours any more, begin those that are new."""
        lost = [flow for queue, flow in self._flows.items() if queue not in mine]
        for flow in lost:
            self._fetching.stop(flow)
            del self._flows[flow.queue]
        if lost and self._auto_commit_s is not None:
            await self._commit_confirmed(lost)
        new = [queue for queue in mine if queue not in self._flows]
        begins = await asyncio.gather(*(self._begin_of(queue) for queue in new))
        failed: list[CometError] = []
        gained: list[Flow] = []
        for queue, begin in zip(new, begins, strict=True):
            if isinstance(begin, CometError):
                failed.append(begin)
            else:
                gained.append(Flow(queue, mine[queue], begin))
        self._flows.update((flow.queue, flow) for flow in gained)
        if gained or lost:
            log.info(
                "queues group=%s gained=%d lost=%d now=%d",
                self.group,
                len(gained),
                len(lost),
                len(self._flows),
            )
            await self._tell_of_change(gained, lost)
        for flow in gained:
            if flow.queue in self._flows:
                self._fetching.begin(flow)
        return failed

    async def _begin_of(self, queue: MessageQueue) -> int | CometError:
        """The stored offset, else by `start`. As with RocketMQ, a broker says 0 for a group that it
        does not know while the queue's first message is still in memory, so that "last" skips only
        what is old; a time is always kept to."""
        try:
            stored = await self._reader.committed(queue, or_zero=not self._is_time_given)
            return await self._start.offset(queue) if stored is None else stored
        except CometError as error:
            return error

    async def _tell_of_change(self, gained: list[Flow], lost: list[Flow]) -> None:
        if self.on_queues_changed is None:
            return
        try:
            told = self.on_queues_changed(
                self._queues_shown(flow.queue for flow in gained),
                self._queues_shown(flow.queue for flow in lost),
            )
            if inspect.isawaitable(told):
                await told
        except (Exception, *EXITS):  # nobody waits for this; an exit would hit others
            log.exception("on_queues_changed_failed group=%s", self.group)


def _text(queue: MessageQueue) -> str:
    return f"{queue.topic}@{queue.broker}:{queue.queue_id}"
