"""The checker sees damage: each kind is planted in a copy of a good store and must be named.

Owns: the proof that store_check is worth asking. One rule: a new check comes with the damage that
it is there for.
"""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from journey import ENTRIES, SLOTS, Journey
from store_check import Found, Record, check, java_hash, key_hash

Damage = Callable[[Path, Found], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with some rolled files of every kind, stopped cleanly."""
    with Journey(tmp_path_factory.mktemp("good"), "ASYNC_FLUSH", seed=1) as journey:
        load = journey.load(journey.start_and_check())
        while len(journey.log_files) < 4 or journey.history.acked_count < 500:
            time.sleep(0.02)
        load.stop()
        journey.end()
    return journey.store


def run(root: Path) -> Found:
    return check(root, slots=SLOTS, entries=ENTRIES, is_stopped=True)


def test_a_good_store_has_no_faults(good: Path) -> None:
    found = run(good)
    assert found.faults == []
    assert len(found.records) >= 500
    assert found.unit_count == len(found.records)
    assert found.entry_count == sum(len(record.keys) for record in found.records.values())


def test_hashes_are_javas() -> None:
    assert java_hash("TagA") == 2598919
    assert key_hash("orders#k1") == abs(java_hash("orders#k1"))


def patch(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as sink:
        sink.seek(at)
        sink.write(content)


def a_record(found: Found) -> Record:
    return list(found.records.values())[len(found.records) // 2]


def log_place(root: Path, at: int) -> tuple[Path, int]:
    for path in sorted((root / "commitlog").iterdir()):
        if int(path.name) <= at < int(path.name) + path.stat().st_size:
            return path, at - int(path.name)
    raise AssertionError(at)


def queue_place(root: Path, record: Record) -> tuple[Path, int]:
    folder = root / "consumequeue" / record.topic / str(record.queue_id)
    size = min(folder.iterdir()).stat().st_size
    at = record.queue_offset * 20
    return folder / f"{at - at % size:020d}", at % size


def first_index(root: Path) -> Path:
    return min((root / "index").iterdir())


def body_flipped(root: Path, found: Found) -> None:
    record = a_record(found)
    path, at = log_place(root, record.at)
    patch(path, at + 88, bytes([path.read_bytes()[at + 88] ^ 1]))


def record_zeroed(root: Path, found: Found) -> None:
    record = a_record(found)
    path, at = log_place(root, record.at)
    patch(path, at, bytes(record.size))


def record_elsewhere(root: Path, found: Found) -> None:
    path, at = log_place(root, a_record(found).at)
    patch(path, at + 28, struct.pack(">q", 12345))


def number_repeated(root: Path, found: Found) -> None:
    record = a_record(found)
    path, at = log_place(root, record.at)
    patch(path, at + 20, struct.pack(">q", max(0, record.queue_offset - 1)))


def garbage_behind_the_end(root: Path, found: Found) -> None:
    path, at = log_place(root, found.log_end)
    patch(path, at + 100, b"stale")


def unit_points_elsewhere(root: Path, found: Found) -> None:
    record = a_record(found)
    path, at = queue_place(root, record)
    patch(path, at, struct.pack(">q", record.at + 1))


def unit_has_other_tags(root: Path, found: Found) -> None:
    path, at = queue_place(root, a_record(found))
    patch(path, at + 12, struct.pack(">q", 7))


def last_unit_missing(root: Path, found: Found) -> None:
    path, at = queue_place(root, list(found.records.values())[-1])
    patch(path, at, bytes(20))


def queue_missing(root: Path, found: Found) -> None:
    shutil.rmtree(root / "consumequeue" / a_record(found).topic)


def log_file_missing(root: Path, found: Found) -> None:
    sorted((root / "commitlog").iterdir())[1].unlink()


def index_file_missing(root: Path, found: Found) -> None:
    first_index(root).unlink()


def index_entry_changed(root: Path, found: Found) -> None:
    patch(first_index(root), 40 + 4 * SLOTS + 20 * 9, struct.pack(">i", 1))


def index_chain_turns(root: Path, found: Found) -> None:
    patch(first_index(root), 40 + 4 * SLOTS + 20 * 9 + 16, struct.pack(">i", 9))


def index_slot_empty(root: Path, found: Found) -> None:
    path = first_index(root)
    (hashed,) = struct.unpack_from(">i", path.read_bytes(), 40 + 4 * SLOTS + 20 * 9)
    patch(path, 40 + 4 * (hashed % SLOTS), bytes(4))


def index_count_low(root: Path, found: Found) -> None:
    path = first_index(root)
    (count,) = struct.unpack_from(">i", path.read_bytes(), 36)
    patch(path, 36, struct.pack(">i", count - 1))


def group_beyond_the_end(root: Path, found: Found) -> None:
    table = {"offsetTable": {"orders@readers": {"0": 10**6}}}
    (root / "config" / "consumerOffset.json").write_text(json.dumps(table))


def abort_left(root: Path, found: Found) -> None:
    (root / "abort").write_text("1")


def checkpoint_short(root: Path, found: Found) -> None:
    (root / "checkpoint").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (body_flipped, "CRC"),
        (record_zeroed, "behind the end"),
        (record_elsewhere, "says that it stands at 12345"),
        (number_repeated, "is both at"),
        (garbage_behind_the_end, "behind the end"),
        (unit_points_elsewhere, "points to"),
        (unit_has_other_tags, "tags 7"),
        (last_unit_missing, "the log has"),
        (queue_missing, "have no queue"),
        (log_file_missing, "does not follow"),
        (index_file_missing, "are not in the index"),
        (index_entry_changed, "hangs in slot"),
        (index_chain_turns, "a chain leads to 9"),
        (index_slot_empty, "are not in the index"),
        (index_count_low, "a chain leads to"),
        (group_beyond_the_end, "readers is at 1000000"),
        (abort_left, "abort"),
        (checkpoint_short, "checkpoint"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_seen(good: Path, tmp_path: Path, damage: Damage, words: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(good, root)
    damage(root, run(good))
    faults = run(root).faults
    assert any(words in fault for fault in faults), faults
