"""Delay levels: never early, in order, through restarts, in RocketMQ's own files."""

from __future__ import annotations

import pytest

from cometmq.wire import fastjson, properties, record

from .conftest import Benches
from .harness import Bench, bodies_of

SCHEDULE = "SCHEDULE_TOPIC_XXXX"


def later(bench: Bench, body: bytes, level: int, **how: object) -> None:
    bench.sent(body=body, props={"DELAY": str(level), "UNIQ_KEY": body.decode()}, **how)


def seen(bench: Bench, topic: str = "T", queue: int = 0) -> list[bytes]:
    answer = bench.pull(topic, queue)
    return bodies_of(answer) if answer.code == 0 else []


def test_a_message_comes_when_it_is_due_and_not_before(bench: Bench) -> None:
    bench.create_topic()
    later(bench, b"five", 2)
    assert seen(bench) == []
    bench.advance(4_999)
    assert seen(bench) == []
    bench.advance(1)
    assert seen(bench) == [b"five"]
    assert bench.now_ms == bench.store.store_ms_at("T", 0, 0), "late"


def test_levels_do_not_wait_for_each_other_and_keep_their_order(bench: Bench) -> None:
    bench.create_topic()
    for n in range(5):
        later(bench, b"slow-%d" % n, 3)
        later(bench, b"fast-%d" % n, 1)
        bench.advance(10)
    bench.advance(1_000)
    assert seen(bench) == [b"fast-%d" % n for n in range(5)]
    bench.advance(10_000)
    assert seen(bench)[5:] == [b"slow-%d" % n for n in range(5)]


