"""Sends: 10 and 310 for one message, 320 (or the batch flag) for many.

Owns: the checks of a send in RocketMQ's order, the properties a broker adds, and the answer. One
rule: nothing is changed until every check has passed, and no success is answered before the message
is as safe as the flush mode promises and its topic is known to the name servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.broker import dedup, names, recall, retry, sequences, timed, ttl
from cometmq.broker.half_records import as_half
from cometmq.errors import (
    BodyError,
    MessageIllegal,
    RequestRefused,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from cometmq.message import NewMessage
from cometmq.requests import Call, Reply
from cometmq.store.results import Appended
from cometmq.wire import message_id, properties, record
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import TRANSACTION_MASK, Perm, ResponseCode, SysFlag
from cometmq.wire.frame import Frame
from cometmq.wire.headers import SendHeader
from cometmq.wire.record import Piece

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

_RESERVED = (
    properties.REGION,
    properties.TRACE_ON,
    properties.CLUSTER,
    properties.POP_CHECKPOINT,
)
_TIMED = (
    properties.TIMER_DELAY_SEC,
    properties.TIMER_DELAY_MS,
    properties.TIMER_DELIVER_MS,
)
_LATER = (properties.DELAY, *_TIMED)


_KINDS = (properties.HALF, properties.DELAY, "TIMER_")
"""A property text without any of these is an ordinary message; looking for text is cheap."""
_REFUSED_BITS = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH | SysFlag.PREPARED
_SEQUENCE_MARK = sequences.MARK.encode()
_RESERVED_MARKS = tuple(name + properties.NAME_END for name in _RESERVED)


def send(broker: Broker, call: Call) -> Reply | None:
    """Store one message or one batch."""
    header: SendHeader = call.header
    try:
        _check_busy(broker, call)
        pieces: list[Piece] = []
        topic = check(broker, header, call, pieces)
        if header.batch:
            return _store_batch(broker, call, header, topic, pieces)
        return _store_one(broker, call, header, topic)
    except RequestRefused as refused:
        broker.stats.counters.put_failed += 1
        refused.ext = broker.send_ext
        raise
    except BodyError as error:
        broker.stats.counters.put_failed += 1
        raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, str(error), broker.send_ext) from None


def _check_busy(broker: Broker, call: Call) -> None:
    config, counters = broker.config, broker.stats.counters
    if not config.is_fast_failure_enabled:
        return
    if call.waited_ms > config.send_queue_wait_ms:
        counters.busy_queue_wait += 1
        raise RequestRefused(
            ResponseCode.SYSTEM_BUSY,
            f"[TIMEOUT_CLEAN_QUEUE] broker busy: this send waited {call.waited_ms} ms in the "
            f"request queue, limit {config.send_queue_wait_ms} ms (waitTimeMillsInSendQueue)",
        )
    if broker.stall_ms > config.append_stall_ms:
        counters.busy_slow_append += 1
        raise RequestRefused(
            ResponseCode.SYSTEM_BUSY,
            f"[PCBUSY_CLEAN_QUEUE] broker busy: the append before this one took "
            f"{broker.stall_ms} ms, limit {config.append_stall_ms} ms "
            "(osPageCacheBusyTimeOutMills)",
        )
    remark = broker.store.stall_remark(call.now_ms)
    if remark is not None:
        counters.busy_slow_disk += 1
        raise RequestRefused(
            ResponseCode.SYSTEM_BUSY, f"[PCBUSY_CLEAN_QUEUE] broker busy: {remark}"
        )


def check(
    broker: Broker, header: SendHeader, call: Call, pieces: list[Piece] | None = None
) -> TopicConfig:
    """Everything that may refuse a send before the store is asked; returns the topic.

    `pieces`: takes the messages of a batch.
    """
    pieces = [] if pieces is None else pieces
    config, now_ms = broker.config, call.now_ms
    if now_ms < config.accept_sends_from_ms:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"broker accepts sends from {config.accept_sends_from_ms} on "
            "(startAcceptSendRequestTimeStamp)",
        )
    if broker.is_stopping:
        raise RequestRefused(ResponseCode.SERVICE_NOT_AVAILABLE, "the broker is shutting down")
    names.check_topic(header.topic)
    known = broker.topics.get(header.topic)
    if not config.permission & Perm.WRITE and known is not None and known.order:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            f"broker {config.name} is not writable (brokerPermission={config.permission}) and "
            f"topic {header.topic!r} is ordered",
        )
    if header.topic in names.NOT_FOR_CLIENTS:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, f"clients may not send to system topic {header.topic!r}"
        )
    if header.sysFlag & _REFUSED_BITS:
        _refuse_bits(header)
    retry_group = None
    if header.topic.startswith(names.RETRY_PREFIX):
        retry_group = header.topic[len(names.RETRY_PREFIX) :]
        names.check_group(retry_group)
    if header.batch and (retry_group is not None or len(header.topic) > names.MAX_TOPIC):
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL, "batches can't go to a retry topic or a long topic name"
        )
    if header.batch:
        _check_batch(broker, header, call.frame.body, pieces)
    else:
        _check_kind(broker, header)
        if known is None:  # a known topic's message is refused by `redirect`, all the same
            check_time(broker, header, now_ms)
        _check_size(broker, header, len(call.frame.body))
    if retry_group is not None and broker.groups.get(retry_group) is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {retry_group!r} does not exist on {config.name}",
        )
    topic = known or _new_topic(broker, header, is_retry=retry_group is not None)
    queue_count = max(topic.readQueueNums, topic.writeQueueNums)
    if header.queueId >= queue_count:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"queue {header.queueId} of topic {header.topic!r}: it has {topic.readQueueNums} read "
            f"and {topic.writeQueueNums} write queues on {config.name}",
        )
    if header.queueId < 0 and topic.writeQueueNums <= 0:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"topic {header.topic!r} has no write queue on {config.name}",
        )
    if known is None:
        _check_numbers(broker, header, call, pieces)
        _create(broker, topic, call)
    return topic


def _refuse_bits(header: SendHeader) -> None:
    if header.sysFlag & (SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH):
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL, "inner batches (queue.type=BatchCQ) are not supported"
        )
    if not header.batch and not is_half(header):  # nobody would ever see a record with these bits
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, "sysFlag says transactional, but TRAN_MSG is not true"
        )


def is_half(header: SendHeader) -> bool:
    """Whether a send begins a transaction. A consumer that sends a committed message back by itself
    does not, though it passes on the property."""
    text = header.properties or ""
    if properties.HALF not in text:
        return False
    is_again = (header.reconsumeTimes or 0) > 0
    if is_again and (properties.get(text, properties.DELAY) or "0") != "0":
        return False
    return (properties.get(text, properties.HALF) or "").lower() == "true"


def _check_kind(broker: Broker, header: SendHeader) -> None:
    """Message kinds that this version can't keep are refused, never stored as something else."""
    text = header.properties or ""
    if ttl.MARK in text:
        ttl.check(text)
    if not any(name in text for name in _KINDS):
        return
    if broker.config.rejects_transactions and is_half(header):
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            f"broker {broker.config.name} takes no transactional messages "
            "(rejectTransactionMessage)",
        )


