"""Spark programs as processes, with all that they start, to be watched and killed.

Owns: what tests/spark and tests/pipelines share of that, and reading a topic back. One rule: only
what a program itself has started is ever killed, found by its parents in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cometmq import Admin
from cometmq.client.received import ReceivedMessage

WAIT_S = 600  # a JVM on a busy machine
SOURCE = str(Path(__file__).parents[1] / "src")


class SparkProgram:
    """A Python program, the JVM that it starts, and Spark's workers."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
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

    def finish(self) -> None:
        assert self._process.wait(WAIT_S) == 0, self._log.read_text()[-3000:]

    def kill(self) -> None:
        """All of it at once: driver, JVM and workers. None of them is left at work."""
        family = self._family()
        for pid in family:
            _kill(pid)
        self._await_end(family)

    def kill_driver(self) -> None:
        """Driver and JVM, at once; the Python workers find out by themselves, and may send on."""
        family = self._family()
        for pid in (pid for pid in family if not _is_worker(pid)):
            _kill(pid)
        self._await_end(family)
        for pid in filter(_is_worker, family):
            _kill(pid)

    def kill_workers(self) -> int:
        """The Python workers alone: Spark runs their tasks again."""
        daemons = [pid for pid in self._family() if _is_worker(pid)]
        workers = [pid for pid in daemons if _parent(pid) in daemons]
        for pid in workers:
            _kill(pid)
        return len(workers)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def _await_end(self, family: list[int]) -> None:
        self._process.wait()
        give_up = time.monotonic() + 30
        while any(_command(pid) for pid in family) and time.monotonic() < give_up:
            time.sleep(0.02)

    def _family(self) -> list[int]:
        """The process and all that descend from it."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
        found = [self._process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found


def _command(pid: int) -> str:
    """A killed process has no command line left, also while nobody has asked for its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _is_worker(pid: int) -> bool:
    return "pyspark.daemon" in _command(pid)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
