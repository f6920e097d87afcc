"""Child processes that cannot outlive the test run.

Every process gets its own group, is killed when its owner stops it, when pytest ends (Ctrl-C
included), and, on Linux, when pytest itself is killed. Output goes to a file, whose end is shown
when a test fails.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TAIL_LINES = 40
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_alive: set["Child"] = set()


class ProcessError(AssertionError):
    """A process did not start, did not stop, or said no."""


class Child:
    """One process with its log file (stdout and stderr together)."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        _alive.add(self)

    def await_line(self, found: Callable[[str], bool], timeout_s: float) -> str:
        """Wait for the first log line that satisfies `found`."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self._process.poll() is not None
            for line in self.log.read_text(errors="replace").splitlines():
                if found(line):
                    return line
            if has_ended:
                raise ProcessError(f"ended with {self._process.returncode}:\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise ProcessError(f"not ready after {timeout_s} s:\n{tail(self.log)}")
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int:
        """The exit status; the process is killed and an error raised when time runs out."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessError(f"still running after {timeout_s} s:\n{tail(self.log)}") from None
        self.kill()
        return status

    def terminate(self, timeout_s: float) -> int:
        """Ask it to stop, and wait: SIGTERM, then its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the whole group; harmless when it is gone already."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _alive.discard(self)


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log file, for a failure message."""
    if not log.exists():
        return f"({log.name} was not written)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def kill_all() -> None:
    """Kill whatever is still running."""
    for child in list(_alive):
        child.kill()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


atexit.register(kill_all)
