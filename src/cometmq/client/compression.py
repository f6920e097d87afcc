"""Bodies made small and whole again, in the three formats that RocketMQ knows.

Owns: the bits of sysFlag about compression, and the limit on what a body may grow to. One rule:
bytes from outside never make us hold much more than the limit; a bomb is a BodyError.

sysFlag & 0x001  the body is compressed
sysFlag & 0x700  how: 0x000 (before 4.9.4) and 0x300 zlib (RFC 1950), 0x100 LZ4 frame, 0x200 zstd

C++, Go and Node consumers read zlib only. LZ4 and zstd are packages that are not ours:
`pip install cometmq[compression]`; Python 3.14 has zstd itself.
"""

from __future__ import annotations

import sys
import zlib
from enum import IntEnum
from importlib import import_module
from types import ModuleType
from typing import Protocol

from cometmq.errors import BodyError, UsageError

COMPRESSED = 0x001
TYPE_MASK = 0x700
DEFAULT_LEVEL = 5  # Java's compressLevel
MAX_BODY_BYTES = 64 * 1024 * 1024  # a broker takes 4 MiB compressed; text shrinks to a tenth or so
PIECE_BYTES = 1024 * 1024  # made at a time
ZSTD_FEED_BYTES = 1024  # given at a time; 4 bytes can stand for 128 KiB, so 1 KiB for 32 MiB
ZSTD_MAX_WINDOW_BYTES = 128 * 1024 * 1024  # zstd's own limit; its levels up to 19 need 8 MiB


class Compression(IntEnum):
    """The formats; the number is the type's bits in sysFlag."""

    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300

    @property
    def sys_flag(self) -> int:
        """All bits to set for a body so compressed."""
        return self | COMPRESSED


def compress(body: bytes, kind: Compression, level: int = DEFAULT_LEVEL) -> bytes:
    """The body in that format; set `kind.sys_flag`. LZ4 takes no level, as in Java."""
    if kind is Compression.ZLIB:
        if not -1 <= level <= 9:
            raise UsageError(f"compression level {level} is not one of zlib's, which are 0 to 9")
        return zlib.compress(body, level)
    if kind is Compression.LZ4:
        return bytes(_package("lz4.frame", kind).compress(body))
    zstd = _zstd()
    try:
        if _is_own_zstd():
            return bytes(zstd.compress(body, level))
        return bytes(zstd.ZstdCompressor(level=level).compress(body))
    except ValueError as error:
        raise UsageError(f"compression level {level} is not one of zstd's: {error}") from None


def decompress(body: bytes, sys_flag: int, *, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body as its sender had it; the body itself if sysFlag doesn't say compressed."""
    if not sys_flag & COMPRESSED:
        return body
    kind = sys_flag & TYPE_MASK
    if kind in (0, Compression.ZLIB):
        return _inflate(body, limit_bytes)
    if kind == Compression.LZ4:
        lz4 = _package("lz4.frame", Compression.LZ4)
        return _unpack(lz4.LZ4FrameDecompressor(), body, limit_bytes, RuntimeError)
    if kind != Compression.ZSTD:
        raise BodyError(f"compression type 0x{kind:03x} in sysFlag 0x{sys_flag:x} is unknown")
    zstd = _zstd()
    if _is_own_zstd():
        return _unpack(zstd.ZstdDecompressor(), body, limit_bytes, zstd.ZstdError)
    return _unpack_zstd(zstd, body, limit_bytes)


def _inflate(body: bytes, limit_bytes: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise BodyError(f"body of {len(body)} bytes is not zlib: {error}") from None
    if len(found) > limit_bytes:
        raise _too_large(body, limit_bytes)
    if not inflater.eof:
        raise _cut_off(body)
    return found


class _Decompressor(Protocol):
    """What LZ4's and Python 3.14's zstd decompressor have in common."""

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def _unpack(
    decompressor: _Decompressor, body: bytes, limit_bytes: int, failure: type[Exception]
) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    fed = body
    while not decompressor.eof:
        try:
            part = decompressor.decompress(fed, min(PIECE_BYTES, limit_bytes + 1 - size_bytes))
        except failure as error:
            raise BodyError(f"body of {len(body)} bytes can't be decompressed: {error}") from None
        fed = b""  # what it could not use yet it keeps
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise _too_large(body, limit_bytes)
        if not part and not decompressor.eof:
            raise _cut_off(body)
        parts.append(part)
    return b"".join(parts)


def _unpack_zstd(zstd: ModuleType, body: bytes, limit_bytes: int) -> bytes:
    """By the package zstandard, whose one-call form believes the size that a frame claims, and
    whose streams don't tell a frame that is cut off; so it is fed in small steps."""
    decompressor = zstd.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW_BYTES).decompressobj()
    parts: list[bytes] = []
    size_bytes = 0
    for at in range(0, len(body), ZSTD_FEED_BYTES):
        try:
            part = decompressor.decompress(body[at : at + ZSTD_FEED_BYTES])
        except zstd.ZstdError as error:
            raise BodyError(f"body of {len(body)} bytes is not zstd: {error}") from None
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise _too_large(body, limit_bytes)
        parts.append(part)
        if decompressor.eof:
            return b"".join(parts)
    raise _cut_off(body)


def _too_large(body: bytes, limit_bytes: int) -> BodyError:
    return BodyError(f"body of {len(body)} bytes decompresses to more than {limit_bytes}")


def _cut_off(body: bytes) -> BodyError:
    return BodyError(f"compressed body of {len(body)} bytes ends too early")


def _is_own_zstd() -> bool:
    return sys.version_info >= (3, 14)


def _zstd() -> ModuleType:
    return _package("compression.zstd" if _is_own_zstd() else "zstandard", Compression.ZSTD)


def _package(name: str, kind: Compression) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"{kind.name} compression needs the package {name.partition('.')[0]}: "
            "pip install cometmq[compression]"
        ) from None
