"""Transactions: half messages, their ends, check-backs, and every place where a broker may die."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cometmq.broker import half as half_module
from cometmq.broker import names
from cometmq.broker.marks import Marks
from cometmq.message import NewMessage, StoredMessage
from cometmq.ports import NEVER_MS
from cometmq.wire import headers, message_id, properties, record
from cometmq.wire.codes import FLAG_ONEWAY
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from .conftest import Benches
from .harness import HOST, PORT, Bench, StubNameServer, bodies_of

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
HALF, OP, GIVEN_UP = names.HALF_TOPIC, names.OP_TOPIC, names.CHECK_MAX_TOPIC
ROUND_MS = 30_000


class Sent(NamedTuple):
    """What a producer knows of its half message."""

    log_offset: int
    queue_offset: int
    key: str


def half_props(key: str = "", **more: str) -> dict[str, str]:
    named = {"UNIQ_KEY": key} if key else {}
    return {"TRAN_MSG": "true", "PGROUP": "pg", **named, **more}


def begin(bench: Bench, body: bytes = b"paid", key: str = "", **how: Any) -> Sent:
    props = {**half_props(key), **how.pop("props", {})}
    answer = bench.sent(body=body, props=props, sys_flag=how.pop("sys_flag", 4), **how)
    return sent(answer)


def sent(answer: Frame) -> Sent:
    _, _, log_offset = message_id.parse_offset_id(answer.ext["msgId"])
    return Sent(log_offset, int(answer.ext["queueOffset"]), answer.ext["transactionId"])


def end_ext(one: Sent, outcome: int = COMMIT, **more: Any) -> dict[str, Any]:
    return {
        "producerGroup": "pg",
        "tranStateTableOffset": one.queue_offset,
        "commitLogOffset": one.log_offset,
        "commitOrRollback": outcome,
        "msgId": one.key,
        "transactionId": one.key,
        **more,
    }


def end(bench: Bench, one: Sent, outcome: int = COMMIT, **more: Any) -> Frame:
    return bench.ask(C.END_TRANSACTION, end_ext(one, outcome, **more))


def ended(bench: Bench, one: Sent, outcome: int = COMMIT, **more: Any) -> None:
    answer = end(bench, one, outcome, **more)
    assert answer.code == 0, answer.remark


def stored(bench: Bench, topic: str = "T", queue: int = 0) -> list[StoredMessage]:
    store = bench.store
    found = []
    for at in range(store.min_offset(topic, queue), store.max_offset(topic, queue)):
        unit = store.unit(topic, queue, at)
        assert unit is not None
        raw = store.record_at(unit[0])
        assert raw is not None
        found.append(record.decode(raw))
    return found


def bodies(bench: Bench, topic: str = "T", queue: int = 0) -> list[bytes]:
    return [one.body for one in stored(bench, topic, queue)]


def ops(bench: Bench) -> list[bytes]:
    return bodies(bench, OP)


def table(one: StoredMessage) -> dict[str, str]:
    return properties.parse(one.properties)


def producer(bench: Bench, group: str = "pg", conn: int | None = None) -> int:
    conn = bench.conn if conn is None else conn
    assert bench.beat("", producers=(group,), conn=conn, client=f"p{conn}").code == 0
    return conn


def test_a_queue_that_the_topic_has_lost_meanwhile_is_not_committed_to(bench: Bench) -> None:
    bench.create_topic(queues=4)
    one = begin(bench, queue=3)
    bench.create_topic(queues=2)
    ended(bench, one)
    assert bodies(bench, queue=1) == [b"paid"]
    assert bodies(bench, queue=3) == []


class Asked(NamedTuple):
    header: headers.CheckTransactionHeader
    message: StoredMessage
    frame: Frame

    @property
    def pair(self) -> Sent:
        header = self.header
        return Sent(header.commitLogOffset, header.tranStateTableOffset, str(header.msgId))


def asked(bench: Bench, conn: int | None = None) -> list[Asked]:
    found = []
    for frame in bench.requests_to(bench.conn if conn is None else conn):
        assert (frame.code, frame.is_oneway) == (C.CHECK_TRANSACTION_STATE, True)
        header = headers.parse(headers.CheckTransactionHeader, frame.ext)
        found.append(Asked(header, record.decode(frame.body, verify_crc=True), frame))
    return found


def rounds(bench: Bench, count: int = 1) -> None:
    """Let so many checks pass; a producer of group pg stays alive."""
    for _ in range(count):
        bench.advance(ROUND_MS)


# ------------------------------------------------------------------------------------ half messages


def test_a_half_message_is_stored_where_nobody_looks(bench: Bench) -> None:
    bench.sent(body=b"before")
    answer = bench.sent(
        body=b"paid",
        queue=2,
        sys_flag=0x4 | 0x1,
        flag=7,
        props=half_props("K1", TAGS="t", KEYS="k"),
    )
    (one,) = stored(bench, HALF)
    assert answer.ext == {
        "msgId": message_id.offset_id(message_id.pack_host(HOST, PORT), one.log_offset),
        "queueId": "2",
        "queueOffset": "0",
        "transactionId": "K1",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }
    assert (one.topic, one.queue_id, one.sys_flag, one.flag) == (HALF, 0, 0x1, 7)
    found = table(one)
    assert (found["REAL_TOPIC"], found["REAL_QID"], found["__transactionId__"]) == ("T", "2", "K1")
    assert (found["TAGS"], found["KEYS"], found["PGROUP"]) == ("t", "k", "pg")
    assert bodies(bench) == [b"before"] and bodies(bench, "T", 2) == []
    assert bench.runtime()["cometmqHalfMessages"] == "1"


def test_the_property_decides_not_the_flag(bench: Bench) -> None:
    begin(bench, sys_flag=0, props={"TRAN_MSG": "TRUE"})
    assert len(stored(bench, HALF)) == 1
    for value in ("false", "1", "yes"):
        bench.sent(props=half_props(TRAN_MSG=value))
    assert len(stored(bench, HALF)) == 1 and len(stored(bench)) == 3


def test_a_key_is_made_for_a_half_message_without_one(bench: Bench) -> None:
    one = begin(bench)
    assert table(stored(bench, HALF)[0])["__transactionId__"] == one.key != ""
    ended(bench, one)


def test_a_consumer_that_sends_a_committed_message_back_begins_nothing(bench: Bench) -> None:
    bench.beat("G")
    props = half_props(DELAY="1", RETRY_TOPIC="T")
    bench.sent("%RETRY%G", reconsume=1, props=props, sys_flag=8)
    assert stored(bench, HALF) == []
    bench.sent("T", reconsume=1, props=half_props())  # without a level it does
    bench.sent("T", reconsume=0, props=half_props(DELAY="1"))
    assert len(stored(bench, HALF)) == 2


def test_transactions_may_be_switched_off(benches: Benches) -> None:
    bench = benches(rejects_transactions=True)
    answer = bench.send(props=half_props(), sys_flag=4)
    assert answer.code == 16 and "rejectTransactionMessage" in str(answer.remark)
    assert bench.send(props={"TRAN_MSG": "false"}).code == 0


def test_what_only_the_broker_may_say_is_dropped(bench: Bench) -> None:
    forged = {
        "TRANSACTION_CHECK_TIMES": "99",
        "TRAN_PREPARED_QUEUE_OFFSET": "3",
        "REAL_TOPIC": "Other",
        "REAL_QID": "9",
        "__transactionId__": "x",
    }
    one = begin(bench, queue=1, props=forged)
    found = table(stored(bench, HALF)[0])
    assert "TRANSACTION_CHECK_TIMES" not in found and "TRAN_PREPARED_QUEUE_OFFSET" not in found
    assert (found["REAL_TOPIC"], found["REAL_QID"]) == ("T", "1")
    assert found["__transactionId__"] == one.key


def test_properties_must_leave_room_for_the_copies(bench: Bench) -> None:
    answer = bench.send(props=half_props(p="x" * 32_600), sys_flag=4)
    assert answer.code == 13 and "transactional" in str(answer.remark)
    assert stored(bench, HALF) == []


def test_a_half_message_waits_for_its_topic_to_be_known(benches: Benches) -> None:
    server = StubNameServer("10.9.9.9:9876")
    bench = benches(namesrv=[server])
    server.is_silent = True
    opaque = bench.post_send("New", props=half_props(), sys_flag=4)
    assert bench.answer(opaque) is None
    bench.release(server)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0


def test_a_half_message_is_acknowledged_when_it_is_durable(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.create_topic()
    bench.keeps_flushes = True
    opaque = bench.post_send(props=half_props(), sys_flag=4)
    assert bench.answer(opaque) is None
    bench.flush()
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0
    opaque = bench.post(C.END_TRANSACTION, end_ext(sent(answer)))
    assert bench.answer(opaque) is None and bodies(bench) == []
    bench.flush()
    committed = bench.answer(opaque)
    assert committed is not None and committed.code == 0
    assert bodies(bench) == [b"hello"] and ops(bench) == [b"0"]


def test_a_half_message_in_a_full_store_is_refused(bench: Bench) -> None:
    bench.create_topic()
    bench.files.ratio = 0.95
    bench.advance(11_000)
    answer = bench.send(props=half_props(), sys_flag=4)
    assert answer.code == 14 and stored(bench, HALF) == []


# -------------------------------------------------------------------------------------------- ends


def test_a_commit_delivers_the_message(bench: Bench) -> None:
    one = begin(bench, key="K", queue=3, sys_flag=4 | 1, flag=9, props={"TAGS": "t", "KEYS": "k"})
    bench.advance(100)
    opaque = bench.hold(queue=3)
    ended(bench, one)
    woken = bench.answer(opaque)
    assert woken is not None and bodies_of(woken) == [b"paid"]
    (half,) = stored(bench, HALF)
    (message,) = stored(bench, "T", 3)
    assert message.sys_flag == 0x8 | 0x1
    assert message.prepared_offset == one.log_offset
    assert (message.flag, message.reconsume_times) == (9, 0)
    assert (message.born_ms, message.born_host) == (half.born_ms, half.born_host)
    assert message.properties == half.properties
    assert ops(bench) == [b"0"]
    (op,) = stored(bench, OP)
    assert (op.queue_id, table(op)) == (0, {"TAGS": "d"})
    assert bodies_of(bench.pull("T", 3, 0, tags="t")) == [b"paid"]
    figures = bench.runtime()
    assert (figures["cometmqHalfMessages"], figures["cometmqTransactionCommits"]) == ("0", "1")


def test_a_rollback_delivers_nothing(bench: Bench) -> None:
    ended(bench, begin(bench), ROLLBACK)
    rounds(bench, 3)
    assert bodies(bench) == [] and ops(bench) == [b"0"] and len(stored(bench, HALF)) == 1
    figures = bench.runtime()
    assert (figures["cometmqHalfMessages"], figures["cometmqTransactionRollbacks"]) == ("0", "1")


@pytest.mark.parametrize("outcome", [UNKNOWN, 4, 99, -1])
def test_who_does_not_know_is_not_answered(bench: Bench, outcome: int) -> None:
    one = begin(bench)
    opaque = bench.post(C.END_TRANSACTION, end_ext(one, outcome))
    assert bench.answer(opaque) is None
    assert bodies(bench) == ops(bench) == []
    ended(bench, one)


def test_a_oneway_end_is_done_and_never_answered(bench: Bench) -> None:
    one = begin(bench)
    bench.post(C.END_TRANSACTION, end_ext(one), flag=FLAG_ONEWAY)
    bench.post(C.END_TRANSACTION, end_ext(one), flag=FLAG_ONEWAY)
    assert bodies(bench) == [b"paid"]
    assert bench.inbox[bench.conn] == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"commitLogOffset": 10**9}, "no half message"),
        ({"commitLogOffset": -1}, "no half message"),
        ({"commitLogOffset": 1}, "no half message"),
        ({"commitLogOffset": 0}, "no half message"),  # an ordinary one
        ({"producerGroup": "other"}, "group"),
        ({"tranStateTableOffset": 1}, "queue offset 0, not 1"),
        ({"tranStateTableOffset": -1}, "queue offset"),
        ({"msgId": "other", "transactionId": "other"}, "another one"),
        ({"msgId": "other", "transactionId": None}, "another one"),
    ],
)
@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_an_end_must_name_its_own_half_message(
    bench: Bench, change: dict[str, Any], word: str, outcome: int
) -> None:
    bench.sent(props={"PGROUP": "pg", "REAL_TOPIC": "T", "REAL_QID": "0"})
    one = begin(bench)
    answer = end(bench, one, outcome, **change)
    assert answer.code == 1 and word in str(answer.remark)
    assert bodies(bench) == [b"hello"] and ops(bench) == []
    ended(bench, one)


@pytest.mark.parametrize("ids", ["offset", "none", "key only"])
def test_clients_name_a_transaction_in_different_ways(bench: Bench, ids: str) -> None:
    one = begin(bench)
    offset_id = message_id.offset_id(message_id.pack_host(HOST, PORT), one.log_offset)
    more: dict[str, Any] = {"msgId": offset_id, "transactionId": ""}
    if ids != "offset":
        more = {"msgId": "" if ids == "none" else one.key, "transactionId": None}
    ended(bench, one, **more)
    assert bodies(bench) == [b"paid"]


def test_a_late_commit_can_not_touch_a_later_transaction(bench: Bench) -> None:
    first, second = begin(bench, b"first"), begin(bench, b"second")
    mixed = Sent(second.log_offset, first.queue_offset, first.key)
    assert end(bench, mixed).code == 1
    mixed = Sent(first.log_offset, second.queue_offset, first.key)
    assert end(bench, mixed).code == 1
    ended(bench, second, ROLLBACK)
    ended(bench, first)
    assert bodies(bench) == [b"first"]


@pytest.mark.parametrize("first", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("passed", [0, 1, 2])
def test_the_first_end_counts(bench: Bench, first: int, second: int, passed: int) -> None:
    one = begin(bench)
    ended(bench, one, first)
    rounds(bench, passed)
    answer = end(bench, one, second)
    assert answer.code == 1 and "ended before" in str(answer.remark)
    assert bodies(bench) == ([b"paid"] if first == COMMIT else [])
    assert len(ops(bench)) == 1
    assert bench.runtime()["cometmqTransactionEndsRepeated"] == "1"


def test_an_end_after_its_own_immunity_waits_for_the_check(bench: Bench) -> None:
    props = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "10"}
    one, other = begin(bench, props=props), begin(bench, b"other", props=props)
    bench.advance(9_995)  # it was born 5 ms before it came
    ended(bench, other)
    bench.advance(1)
    answer = end(bench, one)
    assert answer.code == 604 and "CHECK_IMMUNITY" in str(answer.remark)
    ended(bench, one, fromTransactionCheck=True)
    assert bodies(bench) == [b"other", b"paid"]


@pytest.mark.parametrize("own", ["1", "x", "-5"])
def test_immunity_is_never_shorter_than_the_timeout(bench: Bench, own: str) -> None:
    one = begin(bench, props={"CHECK_IMMUNITY_TIME_IN_SECONDS": own})
    bench.advance(5_995)
    ended(bench, one)


def test_a_delayed_message_is_delayed_from_its_commit_on(bench: Bench) -> None:
    one = begin(bench, props={"DELAY": "2"})
    bench.advance(4_000)
    ended(bench, one)
    bench.advance(4_900)
    assert bodies(bench) == []
    bench.advance(200)
    (message,) = stored(bench)
    assert (message.body, message.sys_flag, message.prepared_offset) == (b"paid", 8, one.log_offset)
    assert end(bench, one).code == 1


def test_a_timed_message_is_timed_when_it_is_committed(bench: Bench) -> None:
    one = begin(bench, props={"TIMER_DELIVER_MS": str(bench.now_ms + 20_000)})
    bench.advance(4_000)
    ended(bench, one)
    bench.advance(10_000)
    assert bodies(bench) == [] and ops(bench) == [b"0"]
    bench.advance(10_000)
    (message,) = stored(bench)
    assert (message.body, message.sys_flag, message.prepared_offset) == (b"paid", 8, one.log_offset)


def test_a_body_at_the_limit_can_be_committed(benches: Benches) -> None:
    bench = benches(max_message_bytes=1000)
    one = begin(bench, b"x" * 1000, props={"DELAY": "1"})
    ended(bench, one)
    bench.advance(2_000)
    assert [len(body) for body in bodies(bench)] == [1000]
    assert ops(bench) == [b"0"]


def test_an_end_that_can_not_be_stored_changes_nothing(bench: Bench) -> None:
    one, other = begin(bench), begin(bench, b"other")
    bench.files.ratio = 0.95
    bench.advance(11_000)
    for outcome in (COMMIT, ROLLBACK):
        answer = end(bench, one, outcome)
        assert answer.code == 14 and "0.95" in str(answer.remark)
    bench.files.ratio = 0.10
    bench.advance(11_000)
    assert len(ops(bench)) == 0
    ended(bench, one)
    ended(bench, other, ROLLBACK)
    assert bodies(bench) == [b"paid"]


def test_a_half_message_without_a_real_place_is_not_committed(bench: Bench) -> None:
    text = properties.build({"PGROUP": "pg", "UNIQ_KEY": "K", "REAL_TOPIC": "../x"})
    at = bench.broker.put(NewMessage(HALF, 0, b"", text), bench.now_ms, is_due=True)
    one = Sent(at.log_offset, at.queue_offset, "K")
    assert end(bench, one).code == 1
    ended(bench, one, ROLLBACK)


# ----------------------------------------------------------------------------- gathered op records


def test_ends_may_be_gathered(benches: Benches) -> None:
    bench = benches(transaction_op_interval_ms=3_000)
    for n in range(3):
        ended(bench, begin(bench, b"%d" % n), ROLLBACK if n == 1 else COMMIT)
        assert end(bench, Sent(0, n, "")).code == 1
    bench.advance(2_999)
    assert ops(bench) == [b"1"], "of a rollback nothing else tells"
    bench.advance(1)
    assert ops(bench) == [b"1", b"0,2,"]
    assert bodies(bench) == [b"0", b"2"]
    ended(bench, begin(bench))
    bench.advance(3_000)
    assert ops(bench)[2:] == [b"3"]


def test_a_crash_before_ends_are_noted_ends_nothing_twice(benches: Benches) -> None:
    bench = benches(transaction_op_interval_ms=60_000)
    kept, undone = begin(bench, b"kept", key="K"), begin(bench, b"undone", key="U")
    ended(bench, kept)
    ended(bench, undone, ROLLBACK)
    for n in range(70):  # more than a look-up by key returns
        begin(bench, b"%d" % n, props={"KEYS": "K U"})
    bench.advance(0)
    bench.crash()
    bench = benches(now_ms=bench.now_ms, transaction_op_interval_ms=60_000)
    assert end(bench, kept).code == 1
    assert end(bench, undone).code == 1
    assert bodies(bench) == [b"kept"]


def test_a_full_op_record_is_written_at_once(benches: Benches) -> None:
    bench = benches(transaction_op_interval_ms=3_000, transaction_op_bytes=10)
    for _ in range(7):
        ended(bench, begin(bench))
    bench.advance(0)
    assert ops(bench) == [b"0,1,2,3,4,"]
    bench.advance(3_000)
    assert ops(bench)[1:] == [b"5,6,"]


def test_stopping_leaves_no_end_behind(benches: Benches) -> None:
    bench = benches(transaction_op_interval_ms=3_000)
    one, other = begin(bench), begin(bench, b"other")
    ended(bench, one)
    bench.stop()
    assert ops(bench) == []  # not dispatched yet
    ended(bench, other)
    assert ops(bench) == [b"0", b"1"]


def test_gathered_ends_wait_while_the_store_is_full(benches: Benches) -> None:
    bench = benches(transaction_op_interval_ms=30_000, transaction_op_bytes=6)
    halves = [begin(bench) for _ in range(4)]
    for one in halves[:2]:
        ended(bench, one)
    bench.files.ratio = 0.95
    bench.advance(11_000)
    assert [end(bench, halves[2], how).code for how in (COMMIT, ROLLBACK)] == [14, 14]
    bench.advance(20_000)
    assert ops(bench) == []
    bench.files.ratio = 0.10
    bench.advance(20_000)
    assert ops(bench)[0] == b"0,1,"


# -------------------------------------------------------------------------------------- check-back


def test_a_producer_is_asked_about_what_it_left_open(bench: Bench) -> None:
    producer(bench)
    one = begin(bench, key="K", queue=2, props={"TAGS": "t"})
    bench.advance(ROUND_MS - 1)
    assert asked(bench) == []
    bench.advance(1)
    (ask,) = asked(bench)
    first, copy = stored(bench, HALF)
    offset_id = message_id.offset_id(copy.store_host, copy.log_offset)
    assert ask.header == headers.CheckTransactionHeader(
        tranStateTableOffset=1,
        commitLogOffset=copy.log_offset,
        topic=HALF,
        msgId="K",
        transactionId="K",
        offsetMsgId=offset_id,
        bname="broker-a",
    )
    message = ask.message
    assert (message.topic, message.queue_id, message.body) == ("T", 2, b"paid")
    assert (message.queue_offset, message.log_offset) == (1, copy.log_offset)
    assert message.properties == copy.properties
    assert table(copy) == {
        **table(first),
        "TRANSACTION_CHECK_TIMES": "1",
        "TRAN_PREPARED_QUEUE_OFFSET": "0",
    }
    for field in ("body", "flag", "sys_flag", "born_ms", "born_host", "store_host", "topic"):
        assert getattr(copy, field) == getattr(first, field)
    figures = bench.runtime()
    assert (figures["cometmqHalfMessages"], figures["cometmqTransactionChecks"]) == ("1", "1")
    ended(bench, ask.pair, fromTransactionCheck=True)
    assert bodies(bench, "T", 2) == [b"paid"]
    assert stored(bench, "T", 2)[0].prepared_offset == copy.log_offset
    rounds(bench, 3)
    assert asked(bench) == [] and end(bench, one).code == 1 and end(bench, ask.pair).code == 1
    assert bodies(bench, "T", 2) == [b"paid"]


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_any_copy_ends_the_transaction_and_then_none_does(
    bench: Bench, which: int, outcome: int
) -> None:
    producer(bench)
    pairs = [begin(bench)]
    for _ in range(3):
        rounds(bench)
        pairs += [one.pair for one in asked(bench)]
    assert len(pairs) == 4
    ended(bench, pairs[which], outcome, fromTransactionCheck=which > 0)
    for pair in pairs:
        assert end(bench, pair, COMMIT, fromTransactionCheck=True).code == 1
    rounds(bench, 2)
    assert asked(bench) == []
    assert bodies(bench) == ([b"paid"] if outcome == COMMIT else [])
    assert bench.runtime()["cometmqHalfMessages"] == "0"


def test_two_transactions_with_one_key_stay_apart(bench: Bench) -> None:
    producer(bench)
    first, second = begin(bench, b"first", key="K"), begin(bench, b"second", key="K")
    rounds(bench)
    assert len(asked(bench)) == 2
    ended(bench, first, ROLLBACK)
    ended(bench, second)
    assert bodies(bench) == [b"second"]
    rounds(bench)
    assert asked(bench) == []


def test_a_young_half_message_is_not_asked_about(benches: Benches) -> None:
    bench = benches(transaction_check_interval_ms=1_000)
    producer(bench)
    begin(bench)
    bench.advance(5_000)
    assert asked(bench) == []
    bench.advance(1_000)
    assert len(asked(bench)) == 1
    bench.advance(1_000)
    assert len(asked(bench)) == 1, "asked again with every check: its age is that of its birth"


def test_a_half_message_born_in_the_future_is_asked_about_at_once(bench: Bench) -> None:
    producer(bench)
    ext = bench.send_ext(props=half_props(), sys_flag=4)
    ext["g"] = bench.now_ms + 10**7
    assert bench.ask(C.SEND_MESSAGE_V2, ext, b"x").code == 0
    rounds(bench)
    assert len(asked(bench)) == 1


def test_ended_ones_are_passed_over(bench: Bench) -> None:
    producer(bench)
    halves = [begin(bench, b"%d" % n) for n in range(40)]
    for n, one in enumerate(halves):
        if n not in (0, 7, 8, 9, 33):
            ended(bench, one, ROLLBACK)
    rounds(bench)
    assert [one.message.body for one in asked(bench)] == [b"0", b"7", b"8", b"9", b"33"]
    assert bench.runtime()["cometmqHalfMessages"] == "5"


def test_given_up_after_so_many_checks(benches: Benches) -> None:
    server = StubNameServer("10.9.9.9:9876")
    bench = benches(transaction_check_max=3, namesrv=[server])
    one = begin(bench, key="K", queue=1, flag=3)
    for n in range(3):
        producer(bench)
        rounds(bench)
        (ask,) = asked(bench)
        assert properties.get(ask.message.properties, "TRANSACTION_CHECK_TIMES") == str(n + 1)
    assert bench.broker.topics.get(GIVEN_UP) is None
    producer(bench)
    rounds(bench)
    assert asked(bench) == []
    topic = bench.broker.topics.get(GIVEN_UP)
    assert topic is not None
    assert (topic.readQueueNums, topic.writeQueueNums, topic.perm) == (1, 1, 6)
    assert GIVEN_UP in server.topics
    (gone,) = stored(bench, GIVEN_UP)
    assert (gone.body, gone.flag, gone.sys_flag) == (b"paid", 3, 0)
    assert table(gone)["REAL_TOPIC"] == "T" and table(gone)["TRANSACTION_CHECK_TIMES"] == "3"
    assert end(bench, ask.pair, fromTransactionCheck=True).code == 1
    assert end(bench, one).code == 1
    rounds(bench, 2)
    assert len(stored(bench, GIVEN_UP)) == 1 and bodies(bench, "T", 1) == []
    figures = bench.runtime()
    assert (figures["cometmqHalfMessages"], figures["cometmqTransactionsGivenUp"]) == ("0", "1")


def test_one_that_was_given_up_is_resumed_once(benches: Benches) -> None:
    bench = benches(transaction_check_max=1)
    producer(bench)
    one = begin(bench, key="K1")
    rounds(bench, 2)
    asked(bench)
    (gone,) = stored(bench, GIVEN_UP)
    named = {"msgId": message_id.offset_id(gone.store_host, gone.log_offset), "topic": GIVEN_UP}
    assert bench.ask(C.RESUME_CHECK_HALF_MESSAGE, named).code == 0
    again = bench.ask(C.RESUME_CHECK_HALF_MESSAGE, named)
    assert again.code == 1 and "open" in str(again.remark)
    rounds(bench)
    (ask,) = asked(bench)
    assert ask.message.body == b"paid" and bodies(bench) == []
    ended(bench, ask.pair, fromTransactionCheck=True)
    rounds(bench, 2)
    assert bodies(bench) == [b"paid"] and asked(bench) == []
    assert end(bench, one).code == 1


@pytest.mark.parametrize("text", ["", "7", "00" * 16, "half"])
def test_only_those_given_up_are_resumed(bench: Bench, text: str) -> None:
    producer(bench)
    one = begin(bench)
    if text == "half":
        text = message_id.offset_id(stored(bench, HALF)[0].store_host, one.log_offset)
    before = bench.state()
    answer = bench.ask(C.RESUME_CHECK_HALF_MESSAGE, {"msgId": text})
    assert answer.code == 1 and answer.remark
    assert bench.state() == before and len(stored(bench, HALF)) == 1


def test_the_last_answer_has_a_whole_interval(benches: Benches) -> None:
    bench = benches(transaction_check_max=1)
    producer(bench)
    begin(bench)
    rounds(bench)
    (ask,) = asked(bench)
    bench.advance(ROUND_MS - 100)
    assert bench.broker.topics.get(GIVEN_UP) is None
    ended(bench, ask.pair, fromTransactionCheck=True)
    rounds(bench, 2)
    assert bodies(bench) == [b"paid"] and bench.broker.topics.get(GIVEN_UP) is None


def test_older_than_the_log_keeps_messages_is_given_up(benches: Benches) -> None:
    bench = benches(file_reserved_hours=1, transaction_check_interval_ms=3_600_000)
    producer(bench)
    begin(bench)
    bench.advance(3_600_001)
    assert bodies(bench, GIVEN_UP) == [b"paid"]


def test_own_immunity_is_kept_and_costs_no_check(bench: Bench) -> None:
    producer(bench)
    one = begin(bench, props={"CHECK_IMMUNITY_TIME_IN_SECONDS": "100"})
    rounds(bench, 3)
    assert asked(bench) == []
    copies = [table(half) for half in stored(bench, HALF)]
    assert [copy.get("TRAN_PREPARED_QUEUE_OFFSET") for copy in copies] == [None, "0", "0", "0"]
    assert all("TRANSACTION_CHECK_TIMES" not in copy for copy in copies)
    bench.advance(5_000)
    ended(bench, one)
    producer(bench)
    rounds(bench, 2)
    assert asked(bench) == [] and bodies(bench) == [b"paid"]


def test_after_own_immunity_it_is_asked_about(bench: Bench) -> None:
    producer(bench)
    begin(bench, props={"CHECK_IMMUNITY_TIME_IN_SECONDS": "50"})
    rounds(bench, 2)
    (ask,) = asked(bench)
    assert properties.get(ask.message.properties, "TRANSACTION_CHECK_TIMES") == "1"
    ended(bench, ask.pair, fromTransactionCheck=True)


def test_without_a_producer_it_counts_all_the_same(bench: Bench) -> None:
    begin(bench)
    producer(bench, "other")
    rounds(bench)
    assert asked(bench) == []
    assert bench.runtime()["cometmqTransactionChecksWithoutProducer"] == "1"
    producer(bench)
    rounds(bench)
    (ask,) = asked(bench)
    assert properties.get(ask.message.properties, "TRANSACTION_CHECK_TIMES") == "2"


def test_all_producers_of_a_group_are_asked_in_turn(bench: Bench) -> None:
    conns = [producer(bench, conn=bench.connect()) for _ in range(2)]
    gone = producer(bench, conn=bench.connect())
    for n in range(6):
        begin(bench, b"%d" % n)
    bench.disconnect(gone)
    rounds(bench)
    assert [len(asked(bench, conn)) for conn in (*conns, gone)] == [3, 3, 0]


@pytest.mark.parametrize("serialize", [0, 1])
def test_a_producer_is_asked_in_its_own_format(bench: Bench, serialize: int) -> None:
    assert bench.beat("", producers=("pg",), serialize=serialize).code == 0
    begin(bench)
    rounds(bench)
    assert [one.frame.serialize for one in asked(bench)] == [serialize]


def test_a_tick_does_only_so_much(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_module, "MOST_AT_ONCE", 10)
    producer(bench)
    halves = [begin(bench) for _ in range(35)]
    for one in halves[:5]:
        ended(bench, one)
    seen = 0
    bench.advance(ROUND_MS - 1)
    bench.now_ms += 1
    for _ in range(3):
        bench.tick()
        seen += len(new := asked(bench))
        assert len(new) == 10
        bench.now_ms += half_module.PAUSE_MS
    bench.advance(ROUND_MS + 1_000)
    assert len(asked(bench)) == 30 and seen == 30


def test_a_tick_sends_only_so_many_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_module, "MOST_BYTES_AT_ONCE", 3_000)
    producer(bench)
    for _ in range(5):
        begin(bench, b"x" * 1_500)
    bench.advance(ROUND_MS - 1)
    bench.now_ms += 1
    bench.tick()
    assert len(asked(bench)) == 2
    bench.advance(1_000)
    assert len(asked(bench)) == 3


def test_offsets_follow_and_then_all_is_quiet(bench: Bench) -> None:
    producer(bench)
    for n in range(10):
        one = begin(bench)
        if n != 4:
            ended(bench, one)
    rounds(bench)
    (ask,) = asked(bench)
    found = bench.broker.offsets.table
    assert found[HALF, "CID_RMQ_SYS_TRANS"] == {0: 10}
    ended(bench, ask.pair, fromTransactionCheck=True)
    rounds(bench, 2)
    assert found[HALF, "CID_RMQ_SYS_TRANS"] == {0: 11}
    assert found[OP, "CID_RMQ_SYS_TRANS"] == {0: 11}
    assert bench.broker.half.next_ms(bench.broker, bench.now_ms) == NEVER_MS
    bench.advance(6_000)
    saved = next(one for one in reversed(bench.saved) if "consumerOffset" in one.name)
    assert b'"RMQ_SYS_TRANS_HALF_TOPIC@CID_RMQ_SYS_TRANS"' in saved.content


def test_op_records_are_left_behind_only_with_their_halves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_module, "MOST_AT_ONCE", 3)
    halves = [begin(bench) for _ in range(8)]
    for one in reversed(halves[1:]):
        ended(bench, one)
    bench.broker.half.tick(bench.broker, bench.now_ms, [])
    found = bench.broker.offsets.table
    assert (OP, "CID_RMQ_SYS_TRANS") not in found
    ended(bench, halves[0])
    bench.advance(ROUND_MS + 1_000)
    assert found[OP, "CID_RMQ_SYS_TRANS"] == {0: 8}


def test_how_far_it_came_is_saved_only_when_the_copies_are_durable(bench: Bench) -> None:
    producer(bench)
    begin(bench)
    bench.advance(1_000)
    bench.keeps_flushes = True
    rounds(bench)
    assert len(asked(bench)) == 1 and len(stored(bench, HALF)) == 2
    found = bench.broker.offsets.table
    assert (HALF, "CID_RMQ_SYS_TRANS") not in found
    while bench.kept_flushes:
        bench.flush()
        bench.advance(1)
    assert found[HALF, "CID_RMQ_SYS_TRANS"] == {0: 1}


def test_the_store_refuses_a_copy(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    producer(bench)
    one = begin(bench)
    bench.files.ratio = 0.95
    bench.advance(ROUND_MS + 5_000)
    assert asked(bench) == [] and "check-back waits" in caplog.text
    bench.files.ratio = 0.10
    bench.advance(12_000)
    assert len(asked(bench)) == 1 and len(stored(bench, HALF)) == 2
    ended(bench, one)


def test_a_copy_that_is_too_large_now_is_given_up(benches: Benches) -> None:
    benches(max_message_bytes=2_000).close()
    bench = benches(max_message_bytes=2_000)
    begin(bench, b"x" * 1_500)
    begin(bench, b"small")
    bench.close()
    again = benches(max_message_bytes=1_000, now_ms=bench.now_ms)
    producer(again)
    rounds(again)
    assert [one.message.body for one in asked(again)] == [b"small"]
    assert again.runtime()["cometmqTransactionsGivenUp"] == "1"


def test_a_clock_that_is_set_back_does_not_stop_the_checks(bench: Bench) -> None:
    producer(bench)
    begin(bench)
    rounds(bench)
    assert len(asked(bench)) == 1
    bench.now_ms -= 3_600_000
    bench.sent()
    bench.advance(2 * ROUND_MS)  # nothing younger than the last store time is looked at
    bench.advance(3_600_000)
    producer(bench)
    rounds(bench)
    assert asked(bench)


# ----------------------------------------------------------------------------------------- restarts


PLAN = {
    b"commit": COMMIT,
    b"rollback": ROLLBACK,
    b"late commit": COMMIT,
    b"late rollback": ROLLBACK,
}


def carry_on(bench: Bench) -> None:
    """A producer that knows the outcomes answers check-backs until nothing is open."""
    for _ in range(20):
        producer(bench)
        rounds(bench)
        for one in asked(bench):
            end(bench, one.pair, PLAN[one.message.body], fromTransactionCheck=True)
        if bench.runtime()["cometmqHalfMessages"] == "0":
            return
    raise AssertionError("still open")


def check_outcome(bench: Bench) -> None:
    """What the plan wants committed is there once if its half was stored; the rest is not."""
    halves = set(bodies(bench, HALF))
    wanted = sorted(body for body in halves if PLAN[body] == COMMIT)
    assert sorted(bodies(bench)) == wanted


def story(bench: Bench, moments: list[int]) -> None:
    """A little of everything; `moments` gets the log's end after each step."""
    bench.create_topic(queues=1)
    producer(bench)

    def note() -> None:
        moments.append(bench.store.max_log_offset)

    note()
    pairs = {}
    for body in PLAN:
        pairs[body] = begin(bench, body, key=body.decode().replace(" ", "-"))
        note()
    for body in (b"rollback", b"commit"):
        ended(bench, pairs[body], PLAN[body])
        note()
    rounds(bench)
    note()
    first = {one.message.body: one.pair for one in asked(bench)}
    ended(bench, pairs[b"late rollback"], ROLLBACK)
    note()
    rounds(bench)
    note()
    ended(bench, first[b"late commit"], COMMIT, fromTransactionCheck=True)
    note()
    rounds(bench)
    note()


