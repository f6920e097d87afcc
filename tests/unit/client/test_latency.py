"""Leaving slow and failed brokers alone."""

from __future__ import annotations

from random import Random

import pytest

from cometmq.client.latency import (
    PENALTIES_4_9,
    PENALTIES_5,
    PROBE_INTERVAL_MS,
    BrokerHealth,
    Penalties,
)
from cometmq.errors import UsageError
from cometmq.message import MessageQueue

QUEUES = [MessageQueue("T", broker, at) for broker in "abc" for at in range(2)]
NOW = 1_000_000


def failed(health: BrokerHealth, broker: str, at: int = NOW) -> None:
    health.observed(broker, 3, is_isolated=True, now_ms=at)


@pytest.mark.parametrize(
    ("penalties", "latency_ms", "expected"),
    [
        (PENALTIES_5, 0, 0),
        (PENALTIES_5, 549, 0),
        (PENALTIES_5, 550, 2_000),
        (PENALTIES_5, 1_799, 2_000),
        (PENALTIES_5, 1_800, 5_000),
        (PENALTIES_5, 3_000, 6_000),
        (PENALTIES_5, 5_000, 10_000),
        (PENALTIES_5, 15_000, 30_000),
        (PENALTIES_4_9, 549, 0),
        (PENALTIES_4_9, 550, 30_000),
        (PENALTIES_4_9, 999, 30_000),
        (PENALTIES_4_9, 1_000, 60_000),
        (PENALTIES_4_9, 2_000, 120_000),
        (PENALTIES_4_9, 3_000, 180_000),
        (PENALTIES_4_9, 15_000, 600_000),
    ],
)
def test_the_tables(penalties: Penalties, latency_ms: int, expected: int) -> None:
    assert penalties.not_available_ms(latency_ms) == expected
    health = BrokerHealth(penalties)
    health.observed("a", latency_ms, is_isolated=False, now_ms=NOW)
    assert health.is_reachable("a")
    assert health.is_available("a", NOW + expected)
    assert health.is_available("a", NOW + expected - 1) is (expected == 0)


@pytest.mark.parametrize(
    ("penalties", "duration"), [(PENALTIES_5, 10_000), (PENALTIES_4_9, 600_000)]
)
def test_a_failure_counts_as_a_very_slow_send(penalties: Penalties, duration: int) -> None:
    health = BrokerHealth(penalties)
    failed(health, "a")
    assert not health.is_available("a", NOW + duration - 1)
    assert health.is_available("a", NOW + duration)
    assert health.is_available("b", NOW)


def test_a_fast_send_sets_free_in_4_9_only() -> None:
    for penalties, is_free in ((PENALTIES_4_9, True), (PENALTIES_5, False)):
        health = BrokerHealth(penalties)
        failed(health, "a")
        health.observed("a", 4, is_isolated=False, now_ms=NOW + 1)
        assert health.is_available("a", NOW + 1) is is_free
        assert health.is_reachable("a")


def test_a_lesser_penalty_does_not_shorten_a_greater_one() -> None:
    health = BrokerHealth()
    health.observed("a", 20_000, is_isolated=False, now_ms=NOW)
    health.observed("a", 600, is_isolated=False, now_ms=NOW + 1)
    assert not health.is_available("a", NOW + 29_999)


def test_who_is_named_for_a_probe_and_how_often() -> None:
    health = BrokerHealth()
    failed(health, "a")
    health.observed("b", 20_000, is_isolated=False, now_ms=NOW)  # slow, but it answers
    health.observed("c", 3, is_isolated=True, is_reachable=True, now_ms=NOW)
    assert health.to_probe(NOW) == ["a"]
    assert health.to_probe(NOW + PROBE_INTERVAL_MS - 1) == []
    assert health.to_probe(NOW + PROBE_INTERVAL_MS) == ["a"]
    health.probed("a", True, NOW + PROBE_INTERVAL_MS)
    assert health.is_reachable("a")
    assert not health.is_available("a", NOW + PROBE_INTERVAL_MS)  # its time goes on
    assert health.to_probe(NOW + 2 * PROBE_INTERVAL_MS) == []
    health.probed("stranger", False, NOW)
    assert health.is_reachable("stranger")


def test_a_failed_probe_keeps_a_dead_broker_out_of_the_way() -> None:
    health = BrokerHealth()
    failed(health, "a")
    for now in range(NOW, NOW + 60_000, PROBE_INTERVAL_MS):
        assert health.to_probe(now) == ["a"]
        health.probed("a", False, now)
        assert all(
            health.choose(QUEUES, "", start, now + PROBE_INTERVAL_MS - 1).broker != "a"
            for start in range(6)
        )
    assert health.is_available("a", NOW + 60_000)  # if the probes stop, it gets its chance


def test_health_costs_the_choice_nothing() -> None:
    health = BrokerHealth()
    assert [health.choose(QUEUES, "", at, NOW) for at in range(8)] == QUEUES + QUEUES[:2]


def test_an_available_broker_first_then_a_reachable_one() -> None:
    health = BrokerHealth()
    failed(health, "a")
    health.observed("b", 20_000, is_isolated=False, now_ms=NOW)
    assert {health.choose(QUEUES, "", at, NOW).broker for at in range(6)} == {"c"}
    failed(health, "c")
    assert {health.choose(QUEUES, "", at, NOW).broker for at in range(6)} == {"b"}
    assert [health.choose(QUEUES, "", at, NOW) for at in (2, 3)] == QUEUES[2:4]


def test_then_the_one_that_is_available_soonest_with_ties_in_turn() -> None:
    health = BrokerHealth()
    failed(health, "a", NOW + 5)
    failed(health, "b", NOW)
    failed(health, "c", NOW)
    assert [health.choose(QUEUES, "", at, NOW + 6).broker for at in range(6)] == list("bbbbcc")
    assert [health.choose(QUEUES, "", at, NOW + 6) for at in (2, 3, 4, 5)] == QUEUES[2:6]
    assert health.choose(QUEUES, "b", 2, NOW + 6).broker == "c"


def test_the_broker_that_just_failed_is_never_chosen_while_there_is_another() -> None:
    rng = Random(11)
    for _ in range(3_000):
        health = BrokerHealth(rng.choice([PENALTIES_5, PENALTIES_4_9]))
        for _ in range(rng.randrange(8)):
            health.observed(
                rng.choice("abc"),
                rng.choice([1, 700, 4_000, 20_000]),
                is_isolated=rng.random() < 0.5,
                now_ms=NOW + rng.randrange(20_000),
            )
        avoided = rng.choice("abc")
        chosen = health.choose(QUEUES, avoided, rng.randrange(100), NOW + rng.randrange(40_000))
        assert chosen.broker != avoided


def test_the_only_broker_is_chosen_even_if_it_failed() -> None:
    health = BrokerHealth()
    failed(health, "a")
    assert [health.choose(QUEUES[:2], "a", at, NOW) for at in range(2)] == QUEUES[:2]
    with pytest.raises(UsageError):
        health.choose([], "a", 0, NOW)


def test_brokers_that_left_the_route_are_forgotten() -> None:
    health = BrokerHealth()
    failed(health, "a")
    failed(health, "b")
    health.keep_only({"b", "c"})
    assert health.to_probe(NOW) == ["b"]
    assert health.is_available("a", NOW)
