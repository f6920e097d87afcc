"""Appending: record bytes, file ends, batches, limits."""

from __future__ import annotations

import struct

import pytest
from fake_disk import T0, FakeFiles, message, small

from cometmq.errors import MessageIllegal, StoreFull, StoreReadOnly, UsageError
from cometmq.store.files import RealFiles
from cometmq.store.layout import StoreConfig
from cometmq.store.store import Store
from cometmq.wire import record

LOG = "commitlog/{:020d}"
V6 = bytes(range(16)) + struct.pack(">i", 10911)


def open_small(**changes: object) -> tuple[FakeFiles, Store]:
    files = FakeFiles()
    return files, Store.open(files, small(**changes), T0)


def sized(total: int) -> object:
    """A message whose record has exactly this many bytes (topic T, IPv4)."""
    return message(b"b" * (total - 92))


def test_the_reference_record() -> None:
    """wire.md section 11: bytes produced by Java."""
    files, store = open_small()
    store._log.start_at(0)
    store._queues.need("T", 3).ends.next_offset = 10
    for _ in range(1):
        store.append(
            message(
                b"hello",
                queue_id=3,
                properties="TAGS\x01TagA\x02",
                born_ms=1700000000000,
                born_host=bytes([10, 0, 0, 9]) + struct.pack(">i", 50000),
                store_host=bytes([10, 0, 0, 1]) + struct.pack(">i", 10911),
            ),
            1700000000005,
        )
    expected = bytes.fromhex(
        "0000006BDAA320A73610A6860000000300000000000000000000000A0000000000000000000000000000018BCF"
        "E568000A0000090000C3500000018BCFE568050A00000100002A9F0000000000000000000000000000000568"
        "656C6C6F0154000A54414753015461674102"
    )
    assert bytes(files.seen[LOG.format(0)][:107]) == expected


@pytest.mark.parametrize(("left_over", "is_rolled"), [(8, False), (9, False), (7, True), (0, True)])
def test_blank_rule_at_its_boundary(left_over: int, is_rolled: bool) -> None:
    """A record goes in only if 8 bytes stay free behind it."""
    files, store = open_small()
    first = store.append(sized(1000), T0)
    second_size = 4096 - 1000 - left_over
    second = store.append(message(b"b" * (2048 - 92 - 0)), T0)
    size = 4096 - second.end_offset - left_over
    third = store.append(sized(size), T0)
    assert first.log_offset == 0
    assert second_size > 0
    if is_rolled:
        assert third.log_offset == 4096
        at = second.end_offset
        blank = struct.unpack_from(">ii", files.seen[LOG.format(0)], at)
        assert blank == (4096 - at, record.MAGIC_BLANK)
    else:
        assert third.end_offset == 4096 - left_over
        fourth = store.append(sized(100), T0)
        assert fourth.log_offset == 4096
        blank = struct.unpack_from(">ii", files.seen[LOG.format(0)], third.end_offset)
        assert blank == (left_over, record.MAGIC_BLANK)
    store.dispatch(T0)
    count = store.max_offset("T", 0)
    store.close(T0)
    again = Store.open(files, small(), T0)
    assert again.max_offset("T", 0) == count
    assert not store.is_dispatch_behind


def test_batch_moves_as_a_whole() -> None:
    files, store = open_small()
    store.append(sized(2000), T0)
    store.append(sized(1500), T0)
    done = store.append_batch([message(b"x" * 200) for _ in range(3)], T0 + 5)
    assert [d.log_offset for d in done] == [4096, 4096 + 292, 4096 + 584]
    assert [d.queue_offset for d in done] == [2, 3, 4]
    assert {d.store_ms for d in done} == {T0 + 5}
    at = 3500
    assert struct.unpack_from(">ii", files.seen[LOG.format(0)], at) == (596, record.MAGIC_BLANK)
    store.dispatch(T0)
    assert store.max_offset("T", 0) == 5


def test_batch_at_the_exact_end() -> None:
    _, store = open_small()
    store.append(sized(2000), T0)
    room = 4096 - 2000 - 8
    first = room // 2
    done = store.append_batch([sized(first), sized(room - first)], T0)  # type: ignore[list-item]
    assert done[-1].end_offset == 4096 - 8
    _, other = open_small()
    other.append(sized(2001), T0)
    done = other.append_batch([sized(first), sized(room - first)], T0)  # type: ignore[list-item]
    assert done[0].log_offset == 4096


def test_batch_is_all_or_nothing() -> None:
    files, store = open_small()
    store.append(message(b"first"), T0)
    end = store.max_log_offset
    with pytest.raises(MessageIllegal):
        store.append_batch([message(b"ok"), message(b"bad", flag=2**40)], T0)
    with pytest.raises(MessageIllegal):
        store.append_batch([message(b"ok"), message(b"bad", properties="p" * 40_000)], T0)
    with pytest.raises(MessageIllegal, match="batch bodies exceed"):
        store.append_batch([message(b"x" * 1500), message(b"x" * 1500)], T0)
    assert store.max_log_offset == end
    assert not any(files.seen[LOG.format(0)][end:])
    assert store.append(message(b"next"), T0).queue_offset == 1
    assert store.append_batch([], T0) == []


