"""The requests of one task on their way to the brokers, in order within each queue.

Owns: the window of requests without an answer, and what follows from each answer. One rule: a task
ends well only when every one of its messages is acknowledged; whatever else happened is an error
that names broker, queue, rows, code and remark.

A queue's requests go over one connection, a few at a time. Once one was refused, or its answer is
missing, no more are sent to that queue until all that are under way have come to an end: those that
follow come back as gaps (a broker that numbers) or may be stored (one that doesn't: `sequenced` is
absent from its answers, and only one request a queue is under way). Then all that are not
acknowledged go again, in order, after a wait that doubles each time.

    stored                       0, 10, 11, 12; `duplicate`: it was stored by an earlier attempt
    again, for sendTimeout       lost connections, no answer, SYSTEM_BUSY, SERVICE_NOT_AVAILABLE
    again, TRIES times           the other refusals that another try may cure
    the end                      all other refusals
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

import msgspec

from cometmq.client.background import background
from cometmq.client.connection import Connection, FutureWaiter
from cometmq.client.outgoing import SendTemplate
from cometmq.client.routes import TEMPLATE_TOPIC
from cometmq.client.sending import STATUSES
from cometmq.client.session import Options, Session
from cometmq.errors import (
    CometError,
    ConnectionLost,
    NoRoute,
    RequestRefused,
    RequestTimeout,
    SendFailed,
)
from cometmq.message import MessageQueue
from cometmq.spark.sink_options import SinkOptions
from cometmq.wire import headers
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame

log = logging.getLogger("cometmq.spark")

QUEUES_OF_A_NEW_TOPIC = 4
PIPELINE = 4  # requests under way in one queue, once its broker is known to number
TRIES = 5
FIRST_WAIT_S = 0.05
MOST_WAIT_S = 5.0
UNTIL_TIMEOUT = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE))
MAYBE_CURED = frozenset((1, 17, 204, 205, 1500))
"""What our producer takes to another broker; NO_PERMISSION is for administrators to cure."""
GAP = "sequence gap:"
SEND_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
SEND_ONE = int(RequestCode.SEND_MESSAGE_V2)


@dataclass(slots=True)
class Request:
    """Some rows as one request. `properties`: of the request, for a single message its own."""

    queue: MessageQueue
    code: int
    body: bytes
    properties: str
    count: int
    first_row: int
    last_row: int
    tries: int = 0


@dataclass
class Totals:
    """What a task's requests came to."""

    messages: int = 0
    duplicates: int = 0
    bytes: int = 0
    refusals: int = 0
    """Requests that had to be sent again."""
    is_sequenced: bool = True
    """Every broker that was written to numbers, so that nothing was stored twice."""


@dataclass
class _Lane:
    """One queue: requests that wait, and those under way, in their order."""

    queue: MessageQueue
    waiting: deque[Request] = field(default_factory=deque)
    under_way: deque[tuple[Request, asyncio.Future[Frame]]] = field(default_factory=deque)
    again: list[Request] = field(default_factory=list)
    trouble: CometError | None = None
    """Why the first of `again` has to go again."""
    limit: int = 1
    wait_s: float = FIRST_WAIT_S
    progress: float = 0.0
    task: asyncio.Task[None] | None = None


_sessions: dict[tuple[str, object], Session] = {}
"""Of this worker process, which serves task after task. Module state: connections are its own."""


async def session_for(options: SinkOptions) -> Session:
    """The connections of this process, kept from task to task."""
    key = (options.namesrv, options.access)
    found = _sessions.get(key)
    if found is None:
        keywords = options.access.client_keywords()
        session = Session(Options(namesrv=options.namesrv, **keywords))
        await session.start()
        found = _sessions[key] = session
    found.producer_groups.add(options.group)
    return found


