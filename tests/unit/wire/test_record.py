"""Records: both versions, both kinds of host, and bytes that only look like one."""

from __future__ import annotations

import struct

import pytest

from cometmq.errors import BodyError, RecordCorrupt, UsageError
from cometmq.message import NewMessage
from cometmq.wire import record
from cometmq.wire.message_id import pack_host, unpack_host
from cometmq.wire.record import Blank, Piece, Scan

V4 = pack_host("10.1.2.3", 10911)
V6 = pack_host("2001:db8::1", 10911)


def written(message: NewMessage, queue_offset: int = 7, log_offset: int = 1 << 40) -> bytes:
    encoded = record.prepare(message)
    buffer = bytearray(encoded.size)
    record.write(
        memoryview(buffer),
        0,
        encoded,
        queue_offset=queue_offset,
        log_offset=log_offset,
        store_ms=99,
    )
    return bytes(buffer)


def message(**changes: object) -> NewMessage:
    fields: dict[str, object] = {
        "topic": "T",
        "queue_id": 1,
        "body": b"abc",
        "properties": "K\x01v",
    }
    return NewMessage(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("store", [V4, V6])
@pytest.mark.parametrize("born", [V4, V6])
def test_hosts_decide_the_two_bits_and_the_layout(born: bytes, store: bytes) -> None:
    raw = written(message(born_host=born, store_host=store, sys_flag=0x30 | 0x301))
    assert len(raw) == 91 + len(born) + len(store) - 16 + 1 + 3 + 3
    (flag,) = struct.unpack_from(">i", raw, 36)
    assert flag == 0x301 | (0x10 if len(born) == 20 else 0) | (0x20 if len(store) == 20 else 0)
    found = record.decode(raw, verify_crc=True)
    assert (found.born_host, found.store_host, found.sys_flag) == (born, store, flag)
    assert unpack_host(found.store_host)[1] == 10911
    assert (found.body, found.store_ms, found.queue_offset) == (b"abc", 99, 7)
    assert found.log_offset == 1 << 40


@pytest.mark.parametrize(
    ("topic", "magic"),
    [
        ("t" * 127, 0xDAA320A7),
        ("t" * 128, 0xDAA320AB),
        ("é" * 63, 0xDAA320A7),
        ("é" * 64, 0xDAA320AB),
        ("t" * 300, 0xDAA320AB),
    ],
)
def test_version_follows_the_bytes_of_the_topic(topic: str, magic: int) -> None:
    raw = written(message(topic=topic))
    assert struct.unpack_from(">I", raw, 4) == (magic,)
    assert record.decode(raw).topic == topic


@pytest.mark.parametrize("changes", [{"properties": "p" * 32768}, {"topic": "t" * 32768}])
def test_text_beyond_its_length_field_is_refused_before_a_byte_is_written(
    changes: dict[str, str],
) -> None:
    with pytest.raises(UsageError, match="32768 bytes; at most 32767"):
        record.prepare(message(**changes))
    shorter = {name: text[:-1] for name, text in changes.items()}
    found = record.decode(written(message(**shorter)))
    assert {name: getattr(found, name) for name in shorter} == shorter


def test_scan_tells_what_a_walk_needs() -> None:
    raw = written(message(topic="Tä", properties="TAGS\x01x\x02"))
    found = record.scan(b"\xff" * 9 + raw, 9, 9 + len(raw), verify_crc=True)
    assert found == Scan(9, len(raw), 1, 7, 1 << 40, 0, 99, "Tä", "TAGS\x01x\x02")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(kind: type) -> None:
    raw = written(message())
    buffer = kind(raw)
    assert isinstance(record.scan(buffer, 0, len(raw), verify_crc=True), Scan)
    assert record.decode(buffer, verify_crc=True) == record.decode(raw)
    assert type(record.decode(buffer).body) is bytes


def test_every_torn_tail_is_no_record() -> None:
    raw = written(message())
    for end in range(len(raw)):
        assert record.scan(raw, 0, end, verify_crc=False) is None
    assert record.scan(raw, 0, len(raw) + 0, verify_crc=False) is not None


def test_zeros_are_no_record() -> None:
    assert record.scan(bytes(200), 0, 200, verify_crc=False) is None


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 90),
        (0, 0),
        (0, -1),
        (0, 2**31 - 1),
        (4, 0x12345678),
        (36, 0x10),
        (36, 0x20),
        (84, -1),
        (84, 4),
        (84, 2),
        (84, 2**31 - 1),
    ],
)
def test_lengths_that_contradict_each_other(at: int, value: int) -> None:
    raw = bytearray(written(message()))
    struct.pack_into(">i", raw, at, value)
    assert record.scan(raw, 0, len(raw), verify_crc=False) is None
    with pytest.raises(RecordCorrupt):
        record.decode(raw)


