"""Bulk decoding gives, row by row, what our client makes of the same records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from cometmq.client.compression import Compression, compress
from cometmq.client.reading import make_filter
from cometmq.client.received import read_all
from cometmq.errors import CometError, RecordCorrupt
from cometmq.message import NewMessage
from cometmq.spark import gather
from cometmq.spark.decode import Records, properties_for, wanted_rows
from cometmq.spark.schema import COLUMNS, schema_of
from cometmq.wire import properties as wire
from cometmq.wire import record

V4 = bytes([192, 0, 2, 9, 0, 0, 42, 159])
V6 = bytes(range(16)) + bytes([0, 0, 42, 159])


def encode(message: NewMessage, queue_offset: int) -> bytes:
    prepared = record.prepare(message)
    raw = bytearray(prepared.size)
    record.write(
        raw, 0, prepared, queue_offset=queue_offset, log_offset=queue_offset * 999, store_ms=10**12
    )
    return bytes(raw)


def decode(body: bytes, names: list[str] | None = None) -> pa.RecordBatch:
    schema = to_arrow_schema(schema_of(names), timezone="UTC")
    records = Records(body, names=properties_for(schema.names))
    columns = records.columns(schema.names, pa.repeat(pa.scalar("broker-a"), len(records)))
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    batch.validate(full=True)
    return batch


def expected(body: bytes) -> list[dict[str, Any]]:
    return [
        {
            "topic": one.stored_topic,
            "broker": one.broker,
            "queue_id": one.queue_id,
            "queue_offset": one.queue_offset,
            "keys": one.properties.get("KEYS"),
            "tags": one.properties.get("TAGS"),
            "body": one.body,
            "born_time": one.born_time,
            "store_time": one.store_time,
            "reconsume_times": one.reconsume_times,
            "msg_id": one.message_id,
            "properties": one.properties,
            "sys_flag": one.sys_flag,
        }
        for one in read_all(body, "broker-a")
    ]


def rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = batch.to_pylist()
    for row in found:
        if "properties" in row:
            assert len(dict(row["properties"])) == len(row["properties"]), "a name twice in a map"
            row["properties"] = dict(row["properties"])
    return found


NAMES = st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "WAIT", "x", "é", "KEY", "TAGSX", ""])
VALUES = st.text(max_size=12) | st.sampled_from(["", "a\x01b", "k1 k2", "\x02"])
PROPERTIES = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(
    lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs)
) | st.sampled_from(
    ["", "broken", "TAGS\x01a", "\x02\x02", "a\x01b\x02c", "TAGS\x01a\x02TAGS\x01b\x02"]
)
PLAIN = st.dictionaries(
    st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "x"]), st.text("abc é", min_size=1, max_size=9)
).map(wire.build)
MAGIC = bytes.fromhex("00000100DAA320A7")


@st.composite
def messages(draw: Any, properties: Any) -> NewMessage:
    body = draw(st.binary(max_size=40) | st.just(MAGIC * 3))
    kind = draw(st.sampled_from([None, None, *Compression]))
    return NewMessage(
        topic=draw(st.sampled_from(["orders", "orders", "x", "t" * 130, "%RETRY%g"])),
        queue_id=draw(st.integers(0, 7)),
        body=body if kind is None else compress(body, kind),
        properties=draw(properties).encode("utf-8", "ignore").decode(),
        flag=draw(st.integers(0, 9)),
        sys_flag=0 if kind is None else kind.sys_flag,
        born_ms=draw(st.integers(0, 2**41)),
        born_host=draw(st.sampled_from([V4, V4, V6])),
        store_host=draw(st.sampled_from([V4, V4, V6])),
        reconsume_times=draw(st.integers(0, 16)),
    )


@pytest.mark.parametrize("properties", [PROPERTIES, PLAIN], ids=["any", "plain"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_it_is_what_our_client_reads(properties: Any, data: Any) -> None:
    sent = data.draw(st.lists(messages(properties), max_size=6))
    body = b"".join(encode(one, number) for number, one in enumerate(sent))
    assert rows(decode(body)) == expected(body)
    assert rows(plainly(body)) == expected(body)


def plainly(body: bytes) -> pa.RecordBatch:
    """Without the compiled walks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cometmq.spark.decode.COMPILED", None)
        patch.setattr(gather, "COMPILED", None)
        return decode(body)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_is_the_same_to_both_walks(data: Any) -> None:
    sent = data.draw(st.lists(messages(PLAIN), min_size=1, max_size=3))
    body = bytearray(b"".join(encode(one, number) for number, one in enumerate(sent)))
    for _ in range(data.draw(st.integers(1, 3))):
        # Heads and lengths, rather than bodies that anything may stand in.
        at = data.draw(st.integers(0, min(len(body) - 1, 130)))
        body[at] = data.draw(st.sampled_from([0, 1, 2, 16, 32, 127, 255]) | st.integers(0, 255))

    def outcome(read: Any) -> Any:
        try:
            return read(bytes(body)).drop_columns(["body"])
        except RecordCorrupt as error:
            return str(error)
        except CometError as error:  # a body that is said to be compressed, and is not
            return type(error)

    assert outcome(decode) == outcome(plainly)


