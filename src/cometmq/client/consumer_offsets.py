"""How far a group has come in each queue, and where a group without a past begins.

Owns: reading and writing offsets, at the brokers (clustering) or in a local file (broadcasting).
One rule: "there is none" is told apart from "it could not be asked": only the first may start anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from cometmq.client.offset_store import LocalOffsets
from cometmq.client.session import Session
from cometmq.errors import CometError, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire.codes import RequestCode, ResponseCode

log = logging.getLogger("cometmq.client")

RETRY_PREFIX = "%RETRY%"


class Offsets(Protocol):
    """Where offsets are kept."""

    async def read(self, queue: MessageQueue) -> int | None:
        """The offset; None if the group has none. Raises CometError if that can't be told."""

    async def write(self, table: Mapping[MessageQueue, int], *, waits: bool) -> set[MessageQueue]:
        """Store these; returns those that were, as far as can be known. `waits`: until told so."""


class BrokerOffsets:
    """Clustering: the broker of each queue keeps the group's offset."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self._trouble = ""

    async def read(self, queue: MessageQueue) -> int | None:
        try:
            answer = await self._session.call(
                queue.broker, queue.topic, RequestCode.QUERY_CONSUMER_OFFSET, self._fields(queue)
            )
        except RequestRefused as refused:
            if refused.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        return _offset_of(answer.ext)

    async def write(self, table: Mapping[MessageQueue, int], *, waits: bool) -> set[MessageQueue]:
        queues = list(table)
        done = await asyncio.gather(*(self._write(one, table[one], waits) for one in queues))
        return {queue for queue, is_done in zip(queues, done, strict=True) if is_done}

    async def _write(self, queue: MessageQueue, offset: int, waits: bool) -> bool:
        fields = {**self._fields(queue), "commitOffset": str(offset)}
        session, code = self._session, RequestCode.UPDATE_CONSUMER_OFFSET
        try:
            if waits:
                await session.call(queue.broker, queue.topic, code, fields)
                # A pull that is under way carries an older offset, and Apache's broker may take it
                # after this one: whoever comes next would get again what we have finished.
                if (await self.read(queue) or 0) < offset:
                    await session.call(queue.broker, queue.topic, code, fields)
            else:
                address = await session.leader(queue.broker, queue.topic)
                connection = await session.connections.get(address, queue.broker)
                connection.oneway(code, fields)
        except CometError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("offset_not_stored queue=%s offset=%d reason=%s", queue, offset, error)
            return False
        self._trouble = ""
        return True

    def _fields(self, queue: MessageQueue) -> dict[str, str]:
        return {
            "consumerGroup": self._group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
        }


class FileOffsets:
    """Broadcasting: each client keeps its own."""

    def __init__(self, store: LocalOffsets) -> None:
        self._store = store
        self._known: dict[MessageQueue, int] | None = None

    async def read(self, queue: MessageQueue) -> int | None:
        if self._known is None:
            self._known = await asyncio.to_thread(self._store.read)
        found = self._known.get(queue)
        return None if found is None or found < 0 else found

    async def write(self, table: Mapping[MessageQueue, int], *, waits: bool) -> set[MessageQueue]:
        try:
            await asyncio.to_thread(self._store.write, dict(table))
        except CometError as error:
            log.error("offsets_not_stored path=%s reason=%s", self._store.path, error)
            return set()
        if self._known is not None:
            self._known.update(table)
        return set(table)


def _offset_of(ext: dict[str, str]) -> int:
    try:
        return int(ext["offset"])
    except (KeyError, ValueError):
        raise CometError("the broker's answer has no offset") from None


class StartRule:
    """Where a group begins in a queue that it has no offset of."""

    def __init__(self, session: Session, start: str | datetime) -> None:
        self._session = session
        self._start = start

    @property
    def wire_name(self) -> str:
        if isinstance(self._start, datetime):
            return "CONSUME_FROM_TIMESTAMP"
        return f"CONSUME_FROM_{self._start.upper()}_OFFSET"

    @property
    def time_text(self) -> str:
        """Java's consumeTimestamp: local time, to the second; empty if the rule is another one."""
        if not isinstance(self._start, datetime):
            return ""
        return self._start.astimezone().strftime("%Y%m%d%H%M%S")

    async def offset(self, queue: MessageQueue) -> int:
        is_retry = queue.topic.startswith(RETRY_PREFIX)
        if self._start == "first" or (self._start == "last" and is_retry):
            return 0
        fields = {"topic": queue.topic, "queueId": str(queue.queue_id)}
        code = RequestCode.GET_MAX_OFFSET
        if isinstance(self._start, datetime) and not is_retry:
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            fields["timestamp"] = str(round(self._start.timestamp() * 1000))
        answer = await self._session.call(queue.broker, queue.topic, code, fields)
        return max(_offset_of(answer.ext), 0)
