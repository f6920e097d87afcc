"""The SQL92 filters that consumer groups have registered, online or not.

Owns: RocketMQ's rules for them (ConsumerFilterManager) and consumerFilter.json. A heartbeat brings
a group's expressions with the version of its subscription: a newer version replaces, the same one
revives, an older one is ignored. Filters of groups that went are dead, are kept for a day, and come
back with the group. One rule: an entry here is compiled; an expression that can't be has none, and
`problem` tells the client why.

The bit positions of RocketMQ's bloom filter are written only because RocketMQ throws the whole file
away without them. We keep no bitmaps, and read none: the expression itself is asked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import bloom, filters, names
from cometmq.broker.sql92 import SqlFilter
from cometmq.broker.state import StateFile, pretty
from cometmq.config import BrokerConfig
from cometmq.errors import BodyError, RequestRefused
from cometmq.ports import NEVER_MS, Out
from cometmq.wire import bodies
from cometmq.wire.bodies import Subscription

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

SAVE_MS = 10_000  # as RocketMQ; a heartbeat brings what was lost
SCAN_MS = 10_000  # between looks for groups that went and filters that are dead for too long
LATE_MS = 30_000  # who is loaded counts as dead since then, as in RocketMQ


class Entry(msgspec.Struct):
    """A group's filter on one topic. `dead_ms` is 0 while the group is there."""

    compiled: SqlFilter
    kind: str
    client_version: int
    born_ms: int
    dead_ms: int = 0

    @property
    def is_dead(self) -> bool:
        return self.dead_ms >= self.born_ms