def test_a_choice_of_columns_decodes_only_those_in_that_order() -> None:
    body = encode(NewMessage("t", 1, b"hello", "TAGS\x01a\x02"), 5)
    assert rows(decode(body, ["tags", "queue_offset"])) == [{"tags": "a", "queue_offset": 5}]
    for name in COLUMNS:
        assert rows(decode(body, [name])) == [{name: expected(body)[0][name]}]


def test_text_that_is_not_utf8_is_replaced() -> None:
    body = bytearray(encode(NewMessage("t", 1, b"hello", "TAGS\x01abc\x02"), 5))
    at = body.index(b"abc")
    body[at : at + 1] = b"\xff"
    assert rows(decode(bytes(body)))[0]["tags"] == "\ufffdbc"


def test_the_walk_without_the_compiled_one_is_the_same() -> None:
    plain = b"".join(encode(NewMessage("t", 1, b"x" * size), size) for size in (1, 0, 7, 200))
    tricky = plain + encode(NewMessage("t", 1, MAGIC * 5), 9) + plain
    for body in (b"", plain, tricky):
        assert gather.record_starts(body) == Records(body).starts.tobytes()
    assert gather.COMPILED is not None, "the compiled walk was not built"


@pytest.mark.parametrize("cut", [1, 50, 92])
def test_a_body_that_breaks_off_is_refused(cut: int) -> None:
    body = b"".join(encode(NewMessage("t", 1, b"hello"), number) for number in range(2))
    with pytest.raises(RecordCorrupt, match="byte"):
        Records(body[:-cut])
    with pytest.raises(ValueError):
        gather.record_starts(body[:-cut])


@pytest.mark.parametrize(("at", "value"), [(4, 0x00), (84, 0x7F), (86, 0x70)])
def test_lengths_that_contradict_each_other_are_refused(at: int, value: int) -> None:
    body = bytearray(encode(NewMessage("topic", 1, b"hello", "a\x01b\x02"), 0))
    body[at] = value
    with pytest.raises(RecordCorrupt):
        Records(bytes(body))


def test_tags_are_compared_themselves_not_their_hashes() -> None:
    tags = ["Aa", "BB", "AaAa", ""]  # Aa and BB have the same hash in Java
    body = b"".join(
        encode(NewMessage("t", 0, b"", wire.build({"TAGS": tag}) if tag else ""), number)
        for number, tag in enumerate(tags)
    )
    records = Records(body)
    assert wanted_rows(records, make_filter("Aa")).tolist() == [True, False, False, False]  # type: ignore[union-attr]
    assert wanted_rows(records, make_filter("Aa*")).tolist() == [True, False, True, False]  # type: ignore[union-attr]
    assert wanted_rows(records, make_filter("*")) is None
    records.keep(np.array([False, True, False, True]))
    assert len(records) == 2
    assert records.queue_offset.tolist() == [1, 3]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_of_a_buffer_are_read_where_they_stand(data: Any) -> None:
    """Whatever is between them, and in whatever order they are wanted."""
    bodies = data.draw(st.lists(st.lists(messages(PLAIN), max_size=3), min_size=1, max_size=4))
    buffer, places = b"", []
    for some in bodies:
        buffer += data.draw(st.binary(max_size=9))
        encoded = b"".join(encode(one, number) for number, one in enumerate(some))
        places.append((len(buffer), len(buffer) + len(encoded)))
        buffer += encoded
    places = data.draw(st.permutations(places))
    begins, ends = np.array(places, np.int64).T
    whole = b"".join(buffer[begin:end] for begin, end in places)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12)))
    wanted = [row for row, is_wanted in zip(expected(whole), mask, strict=False) if is_wanted]

    def check() -> None:
        schema = to_arrow_schema(schema_of(None), timezone="UTC")
        source = np.frombuffer(buffer, np.uint8)
        records = Records(source, begins, ends, names=properties_for(schema.names))
        assert records.counts.tolist() == [len(read_all(buffer[b:e], "")) for b, e in places]
        parts = records.parts
        brokers = pa.repeat(pa.scalar("broker-a"), len(records))
        columns = records.columns(schema.names, brokers)
        assert rows(pa.RecordBatch.from_arrays(columns, schema=schema)) == expected(whole)
        some = mask[: len(records)]
        records.keep(some)
        assert records.parts.tolist() == parts[some].tolist()
        columns = records.columns(schema.names, brokers[: len(records)])
        assert rows(pa.RecordBatch.from_arrays(columns, schema=schema)) == wanted

    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cometmq.spark.decode.COMPILED", None)
        patch.setattr(gather, "COMPILED", None)
        check()


def test_a_record_does_not_span_two_pieces() -> None:
    body = encode(NewMessage("t", 1, b"hello"), 5)
    begins, ends = np.array([0, 50], np.int64), np.array([50, len(body)], np.int64)
    with pytest.raises(RecordCorrupt, match="within a record"):
        Records(body, begins, ends)
