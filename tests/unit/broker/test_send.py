"""Sends: what is answered, what is stored, and every reason to refuse one."""

from __future__ import annotations

import pytest

from cometmq.wire import message_id, properties, record
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.codes import SysFlag
from cometmq.wire.frame import Frame
from cometmq.wire.record import Piece, join_batch

from .conftest import Benches
from .harness import HOST, NOW_MS, PORT, Bench, bodies_of


def stored(bench: Bench, topic: str = "T", queue: int = 0, offset: int = 0) -> record.StoredMessage:
    return record.decode(bench.pull(topic, queue, offset, count=1).body)


def stored_props(bench: Bench, queue: int = 0, offset: int = 0) -> dict[str, str]:
    return properties.parse(stored(bench, "T", queue, offset).properties)


# ---------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("code", [C.SEND_MESSAGE, C.SEND_MESSAGE_V2])
def test_both_header_forms_store_the_message(bench: Bench, code: int) -> None:
    answer = bench.sent(code=code, queue=2, props={"UNIQ_KEY": "U1", "TAGS": "a"}, flag=7)
    assert answer.remark is None
    assert answer.ext == {
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "msgId": "0A00000100002A9F0000000000000000",
        "queueId": "2",
        "queueOffset": "0",
        "transactionId": "U1",
    }
    message = stored(bench, queue=2)
    assert (message.body, message.flag, message.born_ms) == (b"hello", 7, NOW_MS - 5)
    assert message_id.unpack_host(message.store_host) == (HOST, PORT)
    assert message_id.unpack_host(message.born_host) == ("10.1.1.1", 50_001)


def test_offsets_count_per_queue(bench: Bench) -> None:
    assert [bench.sent(queue=q).ext["queueOffset"] for q in (0, 0, 1, 0)] == ["0", "1", "0", "2"]


def test_the_message_id_leads_back_to_the_message(bench: Bench) -> None:
    bench.sent(body=b"first")
    host, port, at = message_id.parse_offset_id(bench.sent(body=b"second").ext["msgId"])
    assert (host, port) == (HOST, PORT)
    answer = bench.ask(C.VIEW_MESSAGE_BY_ID, {"offset": at})
    assert record.decode(answer.body).body == b"second"


@pytest.mark.parametrize("serialize", [0, 1])
def test_the_answer_speaks_the_serialization_of_the_request(bench: Bench, serialize: int) -> None:
    answer = bench.sent(serialize=serialize)
    assert answer.serialize == serialize
    assert answer.ext["queueOffset"] == "0"


def test_a_negative_queue_takes_the_write_queues_in_turn(bench: Bench) -> None:
    bench.create_topic(readQueueNums=8, writeQueueNums=3)
    queues = [int(bench.sent(queue=-1).ext["queueId"]) for _ in range(6)]
    assert sorted(queues) == [0, 0, 1, 1, 2, 2]


def test_a_topic_without_write_queues_takes_no_message_for_any_queue(bench: Bench) -> None:
    bench.create_topic(readQueueNums=4, writeQueueNums=0)
    answer = bench.send(queue=-1)
    assert answer.code == 29
    assert "write queue" in (answer.remark or "")


def test_an_ipv6_sender_is_stored_as_such(bench: Bench) -> None:
    conn = bench.connect("2001:db8::7", 4711)
    bench.sent(conn=conn)
    message = stored(bench)
    assert message_id.unpack_host(message.born_host) == ("2001:db8::7", 4711)
    assert message.sys_flag & SysFlag.BORN_HOST_V6


def test_a_oneway_send_is_stored_and_not_answered(bench: Bench) -> None:
    opaque = bench.post_send(oneway=True)
    assert bench.answer(opaque) is None
    assert bodies_of(bench.pull()) == [b"hello"]


def test_a_oneway_send_that_is_refused_is_not_answered_either(bench: Bench) -> None:
    assert bench.answer(bench.post_send("a/b", oneway=True)) is None
    assert bench.broker.stats.counters.put_failed == 1


def test_reconsume_times_are_stored(bench: Bench) -> None:
    bench.sent(reconsume=3)
    assert stored(bench).reconsume_times == 3


def test_the_write_permission_of_the_topic_is_not_asked(bench: Bench) -> None:
    bench.create_topic(perm=4)
    assert bench.send().code == 0


