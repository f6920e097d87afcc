"""Expired messages on their way to another topic: topics with the attribute `expired.topic`.

Owns: how far each queue of such a topic was looked through, what in it waits for its time, and
config/expiredOffset.json. One rule: a message that expires is moved once, whoever reads its queue;
the file is never ahead of the log, so a crash moves again what was not noted. What was moved before
a crash is found by its key in the topic it went to, and not moved again; without the key index
(messageIndexEnable=false) it is.

Of each queue so many messages are looked at ahead; one with a short life behind more than that of
longer ones is moved later, though no consumer gets it after its time.
"""

from __future__ import annotations

import heapq
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import names, ttl
from cometmq.broker.delay import renewed
from cometmq.broker.proven import ProvenFile
from cometmq.broker.state import StateFile
from cometmq.config import BrokerConfig
from cometmq.errors import MessageIllegal, RequestRefused, StoreError
from cometmq.message import NewMessage, StoredMessage
from cometmq.ports import Out
from cometmq.store.state_files import load_state
from cometmq.store.store import Store
from cometmq.wire import properties, record
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import TRANSACTION_MASK, Perm, ResponseCode, SysFlag

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

ATTRIBUTE = "expired.topic"
FILE = "config/expiredOffset.json"
SAVE_MS = 2_000
LOOK_MS = 200  # between looks at the queues for new messages
RETRY_MS = 1_000  # after the store refused
MOST_AT_ONCE = (
    500  # records looked at or moved in one tick; the rest waits, so that requests get in
)
MOST_AHEAD = 1_000  # messages of a queue that wait for their time in memory
MOST_WAITING = 200_000  # of all queues; then each queue waits for its first one only
_END_OF_TIME_MS = 2**62

_Place = tuple[str, int]


class _Queue:
    """One queue: everything before `at` was looked at, and is done with unless it is `waiting`."""

    __slots__ = ("at", "waiting")

    def __init__(self, at: int) -> None:
        self.at = at
        self.waiting: set[int] = set()


def check_attribute(topic: TopicConfig, config: BrokerConfig) -> None:
    """Refuse a topic that messages can't go to."""
    target = topic.attributes.get(ATTRIBUTE)
    if target is None:
        return
    problem = names.topic_problem(target)
    if target == topic.topicName:
        problem = "expired messages can't go to the topic that they are in"
    elif names.is_system_topic(target, config) or target.startswith(names.RETRY_PREFIX):
        problem = f"{target!r} is a topic of the system"
    if problem is not None:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, f"attribute {ATTRIBUTE}={target!r}: {problem}"
        )


