"""Asking several servers, and finding whom to ask: what all admin functions share.

Owns: the fan-out to brokers and name servers, the errors about it, and how names, times and queues
of answers are read. One rule: everybody is asked before anything is raised, and whoever failed is
named; an answer that is incomplete is never passed off as a whole one.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import msgspec

from cometmq.client.routes import BrokerOfRoute, Route, parse_route
from cometmq.client.session import Session
from cometmq.errors import CometError, NoRoute, RequestRefused, Unreachable, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame

T = TypeVar("T")

MOST_AT_ONCE = 64  # requests under way at a time; a cluster of hundreds is asked in turns
MOST_NAMES = 10  # shown in an error's text

Moment = datetime | int
"""A time: a datetime (a naive one is local time) or milliseconds since 1970."""


class PartlyDone(CometError):
    """Some of those asked failed, others did not. `done`: answers by name of broker or address;
    `failed`: errors likewise."""

    def __init__(
        self, what: str, done: Mapping[str, object], failed: dict[str, CometError]
    ) -> None:
        errors = "; ".join(f"{name}: {error}" for name, error in failed.items())
        others = f"done on {', '.join(done)}" if done else "done on none"
        super().__init__(
            f"{what} failed on {len(failed)} of {len(done) + len(failed)}: {errors} ({others})"
        )
        self.done = dict(done)
        self.failed = failed


class UnknownName(CometError):
    """There is no cluster, broker or group of this name; `known` are those there are."""

    def __init__(self, kind: str, name: str, known: Sequence[str]) -> None:
        super().__init__(f"{kind} {name!r} is unknown: {listed(f'known {kind}s', name, known)}")
        self.kind = kind
        self.name = name
        self.known = tuple(known)


def listed(what: str, name: str, known: Sequence[str]) -> str:
    """`what are a, b`: all of them if they are few, else those most like the name."""
    if not known:
        return f"{what}: none"
    if len(known) <= MOST_NAMES:
        return f"{what}: {', '.join(sorted(known))}"
    alike = difflib.get_close_matches(name, known, MOST_NAMES, 0.5)
    shown = f"like it {', '.join(alike)}" if alike else "none is like it"
    return f"{what}: {len(known)}, {shown}"


# ----------------------------------------------------------------------------------------- brokers


class Brokers(msgspec.Struct, frozen=True):
    """All brokers of all clusters, as a name server tells."""

    by_name: dict[str, BrokerOfRoute]
    clusters: dict[str, tuple[str, ...]]

    def leaders(
        self, cluster: str | None = None, brokers: str | Sequence[str] | None = None
    ) -> dict[str, str]:
        """Addresses of leaders by name ("" if there is none): of a cluster, of the given brokers
        (names or `host:port`), or of all."""
        if cluster is not None and brokers is not None:
            raise UsageError("give either cluster or brokers, not both")
        if cluster is not None:
            if cluster not in self.clusters:
                raise UnknownName("cluster", cluster, list(self.clusters))
            names: Sequence[str] = self.clusters[cluster]
        elif brokers is not None:
            names = [brokers] if isinstance(brokers, str) else brokers
        else:
            names = list(self.by_name)
        return {name: self.leader(name) for name in names}

    def leader(self, name: str) -> str:
        """The leader's address of a broker; an address stands for itself."""
        broker = self.by_name.get(name)
        if broker is not None:
            return broker.leader or ""
        if is_address(name):
            return name
        raise UnknownName("broker", name, list(self.by_name))

    def any(self, name: str) -> str:
        """The leader's address, or a follower's if there is no leader: enough to read."""
        broker = self.by_name.get(name)
        return self.leader(name) if broker is None else broker.any or ""


def is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


async def brokers_of(session: Session) -> Brokers:
    """106, asked anew; Unreachable if no broker is registered."""
    server, answer = await session.names.ask(RequestCode.GET_BROKER_CLUSTER_INFO, {})
    raw = bodies.load_object(accepted(answer).body, "cluster")
    found: dict[str, BrokerOfRoute] = {}
    for name, one in (raw.get("brokerAddrTable") or {}).items():
        addresses = {int(number): str(at) for number, at in one.get("brokerAddrs", {}).items()}
        found[name] = BrokerOfRoute(
            name, str(one.get("cluster", "")), dict(sorted(addresses.items()))
        )
    if not found:
        raise Unreachable(f"no broker has registered with name server {server}")
    clusters = {
        cluster: tuple(sorted(names))
        for cluster, names in sorted((raw.get("clusterAddrTable") or {}).items())
    }
    return Brokers(dict(sorted(found.items())), clusters)


async def route_of(session: Session, topic: str) -> Route:
    """A topic's route, asked anew; NoRoute says which topics there are. `topic` as on the wire."""
    ext = {"topic": topic, "acceptStandardJsonOnly": "true"}
    server, answer = await session.names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext)
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        said = f"name server {server} does not know it"
        try:
            known = await topic_names(session)
        except CometError as error:
            raise NoRoute(topic, f"{said}, and could not list its topics: {error}") from None
        raise NoRoute(topic, f"{said}; {listed('topics it knows', topic, known)}")
    return parse_route(topic, accepted(answer).body)


