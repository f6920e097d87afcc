"""THE TABLE of message kinds that the simulated cluster plays: who sends, who consumes, what is
checked.

Owns: which kinds there are, which of them a seed plays, and the order of their checks. One rule: a
kind is a file of its own and a row here; the rest of the simulator knows none of them by name.

To add one: `kind_<name>.py` with a KindProducer, a Consumer if the plain one won't do,
`check(view)` for what must be true of a log at any moment and `unmet(view)` for what must come
after healing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from cometmq.broker.broker import Broker
from cometmq.message import StoredMessage
from cometmq.testing import (
    kind_dedup,
    kind_levels,
    kind_ordered,
    kind_pop,
    kind_pop_ordered,
    kind_replies,
    kind_retries,
    kind_sequences,
    kind_sql,
    kind_timers,
    kind_transactions,
    kind_ttl,
)
from cometmq.testing.client import Role, RouteCache
from cometmq.testing.history import Found, History, Sent
from cometmq.testing.kinds_base import QUEUES, KindPlan, KindProducer, Ledger, View
from cometmq.testing.traffic import Consumer, ConsumerPlan

Unmet = Callable[[View], list[str]]
Explains = Callable[[Ledger, Sent | None, StoredMessage], bool]
MakeConsumer = Callable[[str, ConsumerPlan, RouteCache, random.Random], Role]


def _nothing(view: View) -> None:
    """For kinds that are judged by their clients."""


def _none(view: View) -> list[str]:
    return []


def _not_explained(ledger: Ledger, sent: Sent | None, message: StoredMessage) -> bool:
    return False


class Kind(msgspec.Struct, frozen=True):
    """One kind of message."""

    name: str
    topic: str
    producer: type[KindProducer]
    consumer: MakeConsumer = Consumer
    group: str = ""
    check: Callable[[View], None] = _nothing
    unmet: Unmet = _none
    more_topics: tuple[str, ...] = ()
    """That its group subscribes to as well."""
    not_with: tuple[str, ...] = ()
    """Faults that would only make it wait."""
    is_ordered: bool = False
    is_single: bool = False
    """Its producers send one message at a time."""
    expressions: tuple[str, ...] = ("",)
    tags: tuple[str, ...] = ("*",)
    explains: Explains = _not_explained
    """Whether a record that nobody sent like this may stand in a log."""
    attributes: str | None = None
    """Of its topic."""
    has_owners: bool = True
    """Each queue belongs to one member of its group."""
    is_owed_all: bool = True
    """Its group gets all that it wants from each queue."""

    @property
    def group_name(self) -> str:
        return self.group or f"G{self.topic[1:]}"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("levels", kind_levels.TOPIC, kind_levels.LevelProducer),
        Kind(
            "timers",
            kind_timers.TOPIC,
            kind_timers.TimerProducer,
            check=kind_timers.check,
            unmet=kind_timers.unmet,
        ),
        Kind(
            "retries",
            kind_retries.TOPIC,
            KindProducer,
            kind_retries.FailingConsumer,
            kind_retries.GROUP,
            kind_retries.check,
            kind_retries.unmet,
            more_topics=(kind_retries.RETRY,),
        ),
        Kind(
            "transactions",
            kind_transactions.TOPIC,
            kind_transactions.TransactionProducer,
            check=kind_transactions.check,
            unmet=kind_transactions.unmet,
        ),
        Kind(
            "sql",
            kind_sql.TOPIC,
            kind_sql.SqlProducer,
            kind_sql.SqlConsumer,
            expressions=tuple(kind_sql.EXPRESSIONS),
        ),
        Kind(
            "ordered",
            kind_ordered.TOPIC,
            kind_ordered.OrderedProducer,
            kind_ordered.OrderedConsumer,
            # A lock outlives its owner by a minute; a clock put back makes that longer than a run.
            not_with=("step", "client_kill"),
            is_ordered=True,
            is_single=True,
        ),
        Kind("replies", kind_replies.TOPIC, kind_replies.Asker, kind_replies.Answerer),
        Kind(
            "pop",
            kind_pop.TOPIC,
            kind_pop.PopProducer,
            kind_pop.PopConsumer,
            check=kind_pop.check,
            unmet=kind_pop.unmet,
            expressions=("", "", *list(kind_sql.EXPRESSIONS)[:3]),
            tags=("*", *kind_pop.TAGS),
            explains=kind_pop.explains,
            has_owners=False,
            is_owed_all=False,
        ),
        Kind(
            "pop_ordered",
            kind_pop_ordered.TOPIC,
            KindProducer,
            kind_pop_ordered.OrderedPopper,
            check=kind_pop_ordered.check,
            unmet=kind_pop_ordered.unmet,
            has_owners=False,
        ),
        Kind(
            "dedup",
            kind_dedup.TOPIC,
            kind_dedup.DedupProducer,
            check=kind_dedup.check,
            attributes=kind_dedup.ATTRIBUTES,
        ),
        Kind(
            "sequences",
            kind_sequences.TOPIC,
            kind_sequences.SequenceProducer,
            check=kind_sequences.check,
        ),
        Kind(
            "ttl",
            kind_ttl.TOPIC,
            kind_ttl.TtlProducer,
            kind_ttl.TtlConsumer,
            check=kind_ttl.check,
            unmet=kind_ttl.unmet,
            explains=kind_ttl.explains,
            attributes=kind_ttl.ATTRIBUTES,
            is_owed_all=False,
        ),
    )
}
LATER = ("pop", "pop_ordered", "dedup", "sequences", "ttl")
"""Drawn apart, so that seeds from before there were these stay what they were without them."""


# ------------------------------------------------------------------------------------- the dice


def choose(seed: int, faults: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of a seed: none in every third one, else a few."""
    rng = random.Random(f"{seed}:kinds")
    names: tuple[str, ...] = ()
    if not rng.randrange(2):
        count = rng.choice((1, 2, 2, 3))
        names = tuple(sorted(rng.sample([name for name in KINDS if name not in LATER], count)))
    later = random.Random(f"{seed}:kinds:later")
    if later.randrange(3) == 0:
        names += tuple(sorted(later.sample(LATER, later.choice((1, 1, 2)))))
    return fitting(names, faults)


