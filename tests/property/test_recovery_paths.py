"""Recovery by compiled code and by the plain way: the same store and timers, byte for byte.

One rule: whatever a crash left, both walks believe the same records, cut at the same place and
write the same units and index entries. The plain walk is the oracle; the compiled one must have
been at work for a comparison to count.
"""

from __future__ import annotations

import pathlib
import random
import sys
from typing import cast

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "unit" / "store"))

from fake_disk import T0, FakeFiles, flush_all, small

from cometmq import _fast
from cometmq._fast.hot import Hot
from cometmq.broker.timer_check import TimerCheck, recover
from cometmq.errors import CometError
from cometmq.message import NewMessage
from cometmq.store.layout import SCHEDULE_TOPIC, StoreConfig
from cometmq.store.store import Store
from cometmq.store.timer_log import NO_UNIT, UNIT_BYTES, TimerLog, Unit
from cometmq.store.timer_wheel import SLOT_BYTES, TimerWheel
from cometmq.wire.codes import SysFlag

pytestmark = pytest.mark.skipif(_fast.load()[0] is None, reason="the compiled path was not built")

TOPICS = ("T", "orders", "%RETRY%g", "%RETRY%" + "L" * 200, SCHEDULE_TOPIC)
V6_HOST = bytes(range(16)) + b"\0\0\x2a\x9f"
ODD = (
    *("", "a\x01b", "TAGS\x01x\x02TAGS\x01y\x02", "KEYS\x01\u00e9 k\x02", "TAGS\x01\u00fc\x02"),
    *("UNIQ_KEY\x01u\x02UNIQ_KEY\x01v\x02", "x\x01\x02", "\x01y\x02", "KEYS\x01  \x02", "a\x02"),
    *("a\x01b\x01c\x02", "DELAY\x01two\x02", "DELAY\x010\x02", "DELAY\x013\x02DELAY\x014\x02"),
    *("DELAY\x0199\x02", "k\x01a\0b\x02", "k\x01a\0\0\0\0b\x02", "KEYS\x01" + "k " * 70 + "\x02"),
)


def _message(rng: random.Random, number: int) -> NewMessage:
    topic = rng.choice(TOPICS)
    text = f"UNIQ_KEY\x01U{number:04X}\x02"
    if rng.randrange(2):
        text += f"TAGS\x01{rng.choice(('A', 'B'))}\x02KEYS\x01k{number} all\x02"
    if topic == SCHEDULE_TOPIC:
        text += f"DELAY\x01{rng.randrange(1, 19)}\x02"
    if not rng.randrange(12):
        text = rng.choice(ODD)
    message = NewMessage(topic, rng.choice((0, 1, 9)), rng.randbytes(rng.randrange(200)), text)
    if not rng.randrange(15):
        message.sys_flag = int(rng.choice((SysFlag.PREPARED, SysFlag.COMMIT, SysFlag.ROLLBACK)))
    if not rng.randrange(15):
        message.born_host = V6_HOST
    return message


def _filled(rng: random.Random, config: StoreConfig) -> tuple[FakeFiles, int]:
    """What a process leaves that dies sometime; and when."""
    files, now_ms = FakeFiles(), T0
    store = Store.open(files, config, now_ms)
    for number in range(rng.randrange(5, 120)):
        store.append(_message(rng, number), now_ms)
        if rng.randrange(3):
            store.dispatch(now_ms)
        now_ms += rng.choice((0, 1, 40, 2_000, 70_000 if not rng.randrange(5) else 5))
        if not rng.randrange(6):
            flush_all(store, now_ms)
        if not rng.randrange(40):
            store.delete_topic("orders")
    return files, now_ms


def _damage(rng: random.Random, files: FakeFiles) -> None:
    """A record that no longer says what it said."""
    logs = [
        content for name, content in sorted(files.seen.items()) if name.startswith("commitlog/")
    ]
    content = rng.choice([content for content in logs if content] or [bytearray(1)])
    at = rng.randrange(len(content))
    content[at] ^= 1 << rng.randrange(8)


