"""Producer sequences: each number stored once, in its order, whatever happens to the broker."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cometmq.broker import sequences
from cometmq.wire import fastjson, properties, record
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame

from .conftest import Benches
from .harness import Bench, bodies_of

FILE = "config/producerSequences.json"
HOUR_MS = 3_600_000


def put(bench: Bench, value: str, queue: int = 0, topic: str = "T", **more: Any) -> Frame:
    """One numbered message, whose body is its number."""
    props = {"PRODUCER_SEQ": value, **more.pop("props", {})}
    return bench.send(topic, body=value.encode(), queue=queue, props=props, **more)


def put_batch(bench: Bench, values: list[str | None], queue: int = 0, **more: Any) -> Frame:
    pieces = [
        record.Piece(0, str(value).encode(), properties.build({"PRODUCER_SEQ": value or ""}))
        for value in values
    ]
    body = record.join_batch(pieces)
    return bench.send(body=body, queue=queue, code=320, batch=True, **more)


def numbers(producer: str, batch: int, begin: int, end: int) -> list[str | None]:
    return [f"{producer} {batch} {n}" for n in range(begin, end)]


def seen(bench: Bench, queue: int = 0, topic: str = "T") -> list[str]:
    found: list[str] = []
    while True:
        answer = bench.pull(topic, queue, offset=len(found))
        if answer.code != 0:
            return found
        found += [body.decode() for body in bodies_of(answer)]


def verdict(answer: Frame) -> str:
    if answer.code == ResponseCode.MESSAGE_ILLEGAL:
        return "gap" if (answer.remark or "").startswith("sequence gap: ") else "illegal"
    assert answer.code == 0, answer.remark
    assert answer.ext["sequenced"] == "true"
    return "duplicate" if answer.ext.get("duplicate") == "true" else "stored"


# ----------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ([], "p 7 0", "stored"),
        ([], "p 7 1", "gap"),
        (["p 7 0"], "p 7 1", "stored"),
        (["p 7 0"], "p 7 0", "duplicate"),
        (["p 7 0", "p 7 1"], "p 7 0", "duplicate"),
        (["p 7 0"], "p 7 2", "gap"),
        (["p 7 0"], "p 8 0", "stored"),
        (["p 7 0"], "p 90 0", "stored"),
        (["p 7 0"], "p 8 1", "gap"),
        (["p 7 0", "p 8 0"], "p 7 1", "duplicate"),
        (["p 7 0"], "p 6 99", "duplicate"),
        (["p 7 0"], "q 3 0", "stored"),
        (["p 7 0"], "q 7 1", "gap"),
        ([], f"p {2**63 - 1} 0", "stored"),
        ([], f"p {2**63} 0", "illegal"),
        ([], "p 7", "illegal"),
        ([], "p  7 0", "illegal"),
        ([], "p 7 0 ", "illegal"),
        ([], "p -1 0", "illegal"),
        ([], "p 7 x", "illegal"),
        ([], "p/q 7 0", "illegal"),
        ([], "é 7 0", "illegal"),
        ([], " 7 0", "illegal"),
        ([], "p" * 127 + " 7 0", "stored"),
        ([], "p" * 128 + " 7 0", "illegal"),
        ([], "A-z_0.9 0 0", "stored"),
    ],
)
def test_the_rules(bench: Bench, before: list[str], value: str, expected: str) -> None:
    bench.create_topic()
    for one in before:
        assert verdict(put(bench, one)) == "stored"
    assert verdict(put(bench, value)) == expected
    assert seen(bench) == before + ([value] if expected == "stored" else [])


def test_a_gap_is_told_in_full_and_stores_nothing(bench: Bench) -> None:
    bench.create_topic("orders")
    for n in range(12):
        put(bench, f"x 7 {n}", 3, "orders")
    end = bench.store.max_log_offset
    answer = put(bench, "x 7 14", 3, "orders")
    assert (answer.code, answer.remark) == (
        13,
        "sequence gap: producer 'x' in orders/3 batch 7: expected 12, got 14",
    )
    assert bench.store.max_log_offset == end
    assert bench.runtime()["cometmqSequenceGaps"] == "1"


def test_a_duplicate_is_answered_with_the_last_one_stored(bench: Bench) -> None:
    bench.create_topic()
    bench.sent(body=b"of somebody else")
    for n in range(3):
        last = put(bench, f"p 1 {n}")
    for value in ("p 1 0", "p 1 2", "p 0 55"):
        answer = put(bench, value)
        assert verdict(answer) == "duplicate"
        assert (answer.ext["queueOffset"], answer.ext["queueId"]) == ("3", "0")
        assert answer.ext["msgId"] == last.ext["msgId"]
    assert bench.runtime()["cometmqSequenceDuplicates"] == "3"


def test_queues_topics_and_producers_count_by_themselves(bench: Bench) -> None:
    bench.create_topic()
    bench.create_topic("U")
    for place in ((0, "T"), (1, "T"), (0, "U")):
        assert verdict(put(bench, "p 1 0", *place)) == "stored"
        assert verdict(put(bench, "q 1 0", *place)) == "stored"
        assert verdict(put(bench, "p 1 1", *place)) == "stored"


def test_a_message_that_is_not_numbered_is_answered_as_ever(bench: Bench) -> None:
    bench.create_topic()
    answer = bench.sent(props={"NOT_PRODUCER_SEQ": "p 1 5"})
    assert "sequenced" not in answer.ext and "duplicate" not in answer.ext


def test_a_refused_number_makes_no_topic(bench: Bench) -> None:
    assert verdict(put(bench, "p 1 1", topic="new")) == "gap"
    assert verdict(put(bench, "nonsense", topic="new")) == "illegal"
    assert verdict(put_batch(bench, numbers("p", 1, 1, 3), topic="new")) == "gap"
    assert bench.broker.topics.get("new") is None
    assert verdict(put(bench, "p 1 0", topic="new")) == "stored"


def test_the_queue_must_be_named(bench: Bench) -> None:
    bench.create_topic()
    assert verdict(put(bench, "p 1 0", queue=-1)) == "illegal"


def test_a_transaction_can_not_be_numbered(bench: Bench) -> None:
    bench.create_topic()
    more = {"TRAN_MSG": "true", "PGROUP": "pg"}
    assert verdict(put(bench, "p 1 0", props=more, sys_flag=4)) == "illegal"


def test_oneway_counts_as_well(bench: Bench) -> None:
    bench.create_topic()
    for value in ("p 1 0", "p 1 0", "p 1 1"):
        bench.post_send(props={"PRODUCER_SEQ": value}, body=value.encode(), oneway=True)
    assert seen(bench) == ["p 1 0", "p 1 1"]


# --------------------------------------------------------------------------------------- batches


def test_batches_are_stored_whole_and_known_again(bench: Bench) -> None:
    bench.create_topic()
    assert verdict(put_batch(bench, numbers("p", 1, 0, 5))) == "stored"
    assert verdict(put_batch(bench, numbers("p", 1, 0, 5))) == "duplicate"
    assert verdict(put_batch(bench, numbers("p", 1, 2, 4))) == "duplicate"
    assert verdict(put_batch(bench, numbers("p", 1, 6, 8))) == "gap"
    answer = put_batch(bench, numbers("p", 1, 5, 8))
    assert (verdict(answer), answer.ext["queueOffset"]) == ("stored", "5")
    assert verdict(put_batch(bench, numbers("p", 0, 0, 3))) == "duplicate"
    assert verdict(put_batch(bench, numbers("p", 2, 0, 2))) == "stored"
    assert seen(bench) == [*numbers("p", 1, 0, 8), *numbers("p", 2, 0, 2)]


def test_of_a_batch_that_overlaps_the_rest_is_stored(bench: Bench) -> None:
    bench.create_topic()
    put_batch(bench, numbers("p", 1, 0, 4))
    answer = put_batch(bench, numbers("p", 1, 2, 7))
    assert (verdict(answer), answer.ext["queueOffset"]) == ("stored", "4")
    assert len(answer.ext["msgId"].split(",")) == 3
    assert seen(bench) == numbers("p", 1, 0, 7)


@pytest.mark.parametrize(
    "values",
    [
        ["p 1 0", None],
        [None, "p 1 0"],
        ["p 1 0", "p 1 2"],
        ["p 1 0", "p 1 0"],
        ["p 1 0", "p 2 1"],
        ["p 1 0", "q 1 1"],
        ["p 1 0", "p 1 1x"],
    ],
)
def test_a_batch_that_does_not_count_on_is_refused(bench: Bench, values: list[str | None]) -> None:
    bench.create_topic()
    assert verdict(put_batch(bench, values)) == "illegal"
    assert bench.store.max_log_offset == 0


def test_the_name_in_a_body_is_no_number(bench: Bench) -> None:
    bench.create_topic()
    body = record.join_batch([record.Piece(0, b"PRODUCER_SEQ\x01p 1 9\x02", "")])
    answer = bench.sent(body=body, code=320, batch=True)
    assert "sequenced" not in answer.ext


# ---------------------------------------------------------------------------- copies of our own


def test_a_delayed_message_counts_when_it_is_sent_by_its_real_queue(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    later = {"DELAY": "1"}
    assert verdict(put(bench, "p 1 0", 2, props=later)) == "stored"
    assert verdict(put(bench, "p 1 0", 2, props=later)) == "duplicate"
    assert verdict(put(bench, "p 1 1", 2)) == "stored"
    timed = {"TIMER_DELAY_MS": "2000"}
    assert verdict(put(bench, "p 1 2", 2, props=timed)) == "stored"
    bench.crash()
    bench = benches(now_ms=bench.now_ms)
    assert verdict(put(bench, "p 1 2", 2, props=timed)) == "duplicate"
    bench.advance(5_000)
    assert sorted(seen(bench, 2)) == ["p 1 0", "p 1 1", "p 1 2"]
    assert verdict(put(bench, "p 1 3", 2)) == "stored"
    bench.crash()
    bench = benches(now_ms=bench.now_ms)
    assert verdict(put(bench, "p 1 3", 2)) == "duplicate", "the copies delivered do not count"
    assert verdict(put(bench, "p 1 4", 2)) == "stored"


def test_a_copy_can_not_be_passed_off_as_numbered(bench: Bench) -> None:
    bench.create_topic()
    for name in ("REAL_TOPIC", "REAL_QID", "TIMER_ROLL_TIMES"):
        assert verdict(put(bench, "p 1 0", props={name: "1"})) == "illegal"


def test_retries_are_never_judged(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    bench.beat()
    put(bench, "p 1 0")
    put(bench, "p 1 1")
    ext = {"offset": 0, "group": "G", "delayLevel": 1, "originTopic": "T"}
    assert bench.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext).code == 0
    bench.advance(2_000)
    assert len(seen(bench, topic="%RETRY%G")) == 1
    answer = put(bench, "p 1 1", topic="%RETRY%G", reconsume=1)
    assert answer.code == 0 and "sequenced" not in answer.ext
    bench.crash()
    bench = benches(now_ms=bench.now_ms)
    assert bench.broker.sequences.count == 1
    assert verdict(put(bench, "p 1 2")) == "stored"


# ---------------------------------------------------------------------------------------- safety


def test_a_duplicate_waits_for_the_disk_as_the_first_did(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.create_topic()
    bench.keeps_flushes = True
    first, second = (bench.post_send(props={"PRODUCER_SEQ": "p 1 0"}, body=b"x") for _ in range(2))
    assert bench.answer(first) is None and bench.answer(second) is None
    bench.flush()
    for opaque in (first, second):
        answer = bench.answer(opaque)
        assert answer is not None and answer.code == 0
    bench.keeps_flushes = False
    assert verdict(put(bench, "p 1 0")) == "duplicate"


def test_what_the_store_refused_may_come_again(bench: Bench) -> None:
    bench.create_topic()
    bench.files.ratio = 0.99
    bench.store.clean(bench.now_ms)
    assert put(bench, "p 1 0").code == ResponseCode.SERVICE_NOT_AVAILABLE
    bench.files.ratio = 0.10
    bench.store.clean(bench.now_ms)
    assert verdict(put(bench, "p 1 0")) == "stored"


@pytest.mark.parametrize("seed", range(12))
def test_any_restart_goes_on_where_the_log_ends(benches: Benches, seed: int) -> None:
    """A producer that sends again whatever it is not sure of, and a broker that ends in any way."""
    rng = random.Random(seed)
    bench = benches(log_file_bytes=16 * 1024)
    bench.create_topic(queues=2)
    sent: dict[tuple[str, int], tuple[int, int]] = {}  # the next (batch, n)
    expected: dict[int, list[str]] = {0: [], 1: []}
    for _ in range(250):
        producer, queue = rng.choice("pq"), rng.randrange(2)
        batch, n = sent.get((producer, queue), (1, 0))
        if n and rng.random() < 0.1:
            batch, n = batch + 1, 0
        begin = max(0, n - rng.choice((0, 0, 3)))
        end = n + rng.randrange(0 if begin < n else 1, 4)
        values = numbers(producer, batch, begin, end)
        if len(values) == 1 and rng.random() < 0.5:
            answer = put(bench, str(values[0]), queue)
        else:
            answer = put_batch(bench, values, queue)
        assert verdict(answer) == ("stored" if end > n else "duplicate")
        expected[queue] += [str(value) for value in numbers(producer, batch, n, end)]
        sent[producer, queue] = (batch, max(end, n))
        event = rng.random()
        if event < 0.3:
            bench.advance(rng.choice((10, 3_000, 12_000)))
        elif event < 0.36:
            bench.crash()
            bench = benches(now_ms=bench.now_ms, log_file_bytes=16 * 1024)
        elif event < 0.4:
            bench.stop()
            bench.close()
            bench = benches(now_ms=bench.now_ms, log_file_bytes=16 * 1024)
    for queue in (0, 1):
        assert seen(bench, queue) == expected[queue]


def test_what_was_cut_from_the_log_is_not_stored(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    for n in range(6):
        put(bench, f"p 1 {n}")
    bench.advance(20_000)  # the file speaks for four of them at least
    at = bench.store.unit("T", 0, 3)
    assert at is not None
    bench.crash()
    log = bench.files._path("commitlog/00000000000000000000")
    with open(log, "r+b") as file:
        file.seek(at[0])
        file.write(bytes(4096))
    bench = benches(now_ms=bench.now_ms)
    assert seen(bench) == ["p 1 0", "p 1 1", "p 1 2"]
    assert verdict(put(bench, "p 1 4")) == "gap"
    assert verdict(put(bench, "p 1 2")) == "duplicate"
    assert verdict(put(bench, "p 1 3")) == "stored"


def test_the_file_never_speaks_for_more_than_is_durable(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    bench.advance(20_000)
    bench.keeps_flushes = True
    put(bench, "p 1 0")
    bench.advance(20_000)
    assert b"p" not in (bench.files.read(FILE) or b"").partition(b'"keys"')[2]
    while bench.kept_flushes:
        bench.flush()
    bench.tick()
    stored = fastjson.loads(bench.files.read(FILE) or b"")
    assert stored["upto"] <= bench.store.flushed_offset and stored["keys"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"upto":3,"forgotten":{},"keys":[]}'])
def test_a_damaged_file_is_made_again_from_the_log(benches: Benches, content: bytes) -> None:
    bench = benches()
    bench.create_topic()
    put(bench, "p 1 0")
    bench.advance(20_000)
    bench.stop()
    bench.close()
    bench.files.remove(FILE + ".bak")
    bench.files.write(FILE, content)
    bench = benches(now_ms=bench.now_ms)
    assert verdict(put(bench, "p 1 0")) == "duplicate"


def test_a_file_beyond_the_log_is_not_believed(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    put(bench, "p 1 0")
    bench.advance(20_000)
    bench.crash()
    content = b'{"upto":999999,"forgotten":{},"keys":[["T",0,"p",1,5,5,0,0]]}'
    bench.files.write(FILE, content)
    bench = benches(now_ms=bench.now_ms)
    assert verdict(put(bench, "p 1 1")) == "stored"


# ---------------------------------------------------------------------------------------- limits


def test_one_producer_too_many_is_refused_and_none_is_forgotten(benches: Benches) -> None:
    bench = benches(max_producer_sequences=3)
    bench.create_topic()
    for producer in "abc":
        put(bench, f"{producer} 1 0")
    answer = put(bench, "d 1 0")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark is not None and "maxProducerSequences=3" in answer.remark
    for producer in "abc":
        assert verdict(put(bench, f"{producer} 1 1")) == "stored"
    assert bench.runtime()["cometmqProducerSequencesLimitReached"] == "1"


def test_who_was_idle_for_long_makes_room(benches: Benches) -> None:
    bench = benches(max_producer_sequences=2, producer_sequence_hours=2)
    bench.create_topic()
    put(bench, "a 5 0")
    bench.now_ms += HOUR_MS
    put(bench, "b 5 0")
    bench.now_ms += HOUR_MS + 1
    assert verdict(put(bench, "c 5 0")) == "stored"
    assert verdict(put(bench, "b 5 1")) == "stored"
    bench.now_ms += 2 * HOUR_MS + 1
    assert verdict(put(bench, "c 4 0")) == "stored", "forgotten: it may begin anew"


def end(bench: Bench, writer: str, topic: str = "T") -> Frame:
    return bench.ask(RequestCode.END_PRODUCERS, {"topic": topic, "writer": writer})


@pytest.mark.parametrize("has_file", [True, False])
def test_a_writer_that_ends_makes_room_for_all_its_producers(
    benches: Benches, has_file: bool
) -> None:
    bench = benches(max_producer_sequences=4)
    bench.create_topic()
    for job in range(20):
        for queue, partition in ((0, 0), (1, 0), (0, 1), (1, 1)):
            assert verdict(put(bench, f"job-{job}.{partition}.x 0 0", queue)) == "stored"
        assert end(bench, f"job-{job}").ext == {"forgotten": "4"}
    late = put(bench, "job-3.0.x 0 0")
    assert late.code == ResponseCode.MESSAGE_ILLEGAL
    assert (late.remark or "").startswith("sequence ended: writer 'job-3'")
    assert put(bench, "job-3.0.x 0 7").remark == late.remark, "no gap: nothing helps"
    assert verdict(put(bench, "job-33.0.x 0 0")) == "stored"
    assert len(seen(bench)) == 41
    if has_file:
        bench.advance(20_000)
    bench.crash()
    again = benches(max_producer_sequences=100, now_ms=bench.now_ms)
    assert verdict(put(again, "job-33.0.x 0 0")) == "duplicate"
    if has_file:
        assert again.runtime()["cometmqProducerSequences"] == "1"
        assert put(again, "job-3.0.x 0 0").remark == late.remark
    else:  # nobody told: then they are as if they had not ended, and nothing is stored twice
        assert verdict(put(again, "job-3.0.x 0 0")) == "duplicate"
    again.now_ms += 25 * HOUR_MS
    assert verdict(put(again, "job-50.0.x 0 0")) == "stored"


def test_only_so_many_ends_are_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MOST_ENDED", 3)
    for job in range(5):
        put(bench, f"job-{job}.0 0 0")
        end(bench, f"job-{job}")
    assert verdict(put(bench, "job-1.0 0 0")) == "stored"
    assert verdict(put(bench, "job-2.0 0 0")) == "illegal"
    bench.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    bench.create_topic()
    assert verdict(put(bench, "job-2.0 0 0")) == "stored"


@pytest.mark.parametrize(
    ("topic", "writer", "code"),
    [
        ("T", "a.b", ResponseCode.INVALID_PARAMETER),
        ("T", "", ResponseCode.INVALID_PARAMETER),
        ("T", "x" * 128, ResponseCode.INVALID_PARAMETER),
        ("nowhere", "a", ResponseCode.TOPIC_NOT_EXIST),
    ],
)
def test_an_end_that_nobody_can_mean(bench: Bench, topic: str, writer: str, code: int) -> None:
    put(bench, "a.b 0 0")
    assert end(bench, writer, topic).code == code
    assert verdict(put(bench, "a.b 0 1")) == "stored"


def test_who_began_anew_after_being_forgotten_is_known_after_a_crash(benches: Benches) -> None:
    bench = benches(producer_sequence_hours=1)
    bench.create_topic()
    put(bench, "p 9 0")
    bench.now_ms += HOUR_MS + 1
    assert verdict(put(bench, "p 1 0")) == "stored"
    bench.crash()
    bench = benches(producer_sequence_hours=1, now_ms=bench.now_ms)
    assert verdict(put(bench, "p 1 1")) == "stored", "the last record counts, not the highest"


@pytest.mark.parametrize("has_file", [True, False])
def test_a_deleted_topic_is_forgotten_also_after_a_crash(benches: Benches, has_file: bool) -> None:
    bench = benches()
    bench.create_topic()
    put(bench, "p 9 0")
    if has_file:
        bench.advance(20_000)
    put(bench, "p 9 1")
    bench.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    bench.create_topic()
    assert verdict(put(bench, "p 3 0")) == "stored"
    bench.crash()
    bench = benches(now_ms=bench.now_ms)
    assert verdict(put(bench, "p 3 1")) == "stored"


def test_a_log_that_grows_moves_the_file_along(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MOST_UNREAD_BYTES", 10_000)
    bench = benches()
    bench.create_topic()
    bench.advance(20_000)
    for _ in range(20):
        bench.sent(body=bytes(1_000))
    bench.advance(20_000)
    stored = fastjson.loads(bench.files.read(FILE) or b"")
    assert stored["upto"] == bench.store.max_log_offset