class SqlFilters:
    """group -> topic -> Entry."""

    def __init__(self, config: BrokerConfig, stored: dict[str, Any] | None, now_ms: int) -> None:
        self.limit = config.max_sql_filters
        self.kept_ms = config.sql_filter_kept_ms
        self.refused_by_limit = 0
        self.count = 0
        self.table: dict[str, dict[str, Entry]] = {}
        self._scan_ms = now_ms + SCAN_MS
        if stored is not None:
            self._load(stored, now_ms)
        self.file = StateFile("config/consumerFilter.json", self.encode, SAVE_MS)

    @property
    def files(self) -> list[StateFile]:
        return [self.file]

    def get(self, group: str, topic: str) -> Entry | None:
        return self.table.get(group, {}).get(topic)

    def filter_of(self, group: str, topic: str) -> SqlFilter | None:
        entry = self.get(group, topic)
        return None if entry is None else entry.compiled

    def problem(self, kind: str, expression: str) -> str:
        """Why a subscription has no entry."""
        try:
            filters.by_expression(kind, expression)
        except RequestRefused as refused:
            return refused.remark
        if self.count >= self.limit:
            return f"it holds {self.count} filters, its limit (maxSqlFilters) is {self.limit}"
        return "it was not registered yet; wait for the next heartbeat"

    # ----------------------------------------------------------------------------------- heartbeats

    def register(self, group: str, wanted: tuple[Subscription, ...], now_ms: int) -> None:
        """All subscriptions of a group's heartbeat; what is not among them any more is dead."""
        for one in wanted:
            if not filters.is_tags(one.expressionType) and one.subString:
                self._register(group, one, now_ms)
        entries = self.table.get(group)
        if entries is None:
            return
        topics = {one.topic for one in wanted}
        for topic, entry in entries.items():
            if topic not in topics:
                self._bury(group, topic, entry, now_ms)

    def _register(self, group: str, one: Subscription, now_ms: int) -> None:
        old = self.get(group, one.topic)
        version = one.subVersion
        if old is not None and version < old.client_version:
            return
        is_same = (
            old is not None
            and old.compiled.expression == one.subString
            and old.kind == one.expressionType
        )
        if old is None or (version > old.client_version and not is_same):
            self._replace(group, one, old, now_ms)
            return
        if version > old.client_version or old.is_dead:
            if old.is_dead:
                log.info("filter revived group=%s topic=%s", group, one.topic)
                old.dead_ms = 0
            old.client_version = version
            self.file.changed(now_ms)

    def _replace(self, group: str, one: Subscription, old: Entry | None, now_ms: int) -> None:
        if old is None and self.count >= self.limit:
            self.refused_by_limit += 1
            return
        before = None if old is None else old.compiled.expression
        try:
            compiled = filters.by_expression(one.expressionType, one.subString)
        except RequestRefused as refused:
            log.warning(
                "filter refused group=%s topic=%s: %s", group, one.topic, refused.remark[:300]
            )
            if old is not None:  # its client must hear of it, not get what it no longer wants
                self._remove(group, one.topic)
                self.file.changed(now_ms)
            return
        self._put(group, one.topic, Entry(compiled, one.expressionType, one.subVersion, now_ms))
        self.file.changed(now_ms)
        log.info(
            "filter registered group=%s topic=%s before=%.300r after=%.300r",
            group,
            one.topic,
            before,
            one.subString,
        )

    def _bury(self, group: str, topic: str, entry: Entry, now_ms: int) -> None:
        if not entry.is_dead:
            entry.dead_ms = max(now_ms, entry.born_ms)
            self.file.changed(now_ms)
            log.info("filter dead group=%s topic=%s", group, topic)

    def _put(self, group: str, topic: str, entry: Entry) -> None:
        entries = self.table.setdefault(group, {})
        self.count += topic not in entries
        entries[topic] = entry

    def _remove(self, group: str, topic: str) -> None:
        del self.table[group][topic]
        self.count -= 1
        if not self.table[group]:
            del self.table[group]

    # ----------------------------------------------------------------------------------------- time

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        return self._scan_ms if self.table else NEVER_MS

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Bury the filters of groups that are gone; drop who is dead for a day."""
        if now_ms < self._scan_ms:
            return
        self._scan_ms = now_ms + SCAN_MS
        for group in list(self.table):
            is_gone = group not in broker.members.consumers
            for topic, entry in list(self.table[group].items()):
                if is_gone:
                    self._bury(group, topic, entry, now_ms)
                if entry.is_dead and now_ms - entry.dead_ms >= self.kept_ms:
                    log.info("filter dropped group=%s topic=%s dead for long", group, topic)
                    self._remove(group, topic)
                    self.file.changed(now_ms)

    # ----------------------------------------------------------------------------------------- file

    def _load(self, stored: dict[str, Any], now_ms: int) -> None:
        try:
            by_topic = bodies.drop_nulls(stored.get("filterDataByTopic") or {})
        except BodyError as error:
            log.error("consumerFilter.json is not as expected: %s", error)
            return
        for topic, groups in by_topic.items():
            entries = groups.get("groupFilterData") if isinstance(groups, dict) else None
            for group, raw in entries.items() if isinstance(entries, dict) else ():
                problem = names.topic_problem(topic) or names.group_problem(str(group))
                if problem is None and self.count >= self.limit:
                    problem = f"maxSqlFilters={self.limit}"
                try:
                    if problem is None:
                        self._put(str(group), topic, _loaded(raw, now_ms))
                except (BodyError, KeyError, TypeError, ValueError) as error:
                    problem = repr(error)
                except RequestRefused as refused:
                    problem = refused.remark
                if problem is not None:
                    log.error("filter skipped group=%r topic=%r: %s", group, topic, problem)

    def encode(self) -> bytes:
        by_topic: dict[str, dict[str, Any]] = {}
        for group, entries in self.table.items():
            for topic, entry in entries.items():
                by_topic.setdefault(topic, {})[group] = {
                    "bloomFilterData": {
                        "bitNum": bloom.BIT_COUNT,
                        "bitPos": bloom.positions(f"{group}#{topic}"),
                    },
                    "bornTime": entry.born_ms,
                    "clientVersion": entry.client_version,
                    "consumerGroup": group,
                    "dead": entry.is_dead,
                    "deadTime": entry.dead_ms,
                    "expression": entry.compiled.expression,
                    "expressionType": entry.kind,
                    "topic": topic,
                }
        return pretty(
            {
                "filterDataByTopic": {
                    topic: {"groupFilterData": groups, "topic": topic}
                    for topic, groups in by_topic.items()
                }
            }
        )


def _loaded(raw: Any, now_ms: int) -> Entry:
    """One entry of the file. Nobody is connected yet, so it is dead until its group comes."""
    raw = bodies.drop_nulls(raw)
    kind = str(raw["expressionType"])
    compiled = filters.by_expression(kind, str(raw["expression"]))
    born_ms = int(raw["bornTime"])
    dead_ms = int(raw.get("deadTime", 0)) or max(born_ms, now_ms - LATE_MS)
    return Entry(compiled, kind, int(raw["clientVersion"]), born_ms, dead_ms)
