"""Key-value settings by namespace, and the order topics among them; kept in kvConfig.json.

Owns: the tables, their file's shape `{"configTable":{namespace:{key:value}}}` (RocketMQ's own), and
when it is written. One rule: whoever changes a setting is answered when the file that holds the
change is on disk. At most one Save is outstanding; changes made meanwhile share the next one.
"""

from __future__ import annotations

import logging

import msgspec

from cometmq.errors import BodyError, RequestRefused, StoreCorrupt
from cometmq.nameserver.stats import Stats
from cometmq.ports import Out, Save
from cometmq.requests import Call, Reply
from cometmq.wire import fastjson
from cometmq.wire.codes import ResponseCode

log = logging.getLogger("cometmq.nameserver")

FILE_NAME = "kvConfig.json"
ORDER_TOPICS = "ORDER_TOPIC_CONFIG"
MAX_ENTRY_CHARS = 1024 * 1024  # namespace, key and value together; an order config is below 1 KiB
MAX_WAITING = 10_000  # changes that wait for the disk; more are told to come again


class Settings:
    """The tables and the file they are kept in."""

    def __init__(self, content: bytes | None, max_entries: int, stats: Stats) -> None:
        self._tables = _load(content) if content else {}
        self._count = sum(max(len(table), 1) for table in self._tables.values())
        self._max_entries = max_entries
        self._stats = stats
        self._waiting: list[Call] = []
        self._in_flight: list[Call] = []
        self._is_dirty = False
        self._is_saving = False
        self._has_failed = False

    def get(self, namespace: str, key: str) -> str | None:
        return self._tables.get(namespace, {}).get(key)

    def listing(self, namespace: str) -> bytes | None:
        """A namespace as `{"table":{key:value}}`; None if there is none."""
        table = self._tables.get(namespace)
        return msgspec.json.encode({"table": table}) if table is not None else None

    def put(self, call: Call, namespace: str, key: str, value: str) -> Reply | None:
        """Set; a Reply if there was nothing to do, None if the answer waits for the disk."""
        self._check_waiting()
        if len(namespace) + len(key) + len(value) > MAX_ENTRY_CHARS:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"a setting may have {MAX_ENTRY_CHARS} characters, namespace and key included",
            )
        table = self._tables.get(namespace)
        is_more = table is None or (len(table) > 0 and key not in table)
        if is_more and self._count >= self._max_entries:
            self._stats.over_max_kv_entries += 1
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"{self._count} settings are stored, the most that "
                f"maxKvEntries={self._max_entries} allows",
            )
        if table is None:
            table = self._tables[namespace] = {}
        is_changed = table.get(key) != value
        table[key] = value
        self._count += is_more
        return self._when_saved(call, is_changed)

    def delete(self, call: Call, namespace: str, key: str) -> Reply | None:
        """Remove; a namespace that was emptied stays, as RocketMQ has it."""
        self._check_waiting()
        table = self._tables.get(namespace, {})
        is_changed = table.pop(key, None) is not None
        if is_changed and table:  # an empty namespace still counts for one
            self._count -= 1
        return self._when_saved(call, is_changed)

    # ----------------------------------------------------------------------------------- saving

    @property
    def is_saved(self) -> bool:
        """Nothing is on its way to disk or waits to be."""
        return not self._is_saving and not self._is_dirty

    def ask(self, out: Out) -> None:
        """Ask for a Save if there is something new and none is outstanding."""
        if not self._is_dirty or self._is_saving:
            return
        self._is_dirty, self._is_saving = False, True
        self._has_failed = False
        self._in_flight, self._waiting = self._waiting, []
        out.append(Save(FILE_NAME, msgspec.json.encode({"configTable": self._tables})))

    def retry(self) -> None:
        """After a failed Save: the next `ask` tries again."""
        self._is_dirty = self._is_dirty or self._has_failed

    def saved(self, reason: str | None, out: Out) -> None:
        """The outstanding Save has ended; `reason` says why it failed."""
        assert self._is_saving, "saved without a Save"
        self._is_saving = False
        calls, self._in_flight = self._in_flight, []
        if reason is None:
            self._stats.saves += 1
            reply = Reply()
        else:
            self._stats.saves_failed += 1
            self._has_failed = True
            log.error("settings not saved file=%s: %s", FILE_NAME, reason)
            remark = f"changed in memory, but {FILE_NAME} could not be written: {reason}"
            reply = Reply(ResponseCode.SYSTEM_ERROR, remark)
        for call in calls:
            call.answer(reply, out)

    def _when_saved(self, call: Call, is_changed: bool) -> Reply | None:
        if is_changed or self._has_failed:
            self._is_dirty = True
        if self._is_dirty:
            self._waiting.append(call)
        elif self._is_saving:
            self._in_flight.append(call)
        else:
            return Reply()
        return None

    def _check_waiting(self) -> None:
        if len(self._waiting) + len(self._in_flight) >= MAX_WAITING:
            raise RequestRefused(
                ResponseCode.SYSTEM_BUSY,
                f"{MAX_WAITING} changes wait for {FILE_NAME} to be written",
            )


def _load(content: bytes) -> dict[str, dict[str, str]]:
    """The file's tables; StoreCorrupt rather than a start without the settings it had."""
    try:
        whole = fastjson.loads(content)
        tables = whole.get("configTable") or {}
        return {
            str(namespace): {str(key): str(value) for key, value in table.items()}
            for namespace, table in tables.items()
        }
    except (BodyError, AttributeError) as error:
        raise StoreCorrupt(
            f"{FILE_NAME} can't be read ({error}); restore it from {FILE_NAME}.bak or remove it"
        ) from None
