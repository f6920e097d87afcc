"""What every client of ours has: an identity, connections, routes, heartbeats.

Owns: the client id, the list of groups that this client is a member of, the background tasks that
keep routes and membership true, and who answers a server's requests. One rule: nothing is asked of
a server before `start`, and after `close` no task, socket or timer is left.

    name servers asked for routes      every 30 s
    heartbeat to every broker known    every 30 s, at once after a change or a reconnect
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from cometmq.client.connection import Connection, Connections, Credentials
from cometmq.client.name_servers import NameServers
from cometmq.client.outgoing import check_name
from cometmq.client.received import ReceivedMessage
from cometmq.client.routes import BrokerOfRoute, Route, Routes
from cometmq.errors import CometError, NoRoute, RequestRefused, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import fastjson
from cometmq.wire.bodies import ConsumerOfHeartbeat
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, reply_to

log = logging.getLogger("cometmq.client")

T = TypeVar("T")

ROUTES_S = 30.0
HEARTBEAT_S = 30.0
HEARTBEAT_TIMEOUT_MS = 3_000
SYSTEM_NAMES = frozenset(
    "TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC "
    "OFFSET_MOVED_EVENT DEFAULT_PRODUCER DEFAULT_CONSUMER TOOLS_CONSUMER FILTERSRV_CONSUMER "
    "__MONITOR_CONSUMER CLIENT_INNER_PRODUCER SELF_TEST_P_GROUP SELF_TEST_C_GROUP "
    "CID_ONS-HTTP-PROXY CID_ONSAPI_PERMISSION CID_ONSAPI_OWNER CID_ONSAPI_PULL".split()
)
"""Topics and groups of the system: they are the same in every namespace."""
DEFAULT_GROUP = "DEFAULT_CONSUMER"  # Java's placeholder for a group that nobody named
MAX_GROUP_CHARS = (
    255  # namespace included; Java's limit, of which brokers may want some for %RETRY%
)
INNER_GROUP = "CLIENT_INNER_PRODUCER"  # every Java client registers it; replies come through it

Answer = Callable[[Connection, Frame], Awaitable[Frame | None] | Frame | None]


class World(msgspec.Struct, frozen=True):
    """What a client takes from its surroundings; a simulation puts its own here."""

    now_ms: Callable[[], int]
    rng: random.Random
    ip: str
    pid: int


def real_world() -> World:
    return World(lambda: time.time_ns() // 1_000_000, random.Random(), own_ip(), os.getpid())


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What producers, consumers and admins have in common."""

    namesrv: str | Sequence[str] | None = None
    instance: str = ""
    """Part of the client id; made unique if empty."""
    unit: str = ""
    namespace: str = ""
    credentials: Credentials | None = None
    tls: ssl.SSLContext | bool = False
    timeout_ms: int = 3_000
    """Of requests that are neither sends nor pulls."""
    connect_timeout_ms: int = 3_000
    world: World | None = None
    """Clock, randomness and identity; None for the real ones."""


def tls_context(tls: ssl.SSLContext | bool) -> ssl.SSLContext | None:
    if isinstance(tls, ssl.SSLContext):
        return tls
    return ssl.create_default_context() if tls else None