def fitting(names: tuple[str, ...], faults: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if not set(KINDS[name].not_with) & set(faults))


def settings(
    seed: int, broker: int, faults: tuple[str, ...], names: tuple[str, ...]
) -> dict[str, Any]:
    """A broker's settings in runs with kinds: what takes minutes elsewhere takes seconds."""
    rng = random.Random(f"{seed}:kinds:broker:{broker}")
    # With steps of a minute the wheel must hold some minutes.
    precision_ms = 1_000 if "step" in faults else rng.choice((100, 1_000))
    return {
        "delay_levels": kind_levels.LEVELS,
        "save_delays_ms": rng.choice((50, 1_000, 10_000)),
        "transaction_timeout_ms": rng.choice((200, 1_000)),
        "transaction_check_interval_ms": rng.choice((200, 1_000)),
        "transaction_check_max": rng.choice((2, 5, 15)),
        "transaction_op_interval_ms": rng.choice((0, 0, 500)),
        "timer_precision_ms": precision_ms,
        "timer_window_slots": rng.choice((3, 8, 400)),
        "timer_flush_interval_ms": rng.choice((100, 1_000)),
        "timer_log_file_bytes": rng.choice((52 * 8 + 16, 52 * 100 + 30)),
        "is_recall_enabled": True,
        **(_pop_settings(seed, broker) if "pop" in names else {}),
    }


def _pop_settings(seed: int, broker: int) -> dict[str, Any]:
    rng = random.Random(f"{seed}:kinds:broker:{broker}:pop")
    return {
        "revive_queue_count": rng.choice((1, 2, 8)),
        "pop_retry_percent": rng.choice((0, 20, 100)),
        "is_pop_retry_v2": bool(rng.randrange(2)),
        "shows_pop_retry_topic": rng.randrange(4) == 0,
    }


