"""Topics: making, changing, deleting and looking at them.

Owns: 17, 21, 202, 206, 215, 216, 300, 304, 305 and 351, and the views of a topic. One rule: a topic
is what its brokers say; name servers only repeat it, so they are changed last and waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from cometmq.client.admin_asking import (
    accepted,
    as_time,
    brokers_of,
    call,
    call_each,
    call_name_servers,
    each,
    leaders,
    own_names,
    queue_table,
    raise_failed,
    readers,
    route_of,
    topic_names,
    try_each,
)
from cometmq.client.routes import TEMPLATE_TOPIC, Route
from cometmq.client.session import Session
from cometmq.errors import (
    CometError,
    NoRoute,
    RequestRefused,
    RequestTimeout,
    Unreachable,
    UsageError,
)
from cometmq.message import MessageQueue
from cometmq.wire import bodies
from cometmq.wire.codes import Perm, RequestCode, ResponseCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import CreateTopicHeader, to_ext

ORDER_TOPICS = "ORDER_TOPIC_CONFIG"
SHOWN_WAIT_MS = 10_000  # brokers register a new topic at once; on a busy machine that takes seconds
SHOWN_EVERY_S = 0.1
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"


class TopicOnBroker(msgspec.Struct, frozen=True):
    """One topic as one broker has it."""

    name: str
    broker: str
    read_queues: int
    write_queues: int
    perm: str
    """"rw", "r", "w" or ""."""
    order: bool
    attributes: dict[str, str]
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0


class QueueRange(msgspec.Struct, frozen=True):
    """What a queue holds: offsets from `min_offset` up to, not including, `max_offset`."""

    min_offset: int
    max_offset: int
    last_update_ms: int
    """When its newest message was stored; 0 if there is none."""

    @property
    def count(self) -> int:
        return self.max_offset - self.min_offset

    @property
    def last_update(self) -> datetime | None:
        return as_time(self.last_update_ms)


class TopicStats(msgspec.Struct, frozen=True):
    topic: str
    queues: dict[MessageQueue, QueueRange]

    @property
    def count(self) -> int:
        """Messages that can be read, of all queues."""
        return sum(queue.count for queue in self.queues.values())


# ---------------------------------------------------------------------------------------- changing


def perm_bits(perm: str | int) -> int:
    if isinstance(perm, int):
        return perm
    if set(perm.lower()) - set("rw-"):
        raise UsageError(f'perm {perm!r} is not made of "r" and "w"')
    bits = Perm.READ if "r" in perm.lower() else 0
    return bits | (Perm.WRITE if "w" in perm.lower() else 0)


def perm_text(bits: int) -> str:
    return ("r" if bits & Perm.READ else "") + ("w" if bits & Perm.WRITE else "")


def attribute_changes(attributes: Mapping[str, str | None] | None) -> str | None:
    """`+name=value,-name`: what 17 carries; None as a value takes the attribute away."""
    if not attributes:
        return None
    for name, value in attributes.items():
        if not name or set(",=+") & set(name) or "," in (value or ""):
            raise UsageError(f"attribute {name!r}={value!r} can't be written as +name=value")
    return ",".join(
        f"-{name}" if value is None else f"+{name}={value}" for name, value in attributes.items()
    )


async def create_topic(
    session: Session,
    name: str,
    *,
    read_queues: int,
    write_queues: int,
    cluster: str | None,
    brokers: str | Sequence[str] | None,
    perm: str | int,
    order: bool,
    attributes: Mapping[str, str | None] | None,
    wait: bool,
) -> list[str]:
    """Make or overwrite a topic on leaders; their names."""
    wanted = CreateTopicHeader(
        topic=session.wrap(name),
        readQueueNums=read_queues,
        writeQueueNums=write_queues,
        perm=perm_bits(perm),
        defaultTopic=TEMPLATE_TOPIC,
        order=order,
        attributes=attribute_changes(attributes),
    )
    places = (await brokers_of(session)).leaders(cluster, brokers)
    await put_topic(session, dict.fromkeys(places, wanted), places, wait=wait)
    return list(places)


async def update_topic(
    session: Session,
    name: str,
    *,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | int | None,
    order: bool | None,
    attributes: Mapping[str, str | None] | None,
    wait: bool,
) -> list[str]:
    """Change what is given, on every broker that has the topic; their names."""
    route = await route_of(session, session.wrap(name))
    wanted: dict[str, CreateTopicHeader] = {}
    for broker, now in (await _topic(session, route)).items():
        wanted[broker] = CreateTopicHeader(
            topic=route.topic,
            readQueueNums=now.read_queues if read_queues is None else read_queues,
            writeQueueNums=now.write_queues if write_queues is None else write_queues,
            perm=perm_bits(now.perm if perm is None else perm),
            defaultTopic=TEMPLATE_TOPIC,
            topicFilterType=now.filter_type,
            topicSysFlag=now.sys_flag,
            order=now.order if order is None else order,
            attributes=attribute_changes(attributes),
        )
    await put_topic(session, wanted, leaders(route), wait=wait)
    return list(wanted)


async def put_topic(
    session: Session,
    wanted: dict[str, CreateTopicHeader],
    places: dict[str, str],
    *,
    wait: bool,
) -> None:
    """17 to every broker named, each with its own settings."""
    topic = next(iter(wanted.values())).topic
    for header in wanted.values():
        if header.readQueueNums < 1 or header.writeQueueNums < 1:
            raise UsageError(
                f"topic {topic!r} with {header.readQueueNums} read and {header.writeQueueNums} "
                "write queues: at least one of each is needed"
            )

    async def ask(broker: str, address: str) -> None:
        ext = to_ext(wanted[broker])
        await call(session, address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext, name=broker)

    await each({name: places[name] for name in wanted}, ask, f"making topic {topic!r}")
    ordered = [f"{name}:{one.writeQueueNums}" for name, one in wanted.items() if one.order]
    if ordered:  # what updateTopic -o does: senders then keep to these queues
        ext = {"namespace": ORDER_TOPICS, "key": topic, "value": ";".join(ordered)}
        what = f"telling the order of {topic!r}"
        await call_name_servers(session, RequestCode.PUT_KV_CONFIG, ext, what=what)
    if wait:
        await _wait_until_shown(session, topic, wanted)


async def _wait_until_shown(
    session: Session, topic: str, wanted: dict[str, CreateTopicHeader]
) -> None:
    """Until every name server that can be reached has the queues; RequestTimeout."""
    shown = [_shown(session, address, topic, wanted) for address in session.names.addresses]
    results = await asyncio.gather(*shown, return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    for error in errors:
        if not isinstance(error, Unreachable) or len(errors) == len(results):
            raise error


async def _shown(
    session: Session, address: str, topic: str, wanted: dict[str, CreateTopicHeader]
) -> None:
    ext = {"topic": topic, "acceptStandardJsonOnly": "true"}
    give_up_ms = session.now_ms() + SHOWN_WAIT_MS
    while True:
        answer = await session.connections.request(
            address, RequestCode.GET_ROUTEINFO_BY_TOPIC, ext, timeout_ms=session.options.timeout_ms
        )
        if answer.code != ResponseCode.TOPIC_NOT_EXIST:
            missing = _not_shown(accepted(answer).body, wanted)
            if not missing:
                return
        else:
            missing = list(wanted)
        if session.now_ms() > give_up_ms:
            raise RequestTimeout(
                f"topic {topic!r} is made, but after {SHOWN_WAIT_MS} ms name server {address} does "
                f"not yet show it on {', '.join(missing)}"
            )
        await asyncio.sleep(SHOWN_EVERY_S)


def _not_shown(body: bytes, wanted: dict[str, CreateTopicHeader]) -> list[str]:
    rows = bodies.load_object(body, "route").get("queueDatas") or []
    shown = {row.get("brokerName"): row for row in rows if isinstance(row, dict)}

    def is_shown(broker: str, header: CreateTopicHeader) -> bool:
        row = shown.get(broker, {})
        counts = (row.get("readQueueNums"), row.get("writeQueueNums"))
        return counts == (header.readQueueNums, header.writeQueueNums)

    # A broker given by its address is not in a route by that name.
    return [
        name for name, header in wanted.items() if ":" not in name and not is_shown(name, header)
    ]


async def delete_topic(session: Session, name: str, *, cluster: str | None) -> list[str]:
    """From its brokers, then from the name servers; the brokers' names."""
    topic = session.wrap(name)
    route = await route_of(session, topic)
    places = leaders(route)
    if cluster is not None:
        of_cluster = (await brokers_of(session)).leaders(cluster)
        places = {broker: address for broker, address in places.items() if broker in of_cluster}
        if not places:
            raise NoRoute(
                topic, f"cluster {cluster!r} does not have it; {', '.join(route.brokers)} do"
            )
    what = f"deleting topic {topic!r}"
    ext = {"topic": topic}
    await call_each(session, places, RequestCode.DELETE_TOPIC_IN_BROKER, ext, what=what)
    if cluster is not None and len(places) < len(route.brokers):
        ext["clusterName"] = cluster
    await call_name_servers(session, RequestCode.DELETE_TOPIC_IN_NAMESRV, ext, what=what)
    if "clusterName" not in ext:
        kv = {"namespace": ORDER_TOPICS, "key": topic}
        await call_name_servers(session, RequestCode.DELETE_KV_CONFIG, kv, what=what)
    session.routes.forget(topic)
    return list(places)


