"""Ordered pop: one queue, one pop at a time, and the note about it."""

from __future__ import annotations

from typing import Any

from cometmq.wire import fastjson
from cometmq.wire.codes import RequestCode as C

from . import pops
from .conftest import Benches
from .harness import NOW_MS, Bench
from .pops import INVISIBLE_MS, ack, acked, batch_ack, batch_entry, changed, pop, pop_ext

ORDERED = {"order": True, "queueId": 0}


def fill(bench: Bench, *texts: bytes, queue: int = 0) -> None:
    for text in texts:
        bench.sent(body=text, queue=queue)


def take(bench: Bench, **more: Any) -> list[bytes]:
    return [one.body for one in pop(bench, **{**ORDERED, **more})]


def test_a_queue_is_blocked_until_all_is_acknowledged(bench: Bench) -> None:
    fill(bench, b"a", b"b", b"c")
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, **ORDERED, maxMsgNums=2))
    assert answer.ext["reviveQid"] == "999"
    assert answer.ext["orderCountInfo"] == "0 0 0"
    first, second = pops.got_of(answer)
    assert take(bench) == []
    acked(bench, second)
    assert take(bench) == []
    assert bench.broker.offsets.get("T", "G", 0) == 0
    acked(bench, first)
    assert bench.broker.offsets.get("T", "G", 0) == 2
    assert take(bench) == [b"c"]


def test_other_queues_and_groups_are_free(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    fill(bench, b"c", queue=1)
    assert take(bench, maxMsgNums=1) == [b"a"]
    assert take(bench, queueId=1) == [b"c"]
    assert take(bench, consumerGroup="G2", maxMsgNums=1) == [b"a"]


def test_after_its_time_it_comes_again_with_its_count(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    assert take(bench) == [b"a", b"b"]
    bench.advance(INVISIBLE_MS - 1)
    assert take(bench) == []
    bench.advance(1)
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, **ORDERED))
    assert answer.ext["orderCountInfo"] == "0 qo0%0 1;0 qo0%1 1;0 0 1"
    first, _second = pops.got_of(answer)
    acked(bench, first)
    fill(bench, b"c")
    bench.advance(INVISIBLE_MS)
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, **ORDERED))
    assert answer.ext["orderCountInfo"] == "0 qo0%1 2;0 0 0"
    assert [one.body for one in pops.got_of(answer)] == [b"b", b"c"]


def test_the_same_attempt_gets_the_same_again(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    assert take(bench, attemptId="x") == [b"a", b"b"]
    assert take(bench, attemptId="y") == []
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, **ORDERED, attemptId="x"))
    assert answer.ext["orderCountInfo"] == "0 0 0"
    acked(bench, *pops.got_of(answer))
    assert bench.broker.offsets.get("T", "G", 0) == 2


