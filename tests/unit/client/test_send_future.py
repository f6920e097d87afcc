"""SendFuture does what concurrent.futures.Future does, also when threads meet at its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import Any

import pytest

from cometmq.client.send_future import SendFuture

KINDS = [Future, SendFuture]
LIMIT_S = 10.0


def both(act: Callable[[Any], object]) -> object:
    """What `act` comes to with our future; the library's own must come to the same."""
    outcomes = []
    for kind in KINDS:
        try:
            outcomes.append(act(kind()))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    return outcomes[1]


# ----------------------------------------------------------------------- one thread: as the library


STEPS: dict[str, Callable[[Any], object]] = {
    "begin": lambda future: future.set_running_or_notify_cancel(),
    "cancel": lambda future: future.cancel(),
    "result": lambda future: future.set_result(7),
    "error": lambda future: future.set_exception(ValueError("no")),
    "callback": lambda future: future.add_done_callback(lambda one: None),
    "wait": lambda future: len(concurrent.futures.wait([future], 0).done),
    "repr": lambda future: repr(future).partition(" state=")[2],
}


@pytest.mark.parametrize("steps", list(itertools.product(STEPS, repeat=3)))
def test_every_three_steps_come_to_the_same(steps: tuple[str, ...]) -> None:
    def act(future: Any) -> list[object]:
        seen: list[object] = []
        future.add_done_callback(lambda one: seen.append(one is future))
        for step in steps:
            try:
                seen.append(STEPS[step](future))
            except InvalidStateError:
                seen.append("invalid")
            except RuntimeError:  # the library's word for a second begin
                seen.append("invalid")
            seen.append((future.done(), future.running(), future.cancelled()))
        try:
            seen.append(future.result(0))
        except (Exception, CancelledError) as error:
            seen.append(type(error))
        try:
            seen.append(repr(future.exception(0)))
        except (Exception, CancelledError) as error:
            seen.append(type(error))
        return seen

    both(act)


def test_many_begin_at_once_but_for_the_cancelled() -> None:
    begun, cancelled = SendFuture[int](), SendFuture[int]()
    assert cancelled.cancel()
    SendFuture.begin_all([begun, cancelled])
    assert begun.running() and not begun.cancel()
    assert not cancelled.running()
    assert concurrent.futures.wait([cancelled], 0).done == {cancelled}


def test_callbacks_run_in_their_order_once_and_a_broken_one_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []
    future: SendFuture[int] = SendFuture(lambda one: seen.append(0))
    future.add_done_callback(lambda one: 1 / 0)
    future.add_done_callback(lambda one: seen.append(one.result()))
    future.set_result(1)
    future.add_done_callback(lambda one: seen.append(2))
    assert seen == [0, 1, 2]
    assert "ZeroDivisionError" in caplog.text


def test_no_condition_is_made_for_who_only_looks() -> None:
    future: SendFuture[int] = SendFuture(lambda one: None)
    SendFuture.begin_all([future])
    assert not future.done()
    future.set_result(5)
    assert future.done() and future.result() == 5 and future.exception() is None
    assert future._made is None


def test_it_can_be_awaited() -> None:
    async def work() -> None:
        futures = [SendFuture[int]() for _ in range(3)]
        SendFuture.begin_all(futures[:2])
        ended = threading.Thread(target=lambda: (futures[0].set_result(3), fail(futures[1])))
        waiting = [asyncio.wrap_future(one) for one in futures]
        waiting[2].cancel()  # goes through to the one that was not begun
        ended.start()
        assert await waiting[0] == 3
        with pytest.raises(ValueError):
            await waiting[1]
        with pytest.raises(asyncio.CancelledError):
            await waiting[2]
        assert futures[2].cancelled()
        ended.join()

    asyncio.run(work())


def fail(future: SendFuture[int]) -> None:
    future.set_exception(ValueError("no"))


# -------------------------------------------------------------------------------- threads that meet


