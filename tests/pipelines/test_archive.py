"""`archive` and `compact`: every message is in the lake once, where another engine finds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet
import pytest
from pyspark.sql import SparkSession

from cometmq import Admin, MessageQueue
from cometmq.errors import DataLost, UsageError
from cometmq.pipelines import archive, replay
from cometmq.pipelines import compact as compact_lake
from cometmq.pipelines.compacting import (
    HOME,
    SWAP,
    Compaction,
    Mark,
    Partition,
    is_worth_it,
    mark_of,
    state_of,
)
from cometmq.pipelines.files import Files
from cometmq.pipelines.owners import PLENTY_MS, Owner, me
from cometmq.pipelines.retention import RetentionWatch
from cometmq.pipelines.running import PipelineFailed
from cometmq.testing.local import LocalBroker
from spark_programs import WAIT_S, read_topic

from .pipes import running, send
from .test_lake import Killed, Mortal
from .topics import lake_files as files


def table_of(lake: Path) -> pa.Table:
    """As pyarrow reads a lake with folders for partitions."""
    names = ("topic", "date", "hour")
    kinds = dataset.partitioning(pa.schema([(n, pa.string()) for n in names]), flavor="hive")
    return dataset.dataset(str(lake), format="parquet", partitioning=kinds).to_table()


def bodies(lake: Path) -> list[int]:
    return sorted(int(one) for one in table_of(lake).column("body").to_pylist())


def test_topics_come_into_folders_once(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    for topic in ("arc-one", "arc-two"):
        more = {"tags": lambda n: "red", "keys": lambda n: f"k{n}"}
        send(rocketmq, topic, range(100), properties=lambda n: {"n": str(n)}, **more)
    lines: list[str] = []
    words: Any = {
        "namesrv": rocketmq.namesrv,
        "lake": str(tmp_path),
        "topic_pattern": "arc-(one|two)",
        "rows_per_batch": 70,
        "tell": lines.append,
    }
    outcome = archive(spark, **words)
    assert outcome.rows == 200 and outcome.batches == 3 and outcome.lag == 0
    assert outcome.figures["files written"] == len(files(tmp_path))
    assert any("batch 0" in line and "70 rows" in line for line in lines)

    table = table_of(tmp_path)
    assert table.num_rows == 200
    stored = table.schema.field("store_time").type
    assert pa.types.is_timestamp(stored) and stored.unit == "us", "not the old INT96"
    for row in table.to_pylist():
        assert row["topic"] in ("arc-one", "arc-two") and row["tags"] == "red"
        assert dict(row["properties"])["n"] == row["body"].decode() == row["keys"][1:]
        assert row["event_time"] == row["store_time"]
        assert (row["date"], row["hour"]) == tuple(row["store_time"].strftime("%F %H").split())

    assert archive(spark, **words).rows == 0, "nothing twice"
    send(rocketmq, "arc-one", range(100, 110))
    assert archive(spark, **words).rows == 10
    assert table_of(tmp_path).num_rows == 210


def test_event_time_of_the_body(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> None:
    bodies_sent = [
        b'{"at": {"created": "2026-03-01T07:59:59Z"}}',
        b'{"at": {"created": 1772352000}}',
        b'{"at": {"created": 1772355600123}}',
        b'{"at": {"created": "2026-03-01T09:30:00+02:00"}}',
        b'{"at": {"created": "2026-03-01T23:30:00"}}',
        b'{"at": {"created": "2026-03-01 23:30:00.5"}}',
        b'{"at": {"created": "2026-03-02"}}',
        b'{"at": {"created": "yesterday"}}',
        b'{"at": {"created": 1e300}}',
        b"not JSON",
    ]
    send(rocketmq, "arc-json", range(len(bodies_sent)), body=lambda n: bodies_sent[n])
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")  # folders are UTC all the same
    try:
        words: Any = {"namesrv": rocketmq.namesrv, "topic": "arc-json"}
        archive(spark, lake=str(tmp_path), event_time="$.at.created", **words)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    rows = {row["body"]: row for row in table_of(tmp_path).to_pylist()}
    hours = [f"{rows[one]['date']} {rows[one]['hour']}" for one in bodies_sent[:7]]
    assert hours[:4] == ["2026-03-01 07", "2026-03-01 08", "2026-03-01 09", "2026-03-01 07"]
    assert hours[4:] == ["2026-03-01 23", "2026-03-01 23", "2026-03-02 00"], "UTC without a zone"
    assert rows[bodies_sent[2]]["event_time"].microsecond == 123_000
    for one in bodies_sent[7:]:
        assert rows[one]["event_time"] is None
        assert rows[one]["date"] == rows[one]["store_time"].strftime("%F")
    with pytest.raises(UsageError, match=r"a path into a JSON body"):
        archive(spark, lake=str(tmp_path), event_time="created", **words)


def test_a_killed_archive_goes_on(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    send(rocketmq, "arc-killed", range(600))
    lake = tmp_path / "lake"
    words: Any = {"namesrv": rocketmq.namesrv, "topic": "arc-killed", "lake": str(lake)}
    with running(tmp_path / "log", "archive", rows_per_batch=20, **words) as pipeline:
        pipeline.wait_until(lambda: len(files(lake)) >= 4)
        pipeline.kill()
    before = bodies(lake)
    assert len(before) == len(set(before)) and 0 < len(before) < 600
    outcome = archive(spark, rows_per_batch=1000, **words)
    assert bodies(lake) == list(range(600))
    assert outcome.figures["files written"] > 0


def test_retention_is_watched(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> None:
    send(rocketmq, "arc-kept", range(40))
    lines: list[str] = []
    words: Any = {
        "namesrv": rocketmq.namesrv,
        "topic": "arc-kept",
        "rows_per_batch": 20,
        "before_retention": True,
        "tell": lines.append,
    }
    outcome = archive(spark, lake=str(tmp_path / "one"), **words)
    told = [line for line in lines if "retention" in line or "waits" in line]
    assert "71 h 5" in told[0] and "left before retention (topic 'arc-kept'" in told[0]
    assert told[1] == "archive: nothing waits; brokers keep messages 72 h 0 min"
    assert outcome.figures["retention warnings"] == 0
    assert str(outcome.figures["least time left"]).startswith("71 h 5")

    with Admin(rocketmq.namesrv) as admin:
        admin.update_broker_config({"fileReservedTime": "1"}, rocketmq.broker_name)
        try:
            words["retention_margin"] = 1.0
            outcome = archive(spark, lake=str(tmp_path / "two"), **words)
        finally:
            admin.update_broker_config({"fileReservedTime": "72"}, rocketmq.broker_name)
    assert outcome.figures["retention warnings"] == 1
    assert any("WARNING falling behind retention, only 59 min" in line for line in lines)


@pytest.mark.parametrize("fails", [True, False])
def test_what_retention_took(spark: SparkSession, tmp_path: Path, fails: bool) -> None:
    queue = MessageQueue("t", "b", 3)
    lines: list[str] = []
    (tmp_path / "offsets").mkdir()
    offset = {"v": 1, "q": {"t": {"b": {"3": 40}}}}
    (tmp_path / "offsets" / "7").write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(offset)}')
    watch = RetentionWatch(
        "archive",
        "127.0.0.1:1",
        {},
        Files(spark, str(tmp_path)),
        lines.append,
        margin=0.5,
        fails_on_loss=fails,
    )
    watch._admin.close()
    ranges = SimpleNamespace(queues={queue: SimpleNamespace(min_offset=55, max_offset=55)})
    watch._admin = SimpleNamespace(  # type: ignore[assignment]
        topic_stats=lambda topic: ranges, broker_config=lambda broker: {"fileReservedTime": "48"}
    )
    if fails:
        with pytest.raises(DataLost, match="begins at 55 now, and 40 was to be archived"):
            watch.check(7)
        return
    watch.check(7)
    assert "15 messages lost to retention (topic 't' broker b queue 3 from 40)" in lines[0]
    assert watch.warnings == 1
    (tmp_path / "offsets" / "8").write_text('v1\n{}\n{"v": 1, "q": {}}')  # of a pattern
    watch.check(8)
    assert lines[-1] == "archive: nothing waits; there is no such topic yet"


# -------------------------------------------------------------------------------------- compaction


def small_files(spark: SparkSession, lake: Path, hour: str = "07") -> None:
    """Three files of 10 rows in one closed hour."""
    for n in range(3):
        rows = spark.range(n * 10, n * 10 + 10, numPartitions=1).selectExpr(
            "cast(id AS string) AS body", "'b' AS broker", "1 AS queue_id", "30 - id queue_offset"
        )
        at = lake / "topic=t" / "date=2026-03-01" / f"hour={hour}"
        rows.write.parquet(str(lake / "_made"))
        at.mkdir(parents=True, exist_ok=True)
        (made,) = (lake / "_made").glob("*.parquet")
        made.rename(at / f"w-{n}.parquet")
        shutil.rmtree(lake / "_made")


def test_closed_hours_are_merged(spark: SparkSession, tmp_path: Path) -> None:
    small_files(spark, tmp_path)
    now = datetime.now(UTC)
    open_hour = tmp_path / "topic=t" / f"date={now:%F}" / f"hour={now:%H}"
    shutil.copytree(tmp_path / "topic=t" / "date=2026-03-01" / "hour=07", open_hour)
    lines: list[str] = []
    outcome = compact_lake(spark, lake=str(tmp_path), tell=lines.append)
    assert outcome.batches == 1 and outcome.rows == 30 and outcome.figures["files"] == "3 to 1"
    assert len(list((tmp_path / "topic=t" / "date=2026-03-01" / "hour=07").glob("*.parquet"))) == 1
    assert len(list(open_hour.glob("*.parquet"))) == 3, "the current hour is left alone"
    assert names(tmp_path / "_cometmq" / "compaction") == ["last"]
    assert bodies(tmp_path) == sorted([*range(30), *range(30)])
    merged = table_of(tmp_path / "topic=t" / "date=2026-03-01")
    assert merged.column("queue_offset").to_pylist() == list(range(1, 31))
    assert compact_lake(spark, lake=str(tmp_path), tell=lines.append).batches == 0


def test_what_is_worth_merging() -> None:
    def worth(*sizes: int) -> bool:
        return is_worth_it(Partition("f", {str(n): s for n, s in enumerate(sizes)}), 3, 100, 1000)

    assert worth(1, 1) and worth(300, 300, 300, 300) and worth(99, 99, 99)
    assert not worth(1) and not worth(300, 300) and not worth(1000, 1000, 1000, 1000)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_compaction_killed_at_any_step(
    spark: SparkSession, tmp_path: Path, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compaction, "_write_merged", merged_by_arrow)
    made = tmp_path / "made"
    small_files(spark, made)
    deaths = 0
    for lives in range(1, 40):
        path = tmp_path / f"{is_late}-{lives}"
        shutil.copytree(made, path)
        doomed = Compaction(spark, str(path), 1 << 30)
        (closed,) = doomed.closed(2_000_000_000_000)
        doomed.files = Mortal(spark, str(path), lives, is_late)
        try:
            doomed.merge(closed)
        except Killed:
            deaths += 1
        else:
            break
        seen = _seen(path)
        assert len(seen) == len(set(seen)), f"doubled, killed at change {lives}"
        again = Compaction(spark, str(path), 1 << 30)
        again.finish_former()
        assert _seen(path) == list(range(30)), f"killed at change {lives}"
        for one in again.closed(2_000_000_000_000):  # and it can be merged, or is
            if len(one.files) > 1:
                again.merge(one)
        assert len(files(path)) == 1 and _seen(path) == list(range(30))
        assert not any(mark_of(one) for one in names(path / "_cometmq" / "compaction"))
    assert deaths > 8


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))


def merged_by_arrow(self: Compaction, one: Partition, number: str) -> int:
    """The same without a Spark job, of which a test of every step would need a hundred."""
    aside = Path(self.files.at(f"{HOME}/{number}/new"))
    aside.mkdir(parents=True)
    whole = pa.concat_tables(parquet.read_table(self.files.at(name)) for name in one.files)
    parquet.write_table(whole, aside / "part-0.parquet")
    return int(whole.num_rows)


def _seen(lake: Path) -> list[int]:
    return bodies(lake) if files(lake) else []


def test_a_file_that_another_compaction_took(spark: SparkSession, tmp_path: Path) -> None:
    small_files(spark, tmp_path)
    first = Compaction(spark, str(tmp_path), 1 << 30)
    second = Compaction(spark, str(tmp_path), 1 << 30)
    (closed,) = first.closed(2_000_000_000_000)

    class Slow(Files):
        """Between the second's mark and its moves the first is done."""

        def make_folder(self, name: str) -> None:
            if name.endswith("/old"):
                assert first.merge(closed)[0] == 1
            super().make_folder(name)

    second.files = Slow(spark, str(tmp_path))
    assert second.merge(closed)[0] == 0
    assert bodies(tmp_path) == list(range(30)) and len(files(tmp_path)) == 1
    third = Compaction(spark, str(tmp_path), 1 << 30)
    assert third.merge(closed)[0] == 0, "listed before, gone when it is read"
    assert bodies(tmp_path) == list(range(30)) and len(files(tmp_path)) == 1
    assert names(tmp_path / HOME) == ["last"]


