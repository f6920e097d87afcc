"""A stored message: the record of the commit log, which is also the unit of a pull body.

     0 i32 total size        28 i64 log offset (its own)     72 i32 reconsume times   (IPv4 hosts)
     4 i32 magic             36 i32 sysFlag                  76 i64 prepared offset
     8 i32 body CRC          40 i64 born ms                  84 i32 body length, body
    12 i32 queue id          48 born host: ip, i32 port         topic: V1 u8 / V2 u16 length, UTF-8
    16 i32 flag              56 i64 store ms                    properties: i16 length, UTF-8
    20 i64 queue offset      64 store host: ip, i32 port

An IPv6 host takes 20 bytes instead of 8 and is told by a bit of sysFlag. V2 (magic ...AB) differs
only in the topic's length field and is written for topics above 127 bytes. A commit-log file ends
with a blank record: i32 bytes left, i32 blank magic, then anything.

One rule: a message is encoded here once, straight into the log's memory, and travels as these bytes
ever after. Offsets into the log and whether a record may stand there are the store's business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from cometmq.errors import BodyError, RecordCorrupt, UsageError
from cometmq.message import LogOffset, NewMessage, QueueOffset, StoredMessage
from cometmq.wire.codes import SysFlag
from cometmq.wire.hashing import body_crc
from cometmq.wire.properties import MAX_PROPERTIES_BYTES

MAGIC_V1 = 0xDAA320A7 - 2**32
MAGIC_V2 = 0xDAA320AB - 2**32
MAGIC_BLANK = 0xCBD43194 - 2**32
BLANK_BYTES = 8  # what must stay free at the end of a log file
MAX_TOPIC_V1_BYTES = 127
MAX_TOPIC_BYTES = 32767  # V2's length is a signed 16-bit field for Java
MIN_RECORD_BYTES = 91

Buffer = bytes | bytearray | memoryview

_V4 = struct.Struct(">iiiiiqqiq8sq8siqi")
_HEAD = struct.Struct(">iiiiiqqiq")
_TAIL = struct.Struct(">iqi")
_LENGTHS = struct.Struct(">ii20xqi44xi")  # size, magic, log offset, sysFlag, body length
_I64 = struct.Struct(">q")
_I32 = struct.Struct(">i")
_I16 = struct.Struct(">h")
_BLANK = struct.Struct(">ii")
# Plain integers: `int & IntFlag` builds an enum member and doubles the time of a scan.
_BORN_V6 = SysFlag.BORN_HOST_V6
_STORE_V6 = SysFlag.STORE_HOST_V6
_V6_BITS = _BORN_V6 | _STORE_V6
assert _V4.size == 88


class Encoded(msgspec.Struct, gc=False):
    """A new message whose variable parts are bytes and whose size is known."""

    message: NewMessage
    topic: bytes
    properties: bytes
    size: int


def prepare(message: NewMessage) -> Encoded:
    """Encode the text parts and compute the record's size; nothing is written yet.

    UsageError if a text is too long for its length field: nothing may fail halfway in `write`.
    """
    topic = message.topic.encode("utf-8")
    properties = message.properties.encode("utf-8")
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise UsageError(f"properties of {len(properties)} bytes; at most {MAX_PROPERTIES_BYTES}")
    if len(topic) > MAX_TOPIC_BYTES:
        raise UsageError(f"topic of {len(topic)} bytes; at most {MAX_TOPIC_BYTES}")
    size = MIN_RECORD_BYTES + len(message.body) + len(topic) + len(properties)
    size += len(message.born_host) + len(message.store_host) - 16
    if len(topic) > MAX_TOPIC_V1_BYTES:
        size += 1
    return Encoded(message, topic, properties, size)


def write(
    buffer: memoryview | bytearray,
    at: int,
    encoded: Encoded,
    *,
    queue_offset: int,
    log_offset: int,
    store_ms: int,
) -> None:
    """Write one record at `at`. The caller made sure that `encoded.size` bytes are free there."""
    message = encoded.message
    body, topic, properties = message.body, encoded.topic, encoded.properties
    is_v2 = len(topic) > MAX_TOPIC_V1_BYTES
    magic = MAGIC_V2 if is_v2 else MAGIC_V1
    sys_flag = message.sys_flag & ~_V6_BITS
    if len(message.born_host) == 8 == len(message.store_host):
        _V4.pack_into(
            buffer,
            at,
            encoded.size,
            magic,
            body_crc(body),
            message.queue_id,
            message.flag,
            queue_offset,
            log_offset,
            sys_flag,
            message.born_ms,
            message.born_host,
            store_ms,
            message.store_host,
            message.reconsume_times,
            message.prepared_offset,
            len(body),
        )
        end = at + 88
    else:
        assert len(message.born_host) in (8, 20), "hosts are packed: ip, then port as i32"
        assert len(message.store_host) in (8, 20), "hosts are packed: ip, then port as i32"
        if len(message.born_host) == 20:
            sys_flag |= _BORN_V6
        if len(message.store_host) == 20:
            sys_flag |= _STORE_V6
        head = _HEAD.pack(
            encoded.size,
            magic,
            body_crc(body),
            message.queue_id,
            message.flag,
            queue_offset,
            log_offset,
            sys_flag,
            message.born_ms,
        )
        tail = _TAIL.pack(message.reconsume_times, message.prepared_offset, len(body))
        whole = b"".join((head, message.born_host, _I64.pack(store_ms), message.store_host, tail))
        end = at + len(whole)
        buffer[at:end] = whole
    stop = end + len(body)
    buffer[end:stop] = body
    width = 2 if is_v2 else 1
    rest = b"".join(
        (len(topic).to_bytes(width, "big"), topic, len(properties).to_bytes(2, "big"), properties)
    )
    last = stop + len(rest)
    assert last == at + encoded.size
    buffer[stop:last] = rest


def write_blank(buffer: memoryview | bytearray, at: int, left_bytes: int) -> None:
    """Close a log file: `left_bytes` from here to its end hold no more records."""
    _BLANK.pack_into(buffer, at, left_bytes, MAGIC_BLANK)


class Scan(msgspec.Struct, gc=False):
    """What a walk over the log needs of one record; body and hosts are only skipped."""

    at: int
    size: int
    queue_id: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    store_ms: int
    topic: str
    properties: str


class Blank(msgspec.Struct, gc=False):
    """The end of a log file's content."""

    size: int


