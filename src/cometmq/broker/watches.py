"""Which queues somebody waits for.

Owns: how many kinds of waiters listen to a queue. One rule: the store tells of arrivals in a queue
as long as one of them listens.
"""

from __future__ import annotations

from collections.abc import Callable


class Watches:
    """Counts listeners; the store hears of the first and of the last."""

    def __init__(self, watch: Callable[[str, int, bool], None]) -> None:
        self._watch = watch
        self._counts: dict[tuple[str, int], int] = {}

    def watch(self, topic: str, queue_id: int, is_watched: bool) -> None:
        key = (topic, queue_id)
        count = self._counts.get(key, 0) + (1 if is_watched else -1)
        if count > 0:
            self._counts[key] = count
            if count == 1 and is_watched:
                self._watch(topic, queue_id, True)
        else:
            self._counts.pop(key, None)
            self._watch(topic, queue_id, False)
