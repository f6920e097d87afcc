"""Sends that wait for a route or for a connection, in the order in which they were begun.

Owns: the lines of a producer: one before each route that is being asked for, one before each
connection that is being made. One rule: as long as somebody stands in a line, whoever wants the
same joins it at its end; when the thing is there all go, in one step of the loop. So sends to one
queue arrive in the order in which they were begun, also those begun before there was a connection.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from cometmq.client.connection import Connection
from cometmq.client.routes import Route
from cometmq.errors import ConnectionLost, RequestTimeout, Unreachable

if TYPE_CHECKING:
    from cometmq.client.producer import Producer
    from cometmq.client.sending import Sending

T = TypeVar("T")
ASK_AGAIN_S = 0.2


class Line(ABC, Generic[T]):
    """Those who wait for one thing. Nobody waits longer than it may (Sending.ends)."""

    def __init__(self) -> None:
        self._waiting: list[Sending] = []
        self._limit: asyncio.Timeout | None = None

    def join(self, sending: Sending) -> None:
        self._waiting.append(sending)
        limit = self._limit
        if limit is not None and not limit.expired():
            ends = limit.when()
            if ends is None or sending.ends < ends:
                limit.reschedule(sending.ends)

    async def move(self, leave: Callable[[], object]) -> None:
        """Until nobody waits any more. `leave`: the line is no more, who comes next needs a new
        one; called before those who waited are told, who may want to come again."""
        while self._waiting:
            try:
                async with asyncio.timeout_at(min(one.ends for one in self._waiting)) as limit:
                    self._limit = limit
                    found = await self.get()
            except Exception as error:
                self._limit = None
                if not limit.expired():
                    leave()
                    for one in self._waiting:
                        self.fail(one, error)
                    return
                self._drop_late()
            else:
                # Nothing is awaited from here on: nobody comes before those who waited.
                leave()
                for one in self._waiting:
                    try:
                        self.go(one, found)
                    except Exception as error:
                        one.broke(error)
                return
        leave()

    def _drop_late(self) -> None:
        now = asyncio.get_running_loop().time()
        late = [one for one in self._waiting if one.ends <= now]
        self._waiting = [one for one in self._waiting if one.ends > now]
        for one in late:
            self.fail(one, self.why_late())

    @abstractmethod
    async def get(self) -> T:
        """What all wait for; it may take as long as it does."""

    @abstractmethod
    def go(self, sending: Sending, found: T) -> None:
        """It is there."""

    @abstractmethod
    def fail(self, sending: Sending, error: Exception) -> None:
        """It won't be, or not in time for this one."""

    @abstractmethod
    def why_late(self) -> Exception:
        """What to say to who may not wait any longer."""


class RouteLine(Line[Route]):
    """Before the route of a topic. A name server that is away is not the message's fault: it is
    asked again as long as there is time."""

    def __init__(self, producer: Producer, topic: str) -> None:
        super().__init__()
        self._producer = producer
        self._topic = topic
        self._lost: ConnectionLost | None = None

    async def get(self) -> Route:
        queues = self._producer.send_options.default_queues
        while True:
            try:
                return await self._producer.session.routes.need(self._topic, create_queues=queues)
            except ConnectionLost as error:
                self._lost = error
                await asyncio.sleep(ASK_AGAIN_S)

    def go(self, sending: Sending, found: Route) -> None:
        sending.routed(found)

    def fail(self, sending: Sending, error: Exception) -> None:
        sending.not_routed(error)

    def why_late(self) -> Exception:
        if self._lost is not None:
            return self._lost
        return RequestTimeout(f"no route from {self._producer.session.names} in time")


class ConnectionLine(Line[Connection]):
    """Before the connection to a broker."""

    def __init__(self, producer: Producer, address: str, broker: str) -> None:
        super().__init__()
        self._producer = producer
        self._address = address
        self._broker = broker

    async def get(self) -> Connection:
        return await connected(self._producer, self._address, self._broker)

    def go(self, sending: Sending, found: Connection) -> None:
        sending.connected(found)

    def fail(self, sending: Sending, error: Exception) -> None:
        sending.not_connected(error)

    def why_late(self) -> Exception:
        return Unreachable(f"TCP connect to {self._address} took longer than the send may")


async def connected(producer: Producer, address: str, broker: str) -> Connection:
    """A connection to send through; Unreachable says whose address it is."""
    connections = producer.session.connections
    if not producer.send_options.vip_channel:
        return await connections.get(address, broker)
    try:
        return await connections.get(address)
    except Unreachable as error:
        raise Unreachable(
            f"{error}; it is the VIP port of {broker}, which not every broker has: "
            f"vip_channel=False sends to the port that it advertises"
        ) from None


class Lines(dict[str, "RouteLine | ConnectionLine"]):
    """By topic (before its route) and by address (before its connection); an address has a colon,
    which a topic has not."""

    def begin(self, key: str, line: RouteLine | ConnectionLine, first: Sending) -> None:
        self[key] = line
        line.join(first)
        first.producer.session.spawn(line.move(lambda: self.pop(key, None)))