# ------------------------------------------------------------------------------------- properties


def test_region_trace_and_cluster_are_added(benches: Benches) -> None:
    bench = benches(cluster="C9", region="R9", is_trace_on=False)
    answer = bench.sent(props={"UNIQ_KEY": "U", "a": "b"})
    assert (answer.ext["MSG_REGION"], answer.ext["TRACE_ON"]) == ("R9", "false")
    assert stored_props(bench) == {
        "UNIQ_KEY": "U",
        "a": "b",
        "MSG_REGION": "R9",
        "TRACE_ON": "false",
        "CLUSTER": "C9",
    }


def test_what_a_sender_says_about_reserved_properties_does_not_count(bench: Bench) -> None:
    bench.sent(
        props={"MSG_REGION": "x", "TRACE_ON": "no", "CLUSTER": "y", "POP_CK": "1 2 3", "a": "b"}
    )
    found = stored_props(bench)
    assert (found["MSG_REGION"], found["TRACE_ON"]) == ("DefaultRegion", "true")
    assert (found["CLUSTER"], found["a"]) == ("DefaultCluster", "b")
    assert "POP_CK" not in found


def test_a_missing_unique_key_is_made_and_told(bench: Bench) -> None:
    first, second = bench.sent().ext["transactionId"], bench.sent().ext["transactionId"]
    assert first != second
    assert len(bytes.fromhex(first)) == 16 and first == first.upper()
    assert stored_props(bench, offset=0)["UNIQ_KEY"] == first
    assert stored_props(bench, offset=1)["UNIQ_KEY"] == second


def test_a_missing_trailing_separator_is_put_right(bench: Bench) -> None:
    bench.sent(props="a\x01b\x02UNIQ_KEY\x01U")
    found = stored_props(bench)
    assert (found["a"], found["UNIQ_KEY"], found["CLUSTER"]) == ("b", "U", "DefaultCluster")


def test_no_properties_at_all_are_fine(bench: Bench) -> None:
    bench.sent(props=None)
    assert set(stored_props(bench)) == {"UNIQ_KEY", "MSG_REGION", "TRACE_ON", "CLUSTER"}


# --------------------------------------------------------------------------------------- refusals


def refused(bench: Bench, answer: Frame, code: int, *words: str) -> None:
    assert answer.code == code, answer.remark
    assert answer.remark is not None
    for word in words:
        assert word in answer.remark
    assert answer.ext == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert bench.store.max_log_offset == 0, "a refused send was stored"
    assert bench.broker.stats.counters.put_failed == 1


def test_sends_before_the_start_time_are_refused(benches: Benches) -> None:
    bench = benches(accept_sends_from_ms=NOW_MS + 1)
    refused(bench, bench.send(), 1, "startAcceptSendRequestTimeStamp", str(NOW_MS + 1))
    bench.advance(1)
    assert bench.send().code == 0


def test_an_ordered_topic_needs_a_writable_broker(benches: Benches) -> None:
    bench = benches(permission=4)
    bench.create_topic(order=True)
    refused(bench, bench.send(), 16, "brokerPermission=4", "ordered")


def test_other_topics_do_not_need_a_writable_broker(benches: Benches) -> None:
    bench = benches(permission=4)
    bench.create_topic()
    assert bench.send().code == 0


@pytest.mark.parametrize(
    "topic",
    ["", " ", "../../x", "a/b", "a.b", "a b", "t\x00", "ü", "T" * 128, "%RETRY%" + "g" * 249],
)
def test_bad_topic_names_are_refused(bench: Bench, topic: str) -> None:
    before = bench.state()
    refused(bench, bench.send(topic), 29, "topic name")
    assert bench.state() == before


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    ],
)
def test_reserved_topics_are_refused(bench: Bench, topic: str) -> None:
    refused(bench, bench.send(topic), 16, topic)


def test_an_unknown_topic_without_auto_creation_is_refused(benches: Benches) -> None:
    bench = benches(is_topic_auto_created=False)
    refused(bench, bench.send(), 17, "'T'", "autoCreateTopicEnable")


