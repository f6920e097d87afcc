"""python -m cometmq.testing.client_runs: the asyncio client on a SimLoop, under a seed, in trouble.

Owns: what a seed draws (cluster, members, faults) and playing it: trouble for a while, then
everything heals and all must come to its end. One rule: producers, consumers, brokers and name
servers are the product's own code; only time, network, disks and chance are simulated.

    --seed N         one seed; --trace prints every event and every line of the log
    --seconds S      fresh seeds for so long
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from cometmq.client.connection import Connections
from cometmq.client.session import World
from cometmq.config import BrokerConfig
from cometmq.testing.client_checks import Record
from cometmq.testing.client_members import GROUP, TOPIC, Flow, Member, Sender, unsent
from cometmq.testing.client_trouble import FAULTS, Trouble
from cometmq.testing.loop import SimLoop, SimulationError, simulate
from cometmq.testing.loop_network import Process, running_process
from cometmq.testing.node import EPOCH_MS
from cometmq.testing.server_on_loop import SimServer, sim_broker, sim_name_server
from cometmq.testing.simulate import _utc, commit, fresh
from cometmq.wire.codes import RequestCode

MOST_FAILURES = 4  # of one message's handlers; far from the 16 that make a dead letter
LOOK_S = 0.5
STUCK_S = 200.0  # without any progress, when all is well again; a dead member counts for 120 s
LONGEST_S = 4_000.0


class Plan(msgspec.Struct, frozen=True):
    """What a seed has drawn."""

    broker_count: int
    name_server_count: int
    is_sync: bool
    is_compiled: bool
    queue_count: int
    is_ordered: bool
    producer_count: int
    keys: int
    """Sharding keys of each producer; each is a flow of messages, one after the other."""
    messages: int
    """Of each flow."""
    gap_s: float
    """Between messages of a flow, on average."""
    consumer_count: int
    concurrency: int
    pull_batch: int
    batch: int
    fail_percent: int
    slow_percent: int
    slow_s: float
    consume_timeout_s: float
    faults: tuple[str, ...]
    trouble_s: float
    calm_s: float
    """Between faults, at most."""


def draw(seed: int, **pins: object) -> Plan:
    """The plan of a seed; `pins` are fields that are given."""
    rng = random.Random(f"{seed}:client plan")
    is_ordered = rng.randrange(2) == 0
    plan = Plan(
        broker_count=rng.choice((1, 1, 2)),
        name_server_count=rng.choice((1, 2)),
        is_sync=rng.randrange(3) > 0,
        is_compiled=rng.randrange(4) > 0,
        queue_count=rng.choice((1, 2, 4)),
        is_ordered=is_ordered,
        producer_count=rng.choice((1, 2)),
        keys=rng.choice((1, 2, 3)),
        messages=rng.choice((10, 20, 40)),
        gap_s=rng.choice((0.01, 0.3, 2.0)),
        consumer_count=rng.choice((2, 2, 3)),
        concurrency=rng.choice((1, 2, 4, 20)),
        pull_batch=rng.choice((1, 4, 32)),
        batch=rng.choice((1, 1, 3)),
        fail_percent=rng.choice((0, 5, 25)),
        slow_percent=rng.choice((0, 5, 40)),
        slow_s=rng.choice((0.5, 5.0, 25.0)) if is_ordered else rng.choice((0.5, 5.0, 40.0)),
        consume_timeout_s=rng.choice((15.0, 900.0)),
        faults=tuple(one for one in FAULTS if rng.randrange(2)),
        trouble_s=rng.choice((20.0, 60.0, 150.0)),
        calm_s=rng.choice((2.0, 10.0, 30.0)),
    )
    return msgspec.structs.replace(plan, **pins)


class Outcome(msgspec.Struct):
    """What a seed came to."""

    seed: int
    problems: list[str]
    trace_hash: str = ""
    events: int = 0
    virtual_s: float = 0.0
    sent: int = 0
    acked: int = 0
    begins: int = 0
    handled: int = 0
    faults: dict[str, int] = msgspec.field(default_factory=dict)


def run_client_seed(
    seed: int, plan: Plan | None = None, tell: Callable[[str], None] | None = None
) -> Outcome:
    """One whole run; never raises for what it finds."""
    run = ClientRun(seed, plan or draw(seed))
    outcome = Outcome(seed, [])
    try:
        with _utc(), _logs(run, tell):
            trace = simulate(seed, run.main, longest_s=LONGEST_S, tell=tell)
    except SimulationError as error:
        outcome.problems.append(str(error))
    except Exception:
        last = traceback.format_exc().strip().splitlines()
        outcome.problems.append("raised " + " / ".join(line.strip() for line in last))
    else:
        outcome.trace_hash, outcome.events = trace.hash, trace.events
        outcome.virtual_s = trace.time_s
    record = run.record
    outcome.problems += record.problems
    outcome.sent, outcome.acked = len(record.sent), len(record.acked)
    outcome.begins, outcome.handled = record.begins, len(record.done)
    outcome.faults = run.trouble.faults
    return outcome


# -------------------------------------------------------------------------------------- the run


class ClientRun:
    """One seed's cluster, its members and their trouble."""

    record: Record

    def __init__(self, seed: int, plan: Plan) -> None:
        self.plan = plan
        self.trouble = Trouble(self)
        self.members: list[Member] = []
        self.senders: list[Sender] = []
        self._hosts = 0
        self._failures: dict[str, int] = {}

    async def main(self, loop: SimLoop) -> None:
        plan = self.plan
        self.loop = loop
        loop.note(f"plan {plan}")
        self._rng = loop.rng("client run")
        self._handling = loop.rng("handlers")
        self.names = [
            sim_name_server(loop, f"10.0.0.{number + 1}:9876")
            for number in range(plan.name_server_count)
        ]
        self.namesrv = ";".join(server.address for server in self.names)
        self.brokers = {
            f"broker-{letter}": self._broker(f"broker-{letter}", f"10.0.1.{number + 1}:10911")
            for number, letter in enumerate("abc"[: plan.broker_count])
        }
        self.record = Record(
            loop,
            self.brokers,
            topic=TOPIC,
            group=GROUP,
            is_ordered=plan.is_ordered,
            is_sync=plan.is_sync,
            consume_timeout_s=plan.consume_timeout_s,
        )
        for server in self.names:
            await server.start()
        for name, server in self.brokers.items():
            await server.start()
            self.record.started_s[name] = loop.time()
        await self._create_topic()
        looking = loop.create_task(self._look())
        flows = [
            Flow(f"p{number}k{key}", plan.messages)
            for number in range(plan.producer_count)
            for key in range(plan.keys)
        ]
        for number in range(plan.producer_count):
            mine = flows[number * plan.keys : (number + 1) * plan.keys]
            self.senders.append(Sender(self, mine))
        for _ in range(plan.consumer_count):
            await self.join()
        await self.trouble.make()
        await self.trouble.heal()
        await self._until(lambda: unsent(flows), "not all was sent")
        await self._until(self.record.missing, "not all was handled")
        await self._close()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        self.record.look()
        self.record.check_keys()
        self.record.check_acked()
        for server in (*self.brokers.values(), *self.names):
            await server.stop()
        left = [one for one in loop.pending() if one is not asyncio.current_task()]
        for task in left:
            self.record.problem(f"a task is left at the end: {_name(task.get_coro())}")

    def _broker(self, name: str, address: str) -> SimServer:
        config = BrokerConfig(
            name=name,
            flush="SYNC_FLUSH" if self.plan.is_sync else "ASYNC_FLUSH",
            namesrv=self.namesrv,
            store_path="simulated",
            log_file_bytes=1 << 18,
            queue_file_bytes=20 * 1000,
            index_slots=100,
            index_entries=1000,
            max_message_bytes=65536,
            register_period_ms=10_000,
            delay_levels="1s 2s 2s 3s 3s 4s 4s 5s 5s 5s 5s 5s 5s 5s 5s 5s 5s 5s",
            is_timer_enabled=False,
            is_compiled_path_enabled=self.plan.is_compiled,
        )
        return sim_broker(self.loop, address, config)

    async def _create_topic(self) -> None:
        connections = Connections()
        count = str(self.plan.queue_count)
        ext = {"topic": TOPIC, "readQueueNums": count, "writeQueueNums": count, "perm": "6"}
        ext |= {"defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0"}
        for server in self.brokers.values():
            code = RequestCode.UPDATE_AND_CREATE_TOPIC
            await connections.call(server.address, code, {**ext, "order": "false"})
        await connections.close()

    def world(self) -> World:
        """A machine of its own."""
        self._hosts += 1
        number = self._hosts
        loop = self.loop
        return World(
            lambda: EPOCH_MS + loop.now_us // 1_000,
            loop.rng(f"client {number}"),
            f"10.0.2.{number}",
            1_000 + number,
        )

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.record.look()

    async def _until(self, missing: Callable[[], list[str]], what: str) -> None:
        """Wait; a problem tells what is still missing when time is over."""
        left, since = missing(), self.loop.time()
        while left:
            await asyncio.sleep(LOOK_S)
            before, left = left, missing()
            if left != before:
                since = self.loop.time()
            elif self.loop.time() - since > STUCK_S or self.record.problems:
                more = f" and {len(left) - 5} more" if len(left) > 5 else ""
                self.record.problem(f"{what}: {'; '.join(left[:5])}{more}")
                return

    # --------------------------------------------------------------------------------- handlers

    def outcome_of(self, tokens: list[str]) -> tuple[float | None, str]:
        """(how long a handler takes; None: it does not even wait, what it says)"""
        plan, rng = self.plan, self._handling
        took_s: float | None = None
        if self.trouble.is_over:
            return (rng.random() / 20 if rng.randrange(2) else None), "ok"
        if rng.randrange(100) < plan.slow_percent:
            took_s = rng.random() * plan.slow_s
        elif rng.randrange(2):
            took_s = rng.random() / 20
        says = "ok"
        if rng.randrange(100) < plan.fail_percent:
            for token in tokens:
                self._failures[token] = self._failures.get(token, 0) + 1
            if max(self._failures[token] for token in tokens) <= MOST_FAILURES:
                says = rng.choice(("raise", "later"))
        return took_s, says

    # ---------------------------------------------------------------------------------- members

    async def join(self) -> None:
        member = Member(self)
        self.members.append(member)
        await member.join()

    async def _close(self) -> None:
        for member in self.members:
            await member.leave()
        for sender in self.senders:
            await sender.close()

    async def check_left(self, process: Process, who: str) -> None:
        """After close no task, socket or timer is left."""
        await asyncio.sleep(0)
        for task in process.tasks():
            self.record.problem(f"{who} has closed and left a task: {_name(task.get_coro())}")
        for timer in process.timers():
            callback = cast(Any, timer)._callback
            self.record.problem(f"{who} has closed and left a timer: {_name(callback)}")
        process.kill()


