"""One send, from its first attempt to its end.

Owns: the attempts: which queue, which connection, what an answer means, whether to try again. One
rule: every send ends once, with what the broker said or with an error that tells each attempt; an
attempt whose answer never came is said to be maybe stored.

A send that finds its route and its connection ready runs without a task of its own: it is an object
that waits for the answer (connection.Waiter).

    send         tries again on another broker: after a lost connection or a timeout, and after
                 the refusals in RETRIED; within its timeout, `retries` times
    send_async   tries again on the same broker, after lost connections and timeouts only
    to a given queue, by a selector or a sharding key: one attempt
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import struct
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from cometmq.client.compression import Compression
from cometmq.client.connection import Connection
from cometmq.client.routes import TEMPLATE_TOPIC, Route
from cometmq.client.selector import Selector
from cometmq.errors import (
    CometError,
    ConnectionLost,
    NoRoute,
    RequestRefused,
    RequestTimeout,
    SendFailed,
    Unreachable,
    UsageError,
)
from cometmq.message import MessageQueue, SendResult, SendStatus
from cometmq.wire import headers
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame

if TYPE_CHECKING:
    from cometmq.client.producer import Producer

STATUSES = {
    0: SendStatus.SEND_OK,
    10: SendStatus.FLUSH_DISK_TIMEOUT,
    11: SendStatus.SLAVE_NOT_AVAILABLE,
    12: SendStatus.FLUSH_SLAVE_TIMEOUT,
}
RETRIED = frozenset((1, 14, 16, 17, 204, 205, 1500))
"""Refusals after which another broker is tried, as in RocketMQ; flow control (2) is not among
them: a busy cluster must not get more of the same, unless the user asks for it."""

_encode_text = msgspec.json.encode
# Plain numbers: looking one up in an enum costs as much as a dict.
_OK = int(ResponseCode.SUCCESS)
SEND = int(RequestCode.SEND_MESSAGE_V2)
SEND_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
_LENGTHS = struct.Struct(">ii").pack


class Lane:
    """The short way of a topic all of whose brokers are connected: for each queue its header and
    its connection. It serves for as long as its route does."""

    __slots__ = ("_count", "_turn", "_ways", "route")

    def __init__(
        self, route: Route, ways: list[tuple[MessageQueue, bytes, Connection]], turn: int
    ) -> None:
        self.route = route
        self._ways = ways
        self._count = len(ways)
        self._turn = turn

    def next(self) -> tuple[MessageQueue, bytes, Connection]:
        """In turn, as RoundRobin; on the loop's thread alone."""
        self._turn = turn = self._turn + 1
        return self._ways[turn % self._count]


class SendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a producer sends; the defaults are RocketMQ's."""

    send_timeout_ms: int = 3_000
    """Of one send, all its attempts together."""
    retries: int = 2
    async_retries: int = 2
    retry_another_broker_when_not_stored: bool = False
    """Try another broker if a message was stored but not as safely as asked for."""
    retry_busy: bool = False
    """Also try again when a broker refuses because it is busy (SYSTEM_BUSY)."""
    max_message_bytes: int = 4 * 1024 * 1024
    compress_over_bytes: int = 4096
    compression: Compression | None = Compression.ZLIB
    default_queues: int = 4
    """Queues of a topic that the first send creates."""
    window: int = 4096
    """Sends under way at most; `send` waits for room, `send_async` raises WindowFull."""
    avoid_slow_brokers: bool = False
    """RocketMQ's sendLatencyFaultEnable."""


Settled: TypeAlias = "asyncio.Future[SendResult] | concurrent.futures.Future[SendResult]"
"""What tells of a send's end: on the loop, or to another thread."""


