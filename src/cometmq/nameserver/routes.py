"""Where topics live: topics, brokers, clusters, and which broker addresses are alive.

Owns: the four tables and every change to them. One rule: a topic names a broker exactly when that
broker's own `topics` names the topic, so that a leaving broker costs its own topics and not a walk
over all. What a request looks like, which registration may change what, and the clock are not known
here. Order everywhere is order of arrival (never of sets), so equal inputs give equal bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from cometmq.ports import ConnId
from cometmq.wire.bodies import DataVersion, TopicConfig
from cometmq.wire.codes import Perm

log = logging.getLogger("cometmq.nameserver")

MASTER_ID = 0
READ, WRITE = int(Perm.READ), int(Perm.WRITE)  # plain ints: `~Perm.WRITE` drops unnamed bits
Key = tuple[str, str]
"""A broker process: (cluster, host:port)."""

UNIT = 1  # topicSysFlag: the topic is of a unit (TopicSysFlag.java)
UNIT_SUB = 2  # topicSysFlag: it is subscribed across units


class Queues(msgspec.Struct, frozen=True, gc=False):
    """One topic on one broker (QueueData)."""

    broker: str
    read_count: int
    write_count: int
    perm: int
    sys_flag: int

    def view(self) -> dict[str, object]:
        return {
            "brokerName": self.broker,
            "perm": self.perm,
            "readQueueNums": self.read_count,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_count,
        }


class Broker(msgspec.Struct):
    """A broker name and the addresses that share it (BrokerData)."""

    cluster: str
    name: str
    addresses: dict[int, str]
    topics: dict[str, None]
    is_acting_enabled: bool = False
    """A surviving follower may serve reads in the leader's place."""
    zone: str | None = None

    @property
    def has_master(self) -> bool:
        return MASTER_ID in self.addresses

    def view(self) -> dict[str, object]:
        view: dict[str, object] = {
            "brokerAddrs": {number: self.addresses[number] for number in sorted(self.addresses)},
            "brokerName": self.name,
            "cluster": self.cluster,
            "enableActingMaster": self.is_acting_enabled,
        }
        if self.zone is not None:
            view["zoneName"] = self.zone
        return view


class Member(msgspec.Struct):
    """One live broker process (BrokerLiveInfo)."""

    name: str
    conn: ConnId
    """The connection that carried its last registration; it dies with it."""
    seen_ms: int
    timeout_ms: int
    state_version: int
    version: DataVersion | None
    """Of the topics applied to the end; None while a registration is being applied."""
    ha_address: str | None
    filter_servers: tuple[str, ...]


