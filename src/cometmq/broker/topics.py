"""The topic table of a broker.

Owns: topic configs, their version, and how a new topic is made from a template. One rule: every
change goes through `put` or `delete`, which move the DataVersion and mark topics.json dirty.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cometmq.broker import names
from cometmq.broker.state import StateFile, pretty
from cometmq.config import BrokerConfig
from cometmq.errors import BodyError, RequestRefused
from cometmq.wire.bodies import DataVersion, TopicConfig, data_version, drop_nulls, topic_config
from cometmq.wire.codes import Perm, ResponseCode

log = logging.getLogger("cometmq.broker")

MAX_QUEUES = 65_536  # queue ids are directory names; more than this is a mistake
FIXED_ATTRIBUTES = ("queue.type", "cleanup.policy")
KNOWN_ATTRIBUTES = {
    "queue.type": ("SimpleCQ",),
    "cleanup.policy": ("DELETE",),
    "message.type": ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"),
    "reserve.time": (),
    "dedup.minutes": (),  # CometMQ's own: dedup.py
    "expired.topic": (),  # CometMQ's own: expired.py
}


class Topics:
    """name -> TopicConfig, with the version that name servers compare."""

    def __init__(self, config: BrokerConfig, stored: dict[str, Any] | None, now_ms: int) -> None:
        self.limit = config.max_topics
        self.refused_by_limit = 0
        self.version = DataVersion(timestamp=now_ms)
        self.table: dict[str, TopicConfig] = {
            topic.topicName: topic for topic in names.built_in_topics(config)
        }
        if stored is not None:
            self._overlay(stored)
        self.file = StateFile("config/topics.json", self.encode)
        if stored is None:
            self.file.changed(now_ms)

    def _overlay(self, stored: dict[str, Any]) -> None:
        try:
            self.version = data_version(stored.get("dataVersion"))
            table = drop_nulls(stored.get("topicConfigTable") or {})
        except BodyError as error:
            log.error("topics.json is not as expected, built-in topics only: %s", error)
            return
        for name, raw in table.items():
            try:
                topic = topic_config(raw)
            except BodyError as error:
                log.error("topic skipped topic=%r: %s", name, error)
                continue
            is_allowed = name in self.table or names.topic_problem(name) is None
            if topic.topicName != name or not is_allowed:
                log.error("topic skipped topic=%r: its name is not allowed", name)
                continue
            self.table[name] = topic

    def get(self, name: str) -> TopicConfig | None:
        return self.table.get(name)

    def put(self, topic: TopicConfig, now_ms: int) -> None:
        """Create or replace; RequestRefused when there is no room for one more."""
        if topic.topicName not in self.table and len(self.table) >= self.limit:
            self.refused_by_limit += 1
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"topic {topic.topicName!r} not created: this broker holds {len(self.table)} "
                f"topics, its limit (maxTopics) is {self.limit}",
            )
        before = self.table.get(topic.topicName)
        self.table[topic.topicName] = topic
        self._moved(now_ms)
        log.info("topic put topic=%s before=%s after=%s", topic.topicName, before, topic)

    def delete(self, name: str, now_ms: int) -> bool:
        if self.table.pop(name, None) is None:
            return False
        self._moved(now_ms)
        log.info("topic deleted topic=%s", name)
        return True

    def _moved(self, now_ms: int) -> None:
        self.version = self.version.next(now_ms)
        self.file.changed(now_ms)

    def from_template(
        self, name: str, template_name: str, wanted_queues: int
    ) -> TopicConfig | None:
        """A new topic as a send asks for it, not put yet; None if the template doesn't allow it."""
        template = self.table.get(template_name)
        if template is None or not template.perm & Perm.INHERIT:
            return None
        queue_count = min(max(wanted_queues, 0), template.writeQueueNums)
        if queue_count <= 0:
            return None
        return TopicConfig(
            topicName=name,
            readQueueNums=queue_count,
            writeQueueNums=queue_count,
            perm=template.perm & ~Perm.INHERIT,
            topicFilterType=template.topicFilterType,
        )

    def mark_ordered(self, ordered: set[str], now_ms: int) -> None:
        """The name server's order config: these topics are ordered, the others are not."""
        for name in sorted(ordered):
            topic = self.table.get(name)
            if topic is not None and not topic.order:
                self.put(msgspec.structs.replace(topic, order=True), now_ms)

    def encode(self) -> bytes:
        return pretty({"dataVersion": self.version, "topicConfigTable": self.table})


def check_shape(topic: TopicConfig) -> None:
    """Refuse queue counts and permissions that make no sense."""
    for name in ("readQueueNums", "writeQueueNums"):
        count = getattr(topic, name)
        if not 0 <= count <= MAX_QUEUES:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER, f"{name}={count} must be 0 to {MAX_QUEUES}"
            )
    if not 0 <= topic.perm <= 15:
        raise RequestRefused(ResponseCode.INVALID_PARAMETER, f"perm={topic.perm} must be 0 to 15")
    if topic.topicFilterType not in ("SINGLE_TAG", "MULTI_TAG"):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"topicFilterType={topic.topicFilterType!r} must be SINGLE_TAG or MULTI_TAG",
        )


def alter_attributes(before: dict[str, str], text: str | None, is_new: bool) -> dict[str, str]:
    """Apply `+k=v,-k` to a topic's attributes; RequestRefused names the bad one."""
    after = dict(before)
    for change in (text or "").split(","):
        change = change.strip()
        if not change:
            continue
        sign, rest = change[0], change[1:]
        key, mark, value = rest.partition("=")
        if sign not in "+-" or key not in KNOWN_ATTRIBUTES or (sign == "+") != bool(mark):
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"attribute change {change!r}: write +name=value or -name; names are "
                f"{', '.join(KNOWN_ATTRIBUTES)}",
            )
        allowed = KNOWN_ATTRIBUTES[key]
        if sign == "+" and allowed and value not in allowed:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"attribute {key}={value!r} is not supported; allowed: {', '.join(allowed)}",
            )
        if key in FIXED_ATTRIBUTES and not is_new and after.get(key) != (value or None):
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER, f"attribute {key} can't change after creation"
            )
        if sign == "+":
            after[key] = value
        else:
            after.pop(key, None)
    return after