def record_ends(bench: Bench) -> list[int]:
    """Where each record of the log ends."""
    found, at = [], 0
    while at < bench.store.max_log_offset:
        raw = bench.store.record_at(at)
        assert raw is not None, at
        at += len(raw)
        found.append(at)
    return found


def cut(folder: Path, at: int) -> None:
    """What a power loss leaves when nothing after `at` had reached the disk."""
    (file,) = (folder / "commitlog").iterdir()
    content = bytearray(file.read_bytes())
    content[at:] = bytes(len(content) - at)
    file.write_bytes(content)


@pytest.mark.parametrize("is_gathered", [False, True])
def test_power_is_lost_after_any_record(
    benches: Benches, tmp_path: Path, is_gathered: bool
) -> None:
    settings = {"transaction_op_interval_ms": 3_000 if is_gathered else 0}
    bench = benches(**settings)
    bench.keeps_flushes = True
    story(bench, [])
    check_outcome(bench)
    for number, at in enumerate([0, *record_ends(bench)]):
        name = f"cut-{number}"
        shutil.copytree(tmp_path / "store", tmp_path / name)
        cut(tmp_path / name, at)
        again = benches(folder=name, now_ms=bench.now_ms + 1, **settings)
        assert again.store.max_log_offset == at
        carry_on(again)
        check_outcome(again)
        again.close()


