"""Swarm: what one seed's cluster looks like, and which faults it may meet.

Owns: the dice of a run's shape. One rule: a seed switches on a random few of the faults and
settings; bugs that hide behind others are found by the runs that lack the others.
"""

from __future__ import annotations

import random

import msgspec

from cometmq.config import BrokerConfig
from cometmq.testing import kinds as all_kinds
from cometmq.testing.kinds_base import KindPlan
from cometmq.testing.traffic import ConsumerPlan, ProducerPlan

FAULTS = (
    # network
    "delay", "split", "stall", "reset", "half_open", "one_way", "two_way",
    # disk
    "slow_sync", "failed_sync", "full", "fill", "flip",
    # processes
    "kill", "power", "die_in_boot", "stop", "pause", "client_kill", "everything",
    # clocks
    "step", "drift",
)  # fmt: skip
LATER_FAULTS = ("queues_ahead",)
"""Drawn apart, so that seeds from before there were these stay what they were without them."""

TOPICS = ("Orders", "Events")
DOOMED = "Doomed"


class BrokerPlan(msgspec.Struct, frozen=True):
    """One broker: its settings, and the limits that only a store knows."""

    config: BrokerConfig
    max_open_queue_files: int
    max_open_log_files: int
    timer_slots: int = all_kinds.TIMER_SLOTS


class Swarm(msgspec.Struct, frozen=True):
    """One seed's cluster."""

    name_servers: int
    brokers: tuple[BrokerPlan, ...]
    producers: tuple[ProducerPlan, ...]
    consumers: tuple[ConsumerPlan, ...]
    faults: tuple[str, ...]
    fault_interval_ms: int
    duration_ms: int
    topics: dict[str, int]
    has_doomed: bool
    resets: bool
    ending: str  # how brokers end before the last look: power, kill or stop
    kinds: tuple[str, ...] = ()  # beside plain messages
    kind_producers: tuple[KindPlan, ...] = ()


def draw(
    seed: int,
    *,
    flush: str = "",
    always: tuple[str, ...] = (),
    only: tuple[str, ...] | None = None,
    kinds: tuple[str, ...] | None = None,
) -> Swarm:
    """The swarm of a seed, with what a scenario is about pinned: `flush` to SYNC_FLUSH or
    ASYNC_FLUSH; `always`, faults that must be on ("lock": groups that consume in order); `only`,
    the faults that may be on at all, () for none; `kinds`, the message kinds of testing.kinds that
    are played beside plain ones, () for none, None for those of the seed."""
    rng = random.Random(f"{seed}:swarm")
    level = rng.choice((15, 35, 60))
    faults = tuple(f for f in FAULTS if f in always or rng.randrange(100) < level)
    later = random.Random(f"{seed}:swarm:later")
    faults += tuple(f for f in LATER_FAULTS if f in always or later.randrange(100) < level)
    if only is not None:
        faults = tuple(f for f in faults if f in only)
    # The lock of a dead member costs a minute; a clock put back makes it last longer than a run.
    lock_percent = 5 if "client_kill" in faults else 20
    lock_percent = 0 if "step" in faults else 100 if "lock" in always else lock_percent
    big = rng.choice((40, 400, 1200))
    duration_ms = rng.choice((1_500, 3_000, 3_000, 6_000, 12_000))
    topics = {name: rng.choice((1, 2, 4)) for name in TOPICS[: rng.randrange(1, 3)]}
    has_doomed = rng.randrange(4) == 0
    brokers = tuple(
        _broker(
            rng, number, big, flush, is_filled="fill" in faults, is_compiled=later.randrange(4) > 0
        )
        for number in range(rng.choice((1, 1, 2, 2, 3)))
    )
    firm = tuple(b.config.name for b in brokers if b.config.flush == "SYNC_FLUSH")
    names = (*topics, DOOMED) if has_doomed else tuple(topics)
    producers = tuple(
        ProducerPlan(
            topics=names,
            mode=rng.choice(("sync", "async", "async", "batch", "oneway")),
            window=rng.choice((1, 4, 16)),
            interval_ms=rng.choice((10, 30, 120) if duration_ms < 5_000 else (60, 120)),
            body_bytes=big,
            no_wait_percent=rng.choice((0, 0, 20)),
            final_count=8,
            firm_brokers=firm,
            queue_counts=topics,
        )
        for _ in range(rng.randrange(1, 4))
    )
    consumers = tuple(
        plan
        for number in range(rng.randrange(1, 3))
        for plan in _group(
            rng, number, tuple(topics), is_ordered=later.randrange(100) < lock_percent
        )
    )
    swarm = Swarm(
        name_servers=rng.randrange(1, 3),
        brokers=brokers,
        producers=producers,
        consumers=consumers,
        faults=faults,
        fault_interval_ms=rng.choice((100, 300, 1_000)),
        duration_ms=duration_ms,
        topics=topics,
        has_doomed=has_doomed,
        resets=rng.randrange(3) == 0,
        ending=rng.choice(("power", "power", "kill", "stop")),
    )
    chosen = all_kinds.choose(seed, faults) if kinds is None else kinds
    return _with_kinds(seed, swarm, all_kinds.fitting(chosen, faults))


