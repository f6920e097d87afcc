"""Offsets, shares and partitions of the Spark source, without Spark."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import UsageError
from cometmq.message import MessageQueue
from cometmq.spark.plan import (
    PACKED_ROWS,
    SMALL_ROWS,
    Range,
    StreamOffset,
    initial,
    is_initial,
    partition,
    ranges_between,
    share,
)

A0, A1, B0 = (MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0))


def test_an_offset_survives_json_and_equal_offsets_are_equal_text() -> None:
    one = StreamOffset({B0: 7, A0: 3}, {B0: 2}, lost=4)
    text = json.dumps(one.to_json())
    assert StreamOffset.from_json(json.loads(text)) == one
    assert json.dumps(StreamOffset({A0: 3, B0: 7}, {B0: 2}, lost=4).to_json()) == text


@pytest.mark.parametrize("raw", [{"v": 2, "q": {}}, {"topic": {"0": 1}}, {"v": 1}])
def test_a_checkpoint_of_something_else_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="another checkpoint"):
        StreamOffset.from_json(raw)


def test_the_first_batch_begins_where_its_end_says_however_often_it_is_asked() -> None:
    end = StreamOffset({A0: 10, A1: 4}, {A0: 3, A1: 4}).to_json()
    for start in ("latest", 1234, {"t": {"a": {0: 3}}}):
        symbol = initial(start)  # type: ignore[arg-type]
        assert is_initial(symbol)
        assert json.loads(json.dumps(symbol)) == symbol
        assert ranges_between(symbol, end) == [Range("t", "a", 0, 3, 10)]


def test_a_batch_goes_on_where_the_last_one_ended_and_begins_new_queues_where_told() -> None:
    start = StreamOffset({A0: 10, A1: 4}, {A0: 3}).to_json()
    end = StreamOffset({A0: 12, A1: 4, B0: 5}, {B0: 1}).to_json()
    assert ranges_between(start, end) == [Range("t", "a", 0, 10, 12), Range("t", "b", 0, 1, 5)]
    with pytest.raises(UsageError, match="does not say where topic 't' broker b queue 0 begins"):
        ranges_between(start, StreamOffset({B0: 5}, {}).to_json())


ROWS = st.dictionaries(
    st.integers(0, 30).map(lambda number: MessageQueue("t", "a", number)),
    st.integers(0, 100_000),
    max_size=12,
)


@given(ROWS, st.integers(1, 200_000))
def test_a_share_takes_all_that_fits_and_forgets_nobody(
    rows: dict[MessageQueue, int], most: int
) -> None:
    taken = share(rows, most)
    assert sum(taken.values()) == min(most, sum(rows.values()))
    assert all(0 < count <= rows[queue] for queue, count in taken.items())
    waiting = [queue for queue, count in rows.items() if count]
    if most >= len(waiting):
        assert set(taken) == set(waiting)


def test_a_share_is_in_proportion() -> None:
    taken = share({A0: 9_000, A1: 1_000}, 100)
    assert 85 <= taken[A0] <= 92


RANGES = st.lists(st.integers(0, 200_000), max_size=10).map(
    lambda sizes: [Range("t", "a", number, 5, 5 + size) for number, size in enumerate(sizes)]
)


@given(
    RANGES,
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1_000, 500_000),
)
def test_every_offset_is_in_exactly_one_partition(
    ranges: list[Range], at_least: int | None, at_most: int | None
) -> None:
    found = partition(ranges, at_least=at_least, at_most_rows=at_most)
    pieces = sorted((one.queue, one.begin, one.end) for part in found for one in part)
    for whole in ranges:
        at = whole.begin
        for queue, begin, end in pieces:
            if queue == whole.queue:
                assert begin == at < end
                at = end
        assert at == whole.end
    total = sum(map(len, ranges))
    if at_least is not None:
        assert len(found) >= min(at_least, total)
    if at_most is not None:
        assert all(sum(map(len, part)) <= at_most for part in found)


def test_small_ranges_share_a_partition_and_large_ones_do_not() -> None:
    small = [Range("t", "a", number, 0, 100) for number in range(8)]
    assert len(partition(small)) == 1
    large = Range("t", "a", 9, 0, 10 * SMALL_ROWS)
    assert sorted(len(part) for part in partition([*small, large])) == [1, 8]
    many = [Range("t", "a", number, 0, SMALL_ROWS - 1) for number in range(8)]
    assert all(sum(map(len, part)) <= PACKED_ROWS for part in partition(many))
    assert len(partition(many)) == 2


def test_nothing_to_read_needs_no_partition() -> None:
    assert partition([Range("t", "a", 0, 3, 3)], at_least=4) == []
