"""Retention: which files go, the disk-full flag, and numbers that never restart."""

from __future__ import annotations

import datetime

import pytest
from fake_disk import T0, FakeFiles, flush_all, keyed, message, small

from cometmq.errors import ConfigError, StoreFull
from cometmq.store import retention
from cometmq.store.layout import StoreConfig
from cometmq.store.results import FetchStatus
from cometmq.store.store import Store

HOUR = 3_600_000
FOUR = int(datetime.datetime(2024, 5, 6, 4, 30).timestamp() * 1000)
NOON = int(datetime.datetime(2024, 5, 6, 12, 0).timestamp() * 1000)


def choose(
    ages_h: list[int], now: int, ratio: float = 0.1, manual: bool = False, **changes: object
):  # type: ignore[no-untyped-def]
    config = StoreConfig(**changes)  # type: ignore[arg-type]
    modified = [now - age * HOUR for age in ages_h]
    return retention.choose(
        modified, now_ms=now, used_ratio=ratio, is_manual=manual, config=config
    )[0]


def test_decisions() -> None:
    ages = [100, 80, 72, 71, 90]
    assert choose(ages, FOUR) == 3  # oldest first, stops at the first that is not expired
    assert choose(ages, NOON) == 0
    assert choose(ages, NOON, delete_when="04;12") == 3
    assert choose(ages, NOON, manual=True) == 3
    assert choose(ages, NOON, ratio=0.75) == 0
    assert choose(ages, NOON, ratio=0.76) == 3  # room is short: whatever the hour
    assert choose([1, 1, 1], NOON, ratio=0.85) == 0
    assert choose([1, 1, 1], NOON, ratio=0.86) == 3  # forcibly: whatever the age
    assert choose([1, 1, 1], NOON, ratio=0.95, clean_forcibly=False) == 0
    assert choose([100] * 30, FOUR) == 10
    assert choose([], FOUR, ratio=0.99) == 0


def test_ratios_are_clamped_as_rocketmq_does() -> None:
    loose = StoreConfig(disk_warning_ratio=0.99, disk_forcible_ratio=0.99, disk_max_used_ratio=0.99)
    assert (loose.warning_ratio, loose.forcible_ratio, loose.expire_ratio) == (0.90, 0.85, 0.95)
    tight = StoreConfig(disk_warning_ratio=0.01, disk_forcible_ratio=0.01, disk_max_used_ratio=0.01)
    assert (tight.warning_ratio, tight.forcible_ratio, tight.expire_ratio) == (0.35, 0.30, 0.10)


@pytest.mark.parametrize(
    "changes",
    [{"delete_when": "25"}, {"delay_levels": "1x"}, {"queue_file_bytes": 30}, {"index_slots": 0}],
)
def test_bad_settings_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        StoreConfig(**changes)  # type: ignore[arg-type]


def test_disk_full_has_hysteresis() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    now = T0
    for ratio, is_full in (
        (0.90, False),
        (0.91, True),
        (0.88, True),
        (0.86, True),
        (0.85, False),
        (0.88, False),
        (0.90, False),
        (0.95, True),
        (0.20, False),
    ):
        files.ratio = ratio
        now += 10_000
        assert store.clean(now).is_disk_full == is_full, ratio
        assert store.is_disk_full == is_full
        if is_full:
            with pytest.raises(StoreFull, match=rf"{ratio:.2f} full.*0\.90"):
                store.append(message(), now)
        else:
            store.append(message(), now)


def test_full_disk_still_serves_and_closes() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    store.append(message(b"a"), T0)
    files.ratio = 0.99
    store.clean(T0)
    store.dispatch(T0)
    assert store.fetch("T", 0, 0, 1).count == 1
    store.close(T0)
    assert "abort" not in files.seen


def filled(files: FakeFiles, config: StoreConfig, count: int = 100) -> Store:
    store = Store.open(files, config, T0)
    for n in range(count):
        store.append(message(b"%d" % n + b"x" * 200, properties=f"UNIQ_KEY\x01k{n}\x02"), T0 + n)
        store.append(message(b"rare", queue_id=1), T0 + n) if n == 3 else None
    store.dispatch(T0)
    flush_all(store, T0 + 60_000)
    return store


