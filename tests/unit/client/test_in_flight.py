"""Messages that were pulled and are not yet finished."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from cometmq.client.in_flight import FlowLimits, InFlight, NoRoom


class Pull(msgspec.Struct, frozen=True):
    queue_offset: int
    size: int = 10


def pulls(*offsets: int) -> list[Pull]:
    return [Pull(offset) for offset in offsets]


def offsets_of(messages: list[Pull]) -> list[int]:
    return [message.queue_offset for message in messages]


def test_the_commit_offset_waits_for_the_lowest() -> None:
    flight: InFlight[Pull] = InFlight()
    assert flight.commit_offset is None
    flight.add(pulls(5, 6, 7, 9))
    assert flight.commit_offset == 5
    flight.finish([9, 6])
    assert flight.commit_offset == 5
    flight.finish([5])
    assert flight.commit_offset == 7
    flight.finish([7])
    assert flight.commit_offset == 10
    assert (flight.message_count, flight.size_bytes, flight.span) == (0, 0, 0)


def test_offset_zero_is_an_offset() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(0))
    assert flight.commit_offset == 0
    flight.finish([0])
    assert flight.commit_offset == 1


def test_filtered_messages_move_the_commit_offset_but_not_past_an_unfinished_one() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.advance_to(100)
    assert flight.commit_offset == 100
    flight.add(pulls(120))
    flight.advance_to(200)
    assert flight.commit_offset == 120
    flight.finish([120])
    flight.advance_to(50)
    assert flight.commit_offset == 200


def test_what_is_in_flight_already_is_not_new() -> None:
    flight: InFlight[Pull] = InFlight()
    assert offsets_of(list(flight.add(pulls(3, 4, 5)))) == [3, 4, 5]
    flight.finish([4])
    assert offsets_of(list(flight.add(pulls(5, 3, 4, 2, 6, 6)))) == [2, 4, 6]
    assert (flight.message_count, flight.size_bytes) == (5, 50)
    assert flight.commit_offset == 2
    assert not flight.add(pulls(5))
    flight.finish([7, 7, 2, 2, 3, 5, 6])
    assert (flight.message_count, flight.size_bytes, flight.commit_offset) == (1, 10, 4)
    flight.finish([4])
    assert flight.commit_offset == 7


def test_the_span_is_that_of_unfinished_messages() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(10, 20, 30, 40))
    assert flight.span == 30
    flight.finish([30, 40])
    assert flight.span == 10
    flight.finish([10])
    assert flight.span == 0


def test_room_names_the_limit_that_was_passed() -> None:
    limits = FlowLimits(message_count=3, size_bytes=100, span=50)
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(0, 1, 50))
    assert flight.room(limits) is None  # met, not passed
    flight.add(pulls(51))
    assert flight.room(limits) is NoRoom.COUNT
    flight.finish([1])
    assert flight.room(limits) is NoRoom.SPAN
    assert flight.room(FlowLimits(message_count=3, size_bytes=100, span=None)) is None
    flight.finish([0, 50])
    assert flight.room(limits) is None
    flight.add([Pull(60, size=91)])
    assert flight.room(limits) is NoRoom.SIZE
    assert FlowLimits() == FlowLimits(1_000, 104_857_600, 2_000)


def test_only_what_the_listener_has_had_for_too_long_is_overdue() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(1, 2, 3, 4))
    flight.started([2, 1], 1_000)
    flight.started([3, 99], 1_500)
    assert flight.overdue(1_900, 900) == []
    assert offsets_of(flight.overdue(1_901, 900)) == [1, 2]
    flight.finish([1])
    assert offsets_of(flight.overdue(10_000, 900)) == [2, 3]
    flight.finish_one(2)
    assert offsets_of(flight.overdue(10_000, 900)) == [3]


def test_orderly_takes_in_order_and_puts_back_to_the_front() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(1, 2, 3, 4))
    assert offsets_of(flight.take(2)) == [1, 2]
    assert (flight.commit_offset, flight.message_count) == (1, 4)
    with pytest.raises(AssertionError):
        flight.take(1)
    flight.started([1, 2], 0)
    flight.put_back()
    assert flight.overdue(10**9, 1) == []
    assert offsets_of(flight.take(3)) == [1, 2, 3]
    flight.add(pulls(5))
    flight.finish_taken()
    assert (flight.commit_offset, flight.message_count, flight.size_bytes) == (4, 2, 20)
    assert offsets_of(flight.take(9)) == [4, 5]
    flight.finish_taken()
    assert flight.commit_offset == 6
    assert flight.take(1) == []


def test_orderly_passes_over_what_was_finished_otherwise() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(1, 2, 3))
    flight.finish([2])
    assert offsets_of(flight.take(2)) == [1, 3]


def test_a_dropped_queue_takes_nothing_more_in() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(1, 2))
    flight.is_dropped = True
    assert not flight.add(pulls(3))
    flight.finish([1, 2])
    assert flight.commit_offset == 3


def test_after_clear_the_queue_can_be_read_from_elsewhere() -> None:
    flight: InFlight[Pull] = InFlight()
    flight.add(pulls(7, 8))
    flight.take(1)
    flight.started([7], 0)
    flight.clear()
    assert (flight.commit_offset, flight.message_count, flight.size_bytes) == (None, 0, 0)
    assert flight.overdue(10**9, 1) == []
    flight.finish([7])
    flight.add(pulls(2))
    flight.finish([2])
    assert flight.commit_offset == 3


@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_model_with_any_order_of_finishing(seed: int) -> None:
    rng = Random(seed)
    flight: InFlight[Pull] = InFlight()
    model: dict[int, int] = {}
    next_offset = rng.randrange(1_000)
    end = -1
    for _ in range(400):
        if rng.random() < 0.45:
            batch = []
            for _ in range(rng.randrange(8)):
                next_offset += rng.choice([0, 0, 0, 1, 5])
                batch.append(Pull(next_offset, rng.randrange(100)))
                next_offset += 1
            if rng.random() < 0.1 and model:  # a pull that goes back a bit
                begin = rng.choice(list(model)) - 2
                batch = [Pull(begin + at, rng.randrange(100)) for at in range(5) if begin >= 0]
                rng.shuffle(batch)
            fresh = flight.add(batch)
            assert offsets_of(list(fresh)) == sorted(
                one.queue_offset for one in batch if one.queue_offset not in model
            )
            for one in batch:
                model.setdefault(one.queue_offset, one.size)
                end = max(end, one.queue_offset + 1)
            next_offset = max(next_offset, end)
        elif model:
            done = rng.sample(sorted(model), rng.randint(1, len(model)))
            if rng.random() < 0.5:
                flight.finish([*done, end + 5])
            else:
                for offset in [*done, end + 5]:
                    flight.finish_one(offset)
            for offset in done:
                del model[offset]
        lowest = min(model, default=end)
        assert flight.commit_offset == (None if lowest < 0 else lowest)
        assert flight.message_count == len(model)
        assert flight.size_bytes == sum(model.values())
        assert flight.span == (max(model) - min(model) if model else 0)
