"""Trace records: their bytes, and what becomes of bytes that are none. No sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client import trace
from cometmq.client.received import ReceivedMessage
from cometmq.client.session import Options
from cometmq.client.trace import (
    EndTransaction,
    HandledCode,
    MessageKind,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    Tracer,
    TraceRecord,
    TransactionState,
    decode,
    encode,
)
from cometmq.client.trace_record import search_keys
from cometmq.client.trace_story import by_time
from cometmq.client.transaction import Outcome as Ending
from cometmq.client.transaction import TransactionProducer
from cometmq.client.workers import Outcome
from cometmq.errors import UsageError
from cometmq.message import Message
from cometmq.wire import properties as props
from cometmq.wire.headers import EndTransactionHeader

NOWHERE = Options(namesrv="127.0.0.1:1")

# Written by hand from the field order of spec/wire.md, section 7.
BY_HAND: list[tuple[TraceRecord, bytes]] = [
    (
        Pub(
            time_ms=1700000000123,
            region="DefaultRegion",
            group="shop",
            topic="orders",
            message_id="0A00000100002A9F00000000000010AB",
            tags="paid",
            keys="o-1 o-2",
            store_host="10.0.0.1:10911",
            body_bytes=26,
            cost_ms=12,
            kind=MessageKind.NORMAL,
            offset_id="0A00000100002A9F0000000000001000",
            is_success=True,
        ),
        b"Pub\x011700000000123\x01DefaultRegion\x01shop\x01orders\x01"
        b"0A00000100002A9F00000000000010AB\x01paid\x01o-1 o-2\x0110.0.0.1:10911"
        b"\x0126\x0112\x010\x01"
        b"0A00000100002A9F0000000000001000\x01true\x02",
    ),
    (
        Pub(
            time_ms=1,
            region="r",
            group="g",
            topic="t",
            message_id="m",
            body_bytes=2,
            cost_ms=3,
            kind=MessageKind.DELAYED,
            is_success=False,
        ),
        b"Pub\x011\x01r\x01g\x01t\x01m\x01null\x01null\x01null\x012\x013\x013\x01null\x01false\x02",
    ),
    (
        SubBefore(
            time_ms=7, region="r", group="bill", request_id="q", message_id="m", retry_times=2
        ),
        b"SubBefore\x017\x01r\x01bill\x01q\x01m\x012\x01null\x02",
    ),
    (
        SubAfter(
            request_id="q",
            message_id="m",
            cost_ms=5,
            is_success=False,
            keys="k",
            code=HandledCode.FAILED,
            time_ms=12,
            group="bill",
        ),
        b"SubAfter\x01q\x01m\x015\x01false\x01k\x014\x0112\x01bill\x02",
    ),
    (
        EndTransaction(
            time_ms=9,
            region="r",
            group="g",
            topic="t",
            message_id="m",
            tags="Größe",
            keys="k",
            store_host="h:1",
            kind=MessageKind.COMMITTED,
            transaction_id="x",
            state=TransactionState.ROLLBACK,
            is_from_check=True,
        ),
        b"EndTransaction\x019\x01r\x01g\x01t\x01m\x01Gr\xc3\xb6\xc3\x9fe\x01k\x01h:1\x012\x01x\x01"
        b"ROLLBACK_MESSAGE\x01true\x02",
    ),
    (
        Recall(time_ms=5, region="r", group="g", topic="t", message_id="m", is_success=True),
        bytes.fromhex("526563616c6c 01 35 01 72 01 67 01 74 01 6d 01 74727565 02"),
    ),
]


@pytest.mark.parametrize(("record", "raw"), BY_HAND, ids=lambda one: type(one).__name__)
def test_bytes_written_by_hand(record: TraceRecord, raw: bytes) -> None:
    assert encode(record) == raw
    assert decode(raw) == [record]


def test_records_follow_each_other() -> None:
    body = b"".join(raw for _, raw in BY_HAND)
    assert decode(body) == [record for record, _ in BY_HAND]
    assert decode(body.removesuffix(b"\x02")) == [record for record, _ in BY_HAND]
    assert decode(b"") == []


texts = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])).filter(
    lambda text: text != "null"
)
numbers = st.integers(-(2**63), 2**63 - 1)
records = st.one_of(
    st.builds(
        Pub,
        time_ms=numbers,
        region=texts,
        group=texts,
        topic=texts,
        message_id=texts,
        tags=texts,
        keys=texts,
        store_host=texts,
        body_bytes=numbers,
        cost_ms=numbers,
        kind=numbers,
        offset_id=texts,
        is_success=st.booleans(),
        client_host=texts,
    ),
    st.builds(
        SubBefore,
        time_ms=numbers,
        region=texts,
        group=texts,
        request_id=texts,
        message_id=texts,
        retry_times=numbers,
        keys=texts,
    ),
    st.builds(
        SubAfter,
        request_id=texts,
        message_id=texts,
        cost_ms=numbers,
        is_success=st.booleans(),
        keys=texts,
        code=numbers,
        time_ms=numbers,
        group=texts,
    ),
    st.builds(
        EndTransaction,
        time_ms=numbers,
        region=texts,
        group=texts,
        topic=texts,
        message_id=texts,
        tags=texts,
        keys=texts,
        store_host=texts,
        kind=numbers,
        transaction_id=texts,
        state=st.sampled_from(TransactionState),
        is_from_check=st.booleans(),
    ),
    st.builds(
        Recall,
        time_ms=numbers,
        region=texts,
        group=texts,
        topic=texts,
        message_id=texts,
        is_success=st.booleans(),
    ),
)


@given(st.lists(records, max_size=4))
def test_what_is_written_is_read(some: list[TraceRecord]) -> None:
    assert decode(b"".join(encode(one) for one in some)) == some


pieces = st.sampled_from(
    [
        *(b"Pub", b"SubBefore", b"SubAfter", b"EndTransaction", b"Recall"),
        *(b"\x01", b"\x01", b"\x02", b"1", b"-1", b"true", b"null", b"", b"UNKNOW"),
        *(b"\xff", b"1" * 5000, "٣".encode(), b"1_0"),
    ]
)


@given(st.binary(max_size=200) | st.lists(pieces, max_size=40).map(b"".join))
def test_any_bytes_give_records_or_nothing(raw: bytes) -> None:
    for one in decode(raw):
        assert decode(encode(one)) == [one]


@pytest.mark.parametrize(
    "broken",
    [
        b"Pub\x011\x01r\x02",
        b"Pub\x01x\x01r\x01g\x01t\x01m\x01a\x01k\x01h\x012\x013\x010\x01o\x01true\x02",
        b"SubAfter\x01q\x01m\x02",
        b"EndTransaction\x019\x01r\x01g\x01t\x01m\x01a\x01k\x01h\x012\x01x\x01MAYBE\x01true\x02",
        b"Tomorrow\x01whatever\x02",
        b"\x02\x02\x01\x02",
        b"\xff\xfe\x02",
    ],
)
def test_a_broken_record_does_not_hide_its_neighbours(broken: bytes) -> None:
    record, raw = BY_HAND[2]
    assert decode(raw + broken + raw) == [record, record]


def test_old_forms() -> None:
    head = b"Pub\x011\x01r\x01g\x01t\x01m\x01a\x01k\x01h\x012\x013\x010\x01"
    (pub,) = decode(head + b"true\x02")
    assert isinstance(pub, Pub) and pub.is_success and pub.offset_id == ""
    (pub,) = decode(head + b"o\x01true\x01client\x02")
    assert isinstance(pub, Pub) and pub.is_success
    assert (pub.offset_id, pub.client_host) == ("o", "client")

    six, seven = (
        b"SubAfter\x01q\x01m\x015\x01true\x01k",
        b"SubAfter\x01q\x01m\x015\x01true\x01k\x014",
    )
    for raw, code, time_ms, group in [
        (six + b"\x02", 0, 0, ""),
        (seven + b"\x02", 4, 0, ""),
        (seven + b"\x01\x02", 4, 0, ""),  # AccessChannel CLOUD
        (seven + b"\x0199\x02", 4, 99, ""),
        (seven + b"\x0199\x01g\x02", 4, 99, "g"),
    ]:
        (after,) = decode(raw)
        assert isinstance(after, SubAfter)
        assert (after.code, after.time_ms, after.group) == (code, time_ms, group)

    (before,) = decode(b"SubBefore\x017\x01r\x01g\x01q\x01m\x012\x02")
    assert isinstance(before, SubBefore) and before.keys == ""


def test_separators_in_a_text_can_not_forge_a_record() -> None:
    record = SubBefore(
        time_ms=1, region="r", group="g", request_id="q", message_id="m\x02Pub\x01", keys="a\x01b"
    )
    (read,) = decode(encode(record))
    assert isinstance(read, SubBefore)
    assert (read.message_id, read.keys) == ("m Pub ", "a b")
    assert search_keys(record) == ["m", "Pub", "a", "b"]


def test_keys_are_ids_and_keys() -> None:
    pub = Pub(time_ms=1, region="", group="", topic="", message_id="a,b", keys="k1  k2")
    assert search_keys(pub) == ["a", "b", "k1", "k2"]
    assert search_keys(BY_HAND[-1][0]) == ["m"]


# ------------------------------------------------------------------------------------ sending them


def pub(number: int, **fields: Any) -> Pub:
    return Pub(time_ms=number, region="r", group="g", topic="t", message_id=f"m{number}", **fields)


def test_messages_hold_a_limited_number_of_records() -> None:
    waiting: deque[TraceRecord] = deque(pub(number, keys="same") for number in range(250))
    counts, read = [], []
    while waiting:
        message, count = trace.next_message(waiting, "T")
        counts.append(count)
        read += decode(message.body)
        assert list(message.keys).count("same") == 1
    assert counts == [100, 100, 50]
    assert read == [pub(number, keys="same") for number in range(250)]


def test_messages_keep_to_the_limits_of_bodies_and_keys() -> None:
    waiting: deque[TraceRecord] = deque(pub(number, tags="ä" * 15_000) for number in range(9))
    while waiting:
        message, _ = trace.next_message(waiting, "T")
        assert len(message.body) <= trace.MAX_BODY_BYTES

    words = " ".join(f"key-{number}" for number in range(3_500))
    waiting = deque([pub(1), pub(2, keys=words), pub(3)])
    sizes = []
    while waiting:
        message, count = trace.next_message(waiting, "T")
        sizes.append(count)
        assert len(" ".join(message.keys)) <= trace.MAX_KEYS_BYTES
    assert sizes == [1, 1, 1]


def test_a_large_batch_makes_several_records() -> None:
    ids = [f"{number:032X}" for number in range(600)]
    record = pub(0, offset_id=",".join(ids))
    record = msgspec.structs.replace(record, message_id=",".join(ids))
    parts = trace._parts(record)
    assert [one.message_id.count(",") + 1 for one in parts] == [256, 256, 88]
    assert ",".join(one.message_id for one in parts) == ",".join(ids)
    assert all(one.message_id == one.offset_id for one in parts)
    failed = trace._parts(msgspec.structs.replace(record, offset_id=""))
    assert [one.offset_id for one in failed] == ["", "", ""]


def test_records_without_room_are_counted() -> None:
    async def main() -> None:
        tracer = Tracer(NOWHERE, max_waiting=3, flush_s=100)
        for number in range(2):
            tracer.record(pub(number))
        assert (tracer.stats.recorded, tracer.stats.dropped) == (2, 0)
        for number in range(5):
            tracer.record(pub(number))
        assert (tracer.stats.recorded, tracer.stats.dropped) == (3, 4)
        tracer._waiting.clear()
        await tracer.close()
        await tracer.close()
        tracer.record(pub(9))
        assert (tracer.stats.recorded, tracer.stats.dropped) == (3, 5)
        with pytest.raises(UsageError):
            tracer._watch([], None, "late")

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [{"max_waiting": 0}, {"flush_s": 0}, {"topic": "a b"}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Tracer(NOWHERE, **wrong)


# ----------------------------------------------------------------------------------------- watching


def received(text: dict[str, str], times: int = 0, topic: str = "orders") -> ReceivedMessage:
    host = b"\x7f\0\0\x01\0\0\x2a\x9f"
    fields = (0, 0, 1000, host, 1001, host, times, 0, 100)
    return ReceivedMessage("b", topic, 0, 5, 4096, b"body", props.build(text), *fields)


class Consumed:
    """As much of a Consumer as a tracer looks at."""

    def __init__(self) -> None:
        self.on_handled: list[Any] = []
        self.group = "bill"
        self.consume_timeout_s = 1.0
        ids = iter(range(100))
        self.session = SimpleNamespace(
            unique_ids=SimpleNamespace(next=lambda _: f"q{next(ids)}"), now_ms=lambda: 0
        )

    def handled(self, messages: list[ReceivedMessage], outcome: Outcome, took_ms: int) -> None:
        for hook in self.on_handled:
            hook(messages, outcome, 100, 100 + took_ms)


def watched() -> tuple[Tracer, list[TraceRecord]]:
    tracer = Tracer(NOWHERE)
    found: list[TraceRecord] = []
    tracer.record = found.append  # type: ignore[method-assign,assignment]
    return tracer, found


def test_a_handler_makes_two_records_for_each_message() -> None:
    tracer, found = watched()
    consumer: Any = Consumed()
    tracer.watch_consumer(consumer)
    tracer.watch_consumer(consumer)  # once is enough
    one = received({"UNIQ_KEY": "m1", "KEYS": "k", "MSG_REGION": "here", "TRACE_ON": "true"}, 3)
    two = received({"UNIQ_KEY": "m2"})
    off = received({"UNIQ_KEY": "m3", "TRACE_ON": "false"})
    own = received({"UNIQ_KEY": "m4"}, topic=trace.TRACE_TOPIC)
    consumer.handled([one, two, off, own], Outcome.DONE, 80)
    consumer.handled([off, own], Outcome.DONE, 80)
    both: dict[str, Any] = {"group": "bill", "request_id": "q0"}
    end: dict[str, Any] = {"cost_ms": 20, "time_ms": 180, "code": HandledCode.SUCCESS}
    assert found == [
        SubBefore(time_ms=100, region="here", message_id="m1", retry_times=3, keys="k", **both),
        SubAfter(message_id="m1", keys="k", **end, **both),
        SubBefore(time_ms=100, region="DefaultRegion", message_id="m2", **both),
        SubAfter(message_id="m2", **end, **both),
    ]


@pytest.mark.parametrize(
    ("outcome", "took_ms", "code", "is_success"),
    [
        (Outcome.DONE, 10, HandledCode.SUCCESS, True),
        (Outcome.DONE, 1_000, HandledCode.TIME_OUT, True),
        (Outcome.LATER, 10, HandledCode.FAILED, False),
        (Outcome.LATER, 1_000, HandledCode.TIME_OUT, False),
        (Outcome.FAILED, 1_000, HandledCode.EXCEPTION, False),
    ],
)
def test_codes_of_outcomes(
    outcome: Outcome, took_ms: int, code: HandledCode, is_success: bool
) -> None:
    tracer, found = watched()
    consumer: Any = Consumed()
    tracer.watch_consumer(consumer)
    consumer.handled([received({"UNIQ_KEY": "m"})], outcome, took_ms)
    after = found[1]
    assert isinstance(after, SubAfter)
    assert (after.code, after.is_success) == (code, is_success)


def test_ends_of_transactions() -> None:
    tracer, found = watched()
    producer = TransactionProducer("shop", lambda _: Ending.COMMIT, namesrv="127.0.0.1:1")
    tracer.watch_transactions(producer)
    tracer.watch_producer(producer.producer)
    assert len(producer.producer.on_sent) == len(producer.on_ended) == 1
    told: list[tuple[int, dict[str, str]]] = []
    connection: Any = SimpleNamespace(address="h:1", oneway=lambda *one: told.append(one))
    ends: list[tuple[Message | ReceivedMessage, Ending]] = [
        (Message("orders", b"x", tags="a", keys=["k1", "k2"]), Ending.COMMIT),
        (received({"UNIQ_KEY": "m", "MSG_REGION": "here", "KEYS": "k"}), Ending.ROLLBACK),
        (Message("orders", b"x"), Ending.UNKNOWN),
    ]
    for message, ending in ends:
        header = EndTransactionHeader("shop", 1, 2, ending.value, "m", "x", True, "orders")
        producer._tell(connection, message, header)
    assert len(told) == 3
    assert [type(one) for one in found] == [EndTransaction] * 3
    first, second, third = (one for one in found if isinstance(one, EndTransaction))
    assert first == EndTransaction(
        time_ms=first.time_ms,
        region="DefaultRegion",
        group="shop",
        topic="orders",
        message_id="m",
        tags="a",
        keys="k1 k2",
        store_host="h:1",
        transaction_id="x",
        state=TransactionState.COMMIT,
        is_from_check=True,
    )
    assert (second.region, second.state, second.keys) == ("here", TransactionState.ROLLBACK, "k")
    assert third.state is TransactionState.UNKNOWN


def test_a_failing_hook_does_not_stop_a_transaction() -> None:
    producer = TransactionProducer("shop", lambda _: Ending.COMMIT, namesrv="127.0.0.1:1")
    seen: list[str] = []

    def fail(*_: object) -> None:
        raise ValueError

    producer.on_ended += [fail, lambda *one: seen.append(one[2])]
    connection: Any = SimpleNamespace(address="h:1", oneway=lambda *_: None)
    producer._tell(connection, Message("T", b"x"), EndTransactionHeader("shop", 1, 2, 8))
    assert seen == ["h:1"]


def test_closing_takes_the_hooks_away() -> None:
    async def main() -> None:
        consumer: Any = Consumed()
        async with Tracer(NOWHERE) as tracer:
            tracer.watch_consumer(consumer)
            assert consumer.on_handled
        assert not consumer.on_handled

    asyncio.run(main())


# -------------------------------------------------------------------------------------------- story


def test_a_story_is_told_by_time() -> None:
    def before(request_id: str, time_ms: int) -> SubBefore:
        return SubBefore(
            time_ms=time_ms, region="", group="g", request_id=request_id, message_id="m0"
        )

    def after(request_id: str, time_ms: int, cost_ms: int = 0) -> SubAfter:
        return SubAfter(request_id=request_id, message_id="m0", time_ms=time_ms, cost_ms=cost_ms)

    told: list[TraceRecord] = [
        pub(0),
        before("a", 10),
        after("a", 10),
        before("b", 20),
        after("b", 0, cost_ms=5),  # it does not tell when: 25
        before("c", 30),
        after("c", 31),
    ]
    assert by_time(list(reversed(told))) == told
