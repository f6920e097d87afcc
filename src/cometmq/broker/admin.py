"""Operators' requests: topics, groups, offsets and settings.

Owns: the requests of mqadmin and the consoles that change something, and the tables they read. One
rule: a request that is refused has changed nothing; what may change at run time is an allow-list
(RocketMQ's CVE-2023-33246 and CVE-2023-37582 came through a config update).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq import config as settings
from cometmq.broker import names
from cometmq.broker.group_configs import group_to_wire
from cometmq.broker.topics import alter_attributes, check_shape
from cometmq.errors import ConfigError, RequestRefused
from cometmq.requests import Call, Reply
from cometmq.wire import bodies, fastjson
from cometmq.wire.bodies import GroupConfig, TopicConfig
from cometmq.wire.codes import CPP, ResponseCode
from cometmq.wire.headers import (
    CloneOffsetHeader,
    CreateTopicHeader,
    GroupHeader,
    GroupNameHeader,
    ResetOffsetHeader,
    TopicHeader,
)

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

MAX_LIST = 10_000  # topics or groups in one list request


# ----------------------------------------------------------------------------------------- topics


def create_topic(broker: Broker, call: Call) -> Reply | None:
    """17: create a topic or change one."""
    header: CreateTopicHeader = call.header
    before = broker.topics.get(header.topic)
    attributes = alter_attributes(
        before.attributes if before is not None else {}, header.attributes, before is None
    )
    topic = TopicConfig(
        topicName=header.topic,
        readQueueNums=header.readQueueNums,
        writeQueueNums=header.writeQueueNums,
        perm=header.perm,
        topicFilterType=header.topicFilterType or "SINGLE_TAG",
        topicSysFlag=header.topicSysFlag,
        order=header.order,
        attributes=attributes,
    )
    _put_topics(broker, [topic], call)
    return broker.when_known([topic], call, Reply())


def create_topics(broker: Broker, call: Call) -> Reply | None:
    """18: several at once; all or none."""
    raw = bodies.load_object(call.frame.body, "topic list").get("topicConfigList")
    topics = [
        _with_attributes(broker, bodies.topic_config(one))
        for one in _bounded(raw, "topicConfigList")
    ]
    _put_topics(broker, topics, call)
    return broker.when_known(topics, call, Reply())


def _with_attributes(broker: Broker, topic: TopicConfig) -> TopicConfig:
    """A list's attributes are changes too: `+name` or `name` with a value, or `-name`."""
    before = broker.topics.get(topic.topicName)
    changes = (
        key if key.startswith("-") else f"+{key.removeprefix('+')}={value}"
        for key, value in topic.attributes.items()
    )
    attributes = alter_attributes(
        before.attributes if before is not None else {}, ",".join(changes), before is None
    )
    return msgspec.structs.replace(topic, attributes=attributes)


def _put_topics(broker: Broker, topics: list[TopicConfig], call: Call) -> None:
    for topic in topics:
        names.check_topic(topic.topicName)
        if names.is_system_topic(topic.topicName, broker.config):
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"{topic.topicName!r} is a system topic of this broker and can't be changed",
            )
        check_shape(topic)
    room = broker.topics.limit - len(broker.topics.table)
    if sum(broker.topics.get(topic.topicName) is None for topic in topics) > room:
        broker.topics.refused_by_limit += 1
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"no room for {len(topics)} more topics: maxTopics={broker.topics.limit}",
        )
    changed = [topic for topic in topics if broker.topics.get(topic.topicName) != topic]
    for topic in changed:
        broker.topics.put(topic, call.now_ms)
    broker.announce(changed, call.now_ms, call.out)


def delete_topic(broker: Broker, call: Call) -> Reply:
    """215: the topic, its queues and the offsets on it; records leave with their log file."""
    header: TopicHeader = call.header
    names.check_topic(header.topic)
    if names.is_system_topic(header.topic, broker.config):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"{header.topic!r} is a system topic of this broker and can't be deleted",
        )
    broker.dispatch(call.now_ms, call.out)  # the store would, and nobody would be woken
    broker.topics.delete(header.topic, call.now_ms)
    broker.store.delete_topic(header.topic)
    broker.offsets.forget_topic(header.topic, call.now_ms)
    broker.stats.forget_topic(header.topic)
    return Reply()


