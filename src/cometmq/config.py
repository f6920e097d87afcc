"""Settings of the programs: frozen Structs, and the one table that names them.

Owns: every setting's RocketMQ key, type, limits, meaning and whether it may change at run time.
The table reads broker.conf and namesrv.conf, answers "get config", checks "update config" and makes
docs/config.md, so the four can't part. One rule: a key that isn't in the table is an error that
suggests the nearest one; a key that RocketMQ has and we don't need is accepted and said to be idle.
"""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import msgspec

from cometmq.errors import ConfigError

MIB = 1024 * 1024


class BrokerConfig(msgspec.Struct, frozen=True):
    """A broker's settings; defaults are RocketMQ's unless the table says otherwise."""

    # identity and addresses
    cluster: str = "DefaultCluster"
    name: str = "broker-a"
    broker_id: int = 0
    role: str = "ASYNC_MASTER"
    bind_host: str = "127.0.0.1"
    listen_port: int = 10911
    advertised_host: str = ""
    namesrv: str = ""
    permission: int = 6
    region: str = "DefaultRegion"
    register_period_ms: int = 30_000
    register_timeout_ms: int = 24_000
    # topics and groups
    is_topic_auto_created: bool = True
    default_queue_count: int = 8
    is_group_auto_created: bool = True
    is_cluster_topic_enabled: bool = True
    is_broker_topic_enabled: bool = True
    is_trace_topic_enabled: bool = False
    trace_topic: str = "RMQ_SYS_TRACE_TOPIC"
    is_trace_on: bool = True
    is_reply_stored: bool = True
    notify_members: bool = True
    max_topics: int = 100_000
    max_groups: int = 100_000
    # sending
    accept_sends_from_ms: int = 0
    max_message_bytes: int = 4 * MIB
    send_queue_wait_ms: int = 200
    append_stall_ms: int = 1_000
    is_fast_failure_enabled: bool = True
    rejects_transactions: bool = False
    transaction_timeout_ms: int = 6_000
    transaction_check_interval_ms: int = 30_000
    transaction_check_max: int = 15
    transaction_op_bytes: int = 4096
    transaction_op_interval_ms: int = 0
    sync_flush_timeout_ms: int = 5_000
    max_producer_sequences: int = 100_000
    producer_sequence_hours: int = 168
    # pulling
    is_long_polling_enabled: bool = True
    short_polling_ms: int = 1_000
    is_lite_pull_enabled: bool = True
    max_parked_pulls: int = 100_000
    max_pull_count_memory: int = 32
    max_pull_bytes_memory: int = 256 * 1024
    max_pull_count_disk: int = 8
    max_pull_bytes_disk: int = 64 * 1024
    in_memory_ratio_percent: int = 40
    is_property_filter_enabled: bool = True
    filters_retries: bool = False
    max_sql_filters: int = 10_000
    sql_filter_kept_ms: int = 86_400_000
    # groups and offsets
    save_offsets_ms: int = 5_000
    client_expiry_ms: int = 120_000
    # store
    store_path: str = ""
    log_file_bytes: int = 1024 * MIB
    queue_file_bytes: int = 6_000_000
    index_slots: int = 5_000_000
    index_entries: int = 20_000_000
    is_index_enabled: bool = True
    flush: str = "ASYNC_FLUSH"
    flush_interval_ms: int = 500
    flush_least_pages: int = 4
    flush_thorough_ms: int = 10_000
    max_unflushed_bytes: int = 0
    queue_flush_interval_ms: int = 1_000
    queue_flush_least_pages: int = 2
    queue_flush_thorough_ms: int = 60_000
    is_staged: bool = False
    stage_count: int = 5
    stage_bytes: int = 32 * MIB
    commit_interval_ms: int = 200
    commit_least_pages: int = 4
    commit_thorough_ms: int = 200
    file_reserved_hours: int = 72
    delete_when: str = "04"
    disk_max_used_percent: int = 75
    disk_clean_forcibly_percent: int = 85
    disk_warning_percent: int = 90
    clean_forcibly: bool = True
    clean_interval_ms: int = 10_000
    delete_batch: int = 10
    verify_crc_on_recover: bool = True
    is_durable_cut_allowed: bool = False
    delay_levels: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    save_delays_ms: int = 10_000
    # timers
    is_timer_enabled: bool = True
    timer_precision_ms: int = 1_000
    timer_max_delay_seconds: int = 259_200
    timer_window_slots: int = 172_800
    timer_most_per_slot: int = 2**31 - 1
    timer_flush_interval_ms: int = 1_000
    timer_log_file_bytes: int = 100 * MIB
    # pop
    revive_queue_count: int = 8
    pop_retry_percent: int = 20
    is_pop_retry_v2: bool = False
    reads_pop_retry_v1: bool = True
    shows_pop_retry_topic: bool = False
    starts_pops_in_memory: bool = True
    is_pop_limited: bool = False
    pop_most_in_flight: int = 10_000
    max_polls: int = 100_000
    max_polls_of_group: int = 1_024
    request_mode: str = "PULL"
    pop_share_count: int = -1
    is_server_balancing: bool = True
    is_recall_enabled: bool = False
    # limits of the server
    is_compiled_path_enabled: bool = True
    max_open_queue_files: int = 0
    max_connections: int = 10_000
    max_frame_bytes: int = 16 * MIB
    max_queued_frames: int = 10_000
    max_outbox_bytes: int = 64 * MIB
    idle_timeout_ms: int = 120_000
    frame_timeout_ms: int = 30_000


