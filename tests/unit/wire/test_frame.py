"""Frames as the real peers write them, and what must not be taken for one."""

from __future__ import annotations

import json
import struct

import pytest

from cometmq.errors import FrameError, HeaderError
from cometmq.wire.codes import JAVA, OTHER, PYTHON, RequestCode
from cometmq.wire.frame import (
    JSON,
    MAX_FRAME_BYTES,
    ROCKETMQ,
    Frame,
    FrameReader,
    decode_frame,
    encode_frame,
    reply_to,
)


def framed(header: bytes, body: bytes = b"", serialize: int = JSON) -> bytes:
    length = 4 + len(header) + len(body)
    return struct.pack(">iI", length, serialize << 24 | len(header)) + header + body


def binary(
    code: int = 105, flag: int = 0, remark: bytes = b"", table: bytes = b"", language: int = 0
) -> bytes:
    head = struct.pack(">hbhiii", code, language, 401, 7, flag, len(remark)) + remark
    return head + struct.pack(">i", len(table)) + table


def header_of(raw: bytes) -> dict[str, object]:
    """A JSON frame's header as any JSON reader sees it."""
    length, mark = struct.unpack_from(">iI", raw)
    assert length == len(raw) - 4
    assert mark >> 24 == JSON
    found = json.loads(raw[8 : 8 + (mark & 0xFFFFFF)])
    assert isinstance(found, dict)
    return found


# ------------------------------------------------------------------------- what peers really send


def test_java_request() -> None:
    frame = decode_frame(
        framed(
            b'{"code":105,"extFields":{"topic":"TopicTest"},"flag":0,"language":"JAVA","opaque":7,'
            b'"serializeTypeCurrentRPC":"JSON","version":401}'
        )
    )
    assert frame == Frame(
        105, opaque=7, language=JAVA, version=401, ext={"topic": "TopicTest"}, remark=None
    )


def test_java_request_without_ext_fields() -> None:
    frame = decode_frame(
        framed(b'{"code":106,"flag":0,"language":"JAVA","opaque":1,"version":401}')
    )
    assert (frame.ext, frame.body, frame.remark) == ({}, b"", None)


def test_cpp_mixes_types_and_ends_with_a_newline() -> None:
    frame = decode_frame(
        framed(
            b'{"code":11,"extFields":{"AccessKey":"","OnsChannel":"","Signature":"",'
            b'"commitOffset":"1234567890123","maxMsgNums":32,"queueId":3,"subVersion":"5",'
            b'"unitMode":"false"},"flag":0,"language":"CPP","opaque":12,"remark":"",'
            b'"version":333}\n'
        )
    )
    assert (frame.code, frame.opaque, frame.version, frame.language) == (11, 12, 333, 1)
    assert frame.remark == ""
    assert frame.ext == {
        "AccessKey": "",
        "OnsChannel": "",
        "Signature": "",
        "commitOffset": "1234567890123",
        "maxMsgNums": "32",
        "queueId": "3",
        "subVersion": "5",
        "unitMode": "false",
    }


def test_node_sends_numbers_booleans_and_nulls() -> None:
    frame = decode_frame(
        framed(
            b'{"code":310,"language":"JAVA","opaque":5,"flag":0,"version":121,"extFields":'
            b'{"a":"g","e":0,"g":1700000000000,"k":false,"m":true,"l":null,"x":1.5,"y":2.0}}'
        )
    )
    assert frame.ext == {
        "a": "g",
        "e": "0",
        "g": "1700000000000",
        "k": "false",
        "m": "true",
        "x": "1.5",
        "y": "2",
    }


def test_go_request() -> None:
    frame = decode_frame(
        framed(
            b'{"code":10,"language":"GO","version":317,"opaque":3,"flag":0,"remark":"",'
            b'"extFields":{"batch":"false","queueId":"2"}}',
            b"body",
        )
    )
    assert (frame.language, frame.version, frame.body) == (9, 317, b"body")
    assert frame.ext == {"batch": "false", "queueId": "2"}


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ('"python"', PYTHON),
        ('"JAVA"', JAVA),
        ('"COBOL"', OTHER),
        ("9", 9),
        ("99", OTHER),
        ("null", OTHER),
        ("[1]", OTHER),
        ("-1", OTHER),
    ],
)
def test_language_by_name_or_ordinal(language: str, code: int) -> None:
    assert decode_frame(framed(f'{{"code":1,"language":{language}}}'.encode())).language == code


