"""Makes the helpers importable, and says at the end how much was killed and looked up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def pytest_terminal_summary(terminalreporter: object) -> None:
    from journey import TALLY

    if not TALLY.kills:
        return
    say = terminalreporter.write_line  # type: ignore[attr-defined]
    say(
        f"crash: {TALLY.kills.total()} kills at {len(TALLY.kills)} points, {TALLY.starts} starts; "
        f"{TALLY.acked} messages acknowledged, {TALLY.seen} consumed, {TALLY.checked} looked up"
    )
    say("  " + ", ".join(f"{name} {count}" for name, count in sorted(TALLY.kills.items())))
    if TALLY.missed:
        missed = ", ".join(f"{name} {count}" for name, count in sorted(TALLY.missed.items()))
        say(f"  not reached at the first try, then reached: {missed}")
