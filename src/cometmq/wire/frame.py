"""A byte stream to frames and back, with both header serializations.

    0  i32  L = 4 + header + body            (not counting these four bytes)
    4  u8   serialize type: 0 JSON, 1 ROCKETMQ
    5  u24  header length
    8       header, then body

ROCKETMQ header: code i16, language i8, version i16, opaque i32, flag i32, remark i32+bytes,
map i32 length, then entries of key i16+bytes, value i32+bytes. All big-endian.
Example (code 105, version 401, opaque 7, topic=T):
    00000025 01 000021 0069 00 0191 00000007 00000000 00000000 0000000C 0005 746F706963 00000001 54

One rule: any bytes give frames or a WireError, never another exception, and never more memory than
the frame limit. What a header means is not known here.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from cometmq.errors import BodyError, FrameError, HeaderError, WireError
from cometmq.wire import fastjson
from cometmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, LANGUAGES, OTHER, PYTHON, RequestCode
from cometmq.wire.codes import Version as _Version

JSON = 0
ROCKETMQ = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024  # RocketMQ's default limit, length word included

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_WIDE_CODES = {code & 0xFFFF: int(code) for code in RequestCode if code > 0x7FFF}
"""The binary header has 16 bits for the code: pop's 200050 arrives as 3442."""

_FIXED = struct.Struct(">hbhiii")
_HEAD = struct.Struct(">iI")
_I32 = struct.Struct(">i")
_I16 = struct.Struct(">h")
_MAX_HEADER_BYTES = 0xFFFFFF  # its length has 24 bits
_LANGUAGE_CODES = {name: code for code, name in enumerate(LANGUAGES)}


class Frame(msgspec.Struct, gc=False):
    """One request or response. Values of `ext` are always text."""

    code: int
    opaque: int = 0
    flag: int = 0
    language: int = PYTHON
    version: int = _Version.OURS
    remark: str | None = None
    ext: dict[str, str] = {}
    body: bytes = b""
    serialize: int = JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


def reply_to(
    request: Frame,
    code: int = 0,
    remark: str | None = None,
    ext: dict[str, str] | None = None,
    body: bytes = b"",
) -> Frame:
    """A response that carries the request's opaque and speaks its serialization."""
    return Frame(
        code=code,
        opaque=request.opaque,
        flag=FLAG_RESPONSE,
        remark=remark,
        ext=ext if ext is not None else {},
        body=body,
        serialize=request.serialize,
    )


class FrameReader:
    """Collects bytes of one connection and cuts them into frames.

    `feed` returns the frames that are complete. After bytes that can't be understood, `error` is
    set, the frames before them have been returned, and everything later is dropped.
    """

    __slots__ = ("_limit", "_need", "_pending", "error")

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit_bytes
        self._pending = bytearray()
        self._need = 4
        self.error: WireError | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[Frame]:
        whole = self.join(data)
        return [] if whole is None else self.split(whole)

    def join(self, data: bytes) -> bytes | None:
        """All bytes that are not yet cut, if they hold a whole frame; None while they don't."""
        if self.error is not None:
            return None
        if self._pending:
            self._pending += data
            if len(self._pending) < self._need:
                return None
            data = bytes(self._pending)
            self._pending = bytearray()
        return data

    def split(self, data: bytes, at: int = 0) -> list[Frame]:
        """The frames in what `join` gave, from byte `at` on; the rest is kept."""
        frames: list[Frame] = []
        end = len(data)
        need = 4
        while end - at >= 4:
            (length,) = _I32.unpack_from(data, at)
            if not 4 <= length <= self._limit - 4:
                self.error = FrameError(
                    f"frame of {length} bytes; must be 4 to {self._limit - 4} (maxFrameBytes)"
                )
                return frames
            if end - at < 4 + length:
                need = 4 + length
                break
            try:
                frames.append(_decode(data, at + 4, at + 4 + length))
            except WireError as error:
                self.error = error
                return frames
            at += 4 + length
        if at < end:
            self._pending = bytearray(data[at:])
            self._need = need
        return frames