class Expired:
    """Moves expired messages."""

    def __init__(self, store: Store, now_ms: int) -> None:
        self.moved = self.unmovable = self.healed = 0
        self._proven = ProvenFile(FILE, self._encode, SAVE_MS)
        self.files: list[StateFile] = [self._proven.file]
        self._targets: dict[str, str] = {}
        self._seen_version: object = None
        self._queues: dict[_Place, _Queue] = {}
        self._heap: list[tuple[int, str, int, int]] = []  # until, topic, queue, offset
        self._look_ms = now_ms
        self._boot_end = store.max_log_offset
        self._stored = load_state(store.files, FILE) or {}

    # ------------------------------------------------------------------------------------ the file

    def _encode(self, upto: int) -> bytes:
        topics: dict[str, dict[str, Any]] = {}
        for (topic, queue_id), queue in self._queues.items():
            told = {"at": queue.at, "waiting": sorted(queue.waiting)}
            topics.setdefault(topic, {})[str(queue_id)] = told
        return msgspec.json.encode(topics)

    def _begin(self, store: Store, topic: str, queue_id: int) -> _Queue:
        """Where the file left a queue; after a crash that may be beyond what survived."""
        low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        queue = _Queue(low)
        try:
            told = self._stored[topic].pop(str(queue_id))
            queue.at = min(max(int(told["at"]), low), high)
            waiting = [int(one) for one in told["waiting"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            return queue
        for offset in waiting:
            if low <= offset < queue.at:
                self._look_at(store, topic, queue_id, queue, offset)
        return queue

    # ------------------------------------------------------------------------------------ the turn

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        saves_ms = self._proven.next_ms(broker.store.flushed_offset, now_ms)
        if broker.is_stopping:
            return saves_ms
        is_new = broker.topics.version is not self._seen_version
        if not self._queues and not is_new:
            return saves_ms
        return min(saves_ms, self._look_ms)

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        store = broker.store
        if not broker.is_stopping and self._look_ms <= now_ms:
            self._look_ms = now_ms + LOOK_MS
            if broker.topics.version is not self._seen_version:
                self._follow(broker, now_ms)
            try:
                if self._work(broker, now_ms, out):
                    self._look_ms = now_ms
            except (StoreError, RequestRefused) as error:
                log.warning("expired messages stay where they are for now: %s", error)
                self._look_ms = now_ms + RETRY_MS
        self._proven.tick(
            store.max_log_offset, store.flushed_offset, now_ms, at_once=broker.is_stopping
        )

    @property
    def is_waiting(self) -> bool:
        """Whether something that was moved is not noted yet."""
        return self._proven.is_waiting

    def _follow(self, broker: Broker, now_ms: int) -> None:
        """The topics have changed: which have the attribute now?"""
        self._seen_version = broker.topics.version
        before = self._targets
        self._targets = {
            topic.topicName: topic.attributes[ATTRIBUTE]
            for topic in broker.topics.table.values()
            if topic.attributes and ATTRIBUTE in topic.attributes
        }
        for topic in before.keys() - self._targets.keys():
            self.forget_topic(topic, now_ms)

    def forget_topic(self, topic: str, now_ms: int) -> None:
        """It is gone, or its expired messages stay; what the file says of it is wrong at once."""
        gone = [one for one in self._queues if one[0] == topic]
        for place in gone:
            del self._queues[place]
        self._stored.pop(topic, None)
        if gone:
            self._proven.amend(lambda raw: _without(raw, topic), now_ms)
            self._proven.changed()

    def _work(self, broker: Broker, now_ms: int, out: Out) -> bool:
        """Look at what is new and move what is due; True if there is more to do at once."""
        left = MOST_AT_ONCE
        store = broker.store
        for topic in self._targets:
            for queue_id in store.queue_ids(topic):
                queue = self._queues.get((topic, queue_id))
                if queue is None:
                    queue = self._queues[topic, queue_id] = self._begin(store, topic, queue_id)
                left -= self._look(store, topic, queue_id, queue, left)
        while left > 0 and self._heap and self._heap[0][0] <= now_ms:
            until_ms, topic, queue_id, offset = self._heap[0]
            queue = self._queues.get((topic, queue_id))
            if queue is not None and offset in queue.waiting:
                self._move(broker, topic, queue_id, offset, until_ms, now_ms, out)
                queue.waiting.discard(offset)
                self._proven.changed()
                left -= 1
            heapq.heappop(self._heap)
        return left <= 0

    def _look(self, store: Store, topic: str, queue_id: int, queue: _Queue, most: int) -> int:
        """Look at new messages of a queue; returns at how many."""
        high = store.max_offset(topic, queue_id)
        if queue.at >= high:
            return 0
        low = store.min_offset(topic, queue_id)
        if queue.at < low:
            queue.at = low
            queue.waiting = {one for one in queue.waiting if one >= low}
        begin = queue.at
        while queue.at < min(high, begin + most):
            if queue.waiting and (
                len(queue.waiting) >= MOST_AHEAD or len(self._heap) >= MOST_WAITING
            ):
                break
            self._look_at(store, topic, queue_id, queue, queue.at)
            queue.at += 1
        if queue.at > begin:
            self._proven.changed()
        return queue.at - begin

    def _look_at(self, store: Store, topic: str, queue_id: int, queue: _Queue, offset: int) -> None:
        unit = store.unit(topic, queue_id, offset)
        found = None if unit is None else store.scan_at(unit[0])
        if found is None or not found.sys_flag & SysFlag.MAY_EXPIRE:
            return
        until_ms = ttl.until_of(found.properties)
        if until_ms is not None:
            queue.waiting.add(offset)
            heapq.heappush(self._heap, (until_ms, topic, queue_id, offset))

    # ------------------------------------------------------------------------------------ the move

    def _move(
        self,
        broker: Broker,
        topic: str,
        queue_id: int,
        offset: int,
        until_ms: int,
        now_ms: int,
        out: Out,
    ) -> None:
        """StoreError or RequestRefused if that can't be now."""
        unit = broker.store.unit(topic, queue_id, offset)
        raw = None if unit is None else broker.store.record_at(unit[0])
        if raw is None:
            log.error(
                "expired message can't be read topic=%s/%d offset=%d", topic, queue_id, offset
            )
            self.unmovable += 1
            return
        stored = record.decode(raw)
        target = _need(broker, self._targets[topic], topic, now_ms, out)
        if stored.log_offset < self._boot_end and _is_there(broker, target, stored, until_ms):
            self.healed += 1
            return
        try:
            broker.put(_copy(stored, target), now_ms, is_due=True)
        except MessageIllegal as error:
            log.error("expired message not moved topic=%s offset=%d: %s", topic, offset, error)
            self.unmovable += 1
            return
        self.moved += 1


def _without(raw: bytes, topic: str) -> bytes:
    told = msgspec.json.decode(raw)
    told.pop(topic, None)
    return msgspec.json.encode(told)


def _copy(stored: StoredMessage, target: TopicConfig) -> NewMessage:
    """The message as it arrives there: it lives on, and tells where it was."""
    message = renewed(stored, target.topicName, stored.queue_id % max(target.writeQueueNums, 1))
    table = properties.parse(stored.properties)
    table[properties.EXPIRED_TTL_MS] = table.get(properties.TTL_MS, "")
    ttl.forget(table)
    for name in (properties.PRODUCER_SEQ, properties.DELAY, properties.HALF):
        table.pop(name, None)
    table.update(_origin(stored))
    message.properties = properties.build(table)
    message.sys_flag &= ~(SysFlag.MAY_EXPIRE | TRANSACTION_MASK)
    message.prepared_offset = 0
    return message


def _origin(stored: StoredMessage) -> dict[str, str]:
    return {
        properties.EXPIRED_TOPIC: stored.topic,
        properties.EXPIRED_QUEUE_ID: str(stored.queue_id),
        properties.EXPIRED_OFFSET: str(stored.queue_offset),
    }


def _is_there(broker: Broker, target: TopicConfig, stored: StoredMessage, until_ms: int) -> bool:
    """Whether a copy was made before we were started."""
    key = properties.get(stored.properties, properties.UNIQUE_KEY)
    if key is None:
        return False
    found = broker.store.find_by_key(
        target.topicName, key, 64, until_ms, _END_OF_TIME_MS, is_unique=True
    )
    origin = _origin(stored).items()
    return any(
        origin <= properties.parse(record.decode(raw).properties).items() for raw in found.records
    )


def _need(broker: Broker, name: str, origin: str, now_ms: int, out: Out) -> TopicConfig:
    """The topic that messages go to, made with as many queues as they come from."""
    topic = broker.topics.get(name)
    if topic is None:
        former = broker.topics.get(origin)
        count = 1 if former is None else max(former.writeQueueNums, 1)
        topic = TopicConfig(name, count, count, int(Perm.READ | Perm.WRITE))
        broker.topics.put(topic, now_ms)
        broker.announce([topic], now_ms, out)
    return topic
