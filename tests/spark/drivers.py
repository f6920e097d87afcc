"""Driver programs in processes of their own, to be killed: the driver with its JVM, or workers.

Owns: starting, watching and killing them. One rule: only what the program itself has started is
ever killed, found by its parents in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 600  # a JVM on a busy machine
SOURCE = str(Path(__file__).parents[2] / "src")


class Driver:
    """A driver program beside this file, with all that it starts."""

    def __init__(self, program: str, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(program)), *arguments],
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
        """Driver and JVM, at once; the Python workers find out by themselves, and may send on."""
        family = _family(self._process.pid)
        for pid in (pid for pid in family if "pyspark.daemon" not in _command(pid)):
            _kill(pid)
        self._process.wait()
        give_up = time.monotonic() + 30
        while any(_command(pid) for pid in family) and time.monotonic() < give_up:
            time.sleep(0.05)
        for pid in family:
            if "pyspark.daemon" in _command(pid):
                _kill(pid)

    def kill_workers(self) -> int:
        """The Python workers alone: Spark runs their tasks again."""
        daemons = [pid for pid in _family(self._process.pid) if "pyspark.daemon" in _command(pid)]
        workers = [pid for pid in daemons if _parent(pid) in daemons]
        for pid in workers:
            _kill(pid)
        return len(workers)

    def finish(self) -> None:
        assert self._process.wait(WAIT_S) == 0, self._log.read_text()[-3000:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