def _state(store: Store) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    found = {}
    for topic, queue_id in store.queues():
        ends = store.queue_ends(topic, queue_id)
        assert ends is not None
        bounds = (ends.min_offset, ends.max_offset, ends.next_offset, ends.log_end)
        found[topic, queue_id] = bounds
    return found


class _Counting:
    """A Hot that counts the bytes it walked over, and the timers it checked."""

    def __init__(self, hot: Hot) -> None:
        self._hot, self.walked, self.checked = hot, 0, 0

    def check_timers(self, units: memoryview, begin: int, at: int, *rest: object) -> int:
        after = self._hot.check_timers(units, begin, at, *rest)  # type: ignore[arg-type]
        self.checked += (after - at) // UNIT_BYTES
        return after

    def walk(self, buffer: memoryview, begin: int, position: int, *rest: object) -> int:
        after = self._hot.walk(buffer, begin, position, *rest)  # type: ignore[arg-type]
        self.walked += after - position
        return after

    def __getattr__(self, name: str) -> object:
        return getattr(self._hot, name)


def _play(seed: int) -> int:
    """One store, killed or without power, recovered twice; returns how much was walked."""
    rng = random.Random(seed)
    config = small(
        log_file_bytes=rng.choice((4096, 16384, 65536)),
        queue_file_bytes=20 * rng.choice((4, 16, 1000)),
        index_entries=rng.choice((40, 400)),
        index_enabled=bool(rng.randrange(5)),
        is_sync_flush=bool(rng.randrange(2)),
        queue_flush_thorough_ms=rng.choice((300, 60_000)),
        verify_crc_on_recover=bool(rng.randrange(8)),
        is_durable_cut_allowed=True,
    )
    left, now_ms = _filled(rng, config)
    crash_seed, is_kill = rng.random(), bool(rng.randrange(2))
    is_damaged = not rng.randrange(3)
    sides: list[tuple[FakeFiles, Store | str]] = []
    module = _fast.load()[0]
    assert module is not None
    counting = _Counting(cast("Hot", module.Hot()))
    for hot in (None, cast("Hot", counting)):
        files = left.copy() if is_kill else left.crash(random.Random(crash_seed))
        if is_damaged:
            _damage(random.Random(crash_seed), files)
        try:
            sides.append((files, Store.open(files, config, now_ms + 10_000, hot=hot)))
        except CometError as error:
            sides.append((files, str(error)))
    (plain_files, plain), (compiled_files, compiled) = sides
    if isinstance(plain, str) or isinstance(compiled, str):
        assert plain == compiled
        return 0
    _compare(plain_files, plain, compiled_files, compiled)
    for number in range(1000, 1020):
        message = _message(rng, number)
        assert plain.append(message, now_ms + 20_000) == compiled.append(message, now_ms + 20_000)
    assert plain.dispatch(now_ms + 20_000) == compiled.dispatch(now_ms + 20_000)
    _compare(plain_files, plain, compiled_files, compiled)
    return counting.walked


def _records(store: Store, having: str) -> list[object]:
    """Those with a text in their properties; where that ends if it is at a damaged one."""
    found: list[object] = []
    try:
        found.extend(store.records(store.min_log_offset, having))
    except CometError as error:
        found.append(str(error))
    return found


def _compare(
    plain_files: FakeFiles, plain: Store, compiled_files: FakeFiles, compiled: Store
) -> None:
    assert plain.stats.recovered == compiled.stats.recovered
    assert _state(plain) == _state(compiled)
    assert plain_files.seen.keys() == compiled_files.seen.keys()
    for name, content in plain_files.seen.items():
        assert content == compiled_files.seen[name], name
    for text in ("TAGS\x01A", "UNIQ_KEY", "nowhere", ""):
        assert _records(plain, text) == _records(compiled, text), text


@pytest.mark.parametrize("begin", range(0, 600, 60))
def test_both_walks_recover_the_same_store(begin: int) -> None:
    walked = 0
    for seed in range(begin, begin + 60):
        try:
            walked += _play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert walked > 20_000, "the compiled walk had nothing to do"