def test_auto_creation_switched_off_in_the_file_holds_although_the_template_was_saved(
    benches: Benches,
) -> None:
    benches().close()
    bench = benches(is_topic_auto_created=False)
    assert bench.broker.topics.get("TBW102") is not None
    refused(bench, bench.send(), 17, "autoCreateTopicEnable")


def test_auto_creation_can_be_switched_off_while_running(bench: Bench) -> None:
    bench.ask(C.UPDATE_BROKER_CONFIG, None, b"autoCreateTopicEnable=false")
    refused(bench, bench.send(), 17, "autoCreateTopicEnable")


@pytest.mark.parametrize("template", ["NoSuch", "BenchmarkTest", ""])
def test_a_template_that_can_not_be_inherited_makes_no_topic(bench: Bench, template: str) -> None:
    refused(bench, bench.send(template=template), 17, f"template {template!r}")


@pytest.mark.parametrize("queues", [0, -1])
def test_no_topic_is_made_without_queues(bench: Bench, queues: int) -> None:
    refused(bench, bench.send(queues=queues), 17)


def test_a_queue_beyond_both_counts_is_refused(bench: Bench) -> None:
    bench.create_topic(readQueueNums=2, writeQueueNums=4)
    assert bench.sent(queue=3).ext["queueId"] == "3"
    answer = bench.send(queue=4)
    assert answer.code == 29
    assert "queue 4" in str(answer.remark) and "4 write queues" in str(answer.remark)


@pytest.mark.parametrize("exists", [True, False])
def test_the_retry_topic_of_an_unknown_group_is_refused(bench: Bench, exists: bool) -> None:
    if exists:
        bench.create_topic("%RETRY%nobody", 1)
    refused(bench, bench.send("%RETRY%nobody"), 26, "'nobody'")


def test_a_retry_topic_of_a_known_group_is_made_without_auto_creation(benches: Benches) -> None:
    bench = benches(is_topic_auto_created=False)
    assert bench.send("%RETRY%TOOLS_CONSUMER").code == 0
    topic = bench.broker.topics.get("%RETRY%TOOLS_CONSUMER")
    assert topic is not None
    assert (topic.readQueueNums, topic.writeQueueNums, topic.perm) == (1, 1, 6)


def test_a_send_refused_for_its_queue_makes_no_topic(bench: Bench) -> None:
    before = bench.state()
    refused(bench, bench.send(queue=4, queues=4), 29, "4 write queues")
    assert bench.state() == before


def test_a_send_refused_for_a_full_disk_makes_no_topic(benches: Benches) -> None:
    bench = benches(is_quiet=False)
    bench.files.ratio = 0.95
    bench.advance(11_000)
    before = bench.state()
    refused(bench, bench.send(), 14, "disk is full")
    assert bench.state() == before


def test_a_body_at_the_limit_is_stored_and_one_byte_more_refused(benches: Benches) -> None:
    bench = benches(max_message_bytes=1000)
    answer = bench.send(body=b"x" * 1001)
    refused(bench, answer, 13, "1001", "1000", "maxMessageSize")
    assert bench.send(body=b"x" * 1000).code == 0


def test_properties_above_the_limit_are_refused(bench: Bench) -> None:
    refused(bench, bench.send(props={"a": "x" * 32766}), 13, "32767")


def test_properties_that_pass_the_limit_with_the_brokers_own_are_refused(bench: Bench) -> None:
    refused(bench, bench.send(props={"a": "x" * 32764}), 13, "32767")


@pytest.mark.parametrize("bits", [SysFlag.PREPARED, SysFlag.ROLLBACK])
def test_a_flag_that_would_hide_the_message_for_ever_is_refused(bench: Bench, bits: int) -> None:
    refused(bench, bench.send(sys_flag=bits), 16, "transactional")


@pytest.mark.parametrize(
    ("props", "kept_in"),
    [
        ({"DELAY": "3"}, ("SCHEDULE_TOPIC_XXXX", 2)),
        ({"TIMER_DELAY_SEC": "5"}, ("rmq_sys_wheel_timer", 0)),
        ({"TIMER_DELAY_MS": "5"}, ("rmq_sys_wheel_timer", 0)),
        ({"TIMER_DELIVER_MS": "1700000060000"}, ("rmq_sys_wheel_timer", 0)),
    ],
)
def test_messages_for_later_are_kept_elsewhere(
    bench: Bench, props: dict[str, str], kept_in: tuple[str, int]
) -> None:
    answer = bench.sent(queue=1, props=props)
    assert answer.ext["queueId"] == "1"
    assert bench.store.max_offset(*kept_in) == 1
    assert bench.store.max_offset("T", 1) == 0


