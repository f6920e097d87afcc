"""TransactionProducer: a message that is seen by consumers only if your own work succeeded.

Owns: half messages, their ends, and answering check-backs. One rule: a broker is told COMMIT only
after the user's code said so; whatever is unclear is UNKNOWN, and the broker asks again.

    1 the half message is sent: stored, and invisible
    2 your work runs
    3 commit or rollback is told to the broker (if that gets lost, 4 repairs it)
    4 check-back: the broker asks any producer of the group what became of it; `check` answers
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING, Unpack

from cometmq.client.connection import Connection
from cometmq.client.handling import EXITS, on_thread
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.errors import SendFailed, UsageError
from cometmq.message import Message, SendResult, SendStatus
from cometmq.wire import headers
from cometmq.wire import properties as props
from cometmq.wire.codes import RequestCode, SysFlag
from cometmq.wire.frame import Frame
from cometmq.wire.message_id import parse_offset_id

if TYPE_CHECKING:
    from cometmq.client.keywords import OfTracedProducers

log = logging.getLogger("cometmq.client")

MAX_CHECKS = 2_000  # check-backs waiting or running; more are dropped, and the broker asks again


class Outcome(Enum):
    """What became of the work that a half message stands for."""

    COMMIT = SysFlag.COMMIT
    ROLLBACK = SysFlag.ROLLBACK
    UNKNOWN = 0


Check = Callable[[ReceivedMessage], Outcome | Awaitable[Outcome]]
Work = Callable[[Message], Outcome | Awaitable[Outcome | None] | None]
EndedHook = Callable[[Message | ReceivedMessage, headers.EndTransactionHeader, str], None]


class TransactionProducer:
    """Sends messages together with your own work.

    >>> producer = TransactionProducer("shop", check=lambda message: Outcome.COMMIT, namesrv=...)
    >>> async with producer, producer.transaction(Message("orders", b"...")) as sent:
    ...     database.commit()          # raises: rolled back; returns: committed

    `check` is asked for messages whose end never reached the broker, maybe after a restart, maybe
    by another member of the group; it is a plain function (run on a thread) or an async one.
    """

    def __init__(self, group: str, check: Check, **keywords: Unpack[OfTracedProducers]) -> None:
        self.producer = Producer(group, **keywords)
        self._check = check
        self._checking = 0
        self.on_ended: list[EndedHook] = []
        """Called with (message, what a broker was told, its address); for tracing."""
        if self.producer.tracer is not None:
            self.producer.tracer.watch_transactions(self)
        session = self.producer.session
        session.answers[RequestCode.CHECK_TRANSACTION_STATE] = self._asked

    def __repr__(self) -> str:
        return f"<TransactionProducer of {self.producer!r} checking={self._checking}>"

    async def start(self) -> None:
        await self.producer.start()

    async def close(self) -> None:
        await self.producer.close()

    async def __aenter__(self) -> TransactionProducer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(
        self, message: Message, work: Work, *, timeout_ms: int | None = None
    ) -> SendResult:
        """Send a half message, run `work(message)`, and end the transaction as it says: an
        Outcome, or None for COMMIT. If it raises, the message is rolled back and the error goes on.
        """
        async with self.transaction(message, timeout_ms=timeout_ms) as sent:
            if inspect.iscoroutinefunction(work):
                outcome = await work(message)
            else:
                outcome = await on_thread(work, message)
                if inspect.isawaitable(outcome):
                    outcome = await outcome
            if outcome is not None and outcome is not Outcome.COMMIT:
                if not isinstance(outcome, Outcome):
                    raise UsageError(f"the work returned {outcome!r}, not an Outcome or None")
                raise _Ended(outcome)
        return sent

    @asynccontextmanager
    async def transaction(
        self, message: Message, *, timeout_ms: int | None = None
    ) -> AsyncIterator[SendResult]:
        """A half message around a block: committed if the block ends, rolled back if it raises."""
        if message.delay_level or message.deliver_at is not None:
            raise UsageError("a transactional message can't be delayed")
        producer = self.producer
        # The broker must know us, or it could never ask back.
        await producer.session.routes.need(
            producer.wire_topic(message.topic), create_queues=producer.send_options.default_queues
        )
        extra = f"{props.HALF}\x01true\x02{props.PRODUCER_GROUP}\x01{producer.wire_group}\x02"
        sending = producer.make(
            message, None, None, timeout_ms, is_async=False, extra=extra, sys_flag=SysFlag.PREPARED
        )
        sent = await producer.finished(sending)
        if sent.status is not SendStatus.SEND_OK:
            await self._end(message, sent, Outcome.ROLLBACK)
            raise SendFailed(
                f"the half message was stored with {sent.status.value} only, so it was rolled back",
                [f"{sent.queue.broker}: {sent.status.value}"],
                code=None,
                is_maybe_stored=False,
            )
        try:
            yield sent
        except _Ended as ended:
            await self._end(message, sent, ended.outcome)
        except asyncio.CancelledError:
            raise  # nobody knows how far the work came: check-back finds out
        except BaseException:
            await self._end(message, sent, Outcome.ROLLBACK)
            raise
        else:
            await self._end(message, sent, Outcome.COMMIT)

    async def _end(self, message: Message, sent: SendResult, outcome: Outcome) -> None:
        _, _, log_offset = parse_offset_id(sent.offset_id)
        topic = self.producer.wire_topic(message.topic)
        header = headers.EndTransactionHeader(
            producerGroup=self.producer.wire_group,
            tranStateTableOffset=sent.queue_offset,
            commitLogOffset=log_offset,
            commitOrRollback=outcome.value,
            msgId=sent.message_id,
            transactionId=sent.transaction_id or sent.message_id,
            topic=topic,
        )
        session = self.producer.session
        try:
            address = await session.leader(sent.queue.broker, topic)
            connection = await session.connections.get(address, sent.queue.broker)
        except Exception as error:
            log.warning("end_not_told outcome=%s reason=%s action=check-back", outcome, error)
            return
        self._tell(connection, message, header)

    def _tell(
        self,
        connection: Connection,
        message: Message | ReceivedMessage,
        header: headers.EndTransactionHeader,
    ) -> None:
        connection.oneway(RequestCode.END_TRANSACTION, headers.to_ext(header))
        for hook in self.on_ended:
            try:
                hook(message, header, connection.address)
            except Exception:
                log.exception("on_ended_failed")

    # ---------------------------------------------------------------------------------- check-back

    def _asked(self, connection: Connection, frame: Frame) -> None:
        if self._checking >= MAX_CHECKS:
            log.warning("check_dropped checking=%d action=the broker asks again", self._checking)
            return
        self._checking += 1
        self.producer.session.spawn(self._answer(connection, frame))

    async def _answer(self, connection: Connection, frame: Frame) -> None:
        try:
            header = headers.parse(headers.CheckTransactionHeader, frame.ext)
            messages = read_all(frame.body, header.bname or "")
            self.producer.session.show(messages)
            message = messages[0]
            try:
                if inspect.iscoroutinefunction(self._check):
                    outcome = await self._check(message)
                else:
                    outcome = await on_thread(self._check, message)
                    if inspect.isawaitable(outcome):
                        outcome = await outcome
            except (Exception, *EXITS):  # an exit, too, would hit others: nobody waits for this
                log.exception("check_failed id=%s action=the broker asks again", message.message_id)
                outcome = Outcome.UNKNOWN
            if not isinstance(outcome, Outcome):
                log.error("check_returned %r, not an Outcome; id=%s", outcome, message.message_id)
                outcome = Outcome.UNKNOWN
            answer = headers.EndTransactionHeader(
                producerGroup=message.properties.get(
                    props.PRODUCER_GROUP, self.producer.wire_group
                ),
                tranStateTableOffset=header.tranStateTableOffset,
                commitLogOffset=header.commitLogOffset,
                commitOrRollback=outcome.value,
                msgId=message.message_id,
                transactionId=header.transactionId,
                fromTransactionCheck=True,
                topic=header.topic,
            )
            self._tell(connection, message, answer)
        finally:
            self._checking -= 1


class _Ended(Exception):
    """Leaves the block of a transaction with an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome
