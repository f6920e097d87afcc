"""Clients that come, stay and go: 34, 35, 38, 41, 42 and 46, and the word to their group.

Owns: what a heartbeat changes and who is told about it. One rule: every member of a group hears of
a member that joined, left or was lost, at once, because rebalancing waits for that word.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import filters, names, pull
from cometmq.broker.members import Client
from cometmq.errors import BodyError, RequestRefused
from cometmq.ports import ConnId, Out, Send
from cometmq.requests import Call, Reply
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import FLAG_ONEWAY, Perm, RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame
from cometmq.wire.headers import ConsumerGroupHeader, UnregisterClientHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

MAX_QUEUES_PER_LOCK = 10_000  # queues named in one lock request


def heartbeat(broker: Broker, call: Call) -> Reply:
    """34: producers and consumers of one client program."""
    beat = bodies.heartbeat(call.frame.body)
    peer = broker.peers[call.conn]
    client = Client(
        conn=call.conn,
        client_id=beat.client_id,
        address=peer.address,
        language=call.frame.language,
        version=call.frame.version,
        serialize=call.frame.serialize,
        seen_ms=call.now_ms,
    )
    is_changed = False
    refusal: RequestRefused | None = None
    for consumer in beat.consumers:
        try:
            is_changed |= _consume(broker, call, beat, consumer, client)
        except RequestRefused as refused:  # said at the end: the other groups count all the same
            refusal = refusal or refused
    for producer in beat.producers:
        if producer and names.group_problem(producer) is None:
            broker.members.produce(producer, client)
    if refusal is not None:
        raise refusal
    ext = {
        "IS_SUPPORT_HEART_BEAT_V2": "true",
        "IS_SUB_CHANGE": "true" if is_changed or beat.fingerprint == 0 else "false",
    }
    return Reply(ext=ext)


def _consume(
    broker: Broker,
    call: Call,
    beat: bodies.Heartbeat,
    consumer: bodies.ConsumerOfHeartbeat,
    client: Client,
) -> bool:
    """One group of a heartbeat; whether its fingerprint is new here."""
    for subscription in consumer.subscriptions:
        names.check_topic(subscription.topic)
    group = broker.groups.find(
        consumer.groupName,
        auto_create=broker.config.is_group_auto_created,
        now_ms=call.now_ms,
    )
    if group is None:
        log.warning(
            "heartbeat skipped group=%r client=%s: the group does not exist and may not be "
            "created here",
            consumer.groupName[:80],
            beat.client_id,
        )
        return False
    _ensure_retry_topic(broker, group.groupName, group.retryQueueNums, call)
    live = broker.members.consumers.get(consumer.groupName)
    is_changed = live is None or live.fingerprint != beat.fingerprint
    if broker.members.join(consumer, client, keep_subs=beat.is_without_sub):
        notify(broker, consumer.groupName, call.out)
    if not beat.is_without_sub:  # a fingerprint stands for subscriptions that are here
        broker.members.consumers[consumer.groupName].fingerprint = beat.fingerprint
        broker.sql_filters.register(consumer.groupName, consumer.subscriptions, call.now_ms)
    return is_changed


def _ensure_retry_topic(broker: Broker, group: str, queue_count: int, call: Call) -> None:
    """Each consumer group listens to its own retry topic; it must have a route."""
    topic = names.retry_topic(group)
    if queue_count <= 0 or broker.topics.get(topic) is not None:
        return
    config = bodies.TopicConfig(topic, queue_count, queue_count, int(Perm.READ | Perm.WRITE))
    broker.topics.put(config, call.now_ms)
    broker.announce([config], call.now_ms, call.out)


def unregister(broker: Broker, call: Call) -> Reply:
    """35: a client leaves on its own."""
    header: UnregisterClientHeader = call.header
    if header.producerGroup:
        broker.members.leave_producers(header.producerGroup, call.conn)
    if header.consumerGroup and broker.members.leave(header.consumerGroup, call.conn):
        broker.locks.release(header.consumerGroup, header.clientID)
        notify(broker, header.consumerGroup, call.out)
    return Reply()


def lost(broker: Broker, conn: ConnId, out: Out) -> None:
    """A connection is gone: its groups hear of it at once."""
    for group in broker.members.drop(conn):
        notify(broker, group, out)


def notify(broker: Broker, group: str, out: Out) -> None:
    """40 to every member that is left; broadcasting groups don't share queues."""
    live = broker.members.consumers.get(group)
    if live is None or not broker.config.notify_members or live.message_model == "BROADCASTING":
        return
    config = broker.groups.get(group)
    if config is not None and not config.notifyConsumerIdsChangedEnable:
        return
    for conn, member in live.members.items():
        frame = Frame(
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
            opaque=broker.next_opaque(),
            flag=FLAG_ONEWAY,
            ext={"consumerGroup": group},
            serialize=member.client.serialize,
        )
        broker.stats.counters.notifications += 1
        out.append(Send(conn, encode_frame(frame)))


