"""Staged records: what is committed when, what a kill takes, and who is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_disk import T0, FakeFiles, keyed, message, small

from cometmq import _fast
from cometmq.config import BrokerConfig, apply
from cometmq.errors import ConfigError, MessageIllegal, StoreBusy, StoreReadOnly
from cometmq.ports import NEVER_MS, Files, Flush
from cometmq.store.files import RealFiles
from cometmq.store.layout import StoreConfig
from cometmq.store.results import FetchStatus
from cometmq.store.store import Store
from cometmq.testing.disk import ProcessEnded, SimulatedFiles
from cometmq.wire import record
from cometmq.wire.record import Scan

Reopen = Callable[[], Files]


def staged(**changes: object) -> StoreConfig:
    values: dict[str, object] = {"is_staged": True, "stage_count": 3, "stage_bytes": 4096}
    return small(**(values | changes))


def finish(store: Store, flush: Flush | None, kind: str, now_ms: int = T0) -> None:
    assert flush is not None
    assert flush.kind == kind
    for target in flush.targets:
        target.sync()
    store.flushed(kind, now_ms)


def commit(store: Store, now_ms: int = T0) -> None:
    finish(store, store.take_flush(now_ms), "commit", now_ms)


def bodies(store: Store, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    found: list[bytes] = []
    while True:
        fetched = store.fetch(topic, queue_id, len(found), 32)
        if fetched.status is not FetchStatus.FOUND:
            return found
        found += [one.body for one in record.decode_all(fetched.body)]


@pytest.fixture(params=["real", "simulated", "fake"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, Reopen]:
    """Files, and what a process finds that starts after this one was killed."""
    if request.param == "real":
        real = RealFiles(tmp_path)

        def reopen_real() -> Files:
            real.unlock()  # as the end of a process does
            return RealFiles(tmp_path)

        return real, reopen_real
    if request.param == "simulated":
        simulated = SimulatedFiles(random.Random(1))

        def reopen_simulated() -> Files:
            simulated.kill()
            return simulated

        return simulated, reopen_simulated
    fake = FakeFiles()
    return fake, fake.copy


# ------------------------------------------------------------------------------ what is seen when


def test_nothing_is_seen_before_it_is_committed(disk: tuple[Files, Reopen]) -> None:
    store = Store.open(disk[0], staged(), T0)
    at = store.append(keyed("u1", "k"), T0)
    end = store.max_log_offset
    assert (store.committed_offset, store.is_dispatch_behind, end) == (0, True, at.size)
    assert store.dispatch(T0) == []
    assert store.record_at(at.log_offset) is None
    assert store.find_by_key("T", "k", 32, 0, 2**62).records == []
    assert store.first_store_ms() is None
    assert store.max_offset("T", 0) == 0
    assert store.next_queue_offset("T", 0) == 1
    taken = store.take_flush(T0)
    store.append(keyed("u2", "k"), T0)  # the commit under way does not cover it
    finish(store, taken, "commit")
    assert store.committed_offset == end < store.max_log_offset
    assert [one.queue_offset for one in store.dispatch(T0)] == [0]
    assert len(store.find_by_key("T", "k", 32, 0, 2**62).records) == 1
    assert store.record_at(at.log_offset) is not None
    assert store.first_store_ms() == T0 + 1 or store.first_store_ms() == T0
    assert store.is_dispatch_behind
    commit(store, T0 + 200)
    store.dispatch(T0 + 200)
    assert bodies(store) == [b"u1", b"u2"]
    assert not store.is_dispatch_behind
    store.close(T0 + 300)


def test_a_unit_that_points_into_staged_memory_shows_nothing() -> None:
    store = Store.open(FakeFiles(), staged(), T0)
    store.append(message(b"one"), T0)
    commit(store)
    store.dispatch(T0)
    later = store.append(message(b"two"), T0)
    assert store._log.view(later.log_offset, later.size) is None
    found = store._log.scan(later.log_offset, verify_crc=True)  # the file has zeros there
    assert found is None


def test_files_are_the_same_as_without_staging(disk: tuple[Files, Reopen]) -> None:
    """Whatever the stages' bounds are, records and blanks stand where they would have stood."""
    files, _ = disk
    plain = FakeFiles()
    rng = random.Random(5)
    stores = [Store.open(files, staged(stage_bytes=1500), T0), Store.open(plain, small(), T0)]
    for n in range(120):
        body = rng.randbytes(rng.randrange(900))
        appended = [store.append(message(body, queue_id=n % 3), T0 + n) for store in stores]
        assert appended[0] == appended[1]
        flush = stores[0].take_flush(T0 + n)
        if flush is not None:
            finish(stores[0], flush, flush.kind, T0 + n)
        for store in stores:
            store.dispatch(T0 + n)
    assert len(stores[0]._log.segments.items) > 10
    for store in stores:
        store.close(T0 + 1000)
    for name, content in plain.seen.items():
        if name.startswith(("commitlog/", "consumequeue/")):
            assert files.read(name) == content, name


