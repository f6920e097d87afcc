"""Whose a piece of work is that lies in a folder: a process's that lives, or one that is gone.

Owns: naming a process across machines. One rule: one that can't be asked (on another machine) is
taken for alive until it had plenty of time.
"""

from __future__ import annotations

import os
import platform
import re
import time

import msgspec

PLENTY_MS = 3_600_000
"""So long a process of another machine is left alone; ours are asked for by their number."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9-]")


class Owner(msgspec.Struct, frozen=True):
    """A process, and when it began with what it owns."""

    host: str
    pid: int
    began_ms: int

    def is_at_work(self) -> bool:
        """Other processes only: whatever is ours an error has left behind, or we know of it."""
        if self.host != host():
            return now_ms() - self.began_ms < PLENTY_MS
        return is_alive(self.pid)


def me() -> Owner:
    return Owner(host(), os.getpid(), now_ms())


def host() -> str:
    """This machine, in a form that fits into the name of a file."""
    return _NOT_IN_NAMES.sub("_", platform.node()) or "_"


def now_ms() -> int:
    return int(time.time() * 1000)


def is_alive(pid: object) -> bool:
    """Whether another process of this machine has this number."""
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