def all_topics(broker: Broker, call: Call) -> Reply:
    """21: every topic with the table's version."""
    return Reply(
        body=msgspec.json.encode(
            {"dataVersion": broker.topics.version, "topicConfigTable": broker.topics.table}
        )
    )


def one_topic(broker: Broker, call: Call) -> Reply:
    """351."""
    return Reply(body=msgspec.json.encode(_known_topic(broker, call.header.topic)))


def system_topics(broker: Broker, call: Call) -> Reply:
    """305: the topics that consoles hide."""
    found = sorted({topic.topicName for topic in names.built_in_topics(broker.config)})
    return Reply(body=fastjson.dumps({"topicList": found}))


def _known_topic(broker: Broker, name: str) -> TopicConfig:
    topic = broker.topics.get(name)
    if topic is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {name!r} does not exist on {broker.config.name}",
        )
    return topic


def _bounded(raw: Any, what: str) -> list[Any]:
    if not isinstance(raw, list) or len(raw) > MAX_LIST:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, f"{what} must be a list of at most {MAX_LIST}"
        )
    return raw


# ----------------------------------------------------------------------------------------- groups


def create_group(broker: Broker, call: Call) -> Reply:
    """200."""
    group = bodies.group_config(bodies.load_object(call.frame.body, "subscription group"))
    _put_groups(broker, [group], call)
    return Reply()


def create_groups(broker: Broker, call: Call) -> Reply:
    """225: several at once; all or none."""
    raw = bodies.load_object(call.frame.body, "group list").get("groupConfigList")
    _put_groups(
        broker, [bodies.group_config(one) for one in _bounded(raw, "groupConfigList")], call
    )
    return Reply()


def _put_groups(broker: Broker, groups: list[GroupConfig], call: Call) -> None:
    for group in groups:
        names.check_group(group.groupName)
        if not 0 <= group.retryQueueNums <= 1024 or group.retryMaxTimes < 0:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"group {group.groupName!r}: retryQueueNums={group.retryQueueNums} must be 0 to "
                f"1024 and retryMaxTimes={group.retryMaxTimes} not negative",
            )
    room = broker.groups.limit - len(broker.groups.table)
    if len({group.groupName for group in groups} - set(broker.groups.table)) > room:
        broker.groups.refused_by_limit += 1
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"no room for {len(groups)} more groups: maxGroups={broker.groups.limit}",
        )
    for group in groups:
        broker.groups.put(group, call.now_ms)


def delete_group(broker: Broker, call: Call) -> Reply:
    """207."""
    header: GroupNameHeader = call.header
    names.check_group(header.groupName)
    broker.groups.delete(header.groupName, call.now_ms)
    if header.cleanOffset:
        broker.offsets.forget_group(header.groupName, call.now_ms)
    return Reply()


def all_groups(broker: Broker, call: Call) -> Reply:
    """201."""
    return Reply(body=msgspec.json.encode(broker.groups.as_wire()))


def one_group(broker: Broker, call: Call) -> Reply:
    """352."""
    header: GroupHeader = call.header
    group = broker.groups.get(header.group)
    if group is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {header.group!r} does not exist on {broker.config.name}",
        )
    return Reply(body=msgspec.json.encode(group_to_wire(group)))


# ---------------------------------------------------------------------------------------- offsets


def all_offsets(broker: Broker, call: Call) -> Reply:
    """43."""
    return Reply(body=msgspec.json.encode(broker.offsets.as_wire()))


def all_delay_offsets(broker: Broker, call: Call) -> Reply:
    """45."""
    return Reply(body=broker.delay.encode())


