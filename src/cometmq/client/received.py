"""Messages as a consumer gets them, cut out of a pull's body.

Owns: ReceivedMessage and how it is read. One rule: only what everybody needs is read at once; the
properties are taken apart when somebody asks for one.

Layout of a record: wire/record.py. Bodies that were compressed are whole again here.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import msgspec

from cometmq.client.compression import decompress
from cometmq.errors import RecordCorrupt
from cometmq.message import MessageQueue
from cometmq.wire import properties as props
from cometmq.wire import record
from cometmq.wire.codes import SysFlag
from cometmq.wire.message_id import offset_id, unpack_host

# With IPv4 hosts, which is nearly every record; the CRC, which is of the disk, is passed over.
_HEAD = struct.Struct(">ii4xiiqqiq8sq8siqi")
RETRY_PREFIX = "%RETRY%"
_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_MAGIC_V1 = 0xDAA320A7 - (1 << 32)


class ReceivedMessage(msgspec.Struct, gc=False, eq=False):
    """A message that was delivered.

    `topic` is the one it was sent to, also when it comes back from a group's retry topic.

    Not known to the garbage collector: it holds texts, numbers and bytes, so it is in no cycle.
    """

    broker: str
    stored_topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    body: bytes
    _text: str
    flag: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    size: int
    _topic: str = ""
    _properties: dict[str, str] | None = None
    queue_topic: str = ""
    """The stored topic without its namespace, if that is another name."""

    def __repr__(self) -> str:
        return (
            f"<ReceivedMessage {self.topic} {self.broker}/{self.queue_id} @{self.queue_offset} "
            f"id={self.message_id} tags={self.tags!r} {len(self.body)} bytes>"
        )

    @property
    def topic(self) -> str:
        return self._topic or self.stored_topic

    @topic.setter
    def topic(self, name: str) -> None:
        self._topic = name

    @property
    def properties(self) -> dict[str, str]:
        """All properties, RocketMQ's own included."""
        if self._properties is None:
            self._properties = props.parse(self._text)
        return self._properties

    @property
    def properties_text(self) -> str:
        """The properties as they are stored."""
        return self._text

    @property
    def tags(self) -> str:
        return self.properties.get(props.TAGS, "")

    @property
    def keys(self) -> list[str]:
        words = self.properties.get(props.KEYS, "")
        return [word for word in words.split(props.KEY_SEPARATOR) if word]

    @property
    def message_id(self) -> str:
        """The sender's unique id; of a message without one, the broker's."""
        return self.properties.get(props.UNIQUE_KEY) or self.offset_id

    @property
    def offset_id(self) -> str:
        """Broker and place in its log."""
        return offset_id(self.store_host, self.log_offset)

    @property
    def queue(self) -> MessageQueue:
        """The queue it was read from."""
        return MessageQueue(self.queue_topic or self.stored_topic, self.broker, self.queue_id)

    @property
    def sharding_key(self) -> str:
        return self.properties.get("__SHARDINGKEY", "")

    @property
    def born_time(self) -> datetime:
        """When its sender made it, by the sender's clock; UTC."""
        return datetime.fromtimestamp(self.born_ms / 1e3, UTC)

    @property
    def store_time(self) -> datetime:
        """When the broker stored it, by the broker's clock; UTC."""
        return datetime.fromtimestamp(self.store_ms / 1e3, UTC)

    @property
    def sender(self) -> tuple[str, int]:
        """Address and port that it was sent from."""
        return unpack_host(self.born_host)


def read_all(data: bytes, broker: str) -> list[ReceivedMessage]:
    """The messages of a pull's body; RecordCorrupt if it is not made of whole records."""
    found: list[ReceivedMessage] = []
    append = found.append
    unpack = _HEAD.unpack_from
    at, end = 0, len(data)
    topic_bytes, topic, is_retry = b"", "", False
    while at < end:
        if end - at < 91:
            raise RecordCorrupt(f"a pull's body ends inside a record at byte {at} of {end}")
        (
            size,
            magic,
            queue_id,
            flag,
            queue_offset,
            log_offset,
            sys_flag,
            born_ms,
            born_host,
            store_ms,
            store_host,
            reconsume_times,
            prepared_offset,
            body_size,
        ) = unpack(data, at)
        stop = at + size
        if magic != _MAGIC_V1 or sys_flag & _V6:
            append(_read_other(data, at, broker))
            if size < 91:
                raise RecordCorrupt(f"a record of {size} bytes at byte {at}")
            at = stop
            continue
        body_end = at + 88 + body_size
        if size < 91 or stop > end or body_size < 0 or body_end + 3 > stop:
            raise RecordCorrupt(f"a record at byte {at} has lengths that contradict each other")
        properties_at = body_end + 3 + data[body_end]
        raw_topic = data[body_end + 1 : properties_at - 2]
        if raw_topic != topic_bytes:
            topic_bytes, topic = raw_topic, raw_topic.decode("utf-8", "replace")
            is_retry = topic.startswith(RETRY_PREFIX)
        body = data[at + 88 : body_end]
        message = ReceivedMessage(
            broker,
            topic,
            queue_id,
            queue_offset,
            log_offset,
            decompress(body, sys_flag) if sys_flag & 1 else body,
            data[properties_at:stop].decode("utf-8", "replace"),
            flag,
            sys_flag,
            born_ms,
            born_host,
            store_ms,
            store_host,
            reconsume_times,
            prepared_offset,
            size,
        )
        if is_retry:
            message.topic = message.properties.get(props.RETRY_TOPIC, topic)
        append(message)
        at = stop
    return found


def _read_other(data: bytes, at: int, broker: str) -> ReceivedMessage:
    """A record with IPv6 hosts or a long topic."""
    one = record.decode(data, at)
    message = ReceivedMessage(
        broker,
        one.topic,
        one.queue_id,
        one.queue_offset,
        one.log_offset,
        decompress(one.body, one.sys_flag) if one.sys_flag & SysFlag.COMPRESSED else one.body,
        one.properties,
        one.flag,
        one.sys_flag,
        one.born_ms,
        one.born_host,
        one.store_ms,
        one.store_host,
        one.reconsume_times,
        one.prepared_offset,
        one.size,
    )
    if one.topic.startswith(RETRY_PREFIX):
        message.topic = message.properties.get(props.RETRY_TOPIC, one.topic)
    return message
