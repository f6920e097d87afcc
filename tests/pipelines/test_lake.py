"""The Parquet lake: a batch is published once, wherever its writer dies and however often it is
replayed; every reader of Parquet sees the same rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset
import pytest
from pyspark.sql import DataFrame, SparkSession

from cometmq.pipelines.files import Files
from cometmq.pipelines.lake import KEPT_MARKS, ParquetLake, writer_of


class Killed(BaseException):
    """The writer's process is gone."""


class Mortal(Files):
    """Files that a process uses which dies at its n-th change of the file system, before or after
    that change."""

    def __init__(self, spark: SparkSession, root: str, lives: int, is_late: bool) -> None:
        super().__init__(spark, root)
        self.lives, self.is_late = lives, is_late

    def _live(self, change: Any, *words: Any) -> None:
        self.lives -= 1
        is_last = self.lives == 0  # a change may be made of others, which count too
        if is_last and not self.is_late:
            raise Killed
        change(*words)
        if is_last:
            raise Killed

    def move(self, source: str, target: str) -> None:
        self._live(super().move, source, target)

    def delete(self, name: str) -> None:
        self._live(super().delete, name)

    def make_folder(self, name: str) -> None:
        self._live(super().make_folder, name)

    def write(self, name: str, data: bytes) -> None:
        self._live(super().write, name, data)


def rows(spark: SparkSession, first: int, count: int) -> DataFrame:
    made = spark.range(first, first + count, numPartitions=2)
    return made.selectExpr("id", "concat('p', id % 3) AS part")


def read(path: Path) -> list[int]:
    """By another engine than the one that wrote."""
    if not any(path.glob("part=*/*.parquet")):
        return []
    files = [str(one) for one in path.glob("part=*/*.parquet")]
    table = dataset.dataset(files, format="parquet").to_table(columns=["id"])
    return sorted(table.column("id").to_pylist())


def lake(spark: SparkSession, path: Path) -> ParquetLake:
    return ParquetLake(spark, str(path), "w1", ["part"])


def test_batches_come_and_stay(spark: SparkSession, tmp_path: Path) -> None:
    one = lake(spark, tmp_path)
    assert one.write(rows(spark, 0, 30), 0) > 0
    assert one.write(rows(spark, 30, 30), 1) > 0
    assert read(tmp_path) == list(range(60))
    found = spark.read.parquet(str(tmp_path))
    assert found.count() == 60 and sorted(found.columns) == ["id", "part"]
    assert one.write(rows(spark, 30, 30), 1) == 0, "a replay of a published batch"
    assert lake(spark, tmp_path).write(rows(spark, 30, 30), 1) == 0, "by a new process too"
    assert read(tmp_path) == list(range(60))


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_killed_at_any_step_a_replay_publishes_it_once(
    spark: SparkSession, tmp_path: Path, is_late: bool
) -> None:
    deaths = 0
    before = tmp_path / "before"
    lake(spark, before).write(rows(spark, 0, 9), 0)
    for lives in range(1, 40):
        path = tmp_path / f"{is_late}-{lives}"
        shutil.copytree(before, path)
        doomed = lake(spark, path)
        doomed._files = Mortal(spark, str(path), lives, is_late)
        try:
            doomed.write(rows(spark, 9, 9), 1)
        except Killed:
            deaths += 1
        else:
            break
        seen = read(path)
        assert len(set(seen)) == len(seen) and set(range(9)) <= set(seen) <= set(range(18))
        # A new process; its rows are the same in another order and in other files.
        lake(spark, path).write(rows(spark, 9, 9).coalesce(1), 1)
        assert read(path) == list(range(18)), f"killed at change {lives}"
    assert deaths > 8


def test_writers_do_not_touch_each_other(spark: SparkSession, tmp_path: Path) -> None:
    ParquetLake(spark, str(tmp_path), "w1", ["part"]).write(rows(spark, 0, 9), 0)
    ParquetLake(spark, str(tmp_path), "w2", ["part"]).write(rows(spark, 100, 9), 0)
    assert read(tmp_path) == [*range(9), *range(100, 109)]


def test_marks_are_bounded(spark: SparkSession, tmp_path: Path) -> None:
    one = lake(spark, tmp_path)
    marks = tmp_path / "_cometmq" / "w1"
    marks.mkdir(parents=True)
    for n in range(KEPT_MARKS + 5):
        (marks / f"{n:012d}.done").touch()
    one.write(rows(spark, 0, 3), KEPT_MARKS + 5)
    left = sorted(found.name for found in marks.glob("*.done"))
    assert len(left) == KEPT_MARKS and left[-1] == f"{KEPT_MARKS + 5:012d}.done"


def test_a_checkpoint_names_its_writer(spark: SparkSession, tmp_path: Path) -> None:
    first = writer_of(spark, str(tmp_path / "a"))
    assert writer_of(spark, str(tmp_path / "a")) == first
    assert writer_of(spark, str(tmp_path / "b")) != first