class NameServerConfig(msgspec.Struct, frozen=True):
    """A name server's settings."""

    bind_host: str = "127.0.0.1"
    listen_port: int = 9876
    kv_path: str = ""
    is_order_topic_enabled: bool = False
    returns_order_topics: bool = True
    scan_interval_ms: int = 5_000
    broker_expiry_ms: int = 120_000
    is_topic_list_enabled: bool = True
    is_all_topic_list_enabled: bool = True
    deletes_missing_topics: bool = False
    max_topics: int = 1_000_000
    max_brokers: int = 10_000
    max_kv_entries: int = 100_000
    max_connections: int = 10_000
    max_frame_bytes: int = 64 * MIB
    max_queued_frames: int = 10_000
    max_outbox_bytes: int = 64 * MIB
    idle_timeout_ms: int = 120_000
    frame_timeout_ms: int = 30_000


class Key(msgspec.Struct, frozen=True):
    """One row of the table: RocketMQ's key, our field, what it means, what it may be."""

    name: str
    field: str
    note: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    is_live: bool = False
    is_ours: bool = False
    """RocketMQ has no such key; it is CometMQ's own."""


# fmt: off
BROKER_KEYS: tuple[Key, ...] = (
    Key("brokerClusterName", "cluster", "name of the cluster"),
    Key("brokerName", "name", "name of this broker; replicas share it"),
    Key("brokerId", "broker_id", "0 is the leader", 0),
    Key("brokerRole", "role", "role", choices=("ASYNC_MASTER", "SYNC_MASTER")),
    Key("bindAddress", "bind_host", "address to listen on"),
    Key("listenPort", "listen_port", "port; 0 picks a free one; the VIP port is this minus 2", 0, 65_535),
    Key("brokerIP1", "advertised_host", "address told to clients; empty: the address listened on"),
    Key("namesrvAddr", "namesrv", "name servers, `host:port;host:port`"),
    Key("brokerPermission", "permission", "bits: 4 read, 2 write", 0, 7, is_live=True),
    Key("regionId", "region", "region put into each message"),
    Key("registerNameServerPeriod", "register_period_ms", "ms between registrations", 10_000, 60_000),
    Key("registerBrokerTimeoutMills", "register_timeout_ms", "ms until a registration counts as failed", 100, 600_000),
    Key("autoCreateTopicEnable", "is_topic_auto_created", "create unknown topics on send", is_live=True),
    Key("defaultTopicQueueNums", "default_queue_count", "queues of TBW102, the template of new topics", 1, 1024),
    Key("autoCreateSubscriptionGroup", "is_group_auto_created", "create unknown groups", is_live=True),
    Key("clusterTopicEnable", "is_cluster_topic_enabled", "topic named after the cluster is usable"),
    Key("brokerTopicEnable", "is_broker_topic_enabled", "topic named after the broker is usable"),
    Key("traceTopicEnable", "is_trace_topic_enabled", "own the trace topic"),
    Key("msgTraceTopicName", "trace_topic", "name of the trace topic"),
    Key("traceOn", "is_trace_on", "put TRACE_ON=true into messages"),
    Key("storeReplyMessageEnable", "is_reply_stored", "store replies as well as pushing them"),
    Key("notifyConsumerIdsChangedEnable", "notify_members", "tell members when their group changes", is_live=True),
    Key("maxTopics", "max_topics", "topics this broker will hold at most", 1, is_ours=True),
    Key("maxGroups", "max_groups", "subscription groups this broker will hold at most", 1, is_ours=True),
    Key("startAcceptSendRequestTimeStamp", "accept_sends_from_ms", "refuse sends before this time (ms)", 0, is_live=True),
    Key("maxMessageSize", "max_message_bytes", "largest body in bytes", 1, 512 * MIB, is_live=True),
    Key("waitTimeMillsInSendQueue", "send_queue_wait_ms", "a send that waited longer is refused as busy", 1, 600_000, is_live=True),
    Key("osPageCacheBusyTimeOutMills", "append_stall_ms", "an append or a flush that took longer makes sends busy", 1, 600_000, is_live=True),
    Key("brokerFastFailureEnable", "is_fast_failure_enabled", "refuse sends that waited too long", is_live=True),
    Key("rejectTransactionMessage", "rejects_transactions", "refuse half messages", is_live=True),
    Key("transactionTimeOut", "transaction_timeout_ms", "ms after which the producer of an open transaction is asked", 1, 86_400_000, is_live=True),
    Key("transactionCheckInterval", "transaction_check_interval_ms", "ms between looks for open transactions", 100, 86_400_000, is_live=True),
    Key("transactionCheckMax", "transaction_check_max", "times a producer is asked; then the message goes to TRANS_CHECK_MAX_TIME_TOPIC", 1, 1_000_000, is_live=True),
    Key("transactionOpBatchInterval", "transaction_op_interval_ms", "ms in which commits are gathered into one record; after a crash the log is asked for those that it took; 0: each is written in one piece with its message, and RocketMQ 4.9 can read it; RocketMQ's own default is 3000", 0, 60_000, is_live=True),
    Key("transactionOpMsgMaxSize", "transaction_op_bytes", "bytes of such a record; more are written at once", 1, 65_536, is_live=True),
    Key("syncFlushTimeout", "sync_flush_timeout_ms", "ms until a synchronous flush answers FLUSH_DISK_TIMEOUT", 1, 600_000, is_live=True),
    Key("maxProducerSequences", "max_producer_sequences", "producers that number their messages (PRODUCER_SEQ), counted per queue; one more is refused", 1, 10_000_000, is_ours=True),
    Key("producerSequenceHours", "producer_sequence_hours", "hours after which a producer that sent nothing to a queue is forgotten there", 1, 87_600, is_ours=True),
    Key("longPollingEnable", "is_long_polling_enabled", "hold pulls until a message arrives", is_live=True),
    Key("shortPollingTimeMills", "short_polling_ms", "hold in ms when long polling is off", 1, 600_000, is_live=True),
    Key("litePullMessageEnable", "is_lite_pull_enabled", "serve lite pull consumers", is_live=True),
    Key("compiledPathEnable", "is_compiled_path_enabled", "serve ordinary sends and pulls by compiled code where it was built", is_ours=True),
    Key("maxParkedPulls", "max_parked_pulls", "held pulls at most; one more is answered at once", 1, is_ours=True),
    Key("maxTransferCountOnMessageInMemory", "max_pull_count_memory", "messages per pull, recent data", 1, 100_000, is_live=True),
    Key("maxTransferBytesOnMessageInMemory", "max_pull_bytes_memory", "bytes per pull, recent data", 1, 128 * MIB, is_live=True),
    Key("maxTransferCountOnMessageInDisk", "max_pull_count_disk", "messages per pull, old data", 1, 100_000, is_live=True),
    Key("maxTransferBytesOnMessageInDisk", "max_pull_bytes_disk", "bytes per pull, old data", 1, 128 * MIB, is_live=True),
    Key("accessMessageInMemoryMaxRatio", "in_memory_ratio_percent", "share of RAM that counts as recent", 1, 100),
    Key("enablePropertyFilter", "is_property_filter_enabled", "filters by SQL92 expressions may be used; RocketMQ's own default is false", is_live=True),
    Key("filterSupportRetry", "filters_retries", "an SQL92 subscription of a retry topic filters by the expressions on the topics that its messages came from", is_live=True),
    Key("maxSqlFilters", "max_sql_filters", "SQL92 filters of groups kept at most, dead ones included", 1, is_ours=True),
    Key("filterDataCleanTimeSpan", "sql_filter_kept_ms", "ms that the filter of a group that went is kept", 1_000),
    Key("flushConsumerOffsetInterval", "save_offsets_ms", "ms between saves of consumer offsets", 100, 3_600_000),
    Key("channelExpiredTimeout", "client_expiry_ms", "a client silent for this long is dropped", 1000, 86_400_000),
    Key("storePathRootDir", "store_path", "store directory"),
    Key("mappedFileSizeCommitLog", "log_file_bytes", "bytes per commit-log file", 4096, 8 * 1024 * MIB),
    Key("mappedFileSizeConsumeQueue", "queue_file_bytes", "bytes per consume-queue file, a multiple of 20", 20, 1024 * MIB),
    Key("maxHashSlotNum", "index_slots", "slots per index file", 1, 500_000_000),
    Key("maxIndexNum", "index_entries", "entries per index file", 2, 1_000_000_000),
    Key("messageIndexEnable", "is_index_enabled", "index keys"),
    Key("flushDiskType", "flush", "when a send counts as stored", choices=("ASYNC_FLUSH", "SYNC_FLUSH")),
    Key("flushIntervalCommitLog", "flush_interval_ms", "ms between asynchronous flushes", 1, 600_000),
    Key("flushCommitLogLeastPages", "flush_least_pages", "dirty 4 KiB pages that make a flush worth it", 0, 1_000_000),
    Key("flushCommitLogThoroughInterval", "flush_thorough_ms", "ms after which anything dirty is flushed", 1, 3_600_000),
    Key("maxUnflushedBytes", "max_unflushed_bytes", "ASYNC_FLUSH: with more than this not on disk a stalled flush makes sends busy; 0: a twentieth of RAM", 0, is_ours=True),
    Key("flushIntervalConsumeQueue", "queue_flush_interval_ms", "ms between flushes of consume queues", 1, 600_000),
    Key("flushConsumeQueueLeastPages", "queue_flush_least_pages", "dirty pages that make it worth it", 0, 1_000_000),
    Key("flushConsumeQueueThoroughInterval", "queue_flush_thorough_ms", "ms after which all queues are flushed", 1, 3_600_000),
    Key("transientStorePoolEnable", "is_staged", "write messages to locked memory first and commit them to the page cache in batches: sends don't wait for a busy page cache. A killed process loses acknowledged messages of about the last 200 ms; consumers see a message once it is committed. Only with ASYNC_FLUSH"),
    Key("transientStorePoolSize", "stage_count", "buffers of such memory; with all of them uncommitted, sends are refused as busy", 2, 1000),
    Key("transientStorePoolBytes", "stage_bytes", "bytes per buffer; RocketMQ takes a whole commit-log file", 65_536, 1024 * MIB, is_ours=True),
    Key("commitIntervalCommitLog", "commit_interval_ms", "ms between commits of less than commitCommitLogLeastPages", 1, 600_000),
    Key("commitCommitLogLeastPages", "commit_least_pages", "uncommitted 4 KiB pages that are committed at once", 0, 1_000_000),
    Key("commitCommitLogThoroughInterval", "commit_thorough_ms", "ms after which anything uncommitted is committed, if longer than commitIntervalCommitLog", 1, 600_000),
    Key("fileReservedTime", "file_reserved_hours", "hours that a log file is kept", 1, 876_000, is_live=True),
    Key("deleteWhen", "delete_when", "hours of the day for deleting, `04` or `04;16`", is_live=True),
    Key("diskMaxUsedSpaceRatio", "disk_max_used_percent", "above: delete expired files at any hour", 10, 95, is_live=True),
    Key("diskSpaceCleanForciblyRatio", "disk_clean_forcibly_percent", "above: delete also unexpired files", 30, 85, is_live=True),
    Key("diskSpaceWarningLevelRatio", "disk_warning_percent", "above: refuse sends", 35, 90, is_live=True),
    Key("cleanFileForciblyEnable", "clean_forcibly", "whether unexpired files may be deleted", is_live=True),
    Key("cleanResourceInterval", "clean_interval_ms", "ms between looks at what may be deleted", 100, 3_600_000),
    Key("deleteFileBatchMax", "delete_batch", "log files deleted in one look", 1, 10_000, is_live=True),
    Key("checkCRCOnRecover", "verify_crc_on_recover", "check bodies when recovering"),
    Key("cutDamagedLogEnable", "is_durable_cut_allowed", "recovery may cut durable messages behind a damaged place", is_ours=True),
    Key("messageDelayLevel", "delay_levels", "delay levels, e.g. `1s 5s 1m 2h`"),
    Key("flushDelayOffsetInterval", "save_delays_ms", "ms between saves of how far the delay levels were delivered; a killed broker delivers this much again", 10, 3_600_000),
    Key("timerWheelEnable", "is_timer_enabled", "take messages for any time; off, they are refused, and those stored before wait"),
    Key("timerPrecisionMs", "timer_precision_ms", "ms that a slot of the timer wheel covers: no message is early, none later than this; can't be changed while messages wait", 10, 1000),
    Key("timerMaxDelaySec", "timer_max_delay_seconds", "seconds that a message may be delayed at most; fileReservedTime must keep it that long", 1, 31_536_000, is_live=True),
    Key("timerRollWindowSlot", "timer_window_slots", "slots ahead that a message is put at most; later ones are stored again on the way", 2, 604_740),
    Key("timerCongestNumEachSlot", "timer_most_per_slot", "messages of one slot above which some are refused, and from twice as many all", 1, 2**31 - 1, is_live=True),
    Key("timerFlushIntervalMs", "timer_flush_interval_ms", "ms between flushes of the timers' files", 10, 600_000),
    Key("mappedFileSizeTimerLog", "timer_log_file_bytes", "bytes per timer-log file", 68, 1024 * MIB),
    Key("recallMessageEnable", "is_recall_enabled", "producers may take back a timed message before its time", is_live=True),
    Key("reviveQueueNum", "revive_queue_count", "queues of the topic that keeps pop's checkpoints; a store that has them already keeps its own number", 1, 64),
    Key("popFromRetryProbability", "pop_retry_percent", "percent of pops that look into the group's retry topic first; others look there last", 0, 100, is_live=True),
    Key("enableRetryTopicV2", "is_pop_retry_v2", "pop's retry topics are named %RETRY%group+topic, not %RETRY%group_topic", is_live=True),
    Key("retrieveMessageFromPopRetryTopicV1", "reads_pop_retry_v1", "with enableRetryTopicV2: every second pop reads the old retry topic", is_live=True),
    Key("popResponseReturnActualRetryTopic", "shows_pop_retry_topic", "popped retries keep the name of the retry topic", is_live=True),
    Key("initPopOffsetByCheckMsgInMem", "starts_pops_in_memory", "a new group that wants only new messages gets all while the first is still in memory", is_live=True),
    Key("enablePopMessageThreshold", "is_pop_limited", "stop popping a queue with popInflightMessageThreshold messages out", is_live=True),
    Key("popInflightMessageThreshold", "pop_most_in_flight", "messages of one queue that a group may hold unacknowledged", 1, is_live=True),
    Key("maxPopPollingSize", "max_polls", "pops that wait for messages at most", 0, is_live=True),
    Key("popPollingSize", "max_polls_of_group", "pops of one group and queue that wait at most", 0, is_live=True),
    Key("defaultMessageRequestMode", "request_mode", "how consumers that let the broker assign queues read them, unless set for their group", choices=("PULL", "POP"), is_live=True),
    Key("defaultPopShareQueueNum", "pop_share_count", "other clients whose queues a popping client shares; -1: all", -1, is_live=True),
    Key("serverLoadBalancerEnable", "is_server_balancing", "the broker divides queues among clients that ask it to; off, each is told all", is_live=True),
    Key("maxOpenQueueFiles", "max_open_queue_files", "consume-queue files in memory at once, others are opened when needed; 0: 48000, or what vm.max_map_count allows", 0, 10_000_000, is_ours=True),
    Key("maxConnections", "max_connections", "connections at most", 1, is_ours=True),
    Key("maxFrameBytes", "max_frame_bytes", "largest frame, length word included", 4096, 1024 * MIB, is_ours=True),
    Key("maxQueuedFrames", "max_queued_frames", "requests of one connection waiting at most", 1, is_ours=True),
    Key("maxOutboxBytes", "max_outbox_bytes", "bytes waiting for one slow reader; above it is dropped", 65_536, is_ours=True),
    Key("serverChannelMaxIdleTimeMills", "idle_timeout_ms", "ms after which a silent connection is closed", 1000, 86_400_000, is_ours=True),
    Key("frameTimeoutMills", "frame_timeout_ms", "ms in which a begun frame must be complete", 100, 86_400_000, is_ours=True),
)
# fmt: on

