"""Results of worker threads reach the loop, whether it looks by itself or has to be woken."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.client.workers import Job, Results, Tasks, Threads

ANY: Any = object()


class Watched:
    """Threads whose results are counted, and the wake-ups of the loop with them."""

    def __init__(self, limit: int = 4) -> None:
        self.done = 0
        self.wakes = 0
        self.results = Results(self._settle, 1)
        self.threads = Threads(self.results, limit, "test")
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any, **more: Any) -> Any:
            self.wakes += 1
            return wake(*arguments, **more)

        self.results._loop = SimpleNamespace(call_soon_threadsafe=counted)  # type: ignore[assignment]

    def _settle(self, results: Results) -> None:
        self.done += len(results.done)
        results.done.clear()

    def feed(self, handler: Any, count: int) -> None:
        queue: Any = SimpleNamespace(is_dropped=False)
        self.threads.feed([(ANY, queue, handler)] * count, count)

    async def until_done(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.done < count:
                await asyncio.sleep(0.0005)


def test_quick_results_do_not_wake_the_loop() -> None:
    async def work() -> None:
        watched = Watched()
        for round_number in range(1, 51):
            watched.feed(lambda message: None, 32)
            await watched.until_done(32 * round_number)
        watched.threads.close()
        assert watched.wakes <= 10  # now and then one is late on a busy machine

    asyncio.run(work())


def test_slow_results_wake_the_loop() -> None:
    async def work() -> None:
        watched = Watched()
        watched.feed(lambda message: time.sleep(0.05), 1)
        await watched.until_done(1)
        watched.threads.close()
        assert watched.wakes == 1

    asyncio.run(work())


@pytest.mark.parametrize("limit", [1, 3])
def test_no_result_is_forgotten_at_whatever_time_it_comes(limit: int) -> None:
    """Around the millisecond at which the loop looks, in which a result may fall between."""

    async def work() -> None:
        watched = Watched(limit)
        for step in range(1, 301):
            pause_s = 0.0006 + 0.000003 * step
            watched.feed(lambda message, pause_s=pause_s: time.sleep(pause_s), 1)
            await watched.until_done(step)
        watched.threads.close()

    asyncio.run(work())


def test_nobody_is_busy_once_all_is_done() -> None:
    async def work() -> None:
        watched = Watched(2)
        gate = threading.Event()
        watched.feed(lambda message: gate.wait(10) and None, 2)
        async with asyncio.timeout(10):
            while watched.threads.busy < 2:
                await asyncio.sleep(0.001)
            gate.set()
            while watched.threads.busy:
                await asyncio.sleep(0.001)
        watched.threads.close()

    asyncio.run(work())


# ------------------------------------------------------------------------------------------ tasks


def make_tasks(limit: int) -> tuple[Tasks, list[Job], list[Job]]:
    """Tasks, and lists of the jobs that were done and cut off."""
    done: list[Job] = []
    cut_off: list[Job] = []

    def settle(results: Results) -> None:
        done.extend(results.done)
        cut_off.extend(job for job, _ in results.cut_off)
        results.done.clear()
        results.cut_off.clear()

    return Tasks(Results(settle, 1), limit), done, cut_off


async def until(claim: Any) -> None:
    async with asyncio.timeout(5):
        while not claim():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["late", "waiting", "idle"])
def test_a_cancelled_worker_is_replaced(how: str) -> None:
    """Late: the handler has ended when its cancellation comes; it must not hit the next one."""

    async def work() -> None:
        tasks, done, cut_off = make_tasks(1)
        queue: Any = SimpleNamespace(is_dropped=False)

        async def handle(message: Any) -> None:
            if message == 0 and how != "idle":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            if message != 0 or how == "waiting":
                await asyncio.sleep(0)

        jobs: list[Any] = [(number, queue, handle) for number in range(4)]
        tasks.feed(jobs, 4)
        await until(lambda: len(done) + len(cut_off) == 4)
        assert [job[0] for job in cut_off] == ([0] if how == "waiting" else [])
        if how == "idle":
            tasks.tasks[0].cancel()
            await asyncio.sleep(0.01)
        tasks.feed(jobs[1:], 3)
        await until(lambda: len(done) + len(cut_off) == 7)
        assert len(tasks.tasks) == 1 and not tasks.busy(None)
        await tasks.close(None)

    asyncio.run(work())


def test_a_program_that_ends_is_not_held_up_by_workers() -> None:
    async def work() -> None:
        tasks, _, _ = make_tasks(2)
        queue: Any = SimpleNamespace(is_dropped=False)

        async def handle(message: Any) -> None:
            await asyncio.sleep(60 if message else 0)

        jobs: list[Any] = [(number, queue, handle) for number in range(2)]
        tasks.feed(jobs, 2)
        await asyncio.sleep(0.01)  # one at work, one idle; nobody closes them

    ending = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
