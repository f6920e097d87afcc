"""An operator's client: topics, groups, offsets, messages, brokers and name servers.

Owns: the Admin, whose methods are the whole surface; what they do is in the admin_*.py beside this
file, one for each subject. One rule: every call asks the servers anew; nothing is remembered, so
what is answered is what was true at that moment.

    async with Admin("127.0.0.1:9876") as admin:
        await admin.create_topic("orders", 8)
        progress = await admin.consumer_progress("billing")

Names that don't exist raise errors that say what exists (UnknownName, NoRoute). A call that goes to
several servers asks all of them first; if some failed, PartlyDone carries what was done and who
failed. A server's "no" is RequestRefused with its code and remark.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from types import TracebackType

from msgspec import structs

from cometmq.client import (
    admin_cluster,
    admin_groups,
    admin_members,
    admin_messages,
    admin_offsets,
    admin_topics,
    story_finding,
)
from cometmq.client.admin_asking import Moment, PartlyDone, UnknownName, route_of
from cometmq.client.admin_groups import GroupOnBroker
from cometmq.client.admin_members import (
    Client,
    ConsumerProgress,
    ConsumerRunning,
    GroupConnections,
)
from cometmq.client.admin_messages import IdParts, read_id
from cometmq.client.admin_offsets import Target
from cometmq.client.admin_topics import TopicOnBroker, TopicStats
from cometmq.client.connection import Credentials
from cometmq.client.received import ReceivedMessage
from cometmq.client.routes import Route
from cometmq.client.session import Options, Session
from cometmq.client.story import Story
from cometmq.errors import UsageError
from cometmq.message import MessageQueue, SendResult

__all__ = ["Admin", "IdParts", "PartlyDone", "UnknownName", "read_id"]


class Admin:
    """Use as `async with Admin(namesrv) as admin`, or call `start` and `close`."""

    def __init__(
        self,
        namesrv: str | Sequence[str] | None = None,
        *,
        instance: str = "",
        unit: str = "",
        namespace: str = "",
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | bool = False,
        timeout_ms: int = 5_000,
        connect_timeout_ms: int = 3_000,
    ) -> None:
        self.session = Session(
            Options(
                namesrv=namesrv,
                instance=instance,
                unit=unit,
                namespace=namespace,
                credentials=credentials,
                tls=tls,
                timeout_ms=timeout_ms,
                connect_timeout_ms=connect_timeout_ms,
            )
        )

    def __repr__(self) -> str:
        space = self.session.options.namespace
        where = f" namespace={space}" if space else ""
        return f"<Admin {self.session.state}{where} {self.session.names}>"

    async def start(self) -> None:
        await self.session.start()

    async def close(self) -> None:
        await self.session.close()

    async def __aenter__(self) -> Admin:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -------------------------------------------------------------------------------------- topics

    async def create_topic(
        self,
        name: str,
        queues: int = 8,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        cluster: str | None = None,
        brokers: str | Sequence[str] | None = None,
        perm: str | int = "rw",
        order: bool = False,
        attributes: Mapping[str, str | None] | None = None,
        wait: bool = True,
    ) -> list[str]:
        """Make a topic (or overwrite its settings) on all leaders, or on those of one cluster, or
        on the brokers given; their names.

        `attributes`: 5.x, e.g. {"message.type": "FIFO"}. `order`: senders keep to the queues there
        are now. `wait`: until name servers show it; RequestTimeout after 10 s.
        """
        return await admin_topics.create_topic(
            self.session,
            name,
            read_queues=queues if read_queues is None else read_queues,
            write_queues=queues if write_queues is None else write_queues,
            cluster=cluster,
            brokers=brokers,
            perm=perm,
            order=order,
            attributes=attributes,
            wait=wait,
        )

    async def update_topic(
        self,
        name: str,
        queues: int | None = None,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: str | int | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str | None] | None = None,
        wait: bool = True,
    ) -> list[str]:
        """Change what is given on every broker that has the topic, and leave the rest; the
        brokers' names. An attribute whose value is None is taken away."""
        return await admin_topics.update_topic(
            self.session,
            name,
            read_queues=queues if read_queues is None else read_queues,
            write_queues=queues if write_queues is None else write_queues,
            perm=perm,
            order=order,
            attributes=attributes,
            wait=wait,
        )

    async def delete_topic(self, name: str, *, cluster: str | None = None) -> list[str]:
        """Delete it with its messages' queues and all offsets; the brokers that had it."""
        return await admin_topics.delete_topic(self.session, name, cluster=cluster)

    async def topics(self, *, with_system: bool = False) -> list[str]:
        """Names, sorted; `with_system`: also brokers' own, retry and dead letter topics."""
        return await admin_topics.topics(self.session, with_system=with_system)

    async def topic(self, name: str) -> dict[str, TopicOnBroker]:
        """Its settings by broker."""
        return await admin_topics.topic(self.session, name)

    async def topic_stats(self, name: str) -> TopicStats:
        """First and next offset and time of the last message of each queue."""
        return await admin_topics.topic_stats(self.session, name)

    async def topic_route(self, name: str) -> Route:
        """Its brokers with their addresses, and the queues to send to and to read."""
        session = self.session
        route = await route_of(session, session.wrap(name))
        return structs.replace(
            route,
            topic=session.unwrap(route.topic),
            to_send=tuple(session.shown_queue(one) for one in route.to_send),
            to_read=tuple(session.shown_queue(one) for one in route.to_read),
        )

    async def topic_groups(self, name: str) -> list[str]:
        """Groups that consume it or have."""
        return await admin_topics.topic_groups(self.session, name)

    # -------------------------------------------------------------------------------------- groups

    async def create_group(
        self,
        name: str,
        *,
        retry_max_times: int = 16,
        retry_queues: int = 1,
        consume: bool = True,
        consume_broadcast: bool = True,
        consume_from_min: bool = True,
        orderly: bool = False,
        consume_timeout_minutes: int = 15,
        attributes: Mapping[str, str | None] | None = None,
        cluster: str | None = None,
        brokers: str | Sequence[str] | None = None,
    ) -> list[str]:
        """Make a group (or overwrite its settings) on leaders, chosen as in `create_topic`; their
        names. 4.9 knows neither `orderly`, `consume_timeout_minutes` nor `attributes`."""
        changes = {
            "retryMaxTimes": retry_max_times,
            "retryQueueNums": retry_queues,
            "consumeEnable": consume,
            "consumeBroadcastEnable": consume_broadcast,
            "consumeFromMinEnable": consume_from_min,
            "consumeMessageOrderly": orderly,
            "consumeTimeoutMinute": consume_timeout_minutes,
        }
        return await admin_groups.put_group(
            self.session, name, changes, attributes, cluster=cluster, brokers=brokers
        )

    async def update_group(
        self,
        name: str,
        *,
        retry_max_times: int | None = None,
        retry_queues: int | None = None,
        consume: bool | None = None,
        consume_broadcast: bool | None = None,
        consume_from_min: bool | None = None,
        orderly: bool | None = None,
        consume_timeout_minutes: int | None = None,
        attributes: Mapping[str, str | None] | None = None,
    ) -> list[str]:
        """Change what is given on every broker that has the group, and leave the rest; their
        names."""
        wanted = {
            "retryMaxTimes": retry_max_times,
            "retryQueueNums": retry_queues,
            "consumeEnable": consume,
            "consumeBroadcastEnable": consume_broadcast,
            "consumeFromMinEnable": consume_from_min,
            "consumeMessageOrderly": orderly,
            "consumeTimeoutMinute": consume_timeout_minutes,
        }
        changes = {key: value for key, value in wanted.items() if value is not None}
        if not changes and not attributes:
            raise UsageError(f"nothing to change of group {name!r}")
        return await admin_groups.update_group(self.session, name, changes, attributes)

    async def delete_group(
        self,
        name: str,
        *,
        with_offsets: bool = True,
        with_topics: bool = True,
        cluster: str | None = None,
    ) -> list[str]:
        """Delete a group; the brokers that had it. `with_topics`: also its retry topic and its
        DEAD LETTERS, as mqadmin does."""
        return await admin_groups.delete_group(
            self.session, name, with_offsets=with_offsets, with_topics=with_topics, cluster=cluster
        )

    async def groups(self, *, with_system: bool = False) -> list[str]:
        """Names, sorted."""
        return await admin_groups.groups(self.session, with_system=with_system)

    async def group(self, name: str) -> dict[str, GroupOnBroker]:
        """Its settings by broker."""
        return await admin_groups.group(self.session, name)

    async def consumer_progress(
        self, group: str, topic: str | None = None, *, with_clients: bool = True
    ) -> ConsumerProgress:
        """How far a group is behind, in each queue. `with_clients`: ask the members too who reads
        what; those that don't answer in 3 s are left out."""
        return await admin_members.consumer_progress(
            self.session, group, topic, with_clients=with_clients
        )

    async def consumer_connections(self, group: str) -> GroupConnections:
        """Members online and their subscriptions; RequestRefused with code 206 if nobody is."""
        return await admin_members.consumer_connections(self.session, group)

    async def producer_connections(
        self, group: str, topic: str | None = None
    ) -> tuple[Client, ...]:
        """Producers online; RequestRefused with code 1 if there are none."""
        return await admin_members.producer_connections(self.session, group, topic)

    async def consumer_running_info(
        self, group: str, client_id: str, *, with_stacks: bool = False
    ) -> ConsumerRunning:
        """What one member tells of itself; `with_stacks`: with what its threads or tasks do."""
        return await admin_members.consumer_running(
            self.session, group, client_id, with_stacks=with_stacks
        )

    # ------------------------------------------------------------------------------------- cluster

    async def clusters(self) -> dict[str, dict[str, dict[int, str]]]:
        """cluster -> broker -> broker id -> address; id 0 is the leader."""
        return await admin_cluster.clusters(self.session)

    async def broker_status(self, broker: str) -> dict[str, str]:
        """The broker's figures, all as text; `broker` is a name or `host:port`."""
        return await admin_cluster.broker_status(self.session, broker)

    async def broker_config(self, broker: str) -> dict[str, str]:
        """The broker's settings by RocketMQ's names."""
        return await admin_cluster.broker_config(self.session, broker)

    async def update_broker_config(
        self, settings: Mapping[str, str], broker: str | None = None, *, cluster: str | None = None
    ) -> list[str]:
        """Change settings of a broker, of a cluster's leaders, or of all leaders; their names."""
        return await admin_cluster.update_broker_config(self.session, settings, broker, cluster)

    async def name_server_config(self) -> dict[str, dict[str, str]]:
        """address -> settings, of every name server."""
        return await admin_cluster.name_server_config(self.session)

    async def update_name_server_config(self, settings: Mapping[str, str]) -> list[str]:
        """Change settings of every name server; their addresses."""
        return await admin_cluster.update_name_server_config(self.session, settings)

    async def wipe_write_perm(self, broker: str) -> dict[str, int]:
        """Nobody shall send to this broker any more; how many topics changed, by name server.
        Lasts until the broker's topics change."""
        return await admin_cluster.wipe_write_perm(self.session, broker)

    async def add_write_perm(self, broker: str) -> dict[str, int]:
        """Undo `wipe_write_perm`."""
        return await admin_cluster.add_write_perm(self.session, broker)

    # ------------------------------------------------------------------------------------ messages

    async def message(self, message_id: str, topic: str | None = None) -> ReceivedMessage:
        """A message by either of its ids (`read_id` tells which it is). A unique id needs the
        topic; RequestRefused if there is no such message."""
        return await admin_messages.message(self.session, message_id, topic)

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        most: int = 64,
        *,
        begin: Moment = 0,
        end: Moment | None = None,
    ) -> list[ReceivedMessage]:
        """Messages that have this key, oldest first; a broker gives at most 64."""
        return await admin_messages.messages_by_key(
            self.session, topic, key, most=most, begin=begin, end=end
        )

    async def messages_by_time(
        self, topic: str, begin: Moment, end: Moment | None = None, *, most: int = 64
    ) -> list[ReceivedMessage]:
        """Messages stored from `begin` up to, not including, `end` (None: now), oldest first."""
        return await admin_messages.messages_by_time(self.session, topic, begin, end, most=most)

    async def queue_messages(
        self,
        queue: MessageQueue,
        begin_offset: int | None = None,
        end_offset: int | None = None,
        *,
        most: int = 64,
    ) -> list[ReceivedMessage]:
        """A queue's messages from `begin_offset` (None: the first there is) up to, not including,
        `end_offset` (None: the end)."""
        return await admin_messages.queue_messages(
            self.session, queue, begin_offset, end_offset, most=most
        )

    async def dead_letters(self, group: str, *, most: int = 64) -> list[ReceivedMessage]:
        """The newest dead letters of a group, the oldest of them first."""
        return await admin_messages.dead_letters(self.session, group, most=most)

    async def resend_dead_letter(self, letter: ReceivedMessage | str, group: str) -> SendResult:
        """Send a dead letter (or the one with this id) to its original topic once more: same body,
        keys, tags, properties and unique id; ORIGIN_MESSAGE_ID and DLQ_RESENT_FROM tell where it
        came from. It stays among the dead letters. Every group of the topic gets it."""
        return await admin_messages.resend_dead_letter(self.session, letter, group)

    async def story(
        self,
        message_id: str,
        topic: str | None = None,
        *,
        trace_topic: str = "RMQ_SYS_TRACE_TOPIC",
    ) -> Story:
        """One message's whole story, by either of its ids: sent, stored, delayed, given to whom and
        how often, acknowledged or dead, each with its time; from the trace and from what brokers
        store. `Story.unknown` says what can't be known. Without `topic` all are looked through."""
        return await story_finding.story(self.session, message_id, topic, trace_topic=trace_topic)

    # ------------------------------------------------------------------------------------- offsets

    async def committed_offsets(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """Where a group stands; queues without an offset are left out."""
        return await admin_offsets.committed_offsets(self.session, group, topic)

    async def reset_offset(
        self,
        group: str,
        topic: str,
        to: Target,
        *,
        queue: MessageQueue | int | None = None,
        force: bool = True,
    ) -> dict[MessageQueue, int]:
        """Move a group on a topic, or on one queue; the offsets it was given.

        `to`: a datetime, "earliest", "latest", or an int, which is a time in ms, but if `queue` is
        given an offset. Members online follow. `force=False`: only backwards (brokers that move
        offsets themselves, which are CometMQ's and those since 5.2, always move).
        """
        return await admin_offsets.reset_offset(
            self.session, group, topic, to, queue=queue, force=force
        )

    # ------------------------------------------------------------------------------------------ kv

    async def get_kv(self, namespace: str, key: str) -> str | None:
        """A name server's entry; None if there is none."""
        return await admin_cluster.get_kv(self.session, namespace, key)

    async def list_kv(self, namespace: str) -> dict[str, str]:
        """All entries of a namespace."""
        return await admin_cluster.list_kv(self.session, namespace)

    async def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Write an entry to every name server."""
        await admin_cluster.put_kv(self.session, namespace, key, value)

    async def delete_kv(self, namespace: str, key: str) -> None:
        """Delete an entry from every name server."""
        await admin_cluster.delete_kv(self.session, namespace, key)
