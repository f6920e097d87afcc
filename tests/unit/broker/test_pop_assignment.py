"""Which queues a client reads, when it lets the broker decide."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.broker.pop_assignment import Mode, divide
from cometmq.message import MessageQueue
from cometmq.wire import fastjson
from cometmq.wire.codes import RequestCode as C
from cometmq.wire.frame import Frame, reply_to

from .conftest import Benches
from .harness import NAMESRV, Bench, StubNameServer, consumer_body, heartbeat_body


def member(bench: Bench, client_id: str, group: str = "G", topic: str = "T") -> None:
    conn = bench.connect()
    body = heartbeat_body(client_id, [consumer_body(group, {topic: "*"})])
    assert bench.ask(C.HEART_BEAT, None, body, conn=conn).code == 0


def asking(client_id: str, **more: Any) -> bytes:
    return fastjson.dumps(
        {
            "clientId": client_id,
            "consumerGroup": "G",
            "messageModel": "CLUSTERING",
            "strategyName": "AVG",
            "topic": "T",
            **more,
        }
    )


def assigned(answer: Frame) -> list[tuple[str, int, str]] | None:
    assert answer.code == 0
    table = fastjson.loads(answer.body).get("messageQueueAssignments")
    if table is None:
        return None
    return [
        (one["messageQueue"]["brokerName"], one["messageQueue"]["queueId"], one["mode"])
        for one in table
    ]


def set_mode(bench: Bench, mode: str = "POP", share: int = -1, **more: Any) -> Frame:
    body = {"topic": "T", "consumerGroup": "G", "mode": mode, "popShareQueueNum": share, **more}
    return bench.ask(C.SET_MESSAGE_REQUEST_MODE, {}, fastjson.dumps(body))


def test_pull_in_shares_and_pop_for_all(bench: Bench) -> None:
    bench.sent()
    for client_id in ("c1", "c2", "c3"):
        member(bench, client_id)
    ask = lambda who, **more: assigned(  # noqa: E731
        bench.ask(C.QUERY_ASSIGNMENT, {}, asking(who, **more))
    )
    assert ask("c1") == [("broker-a", 0, "PULL"), ("broker-a", 1, "PULL")]
    assert ask("c3") == [("broker-a", 3, "PULL")]
    assert ask("c1", strategyName="AVG_BY_CIRCLE") == [
        ("broker-a", 0, "PULL"),
        ("broker-a", 3, "PULL"),
    ]
    assert ask("nobody") == []
    assert ask("c1", strategyName="MINE") is None
    assert len(ask("c1", messageModel="BROADCASTING") or []) == 4
    assert ask("c1", topic="Nowhere") is None
    assert ask("c1", consumerGroup="Nobody") is None
    assert set_mode(bench).code == 0
    assert ask("c1") == [("broker-a", -1, "POP")]
    assert set_mode(bench, share=1).code == 0
    assert [one[1] for one in ask("c3") or []] == [0, 1, 3]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"topic": "Nowhere"}, 17),
        ({"topic": "%RETRY%G"}, 16),
        ({"mode": "PUSH"}, 29),
        ({"consumerGroup": "a b"}, 29),
    ],
)
def test_modes_that_can_not_be(bench: Bench, more: dict[str, Any], code: int) -> None:
    bench.sent()
    assert set_mode(bench, **more).code == code
    assert bench.json(C.GET_ALL_MESSAGE_REQUEST_MODE) == {"messageRequestModeMap": {}}


def test_modes_are_kept(benches: Benches) -> None:
    bench = benches()
    bench.sent()
    set_mode(bench, share=2)
    bench.stop()
    bench.close()
    again = benches()
    wanted = {"topic": "T", "consumerGroup": "G", "mode": "POP", "popShareQueueNum": 2}
    assert again.json(C.GET_ALL_MESSAGE_REQUEST_MODE) == {
        "messageRequestModeMap": {"T": {"G": wanted}}
    }


def test_the_default_mode(benches: Benches) -> None:
    bench = benches(request_mode="POP")
    bench.sent()
    member(bench, "c1")
    assert assigned(bench.ask(C.QUERY_ASSIGNMENT, {}, asking("c1"))) == [("broker-a", -1, "POP")]


class Cluster(StubNameServer):
    """A name server that knows two brokers of topic T."""

    def answer(self, frame: Frame) -> Frame:
        if frame.code != C.GET_ROUTEINFO_BY_TOPIC:
            return super().answer(frame)
        data = {"perm": 6, "readQueueNums": 2, "writeQueueNums": 2}
        queues = [data | {"brokerName": name} for name in ("broker-b", "broker-a")]
        queues.append({"brokerName": "broker-c", "perm": 2, "readQueueNums": 9})
        return reply_to(frame, 0, body=fastjson.dumps({"queueDatas": queues}))


def test_all_brokers_of_the_topic_count(benches: Benches) -> None:
    server = Cluster(NAMESRV)
    bench = benches(namesrv=[server])
    bench.sent()
    member(bench, "c1")
    answer = bench.ask(C.QUERY_ASSIGNMENT, {}, asking("c1"))
    assert [one[:2] for one in assigned(answer) or []] == [
        ("broker-a", 0),
        ("broker-a", 1),
        ("broker-b", 0),
        ("broker-b", 1),
    ]
    server.is_silent = True
    assert assigned(bench.ask(C.QUERY_ASSIGNMENT, {}, asking("c1"))) is not None, "still fresh"
    bench.advance(31_000)
    waiting = bench.post(C.QUERY_ASSIGNMENT, {}, asking("c1"))
    assert bench.answer(waiting) is None
    bench.advance(3_000)
    answer = bench.answer(waiting)
    assert answer is not None and len(assigned(answer) or []) == 4, "the last that was known"


def test_shares_of_more_clients_than_queues() -> None:
    queues = [MessageQueue("T", "b", at) for at in range(2)]
    clients = ["a", "b", "c", "d"]
    mode = Mode("T", "G", "POP", 1)
    assert [divide("AVG", one, queues, clients, mode) for one in clients] == [
        [queues[0]],
        [queues[1]],
        [queues[0]],
        [queues[1]],
    ]