class Sending:
    """One send, from its first attempt to its end. Waits for the answer."""

    __slots__ = (
        "attempts",
        "batch_ids",
        "began",
        "body",
        "broker",
        "code",
        "ends",
        "flag",
        "future",
        "is_async",
        "is_free",
        "is_maybe_stored",
        "is_plain",
        "last_code",
        "producer",
        "properties",
        "queue",
        "reconsume_times",
        "select",
        "sys_flag",
        "topic",
        "unique_id",
    )

    def __init__(
        self,
        producer: Producer,
        topic: str,
        body: bytes,
        properties: str,
        flag: int,
        sys_flag: int,
        unique_id: str,
        code: int,
        is_async: bool,
        queue: MessageQueue | None,
        select: Selector | None,
        timeout_ms: int,
        future: Settled | None,
    ) -> None:
        self.producer = producer
        self.topic = topic
        self.body = body
        self.properties = _encode_text(properties)
        self.flag = flag
        self.sys_flag = sys_flag
        self.unique_id = unique_id
        self.batch_ids = ""
        self.code = code
        self.is_async = is_async
        self.queue = queue
        self.select = select
        self.is_free = queue is None and select is None  # to go to any queue, and another next time
        self.is_plain = self.is_free and code == SEND and not (flag or sys_flag)
        self.reconsume_times: tuple[int, int] | None = None
        """Of a message that a consumer sends back itself: how often, and how often at most."""
        loop = producer.loop
        self.future: Settled = loop.create_future() if future is None else future
        self.began = began = loop.time()
        self.ends = began + timeout_ms / 1e3
        self.broker = ""
        self.attempts: list[str] | None = None
        self.is_maybe_stored = False
        self.last_code: int | None = None

    # ------------------------------------------------------------------------------- one attempt

    def launch(self) -> None:
        producer = self.producer
        route = producer.session.routes.get(self.topic)
        lane = producer.lanes.get(self.topic) if self.is_plain and self.attempts is None else None
        if lane is not None and lane.route is route:
            queue, header, connection = lane.next()
            if connection.is_open:
                self.queue = queue
                self.broker = queue.broker
                opaque = connection.next_opaque()
                head = header % (producer.session.now_ms(), self.properties, opaque)
                size, body = len(head), self.body
                data = _LENGTHS(4 + size + len(body), size) + head + body
                connection.ask_raw(opaque, data, self)
                return
        if route is not None and route.to_send:
            self._to(route)
        else:
            self.producer.session.spawn(self._find_route())

    async def _find_route(self) -> None:
        producer = self.producer
        try:
            async with asyncio.timeout_at(self.ends):
                route = await producer.session.routes.need(
                    self.topic, create_queues=producer.send_options.default_queues
                )
        except TimeoutError:
            late = RequestTimeout(f"no route from {producer.session.names} in time")
            self._failed_once("name servers", late, sent=False)
        except (ConnectionLost, RequestRefused) as error:
            # A name server that is away is not the message's fault: as long as there is time.
            if self.producer.loop.time() + 0.2 < self.ends and isinstance(error, ConnectionLost):
                await asyncio.sleep(0.2)
                self.launch()
            else:
                self._note(f"route: {error}")
                self._give_up(error)
        except CometError as error:
            self._end(error)
        else:
            if route.to_send:
                self._to(route)
            else:
                self._end(NoRoute(self.topic, route.why_not_sent))

    def _to(self, route: Route) -> None:
        producer = self.producer
        try:
            queue = self.choose(route)
        except Exception as error:
            self._end(error)
            return
        self.queue = queue
        self.broker = queue.broker
        address = route.leader_of(queue.broker)
        if address is None:
            self._end(NoRoute(self.topic, f"broker {queue.broker} has no leader registered"))
            return
        connection = producer.session.connections.known(address)
        if connection is not None and connection.is_open:
            self._write(connection)
            if self.is_plain:
                producer.open_lane(route, queue)
        else:
            producer.session.spawn(self._dial(address))

    def choose(self, route: Route) -> MessageQueue:
        if self.select is not None:
            chosen = self.select(route.to_send)
            if not isinstance(chosen, MessageQueue):
                raise UsageError(f"the selector returned {chosen!r}, not one of the queues")
            return chosen
        if self.queue is not None and (self.is_async or not self.is_free):
            return self.queue
        return self.producer.choose(self.topic, route.to_send, self.broker)

    async def _dial(self, address: str) -> None:
        try:
            async with asyncio.timeout_at(self.ends):
                connection = await self.producer.session.connections.get(address, self.broker)
        except TimeoutError:
            text = f"TCP connect to {address} took longer than the send may"
            self._failed_once(self.broker, Unreachable(text), sent=False)
        except CometError as error:
            self._failed_once(self.broker, error, sent=False)
        else:
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        producer = self.producer
        queue = self.queue
        assert queue is not None
        opaque = connection.next_opaque()
        now_ms = producer.session.now_ms()
        if producer.is_signed:
            data = connection.frame(self.code, self.ext(now_ms), self.body, opaque=opaque)
        else:
            data = producer.template(self.topic).frame(
                self.code,
                opaque,
                queue.queue_id,
                self.sys_flag,
                now_ms,
                self.flag,
                self.properties,
                self.body,
                0,
                self.reconsume_times,
            )
        connection.ask_raw(opaque, data, self)

    def ext(self, now_ms: int) -> dict[str, str]:
        assert self.queue is not None
        return headers.send_v2_ext(
            headers.SendHeader(
                producerGroup=self.producer.wire_group,
                topic=self.topic,
                defaultTopic=TEMPLATE_TOPIC,
                defaultTopicQueueNums=self.producer.send_options.default_queues,
                queueId=self.queue.queue_id,
                sysFlag=self.sys_flag,
                bornTimestamp=now_ms,
                flag=self.flag,
                properties=msgspec.json.decode(self.properties, type=str),
                reconsumeTimes=self.reconsume_times[0] if self.reconsume_times else 0,
                maxReconsumeTimes=self.reconsume_times[1] if self.reconsume_times else None,
                batch=self.code == RequestCode.SEND_BATCH_MESSAGE,
            )
        )

    # ----------------------------------------------------------------------------- what came of it

    def answered(self, frame: Frame) -> None:
        code = frame.code
        if code == _OK:
            self._stored(SendStatus.SEND_OK, frame)
            return
        status = STATUSES.get(code)
        options = self.producer.send_options
        if status is not None:
            if options.retry_another_broker_when_not_stored and self._may_retry():
                self._note(f"{self.broker}: {status.value}")
                self._again()
            else:
                self._stored(status, frame)
            return
        self.last_code = code
        refusal = RequestRefused(code, frame.remark or "no remark", frame.ext)
        self.producer.observed(self, is_isolated=False)
        self._note(f"{self.broker}: {refusal}")
        is_busy = code == ResponseCode.SYSTEM_BUSY
        if is_busy and options.retry_busy and self._may_retry():
            pause_s = 0.05 * 2 ** (self._attempt_count - 1)
            self.producer.loop.call_later(pause_s, self._again)
        elif code in RETRIED and not self.is_async and self._may_retry():
            self._again()
        else:
            self._give_up(refusal)

    def failed(self, error: Exception) -> None:
        self._failed_once(self.broker, error, sent=not isinstance(error, Unreachable))

    def _failed_once(self, where: str, error: Exception, *, sent: bool) -> None:
        self._note(f"{where}: {error}")
        self.is_maybe_stored = self.is_maybe_stored or sent
        if where == self.broker:
            self.producer.observed(self, is_isolated=True)
        if self._may_retry():
            self._again()
        else:
            self._give_up(error)

    def _note(self, what: str) -> None:
        if self.attempts is None:
            self.attempts = []
        self.attempts.append(what)

    @property
    def _attempt_count(self) -> int:
        return len(self.attempts) if self.attempts is not None else 0

    def _may_retry(self) -> bool:
        options = self.producer.send_options
        retries = options.async_retries if self.is_async else options.retries
        if not self.is_free:
            retries = 0
        return self._attempt_count < 1 + retries and self.producer.loop.time() < self.ends

    def _again(self) -> None:
        if self.producer.loop.time() >= self.ends:
            self._give_up(RequestTimeout("no time was left for another attempt"))
            return
        self.launch()

    def _stored(self, status: SendStatus, frame: Frame) -> None:
        ext = frame.ext
        queue = self.queue
        assert queue is not None
        try:
            queue_id = int(ext["queueId"])
            if queue_id != queue.queue_id:  # the broker chose
                queue = MessageQueue(self.topic, queue.broker, queue_id)
            result = SendResult(
                status,
                self.batch_ids or self.unique_id,
                ext["msgId"],
                queue,
                int(ext["queueOffset"]),
                ext.get("transactionId") or "",
                ext.get("recallHandle") or "",
                ext.get("MSG_REGION") or "DefaultRegion",
                ext.get("TRACE_ON") != "false",
                ext.get("duplicate") == "true",
            )
        except (KeyError, ValueError) as error:
            self._give_up(RequestRefused(frame.code, f"an answer without {error}", ext))
            return
        producer = self.producer
        if producer.is_observing:
            producer.observed(self, is_isolated=False)
        producer.ended()
        if producer.on_sent:
            producer.tell(self, result)
        if not self.future.done():
            self.future.set_result(result)

    def _give_up(self, cause: Exception) -> None:
        attempts = self.attempts or [str(cause)]
        count = len(attempts)
        took_ms = round((self.producer.loop.time() - self.began) * 1e3)
        maybe = "; it may have been stored all the same" if self.is_maybe_stored else ""
        error = SendFailed(
            f"message for topic {self.topic!r} not acknowledged after {count} "
            f"attempt{'' if count == 1 else 's'} in {took_ms} ms: {'; '.join(attempts)}{maybe}",
            attempts,
            code=self.last_code,
            is_maybe_stored=self.is_maybe_stored,
        )
        error.__cause__ = cause
        self._end(error)

    def _end(self, error: Exception) -> None:
        self.producer.ended()
        if self.producer.on_sent:
            self.producer.tell(self, error)
        if not self.future.done():
            self.future.set_exception(error)
