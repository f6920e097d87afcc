"""Queue locks for ordered consumption.

Owns: (group, topic, queue) -> who holds it, in memory. One rule: a lock ends 60 s after its last
renewal or when its owner lets go or unregisters; only the owner renews. A lost connection does not
end it: the owner may still be working on what it has, and order matters more than speed here.
"""

from __future__ import annotations

import msgspec

LOCK_MS = 60_000  # rocketmq.broker.rebalance.lockMaxLiveTime


class _Lock(msgspec.Struct, gc=False):
    client_id: str
    renewed_ms: int


class QueueLocks:
    """All locks of a broker, by group."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[str, int], _Lock]] = {}

    def lock(self, group: str, topic: str, queue_id: int, client_id: str, now_ms: int) -> bool:
        """Take or renew; True if this client owns the queue now."""
        locks = self._groups.setdefault(group, {})
        held = locks.get((topic, queue_id))
        if held is None or held.client_id == client_id or now_ms - held.renewed_ms > LOCK_MS:
            locks[topic, queue_id] = _Lock(client_id, now_ms)
            return True
        return False

    def unlock(self, group: str, topic: str, queue_id: int, client_id: str) -> None:
        locks = self._groups.get(group)
        held = None if locks is None else locks.get((topic, queue_id))
        if locks is not None and held is not None and held.client_id == client_id:
            del locks[topic, queue_id]

    def release(self, group: str, client_id: str) -> None:
        """A client has unregistered: nobody should wait a minute for its queues."""
        locks = self._groups.get(group)
        if locks is None:
            return
        for key in [key for key, held in locks.items() if held.client_id == client_id]:
            del locks[key]
        if not locks:
            del self._groups[group]

    def is_any_held(self, group: str, now_ms: int) -> bool:
        """Whether the group consumes in order right now."""
        locks = self._groups.get(group, {})
        return any(now_ms - held.renewed_ms <= LOCK_MS for held in locks.values())

    def owner(self, group: str, topic: str, queue_id: int, now_ms: int) -> str | None:
        held = self._groups.get(group, {}).get((topic, queue_id))
        return None if held is None or now_ms - held.renewed_ms > LOCK_MS else held.client_id

    def expire(self, now_ms: int) -> None:
        """Drop what nobody renews, so that dead groups cost nothing."""
        for group in list(self._groups):
            locks = self._groups[group]
            for key in [k for k, held in locks.items() if now_ms - held.renewed_ms > LOCK_MS]:
                del locks[key]
            if not locks:
                del self._groups[group]
