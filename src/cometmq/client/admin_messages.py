"""Messages looked up: by id, by key, by time, by place; and dead letters, which can be sent again.

Owns: 11, 12, 33 and 310 as an operator uses them, and telling the two kinds of message id apart.
One rule: looking changes nothing: no offset is committed and no group joined.

Both ids have 32 hex digits (56 with IPv6). An offset id holds a port where a unique id holds its
sender's pid in the upper half of a word, so it is an offset id if that word can be a port.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from cometmq.client.admin_asking import (
    Moment,
    accepted,
    as_ms,
    brokers_of,
    call,
    each,
    leaders,
    readers,
    route_of,
)
from cometmq.client.admin_groups import configs
from cometmq.client.admin_offsets import offset_at
from cometmq.client.admin_topics import DLQ_PREFIX, exists
from cometmq.client.compression import Compression, compress
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.routes import TEMPLATE_TOPIC, Route
from cometmq.client.session import Session
from cometmq.errors import NoRoute, RequestRefused, UsageError
from cometmq.message import MessageQueue, SendResult, SendStatus
from cometmq.wire import properties as props
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode, SysFlag
from cometmq.wire.headers import (
    PullHeader,
    PullResponse,
    QueryMessageHeader,
    QueueHeader,
    SendHeader,
    SendResponse,
    ViewMessageHeader,
    parse,
    send_v2_ext,
    to_ext,
)
from cometmq.wire.message_id import parse_offset_id

TOOLS_GROUP = "TOOLS_CONSUMER"  # every broker knows it from its start
RESEND_GROUP = "CLIENT_INNER_PRODUCER"
MOST_PER_QUERY = 64  # brokers cap it there
PULL_COUNT = 32
END_OF_TIME_MS = 2**63 - 1
DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
RESENT_FROM = "DLQ_RESENT_FROM"  # ours: the dead letter's topic, @, its offset id
_PULL_CODES = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)
_STORED = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
_OF_ITS_WAY = frozenset(
    (
        props.RETRY_TOPIC,
        props.DELAY,
        props.REAL_TOPIC,
        props.REAL_QUEUE_ID,
        props.HALF,
        props.PRODUCER_GROUP,
        props.POP_CHECKPOINT,
        props.REGION,
        props.TRACE_ON,
        props.CLUSTER,
        props.TIMER_DELAY_SEC,
        props.TIMER_DELAY_MS,
        props.TIMER_DELIVER_MS,
        "TIMER_OUT_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_DEL_UNIQKEY",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "CONSUME_START_TIME",
        "1ST_POP_TIME",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "INNER_NUM",
        props.TTL_UNTIL,
        props.PRODUCER_SEQ,
        DLQ_ORIGIN_TOPIC,
        "DLQ_ORIGIN_MESSAGE_ID",
        props.DEAD_REASON,
    )
)
"""Properties that tell of a message's former way; with them the new one would be delayed, hidden
or counted as retried."""


class IdParts(msgspec.Struct, frozen=True):
    """What an id says: `kind`, and of an offset id the broker's address and the log offset."""

    kind: Literal["offset", "unique"]
    address: str = ""
    log_offset: int = -1


def read_id(text: str) -> IdParts:
    """Which of the two kinds of id it is. An id that is no hex at all is its sender's own."""
    try:
        host, port, log_offset = parse_offset_id(text)
    except UsageError:
        return IdParts("unique")
    if not 0 < port < 65536 or log_offset < 0:
        return IdParts("unique")
    return IdParts("offset", f"[{host}]:{port}" if ":" in host else f"{host}:{port}", log_offset)


# ----------------------------------------------------------------------------------------- looking