def check_time(broker: Broker, header: SendHeader, now_ms: int) -> None:
    """Whether a timed message can be kept until then."""
    try:
        timed.slot_for(broker.config, header.topic, header.properties or "", now_ms)
    except StoreError as error:
        raise _refusal(error) from None


def _check_size(broker: Broker, header: SendHeader, body_bytes: int) -> None:
    limit = broker.config.max_message_bytes
    if body_bytes > limit:
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"message body of {body_bytes} bytes, at most {limit} (maxMessageSize)",
        )
    size = len((header.properties or "").encode("utf-8"))
    if size > properties.MAX_PROPERTIES_BYTES:
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"message properties of {size} bytes, at most {properties.MAX_PROPERTIES_BYTES}",
        )


def _check_batch(broker: Broker, header: SendHeader, body: bytes, pieces: list[Piece]) -> None:
    """What may refuse a batch by its content, before a topic is made for it."""
    if header.sysFlag & TRANSACTION_MASK:
        raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "a batch can't be transactional")
    if len(body) > broker.config.max_message_bytes:
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"batch of {len(body)} bytes, at most {broker.config.max_message_bytes} "
            "(maxMessageSize)",
        )
    if not body:
        raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
    pieces.extend(record.split_batch(body))
    for text in (header.properties or "", *(piece.properties for piece in pieces)):
        if ttl.MARK in text:
            ttl.check(text)
        if not any(name in text for name in _KINDS):
            continue
        if (properties.get(text, properties.HALF) or "").lower() == "true":
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "a message in a batch can't be transactional"
            )
        for name in _LATER:
            if properties.has(text, name):
                raise RequestRefused(
                    ResponseCode.MESSAGE_ILLEGAL, f"a message in a batch can't be delayed ({name})"
                )


