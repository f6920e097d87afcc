"""A Parquet lake that streams write to exactly once, readable by anything that reads Parquet.

Owns: how a micro-batch becomes files. One rule: a batch is published once, however often it is
replayed and wherever its writer was killed. Spark's own file sink keeps a list of good files that
only Spark reads; here whatever stands in a folder of the lake counts, so that DuckDB, pyarrow or
another engine see the same rows.

    <lake>/topic=orders/date=2026-03-01/<writer>-000000000012-<n>.parquet    the rows of batch 12
    <lake>/_cometmq/<writer>/staging/000000000012/                           being written
    <lake>/_cometmq/<writer>/000000000012.moving                             written, being moved
    <lake>/_cometmq/<writer>/000000000012.done                               published

A replay finds how far its forerunner came: `done` (nothing to do), `moving` (go on moving what that
file lists) or neither (start afresh). While files are moved readers see a part of the batch, never
one row twice. The writer's name lives in the stream's checkpoint: another checkpoint is another
writer.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cometmq.pipelines.files import Files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cometmq.pipelines")

KEPT_MARKS = 100
"""Spark replays its last batch only; older marks are kept for whoever looks after a mishap."""

_HOME = "_cometmq"
_WRITER = "cometmq-writer"


def writer_of(spark: SparkSession, checkpoint: str) -> str:
    """The name under which a stream with this checkpoint writes; made at its first start."""
    files = Files(spark, checkpoint)
    if not files.exists(_WRITER):
        files.make_folder("")
        files.write(_WRITER, uuid.uuid4().hex[:12].encode())
    return files.read(_WRITER).decode()


def work_through(rows: DataFrame) -> None:
    """Work a replayed batch through without writing it: a stream with state (windows, duplicates)
    moves its state on only if it does, and Spark refuses the next batch if it did not."""
    rows.write.format("noop").mode("overwrite").save()


class ParquetLake:
    """One writer's hand on a lake."""

    def __init__(
        self,
        spark: SparkSession,
        path: str,
        writer: str,
        partition_by: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`options`: of Spark's Parquet writer."""
        self.path = path
        self._options = dict(options or {})
        self._files = Files(spark, path)
        self._writer = writer
        self._home = f"{_HOME}/{writer}"
        self._partition_by = list(partition_by)
        self.files_written = 0

    def write(self, rows: DataFrame, batch_id: int) -> int:
        """Publish a batch; returns how many files it has, 0 if it had been published before."""
        files, number = self._files, f"{batch_id:012d}"
        done, moving = f"{self._home}/{number}.done", f"{self._home}/{number}.moving"
        if files.exists(done):
            log.info("batch was published before lake=%s batch=%d", self.path, batch_id)
            work_through(rows)
            return 0
        if files.exists(moving):
            work_through(rows)
        else:
            self._stage(rows, number)
        moves: dict[str, str] = json.loads(files.read(moving))
        self._publish(moves)
        files.move(moving, done)
        files.delete(f"{self._home}/staging/{number}")
        self._forget_old_marks()
        self.files_written += len(moves)
        return len(moves)

    def is_published(self, batch_id: int) -> bool:
        """Whether a batch is there whole; known of the last KEPT_MARKS."""
        return self._files.exists(f"{self._home}/{batch_id:012d}.done")

    def last_batch(self) -> int:
        """The last batch that was published or is fixed and will be; -1 before the first."""
        names = self._files.names(self._home)
        marks = [int(one[:12]) for one in names if one.endswith((".done", ".moving"))]
        return max(marks, default=-1)

    def files_of(self, batch_id: int) -> list[str]:
        """Addresses of a batch's files; of a lake without partitions."""
        begin = f"{self._writer}-{batch_id:012d}-"
        return [self._files.at(one) for one in self._files.names("") if one.startswith(begin)]

    def _stage(self, rows: DataFrame, number: str) -> None:
        """Write the rows aside, then say what goes where; from then on they are never made anew."""
        staging = f"{self._home}/staging/{number}"
        files = self._files
        files.delete(staging)
        writer = rows.write.mode("overwrite").options(**self._options)
        if self._partition_by:
            writer = writer.partitionBy(*self._partition_by)
        writer.parquet(files.at(staging))
        moves = {}
        for n, name in enumerate(files.files_below(staging, ".parquet")):
            folder, _, _ = name.rpartition("/")
            target = f"{self._writer}-{number}-{n:05d}.parquet"
            moves[f"{staging}/{name}"] = f"{folder}/{target}" if folder else target
        files.write(f"{self._home}/{number}.moving", json.dumps(moves).encode())

    def _publish(self, moves: dict[str, str]) -> None:
        files = self._files
        made: set[str] = set()
        for source, target in moves.items():
            if not files.exists(source):
                continue  # a forerunner moved it
            folder = target.rpartition("/")[0]
            if folder not in made:
                files.make_folder(folder)
                made.add(folder)
            files.move(source, target)

    def _forget_old_marks(self) -> None:
        marks = [one for one in self._files.names(self._home) if one.endswith(".done")]
        for old in marks[:-KEPT_MARKS]:
            self._files.delete(f"{self._home}/{old}")
