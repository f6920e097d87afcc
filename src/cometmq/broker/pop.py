"""Pop: 200050.

Owns: the checks of a pop in RocketMQ's order, where a group reads next, and when a pop waits. One
rule: nothing is given out before what brings it back is stored: a checkpoint, or in order the note
that the queue is taken.

A pop reads all queues of a topic in turn (or one), and the group's retry topic before or after
them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cometmq.broker import filters, names, pop_receipts, pull
from cometmq.broker.delay import renewed
from cometmq.broker.filters import Filter
from cometmq.broker.pop_order import Place
from cometmq.broker.pop_polls import Poll
from cometmq.broker.pop_receipts import ORDERED_QUEUE, Receipt, Told, retry_v1, retry_v2
from cometmq.broker.pop_records import MOST_OFFSETS, Checkpoint
from cometmq.errors import RequestRefused, StoreError
from cometmq.ports import NEVER_MS, Out
from cometmq.requests import Call, Reply
from cometmq.store.results import Fetched, FetchStatus
from cometmq.wire import properties, record
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import Perm, ResponseCode
from cometmq.wire.headers import PopHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

LATE_MS = 500  # an asker whose time was over so long ago does not wait any more
FROM_MAX = 1  # initMode: a group that is new here begins with new messages

_SIZE_AND_OFFSET = struct.Struct(">i16xq")
_WRONG = (
    FetchStatus.OFFSET_TOO_SMALL,
    FetchStatus.OFFSET_OVERFLOW_BADLY,
    FetchStatus.OFFSET_FOUND_NULL,
)
_PASSED = (
    FetchStatus.NO_MATCHED_MESSAGE,
    FetchStatus.OFFSET_FOUND_NULL,
    FetchStatus.MESSAGE_WAS_REMOVING,
)


class Work:
    """One run of a pop: what it wants and what it has found so far."""

    def __init__(self, broker: Broker, header: PopHeader, wants: Filter, now_ms: int) -> None:
        self.header = header
        self.now_ms = now_ms
        self.accept = pull.accept(broker, wants)
        self.max_scan = wants.max_scan
        self.draw = broker.pop.draw()
        self.revive_queue = ORDERED_QUEUE if header.order else broker.pop.next_revive_queue(broker)
        self.told = Told()
        self.parts: list[bytes] = []
        self.count = 0
        self.rest = 0
        self.has_passed = False  # some were read and not wanted: there may be more behind them

    @property
    def left(self) -> int:
        return max(self.header.maxMsgNums, 1) - self.count

    def ext(self) -> dict[str, str]:
        header = self.header
        return {
            "popTime": str(self.now_ms),
            "invisibleTime": str(header.invisibleTime),
            "reviveQid": str(self.revive_queue),
            "restNum": str(self.rest),
            **self.told.ext(is_ordered=header.order),
        }


def pop(broker: Broker, call: Call) -> Reply | None:
    """Answer with messages, or let the request wait until there are some."""
    header: PopHeader = call.header
    topic, wants = _check(broker, call, header)
    work = run(broker, header, topic, wants, call.now_ms)
    key = (header.topic, header.consumerGroup, max(header.queueId, -1))
    if work.count:
        if work.rest > 0 and broker.pop.polls.of_key(key):
            broker.pop.wake(broker, key, call.now_ms, call.out)
        return found(work)
    born_ms = header.bornTime or call.now_ms
    until_ms = min(born_ms, call.now_ms) + min(header.pollTime, pull.MAX_HOLD_MS)
    poll = Poll(call, key, wants, _queues(broker, topic, header), until_ms, resume)
    return wait(broker, poll, work, call.now_ms)


def found(work: Work) -> Reply:
    return Reply(ResponseCode.SUCCESS, "FOUND", work.ext(), b"".join(work.parts))


def wait(broker: Broker, poll: Poll, work: Work, now_ms: int) -> Reply | None:
    """Let a pop wait that found nothing; the answer if it can't."""
    code = ResponseCode.POLLING_TIMEOUT
    if poll.until_ms > now_ms and not broker.is_stopping and poll.call.conn in broker.peers:
        poll.look_ms = _look_again_ms(broker, work)
        config = broker.config
        if broker.pop.polls.park(poll, config.max_polls, config.max_polls_of_group):
            return None
        code = ResponseCode.POLLING_FULL
    broker.stats.counters.get_miss += 1
    return Reply(code, "NO_MESSAGE_IN_QUEUE", work.ext())