def _with_kinds(seed: int, swarm: Swarm, kinds: tuple[str, ...]) -> Swarm:
    """All from dice of their own: without kinds a seed is what it was before there were any."""
    if not kinds:
        return swarm
    replace = msgspec.structs.replace
    brokers = tuple(
        replace(
            plan,
            config=replace(plan.config, **all_kinds.settings(seed, number, swarm.faults, kinds)),
        )
        for number, plan in enumerate(swarm.brokers)
    )
    firm = tuple(b.config.name for b in brokers if b.config.flush == "SYNC_FLUSH")
    return replace(
        swarm,
        brokers=brokers,
        consumers=(*swarm.consumers, *all_kinds.consumer_plans(seed, kinds)),
        kinds=kinds,
        kind_producers=tuple(all_kinds.producer_plans(seed, kinds, firm)),
    )


def _group(
    rng: random.Random, number: int, topics: tuple[str, ...], *, is_ordered: bool
) -> list[ConsumerPlan]:
    plan = ConsumerPlan(
        group=f"Group{number}",
        topics=topics,
        tags=rng.choice(("*", "*", "red")),
        heartbeat_ms=rng.choice((500, 2_000)),
        commit_ms=rng.choice((200, 1_000, 3_000)),
        suspend_ms=rng.choice((500, 2_000)),
        commits_by_pull=bool(rng.randrange(2)),
        is_ordered=is_ordered,
    )
    return [plan] * rng.randrange(1, 4)


def _broker(
    rng: random.Random, number: int, big: int, flush: str, *, is_filled: bool, is_compiled: bool
) -> BrokerPlan:
    sizes = (8192, 16384, 65536)
    if big > 1000:
        sizes = (16384, 16384, 16384)
    elif is_filled:  # many files, of which some can go
        sizes = (8192, 8192, 8192)
    config = BrokerConfig(
        name=f"broker-{'abc'[number]}",
        flush=flush or rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH")),
        store_path="simulated",
        log_file_bytes=rng.choice(sizes),
        queue_file_bytes=20 * rng.choice((16, 64, 1000)),
        index_slots=rng.choice((8, 100)),
        index_entries=rng.choice((20, 100, 1000)),
        max_message_bytes=65536,
        register_period_ms=10_000,
        flush_interval_ms=rng.choice((50, 500)),
        flush_least_pages=rng.choice((0, 1, 4)),
        flush_thorough_ms=rng.choice((300, 3_000, 10_000)),
        queue_flush_interval_ms=rng.choice((50, 1_000)),
        queue_flush_least_pages=rng.choice((0, 2)),
        queue_flush_thorough_ms=rng.choice((300, 5_000, 60_000)),
        save_offsets_ms=rng.choice((200, 1_000, 5_000)),
        sync_flush_timeout_ms=rng.choice((300, 1_000, 5_000)),
        clean_interval_ms=200 if is_filled else 10_000,
        clean_forcibly=is_filled,  # then a full disk costs the oldest messages
        default_queue_count=4,
        is_compiled_path_enabled=is_compiled,
    )
    return BrokerPlan(config, rng.choice((4, 8, 4096)), rng.choice((2, 4, 256)))
