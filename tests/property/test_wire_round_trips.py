"""What is written is read again, whatever it holds; and however the bytes are cut on their way."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.message import NewMessage
from cometmq.wire import bodies, fastjson, message_id, properties, record, strangers
from cometmq.wire import headers as h
from cometmq.wire.codes import LANGUAGES, RequestCode
from cometmq.wire.frame import (
    JSON,
    MAX_FRAME_BYTES,
    ROCKETMQ,
    Frame,
    FrameReader,
    decode_frame,
    encode_frame,
)
from cometmq.wire.hashing import java_hash
from cometmq.wire.record import Piece

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=40) | st.text("\x00\x01\x02\n\"'\\/{}[]:,$ é中😀\u2028\ufffd", max_size=12)
EXT = st.dictionaries(TEXT, TEXT, max_size=6)
BODY = st.binary(max_size=60)
WIDE = sorted(int(code) for code in RequestCode if code > 0x7FFF)
WRAPPED = {code & 0xFFFF for code in WIDE}
LANGUAGE = st.integers(0, len(LANGUAGES) - 1)


def frames_of(serialize: int) -> st.SearchStrategy[Frame]:
    is_json = serialize == JSON
    return st.builds(
        Frame,
        code=INT32 if is_json else INT16.filter(lambda code: code not in WRAPPED),
        opaque=INT32,
        flag=INT32,
        language=LANGUAGE,
        version=INT32 if is_json else INT16,
        remark=st.none() | (TEXT if is_json else TEXT.filter(bool)),
        ext=EXT,
        body=BODY,
        serialize=st.just(serialize),
    )


FRAMES = frames_of(JSON) | frames_of(ROCKETMQ)


@given(FRAMES)
@settings(max_examples=300, deadline=None)
def test_frame(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@given(st.sampled_from(WIDE), st.sampled_from([JSON, ROCKETMQ]))
@settings(deadline=None)
def test_wide_request_codes(code: int, serialize: int) -> None:
    assert decode_frame(encode_frame(Frame(code, serialize=serialize))).code == code


def fed(pieces: list[bytes], limit: int = MAX_FRAME_BYTES) -> tuple[list[Frame], str]:
    """The frames, and the error as text: two errors don't compare."""
    reader = FrameReader(limit)
    found = [frame for piece in pieces for frame in reader.feed(piece)]
    return found, repr(reader.error)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


TAIL = (
    st.just(b"")
    | st.binary(max_size=30)
    | st.builds(lambda n, rest: struct.pack(">i", n) + rest, INT32, st.binary(max_size=20))
    | st.builds(
        lambda kind, head: struct.pack(">iI", 4 + len(head), kind << 24 | len(head)) + head,
        st.integers(0, 3),
        st.binary(max_size=40) | st.sampled_from([b"{", b'{"code":1}', b"{}", b"[]"]),
    )
)