def test_acks_of_an_earlier_pop_and_of_others(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    old, _ = pop(bench, **ORDERED)
    bench.advance(INVISIBLE_MS)
    new, _ = pop(bench, **ORDERED)
    assert ack(bench, old).code == 0
    assert bench.broker.offsets.get("T", "G", 0) == 0
    assert ack(bench, new, offset=2).code == 13
    acked(bench, new)
    assert ack(bench, new).code == 0
    assert bench.broker.offsets.get("T", "G", 0) == 1


def test_a_batch(bench: Bench) -> None:
    fill(bench, b"a", b"b", b"c")
    got = pop(bench, **ORDERED)
    assert batch_ack(bench, batch_entry(got[:2])).code == 0
    assert bench.broker.offsets.get("T", "G", 0) == 2
    bench.advance(INVISIBLE_MS)
    assert take(bench) == [b"c"]


def test_another_time_for_one_of_them(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    first, second = pop(bench, **ORDERED)
    new = changed(bench, first, 60_000)
    assert (new.parts.pop_ms, new.parts.invisible_ms) == (NOW_MS, 60_000)
    acked(bench, second)
    bench.advance(59_000)
    assert take(bench) == []
    bench.advance(1_000)
    assert take(bench) == [b"a", b"b"]


def test_who_waits_is_woken_by_the_last_ack_and_by_time(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    (one,) = pop(bench, **ORDERED, maxMsgNums=1)
    wait = {"order": True, "pollTime": 15_000, "maxMsgNums": 1}
    waiting = bench.post(C.POP_MESSAGE, pop_ext(bench, **wait))
    assert bench.answer(waiting) is None
    acked(bench, one)
    answer = bench.answer(waiting)
    assert answer is not None
    (two,) = pops.got_of(answer)
    assert two.body == b"b"
    waiting = bench.post(C.POP_MESSAGE, pop_ext(bench, **wait))
    bench.advance(INVISIBLE_MS - 1)
    assert bench.answer(waiting) is None
    bench.advance(1)
    answer = bench.answer(waiting)
    assert answer is not None
    assert [one.body for one in pops.got_of(answer)] == [b"b"]


def test_a_shorter_time_wakes_who_waits(bench: Bench) -> None:
    fill(bench, b"a")
    (one,) = pop(bench, **ORDERED, invisibleTime=60_000)
    waiting = bench.post(C.POP_MESSAGE, pop_ext(bench, order=True, pollTime=15_000))
    changed(bench, one, 2_000)
    bench.advance(1_999)
    assert bench.answer(waiting) is None
    bench.advance(1)
    assert bench.answer(waiting) is not None


def test_nothing_of_it_goes_through_the_revive_topic(bench: Bench) -> None:
    fill(bench, b"a")
    take(bench)
    bench.advance(100_000)
    assert bench.store.max_offset("rmq_sys_wheel_timer", 0) == 0
    assert bench.broker.topics.get("%RETRY%G_T") is None


def test_the_note_survives(benches: Benches) -> None:
    bench = benches()
    fill(bench, b"a", b"b", b"c")
    got = pop(bench, **ORDERED, attemptId="x")
    acked(bench, got[0], got[2])
    changed(bench, got[1], 60_000)
    bench.stop()
    bench.close()
    raw = bench.files.read("config/consumerOrderInfo.json")
    assert raw is not None
    assert fastjson.loads(raw) == {
        "table": {
            "T@G": {
                "0": {
                    "a": "x",
                    "cm": 5,
                    "i": INVISIBLE_MS,
                    "l": NOW_MS,
                    "o": [0, 1, 2],
                    "ot": {"1": NOW_MS + 60_000},
                    "popTime": NOW_MS,
                }
            }
        }
    }
    again = benches(now_ms=bench.now_ms)
    assert take(again) == []
    assert take(again, attemptId="x") == [b"b", b"c"]


def test_a_note_of_rocketmq(benches: Benches) -> None:
    bench = benches()
    fill(bench, b"a", b"b")
    bench.close()
    note = (
        '{"table":{"T@G":{0:{"a":null,"cm":0,"i":20000,"l":NOW,"o":[0,1],"popTime":NOW}},"bad":1,'
        '"T@H":{0:{"o":[]},1:{"o":["x"]}}}}'
    ).replace("NOW", str(NOW_MS))
    bench.files.replace("config/consumerOrderInfo.json", note.encode())
    again = benches()
    assert take(again) == []
    again.advance(20_000)
    assert take(again) == [b"a", b"b"]


def test_a_reset_frees_the_queue(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    assert take(bench) == [b"a", b"b"]
    reset = {"topic": "T", "group": "G", "timestamp": 0, "isForce": True, "queueId": 0, "offset": 1}
    assert bench.ask(C.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 0
    assert take(bench) == [b"b"]


def test_forgotten_after_a_day_and_with_its_topic(bench: Bench) -> None:
    fill(bench, b"a")
    take(bench)
    bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    bench.advance(61_000)
    assert bench.broker.pop.order.table == {}
