"""Receipt handles, as RocketMQ's ExtraInfoUtil writes them."""

from __future__ import annotations

import base64
import json

import pytest

from cometmq.client.receipts import (
    PopAnswer,
    Receipt,
    batch_ack_body,
    parse_receipt,
    receipts_of,
)
from cometmq.client.received import ReceivedMessage
from cometmq.errors import BodyError, UsageError
from cometmq.wire import properties

HANDLE = "100 1700000000000 60000 3 0 broker-a 1 105"


def message(queue_id: int, offset: int, *, topic: str = "T", handle: str = "") -> ReceivedMessage:
    text = properties.build({"POP_CK": handle}) if handle else ""
    host = bytes(8)
    return ReceivedMessage(
        "broker-a", topic, queue_id, offset, 0, b"", text, 0, 0, 0, host, 0, host, 0, 0, 91
    )


def test_a_handle_there_and_back() -> None:
    receipt = parse_receipt(HANDLE)
    assert receipt == Receipt(100, 1700000000000, 60000, 3, "0", "broker-a", 1, 105)
    assert str(receipt) == HANDLE


@pytest.mark.parametrize("text", ["", "1 2 3", HANDLE + " 4", HANDLE.replace("105", "x")])
def test_what_is_no_handle(text: str) -> None:
    with pytest.raises(UsageError, match="receipt handle"):
        parse_receipt(text)


def test_the_topic_a_message_was_popped_from() -> None:
    names = {"0": "T", "1": "%RETRY%G_T", "2": "%RETRY%G+T"}
    for flag, name in names.items():
        receipt = Receipt(0, 0, 0, 0, flag, "b", 0, 0)
        assert receipt.real_topic("T", "G") == name


def test_handles_are_made_of_the_answer() -> None:
    answer = PopAnswer(
        1700000000000, 60000, 3, startOffsetInfo="0 1 100;0 2 7", msgOffsetInfo="0 1 105,106;0 2 7"
    )
    again = "9 1700000000000 60000 3 2 broker-a 0 9"
    popped = [message(1, 106), message(2, 7), message(1, 105), message(0, 9, handle=again)]
    assert receipts_of(answer, popped, "broker-a") == [
        "100 1700000000000 60000 3 0 broker-a 1 106",
        "7 1700000000000 60000 3 0 broker-a 2 7",
        HANDLE,
        again,  # the broker's own word on what it took from a retry topic
    ]


def test_a_retry_topic_has_queues_of_its_own() -> None:
    """Of the same number, where the broker shows its name (popResponseReturnActualRetryTopic)."""
    answer = PopAnswer(
        5, 6, 7, startOffsetInfo="0 0 10;2 0 0", msgOffsetInfo="0 0 10,11,13;2 0 0,1"
    )
    retry = "%RETRY%G+T"
    popped = [message(0, 10), message(0, 11), message(0, 13)]
    popped += [message(0, 0, topic=retry), message(0, 1, topic=retry)]
    assert receipts_of(answer, popped, "b") == [
        *(f"10 5 6 7 0 b 0 {offset}" for offset in (10, 11, 13)),
        *(f"0 5 6 7 2 b 0 {offset}" for offset in (0, 1)),
    ]


def test_an_answer_without_offsets_counts_from_the_first_message() -> None:
    answer = PopAnswer(5, 6, 7)
    popped = [message(1, 105), message(1, 106)]
    assert receipts_of(answer, popped, "b") == ["105 5 6 7 0 b 1 105", "105 5 6 7 0 b 1 106"]


def test_offsets_of_the_answer_count_where_records_have_others() -> None:
    answer = PopAnswer(5, 6, 7, startOffsetInfo="0 1 1000", msgOffsetInfo="0 1 1000,1001")
    popped = [message(1, 0), message(1, 1)]
    assert receipts_of(answer, popped, "b") == ["1000 5 6 7 0 b 1 1000", "1000 5 6 7 0 b 1 1001"]


@pytest.mark.parametrize("info", ["0 1", "0 1 x", "0 1 1,", "0 1 7"])
def test_an_answer_that_contradicts_itself(info: str) -> None:
    answer = PopAnswer(5, 6, 7, startOffsetInfo="0 1 7", msgOffsetInfo=info)
    with pytest.raises(BodyError):
        receipts_of(answer, [message(1, 7), message(1, 8)], "b")


def test_acks_of_one_pop_are_one_bit_set() -> None:
    acks = [
        ("T", Receipt(100, 5, 6, 7, "0", "b", 1, 100)),
        ("T", Receipt(100, 5, 6, 7, "0", "b", 1, 109)),
        ("T", Receipt(3, 5, 6, 7, "2", "b", 0, 3)),
    ]
    body = json.loads(batch_ack_body("b", "G", acks))
    assert body["brokerName"] == "b"
    first, second = body["acks"]
    assert base64.b64decode(first.pop("b")) == b"\x01\x02"
    common = {"c": "G", "t": "T", "pt": 5, "it": 6, "rq": 7}
    assert first == {**common, "r": "0", "so": 100, "q": 1}
    assert base64.b64decode(second.pop("b")) == b"\x01"
    assert second == {**common, "r": "2", "so": 3, "q": 0}
