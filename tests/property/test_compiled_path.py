"""The compiled path does what the plain path does: same store, replies and errors, byte for byte.

`COMETMQ_TWIN_SEEDS` sets how many runs of random and hostile traffic are compared.
"""

from __future__ import annotations

import os
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cometmq import _fast
from cometmq.broker.names import HALF_TOPIC
from cometmq.message import NewMessage
from cometmq.wire import properties, record
from cometmq.wire.frame import Frame, encode_frame
from cometmq.wire.record import Piece

sys.path.insert(0, str(Path(__file__).parent))
from twins import Traffic, Twins

SEEDS = int(os.environ.get("COMETMQ_TWIN_SEEDS", "60"))
STEPS = 100
SMALL: dict[str, Any] = {"log_file_bytes": 64 * 1024, "queue_file_bytes": 20 * 40}
SMALL |= {"index_slots": 8, "index_entries": 64}

pytestmark = pytest.mark.skipif(
    _fast.load()[0] is None, reason=f"no compiled path: {_fast.load()[1]}"
)


def _settings(rng: random.Random) -> dict[str, Any]:
    settings = dict(SMALL)
    settings["flush"] = rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH"))
    settings["is_index_enabled"] = rng.random() < 0.8
    settings["max_pull_bytes_memory"] = rng.choice((200, 2000, 1 << 18))
    settings["max_pull_count_memory"] = rng.choice((2, 32))
    settings["max_message_bytes"] = rng.choice((500, 4 << 20))
    settings["is_trace_on"] = rng.random() < 0.5
    settings["is_lite_pull_enabled"] = rng.random() < 0.8
    if rng.random() < 0.5:
        settings["log_file_bytes"] = 4096
    return settings


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_and_hostile_traffic(seed: int) -> None:
    rng = random.Random(seed)
    _play(rng, Twins(**_settings(rng)))


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_random_and_hostile_traffic_with_staged_records(seed: int) -> None:
    rng = random.Random(1000 + seed)
    settings = _settings(rng) | {"flush": "ASYNC_FLUSH", "is_staged": True}
    settings["stage_count"] = rng.choice((2, 3, 20))
    settings["stage_bytes"] = rng.choice((2048, 5000, 1 << 17))
    settings["commit_least_pages"] = rng.choice((0, 1, 4))
    twins = Twins(**settings)
    _play(rng, twins)
    for _ in range(3):  # all that was acknowledged gets committed, and shown
        twins.now_ms += 1000
        twins.both("tick", twins.now_ms)
        while twins.plain.flushes:
            twins.both("flush", twins.now_ms)
    twins.compare()
    store = twins.compiled.broker.store
    if store.read_only_reason is None:
        assert store.committed_offset == store.max_log_offset == store.dispatched_offset


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_and_hostile_traffic_with_messages_that_wait(seed: int) -> None:
    rng = random.Random(2000 + seed)
    settings = _settings(rng)
    settings["timer_log_file_bytes"] = rng.choice((52 * 5 + 16, 52 * 300))
    settings["timer_window_slots"] = rng.choice((20, 130))
    if rng.random() < 0.2:
        settings["transaction_op_interval_ms"] = 1000
    if rng.random() < 0.2:
        settings["timer_most_per_slot"] = 2
    if rng.random() < 0.2:
        settings |= {"flush": "ASYNC_FLUSH", "is_staged": True, "stage_bytes": 5000}
    twins = Twins(**settings)
    _play(rng, twins, kinds=rng.choice((20, 50, 90)))
    for _ in range(60):  # as a driver ticks while much is due
        twins.now_ms += rng.choice((0, 1, 2, 40))
        twins.both("tick", twins.now_ms)
        if rng.random() < 0.1:
            twins.both("flush", twins.now_ms)
    twins.compare()
    for _ in range(12):  # all that can comes out
        twins.now_ms += rng.choice((500, 5_000, 60_000))
        for _ in range(3):
            twins.both("tick", twins.now_ms)
            while twins.plain.flushes:
                twins.both("flush", twins.now_ms)
    twins.compare()