def own_ip() -> str:
    """The address this machine is reached by: what a packet to the outside would carry."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


_HEX = [f"{number:02X}" for number in range(256)]


class UniqueIds:
    """Unique message ids in the shape that Java makes: ip, pid, node, time of month, counter."""

    def __init__(self, world: World) -> None:
        is_v4 = world.ip.count(".") == 3
        parts = [int(piece) for piece in world.ip.split(".")] if is_v4 else [127, 0, 0, 1]
        head = bytes(parts) + (world.pid & 0xFFFF).to_bytes(2, "big")
        self._head = (head + world.rng.randbytes(4)).hex().upper()
        # next() on it is one step for all threads
        self._counter = itertools.count(world.rng.randrange(1 << 16))
        self._month_ms = 0
        self._next_month_ms = 0
        self._begin = (-1, "")
        """A millisecond, and how its ids begin; replaced as a whole, other threads read it."""

    def next(self, now_ms: int) -> str:
        at_ms, begin = self._begin
        if at_ms != now_ms:
            begin = self._begin_ms(now_ms)
        number = next(self._counter)
        return begin + _HEX[number >> 8 & 0xFF] + _HEX[number & 0xFF]

    def _begin_ms(self, now_ms: int) -> str:
        if now_ms >= self._next_month_ms or now_ms < self._month_ms:
            self._begin_month(now_ms)
        begin = f"{self._head}{now_ms - self._month_ms:08X}"
        self._begin = (now_ms, begin)
        return begin

    def _begin_month(self, now_ms: int) -> None:
        now = time.localtime(now_ms / 1e3)
        begin = (now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1)
        following = (now.tm_year + now.tm_mon // 12, now.tm_mon % 12 + 1, 1, 0, 0, 0, 0, 0, -1)
        # In this order: another thread that reads in between must not get a time before the month.
        self._month_ms = int(time.mktime(begin)) * 1000
        self._next_month_ms = int(time.mktime(following)) * 1000


def check_group(group: str, namespace: str) -> None:
    """A consumer group's name, as Java's validators have it; UsageError says what is wrong.

    Brokers give no queues to a group whose name they refuse, so it is better said at once.
    """
    most = MAX_GROUP_CHARS - (len(namespace) + 1 if namespace else 0)
    check_name(group, "consumer group", most)
    if group == DEFAULT_GROUP:
        raise UsageError(f"consumer group {group!r} is the system's own; give it another name")


class Session:
    """One client's ties to a cluster. Lives on one event loop."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.world = world = options.world if options.world is not None else real_world()
        self.rng = world.rng
        self.now_ms = world.now_ms
        name = options.instance or f"{world.pid}#{self.rng.getrandbits(48):012x}"
        self.client_id = f"{world.ip}@{name}" + (f"@{options.unit}" if options.unit else "")
        self.unique_ids = UniqueIds(world)
        self.connections = Connections(
            tls=tls_context(options.tls),
            credentials=options.credentials,
            connect_timeout_ms=options.connect_timeout_ms,
            on_request=self._requested,
            on_connected=self._connected,
        )
        self.names = NameServers(
            self.connections, options.namesrv, rng=self.rng, timeout_ms=options.timeout_ms
        )
        self.routes = Routes(self.names, self._route_changed)
        self.on_route: Callable[[Route], None] = lambda route: None
        self.producer_groups: set[str] = set()
        self.consumers: Callable[[], list[ConsumerOfHeartbeat]] = list
        self.answers: dict[int, Answer] = {}
        """Who answers a request of a server, by code."""
        self.is_started = False
        self.is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._beat_wanted = asyncio.Event()
        self._beaten: set[str] = set()
        self._beat_troubles: dict[str, str] = {}

    @property
    def state(self) -> str:
        """For people."""
        return "closed" if self.is_closed else "running" if self.is_started else "not started"

    # ---------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        if self.is_closed:
            raise UsageError("this client is closed; make a new one")
        if self.is_started:
            return
        self.is_started = True
        try:
            await self.names.start()
        except BaseException:
            self.is_started = False  # it may be tried again
            raise
        if self.is_closed:
            raise UsageError("this client was closed while it started")
        self.spawn(self.names.follow())
        self.spawn(self._keep_routes())
        self.spawn(self._keep_heartbeat())

    async def close(self) -> None:
        """Say goodbye to the brokers, end everything."""
        if self.is_closed:
            return
        self.is_closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._unregister()
        await self.connections.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ends with this session; what it raises goes to the log."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)
        return task

    def later(self, seconds: float, act: Callable[..., object], *arguments: object) -> None:
        """Call it in a while, unless this session has closed by then."""

        def go() -> None:
            self._timers.discard(timer)
            act(*arguments)

        if not self.is_closed:
            timer = asyncio.get_running_loop().call_later(seconds, go)
            self._timers.add(timer)

    def _spawned_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task_failed client=%s", self.client_id, exc_info=task.exception())

    # --------------------------------------------------------------------------------------- names

    def wrap(self, name: str) -> str:
        """A topic or group as it is called on the wire, within this client's namespace."""
        space = self.options.namespace
        if not space or name in SYSTEM_NAMES:
            return name
        if name.startswith((f"{space}%", "rmq_sys_", "RMQ_SYS_", "CID_RMQ_SYS_")):
            return name
        for prefix in ("%RETRY%", "%DLQ%"):
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                return name if rest.startswith(f"{space}%") else f"{prefix}{space}%{rest}"
        return f"{space}%{name}"

    def unwrap(self, name: str) -> str:
        """A name on the wire as this client's user calls it; one that is so already stays."""
        space = self.options.namespace
        if space:
            for prefix in ("", "%RETRY%", "%DLQ%"):
                if name.startswith(f"{prefix}{space}%"):
                    return prefix + name.removeprefix(f"{prefix}{space}%")
        return name

    def wire_queue(self, queue: MessageQueue) -> MessageQueue:
        topic = self.wrap(queue.topic)
        return queue if topic == queue.topic else structs.replace(queue, topic=topic)

    def shown_queue(self, queue: MessageQueue) -> MessageQueue:
        topic = self.unwrap(queue.topic)
        return queue if topic == queue.topic else structs.replace(queue, topic=topic)

    def show(self, messages: Sequence[ReceivedMessage]) -> None:
        """Let messages name topics as the user does."""
        if self.options.namespace:
            for one in messages:
                one.topic = self.unwrap(one.topic)
                one.queue_topic = self.unwrap(one.stored_topic)

    # ------------------------------------------------------------------------------------- brokers

    async def leader(self, broker: str, topic: str) -> str:
        """A leader's address; asks for the topic's route anew if none is known."""
        route = self.routes.get(topic)
        address = None if route is None else route.leader_of(broker)
        if address is None:
            address = self.routes.leader_of(broker)
        if address is None:
            await self.routes.refresh(topic)
            address = self.routes.leader_of(broker)
        if address is None:
            raise NoRoute(topic, f"broker {broker} has no leader registered")
        return address

    async def call(
        self,
        broker: str,
        topic: str,
        code: int,
        ext: dict[str, str],
        body: bytes = b"",
        *,
        timeout_ms: int | None = None,
    ) -> Frame:
        """Ask the leader of a broker that serves the topic; RequestRefused unless it says 0."""
        return await self.connections.call(
            await self.leader(broker, topic),
            code,
            ext,
            body,
            timeout_ms=self.options.timeout_ms if timeout_ms is None else timeout_ms,
            advertised_by=broker,
        )

    async def call_name_server(self, code: int, ext: dict[str, str], body: bytes = b"") -> Frame:
        _, answer = await self.names.ask(code, ext, body)
        if answer.code != 0:
            raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        return answer

    def _brokers(self) -> dict[str, BrokerOfRoute]:
        found: dict[str, BrokerOfRoute] = {}
        for route in self.routes.known.values():
            found.update(route.brokers)
        return found

    # ---------------------------------------------------------------------------------- heartbeats

    def beat_soon(self) -> None:
        """Tell the brokers of a change of membership or subscription, now."""
        self._beat_wanted.set()

    async def beat(self) -> None:
        """A heartbeat to every broker known: consumers to all, producers to leaders only."""
        consumers = self.consumers()
        body = heartbeat_body(self.client_id, self.producer_groups | {INNER_GROUP}, consumers)
        targets: list[tuple[str, str]] = []
        for broker in self._brokers().values():
            for number, address in broker.addresses.items():
                if consumers or number == 0:
                    targets.append((address, broker.name))
        await asyncio.gather(*(self._beat_one(*target, body) for target in targets))

    async def _beat_one(self, address: str, broker: str, body: bytes) -> None:
        try:
            await self.connections.call(
                address,
                RequestCode.HEART_BEAT,
                {},
                body,
                timeout_ms=HEARTBEAT_TIMEOUT_MS,
                advertised_by=broker,
            )
            self._beaten.add(address)
            self._beat_troubles.pop(address, None)
        except CometError as error:
            if self._beat_troubles.get(address) != str(error):  # told once, not twice a minute
                self._beat_troubles[address] = str(error)
                log.warning("heartbeat_failed broker=%s reason=%s", broker, error)

    def _connected(self, address: str) -> None:
        """A broker forgets its members with their connections, and serves the pulls of one that it
        forgot; without a word from us the others would take our queues while we read on."""
        if address in self._beaten or address in self._beat_troubles:
            self.beat_soon()

    async def _keep_heartbeat(self) -> None:
        while True:
            # Not wait_for: up to Python 3.11 it may swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._beat_wanted.wait()
            self._beat_wanted.clear()
            await self.beat()

    async def _unregister(self) -> None:
        """Leave all groups at once, so that the others need not wait for a timeout."""
        groups = [({"producerGroup": name}) for name in sorted(self.producer_groups)]
        groups += [({"consumerGroup": one.groupName}) for one in self.consumers()]
        for address in sorted(self._beaten):
            connection = self.connections.known(address)
            if connection is None:
                continue
            asked = [
                connection.request(
                    RequestCode.UNREGISTER_CLIENT, {"clientID": self.client_id, **group}, b"", 1_000
                )
                for group in groups
            ]
            await asyncio.gather(*asked, return_exceptions=True)

    # -------------------------------------------------------------------------------------- routes

    async def _keep_routes(self) -> None:
        while True:
            await asyncio.sleep(ROUTES_S)
            for topic in list(self.routes.known):
                try:
                    await self.routes.refresh(topic)
                except CometError as error:
                    log.warning("route_kept topic=%s reason=%s", topic, error)

    def _route_changed(self, route: Route) -> None:
        self.beat_soon()  # brokers that we did not know should learn of us
        self.on_route(route)

    # ---------------------------------------------------------------------- requests of the server

    def _requested(self, connection: Connection, frame: Frame) -> None:
        if self.is_closed:
            return
        answer = self.answers.get(frame.code)
        if answer is None:
            text = f" request type {frame.code} not supported"
            self._reply(
                connection, frame, reply_to(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, text)
            )
            return
        try:
            found = answer(connection, frame)
        except Exception as error:
            log.exception("request_failed code=%d", frame.code)
            self._reply(connection, frame, _broken(frame, error))
            return
        if found is None or isinstance(found, Frame):
            self._reply(connection, frame, found)
        else:
            self.spawn(self._answer_later(connection, frame, found))

    async def _answer_later(
        self, connection: Connection, frame: Frame, found: Awaitable[Frame | None]
    ) -> None:
        try:
            self._reply(connection, frame, await found)
        except Exception as error:
            log.exception("request_failed code=%d", frame.code)
            self._reply(connection, frame, _broken(frame, error))

    @staticmethod
    def _reply(connection: Connection, request: Frame, answer: Frame | None) -> None:
        if answer is not None and not request.is_oneway:
            connection.reply(answer)


def _broken(frame: Frame, error: Exception) -> Frame:
    return reply_to(frame, ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")


def heartbeat_body(
    client_id: str, producers: set[str], consumers: Sequence[ConsumerOfHeartbeat]
) -> bytes:
    """34's body as Java writes it."""
    return fastjson.dumps(
        {
            "clientID": client_id,
            "consumerDataSet": [
                {
                    "consumeFromWhere": one.consumeFromWhere,
                    "consumeType": one.consumeType,
                    "groupName": one.groupName,
                    "messageModel": one.messageModel,
                    "subscriptionDataSet": [
                        {
                            "classFilterMode": False,
                            "codeSet": list(each.codeSet),
                            "expressionType": each.expressionType,
                            "subString": each.subString,
                            "subVersion": each.subVersion,
                            "tagsSet": list(each.tagsSet),
                            "topic": each.topic,
                        }
                        for each in one.subscriptions
                    ],
                    "unitMode": False,
                }
                for one in consumers
            ],
            "heartbeatFingerprint": 0,
            "producerDataSet": [{"groupName": name} for name in sorted(producers)],
            "withoutSub": False,
        }
    )