# ---------------------------------------------------------------------------------- commit rules


def test_four_pages_are_committed_at_once_and_less_after_200_ms() -> None:
    store = Store.open(FakeFiles(), staged(log_file_bytes=1 << 20, stage_bytes=1 << 18), T0)
    store.append(message(b"x"), T0)
    commit(store)  # none for a while: no reason to wait
    store.append(message(b"x"), T0)
    assert store.take_flush(T0) is None
    assert store.next_deadline_ms(T0) == T0 + 200
    assert store.take_flush(T0 + 199) is None
    commit(store, T0 + 200)
    while store.max_log_offset // 4096 < 4:
        store.append(message(b"x" * 1000), T0 + 200)
    assert store.next_deadline_ms(T0 + 200) == T0 + 200
    taken = store.take_flush(T0 + 200)
    for _ in range(20):
        store.append(message(b"x" * 1000), T0 + 200)
    assert store.take_flush(T0 + 201) is None  # one is under way
    finish(store, taken, "commit")
    assert store.take_flush(T0 + 201) is not None


def test_a_full_buffer_is_committed_at_once() -> None:
    store = Store.open(FakeFiles(), staged(stage_bytes=1500, commit_least_pages=1000), T0)
    store.append(message(b"x"), T0)
    commit(store)
    store.append(message(b"x" * 1000), T0)
    assert store.take_flush(T0) is None
    store.append(message(b"x" * 1000), T0)
    commit(store)
    assert store.committed_offset == store.max_log_offset


def test_a_clock_that_steps_does_not_stop_commits() -> None:
    for step_ms in (-3_600_000, 3_600_000):
        store = Store.open(FakeFiles(), staged(), T0)
        store.append(message(), T0)
        commit(store)
        store.append(message(), T0)
        assert store.next_deadline_ms(T0 + step_ms) <= T0 + step_ms
        commit(store, T0 + step_ms)


def test_intervals_and_pages_are_settings() -> None:
    config = staged(commit_interval_ms=50, commit_thorough_ms=1000, commit_least_pages=1)
    store = Store.open(FakeFiles(), config, T0)
    store.append(message(), T0)
    commit(store)
    store.append(message(), T0)
    assert store.next_deadline_ms(T0) == T0 + 500  # the log flush of what is committed
    assert store.take_flush(T0 + 499) is None
    while store.max_log_offset < 4096:
        store.append(message(b"x" * 500), T0)
    commit(store, T0 + 499)
    least = Store.open(FakeFiles(), staged(commit_least_pages=0), T0)
    for _ in range(3):
        least.append(message(), T0)
        commit(least)


def test_a_flush_proves_only_what_is_committed() -> None:
    files = FakeFiles()
    store = Store.open(files, staged(), T0)
    store.append(message(b"a" * 1800), T0)
    commit(store)
    committed = store.committed_offset
    store.append(message(b"b" * 800), T0 + 100)
    taken = store.take_flush(T0 + 10_000)
    assert taken is not None
    assert taken.kind == "commit"  # the log's flush comes after it, and covers more
    log_flush = store.take_flush(T0 + 10_000)
    finish(store, log_flush, "log")
    assert store.flushed_offset == committed < store.max_log_offset
    assert store._checkpoint.log_ms <= T0 + 1  # the record of T0 + 100 is not vouched for
    finish(store, taken, "commit")
    assert store.flushed_offset == committed
    assert not store.flush_work & 4  # nothing waits for its commit
    assert store.next_deadline_ms(T0 + 10_000) <= T0 + 10_500


