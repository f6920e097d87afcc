"""Time to live: nobody gets a message after its time, everybody goes on behind it."""

from __future__ import annotations

import pytest

from cometmq.broker import ttl
from cometmq.message import NewMessage
from cometmq.wire import fastjson, properties, record
from cometmq.wire.codes import RequestCode, ResponseCode, SysFlag

from .conftest import Benches
from .harness import Bench, bodies_of, offsets_of

YEAR_MS = 365 * 86_400_000


def brief(bench: Bench, body: bytes = b"brief", ttl_ms: object = 1_000, **more: str) -> None:
    bench.sent(body=body, props={"TTL_MS": str(ttl_ms), "UNIQ_KEY": body.decode(), **more})


def seen(bench: Bench, topic: str = "T", queue: int = 0, **how: object) -> list[bytes]:
    answer = bench.pull(topic, queue, **how)
    return bodies_of(answer) if answer.code == 0 else []


def back(bench: Bench, log_offset: int, **more: object) -> None:
    ext = {"offset": log_offset, "group": "G", "delayLevel": 0, "originTopic": "T", **more}
    answer = bench.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)
    assert answer.code == 0, answer.remark


def told(bench: Bench, topic: str = "T", queue: int = 0, **how: object) -> list[dict[str, str]]:
    answer = bench.pull(topic, queue, **how)
    return [properties.parse(one.properties) for one in record.decode_all(answer.body)]


# ----------------------------------------------------------------------------------------- reading


def test_a_message_is_there_until_its_time_is_over_and_not_after(bench: Bench) -> None:
    bench.create_topic()
    brief(bench, ttl_ms=1_000)
    bench.sent(body=b"lasting")
    bench.now_ms += 999
    assert seen(bench) == [b"brief", b"lasting"]
    bench.now_ms += 1
    answer = bench.pull()
    assert bodies_of(answer) == [b"lasting"]
    assert offsets_of(answer) == (2, 0, 2)


def test_a_queue_of_expired_messages_moves_its_reader_on(bench: Bench) -> None:
    bench.create_topic()
    for n in range(300):
        brief(bench, b"%d" % n)
    bench.now_ms += 1_000
    answer = bench.pull()
    assert (answer.code, offsets_of(answer)) == (ResponseCode.PULL_RETRY_IMMEDIATELY, (300, 0, 300))
    opaque = bench.hold(offset=300)
    bench.sent(body=b"new")
    woken = bench.answer(opaque)
    assert woken is not None and bodies_of(woken) == [b"new"]


def test_one_pull_leaps_so_far_and_no_farther(bench: Bench) -> None:
    bench.create_topic()
    for n in range(200):
        brief(bench, b"%d" % n)
    bench.sent(body=b"behind them")
    bench.now_ms += 1_000
    assert seen(bench, count=1) == [], "64 leaps of one message each"
    assert offsets_of(bench.pull(count=1))[0] == 64
    assert seen(bench, count=32) == [b"behind them"]


def test_tags_and_expiry_both_count(bench: Bench) -> None:
    bench.create_topic()
    brief(bench, b"a-brief", TAGS="a")
    bench.sent(body=b"b-lasting", props={"TAGS": "b"})
    bench.sent(body=b"a-lasting", props={"TAGS": "a"})
    assert seen(bench, tags="a") == [b"a-brief", b"a-lasting"]
    bench.now_ms += 1_000
    assert seen(bench, tags="a") == [b"a-lasting"]


def test_operators_still_see_what_has_expired(bench: Bench) -> None:
    bench.create_topic()
    brief(bench)
    bench.now_ms += 5_000
    assert seen(bench) == []
    assert seen(bench, group="TOOLS_CONSUMER") == [b"brief"]
    asked = bench.ask(RequestCode.PULL_MESSAGE, bench.pull_ext() | {"withExpired": "true"})
    assert bodies_of(asked) == [b"brief"], "whoever must read the same range twice may ask for it"
    ext = {"topic": "T", "key": "brief", "maxNum": 8, "beginTimestamp": 0, "endTimestamp": 2**62}
    assert bodies_of(bench.ask(RequestCode.QUERY_MESSAGE, ext)) == [b"brief"]


