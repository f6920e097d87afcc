"""Consumer offsets: where a group stands, and moving it.

Owns: 14, 15, 29 to 31 and 222 as an operator uses them. One rule: a group with members online is
moved by the broker or not at all, because members overwrite what anybody else commits.

Three kinds of broker answer 222:
    CometMQ, 5.2 and later     move offsets themselves, also of one queue; members online or not
    before 5.2                 tell the members to move; refuse (206, or 1) if none is online, and
                               read neither queue nor offset of the request
So one queue is moved by 222 only where the broker does it itself; and when nobody is online,
offsets can simply be committed.
"""

from __future__ import annotations

from typing import Literal

from cometmq.client.admin_asking import (
    Moment,
    as_ms,
    call,
    each,
    leaders,
    queue_table,
    readers,
    route_of,
)
from cometmq.client.routes import Route
from cometmq.client.session import Session
from cometmq.errors import RequestRefused, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import bodies
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.headers import (
    QueryConsumerOffsetHeader,
    QueueHeader,
    ResetOffsetHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
    to_ext,
)

Target = Moment | Literal["earliest", "latest"]
SERVER_SIDE_SINCE = 453  # 5.2.0: useServerSideResetOffset is true unless set otherwise
EARLIEST_MS = 0
LATEST_MS = -1


async def committed_offsets(session: Session, group: str, topic: str) -> dict[MessageQueue, int]:
    """14 of every queue; a queue without an offset is left out (brokers before 5.0 say 0 for a
    young queue instead)."""
    route = await route_of(session, session.wrap(topic))
    wire_group = session.wrap(group)

    async def ask(broker: str, address: str) -> dict[MessageQueue, int]:
        found: dict[MessageQueue, int] = {}
        for queue_id in queue_ids(route, broker):
            offset = await committed_offset(
                session, address, broker, wire_group, route.topic, queue_id
            )
            if offset is not None:
                found[MessageQueue(topic, broker, queue_id)] = offset
        return found

    what = f"reading offsets of group {group!r}"
    return _joined(await each(readers(route), ask, what))


async def reset_offset(
    session: Session,
    group: str,
    topic: str,
    to: Target,
    *,
    queue: MessageQueue | int | None,
    force: bool,
) -> dict[MessageQueue, int]:
    """Move a group; the offsets that it was given."""
    if isinstance(to, str) and to not in ("earliest", "latest"):
        raise UsageError(f'to={to!r}: expected a datetime, an int, "earliest" or "latest"')
    if isinstance(to, bool) or (isinstance(to, int) and to < 0):
        raise UsageError(f"to={to!r} is neither a time in ms nor an offset")
    route = await route_of(session, session.wrap(topic))
    wire_group = session.wrap(group)
    what = f"resetting group {group!r} on topic {topic!r}"
    if queue is None:

        async def ask(broker: str, address: str) -> dict[MessageQueue, int]:
            return await _reset_broker(session, route, broker, address, wire_group, to, force=force)

        return _joined(await each(leaders(route), ask, what))
    chosen = _queue(route, topic, queue)

    async def ask_one(broker: str, address: str) -> dict[MessageQueue, int]:
        offset = await _reset_queue(
            session, route, broker, address, wire_group, chosen.queue_id, to, force=force
        )
        return {chosen: offset}

    return _joined(await each({chosen.broker: leaders(route)[chosen.broker]}, ask_one, what))


def _joined(parts: dict[str, dict[MessageQueue, int]]) -> dict[MessageQueue, int]:
    return dict(sorted((queue, at) for part in parts.values() for queue, at in part.items()))


def queue_ids(route: Route, broker: str) -> list[int]:
    return sorted(one.queue_id for one in route.to_read if one.broker == broker)


def _queue(route: Route, topic: str, queue: MessageQueue | int) -> MessageQueue:
    """The queue that is meant, checked against the route."""
    readable = [MessageQueue(topic, one.broker, one.queue_id) for one in route.to_read]
    if isinstance(queue, int):
        fitting = [one for one in readable if one.queue_id == queue]
        if len(fitting) > 1:
            names = ", ".join(one.broker for one in fitting)
            raise UsageError(f"queue {queue} of {topic!r} is on {names}: give a MessageQueue")
    else:
        fitting = [one for one in readable if one == queue]
    if not fitting:
        shown = ", ".join(f"{name} has {len(queue_ids(route, name))}" for name in route.brokers)
        raise UsageError(f"{queue!r} is no readable queue of topic {topic!r}: {shown}")
    return fitting[0]


# -------------------------------------------------------------------------------------- whole topic


async def _reset_broker(
    session: Session,
    route: Route,
    broker: str,
    address: str,
    group: str,
    to: Target,
    *,
    force: bool,
) -> dict[MessageQueue, int]:
    """All queues of one broker."""
    if isinstance(to, str):
        timestamp = EARLIEST_MS if to == "earliest" else LATEST_MS
    else:
        timestamp = as_ms(to)
    header = ResetOffsetHeader(route.topic, group, timestamp, force)
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    try:
        answer = await call(session, address, code, to_ext(header), name=broker)
    except RequestRefused as refused:
        is_absence = refused.code in (ResponseCode.CONSUMER_NOT_ONLINE, ResponseCode.SYSTEM_ERROR)
        if not is_absence or await _is_online(session, address, broker, group):
            raise
        found: dict[MessageQueue, int] = {}
        for queue_id in queue_ids(route, broker):
            queue = MessageQueue(session.unwrap(route.topic), broker, queue_id)
            found[queue] = await _commit(
                session, route.topic, broker, address, group, queue_id, to, force=force
            )
        return found
    raw = bodies.load_object(answer.body, "offsets").get("offsetTable") or {}
    return {queue: int(offset) for queue, offset in _offsets(session, raw).items()}


