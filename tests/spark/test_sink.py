"""The sink in a real SparkSession, against a real broker."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from cometmq.client.remote import Remote
from cometmq.client.selector import hash_of
from cometmq.message import MessageQueue
from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode
from spark_programs import count_topic, read_topic

BATCH = RequestCode.SEND_BATCH_MESSAGE


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        yield running


@pytest.fixture
def topic(broker: LocalBroker, request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name.split("[")[0]
    broker.create_topic(name, queues=4)
    yield name
    broker.clear_faults()


def write(frame: DataFrame, broker: LocalBroker, topic: str | None = None, **more: Any) -> None:
    writer = frame.write.format("rocketmq").option("namesrv", broker.namesrv).mode("append")
    if topic is not None:
        writer = writer.option("topic", topic)
    for name, value in more.items():
        writer = writer.option(name, value)
    writer.save()


def test_every_column(spark: SparkSession, broker: LocalBroker, topic: str) -> None:
    frame = spark.range(3000).select(
        f.lit(topic).alias("topic"),
        f.concat(f.lit("body "), "id").cast("binary").alias("body"),
        f.when(f.col("id") % 2 == 0, f.concat(f.lit("tag"), f.col("id") % 3)).alias("tags"),
        f.array(f.concat(f.lit("k"), "id"), f.lit("all")).alias("keys"),
        f.create_map(f.lit("id"), f.col("id").cast("string")).alias("properties"),
        f.concat(f.lit("s"), f.col("id") % 50).alias("sharding_key"),
    )
    write(frame, broker)
    found = {int(one.body.split()[1]): one for one in read_topic(broker.namesrv, topic)}
    assert sorted(found) == list(range(3000))
    queues = [MessageQueue(topic, broker.broker_name, n) for n in range(4)]
    for number, one in found.items():
        assert one.tags == (f"tag{number % 3}" if number % 2 == 0 else "")
        assert one.properties["KEYS"] == f"k{number} all"
        assert one.properties["id"] == str(number)
        assert one.queue_id == hash_of(f"s{number % 50}")(queues).queue_id
    assert len({one.message_id for one in found.values()}) == 3000


def test_strings_queue_ids_and_delays(spark: SparkSession, broker: LocalBroker, topic: str) -> None:
    frame = spark.range(40).select(
        f.concat(f.lit("é "), "id").alias("body"),
        (f.col("id") % 4).cast("int").alias("queue_id"),
        f.concat_ws(" ", f.lit("a"), f.col("id").cast("string")).alias("keys"),
        f.when(f.col("id") % 10 == 0, f.timestamp_millis(f.lit(5000))).alias("deliver_time"),
    )
    write(frame, broker, topic)
    give_up = time.monotonic() + 300
    while count_topic(broker.namesrv, topic) < 40 and time.monotonic() < give_up:
        time.sleep(0.2)
    found = read_topic(broker.namesrv, topic)
    assert sorted(int(one.body.decode().split()[1]) for one in found) == list(range(40))
    for one in found:
        number = int(one.body.decode().split()[1])
        assert one.queue_id == number % 4 and one.properties["KEYS"] == f"a {number}"


def test_json_bodies(spark: SparkSession, broker: LocalBroker, topic: str) -> None:
    frame = spark.range(500).select(
        "id",
        f.concat(f.lit('say "'), "id", f.lit('"\n')).alias("text"),
        f.when(f.col("id") % 2 == 0, f.col("id") / 4).alias("part"),
        f.struct(f.lit(1).alias("x"), f.array(f.lit("y")).alias("l")).alias("deep"),
        f.lit("j").alias("tags"),
    )
    write(frame, broker, topic, bodyFormat="json")
    found = read_topic(broker.namesrv, topic)
    for one in found:
        value = json.loads(one.body)
        number = value["id"]
        expected = {"id": number, "text": f'say "{number}"\n', "deep": {"x": 1, "l": ["y"]}}
        if number % 2 == 0:
            expected["part"] = number / 4
        assert value == expected and one.tags == "j"
    assert len(found) == 500


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_bad_rows_go_to_their_path(
    spark: SparkSession, broker: LocalBroker, topic: str, tmp_path: Path, kind: str
) -> None:
    frame = spark.range(1000, numPartitions=4).select(
        f.when(f.col("id") % 100 != 7, f.col("id").cast("string")).alias("body"),
        f.when(f.col("id") % 100 == 9, "a|b").otherwise("ok").alias("tags"),
    )
    path = tmp_path / "bad"
    before = count_topic(broker.namesrv, topic)
    write(frame, broker, topic, badRecordsPath=str(path), badRecordsFormat=kind)
    assert count_topic(broker.namesrv, topic) - before == 980
    bad = getattr(spark.read, kind)(str(path)).collect()
    assert len(bad) == 20
    assert {row.bad_reason.split(":")[0] for row in bad} == {"body is null", "tags"}
    assert {row.bad_partition for row in bad} == {0, 1, 2, 3}
    assert not any((path / "_temporary").iterdir())


def test_bad_rows_fail_the_job_and_are_named(
    spark: SparkSession, broker: LocalBroker, topic: str, tmp_path: Path
) -> None:
    frame = spark.range(10, numPartitions=1).select(
        f.when(f.col("id") != 7, f.col("id").cast("string")).alias("body")
    )
    with pytest.raises(Exception, match="row 7 of partition 0 can't be a message: body is null"):
        write(frame, broker, topic)


@pytest.mark.parametrize(
    ("columns", "given", "part"),
    [
        (["body", "surprise"], {}, "column 'surprise' is unknown"),
        (["body"], {"tpic": "x"}, "did you mean 'topic'"),
        (["body"], {"mode": "overwrite"}, "appends"),
    ],
)
def test_what_cannot_be_written_fails_before_a_task_starts(
    spark: SparkSession,
    broker: LocalBroker,
    topic: str,
    columns: list[str],
    given: dict[str, str],
    part: str,
) -> None:
    frame = spark.range(3).select(*(f.lit("x").alias(name) for name in columns))
    mode = given.pop("mode", "append")
    writer = frame.write.format("rocketmq").options(namesrv=broker.namesrv, topic=topic, **given)
    with pytest.raises(Exception, match=part):
        writer.mode(mode).save()
    assert count_topic(broker.namesrv, topic) == 0


def test_secrets_are_in_no_plan_and_no_error(
    spark: SparkSession, broker: LocalBroker, topic: str
) -> None:
    frame = spark.range(1, numPartitions=1).select(f.lit(None).cast("string").alias("body"))
    with pytest.raises(Exception, match="body is null") as caught:
        write(frame, broker, topic, accessKey="the-access", secretKey="the-secret")
    assert "the-secret" not in str(caught.value) and "the-access" not in str(caught.value)


def test_flow_control(spark: SparkSession, broker: LocalBroker, topic: str) -> None:
    fault = broker.fail(BATCH, after=3, times=8, response_code=ResponseCode.SYSTEM_BUSY)
    frame = spark.range(5000, numPartitions=2).selectExpr("cast(id as string) as body")
    write(frame, broker, topic, batchMessages=100)
    assert fault.hits == 8
    found = [int(one.body) for one in read_topic(broker.namesrv, topic)]
    assert sorted(found) == list(range(5000))


def test_a_stream_writes_every_batch_once(
    spark: SparkSession, broker: LocalBroker, topic: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    for number in range(3):
        numbers = range(number * 1000, number * 1000 + 1000)
        source.mkdir(exist_ok=True)
        (source / f"{number}.txt").write_text("".join(f"{one}\n" for one in numbers))

    def run() -> None:
        query = (
            spark.readStream.format("text")
            .option("maxFilesPerTrigger", "1")
            .load(str(source))
            .withColumnRenamed("value", "body")
            .writeStream.format("rocketmq")
            .option("namesrv", broker.namesrv)
            .option("topic", topic)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert count_topic(broker.namesrv, topic) == 3000
    # As if the driver had died before it noted that the last batch is done.
    commits = tmp_path / "checkpoint" / "commits"
    for name in ("2", ".2.crc"):
        (commits / name).unlink(missing_ok=True)
    run()
    found = [int(one.body) for one in read_topic(broker.namesrv, topic)]
    assert sorted(found) == list(range(3000))


def test_foreach_batch_with_a_writer_id_is_exactly_once_too(
    spark: SparkSession, broker: LocalBroker, topic: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "0.txt").write_text("".join(f"{one}\n" for one in range(500)))

    def twice(frame: DataFrame, number: int) -> None:
        named = frame.withColumnRenamed("value", "body")
        for _ in range(2):  # the second time is what a replay of the batch does
            write(named, broker, topic, writerId="one")
        write(named.limit(10), broker, topic, writerId="two")

    query = (
        spark.readStream.format("text")
        .load(str(source))
        .writeStream.foreachBatch(twice)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert count_topic(broker.namesrv, topic) == 510


def test_a_job_that_is_run_again_by_its_batch_id(
    spark: SparkSession, broker: LocalBroker, topic: str
) -> None:
    frame = spark.range(700, numPartitions=2).selectExpr("cast(id as string) as body")
    for batch in (1, 1, 2):
        write(frame, broker, topic, writerId="nightly", batchId=batch)
    assert count_topic(broker.namesrv, topic) == 1400
    with pytest.raises(Exception, match="needs the option batchId"):
        write(frame, broker, topic, writerId="nightly")


def test_many_jobs_leave_no_producers_behind(spark: SparkSession) -> None:
    """A job of 2 tasks and 4 queues is 8 producers: without an end the third would be refused."""
    frame = spark.range(1200, numPartitions=2).selectExpr("cast(id as string) as body")
    with LocalBroker(store="memory", settings={"maxProducerSequences": "16"}) as small:
        small.create_topic("jobs", queues=4)
        for number in range(4):
            write(frame, small, "jobs")
            if number == 1:  # one that fails, with a task that was done
                bad = frame.selectExpr("if(body = '700', '', body) as body")
                with pytest.raises(Exception, match="row 100 of partition 1"):
                    write(bad, small, "jobs")
        with Remote(small.broker_address) as remote:
            told = remote.call(RequestCode.GET_BROKER_RUNTIME_INFO).body
        assert json.loads(told)["table"]["cometmqProducerSequences"] == "0"
        assert 4800 <= count_topic(small.namesrv, "jobs") < 6000
