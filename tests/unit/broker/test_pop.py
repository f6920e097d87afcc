"""Pop: what is given out, what comes back, and what any kind of stop does to it."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.wire import fastjson, properties, record
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from . import pops
from .conftest import Benches
from .harness import HOLD, NOW_MS, Bench
from .pops import INVISIBLE_MS, REVIVE, acked, bodies_of, changed, pop, pop_ext

BACK_MS = INVISIBLE_MS + 1_000  # a message is back by then: its time, and a second of the timers


def fill(bench: Bench, *texts: bytes, queue: int = 0, **how: Any) -> None:
    for text in texts:
        bench.sent(body=text, queue=queue, **how)


def records_of(bench: Bench, topic: str, queue: int = 0) -> list[Any]:
    found = []
    for offset in range(bench.store.min_offset(topic, queue), bench.store.max_offset(topic, queue)):
        unit = bench.store.unit(topic, queue, offset)
        assert unit is not None
        raw = bench.store.record_at(unit[0])
        assert raw is not None
        found.append(record.decode(raw))
    return found


# ------------------------------------------------------------------------------------------ receive


def test_all_queues_and_what_is_told_about_them(bench: Bench) -> None:
    fill(bench, b"a", b"b", queue=0)
    fill(bench, b"c", queue=3)
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench))
    assert answer.remark == "FOUND"
    assert answer.ext["popTime"] == str(NOW_MS)
    assert answer.ext["invisibleTime"] == str(INVISIBLE_MS)
    assert 0 <= int(answer.ext["reviveQid"]) < 8
    assert answer.ext["restNum"] == "0"
    assert sorted(answer.ext["startOffsetInfo"].split(";")) == ["0 0 0", "0 3 0"]
    assert sorted(answer.ext["msgOffsetInfo"].split(";")) == ["0 0 0,1", "0 3 0"]
    assert "orderCountInfo" not in answer.ext
    assert bodies_of(pops.got_of(answer)) == [b"a", b"b", b"c"]
    assert pop(bench) == []


def test_one_queue(bench: Bench) -> None:
    fill(bench, b"a", queue=0)
    fill(bench, b"b", queue=1)
    assert bodies_of(pop(bench, queueId=1)) == [b"b"]
    assert bodies_of(pop(bench, queueId=1)) == []
    assert bodies_of(pop(bench, queueId=0)) == [b"a"]


def test_the_batch_is_limited_and_the_rest_is_told(bench: Bench) -> None:
    fill(bench, *(b"%d" % n for n in range(10)))
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, maxMsgNums=4))
    assert len(pops.got_of(answer)) == 4
    assert answer.ext["restNum"] == "6"


def test_pops_begin_at_different_queues(bench: Bench) -> None:
    for queue in range(4):
        fill(bench, *(b"%d" % n for n in range(10)), queue=queue)
    seen = {pop(bench, maxMsgNums=1)[0].parts.queue_id for _ in range(20)}
    assert seen == {0, 1, 2, 3}


def test_tags_and_sql(bench: Bench) -> None:
    fill(bench, b"a", props={"TAGS": "A"})
    fill(bench, b"b", props={"TAGS": "B", "n": "5"})
    fill(bench, b"c", props={"TAGS": "C", "n": "1"})
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench, exp="B || C"))
    assert answer.ext["msgOffsetInfo"] == "0 0 1,2"
    assert answer.ext["startOffsetInfo"] == "0 0 0"
    assert bodies_of(pops.got_of(answer)) == [b"b", b"c"]
    other = {"consumerGroup": "G2", "expType": "SQL92", "exp": "n > 3"}
    assert bodies_of(pop(bench, **other)) == [b"b"]
    bad = bench.ask(C.POP_MESSAGE, pop_ext(bench, expType="SQL92", exp="n >"))
    assert bad.code == 23


def test_what_a_filter_passed_over_is_not_looked_at_again(bench: Bench) -> None:
    fill(bench, *[b"x"] * 5, props={"TAGS": "X"})
    assert pop(bench, exp="Y") == []
    bench.advance(2_000)
    assert bench.broker.offsets.get("T", "G", 0) == 5


@pytest.mark.parametrize(("mode", "in_memory", "expected"), [(0, 1, 5), (1, 1, 5), (1, 0, 1)])
def test_where_a_new_group_begins(
    benches: Benches, mode: int, in_memory: int, expected: int
) -> None:
    bench = benches(starts_pops_in_memory=bool(in_memory))
    fill(bench, *(b"%d" % n for n in range(5)))
    assert len(pop(bench, initMode=mode)) == expected


@pytest.mark.parametrize(
    ("ext", "code"),
    [
        ({"maxMsgNums": 33}, 29),
        ({"topic": "Nowhere"}, 17),
        ({"queueId": 99}, 29),
        ({"invisibleTime": -1}, 29),
        ({"invisibleTime": 10**12}, 29),
        ({"topic": "../x"}, 29),
        ({"bornTime": NOW_MS - 10_000, "pollTime": 9_000}, 210),
    ],
)
def test_refusals(bench: Bench, ext: dict[str, Any], code: int) -> None:
    fill(bench, b"a")
    assert bench.ask(C.POP_MESSAGE, pop_ext(bench, **ext)).code == code
    assert bodies_of(pop(bench)) == [b"a"]


def test_an_unknown_group_and_one_that_may_not(benches: Benches) -> None:
    bench = benches(is_group_auto_created=False)
    fill(bench, b"a")
    assert bench.ask(C.POP_MESSAGE, pop_ext(bench)).code == 26
    bench.ask(
        C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        {},
        fastjson.dumps({"groupName": "G", "consumeEnable": False}),
    )
    assert bench.ask(C.POP_MESSAGE, pop_ext(bench)).code == 16


def test_pop_without_timers_is_refused(benches: Benches) -> None:
    bench = benches(is_timer_enabled=False)
    fill(bench, b"a")
    answer = bench.ask(C.POP_MESSAGE, pop_ext(bench))
    assert answer.code == 1 and "timerWheelEnable" in str(answer.remark)


def test_in_flight_is_limited_and_an_ack_makes_room(benches: Benches) -> None:
    bench = benches(is_pop_limited=True, pop_most_in_flight=3)
    fill(bench, *(b"%d" % n for n in range(10)))
    got = pop(bench, maxMsgNums=4)
    assert pop(bench) == []
    waiting = bench.post(C.POP_MESSAGE, pop_ext(bench, pollTime=5_000, maxMsgNums=1))
    assert bench.answer(waiting) is None
    acked(bench, got[0])
    answer = bench.answer(waiting)
    assert answer is not None and len(pops.got_of(answer)) == 1


def test_an_offset_outside_the_queue_is_put_right(bench: Bench) -> None:
    fill(bench, b"a")
    pop(bench)
    bench.broker.offsets.commit("T", "G2", 0, 700, bench.now_ms, "test")
    assert pop(bench, consumerGroup="G2") == []
    assert bench.broker.offsets.get("T", "G2", 0) == 1


def test_a_reset_takes_effect_with_the_next_pop(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    acked(bench, *pop(bench))
    bench.advance(2_000)
    reset = {"topic": "T", "group": "G", "timestamp": 0, "isForce": True}
    assert bench.ask(C.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 0
    assert bodies_of(pop(bench)) == [b"a", b"b"]


# ------------------------------------------------------------------------------------- ack and back


def test_acknowledged_messages_do_not_come_back(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    fill(bench, b"c", queue=1)
    acked(bench, *pop(bench))
    bench.advance(10 * BACK_MS)
    assert pop(bench) == []
    assert bench.broker.pop.revive.revived == 0
    assert bench.broker.pop.revive.pending == 0


def test_what_was_not_acknowledged_comes_back_with_one_try_more(bench: Bench) -> None:
    fill(bench, b"a", b"b", props={"k": "v"})
    fill(bench, b"c", queue=1)
    got = {one.body: one for one in pop(bench)}
    acked(bench, got[b"a"], got[b"c"])
    bench.advance(INVISIBLE_MS - 1)
    assert pop(bench) == []
    bench.advance(BACK_MS - INVISIBLE_MS)
    (again,) = pop(bench)
    assert (again.body, again.times, again.message.topic) == (b"b", 1, "T")
    assert again.parts.flag == "1"
    found = again.message.properties
    assert found["1ST_POP_TIME"] == str(NOW_MS)
    assert found["k"] == "v"
    acked(bench, again)
    bench.advance(10 * BACK_MS)
    assert pop(bench) == []


def test_it_comes_back_again_and_again_then_it_is_a_dead_letter(bench: Bench) -> None:
    bench.ask(
        C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        {},
        fastjson.dumps({"groupName": "G", "retryMaxTimes": 3}),
    )
    fill(bench, b"a")
    for times in range(4):
        (one,) = pop(bench)
        assert (one.body, one.times) == (b"a", times)
        bench.advance(BACK_MS + 1_000)
    assert pop(bench) == []
    (dead,) = records_of(bench, "%DLQ%G")
    table = properties.parse(dead.properties)
    assert dead.body == b"a"
    assert table["DLQ_ORIGIN_TOPIC"] == "T"
    assert table["1ST_POP_TIME"] == str(NOW_MS)
    assert bench.broker.stats.counters.dead_letters == 1


def test_a_batch_of_acks(bench: Bench) -> None:
    fill(bench, *(b"%d" % n for n in range(6)))
    fill(bench, b"x", queue=1)
    got = {one.body: one for one in pop(bench)}
    answer = pops.batch_ack(
        bench,
        pops.batch_entry([got[b"0"], got[b"3"], got[b"5"]]),
        pops.batch_entry([got[b"x"]]),
    )
    assert answer.code == 0
    bench.advance(BACK_MS)
    assert bodies_of(pop(bench)) == [b"1", b"2", b"4"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"topic": "Nowhere"}, 17),
        ({"queueId": 9}, 13),
        ({"queueId": -1}, 13),
        ({"offset": 99}, 208),
        ({"offset": -1}, 208),
        ({"extraInfo": "gibberish"}, 29),
        ({"extraInfo": "0 1 2 77 0 broker-a 0 0"}, 29),
        ({"extraInfo": "0 1 2 3 0 broker-a 0 0"}, 0),
        ({"extraInfo": "5 1700000000000 10000 3 0 other 0 0"}, 0),
    ],
)
def test_acks_that_can_not_be(bench: Bench, more: dict[str, Any], code: int) -> None:
    fill(bench, b"a")
    (one,) = pop(bench)
    assert pops.ack(bench, one, **more).code == code
    bench.advance(BACK_MS)
    assert bodies_of(pop(bench)) == [b"a"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"acks":[]}', b'{"acks":[{}]}', b'{"acks":7}', b"[]", b"\xff"],
)
def test_batches_that_can_not_be(bench: Bench, body: bytes) -> None:
    assert bench.ask(C.BATCH_ACK_MESSAGE, {}, body).code in (208, 29)


def test_a_late_ack_is_harmless(bench: Bench) -> None:
    fill(bench, b"a")
    (one,) = pop(bench)
    bench.advance(BACK_MS)
    assert pops.ack(bench, one).code == 0
    bench.advance(5_000)
    (again,) = pop(bench)
    assert again.times == 1
    acked(bench, again)
    bench.advance(10 * BACK_MS)
    assert pop(bench) == []


def test_acks_up_to_the_last_moment_count(bench: Bench) -> None:
    fill(bench, *(b"%d" % n for n in range(8)))
    got = pop(bench)
    for one, ms in zip(got, [0, 5_000, 3_000, 1_000, 990, 1, 8, 0], strict=True):
        bench.advance(ms)
        if bench.now_ms < NOW_MS + INVISIBLE_MS:
            acked(bench, one)
    assert bench.now_ms == NOW_MS + INVISIBLE_MS - 1 + 0
    bench.advance(10 * BACK_MS)
    assert pop(bench) == []


# ----------------------------------------------------------------------------------- invisible time


def test_a_longer_time(bench: Bench) -> None:
    fill(bench, b"a")
    (one,) = pop(bench)
    bench.advance(5_000)
    one = changed(bench, one, 60_000)
    assert one.parts.pop_ms == bench.now_ms and one.parts.invisible_ms == 60_000
    bench.advance(59_000)
    assert pop(bench) == []
    bench.advance(2_000)
    (again,) = pop(bench)
    assert again.times == 1


def test_a_shorter_time_and_suspend(bench: Bench) -> None:
    fill(bench, b"a")
    (one,) = pop(bench, invisibleTime=60_000)
    changed(bench, one, 0, suspend=True)
    bench.advance(2_000)
    (again,) = pop(bench)
    assert again.times == 0, "suspended: no try counted"
    bench.advance(100_000)
    (third,) = pop(bench)
    assert third.times == 1


def test_the_new_receipt_acknowledges_and_the_old_one_is_void(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    first, second = pop(bench)
    new = changed(bench, first, 30_000)
    changed(bench, second, 30_000)
    acked(bench, new, second)
    bench.advance(40_000)
    assert bodies_of(pop(bench)) == [b"b"]


@pytest.mark.parametrize("count", [1, 3])
def test_changes_within_the_millisecond_of_the_pop(bench: Bench, count: int) -> None:
    """Old and new receipt were one to the ack of the old one: the message never came back."""
    fill(bench, b"a")
    (one,) = pop(bench)
    for _ in range(count):
        new = changed(bench, one, INVISIBLE_MS)
        assert new.receipt != one.receipt
        one = new
    bench.advance(BACK_MS + 1_000)
    (again,) = pop(bench)
    assert (again.body, again.times) == (b"a", 1)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"topic": "Nowhere"}, 17),
        ({"queueId": 9}, 13),
        ({"offset": 1}, 208),
        ({"extraInfo": "x"}, 29),
        ({"invisibleTime": -5}, 29),
    ],
)
def test_changes_that_can_not_be(bench: Bench, more: dict[str, Any], code: int) -> None:
    fill(bench, b"a")
    (one,) = pop(bench)
    assert pops.change(bench, one, 1_000, **more).code == code


# ---------------------------------------------------------------------------------------- waiting


def later(bench: Bench, **more: Any) -> int:
    opaque = bench.post(C.POP_MESSAGE, pop_ext(bench, pollTime=15_000, **more))
    assert bench.answer(opaque) is None
    return opaque


def came(bench: Bench, opaque: int) -> Frame:
    answer = bench.answer(opaque)
    assert answer is not None
    return answer


def test_a_message_wakes_who_waits(bench: Bench) -> None:
    fill(bench, b"old")
    acked(bench, *pop(bench))
    one, other = later(bench), later(bench, consumerGroup="G2", initMode=1, exp="Nope")
    bench.advance(3_000)
    fill(bench, b"new", queue=2)
    assert bodies_of(pops.got_of(came(bench, one))) == [b"new"]
    assert bench.answer(other) is None
    bench.advance(12_000)
    assert came(bench, other).code == 210


def test_each_message_wakes_one_and_the_rest_the_next(bench: Bench) -> None:
    fill(bench, b"old")
    acked(bench, *pop(bench))
    waiting = [later(bench, maxMsgNums=1) for _ in range(3)]
    bench.turn(*((bench.conn, bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"m")),) * 1)
    assert sum(bench.answer(one) is not None for one in waiting[:1]) == 1
    fill(bench, b"n")
    assert bodies_of(pops.got_of(came(bench, waiting[1]))) == [b"n"]
    assert bench.answer(waiting[2]) is None


def test_a_revived_message_wakes_who_waits(bench: Bench) -> None:
    fill(bench, b"a")
    pop(bench)
    waiting = later(bench)
    bench.advance(BACK_MS)
    (again,) = pops.got_of(came(bench, waiting))
    assert again.times == 1


def test_the_end_of_waiting(bench: Bench) -> None:
    fill(bench, b"a")
    pop(bench)
    one = later(bench, bornTime=0)
    bench.advance(14_999 - 6_000)
    assert bench.answer(one) is None
    gone = bench.connect()
    bench.post(C.POP_MESSAGE, pop_ext(bench, pollTime=15_000), conn=gone)
    assert bench.broker.pop.polls.count == 2
    bench.disconnect(gone)
    assert bench.broker.pop.polls.count == 1
    bench.stop()
    assert came(bench, one).code == 210
    assert bench.broker.pop.polls.count == 0


def test_waiting_is_limited(benches: Benches) -> None:
    bench = benches(max_polls=3, max_polls_of_group=2)
    fill(bench, b"a")
    for group in ("G", "G2", "G3"):
        pop(bench, consumerGroup=group)
    wait = {"pollTime": 15_000}
    later(bench)
    later(bench)
    assert bench.ask(C.POP_MESSAGE, pop_ext(bench, **wait)).code == 209
    later(bench, consumerGroup="G2")
    assert bench.ask(C.POP_MESSAGE, pop_ext(bench, consumerGroup="G3", **wait)).code == 209
    info = {"consumerGroup": "G", "topic": "T", "queueId": -1}
    assert bench.ask(C.POLLING_INFO, info).ext["pollingNum"] == "2"


def test_pulls_and_pops_wait_for_the_same_queue(bench: Bench) -> None:
    """The store tells of a queue as long as one of them waits."""
    fill(bench, b"old")
    acked(bench, *pop(bench))
    pull = bench.post(C.PULL_MESSAGE, bench.pull_ext("T", offset=1, flags=HOLD, suspend_ms=5_000))
    waiting = later(bench)
    bench.advance(5_100)
    assert bench.answer(pull) is not None
    fill(bench, b"new")
    assert bodies_of(pops.got_of(came(bench, waiting))) == [b"new"]


# ----------------------------------------------------------------------------- only to look at it


def test_peek_takes_nothing(bench: Bench) -> None:
    fill(bench, b"a", b"b")
    ext = {"consumerGroup": "G", "topic": "T", "queueId": -1, "maxMsgNums": 1}
    for _ in range(2):
        answer = bench.ask(C.PEEK_MESSAGE, ext)
        assert answer.code == 0 and answer.ext["restNum"] == "1"
    assert bodies_of(pop(bench)) == [b"a", b"b"]
    assert bench.ask(C.PEEK_MESSAGE, ext).code == 19


def test_notification(bench: Bench) -> None:
    fill(bench, b"a")
    ext = {"consumerGroup": "G", "topic": "T", "queueId": -1, "pollTime": 3_000}
    assert bench.ask(C.NOTIFICATION, ext).ext["hasMsg"] == "true"
    pop(bench)
    waiting = bench.post(C.NOTIFICATION, ext)
    assert bench.answer(waiting) is None
    fill(bench, b"b")
    assert came(bench, waiting).ext["hasMsg"] == "true"


def runtime(bench: Bench) -> dict[str, str]:
    found: dict[str, str] = bench.json(C.GET_BROKER_RUNTIME_INFO)["table"]
    return found


def test_progress_as_an_operator_sees_it(bench: Bench) -> None:
    fill(bench, b"a", b"b", b"c")
    pop(bench, maxMsgNums=2)
    bench.advance(BACK_MS)
    table = bench.json(C.GET_CONSUME_STATS, {"consumerGroup": "G"})["offsetTable"]
    seen = {
        (key["topic"], key["queueId"]): (one["consumerOffset"], one["brokerOffset"])
        for key, one in table.items()
        if one["brokerOffset"]
    }
    assert seen == {("T", 0): (2, 3), ("%RETRY%G_T", 0): (0, 2)}


def test_the_figures(bench: Bench) -> None:
    fill(bench, b"a", b"b", b"c")
    got = pop(bench)
    acked(bench, got[0])
    changed(bench, got[1], 100_000)
    bench.advance(BACK_MS)
    figures = {key: int(value) for key, value in runtime(bench).items() if "Pop" in key}
    assert figures["cometmqPopGivenOut"] == 3
    assert figures["cometmqPopAcked"] == 1
    assert figures["cometmqPopInvisibleChanged"] == 1
    assert figures["cometmqPopRevived"] == 1
    assert figures["cometmqPopInFlight"] == 1
    assert figures["cometmqPopCheckpointsPending"] == 0


# ------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_stop_while_messages_are_out(benches: Benches, is_clean: bool) -> None:
    bench = benches()
    fill(bench, b"a", b"b", b"c")
    got = {one.body: one for one in pop(bench)}
    acked(bench, got[b"a"])
    bench.advance(6_000)
    acked(bench, got[b"c"])
    if is_clean:
        bench.stop()
        assert bench.broker.is_stopped
        bench.close()
    else:
        bench.crash()
    again = benches(now_ms=bench.now_ms + 1_000)
    assert pop(again) == []
    again.advance(BACK_MS)
    (one,) = pop(again)
    assert (one.body, one.times) == (b"b", 1)
    again.advance(60_000)
    (one,) = pop(again)
    assert (one.body, one.times) == (b"b", 2)


def test_receipts_survive_a_restart(benches: Benches) -> None:
    bench = benches()
    fill(bench, b"a", b"b")
    got = pop(bench, invisibleTime=30_000)
    bench.advance(6_000)
    bench.crash()
    again = benches(now_ms=bench.now_ms)
    acked(again, got[0])
    new = changed(again, got[1], 30_000)
    again.advance(20_000)
    acked(again, new)
    again.advance(120_000)
    assert pop(again) == []


def test_long_after_a_crash_everything_comes_once(benches: Benches) -> None:
    bench = benches()
    fill(bench, *(b"%03d" % n for n in range(100)))
    out: list[pops.Got] = []
    while got := pop(bench, maxMsgNums=7):
        out += got
    acked(bench, *out[::2])
    bench.advance(6_000)
    bench.crash()
    again = benches(now_ms=bench.now_ms + 3_600_000)
    again.advance(10_000)
    back: list[bytes] = []
    while got := pop(again, invisibleTime=600_000):
        back += [one.body for one in got]
    assert sorted(back) == sorted(one.body for one in out[1::2])


@pytest.mark.parametrize("at_ms", range(9_000, 13_000, 500))
def test_a_crash_while_messages_come_back(benches: Benches, at_ms: int) -> None:
    """Whatever was noted at that moment: none is lost, and none that was acknowledged returns."""
    bench = benches()
    fill(bench, *(b"%02d" % n for n in range(20)))
    got = pop(bench)
    acked(bench, *got[:10])
    bench.advance(at_ms)
    bench.crash()
    again = benches(now_ms=bench.now_ms)
    again.advance(10_000)
    seen: list[bytes] = []
    while more := pop(again, invisibleTime=600_000):
        seen += [one.body for one in more]
    assert set(seen) == {one.body for one in got[10:]}


def test_offsets_wait_for_their_checkpoint_to_be_durable(benches: Benches) -> None:
    bench = benches()
    fill(bench, b"a")
    bench.advance(20_000)
    bench.keeps_flushes = True
    pop(bench)
    bench.advance(6_000)
    assert bench.broker.offsets.get("T", "G", 0) == 0
    assert pop(bench) == []
    bench.keeps_flushes = False
    while bench.kept_flushes:
        bench.flush()
    assert bench.broker.offsets.get("T", "G", 0) == 1


def test_a_stop_notes_the_last_offsets(benches: Benches) -> None:
    bench = benches()
    fill(bench, b"a")
    pop(bench)
    bench.stop()
    assert bench.broker.is_stopped
    bench.close()
    assert benches().broker.offsets.get("T", "G", 0) == 1


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_an_ack_is_answered_when_it_is_durable(benches: Benches, flush: str) -> None:
    bench = benches(flush=flush)
    fill(bench, b"a")
    (one,) = pop(bench)
    bench.keeps_flushes = True
    opaque = bench.post(C.ACK_MESSAGE, pops.ack_ext(one))
    if flush == "SYNC_FLUSH":
        assert bench.answer(opaque) is None
        bench.keeps_flushes = False
        while bench.kept_flushes:
            bench.flush()
    assert came(bench, opaque).code == 0


def test_slow_flushes_do_not_bring_back_what_was_acknowledged(benches: Benches) -> None:
    """With SYNC_FLUSH a record is in its queue only when it is durable."""
    bench = benches(flush="SYNC_FLUSH", sync_flush_timeout_ms=60_000)
    fill(bench, b"a", b"b")
    got = pop(bench)
    bench.advance(INVISIBLE_MS - 500)
    bench.keeps_flushes = True
    bench.post(C.ACK_MESSAGE, pops.ack_ext(got[0]))
    bench.advance(5_000)
    bench.keeps_flushes = False
    while bench.kept_flushes:
        bench.flush()
    bench.advance(5_000)
    assert bodies_of(pop(bench)) == [got[1].body]


def test_the_readers_offset_follows(bench: Bench) -> None:
    fill(bench, *(b"%d" % n for n in range(20)))
    for _ in range(20):
        acked(bench, *pop(bench, maxMsgNums=1))
    bench.advance(30_000)
    for queue in range(8):
        most = bench.store.max_offset(REVIVE, queue)
        assert most >= 4
        assert pops.revive_offsets(bench)[queue] == most - 1


def test_a_topic_that_is_gone(bench: Bench) -> None:
    fill(bench, b"a")
    pop(bench)
    bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    bench.advance(60_000)
    assert bench.broker.pop.revive.pending == 0
    assert bench.broker.pop.revive.revived == 0


def test_newer_retry_topics(benches: Benches) -> None:
    bench = benches(is_pop_retry_v2=True)
    fill(bench, b"a")
    pop(bench)
    waiting = later(bench)
    bench.advance(BACK_MS)
    (again,) = pops.got_of(came(bench, waiting))
    assert again.parts.flag == "2"
    acked(bench, again)
    bench.advance(60_000)
    assert pop(bench) == []
    bench.close()
    assert benches().broker.topics.get("%RETRY%G+T") is not None


def test_the_deadline_does_not_spin(bench: Bench) -> None:
    fill(bench, b"a")
    pop(bench)
    bench.advance(30_000)
    before = bench.ticks
    bench.advance(60_000)
    assert bench.ticks - before < 200


def test_no_room_for_the_retry_topic(benches: Benches) -> None:
    """One group's trouble does not hold up others, and its message is tried again later."""
    bench = benches()
    fill(bench, b"a")
    pop(bench)
    before = bench.broker.topics.limit
    bench.broker.topics.limit = 0
    bench.advance(BACK_MS)
    assert bench.broker.pop.revive.put_again == 1
    assert bench.broker.pop.revive.pending == 0
    bench.broker.topics.limit = before
    bench.advance(12_000)
    (again,) = pop(bench)
    assert (again.body, again.times) == (b"a", 1)


def test_a_store_that_takes_nothing_does_not_make_the_reader_spin(benches: Benches) -> None:
    """A checkpoint was read, the timers could not deliver its acks: it asked again at once."""
    bench = benches()
    fill(bench, b"a", b"b", b"c")
    pop(bench, maxMsgNums=1, invisibleTime=2_500)
    pop(bench, maxMsgNums=1, invisibleTime=3_500)
    bench.advance(1_100)
    bench.keeps_flushes = True
    pop(bench, maxMsgNums=1, invisibleTime=60_000)
    bench.advance(1_200)
    assert bench.broker.pop.revive.pending == 1
    bench.flush("the disk is broken")
    assert bench.store.read_only_reason is not None
    ticks = bench.ticks
    bench.advance(10_000)
    assert bench.ticks - ticks < 1_000
