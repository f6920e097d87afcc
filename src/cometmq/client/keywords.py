"""The keywords of the clients, for type checkers and editors.

Owns: nothing at run time. One rule: each dict here has the fields of what reads it:
session.Options, sending.SendOptions, and the arguments of the consumers;
tests/unit/client/test_keywords.py compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Sequence
    from datetime import datetime

    from cometmq.client.assignment import Strategy
    from cometmq.client.compression import Compression
    from cometmq.client.connection import Credentials
    from cometmq.client.in_flight import FlowLimits
    from cometmq.client.pull_consumer import QueuesChanged
    from cometmq.client.session import World


class OfAdmins(TypedDict, total=False):
    """Of every client, but for the name servers."""

    instance: str
    unit: str
    namespace: str
    credentials: Credentials | None
    tls: ssl.SSLContext | bool
    timeout_ms: int
    connect_timeout_ms: int


class MoreOfAll(OfAdmins, total=False):
    world: World | None


class OfAll(MoreOfAll, total=False):
    namesrv: str | Sequence[str] | None


class OfProducers(OfAll, total=False):
    send_timeout_ms: int
    retries: int
    async_retries: int
    retry_another_broker_when_not_stored: bool
    retry_busy: bool
    max_message_bytes: int
    compress_over_bytes: int
    compression: Compression | None
    default_queues: int
    window: int
    avoid_slow_brokers: bool
    vip_channel: bool


class OfTracedProducers(OfProducers, total=False):
    trace: bool
    trace_topic: str


class OfConsumers(OfAll, total=False):
    model: Literal["clustering", "broadcasting"]
    ordered: bool
    batch: int
    start: Literal["last", "first"] | datetime
    strategy: Strategy
    concurrency: int
    pull_batch: int
    max_reconsume_times: int
    consume_timeout_s: float
    suspend_ms: int
    limits: FlowLimits | None
    offsets_folder: str | os.PathLike[str] | None
    pull_interval_ms: int
    close_timeout_s: float
    trace: bool
    trace_topic: str


class OfPullConsumers(OfAll, total=False):
    start: str | datetime
    auto_commit: bool
    auto_commit_s: float
    strategy: Strategy
    on_queues_changed: QueuesChanged | None
    limits: FlowLimits | None
    messages_for_all: int
    pull_count: int
    suspend_ms: int


class OfSimpleConsumers(OfAll, total=False):
    sql: str
    start: str
    ordered: bool
