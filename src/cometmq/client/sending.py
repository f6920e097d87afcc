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
import itertools
import math
import threading
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from cometmq.client.compression import Compression
from cometmq.client.connection import Connection, Stored
from cometmq.client.lines import ConnectionLine, RouteLine
from cometmq.client.outgoing import MAX_MESSAGE_BYTES, is_number
from cometmq.client.routes import TEMPLATE_TOPIC, Route
from cometmq.client.selector import RoundRobin, Selector
from cometmq.errors import (
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

_NOT_WAITED_FOR = (asyncio.InvalidStateError, concurrent.futures.InvalidStateError)
"""Whoever asked has cancelled the future. Cheaper than to ask it each time whether it is done."""
_encode_text = msgspec.json.encode
# Plain numbers: looking one up in an enum costs as much as a dict.
_OK = int(ResponseCode.SUCCESS)
_SEND_OK = SendStatus.SEND_OK
_UNAVAILABLE = int(ResponseCode.SERVICE_NOT_AVAILABLE)
MAX_KNOWN_TOPICS = 10_000
NOT_KNOWN = "may or may not survive"  # what a broker says of messages whose flush has failed
SEND = int(RequestCode.SEND_MESSAGE_V2)
SEND_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)


class Lane:
    """The short way of a topic all of whose brokers are connected: for each queue its header and
    its connection, in turn, as RoundRobin. It serves for as long as its route does."""

    __slots__ = ("next", "route")

    def __init__(
        self, route: Route, ways: list[tuple[MessageQueue, bytes, Connection]], turn: int
    ) -> None:
        self.route = route
        self.next = itertools.cycle(ways[turn + 1 :] + ways[: turn + 1]).__next__


class Round:
    """The turns of one thread that sends, topic by topic: each thread goes round all queues,
    however its sends alternate with those of others. It is the thread's own, but only the loop
    touches it."""

    __slots__ = ("_rng", "_turns", "lanes")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._turns: dict[str, RoundRobin] = {}
        self.lanes: dict[str, Lane] = {}

    def turns(self, topic: str) -> RoundRobin:
        found = self._turns.get(topic)
        if found is None:
            if len(self._turns) >= MAX_KNOWN_TOPICS:
                self._turns.clear()
            found = self._turns[topic] = RoundRobin(self._rng)
        return found

    def open_lane(self, lane: Lane) -> None:
        if len(self.lanes) >= MAX_KNOWN_TOPICS:
            self.lanes.clear()
        self.lanes[lane.route.topic] = lane


class Rounds(threading.local):
    """Whoever looks finds the round of his own thread."""

    def __init__(self, rng: Random) -> None:  # called anew in each thread
        self.mine = Round(rng)


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
    max_message_bytes: int = MAX_MESSAGE_BYTES
    compress_over_bytes: int = 4096
    compression: Compression | None = Compression.ZLIB
    default_queues: int = 4
    """Queues of a topic that the first send creates."""
    window: int = 4096
    """Sends under way at most; `send` waits for room, `send_async` raises WindowFull."""
    avoid_slow_brokers: bool = False
    """RocketMQ's sendLatencyFaultEnable."""
    vip_channel: bool = False
    """Send to the brokers' VIP port, two below the one they advertise."""

    def __post_init__(self) -> None:
        check_timeout("send_timeout_ms", self.send_timeout_ms)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not is_number(value) or value < least:
                raise UsageError(f"{name} {value!r} must be a whole number from {least} on")
        for name in _CHOICES:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {getattr(self, name)!r} must be True or False")
        if self.compression is not None and not isinstance(self.compression, Compression):
            raise UsageError(
                f"compression {self.compression!r} must be one of "
                f"{', '.join(f'Compression.{one.name}' for one in Compression)}, or None"
            )


_LEAST = {
    "retries": 0,
    "async_retries": 0,
    "max_message_bytes": 1,
    "compress_over_bytes": 0,
    "default_queues": 1,
    "window": 1,
}
_CHOICES = (
    "retry_another_broker_when_not_stored",
    "retry_busy",
    "avoid_slow_brokers",
    "vip_channel",
)


def check_timeout(name: str, value: float) -> None:
    """Milliseconds; a fraction is fine, for ever is not."""
    if not (is_number(value) or isinstance(value, float)) or not 0 < value < math.inf:
        raise UsageError(f"{name} {value!r} must be a number above 0")


Settled: TypeAlias = "asyncio.Future[SendResult] | concurrent.futures.Future[SendResult]"
"""What tells of a send's end: on the loop, or to another thread."""


