"""What a store believes after a crash: RocketMQ's bugs by number, and our own rules."""

from __future__ import annotations

import pathlib
import random
import shutil
import struct
from typing import Any

import pytest
from fake_disk import T0, FakeFiles, flush_all, keyed, message, small

from cometmq import _fast
from cometmq.errors import StoreCorrupt
from cometmq.store.files import RealFiles
from cometmq.store.results import FetchStatus
from cometmq.store.store import Store
from cometmq.wire import record

LOG0 = "commitlog/00000000000000000000"
CHECKPOINT = struct.Struct(">qqqqq")


def numbers(store: Store, topic: str = "T", queue_id: int = 0) -> list[tuple[int, bytes]]:
    """(queue offset, body) of everything in a queue, read the way a consumer reads."""
    found: list[tuple[int, bytes]] = []
    offset = store.min_offset(topic, queue_id)
    while (fetched := store.fetch(topic, queue_id, offset, 32)).status is FetchStatus.FOUND:
        found += [(m.queue_offset, m.body) for m in record.decode_all(fetched.body)]
        offset = fetched.next_offset
    assert offset == store.max_offset(topic, queue_id)
    return found


def fill(store: Store, count: int, *, at: int = 0, size: int = 100, queues: int = 1) -> None:
    for n in range(at, at + count):
        store.append(message(b"%d." % n + b"x" * size, queue_id=n % queues), T0 + n)


def body(n: int, size: int = 100) -> bytes:
    return b"%d." % n + b"x" * size


def set_checkpoint(files: FakeFiles, log_ms: int, queues_ms: int, index_ms: int) -> None:
    CHECKPOINT.pack_into(files.seen["checkpoint"], 0, log_ms, queues_ms, index_ms, 0, 0)


def test_issue_467_records_missed_after_abnormal_shutdown() -> None:
    """Records in the log that were never dispatched must be after an unclean stop, although the
    queue on disk has older units, and numbering must go on without a hole."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 5)
    store.dispatch(T0)
    fill(store, 4, at=5)  # written to the log, not dispatched, then killed
    again = Store.open(files.copy(), small(), T0 + 100)
    assert numbers(again) == [(n, body(n)) for n in range(9)]
    fill(again, 1, at=9)
    again.dispatch(T0 + 100)
    assert numbers(again)[-1] == (9, body(9))


def test_issue_467_damaged_record_ends_the_log() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 5)
    store.dispatch(T0)
    size = store.max_log_offset // 5
    after = files.copy()
    after.seen[LOG0][3 * size + 95] ^= 0xFF  # a byte of the fourth body
    again = Store.open(after, small(), T0)
    assert numbers(again) == [(n, body(n)) for n in range(3)]
    assert again.max_log_offset == 3 * size
    assert not any(after.seen[LOG0][3 * size :])


def test_issue_1434_recovery_looks_beyond_the_last_file() -> None:
    """The tail of the second-last log file and the head of the last were not dispatched. A
    recovery that starts at the last file, however good that looks, misses the former."""
    config = small(index_enabled=False)  # rebuilding the index would hide a start that is too late
    files = FakeFiles()
    store = Store.open(files, config, T0)
    fill(store, 15)
    store.dispatch(T0)
    assert len(files.files("commitlog")) == 1
    fill(store, 10, at=15)  # rolls into the second file, all undispatched
    after = files.copy()
    assert len(after.files("commitlog")) == 2
    # RocketMQ's checkpoint can run ahead of its queues (bug 678): it vouches for everything.
    set_checkpoint(after, T0 + 10**6, T0 + 10**6, T0 + 10**6)
    again = Store.open(after, config, T0 + 10**6)
    assert numbers(again) == [(n, body(n)) for n in range(25)]
    assert again.stats.recovered.restarts == 1


def test_gap_before_the_start_file_heals_with_three_files() -> None:
    """Two queues; one lost its units for the middle of the log."""
    config = small(queue_flush_thorough_ms=10, index_enabled=False)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(60):
        store.append(message(body(n), queue_id=n % 2), T0 + n * 1000)
    store.dispatch(T0)
    after = files.copy()
    assert len(after.files("commitlog")) >= 3
    after.seen["consumequeue/T/1/00000000000000000000"][20 * 5 : 20 * 9] = bytes(80)
    set_checkpoint(after, T0 + 59_000, T0 + 59_000, T0 + 59_000)
    again = Store.open(after, config, T0 + 60_000)
    for queue_id in (0, 1):
        assert [n for n, _ in numbers(again, queue_id=queue_id)] == list(range(30))
        assert [b for _, b in numbers(again, queue_id=queue_id)] == [
            body(n) for n in range(60) if n % 2 == queue_id
        ]


def test_issue_10666_truncated_tail_never_revives() -> None:
    """A cut leaves valid-looking records behind the new end. If the bytes stay, shorter new
    records end exactly where an old one begins, and the old ones come back after the next crash."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 6)
    store.dispatch(T0)
    size = store.max_log_offset // 6
    after = files.copy()
    after.seen[LOG0][2 * size + 95] ^= 1  # records 3, 4 and 5 stay whole behind the damage
    second = Store.open(after, small(), T0 + 10)
    assert [n for n, _ in numbers(second)] == [0, 1]
    second.append(message(b"n." + b"x" * 100), T0 + 11)  # same size: 3 would follow seamlessly
    assert second.max_log_offset == 3 * size
    # The machine dies before anything of the new queue units was synced.
    third_disk = after.copy()
    third = Store.open(third_disk, small(), T0 + 20)
    assert numbers(third) == [(0, body(0)), (1, body(1)), (2, b"n." + b"x" * 100)]
    assert third.max_log_offset == 3 * size


