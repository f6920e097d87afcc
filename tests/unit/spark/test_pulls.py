"""Pulls on the wire: the compiled way asks and reads as the codec does, whatever comes."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.client.connection import MAX_ANSWER_BYTES
from cometmq.client.reading import Filter
from cometmq.errors import FrameError
from cometmq.message import MessageQueue
from cometmq.spark import client, gather, worker
from cometmq.spark.client import (
    Answer,
    Link,
    Pull,
    PullRequest,
    Stretch,
    answer_of,
    plain_requests,
)
from cometmq.wire.codes import FLAG_RESPONSE
from cometmq.wire.frame import JSON, ROCKETMQ, Frame, FrameReader, encode_frame

assert gather.COMPILED is not None, "the compiled walk was not built"
WALK = gather.COMPILED
QUEUE = MessageQueue("orders %d é", "broker-a", 7)

NUMBERS = st.integers(0, 2**62).map(str)
ODD = st.sampled_from(["", "-1", "+5", " 7", "1_000", "٣", "9" * 19, "x", "00012"])
PLACES = st.fixed_dictionaries(
    {},
    optional={
        "nextBeginOffset": NUMBERS | ODD,
        "minOffset": NUMBERS | ODD,
        "maxOffset": NUMBERS | ODD,
        "suggestWhichBrokerId": st.just("0"),
        'a "name"\n': st.text(max_size=5),
    },
)
WHOLE = st.fixed_dictionaries(
    {"nextBeginOffset": NUMBERS, "minOffset": NUMBERS, "maxOffset": NUMBERS}
)
FRAMES = st.builds(
    Frame,
    code=st.sampled_from([0, 0, 0, 19, 21, 1]),
    opaque=st.integers(0, 2**31 - 1),
    flag=st.sampled_from([FLAG_RESPONSE, FLAG_RESPONSE, FLAG_RESPONSE, 0]),
    remark=st.sampled_from([None, None, "FOUND", 'é "\\ ']),
    ext=WHOLE | PLACES,
    body=st.binary(max_size=30),
    serialize=st.sampled_from([JSON, ROCKETMQ]),
)


def plainly(data: bytes) -> list[Answer]:
    return [answer_of(one) for one in FrameReader().feed(data) if one.is_response]


def shown(answers: list[Answer]) -> list[Any]:
    """With the bytes of bodies, wherever they stand."""
    return [
        (*one[:4], gather.joined([one[4]]), None if one[5] is None else encode_frame(one[5]))
        for one in answers
    ]


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@settings(max_examples=200, deadline=None)
@given(frames=st.lists(FRAMES, max_size=6), data=st.data())
def test_answers_are_what_the_codec_reads(
    is_compiled: bool, frames: list[Frame], data: Any
) -> None:
    raw = b"".join(map(encode_frame, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    found: list[Answer] = []
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(client, "COMPILED", None)
        patch.setattr(client, "BUFFER_BYTES", data.draw(st.sampled_from([32, 300, 5000])))
        patch.setattr(client, "LEAST_ROOM", 16)
        link = Fed()
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            found += link.feed(raw[begin:end])
    assert shown(found) == shown(plainly(raw))


class Fed(Link):
    """Without a socket: only what is done with its bytes."""

    def __init__(self) -> None:
        self._data, self._begin, self._end = np.empty(0, np.uint8), 0, 0

    def feed(self, data: bytes) -> list[Answer]:
        found: list[Answer] = []
        while data:
            self._make_room()
            room = len(self._data) - self._end
            assert room > 0
            some, data = data[:room], data[room:]
            self._data[self._end : self._end + len(some)] = np.frombuffer(some, np.uint8)
            self._end += len(some)
            noted, answers = self._answers([])
            assert noted == 0
            found += answers
        return found


NONE = np.empty(0, np.int64)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=60) | FRAMES.map(encode_frame), data=st.data())
def test_bytes_that_are_no_answer_are_left_to_the_codec(raw: bytes, data: Any) -> None:
    damaged = bytearray(raw)
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    whole = bytes(damaged)
    noted, found, end = WALK.take_answers(whole, 0, len(whole), MAX_ANSWER_BYTES, 0, NONE, NONE)
    assert noted == 0
    assert 0 <= end <= len(damaged)
    if found:
        assert shown(found) == shown(plainly(whole[:end]))


def test_a_length_that_no_frame_has_is_an_error_at_once() -> None:
    for length in (b"\0\0\0\3", b"\x7f\0\0\0", b"\xff\xff\xff\xff"):
        with pytest.raises(FrameError, match="frame of"):
            Fed().feed(length)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**62), st.integers(1, 4096), st.integers(1, 2**31 - 1)),
        max_size=5,
    )
)
def test_requests_are_what_the_codec_writes(pulls: list[Pull]) -> None:
    request = PullRequest("group", QUEUE, Filter())
    compiled = WALK.pull_requests(request._pieces, pulls)
    assert compiled == plain_requests(request._pieces, pulls)
    read = FrameReader().feed(compiled)
    assert [
        (int(one.ext["queueOffset"]), int(one.ext["maxMsgNums"]), one.opaque) for one in read
    ] == pulls
    stretch = Stretch(10**12 - 5, 7, len(pulls))
    stretch.first = 99_998
    both = request.encode([stretch], pulls)
    assert both == plain_requests(request._pieces, [*stretch.pulls(), *pulls])
    for one in read:
        assert one.ext["topic"] == QUEUE.topic
        assert one.ext["queueId"] == "7"


def test_pieces_outside_of_the_body_are_refused() -> None:
    def ints(*values: int) -> Any:
        return np.array(values, np.int64)

    assert gather.cut(b"abcdef", ints(0, 4), ints(2, 6)).to_pylist() == [b"ab", b"ef"]
    for begins, ends in (((-1,), (2,)), ((3,), (2,)), ((0,), (7,)), ((0, 1), (2,))):
        with pytest.raises(ValueError):
            WALK.cut(b"abcdef", ints(*begins), ints(*ends))
        with pytest.raises(ValueError):
            WALK.read_records(b"abcdef", ints(*begins), ints(*ends), ())
    with pytest.raises(ValueError):
        WALK.cut_places(b"abcdef", np.array([0, 7], np.int32))
    for at, end in ((-1, 3), (4, 3), (0, 7)):
        with pytest.raises(ValueError):
            WALK.take_answers(b"abcdef", at, end, 1000, 0, NONE, NONE)
    with pytest.raises(ValueError):
        WALK.take_answers(b"abcdef", 0, 6, 1000, 0, ints(1), ints(-1))


def test_what_a_worker_has_loaded_is_not_collected_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker, "_ready_pid", 0)
    try:
        worker.get_ready()
        assert gc.get_freeze_count() > 10_000
        assert worker._ready_pid == os.getpid()
        gc.unfreeze()
        worker.get_ready()  # again does nothing
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()
