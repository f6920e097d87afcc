"""Operators' requests: topics, groups, settings; what is refused has changed nothing."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from cometmq import config as settings
from cometmq.wire import fastjson
from cometmq.wire.bodies import GroupConfig, TopicConfig
from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import NAMESRV, NOW_MS, PULL, Bench, StubNameServer, bodies_of

# ------------------------------------------------------------------------------------------ topics


def one_topic(bench: Bench, topic: str = "T") -> Any:
    return bench.json(C.GET_TOPIC_CONFIG, {"topic": topic})


def test_a_topic_is_made_as_told(bench: Bench) -> None:
    answer = bench.create_topic(
        "T", readQueueNums=3, writeQueueNums=5, perm=4, order=True, topicSysFlag=1
    )
    assert answer.code == 0
    assert one_topic(bench) == {
        "attributes": {},
        "order": True,
        "perm": 4,
        "readQueueNums": 3,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "T",
        "topicSysFlag": 1,
        "writeQueueNums": 5,
    }


def test_a_made_topic_is_saved_and_read_again(benches: Benches) -> None:
    bench = benches()
    bench.create_topic("T", 7)
    version = bench.broker.topics.version
    bench.close()
    again = benches(now_ms=NOW_MS + 5_000)
    assert one_topic(again)["readQueueNums"] == 7
    assert again.broker.topics.version == version


def test_a_changed_topic_is_told_to_the_name_servers(benches: Benches) -> None:
    server = StubNameServer(NAMESRV)
    bench = benches(namesrv=[server])
    bench.create_topic("T", 4)
    bench.create_topic("T", 6)
    last = server.registrations[-1]
    assert last.topics["T"].readQueueNums == 6
    assert last.version == bench.broker.topics.version


def test_the_same_again_changes_nothing(bench: Bench) -> None:
    bench.create_topic()
    version = bench.broker.topics.version
    assert bench.create_topic().code == 0
    assert bench.broker.topics.version == version


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"readQueueNums": -1}, "readQueueNums=-1"),
        ({"writeQueueNums": 65_537}, "writeQueueNums=65537"),
        ({"perm": 16}, "perm=16"),
        ({"perm": -1}, "perm=-1"),
        ({"topicFilterType": "NO_TAG"}, "NO_TAG"),
        ({"attributes": "+no.such=1"}, "no.such"),
        ({"attributes": "+message.type=ODD"}, "ODD"),
        ({"attributes": "+queue.type=BatchCQ"}, "BatchCQ"),
        ({"attributes": "message.type=FIFO"}, "+name=value"),
        ({"attributes": "+message.type"}, "+name=value"),
        ({"readQueueNums": "many"}, "readQueueNums"),
    ],
)
def test_a_topic_that_makes_no_sense_is_refused(
    bench: Bench, change: dict[str, Any], word: str
) -> None:
    before = bench.state()
    answer = bench.create_topic(**change)
    assert answer.code == 29
    assert word in str(answer.remark)
    assert bench.state() == before


def test_attributes_are_added_and_taken_away(bench: Bench) -> None:
    bench.create_topic(attributes="+message.type=FIFO,+reserve.time=5")
    assert one_topic(bench)["attributes"] == {"message.type": "FIFO", "reserve.time": "5"}
    bench.create_topic(attributes="-reserve.time")
    assert one_topic(bench)["attributes"] == {"message.type": "FIFO"}


def test_a_fixed_attribute_can_not_change(bench: Bench) -> None:
    bench.create_topic(attributes="+cleanup.policy=DELETE")
    answer = bench.create_topic(attributes="-cleanup.policy")
    assert answer.code == 29 and "cleanup.policy" in str(answer.remark)


SYSTEM = [
    "TBW102",
    "SELF_TEST_TOPIC",
    "BenchmarkTest",
    "DefaultCluster",
    "broker-a",
    "OFFSET_MOVED_EVENT",
    "SCHEDULE_TOPIC_XXXX",
    "DefaultCluster_REPLY_TOPIC",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "CHECKPOINT_TOPIC",
    "rmq_sys_wheel_timer",
    "rmq_sys_anything",
]


@pytest.mark.parametrize("topic", SYSTEM)
def test_system_topics_can_neither_be_made_nor_deleted(bench: Bench, topic: str) -> None:
    before = bench.state()
    for answer in (
        bench.create_topic(topic),
        bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": topic}),
        topic_list(bench, TopicConfig(topic)),
    ):
        assert answer.code == 29
        assert topic in str(answer.remark)
    assert bench.state() == before


def test_the_built_in_topics(bench: Bench) -> None:
    found = {
        one.topicName: (one.readQueueNums, one.writeQueueNums, one.perm)
        for one in bench.broker.topics.table.values()
    }
    assert found == {
        "SELF_TEST_TOPIC": (1, 1, 6),
        "TBW102": (8, 8, 7),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
        "rmq_sys_REVIVE_LOG_DefaultCluster": (8, 8, 6),
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a": (1, 1, 1),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, 1, 6),
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, 1, 6),
        "rmq_sys_wheel_timer": (1, 1, 6),
    }
    listed = bench.json(C.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)["topicList"]
    assert sorted(listed) == sorted(found)


def test_all_topics_with_their_version(bench: Bench) -> None:
    bench.create_topic("T", 4)
    found = bench.json(C.GET_ALL_TOPIC_CONFIG)
    assert found["topicConfigTable"]["T"]["readQueueNums"] == 4
    version = bench.broker.topics.version
    assert found["dataVersion"] == msgspec.to_builtins(version)


def test_an_unknown_topic_is_17(bench: Bench) -> None:
    answer = bench.ask(C.GET_TOPIC_CONFIG, {"topic": "Nope"})
    assert answer.code == 17 and "'Nope'" in str(answer.remark)


def test_a_deleted_topic_takes_queues_and_offsets_along(bench: Bench) -> None:
    bench.sent()
    bench.pull()
    bench.commit(1)
    assert bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert bench.ask(C.GET_TOPIC_CONFIG, {"topic": "T"}).code == 17
    assert bench.broker.offsets.table == {}
    assert bench.store.queue_ids("T") == []
    assert bench.pull().code == 17


def test_what_a_group_pulled_of_a_deleted_topic_is_forgotten(bench: Bench) -> None:
    bench.sent()
    bench.pull()
    bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    assert bench.broker.offsets.pulled == {}


def test_a_topic_made_again_does_not_reuse_offsets(bench: Bench) -> None:
    bench.sent()
    bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    assert bench.sent().ext["queueOffset"] == "1"


def topic_list(bench: Bench, *topics: TopicConfig) -> Any:
    body = msgspec.json.encode({"topicConfigList": topics})
    return bench.ask(C.UPDATE_AND_CREATE_TOPIC_LIST, None, body)


def test_a_list_of_topics_is_made(benches: Benches) -> None:
    server = StubNameServer(NAMESRV)
    bench = benches(namesrv=[server])
    assert topic_list(bench, TopicConfig("T1", 1, 1), TopicConfig("T2", 2, 2)).code == 0
    assert one_topic(bench, "T2")["readQueueNums"] == 2
    assert {"T1", "T2"} <= server.topics


@pytest.mark.parametrize(
    "bad",
    [
        TopicConfig("../x"),
        TopicConfig("TBW102"),
        TopicConfig("T9", perm=99),
        TopicConfig("T9", readQueueNums=-2),
        TopicConfig("T9", attributes={"+queue.type": "BatchCQ"}),
        TopicConfig("T9", attributes={"queue.type": "BatchCQ"}),
        TopicConfig("T9", attributes={"+no.such": "x"}),
    ],
)
def test_a_list_with_one_bad_topic_makes_none(bench: Bench, bad: TopicConfig) -> None:
    before = bench.state()
    assert topic_list(bench, TopicConfig("T1"), bad, TopicConfig("T2")).code == 29
    assert bench.state() == before


def test_attributes_in_a_list_are_changes_as_mqadmin_writes_them(bench: Bench) -> None:
    assert topic_list(bench, TopicConfig("T", attributes={"+message.type": "FIFO"})).code == 0
    assert one_topic(bench)["attributes"] == {"message.type": "FIFO"}
    assert topic_list(bench, TopicConfig("T", attributes={"-message.type": ""})).code == 0
    assert one_topic(bench)["attributes"] == {}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"topicConfigList":3}', b'{"topicConfigList":[3]}'])
def test_a_topic_list_that_is_none_is_refused(bench: Bench, body: bytes) -> None:
    assert bench.ask(C.UPDATE_AND_CREATE_TOPIC_LIST, None, body).code == 29


def test_a_list_has_a_limit(bench: Bench) -> None:
    answer = topic_list(bench, *[TopicConfig("T")] * 10_001)
    assert answer.code == 29 and "10000" in str(answer.remark)


def test_order_topics_of_the_name_server_are_ordered(benches: Benches) -> None:
    server = StubNameServer(NAMESRV)
    bench = benches(namesrv=[server])
    bench.create_topic()
    server.order_topics = {"T": "broker-a:4"}
    bench.advance(31_000)
    assert one_topic(bench)["order"] is True


def test_queues_of_unknown_topics_are_cleaned(bench: Bench) -> None:
    bench.sent("Gone")
    bench.sent("Kept")
    bench.broker.topics.delete("Gone", bench.now_ms)
    assert bench.ask(C.CLEAN_UNUSED_TOPIC).code == 0
    assert {topic for topic, _ in bench.store.queues()} == {"Kept"}


# ------------------------------------------------------------------------------------------ groups


def put_group(bench: Bench, **fields: Any) -> Any:
    body = msgspec.json.encode({"groupName": "G"} | fields)
    return bench.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)


def group_list(bench: Bench, *groups: GroupConfig) -> Any:
    body = msgspec.json.encode({"groupConfigList": groups})
    return bench.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, None, body)


def test_a_group_is_made_saved_and_read_again(benches: Benches) -> None:
    bench = benches()
    assert put_group(bench, retryMaxTimes=3, consumeBroadcastEnable=False).code == 0
    bench.advance(10)
    bench.close()
    found = benches().json(C.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "G"})
    assert (found["retryMaxTimes"], found["consumeBroadcastEnable"]) == (3, False)
    assert (found["retryQueueNums"], found["whichBrokerWhenConsumeSlowly"]) == (1, 1)
    assert "subscriptionDataSet" not in found


def test_the_built_in_groups(bench: Bench) -> None:
    found = bench.json(C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert set(found) == {"dataVersion", "forbiddenTable", "subscriptionGroupTable"}
    assert sorted(found["subscriptionGroupTable"]) == [
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_PULL",
        "CID_RMQ_SYS_TRANS",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "TOOLS_CONSUMER",
    ]


def test_an_unknown_group_is_26(bench: Bench) -> None:
    answer = bench.ask(C.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "Nobody"})
    assert answer.code == 26 and "'Nobody'" in str(answer.remark)


@pytest.mark.parametrize(
    "bad",
    [GroupConfig("a/b"), GroupConfig(""), GroupConfig("X", retryQueueNums=-1),
     GroupConfig("X", retryQueueNums=1025), GroupConfig("X", retryMaxTimes=-1)],
)  # fmt: skip
def test_a_list_with_one_bad_group_makes_none(bench: Bench, bad: GroupConfig) -> None:
    before = bench.state()
    assert group_list(bench, GroupConfig("G1"), bad, GroupConfig("G2")).code == 29
    assert bench.state() == before


def test_a_list_of_groups_is_made(bench: Bench) -> None:
    assert group_list(bench, GroupConfig("G1"), GroupConfig("G2")).code == 0
    assert bench.broker.groups.get("G2") is not None


def test_a_deleted_group_keeps_its_offsets_unless_told_otherwise(bench: Bench) -> None:
    bench.sent()
    bench.pull(flags=PULL | 1, commit=1)
    assert bench.ask(C.DELETE_SUBSCRIPTIONGROUP, {"groupName": "G"}).code == 0
    assert bench.broker.groups.get("G") is None
    assert bench.offset_of().ext["offset"] == "1"
    bench.ask(C.DELETE_SUBSCRIPTIONGROUP, {"groupName": "G", "cleanOffset": True})
    assert bench.offset_of().code == 22


# ------------------------------------------------------------------------------------------ limits


def test_the_limit_of_topics_has_a_name_and_a_counter(benches: Benches) -> None:
    bench = benches(max_topics=14)
    assert bench.send("One").code == 0
    answer = bench.send("Two")
    assert answer.code == 1
    assert "maxTopics" in str(answer.remark) and "14" in str(answer.remark)
    refused = topic_list(bench, TopicConfig("Three"), TopicConfig("Four"))
    assert refused.code == 1 and "maxTopics" in str(refused.remark)
    assert bench.create_topic("Five").code == 1
    assert bench.create_topic("One", 6).code == 0, "changing one needs no room"
    assert bench.runtime()["cometmqTopicsLimitReached"] == "3"
    assert bench.runtime()["cometmqTopics"] == "14"


def test_a_heartbeat_at_the_limit_of_topics_says_so(benches: Benches) -> None:
    bench = benches(max_topics=13)
    answer = bench.beat(producers=("P",))
    assert answer.code == 1 and "maxTopics" in str(answer.remark)
    assert "P" in bench.broker.members.producers


def test_the_limit_of_groups_has_a_name_and_a_counter(benches: Benches) -> None:
    bench = benches(max_groups=9)
    bench.create_topic()
    assert bench.pull(group="One").code == 19
    answer = bench.pull(group="Two")
    assert answer.code == 1
    assert "maxGroups" in str(answer.remark) and "9" in str(answer.remark)
    assert bench.beat("Three").code == 1
    assert put_group(bench, groupName="Four").code == 1
    assert put_group(bench, groupName="One", retryMaxTimes=2).code == 0
    assert bench.runtime()["cometmqGroupsLimitReached"] == "3"
    assert bench.runtime()["cometmqGroups"] == "9"


def test_a_list_of_groups_beyond_the_limit_makes_none(benches: Benches) -> None:
    bench = benches(max_groups=9)
    before = bench.state()
    answer = group_list(bench, GroupConfig("G1"), GroupConfig("G2"))
    assert answer.code == 1 and "maxGroups" in str(answer.remark)
    assert bench.state() == before


# ---------------------------------------------------------------------------------------- settings


def test_all_settings_can_be_read(bench: Bench) -> None:
    answer = bench.ask(C.GET_BROKER_CONFIG)
    found = settings.parse_conf(answer.body.decode(), "answer")
    assert found == settings.to_settings(bench.broker.config)
    assert found["brokerName"] == "broker-a"
    assert set(fastjson.loads(answer.ext["version"].encode())) == {
        "counter",
        "stateVersion",
        "timestamp",
    }


def update(bench: Bench, text: str | bytes) -> Any:
    body = text.encode() if isinstance(text, str) else text
    return bench.ask(C.UPDATE_BROKER_CONFIG, None, body)


def test_a_live_setting_takes_effect_at_once(bench: Bench) -> None:
    before = bench.broker.config_version
    assert update(bench, "# a comment\nmaxMessageSize=100\nfileReservedTime = 5").code == 0
    assert bench.send(body=b"x" * 101).code == 13
    assert bench.store.config.file_reserved_hours == 5
    assert bench.broker.config_version.counter == before.counter + 1


def test_a_changed_permission_is_told_to_the_name_servers(benches: Benches) -> None:
    server = StubNameServer(NAMESRV)
    bench = benches(namesrv=[server])
    update(bench, "brokerPermission=4")
    assert server.registrations[-1].topics["TBW102"].perm == 4
    assert bench.broker.topics.table["TBW102"].perm == 7, "only what is told is masked"


@pytest.mark.parametrize(
    "text",
    [
        "storePathRootDir=/tmp/evil",
        "rocketmqHome=/tmp/evil; rm -rf /",
        "filterServerNums=1",
        "brokerConfigPath=/etc/cron.d/x",
        "configBlackList=",
        "brokerName=other",
        "brokerClusterName=other",
        "listenPort=1",
        "namesrvAddr=evil:9876",
        "brokerIP1=1.2.3.4",
        "mappedFileSizeCommitLog=4096",
        "flushDiskType=ASYNC_FLUSH",
        "noSuchKey=1",
        "maxMessageSize=-1",
        "maxMessageSize=abc",
        "maxMessageSize=",
        "brokerPermission=8",
        "autoCreateTopicEnable=maybe",
        "maxMessageSize=536870912",
        "deleteWhen=25",
        "deleteWhen=04; 16",
        "fileReservedTime=9\nstorePathRootDir=/tmp/evil",
        "fileReservedTime=9\nmaxMessageSize=abc",
        b"fileReservedTime=\xff",
        "fileReservedTime",
    ],
)
def test_a_refused_update_has_changed_nothing(benches: Benches, text: str | bytes) -> None:
    bench = benches()
    config, shown = bench.broker.config, bench.ask(C.GET_BROKER_CONFIG)
    store_config = bench.store.config
    answer = update(bench, text)
    assert answer.code in (16, 29), answer.remark
    after = bench.ask(C.GET_BROKER_CONFIG)
    assert bench.broker.config is config
    assert bench.store.config is store_config
    assert settings.to_settings(bench.broker.config) == settings.to_settings(config)
    assert (after.body, after.ext) == (shown.body, shown.ext)


def test_every_setting_that_is_not_live_is_refused(bench: Bench) -> None:
    now = settings.to_settings(bench.broker.config)
    fixed = [row.name for row in settings.BROKER_KEYS if not row.is_live]
    assert "storePathRootDir" in fixed
    for name in fixed:
        answer = update(bench, f"{name}={now[name]}")
        assert answer.code == 16, name
        assert name in str(answer.remark)


def test_a_refused_update_is_logged_with_its_sender(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cometmq.broker"):
        update(bench, "storePathRootDir=/tmp/evil")
    assert "10.1.1.1:50001" in caplog.text and "storePathRootDir" in caplog.text


def test_an_update_is_logged_with_before_and_after(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cometmq.broker"):
        update(bench, "fileReservedTime=5")
    assert "file_reserved_hours: 72 -> 5" in caplog.text


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "code", [C.TRIGGER_DELETE_FILES, C.CLEAN_EXPIRED_CONSUMEQUEUE, C.DELETE_EXPIRED_COMMITLOG]
)
def test_cleaning_on_demand_keeps_what_is_young(bench: Bench, code: int) -> None:
    bench.sent()
    assert bench.ask(code).code == 0
    assert bodies_of(bench.pull()) == [b"hello"]


# ------------------------------------------------------------------------------------------- adopt


def test_a_joining_broker_takes_over_topics_and_groups(bench: Bench) -> None:
    bench.create_topic("Mine", 2)
    bench.broker.adopt(
        [TopicConfig("Theirs", 5, 5), TopicConfig("Mine", 9, 9)],
        [GroupConfig("H", retryMaxTimes=2)],
        bench.now_ms,
    )
    assert one_topic(bench, "Theirs")["readQueueNums"] == 5
    assert one_topic(bench, "Mine")["readQueueNums"] == 2, "its own stays"
    group = bench.broker.groups.get("H")
    assert group is not None and group.retryMaxTimes == 2
    bench.tick()
    assert b"Theirs" in (bench.files.read("config/topics.json") or b"")


def test_a_joining_broker_does_not_take_bad_names(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    before = bench.state()
    bench.broker.adopt(
        [TopicConfig("../../x"), TopicConfig("rmq_sys_other")], [GroupConfig("a/b")], bench.now_ms
    )
    assert bench.state() == before
    assert "../../x" in caplog.text and "a/b" in caplog.text