def test_issue_10666_tail_left_by_rocketmq_is_wiped_on_a_clean_start() -> None:
    """RocketMQ does not zero when it truncates: stale bytes behind the end of a clean store."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 3)
    store.close(T0)
    end = store.max_log_offset
    stale = bytes(files.seen[LOG0][: end // 3])  # a valid record, of another place
    files.seen[LOG0][end + 200 : end + 200 + len(stale)] = stale
    again = Store.open(files, small(), T0)
    assert again.max_log_offset == end
    assert not any(files.seen[LOG0][end:])


def test_a_record_of_another_place_is_not_believed() -> None:
    """Right size, right CRC, but its own offset names another position."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 3)
    size = store.max_log_offset // 3
    after = files.copy()
    after.seen[LOG0][3 * size : 4 * size] = after.seen[LOG0][:size]
    again = Store.open(after, small(), T0)
    assert again.max_log_offset == 3 * size
    assert len(numbers(again)) == 3


def test_issue_7689_queue_offsets_stay_unique_after_kill() -> None:
    """Killed with queues behind the log: the next number follows the log, not the queue."""
    disk = FakeFiles()
    seen: dict[int, bytes] = {}
    sent = 0
    for boot in range(6):
        store = Store.open(disk, small(), T0 + boot * 1000)
        for _ in range(7):
            done = store.append(message(body(sent)), T0 + boot * 1000)
            assert done.queue_offset not in seen
            seen[done.queue_offset] = body(sent)
            sent += 1
            if sent % 3 == 0:
                store.dispatch(T0)
        disk = disk.copy()  # kill -9
    store = Store.open(disk, small(), T0)
    assert numbers(store) == sorted(seen.items())
    assert sorted(seen) == list(range(sent))