def scan(buffer: Buffer, at: int, end: int, *, verify_crc: bool) -> Scan | Blank | None:
    """Read the record at `at`, in bytes that end at `end`.

    None where no whole, self-consistent record stands: zeros, a torn tail, wrong magic, lengths
    that contradict each other, a body that fails its CRC.
    """
    if end - at < BLANK_BYTES:
        return None
    size, magic = _BLANK.unpack_from(buffer, at)
    if magic == MAGIC_BLANK:
        return Blank(size) if BLANK_BYTES <= size <= end - at else None
    if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_RECORD_BYTES <= size <= end - at:
        return None
    _, _, crc, queue_id, _, queue_offset, log_offset, sys_flag, _ = _HEAD.unpack_from(buffer, at)
    store_at = at + (68 if sys_flag & _BORN_V6 else 56)
    (store_ms,) = _I64.unpack_from(buffer, store_at)
    body_at = store_at + (40 if sys_flag & _STORE_V6 else 28)
    stop = at + size
    if body_at + 4 > stop:
        return None
    (body_size,) = _I32.unpack_from(buffer, body_at)
    begin = body_at + 4
    topic_at = begin + body_size
    width = 2 if magic == MAGIC_V2 else 1
    if body_size < 0 or topic_at + width > stop:
        return None
    topic_size = int.from_bytes(buffer[topic_at : topic_at + width], "big")
    properties_at = topic_at + width + topic_size
    if properties_at + 2 > stop:
        return None
    (properties_size,) = _I16.unpack_from(buffer, properties_at)
    if properties_size < 0 or properties_at + 2 + properties_size != stop:
        return None
    if verify_crc and body_size and body_crc(memoryview(buffer)[begin:topic_at]) != crc:
        return None
    topic = str(buffer[topic_at + width : properties_at], "utf-8", "replace")
    properties = str(buffer[properties_at + 2 : stop], "utf-8", "replace")
    return Scan(at, size, queue_id, queue_offset, log_offset, sys_flag, store_ms, topic, properties)


def properties_of(buffer: Buffer, at: int, end: int, log_offset: int) -> str | None:
    """The property string of the record at `at`, if that is whole and says it stands at
    `log_offset`; its body is not checked. For filters, which read nothing else of a record."""
    if end - at < MIN_RECORD_BYTES:
        return None
    size, magic, own_offset, sys_flag, body_size = _LENGTHS.unpack_from(buffer, at)
    if magic != MAGIC_V1 or sys_flag & _V6_BITS:
        found = scan(buffer, at, end, verify_crc=False)
        return found.properties if type(found) is Scan and found.log_offset == log_offset else None
    stop, topic_at = at + size, at + 88 + body_size
    if own_offset != log_offset or stop > end or body_size < 0 or topic_at + 3 > stop:
        return None
    begin = topic_at + 3 + buffer[topic_at]
    if begin > stop or _I16.unpack_from(buffer, begin - 2)[0] != stop - begin:
        return None
    return str(buffer[begin:stop], "utf-8", "replace")


def decode(buffer: Buffer, at: int = 0, *, verify_crc: bool = False) -> StoredMessage:
    """One whole record to a message; RecordCorrupt if it isn't one."""
    found = decode_at(buffer, at, len(buffer), verify_crc=verify_crc)
    if found is None:
        raise RecordCorrupt(f"no valid record at byte {at} of {len(buffer)}")
    return found


