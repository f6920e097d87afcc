"""Messages for any time: when they come, in which order, and what any kind of stop does to them."""

from __future__ import annotations

import base64
import random
import shutil
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cometmq.broker import timers
from cometmq.errors import StoreCorrupt
from cometmq.message import NewMessage
from cometmq.store.store import Store
from cometmq.store.timer_wheel import Slot, TimerWheel
from cometmq.testing.disk import SimulatedFiles
from cometmq.wire import fastjson, properties, record
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from . import harness
from .conftest import Benches
from .harness import NOW_MS, Bench

TIMER_TOPIC = "rmq_sys_wheel_timer"
SMALL_LOG = 52 * 40 + 16


def after(ms: int, **more: str) -> dict[str, str]:
    return {"TIMER_DELIVER_MS": str(NOW_MS + ms), **more}


def delivered(bench: Bench, topic: str = "T", queue: int = 0) -> list[bytes]:
    """The bodies of a queue, whoever made them visible."""
    return [one.body for one in messages(bench, topic, queue)]


def messages(bench: Bench, topic: str = "T", queue: int = 0) -> list[Any]:
    found = []
    for offset in range(bench.store.max_offset(topic, queue)):
        unit = bench.store.unit(topic, queue, offset)
        assert unit is not None
        raw = bench.store.record_at(unit[0])
        assert raw is not None
        found.append(record.decode(raw))
    return found


def table_of(message: Any) -> dict[str, str]:
    return properties.parse(message.properties)


def check_of(bench: Bench) -> tuple[int, ...]:
    answer = bench.ask(C.GET_TIMER_CHECK_POINT)
    assert len(answer.body) == 56
    return struct.unpack(">7q", answer.body)


# --------------------------------------------------------------------------------------- the times


@pytest.mark.parametrize(
    ("props", "due_ms"),
    [
        ({"TIMER_DELAY_SEC": "5"}, 5000),
        ({"TIMER_DELAY_MS": "2500"}, 3000),
        ({"TIMER_DELAY_MS": "1"}, 1000),
        (after(7000), 7000),
        (after(6999), 7000),
        (after(7001), 8000),
        ({"TIMER_DELAY_SEC": "3", "TIMER_DELAY_MS": "9000", **after(20_000)}, 3000),
        ({"TIMER_DELAY_MS": "9000", **after(20_000)}, 9000),
    ],
)
def test_none_is_early_and_none_later_than_the_precision(
    bench: Bench, props: dict[str, str], due_ms: int
) -> None:
    bench.sent(queue=2, props=props)
    bench.advance(due_ms - 1)
    assert delivered(bench, queue=2) == []
    bench.advance(1)
    assert delivered(bench, queue=2) == [b"hello"]
    bench.advance(60_000)
    assert delivered(bench, queue=2) == [b"hello"]


def test_a_finer_precision(benches: Benches) -> None:
    bench = benches(timer_precision_ms=100)
    bench.sent(props=after(250))
    bench.advance(299)
    assert delivered(bench) == []
    bench.advance(1)
    assert delivered(bench) == [b"hello"]


@pytest.mark.parametrize("ms", [0, -1, -100_000])
def test_what_is_due_already_is_an_ordinary_message(bench: Bench, ms: int) -> None:
    answer = bench.sent(props=after(ms))
    assert delivered(bench) == [b"hello"]
    assert "recallHandle" not in answer.ext
    assert bench.store.max_offset(TIMER_TOPIC, 0) == 0


def test_a_delay_level_wins(bench: Bench) -> None:
    answer = bench.sent(props={"DELAY": "1", "TIMER_DELAY_SEC": "60"})
    assert "recallHandle" not in answer.ext
    bench.advance(1_100)
    assert delivered(bench) == [b"hello"]


@pytest.mark.parametrize(
    ("props", "words"),
    [
        ({"TIMER_DELAY_SEC": "soon"}, "'soon' is not a number"),
        ({"TIMER_DELAY_MS": "1.5"}, "not a number"),
        ({"TIMER_DELIVER_MS": "9" * 19}, "not a number"),
        ({"TIMER_DELAY_SEC": "259201"}, "timerMaxDelaySec"),
        (after(259_200_001), "timerMaxDelaySec"),
        ({"TIMER_DELAY_SEC": str(2**62)}, "timerMaxDelaySec"),
        (after(-5, TIMER_DEL_UNIQKEY="Tk"), "over"),
    ],
)
def test_times_that_can_not_be_are_refused(bench: Bench, props: dict[str, str], words: str) -> None:
    answer = bench.send("Fresh", props=props)
    assert answer.code == 13
    assert words in str(answer.remark)
    assert bench.broker.topics.get("Fresh") is None


def test_the_longest_delay_may_be_set(benches: Benches) -> None:
    bench = benches(timer_max_delay_seconds=30 * 86_400)
    assert bench.send(props=after(30 * 86_400_000)).code == 0
    assert bench.send(props=after(30 * 86_400_000 + 1)).code == 13


