"""When a send is answered: flush modes, failed flushes, and topics that are being born."""

from __future__ import annotations

import logging

import pytest

from cometmq.broker.broker import BIRTH_WAIT_MS
from cometmq.wire import fastjson
from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import NAMESRV, Bench, StubNameServer, bodies_of


@pytest.fixture
def sync(benches: Benches) -> Bench:
    """SYNC_FLUSH with the topic T, and every flush kept back."""
    bench = benches(flush="SYNC_FLUSH")
    bench.create_topic()
    bench.keeps_flushes = True
    return bench


# ------------------------------------------------------------------------------------------ flush


def test_asynchronous_flush_answers_before_the_flush(bench: Bench) -> None:
    bench.keeps_flushes = True
    bench.sent()
    assert bench.store.flushed_offset == 0


def test_synchronous_flush_answers_after_the_flush(sync: Bench) -> None:
    opaque = sync.post_send()
    assert sync.answer(opaque) is None
    sync.flush()
    answer = sync.answer(opaque)
    assert answer is not None and answer.code == 0
    assert sync.store.flushed_offset == sync.store.max_log_offset


def test_one_flush_answers_all_that_it_covers_and_no_more(sync: Bench) -> None:
    frames = [sync.frame(C.SEND_MESSAGE_V2, sync.send_ext(), b"x") for _ in range(3)]
    sync.turn(*((sync.conn, frame) for frame in frames))
    late = sync.post_send()
    assert len(sync.kept_flushes) == 1, "one flush at a time"
    sync.flush()
    assert all(sync.answer(frame.opaque) is not None for frame in frames)
    assert sync.answer(late) is None
    sync.flush()
    assert sync.answer(late) is not None


def test_nobody_reads_what_is_not_flushed(sync: Bench) -> None:
    sync.post_send()
    assert sync.pull().code == 19
    sync.flush()
    assert bodies_of(sync.pull()) == [b"hello"]


def test_a_held_pull_is_woken_by_the_flush(sync: Bench) -> None:
    opaque = sync.hold()
    sync.post_send()
    assert sync.answer(opaque) is None
    sync.flush()
    answer = sync.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"hello"]


def test_a_slow_flush_answers_10_with_everything_a_success_has(sync: Bench) -> None:
    opaque = sync.post_send(queue=1, props={"UNIQ_KEY": "U"})
    sync.advance(4_999)
    assert sync.answer(opaque) is None
    sync.advance(1)
    answer = sync.answer(opaque)
    assert answer is not None and answer.code == 10
    assert "5000 ms" in str(answer.remark) and "syncFlushTimeout" in str(answer.remark)
    assert answer.ext["msgId"] and answer.ext["MSG_REGION"] == "DefaultRegion"
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("1", "0")
    assert answer.ext["transactionId"] == "U"
    assert sync.broker.stats.counters.flush_timeouts == 1
    sync.flush()
    assert sync.answer(opaque) is None, "answered once"


def test_a_stalled_disk_refuses_new_sends_by_name_and_pulls_go_on(sync: Bench) -> None:
    sync.post_send(body=b"before")
    sync.flush()
    waiting = sync.post_send()
    sync.advance(1_000)
    assert sync.answer(sync.post_send()) is None  # it waits as well
    sync.advance(1)
    refused = sync.send()
    assert refused.code == 2
    assert "has not finished a flush for 1001 ms" in str(refused.remark)
    assert "osPageCacheBusyTimeOutMills" in str(refused.remark)
    assert sync.broker.stats.counters.busy_slow_disk == 1
    assert bodies_of(sync.pull()) == [b"before"]
    sync.flush()
    answer = sync.answer(waiting)
    assert answer is not None and answer.code == 0
    assert sync.answer(sync.post_send()) is None


def test_wait_false_does_not_wait_for_the_flush(sync: Bench) -> None:
    assert sync.send(props={"WAIT": "false"}).code == 0
    assert sync.answer(sync.post_send(props={"WAIT": "true"})) is None


