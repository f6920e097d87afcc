"""Servers that don't answer for a while: a stream that runs goes on with what it knows.

No SparkSession here: what the driver asks of servers decides it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cometmq.errors import ConnectionLost, RequestRefused, RequestTimeout
from cometmq.spark.cluster import Cluster
from cometmq.spark.source_options import SourceOptions
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode

OF_NAME_SERVERS = (
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
)


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory") as found:
        found.create_topic("t", queues=2)
        yield found
        found.clear_faults()


def cluster(broker: LocalBroker, **options: str) -> Cluster:
    given = {"namesrv": broker.namesrv, "requestTimeout": "300ms", **options}
    return Cluster(SourceOptions.parse(given))


@pytest.mark.parametrize("chosen", [{"topic": "t"}, {"topicPattern": "t.*"}])
def test_without_a_name_server_the_known_queues_go_on(
    broker: LocalBroker, chosen: dict[str, str]
) -> None:
    with cluster(broker, **chosen) as one:
        before = one.look()
        assert len(before.begins) == 2 and not before.stale
        for code in OF_NAME_SERVERS:
            broker.drop(code, times=1000)
        look = one.look(before.begins)
        assert look.begins == before.begins and look.addresses == before.addresses
        assert not look.away and not look.gone
        assert "no answer" in look.stale
        broker.clear_faults()
        broker.create_topic("t", queues=3)
        look = one.look(before.begins)
        assert len(look.begins) == 3 and not look.stale


@pytest.mark.parametrize("chosen", [{"topic": "t"}, {"topicPattern": "t.*"}])
def test_a_start_needs_a_name_server(broker: LocalBroker, chosen: dict[str, str]) -> None:
    for code in OF_NAME_SERVERS:
        broker.drop(code, times=1000)
    with cluster(broker, **chosen) as one, pytest.raises((ConnectionLost, RequestTimeout)):
        one.look([])


def test_a_broker_that_is_busy_is_away_and_one_that_refuses_is_an_error(
    broker: LocalBroker,
) -> None:
    with cluster(broker, topic="t") as one:
        before = one.look()
        code = RequestCode.GET_MAX_OFFSET
        broker.fail(code, times=2, response_code=ResponseCode.SYSTEM_BUSY, remark="too much")
        look = one.look(before.begins)
        assert not look.begins and set(look.away) == set(before.begins)
        assert "too much" in next(iter(look.away.values()))
        assert one.look(before.begins).begins == before.begins
        broker.fail(code, times=2, response_code=ResponseCode.NO_PERMISSION, remark="not you")
        with pytest.raises(RequestRefused, match="not you"):
            one.look(before.begins)
