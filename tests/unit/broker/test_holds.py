"""Long polling: who is held, who wakes, who is let go, and how many may wait."""

from __future__ import annotations

import pytest

from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import HOLD, Bench, bodies_of, offsets_of


@pytest.fixture
def bench(benches: Benches) -> Bench:
    made = benches()
    made.create_topic()
    return made


def test_a_pull_at_the_end_is_held_and_woken_by_a_message(bench: Bench) -> None:
    opaque = bench.hold()
    bench.sent(body=b"news")
    answer = bench.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"news"]
    assert offsets_of(answer) == (1, 0, 1)
    assert bench.broker.holds.count == 0


def test_a_woken_pull_gets_all_that_arrived_in_the_turn(bench: Bench) -> None:
    opaque = bench.hold()
    frames = [bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"%d" % n) for n in range(3)]
    bench.turn(*((bench.conn, frame) for frame in frames))
    answer = bench.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"0", b"1", b"2"]


def test_a_message_sent_in_the_same_turn_as_the_pull_wakes_it(bench: Bench) -> None:
    send = bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"x")
    pull = bench.frame(C.PULL_MESSAGE, bench.pull_ext(flags=HOLD))
    bench.turn((bench.conn, send), (bench.conn, pull))
    answer = bench.answer(pull.opaque)
    assert answer is not None and bodies_of(answer) == [b"x"]


def test_a_pull_without_the_flag_is_not_held(bench: Bench) -> None:
    assert bench.pull().code == 19


@pytest.mark.parametrize("offset", [1, 5])
def test_a_pull_whose_offset_is_wrong_is_not_held(bench: Bench, offset: int) -> None:
    assert bench.pull(offset=offset, flags=HOLD).code == 21


def test_a_pull_that_found_nothing_to_its_taste_is_not_held(bench: Bench) -> None:
    bench.sent(props={"TAGS": "other"})
    assert bench.pull(flags=HOLD, tags="mine").code == 20


def test_messages_of_other_queues_and_topics_do_not_wake(bench: Bench) -> None:
    opaque = bench.hold(queue=1)
    bench.sent(queue=0)
    bench.sent("Other", queue=1)
    assert bench.answer(opaque) is None
    bench.sent(queue=1)
    assert bench.answer(opaque) is not None


@pytest.mark.parametrize("tags", ["mine", "mine || also", "mi*", "mi* || also"])
def test_only_a_message_with_a_wanted_tag_wakes(bench: Bench, tags: str) -> None:
    opaque = bench.hold(tags=tags)
    bench.sent(props={"TAGS": "other"})
    bench.sent()
    assert bench.answer(opaque) is None
    bench.sent(body=b"it", props={"TAGS": "mine"})
    answer = bench.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"it"]


def test_the_subscription_of_the_heartbeat_wakes(bench: Bench) -> None:
    bench.beat(topics={"T": "mine"})
    opaque = bench.post_pull(flags=2, tags=None, sub_version=1)
    bench.sent(props={"TAGS": "other"})
    assert bench.answer(opaque) is None
    bench.sent(props={"TAGS": "mine"})
    assert bench.answer(opaque) is not None


def test_a_hold_ends_on_its_deadline_with_19_and_all_offsets(bench: Bench) -> None:
    bench.sent()
    opaque = bench.hold(offset=1, suspend_ms=15_000)
    bench.advance(14_999)
    assert bench.answer(opaque) is None
    bench.advance(1)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 19
    assert offsets_of(answer) == (1, 0, 1)


def test_a_deadline_finds_what_did_not_wake(bench: Bench) -> None:
    """Passed-over messages move the client on when its time is over."""
    opaque = bench.hold(tags="mine")
    bench.sent(props={"TAGS": "other"})
    bench.advance(15_000)
    answer = bench.answer(opaque)
    assert answer is not None and (answer.code, offsets_of(answer)) == (20, (1, 0, 1))


