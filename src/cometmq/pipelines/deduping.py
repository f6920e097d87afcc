"""The pipeline `dedupe`: a topic without its duplicates, into another topic or a lake.

Owns: that pipeline. One rule: of all messages with one key that come within the time given, one
goes on, exactly once; a message without a key always does.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Literal

from cometmq import MessageQueue
from cometmq.client.admin import UnknownName
from cometmq.client.outgoing import SHARDING_KEY
from cometmq.errors import NoRoute, UsageError
from cometmq.pipelines.outbox import Outbox
from cometmq.pipelines.reaching import (
    access_options,
    admin_of,
    refuse_loop,
    source_checked,
    topic_names,
)
from cometmq.pipelines.running import Outcome, Tell, explained, run_stream, to_stderr
from cometmq.pipelines.sinks import (
    AVAILABLE_NOW,
    checked_length,
    checked_trigger,
    start_to,
    with_trigger,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

ORIGIN_ID = "ORIGIN_UNIQ_KEY"
"""Property of a copy: the unique id of the message that it is a copy of."""
KEY = "dedupe_key"
_PATH = re.compile(r"\$(\.[A-Za-z_][A-Za-z0-9_]*|\[\d+\])+")


def dedupe(
    spark: SparkSession,
    *,
    namesrv: str,
    topic: str,
    checkpoint: str,
    by: str = "msg_id",
    within: str = "1 hour",
    event_time: Literal["store_time", "born_time"] = "store_time",
    to_topic: str | None = None,
    lake: str | None = None,
    format: Literal["parquet", "delta", "iceberg"] = "parquet",
    starting_offsets: str = "earliest",
    trigger: str = AVAILABLE_NOW,
    access: str | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """A topic without its duplicates, exactly once, into another topic or a lake.

    `by`: msg_id (the unique id: what a producer sent twice), keys (the message's keys), or a field
    of a JSON body as a path ($.order_id). Duplicates are dropped that come within the time `within`
    of the first by `event_time`; a message that is older than the newest one read by more than
    that can't be judged and is left out, counted as late. Messages without such a key all go on.
    Into a topic copies keep body, tags, keys, sharding key and properties, and the order that they
    have in their queue; ORIGIN_UNIQ_KEY tells the id of the original. `access`: a file with ACL
    keys and TLS settings.
    """
    if (to_topic is None) == (lake is None):
        raise UsageError("dedupe writes to to_topic or to lake: give one")
    refuse_loop("dedupe", topic, to_topic)
    checked_trigger(trigger)
    checked_length("within", within)
    keys = access_options(access)
    read = source_checked(
        {"namesrv": namesrv, **keys, "topic": topic, "startingOffsets": starting_offsets}
    )
    name = f"dedupe-{topic}"
    with explained(name):
        rows = (
            spark.readStream.format("rocketmq")
            .options(**read)
            .load()
            .withColumn(KEY, _key(by))
            .withWatermark(event_time, within)
            .dropDuplicatesWithinWatermark([KEY])
        )
        writer: DataStreamWriter
        if to_topic is not None:
            queues = _queues(namesrv, keys, topic, to_topic)
            options = {"namesrv": namesrv, "topic": to_topic, "dropReservedProperties": "true"}
            options |= keys
            outbox = Outbox(spark, checkpoint, options, lambda batch: _as_messages(batch, queues))
            writer = rows.writeStream.queryName(name).option("checkpointLocation", checkpoint)
            writer = with_trigger(writer.foreachBatch(outbox.write), trigger)
        else:
            writer = start_to(
                spark,
                rows,
                format=format,
                path=lake,
                checkpoint=checkpoint,
                trigger=trigger,
                name=name,
            )
    return run_stream(name, writer, tell=tell, stop=stop)


def _key(by: str) -> Any:
    """What must differ. Equal nulls would count as duplicates: without a key it is the place."""
    from pyspark.sql import functions as f

    if by in ("msg_id", "keys"):
        found = f.col(by)
    elif _PATH.fullmatch(by):
        found = f.get_json_object(f.col("body").cast("string"), by)
    else:
        raise UsageError(
            f"dedupe: by {by!r}; must be msg_id, keys, or a path into a JSON body: $.order_id"
        )
    place = f.concat_ws("/", f.lit("place"), "topic", "broker", "queue_id", "queue_offset")
    return f.coalesce(f.concat(f.lit("key/"), f.nullif(found, f.lit(""))), place)


def _queues(namesrv: str, keys: dict[str, str], topic: str, to_topic: str) -> list[MessageQueue]:
    """Of the target; made with as many queues as the source has, if it is missing."""
    with admin_of(namesrv, keys) as admin:
        sources = [admin.topic_route(one) for one in topic_names(topic)]
        try:
            found = list(admin.topic_route(to_topic).to_send)
        except (NoRoute, UnknownName):
            numbers = (one.queue_id for source in sources for one in source.to_read)
            most = max(numbers, default=0) + 1
            admin.create_topic(to_topic, most)
            found = list(admin.topic_route(to_topic).to_send)
    if not found:
        raise UsageError(f"dedupe: topic {to_topic!r} has no queue that can be written")
    return found


def _as_messages(rows: DataFrame, queues: list[MessageQueue]) -> DataFrame:
    """The sink's columns: all of one queue to one queue, in their order. So those of one sharding
    key stay together too, and carry it along."""
    from pyspark.sql import functions as f

    turn = f.pmod(f.col("queue_id") + f.crc32(f.col("broker").cast("binary")), f.lit(len(queues)))
    brokers = f.array(*(f.lit(one.broker) for one in queues))
    numbers = f.array(*(f.lit(one.queue_id) for one in queues))
    others = f.map_filter("properties", lambda name, _: name != ORIGIN_ID)
    # One partition a queue, whose rows the outbox keeps together.
    placed = rows.repartition("broker", "queue_id").sortWithinPartitions(
        "broker", "queue_id", "queue_offset"
    )
    return placed.select(
        "body",
        "tags",
        "keys",
        f.map_concat(others, f.create_map(f.lit(ORIGIN_ID), f.col("msg_id"))).alias("properties"),
        f.col("properties")[f.lit(SHARDING_KEY)].alias("sharding_key"),
        f.get(brokers, turn).alias("broker"),
        f.get(numbers, turn).alias("queue_id"),
    )
