"""Members of groups: who is online, what they want, how far they are.

Owns: 203, 204, 208 and 307, and the views of them. One rule: members connect to every broker, and
each broker knows only its own part; what is told here is all parts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from cometmq.client.admin_asking import (
    UnknownName,
    as_time,
    brokers_of,
    call,
    call_each,
    leaders,
    queue_table,
    raise_failed,
    route_of,
    try_each,
)
from cometmq.client.admin_groups import configs
from cometmq.client.session import Session
from cometmq.errors import CometError, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire import bodies
from cometmq.wire.codes import RequestCode, ResponseCode

FORWARD_TIMEOUT_MS = 15_000  # a broker waits 10 s for the client that it passes a question to
ALLOCATION_TIMEOUT_MS = 3_000  # who reads which queue is a nicety: not waited for longer


class QueueProgress(msgspec.Struct, frozen=True):
    """How far a group is in one queue."""

    queue: MessageQueue
    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_consumed_ms: int
    """Store time of the last message consumed; 0 if there is none."""
    client_id: str = ""
    """Who reads the queue now; empty if nobody or not known."""

    @property
    def lag(self) -> int:
        return self.broker_offset - self.consumer_offset

    @property
    def in_flight(self) -> int:
        """Pulled and not yet committed."""
        return max(self.pull_offset - self.consumer_offset, 0)

    @property
    def last_consumed(self) -> datetime | None:
        return as_time(self.last_consumed_ms)


class ConsumerProgress(msgspec.Struct, frozen=True):
    group: str
    queues: tuple[QueueProgress, ...]
    tps: float

    @property
    def lag(self) -> int:
        """Messages not yet consumed, of all queues."""
        return sum(queue.lag for queue in self.queues)

    @property
    def in_flight(self) -> int:
        return sum(queue.in_flight for queue in self.queues)


class Client(msgspec.Struct, frozen=True):
    """Somebody connected."""

    client_id: str
    address: str
    language: str
    version: int
    brokers: tuple[str, ...]

    @property
    def version_name(self) -> str:
        """RocketMQ's release whose protocol it speaks, e.g. 4.9.8."""
        for major, first in ((5, 413), (4, 213)):
            if self.version >= first - 1:
                minor, rest = divmod(self.version - first + 1, 20)
                snapshot = "" if rest % 2 else "-SNAPSHOT"
                return f"{major}.{minor}.{rest // 2}{snapshot}"
        return f"3 ({self.version})"


class GroupSubscription(msgspec.Struct, frozen=True):
    """What a group wants of a topic: `kind` is TAG or SQL92."""

    topic: str
    expression: str
    kind: str
    version: int


class GroupConnections(msgspec.Struct, frozen=True):
    """A group's members and what they agreed on."""

    group: str
    clients: tuple[Client, ...]
    subscriptions: dict[str, GroupSubscription]
    consume_type: str
    message_model: str
    consume_from: str
    conflicts: tuple[str, ...] = ()
    """Where members disagree, in words; only CometMQ's brokers tell."""


class ConsumerQueue(msgspec.Struct, frozen=True):
    """One queue as its reader sees it."""

    committed_offset: int
    cached_count: int
    cached_min_offset: int
    cached_max_offset: int
    cached_mib: int
    is_locked: bool
    is_dropped: bool
    last_pull_ms: int
    last_consume_ms: int

    @property
    def last_pull(self) -> datetime | None:
        return as_time(self.last_pull_ms)

    @property
    def last_consume(self) -> datetime | None:
        return as_time(self.last_consume_ms)


class ConsumerRunning(msgspec.Struct, frozen=True):
    """What a consumer tells of itself."""

    group: str
    client_id: str
    properties: dict[str, str]
    subscriptions: dict[str, GroupSubscription]
    queues: dict[MessageQueue, ConsumerQueue]
    rates: dict[str, dict[str, float]]
    """By topic: consumeOKTPS, consumeFailedTPS, consumeRT, pullTPS, pullRT, ..."""
    stacks: str = ""


# ---------------------------------------------------------------------------------------- progress