def test_nobody_holds_longer_than_a_minute(bench: Bench) -> None:
    opaque = bench.hold(suspend_ms=10**12)
    bench.advance(59_999)
    assert bench.answer(opaque) is None
    bench.advance(1)
    assert bench.answer(opaque) is not None


@pytest.mark.parametrize("suspend_ms", [0, -1])
def test_a_hold_of_no_time_is_none(bench: Bench, suspend_ms: int) -> None:
    assert bench.pull(flags=HOLD, suspend_ms=suspend_ms).code == 19


def test_short_polling_holds_a_second(benches: Benches) -> None:
    bench = benches(is_long_polling_enabled=False)
    bench.create_topic()
    opaque = bench.hold()
    bench.advance(999)
    assert bench.answer(opaque) is None
    bench.advance(1)
    assert bench.answer(opaque) is not None


def test_a_closed_connection_drops_its_holds(bench: Bench) -> None:
    other = bench.connect()
    gone = bench.hold(conn=other)
    stays = bench.hold()
    bench.disconnect(other)
    assert bench.broker.holds.count == 1
    bench.sent()
    assert bench.answer(gone, other) is None
    assert bench.answer(stays) is not None


def test_every_hold_of_a_queue_is_woken(bench: Bench) -> None:
    conns = [bench.connect() for _ in range(3)]
    opaques = [bench.hold(conn=conn) for conn in conns]
    bench.sent()
    for conn, opaque in zip(conns, opaques, strict=True):
        assert bench.answer(opaque, conn) is not None


def test_a_hold_ends_once(bench: Bench) -> None:
    opaque = bench.hold()
    bench.sent()
    assert bench.answer(opaque) is not None
    bench.advance(20_000)
    bench.sent()
    assert bench.answer(opaque) is None


def test_a_oneway_pull_leaves_nothing_behind(bench: Bench) -> None:
    bench.post(C.PULL_MESSAGE, bench.pull_ext(flags=HOLD), flag=2)
    bench.sent()
    assert bench.broker.holds.count == 0
    assert [one for one in bench.inbox[bench.conn] if one.code == 0 and one.body] == []


def test_the_deadline_of_the_core_is_that_of_the_first_hold(bench: Bench) -> None:
    bench.pull()
    bench.advance(2_500)
    assert bench.broker.deadline_ms > bench.now_ms + 300
    bench.hold(suspend_ms=300)
    assert bench.broker.deadline_ms == bench.now_ms + 300


def test_holds_beyond_the_limit_are_answered_at_once_and_counted(benches: Benches) -> None:
    bench = benches(max_parked_pulls=2)
    bench.create_topic()
    first = bench.hold()
    bench.hold()
    answer = bench.pull(flags=HOLD)
    assert answer.code == 19
    assert (bench.broker.holds.count, bench.broker.holds.refused_by_limit) == (2, 1)
    figures = bench.runtime()
    assert figures["cometmqParkedPulls"] == "2"
    assert figures["cometmqParkedPullsLimitReached"] == "1"
    bench.sent()
    assert bench.answer(first) is not None
    bench.hold(offset=1)


def test_a_held_pull_commits_once_and_not_again_when_it_wakes(bench: Bench) -> None:
    bench.sent()
    bench.post_pull(offset=1, flags=HOLD | 1, commit=1)
    assert bench.offset_of().ext["offset"] == "1"
    bench.commit(0)
    bench.sent()
    assert bench.offset_of().ext["offset"] == "0"


def test_deleting_a_topic_does_not_swallow_the_waking_of_others(bench: Bench) -> None:
    """The store dispatches when a topic is deleted; those arrivals wake holds as any others do."""
    bench.sent("Doomed")
    opaque = bench.hold()
    send = bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"x")
    delete = bench.frame(C.DELETE_TOPIC_IN_BROKER, {"topic": "Doomed"})
    bench.turn((bench.conn, send), (bench.conn, delete))
    answer = bench.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"x"]


def test_a_hold_on_a_deleted_topic_ends_with_an_answer(bench: Bench) -> None:
    bench.sent()
    opaque = bench.hold(offset=1)
    bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    bench.advance(15_000)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code in (17, 21)
