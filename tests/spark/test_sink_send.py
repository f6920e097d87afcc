"""The sink's task against a real broker: order, flow control, lost answers, replays."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow as pa
from sink_help import options, run_task

from cometmq.errors import SendFailed
from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode
from spark_programs import read_topic

BATCH = RequestCode.SEND_BATCH_MESSAGE
ONE = RequestCode.SEND_MESSAGE_V2


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory") as running:
        running.create_topic("t", queues=4)
        yield running


def rows(count: int, first: int = 0) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.record_batch(
        {
            "body": [f"body {number}" for number in numbers],
            "sharding_key": [f"key {number % 13}" for number in numbers],
        }
    )


def bodies(broker: LocalBroker) -> list[str]:
    return [message.body.decode() for message in read_topic(broker.namesrv, "t")]


def assert_once_and_in_order(broker: LocalBroker, count: int) -> None:
    found = read_topic(broker.namesrv, "t")
    assert sorted(one.body for one in found) == sorted(b"body %d" % n for n in range(count))
    by_key: dict[str, list[int]] = {}
    for one in found:
        by_key.setdefault(one.properties["__SHARDINGKEY"], []).append(int(one.body.split()[1]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert len({one.message_id for one in found}) == count


def test_all_rows_are_stored_once_in_order_and_counted(broker: LocalBroker) -> None:
    totals, file, bad = run_task(options(broker.namesrv), [rows(3000), rows(500, 3000)])
    assert (totals.messages, totals.duplicates, totals.refusals) == (3500, 0, 0)
    assert totals.is_sequenced and file is None and bad == 0
    assert_once_and_in_order(broker, 3500)


def test_the_same_task_again_stores_nothing_however_arrow_cuts_it(broker: LocalBroker) -> None:
    chosen = options(broker.namesrv)
    run_task(chosen, [rows(3000)])
    totals, _, _ = run_task(chosen, [rows(700), rows(1, 700), rows(2299, 701)], attempt=1)
    assert (totals.messages, totals.duplicates) == (0, 3000)
    assert_once_and_in_order(broker, 3000)


def test_the_next_batch_is_news_and_the_one_before_is_not(broker: LocalBroker) -> None:
    chosen = options(broker.namesrv)
    run_task(chosen, [rows(100)], batch=4)
    run_task(chosen, [rows(100, 100)], batch=5)
    late, _, _ = run_task(chosen, [rows(100)], batch=4)  # a zombie of a batch that is done
    assert (late.messages, late.duplicates) == (0, 100)
    assert_once_and_in_order(broker, 200)


def test_partitions_and_writers_do_not_mix(broker: LocalBroker) -> None:
    chosen = options(broker.namesrv)
    run_task(chosen, [rows(100)], partition=0)
    run_task(chosen, [rows(100)], partition=1)
    run_task(chosen, [rows(100)], writer="other")
    assert len(bodies(broker)) == 300


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_flow_control_slows_down_and_loses_nothing(broker: LocalBroker, after: int) -> None:
    fault = broker.fail(
        BATCH, after=after, times=6, response_code=ResponseCode.SYSTEM_BUSY, remark="busy"
    )
    began = time.monotonic()
    totals, _, _ = run_task(options(broker.namesrv, batchMessages=50), [rows(2000)])
    assert fault.hits == 6 and totals.refusals >= 6
    assert time.monotonic() - began > 0.05
    assert totals.messages == 2000
    assert_once_and_in_order(broker, 2000)


def test_flow_control_without_end_fails_and_says_where(broker: LocalBroker) -> None:
    broker.fail(BATCH, times=10_000, response_code=ResponseCode.SYSTEM_BUSY, remark="too much")
    chosen = options(broker.namesrv, sendTimeout="1s")
    with pytest.raises(SendFailed) as caught:
        run_task(chosen, [rows(10)])
    text = str(caught.value)
    assert caught.value.code == ResponseCode.SYSTEM_BUSY
    for part in ("SYSTEM_BUSY", "too much", broker.broker_name, "queue ", "'t'", "row"):
        assert part in text
    broker.clear_faults()
    run_task(chosen, [rows(10)], attempt=1)  # and the next attempt carries on
    assert_once_and_in_order(broker, 10)


def test_a_refusal_that_no_try_cures_fails_at_once(broker: LocalBroker) -> None:
    broker.fail(BATCH, times=100, response_code=ResponseCode.NO_PERMISSION, remark="not for you")
    began = time.monotonic()
    with pytest.raises(SendFailed, match=r"NO_PERMISSION.*not for you"):
        run_task(options(broker.namesrv), [rows(10)])
    assert time.monotonic() - began < 5


def test_other_refusals_are_tried_a_few_times(broker: LocalBroker) -> None:
    broker.fail(BATCH, times=3, remark="hiccup")
    run_task(options(broker.namesrv), [rows(200)])
    assert_once_and_in_order(broker, 200)
    fault = broker.fail(BATCH, times=1000, remark="for ever")
    with pytest.raises(SendFailed, match="for ever"):
        run_task(options(broker.namesrv), [rows(1)], batch=1)
    assert fault.hits == 5


def test_answers_that_never_come_lead_to_no_duplicate(broker: LocalBroker) -> None:
    broker.drop(BATCH, times=3, after=2)
    chosen = options(broker.namesrv, batchMessages=50, requestTimeout="500ms")
    totals, _, _ = run_task(chosen, [rows(2000)])
    assert totals.refusals >= 3 and totals.duplicates >= 50
    assert_once_and_in_order(broker, 2000)


def test_connections_that_break_all_the_time(broker: LocalBroker) -> None:
    broker.delay(BATCH, 0.02, times=100_000)  # so that something is always under way
    is_over = threading.Event()

    def cut() -> None:
        while not is_over.wait(0.05):
            broker.cut_connections()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        chosen = options(broker.namesrv, batchMessages=20)
        totals, _, _ = run_task(chosen, (rows(100, first) for first in range(0, 2000, 100)))
    finally:
        is_over.set()
        cutter.join()
    assert totals.refusals > 0
    assert_once_and_in_order(broker, 2000)


def test_a_broker_that_is_killed_and_comes_back() -> None:
    with LocalBroker() as broker:
        broker.create_topic("t", queues=4)

        def some() -> Iterator[pa.RecordBatch]:
            for first in range(0, 3000, 100):
                if first in (1000, 2000):
                    broker.restart(kill=True)
                yield rows(100, first)

        run_task(options(broker.namesrv, batchMessages=20), some())
        assert_once_and_in_order(broker, 3000)
        again, _, _ = run_task(options(broker.namesrv, batchMessages=20), [rows(3000)], attempt=1)
        assert again.duplicates == 3000


def test_delayed_rows_travel_alone_and_are_numbered_too(broker: LocalBroker) -> None:
    batch = pa.record_batch(
        {
            "body": [f"body {n}" for n in range(40)],
            "deliver_time": pa.array([None if n % 4 else 1_000 for n in range(40)], pa.int64()),
        }
    )
    chosen = options(broker.namesrv)
    first, _, _ = run_task(chosen, [batch])
    again, _, _ = run_task(chosen, [batch], attempt=1)
    assert (first.messages, again.messages, again.duplicates) == (40, 0, 40)
    give_up = time.monotonic() + 300
    while len(bodies(broker)) < 40 and time.monotonic() < give_up:
        time.sleep(0.1)
    assert sorted(bodies(broker)) == sorted(f"body {n}" for n in range(40))


def test_a_message_larger_than_a_request_travels_alone_in_its_turn(broker: LocalBroker) -> None:
    big = "x" * 100_000
    names = ["first", big, "last"]
    batch = pa.record_batch({"body": names, "queue_id": pa.array([2, 2, 2], pa.int32())})
    run_task(options(broker.namesrv, batchBytes="64k"), [batch])
    found = read_topic(broker.namesrv, "t")
    assert [(one.queue_id, one.body.decode()) for one in found] == [(2, name) for name in names]


def test_a_body_of_the_broker_limit_is_stored(broker: LocalBroker) -> None:
    batch = pa.record_batch({"body": [b"\0" * (4 * 1024 * 1024), b"small"]})
    totals, _, _ = run_task(options(broker.namesrv), [batch])
    assert totals.messages == 2


def test_queues_that_change_between_attempts_lose_nothing(broker: LocalBroker) -> None:
    """The second attempt goes by another layout: some rows are there twice, with equal keys."""
    chosen = options(broker.namesrv, batchMessages=20, sendTimeout="1s")
    broker.fail(BATCH, after=10, times=10_000, response_code=ResponseCode.SYSTEM_BUSY)
    with pytest.raises(SendFailed):
        run_task(chosen, [rows(1000)])
    broker.clear_faults()
    broker.create_topic("t", queues=7)
    from cometmq.spark import sink_send

    sink_send._sessions.clear()  # a new worker: it asks for the route
    run_task(chosen, [rows(1000)], attempt=1)
    found = read_topic(broker.namesrv, "t")
    assert {one.body for one in found} == {b"body %d" % n for n in range(1000)}
    keys: dict[bytes, set[str]] = {}
    for one in found:
        keys.setdefault(one.body, set()).add(one.message_id)
    assert all(len(of_body) == 1 for of_body in keys.values())


def test_queues_that_went_fail_one_attempt_and_are_asked_for_by_the_next(
    broker: LocalBroker,
) -> None:
    chosen = options(broker.namesrv, sendTimeout="5s")
    broker.create_topic("t", queues=8)
    run_task(chosen, [rows(100)])
    broker.create_topic("t", queues=2)
    with pytest.raises(SendFailed, match="it has 2 read and 2 write queues"):
        run_task(chosen, [rows(100, 100)], batch=1)
    totals, _, _ = run_task(chosen, [rows(100, 100)], batch=1)  # the same worker, at once
    assert totals.messages + totals.duplicates == 100
    assert {f"body {n}" for n in range(100, 200)} <= set(bodies(broker))


def test_a_topic_that_does_not_exist_is_made_by_the_broker(broker: LocalBroker) -> None:
    run_task(options(broker.namesrv, topic="made-now"), [rows(10)])
    assert len(read_topic(broker.namesrv, "made-now")) == 10
