"""What brokers ask of a consumer: 40, 220, 221, 307 and 309.

Owns: reading those requests and writing their answers. One rule: a request that names another group
than ours is refused, and none of them waits for a handler but 309, which is there to call one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.client.connection import Connection
from cometmq.client.handling import EXITS, Later, on_thread
from cometmq.client.pulling import PulledQueue
from cometmq.client.rebalance import queue_of
from cometmq.client.received import read_all
from cometmq.client.session import Answer
from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import RequestCode, ResponseCode, Version
from cometmq.wire.frame import Frame, reply_to
from cometmq.wire.headers import (
    ClientOfGroupHeader,
    ConsumerGroupHeader,
    ConsumerStatusHeader,
    ResetOffsetHeader,
    parse,
)

if TYPE_CHECKING:
    from cometmq.client.consumer import Consumer

log = logging.getLogger("cometmq.client")


def answers(consumer: Consumer) -> dict[int, Answer]:
    """Who answers what, for Session.answers."""
    return {
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: lambda _, frame: _members(consumer, frame),
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET: lambda _, frame: _reset(consumer, frame),
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: lambda _, frame: _status(consumer, frame),
        RequestCode.GET_CONSUMER_RUNNING_INFO: lambda _, frame: _running(consumer, frame),
        RequestCode.CONSUME_MESSAGE_DIRECTLY: _Direct(consumer),
    }


def _not_ours(consumer: Consumer, frame: Frame, group: str) -> Frame:
    text = f"the consumer group {group!r} is not in this client; it has {consumer.wire_group!r}"
    return reply_to(frame, ResponseCode.SYSTEM_ERROR, text)


def _members(consumer: Consumer, frame: Frame) -> None:
    """40: a member came or went."""
    if parse(ConsumerGroupHeader, frame.ext).consumerGroup == consumer.wire_group:
        consumer.rebalance.soon()


def _reset(consumer: Consumer, frame: Frame) -> Frame | None:
    """220: read these queues from elsewhere."""
    header = parse(ResetOffsetHeader, frame.ext)
    if header.group != consumer.wire_group:
        return _not_ours(consumer, frame, header.group)
    for queue, offset in _offset_table(frame.body).items():
        owned = consumer.owned.get(queue)
        if owned is not None and queue.topic == header.topic:
            log.info("offset_reset group=%s queue=%s offset=%d", header.group, queue, offset)
            consumer.rebalance.move(owned, offset)
    return reply_to(frame)


def _offset_table(body: bytes) -> dict[MessageQueue, int]:
    """Keys are objects; for C++ groups it is a list of objects that hold the offset too."""
    table = bodies.load_object(body, "offset table").get("offsetTable") or {}
    found: dict[MessageQueue, int] = {}
    try:
        if isinstance(table, list):
            for one in table:
                key, offset = (one[0], one[1]) if isinstance(one, list) else (one, one["offset"])
                found[queue_of(key)] = int(offset)
        else:
            for key, offset in table.items():
                raw = fastjson.loads(key.encode()) if isinstance(key, str) else key
                found[queue_of(raw)] = int(offset)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise BodyError("offset table: expected queues and offsets") from None
    return found


def _key(queue: MessageQueue) -> fastjson.ObjectKey:
    return bodies.queue_key(queue.topic, queue.broker, queue.queue_id)


def _status(consumer: Consumer, frame: Frame) -> Frame:
    """221: how far we are in a topic's queues."""
    header = parse(ConsumerStatusHeader, frame.ext)
    if header.group != consumer.wire_group:
        return _not_ours(consumer, frame, header.group)
    table = {
        _key(queue): owned.window.commit_offset or 0
        for queue, owned in consumer.owned.items()
        if queue.topic == header.topic
    }
    return reply_to(frame, body=fastjson.dumps({"consumerTable": {}, "messageQueueTable": table}))


def _running(consumer: Consumer, frame: Frame) -> Frame:
    """307: all there is to know of this consumer."""
    header = parse(ClientOfGroupHeader, frame.ext)
    if header.consumerGroup != consumer.wire_group:
        return _not_ours(consumer, frame, header.consumerGroup)
    body: dict[str, Any] = {"jstack": stacks()} if header.jstackEnable else {}
    body |= {
        "mqPopTable": {},
        "mqTable": {_key(queue): _queue_state(one) for queue, one in consumer.owned.items()},
        "properties": _properties(consumer),
        "statusTable": {
            topic: {
                "consumeFailedMsgs": counts.failed,
                "consumeFailedTPS": counts.failed_rate,
                "consumeOKTPS": counts.done_rate,
                "consumeRT": 0.0,
                "pullRT": 0.0,
                "pullTPS": counts.pulled_rate,
            }
            for topic, counts in consumer.counts.items()
        },
        "subscriptionSet": [msgspec.to_builtins(one) for one in consumer.subscriptions().values()],
        "userConsumerInfo": {},
    }
    return reply_to(frame, body=fastjson.dumps(body))


