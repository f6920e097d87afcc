"""Receipt handles of popped messages, and what a pop's answer says about them.

Owns: the text forms of RocketMQ's ExtraInfoUtil. One rule: a handle is opaque to users and exact to
brokers: eight words with single spaces.

    100 1700000000000 60000 3 0 broker-a 1 105
    |   |             |     | | |        | `- queue offset of this message
    |   |             |     | | |        `- queue id
    |   |             |     | | `- broker name
    |   |             |     | `- 0 the topic itself, 1 and 2 the group's retry topic (old, new name)
    |   |             |     `- revive queue, 999 for ordered
    |   |             `- invisible for so many ms
    |   `- popped at, ms since 1970
    `- offset at which that pop began to read the queue

startOffsetInfo: `flag queue offset` joined by `;`. msgOffsetInfo: `flag queue off,off,...` joined
likewise, ascending, one for each message of that queue.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import msgspec

from cometmq.client.received import ReceivedMessage
from cometmq.errors import BodyError, UsageError
from cometmq.wire import fastjson
from cometmq.wire import properties as props

NORMAL = "0"
RETRY_V1 = "1"
RETRY_V2 = "2"
FIRST_POP_TIME = "1ST_POP_TIME"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """A handle taken apart."""

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    flag: str
    broker: str
    queue_id: int
    offset: int

    def __str__(self) -> str:
        return (
            f"{self.start_offset} {self.pop_ms} {self.invisible_ms} {self.revive_queue} "
            f"{self.flag} {self.broker} {self.queue_id} {self.offset}"
        )

    def real_topic(self, topic: str, group: str) -> str:
        """The topic whose queue the message was popped from."""
        if self.flag == RETRY_V1:
            return f"%RETRY%{group}_{topic}"
        if self.flag == RETRY_V2:
            return f"%RETRY%{group}+{topic}"
        return topic


def parse_receipt(text: str) -> Receipt:
    """UsageError if it is not a handle."""
    words = text.split(" ")
    try:
        start, pop_ms, invisible_ms, revive, flag, broker, queue_id, offset = words
        return Receipt(
            int(start),
            int(pop_ms),
            int(invisible_ms),
            int(revive),
            flag,
            broker,
            int(queue_id),
            int(offset),
        )
    except ValueError:
        raise UsageError(f"{text[:120]!r} is not a receipt handle of a popped message") from None


class PopAnswer(msgspec.Struct, frozen=True):
    """The fields of a pop's answer that its receipts are made of."""

    popTime: int  # noqa: N815 - the wire's own names
    invisibleTime: int  # noqa: N815
    reviveQid: int  # noqa: N815
    restNum: int = 0  # noqa: N815
    startOffsetInfo: str | None = None  # noqa: N815
    msgOffsetInfo: str | None = None  # noqa: N815
    orderCountInfo: str | None = None  # noqa: N815


def receipts_of(answer: PopAnswer, messages: list[ReceivedMessage], broker: str) -> list[str]:
    """A handle for each message, as Java's MQClientAPIImpl.processPopResponse makes them.

    The broker itself puts POP_CK on what it took from a retry topic (it gives those messages the
    topic's own name again, so that only it can tell).
    """
    starts = {key: int(offset) for key, offset in _info(answer.startOffsetInfo, "startOffsetInfo")}
    told = {
        key: [int(one) for one in offsets.split(",")]
        for key, offsets in _info(answer.msgOffsetInfo, "msgOffsetInfo")
    }
    given = [props.get(one.properties_text, props.POP_CHECKPOINT) for one in messages]
    # A queue's messages, by their offsets; the retry topic has queues of the same numbers.
    seen: dict[str, list[int]] = {}
    for one, handle in zip(messages, given, strict=True):
        if handle is None:
            key = f"{_flag_of(one.stored_topic)} {one.queue_id}"
            seen.setdefault(key, []).append(one.queue_offset)
    for offsets in seen.values():
        offsets.sort()
    found: list[str] = []
    for one, handle in zip(messages, given, strict=True):
        if handle is not None:
            found.append(handle)
            continue
        flag = _flag_of(one.stored_topic)
        key = f"{flag} {one.queue_id}"
        first = seen[key][0]
        offset = one.queue_offset
        in_answer = told.get(key)
        if in_answer is not None:  # static topics: the broker's offsets differ from the records'
            place = seen[key].index(offset)
            if place >= len(in_answer):
                raise BodyError(
                    f"msgOffsetInfo of {broker} misses messages: {answer.msgOffsetInfo}"
                )
            offset = in_answer[place]
        receipt = Receipt(
            starts.get(key, first),
            answer.popTime,
            answer.invisibleTime,
            answer.reviveQid,
            flag,
            broker,
            one.queue_id,
            offset,
        )
        found.append(str(receipt))
    return found


def times_before(answer: PopAnswer, one: ReceivedMessage) -> int:
    """How often an ordered message was received before; the record itself can't tell."""
    counts = dict(_info(answer.orderCountInfo, "orderCountInfo"))
    flag = _flag_of(one.stored_topic)
    told = counts.get(f"{flag} qo{one.queue_id}%{one.queue_offset}")
    return int(told or counts.get(f"{flag} {one.queue_id}", "0"))


def _flag_of(topic: str) -> str:
    if not topic.startswith("%RETRY%"):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def _info(text: str | None, what: str) -> list[tuple[str, str]]:
    """`flag queue rest` joined by `;` to (`flag queue`, rest)."""
    found: list[tuple[str, str]] = []
    for piece in (text or "").split(";"):
        if not piece:
            continue
        words = piece.split(" ")
        if len(words) != 3 or not all(one.isdecimal() for one in words[2].split(",")):
            raise BodyError(f"{what} of a pop can't be understood: {piece[:80]!r}")
        found.append((f"{words[0]} {words[1]}", words[2]))
    return found


def batch_ack_body(broker: str, group: str, acks: Iterable[tuple[str, Receipt]]) -> bytes:
    """200151's body: (topic, receipt) merged by pop, each with a bit for each message."""
    merged: dict[tuple[str, str, int, int, int, int], tuple[Receipt, int]] = {}
    for topic, one in acks:
        key = (topic, one.flag, one.queue_id, one.start_offset, one.pop_ms, one.revive_queue)
        _, bits = merged.get(key, (one, 0))
        merged[key] = (one, bits | 1 << (one.offset - one.start_offset))
    table: list[dict[str, Any]] = [
        {
            "b": base64.b64encode(bits.to_bytes((bits.bit_length() + 7) // 8, "little")).decode(),
            "c": group,
            "it": one.invisible_ms,
            "pt": one.pop_ms,
            "q": one.queue_id,
            "r": one.flag,
            "rq": one.revive_queue,
            "so": one.start_offset,
            "t": key[0],
        }
        for key, (one, bits) in merged.items()
    ]
    return fastjson.dumps({"acks": table, "brokerName": broker})
