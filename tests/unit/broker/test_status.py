"""What mqadmin and consoles are shown, and questions that are passed on to a client."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import NOW_MS, Bench, bodies_of, response

MQ0 = '{"brokerName":"broker-a","queueId":0,"topic":"T"}'

# ----------------------------------------------------------------------------------------- runtime

RATES = ("putTps", "getFoundTps", "getMissTps", "getTotalTps", "getTransferredTps")
WHOLE = (
    "bootTimestamp putMessageTimesTotal putMessageFailedTimes putMessageSizeTotal "
    "putMessageEntireTimeMax getMessageEntireTimeMax msgPutTotalYesterdayMorning "
    "msgPutTotalTodayMorning msgPutTotalTodayNow msgGetTotalYesterdayMorning "
    "msgGetTotalTodayMorning msgGetTotalTodayNow commitLogMinOffset commitLogMaxOffset "
    "dispatchBehindBytes dispatchMaxBuffer pageCacheLockTimeMills earliestMessageTimeStamp "
    "startAcceptSendRequestTimeStamp sendThreadPoolQueueSize sendThreadPoolQueueCapacity "
    "sendThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize pullThreadPoolQueueCapacity "
    "pullThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueSize queryThreadPoolQueueCapacity "
    "queryThreadPoolQueueHeadWaitTimeMills EndTransactionQueueSize "
    "EndTransactionThreadPoolQueueCapacity timerReadBehind timerOffsetBehind timerCongestNum"
).split()
DECIMAL = (
    "putMessageAverageSize commitLogDiskRatio consumeQueueDiskRatio timerEnqueueTps timerDequeueTps"
).split()
TEXT = (
    "brokerVersionDesc brokerActive runtime putMessageDistributeTime commitLogDirCapacity "
    "remainHowManyDataToCommit remainHowManyDataToFlush"
).split()


def test_runtime_info_has_every_key_that_the_tools_read(bench: Bench) -> None:
    bench.sent()
    bench.pull()
    table = bench.runtime()
    assert all(isinstance(value, str) for value in table.values())
    assert set(table) >= {*RATES, *WHOLE, *DECIMAL, *TEXT}
    for key in WHOLE:
        assert re.fullmatch(r"-?\d+", table[key]), (key, table[key])
    for key in DECIMAL:
        float(table[key])
    for key in RATES:
        parts = table[key].split(" ")
        assert len(parts) == 3 and all(float(part) >= 0 for part in parts), (key, table[key])
    for key in TEXT:
        assert table[key]


def test_runtime_info_says_what_happened(bench: Bench) -> None:
    bench.sent(body=b"x" * 100)
    bench.sent(body=b"x" * 100)
    bench.send("a/b")
    bench.pull()
    bench.advance(5_000)
    table = bench.runtime()
    assert table["putMessageTimesTotal"] == table["msgPutTotalTodayNow"] == "2"
    assert (table["putMessageFailedTimes"], table["msgGetTotalTodayNow"]) == ("1", "2")
    assert float(table["putMessageAverageSize"]) == bench.store.max_log_offset / 2
    assert table["commitLogMaxOffset"] == str(bench.store.max_log_offset)
    assert table["earliestMessageTimeStamp"] == str(NOW_MS)
    assert table["bootTimestamp"] == str(NOW_MS)
    assert table["runtime"] == "[ 0 days, 0 hours, 0 minutes, 5 seconds ]"
    assert table["brokerActive"] == "true"


def test_rates_are_over_ten_seconds_a_minute_and_ten(bench: Bench) -> None:
    bench.create_topic()
    bench.advance(30_000)
    for _ in range(60):
        bench.sent()
    bench.advance(10_000)
    ten, minute, _ = (float(part) for part in bench.runtime()["putTps"].split())
    assert ten == pytest.approx(6.0, rel=0.15)
    assert minute == pytest.approx(60 / 40, rel=0.1)
    bench.advance(15_000)
    assert float(bench.runtime()["putTps"].split()[0]) == 0


def test_own_figures_count_what_was_served(bench: Bench) -> None:
    bench.ask(9999)
    bench.send("a/b")
    table = bench.runtime()
    assert table["cometmqRequests"] == "3"
    assert (table["cometmqRequestsUnsupported"], table["cometmqRequestsRefused"]) == ("1", "1")
    assert (table["cometmqBugs"], table["cometmqConnections"]) == ("0", "1")


# ------------------------------------------------------------------------------ topics and progress


def test_topic_stats_with_bare_object_keys(bench: Bench) -> None:
    bench.create_topic("T", 1)
    bench.sent()
    bench.advance(1_000)
    bench.sent()
    answer = bench.ask(C.GET_TOPIC_STATS_INFO, {"topic": "T"})
    assert answer.body.decode() == (
        f'{{"offsetTable":{{{MQ0}:{{"lastUpdateTimestamp":{NOW_MS + 1000},"maxOffset":2,'
        '"minOffset":0}},"topicPutTps":0.0}'
    )


def test_topic_stats_of_an_empty_queue(bench: Bench) -> None:
    bench.create_topic("T", 2)
    table = bench.json(C.GET_TOPIC_STATS_INFO, {"topic": "T"})["offsetTable"]
    assert [key["queueId"] for key in table] == [0, 1]
    assert set(map(str, table.values())) == {
        "{'lastUpdateTimestamp': 0, 'maxOffset': 0, 'minOffset': 0}"
    }


def test_topic_stats_of_an_unknown_topic(bench: Bench) -> None:
    assert bench.ask(C.GET_TOPIC_STATS_INFO, {"topic": "Nope"}).code == 17


def consume_stats(bench: Bench, **how: Any) -> Any:
    return bench.ask(C.GET_CONSUME_STATS, {"consumerGroup": "G"} | how)


@pytest.fixture
def consumed(bench: Bench) -> Bench:
    """T has three messages, G has pulled all and consumed two."""
    bench.create_topic("T", 1)
    for _ in range(3):
        bench.sent()
        bench.advance(1_000)
    bench.pull()
    bench.commit(2)
    return bench


def test_consume_stats_with_bare_object_keys(consumed: Bench) -> None:
    assert consume_stats(consumed).body.decode() == (
        f'{{"consumeTps":0.0,"offsetTable":{{{MQ0}:{{"brokerOffset":3,"consumerOffset":2,'
        f'"lastTimestamp":{NOW_MS + 1000},"pullOffset":3}}}}}}'
    )


@pytest.mark.parametrize("how", [{"topic": "T"}, {"topicList": "T;Nope"}, {"topic": ""}])
def test_consume_stats_of_chosen_topics(consumed: Bench, how: dict[str, str]) -> None:
    assert consume_stats(consumed, **how).body == consume_stats(consumed).body


@pytest.mark.parametrize("how", [{"topic": "Nope"}, {"consumerGroup": "Nobody"}])
def test_consume_stats_of_what_is_not_there(consumed: Bench, how: dict[str, str]) -> None:
    assert consume_stats(consumed, **how).body == b'{"consumeTps":0.0,"offsetTable":{}}'


def test_consume_stats_leave_out_what_a_live_group_no_longer_subscribes_to(
    consumed: Bench,
) -> None:
    consumed.beat(topics={"Other": "*"})
    assert consume_stats(consumed).body == b'{"consumeTps":0.0,"offsetTable":{}}'


def test_the_time_span_of_consumption(consumed: Bench) -> None:
    found = consumed.json(C.QUERY_CONSUME_TIME_SPAN, {"topic": "T", "group": "G"})
    (span,) = found["consumeTimeSpanSet"]
    assert span == {
        "consumeTimeStamp": NOW_MS + 1_000,
        "delayTime": consumed.now_ms - (NOW_MS + 2_000),
        "maxTimeStamp": NOW_MS + 2_000,
        "messageQueue": json.loads(MQ0),
        "minTimeStamp": NOW_MS,
    }


def test_who_consumes_a_topic(consumed: Bench) -> None:
    consumed.beat("Online", {"T": "*"})
    answer = consumed.ask(C.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "T"})
    assert answer.body == b'{"groupList":["G","Online"]}'
    assert consumed.ask(C.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "None"}).body == b'{"groupList":[]}'


def test_topics_of_a_group(consumed: Bench) -> None:
    assert consumed.json(C.QUERY_TOPICS_BY_CONSUMER, {"group": "G"})["topicList"] == ["T"]


def test_the_subscription_of_a_group(bench: Bench) -> None:
    bench.beat(topics={"T": "A"})
    found = bench.json(C.QUERY_SUBSCRIPTION_BY_CONSUMER, {"group": "G", "topic": "T"})
    assert (found["group"], found["topic"]) == ("G", "T")
    assert found["subscriptionData"]["subString"] == "A"
    found = bench.json(C.QUERY_SUBSCRIPTION_BY_CONSUMER, {"group": "G", "topic": "U"})
    assert "subscriptionData" not in found


def test_figures_of_a_topic_and_a_group(consumed: Bench) -> None:
    def total(name: str, key: str) -> Any:
        found = consumed.json(C.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key})
        assert set(found) == {"statsMinute", "statsHour", "statsDay"}
        assert set(found["statsDay"]) == {"sum", "tps", "avgpt"}
        return found["statsDay"]["sum"]

    assert total("TOPIC_PUT_NUMS", "T") == 3
    assert total("TOPIC_PUT_SIZE", "T") == consumed.store.max_log_offset
    assert total("GROUP_GET_NUMS", "T@G") == 3
    unknown = {"statsName": "TOPIC_PUT_NUMS", "statsKey": "Nope"}
    assert consumed.ask(C.VIEW_BROKER_STATS_DATA, unknown).code == 1


# ------------------------------------------------------------------------------------- connections


def test_consumer_connections(bench: Bench) -> None:
    conn = bench.connect("10.2.2.2", 7000)
    bench.beat(topics={"T": "A || B"}, client="c9", conn=conn, language=9)
    found = bench.json(C.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert found["connectionSet"] == [
        {"clientAddr": "10.2.2.2:7000", "clientId": "c9", "language": "GO", "version": 401}
    ]
    assert found["consumeFromWhere"] == "CONSUME_FROM_LAST_OFFSET"
    assert found["consumeType"] == "CONSUME_PASSIVELY"
    assert found["messageModel"] == "CLUSTERING"
    assert found["subscriptionTable"]["T"]["tagsSet"] == ["A", "B"]
    assert set(found["subscriptionTable"]["T"]) == {
        "classFilterMode",
        "codeSet",
        "expressionType",
        "subString",
        "subVersion",
        "tagsSet",
        "topic",
    }


def test_an_offline_group_is_206(bench: Bench) -> None:
    answer = bench.ask(C.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "Nobody"})
    assert answer.code == 206 and "'Nobody'" in str(answer.remark)


def test_producer_connections(bench: Bench) -> None:
    bench.beat("", client="p1", producers=("P",))
    answer = bench.ask(C.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "P"})
    assert json.loads(answer.body) == {
        "connectionSet": [
            {"clientAddr": "10.1.1.1:50001", "clientId": "p1", "language": "JAVA", "version": 401}
        ]
    }
    assert bench.ask(C.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "Q"}).code == 1


def test_all_producers(bench: Bench) -> None:
    bench.beat("", client="p1", producers=("P",))
    assert bench.json(C.GET_ALL_PRODUCER_INFO) == {
        "data": {
            "P": [
                {
                    "clientId": "p1",
                    "language": "JAVA",
                    "lastUpdateTimestamp": NOW_MS,
                    "remoteIP": "10.1.1.1:50001",
                    "version": 401,
                }
            ]
        }
    }


# --------------------------------------------------------------------------------------- forwarded


@pytest.fixture
def asked(benches: Benches) -> Bench:
    """c1 is online on `bench.conn`."""
    bench = benches()
    bench.beat(client="c1")
    bench.requests_to(bench.conn)
    return bench


RUNNING = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "false"}


def test_running_info_is_asked_of_the_client_and_relayed(asked: Bench) -> None:
    admin = asked.connect()
    opaque = asked.post(C.GET_CONSUMER_RUNNING_INFO, RUNNING, conn=admin)
    assert asked.answer(opaque, admin) is None
    (request,) = asked.requests_to(asked.conn)
    assert (request.code, request.ext) == (C.GET_CONSUMER_RUNNING_INFO, RUNNING)
    assert not request.is_oneway
    asked.turn((asked.conn, response(request, 0, b'{"mqTable":{}}', "well")))
    answer = asked.answer(opaque, admin)
    assert answer is not None
    assert (answer.code, answer.body, answer.remark) == (0, b'{"mqTable":{}}', "well")


def test_a_relayed_answer_speaks_the_askers_serialization(asked: Bench) -> None:
    admin = asked.connect()
    opaque = asked.post(C.GET_CONSUMER_RUNNING_INFO, RUNNING, conn=admin, serialize=1)
    (request,) = asked.requests_to(asked.conn)
    asked.turn((asked.conn, response(request)))
    answer = asked.answer(opaque, admin)
    assert answer is not None and answer.serialize == 1


def test_an_answer_from_somebody_else_is_not_relayed(asked: Bench) -> None:
    admin, thief = asked.connect(), asked.connect()
    opaque = asked.post(C.GET_CONSUMER_RUNNING_INFO, RUNNING, conn=admin)
    (request,) = asked.requests_to(asked.conn)
    asked.turn((thief, response(request, 0, b"forged")))
    assert asked.answer(opaque, admin) is None


def test_a_client_that_does_not_answer_is_207(asked: Bench) -> None:
    admin = asked.connect()
    opaque = asked.post(C.GET_CONSUMER_RUNNING_INFO, RUNNING, conn=admin)
    asked.advance(9_999)
    assert asked.answer(opaque, admin) is None
    asked.advance(1)
    answer = asked.answer(opaque, admin)
    assert answer is not None and answer.code == 207
    (request,) = asked.requests_to(asked.conn)
    asked.turn((asked.conn, response(request)))
    assert asked.answer(opaque, admin) is None, "a late answer is nobody's"


def test_a_client_that_goes_away_is_207(asked: Bench) -> None:
    admin = asked.connect()
    opaque = asked.post(C.GET_CONSUMER_RUNNING_INFO, RUNNING, conn=admin)
    asked.disconnect(asked.conn)
    answer = asked.answer(opaque, admin)
    assert answer is not None and answer.code == 207
    assert "lost" in str(answer.remark)


@pytest.mark.parametrize("how", [{"clientId": "c2"}, {"consumerGroup": "H"}, {"clientId": None}])
def test_a_client_that_is_not_here_is_1(asked: Bench, how: dict[str, Any]) -> None:
    answer = asked.ask(C.GET_CONSUMER_RUNNING_INFO, RUNNING | how)
    assert answer.code == 1 and "not online" in str(answer.remark)


def test_a_message_is_handed_to_one_client_and_its_result_relayed(asked: Bench) -> None:
    sent = asked.sent(body=b"look at this")
    admin = asked.connect()
    ext = {"consumerGroup": "G", "clientId": "c1", "msgId": sent.ext["msgId"]}
    opaque = asked.post(C.CONSUME_MESSAGE_DIRECTLY, ext, conn=admin)
    (request,) = asked.requests_to(asked.conn)
    assert request.code == C.CONSUME_MESSAGE_DIRECTLY
    assert request.ext == ext | {"brokerName": asked.broker.config.name}
    assert bodies_of(request) == [b"look at this"]
    asked.turn((asked.conn, response(request, 0, b'{"consumeResult":"CR_SUCCESS"}')))
    answer = asked.answer(opaque, admin)
    assert answer is not None and answer.body == b'{"consumeResult":"CR_SUCCESS"}'


@pytest.mark.parametrize("text", ["7", "00" * 16])
def test_a_message_that_is_not_here_is_handed_to_nobody(asked: Bench, text: str) -> None:
    ext = {"consumerGroup": "G", "clientId": "c1", "msgId": text}
    answer = asked.ask(C.CONSUME_MESSAGE_DIRECTLY, ext, conn=asked.connect())
    assert answer.code == 1 and text in str(answer.remark)
    assert asked.requests_to(asked.conn) == []
