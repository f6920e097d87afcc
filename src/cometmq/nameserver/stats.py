"""What the name server has counted since it started.

Owns: plain integers, added to where things happen, read by metrics and tests. One rule: every limit
of the configuration that can refuse something has a counter here.
"""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct):
    """Counts; they only grow."""

    registrations: int = 0
    """Registrations that were applied to the end."""
    registrations_refused: int = 0
    registrations_cancelled: int = 0
    """Cut short: the connection closed, the broker left, or a newer registration took over."""
    registrations_merged: int = 0
    """Arrived while an earlier one of the same broker was being applied, and joined it."""
    slices: int = 0
    brokers_expired: int = 0
    brokers_disconnected: int = 0
    brokers_unregistered: int = 0
    routes_found: int = 0
    routes_missing: int = 0
    over_max_topics: int = 0
    over_max_brokers: int = 0
    over_max_kv_entries: int = 0
    saves: int = 0
    saves_failed: int = 0
