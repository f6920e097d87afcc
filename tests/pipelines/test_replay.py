"""`replay`: what a lake or a topic had goes into a topic again, in order, once, at its pace."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cometmq import MessageQueue
from cometmq.errors import UsageError
from cometmq.pipelines import archive, compact, replay
from cometmq.pipelines.compacting import HOME, SWAP, Mark
from cometmq.pipelines.files import Files
from cometmq.pipelines.owners import me
from cometmq.pipelines.replay_plan import Bucket, Progress, slices_of
from cometmq.pipelines.running import PipelineFailed
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode
from spark_programs import count_topic, read_topic

from .pipes import by_queue, running, send
from .topics import lake_files


def test_a_lake_comes_back(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> None:
    fields: Any = {
        "tags": lambda n: "red",
        "keys": lambda n: f"k{n}",
        "sharding_key": lambda n: f"s{n % 4}",
        "properties": lambda n: {"n": str(n), "REPLY_TO_CLIENT": "gone"},
    }
    send(rocketmq, "past", range(200), **fields)
    time.sleep(0.3)
    send(rocketmq, "past", range(200, 400), **fields)
    send(rocketmq, "other", range(1000, 1010))
    lake = str(tmp_path / "lake")
    quiet: Any = {"namesrv": rocketmq.namesrv, "tell": lambda line: None}
    archive(spark, topic="past,other", lake=lake, rows_per_batch=150, **quiet)

    lines: list[str] = []
    rocketmq.create_topic("again", queues=4)
    words: Any = {
        "namesrv": rocketmq.namesrv,
        "lake": lake,
        "topic": "past",
        "to_topic": "again",
        "checkpoint": str(tmp_path / "c"),
        "rows_per_batch": 100,
        "tell": lines.append,
    }
    stop = threading.Event()

    def stop_after_one(line: str) -> None:
        if "slice 1 of" in line:
            stop.set()

    outcome = replay(spark, **{**words, "tell": stop_after_one}, stop=stop)
    first = outcome.rows
    assert outcome.is_stopped and outcome.batches == 1 and 100 <= first < 400
    assert count_topic(rocketmq.namesrv, "again") == first, "nothing half-sent"
    outcome = replay(spark, **words)
    assert "1 of" in lines[0] and "slices were sent before" in lines[0]
    assert outcome.rows == 400 - first and outcome.figures["planned"] == 400
    there = read_topic(rocketmq.namesrv, "again")
    assert by_queue(there) == {q: list(range(q, 400, 4)) for q in range(4)}
    for one in there:
        n = int(one.body)
        assert one.tags == "red" and list(one.keys) == [f"k{n}"] and one.properties["n"] == str(n)
        assert "REPLY_TO_CLIENT" not in one.properties
        assert one.properties["ORIGIN_SHARDING_KEY"] == f"s{n % 4}"
        assert int(one.properties["ORIGIN_STORE_TIME"]) <= one.store_time.timestamp() * 1000

    assert replay(spark, **words).rows == 0, "run again it has nothing to do"
    assert count_topic(rocketmq.namesrv, "again") == 400
    with pytest.raises(UsageError, match="is of a replay with topic='past', not 'other'"):
        replay(spark, **{**words, "topic": "other"})

    by_name = {"to_topic": "re-{topic}", "checkpoint": str(tmp_path / "d"), "topic": None}
    where = "queue_offset < 2 AND queue_id = 1"
    replay(spark, **{**words, **by_name}, where=where, queues=4, order="sharding-key")
    assert sorted(int(m.body) for m in read_topic(rocketmq.namesrv, "re-past")) == [1, 5]
    assert sorted(int(m.body) for m in read_topic(rocketmq.namesrv, "re-other")) == [1001, 1005]


def test_a_span_of_a_topic_at_its_pace(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    send(rocketmq, "paced", range(20))
    time.sleep(0.05)
    begin = datetime.now(UTC)
    for burst in range(3):
        send(rocketmq, "paced", range(20 + burst * 20, 40 + burst * 20))
        time.sleep(4 if burst < 2 else 0.05)
    end = datetime.now(UTC)
    send(rocketmq, "paced", range(80, 100))
    rocketmq.create_topic("paced-again", queues=4)
    words: Any = {
        "namesrv": rocketmq.namesrv,
        "topic": "paced",
        "to_topic": "paced-again",
        "begin": begin.isoformat(),
        "end": str(int(end.timestamp() * 1000)),
        "tell": lambda line: None,
    }
    outcome = replay(spark, pace="2x", checkpoint=str(tmp_path / "c"), **words)
    assert outcome.rows == 60 and outcome.batches >= 3  # a slow burst is more than one
    there = read_topic(rocketmq.namesrv, "paced-again")
    assert by_queue(there) == {q: list(range(20 + q, 80, 4)) for q in range(4)}
    took_s = [
        stored[60] - stored[20]
        for stored in (
            {int(one.body): one.store_time.timestamp() for one in messages}
            for messages in (read_topic(rocketmq.namesrv, "paced"), there)
        )
    ]
    late_s = float(str(outcome.figures["behind the pace"]).split()[0])
    wanted_s = took_s[0] / 2
    assert took_s[0] >= 8 and wanted_s - 1 - late_s <= took_s[1] <= wanted_s + 2 + 2 * late_s


def test_a_killed_replay_goes_on(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    for thousand in range(2):  # apart in time: two slices at least
        send(rocketmq, "cut", range(thousand * 1000, thousand * 1000 + 1000))
        time.sleep(0.3)
    marks = tmp_path / "c" / "replay"
    with LocalBroker() as other:
        other.create_topic("cut", queues=4)
        words: Any = {
            "namesrv": other.namesrv,
            "from_namesrv": rocketmq.namesrv,
            "topic": "cut",
            "to_topic": "cut",
            "checkpoint": str(tmp_path / "c"),
            "rows_per_batch": 500,
        }
        options = ["batchMessages=20"]
        other.delay(RequestCode.SEND_BATCH_MESSAGE, 0.1, times=100_000)
        with running(tmp_path / "log", "replay", sink_options=options[0], **words) as pipeline:
            pipeline.wait_until(lambda: any(marks.glob("*.done")))
            sent = count_topic(other.namesrv, "cut")
            pipeline.wait_until(lambda: count_topic(other.namesrv, "cut") > sent)
            pipeline.kill()
        other.clear_faults()
        assert count_topic(other.namesrv, "cut") < 2000
        lines: list[str] = []
        replay(spark, sink_options=options, tell=lines.append, **words)
        assert "slices were sent before" in lines[0]
        there = read_topic(other.namesrv, "cut")
        assert by_queue(there) == {q: list(range(q, 2000, 4)) for q in range(4)}


def test_slices_cover_every_offset_once() -> None:
    one, two = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)
    buckets = [
        Bucket(0, one, 1000, 10, 19, 10, ("d1", "d1")),
        Bucket(0, two, 1001, 0, 4, 5, ("d1", "d1")),
        Bucket(3, one, 4000, 20, 29, 9, ("d2", "d2")),
        Bucket(5, two, 6000, 5, 6, 2, ("d3", "d3")),
    ]
    found = slices_of(reversed(buckets), 1)
    assert [s.first_ms for s in found] == [1000, 4000, 6000]
    assert [s.spans() for s in found] == [
        [(one, 10, 20), (two, 0, 5)],
        [(one, 20, 30)],
        [(two, 5, 7)],
    ]
    assert [s.dates for s in found] == [("d1", "d1"), ("d2", "d2"), ("d3", "d3")]
    (all_in_one,) = slices_of(buckets, 1000)
    assert all_in_one.spans() == [(one, 10, 30), (two, 0, 7)] and all_in_one.rows == 26
    # The clock was set back: offset 25 was stored "later" than 26 to 29.
    mixed = [*buckets, Bucket(4, one, 5000, 25, 25, 1, ("d9", "d9"))]
    found = slices_of(mixed, 1)
    assert [s.spans() for s in found][1:] == [[(one, 20, 30)], [(two, 5, 7)]]
    assert found[1].dates == ("d1", "d9"), "wherever the rows of a range may lie"


def test_a_lake_that_changes_under_a_slice(spark: SparkSession, tmp_path: Path) -> None:
    progress = Progress(Files(spark, str(tmp_path)))
    progress.begin(0, 10)
    progress.begin(0, 10)
    with pytest.raises(PipelineFailed, match="had 10 rows when it was cut off and has 9 now"):
        progress.begin(0, 9)
    assert progress.next() == 0
    for number in range(3):
        progress.done(number)
    assert progress.next() == 3
    assert sorted(one.name for one in (tmp_path / "replay").glob("0*")) == ["000000000002.done"]


def test_a_lake_that_is_being_compacted(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(rocketmq, "swapped", range(40))
    lake = tmp_path / "lake"
    quiet: Any = {"namesrv": rocketmq.namesrv, "tell": lambda line: None}
    archive(spark, topic="swapped", lake=str(lake), rows_per_batch=20, **quiet)
    home = lake / HOME
    home.mkdir(parents=True)
    mark = lake / Mark("0000000000001-ab", SWAP, me()).name
    mark.touch()
    away = [(one, home / one.name) for one in lake_files(lake)[:1]]
    for here, there in away:
        here.rename(there)
    lines: list[str] = []

    def tell(line: str) -> None:
        """The swap ends when the replay has seen that it waits."""
        lines.append(line)
        if "waiting for it" in line and mark.exists():
            for here, there in away:
                there.rename(here)
            mark.unlink()

    words: Any = {"namesrv": rocketmq.namesrv, "lake": str(lake), "to_topic": "swapped-again"}
    words |= {"checkpoint": str(tmp_path / "c"), "queues": 4, "tell": tell}
    assert replay(spark, **words).rows == 40
    there = read_topic(rocketmq.namesrv, "swapped-again")
    assert by_queue(there) == {q: list(range(q, 40, 4)) for q in range(4)}

    # It comes while a slice is read: its files are elsewhere when they are opened.
    begin, times = Progress.begin, iter(range(100))

    def swapped(self: Progress, number: int, rows: int) -> None:
        begin(self, number, rows)
        if next(times) == 0:
            small = {"min_files": 1, "tell": lambda line: None}
            monkeypatch.setattr("cometmq.pipelines.compacting.hour_of", lambda folder: "2000")
            assert compact(spark, lake=str(lake), **small).batches >= 1

    monkeypatch.setattr(Progress, "begin", swapped)
    again = {**words, "to_topic": "swapped-twice", "checkpoint": str(tmp_path / "d")}
    assert replay(spark, **again).rows == 40
    there = read_topic(rocketmq.namesrv, "swapped-twice")
    assert by_queue(there) == {q: list(range(q, 40, 4)) for q in range(4)}

    mark.touch()  # cut off, and nobody ends it
    monkeypatch.setattr("cometmq.pipelines.replaying.WAITS_S", (0.0, 0.0))
    last = {**words, "to_topic": "x", "checkpoint": str(tmp_path / "e"), "tell": lines.append}
    with pytest.raises(PipelineFailed, match="a compaction was cut off: end it"):
        replay(spark, **last)


def test_what_is_refused(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> None:
    words: Any = {"namesrv": rocketmq.namesrv, "checkpoint": str(tmp_path / "c")}
    for wrong, text in (
        ({"to_topic": "u"}, "needs lake"),
        ({"to_topic": "t", "topic": "t"}, "replayed into itself"),
        ({"to_topic": "{topic}", "topic": "s,t"}, "'s' would be replayed into itself"),
        ({"to_topic": "u", "topic": "t", "sink_options": ["batchSize=1"]}, "did you mean"),
        ({"to_topic": "u", "topic": "t", "source_options": ["tag=x"]}, "did you mean 'tags'"),
        ({"to_topic": "u", "topic": "t", "pace": "quick"}, "a factor such as 2x"),
        ({"to_topic": "u", "topic": "t", "begin": "noon"}, "begin 'noon' must be milliseconds"),
        ({"to_topic": "u", "topic": "t", "begin": "5", "end": "5"}, "is not before end"),
        ({"to_topic": "u", "lake": str(tmp_path / "none")}, "there is no lake at"),
    ):
        with pytest.raises(UsageError, match=text):
            replay(spark, **words, **wrong)


def test_nothing_sent_binds_no_checkpoint(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    send(rocketmq, "unbound", range(4), queues=1)
    words: Any = {
        "namesrv": rocketmq.namesrv,
        "topic": "unbound",
        "checkpoint": str(tmp_path),
        "tell": lambda _: None,
    }
    assert replay(spark, to_topic="unbound-x", begin="2099-01-01", **words).rows == 0
    with pytest.raises(UsageError, match="'mistyped' does not exist"):
        replay(spark, to_topic="mistyped", **words)
    assert replay(spark, to_topic="{topic}-{topic}", queues=1, **words).rows == 4
    assert len(read_topic(rocketmq.namesrv, "unbound-unbound")) == 4
