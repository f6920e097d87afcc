"""Strangers, slow peers and greedy peers against a real server: each limit holds and is counted."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable

import pytest

from cometmq.client.remote import Remote
from cometmq.wire import headers
from cometmq.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame
from programs import Program, pull_ext, send

Up = Callable[..., Program]


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host, int(port)), 10)
    peer.settimeout(10)
    return peer


def _is_closed(peer: socket.socket, within_s: float) -> bool:
    peer.settimeout(within_s)
    try:
        while peer.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def _figures(program: Program) -> dict[str, str]:
    with Remote(program.broker) as remote:
        body = remote.call(RequestCode.GET_BROKER_RUNTIME_INFO).body
    table: dict[str, str] = json.loads(body)["table"]
    return table


@pytest.mark.parametrize("which", ["broker", "namesrv"])
def test_http_is_answered_with_a_hint(up: Up, which: str) -> None:
    program = up()
    host, _, port = program.places[which].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"remoting protocol, not HTTP" in answer.read()
    connection.close()
    assert "protocol=HTTP" in program.wait_for_error("stranger")


def test_tls_is_refused_with_a_hint(up: Up) -> None:
    program = up()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError), _connect(program.broker) as peer:
        context.wrap_socket(peer).do_handshake()
    assert "turn TLS off in the client" in program.wait_for_error("protocol=TLS")


def test_grpc_is_refused_with_a_hint(up: Up) -> None:
    program = up()
    with _connect(program.broker) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        answer = peer.recv(4096)
        assert answer[3] == 4  # SETTINGS first, as HTTP/2 demands
        assert b"need a proxy" in answer
    assert "protocol=gRPC" in program.wait_for_error("stranger")


@pytest.mark.parametrize(
    "data",
    [b"\x7f\xff\xff\xff" + b"x" * 100, b"\0\0\0\x02xx", b"\0\0\0\x10\x05\0\0\x04" + b"x" * 12],
    ids=["huge length", "tiny length", "unknown serialization"],
)
def test_bytes_that_are_no_frame_end_the_connection(up: Up, data: bytes) -> None:
    program = up()
    with _connect(program.broker) as peer:
        peer.sendall(data)
        assert _is_closed(peer, 5)
    program.wait_for_error("bad bytes")
    with Remote(program.broker) as remote:
        assert send(remote, "orders", b"still alive").code == 0


def test_a_silent_connection_is_closed(up: Up) -> None:
    program = up({"serverChannelMaxIdleTimeMills": "1000"})
    with _connect(program.broker) as peer:
        assert _is_closed(peer, 6)
    program.wait_for_error("silent for more than 1000 ms")
    assert _figures(program)["cometmqNetDroppedIdle"] == "1"


def test_a_frame_that_never_ends_is_not_waited_for(up: Up) -> None:
    program = up({"frameTimeoutMills": "1000"})
    with _connect(program.broker) as peer:
        frame = encode_frame(Frame(RequestCode.GET_BROKER_RUNTIME_INFO))
        peer.sendall(frame[:-1])
        assert _is_closed(peer, 6)
    program.wait_for_error("took more than 1000 ms to arrive")


def test_too_many_connections_are_refused_and_counted(up: Up) -> None:
    program = up({"maxConnections": "8"})
    peers = [_connect(program.broker) for _ in range(12)]
    time.sleep(0.3)
    closed = sum(_is_closed(peer, 0.05) for peer in peers)
    assert closed >= 4
    program.wait_for_error("maxConnections=8 reached")
    for peer in peers:
        peer.close()
    time.sleep(0.3)
    with Remote(program.broker) as remote:
        assert send(remote, "orders", b"room again").code == 0


def test_a_peer_that_does_not_read_is_dropped_and_not_buffered(up: Up) -> None:
    program = up({"maxOutboxBytes": "2000000", "frameTimeoutMills": "2000"})
    with Remote(program.broker) as remote:
        for _ in range(4):
            assert send(remote, "orders", b"x" * 200_000).code == 0
    before = _memory_kb(program)
    with _connect(program.broker) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frame = encode_frame(Frame(RequestCode.PULL_MESSAGE, ext=pull_ext("orders", 0, 0)))
        give_up = time.monotonic() + 20
        peer.settimeout(0.2)
        dropped = False
        while time.monotonic() < give_up and not dropped:
            try:
                peer.sendall(frame * 50)
            except TimeoutError:
                dropped = any("drop conn" in line for line in program.errors)
            except OSError:
                dropped = True
        assert dropped
    assert "not read" in program.wait_for_error("drop conn")
    assert _memory_kb(program) - before < 60_000
    with Remote(program.broker) as remote:
        assert send(remote, "orders", b"others go on").code == 0


def _memory_kb(program: Program) -> int:
    with open(f"/proc/{program.process.pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["RssAnon"].split()[0])


def test_parked_pulls_have_a_limit_with_a_counter(up: Up) -> None:
    program = up({"maxParkedPulls": "3"})
    with Remote(program.broker) as remote:
        send(remote, "orders", b"x")
        held = [
            remote.send(RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 1, suspend_ms=15_000))
            for _ in range(4)
        ]
        assert remote.wait(held[3], 2_000).code == ResponseCode.PULL_NOT_FOUND
        assert _figures(program)["cometmqParkedPulls"] == "3"
        assert _figures(program)["cometmqParkedPullsLimitReached"] == "1"


def test_topics_have_a_limit_with_a_counter(up: Up) -> None:
    program = up({"maxTopics": "20"})
    with Remote(program.broker) as remote:
        answers = [send(remote, f"t{number}", b"x") for number in range(20)]
    refused = [answer for answer in answers if answer.code != 0]
    assert refused
    assert "maxTopics" in str(refused[0].remark)
    assert int(_figures(program)["cometmqTopicsLimitReached"]) == len(refused)


def test_a_waiting_pull_wakes_on_arrival_and_only_for_its_tag(up: Up) -> None:
    program = up()
    with Remote(program.broker) as remote, Remote(program.broker) as other:
        send(other, "orders", b"first")
        held = remote.send(
            RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 1, suspend_ms=10_000, tags="test-*")
        )
        send(other, "orders", b"no", tag="prod-1")
        send(other, "orders", b"yes", tag="test-1")
        began = time.monotonic()
        answer = remote.wait(held, 5_000)
        assert time.monotonic() - began < 4
        assert answer.code == 0
        assert b"yes" in answer.body
        assert b"prod-1" not in answer.body


@pytest.mark.parametrize("is_compiled", ["true", "false"])
def test_oneway_requests_of_a_client_that_closes_behind_them_are_served(
    up: Up, is_compiled: str
) -> None:
    settings = {"compiledPathEnable": is_compiled, "waitTimeMillsInSendQueue": "60000"}
    program = up(settings)
    header = headers.SendHeader(
        producerGroup="g",
        topic="orders",
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=0,
        sysFlag=0,
        bornTimestamp=1,
        flag=0,
        properties="DELAY\x0118\x02",  # never on the compiled path
    )
    ext = headers.send_v2_ext(header)
    one = Frame(RequestCode.SEND_MESSAGE_V2, flag=FLAG_ONEWAY, ext=ext, body=b"x")
    with _connect(program.broker) as peer:
        peer.sendall(encode_frame(one) * 2_000)
    place = {"topic": "SCHEDULE_TOPIC_XXXX", "queueId": "17"}
    give_up = time.monotonic() + 20
    found = 0
    with Remote(program.broker) as remote:
        while found < 2_000 and time.monotonic() < give_up:
            found = int(remote.call(RequestCode.GET_MAX_OFFSET, place).ext["offset"])
            time.sleep(0.02)
    assert found == 2_000
