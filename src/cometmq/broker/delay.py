"""Messages for later, by level: RocketMQ's 18 delay levels.

Owns: the queues of SCHEDULE_TOPIC_XXXX, one for each level, how far each was delivered, and
delayOffset.json. One rule: within a level messages are delivered in their order, none before its
time; what was delivered and not yet noted is delivered again after a crash, never lost. So it is
noted when the delivered messages are durable, and not before.

A delayed message is stored in queue `level - 1` with REAL_TOPIC and REAL_QID; the tags code of its
unit is the time at which it is due (store/dispatch.py). When that comes a copy goes to the real
topic; its property text still names DELAY, REAL_TOPIC and REAL_QID, as RocketMQ leaves it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import names
from cometmq.broker.state import StateFile
from cometmq.config import BrokerConfig
from cometmq.errors import StoreError
from cometmq.message import NewMessage, StoredMessage
from cometmq.ports import NEVER_MS, Out
from cometmq.store.layout import delay_ms_by_level
from cometmq.wire import fastjson, properties
from cometmq.wire.bodies import DataVersion, data_version
from cometmq.wire.codes import TRANSACTION_MASK, SysFlag

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker
    from cometmq.store.ends import QueueEnds
    from cometmq.store.store import Store

log = logging.getLogger("cometmq.broker")

FILE = "config/delayOffset.json"
RETRY_MS = 100  # after the store refused a delivery
MOST_AT_ONCE = 500  # deliveries of one tick; the rest waits for the next, so that requests get in
SIMPLE = 8  # deliveries of the compiled path that are not dearer than one of the plain path
VERSION_STEP = 200  # deliveries per DataVersion step, as RocketMQ counts


class _Proof(msgspec.Struct, frozen=True):
    """Offsets that may be noted once the log is durable up to `upto`."""

    offsets: dict[int, int]
    upto: int


class Delay:
    """The delay levels of a broker."""

    def __init__(self, config: BrokerConfig, stored: dict[str, Any] | None, now_ms: int) -> None:
        self.delays_ms = delay_ms_by_level(config.delay_levels)
        self.version = DataVersion(timestamp=now_ms)
        self.offsets: dict[int, int] = {}
        """By level: the next unit to deliver."""
        self.delivered = 0
        self._due: dict[int, int] = {}  # by level, of the unit at its offset; only if there is one
        self._blocked: dict[int, int] = {}  # by level, until when, after a refusal
        self._used_levels: list[tuple[int, QueueEnds]] = []
        self._levels_of: object = None  # the set of queues that these were found in
        self._steps = 0
        self._delivered_upto = 0
        self._proof: _Proof | None = None
        if stored is not None:
            self._load(stored)
        self._safe = dict(self.offsets)  # what may be noted
        self.file = StateFile(FILE, self.encode, config.save_delays_ms)
        self.files = [self.file]

    def _load(self, stored: dict[str, Any]) -> None:
        self.version = data_version(stored.get("dataVersion"))
        for level, offset in (stored.get("offsetTable") or {}).items():
            try:
                self.offsets[int(level)] = int(offset)
            except (TypeError, ValueError):
                log.error("delay offset skipped level=%r offset=%r", level, offset)

    def clamp(self, store: Store) -> None:
        """After a crash a level may stand beyond what survived: what is sent now takes the numbers
        of the lost, and would be skipped."""
        for level, offset in self.offsets.items():
            most = store.max_offset(names.SCHEDULE_TOPIC, level - 1)
            if offset > most:
                log.warning("delay offset beyond the end level=%d %d -> %d", level, offset, most)
                self.offsets[level] = most

    def encode(self) -> bytes:
        return fastjson.dumps(
            {
                "dataVersion": msgspec.to_builtins(self.version),
                "offsetTable": dict(sorted(self._safe.items())),
            },
            bare_int_keys=True,
        )

    # ------------------------------------------------------------------------------------------ in

    @property
    def max_level(self) -> int:
        return len(self.delays_ms)

    def redirect(self, message: NewMessage) -> bool:
        """Send a message with a delay level to its level's queue instead; False if it has none."""
        level = level_of(message)
        kind = message.sys_flag & TRANSACTION_MASK
        if level <= 0 or kind not in (0, SysFlag.COMMIT) or not self.delays_ms:
            return False
        text = message.properties
        if level > self.max_level or "TIMER_" in text or f"DELAY\x01{level}\x02" not in text:
            level = min(level, self.max_level)
            table = properties.parse(text)
            for name in (
                properties.TIMER_DELAY_SEC,
                properties.TIMER_DELAY_MS,
                properties.TIMER_DELIVER_MS,
            ):
                table.pop(name, None)
            table[properties.DELAY] = str(level)
            text = properties.build(table)
        message.properties = with_real_place(text, message.topic, message.queue_id)
        message.topic = names.SCHEDULE_TOPIC
        message.queue_id = level - 1
        return True

    # ----------------------------------------------------------------------------------------- out

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        """When the next delivery is due."""
        if broker.is_stopping:
            return NEVER_MS
        soonest = NEVER_MS
        store = broker.store
        if self._proof is not None and store.flushed_offset >= self._proof.upto:
            return now_ms
        for level, ends in self._levels(store):
            due_ms = self._due.get(level)
            if due_ms is None:
                end = ends.max_offset
                if self.offsets.get(level, 0) >= end:
                    continue
                due_ms = self._look(broker, level, end, now_ms)
                if due_ms is None:
                    continue
            soonest = min(soonest, max(due_ms, self._blocked.get(level, 0)))
        return soonest

    def _levels(self, store: Store) -> list[tuple[int, QueueEnds]]:
        """The levels that ever had a message, and the bounds of their queues."""
        if self._levels_of is not store.queue_set:
            self._levels_of = store.queue_set
            self._used_levels = [
                (queue_id + 1, ends)
                for queue_id in store.queue_ids(names.SCHEDULE_TOPIC)
                if queue_id < self.max_level
                and (ends := store.queue_ends(names.SCHEDULE_TOPIC, queue_id)) is not None
            ]
        return self._used_levels

    def _look(self, broker: Broker, level: int, end: int, now_ms: int) -> int | None:
        """When the next unit of a level is due; None if there is none."""
        store, queue_id = broker.store, level - 1
        offset = self.offsets.get(level, 0)
        begin = store.min_offset(names.SCHEDULE_TOPIC, queue_id)
        if offset < begin:
            log.warning("delayed messages expired level=%d count=%d", level, begin - offset)
            offset = self.offsets[level] = begin
        if offset >= end:
            return None
        unit = store.unit(names.SCHEDULE_TOPIC, queue_id, offset)
        if unit is None:
            return None
        due_ms = unit[2]
        if due_ms > now_ms + self.delays_ms[level - 1]:
            due_ms = now_ms  # the clock was set back since it was stored
        self._due[level] = due_ms
        return due_ms

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Deliver what is due."""
        if broker.is_stopping:
            return
        left = MOST_AT_ONCE * SIMPLE
        for level, ends in self._levels(broker.store):
            if self._blocked.get(level, 0) > now_ms:
                continue
            self._blocked.pop(level, None)
            end = ends.max_offset
            while left > 0 and self.offsets.get(level, 0) < end:
                due_ms = self._due.get(level)
                if due_ms is None:
                    due_ms = self._look(broker, level, end, now_ms)
                if due_ms is None or due_ms > now_ms:
                    break
                count = self._deliver_simple(broker, level, left, now_ms)
                if not count and not self._deliver(broker, level, now_ms):
                    self._blocked[level] = now_ms + RETRY_MS
                    break
                left -= count or SIMPLE
        self._prove(broker.store, now_ms)

    def _prove(self, store: Store, now_ms: int) -> None:
        """Note what is durable by now; the rest waits for the log."""
        if self._proof is None and self.offsets != self._safe:
            self._proof = _Proof(dict(self.offsets), self._delivered_upto)
        proof = self._proof
        if proof is not None and store.flushed_offset >= proof.upto:
            self._safe, self._proof = proof.offsets, None
            self.file.changed(now_ms)

    def sync(self, store: Store) -> None:
        """At the end, when all messages are durable: note all. OSError if that fails."""
        if self.offsets != self._safe:
            self._safe, self._proof = dict(self.offsets), None
            store.files.replace(FILE, self.encode())

    def _deliver_simple(self, broker: Broker, level: int, most: int, now_ms: int) -> int:
        """Messages of a level by the compiled path, until one is not simple; returns how many."""
        offset, store = self.offsets.get(level, 0), broker.store
        count = store.deliver_level(names.SCHEDULE_TOPIC, level - 1, offset, most, now_ms)
        if count:
            self._delivered_upto = store.max_log_offset
            self.delivered += count
            self._step(level, count, now_ms)
        return count

    def _step(self, level: int, count: int, now_ms: int) -> None:
        """So many units of a level are done with."""
        self.offsets[level] = self.offsets.get(level, 0) + count
        self._due.pop(level, None)
        for _ in range((self._steps + count) // VERSION_STEP - self._steps // VERSION_STEP):
            self.version = self.version.next(now_ms)
        self._steps += count

    def _deliver(self, broker: Broker, level: int, now_ms: int) -> bool:
        """The message at a level's offset to its real topic; False if the store refused."""
        offset = self.offsets.get(level, 0)
        unit = broker.store.unit(names.SCHEDULE_TOPIC, level - 1, offset)
        stored = None if unit is None else broker.store.message_at(unit[0])
        if stored is None:
            log.error("delayed message can't be read level=%d offset=%d: skipped", level, offset)
        else:
            message = real_message(stored)
            if message is None or message.topic == names.HALF_TOPIC:
                log.error("delayed message without a real topic level=%d offset=%d", level, offset)
            else:
                try:
                    self._delivered_upto = broker.put(message, now_ms, is_due=True).end_offset
                except StoreError as error:
                    log.warning("delivery refused level=%d offset=%d: %s", level, offset, error)
                    return False
                self.delivered += 1
                if broker.teacher is not None:
                    broker.teacher.delivered(message)
                    broker.store.warm_read(names.SCHEDULE_TOPIC, level - 1, offset)
        self._step(level, 1, now_ms)
        return True