def test_numbers_as_text_and_other_slack() -> None:
    frame = decode_frame(framed(b'{code:\'105\',"opaque":"7",\'flag\':2.0,"version":null,}'))
    assert (frame.code, frame.opaque, frame.flag, frame.version) == (105, 7, 2, 0)


def test_objects_in_ext_fields_become_json_text() -> None:
    frame = decode_frame(framed(b'{"code":1,"extFields":{"a":{"b":[1,"x"]},"c":[]}}'))
    assert frame.ext == {"a": '{"b":[1,"x"]}', "c": "[]"}


def test_lone_surrogates_do_not_survive() -> None:
    frame = decode_frame(
        framed(
            b'{"code":1,"remark":"a\\ud800b","extFields":{"\\udc00k":"x\\ud83d","p":"\\ud83d\\ude00"}}'
        )
    )
    assert frame.remark == "a?b"
    assert frame.ext == {"?k": "x?", "p": "😀"}
    encode_frame(frame)


# ---------------------------------------------------------------------------------- what we write


def test_json_output_is_compact_with_text_values() -> None:
    raw = encode_frame(Frame(0, opaque=9, flag=1, ext={"queueId": "3", "名": "值"}, remark="nö"))
    assert b" " not in raw
    assert "名".encode() in raw
    assert header_of(raw) == {
        "code": 0,
        "extFields": {"queueId": "3", "名": "值"},
        "flag": 1,
        "language": "PYTHON",
        "opaque": 9,
        "remark": "nö",
        "serializeTypeCurrentRPC": "JSON",
        "version": 479,
    }


def test_json_output_leaves_out_what_is_empty() -> None:
    assert header_of(encode_frame(Frame(106))).keys().isdisjoint({"extFields", "remark"})


@pytest.mark.parametrize("serialize", [JSON, ROCKETMQ])
def test_reply_carries_opaque_response_flag_and_serialization(serialize: int) -> None:
    request = Frame(310, opaque=-5, flag=0, language=JAVA, version=401, serialize=serialize)
    raw = encode_frame(reply_to(request, 17, "no topic", {"a": "b"}, b"xyz"))
    assert raw[4] == serialize
    reply = decode_frame(raw)
    assert (reply.code, reply.opaque, reply.is_response, reply.is_oneway) == (17, -5, True, False)
    assert (reply.remark, reply.ext, reply.body) == ("no topic", {"a": "b"}, b"xyz")
    assert reply.version >= 232


def test_replies_do_not_share_their_ext() -> None:
    request = Frame(1)
    reply_to(request).ext["a"] = "b"
    assert reply_to(request).ext == {}
    assert Frame(1).ext == {}


