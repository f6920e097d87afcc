"""Seeds: those that once failed, fresh ones, and the promise that a seed is always the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cometmq.testing.simulate import describe, run_for, run_seed

KEPT = Path(__file__).with_name("seeds.txt")
FRESH_SECONDS = float(os.environ.get("COMETMQ_SIM_SECONDS", "0"))
STEADY = range(1_000, 1_040)


def _kept() -> list[int]:
    lines = [line.split("#")[0].split() for line in KEPT.read_text().splitlines()]
    return [int(words[0]) for words in lines if words]


@pytest.mark.parametrize("seed", _kept())
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.problems, describe(outcome)


@pytest.mark.parametrize("seed", STEADY)
def test_a_steady_seed_passes(seed: int) -> None:
    """The same seeds in every run, so that a change is judged by itself and not by luck."""
    outcome = run_seed(seed)
    assert not outcome.problems, describe(outcome)


@pytest.mark.skipif(not FRESH_SECONDS, reason="COMETMQ_SIM_SECONDS is not set; make sim plays some")
def test_fresh_seeds_pass() -> None:
    first = time.time_ns() // 1_000 % 10**9
    failed, sums = run_for(FRESH_SECONDS, first)
    assert not failed, "\n".join(describe(outcome) for outcome in failed)
    assert sums["acked"] > 0 < sums["consumed"]


def test_a_seed_is_the_same_run_in_every_process() -> None:
    def play(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cometmq.testing.simulate", "--seed", "7"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    first = play("1")
    assert "hash " in first
    assert first == play("2")


def test_a_run_does_something() -> None:
    """Guards against a simulator that passes because nothing happens."""
    outcomes = [run_seed(seed) for seed in range(300, 308)]
    assert sum(outcome.acked for outcome in outcomes) > 200
    assert sum(outcome.consumed for outcome in outcomes) > 200
    assert sum(outcome.boots for outcome in outcomes) > 20
    used = {name for outcome in outcomes for name in outcome.faults}
    assert len(used) >= 12, sorted(used)
