"""THE TABLE: what a broker answers. Start reading here.

Each row: code -> how its header is read, and the function that decides. Codes that aren't here are
answered with 3 (not supported). `_named` headers have had their topic and group names checked;
sends and pulls check their own (they are the hot path, and have an order to keep), as do requests
whose names are in the body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import (
    admin,
    ask_clients,
    heartbeat,
    names,
    pop,
    pop_ack,
    pop_assignment,
    pop_look,
    pull,
    query,
    recall,
    reply,
    retry,
    send,
    sequences,
    status,
    transaction,
)
from cometmq.requests import Entry
from cometmq.wire import headers as h
from cometmq.wire.codes import RequestCode as C

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

_CHECKS = {
    "topic": names.check_topic,
    "group": names.check_group,
    "groupName": names.check_group,
    "consumerGroup": names.check_group,
    "producerGroup": names.check_group,
    "srcGroup": names.check_group,
    "destGroup": names.check_group,
}


def _named(kind: type[msgspec.Struct]) -> Callable[[dict[str, str]], Any]:
    """Reads a header and checks the names in it; an optional one may be empty (C++ does that)."""
    fields = [
        (field.name, _CHECKS[field.name], field.required)
        for field in msgspec.structs.fields(kind)
        if field.name in _CHECKS
    ]

    def parse(ext: dict[str, str]) -> Any:
        header = h.parse(kind, ext)
        for name, check, is_required in fields:
            value = getattr(header, name)
            if value or is_required:
                check(value)
        return header

    return parse


TABLE: dict[int, Entry[Broker]] = {
    # messages in and out
    C.SEND_MESSAGE: Entry(send.send, h.SendHeader),
    C.SEND_MESSAGE_V2: Entry(send.send, h.parse_send_v2),
    C.SEND_BATCH_MESSAGE: Entry(send.send, h.parse_send_v2),
    C.SEND_REPLY_MESSAGE: Entry(reply.send_reply, h.SendHeader),
    C.SEND_REPLY_MESSAGE_V2: Entry(reply.send_reply, h.parse_send_v2),
    C.PULL_MESSAGE: Entry(pull.pull, h.PullHeader),
    C.LITE_PULL_MESSAGE: Entry(pull.pull, h.PullHeader),
    C.CONSUMER_SEND_MSG_BACK: Entry(retry.send_back, h.SendBackHeader),
    C.END_PRODUCERS: Entry(sequences.end_producers, _named(h.EndProducersHeader)),
    C.RECALL_MESSAGE: Entry(recall.recall, _named(h.RecallHeader)),
    C.END_TRANSACTION: Entry(transaction.end_transaction, _named(h.EndTransactionHeader)),
    C.RESUME_CHECK_HALF_MESSAGE: Entry(transaction.resume_checks, _named(h.ResumeChecksHeader)),
    # pop: messages without queues
    C.POP_MESSAGE: Entry(pop.pop, _named(h.PopHeader)),
    C.ACK_MESSAGE: Entry(pop_ack.ack, _named(h.AckHeader)),
    C.BATCH_ACK_MESSAGE: Entry(pop_ack.batch_ack),
    C.CHANGE_MESSAGE_INVISIBLETIME: Entry(
        pop_ack.change_invisible, _named(h.ChangeInvisibleHeader)
    ),
    C.PEEK_MESSAGE: Entry(pop_look.peek, _named(h.PeekHeader)),
    C.NOTIFICATION: Entry(pop_look.notification, _named(h.NotificationHeader)),
    C.POLLING_INFO: Entry(pop_look.polling_info, _named(h.PollingInfoHeader)),
    C.QUERY_ASSIGNMENT: Entry(pop_assignment.query_assignment),
    C.SET_MESSAGE_REQUEST_MODE: Entry(pop_assignment.set_mode),
    C.GET_ALL_MESSAGE_REQUEST_MODE: Entry(pop_assignment.all_modes),
    # questions
    C.QUERY_MESSAGE: Entry(query.by_key, _named(h.QueryMessageHeader)),
    C.VIEW_MESSAGE_BY_ID: Entry(query.by_log_offset, h.ViewMessageHeader),
    C.QUERY_CONSUMER_OFFSET: Entry(query.consumer_offset, _named(h.QueryConsumerOffsetHeader)),
    C.UPDATE_CONSUMER_OFFSET: Entry(query.commit_offset, _named(h.UpdateConsumerOffsetHeader)),
    C.SEARCH_OFFSET_BY_TIMESTAMP: Entry(query.offset_by_time, _named(h.SearchOffsetHeader)),
    C.GET_MAX_OFFSET: Entry(query.max_offset, _named(h.QueueHeader)),
    C.GET_MIN_OFFSET: Entry(query.min_offset, _named(h.QueueHeader)),
    C.GET_EARLIEST_MSG_STORETIME: Entry(query.earliest_time, _named(h.QueueHeader)),
    # clients
    C.HEART_BEAT: Entry(heartbeat.heartbeat),
    C.UNREGISTER_CLIENT: Entry(heartbeat.unregister, _named(h.UnregisterClientHeader)),
    C.GET_CONSUMER_LIST_BY_GROUP: Entry(heartbeat.member_ids, _named(h.ConsumerGroupHeader)),
    C.LOCK_BATCH_MQ: Entry(heartbeat.lock),
    C.UNLOCK_BATCH_MQ: Entry(heartbeat.unlock),
    C.CHECK_CLIENT_CONFIG: Entry(heartbeat.check_client_config),
    # topics, groups, offsets, settings
    C.UPDATE_AND_CREATE_TOPIC: Entry(admin.create_topic, _named(h.CreateTopicHeader)),
    C.UPDATE_AND_CREATE_TOPIC_LIST: Entry(admin.create_topics),
    C.DELETE_TOPIC_IN_BROKER: Entry(admin.delete_topic, _named(h.TopicHeader)),
    C.GET_ALL_TOPIC_CONFIG: Entry(admin.all_topics),
    C.GET_TOPIC_CONFIG: Entry(admin.one_topic, _named(h.TopicHeader)),
    C.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Entry(admin.system_topics),
    C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Entry(admin.create_group),
    C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Entry(admin.create_groups),
    C.DELETE_SUBSCRIPTIONGROUP: Entry(admin.delete_group, _named(h.GroupNameHeader)),
    C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Entry(admin.all_groups),
    C.GET_SUBSCRIPTIONGROUP_CONFIG: Entry(admin.one_group, _named(h.GroupHeader)),
    C.GET_ALL_CONSUMER_OFFSET: Entry(admin.all_offsets),
    C.INVOKE_BROKER_TO_RESET_OFFSET: Entry(admin.reset_offset, _named(h.ResetOffsetHeader)),
    C.CLONE_GROUP_OFFSET: Entry(admin.clone_offsets, _named(h.CloneOffsetHeader)),
    C.GET_BROKER_CONFIG: Entry(admin.get_config),
    C.UPDATE_BROKER_CONFIG: Entry(admin.update_config),
    C.TRIGGER_DELETE_FILES: Entry(admin.clean_files),
    C.CLEAN_EXPIRED_CONSUMEQUEUE: Entry(admin.clean_files),
    C.DELETE_EXPIRED_COMMITLOG: Entry(admin.clean_files),
    C.CLEAN_UNUSED_TOPIC: Entry(admin.clean_unused_topics),
    # delays and timers, as a follower asks for them
    C.GET_ALL_DELAY_OFFSET: Entry(admin.all_delay_offsets),
    C.GET_TIMER_CHECK_POINT: Entry(recall.timer_check_point),
    C.GET_TIMER_METRICS: Entry(recall.timer_metrics),
    # status
    C.GET_BROKER_RUNTIME_INFO: Entry(status.runtime),
    C.GET_TOPIC_STATS_INFO: Entry(status.topic_stats, _named(h.TopicHeader)),
    C.GET_CONSUME_STATS: Entry(status.consume_stats, _named(h.ConsumeStatsHeader)),
    C.GET_CONSUMER_CONNECTION_LIST: Entry(
        status.consumer_connections, _named(h.ConsumerGroupHeader)
    ),
    C.GET_PRODUCER_CONNECTION_LIST: Entry(
        status.producer_connections, _named(h.ProducerGroupHeader)
    ),
    C.GET_ALL_PRODUCER_INFO: Entry(status.all_producers),
    C.QUERY_TOPIC_CONSUME_BY_WHO: Entry(status.groups_of_topic, _named(h.TopicHeader)),
    C.QUERY_TOPICS_BY_CONSUMER: Entry(status.topics_of_group, _named(h.GroupHeader)),
    C.QUERY_SUBSCRIPTION_BY_CONSUMER: Entry(
        status.subscription_of_group, _named(h.SubscriptionHeader)
    ),
    C.QUERY_CONSUME_TIME_SPAN: Entry(status.time_span, _named(h.TimeSpanHeader)),
    C.VIEW_BROKER_STATS_DATA: Entry(status.stats_item, h.StatsHeader),
    C.GET_CONSUMER_RUNNING_INFO: Entry(ask_clients.running_info, _named(h.ClientOfGroupHeader)),
    C.CONSUME_MESSAGE_DIRECTLY: Entry(ask_clients.consume_directly, _named(h.ClientOfGroupHeader)),
}