def test_records_of_a_known_queue_are_all_walked_over() -> None:
    """But for the first of a queue, a file's end and a new queue or index file."""
    config = small(
        log_file_bytes=1 << 20, queue_file_bytes=20 * 5000, index_entries=5000, index_slots=500
    )
    files = FakeFiles()
    store = Store.open(files, config, T0)
    for number in range(2000):
        text = f"UNIQ_KEY\x01U{number}\x02TAGS\x01A\x02"
        store.append(NewMessage("T", number % 3, b"body", text), T0)
    store.dispatch(T0)
    module = _fast.load()[0]
    assert module is not None
    counting = _Counting(cast("Hot", module.Hot()))
    again = Store.open(files.copy(), config, T0 + 1, hot=cast("Hot", counting))
    assert again.stats.recovered.record_count == 2000
    first = again.unit("T", 0, 0)
    assert first is not None
    assert counting.walked == again.max_log_offset - 3 * first[1]


# ------------------------------------------------------------------------------------------- timers

PRECISION_MS, SLOTS, UNITS_A_FILE = 100, 2_000, 40


def _timers(files: FakeFiles) -> tuple[TimerLog, TimerWheel]:
    timer_log = TimerLog(files, UNIT_BYTES * UNITS_A_FILE + 16)
    timer_log.load()
    return timer_log, TimerWheel(files, PRECISION_MS, SLOTS)


def _filled_timers(rng: random.Random, config: StoreConfig) -> tuple[FakeFiles, TimerCheck]:
    """Some messages that wait, as a process left them; the checkpoint is somewhere before."""
    files = FakeFiles()
    store = Store.open(files, config, T0)
    timer_log, wheel = _timers(files)
    check = TimerCheck()
    for number in range(rng.randrange(1, 150)):
        stored = store.append(_message(rng, number), T0)
        slot_ms = T0 + PRECISION_MS * rng.randrange(30)
        slot = wheel.get(slot_ms)
        prev = NO_UNIT if slot is None else slot.last
        magic = rng.choice((1, 1, 1, 3, 5))
        unit = Unit(prev, magic, T0, slot_ms - T0, stored.log_offset, stored.size, number)
        position = timer_log.append(unit)
        if rng.randrange(40):  # else the kill came between the two, long ago
            wheel.add(slot_ms, position, 1)
        if rng.randrange(4):
            check = TimerCheck(T0 + PRECISION_MS * rng.randrange(5), timer_log.end, number, number)
    store.dispatch(T0)
    return files, check


def _damage_timers(rng: random.Random, files: FakeFiles) -> None:
    """Sectors of wheel and log that never came to the disk, or bits that did not."""
    for name, content in files.seen.items():
        if name.startswith("timerlog/") and not rng.randrange(4):
            at = rng.randrange(len(content))
            content[at] ^= 1 << rng.randrange(8)
        if name == "timerwheel" and not rng.randrange(2):
            for _ in range(rng.randrange(1, 4)):
                at = SLOT_BYTES * rng.randrange(SLOTS)
                content[at : at + 512] = bytes(len(content[at : at + 512]))


def _play_timers(seed: int) -> int:
    rng = random.Random(seed)
    config = small(log_file_bytes=65536)
    module = _fast.load()[0]
    assert module is not None
    counting = _Counting(cast("Hot", module.Hot()))
    left, check = _filled_timers(rng, config)
    _damage_timers(rng, left)
    results = []
    for hot in (None, cast("Hot", counting)):
        files = left.copy()
        store = Store.open(files, config, T0 + 5_000, hot=hot)
        timer_log, wheel = _timers(files)
        found = recover(store, timer_log, wheel, check, T0 + 5_000)
        units = list(timer_log.units(0))
        results.append((found, timer_log.end, units, list(wheel.live(0)), files.seen))
    assert results[0] == results[1]
    return counting.checked


@pytest.mark.parametrize("begin", range(0, 600, 200))
def test_timers_are_recovered_alike(begin: int) -> None:
    checked = 0
    for seed in range(begin, begin + 200):
        try:
            checked += _play_timers(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert checked > 2_000, "compiled code had nothing to do"
