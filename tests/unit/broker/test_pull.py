"""Pulls: the read table, the limits, the checks in their order, and tag filters on the server."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.wire import record
from cometmq.wire.codes import PullFlag
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.hashing import java_hash

from .conftest import Benches
from .harness import NOW_MS, PULL, Bench, bodies_of, offsets_of

HOUR_MS = 3_600_000


def fill(bench: Bench, *bodies: bytes, **how: Any) -> None:
    for body in bodies:
        bench.sent(body=body, **how)


# --------------------------------------------------------------------------------- the read table


def test_messages_come_with_all_four_offsets(bench: Bench) -> None:
    fill(bench, b"a", b"b", b"c")
    answer = bench.pull(offset=1)
    assert (answer.code, answer.remark) == (0, "FOUND")
    assert offsets_of(answer) == (3, 0, 3)
    assert bodies_of(answer) == [b"b", b"c"]


@pytest.mark.parametrize("code", [C.PULL_MESSAGE, C.LITE_PULL_MESSAGE])
@pytest.mark.parametrize("serialize", [0, 1])
def test_both_codes_and_serializations_are_served(bench: Bench, code: int, serialize: int) -> None:
    fill(bench, b"a")
    answer = bench.pull(code=code, serialize=serialize)
    assert (answer.serialize, offsets_of(answer)) == (serialize, (1, 0, 1))
    assert bodies_of(answer) == [b"a"]


@pytest.mark.parametrize(
    ("offset", "code", "remark", "offsets"),
    [
        (3, 19, "OFFSET_OVERFLOW_ONE", (3, 0, 3)),
        (4, 21, "OFFSET_OVERFLOW_BADLY", (3, 0, 3)),
        (1 << 40, 21, "OFFSET_OVERFLOW_BADLY", (3, 0, 3)),
        (-1, 21, "OFFSET_TOO_SMALL", (0, 0, 3)),
    ],
)
def test_offsets_outside_a_queue(
    bench: Bench, offset: int, code: int, remark: str, offsets: tuple[int, int, int]
) -> None:
    fill(bench, b"a", b"b", b"c")
    answer = bench.pull(offset=offset)
    assert (answer.code, answer.remark, answer.body) == (code, remark, b"")
    assert offsets_of(answer) == offsets


@pytest.mark.parametrize(("offset", "code"), [(0, 19), (1, 21), (-1, 21)])
def test_a_queue_without_messages(bench: Bench, offset: int, code: int) -> None:
    bench.create_topic()
    answer = bench.pull(offset=offset)
    assert answer.code == code
    assert offsets_of(answer) == (0, 0, 0)


def test_entries_that_do_not_match_are_passed_over(bench: Bench) -> None:
    fill(bench, b"a", b"b", props={"TAGS": "other"})
    answer = bench.pull(tags="mine")
    assert (answer.code, answer.remark) == (20, "NO_MATCHED_MESSAGE")
    assert offsets_of(answer) == (2, 0, 2)


def test_the_next_offset_is_behind_the_last_that_was_examined(bench: Bench) -> None:
    fill(bench, b"a", props={"TAGS": "mine"})
    fill(bench, b"b", b"c", props={"TAGS": "other"})
    answer = bench.pull(tags="mine")
    assert (answer.code, offsets_of(answer)) == (0, (3, 0, 3))


def removed_front(benches: Benches) -> tuple[Bench, int]:
    """A queue whose first log file has expired; its least offset."""
    bench = benches(log_file_bytes=4096, file_reserved_hours=1, idle_timeout_ms=1000)
    bench.create_topic()
    for number in range(30):
        bench.sent(body=b"%03d" % number + b"x" * 300)
    bench.advance(70_000)  # queues reach the disk once a minute
    assert bench.store.min_log_offset == 0
    bench.now_ms = max(NOW_MS, bench.files.modified_ms("commitlog/" + "0" * 20)) + 2 * HOUR_MS
    assert bench.ask(C.TRIGGER_DELETE_FILES).code == 0
    least = bench.store.min_offset("T", 0)
    assert 0 < least < 30
    return bench, least


def test_an_offset_below_the_least_moves_to_the_least(benches: Benches) -> None:
    bench, least = removed_front(benches)
    answer = bench.pull(offset=0)
    assert (answer.code, answer.remark) == (21, "OFFSET_TOO_SMALL")
    assert offsets_of(answer) == (least, least, 30)


def test_the_removed_front_is_not_in_what_is_left(benches: Benches) -> None:
    bench, least = removed_front(benches)
    assert bodies_of(bench.pull(offset=least))[0][:3] == b"%03d" % least


# ----------------------------------------------------------------------------------------- limits


def test_no_more_messages_than_asked_for(bench: Bench) -> None:
    fill(bench, b"a", b"b", b"c")
    assert bodies_of(bench.pull(count=2)) == [b"a", b"b"]


def test_no_more_messages_than_the_brokers_limit(bench: Bench) -> None:
    fill(bench, *[b"x"] * 40)
    assert len(bodies_of(bench.pull(count=100))) == 32


@pytest.mark.parametrize("count", [0, -5])
def test_at_least_one_message_is_given(bench: Bench, count: int) -> None:
    fill(bench, b"a", b"b")
    assert bodies_of(bench.pull(count=count)) == [b"a"]


def test_no_more_bytes_than_the_brokers_limit(benches: Benches) -> None:
    bench = benches(max_pull_bytes_memory=1500)
    fill(bench, *[b"x" * 300] * 5)
    answer = bench.pull()
    assert 1 < len(bodies_of(answer)) < 5
    assert len(answer.body) <= 1500


def test_one_message_is_given_whatever_its_size(benches: Benches) -> None:
    bench = benches(max_pull_bytes_memory=100)
    fill(bench, b"x" * 5000, b"y" * 5000)
    assert bodies_of(bench.pull()) == [b"x" * 5000]


def test_old_data_has_its_own_limits(benches: Benches) -> None:
    bench = benches(in_memory_bytes=1000)
    fill(bench, *[b"x"] * 40)
    assert len(bodies_of(bench.pull())) == 8


def test_limits_can_be_changed_while_running(bench: Bench) -> None:
    fill(bench, *[b"x"] * 10)
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"maxTransferCountOnMessageInMemory=5")
    assert len(bodies_of(bench.pull())) == 5


# ----------------------------------------------------------------------------------------- checks


def refused(answer: Any, code: int, *words: str, kind: str | None = None) -> None:
    assert answer.code == code, answer.remark
    for word in words:
        assert word in str(answer.remark)
    assert answer.ext.get("forbiddenType") == kind


def test_a_broker_that_is_not_readable(benches: Benches) -> None:
    bench = benches(permission=2)
    refused(bench.pull(), 16, "not readable", kind="1")


@pytest.mark.parametrize("how", [{"code": C.LITE_PULL_MESSAGE}, {"flags": PULL | PullFlag.LITE}])
def test_lite_pull_can_be_switched_off(benches: Benches, how: dict[str, int]) -> None:
    bench = benches(is_lite_pull_enabled=False)
    bench.create_topic()
    refused(bench.pull(**how), 16, "litePullMessageEnable", kind="1")
    assert bench.pull().code == 19


def test_an_unknown_group_without_auto_creation(benches: Benches) -> None:
    bench = benches(is_group_auto_created=False)
    bench.create_topic()
    refused(bench.pull(), 26, "'G'")
    assert bench.pull(group="CID_RMQ_SYS_X").code == 19, "system groups are always made"


def test_an_unknown_group_is_made(bench: Bench) -> None:
    bench.create_topic()
    assert bench.pull(group="Fresh").code == 19
    assert bench.broker.groups.get("Fresh") is not None


def test_a_group_that_may_not_consume(bench: Bench) -> None:
    bench.create_topic()
    bench.ask(
        C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, b'{"groupName":"G","consumeEnable":false}'
    )
    refused(bench.pull(), 16, "consumeEnable", kind="2")


def test_an_unknown_topic(bench: Bench) -> None:
    refused(bench.pull("Nope"), 17, "'Nope'")
    assert bench.broker.topics.get("Nope") is None, "pulls make no topics"


def test_a_topic_that_is_not_readable(bench: Bench) -> None:
    bench.create_topic(perm=2)
    refused(bench.pull(), 16, "perm=2", kind="3")


@pytest.mark.parametrize("queue", [4, -1, 1 << 30])
def test_a_queue_that_is_not_there(bench: Bench, queue: int) -> None:
    bench.create_topic(readQueueNums=4, writeQueueNums=8)
    refused(bench.pull(queue=queue), 29, f"queue {queue}", "4 read queues")


@pytest.mark.parametrize("tags", ["||", " || ", "|| |   ||"[:2]])
def test_an_expression_without_a_tag(bench: Bench, tags: str) -> None:
    bench.create_topic()
    refused(bench.pull(tags=tags), 23, "names no tag")


def test_an_expression_beyond_all_measure(bench: Bench) -> None:
    bench.create_topic()
    refused(bench.pull(tags="x" * 16_385), 23, "16385", "16384")
    refused(bench.pull(tags="||".join(f"t{n}" for n in range(1025))), 23, "1025", "1024")


def test_the_checks_come_in_rocketmqs_order(benches: Benches) -> None:
    bench = benches(permission=2, is_lite_pull_enabled=False, is_group_auto_created=False)
    wrong = {"topic": "Nope", "queue": 99, "tags": "||", "code": C.LITE_PULL_MESSAGE}
    refused(bench.pull(**wrong), 16, "not readable", kind="1")
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"brokerPermission=6")
    refused(bench.pull(**wrong), 16, "litePullMessageEnable", kind="1")
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"litePullMessageEnable=true")
    refused(bench.pull(**wrong), 26)
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"autoCreateSubscriptionGroup=true")
    refused(bench.pull(**wrong), 17)
    bench.create_topic(perm=2)
    wrong["topic"] = "T"
    refused(bench.pull(**wrong), 16, kind="3")
    bench.create_topic()
    refused(bench.pull(**wrong), 29)
    wrong["queue"] = 0
    refused(bench.pull(**wrong), 23)
    assert bench.pull(**(wrong | {"tags": "*"})).code == 19


# --------------------------------------------------------------------- subscriptions by heartbeat


def registered_pull(bench: Bench, **how: Any) -> Any:
    return bench.pull(flags=0, tags=None, **how)


def test_a_pull_before_any_heartbeat(bench: Bench) -> None:
    bench.create_topic()
    refused(registered_pull(bench), 24, "'G'", "heartbeat")


def test_a_pull_of_a_topic_that_the_group_does_not_subscribe_to(bench: Bench) -> None:
    bench.create_topic()
    bench.beat(topics={"Other": "*"})
    refused(registered_pull(bench), 24, "'T'")


def test_a_pull_that_knows_a_newer_subscription(bench: Bench) -> None:
    bench.create_topic()
    bench.beat(version=10)
    refused(registered_pull(bench, sub_version=11), 25, "older")
    assert registered_pull(bench, sub_version=10).code == 19


def test_a_group_that_may_not_broadcast(bench: Bench) -> None:
    bench.create_topic()
    bench.ask(
        C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        None,
        b'{"groupName":"G","consumeBroadcastEnable":false}',
    )
    bench.beat(model="BROADCASTING")
    refused(registered_pull(bench), 16, "broadcast", kind="4")


def test_the_subscription_of_the_heartbeat_filters(bench: Bench) -> None:
    fill(bench, b"a", props={"TAGS": "A"})
    fill(bench, b"b", props={"TAGS": "B"})
    fill(bench, b"c", props={"TAGS": "C"})
    bench.beat(topics={"T": "A || C"})
    assert bodies_of(registered_pull(bench)) == [b"a", b"c"]


# --------------------------------------------------------------------------------------- filters


@pytest.fixture
def tagged(bench: Bench) -> Bench:
    for tag in ("A", "B", "test-1", "test-2", "tes", "Ätna", "😀"):
        bench.sent(body=tag.encode(), props={"TAGS": tag})
    bench.sent(body=b"none")
    return bench


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("*", "A B test-1 test-2 tes Ätna 😀 none"),
        ("", "A B test-1 test-2 tes Ätna 😀 none"),
        (None, "A B test-1 test-2 tes Ätna 😀 none"),
        ("A", "A"),
        ("A||B", "A B"),
        ("  A  ||  B ||", "A B"),
        ("A || *", "A B test-1 test-2 tes Ätna 😀 none"),
        ("Ätna || 😀", "Ätna 😀"),
        ("test-*", "test-1 test-2"),
        ("test-* || A", "A test-1 test-2"),
        ("te*||😀", "test-1 test-2 tes 😀"),
        ("test-1*", "test-1"),
        ("nothing-*", ""),
    ],
)
def test_tag_expressions(tagged: Bench, expression: str | None, found: str) -> None:
    answer = tagged.pull(tags=expression)
    assert [body.decode() for body in bodies_of(answer)] == found.split()
    assert answer.code == (0 if found else 20)
    assert offsets_of(answer) == (8, 0, 8)


def test_an_exact_tag_is_decided_by_its_hash_alone(bench: Bench) -> None:
    assert java_hash("Aa") == java_hash("BB")
    fill(bench, b"collides", props={"TAGS": "BB"})
    assert bodies_of(bench.pull(tags="Aa")) == [b"collides"], "the client compares the text"


def test_a_prefix_is_decided_by_the_text(bench: Bench) -> None:
    fill(bench, b"collides", props={"TAGS": "BB"})
    assert bench.pull(tags="Aa || C*").code == 20


def test_a_negative_hash_is_matched(bench: Bench) -> None:
    tag = next(f"tag{n}" for n in range(1000) if java_hash(f"tag{n}") < 0)
    fill(bench, b"x", props={"TAGS": tag})
    assert bodies_of(bench.pull(tags=tag)) == [b"x"]


def test_a_filter_examines_at_most_800_entries(bench: Bench) -> None:
    bench.create_topic()
    frames = [
        (bench.conn, bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(props={"TAGS": "x"}), b"b"))
        for _ in range(900)
    ]
    bench.turn(*frames)
    answer = bench.pull(tags="y")
    assert (answer.code, offsets_of(answer)) == (20, (800, 0, 900))


# ----------------------------------------------------------------------------------------- figures


def test_found_and_missed_pulls_are_counted(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    bench.pull()
    bench.pull(offset=2)
    counters = bench.broker.stats.counters
    assert (counters.get_found, counters.get_count, counters.get_miss) == (1, 2, 1)


def test_the_bytes_of_a_pull_are_the_stored_records(bench: Bench) -> None:
    fill(bench, b"a")
    (message,) = record.decode_all(bench.pull().body)
    raw = bench.ask(C.VIEW_MESSAGE_BY_ID, {"offset": message.log_offset}).body
    assert raw == bench.pull().body