def decode_at(buffer: Buffer, at: int, end: int, *, verify_crc: bool) -> StoredMessage | None:
    """As `decode`, in bytes that end at `end`; None where no whole record stands."""
    if end - at < MIN_RECORD_BYTES:
        return None
    (
        size,
        magic,
        crc,
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
    ) = _V4.unpack_from(buffer, at)
    if magic != MAGIC_V1 or sys_flag & _V6_BITS:
        return _decode_other(buffer, at, end, verify_crc=verify_crc)
    stop, topic_at = at + size, at + 88 + body_size
    if stop > end or body_size < 0 or topic_at + 3 > stop:
        return None
    begin = topic_at + 3 + buffer[topic_at]
    if begin > stop or _I16.unpack_from(buffer, begin - 2)[0] != stop - begin:
        return None
    body = bytes(buffer[at + 88 : topic_at])
    if verify_crc and body_size and body_crc(body) != crc:
        return None
    return StoredMessage(
        str(buffer[topic_at + 1 : begin - 2], "utf-8", "replace"),
        queue_id,
        queue_offset,
        log_offset,
        body,
        str(buffer[begin:stop], "utf-8", "replace"),
        flag,
        sys_flag,
        born_ms,
        born_host,
        store_ms,
        store_host,
        reconsume_times,
        prepared_offset,
        crc,
        size,
    )


def _decode_other(buffer: Buffer, at: int, end: int, *, verify_crc: bool) -> StoredMessage | None:
    """A record with IPv6 hosts or a long topic."""
    found = scan(buffer, at, end, verify_crc=verify_crc)
    if not isinstance(found, Scan):
        return None
    _, _, crc, _, flag, _, _, sys_flag, born_ms = _HEAD.unpack_from(buffer, at)
    born_end = at + (68 if sys_flag & _BORN_V6 else 56)
    store_end = born_end + 8 + (20 if sys_flag & _STORE_V6 else 8)
    reconsume_times, prepared_offset, body_size = _TAIL.unpack_from(buffer, store_end)
    body_at = store_end + _TAIL.size
    return StoredMessage(
        topic=found.topic,
        queue_id=found.queue_id,
        queue_offset=QueueOffset(found.queue_offset),
        log_offset=LogOffset(found.log_offset),
        body=bytes(buffer[body_at : body_at + body_size]),
        properties=found.properties,
        flag=flag,
        sys_flag=sys_flag,
        born_ms=born_ms,
        born_host=bytes(buffer[at + 48 : born_end]),
        store_ms=found.store_ms,
        store_host=bytes(buffer[born_end + 8 : store_end]),
        reconsume_times=reconsume_times,
        prepared_offset=prepared_offset,
        crc=crc,
        size=found.size,
    )


def decode_all(body: Buffer) -> list[StoredMessage]:
    """A pull body: records back to back."""
    found: list[StoredMessage] = []
    at = 0
    while at < len(body):
        message = decode(body, at)
        found.append(message)
        at += message.size
    return found


# ------------------------------------------------------------------------------------------ batch
# i32 size | i32 0 | i32 0 | i32 flag | i32 body length, body | i16 properties length, properties


class Piece(msgspec.Struct, gc=False):
    """One message inside a batch body."""

    flag: int
    body: bytes
    properties: str


_PIECE = struct.Struct(">iiiii")


def split_batch(body: bytes) -> Iterator[Piece]:
    """The messages of a batch request's body; BodyError if the lengths don't add up."""
    at, end = 0, len(body)
    while at < end:
        if end - at < _PIECE.size:
            raise BodyError(f"batch body ends inside a message at byte {at}")
        size, _, _, flag, body_size = _PIECE.unpack_from(body, at)
        begin = at + _PIECE.size
        stop = begin + body_size
        if body_size < 0 or size < _PIECE.size + 2 or at + size > end or stop + 2 > at + size:
            raise BodyError(f"batch message at byte {at} has lengths that contradict each other")
        (properties_size,) = _I16.unpack_from(body, stop)
        if properties_size < 0 or stop + 2 + properties_size != at + size:
            raise BodyError(f"batch message at byte {at} has a wrong properties length")
        try:
            properties = body[stop + 2 : at + size].decode("utf-8")
        except UnicodeDecodeError:
            raise BodyError(f"batch message at byte {at} has properties not in UTF-8") from None
        yield Piece(flag, body[begin:stop], properties)
        at += size


def join_batch(pieces: Iterable[Piece]) -> bytes:
    """Messages to a batch request's body; UsageError if properties are too long."""
    parts: list[bytes] = []
    for piece in pieces:
        properties = piece.properties.encode("utf-8")
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise UsageError(
                f"properties of {len(properties)} bytes; at most {MAX_PROPERTIES_BYTES}"
            )
        size = _PIECE.size + len(piece.body) + 2 + len(properties)
        parts += (
            _PIECE.pack(size, 0, 0, piece.flag, len(piece.body)),
            piece.body,
            _I16.pack(len(properties)),
            properties,
        )
    return b"".join(parts)
