"""Cluster: real name servers, brokers and clients in one thread, in virtual time, under a seed.

Owns: time, the order of events, and the life of a run: build, faults, healing, the last look. One
rule: the seed decides everything. Events stand in one heap by (time, sequence); randomness is split
by concern, so that one more draw in the network does not shift the disks; nothing reads a clock.

Phase one is about safety: things go wrong, and nothing that was promised may be lost. Then all
faults end, and phase two demands that everybody gets done within a deadline.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from cometmq import _fast
from cometmq.broker.broker import Broker, Identity, store_config
from cometmq.config import NameServerConfig
from cometmq.nameserver.nameserver import NameServer
from cometmq.ports import Core
from cometmq.store.layout import COMMIT_LOG
from cometmq.store.store import Store
from cometmq.testing import checkers, kinds
from cometmq.testing.admin import Admin, AdminPlan
from cometmq.testing.client import GRACE_US, Client, Role, RouteCache
from cometmq.testing.disk import SimulatedFiles
from cometmq.testing.faults import Faults
from cometmq.testing.history import History, Recovery
from cometmq.testing.kinds_base import KindPlan, Ledger
from cometmq.testing.network import MS, Network
from cometmq.testing.node import ENDED, Node
from cometmq.testing.swarm import DOOMED, BrokerPlan, Swarm, draw
from cometmq.testing.traffic import Consumer, ConsumerPlan, Producer, ProducerPlan

if TYPE_CHECKING:
    from cometmq._fast.hot import Hot

DEADLINE_US = 120_000 * MS  # phase two: everybody is done by then
LEAST_HEALED_US = 9_500 * MS  # and this long at least, so that silence can be told from slowness
MOST_EVENTS = 400_000
RESTART_US = 300 * MS

_NO_STEP = (0, 0, 0, 0)

_Event = tuple[int, int, str, int | None, str, Callable[[], None]]


class Outcome(msgspec.Struct):
    """What a run came to. Equal seeds give equal hashes: of all events, and of the bytes alone."""

    seed: int
    problems: list[str]
    trace_hash: str
    events: int
    virtual_ms: int
    sent: int
    acked: int
    consumed: int
    lost_acks: int
    boots: int
    faults: dict[str, int]
    wire_hash: str = ""


def _compiled_path() -> Hot | None:
    """As run.py does; the same seed is the same run with it and without."""
    module, _ = _fast.load()
    return None if module is None else cast("Hot", module.Hot())


MakeRole = Callable[[RouteCache, random.Random], Role]
"""Makes what one more client does, from the routes it can ask for and the chance it may use."""


class Cluster:
    """One run. `run` plays it to its end; what happens besides the swarm's faults is told before,
    by `at`. `roles` are clients of your own, by name."""

    def __init__(
        self,
        seed: int,
        swarm: Swarm | None = None,
        trace: Callable[[str], None] | None = None,
        *,
        roles: Mapping[str, MakeRole] | None = None,
    ) -> None:
        self.seed = seed
        self.swarm = swarm or draw(seed)
        self.now_us = 0
        self.events = 0
        self.history = History()
        self.network = Network(random.Random(f"{seed}:network"), self)
        self.nodes: dict[str, Node] = {}
        self.brokers: dict[str, BrokerPlan] = {}
        self._heap: list[_Event] = []
        self._sequence = 0
        self._by_address: dict[str, Node] = {}
        self._trace = trace
        self._hash = hashlib.blake2b(digest_size=8)
        self._before: dict[str, tuple[int, int, int, bool]] = {}
        self._steps: dict[str, tuple[int, checkers.Step]] = {}
        self._end_us = -1
        self._ledger: Ledger | None = None
        self.history.is_on_disk = self._is_on_disk
        self.history.trusts_clocks = not {"step", "drift"} & set(self.swarm.faults)
        if self.swarm.kinds:
            self.history.ledger = self._ledger = Ledger(self.swarm.kinds)
            self._ledger.clock = lambda name: self.nodes[name].now_ms
            self._ledger.is_true_time = "step" not in self.swarm.faults
        self._build()
        self._add_roles(roles or {})
        self.faults = Faults(self, random.Random(f"{seed}:faults"))

    # ------------------------------------------------------------------------------------- building

    def _build(self) -> None:
        swarm = self.swarm
        servers = [f"10.0.0.{n + 1}:9876" for n in range(swarm.name_servers)]
        for number, address in enumerate(servers):
            self._add(f"namesrv-{number}", address, self._make_name_server, has_disk=True)
        addresses = {}
        for number, plan in enumerate(swarm.brokers):
            name = plan.config.name
            address = f"10.0.1.{number + 1}:10911"
            config = msgspec.structs.replace(plan.config, namesrv=";".join(servers))
            self.brokers[name] = msgspec.structs.replace(plan, config=config)
            self.history.sync_brokers[name] = config.flush == "SYNC_FLUSH"
            addresses[name] = address
            self._add(name, address, self._make_broker, has_disk=True)
        if swarm.has_doomed:
            self.history.doomed[DOOMED] = None
        admin = AdminPlan(
            brokers=addresses,
            topics=swarm.topics,
            doomed=tuple(self.history.doomed),
            reset_groups=tuple(dict.fromkeys(c.group for c in swarm.consumers if not c.kind))
            if swarm.resets
            else (),
            interval_ms=1_500,
            name_servers={f"namesrv-{n}": address for n, address in enumerate(servers)},
            trusts_topics=not {"step", "drift", "slow_sync", "failed_sync", "full", "pause"}
            & set(swarm.faults),
            more_topics=kinds.queue_counts(swarm.kinds),
            attributes=kinds.attributes(swarm.kinds),
        )
        self._add("admin", "10.0.2.1:1", lambda n: self._client(n, Admin(admin, self._rng(n))))
        for number, producer in enumerate(swarm.producers):
            self._add_producer(number, producer, servers)
        for number, consumer in enumerate(swarm.consumers):
            self._add_consumer(number, consumer, servers)
        for number, kind in enumerate(swarm.kind_producers):
            self._add_kind_producer(number, kind, servers)

    def _add_roles(self, roles: Mapping[str, MakeRole]) -> None:
        servers = [node.address for node in self.nodes.values() if node.name.startswith("namesrv")]
        for number, (name, make_role) in enumerate(roles.items()):

            def make(node: Node, make_role: MakeRole = make_role) -> Core:
                return self._client(node, make_role(RouteCache(servers), self._rng(node)))

            self._add(f"client-{name}", f"10.0.5.{number + 1}:1", make)

    def _add_producer(self, number: int, plan: ProducerPlan, servers: list[str]) -> None:
        def make(node: Node) -> Core:
            # A new process makes new messages: its boot is part of their names.
            name = f"{node.name}.{node.boot}"
            return self._client(node, Producer(name, plan, RouteCache(servers), self._rng(node)))

        self._add(f"producer-{number}", f"10.0.3.{number + 1}:1", make)

    def _add_consumer(self, number: int, plan: ConsumerPlan, servers: list[str]) -> None:
        def make(node: Node) -> Core:
            name = f"{node.name}@{node.boot}"
            kind = kinds.make_consumer if plan.kind else Consumer
            return self._client(node, kind(name, plan, RouteCache(servers), self._rng(node)))

        self._add(f"consumer-{number}", f"10.0.4.{number + 1}:1", make)

    def _add_kind_producer(self, number: int, plan: KindPlan, servers: list[str]) -> None:
        def make(node: Node) -> Core:
            name = f"{node.name}.{node.boot}"
            role = kinds.make_producer(name, plan, RouteCache(servers), self._rng(node))
            return self._client(node, role)

        self._add(f"producer-{plan.kind}-{number}", f"10.0.6.{number + 1}:1", make)

    def _add(
        self, name: str, address: str, make: Callable[[Node], Core], *, has_disk: bool = False
    ) -> None:
        files = None
        if has_disk:
            files = SimulatedFiles(
                random.Random(f"{self.seed}:disk:{name}"), lambda: self.nodes[name].now_ms
            )
        rng = random.Random(f"{self.seed}:process:{name}")
        node = Node(self, self.network, name, address, make, rng, files)
        node.on_crash = self._crashed
        self.nodes[name] = node
        self._by_address[address] = node

    def _rng(self, node: Node) -> random.Random:
        return random.Random(f"{self.seed}:traffic:{node.name}:{node.boot}")

    def _client(self, node: Node, role: Role) -> Client:
        return Client(
            node.name,
            role,
            self.history,
            self._rng(node),
            lambda: self.now_us,
            node.boot_of_peer,
            serialize=self.seed % 2,
        )

    def _make_name_server(self, node: Node) -> Core:
        assert node.files is not None
        server = NameServer(NameServerConfig(), node.files.read("kvConfig.json"))
        checkers.check_settings(self.history, node.name, server)
        return server

    def _make_broker(self, node: Node) -> Core:
        assert node.files is not None
        plan = self.brokers[node.name]
        settings = msgspec.structs.replace(
            store_config(plan.config, 1 << 30),
            max_open_queue_files=plan.max_open_queue_files,
            max_open_log_files=plan.max_open_log_files,
        )
        hot = _compiled_path() if plan.config.is_compiled_path_enabled else None
        store = Store.open(node.files, settings, node.now_ms, hot=hot)
        host, _, port = node.address.rpartition(":")
        broker = Broker(
            plan.config,
            Identity(host, int(port), 1, node.boot),
            store,
            node.now_ms,
            timer_slots=plan.timer_slots,
        )
        self._look_at_recovery(node, broker)
        return broker

    # ------------------------------------------------------------------------------- for scenarios

    def at(self, ms: int, act: Callable[[], None]) -> None:
        """Do something at a moment of the run: kill, lose_power, stop or start a node, say."""
        self.later(max(ms * MS - self.now_us, 0), "script", None, "script", act)

    # ---------------------------------------------------------------------------------------- world

    def later(
        self, delay_us: int, name: str, boot: int | None, label: str, act: Callable[[], None]
    ) -> None:
        assert delay_us >= 0, (delay_us, label)
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_us + delay_us, self._sequence, name, boot, label, act))

    def note(self, text: str) -> None:
        self._hash.update(text.encode())
        if self._trace is not None:
            self._trace(f"{self.now_us / MS:12.3f}  {text}")

    def host(self, name: str) -> Node:
        return self.nodes[name]

    def host_at(self, address: str) -> Node | None:
        return self._by_address.get(address)

    # ------------------------------------------------------------------------------------- the run

    def run(self) -> Outcome:
        """Play the whole run; problems are in the outcome, never raised."""
        try:
            self._run()
        except Exception as error:
            self.history.problem(f"the run broke off: {_tell(error)}")
        return self._outcome()

    def _run(self) -> None:
        for name in self.nodes:
            self.start(name)
        self.faults.begin()
        self._play(self.swarm.duration_ms * MS)
        if not self.history.problems:
            self._heal()
            self._play(self.now_us + DEADLINE_US)
        if not self.history.problems:
            if self._end_us < 0:
                self._report_not_done()
            else:
                self._last_look()

    def _play(self, until_us: int) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until_us and self._end_us < 0:
            at, sequence, name, boot, label, act = heapq.heappop(heap)
            self.now_us = at
            node = self.nodes.get(name)
            if node is not None:
                if boot is not None and boot != node.boot:
                    continue
                if node.paused_until_us > at:
                    # With its old sequence number: what waits keeps its order.
                    until_us = node.paused_until_us
                    heapq.heappush(heap, (until_us, sequence, name, boot, label, act))
                    continue
            self.events += 1
            if label != "arrive":
                self.note(f"{at} {name} {label}")
            try:
                act()
            except AssertionError as error:
                self.history.problem(f"assertion at {name}, {label}: {error}")
            if name in self.brokers:
                self._look_at_step(name)
            if self.history.problems or self.events > MOST_EVENTS:
                break
        if self.events > MOST_EVENTS:
            self.history.problem(f"more than {MOST_EVENTS} events: something spins")
        if not self.history.problems and self._end_us < 0:
            self.now_us = until_us

    def _outcome(self) -> Outcome:
        history = self.history
        return Outcome(
            seed=self.seed,
            problems=history.problems,
            trace_hash=self._hash.hexdigest(),
            events=self.events,
            virtual_ms=self.now_us // MS,
            sent=len(history.sent),
            acked=history.ack_count,
            consumed=history.consumed_count,
            lost_acks=history.lost_ack_count,
            boots=sum(len(found) for found in history.recoveries.values()),
            faults=self.faults.counts,
            wire_hash=self.network.hash,
        )

    # ------------------------------------------------------------------------- processes that end

    def start(self, name: str) -> None:
        """Start a node; one that refuses because of its disk is started again later."""
        node = self.nodes[name]
        if node.is_up:
            return
        reason = node.start()
        if reason is None:
            return
        self.note(f"{name} refused to start: {reason}")
        files = node.files
        assert files is not None
        is_excused = reason == ENDED or reason.startswith("OSError")
        if not is_excused or self.history.healed_us >= 0:
            self.history.problem(f"{name} refuses to start: {reason}")
            return
        has_power = reason != ENDED or self.faults.is_only_killed()
        if name in self._before and (files.has_lost_sectors or not has_power):
            self._before[name] = (*self._before[name][:3], False)
        node.die(has_power=has_power)
        if has_power:
            files.kill()
        else:
            files.lose_power(50)
        self.later(RESTART_US, "faults", None, "start again", lambda: self.start(name))

    def kill(self, name: str) -> None:
        """kill -9: the machine goes on."""
        self._remember_end(name)
        node = self.nodes[name]
        node.die(has_power=True)
        if node.files is not None:
            node.files.kill()

    def lose_power(
        self, name: str, keep_percent: int = 50, flips: int = 0, *, loses_only: str | None = None
    ) -> None:
        """The machine goes too, and with it what was not synced; see SimulatedFiles.lose_power."""
        self._remember_end(name, is_lossless=False)
        node = self.nodes[name]
        node.die(has_power=False)
        if node.files is not None:
            node.files.lose_power(keep_percent, flips, checkers.may_flip, loses_only=loses_only)

    def stop(self, name: str, then: Callable[[], None]) -> None:
        """An orderly stop; `then` when it is over."""
        node = self.nodes[name]
        broker = node.core

        def over() -> None:
            if isinstance(broker, Broker):
                self._remember_store(name, broker.store)
            if node.files is not None:
                node.files.kill()
            then()

        node.stop(over)

    def _remember_end(self, name: str, *, is_lossless: bool = True) -> None:
        core = self.nodes[name].core
        if isinstance(core, Broker):
            checkers.check_broker(self.history, name, core)
            self._remember_store(name, core.store, is_lossless=is_lossless)

    def _remember_store(self, name: str, store: Store, *, is_lossless: bool = True) -> None:
        files = self.nodes[name].files
        assert files is not None
        is_lossless = is_lossless and not files.has_lost_sectors
        self._before[name] = (
            store.min_log_offset,
            store.flushed_offset,
            store.max_log_offset,
            is_lossless,
        )

    def _look_at_recovery(self, node: Node, broker: Broker) -> None:
        """A broker is back: what was promised must be there."""
        store, name = broker.store, node.name
        begun, flushed, written, is_lossless = self._before.pop(name, (0, 0, 0, True))
        end = store.max_log_offset
        self.note(f"{name} recovered {flushed} {end} {written} {is_lossless}")
        begin = store.min_log_offset
        least = written if is_lossless else flushed
        is_begin_right = begin == begun
        if self.brokers[name].config.clean_forcibly:  # a removal may be undone by a power loss
            is_begin_right = begin <= begun
        if is_begin_right:
            is_right = least <= end <= written
        else:  # with no log left at all the store begins anew behind what its queues point to
            is_right = begin > begun >= least
        if not is_right:
            self.history.problem(
                f"{name} boot {node.boot}: the log is {begin} to {end}, but {flushed} was flushed, "
                f"{written} written" + (" and nothing was lost" if is_lossless else "")
            )
        ends = {(topic, queue): store.max_offset(topic, queue) for topic, queue in store.queues()}
        if self.brokers[name].config.clean_forcibly:
            self.history.expired(name, begun)
        if self._ledger is not None:
            self._ledger.boots.setdefault(name, []).append(node.now_ms)
        self.history.recovered(name, Recovery(node.boot, begin, end, ends, is_lossless))
        checkers.check_broker(self.history, name, broker, is_new=True)

    def _look_at_step(self, name: str) -> None:
        node = self.nodes[name]
        core = node.core
        if not isinstance(core, Broker):
            return
        boot, before = self._steps.get(name, (0, _NO_STEP))
        if boot != node.boot:
            before = _NO_STEP
        step = checkers.check_step(self.history, name, core.store, before)
        self._steps[name] = (node.boot, step)
        if boot == node.boot and step[0] > before[0]:
            assert node.files is not None
            checkers.check_dropped(self.history, name, core.store, node.files.is_durable)

    def _is_on_disk(self, name: str, boot: int, log_offset: int) -> bool:
        """Asked when a firm acknowledgement arrives; of earlier boots their recovery tells."""
        node = self.nodes[name]
        core, files = node.core, node.files
        if not isinstance(core, Broker) or files is None or node.boot != boot:
            return True
        if log_offset < core.store.min_log_offset:
            return True  # dropped since
        raw = core.store.record_at(log_offset)
        if raw is None:
            return False
        at = log_offset % core.config.log_file_bytes
        return files.is_durable(f"{COMMIT_LOG}/{log_offset - at:020}", at, len(raw))

    def _crashed(self, node: Node, error: Exception) -> None:
        """An exception left a core: our bug, whatever it says."""
        self.history.problem(f"{node.name} raised {_tell(error)}")

    # ------------------------------------------------------------------------------------ the end

    def _heal(self) -> None:
        self.note("heal")
        self.faults.heal()
        self.history.healed_us = self.now_us
        if self._ledger is not None:
            self._ledger.healed_ms = {name: self.nodes[name].now_ms for name in self.brokers}
        for name in self.nodes:
            self.start(name)
        for name, broker in self._live().items():
            checkers.check_broker(self.history, name, broker)
        self.later(GRACE_US, "watch", None, "nudge", self._nudge)
        self._watch()

    def _nudge(self) -> None:
        """Each name server loses a client, which should concern nobody else."""
        for name, server in self._name_servers().items():
            before = checkers.known_brokers(server)
            for end in self.network.open_ends():
                if end.peer.node == name and not end.node.startswith("broker"):
                    self.network.reset(end)
                    break

            def look(name: str = name, before: set[str] = before) -> None:
                gone = before - checkers.known_brokers(self._name_servers()[name])
                if gone:
                    self.history.problem(f"{name} lost a client and forgot {sorted(gone)}")

            self.later(500 * MS, "watch", None, "look", look)

    def _watch(self) -> None:
        """Look now and then whether everybody is done; the run ends when they are."""
        self.faults.mend_read_only(is_certain=True)  # a sync that failed before may be told now
        is_time = self.now_us - self.history.healed_us > LEAST_HEALED_US
        is_known = all(
            checkers.known_brokers(server) == set(self.brokers)
            for server in self._name_servers().values()
        )
        if is_time and is_known and self._roles_done() and not self._not_yet():
            self._end_us = self.now_us
            return
        self.later(500 * MS, "watch", None, "watch", self._watch)

    def _not_yet(self) -> list[str]:
        """What groups still wait for."""
        live = self._live()
        members = [
            node.core.role
            for node in self.nodes.values()
            if isinstance(node.core, Client) and isinstance(node.core.role, Consumer)
        ]
        return [
            *checkers.missing(self.history, live, self.swarm),
            *checkers.unshared(self.history, live, self.swarm, members),
        ]

    def _roles_done(self) -> bool:
        return all(
            node.core.role.is_done for node in self.nodes.values() if isinstance(node.core, Client)
        )

    def _name_servers(self) -> dict[str, NameServer]:
        return {
            name: node.core
            for name, node in self.nodes.items()
            if isinstance(node.core, NameServer)
        }

    def _live(self) -> dict[str, Broker]:
        return {
            name: core for name in self.brokers if isinstance(core := self.nodes[name].core, Broker)
        }

    def _report_not_done(self) -> None:
        waiting = [
            name
            for name, node in self.nodes.items()
            if not node.is_up or (isinstance(node.core, Client) and not node.core.role.is_done)
        ]
        if waiting:
            self.history.problem(f"not done {DEADLINE_US // MS} ms after healing: {waiting}")
        for name, server in self._name_servers().items():
            unknown = sorted(set(self.brokers) - checkers.known_brokers(server))
            if unknown:
                self.history.problem(f"{name} does not know {unknown}")
        for text in self._not_yet():
            self.history.problem(text)

    def _last_look(self) -> None:
        """End every broker once more and see what the next one finds."""
        for name, server in self._name_servers().items():
            checkers.check_settings(self.history, name, server)
            checkers.check_ghosts(self.history, name, server, self.nodes[name].open_conns)
        for name, broker in self._live().items():
            checkers.check_ghosts(self.history, name, broker, self.nodes[name].open_conns)
            if broker.store.read_only_reason is not None:
                self.history.problem(f"{name} is read-only: {broker.store.read_only_reason}")
            checkers.check_broker(self.history, name, broker)
            node = self.nodes[name]
            if self.swarm.ending == "power":
                self.lose_power(name, keep_percent=50, flips=0)
            elif self.swarm.ending == "kill":
                self.kill(name)
            else:
                broker.store.close(node.now_ms)
                self._remember_store(name, broker.store)
                node.die(has_power=True)
                assert node.files is not None
                node.files.kill()
            self.start(name)


def _tell(error: Exception) -> str:
    """What was raised, and where."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        where = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"
