"""Who runs a consumer's handlers: threads for plain functions, tasks for async ones.

Owns: jobs that wait, who works on which, and the way of results back to the event loop. One rule: a
job ends in exactly one of: done, failed, cut off (cancelled, interrupted), or dropped before it
began; only `done` acknowledges.

A message costs no task, future or lock of its own: jobs wait in a deque that workers empty one by
one, results come back in deques that the loop empties in bulk. Waking is what costs, so workers are
woken one at a time: a second task only when the first one's handler has suspended, a second thread
only when jobs have waited for a millisecond and fewer than 30 were begun meanwhile (a handler that
quick is bound by the interpreter's lock; more threads would only take turns). The loop looks for
results a millisecond after it gave jobs to threads, so quick ones need not wake it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from enum import Enum
from queue import SimpleQueue
from typing import Any

from cometmq.client.handling import EXITS, Later
from cometmq.client.pulling import PulledQueue
from cometmq.client.received import ReceivedMessage
from cometmq.errors import UsageError

log = logging.getLogger("cometmq.client")

Given = ReceivedMessage | list[ReceivedMessage]
Handler = Callable[[Any], object]
"""Takes one ReceivedMessage, or a list of them with batch > 1."""
Job = tuple[Given | None, PulledQueue, Handler]
"""None: whatever waits in the line of an ordered queue."""
Verdict = Later | BaseException

LOOK_S = 0.001  # how long jobs wait before another thread is woken
QUICK_PER_MS = 30  # jobs in a millisecond from which on more threads are no use
BURST = 256  # jobs that a task does before it lets the loop turn
LINE_BURST = 1_000  # messages of one ordered queue before another queue has its turn


class Outcome(Enum):
    """What a handler's call came to, for hooks."""

    DONE = "done"
    LATER = "later"
    FAILED = "failed"


Hook = Callable[[list[ReceivedMessage], Outcome, int, int], object]
"""(messages, outcome, started_ms, ended_ms), called on the event loop."""


def is_async(handler: Handler) -> bool:
    """Whether calling it gives a coroutine."""
    while hasattr(handler, "func"):  # functools.partial
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def as_list(given: Given | None) -> list[ReceivedMessage]:
    if given is None:
        return []
    return given if isinstance(given, list) else [given]


