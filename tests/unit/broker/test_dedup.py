"""Deduplication by key: one message for one UNIQ_KEY within the window, also after a crash."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq import _fast
from cometmq.wire import properties, record
from cometmq.wire.codes import RequestCode, ResponseCode, SysFlag
from cometmq.wire.frame import Frame

from .conftest import Benches
from .harness import Bench, bodies_of

MINUTE_MS = 60_000
PLACE = ("msgId", "queueId", "queueOffset", "transactionId")


def comparing(bench: Bench, minutes: object = 10, topic: str = "T") -> None:
    answer = bench.create_topic(topic, attributes=f"+dedup.minutes={minutes}")
    assert answer.code == 0, answer.remark


def put(bench: Bench, key: str, body: bytes | None = None, topic: str = "T", **more: Any) -> Frame:
    props = {"UNIQ_KEY": key, **more.pop("props", {})}
    return bench.sent(topic, body=key.encode() if body is None else body, props=props, **more)


def put_batch(bench: Bench, keys: list[str], **more: Any) -> Frame:
    pieces = [record.Piece(0, key.encode(), properties.build({"UNIQ_KEY": key})) for key in keys]
    return bench.sent(body=record.join_batch(pieces), code=320, batch=True, **more)


def is_duplicate(answer: Frame) -> bool:
    return answer.ext.get("duplicate") == "true"


def place(answer: Frame) -> list[str]:
    return [answer.ext[name] for name in PLACE]


def seen(bench: Bench, queue: int = 0, topic: str = "T") -> list[bytes]:
    answer = bench.pull(topic, queue)
    return bodies_of(answer) if answer.code == 0 else []


def test_the_second_one_is_answered_as_the_first_and_not_stored(bench: Bench) -> None:
    comparing(bench)
    put(bench, "other", queue=2)
    first = put(bench, "a", b"first", queue=2)
    assert not is_duplicate(first)
    end = bench.store.max_log_offset
    again = put(bench, "a", b"second", queue=1)
    assert is_duplicate(again) and place(again) == place(first)
    assert bench.store.max_log_offset == end
    assert seen(bench, 2) == [b"other", b"first"] and seen(bench, 1) == []
    assert bench.runtime()["cometmqDuplicateKeys"] == "1"


def test_a_topic_without_the_attribute_compares_nothing(bench: Bench) -> None:
    bench.create_topic()
    comparing(bench, topic="U")
    for _ in range(2):
        assert not is_duplicate(put(bench, "a"))
    assert not is_duplicate(put(bench, "a", topic="U")), "nor does another topic count"
    assert is_duplicate(put(bench, "a", topic="U"))
    bench.create_topic("U", attributes="-dedup.minutes")
    assert not is_duplicate(put(bench, "a", topic="U"))


def test_the_window_ends(bench: Bench) -> None:
    comparing(bench, 1)
    put(bench, "a")
    bench.advance(MINUTE_MS)
    assert is_duplicate(put(bench, "a")), "at the last moment, and it does not begin anew"
    bench.advance(1)
    assert not is_duplicate(put(bench, "a"))
    assert is_duplicate(put(bench, "a"))


def test_other_keys_of_a_message_do_not_count(bench: Bench) -> None:
    comparing(bench)
    put(bench, "a", props={"KEYS": "b c"})
    assert not is_duplicate(put(bench, "b"))
    assert not is_duplicate(put(bench, "c", props={"KEYS": "a"}))


def test_they_do_not_hide_the_first_one_either(bench: Bench) -> None:
    comparing(bench)
    first = put(bench, "order-7", props={"KEYS": "order-7"})
    for n in range(100):
        assert not is_duplicate(put(bench, f"other-{n}", props={"KEYS": "order-7"}))
    again = put(bench, "order-7", props={"KEYS": "order-7"})
    assert is_duplicate(again) and place(again) == place(first)


def test_in_one_turn_before_anything_is_dispatched(bench: Bench) -> None:
    comparing(bench)
    frames = [
        bench.frame(310, bench.send_ext(props={"UNIQ_KEY": "a"}), b"%d" % n) for n in range(3)
    ]
    bench.turn(*((bench.conn, frame) for frame in frames))
    answers = [bench.answer(frame.opaque) for frame in frames]
    assert [one is not None and is_duplicate(one) for one in answers] == [False, True, True]
    assert seen(bench) == [b"0"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_after_a_crash(benches: Benches, is_kept: bool) -> None:
    bench = benches()
    comparing(bench)
    first = put(bench, "a")
    if is_kept:
        bench.advance(30_000)
    bench.crash()
    bench = benches(now_ms=bench.now_ms)
    again = put(bench, "a")
    assert is_duplicate(again) and place(again) == place(first)
    assert not is_duplicate(put(bench, "b"))


def test_what_a_crash_took_is_stored_again(benches: Benches) -> None:
    bench = benches()
    comparing(bench)
    put(bench, "a")
    put(bench, "b")
    unit = bench.store.unit("T", 0, 1)
    assert unit is not None
    bench.crash()
    with open(bench.files._path("commitlog/00000000000000000000"), "r+b") as file:
        file.seek(unit[0])
        file.write(bytes(4096))
    bench = benches(now_ms=bench.now_ms)
    assert is_duplicate(put(bench, "a")) and not is_duplicate(put(bench, "b"))


def test_a_duplicate_waits_for_the_disk_as_the_first_did(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    comparing(bench)
    bench.keeps_flushes = True
    opaques = [bench.post_send(props={"UNIQ_KEY": "a"}) for _ in range(2)]
    assert [bench.answer(one) for one in opaques] == [None, None]
    bench.flush()
    answers = [bench.answer(one) for one in opaques]
    assert [one is not None and is_duplicate(one) for one in answers] == [False, True]
    bench.keeps_flushes = False
    assert is_duplicate(put(bench, "a"))


def test_a_failed_first_does_not_count(bench: Bench) -> None:
    comparing(bench)
    bench.files.ratio = 0.99
    bench.store.clean(bench.now_ms)
    assert bench.send(props={"UNIQ_KEY": "a"}).code == ResponseCode.SERVICE_NOT_AVAILABLE
    bench.files.ratio = 0.10
    bench.store.clean(bench.now_ms)
    assert not is_duplicate(put(bench, "a"))


# --------------------------------------------------------------------------------------- batches


def test_of_a_batch_only_the_new_ones_are_stored(bench: Bench) -> None:
    comparing(bench)
    first = put(bench, "b")
    answer = put_batch(bench, ["a", "b", "c", "a"])
    ids = answer.ext["msgId"].split(",")
    assert ids[1] == first.ext["msgId"] and ids[3] == ids[0] and len(set(ids)) == 3
    assert answer.ext["queueOffset"] == "1" and not is_duplicate(answer)
    assert seen(bench) == [b"b", b"a", b"c"]
    again = put_batch(bench, ["c", "a"])
    assert is_duplicate(again) and again.ext["msgId"] == f"{ids[2]},{ids[0]}"
    assert again.ext["queueOffset"] == "2"
    assert is_duplicate(put(bench, "c"))
    assert seen(bench) == [b"b", b"a", b"c"]


# ------------------------------------------------------------------------ messages that come later


@pytest.mark.parametrize("later", [{"DELAY": "3"}, {"TIMER_DELAY_MS": "10000"}])
@pytest.mark.parametrize("crashes", [True, False])
def test_a_delayed_message_counts_while_it_waits_and_after(
    benches: Benches, later: dict[str, str], crashes: bool
) -> None:
    bench = benches()
    comparing(bench)
    first = put(bench, "a", queue=3, props=later)
    if crashes:
        bench.crash()
        bench = benches(now_ms=bench.now_ms)
    for more in (later, {}):
        again = put(bench, "a", props=more)
        assert is_duplicate(again) and place(again) == place(first)
    assert not is_duplicate(put(bench, "b", props=later))
    bench.advance(20_000)
    assert is_duplicate(put(bench, "a"))
    assert seen(bench, 3) == [b"a"] and seen(bench) == [b"b"]


def test_retries_are_no_duplicates(bench: Bench) -> None:
    comparing(bench)
    bench.beat()
    put(bench, "a")
    ext = {"offset": 0, "group": "G", "delayLevel": 1, "originTopic": "T"}
    for _ in range(2):
        assert bench.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext).code == 0
    bench.advance(2_000)
    assert seen(bench, 0, "%RETRY%G") == [b"a", b"a"]


def half(bench: Bench, key: str) -> Frame:
    return put(bench, key, props={"TRAN_MSG": "true", "PGROUP": "pg"}, sys_flag=4)


def end(bench: Bench, answer: Frame, how: int) -> int:
    ext = {
        "producerGroup": "pg",
        "tranStateTableOffset": answer.ext["queueOffset"],
        "commitLogOffset": int(answer.ext["msgId"][-16:], 16),
        "commitOrRollback": how,
        "msgId": answer.ext["transactionId"],
    }
    return bench.ask(RequestCode.END_TRANSACTION, ext).code


@pytest.mark.parametrize("crashes", [True, False])
def test_a_half_counts_while_its_transaction_is_open(benches: Benches, crashes: bool) -> None:
    bench = benches()
    comparing(bench)
    first = half(bench, "a")
    if crashes:
        bench.crash()
        bench = benches(now_ms=bench.now_ms)
    again = half(bench, "a")
    assert is_duplicate(again) and place(again) == place(first)
    assert end(bench, again, SysFlag.COMMIT) == 0, "whose answer came last ends the one there is"
    assert seen(bench) == [b"a"]
    assert is_duplicate(half(bench, "a")) and is_duplicate(put(bench, "a")), "committed"


def test_a_half_that_was_rolled_back_may_be_tried_again(bench: Bench) -> None:
    comparing(bench)
    assert end(bench, half(bench, "a"), SysFlag.ROLLBACK) == 0
    second = half(bench, "a")
    assert not is_duplicate(second)
    assert not is_duplicate(put(bench, "b"))
    assert end(bench, second, SysFlag.COMMIT) == 0
    assert seen(bench) == [b"b", b"a"]


def test_an_open_half_does_not_stop_an_ordinary_message(bench: Bench) -> None:
    comparing(bench)
    half(bench, "a")
    assert not is_duplicate(put(bench, "a"))


# ---------------------------------------------------------------------------------------- the edge


def test_a_topic_made_again_begins_anew(bench: Bench) -> None:
    comparing(bench)
    put(bench, "a")
    bench.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    comparing(bench)
    assert not is_duplicate(put(bench, "a"))
    assert is_duplicate(put(bench, "a"))


def test_a_numbered_message_is_judged_by_its_number(bench: Bench) -> None:
    comparing(bench)
    for n in range(2):
        assert not is_duplicate(put(bench, "a", props={"PRODUCER_SEQ": f"p 1 {n}"}))
    assert is_duplicate(put(bench, "b", props={"PRODUCER_SEQ": "p 1 1"}))


@pytest.mark.parametrize("value", ["0", "-1", "x", "10081", "1.5", ""])
def test_a_window_that_makes_no_sense_is_refused(bench: Bench, value: str) -> None:
    answer = bench.create_topic(attributes=f"+dedup.minutes={value}")
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert bench.broker.topics.get("T") is None


def test_without_an_index_it_is_refused_and_old_topics_count_in_memory(benches: Benches) -> None:
    bench = benches()
    comparing(bench)
    bench.close()
    bench = benches(is_index_enabled=False)
    answer = bench.create_topic("U", attributes="+dedup.minutes=5")
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark is not None and "messageIndexEnable" in answer.remark
    put(bench, "a")
    bench.advance(5_000)
    assert is_duplicate(put(bench, "a"))


def test_in_memory_is_only_what_the_index_lacks(bench: Bench) -> None:
    comparing(bench)
    for n in range(50):
        put(bench, f"k{n}")
    assert len(bench.broker.dedup._recent) == len(bench.broker.dedup._order) == 1


def test_many_index_files_and_colliding_hashes(benches: Benches) -> None:
    bench = benches(index_slots=2, index_entries=20)
    comparing(bench)
    keys = [f"{one}{two}" for one in ("Aa", "BB") for two in ("Aa", "BB")]  # one hash in Java
    for key in keys:
        assert not is_duplicate(put(bench, key))
    for n in range(100):
        put(bench, f"k{n}")
    assert all(is_duplicate(put(bench, key)) for key in keys)


@pytest.mark.skipif(_fast.load()[0] is None, reason="no compiled path")
def test_the_compiled_path_is_not_taught_such_topics(bench: Bench) -> None:
    taught: list[str] = []

    class Learner:
        def learn_queue(self, topic: str, *rest: object, **more: object) -> None:
            taught.append(topic)

    from cometmq.broker.teach import Teacher

    teacher = Teacher.__new__(Teacher)
    teacher._broker, teacher._hot = bench.broker, Learner()  # type: ignore[assignment]
    bench.broker.teacher = teacher
    comparing(bench)
    bench.create_topic("U")
    put(bench, "a")
    put(bench, "a", topic="U")
    bench.broker.teacher = None
    assert taught == ["U"]
