"""How far the timers have come (config/timercheck), and what follows from that at a start.

     0 i64 read ms: all slots before it are delivered      8 i64 timer log durable up to here
    16 i64 next unit of the timers' queue                 24 i64 the same as the leader says it
    32 i64 stateVersion    40 i64 timestamp    48 i64 counter                     zeros to 4096

Owns: these numbers, and the repair of wheel and timer log after a stop of any kind. One rule: a
number is written only when everything it vouches for is durable: units, slots, and the delivered
messages themselves. So a start may trust it, and what came after it is looked at one by one.
"""

from __future__ import annotations

import logging
import struct

import msgspec

from cometmq.broker.names import TIMER_TOPIC
from cometmq.ports import NEVER_MS, Files
from cometmq.store.store import Store
from cometmq.store.timer_log import DELETE_BIT, TimerLog, Unit
from cometmq.store.timer_wheel import TimerWheel
from cometmq.wire import record
from cometmq.wire.bodies import DataVersion

log = logging.getLogger("cometmq.broker")

CHECK_FILE = "config/timercheck"
CHECK_BYTES = 4096
BLANK_SLOTS = 60  # between the oldest slot that is still read and the ones being written
_FIELDS = struct.Struct(">7q")


class TimerCheck(msgspec.Struct, frozen=True):
    """The numbers of config/timercheck."""

    read_ms: int = 0
    log_end: int = 0
    queue_offset: int = 0
    leader_offset: int = 0
    version: DataVersion = DataVersion()

    def encode(self) -> bytes:
        """The 56 bytes that 60 (GET_TIMER_CHECK_POINT) answers."""
        version = self.version
        return _FIELDS.pack(
            self.read_ms,
            self.log_end,
            self.queue_offset,
            self.leader_offset,
            version.stateVersion,
            version.timestamp,
            version.counter,
        )

    def file(self) -> bytes:
        return self.encode().ljust(CHECK_BYTES, b"\0")


def load_check(files: Files) -> TimerCheck:
    """The file, else its backup, else zeros."""
    for name in (CHECK_FILE, CHECK_FILE + ".bak"):
        content = files.read(name)
        if content is None:
            continue
        if len(content) >= _FIELDS.size:
            fields = [max(field, 0) for field in _FIELDS.unpack_from(content)]
            read_ms, log_end, queue_offset, leader_offset, state, at_ms, counter = fields
            version = DataVersion(counter, state, at_ms)
            return TimerCheck(read_ms, log_end, queue_offset, leader_offset, version)
        log.error("timer checkpoint bad name=%s size=%d", name, len(content))
    return TimerCheck()


class Found(msgspec.Struct):
    """Where the timers go on after a start."""

    read_ms: int
    queue_offset: int
    last_slot_ms: int = -1
    pending: int = 0
    logged: set[int] = msgspec.field(default_factory=set)
    """Log offsets of messages that entered the wheel since the checkpoint."""
    done_upto: int = 0
    """Units before this were handled once; their timers before `read_ms` were delivered."""


def recover(
    store: Store, timer_log: TimerLog, wheel: TimerWheel | None, check: TimerCheck, now_ms: int
) -> Found:
    """Cut the timer log where it can't be believed, make the slots agree with it, and find where
    reading and delivering go on. `wheel` is None if there is no timer log."""
    checked_offset = min(check.queue_offset, check.leader_offset)
    found = Found(check.read_ms, checked_offset)
    if wheel is not None:
        precision_ms = wheel.precision_ms
        least_ms = oldest_ms(precision_ms, wheel.slots, now_ms)
        found.read_ms = check.read_ms // precision_ms * precision_ms
        if found.read_ms < least_ms:
            if check.read_ms:
                log.error(
                    "timers too old for the wheel are lost before=%d after=%d",
                    check.read_ms,
                    least_ms,
                )
            found.read_ms = least_ms
        _recover_log(store, timer_log, wheel, check, found)
        _repair_bad_slots(timer_log, wheel, found.read_ms)
        for slot in wheel.live(found.read_ms):
            if slot.last >= 0:
                found.last_slot_ms = max(found.last_slot_ms, slot.time_ms)
                found.pending += slot.count
    if timer_log.end < check.log_end:
        after = _queue_offset_after(store, timer_log.last())
        log.error(
            "timer log shorter than known durable end=%d known=%d: read again from %d",
            timer_log.end,
            check.log_end,
            after,
        )
        found.queue_offset = min(after, checked_offset)
        found.done_upto = checked_offset
    begin, end = store.min_offset(TIMER_TOPIC, 0), store.max_offset(TIMER_TOPIC, 0)
    found.queue_offset = min(max(found.queue_offset, begin), end)
    return found


