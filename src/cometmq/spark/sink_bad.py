"""Rows that can't be messages, kept as files.

Owns: the folder `badRecordsPath`. One rule: only files of committed tasks are seen there: a task
writes into `_temporary`, the commit on the driver moves its file to the name that every attempt of
the same task has, so that a replayed batch replaces its file and adds none.

    <path>/_temporary/<writer>-<batch>-<partition>-<attempt>.parquet
    <path>/<writer>-<batch>-<partition>.parquet

Columns: those of the row, bad_reason, bad_row (its number in the task), bad_partition, bad_batch.
The path is a local or mounted folder, or any address that pyarrow.fs knows (s3, hdfs, gs, abfs); it
must be the same place for the driver and all executors.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from cometmq.errors import UsageError
from cometmq.spark.sink_columns import BAD_COLUMNS
from cometmq.spark.sink_json import json_bodies

log = logging.getLogger("cometmq.spark")

TEMPORARY = "_temporary"
ENDINGS = {"parquet": ".parquet", "json": ".jsonl"}


def place(path: str) -> tuple[Any, str]:
    """The file system and the folder in it; UsageError if it is none that we can use."""
    try:
        if urlsplit(path).scheme:
            system, folder = pafs.FileSystem.from_uri(path)
            return system, str(folder)
        return pafs.LocalFileSystem(), path.rstrip("/") or "/"
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"badRecordsPath {path!r} can't be used: {error}") from None


class BadRecords:
    """The bad rows of one task attempt."""

    def __init__(
        self, path: str, kind: str, writer: str, batch: int, partition: int, attempt: int
    ) -> None:
        self._system, self._folder = place(path)
        self._kind = kind
        self._batch = batch
        self._partition = partition
        self.name = f"{writer}-{batch}-{partition}{ENDINGS[kind]}"
        self.temporary = f"{writer}-{batch}-{partition}-{attempt}{ENDINGS[kind]}"
        self.count = 0
        self._sink: Any = None
        self._writer: Any = None

    def add(self, batch: pa.RecordBatch, numbers: list[int], reasons: list[str]) -> None:
        """Rows with what is wrong with each."""
        count = len(reasons)
        table = pa.Table.from_batches([batch])
        for name, values in zip(
            BAD_COLUMNS,
            (
                pa.array(reasons, pa.string()),
                pa.array(numbers, pa.int64()),
                pa.array(np.full(count, self._partition, np.int32)),
                pa.array(np.full(count, self._batch, np.int64)),
            ),
            strict=True,
        ):
            table = table.append_column(name, values)
        if self._sink is None:
            self._open(table.schema)
        if self._kind == "parquet":
            self._writer.write_table(table)
        else:
            for piece in table.to_batches():
                for line in json_bodies(piece, piece.schema.names).to_pylist():
                    self._sink.write(line + b"\n")
        self.count += count

    def _open(self, schema: pa.Schema) -> None:
        folder = f"{self._folder}/{TEMPORARY}"
        try:
            self._system.create_dir(folder, recursive=True)
            self._sink = self._system.open_output_stream(f"{folder}/{self.temporary}")
        except OSError as error:
            raise UsageError(
                f"a bad row can't be kept: badRecordsPath {self._folder!r} can't be written from "
                f"this executor: {error}"
            ) from None
        if self._kind == "parquet":
            self._writer = pq.ParquetWriter(self._sink, schema)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._sink is not None:
            self._sink.close()

    def discard(self) -> None:
        """The task has failed: nothing of it stays."""
        self.close()
        if self._sink is not None:
            remove(self._system, f"{self._folder}/{TEMPORARY}/{self.temporary}")


class BadFile(msgspec.Struct, frozen=True):
    """A closed file of a task that has succeeded."""

    temporary: str
    name: str


def publish(path: str, files: list[BadFile]) -> None:
    """Make files of a committed batch seen; again does no harm."""
    if not files:
        return
    system, folder = place(path)
    for file in files:
        source, target = f"{folder}/{TEMPORARY}/{file.temporary}", f"{folder}/{file.name}"
        if system.get_file_info(source).type == pafs.FileType.NotFound:
            if system.get_file_info(target).type != pafs.FileType.File:
                raise UsageError(
                    f"the bad records of a finished task are gone: neither {source} nor {target} "
                    "is there; badRecordsPath must be one place for driver and executors"
                )
            continue
        system.move(source, target)


def drop(path: str, files: list[BadFile]) -> None:
    """Forget files of a batch that was given up."""
    system, folder = place(path)
    for file in files:
        remove(system, f"{folder}/{TEMPORARY}/{file.temporary}")


def sweep(path: str, writer: str, batch: int) -> None:
    """Remove what killed attempts of a committed batch have left behind."""
    system, folder = place(path)
    inside = pafs.FileSelector(f"{folder}/{TEMPORARY}", allow_not_found=True)
    for info in system.get_file_info(inside):
        # From the end: a writer's name may have dashes of its own.
        if info.base_name.rsplit("-", 3)[:2] == [writer, str(batch)]:
            remove(system, info.path)


def remove(system: Any, path: str) -> None:
    try:
        system.delete_file(path)
    except OSError as error:
        log.info("bad_records_left path=%s reason=%s", path, error)
