"""Choosing the queue of a message."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random

import pytest

from cometmq.client import sending
from cometmq.client.routes import Route
from cometmq.client.selector import RoundRobin, Selector, hash_of, machine_room, random_queue
from cometmq.client.sending import Lane, Rounds
from cometmq.errors import UsageError
from cometmq.message import MessageQueue

QUEUES = [MessageQueue("T", broker, at) for broker in ("a", "b") for at in range(3)]


class Drawn(Random):
    """A source whose draw is known."""

    def __init__(self, value: int) -> None:
        super().__init__(0)
        self.value = value

    def getrandbits(self, k: int) -> int:
        assert 0 <= self.value < 2**k
        return self.value


def test_round_robin_goes_on_from_its_random_start() -> None:
    turns = RoundRobin(Drawn(9))
    assert [QUEUES.index(turns(QUEUES)) for _ in range(8)] == [4, 5, 0, 1, 2, 3, 4, 5]


def test_the_counter_wraps_where_a_java_int_turns_negative() -> None:
    turns = RoundRobin(Drawn(2**31 - 2))
    assert [turns.next_index() for _ in range(3)] == [2**31 - 1, 0, 1]


def test_a_retry_goes_to_another_broker_if_there_is_one() -> None:
    turns = RoundRobin(Drawn(5))
    assert turns(QUEUES, "a") == QUEUES[3]  # 0, 1 and 2 are passed over
    for start in range(12):
        assert RoundRobin(Drawn(start))(QUEUES, "b").broker == "a"
    alone = QUEUES[:3]
    assert {turns(alone, "a") for _ in range(3)} == set(alone)


def test_each_thread_and_each_topic_has_its_own_turns() -> None:
    rounds = Rounds(Drawn(0))
    assert [rounds.mine.turns(topic).next_index() for topic in "TUT"] == [1, 1, 2]
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(rounds.mine.turns("T").next_index()))
    other.start()
    other.join()
    assert seen == [1]
    assert rounds.mine.turns("T").next_index() == 3


def test_a_thread_keeps_a_bounded_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_KNOWN_TOPICS", 3)
    mine = Rounds(Drawn(0)).mine
    for number in range(10):
        mine.turns(f"topic-{number}")
        mine.open_lane(Lane(Route(f"topic-{number}", {}, (), ()), [], 0))
        assert len(mine._turns) <= 3 and len(mine.lanes) <= 3


@pytest.mark.parametrize(
    ("key", "java_hash", "index_of_7"),
    [
        ("a", 97, 6),
        ("order-1", -1207111310, 6),  # -1207111310 % 7 is -6 in Java
        ("order-2", -1207111309, 5),
        ("polygenelubricants", -(2**31), 2),  # whose Math.abs is still negative in Java
        ("日本", 835047, 3),
        (12, 1569, 1),  # as the text "12"
    ],
)
def test_hash_of_is_javas(key: object, java_hash: int, index_of_7: int) -> None:
    queues = [MessageQueue("T", "a", at) for at in range(7)]
    assert abs(java_hash) % 7 == index_of_7
    assert hash_of(key)(queues) == queues[index_of_7]


def test_random_queue_reaches_all_alike() -> None:
    select = random_queue(Random(7))
    found = Counter(select(QUEUES) for _ in range(6000))
    assert set(found) == set(QUEUES)
    assert min(found.values()) > 850


def test_machine_room_takes_turns_in_the_rooms_and_everywhere_if_there_are_none() -> None:
    near = [MessageQueue("T", "hz@b1", 0), MessageQueue("T", "sh@b1", 0)]
    queues = [MessageQueue("T", "bj@b", 0), near[0], MessageQueue("T", "hz", 0), near[1]]
    select = machine_room(["hz", "sh"])
    assert [select(queues) for _ in range(5)] == [near[0], near[1], near[0], near[1], near[0]]
    elsewhere = machine_room(["none"])
    assert [elsewhere(queues) for _ in range(4)] == queues


@pytest.mark.parametrize(
    "select",
    [RoundRobin(Random(1)), hash_of("k"), random_queue(Random(1)), machine_room(["hz"])],
)
def test_no_queue_is_said_plainly(select: Selector) -> None:
    with pytest.raises(UsageError, match="no queue to choose from"):
        select([])
