"""Names from outside: every request that carries a topic or a group, and every way to abuse one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cometmq.broker import names
from cometmq.broker.requests import TABLE
from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import Bench, consumer_body, heartbeat_body

BAD = [
    "../../x",
    "/etc/passwd",
    "..",
    "a/b",
    "a\\b",
    "a.b",
    "a b",
    "a\x00b",
    "a\nb",
    "a\x01b",
    "é",
    "a;b",
    "a@b",
    "a+b",
    "",
    " ",
    "x" * 300,
]
GOOD = "Fine"


def queue(bench: Bench, topic: str) -> dict[str, Any]:
    return {"topic": topic, "queueId": 0}


def json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def end_of_transaction() -> dict[str, Any]:
    offsets = {"tranStateTableOffset": 0, "commitLogOffset": 0}
    return {"producerGroup": GOOD, "commitOrRollback": 8, **offsets}


def popped(bench: Bench, topic: str, group: str) -> dict[str, Any]:
    """What the pop family asks for."""
    return queue(bench, topic) | {
        "consumerGroup": group,
        "maxMsgNums": 1,
        "invisibleTime": 1000,
        "pollTime": 0,
        "initMode": 0,
        "extraInfo": "0 1 2 3 0 b 0 0",
        "offset": 0,
    }


def batch_of_acks(topic: str, group: str) -> bytes:
    ack = {"r": "0", "so": 0, "q": 0, "rq": 0, "pt": 1, "it": 1, "b": "AQ=="}
    return json({"brokerName": "b", "acks": [ack | {"t": topic, "c": group}]})


POP_REQUESTS = (
    C.POP_MESSAGE,
    C.ACK_MESSAGE,
    C.CHANGE_MESSAGE_INVISIBLETIME,
    C.PEEK_MESSAGE,
    C.NOTIFICATION,
    C.POLLING_INFO,
)

TOPIC_REQUESTS: dict[int, Any] = {
    **{code: lambda b, t: (popped(b, t, GOOD), b"") for code in POP_REQUESTS},
    C.BATCH_ACK_MESSAGE: lambda b, t: (None, batch_of_acks(t, GOOD)),
    C.QUERY_ASSIGNMENT: lambda b, t: (None, json({"topic": t, "consumerGroup": GOOD})),
    C.SET_MESSAGE_REQUEST_MODE: lambda b, t: (
        None,
        json({"topic": t, "consumerGroup": GOOD, "mode": "POP"}),
    ),
    C.SEND_MESSAGE: lambda b, t: (b.send_ext(t, code=C.SEND_MESSAGE), b"x"),
    C.SEND_MESSAGE_V2: lambda b, t: (b.send_ext(t), b"x"),
    C.SEND_BATCH_MESSAGE: lambda b, t: (b.send_ext(t, batch=True), b""),
    C.PULL_MESSAGE: lambda b, t: (b.pull_ext(t, group="TOOLS_CONSUMER"), b""),
    C.LITE_PULL_MESSAGE: lambda b, t: (b.pull_ext(t, group="TOOLS_CONSUMER"), b""),
    C.QUERY_MESSAGE: lambda b, t: (
        {"topic": t, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1},
        b"",
    ),
    C.QUERY_CONSUMER_OFFSET: lambda b, t: (queue(b, t) | {"consumerGroup": GOOD}, b""),
    C.UPDATE_CONSUMER_OFFSET: lambda b, t: (
        queue(b, t) | {"consumerGroup": "TOOLS_CONSUMER", "commitOffset": 1},
        b"",
    ),
    C.SEARCH_OFFSET_BY_TIMESTAMP: lambda b, t: (queue(b, t) | {"timestamp": 0}, b""),
    C.GET_MAX_OFFSET: lambda b, t: (queue(b, t), b""),
    C.GET_MIN_OFFSET: lambda b, t: (queue(b, t), b""),
    C.GET_EARLIEST_MSG_STORETIME: lambda b, t: (queue(b, t), b""),
    C.HEART_BEAT: lambda b, t: (None, heartbeat_body("c", [consumer_body(GOOD, {t: "*"})])),
    C.UPDATE_AND_CREATE_TOPIC: lambda b, t: (
        {"topic": t, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6},
        b"",
    ),
    C.UPDATE_AND_CREATE_TOPIC_LIST: lambda b, t: (
        None,
        json({"topicConfigList": [{"topicName": t}]}),
    ),
    C.DELETE_TOPIC_IN_BROKER: lambda b, t: ({"topic": t}, b""),
    C.GET_TOPIC_CONFIG: lambda b, t: ({"topic": t}, b""),
    C.INVOKE_BROKER_TO_RESET_OFFSET: lambda b, t: (
        {"topic": t, "group": "TOOLS_CONSUMER", "timestamp": -1, "isForce": True},
        b"",
    ),
    C.GET_TOPIC_STATS_INFO: lambda b, t: ({"topic": t}, b""),
    C.SEND_REPLY_MESSAGE: lambda b, t: (b.send_ext(t, code=C.SEND_MESSAGE), b"x"),
    C.SEND_REPLY_MESSAGE_V2: lambda b, t: (b.send_ext(t), b"x"),
    C.RECALL_MESSAGE: lambda b, t: ({"topic": t, "recallHandle": "x"}, b""),
    C.END_PRODUCERS: lambda b, t: ({"topic": t, "writer": "x"}, b""),
    C.QUERY_TOPIC_CONSUME_BY_WHO: lambda b, t: ({"topic": t}, b""),
    C.QUERY_CONSUME_TIME_SPAN: lambda b, t: ({"topic": t, "group": GOOD}, b""),
}
OPTIONAL_TOPIC_REQUESTS: dict[int, Any] = {
    C.END_TRANSACTION: lambda b, t: (end_of_transaction() | {"topic": t}, b""),
    C.RESUME_CHECK_HALF_MESSAGE: lambda b, t: ({"msgId": "00" * 16, "topic": t}, b""),
    C.GET_CONSUME_STATS: lambda b, t: ({"consumerGroup": GOOD, "topic": t}, b""),
    C.QUERY_SUBSCRIPTION_BY_CONSUMER: lambda b, t: ({"group": GOOD, "topic": t}, b""),
    C.CLONE_GROUP_OFFSET: lambda b, t: (
        {"srcGroup": "TOOLS_CONSUMER", "destGroup": "TOOLS_CONSUMER", "topic": t},
        b"",
    ),
}
GROUP_REQUESTS: dict[int, Any] = {
    **{code: lambda b, g: (popped(b, "BenchmarkTest", g), b"") for code in POP_REQUESTS},
    C.BATCH_ACK_MESSAGE: lambda b, g: (None, batch_of_acks("BenchmarkTest", g)),
    C.QUERY_ASSIGNMENT: lambda b, g: (None, json({"topic": "BenchmarkTest", "consumerGroup": g})),
    C.SET_MESSAGE_REQUEST_MODE: lambda b, g: (
        None,
        json({"topic": "BenchmarkTest", "consumerGroup": g, "mode": "POP"}),
    ),
    C.END_TRANSACTION: lambda b, g: (end_of_transaction() | {"producerGroup": g}, b""),
    C.PULL_MESSAGE: lambda b, g: (b.pull_ext("BenchmarkTest", group=g), b""),
    C.LITE_PULL_MESSAGE: lambda b, g: (b.pull_ext("BenchmarkTest", group=g), b""),
    C.QUERY_CONSUMER_OFFSET: lambda b, g: (queue(b, "BenchmarkTest") | {"consumerGroup": g}, b""),
    C.UPDATE_CONSUMER_OFFSET: lambda b, g: (
        queue(b, "BenchmarkTest") | {"consumerGroup": g, "commitOffset": 1},
        b"",
    ),
    C.CONSUMER_SEND_MSG_BACK: lambda b, g: ({"group": g, "offset": 0, "delayLevel": 0}, b""),
    C.GET_CONSUMER_LIST_BY_GROUP: lambda b, g: ({"consumerGroup": g}, b""),
    C.LOCK_BATCH_MQ: lambda b, g: (None, json({"consumerGroup": g, "clientId": "c"})),
    C.UNLOCK_BATCH_MQ: lambda b, g: (None, json({"consumerGroup": g, "clientId": "c"})),
    C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: lambda b, g: (None, json({"groupName": g})),
    C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: lambda b, g: (
        None,
        json({"groupConfigList": [{"groupName": g}]}),
    ),
    C.DELETE_SUBSCRIPTIONGROUP: lambda b, g: ({"groupName": g, "cleanOffset": True}, b""),
    C.GET_SUBSCRIPTIONGROUP_CONFIG: lambda b, g: ({"group": g}, b""),
    C.INVOKE_BROKER_TO_RESET_OFFSET: lambda b, g: (
        {"topic": "BenchmarkTest", "group": g, "timestamp": -1, "isForce": True},
        b"",
    ),
    C.CLONE_GROUP_OFFSET: lambda b, g: ({"srcGroup": g, "destGroup": "TOOLS_CONSUMER"}, b""),
    C.GET_CONSUME_STATS: lambda b, g: ({"consumerGroup": g}, b""),
    C.GET_CONSUMER_CONNECTION_LIST: lambda b, g: ({"consumerGroup": g}, b""),
    C.GET_PRODUCER_CONNECTION_LIST: lambda b, g: ({"producerGroup": g}, b""),
    C.QUERY_TOPICS_BY_CONSUMER: lambda b, g: ({"group": g}, b""),
    C.QUERY_SUBSCRIPTION_BY_CONSUMER: lambda b, g: ({"group": g}, b""),
    C.QUERY_CONSUME_TIME_SPAN: lambda b, g: ({"topic": "BenchmarkTest", "group": g}, b""),
    C.GET_CONSUMER_RUNNING_INFO: lambda b, g: ({"consumerGroup": g, "clientId": "c"}, b""),
    C.CONSUME_MESSAGE_DIRECTLY: lambda b, g: ({"consumerGroup": g, "clientId": "c"}, b""),
}
NAMELESS = {
    C.GET_ALL_MESSAGE_REQUEST_MODE,
    C.VIEW_MESSAGE_BY_ID,  # a topic may ride along; it is not looked at
    C.UNREGISTER_CLIENT,  # its groups are optional; tested below
    C.CHECK_CLIENT_CONFIG,  # nothing is kept or looked up
    C.GET_ALL_TOPIC_CONFIG,
    C.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    C.GET_ALL_CONSUMER_OFFSET,
    C.GET_BROKER_CONFIG,
    C.UPDATE_BROKER_CONFIG,
    C.TRIGGER_DELETE_FILES,
    C.CLEAN_EXPIRED_CONSUMEQUEUE,
    C.DELETE_EXPIRED_COMMITLOG,
    C.CLEAN_UNUSED_TOPIC,
    C.GET_BROKER_RUNTIME_INFO,
    C.GET_ALL_DELAY_OFFSET,
    C.GET_TIMER_CHECK_POINT,
    C.GET_TIMER_METRICS,
    C.GET_ALL_PRODUCER_INFO,
    C.VIEW_BROKER_STATS_DATA,  # a key of figures that are kept, not a name
}


def test_every_request_is_in_these_tables() -> None:
    known = {*TOPIC_REQUESTS, *OPTIONAL_TOPIC_REQUESTS, *GROUP_REQUESTS, *NAMELESS}
    assert {int(code) for code in TABLE} == {int(code) for code in known}


def tree(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


@pytest.fixture
def quiet(benches: Benches) -> Bench:
    return benches()


def check_refused(bench: Bench, folder: Path, code: int, request: tuple[Any, bytes]) -> None:
    """Not served, no bug, nothing changed in memory or on disk."""
    before, files = bench.state(), tree(folder)
    live = (dict(bench.broker.members.consumers), bench.broker.holds.count)
    ext, body = request
    answer = bench.ask(code, ext, body)
    assert answer.code in (17, 26, 29), (answer.code, answer.remark)
    assert answer.remark
    assert bench.state() == before
    assert (dict(bench.broker.members.consumers), bench.broker.holds.count) == live
    assert tree(folder) == files


@pytest.mark.parametrize("code", TOPIC_REQUESTS, ids=lambda code: C(code).name)
def test_bad_topic_names_are_refused_everywhere(quiet: Bench, tmp_path: Path, code: int) -> None:
    for name in BAD:
        check_refused(quiet, tmp_path, code, TOPIC_REQUESTS[code](quiet, name))


@pytest.mark.parametrize("code", OPTIONAL_TOPIC_REQUESTS, ids=lambda code: C(code).name)
def test_bad_optional_topic_names_are_refused(quiet: Bench, tmp_path: Path, code: int) -> None:
    for name in BAD:
        if name:
            check_refused(quiet, tmp_path, code, OPTIONAL_TOPIC_REQUESTS[code](quiet, name))


@pytest.mark.parametrize("code", GROUP_REQUESTS, ids=lambda code: C(code).name)
def test_bad_group_names_are_refused_everywhere(quiet: Bench, tmp_path: Path, code: int) -> None:
    for name in BAD:
        check_refused(quiet, tmp_path, code, GROUP_REQUESTS[code](quiet, name))


def test_a_heartbeat_with_a_bad_group_keeps_nothing_of_it(quiet: Bench) -> None:
    before = quiet.state()
    for name in BAD:
        assert quiet.beat(name or " ", producers=(name,)).code == 0
    assert quiet.broker.members.consumers == {}
    assert quiet.broker.members.producers == {}
    assert quiet.state() == before


@pytest.mark.parametrize("field", ["consumerGroup", "producerGroup"])
def test_a_bad_group_can_not_unregister(quiet: Bench, field: str) -> None:
    for name in BAD:
        answer = quiet.ask(C.UNREGISTER_CLIENT, {"clientID": "c", field: name})
        assert answer.code == (29 if name else 0)


def test_a_stored_topic_with_a_bad_name_is_left_out(
    benches: Benches, caplog: pytest.LogCaptureFixture
) -> None:
    bench = benches()
    bench.close()
    bench.files.write(
        "config/topics.json",
        b'{"topicConfigTable":{"../x":{"topicName":"../x"},"A":{"topicName":"B"},'
        b'"Ok":{"topicName":"Ok"}}}',
    )
    again = benches()
    assert again.broker.topics.get("../x") is None
    assert again.broker.topics.get("A") is None
    assert again.broker.topics.get("Ok") is not None
    assert "'../x'" in caplog.text


def test_a_stored_group_with_a_bad_name_is_left_out(benches: Benches) -> None:
    bench = benches()
    bench.close()
    bench.files.write(
        "config/subscriptionGroup.json",
        b'{"subscriptionGroupTable":{"../x":{"groupName":"../x"},"Ok":{"groupName":"Ok"}}}',
    )
    again = benches()
    assert again.broker.groups.get("../x") is None
    assert again.broker.groups.get("Ok") is not None


@pytest.mark.parametrize("name", ["a", "%RETRY%g", "A-b_c%d|e", "x" * 127])
def test_good_topic_names(name: str) -> None:
    assert names.topic_problem(name) is None


@pytest.mark.parametrize("prefix", ["%RETRY%", "%DLQ%"])
def test_retry_and_dead_letter_topics_may_be_longer(prefix: str) -> None:
    assert names.topic_problem(prefix + "g" * (255 - len(prefix))) is None
    assert names.topic_problem(prefix + "g" * (256 - len(prefix))) is not None


def test_the_longest_group_has_a_retry_topic_that_fits() -> None:
    group = "g" * names.MAX_GROUP
    assert names.group_problem(group) is None
    assert names.topic_problem(names.retry_topic(group)) is None
    assert names.group_problem(group + "g") is not None
