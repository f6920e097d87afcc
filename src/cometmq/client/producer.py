"""Producer: sends messages, on one event loop.

Owns: the window of sends under way, checking and completing messages, taking turns over queues. One
rule: at most `window` sends are under way; who wants more waits, or is told.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from cometmq.client import outgoing
from cometmq.client.compression import compress, decompress
from cometmq.client.connection import Connection
from cometmq.client.latency import BrokerHealth
from cometmq.client.lines import Lines, connected
from cometmq.client.outgoing import SendTemplate
from cometmq.client.received import ReceivedMessage
from cometmq.client.routes import Route
from cometmq.client.selector import RoundRobin, Selector, hash_of
from cometmq.client.sending import (
    MAX_KNOWN_TOPICS,
    SEND,
    SEND_BATCH,
    Lane,
    Round,
    Rounds,
    Sending,
    SendOptions,
    Settled,
    check_timeout,
    prepare,
)
from cometmq.client.session import Options, Session
from cometmq.errors import (
    CometError,
    NoRoute,
    RequestTimeout,
    SendFailed,
    Unreachable,
    UsageError,
    WindowFull,
)
from cometmq.message import Message, MessageQueue, SendResult
from cometmq.wire import headers
from cometmq.wire import properties as props
from cometmq.wire.codes import FLAG_ONEWAY, RequestCode
from cometmq.wire.frame import Frame, reply_to

if TYPE_CHECKING:
    from cometmq.client.keywords import OfProducers
    from cometmq.client.trace import Tracer

log = logging.getLogger("cometmq.client")

MOST_SURE_CHARS = props.MAX_PROPERTIES_BYTES // 4  # so many fit, whatever they are in UTF-8
VIP_DISTANCE = 2  # a broker's VIP port is so far below the one that it advertises
PROBE_S = 3.0
CLOSED = "this producer is closed"


class Producer:
    """Sends messages.

    >>> async with Producer("shop", namesrv="127.0.0.1:9876") as producer:
    ...     result = await producer.send(Message("orders", b"..."))

    Keywords: those of SendOptions (timeouts, retries, window, ...) and of session.Options (namesrv,
    namespace, credentials, tls, ...).
    """

    def __init__(
        self,
        group: str = "DEFAULT_PRODUCER",
        *,
        trace: bool = False,
        trace_topic: str = "RMQ_SYS_TRACE_TOPIC",
        **keywords: Unpack[OfProducers],
    ) -> None:
        outgoing.check_name(group, "producer group", outgoing.MAX_GROUP_CHARS)
        self.send_options, options = split_keywords(SendOptions, keywords)
        self.group = group
        self.session = Session(options)
        self.wire_group = self.session.wrap(group)
        self.session.producer_groups.add(self.wire_group)
        self.session.answers[RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._replied
        space = self.session.options.namespace
        self.has_namespace = bool(space)
        self._namespace_text = f"INSTANCE_ID\x01{space}\x02" if space else ""
        self.is_signed = self.session.connections.is_signed
        self._templates: dict[str, SendTemplate] = {}
        self.rounds = Rounds(self.session.rng)
        self.lines = Lines()
        self.routes = self.session.routes.known
        self._checked: set[str] = set()
        self._health = BrokerHealth() if self.send_options.avoid_slow_brokers else None
        self.is_observing = self._health is not None
        self.is_closed = False
        """Or about to be: nothing more is begun."""
        self.under_way = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self._all_done: asyncio.Event = asyncio.Event()
        self.on_ended: Callable[[], object] | None = None
        """Called when a send has ended; the blocking face counts with it."""
        self.on_sent: list[Callable[[Sending, SendResult | Exception], None]] = []
        """Called with every send that has ended, and what it came to; for tracing."""
        self._requests: dict[str, asyncio.Future[ReceivedMessage]] = {}
        self.tracer: Tracer | None = None
        if trace:
            from cometmq.client.trace import Tracer  # it has a producer of its own

            self.tracer = Tracer(self.session, topic=trace_topic)
            self.tracer.watch_producer(self)

    def __repr__(self) -> str:
        state = "closed" if self.session.is_closed else "open" if self.session.is_started else "new"
        return f"<Producer {self.group!r} {state} under_way={self.under_way} {self.session.names}>"

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.session.start()
        if self._health is not None:
            self.session.spawn(self._probe())

    async def close(self) -> None:
        """Wait for the sends under way, leave the group, close the connections."""
        if self.session.is_closed:
            return
        self.is_closed = True
        for waiting in self._room:  # for room, which they shall not have
            if not waiting.done():
                waiting.set_result(None)
        if self.session.is_started:
            await self.flush()
        await self.session.close()
        if self.tracer is not None:
            await self.tracer.close()

    async def flush(self) -> None:
        """Wait until every send that was begun has ended."""
        while self.under_way:
            self._all_done.clear()
            await self._all_done.wait()

    async def __aenter__(self) -> Producer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --------------------------------------------------------------------------------------- sends

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Send, and wait until the broker has it; SendFailed tells every attempt.

        `queue`: to this one. `selector`: a function of the topic's queues that returns one.
        """
        sending = self.make(message, queue, selector, timeout_ms, is_async=False)
        return await self._finished_in_turn(sending)

    def send_async(
        self,
        message: Message,
        callback: Callable[[asyncio.Future[SendResult]], None] | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> asyncio.Future[SendResult]:
        """Begin to send; the future has the result. WindowFull if too many are under way."""
        if self.under_way >= self.send_options.window:
            raise WindowFull(
                f"{self.under_way} sends are under way (window={self.send_options.window}); await "
                f"some of them, or use `await send`, which waits for room"
            )
        sending = self.make(message, queue, selector, timeout_ms, is_async=True)
        self.begin(sending)
        future = sending.future
        assert isinstance(future, asyncio.Future)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Send without asking for an answer: fastest, and nobody knows whether it arrived.
        SendFailed if it could not be handed to a connection within `send_timeout_ms`."""
        await self.finished_oneway(self.make(message, queue, selector, None, is_async=False))

    async def finished_oneway(self, sending: Sending) -> None:
        """Write it; nobody will tell of its end."""
        try:
            async with asyncio.timeout_at(sending.ends):
                await self._write_oneway(sending)
        except TimeoutError:
            if not sending.broker:
                why = f"no route from {self.session.names}"
            else:
                why = f"{sending.broker} could not be reached, or reads slower than is written"
            why += f" ({self.send_options.send_timeout_ms} ms)"
            raise SendFailed(
                f"oneway message for topic {sending.topic!r} not sent: {why}",
                [],
                code=None,
                is_maybe_stored=False,
            ) from RequestTimeout(why)

    async def _write_oneway(self, sending: Sending) -> None:
        route = await self.session.routes.need(
            sending.topic, create_queues=self.send_options.default_queues
        )
        if not route.to_send:
            raise NoRoute(sending.topic, route.why_not_sent)
        sending.queue = chosen = sending.choose(route)
        sending.broker = chosen.broker
        address = self.port_of(await self.session.leader(chosen.broker, sending.topic))
        connection = await connected(self, address, chosen.broker)
        # Before it is written, not after: so what can't leave is not piled up here.
        await connection.drained()
        if not connection.is_open:
            raise Unreachable(f"connection to {address} ended before the message was written")
        ext = sending.ext()
        connection._write(
            connection.frame(
                sending.code, ext, sending.body, opaque=connection.next_opaque(), flag=FLAG_ONEWAY
            )
        )

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Send messages of one topic as one request, stored next to each other; `split_batch`
        cuts what is too large. The result's `message_id` has all ids, joined by commas."""
        return await self._finished_in_turn(self.make_batch(messages, queue, timeout_ms))

    def make_batch(
        self,
        messages: Sequence[Message],
        queue: MessageQueue | None,
        timeout_ms: int | None,
        future: Settled | None = None,
    ) -> Sending:
        """As `make`, for all of them together. On any thread."""
        self._require_open()
        outgoing.check_batch(messages)
        limit = self.send_options.max_message_bytes
        ids: list[str] = []
        texts: list[str] = []
        now_ms = self.session.now_ms()
        for message in messages:
            outgoing.check_body(message.body, limit)
            outgoing.check_flag(message.flag)
            ids.append(self._unique_id(message, now_ms))
            texts.append(outgoing.properties_of(message, ids[-1], self._namespace_text))
        body = outgoing.batch_body(messages, texts)
        if len(body) > limit:
            raise UsageError(
                f"a batch of {len(body)} bytes; at most {limit} (max_message_bytes): "
                f"cut it with split_batch"
            )
        topic = self.wire_topic(messages[0].topic)
        wait = "true" if messages[0].waits_for_storage else "false"
        sending = prepare(
            self,
            topic,
            body,
            f"WAIT\x01{wait}\x02",
            0,
            0,
            ids[0],
            SEND_BATCH,
            False,
            None if queue is None else self.wire_queue(queue, topic),
            None,
            self._timeout(timeout_ms),
            future,
            now_ms,
        )
        sending.batch_ids = ",".join(ids)
        return sending

    def make(
        self,
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout_ms: int | None,
        *,
        is_async: bool,
        extra: str = "",
        sys_flag: int = 0,
        future: Settled | None = None,
    ) -> Sending:
        """A send that is ready to `begin`; UsageError if it never could be. On any thread."""
        session = self.session
        if self.is_closed or not session.is_started:
            self._require_open()
        options = self.send_options
        topic = message.topic
        if topic not in self._checked or self._namespace_text:
            topic = self.wire_topic(topic)
        body = message.body
        if type(body) is not bytes or not 0 < len(body) <= options.max_message_bytes:
            outgoing.check_body(body, options.max_message_bytes)
        if message.flag != 0:
            outgoing.check_flag(message.flag)
        now_ms = session.now_ms()
        if message.unique_id:
            unique_id = self._unique_id(message, now_ms)
        else:
            unique_id = session.unique_ids.next(now_ms)
        text = outgoing.properties_of(message, unique_id, self._namespace_text + extra)
        if len(text) > MOST_SURE_CHARS:
            outgoing.check_properties(text)
        if len(body) >= options.compress_over_bytes and options.compression is not None:
            kind = options.compression
            packed = compress(bytes(body), kind)
            if len(packed) < len(body):
                body = packed
                sys_flag |= kind.sys_flag
        elif type(body) is not bytes:
            body = bytes(body)
        if selector is None and message.sharding_key and queue is None:
            selector = hash_of(message.sharding_key)
        return prepare(
            self,
            topic,
            body,
            text,
            message.flag,
            sys_flag,
            unique_id,
            SEND,
            is_async,
            None if queue is None else self.wire_queue(queue, topic),
            selector,
            options.send_timeout_ms if timeout_ms is None else self._timeout(timeout_ms),
            future,
            now_ms,
        )

    def _require_open(self) -> None:
        if self.is_closed:
            raise UsageError(CLOSED)
        if not self.session.is_started:
            raise UsageError("start the producer first: `async with Producer(...)` or start()")

    def _unique_id(self, message: Message, now_ms: int) -> str:
        if not message.unique_id:
            return self.session.unique_ids.next(now_ms)
        outgoing.check_unique_id(message.unique_id)
        return message.unique_id

    def begin(self, sending: Sending) -> None:
        """Its first attempt; on the loop."""
        self.under_way += 1
        sending.launch()

    async def finished(self, sending: Sending) -> SendResult:
        """Begin it, and wait for its end."""
        self.begin(sending)
        assert isinstance(sending.future, asyncio.Future)
        return await sending.future

    async def _finished_in_turn(self, sending: Sending) -> SendResult:
        """Begin it when there is room, if that is in time, and wait for its end."""
        if self.under_way < self.send_options.window:
            return await self.finished(sending)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(sending.ends):
                await self._wait_for_room()
        if self.loop.time() < sending.ends:
            return await self.finished(sending)
        self._tell_of_room()  # it may have been told of room, which it does not take
        sending.expired()
        assert isinstance(sending.future, asyncio.Future)
        return await sending.future

    def ended(self) -> None:
        """A send has ended, one way or the other."""
        self.under_way -= 1
        if self.on_ended is not None:
            self.on_ended()
        if self._room:
            self._tell_of_room()
        if not self.under_way:
            self._all_done.set()

    def _tell_of_room(self) -> None:
        """Wake the first of those that wait, if there is room."""
        while self._room and self.under_way < self.send_options.window:
            waiting = self._room.popleft()
            if not waiting.done():
                waiting.set_result(None)
                break

    def tell(self, sending: Sending, outcome: SendResult | Exception) -> None:
        for hook in self.on_sent:
            try:
                hook(sending, outcome)
            except Exception:
                log.exception("on_sent_failed")

    async def _wait_for_room(self) -> None:
        while self.under_way >= self.send_options.window and not self.is_closed:
            waiting: asyncio.Future[None] = self.loop.create_future()
            self._room.append(waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.cancelled():
                    with suppress(ValueError):
                        self._room.remove(waiting)
                else:  # it had been told of room that it does not take
                    self._tell_of_room()
                raise
        if self.is_closed:
            raise UsageError(CLOSED)

    # ------------------------------------------------------------------------------ names, queues

    def wire_topic(self, topic: str) -> str:
        """The topic as it is called on the wire, checked once."""
        if topic in self._checked:
            return self.session.wrap(topic) if self.session.options.namespace else topic
        outgoing.check_topic(topic)
        if len(self._checked) < MAX_KNOWN_TOPICS:
            self._checked.add(topic)
        return self.session.wrap(topic)

    def wire_queue(self, queue: MessageQueue, topic: str, what: str = "queue=") -> MessageQueue:
        """A queue that the user chose, as it is called on the wire; `what`: how, for errors."""
        outgoing.check_queue(queue, what)
        if self.session.wrap(queue.topic) != topic:
            raise UsageError(f"{what} {queue}: of another topic than the message's {topic!r}")
        return MessageQueue(topic, queue.broker, queue.queue_id)

    def _timeout(self, timeout_ms: int | None) -> int:
        if timeout_ms is None:
            return self.send_options.send_timeout_ms
        check_timeout("timeout_ms", timeout_ms)
        return timeout_ms

    def open_lane(self, route: Route, used: MessageQueue, round_: Round) -> None:
        """Let a thread's next ordinary sends to a topic take the short way, from the queue after
        `used` on; not where each must be signed, nor where brokers are chosen by their health."""
        if self.is_signed or self._health is not None:
            return
        template = self.template(route.topic)
        ways: list[tuple[MessageQueue, bytes, Connection]] = []
        for queue in route.to_send:
            leader = route.leader_of(queue.broker)
            connection = leader and self.session.connections.known(self.port_of(leader))
            if not connection:
                return
            ways.append((queue, template.plain(queue.queue_id), connection))
        round_.open_lane(Lane(route, ways, route.to_send.index(used)))

    def port_of(self, leader: str) -> str:
        """Where sends to this broker go: the address that it advertises, or its VIP port."""
        if not self.send_options.vip_channel:
            return leader
        host, _, port = leader.rpartition(":")
        return f"{host}:{int(port) - VIP_DISTANCE}"

    def template(self, topic: str) -> SendTemplate:
        found = self._templates.get(topic)
        if found is None:
            if len(self._templates) >= MAX_KNOWN_TOPICS:
                self._templates.clear()
            queues = self.send_options.default_queues
            found = self._templates[topic] = SendTemplate(self.wire_group, topic, queues)
        return found

    def choose(
        self, turns: RoundRobin, queues: Sequence[MessageQueue], avoid_broker: str
    ) -> MessageQueue:
        """The queue that is next, on another broker than the one that just failed."""
        if self._health is not None:
            now_ms = int(self.loop.time() * 1e3)
            return self._health.choose(queues, avoid_broker, turns.next_index(), now_ms)
        return turns(queues, avoid_broker)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of a topic can be sent to."""
        route = await self.session.routes.need(
            self.wire_topic(topic), create_queues=self.send_options.default_queues
        )
        return list(route.to_send)

    # -------------------------------------------------------------------------------------- health

    def observed(
        self, sending: Sending, *, is_isolated: bool, is_reachable: bool | None = None
    ) -> None:
        """What an attempt came to; its own time counts, not that of attempts before it."""
        if self._health is not None and sending.broker:
            now = self.loop.time()
            self._health.observed(
                sending.broker,
                int((now - sending.attempt_began) * 1e3),
                is_isolated=is_isolated,
                now_ms=int(now * 1e3),
                is_reachable=is_reachable,
            )

    async def _probe(self) -> None:
        """Look whether brokers that could not be reached can be reached again."""
        assert self._health is not None
        while True:
            await asyncio.sleep(PROBE_S)
            for broker in self._health.to_probe(int(self.loop.time() * 1e3)):
                leader = self.session.routes.leader_of(broker)
                is_reachable = False
                if leader is not None:
                    with suppress(CometError):
                        await self.session.connections.get(self.port_of(leader))
                        is_reachable = True
                self._health.probed(broker, is_reachable, int(self.loop.time() * 1e3))

    # ------------------------------------------------------------------------------- request, reply

    async def request(
        self, message: Message, *, timeout_ms: int = 3_000, selector: Selector | None = None
    ) -> ReceivedMessage:
        """Send, and wait for the reply of whoever consumes it; RequestTimeout if none comes."""
        correlation = str(uuid.UUID(int=self.session.rng.getrandbits(128), version=4))
        extra = (
            f"CORRELATION_ID\x01{correlation}\x02REPLY_TO_CLIENT\x01{self.session.client_id}\x02"
            f"TTL\x01{timeout_ms}\x02"
        )
        replied: asyncio.Future[ReceivedMessage] = self.loop.create_future()
        self._requests[correlation] = replied
        try:
            async with asyncio.timeout(timeout_ms / 1e3):
                await self.session.routes.need(
                    self.wire_topic(message.topic), create_queues=self.send_options.default_queues
                )
                await self.session.beat()  # the broker must know where to push the reply
                sending = self.make(
                    message, None, selector, timeout_ms, is_async=False, extra=extra
                )
                await self.finished(sending)
                return await replied
        except TimeoutError:
            raise RequestTimeout(
                f"no reply to a request on topic {message.topic!r} in {timeout_ms} ms"
            ) from None
        finally:
            del self._requests[correlation]

    async def reply(self, request: ReceivedMessage, body: bytes) -> SendResult:
        """Answer a message that was sent with `request`."""
        cluster = request.properties.get(props.CLUSTER)
        correlation = request.properties.get("CORRELATION_ID")
        client = request.properties.get("REPLY_TO_CLIENT")
        if not cluster or not correlation or not client:
            raise UsageError(f"{request!r} does not ask for a reply")
        ttl = request.properties.get("TTL", "3000")
        extra = (
            f"MSG_TYPE\x01reply\x02CORRELATION_ID\x01{correlation}\x02"
            f"REPLY_TO_CLIENT\x01{client}\x02TTL\x01{ttl}\x02"
        )
        topic = f"{cluster}_REPLY_TOPIC"
        queue = MessageQueue(topic, request.broker, 0)
        await self.session.routes.need(topic)
        sending = self.make(Message(topic, body), queue, None, None, is_async=False, extra=extra)
        sending.code = RequestCode.SEND_REPLY_MESSAGE_V2
        return await self.finished(sending)

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Take back a timed message that was not delivered yet (SendResult.recall_handle); returns
        its message id. RequestRefused if it is too late, or if the broker does not do that."""
        if not recall_handle:
            raise UsageError("no recall_handle: only timed messages have one, on brokers that can")
        broker = broker_of_handle(recall_handle)
        wire_topic = self.wire_topic(topic)
        await self.session.routes.need(wire_topic)
        answer = await self.session.call(
            broker,
            wire_topic,
            RequestCode.RECALL_MESSAGE,
            {
                "producerGroup": self.wire_group,
                "topic": wire_topic,
                "recallHandle": recall_handle,
                "bname": broker,
            },
        )
        return answer.ext.get("msgId", "")

    def _replied(self, connection: Connection, frame: Frame) -> Frame:
        header = headers.parse(headers.PushReplyHeader, frame.ext)
        text = header.properties or ""
        correlation = props.get(text, "CORRELATION_ID") or ""
        waiting = self._requests.get(correlation)
        if waiting is None or waiting.done():
            log.warning("reply_unknown correlation_id=%s", correlation)
        else:
            try:
                waiting.set_result(reply_message(header, frame.body))
            except CometError as error:  # who asked is told; to the broker it was delivered
                waiting.set_exception(error)
        return reply_to(frame)


def reply_message(header: headers.PushReplyHeader, body: bytes) -> ReceivedMessage:
    """A reply that was pushed to us, its body whole; BodyError if that can't be had."""
    whole = decompress(body, header.sysFlag)
    return ReceivedMessage(
        "",
        header.topic,
        header.queueId,
        0,
        0,
        whole,
        header.properties or "",
        header.flag,
        header.sysFlag,
        header.bornTimestamp,
        b"\x7f\0\0\x01\0\0\0\0",
        header.storeTimestamp,
        b"\x7f\0\0\x01\0\0\0\0",
        header.reconsumeTimes or 0,
        0,
        len(body),
    )


def broker_of_handle(handle: str) -> str:
    """Which broker a recall handle belongs to: base64 of `v1 topic broker time unique-key`."""
    try:
        parts = base64.urlsafe_b64decode(handle).decode().split(" ")
    except ValueError:
        parts = []
    if len(parts) != 5 or parts[0] != "v1":
        raise UsageError(f"{handle[:60]!r} is not a recall handle")
    return parts[2]


def split_keywords(
    kind: type[SendOptions], keywords: Mapping[str, Any]
) -> tuple[SendOptions, Options]:
    """Keywords to the two option structs; UsageError names one that nobody knows."""
    own = {field.name for field in msgspec.structs.fields(kind)}
    common = {field.name for field in msgspec.structs.fields(Options)}
    unknown = sorted(set(keywords) - own - common)
    if unknown:
        raise UsageError(
            f"unknown keyword {unknown[0]!r}; known are {', '.join(sorted(own | common))}"
        )
    mine = kind(**{name: value for name, value in keywords.items() if name in own})
    return mine, Options(**{name: value for name, value in keywords.items() if name in common})