def reset_offset(broker: Broker, call: Call) -> Reply:
    """222: move a group to a time, or one queue to an offset; online members follow at once."""
    header: ResetOffsetHeader = call.header
    topic = _known_topic(broker, header.topic)
    if broker.groups.get(header.group) is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {header.group!r} does not exist on {broker.config.name}",
        )
    store = broker.store
    if header.queueId >= 0:
        if header.queueId >= topic.readQueueNums:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"queue {header.queueId} of topic {header.topic!r}: it has "
                f"{topic.readQueueNums} read queues",
            )
        queue_ids = [header.queueId]
    else:
        queue_ids = list(range(topic.readQueueNums))
    targets: dict[int, int] = {}
    for queue_id in queue_ids:
        least, most = (
            store.min_offset(topic.topicName, queue_id),
            store.max_offset(topic.topicName, queue_id),
        )
        if header.queueId >= 0 and header.offset is not None and header.offset >= 0:
            if not least <= header.offset <= most + 1:
                raise RequestRefused(
                    ResponseCode.SYSTEM_ERROR,
                    f"offset {header.offset} of queue {queue_id} must be {least} to {most + 1}",
                )
            targets[queue_id] = header.offset
        elif header.timestamp < 0:
            targets[queue_id] = most
        else:
            targets[queue_id] = store.offset_by_time(
                topic.topicName, queue_id, header.timestamp, False
            )
    for queue_id, offset in targets.items():
        broker.offsets.reset(header.topic, header.group, queue_id, offset, call.now_ms)
    broker.wake_group(header.topic, header.group, call.now_ms, call.out)
    keys = {
        queue_id: bodies.queue_key(header.topic, broker.config.name, queue_id)
        for queue_id in targets
    }
    table: Any = {keys[queue_id]: offset for queue_id, offset in targets.items()}
    if call.frame.language == CPP:  # that client reads a list, not a map with objects as keys
        table = [{**keys[queue_id], "offset": offset} for queue_id, offset in targets.items()]
    return Reply(body=fastjson.dumps({"offsetTable": table}))


def clone_offsets(broker: Broker, call: Call) -> Reply:
    """314: give one group the offsets of another."""
    header: CloneOffsetHeader = call.header
    names.check_group(header.destGroup)
    if broker.groups.get(header.destGroup) is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {header.destGroup!r} does not exist",
        )
    broker.offsets.clone(header.srcGroup, header.destGroup, header.topic, call.now_ms)
    return Reply()


# --------------------------------------------------------------------------------------- settings


def get_config(broker: Broker, call: Call) -> Reply:
    """26: all settings as properties text."""
    lines = (f"{key}={value}" for key, value in settings.to_settings(broker.config).items())
    version = msgspec.json.encode(broker.config_version).decode()
    return Reply(ext={"version": version}, body="\n".join(lines).encode())


def update_config(broker: Broker, call: Call) -> Reply:
    """25: change live settings; anything else is refused and nothing changes."""
    wanted = bodies.parse_properties_text(call.frame.body)
    before = broker.config
    try:
        after = settings.apply(before, wanted, source="update", live_only=True)
        broker.reconfigure(after, call.now_ms)
    except ConfigError as error:
        log.warning("config update refused peer=%s: %s", broker.peers[call.conn].address, error)
        raise RequestRefused(ResponseCode.NO_PERMISSION, str(error)) from None
    changed = [
        f"{name}: {getattr(before, name)} -> {getattr(after, name)}"
        for name in before.__struct_fields__
        if getattr(before, name) != getattr(after, name)
    ]
    log.info("config updated peer=%s %s", broker.peers[call.conn].address, "; ".join(changed))
    if before.permission != after.permission:
        broker.name_servers.register_everything(broker, call.now_ms, call.out)
    return Reply()


def clean_files(broker: Broker, call: Call) -> Reply:
    """27, 306, 329: look for files to delete now, whatever the hour."""
    broker.store.clean(call.now_ms, force=True)
    return Reply()


def clean_unused_topics(broker: Broker, call: Call) -> Reply:
    """316: queues of topics that no longer exist."""
    broker.dispatch(call.now_ms, call.out)
    for topic in sorted({topic for topic, _ in broker.store.queues()}):
        if broker.topics.get(topic) is None and not names.is_system_topic(topic, broker.config):
            broker.store.delete_topic(topic)
    return Reply()