def frame_at(data: bytes, at: int, limit_bytes: int = MAX_FRAME_BYTES) -> tuple[Frame, int] | None:
    """The frame that begins at `at`, and where it ends; None if it is not whole or not right."""
    if len(data) - at < 4:
        return None
    (length,) = _I32.unpack_from(data, at)
    end = at + 4 + int(length)
    if not 4 <= length <= limit_bytes - 4 or end > len(data):
        return None
    try:
        return _decode(data, at + 4, end), end
    except WireError:
        return None


def decode_frame(raw: bytes) -> Frame:
    """One whole frame, length word included; WireError if it is not exactly one."""
    reader = FrameReader(max(MAX_FRAME_BYTES, len(raw)))
    frames = reader.feed(raw)
    if reader.error is not None:
        raise reader.error
    if len(frames) != 1 or reader.pending_bytes:
        raise FrameError(f"expected one whole frame in {len(raw)} bytes, found {len(frames)}")
    return frames[0]


def _decode(data: bytes, begin: int, end: int) -> Frame:
    (mark,) = _I32.unpack_from(data, begin)
    serialize, header_length = mark >> 24 & 0xFF, mark & _MAX_HEADER_BYTES
    head = begin + 4
    split = head + header_length
    if split > end:
        raise FrameError(f"header of {header_length} bytes in a frame with {end - head} left")
    if serialize == JSON:
        frame = _decode_json(data[head:split])
    elif serialize == ROCKETMQ:
        frame = _decode_binary(data, head, split)
    else:
        raise FrameError(f"unknown header serialization {serialize}; known: 0 JSON, 1 ROCKETMQ")
    if split < end:
        frame.body = data[split:end]
    return frame


# ---------------------------------------------------------------------------------- JSON headers


_Int32 = Annotated[int, msgspec.Meta(ge=_INT_MIN, le=_INT_MAX)]


class _JsonHeader(msgspec.Struct, gc=False):
    code: _Int32
    opaque: _Int32 = 0
    flag: _Int32 = 0
    version: _Int32 = 0
    language: str | int | None = "JAVA"
    remark: str | None = None
    extFields: dict[str, str] | None = None  # noqa: N815 - the wire's name


_json_decode = msgspec.json.Decoder(_JsonHeader).decode


def _decode_json(raw: bytes) -> Frame:
    try:
        header = _json_decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        header = _decode_json_tolerantly(raw)
    return Frame(
        header.code,
        header.opaque,
        header.flag,
        _language_code(header.language),
        header.version,
        header.remark,
        header.extFields or {},
    )


def _decode_json_tolerantly(raw: bytes) -> _JsonHeader:
    """C++ and Node put numbers and booleans into extFields; some peers quote numbers."""
    try:
        fields = fastjson.loads(raw)
    except BodyError as error:
        raise HeaderError(f"undecodable JSON header: {error}") from None
    if not isinstance(fields, dict):
        raise HeaderError("JSON header is not an object")
    ext = fields.get("extFields")
    if ext is not None and not isinstance(ext, dict):
        raise HeaderError("extFields is not an object")
    remark = fields.get("remark")
    return _JsonHeader(
        code=_as_int(fields, "code"),
        opaque=_as_int(fields, "opaque", 0),
        flag=_as_int(fields, "flag", 0),
        version=_as_int(fields, "version", 0),
        language=fields.get("language"),
        remark=None if remark is None else _as_text(remark),
        extFields={_as_text(k): _as_text(v) for k, v in (ext or {}).items() if v is not None},
    )


