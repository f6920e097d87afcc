"""Looking at what a pop would get: 200052 peek, 200054 notification, 200055 polling info.

Owns: the answers of those who do not take anything. One rule: nothing here moves a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.broker import filters, pull
from cometmq.broker.pop import readable
from cometmq.broker.pop_order import Place
from cometmq.broker.pop_polls import Poll, PollKey
from cometmq.broker.pop_receipts import retry_v1, retry_v2
from cometmq.broker.pop_records import MOST_OFFSETS
from cometmq.ports import Out
from cometmq.requests import Call, Reply
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import ResponseCode
from cometmq.wire.headers import NotificationHeader, PeekHeader, PollingInfoHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker


def peek(broker: Broker, call: Call) -> Reply:
    """What a pop would get next, without taking it."""
    header: PeekHeader = call.header
    topic = readable(broker, header.topic, header.queueId, header.consumerGroup, call.now_ms)
    parts: list[bytes] = []
    left, rest = min(max(header.maxMsgNums, 1), MOST_OFFSETS), 0
    draw = broker.pop.draw()
    for place in _places(broker, topic, header.consumerGroup, header.queueId, draw):
        name, _, queue_id = place
        offset = broker.pop.places.get(place)
        offset = broker.store.min_offset(name, queue_id) if offset is None else offset
        if left <= 0:
            rest += max(broker.store.max_offset(name, queue_id) - offset, 0)
            continue
        fetched = broker.store.fetch(name, queue_id, offset, left)
        left -= fetched.count
        rest += max(fetched.max_offset - fetched.next_offset, 0)
        parts.append(fetched.body)
    ext = {"popTime": str(call.now_ms), "invisibleTime": "0", "reviveQid": "0"}
    ext["restNum"] = str(rest)
    if not any(parts):
        return Reply(ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE", ext)
    return Reply(ResponseCode.SUCCESS, "FOUND", ext, b"".join(parts))


def _places(
    broker: Broker, topic: TopicConfig, group: str, queue_id: int, draw: int
) -> list[Place]:
    count = topic.readQueueNums
    ids = [(draw + at) % count for at in range(count)] if queue_id < 0 else [queue_id]
    found = [(topic.topicName, group, one) for one in ids]
    retry = retry_v2 if broker.config.is_pop_retry_v2 else retry_v1
    name = retry(group, topic.topicName)
    return [*found, (name, group, 0)] if broker.topics.get(name) is not None else found


def notification(broker: Broker, call: Call) -> Reply | None:
    """Whether a pop would get something; waits for it as a pop does."""
    header: NotificationHeader = call.header
    topic = readable(broker, header.topic, header.queueId, header.consumerGroup, call.now_ms)
    if _has_message(broker, topic, header, call.now_ms):
        return _told(has_message=True)
    key: PollKey = (header.topic, header.consumerGroup, max(header.queueId, -1))
    queues = tuple(
        (name, queue_id)
        for name, _, queue_id in _places(broker, topic, header.consumerGroup, header.queueId, 0)
    )
    until_ms = (header.bornTime or call.now_ms) + min(header.pollTime, pull.MAX_HOLD_MS)
    if until_ms <= call.now_ms or broker.is_stopping:
        return _told(has_message=False)
    poll = Poll(call, key, filters.ALL, queues, until_ms, _notify)
    config = broker.config
    if broker.pop.polls.park(poll, config.max_polls, config.max_polls_of_group):
        return None
    return _told(has_message=False, is_full=True)


def _notify(broker: Broker, poll: Poll, now_ms: int, out: Out) -> bool:
    header: NotificationHeader = poll.call.header
    topic = broker.topics.get(header.topic)
    has_message = topic is not None and _has_message(broker, topic, header, now_ms)
    poll.call.answer(_told(has_message=has_message), out)
    return has_message  # it took nothing: the next one of its group is to hear of it too


def _has_message(
    broker: Broker, topic: TopicConfig, header: NotificationHeader, now_ms: int
) -> bool:
    for place in _places(broker, topic, header.consumerGroup, header.queueId, 0):
        if header.order and broker.pop.order.blocked_until(place, header.attemptId, now_ms):
            continue
        offset = broker.pop.places.get(place)
        least = broker.store.min_offset(place[0], place[2])
        at = least if offset is None else max(offset, least)
        if broker.store.max_offset(place[0], place[2]) > at:
            return True
    return False


def _told(*, has_message: bool, is_full: bool = False) -> Reply:
    ext = {
        "hasMsg": "true" if has_message else "false",
        "pollingFull": "true" if is_full else "false",
    }
    return Reply(ResponseCode.SUCCESS, None, ext)


def polling_info(broker: Broker, call: Call) -> Reply:
    """How many pops of a group wait."""
    header: PollingInfoHeader = call.header
    key = (header.topic, header.consumerGroup, max(header.queueId, -1))
    return Reply(ResponseCode.SUCCESS, None, {"pollingNum": str(broker.pop.polls.of_key(key))})