# fmt: off
NAMESERVER_KEYS: tuple[Key, ...] = (
    Key("bindAddress", "bind_host", "address to listen on"),
    Key("listenPort", "listen_port", "port; 0 picks a free one", 0, 65_535),
    Key("kvConfigPath", "kv_path", "file that keeps the key-value settings"),
    Key("orderMessageEnable", "is_order_topic_enabled", "routes tell the order config", is_live=True),
    Key("returnOrderTopicConfigToBroker", "returns_order_topics", "brokers are told the order topics", is_live=True),
    Key("scanNotActiveBrokerInterval", "scan_interval_ms", "ms between looks for dead brokers", 100, 600_000),
    Key("brokerExpiryMills", "broker_expiry_ms", "a broker silent for this long is dropped", 1000, 86_400_000, is_ours=True),
    Key("enableTopicList", "is_topic_list_enabled", "answer lists of topics by cluster", is_live=True),
    Key("enableAllTopicList", "is_all_topic_list_enabled", "answer the list of all topics", is_live=True),
    Key("deleteTopicWithBrokerRegistration", "deletes_missing_topics", "topics missing from a registration go", is_live=True),
    Key("maxTopics", "max_topics", "topics at most", 1, is_ours=True),
    Key("maxBrokers", "max_brokers", "brokers at most", 1, is_ours=True),
    Key("maxKvEntries", "max_kv_entries", "key-value settings at most", 1, is_ours=True),
    Key("maxConnections", "max_connections", "connections at most", 1, is_ours=True),
    Key("maxFrameBytes", "max_frame_bytes", "largest frame, length word included", 4096, 1024 * MIB, is_ours=True),
    Key("maxQueuedFrames", "max_queued_frames", "requests of one connection waiting at most", 1, is_ours=True),
    Key("maxOutboxBytes", "max_outbox_bytes", "bytes waiting for one slow reader; above it is dropped", 65_536, is_ours=True),
    Key("serverChannelMaxIdleTimeMills", "idle_timeout_ms", "ms after which a silent connection is closed", 1000, 86_400_000, is_ours=True),
    Key("frameTimeoutMills", "frame_timeout_ms", "ms in which a begun frame must be complete", 100, 86_400_000, is_ours=True),
)
# fmt: on

