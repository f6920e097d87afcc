"""What a broker shows of itself: runtime info, topic and consumer status, connections.

Owns: the read-only answers that mqadmin and consoles print. One rule: nothing here changes
anything, and every figure comes from counters that the other files keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cometmq import __version__
from cometmq.errors import RequestRefused
from cometmq.requests import Call, Reply
from cometmq.wire import bodies, fastjson
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import LANGUAGES, ResponseCode
from cometmq.wire.headers import (
    ConsumerGroupHeader,
    ConsumeStatsHeader,
    GroupHeader,
    ProducerGroupHeader,
    StatsHeader,
    SubscriptionHeader,
    TimeSpanHeader,
    TopicHeader,
)

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker


def runtime(broker: Broker, call: Call) -> Reply:
    """28: the table that clusterList and brokerStatus print; all values are text."""
    now_ms, stats, store = call.now_ms, broker.stats, broker.store
    counters, timers = stats.counters, broker.timers
    seconds = (now_ms - stats.boot_ms) // 1000
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    first = store.first_store_ms()
    mean = counters.put_bytes / counters.put_count if counters.put_count else 0.0
    used = store.files.used_ratio()
    table: dict[str, object] = {
        "brokerVersionDesc": f"CometMQ_{__version__}",
        "brokerVersion": 479,
        "brokerActive": "true",
        "bootTimestamp": stats.boot_ms,
        "runtime": f"[ {days} days, {hours} hours, {minutes} minutes, {secs} seconds ]",
        "putTps": stats.rates(now_ms, "put"),
        "getFoundTps": stats.rates(now_ms, "found"),
        "getMissTps": stats.rates(now_ms, "miss"),
        "getTotalTps": stats.rates(now_ms, "total"),
        "getTransferredTps": stats.rates(now_ms, "transferred"),
        "getTransferedTps": stats.rates(now_ms, "transferred"),  # as 4.9's mqadmin spells it
        "putMessageTimesTotal": counters.put_count,
        "putMessageFailedTimes": counters.put_failed,
        "putMessageSizeTotal": counters.put_bytes,
        "putMessageAverageSize": f"{mean:.2f}",
        "putMessageEntireTimeMax": 0,
        "getMessageEntireTimeMax": 0,
        "putMessageDistributeTime": "[<=0ms]:0",
        "msgPutTotalYesterdayMorning": 0,
        "msgPutTotalTodayMorning": 0,
        "msgPutTotalTodayNow": counters.put_count,
        "msgGetTotalYesterdayMorning": 0,
        "msgGetTotalTodayMorning": 0,
        "msgGetTotalTodayNow": counters.get_count,
        "commitLogMinOffset": store.min_log_offset,
        "commitLogMaxOffset": store.max_log_offset,
        "commitLogDiskRatio": f"{used:.2f}",
        "consumeQueueDiskRatio": f"{used:.2f}",
        "commitLogDirCapacity": f"used {used:.0%}",
        "dispatchBehindBytes": store.max_log_offset - store.dispatched_offset,
        "dispatchMaxBuffer": 0,
        "remainHowManyDataToCommit": f"{store.max_log_offset - store.committed_offset} B",
        "remainHowManyDataToFlush": f"{store.committed_offset - store.flushed_offset} B",
        "pageCacheLockTimeMills": 0,
        "earliestMessageTimeStamp": -1 if first is None else first,
        "startAcceptSendRequestTimeStamp": broker.config.accept_sends_from_ms,
        "timerReadBehind": timers.lag_ms(now_ms) // 1000,
        "timerOffsetBehind": timers.unread(store),
        "timerCongestNum": max(timers.pending, 0),
        "timerEnqueueTps": "0.0",
        "timerDequeueTps": "0.0",
    }
    for pool in ("send", "pull", "litePull", "query", "ack"):
        table[f"{pool}ThreadPoolQueueSize"] = 0
        table[f"{pool}ThreadPoolQueueCapacity"] = broker.config.max_queued_frames
        table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = 0
    table["EndTransactionQueueSize"] = 0
    table["EndTransactionThreadPoolQueueCapacity"] = broker.config.max_queued_frames
    table["cometmqTimersLagMs"] = timers.lag_ms(now_ms)
    table.update(own_figures(broker))
    return Reply(body=fastjson.dumps({"table": {k: str(v) for k, v in table.items()}}))


def own_figures(broker: Broker) -> dict[str, object]:
    """CometMQ's own counters, each limit with how often it was reached."""
    counters = broker.stats.counters
    return {
        "cometmqRequests": broker.served.requests,
        "cometmqRequestsCompiled": broker.served.compiled,
        "cometmqRequestsRefused": broker.served.refused,
        "cometmqRequestsUnsupported": broker.served.unsupported,
        "cometmqBugs": broker.served.bugs,
        "cometmqBusyByQueueWait": counters.busy_queue_wait,
        "cometmqBusyBySlowAppend": counters.busy_slow_append,
        "cometmqBusyBySlowDisk": counters.busy_slow_disk,
        "cometmqFlushTimeouts": counters.flush_timeouts,
        "cometmqParkedPulls": broker.holds.count,
        "cometmqParkedPullsLimitReached": broker.holds.refused_by_limit,
        "cometmqTopics": len(broker.topics.table),
        "cometmqTopicsLimitReached": broker.topics.refused_by_limit,
        "cometmqGroups": len(broker.groups.table),
        "cometmqGroupsLimitReached": broker.groups.refused_by_limit,
        "cometmqProducerGroups": len(broker.members.producers),
        "cometmqProducerGroupsLimitReached": broker.members.refused_producers,
        "cometmqConnections": len(broker.peers),
        "cometmqSubscriptionConflicts": broker.members.subscription_conflicts,
        "cometmqSqlFilters": broker.sql_filters.count,
        "cometmqSqlFiltersLimitReached": broker.sql_filters.refused_by_limit,
        "cometmqOffsetsMovedBack": broker.offsets.moved_back,
        "cometmqHalfMessages": broker.half.open_count(broker.store),
        "cometmqTransactionCommits": broker.half.commits,
        "cometmqTransactionRollbacks": broker.half.rollbacks,
        "cometmqTransactionChecks": broker.half.checks,
        "cometmqTransactionChecksWithoutProducer": broker.half.unanswerable,
        "cometmqTransactionsGivenUp": broker.half.discarded,
        "cometmqTransactionEndsRepeated": broker.half.repeated,
        "cometmqTransactionEndsHealed": broker.half.healed,
        "cometmqTimersPending": max(broker.timers.pending, 0),
        "cometmqTimersDelivered": broker.timers.delivered,
        "cometmqTimersRecalled": broker.timers.recalled,
        "cometmqTimersLost": broker.timers.lost,
        "cometmqReadOnlyReason": broker.store.read_only_reason or "",
        **{f"cometmqNet{name}": count for name, count in broker.net_figures().items()},
    }


