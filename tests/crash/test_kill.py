"""kill -9 under load, at random moments and at chosen points: nothing that was promised is lost.

Owns: which kills a run makes. One rule: after every kill the store must open by itself, hold every
acknowledged message at its offset with its body, number its queues without gap or repeat, agree
with itself in log, queues and index, and hold nothing that nobody sent. A killed process leaves its
pages to the kernel, so all this holds for asynchronous flush as well.

`COMETMQ_KILLS` says how many kills (10); `COMETMQ_SEED` repeats the plan of a run, though not its
exact moments.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from journey import IS_LONG, KILLS, MODES, Journey, has_compiled_path
from points import POINTS, Point

SEED = int(os.environ.get("COMETMQ_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
LONGEST_JOURNEY = 25  # kills on one store

SHORT = {
    "SYNC_FLUSH": (
        "append-torn-body",
        "recovery-sync",
        "sync-log-during",
        "recovery-walking",
        "",
    ),
    "ASYNC_FLUSH": (
        "roll-after-blank",
        "index-before-slot",
        "recovery-before-cut",
        "save-after-backup",
        "",
    ),
}
"""The ten kills of every `make test`; an empty name is a random moment. Longer runs plan all points
and half as many random moments in each mode."""


def plans() -> list[tuple[str, int, list[Point | None]]]:
    """(flush mode, seed, kills) of each journey; None is a random moment."""
    if not IS_LONG:
        return [
            (mode, SEED, [POINTS.get(name) for name in SHORT[mode]][-(KILLS + 1) // 2 :])
            for mode in MODES
        ]
    found: list[tuple[str, int, list[Point | None]]] = []
    for number, mode in enumerate(MODES):
        rng = random.Random(SEED + number)
        count = (KILLS + number) // 2
        kills: list[Point | None] = []
        while len(kills) < count:
            every: list[Point | None] = [
                point for point in POINTS.values() if has_compiled_path() or not point.is_compiled
            ]
            kills += rng.sample(every, len(every)) + [None] * (len(every) // 2)
        kills = _arranged(kills[:count], rng)
        for begin in range(0, count, LONGEST_JOURNEY):
            found.append((mode, SEED + len(found), kills[begin : begin + LONGEST_JOURNEY]))
    return found


def _arranged(kills: list[Point | None], rng: random.Random) -> list[Point | None]:
    """Shuffled, but kills of starts in rows of up to four, and those that need it after a load."""
    starts = [kill for kill in kills if kill is not None and kill.when == "start"]
    others = [kill for kill in kills if kill is None or kill.when != "start"]
    rng.shuffle(starts)
    rng.shuffle(others)
    found: list[Point | None] = []
    while others or starts:
        if others:
            found.append(others.pop())
        if starts and (not others or rng.random() < 0.4):
            row = rng.randint(1, 4)
            found += starts[:row]
            del starts[:row]
    return found


PLANS = plans()


@pytest.mark.parametrize(
    "number", range(len(PLANS)), ids=[f"{mode}-{number}" for number, (mode, *_) in enumerate(PLANS)]
)
def test_nothing_promised_is_lost(tmp_path: Path, number: int) -> None:
    mode, seed, kills = PLANS[number]
    with Journey(tmp_path, mode, seed) as journey:
        journey.diary.append(f"COMETMQ_KILLS={KILLS} COMETMQ_SEED={SEED}")
        for kill in kills:
            if kill is None:
                journey.kill_sometime()
            else:
                journey.kill_at(kill)
        journey.end()
        assert journey.history.acked_count > 20 * len(kills)