TIMER_SLOTS = 2_000


def producer_plans(
    seed: int, names: tuple[str, ...], firm_brokers: tuple[str, ...]
) -> list[KindPlan]:
    rng = random.Random(f"{seed}:kinds:producers")
    plans = []
    for name in names:
        kind = KINDS[name]
        for _ in range(rng.choice((1, 2))):
            plan = KindPlan(
                kind=name,
                topic=kind.topic,
                window=1 if kind.is_single else rng.choice((1, 4)),
                interval_ms=rng.choice((50, 150)),
                final_count=6,
                firm_brokers=firm_brokers,
                option=rng.randrange(100),
            )
            plans.append(plan)
    return plans


def consumer_plans(seed: int, names: tuple[str, ...]) -> list[ConsumerPlan]:
    rng = random.Random(f"{seed}:kinds:consumers")
    later = random.Random(f"{seed}:kinds:consumers:later")
    plans = []
    for name in names:
        kind = KINDS[name]
        plan = ConsumerPlan(
            group=kind.group_name,
            topics=(kind.topic, *kind.more_topics),
            tags=later.choice(kind.tags),
            heartbeat_ms=rng.choice((500, 2_000)),
            commit_ms=rng.choice((200, 1_000, 3_000)),
            suspend_ms=rng.choice((500, 2_000)),
            commits_by_pull=bool(rng.randrange(2)),
            is_ordered=kind.is_ordered,
            kind=name,
            expression=rng.choice(kind.expressions),
            pulls_by_expression=bool(rng.randrange(2)),
        )
        plans += [plan] * rng.choice((1, 1, 2, 3))
    return plans


def queue_counts(names: tuple[str, ...]) -> dict[str, int]:
    """The topics that an operator makes."""
    return {KINDS[name].topic: QUEUES for name in names}


def attributes(names: tuple[str, ...]) -> dict[str, str]:
    """What an operator wants of these topics."""
    found = {KINDS[name].topic: KINDS[name].attributes for name in names}
    return {topic: text for topic, text in found.items() if text is not None}


def make_producer(name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> Role:
    return KINDS[plan.kind].producer(name, plan, routes, rng)


def make_consumer(name: str, plan: ConsumerPlan, routes: RouteCache, rng: random.Random) -> Role:
    return KINDS[plan.kind].consumer(name, plan, routes, rng)


# ------------------------------------------------------------------------------------ the checks


def wants(plan: ConsumerPlan, sent: Sent) -> bool:
    """Whether a group is to get a message."""
    if plan.expression:
        return kind_sql.wants(plan.expression, sent)
    return plan.tags == "*" or sent.tags == plan.tags


def has_owners(plan: ConsumerPlan) -> bool:
    return not plan.kind or KINDS[plan.kind].has_owners


def is_owed_all(plan: ConsumerPlan) -> bool:
    return not plan.kind or KINDS[plan.kind].is_owed_all


def explains(ledger: Ledger, sent: Sent | None, message: StoredMessage) -> bool:
    """Whether a kind of this run says why a record is there."""
    return any(KINDS[kind].explains(ledger, sent, message) for kind in ledger.kinds)


def check(history: History, name: str, broker: Broker, found: dict[int, Found]) -> None:
    """What must be true of a broker's log at any moment."""
    ledger = history.ledger
    if not isinstance(ledger, Ledger):
        return
    view = View(history, ledger, name, broker, found)
    kind_levels.check(view)  # retries and transactions go through levels, too
    for kind in ledger.kinds:
        KINDS[kind].check(view)


def unmet(history: History, name: str, broker: Broker, found: dict[int, Found]) -> list[str]:
    """What is still owed after healing."""
    ledger = history.ledger
    if not isinstance(ledger, Ledger):
        return []
    view = View(history, ledger, name, broker, found)
    texts = kind_levels.unmet(view)
    for kind in ledger.kinds:
        texts += KINDS[kind].unmet(view)
    return texts
