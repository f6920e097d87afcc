"""Queue allocation: the splits are those of RocketMQ's Java clients, worked out by hand."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from cometmq.client.assignment import (
    STRATEGIES,
    Strategy,
    average,
    average_by_circle,
    consistent_hash,
    fixed,
    machine_room,
    machine_room_nearby,
    room_of_broker,
    strategy_named,
)
from cometmq.errors import UsageError
from cometmq.message import MessageQueue


def queues_of(count: int, broker: str = "b") -> list[MessageQueue]:
    return [MessageQueue("T", broker, queue_id) for queue_id in range(count)]


def split(strategy: Strategy, queues: list[MessageQueue], clients: str) -> list[list[int]]:
    """The places in `queues` that each client gets; a client's id is one letter."""
    return [
        [queues.index(one) for one in strategy("g", client, queues, list(clients))]
        for client in clients
    ]


def nearby(inner: Strategy) -> Strategy:
    """Rooms: a queue's is its broker's first letter, a client's its id."""
    return machine_room_nearby(inner, lambda queue: queue.broker[0], lambda client: client[0])


@pytest.mark.parametrize(
    ("count", "clients", "expected"),
    [
        (8, "A", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (8, "AB", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, "ABC", [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (7, "ABC", [[0, 1, 2], [3, 4], [5, 6]]),
        (3, "ABC", [[0], [1], [2]]),
        (2, "ABC", [[0], [1], []]),
        (1, "ABCD", [[0], [], [], []]),
    ],
)
def test_average_gives_blocks_and_the_remainder_to_the_first(
    count: int, clients: str, expected: list[list[int]]
) -> None:
    assert split(average, queues_of(count), clients) == expected


@pytest.mark.parametrize(
    ("count", "clients", "expected"),
    [
        (8, "AB", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (8, "ABC", [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (2, "ABC", [[0], [1], []]),
    ],
)
def test_average_by_circle_deals_like_cards(
    count: int, clients: str, expected: list[list[int]]
) -> None:
    assert split(average_by_circle, queues_of(count), clients) == expected


def test_average_is_the_formula_of_the_java_code() -> None:
    """wire.md 5.3 literally, against the shorter one that is used."""
    for n in range(1, 30):
        for c in range(1, 12):
            clients = "ABCDEFGHIJKL"[:c]
            for i, mine in enumerate(split(average, queues_of(n), clients)):
                mod = n % c
                size = 1 if n <= c else n // c + 1 if mod > 0 and i < mod else n // c
                start = i * size if mod > 0 and i < mod else i * size + mod
                assert mine == [(start + k) % n for k in range(min(size, n - start))]


@pytest.mark.parametrize("client_count", [1, 2, 3, 5, 8, 21])
@pytest.mark.parametrize("queue_count", [1, 2, 7, 16, 64])
@pytest.mark.parametrize(
    "strategy",
    [
        average,
        average_by_circle,
        consistent_hash(),
        nearby(average),
        nearby(average_by_circle),
        nearby(consistent_hash()),
    ],
    ids=lambda strategy: strategy.name,
)
def test_every_queue_has_exactly_one_reader(
    strategy: Strategy, queue_count: int, client_count: int
) -> None:
    queues = sorted(MessageQueue("T", "xyz"[at % 3] + "-1", at) for at in range(queue_count))
    clients = sorted(f"{'xyw'[at % 3]}@{at}" for at in range(client_count))
    found = Counter(one for client in clients for one in strategy("g", client, queues, clients))
    assert found == Counter(queues)


def test_fixed_gives_its_list_to_anyone_unchecked() -> None:
    mine = queues_of(3)[1:]
    assert fixed(mine)("g", "", [], []) == mine
    fixed(mine)("g", "", [], []).clear()
    assert len(mine) == 2
    assert fixed(mine).name == "CONFIG"


def test_machine_room_takes_only_the_rooms_asked_for() -> None:
    near = [MessageQueue("T", "hz@b1", at) for at in range(5)]
    near += [MessageQueue("T", "sh@b2", at) for at in range(2)]
    far = [MessageQueue("T", name, 0) for name in ("bj@b", "hz", "hz@", "hz@b@c", "plain")]
    queues = far + near
    strategy = machine_room({"hz", "sh"})
    # 7 queues are near: blocks of 2, the seventh to the first client
    assert [[one - len(far) for one in mine] for mine in split(strategy, queues, "ABC")] == [
        [0, 1, 6],
        [2, 3],
        [4, 5],
    ]
    assert machine_room({"none"})("g", "A", queues, ["A"]) == []


@pytest.mark.parametrize(
    ("broker", "room"),
    [
        ("a@b", "a"),
        ("@b", ""),
        ("a@b@", "a"),
        ("a", None),
        ("a@", None),
        ("a@b@c", None),
        ("", None),
    ],
)
def test_a_broker_name_is_cut_as_java_cuts_it(broker: str, room: str | None) -> None:
    assert room_of_broker(broker) == room


def test_consistent_hash_against_points_computed_by_hand() -> None:
    """First four bytes of MD5: B-1 1033382434, A-1 1154302530, B-0 1345556104, A-0 4153733401.

    The queues' texts hash to 562732085, 3803073317, 1979679239, 434191955, 4287528942 (beyond the
    last point, so it wraps to B-1) and 3805727012.
    """
    assert split(consistent_hash(2), queues_of(6), "AB") == [[1, 2, 5], [0, 3, 4]]


def test_consistent_hash_moves_only_the_queues_of_the_one_that_left() -> None:
    queues = queues_of(64)
    before = split(consistent_hash(), queues, "ABCD")
    after = split(consistent_hash(), queues, "ABC")
    assert all(set(old) <= set(new) for old, new in zip(before, after, strict=False))
    assert consistent_hash(0)("g", "A", queues, ["A"]) == []
    with pytest.raises(UsageError, match="virtual_nodes=-1"):
        consistent_hash(-1)


def test_nearby_keeps_rooms_apart_and_shares_what_nobody_is_near_to() -> None:
    queues = queues_of(4, "x1") + queues_of(2, "y1") + queues_of(3, "z1")
    clients = ["x-1", "x-2", "y-1"]
    strategy = nearby(average)
    assert strategy.name == "MACHINE_ROOM_NEARBY-AVG"
    assert [[queues.index(q) for q in strategy("g", one, queues, clients)] for one in clients] == [
        [0, 1, 6],
        [2, 3, 7],
        [4, 5, 8],
    ]


def test_nearby_refuses_a_queue_or_client_without_a_room() -> None:
    for queue_room, client_room in (("", "r"), ("r", "")):
        strategy = machine_room_nearby(
            average, lambda _, room=queue_room: room, lambda _, room=client_room: room
        )
        with pytest.raises(UsageError, match="no room"):
            strategy("g", "A", queues_of(1), ["A"])


@pytest.mark.parametrize(
    "strategy",
    [average, average_by_circle, consistent_hash(), machine_room({"r"}), nearby(average)],
)
def test_bad_lists_are_refused_and_a_stranger_gets_nothing(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    queues = queues_of(2, "r@b")
    for client, some_queues, clients in (
        ("", queues, ["A"]),
        ("A", [], ["A"]),
        ("A", queues, []),
    ):
        with pytest.raises(UsageError):
            strategy("g", client, some_queues, clients)
    caplog.set_level(logging.INFO, "cometmq.client")
    assert strategy("my-group", "C", queues, ["A", "B"]) == []
    assert "group=my-group client=C" in caplog.text


def test_by_name() -> None:
    assert set(STRATEGIES) == {"AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"}
    assert strategy_named("AVG") is average
    with pytest.raises(UsageError, match=r"'average'.*AVG, AVG_BY_CIRCLE, CONSISTENT_HASH"):
        strategy_named("average")
