"""Wall-clock milliseconds that never run backwards.

Owns: the one clock of a server process. One rule: a wall clock that is set back is absorbed (we go
on at half speed until it has caught up), so that deadlines always come and times never decrease.
"""

from __future__ import annotations

import time


class Clock:
    """Call it for the time in ms since the epoch."""

    __slots__ = ("_last_mono_ns", "_last_ms")

    def __init__(self) -> None:
        self._last_ms = time.time_ns() // 1_000_000
        self._last_mono_ns = time.monotonic_ns()

    def __call__(self) -> int:
        wall_ms = time.time_ns() // 1_000_000
        if wall_ms >= self._last_ms:
            self._last_ms = wall_ms
            self._last_mono_ns = 0
            return wall_ms
        mono_ns = time.monotonic_ns()
        if self._last_mono_ns == 0:
            self._last_mono_ns = mono_ns
        step_ms = (mono_ns - self._last_mono_ns) // 2_000_000
        if step_ms > 0:
            self._last_ms += step_ms
            self._last_mono_ns = mono_ns
        return self._last_ms
