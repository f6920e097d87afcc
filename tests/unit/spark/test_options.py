"""Options of the Spark source: what is accepted, and what is said about the rest."""

from __future__ import annotations

import pickle

import pytest

from cometmq.errors import UsageError
from cometmq.spark.options import parse, size_bytes, span_ms
from cometmq.spark.source_options import TABLE, SourceOptions

GOOD = {"namesrv": "localhost:9876", "topic": "orders"}


def test_names_may_be_spelt_in_any_case() -> None:
    found = SourceOptions.parse({"NameSrv": "x:1", "TOPIC": "a, b,a", "FailOnDataLoss": "FALSE"})
    assert (found.namesrv, found.topics, found.fails_on_loss) == ("x:1", ("a", "b"), False)


def test_words_may_be_spelt_in_any_case() -> None:
    text = '{"t": {"b": {"0": "Earliest", "1": "LATEST", "2": 7}}}'
    found = SourceOptions.parse({**GOOD, "startingOffsets": text})
    assert found.start == {"t": {"b": {0: "earliest", 1: "latest", 2: 7}}}
    assert SourceOptions.parse({**GOOD, "startingOffsets": "Latest"}).start == "latest"


def test_a_stream_begins_with_what_is_new_and_a_batch_with_everything() -> None:
    assert SourceOptions.parse(GOOD, streaming=True).start == "latest"
    assert SourceOptions.parse(GOOD, streaming=False).start == "earliest"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"topci": "x"}, "unknown option 'topci'.*did you mean 'topic'"),
        ({"startingOffset": "latest"}, "did you mean 'startingOffsets'"),
        ({"zzz": "1"}, "unknown option 'zzz'.*known: .*namesrv"),
        ({"Topic": "x"}, "'topic' .*given twice"),
        ({"topic": " , "}, "at least one"),
        ({"topicPattern": "a.*"}, "one of the options topic, topicPattern and assign"),
        ({"startingOffsets": "first"}, "must be earliest, latest, group, or JSON"),
        ({"startingOffsets": '{"t": {"b": {"0": -5}}}'}, "t/b/0: -5"),
        ({"startingOffsets": '{"t": {"b": {"x": 5}}}'}, "t/b/x: 5"),
        ({"startingOffsets": '{"t": {"b": 5}}'}, "JSON by topic, broker and queue"),
        ({"startingOffsets": "{"}, "JSON by topic"),
        ({"startingOffsets": "[]"}, "JSON by topic"),
        ({"startingOffsets": "group"}, "need the option 'group'"),
        ({"startingOffsets": '{"t": {"b": {"0": "group"}}}'}, "need the option 'group'"),
        ({"endingOffsets": "earliest"}, "would read nothing"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970 or a time such as"),
        ({"startingTimestamp": "9" * 20}, "after the year 9999"),
        (
            {"startingTimestamp": "2026-03-02", "endingTimestamp": "2026-03-01"},
            "is before starting",
        ),
        (
            {
                "startingOffsets": '{"t": {"b": {"0": 1, "1": 6}}}',
                "endingOffsets": '{"t": {"b": {"0": 1, "1": 5}}}',
            },
            "endingOffsets of t/b/1, 5, is before its startingOffsets, 6",
        ),
        ({"group": "my group!"}, "consumer group 'my group!' may have only"),
        ({"startingTimestamp": "1", "startingOffsets": "latest"}, "contradict each other"),
        ({"endingTimestamp": "1", "endingOffsets": "latest"}, "contradict each other"),
        ({"maxOffsetsPerTrigger": "0"}, "from 1 to"),
        ({"maxOffsetsPerTrigger": "many"}, "whole number"),
        ({"maxBytesPerTrigger": "lots"}, "a size such as"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "5 is more than"),
        ({"maxTriggerDelay": "5s"}, "minOffsetsPerTrigger: give it"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "a time span such as"),
        ({"minPartitions": "-1"}, "from 1 to"),
        ({"maxRecordsPerPartition": "0"}, "from 1 to"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"tags": "a", "sql92": "x = 1"}, "by tags or by sql92"),
        ({"pullBatchSize": "0"}, "from 1 to"),
        ({"commitOffsetsToGroup": "true"}, "need the option 'group'"),
        ({"accessKey": "a"}, "accessKey and secretKey go together"),
        ({"securityToken": "a"}, "goes with accessKey"),
        ({"tlsCaFile": "/x"}, "without tls=true"),
        ({"tls": "true", "tlsKeyFile": "/x"}, "without tlsCertFile"),
        ({"requestTimeout": "x"}, "a time span"),
        ({"requestTimeout": "0s"}, "more than nothing"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SourceOptions.parse({**GOOD, **more})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "t"}, "needs the option 'namesrv'"),
        ({"namesrv": "x:1"}, "given: none of them"),
        ({"namesrv": "x:1", "topicPattern": "("}, "regular expression"),
        ({"namesrv": "x:1", "assign": '{"t": {"b": []}}'}, "JSON by topic and broker"),
        ({"namesrv": "x:1", "assign": '{"t": {"b": ["0"]}}'}, "JSON by topic and broker"),
        ({"namesrv": " ", "topic": "t"}, "must not be empty"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SourceOptions.parse(options)


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    value = "latest" if name == "endingOffsets" else "1"
    with pytest.raises(UsageError, match=f"{name}' is for a batch read only"):
        SourceOptions.parse({**GOOD, name: value}, streaming=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("maxOffsetsPerTrigger", "5"),
        ("maxBytesPerTrigger", "5m"),
        ("minOffsetsPerTrigger", "5"),
        ("commitOffsetsToGroup", "true"),
    ],
)
def test_a_batch_has_no_triggers(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name}' is for a stream only"):
        SourceOptions.parse({**GOOD, "group": "g", name: value}, streaming=False)


def test_times_are_milliseconds_or_iso_and_without_a_zone_utc() -> None:
    texts = (
        "1772366400000",
        "2026-03-01T12:00:00",
        "2026-03-01T13:00:00+01:00",
        "2026-03-01 12:00",
    )
    for text in texts:
        assert SourceOptions.parse({**GOOD, "startingTimestamp": text}).start == 1772366400000


def test_sizes_and_spans() -> None:
    assert [size_bytes(text) for text in ("7", "2k", "3MB", "1 GiB")] == [
        7,
        2048,
        3 << 20,
        1 << 30,
    ]
    assert [span_ms(text) for text in ("7", "2s", "15m", "1h", "2d", "9 ms")] == [
        7,
        2_000,
        900_000,
        3_600_000,
        172_800_000,
        9,
    ]


def test_no_secret_is_in_any_text() -> None:
    keys = {"accessKey": "AK-SECRET", "secretKey": "SK-SECRET", "securityToken": "ST-SECRET"}
    found = SourceOptions.parse({**GOOD, **keys})
    assert "SECRET" not in repr(found)
    assert "SECRET" not in repr(found.access)
    assert "SK-SECRET" not in repr(found.access.credentials())
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(UsageError) as failed:
        parse(TABLE, {**GOOD, "secretKey": ""})
    assert "''" not in str(failed.value)


def test_every_option_is_explained() -> None:
    assert all(option.help for option in TABLE)
    assert len({option.name.lower() for option in TABLE}) == len(TABLE)
