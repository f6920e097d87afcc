"""Random traffic in small slices: whatever comes in which order, the tables agree."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cometmq.nameserver import slices
from cometmq.nameserver.routes import Routes
from cometmq.wire.bodies import DataVersion, TopicConfig
from cometmq.wire.codes import RequestCode


def check(routes: Routes, conns: set[int]) -> None:
    """Every table says the same as every other."""
    for topic, table in routes.topics.items():
        assert table
        assert all(topic in routes.brokers[name].topics for name in table)
    for name, broker in routes.brokers.items():
        assert broker.addresses
        assert name in routes.clusters[broker.cluster]
        assert all(name in routes.topics[topic] for topic in broker.topics)
        assert len(set(broker.addresses.values())) == len(broker.addresses)
        for address in broker.addresses.values():
            assert routes.members[(broker.cluster, address)].name == name
    for key, member in routes.members.items():
        assert key[1] in routes.brokers[member.name].addresses.values()
        assert key in routes.keys_of(member.conn)
        assert member.conn in conns
    for cluster, names in routes.clusters.items():
        assert names
        assert all(routes.brokers[name].cluster == cluster for name in names)


@pytest.mark.parametrize("seed", range(40))
def test_the_tables_agree_after_every_event(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(slices, "SLICE_TOPICS", 3)
    chance = random.Random(seed)
    bench = make_bench(deletes_missing_topics=chance.random() < 0.3, max_topics=30)
    conns, waiting = {1, 2, 3, 4}, 0
    for step in range(250):
        who = {
            "name": chance.choice("ab"),
            "cluster": chance.choice(["c1", "c1", "c1", "c2"]),
            "address": f"h:{chance.randrange(1, 5)}",
            "broker_id": chance.randrange(3),
        }
        event = chance.random()
        if event < 0.45:
            chosen = chance.sample([f"t{number}" for number in range(40)], chance.randrange(12))
            topics = {name: TopicConfig(name, step, step) for name in chosen}
            version = DataVersion(chance.randrange(3), chance.randrange(2), 0)
            acting = chance.choice([{}, {"enableActingMaster": chance.choice(["true", "false"])}])
            waiting += 1
            out = bench.register_effects(
                topics, conn=chance.randrange(1, 5), version=version, ext=acting, **who
            )
            waiting -= len(bench.replies(out))
        elif event < 0.75:
            waiting -= len(bench.replies(bench.tick(chance.choice([0, 0, 0, 0, 20_000, 130_000]))))
        elif event < 0.85:
            waiting -= len(bench.replies(bench.close(chance.randrange(1, 5))))
        elif event < 0.9:
            out = bench.send(RequestCode.UNREGISTER_BROKER, bench.identity(**who))
            waiting -= len(bench.replies(out)) - 1
        elif event < 0.95:
            bench.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": f"t{chance.randrange(40)}"})
        else:
            bench.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": who["name"]})
        check(bench.server.routes, conns)
        assert len(bench.server.routes.topics) <= 30
    for _ in range(200):
        waiting -= len(bench.replies(bench.tick()))
    assert waiting == 0  # each registration is answered exactly once
    assert bench.server.serve_stats.bugs == 0