def test_an_idle_store_has_no_deadline_but_cleaning() -> None:
    store = Store.open(FakeFiles(), staged(clean_interval_ms=10**9), T0)
    store.append(message(), T0)
    commit(store)
    store.dispatch(T0)
    finish(store, store.take_flush(T0 + 10_000), "log")
    finish(store, store.take_queue_flush(T0 + 60_000), "queues")
    finish(store, store.take_queue_flush(T0 + 120_000), "queues")  # the checkpoint's last change
    assert store.next_deadline_ms(T0 + 120_000) == T0 + 10**9
    assert store._flush.next_ms(T0) == NEVER_MS


# --------------------------------------------------------------------------------- kills and ends


def test_a_kill_takes_exactly_what_was_not_committed(disk: tuple[Files, Reopen]) -> None:
    files, reopen = disk
    store = Store.open(files, staged(), T0)
    for n in range(30):
        store.append(message(b"kept %d" % n), T0)
        flush = store.take_flush(T0 + n)
        if flush is not None:
            finish(store, flush, flush.kind, T0 + n)
    commit(store, T0 + 1000)
    store.dispatch(T0 + 1000)
    committed = store.committed_offset
    assert committed == store.max_log_offset
    for n in range(5):
        store.append(message(b"lost %d" % n), T0 + 1000)
    assert store.max_log_offset > committed
    taken = store.take_flush(T0 + 1001)  # not due: nothing leaves the process
    assert taken is None or taken.kind == "log"
    after = Store.open(reopen(), staged(), T0 + 2000)
    assert after.max_log_offset == committed == after.committed_offset
    assert bodies(after) == [b"kept %d" % n for n in range(30)]
    # The numbers and places of what was lost are given again, and nothing of it is left.
    again = after.append(message(b"new"), T0 + 2000)
    assert (again.log_offset, again.queue_offset) == (committed, 30)
    commit(after, T0 + 2000)
    after.dispatch(T0 + 2000)
    assert bodies(after)[30:] == [b"new"]
    after.close(T0 + 3000)


@pytest.mark.parametrize("seed", range(40))
def test_a_kill_in_the_middle_of_a_commit_leaves_whole_records(seed: int) -> None:
    rng = random.Random(seed)
    files = SimulatedFiles(rng)
    store = Store.open(files, staged(stage_bytes=1200, stage_count=30), T0)
    sent: list[bytes] = []
    committed = 0
    files.ends_in = rng.randrange(12)
    try:
        for n in range(200):
            sent.append(rng.randbytes(rng.randrange(1, 900)))
            store.append(message(sent[-1]), T0 + n)
            if rng.random() < 0.3:
                commit(store, T0 + n * 1000)
                committed = len(sent)
                store.dispatch(T0 + n)
    except ProcessEnded:
        pass
    files.ends_in = -1
    files.kill()
    after = Store.open(files, staged(), T0 + 10**6)
    found = bodies(after)
    assert len(found) >= committed
    assert found == sent[: len(found)]
    position = 0
    while position < after.max_log_offset:
        one = after._log.scan(position, verify_crc=True)
        assert one is not None
        assert type(one) is not Scan or "\0" not in one.properties
        position += one.size
    assert position == after.max_log_offset


def test_a_clean_end_commits_everything(disk: tuple[Files, Reopen]) -> None:
    files, _ = disk
    store = Store.open(files, staged(), T0)
    for n in range(12):
        store.append(message(b"%d" % n), T0)
    store.take_flush(T0)  # a commit whose end nobody reports any more
    store.append(message(b"12"), T0)
    store.close(T0 + 1)
    assert files.read("abort") is None
    after = Store.open(files, staged(), T0 + 2)
    assert after.stats.recovered.is_clean
    assert bodies(after) == [b"%d" % n for n in range(13)]
    after.close(T0 + 3)


def test_opens_what_a_store_without_staging_left_and_the_other_way() -> None:
    files = FakeFiles()
    sent = []
    for n, config in enumerate((small(), staged(), small(), staged())):
        store = Store.open(files, config, T0)
        for m in range(7):
            sent.append(b"%d.%d" % (n, m) + b"x" * 300)
            store.append(message(sent[-1]), T0)
        store.close(T0)
    store = Store.open(files, staged(), T0)
    assert bodies(store) == sent


