"""Bodies from Java, C++, Go and Node clients, and hostile ones."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest

from cometmq.errors import BodyError
from cometmq.wire import bodies
from cometmq.wire.bodies import DataVersion, Registration, TopicConfig
from cometmq.wire.hashing import java_hash

HEARTBEAT = {
    "clientID": "10.0.0.1@1",
    "consumerDataSet": [
        {
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": "group",
            "messageModel": "CLUSTERING",
            "subscriptionDataSet": [
                {
                    "classFilterMode": False,
                    "codeSet": [2598919, 2598920],
                    "expressionType": "TAG",
                    "subString": "TagA || TagB",
                    "subVersion": 1700000000000,
                    "tagsSet": ["TagB", "TagA"],
                    "topic": "T",
                }
            ],
            "unitMode": False,
        }
    ],
    "heartbeatFingerprint": -5,
    "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
    "withoutSub": False,
}


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


# -------------------------------------------------------------------------------------- heartbeat


def test_java_heartbeat() -> None:
    found = bodies.heartbeat(raw(HEARTBEAT))
    assert (found.client_id, found.producers) == ("10.0.0.1@1", ("CLIENT_INNER_PRODUCER",))
    assert (found.fingerprint, found.is_without_sub) == (-5, False)
    (consumer,) = found.consumers
    assert (consumer.groupName, consumer.consumeType) == ("group", "CONSUME_PASSIVELY")
    assert consumer.messageModel == "CLUSTERING"
    assert consumer.consumeFromWhere == "CONSUME_FROM_FIRST_OFFSET"
    (one,) = consumer.subscriptions
    assert (one.topic, one.subString, one.subVersion) == ("T", "TagA || TagB", 1700000000000)
    assert (one.tagsSet, one.codeSet) == (("TagA", "TagB"), (2598919, 2598920))
    assert (one.expressionType, one.classFilterMode) == ("TAG", False)


def test_cpp_heartbeat_has_ordinals_text_numbers_and_no_empty_sets() -> None:
    found = bodies.heartbeat(
        raw(
            {
                "clientID": "c",
                "consumerDataSet": [
                    {
                        "consumeFromWhere": 4,
                        "consumeType": 1,
                        "groupName": "g",
                        "messageModel": 0,
                        "subscriptionDataSet": [
                            {"subString": "a||b", "subVersion": "1700000000000", "topic": "T"}
                        ],
                    }
                ],
            }
        )
    )
    (consumer,) = found.consumers
    assert consumer.consumeType == "CONSUME_PASSIVELY"
    assert consumer.messageModel == "BROADCASTING"
    assert consumer.consumeFromWhere == "CONSUME_FROM_FIRST_OFFSET"
    (one,) = consumer.subscriptions
    assert (one.subVersion, one.expressionType) == (1700000000000, "TAG")
    assert one.tagsSet == ("a", "b")
    assert one.codeSet == (java_hash("a"), java_hash("b"))


def test_go_heartbeat_has_codes_as_text() -> None:
    found = bodies.subscription({"topic": "T", "tagsSet": ["TagA"], "codeSet": ["2598919"]})
    assert found.codeSet == (2598919,)


@pytest.mark.parametrize(
    ("fields", "tags", "codes"),
    [
        ({}, (), ()),
        ({"subString": ""}, (), ()),
        ({"subString": "*"}, (), ()),
        ({"subString": " TagA || || TagB|| "}, ("TagA", "TagB"), (2598919, 2598920)),
        ({"subString": "TagA", "codeSet": []}, ("TagA",), (2598919,)),
        ({"tagsSet": ["TagA"], "codeSet": None}, ("TagA",), (2598919,)),
        ({"tagsSet": ["Aa", "BB"], "codeSet": [2112]}, ("Aa", "BB"), (2112,)),
        ({"tagsSet": ["TagA", "TagA"], "codeSet": [2598919]}, ("TagA",), (2598919,)),
        ({"subString": "a > 5", "expressionType": "SQL92"}, (), ()),
        ({"tagsSet": [7, True]}, ("7", "true"), (java_hash("7"), java_hash("true"))),
    ],
)
def test_tags_of_a_subscription(
    fields: dict[str, Any], tags: tuple[str, ...], codes: tuple[int, ...]
) -> None:
    found = bodies.subscription({"topic": "T", **fields})
    assert (found.tagsSet, found.codeSet) == (tags, codes)


def test_missing_sets_are_empty() -> None:
    for fields in ({}, {"consumerDataSet": None, "producerDataSet": None}):
        found = bodies.heartbeat(raw({"clientID": "c", **fields}))
        assert (found.consumers, found.producers) == ((), ())


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("CONSUME_ACTIVELY", "CONSUME_ACTIVELY"),
        ("consume_pop", "CONSUME_POP"),
        (0, "CONSUME_ACTIVELY"),
        ("2", "CONSUME_POP"),
        (3, "CONSUME_PASSIVELY"),
        (-1, "CONSUME_PASSIVELY"),
        ("whatever", "CONSUME_PASSIVELY"),
        ("²", "CONSUME_PASSIVELY"),
        ("9" * 5000, "CONSUME_PASSIVELY"),
        ("", "CONSUME_PASSIVELY"),
        (None, "CONSUME_PASSIVELY"),
        ([], "CONSUME_PASSIVELY"),
        (1.5, "CONSUME_PASSIVELY"),
    ],
)
def test_enums_by_name_and_ordinal(value: Any, name: str) -> None:
    found = bodies.heartbeat(raw({"consumerDataSet": [{"groupName": "g", "consumeType": value}]}))
    assert found.consumers[0].consumeType == name


@pytest.mark.parametrize("value", [True, "true", "TRUE"])
def test_without_sub(value: Any) -> None:
    assert bodies.heartbeat(raw({"withoutSub": value})).is_without_sub
    assert not bodies.heartbeat(raw({"withoutSub": 1})).is_without_sub


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"topic": None},
        {"topic": []},
        {"topic": "T", "tagsSet": [["x"]]},
        {"topic": "T", "tagsSet": [None]},
        {"topic": "T", "subString": {}},
        {"topic": "T", "codeSet": ["x"]},
        {"topic": "T", "codeSet": [None]},
        {"topic": "T", "codeSet": [2**63]},
        {"topic": "T", "subVersion": "x"},
        {"topic": "T", "subVersion": []},
        {"topic": "T", "subVersion": "9" * 5000},
        {"topic": "T", "subVersion": 10**30},
    ],
)
def test_subscription_that_is_none(fields: dict[str, Any]) -> None:
    with pytest.raises(BodyError):
        bodies.subscription(fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"5",
        b'{"consumerDataSet":[5]}',
        b'{"producerDataSet":["g"]}',
        b'{"clientID":{}}',
        b'{"heartbeatFingerprint":"x"}',
        b'{"heartbeatFingerprint":1e400}',
        b'{"heartbeatFingerprint":1e300}',
        b'{"consumerDataSet":[{"subscriptionDataSet":[{"topic":"t","subVersion":1e400}]}]}',
        b'{"consumerDataSet":[{"groupName":[' + b"[" * 900 + b"]" * 900 + b"]}]}",
    ],
)
def test_heartbeat_that_is_none(body: bytes) -> None:
    with pytest.raises(BodyError):
        bodies.heartbeat(body)


def test_references_to_a_large_object_do_not_become_large_texts() -> None:
    body = (
        b'{"big":[' + b"1," * 1000 + b'1],"consumerDataSet":[{"subscriptionDataSet":[{"topic":"t",'
        b'"tagsSet":[' + b",".join([b'{"$ref":"$.big"}'] * 100) + b"]}]}]}"
    )
    with pytest.raises(BodyError, match="not a text"):
        bodies.heartbeat(body)


# ---------------------------------------------------------------------------------------- configs


def test_topic_config_takes_numbers_as_text_and_nulls() -> None:
    found = bodies.topic_config(
        {"topicName": "T", "perm": "4", "attributes": None, "order": "true", "unknown": 1}
    )
    assert found == TopicConfig("T", perm=4, order=True)
    assert json.loads(msgspec.json.encode(found)) == {
        "topicName": "T",
        "readQueueNums": 16,
        "writeQueueNums": 16,
        "perm": 4,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": True,
        "attributes": {},
    }


@pytest.mark.parametrize(
    "fields",
    [
        [],
        None,
        5,
        {},
        {"topicName": 5},
        {"topicName": "T", "perm": "x"},
        {"topicName": "T", "perm": 2**31},
        {"topicName": "T", "perm": 10**300},
        {"topicName": "T", "readQueueNums": "9" * 5000},
        {"topicName": "T", "attributes": []},
        {"topicName": "T", "attributes": {"a": 5}},
    ],
)
def test_topic_config_that_is_none(fields: Any) -> None:
    with pytest.raises(BodyError):
        bodies.topic_config(fields)


def test_group_config_defaults() -> None:
    found = bodies.group_config({"groupName": "g", "retryMaxTimes": "3", "attributes": None})
    assert json.loads(msgspec.json.encode(found)) == {
        "groupName": "g",
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": False,
        "retryQueueNums": 1,
        "retryMaxTimes": 3,
        "groupRetryPolicy": {"type": "CUSTOMIZED"},
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
        "groupSysFlag": 0,
        "consumeTimeoutMinute": 15,
        "attributes": {},
        "subscriptionDataSet": None,
    }


def test_group_config_with_what_can_not_be_saved() -> None:
    loaded = bodies.load_object(b'{"groupName":"g","groupRetryPolicy":{"x":{{"a":1}:2}}}', "x")
    with pytest.raises(BodyError, match="key of a map"):
        bodies.group_config(loaded)


def test_data_version() -> None:
    assert bodies.data_version(None) == DataVersion()
    assert bodies.data_version({"counter": "5", "timestamp": 7}) == DataVersion(5, 0, 7)
    assert DataVersion(5, 1, 7).next(9) == DataVersion(6, 1, 9)
    for wrong in ([1], "x", {"counter": 2**63}, {"counter": 1.5}):
        with pytest.raises(BodyError):
            bodies.data_version(wrong)


# ----------------------------------------------------------------------------------- registration

TABLE = {
    "dataVersion": {"counter": 3, "stateVersion": 1, "timestamp": 1700000000000},
    "topicConfigTable": {"T": {"topicName": "T", "readQueueNums": 4, "writeQueueNums": 4}},
}
REGISTERED = Registration(
    DataVersion(3, 1, 1700000000000), {"T": TopicConfig("T", 4, 4)}, ("10.0.0.1:5",)
)


def test_plain_registration() -> None:
    body = raw({"filterServerList": ["10.0.0.1:5"], "topicConfigSerializeWrapper": TABLE})
    assert bodies.registration(body, 401) == REGISTERED
    assert bodies.registration(bodies.encode_registration(REGISTERED), 479) == REGISTERED


def test_registration_that_only_the_tolerant_reader_takes() -> None:
    body = raw({"filterServerList": ["10.0.0.1:5"], "topicConfigSerializeWrapper": TABLE})
    assert bodies.registration(body[:-1] + b",}", 401) == REGISTERED
    nulls = body.replace(b'"readQueueNums"', b'"attributes": null, "readQueueNums"')
    assert nulls != body
    assert bodies.registration(nulls, 401) == REGISTERED


@pytest.mark.parametrize("tail", [b"}", b",}"])
def test_registration_before_3_0_11_is_the_table_alone(tail: bytes) -> None:
    found = bodies.registration(raw(TABLE)[:-1] + tail, 36)
    assert (found.version, found.topics) == (REGISTERED.version, REGISTERED.topics)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"topicConfigSerializeWrapper":null}'])
def test_empty_registration(body: bytes) -> None:
    assert bodies.registration(body, 401) == Registration(DataVersion(), {})


def compressed(*parts: bytes, tail: bytes = b"") -> bytes:
    version = b'{"counter":3,"stateVersion":1,"timestamp":1700000000000}'
    sized = [struct.pack(">i", len(part)) + part for part in parts]
    servers = b'["10.0.0.1:5"]'
    return zlib.compress(
        struct.pack(">i", len(version))
        + version
        + struct.pack(">i", len(parts))
        + b"".join(sized)
        + struct.pack(">i", len(servers))
        + servers
        + tail
    )


def test_compressed_registration() -> None:
    body = compressed(
        b"T 4 4 6 SINGLE_TAG", b'U 8 2 2 MULTI_TAG {"message.type":"FIFO"}', b"V 1 1 1 X "
    )
    found = bodies.registration(body, 401)
    assert (found.version, found.filter_servers) == (REGISTERED.version, ("10.0.0.1:5",))
    assert found.topics == {
        "T": TopicConfig("T", 4, 4, 6),
        "U": TopicConfig("U", 8, 2, 2, "MULTI_TAG", attributes={"message.type": "FIFO"}),
        "V": TopicConfig("V", 1, 1, 1, "X"),
    }
    mapped = compressed(b"T 4 4 6 SINGLE_TAG", tail=struct.pack(">ii", 1, 2) + b"{}")
    assert bodies.registration(mapped, 413).topics == {"T": TopicConfig("T", 4, 4, 6)}


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"\x78\x9c",
        b"\x78\x9cgarbage",
        compressed(b"T 4 4 6 SINGLE_TAG")[:-5],
        zlib.compress(b""),
        zlib.compress(b"\0\0\0\2{}"),
        zlib.compress(b"\xff\xff\xff\xff"),
        zlib.compress(b"\0\0\0\2{}\x7f\xff\xff\xff"),
        zlib.compress(b"\0\0\0\2[]\0\0\0\0")[:-4],
        compressed(b"T 4 4"),
        compressed(b"T x 4 6 SINGLE_TAG"),
        compressed(b"T 4 4 99999999999 SINGLE_TAG"),
        compressed(b"T 4 4 6 SINGLE_TAG {"),
        compressed(b"T 4 4 6 SINGLE_TAG 5"),
        compressed(b'T 4 4 6 SINGLE_TAG {"a":[]}'),
        compressed(b""),
    ],
)
def test_compressed_registration_that_is_none(body: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        bodies.registration(body, 413)
    assert len(str(caught.value)) < 400


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bodies.MAX_INFLATED_BYTES == 64 * 1024 * 1024
    limit = 1024 * 1024
    monkeypatch.setattr(bodies, "MAX_INFLATED_BYTES", limit)
    bomb = zlib.compress(bytes(16 * limit))
    tracemalloc.start()
    try:
        with pytest.raises(BodyError, match="grows"):
            bodies.registration(bomb, 413)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * limit, "zlib joins its pieces, so twice the limit for a moment"


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"topicConfigSerializeWrapper":5}',
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":[]}}',
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":5}}}',
        b'{"topicConfigSerializeWrapper":{"dataVersion":[1]}}',
        b'{"filterServerList":[[]]}',
        b'{"topicConfigSerializeWrapper":' * 10_000,
        b"\xff",
    ],
)
def test_plain_registration_that_is_none(body: bytes) -> None:
    with pytest.raises(BodyError):
        bodies.registration(body, 401)


# ------------------------------------------------------------------------------------------- misc


def test_queue_key_is_in_fastjson_order() -> None:
    assert list(bodies.queue_key("t", "b", 3).items()) == [
        ("brokerName", "b"),
        ("queueId", 3),
        ("topic", "t"),
    ]


def test_properties_text() -> None:
    text = b"# comment\n! other\n\n a = b \nc:d\ne=f=g\r\nempty=\nlone\n"
    assert bodies.parse_properties_text(text) == {
        "a": "b",
        "c": "d",
        "e": "f=g",
        "empty": "",
        "lone": "",
    }
    with pytest.raises(BodyError):
        bodies.parse_properties_text(b"\xff")
