"""The end of a transaction: END_TRANSACTION (37).

Owns: the checks of an end, and what a half message becomes when it is committed. One rule: an end
counts only for the transaction whose record, queue offset, group and id it names, and only once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cometmq.broker import names
from cometmq.broker.delay import real_message, renewed
from cometmq.broker.half_records import immunity_ms
from cometmq.errors import (
    MessageIllegal,
    RequestRefused,
    StoreError,
    StoreFull,
    StoreReadOnly,
    UsageError,
)
from cometmq.message import StoredMessage
from cometmq.requests import Call, Reply
from cometmq.wire import message_id, properties
from cometmq.wire.codes import TRANSACTION_MASK, ResponseCode, SysFlag
from cometmq.wire.headers import EndTransactionHeader, ResumeChecksHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

_COMMIT, _ROLLBACK = int(SysFlag.COMMIT), int(SysFlag.ROLLBACK)


def end_transaction(broker: Broker, call: Call) -> Reply | None:
    """37: commit or roll back a half message; whoever does not know is not answered."""
    header: EndTransactionHeader = call.header
    if header.commitOrRollback not in (_COMMIT, _ROLLBACK):
        return None
    try:
        return _end(broker, call, header)
    except RequestRefused as refused:  # nobody waits for the answer to a oneway request
        log.warning(
            "end refused group=%s id=%s half=%d commit=%s: %s",
            header.producerGroup,
            header.transactionId or header.msgId,
            header.tranStateTableOffset,
            header.commitOrRollback == _COMMIT,
            refused.remark,
        )
        raise


def _end(broker: Broker, call: Call, header: EndTransactionHeader) -> Reply | None:
    stored = _half(broker, header, call.now_ms)
    message = None
    if header.commitOrRollback == _COMMIT:
        message = real_message(stored)
        if message is None:
            raise _refuse("the half message does not say where it is to go")
        message.sys_flag = message.sys_flag & ~TRANSACTION_MASK | _COMMIT
        message.prepared_offset = stored.log_offset
    at = broker.half.living(broker.store, stored)
    if at is None:
        broker.half.repeated += 1
        raise _refuse("the transaction has been ended before, or given up")
    topic = names.OP_TOPIC if message is None else message.topic
    try:
        appended = broker.half.end(broker, at, message, call.now_ms)
    except StoreError as error:
        raise _refusal(error) from None
    if broker.teacher is not None:
        broker.teacher.ended(stored.log_offset)
        if message is not None:
            broker.teacher.delivered(message)
    return broker.acknowledge(call, Reply(), appended.end_offset, topic, text=stored.properties)


def _half(broker: Broker, header: EndTransactionHeader, now_ms: int) -> StoredMessage:
    """The half message that an end names, as RocketMQ checks it, in its order."""
    stored = broker.store.message_at(header.commitLogOffset)
    if stored is None or stored.topic != names.HALF_TOPIC:
        raise _refuse(f"no half message at log offset {header.commitLogOffset}")
    table = properties.parse(stored.properties)
    own = table.get(properties.IMMUNITY_SEC)
    if own is not None and not header.fromTransactionCheck:
        limit_ms = immunity_ms(own, broker.config.transaction_timeout_ms)
        if now_ms - stored.born_ms > limit_ms:
            raise RequestRefused(
                ResponseCode.ILLEGAL_OPERATION,
                f"{now_ms - stored.born_ms} ms after its birth, limit {limit_ms} "
                "(CHECK_IMMUNITY_TIME_IN_SECONDS): wait for the check-back",
            )
    if table.get(properties.PRODUCER_GROUP) != header.producerGroup:
        raise _refuse(f"the half message is not one of group {header.producerGroup!r}")
    if stored.queue_offset != header.tranStateTableOffset:
        raise _refuse(
            f"the half message has queue offset {stored.queue_offset}, "
            f"not {header.tranStateTableOffset}"
        )
    told = {one for one in (header.msgId, header.transactionId) if one}
    known = {
        table.get(properties.UNIQUE_KEY),
        message_id.offset_id(stored.store_host, stored.log_offset),
    }
    if told and not told & known:  # after a crash another half may stand where one was lost
        raise _refuse(f"the half message is another one, {table.get(properties.UNIQUE_KEY)}")
    return stored


def resume_checks(broker: Broker, call: Call) -> Reply | None:
    """323: a transaction that was given up is asked about again, from its first check on."""
    header: ResumeChecksHeader = call.header
    try:
        log_offset = message_id.parse_offset_id(header.msgId)[2]
    except UsageError as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
    stored = broker.store.message_at(log_offset)
    if stored is None or stored.topic != names.CHECK_MAX_TOPIC:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"message {header.msgId} is not a given up transaction: only those in "
            f"{names.CHECK_MAX_TOPIC} can be resumed",
        )
    if broker.half.is_resumed(broker.store, stored):
        raise _refuse(f"transaction {header.msgId} has been resumed and is open")
    message = renewed(stored, names.HALF_TOPIC, 0)
    table = properties.parse(stored.properties)
    table[properties.CHECK_TIMES] = "0"
    table.pop(properties.FIRST_HALF, None)  # that one has ended
    message.properties = properties.build(table)
    message.prepared_offset = 0
    try:
        appended = broker.put(message, call.now_ms, is_due=True)
    except StoreError as error:
        raise _refusal(error) from None
    log.info("transaction resumed id=%s", table.get(properties.UNIQUE_KEY))
    return broker.acknowledge(
        call, Reply(), appended.end_offset, names.HALF_TOPIC, text=message.properties
    )


def _refuse(why: str) -> RequestRefused:
    return RequestRefused(ResponseCode.SYSTEM_ERROR, why)


def _refusal(error: StoreError) -> RequestRefused:
    code = ResponseCode.SYSTEM_ERROR
    if isinstance(error, MessageIllegal):
        code = ResponseCode.MESSAGE_ILLEGAL
    elif isinstance(error, (StoreFull, StoreReadOnly)):
        code = ResponseCode.SERVICE_NOT_AVAILABLE
    return RequestRefused(code, str(error))
