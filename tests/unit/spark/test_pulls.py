"""Pulls on the wire: the compiled way asks and reads as the codec does, whatever comes."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.client.connection import MAX_ANSWER_BYTES
from cometmq.client.reading import Filter
from cometmq.message import MessageQueue, NewMessage
from cometmq.spark import gather, worker
from cometmq.spark.client import Answer, Link, Pull, PullRequest, answer_of, plain_requests
from cometmq.spark.decode import Records, parts_of
from cometmq.wire import record
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
    return [(*one[:5], None if one[5] is None else encode_frame(one[5])) for one in answers]


@settings(max_examples=300, deadline=None)
@given(frames=st.lists(FRAMES, max_size=6), data=st.data())
def test_answers_are_what_the_codec_reads(frames: list[Frame], data: Any) -> None:
    raw = b"".join(map(encode_frame, frames))
    link = Link.__new__(Link)  # without a socket: only what is done with its bytes
    link._reader = FrameReader(MAX_ANSWER_BYTES)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    found: list[Answer] = []
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += link._answers(raw[begin:end])
    assert shown(found) == shown(plainly(raw))


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=60) | FRAMES.map(encode_frame), data=st.data())
def test_bytes_that_are_no_answer_are_left_to_the_codec(raw: bytes, data: Any) -> None:
    damaged = bytearray(raw)
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    found, end = WALK.pull_answers(bytes(damaged), MAX_ANSWER_BYTES)
    assert 0 <= end <= len(damaged)
    if found:
        assert found == plainly(bytes(damaged[:end]))


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
    for one in read:
        assert one.ext["topic"] == QUEUE.topic
        assert one.ext["queueId"] == "7"


def stored(body: bytes, offset: int) -> bytes:
    prepared = record.prepare(NewMessage("t", 1, body, "TAGS\x01a\x02"))
    raw = bytearray(prepared.size)
    record.write(raw, 0, prepared, queue_offset=offset, log_offset=offset * 999, store_ms=10**12)
    return bytes(raw)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bodies_that_are_joined_are_one_body(data: Any) -> None:
    raw = st.lists(st.binary(max_size=20), max_size=3).map(
        lambda some: b"".join(stored(one, number) for number, one in enumerate(some))
    )
    bodies = data.draw(st.lists(raw, max_size=4))
    joined, whole = Records(*bodies), Records(b"".join(bodies))
    assert joined.body == whole.body
    assert joined.starts.tolist() == whole.starts.tolist()
    assert joined.queue_offset.tolist() == whole.queue_offset.tolist()
    bounds = np.cumsum([0] + [len(body) for body in bodies])
    ends = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(bodies), max_size=9)))
    ends = ends[: len(bodies)].astype(np.int64)
    expected = all(
        offset < ends[part]
        for offset, part in zip(joined.queue_offset, parts_of(joined.starts, bounds), strict=True)
    )
    assert joined.are_before(ends, bounds) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cometmq.spark.decode.COMPILED", None)
        assert joined.are_before(ends, bounds) == expected


def test_pieces_outside_of_the_body_are_refused() -> None:
    def ints(*values: int) -> Any:
        return np.array(values, np.int64)

    assert gather.cut(b"abcdef", ints(0, 4), ints(2, 6), pa.binary()).to_pylist() == [b"ab", b"ef"]
    for begins, ends in (((-1,), (2,)), ((3,), (2,)), ((0,), (7,)), ((0, 1), (2,))):
        with pytest.raises(ValueError):
            WALK.cut(b"abcdef", ints(*begins), ints(*ends))
        with pytest.raises(ValueError):
            WALK.are_same(b"abcdef", ints(*begins), ints(*ends))
    with pytest.raises(ValueError):
        WALK.cut_places(b"abcdef", np.array([0, 7], np.int32).tobytes())


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
