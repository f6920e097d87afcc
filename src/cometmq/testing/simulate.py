"""python -m cometmq.testing.simulate: run seeds, one or many.

Owns: the command line and what it prints. One rule: a failure ends with the one line that plays it
again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable

from cometmq.testing.cluster import Cluster, Outcome
from cometmq.testing.swarm import Swarm


def run_seed(
    seed: int, swarm: Swarm | None = None, trace: Callable[[str], None] | None = None
) -> Outcome:
    """One whole run. What servers log about the faults they meet is not wanted here."""
    former = logging.root.manager.disable
    if trace is None:
        logging.disable(logging.CRITICAL)
    try:
        return Cluster(seed, swarm, trace).run()
    finally:
        logging.disable(former)


def command_for(seed: int) -> str:
    return f"python -m cometmq.testing.simulate --seed {seed}"


def describe(outcome: Outcome) -> str:
    lines = [f"seed {outcome.seed} FAILED", *(f"  {text}" for text in outcome.problems)]
    lines.append(f"  again: {command_for(outcome.seed)}")
    return "\n".join(lines)


def run_for(seconds: float, first: int, most: int = 2**62) -> tuple[list[Outcome], dict[str, int]]:
    """Seeds from `first` on until the time is over; the failed ones, and the sums of all."""
    began = time.monotonic()
    failed: list[Outcome] = []
    sums: dict[str, int] = {}
    seed = first
    while seed < first + most and time.monotonic() - began < seconds:
        outcome = run_seed(seed)
        seed += 1
        if outcome.problems:
            failed.append(outcome)
        parts = {
            "seeds": 1,
            "events": outcome.events,
            "virtual_ms": outcome.virtual_ms,
            "acked": outcome.acked,
            "consumed": outcome.consumed,
            "recoveries": outcome.boots,
        }
        parts.update({f"fault {name}": count for name, count in outcome.faults.items()})
        for name, count in parts.items():
            sums[name] = sums.get(name, 0) + count
    return failed, sums


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="cometmq.testing.simulate")
    parser.add_argument("--seed", type=int, help="run this one seed")
    parser.add_argument("--trace", action="store_true", help="print every event of it")
    parser.add_argument("--seconds", type=float, help="run fresh seeds for so long")
    parser.add_argument("--first", type=int, help="the first of the fresh seeds (default: by time)")
    options = parser.parse_args(arguments)
    if (options.seed is None) == (options.seconds is None):
        parser.error("give --seed or --seconds")
    if options.seed is not None:
        outcome = run_seed(options.seed, trace=print if options.trace else None)
        print(
            f"seed {outcome.seed} hash {outcome.trace_hash} events {outcome.events} "
            f"virtual_ms {outcome.virtual_ms} sent {outcome.sent} acked {outcome.acked} "
            f"consumed {outcome.consumed} recoveries {outcome.boots} faults {outcome.faults}"
        )
        if outcome.problems:
            print(describe(outcome))
        return bool(outcome.problems)
    first = options.first if options.first is not None else time.time_ns() // 1_000 % 10**9
    began = time.monotonic()
    failed, sums = run_for(options.seconds, first)
    taken = time.monotonic() - began
    for outcome in failed:
        print(describe(outcome))
    faults = {name[6:]: sums.pop(name) for name in sorted(sums) if name.startswith("fault ")}
    print(" ".join(f"{name} {count}" for name, count in sums.items()))
    print(f"{sums['seeds'] / taken:.1f} seeds/s, {sums['events'] / taken:,.0f} events/s")
    print("faults " + " ".join(f"{name} {count}" for name, count in faults.items()))
    print(f"failed {len(failed)} of {sums['seeds']}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
