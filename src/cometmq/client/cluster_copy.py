"""Copies the topics and groups of a running cluster, for a broker that joins it.

Owns: finding a broker of the cluster and asking it for its tables. One rule: it reads only; system
topics and topics named after a broker are left out, since each broker has its own.
"""

from __future__ import annotations

from cometmq.client.remote import Remote
from cometmq.errors import CometError, ConfigError
from cometmq.wire import bodies
from cometmq.wire.bodies import GroupConfig, TopicConfig
from cometmq.wire.codes import RequestCode


def copy_cluster(
    namesrv: str, cluster: str, own_name: str
) -> tuple[list[TopicConfig], list[GroupConfig]]:
    """Topics and groups of the first broker of `cluster` that answers; ConfigError if none does."""
    tried: list[str] = []
    for address in namesrv.replace(",", ";").split(";"):
        try:
            with Remote(address.strip()) as remote:
                raw = remote.call(RequestCode.GET_BROKER_CLUSTER_INFO).body
        except CometError as error:
            tried.append(f"name server {address}: {error}")
            continue
        info = bodies.load_object(raw, "cluster info")
        members = info.get("clusterAddrTable", {}).get(cluster, [])
        brokers = info.get("brokerAddrTable", {})
        for name in sorted(str(one) for one in members):
            leader = brokers.get(name, {}).get("brokerAddrs", {}).get("0")
            if name == own_name or not leader:
                continue
            try:
                return _read(str(leader), cluster)
            except CometError as error:
                tried.append(f"broker {name} at {leader}: {error}")
        if not tried:
            tried.append(f"name server {address} knows no other broker of cluster {cluster!r}")
    raise ConfigError(f"--copy-topics: nothing to copy from: {'; '.join(tried)}")


def _read(address: str, cluster: str) -> tuple[list[TopicConfig], list[GroupConfig]]:
    with Remote(address, timeout_ms=30_000) as remote:
        raw_topics = remote.call(RequestCode.GET_ALL_TOPIC_CONFIG).body
        raw_groups = remote.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
        raw_system = remote.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body
    system = {str(one) for one in bodies.load_object(raw_system, "topic list").get("topicList", [])}
    system.add(cluster)
    table = bodies.drop_nulls(bodies.load_object(raw_topics, "topics").get("topicConfigTable", {}))
    topics = [
        bodies.topic_config(raw)
        for name, raw in table.items()
        if name not in system and not name.startswith("rmq_sys_")
    ]
    group_table = bodies.load_object(raw_groups, "groups").get("subscriptionGroupTable", {})
    groups = [bodies.group_config(raw) for raw in bodies.drop_nulls(group_table).values()]
    return topics, groups