def _look_again_ms(broker: Broker, work: Work) -> int:
    if work.has_passed and work.rest > 0:
        return work.now_ms
    if not work.header.order:
        return NEVER_MS
    header = work.header
    return broker.pop.order.soonest_free_ms(header.topic, header.consumerGroup, work.now_ms)


def resume(broker: Broker, poll: Poll, now_ms: int, out: Out) -> bool:
    """A poll was woken: try once more, then answer or wait on. Whether it has left something."""
    header: PopHeader = poll.call.header
    topic = broker.topics.get(header.topic)
    try:
        if topic is None:
            raise _missing(broker, header.topic)
        work = run(broker, header, topic, poll.wants, now_ms)
    except RequestRefused as refused:
        poll.call.answer(Reply(refused.code, refused.remark, refused.ext or {}), out)
        return False
    reply = found(work) if work.count else wait(broker, poll, work, now_ms)
    if reply is not None:
        poll.call.answer(reply, out)
    return work.count > 0 and work.rest > 0


# ---------------------------------------------------------------------------------------- checks


def _check(broker: Broker, call: Call, header: PopHeader) -> tuple[TopicConfig, Filter]:
    """RocketMQ's checks in its order; the topic, and the filter that applies."""
    if header.bornTime and call.now_ms - header.bornTime - header.pollTime > LATE_MS:
        raise RequestRefused(
            ResponseCode.POLLING_TIMEOUT, "the pop came after the time that it would have waited"
        )
    if header.maxMsgNums > MOST_OFFSETS:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"a pop of {header.maxMsgNums} messages, at most {MOST_OFFSETS}",
        )
    check_invisible(broker, header.invisibleTime)
    topic = readable(broker, header.topic, header.queueId, header.consumerGroup, call.now_ms)
    for name in _retry_topics(broker, header, 0):
        names.check_topic(name)
    if not header.exp:
        return topic, filters.ALL
    if filters.is_tags(header.expType):
        return topic, filters.parse_tags(header.exp)
    pull.check_property_filter(broker, header.expType)
    return topic, filters.by_expression(header.expType, header.exp)


def check_invisible(broker: Broker, invisible_ms: int) -> None:
    """The time must be one that a timer can keep."""
    config = broker.config
    if not config.is_timer_enabled:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR, "pop needs the timer wheel, which is off (timerWheelEnable)"
        )
    most_ms = config.timer_max_delay_seconds * 1000
    if not 0 <= invisible_ms <= most_ms:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"invisibleTime={invisible_ms}: must be 0 to {most_ms} ms (timerMaxDelaySec)",
        )


def readable(broker: Broker, name: str, queue_id: int, group: str, now_ms: int) -> TopicConfig:
    config = broker.config
    if not config.permission & Perm.READ:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, f"broker {config.name} is not readable (brokerPermission)"
        )
    topic = broker.topics.get(name)
    if topic is None:
        raise _missing(broker, name)
    if not topic.perm & Perm.READ:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, f"topic {name!r} is not readable (perm={topic.perm})"
        )
    if queue_id >= topic.readQueueNums:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"queue {queue_id} of topic {name!r}: it has {topic.readQueueNums} read queues on "
            f"{config.name}",
        )
    known = broker.groups.find(group, auto_create=config.is_group_auto_created, now_ms=now_ms)
    if known is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {group!r} does not exist on {config.name}",
        )
    if not known.consumeEnable:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, f"group {group!r} may not consume (consumeEnable)"
        )
    return topic