def test_what_was_kept_back_is_counted_by_topic_and_in_all(bench: Bench) -> None:
    bench.create_topic()
    bench.create_topic("U")
    brief(bench)
    brief(bench)
    bench.sent("U", props={"TTL_MS": "1"})
    bench.now_ms += 1_000
    seen(bench)
    seen(bench, "U")
    assert bench.runtime()["cometmqExpiredSkipped"] == "3"
    ext = {"statsName": "TOPIC_EXPIRED_NUMS", "statsKey": "T"}
    assert bench.json(RequestCode.VIEW_BROKER_STATS_DATA, ext)["statsDay"]["sum"] == 2


def test_a_restart_forgets_no_ones_time(benches: Benches) -> None:
    first = benches()
    first.create_topic()
    brief(first)
    first.advance(10)
    first.close()
    second = benches(now_ms=first.now_ms)
    assert seen(second) == [b"brief"]
    second.now_ms += 1_000
    assert seen(second) == []


# ----------------------------------------------------------------------------------------- sending


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "٣", " 1", "1e3", str(10 * YEAR_MS + 1)])
def test_a_ttl_that_makes_no_sense_is_refused(bench: Bench, value: str) -> None:
    bench.create_topic()
    answer = bench.send(props={"TTL_MS": value})
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert answer.remark is not None and "TTL_MS" in answer.remark and value in answer.remark
    piece = record.Piece(0, b"x", properties.build({"TTL_MS": value}))
    answer = bench.send(body=record.join_batch([piece]), code=320, batch=True)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert bench.store.max_log_offset == 0
    assert bench.send("unknown", props={"TTL_MS": value}).code == ResponseCode.MESSAGE_ILLEGAL
    assert bench.broker.topics.get("unknown") is None, "no topic is made for it"


def test_ten_years_are_fine_and_properties_must_leave_room(bench: Bench) -> None:
    bench.create_topic()
    brief(bench, ttl_ms=10 * YEAR_MS)
    answer = bench.send(props={"TTL_MS": "5", "p": "x" * 32_000})
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL


def test_messages_of_a_batch_have_their_own_time(bench: Bench) -> None:
    bench.create_topic()
    texts = ({"TTL_MS": "10"}, {}, {"TTL_MS": "99"})
    pieces = [record.Piece(0, b"%d" % n, properties.build(one)) for n, one in enumerate(texts)]
    assert bench.send(body=record.join_batch(pieces), code=320, batch=True).code == 0
    bench.now_ms += 10
    assert seen(bench) == [b"1", b"2"]


def test_an_end_that_a_client_brings_along_does_not_count(bench: Bench) -> None:
    bench.create_topic()
    brief(bench, b"passed on", TTL_UNTIL="5")
    assert told(bench)[0]["TTL_UNTIL"] == str(bench.now_ms + 1_000)
    bench.sent(queue=1, props={"TTL_UNTIL": "5"})
    assert len(told(bench, queue=1)) == 1, "without TTL_MS it is a property like any other"


# ------------------------------------------------------------------------ messages that come later


def test_a_delayed_message_lives_from_its_delivery(bench: Bench) -> None:
    bench.create_topic()
    brief(bench, b"later", DELAY="2")
    bench.advance(5_000)
    assert seen(bench) == [b"later"], "it waited for longer than it lives"
    bench.advance(999)
    assert seen(bench) == [b"later"]
    bench.advance(1)
    assert seen(bench) == []


def test_a_timed_message_lives_from_its_delivery(bench: Bench) -> None:
    bench.create_topic()
    brief(bench, b"timed", TIMER_DELAY_MS="10000")
    bench.advance(10_500)
    while not seen(bench):
        bench.advance(100)
        assert bench.now_ms < 1_700_000_013_000
    bench.advance(1_000)
    assert seen(bench) == []