def _play(rng: random.Random, twins: Twins, kinds: int = 0) -> None:
    traffic = Traffic(rng, oddness=rng.choice((0, 5, 20, 100)), kinds=kinds)
    for _ in range(STEPS):
        while len(twins.conns) < 3:
            twins.open(rng.choice(("10.0.0.2", "10.0.0.3", "fd00::7")))
        conn = rng.choice(twins.conns)
        stream = traffic.stream(rng.choice((1, 1, 2, 5, 20)))
        if kinds:
            stream += b"".join(_end(rng, traffic, twins) for _ in range(rng.randrange(4)))
        for piece in _pieces(rng, stream):
            if conn in twins.conns:
                twins.play(conn, piece)
        twins.now_ms += rng.choice((0, 0, 1, 7, 300, -2))
        if rng.random() < 0.5:
            twins.both("flush", twins.now_ms)
        if rng.random() < 0.1:
            twins.now_ms += rng.choice((20, 600, 6_000))
            twins.both("tick", twins.now_ms)
        if rng.random() < 0.001:
            twins.both("flush", twins.now_ms, fails=True)
    twins.compare()
    plain, compiled = twins.plain, twins.compiled
    assert plain.taken == 0
    assert plain.seen == compiled.seen
    # A comparison of the plain path with itself would prove nothing.
    TAKEN.append((compiled.taken, compiled.seen))


def _end(rng: random.Random, traffic: Traffic, twins: Twins) -> bytes:
    """The end of some half message, mostly of one that is open, and mostly right."""
    store = twins.plain.broker.store
    begin, end = twins.plain.broker.half.offset, store.max_offset(HALF_TOPIC, 0)
    if end == 0:
        return b""
    at = rng.randrange(max(begin - 2, 0) if begin < end or traffic.rarely(50) else 0, end)
    unit = store.unit(HALF_TOPIC, 0, at)
    half = None if unit is None else store.message_at(unit[0])
    if unit is None or half is None:
        return b""
    key = properties.get(half.properties, "UNIQ_KEY") or ""
    fields = {
        "producerGroup": traffic.mostly("P1", "P2", ""),
        "tranStateTableOffset": traffic.mostly(str(at), str(at + 1), "x"),
        "commitLogOffset": traffic.mostly(str(unit[0]), str(unit[0] + 8), "-1", "9" * 15),
        "commitOrRollback": rng.choice(("8", "8", "8", "12", traffic.mostly("8", "0", "4"))),
        "fromTransactionCheck": rng.choice(("true", "false")),
        "msgId": traffic.mostly(key, "other", ""),
        "transactionId": traffic.mostly(key, "other", ""),
        "topic": half.topic,
    }
    raw = Frame(37, traffic.count, ext=traffic.odd(fields), flag=0 if traffic.rarely(20) else 2)
    raw.serialize = rng.choice((0, 1))
    traffic.count += 1
    return encode_frame(raw)


TAKEN: list[tuple[int, int]] = []


def test_the_compiled_path_was_compared() -> None:
    if not TAKEN:
        pytest.skip("no traffic was played before this")
    taken, seen = (sum(column) for column in zip(*TAKEN, strict=True))
    assert taken > seen / 4, f"only {taken} of {seen} frames took the compiled path"


def _pieces(rng: random.Random, stream: bytes) -> list[bytes]:
    """The stream as a network may deliver it."""
    if rng.random() < 0.5:
        return [stream]
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(1, 8)))
    edges = [0, *cuts, len(stream)]
    return [stream[a:b] for a, b in pairwise(edges) if a < b]


def _ordinary_sends(seed: int, count: int, tail: str = "") -> bytes:
    """Nothing but what the compiled path takes, once it was taught; `tail`: more properties."""
    return _ordinary_stream(seed, sends=count, others=False, tail=tail)


