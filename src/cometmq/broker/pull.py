"""Pulls: 11 and 361, with long polling.

Owns: the checks of a pull in RocketMQ's order, the offset cases, and when a pull is held. One rule:
every answer with code 0, 19, 20 or 21 carries all four offsets (Java clients fail on a missing
one), and a pull is held at most once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cometmq.broker import filters, names, ttl
from cometmq.broker.filters import Filter, RetryFilter
from cometmq.broker.holds import Hold
from cometmq.errors import RequestRefused
from cometmq.ports import Out
from cometmq.requests import Call, Reply
from cometmq.store.results import Accept, Fetched, FetchStatus
from cometmq.wire.codes import Perm, PullFlag, RequestCode, ResponseCode
from cometmq.wire.headers import PullHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

MAX_HOLD_MS = 60_000  # a client may ask for more; nobody's request timeout is that long

MOST_LEAPS = 64  # reads of one pull that find nothing but expired messages; then the client asks on

_CODES = {
    FetchStatus.FOUND: ResponseCode.SUCCESS,
    FetchStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    FetchStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    FetchStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    FetchStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    FetchStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    FetchStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}


def pull(broker: Broker, call: Call) -> Reply | None:
    """Answer with messages, or hold the request until there are some."""
    header: PullHeader = call.header
    wants = _check(broker, call, header)
    if header.sysFlag & PullFlag.COMMIT_OFFSET and header.commitOffset >= 0:
        broker.commit_offset(
            header.topic, header.consumerGroup, header.queueId, header.commitOffset, call
        )
    return run(broker, call, wants, call.now_ms, may_hold=True)


def resume(broker: Broker, hold: Hold, now_ms: int, out: Out) -> None:
    """A hold has ended: run the pull once more and answer whatever comes."""
    call = hold.call
    try:
        reply = run(broker, call, hold.wants, now_ms, may_hold=False)
    except RequestRefused as refused:
        reply = Reply(refused.code, refused.remark, refused.ext or {})
    if reply is not None:
        call.answer(reply, out)


def _check(broker: Broker, call: Call, header: PullHeader) -> Filter:
    """RocketMQ's checks in its order; returns the filter that applies."""
    config = broker.config
    if not config.permission & Perm.READ:
        raise _forbidden(1, f"broker {config.name} is not readable (brokerPermission)")
    is_lite = header.sysFlag & PullFlag.LITE or call.frame.code == RequestCode.LITE_PULL_MESSAGE
    if is_lite and not config.is_lite_pull_enabled:
        raise _forbidden(1, "lite pull is off on this broker (litePullMessageEnable)")
    group = broker.groups.find(
        header.consumerGroup, auto_create=config.is_group_auto_created, now_ms=call.now_ms
    )
    if group is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {header.consumerGroup!r} does not exist on {config.name}",
        )
    if not group.consumeEnable:
        raise _forbidden(2, f"group {group.groupName!r} may not consume (consumeEnable)")
    topic = broker.topics.get(header.topic)
    if topic is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {header.topic!r} does not exist on {config.name}; create it or send to it",
        )
    if not topic.perm & Perm.READ:
        raise _forbidden(3, f"topic {header.topic!r} is not readable (perm={topic.perm})")
    if not 0 <= header.queueId < topic.readQueueNums:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"queue {header.queueId} of topic {header.topic!r}: it has {topic.readQueueNums} read "
            f"queues on {config.name}",
        )
    if header.sysFlag & PullFlag.SUBSCRIPTION:
        if filters.is_tags(header.expressionType):
            return filters.parse_tags(header.subscription)
        kind = header.expressionType
        wants: Filter = filters.by_expression(kind, header.subscription)
    else:
        kind, wants = _registered_filter(broker, header, group.consumeBroadcastEnable)
        if filters.is_tags(kind):
            return wants
    check_property_filter(broker, kind)
    if config.filters_retries and header.topic.startswith(names.RETRY_PREFIX):
        of_group = header.topic.removeprefix(names.RETRY_PREFIX)
        return RetryFilter(lambda topic: broker.sql_filters.filter_of(of_group, topic))
    return wants


def check_property_filter(broker: Broker, kind: str | None) -> None:
    """Filters on properties may be off; RocketMQ answers with 1 then."""
    if not broker.config.is_property_filter_enabled:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"the broker does not support filters of type {kind} (enablePropertyFilter=false)",
        )