async def consumer_progress(
    session: Session, name: str, topic: str | None, *, with_clients: bool
) -> ConsumerProgress:
    """208 of every broker; UnknownName if there is no such group."""
    wire_name = session.wrap(name)
    ext = {"consumerGroup": wire_name}
    if topic is None:
        places = (await brokers_of(session)).leaders()
    else:
        route = await route_of(session, session.wrap(topic))
        ext["topic"] = route.topic
        places = leaders(route)
    what = f"reading progress of group {name!r}"
    answers = await call_each(session, places, RequestCode.GET_CONSUME_STATS, ext, what=what)
    found: dict[MessageQueue, dict[str, Any]] = {}
    tps = 0.0
    for answer in answers.values():
        raw = bodies.load_object(answer.body, "consume stats")
        found.update(queue_table(session, raw.get("offsetTable")))
        tps += float(raw.get("consumeTps") or 0.0)
    if not found or topic is not None:
        await configs(session, name)
    readers = await _allocation(session, name) if with_clients and found else {}
    queues = tuple(
        QueueProgress(
            queue,
            int(fields.get("brokerOffset", 0)),
            int(fields.get("consumerOffset", 0)),
            int(fields.get("pullOffset", fields.get("consumerOffset", 0))),
            int(fields.get("lastTimestamp", 0)),
            readers.get(queue, ""),
        )
        for queue, fields in sorted(found.items())
    )
    return ConsumerProgress(name, queues, tps)


async def _allocation(session: Session, name: str) -> dict[MessageQueue, str]:
    """Who reads which queue, as far as the members answer."""
    try:
        online = await consumer_connections(session, name)
    except CometError:
        return {}
    if online.message_model == "BROADCASTING":
        return {}  # everybody reads everything

    async def ask(client_id: str, _: str) -> ConsumerRunning:
        return await consumer_running(
            session, name, client_id, with_stacks=False, timeout_ms=ALLOCATION_TIMEOUT_MS
        )

    answers, _ = await try_each({one.client_id: one.address for one in online.clients}, ask)
    return {queue: client for client, one in answers.items() for queue in one.queues}


# ------------------------------------------------------------------------------------------ online


async def consumer_connections(session: Session, name: str) -> GroupConnections:
    """203 of every broker together; RequestRefused 206 if nobody is online anywhere."""
    ext = {"consumerGroup": session.wrap(name)}
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    places = (await brokers_of(session)).leaders()
    what = f"listing members of group {name!r}"
    answers = await _where_online(
        session, places, code, ext, ResponseCode.CONSUMER_NOT_ONLINE, what
    )
    subscriptions: dict[str, GroupSubscription] = {}
    conflicts: list[str] = []
    raw: dict[str, Any] = {}
    for answer in answers.values():
        raw = bodies.drop_nulls(answer)
        subscriptions.update(_subscriptions(session, (raw.get("subscriptionTable") or {}).values()))
        conflicts += [str(one) for one in raw.get("subscriptionConflicts") or []]
    return GroupConnections(
        name,
        _clients(answers),
        dict(sorted(subscriptions.items())),
        str(raw.get("consumeType", "")),
        str(raw.get("messageModel", "")),
        str(raw.get("consumeFromWhere", "")),
        tuple(dict.fromkeys(conflicts)),
    )


async def producer_connections(
    session: Session, name: str, topic: str | None
) -> tuple[Client, ...]:
    """204 of every broker (of the topic); RequestRefused 1 if nobody is online anywhere."""
    if topic is None:
        places = (await brokers_of(session)).leaders()
    else:
        places = leaders(await route_of(session, session.wrap(topic)))
    ext = {"producerGroup": session.wrap(name)}
    code = RequestCode.GET_PRODUCER_CONNECTION_LIST
    what = f"listing producers of group {name!r}"
    return _clients(
        await _where_online(session, places, code, ext, ResponseCode.SYSTEM_ERROR, what)
    )


