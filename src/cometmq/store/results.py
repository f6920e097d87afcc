"""What the store answers: the small values of its face.

Owns: Appended, Fetched, FoundByKey and the store's counters. One rule: plain numbers and bytes; who
holds an answer holds no part of the store.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from cometmq.store.recovery import Recovered

Accept = Callable[[int, int], bool | None]
"""Whether a message is wanted, by its tags code and log offset; None: look no further."""


class Entered(msgspec.Struct, gc=False):
    """Timed messages that compiled code has put into the wheel, or into their real topics."""

    count: int
    last_ms: int
    """The latest slot; -1 if none."""
    upto: int
    """Where the last of their records ends in the log."""
    topics: list[tuple[bytes, int]]
    """Their real topics, and how many of each."""


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Where a message went. Durable once the store's flushed_offset reaches `end_offset`."""

    log_offset: int
    queue_offset: int
    size: int
    end_offset: int
    store_ms: int


class FetchStatus(Enum):
    """Named as RocketMQ's GetMessageStatus, because the name travels as a remark."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """Records back to back in `body`, and where to go on whatever the status is."""

    status: FetchStatus
    next_offset: int
    min_offset: int
    max_offset: int
    body: bytes = b""
    count: int = 0
    is_cold: bool = False  # the next record is far behind the log's end: a follower could serve it
    stale: int = 0  # passed over because their time is over


class FoundByKey(msgspec.Struct, frozen=True):
    """Records in log order, and how far the index has come."""

    records: list[bytes]
    index_last_ms: int
    index_last_offset: int


class StoreStats(msgspec.Struct):
    """Counters since the store was opened."""

    recovered: Recovered = msgspec.field(default_factory=Recovered)
    appended_count: int = 0
    appended_bytes: int = 0
    refused_count: int = 0
    dispatched_count: int = 0
    fetched_count: int = 0
    fetched_bytes: int = 0
    fetch_misses: int = 0
    commits: int = 0
    log_flushes: int = 0
    queue_flushes: int = 0
    flush_failures: int = 0
    removed_log_files: int = 0
    removed_queue_files: int = 0
    removed_index_files: int = 0
    damaged_units: int = 0
