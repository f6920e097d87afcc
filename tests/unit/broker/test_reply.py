"""Replies: pushed to who waits, answered by what that one said."""

from __future__ import annotations

import pytest

from cometmq.wire import properties
from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import Bench, bodies_of, response

TOPIC = "DefaultCluster_REPLY_TOPIC"
PROPS = {
    "MSG_TYPE": "reply",
    "CORRELATION_ID": "42",
    "REPLY_TO_CLIENT": "asker",
    "UNIQ_KEY": "U",
}


@pytest.fixture
def asker(bench: Bench) -> int:
    """The connection of a client that waits for replies."""
    conn = bench.connect()
    bench.beat("", client="asker", producers=("pg",), conn=conn)
    return conn


def test_a_reply_reaches_who_asked_and_its_sender_is_told(bench: Bench, asker: int) -> None:
    ext = bench.send_ext(TOPIC, props=PROPS)
    opaque = bench.post(C.SEND_REPLY_MESSAGE_V2, ext, b"yes")
    assert bench.answer(opaque) is None, "before the other end has it"
    (pushed,) = bench.requests_to(asker)
    assert (pushed.code, pushed.body) == (C.PUSH_REPLY_MESSAGE_TO_CLIENT, b"yes")
    told = properties.parse(pushed.ext["properties"])
    assert told["CORRELATION_ID"] == "42"
    assert int(told["PUSH_REPLY_TIME"]) == bench.now_ms
    assert pushed.ext["bornHost"].startswith("10.1.1.1:")
    bench.turn((asker, response(pushed)))
    answer = bench.answer(opaque)
    assert answer is not None and answer.code == 0
    assert bodies_of(bench.pull(TOPIC)) == [b"yes"], "stored as well"


def test_properties_without_an_end_stay_whole(bench: Bench, asker: int) -> None:
    """Clients of 4.9 leave out the last mark, and the id that is waited for may be the last."""
    last = {"REPLY_TO_CLIENT": "asker", "CORRELATION_ID": "42"}
    ext = bench.send_ext(TOPIC, props=last)
    ext["i"] = str(ext["i"]).removesuffix("\x02")
    bench.post(C.SEND_REPLY_MESSAGE_V2, ext, b"yes")
    (pushed,) = bench.requests_to(asker)
    told = properties.parse(pushed.ext["properties"])
    assert told == {**last, "PUSH_REPLY_TIME": str(bench.now_ms)}


def test_without_storing_it_has_no_place(benches: Benches) -> None:
    bench = benches(is_reply_stored=False)
    conn = bench.connect()
    bench.beat("", client="asker", producers=("pg",), conn=conn)
    opaque = bench.post(C.SEND_REPLY_MESSAGE, bench.send_ext(TOPIC, props=PROPS, code=10), b"yes")
    (pushed,) = bench.requests_to(conn)
    bench.turn((conn, response(pushed)))
    answer = bench.answer(opaque)
    assert answer is not None and (answer.code, answer.ext["msgId"]) == (0, "0")
    assert bench.store.max_log_offset == 0


def test_nobody_there_is_an_error_that_names_him(bench: Bench) -> None:
    answer = bench.ask(C.SEND_REPLY_MESSAGE_V2, bench.send_ext(TOPIC, props=PROPS), b"yes")
    assert answer.code == 1 and "'asker'" in (answer.remark or "")
    no_client = {key: value for key, value in PROPS.items() if key != "REPLY_TO_CLIENT"}
    answer = bench.ask(C.SEND_REPLY_MESSAGE_V2, bench.send_ext(TOPIC, props=no_client), b"yes")
    assert answer.code == 1 and "REPLY_TO_CLIENT" in (answer.remark or "")


def test_a_client_that_goes_refuses_or_says_nothing(bench: Bench, asker: int) -> None:
    refused = bench.post(C.SEND_REPLY_MESSAGE_V2, bench.send_ext(TOPIC, props=PROPS), b"1")
    (pushed,) = bench.requests_to(asker)
    bench.turn((asker, response(pushed, 1, remark="unknown")))
    answer = bench.answer(refused)
    assert answer is not None and answer.code == 1 and "unknown" in (answer.remark or "")
    silent = bench.post(C.SEND_REPLY_MESSAGE_V2, bench.send_ext(TOPIC, props=PROPS), b"2")
    bench.advance(10_000)
    answer = bench.answer(silent)
    assert answer is not None and answer.code == 1 and "in time" in (answer.remark or "")
    gone = bench.post(C.SEND_REPLY_MESSAGE_V2, bench.send_ext(TOPIC, props=PROPS), b"3")
    bench.disconnect(asker)
    answer = bench.answer(gone)
    assert answer is not None and answer.code == 1 and "lost" in (answer.remark or "")
    answer = bench.ask(C.SEND_REPLY_MESSAGE_V2, bench.send_ext(TOPIC, props=PROPS), b"4")
    assert answer.code == 1, "he is forgotten"