def test_a_transactional_message_lives_from_its_commit(bench: Bench) -> None:
    bench.create_topic()
    half = bench.sent(
        body=b"half", sys_flag=4, props={"TRAN_MSG": "true", "PGROUP": "pg", "TTL_MS": "1000"}
    )
    bench.advance(5_000)
    ext = {
        "producerGroup": "pg",
        "tranStateTableOffset": half.ext["queueOffset"],
        "commitLogOffset": 0,
        "commitOrRollback": SysFlag.COMMIT,
        "msgId": half.ext["transactionId"],
    }
    assert bench.ask(RequestCode.END_TRANSACTION, ext).code == 0
    assert seen(bench) == [b"half"]
    bench.advance(1_000)
    assert seen(bench) == []


# ----------------------------------------------------------------------------------------- retries


def test_a_retry_keeps_the_time_of_the_first(bench: Bench) -> None:
    bench.create_topic()
    bench.beat()
    brief(bench, ttl_ms=20_000)
    back(bench, 0)
    bench.advance(10_000)
    assert seen(bench, "%RETRY%G") == [b"brief"]
    bench.advance(9_999)
    assert seen(bench, "%RETRY%G") == [b"brief"]
    bench.advance(1)
    assert seen(bench, "%RETRY%G") == []


def test_what_has_expired_is_not_tried_again(bench: Bench) -> None:
    bench.create_topic()
    bench.beat()
    brief(bench)
    bench.advance(1_000)
    end = bench.store.max_log_offset
    back(bench, 0)
    assert bench.store.max_log_offset == end
    assert bench.runtime()["cometmqExpiredSkipped"] == "1"


def test_an_end_of_a_clients_own_making_stops_no_retry(bench: Bench) -> None:
    bench.create_topic()
    bench.beat()
    bench.sent(props={"TTL_UNTIL": "5"})
    end = bench.store.max_log_offset
    back(bench, 0)
    assert bench.store.max_log_offset > end


def test_a_consumer_that_resends_by_itself_wins_no_time(bench: Bench) -> None:
    bench.create_topic()
    bench.beat()
    brief(bench)
    bench.advance(600)
    (table,) = told(bench)
    bench.sent("%RETRY%G", body=b"again", props=table, reconsume=1)
    assert seen(bench, "%RETRY%G") == [b"again"]
    bench.advance(400)
    assert seen(bench, "%RETRY%G") == []


def test_dead_letters_live_on(bench: Bench) -> None:
    bench.create_topic()
    bench.beat()
    brief(bench)
    back(bench, 0, delayLevel=-1)
    bench.advance(100_000)
    (table,) = told(bench, "%DLQ%G")
    assert "TTL_MS" not in table and "TTL_UNTIL" not in table


# ------------------------------------------------------------------------------ moved elsewhere


def moving(bench: Bench, queues: int = 1) -> None:
    assert bench.create_topic("T", queues, attributes="+expired.topic=old").code == 0


def moved(bench: Bench) -> list[bytes]:
    found: list[bytes] = []
    topic = bench.broker.topics.get("old")
    for queue in range(0 if topic is None else topic.readQueueNums):
        found += seen(bench, "old", queue)
    return found


def test_an_expired_message_goes_to_the_topic_of_the_attribute_once(bench: Bench) -> None:
    moving(bench)
    bench.sent(body=b"lasting")
    brief(bench, b"second", 20_000, TAGS="t")
    brief(bench, b"first", 10_000)
    bench.advance(10_000)
    for group in "GH":
        assert seen(bench, group=group) == [b"lasting", b"second"]
    bench.advance(400)
    assert moved(bench) == [b"first"]
    bench.advance(10_000)
    assert moved(bench) == [b"first", b"second"], "by their time, not by their place"
    bench.advance(100_000)
    assert moved(bench) == [b"first", b"second"]
    table = told(bench, "old")[1]
    assert table["EXPIRED_ORIGIN_TOPIC"] == "T" and table["EXPIRED_ORIGIN_QUEUE"] == "0"
    assert table["EXPIRED_ORIGIN_OFFSET"] == "1" and table["EXPIRED_TTL_MS"] == "20000"
    assert table["TAGS"] == "t" and table["UNIQ_KEY"] == "second"
    assert "TTL_MS" not in table, "it lives on"
    assert bench.runtime()["cometmqExpiredMoved"] == "2"


