"""Staging: private memory that records are written to before they reach a log file.

Owns: a pool of equal buffers, which of them hold bytes that are in no file yet, and cutting these
into writes. One rule: a buffer is given to new records only when all its bytes are committed and no
other thread can still be reading them.

    stages, oldest first     [begin ......... upto)  [begin ... upto)  [begin ..... the log's end
                              of one log file each                      the one being written

Why: an append into a mapped file stops while the system has no clean page for it. Here it stops
for nothing; the log's worker thread waits for the page cache instead. RocketMQ's
transientStorePoolEnable, whose price is the same: a killed process loses what was not committed.
"""

from __future__ import annotations

from collections import deque

from cometmq.errors import StoreBusy
from cometmq.ports import Files, SyncTarget
from cometmq.store.layout import StoreConfig


class Stage:
    """One buffer in use; it covers the log from `begin` on, and `upto` once it is full."""

    __slots__ = ("begin", "file_at", "memory", "name", "upto")

    def __init__(self, memory: memoryview, name: str, begin: int, file_at: int) -> None:
        self.memory = memory
        self.name = name
        self.begin = begin
        self.file_at = file_at
        self.upto = -1


class Staging:
    """The pool. Offsets are the log's; which bytes are committed is told by the caller."""

    def __init__(self, files: Files, config: StoreConfig) -> None:
        self._files = files
        self.stage_bytes = config.stage_bytes
        self._free = [files.stage(config.stage_bytes) for _ in range(config.stage_count)]
        self._count = config.stage_count
        self._stages: deque[Stage] = deque()
        self.is_read = False  # a commit is under way: another thread reads stages

    @property
    def is_full_waiting(self) -> bool:
        """Whether a stage is full and not committed."""
        return len(self._stages) > 1

    def need_free(self) -> None:
        """StoreBusy unless take can follow."""
        if not self._free:
            raise StoreBusy(
                f"all {self._count} buffers of {self.stage_bytes} bytes wait to be committed to "
                f"the log: the disk is slower than the senders (transientStorePoolSize)"
            )

    def take(self, name: str, begin: int, file_at: int, size: int) -> memoryview:
        """A fresh stage for the log from `begin` on, which is byte `file_at` of file `name`."""
        stage = Stage(self._free.pop(), name, begin, file_at)
        self._stages.append(stage)
        return stage.memory[:size]

    def end_last(self, upto: int, committed_at: int) -> None:
        """Nothing more comes into the stage being written."""
        if self._stages:
            self._stages[-1].upto = upto
            self.release(committed_at)

    def release(self, committed_at: int) -> None:
        """Free the full stages that are committed."""
        stages = self._stages
        while not self.is_read and stages and 0 <= stages[0].upto <= committed_at:
            self._free.append(stages.popleft().memory)

    def writes(self, committed_at: int, write_at: int) -> list[SyncTarget]:
        """What brings all that is not committed into the files, in order."""
        found: list[SyncTarget] = []
        for stage in self._stages:
            begin = max(stage.begin, committed_at) - stage.begin
            end = (write_at if stage.upto < 0 else stage.upto) - stage.begin
            if begin < end:
                data = stage.memory[begin:end]
                found.append(self._files.writing(stage.name, stage.file_at + begin, data))
        return found

    def close(self) -> None:
        """Let go of the memory; it goes when nobody reads it any more."""
        self._free.clear()
        self._stages.clear()
