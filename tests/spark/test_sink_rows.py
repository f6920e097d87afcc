"""The sink without Spark and without a broker: rows, bytes, queues, options."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types
from sink_help import Recorder, options

from cometmq.client.selector import hash_of
from cometmq.errors import UsageError
from cometmq.message import MessageQueue
from cometmq.spark import sink, sink_bad
from cometmq.spark.sink_columns import check_schema
from cometmq.spark.sink_encode import UniqueKeys
from cometmq.spark.sink_json import json_bodies
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.sink_place import STRIPE, Layout, java_hashes
from cometmq.spark.sink_rows import MAX_USER_PROPERTY_BYTES
from cometmq.spark.sink_send import SEND_BATCH, SEND_ONE, Request
from cometmq.spark.sink_task import Identity, Task
from cometmq.wire import properties as props
from cometmq.wire.hashing import java_hash
from cometmq.wire.record import split_batch

QUEUES = [MessageQueue("t", "a", n) for n in range(4)] + [MessageQueue("t", "b", n) for n in (0, 9)]
MAP = pa.map_(pa.string(), pa.string())


def requests_of(batches: list[Any], chosen: SinkOptions | None = None, **who: Any) -> list[Request]:
    recorder = Recorder(QUEUES)
    identity = Identity(**({"writer": "w", "batch": 7, "partition": 3, "attempt": 1} | who))
    Task(chosen or options(), [], identity, recorder).write(batches)
    return recorder.requests


def messages_of(requests: list[Request]) -> dict[bytes, tuple[MessageQueue, dict[str, str]]]:
    """By body: where it goes, and its properties."""
    found = {}
    for request in requests:
        if request.code == SEND_ONE:
            found[request.body] = (request.queue, props.parse(request.properties))
        else:
            for piece in split_batch(request.body):
                found[piece.body] = (request.queue, props.parse(piece.properties))
    return found


# -------------------------------------------------------------------------------------- encoding


def mixed(count: int) -> Any:
    numbers = range(count)
    return pa.record_batch(
        {
            "body": [f"body {n} é" for n in numbers],
            "tags": [None if n % 3 == 0 else "" if n % 3 == 1 else f"tag{n}" for n in numbers],
            "keys": [None if n % 5 == 0 else [f"k{n}", "all"][: n % 5] for n in numbers],
            "properties": pa.array(
                [
                    None if n % 4 == 0 else [(f"p{j}", f"v{n}") for j in range(n % 3)]
                    for n in numbers
                ],
                MAP,
            ),
            "sharding_key": [None if n % 7 == 0 else f"s{n}" for n in numbers],
            "delay_level": pa.array([0 if n % 10 else 1 + n % 18 for n in numbers], pa.int32()),
        }
    )


def test_every_row_says_what_its_columns_say() -> None:
    found = messages_of(requests_of([mixed(2000)]))
    assert len(found) == 2000
    for n in range(2000):
        queue, said = found[f"body {n} é".encode()]
        assert said.get("TAGS") == (f"tag{n}" if n % 3 == 2 else None)
        assert said.get("KEYS") == (None if n % 5 == 0 else " ".join([f"k{n}", "all"][: n % 5]))
        own = {name: value for name, value in said.items() if name.startswith("p")}
        assert own == ({} if n % 4 == 0 else {f"p{j}": f"v{n}" for j in range(n % 3)})
        assert said.get("DELAY") == (None if n % 10 else str(1 + n % 18))
        if n % 7:
            assert said["__SHARDINGKEY"] == f"s{n}"
            assert queue == hash_of(f"s{n}")(QUEUES)


def test_delayed_rows_travel_alone_others_together() -> None:
    requests = requests_of([mixed(100)])
    assert sorted(r.count for r in requests if r.code == SEND_ONE) == [1] * 10
    assert sum(r.count for r in requests if r.code == SEND_BATCH) == 90
    assert len([r for r in requests if r.code == SEND_BATCH]) <= len(QUEUES)


def test_numbers_of_a_queue_count_without_a_gap_in_the_order_of_rows() -> None:
    by_producer: dict[tuple[MessageQueue, str], list[tuple[int, int]]] = {}
    for body, (queue, said) in messages_of(requests_of([mixed(1500), mixed(0)])).items():
        producer, batch, n = said["PRODUCER_SEQ"].split(" ")
        assert batch == "7" and producer.startswith("w.3.") and len(producer) <= 127
        assert producer.endswith(".d") == ("DELAY" in said)
        row = int(body.split()[1])
        by_producer.setdefault((queue, producer), []).append((row, int(n)))
    for pairs in by_producer.values():
        assert [n for _, n in sorted(pairs)] == list(range(len(pairs)))


@pytest.mark.parametrize("sizes", [[1] * 1000, [999, 1], [256, 256, 256, 232], [3, 500, 497]])
def test_requests_are_the_same_however_arrow_cuts_the_rows(sizes: list[int]) -> None:
    whole = mixed(1000)
    chosen = options(batchMessages=64, batchBytes=5000)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(whole.slice(at, size))
        at += size

    def seen(batches: list[Any]) -> dict[MessageQueue, list[tuple[Any, ...]]]:
        found: dict[MessageQueue, list[tuple[Any, ...]]] = {}
        for r in requests_of(batches, chosen):
            kind = r.code == SEND_BATCH
            found.setdefault(r.queue, []).append((kind, r.body, r.properties, r.first_row))
        # Delayed rows have numbers of their own: only among themselves does order count.
        return {
            queue: sorted(of_queue, key=lambda r: (r[0], r[3])) for queue, of_queue in found.items()
        }

    assert seen(pieces) == seen([whole])


def test_requests_keep_to_their_limits() -> None:
    chosen = options(batchMessages=10, batchBytes=2000)
    batch = pa.record_batch({"body": ["x" * (n % 900) + "!" for n in range(3000)]})
    for request in requests_of([batch], chosen):
        assert request.count <= 10 and len(request.body) <= 2000


def test_rows_without_a_wish_take_turns_over_all_queues() -> None:
    batch = pa.record_batch({"body": [f"{n}" for n in range(STRIPE * 12)]})
    by_queue: dict[MessageQueue, int] = {}
    for request in requests_of([batch]):
        by_queue[request.queue] = by_queue.get(request.queue, 0) + request.count
    assert by_queue == dict.fromkeys(QUEUES, STRIPE * 2)
    starts = {requests_of([batch.slice(0, 5)], batch=n)[0].queue for n in range(50)}
    assert starts == set(QUEUES)  # small tasks don't all write to the first queue


def test_queue_ids_with_and_without_a_broker() -> None:
    batch = pa.record_batch(
        {
            "body": ["a", "b", "c", "d"],
            "queue_id": pa.array([3, 9, 0, None], pa.int32()),
            "broker": [None, None, "b", None],
        }
    )
    found = messages_of(requests_of([batch]))
    assert found[b"a"][0] == MessageQueue("t", "a", 3)
    assert found[b"b"][0] == MessageQueue("t", "b", 9)
    assert found[b"c"][0] == MessageQueue("t", "b", 0)


def test_topics_from_rows_and_from_the_option() -> None:
    batch = pa.record_batch({"topic": ["one", "two", None], "body": ["a", "b", "c"]})
    found = messages_of(requests_of([batch], options(topic="else")))
    assert {body: queue.topic for body, (queue, _) in found.items()} == {
        b"a": "one",
        b"b": "two",
        b"c": "else",
    }


def test_unique_keys_look_like_rocketmqs_and_are_the_same_in_every_attempt() -> None:
    import numpy as np

    numbers = np.array([0, 1, 65535, 65536, 2**32 - 1])
    texts = [bytes(one).decode() for one in UniqueKeys("q", 1, 2).of(numbers)]
    assert len(set(texts)) == 5
    for number, text in zip(numbers.tolist(), texts, strict=True):
        raw = bytes.fromhex(text)
        assert len(text) == 32 and text == text.upper()
        assert int.from_bytes(raw[10:14], "big") < 60_000 * 2  # the time in it is the month's begin
        assert int.from_bytes(raw[8:10] + raw[14:16], "big") == number
    assert texts == [bytes(one).decode() for one in UniqueKeys("q", 1, 2).of(numbers)]
    for other in (UniqueKeys("r", 1, 2), UniqueKeys("q", 2, 2), UniqueKeys("q", 1, 3)):
        assert not set(texts) & {bytes(one).decode() for one in other.of(numbers)}


@pytest.mark.parametrize("keys", [["a", "", "hello world", "x" * 64], ["ключ", "a"], ["x" * 500]])
def test_hashes_are_javas(keys: list[str]) -> None:
    column = pa.array([key.encode() for key in keys], pa.large_binary())
    assert java_hashes(column).tolist() == [java_hash(key) for key in keys]


def test_a_layout_that_differs_has_another_fingerprint() -> None:
    first = Layout("t", QUEUES, (1, 1)).fingerprint
    assert first == Layout("t", QUEUES, (1, 1)).fingerprint
    assert first != Layout("t", QUEUES[1:], (1, 1)).fingerprint
    assert first != Layout("t", QUEUES, (2, 1)).fingerprint


# -------------------------------------------------------------------------------------- bad rows

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("null body", {"body": pa.array([None], pa.binary())}, "body is null"),
    ("empty body", {"body": [b""]}, "body is empty"),
    ("large body", {"body": [b"x" * 5000]}, "5000 bytes; at most 4096"),
    ("topic name", {"topic": ["no spaces"]}, "no spaces"),
    ("system topic", {"topic": ["SCHEDULE_TOPIC_XXXX"]}, "belongs to the system"),
    ("retry topic", {"topic": ["%RETRY%g"]}, "retry topic"),
    ("long topic", {"topic": ["t" * 128]}, "128 characters"),
    ("two tags", {"tags": ["a||b"]}, "one tag"),
    ("separator in tags", {"tags": ["a\x01b"]}, "byte 1"),
    ("separator in keys", {"keys": ["a\x02b"]}, "byte 2"),
    ("key with a space", {"keys": pa.array([["a b"]])}, "one word"),
    ("null key", {"keys": pa.array([["a", None]])}, "one word"),
    ("separator in a list of keys", {"keys": pa.array([["a\x01"]])}, "byte 1"),
    ("reserved property", {"properties": pa.array([[("UNIQ_KEY", "x")]], MAP)}, "UNIQ_KEY"),
    ("our own property", {"properties": pa.array([[("PRODUCER_SEQ", "x")]], MAP)}, "PRODUCER_SEQ"),
    ("empty value", {"properties": pa.array([[("a", "")]], MAP)}, "not null or empty"),
    ("null value", {"properties": pa.array([[("a", None)]], MAP)}, "not null or empty"),
    ("separator in a value", {"properties": pa.array([[("a", "\x02")]], MAP)}, "byte 2"),
    ("separator in a name", {"properties": pa.array([[("\x01", "a")]], MAP)}, "byte 1"),
    (
        "long properties",
        {"properties": pa.array([[("a", "x" * MAX_USER_PROPERTY_BYTES)]], MAP)},
        f"at most {MAX_USER_PROPERTY_BYTES}",
    ),
    ("delay level", {"delay_level": pa.array([19])}, "delay_level 19; must be 0 to 18"),
    ("negative delay", {"delay_level": pa.array([-1])}, "delay_level -1"),
    ("before 1970", {"deliver_time": pa.array([-5])}, "1970"),
    ("no such queue", {"queue_id": pa.array([5])}, "no queue 5"),
    ("negative queue", {"queue_id": pa.array([-1])}, "queue_id -1"),
    ("queue on two brokers", {"queue_id": pa.array([0])}, "several brokers (a, b)"),
    (
        "queue of another broker",
        {"queue_id": pa.array([9]), "broker": pa.array(["a"])},
        "no queue 9 to write on broker 'a'",
    ),
]


@pytest.mark.parametrize(("columns", "reason"), [pytest.param(c, r, id=i) for i, c, r in BAD])
def test_a_bad_row_fails_with_its_number_and_reason(columns: dict[str, Any], reason: str) -> None:
    chosen = options(maxMessageBytes="4k", batchBytes="4k")
    batch = pa.record_batch({"body": [b"ok"]} | columns)
    good = pa.record_batch({"body": [b"ok"] * 5})
    recorder = Recorder(QUEUES)
    with pytest.raises(UsageError) as caught:
        Task(chosen, [], Identity("w", 0, 2, 0), recorder).write([good, batch])
    assert "row 5 of partition 2 can't be a message" in str(caught.value)
    assert reason in str(caught.value) and "badRecordsPath" in str(caught.value)
    assert recorder.gave_up


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_bad_rows_are_set_aside_and_seen_after_the_commit(tmp_path: Path, kind: str) -> None:
    chosen = options(badRecordsPath=tmp_path / "bad", badRecordsFormat=kind)
    batch = pa.record_batch(
        {
            "body": [b"a", None, b"c", b"d"],
            "properties": pa.array([[("x", "1")], [("y", "2")], None, [("z", "\x01")]], MAP),
        }
    )
    recorder = Recorder(QUEUES)
    task = Task(chosen, [], Identity("w", 7, 3, 99), recorder)
    _, file, count = task.write([batch, batch])
    assert file is not None and count == 4
    assert [path.name for path in (tmp_path / "bad").iterdir()] == ["_temporary"]
    sink_bad.publish(str(tmp_path / "bad"), [file])
    sink_bad.publish(str(tmp_path / "bad"), [file])  # a commit that is made again
    sink_bad.sweep(str(tmp_path / "bad"), "w", 7)
    (seen,) = [path for path in (tmp_path / "bad").iterdir() if path.is_file()]
    if kind == "parquet":
        rows = pq.read_table(seen).to_pylist()
    else:
        rows = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [row["bad_row"] for row in rows] == [1, 3, 5, 7]
    assert {row["bad_partition"] for row in rows} == {3} and {row["bad_batch"] for row in rows} == {
        7
    }
    assert rows[0]["bad_reason"] == "body is null" and "byte 1" in rows[1]["bad_reason"]
    assert sorted(messages_of(recorder.requests)) == [b"a", b"c"]
    numbers = [said["UNIQ_KEY"][-4:] for _, said in messages_of(recorder.requests).values()]
    assert numbers == ["0004", "0006"]  # the later ones of equal bodies: bad rows are counted


def test_files_of_a_failed_task_and_of_killed_attempts_go(tmp_path: Path) -> None:
    chosen = options(badRecordsPath=tmp_path, maxMessageBytes="4k", batchBytes="4k")

    def rows() -> Any:
        yield pa.record_batch({"body": pa.array([None], pa.binary())})
        raise RuntimeError("the rows end here")

    with pytest.raises(RuntimeError):
        Task(chosen, [], Identity("w", 7, 3, 1), Recorder(QUEUES)).write(rows())
    assert list((tmp_path / "_temporary").iterdir()) == []
    others = ["w-8-0-1.parquet", "w-7-2-0-1.parquet"]  # another batch, another writer
    for name in ("w-7-0-1.parquet", *others):
        (tmp_path / "_temporary" / name).write_bytes(b"half")
    sink_bad.sweep(str(tmp_path), "w", 7)
    assert {path.name for path in (tmp_path / "_temporary").iterdir()} == set(others)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    chosen = options(badRecordsPath=tmp_path / "file" / "bad")
    batch = pa.record_batch({"body": pa.array([None], pa.binary())})
    with pytest.raises(UsageError, match=r"badRecordsPath '.*/file/bad' can't be written"):
        Task(chosen, [], Identity("w", 7, 3, 1), Recorder(QUEUES)).write([batch])


def test_reserved_properties_can_be_left_out() -> None:
    pairs = [("UNIQ_KEY", "old"), ("TAGS", "old"), ("mine", "kept"), ("CLUSTER", "old")]
    batch = pa.record_batch({"body": ["a", "b"], "properties": pa.array([pairs, None], MAP)})
    found = messages_of(requests_of([batch], options(dropReservedProperties="true")))
    said = found[b"a"][1]
    assert said["mine"] == "kept" and "TAGS" not in said and "CLUSTER" not in said
    assert said["UNIQ_KEY"] != "old" and "mine" not in found[b"b"][1]


# ------------------------------------------------------------------------------------------ json


def test_json_bodies() -> None:
    batch = pa.record_batch(
        {
            "n": pa.array([1, None, -3]),
            "text": ['q"\\\n\x01é', "", None],
            "f": pa.array([1.5, float("nan"), float("-inf")]),
            "short": pa.array([0.1, float("inf"), None], pa.float32()),
            "shorts": pa.array([[0.1], None, None], pa.list_(pa.float32())),
            "at": pa.array(
                [datetime.datetime(2024, 1, 2, 3, 4, 5, 678900, datetime.UTC), None, None],
                pa.timestamp("us", "UTC"),
            ),
            "day": pa.array([datetime.date(2024, 1, 2), None, None]),
            "money": pa.array([decimal.Decimal("1.20"), None, None]),
            "raw": pa.array([b"\x00\xff", None, None]),
            "map": pa.array([[("k", 1)], None, None], pa.map_(pa.string(), pa.int64())),
            "deep": pa.array([{"x": 1, "y": None}, {"x": None, "y": ["u", "v"]}, None]),
            "yes": pa.array([True, None, False]),
        }
    )
    texts = json_bodies(batch, batch.schema.names).to_pylist()
    assert [json.loads(text) for text in texts] == [
        {
            "n": 1,
            "text": 'q"\\\n\x01é',
            "f": 1.5,
            "short": 0.1,
            "shorts": [0.1],
            "at": "2024-01-02T03:04:05.678900Z",
            "day": "2024-01-02",
            "money": 1.2,
            "raw": "AP8=",
            "map": {"k": 1},
            "deep": {"x": 1},
            "yes": True,
        },
        {"text": "", "f": "NaN", "short": "Infinity", "deep": {"y": ["u", "v"]}},
        {"n": -3, "f": "-Infinity", "yes": False},
    ]


def test_keys_of_json_maps_are_texts_as_their_values_would_be() -> None:
    kinds: list[tuple[pa.DataType, Any, str]] = [
        (pa.bool_(), True, "true"),
        (pa.int32(), 7, "7"),
        (pa.float64(), 1.5, "1.5"),
        (pa.decimal128(10, 2), decimal.Decimal("1.50"), "1.50"),
        (pa.binary(), b"\x00\xff", "AP8="),
        (pa.date32(), datetime.date(2024, 1, 2), "2024-01-02"),
        (pa.timestamp("us", "UTC"), 0, "1970-01-01T00:00:00.000000Z"),
        (pa.string(), 'q"', 'q"'),
    ]
    for kind, key, text in kinds:
        batch = pa.record_batch({"m": pa.array([[(key, 1)]], pa.map_(kind, pa.int64()))})
        (found,) = json_bodies(batch, ["m"]).to_pylist()
        assert json.loads(found) == {"m": {text: 1}}


def test_json_has_times_of_any_year_however_deep() -> None:
    far_us, far_day = 300_000_000_000_000_000, 2_932_901
    zoned, plain = pa.timestamp("us", "Europe/Zurich"), pa.timestamp("us")
    day = pa.array([far_day], pa.int32()).cast(pa.date32())
    batch = pa.record_batch(
        {
            "flat": pa.array([far_us], zoned),
            "list": pa.array([[far_us, None]], pa.list_(zoned)),
            "map": pa.array([[("k", far_us)]], pa.map_(pa.string(), plain)),
            "deep": pa.StructArray.from_arrays([day], ["day"]),
        }
    )
    (found,) = json_bodies(batch, batch.schema.names).to_pylist()
    assert json.loads(found) == {
        "flat": "11476-08-15T05:20:00.000000Z",
        "list": ["11476-08-15T05:20:00.000000Z", None],
        "map": {"k": "11476-08-15T05:20:00.000000"},
        "deep": {"day": "10000-01-05"},
    }


# --------------------------------------------------------------------------------------- schemas


TYPES: dict[str, types.DataType] = {
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "double": types.DoubleType(),
    "date": types.DateType(),
    "variant": types.VariantType(),
    "array<interval>": types.ArrayType(types.YearMonthIntervalType()),
    "array<int>": types.ArrayType(types.IntegerType()),
    "map<string,int>": types.MapType(types.StringType(), types.IntegerType()),
}


def schema(text: str) -> types.StructType:
    """`name type, name type`; Spark's own parser of this needs a JVM."""
    pairs = (piece.split(" ") for piece in text.split(", "))
    return types.StructType([types.StructField(name, TYPES[kind]) for name, kind in pairs])