def _ordinary_stream(seed: int, sends: int = 3, *, others: bool = True, tail: str = "") -> bytes:
    traffic = Traffic(random.Random(seed))
    text = "UNIQ_KEY\x01U1\x02TAGS\x01A\x02KEYS\x01k1 k2\x02" + tail
    fields = {"a": "P", "b": "orders", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "5"}
    fields |= {"h": "0", "i": text, "j": "0"}
    pull = {"consumerGroup": "G1", "topic": "orders", "queueId": "1", "queueOffset": "0"}
    pull |= {"maxMsgNums": "32", "sysFlag": "4", "subscription": "*"}
    frames = [traffic.request(310, dict(fields), b"body%d" % n) for n in range(sends)]
    if not others:
        return b"".join(frames)
    frames += [traffic.request(11, dict(pull)), traffic.request(34, {}, b"{}")]
    frames += [traffic.request(310, dict(fields), b""), traffic.request(11, dict(pull))]
    return b"".join(frames)


@pytest.mark.parametrize("seed", range(4))
def test_split_at_every_byte(seed: int) -> None:
    stream = _ordinary_stream(seed)
    twins = Twins(**SMALL)
    for cut in range(0, len(stream), 1 if seed == 0 else 7):
        conn = twins.open()
        twins.play(conn, stream[:cut])
        twins.play(conn, stream[cut:])
    conn = twins.open()
    for at in range(len(stream)):
        twins.play(conn, stream[at : at + 1])
    twins.compare()
    assert twins.compiled.taken > 200


def test_a_roll_and_a_full_index_are_left_to_the_plain_path_and_come_back() -> None:
    twins = Twins(**SMALL | {"log_file_bytes": 2048})
    conn = twins.open()
    for _ in range(60):
        twins.play(conn, _ordinary_stream(1))
        twins.both("flush", twins.now_ms)
    twins.compare()
    assert len(twins.compiled.broker.store._log.segments.items) > 20
    assert twins.compiled.taken > 150


def test_a_staged_record_of_the_compiled_path_is_committed_without_more_traffic() -> None:
    twins = Twins(**SMALL, is_staged=True, stage_bytes=32 * 1024, commit_least_pages=100)
    conn = twins.open()
    for _ in range(2):
        twins.play(conn, _ordinary_stream(1))
        twins.play(conn, _ordinary_sends(1, 2))
    for _ in range(5):
        while twins.plain.flushes:
            twins.both("flush", twins.now_ms)
        twins.both("tick", twins.now_ms)
        taken, seen = twins.compiled.taken, twins.compiled.seen
        twins.play(conn, _ordinary_sends(1, 2))
        assert twins.compiled.taken - taken == twins.compiled.seen - seen == 2
        for side in (twins.plain, twins.compiled):
            assert side.broker.store.committed_offset < side.broker.store.max_log_offset
            assert side.broker.deadline_ms <= twins.now_ms + 200
        twins.now_ms += 200
        twins.both("tick", twins.now_ms)
    twins.compare()


def test_an_expired_message_is_never_served_and_its_neighbours_are() -> None:
    twins = Twins(**SMALL)
    conn = twins.open()
    traffic = Traffic(random.Random(1))
    pull = {"consumerGroup": "G1", "topic": "orders", "queueId": "1", "queueOffset": "0"}
    pull |= {"maxMsgNums": "32", "sysFlag": "4", "subscription": "*"}
    twins.play(conn, _ordinary_stream(1))
    brief = _ordinary_sends(1, 1, "TTL_MS\x0140\x02")
    twins.play(conn, _ordinary_sends(1, 2) + brief + _ordinary_sends(1, 2))
    for _ in range(2):  # taught by the first, and left to the plain path again by the second
        twins.play(conn, traffic.request(11, dict(pull)))
    assert twins.compiled.sent[conn].count(b"TTL_MS") == 2, "while it lives, all get it"
    twins.now_ms += 40
    taken = twins.compiled.taken
    for _ in range(3):
        twins.play(conn, traffic.request(11, dict(pull)))
    assert twins.compiled.sent[conn].count(b"TTL_MS") == 2
    assert twins.compiled.taken == taken
    for _ in range(2):
        twins.play(conn, traffic.request(11, dict(pull) | {"queueOffset": "7"}))
    assert twins.compiled.taken > taken, "behind it the queue is as any other"
    twins.compare()