def test_switched_off_they_are_refused_and_wait(benches: Benches) -> None:
    bench = benches()
    bench.sent(props=after(2000))
    bench.close()
    off = benches(is_timer_enabled=False)
    answer = off.send(props=after(2000))
    assert answer.code == 1
    assert "timerWheelEnable" in str(answer.remark)
    assert off.send().code == 0
    assert off.ask(C.GET_TIMER_CHECK_POINT).code == 1
    off.advance(10_000)
    assert delivered(off) == [b"hello"]
    off.close()
    on = benches(now_ms=NOW_MS + 20_000)
    on.advance(0)
    assert len(delivered(on)) == 2


def test_a_message_that_is_timed_no_more_is_not_timed_again(bench: Bench) -> None:
    bench.sent(props={"TIMER_DELAY_SEC": "5", "TIMER_OUT_MS": "1"})
    assert delivered(bench) == [b"hello"]


def test_a_queue_that_the_topic_has_lost_meanwhile_is_not_delivered_to(bench: Bench) -> None:
    bench.create_topic(queues=4)
    bench.sent(queue=3, props=after(2_000))
    bench.create_topic(queues=2)
    bench.advance(5_000)
    assert delivered(bench, queue=1) == [b"hello"]
    assert delivered(bench, queue=3) == []


def test_a_topic_deleted_meanwhile_keeps_what_was_meant_for_it(bench: Bench) -> None:
    bench.create_topic(queues=4)
    bench.sent(queue=3, props=after(2_000))
    assert bench.ask(C.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    bench.advance(5_000)
    assert delivered(bench, queue=3) == [b"hello"]


# ------------------------------------------------------------------------------- what is stored


def test_where_it_waits_and_what_it_brings(bench: Bench) -> None:
    bench.advance(300)
    bench.sent(queue=3, body=b"x", props=after(5500, TAGS="tag", UNIQ_KEY="K", own="mine"))
    (waiting,) = messages(bench, TIMER_TOPIC)
    table = table_of(waiting)
    assert table["TIMER_OUT_MS"] == str(NOW_MS + 5000)
    assert (table["REAL_TOPIC"], table["REAL_QID"]) == ("T", "3")
    bench.advance(10_000)
    (came,) = messages(bench, "T", 3)
    assert came.body == b"x"
    assert (came.born_ms, came.born_host) == (waiting.born_ms, waiting.born_host)
    table = table_of(came)
    assert table["TIMER_ENQUEUE_MS"] == str(NOW_MS)
    assert table["TIMER_DEQUEUE_MS"] == str(NOW_MS + 6000)
    for name in ("TIMER_OUT_MS", "REAL_TOPIC", "REAL_QID", "TAGS", "UNIQ_KEY", "own"):
        assert table[name] == table_of(waiting)[name]
    unit = bench.store.unit("T", 3, 0)
    assert unit is not None
    assert unit[2] == 114586, "its tag counts again"


def test_properties_that_leave_no_room_are_delivered_as_they_were(bench: Bench) -> None:
    bench.sent(props=after(2000, own="x" * 32_500))
    bench.advance(5000)
    assert delivered(bench) == [b"hello"]


def test_a_pull_that_waits_is_woken(bench: Bench) -> None:
    bench.create_topic()
    bench.sent(props=after(2000))
    opaque = bench.hold("T", 0, 0)
    bench.advance(1999)
    assert bench.answer(opaque) is None
    bench.advance(1)
    answer = bench.answer(opaque)
    assert answer is not None
    assert harness.bodies_of(answer) == [b"hello"]


# -------------------------------------------------------------------------------- order and bounds


def test_a_slot_keeps_the_order_of_sending(bench: Bench) -> None:
    for number in range(20):
        bench.sent(body=b"%d" % number, props=after(5000 - number % 3))
    bench.advance(10_000)
    assert delivered(bench) == [b"%d" % number for number in range(20)]


def test_earlier_slots_come_first(bench: Bench) -> None:
    for seconds in (9, 3, 7, 5):
        bench.sent(body=b"%d" % seconds, props=after(seconds * 1000))
    bench.advance(10_000)
    assert delivered(bench) == [b"3", b"5", b"7", b"9"]


def test_a_crowded_slot_leaves_in_slices_and_in_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "MOST_DELIVERED", 30)
    monkeypatch.setattr(timers, "MOST_READ", 40)
    monkeypatch.setattr(timers, "MOST_ENTERED", 50)
    for number in range(200):
        bench.sent(body=b"%d" % number, props=after(5000))
    bench.advance(4000)
    bench.now_ms = NOW_MS + 5000
    counts = []
    for _ in range(40):
        bench.tick()
        counts.append(len(delivered(bench)))
    assert max(b - a for a, b in pairwise(counts)) <= 30
    assert delivered(bench) == [b"%d" % number for number in range(200)]


def test_a_slot_waits_for_what_is_stored_and_not_yet_in_the_queue(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "MOST_DELIVERED", 2)
    for number in range(9):
        bench.sent(body=b"%d" % number, props=after(2000))
    out: list[Any] = []
    ext = bench.send_ext(props=after(2000))
    frame = Frame(C.SEND_MESSAGE_V2, 77, ext={k: str(v) for k, v in ext.items() if v is not None})
    frame.body = b"late"
    bench.broker.handle(bench.conn, frame, 0, bench.now_ms, out)
    bench.now_ms += 2000
    bench.broker.tick(bench.now_ms, out)  # the slot's time is over
    bench.broker.settle(bench.now_ms, out)  # and it reaches the queue only now
    bench.advance(100)
    assert delivered(bench) == [b"%d" % number for number in range(9)] + [b"late"]
    assert table_of(messages(bench)[-1])["TIMER_ENQUEUE_MS"] == str(NOW_MS + 1000)