def _registered_filter(
    broker: Broker, header: PullHeader, allows_broadcast: bool
) -> tuple[str, Filter]:
    """What the group's heartbeat brought: type and filter; 24, 25, 27, 28 make the client wait."""
    live = broker.members.consumers.get(header.consumerGroup)
    if live is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_NOT_EXIST,
            f"group {header.consumerGroup!r} has no member on this broker yet (no heartbeat)",
        )
    if not allows_broadcast and live.message_model == "BROADCASTING":
        raise _forbidden(4, f"group {header.consumerGroup!r} may not broadcast")
    subscription = live.subscriptions.get(header.topic)
    if subscription is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_NOT_EXIST,
            f"group {header.consumerGroup!r} does not subscribe to {header.topic!r}; its members "
            "must all subscribe to the same topics",
        )
    if subscription.subVersion < header.subVersion:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_NOT_LATEST,
            f"the subscription of group {header.consumerGroup!r} to {header.topic!r} is older "
            "here than in the request; wait for the next heartbeat",
        )
    kind = subscription.expressionType
    if filters.is_tags(kind):
        return kind, live.filters[header.topic]
    entry = broker.sql_filters.get(header.consumerGroup, header.topic)
    if entry is None:
        why = broker.sql_filters.problem(kind, subscription.subString)
        raise RequestRefused(
            ResponseCode.FILTER_DATA_NOT_EXIST,
            f"the broker has no filter of group {header.consumerGroup!r} on {header.topic!r}: "
            f"{why}",
        )
    if entry.client_version < header.subVersion:
        raise RequestRefused(
            ResponseCode.FILTER_DATA_NOT_LATEST,
            f"the filter of group {header.consumerGroup!r} on {header.topic!r} is older here than "
            "in the request; wait for the next heartbeat",
        )
    return kind, entry.compiled


def _forbidden(kind: int, remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.NO_PERMISSION, remark, {"forbiddenType": str(kind)})


def run(broker: Broker, call: Call, wants: Filter, now_ms: int, *, may_hold: bool) -> Reply | None:
    """Read the queue once and answer, or hold."""
    header: PullHeader = call.header
    topic, group, queue_id = header.topic, header.consumerGroup, header.queueId
    store, stats = broker.store, broker.stats
    reset = broker.offsets.take_reset(topic, group, queue_id) if broker.offsets.resets else None
    if reset is not None:
        ext = _ext(reset, store.min_offset(topic, queue_id), store.max_offset(topic, queue_id))
        return Reply(ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET", ext)
    fetched = fetch(
        broker,
        (topic, queue_id),
        header.queueOffset,
        header.maxMsgNums,
        accept(broker, wants),
        wants.max_scan,
        now_ms,
        sees_stale=bool(header.withExpired) or header.consumerGroup == names.TOOLS_GROUP,
    )
    status = fetched.status
    if status in (FetchStatus.NO_MESSAGE_IN_QUEUE, FetchStatus.NO_MATCHED_LOGIC_QUEUE):
        is_start = header.queueOffset == 0
        code = ResponseCode.PULL_NOT_FOUND if is_start else ResponseCode.PULL_OFFSET_MOVED
    else:
        code = _CODES[status]
    if code == ResponseCode.PULL_NOT_FOUND and may_hold and header.sysFlag & PullFlag.SUSPEND:
        if _hold(broker, call, wants, now_ms):
            return None
    ext = _ext(fetched.next_offset, fetched.min_offset, fetched.max_offset)
    if fetched.count:
        stats.got(topic, group, fetched.count, len(fetched.body))
        broker.offsets.note_pull(topic, group, queue_id, fetched.next_offset)
        if broker.teacher is not None and may_hold:
            broker.teacher.pulled(header, wants, header.queueOffset)
    else:
        stats.counters.get_miss += 1
    return Reply(code, status.name, ext, fetched.body)


def fetch(
    broker: Broker,
    queue: tuple[str, int],
    offset: int,
    count: int,
    accepts: Accept | None,
    max_scan: int | None,
    now_ms: int,
    *,
    sees_stale: bool = False,
) -> Fetched:
    """Read a queue from an offset on, and beyond messages whose time is over."""
    topic, queue_id = queue
    kept_back = 0
    is_stale = None if sees_stale else partial(_is_stale, now_ms)
    for _ in range(MOST_LEAPS):
        fetched = broker.store.fetch(
            topic, queue_id, offset, count, accepts, max_scan=max_scan, is_stale=is_stale
        )
        kept_back += fetched.stale
        offset = fetched.next_offset
        if fetched.count or not fetched.stale or offset >= fetched.max_offset:
            break
    if kept_back:
        broker.stats.kept_back(topic, kept_back)
    return fetched


def _is_stale(now_ms: int, view: memoryview) -> bool:
    return ttl.is_stale(view, now_ms)


def accept(broker: Broker, wants: Filter) -> Accept | None:
    """The filter as the store asks it in one request: by a unit's tag code, or by the record's
    properties."""
    if wants.accepts_all:
        return None
    if not wants.needs_record:
        return lambda tags_code, log_offset: wants.accepts_code(tags_code)
    return broker.store.by_properties(wants.accepts_record, wants.max_chars)


def _hold(broker: Broker, call: Call, wants: Filter, now_ms: int) -> bool:
    header: PullHeader = call.header
    config = broker.config
    if broker.is_stopping or call.conn not in broker.peers:
        return False
    hold_ms = min(max(header.suspendTimeoutMillis, 0), MAX_HOLD_MS)
    if not config.is_long_polling_enabled:
        hold_ms = min(hold_ms, config.short_polling_ms)
    if hold_ms == 0:
        return False
    return broker.holds.park(
        Hold(
            call=call,
            topic=header.topic,
            queue_id=header.queueId,
            offset=header.queueOffset,
            wants=wants,
            until_ms=now_ms + hold_ms,
        )
    )


def _ext(next_offset: int, min_offset: int, max_offset: int) -> dict[str, str]:
    return {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "minOffset": str(min_offset),
        "maxOffset": str(max_offset),
    }
