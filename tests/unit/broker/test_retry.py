"""Send-back: retries with growing delays, then dead letters; limits by request and by group."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.message import StoredMessage
from cometmq.wire import properties, record
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from .conftest import Benches
from .harness import Bench

SCHEDULE, RETRY, DEAD = "SCHEDULE_TOPIC_XXXX", "%RETRY%G", "%DLQ%G"


@pytest.fixture
def ready(bench: Bench) -> Bench:
    """A topic T with one message, and the group G."""
    bench.create_topic()
    bench.beat()
    bench.sent(body=b"poison", props={"TAGS": "t", "KEYS": "k", "UNIQ_KEY": "U"})
    return bench


def back(bench: Bench, offset: int = 0, **fields: Any) -> Frame:
    ext = {"offset": offset, "group": "G", "delayLevel": 0, "originTopic": "T", **fields}
    return bench.ask(C.CONSUMER_SEND_MSG_BACK, ext)


def all_of(bench: Bench, topic: str, queue: int = 0) -> list[StoredMessage]:
    answer = bench.pull(topic, queue, group="reader")
    return record.decode_all(answer.body) if answer.code == 0 else []


def test_a_message_comes_back_later_with_its_count_and_its_past(ready: Bench) -> None:
    assert back(ready).code == 0
    assert all_of(ready, RETRY) == []
    ready.advance(10_000)  # level 3
    (again,) = all_of(ready, RETRY)
    told = properties.parse(again.properties)
    assert (again.body, again.reconsume_times) == (b"poison", 1)
    assert (told["RETRY_TOPIC"], told["TAGS"], told["KEYS"], told["UNIQ_KEY"]) == (
        "T",
        "t",
        "k",
        "U",
    )
    first_id = told["ORIGIN_MESSAGE_ID"]
    assert back(ready, again.log_offset, originTopic=RETRY).code == 0
    ready.advance(29_999)  # level 4: 30 s
    assert len(all_of(ready, RETRY)) == 1
    ready.advance(1)
    third = all_of(ready, RETRY)[1]
    told = properties.parse(third.properties)
    assert (third.reconsume_times, told["RETRY_TOPIC"]) == (2, "T")
    assert told["ORIGIN_MESSAGE_ID"] == first_id


def test_a_given_level_counts(ready: Bench) -> None:
    back(ready, delayLevel=1)
    ready.advance(1_000)
    assert len(all_of(ready, RETRY)) == 1


def test_after_the_last_try_it_is_a_dead_letter_once(ready: Bench) -> None:
    offset = 0
    for _ in range(2):
        assert back(ready, offset, delayLevel=1, maxReconsumeTimes=2).code == 0
        ready.advance(1_000)
        offset = all_of(ready, RETRY)[-1].log_offset
    assert back(ready, offset, delayLevel=1, maxReconsumeTimes=2).code == 0
    ready.advance(10_000)
    assert len(all_of(ready, RETRY)) == 2
    (dead,) = all_of(ready, DEAD)
    told = properties.parse(dead.properties)
    assert (dead.body, dead.reconsume_times, told["RETRY_TOPIC"]) == (b"poison", 3, "T")
    assert (told["DLQ_ORIGIN_TOPIC"], told["DLQ_ORIGIN_MESSAGE_ID"]) == ("T", "U")
    assert "DELAY" not in told
    assert ready.broker.stats.counters.dead_letters == 1
    topic = ready.broker.topics.get(DEAD)
    assert topic is not None and (topic.perm, topic.writeQueueNums) == (6, 1)


def test_a_negative_level_means_dead_at_once(ready: Bench) -> None:
    assert back(ready, delayLevel=-1).code == 0
    assert [one.body for one in all_of(ready, DEAD)] == [b"poison"]


def test_the_groups_limit_counts_when_the_request_has_none(ready: Bench) -> None:
    group = ready.broker.groups.get("G")
    assert group is not None and group.retryMaxTimes == 16
    body = b'{"groupName":"G","retryMaxTimes":0,"retryQueueNums":1}'
    assert ready.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body).code == 0
    back(ready)
    assert len(all_of(ready, DEAD)) == 1


def test_a_group_without_retry_queues_drops(ready: Bench) -> None:
    body = b'{"groupName":"G","retryMaxTimes":16,"retryQueueNums":0}'
    assert ready.ask(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body).code == 0
    assert back(ready).code == 0
    ready.advance(60_000)
    assert all_of(ready, RETRY) == all_of(ready, DEAD) == []


def test_what_can_not_be_sent_back_is_told(ready: Bench) -> None:
    before = ready.store.max_log_offset
    assert back(ready, offset=5).code == 1
    assert back(ready, offset=10**9).code == 1
    assert back(ready, group="../x").code == 29
    assert ready.store.max_log_offset == before


def test_what_waits_unseen_can_not_be_sent_back(ready: Bench) -> None:
    for props in ({"DELAY": "18"}, {"TIMER_DELAY_SEC": "60"}, {"TRAN_MSG": "true", "PGROUP": "p"}):
        at = ready.store.max_log_offset
        ready.sent(
            body=b"unseen", props={**props, "UNIQ_KEY": "W"}, sys_flag=4 * ("PGROUP" in props)
        )
        for level in (1, -1):
            answer = back(ready, offset=at, delayLevel=level)
            assert answer.code == 1 and "no consumer" in str(answer.remark)
    ready.advance(5_000)
    assert all_of(ready, RETRY) == all_of(ready, DEAD) == []


def test_a_dead_letter_says_why_it_is_one(ready: Bench) -> None:
    back(ready, delayLevel=-1)
    back(ready, maxReconsumeTimes=0)
    ready.sent(body=b"own", props={"DLQ_REASON": "the customer is gone"})
    back(ready, offset=own_offset(ready), delayLevel=-1)
    found = [properties.parse(one.properties)["DLQ_REASON"] for one in all_of(ready, DEAD)]
    assert found == [
        "its consumer asked for it after 0 retries",
        "all 0 retries failed",
        "the customer is gone",
    ]


def own_offset(bench: Bench) -> int:
    return max(one.log_offset for one in all_of(bench, "T"))


@pytest.mark.parametrize("is_made", [True, False])
def test_a_group_that_nobody_knows_is_made_if_that_is_allowed(
    benches: Benches, is_made: bool
) -> None:
    """RocketMQ takes it, too: a client may fail before its heartbeat has come."""
    bench = benches(is_group_auto_created=is_made)
    bench.create_topic()
    bench.sent()
    answer = bench.ask(C.CONSUMER_SEND_MSG_BACK, {"offset": 0, "group": "new", "delayLevel": -1})
    assert answer.code == (0 if is_made else 26)
    assert (bench.broker.groups.get("new") is not None) == is_made
    assert bench.store.max_offset("%DLQ%new", 0) == int(is_made)


def test_synchronous_flush_answers_when_the_copy_is_safe(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.create_topic()
    bench.beat()
    bench.sent()
    bench.keeps_flushes = True
    ext = {"offset": 0, "group": "G", "delayLevel": 0}
    opaque = bench.post(C.CONSUMER_SEND_MSG_BACK, ext)
    assert bench.answer(opaque) is None
    bench.flush()
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0


def test_a_client_that_resends_by_itself_is_held_to_the_limit(ready: Bench) -> None:
    props = {"RETRY_TOPIC": "T", "DELAY": "1", "UNIQ_KEY": "U"}
    ext = ready.send_ext(RETRY, props=props, reconsume=2) | {"l": "2"}
    assert ready.ask(C.SEND_MESSAGE_V2, ext, b"kept").code == 0
    ext = ready.send_ext(RETRY, props=props, reconsume=3) | {"l": "2"}
    assert ready.ask(C.SEND_MESSAGE_V2, ext, b"dead").code == 0
    ready.advance(1_000)
    assert [one.body for one in all_of(ready, RETRY)] == [b"kept"]
    assert [one.body for one in all_of(ready, DEAD)] == [b"dead"]


def test_a_compressed_body_stays_as_it_is(bench: Bench) -> None:
    bench.create_topic()
    bench.beat()
    bench.sent(body=b"\x78\x9cnot really", sys_flag=0x301)
    back(bench, delayLevel=1)
    bench.advance(1_000)
    (again,) = all_of(bench, RETRY)
    assert (again.body, again.sys_flag & 0x301) == (b"\x78\x9cnot really", 0x301)
