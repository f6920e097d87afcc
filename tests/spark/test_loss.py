"""Messages that go away before they are read: it fails and says which, or goes on and counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from streams import WAIT_S, Stream

from cometmq import Admin, Message, MessageQueue, Producer
from cometmq.client.remote import Remote
from cometmq.spark.plan import Range
from cometmq.spark.read import PartitionReader
from cometmq.spark.source_options import SourceOptions
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode

SMALL_LOG = {"mappedFileSizeCommitLog": "65536", "maxMessageSize": "16384"}


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory", settings=SMALL_LOG) as found:
        found.create_topic("t", 2)
        yield found


@pytest.fixture
def stream(spark: Any, broker: LocalBroker, tmp_path: Path) -> Stream:
    return Stream(spark, broker.namesrv, tmp_path / "checkpoint")


def fill(broker: LocalBroker, numbers: range) -> None:
    with Producer("p", namesrv=broker.namesrv) as producer:
        for number in numbers:
            queue = MessageQueue("t", broker.broker_name, number % 2)
            producer.send(
                Message("t", str(number).encode(), properties={"x": "y" * 1000}), queue=queue
            )


def expire(broker: LocalBroker) -> None:
    """The first files of the log go; more of them may go a little later."""
    broker.move_clock(100 * 3600)
    least, ends = 0, time.monotonic() + WAIT_S
    with Remote(broker.broker_address) as remote:
        where = {"topic": "t", "queueId": "0"}
        while not least > 100:  # what is not flushed yet does not go
            assert time.monotonic() < ends
            remote.call(RequestCode.TRIGGER_DELETE_FILES)
            least = int(remote.call(RequestCode.GET_MIN_OFFSET, where).ext["offset"])
            time.sleep(0.1)


def test_retention_that_overtakes_a_stream_fails_it_by_name(
    stream: Stream, broker: LocalBroker
) -> None:
    fill(broker, range(20))
    assert stream.run(topic="t", startingOffsets="earliest") == list(range(20))
    fill(broker, range(20, 300))
    expire(broker)
    said = r"topic 't' broker broker-a queue 0 from offset 10 to 1\d\d are lost"
    with pytest.raises(PySparkException, match=said):
        stream.run(topic="t")
    # Nothing was skipped silently by having tried: it fails again.
    with pytest.raises(PySparkException, match="failOnDataLoss=false"):
        stream.run(topic="t")


def test_or_it_goes_on_with_a_count(stream: Stream, broker: LocalBroker) -> None:
    from cometmq.spark import LagListener

    listener = LagListener()
    fill(broker, range(20))
    stream.run(topic="t", startingOffsets="earliest")
    fill(broker, range(20, 300))
    expire(broker)
    stream.spark.streams.addListener(listener)
    try:
        query = stream.start(topic="t", failOnDataLoss="false")
        assert query.awaitTermination(WAIT_S)
    finally:
        stream.spark.streams.removeListener(listener)
    left = stream.all()[20:]
    evens, odds = [n for n in left if n % 2 == 0], [n for n in left if n % 2]
    assert evens == list(range(evens[0], 300, 2))
    assert odds == list(range(odds[0], 300, 2))
    lost = 300 - 20 - len(left)
    assert lost > 150
    assert f'"lost": {lost}' in str(query.lastProgress.sources[0].endOffset)
    fill(broker, range(300, 310))
    assert stream.run(topic="t") == list(range(300, 310)), "it is told once"


def test_a_batch_of_offsets_that_are_gone(spark: Any, broker: LocalBroker) -> None:
    fill(broker, range(300))
    expire(broker)
    start = '{"t": {"broker-a": {"0": 0, "1": "latest"}}}'
    reader = spark.read.format("rocketmq").option("namesrv", broker.namesrv).option("topic", "t")
    reader = reader.option("startingOffsets", start)
    with pytest.raises(PySparkException, match=r"queue 0 from offset 0 to 1\d\d are lost"):
        reader.load().count()
    found = reader.option("failOnDataLoss", "false").load().select("queue_offset").collect()
    offsets = [row.queue_offset for row in found]
    assert offsets == list(range(150 - len(offsets), 150))
    assert 0 < len(offsets) < 50


def test_files_that_go_between_plan_and_read(
    spark: Any, broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    fill(broker, range(300))
    reader = spark.read.format("rocketmq").option("namesrv", broker.namesrv).option("topic", "t")
    strict, lenient = reader.load(), reader.option("failOnDataLoss", "false").load()
    for frame in (strict, lenient):
        assert frame.rdd.getNumPartitions() == 1  # planned now
    strict_rows, lenient_rows = strict.rdd, lenient.rdd
    expire(broker)
    with pytest.raises(Exception, match=r"from offset 0 to .* are lost: the queue begins at"):
        strict_rows.count()
    found = sorted(int(row.body) for row in lenient_rows.collect())
    assert found[-1] == 299
    assert 0 < len(found) < 300


def test_a_topic_made_anew_is_noticed(stream: Stream, broker: LocalBroker) -> None:
    fill(broker, range(40))
    stream.run(topic="t", startingOffsets="earliest")
    with LocalBroker(store="memory") as anew:  # the same broker by name, with an empty disk
        anew.create_topic("t", 2)
        fill(anew, range(40, 50))
        stream.namesrv = anew.namesrv
        said = "queue 0 from offset 5 to 19 are lost: the queue ends at 5 now"
        with pytest.raises(PySparkException, match=said):
            stream.run(topic="t")
        assert stream.run(topic="t", failOnDataLoss="false") == list(range(40, 50))


def test_a_topic_that_is_gone_may_be_let_go(stream: Stream, broker: LocalBroker) -> None:
    broker.create_topic("other", 1)
    fill(broker, range(10))
    stream.run(topic="t,other", startingOffsets="earliest")
    with Admin(namesrv=broker.namesrv) as admin:
        admin.delete_topic("other")
    with pytest.raises(PySparkException, match=r"topic 'other' .*the topic does not exist"):
        stream.run(topic="t,other")
    fill(broker, range(10, 20))
    assert stream.run(topic="t,other", failOnDataLoss="false") == list(range(10, 20))


def test_a_queue_that_ends_before_the_plan_says_so(
    broker: LocalBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor is told to read what the broker does not have: no silence, no endless loop."""
    monkeypatch.setattr("cometmq.spark.read.STUCK_S", 0.5)
    import pyarrow as pa

    fill(broker, range(20))
    wanted = [Range("t", broker.broker_name, 0, 5, 50, broker.broker_address)]
    options = {"namesrv": broker.namesrv, "topic": "t", "failOnDataLoss": "false"}
    schema = pa.schema([("queue_offset", pa.int64())])
    with caplog.at_level(logging.WARNING, "cometmq.spark"):
        reader = PartitionReader(SourceOptions.parse(options), schema)
        rows = [one for batch in reader.read(wanted) for one in batch.to_pylist()]
    assert [row["queue_offset"] for row in rows] == list(range(5, 10))
    assert [line for line in caplog.messages if "data_lost count=40" in line]
