"""A broker's life: unknown requests, name servers, state files, deadlines, and the way out."""

from __future__ import annotations

import logging

import pytest

from cometmq.broker.requests import TABLE
from cometmq.wire import fastjson
from cometmq.wire.codes import FLAG_ONEWAY
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame

from .conftest import Benches
from .harness import NAMESRV, NOW_MS, Bench, StubNameServer, bodies_of, response

# ---------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    "code",
    [
        0,
        -1,
        9999,
        C.POP_ROLLBACK,
        C.AUTH_LIST_ACL,
    ],
)
@pytest.mark.parametrize("serialize", [0, 1])
def test_unknown_codes_are_answered_3(bench: Bench, code: int, serialize: int) -> None:
    answer = bench.ask(code, serialize=serialize)
    assert (answer.code, answer.serialize) == (3, serialize)
    assert f"{int(code)} not supported" in str(answer.remark)
    assert bench.broker.served.unsupported == 1


@pytest.mark.parametrize("code", [9999, *sorted(TABLE)], ids=str)
def test_oneway_requests_are_never_answered(bench: Bench, code: int) -> None:
    bench.post(code, {"topic": "T"}, b"[]", flag=FLAG_ONEWAY)
    bench.advance(20_000)
    assert bench.inbox == {}


@pytest.mark.parametrize("code", sorted(TABLE), ids=str)
def test_an_empty_request_is_no_bug(bench: Bench, code: int) -> None:
    answer = bench.ask(code)
    assert answer.code != 0 or not answer.remark
    assert bench.broker.served.bugs == 0


def test_a_response_nobody_waits_for_is_dropped(bench: Bench) -> None:
    bench.turn((bench.conn, response(Frame(0, opaque=5))))
    assert bench.inbox == {}


def test_a_bug_in_a_handler_is_answered_1_and_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(bench.store, "earliest_store_ms", fail)
    bench.create_topic()
    answer = bench.ask(C.GET_EARLIEST_MSG_STORETIME, {"topic": "T", "queueId": 0})
    assert answer.code == 1
    assert "GET_EARLIEST_MSG_STORETIME" in str(answer.remark) and "oops" in str(answer.remark)
    assert bench.broker.served.bugs == 1
    assert "ZeroDivisionError" in caplog.text
    bench.broker.served.bugs = 0


# ------------------------------------------------------------------------------------ registration


@pytest.fixture
def server() -> StubNameServer:
    return StubNameServer(NAMESRV)


def test_the_first_word_on_a_connection_is_a_full_registration(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server], cluster="C1", name="b1")
    (request,) = server.requests
    assert request.code == C.REGISTER_BROKER
    assert request.ext["brokerName"] == "b1"
    assert request.ext["brokerAddr"] == "10.0.0.1:10911"
    assert request.ext["clusterName"] == "C1"
    assert request.ext["brokerId"] == "0"
    assert request.ext["haServerAddr"] == "10.0.0.1:10912"
    (registered,) = server.registrations
    assert registered.topics == bench.broker.topics.table
    assert registered.version == bench.broker.topics.version
    assert bench.broker.is_registered


