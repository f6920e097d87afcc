"""The subscription groups a broker knows, online or not.

Owns: group configs, their version and subscriptionGroup.json. One rule: every change goes through
`put` or `delete`; who is online is known to members.py, not here.
"""

from __future__ import annotations

import logging
from typing import Any

from cometmq.broker import names
from cometmq.broker.state import StateFile, pretty
from cometmq.config import BrokerConfig
from cometmq.errors import BodyError, RequestRefused
from cometmq.wire.bodies import DataVersion, GroupConfig, data_version, drop_nulls, group_config
from cometmq.wire.codes import ResponseCode

log = logging.getLogger("cometmq.broker")


class GroupConfigs:
    """name -> GroupConfig."""

    def __init__(self, config: BrokerConfig, stored: dict[str, Any] | None, now_ms: int) -> None:
        self.limit = config.max_groups
        self.refused_by_limit = 0
        self.version = DataVersion(timestamp=now_ms)
        self.forbidden: dict[str, Any] = {}
        self.table: dict[str, GroupConfig] = {
            group.groupName: group for group in names.built_in_groups()
        }
        if stored is not None:
            self._overlay(stored)
        self.file = StateFile("config/subscriptionGroup.json", self.encode)
        if stored is None:
            self.file.changed(now_ms)

    def _overlay(self, stored: dict[str, Any]) -> None:
        try:
            self.version = data_version(stored.get("dataVersion"))
            self.forbidden = drop_nulls(stored.get("forbiddenTable") or {})
            table = drop_nulls(stored.get("subscriptionGroupTable") or {})
        except BodyError as error:
            log.error("subscriptionGroup.json is not as expected: %s", error)
            return
        for name, raw in table.items():
            try:
                group = group_config(raw)
            except BodyError as error:
                log.error("group skipped group=%r: %s", name, error)
                continue
            if group.groupName == name and names.group_problem(name) is None:
                self.table[name] = group
            else:
                log.error("group skipped group=%r: its name is not allowed", name)

    def get(self, name: str) -> GroupConfig | None:
        return self.table.get(name)

    def find(self, name: str, *, auto_create: bool, now_ms: int) -> GroupConfig | None:
        """The group, made on the spot if that is allowed and its name is."""
        group = self.table.get(name)
        if group is not None:
            return group
        if not auto_create and not name.startswith(names.SYSTEM_GROUP_PREFIX):
            return None
        if names.group_problem(name) is not None:
            return None
        group = GroupConfig(name)
        self.put(group, now_ms)
        return group

    def put(self, group: GroupConfig, now_ms: int) -> None:
        if group.groupName not in self.table and len(self.table) >= self.limit:
            self.refused_by_limit += 1
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"group {group.groupName!r} not created: this broker holds {len(self.table)} "
                f"groups, its limit (maxGroups) is {self.limit}",
            )
        before = self.table.get(group.groupName)
        self.table[group.groupName] = group
        self._moved(now_ms)
        log.info("group put group=%s before=%s after=%s", group.groupName, before, group)

    def delete(self, name: str, now_ms: int) -> bool:
        if self.table.pop(name, None) is None:
            return False
        self._moved(now_ms)
        log.info("group deleted group=%s", name)
        return True

    def _moved(self, now_ms: int) -> None:
        self.version = self.version.next(now_ms)
        self.file.changed(now_ms)

    def as_wire(self) -> dict[str, Any]:
        return {
            "dataVersion": self.version,
            "forbiddenTable": self.forbidden,
            "subscriptionGroupTable": {
                name: group_to_wire(group) for name, group in self.table.items()
            },
        }

    def encode(self) -> bytes:
        return pretty(self.as_wire())


def group_to_wire(group: GroupConfig) -> dict[str, Any]:
    """A group's JSON; the optional set is left out when there is none, as fastjson does."""
    fields: dict[str, Any] = {name: getattr(group, name) for name in group.__struct_fields__}
    if group.subscriptionDataSet is None:
        del fields["subscriptionDataSet"]
    return fields
