"""A micro-batch that is read again: the same partitions with the same rows in the same order.

That is what exactly-once of any sink is built on. Called as Spark does it, without a session.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import send_numbers

from cometmq.spark.plan import Range
from cometmq.spark.source import RocketMQDataSource
from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode

Cut = list[list[tuple[str, int, int, int]]]
PULL = RequestCode.PULL_MESSAGE


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        running.create_topic("t", 4)
        fill(running, 6000)
        yield running


def fill(broker: LocalBroker, count: int) -> None:
    send_numbers(broker, "t", count, queues=4)


def reader(broker: LocalBroker, **more: str) -> Any:
    """One of a driver that has just started."""
    options = {
        "namesrv": broker.namesrv,
        "topic": "t",
        "startingOffsets": "earliest",
        "minPartitions": "3",
        "maxRecordsPerPartition": "1300",
        "requestTimeout": "2s",
    }
    source = RocketMQDataSource(options | more)
    return source.streamReader(source.schema())


def ranges_of(partitions: Any) -> list[list[Range]]:
    return [list(one.ranges) for one in partitions]


def cut(partitions: Any) -> Cut:
    return [
        [(one.broker, one.queue_id, one.begin, one.end) for one in part]
        for part in ranges_of(partitions)
    ]


def rows_of(stream: Any, partitions: Any) -> list[list[tuple[Any, ...]]]:
    return [
        [
            (row["broker"], row["queue_id"], row["queue_offset"], row["body"], row["msg_id"])
            for batch in stream.read(one)
            for row in batch.to_pylist()
        ]
        for one in partitions
    ]


def kept(offset: dict[str, Any]) -> dict[str, Any]:
    """As the checkpoint keeps it."""
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found


def test_the_plan_depends_on_the_two_offsets_alone(broker: LocalBroker) -> None:
    first = reader(broker)
    begin = first.initialOffset()
    end = first.latestOffset(begin, first.getDefaultReadLimit())
    planned = cut(first.partitions(begin, end))
    assert len(planned) >= 5
    begin, end = kept(begin), kept(end)
    fill(broker, 2000)
    broker.create_topic("t", 7)
    assert cut(first.partitions(begin, end)) == planned
    assert cut(reader(broker).partitions(begin, end)) == planned, "another driver"
    ahead = reader(broker)
    ahead.latestOffset(begin, ahead.getDefaultReadLimit())
    assert cut(ahead.partitions(begin, end)) == planned, "one that has looked already"
    broker.stop()
    assert cut(reader(broker).partitions(begin, end)) == planned, "nobody answers"


def test_the_rows_are_the_same_in_the_same_order_whatever_happens(broker: LocalBroker) -> None:
    stream = reader(broker)
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, stream.getDefaultReadLimit())
    partitions = stream.partitions(begin, end)
    expected = rows_of(stream, partitions)
    assert sum(map(len, expected)) == 6000
    for part, ranges in zip(expected, ranges_of(partitions), strict=True):
        wanted = [(one.queue_id, at) for one in ranges for at in range(one.begin, one.end)]
        assert [(row[1], row[2]) for row in part] == wanted

    for size in ("1", "7", "1000"):
        other = reader(broker, pullBatchSize=size)
        assert rows_of(other, other.partitions(begin, end)) == expected, size

    broker.fail(PULL, response_code=ResponseCode.SYSTEM_BUSY, times=5, after=3)
    assert rows_of(stream, partitions) == expected
    broker.drop(PULL, times=1, after=2)
    assert rows_of(stream, partitions) == expected

    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            broker.cut_connections()
            time.sleep(0.02)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        assert rows_of(reader(broker, pullBatchSize="50"), partitions) == expected
    finally:
        is_over.set()
        disturber.join()
    broker.restart(kill=True)
    assert rows_of(stream, partitions) == expected
