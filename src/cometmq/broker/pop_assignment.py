"""Which queues a client reads, when it lets the broker decide: 400, 401, 402.

Owns: messageRequestMode.json (pull or pop, by topic and group), the division of a topic's queues
among a group's members, and the routes it needs for that. One rule: all brokers of a cluster give
the same answer from the same two lists, so both are sorted as RocketMQ sorts them.

    PULL    each queue to one client: AVG in blocks, AVG_BY_CIRCLE dealt like cards
    POP     every broker of the topic to every client (queue -1); or with popShareQueueNum the
            client's own share and those of so many clients after it
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import names
from cometmq.broker.state import StateFile, pretty
from cometmq.errors import BodyError, RequestRefused
from cometmq.message import MessageQueue
from cometmq.ports import NEVER_MS, Out
from cometmq.requests import Call, Reply
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import Perm, ResponseCode
from cometmq.wire.frame import Frame

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

POP, PULL = "POP", "PULL"
FRESH_MS = 30_000  # a route is asked for again after this
WAIT_MS = 3_000  # for a name server's answer
MOST_ROUTES = 10_000
MOST_WAITING = 10_000
MOST_QUEUES = 100_000  # of a route


class Mode(msgspec.Struct, frozen=True):
    """How a group reads a topic. A share of 0 or less: all read all."""

    topic: str
    consumerGroup: str  # noqa: N815 - the wire's own names
    mode: str = PULL
    popShareQueueNum: int = 0  # noqa: N815


class _Asker(msgspec.Struct):
    topic: str
    consumerGroup: str  # noqa: N815
    clientId: str = ""  # noqa: N815
    strategyName: str = "AVG"  # noqa: N815
    messageModel: str = "CLUSTERING"  # noqa: N815


class _Waiting(msgspec.Struct):
    call: Call
    asker: _Asker
    until_ms: int


class RequestModes:
    """The modes of groups, and the routes of their topics."""

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.table: dict[str, dict[str, Mode]] = {}
        self.file = StateFile("config/messageRequestMode.json", self.encode)
        self._routes: dict[str, tuple[int, list[MessageQueue] | None]] = {}
        self._waiting: dict[str, list[_Waiting]] = {}
        for topic, groups in ((stored or {}).get("messageRequestModeMap") or {}).items():
            for group, raw in (groups or {}).items():
                try:
                    mode = bodies.convert(bodies.drop_nulls(raw), Mode, "request mode")
                except BodyError as error:
                    log.error("request mode skipped topic=%r group=%r: %s", topic, group, error)
                    continue
                self.table.setdefault(topic, {})[group] = mode

    def as_wire(self) -> dict[str, Any]:
        return {"messageRequestModeMap": self.table}

    def encode(self) -> bytes:
        return pretty(self.as_wire())

    def put(self, mode: Mode, now_ms: int) -> int:
        """Set a mode; the file's generation that has it."""
        before = self.table.get(mode.topic, {}).get(mode.consumerGroup)
        self.table.setdefault(mode.topic, {})[mode.consumerGroup] = mode
        log.info("request mode set before=%s after=%s", before, mode)
        return self.file.changed(now_ms)

    def of(self, broker: Broker, topic: str, group: str) -> Mode:
        found = self.table.get(topic, {}).get(group)
        if found is not None:
            return found
        config = broker.config
        if topic.startswith(names.RETRY_PREFIX) or config.request_mode == PULL:
            return Mode(topic, group, PULL)
        return Mode(topic, group, POP, config.pop_share_count)

    def forget_group(self, group: str, now_ms: int) -> None:
        for groups in self.table.values():
            if groups.pop(group, None) is not None:
                self.file.changed(now_ms)

    # -------------------------------------------------------------------------------------- routes

    @property
    def next_ms(self) -> int:
        if not self._waiting:
            return NEVER_MS
        return next(iter(self._waiting.values()))[0].until_ms

    def known(self, topic: str, now_ms: int) -> list[MessageQueue] | None:
        """The route of a topic if it is fresh; None inside the tuple was said by a name server."""
        asked_ms, queues = self._routes.get(topic, (0, None))
        return queues if 0 <= now_ms - asked_ms < FRESH_MS else None

    def wait(self, broker: Broker, call: Call, asker: _Asker) -> bool:
        """Ask for a route, answer later; False if there is nobody to ask."""
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            return False
        if asker.topic not in self._waiting:
            if not broker.name_servers.ask_route(asker.topic, call.now_ms + WAIT_MS, call.out):
                return False
            self._waiting[asker.topic] = []
        self._waiting[asker.topic].append(_Waiting(call, asker, call.now_ms + WAIT_MS))
        return True

    def answered(self, broker: Broker, topic: str, frame: Frame, now_ms: int, out: Out) -> None:
        """A name server has told a route, or that there is none."""
        if frame.code == ResponseCode.SUCCESS:
            try:
                self._learn(topic, _queues_of(topic, frame.body), now_ms)
            except BodyError as error:
                log.error("route of topic=%s can't be read: %s", topic, error)
        self._release(broker, topic, now_ms, out)

    def _learn(self, topic: str, queues: list[MessageQueue], now_ms: int) -> None:
        self._routes.pop(topic, None)
        self._routes[topic] = (now_ms, queues)
        if len(self._routes) > MOST_ROUTES:
            del self._routes[next(iter(self._routes))]

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Who waited too long is told what we know by ourselves."""
        for topic in [one for one, all_ in self._waiting.items() if all_[0].until_ms <= now_ms]:
            self._release(broker, topic, now_ms, out)

    def _release(self, broker: Broker, topic: str, now_ms: int, out: Out) -> None:
        for waiting in self._waiting.pop(topic, ()):
            queues = self._routes.get(topic, (0, None))[1] or _own_queues(broker, topic)
            waiting.call.answer(_assigned(broker, waiting.asker, queues), out)


def _queues_of(topic: str, raw: bytes) -> list[MessageQueue]:
    """The queues of a route that can be read."""
    found: list[MessageQueue] = []
    for data in bodies.load_object(raw, "route").get("queueDatas") or ():
        one = bodies.convert(bodies.drop_nulls(data), _QueueData, "route")
        if one.perm & Perm.READ:
            if len(found) + one.readQueueNums > MOST_QUEUES:
                raise BodyError(f"a route of more than {MOST_QUEUES} queues")
            found += [MessageQueue(topic, one.brokerName, at) for at in range(one.readQueueNums)]
    return sorted(found)


class _QueueData(msgspec.Struct):
    brokerName: str  # noqa: N815
    readQueueNums: int = 0  # noqa: N815
    perm: int = 0


def _own_queues(broker: Broker, topic: str) -> list[MessageQueue] | None:
    config = broker.topics.get(topic)
    if config is None:
        return None
    if not config.perm & Perm.READ:
        return []
    name = broker.config.name
    return [MessageQueue(topic, name, queue_id) for queue_id in range(config.readQueueNums)]


# --------------------------------------------------------------------------------------- requests


def query_assignment(broker: Broker, call: Call) -> Reply | None:
    """400: the queues of one client. No list at all: keep what you have."""
    raw = bodies.drop_nulls(bodies.load_object(call.frame.body, "assignment"))
    asker = bodies.convert(raw, _Asker, "assignment")
    names.check_topic(asker.topic)
    names.check_group(asker.consumerGroup)
    modes = broker.pop.modes
    queues = modes.known(asker.topic, call.now_ms)
    if queues is None:
        if broker.name_servers.addresses and modes.wait(broker, call, asker):
            return None
        queues = _own_queues(broker, asker.topic)
    return _assigned(broker, asker, queues)


def _assigned(broker: Broker, asker: _Asker, queues: list[MessageQueue] | None) -> Reply:
    mode = broker.pop.modes.of(broker, asker.topic, asker.consumerGroup)
    mine = None if queues is None else _share(broker, asker, mode, queues)
    if mine is None:
        return Reply(body=b"{}")
    table = [
        {
            "messageQueue": {
                "brokerName": one.broker,
                "queueId": one.queue_id,
                "topic": one.topic,
            },
            "mode": mode.mode,
        }
        for one in sorted(set(mine))
    ]
    return Reply(body=fastjson.dumps({"messageQueueAssignments": table}))


def _share(
    broker: Broker, asker: _Asker, mode: Mode, queues: list[MessageQueue]
) -> list[MessageQueue] | None:
    if asker.messageModel == "BROADCASTING" or not broker.config.is_server_balancing:
        return queues
    group = broker.members.consumers.get(asker.consumerGroup)
    if group is None or not queues:
        return None
    clients = sorted(group.client_ids())
    if asker.strategyName not in ("AVG", "AVG_BY_CIRCLE"):
        log.warning("assignment asked by an unknown strategy=%r", asker.strategyName[:40])
        return None
    return divide(asker.strategyName, asker.clientId, queues, clients, mode)


def divide(
    strategy: str, client: str, queues: list[MessageQueue], clients: list[str], mode: Mode
) -> list[MessageQueue]:
    """The queues of one client out of sorted lists."""
    share = _by_circle if strategy == "AVG_BY_CIRCLE" else _in_blocks
    if mode.mode != POP:
        return share(client, queues, clients)
    count = mode.popShareQueueNum
    if count <= 0 or count >= len(clients) - 1:
        return [MessageQueue(one.topic, one.broker, -1) for one in queues]
    if client not in clients:
        return []
    index = clients.index(client)
    if len(clients) > len(queues):
        return [queues[index % len(queues)]]
    found: list[MessageQueue] = []
    for step in range(count + 1):
        found += share(clients[(index + step) % len(clients)], queues, clients)
    return found


def _in_blocks(client: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    if client not in clients:
        return []
    index, (each, more) = clients.index(client), divmod(len(queues), len(clients))
    begin = index * each + min(index, more)
    return queues[begin : begin + each + (index < more)]


def _by_circle(client: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return queues[clients.index(client) :: len(clients)] if client in clients else []


def set_mode(broker: Broker, call: Call) -> Reply:
    """401: a group pulls or pops a topic from now on."""
    raw = bodies.drop_nulls(bodies.load_object(call.frame.body, "request mode"))
    mode = bodies.convert(raw, Mode, "request mode")
    names.check_topic(mode.topic)
    names.check_group(mode.consumerGroup)
    if mode.mode not in (POP, PULL):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, f"mode {mode.mode[:40]!r} must be {PULL} or {POP}"
        )
    if mode.topic.startswith(names.RETRY_PREFIX):
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, f"{mode.topic!r} is a retry topic: it is always pulled"
        )
    if broker.topics.get(mode.topic) is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {mode.topic!r} does not exist on {broker.config.name}",
        )
    config = broker.config
    group = broker.groups.find(
        mode.consumerGroup, auto_create=config.is_group_auto_created, now_ms=call.now_ms
    )
    if group is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {mode.consumerGroup!r} does not exist on {config.name}",
        )
    broker.pop.modes.put(mode, call.now_ms)
    return Reply()


def all_modes(broker: Broker, call: Call) -> Reply:
    """402: every mode that was set, as a follower asks for it."""
    return Reply(body=fastjson.dumps(msgspec.to_builtins(broker.pop.modes.as_wire())))
