"""Values that a running Java RocketMQ produced (wire reference, section 11)."""

from __future__ import annotations

import pytest

from cometmq.message import NewMessage
from cometmq.wire import message_id, properties, record
from cometmq.wire.codes import JAVA
from cometmq.wire.frame import ROCKETMQ, Frame, decode_frame, encode_frame
from cometmq.wire.hashing import body_crc, index_hash, java_hash

BINARY_FRAME = bytes.fromhex(
    "000000250100002100690001910000000700000000000000000000000C0005746F7069630000000154"
)
RECORD = bytes.fromhex(
    "0000006BDAA320A73610A6860000000300000000000000000000000A0000000000001000000000000000018BCFE5"
    "68000A0000090000C3500000018BCFE568050A00000100002A9F0000000000000000000000000000000568656C6C"
    "6F0154000A54414753015461674102"
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("中文", 646394),
        ("😀x", 54959989),
        ("polygenelubricants", -2147483648),
        ("", 0),
    ],
)
def test_java_hash(text: str, value: int) -> None:
    assert java_hash(text) == value


def test_index_hash_is_never_negative() -> None:
    assert index_hash("TagA") == 2598919
    assert index_hash("polygenelubricants") == 0, "Java's abs of the smallest int stays negative"
    assert index_hash("polygenelubricantt") == 2147483647


def test_crc_has_its_top_bit_cleared() -> None:
    assert body_crc(b"hello") == 907060870
    assert body_crc(memoryview(b"hello")) == 907060870
    assert body_crc(b"b") == 0x71BEEFF9, "0x71BEEFF9 needs no clearing"
    assert body_crc(b"a") == 0xE8B7BE43 & 0x7FFFFFFF


def test_binary_frame_both_ways() -> None:
    frame = Frame(105, opaque=7, language=JAVA, version=401, ext={"topic": "T"}, serialize=ROCKETMQ)
    assert encode_frame(frame) == BINARY_FRAME
    assert decode_frame(BINARY_FRAME) == frame


def test_record_is_written_byte_for_byte() -> None:
    message = NewMessage(
        topic="T",
        queue_id=3,
        body=b"hello",
        properties="TAGS\x01TagA\x02",
        born_ms=1700000000000,
        born_host=message_id.pack_host("10.0.0.9", 50000),
        store_host=message_id.pack_host("10.0.0.1", 10911),
    )
    encoded = record.prepare(message)
    assert encoded.size == len(RECORD) == 107
    buffer = bytearray(b"\xee" * 120)
    record.write(buffer, 5, encoded, queue_offset=10, log_offset=4096, store_ms=1700000000005)
    assert buffer == b"\xee" * 5 + RECORD + b"\xee" * 8


def test_record_is_read_field_by_field() -> None:
    message = record.decode(RECORD, verify_crc=True)
    assert (message.topic, message.queue_id, message.body) == ("T", 3, b"hello")
    assert (message.queue_offset, message.log_offset) == (10, 4096)
    assert (message.born_ms, message.store_ms) == (1700000000000, 1700000000005)
    assert message_id.unpack_host(message.born_host) == ("10.0.0.9", 50000)
    assert message_id.unpack_host(message.store_host) == ("10.0.0.1", 10911)
    assert (message.flag, message.sys_flag, message.reconsume_times) == (0, 0, 0)
    assert (message.prepared_offset, message.crc, message.size) == (0, 907060870, 107)
    assert properties.parse(message.properties) == {"TAGS": "TagA"}


def test_offset_id_of_that_record() -> None:
    message = record.decode(RECORD)
    text = message_id.offset_id(message.store_host, message.log_offset)
    assert text == "0A00000100002A9F0000000000001000"
    assert message_id.parse_offset_id(text) == ("10.0.0.1", 10911, 4096)


def test_property_string() -> None:
    text = properties.build({"TAGS": "TagA"})
    assert text.encode() == bytes.fromhex("54414753015461674102")
    assert properties.parse(text) == {"TAGS": "TagA"}
