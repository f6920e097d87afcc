"""The small types that every part of CometMQ shares.

Owns: the two kinds of offset and the name of a queue. One rule: nothing here knows bytes, disks
or sockets; everything else may import this file, this file imports nothing of ours.
"""

from __future__ import annotations

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
