"""The key index: bytes, chains, time windows, limits."""

from __future__ import annotations

import random
import struct

import pytest
from fake_disk import T0, FakeFiles, keyed, message, small

from cometmq.errors import StoreCorrupt
from cometmq.store.key_index import KeyIndex, key_hash
from cometmq.store.store import Store
from cometmq.wire import record
from cometmq.wire.hashing import index_hash

FOREVER = 2**62


def found(store: Store, key: str, count: int = 64, begin: int = 0, end: int = FOREVER) -> list[int]:
    records = store.find_by_key("T", key, count, begin, end).records
    return [record.decode(r).queue_offset for r in records]


def test_file_bytes() -> None:
    files = FakeFiles()
    store = Store.open(files, small(index_slots=1000), T0)
    store.append(keyed("u1", "a", "b"), T0)
    second = store.append(keyed("u2", "a"), T0 + 2500)
    store.dispatch(T0)
    ((name, size),) = files.files("index")
    assert len(name) == 17
    assert name.isdigit()
    assert size == 40 + 4 * 1000 + 20 * 40
    content = files.seen[f"index/{name}"]
    slots = {index_hash(f"T#{key}") % 1000 for key in ("u1", "a", "b", "u2")}
    assert struct.unpack_from(">qqqqii", content, 0) == (
        T0,
        T0 + 2500,
        0,
        second.log_offset,
        len(slots),
        6,
    )
    entries = [struct.unpack_from(">iqii", content, 4040 + 20 * n) for n in range(6)]
    assert entries[0] == (0, 0, 0, 0)  # entry 0 is never used
    expected = [("u1", 0, 0), ("a", 0, 0), ("b", 0, 0), ("u2", 2, 0), ("a", 2, 2)]
    for n, (key, seconds, previous) in enumerate(expected, start=1):
        offset = 0 if n <= 3 else second.log_offset
        assert entries[n] == (index_hash(f"T#{key}"), offset, seconds, previous)
        slot = index_hash(f"T#{key}") % 1000
        (head,) = struct.unpack_from(">i", content, 40 + 4 * slot)
        assert head == max(
            m for m, (k, _, _) in enumerate(expected, 1) if index_hash(f"T#{k}") % 1000 == slot
        )


@pytest.mark.parametrize(
    "key",
    ["k", "", "polygenelubricants", "中文", "😀x", "x" * 300, "中" + "y" * 20, "y" * 20 + "中"],
)
def test_key_hash_is_java_s(key: str) -> None:
    for topic in ("T", "%RETRY%" + "g" * 150, "t" * 127):
        assert key_hash(topic, key) == index_hash(f"{topic}#{key}")


def test_key_hash_against_the_loop() -> None:
    rng = random.Random(1)
    for _ in range(300):
        key = "".join(chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 60)))
        assert key_hash("Topic", key) == index_hash(f"Topic#{key}")


def test_find_newest_first_and_sorted() -> None:
    store = Store.open(FakeFiles(), small(), T0)
    for n in range(100):  # three index files
        store.append(keyed(f"u{n}", "same"), T0 + n)
    store.dispatch(T0)
    assert found(store, "same") == list(range(36, 100))  # at most 64, the newest
    assert found(store, "same", 3) == [97, 98, 99]
    assert found(store, "same", 1000) == list(range(36, 100))
    assert found(store, "u7") == [7]
    assert found(store, "none") == []
    assert store.find_by_key("Other", "same", 64, 0, FOREVER).records == []
    answer = store.find_by_key("T", "none", 1, 0, FOREVER)
    assert answer.index_last_ms == T0 + 99
    assert record.decode(store.record_at(answer.index_last_offset) or b"").queue_offset == 99


def test_time_window_is_exact() -> None:
    """Entries know only seconds; the records know better."""
    store = Store.open(FakeFiles(), small(), T0)
    for n in range(30):
        store.append(keyed(f"u{n}", "same"), T0 + n * 300)
    store.dispatch(T0)
    for begin in range(0, 9000, 450):
        for width in (0, 150, 1200, 5000):
            expected = [n for n in range(30) if begin <= n * 300 <= begin + width]
            assert found(store, "same", 64, T0 + begin, T0 + begin + width) == expected


