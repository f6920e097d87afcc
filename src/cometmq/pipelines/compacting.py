"""The pipeline `compact`: the small files of closed partitions of a Parquet lake merged.

Owns: swapping files for merged ones. One rule: whenever a reader lists the lake it finds every row
at most once; while a partition is swapped (some renames) it may find a part of it missing, and
wherever the swap is killed the next start ends it.

    <lake>/_cometmq/compaction/<id>/new/             the merged files, being written
    <lake>/_cometmq/compaction/<id>~<owner>.swap     they hold all rows of the files it lists,
                                                     counted; those are being moved away
    <lake>/_cometmq/compaction/<id>/old/             where they go
    <lake>/_cometmq/compaction/<id>~<owner>.claimed  all are away: the merged files go in, the old
                                                     ones are deleted
    <lake>/_cometmq/compaction/last                  the id of the last swap that is over

An id without a mark is left over and deleted (when it is old: it may be someone's at work). With
`swap`, what is left is moved away too; if a listed file is neither in its place nor in `old`,
another compaction has it: what was moved goes back, and nothing is changed. With `claimed` there is
only the way forward. Renaming a file is what decides between two that compact one partition, and
renaming a mark between two that find one whose owner (machine, process) is gone.

The other order, merged files first, would show rows twice instead of late; a count that is too
small for a moment is repaired by asking again, one that is too large may have been acted upon.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cometmq.errors import UsageError
from cometmq.pipelines.files import Files
from cometmq.pipelines.lake_tables import table_kind
from cometmq.pipelines.owners import Owner, me, now_ms
from cometmq.pipelines.running import Outcome, PipelineFailed, Tell, to_stderr

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("cometmq.pipelines")

HOME = "_cometmq/compaction"
SWAP, CLAIMED = "swap", "claimed"
LAST = f"{HOME}/last"
LEFT_OVER_MS = 6 * 3_600_000
ORDER = ("broker", "queue_id", "queue_offset")
"""Merged rows are sorted so, if they have these columns: queues stand together, statistics of
row groups help who looks for offsets."""


class Partition(msgspec.Struct, frozen=True):
    """A folder of the lake with the files in it."""

    folder: str
    files: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


class Mark(NamedTuple):
    """A file that says how far a swap has come, and whose it is; None: of an older version."""

    number: str
    kind: str
    owner: Owner | None

    @property
    def name(self) -> str:
        whose = (
            "" if self.owner is None else "~".join(map(str, msgspec.structs.astuple(self.owner)))
        )
        return f"{HOME}/{self.number}{'~' if whose else ''}{whose}.{self.kind}"

    def is_at_work(self) -> bool:
        if self.number in _at_work:
            return True
        return self.owner is not None and self.owner.is_at_work()


def mark_of(name: str) -> Mark | None:
    """A mark by the name of its file; None if it is no mark."""
    whole, _, kind = name.rpartition(".")
    number, *owner = whole.split("~")
    if kind not in (SWAP, CLAIMED):
        return None
    if len(owner) == 3 and owner[1].isdecimal() and owner[2].isdecimal():
        return Mark(number, kind, Owner(owner[0], int(owner[1]), int(owner[2])))
    return Mark(number, kind, None)


_at_work: set[str] = set()
"""Swaps of this process, in whichever thread."""


class Swap(msgspec.Struct, frozen=True):
    """What a mark says: names from the lake's root on."""

    old: dict[str, str]
    """File to where it is moved."""
    new: dict[str, str]
    """Merged file to its place."""


