"""A state file that tells what the log holds, and must never be ahead of it.

Owns: when such a file is written. One rule: what it says is taken at a log offset and handed to
the disk only once the log is durable up to there; a crash may find the file behind the log, which
can be made good by reading on, but never ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable

from cometmq.broker.state import StateFile
from cometmq.ports import NEVER_MS


class ProvenFile:
    """One such file; `encode` is called with the log offset up to which it will count."""

    def __init__(self, name: str, encode: Callable[[int], bytes], interval_ms: int) -> None:
        self._encode = encode
        self._interval_ms = interval_ms
        self._is_dirty = False
        self._next_ms = 0
        self._taken: tuple[int, bytes] | None = None
        self._proven = b""
        self.upto = 0
        """The log offset of what was taken last."""
        self.file = StateFile(name, lambda: self._proven)

    def changed(self) -> None:
        self._is_dirty = True

    def amend(self, change: Callable[[bytes], bytes], now_ms: int) -> None:
        """Change what was said before, as of the log offsets that it spoke for."""
        if self._taken is not None:
            self._taken = (self._taken[0], change(self._taken[1]))
        if self._proven:
            self._proven = change(self._proven)
            self.file.changed(now_ms)

    @property
    def is_waiting(self) -> bool:
        """Whether something is not yet on its way to the disk."""
        return self._is_dirty or self._taken is not None

    def next_ms(self, flushed: int, now_ms: int) -> int:
        if self._taken is not None:  # a flush that ends asks again
            return now_ms if self._taken[0] <= flushed else NEVER_MS
        return max(self._next_ms, now_ms) if self._is_dirty else NEVER_MS

    def tick(self, end: int, flushed: int, now_ms: int, *, at_once: bool = False) -> None:
        """`end`: where the log ends, which is what our state speaks of."""
        if self._is_dirty and self._taken is None and (at_once or self._next_ms <= now_ms):
            self._is_dirty = False
            self._next_ms = now_ms + self._interval_ms
            self.upto = end
            self._taken = (end, self._encode(end))
        if self._taken is not None and self._taken[0] <= flushed:
            self._proven = self._taken[1]
            self._taken = None
            self.file.changed(now_ms)