def _as_int(fields: dict[Any, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    try:
        number = int(value) if isinstance(value, (int, str)) else None
        if isinstance(value, float) and value.is_integer():
            number = int(value)
    except ValueError:
        number = None
    if number is None:
        raise HeaderError(f"header field {name} is missing or not a number")
    if not _INT_MIN <= number <= _INT_MAX:
        raise HeaderError(f"header field {name} is not a 32-bit integer")
    return number


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return str(int(value))
    if isinstance(value, (int, float)):
        return str(value)
    return fastjson.dumps(value).decode("utf-8", "replace")


def _language_code(language: Any) -> int:
    if isinstance(language, str):
        found = _LANGUAGE_CODES.get(language)
        return found if found is not None else _LANGUAGE_CODES.get(language.upper(), OTHER)
    if isinstance(language, int) and 0 <= language < len(LANGUAGES):
        return language
    return OTHER


# -------------------------------------------------------------------------------- binary headers


def _decode_binary(data: bytes, at: int, end: int) -> Frame:
    if end - at < _FIXED.size + 4:
        raise HeaderError("binary header shorter than its fixed part")
    code, language, version, opaque, flag, remark_size = _FIXED.unpack_from(data, at)
    at += _FIXED.size
    stop = at + remark_size
    if remark_size < 0 or stop + 4 > end:
        raise HeaderError(f"remark of {remark_size} bytes does not fit its header")
    try:
        remark = data[at:stop].decode("utf-8") if remark_size else None
        (size,) = _I32.unpack_from(data, stop)
        at = stop + 4
        if size < 0 or at + size > end:
            raise HeaderError(f"map of {size} bytes does not fit its header")
        ext = _decode_map(data, at, at + size) if size else {}
    except UnicodeDecodeError:
        raise HeaderError("binary header has text that is not UTF-8") from None
    if code & 0xFFFF in _WIDE_CODES and not flag & FLAG_RESPONSE:
        code = _WIDE_CODES[code & 0xFFFF]
    if not 0 <= language < len(LANGUAGES):
        language = OTHER
    return Frame(code, opaque, flag, language, version, remark, ext, b"", ROCKETMQ)


def _decode_map(data: bytes, at: int, end: int) -> dict[str, str]:
    """Entries up to `end`; an entry is at least its two length fields."""
    ext: dict[str, str] = {}
    while at < end:
        if end - at < 6:
            raise HeaderError("binary header ends inside a length")
        (size,) = _I16.unpack_from(data, at)
        at += 2
        stop = at + size
        if size < 0 or stop + 4 > end:
            raise HeaderError(f"key of {size} bytes does not fit its header")
        key = data[at:stop].decode("utf-8")
        (size,) = _I32.unpack_from(data, stop)
        at = stop + 4
        stop = at + size
        if size < 0 or stop > end:
            raise HeaderError(f"value of {size} bytes does not fit its header")
        ext[key] = data[at:stop].decode("utf-8")
        at = stop
    return ext


# --------------------------------------------------------------------------------------- encoding

_json_encode = msgspec.json.Encoder().encode


def encode_frame(frame: Frame) -> bytes:
    """A frame to the bytes that go out, in the frame's own serialization."""
    head = _encode_binary(frame) if frame.serialize == ROCKETMQ else _encode_json(frame)
    if len(head) > _MAX_HEADER_BYTES:
        raise FrameError(f"header of {len(head)} bytes; at most {_MAX_HEADER_BYTES}")
    length = 4 + len(head) + len(frame.body)
    return _HEAD.pack(length, frame.serialize << 24 | len(head)) + head + frame.body


def _encode_json(frame: Frame) -> bytes:
    fields: dict[str, Any] = {"code": frame.code}
    if frame.ext:
        fields["extFields"] = frame.ext
    fields["flag"] = frame.flag
    fields["language"] = LANGUAGES[frame.language]
    fields["opaque"] = frame.opaque
    if frame.remark is not None:
        fields["remark"] = frame.remark
    fields["serializeTypeCurrentRPC"] = "JSON"
    fields["version"] = frame.version
    return _json_encode(fields)


def _encode_binary(frame: Frame) -> bytes:
    code = frame.code if -0x8000 <= frame.code <= 0x7FFF else _wrap16(frame.code)
    remark = (frame.remark or "").encode("utf-8")
    entries: list[bytes] = []
    try:
        for key, value in frame.ext.items():
            raw_key, raw = key.encode("utf-8"), value.encode("utf-8")
            entries += (_I16.pack(len(raw_key)), raw_key, _I32.pack(len(raw)), raw)
        fixed = _FIXED.pack(
            code, frame.language, frame.version, frame.opaque, frame.flag, len(remark)
        )
    except struct.error as error:
        raise HeaderError(f"a key or number too large for a binary header: {error}") from None
    table = b"".join(entries)
    return b"".join((fixed, remark, _I32.pack(len(table)), table))


def _wrap16(code: int) -> int:
    return ((code + 0x8000) & 0xFFFF) - 0x8000
