"""A thread with an event loop of its own, and ports that stay ours.

Owns: the background thread of what runs inside a test's process. One rule: when `close` returns,
the thread, its tasks and its loop are gone, and what went wrong in it is in `errors`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT_S = 30.0


class Background:
    """Runs coroutines for callers in other threads."""

    def __init__(self, name: str) -> None:
        self.errors: list[Exception] = []
        """Exceptions that nobody waited for."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the outcome; what it raises is raised here."""
        return self.submit(work).result(TIMEOUT_S)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """`run` for a caller with a loop of its own. If that is cancelled, the work is finished
        first: half started or half stopped would be nobody's."""
        future = self.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            futures.wait([future], TIMEOUT_S)
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        loop = self._loop
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self.errors.append(error)
        loop.default_exception_handler(context)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen: it keeps its port from others, whoever connects is
    refused, and a second `bind` of the same port may listen as often as it likes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A free port is chosen without the option: with it, Linux may give one that somebody else
        # holds like this. Set afterwards, it lets our own listener in.
        if port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        bound.close()
        raise
    return bound
