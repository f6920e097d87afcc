"""Pop's records and receipts: whatever is written is read as it was; anything else is refused."""

from __future__ import annotations

import base64
import contextlib
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.broker import pop_receipts, pop_records
from cometmq.broker.pop_records import Ack, Checkpoint
from cometmq.client.receipts import Receipt as ClientReceipt
from cometmq.client.receipts import batch_ack_body, parse_receipt
from cometmq.config import BrokerConfig
from cometmq.errors import BodyError, HeaderError
from cometmq.message import NewMessage, StoredMessage
from cometmq.wire import fastjson, properties, record

NAMES = st.text(string.ascii_letters + string.digits + "_-%|", min_size=1, max_size=30)
OFFSETS = st.integers(0, 2**50)
MS = st.integers(0, 2**45)


def stored(message: NewMessage) -> StoredMessage:
    """As it comes out of a log."""
    encoded = record.prepare(message)
    raw = bytearray(encoded.size)
    record.write(raw, 0, encoded, queue_offset=0, log_offset=0, store_ms=1)
    return record.decode(bytes(raw))


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    start = draw(OFFSETS)
    steps = draw(st.sets(st.integers(0, 100_000), min_size=1, max_size=32))
    return Checkpoint(
        draw(NAMES),
        draw(NAMES),
        draw(st.integers(0, 1000)),
        start,
        draw(MS),
        draw(MS),
        draw(NAMES),
        tuple(start + one for one in sorted(steps)),
        draw(st.integers(0, 2 ** len(steps) - 1)),
        draw(st.booleans()),
        draw(st.integers(0, 20)),
    )


@given(checkpoints())
def test_checkpoints(point: Checkpoint) -> None:
    message = pop_records.checkpoint_message(BrokerConfig(), 3, point)
    assert pop_records.read(stored(message), "?") == point
    table = properties.parse(message.properties)
    assert int(table["TIMER_DELIVER_MS"]) == point.revive_ms - 1000
    assert -(2**31) <= fastjson.loads(message.body)["bm"] < 2**31


@given(checkpoints(), st.booleans())
def test_acks(point: Checkpoint, is_batch: bool) -> None:
    offsets = point.offsets if is_batch else point.offsets[:1]
    ack = Ack(
        point.topic,
        point.group,
        point.queue_id,
        point.start,
        point.pop_ms,
        point.broker,
        offsets,
        is_batch,
    )
    message = pop_records.ack_message(BrokerConfig(), 3, ack, point.invisible_ms)
    found = pop_records.read(stored(message), "?")
    assert found == ack
    assert isinstance(found, Ack) and found.key == point.key
    for offset in found.offsets:
        assert point.ack(offset)
    assert set(point.open_offsets()).isdisjoint(offsets)


def test_as_rocketmq_5_5_writes_them() -> None:
    """Texts taken from its own serializer."""
    point = Checkpoint("t", "g", 1, 100, 1_700_000_000_000, 60_000, "broker-a", (100, 105))
    message = pop_records.checkpoint_message(BrokerConfig(), 0, point)
    assert message.body == (
        b'{"bm":0,"bn":"broker-a","c":"g","d":[0,5],"it":60000,"n":2,"pt":1700000000000,"q":1,'
        b'"reviveTime":1700000060000,"ro":0,"so":100,"sp":false,"t":"t"}'
    )
    ack = Ack("t", "g", 1, 100, 1_700_000_000_000, "broker-a", (105,))
    one = pop_records.ack_message(BrokerConfig(), 0, ack, 60_000)
    assert fastjson.loads(one.body) == fastjson.loads(
        b'{"ao":105,"bn":"broker-a","c":"g","pt":1700000000000,"q":1,"so":100,"t":"t"}'
    )
    many = Ack("t", "g", 1, 100, 1_700_000_000_000, "broker-a", (105,), is_batch=True)
    batch = pop_records.ack_message(BrokerConfig(), 0, many, 60_000)
    assert fastjson.loads(batch.body) == fastjson.loads(
        b'{"ao":-1,"aol":[105],"bn":"broker-a","c":"g","pt":1700000000000,"q":1,"so":100,"t":"t"}'
    )
    assert properties.parse(one.properties) == {
        "TAGS": "ack",
        "TIMER_DELIVER_MS": "1700000060000",
        "UNIQ_KEY": "t@1@105@g@1700000000000@broker-a@ack",
    }