@given(st.lists(FRAMES, max_size=4), TAIL, st.lists(st.integers(0, 10_000), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_cut_gives_the_same_frames_and_the_same_error(
    frames: list[Frame], tail: bytes, places: list[int]
) -> None:
    data = b"".join(encode_frame(frame) for frame in frames) + tail
    whole = fed([data])
    assert whole[0][: len(frames)] == frames
    assert fed(cut(data, places)) == whole
    assert fed([data[n : n + 1] for n in range(len(data))]) == whole


@given(FRAMES, st.integers(4, 200))
@settings(deadline=None)
def test_limit_means_the_same_for_any_cut(frame: Frame, limit: int) -> None:
    raw = encode_frame(frame)
    found, error = fed([raw], limit)
    assert (found == [frame]) == (len(raw) <= limit)
    assert (error == "None") == (len(raw) <= limit)
    assert fed([raw[n : n + 1] for n in range(len(raw))], limit) == (found, error)


# ---------------------------------------------------------------------------------------- records

HOST = st.builds(
    lambda ip, port: message_id.pack_host(str(ip), port), st.ip_addresses(), st.integers(0, 65535)
)
MESSAGES = st.builds(
    NewMessage,
    topic=st.text(max_size=30) | st.text("té😀", min_size=60, max_size=200),
    queue_id=INT32,
    body=BODY,
    properties=TEXT,
    flag=INT32,
    sys_flag=INT32,
    born_ms=INT64,
    born_host=HOST,
    store_host=HOST,
    reconsume_times=INT32,
    prepared_offset=INT64,
)


@given(MESSAGES, INT64, INT64, INT64, st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_record(
    message: NewMessage, queue_offset: int, log_offset: int, store_ms: int, at: int
) -> None:
    encoded = record.prepare(message)
    buffer = bytearray(b"\x55" * (at + encoded.size + 9))
    record.write(
        buffer, at, encoded, queue_offset=queue_offset, log_offset=log_offset, store_ms=store_ms
    )
    end = at + encoded.size
    assert buffer[:at] == b"\x55" * at
    assert buffer[end:] == b"\x55" * 9
    found = record.decode(buffer, at, verify_crc=True)
    for name in NewMessage.__struct_fields__:
        if name != "sys_flag":
            assert getattr(found, name) == getattr(message, name), name
    assert found.sys_flag & ~0x30 == message.sys_flag & ~0x30
    assert bool(found.sys_flag & 0x10) == (len(message.born_host) == 20)
    assert bool(found.sys_flag & 0x20) == (len(message.store_host) == 20)
    assert (found.queue_offset, found.log_offset) == (queue_offset, log_offset)
    assert (found.store_ms, found.size) == (store_ms, encoded.size)
    seen = record.scan(memoryview(buffer), at, end, verify_crc=True)
    assert isinstance(seen, record.Scan)
    assert (seen.topic, seen.properties, seen.size) == (
        message.topic,
        message.properties,
        encoded.size,
    )
    assert record.scan(buffer, at, end - 1, verify_crc=False) is None


@given(MESSAGES, st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_record_is_told_alike_by_all_who_read_it(
    message: NewMessage, data: st.DataObject
) -> None:
    encoded = record.prepare(message)
    buffer = bytearray(encoded.size)
    record.write(buffer, 0, encoded, queue_offset=1, log_offset=2, store_ms=3)
    where = data.draw(st.integers(0, encoded.size - 1))
    buffer[where] ^= data.draw(st.integers(0, 255))
    seen = record.scan(buffer, 0, len(buffer), verify_crc=True)
    whole = record.decode_at(memoryview(buffer), 0, len(buffer), verify_crc=True)
    if not isinstance(seen, record.Scan):
        assert whole is None
    else:
        assert whole is not None
        for name in ("topic", "properties", "size", "queue_id", "queue_offset", "log_offset"):
            assert getattr(whole, name) == getattr(seen, name), name
    unchecked = record.scan(buffer, 0, len(buffer), verify_crc=False)
    found = record.properties_of(memoryview(buffer), 0, len(buffer), 2)
    if isinstance(unchecked, record.Scan) and unchecked.log_offset == 2:
        assert found == unchecked.properties
    elif found is not None:  # only the topic's bytes were not looked at
        topic_at = 88 + len(message.body)
        assert topic_at <= where < encoded.size


@given(st.lists(st.builds(Piece, flag=INT32, body=BODY, properties=TEXT), max_size=6))
@settings(deadline=None)
def test_batch(pieces: list[Piece]) -> None:
    assert list(record.split_batch(record.join_batch(pieces))) == pieces


PLAIN = st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), min_size=1, max_size=9)


@given(st.dictionaries(PLAIN, PLAIN, max_size=6))
@settings(deadline=None)
def test_properties(table: dict[str, str]) -> None:
    text = properties.build(table)
    assert properties.parse(text) == table
    assert properties.parse(text[:-1]) == table
    for name, value in table.items():
        assert properties.get(text, name) == value
        assert properties.has(text, name)


@given(st.text("ab\x01\x02", max_size=16), st.sampled_from(["a", "b", "ab", "aa"]))
@settings(max_examples=400, deadline=None)
def test_one_property_is_what_the_whole_string_says(text: str, name: str) -> None:
    assert properties.get(text, name) == properties.parse(text).get(name)


@given(st.ip_addresses(), st.integers(0, 65535), INT64)
@settings(deadline=None)
def test_offset_id(ip: Any, port: int, log_offset: int) -> None:
    packed = message_id.pack_host(str(ip), port)
    text = message_id.offset_id(packed, log_offset)
    assert text == text.upper()
    assert message_id.parse_offset_id(text) == (str(ip), port, log_offset)
    assert message_id.unpack_host(packed) == (str(ip), port)


@given(st.text(max_size=20))
@settings(deadline=None)
def test_java_hash_is_the_definition(text: str) -> None:
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack(">H", units):
        value = 31 * value + unit
    assert java_hash(text) == (value + 2**31) % 2**32 - 2**31


# ---------------------------------------------------------------------------------------- headers

HEADERS = [
    kind
    for kind in vars(h).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == h.__name__
]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": INT64,
    "Int32": INT32,
    "str": TEXT,
    "bool": st.booleans(),
}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_header(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(HEADERS))
    values = {}
    for field in msgspec.structs.fields(kind):
        words = str(kind.__annotations__[field.name]).split(" | ")
        strategy = VALUES[words[0]]
        values[field.name] = data.draw(strategy | st.none() if "None" in words else strategy)
    header = kind(**values)
    ext = h.to_ext(header)
    assert all(type(key) is str and type(value) is str for key, value in ext.items())
    found = h.parse(kind, ext)
    for field in msgspec.structs.fields(kind):
        value = values[field.name]
        assert getattr(found, field.name) == (field.default if value is None else value)
    if isinstance(header, h.SendHeader):
        assert h.parse_send_v2(h.send_v2_ext(header)) == header


# --------------------------------------------------------------------------------------- fastjson

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
OBJECT_KEYS = st.dictionaries(TEXT, st.integers() | TEXT, max_size=3).map(fastjson.ObjectKey)


def without_reference(table: dict[Any, Any]) -> bool:
    return "$ref" not in table


JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXT, inner, max_size=4).filter(without_reference)
        | st.dictionaries(OBJECT_KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
@settings(max_examples=300, deadline=None)
def test_fastjson(value: Any) -> None:
    assert fastjson.loads(fastjson.dumps(value)) == value


@given(st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(TEXT, x), max_leaves=9))
@settings(deadline=None)
def test_fastjson_by_hand_reads_what_msgspec_reads(value: Any) -> None:
    raw = msgspec.json.encode(value)
    assert fastjson._read_by_hand(raw) == msgspec.json.decode(raw)


