"""Names, sizes and limits of a store directory.

Owns: where each file lives, how big it is, and StoreConfig. One rule: whatever another RocketMQ
must agree on to open the same directory is written down here once; nothing here touches a disk.

    commitlog/<20 digits>                          log_file_bytes each, named by first byte
    consumequeue/<topic>/<queue id>/<20 digits>    queue_file_bytes each, named by first byte
    index/<17 digits>                              40 + 4 * index_slots + 20 * index_entries
    timerlog/<20 digits>                           timer_log_file_bytes each, named by first byte
    timerwheel                                     32 * 1209600
    checkpoint  4096        lock  "lock"           abort  exists while running: the pid as text
    next.tmp    a log file being made ahead, until it is linked into commitlog/
"""

from __future__ import annotations

import re

import msgspec

from cometmq.errors import ConfigError, UsageError

COMMIT_LOG = "commitlog"
CONSUME_QUEUE = "consumequeue"
INDEX = "index"
TIMER_LOG = "timerlog"
TIMER_WHEEL = "timerwheel"
CHECKPOINT = "checkpoint"
ABORT = "abort"
LOCK = "lock"
NEXT_FILE = "next.tmp"  # a log file on its way; gone in a moment

PAGE_BYTES = 4096  # the unit of RocketMQ's "least pages" flush rules
UNIT_BYTES = 20  # one unit of a consume queue
CHECKPOINT_BYTES = 4096
INDEX_HEAD_BYTES = 40
INDEX_SLOT_BYTES = 4
INDEX_ENTRY_BYTES = 20

MAX_TOPIC_BYTES = 255  # a file name; RocketMQ's own limit for retry topics
MAX_PLAIN_TOPIC_BYTES = 127  # any other topic
MAX_QUEUE_ID = 65535  # RocketMQ has no limit; without one a bad request could fill the disk
RECORD_OVERHEAD_BYTES = 64 * 1024  # a record may exceed max_message_bytes by this much
MAX_FOUND_BY_KEY = 64
EXT_ADDRESS_MAX = -(2**31) - 1  # tags codes at or below are addresses into consumequeue_ext
RETRY_PREFIX = "%RETRY%"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

GIB = 1024 * 1024 * 1024