def _queue_state(owned: PulledQueue) -> dict[str, int | bool]:
    window = owned.window
    is_empty = window.message_count == 0
    commit = window.commit_offset or 0
    return {
        "cachedMsgCount": window.message_count,
        "cachedMsgMaxOffset": 0 if is_empty else commit + window.span,
        "cachedMsgMinOffset": 0 if is_empty else commit,
        "cachedMsgSizeInMiB": window.size_bytes >> 20,
        "commitOffset": commit,
        "droped": owned.is_dropped,  # the wire's spelling
        "lastConsumeTimestamp": owned.last_done_ms,
        "lastLockTimestamp": owned.locked_ms,
        "lastPullTimestamp": owned.last_pull_ms,
        "locked": owned.needs_lock and owned.is_lock_alive,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def _properties(consumer: Consumer) -> dict[str, str]:
    stats, limits = consumer.stats, consumer.limits
    return {
        "PROP_NAMESERVER_ADDR": str(consumer.session.names),
        "PROP_THREADPOOL_CORE_SIZE": str(consumer.concurrency),
        "PROP_CONSUMEORDERLY": "true" if consumer.is_ordered else "false",
        "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
        "PROP_CLIENT_VERSION": f"V{Version.OURS}",
        "PROP_CONSUMER_START_TIMESTAMP": str(consumer.started_ms),
        "consumerGroup": consumer.wire_group,
        "messageModel": "BROADCASTING" if consumer.is_broadcasting else "CLUSTERING",
        "consumeFromWhere": consumer.start_rule.wire_name,
        "consumeTimestamp": consumer.start_rule.time_text,
        "allocateMessageQueueStrategy": consumer.strategy.name,
        "consumeMessageBatchMaxSize": str(consumer.batch),
        "consumeThreadMax": str(consumer.concurrency),
        "consumeThreadMin": str(consumer.concurrency),
        "consumeTimeout": str(round(consumer.consume_timeout_s / 60)),
        "maxReconsumeTimes": str(consumer.max_reconsume_times),
        "namespace": consumer.session.options.namespace,
        "pullBatchSize": str(consumer.pull_batch),
        "pullInterval": str(consumer.pull_interval_ms),
        "pullThresholdForQueue": str(limits.message_count),
        "pullThresholdSizeForQueue": str(limits.size_bytes >> 20),
        "suspendCurrentQueueTimeMillis": str(consumer.suspend_ms),
        "cometmqHandled": str(stats.handled),
        "cometmqFailed": str(stats.failed),
        "cometmqSentBack": str(stats.sent_back),
        "cometmqHandedAgain": str(stats.handed_again),
        "cometmqFlowWaits": str(consumer.flow_waits),
    }


def stacks() -> str:
    """What every thread and task of this process is doing, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, top in sys._current_frames().items():
        parts.append(f"{names.get(ident, '?')} TID: {ident}\n")
        parts += traceback.format_stack(top)
    for task in asyncio.all_tasks():
        parts.append(f"\ntask {task.get_name()}\n")
        for top in task.get_stack():
            parts += traceback.format_stack(top, limit=1)
    return "".join(parts)


class _Direct:
    """309: call the handler with this message, now, and tell what came of it."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def __call__(self, _: Connection, frame: Frame) -> Frame:
        consumer = self._consumer
        header = parse(ClientOfGroupHeader, frame.ext)
        if header.consumerGroup != consumer.wire_group:
            return _not_ours(consumer, frame, header.consumerGroup)
        messages = read_all(frame.body, header.brokerName or "")
        if len(messages) != 1:
            raise BodyError(f"expected one message, got {len(messages)}")
        message = messages[0]
        consumer.session.show(messages)
        found = consumer.topics.get(consumer.session.wrap(message.topic))
        if found is None:
            text = f"topic {message.topic!r} is not subscribed by this client"
            return reply_to(frame, ResponseCode.SYSTEM_ERROR, text)
        given = message if consumer.batch == 1 else [message]
        began = time.monotonic()
        result, remark = "CR_SUCCESS", None
        try:
            if found.is_async:
                said: Any = found.handler(given)
                said = await said
            else:
                said = await on_thread(found.handler, given)
            if isinstance(said, Later):
                result = "CR_LATER"
        except (Exception, *EXITS):  # the operator asked; it is not the program's own work
            result, remark = "CR_THROW_EXCEPTION", traceback.format_exc()
        body = {
            "autoCommit": True,
            "consumeResult": result,
            "order": consumer.is_ordered,
            "remark": remark,
            "spentTimeMills": round((time.monotonic() - began) * 1000),
        }
        return reply_to(frame, body=fastjson.dumps(body))