@given(st.dictionaries(INT64, TEXT, max_size=4), st.booleans())
@settings(deadline=None)
def test_fastjson_integer_keys(table: dict[int, str], bare: bool) -> None:
    found = fastjson.loads(fastjson.dumps(table, bare_int_keys=bare))
    assert found == {str(key): value for key, value in table.items()}


@given(st.dictionaries(TEXT, TEXT | st.integers(-(2**53) + 1, 2**53 - 1) | st.booleans()))
@settings(deadline=None)
def test_fastjson_standard_mode(table: dict[str, Any]) -> None:
    raw = fastjson.dumps(table, standard=True)
    assert raw.isascii()
    assert msgspec.json.decode(raw) == table


# ----------------------------------------------------------------------------------------- bodies

TOPIC_CONFIGS = st.builds(
    bodies.TopicConfig,
    topicName=TEXT,
    readQueueNums=INT32,
    writeQueueNums=INT32,
    perm=INT32,
    topicSysFlag=INT32,
    order=st.booleans(),
    attributes=EXT,
)


@given(
    st.builds(bodies.DataVersion, INT64, INT64, INT64),
    st.dictionaries(TEXT, TOPIC_CONFIGS, max_size=3),
    st.lists(TEXT, max_size=2).map(tuple),
)
@settings(deadline=None)
def test_registration(
    version: bodies.DataVersion, topics: dict[str, bodies.TopicConfig], servers: tuple[str, ...]
) -> None:
    registered = bodies.Registration(version, topics, servers)
    assert bodies.registration(bodies.encode_registration(registered), 479) == registered


# -------------------------------------------------------------------------------------- strangers


@given(st.integers(4, 200 * 1024 * 1024), st.binary(max_size=12))
@settings(deadline=None)
def test_no_length_of_a_frame_is_taken_for_a_stranger(length: int, rest: bytes) -> None:
    assert strangers.recognise(struct.pack(">i", length) + rest) is None


@given(FRAMES)
@settings(deadline=None)
def test_no_frame_is_taken_for_a_stranger(frame: Frame) -> None:
    assert strangers.recognise(encode_frame(frame)[:16]) is None


@given(
    st.sampled_from(
        [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n", b"PROXY TCP4 1.2.3", b"POST /x HTTP/1.1"]
    )
    | st.builds(lambda rest: b"\x16\x03\x01" + rest, st.binary(min_size=13, max_size=13))
    | st.just(b"\r\n\r\n\x00\r\nQUIT\n!\x11\x00\x0c")
)
@settings(deadline=None)
def test_every_stranger_is_an_error_for_the_frame_reader(first: bytes) -> None:
    reader = FrameReader()
    assert reader.feed(first) == []
    assert reader.error is not None
    assert strangers.recognise(first) is not None