@pytest.mark.parametrize("step", range(11))
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_the_broker_ends_after_any_step(
    benches: Benches, tmp_path: Path, step: int, how: str, is_gathered: bool
) -> None:
    settings = {"transaction_op_interval_ms": 3_000 if is_gathered else 0}
    bench = benches(**settings)

    class Ended(Exception):
        pass

    class Moments(list[int]):
        def append(self, moment: int) -> None:
            super().append(moment)
            if len(self) > step:
                raise Ended

    with contextlib.suppress(Ended):
        story(bench, Moments())
    if how == "killed":
        bench.crash()
    else:
        bench.stop()
        bench.tick()
        assert bench.broker.is_stopped
        bench.close()
    again = benches(now_ms=bench.now_ms + 1, **settings)
    carry_on(again)
    check_outcome(again)


def test_pairs_from_before_a_restart_are_still_good(benches: Benches) -> None:
    bench = benches()
    producer(bench)
    one, other, third = (begin(bench, body) for body in (b"1", b"2", b"3"))
    rounds(bench)
    copies = [ask.pair for ask in asked(bench)]
    ended(bench, third, ROLLBACK)
    bench.crash()
    again = benches(now_ms=bench.now_ms)
    ended(again, one)
    ended(again, copies[1], fromTransactionCheck=True)
    for pair in (one, other, third, *copies):
        assert end(again, pair, fromTransactionCheck=True).code == 1
    assert bodies(again) == [b"1", b"2"]


