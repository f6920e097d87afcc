"""Timer log and timer wheel: RocketMQ's bytes, written by hand, and what damage does to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.errors import StoreCorrupt
from cometmq.store.files import RealFiles
from cometmq.store.timer_log import UNIT_BYTES, TimerLog, Unit
from cometmq.store.timer_wheel import TimerWheel

T0 = 1_700_000_000_000
UNIT_HEX = (
    "00000034"  # 52
    "ffffffffffffffff"  # none before it
    "00000001"
    "0000018bcfe56800"  # 1700000000000
    "000007d0"  # 2 s later
    "0000000000000400"  # record at 1024
    "0000012c"  # of 300 bytes
    "0001e240"  # hash 123456
    "0000000000000000"
)
BLANK = bytes.fromhex("cbd43194")
SMALL = 52 * 4 + 30  # four units and a closing


def unit(number: int = 0, prev: int = -1, magic: int = 1) -> Unit:
    return Unit(prev, magic, T0, 2000, 1024 + 300 * number, 300, 123456)


def always(position: int, found: Unit) -> bool:
    return True


def opened(
    root: Path, file_bytes: int = SMALL, is_good: Callable[[int, Unit], bool] = always
) -> TimerLog:
    log = TimerLog(RealFiles(root), file_bytes)
    log.load()
    log.recover(0, 0, is_good)
    return log


def file_of(root: Path, start: int) -> Path:
    return root / "timerlog" / f"{start:020d}"


def test_a_unit_is_rocketmqs_52_bytes(tmp_path: Path) -> None:
    log = opened(tmp_path, 104_857_600)
    assert log.append(unit()) == 0
    path = file_of(tmp_path, 0)
    assert path.stat().st_size == 104_857_600
    with path.open("rb") as source:
        assert source.read(56) == bytes.fromhex(UNIT_HEX) + bytes(4)
    log.close()


def test_a_file_is_closed_where_the_next_unit_and_a_blank_do_not_fit(tmp_path: Path) -> None:
    log = opened(tmp_path)
    positions = [log.append(unit(number)) for number in range(5)]
    assert positions == [0, 52, 104, 156, SMALL]
    closing = file_of(tmp_path, 0).read_bytes()[208:224]
    assert closing == (30).to_bytes(4, "big") + bytes(8) + BLANK
    assert [log.unit(one) for one in positions] == [unit(number) for number in range(5)]
    log.close()


def test_the_last_unit_of_a_file_of_rocketmqs_size(tmp_path: Path) -> None:
    log = opened(tmp_path, 104_857_600)
    log.append(unit())
    log.end = 104_857_532  # as if all before were there
    assert log.append(unit(1)) == 104_857_532
    assert log.append(unit(2)) == 104_857_600
    log.close()


def test_units_are_found_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    positions = [log.append(unit(number)) for number in range(7)]
    log.close()
    again = opened(tmp_path)
    assert again.end == positions[-1] + 52
    assert list(again.units(0)) == [(at, unit(n)) for n, at in enumerate(positions)]
    assert [at for at, _ in again.units(SMALL)] == positions[4:]
    assert again.append(unit(7)) == positions[-1] + 52
    again.close()


def test_a_full_file_that_was_not_closed_yet_is_gone_on_with(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(4):
        log.append(unit(number))
    log.close()
    again = opened(tmp_path)
    assert again.end == 208
    assert again.append(unit(4)) == SMALL
    again.close()


@pytest.mark.parametrize(
    ("at", "written"),
    [
        (52, bytes(4)),  # a hole
        (52, (53).to_bytes(4, "big")),
        (52 + 12, (16).to_bytes(4, "big")),  # a magic that can't be
        (52 + 44, (1).to_bytes(8, "big")),
    ],
)
def test_the_log_is_cut_at_the_first_bad_unit(tmp_path: Path, at: int, written: bytes) -> None:
    log = opened(tmp_path)
    for number in range(7):
        log.append(unit(number))
    log.close()
    path = file_of(tmp_path, 0)
    content = bytearray(path.read_bytes())
    content[at : at + len(written)] = written
    path.write_bytes(content)
    again = opened(tmp_path)
    assert again.end == 52
    assert not file_of(tmp_path, SMALL).exists()
    assert not any(path.read_bytes()[52:]), "what was cut can't come back"
    again.append(unit(9))
    again.close()
    assert opened(tmp_path).end == 104


def test_a_unit_that_is_not_believed_ends_the_log(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(3):
        log.append(unit(number))
    log.close()
    again = opened(tmp_path, is_good=lambda at, found: found.log_offset < 1024 + 600)
    assert again.end == 104
    assert again.unit(104) is None
    again.close()


def test_files_go_when_their_last_message_has_left_the_log(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(9):
        log.append(unit(number))
    assert log.remove_expired(1024 + 300 * 3) == 0
    assert log.remove_expired(1024 + 300 * 3 + 1) == 1
    assert log.start == SMALL
    assert log.unit(0) is None
    assert log.remove_expired(10**9) == 1, "never the last one"
    log.close()


def test_only_what_was_written_is_synced(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log.take_dirty() == []
    for number in range(5):
        log.append(unit(number))
    assert len(log.take_dirty()) == 2
    assert not log.is_dirty
    log.append(unit(5))
    assert len(log.take_dirty()) == 1
    log.close()


def test_a_log_of_another_file_size_stops_the_start(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append(unit())
    log.close()
    with pytest.raises(StoreCorrupt, match="expected exactly"):
        opened(tmp_path, SMALL + 52)


# ------------------------------------------------------------------------------------------ wheel


def test_a_slot_is_rocketmqs_32_bytes(tmp_path: Path) -> None:
    wheel = TimerWheel(RealFiles(tmp_path), 1000)
    wheel.add(T0, 0, 1)
    wheel.add(T0, 104, 1)
    wheel.add(T0, 156, -1)
    path = tmp_path / "timerwheel"
    assert path.stat().st_size == 38_707_200
    with path.open("rb") as source:
        source.seek(1_700_000_000 % 1_209_600 * 32)
        assert source.read(32).hex() == (
            "000000006553f1000000000000000000000000000000009c0000000100000000"
        )
    wheel.close()


def test_a_slot_speaks_for_its_own_time_only(tmp_path: Path) -> None:
    wheel = TimerWheel(RealFiles(tmp_path), 1000, slots=100)
    wheel.add(T0, 0, 1)
    assert wheel.get(T0 + 999) == wheel.get(T0)
    assert wheel.get(T0 + 1000) is None
    assert wheel.get(T0 + 100_000) is None, "a lap later"
    wheel.add(T0 + 100_000, 520, 1)
    assert wheel.get(T0) is None
    found = wheel.get(T0 + 100_000)
    assert found is not None
    assert (found.first, found.last, found.count) == (520, 520, 1)
    wheel.close()


def test_live_slots(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    wheel = TimerWheel(files, 1000)
    assert wheel.is_blank
    for seconds in (0, 5, 100_000):
        wheel.add(T0 + seconds * 1000, seconds, 1)
    wheel.close()
    again = TimerWheel(files, 1000)
    assert not again.is_blank
    assert sorted(slot.time_ms - T0 for slot in again.live(T0 + 1000)) == [5_000, 100_000_000]
    again.close()


def test_another_precision(tmp_path: Path) -> None:
    wheel = TimerWheel(RealFiles(tmp_path), 100)
    wheel.add(T0 + 250, 0, 1)
    found = wheel.get(T0 + 299)
    assert found is not None
    assert found.time_ms == T0 + 200
    assert wheel.get(T0 + 300) is None
    wheel.close()


def test_a_wheel_of_another_length_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "timerwheel").write_bytes(bytes(320))
    with pytest.raises(StoreCorrupt, match="timerwheel is 320 bytes"):
        TimerWheel(RealFiles(tmp_path), 1000)


def test_units_behind_the_durable_end_are_synced_again(tmp_path: Path) -> None:
    """A killed process leaves them in the system's memory; a power loss later would take them."""
    log = opened(tmp_path)
    for number in range(3 * (SMALL // UNIT_BYTES)):
        log.append(unit(number))
    end = log.end
    assert log.take_dirty()
    log.close()
    later = TimerLog(RealFiles(tmp_path), SMALL)
    later.load()
    later.recover(0, SMALL + UNIT_BYTES, always)
    assert later.end == end and later.is_dirty
    files = len(list((tmp_path / "timerlog").iterdir()))
    assert len(later.take_dirty()) == files - 1, "all but the first file"
    assert not later.is_dirty
    later.close()
