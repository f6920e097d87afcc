"""Flushing: rules, what a flush proves, and what a failed one means for ever."""

from __future__ import annotations

import struct

import pytest
from fake_disk import T0, FakeFiles, flush_all, message, small

from cometmq.errors import StoreReadOnly
from cometmq.ports import Flush
from cometmq.store.store import Store

CHECKPOINT = struct.Struct(">qqqqq")


def sync(flush: Flush | None) -> Flush:
    assert flush is not None
    for target in flush.targets:
        target.sync()
    return flush


def test_async_rules() -> None:
    store = Store.open(FakeFiles(), small(log_file_bytes=1 << 20), T0)
    assert store.take_flush(T0) is None
    store.append(message(b"x"), T0)
    assert store.take_flush(T0 + 499) is None  # too early
    assert store.take_flush(T0 + 500) is None  # too little: less than four pages
    for _ in range(10):
        store.append(message(b"x" * 2000), T0)
    assert store.take_flush(T0 + 900) is None
    assert store.take_flush(T0 + 1000) is not None
    assert store.take_flush(T0 + 99_000) is None  # one is under way
    store.append(message(b"y"), T0)
    before = store.max_log_offset
    store.flushed("log", T0 + 1001)
    assert 0 < store.flushed_offset < before
    assert store.take_flush(T0 + 5000) is None
    assert store.take_flush(T0 + 10_000) is not None  # everything, every ten seconds
    store.flushed("log", T0 + 10_001)
    assert store.flushed_offset == store.max_log_offset


def test_full_file_is_flushed_with_the_next() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    while store.max_log_offset < 4096:
        store.append(message(b"x" * 200), T0)
    flush = sync(store.take_flush(T0 + 600))
    assert len(flush.targets) == 2
    store.flushed("log", T0)
    assert store.flushed_offset == store.max_log_offset


def test_sync_mode_flushes_at_once_and_groups() -> None:
    store = Store.open(FakeFiles(), small(is_sync_flush=True), T0)
    store.append(message(), T0)
    first = store.take_flush(T0)
    assert first is not None
    for _ in range(5):
        store.append(message(), T0)
    assert store.take_flush(T0) is None
    store.flushed("log", T0)
    assert store.take_flush(T0) is not None
    store.flushed("log", T0)
    assert store.flushed_offset == store.max_log_offset
    assert store.take_flush(T0) is None


def test_a_clock_that_steps_back_does_not_stop_flushing() -> None:
    store = Store.open(FakeFiles(), small(), T0)
    store.append(message(), T0)
    assert store.take_flush(T0 - 3_600_000) is not None


def test_next_file_is_made_ahead() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    while (made := store.take_next_file()) is None:
        assert store.max_log_offset <= 2048
        store.append(message(b"x" * 50), T0)
    assert store.take_next_file() is None  # one is under way
    assert len(files.files("commitlog")) == 1
    store.flush_failed(made.kind, "no room", T0)
    assert store.is_writable  # nobody needs it yet
    made = store.take_next_file()
    assert made is not None
    for target in made.targets:
        target.sync()  # by another thread
    store.flushed(made.kind, T0)
    assert len(files.files("commitlog")) == 2
    files.fail_map = "commitlog"  # the roll itself needs nothing new
    while store.max_log_offset < 4096:
        store.append(message(b"x" * 50), T0)


def test_failed_flush_turns_read_only_for_ever() -> None:
    files = FakeFiles()
    store = Store.open(files, small(is_sync_flush=True), T0)
    store.append(message(b"a"), T0)
    flush = store.take_flush(T0)
    assert flush is not None
    files.fail_sync = "commitlog"
    with pytest.raises(OSError, match="input/output"):
        sync(flush)
    store.flush_failed("log", "input/output error", T0)
    assert store.flushed_offset == 0
    assert not store.is_writable
    with pytest.raises(StoreReadOnly, match="input/output error"):
        store.append(message(b"b"), T0)
    with pytest.raises(StoreReadOnly):
        store.append_batch([message(b"b")], T0)
    files.fail_sync = None  # the disk "recovers"; the pages are gone
    assert store.take_flush(T0 + 60_000) is None
    assert store.take_queue_flush(T0 + 600_000) is None
    store.flushed("log", T0)  # a late success is not believed
    assert store.flushed_offset == 0
    assert store.dispatch(T0) == []
    store.close(T0 + 1)
    assert "abort" in files.seen
    again = Store.open(files.crash(), small(is_sync_flush=True), T0 + 2)
    assert again.max_offset("T", 0) == 0
    assert again.is_writable


def test_failed_queue_flush_turns_read_only_too() -> None:
    store = Store.open(FakeFiles(), small(), T0)
    store.flush_failed("queues", "gone", T0)
    with pytest.raises(StoreReadOnly, match="queues failed"):
        store.append(message(), T0)


def test_close_with_a_bad_disk_keeps_abort() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store.append(message(), T0)
    files.fail_sync = "consumequeue"
    store.close(T0)
    assert "abort" in files.seen
    assert not files.is_locked
    assert not any(files.mapped.values())


