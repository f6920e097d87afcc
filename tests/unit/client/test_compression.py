"""Compressed bodies: the formats of Java's clients, and bombs that don't go off."""

from __future__ import annotations

import sys
import tracemalloc
import zlib
from random import Random

import pytest

from cometmq.client.compression import Compression, compress, decompress
from cometmq.errors import BodyError, UsageError

BODY = b"the quick brown fox " * 500
PACKAGES = {
    Compression.LZ4: "lz4.frame",
    Compression.ZSTD: "compression.zstd" if sys.version_info >= (3, 14) else "zstandard",
}


@pytest.fixture(params=list(Compression), ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Compression:
    found: Compression = request.param
    if found in PACKAGES:
        pytest.importorskip(PACKAGES[found])
    return found


def test_the_bits_of_sys_flag() -> None:
    assert [one.sys_flag for one in (Compression.ZLIB, Compression.LZ4, Compression.ZSTD)] == [
        0x301,
        0x101,
        0x201,
    ]


def test_there_and_back(kind: Compression) -> None:
    for body in (b"", b"x", BODY, Random(3).randbytes(3_000_000)):
        packed = compress(body, kind)
        assert decompress(packed, kind.sys_flag | 0x10) == body
    assert len(compress(BODY, kind)) < len(BODY) // 10


def test_frames_begin_with_the_marks_of_their_formats(kind: Compression) -> None:
    mark = {
        Compression.ZLIB: b"\x78",
        Compression.LZ4: b"\x04\x22\x4d\x18",
        Compression.ZSTD: b"\x28\xb5\x2f\xfd",
    }[kind]
    assert compress(BODY, kind).startswith(mark)


def test_old_java_says_zlib_without_type_bits() -> None:
    assert decompress(zlib.compress(BODY), 0x001) == BODY
    assert decompress(zlib.compress(BODY), 0x301) == BODY


def test_a_body_that_is_not_compressed_is_left_alone() -> None:
    assert decompress(zlib.compress(BODY), 0x300) == zlib.compress(BODY)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(BodyError, match="0x400"):
        decompress(b"x", 0x401)


def test_the_limit_is_exact(kind: Compression) -> None:
    packed = compress(BODY, kind)
    assert decompress(packed, kind.sys_flag, limit_bytes=len(BODY)) == BODY
    with pytest.raises(BodyError, match=f"more than {len(BODY) - 1}"):
        decompress(packed, kind.sys_flag, limit_bytes=len(BODY) - 1)


def test_a_bomb_takes_no_more_memory_than_the_limit_allows() -> None:
    packer = zlib.compressobj(9)
    piece = bytes(1024 * 1024)
    bomb = b"".join(packer.compress(piece) for _ in range(64)) + packer.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(BodyError, match="more than 1000000"):
            decompress(bomb, 0x301, limit_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_a_bomb_of_any_kind_is_an_error(kind: Compression) -> None:
    bomb = compress(bytes(68_000_000), kind, 1)  # the limit is 64 MiB
    with pytest.raises(BodyError, match="decompresses to more"):
        decompress(bomb, kind.sys_flag)


def test_a_zstd_frame_that_claims_an_enormous_size_is_an_error() -> None:
    pytest.importorskip(PACKAGES[Compression.ZSTD])
    # magic; descriptor: single segment, 8-byte size; size 2**60; a raw last block of no bytes
    claim = b"\x28\xb5\x2f\xfd" + b"\xe0" + (2**60).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(BodyError):
        decompress(claim, 0x201)


def test_damaged_and_cut_off_bodies_are_errors(kind: Compression) -> None:
    packed = compress(BODY, kind)
    for broken in (b"", b"garbage!", packed[:-1], packed[: len(packed) // 2], packed[:3]):
        with pytest.raises(BodyError):
            decompress(broken, kind.sys_flag)


def test_bytes_after_the_end_are_passed_over(kind: Compression) -> None:
    assert decompress(compress(BODY, kind) + b"\x00\x00", kind.sys_flag) == BODY


@pytest.mark.parametrize("kind", list(PACKAGES))
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, kind: Compression
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    for attempt in (lambda: compress(BODY, kind), lambda: decompress(BODY, kind.sys_flag)):
        with pytest.raises(UsageError, match=r"pip install cometmq\[compression\]"):
            attempt()


def test_a_level_out_of_range_is_refused(kind: Compression) -> None:
    if kind is Compression.LZ4:
        assert decompress(compress(BODY, kind, 1000), kind.sys_flag) == BODY
        return
    assert len(compress(BODY, kind, 1)) >= len(compress(BODY, kind, 9))
    with pytest.raises(UsageError, match="level 1000"):
        compress(BODY, kind, 1000)