def test_it_registers_again_after_10_s_and_then_every_30(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    counts = []
    for _ in range(7):
        bench.advance(10_000)
        counts.append(len(server.registrations))
    assert counts == [2, 2, 2, 3, 3, 3, 4]


def test_an_unreachable_name_server_is_dialled_again_every_second(
    benches: Benches, server: StubNameServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_reachable = False
    bench = benches(namesrv=[server])
    bench.advance(5_000)
    assert len(bench.dialled) == 6
    assert caplog.text.count("registration failed") == 1, "said once, not every second"
    assert not bench.broker.is_registered
    server.is_reachable = True
    bench.advance(1_000)
    assert bench.broker.is_registered


def test_a_lost_name_server_is_dialled_again_and_told_everything(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    assert server.conn is not None
    bench.disconnect(server.conn)
    assert not bench.broker.is_registered
    bench.sent("Meanwhile")
    bench.advance(1_000)
    assert bench.broker.is_registered
    assert "Meanwhile" in server.registrations[-1].topics


def test_one_name_server_does_not_need_the_other(benches: Benches) -> None:
    bad, good = StubNameServer("10.9.9.9:1"), StubNameServer("10.9.9.9:2")
    bad.is_reachable = False
    bench = benches(namesrv=[bad, good])
    assert len(good.registrations) == 1
    assert bench.send().code == 0


def test_a_registration_that_is_not_answered_counts_as_failed(
    benches: Benches, server: StubNameServer
) -> None:
    server.is_silent = True
    bench = benches(namesrv=[server], register_timeout_ms=5_000)
    bench.advance(5_000)
    assert bench.broker.name_servers.failed_registrations == 1
    assert not bench.broker.is_registered


def test_the_broker_works_without_any_name_server(bench: Bench) -> None:
    assert bench.broker.is_registered
    assert bench.dialled == []
    assert bench.send().code == 0


def test_name_servers_are_separated_by_semicolons_or_commas(benches: Benches) -> None:
    bench = benches(namesrv="h:1, h:2;h:3;; h:1 ")
    assert bench.broker.name_servers.addresses == ["h:1", "h:2", "h:3"]


# ------------------------------------------------------------------------------------- state files


def test_a_new_broker_saves_its_topics_and_groups(bench: Bench) -> None:
    topics = fastjson.loads(bench.files.read("config/topics.json") or b"")
    groups = fastjson.loads(bench.files.read("config/subscriptionGroup.json") or b"")
    assert "TBW102" in topics["topicConfigTable"]
    assert "TOOLS_CONSUMER" in groups["subscriptionGroupTable"]


def test_a_broker_that_finds_its_files_does_not_write_them_again(benches: Benches) -> None:
    benches().close()
    bench = benches()
    bench.advance(20_000)
    assert bench.saved == []


def test_a_damaged_topics_file_gives_way_to_its_backup(benches: Benches) -> None:
    bench = benches()
    bench.create_topic("First")
    bench.create_topic("Second")
    bench.close()
    bench.files.write("config/topics.json", b"{")
    again = benches()
    assert again.broker.topics.get("First") is not None
    assert again.files.read("config/topics.json.corrupt") == b"{"


@pytest.mark.parametrize(
    "content", [b'{"topicConfigTable":3}', b'{"topicConfigTable":{"X":3}}', b"{}", b"[]", b"\xff"]
)
def test_a_topics_file_of_another_shape_does_not_stop_the_broker(
    benches: Benches, content: bytes
) -> None:
    bench = benches()
    bench.close()
    bench.files.remove("config/topics.json.bak")
    bench.files.write("config/topics.json", content)
    assert benches().send().code == 0


@pytest.mark.parametrize("content", [b'{"offsetTable":{"T@G":{"a":1},"X":{},"Y@G":3}}', b"{}"])
def test_an_offset_file_of_another_shape_does_not_stop_the_broker(
    benches: Benches, content: bytes
) -> None:
    bench = benches()
    bench.close()
    bench.files.write("config/consumerOffset.json", content)
    assert benches().broker.offsets.table == {}


def test_messages_and_topics_survive_a_restart(benches: Benches) -> None:
    bench = benches()
    bench.sent(body=b"before")
    bench.stop()
    bench.close()
    again = benches(now_ms=NOW_MS + 60_000)
    again.sent(body=b"after")
    assert bodies_of(again.pull()) == [b"before", b"after"]


def test_messages_survive_a_crash(benches: Benches) -> None:
    bench = benches()
    bench.sent(body=b"before")
    bench.crash()
    assert bodies_of(benches().pull()) == [b"before"]


# --------------------------------------------------------------------------------------- deadlines


def test_an_idle_broker_ticks_about_once_a_second(benches: Benches) -> None:
    bench = benches(namesrv=[StubNameServer(NAMESRV)])
    bench.sent()
    bench.ticks = 0
    bench.advance(120_000)
    assert 100 <= bench.ticks <= 500


def test_a_long_recovery_does_not_make_it_spin(benches: Benches) -> None:
    bench = benches(opens_after_ms=8_000)
    bench.ticks = 0
    bench.advance(12_000)
    assert bench.ticks < 200


def test_a_failing_save_does_not_make_it_spin(bench: Bench) -> None:
    bench.save_failure = "no space"
    bench.post_send()
    bench.ticks = 0
    bench.advance(10_000)
    assert bench.ticks < 100


def test_a_failed_flush_does_not_make_it_spin(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.keeps_flushes = True
    bench.post_send()
    bench.flush("disk on fire")
    bench.ticks = 0
    bench.advance(10_000)
    assert bench.ticks < 100


# -------------------------------------------------------------------------------------------- stop


def test_a_stopped_broker_has_said_goodbye_saved_and_removed_abort(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    bench.sent()
    bench.pull()
    bench.commit(1)
    assert bench.files.read("abort") is not None
    bench.stop()
    assert bench.broker.is_stopped
    goodbye = server.requests[-1]
    assert goodbye.code == C.UNREGISTER_BROKER
    assert goodbye.ext["brokerAddr"] == "10.0.0.1:10911"
    assert goodbye.ext["brokerName"] == "broker-a"
    assert b"T@G" in (bench.files.read("config/consumerOffset.json") or b"")
    bench.close()
    assert bench.files.read("abort") is None


def test_held_pulls_are_answered_on_stop(bench: Bench) -> None:
    bench.create_topic()
    opaque = bench.hold()
    bench.stop()
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 19


def test_a_stopping_broker_takes_no_sends_and_holds_no_pulls(bench: Bench) -> None:
    bench.create_topic()
    bench.stop()
    answer = bench.send()
    assert answer.code == 14 and "shutting down" in str(answer.remark)
    assert bench.pull(flags=6).code == 19


def test_stopping_waits_for_the_flush_of_parked_sends(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.create_topic()
    bench.keeps_flushes = True
    opaque = bench.post_send()
    bench.stop()
    assert not bench.broker.is_stopped
    bench.flush()
    assert bench.answer(opaque) is not None
    assert bench.broker.is_stopped


def test_stopping_waits_for_saves(bench: Bench) -> None:
    bench.create_topic()
    bench.pull()
    bench.keeps_saves = True
    bench.commit(0)
    bench.stop()
    assert not bench.broker.is_stopped
    bench.save()
    assert bench.broker.is_stopped


def test_stopping_waits_a_second_for_a_name_servers_goodbye(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    bench.stop()
    assert not bench.broker.is_stopped
    bench.advance(1_000)
    assert bench.broker.is_stopped


def test_stopping_answers_a_send_whose_topic_is_being_born(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    server.is_silent = True
    opaque = bench.post_send("New")
    bench.advance(500)
    bench.stop()
    for _ in range(30):
        if bench.broker.is_stopped:
            break
        bench.advance(100)
    assert bench.broker.is_stopped
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0


def test_a_broker_that_left_does_not_register_again(
    benches: Benches, server: StubNameServer
) -> None:
    bench = benches(namesrv=[server])
    bench.stop()
    bench.beat("Late")
    bench.advance(60_000)
    assert server.requests[-1].code == C.UNREGISTER_BROKER


def test_stopping_does_not_wait_for_an_unreachable_name_server(
    benches: Benches, server: StubNameServer
) -> None:
    server.is_reachable = False
    bench = benches(namesrv=[server])
    bench.stop()
    assert bench.broker.is_stopped


def test_a_failed_flush_does_not_keep_it_from_stopping(benches: Benches) -> None:
    bench = benches(flush="SYNC_FLUSH")
    bench.keeps_flushes = True
    bench.post_send()
    bench.flush("disk on fire")
    bench.stop()
    assert bench.broker.is_stopped
    bench.close()
    assert bench.files.read("abort") is not None, "the next start must recover"


def test_close_makes_everything_durable(benches: Benches, caplog: pytest.LogCaptureFixture) -> None:
    bench = benches()
    bench.sent()
    assert bench.store.flushed_offset == 0
    with caplog.at_level(logging.INFO, "cometmq.store"):
        bench.close()
    assert "is_clean=True" in caplog.text