IDLE_BROKER_KEYS = frozenset(
    """accessMessageInMemoryMaxRatioInSlave aclEnable adminBrokerThreadPoolNums
    adminBrokerThreadPoolQueueCapacity allAckInSyncStateSet asyncLearner autoDeleteUnusedStats
    brokerConfigPath brokerContainerIP brokerElectionPriority brokerFastFailureEnable brokerHeartbeatInterval
    brokerIP2 brokerNotActiveTimeoutMillis clearRetryTopicWhenDeleteTopic clientAsyncSemaphoreValue
    clientCallbackExecutorThreads clientManageThreadPoolNums clientManagerThreadPoolQueueCapacity
    clientOnewaySemaphoreValue clientWorkerThreads compatibleWithOldNameSrv compressedRegister
    configBlackList configManagerVersion consumerFallbehindThreshold consumerManageThreadPoolNums
    consumerManagerThreadPoolQueueCapacity consumerOffsetUpdateVersionStep controllerAddr
    dLegerGroup dLegerPeers dLegerSelfId
    defaultQueryMaxNum deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval
    destroyMapedFileIntervalForcibly disableConsumeIfConsumerReadSlowly disappearTimeAfterStart
    duplicationEnable enableAutoInSyncReplicas enableCalcFilterBitMap enableCompaction
    enableConsumeQueueExt enableControllerMode enableDLegerCommitLog enableLmq
    enableMixedMessageType enableMultiDispatch enablePopBufferMerge
    enableRemoteEscape enableScheduleAsyncDeliver
    enableScheduleMessageStats enableSlaveActingMaster enabledAppendPropCRC
    endTransactionPoolQueueCapacity endTransactionThreadPoolNums expectConsumerNumUseFilter
    fastFailIfNoBufferInStorePool fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer
    filterServerNums flushCommitLogTimed flushConsumeQueueTimed
    flushConsumerOffsetHistoryInterval forceRegister
    forceVerifyPropCRC haFlowControlEnable haHousekeepingInterval haListenPort haMasterAddress
    haMaxGapNotInSync haMaxTimeSlaveNotCatchup haSendHeartbeatInterval haSlaveFallbehindMax
    haTransferBatchSize heartbeatThreadPoolNums heartbeatThreadPoolQueueCapacity highSpeedMode
    inSyncReplicas initAuthenticationUser innerClientAuthenticationCredentials
    litePullMessageThreadPoolNums litePullThreadPoolQueueCapacity lockInStrictMode
    longPollingEnableOld maxDelayTime maxErrorRateOfBloomFilter maxFilterMessageSize
    maxMsgsNumBatch messageIndexSafe messageStorePlugIn metricsExporterType
    metricsPromExporterPort migrateAuthFromV1Enabled minInSyncReplicas offsetCheckInSlave
    popConsumerFSServiceInit popConsumerKVServiceEnable popConsumerKVServiceInit
    popCkStayBufferTime popCkStayBufferTimeOut
    processReplyMessageThreadPoolNums pullMessageThreadPoolNums pullThreadPoolQueueCapacity
    putMessageFutureThreadPoolNums putMessageTimeout putMsgIndexHightWater queryMessageThreadPoolNums
    queryThreadPoolQueueCapacity readUnCommitted recoverConcurrently
    recoverThreadPoolNums redeleteHangedFileInterval replicasPerDiskPartition
    replyThreadPoolQueueCapacity reviveInterval
    reviveMaxSlow reviveScanTime rocketmqHome sendMessageThreadPoolNums
    sendThreadPoolQueueCapacity serverAsyncSemaphoreValue serverCallbackExecutorThreads
    serverChannelMaxIdleTimeSeconds serverOnewaySemaphoreValue
    serverPooledByteBufAllocatorEnable serverSelectorThreads serverSocketBacklog
    serverSocketRcvBufSize serverSocketSndBufSize serverWorkerThreads shortPollingEnable skipPreOnline
    slaveReadEnable slaveTimeout storePathBrokerIdentity storePathCommitLog storePathEpochFile
    storeType subscriptionExpiredTimeout syncFromLastFile totalReplicas transferMsgByHeap
    travelCqFileNumWhenGetMessage useServerSideResetOffset useEpollNativeSelector
    useReentrantLockWhenPutMessage validateSystemTopicWhenUpdateTopic
    waitTimeMillsInAckQueue waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue
    waitTimeMillsInLitePullQueue waitTimeMillsInPullQueue waitTimeMillsInTransactionQueue
    warmMapedFileEnable writeWithoutMmap timerCheckMetricsWhen
    timerEnableCheckMetrics timerEnableDisruptor timerEnableRetryUntilSuccess
    timerGetMessageThreadNum timerInterceptDelayLevel timerMetricSmallThreshold
    timerProgressLogIntervalMs timerPutMessageThreadNum timerWarmEnable
    appendAckAsync enableNotifyAfterPopOrderLockRelease enableNotifyBeforePopCalculateLag
    enablePopBatchAck enablePopLog enablePopMetrics enableSkipLongAwaitingAck
    loadBalancePollNameServerInterval loadBalanceProcessorThreadPoolNums
    loadBalanceThreadPoolQueueCapacity popCkMaxBufferSize popCkOffsetMaxQueueSize
    popConsumerKVServiceLog popLongPollingForceNotifyInterval popPollingMapExpireTimeSeconds
    popPollingMapSize popReviveMaxAttemptTimes popReviveMaxReturnSizePerRead reviveAckWaitMs
    skipWhenCKRePutReachMaxTimes""".split()
)
"""Keys that RocketMQ's broker knows and this version doesn't act on: accepted, said to be idle."""

