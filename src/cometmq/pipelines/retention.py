"""How much time is left before a broker deletes what is not archived yet.

Owns: RetentionWatch. One rule: it errs on the early side. A message counts as endangered when
`fileReservedTime` has passed since it was stored; the broker deletes its file only when the newest
message of that file is so old, and at the hours of `deleteWhen` (sooner only if the disk is full).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from cometmq.errors import DataLost
from cometmq.pipelines.reaching import admin_of
from cometmq.spark.plan import VERSION, Positions, flat, text_of

if TYPE_CHECKING:
    from cometmq.client.blocking_admin import Admin
    from cometmq.message import MessageQueue
    from cometmq.pipelines.files import Files
    from cometmq.pipelines.running import Tell

log = logging.getLogger("cometmq.pipelines")

HOURS_KEY = "fileReservedTime"
DEFAULT_HOURS = 72.0
HOURS_KNOWN_S = 60.0
"""How long a broker's setting is believed before it is asked again."""


class Danger(msgspec.Struct, frozen=True):
    """The message that the broker deletes first among those that are not archived."""

    seconds: float
    reserved_s: float
    queue: MessageQueue
    offset: int


class RetentionWatch:
    """Asked after each batch; keeps one Admin."""

    def __init__(
        self,
        name: str,
        namesrv: str,
        options: Mapping[str, str],
        checkpoint: Files,
        tell: Tell,
        *,
        margin: float,
        fails_on_loss: bool,
    ) -> None:
        self._name, self._tell = name, tell
        self._admin: Admin = admin_of(namesrv, options)
        self._admin.start()
        self._checkpoint = checkpoint
        self._margin, self._fails_on_loss = margin, fails_on_loss
        self._hours: dict[str, tuple[float, float]] = {}
        self.least: Danger | None = None
        """The closest call of the run."""
        self.warnings = 0

    def close(self) -> None:
        self._admin.close()

    def check(self, batch_id: int) -> None:
        """After a batch is in the lake; DataLost if retention took what is not, and that fails."""
        positions = self._positions(batch_id)
        lost: list[tuple[MessageQueue, int, int]] = []
        waiting = self._waiting(positions, lost)
        for queue, at, begin in lost:
            self._lose(queue, at, begin)
        danger = min(waiting, key=lambda one: one.seconds, default=None)
        if danger is None:
            brokers = {queue.broker for queue in positions}
            kept = "brokers keep messages " + shown(min(map(self._reserved_s, brokers), default=0))
            what = kept if brokers else "there is no such topic yet"
            self._tell(f"{self._name}: nothing waits; {what}")
            return
        if self.least is None or danger.seconds < self.least.seconds:
            self.least = danger
        self._say(danger)

    def _say(self, danger: Danger) -> None:
        where = f"{text_of(danger.queue)} offset {danger.offset}"
        kept = f"kept {shown(danger.reserved_s)}"
        if danger.seconds >= danger.reserved_s * self._margin:
            self._tell(f"{self._name}: {shown(danger.seconds)} left before retention ({where})")
            return
        self.warnings += 1
        left = f"only {shown(danger.seconds)} left" if danger.seconds > 0 else "no time left"
        self._warn(f"falling behind retention, {left} ({where}, {kept})")

    def _lose(self, queue: MessageQueue, at: int, begin: int) -> None:
        why = f"retention: the queue begins at {begin} now, and {at} was to be archived next"
        if self._fails_on_loss:
            raise DataLost(text_of(queue), at, begin, why)
        self.warnings += 1
        self._warn(f"{begin - at} messages lost to retention ({text_of(queue)} from {at})")

    def _warn(self, text: str) -> None:
        self._tell(f"{self._name}: WARNING {text}")
        log.warning("retention pipeline=%s what=%s", self._name, text)

    def _waiting(
        self, positions: Positions, lost: list[tuple[MessageQueue, int, int]]
    ) -> list[Danger]:
        """Of each queue with something unread the message that comes next."""
        found = []
        now_s = time.time()
        for topic in sorted({queue.topic for queue in positions}):
            for queue, there in self._admin.topic_stats(topic).queues.items():
                at = positions.get(queue, there.min_offset)
                if at < there.min_offset:
                    lost.append((queue, at, there.min_offset))
                    at = there.min_offset
                if at >= there.max_offset:
                    continue
                for message in self._admin.queue_messages(queue, at, most=1):
                    reserved_s = self._reserved_s(queue.broker)
                    left_s = message.store_time.timestamp() + reserved_s - now_s
                    found.append(Danger(left_s, reserved_s, queue, at))
        return found

    def _reserved_s(self, broker: str) -> float:
        hours, asked_s = self._hours.get(broker, (DEFAULT_HOURS, -HOURS_KNOWN_S))
        if time.monotonic() - asked_s >= HOURS_KNOWN_S:
            hours = float(self._admin.broker_config(broker).get(HOURS_KEY, DEFAULT_HOURS))
            self._hours[broker] = (hours, time.monotonic())
        return hours * 3600

    def _positions(self, batch_id: int) -> Positions:
        """Up to where the queues are read when the batch is done: Spark writes that down before it
        begins with it."""
        for line in self._checkpoint.read(f"offsets/{batch_id}").decode().splitlines():
            try:
                raw = json.loads(line)
            except ValueError:
                continue
            if isinstance(raw, dict) and raw.get("v") == VERSION and isinstance(raw.get("q"), dict):
                return flat(raw["q"])
        return {}


def shown(seconds: float) -> str:
    """`3 d 4 h`, `71 h 59 min`, `12 s`."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 96 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
