"""What the tests of pipelines share: topics to read from, and pipelines as processes that die."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cometmq import Message, MessageQueue, Producer
from cometmq.client.received import ReceivedMessage
from cometmq.testing.local import LocalBroker
from spark_programs import WAIT_S, SparkProgram


def send(
    broker: LocalBroker,
    topic: str,
    numbers: range,
    *,
    queues: int = 4,
    body: Callable[[int], bytes] = lambda n: str(n).encode(),
    pause_s: float = 0.0,
    **more: Callable[[int], Any],
) -> None:
    """Messages in turn to all queues of a topic, in order; `more`: fields of the message."""
    broker.create_topic(topic, queues=queues)
    with Producer("pipes", namesrv=broker.namesrv) as producer:
        waiting = []
        for n in numbers:
            fields = {name: make(n) for name, make in more.items()}
            where = MessageQueue(topic, broker.broker_name, n % queues)
            waiting.append(producer.send_async(Message(topic, body(n), **fields), queue=where))
            if pause_s:
                time.sleep(pause_s)
        for one in waiting:
            one.result(WAIT_S)


def by_queue(messages: list[ReceivedMessage]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for one in messages:
        found[one.queue_id].append(int(one.body))
    return dict(found)


class Pipeline(SparkProgram):
    """`cometmq pipeline run ...`."""

    def __init__(self, log: Path, name: str, **settings: object) -> None:
        words = [f"--set={key}={value}" for key, value in settings.items()]
        run = ("-m", "cometmq", "pipeline", "run", name, "--master", "local[2]", *words)
        super().__init__(run, log)


@contextlib.contextmanager
def running(log: Path, name: str, **settings: object) -> Iterator[Pipeline]:
    made = Pipeline(log, name, **settings)
    try:
        yield made
    finally:
        made.close()
