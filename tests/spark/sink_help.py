"""What the tests of the sink share: its options, and a task without Spark around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from cometmq.message import MessageQueue
from cometmq.spark.sink_bad import BadFile
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.sink_send import Request, TaskSender, Totals
from cometmq.spark.sink_task import Identity, Task


def options(namesrv: str = "127.0.0.1:1", **more: Any) -> SinkOptions:
    """Checked options; names as in the documentation."""
    given = {"namesrv": namesrv, "topic": "t"} | more
    return SinkOptions.read({key: str(value) for key, value in given.items()})


def run_task(
    chosen: SinkOptions,
    batches: Iterable[pa.RecordBatch],
    *,
    batch: int = 0,
    partition: int = 0,
    attempt: int = 0,
    writer: str = "query",
) -> tuple[Totals, BadFile | None, int]:
    identity = Identity(writer, batch, partition, attempt)
    return Task(chosen, [], identity, TaskSender.open(chosen)).write(batches)


class Recorder(TaskSender):
    """Takes requests and sends none."""

    def __init__(self, queues: Sequence[MessageQueue]) -> None:
        self.requests: list[Request] = []
        self.gave_up = False
        self._known = tuple(queues)

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return tuple(MessageQueue(topic, one.broker, one.queue_id) for one in self._known)

    def put(self, requests: list[Request]) -> None:
        self.requests += requests

    def finish(self) -> Totals:
        return Totals()

    def give_up(self) -> None:
        self.gave_up = True
