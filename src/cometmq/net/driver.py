"""Runs a core on real sockets: bytes in, effects out.

Owns: connections, the outbox, timers, and the two background threads. One rule: the driver decides
nothing about messages; it splits frames, calls the core, and carries out what the core appended to
`out`. All replies that one read causes leave in one write.

Every connection is bounded: frames waiting, bytes not yet read by the peer, silence, and the time
a begun frame may take. Whoever passes a limit is dropped with a counter and a log line.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from ipaddress import ip_address
from typing import cast

import msgspec

from cometmq.net.clock import Clock
from cometmq.net.worker import Worker
from cometmq.ports import (
    NEVER_MS,
    Close,
    ConnId,
    Core,
    Dial,
    Files,
    Flush,
    Out,
    Peer,
    Save,
    Send,
)
from cometmq.wire.frame import Frame, FrameReader
from cometmq.wire.strangers import recognise

log = logging.getLogger("cometmq.net")

TURN_FRAMES = 256  # frames of one connection handled before others get their turn
JUMP_MS = 5_000  # a sweep that comes so much too late sees a clock that was set, or a long pause
SWEEP_MS = 1_000  # how often silence and stuck readers are looked for
LONGEST_SLEEP_MS = 1_000  # tick at least this often, whatever the clock does
PROBE_TURNS = 16  # how many reads are settled alone before others are waited for again
DIAL_TIMEOUT_S = 3.0
CLOSE_LINGER_S = 2.0  # a closing connection may take this long to take its last bytes
WRITE_HIGH_BYTES = 1024 * 1024  # a peer with more than this unread is asked for nothing new
SETTLE_AT_BYTES = 256 * 1024  # a connection with more answers than this is not kept waiting
STALL_MS = 100  # a call into the core that takes longer is told to it


class Limits(msgspec.Struct, frozen=True):
    """What one connection, and all of them together, may take."""

    max_connections: int
    max_frame_bytes: int
    max_queued_frames: int
    max_outbox_bytes: int
    idle_timeout_ms: int
    frame_timeout_ms: int


class NetStats(msgspec.Struct):
    """Plain counters; metrics read them."""

    connections: int = 0
    accepted: int = 0
    refused_connections: int = 0
    dropped_slow_readers: int = 0
    dropped_idle: int = 0
    dropped_slow_frames: int = 0
    dropped_bad_bytes: int = 0
    strangers: int = 0
    frames_in: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    paused_reads: int = 0
    core_bugs: int = 0


class Driver:
    """Drives one core. `files` carries out Save effects (None: the core never saves)."""

    def __init__(self, core: Core, limits: Limits, files: Files | None, clock: Clock) -> None:
        self.core = core
        self.limits = limits
        self.stats = NetStats()
        self.clock = clock
        self.now_ms = clock()  # of the present turn
        self._files = files
        self._loop = asyncio.get_running_loop()
        self._connections: dict[ConnId, _Connection] = {}
        self._next_conn = 1
        self._out: Out = []
        self._touched: list[_Connection] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._dials: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER_MS
        self._log_worker = Worker("cometmq-flush", self._loop)
        self._state_worker = Worker("cometmq-state", self._loop)
        self._is_stopping = False
        self._is_closed = False
        self._is_settle_due = False
        self._reads = 0  # since a settle became due
        self._alone = 0  # settles in a row that were due to one read
        self._swept_ms = self.now_ms
        self._sweep_handle = self._loop.call_later(SWEEP_MS / 1000, self._sweep)

    # ------------------------------------------------------------------------------- life

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections on a bound socket."""
        server = await self._loop.create_server(lambda: _Connection(self), sock=listener)
        self._servers.append(server)

    def start(self) -> None:
        """The first tick: lets the core dial and set its deadline."""
        self._tick()

    async def stop(self, timeout_ms: int = 4_000) -> None:
        """Stop accepting, let the core answer what waits, flush, close. At most `timeout_ms`."""
        self._is_stopping = True
        for server in self._servers:
            server.close()
        self.core.stop(self.clock(), self._out)
        self.drain()
        give_up = self._loop.time() + timeout_ms / 1000
        while not self.core.is_stopped and self._loop.time() < give_up:
            await asyncio.sleep(0.005)
            self._tick()
        if not self.core.is_stopped:
            log.warning("stop timeout_ms=%d: closing with work outstanding", timeout_ms)
        for task in list(self._dials):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.transport.close()
        await asyncio.sleep(0)
        self._sweep_handle.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await self._loop.run_in_executor(None, self._log_worker.close)
        await self._loop.run_in_executor(None, self._state_worker.close)
        await asyncio.sleep(0)
        for connection in list(self._connections.values()):
            connection.transport.abort()
        # Connections that end and flushes that are done tell us so later than this. A closed core
        # must not hear of it and go on: the files may be another broker's now.
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.core.close(self.clock())

    def figures(self) -> dict[str, int]:
        """The counters by name, `DroppedIdle` and the like."""
        return {
            "".join(word.capitalize() for word in name.split("_")): getattr(self.stats, name)
            for name in self.stats.__struct_fields__
        }

    # ------------------------------------------------------------------------------ turns

    def drain(self) -> None:
        """Carry out what the core asked for, then see to its next deadline."""
        out, self._out = self._out, []
        for effect in out:
            kind = type(effect)
            if kind is Send:
                assert isinstance(effect, Send)
                connection = self._connections.get(effect.conn)
                if connection is not None:
                    if not connection.outbox:
                        self._touched.append(connection)
                    connection.outbox.append(effect.data)
            elif isinstance(effect, Flush):
                self._start_flush(effect)
            elif isinstance(effect, Save):
                self._start_save(effect)
            elif isinstance(effect, Dial):
                self._start_dial(effect.address)
            elif isinstance(effect, Close):
                connection = self._connections.get(effect.conn)
                if connection is not None:
                    log.info("close conn=%d reason=%s", effect.conn, effect.reason)
                    connection.flush_outbox()
                    connection.close_soon()
        for connection in self._touched:
            connection.flush_outbox()
        self._touched.clear()
        if self.core.deadline_ms < self._timer_ms:
            self._schedule()

    def receive(self, connection: _Connection, data: bytes, now_ms: int) -> int:
        """Let the core take what it can from raw bytes; settle_soon() or turn() must follow."""
        try:
            taken, frames = self.core.receive(connection.id, data, now_ms, self._out)
        except Exception:
            self._bug()
            connection.drop("a bug in the core while it read this connection's bytes")
            return len(data)
        self.stats.frames_in += frames
        if self._out and type(self._out[-1]) is Send:
            connection.answered_bytes += len(self._out[-1].data)
        after_ms = self.clock()
        if after_ms - now_ms > STALL_MS:
            self.core.stalled(after_ms - now_ms, after_ms, self._out)
        return taken

    def turn(self, connection: _Connection) -> None:
        """Hand one connection's waiting frames to the core, up to a fair share."""
        core, out, clock = self.core, self._out, self.clock
        frames = connection.frames
        if connection.is_closed or connection.stuck_since_ms:
            return
        now_ms = clock()
        answered_bytes = 0
        for _ in range(min(len(frames), TURN_FRAMES)):
            frame, arrived_ms = frames.popleft()
            try:
                core.handle(connection.id, frame, now_ms - arrived_ms, now_ms, out)
            except Exception:
                self._bug()
            began_ms, now_ms = now_ms, clock()
            if now_ms - began_ms > STALL_MS:
                core.stalled(now_ms - began_ms, now_ms, out)
            if out and type(out[-1]) is Send:
                answered_bytes += len(out[-1].data)
            if connection.is_closed or answered_bytes > WRITE_HIGH_BYTES:
                break
        self.settle(now_ms)
        connection.go_on()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # called without it: else it would go on by itself, beyond stop
        self._timer = None
        self._timer_ms = NEVER_MS
        now_ms = self.clock()
        try:
            self.core.tick(now_ms, self._out)
        except Exception:
            self._bug()
        self.settle(now_ms)
        if self._timer is None:
            self._schedule()

    def settle_soon(self, now_ms: int) -> None:
        """Settle once for all connections that have something to read now, after the last of them.

        Where only one ever has, waiting for others would be in vain: then settle at once, and only
        try now and then whether that is still so.
        """
        if self._is_settle_due:
            self._reads += 1
        elif self._alone and self._alone % PROBE_TURNS:
            self._alone += 1
            self.settle(now_ms)
        else:
            self._is_settle_due = True
            self._reads = 1
            self._loop.call_soon(self._settle_due)

    def _settle_due(self) -> None:
        if self._is_settle_due:
            self._alone = self._alone + 1 if self._reads == 1 else 0
            self.settle(self.clock())

    def settle(self, now_ms: int) -> None:
        """End a turn: the core settles, and what it asked for is carried out whatever happened."""
        if self._is_closed:
            return
        self.now_ms = now_ms
        self._is_settle_due = False
        try:
            self.core.settle(now_ms, self._out)
        except Exception:
            self._bug()
        self.drain()

    def _bug(self) -> None:
        """The core raised: its other clients must still get their answers."""
        self.stats.core_bugs += 1
        log.exception("bug in the core")

    def _schedule(self) -> None:
        now_ms = self.clock()
        wait_ms = min(max(self.core.deadline_ms - now_ms, 0), LONGEST_SLEEP_MS)
        if self._timer is not None:
            if self._timer_ms <= now_ms + wait_ms:
                return
            self._timer.cancel()
        self._timer_ms = now_ms + wait_ms
        self._timer = self._loop.call_later(wait_ms / 1000, self._tick)

    def _sweep(self) -> None:
        """Drop who is silent, who doesn't read, and who never finishes a frame."""
        self._sweep_handle = self._loop.call_later(SWEEP_MS / 1000, self._sweep)
        now_ms = self.clock()
        limits = self.limits
        jump_ms = now_ms - self._swept_ms - SWEEP_MS
        self._swept_ms = now_ms
        if jump_ms > JUMP_MS:
            # The clock was set forward, or nobody ran: silence was not the peers' fault.
            for connection in self._connections.values():
                connection.forgive(jump_ms)
        for connection in list(self._connections.values()):
            is_ours = connection.dialled is not None  # the core decides when to end those
            if not is_ours and now_ms - connection.active_ms > limits.idle_timeout_ms:
                self.stats.dropped_idle += 1
                connection.drop(f"silent for more than {limits.idle_timeout_ms} ms")
            elif (
                connection.partial_since_ms
                and not connection.is_read_paused  # then it is we who don't read
                and now_ms - connection.partial_since_ms > limits.frame_timeout_ms
            ):
                self.stats.dropped_slow_frames += 1
                connection.drop(f"a frame took more than {limits.frame_timeout_ms} ms to arrive")
            elif (
                connection.stuck_since_ms
                and now_ms - connection.stuck_since_ms > limits.frame_timeout_ms
            ):
                self.stats.dropped_slow_readers += 1
                connection.drop(f"did not read for more than {limits.frame_timeout_ms} ms")

    # ---------------------------------------------------------------------------- effects

    def _start_flush(self, effect: Flush) -> None:
        is_log = effect.kind in ("log", "commit")
        worker = self._log_worker if is_log else self._state_worker
        targets = effect.targets

        def job() -> None:
            for target in targets:
                target.sync()

        def done(reason: str | None) -> None:
            now_ms = self.clock()
            if self._is_closed:
                return
            if reason is None:
                self.core.flushed(effect.kind, now_ms, self._out)
            else:
                self.core.flush_failed(effect.kind, reason, now_ms, self._out)
            self.settle(now_ms)

        worker.submit(job, done)

    def _start_save(self, effect: Save) -> None:
        files = self._files
        assert files is not None, "a core that saves needs files"

        def done(reason: str | None) -> None:
            now_ms = self.clock()
            if self._is_closed:
                return
            self.core.saved(effect.name, reason, now_ms, self._out)
            self.settle(now_ms)

        self._state_worker.submit(lambda: files.replace(effect.name, effect.content), done)

    def _start_dial(self, address: str) -> None:
        task = self._loop.create_task(self._dial(address))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, address: str) -> None:
        try:
            host, _, port = address.rpartition(":")
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._loop.create_connection(
                    lambda: _Connection(self, address), host.strip("[]"), int(port)
                )
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if self._is_closed:
                return
            self.core.dial_failed(address, reason, self.clock(), self._out)
            self.drain()

    # ------------------------------------------------------------------------ connections

    def admit(self, connection: _Connection, peer: Peer) -> bool:
        """Give a new connection its id, or refuse it when there are too many."""
        if self._is_stopping:
            return False
        if len(self._connections) >= self.limits.max_connections:
            self.stats.refused_connections += 1
            if self.stats.refused_connections == 1 or self.stats.refused_connections % 1000 == 0:
                log.warning(
                    "refused connection peer=%s: maxConnections=%d reached (%d refused so far)",
                    peer.address,
                    self.limits.max_connections,
                    self.stats.refused_connections,
                )
            return False
        connection.id = ConnId(self._next_conn)
        self._next_conn += 1
        self._connections[connection.id] = connection
        self.stats.connections = len(self._connections)
        self.stats.accepted += 1
        self.core.opened(connection.id, peer, self.clock(), self._out)
        self.drain()
        return True

    def forget(self, connection: _Connection) -> None:
        if self._connections.pop(connection.id, None) is not None:
            self.stats.connections = len(self._connections)
            if self._is_closed:
                return
            now_ms = self.clock()
            self.core.closed(connection.id, now_ms, self._out)
            self.settle(now_ms)