@pytest.fixture
def quick_turns() -> Any:
    """Threads take turns as often as the interpreter lets them: races that are there, show."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def race(*parts: Callable[[], object]) -> None:
    """All parts at once, each on its thread; what one raises, or that one hangs, fails the test."""
    barrier = threading.Barrier(len(parts))
    errors: list[BaseException] = []

    def run(part: Callable[[], object]) -> None:
        try:
            barrier.wait(LIMIT_S)
            part()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in parts]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LIMIT_S)
        assert not one.is_alive(), "a waiter was never woken"
    assert not errors, errors


ROUNDS = 150


def test_waiters_who_come_while_it_ends(quick_turns: None) -> None:
    for number in range(ROUNDS):
        future: SendFuture[int] = SendFuture()
        SendFuture.begin_all([future])
        got: list[object] = []

        def wait(future: SendFuture[int] = future, got: list[object] = got) -> None:
            got.append(future.result(LIMIT_S))

        def end(future: SendFuture[int] = future, number: int = number) -> None:
            future.set_result(number)

        race(wait, end, wait, wait)
        assert got == [number] * 3


def test_callbacks_that_are_added_while_it_ends_run_once_each(quick_turns: None) -> None:
    for _ in range(ROUNDS):
        future: SendFuture[int] = SendFuture()
        SendFuture.begin_all([future])
        called: list[int] = []

        def add(base: int, future: SendFuture[int] = future, called: list[int] = called) -> None:
            for step in range(5):
                future.add_done_callback(partial(lambda tag, one: called.append(tag), base + step))

        race(partial(add, 0), partial(future.set_result, 1), partial(add, 100))
        deadline = time.monotonic() + LIMIT_S
        while len(called) < 10 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sorted(called) == [*range(5), *range(100, 105)]


def test_it_is_either_begun_or_cancelled(quick_turns: None) -> None:
    begun_count = 0
    for _ in range(ROUNDS):
        future: SendFuture[int] = SendFuture()
        said: dict[str, bool] = {}

        def begin(future: SendFuture[int] = future, said: dict[str, bool] = said) -> None:
            SendFuture.begin_all([future])
            said["begun"] = future.running()
            if said["begun"]:
                future.set_result(1)

        def cancel(future: SendFuture[int] = future, said: dict[str, bool] = said) -> None:
            said["cancelled"] = future.cancel()

        race(begin, cancel)
        assert said["begun"] != said["cancelled"]
        assert future.done() and future.cancelled() == said["cancelled"]
        begun_count += said["begun"]
    assert 0 <= begun_count <= ROUNDS


@pytest.mark.parametrize("return_when", ["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"])
def test_wait_counts_each_end_once(quick_turns: None, return_when: str) -> None:
    """`wait` looks at all states twice while it holds the conditions: they must not move."""
    rng = random.Random(7)
    for _ in range(ROUNDS):
        futures = [SendFuture[int]() for _ in range(6)]
        SendFuture.begin_all(futures)
        order = rng.sample(futures, len(futures))

        def end(order: list[SendFuture[int]] = order) -> None:
            for number, one in enumerate(order):
                if number == 3:
                    one.set_exception(ValueError("no"))
                else:
                    one.set_result(number)

        def wait(futures: list[SendFuture[int]] = futures) -> None:
            ended = concurrent.futures.wait(futures, LIMIT_S, return_when)
            assert all(one.done() for one in ended.done)
            if return_when == "ALL_COMPLETED":
                assert len(ended.done) == len(futures)
            elif return_when == "FIRST_COMPLETED":
                assert ended.done
            else:
                assert order_fails_in(ended.done) or len(ended.done) == len(futures)

        race(wait, end, wait)


def order_fails_in(done: set[Future[int]]) -> bool:
    return any(one.exception() is not None for one in done)


def test_as_completed_gives_each_once(quick_turns: None) -> None:
    for _ in range(ROUNDS):
        futures = [SendFuture[int]() for _ in range(6)]
        SendFuture.begin_all(futures)

        def end(futures: list[SendFuture[int]] = futures) -> None:
            for number, one in enumerate(futures):
                one.set_result(number)

        def collect(futures: Sequence[Future[int]] = futures) -> None:
            found = [one.result() for one in concurrent.futures.as_completed(futures, LIMIT_S)]
            assert sorted(found) == list(range(6))

        race(collect, end, collect)


def test_a_wait_with_a_timeout_ends_and_leaves_it_usable() -> None:
    future: SendFuture[int] = SendFuture()
    SendFuture.begin_all([future])
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            wait(0.01)
    future.set_result(4)
    assert future.result(0) == 4
