"""Batch reads: which messages, which columns, how many partitions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.errors import PySparkException

from cometmq import Compression, Message, MessageQueue, Producer, PullConsumer
from cometmq.testing.local import LocalBroker

Read = Callable[..., Any]
Send = Callable[..., None]


def numbers(frame: Any) -> list[int]:
    return sorted(int(row.body) for row in frame.select("body").collect())


def per_queue(broker: LocalBroker, topic: str, *offsets: int | str) -> str:
    by_queue = {str(number): offset for number, offset in enumerate(offsets)}
    return json.dumps({topic: {broker.broker_name: by_queue}})


def test_all_columns(read: Read, rocketmq: LocalBroker, rocketmq_topic: str, spark: Any) -> None:
    began = time.time()
    with Producer("spark-tests", namesrv=rocketmq.namesrv) as producer:
        sent = producer.send(
            Message(rocketmq_topic, b"\x00\xff", tags="paid", keys="a b", properties={"x": "é"}),
            queue=MessageQueue(rocketmq_topic, rocketmq.broker_name, 2),
        )
        producer.send(Message(rocketmq_topic, b"."), queue=sent.queue)
    first, second = read(topic=rocketmq_topic).orderBy("queue_offset").collect()
    assert (first.topic, first.broker) == (rocketmq_topic, rocketmq.broker_name)
    assert (first.queue_id, first.queue_offset, second.queue_offset) == (2, 0, 1)
    assert (first.keys, first.tags, bytes(first.body)) == ("a b", "paid", b"\x00\xff")
    assert (first.msg_id, first.reconsume_times, first.sys_flag) == (sent.message_id, 0, 0)
    assert first.properties["x"] == "é"
    assert first.properties["UNIQ_KEY"] == sent.message_id
    assert (second.keys, second.tags, bytes(second.body)) == (None, None, b".")
    for when in (first.born_time, first.store_time):
        # PySpark gives naive times of this machine's zone.
        assert began - 60 < when.timestamp() < time.time() + 60


def test_compressed_bodies_are_whole(
    read: Read, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    body = b"0123456789" * 2000
    for kind in Compression:
        with Producer(
            "spark-tests", namesrv=rocketmq.namesrv, compression=kind, compress_over_bytes=100
        ) as producer:
            producer.send(Message(rocketmq_topic, body))
            producer.send(Message(rocketmq_topic, b"small"))
    rows = read(topic=rocketmq_topic).select("body", "sys_flag").collect()
    assert sorted(len(row.body) for row in rows) == [5, 5, 5, 20000, 20000, 20000]
    assert {bytes(row.body) for row in rows} == {body, b"small"}
    assert {row.sys_flag & 1 for row in rows if len(row.body) > 5} == {1}


def test_a_batch_that_was_sent_as_one_is_many_rows(
    read: Read, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    with Producer("spark-tests", namesrv=rocketmq.namesrv) as producer:
        producer.send_batch([Message(rocketmq_topic, str(n).encode()) for n in range(100)])
    frame = read(topic=rocketmq_topic)
    assert numbers(frame) == list(range(100))
    assert frame.select("msg_id").distinct().count() == 100


def test_a_schema_or_the_option_chooses_columns(
    read: Read, send: Send, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 10, tags="a")
    chosen = read(schema="queue_offset BIGINT, tags STRING", topic=rocketmq_topic)
    assert chosen.columns == ["queue_offset", "tags"]
    assert {tuple(row) for row in chosen.collect()} == {(n, "a") for n in range(3)}
    by_option = read(topic=rocketmq_topic, columns="body, topic")
    assert by_option.columns == ["body", "topic"]
    assert numbers(by_option) == list(range(10))


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ("nothing STRING", {}, "has no column 'nothing'"),
        ("body STRING", {}, "column 'body' of the schema is string"),
        ("queue_id BIGINT", {}, "has it as int"),
        ("body BINARY NOT NULL, tags STRING NOT NULL", {}, "'tags' of the schema is NOT NULL"),
        ("body BINARY", {"columns": "tags"}, "give one of the two"),
        (None, {"columns": "bodi"}, "has no column 'bodi'"),
        (None, {"columns": "body,body2,body"}, "has no column 'body2'"),
    ],
)
def test_a_wrong_choice_of_columns_is_explained(
    read: Read, rocketmq_topic: str, schema: str | None, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException, match=said):
        read(schema=schema, topic=rocketmq_topic, **options).count()


def test_several_topics_a_pattern_and_chosen_queues(
    read: Read, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    other = f"{rocketmq_topic}-other"
    rocketmq.create_topic(other, queues=2)
    send(rocketmq_topic, 8)
    send(other, range(100, 104), queues=2)
    assert numbers(read(topic=f"{rocketmq_topic}, {other}")) == [*range(8), *range(100, 104)]
    assert numbers(read(topicPattern=f"{rocketmq_topic}.*")) == [*range(8), *range(100, 104)]
    assert numbers(read(topicPattern=rocketmq_topic)) == list(range(8)), "whole names match"
    broker = rocketmq.broker_name
    chosen = {rocketmq_topic: {broker: [1, 3]}, other: {broker: [0]}}
    assert numbers(read(assign=json.dumps(chosen))) == [1, 3, 5, 7, 100, 102]


def test_offsets_by_word_and_by_queue(
    read: Read, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 40)  # queue q has q, q+4, q+8, ...
    assert numbers(read(topic=rocketmq_topic, startingOffsets="latest")) == []
    start = per_queue(rocketmq, rocketmq_topic, 8, "latest", "earliest", 9)
    end = per_queue(rocketmq, rocketmq_topic, 9, "latest", 2, "latest")
    found = read(topic=rocketmq_topic, startingOffsets=start, endingOffsets=end)
    assert numbers(found) == [2, 6, 32, 39]


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ((1, 2, 3), "does not name topic .* queue 3"),
        ((1, 2, 3, 4, 5), "queue 4, which is not read here"),
        ((1, 2, 3, 99), "queue 3 ends at 10"),
    ],
)
def test_offsets_by_queue_must_fit(
    read: Read,
    send: Send,
    rocketmq: LocalBroker,
    rocketmq_topic: str,
    offsets: tuple[int, ...],
    said: str,
) -> None:
    send(rocketmq_topic, 40)
    start = per_queue(rocketmq, rocketmq_topic, *offsets)
    with pytest.raises(PySparkException, match=said):
        read(topic=rocketmq_topic, startingOffsets=start).count()


def test_a_group_s_offsets(
    read: Read, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 40)
    queues = [MessageQueue(rocketmq_topic, rocketmq.broker_name, number) for number in range(4)]
    group = f"g-{rocketmq_topic}"
    with PullConsumer(group, namesrv=rocketmq.namesrv) as consumer:
        consumer.commit({queues[0]: 10, queues[1]: 9})
    # Queues that the group has no offset for begin at their first message.
    started = numbers(read(topic=rocketmq_topic, group=group, startingOffsets="group"))
    assert started == sorted([37, *range(2, 40, 4), *range(3, 40, 4)])
    ended = numbers(read(topic=rocketmq_topic, group=group, endingOffsets="group"))
    assert ended == sorted([*range(0, 40, 4), *range(1, 36, 4)])


def test_times(read: Read, send: Send, rocketmq_topic: str) -> None:
    send(rocketmq_topic, 8)
    time.sleep(0.05)
    middle_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    send(rocketmq_topic, range(8, 16))
    iso = datetime.fromtimestamp(middle_ms / 1e3, UTC).isoformat()
    for text in (str(middle_ms), iso):
        assert numbers(read(topic=rocketmq_topic, startingTimestamp=text)) == list(range(8, 16))
        assert numbers(read(topic=rocketmq_topic, endingTimestamp=text)) == list(range(8))
    later = str(middle_ms + 10**9)
    assert numbers(read(topic=rocketmq_topic, startingTimestamp=later)) == []
    assert numbers(read(topic=rocketmq_topic, endingTimestamp=later)) == list(range(16))


def test_tags_are_filtered_by_the_broker_and_exactly(
    read: Read, send: Send, rocketmq_topic: str
) -> None:
    for number, tag in enumerate(("Aa", "BB", "c")):  # Aa and BB have the same hash in Java
        send(rocketmq_topic, range(number * 1000, number * 1000 + 1000), tags=tag)
    assert numbers(read(topic=rocketmq_topic, tags="Aa")) == list(range(1000))
    assert numbers(read(topic=rocketmq_topic, tags="BB || c")) == list(range(1000, 3000))
    assert numbers(read(topic=rocketmq_topic, tags="none")) == []
    # A part of the queue, of which the filter takes a part.
    part = read(topic=rocketmq_topic, tags="c", minPartitions=7)
    assert part.rdd.getNumPartitions() >= 7
    assert numbers(part) == list(range(2000, 3000))


def test_sql92_is_filtered_by_the_broker(spark: Any, tmp_path: Any) -> None:
    with (
        LocalBroker(store="memory", settings={"enablePropertyFilter": "true"}) as broker,
        Producer("p", namesrv=broker.namesrv) as producer,
    ):
        broker.create_topic("t", 2)
        for number in range(60):
            producer.send(Message("t", str(number).encode(), properties={"n": str(number)}))
        reader = spark.read.format("rocketmq").option("namesrv", broker.namesrv)
        reader = reader.option("topic", "t")
        assert numbers(reader.option("sql92", "n BETWEEN 10 AND 12").load()) == [10, 11, 12]
        with pytest.raises(PySparkException, match=r"code 23"):
            reader.option("sql92", "n BETWEEN").load().count()


def test_partitions_by_option(read: Read, send: Send, rocketmq_topic: str) -> None:
    send(rocketmq_topic, 400)
    assert read(topic=rocketmq_topic).rdd.getNumPartitions() == 1, "small ranges share one"
    wide = read(topic=rocketmq_topic, minPartitions=10)
    assert wide.rdd.getNumPartitions() >= 10
    assert numbers(wide) == list(range(400))
    short = read(topic=rocketmq_topic, maxRecordsPerPartition=30)
    sizes = [len(part) for part in short.rdd.glom().collect()]
    assert max(sizes) <= 30
    assert sum(sizes) == 400


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_a_pull_may_be_of_any_size(read: Read, send: Send, rocketmq_topic: str, count: int) -> None:
    send(rocketmq_topic, 500)
    frame = read(topic=rocketmq_topic, pullBatchSize=count)
    assert numbers(frame) == list(range(500))
    by_queue: dict[int, list[int]] = {}
    for row in frame.select("queue_id", "queue_offset").collect():
        by_queue.setdefault(row.queue_id, []).append(row.queue_offset)
    assert all(offsets == sorted(offsets) for offsets in by_queue.values()), "in order"


def test_an_empty_topic_has_no_rows(read: Read, rocketmq_topic: str) -> None:
    assert read(topic=rocketmq_topic).count() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "no-such-topic"}, "no route for topic 'no-such-topic'"),
        ({"topicPattern": "no-such-.*"}, "no topic matches"),
        ({"assign": '{"TBW102": {"no-such-broker": [0]}}'}, "no-such-broker is not registered"),
        ({"topic": "x", "topik": "y"}, "did you mean 'topic'"),
        ({"topic": "x", "maxOffsetsPerTrigger": "5"}, "is for a stream only"),
        ({"topic": "x", "namesrv": "127.0.0.1:1"}, "127.0.0.1:1"),
        ({"topic": "x", "namesrv": "nowhere"}, "is not host:port"),
    ],
)
def test_what_can_not_be_read_is_explained(read: Read, options: dict[str, str], said: str) -> None:
    with pytest.raises(PySparkException, match=said):
        read(**options).count()


def test_a_broker_that_breaks_connections_is_asked_again(
    spark: Any, read: Read, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    from cometmq.wire.codes import RequestCode, ResponseCode

    send(rocketmq_topic, 2000)
    frame = read(topic=rocketmq_topic)
    rocketmq.fail(
        RequestCode.PULL_MESSAGE, times=3, after=5, response_code=ResponseCode.SYSTEM_BUSY
    )
    assert numbers(frame) == list(range(2000))
    frame = read(topic=rocketmq_topic)
    frame.rdd.getNumPartitions()  # planned
    rocketmq.restart()
    assert numbers(frame) == list(range(2000)), "the same port, other connections"


def test_secrets_are_in_no_plan_and_no_error(
    read: Read, send: Send, rocketmq_topic: str, capsys: Any
) -> None:
    send(rocketmq_topic, 5)
    keys = {"accessKey": "AK-VERY", "secretKey": "SK-VERY", "securityToken": "ST-VERY"}
    frame = read(topic=rocketmq_topic, **keys)
    assert frame.count() == 5, "signed requests are understood"
    frame.explain(True)
    text = capsys.readouterr().out + str(frame._jdf.queryExecution().toString())
    assert "rocketmq" in text
    assert "VERY" not in text
    with pytest.raises(PySparkException) as failed:
        read(topic="no-such-topic", **keys).count()
    assert "VERY" not in str(failed.value)


def test_a_range_is_the_same_whenever_it_is_read(spark: Any) -> None:
    """Messages that are past their TTL included: a batch that is replayed must not lack rows."""
    with LocalBroker(store="memory") as broker:
        broker.create_topic("t", 1)
        with Producer("p", namesrv=broker.namesrv) as producer:
            for number in range(300):
                life = timedelta(seconds=5) if 50 <= number < 250 else None
                producer.send(Message("t", str(number).encode(), ttl=life))
        reader = spark.read.format("rocketmq").option("namesrv", broker.namesrv)
        frame = reader.option("topic", "t").option("pullBatchSize", "32").load()
        rows = frame.select("queue_offset", "body").rdd
        before = rows.collect()
        broker.move_clock(60)
        assert [int(row.body) for row in before] == list(range(300))
        assert rows.collect() == before
        with PullConsumer("g", namesrv=broker.namesrv) as consumer:
            queue = MessageQueue("t", broker.broker_name, 0)
            assert [one.body for one in consumer.pull(queue, 50).messages[:1]] == [b"250"]
