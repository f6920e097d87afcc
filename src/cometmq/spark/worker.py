"""A Python worker of Spark's, made ready for many short tasks.

Owns: what is done once in every worker process that reads or writes for us. One rule: nothing that
a program can see changes; only what a task costs beside its work.

Spark collects garbage after every task, and walks all that numpy, Arrow and PySpark have loaded:
20 ms of a core each time, where a small micro-batch takes 60. What is loaded before the first task
stays anyway, so it is set apart (`gc.freeze`).

glibc gives large pieces of memory back to the kernel as soon as they are free, and the next batch
pays for each of their pages anew: a quarter of the time that decoding takes. It learns from pieces
that are freed how large they usually are, and keeps twice that; so one is freed that was never
touched.
"""

from __future__ import annotations

import gc
import os

USUAL_BYTES = 31 << 20  # glibc learns from nothing larger than 32 MiB

_ready_pid = 0


def get_ready() -> None:
    """Once in a process; called where tasks begin."""
    global _ready_pid
    if _ready_pid == os.getpid():
        return
    _ready_pid = os.getpid()
    bytes(USUAL_BYTES)
    gc.collect()
    gc.freeze()