def _topic(broker: Broker, name: str) -> TopicConfig:
    topic = broker.topics.get(name)
    if topic is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist on {broker.config.name}"
        )
    return topic


def topic_stats(broker: Broker, call: Call) -> Reply:
    """202: offsets of every queue of a topic."""
    header: TopicHeader = call.header
    topic = _topic(broker, header.topic)
    store = broker.store
    table: dict[Any, Any] = {}
    for queue_id in range(max(topic.readQueueNums, topic.writeQueueNums)):
        most = store.max_offset(topic.topicName, queue_id)
        last = store.store_ms_at(topic.topicName, queue_id, most - 1) if most > 0 else None
        table[bodies.queue_key(topic.topicName, broker.config.name, queue_id)] = {
            "lastUpdateTimestamp": last or 0,
            "maxOffset": most,
            "minOffset": store.min_offset(topic.topicName, queue_id),
        }
    return Reply(body=fastjson.dumps({"offsetTable": table, "topicPutTps": 0.0}))


def consume_stats(broker: Broker, call: Call) -> Reply:
    """208: how far a group is behind in each queue."""
    header: ConsumeStatsHeader = call.header
    group, store, name = header.consumerGroup, broker.store, broker.config.name
    if header.topicList:
        topics = [one for one in header.topicList.split(";") if one]
    elif header.topic:
        topics = [header.topic]
    else:
        topics = broker.offsets.topics_of(group)
    live = broker.members.consumers.get(group)
    table: dict[Any, Any] = {}
    for topic_name in topics:
        topic = broker.topics.get(topic_name)
        if topic is None:
            continue
        if live is not None and topic_name not in live.subscriptions and not header.topic:
            continue
        for queue_id in range(topic.readQueueNums):
            most = store.max_offset(topic_name, queue_id)
            at = max(broker.offsets.get(topic_name, group, queue_id) or 0, 0)
            pulled = broker.offsets.pulled.get((topic_name, group), {}).get(queue_id, 0)
            last = store.store_ms_at(topic_name, queue_id, at - 1) if at > 0 else None
            table[bodies.queue_key(topic_name, name, queue_id)] = {
                "brokerOffset": most,
                "consumerOffset": at,
                "lastTimestamp": last or 0,
                "pullOffset": max(pulled, at),
            }
    return Reply(body=fastjson.dumps({"consumeTps": 0.0, "offsetTable": table}))


