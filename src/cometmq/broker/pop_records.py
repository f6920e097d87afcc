"""What pop writes down: checkpoints and acknowledgements, as messages of the revive topic.

Owns: RocketMQ's PopCheckPoint, AckMsg and BatchAckMsg and the properties they travel with. One
rule: pure functions; what is written here a RocketMQ broker reads, and the other way round.

    ck      one pop of one queue: which offsets went out, when, for how long. It comes to the revive
            topic one second before that time is over
    ack     one offset of a pop is done with
    bAck    several. Both come when the time is over, or at once if it is over already
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cometmq.broker import names
from cometmq.config import BrokerConfig
from cometmq.errors import BodyError
from cometmq.message import NewMessage, StoredMessage
from cometmq.wire import bodies, fastjson, properties

CHECKPOINT_TAG = "ck"
ACK_TAG = "ack"
BATCH_ACK_TAG = "bAck"
EARLIER_MS = 1_000  # a checkpoint is read before the acks that belong to it
MOST_OFFSETS = 32  # of one checkpoint: its bit map has so many bits
LATER_S = (10, 20, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""How much later a message is tried again that could not be brought back."""
FIRST_POP_TIME = "1ST_POP_TIME"
ORIGIN_GROUP = "ORIGIN_GROUP"

T = TypeVar("T")

Key = tuple[str, str, int, int, int, str]
"""Topic, group, queue, start offset, time of the pop, broker: what an ack finds its pop by."""


class Checkpoint(msgspec.Struct, gc=False):
    """One pop of one queue. `acked` has a bit for each of `offsets`."""

    topic: str
    group: str
    queue_id: int
    start: int
    pop_ms: int
    invisible_ms: int
    broker: str
    offsets: tuple[int, ...]
    acked: int = 0
    is_suspended: bool = False  # its messages come back without one more try counted
    put_again: int = 0

    @property
    def key(self) -> Key:
        return (self.topic, self.group, self.queue_id, self.start, self.pop_ms, self.broker)

    @property
    def revive_ms(self) -> int:
        return self.pop_ms + self.invisible_ms

    def ack(self, offset: int) -> bool:
        """Note one offset as done; False if it is not of this pop."""
        if offset not in self.offsets:
            return False
        self.acked |= 1 << self.offsets.index(offset)
        return True

    def open_offsets(self) -> list[int]:
        return [one for at, one in enumerate(self.offsets) if not self.acked >> at & 1]

    def later(self, offset: int) -> Checkpoint:
        """Of one message alone, for another time."""
        wait_s = LATER_S[min(self.put_again, len(LATER_S) - 1)]
        return Checkpoint(
            self.topic,
            self.group,
            self.queue_id,
            offset,
            self.pop_ms,
            self.invisible_ms + wait_s * 1000,
            self.broker,
            (offset,),
            is_suspended=self.is_suspended,
            put_again=self.put_again + 1,
        )


class Ack(msgspec.Struct, frozen=True, gc=False):
    """Some offsets of a pop are done with."""

    topic: str
    group: str
    queue_id: int
    start: int
    pop_ms: int
    broker: str
    offsets: tuple[int, ...]
    is_batch: bool = False

    @property
    def key(self) -> Key:
        return (self.topic, self.group, self.queue_id, self.start, self.pop_ms, self.broker)


class _CheckpointBody(msgspec.Struct):
    """As RocketMQ 5.5.0 writes it; older ones know fewer fields."""

    t: str
    c: str
    q: int
    so: int
    pt: int
    it: int
    n: int = 0
    bm: int = 0
    d: list[int] | None = None
    bn: str | None = None
    rp: str | None = None
    sp: bool = False


class _AckBody(msgspec.Struct):
    """4.9's long names are what the first 5.0 releases wrote."""

    t: str | None = None
    c: str | None = None
    q: int | None = None
    so: int | None = None
    pt: int | None = None
    ao: int | None = None
    aol: list[int] = []
    bn: str | None = None
    topic: str | None = None
    consumerGroup: str | None = None  # noqa: N815 - the wire's own names
    queueId: int | None = None  # noqa: N815
    startOffset: int | None = None  # noqa: N815
    popTime: int | None = None  # noqa: N815
    ackOffset: int | None = None  # noqa: N815
    ackOffsetList: list[int] = []  # noqa: N815
    brokerName: str | None = None  # noqa: N815


