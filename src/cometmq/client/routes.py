"""Where topics live, as this client knows it.

Owns: routes read from name servers and the cache of them. One rule: a route is replaced as a whole;
one that can't be refreshed stays in use, because brokers go on serving when name servers are away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from cometmq.client.name_servers import NameServers
from cometmq.errors import NoRoute, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire import bodies
from cometmq.wire.codes import Perm, RequestCode, ResponseCode

log = logging.getLogger("cometmq.client")

LEADER = 0
TEMPLATE_TOPIC = "TBW102"
MAX_TOPICS = 10_000  # routes kept; more topics than this from one client is a mistake of its use


class BrokerOfRoute(msgspec.Struct, frozen=True):
    """A broker's addresses by id; 0 is the leader."""

    name: str
    cluster: str
    addresses: dict[int, str]

    @property
    def leader(self) -> str | None:
        return self.addresses.get(LEADER)

    @property
    def any(self) -> str | None:
        """The leader's address, else that of the follower with the lowest id."""
        return self.addresses[min(self.addresses)] if self.addresses else None


class Route(msgspec.Struct, frozen=True):
    """One topic's brokers and queues."""

    topic: str
    brokers: dict[str, BrokerOfRoute]
    to_send: tuple[MessageQueue, ...]
    to_read: tuple[MessageQueue, ...]
    why_not_sent: str = ""
    """If there is no queue to send to: why not."""

    def leader_of(self, broker: str) -> str | None:
        found = self.brokers.get(broker)
        return None if found is None else found.leader


class _BrokerData(msgspec.Struct):
    brokerName: str  # noqa: N815 - the wire's own names
    brokerAddrs: dict[str, str]  # noqa: N815
    cluster: str = ""


class _QueueData(msgspec.Struct):
    brokerName: str  # noqa: N815
    readQueueNums: int  # noqa: N815
    writeQueueNums: int  # noqa: N815
    perm: int


def parse_route(topic: str, body: bytes, *, most_queues: int | None = None) -> Route:
    """105's body. `most_queues`: the route of TBW102, used for a topic that does not exist yet."""
    raw = bodies.load_object(body, "route")
    brokers: dict[str, BrokerOfRoute] = {}
    for one in raw.get("brokerDatas") or []:
        broker_data = bodies.convert(one, _BrokerData, "route")
        addresses = {int(number): address for number, address in broker_data.brokerAddrs.items()}
        name = broker_data.brokerName
        brokers[name] = BrokerOfRoute(name, broker_data.cluster, addresses)
    queues = [bodies.convert(one, _QueueData, "route") for one in raw.get("queueDatas") or []]
    queues.sort(key=lambda queue: queue.brokerName)
    to_send: list[MessageQueue] = []
    to_read: list[MessageQueue] = []
    refused: list[str] = []
    for data in queues:
        name, count = data.brokerName, data.writeQueueNums
        readable = data.readQueueNums
        if most_queues is not None:
            count = readable = min(most_queues, readable)
        broker = brokers.get(name)
        if not data.perm & Perm.WRITE:
            refused.append(f"{name} does not allow writing (perm {data.perm})")
        elif broker is None or broker.leader is None:
            refused.append(f"{name} has no leader registered")
        else:
            to_send += [MessageQueue(topic, name, number) for number in range(count)]
        if data.perm & Perm.READ and broker is not None and broker.addresses:
            to_read += [MessageQueue(topic, name, number) for number in range(readable)]
    order = raw.get("orderTopicConf")
    if order:
        to_send = _ordered(topic, str(order))
    why = "" if to_send else "; ".join(refused) or "no broker has queues of it"
    return Route(topic, brokers, tuple(to_send), tuple(to_read), why)


def _ordered(topic: str, text: str) -> list[MessageQueue]:
    """`broker:count;broker:count`: the queues of an ordered topic."""
    queues: list[MessageQueue] = []
    for piece in text.split(";"):
        name, _, count = piece.rpartition(":")
        if name and count.isdecimal():
            queues += [MessageQueue(topic, name, number) for number in range(int(count))]
    return queues


class Routes:
    """The routes this client has asked for."""

    def __init__(self, names: NameServers, on_change: Callable[[Route], None]) -> None:
        self._names = names
        self._on_change = on_change
        self._routes: dict[str, Route] = {}
        self._templates: set[str] = set()
        self._asking: dict[str, asyncio.Task[Route]] = {}

    @property
    def known(self) -> dict[str, Route]:
        return self._routes

    def get(self, topic: str) -> Route | None:
        return self._routes.get(topic)

    def leader_of(self, broker: str) -> str | None:
        """The address of a broker's leader, from any route that names it."""
        for route in self._routes.values():
            address = route.leader_of(broker)
            if address is not None:
                return address
        return None

    async def need(self, topic: str, *, create_queues: int = 0) -> Route:
        """The route, from memory or from a name server. `create_queues`: a topic that does not
        exist is to be made by the first send, with so many queues; else NoRoute says why."""
        found = self._routes.get(topic)
        if found is not None and (found.to_send or not create_queues):
            return found
        task = self._asking.get(topic)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(topic, create_queues))
            self._asking[topic] = task
            task.add_done_callback(lambda task: self._asked(topic, task))
        return await asyncio.shield(task)

    def _asked(self, topic: str, task: asyncio.Task[Route]) -> None:
        del self._asking[topic]
        if not task.cancelled():
            task.exception()  # who waited may have given up before; then nobody wants to know

    async def refresh(self, topic: str) -> None:
        """Ask again for a topic that is known; NoRoute if it is gone."""
        await self._ask(topic, 4 if topic in self._templates else 0)

    def forget(self, topic: str) -> None:
        self._routes.pop(topic, None)
        self._templates.discard(topic)

    async def _ask(self, topic: str, create_queues: int) -> Route:
        ext = {"topic": topic, "acceptStandardJsonOnly": "true"}
        address, answer = await self._names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext)
        is_template = False
        if answer.code == ResponseCode.TOPIC_NOT_EXIST and create_queues:
            ext["topic"] = TEMPLATE_TOPIC
            _, answer = await self._names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext)
            is_template = True
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRoute(topic, await self._why(address, asked_to_create=bool(create_queues)))
        if answer.code != 0:
            raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        route = parse_route(topic, answer.body, most_queues=create_queues if is_template else None)
        if is_template:
            self._templates.add(topic)
        else:
            self._templates.discard(topic)
        former = self._routes.get(topic)
        if former != route and (former is not None or len(self._routes) < MAX_TOPICS):
            self._routes[topic] = route
            log.info(
                "route topic=%s queues=%d brokers=%s",
                topic,
                len(route.to_read),
                ",".join(route.brokers),
            )
            self._on_change(route)
        return route

    async def _why(self, address: str, *, asked_to_create: bool) -> str:
        """Which of the reasons for a missing route it is."""
        said = f"name server {address} answered, topic does not exist"
        try:
            _, answer = await self._names.ask(RequestCode.GET_BROKER_CLUSTER_INFO, {})
            brokers = sorted(
                bodies.load_object(answer.body, "cluster").get("brokerAddrTable") or {}
            )
        except Exception as error:
            return f"{said}, and it could not list its brokers: {error}"
        if not brokers:
            return f"{said}, and no broker has registered with this name server"
        where = ", ".join(brokers)
        if asked_to_create:
            return f"{said}, auto-creation is off on {where} (autoCreateTopicEnable)"
        return f"{said} on {where}; a consumer does not create topics"