REFUSED_BROKER_KEYS = {
    "aclEnable": "false",
    "authenticationEnabled": "false",
    "authorizationEnabled": "false",
    "enableControllerMode": "false",
    "enableDLegerCommitLog": "false",
    "enableLmq": "false",
    "enableMultiDispatch": "false",
    "messageStorePlugIn": "",
    "storeType": "default",
    "configManagerVersion": "v1",
}
"""Keys that promise something this version does not do, with the one value that is harmless: access
control that is silently off, or a store in another format, would be worse than no start."""

IDLE_NAMESERVER_KEYS = frozenset(
    """rocketmqHome configStorePath productEnvName clusterTest clientRequestThreadPoolNums
    clientRequestThreadPoolQueueCapacity defaultThreadPoolNums defaultThreadPoolQueueCapacity
    unRegisterBrokerQueueCapacity supportActingMaster notifyMinBrokerIdChanged
    enableControllerInNamesrv needWaitForService waitSecondsForService configBlackList
    serverWorkerThreads serverSelectorThreads serverCallbackExecutorThreads
    serverOnewaySemaphoreValue serverAsyncSemaphoreValue serverChannelMaxIdleTimeSeconds
    serverSocketSndBufSize serverSocketRcvBufSize serverPooledByteBufAllocatorEnable
    useEpollNativeSelector controllerType""".split()
)

