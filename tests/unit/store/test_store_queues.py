"""Consume queues: units, bounds, holes, time, many queues."""

from __future__ import annotations

import random
import struct

import pytest
from fake_disk import T0, FakeFiles, flush_all, message, small

from cometmq.store.consume_queue import count_units
from cometmq.store.results import FetchStatus
from cometmq.store.store import Store
from cometmq.wire import record
from cometmq.wire.hashing import java_hash

QUEUE = "consumequeue/T/0/{:020d}"


def test_unit_bytes() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store.append(message(b"one", properties="TAGS\x01TagA\x02"), T0)
    store.append(message(b"two", properties="TAGS\x01polygenelubricants\x02"), T0)
    store.append(message(b"three"), T0)
    arrivals = store.dispatch(T0)
    units = [struct.unpack_from(">qiq", files.seen[QUEUE.format(0)], 20 * n) for n in range(3)]
    assert units == [(0, 105, 2598919), (105, 119, -(2**31)), (224, 97, 0)]
    assert [a.tags_code for a in arrivals] == [2598919, -(2**31), 0]
    assert java_hash("polygenelubricants") == -(2**31)


def test_delayed_topic_has_due_time_as_tags_code() -> None:
    _, store = FakeFiles(), Store.open(FakeFiles(), small(), T0)
    for level, delay_ms in (("1", 1000), ("5", 60_000), ("18", 7_200_000), ("99", 7_200_000)):
        store.append(
            message(topic="SCHEDULE_TOPIC_XXXX", properties=f"DELAY\x01{level}\x02TAGS\x01a\x02"),
            T0,
        )
        (arrival,) = store.dispatch(T0)
        assert arrival.tags_code == T0 + delay_ms
    for text in ("DELAY\x010\x02TAGS\x01a\x02", "DELAY\x01x\x02TAGS\x01a\x02", "TAGS\x01a\x02"):
        store.append(message(topic="SCHEDULE_TOPIC_XXXX", properties=text), T0)
        assert store.dispatch(T0)[0].tags_code == 97
    store.append(message(properties="DELAY\x013\x02TAGS\x01a\x02"), T0)
    assert store.dispatch(T0)[0].tags_code == 97