def test_one_for_a_slot_that_was_read_before_the_clock_was_set_back_comes_at_once(
    bench: Bench,
) -> None:
    bench.sent(body=b"first", props=after(2000))
    bench.advance(20_000)
    bench.now_ms -= 15_000
    bench.sent(body=b"late", props=after(6000))
    bench.tick()
    assert delivered(bench) == [b"first", b"late"]
    assert table_of(messages(bench)[-1])["TIMER_ENQUEUE_MS"] == str(2**63 - 1)


def test_a_store_that_refuses_is_asked_again(bench: Bench) -> None:
    bench.create_topic()
    bench.sent(props=after(20_000))
    bench.files.ratio = 0.95
    bench.advance(40_000)
    assert delivered(bench) == []
    assert bench.runtime()["timerReadBehind"] == "21"
    bench.files.ratio = 0.10
    bench.advance(11_000)
    assert delivered(bench) == [b"hello"]


def test_flow_control(benches: Benches) -> None:
    bench = benches(timer_most_per_slot=10)
    codes = []
    for _ in range(60):
        answer = bench.send(props=after(5000))
        bench.tick()
        codes.append(answer.code)
    assert codes[:11] == [0] * 11
    assert set(codes[11:]) == {0, 1}, "some are refused"
    assert codes.count(0) <= 20, "from twice the limit on all are"
    assert bench.send(props=after(15_000)).code == 0
    refused = bench.send(props=after(5000))
    assert "timerCongestNumEachSlot" in str(refused.remark)


def test_what_is_no_timed_message_is_passed_over(bench: Bench) -> None:
    for text in ("", "TIMER_OUT_MS\x01x\x02", f"TIMER_OUT_MS\x01{NOW_MS + 1000}\x02"):
        bench.store.append(NewMessage(TIMER_TOPIC, 0, b"?", text), bench.now_ms)
    bench.sent(props=after(2000))
    bench.advance(5000)
    assert delivered(bench) == [b"hello"]
    assert bench.broker.timers.lost == 1


# ------------------------------------------------------------------------------------------ rolled


@pytest.mark.parametrize(("seconds", "rolls"), [(9, 0), (12, 1), (30, 2), (100, 9)])
def test_beyond_the_window_it_is_stored_again_on_the_way(
    benches: Benches, seconds: int, rolls: int
) -> None:
    bench = benches(timer_window_slots=10)
    bench.sent(props=after(seconds * 1000))
    bench.advance(seconds * 1000 - 1)
    assert delivered(bench) == []
    bench.advance(1)
    (came,) = messages(bench)
    assert table_of(came).get("TIMER_ROLL_TIMES", "0") == str(rolls)
    assert bench.store.max_offset(TIMER_TOPIC, 0) == 1 + rolls
    bench.advance(60_000)
    assert len(delivered(bench)) == 1