def _check_numbers(broker: Broker, header: SendHeader, call: Call, pieces: list[Piece]) -> None:
    """No topic is made for messages whose numbers would be refused."""
    if header.batch:
        run = _run_of_batch(header, call, pieces)
    else:
        text = header.properties or ""
        has_any = sequences.MARK in text
        run = sequences.run_of(header.topic, header.queueId, [text]) if has_any else None
    if run is not None:
        broker.sequences.stored_already(header.topic, header.queueId, run, call.now_ms)


def _new_topic(broker: Broker, header: SendHeader, *, is_retry: bool) -> TopicConfig:
    """The topic as its template wants it, not made yet; 17 says why that is not possible."""
    config = broker.config
    if is_retry:
        return TopicConfig(header.topic, 1, 1, int(Perm.READ | Perm.WRITE))
    is_allowed = config.is_topic_auto_created or header.defaultTopic != names.TEMPLATE_TOPIC
    found = (
        broker.topics.from_template(header.topic, header.defaultTopic, header.defaultTopicQueueNums)
        if is_allowed
        else None
    )
    if found is None:
        if config.is_topic_auto_created:
            why = f"its template {header.defaultTopic!r} can't be inherited from"
        else:
            why = "autoCreateTopicEnable is false"
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {header.topic!r} does not exist on {config.name} and was not created: {why}; "
            "create it first",
        )
    return found


def _create(broker: Broker, topic: TopicConfig, call: Call) -> None:
    """Make the topic that a send asked for; not if its message could not be stored anyway."""
    if not broker.store.is_writable:
        raise RequestRefused(
            ResponseCode.SERVICE_NOT_AVAILABLE,
            f"topic {topic.topicName!r} was not created: the store takes no messages "
            f"({broker.store.read_only_reason or 'the disk is full'})",
        )
    broker.topics.put(topic, call.now_ms)
    broker.announce([topic], call.now_ms, call.out)


# ------------------------------------------------------------------------------------------ store


def _store_one(broker: Broker, call: Call, header: SendHeader, topic: TopicConfig) -> Reply | None:
    message, unique_key = new_message(broker, call, header, topic)
    text = message.properties
    queue_id, now_ms = message.queue_id, call.now_ms
    if header.topic.startswith(names.RETRY_PREFIX):
        message = retry.limit_of_resend(broker, call, message, header.maxReconsumeTimes)
    run = None
    if sequences.MARK in text:
        run = sequences.run_of(header.topic, header.queueId, [text])
    is_compared = run is None and dedup.window_ms(topic) > 0
    half = is_half(header)
    if run is not None and broker.sequences.stored_already(header.topic, queue_id, run, now_ms):
        return _numbered_before(broker, call, header, run, unique_key)
    if is_compared:
        first = broker.dedup.find(broker, topic, unique_key, now_ms, is_half=half)
        if first is not None:
            return _known_before(broker, call, header, [first], unique_key, text)
    try:
        if half:
            as_half(message, unique_key)
        elif not broker.delay.redirect(message):
            broker.timers.redirect(broker.config, message, now_ms)
        ttl.stamp(message, now_ms)
        stored = broker.store.append(message, now_ms)
    except StoreError as error:
        raise _refusal(error) from None
    is_prepared = message.topic == names.HALF_TOPIC
    broker.stats.put(message.topic if is_prepared else header.topic, 1, stored.size)
    if broker.teacher is not None:
        broker.teacher.sent(topic, message)
    ext = {
        **broker.send_ext,
        "msgId": message_id.offset_id(broker.store_host, stored.log_offset),
        "queueId": str(queue_id),
        "queueOffset": str(stored.queue_offset),
    }
    ext["transactionId"] = unique_key
    handle = recall.handle_of(broker.config.name, message)
    if handle is not None:
        ext["recallHandle"] = handle
    if run is not None:
        broker.sequences.stored(header.topic, queue_id, run, stored, now_ms)
        ext["sequenced"] = "true"
    if is_compared:
        broker.dedup.stored(header.topic, unique_key, queue_id, stored, is_half=is_prepared)
    return broker.acknowledge(call, Reply(ext=ext), stored.end_offset, header.topic, text=text)


