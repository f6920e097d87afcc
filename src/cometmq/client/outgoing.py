"""A user's message on its way out: checked, completed, made into a frame.

Owns: the limits that are checked before any byte leaves, the property string, and the frame of a
send. One rule: what is refused here is refused with the value and the limit in the text, and
nothing was sent.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from cometmq.errors import UsageError
from cometmq.message import Message, MessageQueue
from cometmq.wire import properties as props
from cometmq.wire.codes import LANGUAGES, PYTHON, RequestCode, Version
from cometmq.wire.record import Piece, join_batch

MAX_TOPIC_CHARS = 127
MAX_GROUP_CHARS = 120
MAX_DELAY_LEVEL = 18
MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # RocketMQ's own maxMessageSize, on both sides
MAX_TTL_MS = 10 * 365 * 86_400_000
SHARDING_KEY = "__SHARDINGKEY"
NAMES = re.compile(r"[%|a-zA-Z0-9_-]+")
NOT_FOR_CLIENTS = frozenset(
    (
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    )
)
RESERVED = frozenset(
    (
        props.KEYS,
        props.TAGS,
        props.WAIT,
        props.DELAY,
        props.RETRY_TOPIC,
        props.REAL_TOPIC,
        props.REAL_QUEUE_ID,
        props.HALF,
        props.PRODUCER_GROUP,
        props.UNIQUE_KEY,
        props.ORIGIN_MESSAGE_ID,
        props.REGION,
        props.TRACE_ON,
        props.CLUSTER,
        props.POP_CHECKPOINT,
        props.TIMER_DELAY_SEC,
        props.TIMER_DELAY_MS,
        props.TIMER_DELIVER_MS,
        "EXTEND_UNIQ_INFO",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "__transactionId__",
        "TRANSACTION_CHECK_TIMES",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "CONSUME_START_TIME",
        "INSTANCE_ID",
        props.TTL_MS,
        props.TTL_UNTIL,
        SHARDING_KEY,
    )
)
"""Names that a user's property may not have: the system would read them as its own."""

_SEND = int(RequestCode.SEND_MESSAGE_V2)
_SEND_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
_BATCH_HEAD = struct.Struct(">iiiii")
_OWN_FIELD = {
    props.KEYS: "keys",
    props.TAGS: "tags",
    props.WAIT: "waits_for_storage",
    props.DELAY: "delay_level",
    props.UNIQUE_KEY: "unique_id",
    props.TIMER_DELIVER_MS: "deliver_at",
    props.TTL_MS: "ttl",
    SHARDING_KEY: "sharding_key",
}


def check_name(name: str, what: str, most_chars: int) -> None:
    """A topic's or group's name; UsageError says what is wrong with it."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"{what} must be a text that is not empty, got {name!r}")
    if len(name) > most_chars:
        raise UsageError(
            f"{what} {name[:40]!r}... has {len(name)} characters; at most {most_chars}"
        )
    if not NAMES.fullmatch(name):
        raise UsageError(f"{what} {name!r} may have only letters, digits and % | _ -")


def check_message(message: Message, unique_id: str, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Whether it could ever be sent; UsageError if not. For who keeps a message to send it later:
    a producer makes the same checks, as it needs what most of them give."""
    check_topic(message.topic)
    check_body(message.body, most_bytes)
    check_flag(message.flag)
    check_unique_id(unique_id)
    check_properties(properties_of(message, unique_id))


def check_properties(text: str) -> None:
    """The property string, as `properties_of` makes it."""
    size = len(text.encode())
    if size > props.MAX_PROPERTIES_BYTES:
        raise UsageError(f"properties of {size} bytes; at most {props.MAX_PROPERTIES_BYTES}")


def check_topic(topic: str) -> None:
    is_own = isinstance(topic, str) and topic.startswith(("%RETRY%", "%DLQ%"))
    check_name(topic, "topic", 255 if is_own else MAX_TOPIC_CHARS)
    if topic in NOT_FOR_CLIENTS:
        raise UsageError(f"topic {topic!r} belongs to the system; nobody may send to it")


def check_body(body: bytes, most_bytes: int) -> None:
    if not isinstance(body, bytes | bytearray | memoryview):
        hint = "; use .encode()" if isinstance(body, str) else ""
        raise UsageError(f"a body must be bytes, got {type(body).__name__}{hint}")
    if not body:
        raise UsageError("a body must not be empty: RocketMQ refuses such messages")
    if len(body) > most_bytes:
        raise UsageError(f"a body of {len(body)} bytes; at most {most_bytes} (max_message_bytes)")


def check_flag(flag: int) -> None:
    """Four bytes of the user's own, kept with the message."""
    if not is_number(flag) or not -(2**31) <= flag < 2**31:
        raise UsageError(f"flag {flag!r} must be a whole number of 32 bits")