class _Connection(asyncio.Protocol):
    """One socket: collects bytes into frames, holds what waits in both directions."""

    def __init__(self, driver: Driver, dialled: str | None = None) -> None:
        self.driver = driver
        self.dialled = dialled
        self.id = ConnId(0)
        self.reader = FrameReader(driver.limits.max_frame_bytes)
        self.frames: deque[tuple[Frame, int]] = deque()
        self.outbox: list[bytes] = []
        self.active_ms = driver.clock()
        self.partial_since_ms = 0
        self.stuck_since_ms = 0
        self.answered_bytes = 0  # by receive, and not written yet
        self.is_read_paused = False
        self.is_ending = False  # the peer has said all it will; its frames are served, then closed
        self.is_closed = False
        self._first = b""
        self.peer_text = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername") or ("127.0.0.1", 0)
        host = str(name[0]).split("%", 1)[0]
        address = ip_address(host)
        if address.version == 6 and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        packed = address.packed + int(name[1]).to_bytes(4, "big")
        peer = Peer(str(address), int(name[1]), packed, self.dialled)
        self.peer_text = peer.address
        if not self.driver.admit(self, peer):
            self.is_closed = True
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.is_closed:
            return
        driver, reader = self.driver, self.reader
        now_ms = driver.clock()
        self.active_ms = now_ms
        driver.stats.bytes_in += len(data)
        if len(self._first) < 16:
            self._first += data[: 16 - len(self._first)]
        whole = reader.join(data)
        if whole is None:
            if not self.partial_since_ms:
                self.partial_since_ms = now_ms
            return
        was_idle = not self.frames
        taken = driver.receive(self, whole, now_ms) if was_idle else 0
        frames: list[Frame] = []
        if taken < len(whole):
            frames = reader.split(whole, taken)
        if reader.pending_bytes == 0:
            self.partial_since_ms = 0
        elif frames or taken or not self.partial_since_ms:
            self.partial_since_ms = now_ms
        if frames and not self.is_closed:
            driver.stats.frames_in += len(frames)
            for frame in frames:
                self.frames.append((frame, now_ms))
            if len(self.frames) > driver.limits.max_queued_frames:
                self.stop_reading()
        if taken:
            if self.answered_bytes > SETTLE_AT_BYTES:
                driver.settle(now_ms)
            else:
                driver.settle_soon(now_ms)
            if frames and was_idle:
                driver._loop.call_soon(self.go_on)
        elif frames and was_idle:
            driver.turn(self)
        if reader.error is not None and not self.is_closed:
            self._bad_bytes()

    def _bad_bytes(self) -> None:
        stranger = recognise(self._first)
        if stranger is not None:
            self.driver.stats.strangers += 1
            log.warning(
                "stranger conn=%d peer=%s protocol=%s: %s",
                self.id,
                self.peer_text,
                stranger.protocol,
                stranger.hint,
            )
            if stranger.answer:
                self.transport.write(stranger.answer)
        else:
            self.driver.stats.dropped_bad_bytes += 1
            log.warning(
                "bad bytes conn=%d peer=%s first=%s: %s",
                self.id,
                self.peer_text,
                self._first.hex(),
                self.reader.error,
            )
        self.close_soon()

    def flush_outbox(self) -> None:
        """Write all replies of this turn at once; drop the peer if it doesn't read them."""
        if not self.outbox:
            return
        data = self.outbox[0] if len(self.outbox) == 1 else b"".join(self.outbox)
        self.outbox.clear()
        self.answered_bytes = 0
        if self.is_closed:
            return
        self.active_ms = self.driver.now_ms
        self.driver.stats.bytes_out += len(data)
        self.transport.write(data)
        if not self.stuck_since_ms:
            return
        waiting = self.transport.get_write_buffer_size()
        if waiting > self.driver.limits.max_outbox_bytes:
            self.driver.stats.dropped_slow_readers += 1
            self.drop(f"{waiting} bytes not read, limit {self.driver.limits.max_outbox_bytes}")

    def forgive(self, jump_ms: int) -> None:
        """Time has jumped: what is measured from then on begins later."""
        self.active_ms += jump_ms
        if self.partial_since_ms:
            self.partial_since_ms += jump_ms
        if self.stuck_since_ms:
            self.stuck_since_ms += jump_ms

    def go_on(self) -> None:
        """What comes after a turn: the next one, or more bytes; nothing while the peer is stuck."""
        if self.is_closed or self.stuck_since_ms:
            return
        if self.frames:
            self.driver._loop.call_soon(self.driver.turn, self)
        elif self.is_ending:
            self.close_soon()
        else:
            self.resume_reading()

    def resume_reading(self) -> None:
        if self.is_read_paused and not self.stuck_since_ms and not self.transport.is_closing():
            self.is_read_paused = False
            self.transport.resume_reading()

    def stop_reading(self) -> None:
        if not self.is_read_paused and not self.transport.is_closing():
            self.is_read_paused = True
            self.driver.stats.paused_reads += 1
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The peer reads too slowly: take no more requests from it until it has caught up."""
        self.stuck_since_ms = self.driver.clock()
        self.stop_reading()

    def resume_writing(self) -> None:
        self.stuck_since_ms = 0
        self.go_on()

    def close_soon(self) -> None:
        """Close once the peer has taken what was written, but don't wait for ever."""
        self.is_closed = True
        self.transport.close()
        self.driver._loop.call_later(CLOSE_LINGER_S, self.transport.abort)

    def drop(self, reason: str) -> None:
        """End it now; what was not sent is lost, and that is the point."""
        log.warning("drop conn=%d peer=%s reason=%s", self.id, self.peer_text, reason)
        self.is_closed = True
        self.transport.abort()

    def eof_received(self) -> bool:
        """A client that closes behind its oneway requests has sent them: serve what has arrived."""
        self.is_ending = bool(self.frames) and not self.is_closed and self.transport.can_write_eof()
        return self.is_ending

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self.frames.clear()
        self.driver.forget(self)
