"""How far streams are behind, queue by queue.

Owns: LagListener. One rule: it reads what Spark reports after each batch and asks no server, so it
costs nothing and works wherever the driver is.

    listener = cometmq.spark.LagListener(on_lag=print)
    spark.streams.addListener(listener)
    ...
    listener.lag(query.id)      # {MessageQueue("orders", "broker-a", 0): 12, ...}
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from cometmq.message import MessageQueue
from cometmq.spark.plan import VERSION, flat

MOST_QUERIES = 1000  # remembered; those that ended are forgotten first


@dataclass(frozen=True)
class Lag:
    """A query after one of its batches."""

    query_id: str
    name: str
    batch_id: int
    rows: int
    by_queue: dict[MessageQueue, int] = field(default_factory=dict)
    """Messages that were there when the batch was planned and that it does not cover."""
    lost: int = 0
    """Offsets given up so far, with failOnDataLoss=false, as far as the driver saw it; what an
    executor finds missing while it reads is in its log only."""

    @property
    def total(self) -> int:
        return sum(self.by_queue.values())


class LagListener(StreamingQueryListener):
    """Tells the lag of every query that reads from rocketmq; `on_lag` is called with each Lag, on
    Spark's listener thread: it should return soon."""

    def __init__(self, on_lag: Callable[[Lag], object] | None = None) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._last: dict[str, Lag] = {}

    def lag(self, query_id: object) -> dict[MessageQueue, int]:
        """By queue, after the last batch; empty if there was none."""
        found = self.last(query_id)
        return {} if found is None else dict(found.by_queue)

    def last(self, query_id: object) -> Lag | None:
        """What the last batch of a query (`query.id`) came to."""
        with self._lock:
            return self._last.get(str(query_id))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's names
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        found = lag_of(
            [(one.endOffset, one.latestOffset) for one in progress.sources],
            query_id=str(progress.id),
            name=progress.name or "",
            batch_id=progress.batchId,
            rows=progress.numInputRows,
        )
        if found is None:
            return
        with self._lock:
            self._last.pop(found.query_id, None)
            self._last[found.query_id] = found
            while len(self._last) > MOST_QUERIES:
                del self._last[next(iter(self._last))]
        if self._on_lag is not None:
            self._on_lag(found)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        pass


def lag_of(
    offsets: list[tuple[str | None, str | None]],
    *,
    query_id: str,
    name: str = "",
    batch_id: int = 0,
    rows: int = 0,
) -> Lag | None:
    """From the (end, latest) offsets of a query's sources; None if none of them is ours."""
    by_queue: dict[MessageQueue, int] = {}
    lost = 0
    is_ours = False
    for end, latest in offsets:
        read, there = _ours(end), _ours(latest)
        if read is None or there is None:
            continue
        is_ours = True
        positions = flat(read["q"])
        lost += int(read.get("lost", 0))
        for queue, at in flat(there["q"]).items():
            by_queue[queue] = by_queue.get(queue, 0) + max(0, at - positions.get(queue, at))
    return Lag(query_id, name, batch_id, rows, by_queue, lost) if is_ours else None


def _ours(text: str | None) -> dict[str, Any] | None:
    try:
        raw = json.loads(text) if text else None
    except ValueError:
        return None
    is_ours = isinstance(raw, dict) and raw.get("v") == VERSION and isinstance(raw.get("q"), dict)
    return raw if is_ours else None
