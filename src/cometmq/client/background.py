"""The one background loop of the process, on which the blocking clients run.

Owns: a thread with an event loop, begun when it is first needed. One rule: whoever waits for the
loop is never on its own thread, and no user's code ends the loop: SystemExit and KeyboardInterrupt,
which stop a loop when they leave a task, are carried to the waiting thread as values.

A process that forks loses the thread in the child; that is noticed and refused by name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cometmq.client.handling import EXITS
from cometmq.errors import UsageError

log = logging.getLogger("cometmq.client")

T = TypeVar("T")


class BackgroundLoop:
    """An event loop on a thread of its own, begun when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._thread_id = 0
        self.running: asyncio.AbstractEventLoop | None = None
        """The loop, in the process where its thread is."""
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.running = None

    def get(self) -> asyncio.AbstractEventLoop:
        running = self.running
        if running is not None:
            return running
        with self._lock:
            if self._loop is not None and self._pid != os.getpid():
                raise UsageError(
                    f"this process ({os.getpid()}) was forked from {self._pid}, where CometMQ's "
                    f"background loop runs; make clients after the fork, in the child, before any "
                    f"in the parent, or start processes with 'spawn'"
                )
            if self._loop is None:
                self._begin()
            assert self._loop is not None
            return self._loop

    def _begin(self) -> None:
        loop = asyncio.new_event_loop()
        is_running = threading.Event()

        def run() -> None:
            self._thread_id = threading.get_ident()
            loop.call_soon(is_running.set)
            while True:
                try:
                    return loop.run_forever()
                except EXITS:  # of a callback that nobody waits for; all other clients go on
                    log.exception("exit_ignored reason=it was raised on the background loop")

        threading.Thread(target=run, name="cometmq-loop", daemon=True).start()
        is_running.wait()
        self._pid = os.getpid()
        self._loop = self.running = loop

    def check(self) -> asyncio.AbstractEventLoop:
        """The loop; UsageError on its own thread, where waiting would wait for ever."""
        loop = self.get()
        if self.is_here():
            raise UsageError(
                "a blocking call inside CometMQ's background loop (an async handler or a callback) "
                "would wait for ever; use the client of cometmq.aio there"
            )
        return loop

    def is_here(self) -> bool:
        """Whether who asks is on the loop's own thread (an async handler, a callback)."""
        return threading.get_ident() == self._thread_id

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, wait for the result; an interrupt of the waiting cancels the work."""
        try:
            loop = self.check()
        except UsageError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(_carrying(work), loop)
        try:
            found, error = future.result()
        except BaseException:
            future.cancel()
            raise
        if error is not None:
            raise error
        return found[0]


background = BackgroundLoop()
"""The one of this process. Module state on purpose: threads and loops are the process's own."""


async def _carrying(work: Coroutine[Any, Any, T]) -> tuple[list[T], BaseException | None]:
    try:
        return [await work], None
    except EXITS as error:
        return [], error


async def on_loop(act: Callable[[], T]) -> T:
    """A plain call, made on the loop's thread."""
    return act()
