"""Which topics and queues a query reads: by pattern, and after its options were changed.

No SparkSession here: what the driver asks of a broker decides it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cometmq import Admin, MessageQueue
from cometmq.spark.cluster import Cluster
from cometmq.spark.source_options import SourceOptions
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory", settings={"brokerName": "one"}) as found:
        for topic in ("pa", "pb", "%DLQ%g", "%RETRY%g"):
            found.create_topic(topic, queues=2)
        yield found


def cluster(broker: LocalBroker, **options: str) -> Cluster:
    return Cluster(SourceOptions.parse({"namesrv": broker.namesrv, **options}))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (".*", {"pa", "pb"}),
        ("%DLQ%.*", {"%DLQ%g"}),
        ("^%DLQ%.*", {"%DLQ%g"}),
        ("(%DLQ%|%RETRY%)g", {"%DLQ%g", "%RETRY%g"}),
        ("%?.*", {"pa", "pb", "%DLQ%g", "%RETRY%g"}),
    ],
)
def test_a_pattern_sees_hidden_topics_if_it_names_their_sign_and_never_the_system_s(
    broker: LocalBroker, pattern: str, found: set[str]
) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        assert "SCHEDULE_TOPIC_XXXX" in admin.topics(with_system=True)
    with cluster(broker, topicPattern=pattern) as one:
        assert {queue.topic for queue in one.look().begins} == found


@pytest.mark.parametrize(
    "changed",
    [
        {"topic": "pb"},
        {"topicPattern": "pb.*"},
        {"assign": json.dumps({"pa": {"one": [1]}})},
    ],
)
def test_a_queue_that_the_options_choose_no_more_is_given_up_by_that_reason(
    broker: LocalBroker, changed: dict[str, str]
) -> None:
    queue = MessageQueue("pa", "one", 0)
    with cluster(broker, **changed) as one:
        look = one.look([queue])
    assert queue not in look.begins
    assert "topicPattern or assign do not choose it any more" in look.gone[queue]


def test_a_broker_that_does_not_tell_its_system_topics_stops_no_pattern(
    broker: LocalBroker,
) -> None:
    with cluster(broker, topicPattern=".*", requestTimeout="300ms") as one:
        before = one.look().begins
        broker.drop(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
        assert one.look(before).begins == before
    broker.clear_faults()