class Sending(msgspec.Struct, eq=False, gc=False):
    """One send, from its first attempt to its end. Waits for the answer. Made by `prepare`.

    Not known to the garbage collector: whoever waits for it lets it go when it ends, and it ends.
    """

    producer: Producer
    topic: str
    body: bytes
    properties: bytes
    """The property string as a JSON text."""
    flag: int
    sys_flag: int
    unique_id: str
    code: int
    is_async: bool
    queue: MessageQueue | None
    """Where it goes: given, or chosen for the attempt under way."""
    select: Selector | None
    is_free: bool
    """To go to any queue, and to another one next time."""
    is_plain: bool
    """An ordinary message to any queue, which may take a Lane."""
    future: Settled
    born_ms: int
    began: float
    ends: float
    round: Round
    """Of the thread that sends."""
    broker: str = ""
    batch_ids: str = ""
    attempts: list[str] | None = None
    is_maybe_stored: bool = False
    attempt_began: float = 0.0
    """Of the attempt under way; known only while brokers are observed."""
    weak: SendResult | None = None
    """Stored already, though not as safely as asked for: the result, unless another is better."""
    last_code: int | None = None
    reconsume_times: tuple[int, int] | None = None
    """Of a message that a consumer sends back itself: how often, and how often at most."""

    # ------------------------------------------------------------------------------- one attempt

    def launch(self) -> None:
        producer, topic = self.producer, self.topic
        try:
            route = producer.routes.get(topic)
            if self.is_plain and self.attempts is None:
                lane = self.round.lanes.get(topic)
                if lane is not None and lane.route is route:
                    queue, header, connection = lane.next()
                    if connection.is_open:
                        self.queue = queue
                        self.broker = queue.broker
                        connection.send(header, self.born_ms, self.properties, self.body, self)
                        return
            line = producer.lines.get(topic)
            if line is not None:
                line.join(self)
            elif route is not None and route.to_send:
                self._to(route)
            else:
                producer.lines.begin(topic, RouteLine(producer, topic), self)
        except Exception as error:
            self.broke(error)

    def broke(self, error: Exception) -> None:
        """Something that nobody foresaw, before a byte of this attempt was written. It is this
        send's end and no other's: those that were begun with it go on."""
        self._end(error)

    def routed(self, route: Route) -> None:
        if route.to_send:
            self._to(route)
        else:
            self._end(NoRoute(self.topic, route.why_not_sent))

    def not_routed(self, error: Exception) -> None:
        if isinstance(error, (ConnectionLost, RequestRefused, RequestTimeout)):
            self._note(f"route: {error}")
            self._give_up(error)
        else:
            self._end(error)

    def _to(self, route: Route) -> None:
        producer = self.producer
        if producer.is_observing:
            self.attempt_began = producer.loop.time()
        try:
            queue = self.choose(route)
        except Exception as error:
            self._end(error)
            return
        self.queue = queue
        self.broker = queue.broker
        leader = route.leader_of(queue.broker)
        if leader is None:
            self._end(NoRoute(self.topic, f"broker {queue.broker} has no leader registered"))
            return
        address = producer.port_of(leader)
        line = producer.lines.get(address)
        if line is not None:
            line.join(self)
            return
        connection = producer.session.connections.known(address)
        if connection is not None and connection.is_open:
            self.connected(connection)
            if self.is_plain:
                producer.open_lane(route, queue, self.round)
        else:
            line = ConnectionLine(producer, address, queue.broker)
            producer.lines.begin(address, line, self)

    def choose(self, route: Route) -> MessageQueue:
        if self.select is not None:
            chosen = self.select(route.to_send)
            return self.producer.wire_queue(chosen, self.topic, "the selector returned")
        if self.queue is not None and (self.is_async or not self.is_free):
            return self.queue
        turns = self.round.turns(self.topic)
        return self.producer.choose(turns, route.to_send, self.broker)

    def not_connected(self, error: Exception) -> None:
        self._failed_once(self.broker, error, sent=False)

    def connected(self, connection: Connection) -> None:
        producer = self.producer
        queue = self.queue
        assert queue is not None
        opaque = connection.next_opaque()
        if producer.is_signed:
            data = connection.frame(self.code, self.ext(), self.body, opaque=opaque)
        else:
            data = producer.template(self.topic).frame(
                self.code,
                opaque,
                queue.queue_id,
                self.sys_flag,
                self.born_ms,
                self.flag,
                self.properties,
                self.body,
                0,
                self.reconsume_times,
            )
        connection.ask_raw(opaque, data, self)

    def ext(self) -> dict[str, str]:
        assert self.queue is not None
        return headers.send_v2_ext(
            headers.SendHeader(
                producerGroup=self.producer.wire_group,
                topic=self.topic,
                defaultTopic=TEMPLATE_TOPIC,
                defaultTopicQueueNums=self.producer.send_options.default_queues,
                queueId=self.queue.queue_id,
                sysFlag=self.sys_flag,
                bornTimestamp=self.born_ms,
                flag=self.flag,
                properties=msgspec.json.decode(self.properties, type=str),
                reconsumeTimes=self.reconsume_times[0] if self.reconsume_times else 0,
                maxReconsumeTimes=self.reconsume_times[1] if self.reconsume_times else None,
                batch=self.code == RequestCode.SEND_BATCH_MESSAGE,
            )
        )

    def expired(self) -> None:
        """Its time ran out before its first attempt could begin: that is its end."""
        why = (
            f"the {round((self.ends - self.began) * 1e3)} ms that it may take were over before it "
            f"could begin (no room in the window of {self.producer.send_options.window} sends, or "
            f"a loop that was busy)"
        )
        error = SendFailed(
            f"message for topic {self.topic!r} not sent: {why}",
            [],
            code=None,
            is_maybe_stored=False,
        )
        error.__cause__ = RequestTimeout(why)
        self.refused(error)

    def refused(self, error: Exception) -> None:
        """It is never begun; its end is counted all the same."""
        self.producer.under_way += 1
        self._end(error)

    # ----------------------------------------------------------------------------- what came of it

    def answered(self, frame: Frame) -> None:
        code = frame.code
        if code == _OK:
            self._stored(SendStatus.SEND_OK, frame)
            return
        status = STATUSES.get(code)
        if status is not None:
            self._stored(status, frame)
            return
        options = self.producer.send_options
        self.last_code = code
        remark = frame.remark or "no remark"
        refusal = RequestRefused(code, remark, frame.ext)
        if code == _UNAVAILABLE and NOT_KNOWN in remark:
            self.is_maybe_stored = True  # it is in the log, whose flush has failed
        # It answered, so it can be reached; as in Java any refusal is a failed send all the same.
        self.producer.observed(self, is_isolated=True, is_reachable=True)
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
        try:
            told = Stored(
                ext["msgId"],
                int(ext["queueId"]),
                int(ext["queueOffset"]),
                ext.get("transactionId"),
                ext.get("recallHandle"),
                ext.get("MSG_REGION"),
                ext.get("TRACE_ON"),
                ext.get("duplicate"),
            )
        except (KeyError, ValueError) as error:
            self.is_maybe_stored = True  # it says so, and does not say where
            refusal = RequestRefused(frame.code, f"an answer without {error}", ext)
            self._note(f"{self.broker}: {refusal}")
            if self._wants_better(status):
                self._again()
            else:
                self._give_up(refusal)
            return
        self.stored(told, status)

    def stored(self, told: Stored, status: SendStatus = SendStatus.SEND_OK) -> None:
        """The broker has it. Called from the connection if there is no more to say."""
        producer, queue = self.producer, self.queue
        assert queue is not None
        if told.queueId != queue.queue_id or producer.has_namespace:  # or the broker chose
            topic = producer.session.unwrap(self.topic)
            queue = MessageQueue(topic, queue.broker, told.queueId)
        result = SendResult(
            status,
            self.batch_ids or self.unique_id,
            told.msgId,
            queue,
            told.queueOffset,
            told.transactionId or "",
            told.recallHandle or "",
            told.region or "DefaultRegion",
            told.trace_on != "false",
            told.duplicate == "true",
        )
        if producer.is_observing:
            producer.observed(self, is_isolated=False)
        if status is not _SEND_OK:
            self._note(f"{self.broker}: {status.value}")
            if self._wants_better(status):
                self.weak = result
                self._again()
                return
        producer.ended()
        if producer.on_sent:
            producer.tell(self, result)
        try:  # noqa: SIM105 - free while nothing is raised, which suppress() is not
            self.future.set_result(result)
        except _NOT_WAITED_FOR:
            pass

    def _wants_better(self, status: SendStatus) -> bool:
        """Whether to try again although it was stored."""
        is_wanted = self.producer.send_options.retry_another_broker_when_not_stored
        return status is not _SEND_OK and is_wanted and self._may_retry()

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
        weak = self.weak  # if there is one, what failed was the wish for better
        self.producer.ended()
        if self.producer.on_sent:
            self.producer.tell(self, error if weak is None else weak)
        with suppress(*_NOT_WAITED_FOR):
            if weak is None:
                self.future.set_exception(error)
            else:
                self.future.set_result(weak)


def prepare(
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
    born_ms: int,
) -> Sending:
    """A send whose time runs from now on, and which is of the thread that calls; on any thread if
    it brings its future."""
    loop = producer.loop
    began = loop.time()
    is_free = queue is None and select is None
    return Sending(
        producer,
        topic,
        body,
        _encode_text(properties),
        flag,
        sys_flag,
        unique_id,
        code,
        is_async,
        queue,
        select,
        is_free,
        is_free and code == SEND and not (flag or sys_flag),
        loop.create_future() if future is None else future,
        born_ms,
        began,
        began + timeout_ms / 1e3,
        producer.rounds.mine,
    )