def test_while_one_comes_every_millisecond_the_rest_is_asked_only_when_it_is_due(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.create_topic()
    for n in range(900):
        later(bench, b"%d" % n, 1)
        bench.advance(1)
    bench.advance(99)  # the first is due in a millisecond
    held = bench.hold(queue=1, suspend_ms=250)
    whole: list[int] = []
    tick = bench.broker.stats.sample
    monkeypatch.setattr(bench.broker.stats, "sample", lambda now_ms: whole.append(tick(now_ms)))
    before = bench.ticks
    bench.advance(249)
    assert bench.answer(held) is None
    bench.advance(1)
    assert bench.answer(held) is not None, "its time has come among theirs"
    bench.commit(7)
    saved = len(bench.saved)
    bench.advance(5_000)
    assert "config/consumerOffset.json" in {one.name for one in bench.saved[saved:]}
    assert bench.store.max_offset("T", 0) == 900
    for n in range(900):
        assert bench.store.store_ms_at("T", 0, n) == 1_000 + (
            bench.store.store_ms_at(SCHEDULE, 0, n) or 0
        )
    assert bench.ticks - before >= 900
    assert len(whole) < 100, "each of them asked everybody"


def test_it_is_stored_and_delivered_as_rocketmq_does(bench: Bench) -> None:
    bench.create_topic()
    bench.sent(queue=2, body=b"x", flag=9, props={"DELAY": "3", "TAGS": "a", "UNIQ_KEY": "U"})
    parked = record.decode(bench.store.record_at(0) or b"")
    assert (parked.topic, parked.queue_id) == (SCHEDULE, 2)
    told = properties.parse(parked.properties)
    assert (told["REAL_TOPIC"], told["REAL_QID"], told["DELAY"]) == ("T", "2", "3")
    unit = bench.store.unit(SCHEDULE, 2, 0)
    assert unit is not None and unit[2] == parked.store_ms + 10_000, "the unit tells when it is due"
    bench.advance(10_000)
    (found,) = record.decode_all(bench.pull(queue=2).body)
    assert (found.body, found.flag, found.born_ms) == (b"x", 9, parked.born_ms)
    assert properties.parse(found.properties)["DELAY"] == "3", "and is not delayed again by it"
    assert bench.pull(queue=2, tags="a").code == 0
    assert bench.pull(queue=2, tags="b").code == 20


def test_a_level_beyond_the_last_is_the_last(benches: Benches) -> None:
    bench = benches(delay_levels="1s 2s")
    bench.create_topic()
    later(bench, b"x", 99)
    bench.advance(1_999)
    assert seen(bench) == []
    bench.advance(1)
    assert seen(bench) == [b"x"]


@pytest.mark.parametrize("level", ["1000000000", "2147483647", "9999999999"])
def test_a_level_far_beyond_is_the_last_too(benches: Benches, level: str) -> None:
    bench = benches(delay_levels="1s 2s")
    bench.create_topic()
    bench.sent(body=b"x", props={"DELAY": level})
    bench.advance(1_999)
    assert seen(bench) == []
    bench.advance(1)
    assert seen(bench) == [b"x"]


def test_a_level_may_have_a_sign_as_java_reads_it(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    bench.sent(body=b"x", props={"DELAY": "+3", "TIMER_DELAY_MS": "1"})
    bench.crash()
    bench = benches(now_ms=bench.now_ms)
    bench.advance(9_999)
    assert seen(bench) == []
    bench.advance(1)
    assert seen(bench) == [b"x"]


def test_a_queue_that_the_topic_has_lost_meanwhile_is_not_delivered_to(bench: Bench) -> None:
    """Seed 735939341: a topic was given fewer queues, and nobody would have found the message."""
    bench.create_topic(queues=4)
    later(bench, b"x", 1, queue=3)
    later(bench, b"y", 1, queue=1)
    bench.create_topic(queues=2)
    bench.advance(1_000)
    assert seen(bench, queue=1) == [b"x", b"y"]
    assert bench.store.max_offset("T", 3) == 0


def test_a_queue_that_is_only_written_or_only_read_is_still_one_of_the_topic(bench: Bench) -> None:
    bench.create_topic(queues=4)
    for body in (b"x", b"y"):
        later(bench, body, 1, queue=3)
        bench.create_topic(
            queues=4, **{b"x": {"writeQueueNums": 2}, b"y": {"readQueueNums": 2}}[body]
        )
        bench.advance(1_000)
        bench.create_topic(queues=4)
    assert seen(bench, queue=3) == [b"x", b"y"]


def test_the_answer_names_the_queue_that_was_asked_for(bench: Bench) -> None:
    bench.create_topic()
    answer = bench.sent(queue=3, props={"DELAY": "1"})
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("3", "0")


def test_a_restart_goes_on_where_it_was(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    later(bench, b"first", 1)
    later(bench, b"second", 3)
    bench.advance(1_000)
    assert seen(bench) == [b"first"]
    bench.stop()
    bench.close()
    stored = fastjson.loads(bench.files.read("config/delayOffset.json") or b"")
    assert stored["offsetTable"] == {"1": 1}
    again = benches(now_ms=bench.now_ms + 20_000)
    again.advance(0)
    assert seen(again) == [b"first", b"second"], "due while nobody ran; and nothing twice"


def test_after_a_crash_nothing_is_lost(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    for n in range(3):
        later(bench, b"%d" % n, 1)
    bench.advance(1_000)
    assert seen(bench) == [b"0", b"1", b"2"]
    later(bench, b"3", 1)
    bench.crash()  # the file that says how far it came was never saved
    again = benches(now_ms=bench.now_ms + 5_000)
    again.advance(0)
    assert set(seen(again)) == {b"0", b"1", b"2", b"3"}


def test_a_clock_that_was_set_back_holds_nothing_up(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    later(bench, b"x", 1)
    bench.stop()
    bench.close()
    again = benches(now_ms=bench.now_ms - 3_600_000)
    again.advance(2_000)
    assert seen(again) == [b"x"]


def test_a_full_disk_delays_and_loses_nothing(bench: Bench) -> None:
    bench.create_topic()
    later(bench, b"x", 1)
    bench.files.ratio = 0.99
    bench.store.clean(bench.now_ms)
    bench.advance(2_000)
    assert seen(bench) == []
    bench.files.ratio = 0.10
    bench.store.clean(bench.now_ms)
    bench.advance(1_000)
    assert seen(bench) == [b"x"]


def test_synchronous_flush_makes_it_wait_for_the_disk(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.create_topic()
    bench.keeps_flushes = True
    opaque = bench.post_send(props={"DELAY": "1"})
    assert bench.answer(opaque) is None
    bench.flush()
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0
    bench.keeps_flushes = False
    bench.advance(1_000)
    assert seen(bench) == [b"hello"]


@pytest.mark.parametrize("level", ["0", "-1", "x", ""])
def test_what_is_no_level_is_no_delay(bench: Bench, level: str) -> None:
    bench.create_topic()
    bench.sent(props={"DELAY": level} if level else {"DELAY": "0"})
    assert seen(bench) == [b"hello"]


def test_many_at_once_do_not_stop_the_broker(bench: Bench) -> None:
    bench.create_topic()
    for n in range(1_200):
        later(bench, b"%d" % n, 1)
    before = bench.ticks
    bench.advance(1_000)
    assert bench.store.max_offset("T", 0) == 1_200
    assert bench.ticks - before >= 3, "delivered in one turn"


def test_what_is_delivered_is_noted_when_it_is_durable(benches: Benches) -> None:
    """Noted before, a power loss takes the message and leaves the note."""
    bench = benches(flush="SYNC_FLUSH", save_delays_ms=10)
    bench.create_topic()
    later(bench, b"x", 1)
    bench.keeps_flushes = True
    bench.advance(1_500)
    assert bench.broker.delay.delivered == 1
    assert bench.files.read("config/delayOffset.json") is None
    bench.flush()
    bench.advance(100)
    stored = fastjson.loads(bench.files.read("config/delayOffset.json") or b"")
    assert stored["offsetTable"] == {"1": 1}


def test_a_level_that_stands_beyond_its_end_skips_nothing(benches: Benches) -> None:
    """As RocketMQ leaves it when a power loss takes what it had delivered."""
    bench = benches()
    bench.create_topic()
    bench.stop()
    bench.close()
    bench.files.replace("config/delayOffset.json", b'{"offsetTable":{1:7}}')
    again = benches(now_ms=bench.now_ms)
    later(again, b"x", 1)
    again.advance(1_000)
    assert seen(again) == [b"x"]