_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]+|%RETRY%[%|a-zA-Z0-9_-]+\+[%|a-zA-Z0-9_-]+")
_DELAY_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every number the store obeys; RocketMQ's defaults where it has one."""

    log_file_bytes: int = GIB
    queue_file_bytes: int = 300_000 * UNIT_BYTES
    index_slots: int = 5_000_000
    index_entries: int = 20_000_000

    is_sync_flush: bool = False
    flush_interval_ms: int = 500
    flush_least_pages: int = 4
    flush_thorough_ms: int = 10_000
    queue_flush_interval_ms: int = 1000
    queue_flush_least_pages: int = 2
    queue_flush_thorough_ms: int = 60_000

    is_staged: bool = False  # see staging.py
    stage_count: int = 5
    stage_bytes: int = 32 * 1024 * 1024
    commit_interval_ms: int = 200
    commit_least_pages: int = 4
    commit_thorough_ms: int = 200

    stall_limit_ms: int = 1000  # a flush that takes longer makes senders wait; see stall_remark
    max_unflushed_bytes: int = 512 * 1024 * 1024  # asynchronous flush: only if more than this waits

    max_message_bytes: int = 4 * 1024 * 1024
    max_fetch_count: int = 32
    max_fetch_bytes: int = 256 * 1024
    max_cold_fetch_count: int = 8
    max_cold_fetch_bytes: int = 64 * 1024
    max_scan_units: int = 800
    in_memory_bytes: int = 4 * GIB  # RocketMQ: 40 % of RAM; whoever knows the RAM sets it

    file_reserved_hours: int = 72
    delete_when: str = "04"
    delete_batch: int = 10
    clean_interval_ms: int = 10_000
    clean_forcibly: bool = True
    disk_max_used_ratio: float = 0.75
    disk_forcible_ratio: float = 0.85
    disk_warning_ratio: float = 0.90

    index_enabled: bool = True
    verify_crc_on_recover: bool = True
    is_durable_cut_allowed: bool = False  # see recovery.py: cut even what was known durable
    delay_levels: str = DELAY_LEVELS

    max_open_queue_files: int = 0  # 0: as many as Files.queue_map_limit says
    max_open_log_files: int = 256
    max_open_index_files: int = 16
    max_undispatched: int = 100_000  # records remembered between append and dispatch

    def __post_init__(self) -> None:
        for key, least in (
            ("log_file_bytes", 256),
            ("queue_file_bytes", UNIT_BYTES),
            ("index_slots", 1),
            ("index_entries", 2),
            ("max_fetch_count", 1),
            ("max_open_log_files", 2),
            ("max_open_index_files", 2),
            ("stage_count", 2),
            ("stage_bytes", 256),
        ):
            if getattr(self, key) < least:
                raise ConfigError(f"{key} is {getattr(self, key)}, must be at least {least}")
        if self.max_open_queue_files and self.max_open_queue_files < 4:
            raise ConfigError(
                f"max_open_queue_files is {self.max_open_queue_files}, must be 0 or at least 4"
            )
        if self.is_staged and self.is_sync_flush:
            raise ConfigError("is_staged can't go with is_sync_flush: what is staged is not safe")
        if self.queue_file_bytes % UNIT_BYTES:
            raise ConfigError(f"queue_file_bytes is {self.queue_file_bytes}, not a multiple of 20")
        if not all(hour.isdigit() and int(hour) < 24 for hour in self.delete_when.split(";")):
            raise ConfigError(
                f"delete_when is {self.delete_when!r}, must be hours like 04 or 04;16"
            )
        delay_ms_by_level(self.delay_levels)

    @property
    def index_file_bytes(self) -> int:
        return (
            INDEX_HEAD_BYTES
            + INDEX_SLOT_BYTES * self.index_slots
            + INDEX_ENTRY_BYTES * self.index_entries
        )

    # RocketMQ clamps what the operator asks for, so that no setting fills a disk to the last byte.
    @property
    def warning_ratio(self) -> float:
        return min(max(self.disk_warning_ratio, 0.35), 0.90)

    @property
    def forcible_ratio(self) -> float:
        return min(max(self.disk_forcible_ratio, 0.30), 0.85)

    @property
    def expire_ratio(self) -> float:
        return min(max(self.disk_max_used_ratio, 0.10), 0.95)


def delay_ms_by_level(levels: str) -> tuple[int, ...]:
    """ "1s 5s" -> (1000, 5000); level n stands at n - 1."""
    found: list[int] = []
    for word in levels.split():
        if word[-1] not in _DELAY_MS or not word[:-1].isdigit():
            raise ConfigError(f"delay_levels has {word!r}; write a number and s, m, h or d")
        found.append(int(word[:-1]) * _DELAY_MS[word[-1]])
    return tuple(found)


def segment_name(folder: str, start: int) -> str:
    return f"{folder}/{start:020d}"


def is_topic_name(topic: str) -> bool:
    """Whether a topic may become a folder name; the pattern leaves no dot and no slash."""
    return len(topic) <= MAX_TOPIC_BYTES and _TOPIC.fullmatch(topic) is not None


def can_be_queue(topic: str, queue_id: int) -> bool:
    return is_topic_name(topic) and 0 <= queue_id <= MAX_QUEUE_ID


def queue_folder(topic: str, queue_id: int) -> str:
    """The folder of a queue; UsageError before any bad name reaches the disk."""
    if not is_topic_name(topic):
        raise UsageError(f"topic {topic[:64]!r} must be 1 to 255 of % | a-z A-Z 0-9 _ -")
    if not 0 <= queue_id <= MAX_QUEUE_ID:
        raise UsageError(f"queue id {queue_id} must be 0 to {MAX_QUEUE_ID}")
    return f"{CONSUME_QUEUE}/{topic}/{queue_id}"
