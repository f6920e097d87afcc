"""State files of a broker: which are dirty, which are being written, which are safe.

Owns: the generations of config/*.json. One rule: at most one save of a file is under way; whoever
must not answer before a change is safe asks `is_saved(generation)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cometmq.ports import NEVER_MS, Out, Save

log = logging.getLogger("cometmq.broker")

RETRY_MS = 1_000  # a save that failed is tried again after this


class StateFile:
    """One JSON file. `changed` marks it dirty; `ask` emits the Save when it is due."""

    def __init__(self, name: str, encode: Callable[[], bytes], delay_ms: int = 0) -> None:
        self.name = name
        self.generation = 0
        self.failures = 0
        self._encode = encode
        self._delay_ms = delay_ms
        self._saved = 0
        self._saving: int | None = None
        self.due_ms = NEVER_MS
        self.on_change: Callable[[], None] | None = None
        """Told of every change, at once."""

    def changed(self, now_ms: int) -> int:
        """Mark dirty; returns the generation that includes this change."""
        self.generation += 1
        if self.on_change is not None:
            self.on_change()
        if self.due_ms == NEVER_MS:
            self.due_ms = now_ms + self._delay_ms
        return self.generation

    def is_saved(self, generation: int) -> bool:
        return self._saved >= generation

    @property
    def is_clean(self) -> bool:
        return self._saved >= self.generation and self._saving is None

    @property
    def is_saving(self) -> bool:
        return self._saving is not None

    @property
    def next_ms(self) -> int:
        """When it is to be asked."""
        return self.due_ms if self._saving is None else NEVER_MS

    def ask(self, now_ms: int, out: Out, *, at_once: bool = False) -> None:
        """Emit a Save if something is dirty, due, and nothing is under way."""
        if self._saving is not None or self._saved >= self.generation:
            return
        if self.due_ms <= now_ms or at_once:
            self._saving = self.generation
            self.due_ms = NEVER_MS
            out.append(Save(self.name, self._encode()))

    def done(self, reason: str | None, now_ms: int) -> None:
        assert self._saving is not None, "a save came back that nobody asked for"
        if reason is None:
            self._saved = self._saving
            if self.failures:
                log.info("save again works name=%s", self.name)
            self.failures = 0
            if self._saved < self.generation and self.due_ms == NEVER_MS:
                self.due_ms = now_ms + self._delay_ms
        else:
            self.failures += 1
            if self.failures == 1 or self.failures % 60 == 0:
                log.error("save failed name=%s tries=%d: %s", self.name, self.failures, reason)
            self.due_ms = now_ms + RETRY_MS
        self._saving = None


def pretty(value: object) -> bytes:
    """JSON as people read it; RocketMQ reads any layout."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)
