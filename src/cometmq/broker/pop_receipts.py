"""The texts by which a popped message is told from others: receipts, and a pop's answer about them.

Owns: RocketMQ's ExtraInfoUtil as a broker needs it, the names of pop's retry topics, and the body
of a batch of acknowledgements. One rule: pure functions; a text from outside is taken apart here or
refused with what is wrong with it.

    receipt           start popped-at invisible revive-queue flag broker queue [offset]
    startOffsetInfo   flag queue start; ...
    msgOffsetInfo     flag queue offset,offset; ...
    orderCountInfo    flag queue count; ...   and   flag qo<queue>%<offset> count; ...
    flag              0 the topic itself, 1 and 2 the group's retry topic (old and new name)
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from cometmq.broker import names
from cometmq.errors import BodyError, HeaderError
from cometmq.wire import bodies

ORDERED_QUEUE = 999  # in the place of a revive queue
MOST_RECEIPT = 1_024  # characters
MOST_BITS = 1 << 16  # of a bit set: how far behind its start a pop may have read
MOST_ACKS = 4_096  # pops in one batch
MOST_ACKED = 8_192  # messages in one batch


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """A handle taken apart; the offset of the message stands beside it in a request."""

    start: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    flag: str
    broker: str
    queue_id: int

    @property
    def is_ordered(self) -> bool:
        return self.revive_queue == ORDERED_QUEUE

    def text(self, offset: int) -> str:
        return (
            f"{self.start} {self.pop_ms} {self.invisible_ms} {self.revive_queue} {self.flag} "
            f"{self.broker} {self.queue_id} {offset}"
        )


def parse(text: str) -> Receipt:
    """HeaderError if it is not a receipt."""
    words = text[: MOST_RECEIPT + 1].split(" ")
    try:
        if not 7 <= len(words) <= 9 or len(text) > MOST_RECEIPT:
            raise ValueError
        start, pop_ms, invisible_ms, revive, queue_id = (
            _number(words[at]) for at in (0, 1, 2, 3, 6)
        )
    except ValueError:
        raise HeaderError(f"extraInfo {text[:80]!r} is not a receipt of a popped message") from None
    return Receipt(start, pop_ms, invisible_ms, revive, words[4], words[5], queue_id)


def _number(text: str) -> int:
    """ValueError if a number is not one of 64 bits, or is negative."""
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) >= 2**63:
        raise ValueError(text)
    return int(text)


# ------------------------------------------------------------------------------------ retry topics


def retry_v1(group: str, topic: str) -> str:
    return f"{names.RETRY_PREFIX}{group}_{topic}"


def retry_v2(group: str, topic: str) -> str:
    return f"{names.RETRY_PREFIX}{group}+{topic}"


def flag_of(topic: str) -> str:
    """Which of a group's topics this is."""
    if not topic.startswith(names.RETRY_PREFIX):
        return "0"
    return "2" if "+" in topic else "1"


def real_topic(topic: str, group: str, flag: str) -> str:
    """The topic whose queue a message was popped from; BodyError for an unknown flag."""
    if flag == "0":
        return topic
    if flag == "1":
        return retry_v1(group, topic)
    if flag == "2":
        return retry_v2(group, topic)
    raise BodyError(f"the flag of a popped message is 0, 1 or 2, not {flag[:20]!r}")


def normal_topic(topic: str, group: str) -> str:
    """The topic that a retry topic of pop belongs to."""
    if not topic.startswith(names.RETRY_PREFIX):
        return topic
    for prefix in (retry_v2(group, ""), retry_v1(group, "")):
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return topic


# ----------------------------------------------------------------------------------- what is told


class Told:
    """What a pop's answer says about its messages, queue by queue."""

    __slots__ = ("_offsets", "_orders", "_starts")

    def __init__(self) -> None:
        self._starts: list[str] = []
        self._offsets: list[str] = []
        self._orders: list[str] = []

    def queue(self, topic: str, queue_id: int, start: int, offsets: list[int]) -> None:
        flag = flag_of(topic)
        self._starts.append(f"{flag} {queue_id} {start}")
        self._offsets.append(f"{flag} {queue_id} {','.join(map(str, offsets))}")

    def order(self, topic: str, queue_id: int, counts: dict[int, int], least: int) -> None:
        """How often each message was received before, and for old clients the least of a queue."""
        flag = flag_of(topic)
        self._orders += [f"{flag} qo{queue_id}%{at} {times}" for at, times in counts.items()]
        self._orders.append(f"{flag} {queue_id} {least}")

    def ext(self, *, is_ordered: bool) -> dict[str, str]:
        found = {
            "startOffsetInfo": ";".join(self._starts),
            "msgOffsetInfo": ";".join(self._offsets),
        }
        if is_ordered:
            found["orderCountInfo"] = ";".join(self._orders)
        return found


# ------------------------------------------------------------------------------------ batch of acks


class BatchedAck(msgspec.Struct, frozen=True):
    """The acknowledged offsets of one pop."""

    group: str
    topic: str
    """The one that was popped from: a retry topic, where the request's flag says so."""
    queue_id: int
    start: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    offsets: tuple[int, ...]


class _Entry(msgspec.Struct):
    c: str
    t: str
    r: str
    so: int
    q: int
    rq: int
    pt: int
    it: int
    b: Any = None


def parse_batch(raw: bytes) -> tuple[str, list[BatchedAck]]:
    """(broker, acks) of a body; BodyError if it is not one."""
    body = bodies.load_object(raw, "batch of acks") if raw else {}
    broker, entries = body.get("brokerName"), body.get("acks")
    if not isinstance(entries, list):
        return "", []
    if len(entries) > MOST_ACKS:
        raise BodyError(f"{len(entries)} pops in one batch of acks, at most {MOST_ACKS}")
    found: list[BatchedAck] = []
    left = MOST_ACKED
    for one in entries:
        found.append(_batched(one, left))
        left -= len(found[-1].offsets)
    return broker if isinstance(broker, str) else "", found


def _batched(raw: Any, most: int) -> BatchedAck:
    one = bodies.convert(raw, _Entry, "ack")
    if min(one.so, one.q, one.rq, one.pt, one.it) < 0:
        raise BodyError("an ack with a negative number")
    return BatchedAck(
        one.c,
        real_topic(one.t, one.c, one.r),
        one.q,
        one.so,
        one.pt,
        one.it,
        one.rq,
        tuple(one.so + at for at in bit_set(one.b, most)),
    )


def bit_set(text: Any, most: int = MOST_ACKED) -> list[int]:
    """Base64 of Java's BitSet.toByteArray: the lowest bit comes first."""
    if not isinstance(text, str):
        raise BodyError("an ack without its bit set b")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BodyError(f"the bit set {text[:40]!r} of an ack is not base64") from None
    if len(raw) * 8 > MOST_BITS:
        raise BodyError(f"a bit set of {len(raw)} bytes, at most {MOST_BITS // 8}")
    bits = int.from_bytes(raw, "little")
    if bits.bit_count() > most:
        raise BodyError(f"more than {MOST_ACKED} messages in one batch of acks")
    digits, found, at = f"{bits:b}"[::-1], [], -1
    while (at := digits.find("1", at + 1)) >= 0:
        found.append(at)
    return found
