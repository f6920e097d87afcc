"""The simulated disk keeps what was synced and nothing else for certain."""

from __future__ import annotations

import random

import pytest

from cometmq.testing.disk import SECTOR_BYTES, ProcessEnded, SimulatedFiles


def _files(seed: int = 1) -> SimulatedFiles:
    return SimulatedFiles(random.Random(seed))


def test_what_was_synced_survives_and_the_rest_is_torn_by_sectors() -> None:
    kept_counts = set()
    for seed in range(20):
        files = _files(seed)
        mapped = files.map("log/0", 4 * SECTOR_BYTES)
        mapped.buffer[:SECTOR_BYTES] = b"a" * SECTOR_BYTES
        mapped.sync()
        mapped.buffer[SECTOR_BYTES:] = b"b" * (3 * SECTOR_BYTES)
        files.lose_power(keep_percent=50)
        content = files.read("log/0")
        assert content is not None and content[:SECTOR_BYTES] == b"a" * SECTOR_BYTES
        sectors = [content[at : at + SECTOR_BYTES] for at in range(512, 2048, 512)]
        assert all(one in (b"b" * SECTOR_BYTES, bytes(SECTOR_BYTES)) for one in sectors)
        kept_counts.add(sum(one[0] > 0 for one in sectors))
    assert len(kept_counts) > 1


def test_a_kill_loses_nothing() -> None:
    files = _files()
    mapped = files.map("log/0", 512)
    mapped.buffer[:3] = b"abc"
    files.kill()
    assert files.read("log/0") == b"abc" + bytes(509)


def test_a_new_file_may_vanish_until_it_is_synced() -> None:
    found = set()
    for seed in range(30):
        files = _files(seed)
        files.map("log/0", 512)
        files.lose_power(keep_percent=100)
        found.add(files.read("log/0"))
    assert found == {None, b"", bytes(512)}


def test_a_folder_is_lost_with_the_one_that_it_stands_in() -> None:
    """Seed 846904164: the second queue of a topic was synced before the topic's own folder."""
    lost = set()
    for seed in range(30):
        files = _files(seed)
        files.map("queues/A/0/f", 512)
        second = files.map("queues/A/1/f", 512)
        second.sync()
        assert not files.is_durable("queues/A/1/f", 0, 512)
        files.lose_power(keep_percent=50)
        is_there = files.folders("queues") == ["A"]
        assert (files.read("queues/A/1/f") is not None) == is_there
        assert is_there or files.folders("queues/A") == []
        lost.add(not is_there)
    assert lost == {True, False}


def test_replace_is_all_or_nothing_and_keeps_the_former_content() -> None:
    for steps in range(6):
        for seed in range(10):
            files = _files(seed)
            files.replace("config/a", b"old")
            job = files.replacing("config/a", b"new")
            for _ in range(steps):
                next(job, None)
            files.lose_power(keep_percent=50)
            assert files.read("config/a") in (b"old", b"new")
            if steps == 5:
                assert files.read("config/a") == b"new"
                assert files.read("config/a.bak") == b"old"


def test_a_failed_sync_fails_again_and_what_it_lost_stays_lost() -> None:
    for seed in range(20):
        files = _files(seed)
        mapped = files.map("log/0", 1024)
        mapped.sync()
        mapped.buffer[:] = b"x" * 1024
        files.failing_syncs = 1
        with pytest.raises(OSError):
            mapped.sync()
        with pytest.raises(OSError):
            mapped.sync()
        was_lost = files.has_lost_sectors
        files.kill()
        assert (files.read("log/0") != b"x" * 1024) == was_lost


def test_no_space_refuses_new_files_only() -> None:
    files = _files()
    files.map("log/0", 512)
    files.is_full = True
    files.map("log/0", 512).sync()
    with pytest.raises(OSError):
        files.map("log/1", 512)
    with pytest.raises(OSError):
        files.write("abort", b"1")


def test_a_process_can_end_at_any_sync() -> None:
    files = _files()
    files.ends_in = 1
    files.map("log/0", 512).sync()
    with pytest.raises(ProcessEnded):
        files.map("log/0", 512).sync()


def test_a_power_loss_may_take_the_log_and_leave_the_queues() -> None:
    files = _files()
    for name in ("commitlog/0", "consumequeue/0"):
        mapped = files.map(name, SECTOR_BYTES)
        mapped.sync()
        mapped.buffer[:] = b"x" * SECTOR_BYTES
    files.map("consumequeue/1", 10)
    files.lose_power(keep_percent=0, loses_only="commitlog/")
    assert files.read("commitlog/0") == bytes(SECTOR_BYTES)
    assert files.read("consumequeue/0") == b"x" * SECTOR_BYTES
    assert files.read("consumequeue/1") == bytes(10)


def test_bytes_are_durable_once_they_and_their_name_are_synced() -> None:
    files = _files()
    mapped = files.map("log/0", 4 * SECTOR_BYTES)
    mapped.buffer[:3] = b"abc"
    assert not files.is_durable("log/0", 0, 3)
    mapped.sync()
    assert files.is_durable("log/0", 0, 3)
    mapped.buffer[3:6] = b"def"
    assert files.is_durable("log/0", 0, 3) and not files.is_durable("log/0", 0, 6)
    assert not files.is_durable("log/1", 0, 3)


def test_close_refuses_while_a_slice_is_out() -> None:
    mapped = _files().map("log/0", 512)
    piece = mapped.buffer[:10]
    assert not mapped.close()
    piece.release()
    assert mapped.close()