def test_issue_7689_stale_units_of_a_clean_rocketmq_store_are_cut() -> None:
    """RocketMQ truncates queues without wiping: a unit behind the end looks like one more."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 3)
    store.close(T0)
    queue = files.seen["consumequeue/T/0/00000000000000000000"]
    queue[60:80] = struct.pack(">qiq", 50, 150, 0)
    queue[80:100] = struct.pack(">qiq", 10**6, 150, 0)
    again = Store.open(files, small(), T0)
    assert again.next_queue_offset("T", 0) == 3
    assert again.append(message(b"new"), T0).queue_offset == 3
    again.dispatch(T0)
    assert [n for n, _ in numbers(again)] == [0, 1, 2, 3]


def test_issue_8007_last_index_file_survives_recovery() -> None:
    """After an unclean stop every key is found, also those whose records are far older than the
    log file that the queues' recovery starts with."""
    config = small(queue_flush_thorough_ms=10)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(100):
        store.append(keyed(f"key-{n}"), T0 + n * 1000)
        store.dispatch(T0 + n * 1000)
        if n == 50:
            flush_all(store, T0 + n * 1000)
    assert len(files.files("index")) >= 3
    assert len(files.files("commitlog")) >= 3
    after = files.crash(random.Random(3))
    # What the log itself kept is known; all of it must be found.
    kept = Store.open(files.copy(), config, T0 + 10**6)
    survivor = Store.open(after, config, T0 + 10**6)
    for opened in (kept, survivor):
        for n in range(opened.max_offset("T", 0)):
            found = opened.find_by_key("T", f"key-{n}", 10, 0, T0 + 10**9)
            assert [record.decode(r).queue_offset for r in found.records] == [n]
    assert kept.max_offset("T", 0) == 100


def test_issue_8007_slots_ahead_of_the_head_do_not_hide_old_entries() -> None:
    """The page with the slots reached the disk, the one with the head did not."""
    config = small()
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(10):
        store.append(keyed(f"key-{n % 2}-{n}", "same"), T0)
        store.dispatch(T0)
    store.close(T0 + 1)
    name = "index/" + files.files("index")[0][0]
    durable = bytes(files.seen[name])
    store = Store.open(files, config, T0 + 1000)
    store.append(keyed("late", "same"), T0 + 1000)
    store.dispatch(T0 + 1000)
    after = files.copy()
    after.seen[name][:40] = durable[:40]
    again = Store.open(after, config, T0 + 2000)
    found = again.find_by_key("T", "same", 64, 0, T0 + 10**6)
    assert [record.decode(r).queue_offset for r in found.records] == list(range(11))


def test_issue_8007_keys_that_straddle_two_files_survive_losing_the_second() -> None:
    config = small(index_entries=6)  # room for five entries: the third record is divided
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(2):
        store.append(keyed(f"u{n}", "word"), T0 + n)
    store.dispatch(T0)
    store.append(keyed("u2", "word"), T0 + 2)
    store.dispatch(T0)
    assert len(files.files("index")) == 2
    after = files.copy()
    after.remove("index/" + after.files("index")[1][0])
    set_checkpoint(after, T0 + 2, T0 + 2, T0 + 2)
    again = Store.open(after, config, T0 + 10)
    found = again.find_by_key("T", "word", 64, 0, 2**62).records
    assert [record.decode(r).queue_offset for r in found] == [0, 1, 2]


