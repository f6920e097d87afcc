"""Three million messages over eight queues, by batch and by stream: each once, and only once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

from cometmq import Message, MessageQueue, Producer
from cometmq.client.blocking_admin import Admin
from programs import write_conf

COUNT = int(os.environ.get("COMETMQ_LARGE_COUNT", "3000000"))  # a multiple of IN_ONE
QUEUES = 8
IN_ONE = 5_000  # messages in a request


@pytest.mark.large
def test_three_million_messages_are_read_once_and_only_once(
    spark: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    conf = write_conf(tmp_path / "broker.conf", {"brokerName": "broker-a"})
    program = start(
        "up",
        *("--namesrv-port", "0", "--broker-port", "0"),
        *("--store", str(tmp_path / "store"), "--broker-conf", conf),
    ).ready()
    with Admin(program.namesrv) as admin:
        admin.create_topic("t", QUEUES)
    with Producer("p", namesrv=program.namesrv) as producer:
        for number, begin in enumerate(range(0, COUNT, IN_ONE)):
            queue = MessageQueue("t", "broker-a", number % QUEUES)
            batch = [Message("t", b"%d" % one) for one in range(begin, begin + IN_ONE)]
            producer.send_batch(batch, queue=queue)

    def check(frame: Any) -> None:
        number = f.col("body").cast("string").cast("bigint")
        row = frame.select(number.alias("n")).agg(
            f.count("n").alias("rows"),
            f.countDistinct("n").alias("different"),
            f.sum("n").alias("sum"),
            f.min("n").alias("least"),
            f.max("n").alias("most"),
        )
        expected = (COUNT, COUNT, COUNT * (COUNT - 1) // 2, 0, COUNT - 1)
        assert tuple(row.collect()[0]) == expected

    read = spark.read.format("rocketmq").option("namesrv", program.namesrv).option("topic", "t")
    check(read.option("columns", "body").load())
    assert read.load().rdd.getNumPartitions() == QUEUES
    stream = spark.readStream.format("rocketmq").option("namesrv", program.namesrv)
    stream = stream.option("topic", "t").option("startingOffsets", "earliest")
    stream = stream.option("maxOffsetsPerTrigger", COUNT // 4).option("columns", "body,queue_id")
    lake, checkpoint = str(tmp_path / "lake"), str(tmp_path / "checkpoint")
    writer = stream.load().writeStream.format("parquet").option("path", lake)
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query = writer.start()
    assert query.awaitTermination(300)
    assert query.lastProgress.batchId >= 3
    check(spark.read.parquet(lake))
