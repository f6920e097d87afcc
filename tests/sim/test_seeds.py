"""Seeds: those that once failed, fresh ones, and the promise that a seed is always the same run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from cometmq import _fast
from cometmq.testing import (
    FAULTS,
    LATER_FAULTS,
    Cluster,
    Outcome,
    Swarm,
    describe,
    draw,
    play,
    run_for,
    run_seed,
    simulate,
)
from cometmq.testing.kinds import KINDS
from cometmq.testing.kinds_base import Ledger
from cometmq.testing.simulate import Soak, fresh

KEPT = Path(__file__).with_name("seeds.txt")
FRESH_SECONDS = float(os.environ.get("COMETMQ_SIM_SECONDS", "0"))
STEADY = range(1_000, 1_012)


def _kept(*, is_plain: bool) -> list[int]:
    """Seeds from before there were kinds are kept as they were, and play plain messages only."""
    plain, _, with_kinds = KEPT.read_text().partition("# With the kinds that they draw")
    with_kinds = with_kinds.partition("# With one kind")[0]
    lines = [
        line.split("#")[0].split() for line in (plain if is_plain else with_kinds).splitlines()
    ]
    return [int(words[0]) for words in lines if words and words[0].isdigit()]


def _kept_of_a_kind() -> list[tuple[str, int]]:
    found = KEPT.read_text().partition("# With one kind")[2].splitlines()[1:]
    return [(line.split()[1], int(line.split()[0])) for line in found if line]


@pytest.mark.parametrize("seed", _kept(is_plain=True))
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    outcome = run_seed(seed, draw(seed, kinds=()))
    assert not outcome.problems, describe(outcome)


@pytest.mark.parametrize("seed", _kept(is_plain=False))
def test_a_seed_with_kinds_that_once_failed_passes(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.problems, describe(outcome)


@pytest.mark.parametrize(("kind", "seed"), _kept_of_a_kind())
def test_a_seed_of_one_kind_that_once_failed_passes(kind: str, seed: int) -> None:
    outcome = run_seed(seed, draw(seed, kinds=(kind,)))
    assert not outcome.problems, describe(outcome)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_really_played(kind: str) -> None:
    """Guards against checks that pass because there is nothing to check."""
    cluster = Cluster(0, draw(0, only=(), kinds=(kind,)))
    outcome = play(cluster)
    assert not outcome.problems, describe(outcome)
    ledger = cluster.history.ledger
    assert isinstance(ledger, Ledger)
    assert len(ledger.attempts) > 10
    given = cluster.history.consumed[KINDS[kind].group_name]
    assert len(given) > 3
    marks = {
        "retries": lambda: any("back" in key for key in ledger.asked),
        "transactions": lambda: any(key[0] == "checks" for key in ledger.asked),
        "timers": lambda: ledger.own["recalls"],
        "replies": lambda: any(key[0] == "pushed" for key in ledger.asked),
        "ordered": lambda: ledger.own["ordered"],
        "pop": lambda: ("changed", "broker-a") in ledger.asked,
        "pop_ordered": lambda: any(one.asked for one in ledger.own["ordered pops"]),
        "dedup": lambda: any(key[0] == "duplicates" for key in ledger.asked),
        "sequences": lambda: any(key[0] == "numbered again" for key in ledger.asked),
        "ttl": lambda: ledger.own["passed"],
    }
    assert marks.get(kind, lambda: True)()


@pytest.mark.parametrize("seed", STEADY)
def test_a_steady_seed_passes(seed: int) -> None:
    """The same seeds in every run, so that a change is judged by itself and not by luck."""
    outcome = run_seed(seed)
    assert not outcome.problems, describe(outcome)


@pytest.mark.skipif(not FRESH_SECONDS, reason="fresh seeds: make sim, or COMETMQ_SIM_SECONDS=n")
def test_fresh_seeds_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Other seeds in every run, for COMETMQ_SIM_SECONDS; without it only those that are known, so
    that a run tells of the change and not of its luck."""
    tally = run_for(FRESH_SECONDS, fresh())
    with capsys.disabled():
        print(f"\nfresh {tally.line}")
    assert not tally.failed, "\n".join(describe(outcome) for outcome in tally.failed)
    assert tally.sums["acked"] > 0 < tally.sums["consumed"]