def _store_batch(
    broker: Broker, call: Call, header: SendHeader, topic: TopicConfig, pieces: list[Piece]
) -> Reply | None:
    outer = header.properties or ""
    queue_id, now_ms = _queue(broker, header, topic), call.now_ms
    unique_key = properties.get(outer, properties.UNIQUE_KEY)
    run = _run_of_batch(header, call, pieces)
    if run is not None:
        skipped = broker.sequences.stored_already(header.topic, queue_id, run, now_ms)
        if skipped == run.count:
            return _numbered_before(broker, call, header, run, unique_key)
        if not skipped:
            answer = broker.send_judged(call)
            if answer is not None:
                return _numbered(broker, call, header, run, answer)
        pieces = pieces[skipped:]
        run = sequences.Run(run.producer, run.batch, run.n + skipped, run.count - skipped)
    messages: list[NewMessage] = []
    keys: list[str] = []
    for piece in pieces:
        message = _message(broker, call, header, queue_id)
        message.body = piece.body
        message.flag = piece.flag
        message.properties, key = _complete(broker, piece.properties, now_ms)
        ttl.stamp(message, now_ms)
        messages.append(message)
        keys.append(key)
    if run is None and dedup.window_ms(topic):
        return _store_compared(broker, call, header, topic, messages, keys)
    stored = _append_batch(broker, header.topic, messages, now_ms)
    if broker.teacher is not None:
        broker.teacher.sent(topic, messages[-1])
    ids = (message_id.offset_id(broker.store_host, one.log_offset) for one in stored)
    ext = {
        **broker.send_ext,
        "msgId": ",".join(ids),
        "queueId": str(queue_id),
        "queueOffset": str(stored[0].queue_offset),
    }
    if unique_key is not None:
        ext["transactionId"] = unique_key
    if run is not None:
        broker.sequences.stored(header.topic, queue_id, run, stored[-1], now_ms)
        ext["sequenced"] = "true"
    return broker.acknowledge(call, Reply(ext=ext), stored[-1].end_offset, header.topic, text=outer)


def _numbered(
    broker: Broker, call: Call, header: SendHeader, run: sequences.Run, answer: Frame
) -> Reply | None:
    """A batch that the compiled path has stored, and its answer."""
    last_id = answer.ext["msgId"].rpartition(",")[2]
    log_offset, end_offset = message_id.parse_offset_id(last_id)[2], broker.store.max_log_offset
    first = int(answer.ext["queueOffset"])
    size = end_offset - log_offset
    last = Appended(log_offset, first + run.count - 1, size, end_offset, call.now_ms)
    broker.sequences.stored(header.topic, header.queueId, run, last, call.now_ms)
    reply = Reply(ext={**answer.ext, "sequenced": "true"})
    text = header.properties or ""
    return broker.acknowledge(call, reply, end_offset, header.topic, text=text)


def _append_batch(
    broker: Broker, topic: str, messages: list[NewMessage], now_ms: int
) -> list[Appended]:
    try:
        stored = broker.store.append_batch(messages, now_ms)
    except StoreError as error:
        raise _refusal(error) from None
    broker.stats.put(topic, len(stored), sum(one.size for one in stored))
    return stored


def _run_of_batch(header: SendHeader, call: Call, pieces: list[Piece]) -> sequences.Run | None:
    if _SEQUENCE_MARK not in call.frame.body:
        return None
    return sequences.run_of(header.topic, header.queueId, [piece.properties for piece in pieces])


def _store_compared(
    broker: Broker,
    call: Call,
    header: SendHeader,
    topic: TopicConfig,
    messages: list[NewMessage],
    keys: list[str],
) -> Reply | None:
    """A batch to a topic whose messages are compared: the new ones are stored, all are answered."""
    found = broker.dedup.sift(broker, topic, keys, call.now_ms)
    fresh = [message for message, known in zip(messages, found, strict=True) if known is None]
    stored = iter(_append_batch(broker, header.topic, fresh, call.now_ms) if fresh else ())
    firsts: list[dedup.First] = []
    for key, message, known in zip(keys, messages, found, strict=True):
        if known is None:
            known = broker.dedup.stored(header.topic, key, message.queue_id, next(stored))
        firsts.append(firsts[known] if isinstance(known, int) else known)
    outer = header.properties or ""
    unique_key = properties.get(outer, properties.UNIQUE_KEY)
    return _known_before(broker, call, header, firsts, unique_key, outer, fresh_count=len(fresh))


