"""python -m cometmq.testing.simulate: play seeds; one, some, or until stopped.

Owns: the command line and what it prints. One rule: a failure ends with the one line that plays it
again, and says which commit it was.

    --seed N         one seed; --trace prints every event of it, --plain plays plain messages only
    --seconds S      fresh seeds for so long, in this process
    --soak           fresh seeds until Ctrl-C, in one process per core
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cometmq.testing.cluster import Cluster, Outcome
from cometmq.testing.swarm import Swarm, draw

PROGRESS_S = 10.0
STUCK_S = 180.0  # a seed takes about a second; one that takes this long never ends

# ------------------------------------------------------------------------------------- one seed


def run_seed(
    seed: int, swarm: Swarm | None = None, trace: Callable[[str], None] | None = None
) -> Outcome:
    """One whole run of a seed, with the swarm that the seed draws or with this one."""
    return play(Cluster(seed, swarm, trace), is_quiet=trace is None)


def play(cluster: Cluster, *, is_quiet: bool = True) -> Outcome:
    """Run a cluster to its end, in UTC: file names and ids tell the local time, and a seed is the
    same run on every machine. Quiet: what servers log about the faults they meet is not wanted."""
    former = logging.root.manager.disable
    if is_quiet:
        logging.disable(logging.CRITICAL)
    try:
        with _utc():
            return cluster.run()
    finally:
        logging.disable(former)


@contextmanager
def _utc() -> Iterator[None]:
    former = os.environ.get("TZ")
    os.environ["TZ"] = "UTC0"
    time.tzset()
    try:
        yield
    finally:
        del os.environ["TZ"]
        if former is not None:
            os.environ["TZ"] = former
        time.tzset()


def _play_safely(seed: int) -> Outcome:
    """For many seeds: one that breaks the simulator itself is a failed one, and not the end."""
    try:
        return run_seed(seed)
    except Exception:
        last = traceback.format_exc().strip().splitlines()
        return _broken(seed, "the simulator raised " + " / ".join(line.strip() for line in last))


def _broken(seed: int, problem: str) -> Outcome:
    return Outcome(seed, [problem], "", 0, 0, 0, 0, 0, 0, 0, {})


def fresh() -> int:
    """A seed to begin with that was hardly ever played before."""
    return time.time_ns() // 1_000 % 10**9


# ------------------------------------------------------------------------------------ telling it


def commit() -> str:
    """What is being tested: git's name for it, `-dirty` if changed since; else the version."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return metadata.version("cometmq")


def describe(outcome: Outcome) -> str:
    lines = [f"seed {outcome.seed} FAILED", *(f"  {text}" for text in outcome.problems)]
    lines.append(f"  again: make sim SEED={outcome.seed} COMMIT={commit()}")
    lines.append(f"     or: python -m cometmq.testing.simulate --seed {outcome.seed}")
    return "\n".join(lines)


@dataclass
class Tally:
    """What many seeds came to."""

    first: int
    began: float = field(default_factory=time.monotonic)
    seeds: int = 0
    last: int = -1
    failed: list[Outcome] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.last = max(self.last, outcome.seed)
        if outcome.problems:
            self.failed.append(outcome)
        parts = {
            "events": outcome.events,
            "virtual_s": outcome.virtual_ms // 1000,
            "acked": outcome.acked,
            "consumed": outcome.consumed,
            "boots": outcome.boots,
        }
        for name, count in parts.items():
            self.sums[name] = self.sums.get(name, 0) + count
        for name, count in outcome.faults.items():
            self.faults[name] = self.faults.get(name, 0) + count

    @property
    def line(self) -> str:
        """All of it in one line."""
        rate = self.seeds / max(time.monotonic() - self.began, 0.001)
        sums = " ".join(f"{name} {count}" for name, count in self.sums.items())
        faults = " ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"seeds {self.first}..{self.last}: {self.seeds} played, {rate:.1f} seeds/s, "
            f"{len(self.failed)} failed; {sums}; faults: {faults}"
        )


def run_for(seconds: float, first: int, most: int = 2**62) -> Tally:
    """Seeds from `first` on until the time is over."""
    tally = Tally(first)
    seed = first
    while seed < first + most and time.monotonic() - tally.began < seconds:
        tally.add(_play_safely(seed))
        seed += 1
    return tally


# ------------------------------------------------------------------------------------------ soak