def test_after_a_crash_a_lost_transaction_is_not_mixed_up_with_the_next(
    benches: Benches, tmp_path: Path
) -> None:
    bench = benches()
    bench.keeps_flushes = True
    bench.create_topic()
    end_of_log = bench.store.max_log_offset
    lost = begin(bench, b"lost", key="LOST")
    bench.crash()
    cut(tmp_path / "store", end_of_log)
    again = benches(now_ms=bench.now_ms)
    other = begin(again, b"next", key="NEXT")
    assert other[:2] == lost[:2], "the same place"
    assert end(again, lost).code == 1
    ended(again, other, ROLLBACK)
    assert bodies(again) == []


def test_without_an_index_old_pairs_wait_for_the_check(benches: Benches) -> None:
    bench = benches(is_index_enabled=False)
    producer(bench)
    one = begin(bench)
    rounds(bench)
    (ask,) = asked(bench)
    assert end(bench, one).code == 1
    ended(bench, ask.pair, fromTransactionCheck=True)
    assert bodies(bench) == [b"paid"]


# -------------------------------------------------------------------------- what RocketMQ leaves us


def put(bench: Bench, topic: str, body: bytes, table: dict[str, str], **more: Any) -> Sent:
    message = NewMessage(topic, 0, body, properties.build(table), **more)
    at = bench.broker.put(message, bench.now_ms, is_due=True)
    return Sent(at.log_offset, at.queue_offset, table.get("UNIQ_KEY", ""))