@pytest.mark.parametrize(
    ("flag", "response", "oneway"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
)
@pytest.mark.parametrize("serialize", [JSON, ROCKETMQ])
def test_flag_bits(flag: int, response: bool, oneway: bool, serialize: int) -> None:
    frame = decode_frame(encode_frame(Frame(15, flag=flag, serialize=serialize)))
    assert (frame.is_response, frame.is_oneway) == (bool(response), bool(oneway))


# --------------------------------------------------------------------------------- binary headers


@pytest.mark.parametrize("code", [code for code in RequestCode if code > 0x7FFF])
def test_wide_codes_pass_through_sixteen_bits(code: RequestCode) -> None:
    raw = encode_frame(Frame(code, serialize=ROCKETMQ))
    assert struct.unpack_from(">h", raw, 8) == (int(code) & 0xFFFF,)
    assert decode_frame(raw).code == code
    assert decode_frame(encode_frame(Frame(code))).code == code, "JSON has room for it"


def test_pop_code_on_the_wire() -> None:
    assert struct.unpack_from(">h", encode_frame(Frame(200050, serialize=ROCKETMQ)), 8) == (3442,)


def test_a_response_code_is_not_widened() -> None:
    assert decode_frame(framed(binary(3442, flag=1), serialize=ROCKETMQ)).code == 3442
    assert decode_frame(framed(binary(3442, flag=0), serialize=ROCKETMQ)).code == 200050


def test_negative_codes_stay_negative() -> None:
    assert decode_frame(framed(binary(-1000, flag=1), serialize=ROCKETMQ)).code == -1000


def test_binary_remark_and_body() -> None:
    raw = framed(binary(1, 1, "mère".encode()), b"tail", ROCKETMQ)
    frame = decode_frame(raw)
    assert (frame.remark, frame.body, frame.ext) == ("mère", b"tail", {})
    assert decode_frame(framed(binary(1, 1), serialize=ROCKETMQ)).remark is None


def test_last_of_two_equal_keys_wins() -> None:
    entry = b"\x00\x01a\x00\x00\x00\x01"
    frame = decode_frame(framed(binary(table=entry + b"1" + entry + b"2"), serialize=ROCKETMQ))
    assert frame.ext == {"a": "2"}


def test_unknown_language_byte_is_other() -> None:
    assert decode_frame(framed(binary(language=77), serialize=ROCKETMQ)).language == OTHER
    assert decode_frame(framed(binary(language=-1), serialize=ROCKETMQ)).language == OTHER


@pytest.mark.parametrize(
    "header",
    [
        b"",
        binary()[:20],
        binary(remark=b"xy")[:22],
        struct.pack(">hbhiii", 1, 0, 0, 0, 0, -1) + b"\0\0\0\0",
        struct.pack(">hbhiii", 1, 0, 0, 0, 0, 2**31 - 1) + b"\0\0\0\0",
        struct.pack(">hbhiiii", 1, 0, 0, 0, 0, 0, -1),
        struct.pack(">hbhiiii", 1, 0, 0, 0, 0, 0, 6),
        binary(table=b"\x00"),
        binary(table=b"\x00\x00\x00\x00\x00"),
        binary(table=b"\x00\x02a\x00\x00\x00\x00"),
        binary(table=b"\xff\xffa\x00\x00\x00\x00"),
        binary(table=b"\x00\x01a\x00\x00\x00\x02b"),
        binary(table=b"\x00\x01a\xff\xff\xff\xff"),
        binary(table=b"\x00\x01\xff\x00\x00\x00\x00"),
        binary(remark=b"\xff"),
    ],
)
def test_binary_header_that_contradicts_itself(header: bytes) -> None:
    body = b"\0" * 64  # lengths must not reach into the body
    with pytest.raises(HeaderError):
        decode_frame(framed(header, body, ROCKETMQ))


def test_what_is_too_large_for_the_binary_header() -> None:
    for frame in (Frame(1, ext={"k" * 32768: "v"}), Frame(1, version=32768), Frame(1, flag=2**31)):
        frame.serialize = ROCKETMQ
        with pytest.raises(HeaderError, match="too large"):
            encode_frame(frame)
    frame = Frame(1, ext={"k" * 32767: "v"}, serialize=ROCKETMQ)
    assert decode_frame(encode_frame(frame)).ext == frame.ext


# -------------------------------------------------------------------------------- lengths, limits


@pytest.mark.parametrize("serialize", [JSON, ROCKETMQ])
def test_header_length_uses_all_24_bits(serialize: int) -> None:
    frame = Frame(1, ext={"a": "x" * 70_000, "b": "y" * 140_000}, body=b"z", serialize=serialize)
    raw = encode_frame(frame)
    assert raw[4] == serialize
    assert int.from_bytes(raw[5:8], "big") > 0x30000
    assert decode_frame(raw) == frame


@pytest.mark.parametrize("serialize", [JSON, ROCKETMQ])
def test_a_header_beyond_24_bits_is_not_written(serialize: int) -> None:
    with pytest.raises(FrameError, match="header of"):
        encode_frame(Frame(1, ext={"a": "x" * 0x1000000}, serialize=serialize))


@pytest.mark.parametrize("length", [-1, 0, 3, -(2**31), MAX_FRAME_BYTES - 3, 2**31 - 1])
def test_impossible_lengths_are_refused_at_once(length: int) -> None:
    reader = FrameReader()
    assert reader.feed(struct.pack(">i", length)) == []
    assert isinstance(reader.error, FrameError)
    assert str(length) in str(reader.error)


def test_largest_frame_is_read() -> None:
    limit = 4096
    header = b'{"code":1}'
    fits = framed(header, b"x" * (limit - 8 - len(header)))
    assert len(fits) == limit
    reader = FrameReader(limit)
    assert len(reader.feed(fits)) == 1
    assert reader.feed(framed(header, b"x" * (limit - 7 - len(header)))) == []
    assert isinstance(reader.error, FrameError)


def test_header_longer_than_its_frame() -> None:
    reader = FrameReader()
    reader.feed(struct.pack(">iI", 8, 5) + b"{  }")
    assert isinstance(reader.error, FrameError)


def test_unknown_serialization() -> None:
    with pytest.raises(FrameError, match="serialization 2"):
        decode_frame(framed(b'{"code":1}', serialize=2))
    with pytest.raises(FrameError, match="serialization 255"):
        decode_frame(framed(b'{"code":1}', serialize=255))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"code":null}',
        b'{"code":"x"}',
        b'{"code":1.5}',
        b'{"code":[]}',
        b'{"code":2147483648}',
        b'{"code":1,"opaque":-2147483649}',
        b'{"code":1,"flag":"99999999999"}',
        b'{"code":1,"version":1e10}',
        b'{"code":1,"extFields":5}',
        b'{"code":1,"extFields":[]}',
        b'{"code":1} x',
        b'{"code":1,"remark":"\xff"}',
        b'{"code":' + b"1" * 5000 + b"}",
        b'{"code":"' + b"1" * 5000 + b'"}',
        b'{"code":1e400}',
        b'{"code":NaN}',
        b'{"code":1,"x":' + b"[" * 100_000,
        b'{"code":1,"extFields":{"a":' + b"[" * 500 + b"]" * 500 + b"}}",
    ],
)
def test_json_header_that_is_none(header: bytes) -> None:
    with pytest.raises(HeaderError):
        decode_frame(framed(header))


