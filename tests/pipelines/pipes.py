"""What the tests of pipelines share: topics to read from, and pipelines as processes that die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cometmq import Admin, Message, MessageQueue, Producer
from cometmq.client.received import ReceivedMessage
from cometmq.testing.local import LocalBroker

SOURCE = str(Path(__file__).parents[2] / "src")
WAIT_S = 300


def send(
    broker: LocalBroker,
    topic: str,
    numbers: range,
    *,
    queues: int = 4,
    body: Callable[[int], bytes] = lambda n: str(n).encode(),
    pause_s: float = 0.0,
    **more: Callable[[int], Any],
) -> None:
    """Messages in turn to all queues of a topic, in order; `more`: fields of the message."""
    broker.create_topic(topic, queues=queues)
    with Producer("pipes", namesrv=broker.namesrv) as producer:
        waiting = []
        for n in numbers:
            fields = {name: make(n) for name, make in more.items()}
            where = MessageQueue(topic, broker.broker_name, n % queues)
            waiting.append(producer.send_async(Message(topic, body(n), **fields), queue=where))
            if pause_s:
                time.sleep(pause_s)
        for one in waiting:
            one.result(WAIT_S)


def read_topic(namesrv: str, topic: str) -> list[ReceivedMessage]:
    """All messages of a topic, queue by queue, in order."""
    found: list[ReceivedMessage] = []
    with Admin(namesrv) as admin:
        for queue in admin.topic_route(topic).to_read:
            found += admin.queue_messages(queue, most=1_000_000)
    return found


def count_topic(namesrv: str, topic: str) -> int:
    with Admin(namesrv) as admin:
        return admin.topic_stats(topic).count


def by_queue(messages: list[ReceivedMessage]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for one in messages:
        found[one.queue_id].append(int(one.body))
    return dict(found)


class Pipeline:
    """`cometmq pipeline run ...` as a process, with the JVM that it starts."""

    def __init__(self, log: Path, name: str, **settings: object) -> None:
        self._log = log
        words = [f"--set={key}={value}" for key, value in settings.items()]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cometmq", "pipeline", "run", name),
                    *("--master", "local[2]", *words),
                ],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": SOURCE},
            )

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        give_up = time.monotonic() + WAIT_S
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"did not come so far: {self._log.read_text()[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """All of it at once: driver, JVM and workers. None of them is left at work."""
        family = _family(self._process.pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        give_up = time.monotonic() + 30
        while any(_is_at_work(pid) for pid in family) and time.monotonic() < give_up:
            time.sleep(0.02)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()


@contextlib.contextmanager
def running(log: Path, name: str, **settings: object) -> Iterator[Pipeline]:
    made = Pipeline(log, name, **settings)
    try:
        yield made
    finally:
        made.close()


def _is_at_work(pid: int) -> bool:
    """A killed process has no command line left, also while nobody has asked for its end."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _family(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
