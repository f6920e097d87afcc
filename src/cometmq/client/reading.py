"""Questions about one queue: its messages from an offset on, its ends, how far a group has come.

Owns: the requests 11, 14, 15, 29, 30 and 31 as a client makes them, and what their answers mean.
One rule: a pull's four outcomes are statuses, whatever else a broker says is an error.

Pulls carry their filter in the request, so that no membership of the group is needed. They go to
the leader, to a follower only if the leader is not registered or asks for it; offsets are the
leader's alone.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import TypeVar

import msgspec

from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.session import Session
from cometmq.client.tags import WantedTags
from cometmq.errors import ConnectionLost, NoRoute, RequestRefused, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import bodies, headers
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode

ALL = "*"
TAG = "TAG"
SQL = "SQL92"

M = TypeVar("M", bound=ReceivedMessage)


class PullStatus(Enum):
    """What a pull came to."""

    FOUND = 0
    NO_NEW = 19
    """The offset is the queue's end; `next_offset` is the same again."""
    NO_MATCH = 20
    """There were messages, none passed the filter; go on at `next_offset`."""
    OFFSET_ILLEGAL = 21
    """The offset lies outside the queue, or was reset; `next_offset` is the nearest, or the new."""


_STATUSES = {status.value: status for status in PullStatus}


class Pulled(msgspec.Struct, frozen=True):
    """A pull's answer. `next_offset` is where to go on, behind all that was looked at."""

    status: PullStatus
    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


class PulledRaw(msgspec.Struct, frozen=True, gc=False):
    """A pull's answer, its records not taken apart (layout: wire/record.py).

    Brokers filter by the hash of a tag; `received.read_all` and a look at tags are the caller's.
    """

    status: PullStatus
    body: bytes
    next_offset: int
    min_offset: int
    max_offset: int


class Filter(msgspec.Struct, frozen=True):
    """Which messages of a topic are wanted."""

    kind: str = TAG
    text: str = ALL
    tags: frozenset[str] = frozenset()
    """Those wanted; empty: all, or whatever the SQL text says."""

    def subscription(self, topic: str, version: int) -> bodies.Subscription:
        """As a heartbeat tells it."""
        return bodies.subscription(
            {
                "topic": topic,
                "subString": self.text,
                "expressionType": self.kind,
                "subVersion": version,
            }
        )

    def pick(self, messages: list[M]) -> list[M]:
        """Without what came only because its tag has the same hash."""
        return WantedTags(self.tags).pick(messages) if self.tags else messages


@lru_cache(maxsize=256)
def make_filter(tags: str = ALL, sql: str = "") -> Filter:
    """`tags`: `*`, or tags with || between them. `sql`: an SQL92 condition instead."""
    if sql:
        if tags not in ("", ALL):
            raise UsageError(f"both tags={tags!r} and sql={sql!r}: choose one")
        return Filter(SQL, sql)
    if tags in ("", ALL):
        return Filter()
    wanted = [tag.strip() for tag in tags.split("||") if tag.strip()]
    if not wanted:
        raise UsageError(f"tags={tags!r} names no tag; say '*' for all")
    return Filter(TAG, " || ".join(wanted), frozenset(wanted))


