"""The blocking Admin, for plain code and the command line.

Owns: handing calls to the background loop. One rule: the same names and methods as the asyncio
Admin, where each is described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from cometmq.client import admin as aio_admin
from cometmq.client.admin_asking import Moment
from cometmq.client.admin_groups import GroupOnBroker
from cometmq.client.admin_members import (
    Client,
    ConsumerProgress,
    ConsumerRunning,
    GroupConnections,
)
from cometmq.client.admin_offsets import Target
from cometmq.client.admin_topics import TopicOnBroker, TopicStats
from cometmq.client.background import background
from cometmq.client.received import ReceivedMessage
from cometmq.client.routes import Route
from cometmq.client.story import Story
from cometmq.message import MessageQueue, SendResult

if TYPE_CHECKING:
    from cometmq.client.keywords import OfAdmins


class Admin:
    """Looks at a cluster and changes it.

    >>> with Admin(namesrv="127.0.0.1:9876") as admin:
    ...     admin.create_topic("orders", queues=8)
    """

    def __init__(
        self, namesrv: str | Sequence[str] | None = None, **keywords: Unpack[OfAdmins]
    ) -> None:
        self._inner = aio_admin.Admin(namesrv, **keywords)

    def __repr__(self) -> str:
        return repr(self._inner).replace("<Admin", "<blocking Admin", 1)

    def __enter__(self) -> Admin:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        background.run(self._inner.start())

    def close(self) -> None:
        background.run(self._inner.close())

    def create_topic(
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
        return background.run(
            self._inner.create_topic(
                name,
                queues,
                read_queues=read_queues,
                write_queues=write_queues,
                cluster=cluster,
                brokers=brokers,
                perm=perm,
                order=order,
                attributes=attributes,
                wait=wait,
            )
        )

    def update_topic(
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
        brokers' names. An attribute whose value is None is taken away.
        """
        return background.run(
            self._inner.update_topic(
                name,
                queues,
                read_queues=read_queues,
                write_queues=write_queues,
                perm=perm,
                order=order,
                attributes=attributes,
                wait=wait,
            )
        )

    def delete_topic(self, name: str, *, cluster: str | None = None) -> list[str]:
        """Delete it with its messages' queues and all offsets; the brokers that had it."""
        return background.run(self._inner.delete_topic(name, cluster=cluster))

    def topics(self, *, with_system: bool = False) -> list[str]:
        """Names, sorted; `with_system`: also brokers' own, retry and dead letter topics."""
        return background.run(self._inner.topics(with_system=with_system))

    def topic(self, name: str) -> dict[str, TopicOnBroker]:
        """Its settings by broker."""
        return background.run(self._inner.topic(name))

    def topic_stats(self, name: str) -> TopicStats:
        """First and next offset and time of the last message of each queue."""
        return background.run(self._inner.topic_stats(name))

    def topic_route(self, name: str) -> Route:
        """Its brokers with their addresses, and the queues to send to and to read."""
        return background.run(self._inner.topic_route(name))

    def topic_groups(self, name: str) -> list[str]:
        """Groups that consume it or have."""
        return background.run(self._inner.topic_groups(name))

    def create_group(
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
        names. 4.9 knows neither `orderly`, `consume_timeout_minutes` nor `attributes`.
        """
        return background.run(
            self._inner.create_group(
                name,
                retry_max_times=retry_max_times,
                retry_queues=retry_queues,
                consume=consume,
                consume_broadcast=consume_broadcast,
                consume_from_min=consume_from_min,
                orderly=orderly,
                consume_timeout_minutes=consume_timeout_minutes,
                attributes=attributes,
                cluster=cluster,
                brokers=brokers,
            )
        )

    def update_group(
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
        names.
        """
        return background.run(
            self._inner.update_group(
                name,
                retry_max_times=retry_max_times,
                retry_queues=retry_queues,
                consume=consume,
                consume_broadcast=consume_broadcast,
                consume_from_min=consume_from_min,
                orderly=orderly,
                consume_timeout_minutes=consume_timeout_minutes,
                attributes=attributes,
            )
        )

    def delete_group(
        self,
        name: str,
        *,
        with_offsets: bool = True,
        with_topics: bool = True,
        cluster: str | None = None,
    ) -> list[str]:
        """Delete a group; the brokers that had it. `with_topics`: also its retry topic and its
        DEAD LETTERS, as mqadmin does.
        """
        return background.run(
            self._inner.delete_group(
                name, with_offsets=with_offsets, with_topics=with_topics, cluster=cluster
            )
        )

    def groups(self, *, with_system: bool = False) -> list[str]:
        """Names, sorted."""
        return background.run(self._inner.groups(with_system=with_system))

    def group(self, name: str) -> dict[str, GroupOnBroker]:
        """Its settings by broker."""
        return background.run(self._inner.group(name))

    def consumer_progress(
        self, group: str, topic: str | None = None, *, with_clients: bool = True
    ) -> ConsumerProgress:
        """How far a group is behind, in each queue. `with_clients`: ask the members too who reads
        what; those that don't answer in 3 s are left out.
        """
        return background.run(
            self._inner.consumer_progress(group, topic, with_clients=with_clients)
        )

    def consumer_connections(self, group: str) -> GroupConnections:
        """Members online and their subscriptions; RequestRefused with code 206 if nobody is."""
        return background.run(self._inner.consumer_connections(group))

    def producer_connections(self, group: str, topic: str | None = None) -> tuple[Client, ...]:
        """Producers online; RequestRefused with code 1 if there are none."""
        return background.run(self._inner.producer_connections(group, topic))

    def consumer_running_info(
        self, group: str, client_id: str, *, with_stacks: bool = False
    ) -> ConsumerRunning:
        """What one member tells of itself; `with_stacks`: with what its threads or tasks do."""
        return background.run(
            self._inner.consumer_running_info(group, client_id, with_stacks=with_stacks)
        )

    def clusters(self) -> dict[str, dict[str, dict[int, str]]]:
        """cluster -> broker -> broker id -> address; id 0 is the leader."""
        return background.run(self._inner.clusters())

    def broker_status(self, broker: str) -> dict[str, str]:
        """The broker's figures, all as text; `broker` is a name or `host:port`."""
        return background.run(self._inner.broker_status(broker))

    def broker_config(self, broker: str) -> dict[str, str]:
        """The broker's settings by RocketMQ's names."""
        return background.run(self._inner.broker_config(broker))

    def update_broker_config(
        self, settings: Mapping[str, str], broker: str | None = None, *, cluster: str | None = None
    ) -> list[str]:
        """Change settings of a broker, of a cluster's leaders, or of all leaders; their names."""
        return background.run(self._inner.update_broker_config(settings, broker, cluster=cluster))

    def name_server_config(self) -> dict[str, dict[str, str]]:
        """address -> settings, of every name server."""
        return background.run(self._inner.name_server_config())

    def update_name_server_config(self, settings: Mapping[str, str]) -> list[str]:
        """Change settings of every name server; their addresses."""
        return background.run(self._inner.update_name_server_config(settings))

    def wipe_write_perm(self, broker: str) -> dict[str, int]:
        """Nobody shall send to this broker any more; how many topics changed, by name server.
        Lasts until the broker's topics change.
        """
        return background.run(self._inner.wipe_write_perm(broker))

    def add_write_perm(self, broker: str) -> dict[str, int]:
        """Undo `wipe_write_perm`."""
        return background.run(self._inner.add_write_perm(broker))

    def message(self, message_id: str, topic: str | None = None) -> ReceivedMessage:
        """A message by either of its ids (`read_id` tells which it is). A unique id needs the
        topic; RequestRefused if there is no such message.
        """
        return background.run(self._inner.message(message_id, topic))

    def messages_by_key(
        self, topic: str, key: str, most: int = 64, *, begin: Moment = 0, end: Moment | None = None
    ) -> list[ReceivedMessage]:
        """Messages that have this key, oldest first; a broker gives at most 64."""
        return background.run(self._inner.messages_by_key(topic, key, most, begin=begin, end=end))

    def messages_by_time(
        self, topic: str, begin: Moment, end: Moment | None = None, *, most: int = 64
    ) -> list[ReceivedMessage]:
        """Messages stored from `begin` up to, not including, `end` (None: now), oldest first."""
        return background.run(self._inner.messages_by_time(topic, begin, end, most=most))

    def queue_messages(
        self,
        queue: MessageQueue,
        begin_offset: int | None = None,
        end_offset: int | None = None,
        *,
        most: int = 64,
    ) -> list[ReceivedMessage]:
        """A queue's messages from `begin_offset` (None: the first there is) up to, not including,
        `end_offset` (None: the end).
        """
        return background.run(
            self._inner.queue_messages(queue, begin_offset, end_offset, most=most)
        )

    def dead_letters(self, group: str, *, most: int = 64) -> list[ReceivedMessage]:
        """The newest dead letters of a group, the oldest of them first."""
        return background.run(self._inner.dead_letters(group, most=most))

    def resend_dead_letter(self, letter: ReceivedMessage | str, group: str) -> SendResult:
        """Send a dead letter (or the one with this id) to its original topic once more: same body,
        keys, tags, properties and unique id; ORIGIN_MESSAGE_ID and DLQ_RESENT_FROM tell where it
        came from. It stays among the dead letters. Every group of the topic gets it.
        """
        return background.run(self._inner.resend_dead_letter(letter, group))

    def story(
        self,
        message_id: str,
        topic: str | None = None,
        *,
        trace_topic: str = "RMQ_SYS_TRACE_TOPIC",
    ) -> Story:
        """One message's whole story, by either of its ids: sent, stored, delayed, given to whom and
        how often, acknowledged or dead, each with its time; from the trace and from what brokers
        store. `Story.unknown` says what can't be known. Without `topic` all are looked through.
        """
        return background.run(self._inner.story(message_id, topic, trace_topic=trace_topic))

    def committed_offsets(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """Where a group stands; queues without an offset are left out."""
        return background.run(self._inner.committed_offsets(group, topic))

    def reset_offset(
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
        return background.run(self._inner.reset_offset(group, topic, to, queue=queue, force=force))

    def get_kv(self, namespace: str, key: str) -> str | None:
        """A name server's entry; None if there is none."""
        return background.run(self._inner.get_kv(namespace, key))

    def list_kv(self, namespace: str) -> dict[str, str]:
        """All entries of a namespace."""
        return background.run(self._inner.list_kv(namespace))

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Write an entry to every name server."""
        background.run(self._inner.put_kv(namespace, key, value))

    def delete_kv(self, namespace: str, key: str) -> None:
        """Delete an entry from every name server."""
        background.run(self._inner.delete_kv(namespace, key))