def test_delay_zero_is_an_ordinary_message(bench: Bench) -> None:
    assert bench.send(props={"DELAY": "0"}).code == 0


@pytest.mark.parametrize("bit", [SysFlag.NEED_UNWRAP, SysFlag.INNER_BATCH])
def test_inner_batches_are_refused(bench: Bench, bit: int) -> None:
    refused(bench, bench.send(sys_flag=bit), 13, "inner batches")


def test_a_full_disk_refuses_sends_until_there_is_room(benches: Benches) -> None:
    bench = benches()
    bench.create_topic()
    bench.files.ratio = 0.95
    bench.advance(11_000)
    answer = bench.send()
    refused(bench, answer, 14, "0.95", "0.90")
    bench.files.ratio = 0.86
    bench.advance(11_000)
    assert bench.send().code == 14, "between the two limits it stays closed"
    bench.files.ratio = 0.80
    bench.advance(11_000)
    assert bench.send().code == 0


@pytest.mark.parametrize("missing", ["b", "e", "g"])
def test_a_missing_header_field_is_named(bench: Bench, missing: str) -> None:
    ext = bench.send_ext()
    del ext[missing]
    answer = bench.ask(C.SEND_MESSAGE_V2, ext, b"x")
    assert answer.code == 29
    assert repr(missing) in str(answer.remark)


@pytest.mark.parametrize("value", ["abc", "1.5", str(2**31), "9" * 30])
def test_a_number_that_is_none_is_refused(bench: Bench, value: str) -> None:
    answer = bench.ask(C.SEND_MESSAGE_V2, bench.send_ext() | {"e": value}, b"x")
    assert answer.code == 29
    assert "'e' (queueId)" in str(answer.remark)


# ----------------------------------------------------------------------------------------- batches


def batch_body(*bodies: bytes, props: str = "") -> bytes:
    return join_batch(Piece(7, body, props) for body in bodies)


@pytest.mark.parametrize("code", [C.SEND_MESSAGE, C.SEND_MESSAGE_V2, C.SEND_BATCH_MESSAGE])
def test_the_flag_makes_a_batch_whatever_the_code(bench: Bench, code: int) -> None:
    bench.sent(queue=1)
    answer = bench.sent(
        body=batch_body(b"a", b"bb", b"ccc"),
        queue=1,
        code=code,
        batch=True,
        props={"UNIQ_KEY": "OUTER"},
    )
    ids = answer.ext["msgId"].split(",")
    assert (len(ids), answer.ext["queueId"], answer.ext["queueOffset"]) == (3, "1", "1")
    assert answer.ext["transactionId"] == "OUTER"
    messages = record.decode_all(bench.pull(queue=1, offset=1).body)
    assert [m.body for m in messages] == [b"a", b"bb", b"ccc"]
    assert [m.queue_offset for m in messages] == [1, 2, 3]
    assert [message_id.parse_offset_id(one)[2] for one in ids] == [m.log_offset for m in messages]
    assert {m.flag for m in messages} == {7}


def test_code_320_without_the_flag_is_one_message(bench: Bench) -> None:
    body = batch_body(b"a", b"b")
    bench.sent(body=body, code=C.SEND_BATCH_MESSAGE)
    assert bodies_of(bench.pull()) == [body]