async def message(session: Session, message_id: str, topic: str | None) -> ReceivedMessage:
    """By either id; a unique id needs its topic. RequestRefused if it is not found."""
    parts = read_id(message_id)
    if parts.kind == "offset":
        return await _by_offset_id(session, message_id, parts, topic)
    if topic is None:
        raise UsageError(
            f"{message_id!r} is a unique id, made by its sender: give the topic to look in"
        )
    found = await _query(
        session, topic, message_id, MOST_PER_QUERY, 0, END_OF_TIME_MS, is_unique=True
    )
    for one in found:
        if one.properties.get(props.UNIQUE_KEY) == message_id:
            return one
    raise RequestRefused(
        ResponseCode.QUERY_NOT_FOUND,
        f"no message of topic {topic!r} has the unique id {message_id}; all its brokers were asked",
    )


async def _by_offset_id(
    session: Session, message_id: str, parts: IdParts, topic: str | None
) -> ReceivedMessage:
    wire_topic = None if topic is None else session.wrap(topic)
    ext = to_ext(ViewMessageHeader(parts.log_offset, wire_topic))
    who = f"offset id {message_id}"
    try:
        answer = await call(session, parts.address, RequestCode.VIEW_MESSAGE_BY_ID, ext, name=who)
    except RequestRefused as refused:
        said = f"{who} ({parts.address} at {parts.log_offset}): {refused.remark}"
        raise RequestRefused(refused.code, said, refused.ext) from None
    found = _read(session, answer.body, await _name_of(session, parts.address))
    if not found:
        raise RequestRefused(ResponseCode.QUERY_NOT_FOUND, f"{who}: an empty answer")
    return found[0]


async def _name_of(session: Session, address: str) -> str:
    """The broker at an address; the address itself if nobody is registered there now."""
    known = await brokers_of(session)
    for broker in known.by_name.values():
        if address in broker.addresses.values():
            return broker.name
    return address


def _read(session: Session, body: bytes, broker: str) -> list[ReceivedMessage]:
    found = read_all(body, broker)
    session.show(found)
    return found


async def messages_by_key(
    session: Session, topic: str, key: str, *, most: int, begin: Moment, end: Moment | None
) -> list[ReceivedMessage]:
    """Messages with this word among their keys, oldest first."""
    if not key or " " in key:
        raise UsageError(f"key {key!r}: keys are words without spaces")
    end_ms = END_OF_TIME_MS if end is None else as_ms(end)
    _check_most(most)
    count = min(most, MOST_PER_QUERY)
    found = await _query(session, topic, key, count, as_ms(begin), end_ms, is_unique=False)
    wire_topic = session.wrap(topic)
    # Indexes hold hashes: others can be among them.
    fitting = [one for one in found if one.stored_topic == wire_topic and key in one.keys]
    return fitting[:most]