async def _where_online(
    session: Session, places: dict[str, str], code: int, ext: dict[str, str], absent: int, what: str
) -> dict[str, dict[str, Any]]:
    """The answers of those brokers that know the group; one that says `absent` has no member."""

    async def ask(name: str, address: str) -> dict[str, Any]:
        answer = await call(session, address, code, ext, name=name)
        return bodies.load_object(answer.body, "connections")

    done, failed = await try_each(places, ask)
    broken = {
        name: error
        for name, error in failed.items()
        if not (isinstance(error, RequestRefused) and error.code == absent)
    }
    if broken or not done:
        raise_failed(what, done, broken or failed)
    return done


def _clients(answers: Mapping[str, dict[str, Any]]) -> tuple[Client, ...]:
    found: dict[str, Client] = {}
    for broker, raw in answers.items():
        for one in raw.get("connectionSet") or []:
            fields = bodies.drop_nulls(one)
            client_id = str(fields.get("clientId", ""))
            before = found.get(client_id)
            found[client_id] = Client(
                client_id,
                str(fields.get("clientAddr", "")),
                str(fields.get("language", "")),
                int(fields.get("version", 0)),
                (*(before.brokers if before is not None else ()), broker),
            )
    return tuple(found[name] for name in sorted(found))


def _subscriptions(session: Session, raw: Any) -> dict[str, GroupSubscription]:
    found: dict[str, GroupSubscription] = {}
    for one in raw or []:
        read = bodies.subscription(one)
        topic = session.unwrap(read.topic)
        found[topic] = GroupSubscription(
            topic, read.subString, read.expressionType, read.subVersion
        )
    return found


async def consumer_running(
    session: Session,
    name: str,
    client_id: str,
    *,
    with_stacks: bool,
    timeout_ms: int = FORWARD_TIMEOUT_MS,
) -> ConsumerRunning:
    """307: asked of a member through a broker that it is connected to."""
    ext = {
        "consumerGroup": session.wrap(name),
        "clientId": client_id,
        "jstackEnable": "true" if with_stacks else "false",
    }
    online = await consumer_connections(session, name)
    member = next((one for one in online.clients if one.client_id == client_id), None)
    if member is None:
        raise UnknownName("client", client_id, [one.client_id for one in online.clients])
    places = (await brokers_of(session)).leaders(brokers=member.brokers)
    failed: dict[str, CometError] = {}
    for broker, address in places.items():
        try:
            code = RequestCode.GET_CONSUMER_RUNNING_INFO
            answer = await call(session, address, code, ext, name=broker, timeout_ms=timeout_ms)
        except CometError as error:
            failed[broker] = error
            continue
        raw = bodies.drop_nulls(bodies.load_object(answer.body, "running info"))
        return _running(session, name, client_id, raw)
    raise_failed(f"asking {client_id} of group {name!r}", {}, failed)


def _running(session: Session, name: str, client_id: str, raw: dict[str, Any]) -> ConsumerRunning:
    def number(fields: dict[str, Any], key: str) -> int:
        return int(fields.get(key, 0))

    queues = {
        queue: ConsumerQueue(
            committed_offset=number(fields, "commitOffset"),
            cached_count=number(fields, "cachedMsgCount"),
            cached_min_offset=number(fields, "cachedMsgMinOffset"),
            cached_max_offset=number(fields, "cachedMsgMaxOffset"),
            cached_mib=number(fields, "cachedMsgSizeInMiB"),
            is_locked=bool(fields.get("locked", False)),
            is_dropped=bool(fields.get("droped", fields.get("dropped", False))),
            last_pull_ms=number(fields, "lastPullTimestamp"),
            last_consume_ms=number(fields, "lastConsumeTimestamp"),
        )
        for queue, fields in queue_table(session, raw.get("mqTable")).items()
    }
    rates = {
        session.unwrap(str(topic)): {
            key: float(value) for key, value in bodies.drop_nulls(fields).items()
        }
        for topic, fields in (raw.get("statusTable") or {}).items()
    }
    properties = bodies.drop_nulls(raw.get("properties") or {})
    return ConsumerRunning(
        name,
        client_id,
        {key: str(value) for key, value in sorted(properties.items())},
        _subscriptions(session, raw.get("subscriptionSet")),
        queues,
        rates,
        str(raw.get("jstack", "")),
    )
