"""How a broker's registration becomes routes: the rules of REGISTER_BROKER.

Owns: who may take whose place, whose topics count, what is written; and how brokers leave. One
rule: what is refused has changed nothing; what is accepted is applied to the end, in slices.

A registration may be partial (one new topic), so a later one of the same address joins the work at
hand: the outcome is that of one after the other. One of another address, or under another id, ends
it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from cometmq.config import NameServerConfig
from cometmq.errors import RequestRefused
from cometmq.nameserver.names import check_header, check_topics
from cometmq.nameserver.routes import MASTER_ID, Broker, Key, Member, Routes
from cometmq.nameserver.slices import Slices, Work
from cometmq.nameserver.stats import Stats
from cometmq.ports import Out
from cometmq.requests import Call
from cometmq.wire.bodies import DataVersion, Registration
from cometmq.wire.codes import ResponseCode
from cometmq.wire.headers import RegisterBrokerHeader

log = logging.getLogger("cometmq.nameserver")

MAX_JOINED = 16  # registrations of one broker that wait for the same work; more are told to wait


class _Place(msgspec.Struct, frozen=True):
    """What a newcomer is among the addresses of its broker name."""

    is_first: bool
    """Nobody holds its id."""
    takes_topics: bool
    """Its topics count: it is the master, or the lowest id where followers may act for one."""
    holder: str | None


class Registrations:
    """Brokers come and go through here; Routes does what it is told."""

    def __init__(self, routes: Routes, stats: Stats) -> None:
        self._routes = routes
        self._stats = stats
        self.slices = Slices(routes, stats)

    def begin(
        self, call: Call, registered: Registration, zone: str | None, config: NameServerConfig
    ) -> Work | None:
        """Take a registration in; None if its place is held by a newer broker (answer success).

        The Work that comes back may be done already; if not, `slices.step` will return it later.
        """
        header: RegisterBrokerHeader = call.header
        try:
            check_header(header, zone, registered.filter_servers)
            check_topics(registered.topics, header.clusterName, header.brokerName)
            return self._begin(call, header, registered, zone, config)
        except RequestRefused as refused:
            self._stats.registrations_refused += 1
            log.warning(
                "registration refused conn=%s name=%r address=%r code=%d: %s",
                call.conn, header.brokerName[:80], header.brokerAddr[:80], refused.code,
                refused.remark,
            )  # fmt: skip
            raise

    def _begin(
        self,
        call: Call,
        header: RegisterBrokerHeader,
        registered: Registration,
        zone: str | None,
        config: NameServerConfig,
    ) -> Work | None:
        key = (header.clusterName, header.brokerAddr)
        self._check_cluster(header)
        if self._is_outranked(header, registered.version.stateVersion):
            holder = f"a broker with a newer stateVersion holds id {header.brokerId}"
            log.warning(
                "registration ignored name=%s address=%s: %s", header.brokerName, key[1], holder
            )
            self.leave([key], holder, call.out)
            return None
        place = self._place(header)
        if place.is_first and len(registered.topics) == 1:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"register broker failed: broker {header.brokerName} id {header.brokerId} is not "
                "known yet, and its first registration must tell all its topics, not one",
            )
        self._check_limits(key, place, registered.topics, config)
        joined = self._work_to_join(header, place, config)

        # Nothing has changed up to here; from here on nothing is refused.
        former_version = self._clear_place(call, header, place, joined)
        broker = self._seat(call, header, place, registered, config)
        broker.zone = zone
        can_write = header.brokerId == MASTER_ID or not broker.is_acting_enabled
        if joined is not None:
            self.slices.join(joined, call, registered, can_write=can_write)
            return joined
        work = Work(
            key=key,
            name=broker.name,
            broker_id=header.brokerId,
            calls=[call],
            version=registered.version,
            can_write=can_write,
        )
        if not place.takes_topics:
            self._routes.members[key].version = registered.version
            self._stats.registrations += 1
            return work
        work.topics = registered.topics
        if config.deletes_missing_topics:
            work.missing = [topic for topic in broker.topics if topic not in work.topics]
        if place.is_first or former_version != registered.version:
            work.pending = list(work.topics)
        else:
            work.pending = [topic for topic in work.topics if topic not in broker.topics]
        self.slices.start(work)
        return work

    def _place(self, header: RegisterBrokerHeader) -> _Place:
        """What this address would be among its kin, were it let in."""
        broker = self._routes.brokers.get(header.brokerName)
        held: dict[int, str] = {}
        if broker is not None and broker.cluster == header.clusterName:
            held = broker.addresses
        others = [number for number, address in held.items() if address != header.brokerAddr]
        is_lowest = all(header.brokerId <= number for number in others)
        knows_acting = header.enableActingMaster is not None  # absent before 5.0
        return _Place(
            is_first=header.brokerId not in held,
            takes_topics=header.brokerId == MASTER_ID or (knows_acting and is_lowest),
            holder=held.get(header.brokerId),
        )

    def _clear_place(
        self, call: Call, header: RegisterBrokerHeader, place: _Place, joined: Work | None
    ) -> DataVersion | None:
        """End what contradicts the newcomer; the version of the topics it had told before."""
        key, name = (header.clusterName, header.brokerAddr), header.brokerName
        strangers = self._former_selves(key, name)
        if strangers:
            self.leave(strangers, f"{key[1]} is now broker {name} of {key[0]}", call.out)
        self.slices.cancel(
            lambda work: (
                work.name == name
                and work is not joined
                and (place.takes_topics or work.key == key or work.key[1] == place.holder)
            ),
            "a newer registration took its place",
            call.out,
        )
        former = self._routes.members.get(key)
        return former.version if former is not None else None

    def _seat(
        self,
        call: Call,
        header: RegisterBrokerHeader,
        place: _Place,
        registered: Registration,
        config: NameServerConfig,
    ) -> Broker:
        timeout_ms = header.heartbeatTimeoutMillis
        member = Member(
            name=header.brokerName,
            conn=call.conn,
            seen_ms=call.now_ms,
            timeout_ms=timeout_ms if timeout_ms and timeout_ms > 0 else config.broker_expiry_ms,
            state_version=registered.version.stateVersion,
            version=None,
            ha_address=header.haServerAddr or None,
            filter_servers=registered.filter_servers,
        )
        key = (header.clusterName, header.brokerAddr)
        broker = self._routes.join(key, header.brokerName, header.brokerId, member)
        broker.is_acting_enabled = bool(header.enableActingMaster)
        if place.is_first:
            log.info(
                "broker joined conn=%s cluster=%s name=%s id=%d address=%s topics=%d",
                call.conn, key[0], broker.name, header.brokerId, key[1], len(registered.topics),
            )  # fmt: skip
        return broker

    # ------------------------------------------------------------------------- before a change

    def _check_cluster(self, header: RegisterBrokerHeader) -> None:
        """A broker name belongs to one cluster; two would overwrite each other's routes."""
        broker = self._routes.brokers.get(header.brokerName)
        if broker is None or broker.cluster == header.clusterName:
            return
        others = [one for one in broker.addresses.values() if one != header.brokerAddr]
        if others:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"broker name {header.brokerName!r} is in use in cluster {broker.cluster!r} by "
                f"{others[0]}; choose another brokerName for cluster {header.clusterName!r}",
            )

    def _is_outranked(self, header: RegisterBrokerHeader, state_version: int) -> bool:
        """Another address holds this id with a greater stateVersion."""
        broker = self._routes.brokers.get(header.brokerName)
        holder = broker.addresses.get(header.brokerId) if broker is not None else None
        if holder is None or holder == header.brokerAddr:
            return False
        member = self._routes.members.get((header.clusterName, holder))
        return member is not None and member.state_version > state_version

    def _check_limits(
        self, key: Key, place: _Place, topics: Collection[str], config: NameServerConfig
    ) -> None:
        members = self._routes.members
        is_more = place.is_first and key not in members
        if is_more and len(members) >= config.max_brokers:
            self._stats.over_max_brokers += 1
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"{len(members)} brokers are registered, the most that "
                f"maxBrokers={config.max_brokers} allows",
            )
        if place.takes_topics:
            self.check_topic_room(topics, config)

    def check_topic_room(self, topics: Collection[str], config: NameServerConfig) -> None:
        """RequestRefused if these topics, with those still being applied, pass the limit."""
        known = self._routes.topics
        unfinished = list(self.slices.pending())
        if len(known) + len(topics) + sum(map(len, unfinished)) <= config.max_topics:
            return  # even if none of them were known: no need to look
        fresh = {topic for topic in topics if topic not in known}
        if not fresh:
            return
        for pending in unfinished:
            fresh.update(topic for topic in pending if topic not in known)
        if len(known) + len(fresh) > config.max_topics:
            self._stats.over_max_topics += 1
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"{len(known)} topics are registered and {len(fresh)} more would pass "
                f"maxTopics={config.max_topics}",
            )

    def _former_selves(self, key: Key, name: str) -> list[Key]:
        """Registrations of this very address under another name or cluster."""
        found = []
        member = self._routes.members.get(key)
        if member is not None and member.name != name:
            found.append(key)
        broker = self._routes.brokers.get(name)
        if broker is not None and broker.cluster != key[0]:
            found.append((broker.cluster, key[1]))
        return found

    def _work_to_join(
        self, header: RegisterBrokerHeader, place: _Place, config: NameServerConfig
    ) -> Work | None:
        """The unfinished work of the same address; none where each payload is the whole truth."""
        work = self.slices.get(header.brokerName)
        if work is None or not place.takes_topics or config.deletes_missing_topics:
            return None
        key = (header.clusterName, header.brokerAddr)
        if (work.key, work.broker_id) != (key, header.brokerId):
            return None
        if len(work.calls) >= MAX_JOINED:
            raise RequestRefused(
                ResponseCode.SYSTEM_BUSY,
                f"{len(work.calls)} registrations of {work.name} are still being applied",
            )
        return work

    # ---------------------------------------------------------------------------------- leaving

    def leave(self, keys: list[Key], reason: str, out: Out) -> None:
        """These addresses are gone; what was being applied for them is dropped and answered."""
        self.slices.cancel(lambda work: work.key in keys, reason, out)
        for key in keys:
            member = self._routes.members.get(key)
            if member is not None:
                log.info(
                    "broker left cluster=%s name=%s address=%s: %s", key[0], member.name, key[1],
                    reason,
                )  # fmt: skip
        self._routes.leave(keys)
