"""Reads a store directory byte by byte and says what is wrong with it.

    python tests/crash/store_check.py STORE [--slots N] [--entries N]

Owns: its own small reading of RocketMQ's file formats. One rule: it shares no code with the
product, so a mistake there can't hide here. The store must be quiet: stopped cleanly, or recovered
and with nobody sending.

What must hold: the log is records back to back, each whole, at its own offset and no older than the
one before, then zeros; every record has its unit and every unit its record; every key of every
record is found by following the index, and no entry leads elsewhere; nobody has consumed beyond the
end of a queue.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

V1, V2, BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194
BLANK_UNIT_BYTES = 0x7FFFFFFF
MOST_FAULTS = 20

SCHEDULE_TOPIC, TIMER_TOPIC = "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"
LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

Place = tuple[str, int]


@dataclass(frozen=True)
class Record:
    """What the log says about one message."""

    at: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_ms: int
    reconsume_times: int
    store_host: bytes
    body: bytes = field(repr=False)
    properties: dict[str, str] = field(repr=False)

    @property
    def is_visible(self) -> bool:
        return self.sys_flag & 0xC not in (0x4, 0xC)

    @property
    def keys(self) -> list[str]:
        unique = self.properties.get("UNIQ_KEY")
        words = [word for word in self.properties.get("KEYS", "").split(" ") if word]
        return [unique, *words] if unique else words


@dataclass
class Found:
    """What stands in a store, and everything that is wrong with it."""

    faults: list[str] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)
    log_begin: int = 0
    log_end: int = 0
    queues: dict[Place, tuple[int, int]] = field(default_factory=dict)
    unit_count: int = 0
    entry_count: int = 0
    is_running: bool = False
    levels_ms: tuple[int, ...] = ()
    timer_count: int = 0

    def fault(self, text: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(text)


def check(
    root: Path, *, slots: int, entries: int, is_stopped: bool = False, levels: str = LEVELS
) -> Found:
    """Everything; `is_stopped` also asks for what a clean stop leaves behind."""
    found = Found(is_running=(root / "abort").exists(), levels_ms=_levels_ms(levels))
    if is_stopped and found.is_running:
        found.fault("abort is still there after a clean stop")
    _check_checkpoint(root, found)
    _check_log(root / "commitlog", found, is_stopped=is_stopped)
    _check_queues(root / "consumequeue", found)
    _check_index(root / "index", found, slots, entries)
    _check_offsets(root / "config" / "consumerOffset.json", found)
    _check_timers(root, found)
    return found


def _levels_ms(levels: str) -> tuple[int, ...]:
    units = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
    return tuple(int(level[:-1]) * units[level[-1]] for level in levels.split())


# ---------------------------------------------------------------------------------------------- log


def _neighbours(folder: Path, found: Found) -> list[tuple[int, Path, int]]:
    """Files of one size whose names say where they begin."""
    files: list[tuple[int, Path, int]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not re.fullmatch(r"[0-9]{20}", path.name):
            found.fault(f"{path} is no file of a store")
            continue
        start, size = int(path.name), path.stat().st_size
        if files and (start != files[-1][0] + files[-1][2] or size != files[-1][2]):
            found.fault(f"{path} ({size} bytes) does not follow {files[-1][1].name}")
        files.append((start, path, size))
    return files


def _check_log(folder: Path, found: Found, *, is_stopped: bool) -> None:
    files = _neighbours(folder, found)
    found.log_begin = found.log_end = files[0][0] if files else 0
    is_over = False
    last_ms = 0
    for start, path, size in files:
        data = path.read_bytes()
        if is_over:
            if data.strip(b"\0"):
                found.fault(f"{path.name} holds something behind the end of the log")
            if is_stopped:
                found.fault(f"{path.name} was made ahead and left behind by a clean stop")
            continue
        at = 0
        while at < size:
            total, magic = struct.unpack_from(">iI", data, at) if size - at >= 8 else (0, 0)
            if magic == BLANK:
                if total != size - at:
                    found.fault(f"blank at {start + at} says {total}, {size - at} bytes are left")
                at = size
                break
            record = _read_record(data, at, start, found)
            if record is None:
                break
            if record.store_ms < last_ms:
                found.fault(f"record {record.at} is older than the one before it")
            last_ms = record.store_ms
            found.records[record.at] = record
            at += record.size
        found.log_end = start + at
        if at < size:
            is_over = True
            if data[at:].strip(b"\0"):
                found.fault(
                    f"{path.name} holds something behind the end of the log at {start + at}"
                )


def _read_record(data: bytes, at: int, start: int, found: Found) -> Record | None:
    """The record that begins here; None, silently, if there are only zeros."""
    if len(data) - at < 91 or data[at : at + 8] == bytes(8):
        return None
    total, magic, crc, queue_id, _flag, queue_offset, log_offset, sys_flag, _born = (
        struct.unpack_from(">iIiiiqqiq", data, at)
    )
    where = f"record {start + at}"
    if magic not in (V1, V2) or not 91 <= total <= len(data) - at:
        found.fault(f"{where} begins with size {total}, magic {magic:08x}")
        return None
    if log_offset != start + at:
        found.fault(f"{where} says that it stands at {log_offset}")
        return None
    position = at + 48 + (20 if sys_flag & 0x10 else 8)
    (store_ms,) = struct.unpack_from(">q", data, position)
    position += 8
    host_bytes = 20 if sys_flag & 0x20 else 8
    store_host = data[position : position + host_bytes]
    position += host_bytes
    (reconsume_times,) = struct.unpack_from(">i", data, position)
    position += 12
    (body_bytes,) = struct.unpack_from(">i", data, position)
    position += 4
    body = data[position : position + body_bytes]
    position += body_bytes
    if zlib.crc32(body) & 0x7FFFFFFF != crc:
        found.fault(f"{where} has a body that does not match its CRC")
    width = ">B" if magic == V1 else ">H"
    (topic_bytes,) = struct.unpack_from(width, data, position)
    position += struct.calcsize(width)
    topic = data[position : position + topic_bytes].decode()
    position += topic_bytes
    (properties_bytes,) = struct.unpack_from(">h", data, position)
    position += 2
    text = data[position : position + properties_bytes].decode()
    if position + properties_bytes != at + total:
        found.fault(f"{where} is {total} bytes, its parts are {position + properties_bytes - at}")
    pairs = (piece.partition("\x01") for piece in text.split("\x02"))
    properties = {name: value for name, mark, value in pairs if mark and value}
    return Record(
        start + at,
        total,
        topic,
        queue_id,
        queue_offset,
        sys_flag,
        store_ms,
        reconsume_times,
        store_host,
        body,
        properties,
    )


# ------------------------------------------------------------------------------------------- queues


def _check_queues(root: Path, found: Found) -> None:
    wanted: dict[Place, dict[int, Record]] = defaultdict(dict)
    for record in found.records.values():
        if record.is_visible:
            others = wanted[record.topic, record.queue_id]
            if record.queue_offset in others:
                twin = others[record.queue_offset].at
                found.fault(f"{_name(record)} is both at {twin} and at {record.at}")
            others[record.queue_offset] = record
    for topic in sorted(root.iterdir()) if root.is_dir() else []:
        for queue in sorted(topic.iterdir()):
            place = (topic.name, int(queue.name))
            _check_queue(queue, place, wanted.pop(place, {}), found)
    for place, records in wanted.items():
        found.fault(f"{len(records)} records of {place} have no queue")


def _check_queue(folder: Path, place: Place, wanted: dict[int, Record], found: Found) -> None:
    files = _neighbours(folder, found)
    first = index = files[0][0] // 20 if files else 0
    least: int | None = None
    last_at = -1
    is_over = False
    for _start, path, size in files:
        data = path.read_bytes()
        at = 0
        while not is_over and at < size:
            log_at, length, tags = struct.unpack_from(">qiq", data, at)
            if length <= 0:
                break
            found.unit_count += 1
            if length != BLANK_UNIT_BYTES:
                if log_at <= last_at:
                    found.fault(f"{place} unit {index} points back to {log_at}")
                last_at = log_at
                if log_at >= found.log_begin:
                    least = index if least is None else least
                    _check_unit(place, index, (log_at, length, tags), wanted, found)
            index += 1
            at += 20
        if at < size:
            is_over = True
            if data[at:].strip(b"\0"):
                found.fault(f"{place} holds something behind unit {index} in {path.name}")
    missing = [number for number in wanted if not first <= number < index]
    if missing:
        found.fault(f"{place} ends at {index}; the log has {sorted(missing)[:5]} too")
    found.queues[place] = (index if least is None else least, index)


def _check_unit(
    place: Place,
    index: int,
    unit: tuple[int, int, int],
    wanted: dict[int, Record],
    found: Found,
) -> None:
    log_at, length, tags = unit
    record = wanted.get(index)
    if record is None or record.at != log_at:
        found.fault(f"{place} unit {index} points to {log_at}, its record is {record}")
        return
    expected = java_hash(record.properties["TAGS"]) if "TAGS" in record.properties else 0
    if record.topic == SCHEDULE_TOPIC:  # there it is the time at which the message is due
        expected = record.store_ms + found.levels_ms[record.queue_id]
    if length != record.size or tags != expected:
        found.fault(
            f"{place} unit {index} says {length} bytes and tags {tags}, its record {record.size} "
            f"and {expected}"
        )


def _name(record: Record) -> str:
    return f"{record.topic}/{record.queue_id} number {record.queue_offset}"


# -------------------------------------------------------------------------------------------- index


def _check_index(folder: Path, found: Found, slots: int, entries: int) -> None:
    shown: Counter[tuple[int, int]] = Counter()
    last_end = -1
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        data = path.read_bytes()
        if not re.fullmatch(r"[0-9]{17}", path.name) or len(data) != 40 + 4 * slots + 20 * entries:
            found.fault(f"index {path.name} has {len(data)} bytes")
            continue
        last_end = _check_index_file(path.name, data, slots, last_end, found, shown)
    expected: Counter[tuple[int, int]] = Counter()
    for record in found.records.values():
        for key in record.keys:
            expected[key_hash(f"{record.topic}#{key}"), record.at] += 1
    for (hashed, at), count in (expected - shown).items():
        found.fault(f"record {at}: {count} keys of hash {hashed} are not in the index")
    for (hashed, at), count in (shown - expected).items():
        if at >= found.log_begin:
            found.fault(f"the index leads {count} times from hash {hashed} to {at}, wrongly")


def _check_index_file(
    name: str,
    data: bytes,
    slots: int,
    last_end: int,
    found: Found,
    shown: Counter[tuple[int, int]],
) -> int:
    begin_ms, end_ms, begin_at, end_at, used, count = struct.unpack_from(">qqqqii", data, 0)
    if count <= 1:
        return max(last_end, end_at)
    heads = struct.unpack_from(f">{slots}i", data, 40)
    rows = [struct.unpack_from(">iqii", data, 40 + 4 * slots + 20 * n) for n in range(count)]
    if used != sum(1 for head in heads if head):
        found.fault(f"index {name} says {used} slots, {sum(1 for h in heads if h)} are in use")
    if (rows[1][1], rows[-1][1]) != (begin_at, end_at) or begin_at < last_end:
        found.fault(
            f"index {name} says {begin_at} to {end_at}, its entries {rows[1][1]} to {rows[-1][1]}, "
            f"the file before ends at {last_end}"
        )
    seen: set[int] = set()
    for slot, head in enumerate(heads):
        number, limit = head, count
        while number:
            if not 0 < number < limit or number in seen:
                found.fault(f"index {name} slot {slot}: a chain leads to {number} below {limit}")
                break
            seen.add(number)
            hashed, at, seconds, previous = rows[number]
            if hashed % slots != slot:
                found.fault(f"index {name} entry {number} hangs in slot {slot}")
            record = found.records.get(at)
            if record is not None and abs(record.store_ms - begin_ms - seconds * 1000) > 999:
                found.fault(f"index {name} entry {number} says {seconds} s after its begin")
            shown[hashed, at] += 1
            number, limit = previous, number
    if len(seen) != count - 1:
        found.fault(f"index {name} has {count - 1} entries, {len(seen)} of them in chains")
    found.entry_count += len(seen)
    if end_ms < begin_ms:
        found.fault(f"index {name} ends before it begins")
    return int(end_at)


def java_hash(text: str) -> int:
    value = 0
    raw = text.encode("utf-16-be")
    for at in range(0, len(raw), 2):
        value = (value * 31 + (raw[at] << 8 | raw[at + 1])) & 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def key_hash(text: str) -> int:
    value = abs(java_hash(text))
    return 0 if value == 2**31 else value


# ----------------------------------------------------------------------------------------- the rest


def _check_checkpoint(root: Path, found: Found) -> None:
    path = root / "checkpoint"
    if not path.exists() or path.stat().st_size != 4096:
        found.fault("checkpoint is missing or has the wrong size")


def _check_offsets(path: Path, found: Found) -> None:
    if not path.exists():
        return
    # RocketMQ writes queue ids bare: {0:12}
    text = re.sub(r"([{,]\s*)(-?\d+)\s*:", r'\1"\2":', path.read_text())
    for key, queues in json.loads(text).get("offsetTable", {}).items():
        topic, _, group = key.partition("@")
        for queue_id, offset in queues.items():
            _, end = found.queues.get((topic, int(queue_id)), (0, 0))
            if offset > end:
                found.fault(f"{group} is at {offset} of {topic}/{queue_id}, which ends at {end}")


def _check_timers(root: Path, found: Found) -> None:
    """Units of the timer log lead to timed messages, each chain stays in its slot and runs back,
    and the slots that are still to be read know the last unit of their time."""
    last: dict[int, int] = {}
    units: dict[int, tuple[int, int]] = {}
    for start, path, size in _neighbours(root / "timerlog", found):
        data = path.read_bytes()
        for at in range(0, size - 52, 52):
            length, prev, magic, write_ms, delay_ms, log_at, message_bytes, _, rest = (
                struct.unpack_from(">iqiqiqiiq", data, at)
            )
            if length != 52 or magic & 0xFFFFFFFF == BLANK:
                break
            place, time_ms = start + at, write_ms + delay_ms
            record = found.records.get(log_at)
            is_there = record is not None and record.topic == TIMER_TOPIC
            if log_at >= found.log_begin and (not is_there or record.size != message_bytes):
                found.fault(f"timer unit {place} leads to {log_at}, where {record} is")
            if not 0 < magic < 8 or delay_ms < 0 or rest:
                found.fault(f"timer unit {place} says magic {magic}, delay {delay_ms}, rest {rest}")
            if prev >= 0 and (prev >= place or units.get(prev, (0, 0))[0] != time_ms):
                found.fault(f"timer unit {place} of {time_ms} follows {prev}: {units.get(prev)}")
            units[place] = (time_ms, log_at)
            last[time_ms] = place
            found.timer_count += 1
    _check_wheel(root, found, last)


def _check_wheel(root: Path, found: Found, last: dict[int, int]) -> None:
    wheel, check = root / "timerwheel", root / "config" / "timercheck"
    if not last or not check.exists():
        return
    read_ms, log_end, queue_offset = struct.unpack_from(">qqq", check.read_bytes())
    if log_end > max(last.values()) + 52 + 52 + 30:
        found.fault(f"timercheck says that the log is durable to {log_end}, it ends before")
    if queue_offset > found.queues.get((TIMER_TOPIC, 0), (0, 0))[1]:
        found.fault(f"timercheck says that the queue was read to {queue_offset}")
    data = wheel.read_bytes()
    precision_ms = _precision_ms(data, last)
    for time_ms, place in last.items():
        if time_ms < read_ms:
            continue
        number = time_ms // precision_ms
        slot = struct.unpack_from(">qqqi", data, number % (len(data) // 32) * 32)
        if slot[0] != number or slot[2] != place:
            found.fault(f"the slot of {time_ms} is {slot}, its last unit is {place}")


def _precision_ms(wheel: bytes, last: dict[int, int]) -> int:
    """A slot says its time in units of the precision; the newest unit tells which one it is."""
    time_ms, place = max(last.items(), key=lambda item: item[1])
    for precision_ms in (1000, 500, 200, 100, 50, 20, 10):
        number = time_ms // precision_ms
        slot = struct.unpack_from(">qqq", wheel, number % (len(wheel) // 32) * 32)
        if slot[0] == number and slot[2] == place:
            return precision_ms
    return 1000


def main(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(description="check the files of a quiet store")
    parser.add_argument("store", type=Path)
    parser.add_argument("--slots", type=int, default=5_000_000)
    parser.add_argument("--entries", type=int, default=20_000_000)
    given = parser.parse_args(arguments)
    found = check(given.store, slots=given.slots, entries=given.entries)
    for fault in found.faults:
        print(fault)
    print(
        f"log {found.log_begin} to {found.log_end}: {len(found.records)} records, "
        f"{found.unit_count} units in {len(found.queues)} queues, {found.entry_count} keys, "
        f"{len(found.faults)} faults"
    )
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
