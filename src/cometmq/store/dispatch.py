"""The walk over new records: each feeds its queue and the key index, and wakes who waits for it.

Owns: the dispatched position and what a record means for queues and index. One rule: records are
taken strictly in log order, each once, and none before the log allows it (SYNC_FLUSH: not before
it is durable), so a queue never shows what a crash could take back.

tags code = Java's hash of TAGS, sign-extended; in the topic of delayed messages it is the time at
which the message is due.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from cometmq.errors import UsageError
from cometmq.store.commit_log import CommitLog
from cometmq.store.key_index import KeyIndex
from cometmq.store.layout import SCHEDULE_TOPIC, StoreConfig, delay_ms_by_level
from cometmq.store.queues import Queues
from cometmq.wire import properties as props
from cometmq.wire.codes import TRANSACTION_MASK, SysFlag
from cometmq.wire.hashing import java_hash
from cometmq.wire.record import Blank, Scan

if TYPE_CHECKING:
    from cometmq._fast.hot import Hot, IndexHead
    from cometmq._fast.hot import QueueEnds as HotEnds

log = logging.getLogger("cometmq.store")

_ROLLBACK = int(SysFlag.ROLLBACK)
INVISIBLE = frozenset((int(SysFlag.PREPARED), _ROLLBACK))  # kinds that enter no queue
_UNKNOWN_LEVEL_MS = 1000


class Arrival(msgspec.Struct, gc=False):
    """A message that can be fetched from now on."""

    topic: str
    queue_id: int
    queue_offset: int
    tags_code: int
    log_offset: int


class Dispatcher:
    """Feeds queues and index from the log."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: Queues,
        index: KeyIndex | None,
        config: StoreConfig,
        hot: Hot | None = None,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._index = index
        self._hot = hot
        self._delays_ms = delay_ms_by_level(config.delay_levels)
        self.position = 0
        self.last_store_ms = 0
        self.dispatched_count = 0
        # What append already knows of its records, so that the walk need not read them again.
        # Only a shortcut: a record that is missing here is scanned in the log.
        self.known: deque[Scan] = deque()
        self._stuck_at = -1

    def run(self, limit: int, now_ms: int) -> list[Arrival]:
        """Dispatch all records that end at or before `limit`."""
        arrivals: list[Arrival] = []
        known = self.known
        position = self.position
        hot = self._hot
        while position < limit:
            if hot is not None and hot.pending_at == position:
                after = self._run_hot(hot, position, limit, arrivals)
                if after > position:
                    position = self.position = after
                    continue
                hot.drop_pending(position)  # not a simple one, or beyond the limit: as any other
            if known and known[0].log_offset <= position:
                found: Scan | Blank | None = known.popleft()
                if type(found) is Scan and found.log_offset < position:
                    continue
            else:
                found = self._log.scan(position, verify_crc=False)
            if type(found) is Scan:
                if position + found.size > limit:
                    known.appendleft(found)
                    break
                try:
                    arrival = self.feed(found, now_ms)
                except OSError as error:  # no new queue file: tried again with the next run
                    known.appendleft(found)
                    self._report_stuck(position, str(error))
                    break
                if arrival is not None:
                    arrivals.append(arrival)
            elif found is None:
                self._report_stuck(position, "no valid record")
                break
            position += found.size
            self.position = position
        return arrivals

    def _run_hot(self, hot: Hot, position: int, limit: int, arrivals: list[Arrival]) -> int:
        """Let compiled code dispatch what it appended; returns how far it came."""
        index = self._index
        item = index.items[-1] if index is not None and index.items else None
        told: list[tuple[HotEnds, int, int, int]] = []
        if item is None:
            position = hot.dispatch(position, limit, None, None, told)
        else:
            head = cast("IndexHead", item.head)
            position = hot.dispatch(position, limit, head, item.segment.buffer, told)
            if hot.is_indexing:
                item.segment.is_dirty = True
        if hot.dispatched:
            self.last_store_ms = hot.dispatched_ms
            self.dispatched_count += hot.dispatched
        for ends, *where in told:
            arrivals.append(Arrival(ends.topic, ends.queue_id, *where))
        return position

    def walk(self, position: int, now_ms: int, *, verify_crc: bool) -> int:
        """For recovery: let compiled code dispatch the records from here on, as long as they are
        whole and ordinary, and not too many; returns where the first stands that it left."""
        segment = self._log.segments.find(position)
        if self._hot is None or segment is None:
            return position
        upto = self._hot.walk(segment.buffer, segment.start, position, verify_crc, self._delays_ms)
        if upto > position:
            self.position = position
            self.run(upto, now_ms)
            position = self.position
            self._hot.drop_pending(upto)  # none, unless the disk is full
        return position

    def feed_walked(self, found: Scan, now_ms: int) -> None:
        """For recovery: as `feed`; `walk` may take the next record of its queue."""
        self.feed(found, now_ms)
        queue = self._queues.get(found.topic, found.queue_id)
        if queue is not None and self._hot is not None:
            self._hot.walk_queue(cast("HotEnds", queue.ends), found.topic == SCHEDULE_TOPIC)

    def walked(self) -> None:
        """Recovery is over."""
        if self._hot is not None:
            self._hot.walk_over()

    def _report_stuck(self, position: int, reason: str) -> None:
        if self._stuck_at != position:
            self._stuck_at = position
            log.error("dispatch_stuck log_offset=%d reason=%s", position, reason)

    def feed(self, found: Scan, now_ms: int) -> Arrival | None:
        """One record into its queue and the index; the arrival if it became visible."""
        kind = found.sys_flag & TRANSACTION_MASK
        text = found.properties
        arrival = None
        if kind not in INVISIBLE:
            try:
                queue = self._queues.need(found.topic, found.queue_id)
            except UsageError as error:
                self._leave_out(found, str(error))
                return None
            tags_code = self._tags_code(found)
            if queue.put(found.queue_offset, found.log_offset, found.size, tags_code):
                if self._hot is not None:
                    queue.warm()
                arrival = Arrival(
                    found.topic, found.queue_id, found.queue_offset, tags_code, found.log_offset
                )
        if kind != _ROLLBACK and self._index is not None:
            keys = keys_of(text)
            if keys:
                self._index.put(found.topic, keys, found.log_offset, found.store_ms, now_ms)
        self._count(found)
        return arrival

    def _leave_out(self, found: Scan, problem: str) -> None:
        """Topic and queue id have no CRC: damaged ones may name a queue that can't be. Where the
        record ends is known all the same, so no more than this message is lost."""
        log.error("message_lost log_offset=%d reason=damaged: %s", found.log_offset, problem)
        self._count(found)

    def _count(self, found: Scan) -> None:
        self.last_store_ms = found.store_ms
        self.dispatched_count += 1

    def _tags_code(self, found: Scan) -> int:
        if found.topic == SCHEDULE_TOPIC:
            level = props.number(props.get(found.properties, props.DELAY))
            if level is not None and level > 0:
                return found.store_ms + self._delay_ms(level)
        tags = props.get(found.properties, props.TAGS)
        return java_hash(tags) if tags is not None else 0

    def _delay_ms(self, level: int) -> int:
        if not self._delays_ms:
            return _UNKNOWN_LEVEL_MS
        return self._delays_ms[min(level, len(self._delays_ms)) - 1]


def unique_of(text: str) -> list[str]:
    """A record's unique key, if it has one."""
    unique = props.get(text, props.UNIQUE_KEY)
    return [unique] if unique is not None else []


def keys_of(text: str) -> list[str]:
    """The keys a record is found by: its unique key, then the words of KEYS."""
    unique = unique_of(text)
    words = props.get(text, props.KEYS)
    if words is None:
        return unique
    return unique + [word for word in words.split(props.KEY_SEPARATOR) if word]
