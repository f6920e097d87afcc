"""One background thread for what blocks: fsync and small state files.

Owns: running jobs in order, off the event loop. One rule: a job's outcome always comes back to the
loop, as None or as the text of what went wrong; after `close` no job is lost, they are finished.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("cometmq.net")

Job = Callable[[], None]
Done = Callable[[str | None], None]


class Worker:
    """A named thread that runs (job, done) pairs; `done` is called on the loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.put((job, done))

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            item = self._jobs.get()
            if item is None:
                return
            job, done = item
            reason: str | None = None
            try:
                job()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if not isinstance(error, OSError):
                    log.exception("bug in a background job")
            try:
                self._loop.call_soon_threadsafe(done, reason)
            except RuntimeError:  # the loop has closed: nobody is left to tell
                return