def test_index_interrupted_while_it_was_rebuilt() -> None:
    """Killed during recovery, when the old index file was gone and the new one incomplete."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(12):
        store.append(keyed(f"key-{n}"), T0 + n)
    store.dispatch(T0)
    after = files.copy()
    for name in list(after.total("index/")):
        after.remove(name)
    again = Store.open(after, small(), T0 + 100)
    for n in range(12):
        assert len(again.find_by_key("T", f"key-{n}", 10, 0, T0 + 10**6).records) == 1


def test_clean_stop_walks_nothing() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 50)
    store.close(T0)
    assert "abort" not in files.seen
    again = Store.open(files, small(), T0)
    assert again.stats.recovered.is_clean
    assert again.stats.recovered.record_count == 0
    assert len(numbers(again)) == 50
    assert again.last_store_ms == T0 + 50


def test_store_time_never_decreases_across_a_restart() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store.append(message(), T0 + 5000)
    assert store.append(message(), T0).store_ms == T0 + 5000
    store.close(T0)
    again = Store.open(files, small(), T0)
    assert again.append(message(), T0).store_ms == T0 + 5001  # and never shares one with before


def test_hole_in_a_queue_heals() -> None:
    """A page of a queue file was lost although later ones were written."""
    config = small(queue_file_bytes=20 * 100)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    fill(store, 60)
    store.dispatch(T0)
    after = files.copy()
    after.seen["consumequeue/T/0/00000000000000000000"][200:712] = bytes(512)
    again = Store.open(after, config, T0)
    assert numbers(again) == [(n, body(n)) for n in range(60)]


@pytest.mark.parametrize("lost", [slice(0, 8), slice(80, 100), slice(0, 160), slice(0, 320)])
def test_a_hole_is_no_unit_of_an_expired_message(lost: slice) -> None:
    """The last files of the queue made it to the disk, an earlier one did not. Its zeros look as
    if they pointed to the log's begin, which was dropped long ago."""
    config = small(index_enabled=False, queue_flush_thorough_ms=10)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(240):
        store.append(message(body(n)), T0 + n * 1000)
    store.dispatch(T0)
    after = files.copy()
    dropped = [name for name, _ in after.files("commitlog")[:6]]
    for name in dropped:
        after.remove(f"commitlog/{name}")
    set_checkpoint(after, T0 + 150_000, T0 + 150_000, 0)
    file = after.seen[f"consumequeue/T/0/{11 * 320:020}"]
    file[lost] = bytes(len(file[lost]))
    again = Store.open(after, config, T0 + 240_000)
    assert again.stats.recovered.walk_from > 6 * 4096, "the older part was believed"
    found = numbers(again)
    assert 100 < found[0][0] < 150
    assert found == [(n, body(n)) for n in range(found[0][0], 240)]


def test_stale_units_behind_a_hole_are_wiped() -> None:
    """The log lost its tail, the queue lost a page in the middle: what stands behind that page
    points nowhere and must not become visible once the hole is filled."""
    config = small(queue_file_bytes=20 * 100)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    fill(store, 60)
    store.dispatch(T0)
    size = store.record_at(0)
    assert size is not None
    after = files.copy()
    for name, _ in after.files("commitlog")[1:]:
        after.remove(f"commitlog/{name}")
    after.seen[LOG0][20 * len(size) :] = (
        bytes(4096 - 20 * len(size)) if 20 * len(size) < 4096 else b""
    )
    after.seen["consumequeue/T/0/00000000000000000000"][10 * 20 : 40 * 20] = bytes(600)
    again = Store.open(after, config, T0)
    count = again.max_offset("T", 0)
    assert count <= 20
    assert not any(after.seen["consumequeue/T/0/00000000000000000000"][count * 20 :])
    fill(again, 10, at=count)
    third = Store.open(after.copy(), config, T0)
    assert numbers(third) == [(n, body(n)) for n in range(count + 10)]


def test_tail_of_a_queue_with_nothing_to_cut_is_wiped_too() -> None:
    """An idle queue whose units are all durable, with a stray unit beyond a hole."""
    config = small(queue_flush_thorough_ms=10, index_enabled=False)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(60):
        store.append(message(body(n), queue_id=1 if n < 3 else 0), T0 + n * 1000)
    store.dispatch(T0)
    after = files.copy()
    set_checkpoint(after, T0 + 59_000, T0 + 59_000, 0)
    queue = after.seen["consumequeue/T/1/00000000000000000000"]
    queue[200:220] = struct.pack(">qiq", 5000, 150, 0)
    again = Store.open(after, config, T0 + 60_000)
    assert again.stats.recovered.walk_from > 0
    assert again.max_offset("T", 1) == 3
    assert not any(queue[60:])


