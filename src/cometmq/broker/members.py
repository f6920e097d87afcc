"""Who is online: producers and consumers by group, and what each group subscribes to.

Owns: live members, the subscription table of each group, and the watch for members of one group
that subscribe to different things. One rule: as in RocketMQ the subscription belongs to the group,
a newer subVersion replaces it; because that loses messages silently when members disagree, a
disagreement is logged once with both sides, counted, and shown in the group's status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cometmq.broker import filters, names
from cometmq.broker.filters import TagFilter
from cometmq.ports import ConnId
from cometmq.wire.bodies import ConsumerOfHeartbeat, Subscription

log = logging.getLogger("cometmq.broker")

MAX_CONFLICTS_KEPT = 64  # per group, for its status


class Client(msgspec.Struct):
    """One connection of one client program."""

    conn: ConnId
    client_id: str
    address: str
    language: int
    version: int
    serialize: int
    seen_ms: int


class Member(msgspec.Struct):
    """A client in a consumer group, with what it said it subscribes to."""

    client: Client
    wants: dict[str, str] = {}


class ConsumerGroup(msgspec.Struct):
    """A consumer group with at least one member."""

    name: str
    members: dict[ConnId, Member] = {}
    subscriptions: dict[str, Subscription] = {}
    filters: dict[str, TagFilter] = {}
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"
    fingerprint: int = 0
    told_conflicts: set[str] = set()

    def conflicts(self) -> list[str]:
        """Where members disagree now, each pair of different wishes once."""
        by_wish: dict[str, str] = {}
        for member in self.members.values():
            if member.wants:
                by_wish.setdefault(_wants(member), member.client.client_id)
        wishes = sorted(by_wish)[:MAX_CONFLICTS_KEPT]
        return [
            f"{by_wish[wishes[0]]} wants {wishes[0]}; {by_wish[other]} wants {other}"
            for other in wishes[1:]
        ]

    def client_ids(self) -> list[str]:
        """Distinct ids in the order they joined."""
        return list(dict.fromkeys(m.client.client_id for m in self.members.values()))


class Members:
    """All live groups of a broker."""

    def __init__(self, max_groups: int) -> None:
        self.max_producer_groups = max_groups
        self.refused_producers = 0
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[ConnId, Client]] = {}
        self._by_conn: dict[ConnId, set[str]] = {}
        self._producer_groups: dict[ConnId, set[str]] = {}
        self._producer_clients: dict[str, Client] = {}
        self.subscription_conflicts = 0
        self.on_change: Callable[[], None] = lambda: None
        """Told of whatever decides about a pull: subscriptions, filters, the message model."""

    # ---------------------------------------------------------------------------- consumers

    def join(self, consumer: ConsumerOfHeartbeat, client: Client, *, keep_subs: bool) -> bool:
        """A heartbeat of one consumer; True if membership or subscription changed."""
        wants = {  # built first: an expression that can't be kept changes nothing
            one.topic: filters.of_subscription(one)
            for one in consumer.subscriptions
            if filters.is_tags(one.expressionType) and not keep_subs
        }
        group = self.consumers.get(consumer.groupName)
        if group is None:
            group = self.consumers[consumer.groupName] = ConsumerGroup(consumer.groupName)
        group.consume_type = consumer.consumeType
        if group.message_model != consumer.messageModel:
            group.message_model = consumer.messageModel
            self.on_change()
        group.consume_from = consumer.consumeFromWhere
        member = group.members.get(client.conn)
        is_new = member is None or member.client.client_id != client.client_id
        if is_new or member is None:
            member = group.members[client.conn] = Member(client)
            self._by_conn.setdefault(client.conn, set()).add(group.name)
            log.info(
                "member joined group=%s client=%s peer=%s members=%d",
                group.name,
                client.client_id,
                client.address,
                len(group.members),
            )
        else:
            member.client = client
        if keep_subs:
            return is_new
        changed = self._subscribe(group, consumer.subscriptions, wants)
        member.wants = {
            one.topic: f"{one.expressionType}:{one.subString}" for one in consumer.subscriptions
        }
        self._watch_conflicts(group)
        return is_new or changed

    def _subscribe(
        self,
        group: ConsumerGroup,
        wanted: tuple[Subscription, ...],
        wants: dict[str, TagFilter],
    ) -> bool:
        changed = False
        for one in wanted:
            before = group.subscriptions.get(one.topic)
            if before is not None and one.subVersion <= before.subVersion:
                continue
            if before is None:
                changed = True
                log.info(
                    "subscribed group=%s topic=%s expression=%r",
                    group.name,
                    one.topic,
                    one.subString,
                )
            elif before.subString != one.subString:
                log.info(
                    "subscription changed group=%s topic=%s before=%r after=%r",
                    group.name,
                    one.topic,
                    before.subString,
                    one.subString,
                )
            group.subscriptions[one.topic] = one
            if one.topic in wants:
                group.filters[one.topic] = wants[one.topic]
            else:
                group.filters.pop(one.topic, None)
            self.on_change()
        topics = {one.topic for one in wanted}
        for topic in [topic for topic in group.subscriptions if topic not in topics]:
            self.on_change()
            log.info("unsubscribed group=%s topic=%s", group.name, topic)
            del group.subscriptions[topic]
            group.filters.pop(topic, None)
            changed = True
        return changed

    def _watch_conflicts(self, group: ConsumerGroup) -> None:
        if len(group.members) < 2:
            return
        for text in group.conflicts():
            if text in group.told_conflicts or len(group.told_conflicts) >= MAX_CONFLICTS_KEPT:
                continue
            group.told_conflicts.add(text)
            self.subscription_conflicts += 1
            log.warning(
                "subscriptions differ group=%s: %s. All members of a group must subscribe to the "
                "same topics with the same expression, otherwise messages are lost to the group",
                group.name,
                text,
            )

    def leave(self, name: str, conn: ConnId) -> bool:
        """A member leaves a consumer group; True if it was there."""
        group = self.consumers.get(name)
        if group is None or conn not in group.members:
            return False
        member = group.members.pop(conn)
        self._by_conn.get(conn, set()).discard(name)
        log.info(
            "member left group=%s client=%s members=%d",
            name,
            member.client.client_id,
            len(group.members),
        )
        if not group.members:
            del self.consumers[name]
            self.on_change()
        return True

    # ---------------------------------------------------------------------------- producers

    def produce(self, name: str, client: Client) -> None:
        """A heartbeat of one producer group; not kept when there are too many groups."""
        if name not in self.producers and len(self.producers) >= self.max_producer_groups:
            self.refused_producers += 1
            return
        self.producers.setdefault(name, {})[client.conn] = client
        self._producer_groups.setdefault(client.conn, set()).add(name)
        self._producer_clients[client.client_id] = client

    def producer_of(self, client_id: str) -> Client | None:
        """The connection by which a client with this id produces."""
        return self._producer_clients.get(client_id)

    def _forget_producer(self, name: str, conn: ConnId) -> None:
        client = self.producers.get(name, {}).get(conn)
        if client is not None:
            known = self._producer_clients.get(client.client_id)
            if known is not None and known.conn == conn:
                del self._producer_clients[client.client_id]

    def leave_producers(self, name: str, conn: ConnId) -> None:
        clients = self.producers.get(name)
        if clients is not None and clients.pop(conn, None) is not None and not clients:
            del self.producers[name]
        self._producer_groups.get(conn, set()).discard(name)

    # -------------------------------------------------------------------------------- both

    def drop(self, conn: ConnId) -> list[str]:
        """A connection is gone: out of all groups; returns the consumer groups that changed."""
        for name in sorted(self._producer_groups.pop(conn, set())):
            self._forget_producer(name, conn)
            self.leave_producers(name, conn)
        changed = sorted(self._by_conn.get(conn, set()))
        for name in changed:
            self.leave(name, conn)
        self._by_conn.pop(conn, None)
        return changed

    def forgive(self, late_ms: int, now_ms: int) -> None:
        """Time has jumped: nobody's heartbeat is older than it was before."""
        for group in self.consumers.values():
            for member in group.members.values():
                member.client.seen_ms = min(member.client.seen_ms + late_ms, now_ms)
        for producers in self.producers.values():
            for client in producers.values():
                client.seen_ms = min(client.seen_ms + late_ms, now_ms)

    def silent(self, before_ms: int) -> list[Client]:
        """Clients whose last heartbeat is older than this."""
        found: dict[ConnId, Client] = {}
        for group in self.consumers.values():
            for conn, member in group.members.items():
                if member.client.seen_ms < before_ms:
                    found[conn] = member.client
        for clients in self.producers.values():
            for conn, client in clients.items():
                if client.seen_ms < before_ms:
                    found[conn] = client
        return list(found.values())


def _wants(member: Member) -> str:
    """What a member subscribes to, as text; its retry topic is the group's own business."""
    parts = [
        f"{topic}[{expression}]"
        for topic, expression in sorted(member.wants.items())
        if not topic.startswith(names.RETRY_PREFIX)
    ]
    return ", ".join(parts) or "nothing"