def check_unique_id(unique_id: str) -> None:
    """One that the user gives; it becomes a property like any other."""
    if not isinstance(unique_id, str):
        raise UsageError(f"unique_id {unique_id!r} must be a text")
    _clean(unique_id, "unique_id")


def check_queue(queue: MessageQueue, what: str) -> None:
    """One that a user, or a user's selector, made."""
    if not isinstance(queue, MessageQueue):
        raise UsageError(f"{what} {queue!r}, which is not a MessageQueue")
    if not isinstance(queue.topic, str) or not isinstance(queue.broker, str):
        raise UsageError(f"{what} {queue!r}, whose topic and broker must be texts")
    if not is_number(queue.queue_id) or not 0 <= queue.queue_id < 2**31:
        raise UsageError(f"{what} {queue!r}, whose queue_id must be a whole number from 0 on")


def is_number(value: object) -> bool:
    """A whole number; True and False, which Python counts among them, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def properties_of(message: Message, unique_id: str, extra: str = "") -> str:
    """The property string; `extra` is in its form already. UsageError for what can't be said."""
    tags, keys = message.tags, message.keys
    is_usual = not (
        message.properties
        or message.sharding_key
        or message.delay_level
        or message.deliver_at is not None
        or message.ttl is not None
        or not message.waits_for_storage
        or type(keys) is not str
        or type(tags) is not str
        or "\x01" in keys
        or "\x02" in keys
        or "\x01" in tags
        or "\x02" in tags
        or "|" in tags
    )
    if not is_usual:
        return _properties_of_any(message, unique_id, extra)
    tags_text = f"TAGS\x01{tags}\x02" if tags else ""
    keys_text = f"KEYS\x01{keys}\x02" if keys else ""
    return f"UNIQ_KEY\x01{unique_id}\x02WAIT\x01true\x02{tags_text}{keys_text}{extra}"


def _properties_of_any(message: Message, unique_id: str, extra: str) -> str:
    parts = [f"UNIQ_KEY\x01{unique_id}\x02WAIT\x01"]
    parts.append("true\x02" if message.waits_for_storage else "false\x02")
    if not isinstance(message.tags, str):
        raise UsageError(f"tags {message.tags!r} must be a text: a message has one tag")
    if message.tags:
        if "|" in message.tags:
            raise UsageError(
                f"tags {message.tags!r}: a message has one tag; | is for subscriptions"
            )
        parts.append(f"TAGS\x01{_clean(message.tags, 'tags')}\x02")
    keys = message.keys
    if keys:
        text = keys if isinstance(keys, str) else _joined(keys)
        parts.append(f"KEYS\x01{_clean(text, 'keys')}\x02")
    if message.sharding_key:
        parts.append(f"{SHARDING_KEY}\x01{_clean(message.sharding_key, 'sharding_key')}\x02")
    if message.delay_level:
        if message.deliver_at is not None:
            raise UsageError("a message has either a delay_level or a deliver_at, not both")
        if not is_number(message.delay_level) or not 0 < message.delay_level <= MAX_DELAY_LEVEL:
            raise UsageError(f"delay_level {message.delay_level!r}; must be 1 to {MAX_DELAY_LEVEL}")
        parts.append(f"DELAY\x01{message.delay_level}\x02")
    if message.deliver_at is not None:
        if not isinstance(message.deliver_at, datetime):
            raise UsageError(f"deliver_at {message.deliver_at!r} must be a datetime")
        at_ms = int(message.deliver_at.timestamp() * 1000)
        parts.append(f"TIMER_DELIVER_MS\x01{at_ms}\x02")
    if message.ttl is not None:
        if not isinstance(message.ttl, timedelta):
            raise UsageError(f"ttl {message.ttl!r} must be a timedelta")
        ttl_ms = message.ttl // timedelta(milliseconds=1)
        if not 0 < ttl_ms <= MAX_TTL_MS:
            raise UsageError(f"ttl {message.ttl!r}: must be at least 1 ms and at most ten years")
        parts.append(f"TTL_MS\x01{ttl_ms}\x02")
    if not isinstance(message.properties, Mapping):
        raise UsageError(f"properties {message.properties!r} must be a dict of texts")
    for name, value in message.properties.items():
        if name in RESERVED:
            own = _OWN_FIELD.get(name)
            hint = f"; use the field {own}" if own else ""
            raise UsageError(f"property {name!r} is RocketMQ's own{hint}")
        if not isinstance(name, str) or not isinstance(value, str) or not name or not value:
            raise UsageError(f"property {name!r}={value!r}: names and values are texts, not empty")
        parts.append(f"{_clean(name, 'property name')}\x01{_clean(value, name)}\x02")
    return "".join(parts) + extra


