"""What the tests of pop share: a client that pops, acknowledges and takes receipts apart."""

from __future__ import annotations

import base64
from typing import Any

from cometmq.client.receipts import PopAnswer, parse_receipt, receipts_of
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from .harness import Bench

BROKER = "broker-a"
REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"
INVISIBLE_MS = 10_000


class Got:
    """A popped message and its receipt."""

    def __init__(self, message: ReceivedMessage, receipt: str) -> None:
        self.message = message
        self.body = message.body
        self.times = message.reconsume_times
        self.receipt = receipt
        self.parts = parse_receipt(receipt)

    def topic(self, group: str = "G") -> str:
        return self.parts.real_topic(self.message.topic, group)

    def __repr__(self) -> str:
        return f"<{self.body!r} {self.receipt}>"


def pop_ext(bench: Bench, **more: Any) -> dict[str, Any]:
    return {
        "consumerGroup": "G",
        "topic": "T",
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": INVISIBLE_MS,
        "pollTime": 0,
        "bornTime": bench.now_ms,
        "initMode": 0,
        "expType": "TAG",
        "exp": "*",
        "order": False,
        **more,
    }


def got_of(answer: Frame) -> list[Got]:
    assert answer.code == 0, (answer.code, answer.remark)
    told = bodies.convert(answer.ext, PopAnswer, "pop")
    messages = read_all(answer.body, BROKER)
    handles = receipts_of(told, messages, BROKER)
    return [Got(one, handle) for one, handle in zip(messages, handles, strict=True)]


def pop(bench: Bench, **more: Any) -> list[Got]:
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, **more))
    return [] if answer.code == 210 else got_of(answer)


def bodies_of(got: list[Got]) -> list[bytes]:
    return sorted(one.body for one in got)


def ack_ext(one: Got, group: str = "G") -> dict[str, Any]:
    return {
        "consumerGroup": group,
        "topic": one.topic(group),
        "queueId": one.parts.queue_id,
        "extraInfo": one.receipt,
        "offset": one.parts.offset,
    }


def ack(bench: Bench, one: Got, **more: Any) -> Frame:
    return bench.ask(C.ACK_MESSAGE, {**ack_ext(one), **more})


def acked(bench: Bench, *some: Got) -> None:
    for one in some:
        answer = ack(bench, one)
        assert answer.code == 0, answer.remark


def batch_entry(some: list[Got], group: str = "G") -> dict[str, Any]:
    first = some[0].parts
    bits = sum(1 << (one.parts.offset - first.start_offset) for one in some)
    return {
        "c": group,
        "t": some[0].message.topic,
        "r": first.flag,
        "so": first.start_offset,
        "q": first.queue_id,
        "rq": first.revive_queue,
        "pt": first.pop_ms,
        "it": first.invisible_ms,
        "b": base64.b64encode(bits.to_bytes(max(bits.bit_length() + 7, 8) // 8, "little")).decode(),
    }


def batch_ack(bench: Bench, *entries: dict[str, Any]) -> Frame:
    body = fastjson.dumps({"brokerName": BROKER, "acks": list(entries)})
    return bench.ask(C.BATCH_ACK_MESSAGE, {}, body)


def change(bench: Bench, one: Got, invisible_ms: int, **more: Any) -> Frame:
    ext = {**ack_ext(one), "invisibleTime": invisible_ms, **more}
    return bench.ask(C.CHANGE_MESSAGE_INVISIBLETIME, ext)


def changed(bench: Bench, one: Got, invisible_ms: int, **more: Any) -> Got:
    """The same message with its new receipt."""
    answer = change(bench, one, invisible_ms, **more)
    assert answer.code == 0, answer.remark
    ext, p = answer.ext, one.parts
    receipt = (
        f"{p.offset} {ext['popTime']} {ext['invisibleTime']} {ext['reviveQid']} {p.flag} "
        f"{p.broker} {p.queue_id} {p.offset}"
    )
    return Got(one.message, receipt)


def revive_offsets(bench: Bench) -> dict[int, int]:
    table = bench.broker.offsets.table
    return dict(table.get((REVIVE, "CID_RMQ_SYS_REVIVE_GROUP"), {}))
