"""One JVM for all tests of the connector, and brokers to read from.

Owns: the fixtures. One rule: the SparkSession is started once a run (it takes seconds), on two
cores, and every test has topics and checkpoints of its own.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from streams import WAIT_S, Stream  # noqa: E402

from cometmq import Message, MessageQueue, Producer  # noqa: E402
from cometmq.testing.local import LocalBroker  # noqa: E402
from programs import Program  # noqa: E402 - found by the line above, as those below

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = str(Path(__file__).parents[2] / "src")

Send = Callable[..., None]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    import cometmq.spark

    # Workers must run this tree, whatever else is installed.
    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PySpark's own start
        found = cometmq.spark.session(
            "cometmq-tests",
            master="local[2]",
            settings={"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"},
        )
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def read(spark: SparkSession, rocketmq: LocalBroker) -> Callable[..., Any]:
    """A batch read of the session's broker: read(topic="x", startingOffsets="earliest")."""

    def go(schema: str | None = None, **options: object) -> Any:
        reader = spark.read.format("rocketmq").option("namesrv", rocketmq.namesrv)
        if schema is not None:
            reader = reader.schema(schema)
        for key, value in options.items():
            reader = reader.option(key, str(value))
        return reader.load()

    return go


@pytest.fixture
def stream(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> Stream:
    return Stream(spark, rocketmq.namesrv, tmp_path / "checkpoint")


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Start `cometmq ARGS`; all of them are gone after the test."""
    running: list[Program] = []

    def begin(*arguments: str) -> Program:
        running.append(Program(*arguments))
        return running[-1]

    yield begin
    for program in running:
        program.close()


@pytest.fixture
def send(rocketmq: LocalBroker) -> Iterator[Send]:
    """send(topic, n): messages `0` to `n-1`, in turn to all queues; keywords go to Message."""
    with Producer("spark-tests", namesrv=rocketmq.namesrv) as producer:
        yield lambda topic, bodies, **more: send_all(
            producer, rocketmq.broker_name, topic, bodies, **more
        )


def send_all(
    producer: Producer,
    broker: str,
    topic: str,
    bodies: range | int,
    *,
    queues: int = 4,
    queue: int | None = None,
    **more: Any,
) -> None:
    wanted = range(bodies) if isinstance(bodies, int) else bodies
    sent = []
    for number in wanted:
        where = MessageQueue(topic, broker, number % queues if queue is None else queue)
        message = Message(topic, str(number).encode(), **more)
        sent.append(producer.send_async(message, queue=where))
    for one in sent:
        one.result(WAIT_S)


def send_numbers(broker: LocalBroker, topic: str, count: int, *, queues: int) -> None:
    """`0` to `count - 1`, in turn to the queues, by requests of many: quick, and patient."""
    with Producer("spark-tests", namesrv=broker.namesrv, send_timeout_ms=60_000) as producer:
        for queue in range(queues):
            messages = [
                Message(topic, str(n).encode(), tags="t") for n in range(queue, count, queues)
            ]
            where = MessageQueue(topic, broker.broker_name, queue)
            for begin in range(0, len(messages), 500):
                producer.send_batch(messages[begin : begin + 500], queue=where)
