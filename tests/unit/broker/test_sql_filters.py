"""SQL92 subscriptions on the server: heartbeats, pulls, long polls, codes, consumerFilter.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cometmq.broker import bloom
from cometmq.broker.sql92 import SqlFilter
from cometmq.wire import fastjson
from cometmq.wire.codes import PullFlag
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from .conftest import Benches
from .harness import NOW_MS, Bench, bodies_of, offsets_of

DAY_MS = 86_400_000
FILE = "config/consumerFilter.json"


@pytest.fixture
def bench(benches: Benches) -> Bench:
    made = benches()
    made.create_topic()
    return made


def fill(bench: Bench, *amounts: str, **how: Any) -> None:
    for amount in amounts:
        bench.sent(body=amount.encode(), props={"amount": amount}, **how)


def sql_beat(bench: Bench, expression: str, version: int = 1, **how: Any) -> Frame:
    answer = bench.beat(topics={"T": expression}, version=version, kind="SQL92", **how)
    assert answer.code == 0
    return answer


def registered_pull(bench: Bench, version: int = 1, **how: Any) -> Frame:
    return bench.pull(flags=0, tags=None, sub_version=version, **how)


def refused(answer: Frame, code: int, *words: str) -> None:
    assert answer.code == code, answer.remark
    for word in words:
        assert word in str(answer.remark), answer.remark


def check(bench: Bench, **subscription: Any) -> Frame:
    body = {"clientId": "c", "group": "G", "subscriptionData": {"topic": "T"} | subscription}
    return bench.ask(C.CHECK_CLIENT_CONFIG, None, fastjson.dumps(body))


def stored(bench: Bench) -> dict[str, Any]:
    raw = bench.files.read(FILE)
    assert raw is not None
    found = json.loads(raw)
    assert isinstance(found, dict)
    return found


# ------------------------------------------------------------------------------------------- pulls


def test_the_expression_of_a_heartbeat_filters(bench: Bench) -> None:
    fill(bench, "1", "7", "3", "9")
    sql_beat(bench, "amount > 5")
    answer = registered_pull(bench)
    assert bodies_of(answer) == [b"7", b"9"]
    assert offsets_of(answer) == (4, 0, 4)


def test_the_expression_of_a_pull_filters(bench: Bench) -> None:
    fill(bench, "1", "7", "3", "9")
    assert bodies_of(bench.pull(tags="amount > 5", kind="SQL92")) == [b"7", b"9"]
    assert bodies_of(bench.pull(tags="amount < 5", kind="SQL92")) == [b"1", b"3"]


def test_nothing_to_its_taste(bench: Bench) -> None:
    fill(bench, "1", "2")
    answer = bench.pull(tags="amount > 5", kind="SQL92")
    assert answer.code == 20
    assert offsets_of(answer) == (2, 0, 2)


def test_what_throws_and_what_is_null_is_not_delivered(bench: Bench) -> None:
    fill(bench, "6.5", "x", "8")
    bench.sent(body=b"none")
    assert bodies_of(bench.pull(tags="amount > 5", kind="SQL92")) == [b"8"]
    assert bodies_of(bench.pull(tags="amount IS NULL", kind="SQL92")) == [b"none"]


def test_every_property_of_the_record_can_be_asked(bench: Bench) -> None:
    bench.sent(body=b"x", props={"TAGS": "paid", "KEYS": "k1 k2", "city": "Köln"})
    bench.sent(body=b"y", props={"TAGS": "open", "KEYS": "k3"})
    for expression in (
        "TAGS = 'paid'",
        "KEYS CONTAINS 'k2'",
        "city = 'Köln'",
        "city STARTSWITH 'K' AND TAGS IN ('paid', 'closed')",
        "UNIQ_KEY IS NOT NULL AND TAGS <> 'open'",
        "CLUSTER = 'DefaultCluster' AND TAGS = 'paid'",
    ):
        assert bodies_of(bench.pull(tags=expression, kind="SQL92")) == [b"x"], expression


def test_a_pull_does_not_teach_the_compiled_path(benches: Benches) -> None:
    """Whether it is built or not: the same pull again and again is filtered each time."""
    bench = benches()
    bench.create_topic()
    fill(bench, "1", "7")
    sql_beat(bench, "amount > 5")
    for _ in range(3):
        frame = bench.frame(C.PULL_MESSAGE, bench.pull_ext(flags=0, tags=None, sub_version=1))
        bench.turn((bench.conn, frame))
        answer = bench.answer(frame.opaque)
        assert answer is not None and bodies_of(answer) == [b"7"]


def test_an_expression_of_many_nodes_scans_less(bench: Bench) -> None:
    fill(bench, *["1"] * 300)
    many = " OR ".join(["amount > 5"] * 170)
    answer = bench.pull(tags=many, kind="SQL92")
    assert answer.code == 20
    assert 100 < offsets_of(answer)[0] < 300


def test_units_with_an_ext_address_are_judged_by_their_record(bench: Bench) -> None:
    """A store that RocketMQ wrote with enableConsumeQueueExt has addresses for tag codes."""
    fill(bench, "1", "7")
    queue = bench.store._queues.need("T", 3)
    for offset in (0, 1):
        log_offset, size, _ = bench.store._queues.need("T", 0).unit(offset)
        queue.put(offset, log_offset, size, -(2**63) + 40 * offset)
    assert bodies_of(bench.pull(queue=3, tags="amount > 5", kind="SQL92")) == [b"7"]
    assert len(bodies_of(bench.pull(queue=3, tags="A"))) == 2, "the client compares tags again"


# ------------------------------------------------------------------------------------------- codes


def test_a_pull_with_an_expression_that_means_nothing(bench: Bench) -> None:
    refused(bench.pull(tags="amount > 'x'", kind="SQL92"), 23, "character 10", "only numbers")
    refused(bench.pull(tags="", kind="SQL92"), 23, "without an expression")
    refused(bench.pull(tags=None, kind="SQL92"), 23, "without an expression")
    refused(bench.pull(tags="x", kind="JAVA"), 23, "'JAVA'", "SQL92")


def test_a_heartbeat_with_an_expression_that_means_nothing(bench: Bench) -> None:
    """As in RocketMQ the heartbeat is answered with 0 and the pull with 27; ours says why."""
    sql_beat(bench, "amount > 'x'")
    refused(registered_pull(bench), 27, "character 10", "only numbers")
    bench.beat(topics={"T": "x"}, kind="JAVA", version=2)
    refused(registered_pull(bench, 2), 27, "'JAVA'")


def test_a_filter_older_than_the_pull(bench: Bench) -> None:
    sql_beat(bench, "amount > 5", version=5)
    refused(registered_pull(bench, 6), 25)
    entry = bench.broker.sql_filters.get("G", "T")
    assert entry is not None
    entry.client_version = 4
    refused(registered_pull(bench, 5), 28, "older")


def test_filters_on_properties_can_be_switched_off(benches: Benches) -> None:
    bench = benches(is_property_filter_enabled=False)
    bench.create_topic()
    sql_beat(bench, "amount > 5")
    refused(registered_pull(bench), 1, "SQL92", "enablePropertyFilter")
    refused(bench.pull(tags="amount > 5", kind="SQL92"), 1, "SQL92", "enablePropertyFilter")
    refused(check(bench, subString="a > 1", expressionType="SQL92"), 1, "SQL92")
    assert check(bench, subString="A", expressionType="TAG").code == 0
    assert bench.pull(tags="A").code == 19
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"enablePropertyFilter=true")
    assert registered_pull(bench).code == 19


def test_the_check_before_a_consumer_starts(bench: Bench) -> None:
    assert check(bench, subString="a > 1 AND b = 'x'", expressionType="SQL92").code == 0
    answer = check(bench, subString="a > 1 AND b != 'x'", expressionType="SQL92")
    refused(answer, 23, "character 13", "'!'")
    refused(check(bench, subString="", expressionType="SQL92"), 23)
    refused(check(bench, subString="x", expressionType="JAVA"), 23, "'JAVA'")


def test_only_so_many_filters_are_kept(benches: Benches) -> None:
    bench = benches(max_sql_filters=1)
    bench.create_topic()
    sql_beat(bench, "amount > 5", group="G1")
    sql_beat(bench, "amount > 6", group="G2")
    assert bench.broker.sql_filters.refused_by_limit == 1
    refused(registered_pull(bench, group="G2"), 27, "maxSqlFilters")
    sql_beat(bench, "amount > 7", group="G1", version=2)
    assert registered_pull(bench, 2, group="G1").code == 19


# -------------------------------------------------------------------------------------- long polls


def test_only_a_message_that_matches_wakes(bench: Bench) -> None:
    opaque = bench.hold(tags="amount > 5", kind="SQL92")
    fill(bench, "1", "x")
    bench.sent(body=b"none")
    assert bench.answer(opaque) is None
    fill(bench, "7")
    answer = bench.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"7"]
    assert offsets_of(answer) == (4, 0, 4)


def test_a_held_pull_of_a_heartbeats_expression(bench: Bench) -> None:
    sql_beat(bench, "amount > 5")
    opaque = bench.post_pull(flags=int(PullFlag.SUSPEND), tags=None, sub_version=1)
    fill(bench, "1")
    assert bench.answer(opaque) is None
    fill(bench, "9")
    answer = bench.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"9"]


def test_each_of_many_holds_by_its_own_filter(bench: Bench) -> None:
    held = {
        expression: bench.hold(tags=expression, kind=kind)
        for expression, kind in (
            ("amount > 5", "SQL92"),
            ("amount > 50", "SQL92"),
            ("*", "TAG"),
            ("paid", "TAG"),
        )
    }
    fill(bench, "7")
    woken = [expression for expression, opaque in held.items() if bench.answer(opaque) is not None]
    assert woken == ["amount > 5", "*"]


def test_a_hold_that_nothing_matched_ends_behind_what_it_looked_at(bench: Bench) -> None:
    opaque = bench.hold(tags="amount > 5", kind="SQL92")
    fill(bench, "1", "2")
    bench.advance(15_000)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 20
    assert offsets_of(answer) == (2, 0, 2)


# ------------------------------------------------------------------------------- RocketMQ's rules


def entry(bench: Bench, group: str = "G", topic: str = "T") -> tuple[str, int, int, int]:
    found = bench.broker.sql_filters.get(group, topic)
    assert found is not None
    return found.compiled.expression, found.client_version, found.born_ms, found.dead_ms


def test_versions_of_a_filter(bench: Bench) -> None:
    sql_beat(bench, "a = 1", version=5)
    assert entry(bench) == ("a = 1", 5, NOW_MS, 0)
    bench.advance(100)
    sql_beat(bench, "a = 2", version=4)
    sql_beat(bench, "a = 3", version=5)
    assert entry(bench) == ("a = 1", 5, NOW_MS, 0), "not newer: ignored"
    sql_beat(bench, "a = 1", version=6)
    assert entry(bench) == ("a = 1", 6, NOW_MS, 0), "the same text keeps its birth"
    sql_beat(bench, "a = 4", version=7)
    assert entry(bench) == ("a = 4", 7, NOW_MS + 100, 0)
    sql_beat(bench, "a = ", version=8)
    assert bench.broker.sql_filters.get("G", "T") is None, "its client must hear of it"
    assert bench.broker.sql_filters.count == 0


def test_a_group_that_goes_leaves_a_dead_filter_that_is_revived(bench: Bench) -> None:
    other = bench.connect()
    sql_beat(bench, "a = 1", version=5, conn=other)
    bench.disconnect(other)
    bench.advance(10_000)
    assert entry(bench)[3] == bench.now_ms
    bench.advance(1_000)
    sql_beat(bench, "a = 1", version=5)
    assert entry(bench) == ("a = 1", 5, NOW_MS, 0)
    assert registered_pull(bench, 5).code == 19


def test_a_topic_that_is_no_longer_subscribed_is_dead(bench: Bench) -> None:
    bench.beat(topics={"T": "a = 1", "U": "b = 1"}, kind="SQL92", version=1)
    bench.advance(50)
    sql_beat(bench, "a = 1", version=1)
    assert entry(bench, topic="U")[3] == NOW_MS + 50
    assert entry(bench, topic="T")[3] == 0


def test_the_dead_are_forgotten_after_a_day(bench: Bench) -> None:
    other = bench.connect()
    sql_beat(bench, "a = 1", conn=other)
    bench.disconnect(other)
    bench.advance(10_000)
    bench.now_ms += DAY_MS - 1
    bench.tick()
    assert bench.broker.sql_filters.count == 1
    bench.advance(11_000)
    assert bench.broker.sql_filters.count == 0
    bench.advance(11_000)
    assert stored(bench) == {"filterDataByTopic": {}}


def test_from_tags_to_sql_and_back(bench: Bench) -> None:
    bench.sent(body=b"A7", props={"TAGS": "A", "amount": "7"})
    bench.sent(body=b"B9", props={"TAGS": "B", "amount": "9"})
    bench.beat(topics={"T": "A"}, version=1)
    assert bodies_of(registered_pull(bench, 1)) == [b"A7"]
    sql_beat(bench, "amount > 8", version=2)
    assert bodies_of(registered_pull(bench, 2)) == [b"B9"]
    bench.beat(topics={"T": "A"}, version=3)
    assert bodies_of(registered_pull(bench, 3)) == [b"A7"]


def test_two_groups_with_one_expression_share_it(bench: Bench) -> None:
    sql_beat(bench, "amount = 5", group="G1")
    sql_beat(bench, "amount = 5", group="G2")
    one, two = (bench.broker.sql_filters.filter_of(group, "T") for group in ("G1", "G2"))
    assert isinstance(one, SqlFilter) and one is two


# -------------------------------------------------------------------------------------- retry topic


def test_filters_of_the_original_topic_on_a_retry_topic(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    sql_beat(bench, "amount > 5")
    retry = {"topic": "%RETRY%G", "queue": 0}
    for amount, origin in (("1", "T"), ("7", "T"), ("2", "Other")):
        bench.sent(
            topic="%RETRY%G",
            body=amount.encode() + origin.encode(),
            props={"amount": amount, "RETRY_TOPIC": origin},
            queue=0,
        )
    everything = [b"1T", b"7T", b"2Other"]
    assert bodies_of(bench.pull(**retry, tags="amount > 0", kind="SQL92")) == everything
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"filterSupportRetry=true")
    assert bodies_of(bench.pull(**retry, tags="amount > 0", kind="SQL92")) == [b"7T", b"2Other"]
    assert bodies_of(bench.pull(**retry, tags="*")) == everything, "what push consumers ask for"


# --------------------------------------------------------------------------------------- the file


def test_the_file_is_rocketmqs(bench: Bench) -> None:
    sql_beat(bench, "amount > 5", version=77)
    bench.advance(10_000)
    assert stored(bench) == {
        "filterDataByTopic": {
            "T": {
                "groupFilterData": {
                    "G": {
                        "bloomFilterData": {"bitNum": 112, "bitPos": [24, 26, 83]},
                        "bornTime": NOW_MS,
                        "clientVersion": 77,
                        "consumerGroup": "G",
                        "dead": False,
                        "deadTime": 0,
                        "expression": "amount > 5",
                        "expressionType": "SQL92",
                        "topic": "T",
                    }
                },
                "topic": "T",
            }
        }
    }


@pytest.mark.parametrize(
    ("text", "positions"),  # from RocketMQ 5.5's BloomFilter.calcBitPositions
    [
        ("G#T", [24, 26, 83]),
        ("", [0, 0, 0]),
        ("CID_abc#a-rather-long-topic-name-that-takes-more-than-one-block", [76, 56, 66]),
    ],
)
def test_bloom_positions(text: str, positions: list[int]) -> None:
    assert bloom.positions(text) == positions


def test_filters_survive_a_restart_and_are_dead_until_their_group_comes(benches: Benches) -> None:
    first = benches()
    first.create_topic()
    sql_beat(first, "amount > 5", version=9)
    fill(first, "1", "7")
    first.advance(20_000)
    first.stop()
    first.close()
    bench = benches(now_ms=NOW_MS + 60_000)
    assert entry(bench) == ("amount > 5", 9, NOW_MS, NOW_MS + 30_000)
    refused(registered_pull(bench, 9), 24)
    sql_beat(bench, "amount > 5", version=9)
    assert entry(bench) == ("amount > 5", 9, NOW_MS, 0)
    assert bodies_of(registered_pull(bench, 9)) == [b"7"]


def test_a_broker_without_sql_writes_no_file(bench: Bench) -> None:
    bench.beat(topics={"T": "A || B"})
    bench.advance(30_000)
    bench.stop()
    assert bench.files.read(FILE) is None


def test_a_file_by_rocketmq_and_entries_that_make_no_sense(benches: Benches) -> None:
    first = benches()
    first.close()
    good = {
        "bornTime": NOW_MS - 1000,
        "clientVersion": 3,
        "consumerGroup": "G",
        "dead": True,
        "deadTime": NOW_MS - 500,
        "expression": "a > 1",
        "expressionType": "SQL92",
        "topic": "T",
    }
    groups = {
        "G": good,
        "NoText": {**good, "expression": None},
        "BadText": {**good, "expression": "a >"},
        "BadKind": {**good, "expressionType": "JAVA"},
        "BadTime": {**good, "bornTime": "x"},
        "Number": 5,
        "../../x": good,
    }
    content = {
        "filterDataByTopic": {
            "T": {"groupFilterData": groups, "topic": "T"},
            "U": {"groupFilterData": 7},
            "V": None,
            "W": [],
            "a/../b": {"groupFilterData": {"G": good}},
        }
    }
    first.files.write(FILE, json.dumps(content).encode())
    bench = benches()
    assert list(bench.broker.sql_filters.table) == ["G"]
    assert entry(bench) == ("a > 1", 3, NOW_MS - 1000, NOW_MS - 500)


@pytest.mark.parametrize("content", [b'{"filterDataByTopic":[]}', b"{}", b"[]", b"junk", b""])
def test_a_file_that_is_none(benches: Benches, content: bytes) -> None:
    first = benches()
    first.close()
    first.files.write(FILE, content)
    assert benches().broker.sql_filters.count == 0


def test_what_is_kept_is_shown(benches: Benches) -> None:
    bench = benches(max_sql_filters=1)
    sql_beat(bench, "a = 1", group="G1")
    sql_beat(bench, "a = 1", group="G2")
    table = bench.runtime()
    assert (table["cometmqSqlFilters"], table["cometmqSqlFiltersLimitReached"]) == ("1", "1")


def test_one_pull_searches_so_much_text_and_no_more(bench: Bench) -> None:
    bench.create_topic()
    text = "a" * 20_000
    for _ in range(20):
        bench.sent(props={"p": text})
    bench.sent(body=b"wanted", props={"p": "b"})
    expression = " OR ".join(["p CONTAINS 'b'"] * 100)
    offset, pulls = 0, 0
    while True:
        answer = bench.pull(offset=offset, tags=expression, kind="SQL92")
        pulls += 1
        following = int(answer.ext["nextBeginOffset"])
        if answer.code == 0:
            break
        assert answer.code == 20 and offset < following <= offset + 5
        offset = following
    assert bodies_of(answer) == [b"wanted"] and pulls >= 5