def compact(
    spark: SparkSession,
    *,
    lake: str,
    min_files: int = 4,
    small_bytes: int = 32 * 1024 * 1024,
    target_bytes: int = 256 * 1024 * 1024,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Merge the small files of a Parquet lake's closed hours; killed anywhere, nothing is doubled.

    A partition (a folder `date=.../hour=...`) is closed when its hour is over, by UTC. It is merged
    if it has more than `min_files` files, or several that are smaller than `small_bytes` on
    average, and merging makes them fewer; merged files have about `target_bytes`. Rows that come
    late are merged by a later run. Readers that have listed the old files must list again.
    """
    began = time.monotonic()
    if min_files < 1 or small_bytes < 0 or target_bytes < 1:
        raise UsageError("min_files and target_bytes are at least 1, small_bytes not below 0")
    work = Compaction(spark, lake, target_bytes)
    if not work.files.exists(""):
        raise UsageError(f"compact: there is no lake at {lake}")
    kind = table_kind(work.files)
    if kind is not None:
        raise UsageError(
            f"compact: {lake} is a {kind} table, whose files only {kind} may merge"
            + (": archive with format=delta and compact=true does" if kind == "Delta" else "")
        )
    outcome = Outcome("compact")
    repaired = work.finish_former()
    if repaired:
        tell(f"compact: finished {repaired} swaps that a former run had begun")
    before = after = 0
    for one in work.closed(now_ms()):
        if stop is not None and stop.is_set():
            outcome.is_stopped = True
            break
        if not is_worth_it(one, min_files, small_bytes, target_bytes):
            continue
        made, rows = work.merge(one)
        if made == 0:
            tell(f"compact: {one.folder} is being compacted by someone else")
            continue
        before, after = before + len(one.files), after + made
        outcome.rows, outcome.batches = outcome.rows + rows, outcome.batches + 1
        tell(f"compact: {one.folder}  {len(one.files)} files to {made}  {one.bytes:,} bytes")
    outcome.seconds = time.monotonic() - began
    outcome.figures |= {"partitions": outcome.batches, "files": f"{before:,} to {after:,}"}
    return outcome


def is_worth_it(one: Partition, min_files: int, small_bytes: int, target_bytes: int) -> bool:
    count = len(one.files)
    if count < 2 or count <= wanted_files(one.bytes, target_bytes):
        return False
    return count > min_files or one.bytes / count < small_bytes


def wanted_files(total_bytes: int, target_bytes: int) -> int:
    return max(1, -(-total_bytes // target_bytes))


def state_of(files: Files) -> str | None:
    """Changes with every swap; None while one is under way, or cut off. A reader that finds the
    same text before and after it has listed a lake has listed all of it."""
    if any(mark_of(name) is not None for name in files.names(HOME)):
        return None
    return files.read(LAST).decode() if files.exists(LAST) else ""


def hour_of(folder: str) -> str | None:
    """`2026-03-01T07` of a folder of the archive; None if it is no such folder."""
    values = dict(piece.split("=", 1) for piece in folder.split("/") if "=" in piece)
    date, hour = values.get("date", ""), values.get("hour", "")
    try:
        return datetime.strptime(f"{date} {hour}", "%Y-%m-%d %H").strftime("%Y-%m-%dT%H")
    except ValueError:
        return None


class Compaction:
    """One hand on the partitions of a lake."""

    def __init__(self, spark: SparkSession, lake: str, target_bytes: int) -> None:
        # Of its own: the type that timestamps have in files is a setting of the session.
        self._spark = spark.newSession()
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        self._target_bytes = target_bytes
        self.files = Files(spark, lake)

    def closed(self, now_ms: int) -> list[Partition]:
        """Partitions whose hour is over, the oldest first."""
        current = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%dT%H")
        by_folder: dict[str, dict[str, int]] = {}
        for name, size in self.files.files_below("", ".parquet").items():
            folder, _, _ = name.rpartition("/")
            by_folder.setdefault(folder, {})[name] = size
        hours = {folder: hour_of(folder) for folder in by_folder}
        return [
            Partition(folder, by_folder[folder])
            for folder in sorted(by_folder, key=lambda one: (hours[one] or "", one))
            if (hour := hours[folder]) is not None and hour < current
        ]

    def merge(self, one: Partition) -> tuple[int, int]:
        """Swap the files of a partition for merged ones: (their number, rows); 0 files if another
        compaction was faster."""
        number = f"{now_ms():013d}-{uuid.uuid4().hex[:8]}"
        _at_work.add(number)
        try:
            return self._merge(one, number)
        finally:
            _at_work.discard(number)

    def _merge(self, one: Partition, number: str) -> tuple[int, int]:
        try:
            rows = self._write_merged(one, number)
        except Exception as error:
            if isinstance(error, PipelineFailed) or all(map(self.files.exists, one.files)):
                raise
            log.info("claimed by another folder=%s reason=%s", one.folder, error)
            self.files.delete(f"{HOME}/{number}")
            return 0, 0
        swap = self._swap_of(one, number)
        mark = Mark(number, SWAP, me())
        self.files.write(mark.name, msgspec.json.encode(swap))
        return (len(swap.new) if self._swap(mark) else 0), rows

    def _write_merged(self, one: Partition, number: str) -> int:
        aside = self.files.at(f"{HOME}/{number}/new")
        reader = self._spark.read.option("mergeSchema", "true")
        old = reader.parquet(*(self.files.at(name) for name in one.files))
        merged = old.coalesce(wanted_files(one.bytes, self._target_bytes))
        if set(ORDER) <= set(old.columns):
            merged = merged.sortWithinPartitions(*ORDER)
        merged.write.parquet(aside)
        rows, found = old.count(), self._spark.read.schema(old.schema).parquet(aside).count()
        if rows != found:
            raise PipelineFailed(
                f"compact: {one.folder} has {rows} rows and its merged files {found}; nothing was "
                f"changed, the merged files are in {aside}"
            )
        return rows

    def _swap_of(self, one: Partition, number: str) -> Swap:
        aside = f"{HOME}/{number}/new"
        old = {name: f"{HOME}/{number}/old/{n:06d}" for n, name in enumerate(one.files)}
        new = {
            f"{aside}/{name}": f"{one.folder}/compacted-{number}-{n:05d}.parquet"
            for n, name in enumerate(self.files.files_below(aside, ".parquet"))
        }
        return Swap(old, new)

    # --------------------------------------------------------------------------------------- swaps

    def finish_former(self) -> int:
        """End what former runs had begun; how many swaps it were. Those of runs that are at work
        are left to them."""
        names = self.files.names(HOME)
        marks = [mark for mark in map(mark_of, names) if mark is not None]
        done = 0
        for mark in marks:
            taken = self._take_over(mark)
            if taken is None:
                continue
            done += 1
            if taken.kind == SWAP:
                self._swap(taken)
            else:
                self._put_in(taken)
        marked = {mark.number for mark in marks}
        for name in names:
            if mark_of(name) is None and name not in marked and _is_left_over(name):
                self.files.delete(f"{HOME}/{name}")
        return done

    def _take_over(self, mark: Mark) -> Mark | None:
        """The same mark in our name; None if its owner is at work or another one was faster."""
        if mark.is_at_work():
            return None
        ours = mark._replace(owner=me())
        return ours if ours.name == mark.name or self._claim(mark.name, ours.name) else None

    def _read(self, mark: str) -> Swap:
        try:
            return msgspec.json.decode(self.files.read(mark), type=Swap)
        except (msgspec.DecodeError, json.JSONDecodeError) as error:
            raise PipelineFailed(
                f"compact: {self.files.at(mark)} can't be read ({error}): the files it names may "
                "be moved in part; look at the folder beside it, which has old and new ones"
            ) from None

    def _swap(self, mark: Mark) -> bool:
        """Move the old files away, then put the new ones in; False if another one had them."""
        swap = self._read(mark.name)
        self.files.make_folder(f"{HOME}/{mark.number}/old")
        for source, aside in swap.old.items():
            if not self.files.exists(aside) and not self._claim(source, aside):
                self._undo(mark, swap)
                return False
        claimed = mark._replace(kind=CLAIMED)
        self.files.move(mark.name, claimed.name)
        self._put_in(claimed)
        return True

    def _claim(self, source: str, aside: str) -> bool:
        try:
            if not self.files.exists(source):
                return False
            self.files.move(source, aside)
        except Exception as error:  # Hadoop's file systems say no in many ways
            if self.files.exists(source):
                raise
            log.info("claimed by another file=%s reason=%s", source, error)
            return False
        return True

    def _undo(self, mark: Mark, swap: Swap) -> None:
        for source, aside in swap.old.items():
            if self.files.exists(aside):
                self.files.move(aside, source)
        self.files.delete(mark.name)
        self.files.delete(f"{HOME}/{mark.number}")

    def _put_in(self, mark: Mark) -> None:
        for source, target in self._read(mark.name).new.items():
            if self.files.exists(source):
                self.files.move(source, target)
        self.files.write(LAST, mark.number.encode())
        self.files.delete(f"{HOME}/{mark.number}")
        self.files.delete(mark.name)


def _is_left_over(name: str) -> bool:
    began = name.partition("-")[0]
    return began.isdecimal() and now_ms() - int(began) > LEFT_OVER_MS
