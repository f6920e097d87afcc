"""The Broker: a core that the driver runs (see ports.Core).

Owns: the broker's state, who waits for what, and the order of things in a turn. One rule: handlers
decide and change state at once; everything that must be waited for (flush, save, a name server's
answer) parks the reply here, and the reply leaves when the last of them has come.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Protocol, cast

import msgspec

from cometmq.broker import heartbeat, names, pull, ttl
from cometmq.broker.dedup import Dedup
from cometmq.broker.delay import Delay
from cometmq.broker.expired import Expired
from cometmq.broker.group_configs import GroupConfigs
from cometmq.broker.half import Half
from cometmq.broker.holds import Holds
from cometmq.broker.locks import QueueLocks
from cometmq.broker.members import Members
from cometmq.broker.offsets import Offsets
from cometmq.broker.pop_state import Pop
from cometmq.broker.registration import NameServers
from cometmq.broker.requests import TABLE
from cometmq.broker.sequences import Sequences
from cometmq.broker.sql_filters import SqlFilters
from cometmq.broker.state import StateFile
from cometmq.broker.stats import Stats, Traffic
from cometmq.broker.teach import Teacher
from cometmq.broker.timers import FLUSH, Timers
from cometmq.broker.topics import Topics
from cometmq.broker.watches import Watches
from cometmq.config import BrokerConfig
from cometmq.message import NewMessage
from cometmq.ports import NEVER_MS, Close, ConnId, Out, Peer, Send
from cometmq.requests import Call, Reply, ServeStats, serve
from cometmq.store.layout import StoreConfig
from cometmq.store.results import Appended
from cometmq.store.state_files import load_state
from cometmq.store.store import Store
from cometmq.store.timer_wheel import WHEEL_SLOTS
from cometmq.wire import message_id, properties
from cometmq.wire.bodies import DataVersion, GroupConfig, TopicConfig
from cometmq.wire.codes import Perm, ResponseCode
from cometmq.wire.frame import Frame, FrameReader, decode_frame, encode_frame, frame_at, reply_to

log = logging.getLogger("cometmq.broker")

BIRTH_WAIT_MS = 2_000  # how long a send waits for name servers to hear of its new topic
EXPIRY_SCAN_MS = 10_000
WHOLE_TICK_MS = 500  # ticks for messages that wait alone come in between
MOST_MIXED = 64  # frames of one read that may stand between ordinary ones; the rest waits its turn


class _Parked(msgspec.Struct, eq=False):
    """A send whose message is in the log but not on disk yet."""

    end_offset: int
    until_ms: int
    call: Call
    reply: Reply
    topic: str


class _ParkedAcks(msgspec.Struct, eq=False):
    """Answers to sends of the compiled path, whole frames, of messages not on disk yet."""

    end_offset: int
    until_ms: int
    conn: ConnId
    acks: bytes


class _Birth(msgspec.Struct, eq=False):
    """A new topic that is not yet saved and not yet known to all name servers."""

    generation: int
    ticket: int
    until_ms: int
    waiting: list[tuple[Call, Reply]] = []


class _Forwarded(msgspec.Struct, eq=False):
    """A request passed on to a client. Its answer goes back to who asked; or, if there is a `reply`
    already, that goes once the client has said yes."""

    call: Call
    conn: ConnId
    until_ms: int
    reply: Reply | None = None


class Part(Protocol):
    """Something in a broker that works by itself when its time comes."""

    @property
    def files(self) -> list[StateFile]:
        """What it keeps in config/."""

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        """When it next has something to do; asked after every turn that changed anything."""

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None: ...


class Identity(msgspec.Struct, frozen=True):
    """Where and who this broker is: its advertised address, and what makes its ids unique."""

    host: str
    port: int
    pid: int = 0
    node: int = 0


class Broker:
    """One broker. `store` is open; config files are read through its Files."""

    def __init__(
        self,
        config: BrokerConfig,
        identity: Identity,
        store: Store,
        now_ms: int,
        *,
        timer_slots: int = WHEEL_SLOTS,
    ) -> None:
        self.config = config
        self.config_version = DataVersion(timestamp=now_ms)
        self.identity = identity
        self.store = store
        self.store_host = message_id.pack_host(identity.host, identity.port)
        self.address = _address(identity.host, identity.port)
        self.ha_address = _address(identity.host, identity.port + 1)
        self.peers: dict[ConnId, Peer] = {}
        self._hot = store.hot
        self.stats = Stats(now_ms) if self._hot is None else Stats(now_ms, hot_traffic())
        self.served = ServeStats()
        self.topics = Topics(config, load_state(store.files, "config/topics.json"), now_ms)
        self.groups = GroupConfigs(
            config, load_state(store.files, "config/subscriptionGroup.json"), now_ms
        )
        self.offsets = Offsets(
            config, load_state(store.files, "config/consumerOffset.json"), now_ms
        )
        self.members = Members(config.max_groups)
        self.locks = QueueLocks()
        watches = Watches(store.watch)
        self.holds = Holds(config.max_parked_pulls, watches.watch, store.properties_at)
        self.name_servers = NameServers(_addresses(config.namesrv))
        self.delay = Delay(config, load_state(store.files, "config/delayOffset.json"), now_ms)
        self.delay.clamp(store)
        self.sql_filters = SqlFilters(
            config, load_state(store.files, "config/consumerFilter.json"), now_ms
        )
        self.half = Half(store, self.offsets)
        self.timers = Timers(config, store, now_ms, timer_slots)
        self.dedup = Dedup(self.topics.table.values(), is_indexed=config.is_index_enabled)
        self.sequences = Sequences(config, store, now_ms)
        self.expired = Expired(store, now_ms)
        self.pop = Pop(store, self.offsets, watches, now_ms)
        self._revive_topic = names.revive_topic(config.cluster)
        self.own_topics = frozenset((self._revive_topic, names.OP_TOPIC))
        """Topics whose messages mean something to this broker when they are stored."""
        self._parts: tuple[Part, ...] = (
            self.delay,
            self.timers,
            self.sql_filters,
            self.half,
            self.sequences,
            self.expired,
            self.pop,
        )
        # Of these parts a plan can be made anew while the rest of the last one holds.
        waits = (self.delay, self.timers, self.half)
        self._other_parts = tuple(part for part in self._parts if part not in waits)
        self._wait_files = tuple(file for part in waits for file in part.files)
        self.net_figures: Callable[[], dict[str, int]] = dict
        """What the driver counts (connections, drops); shown with our own figures."""
        self.is_stopping = False
        self.stall_ms = 0
        self._files: dict[str, StateFile] = {
            one.name: one
            for one in (
                self.topics.file,
                self.groups.file,
                self.offsets.file,
                *(file for part in self._parts for file in part.files),
            )
        }
        self._parked: deque[_Parked | _ParkedAcks] = deque()
        self._births: dict[str, _Birth] = {}
        self._forwarded: dict[int, _Forwarded] = {}
        self._opaque = 0
        self._queue_turn = 0
        self._unique_count = 0
        self._month: tuple[int, int] = (0, 0)
        self._next_expiry_ms = now_ms + EXPIRY_SCAN_MS
        self.fed_ms = now_ms
        self.is_plan_old = True  # `deadline_ms` may be too late: something has changed
        self._is_wait_old = True  # the same, and only for messages that wait
        self._planned_work = 0
        self._planned_ms = 0  # the part of the plan that messages which wait do not change
        self._other_ms = 0  # when a tick is needed that is not for them alone
        self._delay_ms = self._timers_ms = 0
        self._ticked_ms = 0
        self.teacher = None if self._hot is None else Teacher(self, self._hot)
        self._clamp_offsets(now_ms)
        self._derive()
        self.deadline_ms = now_ms

    def _derive(self) -> None:
        """What is computed once from the settings because every message needs it."""
        config = self.config
        self._is_readable = bool(config.permission & Perm.READ)
        self.send_ext = {
            properties.REGION: config.region,
            properties.TRACE_ON: "true" if config.is_trace_on else "false",
        }
        self.added_properties = properties.build(
            {**self.send_ext, properties.CLUSTER: config.cluster}
        )
        if self.teacher is not None:
            self.teacher.configure()

    def _clamp_offsets(self, now_ms: int) -> None:
        """After a crash a group may stand beyond what survived: put it at the end, and say so.

        Without this, messages sent after the crash would reuse the offsets that the group believes
        it has consumed, and be skipped.
        """
        for (topic, group), queues in self.offsets.table.items():
            for queue_id, offset in queues.items():
                most = self.store.max_offset(topic, queue_id)
                if offset > most:
                    queues[queue_id] = most
                    self.offsets.file.changed(now_ms)
                    log.warning(
                        "consumer offset beyond the end after recovery group=%s topic=%s queue=%d "
                        "before=%d after=%d",
                        group,
                        topic,
                        queue_id,
                        offset,
                        most,
                    )

    # --------------------------------------------------------------------- the driver's calls

    def opened(self, conn: ConnId, peer: Peer, now_ms: int, out: Out) -> None:
        self.peers[conn] = peer
        if peer.dialled is not None:
            self.name_servers.opened(self, conn, peer.dialled, now_ms, out)
            self._plan(now_ms)

    def handle(self, conn: ConnId, frame: Frame, waited_ms: int, now_ms: int, out: Out) -> None:
        self.is_plan_old = True
        if frame.is_response:
            self._answered(conn, frame, now_ms, out)
        else:
            self.fold()  # whoever asks for figures gets all of them
            serve(self, TABLE, conn, frame, waited_ms, now_ms, out, self.served)

    def receive(self, conn: ConnId, data: bytes, now_ms: int, out: Out) -> tuple[int, int]:
        """Ordinary sends and pulls by the compiled path where there is one, others in between."""
        hot = self._hot
        if hot is None:
            return 0, 0
        at = frames = 0
        born_host = self.peers[conn].packed
        for _ in range(MOST_MIXED):
            if not self.stall_ms:
                config = self.config
                self.fed_ms = now_ms
                may_send = not self.is_stopping and now_ms >= config.accept_sends_from_ms
                may_pull = self._is_readable and not self.offsets.resets
                at = self.store.feed(data, at, born_host, now_ms, may_send, may_pull)
                frames += hot.frames
                if hot.take_kept():
                    self._is_wait_old = True  # something has to come out again
                replies = hot.take_replies()
                if replies is not None:
                    out.append(Send(conn, replies))
                acks = hot.take_acks()
                if acks is not None:
                    until_ms = now_ms + config.sync_flush_timeout_ms
                    self._parked.append(_ParkedAcks(hot.write_at, until_ms, conn, acks))
                if at == len(data) or hot.is_full:
                    break
            found = frame_at(data, at, self.config.max_frame_bytes)
            if found is None:
                break
            frame, at = found
            frames += 1
            self.handle(conn, frame, 0, now_ms, out)
        return at, frames

    def send_judged(self, call: Call) -> Frame | None:
        """Have a send whose numbers were found good stored by the compiled path; its answer, not
        sent yet, or None if that path does not take it and nothing was done."""
        hot, frame = self._hot, call.frame
        if hot is None or self.stall_ms or frame.is_oneway:
            return None
        data = encode_frame(frame)
        host = self.peers[call.conn].packed
        at = self.store.feed(data, 0, host, call.now_ms, True, False, is_judged=True)
        if at != len(data):
            return None
        self.served.requests -= 1  # it will count as one of the compiled path's
        answer = hot.take_replies() or hot.take_acks()
        assert answer is not None, "a send was taken and not answered"
        return decode_frame(answer)

    def fold(self) -> None:
        """Bring our counters up to what the compiled path has done."""
        if self._hot is None:
            return
        requests, put_count, put_bytes, pulls, get_count, get_bytes = self.store.fold()
        self.served.requests += requests
        self.served.compiled += requests
        counters = self.stats.counters
        counters.put_count += put_count
        counters.put_bytes += put_bytes
        counters.get_found += pulls
        counters.get_count += get_count
        counters.get_bytes += get_bytes

    def settle(self, now_ms: int, out: Out) -> None:
        """After a batch: feed queues, wake pulls, ask for flush and saves."""
        self.stall_ms = 0
        self.dispatch(now_ms, out)
        store = self.store
        flush = store.take_flush(now_ms)
        if flush is not None:
            out.append(flush)
        if self.is_plan_old or store.flush_work & ~self._planned_work:
            self.topics.file.ask(now_ms, out)
            self._plan(now_ms)
        elif self._is_wait_old:
            self._plan_waits(now_ms)

    def closed(self, conn: ConnId, now_ms: int, out: Out) -> None:
        self.is_plan_old = True
        self.peers.pop(conn, None)
        self.holds.drop_connection(conn)
        self.pop.drop_connection(conn)
        if self.name_servers.closed(conn, now_ms):
            self._release_births(now_ms, out)
        heartbeat.lost(self, conn, out)
        for opaque in [o for o, one in self._forwarded.items() if one.conn == conn]:
            self._forward_failed(opaque, "the client's connection was lost", out)

    def dial_failed(self, address: str, reason: str, now_ms: int, out: Out) -> None:
        self.name_servers.dial_failed(address, reason, now_ms)
        self._plan(now_ms)

    def flushed(self, kind: str, now_ms: int, out: Out) -> None:
        self.is_plan_old = True
        if kind != FLUSH:
            self.store.flushed(kind, now_ms)
        self.timers.flushed(kind, self.store.flushed_offset, now_ms)
        if kind == "log":
            self._release_flushed(now_ms, out)
            self.pop.note(self, now_ms)
            if self.is_stopping:
                self.offsets.file.ask(now_ms, out, at_once=True)

    def flush_failed(self, kind: str, reason: str, now_ms: int, out: Out) -> None:
        """The disk said no: nothing that waits is safe, and nothing new is accepted."""
        self.is_plan_old = True
        self.store.flush_failed(kind, reason, now_ms)
        if self.store.read_only_reason is None:
            return  # a file that was to be made ahead
        log.critical(
            "flush failed kind=%s reason=%s: the store is read-only until restart", kind, reason
        )
        failed = Reply(
            ResponseCode.SERVICE_NOT_AVAILABLE,
            f"flush to disk failed ({reason}): this message may or may not survive; the broker "
            "accepts no more",
            self.send_ext,
        )
        while self._parked:
            parked = self._parked.popleft()
            if isinstance(parked, _ParkedAcks):
                for ack in FrameReader().feed(parked.acks):
                    frame = reply_to(ack, failed.code, failed.remark, failed.ext)
                    out.append(Send(parked.conn, encode_frame(frame)))
            else:
                parked.call.answer(failed, out)
        for birth in self._births.values():
            for call, reply in birth.waiting:
                call.answer(failed if "msgId" in reply.ext else reply, out)
            birth.waiting = []

    def saved(self, name: str, reason: str | None, now_ms: int, out: Out) -> None:
        self.is_plan_old = True
        self._files[name].done(reason, now_ms)
        if self.is_stopping and reason is None:
            self._files[name].ask(now_ms, out, at_once=True)  # it changed while it was written
        if name == self.topics.file.name:
            self._release_births(now_ms, out)

    def stalled(self, duration_ms: int, now_ms: int, out: Out) -> None:
        self.stall_ms = duration_ms
        log.warning("stalled duration_ms=%d: one request held everything up", duration_ms)

    def tick(self, now_ms: int, out: Out) -> None:
        if self._is_wait_tick(now_ms):
            if self._delay_ms <= now_ms:
                self.delay.tick(self, now_ms, out)
            if self._timers_ms <= now_ms:
                self.timers.tick(self, now_ms, out)
            self._ask_store(now_ms, out)
            if self.is_plan_old:
                self._plan(now_ms)
            else:
                self._plan_waits(now_ms)
            return
        self._ticked_ms = now_ms
        self.fold()
        for hold in self.holds.due(now_ms):
            pull.resume(self, hold, now_ms, out)
        self._release_flushed(now_ms, out)
        self._release_births(now_ms, out)
        self.name_servers.tick(self, now_ms, out)
        for opaque in [o for o, one in self._forwarded.items() if one.until_ms <= now_ms]:
            self._forward_failed(opaque, "the client did not answer in time", out)
        for part in self._parts:
            part.tick(self, now_ms, out)
        self._ask_store(now_ms, out)
        for file in self._files.values():
            file.ask(now_ms, out, at_once=self.is_stopping)
        if now_ms >= self._next_expiry_ms:
            late_ms = now_ms - self._next_expiry_ms
            self._next_expiry_ms = now_ms + EXPIRY_SCAN_MS
            if late_ms > EXPIRY_SCAN_MS:  # the clock was set forward, or we did not run
                self.members.forgive(late_ms, now_ms)
            self._expire(now_ms, out)
        if now_ms >= self.store.clean_due_ms:
            self.store.clean(now_ms)
        self.stats.sample(now_ms)
        self._plan(now_ms)

    def _ask_store(self, now_ms: int, out: Out) -> None:
        """What the store wants done that no send asks it for."""
        next_file = self.store.take_next_file()
        if next_file is not None:
            out.append(next_file)
        queue_flush = self.store.take_queue_flush(now_ms)
        if queue_flush is not None:
            out.append(queue_flush)

    def stop(self, now_ms: int, out: Out) -> None:
        """Answer what waits, say goodbye, save; then `is_stopped`."""
        self.is_stopping = True
        for hold in self.holds.drain():
            pull.resume(self, hold, now_ms, out)
        self.name_servers.leave(self, now_ms, out)
        self.half.stop(self, now_ms)
        self.sequences.stop(self.store, now_ms)
        if self.expired.is_waiting:
            self.store.hurry_log(now_ms)  # what was moved is noted when it is durable
        self.pop.stop(self, now_ms, out)
        flush = self.store.take_flush(now_ms)
        if flush is not None:
            out.append(flush)
        for file in self._files.values():
            file.ask(now_ms, out, at_once=True)
        self._plan(now_ms)

    @property
    def is_stopped(self) -> bool:
        if not self.is_stopping:
            return False
        if self._parked and not self.store.read_only_reason:
            return False
        if self.expired.is_waiting and not self.store.read_only_reason:
            return False
        if not self.pop.places.is_settled and not self.store.read_only_reason:
            return False
        if any(birth.waiting for birth in self._births.values()):
            return False
        return self.name_servers.has_left and all(one.is_clean for one in self._files.values())

    def close(self, now_ms: int) -> None:
        self.store.close(now_ms, self._note_last)
        self.timers.close()

    def _note_last(self) -> None:
        """All messages are durable: so may be what is known of them."""
        self.timers.sync()
        self.delay.sync(self.store)

    # --------------------------------------------------------------------------- in a turn

    def dispatch(self, now_ms: int, out: Out) -> None:
        """Feed the queues, and answer the pulls that waited for what came."""
        arrivals = self.store.dispatch(now_ms)
        if not self.holds.count and not self.pop.polls.count:
            return
        for arrival in arrivals:
            self.pop.arrived(self, arrival, now_ms, out)
            for hold in self.holds.arrived(
                arrival.topic,
                arrival.queue_id,
                arrival.queue_offset,
                arrival.tags_code,
                arrival.log_offset,
            ):
                pull.resume(self, hold, now_ms, out)

    def _is_wait_tick(self, now_ms: int) -> bool:
        """Whether a tick has come for messages that wait, and for nothing else: while many are due
        there is one every few milliseconds. Now and then it is a whole one all the same, for what
        nobody planned."""
        return (
            now_ms < self._other_ms
            and not self.is_plan_old
            and 0 <= now_ms - self._ticked_ms < WHOLE_TICK_MS
            and not self.is_stopping
        )

    def _plan(self, now_ms: int) -> None:
        """When the next tick is needed."""
        self.is_plan_old = False
        self._planned_work = self.store.flush_work
        moments = [
            self.holds.next_ms,
            self.name_servers.next_ms,
            self.store.next_deadline_ms(now_ms),
            self.stats.next_sample_ms,
            self._next_expiry_ms,
        ]
        for part in self._other_parts:
            moments.append(part.next_ms(self, now_ms))
        for file in self._files.values():
            moments.append(file.next_ms)
        if self._parked:
            moments.append(self._parked[0].until_ms)
        if self._births:  # in order of their deadlines
            moments.append(next(iter(self._births.values())).until_ms)
        if self._forwarded:
            moments.append(min(one.until_ms for one in self._forwarded.values()))
        self._planned_ms = min(moments)
        self._plan_waits(now_ms)

    def _plan_waits(self, now_ms: int) -> None:
        """The same if only messages that wait have come or gone: the rest of the plan holds."""
        self._is_wait_old = False
        moments = [self._planned_ms, self.half.next_ms(self, now_ms)]
        for file in self._wait_files:
            moments.append(file.next_ms)
        self._other_ms = min(moments)
        self._delay_ms = self.delay.next_ms(self, now_ms)
        self._timers_ms = self.timers.next_ms(self, now_ms)
        self.deadline_ms = min(self._other_ms, self._delay_ms, self._timers_ms)

    def _expire(self, now_ms: int, out: Out) -> None:
        """Clients without a heartbeat for two minutes are gone, whatever their socket says."""
        for client in self.members.silent(now_ms - self.config.client_expiry_ms):
            reason = (
                f"client {client.client_id} sent no heartbeat for {self.config.client_expiry_ms} ms"
            )
            out.append(Close(client.conn, reason))
            heartbeat.lost(self, client.conn, out)
        self.locks.expire(now_ms)

    # ------------------------------------------------------------------- replies that wait

    def acknowledge(
        self, call: Call, reply: Reply, end_offset: int, topic: str, text: str
    ) -> Reply | None:
        """A message is in the log: answer now, or when it is safe and its topic is known.

        Its properties (`text`) may say WAIT=false: then its sender does not care for the flush.
        """
        if call.frame.is_oneway:
            return None
        if (
            self.store.config.is_sync_flush
            and self.store.flushed_offset < end_offset
            and properties.get(text, properties.WAIT) != "false"
        ):
            until_ms = call.now_ms + self.config.sync_flush_timeout_ms
            self._parked.append(_Parked(end_offset, until_ms, call, reply, topic))
            return None
        birth = self._births.get(topic) if self._births else None
        if birth is not None:
            birth.waiting.append((call, reply))
            return None
        return reply

    def _release_flushed(self, now_ms: int, out: Out) -> None:
        flushed = self.store.flushed_offset
        while self._parked:
            parked = self._parked[0]
            is_late = parked.end_offset > flushed
            if is_late and parked.until_ms > now_ms:
                return
            self._parked.popleft()
            if isinstance(parked, _ParkedAcks):
                out.append(Send(parked.conn, self._late(parked.acks) if is_late else parked.acks))
                continue
            if is_late:
                self.stats.counters.flush_timeouts += 1
                parked.reply.code = ResponseCode.FLUSH_DISK_TIMEOUT
                parked.reply.remark = self._late_remark
            birth = self._births.get(parked.topic)
            if birth is not None:
                birth.waiting.append((parked.call, parked.reply))
            else:
                parked.call.answer(parked.reply, out)

    def _late(self, acks: bytes) -> bytes:
        """The same answers, saying that the disk has not confirmed yet."""
        frames = FrameReader().feed(acks)
        self.stats.counters.flush_timeouts += len(frames)
        for frame in frames:
            frame.code = ResponseCode.FLUSH_DISK_TIMEOUT
            frame.remark = self._late_remark
        return b"".join(encode_frame(frame) for frame in frames)

    @property
    def _late_remark(self) -> str:
        return (
            f"stored, but not flushed to disk within {self.config.sync_flush_timeout_ms} "
            "ms (syncFlushTimeout)"
        )

    def put(self, message: NewMessage, now_ms: int, *, is_due: bool) -> Appended:
        """Store a message of our own making, `is_due` or still to be delayed as it says itself;
        StoreError if that can't be now. It becomes visible when the turn settles."""
        topic = message.topic
        self._redirect(message, now_ms, is_due=is_due)
        ttl.stamp(message, now_ms)
        stored = self.store.append(message, now_ms)
        self.stats.put(topic, 1, stored.size)
        self.is_plan_old = True
        if message.topic == self._revive_topic:
            self.pop.revive.fed(stored.end_offset)
        return stored

    def put_together(
        self, message: NewMessage, second: NewMessage, now_ms: int, *, is_due: bool
    ) -> Appended:
        """As `put`, with a second message right behind it, both or none; `end_offset` is where both
        end."""
        topic = message.topic
        self._redirect(message, now_ms, is_due=is_due)
        ttl.stamp(message, now_ms)
        one, two = self.store.append_batch([message, second], now_ms)
        self.stats.put(topic, 1, one.size)
        self.stats.put(second.topic, 1, two.size)
        self.is_plan_old = True
        return Appended(one.log_offset, one.queue_offset, one.size, two.end_offset, one.store_ms)

    def _redirect(self, message: NewMessage, now_ms: int, *, is_due: bool) -> None:
        """To where it has to wait; or, if it has not, to a queue that its topic still has: it may
        have been given fewer while the message waited, and nobody would find it in the others."""
        if not is_due:
            if self.delay.redirect(message) or self.timers.redirect(self.config, message, now_ms):
                return
        topic = self.topics.get(message.topic)
        if topic is not None and topic.topicName not in self.own_topics:
            counts = topic.readQueueNums, topic.writeQueueNums
            if message.queue_id >= max(counts) > 0:
                message.queue_id %= min(counts) or max(counts)

    def any_retry_queue(self, count: int) -> int:
        """A queue of a retry topic, in turn."""
        self._queue_turn += 1
        return self._queue_turn % max(count, 1)

    def is_born(self, topic: str) -> bool:
        """Whether a topic is so new that sends to it still wait for its name to be known."""
        return topic in self._births

    def announce(self, topics: list[TopicConfig], now_ms: int, out: Out) -> None:
        """Tell the name servers of new or changed topics; their sends wait until they know."""
        if not topics:
            return
        self.stats.counters.topics_created += len(topics)
        ticket = self.name_servers.register_topics(self, topics, now_ms, out)
        for topic in topics:
            before = self._births.pop(topic.topicName, None)
            self._births[topic.topicName] = _Birth(
                generation=self.topics.file.generation,
                ticket=ticket,
                until_ms=now_ms + BIRTH_WAIT_MS,
                waiting=before.waiting if before is not None else [],
            )

    def when_known(self, topics: list[TopicConfig], call: Call, reply: Reply) -> Reply | None:
        """Answer now, or when these topics are saved and registered; the newest is known last."""
        births = [self._births[t.topicName] for t in topics if t.topicName in self._births]
        if not births or call.frame.is_oneway:
            return reply
        max(births, key=lambda birth: birth.ticket).waiting.append((call, reply))
        return None

    def _release_births(self, now_ms: int, out: Out) -> None:
        if not self._births:
            return
        told_upto = self.name_servers.told_upto
        late = 0
        for name in list(self._births):
            birth = self._births[name]
            is_known = birth.ticket <= told_upto and self.topics.file.is_saved(birth.generation)
            if not is_known and birth.until_ms > now_ms:
                continue
            late += not is_known
            del self._births[name]
            for call, reply in birth.waiting:
                call.answer(reply, out)
        if late:
            log.warning(
                "%d new topics were answered before they were saved and registered everywhere: "
                "waited %d ms",
                late,
                BIRTH_WAIT_MS,
            )

    def forward(
        self, conn: ConnId, opaque: int, call: Call, until_ms: int, reply: Reply | None = None
    ) -> None:
        """A request was passed on to a client; see _Forwarded."""
        self._forwarded[opaque] = _Forwarded(call, conn, until_ms, reply)

    def _forward_failed(self, opaque: int, why: str, out: Out) -> None:
        forwarded = self._forwarded.pop(opaque)
        reply = forwarded.reply
        if reply is None:
            reply = Reply(ResponseCode.CONSUME_MSG_TIMEOUT, why)
        else:
            reply.code, reply.remark = ResponseCode.SYSTEM_ERROR, why
        if not forwarded.call.frame.is_oneway:
            forwarded.call.answer(reply, out)

    def _answered(self, conn: ConnId, frame: Frame, now_ms: int, out: Out) -> None:
        forwarded = self._forwarded.get(frame.opaque)
        if forwarded is not None and forwarded.conn == conn:
            if forwarded.reply is not None and frame.code != 0:
                why = f"the client answered {frame.code}: {frame.remark}"
                self._forward_failed(frame.opaque, why, out)
                return
            del self._forwarded[frame.opaque]
            reply = forwarded.reply or Reply(frame.code, frame.remark, frame.ext, frame.body)
            if not forwarded.call.frame.is_oneway:
                forwarded.call.answer(reply, out)
            return
        self.name_servers.answered(self, conn, frame, now_ms, out)
        if self._births:
            self._release_births(now_ms, out)

    # ------------------------------------------------------------------- used by handlers

    def commit_offset(self, topic: str, group: str, queue_id: int, offset: int, call: Call) -> None:
        peer = self.peers.get(call.conn)
        self.offsets.commit(
            topic, group, queue_id, offset, call.now_ms, peer.address if peer else "?"
        )

    def wake_group(self, topic: str, group: str, now_ms: int, out: Out) -> None:
        """End the held pulls of a group, so that a reset reaches it now and not in 15 s."""
        for hold in self.holds.of_group(topic, group):
            pull.resume(self, hold, now_ms, out)
        self.pop.wake_group(self, topic, group, now_ms, out)

    def reconfigure(self, config: BrokerConfig, now_ms: int) -> None:
        """Live settings have changed."""
        wanted = store_config(config, self.store.config.in_memory_bytes)  # may refuse
        self.config = config
        self.config_version = self.config_version.next(now_ms)
        self.store.reconfigure(wanted)
        self._derive()

    def adopt(self, topics: list[TopicConfig], groups: list[GroupConfig], now_ms: int) -> None:
        """Topics and groups of a running cluster, copied into a broker that joins it."""
        for topic in topics:
            problem = names.topic_problem(topic.topicName)
            if problem is not None:
                log.error("topic not copied: %s", problem)
            elif self.topics.get(topic.topicName) is None and not names.is_system_topic(
                topic.topicName, self.config
            ):
                self.topics.put(topic, now_ms)
        for group in groups:
            problem = names.group_problem(group.groupName)
            if problem is not None:
                log.error("group not copied: %s", problem)
            elif self.groups.get(group.groupName) is None:
                self.groups.put(group, now_ms)

    def next_opaque(self) -> int:
        self._opaque = self._opaque % 0x7FFFFFFF + 1
        return self._opaque

    def any_queue(self, topic: TopicConfig) -> int:
        """A write queue for who doesn't care; in turn, so that they fill evenly."""
        self._queue_turn += 1
        return self._queue_turn % max(topic.writeQueueNums, 1)

    def make_unique_key(self, now_ms: int) -> str:
        """A unique id for a message that came without one; it tells the time, as Java's does."""
        begin_ms, end_ms = self._month
        if not begin_ms <= now_ms < end_ms:
            now = datetime.fromtimestamp(now_ms / 1000)
            begin = datetime(now.year, now.month, 1)
            end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1)
            begin_ms, end_ms = int(begin.timestamp() * 1000), int(end.timestamp() * 1000)
            self._month = (begin_ms, end_ms)
        self._unique_count += 1
        return message_id.unique_id(
            self.store_host[:-4],
            self.identity.pid,
            self.identity.node,
            now_ms - begin_ms,
            self._unique_count,
        )

    @property
    def is_registered(self) -> bool:
        """Every name server knows this broker."""
        return self.name_servers.has_registered


