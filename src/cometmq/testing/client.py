"""Client: a core that asks servers by frames, as any program would, and finds brokers by routes.

Owns: a client's connections, its requests under way and their timeouts, and what name servers told
it. One rule: every request is answered to its role exactly once, by a frame or by its absence;
silence on a sound network is a problem of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from cometmq.ports import NEVER_MS, Close, ConnId, Dial, Out, Peer, Send
from cometmq.testing.history import History, Queue
from cometmq.wire import fastjson
from cometmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame

TIMEOUT_MS = 3_000
FIRST_ROUTE_MS = 300
LAST_ROUTE_MS = 5_000
GRACE_US = 5_000_000  # after this much of healed time, whatever is asked must be answered

Then = Callable[["Answer"], None]


class Answer(msgspec.Struct):
    """What became of a request; no frame: it timed out or the connection was lost."""

    frame: Frame | None
    boot: int = 0

    @property
    def is_ok(self) -> bool:
        return self.frame is not None and self.frame.code == ResponseCode.SUCCESS


def ignore(answer: Answer) -> None:
    """Whatever it was."""


class _Asked(msgspec.Struct):
    address: str
    frame: Frame
    until_ms: int
    asked_us: int
    then: Then
    conn: int = 0


class Role(Protocol):
    """What a client is there for."""

    next_ms: int

    def wake(self, client: Client) -> None:
        """Its time has come."""

    def told(self, client: Client, frame: Frame) -> None:
        """A server said something on its own."""

    @property
    def is_done(self) -> bool:
        """After healing: nothing is left to do."""


class Client:
    """ports.Core of a client: connections on demand, requests by opaque, timeouts."""

    def __init__(
        self,
        name: str,
        role: Role,
        history: History,
        rng: random.Random,
        now_us: Callable[[], int],
        boot_of: Callable[[int], int],
        *,
        serialize: int = 0,
    ) -> None:
        self.name = name
        self.role = role
        self.history = history
        self.rng = rng
        self.now_ms = 0
        self.deadline_ms = 0
        self.unanswered = 0
        self.told_code = 1
        """How a server is answered that said something on its own; set by the role."""
        self._now_us = now_us
        self._boot_of = boot_of
        self._serialize = serialize
        self._conns: dict[str, ConnId | None] = {}
        self._addresses: dict[ConnId, str] = {}
        self._asked: dict[int, _Asked] = {}
        self._opaque = 0
        self._out: Out = []

    @property
    def now_us(self) -> int:
        """The world's time, for the history; no role decides by it."""
        return self._now_us()

    @property
    def is_healed(self) -> bool:
        return self.history.healed_us >= 0

    @property
    def is_past_grace(self) -> bool:
        return 0 <= self.history.healed_us < self._now_us() - GRACE_US

    def ask(
        self,
        address: str,
        code: int,
        ext: dict[str, str],
        then: Then,
        *,
        body: bytes = b"",
        timeout_ms: int = TIMEOUT_MS,
        is_oneway: bool = False,
    ) -> None:
        """Ask; `then` is called once, with the answer or without. Never for a oneway."""
        self._opaque += 1
        flag = FLAG_ONEWAY if is_oneway else 0
        frame = Frame(code, self._opaque, flag, ext=ext, body=body, serialize=self._serialize)
        asked = _Asked(address, frame, self.now_ms + timeout_ms, self._now_us(), then)
        self._asked[frame.opaque] = asked
        if address not in self._conns:
            self._conns[address] = None
            self._out.append(Dial(address))
        conn = self._conns[address]
        if conn is not None:
            self._post(asked, conn)

    def _post(self, asked: _Asked, conn: ConnId) -> None:
        asked.conn = conn
        self._out.append(Send(conn, encode_frame(asked.frame)))
        if asked.frame.is_oneway:
            del self._asked[asked.frame.opaque]

    # ------------------------------------------------------------------------------- ports.Core

    def _enter(self, now_ms: int, out: Out) -> None:
        self.now_ms = now_ms
        self._out = out

    def _leave(self) -> None:
        """Plan the next tick; not needed where a settle follows."""
        first = min((asked.until_ms for asked in self._asked.values()), default=NEVER_MS)
        self.deadline_ms = min(first, self.role.next_ms)

    def opened(self, conn: ConnId, peer: Peer, now_ms: int, out: Out) -> None:
        self._enter(now_ms, out)
        address = peer.dialled
        assert address is not None
        self._conns[address] = conn
        self._addresses[conn] = address
        for asked in [a for a in self._asked.values() if a.address == address and not a.conn]:
            self._post(asked, conn)
        self._leave()

    def handle(self, conn: ConnId, frame: Frame, waited_ms: int, now_ms: int, out: Out) -> None:
        self._enter(now_ms, out)
        if frame.is_response:
            asked = self._asked.pop(frame.opaque, None)
            if asked is not None:
                asked.then(Answer(frame, self._boot_of(conn)))
        else:
            self.told_code = 1
            self.role.told(self, frame)
            if not frame.is_oneway:
                reply = Frame(
                    self.told_code, frame.opaque, FLAG_RESPONSE, serialize=frame.serialize
                )
                out.append(Send(conn, encode_frame(reply)))

    def receive(self, conn: ConnId, data: bytes, now_ms: int, out: Out) -> tuple[int, int]:
        """Clients take whole frames."""
        return 0, 0

    def settle(self, now_ms: int, out: Out) -> None:
        self._enter(now_ms, out)
        if self.role.next_ms <= now_ms:
            self.role.wake(self)
        self._leave()

    def closed(self, conn: ConnId, now_ms: int, out: Out) -> None:
        self._enter(now_ms, out)
        address = self._addresses.pop(conn)
        if self._conns.get(address) == conn:
            del self._conns[address]
        self._fail([a for a in self._asked.values() if a.conn == conn])

    def dial_failed(self, address: str, reason: str, now_ms: int, out: Out) -> None:
        self._enter(now_ms, out)
        self._conns.pop(address, None)
        self._fail([a for a in self._asked.values() if a.address == address])
        self._leave()

    def _fail(self, lost: list[_Asked]) -> None:
        for asked in lost:
            is_open = self._asked.pop(asked.frame.opaque, None) is not None
            if is_open and not asked.frame.is_oneway:
                asked.then(Answer(None))

    def tick(self, now_ms: int, out: Out) -> None:
        self._enter(now_ms, out)
        late = [asked for asked in self._asked.values() if asked.until_ms <= now_ms]
        for asked in late:
            self._judge_silence(asked)
            conn = self._conns.get(asked.address)
            if asked.conn and conn == asked.conn and self.rng.randrange(2):
                out.append(Close(conn, "no answer"))
        self._fail(late)

    def _judge_silence(self, asked: _Asked) -> None:
        """On a sound network every request on an open connection is answered."""
        self.unanswered += 1
        healed_us = self.history.healed_us
        if asked.conn and 0 <= healed_us < asked.asked_us - GRACE_US:
            self.history.problem(
                f"never answered: request {asked.frame.code} of {self.name} to {asked.address}, "
                f"{(self._now_us() - asked.asked_us) // 1000} ms long"
            )

    def flushed(self, kind: str, now_ms: int, out: Out) -> None:
        """Clients have no disk."""

    def flush_failed(self, kind: str, reason: str, now_ms: int, out: Out) -> None:
        """Clients have no disk."""

    def saved(self, name: str, reason: str | None, now_ms: int, out: Out) -> None:
        """Clients have no disk."""

    def stalled(self, duration_ms: int, now_ms: int, out: Out) -> None:
        """Nobody minds."""

    def stop(self, now_ms: int, out: Out) -> None:
        """Clients just end."""

    @property
    def is_stopped(self) -> bool:
        return True

    def close(self, now_ms: int) -> None:
        """Nothing is open."""