class Reader:
    """Asks about queues on behalf of a group. Queues carry their names on the wire."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self.group = group
        self._suggested: dict[MessageQueue, int] = {}  # brokers by id that a leader sent us to

    # --------------------------------------------------------------------------------------- pulls

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        wanted: Filter,
        *,
        most: int,
        suspend_ms: int,
        timeout_ms: int,
    ) -> Pulled:
        raw = await self.pull_raw(
            queue, offset, wanted, most=most, suspend_ms=suspend_ms, timeout_ms=timeout_ms
        )
        status, messages = raw.status, []
        if raw.body:
            messages = wanted.pick(read_all(raw.body, queue.broker))
            if not messages:
                status = PullStatus.NO_MATCH
        return Pulled(status, messages, raw.next_offset, raw.min_offset, raw.max_offset)

    async def pull_raw(
        self,
        queue: MessageQueue,
        offset: int,
        wanted: Filter,
        *,
        most: int,
        suspend_ms: int,
        timeout_ms: int,
    ) -> PulledRaw:
        """One request; `timeout_ms` counts from when the broker ends the wait of `suspend_ms`."""
        if offset < 0 or most < 1 or suspend_ms < 0 or timeout_ms < 1:
            raise UsageError(
                f"pull of {queue} with offset={offset} most={most} suspend_ms={suspend_ms} "
                f"timeout_ms={timeout_ms}: offset and suspend_ms are >= 0, the others >= 1"
            )
        flags = PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if suspend_ms else 0)
        header = headers.PullHeader(
            consumerGroup=self.group,
            topic=queue.topic,
            queueId=queue.queue_id,
            queueOffset=offset,
            maxMsgNums=most,
            sysFlag=flags,
            suspendTimeoutMillis=suspend_ms,
            subscription=wanted.text,
            expressionType=wanted.kind,
        )
        try:
            answer = await self._session.connections.request(
                await self._readable(queue),
                RequestCode.PULL_MESSAGE,
                headers.to_ext(header),
                timeout_ms=suspend_ms + timeout_ms,
                advertised_by=queue.broker,
            )
        except ConnectionLost:
            self._suggested.pop(queue, None)
            raise
        status = _STATUSES.get(answer.code)
        if status is None:
            raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        told = headers.parse(headers.PullResponse, answer.ext)
        if told.suggestWhichBrokerId:
            self._suggested[queue] = told.suggestWhichBrokerId
        elif self._suggested:
            self._suggested.pop(queue, None)
        body = answer.body if status is PullStatus.FOUND else b""
        return PulledRaw(status, body, told.nextBeginOffset, told.minOffset, told.maxOffset)

    async def _readable(self, queue: MessageQueue) -> str:
        """Where to read a queue: the leader, or whom it suggests, or whoever is left."""
        routes = self._session.routes
        route = routes.get(queue.topic)
        broker = None if route is None else route.brokers.get(queue.broker)
        if broker is None or not broker.addresses:
            await routes.refresh(queue.topic)
            route = routes.get(queue.topic)
            broker = None if route is None else route.brokers.get(queue.broker)
        address = None
        if broker is not None:
            address = broker.addresses.get(self._suggested.get(queue, 0)) or broker.any
        if address is None:
            raise NoRoute(queue.topic, f"broker {queue.broker} is not registered")
        return address

    # ------------------------------------------------------------------------------------- offsets

    async def begin(self, queue: MessageQueue) -> int:
        """The least offset that is still there."""
        return await self._offset(queue, RequestCode.GET_MIN_OFFSET)

    async def end(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return await self._offset(queue, RequestCode.GET_MAX_OFFSET)

    async def at_time(self, queue: MessageQueue, when: datetime | int) -> int:
        """The first offset stored at this time or later; the end if there is none."""
        stamp = when if isinstance(when, int) else int(when.timestamp() * 1000)
        return await self._offset(
            queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=str(stamp)
        )

    async def _offset(self, queue: MessageQueue, code: int, **more: str) -> int:
        ext = {"topic": queue.topic, "queueId": str(queue.queue_id), **more}
        answer = await self._session.call(queue.broker, queue.topic, code, ext)
        return headers.parse(headers.OffsetResponse, answer.ext).offset

    async def committed(self, queue: MessageQueue, *, or_zero: bool = False) -> int | None:
        """The group's stored offset. `or_zero`: where none is stored, a broker may say 0 if the
        queue's first message is still in memory; RocketMQ's consumers ask in that way."""
        header = headers.QueryConsumerOffsetHeader(
            self.group, queue.topic, queue.queue_id, setZeroIfNotFound=or_zero
        )
        try:
            answer = await self._session.call(
                queue.broker,
                queue.topic,
                RequestCode.QUERY_CONSUMER_OFFSET,
                headers.to_ext(header),
            )
        except RequestRefused as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        return headers.parse(headers.OffsetResponse, answer.ext).offset

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Store the group's offset at the leader; returns when it has it."""
        header = headers.UpdateConsumerOffsetHeader(
            self.group, queue.topic, queue.queue_id, commitOffset=offset
        )
        code, ext = RequestCode.UPDATE_CONSUMER_OFFSET, headers.to_ext(header)
        try:
            await self._session.call(queue.broker, queue.topic, code, ext)
        except RequestRefused as error:
            if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise
            # 5.x keeps offsets only of groups it knows; a pull makes the group known.
            await self.pull_raw(queue, offset, Filter(), most=1, suspend_ms=0, timeout_ms=3_000)
            await self._session.call(queue.broker, queue.topic, code, ext)
