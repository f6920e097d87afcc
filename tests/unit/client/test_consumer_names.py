"""What consumers and admins say of themselves, and which groups they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import cometmq
from cometmq import aio
from cometmq.errors import UsageError
from cometmq.testing.local import LocalBroker

NOWHERE = "127.0.0.1:1"
CONSUMERS: list[Any] = [
    getattr(face, name)
    for face in (cometmq, aio)
    for name in ("Consumer", "PullConsumer", "SimpleConsumer")
]


@pytest.mark.parametrize("kind", CONSUMERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
@pytest.mark.parametrize(
    "group, why",
    [
        ("", "not empty"),
        (None, "not empty"),
        ("a b", "only letters, digits"),
        ("gr\u00fcn", "only letters, digits"),
        ("g" * 256, "has 256 characters; at most 255"),
        ("DEFAULT_CONSUMER", "the system's own"),
    ],
)
def test_a_group_that_brokers_refuse_is_refused_at_once(kind: Any, group: Any, why: str) -> None:
    with pytest.raises(UsageError, match=f"consumer group.*{why}"):
        kind(group, namesrv=NOWHERE)


@pytest.mark.parametrize("kind", CONSUMERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_what_java_allows_is_allowed(kind: Any) -> None:
    for group in ("g" * 255, "a%b|c_d-e", "\u0041"):
        kind(group, namesrv=NOWHERE)
    with pytest.raises(UsageError, match="at most 250"):
        kind("g" * 251, namesrv=NOWHERE, namespace="test")


def test_they_tell_their_state() -> None:
    async def work(broker: LocalBroker) -> None:
        at = broker.namesrv
        simple = aio.SimpleConsumer("billing", "orders", namesrv=at, namespace="test")
        assert repr(simple) == f"<SimpleConsumer billing topics=orders not started {at}>"
        async with simple:
            assert repr(simple) == f"<SimpleConsumer billing topics=orders running {at}>"
        assert repr(simple) == f"<SimpleConsumer billing topics=orders closed {at}>"

        pulling = aio.PullConsumer("billing", namesrv=at)
        assert repr(pulling) == f"<PullConsumer billing topics= queues=0 not started {at}>"
        pulling.subscribe("orders")
        async with pulling:
            assert repr(pulling) == f"<PullConsumer billing topics=orders queues=2 running {at}>"
        async with aio.PullConsumer("billing", namesrv=at) as by_hand:
            await by_hand.assign((await by_hand.queues("orders"))[:1])
            assert repr(by_hand) == f"<PullConsumer billing topics=orders assigned=1 running {at}>"

        admin = aio.Admin(at, namespace="test")
        assert repr(admin) == f"<Admin not started namespace=test {at}>"
        async with admin:
            assert repr(admin) == f"<Admin running namespace=test {at}>"
        assert repr(aio.Admin(at)) == f"<Admin not started {at}>"

    with LocalBroker(store="memory") as broker:
        broker.create_topic("orders", queues=2)
        asyncio.run(work(broker))
        at = broker.namesrv
        for client, text in (
            (
                cometmq.PullConsumer("g", namesrv=at),
                f"PullConsumer g topics= queues=0 not started {at}",
            ),
            (
                cometmq.SimpleConsumer("g", "t", namesrv=at),
                f"SimpleConsumer g topics=t not started {at}",
            ),
            (cometmq.Admin(at), f"Admin not started {at}"),
        ):
            assert repr(client) == f"<blocking {text}>"
