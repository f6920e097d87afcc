"""Faults: what goes wrong in phase one, when, and for how long.

Owns: the menu of a run's faults and their counts. One rule: a fault does what the world does to
processes, never what only a bug could do; and healing ends all of them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from cometmq.broker.broker import Broker
from cometmq.testing.network import MS, End
from cometmq.testing.node import DiskPace, Node

if TYPE_CHECKING:
    from cometmq.testing.cluster import Cluster

FLIPS = 3  # bits flipped by one power loss, at most


class Faults:
    """Draws the next fault now and then, out of those that the swarm switched on."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._menu = [name for name in cluster.swarm.faults if name != "flip"]
        self._flips = FLIPS if "flip" in cluster.swarm.faults else 0
        self.counts: dict[str, int] = {}

    def begin(self) -> None:
        if "split" in self._menu:
            self._cluster.network.pace.split_percent = 30
            self._count("split")
        self._menu = [name for name in self._menu if name != "split"]
        if self._menu:
            self._plan_next()

    def _plan_next(self) -> None:
        interval_us = self._cluster.swarm.fault_interval_ms * MS
        self._later(1 + self._rng.randrange(2 * interval_us), self._strike)

    def _later(self, delay_us: int, act: object) -> None:
        assert callable(act)
        self._cluster.later(delay_us, "faults", None, "fault", act)

    def is_only_killed(self) -> bool:
        """Whether a process that ends in its start leaves its machine running."""
        return bool(self._rng.randrange(2))

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _strike(self) -> None:
        if self._cluster.history.healed_us >= 0:
            return
        self.mend_read_only()
        name = self._rng.choice(self._menu)
        self._count(name)
        self._cluster.note(f"fault {name}")
        getattr(self, f"_{name}")()
        self._plan_next()

    def heal(self) -> None:
        """The world is sound again: what is down may start, what was slow is fast."""
        cluster = self._cluster
        cluster.network.mend()
        for node in cluster.nodes.values():
            node.pace = DiskPace()
            node.paused_until_us = 0
            node.clock.set(cluster.now_us, drift_ppm=0)
            node.is_powered = True
            node.dies_in_next_boot = -1
            if node.files is not None:
                node.files.failing_syncs = 0
                node.files.is_full = False
                node.files.ratio = 0.10
        self.mend_read_only(is_certain=True)

    def mend_read_only(self, *, is_certain: bool = False) -> None:
        """An operator restarts brokers that stopped taking messages after a failed sync."""
        for name in self._cluster.brokers:
            core = self._cluster.nodes[name].core
            if isinstance(core, Broker) and core.store.read_only_reason is not None:
                if is_certain or self._rng.randrange(3) == 0:
                    self._cluster.kill(name)
                    self._restart_later(name)

    # -------------------------------------------------------------------------------------- choices

    def _servers(self) -> list[Node]:
        names = [n for n in self._cluster.nodes if n.startswith(("broker", "namesrv"))]
        return [self._cluster.nodes[name] for name in names]

    def _running(self, *prefixes: str) -> Node | None:
        """A running node, brokers preferred."""
        found = [
            node
            for name, node in self._cluster.nodes.items()
            if node.is_up and name.startswith(prefixes)
        ]
        brokers = [node for node in found if node.name.startswith("broker")]
        if brokers and self._rng.randrange(4):
            found = brokers
        return self._rng.choice(found) if found else None

    def _end(self) -> End | None:
        ends = self._cluster.network.open_ends()
        return self._rng.choice(ends) if ends else None

    def _while_us(self) -> int:
        return self._rng.choice((50, 500, 2_500)) * MS + self._rng.randrange(200 * MS)

    # -------------------------------------------------------------------------------------- network

    def _delay(self) -> None:
        pace = self._cluster.network.pace
        pace.slow_percent, pace.slow_us = 20, self._rng.choice((5, 50, 1_000)) * MS

        def over() -> None:
            pace.slow_percent = 0

        self._later(self._while_us(), over)

    def _stall(self) -> None:
        end = self._end()
        if end is not None:
            self._cluster.network.stall(end, self._while_us())

    def _reset(self) -> None:
        end = self._end()
        if end is not None:
            self._cluster.network.reset(end)

    def _half_open(self) -> None:
        end = self._end()
        if end is not None:
            self._cluster.network.half_open(end)

    def _one_way(self) -> None:
        self._cut(is_both=False)

    def _two_way(self) -> None:
        self._cut(is_both=True)

    def _cut(self, *, is_both: bool) -> None:
        """A node loses one other node, or all of them."""
        cluster, network = self._cluster, self._cluster.network
        victim = self._rng.choice(list(cluster.nodes))
        others = [name for name in cluster.nodes if name != victim]
        if self._rng.randrange(2):
            others = [self._rng.choice(others)]
        for other in others:
            network.cut(victim, other)
            if is_both:
                network.cut(other, victim)
        self._later(self._while_us(), network.heal)

    # ----------------------------------------------------------------------------------------- disk

    def _slow_sync(self) -> None:
        node = self._running("broker", "namesrv")
        if node is None:
            return
        pace = node.pace
        pace.slow_percent, pace.slow_us = 50, self._rng.choice((20, 500, 4_000)) * MS

        def over() -> None:
            pace.slow_percent = 0

        self._later(self._while_us(), over)

    def _failed_sync(self) -> None:
        node = self._running("broker", "namesrv")
        if node is not None and node.files is not None:
            node.files.failing_syncs = self._rng.choice((1, 1, 3))

    def _fill(self) -> None:
        """A disk so full that expired files go, or all old ones, while there is still room."""
        node = self._running("broker")
        if node is None or node.files is None:
            return
        files = node.files
        files.ratio = self._rng.choice((0.80, 0.88, 0.88, 0.88))

        def over() -> None:
            files.ratio = 0.10

        self._later(500 * MS + self._while_us(), over)

    def _full(self) -> None:
        node = self._running("broker", "namesrv")
        if node is None or node.files is None:
            return
        files = node.files
        files.is_full = True
        files.ratio = self._rng.choice((0.80, 0.88, 0.95))

        def over() -> None:
            files.is_full = False
            files.ratio = 0.10

        self._later(self._while_us(), over)

    # ------------------------------------------------------------------------------------ processes

    def _restart_later(self, name: str) -> None:
        delay_us = self._rng.choice((10, 200, 2_000)) * MS
        self._later(delay_us, lambda: self._cluster.start(name))

    def _kill(self) -> None:
        node = self._running("broker", "namesrv")
        if node is not None:
            self._cluster.kill(node.name)
            self._restart_later(node.name)

    def _die_in_boot(self) -> None:
        """A broker ends, and again in the middle of its next start."""
        node = self._running("broker")
        if node is not None:
            node.dies_in_next_boot = self._rng.randrange(8)
            if self._rng.randrange(2):
                self._lose_power(node)
            else:
                self._cluster.kill(node.name)
                self._restart_later(node.name)

    def _power(self) -> None:
        node = self._running("broker", "namesrv")
        if node is not None:
            self._lose_power(node)

    def _queues_ahead(self) -> None:
        """A power loss after the queues and all else were written back, and the log was not."""
        node = self._running("broker")
        if node is not None:
            self._cluster.lose_power(
                node.name, self._rng.choice((0, 0, 50)), 0, loses_only="commitlog/"
            )
            self._restart_later(node.name)

    def _lose_power(self, node: Node) -> None:
        self._cluster.lose_power(node.name, self._rng.choice((0, 10, 50, 90, 100)), self._flips)
        if self._flips:
            self._count("flip")
        self._restart_later(node.name)

    def _everything(self) -> None:
        """The whole room loses its power at once."""
        for node in self._servers():
            if node.is_up:
                self._lose_power(node)

    def _stop(self) -> None:
        node = self._running("broker", "namesrv")
        if node is not None and not getattr(node.core, "is_stopping", False):
            name = node.name
            self._cluster.stop(name, lambda: self._restart_later(name))

    def _pause(self) -> None:
        node = self._running("broker", "namesrv", "consumer", "producer")
        if node is not None:
            node.pause(self._while_us())

    def _client_kill(self) -> None:
        node = self._running("consumer", "producer")
        if node is not None:
            self._cluster.kill(node.name)
            self._restart_later(node.name)

    # --------------------------------------------------------------------------------------- clocks

    def _step(self) -> None:
        node = self._rng.choice(list(self._cluster.nodes.values()))
        step_ms = self._rng.choice((-60_000, -2_000, -10, 10, 2_000, 60_000))
        node.clock.set(self._cluster.now_us, step_us=step_ms * MS)

    def _drift(self) -> None:
        node = self._rng.choice(list(self._cluster.nodes.values()))
        node.clock.set(
            self._cluster.now_us, drift_ppm=self._rng.choice((-200_000, -1_000, 1_000, 200_000))
        )
