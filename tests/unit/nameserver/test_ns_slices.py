"""Big registrations: applied a slice a turn, answered once, cut short cleanly."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.nameserver.slices import SLICE_TOPICS
from cometmq.wire.bodies import DataVersion, TopicConfig
from cometmq.wire.codes import RequestCode

MANY = 50_000
V2, V3 = DataVersion(2, 0, 2), DataVersion(3, 0, 3)
BIG = {"name": "big", "address": "10.0.0.7:10911"}


def names(count: int) -> list[str]:
    return [f"topic_{number}" for number in range(count)]


def finish(bench: Any) -> list[Any]:
    """Tick until nothing is left to do at once; all effects."""
    out: list[Any] = []
    for _ in range(1_000):
        if bench.server.deadline_ms > bench.now_ms:
            return out
        out += bench.tick()
    raise AssertionError("the work does not end")


def count(bench: Any) -> int:
    return len(bench.server.routes.topics)


def test_routes_are_answered_between_slices_of_a_big_registration(bench: Any) -> None:
    bench.tick()
    bench.register(["T1", "T2"])
    assert bench.register_effects(names(MANY), conn=7, **BIG) == []
    turns, out = 0, []
    while not out:
        assert bench.server.deadline_ms == bench.now_ms  # more work is due at once
        before = count(bench)
        assert bench.route("T1")["queueDatas"][0]["brokerName"] == "broker-a"
        out = bench.tick()
        assert count(bench) - before <= SLICE_TOPICS
        turns += 1
    assert turns >= MANY // SLICE_TOPICS - 1
    (answer,) = bench.replies(out)
    assert (answer.code, out[0].conn) == (0, 7)
    assert count(bench) == MANY + 2
    assert bench.server.deadline_ms > bench.now_ms
    assert bench.has_route(names(MANY)[-1])


def test_the_first_turn_is_bounded_too(bench: Any) -> None:
    bench.register_effects(names(MANY))
    assert count(bench) <= SLICE_TOPICS <= 5_000


def test_a_registration_of_one_slice_is_answered_at_once(bench: Any) -> None:
    assert bench.register(names(SLICE_TOPICS)).code == 0
    assert bench.register_effects(names(SLICE_TOPICS + 1), **BIG) == []
    assert len(bench.replies(finish(bench))) == 1


def test_two_big_registrations_take_turns(bench: Any) -> None:
    bench.register_effects(names(5 * SLICE_TOPICS))
    bench.register_effects(names(5 * SLICE_TOPICS), conn=2, **BIG)
    bench.tick(), bench.tick()
    a, b = bench.server.routes.brokers.values()
    assert len(a.topics) == len(b.topics) == 2 * SLICE_TOPICS
    assert sorted(effect.conn for effect in finish(bench)) == [1, 2]


def test_an_unchanged_big_registration_needs_no_slices(bench: Any) -> None:
    bench.register_effects(names(3 * SLICE_TOPICS))
    finish(bench)
    assert bench.register(names(3 * SLICE_TOPICS)).code == 0


def test_the_missing_are_taken_out_in_slices_too(make_bench: Any) -> None:
    bench = make_bench(deletes_missing_topics=True)
    bench.register_effects(names(3 * SLICE_TOPICS))
    finish(bench)
    assert bench.register_effects(["topic_1", "new"], version=V2) == []
    assert count(bench) >= 2 * SLICE_TOPICS
    (answer,) = bench.replies(finish(bench))
    assert answer.code == 0
    assert list(bench.server.routes.topics) == ["topic_1", "new"]


def test_a_connection_that_closes_in_the_middle_leaves_nothing(bench: Any) -> None:
    bench.tick()
    bench.register_effects(names(MANY), conn=7)
    bench.tick()
    (answer,) = bench.replies(bench.close(7))
    assert answer.code == 1
    assert bench.server.deadline_ms > bench.now_ms
    assert finish(bench) == []
    assert (count(bench), bench.brokers()) == (0, {})
    assert bench.server.stats.registrations_cancelled == 1
    assert bench.server.stats.registrations == 0


def test_an_unregister_in_the_middle_leaves_nothing(bench: Any) -> None:
    bench.register_effects(names(MANY))
    cancelled, answer = bench.replies(bench.send(RequestCode.UNREGISTER_BROKER, bench.identity()))
    assert (cancelled.code, answer.code) == (1, 0)
    assert finish(bench) == []
    assert count(bench) == 0


def test_a_later_registration_joins_and_both_are_answered(bench: Any) -> None:
    """A broker that makes a topic while its table is on the way tells of that topic alone."""
    bench.register_effects(names(3 * SLICE_TOPICS))
    late = {"topic_5999": TopicConfig("topic_5999", 1, 1), "extra": TopicConfig("extra", 2, 2)}
    assert bench.register_effects(late, version=V2) == []
    answers = bench.replies(finish(bench))
    assert [answer.code for answer in answers] == [0, 0]
    assert count(bench) == 3 * SLICE_TOPICS + 1
    assert bench.route("topic_5999")["queueDatas"][0]["readQueueNums"] == 1
    assert bench.route("topic_5998")["queueDatas"][0]["readQueueNums"] == 4
    stored = bench.ask(RequestCode.QUERY_DATA_VERSION, bench.identity()).body
    assert stored == b'{"counter":2,"stateVersion":0,"timestamp":2}'


def test_joining_makes_progress(bench: Any) -> None:
    """However often small ones come, the big one ends."""
    bench.register_effects(names(3 * SLICE_TOPICS))
    answers = []
    for number in range(3):
        late = bench.register_effects([f"extra{number}"], version=DataVersion(number + 2, 0, 2))
        answers += bench.replies(late)
    assert [answer.code for answer in answers] == [0, 0, 0, 0]


def test_joining_is_bounded(bench: Any) -> None:
    bench.register_effects(names(100 * SLICE_TOPICS))
    codes = []
    for _ in range(30):
        out = bench.register_effects(["x", "y"], version=V2)
        codes += [answer.code for answer in bench.replies(out)]
    assert codes == [2] * 15


def test_a_joining_one_moves_the_broker_to_its_connection(bench: Any) -> None:
    bench.register_effects(names(3 * SLICE_TOPICS), conn=1)
    bench.register_effects(["x"], conn=2, version=V2)
    assert bench.close(1) == []
    finish(bench)
    assert count(bench) == 3 * SLICE_TOPICS + 1
    bench.close(2)
    assert count(bench) == 0


def test_another_address_under_the_same_id_ends_the_work(bench: Any) -> None:
    bench.register_effects(names(MANY), conn=1)
    cancelled, answer = bench.replies(
        bench.register_effects(["T1", "T2"], address="10.0.0.9:1", conn=2, version=V2)
    )
    assert {cancelled.code, answer.code} == {0, 1}
    assert finish(bench) == []
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.9:1"}}
    assert bench.close(1) == []
    assert bench.has_route("T1")
    bench.close(2)
    assert count(bench) == 0


def test_a_whole_new_payload_ends_the_work_where_payloads_are_the_truth(make_bench: Any) -> None:
    bench = make_bench(deletes_missing_topics=True)
    bench.register_effects(names(2 * SLICE_TOPICS))
    first = bench.replies(bench.register_effects(["T1", "T2"], version=V2))
    answers = first + bench.replies(finish(bench))
    assert [answer.code for answer in answers] == [1, 0]
    assert list(bench.server.routes.topics) == ["T1", "T2"]


def test_a_follower_does_not_disturb_its_master_s_work(bench: Any) -> None:
    bench.register_effects(names(2 * SLICE_TOPICS))
    follower = bench.register(["a", "b"], broker_id=1, address="10.0.0.2:1", conn=2)
    assert follower.ext["masterAddr"] == "10.0.0.1:10911"
    assert [answer.code for answer in bench.replies(finish(bench))] == [0]


def test_while_being_applied_the_data_version_counts_as_changed(bench: Any) -> None:
    bench.register_effects(names(2 * SLICE_TOPICS))
    body = b'{"counter":1,"stateVersion":0,"timestamp":1}'
    ask = (RequestCode.QUERY_DATA_VERSION, bench.identity(), body)
    assert bench.ask(*ask).ext == {"changed": "true"}
    finish(bench)
    assert bench.ask(*ask).ext == {"changed": "false"}


def test_the_topic_limit_counts_what_is_still_on_the_way(make_bench: Any) -> None:
    bench = make_bench(max_topics=3 * SLICE_TOPICS)
    bench.register_effects(names(3 * SLICE_TOPICS))
    assert bench.register(["other1", "other2"], conn=2, **BIG).code == 1
    assert bench.register(["topic_0", "topic_5999"], conn=2, **BIG).code == 0
    finish(bench)
    assert count(bench) == 3 * SLICE_TOPICS


def test_stop_answers_what_is_on_the_way(bench: Any) -> None:
    bench.register_effects(names(MANY))
    out: list[Any] = []
    bench.server.stop(bench.now_ms, out)
    assert [answer.code for answer in bench.replies(out)] == [1]
    assert bench.server.is_stopped


@pytest.mark.parametrize("last", ["bad name", ""])
def test_one_bad_name_at_the_end_of_many_changes_nothing(bench: Any, last: str) -> None:
    assert bench.register([*names(MANY), last]).code == 29
    assert (count(bench), bench.brokers()) == (0, {})
