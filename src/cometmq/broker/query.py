"""Questions about the store: offsets, times, and messages by key or id.

Owns: 12, 14, 15, 29, 30, 31, 32 and 33. One rule: these read; only 15 (a consumer's commit) changes
anything, and only the offset table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.broker import names
from cometmq.errors import RequestRefused
from cometmq.requests import Call, Reply
from cometmq.wire.codes import ResponseCode
from cometmq.wire.headers import (
    QueryConsumerOffsetHeader,
    QueryMessageHeader,
    QueueHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
    ViewMessageHeader,
)

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
UNIQUE_KEY_RESULTS = 32
MAX_RESULTS = 64


def by_key(broker: Broker, call: Call) -> Reply:
    """12: messages of a topic with a key, or with a unique id."""
    header: QueryMessageHeader = call.header
    limit = min(max(header.maxNum, 0), MAX_RESULTS)
    if call.frame.ext.get(UNIQUE_KEY_QUERY, "").lower() == "true":
        limit = UNIQUE_KEY_RESULTS
    found = broker.store.find_by_key(
        header.topic, header.key, limit, header.beginTimestamp, header.endTimestamp
    )
    ext = {
        "indexLastUpdateTimestamp": str(found.index_last_ms),
        "indexLastUpdatePhyoffset": str(found.index_last_offset),
    }
    if not found.records:
        return Reply(
            ResponseCode.QUERY_NOT_FOUND,
            f"no message of topic {header.topic!r} with key {header.key!r} in that time",
            ext,
        )
    return Reply(ext=ext, body=b"".join(found.records))


def by_log_offset(broker: Broker, call: Call) -> Reply:
    """33: the one message whose record begins at this log offset."""
    header: ViewMessageHeader = call.header
    raw = broker.store.record_at(header.offset)
    if raw is None:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"no message begins at log offset {header.offset}; it may have been deleted",
        )
    return Reply(body=raw)


def consumer_offset(broker: Broker, call: Call) -> Reply:
    """14: where a group stands; 22 means "nowhere yet", which clients tell from an error."""
    header: QueryConsumerOffsetHeader = call.header
    offset = broker.offsets.get(header.topic, header.consumerGroup, header.queueId)
    if offset is not None and offset >= 0:
        return Reply(ext={"offset": str(offset)})
    store = broker.store
    least = store.min_offset(header.topic, header.queueId)
    if header.setZeroIfNotFound and least <= 0:
        # RocketMQ: a new group on a young queue starts at its beginning, as long as record 0
        # is still warm. A queue without messages counts as young.
        if not store.fetch(header.topic, header.queueId, 0, 1).is_cold:
            return Reply(ext={"offset": "0"})
    raise RequestRefused(
        ResponseCode.QUERY_NOT_FOUND,
        f"group {header.consumerGroup!r} has no offset for queue {header.queueId} of "
        f"{header.topic!r}",
    )


def commit_offset(broker: Broker, call: Call) -> Reply:
    """15: a consumer tells how far it has come."""
    header: UpdateConsumerOffsetHeader = call.header
    names.check_group(header.consumerGroup)
    if broker.groups.get(header.consumerGroup) is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {header.consumerGroup!r} does not exist",
        )
    topic = broker.topics.get(header.topic)
    if topic is None:
        raise RequestRefused(ResponseCode.TOPIC_NOT_EXIST, f"topic {header.topic!r} does not exist")
    queue_count = max(topic.readQueueNums, topic.writeQueueNums)
    if not 0 <= header.queueId < queue_count or header.commitOffset < 0:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"queue {header.queueId} offset {header.commitOffset} of topic {header.topic!r} with "
            f"{queue_count} queues",
        )
    broker.commit_offset(
        header.topic, header.consumerGroup, header.queueId, header.commitOffset, call
    )
    return Reply()


def offset_by_time(broker: Broker, call: Call) -> Reply:
    """29: the offset at a time in ms; LOWER unless UPPER is asked for."""
    header: SearchOffsetHeader = call.header
    is_upper = (header.boundaryType or "").upper() == "UPPER"
    offset = broker.store.offset_by_time(header.topic, header.queueId, header.timestamp, is_upper)
    return Reply(ext={"offset": str(offset)})


def max_offset(broker: Broker, call: Call) -> Reply:
    """30: the offset of the next message."""
    header: QueueHeader = call.header
    return Reply(ext={"offset": str(broker.store.max_offset(header.topic, header.queueId))})


def min_offset(broker: Broker, call: Call) -> Reply:
    """31: the oldest offset that can still be read."""
    header: QueueHeader = call.header
    return Reply(ext={"offset": str(broker.store.min_offset(header.topic, header.queueId))})


def earliest_time(broker: Broker, call: Call) -> Reply:
    """32: the store time of the oldest message, -1 if there is none."""
    header: QueueHeader = call.header
    found = broker.store.earliest_store_ms(header.topic, header.queueId)
    return Reply(ext={"timestamp": str(-1 if found is None else found)})