def with_real_place(text: str, topic: str, queue_id: int) -> str:
    """Properties that say where their message is to go in the end."""
    if (
        properties.REAL_TOPIC in text
        or properties.REAL_QUEUE_ID in text
        or not text.endswith("\x02")
    ):
        table = properties.parse(text)
        table.pop(properties.REAL_TOPIC, None)
        table.pop(properties.REAL_QUEUE_ID, None)
        text = properties.build(table)
    return f"{text}REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}\x02"


def level_of(message: NewMessage) -> int:
    """The delay level that a message asks for; 0 if none."""
    if properties.DELAY not in message.properties:
        return 0
    return properties.number(properties.get(message.properties, properties.DELAY)) or 0


def real_message(stored: StoredMessage) -> NewMessage | None:
    """A message that was kept elsewhere, on its way to REAL_TOPIC and REAL_QID; None if it names
    no place that can be."""
    topic = properties.get(stored.properties, properties.REAL_TOPIC) or ""
    queue_text = properties.get(stored.properties, properties.REAL_QUEUE_ID) or ""
    if names.topic_problem(topic) is not None or not queue_text.isdecimal():
        return None
    queue_id = int(queue_text)
    return None if queue_id > 0xFFFF else renewed(stored, topic, queue_id)


def renewed(stored: StoredMessage, topic: str, queue_id: int) -> NewMessage:
    """The same message, to be stored once more, in another queue."""
    return NewMessage(
        topic=topic,
        queue_id=queue_id,
        body=stored.body,
        properties=stored.properties,
        flag=stored.flag,
        sys_flag=stored.sys_flag,
        born_ms=stored.born_ms,
        born_host=stored.born_host,
        store_host=stored.store_host,
        reconsume_times=stored.reconsume_times,
        prepared_offset=stored.prepared_offset,
    )