async def topic_names(session: Session) -> list[str]:
    """206: every topic, as called on the wire."""
    answer = await session.call_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
    return sorted(
        str(one) for one in bodies.load_object(answer.body, "topics").get("topicList", [])
    )


def readers(route: Route) -> dict[str, str]:
    """Whom to ask about a topic: its leaders, and followers where there is none."""
    return {name: broker.any or "" for name, broker in sorted(route.brokers.items())}


def leaders(route: Route) -> dict[str, str]:
    return {name: broker.leader or "" for name, broker in sorted(route.brokers.items())}


# ------------------------------------------------------------------------------------------ asking


def accepted(answer: Frame) -> Frame:
    if answer.code != 0:
        raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
    return answer


async def each(
    places: Mapping[str, str], ask: Callable[[str, str], Awaitable[T]], what: str
) -> dict[str, T]:
    """`ask(name, address)` of all at once; the answers by name. An error comes after all were
    asked: PartlyDone, or if they all said the same, that."""
    done, failed = await try_each(places, ask)
    if failed:
        raise_failed(what, done, failed)
    return done


async def try_each(
    places: Mapping[str, str], ask: Callable[[str, str], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, CometError]]:
    """As `each`, with the failures as a second table."""
    room = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(name: str, address: str) -> T:
        if not address:
            raise Unreachable(f"broker {name} has no leader registered")
        async with room:
            return await ask(name, address)

    results = await asyncio.gather(
        *(one(name, address) for name, address in places.items()), return_exceptions=True
    )
    done: dict[str, T] = {}
    failed: dict[str, CometError] = {}
    for name, result in zip(places, results, strict=True):
        if isinstance(result, CometError):
            failed[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            done[name] = result
    return done, failed


def raise_failed(what: str, done: Mapping[str, object], failed: dict[str, CometError]) -> NoReturn:
    """One error for several."""
    if not done:
        errors = list(failed.values())
        refusals = [error for error in errors if isinstance(error, RequestRefused)]
        if len(refusals) == len(errors) and len({error.code for error in refusals}) == 1:
            said = "; ".join(
                f"{name}: {error.remark}" for name, error in zip(failed, refusals, strict=True)
            )
            raise RequestRefused(refusals[0].code, f"{what}: {said}", refusals[0].ext)
        if len(errors) == 1:
            raise errors[0]
    raise PartlyDone(what, done, failed)


async def call(
    session: Session,
    address: str,
    code: int,
    ext: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    name: str = "",
    timeout_ms: int | None = None,
) -> Frame:
    """One request to one server; `name` is the broker that advertises the address."""
    return await session.connections.call(
        address,
        code,
        ext,
        body,
        timeout_ms=session.options.timeout_ms if timeout_ms is None else timeout_ms,
        advertised_by=name if name != address else "",
    )


async def call_each(
    session: Session,
    places: Mapping[str, str],
    code: int,
    ext: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    what: str,
) -> dict[str, Frame]:
    """The same request to all."""

    async def ask(name: str, address: str) -> Frame:
        return await call(session, address, code, ext, body, name=name)

    return await each(places, ask, what)


async def call_name_servers(
    session: Session, code: int, ext: dict[str, str], body: bytes = b"", *, what: str
) -> dict[str, Frame]:
    """The same request to every name server: they don't tell each other."""
    places = {address: address for address in session.names.addresses}
    return await call_each(session, places, code, ext, body, what=what)


# ----------------------------------------------------------------------------- times, names, queues


def as_ms(moment: Moment) -> int:
    return round(moment.timestamp() * 1000) if isinstance(moment, datetime) else moment


def as_time(ms: int) -> datetime | None:
    """UTC; None where a server says 0 or -1 for "never"."""
    return datetime.fromtimestamp(ms / 1e3, UTC) if ms > 0 else None


def own_names(session: Session, names: Sequence[str]) -> list[str]:
    """Those of this client's namespace, by the names its user knows."""
    return sorted({session.unwrap(name) for name in names if session.wrap(name) == name})


def queue_of(session: Session, key: Any) -> MessageQueue:
    """The key of an offset table: an object, or in standard JSON the text of one."""
    raw = fastjson.loads(key.encode()) if isinstance(key, str) else key
    fields = bodies.drop_nulls(raw)
    return MessageQueue(
        session.unwrap(str(fields.get("topic", ""))),
        str(fields.get("brokerName", "")),
        int(fields.get("queueId", -1)),
    )


def queue_table(session: Session, raw: Any) -> dict[MessageQueue, dict[str, Any]]:
    """`{{queue}: {fields}}`, sorted by queue."""
    found = {queue_of(session, key): bodies.drop_nulls(one) for key, one in (raw or {}).items()}
    return dict(sorted(found.items()))
