"""Message trace: what clients did with their messages, told in a topic of its own.

Owns: turning ends of sends, handlers and transactions into trace records, and sending those in
batches. One rule: tracing never slows or fails the client that it
watches: hooks only put a record into a bounded queue, and what finds no room is counted.

    tracer = Tracer(producer.session)
    tracer.watch_producer(producer)
    ...
    await tracer.close()                                # sends what is left
    await story(admin, result.message_id)               # [Pub, SubBefore, SubAfter, ...]

The records' bytes: trace_record.py; finding them: trace_story.py. A tracer sends through a producer
of its own, which nobody watches, and lives on the event loop of the clients that it watches.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cometmq.client import outgoing
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage
from cometmq.client.sending import Sending
from cometmq.client.session import Options, Session
from cometmq.client.trace_record import (
    EndTransaction,
    HandledCode,
    MessageKind,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
    TransactionState,
    decode,
    encode,
    search_keys,
)
from cometmq.client.trace_story import TRACE_TOPIC, story
from cometmq.client.workers import Hook, Outcome
from cometmq.errors import UsageError
from cometmq.message import Message, SendResult, SendStatus
from cometmq.wire import properties as props
from cometmq.wire.codes import SysFlag
from cometmq.wire.headers import EndTransactionHeader

if TYPE_CHECKING:
    from cometmq.client.consumer import Consumer
    from cometmq.client.transaction import EndedHook, TransactionProducer

__all__ = [
    "TRACE_TOPIC",
    "EndTransaction",
    "HandledCode",
    "MessageKind",
    "Pub",
    "Recall",
    "SubAfter",
    "SubBefore",
    "TraceRecord",
    "Tracer",
    "TransactionState",
    "decode",
    "encode",
    "story",
]

log = logging.getLogger("cometmq.client")

H = TypeVar("H")

TRACE_GROUP = "_INNER_TRACE_PRODUCER"
DEFAULT_REGION = "DefaultRegion"  # what a broker calls its region unless told otherwise

# RocketMQ's own (AsyncTraceDispatcher), but for BATCH_RECORDS, which is 10 since 5.0 and was 100:
# a trace message for every ten messages would be dear.
MAX_WAITING = 2_048
MAX_BODY_BYTES = 128_000
BATCH_RECORDS = 100
FLUSH_S = 5.0
SEND_TIMEOUT_MS = 5_000
MAX_KEYS_BYTES = 30_000  # properties may have 32767; brokers add some
BATCH_IDS = 256  # ids of a sent batch in one record; more make more records
MAX_UNDER_WAY = 8
CLOSE_S = 5.0
SAY_S = 10.0  # failures are told so often at most, with a count

_STATES = {
    int(SysFlag.COMMIT): TransactionState.COMMIT,
    int(SysFlag.ROLLBACK): TransactionState.ROLLBACK,
}
_DELAYS = (props.DELAY, props.TIMER_DELIVER_MS, props.TIMER_DELAY_MS, props.TIMER_DELAY_SEC)


class Stats(msgspec.Struct):
    """Counts of records."""

    recorded: int = 0
    sent: int = 0
    dropped: int = 0
    """The queue was full, or the tracer closed."""
    lost: int = 0
    """They were sent, and the broker did not say that it has them."""


class Tracer:
    """Watches clients of one event loop. Begins by itself with the first record.

    `of`: the options of the inner producer, or a client's session that has them. `topic`: where the
    records go; as with Java's clients it is outside of any namespace.
    """

    def __init__(
        self,
        of: Session | Options,
        *,
        topic: str = TRACE_TOPIC,
        max_waiting: int = MAX_WAITING,
        flush_s: float = FLUSH_S,
    ) -> None:
        outgoing.check_topic(topic)
        if max_waiting < 1 or flush_s <= 0:
            raise UsageError(f"max_waiting={max_waiting} and flush_s={flush_s} must be above 0")
        options = of.options if isinstance(of, Session) else of
        self._options = msgspec.structs.replace(options, instance="", namespace="")
        self.topic = topic
        self.stats = Stats()
        self._max_waiting = max_waiting
        self._flush_s = flush_s
        self._group = TRACE_GROUP
        self._watched: list[object] = []
        self._unwatch: list[Callable[[], None]] = []
        self._waiting: deque[TraceRecord] = deque()
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._producer: Producer | None = None
        self._sends_alone = asyncio.Lock()
        self._under_way: set[asyncio.Future[SendResult]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._said_at = float("-inf")
        self._unsaid = 0

    def __repr__(self) -> str:
        return f"<Tracer to {self.topic} waiting={len(self._waiting)} {self.stats}>"

    async def __aenter__(self) -> Tracer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------ watching

    def watch_producer(self, producer: Producer) -> None:
        """Record how every send ends, except those without an answer (`send_oneway`)."""
        self._watch(producer.on_sent, self._sent, f"{producer.group}-PRODUCE")

    def watch_transactions(self, producer: TransactionProducer) -> None:
        """Record the sends of half messages, and how their transactions end."""
        self.watch_producer(producer.producer)
        hook: EndedHook = partial(self._ended, producer.producer)
        self._watch(producer.on_ended, hook, f"{producer.producer.group}-PRODUCE")

    def watch_consumer(self, consumer: Consumer) -> None:
        """Record when handlers begin and end; both are told when they have ended."""
        hook: Hook = partial(self._handled, consumer)
        self._watch(consumer.on_handled, hook, f"{consumer.group}-CONSUME")

    def _watch(self, hooks: list[H], hook: H, name: str) -> None:
        if self._is_closed:
            raise UsageError("this tracer is closed; make a new one")
        if any(one is hooks for one in self._watched):
            return
        if not self._watched:  # Java: a group for each traced client, and a running number
            self._group = f"{TRACE_GROUP}-{name}-1"[: outgoing.MAX_GROUP_CHARS]
        self._watched.append(hooks)
        self._unwatch.append(partial(_remove, hooks, hook))
        hooks.append(hook)

    def _sent(self, sending: Sending, outcome: SendResult | Exception) -> None:
        producer = sending.producer
        session = producer.session
        if sending.topic == self.topic:
            return
        if isinstance(outcome, SendResult) and not outcome.is_traced:
            return
        text = msgspec.json.decode(sending.properties, type=str)
        cost_ms = int((producer.loop.time() - sending.began) * 1e3)
        record = Pub(
            time_ms=session.now_ms() - cost_ms,
            region=outcome.region if isinstance(outcome, SendResult) else DEFAULT_REGION,
            group=producer.group,
            topic=session.unwrap(sending.topic),
            message_id=sending.batch_ids or sending.unique_id,
            tags=props.get(text, props.TAGS) or "",
            keys=props.get(text, props.KEYS) or "",
            store_host=session.routes.leader_of(sending.broker) or "",
            body_bytes=len(sending.body),
            cost_ms=cost_ms,
            kind=_kind(text),
            offset_id=outcome.offset_id if isinstance(outcome, SendResult) else "",
            is_success=isinstance(outcome, SendResult) and outcome.status is SendStatus.SEND_OK,
        )
        if sending.batch_ids:
            for part in _parts(record):
                self.record(part)
        else:
            self.record(record)

    def _handled(
        self,
        consumer: Consumer,
        messages: list[ReceivedMessage],
        outcome: Outcome,
        started_ms: int,
        ended_ms: int,
    ) -> None:
        traced = [one for one in messages if self._is_traced(one)]
        if not traced:
            return
        took_ms = ended_ms - started_ms
        request_id = consumer.session.unique_ids.next(consumer.session.now_ms())
        code = _code(outcome, took_ms, consumer.consume_timeout_s)
        for one in traced:
            keys = one.properties.get(props.KEYS, "")
            self.record(
                SubBefore(
                    time_ms=started_ms,
                    region=one.properties.get(props.REGION, DEFAULT_REGION),
                    group=consumer.group,
                    request_id=request_id,
                    message_id=one.message_id,
                    retry_times=one.reconsume_times,
                    keys=keys,
                )
            )
            self.record(
                SubAfter(
                    request_id=request_id,
                    message_id=one.message_id,
                    cost_ms=took_ms // len(messages),
                    is_success=outcome is Outcome.DONE,
                    keys=keys,
                    code=code,
                    time_ms=ended_ms,
                    group=consumer.group,
                )
            )

    def _is_traced(self, message: ReceivedMessage) -> bool:
        is_off = message.properties.get(props.TRACE_ON) == "false"
        return not is_off and self.topic not in (message.topic, message.stored_topic)

    def _ended(
        self,
        producer: Producer,
        message: Message | ReceivedMessage,
        told: EndTransactionHeader,
        address: str,
    ) -> None:
        keys = message.keys
        self.record(
            EndTransaction(
                time_ms=producer.session.now_ms(),
                region=message.properties.get(props.REGION, DEFAULT_REGION),
                group=producer.group,
                topic=producer.session.unwrap(message.topic),
                message_id=told.msgId or "",
                tags=message.tags,
                keys=keys if isinstance(keys, str) else props.KEY_SEPARATOR.join(keys),
                store_host=address,
                transaction_id=told.transactionId or "",
                state=_STATES.get(told.commitOrRollback, TransactionState.UNKNOWN),
                is_from_check=told.fromTransactionCheck,
            )
        )

    # ------------------------------------------------------------------------------------- sending

    def record(self, record: TraceRecord) -> None:
        """Have a record sent, soon; if there is no room it is dropped and counted."""
        if self._is_closed or len(self._waiting) >= self._max_waiting:
            self.stats.dropped += 1
            return
        self.stats.recorded += 1
        self._waiting.append(record)
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._keep_sending())
        if len(self._waiting) >= min(BATCH_RECORDS, self._max_waiting):
            self._wake.set()

    async def flush(self) -> None:
        """Send what waits, and wait until the broker has it or the sends have failed."""
        await self._send_waiting()
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def close(self) -> None:
        """Watch nobody any more, send what waits (in 5 s at most), end the inner producer."""
        if self._closing is None:
            self._is_closed = True
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for unwatch in self._unwatch:
            unwatch()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        self.stats.dropped += len(self._waiting)
        self._waiting.clear()
        if self._producer is not None:
            await self._producer.close()

    async def _keep_sending(self) -> None:
        while not self._is_closed:
            with suppress(TimeoutError):
                # Not wait_for: in 3.11 it loses a cancel that comes together with the event.
                async with asyncio.timeout(self._flush_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._send_waiting()

    async def _send_waiting(self) -> None:
        async with self._sends_alone:
            try:
                while self._waiting:
                    if self._producer is None:
                        self._producer = await self._start_producer()
                    if len(self._under_way) >= MAX_UNDER_WAY:
                        await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                    self._send(self._producer)
            except Exception as error:  # records wait for the next round, as long as there is room
                self._say(0, error)

    async def _start_producer(self) -> Producer:
        common = {name: getattr(self._options, name) for name in self._options.__struct_fields__}
        producer = Producer(
            self._group,
            send_timeout_ms=SEND_TIMEOUT_MS,
            max_message_bytes=MAX_BODY_BYTES,
            **common,
        )
        try:
            await producer.start()
        except BaseException:
            await producer.close()
            raise
        return producer

    def _send(self, producer: Producer) -> None:
        """Take as many records as one message may hold, and send them."""
        message, count = next_message(self._waiting, self.topic)
        try:
            future = producer.send_async(message)
        except Exception as error:
            self._lost(count, error)
            return
        self._under_way.add(future)
        future.add_done_callback(partial(self._sent_away, count))

    def _sent_away(self, count: int, future: asyncio.Future[SendResult]) -> None:
        self._under_way.discard(future)
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            self._lost(count, error)
        else:
            self.stats.sent += count

    def _lost(self, count: int, error: BaseException | None) -> None:
        self.stats.lost += count
        self._say(count, error)

    def _say(self, count: int, error: BaseException | None) -> None:
        self._unsaid += count
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= SAY_S:
            self._said_at = now
            log.warning(
                "trace_not_sent topic=%s lost=%d waiting=%d reason=%s",
                self.topic,
                self._unsaid,
                len(self._waiting),
                repr(error) if error else "cancelled",
            )
            self._unsaid = 0


def _remove(hooks: list[H], hook: H) -> None:
    with suppress(ValueError):  # its owner may have emptied the list
        hooks.remove(hook)


def _kind(properties: str) -> MessageKind:
    """As Java tells them apart."""
    if any(props.has(properties, name) for name in _DELAYS):
        return MessageKind.DELAYED
    if props.get(properties, props.HALF) == "true":
        return MessageKind.HALF
    return MessageKind.NORMAL


def _code(outcome: Outcome, took_ms: int, timeout_s: float) -> HandledCode:
    if outcome is Outcome.FAILED:
        return HandledCode.EXCEPTION
    if took_ms >= timeout_s * 1e3:
        return HandledCode.TIME_OUT
    return HandledCode.FAILED if outcome is Outcome.LATER else HandledCode.SUCCESS


def _parts(record: Pub) -> list[Pub]:
    """A batch's record, cut so that the ids of each part fit into a message's keys."""
    ids, offset_ids = record.message_id.split(","), record.offset_id.split(",")
    if len(ids) <= BATCH_IDS:
        return [record]
    if len(offset_ids) != len(ids):
        offset_ids = [""] * len(ids)
    cuts = [slice(at, at + BATCH_IDS) for at in range(0, len(ids), BATCH_IDS)]
    return [
        msgspec.structs.replace(
            record, message_id=",".join(ids[cut]), offset_id=",".join(offset_ids[cut]).strip(",")
        )
        for cut in cuts
    ]


def next_message(waiting: deque[TraceRecord], topic: str) -> tuple[Message, int]:
    """Take records from the left, as many as one message may hold; (message, how many)."""
    bodies: list[bytes] = []
    keys: dict[str, None] = {}
    body_bytes = keys_bytes = 0
    while waiting and len(bodies) < BATCH_RECORDS:
        body = encode(waiting[0])
        new = {key: None for key in search_keys(waiting[0]) if key not in keys}
        new_bytes = sum(len(key.encode("utf-8", "replace")) + 1 for key in new)
        is_full = body_bytes + len(body) > MAX_BODY_BYTES or keys_bytes + new_bytes > MAX_KEYS_BYTES
        if bodies and is_full:
            break
        waiting.popleft()
        bodies.append(body)
        body_bytes += len(body)
        keys_bytes += new_bytes
        keys.update(new)
    fitting = list(keys)
    while keys_bytes > MAX_KEYS_BYTES:  # one record with too many; the ids come first and stay
        keys_bytes -= len(fitting.pop().encode("utf-8", "replace")) + 1
    return Message(topic, b"".join(bodies), keys=fitting), len(bodies)