class TaskSender:
    """All requests of one task. Methods with `async` run on the background loop."""

    def __init__(self, options: SinkOptions) -> None:
        self.totals = Totals()
        self._options = options
        self._lanes: dict[MessageQueue, _Lane] = {}
        self._templates: dict[str, SendTemplate] = {}
        self._unsettled = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @classmethod
    def open(cls, options: SinkOptions) -> TaskSender:
        sender = background.run(cls._open(options))
        return sender

    @classmethod
    async def _open(cls, options: SinkOptions) -> TaskSender:
        sender = cls(options)
        sender._session = await session_for(options)
        return sender

    _session: Session

    # ------------------------------------------------------------------------- the task's thread

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that can be written now, sorted."""
        return background.run(self._queues(topic))

    def put(self, requests: list[Request]) -> None:
        """Returns when there is room for more; raises what has gone wrong so far."""
        background.run(self._put(requests))

    def finish(self) -> Totals:
        """Returns when all are acknowledged."""
        background.run(self._finish())
        return self.totals

    def give_up(self) -> None:
        background.run(self._stop())

    # ------------------------------------------------------------------------------------ the loop

    async def _queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """A name server that is away for a moment does not fail a task."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._options.send_timeout_ms / 1e3
        wait_s = FIRST_WAIT_S
        while True:
            try:
                route = await self._session.routes.need(topic, create_queues=QUEUES_OF_A_NEW_TOPIC)
            except (ConnectionLost, RequestTimeout):
                if loop.time() + wait_s > ends:
                    raise
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, MOST_WAIT_S)
                continue
            if not route.to_send:
                raise NoRoute(topic, route.why_not_sent)
            return route.to_send

    async def _put(self, requests: list[Request]) -> None:
        for request in requests:
            while self._unsettled >= self._options.max_in_flight and self._error is None:
                self._changed.clear()
                await self._changed.wait()
            self._raise_error()
            self._unsettled += 1
            lane = self._lanes.get(request.queue)
            if lane is None:
                lane = self._lanes[request.queue] = _Lane(request.queue)
            lane.waiting.append(request)
            if lane.task is None:
                lane.progress = asyncio.get_running_loop().time()
                lane.task = asyncio.get_running_loop().create_task(self._serve(lane))

    async def _finish(self) -> None:
        while self._unsettled and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _stop(self) -> None:
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes.values():
            for _, future in lane.under_way:  # nobody wants to know any more
                future.cancel()

    # ------------------------------------------------------------------------------------ one queue

    async def _serve(self, lane: _Lane) -> None:
        """Until nothing waits and nothing is under way."""
        try:
            connection: Connection | None = None
            while lane.waiting or lane.under_way:
                if not lane.under_way or connection is None:
                    connection = await self._connect(lane)
                    if connection is None:
                        continue
                self._send_some(lane, connection)
                await self._settle_first(lane)
                if lane.again and not lane.under_way:
                    await self._wait_and_repeat(lane)
            lane.task = None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = self._error or error
            self._changed.set()

    async def _connect(self, lane: _Lane) -> Connection | None:
        queue = lane.queue
        try:
            address = await self._session.leader(queue.broker, queue.topic)
            return await self._session.connections.get(address, queue.broker)
        except (ConnectionLost, RequestTimeout, NoRoute) as error:
            await self._back_off(lane, lane.waiting[0], error)
            try:  # another leader, or the same one elsewhere
                await self._session.routes.refresh(queue.topic)
            except CometError as trouble:
                log.info("route_kept topic=%s reason=%s", queue.topic, trouble)
            return None

    def _send_some(self, lane: _Lane, connection: Connection) -> None:
        """As many as may be under way; none while some have to go again first."""
        while lane.waiting and len(lane.under_way) < lane.limit and not lane.again:
            request = lane.waiting.popleft()
            lane.under_way.append((request, self._ask(connection, request)))

    def _ask(self, connection: Connection, request: Request) -> asyncio.Future[Frame]:
        timeout_ms = self._options.request_timeout_ms
        if self._session.connections.is_signed:
            return connection.request(request.code, self._ext(request), request.body, timeout_ms)
        topic = request.queue.topic
        template = self._templates.get(topic)
        if template is None:
            template = SendTemplate(self._options.group, topic, QUEUES_OF_A_NEW_TOPIC)
            self._templates[topic] = template
        opaque = connection.next_opaque()
        data = template.frame(
            request.code,
            opaque,
            request.queue.queue_id,
            0,
            self._session.now_ms(),
            0,
            msgspec.json.encode(request.properties),
            request.body,
        )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Frame] = loop.create_future()
        ends = loop.time() + timeout_ms / 1e3
        connection.ask_raw(opaque, data, FutureWaiter(future, timeout_ms, ends))
        return future

    def _ext(self, request: Request) -> dict[str, str]:
        return headers.send_v2_ext(
            headers.SendHeader(
                producerGroup=self._options.group,
                topic=request.queue.topic,
                defaultTopic=TEMPLATE_TOPIC,
                defaultTopicQueueNums=QUEUES_OF_A_NEW_TOPIC,
                queueId=request.queue.queue_id,
                sysFlag=0,
                bornTimestamp=self._session.now_ms(),
                flag=0,
                properties=request.properties,
                reconsumeTimes=0,
                batch=request.code == SEND_BATCH,
            )
        )

    async def _settle_first(self, lane: _Lane) -> None:
        request, future = lane.under_way.popleft()
        try:
            answer = await future
        except (ConnectionLost, RequestTimeout) as error:
            self._note(lane, request, error)
            return
        if answer.code in STATUSES:
            self._stored(lane, request, answer)
            return
        refusal = RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        is_gap = answer.code == ResponseCode.MESSAGE_ILLEGAL and refusal.remark.startswith(GAP)
        if is_gap and lane.again:
            lane.again.append(request)  # the one before it goes again first
        elif answer.code in UNTIL_TIMEOUT:
            self._note(lane, request, refusal)
        elif answer.code in MAYBE_CURED and request.tries < TRIES - 1:
            request.tries += 1
            self._note(lane, request, refusal)
        else:
            # Perhaps the topic lost this queue: the next attempt in this process asks for the route
            # anew. Not after other failures: with other queues it would be another producer.
            self._session.routes.forget(lane.queue.topic)
            raise self._failure(request, refusal)

    def _note(self, lane: _Lane, request: Request, error: CometError) -> None:
        """To be sent again; the first one says why."""
        self.totals.refusals += 1
        if not lane.again:
            lane.trouble = error
        lane.again.append(request)

    def _stored(self, lane: _Lane, request: Request, answer: Frame) -> None:
        totals = self.totals
        ext = answer.ext
        fresh = 0
        if ext.get("duplicate") != "true":  # each message that is new has an id
            fresh = min(ext.get("msgId", "").count(",") + 1, request.count)
            totals.bytes += len(request.body)
        totals.messages += fresh
        totals.duplicates += request.count - fresh
        if ext.get("sequenced") == "true":
            lane.limit = min(lane.limit + 1, PIPELINE)
        else:
            totals.is_sequenced = False
            lane.limit = 1
        lane.wait_s = FIRST_WAIT_S
        lane.progress = asyncio.get_running_loop().time()
        self._unsettled -= 1
        self._changed.set()

    async def _wait_and_repeat(self, lane: _Lane) -> None:
        again, lane.again = lane.again, []
        lane.limit = 1
        lane.waiting.extendleft(reversed(again))
        assert lane.trouble is not None
        await self._back_off(lane, again[0], lane.trouble)

    async def _back_off(self, lane: _Lane, request: Request, error: CometError) -> None:
        """Wait, longer each time; the failure itself if there was no progress for too long."""
        left_s = lane.progress + self._options.send_timeout_ms / 1e3
        left_s -= asyncio.get_running_loop().time()
        if left_s <= 0:
            raise self._failure(request, error)
        log.info("sink_waits queue=%s wait_s=%.2f reason=%s", lane.queue, lane.wait_s, error)
        spread = 0.75 + self._session.rng.random() / 2
        await asyncio.sleep(min(lane.wait_s * spread, left_s))
        lane.wait_s = min(lane.wait_s * 2, MOST_WAIT_S)

    def _failure(self, request: Request, error: CometError) -> SendFailed:
        queue = request.queue
        code = error.code if isinstance(error, RequestRefused) else None
        said = (
            f"code {error.code} ({_name(error.code)}): {error.remark}"
            if isinstance(error, RequestRefused)
            else str(error)
        )
        rows = f"row {request.first_row}"
        if request.last_row != request.first_row:
            rows = f"rows {request.first_row} to {request.last_row}"
        text = (
            f"{rows} of this task ({request.count} messages) not acknowledged by broker "
            f"{queue.broker}, queue {queue.queue_id} of topic {queue.topic!r}: {said}"
        )
        is_maybe_stored = code is None
        return SendFailed(text, [said], code=code, is_maybe_stored=is_maybe_stored)


def _name(code: int) -> str:
    try:
        return ResponseCode(code).name
    except ValueError:
        return "unknown code"
