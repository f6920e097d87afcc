"""What the simulated cluster found in the product, each as a small test of its own."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from cometmq.errors import StoreFull
from cometmq.message import NewMessage
from cometmq.ports import Flush
from cometmq.store import files as real
from cometmq.store.files import RealFiles
from cometmq.store.layout import StoreConfig
from cometmq.store.store import Store
from cometmq.testing.disk import SimulatedFiles

NOW_MS = 1_700_000_000_000
SMALL = StoreConfig(
    log_file_bytes=4096, queue_file_bytes=320, index_slots=50, index_entries=40, is_sync_flush=True
)


def _message(topic: str = "T") -> NewMessage:
    return NewMessage(topic, 0, b"hello", "UNIQ_KEY\x01k\x02")


def _flush(store: Store) -> None:
    flush = store.take_flush(NOW_MS)
    assert flush is not None
    for target in flush.targets:
        target.sync()
    store.flushed(flush.kind, NOW_MS)


def test_a_log_file_of_a_killed_process_survives_a_power_loss_after_the_next_sync() -> None:
    """Seeds 70, 88, 220, 231 and 261: it was made by a process that was killed before its first
    sync; the next one synced the file, found there already, and never its folder."""
    for seed in range(20):  # what a power loss keeps of unsynced names is a matter of luck
        files = SimulatedFiles(random.Random(seed))
        Store.open(files, SMALL, NOW_MS).append(_message(), NOW_MS)
        files.kill()
        store = Store.open(files, SMALL, NOW_MS)
        store.append(_message(), NOW_MS)
        _flush(store)
        end = store.flushed_offset
        files.lose_power(keep_percent=0)
        assert Store.open(files, SMALL, NOW_MS).max_log_offset == end


def test_real_files_sync_the_folders_of_files_they_found(tmp_path: Path) -> None:
    RealFiles(tmp_path).map("a/b/file", 4096).close()
    later = RealFiles(tmp_path)
    with mock.patch.object(real, "_sync_folder") as sync_folder:
        mapped = later.map("a/b/file", 4096)
        mapped.sync()
        synced = [call.args[0] for call in sync_folder.call_args_list]
        assert synced == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]
        mapped.sync()
        later.target("a/b/file").sync()
        assert sync_folder.call_count == 3, "once is enough"
    mapped.close()


def test_a_queue_made_again_on_a_full_disk_is_refused_and_keeps_its_number() -> None:
    """Seed 172: OSError left the store, and the number to go on with was forgotten."""
    files = SimulatedFiles(random.Random(1))
    store = Store.open(files, SMALL, NOW_MS)
    for _ in range(3):
        store.append(_message(), NOW_MS)
    _flush(store)
    store.dispatch(NOW_MS)
    store.delete_topic("T")
    files.is_full = True
    with pytest.raises(StoreFull):
        store.append(_message(), NOW_MS)
    with pytest.raises(StoreFull):
        store.append_batch([_message()], NOW_MS)
    files.is_full = False
    assert store.append(_message(), NOW_MS).queue_offset == 3


def test_an_index_file_that_recovery_writes_again_is_no_longer_vouched_for() -> None:
    """Seed 702410: the newest index file went, because it told of a record that was lost, and was
    written again up to just the time that the checkpoint vouched for; torn by the next power loss
    it was believed to be whole, and its keys found nothing."""
    config = msgspec.structs.replace(SMALL, is_sync_flush=False, log_file_bytes=8192)
    for seed in range(60):
        files = SimulatedFiles(random.Random(seed))
        store = Store.open(files, config, NOW_MS)
        for number in range(30):
            store.append(_keyed(number), NOW_MS + number)
        store.dispatch(NOW_MS + 30)
        later_ms = NOW_MS + 130_000
        _finish(store, store.take_flush(later_ms), later_ms)
        for now_ms in (later_ms, later_ms + 2_000):
            _finish(store, store.take_queue_flush(now_ms), now_ms)
        assert store._checkpoint.index_ms == NOW_MS + 29
        store.append(_keyed(30), later_ms + 3_000)
        store.dispatch(later_ms + 3_000)
        files.lose_power(0, loses_only="commitlog/")
        Store.open(files, config, later_ms + 4_000)
        files.lose_power(50, loses_only="index/" if seed % 2 else None)
        last = Store.open(files, config, later_ms + 5_000)
        lost = [n for n in range(30) if not last.find_by_key("T", f"k{n}", 9, 0, 2**62).records]
        assert not lost, f"seed {seed}"


def test_an_empty_index_file_does_not_hide_a_stale_one_before_it() -> None:
    """Seed 1001353: the newest index file had lost its head; the one before it told of records that
    were lost, was not looked at, and later passed for the index of those that took their place."""
    config = msgspec.structs.replace(SMALL, is_sync_flush=False, log_file_bytes=16384)
    for seed in range(40):
        files = SimulatedFiles(random.Random(seed))
        store = Store.open(files, config, NOW_MS)
        later_ms = NOW_MS + 130_000
        for number in range(39):
            store.append(_keyed(number), NOW_MS + number)
            if number == 19:
                _finish(store, store.take_flush(later_ms), later_ms)
        store.dispatch(NOW_MS + 40)
        for now_ms in (later_ms, later_ms + 2_000):
            _finish(store, store.take_queue_flush(now_ms), now_ms)
        store.append(_keyed(39), later_ms + 3_000)  # the first of a new index file
        store.dispatch(later_ms + 3_000)
        files.lose_power(0)
        again = Store.open(files, config, later_ms + 4_000)
        assert again.max_offset("T", 0) == 20
        for number in range(100, 118):
            again.append(_keyed(number), later_ms + 5_000)
        again.dispatch(later_ms + 5_001)
        even_later_ms = later_ms + 130_000
        for now_ms in (even_later_ms, even_later_ms + 2_000):
            _finish(again, again.take_queue_flush(now_ms), now_ms)
        again.append(_keyed(118), even_later_ms + 3_000)
        again.dispatch(even_later_ms + 3_000)
        files.kill()
        last = Store.open(files, config, even_later_ms + 4_000)
        kept = [*range(20), *range(100, 119)]
        lost = [n for n in kept if not last.find_by_key("T", f"k{n}", 9, 0, 2**62).records]
        assert not lost, f"seed {seed}"


def test_a_flipped_bit_in_an_index_file_does_not_vouch_for_those_before_it() -> None:
    """Seed 21 with levels: the newest index file said, by a bit flipped on its way to the disk,
    that it was old enough to be durable; those before it had lost pages, and were believed."""
    config = msgspec.structs.replace(SMALL, is_sync_flush=True, log_file_bytes=32768)
    files = SimulatedFiles(random.Random(1))
    store = Store.open(files, config, NOW_MS)
    for number in range(130):
        store.append(_keyed(number), NOW_MS + number)
        _flush(store)
    store.dispatch(NOW_MS + 130)
    assert store._index is not None
    before, newest = store._index.items[-2:]
    before.segment.buffer[:] = bytes(len(before.segment.buffer))
    newest.segment.buffer[8:16] = (NOW_MS - 200_000).to_bytes(8, "big")
    files.kill()
    again = Store.open(files, config, NOW_MS + 10_000)
    lost = [n for n in range(130) if not again.find_by_key("T", f"k{n}", 9, 0, 2**62).records]
    assert not lost


def _keyed(number: int) -> NewMessage:
    return NewMessage("T", 0, b"hello", f"KEYS\x01k{number}\x02")


def _finish(store: Store, flush: Flush | None, now_ms: int) -> None:
    if flush is not None:
        for target in flush.targets:
            target.sync()
        store.flushed(flush.kind, now_ms)


def test_units_that_recovery_writes_again_are_no_longer_vouched_for() -> None:
    """Seed 500404: the checkpoint still said that they were durable; killed before they were, the
    next start believed it, the one after a power loss found zeros and left them so."""
    files = SimulatedFiles(random.Random(1))
    store = Store.open(files, SMALL, NOW_MS)
    for step in range(60):
        store.append(_message(), NOW_MS + 1_000 * step)
        _flush(store)
        store.dispatch(NOW_MS + 1_000 * step)
    later_ms = NOW_MS + 130_000
    for now_ms in (later_ms, later_ms + 2_000):
        flush = store.take_queue_flush(now_ms)
        if flush is not None:
            for target in flush.targets:
                target.sync()
            store.flushed(flush.kind, now_ms)
    vouched_ms = store._checkpoint.queues_ms
    assert vouched_ms >= NOW_MS + 59_000
    files.kill()
    again = Store.open(files, SMALL, later_ms + 3_000)
    assert again.max_offset("T", 0) == 60
    assert again._checkpoint.queues_ms < vouched_ms