def _joined(keys: Sequence[str]) -> str:
    for key in keys:
        if not isinstance(key, str) or not key or " " in key:
            raise UsageError(f"key {key!r}: a key is one word; spaces separate keys")
    return " ".join(keys)


def _clean(text: str, what: str) -> str:
    if not isinstance(text, str):
        raise UsageError(f"{what} {text!r} must be a text")
    if "\x01" in text or "\x02" in text:
        raise UsageError(f"{what} {text!r} contains the byte 1 or 2, which separate properties")
    return text


class SendTemplate:
    """The frame of a send to one topic, with holes for what differs from message to message."""

    __slots__ = ("_fields", "_head", "_tail")

    def __init__(self, group: str, topic: str, default_queues: int) -> None:
        encode = msgspec.json.encode
        # What comes from names is doubled (%%), so that the templates can be filled with %.
        self._fields = b'"extFields":{"a":%s,"b":%s,"c":"TBW102","d":"%d",' % (
            _safe(encode(group)),
            _safe(encode(topic)),
            default_queues,
        )
        self._tail = (
            b'},"flag":%%d,"language":"%s","opaque":%%d,"serializeTypeCurrentRPC":"JSON",'
            b'"version":%d}' % (LANGUAGES[PYTHON].encode(), Version.OURS)
        )
        middle = b'"e":"%d","f":"%d","g":"%d","h":"%d","k":"false","m":"%b","i":%b,"j":"%d"%b'
        self._head = b'{"code":%d,' + self._fields + middle + self._tail

    def plain(self, queue_id: int) -> bytes:
        """The header of an ordinary send to one queue, to be filled with (born ms, properties,
        opaque) by %."""
        middle = (
            b'"e":"%d","f":"0","g":"%%d","h":"0","k":"false","m":"false","i":%%b,"j":"0"' % queue_id
        )
        tail = self._tail.replace(b'"flag":%d', b'"flag":0', 1)
        return b'{"code":%d,' % _SEND + self._fields + middle + tail

    def frame(
        self,
        code: int,
        opaque: int,
        queue_id: int,
        sys_flag: int,
        born_ms: int,
        message_flag: int,
        properties: bytes,
        body: bytes,
        flag: int = 0,
        reconsume_times: tuple[int, int] | None = None,
    ) -> bytes:
        """`properties`: the property string as a JSON text; `reconsume_times`: so far, at most."""
        is_batch = b"true" if code == _SEND_BATCH else b"false"
        times, most = 0, b""
        if reconsume_times is not None:
            times, most = reconsume_times[0], b',"l":"%d"' % reconsume_times[1]
        head = self._head % (
            code,
            queue_id,
            sys_flag,
            born_ms,
            message_flag,
            is_batch,
            properties,
            times,
            most,
            flag,
            opaque,
        )
        size = len(head)
        return b"%b%b%b%b" % (
            (4 + size + len(body)).to_bytes(4, "big"),
            size.to_bytes(4, "big"),  # the first of these bytes is the serialization: JSON is 0
            head,
            body,
        )


def _safe(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


# ------------------------------------------------------------------------------------------ batch


def check_batch(messages: Sequence[Message]) -> None:
    """One topic, one kind; UsageError names the message that differs."""
    if not messages:
        raise UsageError("a batch must have at least one message")
    first = messages[0]
    if first.topic.startswith("%RETRY%"):
        raise UsageError("a batch can't go to a retry topic")
    for number, message in enumerate(messages):
        if message.topic != first.topic:
            raise UsageError(
                f"message {number} of the batch is for topic {message.topic!r}, the first one for "
                f"{first.topic!r}: a batch has one topic"
            )
        if message.delay_level or message.deliver_at is not None:
            raise UsageError(f"message {number} of the batch is delayed, which batches can't be")
        if message.waits_for_storage != first.waits_for_storage:
            raise UsageError(f"message {number} of the batch differs in waits_for_storage")


def batch_body(messages: Iterable[Message], properties: Iterable[str]) -> bytes:
    return join_batch(
        Piece(message.flag, bytes(message.body), text)
        for message, text in zip(messages, properties, strict=True)
    )


def split_batch(
    messages: Iterable[Message], *, most_bytes: int = 1024 * 1024, most_count: int = 1000
) -> Iterator[list[Message]]:
    """Cut many messages into batches that are small enough to send, in their order, by topic.

    >>> for batch in split_batch(messages):
    ...     producer.send_batch(batch)
    """
    batch: list[Message] = []
    size = 0
    for message in messages:
        own = _BATCH_HEAD.size + len(message.body) + 2 + len(properties_of(message, "0" * 32)) * 2
        is_other = bool(batch) and batch[0].topic != message.topic
        if batch and (is_other or size + own > most_bytes or len(batch) >= most_count):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += own
    if batch:
        yield batch