def test_numbered_and_compared_messages_take_the_plain_path() -> None:
    twins = Twins(**SMALL)
    conn = twins.open()
    twins.play(conn, _ordinary_stream(1))
    taken = twins.compiled.taken
    for n in (0, 0, 1, 5):
        twins.play(conn, _ordinary_sends(1, 1, f"PRODUCER_SEQ\x01p 1 {n}\x02"))
    assert twins.compiled.taken == taken
    for side in (twins.plain, twins.compiled):
        assert (side.broker.sequences.duplicates, side.broker.sequences.gaps) == (1, 1)
    twins.play(conn, _ordinary_sends(1, 3))
    assert twins.compiled.taken == taken + 3
    fields = {"topic": "orders", "defaultTopic": "TBW102", "perm": "6", "order": "false"}
    fields |= {"readQueueNums": "4", "writeQueueNums": "4", "topicFilterType": "SINGLE_TAG"}
    fields |= {"topicSysFlag": "0", "attributes": "+dedup.minutes=1"}
    twins.play(conn, Traffic(random.Random(1)).request(17, fields))
    twins.play(conn, _ordinary_sends(1, 3))
    assert twins.compiled.taken == taken + 3
    assert twins.compiled.broker.dedup.duplicates == 3
    twins.compare()


def test_numbered_batches_are_judged_and_then_stored_by_the_compiled_path() -> None:
    twins = Twins(**SMALL)
    conn = twins.open()
    for _ in range(2):
        twins.play(conn, _ordinary_stream(1))
    fields = {"a": "P", "b": "orders", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "5"}
    fields |= {"h": "0", "i": "", "j": "0", "m": "true"}

    def batch(begin: int, end: int, extra: str = "") -> bytes:
        texts = [
            f"UNIQ_KEY\x01U{n}\x02PRODUCER_SEQ\x01w 1 {n}\x02{extra}" for n in range(begin, end)
        ]
        body = record.join_batch(Piece(0, b"row", text) for text in texts)
        return encode_frame(Frame(320, begin, ext=dict(fields), body=body))

    taken = twins.compiled.taken
    twins.play(conn, batch(0, 5) + _ordinary_sends(1, 1) + batch(5, 9))
    assert twins.compiled.taken == taken + 3
    for raw in (batch(0, 5), batch(7, 12), batch(20, 22), batch(12, 14, "TTL_MS\x015\x02")):
        twins.play(conn, raw)
    assert twins.compiled.taken == taken + 3, "a duplicate, an overlap, a gap, one that expires"
    twins.play(conn, batch(14, 15))
    assert twins.compiled.taken == taken + 4
    for side in (twins.plain, twins.compiled):
        (last,) = side.broker.sequences._table.values()
        assert (last.n, last.queue_offset, last.end_offset) == (
            14,
            23,
            side.broker.store.max_log_offset,
        )
    assert twins.plain.broker.sequences._table == twins.compiled.broker.sequences._table
    twins.compare()


