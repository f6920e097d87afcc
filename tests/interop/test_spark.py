"""The Spark connector with a real SparkSession against every server: what is written is read back.

The tasks of the sink alone, and what a task that runs again leaves behind: test_spark_sink.py.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from cometmq import Admin
from cometmq.client.remote import Remote
from cometmq.wire.codes import RequestCode

from .conftest import SIZES
from .servers import BROKER_NAME, Server, Settings, selected_servers, start
from .test_python_pull import make_topic
from .toolchain import Toolchain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.interop

SERVERS = [name for name in ("comet", "apache-4", "apache-5") if name in selected_servers()]
SOURCE = str(Path(__file__).parents[2] / "src")
COUNT = 2000
SHOWN_S = 30
TRIES = 4


@pytest.fixture(scope="module")
def spark(toolchain: Toolchain) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    import cometmq.spark

    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    is_ours = SparkSession.getActiveSession() is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PySpark's own start
        found = cometmq.spark.session("cometmq-interop", master="local[2]")
    found.sparkContext.setLogLevel("OFF")
    yield found
    if is_ours:
        found.stop()


@pytest.fixture(scope="module", params=SERVERS)
def peer(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(f"spark-{request.param}")
    running = start(request.param, toolchain, Settings(folder, folder / "store", sizes=SIZES))
    yield running
    running.kill()


def rows(spark: SparkSession, begin: int, end: int) -> DataFrame:
    """Messages `begin` to `end - 1`; the shards are four, as the queues."""
    return spark.range(begin, end, 1, 2).selectExpr(
        "concat('body ', id) as body",
        "if(id % 2 = 0, 'even', 'odd') as tags",
        "array(concat('k', id), 'all') as keys",
        "map('n', cast(id as string)) as properties",
        "cast(id % 4 as int) as queue_id",
    )


def write(frame: DataFrame, peer: Server, topic: str) -> None:
    writer = frame.write.format("rocketmq").mode("append").option("namesrv", peer.namesrv)
    writer.option("topic", topic).save()


def read(spark: SparkSession, peer: Server, topic: str, **options: object) -> DataFrame:
    reader = spark.read.format("rocketmq").option("namesrv", peer.namesrv).option("topic", topic)
    for key, value in options.items():
        reader = reader.option(key, str(value))
    return reader.load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row.body.split()[1]) for row in frame.select("body").collect())


def await_count(peer: Server, topic: str, count: int) -> None:
    """Apache's broker shows a message a moment after it has answered."""
    give_up = time.monotonic() + SHOWN_S
    with Admin(peer.namesrv) as admin:
        while True:
            stats = admin.topic_stats(topic).queues.values()
            if sum(one.max_offset for one in stats) >= count:
                return
            assert time.monotonic() < give_up, f"{topic} does not get to {count} messages"
            time.sleep(0.1)


def by_queue(topic: str, *offsets: object) -> str:
    return json.dumps({topic: {BROKER_NAME: {str(n): one for n, one in enumerate(offsets)}}})