def checkpoint_message(config: BrokerConfig, queue_id: int, point: Checkpoint) -> NewMessage:
    """A checkpoint on its way to a queue of the revive topic."""
    body: dict[str, object] = {
        "bm": _signed(point.acked),
        "bn": point.broker,
        "c": point.group,
        "d": [offset - point.start for offset in point.offsets],
        "it": point.invisible_ms,
        "n": len(point.offsets),
        "pt": point.pop_ms,
        "q": point.queue_id,
        "reviveTime": point.revive_ms,
        "ro": 0,
        "so": point.start,
        "sp": point.is_suspended,
        "t": point.topic,
    }
    if point.put_again:
        body["rp"] = str(point.put_again)
    unique = (
        f"{point.topic}@{point.queue_id}@{point.start}@{point.group}@{point.pop_ms}"
        f"@{point.broker}@{CHECKPOINT_TAG}"
    )
    due_ms = point.revive_ms - EARLIER_MS
    return _message(config, queue_id, CHECKPOINT_TAG, body, unique, due_ms)


def ack_message(config: BrokerConfig, queue_id: int, ack: Ack, invisible_ms: int) -> NewMessage:
    """An acknowledgement on its way to the same queue as its checkpoint."""
    tag = BATCH_ACK_TAG if ack.is_batch else ACK_TAG
    first = -1 if ack.is_batch else ack.offsets[0]
    body: dict[str, object] = {
        "ao": first,
        "bn": ack.broker,
        "c": ack.group,
        "pt": ack.pop_ms,
        "q": ack.queue_id,
        "so": ack.start,
        "t": ack.topic,
    }
    if ack.is_batch:
        body["aol"] = list(ack.offsets)
    unique = f"{ack.topic}@{ack.queue_id}@{first}@{ack.group}@{ack.pop_ms}@{ack.broker}@{ACK_TAG}"
    return _message(config, queue_id, tag, body, unique, ack.pop_ms + invisible_ms)


def _message(
    config: BrokerConfig, queue_id: int, tag: str, body: object, unique: str, due_ms: int
) -> NewMessage:
    text = properties.build(
        {
            properties.TAGS: tag,
            properties.TIMER_DELIVER_MS: str(due_ms),
            properties.UNIQUE_KEY: unique,
        }
    )
    return NewMessage(
        topic=names.revive_topic(config.cluster),
        queue_id=queue_id,
        body=fastjson.dumps(body),
        properties=text,
    )


def read(stored: StoredMessage, broker: str) -> Checkpoint | Ack | None:
    """A record of the revive topic; None for one that is neither. BodyError if it can't be
    understood. `broker`: the name that a record without one means."""
    tag = properties.get(stored.properties, properties.TAGS)
    if tag == CHECKPOINT_TAG:
        return _checkpoint(stored.body, broker)
    if tag in (ACK_TAG, BATCH_ACK_TAG):
        return _ack(stored.body, broker, is_batch=tag == BATCH_ACK_TAG)
    return None


def _checkpoint(raw: bytes, broker: str) -> Checkpoint:
    body = bodies.convert(bodies.load_object(raw, "checkpoint"), _CheckpointBody, "checkpoint")
    differences = body.d or list(range(body.n))
    if len(differences) > MOST_OFFSETS:
        raise BodyError(f"a checkpoint of {len(differences)} messages, at most {MOST_OFFSETS}")
    return Checkpoint(
        body.t,
        body.c,
        body.q,
        body.so,
        body.pt,
        body.it,
        body.bn or broker,
        tuple(body.so + one for one in differences),
        body.bm & 0xFFFFFFFF,
        body.sp,
        int(body.rp) if body.rp is not None and body.rp.isdecimal() else 0,
    )


def _ack(raw: bytes, broker: str, *, is_batch: bool) -> Ack:
    body = bodies.convert(bodies.load_object(raw, "ack"), _AckBody, "ack")
    offset = _one(body.ao, body.ackOffset, "ao")
    return Ack(
        _one(body.t, body.topic, "t"),
        _one(body.c, body.consumerGroup, "c"),
        _one(body.q, body.queueId, "q"),
        _one(body.so, body.startOffset, "so"),
        _one(body.pt, body.popTime, "pt"),
        body.bn or body.brokerName or broker,
        tuple(body.aol or body.ackOffsetList) if is_batch else (offset,),
        is_batch,
    )


def _one(short: T | None, long: T | None, name: str) -> T:
    found = short if short is not None else long
    if found is None:
        raise BodyError(f"an ack without {name}")
    return found


def _signed(bits: int) -> int:
    """Java's int."""
    return bits - (1 << 32) if bits & 0x8000_0000 else bits
