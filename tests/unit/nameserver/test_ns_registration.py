"""REGISTER_BROKER and the ways out: rules of who holds which place, and whose topics count."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest

from cometmq.ports import NEVER_MS, Close
from cometmq.wire import fastjson
from cometmq.wire.bodies import DataVersion, TopicConfig
from cometmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode

REGISTER = RequestCode.REGISTER_BROKER
SLAVE = {"broker_id": 1, "address": "10.0.0.2:10911"}


def test_a_registered_broker_is_routed(bench: Any) -> None:
    answer = bench.register(["T1", "T2"])
    assert (answer.code, answer.ext, answer.body) == (0, {}, b"")
    assert bench.route("T1")["queueDatas"] == [
        {
            "brokerName": "broker-a",
            "perm": 6,
            "readQueueNums": 4,
            "topicSysFlag": 0,
            "writeQueueNums": 4,
        }
    ]


def test_the_newer_retry_topics_of_pop_are_topics(bench: Any) -> None:
    """A broker with one of them (enableRetryTopicV2) was refused, and lost all its routes."""
    assert bench.register(["T1", "%RETRY%group+T1"]).code == 0
    assert bench.has_route("T1") and bench.has_route("%RETRY%group+T1")
    assert bench.register(["T1", "group+T1"]).code == 29
    assert bench.register(["T1", "%RETRY%group+T1+T2"]).code == 29


def compressed(topics: list[str], *, mapping: bool) -> bytes:
    """The layout of wire.md 3.2, written here by hand."""

    def piece(text: str) -> bytes:
        return struct.pack(">i", len(text.encode())) + text.encode()

    raw = piece('{"counter":7,"stateVersion":0,"timestamp":9}') + struct.pack(">i", len(topics))
    raw += b"".join(piece(f"{topic} 8 4 6 SINGLE_TAG") for topic in topics) + piece("[]")
    return zlib.compress(raw + (struct.pack(">i", 0) if mapping else b""))


@pytest.mark.parametrize("version", [399, 479])
@pytest.mark.parametrize("label", ["true", "false"])
def test_a_compressed_body_is_known_by_its_bytes(bench: Any, version: int, label: str) -> None:
    body = compressed(["T1", "T2"], mapping=version >= 413)
    ext = bench.identity() | {"compressed": label, "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF)}
    assert bench.ask(REGISTER, ext, body, version=version).code == 0
    assert bench.route("T2")["queueDatas"][0]["readQueueNums"] == 8


def test_a_damaged_body_is_refused(bench: Any) -> None:
    body = bench.registration(["T1", "T2"], DataVersion())
    answer = bench.ask(REGISTER, bench.identity() | {"bodyCrc32": "12345"}, body)
    assert answer.code == 1
    assert "crc32" in answer.remark
    assert bench.brokers() == {}


def test_an_unknown_broker_may_not_start_with_one_topic(bench: Any) -> None:
    answer = bench.register(["T1"])
    assert answer.code == 1
    assert "register broker failed" in answer.remark
    assert bench.brokers() == {}
    assert bench.json(RequestCode.GET_BROKER_CLUSTER_INFO)["clusterAddrTable"] == {}
    assert bench.register([]).code == 0
    assert bench.register(["T1"], version=DataVersion(2, 0, 2)).code == 0
    assert bench.has_route("T1")


def test_an_unknown_id_of_a_known_name_may_not_start_with_one_topic_either(bench: Any) -> None:
    bench.register(["T1", "T2"])
    assert bench.register(["T1"], **SLAVE).code == 1
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.1:10911"}}


def test_a_partial_payload_deletes_nothing(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.register(["T3"], version=DataVersion(2, 0, 2))
    assert [bench.has_route(topic) for topic in ("T1", "T2", "T3")] == [True, True, True]


def test_missing_topics_go_where_the_option_says_so(make_bench: Any) -> None:
    bench = make_bench(deletes_missing_topics=True)
    bench.register(["T1", "T2"])
    bench.register(["T2", "T3"], name="broker-b", address="10.0.0.9:1", conn=2)
    bench.register(["T3"], version=DataVersion(2, 0, 2))
    assert not bench.has_route("T1")
    assert [row["brokerName"] for row in bench.route("T2")["queueDatas"]] == ["broker-b"]
    assert [row["brokerName"] for row in bench.route("T3")["queueDatas"]] == [
        "broker-b",
        "broker-a",
    ]


def test_an_equal_data_version_rewrites_nothing_but_adds_what_is_missing(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
    bench.register(["T1", "T3"])
    assert bench.route("T1")["queueDatas"][0]["perm"] == 4
    assert bench.route("T3")["queueDatas"][0]["perm"] == 6
    bench.register(["T1", "T3"], version=DataVersion(1, 0, 2))
    assert bench.route("T1")["queueDatas"][0]["perm"] == 6
    assert bench.route("T2")["queueDatas"][0]["perm"] == 4


def test_an_address_under_another_id_is_moved(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.register(["T1", "T2"], **SLAVE)
    bench.register(["T1", "T2"], broker_id=0, address="10.0.0.2:10911")
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.2:10911"}}


def test_an_address_under_another_name_is_moved(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.register(["T3", "T4"], name="broker-b")
    assert bench.brokers() == {"broker-b": {"0": "10.0.0.1:10911"}}
    assert not bench.has_route("T1")


def test_a_name_is_of_one_cluster(bench: Any) -> None:
    bench.register(["T1", "T2"])
    answer = bench.register(["T3", "T4"], cluster="Other", address="10.0.0.2:10911", conn=2)
    assert answer.code == 29
    assert "DefaultCluster" in answer.remark
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.1:10911"}}
    assert bench.register(["T3", "T4"], cluster="Other").code == 0  # the same address has moved
    info = bench.json(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert info["clusterAddrTable"] == {"Other": ["broker-a"]}
    assert not bench.has_route("T1")


def test_a_smaller_state_version_does_not_take_a_held_id(bench: Any) -> None:
    bench.register(["T1", "T2"], version=DataVersion(1, 5, 1))
    answer = bench.register(
        ["X1", "X2"], address="10.0.0.7:1", conn=2, version=DataVersion(9, 4, 9)
    )
    assert (answer.code, answer.ext) == (0, {})
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.1:10911"}}
    assert not bench.has_route("X1")
    bench.close(2)
    assert bench.has_route("T1")


def test_who_claims_a_held_id_in_vain_loses_its_former_one(bench: Any) -> None:
    bench.register(["T1", "T2"], version=DataVersion(1, 5, 1))
    bench.register(["T1", "T2"], version=DataVersion(1, 4, 1), conn=2, **SLAVE)
    claim = SLAVE | {"broker_id": 0}
    assert bench.register(["T1", "T2"], version=DataVersion(2, 4, 2), conn=2, **claim).code == 0
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.1:10911"}}


def test_an_equal_state_version_takes_a_held_id_and_topics_stay(bench: Any) -> None:
    bench.register(["T1", "T2"], version=DataVersion(1, 5, 1))
    bench.register(["T2", "T3"], address="10.0.0.7:1", conn=2, version=DataVersion(9, 5, 9))
    assert bench.brokers() == {"broker-a": {"0": "10.0.0.7:1"}}
    assert bench.has_route("T1")
    bench.close(1)  # the old holder's connection has nothing to take with it
    assert bench.has_route("T3")


def test_topics_of_a_follower_do_not_count(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.register(["T1", "T9"], **SLAVE)
    assert not bench.has_route("T9")
    assert bench.route("T1")["brokerDatas"][0]["brokerAddrs"] == {
        "0": "10.0.0.1:10911",
        "1": "10.0.0.2:10911",
    }


def test_topics_of_an_old_follower_without_master_do_not_count(bench: Any) -> None:
    bench.register(["T1", "T2"], **SLAVE)
    assert not bench.has_route("T1")


def test_topics_of_the_lowest_acting_follower_count_read_only(bench: Any) -> None:
    acting = {"enableActingMaster": "true"}
    bench.register(["T1", "T2"], broker_id=2, address="10.0.0.3:1", conn=3, ext=acting)
    assert bench.route("T1")["queueDatas"][0]["perm"] == 4
    bench.register(["T1", "T9"], broker_id=3, address="10.0.0.4:1", conn=4, ext=acting)
    assert not bench.has_route("T9")
    bench.register(["T1", "T2"], ext=acting)
    assert bench.route("T1")["queueDatas"][0]["perm"] == 6
    assert bench.route("T1")["brokerDatas"][0]["enableActingMaster"] is True


def test_when_the_master_of_acting_followers_leaves_topics_turn_read_only(bench: Any) -> None:
    acting = {"enableActingMaster": "true"}
    bench.register(["T1", "T2"], ext=acting)
    bench.register(["T1", "T2"], conn=2, ext=acting, **SLAVE)
    bench.close(1)
    route = bench.route("T1")
    assert route["queueDatas"][0]["perm"] == 4
    assert route["brokerDatas"][0]["brokerAddrs"] == {"1": "10.0.0.2:10911"}


def test_when_a_follower_of_an_acting_pair_leaves_topics_stay_writable(bench: Any) -> None:
    acting = {"enableActingMaster": "true"}
    bench.register(["T1", "T2"], ext=acting)
    bench.register(["T1", "T2"], conn=2, ext=acting, **SLAVE)
    bench.close(2)
    assert bench.route("T1")["queueDatas"][0]["perm"] == 6


def test_a_follower_that_becomes_master_writes_its_topics_again(bench: Any) -> None:
    acting = {"enableActingMaster": "true"}
    bench.register(["T1", "T2"], ext=acting, **SLAVE)
    assert bench.route("T1")["queueDatas"][0]["perm"] == 4
    bench.register(["T1", "T2"], ext=acting, **SLAVE | {"broker_id": 0})
    assert bench.route("T1")["queueDatas"][0]["perm"] == 6


def test_perm_bits_that_have_no_name_survive_the_wiping(bench: Any) -> None:
    bench.register({name: TopicConfig(name, 4, 4, 14) for name in ("T1", "T2")})
    bench.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
    assert bench.route("T1")["queueDatas"][0]["perm"] == 12


def test_a_follower_is_told_its_master(bench: Any) -> None:
    assert bench.register(["T1", "T2"], **SLAVE).ext == {}
    bench.register(["T1", "T2"], conn=2, ext={"haServerAddr": "10.0.0.1:10912"})
    answer = bench.register(["T1", "T2"], **SLAVE)
    assert answer.ext == {"haServerAddr": "10.0.0.1:10912", "masterAddr": "10.0.0.1:10911"}


def test_a_broker_is_told_the_order_topics(make_bench: Any) -> None:
    bench = make_bench()
    bench.put("ORDER_TOPIC_CONFIG", "T1", "broker-a:4")
    assert bench.register(["T1", "T2"]).body == b'{"table":{"T1":"broker-a:4"}}'
    quiet = make_bench(returns_order_topics=False)
    quiet.put("ORDER_TOPIC_CONFIG", "T1", "broker-a:4")
    assert quiet.register(["T1", "T2"]).body == b""


def test_filter_servers_are_routed_and_forgotten(bench: Any) -> None:
    for servers, shown in (["f:1"], {"10.0.0.1:10911": ["f:1"]}), ([], {}):
        body = fastjson.dumps({"filterServerList": servers, "topicConfigSerializeWrapper": {
            "topicConfigTable": {name: {"topicName": name} for name in ("T1", "T2")}}})  # fmt: skip
        assert bench.ask(REGISTER, bench.identity(), body).code == 0
        assert bench.route("T1")["filterServerTable"] == shown


# ------------------------------------------------------------------------------------ bad names


@pytest.mark.parametrize(
    "who",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "x" * 256},
        {"cluster": ""},
        {"cluster": "\x00"},
        {"address": "10.0.0.1"},
        {"address": ":10911"},
        {"address": "10.0.0.1:70000"},
        {"address": "a b:1"},
        {"address": '10.0.0.1:1","1":"evil:2'},
        {"ext": {"haServerAddr": "nowhere"}},
        {"ext": {"__ZONE_NAME": "a\tb"}},
        {"topics": ["T1", "bad topic"]},
        {"topics": ["T1", ""]},
        {"topics": ["T1", "x" * 256]},
        {"topics": ["T1", "umlaut\u00e4"]},
        {"topics": {"T1": TopicConfig("T1"), "T2": TopicConfig("T2", readQueueNums=-1)}},
        {"topics": {"T1": TopicConfig("T1"), "T2": TopicConfig("T2", writeQueueNums=2**31)}},
    ],
)
def test_a_bad_name_refuses_the_registration_and_changes_nothing(
    bench: Any, who: dict[str, Any]
) -> None:
    bench.register(["T1", "T2"])
    before = bench.json(RequestCode.GET_BROKER_CLUSTER_INFO)
    fields = {"topics": ["N1", "N2"], "address": "10.0.0.5:1", "version": DataVersion(2, 0, 2)}
    answer = bench.register(**fields | who)
    assert answer.code == 29
    assert answer.remark
    assert bench.json(RequestCode.GET_BROKER_CLUSTER_INFO) == before
    names = bench.json(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"]
    assert names == ["T1", "T2"]
    assert bench.server.serve_stats.refused == 1


def test_names_with_dots_may_stand_in_their_own_topics(bench: Any) -> None:
    who = {"name": "host.example.org", "cluster": "c.1"}
    topics = ["host.example.org", "c.1", "c.1_REPLY_TOPIC", "rmq_sys_REVIVE_LOG_c.1"]
    assert bench.register(topics, **who).code == 0
    assert bench.register([*topics, "other.name"], **who).code == 29


@pytest.mark.parametrize("address", ["broker_1.local:10911", "[::1]:10911", "fe80::1%eth0:10911"])
def test_host_names_and_ipv6_are_addresses(bench: Any, address: str) -> None:
    assert bench.register(["T1", "T2"], address=address).code == 0


def test_a_topic_limit_refuses_with_its_name(make_bench: Any) -> None:
    bench = make_bench(max_topics=3)
    bench.register(["T1", "T2"])
    answer = bench.register(["T3", "T4"], version=DataVersion(2, 0, 2))
    assert answer.code == 1
    assert "maxTopics=3" in answer.remark
    assert not bench.has_route("T3")
    assert bench.server.stats.over_max_topics == 1
    assert bench.register(["T1", "T3"], version=DataVersion(3, 0, 3)).code == 0


def test_a_broker_limit_refuses_with_its_name(make_bench: Any) -> None:
    bench = make_bench(max_brokers=1)
    bench.register(["T1", "T2"])
    answer = bench.register(["T1", "T2"], name="b", address="h:1")
    assert answer.code == 1
    assert "maxBrokers=1" in answer.remark
    assert bench.server.stats.over_max_brokers == 1
    assert bench.register(["T1", "T2"]).code == 0  # who is here may stay
    assert bench.register(["T1", "T2"], address="h:2").code == 0  # and a successor comes for one


# -------------------------------------------------------------------------------- ways to leave


def test_a_broker_leaves_with_the_connection_of_its_last_registration(bench: Any) -> None:
    bench.register(["T1", "T2"], conn=1)
    bench.register(["T1", "T2"], conn=2)
    bench.close(1)
    assert bench.has_route("T1")
    bench.close(3)
    assert bench.has_route("T1")
    bench.close(2)
    assert bench.brokers() == {}
    assert not bench.has_route("T1")
    assert bench.json(RequestCode.GET_BROKER_CLUSTER_INFO)["clusterAddrTable"] == {}


def test_brokers_of_one_connection_leave_together(bench: Any) -> None:
    for number in range(3):
        bench.register(["T1", f"Own{number}"], name=f"b{number}", address=f"h:{number + 1}")
    bench.register(["T1", "T2"], name="stays", address="h:9", conn=2)
    bench.close(1)
    assert list(bench.brokers()) == ["stays"]
    assert bench.server.stats.brokers_disconnected == 3
    assert [row["brokerName"] for row in bench.route("T1")["queueDatas"]] == ["stays"]
    assert not bench.has_route("Own1")


class CountingTopics(dict[str, Any]):
    """Counts walks over the whole table."""

    walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def test_leaving_together_walks_over_all_topics_at_most_once(bench: Any) -> None:
    for number in range(20):
        bench.register(["T1", f"Own{number}"], name=f"b{number}", address=f"h:{number + 1}")
    bench.server.routes.topics = topics = CountingTopics(bench.server.routes.topics)
    bench.close(1)
    assert topics == {}
    assert topics.walks <= 1


def test_unregister_takes_the_address_out(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.register(["T1", "T2"], **SLAVE)
    assert bench.ask(RequestCode.UNREGISTER_BROKER, bench.identity()).code == 0
    assert bench.brokers() == {"broker-a": {"1": "10.0.0.2:10911"}}
    assert bench.route("T1")["queueDatas"][0]["perm"] == 6  # no acting master: perm stays
    assert bench.ask(RequestCode.UNREGISTER_BROKER, bench.identity(**SLAVE)).code == 0
    assert not bench.has_route("T1")


def test_unregister_of_another_name_or_a_stranger_does_nothing(bench: Any) -> None:
    bench.register(["T1", "T2"])
    for who in {"name": "other"}, {"cluster": "other"}, {"address": "h:1"}:
        assert bench.ask(RequestCode.UNREGISTER_BROKER, bench.identity(**who)).code == 0
    assert bench.has_route("T1")


def test_a_silent_broker_expires_after_two_minutes(bench: Any) -> None:
    bench.tick()
    bench.register(["T1", "T2"])
    bench.tick(120_000)
    assert bench.has_route("T1")
    out = bench.tick(5_000)
    assert not bench.has_route("T1")
    assert [effect.conn for effect in out if type(effect) is Close] == [1]
    assert bench.server.stats.brokers_expired == 1


def test_a_broker_may_choose_its_own_expiry(bench: Any) -> None:
    bench.tick()
    bench.register(["T1", "T2"], ext={"heartbeatTimeoutMillis": "10000"})
    bench.tick(10_000)
    assert bench.has_route("T1")
    bench.tick(5_000)
    assert not bench.has_route("T1")


@pytest.mark.parametrize("code", [RequestCode.BROKER_HEARTBEAT, RequestCode.QUERY_DATA_VERSION])
def test_heartbeats_keep_a_broker_alive(bench: Any, code: int) -> None:
    bench.register(["T1", "T2"])
    for _ in range(4):
        bench.tick(60_000)
        assert bench.ask(code, bench.identity()).code == 0
    assert bench.has_route("T1")
    bench.tick(125_000)
    assert not bench.has_route("T1")


def test_an_expired_broker_does_not_take_its_neighbour_s_connection(bench: Any) -> None:
    bench.register(["T1", "T2"], ext={"heartbeatTimeoutMillis": "1000"})
    bench.register(["T1", "T2"], name="b", address="h:1")
    assert bench.tick(6_000) == []
    assert list(bench.brokers()) == ["b"]


def test_scans_come_at_their_interval(make_bench: Any) -> None:
    bench = make_bench(scan_interval_ms=700)
    assert bench.server.deadline_ms <= bench.now_ms
    bench.tick()
    assert bench.server.deadline_ms == bench.now_ms + 700 < NEVER_MS


def test_after_a_long_stall_heartbeats_are_heard_before_the_scan(bench: Any) -> None:
    bench.register(["T1", "T2"])
    bench.tick()
    bench.now_ms += 200_000
    bench.server.stalled(200_000, bench.now_ms, [])
    bench.tick()
    assert bench.ask(RequestCode.BROKER_HEARTBEAT, bench.identity()).code == 0
    bench.tick(5_000)
    assert bench.has_route("T1")


# ---------------------------------------------------------------------------------- 322 and more


def test_query_data_version_tells_whether_to_register(bench: Any) -> None:
    def query(version: DataVersion) -> tuple[dict[str, str], bytes]:
        body = fastjson.dumps({"counter": version.counter, "timestamp": version.timestamp})
        answer = bench.ask(RequestCode.QUERY_DATA_VERSION, bench.identity(), body)
        return answer.ext, answer.body

    assert query(DataVersion(1, 0, 1)) == ({"changed": "true"}, b"")
    bench.register(["T1", "T2"])
    stored = b'{"counter":1,"stateVersion":0,"timestamp":1}'
    assert query(DataVersion(1, 0, 1)) == ({"changed": "false"}, stored)
    assert query(DataVersion(2, 0, 1)) == ({"changed": "true"}, stored)


def test_a_oneway_registration_counts_and_is_not_answered(bench: Any) -> None:
    body = bench.registration(["T1", "T2"], DataVersion())
    assert bench.send(REGISTER, bench.identity(), body, flag=FLAG_ONEWAY) == []
    assert bench.has_route("T1")


def test_a_response_is_never_answered(bench: Any) -> None:
    assert bench.send(REGISTER, {}, flag=FLAG_RESPONSE) == []


def test_a_missing_field_and_an_undecodable_body_are_invalid_parameters(bench: Any) -> None:
    answer = bench.ask(REGISTER, {"brokerName": "b"})
    assert (answer.code, "brokerAddr" in answer.remark) == (29, True)
    assert bench.ask(REGISTER, bench.identity(), b"{nonsense").code == 29
    assert bench.brokers() == {}
