"""The records of a transaction: halves, their copies, and the op records that end them.

Owns: what these carry and how copies of one half are told. One rule: what is said here is what
RocketMQ writes and reads; half.py decides when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.broker import names
from cometmq.broker.delay import with_real_place
from cometmq.errors import MessageIllegal
from cometmq.message import NewMessage, StoredMessage
from cometmq.wire import properties, record
from cometmq.wire.codes import TRANSACTION_MASK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cometmq.broker.broker import Broker
    from cometmq.store.store import Store

OP_TAG = "d"
ROOM_BYTES = 128  # of properties, for what copies of a half carry in addition
_OURS = (properties.CHECK_TIMES, properties.FIRST_HALF, properties.TRANSACTION_ID)
_FOR_EVER_MS = 1 << 62
MOST_FOUND = 64  # copies of a half looked at, the newest; the store returns no more


def as_half(message: NewMessage, unique_key: str) -> None:
    """Turn a message into a half: to the half topic, with its real place in its properties.

    MessageIllegal if its properties leave no room for what copies of it carry.
    """
    text = message.properties
    if any(name in text for name in _OURS) or not text.endswith(properties.VALUE_END):
        table = properties.parse(text)
        for name in _OURS:  # ours to say; a producer that passes a message on may carry them
            table.pop(name, None)
        text = properties.build(table)
    text = properties.put(text, properties.TRANSACTION_ID, unique_key)
    text = with_real_place(text, message.topic, message.queue_id)
    size = len(text.encode("utf-8"))
    if size > properties.MAX_PROPERTIES_BYTES - ROOM_BYTES:
        raise MessageIllegal(
            f"properties of a transactional message of {size} bytes, at most "
            f"{properties.MAX_PROPERTIES_BYTES - ROOM_BYTES}"
        )
    message.properties = text
    message.sys_flag &= ~TRANSACTION_MASK
    message.topic = names.HALF_TOPIC
    message.queue_id = 0


def immunity_ms(text: str, timeout_ms: int) -> int:
    """How long a half is not asked about that says so itself; never shorter than for others."""
    return max(number(text, 0) * 1000, timeout_ms)


def op_record(broker: Broker, offsets: list[int], now_ms: int) -> NewMessage:
    text = str(offsets[0]) if len(offsets) == 1 else "".join(f"{one}," for one in offsets)
    return NewMessage(
        topic=names.OP_TOPIC,
        queue_id=0,
        body=text.encode("ascii"),
        properties=properties.build({properties.TAGS: OP_TAG}),
        born_ms=now_ms,
        born_host=broker.store_host,
        store_host=broker.store_host,
    )


def op_offsets(stored: StoredMessage) -> Iterator[int]:
    """The halves that an op record ends."""
    if properties.get(stored.properties, properties.TAGS) != OP_TAG:
        return
    for piece in stored.body.decode("ascii", "replace").split(","):
        offset = number(piece.strip(), -1)
        if offset >= 0:
            yield offset


def first_copy(half: StoredMessage) -> int:
    """The queue offset of the first copy of a half."""
    return number(properties.get(half.properties, properties.FIRST_HALF), half.queue_offset)


def is_linked(half: StoredMessage) -> bool:
    """Whether a half is the first, or names the first."""
    text = half.properties
    return properties.has(text, properties.FIRST_HALF) or not properties.has(
        text, properties.CHECK_TIMES
    )


def newest_copy(store: Store, half: StoredMessage) -> int:
    """The queue offset of the newest copy of a half that its key finds."""
    first, newest = first_copy(half), half.queue_offset
    for one in with_key_of(store, names.HALF_TOPIC, half):
        if first_copy(one) == first:
            newest = max(newest, one.queue_offset)
    return newest


def with_key_of(store: Store, topic: str, half: StoredMessage) -> Iterator[StoredMessage]:
    """Messages of a topic with the unique key of a half."""
    key = properties.get(half.properties, properties.UNIQUE_KEY)
    if key:
        found = store.find_by_key(topic, key, MOST_FOUND, 0, _FOR_EVER_MS, is_unique=True)
        for raw in found.records:
            yield record.decode(raw)


def number(text: str | None, default: int) -> int:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 19
    return int(text) if text is not None and is_number else default