def test_checkpoint_never_vouches_for_records_to_come() -> None:
    """A log that lost its tail, below times that the checkpoint already has."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 3)
    store.close(T0)
    files.write("abort", b"1")
    set_checkpoint(files, T0 + 10**6, T0 + 10**6, T0 + 10**6)
    Store.open(files, small(), T0)
    assert max(CHECKPOINT.unpack_from(files.seen["checkpoint"], 0)) == T0 + 2


def test_lost_queue_folder_is_rebuilt_after_a_clean_stop() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 30)
    store.close(T0)
    files.remove_folder("consumequeue/T")
    again = Store.open(files, small(), T0)
    assert len(numbers(again)) == 30


def test_lost_log_keeps_numbers_and_offsets() -> None:
    """The log is gone, the queues are not: numbering goes on, log offsets are not used twice."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 30)
    end = store.max_log_offset
    store.close(T0)
    files.remove_folder("commitlog")
    again = Store.open(files, small(), T0)
    assert again.min_offset("T", 0) == again.max_offset("T", 0) == 30
    done = again.append(message(b"after"), T0)
    assert done.queue_offset == 30
    assert done.log_offset >= end
    again.dispatch(T0)
    again.close(T0)
    third = Store.open(files, small(), T0)
    assert numbers(third) == [(30, b"after")]


def test_precreated_file_is_legal_and_goes_on_a_clean_close() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    while store.max_log_offset < 3500:
        fill(store, 1)
    made = store.take_next_file()
    assert made is not None
    made.targets[0].sync()
    assert len(files.files("commitlog")) == 2
    again = Store.open(files.copy(), small(), T0)  # killed with the leftover
    assert again.max_log_offset == store.max_log_offset
    store.flushed(made.kind, T0)
    store.close(T0)
    assert len(files.files("commitlog")) == 1


def test_two_zero_files_behind_the_end_are_dropped() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 3)
    end = store.max_log_offset
    after = files.copy()
    for start in (4096, 8192):
        after.write(f"commitlog/{start:020d}", bytes(4096))
    again = Store.open(after, small(), T0)
    assert again.max_log_offset == end
    assert len(after.files("commitlog")) == 1


def test_empty_last_file_is_dropped_other_sizes_refuse() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 3)
    store.close(T0)
    files.write("commitlog/00000000000000004096", b"")
    Store.open(files, small(), T0).close(T0)
    assert len(files.files("commitlog")) == 1
    files.write("commitlog/00000000000000004096", bytes(100))
    with pytest.raises(StoreCorrupt, match=r"00000000000000004096 is 100 bytes.*4096"):
        Store.open(files, small(), T0)
    assert not files.is_locked
    files.remove("commitlog/00000000000000004096")
    files.write("consumequeue/T/0/00000000000000000320", bytes(7))
    with pytest.raises(StoreCorrupt, match=r"consumequeue/T/0/00000000000000000320 is 7 bytes"):
        Store.open(files, small(), T0)


def test_missing_file_in_the_middle_refuses() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 60)
    store.close(T0)
    files.remove("commitlog/00000000000000004096")
    with pytest.raises(StoreCorrupt, match="a file between them is missing"):
        Store.open(files, small(), T0)


def test_damage_of_durable_records_refuses_rather_than_drops_files() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 60)
    store.dispatch(T0)
    store.close(T0)
    files.write("abort", b"1")
    set_checkpoint(files, T0 + 59, T0, T0)
    files.seen[LOG0][300] ^= 1
    with pytest.raises(StoreCorrupt, match="cutDamagedLogEnable"):
        Store.open(files, small(), T0)
    again = Store.open(files, small(is_durable_cut_allowed=True), T0)
    assert len(numbers(again)) == 1