async def _query(
    session: Session,
    topic: str,
    key: str,
    most: int,
    begin_ms: int,
    end_ms: int,
    *,
    is_unique: bool,
) -> list[ReceivedMessage]:
    """12 of every broker that has the topic, by store time."""
    route = await route_of(session, session.wrap(topic))
    ext = to_ext(QueryMessageHeader(route.topic, key, most, begin_ms, end_ms))
    # Brokers disagree whether this field is part of a signature (4.9 leaves it out, 5.x doesn't).
    # It only lifts their limit of answers, and an id has one.
    if is_unique and session.options.credentials is None:
        ext["_UNIQUE_KEY_QUERY"] = "true"

    async def ask(broker: str, address: str) -> list[ReceivedMessage]:
        answer = await session.connections.request(
            address,
            RequestCode.QUERY_MESSAGE,
            ext,
            timeout_ms=session.options.timeout_ms,
            advertised_by=broker,
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        return _read(session, accepted(answer).body, broker)

    parts = await each(readers(route), ask, f"looking for {key!r} in topic {topic!r}")
    return _by_time(parts.values())


def _by_time(parts: Iterable[list[ReceivedMessage]]) -> list[ReceivedMessage]:
    found = [one for part in parts for one in part]
    return sorted(found, key=lambda one: (one.store_ms, one.broker, one.log_offset))


def _check_most(most: int) -> None:
    if most < 1:
        raise UsageError(f"most={most}: at least one message must be asked for")


async def messages_by_time(
    session: Session, topic: str, begin: Moment, end: Moment | None, *, most: int
) -> list[ReceivedMessage]:
    """Stored from `begin` up to, not including, `end` (None: now), oldest first."""
    _check_most(most)
    begin_ms = as_ms(begin)
    end_ms = session.now_ms() + 1 if end is None else as_ms(end)
    route = await route_of(session, session.wrap(topic))

    async def ask(broker: str, address: str) -> list[ReceivedMessage]:
        found: list[ReceivedMessage] = []
        for queue in (one for one in route.to_read if one.broker == broker):
            where = (session, address, broker, route.topic, queue.queue_id)
            first = await offset_at(*where, begin_ms)
            # Some brokers give the last offset, not the one after it, for a time after the last.
            last = await offset_at(*where, end_ms) + 1
            read = await _pull(session, address, queue, first, last, most)
            found += [one for one in read if begin_ms <= one.store_ms < end_ms]
        return found

    parts = await each(readers(route), ask, f"reading topic {topic!r}")
    return _by_time(parts.values())[:most]


async def queue_messages(
    session: Session, queue: MessageQueue, begin: int | None, end: int | None, *, most: int
) -> list[ReceivedMessage]:
    """A queue's messages from offset `begin` (None: its first) up to, not including, `end`."""
    _check_most(most)
    route = await route_of(session, session.wrap(queue.topic))
    address = readers(route).get(queue.broker)
    if address is None:
        names = ", ".join(route.brokers)
        raise UsageError(f"topic {queue.topic!r} is not on broker {queue.broker!r}, but on {names}")
    wire_queue = MessageQueue(route.topic, queue.broker, queue.queue_id)
    if wire_queue not in route.to_read:
        count = len([one for one in route.to_read if one.broker == queue.broker])
        raise UsageError(f"{queue!r}: {queue.broker} has {count} readable queues of that topic")
    if begin is None:
        begin = await _least(session, address, wire_queue)
    return await _pull(session, address, wire_queue, begin, end, most)


async def _least(session: Session, address: str, queue: MessageQueue) -> int:
    ext = to_ext(QueueHeader(queue.topic, queue.queue_id))
    answer = await call(session, address, RequestCode.GET_MIN_OFFSET, ext, name=queue.broker)
    return max(int(answer.ext["offset"]), 0)


async def _pull(
    session: Session, address: str, queue: MessageQueue, begin: int, end: int | None, most: int
) -> list[ReceivedMessage]:
    """Explicit pulls that wait for nothing and commit nothing."""
    found: list[ReceivedMessage] = []
    offset = begin
    while len(found) < most and (end is None or offset < end):
        header = PullHeader(
            consumerGroup=TOOLS_GROUP,
            topic=queue.topic,
            queueId=queue.queue_id,
            queueOffset=offset,
            maxMsgNums=min(most - len(found), PULL_COUNT),
            sysFlag=PullFlag.SUBSCRIPTION,
            subscription="*",
            expressionType="TAG",
        )
        answer = await session.connections.request(
            address,
            RequestCode.PULL_MESSAGE,
            to_ext(header),
            timeout_ms=session.options.timeout_ms,
            advertised_by=queue.broker,
        )
        if answer.code not in _PULL_CODES:
            accepted(answer)
        if answer.code == ResponseCode.SUCCESS:
            read = _read(session, answer.body, queue.broker)
            found += [one for one in read if end is None or one.queue_offset < end]
        following = parse(PullResponse, answer.ext).nextBeginOffset
        if answer.code == ResponseCode.PULL_NOT_FOUND or following <= offset:
            break
        offset = following
    return found[:most]


# ------------------------------------------------------------------------------------ dead letters


async def dead_letters(session: Session, group: str, *, most: int) -> list[ReceivedMessage]:
    """The newest `most` dead letters of a group, oldest of them first; UnknownName."""
    _check_most(most)
    wire_topic = session.wrap(DLQ_PREFIX + group)
    if not await exists(session, wire_topic):
        await configs(session, group)  # raises if there is no such group
        return []
    route = await route_of(session, wire_topic)
    _check_readable(route)

    async def ask(broker: str, address: str) -> list[ReceivedMessage]:
        found: list[ReceivedMessage] = []
        for queue in (one for one in route.to_read if one.broker == broker):
            ext = to_ext(QueueHeader(queue.topic, queue.queue_id))
            answer = await call(session, address, RequestCode.GET_MAX_OFFSET, ext, name=broker)
            end = int(answer.ext["offset"])
            begin = max(await _least(session, address, queue), end - most)
            found += await _pull(session, address, queue, begin, end, most)
        return found

    parts = await each(readers(route), ask, f"reading dead letters of group {group!r}")
    return _by_time(parts.values())[-most:]


def _check_readable(route: Route) -> None:
    if not route.to_read:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            f"topic {route.topic!r} can't be read on {', '.join(route.brokers)}: brokers before "
            '4.9.2 make it write-only; update_topic(..., perm="rw") changes that',
        )


