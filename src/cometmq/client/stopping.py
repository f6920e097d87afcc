"""SIGTERM while consumers run on the program's own loop.

Owns: the signal, from the first `run` of a main thread's loop to the end of the last. One rule: a
program that handles SIGTERM in its own way keeps its way.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Sigterm:
    """Who is told of SIGTERM: all that run on one loop, which may be several consumers."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: list[Callable[[], object]] = []

    @contextmanager
    def calling(self, act: Callable[[], object]) -> Iterator[None]:
        """Have it called while this lasts; on threads and systems without signals it never is."""
        if not self._is_ours(asyncio.get_running_loop()):
            yield
            return
        self._told.append(act)
        try:
            yield
        finally:
            if act in self._told:
                self._told.remove(act)
            if not self._told and self._loop is not None:
                self._loop.remove_signal_handler(signal.SIGTERM)  # puts SIG_DFL back
                self._loop = None

    def _is_ours(self, loop: asyncio.AbstractEventLoop) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._loop is loop:
            return True
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return False
        try:
            loop.add_signal_handler(signal.SIGTERM, self._received)
        except NotImplementedError:  # Windows
            return False
        self._loop = loop
        self._told.clear()  # of a loop that was left without an end
        return True

    def _received(self) -> None:
        for act in list(self._told):
            act()


sigterm = Sigterm()
"""The one of this process. Module state on purpose: signals are the process's own."""