def _name(what: object) -> str:
    """Without an address, which differs from process to process."""
    return str(getattr(what, "__qualname__", type(what).__name__))


# ----------------------------------------------------------------------------------------- logs


class _Listening(logging.Handler):
    """Exceptions that the product logs are problems; with a trace, every line is told."""

    def __init__(self, run: ClientRun, tell: Callable[[str], None] | None) -> None:
        super().__init__()
        self._run = run
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        process = running_process()
        if process is not None and not process.is_up:
            return
        if self._tell is not None:
            at_s = self._run.loop.now_us / 1e6
            host = "" if process is None else process.host
            self._tell(f"{at_s:14.6f}  LOG {host} {record.levelname} {record.getMessage()}")
        if record.levelno >= logging.ERROR and record.exc_info:
            error = record.exc_info[1]
            last = traceback.format_exception(error)[-2:]
            said = " / ".join(line.strip() for line in "".join(last).splitlines())
            self._run.record.problem(f"{record.getMessage()}: {said}")


@contextmanager
def _logs(run: ClientRun, tell: Callable[[str], None] | None) -> Iterator[None]:
    logger = logging.getLogger("cometmq")
    handler = _Listening(run, tell)
    former = logger.level, logger.propagate
    logger.setLevel(logging.INFO if tell else logging.ERROR)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = former
        logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------- command line