# ----------------------------------------------------------------------------------------- looking


async def topics(session: Session, *, with_system: bool) -> list[str]:
    """Names; without the system's, and without retry and dead letter topics, unless asked for."""
    names = await topic_names(session)
    if with_system:
        return own_names(session, names)
    hidden = await system_topics(session)
    return own_names(
        session,
        [
            one
            for one in names
            if one not in hidden and not one.startswith((RETRY_PREFIX, DLQ_PREFIX))
        ],
    )


async def system_topics(session: Session) -> set[str]:
    """What brokers made for themselves; an error if one of them does not tell."""
    found, failed = await try_system_topics(session)
    if failed:
        raise_failed("listing system topics", {}, failed)
    return found


async def try_system_topics(session: Session) -> tuple[set[str], dict[str, CometError]]:
    """As far as brokers tell, and those that don't. 304 names a broker to ask, 305 asks it; all are
    asked."""
    answer = await session.call_name_server(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, {})
    found = _topic_list(answer.body)
    known = await brokers_of(session)
    places = {name: known.any(name) for name in known.by_name}
    code = RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER

    async def ask(name: str, address: str) -> Frame:
        return await call(session, address, code, name=name)

    done, failed = await try_each(places, ask)
    for one in done.values():
        found |= _topic_list(one.body)
    for name, broker in known.by_name.items():  # replies to requests come through these
        found |= {name, broker.cluster, f"{broker.cluster}_REPLY_TOPIC"}
    return found, failed


