"""Fetching: the table of statuses, limits, filters; single records."""

from __future__ import annotations

import pytest
from fake_disk import T0, FakeFiles, message, small

from cometmq.store.results import FetchStatus
from cometmq.store.store import Store
from cometmq.wire import record


def filled(count: int, size: int = 10, **changes: object) -> Store:
    store = Store.open(FakeFiles(), small(log_file_bytes=1 << 20, **changes), T0)
    for n in range(count):
        store.append(message(b"%04d" % n + b"x" * size, properties=f"TAGS\x01{n % 3}\x02"), T0 + n)
    store.dispatch(T0)
    return store


def bodies(body: bytes) -> list[int]:
    return [int(m.body[:4]) for m in record.decode_all(body)]


def test_statuses_and_next_offsets() -> None:
    store = filled(5)
    cases = {
        -1: (FetchStatus.OFFSET_TOO_SMALL, 0),
        0: (FetchStatus.FOUND, 5),
        5: (FetchStatus.OFFSET_OVERFLOW_ONE, 5),
        6: (FetchStatus.OFFSET_OVERFLOW_BADLY, 5),
    }
    for offset, expected in cases.items():
        found = store.fetch("T", 0, offset, 32)
        assert (found.status, found.next_offset) == expected
        assert (found.min_offset, found.max_offset) == (0, 5)
    unknown = store.fetch("T", 1, 7, 32)
    assert (unknown.status, unknown.next_offset) == (FetchStatus.NO_MATCHED_LOGIC_QUEUE, 0)
    store.append(message(queue_id=1), T0)  # known, but nothing is visible yet
    assert store.fetch("T", 1, 0, 32).status is FetchStatus.NO_MESSAGE_IN_QUEUE


def test_missing_queue_file() -> None:
    store = filled(40)
    queue = store._queues.get("T", 0)
    assert queue is not None
    queue.segments.items = queue.segments.items[2:]
    queue.ends.min_offset = 0
    found = store.fetch("T", 0, 3, 32)
    assert (found.status, found.next_offset) == (FetchStatus.OFFSET_FOUND_NULL, 16)


def test_limits_in_memory() -> None:
    store = filled(100, queue_file_bytes=20 * 100)
    assert store.fetch("T", 0, 0, 500).count == 32
    assert store.fetch("T", 0, 0, 7).count == 7
    assert store.fetch("T", 0, 0, 0).count == 1
    size = len(store.fetch("T", 0, 0, 1).body)
    assert store.fetch("T", 0, 0, 32, max_bytes=3 * size).count == 3
    assert store.fetch("T", 0, 0, 32, max_bytes=3 * size - 1).count == 2
    assert store.fetch("T", 0, 0, 32, max_bytes=1).count == 1
    assert bodies(store.fetch("T", 0, 95, 32).body) == [95, 96, 97, 98, 99]


def test_limits_when_cold() -> None:
    store = filled(100, queue_file_bytes=20 * 100, in_memory_bytes=500)
    cold = store.fetch("T", 0, 0, 32)
    assert (cold.count, cold.is_cold) == (8, True)
    hot = store.fetch("T", 0, 97, 32)
    assert (hot.count, hot.is_cold) == (3, False)
    assert store.is_cold(0)
    assert not store.is_cold(store.max_log_offset - 100)


def test_bytes_limit_and_first_always() -> None:
    store = filled(10, size=1000, max_fetch_bytes=2500)
    assert store.fetch("T", 0, 0, 32).count == 2
    one = filled(10, size=1000, max_fetch_bytes=10)
    assert one.fetch("T", 0, 4, 32).next_offset == 5


def test_a_fetch_stays_in_one_queue_file() -> None:
    store = filled(40)  # 16 units a file
    assert store.fetch("T", 0, 10, 32).next_offset == 16
    assert store.fetch("T", 0, 16, 32).next_offset == 32


def test_filter_on_tags_code() -> None:
    store = filled(30, queue_file_bytes=20 * 100)
    found = store.fetch("T", 0, 0, 4, lambda code, _: code == ord("1"))
    assert bodies(found.body) == [1, 4, 7, 10]
    assert found.next_offset == 11
    seen: list[int] = []
    none = store.fetch("T", 0, 0, 4, lambda code, at: seen.append(at) is not None)
    assert (none.status, none.next_offset) == (FetchStatus.NO_MATCHED_MESSAGE, 30)
    assert [store.record_at(at) is not None for at in seen] == [True] * 30


def test_scan_is_bounded() -> None:
    store = filled(2000, queue_file_bytes=20 * 3000)
    found = store.fetch("T", 0, 0, 4, lambda code, _: False)
    assert (found.status, found.next_offset) == (FetchStatus.NO_MATCHED_MESSAGE, 800)
    assert store.fetch("T", 0, 0, 1000, lambda code, _: False).next_offset == 1000


def test_the_scan_can_be_bounded_further() -> None:
    store = filled(200, queue_file_bytes=20 * 3000)
    found = store.fetch("T", 0, 0, 4, lambda code, _: False, max_scan=50)
    assert (found.status, found.next_offset) == (FetchStatus.NO_MATCHED_MESSAGE, 50)


def test_ext_address_is_for_the_filter_to_judge() -> None:
    store = filled(1)
    address = -(2**63) + 40
    store._queues.need("T", 5).put(0, 0, len(store.record_at(0) or b""), address)
    assert store.fetch("T", 5, 0, 4, lambda code, _: code == address).count == 1
    assert store.fetch("T", 5, 0, 4, lambda code, _: code != address).count == 0


def test_the_properties_of_a_record() -> None:
    store = filled(2)
    at = store._queues.need("T", 0).unit(1)[0]
    raw = store.record_at(at)
    assert raw is not None
    assert store.properties_at(at) == record.decode(raw).properties
    assert store.properties_at(at + 1) is None
    assert store.properties_at(10**9) is None


def test_unit_that_points_to_no_record_is_passed_over() -> None:
    store = filled(3)
    queue = store._queues.need("T", 0)
    at = queue.unit(1)[0]
    queue.segments.items[0].buffer[20:32] = (at + 1).to_bytes(8, "big") + (100).to_bytes(4, "big")
    found = store.fetch("T", 0, 0, 32)
    assert bodies(found.body) == [0, 2]
    assert found.next_offset == 3
    assert store.stats.damaged_units == 1


def test_record_at_wants_the_exact_start() -> None:
    store = filled(3)
    whole = store.record_at(0)
    assert whole is not None
    assert record.decode(whole).body[:4] == b"0000"
    size = len(whole)
    assert store.record_at(1) is None
    assert store.record_at(size) is not None
    assert store.record_at(3 * size) is None
    assert store.record_at(-1) is None
    assert store.record_at(2**62) is None


@pytest.mark.parametrize("is_sync", [True, False])
def test_sync_mode_shows_only_what_is_durable(is_sync: bool) -> None:
    store = Store.open(FakeFiles(), small(is_sync_flush=is_sync), T0)
    store.append(message(b"a"), T0)
    assert len(store.dispatch(T0)) == (0 if is_sync else 1)
    assert store.is_dispatch_behind == is_sync
    if is_sync:
        flush = store.take_flush(T0)
        assert flush is not None
        store.append(message(b"b"), T0)  # after the flush was taken: not covered
        for target in flush.targets:
            target.sync()
        store.flushed("log", T0)
        assert [a.queue_offset for a in store.dispatch(T0)] == [0]
        assert store.max_offset("T", 0) == 1
        assert store.next_queue_offset("T", 0) == 2