# ------------------------------------------------------------------------------------------ routes


class Target(msgspec.Struct, frozen=True):
    """One queue of a topic, and where it is."""

    broker: str
    address: str
    topic: str
    queue_id: int

    @property
    def place(self) -> Queue:
        return (self.broker, self.topic, self.queue_id)


class RouteCache:
    """What name servers said of topics; asked again when it is old or did not help."""

    def __init__(self, name_servers: list[str]) -> None:
        self._name_servers = name_servers
        self._targets: dict[str, list[Target]] = {}
        self._asked_ms: dict[str, int] = {}
        self._wait_ms: dict[str, int] = {}
        self._turn = 0

    def get(self, client: Client, topic: str) -> list[Target]:
        """All queues known; asks on the side if that was not done lately: often at first, while
        brokers join, then every five seconds."""
        asked_ms = self._asked_ms.get(topic, 0)
        wait_ms = self._wait_ms.get(topic, FIRST_ROUTE_MS)
        if client.now_ms - asked_ms >= wait_ms:
            self._asked_ms[topic] = client.now_ms
            if self._targets.get(topic):
                self._wait_ms[topic] = min(2 * wait_ms, LAST_ROUTE_MS)
            self._turn += 1
            server = self._name_servers[self._turn % len(self._name_servers)]
            client.ask(
                server,
                RequestCode.GET_ROUTEINFO_BY_TOPIC,
                {"topic": topic},
                lambda answer: self._take(topic, answer),
            )
        return self._targets.get(topic, [])

    def _take(self, topic: str, answer: Answer) -> None:
        if answer.frame is None or not answer.is_ok:
            return
        route: Any = fastjson.loads(answer.frame.body)
        addresses = {
            one["brokerName"]: next(iter(one["brokerAddrs"].values()))
            for one in route["brokerDatas"]
        }
        self._targets[topic] = [
            Target(one["brokerName"], addresses[one["brokerName"]], topic, queue_id)
            for one in sorted(route["queueDatas"], key=lambda one: str(one["brokerName"]))
            if one["brokerName"] in addresses
            for queue_id in range(one["readQueueNums"])
        ]