def _missing(broker: Broker, name: str) -> RequestRefused:
    return RequestRefused(
        ResponseCode.TOPIC_NOT_EXIST,
        f"topic {name!r} does not exist on {broker.config.name}; create it or send to it",
    )


# --------------------------------------------------------------------------------------- reading


def run(broker: Broker, header: PopHeader, topic: TopicConfig, wants: Filter, now_ms: int) -> Work:
    """Look once everywhere."""
    work = Work(broker, header, wants, now_ms)
    is_retry_first = work.draw < broker.config.pop_retry_percent
    retries = () if header.order else _retry_topics(broker, header, work.draw)
    if is_retry_first:
        _pop_topics(broker, work, retries)
    if header.queueId < 0:
        _pop_queues(broker, work, topic, is_retry=False)
    else:
        _pop_queue(broker, work, topic.topicName, header.queueId, is_retry=False)
    if not is_retry_first and work.left > 0:
        _pop_topics(broker, work, retries)
    return work


def _retry_topics(broker: Broker, header: PopHeader, draw: int) -> tuple[str, ...]:
    """The retry topic that a pop looks into: with two names in use, now this one, now that."""
    config = broker.config
    group, topic = header.consumerGroup, header.topic
    if not config.is_pop_retry_v2 or (config.reads_pop_retry_v1 and draw % 2 == 0):
        return (retry_v1(group, topic),)
    return (retry_v2(group, topic),)


def _queues(broker: Broker, topic: TopicConfig, header: PopHeader) -> tuple[tuple[str, int], ...]:
    """What may bring this pop a message."""
    ids = range(topic.readQueueNums) if header.queueId < 0 else (header.queueId,)
    found = [(topic.topicName, queue_id) for queue_id in ids]
    if not header.order:
        retries = {one for draw in (0, 1) for one in _retry_topics(broker, header, draw)}
        found += [(name, 0) for name in sorted(retries)]
    return tuple(found)


def _pop_topics(broker: Broker, work: Work, topics: tuple[str, ...]) -> None:
    for name in topics:
        topic = broker.topics.get(name)
        if topic is not None:
            _pop_queues(broker, work, topic, is_retry=True)


def _pop_queues(broker: Broker, work: Work, topic: TopicConfig, *, is_retry: bool) -> None:
    count = topic.readQueueNums
    for number in range(count):
        queue_id = (work.draw + number) % count
        _pop_queue(broker, work, topic.topicName, queue_id, is_retry=is_retry)


def _pop_queue(broker: Broker, work: Work, topic: str, queue_id: int, *, is_retry: bool) -> None:
    header, store, pops = work.header, broker.store, broker.pop
    place = (topic, header.consumerGroup, queue_id)
    offset = begin(broker, place, header.initMode, work.now_ms)
    config = broker.config
    if work.left <= 0 or (
        config.is_pop_limited and pops.places.out(place) > config.pop_most_in_flight
    ):
        work.rest += max(store.max_offset(topic, queue_id) - offset, 0)
        return
    if header.order:
        if pops.order.blocked_until(place, header.attemptId, work.now_ms):
            return
        pops.places.clear(place)
    fetched = _fetch(broker, work, place, offset)
    if fetched.status in _WRONG and fetched.next_offset != offset:
        offset = fetched.next_offset
        pops.places.reset(place)
        broker.offsets.commit(*place, offset, work.now_ms, "pop")
        fetched = _fetch(broker, work, place, offset)
    work.rest += max(fetched.max_offset - fetched.next_offset, 0)
    if fetched.count:
        _give_out(broker, work, place, offset, fetched, is_retry=is_retry)
    elif fetched.status in _PASSED and fetched.next_offset > offset:
        work.has_passed = True
        if header.order:
            broker.offsets.commit(*place, fetched.next_offset, work.now_ms, "pop")
        else:
            pops.places.move(place, fetched.next_offset, 0, work.now_ms)


def _fetch(broker: Broker, work: Work, place: Place, offset: int) -> Fetched:
    topic, _, queue_id = place
    queue = (topic, queue_id)
    return pull.fetch(broker, queue, offset, work.left, work.accept, work.max_scan, work.now_ms)