C = TypeVar("C", BrokerConfig, NameServerConfig)


def _table(kind: type[Any]) -> tuple[tuple[Key, ...], frozenset[str]]:
    if kind is BrokerConfig:
        return BROKER_KEYS, IDLE_BROKER_KEYS
    return NAMESERVER_KEYS, IDLE_NAMESERVER_KEYS


def apply(config: C, settings: dict[str, str], *, source: str, live_only: bool = False) -> C:
    """A new config with these keys set; ConfigError and no change if any of them is wrong.

    `live_only` is the rule for updates over the wire: an allow-list, so that nobody can point the
    store, a path or an address elsewhere at run time.
    """
    keys, idle = _table(type(config))
    rows = {row.name: row for row in keys}
    changes: dict[str, Any] = {}
    for name, text in settings.items():
        row = rows.get(name)
        if row is None:
            if not live_only and type(config) is BrokerConfig:
                _check_promise(name, text.strip(), settings, config, source)
            if (name in idle or name in REFUSED_BROKER_KEYS) and not live_only:
                continue
            raise ConfigError(f"{source}: {_unknown(name, rows, idle)}")
        if live_only and not row.is_live:
            raise ConfigError(
                f"{source}: {name} can't be changed while running; set it in the configuration "
                "file and restart"
            )
        changes[row.field] = _value(row, getattr(config, row.field), text, source)
    changed = msgspec.structs.replace(config, **changes)
    _check_whole(changed, source)
    return changed