def test_old_forms() -> None:
    text = properties.build({"TAGS": "ck"})
    body = b'{"bm":0,"c":"g","it":5,"n":3,"pt":7,"q":1,"ro":0,"so":10,"t":"t"}'
    point = pop_records.read(stored(NewMessage("r", 0, body, text)), "me")
    assert isinstance(point, Checkpoint)
    assert (point.offsets, point.broker) == ((10, 11, 12), "me")
    text = properties.build({"TAGS": "ack"})
    body = (
        b'{"ackOffset":11,"startOffset":10,"consumerGroup":"g","topic":"t","queueId":1,"popTime":7}'
    )
    ack = pop_records.read(stored(NewMessage("r", 0, body, text)), "me")
    assert isinstance(ack, Ack) and ack.key == point.key and ack.offsets == (11,)


@given(st.sampled_from(["ck", "ack", "bAck", "x"]), st.binary(max_size=60))
def test_any_bytes_are_a_record_or_refused(tag: str, body: bytes) -> None:
    text = properties.build({"TAGS": tag})
    with contextlib.suppress(BodyError):
        pop_records.read(stored(NewMessage("r", 0, body, text)), "me")


@given(OFFSETS, MS, MS, st.integers(0, 999), st.sampled_from("012"), NAMES, OFFSETS)
def test_receipts_are_the_clients(
    start: int, pop_ms: int, invisible_ms: int, revive: int, flag: str, broker: str, offset: int
) -> None:
    receipt = pop_receipts.Receipt(start, pop_ms, invisible_ms, revive, flag, broker, 4)
    text = receipt.text(offset)
    assert pop_receipts.parse(text) == receipt
    assert parse_receipt(text) == ClientReceipt(
        start, pop_ms, invisible_ms, revive, flag, broker, 4, offset
    )


@given(st.text(max_size=80))
def test_any_text_is_a_receipt_or_refused(text: str) -> None:
    with contextlib.suppress(HeaderError):
        assert pop_receipts.parse(text).queue_id >= 0


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=40), OFFSETS)
def test_batches_are_the_clients(steps: set[int], start: int) -> None:
    acks = [
        ("T", ClientReceipt(start, 7, 8, 3, "1", "b", 2, start + step)) for step in sorted(steps)
    ]
    broker, (one,) = pop_receipts.parse_batch(batch_ack_body("b", "G", acks))
    assert broker == "b"
    assert one.topic == "%RETRY%G_T"
    assert one.offsets == tuple(start + step for step in sorted(steps))


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", None, 7, base64.b64encode(b"x" * 200_000).decode()),
        base64.b64encode(b"\xff" * (1 << 13)).decode(),
    ],
)
def test_bit_sets(text: Any) -> None:
    if text == "":
        assert pop_receipts.bit_set(text) == []
        return
    with pytest.raises(BodyError):
        pop_receipts.bit_set(text)


@given(NAMES, NAMES)
def test_retry_topics(group: str, topic: str) -> None:
    for flag in "012":
        name = pop_receipts.real_topic(topic, group, flag)
        if not topic.startswith("%RETRY%"):
            assert pop_receipts.flag_of(name) == flag
            assert pop_receipts.normal_topic(name, group) == topic


def test_a_batch_acknowledges_so_many_messages_and_no_more() -> None:
    full = base64.b64encode(b"\xff" * 512).decode()
    ack = {"c": "G", "t": "T", "r": "0", "so": 0, "q": 0, "rq": 0, "pt": 1, "it": 1, "b": full}
    body = {"brokerName": "b", "acks": [ack] * 2}
    _, found = pop_receipts.parse_batch(fastjson.dumps(body))
    assert [len(one.offsets) for one in found] == [4096, 4096]
    body["acks"] = [ack] * 3
    with pytest.raises(BodyError, match="8192 messages"):
        pop_receipts.parse_batch(fastjson.dumps(body))
