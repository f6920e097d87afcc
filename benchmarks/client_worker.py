"""One shape of benchmarks/client.py, done by our own client in a fresh process.

Owns: what a plain program would write to send and to consume, with the counting around it. One
rule: the same work as in java/ClientBench.java, and CPU time of the whole process, all threads.

    client_worker.py FACE LOOP SHAPE namesrv=... topic=... [window= seconds= ...]

FACE: blocking or asyncio. LOOP: asyncio or uvloop. Answers with one line of JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import cometmq
from cometmq import Message, aio
from cometmq.errors import CometError

KEYS = 4096
CHUNK = 64  # sends between two looks at the clock
LIMIT_S = 300


class Measure:
    """Counts what was done, and the time and CPU time between `begin` and `end`."""

    def __init__(self, words: dict[str, str]) -> None:
        self.words = words
        self.done = 0
        self.errors: Counter[str] = Counter()
        self.nanos: list[int] = []
        self.result: dict[str, Any] = {}
        self._at = (0, 0, 0)
        self._keys = [f"key-{number}" for number in range(KEYS)]
        self._body = b"x" * int(words["body"])
        self._topic = words["topic"]
        self._numbers = itertools.count()

    def message(self) -> Message:
        key = self._keys[next(self._numbers) & (KEYS - 1)]
        return Message(self._topic, self._body, tags="bench", keys=key)

    def batch(self) -> list[Message]:
        return [self.message() for _ in range(int(self.words["batch"]))]

    def begin(self) -> None:
        self.nanos.clear()
        self._at = (self.done, time.perf_counter_ns(), time.process_time_ns())

    def end(self, done: int | None = None) -> None:
        cpu_ns, now_ns = time.process_time_ns(), time.perf_counter_ns()
        before, began_ns, cpu_began_ns = self._at
        self.result = {
            "messages": (self.done if done is None else done) - before,
            "seconds": (now_ns - began_ns) / 1e9,
            "cpu_s": (cpu_ns - cpu_began_ns) / 1e9,
        }

    def settled(self, future: Any) -> None:
        """A callback of send_async."""
        error = future.exception()
        if error is None:
            self.done += 1
        else:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Counted by kind, as in ClientBench.java; a busy broker must not end the run."""
        self.errors[f"{type(error).__name__} code={getattr(error, 'code', None)}"] += 1

    def answer(self, with_latency: bool) -> str:
        found = {**self.result, "errors": dict(self.errors), "rss_mb": rss_mb()}
        if with_latency and self.nanos:
            self.nanos.sort()
            found["p50_us"] = self.nanos[len(self.nanos) // 2] / 1e3
            found["p99_us"] = self.nanos[int(len(self.nanos) * 0.99)] / 1e3
        return json.dumps(found)

    def phases(self) -> list[tuple[float, Callable[[], None]]]:
        """Seconds to work, and what to do afterwards: a warm-up, then the measurement."""
        words = self.words
        return [(float(words["warmup"]), self.begin), (float(words["seconds"]), self.end)]


def rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


# ----------------------------------------------------------------------------------------- sending


def send_blocking(shape: str, measure: Measure) -> None:
    words = measure.words
    window, batch = int(words["window"]), int(words["batch"])
    with cometmq.Producer("bench-python", namesrv=words["namesrv"], window=window) as producer:
        for seconds, then in measure.phases():
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                if shape == "async":
                    for _ in range(CHUNK):
                        producer.send_async(measure.message(), measure.settled)
                    continue
                began_ns = time.perf_counter_ns()
                try:
                    if shape == "sync":
                        producer.send(measure.message())
                        measure.done += 1
                    else:
                        producer.send_batch(measure.batch())
                        measure.done += batch
                except CometError as error:
                    measure.failed(error)
                measure.nanos.append(time.perf_counter_ns() - began_ns)
            then()


async def send_asyncio(shape: str, measure: Measure) -> None:
    words = measure.words
    window = int(words["window"])
    async with aio.Producer("bench-python", namesrv=words["namesrv"], window=window) as producer:
        send = {"async": _futures, "tasks": _tasks, "sync": _one_by_one, "batch": _one_by_one}
        for seconds, then in measure.phases():
            await send[shape](shape, producer, measure, seconds)
            then()


async def _futures(shape: str, producer: aio.Producer, measure: Measure, seconds: float) -> None:
    """send_async, and the oldest future is awaited when the window is full."""
    window = int(measure.words["window"])
    pending: deque[asyncio.Future[Any]] = deque()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(CHUNK):
            if len(pending) >= window:
                try:
                    await pending.popleft()
                    measure.done += 1
                except CometError as error:
                    measure.failed(error)
            pending.append(producer.send_async(measure.message()))
    for one in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(one, BaseException):
            measure.failed(one)
        else:
            measure.done += 1


async def _tasks(shape: str, producer: aio.Producer, measure: Measure, seconds: float) -> None:
    """As many tasks as the window, each of which awaits its sends."""
    until = time.perf_counter() + seconds

    async def work() -> None:
        while time.perf_counter() < until:
            try:
                await producer.send(measure.message())
                measure.done += 1
            except CometError as error:
                measure.failed(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(int(measure.words["window"])):
            group.create_task(work())


async def _one_by_one(shape: str, producer: aio.Producer, measure: Measure, seconds: float) -> None:
    batch = int(measure.words["batch"])
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began_ns = time.perf_counter_ns()
        try:
            if shape == "sync":
                await producer.send(measure.message())
                measure.done += 1
            else:
                await producer.send_batch(measure.batch())
                measure.done += batch
        except CometError as error:
            measure.failed(error)
        measure.nanos.append(time.perf_counter_ns() - began_ns)


# --------------------------------------------------------------------------------------- consuming


class Handlers:
    """Trivial handlers; the first message begins the measurement, the last one ends it."""

    def __init__(self, measure: Measure, finished: Callable[[], object]) -> None:
        self._measure = measure
        self._last = int(measure.words["count"]) - 1
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._finished = finished

    def _edge(self, number: int) -> None:
        if number == 0:
            self._measure.begin()
        elif number == self._last:
            self._measure.end(number + 1)
            self._finished()

    def plain(self, message: object) -> None:
        number = next(self._numbers)  # one step for all threads
        if number % self._last == 0:
            self._edge(number)

    async def coroutine(self, message: object) -> None:
        number = next(self._numbers)
        if number % self._last == 0:
            self._edge(number)

    def batch(self, messages: list[object]) -> None:
        measure = self._measure
        with self._lock:
            if measure.done == 0:
                measure.begin()
            measure.done += len(messages)
            is_last = measure.done > self._last
        if is_last:
            measure.end()
            self._finished()


def consumer_keywords(shape: str, words: dict[str, str]) -> dict[str, Any]:
    """As in ClientBench.java: RocketMQ's defaults."""
    found: dict[str, Any] = {"namesrv": words["namesrv"], "start": "first"}
    found |= {"concurrency": 20, "pull_batch": 32}
    return found | ({"batch": int(words["batch"])} if shape == "push batch" else {})


def handler_of(shape: str, handlers: Handlers) -> Callable[[Any], object]:
    return {
        "push plain": handlers.plain,
        "push async": handlers.coroutine,
        "push batch": handlers.batch,
    }[shape]


def consume_blocking(shape: str, measure: Measure) -> None:
    all_done = threading.Event()
    words = measure.words
    handlers = Handlers(measure, all_done.set)
    with cometmq.Consumer(words["group"], **consumer_keywords(shape, words)) as consumer:
        consumer.subscribe(words["topic"], handler_of(shape, handlers))
        consumer.start()
        if not all_done.wait(LIMIT_S):
            raise TimeoutError(f"only {consumer.stats.handled} messages came")


async def consume_asyncio(shape: str, measure: Measure) -> None:
    if shape == "poll":
        await poll(measure)
        return
    all_done = asyncio.Event()
    loop = asyncio.get_running_loop()
    words = measure.words
    handlers = Handlers(measure, lambda: loop.call_soon_threadsafe(all_done.set))
    async with aio.Consumer(words["group"], **consumer_keywords(shape, words)) as consumer:
        consumer.subscribe(words["topic"], handler_of(shape, handlers))
        await consumer.start()
        async with asyncio.timeout(LIMIT_S):
            await all_done.wait()


async def poll(measure: Measure) -> None:
    words = measure.words
    last = int(words["count"])
    options: dict[str, Any] = {"namesrv": words["namesrv"], "start": "first", "pull_count": 32}
    async with aio.PullConsumer(words["group"], **options) as consumer:
        consumer.subscribe(words["topic"])
        async with asyncio.timeout(LIMIT_S):
            while measure.done < last:
                messages = await consumer.poll()
                if not measure.done and messages:
                    measure.begin()
                measure.done += len(messages)
        measure.end()


# --------------------------------------------------------------------------------------------- main


def main() -> int:
    face, loop, shape = sys.argv[1:4]
    measure = Measure(dict(word.split("=", 1) for word in sys.argv[4:]))
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        new_loop = uvloop.new_event_loop
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # for the blocking clients' loop
    is_consuming = shape.startswith("push") or shape == "poll"
    if face == "blocking":
        (consume_blocking if is_consuming else send_blocking)(shape, measure)
    else:
        act: Callable[[str, Measure], Coroutine[Any, Any, None]]
        act = consume_asyncio if is_consuming else send_asyncio
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(act(shape, measure))
    print(measure.answer(with_latency=shape == "sync"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
