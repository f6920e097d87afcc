"""One message for one unique key: topics with the attribute `dedup.minutes`.

Owns: which message was the first with its UNIQ_KEY. One rule: there is no other memory than the
log: the key index finds the first one, also after a crash; in memory is only what the index does
not know yet. A duplicate is answered as the first one was, and stored nowhere.

A delayed or timed message waits under another topic and is found there by its real one. A half
message counts as long as its transaction is open, a committed one as any other, and one that was
rolled back does not: its producer may try again. A numbered message (sequences.py) is judged by its
number alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from cometmq.broker import names
from cometmq.errors import RequestRefused
from cometmq.message import StoredMessage
from cometmq.store.results import Appended
from cometmq.wire import properties, record
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

ATTRIBUTE = "dedup.minutes"
MOST_MINUTES = 7 * 24 * 60
MOST_IN_MEMORY = 1_000_000  # keys, where there is no index
_MOST_FOUND = 64
_END_OF_TIME_MS = 2**62
_PLACES_TO_WAIT = (names.SCHEDULE_TOPIC, names.TIMER_TOPIC)

_Key = tuple[str, str]  # topic, unique key; HALF_TOPIC before the topic's name for a half


class First(msgspec.Struct, frozen=True, gc=False):
    """Where the first message with a key is, as its sender was told."""

    queue_id: int
    queue_offset: int
    log_offset: int
    end_offset: int
    store_ms: int


def window_ms(topic: TopicConfig) -> int:
    """How long a key counts on this topic; 0: messages are never compared."""
    minutes = topic.attributes.get(ATTRIBUTE) if topic.attributes else None
    return _minutes(minutes) * 60_000 if minutes is not None else 0


def check_attribute(topic: TopicConfig, *, is_indexed: bool) -> None:
    """Refuse what can't be kept."""
    value = topic.attributes.get(ATTRIBUTE)
    if value is None:
        return
    if not _minutes(value):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"attribute {ATTRIBUTE}={value!r} must be a whole number of minutes, 1 to "
            f"{MOST_MINUTES}; -{ATTRIBUTE} takes it away",
        )
    if not is_indexed:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"attribute {ATTRIBUTE}={value} needs the key index of this broker, which is off "
            "(messageIndexEnable=false)",
        )


def _minutes(value: str) -> int:
    if not value.isascii() or not value.isdecimal() or len(value) > 6:
        return 0
    return int(value) if int(value) <= MOST_MINUTES else 0


class Dedup:
    """The keys of a broker."""

    def __init__(self, topics: Iterable[TopicConfig], *, is_indexed: bool) -> None:
        self.duplicates = 0
        named = [topic.topicName for topic in topics if window_ms(topic)]
        if named and not is_indexed:
            log.error(
                "messageIndexEnable=false: what came before this start is not compared by key, "
                "topics=%s",
                named[:20],
            )
        self._recent: dict[_Key, First] = {}
        self._order: deque[tuple[_Key, First]] = deque()

    def find(
        self, broker: Broker, topic: TopicConfig, key: str, now_ms: int, *, is_half: bool = False
    ) -> First | None:
        """The message of which one with this key would be a duplicate; None: it is the first."""
        since_ms = now_ms - window_ms(topic)
        name = topic.topicName
        self._forget_indexed(broker)
        first = self._recent.get((name, key))
        if first is None or first.store_ms < since_ms:
            first = _in_index(broker, name, key, since_ms)
        if first is None and is_half:
            first = self._open_half(broker, name, key, since_ms)
        return first

    def sift(
        self, broker: Broker, topic: TopicConfig, keys: list[str], now_ms: int
    ) -> list[First | int | None]:
        """The same for the messages of a batch; a number: it repeats that one of the batch."""
        seen: dict[str, int] = {}
        found: list[First | int | None] = []
        for number, key in enumerate(keys):
            if key in seen:
                found.append(seen[key])
                continue
            seen[key] = number
            found.append(self.find(broker, topic, key, now_ms))
        return found

    def stored(
        self, topic: str, key: str, queue_id: int, appended: Appended, *, is_half: bool = False
    ) -> First:
        """A message that was the first is in the log."""
        place = (names.HALF_TOPIC + topic if is_half else topic, key)
        first = First(
            queue_id,
            appended.queue_offset,
            appended.log_offset,
            appended.end_offset,
            appended.store_ms,
        )
        self._recent[place] = first
        self._order.append((place, first))
        return first

    def forget_topic(self, topic: str) -> None:
        for place in [one for one in self._recent if one[0] in (topic, names.HALF_TOPIC + topic)]:
            del self._recent[place]

    def _forget_indexed(self, broker: Broker) -> None:
        """The index knows what is dispatched."""
        order = self._order
        upto = broker.store.dispatched_offset if broker.store.config.index_enabled else 0
        while order and (order[0][1].log_offset < upto or len(order) > MOST_IN_MEMORY):
            place, first = order.popleft()
            if self._recent.get(place) is first:
                del self._recent[place]

    def _open_half(self, broker: Broker, topic: str, key: str, since_ms: int) -> First | None:
        """A half with this key whose transaction may still be committed."""
        store = broker.store
        recent = self._recent.get((names.HALF_TOPIC + topic, key))
        if recent is not None and recent.store_ms >= since_ms:
            raw = store.record_at(recent.log_offset)
            if raw is None or broker.half.living(store, record.decode(raw)) is not None:
                return recent
        for one in _with_key(broker, names.HALF_TOPIC, key, since_ms):
            if properties.get(one.properties, properties.REAL_TOPIC) == topic:
                if broker.half.living(store, one) is not None:
                    return _first(one, _real_queue(one))
        return None


def _in_index(broker: Broker, topic: str, key: str, since_ms: int) -> First | None:
    for place in _PLACES_TO_WAIT:
        for one in _with_key(broker, place, key, since_ms):
            if properties.get(one.properties, properties.REAL_TOPIC) == topic:
                return _first(one, _real_queue(one))
    for one in _with_key(broker, topic, key, since_ms):
        unit = broker.store.unit(topic, one.queue_id, one.queue_offset)
        if unit is not None and unit[0] == one.log_offset:  # else the topic was deleted since
            return _first(one, one.queue_id)
    return None


def _with_key(broker: Broker, topic: str, key: str, since_ms: int) -> list[StoredMessage]:
    """The records under a topic that have this very unique key, oldest first."""
    found = broker.store.find_by_key(
        topic, key, _MOST_FOUND, since_ms, _END_OF_TIME_MS, is_unique=True
    )
    return [record.decode(raw) for raw in found.records]


def _first(stored: StoredMessage, queue_id: int) -> First:
    end = stored.log_offset + stored.size
    return First(queue_id, stored.queue_offset, stored.log_offset, end, stored.store_ms)


def _real_queue(stored: StoredMessage) -> int:
    text = properties.get(stored.properties, properties.REAL_QUEUE_ID) or ""
    return int(text) if text.isdecimal() else 0