def consumer_connections(broker: Broker, call: Call) -> Reply:
    """203: a group's members, what it subscribes to, and where its members disagree."""
    header: ConsumerGroupHeader = call.header
    live = broker.members.consumers.get(header.consumerGroup)
    if live is None:
        raise RequestRefused(
            ResponseCode.CONSUMER_NOT_ONLINE,
            f"no member of group {header.consumerGroup!r} is online on {broker.config.name}",
        )
    body = {
        "connectionSet": [_connection(member.client) for member in live.members.values()],
        "consumeFromWhere": live.consume_from,
        "consumeType": live.consume_type,
        "messageModel": live.message_model,
        "subscriptionConflicts": live.conflicts(),
        "subscriptionTable": live.subscriptions,
    }
    return Reply(body=msgspec.json.encode(body))


def producer_connections(broker: Broker, call: Call) -> Reply:
    """204."""
    header: ProducerGroupHeader = call.header
    clients = broker.members.producers.get(header.producerGroup)
    if not clients:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR, f"no producer of group {header.producerGroup!r} is online"
        )
    return Reply(
        body=fastjson.dumps({"connectionSet": [_connection(one) for one in clients.values()]})
    )


def all_producers(broker: Broker, call: Call) -> Reply:
    """328."""
    data = {
        group: [
            {
                "clientId": client.client_id,
                "language": LANGUAGES[client.language],
                "lastUpdateTimestamp": client.seen_ms,
                "remoteIP": client.address,
                "version": client.version,
            }
            for client in clients.values()
        ]
        for group, clients in broker.members.producers.items()
    }
    return Reply(body=fastjson.dumps({"data": data}))


def _connection(client: Any) -> dict[str, Any]:
    return {
        "clientAddr": client.address,
        "clientId": client.client_id,
        "language": LANGUAGES[client.language],
        "version": client.version,
    }


def groups_of_topic(broker: Broker, call: Call) -> Reply:
    """300: who consumes a topic: groups online that subscribe, and groups with offsets."""
    header: TopicHeader = call.header
    online = {
        name
        for name, live in broker.members.consumers.items()
        if header.topic in live.subscriptions
    }
    found = sorted(online | set(broker.offsets.groups_of(header.topic)))
    return Reply(body=fastjson.dumps({"groupList": found}))


def topics_of_group(broker: Broker, call: Call) -> Reply:
    """343."""
    header: GroupHeader = call.header
    topics = broker.offsets.topics_of(header.group)
    return Reply(body=fastjson.dumps({"brokerAddr": broker.address, "topicList": topics}))


def subscription_of_group(broker: Broker, call: Call) -> Reply:
    """345."""
    header: SubscriptionHeader = call.header
    body: dict[str, Any] = {"group": header.group, "topic": header.topic or ""}
    live = broker.members.consumers.get(header.group)
    if live is not None and header.topic in live.subscriptions:
        body["subscriptionData"] = live.subscriptions[header.topic]
    return Reply(body=msgspec.json.encode(body))


def time_span(broker: Broker, call: Call) -> Reply:
    """303: oldest, newest and consumed message times of each queue."""
    header: TimeSpanHeader = call.header
    topic = _topic(broker, header.topic)
    store = broker.store
    spans = []
    for queue_id in range(topic.writeQueueNums):
        most = store.max_offset(topic.topicName, queue_id)
        first = store.earliest_store_ms(topic.topicName, queue_id)
        last = store.store_ms_at(topic.topicName, queue_id, most - 1) if most else None
        at = broker.offsets.get(topic.topicName, header.group, queue_id) or 0
        done = store.store_ms_at(topic.topicName, queue_id, at - 1) if at > 0 else first
        waiting = store.store_ms_at(topic.topicName, queue_id, at) if at < most else None
        spans.append(
            {
                "consumeTimeStamp": done or 0,
                "delayTime": max(call.now_ms - waiting, 0) if waiting is not None else 0,
                "maxTimeStamp": last or 0,
                "messageQueue": bodies.queue_key(topic.topicName, broker.config.name, queue_id),
                "minTimeStamp": first or 0,
            }
        )
    return Reply(body=fastjson.dumps({"consumeTimeSpanSet": spans}))


def stats_item(broker: Broker, call: Call) -> Reply:
    """315: counts of one topic or of one group on a topic, as far as they are kept."""
    header: StatsHeader = call.header
    traffic = None
    if header.statsName in ("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE"):
        traffic = broker.stats.topics.get(header.statsKey)
    elif header.statsName in ("GROUP_GET_NUMS", "GROUP_GET_SIZE"):
        topic, _, group = header.statsKey.partition("@")
        traffic = broker.stats.groups.get((topic, group))
    if traffic is None:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"no figures of {header.statsName} for {header.statsKey!r} on {broker.config.name}",
        )
    total = traffic.size if header.statsName.endswith("SIZE") else traffic.count
    seconds = max((call.now_ms - broker.stats.boot_ms) / 1000, 1.0)
    item = {"avgpt": 0.0, "sum": total, "tps": round(total / seconds, 2)}
    return Reply(body=fastjson.dumps({"statsDay": item, "statsHour": item, "statsMinute": item}))
