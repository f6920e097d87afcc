"""Telling name servers that we are here.

Owns: one long-lived connection to each name server, registration at start, every 30 s and after
each topic change, and the goodbye. One rule: a name server that can't be reached never blocks the
broker; it is dialled again, and the first thing on a new connection is a full registration
(name servers tie a broker to the connection that registered it).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from cometmq.errors import BodyError
from cometmq.ports import NEVER_MS, ConnId, Dial, Out, Send
from cometmq.wire import bodies, headers
from cometmq.wire.bodies import Registration, TopicConfig
from cometmq.wire.codes import Perm, RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame
from cometmq.wire.hashing import body_crc

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

REDIAL_MS = 1_000
SECOND_REGISTRATION_MS = 10_000


class _Asked(msgspec.Struct):
    what: str
    until_ms: int
    ticket: int
    topic: str = ""


class _NameServer(msgspec.Struct):
    address: str
    conn: ConnId | None = None
    is_dialling: bool = False
    dial_ms: int = 0
    register_ms: int = NEVER_MS
    is_registered: bool = False
    failures: int = 0
    asked: dict[int, _Asked] = {}


class NameServers:
    """The broker's side of its name servers."""

    def __init__(self, addresses: list[str]) -> None:
        self._servers = [_NameServer(address) for address in addresses]
        self._by_conn: dict[ConnId, _NameServer] = {}
        self._opaque = 0
        self._ticket = 0
        self._is_leaving = False
        self.registrations = 0
        self.failed_registrations = 0

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self._servers]

    @property
    def has_registered(self) -> bool:
        """Every name server knows us (or there is none)."""
        return all(server.is_registered for server in self._servers)

    @property
    def has_tried(self) -> bool:
        """Each name server has answered or failed at least once."""
        return all(server.is_registered or server.failures for server in self._servers)

    @property
    def has_left(self) -> bool:
        """Every goodbye was answered, or there is nobody to wait for."""
        return self._is_leaving and not any(
            asked.what == "unregister"
            for server in self._servers
            for asked in server.asked.values()
        )

    @property
    def next_ms(self) -> int:
        moments = [NEVER_MS]
        for server in self._servers:
            if server.conn is None and not server.is_dialling and not self._is_leaving:
                moments.append(server.dial_ms)
            if server.conn is not None and not self._is_leaving:
                moments.append(server.register_ms)
            moments.extend(asked.until_ms for asked in server.asked.values())
        return min(moments)

    # ------------------------------------------------------------------------------ events

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        for server in self._servers:
            for opaque in [o for o, asked in server.asked.items() if asked.until_ms <= now_ms]:
                asked = server.asked.pop(opaque)
                if asked.what == "route":
                    continue  # who waits for it gives up by itself
                self._failed(server, f"{asked.what} not answered in time", now_ms)
            if self._is_leaving:
                continue
            if server.conn is None and not server.is_dialling and server.dial_ms <= now_ms:
                server.is_dialling = True
                out.append(Dial(server.address))
            if server.conn is not None and server.register_ms <= now_ms:
                self._register_all(broker, server, now_ms, out)

    def opened(self, broker: Broker, conn: ConnId, address: str, now_ms: int, out: Out) -> bool:
        """A connection we dialled; True if it is one of ours."""
        for server in self._servers:
            if server.address == address and server.is_dialling:
                server.is_dialling = False
                server.conn = conn
                self._by_conn[conn] = server
                self._register_all(broker, server, now_ms, out)
                server.register_ms = now_ms + SECOND_REGISTRATION_MS
                return True
        return False

    def dial_failed(self, address: str, reason: str, now_ms: int) -> None:
        for server in self._servers:
            if server.address == address and server.is_dialling:
                server.is_dialling = False
                server.dial_ms = now_ms + REDIAL_MS
                self._failed(server, f"TCP connect failed: {reason}", now_ms)

    def closed(self, conn: ConnId, now_ms: int) -> bool:
        """True if the connection was to a name server."""
        server = self._by_conn.pop(conn, None)
        if server is None:
            return False
        server.conn = None
        server.is_registered = False
        server.asked.clear()
        server.register_ms = NEVER_MS
        server.dial_ms = now_ms + REDIAL_MS
        if not self._is_leaving:
            log.warning("name server connection lost address=%s", server.address)
        return True

    def answered(self, broker: Broker, conn: ConnId, frame: Frame, now_ms: int, out: Out) -> None:
        server = self._by_conn.get(conn)
        asked = None if server is None else server.asked.pop(frame.opaque, None)
        if server is None or asked is None:
            return
        if asked.what == "unregister":
            server.is_registered = False
            return
        if asked.what == "route":
            broker.pop.modes.answered(broker, asked.topic, frame, now_ms, out)
            return
        if frame.code != ResponseCode.SUCCESS:
            self._failed(server, f"code {frame.code}: {frame.remark}", now_ms)
            if asked.what == "some topics":  # it does not know us (any more): tell everything
                self._register_all(broker, server, now_ms, out)
            return
        self.registrations += 1
        if asked.what == "all topics":
            if not server.is_registered:
                log.info(
                    "registered namesrv=%s topics=%d", server.address, len(broker.topics.table)
                )
            server.is_registered = True
            server.failures = 0
            self._take_order_topics(broker, frame, now_ms)

    def _take_order_topics(self, broker: Broker, frame: Frame, now_ms: int) -> None:
        if not frame.body:
            return
        try:
            table = bodies.drop_nulls(bodies.load_object(frame.body, "order config").get("table"))
        except BodyError as error:
            log.warning("order config of the name server is unreadable: %s", error)
            return
        broker.topics.mark_ordered(set(table), now_ms)

    def _failed(self, server: _NameServer, reason: str, now_ms: int) -> None:
        server.failures += 1
        self.failed_registrations += 1
        if server.failures == 1 or server.failures % 30 == 0:
            log.warning(
                "registration failed namesrv=%s tries=%d: %s. Clients can't find this broker "
                "through it; it is tried again",
                server.address,
                server.failures,
                reason,
            )

    # ------------------------------------------------------------------------------ asking

    def register_topics(
        self, broker: Broker, topics: list[TopicConfig], now_ms: int, out: Out
    ) -> int:
        """Tell every name server of some topics; returns a ticket for `told_upto`."""
        self._ticket += 1
        table = {topic.topicName: topic for topic in topics}
        for server in self._servers:
            if server.conn is not None:
                self._register(broker, server, table, "some topics", now_ms, out)
        return self._ticket

    def register_everything(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Tell every name server the whole table, now."""
        for server in self._servers:
            if server.conn is not None:
                self._register_all(broker, server, now_ms, out)

    @property
    def told_upto(self) -> int:
        """The last ticket that no name server owes an answer to, nor to any before it."""
        owed = (
            asked.ticket - 1
            for server in self._servers
            for asked in server.asked.values()
            if asked.what not in ("unregister", "route")
        )
        return min(owed, default=self._ticket)

    def ask_route(self, topic: str, until_ms: int, out: Out) -> bool:
        """Ask a name server where a topic is; False if none is there to be asked."""
        for server in self._servers:
            if server.conn is not None and server.is_registered and not self._is_leaving:
                ext = {"topic": topic, "acceptStandardJsonOnly": "true"}
                frame = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext=ext)
                self._ask(server, frame, _Asked("route", until_ms, self._ticket, topic), out)
                return True
        return False

    def leave(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Say goodbye to every name server."""
        self._is_leaving = True
        config = broker.config
        for server in self._servers:
            if server.conn is None:
                continue
            header = headers.BrokerIdentityHeader(
                config.name, broker.address, config.cluster, config.broker_id
            )
            self._ask(
                server,
                Frame(RequestCode.UNREGISTER_BROKER, ext=headers.to_ext(header)),
                _Asked("unregister", now_ms + 1_000, self._ticket),
                out,
            )

    def _register_all(self, broker: Broker, server: _NameServer, now_ms: int, out: Out) -> None:
        server.register_ms = now_ms + broker.config.register_period_ms
        self._register(broker, server, broker.topics.table, "all topics", now_ms, out)

    def _register(
        self,
        broker: Broker,
        server: _NameServer,
        topics: dict[str, TopicConfig],
        what: str,
        now_ms: int,
        out: Out,
    ) -> None:
        if self._is_leaving:
            return
        config = broker.config
        allowed = config.permission
        if allowed & (Perm.READ | Perm.WRITE) != Perm.READ | Perm.WRITE:
            topics = {
                name: msgspec.structs.replace(topic, perm=topic.perm & allowed)
                for name, topic in topics.items()
            }
        body = bodies.encode_registration(Registration(broker.topics.version, topics))
        header = headers.RegisterBrokerHeader(
            brokerName=config.name,
            brokerAddr=broker.address,
            clusterName=config.cluster,
            brokerId=config.broker_id,
            haServerAddr=broker.ha_address,
            bodyCrc32=body_crc(body),
        )
        self._ask(
            server,
            Frame(RequestCode.REGISTER_BROKER, ext=headers.to_ext(header), body=body),
            _Asked(what, now_ms + config.register_timeout_ms, self._ticket),
            out,
        )

    def _ask(self, server: _NameServer, frame: Frame, asked: _Asked, out: Out) -> None:
        assert server.conn is not None
        self._opaque += 1
        frame.opaque = self._opaque
        server.asked[frame.opaque] = asked
        out.append(Send(server.conn, encode_frame(frame)))