async def resend_dead_letter(
    session: Session, letter: ReceivedMessage | str, group: str
) -> SendResult:
    """Send a dead letter to its original topic once more: same body, keys, tags, properties and
    unique id. It stays among the dead letters; all groups of the topic get the new one."""
    wire_topic = session.wrap(DLQ_PREFIX + group)
    if isinstance(letter, str):
        letter = await message(session, letter, DLQ_PREFIX + group)
    if letter.stored_topic != wire_topic:
        raise UsageError(
            f"message {letter.message_id} is stored in {letter.stored_topic!r}, "
            f"not in {wire_topic!r}"
        )
    topic = original_topic(letter)
    route = await route_of(session, topic)
    if not route.to_send:
        raise NoRoute(topic, route.why_not_sent)
    queue = session.rng.choice(route.to_send)
    is_compressed = bool(letter.sys_flag & SysFlag.COMPRESSED)
    header = SendHeader(
        producerGroup=RESEND_GROUP,
        topic=topic,
        defaultTopic=TEMPLATE_TOPIC,
        defaultTopicQueueNums=4,
        queueId=queue.queue_id,
        sysFlag=Compression.ZLIB.sys_flag if is_compressed else 0,
        bornTimestamp=session.now_ms(),
        flag=letter.flag,
        properties=props.build(resent_properties(letter)),
        reconsumeTimes=0,
        bname=queue.broker,
    )
    answer = await session.connections.request(
        leaders(route)[queue.broker],
        RequestCode.SEND_MESSAGE_V2,
        send_v2_ext(header),
        compress(letter.body, Compression.ZLIB) if is_compressed else letter.body,
        timeout_ms=session.options.timeout_ms,
        advertised_by=queue.broker,
    )
    status = next((one for code, one in _STORED.items() if code == answer.code), None)
    if status is None:
        raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
    sent = parse(SendResponse, answer.ext)
    return SendResult(
        status,
        letter.properties.get(props.UNIQUE_KEY, sent.msgId),
        sent.msgId,
        MessageQueue(session.unwrap(topic), queue.broker, sent.queueId),
        sent.queueOffset,
    )


def original_topic(letter: ReceivedMessage) -> str:
    """Where a dead letter came from, as called on the wire."""
    found = letter.properties.get(props.RETRY_TOPIC) or letter.properties.get(DLQ_ORIGIN_TOPIC)
    if not found:
        raise UsageError(f"message {letter.message_id} does not tell its original topic")
    return found


def resent_properties(letter: ReceivedMessage) -> dict[str, str]:
    """Its own properties, without those of its former way, and with where it comes from."""
    kept = {name: value for name, value in letter.properties.items() if name not in _OF_ITS_WAY}
    kept.setdefault(props.ORIGIN_MESSAGE_ID, letter.offset_id)
    kept[RESENT_FROM] = f"{letter.stored_topic}@{letter.offset_id}"
    return kept
