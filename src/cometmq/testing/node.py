"""Node: one process of the simulated cluster, running a real core.

Owns: what net.driver owns in production, with the same order of calls: frames in, effects out,
timers, two background workers for syncs and saves; and the process's clock. One rule: what the real
driver would do to a core is done here and nothing else, so that a bug found here is a bug there.

A node has boots. Everything that was planned for an earlier boot is dropped when its time comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import ParamSpec

from cometmq.errors import CometError
from cometmq.ports import NEVER_MS, Close, ConnId, Core, Dial, Flush, Out, Peer, Save, Send
from cometmq.testing.disk import ProcessEnded, SimulatedFiles
from cometmq.testing.network import MS, End, Network, World
from cometmq.wire.frame import Frame, FrameReader
from cometmq.wire.message_id import pack_host

P = ParamSpec("P")

EPOCH_MS = 1_700_000_000_000
LONGEST_SLEEP_US = 1_000 * MS  # as net.driver
LEAST_SLEEP_US = 100
STOP_TIMEOUT_US = 4_000 * MS
ENDED = "the process ended while it started"
MOST_TICKS_PER_S = 5_000  # more means that a deadline stands still and the core spins


class SimulatedClock:
    """A machine's clock: may step and drift; a process never sees it run backwards (net.clock)."""

    def __init__(self) -> None:
        self._base_us = EPOCH_MS * MS
        self._since_us = 0
        self._drift_ppm = 0
        self._last_us = 0
        self._last_at_us = -1

    def set(self, now_us: int, *, step_us: int = 0, drift_ppm: int | None = None) -> None:
        self._base_us = self._wall_us(now_us) + step_us
        self._since_us = now_us
        if drift_ppm is not None:
            self._drift_ppm = drift_ppm

    def restart(self) -> None:
        """A new process believes the wall clock as it is."""
        self._last_us = 0
        self._last_at_us = -1

    def read_ms(self, now_us: int) -> int:
        if now_us != self._last_at_us:
            wall_us = self._wall_us(now_us)
            if wall_us >= self._last_us:
                self._last_us = wall_us
            else:
                self._last_us += (now_us - self._last_at_us) // 2
            self._last_at_us = now_us
        return self._last_us // MS

    def _wall_us(self, now_us: int) -> int:
        passed = now_us - self._since_us
        return self._base_us + passed + passed * self._drift_ppm // 1_000_000


class DiskPace:
    """How long syncs take just now; the faults change it."""

    def __init__(self) -> None:
        self.least_us = 100
        self.mean_us = 1_500
        self.slow_percent = 0
        self.slow_us = 0


