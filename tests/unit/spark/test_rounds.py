"""Rounds of pulls against a broker that answers as brokers may: in any order, less than asked for.

A peer on a real socket; whatever it does, a partition's rows are those of its range, each once and
in order. What it does is drawn from a seed.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from cometmq.message import NewMessage
from cometmq.spark import client, decode, gather, read
from cometmq.spark.batch import arrow_schema
from cometmq.spark.plan import Range
from cometmq.spark.schema import schema_of
from cometmq.spark.source_options import SourceOptions
from cometmq.wire import record
from cometmq.wire.codes import FLAG_RESPONSE, ResponseCode
from cometmq.wire.frame import JSON, ROCKETMQ, Frame, FrameReader, encode_frame

MESSAGES = 5000
COLUMNS = ["queue_offset", "body", "tags", "topic"]


def stored(offset: int) -> bytes:
    body = b"%d" % offset * (1 + offset * 7 % 13)
    prepared = record.prepare(NewMessage("t", 1, body, f"TAGS\x01{offset % 3}\x02"))
    raw = bytearray(prepared.size)
    record.write(raw, 0, prepared, queue_offset=offset, log_offset=offset * 999, store_ms=10**12)
    return bytes(raw)


RECORDS = [stored(offset) for offset in range(MESSAGES)]


class Peer:
    """Pulls are answered from RECORDS; how, each kind of trouble so often, is drawn."""

    def __init__(self, seed: int, *, most: int, trouble: float) -> None:
        self._random = random.Random(seed)
        self._most = most
        self._trouble = trouble
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.kinds: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            with conn, suppress(OSError):
                self._serve(conn)

    def _draws(self, kind: str, share: float = 1.0) -> bool:
        is_drawn = self._random.random() < self._trouble * share
        if is_drawn:
            self.kinds.add(kind)
        return is_drawn

    def _serve(self, conn: socket.socket) -> None:
        reader = FrameReader()
        while data := conn.recv(1 << 16):
            frames = reader.feed(data)
            if self._draws("disorder", 4):
                self._random.shuffle(frames)
            for frame in frames:
                if self._draws("lost", 0.1):
                    return
                raw = encode_frame(self._answer(frame))
                if self._draws("a word", 0.5):
                    raw = encode_frame(Frame(40, 7, ext={"consumerGroup": "g"})) + raw
                if self._draws("in parts", 0.3):
                    half = self._random.randrange(len(raw))
                    conn.sendall(raw[:half])
                    raw = raw[half:]
                if self._draws("lost in the middle", 0.05):
                    conn.sendall(raw[: len(raw) // 2])
                    return
                conn.sendall(raw)

    def _answer(self, frame: Frame) -> Frame:
        offset, count = int(frame.ext["queueOffset"]), int(frame.ext["maxMsgNums"])
        serialize = ROCKETMQ if self._draws("binary heads") else JSON
        if self._draws("busy", 0.3):
            return Frame(ResponseCode.SYSTEM_BUSY, frame.opaque, flag=FLAG_RESPONSE, remark="busy")
        count = min(count, self._most, MESSAGES - offset)
        if self._draws("less"):
            count = self._random.randint(1, count)
        if self._draws("more", 0.3):  # than was asked for: the next window's
            count = min(count + 3, MESSAGES - offset)
        ext = {"nextBeginOffset": str(offset + count), "minOffset": "0", "maxOffset": str(MESSAGES)}
        return Frame(
            ResponseCode.SUCCESS,
            frame.opaque,
            flag=FLAG_RESPONSE,
            ext=ext | {"suggestWhichBrokerId": "0"},
            body=b"".join(RECORDS[offset : offset + count]),
            serialize=serialize,
        )


@contextmanager
def peer(seed: int, **how: Any) -> Iterator[Peer]:
    found = Peer(seed, **how)
    try:
        yield found
    finally:
        for kept in client.links._kept.values():
            for link in kept:
                link.close()
        client.links._kept.clear()
        client.links._count = 0
        found.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "WAIT_S", 0.001)
    monkeypatch.setattr(read, "MOST_WAIT_S", 0.001)


def rows_of(found: Peer, begin: int, end: int, parts: int = 1, **options: str) -> list[Any]:
    chosen = SourceOptions.parse(
        {"namesrv": "127.0.0.1:1", "topic": "t", "columns": ",".join(COLUMNS), **options}
    )
    reader = read.PartitionReader(chosen, arrow_schema(schema_of(COLUMNS)))
    bounds = [begin + (end - begin) * part // parts for part in range(parts + 1)]
    ranges = [
        Range("t", "broker-a", 1, one, other, found.address) for one, other in pairwise(bounds)
    ]
    batches = list(reader.read(ranges))
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def expected(begin: int, end: int) -> list[Any]:
    return [
        {
            "queue_offset": offset,
            "body": b"%d" % offset * (1 + offset * 7 % 13),
            "tags": str(offset % 3),
            "topic": "t",
        }
        for offset in range(begin, end)
    ]


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("seed", range(24))
def test_rows_are_those_of_the_range(
    seed: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        for module in (client, decode, gather):
            monkeypatch.setattr(module, "COMPILED", None)
    drawn = random.Random(seed)
    # Small buffers and batches, so that there are many of them.
    monkeypatch.setattr(client, "BUFFER_BYTES", drawn.choice([600, 5000, 40_000, 2 << 20]))
    monkeypatch.setattr(client, "LEAST_ROOM", drawn.choice([16, 512]))
    monkeypatch.setattr(read, "BATCH_ROWS", drawn.choice([7, 100, 1000, 8192]))
    monkeypatch.setattr(read, "BATCH_BYTES", drawn.choice([4000, 2 << 20]))
    begin, trouble = drawn.randrange(2000), drawn.choice([0.0, 0.02, 0.2])
    end = drawn.randint(begin, MESSAGES)
    with peer(seed, most=drawn.choice([1, 32, 5000]), trouble=trouble) as found:
        # Whoever loses a connection asks the name servers where the broker is.
        monkeypatch.setattr(read.RangeReader, "_where", lambda _: found.address)
        rows = rows_of(
            found, begin, end, drawn.randint(1, 3), pullBatchSize=drawn.choice(["32", "1024"])
        )
    assert rows == expected(begin, end)


@pytest.mark.usefixtures("patience")
def test_answers_as_planned_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they come in any order, or into another buffer."""
    monkeypatch.setattr(client, "BUFFER_BYTES", 50_000)
    looked_at = 0
    before = read.RangeReader._take

    def counted(*arguments: Any) -> None:
        nonlocal looked_at
        looked_at += 1
        before(*arguments)

    monkeypatch.setattr(read.RangeReader, "_take", counted)
    with peer(1, most=32, trouble=0.0) as found:
        assert rows_of(found, 0, MESSAGES) == expected(0, MESSAGES)
    rounds = MESSAGES // (
        32 * client.PullRequest("g", read.MessageQueue("t", "b", 1), read.Filter()).most_at_once
    )
    assert looked_at <= rounds + 3, "only the probes that end a round"


@pytest.mark.usefixtures("patience")
def test_seeds_draw_every_kind_of_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for seed in range(4):
        with peer(seed, most=32, trouble=0.2) as found:
            monkeypatch.setattr(read.RangeReader, "_where", lambda _, found=found: found.address)
            assert rows_of(found, 0, MESSAGES) == expected(0, MESSAGES)
        seen |= found.kinds
    assert seen == {
        *("disorder", "lost", "a word", "in parts", "lost in the middle", "binary heads"),
        *("busy", "less", "more"),
    }
