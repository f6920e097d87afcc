"""What the simulated cluster found in the product, each as a small test of its own."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest

from cometmq.errors import StoreFull
from cometmq.message import NewMessage
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