def store_config(config: BrokerConfig, in_memory_bytes: int) -> StoreConfig:
    """The part of a broker's settings that is the store's."""
    return StoreConfig(
        log_file_bytes=config.log_file_bytes,
        queue_file_bytes=config.queue_file_bytes,
        index_slots=config.index_slots,
        index_entries=config.index_entries,
        is_sync_flush=config.flush == "SYNC_FLUSH",
        flush_interval_ms=config.flush_interval_ms,
        flush_least_pages=config.flush_least_pages,
        flush_thorough_ms=config.flush_thorough_ms,
        queue_flush_interval_ms=config.queue_flush_interval_ms,
        queue_flush_least_pages=config.queue_flush_least_pages,
        queue_flush_thorough_ms=config.queue_flush_thorough_ms,
        is_staged=config.is_staged,
        stage_count=config.stage_count,
        stage_bytes=config.stage_bytes,
        commit_interval_ms=config.commit_interval_ms,
        commit_least_pages=config.commit_least_pages,
        commit_thorough_ms=config.commit_thorough_ms,
        max_open_queue_files=config.max_open_queue_files,
        stall_limit_ms=config.append_stall_ms if config.is_fast_failure_enabled else NEVER_MS,
        max_unflushed_bytes=config.max_unflushed_bytes or in_memory_bytes // 8,
        max_message_bytes=config.max_message_bytes,
        max_fetch_count=config.max_pull_count_memory,
        max_fetch_bytes=config.max_pull_bytes_memory,
        max_cold_fetch_count=config.max_pull_count_disk,
        max_cold_fetch_bytes=config.max_pull_bytes_disk,
        in_memory_bytes=in_memory_bytes,
        file_reserved_hours=config.file_reserved_hours,
        delete_when=config.delete_when,
        delete_batch=config.delete_batch,
        clean_interval_ms=config.clean_interval_ms,
        clean_forcibly=config.clean_forcibly,
        disk_max_used_ratio=config.disk_max_used_percent / 100,
        disk_forcible_ratio=config.disk_clean_forcibly_percent / 100,
        disk_warning_ratio=config.disk_warning_percent / 100,
        index_enabled=config.is_index_enabled,
        verify_crc_on_recover=config.verify_crc_on_recover,
        is_durable_cut_allowed=config.is_durable_cut_allowed,
        delay_levels=config.delay_levels,
    )


def hot_traffic() -> Callable[[], Traffic]:
    """Makes counters that the compiled path adds to."""
    from cometmq._fast import hot

    return cast(Callable[[], Traffic], hot.Traffic)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(text: str) -> list[str]:
    """`a:1;b:2` (or commas) to a list without repeats."""
    found = [one.strip() for one in text.replace(",", ";").split(";")]
    return list(dict.fromkeys(one for one in found if one))