def describe(outcome: Outcome) -> str:
    lines = [f"seed {outcome.seed} FAILED", *(f"  {text}" for text in outcome.problems)]
    lines.append(f"  again: python -m cometmq.testing.client_runs --seed {outcome.seed}")
    lines.append(f"  commit {commit()}")
    return "\n".join(lines)


def line_of(outcome: Outcome) -> str:
    return (
        f"seed {outcome.seed} hash {outcome.trace_hash} events {outcome.events} "
        f"virtual_s {outcome.virtual_s:.0f} sent {outcome.sent} acked {outcome.acked} "
        f"begins {outcome.begins} handled {outcome.handled} faults {outcome.faults}"
    )


def run_for(seconds: float, first: int, most: int = 2**62) -> Iterator[Outcome]:
    """Seeds from `first` on until the time is over."""
    ends = time.monotonic() + seconds
    seed = first
    while seed < first + most and time.monotonic() < ends:
        yield run_client_seed(seed)
        seed += 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cometmq.testing.client_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="play this one seed")
    what.add_argument("--seconds", type=float, help="play fresh seeds for so long")
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    parser.add_argument("--first", type=int, help="the first of the fresh seeds (default: by time)")
    parser.add_argument("--count", type=int, default=2**62, help="so many seeds at most")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        outcomes = iter([run_client_seed(options.seed, tell=print if options.trace else None)])
    else:
        first = fresh() if options.first is None else options.first
        outcomes = run_for(options.seconds, first, options.count)
    is_bad = False
    for outcome in outcomes:
        print(line_of(outcome), flush=True)
        if outcome.problems:
            is_bad = True
            print(describe(outcome), flush=True)
    return is_bad


if __name__ == "__main__":
    sys.exit(main())
