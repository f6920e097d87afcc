"""Clients that come, stay and go: heartbeats of every dialect, members, notices, conflicts."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from cometmq.wire import fastjson
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.hashing import java_hash

from .conftest import Benches
from .harness import NAMESRV, Bench, StubNameServer, bodies_of, consumer_body, heartbeat_body


def beat_raw(bench: Bench, body: dict[str, Any], **how: Any) -> Any:
    return bench.ask(C.HEART_BEAT, None, msgspec.json.encode(body), **how)


def members(bench: Bench, group: str = "G") -> Any:
    return bench.json(C.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})["consumerIdList"]


def notices(bench: Bench, conn: int) -> list[str]:
    found = bench.requests_to(conn)
    assert all(one.code == C.NOTIFY_CONSUMER_IDS_CHANGED and one.is_oneway for one in found)
    return [one.ext["consumerGroup"] for one in found]


# -------------------------------------------------------------------------------------- heartbeats


def test_a_heartbeat_makes_the_group_its_retry_topic_and_its_members(bench: Bench) -> None:
    answer = bench.beat("G", {"T": "A || B"}, client="c1", producers=("P",))
    assert answer.code == 0
    assert answer.version >= 232, "SQL92 consumers look at it"
    assert bench.broker.groups.get("G") is not None
    retry = bench.broker.topics.get("%RETRY%G")
    assert retry is not None and (retry.readQueueNums, retry.perm) == (1, 6)
    assert members(bench) == ["c1"]
    found = bench.json(C.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "P"})
    assert [one["clientId"] for one in found["connectionSet"]] == ["c1"]


def test_the_retry_topic_is_told_to_the_name_servers(benches: Benches) -> None:
    server = StubNameServer(NAMESRV)
    bench = benches(namesrv=[server])
    bench.beat("G")
    assert "%RETRY%G" in server.topics


def test_a_group_without_retry_queues_has_no_retry_topic(bench: Bench) -> None:
    bench.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, b'{"groupName":"G","retryQueueNums":0}')
    bench.beat("G")
    assert bench.broker.topics.get("%RETRY%G") is None


def test_an_unknown_group_is_skipped_when_groups_are_not_made(benches: Benches) -> None:
    bench = benches(is_group_auto_created=False)
    assert bench.beat("G", producers=("P",)).code == 0
    assert "G" not in bench.broker.members.consumers
    assert "P" in bench.broker.members.producers


CPP = {
    "clientID": "1.2.3.4@9",
    "consumerDataSet": [
        {
            "consumeFromWhere": 4,
            "consumeType": 1,
            "groupName": "G",
            "messageModel": 1,
            "subscriptionDataSet": [
                {"subString": "A || B", "subVersion": "1700000000001", "tagsSet": [], "topic": "T"}
            ],
        }
    ],
}
GO = {
    "clientID": "1.2.3.4@9",
    "producerDataSet": [{"groupName": "P"}],
    "consumerDataSet": [
        {
            "groupName": "G",
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "Clustering",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [
                {
                    "ClassFilterMode": False,
                    "topic": "T",
                    "subString": "A || B",
                    "tagsSet": ["A", "B"],
                    "codeSet": ["65", "66"],
                    "subVersion": 1700000000001,
                    "expressionType": "TAG",
                }
            ],
            "unitMode": False,
        }
    ],
}
NODE = {
    "clientID": "1.2.3.4@9",
    "producerDataSet": None,
    "consumerDataSet": [
        {
            "groupName": "G",
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [
                {
                    "classFilterMode": False,
                    "topic": "T",
                    "subString": "A || B",
                    "tagsSet": ["A", "B"],
                    "codeSet": ["65", "66"],
                    "subVersion": 1700000000001,
                }
            ],
            "unitMode": False,
        }
    ],
}


@pytest.mark.parametrize("body", [CPP, GO, NODE], ids=["cpp", "go", "node"])
def test_heartbeats_of_other_languages(bench: Bench, body: dict[str, Any]) -> None:
    for tag in ("A", "B", "C"):
        bench.sent(body=tag.encode(), props={"TAGS": tag})
    assert beat_raw(bench, body).code == 0
    found = bench.json(C.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert found["consumeType"] == "CONSUME_PASSIVELY"
    assert found["messageModel"] == "CLUSTERING"
    assert found["consumeFromWhere"] == "CONSUME_FROM_FIRST_OFFSET"
    subscription = found["subscriptionTable"]["T"]
    assert (subscription["subVersion"], subscription["expressionType"]) == (1700000000001, "TAG")
    assert sorted(subscription["codeSet"]) == [java_hash("A"), java_hash("B")]
    answer = bench.pull(flags=0, tags=None, sub_version=1700000000001)
    assert bodies_of(answer) == [b"A", b"B"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"consumerDataSet":[3]}', b'{"consumerDataSet":[{"groupName":[]}]}'],
)
def test_a_heartbeat_that_is_none_is_refused(bench: Bench, body: bytes) -> None:
    before = bench.state()
    answer = bench.ask(C.HEART_BEAT, None, body)
    assert answer.code == 29
    assert answer.remark is not None and "HEART_BEAT" in answer.remark
    assert bench.state() == before


def test_the_newer_subscription_of_a_group_wins(bench: Bench) -> None:
    other = bench.connect()
    for tag in ("A", "B"):
        bench.sent(body=tag.encode(), props={"TAGS": tag})
    bench.beat(topics={"T": "A"}, version=10)
    bench.beat(topics={"T": "B"}, version=9, client="c2", conn=other)
    assert bodies_of(bench.pull(flags=0, tags=None)) == [b"A"]
    bench.beat(topics={"T": "B"}, version=11, client="c2", conn=other)
    assert bodies_of(bench.pull(flags=0, tags=None)) == [b"B"]


def test_topics_missing_from_a_heartbeat_are_unsubscribed(bench: Bench) -> None:
    bench.create_topic()
    bench.beat(topics={"T": "*", "U": "*"})
    bench.beat(topics={"U": "*"}, version=2)
    assert bench.pull(flags=0, tags=None).code == 24


def test_a_subscription_that_can_not_be_kept_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.sent(body=b"a", props={"TAGS": "A"})
    bench.beat(topics={"T": "A"}, version=1)
    too_many = " || ".join(f"t{number}" for number in range(1025))
    answer = bench.beat(topics={"T": too_many}, version=2)
    assert answer.code == 23 and "1025" in str(answer.remark)
    assert bodies_of(bench.pull(flags=0, tags=None, sub_version=1)) == [b"a"]
    assert bench.pull(flags=0, tags=None, sub_version=2).code == 25


def test_one_bad_group_does_not_take_the_others_along(bench: Bench) -> None:
    too_many = " || ".join(f"t{number}" for number in range(1025))
    body = heartbeat_body(
        "c1", [consumer_body("Bad", {"T": too_many}), consumer_body("Good", {"T": "*"})], ("P",)
    )
    assert bench.ask(C.HEART_BEAT, None, body).code == 23
    assert members(bench, "Good") == ["c1"]
    assert "P" in bench.broker.members.producers


# ------------------------------------------------------------------------------------- version two


def test_a_first_fingerprint_is_a_change_and_the_same_again_is_none(bench: Bench) -> None:
    first = bench.beat(fingerprint=77)
    assert first.ext == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    assert bench.beat(fingerprint=77).ext["IS_SUB_CHANGE"] == "false"
    assert bench.beat(fingerprint=-78).ext["IS_SUB_CHANGE"] == "true"


def test_version_one_always_counts_as_changed(bench: Bench) -> None:
    bench.beat()
    assert bench.beat().ext["IS_SUB_CHANGE"] == "true"


def test_a_heartbeat_without_subscriptions_keeps_those_that_are_there(bench: Bench) -> None:
    bench.create_topic()
    bench.beat(topics={"T": "A"}, fingerprint=77)
    answer = bench.beat(topics={"Other": "B"}, fingerprint=77, without_sub=True)
    assert answer.ext["IS_SUB_CHANGE"] == "false"
    assert bench.pull(flags=0, tags=None).code == 19


def test_a_heartbeat_without_subscriptions_joins(bench: Bench) -> None:
    other = bench.connect()
    bench.beat(fingerprint=77)
    bench.beat(fingerprint=77, without_sub=True, client="c2", conn=other)
    assert members(bench) == ["c1", "c2"]


def test_a_broker_that_has_no_subscription_goes_on_asking_for_it(bench: Bench) -> None:
    """As after a restart: until the full heartbeat came, `nothing changed` would be a lie."""
    assert bench.beat(fingerprint=77, without_sub=True).ext["IS_SUB_CHANGE"] == "true"
    assert bench.beat(fingerprint=77, without_sub=True).ext["IS_SUB_CHANGE"] == "true"
    bench.beat(fingerprint=77)
    assert bench.beat(fingerprint=77, without_sub=True).ext["IS_SUB_CHANGE"] == "false"


# ----------------------------------------------------------------------------------------- notices


def test_all_members_hear_of_one_that_joins(bench: Bench) -> None:
    first, second = bench.connect(), bench.connect()
    bench.beat(client="c1", conn=first)
    assert notices(bench, first) == ["G"]
    bench.beat(client="c2", conn=second)
    assert notices(bench, first) == ["G"]
    assert notices(bench, second) == ["G"]


def test_nobody_is_told_when_nothing_changed(bench: Bench) -> None:
    bench.beat()
    notices(bench, bench.conn)
    bench.beat()
    assert notices(bench, bench.conn) == []


def test_members_hear_of_a_changed_set_of_topics(bench: Bench) -> None:
    bench.beat(topics={"T": "*"})
    notices(bench, bench.conn)
    bench.beat(topics={"T": "*", "U": "*"}, version=2)
    assert notices(bench, bench.conn) == ["G"]
    bench.beat(topics={"U": "*"}, version=3)
    assert notices(bench, bench.conn) == ["G"]


def pair(bench: Bench, **how: Any) -> tuple[int, int]:
    first, second = bench.connect(), bench.connect()
    bench.beat(client="c1", conn=first, **how)
    bench.beat(client="c2", conn=second, **how)
    bench.requests_to(first)
    bench.requests_to(second)
    return first, second


def leave(bench: Bench, conn: int, client: str, **groups: str) -> Any:
    return bench.ask(C.UNREGISTER_CLIENT, {"clientID": client} | groups, conn=conn)


def test_members_hear_of_one_that_leaves(bench: Bench) -> None:
    first, second = pair(bench)
    assert leave(bench, second, "c2", consumerGroup="G").code == 0
    assert notices(bench, first) == ["G"]
    assert notices(bench, second) == []
    assert members(bench) == ["c1"]


def test_members_hear_of_a_lost_connection(bench: Bench) -> None:
    first, second = pair(bench)
    bench.disconnect(second)
    assert notices(bench, first) == ["G"]
    assert members(bench) == ["c1"]


def test_a_stranger_that_leaves_is_no_news(bench: Bench) -> None:
    first, _ = pair(bench)
    assert leave(bench, bench.conn, "c9", consumerGroup="G").code == 0
    assert notices(bench, first) == []


def test_a_notice_speaks_the_members_serialization(bench: Bench) -> None:
    bench.beat(serialize=1)
    assert [one.serialize for one in bench.requests_to(bench.conn)] == [1]


@pytest.mark.parametrize("way", ["leave", "lost"])
def test_broadcasting_groups_are_not_told(bench: Bench, way: str) -> None:
    first, second = pair(bench, model="BROADCASTING")
    if way == "leave":
        leave(bench, second, "c2", consumerGroup="G")
    else:
        bench.disconnect(second)
    assert notices(bench, first) == []


@pytest.mark.parametrize("way", ["join", "leave", "lost"])
def test_a_group_that_wants_no_notices_gets_none(bench: Bench, way: str) -> None:
    body = b'{"groupName":"G","notifyConsumerIdsChangedEnable":false}'
    bench.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)
    first, second = bench.connect(), bench.connect()
    bench.beat(client="c1", conn=first)
    bench.beat(client="c2", conn=second)
    if way == "leave":
        leave(bench, second, "c2", consumerGroup="G")
    elif way == "lost":
        bench.disconnect(second)
    assert notices(bench, first) == []


def test_notices_can_be_switched_off_for_the_broker(benches: Benches) -> None:
    bench = benches(notify_members=False)
    bench.beat()
    assert notices(bench, bench.conn) == []


def test_c_plus_plus_unregisters_with_an_empty_group(bench: Bench) -> None:
    bench.beat(producers=("P",))
    assert leave(bench, bench.conn, "c1", consumerGroup="", producerGroup="P").code == 0
    assert bench.broker.members.producers == {}
    assert members(bench) == ["c1"]


def test_an_empty_group_answers_1(bench: Bench) -> None:
    answer = bench.ask(C.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "Nobody"})
    assert answer.code == 1
    assert "'Nobody'" in str(answer.remark)


def test_one_client_on_two_connections_is_one_id(bench: Bench) -> None:
    first, second = bench.connect(), bench.connect()
    bench.beat(client="c1", conn=first)
    bench.beat(client="c1", conn=second)
    assert members(bench) == ["c1"]


# ------------------------------------------------------------------------------------------ expiry


def test_a_silent_client_is_dropped_after_two_minutes(bench: Bench) -> None:
    first, second = pair(bench)
    bench.advance(115_000)
    bench.beat(client="c1", conn=first)
    bench.advance(4_000)
    assert members(bench) == ["c1", "c2"]
    bench.advance(12_000)
    assert [close.conn for close in bench.closed] == [second]
    assert "c2" in bench.closed[0].reason and "120000 ms" in bench.closed[0].reason
    assert members(bench) == ["c1"]
    assert notices(bench, first) == ["G"]


def test_a_silent_producer_is_dropped_too(bench: Bench) -> None:
    bench.beat("", producers=("P",))
    bench.advance(131_000)
    assert bench.broker.members.producers == {}
    assert len(bench.closed) == 1


def test_a_connection_that_never_sent_a_heartbeat_stays(bench: Bench) -> None:
    bench.advance(300_000)
    assert bench.closed == []


# --------------------------------------------------------------------------------------- conflicts


def test_members_that_differ_are_logged_once_counted_and_shown(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    other = bench.connect()
    bench.beat(topics={"T": "A", "%RETRY%G": "*"}, client="c1")
    with caplog.at_level(logging.WARNING, "cometmq.broker"):
        for version in (2, 3):
            bench.beat(topics={"T": "B"}, client="c2", conn=other, version=version)
            bench.beat(topics={"T": "A", "%RETRY%G": "*"}, client="c1", version=version)
    warnings = [one for one in caplog.records if "subscriptions differ" in one.getMessage()]
    assert len(warnings) == 1
    text = warnings[0].getMessage()
    assert "group=G" in text and "c1 wants T[TAG:A]" in text and "c2 wants T[TAG:B]" in text
    assert bench.runtime()["cometmqSubscriptionConflicts"] == "1"
    shown = bench.json(C.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    (conflict,) = shown["subscriptionConflicts"]
    assert "c1 wants T[TAG:A]" in conflict and "c2 wants T[TAG:B]" in conflict


def test_members_that_agree_are_no_conflict(bench: Bench) -> None:
    pair(bench, topics={"T": "A"})
    assert bench.broker.members.subscription_conflicts == 0
    shown = bench.json(C.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert shown["subscriptionConflicts"] == []


def test_the_retry_topic_alone_is_no_conflict(bench: Bench) -> None:
    other = bench.connect()
    bench.beat(topics={"T": "A", "%RETRY%G": "*"})
    bench.beat(topics={"T": "A"}, client="c2", conn=other)
    assert bench.broker.members.subscription_conflicts == 0


# ------------------------------------------------------------------------------------------- locks


def queue(number: int, topic: str = "T") -> dict[str, Any]:
    return {"brokerName": "broker-a", "queueId": number, "topic": topic}


def lock_body(client: str, *queues: dict[str, Any], group: str = "G") -> bytes:
    return msgspec.json.encode(
        {"clientId": client, "consumerGroup": group, "mqSet": queues, "onlyThisBroker": False}
    )


def lock(bench: Bench, client: str, *queues: dict[str, Any], group: str = "G") -> list[int]:
    body = lock_body(client, *queues, group=group)
    found = bench.json(C.LOCK_BATCH_MQ, None, body)["lockOKMQSet"]
    assert all(set(one) == {"brokerName", "queueId", "topic"} for one in found)
    return [one["queueId"] for one in found]


@pytest.fixture
def locking(bench: Bench) -> Bench:
    bench.create_topic()
    for group in ("G", "H"):
        body = msgspec.json.encode({"groupName": group})
        assert bench.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body).code == 0
    return bench


def test_a_group_that_does_not_exist_locks_nothing(locking: Bench) -> None:
    assert lock(locking, "c1", queue(0), group="unheard-of") == []


def test_a_lock_belongs_to_who_comes_first(locking: Bench) -> None:
    assert lock(locking, "c1", queue(0), queue(1)) == [0, 1]
    assert lock(locking, "c2", queue(1), queue(2)) == [2]
    assert lock(locking, "c1", queue(0), queue(2)) == [0], "its own again"


def test_locks_of_groups_do_not_meet(locking: Bench) -> None:
    lock(locking, "c1", queue(0))
    assert lock(locking, "c2", queue(0), group="H") == [0]


def test_a_queue_that_is_not_there_is_not_locked(locking: Bench) -> None:
    assert lock(locking, "c1", queue(4), queue(-1), queue(0, "Nope"), queue(3)) == [3]


def test_only_the_owner_unlocks(locking: Bench) -> None:
    lock(locking, "c1", queue(0))
    assert locking.ask(C.UNLOCK_BATCH_MQ, None, lock_body("c2", queue(0))).code == 0
    assert lock(locking, "c2", queue(0)) == []
    locking.ask(C.UNLOCK_BATCH_MQ, None, lock_body("c1", queue(0)))
    assert lock(locking, "c2", queue(0)) == [0]


def test_a_lock_ends_a_minute_after_its_last_renewal(locking: Bench) -> None:
    lock(locking, "c1", queue(0))
    locking.advance(30_000)
    lock(locking, "c1", queue(0))
    locking.advance(60_000)
    assert lock(locking, "c2", queue(0)) == []
    locking.advance(1)
    assert lock(locking, "c2", queue(0)) == [0]
    assert lock(locking, "c1", queue(0)) == []


def test_locks_nobody_renews_are_forgotten(locking: Bench) -> None:
    lock(locking, "c1", queue(0))
    locking.advance(75_000)
    assert locking.broker.locks._groups == {}


def test_who_unregisters_lets_go_of_its_locks(locking: Bench) -> None:
    locking.beat(client="c1")
    lock(locking, "c1", queue(0))
    leave(locking, locking.conn, "c1", consumerGroup="G")
    assert lock(locking, "c2", queue(0)) == [0]


def test_a_lost_connection_keeps_its_locks(locking: Bench) -> None:
    conn = locking.connect()
    locking.beat(client="c1", conn=conn)
    lock(locking, "c1", queue(0))
    locking.disconnect(conn)
    assert lock(locking, "c2", queue(0)) == []


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"consumerGroup":"G"}', lock_body("c1", {"topic": "T"})]
)
@pytest.mark.parametrize("code", [C.LOCK_BATCH_MQ, C.UNLOCK_BATCH_MQ])
def test_a_lock_request_that_is_none_is_refused(locking: Bench, code: int, body: bytes) -> None:
    assert locking.ask(code, None, body).code == 29


def test_a_lock_request_has_a_limit(locking: Bench) -> None:
    answer = locking.ask(C.LOCK_BATCH_MQ, None, lock_body("c1", *[queue(0)] * 10_001))
    assert answer.code == 29
    assert "10001" in str(answer.remark) and "10000" in str(answer.remark)


# ----------------------------------------------------------------------------- check client config


def check(bench: Bench, **subscription: Any) -> Any:
    body = {"clientId": "c", "group": "G", "subscriptionData": {"topic": "T"} | subscription}
    return bench.ask(C.CHECK_CLIENT_CONFIG, None, fastjson.dumps(body))


def test_tag_subscriptions_pass_the_check(bench: Bench) -> None:
    assert check(bench, subString="A || B", expressionType="TAG").code == 0


def test_bad_tag_subscriptions_do_not(bench: Bench) -> None:
    assert check(bench, subString="||", expressionType="TAG").code == 23
