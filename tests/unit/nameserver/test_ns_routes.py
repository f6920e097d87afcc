"""105 and the lists: what clients and admins read, byte for byte where clients cut by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.wire import fastjson
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import ROCKETMQ, Frame, decode_frame

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
OLD = (
    b'{"brokerDatas":[{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},'
    b'"brokerName":"broker-a","cluster":"DefaultCluster","enableActingMaster":false}],'
    b'"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,'
    b'"topicSysFlag":0,"writeQueueNums":4}]}'
)  # wire.md 3.4, as Java writes it


@pytest.fixture
def pair(bench: Any) -> Any:
    """A master and a follower with T1 and T2; the follower came first."""
    bench.register(["T1", "T2"], broker_id=1, address="10.0.0.2:10911", conn=2)
    bench.register(["T1", "T2"])
    return bench


@pytest.mark.parametrize("version", [0, 63, 121, 317, 333, 400])
def test_old_askers_get_bare_ids(pair: Any, version: int) -> None:
    assert pair.ask(ROUTE, {"topic": "T1"}, version=version).body == OLD


@pytest.mark.parametrize(
    ("version", "ext"), [(401, {}), (479, {}), (317, {"acceptStandardJsonOnly": "true"})]
)
def test_new_askers_get_standard_json(pair: Any, version: int, ext: dict[str, str]) -> None:
    body = pair.ask(ROUTE, {"topic": "T1"} | ext, version=version).body
    assert body == OLD.replace(b"{0:", b'{"0":').replace(b",1:", b',"1":')


def test_standard_json_escapes_slashes_and_foreign_letters(bench: Any) -> None:
    bench.register(["T1", "T2"], name="r\u00e4ck/1")
    assert rb'"brokerName":"r\u00e4ck\/1"' in bench.ask(ROUTE, {"topic": "T1"}).body
    old = bench.ask(ROUTE, {"topic": "T1"}, version=317).body
    assert '"brokerName":"r\u00e4ck/1"'.encode() in old


def test_the_answer_speaks_the_serialization_of_the_question(pair: Any) -> None:
    out: list[Any] = []
    frame = Frame(ROUTE, 5, version=401, ext={"topic": "T1"}, serialize=ROCKETMQ)
    pair.server.handle(1, frame, 0, pair.now_ms, out)
    assert decode_frame(out[0].data).serialize == ROCKETMQ


def test_every_broker_of_the_topic_is_shown_and_no_other(pair: Any) -> None:
    pair.register(["T1", "T3"], name="broker-b", address="h:1")
    route = pair.route("T1")
    assert [one["brokerName"] for one in route["brokerDatas"]] == ["broker-a", "broker-b"]
    assert [one["brokerName"] for one in route["queueDatas"]] == ["broker-a", "broker-b"]
    assert [one["brokerName"] for one in pair.route("T3")["brokerDatas"]] == ["broker-b"]


def test_the_order_config_is_shown_when_enabled_and_there(make_bench: Any) -> None:
    bench = make_bench(is_order_topic_enabled=True)
    bench.put("ORDER_TOPIC_CONFIG", "T1", "broker-a:4")
    bench.register(["T1", "T2"])
    body = bench.ask(ROUTE, {"topic": "T1"}).body
    assert b'"filterServerTable":{},"orderTopicConf":"broker-a:4","queueDatas":' in body
    assert "orderTopicConf" not in bench.route("T2")
    quiet = make_bench()
    quiet.put("ORDER_TOPIC_CONFIG", "T1", "broker-a:4")
    quiet.register(["T1", "T2"])
    assert "orderTopicConf" not in quiet.route("T1")


# --------------------------------------------------------------------------------- missing topics


def missing(bench: Any) -> str:
    answer = bench.ask(ROUTE, {"topic": "Nope"})
    assert (answer.code, answer.body) == (17, b"")
    assert "Nope" in answer.remark
    return str(answer.remark)


def test_a_missing_topic_without_any_broker_says_so(bench: Any) -> None:
    remark = missing(bench)
    assert "No broker is registered" in remark
    assert "autoCreateTopicEnable" not in remark


def test_a_missing_topic_among_brokers_says_how_many_and_what_to_do(bench: Any) -> None:
    bench.register(["T1", "T2"])
    assert "knows 1 broker, and the topic is registered by none" in missing(bench)
    bench.register(["T1", "T2"], name="b", address="h:1")
    remark = missing(bench)
    assert "knows 2 brokers" in remark
    assert "autoCreateTopicEnable=true" in remark
    assert "still telling" not in remark


def test_a_missing_topic_while_a_broker_still_tells_says_so(bench: Any) -> None:
    bench.register_effects([f"t{number}" for number in range(9_000)])
    assert "still telling its topics" in missing(bench)


# ------------------------------------------------------------------------------------ zones


@pytest.mark.parametrize(
    ("ext", "shown"),
    [
        ({}, ["a", "b", "none", "headless"]),
        ({"__ZONE_NAME": "east"}, ["a", "b", "none", "headless"]),
        ({"__ZONE_MODE": "true"}, ["a", "b", "none", "headless"]),
        ({"__ZONE_MODE": "false", "__ZONE_NAME": "east"}, ["a", "b", "none", "headless"]),
        ({"__ZONE_MODE": "true", "__ZONE_NAME": "EAST"}, ["a", "headless"]),
        ({"__ZONE_MODE": "true", "__ZONE_NAME": "north"}, ["headless"]),
    ],
)
def test_zone_mode_shows_the_zone_and_brokers_without_master(
    bench: Any, ext: dict[str, str], shown: list[str]
) -> None:
    for number, (name, zone) in enumerate((("a", "east"), ("b", "west"), ("none", ""))):
        zones = {"__ZONE_NAME": zone} if zone else {}
        bench.register(["T1", "T2"], name=name, address=f"h:{number + 1}", ext=zones)
    acting = {"enableActingMaster": "true", "__ZONE_NAME": "west"}
    bench.register(["T1", "T2"], name="headless", address="h:9", broker_id=1, ext=acting)
    route = fastjson.loads(bench.ask(ROUTE, {"topic": "T1"} | ext).body)
    assert [one["brokerName"] for one in route["brokerDatas"]] == shown
    assert [one["brokerName"] for one in route["queueDatas"]] == shown


def test_the_zone_is_part_of_the_broker(bench: Any) -> None:
    bench.register(["T1", "T2"], ext={"__ZONE_NAME": "east"})
    assert bench.route("T1")["brokerDatas"][0]["zoneName"] == "east"
    bench.register(["T1", "T2"])
    assert "zoneName" not in bench.route("T1")["brokerDatas"][0]


# ------------------------------------------------------------------------------- brokers and lists


def test_cluster_info(pair: Any) -> None:
    pair.register(["T1", "T2"], name="c", address="h:1", cluster="Other")
    body = pair.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body
    assert body == (
        b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{"0":"10.0.0.1:10911",'
        b'"1":"10.0.0.2:10911"},"brokerName":"broker-a","cluster":"DefaultCluster",'
        b'"enableActingMaster":false},"c":{"brokerAddrs":{"0":"h:1"},"brokerName":"c",'
        b'"cluster":"Other","enableActingMaster":false}},'
        b'"clusterAddrTable":{"DefaultCluster":["broker-a"],"Other":["c"]}}'
    )


def test_member_group(pair: Any) -> None:
    def ask(name: str) -> bytes:
        ext = {"clusterName": "DefaultCluster", "brokerName": name}
        return bytes(pair.ask(RequestCode.GET_BROKER_MEMBER_GROUP, ext).body)

    assert ask("broker-a") == (
        b'{"brokerMemberGroup":{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"},'
        b'"brokerName":"broker-a","cluster":"DefaultCluster"}}'
    )
    assert b'"brokerAddrs":{}' in ask("nobody")


def test_write_permission_goes_and_comes_back(pair: Any) -> None:
    pair.register(["T1", "T3"], name="b", address="h:1")
    named = {"brokerName": "broker-a"}
    assert pair.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, named).ext == {"wipeTopicCount": "2"}
    assert [row["perm"] for row in pair.route("T1")["queueDatas"]] == [4, 6]
    assert pair.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, named).ext == {"addTopicCount": "2"}
    assert [row["perm"] for row in pair.route("T1")["queueDatas"]] == [6, 6]
    nobody = {"brokerName": "nobody"}
    assert pair.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, nobody).ext == {"wipeTopicCount": "0"}


def topics(bench: Any, code: int, ext: dict[str, str] | None = None) -> list[str]:
    found = bench.json(code, ext)["topicList"]
    assert isinstance(found, list)
    return found


def test_lists_of_topics(pair: Any) -> None:
    pair.register(["T1", "T3"], name="c", address="h:1", cluster="Other")
    assert topics(pair, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == ["T1", "T2", "T3"]
    by_cluster = RequestCode.GET_TOPICS_BY_CLUSTER
    assert topics(pair, by_cluster, {"cluster": "DefaultCluster"}) == ["T1", "T2"]
    assert topics(pair, by_cluster, {"cluster": "Other"}) == ["T1", "T3"]
    assert topics(pair, by_cluster, {"cluster": "nowhere"}) == []
    assert pair.json(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == {
        "brokerAddr": "10.0.0.1:10911",
        "topicList": ["DefaultCluster", "broker-a", "Other", "c"],
    }


def test_the_system_list_of_an_empty_name_server(bench: Any) -> None:
    assert bench.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).body == b'{"topicList":[]}'


def test_unit_topics_go_by_their_flags(bench: Any) -> None:
    bench.register({f"t{flag}": TopicConfig(f"t{flag}", topicSysFlag=flag) for flag in range(4)})
    assert topics(bench, RequestCode.GET_UNIT_TOPIC_LIST) == ["t1", "t3"]
    assert topics(bench, RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == ["t2", "t3"]
    assert topics(bench, RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == ["t2"]


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("is_all_topic_list_enabled", 206),
        ("is_topic_list_enabled", 224),
        ("is_topic_list_enabled", 304),
        ("is_topic_list_enabled", 311),
        ("is_topic_list_enabled", 312),
        ("is_topic_list_enabled", 313),
    ],
)
def test_lists_can_be_disabled(make_bench: Any, setting: str, code: int) -> None:
    ext = {"cluster": "c"}
    assert make_bench().ask(code, ext).code == 0
    answer = make_bench(**{setting: False}).ask(code, ext)
    assert (answer.code, "disable" in answer.remark) == (1, True)


# ------------------------------------------------------------------------------ topics by admins


def test_a_topic_is_deleted_everywhere_or_in_one_cluster(pair: Any) -> None:
    pair.register(["T1", "T3"], name="c", address="h:1", cluster="Other")
    delete = RequestCode.DELETE_TOPIC_IN_NAMESRV
    assert pair.ask(delete, {"topic": "T1", "clusterName": "Other"}).code == 0
    assert [row["brokerName"] for row in pair.route("T1")["queueDatas"]] == ["broker-a"]
    assert pair.ask(delete, {"topic": "T2"}).code == 0
    assert not pair.has_route("T2")
    assert pair.ask(delete, {"topic": "never"}).code == 0
    pair.register(["T1", "T2"])  # the same version: what has no entry is written again
    assert pair.has_route("T2")


def test_a_deleted_topic_does_not_trip_its_leaving_broker(pair: Any) -> None:
    pair.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "T1"})
    pair.close(1)
    pair.close(2)
    assert topics(pair, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == []


def register_topic(bench: Any, topic: str, *rows: dict[str, Any]) -> Any:
    body = fastjson.dumps({"queueDatas": list(rows)})
    return bench.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": topic}, body)


def test_a_topic_is_registered_for_known_brokers(pair: Any) -> None:
    row = {"brokerName": "broker-a", "perm": 4, "readQueueNums": 2, "writeQueueNums": 3}
    assert register_topic(pair, "New", row).code == 0
    assert pair.route("New")["queueDatas"] == [row | {"topicSysFlag": 0}]
    pair.close(1)
    pair.close(2)
    assert not pair.has_route("New")


def test_a_topic_for_an_unknown_broker_is_refused_whole(pair: Any) -> None:
    answer = register_topic(pair, "New", {"brokerName": "broker-a"}, {"brokerName": "ghost"})
    assert (answer.code, "ghost" in answer.remark) == (1, True)
    assert not pair.has_route("New")


def test_a_topic_registered_badly_is_an_invalid_parameter(pair: Any) -> None:
    assert register_topic(pair, "bad name", {"brokerName": "broker-a"}).code == 29
    assert register_topic(pair, "New", {"brokerName": "broker-a", "perm": -1}).code == 29
    ext = {"topic": "New"}
    assert pair.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, ext, b'{"queueDatas":3}').code == 29
    assert not pair.has_route("New")


def test_a_single_topic_counts_towards_the_limit(make_bench: Any) -> None:
    bench = make_bench(max_topics=2)
    bench.register(["T1", "T2"])
    answer = register_topic(bench, "T3", {"brokerName": "broker-a"})
    assert (answer.code, "maxTopics=2" in answer.remark) == (1, True)
    assert register_topic(bench, "T2", {"brokerName": "broker-a"}).code == 0


@pytest.mark.parametrize("code", [10, 34, 302, 999])
def test_unknown_codes_are_not_supported(bench: Any, code: int) -> None:
    assert bench.ask(code).code == 3