def apache_half(bench: Bench, key: str, **more: str) -> Sent:
    props = half_props(key, __transactionId__=key, REAL_TOPIC="T", REAL_QID="0", **more)
    return put(bench, HALF, key.encode(), props, born_ms=bench.now_ms)


def test_both_forms_of_op_records_are_read(benches: Benches) -> None:
    bench = benches()
    halves = [apache_half(bench, f"K{n}") for n in range(5)]
    put(bench, OP, b"0,2,", {"TAGS": "d"})  # RocketMQ 5
    put(bench, OP, b"3", {"TAGS": "d"})  # 4.9
    put(bench, OP, b"1", {"TAGS": "x"})
    put(bench, OP, b"x,99999999999,-1,, 7 ,1e3", {"TAGS": "d"})
    put(bench, OP, b"", {"TAGS": "d"})
    bench.close()
    again = benches(now_ms=bench.now_ms)
    producer(again)
    assert [end(again, one, ROLLBACK).code for one in (halves[0], *halves[2:4])] == [1, 1, 1]
    rounds(again)
    assert [one.message.body for one in asked(again)] == [b"K1", b"K4"]


def test_a_commit_whose_op_record_was_lost_is_not_repeated(benches: Benches) -> None:
    bench = benches(transaction_op_interval_ms=3_000)
    one = begin(bench, key="K")
    delayed = begin(bench, b"delayed", key="D", props={"DELAY": "3"})
    open_one = begin(bench, b"open", key="O")
    ended(bench, one)
    ended(bench, delayed)
    bench.crash()
    again = benches(now_ms=bench.now_ms)
    producer(again)
    assert again.runtime()["cometmqHalfMessages"] == "3"
    assert end(again, one, fromTransactionCheck=True).code == 1
    rounds(again)
    assert [ask.message.body for ask in asked(again)] == [b"open"]
    assert again.runtime()["cometmqTransactionEndsHealed"] == "2"
    assert bodies(again) == [b"paid", b"delayed"]
    ended(again, open_one)


