"""Messages for any time: RocketMQ's timer wheel.

Owns: the queue rmq_sys_wheel_timer, the wheel and its log, and how far they were read. One rule: a
message is delivered in its second or later, never before its time, and in a second in the order of
sending; what was delivered and not yet noted is delivered again after a crash, never lost.

    send      TIMER_DELAY_SEC, TIMER_DELAY_MS or TIMER_DELIVER_MS -> slot: the time floored to the
              precision, an exact multiple one less. Stored in the timers' queue with TIMER_OUT_MS
    enter     the queue is read in order: a unit in the timer log, its slot points at it; beyond the
              window of the wheel into a nearer slot, to come back from there (rolled)
    leave     slot T is read once the clock passes T + precision: a copy to the real topic. Units
              that delete (recall) take others of their slot with them; so whoever is behind, as
              after a start, first reads the queue to its end

Every second wheel and log are synced; the checkpoint follows when that is done and the messages
that they stand for, and those delivered before, are durable themselves.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

import msgspec

from cometmq.broker import names, timed
from cometmq.broker.delay import SIMPLE
from cometmq.broker.state import StateFile
from cometmq.broker.timer_check import (
    BLANK_SLOTS,
    CHECK_FILE,
    TimerCheck,
    first_unread_ms,
    load_check,
    oldest_ms,
    recover,
)
from cometmq.broker.timer_counts import METRICS_FILE, TimerCounts
from cometmq.config import BrokerConfig
from cometmq.errors import MessageIllegal, StoreError
from cometmq.message import NewMessage
from cometmq.ports import NEVER_MS, Flush, Out
from cometmq.store.state_files import load_state
from cometmq.store.store import Store
from cometmq.store.timer_log import DEFAULT_BIT, DELETE_BIT, NO_UNIT, ROLL_BIT, TimerLog, Unit
from cometmq.store.timer_wheel import WHEEL_SLOTS, Slot, TimerWheel
from cometmq.wire import properties
from cometmq.wire.codes import TRANSACTION_MASK, SysFlag
from cometmq.wire.hashing import java_hash

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

FLUSH = "timers"
RETRY_MS = 100  # after the store refused a delivery
DISK_RETRY_MS = 1_000  # after the disk refused a file
CLEAN_MS = 30_000
# In one tick; the rest waits for the next, so that requests get in. Of the compiled path SIMPLE
# times as many are not dearer.
MOST_ENTERED = 500
MOST_DELIVERED = 300
MOST_READ = 10_000  # units of a slot
MOST_SLOTS = 5_000  # slots without anything

_NOT_TIMED = (int(SysFlag.PREPARED), int(SysFlag.ROLLBACK))
_NEVER_ENTERED = 2**63 - 1  # TIMER_ENQUEUE_MS of a message that was late for its slot


class _Proof(msgspec.Struct):
    """What the flush under way will prove, once the log has come to `upto` as well."""

    check: TimerCheck
    upto: int
    is_synced: bool = False


class _Leaving:
    """A slot on its way out: first its chain is read, back to front, then it is delivered."""

    __slots__ = ("at", "deleted", "positions", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.at = slot.last
        self.positions = array("q")
        self.deleted: set[str] = set()


class Timers:
    """The timers of a broker."""

    def __init__(
        self, config: BrokerConfig, store: Store, now_ms: int, slots: int = WHEEL_SLOTS
    ) -> None:
        self.is_enabled = config.is_timer_enabled
        self.files: list[StateFile] = []
        self.pending = 0
        self.delivered = 0
        self.recalled = 0
        self.lost = 0
        self.read_ms = 0
        self.queue_offset = 0
        self._precision_ms = config.timer_precision_ms
        self._store = store
        self._slots = slots
        most = slots // 2 - BLANK_SLOTS
        window = config.timer_window_slots
        self._window = window if 2 <= window <= most else most
        self._flush_interval_ms = config.timer_flush_interval_ms
        self._wheel: TimerWheel | None = None
        self._log = TimerLog(store.files, config.timer_log_file_bytes)
        self._leaving: _Leaving | None = None
        self._last_slot_ms = -1
        self._safe_from = 0  # the log must be durable up to here: delivered, or to be delivered
        self._blocked_ms = 0
        self._is_refused = False  # and said so
        self._enter_upto = 0  # no other slot is read before the queue up to here has entered
        self._clear_ms = 0  # what is unread has nothing to do with slots before this
        self._flush_ms = 0
        self._clean_ms = now_ms + CLEAN_MS
        self._proof: _Proof | None = None
        self._turn = 0
        self.counts = TimerCounts(load_state(store.files, METRICS_FILE), now_ms)
        self._check = TimerCheck()
        self._logged: set[int] = set()
        self._done_upto = self._done_ms = 0
        if self.is_enabled:
            self._start(store, now_ms)

    def _start(self, store: Store, now_ms: int) -> None:
        self._check = load_check(store.files)
        self._log.load()
        if not self._log.is_empty:
            self._wheel = TimerWheel(store.files, self._precision_ms, self._slots)
        found = recover(store, self._log, self._wheel, self._check, now_ms)
        self.queue_offset = found.queue_offset
        self.read_ms = found.read_ms
        if self._wheel is None:
            least_ms = max(found.read_ms, oldest_ms(self._precision_ms, self._slots, now_ms))
            unread_ms = max(first_unread_ms(store, self.queue_offset), least_ms)
            self.read_ms = self._floor(min(unread_ms, now_ms))
        self.pending = found.pending
        self._last_slot_ms = found.last_slot_ms
        if self.unread(store):
            self._logged = found.logged
            self._enter_upto = store.max_offset(names.TIMER_TOPIC, 0)
        self._done_upto, self._done_ms = found.done_upto, found.read_ms
        self._check_file = StateFile(CHECK_FILE, lambda: self._check.file())
        self.files = [self._check_file, self.counts.file]

    def _floor(self, ms: int) -> int:
        return ms // self._precision_ms * self._precision_ms

    # ------------------------------------------------------------------------------------ the send

    def _is_crowded(self, slot_ms: int, limit: int) -> bool:
        """Above the limit some are refused, the more the closer to twice of it, then all."""
        slot = None if self._wheel is None else self._wheel.get(slot_ms)
        if slot is None or slot.count <= limit:
            return False
        self._turn = (self._turn + 617) % 1000  # a core draws no lots: each of 1000 once
        return self._turn < 1000 * (slot.count - limit) // limit

    def redirect(self, config: BrokerConfig, message: NewMessage, now_ms: int) -> bool:
        """Send a timed message to the timers' queue instead; False if it is not one."""
        if message.sys_flag & TRANSACTION_MASK in _NOT_TIMED:
            return False
        slot_ms = timed.slot_for(config, message.topic, message.properties, now_ms)
        if slot_ms is None:
            return False
        if self._is_crowded(slot_ms, config.timer_most_per_slot):
            raise StoreError(
                f"{config.timer_most_per_slot} messages and more are to be delivered at {slot_ms} "
                "already (timerCongestNumEachSlot)"
            )
        timed.keep(message, slot_ms)
        return True

    # ------------------------------------------------------------------------------------ the turn

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        """When something is to enter, to leave or to be flushed."""
        if not self.is_enabled or broker.is_stopping:
            return NEVER_MS
        soonest = NEVER_MS
        if self._proof is None and self._is_unproven:
            soonest = self._flush_ms
        if self.queue_offset < broker.store.max_offset(names.TIMER_TOPIC, 0) or self._leaving:
            return min(soonest, max(self._blocked_ms, now_ms))
        if self.read_ms <= self._last_slot_ms and self.queue_offset >= self._enter_upto:
            soonest = min(soonest, max(self._blocked_ms, self.read_ms + self._precision_ms))
        return soonest

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        if not self.is_enabled:
            return
        if not broker.is_stopping and self._blocked_ms <= now_ms:
            try:
                self._leave(broker, now_ms)
                self._enter(broker, now_ms)
            except (OSError, StoreError) as error:
                log.error("timers wait for the disk: %s", error)
                self._blocked_ms = now_ms + DISK_RETRY_MS
        if now_ms >= self._clean_ms:
            self._clean_ms = now_ms + CLEAN_MS
            removed = self._log.remove_expired(broker.store.min_log_offset)
            if removed:
                log.info("timer log files removed count=%d", removed)
        self._take_flush(broker, now_ms, out)

    # ------------------------------------------------------------------------------------------ in

    def _enter(self, broker: Broker, now_ms: int) -> None:
        """Read the timers' queue on."""
        store = broker.store
        begin, end = store.min_offset(names.TIMER_TOPIC, 0), store.max_offset(names.TIMER_TOPIC, 0)
        if self.queue_offset < begin:
            log.error("timed messages expired unread count=%d", begin - self.queue_offset)
            self.lost += begin - self.queue_offset
            self.queue_offset = begin
        left = MOST_ENTERED * SIMPLE
        while left > 0 and self.queue_offset < end:
            count = self._enter_simple(store, min(left, end - self.queue_offset), now_ms)
            left -= count or SIMPLE
            if not count:
                unit = store.unit(names.TIMER_TOPIC, 0, self.queue_offset)
                if unit is None or not self._enter_one(broker, unit[0], unit[1], now_ms):
                    return
                store.warm_read(names.TIMER_TOPIC, 0, self.queue_offset)
                count = 1
            self.queue_offset += count
            if self._logged and self.queue_offset >= end:
                self._logged = set()

    def _enter_simple(self, store: Store, most: int, now_ms: int) -> int:
        """Messages from the queue into their slots by the compiled path, until one is not simple;
        returns how many."""
        if store.hot is None or self._wheel is None:
            return 0
        if self._logged or self.queue_offset < self._done_upto:
            return 0
        first_ms = self.read_ms + (0 if self._leaving is None else self._precision_ms)
        done = store.enter_timers(
            names.TIMER_TOPIC,
            self.queue_offset,
            most,
            now_ms,
            self._wheel,
            self._log,
            first_ms=first_ms,
            write_ms=max(self._floor(now_ms), first_ms),
            window_ms=self._window * self._precision_ms,
        )
        if done.count:
            self._safe_from = max(self._safe_from, done.upto)
            self._last_slot_ms = max(self._last_slot_ms, done.last_ms)
            self.pending += done.count
            for topic, count in done.topics:
                self.counts.add(topic.decode("utf-8"), 1, now_ms, count)
        return done.count

    def _enter_one(self, broker: Broker, log_offset: int, size: int, now_ms: int) -> bool:
        """One message from the queue into its slot, or on if it is late; False if not yet."""
        if log_offset in self._logged:
            return True
        text = broker.store.properties_at(log_offset)
        slot_ms = (
            None
            if text is None
            else properties.number(properties.get(text, properties.TIMER_OUT_MS))
        )
        if text is None or slot_ms is None:
            log.error("not a timed message queue_offset=%d: skipped", self.queue_offset)
            return True
        if self.queue_offset < self._done_upto and slot_ms < self._done_ms:
            return True
        is_deleting = properties.get(text, properties.TIMER_DELETES) is not None
        # The first slot that is not being read, though its time may be over: who deletes and who is
        # deleted must meet, and what was sent before and stands in a slot goes first.
        first_ms = self.read_ms + (0 if self._leaving is None else self._precision_ms)
        if slot_ms < first_ms:
            if self._leaving is None and not self._is_behind(now_ms):
                if is_deleting:
                    return True
                return self._deliver(broker, log_offset, size, _NEVER_ENTERED, now_ms)
            slot_ms = first_ms
        write_ms = max(self._floor(now_ms), first_ms)
        magic = DEFAULT_BIT | (DELETE_BIT if is_deleting else 0)
        window_ms = self._window * self._precision_ms
        beyond_ms = slot_ms - write_ms - window_ms
        if beyond_ms >= 0:  # a little beyond: halfway, so that the rest is not a short one
            magic |= ROLL_BIT
            is_little = beyond_ms < self._window // 3 * self._precision_ms
            slots = self._window // 2 if is_little else self._window
            slot_ms = write_ms + slots * self._precision_ms
        write_ms = min(write_ms, slot_ms)
        wheel = self._need_wheel()
        slot = wheel.get(slot_ms)
        topic = properties.get(text, properties.REAL_TOPIC) or ""
        unit = Unit(
            prev=NO_UNIT if slot is None else slot.last,
            magic=magic,
            write_ms=write_ms,
            delay_ms=slot_ms - write_ms,
            log_offset=log_offset,
            size=size,
            topic_hash=java_hash(topic),
        )
        count = -1 if is_deleting else 1
        wheel.add_to(slot, slot_ms, self._log.append(unit), count)
        # A unit that outlives its message would speak for whatever takes its place.
        self._safe_from = max(self._safe_from, log_offset + size)
        self._last_slot_ms = max(self._last_slot_ms, slot_ms)
        self.pending += count
        self.counts.add(topic, count, now_ms)
        return True

    def _need_wheel(self) -> TimerWheel:
        if self._wheel is None:
            self._wheel = TimerWheel(self._store.files, self._precision_ms, self._slots)
        return self._wheel

    # ----------------------------------------------------------------------------------------- out

    def _is_behind(self, now_ms: int) -> bool:
        """Whether a slot that may be read was not yet."""
        return self.read_ms <= self._last_slot_ms and self.read_ms < self._floor(now_ms)

    def _may_pass(self, store: Store, now_ms: int) -> bool:
        """Whether the next slot, empty or not, is to be left behind: its time is over, and nothing
        unread is for it. After a pause (a full disk) messages of it and recalls may be unread, or
        not even in the queue; what is stored later than a slot's time never is for it. So the queue
        is read once up to what is stored by now, which is enough for all slots before now."""
        if self.queue_offset < self._enter_upto:
            return False
        upto_ms = self._floor(now_ms)
        end = store.next_queue_offset(names.TIMER_TOPIC, 0)
        if self._last_slot_ms < self.read_ms < upto_ms:
            # The wheel is empty, and nothing that is unread can be due before it was stored.
            unread_ms = first_unread_ms(store, self.queue_offset)
            if unread_ms == NEVER_MS and self.queue_offset < end:
                return False  # it is on its way into the queue
            self.read_ms = max(self.read_ms, self._floor(min(unread_ms, now_ms)))
        if self.read_ms >= upto_ms:
            return False
        if not self.read_ms < self._clear_ms <= upto_ms:
            self._clear_ms = upto_ms
            self._enter_upto = max(self._enter_upto, end)
        return self.queue_offset >= self._enter_upto

    def _leave(self, broker: Broker, now_ms: int) -> None:
        """Deliver what is due."""
        slots, units, left = MOST_SLOTS, MOST_READ, MOST_DELIVERED * SIMPLE
        while slots and units and left > 0:
            leaving = self._leaving
            if leaving is None:
                if not self._may_pass(broker.store, now_ms):
                    return
                slots -= 1
                slot = None if self._wheel is None else self._wheel.get(self.read_ms)
                if slot is None:
                    self.read_ms += self._precision_ms
                    continue
                leaving = self._leaving = _Leaving(slot)
            while leaving.at >= 0 and units:
                units -= self._read_simple(broker.store, leaving, units)
                if leaving.at >= 0 and units:
                    units -= 1
                    self._read_unit(broker, leaving, now_ms)
            while leaving.positions and leaving.at < 0 and left > 0:
                count = self._leave_simple(broker, leaving, left, now_ms)
                left -= count or SIMPLE
                if not count and not self._leave_one(broker, leaving, now_ms):
                    return
                del leaving.positions[-(count or 1) :]
            if leaving.at < 0 and not leaving.positions:
                self._leaving = None
                self.read_ms += self._precision_ms
                self.pending -= leaving.slot.count

    def _read_simple(self, store: Store, leaving: _Leaving, most: int) -> int:
        """Steps back in a slot's chain by the compiled path, up to one that is not simple; returns
        how many."""
        found = self._log.file_of(leaving.at)
        if store.hot is None or found is None:
            return 0
        before = len(leaving.positions)
        leaving.at = store.hot.timer_chain(*found, leaving.at, most, leaving.positions)
        return len(leaving.positions) - before

    def _leave_simple(self, broker: Broker, leaving: _Leaving, most: int, now_ms: int) -> int:
        """Messages of a slot to their real topics by the compiled path, until one is not simple;
        returns how many."""
        if broker.store.hot is None or leaving.deleted:
            return 0
        done = broker.store.deliver_timed(self._log, leaving.positions, most, now_ms)
        if done.count:
            self._is_refused = False
            self._safe_from = max(self._safe_from, done.upto)
            self.delivered += done.count
            for topic, count in done.topics:
                self.counts.add(topic.decode("utf-8"), -1, now_ms, count)
        return done.count

    def _read_unit(self, broker: Broker, leaving: _Leaving, now_ms: int) -> None:
        """One step back in a slot's chain."""
        unit = self._log.unit(leaving.at)
        if unit is None:
            log.error("timer unit missing slot=%d at=%d", leaving.slot.time_ms, leaving.at)
            leaving.at = NO_UNIT
            return
        if unit.magic & DELETE_BIT and not unit.magic & ROLL_BIT:
            text = broker.store.properties_at(unit.log_offset) or ""
            key = properties.get(text, properties.TIMER_DELETES)
            if key is not None:
                topic = properties.get(text, properties.REAL_TOPIC) or ""
                # RocketMQ 5.5.0 writes the unique key alone, others the topic before it.
                leaving.deleted.update((key, topic + key))
                self.counts.add(topic, 1, now_ms)
        else:
            leaving.positions.append(leaving.at)
        leaving.at = unit.prev if unit.prev < leaving.at else NO_UNIT

    def _leave_one(self, broker: Broker, leaving: _Leaving, now_ms: int) -> bool:
        unit = self._log.unit(leaving.positions[-1])
        assert unit is not None, leaving.positions[-1]
        if leaving.deleted:
            text = broker.store.properties_at(unit.log_offset) or ""
            topic = properties.get(text, properties.REAL_TOPIC) or ""
            if topic + (properties.get(text, properties.UNIQUE_KEY) or "") in leaving.deleted:
                self.recalled += 1
                self.counts.add(topic, -1, now_ms)
                return True
        is_rolled = bool(unit.magic & ROLL_BIT)
        return self._deliver(
            broker, unit.log_offset, unit.size, unit.write_ms, now_ms, is_rolled=is_rolled
        )

    def _deliver(
        self,
        broker: Broker,
        log_offset: int,
        size: int,
        entered_ms: int,
        now_ms: int,
        *,
        is_rolled: bool = False,
    ) -> bool:
        """A message to its real topic, or once more to the timers' queue; False if the store
        refused for now."""
        stored = broker.store.message_at(log_offset)
        if stored is None or stored.size != size:
            log.error("timed message can't be read log_offset=%d: lost", log_offset)
            self.lost += 1
            return True
        message = timed.leaving(stored, entered_ms, now_ms, is_rolled=is_rolled)
        if message is None:
            log.error("timed message without a real topic log_offset=%d: dropped", log_offset)
            self.lost += 1
            return True
        try:
            try:
                done = broker.put(message, now_ms, is_due=True)
            except MessageIllegal:  # what we add may be too much for it
                message.properties = stored.properties
                done = broker.put(message, now_ms, is_due=True)
        except MessageIllegal as error:
            log.error("timed message dropped log_offset=%d: %s", log_offset, error)
            self.lost += 1
            return True
        except StoreError as error:
            if not self._is_refused:
                log.warning("delivery of timed messages refused: %s", error)
            self._is_refused = True
            self._blocked_ms = now_ms + RETRY_MS
            return False
        self._is_refused = False
        self._safe_from = max(self._safe_from, done.end_offset)
        if broker.teacher is not None:
            broker.teacher.delivered(message)
            broker.store.warm_log(log_offset)
        if is_rolled:
            self._enter_upto = done.queue_offset + 1
        self.delivered += not is_rolled
        if entered_ms != _NEVER_ENTERED:
            topic = message.topic
            if is_rolled:
                topic = properties.get(stored.properties, properties.REAL_TOPIC) or ""
            self.counts.add(topic, -1, now_ms)
        return True

    # --------------------------------------------------------------------------------------- flush

    @property
    def _is_unproven(self) -> bool:
        check = self._check
        return (
            self.queue_offset != check.queue_offset
            or self._log.is_dirty
            or check.read_ms < min(self.read_ms, self._last_slot_ms + 1)
            or (self._wheel is not None and self._wheel.is_dirty)
        )

    def _take_flush(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Ask for wheel and log to be synced, once a second if there is anything new."""
        if not 0 < self._flush_ms - now_ms <= self._flush_interval_ms and (
            self._is_unproven or self._proof is not None
        ):
            self._flush_ms = now_ms + self._flush_interval_ms
            if self._proof is None:
                check = self._next_check(now_ms)
                self._proof = _Proof(check, self._safe_from)
                targets = self._log.take_dirty()
                if self._wheel is not None and self._wheel.is_dirty:
                    self._wheel.is_dirty = False
                    targets.append(self._wheel.target())
                if targets:
                    out.append(Flush(FLUSH, targets))
                else:
                    self._proof.is_synced = True
            if broker.store.flushed_offset < self._proof.upto:
                broker.store.hurry_log(now_ms)
                broker.is_plan_old = True
        self.prove(broker.store.flushed_offset, now_ms)

    def _next_check(self, now_ms: int) -> TimerCheck:
        """What is true now, and is to be written once it is durable. As long as messages are read
        again that entered before the last start, their units must count as new: by them the next
        start would know what it need not enter once more."""
        return TimerCheck(
            self.read_ms,
            self._check.log_end if self._logged else self._log.end,
            self.queue_offset,
            self.queue_offset,
            self._check.version.next(now_ms),
        )

    def flushed(self, kind: str, flushed_offset: int, now_ms: int) -> None:
        """Some flush is done; what waited for it may be noted now."""
        if kind == FLUSH and self._proof is not None:
            self._proof.is_synced = True
        self.prove(flushed_offset, now_ms)

    def prove(self, flushed_offset: int, now_ms: int) -> None:
        proof = self._proof
        if proof is not None and proof.is_synced and flushed_offset >= proof.upto:
            self._proof = None
            self._check = proof.check
            self._check_file.changed(now_ms)

    def sync(self) -> None:
        """At the end, when all messages are durable: make the rest so. OSError if that fails."""
        if not self.is_enabled:
            return
        for target in self._log.take_dirty():
            target.sync()
        if self._wheel is not None:
            self._wheel.target().sync()
        if self._is_unproven or not self._check_file.is_clean or self._proof is not None:
            self._check = self._next_check(self._check.version.timestamp)
            self._store.files.replace(CHECK_FILE, self._check.file())

    def close(self) -> None:
        self._log.close()
        if self._wheel is not None:
            self._wheel.close()

    # ----------------------------------------------------------------------------------- to look at

    def check_point(self) -> bytes:
        return self._check.encode()

    def lag_ms(self, now_ms: int) -> int:
        """How long ago the oldest slot that waits should have been read."""
        return self._floor(now_ms) - self.read_ms if self._is_behind(now_ms) else 0

    def done_ms(self, store: Store, now_ms: int) -> int:
        """All messages for a time up to this one, as far as they are in the timers' queue, were
        delivered; none that is stored from now on will be for that time and not be due at once."""
        is_late = self._leaving is not None or self._is_behind(now_ms)
        found = self.read_ms if is_late else self._floor(now_ms)
        if self.unread(store):
            stored_ms = store.store_ms_at(names.TIMER_TOPIC, 0, self.queue_offset)
            found = min(found, 0 if stored_ms is None else stored_ms - 1)
        return found

    def done_at(self, due_ms: int) -> int:
        """When `done_ms` comes to a time, if nothing holds the timers up."""
        return -(-due_ms // self._precision_ms) * self._precision_ms

    def unread(self, store: Store) -> int:
        """How many messages are to enter the wheel yet."""
        return max(store.max_offset(names.TIMER_TOPIC, 0) - self.queue_offset, 0)