def test_pre_blank_when_a_queue_begins_in_mid_numbering() -> None:
    """A follower that starts late, or a queue whose log has expired, begins at index 21."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store._queues.need("T", 0).ends.next_offset = 21
    store.append(message(b"x" * 50), T0)
    store.dispatch(T0)
    assert files.files("consumequeue/T/0") == [(f"{320:020d}", 320)]
    content = files.seen[QUEUE.format(320)]
    for n in range(5):
        assert struct.unpack_from(">qiq", content, 20 * n) == (0, 0x7FFFFFFF, 0)
    assert struct.unpack_from(">qiq", content, 100)[:2] == (0, 142)
    assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (21, 22)
    for disk in (files.copy(), files):  # after a kill and after a clean stop
        if disk is files:
            store.close(T0)
        again = Store.open(disk, small(), T0)
        assert (again.min_offset("T", 0), again.max_offset("T", 0)) == (21, 22)
        assert again.fetch("T", 0, 20, 1).status is FetchStatus.OFFSET_TOO_SMALL
        assert again.fetch("T", 0, 21, 1).count == 1


def test_dispatching_twice_changes_nothing() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(20):
        store.append(message(b"%d" % n, properties=f"UNIQ_KEY\x01k{n}\x02"), T0)
    store.dispatch(T0)
    before = {name: bytes(content) for name, content in files.seen.items()}
    store._dispatcher.position = 0
    assert store.dispatch(T0) == []
    assert {name: bytes(content) for name, content in files.seen.items()} == before


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 639, 640, 641, 4999, 5000])
def test_count_units(count: int) -> None:
    buffer = bytearray(5000 * 20)
    for n in range(count):
        struct.pack_into(">qiq", buffer, n * 20, n << 8, 256 if n % 2 else 91, 0)
    assert count_units(memoryview(buffer), len(buffer)) == count
    if count > 10:
        struct.pack_into(">qiq", buffer, 5 * 20, 5, 0, 77)
        assert count_units(memoryview(buffer), len(buffer)) == 5
        struct.pack_into(">qiq", buffer, 3 * 20, 3, -1, 77)
        assert count_units(memoryview(buffer), len(buffer)) == 3


def test_count_units_reads_little_of_a_sparse_file() -> None:
    class Counting:
        def __init__(self, inner: memoryview) -> None:
            self.inner = inner
            self.most = 0

        def __getitem__(self, key: slice) -> memoryview:
            self.most = max(self.most, key.stop)
            return self.inner[key]

    buffer = bytearray(6_000_000)
    struct.pack_into(">qiq", buffer, 0, 0, 100, 0)
    counting = Counting(memoryview(buffer))
    assert count_units(counting, len(buffer)) == 1  # type: ignore[arg-type]
    assert counting.most <= 4096


def test_search_by_time() -> None:
    """LOWER: the first at t, else the first later, else the end. UPPER: the last at t, else the
    last earlier. Both inside [min, max]."""
    store = Store.open(FakeFiles(), small(), T0)
    times = [10, 20, 20, 20, 30, 50]
    for ms in times:
        store.append(message(b"x" * 300), T0 + ms)
    store.dispatch(T0)
    lower = {0: 0, 10: 0, 11: 1, 20: 1, 21: 4, 30: 4, 31: 5, 50: 5, 51: 6, 999: 6}
    upper = {0: 0, 9: 0, 10: 0, 11: 0, 20: 3, 21: 3, 30: 4, 49: 4, 50: 5, 999: 5}
    for ms, expected in lower.items():
        assert store.offset_by_time("T", 0, T0 + ms) == expected, ms
    for ms, expected in upper.items():
        assert store.offset_by_time("T", 0, T0 + ms, is_upper=True) == expected, ms
    assert store.offset_by_time("T", 9, T0) == 0
    assert store.store_ms_at("T", 0, 4) == T0 + 30
    assert store.store_ms_at("T", 0, 6) is None
    assert store.store_ms_at("T", 0, -1) is None
    assert store.earliest_store_ms("T", 0) == T0 + 10
    assert store.earliest_store_ms("T", 7) is None
    assert store.first_store_ms() == T0 + 10


def test_search_by_time_against_a_loop() -> None:
    rng = random.Random(5)
    store = Store.open(FakeFiles(), small(), T0)
    times: list[int] = []
    now = T0
    for _ in range(100):
        now += rng.choice((0, 0, 1, 3))
        times.append(store.append(message(b"x"), now).store_ms)
    store.dispatch(now)
    for at in range(T0 - 2, now + 3):
        later = [n for n, ms in enumerate(times) if ms >= at]
        earlier = [n for n, ms in enumerate(times) if ms <= at]
        assert store.offset_by_time("T", 0, at) == (later[0] if later else 100)
        assert store.offset_by_time("T", 0, at, True) == (earlier[-1] if earlier else 0)


def test_many_queues_stay_within_the_limit_of_mapped_files() -> None:
    """600 queues with room for 8 mapped files: all are written, flushed and read."""
    files = FakeFiles()
    config = small(max_open_queue_files=8, max_open_log_files=4, log_file_bytes=1 << 20)
    store = Store.open(files, config, T0)
    for n in range(1800):
        store.append(message(b"%d" % n, queue_id=n % 600), T0 + n)
    store.dispatch(T0)
    assert len(store._queues.pool) <= 8
    assert files.most_mapped <= 8 + 4 + 16 + 2
    flush_all(store, T0 + 100_000)
    dirty = [
        name
        for name, content in files.seen.items()
        if name.startswith("consumequeue") and files.durable.get(name) != bytes(content)
    ]
    assert dirty == []
    for queue_id in range(600):
        found = record.decode_all(store.fetch("T", queue_id, 0, 32).body)
        assert [int(m.body) for m in found] == [queue_id, queue_id + 600, queue_id + 1200]
    assert store.queue_ids("T") == list(range(600))
    assert len(list(store.queues())) == 600


def test_gap_is_filled_so_that_a_scan_passes_it() -> None:
    """A record is lost in the middle of a foreign log: the queue goes on at the right numbers."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store.append(message(b"a"), T0)
    store._queues.need("T", 0).ends.next_offset = 3
    store.append(message(b"b"), T0)
    store.dispatch(T0)
    for opened in (store, Store.open(files.copy(), small(), T0)):
        assert opened.max_offset("T", 0) == 4
        assert record.decode(opened.fetch("T", 0, 3, 1).body).body == b"b"
        first = opened.fetch("T", 0, 0, 32)
        assert (first.count, first.next_offset) == (2, 4)
        assert opened.fetch("T", 0, 1, 1).status is FetchStatus.MESSAGE_WAS_REMOVING
        assert opened.append(message(b"c"), T0).queue_offset == 4