def test_queue_flush_rules() -> None:
    files = FakeFiles()
    config = small(log_file_bytes=1 << 20, queue_file_bytes=6_000_000)
    store = Store.open(files, config, T0)
    for n in range(500):  # more than two pages of units
        store.append(message(b"x"), T0 + n)
    store.append(message(b"x", queue_id=1), T0 + 500)
    store.dispatch(T0)
    files.synced.clear()
    flush = sync(store.take_queue_flush(T0 + 1000))
    assert len([n for n in files.synced if "consumequeue/T/0" in n]) == 1
    assert not [n for n in files.synced if "consumequeue/T/1" in n]
    assert store.take_queue_flush(T0 + 99_000) is None  # one is under way
    store.flushed(flush.kind, T0 + 1001)
    assert store.take_queue_flush(T0 + 2001) is None
    sync(store.take_queue_flush(T0 + 61_000))
    assert [n for n in files.synced if "consumequeue/T/1" in n]


def test_checkpoint_bytes_cover_only_what_is_durable() -> None:
    files = FakeFiles()
    config = small(log_file_bytes=1 << 20, queue_file_bytes=6_000_000)
    store = Store.open(files, config, T0)

    def times() -> tuple[int, int, int]:
        content = files.seen["checkpoint"]
        assert len(content) == 4096
        assert not any(content[40:])
        fields = CHECKPOINT.unpack_from(content, 0)
        assert fields[3:] == (0, 0)
        return fields[:3]  # type: ignore[return-value]

    store.append(message(properties="KEYS\x01k\x02"), T0 + 7)
    store.dispatch(T0)
    assert times() == (0, 0, 0)
    log_flush = store.take_flush(T0 + 10_000)
    store.append(message(), T0 + 10_001)
    sync(log_flush)
    assert times() == (0, 0, 0)  # not before it is reported
    store.flushed("log", T0 + 10_002)
    assert times() == (T0 + 7, 0, 0)
    queue_flush = store.take_queue_flush(T0 + 20_000)  # not thorough: the queue is left out
    assert queue_flush is not None  # only the checkpoint itself
    store.flushed("queues", T0 + 20_000)
    assert times() == (T0 + 7, 0, 0)
    sync(store.take_queue_flush(T0 + 70_000))
    store.dispatch(T0 + 70_000)  # dispatched after the flush was taken
    store.flushed("queues", T0 + 70_001)
    assert times() == (T0 + 7, T0 + 7, T0 + 6)  # of this millisecond more might have come
    store.close(T0 + 80_000)
    assert times() == (T0 + 10_001, T0 + 10_001, T0 + 7)
    assert files.durable["checkpoint"] == bytes(files.seen["checkpoint"])


def test_foreign_checkpoint_fields_are_carried_along() -> None:
    files = FakeFiles()
    files.write("checkpoint", CHECKPOINT.pack(5, 4, 3, 2, 1).ljust(4096, b"\0"))
    store = Store.open(files, small(), T0)
    store.append(message(), T0)
    store.close(T0)
    assert CHECKPOINT.unpack_from(files.seen["checkpoint"], 0)[3:] == (2, 1)


@pytest.mark.parametrize("content", [b"", b"short", bytes(8192), CHECKPOINT.pack(-1, -1, -1, 0, 0)])
def test_damaged_checkpoint_is_begun_anew(content: bytes) -> None:
    files = FakeFiles()
    files.write("checkpoint", content)
    store = Store.open(files, small(), T0)
    store.append(message(), T0)
    store.close(T0)
    assert len(files.seen["checkpoint"]) == 4096


def test_deadlines() -> None:
    store = Store.open(FakeFiles(), small(), T0)
    assert store.next_deadline_ms(T0) == T0 + 10_000  # cleaning only
    store.append(message(), T0)
    assert store.next_deadline_ms(T0) == T0 + 500
    store.take_flush(T0 + 500)
    assert store.next_deadline_ms(T0 + 500) == T0 + 1000
    store.dispatch(T0)
    flush_all(store, T0 + 10_000)
    assert store.next_deadline_ms(T0 + 10_000) > T0 + 9999
    sync_store = Store.open(FakeFiles(), small(is_sync_flush=True), T0)
    sync_store.append(message(), T0)
    assert sync_store.next_deadline_ms(T0) == T0
    sync_store.take_flush(T0)
    assert sync_store.next_deadline_ms(T0) > T0


def test_a_stalled_disk_is_told_of_once_it_matters() -> None:
    store = Store.open(FakeFiles(), small(is_sync_flush=True), T0)
    store.append(message(), T0)
    assert store.take_flush(T0) is not None
    assert store.stall_remark(T0 + 1000) is None
    remark = store.stall_remark(T0 + 1001)
    assert remark is not None
    assert "1001 ms, limit 1000 ms (osPageCacheBusyTimeOutMills)" in remark
    store.flushed("log", T0 + 1500)
    assert store.stall_remark(T0 + 9000) is None
    relaxed = Store.open(FakeFiles(), small(max_unflushed_bytes=500), T0)
    relaxed.append(message(b"x" * 200), T0)
    assert relaxed.take_flush(T0 + 10_000) is not None
    assert relaxed.stall_remark(T0 + 20_000) is None  # little waits: nobody needs to
    relaxed.append(message(b"x" * 400), T0)
    assert relaxed.stall_remark(T0 + 20_000) is not None


def test_a_file_made_ahead_that_comes_too_late_makes_no_other() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    while (made := store.take_next_file()) is None:
        store.append(message(b"x" * 50), T0)
    while store.max_log_offset < 4096:
        store.append(message(b"x" * 50), T0)  # the roll makes the file itself
    made.targets[0].sync()
    store.flushed(made.kind, T0)
    assert len(files.files("commitlog")) == 2