def test_wait_false_of_a_batch_stands_in_its_header(sync: Bench) -> None:
    from cometmq.wire.record import Piece, join_batch

    body = join_batch([Piece(0, b"a", "WAIT\x01false\x02")])
    assert sync.answer(sync.post_send(body=body, batch=True)) is None
    assert sync.send(body=body, batch=True, props={"WAIT": "false"}).code == 0


def test_a_oneway_send_parks_nothing(sync: Bench) -> None:
    opaque = sync.post_send(oneway=True)
    sync.flush()
    assert sync.answer(opaque) is None
    assert not sync.broker._parked


# ----------------------------------------------------------------------------------- failed flush


def test_a_failed_flush_answers_14_to_all_that_wait(sync: Bench) -> None:
    first = sync.post_send()
    second = sync.post_send()
    sync.flush("disk on fire")
    for opaque in (first, second):
        answer = sync.answer(opaque)
        assert answer is not None and answer.code == 14
        assert "disk on fire" in str(answer.remark)
        assert answer.ext == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


def test_after_a_failed_flush_nothing_is_accepted_or_acknowledged(sync: Bench) -> None:
    sync.post_send()
    sync.flush("disk on fire")
    answer = sync.send()
    assert answer.code == 14 and "disk on fire" in str(answer.remark)
    size = sync.store.max_log_offset
    sync.advance(60_000)
    assert not sync.kept_flushes, "no flush is tried again"
    assert sync.send(props={"WAIT": "false"}).code == 14
    assert sync.store.max_log_offset == size
    assert "disk on fire" in sync.runtime()["cometmqReadOnlyReason"]


def test_a_failed_flush_closes_an_asynchronous_broker_too(bench: Bench) -> None:
    bench.sent()
    bench.keeps_flushes = True
    bench.advance(11_000)
    bench.flush("disk on fire")
    assert bench.send().code == 14
    assert bodies_of(bench.pull()) == [b"hello"], "what is there can still be read"


def test_a_send_whose_topic_is_being_born_fails_with_the_flush(benches: Benches) -> None:
    bench = benches()
    bench.keeps_saves = bench.keeps_flushes = True
    opaque = bench.post_send()
    bench.post_send("BenchmarkTest", b"x" * 50_000)
    bench.advance(600)
    assert bench.answer(opaque) is None
    bench.flush("disk on fire")
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 14, "acknowledged after a failed flush"
    bench.save()
    bench.advance(10_000)
    assert bench.answer(opaque) is None


def test_a_failed_flush_is_still_known_after_a_restart_as_an_unclean_stop(sync: Bench) -> None:
    sync.post_send()
    sync.flush("disk on fire")
    sync.close()
    assert sync.files.read("abort") is not None


# ------------------------------------------------------------------------------------- new topics


def test_a_new_topic_is_a_copy_of_its_template(bench: Bench) -> None:
    bench.sent("New", queues=5)
    topic = bench.broker.topics.get("New")
    assert topic is not None
    assert (topic.readQueueNums, topic.writeQueueNums) == (5, 5)
    assert (topic.perm, topic.topicFilterType, topic.order) == (6, "SINGLE_TAG", False)


def test_a_new_topic_has_at_most_the_queues_of_its_template(bench: Bench) -> None:
    bench.sent("New", queues=100)
    topic = bench.broker.topics.get("New")
    assert topic is not None and topic.writeQueueNums == 8


def test_a_new_topic_moves_the_version(bench: Bench) -> None:
    before = bench.broker.topics.version
    bench.advance(3_000)
    bench.sent("New")
    after = bench.broker.topics.version
    assert (after.counter, after.timestamp) == (before.counter + 1, bench.now_ms)


@pytest.fixture
def server() -> StubNameServer:
    return StubNameServer(NAMESRV)