def test_cut_below_the_start_of_the_queues_walk_reaches_queues_and_index() -> None:
    """The index makes the walk start early and it meets damage there: queues and index that were
    believed up to a later file must be cut as well."""
    config = small(queue_flush_thorough_ms=10, is_durable_cut_allowed=True, index_entries=200)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(60):
        store.append(keyed(f"key-{n}" + "x" * 100, "same"), T0 + n * 1000)
    store.dispatch(T0)
    after = files.copy()
    set_checkpoint(after, T0 + 59_000, T0 + 59_000, 0)
    after.seen[LOG0][2 * len(store.record_at(0) or b"") + 95] ^= 1
    again = Store.open(after, config, T0 + 60_000)
    assert again.stats.recovered.walk_from == 0
    assert len(numbers(again)) == again.max_offset("T", 0) == 2
    found = again.find_by_key("T", "same", 64, 0, 2**62)
    assert len(found.records) == 2
    assert found.index_last_offset < again.max_log_offset


def test_index_beyond_the_end_of_a_clean_log_is_cut_and_built_again() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(12):
        store.append(keyed(f"key-{n}", "same"), T0 + n)
    size = len(store.record_at(0) or b"")
    store.close(T0)
    files.seen[LOG0][4 * size :] = bytes(4096 - 4 * size)  # a copy that lost its tail
    again = Store.open(files, small(is_durable_cut_allowed=True), T0 + 100)
    assert [n for n, _ in numbers(again)] == [0, 1, 2, 3]
    assert again.append(keyed("new", "same"), T0 + 100).log_offset == 4 * size
    again.dispatch(T0 + 100)
    found = again.find_by_key("T", "same", 64, 0, 2**62).records
    assert [record.decode(r).queue_offset for r in found] == [0, 1, 2, 3, 4]
    assert len(again.find_by_key("T", "new", 64, 0, 2**62).records) == 1


@pytest.mark.parametrize("behind_ms", [None, 0, 30_000])
def test_lost_units_without_later_records_are_found(behind_ms: int | None) -> None:
    """A queue lost its only unit and nothing later in the log betrays it by a gap: only a start
    that is early enough heals it. RocketMQ's checkpoint may be ahead of its queues by a minute."""
    config = small(index_enabled=False)
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for n in range(40):
        queue_id = 1 if n == 14 else 0
        store.append(message(body(n), queue_id=queue_id), T0 + n * 1000)
    store.dispatch(T0)
    after = files.copy()
    assert len(after.files("commitlog")) == 2
    after.remove_folder("consumequeue/T/1")
    if behind_ms is not None:
        set_checkpoint(after, T0 + 39_000, T0 + 39_000 - behind_ms, 0)
    again = Store.open(after, config, T0 + 100_000)
    assert numbers(again, queue_id=1) == [(0, body(14))]
    assert len(numbers(again)) == 39


def test_what_a_kill_left_in_memory_is_durable_before_it_is_called_so() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 60)
    store.dispatch(T0)
    killed = files.copy()
    again = Store.open(killed, small(), T0 + 100)
    claimed = again.flushed_offset
    assert claimed == store.max_log_offset
    third = Store.open(killed.crash(random.Random(1)), small(), T0 + 200)  # then the power goes
    assert third.max_log_offset == claimed
    assert numbers(third) == [(n, body(n)) for n in range(60)]


