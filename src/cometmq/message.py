"""The small types that every part of CometMQ shares.

Owns: messages (as a user writes them, as the store keeps them), the two kinds of offset, the name
of a queue, and what a send came to. One rule: nothing here knows bytes, disks or sockets;
everything else may import this file, this file imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import NewType

import msgspec

LogOffset = NewType("LogOffset", int)
"""A position in bytes in the commit log; RocketMQ says physical offset."""

QueueOffset = NewType("QueueOffset", int)
"""A position in units in one consume queue: the n-th message of that queue."""


class MessageQueue(msgspec.Struct, frozen=True, order=True):
    """One queue of one topic on one broker, sorted the way RocketMQ's clients sort them."""

    topic: str
    broker: str
    queue_id: int


class Message(msgspec.Struct):
    """A message to send.

    >>> Message("orders", b'{"id": 1}', tags="paid", keys="order-1")

    `tags`: one tag, which consumers filter by. `keys`: words to find it by later, one text with
    spaces between them or a list. `sharding_key`: messages with the same one go to the same queue.
    `delay_level` (1 to 18) or `deliver_at`: not before. `ttl`: consumers get it within this time
    after it was stored (or delivered, if it was delayed), or not at all; CometMQ's brokers only.
    `unique_id`: made when it is sent unless
    you give one; a resent message keeps it, so that consumers can tell a duplicate.
    """

    topic: str
    body: bytes
    tags: str = ""
    keys: str | Sequence[str] = ""
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    sharding_key: str = ""
    delay_level: int = 0
    deliver_at: datetime | None = None
    flag: int = 0
    unique_id: str = ""
    waits_for_storage: bool = True
    """False: acknowledged without waiting for the disk or for replicas (property WAIT)."""
    ttl: timedelta | None = None


class SendStatus(Enum):
    """What "stored" means; all but SEND_OK are successes with a weaker promise."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class SendResult(msgspec.Struct, frozen=True):
    """Where a message went. `message_id` is its unique id (of a batch: all, joined by commas),
    `offset_id` tells broker and place in its log."""

    status: SendStatus
    message_id: str
    offset_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str = ""
    recall_handle: str = ""
    region: str = "DefaultRegion"
    is_traced: bool = True
    """False: the broker does not want it in the message trace (its traceOn)."""
    is_duplicate: bool = False
    """The broker had it already and stored nothing: these are the places of the first one."""


class NewMessage(msgspec.Struct, gc=False):
    """A message on its way into the store: everything but the offsets and the store time.

    Hosts are packed as records store them (ip bytes, then the port as i32).
    """

    topic: str
    queue_id: int
    body: bytes
    properties: str = ""
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 0
    born_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x00\x00"
    store_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
    reconsume_times: int = 0
    prepared_offset: int = 0


class StoredMessage(msgspec.Struct, gc=False):
    """A message as the store keeps it and as a consumer receives it."""

    topic: str
    queue_id: int
    queue_offset: QueueOffset
    log_offset: LogOffset
    body: bytes
    properties: str
    flag: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    crc: int
    size: int