def _offsets(session: Session, raw: dict[object, object]) -> dict[MessageQueue, int]:
    numbers = {key: {"offset": offset} for key, offset in raw.items()}
    return {queue: int(one["offset"]) for queue, one in queue_table(session, numbers).items()}


# ---------------------------------------------------------------------------------------- one queue


async def _reset_queue(
    session: Session,
    route: Route,
    broker: str,
    address: str,
    group: str,
    queue_id: int,
    to: Target,
    *,
    force: bool,
) -> int:
    """One queue: an int is an offset."""
    topic = route.topic
    offset = await _wanted(session, address, broker, topic, queue_id, to, int_is_offset=True)
    least = await _bound(session, address, broker, topic, queue_id, RequestCode.GET_MIN_OFFSET)
    most = await _bound(session, address, broker, topic, queue_id, RequestCode.GET_MAX_OFFSET)
    if not least <= offset <= most:
        raise UsageError(
            f"offset {offset} of queue {queue_id} of {topic!r} on {broker}: "
            f"it holds {least} to {most}"
        )
    if await _resets_itself(session, address, broker):
        header = ResetOffsetHeader(topic, group, LATEST_MS, force, queue_id, offset)
        code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        await call(session, address, code, to_ext(header), name=broker)
        return offset
    if await _is_online(session, address, broker, group):
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"{broker} can't move one queue while members of {group!r} are online (it is before "
            "5.2, or useServerSideResetOffset is false): stop them first, or reset the whole topic",
        )
    return await _commit(
        session, topic, broker, address, group, queue_id, offset, force=force, int_is_offset=True
    )


async def _resets_itself(session: Session, address: str, broker: str) -> bool:
    answer = await call(session, address, RequestCode.GET_BROKER_CONFIG, name=broker)
    said = bodies.parse_properties_text(answer.body).get("useServerSideResetOffset")
    return answer.version >= SERVER_SIDE_SINCE if said is None else said == "true"


async def _is_online(session: Session, address: str, broker: str, group: str) -> bool:
    try:
        ext = {"consumerGroup": group}
        code = RequestCode.GET_CONSUMER_CONNECTION_LIST
        await call(session, address, code, ext, name=broker)
    except RequestRefused as refused:
        if refused.code == ResponseCode.CONSUMER_NOT_ONLINE:
            return False
        raise
    return True


# ------------------------------------------------------------------------------------------- pieces


async def _commit(
    session: Session,
    topic: str,
    broker: str,
    address: str,
    group: str,
    queue_id: int,
    to: Target,
    *,
    force: bool,
    int_is_offset: bool = False,
) -> int:
    """15 for a group that nobody is online of; without `force` only backwards."""
    offset = await _wanted(
        session, address, broker, topic, queue_id, to, int_is_offset=int_is_offset
    )
    if not force:
        now = await committed_offset(session, address, broker, group, topic, queue_id)
        if now is not None and now <= offset:
            return now
    header = UpdateConsumerOffsetHeader(group, topic, queue_id, offset)
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    await call(session, address, code, to_ext(header), name=broker)
    return offset


async def committed_offset(
    session: Session, address: str, broker: str, group: str, topic: str, queue_id: int
) -> int | None:
    header = QueryConsumerOffsetHeader(group, topic, queue_id, setZeroIfNotFound=False)
    try:
        code = RequestCode.QUERY_CONSUMER_OFFSET
        answer = await call(session, address, code, to_ext(header), name=broker)
    except RequestRefused as refused:
        if refused.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        raise
    return int(answer.ext["offset"])


async def _wanted(
    session: Session,
    address: str,
    broker: str,
    topic: str,
    queue_id: int,
    to: Target,
    *,
    int_is_offset: bool,
) -> int:
    """The offset that a target means in one queue."""
    if to == "earliest":
        return await _bound(session, address, broker, topic, queue_id, RequestCode.GET_MIN_OFFSET)
    if to == "latest":
        return await _bound(session, address, broker, topic, queue_id, RequestCode.GET_MAX_OFFSET)
    assert not isinstance(to, str)
    if isinstance(to, int) and int_is_offset:
        return to
    return await offset_at(session, address, broker, topic, queue_id, as_ms(to))


async def offset_at(
    session: Session, address: str, broker: str, topic: str, queue_id: int, ms: int
) -> int:
    """29: the first offset stored at that time or later."""
    ext = to_ext(SearchOffsetHeader(topic, queue_id, ms))
    code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    return int((await call(session, address, code, ext, name=broker)).ext["offset"])


async def _bound(
    session: Session, address: str, broker: str, topic: str, queue_id: int, code: int
) -> int:
    """30 or 31; brokers say -1 for the least offset of a queue that was never written."""
    ext = to_ext(QueueHeader(topic, queue_id))
    return max(int((await call(session, address, code, ext, name=broker)).ext["offset"]), 0)