def test_torn_properties_are_not_believed() -> None:
    """The body's CRC says nothing about topic and properties."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store.append(message(b"a"), T0)
    end = store.append(message(b"b", properties="K\x01" + "v" * 600 + "\x02"), T0 + 1).end_offset
    after = files.copy()
    after.seen[LOG0][end - 300 : end] = bytes(300)
    again = Store.open(after, small(), T0)
    assert [b for _, b in numbers(again)] == [b"a"]


def even(n: int) -> bytes:
    """A body that is as long as all the others."""
    return b"%03d" % n + b"x" * 100


TOPIC_AT = 88 + len(even(0)) + 1  # in a record: of a topic named T
QUEUE_ID_AT = 12


DAMAGE = pytest.mark.parametrize(
    ("at", "bits"),
    [
        pytest.param(TOPIC_AT, 0x08, id="backslash"),
        pytest.param(TOPIC_AT, 0x40, id="control character"),
        pytest.param(TOPIC_AT, 0x80, id="not UTF-8"),
        pytest.param(TOPIC_AT, 0x54, id="zero"),
        pytest.param(QUEUE_ID_AT, 0x80, id="queue below 0"),
        pytest.param(QUEUE_ID_AT, 0x10, id="queue beyond the limit"),
    ],
)


@pytest.fixture(params=["plain", "compiled"])
def hot(request: pytest.FixtureRequest) -> Any:
    if request.param == "plain":
        return None
    module, why_not = _fast.load()
    if module is None:
        pytest.skip(why_not)
    return module.Hot()


def damage(files: FakeFiles, log_offset: int, at: int, bits: int) -> None:
    name = f"commitlog/{log_offset // 4096 * 4096:020d}"
    at += log_offset % 4096
    files.seen[name][at] ^= bits


@DAMAGE
@pytest.mark.parametrize("is_vouched", [False, True])
@pytest.mark.parametrize("number", [0, 3, 30, 59])
def test_of_a_record_whose_queue_can_not_be_only_that_message_is_lost(
    hot: Any,
    at: int,
    bits: int,
    number: int,
    caplog: pytest.LogCaptureFixture,
    *,
    is_vouched: bool,
) -> None:
    """Topic and queue id have no CRC: the record is whole, and what follows stands where it
    should. Zeros where nobody vouches for the record are another matter: then it is torn."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(60):
        store.append(message(even(n)), T0 + n)
    store.dispatch(T0)
    unit = store.unit("T", 0, number)
    assert unit is not None
    after = files.copy()
    if is_vouched:
        set_checkpoint(after, T0 + 10**6, 0, 0)
    damage(after, unit[0], at, bits)
    again = Store.open(after, small(), T0 + 10**6, hot=hot)
    if bits == 0x54 and not is_vouched:
        assert numbers(again) == [(n, even(n)) for n in range(number)]
        return
    assert numbers(again) == [(n, even(n)) for n in range(60) if n != number]
    assert f"message_lost log_offset={unit[0]} " in caplog.text
    again.append(message(b"new"), T0 + 10**6)
    again.dispatch(T0 + 10**6)
    assert numbers(again)[-1] == (59 if number == 59 else 60, b"new")


@DAMAGE
def test_a_clean_start_survives_a_last_record_whose_queue_can_not_be(
    hot: Any, at: int, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(9):
        store.append(message(even(n)), T0 + n)
    store.dispatch(T0)
    unit = store.unit("T", 0, 8)
    assert unit is not None
    end = store.max_log_offset
    store.close(T0 + 9)
    damage(files, unit[0], at, bits)
    again = Store.open(files, small(), T0 + 100, hot=hot)
    assert numbers(again) == [(n, even(n)) for n in range(8)]
    if bits == 0x54:  # torn, as the last millisecond may be
        assert again.max_log_offset == unit[0]
    else:
        assert again.max_log_offset == end
        assert f"message_lost log_offset={unit[0]} " in caplog.text


def test_stray_folders_are_left_alone() -> None:
    files = FakeFiles()
    files.write("consumequeue/bad.topic/0/00000000000000000000", bytes(320))
    files.write("consumequeue/T/x/00000000000000000000", bytes(320))
    files.write("consumequeue/T/007/00000000000000000000", bytes(320))
    files.write("consumequeue/T/70000/00000000000000000000", bytes(320))
    store = Store.open(files, small(), T0)
    assert list(store.queues()) == []


def test_deleted_and_made_again_topic_survives_a_walk_over_both_lives() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 5)
    store.append(message(topic="Other"), T0 + 5)
    store.dispatch(T0)
    store.delete_topic("T")
    store.close(T0)
    store = Store.open(files, small(), T0 + 10)  # the memory of the old number is gone
    store.append(message(b"second life"), T0 + 10)
    store.dispatch(T0 + 10)
    assert numbers(store) == [(0, b"second life")]
    again = Store.open(files.copy(), small(), T0 + 20)
    assert numbers(again) == [(0, b"second life")]