class Node:
    """A named process: `make_core` opens whatever it needs and returns the core it runs."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        address: str,
        make_core: Callable[[Node], Core],
        rng: random.Random,
        files: SimulatedFiles | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.boot = 0
        self.clock = SimulatedClock()
        self.files = files
        self.core: Core | None = None
        self.is_powered = True
        self.pace = DiskPace()
        self.paused_until_us = 0
        self.stalled_ms = 0
        self.dies_in_next_boot = -1
        """At which sync of its next start the process ends; below zero: it does not."""
        self.on_crash: Callable[[Node, Exception], None] | None = None
        self._world = world
        self._network = network
        self._make_core = make_core
        self._rng = rng
        self._ends: dict[int, End] = {}
        self._readers: dict[int, FrameReader] = {}
        self._next_conn = 1
        self._out: Out = []
        self._timer = 0
        self._timer_us = NEVER_MS
        self._free_us = {"log": 0, "state": 0}
        self._ticks = 0
        self._ticks_since_us = 0

    # ---------------------------------------------------------------------------------- life

    @property
    def is_up(self) -> bool:
        return self.core is not None

    @property
    def now_ms(self) -> int:
        return self.clock.read_ms(self._world.now_us)

    def start(self) -> str | None:
        """Begin a new boot; the reason if the program refused to start, or broke."""
        assert self.core is None
        self.boot += 1
        self.is_powered = True
        self.clock.restart()
        self._ends.clear()
        self._readers.clear()
        self._out = []
        self._timer_us = NEVER_MS
        self._free_us = {"log": 0, "state": 0}
        if self.files is not None:
            self.files.ends_in, self.dies_in_next_boot = self.dies_in_next_boot, -1
        try:
            self.core = self._make_core(self)
        except (OSError, CometError) as error:
            return f"{type(error).__name__}: {error}"
        except ProcessEnded:
            return ENDED
        except Exception as error:
            if self.on_crash is None:
                raise
            self.on_crash(self, error)
            return f"{type(error).__name__}: {error}"
        finally:
            if self.files is not None:
                self.files.ends_in = -1
        self._tick()
        return None

    def die(self, *, has_power: bool) -> None:
        """The process ends without a word; what becomes of its files is the caller's business."""
        self.core = None
        self.boot += 1
        self.is_powered = has_power
        self.paused_until_us = 0
        self._network.died(self.name, has_power=has_power)

    def stop(self, then: Callable[[], None]) -> None:
        """An orderly shutdown, as Driver.stop; `then` runs when the files are closed."""
        core = self.core
        assert core is not None
        give_up_us = self._world.now_us + STOP_TIMEOUT_US
        self.guard(core.stop, self.now_ms, self._out)
        self._drain()

        def wait() -> None:
            if not core.is_stopped and self._world.now_us < give_up_us:
                self._tick()
                self._later(5 * MS, "stopping", wait)
                return
            busy_us = max(self._free_us.values()) - self._world.now_us
            self._later(max(busy_us, 0) + 1, "close", close)

        def close() -> None:
            self.guard(core.close, self.now_ms)
            self.die(has_power=True)
            then()

        self._later(5 * MS, "stopping", wait)

    def pause(self, duration_us: int) -> None:
        """The process gets no time; what comes for it waits. It may notice a stall afterwards."""
        self.paused_until_us = max(self.paused_until_us, self._world.now_us + duration_us)
        self.stalled_ms = duration_us // MS if self._rng.randrange(2) else 0

    def guard(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """An exception that leaves a core is a bug of ours, whatever it is."""
        try:
            call(*args, **kwargs)
        except Exception as error:
            if self.on_crash is None:
                raise
            self.on_crash(self, error)

    @property
    def open_conns(self) -> set[int]:
        return set(self._ends)

    def boot_of_peer(self, conn: int) -> int:
        """Which boot of the other side a connection belongs to."""
        end = self._ends.get(conn)
        return 0 if end is None else end.peer.boot

    def _later(self, delay_us: int, label: str, act: Callable[[], None]) -> None:
        self._world.later(delay_us, self.name, self.boot, label, act)

    # ------------------------------------------------------------------------------- the network

    def connected(self, end: End) -> None:
        core = self.core
        assert core is not None
        end.conn = self._next_conn
        self._next_conn += 1
        self._ends[end.conn] = end
        self._readers[end.conn] = FrameReader()
        far = self._world.host(end.peer.node).address.rpartition(":")[0]
        peer = Peer(far, end.port, pack_host(far, end.port), end.dialled)
        self.guard(core.opened, ConnId(end.conn), peer, self.now_ms, self._out)
        self._drain()

    def received(self, end: End, data: bytes) -> None:
        reader = self._readers.get(end.conn)
        if reader is None or self.core is None:
            return
        whole = reader.join(data)
        if whole is None:
            return
        taken = self._receive(end, whole)
        frames = reader.split(whole, taken)
        assert reader.error is None, f"{end.peer.node}: {reader.error}"
        if frames:
            self._turn(end, frames)
        elif taken:
            self._settle()

    def _receive(self, end: End, data: bytes) -> int:
        """The core's chance to take raw bytes, as Driver.receive."""
        core = self.core
        assert core is not None
        try:
            taken, _ = core.receive(ConnId(end.conn), data, self.now_ms, self._out)
            if taken and self.stalled_ms:
                stalled_ms, self.stalled_ms = self.stalled_ms, 0
                core.stalled(stalled_ms, self.now_ms, self._out)
            return taken
        except Exception as error:
            if self.on_crash is None:
                raise
            self.on_crash(self, error)
            return len(data)

    def _turn(self, end: End, frames: list[Frame]) -> None:
        core, conn = self.core, ConnId(end.conn)
        assert core is not None
        for frame in frames:
            self.guard(core.handle, conn, frame, 0, self.now_ms, self._out)
            if self.stalled_ms:
                stalled_ms, self.stalled_ms = self.stalled_ms, 0
                core.stalled(stalled_ms, self.now_ms, self._out)
            if self.core is None or not end.is_open:
                break
        self._settle()

    def disconnected(self, end: End) -> None:
        if self._ends.pop(end.conn, None) is None or self.core is None:
            return
        del self._readers[end.conn]
        core = self.core
        self.guard(core.closed, ConnId(end.conn), self.now_ms, self._out)
        self._settle()

    def unreachable(self, address: str, reason: str) -> None:
        core = self.core
        assert core is not None
        self.guard(core.dial_failed, address, reason, self.now_ms, self._out)
        self._drain()

    # ------------------------------------------------------------------------------------- turns

    def _settle(self) -> None:
        core = self.core
        if core is not None:
            self.guard(core.settle, self.now_ms, self._out)
            self._drain()

    def _tick(self) -> None:
        core = self.core
        assert core is not None
        self._count_tick()
        self._timer_us = NEVER_MS
        self.guard(core.tick, self.now_ms, self._out)
        self._settle()

    def _count_tick(self) -> None:
        now = self._world.now_us
        if now - self._ticks_since_us > 1_000 * MS:
            self._ticks, self._ticks_since_us = 0, now
        self._ticks += 1
        assert self._ticks <= MOST_TICKS_PER_S, f"{self.name} spins: its deadline stands still"

    def _schedule(self) -> None:
        if self.core is None:
            return
        wait_us = (self.core.deadline_ms - self.now_ms) * MS
        if wait_us < LEAST_SLEEP_US:
            wait_us = LEAST_SLEEP_US
        elif wait_us > LONGEST_SLEEP_US:
            wait_us = LONGEST_SLEEP_US
        at_us = self._world.now_us + wait_us
        if self._timer_us <= at_us:
            return
        self._timer += 1
        self._timer_us = at_us
        self._later(wait_us, "tick", partial(self._fire, self._timer))

    def _fire(self, number: int) -> None:
        if number == self._timer and self.core is not None:
            self._tick()

    def _drain(self) -> None:
        """Carry out what the core asked for; bytes of one turn leave in one piece."""
        out, self._out = self._out, []
        if not out:
            self._schedule()
            return
        outbox: dict[int, list[bytes]] = {}
        closes: list[End] = []
        for effect in out:
            if isinstance(effect, Send):
                if effect.conn in self._ends:
                    outbox.setdefault(effect.conn, []).append(effect.data)
            elif isinstance(effect, Flush):
                self._flush(effect)
            elif isinstance(effect, Save):
                self._save(effect)
            elif isinstance(effect, Dial):
                self._network.dial(self, effect.address)
            elif isinstance(effect, Close):
                end = self._ends.get(effect.conn)
                if end is not None:
                    closes.append(end)
        for conn, parts in outbox.items():
            self._network.send(self._ends[conn], b"".join(parts))
        for end in closes:
            self._later(0, "closing", partial(self._network.close, end))
        if self.core is not None:
            self._schedule()

    # ----------------------------------------------------------------------------------- workers

    def _flush(self, effect: Flush) -> None:
        targets = effect.targets

        def job() -> Iterator[None]:
            for target in targets:
                target.sync()
                yield

        def done(reason: str | None) -> None:
            core = self.core
            assert core is not None
            if reason is None:
                self.guard(core.flushed, effect.kind, self.now_ms, self._out)
            else:
                self.guard(core.flush_failed, effect.kind, reason, self.now_ms, self._out)
            self._settle()

        self._work("log" if effect.kind == "log" else "state", job(), len(targets), done)

    def _save(self, effect: Save) -> None:
        files = self.files
        assert files is not None, "a core that saves needs files"

        def done(reason: str | None) -> None:
            core = self.core
            assert core is not None
            self.guard(core.saved, effect.name, reason, self.now_ms, self._out)
            self._settle()

        self._work("state", files.replacing(effect.name, effect.content), 4, done)

    def _work(
        self, worker: str, job: Iterator[None], steps: int, done: Callable[[str | None], None]
    ) -> None:
        """A job of a background thread: it begins when the one before has ended, its steps happen
        at moments in between, and the core hears of it at the end."""
        pace, rng, now = self.pace, self._rng, self._world.now_us
        duration = pace.least_us + rng.randrange(2 * pace.mean_us)
        if pace.slow_percent and rng.randrange(100) < pace.slow_percent:
            duration += rng.randrange(pace.slow_us)
        begin = max(now, self._free_us[worker])
        self._free_us[worker] = begin + duration
        failure: list[str] = []

        def step(is_last: bool) -> None:
            if failure:
                return
            try:
                for _ in job:
                    if not is_last:
                        break
            except OSError as error:
                failure.append(f"OSError: {error}")

        moments = sorted(rng.randrange(duration) for _ in range(max(steps, 1)))
        for number, moment in enumerate(moments):
            is_last = number == len(moments) - 1
            self._later(begin + moment - now, "sync", partial(step, is_last))
        self._later(begin + duration - now, "worked", lambda: done(failure[0] if failure else None))
