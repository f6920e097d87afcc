"""kill -9 while messages of every kind are on their way: delayed, timed, failed, in transactions.

Owns: which of these kills a run makes. One rule: after every kill nothing acknowledged is lost,
nothing comes before its time, nothing rolled back or taken back is ever seen, what was committed is
there once, failed messages come again with their count or are dead letters, and at most what the
dead broker had not noted comes twice; after a clean stop nothing does.

A long run plans every kind's point in both flush modes, general points and random moments between
them, and half of the journeys with ends of transactions gathered in memory.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from journey import IS_LONG, KILLS, MODES, has_compiled_path
from kind_journey import KindJourney
from kind_points import KIND_POINTS
from points import POINTS, Point
from test_kill import SEED

SHORT = {
    "SYNC_FLUSH": ("timer-logged", "end-without-op", "delay-delivered"),
    "ASYNC_FLUSH": ("timer-wheel-synced", "check-before-ask", "back-stored"),
}
GATHERED = {"transactionOpBatchInterval": "150"}
LONGEST_JOURNEY = 12  # kills on one store
GENERAL = 3  # kind points for each general point and each random moment

Plan = tuple[str, int, dict[str, str], list[Point | None]]


def _may_be_reached(point: Point) -> bool:
    return has_compiled_path() or not point.is_compiled


def plans() -> list[Plan]:
    """(flush mode, seed, settings, kills) of each journey; None is a random moment."""
    if not IS_LONG:
        return [
            (mode, SEED + 100, {}, [KIND_POINTS[name] for name in SHORT[mode]]) for mode in MODES
        ]
    found: list[Plan] = []
    for number, mode in enumerate(MODES):
        rng = random.Random(SEED + 100 + number)
        general = [
            point
            for name, point in POINTS.items()
            if "retention" not in name and _may_be_reached(point)
            if point.when != "load" or point.nth <= 8  # reached by less load, too
        ]
        kills: list[Point | None] = []
        count = KILLS // 3
        while len(kills) < count:
            known = [one for one in KIND_POINTS.values() if _may_be_reached(one)]
            every = rng.sample(known, len(known))
            for at in range(0, len(every), GENERAL):
                kills += [*every[at : at + GENERAL], rng.choice(general), None]
        del kills[count:]
        for begin in range(0, count, LONGEST_JOURNEY):
            conf = GATHERED if len(found) % 2 else {}
            part = [
                kill
                for kill in kills[begin : begin + LONGEST_JOURNEY]
                if kill is None or conf or kill.name != "end-noted-in-memory"
                if kill is None or not conf or kill.name != "end-without-op"
            ]
            found.append((mode, SEED + 100 + len(found), conf, part))
    return found


PLANS = plans()


@pytest.mark.parametrize(
    "number", range(len(PLANS)), ids=[f"{mode}-{number}" for number, (mode, *_) in enumerate(PLANS)]
)
def test_every_kind_keeps_its_promise(tmp_path: Path, number: int) -> None:
    mode, seed, conf, kills = PLANS[number]
    with KindJourney(tmp_path, mode, seed, conf) as journey:
        journey.diary.append(f"COMETMQ_KILLS={KILLS} COMETMQ_SEED={SEED} {conf}")
        for kill in kills:
            if kill is None:
                journey.kill_sometime()
            else:
                journey.kill_at(kill)
        journey.end()
        assert journey.ledger.acked_count > 5 * len(kills)