def test_numbers_go_on_when_a_topic_is_made_again_in_one_run() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    fill(store, 5)
    store.dispatch(T0)
    assert store.delete_topic("T") == 1
    assert files.files("consumequeue/T/0") == []
    assert store.append(message(b"next"), T0).queue_offset == 5
    store.dispatch(T0)
    assert numbers(store) == [(5, b"next")]
    again = Store.open(files.copy(), small(), T0)
    assert again.next_queue_offset("T", 0) == 6


def test_kill_on_a_real_disk(tmp_path: pathlib.Path) -> None:
    """The same with mapped files: copy the directory while the store is open, then open that."""
    config = small(queue_file_bytes=6_000_000)
    store = Store.open(RealFiles(tmp_path / "a"), config, T0)
    fill(store, 100, queues=3)
    store.dispatch(T0)
    fill(store, 20, at=100, queues=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = Store.open(RealFiles(tmp_path / "b"), config, T0)
    for queue_id in range(3):
        expected = [body(n) for n in range(120) if n % 3 == queue_id]
        assert [b for _, b in numbers(again, queue_id=queue_id)] == expected
    again.close(T0)
    store.close(T0)
    assert not (tmp_path / "b" / "abort").exists()
    assert (tmp_path / "b" / "consumequeue/T/0/00000000000000000000").stat().st_size == 6_000_000


@pytest.mark.parametrize("seed", range(30))
def test_random_loss_of_unsynced_sectors(seed: int) -> None:
    """In sync mode whatever was flushed is there after any crash, in order, numbered once."""
    rng = random.Random(seed)
    config = small(is_sync_flush=True, queue_flush_thorough_ms=rng.choice((10, 2000)))
    disk = FakeFiles()
    acked: dict[int, list[bytes]] = {0: [], 1: []}
    now = T0
    sent = 0
    for _boot in range(4):
        store = Store.open(disk, config, now)
        for queue_id, bodies in acked.items():
            found = [b for _, b in numbers(store, queue_id=queue_id)]
            assert found[: len(bodies)] == bodies
            bodies[:] = found
        written: dict[int, list[bytes]] = {0: [], 1: []}
        for _ in range(rng.randrange(40)):
            now += rng.choice((0, 1, 700))
            queue_id = rng.randrange(2)
            text = body(sent, rng.randrange(300))
            store.append(
                message(text, queue_id=queue_id, properties=f"UNIQ_KEY\x01{sent}\x02"), now
            )
            written[queue_id].append(text)
            sent += 1
            if rng.random() < 0.3:
                flush = store.take_flush(now)
                if flush is not None and rng.random() < 0.8:
                    for target in flush.targets:
                        target.sync()
                    store.flushed("log", now)
                    for each, bodies in written.items():
                        acked[each] += bodies
                        bodies.clear()
                elif flush is not None:
                    break  # dies during the flush
            store.dispatch(now)
            if rng.random() < 0.2:
                flush = store.take_queue_flush(now)
                if flush is not None:
                    for target in flush.targets:
                        target.sync()
                    store.flushed("queues", now)
        disk = disk.crash(rng)
    store = Store.open(disk, config, now)
    for queue_id, bodies in acked.items():
        found = numbers(store, queue_id=queue_id)
        assert [n for n, _ in found] == list(range(len(found)))
        assert [b for _, b in found][: len(bodies)] == bodies
        for fetched in store.fetch("T", queue_id, 0, 32).body and record.decode_all(
            store.fetch("T", queue_id, 0, 32).body
        ):
            key = fetched.properties[9:-1]
            assert len(store.find_by_key("T", key, 10, 0, now + 10**6).records) == 1