def member_ids(broker: Broker, call: Call) -> Reply:
    """38: the ids of a group's members; an unknown group is an error that clients expect."""
    header: ConsumerGroupHeader = call.header
    live = broker.members.consumers.get(header.consumerGroup)
    ids = live.client_ids() if live is not None else []
    if not ids:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR, f"no member of group {header.consumerGroup!r} is online"
        )
    return Reply(body=fastjson.dumps({"consumerIdList": ids}))


class _LockBody(msgspec.Struct):
    consumerGroup: str  # noqa: N815 - the wire's names
    clientId: str  # noqa: N815
    mqSet: list[Any] = []  # noqa: N815


def _lock_body(call: Call) -> tuple[_LockBody, list[tuple[str, int, dict[str, Any]]]]:
    body = bodies.convert(
        bodies.drop_nulls(bodies.load_object(call.frame.body, "lock request")),
        _LockBody,
        "lock request",
    )
    names.check_group(body.consumerGroup)
    if len(body.mqSet) > MAX_QUEUES_PER_LOCK:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"{len(body.mqSet)} queues in one lock request, at most {MAX_QUEUES_PER_LOCK}",
        )
    queues = []
    for raw in body.mqSet:
        fields = bodies.drop_nulls(raw)
        try:
            queues.append((str(fields["topic"]), int(fields["queueId"]), fields))
        except (KeyError, TypeError, ValueError):
            raise BodyError("lock request names a queue without topic or queueId") from None
    return body, queues


def lock(broker: Broker, call: Call) -> Reply:
    """41: which of these queues this client owns from now on."""
    body, queues = _lock_body(call)
    if broker.groups.get(body.consumerGroup) is None:
        queues = []  # a group makes itself known by its heartbeat before it locks
    owned = []
    for topic, queue_id, raw in queues:
        config = broker.topics.get(topic)
        if config is None or not 0 <= queue_id < max(config.readQueueNums, config.writeQueueNums):
            continue
        if broker.locks.lock(body.consumerGroup, topic, queue_id, body.clientId, call.now_ms):
            owned.append(raw)
    return Reply(body=fastjson.dumps({"lockOKMQSet": owned}))


def unlock(broker: Broker, call: Call) -> Reply:
    """42."""
    body, queues = _lock_body(call)
    for topic, queue_id, _ in queues:
        broker.locks.unlock(body.consumerGroup, topic, queue_id, body.clientId)
    return Reply()


def check_client_config(broker: Broker, call: Call) -> Reply:
    """46: may this subscription be used here; asked by SQL92 consumers before they start."""
    raw = bodies.drop_nulls(bodies.load_object(call.frame.body, "client config"))
    if raw.get("subscriptionData"):
        subscription = bodies.subscription(raw["subscriptionData"])
        if filters.is_tags(subscription.expressionType):
            filters.of_subscription(subscription)
        else:
            pull.check_property_filter(broker, subscription.expressionType)
            filters.by_expression(subscription.expressionType, subscription.subString)
    return Reply()
