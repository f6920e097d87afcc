"""The name server: tells clients where topics live, and learns it from brokers.

Owns: the life of the core (time, connections, shutdown) and the parts it is made of; what each
request does is in requests.py. One rule: a broker is here as long as the connection of its last
registration is, and as long as it is heard of; the moment either ends, its routes end.
"""

from __future__ import annotations

import logging

from cometmq.config import NameServerConfig
from cometmq.nameserver.registration import Registrations
from cometmq.nameserver.requests import TABLE
from cometmq.nameserver.routes import Routes
from cometmq.nameserver.settings import FILE_NAME, ORDER_TOPICS, Settings
from cometmq.nameserver.slices import Work
from cometmq.nameserver.stats import Stats
from cometmq.ports import Close, ConnId, Out, Peer
from cometmq.requests import Call, Reply, ServeStats, serve
from cometmq.wire.codes import ResponseCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import RegisterBrokerResponse, to_ext

log = logging.getLogger("cometmq.nameserver")


class NameServer:
    """ports.Core for a name server; `kv_content` is what kvConfig.json held."""

    def __init__(self, config: NameServerConfig, kv_content: bytes | None) -> None:
        self.config = config
        self.stats = Stats()
        self.serve_stats = ServeStats()
        self.routes = Routes()
        self.registrations = Registrations(self.routes, self.stats)
        self.settings = Settings(kv_content, config.max_kv_entries, self.stats)
        self.deadline_ms = 0
        self._next_scan_ms = 0
        self._is_stopping = False

    # ------------------------------------------------------------------------------- requests

    def handle(self, conn: ConnId, frame: Frame, waited_ms: int, now_ms: int, out: Out) -> None:
        if frame.is_response:
            return  # we ask nobody; answering an answer could go back and forth for ever
        if self._is_stopping:
            remark = "the name server is shutting down; ask another"
            call = Call(conn, frame, None, waited_ms, now_ms, out)
            call.answer(Reply(ResponseCode.SERVICE_NOT_AVAILABLE, remark), out)
            return
        serve(self, TABLE, conn, frame, waited_ms, now_ms, out, self.serve_stats)
        self._plan(now_ms)

    def receive(self, conn: ConnId, data: bytes, now_ms: int, out: Out) -> tuple[int, int]:
        return 0, 0  # nothing here is worth a path of its own

    def settle(self, now_ms: int, out: Out) -> None:
        self.settings.ask(out)

    def finish(self, work: Work, out: Out) -> None:
        """A registration is in: tell the broker its master and the order topics."""
        assert work.is_done
        header = RegisterBrokerResponse()
        master = self.routes.master_of(work.key)
        if master is not None:
            header = RegisterBrokerResponse(haServerAddr=master[1], masterAddr=master[0])
        reply = Reply(ext=to_ext(header), body=self.order_topics())
        for call in work.calls:
            call.answer(reply, out)

    def order_topics(self) -> bytes:
        """What a registering broker is told of order topics; empty if nothing."""
        if not self.config.returns_order_topics:
            return b""
        return self.settings.listing(ORDER_TOPICS) or b""

    # -------------------------------------------------------------------- connections and time

    def opened(self, conn: ConnId, peer: Peer, now_ms: int, out: Out) -> None:
        """Nothing is known of a connection until it registers a broker."""

    def closed(self, conn: ConnId, now_ms: int, out: Out) -> None:
        keys = self.routes.keys_of(conn)
        if keys:
            self.stats.brokers_disconnected += len(keys)
            self.registrations.leave(keys, f"connection {conn} closed", out)
            self._plan(now_ms)

    def tick(self, now_ms: int, out: Out) -> None:
        work = self.registrations.slices.step()
        if work is not None:
            self.finish(work, out)
        if now_ms >= self._next_scan_ms:
            self._next_scan_ms = now_ms + self.config.scan_interval_ms
            self._expire(now_ms, out)
            if not self._is_stopping:
                self.settings.retry()
                self.settings.ask(out)
        self._plan(now_ms)

    def _expire(self, now_ms: int, out: Out) -> None:
        """Drop the silent, all at once; and their connections, unless another broker is on it."""
        keys = self.routes.expired(now_ms)
        if not keys:
            return
        conns = dict.fromkeys(self.routes.members[key].conn for key in keys)
        self.stats.brokers_expired += len(keys)
        self.registrations.leave(keys, "not heard of for too long", out)
        for conn in conns:
            if not self.routes.keys_of(conn):
                out.append(Close(conn, "its broker was not heard of for too long"))

    def _plan(self, now_ms: int) -> None:
        self.deadline_ms = now_ms if self.registrations.slices else self._next_scan_ms

    def stalled(self, duration_ms: int, now_ms: int, out: Out) -> None:
        """Heartbeats lie unread after a stall of ours: hear them before judging the silent."""
        if duration_ms >= self.config.scan_interval_ms:
            self._next_scan_ms = max(self._next_scan_ms, now_ms + self.config.scan_interval_ms)
            self._plan(now_ms)

    # -------------------------------------------------------------------------------- outcomes

    def saved(self, name: str, reason: str | None, now_ms: int, out: Out) -> None:
        assert name == FILE_NAME
        self.settings.saved(reason, out)
        self.settings.ask(out)

    def dial_failed(self, address: str, reason: str, now_ms: int, out: Out) -> None:
        """We dial nobody."""

    def flushed(self, kind: str, now_ms: int, out: Out) -> None:
        """We flush nothing."""

    def flush_failed(self, kind: str, reason: str, now_ms: int, out: Out) -> None:
        """We flush nothing."""

    # -------------------------------------------------------------------------------- shutdown

    def stop(self, now_ms: int, out: Out) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self.registrations.slices.cancel(lambda work: True, "the name server is shutting down", out)
        self.settings.retry()
        self.settings.ask(out)
        self._plan(now_ms)
        log.info("name server stopping brokers=%d", len(self.routes.members))

    @property
    def is_stopped(self) -> bool:
        return self._is_stopping and self.settings.is_saved

    def close(self, now_ms: int) -> None:
        """Nothing is open."""
