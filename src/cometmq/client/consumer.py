"""The push consumer: hands the messages of a group's topics to handlers.

Owns: subscriptions, the way of pulled messages to the workers, and the consumer's life. One rule:
`close` leaves nothing behind: no handler at work that was waited for, no offset that is not stored,
no lock, no membership.

    session    identity, connections, heartbeats     rebalance          which queues are ours
    pulling    reading one queue                     workers            running handlers
    settling   finished, failed, again later         consumer_answers   what brokers ask of us

All of it lives on one event loop; only plain handlers run on threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import msgspec

from cometmq.client import assignment, consumer_answers
from cometmq.client.consumer_offsets import (
    BrokerOffsets,
    FileOffsets,
    Offsets,
    StartRule,
)
from cometmq.client.in_flight import FlowLimits
from cometmq.client.offset_store import LocalOffsets
from cometmq.client.pulling import PulledQueue, PullRules
from cometmq.client.rebalance import Rebalance
from cometmq.client.received import ReceivedMessage
from cometmq.client.routes import Route
from cometmq.client.send_back import SendBack
from cometmq.client.session import Options, Session, check_group
from cometmq.client.settling import Settling, TopicCounts
from cometmq.client.settling import Stats as Stats
from cometmq.client.stopping import sigterm
from cometmq.client.workers import Handler, Hook, Job, Results, Tasks, Threads, is_async
from cometmq.errors import CometError, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import fastjson
from cometmq.wire.bodies import ConsumerOfHeartbeat, Subscription
from cometmq.wire.codes import RequestCode
from cometmq.wire.hashing import java_hash

if TYPE_CHECKING:
    from cometmq.client.keywords import OfAll
    from cometmq.client.trace import Tracer

log = logging.getLogger("cometmq.client")

STORE_OFFSETS_S = 5.0
MAX_BATCH = 1024
MAX_CONCURRENCY = 1000


class Subscribed(msgspec.Struct, frozen=True):
    """A topic that is wanted, and who handles its messages."""

    subscription: Subscription
    handler: Handler
    is_async: bool


class Consumer:
    """A member of a consumer group; lives on one event loop.

        async with Consumer("billing", namesrv="127.0.0.1:9876") as consumer:
            consumer.subscribe("orders", "paid || refunded", handle)
            await consumer.run()

    `model`: "clustering" (the group's members share the queues) or "broadcasting" (each gets all).
    `ordered`: one message of a queue after the other, a failed one again before the next.
    `batch`: with more than 1 the handler gets a list. `start`: where a group without a past begins,
    "last", "first" or a time. `options`: those of session.Options (namesrv, namespace, tls, ...).

    A handler is a plain function (runs on one of `concurrency` threads) or an async one. Returning
    acknowledges; raising an exception or returning Later(...) asks for redelivery.
    """

    def __init__(
        self,
        group: str,
        *,
        model: Literal["clustering", "broadcasting"] = "clustering",
        ordered: bool = False,
        batch: int = 1,
        start: Literal["last", "first"] | datetime = "last",
        strategy: assignment.Strategy = assignment.average,
        concurrency: int = 20,
        pull_batch: int = 32,
        max_reconsume_times: int = -1,
        consume_timeout_s: float = 900.0,
        suspend_ms: int = 1_000,
        limits: FlowLimits | None = None,
        offsets_folder: str | os.PathLike[str] | None = None,
        pull_interval_ms: int = 0,
        close_timeout_s: float = 30.0,
        trace: bool = False,
        trace_topic: str = "RMQ_SYS_TRACE_TOPIC",
        **options: Unpack[OfAll],
    ) -> None:
        if model not in ("clustering", "broadcasting"):
            raise UsageError(f'model={model!r}: "clustering" or "broadcasting"')
        if not isinstance(start, datetime) and start not in ("last", "first"):
            raise UsageError(f'start={start!r}: "last", "first" or a datetime')
        for name, value, most in (
            ("batch", batch, MAX_BATCH),
            ("pull_batch", pull_batch, MAX_BATCH),
            ("concurrency", concurrency, MAX_CONCURRENCY),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"{name}={value}: must be 1 to {most}")
        self.is_broadcasting = model == "broadcasting"
        if self.is_broadcasting:  # offsets are kept by client id, so it must outlive the process
            options.setdefault("instance", "DEFAULT")
        try:
            common = Options(**options)
        except TypeError as error:
            raise UsageError(f"Consumer: {error}") from None
        check_group(group, common.namespace)
        self.session = Session(common)
        self.group = group
        self.wire_group = self.session.wrap(group)
        self.is_ordered = ordered
        self.batch = batch
        self.start_rule = StartRule(self.session, start)
        self.strategy = strategy
        self.concurrency = concurrency
        self.pull_batch = pull_batch
        self.max_reconsume_times = max_reconsume_times
        self.consume_timeout_s = consume_timeout_s
        self.suspend_ms = suspend_ms
        self.pull_interval_ms = pull_interval_ms
        self.limits = limits or FlowLimits()
        if ordered:  # a queue that waits for its handler has no gaps to bound
            self.limits = msgspec.structs.replace(self.limits, span=None)
        self.on_handled: list[Hook] = []
        """Called on the event loop with (messages, outcome, started_ms, ended_ms)."""
        self.tracer: Tracer | None = None
        if trace:
            from cometmq.client.trace import Tracer  # a tracer's hooks know consumers

            self.tracer = Tracer(self.session, topic=trace_topic)
            self.tracer.watch_consumer(self)
        self.started_ms = 0
        self._close_timeout_s = close_timeout_s
        self._offsets_folder = offsets_folder
        self._topics: dict[str, Subscribed] = {}
        self._retry = SendBack(self.session, self.wire_group, max_reconsume_times)
        self._settling = Settling(
            self.session,
            group,
            retry=self._retry,
            is_ordered=ordered,
            is_broadcasting=self.is_broadcasting,
            max_reconsume_times=max_reconsume_times,
            suspend_ms=suspend_ms,
            consume_timeout_s=consume_timeout_s,
            hand_out=self._hand_out,
            work_line=self._work_line,
            on_interrupt=self._interrupted,
        )
        self._retry_version = 0
        self._is_paused = False
        self._rules: PullRules | None = None
        self._rebalance: Rebalance | None = None
        self._threads: Threads | None = None
        self._tasks: Tasks | None = None
        self._results: Results | None = None
        self._ended = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_run = False
        self._interrupt: BaseException | None = None
        self.is_loop_shared = False
        """The loop is not the program's own: an exit must not leave a task of it."""
        self._last_version = 0

    def __repr__(self) -> str:
        state = "closed" if self._is_closing else "running" if self.is_running else "not started"
        state += " (paused)" if self._is_paused else ""
        topics = ",".join(sorted(self.session.unwrap(one) for one in list(self._topics)))
        return (
            f"<Consumer {self.group} topics={topics} queues={len(self.queues)} {state} "
            f"{self.session.names}>"
        )

    @property
    def is_running(self) -> bool:
        return self._rebalance is not None and not self._is_closing

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this consumer owns now."""
        owned = list(self.owned.items())  # other threads may ask
        return sorted(self.session.shown_queue(queue) for queue, one in owned if not one.is_dropped)

    @property
    def owned(self) -> dict[MessageQueue, PulledQueue]:
        return {} if self._rebalance is None else self._rebalance.owned

    @property
    def rebalance(self) -> Rebalance:
        if self._rebalance is None:
            raise UsageError("this consumer has not been started")
        return self._rebalance

    @property
    def flow_waits(self) -> int:
        """How often a pull had to wait for handlers."""
        return 0 if self._rules is None else self._rules.flow_waits

    @property
    def stats(self) -> Stats:
        return self._settling.stats

    @property
    def counts(self) -> dict[str, TopicCounts]:
        """By topic on the wire."""
        return self._settling.counts

    @property
    def topics(self) -> dict[str, Subscribed]:
        """By their names on the wire."""
        return self._topics

    # ---------------------------------------------------------------------------------------- life

    def subscribe(
        self,
        topic: str,
        tags: str | Handler = "*",
        handler: Handler | None = None,
        *,
        sql: str = "",
    ) -> None:
        """Have a topic's messages handled: all, those with `a || b` as their tag, or by SQL92.

        May be called again to change it, also while the consumer runs.
        """
        if callable(tags):
            handler = tags
            tags = "*"
        if handler is None or not callable(handler):
            raise UsageError(f"subscribe({topic!r}): no handler, a function of one message")
        if not topic:
            raise UsageError("subscribe: the topic is empty")
        if sql and tags != "*":
            raise UsageError(f"subscribe({topic!r}): either tags or sql, not both")
        name = self.session.wrap(topic)
        self._topics[name] = Subscribed(
            self._subscription(name, tags, sql), handler, is_async(handler)
        )
        self._changed()

    def unsubscribe(self, topic: str) -> None:
        self._topics.pop(self.session.wrap(topic), None)
        self._changed()

    def pause(self) -> None:
        """Ask for no more messages, until `resume`; stay a member and keep the queues.

        What was fetched already, and what a pull under way brings, is handled all the same.
        """
        self._is_paused = True
        if self._rules is not None:
            self._rules.is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if self._rules is not None:
            self._rules.is_paused = False
            for owned in self.owned.values():
                owned.pull()

    def _changed(self) -> None:
        if self._rebalance is not None:
            self.session.beat_soon()
            self._rebalance.soon()

    def _subscription(self, topic: str, tags: str, sql: str) -> Subscription:
        self._last_version = max(self.session.now_ms(), self._last_version + 1)
        if sql:
            return Subscription(topic, sql, self._last_version, "SQL92")
        names = tuple(sorted({one.strip() for one in tags.split("||") if one.strip()}))
        if not names or "*" in names:
            return Subscription(topic, "*", self._last_version)
        codes = tuple(sorted({java_hash(one) for one in names}))
        return Subscription(topic, " || ".join(names), self._last_version, "TAG", names, codes)

    def subscriptions(self) -> dict[str, Subscription]:
        """What the group wants, its retry topic included, by names on the wire."""
        found = {name: one.subscription for name, one in self._topics.items()}
        if not self.is_broadcasting:
            topic = self._retry.retry_topic
            found[topic] = Subscription(topic, "*", self._retry_version)
        return found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Join the group and begin to consume; returns when the first round of sharing is done."""
        if not await self._start():
            raise UsageError("this consumer was closed while it started")

    async def _start(self) -> bool:
        """False if it was closed meanwhile, as a handler of the first round's messages may do."""
        if self._is_closing:
            raise UsageError("this consumer is closed; make a new one")
        if self._rebalance is not None:
            return True
        self._retry_version = self.session.now_ms()
        self.started_ms = self.session.now_ms()
        self._results = Results(self._settling.settle, self.batch)
        self._results.hooks = self.on_handled
        self._threads = Threads(self._results, self.concurrency, f"consumer-{self.group}")
        self._tasks = Tasks(self._results, self.concurrency)
        self._rebalance = self._make_rebalance()
        session = self.session
        session.consumers = self._heartbeat
        session.on_route = self._route_changed
        session.answers.update(consumer_answers.answers(self))
        await session.start()
        await self._find_routes(self._topics)
        await self._check_sql()
        await session.beat()  # membership first: then nobody's first pull comes too early
        await self._rebalance.round()
        if self._is_closing:  # what is begun now, nobody would end
            return False
        session.spawn(self._rebalance.follow())
        session.spawn(self._store_offsets())
        if self.is_ordered and not self.is_broadcasting:
            session.spawn(self._rebalance.keep_locks())
        if not self.is_ordered:
            session.spawn(self._settling.watch(self._at_work))
        return True

    async def run(self) -> None:
        """Start if that was not done, and consume until `close`, SIGTERM or until cancelled.

        SIGTERM only on a main thread's loop, and if the program has no handler of its own for it.
        Raises the SystemExit or KeyboardInterrupt of a handler, which ends it too.
        """
        with sigterm.calling(self._ended.set):
            interrupt = await self.run_to_end()
        if interrupt is not None:
            raise interrupt

    async def run_to_end(self) -> BaseException | None:
        """As `run`, but gives what a handler has ended it with, for another thread to raise."""
        self._is_run = True
        try:
            if await self._start():
                await self._ended.wait()
        finally:
            await self.close()
        return self._interrupt

    async def close(self) -> None:
        """Let handlers at work end (up to the close timeout), store offsets, leave the group.

        What was pulled and not begun is dropped: others get it.
        """
        if self._closing is None:
            self._is_closing = self._settling.is_closing = True
            self._closing = asyncio.get_running_loop().create_task(
                self._close(asyncio.current_task())
            )
        await asyncio.shield(self._closing)
        if self.tracer is not None:
            await self.tracer.close()

    async def _close(self, asker: asyncio.Task[Any] | None) -> None:
        if self._rebalance is None or self._threads is None or self._tasks is None:
            self._ended.set()
            await self.session.close()
            return
        rebalance, loop = self._rebalance, asyncio.get_running_loop()
        rebalance.stop()
        for owned in rebalance.owned.values():
            owned.stop()
        self._threads.drop_waiting()
        self._tasks.drop_waiting()
        give_up = loop.time() + self._close_timeout_s
        while (self._busy(asker) or self._settling.is_sending) and loop.time() < give_up:
            await asyncio.sleep(0.005)
        left = self._busy(asker)
        if left:
            log.warning("handlers_left group=%s count=%d action=not waited for", self.group, left)
        self._threads.close()
        await self._tasks.close(asker)
        assert self._results is not None
        self._results.collect()
        await rebalance.store_offsets(waits=True)
        if self.is_ordered and not self.is_broadcasting:
            await rebalance.unlock(list(rebalance.owned))
        for owned in rebalance.owned.values():
            owned.drop()
        await self.session.close()
        self._ended.set()

    def _busy(self, asker: asyncio.Task[Any] | None) -> int:
        assert self._threads is not None and self._tasks is not None
        return self._threads.busy + self._tasks.busy(asker)

    def _at_work(self) -> list[Job | None]:
        assert self._threads is not None and self._tasks is not None
        return [*self._threads.running, *self._tasks.running]

    def _interrupted(self, error: BaseException) -> None:
        """A handler wants the program to end; `run` passes that on, or else the loop itself."""
        self._interrupt = self._interrupt or error
        self._ended.set()
        if self._is_run:
            return
        if self.is_loop_shared:
            log.error("exit_ignored group=%s reason=nobody is in run()", self.group, exc_info=error)
        else:
            asyncio.get_running_loop().call_soon(_raise, error)

    # ------------------------------------------------------------------------------------ starting

    def _make_rebalance(self) -> Rebalance:
        offsets: Offsets = BrokerOffsets(self.session, self.wire_group)
        if self.is_broadcasting:
            folder = self._offsets_folder
            store = LocalOffsets(
                self.session.client_id, self.wire_group, None if folder is None else str(folder)
            )
            offsets = FileOffsets(store)
        rules = PullRules(
            self.session,
            self.wire_group,
            commits=not self.is_broadcasting,
            pull_batch=self.pull_batch,
            limits=self.limits,
            interval_ms=self.pull_interval_ms,
            on_pulled=self._line_up if self.is_ordered else self._hand_out,
            on_moved=lambda owned, offset: self.rebalance.move(owned, offset),
        )
        rules.is_paused = self._is_paused
        self._rules = rules
        return Rebalance(
            self.session,
            self.wire_group,
            strategy=self.strategy,
            is_shared=not self.is_broadcasting,
            is_ordered=self.is_ordered,
            offsets=offsets,
            start=self.start_rule,
            rules=rules,
            subscriptions=self.subscriptions,
        )

    async def _find_routes(self, topics: Iterable[str]) -> None:
        async def find(topic: str) -> None:
            try:
                await self.session.routes.need(topic)
            except CometError as error:  # told by the first round
                log.debug("route_awaited topic=%s reason=%s", topic, error)

        await asyncio.gather(*(find(topic) for topic in topics))

    async def _check_sql(self) -> None:
        """46: a filter that a broker can't read should fail here, not stay silent."""
        for name, one in self._topics.items():
            route = self.session.routes.get(name)
            if one.subscription.expressionType == "TAG" or route is None:
                continue
            body = fastjson.dumps(
                {
                    "clientId": self.session.client_id,
                    "group": self.wire_group,
                    "subscriptionData": msgspec.to_builtins(one.subscription),
                }
            )
            for broker in route.brokers:
                await self.session.call(broker, name, RequestCode.CHECK_CLIENT_CONFIG, {}, body)

    def _heartbeat(self) -> list[ConsumerOfHeartbeat]:
        return [
            ConsumerOfHeartbeat(
                self.wire_group,
                "CONSUME_PASSIVELY",
                "BROADCASTING" if self.is_broadcasting else "CLUSTERING",
                self.start_rule.wire_name,
                tuple(self.subscriptions().values()),
            )
        ]

    def _route_changed(self, route: Route) -> None:
        if route.topic in self._topics or route.topic == self._retry.retry_topic:
            self.rebalance.soon()

    # ----------------------------------------------------------------------------------- messages

    def _hand_out(self, owned: PulledQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Messages of a pull to the workers, in any order."""
        if self._is_closing:
            return
        self.counts[owned.queue.topic].pulled += len(messages)
        self.session.show(messages)
        found = self._topics.get(owned.queue.topic)
        if found is not None:
            self._feed(owned, messages, found)
            return
        by_topic: dict[str, list[ReceivedMessage]] = {}
        for one in messages:
            by_topic.setdefault(one.topic, []).append(one)
        for topic, some in by_topic.items():
            handled_by = self._topics.get(self.session.wrap(topic))
            if handled_by is not None:
                self._feed(owned, some, handled_by)
                continue
            log.warning(
                "retry_without_handler group=%s topic=%s count=%d action=send back",
                self.group,
                topic,
                len(some),
            )
            self._settling.send_back_soon(owned, some, 0)

    def _feed(
        self, owned: PulledQueue, messages: Sequence[ReceivedMessage], to: Subscribed
    ) -> None:
        jobs: Iterable[Job]
        if self.batch == 1:
            jobs, count = zip(messages, repeat(owned), repeat(to.handler)), len(messages)
        else:
            size = self.batch
            jobs = [
                (list(messages[at : at + size]), owned, to.handler)
                for at in range(0, len(messages), size)
            ]
            count = len(jobs)
        workers = self._tasks if to.is_async else self._threads
        assert workers is not None
        workers.feed(jobs, count)

    def _line_up(self, owned: PulledQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Ordered: messages of a pull behind those of their queue that wait already."""
        self.counts[owned.queue.topic].pulled += len(messages)
        self.session.show(messages)
        owned.line.extend(messages)
        self._work_line(owned)

    def _work_line(self, owned: PulledQueue) -> None:
        if owned.is_in_hand or owned.is_suspended or owned.is_dropped:
            return
        if not owned.line or self._is_closing:
            return
        if not owned.is_lock_alive:
            self.session.later(1.0, self._work_line, owned)
            return
        owned.line_topic = owned.line[0].topic
        found = self._topics.get(self.session.wrap(owned.line_topic))
        if found is None:
            log.warning(
                "ordered_without_handler group=%s topic=%s queue=%s action=wait for a subscription",
                self.group,
                owned.line_topic,
                owned.queue,
            )
            return
        workers = self._tasks if found.is_async else self._threads
        assert workers is not None
        owned.is_in_hand = True
        workers.feed([(None, owned, found.handler)], 1)

    # ---------------------------------------------------------------------------------- background

    async def _store_offsets(self) -> None:
        while True:
            await asyncio.sleep(STORE_OFFSETS_S)
            await self.rebalance.store_offsets()
            for counts in self.counts.values():
                counts.look(STORE_OFFSETS_S)


def _raise(error: BaseException) -> None:
    raise error
