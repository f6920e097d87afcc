"""Duplicates are dropped, what is left is there once, and how many were dropped is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from cometmq import Message, MessageQueue, Producer
from cometmq.pipelines.deduping import ORIGIN_ID, _queues, dedupe
from cometmq.pipelines.outbox import Outbox, is_row_by_row
from cometmq.pipelines.running import DUPLICATES, LATE, PipelineFailed
from cometmq.testing.local import LocalBroker
from spark_programs import read_topic

from .topics import table


def send(broker: LocalBroker, topic: str, numbers: list[int], *, by_key: bool = False) -> None:
    with Producer("tests", namesrv=broker.namesrv) as producer:
        for n in numbers:
            message = Message(topic, b'{"order": {"id": %d}}' % n, tags="paid")
            if by_key:
                message.keys = f"k{n}"
            else:
                message.unique_id = f"{topic}-{n}"
            message.properties["colour"] = "red"
            queue = MessageQueue(topic, broker.broker_name, n % 4)
            producer.send(message, queue=queue)


def test_into_a_topic_once_also_when_a_batch_is_done_again(
    spark: SparkSession,
    rocketmq: LocalBroker,
    rocketmq_topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = f"{rocketmq_topic[-40:]}-once"
    settings: dict[str, Any] = {
        "namesrv": rocketmq.namesrv,
        "topic": rocketmq_topic,
        "to_topic": target,
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    send(rocketmq, rocketmq_topic, [*range(40), *range(0, 40, 4)])
    sending = Outbox._send

    def sent_and_killed(self: Outbox, files: list[str]) -> None:
        sending(self, files)
        raise RuntimeError("killed on purpose")

    monkeypatch.setattr(Outbox, "_send", sent_and_killed)
    with pytest.raises(PipelineFailed, match="killed on purpose"):
        dedupe(spark, **settings)
    monkeypatch.setattr(Outbox, "_send", sending)
    send(rocketmq, rocketmq_topic, [5, 6, 41])
    lines: list[str] = []
    outcome = dedupe(spark, tell=lines.append, **settings)
    assert outcome.figures[DUPLICATES] == 12 and outcome.figures[LATE] == 0
    found = read_topic(rocketmq.namesrv, target)
    assert len(found) == 41 and len({one.body for one in found}) == 41
    one = next(one for one in found if one.body == b'{"order": {"id": 7}}')
    assert (one.tags, one.properties["colour"]) == ("paid", "red")
    assert one.properties[ORIGIN_ID] == f"{rocketmq_topic}-7"
    by_queue: dict[int, list[int]] = {}
    for one in found:
        by_queue.setdefault(one.queue_id, []).append(int(one.properties[ORIGIN_ID].split("-")[-1]))
    assert len(by_queue) == 4
    for numbers in by_queue.values():
        assert numbers == sorted(numbers) and len({n % 4 for n in numbers}) == 1
    told = [line for line in lines if ": batch " in line]  # others say that a batch takes long
    assert "batch 0  50 rows" in told[0], lines
    assert "batch 1  3 rows" in told[1] and "lag 0  total 53" in told[1], lines


def test_by_a_field_of_the_body_into_a_lake(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    send(rocketmq, rocketmq_topic, [1, 2, 1, 3, 2], by_key=True)
    with Producer("tests", namesrv=rocketmq.namesrv) as producer:
        for _ in range(2):
            producer.send(Message(rocketmq_topic, b"not JSON"))  # no key: both go on
    outcome = dedupe(
        spark,
        namesrv=rocketmq.namesrv,
        topic=rocketmq_topic,
        by="$.order.id",
        lake=str(tmp_path / "lake"),
        checkpoint=str(tmp_path / "checkpoint"),
    )
    assert outcome.figures[DUPLICATES] == 2
    rows = table(tmp_path / "lake")
    assert sorted(row["body"][-3:] for row in rows) == [b"1}}", b"2}}", b"3}}", b"SON", b"SON"]
    assert {row["keys"] for row in rows} == {"k1", "k2", "k3", None}


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_into_a_table_also_when_a_batch_is_done_again(
    spark: SparkSession,
    rocketmq: LocalBroker,
    rocketmq_topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """What was dropped before the kill is remembered after it, though the rows are there."""
    pytest.importorskip("deltalake" if kind == "delta" else "pyiceberg")
    from cometmq.pipelines.lake_tables import DeltaLake, IcebergLake, live_files

    lake: Any = DeltaLake if kind == "delta" else IcebergLake
    writing = lake.write

    def written_and_killed(self: Any, rows: DataFrame, batch_id: int) -> int:
        writing(self, rows, batch_id)
        raise RuntimeError("killed on purpose")

    settings: dict[str, Any] = {
        "namesrv": rocketmq.namesrv,
        "topic": rocketmq_topic,
        "lake": str(tmp_path / "lake"),
        "format": kind,
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    send(rocketmq, rocketmq_topic, [1, 2, 1])
    monkeypatch.setattr(lake, "write", written_and_killed)
    with pytest.raises(PipelineFailed, match="killed on purpose"):
        dedupe(spark, **settings)
    monkeypatch.setattr(lake, "write", writing)
    send(rocketmq, rocketmq_topic, [2, 3])
    assert dedupe(spark, **settings).figures[DUPLICATES] == 2
    rows = spark.read.parquet(*live_files(kind.title(), settings["lake"])).select("msg_id")
    assert sorted(one[0][-2:] for one in rows.collect()) == ["-1", "-2", "-3"]


def test_a_target_that_is_missing_is_as_wide_as_the_widest_source(rocketmq: LocalBroker) -> None:
    rocketmq.create_topic("narrow", queues=2)
    rocketmq.create_topic("broad", queues=5)
    assert len(_queues(rocketmq.namesrv, {}, "narrow, broad", "narrow-and-broad")) == 5


def test_only_streams_with_an_order_skip_the_outbox(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    reader = spark.readStream.format("rocketmq").option("namesrv", rocketmq.namesrv)
    source: DataFrame = reader.option("topic", rocketmq_topic).load()
    source.createOrReplaceTempView("source")
    mapped = spark.sql("SELECT body, upper(keys) AS keys FROM source WHERE tags = 'a'")
    assert is_row_by_row(source) and is_row_by_row(mapped)
    late = source.withWatermark("born_time", "1 minute")
    assert not is_row_by_row(late.groupBy("keys").count())
    assert not is_row_by_row(late.dropDuplicatesWithinWatermark(["keys"]))
    assert not is_row_by_row(source.repartition(3))