def test_a_copy_that_rocketmq_made_has_no_link_to_the_first(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    first = apache_half(bench, "K")
    copy = apache_half(bench, "K", TRANSACTION_CHECK_TIMES="1")
    bench.broker.offsets.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 1, bench.now_ms, "test")
    bench.stop()
    bench.close()
    again = benches(now_ms=bench.now_ms)
    producer(again)
    assert end(again, first).code == 1, "the check-back decides"
    rounds(again)
    (ask,) = asked(again)
    assert properties.get(ask.message.properties, "TRANSACTION_CHECK_TIMES") == "2"
    ended(again, copy)
    assert end(again, ask.pair).code == 1
    assert bodies(again) == [b"K"]


def test_a_copy_that_rocketmq_made_of_a_committed_half_is_not_delivered(benches: Benches) -> None:
    bench = benches()
    first = apache_half(bench, "K")
    apache_half(bench, "K", TRANSACTION_CHECK_TIMES="1")  # before it had noted the end
    ended(bench, first)
    bench.close()
    again = benches(now_ms=bench.now_ms)
    producer(again)
    rounds(again)
    assert asked(again) == [] and bodies(again) == [b"K"]
    assert again.runtime()["cometmqHalfMessages"] == "0"


def test_expired_halves_are_passed_over(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        begin(bench)
    monkeypatch.setattr(bench.store, "min_offset", lambda topic, queue: 2 * (topic == HALF))
    producer(bench)
    rounds(bench)
    assert len(asked(bench)) == 1 and "expired" in caplog.text


# ------------------------------------------------------------------------------------------- marks


def test_marks_are_a_set() -> None:
    marks, plain = Marks(1003), set()
    for n in range(2_000):
        number = marks.base + n * 7919 % 3001
        marks.mark(number)
        plain.add(number)
        if n % 100 == 99:
            base = marks.base + 31
            marks.forget_below(base)
            plain = {one for one in plain if one >= base}
            assert marks.count == len(plain)
            for at in range(base, base + 60):
                assert marks.has(at) == (at in plain)
                clear = next(one for one in range(at, at + 9_000) if one not in plain)
                assert marks.next_clear(at, 10_000) == clear
                assert marks.next_clear(at, at + 2) == min(clear, at + 2)
    marks.forget_below(10**9)
    assert marks.count == 0 and not marks.has(10**9)
    marks.mark(10**9 + 1)
    assert marks.has(10**9 + 1) and marks.next_clear(10**9 + 1, 10**9 + 9) == 10**9 + 2


def test_marks_pass_over_many_at_once() -> None:
    marks = Marks(5)
    for number in range(5, 100_000):
        marks.mark(number)
    assert marks.next_clear(5, 200_000) == 100_000
    assert marks.next_clear(5, 90_000) == 90_000


def test_a_half_is_left_behind_when_its_commit_is_durable(benches: Benches) -> None:
    """Left behind before, a power loss takes the commit, and nobody asks about the half again."""
    bench = benches(
        flush="SYNC_FLUSH", transaction_timeout_ms=100, transaction_check_interval_ms=100
    )
    one = begin(bench, key="K")
    bench.keeps_flushes = True
    bench.turn((bench.conn, bench.frame(C.END_TRANSACTION, end_ext(one), flag=FLAG_ONEWAY)))
    bench.advance(1_000)
    assert bench.broker.half.offset == 1
    assert bench.broker.offsets.get(HALF, half_module.GROUP, 0) in (None, 0)
    bench.flush()
    bench.advance(200)
    assert bench.broker.offsets.get(HALF, half_module.GROUP, 0) == 1


def test_ends_are_left_behind_as_fast_as_they_come(bench: Bench) -> None:
    """A start reads all op records from there on: a backlog of them would be a slow start."""
    count = 3 * half_module.MOST_OPS_AT_ONCE
    for _ in range(count):
        ended(bench, begin(bench))
    assert bench.store.max_offset(OP, 0) == count
    bench.advance(ROUND_MS)
    bench.advance(4 * half_module.OPS_PAUSE_MS)
    assert bench.broker.half._op_offset == count
    assert bench.broker.offsets.get(OP, half_module.GROUP, 0) == count