class Routes:
    """The tables."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Queues]] = {}
        self.brokers: dict[str, Broker] = {}
        self.clusters: dict[str, dict[str, None]] = {}
        self.members: dict[Key, Member] = {}
        self._keys_of_conn: dict[ConnId, dict[Key, None]] = {}

    # ------------------------------------------------------------------------------- brokers

    def join(self, key: Key, name: str, broker_id: int, member: Member) -> Broker:
        """Put an address in its place, and out of any other place under the same name."""
        cluster, address = key
        broker = self.brokers.get(name)
        if broker is None:
            broker = self.brokers[name] = Broker(cluster, name, {}, {})
            self.clusters.setdefault(cluster, {})[name] = None
        assert broker.cluster == cluster
        assert member.name == name
        for number in [n for n, held in broker.addresses.items() if held == address]:
            if number != broker_id:
                del broker.addresses[number]
        displaced = broker.addresses.get(broker_id)
        broker.addresses[broker_id] = address
        if displaced is not None and displaced != address:
            self._forget_member((cluster, displaced))
            log.info("broker replaced name=%s id=%d %s -> %s", name, broker_id, displaced, address)
        self._forget_member(key)
        self.members[key] = member
        self._keys_of_conn.setdefault(member.conn, {})[key] = None
        return broker

    def leave(self, keys: Iterable[Key]) -> None:
        """Take these addresses out together; a broker without any address goes with its topics."""
        gone: dict[str, Broker] = {}
        reduced: dict[str, Broker] = {}
        for key in keys:
            member = self._forget_member(key)
            broker = self.brokers.get(member.name) if member is not None else None
            if broker is None:
                continue
            for number in [n for n, held in broker.addresses.items() if held == key[1]]:
                del broker.addresses[number]
            if broker.addresses:
                reduced[broker.name] = broker
            else:
                gone[broker.name] = broker
                reduced.pop(broker.name, None)
                self._forget_broker(broker)
        for broker in gone.values():
            for topic in broker.topics:
                self._take_out(topic, broker.name)
        for broker in reduced.values():
            if broker.is_acting_enabled and not broker.has_master:
                self.wipe_write(broker.name)

    def _forget_broker(self, broker: Broker) -> None:
        del self.brokers[broker.name]
        names = self.clusters[broker.cluster]
        del names[broker.name]
        if not names:
            del self.clusters[broker.cluster]

    def _forget_member(self, key: Key) -> Member | None:
        member = self.members.pop(key, None)
        if member is not None:
            keys = self._keys_of_conn[member.conn]
            del keys[key]
            if not keys:
                del self._keys_of_conn[member.conn]
        return member

    def keys_of(self, conn: ConnId) -> list[Key]:
        """The brokers whose last registration came over this connection."""
        return list(self._keys_of_conn.get(conn, ()))

    def expired(self, now_ms: int) -> list[Key]:
        return [key for key, one in self.members.items() if one.seen_ms + one.timeout_ms < now_ms]

    def master_of(self, key: Key) -> tuple[str, str | None] | None:
        """(address, replication address) of the live master it follows; None for a master."""
        member = self.members.get(key)
        broker = self.brokers.get(member.name) if member is not None else None
        if broker is None or not broker.has_master:
            return None
        address = broker.addresses[MASTER_ID]
        master = self.members.get((broker.cluster, address))
        if master is None or address == key[1]:
            return None
        return address, master.ha_address

    # -------------------------------------------------------------------------------- topics

    def put(self, topic: str, broker: Broker, config: TopicConfig, *, can_write: bool) -> None:
        """What one broker says of one topic."""
        perm = config.perm if can_write else config.perm & ~WRITE
        self.put_queues(
            topic,
            broker,
            Queues(
                broker.name, config.readQueueNums, config.writeQueueNums, perm, config.topicSysFlag
            ),
        )

    def put_queues(self, topic: str, broker: Broker, queues: Queues) -> None:
        table = self.topics.get(topic)
        if table is None:
            self.topics[topic] = {broker.name: queues}
        else:
            table[broker.name] = queues
        broker.topics[topic] = None

    def remove(self, topic: str, broker: Broker) -> None:
        """One broker has this topic no longer."""
        if topic in broker.topics:
            del broker.topics[topic]
            self._take_out(topic, broker.name)

    def _take_out(self, topic: str, name: str) -> None:
        table = self.topics[topic]
        del table[name]
        if not table:
            del self.topics[topic]

    def delete_topic(self, topic: str, cluster: str | None) -> int:
        """Forget a topic, everywhere or in one cluster; how many brokers had it."""
        names = [
            name
            for name in self.topics.get(topic, ())
            if cluster is None or self.brokers[name].cluster == cluster
        ]
        for name in names:
            self.remove(topic, self.brokers[name])
        return len(names)

    def wipe_write(self, name: str) -> int:
        """Nobody shall send to this broker any more; how many topics were touched."""
        return self._set_perm(name, lambda perm: perm & ~WRITE)

    def add_write(self, name: str) -> int:
        return self._set_perm(name, lambda perm: READ | WRITE)

    def _set_perm(self, name: str, change: Callable[[int], int]) -> int:
        broker = self.brokers.get(name)
        if broker is None:
            return 0
        for topic in broker.topics:
            table = self.topics[topic]
            queues = table[name]
            table[name] = msgspec.structs.replace(queues, perm=change(queues.perm))
        return len(broker.topics)

    # --------------------------------------------------------------------------------- views

    def route(self, topic: str, zone: str | None = None) -> dict[str, object] | None:
        """TopicRouteData; with a zone only its brokers, and those that have no master."""
        table = self.topics.get(topic)
        if table is None:
            return None
        brokers = [self.brokers[name] for name in table]
        if zone is not None:
            brokers = [
                one
                for one in brokers
                if not one.has_master or (one.zone or "").lower() == zone.lower()
            ]
        servers: dict[str, list[str]] = {}
        for broker in brokers:
            for address in broker.addresses.values():
                member = self.members.get((broker.cluster, address))
                if member is not None and member.filter_servers:
                    servers[address] = list(member.filter_servers)
        return {
            "brokerDatas": [one.view() for one in brokers],
            "filterServerTable": servers,
            "queueDatas": [table[one.name].view() for one in brokers],
        }

    def cluster_view(self) -> dict[str, object]:
        """ClusterInfo."""
        return {
            "brokerAddrTable": {name: one.view() for name, one in self.brokers.items()},
            "clusterAddrTable": {name: list(names) for name, names in self.clusters.items()},
        }

    def topics_of_cluster(self, cluster: str) -> list[str]:
        found: dict[str, None] = {}
        for name in self.clusters.get(cluster, ()):
            found.update(self.brokers[name].topics)
        return list(found)

    def topics_by_flag(self, *, unit: bool | None, sub: bool | None) -> list[str]:
        """Topics whose first broker's flags say so; None: either."""
        found = []
        for topic, table in self.topics.items():
            flag = next(iter(table.values())).sys_flag
            if unit in (None, bool(flag & UNIT)) and sub in (None, bool(flag & UNIT_SUB)):
                found.append(topic)
        return found