def test_a_seed_is_the_same_run_in_every_process() -> None:
    def play(seed: int, hash_seed: str, zone: str) -> str:
        done = _simulate(
            "--seed", str(seed), env={**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for seed in (7, 300, 1_012):
        first = play(seed, "1", "UTC")
        assert "hash " in first
        assert first == play(seed, "2", "Asia/Tokyo")


@pytest.mark.skipif(_fast.load()[0] is None, reason="the compiled path was not built")
@pytest.mark.parametrize("seed", range(2_000, 2_008))
def test_a_seed_is_the_same_talk_on_the_compiled_and_on_the_plain_path(seed: int) -> None:
    """The same bytes at the same times: whatever compiled code takes on, it does as the plain one
    would. But for pauses (a stall is told after one frame there, and after one read here) and for
    clocks that are not true (a tick more or less then moves the next by microseconds)."""
    not_here = ("pause", "step", "drift")
    faults = tuple(f for f in (*FAULTS, *LATER_FAULTS) if f not in not_here)
    swarm = draw(seed, only=faults)
    outcomes = [run_seed(seed, _on_path(swarm, is_compiled=one)) for one in (True, False)]
    for outcome in outcomes:
        assert not outcome.problems, describe(outcome)
    assert outcomes[0].wire_hash == outcomes[1].wire_hash


def _on_path(swarm: Swarm, *, is_compiled: bool) -> Swarm:
    replace = msgspec.structs.replace
    brokers = tuple(
        replace(plan, config=replace(plan.config, is_compiled_path_enabled=is_compiled))
        for plan in swarm.brokers
    )
    return replace(swarm, brokers=brokers)


def test_a_seed_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    assert run_seed(1).trace_hash == run_seed(1).trace_hash
    assert os.environ["TZ"] == "Asia/Tokyo" and time.tzname[0] == "JST"
    assert logging.getLogger("cometmq").isEnabledFor(logging.CRITICAL)
    monkeypatch.undo()
    time.tzset()


# ----------------------------------------------------------------------------------- the command


def _simulate(
    *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "cometmq.testing.simulate", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_soak_plays_so_many_seeds_in_several_processes(tmp_path: Path) -> None:
    failures = tmp_path / "failures.txt"
    done = _simulate(
        *("--soak", "--jobs", "2", "--count", "5", "--first", "300", "--failures", str(failures))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seeds 300..304: 5 played" in done.stdout
    assert "0 failed" in done.stdout and "faults: " in done.stdout
    assert not failures.exists()


def test_a_soak_ends_cleanly_at_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cometmq.testing.simulate", "--soak", "--jobs", "1"]
    soak = subprocess.Popen(
        [*command, "--first", "300"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert soak.stdout is not None
    assert "seeds from 300 on" in soak.stdout.readline()
    time.sleep(2)
    soak.send_signal(signal.SIGINT)
    rest, _ = soak.communicate(timeout=60)
    assert soak.returncode == 0, rest
    assert "stopping" in rest and "played" in rest and "Traceback" not in rest


def test_a_soak_writes_down_the_seeds_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = tmp_path / "made" / "failures.txt"
    soak = Soak(1, 5, 1, failures)
    outcome = run_seed(5)
    outcome.problems.append("a problem")
    soak._take(outcome)
    assert failures.read_text().startswith("5  ") and "a problem" in failures.read_text()
    assert soak.tally.failed == [outcome]
    printed = capsys.readouterr().out
    assert "make sim SEED=5 COMMIT=" in printed and "a problem" in printed


def test_a_seed_that_breaks_the_simulator_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(seed: int) -> Outcome:
        raise RuntimeError("oh no")

    monkeypatch.setattr(simulate, "run_seed", broken)
    tally = simulate.run_for(60, 1, most=2)
    assert [outcome.seed for outcome in tally.failed] == [1, 2]
    assert "oh no" in tally.failed[0].problems[0]


def test_a_run_does_something() -> None:
    """Guards against a simulator that passes because nothing happens."""
    outcomes = [run_seed(seed) for seed in range(300, 308)]
    assert sum(outcome.acked for outcome in outcomes) > 200
    assert sum(outcome.consumed for outcome in outcomes) > 200
    assert sum(outcome.boots for outcome in outcomes) > 20
    used = {name for outcome in outcomes for name in outcome.faults}
    assert len(used) >= 12, sorted(used)