def _check_promise(
    name: str, text: str, settings: dict[str, str], config: BrokerConfig, source: str
) -> None:
    """Refuse what would be silently different from what the key promises."""
    harmless = REFUSED_BROKER_KEYS.get(name, text)
    if text.lower() != harmless.lower():
        raise ConfigError(
            f"{source}: {name}={text} is not supported by this version; remove it or write "
            f"{name}={harmless}"
        )
    if name == "storePathCommitLog":
        root = settings.get("storePathRootDir", config.store_path).rstrip("/")
        if text.rstrip("/") != f"{root}/commitlog":
            raise ConfigError(
                f"{source}: storePathCommitLog={text} must be {root or 'storePathRootDir'}"
                "/commitlog; set storePathRootDir instead"
            )


def idle_keys(kind: type[Any], settings: dict[str, str]) -> list[str]:
    """Which of these keys are accepted without effect."""
    keys, idle = _table(kind)
    known = {row.name for row in keys}
    return sorted(name for name in settings if name in idle and name not in known)


def to_settings(config: BrokerConfig | NameServerConfig) -> dict[str, str]:
    """All settings under RocketMQ's keys, as text."""
    keys, _ = _table(type(config))
    found: dict[str, str] = {}
    for row in keys:
        value = getattr(config, row.field)
        found[row.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _unknown(name: str, rows: dict[str, Key], idle: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, [*rows, *idle], n=1, cutoff=0.6)
    if not near:
        lower = {known.lower(): known for known in [*rows, *idle]}
        near = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
        near = [lower[one] for one in near]
    hint = f"; did you mean {near[0]!r}?" if near else "; docs/config.md lists all keys"
    return f"unknown key {name!r}{hint}"


def _value(row: Key, current: Any, text: str, source: str) -> Any:
    text = text.strip()
    if isinstance(current, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{source}: {row.name}={text!r} must be true or false")
        return text.lower() == "true"
    if isinstance(current, int):
        try:
            number = int(text)
        except ValueError:
            raise ConfigError(f"{source}: {row.name}={text!r} must be a whole number") from None
        if row.low is not None and number < row.low:
            raise ConfigError(f"{source}: {row.name}={number} is below its least, {row.low}")
        if row.high is not None and number > row.high:
            raise ConfigError(f"{source}: {row.name}={number} is above its most, {row.high}")
        return number
    if row.choices and text not in row.choices:
        raise ConfigError(f"{source}: {row.name}={text!r} must be one of {', '.join(row.choices)}")
    if "\0" in text or "\n" in text:
        raise ConfigError(f"{source}: {row.name} has a control character in it")
    return text


def _check_whole(config: BrokerConfig | NameServerConfig, source: str) -> None:
    """Rules between settings."""
    if isinstance(config, NameServerConfig):
        return
    if config.queue_file_bytes % 20:
        raise ConfigError(
            f"{source}: mappedFileSizeConsumeQueue={config.queue_file_bytes} must be a multiple "
            "of 20, the size of a queue unit"
        )
    if config.max_message_bytes + 64 * 1024 > config.max_frame_bytes:
        raise ConfigError(
            f"{source}: maxMessageSize={config.max_message_bytes} does not fit a frame of "
            f"maxFrameBytes={config.max_frame_bytes}"
        )
    if 0 < config.max_open_queue_files < 4:
        raise ConfigError(
            f"{source}: maxOpenQueueFiles={config.max_open_queue_files} must be 0 or at least 4"
        )
    if config.is_staged and config.flush != "ASYNC_FLUSH":
        raise ConfigError(
            f"{source}: transientStorePoolEnable=true needs flushDiskType=ASYNC_FLUSH, not "
            f"{config.flush}: what is only in memory can't be promised to be on disk"
        )
    if config.is_staged and config.max_message_bytes + 65 * 1024 > config.stage_bytes:
        raise ConfigError(
            f"{source}: transientStorePoolBytes={config.stage_bytes} must be at least "
            f"maxMessageSize + 66560, here {config.max_message_bytes + 65 * 1024}"
        )
    for hour in config.delete_when.split(";"):
        if not hour.isascii() or not hour.isdigit() or not 0 <= int(hour) <= 23:
            raise ConfigError(f"{source}: deleteWhen={config.delete_when!r} must be hours, `04;16`")
    for level in config.delay_levels.split():
        digits = level[:-1]
        if level[-1:] not in "smhd" or not digits.isascii() or not digits.isdigit():
            raise ConfigError(f"{source}: messageDelayLevel has {level!r}; write e.g. 30s, 5m, 2h")


def parse_conf(text: str, source: str) -> dict[str, str]:
    """A Java-properties file: `key = value` lines, # or ! comments; ConfigError names the line."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        key, mark, value = line.partition("=")
        if not mark:
            raise ConfigError(f"{source}:{number}: expected `key = value`, got {line[:60]!r}")
        found[key.strip()] = value.strip()
    return found