def _topic_list(body: bytes) -> set[str]:
    return {str(one) for one in bodies.load_object(body, "topic list").get("topicList") or []}


async def topic(session: Session, name: str) -> dict[str, TopicOnBroker]:
    return await _topic(session, await route_of(session, session.wrap(name)))


async def _topic(session: Session, route: Route) -> dict[str, TopicOnBroker]:
    async def ask(broker: str, address: str) -> TopicOnBroker:
        config = await _config(session, broker, address, route.topic)
        return TopicOnBroker(
            name=session.unwrap(config.topicName),
            broker=broker,
            read_queues=config.readQueueNums,
            write_queues=config.writeQueueNums,
            perm=perm_text(config.perm),
            order=config.order,
            attributes=config.attributes,
            filter_type=config.topicFilterType,
            sys_flag=config.topicSysFlag,
        )

    return await each(readers(route), ask, f"reading topic {route.topic!r}")


async def _config(session: Session, broker: str, address: str, topic: str) -> bodies.TopicConfig:
    try:
        ext = {"topic": topic}
        answer = await call(session, address, RequestCode.GET_TOPIC_CONFIG, ext, name=broker)
        return bodies.topic_config(bodies.load_object(answer.body, "topic config"))
    except RequestRefused as refused:
        if refused.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise
    # Before 5.0 there is only the table of all topics.
    answer = await call(session, address, RequestCode.GET_ALL_TOPIC_CONFIG, name=broker)
    table: dict[str, Any] = bodies.load_object(answer.body, "topics").get("topicConfigTable") or {}
    if topic not in table:
        raise RequestRefused(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} is not on {broker}")
    return bodies.topic_config(table[topic])


async def topic_stats(session: Session, name: str) -> TopicStats:
    """202 of every broker that has the topic."""
    route = await route_of(session, session.wrap(name))
    found: dict[MessageQueue, QueueRange] = {}
    answers = await call_each(
        session,
        readers(route),
        RequestCode.GET_TOPIC_STATS_INFO,
        {"topic": route.topic},
        what=f"reading stats of topic {route.topic!r}",
    )
    for answer in answers.values():
        raw = bodies.load_object(answer.body, "topic stats").get("offsetTable")
        for queue, fields in queue_table(session, raw).items():
            found[queue] = QueueRange(
                int(fields.get("minOffset", 0)),
                int(fields.get("maxOffset", 0)),
                int(fields.get("lastUpdateTimestamp", 0)),
            )
    return TopicStats(name, dict(sorted(found.items())))


async def topic_groups(session: Session, name: str) -> list[str]:
    """300: groups that consume or have consumed it."""
    route = await route_of(session, session.wrap(name))
    answers = await call_each(
        session,
        readers(route),
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
        {"topic": route.topic},
        what=f"listing groups of topic {route.topic!r}",
    )
    found: set[str] = set()
    for answer in answers.values():
        found |= {
            str(one) for one in bodies.load_object(answer.body, "groups").get("groupList") or []
        }
    return sorted(session.unwrap(one) for one in found)


async def exists(session: Session, topic: str) -> bool:
    """`topic` as on the wire."""
    try:
        await route_of(session, topic)
    except NoRoute:
        return False
    return True