def test_a_window_beyond_the_wheel_is_the_wheels(benches: Benches) -> None:
    bench = benches(timer_window_slots=10**6, timer_max_delay_seconds=10**7)
    bench.sent(props=after(700_000_000))
    bench.tick()
    unit = bench.broker.timers._log.unit(0)
    assert unit is not None
    assert unit.magic == 3
    assert unit.delay_ms == (604_740 // 2) * 1000


# ------------------------------------------------------------------------------------------ recall


def recalled(bench: Bench, handle: str, topic: str = "T") -> Frame:
    ext = {"topic": topic, "recallHandle": handle, "producerGroup": "pg"}
    return bench.ask(C.RECALL_MESSAGE, ext)


def test_a_recalled_message_never_comes(benches: Benches) -> None:
    bench = benches(is_recall_enabled=True)
    bench.sent(body=b"first", props=after(5000, UNIQ_KEY="K1"))
    handle = bench.sent(body=b"gone", props=after(5000, UNIQ_KEY="K2")).ext["recallHandle"]
    bench.sent(body=b"last", props=after(5000, UNIQ_KEY="K3"))
    words = base64.urlsafe_b64decode(handle).decode()
    assert words == f"v1 T broker-a {NOW_MS + 4001} K2"
    bench.advance(1000)
    answer = recalled(bench, handle)
    assert (answer.code, answer.ext["msgId"]) == (0, "K2")
    assert answer.ext["MSG_REGION"] == "DefaultRegion"
    marker = messages(bench, TIMER_TOPIC)[-1]
    assert marker.body == b"0"
    table = table_of(marker)
    assert (table["TAGS"], table["TIMER_DEL_UNIQKEY"]) == ("_RECALL_TAG_", "K2")
    bench.advance(10_000)
    assert delivered(bench) == [b"first", b"last"]
    assert bench.runtime()["cometmqTimersRecalled"] == "1"
    assert bench.runtime()["cometmqTimersPending"] == "0"


def test_a_recall_reaches_a_rolled_message(benches: Benches) -> None:
    bench = benches(is_recall_enabled=True, timer_window_slots=10)
    handle = bench.sent(props=after(40_000, UNIQ_KEY="K")).ext["recallHandle"]
    bench.advance(3000)
    assert recalled(bench, handle.rstrip("=")).code == 0
    bench.advance(60_000)
    assert delivered(bench) == []


def test_a_recall_counts_though_the_timers_paused(benches: Benches) -> None:
    """A disk that refused a file makes them wait; when they go on, the recall is read first."""
    bench = benches(is_recall_enabled=True)
    handle = bench.sent(body=b"gone", props=after(3000, UNIQ_KEY="K")).ext["recallHandle"]
    bench.sent(body=b"kept", props=after(3000, UNIQ_KEY="L"))
    bench.advance(1000)
    bench.broker.timers._blocked_ms = bench.now_ms + 6000
    assert recalled(bench, handle).code == 0
    bench.advance(20_000)
    assert delivered(bench) == [b"kept"]


def test_a_recall_counts_though_the_queue_got_nothing_for_a_while(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without room for the queue's next file: the log has message and recall, nobody sees
    them, and meanwhile their slot's time is over."""
    bench = benches(is_recall_enabled=True)
    bench.sent(body=b"far", props=after(200_000))
    bench.advance(1000)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "dispatch", lambda store, now_ms: [])
        handle = bench.sent(body=b"gone", props=after(3000, UNIQ_KEY="K")).ext["recallHandle"]
        bench.sent(body=b"kept", props=after(3000, UNIQ_KEY="L"))
        assert recalled(bench, handle).code == 0
        for _ in range(8):
            bench.now_ms += 1000
            bench.broker.tick(bench.now_ms, [])
    bench.sent("Other")
    bench.advance(2000)
    assert delivered(bench) == [b"kept"]
    assert bench.runtime()["cometmqTimersRecalled"] == "1"


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("paused_ms", [9000, 90_000])
def test_a_recall_counts_though_neither_it_nor_its_message_had_entered(
    benches: Benches, *, has_others: bool, paused_ms: int
) -> None:
    """As before, but the disk refused already when the message came: its slot, empty as yet, was
    passed over, and the message taken for a late one that nothing can delete any more."""
    bench = benches(is_recall_enabled=True)
    if has_others:
        bench.sent(body=b"far", props=after(200_000))
    bench.advance(1000)
    bench.broker.timers._blocked_ms = bench.now_ms + paused_ms
    handle = bench.sent(body=b"gone", props=after(3000, UNIQ_KEY="K")).ext["recallHandle"]
    bench.sent(body=b"kept", props=after(3000, UNIQ_KEY="L"))
    bench.sent(body=b"later", props=after(8000, UNIQ_KEY="M"))
    assert recalled(bench, handle).code == 0
    bench.advance(paused_ms + 2000)
    assert delivered(bench) == [b"kept", b"later"]
    assert bench.runtime()["cometmqTimersRecalled"] == "1"


def test_slots_leave_though_the_queue_is_never_read_to_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for what is unread waits for what was unread then, or it would wait for ever."""
    monkeypatch.setattr(timers, "MOST_ENTERED", 1)
    monkeypatch.setattr(timers, "SIMPLE", 1)
    for second in range(1, 60):
        for _ in range(3):
            bench.sent(props=after(second * 1000 + 900))
        bench.now_ms += 1000
        for _ in range(2):
            bench.broker.tick(bench.now_ms, [])
    assert bench.broker.timers.unread(bench.store) > 20
    assert len(delivered(bench)) > 15


def test_a_long_rest_is_not_walked_through_slot_by_slot(bench: Bench) -> None:
    bench.sent(props=after(2000))
    bench.advance(5000)
    bench.now_ms += 40 * 24 * 3600 * 1000
    due_ms = bench.now_ms + 5000
    bench.sent(body=b"new", props={"TIMER_DELIVER_MS": str(due_ms)})
    bench.broker.tick(bench.now_ms, [])
    assert bench.broker.timers.read_ms == bench.now_ms // 1000 * 1000
    bench.advance(7000)
    assert delivered(bench) == [b"hello", b"new"]


def test_a_recall_of_the_same_key_in_another_topic_changes_nothing(benches: Benches) -> None:
    bench = benches(is_recall_enabled=True)
    bench.sent("A", props=after(5000, UNIQ_KEY="K"))
    handle = bench.sent("B", props=after(5000, UNIQ_KEY="K")).ext["recallHandle"]
    assert recalled(bench, handle, "B").code == 0
    bench.advance(6000)
    assert (delivered(bench, "A"), delivered(bench, "B")) == ([b"hello"], [])


@pytest.mark.parametrize("key", ["K", "TK"])
def test_markers_of_other_makers(bench: Bench, key: str) -> None:
    bench.sent(props=after(5000, UNIQ_KEY="K"))
    bench.sent(props=after(5000, UNIQ_KEY="other", TIMER_DEL_UNIQKEY=key))
    bench.advance(6000)
    assert delivered(bench) == []


def test_recall_is_off_unless_allowed(bench: Bench) -> None:
    handle = bench.sent(props=after(5000)).ext["recallHandle"]
    answer = recalled(bench, handle)
    assert answer.code == 16
    assert "recallMessageEnable" in str(answer.remark)


def make_handle(*words: object) -> str:
    text = " ".join(str(word) for word in words)
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "handle",
    [
        "",
        "###",
        "é",
        make_handle("v2", "T", "broker-a", NOW_MS + 5001, "K"),
        make_handle("v1", "T", "broker-a", NOW_MS + 5001),
        make_handle("v1", "U", "broker-a", NOW_MS + 5001, "K"),
        make_handle("v1", "T", "broker-b", NOW_MS + 5001, "K"),
        make_handle("v1", "T", "broker-a", NOW_MS, "K"),
        make_handle("v1", "T", "broker-a", NOW_MS + 259_200_000, "K"),
        make_handle("v1", "T", "broker-a", "then", "K"),
        make_handle("v1", "T", "broker-a", NOW_MS + 5001, "K\x02TAGS\x01x"),
    ],
)
def test_bad_handles_are_refused_with_604(benches: Benches, handle: str) -> None:
    bench = benches(is_recall_enabled=True)
    bench.create_topic()
    assert recalled(bench, handle).code == 604
    assert bench.store.max_offset(TIMER_TOPIC, 0) == 0


def test_a_recall_needs_its_topic_and_a_writable_broker(benches: Benches) -> None:
    bench = benches(is_recall_enabled=True)
    assert recalled(bench, "x", "Nowhere").code == 17
    bench.close()
    closed = benches(is_recall_enabled=True, permission=4)
    assert recalled(closed, "x").code == 14


def test_retry_topics_get_no_handle(bench: Bench) -> None:
    bench.beat("G")
    answer = bench.sent("%RETRY%G", props=after(5000))
    assert "recallHandle" not in answer.ext


# ------------------------------------------------------------------------------- stops and starts


@pytest.mark.parametrize("is_message_in_the_wheel", [True, False])
def test_a_recall_that_was_answered_before_a_kill_counts_after_it(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, is_message_in_the_wheel: bool
) -> None:
    """Though its time is over when the broker comes back, and the marker had not entered."""
    bench = benches(is_recall_enabled=True)
    monkeypatch.setattr(timers, "MOST_ENTERED", 1)
    if not is_message_in_the_wheel:
        monkeypatch.setattr(timers, "MOST_ENTERED", 0)
    handle = bench.sent(body=b"gone", props=after(5000, UNIQ_KEY="K1")).ext["recallHandle"]
    bench.tick()
    assert bench.broker.timers.unread(bench.store) == (0 if is_message_in_the_wheel else 1)
    monkeypatch.setattr(timers, "MOST_ENTERED", 0)
    for number in range(3):
        bench.sent(body=b"%d" % number, props=after(5000 + number))
    assert recalled(bench, handle).code == 0
    bench.crash()
    monkeypatch.setattr(timers, "MOST_ENTERED", 2)
    again = benches(is_recall_enabled=True, now_ms=NOW_MS + 60_000)
    again.advance(60_000)
    assert delivered(again) == [b"0", b"1", b"2"]
    assert again.broker.timers.recalled == 1


def test_a_recall_of_a_rolled_message_counts_after_a_long_stop(benches: Benches) -> None:
    """Message and marker are stored again on the way while both are overdue."""
    bench = benches(is_recall_enabled=True, timer_window_slots=10)
    handle = bench.sent(body=b"gone", props=after(30_000, UNIQ_KEY="K1")).ext["recallHandle"]
    bench.sent(body=b"kept", props=after(30_000, UNIQ_KEY="K2"))
    bench.advance(3_000)
    assert recalled(bench, handle).code == 0
    bench.advance(1_000)
    bench.crash()
    again = benches(is_recall_enabled=True, timer_window_slots=10, now_ms=NOW_MS + 90_000)
    again.advance(10_000)
    assert delivered(again) == [b"kept"]


def test_a_clean_stop_forgets_and_repeats_nothing(benches: Benches) -> None:
    bench = benches(timer_log_file_bytes=SMALL_LOG)
    for number in range(100):
        bench.sent(body=b"%d" % number, props=after(1000 + 100 * number))
    bench.advance(5000)
    before = delivered(bench)
    assert len(before) == 41
    bench.close()
    again = benches(timer_log_file_bytes=SMALL_LOG, now_ms=NOW_MS + 5100)
    assert again.broker.timers.pending == 59
    again.advance(60_000)
    assert delivered(again) == [b"%d" % number for number in range(100)]


def test_what_came_due_meanwhile_comes_at_once(benches: Benches) -> None:
    bench = benches()
    for seconds in (5, 100, 1000):
        bench.sent(body=b"%d" % seconds, props=after(seconds * 1000))
    bench.tick()
    bench.close()
    again = benches(now_ms=NOW_MS + 200_000)
    again.advance(100)
    assert delivered(again) == [b"5", b"100"]
    again.advance(1_000_000 - 200_200)
    assert len(delivered(again)) == 2
    again.advance(100)
    assert len(delivered(again)) == 3


@pytest.mark.parametrize("at_ms", [0, 100, 1000, 1500, 2000, 2999, 3000, 3001, 4500, 8000])
def test_a_kill_loses_nothing(benches: Benches, at_ms: int) -> None:
    """What was delivered before the last checkpoint, or is not due yet, comes once."""
    bench = benches(timer_log_file_bytes=SMALL_LOG)
    for number in range(60):
        bench.sent(body=b"%d" % number, props=after(1000 + 100 * number))
    bench.advance(at_ms)
    noted_ms = check_of(bench)[0]
    bench.crash()
    again = benches(timer_log_file_bytes=SMALL_LOG, now_ms=NOW_MS + at_ms)
    again.advance(60_000)
    came = delivered(again)
    assert set(came) == {b"%d" % number for number in range(60)}
    for number in range(60):
        due_ms = NOW_MS + 1000 + 100 * number
        if due_ms > NOW_MS + at_ms or due_ms <= noted_ms:
            assert came.count(b"%d" % number) == 1, number


def test_kills_one_after_another(benches: Benches) -> None:
    now_ms, rng = NOW_MS, random.Random(5)
    sent = 0
    bench = benches(timer_log_file_bytes=SMALL_LOG, timer_window_slots=8)
    for _ in range(12):
        for _ in range(rng.randrange(30)):
            wait_ms = rng.randrange(30_000)
            due = {"TIMER_DELIVER_MS": str(bench.now_ms + wait_ms)}
            bench.sent(body=b"%d" % sent, props=due)
            sent += 1
        bench.advance(rng.randrange(3000))
        now_ms = bench.now_ms
        bench.crash()
        bench = benches(timer_log_file_bytes=SMALL_LOG, timer_window_slots=8, now_ms=now_ms)
    bench.advance(60_000)
    assert set(delivered(bench)) == {b"%d" % number for number in range(sent)}
    assert bench.broker.timers.lost == 0


class Killed(BaseException):
    pass


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_kill_between_log_and_slot(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    bench = benches()
    left = [number]

    def add(wheel: TimerWheel, slot: Slot | None, time_ms: int, position: int, count: int) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        real(wheel, slot, time_ms, position, count)

    real = TimerWheel.add_to
    for one in range(10):
        ext = bench.send_ext(props=after(5000))
        frame = Frame(C.SEND_MESSAGE_V2, one, ext={k: str(v) for k, v in ext.items() if v})
        frame.ext["e"] = frame.ext.get("e", "0")
        frame.ext["f"], frame.ext["h"] = "0", "0"
        frame.body = b"%d" % one
        bench.turn((bench.conn, frame))
    monkeypatch.setattr(TimerWheel, "add_to", add)
    with pytest.raises(Killed):
        bench.tick()
    monkeypatch.setattr(TimerWheel, "add_to", real)
    bench.crash()
    again = benches()
    again.advance(6000)
    assert delivered(again) == [b"%d" % one for one in range(10)]


def test_a_kill_in_the_middle_of_a_slot(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "MOST_DELIVERED", 10)
    bench = benches()
    for number in range(25):
        bench.sent(body=b"%d" % number, props=after(2000))
    bench.advance(1500)
    bench.now_ms += 500
    bench.tick()
    assert len(delivered(bench)) == 10
    bench.crash()
    again = benches(now_ms=NOW_MS + 2000)
    again.advance(5000)
    everything = [b"%d" % number for number in range(25)]
    assert delivered(again) == everything[:10] + everything


@pytest.mark.parametrize("lost", ["timerwheel", "timerlog", "both", "config/timercheck"])
def test_files_that_are_lost_are_made_again(benches: Benches, tmp_path: Path, lost: str) -> None:
    bench = benches(timer_log_file_bytes=SMALL_LOG)
    for number in range(100):
        bench.sent(body=b"%d" % number, props=after(1000 + 100 * number))
    bench.advance(5000)
    bench.close()
    store = tmp_path / "store"
    for name in ("timerwheel", "timerlog") if lost == "both" else (lost,):
        path = store / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
            Path(f"{path}.bak").unlink(missing_ok=True)
    again = benches(timer_log_file_bytes=SMALL_LOG, now_ms=NOW_MS + 5000)
    again.advance(60_000)
    came = delivered(again)
    assert set(came) == {b"%d" % number for number in range(100)}
    if lost != "config/timercheck":
        assert len(came) == 100, "none twice"


def test_a_wheel_that_never_got_its_size_is_made_again(benches: Benches, tmp_path: Path) -> None:
    """A power loss kept the new file's name and not its size; the timer log was durable before."""
    bench = benches()
    for number in range(10):
        bench.sent(body=b"%d" % number, props=after(1000 + 1000 * number))
    bench.advance(3500)
    bench.crash()
    (tmp_path / "store" / "timerwheel").write_bytes(b"")
    again = benches(now_ms=NOW_MS + 3500)
    again.advance(20_000)
    assert set(delivered(again)) == {b"%d" % number for number in range(10)}


@pytest.mark.parametrize("keep_units", [0, 40, 55, 79, 99])
def test_a_damaged_log_is_read_again_from_the_queue(
    benches: Benches, tmp_path: Path, keep_units: int
) -> None:
    bench = benches(timer_log_file_bytes=SMALL_LOG)
    for number in range(100):
        bench.sent(body=b"%d" % number, props=after(5000 + 100 * number))
    bench.advance(7000)
    bench.close()
    start = keep_units // 40 * SMALL_LOG
    path = tmp_path / "store" / "timerlog" / f"{start:020d}"
    content = bytearray(path.read_bytes())
    content[keep_units % 40 * 52] ^= 1
    path.write_bytes(content)
    again = benches(timer_log_file_bytes=SMALL_LOG, now_ms=NOW_MS + 7000)
    again.advance(60_000)
    assert sorted(delivered(again)) == sorted(b"%d" % number for number in range(100))


def test_too_old_for_the_wheel(benches: Benches, caplog: pytest.LogCaptureFixture) -> None:
    bench = benches()
    bench.sent(body=b"old", props=after(5000))
    bench.sent(body=b"young", props=after(100_000_000))
    bench.tick()
    bench.close()
    again = benches(now_ms=NOW_MS + 604_800_000)
    again.advance(1000)
    assert delivered(again) == [b"young"]
    assert "too old for the wheel" in caplog.text


def test_a_wheel_of_another_length_keeps_them_waiting(
    benches: Benches, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = benches()
    wheel = tmp_path / "store" / "timerwheel"
    wheel.write_bytes(bytes(320))
    bench.sent(props=after(5000))
    bench.advance(3000)
    assert "timerwheel is 320 bytes" in caplog.text
    wheel.unlink()
    bench.advance(3000)
    assert delivered(bench) == [b"hello"]
    bench.close()
    wheel.write_bytes(bytes(320))
    with pytest.raises(StoreCorrupt):
        benches()


def test_the_checkpoint_follows_what_is_durable(benches: Benches) -> None:
    """Delivered messages that a power loss would take are not noted as delivered."""
    bench = benches()
    bench.sent(props=after(2000))
    bench.advance(1900)
    before = check_of(bench)
    assert before[1:4] == (52, 1, 1)
    bench.keeps_flushes = True
    bench.advance(3000)
    assert delivered(bench) == [b"hello"]
    assert check_of(bench)[0] <= NOW_MS + 1000, "slot 1 may be read again"
    while bench.kept_flushes:
        bench.flush()
    bench.keeps_flushes = False
    bench.advance(1100)
    assert check_of(bench)[0] >= NOW_MS + 2000
    saved = (bench.files.read("config/timercheck") or b"")[:56]
    assert saved == bench.ask(C.GET_TIMER_CHECK_POINT).body
    assert len(bench.files.read("config/timercheck") or b"") == 4096


def test_a_failed_flush_of_the_timers_stops_the_store(bench: Bench) -> None:
    bench.sent(props=after(5000))
    out: list[Any] = []
    bench.broker.flush_failed("timers", "EIO", bench.now_ms, out)
    assert bench.send().code == 14


@pytest.mark.parametrize("seed", range(12))
def test_a_power_loss_takes_nothing_that_was_durable(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    disk = SimulatedFiles(rng)
    monkeypatch.setattr(harness, "TestFiles", lambda folder: disk)
    monkeypatch.setattr(timers.Timers.__init__, "__defaults__", (4096,))
    settings: dict[str, Any] = {"timer_log_file_bytes": SMALL_LOG, "timer_window_slots": 8}
    bench = benches(**settings)
    ends: dict[bytes, int] = {}
    for turn in range(4):
        for number in range(rng.randrange(5, 40)):
            due = {"TIMER_DELIVER_MS": str(bench.now_ms + rng.randrange(15_000))}
            body = b"%d-%d" % (turn, number)
            bench.sent(body=body, props=due)
            ends[body] = bench.store.max_log_offset
            if rng.randrange(4) == 0:
                bench.advance(rng.randrange(400))
        for _ in range(4):
            bench.keeps_flushes = rng.randrange(3) == 0  # a log that is slow to reach the disk
            while bench.kept_flushes and not bench.keeps_flushes:
                bench.flush()
            bench.advance(rng.randrange(2000))
        safe = bench.store.flushed_offset
        ends = {body: end for body, end in ends.items() if end <= safe}
        now_ms = bench.now_ms
        bench.crash()
        disk.lose_power(rng.choice([0, 30, 60, 100]))
        bench = benches(now_ms=now_ms, **settings)
        ends = dict.fromkeys(ends, 0)
    bench.advance(60_000)
    came = set(delivered(bench))
    assert set(ends) - came == set()
    for message in messages(bench):
        assert table_of(message).get("REAL_TOPIC", "T") == "T"


def test_expired_messages_are_counted_as_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sent(props=after(5000))
    bench.tick()
    monkeypatch.setattr(bench.store, "message_at", lambda offset: None)
    bench.advance(6000)
    assert bench.broker.timers.lost == 1


# ----------------------------------------------------------------------------------------- figures


def test_figures(bench: Bench) -> None:
    for ms in (2000, 2000, 50_000):
        bench.sent(props=after(ms))
    bench.sent("U", props=after(50_000))
    bench.tick()
    figures = bench.runtime()
    assert figures["timerCongestNum"] == figures["cometmqTimersPending"] == "4"
    assert figures["timerOffsetBehind"] == "0"
    counts = fastjson.loads(bench.ask(C.GET_TIMER_METRICS).body)["timingCount"]
    assert {topic: one["count"] for topic, one in counts.items()} == {"T": 3, "U": 1}
    bench.advance(12_500)
    figures = bench.runtime()
    assert (figures["cometmqTimersPending"], figures["cometmqTimersDelivered"]) == ("2", "2")
    assert figures["cometmqTimersLagMs"] == "0"
    saved = fastjson.loads(bench.files.read("config/timermetrics") or b"")
    assert saved["timingCount"]["T"]["count"] == 1
    bench.close()


def test_an_idle_broker_has_no_timer_files(bench: Bench, tmp_path: Path) -> None:
    bench.sent()
    bench.advance(5000)
    bench.close()
    assert not (tmp_path / "store" / "timerwheel").exists()
    assert not (tmp_path / "store" / "timerlog").exists()


def test_nothing_is_saved_while_nothing_happens(bench: Bench) -> None:
    bench.sent(props=after(2000))
    bench.advance(30_000)
    bench.saved.clear()
    bench.advance(60_000)
    assert [one.name for one in bench.saved if "timer" in one.name] == []


# ------------------------------------------------------------- found by the simulated cluster


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_who_ends_while_it_reads_again_enters_nothing_twice(benches: Benches, end: str) -> None:
    """After a kill the queue is read again from the last checkpoint on; what entered since is known
    by its units. An end before that was done must not make the next start forget them."""
    bench = benches()
    bench.sent(props=after(9_000))
    bench.advance(2_000)
    checked = check_of(bench)
    for _ in range(5):
        bench.sent(props=after(8_000))
    bench.tick()
    assert bench.broker.timers.pending == 6
    assert check_of(bench) == checked
    bench.crash()
    bench = benches(now_ms=bench.now_ms, is_quiet=False)
    assert bench.broker.timers.unread(bench.store) == 5
    if end == "stop":
        bench.close()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timers, "MOST_ENTERED", 0.25)  # of the plain path, two at a time
            bench.tick()
            bench.advance(1)
        bench.crash()
    bench = benches(now_ms=bench.now_ms)
    assert bench.broker.timers.pending == 6
    bench.advance(60_000)
    assert delivered(bench) == [b"hello"] * 6


@pytest.mark.parametrize("down_ms", [500, 4_000, 7_500, 9_000, 30_000])
def test_a_recall_holds_through_rolls_and_a_crash(benches: Benches, down_ms: int) -> None:
    """The marker rolls on its way like any other; a slot that was over when it came back was read
    before the marker had entered it."""
    how: dict[str, Any] = {"is_recall_enabled": True, "timer_window_slots": 3}
    bench = benches(**how)
    handle = bench.sent(props=after(9_000, UNIQ_KEY="K")).ext["recallHandle"]
    bench.advance(1_000)
    assert recalled(bench, handle).code == 0
    bench.advance(300)
    bench.crash()
    again = benches(now_ms=bench.now_ms + down_ms, **how)
    again.advance(15_000)
    assert delivered(again) == []


def test_the_checkpoint_waits_for_the_messages_that_its_units_stand_for(benches: Benches) -> None:
    """Else a power loss takes the message, and the unit speaks for whatever comes to its place."""
    bench = benches(flush="ASYNC_FLUSH")
    bench.keeps_flushes = True
    bench.sent(props=after(60_000, UNIQ_KEY="K"))
    bench.advance(2_500)
    assert bench.broker.timers.pending == 1
    assert check_of(bench)[1:3] == (0, 0)
    bench.flush()
    bench.advance(2_500)
    assert check_of(bench)[1:3] == (52, 1)


def test_what_a_killed_process_left_unsynced_is_synced_before_it_is_vouched_for(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units and slots of a process that was killed: the next one wrote a checkpoint for them and
    never synced their files, so a power cut took them and what was chained behind them."""
    disk = SimulatedFiles(random.Random(1))
    monkeypatch.setattr(harness, "TestFiles", lambda folder: disk)
    monkeypatch.setattr(timers.Timers.__init__, "__defaults__", (2048,))
    small = {"timer_log_file_bytes": 52 * 8 + 16, "timer_flush_interval_ms": 5_000}
    bench = benches(**small)
    for number in range(20):
        bench.sent(body=b"%d" % number, props=after(60_000))
        if number in (0, 19):
            bench.advance(100)  # the first one is synced at once, the others not
    now_ms = bench.now_ms
    bench.crash()
    disk.kill()
    bench = benches(now_ms=now_ms, **small)
    for number in range(20, 50):
        bench.sent(body=b"%d" % number, props=after(60_000))
    bench.advance(20_000)
    assert check_of(bench)[2] == 50
    now_ms = bench.now_ms
    bench.crash()
    disk.lose_power(0)
    bench = benches(now_ms=now_ms, **small)
    bench.advance(60_000)
    assert delivered(bench) == [b"%d" % number for number in range(50)]
