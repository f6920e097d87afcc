"""Any bytes give values or a WireError: nothing else, and no memory for what was only claimed.

Every case starts from a seed, so a failure repeats. `corpus/` holds well-formed examples by kind;
they are mutated by flipping, cutting, repeating and splicing bytes and by planting hostile lengths
and words. A new finding is kept by adding its bytes to the corpus.
"""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cometmq.errors import BodyError, RecordCorrupt, WireError
from cometmq.wire import bodies, fastjson, headers, properties, record, strangers
from cometmq.wire.frame import JSON, MAX_FRAME_BYTES, ROCKETMQ, FrameReader, encode_frame, reply_to

CORPUS = Path(__file__).parent / "corpus"
HOSTILE_NUMBERS = [
    0,
    1,
    3,
    4,
    0x7F,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    2**32 - 1,
]
HOSTILE_WORDS = [
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"-1",
    b"1e999999",
    b"NaN",
    b"9" * 30,
    b"9" * 5000,
    b'"' + b"9" * 5000 + b'"',
    b"1.5",
    b'"\\ud800"',
    b'"\\udc00x"',
    b'"\xed\xa0\x80"',
    b"\xff",
    b"'",
    b'"',
    b"\\",
    b",",
    b":",
    b"{",
    b"}",
    b"]",
    b"[" * 70,
    b"[" * 300 + b"]" * 300,
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b'{"$ref":"$"}',
    b'{"$ref":"$.a"}',
    b'"\xc2\xb2"',
    "\u0661".encode(),
    b"\x00",
]


def corpus(kind: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(CORPUS.glob(f"{kind}-*"))]
    assert found, f"no corpus of {kind}"
    return found