def test_expired_files_go_with_their_units_and_keys() -> None:
    files = FakeFiles()
    config = small()
    store = filled(files, config)
    before = len(files.files("commitlog"))
    assert before >= 6
    for name, _ in files.files("commitlog")[:4]:
        files.modified[f"commitlog/{name}"] = T0 - 100 * HOUR
    for name, _ in files.files("commitlog")[4:]:
        files.modified[f"commitlog/{name}"] = T0
    report = store.clean(T0, force=True)
    assert report.log_files == 4
    assert report.reason == "asked for"
    assert store.min_log_offset == 4 * 4096
    low = store.min_offset("T", 0)
    assert 0 < low < 100
    assert report.queue_files == low // 16
    assert files.files("consumequeue/T/0")[0][0] == f"{low // 16 * 320:020d}"
    too_small = store.fetch("T", 0, 0, 32)
    assert (too_small.status, too_small.next_offset) == (FetchStatus.OFFSET_TOO_SMALL, low)
    assert store.fetch("T", 0, low, 1).count == 1
    assert store.record_at(0) is None
    assert store.find_by_key("T", "k0", 1, 0, 2**62).records == []
    assert len(store.find_by_key("T", "k99", 1, 0, 2**62).records) == 1
    assert report.index_files >= 1
    # The other queue has nothing left, and keeps its number.
    assert (store.min_offset("T", 1), store.max_offset("T", 1)) == (1, 1)
    assert store.offset_by_time("T", 0, 0) == low
    assert store.first_store_ms() == store.earliest_store_ms("T", 0)


@pytest.mark.parametrize("is_clean", [True, False])
def test_expired_data_never_restarts_at_zero(is_clean: bool) -> None:
    files = FakeFiles()
    config = small()
    store = filled(files, config)
    files.ratio = 0.87  # forcibly
    store.clean(T0 + 1)
    assert len(files.files("commitlog")) == 1
    assert (store.min_offset("T", 1), store.max_offset("T", 1)) == (1, 1)
    low = store.min_offset("T", 0)
    if is_clean:
        store.close(T0)
    else:
        files = files.copy()
    again = Store.open(files, config, T0 + 100)
    assert again.min_offset("T", 0) == low
    assert again.max_offset("T", 0) == 100
    assert (again.min_offset("T", 1), again.max_offset("T", 1)) == (1, 1)
    assert again.fetch("T", 1, 0, 1).status is FetchStatus.OFFSET_TOO_SMALL
    assert again.fetch("T", 1, 1, 1).status is FetchStatus.OFFSET_OVERFLOW_ONE
    assert again.append(message(b"next", queue_id=1), T0 + 100).queue_offset == 1
    again.dispatch(T0 + 100)
    assert again.fetch("T", 1, 1, 1).count == 1
    assert again.min_offset("T", 1) == 1


def test_numbers_survive_a_power_loss_right_after_cleaning() -> None:
    """Record and unit must not both be gone: then nobody knows where numbering had come to."""
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(60):
        store.append(message(b"%d" % n + b"x" * 200, queue_id=1 if n < 5 else 0), T0 + n)
    store.dispatch(T0)
    flush = store.take_flush(T0 + 10_000)
    assert flush is not None
    for target in flush.targets:
        target.sync()
    store.flushed("log", T0 + 10_000)
    files.ratio = 0.87
    assert store.clean(T0 + 10_000).log_files == 0  # the units are in memory only
    flush_all(store, T0 + 10_001)  # which hurries the flush of the queues
    assert store.clean(T0 + 10_002).log_files > 0
    again = Store.open(files.crash(), small(), T0 + 20_000)
    assert again.next_queue_offset("T", 1) == 5
    assert again.next_queue_offset("T", 0) == 55


def test_the_file_being_written_and_undispatched_ones_stay() -> None:
    files = FakeFiles()
    store = Store.open(files, small(), T0)
    for n in range(60):
        store.append(message(b"%d" % n + b"x" * 200), T0 + n)
    files.ratio = 0.89
    assert store.clean(T0).log_files == 0  # neither durable nor dispatched
    store.dispatch(T0)
    flush_all(store, T0 + 60_000)
    store.clean(T0)
    assert len(files.files("commitlog")) <= 2
    assert store.min_log_offset <= store.max_log_offset
    assert store.append(message(b"x"), T0).queue_offset == 60


def test_batch_of_ten_and_removed_files_stay_removed() -> None:
    files = FakeFiles()
    config = small(log_file_bytes=512, max_message_bytes=256)
    store = Store.open(files, config, T0)
    for n in range(30):
        store.append(keyed(f"k{n}" + "x" * 100), T0)
    store.dispatch(T0)
    flush_all(store, T0 + 60_000)
    files.ratio = 0.86
    count = len(files.files("commitlog"))
    assert store.clean(T0).log_files == 10
    assert len(files.files("commitlog")) == count - 10
    while store.clean(T0).log_files:
        pass
    assert len(files.files("commitlog")) <= 2
    assert store.stats.removed_log_files >= count - 2
