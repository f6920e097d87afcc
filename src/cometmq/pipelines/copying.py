"""A message that was read becomes a message to send: what it keeps, what it leaves behind.

Owns: the columns that `mirror` and `replay` hand to the sink. One rule: a copy carries all that its
sender said of it (body, tags, keys, user properties) and nothing that a broker or a client added on
its former way; what was true of the original only is kept under a name of its own.

    ORIGIN_MSG_ID        the sender's unique id (UNIQ_KEY); the copy has one of its own, by which
                         the sink tells what it has written
    ORIGIN_TOPIC         the topic it was read from
    ORIGIN_QUEUE         broker/queue/offset
    ORIGIN_STORE_TIME    milliseconds, by the former broker's clock
    ORIGIN_BORN_TIME     milliseconds, by the sender's clock
    ORIGIN_SHARDING_KEY  its sharding key, where the copy's queue is not chosen by it

A copy of a copy keeps the first origin. Left behind: what the sink refuses as RocketMQ's own
(sink_rows.OWN_NAMES: delays and timers that are over, time to live, transaction and retry marks,
region, trace switch, WAIT, CLUSTER, POP receipts), and in a replay what made it a request: whoever
waited for the answer is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from cometmq.client.outgoing import SHARDING_KEY
from cometmq.errors import UsageError
from cometmq.message import MessageQueue

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Order = Literal["sharding-key", "keys", "queue", "none"]

ORIGIN_MSG_ID = "ORIGIN_MSG_ID"
ORIGIN_TOPIC = "ORIGIN_TOPIC"
ORIGIN_QUEUE = "ORIGIN_QUEUE"
ORIGIN_STORE_TIME = "ORIGIN_STORE_TIME"
ORIGIN_BORN_TIME = "ORIGIN_BORN_TIME"
ORIGIN_SHARDING_KEY = "ORIGIN_SHARDING_KEY"
ORIGINS = (
    ORIGIN_MSG_ID,
    ORIGIN_TOPIC,
    ORIGIN_QUEUE,
    ORIGIN_STORE_TIME,
    ORIGIN_BORN_TIME,
    ORIGIN_SHARDING_KEY,
)
REQUEST_NAMES = (
    "MSG_TYPE",
    "CORRELATION_ID",
    "REPLY_TO_CLIENT",
    "TTL",
    "PUSH_REPLY_TIME",
    "REPLY_MESSAGE_ARRIVE_TIME",
    "ARRIVE_TIME",
)
COLUMNS = (
    "topic",
    "broker",
    "queue_id",
    "queue_offset",
    "keys",
    "tags",
    "body",
    "born_time",
    "store_time",
    "msg_id",
    "properties",
)
"""What a copy needs of the source's columns."""

SPLITTING = ("minPartitions", "maxRecordsPerPartition")


def check_order(order: Order, source: Mapping[str, str]) -> None:
    """UsageError for an order that nobody knows, or if options of the source take a queue apart
    whose order is to be kept."""
    if order not in get_args(Order):
        raise UsageError(f"order {order!r}: it is one of {', '.join(get_args(Order))}")
    given = {name.lower() for name in source}
    if order != "none" and any(name.lower() in given for name in SPLITTING):
        raise UsageError(
            f"{' and '.join(SPLITTING)} split a queue over tasks, which would mix its order up: "
            "leave them out, or set order=none"
        )


def as_copies(
    rows: DataFrame,
    *,
    order: Order,
    queues: Sequence[MessageQueue],
    with_requests: bool,
    to_topic: Column | None = None,
) -> DataFrame:
    """Rows of the source (or of a lake) as rows for the sink, in the order that they have.

    `queues`: those of the target, needed for the order `queue`. `to_topic`: a column, if the option
    of the sink does not say it for all.
    """
    from pyspark.sql import functions as f

    given = f.coalesce(f.col("properties"), f.create_map().cast("map<string,string>"))
    key = f.coalesce(given[SHARDING_KEY], given[ORIGIN_SHARDING_KEY])
    chosen = [f.col("body"), f.col("tags"), f.col("keys")]
    loses_key = True
    if order == "queue":
        place = _place(queues)
        chosen += [place["broker"].alias("broker"), place["queue_id"].alias("queue_id")]
    elif order == "keys":
        chosen.append(f.split("keys", " ")[0].alias("sharding_key"))
    elif order == "sharding-key":
        chosen.append(key.alias("sharding_key"))
        loses_key = False
    if to_topic is not None:
        chosen.append(to_topic.alias("topic"))
    properties = _properties(given, key if loses_key else None, with_requests)
    return rows.select(*chosen, properties.alias("properties"))


def _properties(given: Column, lost_key: Column | None, with_requests: bool) -> Column:
    from pyspark.sql import functions as f

    left_behind = [] if with_requests else list(REQUEST_NAMES)
    text = "string"
    place = f.concat_ws("/", "broker", f.col("queue_id").cast(text), f.col("queue_offset"))
    origin = {
        ORIGIN_MSG_ID: f.col("msg_id"),
        ORIGIN_TOPIC: f.col("topic"),
        ORIGIN_QUEUE: place,
        ORIGIN_STORE_TIME: f.unix_millis("store_time").cast(text),
        ORIGIN_BORN_TIME: f.unix_millis("born_time").cast(text),
    }
    # Who was copied before says all of it; else none, and names of ours are free to be set.
    former = f.map_filter(given, lambda name, value: name.isin(*ORIGINS[:-1]))
    is_copy = f.map_contains_key(given, ORIGIN_QUEUE)
    fresh = f.create_map(*(one for name, value in origin.items() for one in (f.lit(name), value)))
    parts = [
        f.map_filter(given, lambda name, value: ~name.isin(*left_behind, *ORIGINS)),
        f.when(is_copy, former).otherwise(fresh),
    ]
    if lost_key is not None:
        parts.append(f.create_map(f.lit(ORIGIN_SHARDING_KEY), lost_key))
    whole = f.map_concat(*parts)
    return f.map_filter(whole, lambda name, value: value.isNotNull() & (value != ""))


def _place(queues: Sequence[MessageQueue]) -> Column:
    """Where a queue's messages go so that they stay together: the queue of the same broker and
    number, if the target has it; else by number among all its queues, brokers shifted."""
    from pyspark.sql import functions as f

    def literal(queue: MessageQueue) -> Column:
        return f.struct(
            f.lit(queue.broker).alias("broker"), f.lit(queue.queue_id).alias("queue_id")
        )

    ordered = sorted(queues)
    all_of_them = f.array(*map(literal, ordered))
    number = f.col("queue_id").cast("bigint")
    if len({queue.broker for queue in ordered}) > 1:
        number = number + f.crc32(f.col("broker").cast("binary"))
    by_number = f.element_at(all_of_them, (number % len(ordered) + 1).cast("int"))
    named = f.struct(f.col("broker").alias("broker"), f.col("queue_id").alias("queue_id"))
    return f.when(f.array_contains(all_of_them, named), named).otherwise(by_number)