@pytest.mark.parametrize("how", ["stopped", "crashed"])
@pytest.mark.parametrize("after_ms", [0, 300, 600, 3_000])
def test_a_restart_moves_each_once_all_the_same(benches: Benches, how: str, after_ms: int) -> None:
    first = benches()
    moving(first)
    for n in range(5):
        brief(first, b"%d" % n, 1_000 + 200 * n)
    first.advance(1_300)
    first.advance(after_ms)
    if how == "stopped":
        first.stop()
        while not first.broker.is_stopped:
            first.advance(100)
        first.close()
    else:
        first.crash()
    second = benches(now_ms=first.now_ms)
    second.advance(5_000)
    assert sorted(moved(second)) == [b"0", b"1", b"2", b"3", b"4"]


def test_the_file_is_never_ahead_of_the_log(benches: Benches) -> None:
    bench = benches(flush_interval_ms=60_000, flush_thorough_ms=60_000)
    moving(bench)
    brief(bench)
    bench.keeps_flushes = True
    bench.advance(10_000)
    assert bench.broker.expired.moved == 1
    noted = [one for one in bench.saved if one.name == "config/expiredOffset.json"]
    assert all(b'"at":1' not in one.content for one in noted)


def test_the_attribute_must_name_another_ordinary_topic(bench: Bench) -> None:
    for target in ("T", "SCHEDULE_TOPIC_XXXX", "a/b", "%RETRY%G", ""):
        answer = bench.create_topic("T", attributes=f"+expired.topic={target}")
        assert answer.code == ResponseCode.INVALID_PARAMETER, target
    assert bench.broker.topics.get("T") is None


def test_a_topic_that_loses_the_attribute_keeps_its_messages(bench: Bench) -> None:
    moving(bench)
    brief(bench)
    bench.advance(500)
    bench.create_topic("T", 1, attributes="-expired.topic")
    bench.advance(10_000)
    assert bench.broker.expired.moved == 0
    moving(bench)
    bench.advance(1_000)
    assert moved(bench) == [b"brief"], "and what has expired by then goes, too"


def test_many_that_wait_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.broker.expired.MOST_AHEAD", 3)
    moving(bench)
    for n in range(10):
        brief(bench, b"%d" % n, 1_000 + n)
    bench.advance(500)
    assert len(bench.broker.expired._heap) == 3
    bench.advance(5_000)
    assert moved(bench) == [b"%d" % n for n in range(10)]


def test_a_full_store_is_waited_for(bench: Bench) -> None:
    moving(bench)
    brief(bench)
    bench.files.ratio = 0.99
    bench.store.clean(bench.now_ms)
    bench.advance(10_000)
    assert moved(bench) == []
    bench.files.ratio = 0.10
    bench.store.clean(bench.now_ms)
    bench.advance(2_000)
    assert moved(bench) == [b"brief"]


def test_a_deleted_topic_is_forgotten(bench: Bench) -> None:
    moving(bench)
    brief(bench)
    bench.advance(15_000)
    assert b'"at":1' in (bench.files.read("config/expiredOffset.json") or b"")
    bench.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    bench.tick()
    stored = fastjson.loads(bench.files.read("config/expiredOffset.json") or b"")
    assert stored == {}
    moving(bench)
    brief(bench, b"anew")
    bench.advance(3_000)
    assert moved(bench) == [b"brief", b"anew"]


def test_stamp_leaves_a_text_alone_that_has_no_room() -> None:
    text = properties.build({"TTL_MS": "5", "p": "x" * 32_752})
    message = NewMessage("T", 0, b"", properties=text)
    ttl.stamp(message, 1)
    assert (message.properties, message.sys_flag) == (text, 0)