def test_missing_code_is_named() -> None:
    with pytest.raises(HeaderError, match="code"):
        decode_frame(framed(b'{"opaque":1}'))
    with pytest.raises(HeaderError, match="opaque"):
        decode_frame(framed(b'{"code":1,"opaque":3000000000}'))


def test_frames_before_bad_bytes_are_returned_and_all_later_dropped() -> None:
    good = encode_frame(Frame(34, opaque=1))
    reader = FrameReader()
    frames = reader.feed(good + good + b"\xff" * 8 + good)
    assert len(frames) == 2
    assert reader.error is not None
    assert reader.feed(good) == []
    assert reader.pending_bytes == 0, "what is dropped is not kept either"


def test_pending_bytes_counts_the_unfinished_frame() -> None:
    raw = encode_frame(Frame(34, body=b"x" * 100))
    reader = FrameReader()
    assert reader.feed(raw + raw[:50]) == [decode_frame(raw)]
    assert reader.pending_bytes == 50
    assert reader.feed(raw[50:]) == [decode_frame(raw)]
    assert reader.pending_bytes == 0


@pytest.mark.parametrize("extra", [b"", b"\0"])
def test_decode_frame_wants_exactly_one(extra: bytes) -> None:
    raw = encode_frame(Frame(34))
    with pytest.raises(FrameError):
        decode_frame(raw + raw + extra)
    with pytest.raises(FrameError):
        decode_frame(raw[:-1] + extra[1:])
    with pytest.raises(FrameError):
        decode_frame(b"")