def oldest_ms(precision_ms: int, slots: int, now_ms: int) -> int:
    """The oldest slot that the wheel still tells from one of the future."""
    return (now_ms // precision_ms - (slots // 2 - BLANK_SLOTS)) * precision_ms


def first_unread_ms(store: Store, queue_offset: int) -> int:
    """When the first message was stored that is to enter the wheel yet: none that waits can be due
    before. NEVER_MS if there is none."""
    unit = store.unit(TIMER_TOPIC, 0, max(queue_offset, store.min_offset(TIMER_TOPIC, 0)))
    raw = None if unit is None else store.record_at(unit[0])
    return NEVER_MS if raw is None else record.decode(raw).store_ms


def _recover_log(
    store: Store, timer_log: TimerLog, wheel: TimerWheel, check: TimerCheck, found: Found
) -> None:
    """Find the log's end and repair slots on the way."""
    log_begin, log_end = store.min_log_offset, store.max_log_offset

    def is_good(position: int, unit: Unit) -> bool:
        # A message that a power loss took: others will stand in its place.
        if unit.log_offset < 0 or unit.size <= 0 or unit.log_offset + unit.size > log_end:
            return False
        if unit.prev >= position:
            return False
        if position >= check.log_end:  # may have been torn
            if unit.log_offset >= log_begin:
                raw = store.record_at(unit.log_offset)
                if raw is None or len(raw) != unit.size:
                    return False
            found.logged.add(unit.log_offset)
        slot_ms = unit.slot_ms
        if slot_ms >= found.read_ms:
            slot = wheel.get(slot_ms)
            if slot is None or slot.last < position:
                wheel.add(slot_ms, position, -1 if unit.magic & DELETE_BIT else 1)
        return True

    def pass_over(units: memoryview, begin: int, at: int) -> int:
        """Durable units that their slots know, by compiled code."""
        assert hot is not None
        return hot.check_timers(
            units,
            begin,
            at,
            min(check.log_end, begin + timer_log.unit_bytes),
            wheel.buffer,
            wheel.slots,
            wheel.precision_ms,
            found.read_ms,
            log_end,
        )

    hot = store.hot
    # A file more than was durable: RocketMQ's wheel may have missed slots that its log has.
    begin = 0 if wheel.is_blank else max(check.log_end - timer_log.file_bytes, 0)
    cut = timer_log.recover(begin, check.log_end, is_good, None if hot is None else pass_over)
    wheel.is_dirty = True  # it too may be in the system's memory only
    if cut:
        log.warning("timer log cut at=%d units=%d", timer_log.end, cut)


def _repair_bad_slots(timer_log: TimerLog, wheel: TimerWheel, read_ms: int) -> None:
    """Slots that point beyond the end of the log get the last unit that is really theirs."""
    bad = {slot.time_ms: slot for slot in wheel.live(read_ms) if slot.last >= timer_log.end}
    if not bad:
        return
    log.warning("timer slots repaired count=%d", len(bad))
    for time_ms in bad:
        wheel.put(time_ms, -1, -1, 0)
    begin = max(min(slot.first for slot in bad.values()), 0)
    for position, unit in timer_log.units(begin):
        slot_ms = unit.slot_ms // wheel.precision_ms * wheel.precision_ms
        if slot_ms in bad:
            wheel.add(slot_ms, position, -1 if unit.magic & DELETE_BIT else 1)


def _queue_offset_after(store: Store, last: Unit | None) -> int:
    """The unit of the timers' queue after the one that was logged last; the first if unknown."""
    raw = None if last is None else store.record_at(last.log_offset)
    if raw is None:
        return store.min_offset(TIMER_TOPIC, 0)
    return record.decode(raw).queue_offset + 1