def mutate(rng: random.Random, samples: list[bytes]) -> bytes:
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.choice((1, 1, 2, 4, 20, 1000))]
            case 3:
                data[at:at] = data[at : at + rng.randrange(30)]
            case 4:
                data[at : at + 4] = struct.pack(">I", rng.choice(HOSTILE_NUMBERS))
            case 5:
                data[at : at + rng.choice((0, 1, 4))] = rng.choice(HOSTILE_WORDS)
            case _:
                other = rng.choice(samples)
                data[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


def replant(rng: random.Random, samples: list[bytes]) -> bytes:
    """Put a hostile word in the place of a whole JSON value, so that what is around it stays."""
    data = rng.choice(samples)
    places = [n for n, byte in enumerate(data) if byte in b":,["]
    begin = rng.choice(places) + 1
    ends = [n for n in range(begin, len(data)) if data[n] in b",]}"]
    end = ends[0] if ends else len(data)
    return data[:begin] + rng.choice(HOSTILE_WORDS) + data[end:]


def cases(kind: str, count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(f"{kind} {seed}")
    samples = corpus(kind)
    yield from samples
    for n in range(count):
        if n % 10 == 0:
            yield rng.randbytes(rng.randrange(60))
        elif n % 3 == 0 and any(byte in data for data in samples for byte in (b":", b"[")):
            yield replant(rng, [data for data in samples if b":" in data])
        else:
            yield mutate(rng, samples)


@contextlib.contextmanager
def only(kind: type[WireError]) -> Iterator[None]:
    """Errors of this kind are an answer; any other fails the test."""
    with contextlib.suppress(kind):
        yield


# ----------------------------------------------------------------------------------------- frames


def check_stream(data: bytes, rng: random.Random) -> int:
    reader = FrameReader()
    frames = []
    at = 0
    while at < len(data):
        step = rng.choice((1, 3, 50, 10_000))
        frames += reader.feed(data[at : at + step])
        at += step
        assert reader.pending_bytes <= at
    assert reader.error is None or isinstance(reader.error, WireError)
    for frame in frames:
        text = "".join((frame.remark or "", *frame.ext, *frame.ext.values()))
        text.encode("utf-8")
        for serialize in (JSON, ROCKETMQ):
            frame.serialize = serialize
            with only(WireError):  # a key may be too long for the binary form
                encode_frame(reply_to(frame, 1, frame.remark, frame.ext, frame.body))
        for kind in (headers.PullHeader, headers.SendHeader):
            with only(WireError):
                headers.to_ext(headers.parse(kind, frame.ext))
        with only(WireError):
            headers.parse_send_v2(frame.ext)
    strangers.recognise(data[:16])
    return len(frames)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_of_a_connection(seed: int) -> None:
    rng = random.Random(seed)
    found = sum(check_stream(data, rng) for data in cases("frame", 2500, seed))
    assert found > 100, "mutations that never decode test nothing"


@pytest.mark.parametrize("serialize", [JSON, ROCKETMQ])
@pytest.mark.parametrize("seed", range(3))
def test_headers_inside_right_lengths(seed: int, serialize: int) -> None:
    """Most mutations of a frame break its lengths; these reach the header decoders."""
    rng = random.Random(f"{seed} {serialize}")
    inner = []
    for data in corpus("frame"):
        if data[4] == serialize:
            size = int.from_bytes(data[5:8], "big")
            inner.append(data[8 : 8 + size])
    found = 0
    for n in range(2000):
        header = replant(rng, inner) if n % 2 and serialize == JSON else mutate(rng, inner)
        mark = serialize << 24 | len(header)
        raw = struct.pack(">iI", 4 + len(header) + 3, mark) + header + b"abc"
        found += check_stream(raw, rng)
    assert found > 100


def hostile_heads() -> Iterator[bytes]:
    for length in (*HOSTILE_NUMBERS, MAX_FRAME_BYTES - 4, MAX_FRAME_BYTES - 3, MAX_FRAME_BYTES):
        for mark in (0, 1, 0xFFFFFF, 0x01FFFFFF, 0x00000010, 0x01000010, 0xFF000000):
            yield struct.pack(">II", length, mark)


def test_claimed_lengths_take_no_memory() -> None:
    tracemalloc.start()
    try:
        for head in hostile_heads():
            reader = FrameReader()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            for byte in (*head, *b"\xff\x7f{}[]" * 5):
                reader.feed(bytes((byte,)))
            assert reader.pending_bytes <= 38
            assert tracemalloc.get_traced_memory()[1] - before < 100_000, head.hex()
    finally:
        tracemalloc.stop()


def test_claimed_lengths_inside_a_frame_take_no_memory() -> None:
    inner = struct.pack(">hbhii", 310, 0, 401, 7, 0)
    tracemalloc.start()
    try:
        for number in HOSTILE_NUMBERS:
            word = struct.pack(">I", number)
            for head in (word, b"\0\0\0\0" + word, b"\0\0\0\0\0\0\0\x10\0\1a" + word):
                header = inner + head + bytes(20)
                raw = struct.pack(">iI", 4 + len(header), 1 << 24 | len(header)) + header
                reader = FrameReader()
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                reader.feed(raw)
                assert reader.error is None or isinstance(reader.error, WireError)
                assert tracemalloc.get_traced_memory()[1] - before < 100_000
    finally:
        tracemalloc.stop()


def test_memory_stays_near_the_limit_while_a_large_frame_comes_in() -> None:
    limit = 256 * 1024
    raw = struct.pack(">iI", limit - 4, 10) + b'{"code":1}'
    raw += bytes(limit - len(raw))
    tracemalloc.start()
    try:
        reader = FrameReader(limit)
        found = 0
        for _ in range(3):
            for at in range(0, limit, 1000):
                found += len(reader.feed(raw[at : at + 1000]))
                assert reader.pending_bytes < limit
        assert found == 3
        assert tracemalloc.get_traced_memory()[1] < 4 * limit
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("seed", range(2))
def test_records(seed: int) -> None:
    found = 0
    for data in cases("record", 3000, seed):
        for verify in (False, True):
            seen = record.scan(data, 0, len(data), verify_crc=verify)
            assert seen is None or 8 <= seen.size <= len(data)
        if isinstance(seen, record.Scan):
            found += 1
            f"{seen.topic}{seen.properties}".encode()
            properties.build(properties.parse(seen.properties)).encode()
            assert record.decode(data).topic == seen.topic
        with only(RecordCorrupt):
            record.decode_all(memoryview(data))
        at = found % 30
        with only(RecordCorrupt):
            record.decode(data, at, verify_crc=True)
    assert found > 100


@pytest.mark.parametrize("seed", range(2))
def test_batches(seed: int) -> None:
    found = 0
    for data in cases("batch", 3000, seed):
        with only(BodyError):
            pieces = list(record.split_batch(data))
            found += bool(pieces)
            assert sum(22 + len(one.body) + len(one.properties.encode()) for one in pieces) == len(
                data
            )
    assert found > 100


# ----------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("seed", range(3))
def test_fastjson(seed: int) -> None:
    found = 0
    for kind in ("json", "heartbeat"):
        for data in cases(kind, 3000, seed):
            with only(BodyError):
                value = fastjson.loads(data)
                found += 1
                fastjson.dumps(value).decode("utf-8")
                fastjson.dumps(value, standard=True).decode("ascii")
    assert found > 300


def check_heartbeat(data: bytes) -> None:
    msgspec.json.encode(bodies.heartbeat(data))


def check_subscription(data: bytes) -> None:
    for one in bodies._list(bodies.load_object(data, "fuzz").get("consumerDataSet")):
        for raw in bodies._list(bodies.drop_nulls(one).get("subscriptionDataSet")):
            msgspec.json.encode(bodies.subscription(raw))


def check_registration(data: bytes) -> None:
    for version in (0, 36, 401, 479):
        with only(BodyError):
            bodies.encode_registration(bodies.registration(data, version))


def check_configs(data: bytes) -> None:
    value = fastjson.loads(data)
    for read in (bodies.topic_config, bodies.group_config, bodies.data_version):
        with only(BodyError):
            msgspec.json.encode(read(value))
    bodies.parse_properties_text(data)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("heartbeat", check_heartbeat),
        ("heartbeat", check_subscription),
        ("registration", check_registration),
        ("registration", check_configs),
        ("config", check_configs),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_bodies(kind: str, check: Callable[[bytes], None], seed: int) -> None:
    for data in cases(kind, 2500, seed):
        with only(BodyError):
            check(data)


@pytest.mark.parametrize("seed", range(2))
def test_compressed_registrations(seed: int) -> None:
    """Mutate below the compression: a flipped byte above it only fails its checksum."""
    rng = random.Random(seed)
    inner = [zlib.decompress(data) for data in corpus("registration") if data[:1] == b"x"]
    assert inner
    found = 0
    for _ in range(1500):
        with only(BodyError):
            registered = bodies.registration(zlib.compress(mutate(rng, inner), 1), 413)
            bodies.encode_registration(registered)
            found += 1
    assert found > 100