def test_what_df_write_wrote_spark_read_reads(spark: SparkSession, peer: Server) -> None:
    topic = "spark-batch"
    make_topic(peer, topic)
    write(rows(spark, 0, COUNT), peer, topic)
    await_count(peer, topic, COUNT)
    frame = read(spark, peer, topic)
    found = frame.collect()
    by_place: dict[int, list[int]] = {}
    for row in found:
        number = int(row.body.split()[1])
        assert (row.topic, row.broker, row.queue_id) == (topic, BROKER_NAME, number % 4)
        assert row.tags == ("odd" if number % 2 else "even")
        assert row.keys == f"k{number} all"
        assert row.properties["n"] == str(number) and row.properties["TAGS"] == row.tags
        assert row.properties["UNIQ_KEY"] == row.msg_id
        assert row.reconsume_times == 0
        by_place.setdefault(row.queue_id, []).append(row.queue_offset)
    assert numbers(frame) == list(range(COUNT))
    assert all(sorted(offsets) == list(range(COUNT // 4)) for offsets in by_place.values())
    assert len({row.msg_id for row in found}) == COUNT


def test_bounds_and_filters(spark: SparkSession, peer: Server) -> None:
    topic = "spark-bounds"
    make_topic(peer, topic)
    write(rows(spark, 0, 400).coalesce(1), peer, topic)  # queue q has q, q + 4, q + 8, ...
    await_count(peer, topic, 400)
    time.sleep(0.05)
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    write(rows(spark, 400, 800).coalesce(1), peer, topic)
    await_count(peer, topic, 800)
    assert numbers(read(spark, peer, topic, startingTimestamp=between_ms)) == [*range(400, 800)]
    assert numbers(read(spark, peer, topic, endingTimestamp=between_ms)) == [*range(400)]
    some = read(
        *(spark, peer, topic),
        startingOffsets=by_queue(topic, 198, "latest", "earliest", 199),
        endingOffsets=by_queue(topic, 199, "latest", 2, "latest"),
    )
    assert numbers(some) == [2, 6, 792, 799]
    assert numbers(read(spark, peer, topic, tags="odd")) == [*range(1, 800, 2)]
    few = read(spark, peer, topic, sql92="n BETWEEN 100 AND 103", columns="body,queue_offset")
    assert few.columns == ["body", "queue_offset"]
    assert numbers(few) == [100, 101, 102, 103]
    assert numbers(read(spark, peer, topic, minPartitions=6, pullBatchSize=7)) == [*range(800)]


def test_a_stream_from_topic_to_topic(spark: SparkSession, peer: Server, tmp_path: Path) -> None:
    source, target, group = "spark-from", "spark-to", "spark-interop"
    for topic in (source, target):
        make_topic(peer, topic)
    make_group(peer, group)

    def run() -> Any:
        reader = spark.readStream.format("rocketmq").option("namesrv", peer.namesrv)
        reader = reader.option("topic", source).option("startingOffsets", "earliest")
        reader = reader.option("maxOffsetsPerTrigger", 300).option("group", group)
        frame = reader.option("commitOffsetsToGroup", "true").load()
        writer = frame.select("body", "tags", "queue_id").writeStream.format("rocketmq")
        writer = writer.option("namesrv", peer.namesrv).option("topic", target)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        for _ in range(TRIES):
            query = writer.trigger(availableNow=True).start()
            try:
                assert query.awaitTermination(300)
                return query
            except StreamingQueryException as error:
                # Spark gives a stream's Python process 10 s to start; a busy machine needs more.
                if "connect back" not in str(error):
                    raise
        pytest.fail(f"Spark did not get a Python process started, {TRIES} times")

    write(rows(spark, 0, 500), peer, source)
    await_count(peer, source, 500)
    assert run().lastProgress.batchId >= 1
    write(rows(spark, 500, 1000), peer, source)
    await_count(peer, source, 1000)
    run()
    await_count(peer, target, 1000)
    copied = read(spark, peer, target)
    assert numbers(copied) == list(range(1000)), "each once"
    assert {row.queue_id == int(row.body.split()[1]) % 4 for row in copied.collect()} == {True}
    with Admin(peer.namesrv) as admin:
        progress = admin.consumer_progress(group)
    done = {row.queue.queue_id: row.lag for row in progress.queues if row.queue.topic == source}
    assert done == {0: 0, 1: 0, 2: 0, 3: 0}, "what Spark has read is told to the group"


def make_group(server: Server, group: str) -> None:
    config = {"groupName": group, "consumeEnable": True, "retryQueueNums": 1, "retryMaxTimes": 16}
    config |= {"consumeFromMinEnable": True, "consumeBroadcastEnable": True, "brokerId": 0}
    config |= {"whichBrokerWhenConsumeSlowly": 1, "notifyConsumerIdsChangedEnable": True}
    with Remote(server.broker, timeout_ms=10_000) as remote:
        body = json.dumps(config).encode()
        remote.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