def test_a_send_to_a_new_topic_is_answered_after_save_and_registration(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    bench.keeps_saves = server.is_silent = True
    opaque = bench.post_send("New")
    assert bench.answer(opaque) is None
    assert set(server.registrations[-1].topics) == {"New"}, "told of the one topic"
    bench.release(server)
    assert bench.answer(opaque) is None, "registered but not saved"
    bench.save()
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0
    assert (
        "New" in fastjson.loads(bench.files.read("config/topics.json") or b"")["topicConfigTable"]
    )


def test_saved_but_not_registered_is_not_enough(benches: Benches, server: StubNameServer) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    opaque = bench.post_send("New")
    assert bench.answer(opaque) is None
    bench.release(server)
    assert bench.answer(opaque) is not None


def test_every_name_server_must_know(benches: Benches) -> None:
    servers = [StubNameServer("10.9.9.9:1"), StubNameServer("10.9.9.9:2")]
    bench = benches(namesrv=servers)
    servers[1].is_silent = True
    opaque = bench.post_send("New")
    assert bench.answer(opaque) is None
    bench.release(servers[1])
    assert bench.answer(opaque) is not None


def test_later_sends_to_a_topic_being_born_wait_too(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    first, second = bench.post_send("New"), bench.post_send("New")
    assert bench.answer(second) is None
    bench.release(server)
    assert bench.answer(first) is not None and bench.answer(second) is not None


def test_sends_to_known_topics_do_not_wait_for_a_birth(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    bench.sent("Old")
    server.is_silent = True
    bench.post_send("New")
    assert bench.send("Old").code == 0


def test_a_silent_name_server_delays_a_birth_by_a_fixed_time(
    benches: Benches, server: StubNameServer, caplog: pytest.LogCaptureFixture
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    opaque = bench.post_send("New")
    bench.advance(BIRTH_WAIT_MS - 1)
    assert bench.answer(opaque) is None
    with caplog.at_level(logging.WARNING, "cometmq.broker"):
        bench.advance(1)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0
    assert f"waited {BIRTH_WAIT_MS} ms" in caplog.text


def test_a_failing_save_delays_a_birth_by_a_fixed_time(bench: Bench) -> None:
    bench.save_failure = "no space"
    opaque = bench.post_send("New")
    bench.advance(BIRTH_WAIT_MS)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0


def test_an_unreachable_name_server_delays_nothing(
    benches: Benches, server: StubNameServer
) -> None:
    server.is_reachable = False
    bench = benches(namesrv=[server])
    assert bench.send("New").code == 0


def test_a_name_server_that_goes_away_ends_the_wait(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    opaque = bench.post_send("New")
    assert server.conn is not None
    bench.disconnect(server.conn)
    assert bench.answer(opaque) is not None


def test_a_name_server_that_has_forgotten_us_is_told_everything(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    opaque = bench.post_send("New")
    server.code = 1
    conn, frame = server.unanswered.pop()
    bench.turn((conn, server.answer(frame)))
    assert bench.answer(opaque) is None, "it still does not know"
    assert {"New", "TBW102"} <= set(server.registrations[-1].topics)
    server.code = 0
    bench.release(server)
    assert bench.answer(opaque) is not None


def test_flush_and_birth_are_both_waited_for(benches: Benches, server: StubNameServer) -> None:
    bench = benches(namesrv=[server], flush="SYNC_FLUSH")
    bench.keeps_flushes = server.is_silent = True
    opaque = bench.post_send("New")
    bench.flush()
    assert bench.answer(opaque) is None
    bench.release(server)
    assert bench.answer(opaque) is not None


def test_an_operators_new_topic_is_answered_when_the_name_servers_know(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    ext = {"topic": "New", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    opaque = bench.post(C.UPDATE_AND_CREATE_TOPIC, ext)
    assert bench.answer(opaque) is None
    bench.release(server)
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0
