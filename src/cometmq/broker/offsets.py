"""How far each group has come in each queue.

Owns: consumer offsets, pending resets, pull progress, and consumerOffset.json. One rule: an offset
moves back only by a client's explicit commit or an operator's reset, and then it is logged.
"""

from __future__ import annotations

import logging
from typing import Any

from cometmq.broker.state import StateFile, pretty
from cometmq.config import BrokerConfig
from cometmq.errors import BodyError
from cometmq.wire.bodies import DataVersion, data_version, drop_nulls

log = logging.getLogger("cometmq.broker")

Table = dict[tuple[str, str], dict[int, int]]
VERSION_STEP = 500  # commits per DataVersion step, as RocketMQ counts
USUAL_SPAN = 2_000  # of a queue a consumer has so many messages in flight at most, by default


class Offsets:
    """(topic, group) -> queue id -> next offset to consume."""

    def __init__(self, config: BrokerConfig, stored: dict[str, Any] | None, now_ms: int) -> None:
        self.version = DataVersion(timestamp=now_ms)
        self.table: Table = {}
        self.pulled: Table = {}
        self.resets: Table = {}
        self.moved_back = 0
        self._commits = 0
        if stored is not None:
            self._load(stored)
        self.file = StateFile("config/consumerOffset.json", self.encode, config.save_offsets_ms)

    def _load(self, stored: dict[str, Any]) -> None:
        try:
            self.version = data_version(stored.get("dataVersion"))
            table = drop_nulls(stored.get("offsetTable") or {})
        except BodyError as error:
            log.error("consumerOffset.json is not as expected, offsets are lost: %s", error)
            return
        for key, queues in table.items():
            topic, mark, group = key.partition("@")
            if not mark or not isinstance(queues, dict):
                log.error("consumer offsets skipped key=%r", key)
                continue
            try:
                self.table[topic, group] = {int(q): int(o) for q, o in queues.items()}
            except (TypeError, ValueError):
                log.error("consumer offsets skipped key=%r: not numbers", key)

    def get(self, topic: str, group: str, queue_id: int) -> int | None:
        """The stored offset, or the one a pending reset asks for; None if there is none."""
        reset = self.resets.get((topic, group))
        if reset is not None and queue_id in reset:
            return reset[queue_id]
        queues = self.table.get((topic, group))
        return None if queues is None else queues.get(queue_id)

    def commit(
        self, topic: str, group: str, queue_id: int, offset: int, now_ms: int, peer: str
    ) -> None:
        """Store an offset. While a reset is pending for the queue, commits don't count."""
        reset = self.resets.get((topic, group))
        if reset is not None and queue_id in reset:
            return
        queues = self.table.get((topic, group))
        if queues is None:
            queues = self.table[topic, group] = {}
        before = queues.get(queue_id)
        if before == offset:
            return
        queues[queue_id] = offset
        if before is not None and offset < before:
            self.moved_back += 1
            # What one consumer had done, the next does again when a queue changes hands: up to what
            # was in flight that is no news.
            level = logging.INFO if before - offset <= USUAL_SPAN else logging.WARNING
            log.log(
                level,
                "offset moved back group=%s topic=%s queue=%d before=%d after=%d by=%s",
                group,
                topic,
                queue_id,
                before,
                offset,
                peer,
            )
        self._changed(now_ms)

    def _changed(self, now_ms: int) -> None:
        self._commits += 1
        if self._commits % VERSION_STEP == 0:
            self.version = self.version.next(now_ms)
        self.file.changed(now_ms)

    def note_pull(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Remember how far a group has pulled; only in memory, for consume stats."""
        queues = self.pulled.get((topic, group))
        if queues is None:
            queues = self.pulled[topic, group] = {}
        queues[queue_id] = offset

    def reset(self, topic: str, group: str, queue_id: int, offset: int, now_ms: int) -> None:
        """An operator's reset: takes effect with the group's next pull of that queue."""
        before = self.get(topic, group, queue_id)
        self.table.setdefault((topic, group), {})[queue_id] = offset
        self.resets.setdefault((topic, group), {})[queue_id] = offset
        self._changed(now_ms)
        log.info(
            "offset reset group=%s topic=%s queue=%d before=%s after=%d",
            group,
            topic,
            queue_id,
            before,
            offset,
        )

    def take_reset(self, topic: str, group: str, queue_id: int) -> int | None:
        """The pending reset of this queue, which is then no longer pending."""
        queues = self.resets.get((topic, group))
        if queues is None or queue_id not in queues:
            return None
        offset = queues.pop(queue_id)
        if not queues:
            del self.resets[topic, group]
        return offset

    def topics_of(self, group: str) -> list[str]:
        return sorted({topic for topic, owner in self.table if owner == group})

    def groups_of(self, topic: str) -> list[str]:
        return sorted({owner for name, owner in self.table if name == topic})

    def forget_topic(self, topic: str, now_ms: int) -> None:
        self._forget([key for key in {**self.pulled, **self.table} if key[0] == topic], now_ms)

    def forget_group(self, group: str, now_ms: int) -> None:
        self._forget([key for key in {**self.pulled, **self.table} if key[1] == group], now_ms)

    def _forget(self, keys: list[tuple[str, str]], now_ms: int) -> None:
        for key in keys:
            self.table.pop(key, None)
            self.pulled.pop(key, None)
            self.resets.pop(key, None)
        if keys:
            self._changed(now_ms)

    def clone(self, source: str, target: str, topic: str | None, now_ms: int) -> None:
        """Give `target` the offsets of `source`, for one topic or all."""
        for name, group in list(self.table):
            if group == source and topic in (None, "", name):
                log.info(
                    "offsets cloned group=%s topic=%s from=%s before=%s after=%s",
                    target,
                    name,
                    source,
                    self.table.get((name, target)),
                    self.table[name, source],
                )
                self.table[name, target] = dict(self.table[name, source])
        self._changed(now_ms)

    def as_wire(self) -> dict[str, Any]:
        return {
            "dataVersion": self.version,
            "offsetTable": {
                f"{topic}@{group}": {str(q): offset for q, offset in queues.items()}
                for (topic, group), queues in self.table.items()
            },
        }

    def encode(self) -> bytes:
        return pretty(self.as_wire())
