"""Which names are allowed, and which the broker keeps for itself.

Owns: the rules for topic and group names, and the list of built-in topics and groups. One rule: a
name is checked here on every way in, before it is looked up, stored or becomes part of a path
(RocketMQ's CVE-2019-17572 was a topic named `../../x`).
"""

from __future__ import annotations

import re

from cometmq.config import BrokerConfig
from cometmq.errors import RequestRefused
from cometmq.wire.bodies import GroupConfig, TopicConfig
from cometmq.wire.codes import Perm, ResponseCode

MAX_TOPIC = 127
MAX_LONG_TOPIC = 255  # retry and dead-letter topics: prefix and group
MAX_GROUP = MAX_LONG_TOPIC - len("%RETRY%")

RETRY_PREFIX = "%RETRY%"
DEAD_LETTER_PREFIX = "%DLQ%"
TEMPLATE_TOPIC = "TBW102"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC = "OFFSET_MOVED_EVENT"
BENCHMARK_TOPIC = "BenchmarkTest"
TIMER_TOPIC = "rmq_sys_wheel_timer"
CHECKPOINT_TOPIC = "CHECKPOINT_TOPIC"
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
SYSTEM_PREFIX = "rmq_sys_"
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"

NOT_FOR_CLIENTS = frozenset(
    (
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        CHECK_MAX_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    )
)
"""Topics that clients may not send to."""

UNSEEN_TOPICS = frozenset((SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, TIMER_TOPIC))
"""Where messages wait: nobody consumes from there."""

TOOLS_GROUP = "TOOLS_CONSUMER"
"""Operators look at messages as this group."""

BUILT_IN_GROUPS = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)

_ALLOWED = re.compile(r"[%|a-zA-Z0-9_-]+")
_OWN_NAME = re.compile(r"[%|a-zA-Z0-9_.-]+")
_RULE = "allowed are letters, digits, %, |, _ and -"


def topic_problem(topic: str) -> str | None:
    """What is wrong with a topic's name; None if nothing is."""
    if not topic.strip():
        return "the topic name is empty"
    is_long = topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    limit = MAX_LONG_TOPIC if is_long else MAX_TOPIC
    if len(topic) > limit:
        return f"topic name of {len(topic)} characters, at most {limit}: {topic[:40]!r}..."
    if topic.startswith(RETRY_PREFIX) and topic.count("+") == 1:
        topic = topic.replace("+", "_")  # `%RETRY%group+topic`: what pop's newer retry topics say
    if not _ALLOWED.fullmatch(topic):
        return f"topic name {topic!r} has a character that is not allowed; {_RULE}"
    return None


def group_problem(group: str) -> str | None:
    """What is wrong with a group's name; None if nothing is."""
    if not group.strip():
        return "the group name is empty"
    if len(group) > MAX_GROUP:
        return f"group name of {len(group)} characters, at most {MAX_GROUP}: {group[:40]!r}..."
    if not _ALLOWED.fullmatch(group):
        return f"group name {group!r} has a character that is not allowed; {_RULE}"
    return None


def own_name_problem(name: str) -> str | None:
    """What is wrong with a broker's or cluster's name; host names are the usual choice."""
    if not 0 < len(name) <= MAX_TOPIC or not _OWN_NAME.fullmatch(name):
        return f"must be 1 to {MAX_TOPIC} letters, digits, dots, %, |, _ or -"
    return None


def check_topic(topic: str) -> None:
    problem = topic_problem(topic)
    if problem is not None:
        raise RequestRefused(ResponseCode.INVALID_PARAMETER, problem)


def check_group(group: str) -> None:
    problem = group_problem(group)
    if problem is not None:
        raise RequestRefused(ResponseCode.INVALID_PARAMETER, problem)


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def revive_topic(cluster: str) -> str:
    """Where pop keeps its checkpoints and acknowledgements."""
    return f"{SYSTEM_PREFIX}REVIVE_LOG_{cluster}"


def built_in_topics(config: BrokerConfig) -> list[TopicConfig]:
    """The topics every broker has, before its own file is laid over them."""
    read_write = int(Perm.READ | Perm.WRITE)
    template = read_write | Perm.INHERIT
    found = [
        _topic(SELF_TEST_TOPIC, 1, read_write),
        _topic(BENCHMARK_TOPIC, 1024, read_write),
        _topic(config.cluster, 16, template if config.is_cluster_topic_enabled else Perm.INHERIT),
        _topic(config.name, 1, template if config.is_broker_topic_enabled else Perm.INHERIT),
        _topic(OFFSET_MOVED_TOPIC, 1, read_write),
        _topic(SCHEDULE_TOPIC, len(config.delay_levels.split()), read_write),
        _topic(f"{config.cluster}_REPLY_TOPIC", 1, read_write),
        _topic(revive_topic(config.cluster), config.revive_queue_count, read_write),
        _topic(f"{SYSTEM_PREFIX}SYNC_BROKER_MEMBER_{config.name}", 1, Perm.INHERIT),
        _topic(HALF_TOPIC, 1, read_write),
        _topic(OP_TOPIC, 1, read_write),
        _topic(TIMER_TOPIC, 1, read_write),
    ]
    if config.is_topic_auto_created:
        found.append(_topic(TEMPLATE_TOPIC, config.default_queue_count, template))
    if config.is_trace_topic_enabled:
        found.append(_topic(config.trace_topic, 1, read_write))
    return found


def is_system_topic(topic: str, config: BrokerConfig) -> bool:
    """Topics that admins may neither create nor delete."""
    if topic.startswith(SYSTEM_PREFIX) or topic in (CHECK_MAX_TOPIC, CHECKPOINT_TOPIC):
        return True
    if topic == TEMPLATE_TOPIC:
        return True
    return any(topic == built_in.topicName for built_in in built_in_topics(config))


def built_in_groups() -> list[GroupConfig]:
    return [GroupConfig(name) for name in BUILT_IN_GROUPS]


def _topic(name: str, queue_count: int, perm: int) -> TopicConfig:
    return TopicConfig(name, queue_count, queue_count, int(perm))