# -------------------------------------------------------------------------------------- refusals


def fill(store: Store) -> int:
    count = 0
    with pytest.raises(StoreBusy, match="transientStorePoolSize"):
        while True:
            store.append(message(b"x" * 500), T0)
            count += 1
    return count


def test_no_free_buffer_refuses_and_changes_nothing() -> None:
    store = Store.open(FakeFiles(), staged(log_file_bytes=1 << 16, stage_bytes=1500), T0)
    count = fill(store)
    assert count >= 6
    before = store.max_log_offset
    with pytest.raises(StoreBusy):
        store.append_batch([message(b"y" * 600), message(b"z")], T0)
    with pytest.raises(StoreBusy):
        store.append(message(b"y" * 600, topic="U"), T0)
    assert StoreBusy.retriable
    assert store.max_log_offset == before
    assert store.next_queue_offset("T", 0) == count
    assert store.next_queue_offset("U", 0) == 0
    assert store.stats.refused_count == 3
    commit(store)
    assert store.committed_offset == before
    assert store.append(message(b"y" * 600), T0).queue_offset == count
    store.dispatch(T0)
    assert len(bodies(store)) == count


def test_a_buffer_is_not_used_again_while_it_may_be_read() -> None:
    store = Store.open(FakeFiles(), staged(log_file_bytes=1 << 16, stage_bytes=1500), T0)
    count = fill(store)
    taken = store.take_flush(T0)
    assert taken is not None
    # Committed meanwhile by other means (a deletion): the worker may still be reading.
    store._log.commit()
    assert store.committed_offset == store.max_log_offset
    with pytest.raises(StoreBusy):
        store.append(message(b"y" * 600), T0)
    finish(store, taken, "commit")
    store.append(message(b"y" * 600), T0)
    store.dispatch(T0)
    assert bodies(store) == [b"x" * 500] * count


def test_two_buffers_go_on_for_ever() -> None:
    store = Store.open(FakeFiles(), staged(stage_count=2, stage_bytes=700), T0)
    for n in range(100):
        store.append(message(b"%d" % n + b"x" * 250), T0 + n * 1000)
        commit(store, T0 + n * 1000)
        store.dispatch(T0)
    assert len(bodies(store)) == 100


def test_a_record_larger_than_a_buffer_is_illegal() -> None:
    store = Store.open(FakeFiles(), staged(stage_bytes=700), T0)
    with pytest.raises(MessageIllegal, match="transientStorePoolBytes"):
        store.append(message(b"x" * 1000), T0)
    with pytest.raises(MessageIllegal, match="transientStorePoolBytes"):
        store.append_batch([message(b"x" * 300), message(b"x" * 300)], T0)
    assert store.max_log_offset == 0


def test_a_number_that_does_not_fit_leaves_no_trace() -> None:
    store = Store.open(FakeFiles(), staged(), T0)
    with pytest.raises(MessageIllegal):
        store.append(message(b"x", born_ms=2**70), T0)
    store.append(message(b"good"), T0)
    commit(store)
    store.dispatch(T0)
    assert bodies(store) == [b"good"]


def test_a_failed_commit_makes_the_store_read_only() -> None:
    files = FakeFiles()
    store = Store.open(files, staged(), T0)
    store.append(message(b"kept"), T0)
    commit(store)
    store.append(message(b"lost"), T0 + 300)
    files.fail_write = "commitlog"
    taken = store.take_flush(T0 + 300)
    assert taken is not None
    with pytest.raises(OSError, match="no space"):
        taken.targets[0].sync()
    store.flush_failed("commit", "no space", T0 + 300)
    with pytest.raises(StoreReadOnly, match="commit failed"):
        store.append(message(), T0 + 300)
    assert store.take_flush(T0 + 9000) is None
    store.dispatch(T0 + 300)
    assert bodies(store) == [b"kept"]
    files.fail_write = None
    store.close(T0 + 9000)
    assert files.read("abort") is not None
    assert bodies(Store.open(files, staged(), T0 + 9000)) == [b"kept"]