def test_colliding_hashes_do_not_mix_topics() -> None:
    store = Store.open(FakeFiles(), small(), T0)
    store.append(keyed("Aa"), T0)
    store.append(keyed("BB"), T0)
    store.dispatch(T0)
    assert key_hash("T", "Aa") == key_hash("T", "BB")
    assert found(store, "Aa") == [0]
    assert found(store, "BB") == [1]


def test_what_is_indexed() -> None:
    store = Store.open(FakeFiles(), small(), T0)
    store.append(message(properties="KEYS\x01 a  b \x02", sys_flag=0x8), T0)  # committed
    store.append(message(properties="KEYS\x01rolled\x02", sys_flag=0xC), T0)
    store.append(message(properties="KEYS\x01half\x02", sys_flag=0x4), T0)
    store.append(message(), T0)
    store.dispatch(T0)
    assert found(store, "a") == [0]
    assert found(store, "b") == [0]
    assert found(store, "rolled") == []
    assert len(found(store, "half")) == 1


def test_full_file_and_names_stay_sorted() -> None:
    files = FakeFiles()
    index = KeyIndex(files, small())
    for n in range(120):
        index.put("T", [f"k{n}", "x"], n * 100, T0 + n, T0)  # always the same time
    names = [name for name, _ in files.files("index")]
    assert names == sorted(set(names))
    assert len(names) == 7
    assert [item.head.count for item in index.items] == [40] * 6 + [7]
    again = KeyIndex(files, small())
    again.load()
    assert list(again.find("T", "x", 0, FOREVER)) == [n * 100 for n in reversed(range(120))]
    for n in range(120):
        assert list(again.find("T", f"k{n}", 0, FOREVER)) == [n * 100]
    assert again.end_offset == 11_900
    again.put("T", ["k5"], 500, T0, T0)  # long past: ignored
    assert list(again.find("T", "k5", 0, FOREVER)) == [500]


def test_a_damaged_chain_ends() -> None:
    files = FakeFiles()
    index = KeyIndex(files, small(index_slots=1))
    for n in range(10):
        index.put("T", ["x"], n * 100, T0, T0)
    name = files.files("index")[0][0]
    struct.pack_into(">i", files.seen[f"index/{name}"], 44 + 20 * 5 + 16, 9)  # entry 5 -> 9
    assert list(index.find("T", "x", 0, FOREVER)) == [900, 800, 700, 600, 500, 400]


def test_empty_file_as_rocketmq_leaves_it() -> None:
    """A fresh file after a full one: begin and end preset, count still 0 on disk."""
    files = FakeFiles()
    config = small()
    content = bytearray(config.index_file_bytes)
    struct.pack_into(">qqqqii", content, 0, T0, T0, 700, 700, 0, 0)
    files.write("index/20231114221320000", bytes(content))
    index = KeyIndex(files, config)
    index.load()
    assert index.end_offset == 700
    index.put("T", ["a"], 600, T0, T0)
    assert list(index.find("T", "a", 0, FOREVER)) == []
    index.put("T", ["a"], 900, T0 + 10, T0)
    assert list(index.find("T", "a", 0, FOREVER)) == [900]
    assert struct.unpack_from(">qqqqii", files.seen["index/20231114221320000"], 0) == (
        T0 + 10,
        T0 + 10,
        900,
        900,
        1,
        2,
    )


def test_wrong_size_refuses_by_name() -> None:
    files = FakeFiles()
    files.write("index/20231114221320000", bytes(99))
    with pytest.raises(StoreCorrupt, match=r"index/20231114221320000 is 99 bytes"):
        Store.open(files, small(), T0)
    files.write("index/20231114221320000", b"")
    Store.open(files, small(), T0)


def test_without_index() -> None:
    files = FakeFiles()
    store = Store.open(files, small(index_enabled=False), T0)
    store.append(keyed("a"), T0)
    store.dispatch(T0)
    assert found(store, "a") == []
    assert files.files("index") == []
    store.close(T0)