def _known_before(
    broker: Broker,
    call: Call,
    header: SendHeader,
    firsts: list[dedup.First],
    unique_key: str | None,
    text: str,
    fresh_count: int = 0,
) -> Reply | None:
    """The answer that the first messages with these keys got, once it is as true again."""
    duplicates = len(firsts) - fresh_count
    broker.dedup.duplicates += duplicates
    ids = (message_id.offset_id(broker.store_host, one.log_offset) for one in firsts)
    ext = {
        **broker.send_ext,
        "msgId": ",".join(ids),
        "queueId": str(firsts[0].queue_id),
        "queueOffset": str(firsts[0].queue_offset),
    }
    if unique_key is not None:
        ext["transactionId"] = unique_key
    if duplicates and not fresh_count:
        ext["duplicate"] = "true"
    end_offset = max(one.end_offset for one in firsts)
    return broker.acknowledge(call, Reply(ext=ext), end_offset, header.topic, text=text)


def _numbered_before(
    broker: Broker, call: Call, header: SendHeader, run: sequences.Run, unique_key: str | None
) -> Reply | None:
    """The answer to a request whose messages are all stored."""
    last = broker.sequences.last(header.topic, header.queueId, run.producer)
    ext = {
        **broker.send_ext,
        "msgId": message_id.offset_id(broker.store_host, last.log_offset),
        "queueId": str(header.queueId),
        "queueOffset": str(last.queue_offset),
        "sequenced": "true",
        "duplicate": "true",
    }
    if unique_key is not None:
        ext["transactionId"] = unique_key
    text = header.properties or ""
    return broker.acknowledge(call, Reply(ext=ext), last.end_offset, header.topic, text=text)


def new_message(
    broker: Broker, call: Call, header: SendHeader, topic: TopicConfig
) -> tuple[NewMessage, str]:
    """The message of a send, completed, and its unique key."""
    text, unique_key = _complete(broker, header.properties or "", call.now_ms)
    message = _message(broker, call, header, _queue(broker, header, topic))
    message.body = call.frame.body
    message.properties = text
    message.flag = header.flag
    if is_half(header):
        message.sys_flag &= ~TRANSACTION_MASK
    return message, unique_key


def _queue(broker: Broker, header: SendHeader, topic: TopicConfig) -> int:
    if header.queueId >= 0:
        return header.queueId
    return broker.any_queue(topic)


def _message(broker: Broker, call: Call, header: SendHeader, queue_id: int) -> NewMessage:
    return NewMessage(
        topic=header.topic,
        queue_id=queue_id,
        body=b"",
        sys_flag=header.sysFlag & 0x7FFFFFFF,
        born_ms=header.bornTimestamp,
        born_host=broker.peers[call.conn].packed,
        store_host=broker.store_host,
        reconsume_times=header.reconsumeTimes or 0,
    )


def _complete(broker: Broker, text: str, now_ms: int) -> tuple[str, str]:
    """The properties as they are stored: with region, trace, cluster and a unique key."""
    if any(mark in text for mark in _RESERVED_MARKS):
        table = properties.parse(text)
        for name in _RESERVED:
            table.pop(name, None)
        text = properties.build(table)
    elif text and not text.endswith(properties.VALUE_END):
        text += properties.VALUE_END
    unique_key = properties.get(text, properties.UNIQUE_KEY)
    if unique_key is None:
        unique_key = broker.make_unique_key(now_ms)
        text += f"{properties.UNIQUE_KEY}\x01{unique_key}\x02"
    return text + broker.added_properties, unique_key


def _refusal(error: StoreError) -> RequestRefused:
    if isinstance(error, MessageIllegal):
        return RequestRefused(ResponseCode.MESSAGE_ILLEGAL, str(error))
    if isinstance(error, (StoreFull, StoreReadOnly)):
        return RequestRefused(ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
    if isinstance(error, StoreBusy):
        return RequestRefused(ResponseCode.SYSTEM_BUSY, f"[REJECTREQUEST] broker busy: {error}")
    return RequestRefused(ResponseCode.SYSTEM_ERROR, str(error))