@pytest.mark.parametrize("size", [-1, 0, 2, 4])
def test_properties_must_fill_the_record_exactly(size: int) -> None:
    raw = bytearray(written(message()))
    struct.pack_into(">h", raw, len(raw) - 5, size)
    assert record.scan(raw, 0, len(raw), verify_crc=False) is None
    struct.pack_into(">h", raw, len(raw) - 5, 3)
    assert isinstance(record.scan(raw, 0, len(raw), verify_crc=False), Scan)


def test_a_body_that_fails_its_crc() -> None:
    raw = bytearray(written(message()))
    raw[88] ^= 1
    assert record.scan(raw, 0, len(raw), verify_crc=True) is None
    assert isinstance(record.scan(raw, 0, len(raw), verify_crc=False), Scan)


def test_a_topic_that_is_not_utf8_is_read_with_marks() -> None:
    """The record is whole: what follows it can be found, and its body be read."""
    raw = bytearray(written(message()))
    raw[92] = 0xFF
    found = record.scan(raw, 0, len(raw), verify_crc=True)
    assert isinstance(found, Scan)
    assert found.topic == record.decode(raw).topic == "\ufffd"


def test_properties_that_are_not_utf8_are_read_with_marks() -> None:
    raw = bytearray(written(message()))
    raw[-1] = 0xFF
    found = record.decode(raw)
    assert found.properties == "K\x01�"


def test_blank_ends_a_file() -> None:
    buffer = bytearray(100)
    record.write_blank(buffer, 40, 60)
    assert record.scan(buffer, 40, 100, verify_crc=True) == Blank(60)
    assert buffer[40:48] == struct.pack(">iI", 60, 0xCBD43194)
    assert record.scan(buffer, 40, 99, verify_crc=True) is None, "longer than what is there"
    record.write_blank(buffer, 92, 8)
    assert record.scan(buffer, 92, 100, verify_crc=True) == Blank(8)
    assert record.scan(buffer, 93, 100, verify_crc=True) is None
    record.write_blank(buffer, 0, 7)
    assert record.scan(buffer, 0, 100, verify_crc=True) is None


def test_a_pull_body_is_records_back_to_back() -> None:
    bodies = [b"", b"x", b"y" * 1000]
    raw = b"".join(written(message(body=body)) for body in bodies)
    assert [one.body for one in record.decode_all(raw)] == bodies
    assert record.decode_all(b"") == []
    with pytest.raises(RecordCorrupt):
        record.decode_all(raw[:-1])
    with pytest.raises(RecordCorrupt):
        record.decode(raw, len(raw))


# ------------------------------------------------------------------------------------------ batch


def test_batch_layout() -> None:
    body = record.join_batch([Piece(5, b"hello", "A\x01b\x02"), Piece(0, b"", "")])
    assert body == bytes.fromhex(
        "0000001F 00000000 00000000 00000005 00000005 68656C6C6F 0004 41016202"
        "00000016 00000000 00000000 00000000 00000000 0000"
    )
    assert list(record.split_batch(body)) == [Piece(5, b"hello", "A\x01b\x02"), Piece(0, b"", "")]
    assert list(record.split_batch(b"")) == []


def piece(size: int, body_size: int, tail: bytes) -> bytes:
    return struct.pack(">iiiii", size, 0, 0, 0, body_size) + tail


@pytest.mark.parametrize(
    "body",
    [
        b"\0",
        bytes(19),
        bytes(22),
        piece(-1, 0, b"\0\0"),
        piece(21, 0, b"\0\0"),
        piece(23, 0, b"\0\0"),
        piece(22, 1, b"\0\0"),
        piece(22, -1, b"\0\0"),
        piece(22, 2**31 - 1, b"\0\0"),
        piece(22, 0, b"\0\1"),
        piece(23, 0, b"\0\0x"),
        piece(23, 0, b"\xff\xffx"),
        piece(23, 0, b"\0\1\xff"),
        piece(22, 0, b"\0\0") + b"\0",
    ],
)
def test_batch_that_does_not_add_up(body: bytes) -> None:
    with pytest.raises(BodyError, match="batch"):
        list(record.split_batch(body))


def test_batch_properties_have_their_limit() -> None:
    with pytest.raises(UsageError, match="32767"):
        record.join_batch([Piece(0, b"", "p" * 32768)])