def test_a_compaction_at_work_is_left_alone(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that starts while another one's files are on their way must not take the swap for one
    that was cut off: it would put the old files back beside the new ones."""
    monkeypatch.setattr(Compaction, "_write_merged", merged_by_arrow)
    small_files(spark, tmp_path)
    other = Compaction(spark, str(tmp_path), 1 << 30)
    seen: list[str | None] = []

    class Watched(Files):
        def move(self, source: str, target: str) -> None:
            assert other.finish_former() == 0
            seen.append(state_of(self))
            super().move(source, target)

    first = Compaction(spark, str(tmp_path), 1 << 30)
    (closed,) = first.closed(2_000_000_000_000)
    first.files = Watched(spark, str(tmp_path))
    assert first.merge(closed) == (1, 30)
    assert bodies(tmp_path) == list(range(30)) and len(files(tmp_path)) == 1
    assert seen.count(None) >= 5, "whoever reads meanwhile can know"
    assert state_of(first.files)


def test_whose_a_swap_is(spark: SparkSession, tmp_path: Path) -> None:
    mine = me()
    for owner, is_at_work in (
        (mine, False),  # of this process, and not at work in it
        (Owner(mine.host, os.getppid(), mine.began_ms), True),
        (Owner(mine.host, 2**22 + 1, mine.began_ms), False),  # no such process
        (Owner("elsewhere", 1, mine.began_ms), True),
        (Owner("elsewhere", 1, mine.began_ms - PLENTY_MS - 1), False),
        (None, False),  # of an older version
    ):
        mark = Mark("0000000000001-ab", SWAP, owner)
        assert mark_of(mark.name.removeprefix(f"{HOME}/")) == mark
        assert mark.is_at_work() is is_at_work, owner
    # Two find one that is left behind: one of them gets it.
    gone = Mark("0000000000001-ab", SWAP, Owner(mine.host, 2**22 + 1, 7))
    (tmp_path / HOME).mkdir(parents=True)
    (tmp_path / gone.name).write_text('{"old": {}, "new": {}}')
    hands = [Compaction(spark, str(tmp_path), 1) for _ in range(2)]
    taken = [hand._take_over(gone) for hand in hands]
    assert taken[0] is not None and taken[1] is None


def test_merged_files_are_counted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_files(spark, tmp_path)
    one = Compaction(spark, str(tmp_path), 1 << 30)
    (closed,) = one.closed(2_000_000_000_000)
    from pyspark.sql.classic.dataframe import DataFrame

    whole = DataFrame.coalesce
    monkeypatch.setattr(DataFrame, "coalesce", lambda frame, n: whole(frame, n).limit(29))
    with pytest.raises(PipelineFailed, match="30 rows and its merged files 29"):
        one.merge(closed)
    assert len(files(tmp_path)) == 3 and bodies(tmp_path) == list(range(30))


# ------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tables_take_a_batch_once(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("deltalake" if kind == "delta" else "pyiceberg")
    from cometmq.pipelines.sinks import open_lake

    topic = f"arc-{kind}"
    send(rocketmq, topic, range(60), properties=lambda n: {"n": str(n)})
    lake = tmp_path / "the lake"  # in addresses a space is %20
    words: Any = {"namesrv": rocketmq.namesrv, "topic": topic, "format": kind, "tell": print}
    outcome = archive(spark, lake=str(lake), rows_per_batch=40, compact=kind == "delta", **words)
    assert outcome.rows == 60 and outcome.batches == 2
    assert sorted(int(one) for one in _table(kind, lake).column("body").to_pylist()) == [*range(60)]
    assert [one.name for one in tmp_path.iterdir()] == [lake.name]
    # A replayed batch: the same writer, the same number.
    again = open_lake(spark, kind, str(lake), str(lake / "_cometmq/checkpoint"), ["topic"])
    rows = spark.createDataFrame([("t",)], "topic string")
    assert again.write(rows, 1) == 0
    assert _table(kind, lake).num_rows == 60
    assert dict(_table(kind, lake).to_pylist()[0]["properties"])["n"].isdigit()

    # Its files are the table's: nobody else merges them, and what it has dropped is not replayed.
    with pytest.raises(UsageError, match=f"is a {kind.title()} table"):
        compact_lake(spark, lake=str(lake))
    words = {"namesrv": rocketmq.namesrv, "to_topic": f"{topic}-again", "queues": 4}
    told = replay(spark, lake=str(lake), checkpoint=str(tmp_path / "c"), **words)
    assert told.rows == 60
    again = read_topic(rocketmq.namesrv, f"{topic}-again")
    assert sorted(int(one.body) for one in again) == [*range(60)]
    # Rows of another format beside it would be seen by nobody who reads the table.
    with pytest.raises(UsageError, match=f"written as {kind.title()}.*format={kind}"):
        archive(spark, lake=f"{lake}/", namesrv=rocketmq.namesrv, topic=topic)
    with pytest.raises(UsageError, match="no lake at"):
        compact_lake(spark, lake=str(tmp_path / "gone"))


def _table(kind: str, lake: Path) -> pa.Table:
    if kind == "delta":
        import deltalake

        return pa.table(deltalake.DeltaTable(str(lake)).to_pyarrow_table())
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("cometmq", uri=f"sqlite:///{lake}/catalog.db", warehouse="unused")
    return catalog.load_table("cometmq.messages").scan().to_arrow()


def test_a_lake_keeps_its_format(spark: SparkSession, tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    (tmp_path / "topic=t").mkdir()
    (tmp_path / "topic=t" / "one.parquet").touch()
    with pytest.raises(UsageError, match=r"written as Parquet.*format=parquet"):
        archive(spark, lake=str(tmp_path), namesrv="127.0.0.1:1", topic="t", format="delta")


def test_a_failure_is_told_in_a_line(rocketmq: LocalBroker, tmp_path: Path) -> None:
    """Not with the stacks that Spark logs of it."""
    words = ["pipeline", "run", "archive", "--master", "local[1]"]
    for setting in (f"namesrv={rocketmq.namesrv}", "topic=gone", f"lake={tmp_path}/lake"):
        words += ["--set", setting]
    done = subprocess.run(
        [sys.executable, "-m", "cometmq", *words], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "cometmq pipeline: archive: no route for topic 'gone'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and "\tat " not in done.stderr, done.stderr


def test_settings_are_checked(spark: SparkSession, tmp_path: Path) -> None:
    words: Any = {"namesrv": "127.0.0.1:1", "lake": str(tmp_path)}
    with pytest.raises(UsageError, match="topic_pattern"):
        archive(spark, **words)
    with pytest.raises(UsageError, match="0 to 1"):
        archive(spark, topic="t", retention_margin=2.0, **words)
    with pytest.raises(UsageError, match=r"at the end of a run.*'5 minutes' has none"):
        archive(spark, topic="t", compact=True, trigger="5 minutes", **words)
    with pytest.raises(UsageError, match="did you mean 'tags'"):
        archive(spark, topic="t", source_options=["tgs=a"], **words)
    with pytest.raises(UsageError, match=r"path of a folder .* is empty"):
        archive(spark, topic="t", **{**words, "lake": "", "checkpoint": ""})
    with pytest.raises(UsageError, match="write each as name=value"):
        archive(spark, topic="t", source_options=["secretKey"], **words)