def test_a_number_that_does_not_fit_leaves_no_trace() -> None:
    files, store = open_small()
    with pytest.raises(MessageIllegal):
        store.append(message(b"x", reconsume_times=2**31), T0)
    assert not any(files.seen[LOG.format(0)])
    assert store.append(message(), T0).queue_offset == 0


def test_limits() -> None:
    _, store = open_small(log_file_bytes=1 << 18)
    store.append(message(b"x" * 2048), T0)
    with pytest.raises(MessageIllegal, match="body of 2049 bytes; at most 2048"):
        store.append(message(b"x" * 2049), T0)
    store.append(message(properties="p" * 32767), T0)
    with pytest.raises(MessageIllegal, match="properties of 32768"):
        store.append(message(properties="p" * 32768), T0)
    with pytest.raises(MessageIllegal, match="topic of 128 bytes"):
        store.append(message(topic="t" * 128), T0)
    store.append(message(topic="t" * 127), T0)
    with pytest.raises(MessageIllegal, match="topic of 256 bytes"):
        store.append(message(topic="%RETRY%" + "t" * 249), T0)
    _, tiny = open_small()
    with pytest.raises(MessageIllegal, match="do not fit a log file"):
        tiny.append(message(b"x" * 2000, properties="p" * 2000), T0)
    assert tiny.append(message(), T0).log_offset == 0


@pytest.mark.parametrize("topic", ["", "../x", "a/b", "a.b", "tëst", "a b", "x\0"])
def test_bad_topics_never_reach_the_disk(topic: str) -> None:
    files, store = open_small()
    before = set(files.seen)
    with pytest.raises(UsageError):
        store.append(message(topic=topic), T0)
    for queue_id in (-1, 65536):
        with pytest.raises(UsageError):
            store.append(message(queue_id=queue_id), T0)
    assert set(files.seen) == before
    assert store.append(message(topic="%RETRY%a|b_c-D9", queue_id=65535), T0).queue_offset == 0


def test_v2_records_for_long_retry_topics() -> None:
    topic = "%RETRY%" + "g" * 200
    files, store = open_small()
    done = store.append(message(b"body", topic=topic), T0)
    assert done.size == 92 + 4 + 207
    store.dispatch(T0)
    (found,) = record.decode_all(store.fetch(topic, 0, 0, 1).body)
    assert (found.topic, found.body) == (topic, b"body")
    assert struct.unpack_from(">i", files.seen[LOG.format(0)], 4)[0] == record.MAGIC_V2
    again = Store.open(files.copy(), small(), T0)
    assert again.max_offset(topic, 0) == 1


def test_ipv6_hosts_survive_recovery_and_time_search() -> None:
    files, store = open_small()
    done = store.append(message(b"a", born_host=V6), T0 + 1)
    assert done.size == 92 + 1 + 12
    store.append(message(b"b", born_host=V6, store_host=V6), T0 + 2)
    store.append(message(b"c", store_host=V6), T0 + 3)
    store.dispatch(T0)
    again = Store.open(files.copy(), small(), T0)
    assert [again.store_ms_at("T", 0, n) for n in range(3)] == [T0 + 1, T0 + 2, T0 + 3]
    assert again.offset_by_time("T", 0, T0 + 2) == 1
    found = record.decode_all(again.fetch("T", 0, 0, 32).body)
    assert [m.body for m in found] == [b"a", b"b", b"c"]
    assert found[1].store_host == V6


def test_prepared_and_rolled_back_take_no_number() -> None:
    _, store = open_small()
    kinds = (0x4, 0xC, 0x8, 0)
    done = [store.append(message(sys_flag=kind), T0) for kind in kinds]
    assert [d.queue_offset for d in done] == [0, 0, 0, 1]
    arrivals = store.dispatch(T0)
    assert [a.queue_offset for a in arrivals] == [0, 1]
    assert store.max_offset("T", 0) == 2


def test_no_room_for_the_next_file_is_full_not_half_written() -> None:
    files, store = open_small()
    store.append(sized(2000), T0)
    store.append(sized(1500), T0)
    end = store.max_log_offset
    files.fail_map = "commitlog"
    with pytest.raises(StoreFull, match="no room for the next log file"):
        store.append(sized(1000), T0)
    assert store.max_log_offset == end
    assert not any(files.seen[LOG.format(0)][end:])
    files.fail_map = None
    assert store.append(sized(1000), T0).log_offset == 4096


def test_closed_store_refuses() -> None:
    _, store = open_small()
    store.close(T0)
    store.close(T0)
    with pytest.raises(StoreReadOnly, match="closed"):
        store.append(message(), T0)


def test_default_sizes_on_disk(tmp_path: object) -> None:
    """Exactly RocketMQ's sizes, made of holes."""
    files = RealFiles(str(tmp_path))
    store = Store.open(files, StoreConfig(), T0, "4711")
    store.append(message(properties="UNIQ_KEY\x01k\x02"), T0)
    store.dispatch(T0)
    assert files.read("abort") == b"4711"
    assert files.files("commitlog") == [("0" * 20, 1073741824)]
    assert files.files("consumequeue/T/0") == [("0" * 20, 6_000_000)]
    ((name, size),) = files.files("index")
    assert (len(name), size) == (17, 420_000_040)
    store.close(T0)
    assert files.read("abort") is None
    assert dict(files.files("."[:0] or "index"))
