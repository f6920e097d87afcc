"""The options of the sink.

Owns: the table of them, and the checked values. One rule: what is secret shows in no text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cometmq.client.outgoing import MAX_GROUP_CHARS, check_name, check_topic
from cometmq.errors import UsageError
from cometmq.spark.options import (
    Option,
    boolean,
    integer,
    one_of,
    parse,
    size_bytes,
    text,
    timeout_ms,
)
from cometmq.spark.tls import TLS_OPTIONS, Access, access_of, with_access_file

WHAT = "the rocketmq sink"
SPARKS_OWN = frozenset(("checkpointlocation", "path", "queryname"))
"""What Spark hands to every sink and means for itself."""
_WRITER_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def _writer_id(value: str) -> str:
    if not _WRITER_ID.fullmatch(value):
        raise ValueError("must be 1 to 40 letters, digits and _ . -")
    return value


def _topic(value: str) -> str:
    check_topic(value)
    return value


def _group(value: str) -> str:
    check_name(value, "producer group", MAX_GROUP_CHARS)
    return value


TABLE = (
    Option("namesrv", text, help="name servers as host:port, separated by ;", is_required=True),
    Option("topic", _topic, help="where rows go that name no topic of their own"),
    Option("group", _group, "SPARK_SINK", help="the producer group, as brokers list it"),
    Option(
        "bodyFormat",
        one_of("raw", "json"),
        "raw",
        help="raw: the column body as it is; json: all columns that have no other meaning",
    ),
    Option("badRecordsPath", text, help="folder for rows that can't be messages; else they fail"),
    Option("badRecordsFormat", one_of("parquet", "json"), "parquet", help="of those files"),
    Option(
        "dropReservedProperties",
        boolean,
        False,
        help="leave RocketMQ's own names out of the column properties instead of refusing the row",
    ),
    Option("writerId", _writer_id, help="names this sink where one query has several"),
    Option("batchId", integer(0, 2**62), help="of df.write with writerId: which run; must grow"),
    Option("batchMessages", integer(1, 10_000), 1000, help="messages in one request, at most"),
    Option("batchBytes", size_bytes, 1024 * 1024, help="bytes of one request, at most"),
    Option("maxMessageBytes", size_bytes, 4 * 1024 * 1024, help="the broker's maxMessageSize"),
    Option("maxInFlight", integer(1, 1024), 32, help="requests of one task without an answer"),
    Option("requestTimeout", timeout_ms, 10_000, help="how long one request waits for its answer"),
    Option(
        "sendTimeout",
        timeout_ms,
        120_000,
        help="how long a task tries, without any progress in a queue, before it fails",
    ),
    *TLS_OPTIONS,
)


@dataclass(frozen=True)
class SinkOptions:
    """Checked values; pickled into every task."""

    topic: str | None
    group: str
    is_json: bool
    bad_records_path: str | None
    bad_records_format: str
    drops_reserved: bool
    writer_id: str | None
    batch_id: int | None
    batch_messages: int
    batch_bytes: int
    max_message_bytes: int
    max_in_flight: int
    request_timeout_ms: int
    send_timeout_ms: int
    namesrv: str
    access: Access = field(repr=False)

    @classmethod
    def read(cls, options: Mapping[str, str]) -> SinkOptions:
        own = {key: value for key, value in options.items() if key.lower() not in SPARKS_OWN}
        found = parse(TABLE, with_access_file(own), what=WHAT)
        if found["batchBytes"] > found["maxMessageBytes"]:
            raise UsageError(
                f"batchBytes {found['batchBytes']} is more than maxMessageBytes "
                f"{found['maxMessageBytes']}: brokers limit a whole request to that"
            )
        if found["batchId"] is not None and found["writerId"] is None:
            raise UsageError("batchId says which run of a writer it is: give its writerId too")
        return cls(
            topic=found["topic"],
            group=found["group"],
            is_json=found["bodyFormat"] == "json",
            bad_records_path=found["badRecordsPath"],
            bad_records_format=found["badRecordsFormat"],
            drops_reserved=found["dropReservedProperties"],
            writer_id=found["writerId"],
            batch_id=found["batchId"],
            batch_messages=found["batchMessages"],
            batch_bytes=found["batchBytes"],
            max_message_bytes=found["maxMessageBytes"],
            max_in_flight=found["maxInFlight"],
            request_timeout_ms=found["requestTimeout"],
            send_timeout_ms=found["sendTimeout"],
            namesrv=found["namesrv"],
            access=access_of(found),
        )
