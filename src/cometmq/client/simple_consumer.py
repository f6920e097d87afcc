"""The consumer without queues: receive messages, acknowledge each, and unacknowledged ones return.

Owns: pop, ack and change of the invisible time, as a client asks them of RocketMQ 5 brokers. One
rule: what was received is hidden from the rest of the group for its invisible time, no longer; only
`ack` ends it. There is no assignment, so any number of clients may share a topic's queues.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import msgspec

from cometmq.client.reading import ALL, Filter, make_filter
from cometmq.client.receipts import (
    FIRST_POP_TIME,
    PopAnswer,
    Receipt,
    batch_ack_body,
    parse_receipt,
    receipts_of,
    times_before,
)
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.session import Options, Session, check_group
from cometmq.errors import CometError, ConnectionLost, RequestRefused, UsageError
from cometmq.wire import bodies
from cometmq.wire import properties as props
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame

if TYPE_CHECKING:
    from cometmq.client.keywords import MoreOfAll

log = logging.getLogger("cometmq.client")

RECEIVE_COUNT = 16
MAX_COUNT = 32  # brokers refuse more
INVISIBLE_S = 60.0
WAIT_S = 15.0
ANSWER_MS = 10_000  # beyond the wait
LEAST_WAIT_S = 1.0  # for one broker, where several have to be asked in turn
NOTHING_S = 0.1  # a broker that does not hold requests must not be asked at full speed

_EMPTY = (
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.POLLING_FULL,
    ResponseCode.POLLING_TIMEOUT,
)


class PoppedMessage(ReceivedMessage, gc=False, eq=False):
    """A received message with the handle by which it is acknowledged."""

    receipt: str = ""

    @classmethod
    def of(cls, one: ReceivedMessage, receipt: str, pop_ms: int) -> PoppedMessage:
        text = one.properties_text
        if not props.has(text, FIRST_POP_TIME):
            end = "" if not text or text.endswith(props.VALUE_END) else props.VALUE_END
            text += end + props.build({FIRST_POP_TIME: str(pop_ms)})
        fields = msgspec.structs.asdict(one)
        return cls(**(fields | {"_text": text, "_properties": None, "receipt": receipt}))


class SimpleConsumer:
    """Receives messages from all queues of its topics; for RocketMQ 5 brokers.

    >>> async with SimpleConsumer("billing", "orders", namesrv="localhost:9876") as consumer:
    ...     for message in await consumer.receive():
    ...         await consumer.ack(message)

    `start`: where a group that a broker does not know yet begins, "first" or "last".
    `ordered`: each queue's messages in their order. While some of a queue are out, its others wait;
    a message that was not acknowledged in time comes again before those behind it.
    Other keywords: those of session.Options.
    """

    def __init__(
        self,
        group: str,
        topic: str = "",
        tags: str = ALL,
        *,
        sql: str = "",
        namesrv: str | Sequence[str] | None = None,
        start: str = "first",
        ordered: bool = False,
        **options: Unpack[MoreOfAll],
    ) -> None:
        if start not in ("first", "last"):
            raise UsageError(f"start={start!r} must be 'first' or 'last'")
        try:
            common = Options(namesrv=namesrv, **options)
        except TypeError as error:
            raise UsageError(f"SimpleConsumer: {error}") from None
        check_group(group, common.namespace)
        self.session = Session(common)
        self.group = self.session.wrap(group)
        self._begins_at_end = start == "last"
        self._is_ordered = ordered
        self._subscribed: dict[str, tuple[Filter, int]] = {}
        self._turn = 0
        self.session.consumers = self._membership
        if topic:
            self.subscribe(topic, tags, sql=sql)

    def __repr__(self) -> str:
        unwrap = self.session.unwrap
        topics = ",".join(sorted(unwrap(name) for name in list(self._subscribed)))
        return (
            f"<SimpleConsumer {unwrap(self.group)} topics={topics} {self.session.state} "
            f"{self.session.names}>"
        )

    async def __aenter__(self) -> SimpleConsumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        await self.session.start()

    async def close(self) -> None:
        """Leave the group. What was received and not acknowledged returns in its time."""
        await self.session.close()

    def subscribe(self, topic: str, tags: str = ALL, *, sql: str = "") -> None:
        """Receive of this topic too; again: another filter."""
        if not topic:
            raise UsageError("subscribe needs the name of a topic")
        wanted = make_filter(tags, sql)
        self._subscribed[self.session.wrap(topic)] = (wanted, self.session.now_ms())
        self.session.beat_soon()

    def unsubscribe(self, topic: str) -> None:
        if self._subscribed.pop(self.session.wrap(topic), None) is not None:
            self.session.beat_soon()

    def _membership(self) -> list[bodies.ConsumerOfHeartbeat]:
        where = "CONSUME_FROM_LAST_OFFSET" if self._begins_at_end else "CONSUME_FROM_FIRST_OFFSET"
        subscriptions = tuple(
            wanted.subscription(topic, version)
            for topic, (wanted, version) in self._subscribed.items()
        )
        return [
            bodies.ConsumerOfHeartbeat(
                self.group, "CONSUME_POP", "CLUSTERING", where, subscriptions
            )
        ]

    def _check_running(self) -> None:
        if not self.session.is_started or self.session.is_closed:
            state = "closed" if self.session.is_closed else "not started: use it in `async with`"
            raise UsageError(f"this consumer of group {self.group} is {state}")

    # ------------------------------------------------------------------------------------- receive

    async def receive(
        self,
        most: int = RECEIVE_COUNT,
        invisible_s: float = INVISIBLE_S,
        wait_s: float = WAIT_S,
    ) -> list[PoppedMessage]:
        """Some messages, or none after `wait_s`. Each is hidden from others for `invisible_s`.

        Of several brokers and topics each is asked in turn; an error is raised if all fail.
        """
        self._check_running()
        if not 1 <= most <= MAX_COUNT:
            raise UsageError(f"receive(most={most}): must be 1 to {MAX_COUNT}")
        if invisible_s <= 0 or wait_s < 0:
            raise UsageError(f"receive(invisible_s={invisible_s}, wait_s={wait_s}) is not possible")
        if not self._subscribed:
            raise UsageError("receive() without a topic: subscribe first")
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        invisible_ms = round(invisible_s * 1000)
        attempt = uuid.uuid4().hex  # an answer that was lost on its way is given again
        is_first_round = True
        while True:
            targets = await self._targets()
            slice_s = 0.0  # what there is already is asked for everywhere before anything is waited
            if not is_first_round or len(targets) == 1:
                slice_s = max(wait_s / len(targets), min(LEAST_WAIT_S, wait_s))
            self._turn += 1
            problems: list[CometError] = []
            for number in range(len(targets)):
                broker, topic = targets[(self._turn + number) % len(targets)]
                began = loop.time()
                wait_ms = round(min(slice_s, max(0.0, ends - began)) * 1000)
                try:
                    found = await self._meant(broker, topic, most, invisible_ms, wait_ms, attempt)
                except CometError as error:
                    problems.append(error)
                    await self._failed(broker, topic, error)
                    continue
                if found:
                    return found
                if wait_ms and loop.time() - began < NOTHING_S:
                    await asyncio.sleep(NOTHING_S)
            if len(problems) == len(targets):
                raise problems[0]
            if loop.time() >= ends:
                return []
            is_first_round = False

    async def _failed(self, broker: str, topic: str, error: CometError) -> None:
        log.warning("pop_failed group=%s broker=%s reason=%s", self.group, broker, error)
        if isinstance(error, ConnectionLost):
            try:
                await self.session.routes.refresh(topic)
            except CometError as why:
                log.debug("route_kept topic=%s reason=%s", topic, why)

    async def _targets(self) -> list[tuple[str, str]]:
        """(broker, topic), for all that may have messages for us."""
        found: list[tuple[str, str]] = []
        for topic in self._subscribed:
            route = await self.session.routes.need(topic)
            found += [(broker, topic) for broker in sorted({one.broker for one in route.to_read})]
        if not found:
            raise CometError(f"no queue of {', '.join(self._subscribed)} can be read")
        return found

    async def _meant(
        self, broker: str, topic: str, most: int, invisible_ms: int, wait_ms: int, attempt: str
    ) -> list[PoppedMessage]:
        """A pop without what came only because its tag has the same hash, as brokers compare.

        That is acknowledged, as Java's clients do, or it would come back again and again.
        """
        if topic not in self._subscribed:  # not any more
            return []
        # The filter as it was asked with: by another, given meanwhile, nothing may be thrown away.
        wanted = self._subscribed[topic][0]
        while True:
            popped = await self._pop(broker, topic, wanted, most, invisible_ms, wait_ms, attempt)
            meant = wanted.pick(popped)
            if len(meant) == len(popped):
                return popped
            kept = {one.receipt for one in meant}
            try:
                await self.ack([one for one in popped if one.receipt not in kept])
            except CometError as error:  # they return in their time, and are acknowledged then
                log.warning("ack_failed group=%s broker=%s reason=%s", self.group, broker, error)
                return meant
            if meant:
                return meant
            # There may be more behind them; if not, waiting is up to the caller.
            wait_ms, attempt = 0, uuid.uuid4().hex

    async def _pop(
        self,
        broker: str,
        topic: str,
        wanted: Filter,
        most: int,
        invisible_ms: int,
        wait_ms: int,
        attempt: str,
    ) -> list[PoppedMessage]:
        ext = {
            "consumerGroup": self.group,
            "topic": topic,
            "queueId": "-1",
            "maxMsgNums": str(most),
            "invisibleTime": str(invisible_ms),
            "pollTime": str(wait_ms),
            "bornTime": str(self.session.now_ms()),
            "initMode": "1" if self._begins_at_end else "0",
            "expType": wanted.kind,
            "exp": wanted.text,
            "order": "true" if self._is_ordered else "false",
        }
        if self._is_ordered:
            ext["attemptId"] = attempt
        answer = await self.session.connections.request(
            await self.session.leader(broker, topic),
            RequestCode.POP_MESSAGE,
            ext,
            timeout_ms=wait_ms + ANSWER_MS,
            advertised_by=broker,
        )
        if answer.code in _EMPTY:
            return []
        if answer.code != 0:
            raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        return self._popped(answer, broker)

    def _popped(self, answer: Frame, broker: str) -> list[PoppedMessage]:
        told = bodies.convert(answer.ext, PopAnswer, "pop")
        messages = read_all(answer.body, broker)
        handles = receipts_of(told, messages, broker)
        found = [
            PoppedMessage.of(one, handle, told.popTime)
            for one, handle in zip(messages, handles, strict=True)
        ]
        self.session.show(found)
        if self._is_ordered:
            for one in found:
                one.reconsume_times = times_before(told, one)
        return found

    # ----------------------------------------------------------------------------------------- ack

    async def ack(self, messages: PoppedMessage | Sequence[PoppedMessage]) -> None:
        """These are done with. One that was late (its invisible time is over) may come again.

        Several are acknowledged with one request to each broker. All brokers are tried; then the
        first error is raised.
        """
        self._check_running()
        if isinstance(messages, PoppedMessage):
            messages = [messages]
        by_broker: dict[str, list[tuple[PoppedMessage, Receipt]]] = {}
        for one in messages:
            receipt = parse_receipt(one.receipt)
            by_broker.setdefault(receipt.broker, []).append((one, receipt))
        done = await asyncio.gather(
            *(self._ack(broker, some) for broker, some in by_broker.items()),
            return_exceptions=True,
        )
        for error in done:
            if error is not None:
                raise error

    async def _ack(self, broker: str, some: list[tuple[PoppedMessage, Receipt]]) -> None:
        topic = self._topic(some[0][0])
        if len(some) == 1:
            await self.session.call(broker, topic, RequestCode.ACK_MESSAGE, self._fields(*some[0]))
            return
        acks = [(self._topic(one), receipt) for one, receipt in some]
        body = batch_ack_body(broker, self.group, acks)
        await self.session.call(broker, topic, RequestCode.BATCH_ACK_MESSAGE, {}, body)

    async def change_invisible(self, message: PoppedMessage, seconds: float) -> None:
        """Hide it for so long from now on; its receipt is replaced, the former one is void."""
        self._check_running()
        if seconds < 0:
            raise UsageError(f"change_invisible({seconds}): seconds can't be negative")
        receipt = parse_receipt(message.receipt)
        ext = self._fields(message, receipt)
        ext["invisibleTime"] = str(round(seconds * 1000))
        answer = await self.session.call(
            receipt.broker, self._topic(message), RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext
        )
        told = bodies.convert(answer.ext, PopAnswer, "change of invisible time")
        message.receipt = str(
            Receipt(
                receipt.offset,
                told.popTime,
                told.invisibleTime,
                told.reviveQid,
                receipt.flag,
                receipt.broker,
                receipt.queue_id,
                receipt.offset,
            )
        )

    def _topic(self, message: PoppedMessage) -> str:
        return self.session.wrap(message.topic)

    def _fields(self, message: PoppedMessage, receipt: Receipt) -> dict[str, str]:
        return {
            "consumerGroup": self.group,
            "topic": receipt.real_topic(self._topic(message), self.group),
            "queueId": str(receipt.queue_id),
            "extraInfo": str(receipt),
            "offset": str(receipt.offset),
        }
