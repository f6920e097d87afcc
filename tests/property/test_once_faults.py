"""Sequences, keys and expired messages on a disk that forgets: kills and power losses from a seed.

After every crash what the broker knows of its producers must be what the recovered log says, no
number and no key may stand in a queue twice, no acknowledged number may be missing where the flush
mode promises it, and an expired message must have been moved once.

`COMETMQ_ONCE_SEEDS` sets how many runs.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cometmq import _fast
from cometmq.broker import sequences
from cometmq.ports import Out
from cometmq.store.results import FetchStatus
from cometmq.testing.disk import SimulatedFiles
from cometmq.wire import properties, record
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame, FrameReader, encode_frame
from cometmq.wire.headers import SEND_LETTERS
from cometmq.wire.record import Piece

sys.path.insert(0, str(Path(__file__).parent))
from twins import NOW_MS, Side

SEEDS = int(os.environ.get("COMETMQ_ONCE_SEEDS", "40"))
STEPS = 160
Row = tuple[int, int]  # batch, n


class Play:
    """One broker after the other on one disk, and what its clients believe."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.files = SimulatedFiles(random.Random(seed + 1))
        self.settings: dict[str, Any] = {
            "flush": rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH")),
            "log_file_bytes": rng.choice((8 * 1024, 64 * 1024)),
            "queue_file_bytes": 20 * 40,
            "index_slots": 8,
            "index_entries": 64,
            "is_fast_failure_enabled": False,
            "sync_flush_timeout_ms": 600_000,
        }
        self.is_sync = self.settings["flush"] == "SYNC_FLUSH"
        self.now_ms = NOW_MS
        self.opaque = 0
        self.next_row: dict[tuple[str, int], Row] = {}
        self.acked: dict[tuple[str, int], Row] = {}
        self.waiting: dict[int, tuple[tuple[str, int], Row]] = {}
        self.brief_count = 0
        self.may_have_lost = False
        self.gaps = self.duplicates = self.moved = 0
        self.start()

    def start(self) -> None:
        is_compiled = _fast.load()[0] is not None and self.rng.random() < 0.5
        self.side = Side(
            is_compiled=is_compiled, settings=self.settings, files=self.files, now_ms=self.now_ms
        )
        self.side.open(1, "10.0.0.2", self.now_ms)
        self.seen_bytes = 0
        self.waiting.clear()
        for topic, attributes in (
            ("S", ""),
            ("K", "+dedup.minutes=9999"),
            ("E", "+expired.topic=old"),
        ):
            fields = {"topic": topic, "defaultTopic": "TBW102", "perm": 6, "order": "false"}
            fields |= {"readQueueNums": 2, "writeQueueNums": 2, "topicFilterType": "SINGLE_TAG"}
            fields |= {"topicSysFlag": 0, "attributes": attributes}
            self.post(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)

    def post(self, code: int, fields: dict[str, Any], body: bytes = b"") -> int:
        self.opaque += 1
        ext = {name: str(value) for name, value in fields.items()}
        self.side.play(1, encode_frame(Frame(code, self.opaque, ext=ext, body=body)), self.now_ms)
        return self.opaque

    def send(self, topic: str, queue: int, texts: list[dict[str, str]]) -> int:
        fields: dict[str, Any] = {
            "producerGroup": "P",
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 2,
            "queueId": queue,
            "sysFlag": 0,
            "bornTimestamp": self.now_ms,
            "flag": 0,
            "batch": "true" if len(texts) > 1 else "false",
        }
        self.brief_count += 1
        texts = [{"UNIQ_KEY": f"U{self.brief_count}-{n}", **one} for n, one in enumerate(texts)]
        body = b"x" * self.rng.randrange(60)
        if len(texts) > 1:
            pieces = [Piece(0, body, properties.build(one)) for one in texts]
            body, text = record.join_batch(pieces), ""
        else:
            text = properties.build(texts[0])
        fields["properties"] = text
        ext = {letter: fields[name] for letter, name in SEND_LETTERS.items() if name in fields}
        return self.post(320 if len(texts) > 1 else 310, ext, body)

    # ------------------------------------------------------------------------------- the writers

    def write_rows(self) -> None:
        key = (self.rng.choice("pq"), self.rng.randrange(2))
        batch, n = self.next_row.get(key, (1, 0))
        if n and self.rng.random() < 0.1:
            batch, n = batch + 1, 0
        begin = max(0, n - self.rng.choice((0, 0, 0, 2)))
        end = max(begin + 1, n + self.rng.randrange(4))
        texts = [{"PRODUCER_SEQ": f"{key[0]} {batch} {one}"} for one in range(begin, end)]
        opaque = self.send("S", key[1], texts)
        self.waiting[opaque] = (key, (batch, end - 1))
        self.next_row[key] = (batch, max(end, n))

    def hear(self) -> None:
        told = bytes(self.side.sent[1])
        for frame in FrameReader().feed(told[self.seen_bytes :]):
            asked = self.waiting.pop(frame.opaque, None)
            if asked is not None:
                self.judge(*asked, frame)
        self.seen_bytes = len(told)

    def judge(self, key: tuple[str, int], row: Row, frame: Frame) -> None:
        if frame.code == 0:
            assert frame.ext["sequenced"] == "true"
            self.duplicates += "duplicate" in frame.ext
            self.acked[key] = max(self.acked.get(key, (0, 0)), row)
            return
        gap = re.fullmatch(
            r"sequence gap: .* batch (\d+): expected (\d+), got \d+", frame.remark or ""
        )
        assert gap is not None, frame.remark
        assert self.may_have_lost, f"a gap without a loss: {frame.remark}"
        self.gaps += 1
        self.next_row[key] = (int(gap[1]), int(gap[2]))

    # ------------------------------------------------------------------------------ the accidents

    def crash(self) -> None:
        self.hear()
        how = self.rng.choice(("kill", "kill", "power", "power", "stop"))
        if how == "stop":
            out: Out = []
            self.side.broker.stop(self.now_ms, out)
            self.side._carry_out(out, self.now_ms)
            self.side.broker.close(self.now_ms)
            self.files.kill()
        elif how == "kill":
            self.files.kill()
        else:
            self.files.lose_power(self.rng.choice((0, 30, 70, 100)))
            self.may_have_lost |= not self.is_sync
        self.now_ms += self.rng.choice((1, 500, 20_000))
        self.start()
        self.check()
        for key in self.next_row:  # what was not acknowledged is sent again
            known = self.last_of(key)
            if how != "power" or self.is_sync:
                assert known >= self.acked.get(key, known), f"{key} lost after {how}"
            self.next_row[key] = (known[0], known[1] + 1) if known > (0, 0) else (1, 0)
            self.acked[key] = known

    def last_of(self, key: tuple[str, int]) -> Row:
        last = self.side.broker.sequences._table.get(("S", key[1], key[0]))
        return (0, 0) if last is None else (last.batch, last.n)

    # -------------------------------------------------------------------------------- the checkers

    def check(self) -> None:
        store = self.side.broker.store
        said: dict[tuple[str, int, str], tuple[int, int, int]] = {}
        for found in store.records(store.min_log_offset):
            value = properties.get(found.properties, sequences.NAME)
            place = sequences.addressed(found)
            if value is not None and place is not None:
                producer, batch, n = value.split(" ")
                said[(*place, producer)] = (int(batch), int(n), found.queue_offset)
        known = self.side.broker.sequences._table
        assert {key: (one.batch, one.n, one.queue_offset) for key, one in known.items()} == said

    def rows(self, topic: str, queue: int) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        store, offset = self.side.broker.store, 0
        while True:
            fetched = store.fetch(topic, queue, offset, 32)
            if fetched.status is not FetchStatus.FOUND:
                return found
            offset = fetched.next_offset
            for one in record.decode_all(fetched.body):
                found.append(properties.parse(one.properties))

    def check_queues(self) -> None:
        for queue in range(2):
            last: dict[str, Row] = {}
            for row in self.rows("S", queue):
                producer, batch, n = row["PRODUCER_SEQ"].split(" ")
                before, now = last.get(producer, (0, -1)), (int(batch), int(n))
                is_next = now[0] == before[0] and now[1] == before[1] + 1
                assert is_next or (now[0] > before[0] and now[1] == 0), (producer, before, now)
                last[producer] = now
        # A delayed message may be delivered again after a crash: that is one message all the same.
        told = [row for queue in range(2) for row in self.rows("K", queue)]
        keys = Counter(row["UNIQ_KEY"] for row in told if "DELAY" not in row)
        keys.update({row["UNIQ_KEY"] for row in told if "DELAY" in row})
        assert not keys or max(keys.values()) == 1, keys
        moved = Counter(
            (row["EXPIRED_ORIGIN_QUEUE"], row["EXPIRED_ORIGIN_OFFSET"], row["UNIQ_KEY"])
            for queue in range(2)
            for row in self.rows("old", queue)
        )
        assert not moved or max(moved.values()) == 1, moved
        expired = {
            (str(queue), str(offset), row["UNIQ_KEY"])
            for queue in range(2)
            for offset, row in enumerate(self.rows("E", queue))
        }
        assert expired <= set(moved), "not moved"
        self.moved = len(moved)

    # ------------------------------------------------------------------------------------ the play

    def settle(self) -> None:
        """Time passes, the disk works."""
        for _ in range(12):
            self.now_ms += 1_000
            self.side.tick(self.now_ms)
            while self.side.flushes:
                self.side.flush(self.now_ms)
        self.hear()

    def step(self) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.4:
            self.write_rows()
        elif what < 0.6:
            keys = [{"UNIQ_KEY": f"k{rng.randrange(30)}"} for _ in range(rng.choice((1, 1, 3)))]
            if len(keys) == 1 and rng.random() < 0.2:
                keys[0]["DELAY"] = "1"
            self.send("K", rng.randrange(2), keys)
        elif what < 0.7:
            ttl = [{"TTL_MS": str(rng.choice((1, 300, 3_000)))} for _ in range(rng.choice((1, 2)))]
            self.send("E", rng.randrange(2), ttl)
        elif what < 0.8:
            self.send("S2", 0, [{}])
        elif what < 0.97:
            self.now_ms += rng.choice((0, 1, 200, 2_500))
            self.side.tick(self.now_ms)
        else:
            self.crash()
        if rng.random() < 0.4:
            self.side.flush(self.now_ms)
        self.hear()


TOTALS: Counter[str] = Counter()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_once_whatever_the_disk_does(seed: int) -> None:
    play = Play(seed)
    for _ in range(STEPS):
        play.step()
    play.settle()
    play.check()
    play.check_queues()
    TOTALS["gaps"] += play.gaps
    TOTALS["duplicates"] += play.duplicates
    TOTALS["keys"] += play.side.broker.dedup.duplicates
    TOTALS["moved"] += play.moved
    TOTALS["healed"] += play.side.broker.expired.healed


def test_something_was_played() -> None:
    if len(TOTALS) == 0:
        pytest.skip("no seed was played before this")
    assert all(TOTALS[name] for name in ("duplicates", "keys", "moved")), TOTALS