def test_no_room_for_the_next_file_changes_nothing() -> None:
    files = FakeFiles()
    store = Store.open(files, staged(stage_count=9), T0)
    while store.max_log_offset < 2900:
        store.append(message(b"x" * 400), T0)
    files.fail_map = "commitlog"
    before = store.max_log_offset
    with pytest.raises(Exception, match="no room"):
        store.append(message(b"y" * 1500), T0)
    assert store.max_log_offset == before
    store.append(message(b"z"), T0)
    files.fail_map = None
    store.append(message(b"y" * 1500), T0)
    commit(store)
    store.dispatch(T0)
    assert bodies(store)[-2:] == [b"z", b"y" * 1500]


# --------------------------------------------------------------------------------- around it


def test_retention_never_takes_a_file_with_uncommitted_bytes() -> None:
    files = FakeFiles()
    store = Store.open(files, staged(stage_count=9, file_reserved_hours=0), T0)
    while len(store._log.segments.items) < 4:
        store.append(message(b"x" * 900), T0)
    files.ratio = 0.89
    assert store.clean(T0, force=True).log_files == 0
    commit(store)
    assert store.clean(T0, force=True).log_files == 0  # not durable either
    store.dispatch(T0)
    finish(store, store.take_flush(T0 + 600), "log")
    finish(store, store.take_queue_flush(T0 + 60_000), "queues")
    assert store.clean(T0 + 60_000, force=True).log_files == 3


def test_a_deleted_topic_does_not_come_back_with_what_was_staged() -> None:
    store = Store.open(FakeFiles(), staged(), T0)
    store.append(message(b"x"), T0)
    store.append(message(b"y"), T0)
    assert store.delete_topic("T") == 1
    store.append(message(b"other", topic="U"), T0)
    commit(store, T0 + 200)
    store.dispatch(T0 + 200)
    assert list(store.queues()) == [("U", 0)]
    assert store.append(message(b"z"), T0).queue_offset == 2


def test_compiled_code_writes_into_stages_and_reads_only_files() -> None:
    """The rest is told by tests/property; here: no unit points beyond what is committed."""
    module, why_not = _fast.load()
    if module is None:
        pytest.skip(why_not)
    store = Store.open(FakeFiles(), staged(), T0, hot=module.Hot())
    store.append(message(b"x"), T0)
    log = store._log
    view, begin, end = log.tail_view, log.tail_begin, log.tail_end
    assert len(view) == end - begin
    assert begin <= store.max_log_offset < end
    store.dispatch(T0)
    queue = store._queues.get("T", 0)
    assert queue is not None
    assert queue.ends.log_end <= store.committed_offset == 0
    commit(store)
    store.dispatch(T0)
    assert queue.ends.log_end == store.committed_offset


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="ASYNC_FLUSH"):
        apply(
            BrokerConfig(),
            {"transientStorePoolEnable": "true", "flushDiskType": "SYNC_FLUSH"},
            source="broker.conf",
        )
    with pytest.raises(ConfigError, match="transientStorePoolBytes"):
        apply(
            BrokerConfig(),
            {"transientStorePoolEnable": "true", "transientStorePoolBytes": "1000000"},
            source="broker.conf",
        )
    apply(BrokerConfig(), {"transientStorePoolBytes": "1000000"}, source="broker.conf")
    with pytest.raises(ConfigError, match="sync_flush"):
        staged(is_sync_flush=True)


def test_memory_that_can_not_be_locked_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cometmq.store.files._lock_memory", lambda *_: "Cannot allocate memory")
    files = RealFiles(tmp_path)
    stages = [files.stage(8192) for _ in range(3)]
    stages[0][:2] = b"ab"
    assert [r.message for r in caplog.records if "memory_not_locked" in r.message] == [
        "memory_not_locked bytes=8192 reason=Cannot allocate memory: may be swapped out; "
        "raise `ulimit -l`"
    ]


def test_a_write_goes_on_until_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    files = RealFiles(tmp_path)
    files.write("f", bytes(100))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    files.writing("f", 10, memoryview(b"x" * 50)).sync()
    assert files.read("f") == bytes(10) + b"x" * 50 + bytes(40)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="wrote 0 of 3 bytes"):
        files.writing("f", 0, memoryview(b"abc")).sync()
    with pytest.raises(FileNotFoundError):
        files.writing("missing", 0, memoryview(b"abc")).sync()
