"""Which queues of a topic one consumer of a group reads: RocketMQ's six strategies.

Owns: the rules by which each client computes its own share. One rule: nobody coordinates, so every
client must compute the same split as a Java client would from the same two lists; both come in
sorted (queues by topic, broker, id; client ids as strings), and sorting them is the caller's part.

With n queues, c clients and my index i (7 queues, 3 clients):
    AVG            blocks, the first n % c clients get one more      0 1 2 | 3 4 | 5 6
    AVG_BY_CIRCLE  dealt like cards                                  0 3 6 | 1 4 | 2 5
    MACHINE_ROOM   blocks of n // c, what is left over one by one    0 1 6 | 2 3 | 4 5
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cometmq.errors import UsageError
from cometmq.message import MessageQueue

log = logging.getLogger("cometmq.client")

VIRTUAL_NODES = 10  # points a client has on the hash ring; all clients must use the same number

Share = Callable[[str, str, Sequence[MessageQueue], Sequence[str]], list[MessageQueue]]
"""(group, client id, queues, client ids) to the queues of that client."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named way to split queues; `name` is what RocketMQ's getName() says."""

    name: str
    share: Share
    needs_members: bool = True

    def __call__(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        """The queues of `client_id`; none if the broker doesn't list it as a member yet."""
        if not self.needs_members:
            return self.share(group, client_id, queues, client_ids)
        if not client_id:
            raise UsageError(f"{self.name} of group {group!r}: the client id is empty")
        if not queues:
            raise UsageError(f"{self.name} of group {group!r}: the list of queues is empty")
        if not client_ids:
            raise UsageError(f"{self.name} of group {group!r}: the list of client ids is empty")
        if client_id not in client_ids:
            log.info(
                "client_not_a_member group=%s client=%s member_count=%d",
                group,
                client_id,
                len(client_ids),
            )
            return []
        return self.share(group, client_id, queues, client_ids)


def fixed(queues: Sequence[MessageQueue]) -> Strategy:
    """CONFIG: always these queues, whoever else there is; nothing is checked, as in Java."""
    mine = tuple(queues)
    return Strategy("CONFIG", lambda *_: list(mine), needs_members=False)


def machine_room(rooms: Collection[str]) -> Strategy:
    """MACHINE_ROOM: only queues of brokers named `room@name` with the room in `rooms`."""
    wanted = frozenset(rooms)

    def share(
        _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        near = [queue for queue in queues if room_of_broker(queue.broker) in wanted]
        index = client_ids.index(client_id)
        size, left_over = divmod(len(near), len(client_ids))
        mine = near[index * size : (index + 1) * size]
        if index < left_over:
            mine.append(near[size * len(client_ids) + index])
        return mine

    return Strategy("MACHINE_ROOM", share)


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> Strategy:
    """CONSISTENT_HASH: few queues move when a client comes or goes."""
    if virtual_nodes < 0:
        raise UsageError(f"virtual_nodes={virtual_nodes} of CONSISTENT_HASH must not be negative")

    def share(
        _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        ring = _ring(client_ids, virtual_nodes)
        if not ring:
            return []
        points = sorted(ring)
        return [
            queue
            for queue in queues
            if ring[points[bisect_left(points, _ring_hash(_java_text(queue))) % len(points)]]
            == client_id
        ]

    return Strategy("CONSISTENT_HASH", share)


def machine_room_nearby(
    inner: Strategy,
    room_of_queue: Callable[[MessageQueue], str],
    room_of_client: Callable[[str], str],
) -> Strategy:
    """MACHINE_ROOM_NEARBY-inner: a room's queues to its own clients, by the inner strategy.

    Queues of a room without clients are shared by all clients, room by room.
    """

    def share(
        group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        queues_of: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            queues_of.setdefault(_named(room_of_queue(queue), queue), []).append(queue)
        clients_of: dict[str, list[str]] = {}
        for one in client_ids:
            clients_of.setdefault(_named(room_of_client(one), one), []).append(one)
        here = room_of_client(client_id)
        near = queues_of.pop(here, None)
        mine = inner(group, client_id, near, clients_of[here]) if near else []
        for room in sorted(queues_of):
            if room not in clients_of:
                mine += inner(group, client_id, queues_of[room], client_ids)
        return mine

    return Strategy(f"MACHINE_ROOM_NEARBY-{inner.name}", share)


def strategy_named(name: str) -> Strategy:
    """A strategy that needs no arguments, by its wire name."""
    found = STRATEGIES.get(name)
    if found is None:
        raise UsageError(
            f"no queue allocation strategy is named {name!r}; by name there are "
            f"{', '.join(sorted(STRATEGIES))}; the others need arguments, so make them with "
            "fixed(), machine_room() or machine_room_nearby()"
        )
    return found


def room_of_broker(broker: str) -> str | None:
    """`room` of a broker named `room@name`, else None.

    Java cuts with String.split, which forgets empty parts at the end: "a@b@" has the room a.
    """
    parts = broker.rstrip("@").split("@")
    return parts[0] if len(parts) == 2 else None


def _average(
    _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    index = client_ids.index(client_id)
    size, left_over = divmod(len(queues), len(client_ids))
    begin = index * size + min(index, left_over)
    return list(queues[begin : begin + size + (index < left_over)])


def _average_by_circle(
    _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    return list(queues[client_ids.index(client_id) :: len(client_ids)])


def _ring(client_ids: Sequence[str], virtual_nodes: int) -> dict[int, str]:
    """Points of all clients. Two clients at one point: the later one has it.

    A client that is listed twice goes on counting from the points it has, as Java's ring does.
    """
    ring: dict[int, str] = {}
    seen: set[str] = set()
    for client_id in client_ids:
        first = list(ring.values()).count(client_id) if client_id in seen else 0
        seen.add(client_id)
        for number in range(first, first + virtual_nodes):
            ring[_ring_hash(f"{client_id}-{number}")] = client_id
    return ring


def _ring_hash(text: str) -> int:
    digest = hashlib.md5(text.encode("utf-8"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    """MessageQueue.toString() of Java: it is what the ring hashes, so it is part of the format."""
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}]"
    )


def _named(room: str, whose: object) -> str:
    if not room:
        raise UsageError(f"MACHINE_ROOM_NEARBY: no room was told for {whose}")
    return room


average = Strategy("AVG", _average)
"""The strategy that RocketMQ's clients use unless told otherwise."""

average_by_circle = Strategy("AVG_BY_CIRCLE", _average_by_circle)

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {one.name: one for one in (average, average_by_circle, consistent_hash())}
)
"""Those that need no arguments, by wire name."""
