"""Streams: what each micro-batch covers, over restarts, with limits, with queues that appear."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from streams import WAIT_S, Stream

from cometmq import Admin, Message, MessageQueue, Producer, PullConsumer
from cometmq.client.remote import Remote
from cometmq.spark import LagListener
from cometmq.testing.local import LocalBroker
from programs import send as send_frame
from programs import write_conf

Send = Callable[..., None]


def test_run_after_run_reads_what_is_new(stream: Stream, send: Send, rocketmq_topic: str) -> None:
    options = {"topic": rocketmq_topic, "startingOffsets": "earliest"}
    send(rocketmq_topic, 100)
    assert stream.run(**options) == list(range(100))
    assert stream.run(**options) == []
    send(rocketmq_topic, range(100, 130))
    assert stream.run(**options) == list(range(100, 130))


def test_a_limit_of_offsets_cuts_batches(stream: Stream, send: Send, rocketmq_topic: str) -> None:
    send(rocketmq_topic, 100)
    stream.run(topic=rocketmq_topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    assert [len(rows) for rows in stream.batches.values()] == [30, 30, 30, 10]
    assert stream.all() == list(range(100))


def test_a_limit_of_bytes_cuts_batches(stream: Stream, send: Send, rocketmq_topic: str) -> None:
    send(rocketmq_topic, 200, properties={"x": "y" * 800})  # about 1 KiB each
    stream.run(topic=rocketmq_topic, startingOffsets="earliest", maxBytesPerTrigger="50k")
    assert stream.all() == list(range(200))
    sizes = [len(rows) for rows in stream.batches.values()]
    assert 3 <= len(sizes) <= 7
    assert max(sizes) <= 70


def test_latest_begins_at_the_end_of_when_it_was_started(
    stream: Stream, send: Send, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 20)
    assert stream.run(topic=rocketmq_topic) == []
    send(rocketmq_topic, range(20, 40))
    assert stream.run(topic=rocketmq_topic) == list(range(20, 40))


def test_the_first_batch_replayed_begins_where_it_began(
    stream: Stream, send: Send, rocketmq_topic: str
) -> None:
    """It failed, more came, it is replayed: with `latest` resolved anew it would lose messages."""
    send(rocketmq_topic, 20)
    query = stream.start(now=False, topic=rocketmq_topic)
    deadline = time.monotonic() + WAIT_S
    while 0 not in stream.batches:  # "latest" is resolved and in the checkpoint
        assert time.monotonic() < deadline
        time.sleep(0.05)
    query.stop()
    for name in ("commits/0", "commits/.0.crc"):
        (stream.checkpoint / name).unlink(missing_ok=True)  # as if it had been killed before
    stream.batches.clear()
    send(rocketmq_topic, range(20, 40))
    assert stream.run(topic=rocketmq_topic) == list(range(20, 40))


def test_a_failed_batch_is_read_again_as_it_was(
    stream: Stream, send: Send, rocketmq_topic: str
) -> None:
    options = {"topic": rocketmq_topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 25}
    send(rocketmq_topic, 100)
    stream.fails_in_batch = 2
    query = stream.start(**options)
    with pytest.raises(PySparkException, match="failed on purpose"):
        query.awaitTermination(WAIT_S)
    assert sorted(stream.batches) == [0, 1]
    stream.fails_in_batch = None
    send(rocketmq_topic, range(100, 150))
    stream.run(**options)
    assert [len(stream.batches[number]) for number in range(6)] == [25, 25, 25, 25, 25, 25]
    assert stream.all() == list(range(150)), "none lost, none twice"


def test_a_running_stream_takes_up_new_queues_and_topics(
    stream: Stream, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 40)
    query = stream.start(now=False, topicPattern=f"{rocketmq_topic}.*", startingOffsets="earliest")
    try:
        stream.wait_for(query, list(range(40)))
        rocketmq.create_topic(rocketmq_topic, queues=7)  # three more
        send(rocketmq_topic, range(40, 110), queues=7)
        stream.wait_for(query, list(range(110)))
        rocketmq.create_topic(f"{rocketmq_topic}-late", queues=2)
        send(f"{rocketmq_topic}-late", range(110, 150), queues=2)
        stream.wait_for(query, list(range(150)))
    finally:
        query.stop()
    send(rocketmq_topic, range(150, 160), queues=7)
    assert stream.run(topicPattern=f"{rocketmq_topic}.*") == list(range(150, 160))


def test_queues_that_came_while_it_was_stopped_are_read_from_their_beginning(
    stream: Stream, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    assert stream.run(topic=rocketmq_topic) == []  # "latest"
    rocketmq.create_topic(rocketmq_topic, queues=6)
    send(rocketmq_topic, 60, queues=6)
    assert stream.run(topic=rocketmq_topic) == list(range(60))


def test_a_broker_joins_and_goes_away_during_a_stream(
    spark: Any, tmp_path: Path, start: Callable[..., Any]
) -> None:
    with (
        LocalBroker(store="memory", settings={"brokerName": "one"}) as one,
        Producer("p", namesrv=one.namesrv) as producer,
        Admin(namesrv=one.namesrv) as admin,
    ):
        one.create_topic("t", 2)
        stream = Stream(spark, one.namesrv, tmp_path / "checkpoint")
        for number in range(20):
            producer.send(Message("t", str(number).encode()))
        query = stream.start(now=False, topic="t", startingOffsets="earliest")
        try:
            stream.wait_for(query, list(range(20)))
            two = start(
                "broker",
                *("--namesrv", one.namesrv, "--port", "0", "--store", str(tmp_path / "two")),
                *("--conf", write_conf(tmp_path / "two.conf", {"brokerName": "two"})),
            ).ready()
            admin.create_topic("t", 2, brokers="two")
            with Remote(two.broker) as remote:
                for number in range(20, 60):
                    send_frame(remote, "t", str(number).encode(), queue_id=number % 2)
            stream.wait_for(query, list(range(60)))
            assert two.stop() == 0
            # It is away now; what the other has goes on.
            queue = MessageQueue("t", "one", 0)
            for number in range(60, 70):
                producer.send(Message("t", str(number).encode()), queue=queue)
            stream.wait_for(query, list(range(70)))
        finally:
            query.stop()


def test_the_group_s_offsets_follow_and_tools_see_the_lag(
    stream: Stream, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    group = f"g-{rocketmq_topic}"
    options = {
        "topic": rocketmq_topic,
        "startingOffsets": "earliest",
        "group": group,
        "commitOffsetsToGroup": "true",
        "maxOffsetsPerTrigger": 30,
    }
    send(rocketmq_topic, 100)
    stream.run(**options)
    queues = [MessageQueue(rocketmq_topic, rocketmq.broker_name, number) for number in range(4)]
    with PullConsumer(group, namesrv=rocketmq.namesrv) as consumer:
        assert [consumer.committed(queue) for queue in queues] == [25] * 4, "the last batch too"
    send(rocketmq_topic, 40)
    with Admin(namesrv=rocketmq.namesrv) as admin:
        progress = admin.consumer_progress(group, rocketmq_topic)
    assert progress.lag == 40
    # A stream may begin where a group is, be it Spark's or anybody's.
    other = Stream(stream.spark, stream.namesrv, stream.checkpoint.with_name("other"))
    assert len(other.run(topic=rocketmq_topic, group=group, startingOffsets="group")) == 40


def test_without_being_asked_nothing_is_committed(
    stream: Stream, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 10)
    group = f"g-{rocketmq_topic}"
    stream.run(topic=rocketmq_topic, startingOffsets="earliest", group=group)
    queue = MessageQueue(rocketmq_topic, rocketmq.broker_name, 0)
    with PullConsumer(group, namesrv=rocketmq.namesrv) as consumer:
        assert consumer.committed(queue) is None


def test_a_listener_tells_the_lag_by_queue(
    stream: Stream, send: Send, rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    told: list[Any] = []
    listener = LagListener(told.append)
    stream.spark.streams.addListener(listener)
    try:
        send(rocketmq_topic, 100)
        query = stream.start(
            topic=rocketmq_topic, startingOffsets="earliest", maxOffsetsPerTrigger=40
        )
        query.awaitTermination(WAIT_S)
        ends = time.monotonic() + WAIT_S
        while len(told) < 3 and time.monotonic() < ends:  # it hears of it a little later
            time.sleep(0.05)
    finally:
        stream.spark.streams.removeListener(listener)
    assert [one.total for one in told] == [60, 20, 0]
    assert [one.rows for one in told] == [40, 40, 20]
    queue = MessageQueue(rocketmq_topic, rocketmq.broker_name, 3)
    assert told[0].by_queue[queue] == 15
    assert listener.lag(query.id)[queue] == 0


def test_a_minimum_waits_but_not_for_ever(stream: Stream, send: Send, rocketmq_topic: str) -> None:
    send(rocketmq_topic, 5)
    query = stream.start(
        now=False,
        topic=rocketmq_topic,
        startingOffsets="earliest",
        minOffsetsPerTrigger=50,
        maxTriggerDelay="8s",
    )
    try:
        stream.wait_for(query, list(range(5)))  # the first does not wait
        sent_at = time.monotonic()
        send(rocketmq_topic, range(5, 10))
        stream.wait_for(query, list(range(10)))
        assert time.monotonic() - sent_at > 1.5
        assert len([rows for rows in stream.batches.values() if rows]) == 2
        send(rocketmq_topic, range(10, 70))
        stream.wait_for(query, list(range(70)))
    finally:
        query.stop()


def test_available_now_ends_although_more_comes_than_it_waits_for(
    stream: Stream, send: Send, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 5)
    options = {"topic": rocketmq_topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 50}
    assert stream.run(**options) == list(range(5))


def test_filters_in_a_stream(stream: Stream, send: Send, rocketmq_topic: str) -> None:
    options = {"topic": rocketmq_topic, "startingOffsets": "earliest", "tags": "yes"}
    send(rocketmq_topic, 50, tags="no")
    assert stream.run(**options) == []
    send(rocketmq_topic, range(50, 60), tags="yes")
    send(rocketmq_topic, range(60, 90), tags="no")
    assert stream.run(**options) == list(range(50, 60))
    last = max((stream.checkpoint / "offsets").glob("[0-9]*"), key=lambda one: int(one.name))
    offset = json.loads(last.read_text().splitlines()[-1])
    ends = offset["q"][rocketmq_topic]
    assert sum(sum(queues.values()) for queues in ends.values()) == 90, "past what was filtered"


def test_a_start_by_time_is_resolved_once(stream: Stream, send: Send, rocketmq_topic: str) -> None:
    send(rocketmq_topic, 8)
    time.sleep(0.05)
    middle_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    send(rocketmq_topic, range(8, 16))
    assert stream.run(topic=rocketmq_topic, startingTimestamp=middle_ms) == list(range(8, 16))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "no-such-topic"}, "no route for topic 'no-such-topic'"),
        ({"topic": "x", "endingOffsets": "latest"}, "is for a batch read only"),
        ({"topic": "x", "maxOffsetPerTrigger": "1"}, "did you mean 'maxOffsetsPerTrigger'"),
    ],
)
def test_what_can_not_be_streamed_is_explained(
    stream: Stream, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException, match=said) as caught:
        stream.start(**options).awaitTermination(WAIT_S)
    assert "UnboundLocalError" not in str(caught.value)


def test_mistakes_beside_a_schema_of_ones_own_are_explained_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    reader = spark.readStream.format("rocketmq").schema("body BINARY")
    reader = reader.options(namesrv="127.0.0.1:1", topic="x", startingOfsets="earliest")
    writer = reader.load().writeStream.format("noop")
    with pytest.raises(PySparkException, match="did you mean 'startingOffsets'") as caught:
        query = writer.option("checkpointLocation", str(tmp_path)).start()
        query.awaitTermination(WAIT_S)
    assert "UnboundLocalError" not in str(caught.value)


def test_another_source_s_checkpoint_is_refused(
    stream: Stream, send: Send, rocketmq_topic: str
) -> None:
    send(rocketmq_topic, 5)
    stream.run(topic=rocketmq_topic, startingOffsets="earliest")
    for path in (stream.checkpoint / "offsets").glob("[0-9]*"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:-1], '{"kafka": {"0": 5}}']))
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    with pytest.raises(PySparkException, match="not one of the rocketmq source"):
        stream.run(topic=rocketmq_topic)