class Results:
    """What workers came to, on its way to the loop. Appended to by any thread."""

    def __init__(self, on_results: Callable[[Results], None], batch: int) -> None:
        self.batch = batch
        self.done: deque[Job] = deque()
        self.failed: deque[tuple[Job, Verdict]] = deque()
        self.cut_off: deque[tuple[Job, BaseException]] = deque()
        self.lines: deque[PulledQueue] = deque()
        """Ordered queues that nobody works on any more."""
        self.told: deque[tuple[list[ReceivedMessage], Outcome, int, int]] = deque()
        self.hooks: list[Hook] = []
        self._on_results = on_results
        self._loop = asyncio.get_running_loop()
        self._is_announced = False
        self.is_expected = False
        """The loop will look within LOOK_S by itself. Cleared before it does: who appends first and
        then reads this is seen, or has to announce."""

    def looked_for(self) -> None:
        """The loop looks, as it was expected to."""
        self.is_expected = False
        self.collect()

    def announce(self) -> None:
        """From a thread: have the loop look, if it does not by itself."""
        if not self.is_expected:
            self.announce_now()

    def announce_now(self) -> None:
        """From a thread: have the loop look at once, once for all that is there when it does."""
        if not self._is_announced:
            self._is_announced = True
            try:
                self._loop.call_soon_threadsafe(self.collect)
            except RuntimeError:  # the loop has ended; nobody is left to be told
                log.debug("result_dropped reason=the event loop is closed")

    def announce_here(self) -> None:
        """On the loop's own thread."""
        if not self._is_announced:
            self._is_announced = True
            self._loop.call_soon(self.collect)

    def collect(self) -> None:
        self._is_announced = False
        # Hooks first: what comes of a result may change the message (its reconsume_times).
        while self.told:
            told = self.told.popleft()
            for hook in list(self.hooks):
                try:
                    hook(*told)
                except Exception:
                    log.exception("hook_failed hook=%r", hook)
        self._on_results(self)

    def took(self, job: Job, result: object) -> Outcome:
        """A handler has returned: what that means."""
        if isinstance(result, Later):
            self.failed.append((job, result))
            return Outcome.LATER
        if inspect.iscoroutine(result):
            result.close()
            text = "the handler is a plain function that returned a coroutine; declare it async def"
            self.failed.append((job, UsageError(text)))
            return Outcome.FAILED
        self.done.append(job)
        return Outcome.DONE

    def tell(self, job: Job, outcome: Outcome, began_ms: int) -> None:
        self.told.append((as_list(job[0]), outcome, began_ms, time.time_ns() // 1_000_000))

    def next_of_line(self, queue: PulledQueue, handler: Handler) -> Job | None:
        """The next messages of an ordered queue; None if there is none or it may not be handled."""
        line = queue.line
        if queue.is_dropped or queue.is_stopped or not line or not queue.is_lock_alive:
            return None
        some: list[ReceivedMessage] = []
        topic = queue.line_topic
        try:
            while len(some) < self.batch and line and line[0].topic == topic:
                some.append(line.popleft())
        except IndexError:  # the loop has emptied it meanwhile
            pass
        if not some:
            return None
        return some if self.batch > 1 else some[0], queue, handler


class Threads:
    """Worker threads, started when they are needed, `limit` at most."""

    def __init__(self, results: Results, limit: int, name: str) -> None:
        self._results = results
        self._limit = limit
        self._name = name
        self._jobs: deque[Job] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self.running: list[Job | None] = []
        """By worker, what it works on, until it takes the next job or finds none."""
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.TimerHandle | None = None
        self._fed = 0
        self._taken_before = 0
        self._looked = 0.0

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    @property
    def threads(self) -> list[threading.Thread]:
        return self._threads

    def feed(self, jobs: Iterable[Job], count: int) -> None:
        self._jobs.extend(jobs)
        self._fed += count
        if self._idle == len(self._threads) and self._wake.empty():
            self._wake_some(1)
        if self._look is None:
            self._look_soon(self._loop.time(), self._fed - len(self._jobs))

    def _look_soon(self, now: float, taken: int) -> None:
        self._taken_before, self._looked = taken, now
        self._results.is_expected = True
        self._look = self._loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        """Jobs have waited: if they are not being done quickly, have as many more at it."""
        self._look = None
        self._results.looked_for()
        if not self._jobs or self._is_closed or self._look is not None:
            return
        now, taken = self._loop.time(), self._fed - len(self._jobs)
        if taken - self._taken_before < (now - self._looked) * 1e3 * QUICK_PER_MS:
            self._wake_some(max(len(self._threads) - self._idle, 1))
        self._look_soon(now, taken)

    def _wake_some(self, count: int) -> None:
        count = min(count, len(self._jobs))
        woken = max(0, min(self._idle - self._wake.qsize(), count))
        for _ in range(woken):
            self._wake.put(None)
        for _ in range(min(count - woken, self._limit - len(self._threads))):
            number = len(self._threads)
            self.running.append(None)
            thread = threading.Thread(
                target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, number: int) -> None:
        results, jobs, running = self._results, self._jobs, self.running
        done, take = results.done.append, jobs.popleft
        while True:
            try:
                job = take()
            except IndexError:
                running[number] = None
                with self._lock:
                    self._idle += 1
                if not jobs and not self._is_closed:
                    self._wake.get()
                with self._lock:
                    self._idle -= 1
                if self._is_closed:
                    return
                continue
            given, queue, handler = job
            if queue.is_dropped and given is not None:
                continue
            running[number] = job
            if given is None:
                self._work_line(queue, handler)
                results.lines.append(queue)
                results.announce_now()  # the queue's next message waits for that
            elif results.hooks:
                self._run_told(job)
            else:
                try:
                    result = handler(given)
                    if result is None:
                        done(job)
                    else:
                        results.took(job, result)
                except Exception as error:
                    results.failed.append((job, error))
                except BaseException as error:
                    results.cut_off.append((job, error))
            if not results.is_expected:
                results.announce()

    def _run_told(self, job: Job) -> Outcome:
        given, _, handler = job
        results = self._results
        began_ms = time.time_ns() // 1_000_000
        outcome = Outcome.FAILED
        try:
            outcome = results.took(job, handler(given))
        except Exception as error:
            results.failed.append((job, error))
        except BaseException as error:
            results.cut_off.append((job, error))
        if results.hooks:
            results.tell(job, outcome, began_ms)
        return outcome

    def _work_line(self, queue: PulledQueue, handler: Handler) -> None:
        for _ in range(LINE_BURST):
            job = self._results.next_of_line(queue, handler)
            if job is None or self._run_told(job) is not Outcome.DONE or self._is_closed:
                return
            self._results.announce()

    def drop_waiting(self) -> None:
        self._jobs.clear()

    @property
    def busy(self) -> int:
        return sum(job is not None for job in self.running)

    def close(self) -> None:
        """No thread begins another job; those that wait end."""
        self._is_closed = True
        self._jobs.clear()
        for _ in self._threads:
            self._wake.put(None)


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, object], waits_for: Any) -> Generator[Any, Any, object]:
    """The rest of a coroutine whose first step has been made, as part of the current task."""
    while True:
        try:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(sent)
        except StopIteration as end:
            return end.value


