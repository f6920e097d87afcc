"""Which log files may go, and when the disk counts as full.

Owns: the decisions; the store carries them out. One rule: pure functions of numbers. The oldest go
first, the file being written never goes, and the disk-full flag has two thresholds so that it does
not flicker:

    used > warning (0.90)   full: appends are refused, and the oldest files go at once
    used > forcible (0.85)  the oldest files go at once; the flag stays as it was
    used <= forcible        not full
    used > expire (0.75)    expired files go now, whatever the hour
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec

from cometmq.store.layout import StoreConfig

_HOUR_MS = 3_600_000


class CleanReport(msgspec.Struct):
    """What one cleaning did; `reason` is empty if there was none to drop files."""

    used_ratio: float
    is_disk_full: bool
    reason: str = ""
    log_files: int = 0
    queue_files: int = 0
    index_files: int = 0


def is_full_after(is_full: bool, used_ratio: float, config: StoreConfig) -> bool:
    """The disk-full flag, given what it was."""
    if used_ratio > config.warning_ratio:
        return True
    return is_full and used_ratio > config.forcible_ratio


def choose(
    modified_ms: Sequence[int],
    *,
    now_ms: int,
    used_ratio: float,
    is_manual: bool,
    config: StoreConfig,
) -> tuple[int, str]:
    """How many of these files (oldest first, without the one being written) may go, and why."""
    is_forced = config.clean_forcibly and used_ratio > config.forcible_ratio
    if is_forced:
        reason = f"disk {used_ratio:.2f} above {config.forcible_ratio:.2f}"
    elif used_ratio > config.expire_ratio:
        reason = f"disk {used_ratio:.2f} above {config.expire_ratio:.2f}"
    elif is_manual:
        reason = "asked for"
    elif is_hour(now_ms, config):
        reason = f"hour {config.delete_when}"
    else:
        return 0, ""
    reserved_ms = config.file_reserved_hours * _HOUR_MS
    count = 0
    for changed_ms in modified_ms[: config.delete_batch]:
        if not is_forced and changed_ms + reserved_ms > now_ms:
            break
        count += 1
    return count, reason


def is_hour(now_ms: int, config: StoreConfig) -> bool:
    """Whether the local hour is one of `delete_when`."""
    hour = datetime.datetime.fromtimestamp(now_ms // 1000).hour
    return any(int(word) == hour for word in config.delete_when.split(";"))