def begin(broker: Broker, place: Place, init_mode: int, now_ms: int) -> int:
    """Where a group reads a queue next; a new one is noted where it begins."""
    topic, group, queue_id = place
    pops = broker.pop
    if broker.offsets.resets:
        reset = broker.offsets.take_reset(topic, group, queue_id)
        if reset is not None:
            pops.order.forget(place, now_ms)
            pops.places.reset(place)
            broker.offsets.commit(*place, reset, now_ms, "reset")
            return reset
    offset = pops.places.get(place)
    if offset is None:
        offset = first_offset(broker, place, init_mode)
        broker.offsets.commit(*place, offset, now_ms, "pop")
    return offset


def first_offset(broker: Broker, place: Place, init_mode: int) -> int:
    """Where a group begins that was never here."""
    topic, _, queue_id = place
    store = broker.store
    least = store.min_offset(topic, queue_id)
    if init_mode != FROM_MAX or topic.startswith(names.RETRY_PREFIX):
        return least
    first = store.unit(topic, queue_id, 0) if least <= 0 else None
    if broker.config.starts_pops_in_memory and first is not None and not store.is_cold(first[0]):
        return 0
    return max(store.max_offset(topic, queue_id) - 1, 0)


# -------------------------------------------------------------------------------------- giving out


def _give_out(
    broker: Broker, work: Work, place: Place, offset: int, fetched: Fetched, *, is_retry: bool
) -> None:
    topic, group, queue_id = place
    header, pops, now_ms = work.header, broker.pop, work.now_ms
    offsets = offsets_of(fetched.body)
    if header.order:
        times, least = pops.order.given_out(
            place, header.attemptId, now_ms, header.invisibleTime, offsets, now_ms
        )
        broker.offsets.commit(*place, offset, now_ms, "pop")
        work.told.order(topic, queue_id, times, least)
    else:
        point = Checkpoint(
            topic,
            group,
            queue_id,
            offset,
            now_ms,
            header.invisibleTime,
            broker.config.name,
            tuple(offsets),
        )
        try:
            end = pops.put_checkpoint(broker, work.revive_queue, point, now_ms)
        except StoreError as error:
            if work.count:
                work.rest += len(offsets)
                return
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
        pops.places.move(place, fetched.next_offset, end, now_ms)
    work.told.queue(topic, queue_id, offset, offsets)
    pops.places.add(place, len(offsets))
    pops.given_out += len(offsets)
    work.count += len(offsets)
    broker.stats.got(topic, group, len(offsets), len(fetched.body))
    if not is_retry or broker.config.shows_pop_retry_topic:
        work.parts.append(fetched.body)
        return
    receipt = Receipt(
        offset,
        now_ms,
        header.invisibleTime,
        work.revive_queue,
        pop_receipts.flag_of(topic),
        broker.config.name,
        queue_id,
    )
    work.parts.append(as_topic(fetched.body, header.topic, receipt))


def offsets_of(body: bytes) -> list[int]:
    """The queue offsets of records that stand back to back."""
    at, found = 0, []
    while at < len(body):
        size, offset = _SIZE_AND_OFFSET.unpack_from(body, at)
        found.append(offset)
        at += size
    return found


def as_topic(body: bytes, topic: str, receipt: Receipt) -> bytes:
    """Records of a retry topic as if they came from the topic itself; their receipts, which clients
    could not make then, go with them."""
    parts: list[bytes] = []
    for stored in record.decode_all(body):
        message = renewed(stored, topic, stored.queue_id)
        table = properties.parse(stored.properties)
        table.setdefault(properties.POP_CHECKPOINT, receipt.text(stored.queue_offset))
        message.properties = properties.build(table)
        encoded = record.prepare(message)
        raw = bytearray(encoded.size)
        record.write(
            raw,
            0,
            encoded,
            queue_offset=stored.queue_offset,
            log_offset=stored.log_offset,
            store_ms=stored.store_ms,
        )
        parts.append(bytes(raw))
    return b"".join(parts)
