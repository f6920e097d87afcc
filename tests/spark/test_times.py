"""A time becomes an offset, exactly, however near a broker's own answer comes.

No SparkSession here. Apache RocketMQ 4.9 answers with the nearest message, with any of several of
the same millisecond, or with the last one; CometMQ's broker stands in, and the answers are made up.
"""

from __future__ import annotations

import time

from cometmq import Message, MessageQueue, Producer
from cometmq.spark.cluster import Cluster
from cometmq.spark.source_options import SourceOptions
from cometmq.testing.local import LocalBroker

IN_ONE, BATCHES = 50, 6
COUNT = IN_ONE * BATCHES


def test_the_first_message_of_a_time_is_found_from_any_answer_near_it(
    rocketmq: LocalBroker, rocketmq_topic: str
) -> None:
    queue = MessageQueue(rocketmq_topic, rocketmq.broker_name, 0)
    with Producer("p", namesrv=rocketmq.namesrv) as producer:
        for _ in range(BATCHES):  # the messages of a batch have one time
            producer.send_batch([Message(rocketmq_topic, b"x")] * IN_ONE, queue=queue)
            time.sleep(0.004)
    options = {"namesrv": rocketmq.namesrv, "topic": rocketmq_topic}
    with Cluster(SourceOptions.parse(options)) as cluster:
        look = cluster.look()
        stored = dict(cluster._run(lambda _, reader: cluster._stored(reader, queue, 0, COUNT)))
        assert sorted(stored) == list(range(COUNT))
        stamps = sorted(set(stored.values()))
        assert len(stamps) == BATCHES
        for stamp in [stamps[0] - 1, *stamps, stamps[2] + 1, stamps[-1] + 1]:
            first = min((at for at, ms in stored.items() if ms >= stamp), default=COUNT)
            for answer in {0, COUNT - 1, COUNT, *range(first - 2, first + 3), first + IN_ONE - 1}:
                at = min(max(answer, 0), COUNT)
                found = cluster._run(
                    lambda _, reader, at=at, stamp=stamp: cluster._exactly(
                        reader, queue, at, stamp, look
                    )
                )
                assert found == first, f"{stamp - stamps[0]} ms, answered with {at}"