def test_each_message_of_a_batch_gets_the_brokers_properties(bench: Bench) -> None:
    bench.sent(body=batch_body(b"a", b"b", props="k\x01v\x02CLUSTER\x01x"), batch=True)
    found = [properties.parse(m.properties) for m in record.decode_all(bench.pull("T", 0, 0).body)]
    assert [one["k"] for one in found] == ["v", "v"]
    assert {one["CLUSTER"] for one in found} == {"DefaultCluster"}
    assert len({one["UNIQ_KEY"] for one in found}) == 2


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (batch_body(b"a")[:-1], "lengths"),
        (batch_body(b"a") + b"\0\0", "ends inside"),
        (batch_body(b"a", props="DELAY\x013\x02"), "delayed"),
        (batch_body(b"a") + batch_body(b"b", props="TIMER_DELAY_MS\x011\x02"), "delayed"),
        (batch_body(b"x" * 3000), "maxMessageSize"),
        (batch_body(b"a", props="TRAN_MSG\x01true\x02"), "transactional"),
    ],
    ids=["empty", "cut", "tail", "delay", "timer", "size", "half"],
)
def test_a_bad_batch_is_refused_whole(benches: Benches, body: bytes, word: str) -> None:
    bench = benches(max_message_bytes=2000 if word == "maxMessageSize" else 100_000)
    before = bench.state()
    answer = bench.send(body=body, batch=True)
    refused(bench, answer, 13, word)
    assert bench.state() == before, "a refused batch made a topic"


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TRAN_MSG"])
def test_a_batch_as_a_whole_is_not_for_later_either(bench: Bench, name: str) -> None:
    bench.create_topic()
    for _ in range(3):  # whichever path it would take
        bench.sent(body=batch_body(b"a"), code=320, batch=True)
    before = bench.store.max_log_offset
    props = {name: "true" if name == "TRAN_MSG" else "1"}
    answer = bench.send(body=batch_body(b"a"), code=320, batch=True, props=props)
    assert answer.code == 13 and "batch" in str(answer.remark)
    assert bench.store.max_log_offset == before


def test_a_batch_whose_properties_pass_the_limit_with_the_brokers_own_is_refused(
    bench: Bench,
) -> None:
    answer = bench.send(body=batch_body(b"a", props="p\x01" + "x" * 32764), batch=True)
    refused(bench, answer, 13, "32767")


def test_a_transactional_batch_is_refused(bench: Bench) -> None:
    refused(bench, bench.send(body=batch_body(b"a"), batch=True, sys_flag=4), 13, "transactional")


def test_a_batch_to_a_retry_topic_is_refused(bench: Bench) -> None:
    answer = bench.send("%RETRY%TOOLS_CONSUMER", batch_body(b"a"), batch=True)
    refused(bench, answer, 13, "retry")


# ------------------------------------------------------------------------------------ flow control


def test_a_send_that_waited_too_long_is_refused_with_both_figures(bench: Bench) -> None:
    answer = bench.send(waited_ms=201)
    refused(bench, answer, 2, "[TIMEOUT_CLEAN_QUEUE]", "201 ms", "200 ms", "queue")
    assert bench.broker.stats.counters.busy_queue_wait == 1
    assert bench.runtime()["cometmqBusyByQueueWait"] == "1"


def test_a_send_that_waited_just_long_enough_is_taken(bench: Bench) -> None:
    assert bench.send(waited_ms=200).code == 0


def test_pulls_are_not_refused_for_waiting(bench: Bench) -> None:
    bench.sent()
    opaque = bench.post(C.PULL_MESSAGE, bench.pull_ext(), waited_ms=10_000)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0


def test_sends_behind_a_slow_append_are_refused_with_both_figures(bench: Bench) -> None:
    first = bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"slow")
    second = bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"behind")
    bench.turn((bench.conn, first), (bench.conn, second), stall_ms=1001)
    answers = [bench.answer(first.opaque), bench.answer(second.opaque)]
    assert answers[0] is not None and answers[0].code == 0
    assert answers[1] is not None and answers[1].code == 2
    for word in ("[PCBUSY_CLEAN_QUEUE]", "append", "1001 ms", "1000 ms"):
        assert word in str(answers[1].remark)
    assert bench.runtime()["cometmqBusyBySlowAppend"] == "1"
    assert bench.send().code == 0, "the next turn is a new one"


def test_a_stall_at_the_limit_is_not_slow(bench: Bench) -> None:
    frames = [bench.frame(C.SEND_MESSAGE_V2, bench.send_ext(), b"x") for _ in range(2)]
    bench.turn(*((bench.conn, frame) for frame in frames), stall_ms=1000)
    answer = bench.answer(frames[1].opaque)
    assert answer is not None and answer.code == 0


def test_flow_control_can_be_switched_off(benches: Benches) -> None:
    bench = benches(is_fast_failure_enabled=False)
    assert bench.send(waited_ms=60_000).code == 0