def _worker(first: int, end: int, step: int, results: Any, stop: Any) -> None:
    """In a process of its own: tell each seed before it is played, and what it came to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and says stop
    for seed in range(first, end, step):
        if stop.is_set():
            break
        results.put((os.getpid(), seed, None))
        results.put((os.getpid(), seed, _play_safely(seed)))
    results.put((os.getpid(), -1, None))


@dataclass
class _Job:
    process: Any
    seed: int
    since: float


class Soak:
    """Fresh seeds in several processes, until told to stop, or `count` of them."""

    def __init__(self, jobs: int, first: int, count: int, failures: Path) -> None:
        self.tally = Tally(first)
        self._step = jobs
        self._end = first + count
        self._failures = failures
        self._context = multiprocessing.get_context("spawn")
        self._results = self._context.Queue()
        self._stop = self._context.Event()
        self._jobs: dict[int, _Job] = {}
        self._told = self.tally.began

    def run(self) -> Tally:
        for number in range(self._step):
            self._start(self.tally.first + number)
        while self._jobs:
            try:
                self._turn()
            except KeyboardInterrupt:
                if self._stop.is_set():  # told twice: now
                    for job in self._jobs.values():
                        job.process.kill()
                    break
                print("stopping: the seeds under way are played to their end", flush=True)
                self._stop.set()
        return self.tally

    def _start(self, first: int) -> None:
        if first >= self._end:
            return
        process = self._context.Process(
            target=_worker,
            args=(first, self._end, self._step, self._results, self._stop),
            daemon=True,
        )
        process.start()
        self._jobs[process.pid or 0] = _Job(process, first, time.monotonic())

    def _turn(self) -> None:
        try:
            pid, seed, outcome = self._results.get(timeout=1.0)
        except queue.Empty:
            pid, seed, outcome = 0, 0, None
        job = self._jobs.get(pid)
        if job is not None:
            job.since = time.monotonic()
            if seed < 0:
                job.process.join()
                del self._jobs[pid]
            elif outcome is None:
                job.seed = seed
            else:
                self._take(outcome)
        self._look_after()
        if time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            print(self.tally.line, flush=True)

    def _look_after(self) -> None:
        """A process that is gone or stuck has failed at its seed; another goes on behind it."""
        for pid, job in list(self._jobs.items()):
            is_stuck = time.monotonic() - job.since > STUCK_S
            is_gone = not job.process.is_alive() and time.monotonic() - job.since > 5
            if is_stuck or is_gone:
                job.process.kill()
                job.process.join()
                del self._jobs[pid]
                why = f"not over after {STUCK_S:.0f} s" if is_stuck else "its process ended"
                self._take(_broken(job.seed, why))
                if not self._stop.is_set():
                    self._start(job.seed + self._step)

    def _take(self, outcome: Outcome) -> None:
        self.tally.add(outcome)
        if outcome.problems:
            print(describe(outcome), flush=True)
            self._failures.parent.mkdir(parents=True, exist_ok=True)
            with self._failures.open("a") as file:
                file.write(f"{outcome.seed}  {commit()}  {outcome.problems[0]}\n")


# ---------------------------------------------------------------------------------- command line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cometmq.testing.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="play this one seed")
    what.add_argument("--seconds", type=float, help="play fresh seeds for so long")
    what.add_argument("--soak", action="store_true", help="play fresh seeds until Ctrl-C")
    parser.add_argument(
        "--plain", action="store_true", help="--seed without the message kinds that it draws"
    )
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    parser.add_argument("--first", type=int, help="the first of the fresh seeds (default: by time)")
    parser.add_argument("--count", type=int, default=2**62, help="so many seeds at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of --soak")
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("soak-failures.txt"),
        help="where --soak writes the seeds that failed (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _show(options.seed, is_traced=options.trace, is_plain=options.plain)
    first = options.first if options.first is not None else fresh()
    print(f"commit {commit()}, seeds from {first} on", flush=True)
    if options.soak:
        tally = Soak(max(options.jobs, 1), first, options.count, options.failures).run()
    else:
        tally = run_for(options.seconds, first, options.count)
        for outcome in tally.failed:
            print(describe(outcome))
    print(tally.line)
    if tally.failed:
        print("failed: " + " ".join(str(outcome.seed) for outcome in tally.failed))
    return bool(tally.failed)


def _show(seed: int, *, is_traced: bool, is_plain: bool) -> int:
    swarm = draw(seed, kinds=()) if is_plain else draw(seed)
    outcome = run_seed(seed, swarm, trace=print if is_traced else None)
    print(
        f"seed {outcome.seed} hash {outcome.trace_hash} events {outcome.events} "
        f"virtual_ms {outcome.virtual_ms} sent {outcome.sent} acked {outcome.acked} "
        f"consumed {outcome.consumed} recoveries {outcome.boots} faults {outcome.faults}"
    )
    if outcome.problems:
        print(describe(outcome))
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
