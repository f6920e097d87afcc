"""Messages that a consumer could not handle: again later, or to the dead letters.

Owns: CONSUMER_SEND_MSG_BACK (36), the limits of retries, the topics %RETRY%group and %DLQ%group.
One rule: a message that is sent back is stored again before the consumer may forget it; after its
last try it goes to the group's dead letters, once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cometmq.broker import names, ttl
from cometmq.broker.delay import renewed
from cometmq.errors import RequestRefused, StoreError
from cometmq.message import NewMessage
from cometmq.requests import Call, Reply
from cometmq.wire import message_id, properties
from cometmq.wire.bodies import GroupConfig, TopicConfig
from cometmq.wire.codes import Perm, ResponseCode, Version
from cometmq.wire.headers import SendBackHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

FIRST_LEVEL = 3  # the level of a first retry; each later one is a level higher
_MOST_CHARS = properties.MAX_PROPERTIES_BYTES // 4  # of a property text to which more may be added
_READ_WRITE = int(Perm.READ | Perm.WRITE)


def send_back(broker: Broker, call: Call) -> Reply | None:
    """Store a message again in its group's retry topic, delayed, or in its dead letters."""
    header: SendBackHeader = call.header
    names.check_group(header.group)
    config = broker.config
    group = broker.groups.find(
        header.group, auto_create=config.is_group_auto_created, now_ms=call.now_ms
    )
    if group is None:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group {header.group!r} does not exist on {config.name}",
        )
    if not config.permission & Perm.WRITE:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION, f"broker {config.name} is not writable (brokerPermission)"
        )
    if group.retryQueueNums <= 0:
        return Reply()  # the group wants no retries
    stored = broker.store.message_at(header.offset)
    if stored is None:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"no message at log offset {header.offset} on {config.name}; it may have expired",
        )
    if stored.topic in names.UNSEEN_TOPICS:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"the message at log offset {header.offset} is in {stored.topic}, where no consumer "
            "gets messages from: it can't be sent back",
        )
    if ttl.is_over(stored.properties, call.now_ms):
        broker.stats.kept_back(stored.topic, 1)
        return Reply()  # nobody is to get it any more
    table = properties.parse(stored.properties)
    table.pop(properties.PRODUCER_SEQ, None)  # of the first one alone
    table.setdefault(properties.RETRY_TOPIC, stored.topic)
    table.setdefault(
        properties.ORIGIN_MESSAGE_ID, message_id.offset_id(stored.store_host, stored.log_offset)
    )
    table.pop(properties.DELAY, None)
    most = most_times(group, header.maxReconsumeTimes, call.frame.version)
    if stored.reconsume_times >= most or header.delayLevel < 0:
        topic = dead_letters(broker, header.group, call)
        message = renewed(stored, topic, 0)
        if message.reconsume_times < most:
            why = f"its consumer asked for it after {stored.reconsume_times} retries"
        else:
            why = all_failed(stored.reconsume_times)
        note_death(table, stored.topic, stored.properties, why)
        broker.stats.counters.dead_letters += 1
        log.info("dead letter group=%s id=%s: %s", header.group, table.get("UNIQ_KEY"), why)
    else:
        level = header.delayLevel or FIRST_LEVEL + stored.reconsume_times
        topic = retry_topic(broker, group, call)
        message = renewed(stored, topic, broker.any_retry_queue(group.retryQueueNums))
        table[properties.DELAY] = str(level)
    message.reconsume_times = stored.reconsume_times + 1
    message.prepared_offset = 0
    message.properties = properties.build(table)
    try:
        stored_at = broker.put(message, call.now_ms, is_due=False)
    except StoreError as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
    return broker.acknowledge(call, Reply(), stored_at.end_offset, topic, text=message.properties)


def limit_of_resend(
    broker: Broker, call: Call, message: NewMessage, asked: int | None
) -> NewMessage:
    """A client that sends to its retry topic by itself (after a failed 36, or in ordered
    consumption): beyond the limit the message goes to the dead letters instead."""
    name = message.topic.removeprefix(names.RETRY_PREFIX)
    group = broker.groups.get(name)
    assert group is not None, name  # the checks of a send made sure
    most = most_times(group, asked, call.frame.version)
    is_ordered = broker.locks.is_any_held(name, call.now_ms)
    if message.reconsume_times > most or (is_ordered and message.reconsume_times > 0):
        table = properties.parse(message.properties)
        origin, times = table.get(properties.RETRY_TOPIC, message.topic), message.reconsume_times
        note_death(table, origin, message.properties, all_failed(max(times - 1, 0)))
        table.pop(properties.DELAY, None)
        message.properties = properties.build(table)
        message.topic = dead_letters(broker, name, call)
        message.queue_id = 0
        broker.stats.counters.dead_letters += 1
        log.info("dead letter group=%s id=%s", name, table.get("UNIQ_KEY"))
    return message


def most_times(group: GroupConfig, asked: int | None, version: int) -> int:
    """How often a message is tried again: the request's word, else the group's."""
    if asked is not None and version >= Version.V3_4_9:
        return asked
    return group.retryMaxTimes


def all_failed(retries: int) -> str:
    return f"all {retries} retries failed"


def note_death(table: dict[str, str], topic: str, text: str, why: str) -> None:
    """Where a dead letter came from and why it is one, kept if it says so already; and it lives
    on."""
    ttl.forget(table)
    if len(text) < _MOST_CHARS:
        table.setdefault(properties.DEAD_REASON, why)
    table.setdefault("DLQ_ORIGIN_TOPIC", table.get(properties.RETRY_TOPIC, topic))
    origin = properties.get(text, properties.UNIQUE_KEY)
    if origin is not None:
        table.setdefault("DLQ_ORIGIN_MESSAGE_ID", origin)


def retry_topic(broker: Broker, group: GroupConfig, call: Call) -> str:
    """The group's retry topic, made if it is missing."""
    name = names.retry_topic(group.groupName)
    return _need(broker, name, max(group.retryQueueNums, 1), call)


def dead_letters(broker: Broker, group: str, call: Call) -> str:
    """The topic of a group's dead letters, made if it is missing."""
    return _need(broker, names.DEAD_LETTER_PREFIX + group, 1, call)


def _need(broker: Broker, name: str, queue_count: int, call: Call) -> str:
    if broker.topics.get(name) is None:
        topic = TopicConfig(name, queue_count, queue_count, _READ_WRITE)
        broker.topics.put(topic, call.now_ms)
        broker.announce([topic], call.now_ms, call.out)
    return name
