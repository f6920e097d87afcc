"""How many timed messages of each topic wait: config/timermetrics.

Owns: these counts. One rule: only people read them; a crash may leave them a little wrong, and
nothing depends on it.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cometmq.broker.state import StateFile
from cometmq.errors import BodyError
from cometmq.wire import fastjson
from cometmq.wire.bodies import DataVersion, data_version

log = logging.getLogger("cometmq.broker")

METRICS_FILE = "config/timermetrics"
SAVE_MS = 10_000


class TimerCounts:
    """By real topic: how many wait, and when that last changed."""

    def __init__(self, stored: dict[str, Any] | None, now_ms: int) -> None:
        self.version = DataVersion(timestamp=now_ms)
        self.table: dict[str, tuple[int, int]] = {}
        self.file = StateFile(METRICS_FILE, self.encode, SAVE_MS)
        if stored is not None:
            self._load(stored)

    def _load(self, stored: dict[str, Any]) -> None:
        try:
            self.version = data_version(stored.get("dataVersion"))
        except BodyError as error:
            log.error("timermetrics version skipped: %s", error)
        table = stored.get("timingCount")
        for topic, entry in table.items() if isinstance(table, dict) else ():
            try:
                self.table[str(topic)] = (int(entry["count"]), int(entry["timeStamp"]))
            except (TypeError, KeyError, ValueError):
                log.error("timer count skipped topic=%r", topic)

    def add(self, topic: str, change: int, now_ms: int, times: int = 1) -> None:
        """One more or one less of a topic, so many times."""
        count = self.table.get(topic, (0, 0))[0] + change * times
        if count:
            self.table[topic] = (count, now_ms)
        else:
            self.table.pop(topic, None)
        self.version = self.version.next(now_ms, times)
        self.file.changed(now_ms)

    def encode(self) -> bytes:
        return fastjson.dumps(
            {
                "dataVersion": msgspec.to_builtins(self.version),
                "timingCount": {
                    topic: {"count": count, "timeStamp": at_ms}
                    for topic, (count, at_ms) in sorted(self.table.items())
                },
            }
        )