KINDS = (
    *("DELAY\x011\x02", "TIMER_DELAY_MS\x011500\x02", "TIMER_DELAY_SEC\x011\x02"),
    *("TIMER_DELIVER_MS\x011700000004700\x02", "TRAN_MSG\x01true\x02PGROUP\x01P\x02"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_message_that_waits_is_stored_by_the_compiled_path(kind: str, flush: str) -> None:
    twins = Twins(**SMALL, flush=flush)
    conn = twins.open()
    twins.play(conn, _ordinary_sends(1, 1))
    for _ in range(4):  # until the topic is known, and its first send is answered
        twins.both("flush", twins.now_ms)
        twins.both("tick", twins.now_ms)
        twins.now_ms += 700
    twins.play(conn, _ordinary_sends(1, 2, kind))
    taken = twins.compiled.taken
    twins.play(conn, _ordinary_sends(1, 3, kind))
    assert twins.compiled.taken == taken + 3
    assert twins.compiled.broker.deadline_ms == twins.plain.broker.deadline_ms
    twins.compare()


def _plain_puts(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The topics of messages that the compiled side's broker stores itself, by the plain path."""
    broker, found = twins.compiled.broker, list[str]()
    put, put_together = broker.put, broker.put_together

    def noted(message: NewMessage, *args: Any, **options: Any) -> Any:
        found.append(message.topic)
        return put(message, *args, **options)

    def noted_together(message: NewMessage, *args: Any, **options: Any) -> Any:
        found.append(message.topic)
        return put_together(message, *args, **options)

    monkeypatch.setattr(broker, "put", noted)
    monkeypatch.setattr(broker, "put_together", noted_together)
    return found


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_messages_that_waited_are_delivered_by_the_compiled_path(
    kind: str, flush: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(**SMALL | {"queue_file_bytes": 20 * 400, "index_entries": 4000}, flush=flush)
    conn = twins.open()
    for _ in range(20):
        twins.play(conn, _ordinary_sends(1, 3, kind))
        twins.both("flush", twins.now_ms)
    puts = _plain_puts(twins, monkeypatch)
    for _ in range(20):
        twins.now_ms += 700
        twins.both("tick", twins.now_ms)
        while twins.plain.flushes:
            twins.both("flush", twins.now_ms)
    assert twins.plain.broker.store.max_offset("orders", 1) == 60
    assert puts == ["orders"], "the first, from which it learns"
    twins.compare()


def test_timed_messages_enter_the_wheel_though_too_many_came_to_be_remembered() -> None:
    twins = Twins(log_file_bytes=4 << 20, queue_file_bytes=20 * 8000, index_entries=20_000)
    conn = twins.open()
    for kind, times in ((KINDS[1], 1), (KINDS[1], 90), (KINDS[2], 6), (KINDS[1], 14)):
        twins.play(conn, _ordinary_sends(1, 50, kind) * times)
        if times == 90:
            continue  # more than hot.pyx's RECENT, and then others, before any enters
        twins.both("tick", twins.now_ms)
    for _ in range(20):  # the plain path takes fewer at once
        twins.both("tick", twins.now_ms)
    assert twins.compiled.broker.timers.pending == 5_550
    twins.compare()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_queue_that_was_taken_from_a_topic_is_not_delivered_to(kind: str) -> None:
    twins = Twins(**SMALL | {"queue_file_bytes": 20 * 400, "index_entries": 4000})
    conn = twins.open()
    shape = {"defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0"}
    shape |= {"topic": "orders", "perm": "6", "order": "false"}
    before = 0
    for queues in (4, 1):
        for _ in range(3):
            twins.play(conn, _ordinary_sends(1, 3, kind))
        shape |= {"readQueueNums": str(queues), "writeQueueNums": str(queues)}
        twins.play(conn, encode_frame(Frame(17, 77, ext=dict(shape))))
        for _ in range(12):
            twins.now_ms += 700
            twins.both("tick", twins.now_ms)
            while twins.plain.flushes:
                twins.both("flush", twins.now_ms)
        twins.compare()
        store = twins.compiled.broker.store
        assert store.max_offset("orders", 1) == 9
        assert store.max_offset("orders", 0) == before
        before = 9


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_transactions_are_ended_by_the_compiled_path(
    flush: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(**SMALL | {"queue_file_bytes": 20 * 400, "index_entries": 4000}, flush=flush)
    conn = twins.open()
    for _ in range(10):
        twins.play(conn, _ordinary_sends(1, 3, KINDS[4]))
        twins.both("flush", twins.now_ms)
    puts = _plain_puts(twins, monkeypatch)
    store = twins.plain.broker.store
    frames = b""
    for at in (*range(30), 3, 4):  # two of them twice
        unit = store.unit(HALF_TOPIC, 0, at)
        assert unit is not None
        fields = {"producerGroup": "P", "tranStateTableOffset": str(at), "msgId": "U1"}
        fields |= {"commitLogOffset": str(unit[0]), "commitOrRollback": "12" if at % 5 else "8"}
        frames += encode_frame(Frame(37, at, ext=fields, flag=2))
    taken = twins.compiled.taken
    twins.play(conn, frames)
    while twins.plain.flushes:
        twins.both("flush", twins.now_ms)
    assert twins.compiled.taken == taken + 29
    assert puts == ["orders"], "the first, from which it learns"
    half = twins.compiled.broker.half
    assert (half.commits, half.rollbacks, half.repeated) == (6, 24, 2)
    assert store.max_offset("orders", 1) == 6
    twins.compare()
