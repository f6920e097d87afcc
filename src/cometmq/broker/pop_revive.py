"""Popped messages that nobody acknowledged: back to their group.

Owns: the reading of the revive topic. One rule: a checkpoint is done with when each of its messages
was acknowledged or is stored once more; only then, and when that is durable, does the reader's
offset pass it. What was not noted is done again after a crash, so a message may come twice, never
not at all.

    read      checkpoints are kept, acks set bits in them. Both come in by the timers, a checkpoint
              a second before its acks
    prove     an ack that was answered is in this topic when (1) all that was stored up to some
              moment is in its queue, (2) the timers have taken it in and have delivered up to the
              time of the checkpoint, (3) what they delivered was read. Only then a checkpoint is
              judged
    judge     in the order of the queue: each open message to the group's retry topic, one try more;
              to its dead letters when it has had all its tries

The reader's own offset is that of RocketMQ: the last that is done, so -1 stands before the first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from cometmq.broker import names, pop_records, retry
from cometmq.broker.delay import renewed
from cometmq.broker.pop_receipts import normal_topic, retry_v1, retry_v2
from cometmq.broker.pop_records import Ack, Checkpoint, Key
from cometmq.errors import BodyError, MessageIllegal, RequestRefused, StoreError
from cometmq.message import NewMessage, StoredMessage
from cometmq.ports import NEVER_MS, Out
from cometmq.wire import properties, record
from cometmq.wire.bodies import GroupConfig, TopicConfig
from cometmq.wire.codes import Perm

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

RETRY_MS = 1_000  # after the store refused
AGAIN_MS = 100  # while the timers are behind
MOST_READ = (
    500  # records of one tick, and as many messages; the rest waits, so that requests get in
)
MOST_REVIVED = 200
MOST_PENDING = 200_000  # checkpoints in memory; no more are read until some are done
FAR_MS = 3_000
MOST_EARLY = 10_000  # acks that came before their checkpoint
_READ_WRITE = int(Perm.READ | Perm.WRITE)


class _Waiting(msgspec.Struct, gc=False):
    """A checkpoint, and where it stands in its revive queue."""

    at: int
    point: Checkpoint


class _Queue:
    """One queue of the revive topic."""

    def __init__(self, queue_id: int, next_offset: int) -> None:
        self.queue_id = queue_id
        self.next = next_offset
        self.noted = next_offset - 1
        self.waiting: dict[Key, _Waiting] = {}

    @property
    def first(self) -> _Waiting | None:
        return next(iter(self.waiting.values()), None)

    @property
    def done(self) -> int:
        """The last record that is done with."""
        first = self.first
        return (self.next if first is None else first.at) - 1


class _Proof(msgspec.Struct):
    """First: all before `upto` was stored by `at_ms`. Then: acks due before `at_ms` are before
    `upto`. Each holds once the queues have come to `upto`."""

    at_ms: int
    upto: int
    is_second: bool = False


class Revive:
    """Reads the revive topic of a broker."""

    def __init__(self) -> None:
        self.revived = self.dead = self.expired = self.unreadable = self.put_again = 0
        self.acks_read = self.checkpoints_read = self.orphans = 0
        self._queues: list[_Queue] = []
        self._proof: _Proof | None = None
        self._proven_ms = 0
        self._fed_upto = 1  # there may be something from before
        self._seen_upto = 0
        self._first_ms = NEVER_MS  # of the checkpoints that wait
        self._newest_ms = 0
        self._blocked_ms = 0
        self._again_ms = 0  # no new proof before: the last one proved nothing
        self._is_refused = False
        self._early: dict[Key, set[int]] = {}
        self.pending = 0

    def fed(self, end_offset: int) -> None:
        """Something was stored for the revive topic."""
        self._fed_upto = max(self._fed_upto, end_offset)

    # ----------------------------------------------------------------------------------- the turn

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        if broker.is_stopping or not broker.timers.is_enabled:
            return NEVER_MS
        dispatched = broker.store.dispatched_offset
        soonest = NEVER_MS
        if self._seen_upto < self._fed_upto <= dispatched:
            soonest = now_ms
        elif self.pending:
            if self._proven_ms >= self._first_ms:
                soonest = now_ms
            elif self._proof is not None:
                soonest = now_ms if dispatched >= self._proof.upto else NEVER_MS
            else:
                soonest = max(broker.timers.done_at(self._first_ms), self._again_ms)
        return max(soonest, self._blocked_ms) if soonest < NEVER_MS else NEVER_MS

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        if broker.is_stopping or not broker.timers.is_enabled or self._blocked_ms > now_ms:
            return
        self._blocked_ms = 0
        if not self._queues:
            self._open(broker)
        if self._seen_upto >= self._fed_upto or self._read(broker):
            self._prove(broker, now_ms)
        try:
            self._judge(broker, now_ms, out)
            self._is_refused = False
        except StoreError as error:
            if not self._is_refused:
                log.warning("messages can't be revived for now: %s", error)
            self._is_refused = True
            self._blocked_ms = now_ms + RETRY_MS
        self._note(broker, now_ms)

    def _open(self, broker: Broker) -> None:
        topic = names.revive_topic(broker.config.cluster)
        for queue_id in range(revive_queue_count(broker)):
            noted = broker.offsets.get(topic, names.REVIVE_GROUP, queue_id)
            self._queues.append(_Queue(queue_id, 0 if noted is None else noted + 1))

    # --------------------------------------------------------------------------------------- read

    def _read(self, broker: Broker) -> bool:
        """Read on; whether all that can be seen was read."""
        store, topic = broker.store, names.revive_topic(broker.config.cluster)
        dispatched = store.dispatched_offset
        left = MOST_READ
        for queue in self._queues:
            begin, end = (
                store.min_offset(topic, queue.queue_id),
                store.max_offset(topic, queue.queue_id),
            )
            if queue.next < begin:
                log.error("revive records expired unread count=%d", begin - queue.next)
                self.expired += begin - queue.next
                queue.next = begin
            while queue.next < end:
                if not left or self._is_full():
                    return False
                left -= 1
                self._read_one(broker, topic, queue)
                queue.next += 1
        self._seen_upto = dispatched
        return True

    def _is_full(self) -> bool:
        """Whether there are so many checkpoints that some must be judged before more are read. Then
        RocketMQ's rule has to do: the acks of a checkpoint are not far behind it."""
        if self.pending < MOST_PENDING or self._newest_ms - FAR_MS < self._first_ms:
            return False
        self._proven_ms = max(self._proven_ms, self._newest_ms - FAR_MS)
        return True

    def _read_one(self, broker: Broker, topic: str, queue: _Queue) -> None:
        unit = broker.store.unit(topic, queue.queue_id, queue.next)
        raw = None if unit is None else broker.store.record_at(unit[0])
        try:
            found = (
                None if raw is None else pop_records.read(record.decode(raw), broker.config.name)
            )
        except BodyError as error:
            log.error("revive record skipped queue=%d at=%d: %s", queue.queue_id, queue.next, error)
            found = None
        if isinstance(found, Checkpoint):
            self._keep(queue, found)
        elif isinstance(found, Ack):
            self._match(queue, found)
        else:
            self.unreadable += 1

    def _keep(self, queue: _Queue, point: Checkpoint) -> None:
        self.checkpoints_read += 1
        if point.key in queue.waiting:
            return  # the timers delivered it twice: a crash came between
        for offset in self._early.pop(point.key, ()):
            point.ack(offset)
        queue.waiting[point.key] = _Waiting(queue.next, point)
        self.pending += 1
        self._first_ms = min(self._first_ms, point.revive_ms)
        self._newest_ms = max(self._newest_ms, point.revive_ms)

    def _match(self, queue: _Queue, ack: Ack) -> None:
        self.acks_read += 1
        found = queue.waiting.get(ack.key)
        if found is not None:
            for offset in ack.offsets:
                found.point.ack(offset)
            return
        # Too late, or before its checkpoint (which waits in a timer that is behind).
        self.orphans += 1
        self._early.setdefault(ack.key, set()).update(ack.offsets[: pop_records.MOST_OFFSETS])
        if len(self._early) > MOST_EARLY:
            del self._early[next(iter(self._early))]

    # -------------------------------------------------------------------------------------- prove

    def _prove(self, broker: Broker, now_ms: int) -> None:
        """All that can be seen was read: what does that say?"""
        if not self.pending:
            self._proof = None
            return
        store = broker.store
        proof = self._proof
        if proof is not None and store.dispatched_offset >= proof.upto:
            if proof.is_second:
                self._proven_ms = max(self._proven_ms, proof.at_ms)
                proof = self._proof = None
                if self._proven_ms < self._first_ms:  # the timers are behind
                    self._again_ms = now_ms + AGAIN_MS
            else:
                at_ms = min(broker.timers.done_ms(store, now_ms), proof.at_ms)
                proof = self._proof = _Proof(at_ms, store.max_log_offset, is_second=True)
        is_due = max(broker.timers.done_at(self._first_ms), self._again_ms) <= now_ms
        if self._proof is None and is_due and self._proven_ms < self._first_ms:
            self._proof = _Proof(now_ms, store.max_log_offset)

    # -------------------------------------------------------------------------------------- judge

    def _judge(self, broker: Broker, now_ms: int, out: Out) -> None:
        left = MOST_REVIVED
        try:
            for queue in self._queues:
                while (first := queue.first) is not None and left > 0:
                    if first.point.revive_ms > self._proven_ms:
                        break
                    left -= self._finish(broker, queue.queue_id, first.point, now_ms, out)
                    del queue.waiting[first.point.key]
                    self.pending -= 1
        finally:
            self._first_ms = min(
                (one.first.point.revive_ms for one in self._queues if one.first is not None),
                default=NEVER_MS,
            )

    def _finish(
        self, broker: Broker, queue_id: int, point: Checkpoint, now_ms: int, out: Out
    ) -> int:
        """All that is open of a pop goes back; how much work that was."""
        group = broker.groups.get(point.group)
        topic = broker.topics.get(normal_topic(point.topic, point.group))
        if group is None or topic is None:
            return 1
        done = 1
        for offset in point.open_offsets():
            try:
                self._back(broker, point, offset, group, now_ms, out)
            except RequestRefused as refused:  # no room for its retry topic: others go on
                log.error("popped message can't come back group=%s: %s", point.group, refused)
                broker.pop.put_checkpoint(broker, queue_id, point.later(offset), now_ms)
                self.put_again += 1
            point.ack(offset)  # stored once more: not again, should the next one fail
            done += 1
        return done

    def _back(
        self,
        broker: Broker,
        point: Checkpoint,
        offset: int,
        group: GroupConfig,
        now_ms: int,
        out: Out,
    ) -> None:
        store = broker.store
        unit = store.unit(point.topic, point.queue_id, offset)
        raw = None if unit is None else store.record_at(unit[0])
        place = (point.topic, point.group, point.queue_id)
        if raw is None:
            self.expired += 1
            broker.pop.places.remove(place, 1)
            log.warning(
                "popped message is gone topic=%s queue=%d offset=%d group=%s",
                point.topic,
                point.queue_id,
                offset,
                point.group,
            )
            return
        stored = record.decode(raw)
        is_dead = stored.reconsume_times >= group.retryMaxTimes and not point.is_suspended
        message = self._copy(broker, point, stored, is_dead=is_dead)
        _need_topic(broker, message.topic, point.group, now_ms, out)
        try:
            done = broker.put(message, now_ms, is_due=True)
        except MessageIllegal:  # what was added is too much for it
            message.properties = stored.properties
            try:
                done = broker.put(message, now_ms, is_due=True)
            except MessageIllegal as error:
                log.error("popped message dropped log_offset=%d: %s", stored.log_offset, error)
                self.expired += 1
                return
        broker.pop.places.remove(place, 1)
        broker.pop.stored_upto = max(broker.pop.stored_upto, done.end_offset)
        if is_dead:
            self.dead += 1
            broker.stats.counters.dead_letters += 1
            log.info(
                "dead letter group=%s log_offset=%d: received %d times, never acknowledged",
                point.group,
                stored.log_offset,
                stored.reconsume_times + 1,
            )
        else:
            self.revived += 1

    def _copy(
        self, broker: Broker, point: Checkpoint, stored: StoredMessage, *, is_dead: bool
    ) -> NewMessage:
        if is_dead:
            topic = names.DEAD_LETTER_PREFIX + point.group
        elif point.topic.startswith(names.RETRY_PREFIX):
            topic = point.topic
        else:
            make = retry_v2 if broker.config.is_pop_retry_v2 else retry_v1
            topic = make(point.group, point.topic)
        message = renewed(stored, topic, 0)
        message.prepared_offset = 0
        message.reconsume_times = stored.reconsume_times + (not point.is_suspended)
        table = properties.parse(stored.properties)
        if stored.reconsume_times == 0:
            table[pop_records.FIRST_POP_TIME] = str(point.pop_ms)
        table.setdefault(pop_records.FIRST_POP_TIME, str(point.pop_ms))
        table[pop_records.ORIGIN_GROUP] = point.group
        if is_dead:
            origin = normal_topic(point.topic, point.group)
            why = f"received {message.reconsume_times} times, never acknowledged"
            retry.note_death(table, origin, stored.properties, why)
        message.properties = properties.build(table)
        return message

    # --------------------------------------------------------------------------------------- note

    def _note(self, broker: Broker, now_ms: int) -> None:
        """What is done may be noted once the copies are durable."""
        topic = names.revive_topic(broker.config.cluster)
        for queue in self._queues:
            if queue.done > queue.noted:
                queue.noted = queue.done
                place = (topic, names.REVIVE_GROUP, queue.queue_id)
                broker.pop.places.move(place, queue.done, broker.pop.stored_upto, now_ms)

    # ---------------------------------------------------------------------------------- to look at

    def behind(self, broker: Broker) -> int:
        """Records of the revive topic that were not read."""
        topic = names.revive_topic(broker.config.cluster)
        return sum(
            max(broker.store.max_offset(topic, one.queue_id) - one.next, 0) for one in self._queues
        )


def revive_queue_count(broker: Broker) -> int:
    """As many as the topic has: a file from before may say other than the settings."""
    config = broker.topics.get(names.revive_topic(broker.config.cluster))
    return broker.config.revive_queue_count if config is None else max(config.readQueueNums, 1)


def _need_topic(broker: Broker, name: str, group: str, now_ms: int, out: Out) -> None:
    """A retry topic or the dead letters, made if missing; the group begins it at its beginning."""
    if broker.topics.get(name) is not None:
        return
    topic = TopicConfig(name, 1, 1, _READ_WRITE)
    broker.topics.put(topic, now_ms)
    broker.announce([topic], now_ms, out)
    if name.startswith(names.RETRY_PREFIX) and broker.offsets.get(name, group, 0) is None:
        broker.offsets.commit(name, group, 0, 0, now_ms, "pop")