@pytest.mark.parametrize(
    ("text", "given", "faults"),
    [
        ("body binary, bodie string, x int", {}, ["'bodie' is unknown", "'x' is unknown"]),
        ("body int", {}, ["'body' is int, not binary or string"]),
        ("body string, tags int, keys array<int>", {}, ["'tags' is int", "'keys' is array<int>"]),
        ("body string, properties map<string,int>", {}, ["map<string,string>"]),
        ("body string, deliver_time date", {}, ["'deliver_time' is date"]),
        ("tags string", {}, ["no column 'body'"]),
        ("body string, delay_level int, deliver_time bigint", {}, ["exclude each other"]),
        ("body string, broker string", {}, ["'queue_id' is meant"]),
        ("tags string", {"bodyFormat": "json"}, ["no column is left"]),
        ("v variant", {"bodyFormat": "json"}, ["'v' has the type variant"]),
        ("a array<interval>", {"bodyFormat": "json"}, ["'a' has the type interval year"]),
        ("id int, Tags string", {"bodyFormat": "json"}, ["'Tags' would go into the body"]),
        (
            "id int, Bad_Reason string",
            {"bodyFormat": "json", "badRecordsPath": "/x"},
            ["'Bad_Reason' has the name of a column that badRecordsPath adds"],
        ),
    ],
)
def test_schemas_that_cannot_be_written(
    text: str, given: dict[str, str], faults: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        check_schema(schema(text), options(**given))
    for fault in faults:
        assert fault in str(caught.value)


def test_a_topic_is_needed() -> None:
    chosen = SinkOptions.read({"namesrv": "a:1"})
    with pytest.raises(UsageError, match="neither a column nor an option 'topic'"):
        check_schema(schema("body string"), chosen)
    check_schema(schema("body string, topic string"), chosen)


def test_json_takes_all_columns_without_another_meaning() -> None:
    chosen = options(bodyFormat="JSON")
    fields = check_schema(
        schema("topic string, id int, body string, tags string, x double"), chosen
    )
    assert fields == ["id", "body", "x"]


# --------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"tpic": "x"}, "did you mean 'topic'"),
        ({"topic": "a b"}, "topic"),
        ({"bodyFormat": "xml"}, "raw, json"),
        ({"writerId": "a b"}, "writerId"),
        ({"batchId": "3"}, "writerId"),
        ({"batchBytes": "8m"}, "maxMessageBytes"),
        ({"maxInFlight": "0"}, "maxInFlight"),
        ({"badRecordsPath": ""}, "badRecordsPath"),
        ({"requestTimeout": "0"}, "requestTimeout.*more than nothing"),
        ({"sendTimeout": "0s"}, "sendTimeout.*more than nothing"),
        ({"accessKey": "me"}, "secretKey"),
    ],
)
def test_options_that_are_wrong(given: dict[str, str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        SinkOptions.read({"namesrv": "a:1"} | given)


def test_a_name_server_is_needed_and_sparks_own_options_pass() -> None:
    with pytest.raises(UsageError, match="namesrv"):
        SinkOptions.read({"topic": "t"})
    assert SinkOptions.read(
        {"NAMESRV": "a:1", "checkpointLocation": "/x", "path": "t", "queryName": "q"}
    )


def test_secrets_are_in_no_text() -> None:
    chosen = options(accessKey="the-key", secretKey="the-secret")
    assert "the-key" not in repr(chosen) and "the-secret" not in repr(chosen)


def test_only_appends() -> None:
    given = {"namesrv": "a:1", "topic": "t"}
    for make in (sink.batch_writer, sink.stream_writer):
        with pytest.raises(UsageError, match="appends"):
            make(given, schema("body string"), True)
    with pytest.raises(UsageError, match="batchId"):
        sink.stream_writer(given | {"writerId": "w", "batchId": "1"}, schema("body string"), False)


def test_a_bad_records_path_of_an_unknown_kind_is_refused_on_the_driver() -> None:
    given = {"namesrv": "a:1", "topic": "t", "badRecordsPath": "nowhere://x/y"}
    with pytest.raises(UsageError, match="badRecordsPath"):
        sink.batch_writer(given, schema("body string"), False)
