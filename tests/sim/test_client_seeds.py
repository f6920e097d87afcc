"""The asyncio client on the virtual-time loop: seeds, wrong variants, and one seed is one run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cometmq.testing.client_runs import describe, draw, run_client_seed, run_for
from cometmq.testing.client_trouble import FAULTS
from cometmq.testing.loop import SimLoop, simulate
from cometmq.testing.simulate import fresh

FRESH_SECONDS = float(os.environ.get("COMETMQ_CLIENT_SIM_SECONDS", "10"))
STEADY = range(1, 21)
STORMY = {
    "is_sync": True,
    "slow_percent": 40,
    "gap_s": 0.3,
}
STORMY_ORDERED = {
    **STORMY,
    "is_ordered": True,
    "slow_s": 5.0,
    "faults": tuple("crash join leave kill cut stall delay reset power-loss".split()),
    "trouble_s": 150.0,
    "calm_s": 10.0,
}
STORMY_CONCURRENT = {
    **STORMY,
    "is_ordered": False,
    "slow_s": 40.0,
    "consume_timeout_s": 15.0,
    "fail_percent": 25,
    "faults": tuple(
        "crash join leave kill cut stall delay refuse power-loss slow-disk".split(),
    ),
    "trouble_s": 60.0,
    "calm_s": 2.0,
}
FOUND: list[tuple[int, dict[str, Any]]] = [
    (7, {}),  # a timer outlived close
    (18, {}),  # sent back because its handler took too long, then the member left
    (184, {}),  # offsets come again after a power loss, without synchronous flushes
    (20317, {}),  # the same, in order
    (40084, STORMY_ORDERED),  # closed while it started: tasks were left
    (50022, STORMY_CONCURRENT),  # failed while it was on its way back: nobody had it any more
    (50061, STORMY_CONCURRENT),
]


def _load(name: str) -> ModuleType:
    """A neighbour file; tests are imported by path and have no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS: Any = _load("client_mutants").MUTANTS


@pytest.mark.parametrize(("seed", "pins"), FOUND, ids=[str(seed) for seed, _ in FOUND])
def test_a_seed_that_once_failed_passes(seed: int, pins: dict[str, Any]) -> None:
    outcome = run_client_seed(seed, draw(seed, **pins))
    assert not outcome.problems, describe(outcome)


@pytest.mark.parametrize("seed", STEADY)
def test_a_steady_seed_passes(seed: int) -> None:
    """The same seeds in every run, so that a change is judged by itself and not by luck."""
    outcome = run_client_seed(seed)
    assert not outcome.problems, describe(outcome)


@pytest.mark.skipif(not FRESH_SECONDS, reason="COMETMQ_CLIENT_SIM_SECONDS=0 switches them off")
def test_fresh_seeds_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Other seeds in every run: 10 seconds of them, or COMETMQ_CLIENT_SIM_SECONDS."""
    first = fresh()
    outcomes = list(run_for(FRESH_SECONDS, first))
    failed = [outcome for outcome in outcomes if outcome.problems]
    with capsys.disabled():
        handled = sum(outcome.handled for outcome in outcomes)
        print(
            f"\nfresh client seeds {first}..{outcomes[-1].seed}: {len(outcomes)} played, "
            f"{len(failed)} failed; handled {handled}"
        )
    assert not failed, "\n".join(describe(outcome) for outcome in failed)


def _hash_in_a_process(seed: int, hash_seed: str, zone: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "cometmq.testing.client_runs", "--seed", str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    return words[words.index("hash") + 1]


@pytest.mark.parametrize("seed", [5, 12])
def test_a_seed_is_the_same_run_in_every_process(seed: int) -> None:
    first = run_client_seed(seed)
    assert first.trace_hash and run_client_seed(seed) == first
    assert _hash_in_a_process(seed, "1", "UTC") == first.trace_hash
    assert _hash_in_a_process(seed, "77", "Asia/Tokyo") == first.trace_hash


def test_runs_do_something() -> None:
    """Guards against runs that pass because nothing happens."""
    outcomes = [run_client_seed(seed) for seed in range(1, 11)]
    assert sum(outcome.acked for outcome in outcomes) > 500
    assert sum(outcome.begins - outcome.handled for outcome in outcomes) > 100, "repeats"
    used = {name for outcome in outcomes for name in outcome.faults}
    assert len(used) >= 10, sorted(set(FAULTS) - used)


def test_a_killed_process_ends_with_all_that_its_tasks_began() -> None:
    async def stubborn(done: list[int]) -> None:
        for number in range(3):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                done.append(number)

    async def main(loop: SimLoop) -> None:
        done: list[int] = []

        async def program() -> None:
            loop.call_later(30, lambda: loop.create_task(stubborn(done)))
            child = loop.create_task(stubborn(done))
            await child

        process = loop.network.process("10.0.2.1")
        process.spawn(program())
        await asyncio.sleep(1)
        assert len(process.tasks()) == 2 and len(process.timers()) == 2
        process.kill()
        await asyncio.sleep(1)
        assert done == [0, 1, 2] and not process.tasks()
        await asyncio.sleep(40)
        assert not process.tasks() and done == [0, 1, 2], "its timers begin nothing any more"

    simulate(1, main)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Any) -> None:
    for seed in range(mutant.within):
        plan = draw(seed, **mutant.pins)
        with mutant.applied():
            problems = run_client_seed(seed, plan).problems
        if problems:
            assert "client_mutants.py" not in problems[0], f"it is broken: {problems[0]}"
            break
    else:
        pytest.fail(f"{mutant.name!r} lived {mutant.within} seeds: a checker is missing")
    # And it was the mutant: the real client passes the same seed.
    outcome = run_client_seed(seed, plan)
    assert not outcome.problems, describe(outcome)