class Tasks:
    """Worker tasks, started when they are needed, `limit` at most.

    A cancellation ends its worker, whoever asked for it: a program that ends cancels all tasks. The
    next job that nobody else is there for starts another in its place.
    """

    def __init__(self, results: Results, limit: int) -> None:
        self._results = results
        self._limit = limit
        self._jobs: deque[Job] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._gone: list[int] = []
        """Workers that were cancelled, by number."""
        self.tasks: list[asyncio.Task[None]] = []
        self.running: list[Job | None] = []
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def busy(self, asker: asyncio.Task[Any] | None) -> int:
        """Handlers at work; the one that asks is not counted, it would wait for itself."""
        return sum(
            job is not None and self.tasks[number] is not asker
            for number, job in enumerate(self.running)
        )

    def feed(self, jobs: Iterable[Job], count: int) -> None:
        self._jobs.extend(jobs)
        self._wake_one()

    def _wake_one(self) -> None:
        while self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                return
        if self._gone:
            number = self._gone.pop()
            self.tasks[number] = self._loop.create_task(self._live(number))
        elif len(self.tasks) < self._limit:
            self.running.append(None)
            self.tasks.append(self._loop.create_task(self._live(len(self.tasks))))

    async def _live(self, number: int) -> None:
        try:
            await self._work(number)
        finally:
            self.running[number] = None
            if not self._is_closed:
                self._gone.append(number)
                if self._jobs:
                    self._wake_one()

    async def _work(self, number: int) -> None:
        jobs, running, results = self._jobs, self.running, self._results
        me = asyncio.current_task()
        assert me is not None
        burst = 0
        while not self._is_closed:
            if not jobs:
                future = self._loop.create_future()
                self._idle.append(future)
                await future
                burst = 0
                continue
            job = jobs.popleft()
            given, queue, handler = job
            if queue.is_dropped and given is not None:
                continue
            running[number] = job
            if given is None:
                await self._work_line(queue, handler)
                results.lines.append(queue)
            else:
                await self._run(job)
            running[number] = None
            results.announce_here()
            if me.cancelling():  # it may still be to come, and would hit the next handler
                return
            burst += 1
            if burst >= BURST:
                burst = 0
                await asyncio.sleep(0)

    def _run(self, job: Job) -> Awaitable[Outcome]:
        """One call of a handler. Whatever it raises is a result."""
        return self._run_told(job) if self._results.hooks else self._run_plain(job)

    async def _run_plain(self, job: Job) -> Outcome:
        results = self._results
        try:
            coroutine: Any = job[2](job[0])
            try:
                waits_for = coroutine.send(None)
            except StopIteration as end:  # it did not wait for anything: the usual quick handler
                if end.value is None:
                    results.done.append(job)
                    return Outcome.DONE
                return results.took(job, end.value)
            if self._jobs:
                self._wake_one()
            return results.took(job, await _go_on(coroutine, waits_for))
        except Exception as error:
            results.failed.append((job, error))
        except (asyncio.CancelledError, *EXITS) as error:
            results.cut_off.append((job, error))
        return Outcome.FAILED

    async def _run_told(self, job: Job) -> Outcome:
        began_ms = time.time_ns() // 1_000_000
        outcome = await self._run_plain(job)
        self._results.tell(job, outcome, began_ms)
        return outcome

    async def _work_line(self, queue: PulledQueue, handler: Handler) -> None:
        me = asyncio.current_task()
        assert me is not None
        for _ in range(LINE_BURST):
            job = self._results.next_of_line(queue, handler)
            if job is None or await self._run(job) is not Outcome.DONE or self._is_closed:
                return
            self._results.announce_here()
            if me.cancelling():
                return

    def drop_waiting(self) -> None:
        self._jobs.clear()

    async def close(self, asker: asyncio.Task[Any] | None) -> None:
        """Cancel what still runs, but not who asks for it."""
        self._is_closed = True
        self._jobs.clear()
        tasks = [task for task in self.tasks if task is not asker]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
