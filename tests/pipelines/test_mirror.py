"""`mirror`: a topic in a wider one or in another cluster, in order, once."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cometmq import MessageQueue
from cometmq.errors import UsageError
from cometmq.pipelines import mirror
from cometmq.pipelines.copying import as_copies
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode
from spark_programs import count_topic, read_topic

from .pipes import running, send


def shard(n: int) -> str:
    """All of one shard in one queue of two."""
    return f"user-{n % 2}-{n % 10}"


def in_order(messages: list[Any]) -> dict[str, list[int]]:
    """Numbers by sharding key, in the order of their queue; a key is in one queue only."""
    found: dict[str, list[int]] = defaultdict(list)
    where: dict[str, set[int]] = defaultdict(set)
    for one in messages:
        key = one.properties["__SHARDINGKEY"]
        found[key].append(int(one.body))
        where[key].add(one.queue_id)
    assert all(len(queues) == 1 for queues in where.values())
    return dict(found)


def test_a_wider_topic(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> None:
    fields: Any = {
        "sharding_key": shard,
        "tags": lambda n: f"tag{n % 3}",
        "keys": lambda n: [f"k{n}", "both"],
        "properties": lambda n: {"color": "red", "CORRELATION_ID": "c"},
    }
    send(rocketmq, "narrow", range(300), queues=2, **fields)
    lines: list[str] = []
    words: Any = {
        "namesrv": rocketmq.namesrv,
        "topic": "narrow",
        "to_topic": "wide",
        "checkpoint": str(tmp_path / "c"),
        "rows_per_batch": 120,
        "tell": lines.append,
    }
    with pytest.raises(UsageError, match="'wide' does not exist"):
        mirror(spark, **words)
    outcome = mirror(spark, queues=8, **words)
    assert outcome.rows == 300 and outcome.batches == 3
    assert outcome.figures["into"] == "wide (8 queues)"
    assert any("lag 180" in line for line in lines)

    there = read_topic(rocketmq.namesrv, "wide")
    assert len({one.queue_id for one in there}) > 2
    wanted = {shard(n): [m for m in range(300) if shard(m) == shard(n)] for n in range(10)}
    assert in_order(there) == wanted
    origins = {int(one.body): one for one in read_topic(rocketmq.namesrv, "narrow")}
    for one in there:
        n, origin = int(one.body), origins[int(one.body)]
        assert one.tags == f"tag{n % 3}" and list(one.keys) == [f"k{n}", "both"]
        assert one.properties["color"] == "red" and one.properties["CORRELATION_ID"] == "c"
        assert one.properties["ORIGIN_MSG_ID"] == origin.properties["UNIQ_KEY"]
        assert one.properties["UNIQ_KEY"] != origin.properties["UNIQ_KEY"]
        assert one.properties["ORIGIN_TOPIC"] == "narrow"
        place = f"{rocketmq.broker_name}/{origin.queue_id}/{origin.queue_offset}"
        assert one.properties["ORIGIN_QUEUE"] == place
        stored_ms = int(origin.store_time.timestamp() * 1000 + 0.5)
        assert one.properties["ORIGIN_STORE_TIME"] == str(stored_ms)

    assert mirror(spark, **words).rows == 0
    assert count_topic(rocketmq.namesrv, "wide") == 300


def test_what_would_lose_order_or_messages_is_refused(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    send(rocketmq, "kept", range(20), queues=2, sharding_key=shard)
    words: Any = {"namesrv": rocketmq.namesrv, "topic": "kept", "checkpoint": str(tmp_path / "c")}
    with pytest.raises(UsageError, match="sharding-key"):
        mirror(spark, to_topic="kept-2", order="sharding_key", **words)
    for wrong, told in (({}, "does not exist at"), ({"rows_per_batch": 0}, "must be from 1")):
        with pytest.raises(UsageError, match=told):  # and that is not the checkpoint's target now
            mirror(spark, to_topic="kept-one", **words, **wrong)
    assert mirror(spark, to_topic="kept-2", queues=2, **words).rows == 20
    with pytest.raises(UsageError, match="of a copy to kept-2 at"):
        mirror(spark, to_topic="kept-3", **words)


def test_another_cluster_killed_on_the_way(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    send(rocketmq, "moved", range(2000), queues=2, sharding_key=shard)
    with LocalBroker() as other:
        other.create_topic("moved", queues=6)
        words: Any = {
            "namesrv": rocketmq.namesrv,
            "to_namesrv": other.namesrv,
            "topic": "moved",
            "to_topic": "moved",
            "checkpoint": str(tmp_path / "c"),
            "rows_per_batch": 800,
            "sink_options": "batchMessages=20",
        }
        other.delay(RequestCode.SEND_BATCH_MESSAGE, 0.1, times=100_000)
        with running(tmp_path / "log", "mirror", **words) as pipeline:
            pipeline.wait_until(lambda: count_topic(other.namesrv, "moved") >= 900)
            pipeline.kill()
        other.clear_faults()
        assert count_topic(other.namesrv, "moved") < 2000
        mirror(spark, **{**words, "sink_options": ["batchMessages=20"]})
        there = read_topic(other.namesrv, "moved")
        wanted = {shard(n): [m for m in range(2000) if shard(m) == shard(n)] for n in range(10)}
        assert in_order(there) == wanted


def test_what_a_copy_keeps_and_where_it_goes(spark: SparkSession) -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    columns = (
        "topic string, broker string, queue_id int, queue_offset bigint, keys string, tags string,"
        "body string, born_time timestamp, store_time timestamp, msg_id string,"
        "properties map<string,string>"
    )
    first = {"ORIGIN_QUEUE": "a/1/2", "ORIGIN_TOPIC": "home", "__SHARDINGKEY": "s", "TTL": "9"}
    rows = spark.createDataFrame(
        [
            ("t", "b1", 1, 5, "k1 k2", None, "x", now, now, "ID", first),
            ("t", "b9", 7, 6, None, None, "y", now, now, "ID2", None),
            ("t", "b9", 8, 7, None, None, "z", now, now, "ID3", {"ORIGIN_TOPIC": "forged"}),
        ],
        columns,
    )
    queues = [MessageQueue("u", broker, n) for broker in ("b1", "b2") for n in range(3)]
    copies = as_copies(rows, order="queue", queues=queues, with_requests=False).collect()
    assert (copies[0].broker, copies[0].queue_id) == ("b1", 1), "its own place is there"
    assert (copies[1].broker, copies[1].queue_id) != (copies[2].broker, copies[2].queue_id)
    assert copies[0].properties == {
        "ORIGIN_QUEUE": "a/1/2",
        "ORIGIN_TOPIC": "home",
        "ORIGIN_SHARDING_KEY": "s",
        "__SHARDINGKEY": "s",  # the sink's dropReservedProperties takes it away
    }
    assert copies[2].properties == {
        "ORIGIN_MSG_ID": "ID3",
        "ORIGIN_TOPIC": "t",
        "ORIGIN_QUEUE": "b9/8/7",
        "ORIGIN_STORE_TIME": "1772323200000",
        "ORIGIN_BORN_TIME": "1772323200000",
    }
    by_key = as_copies(rows, order="keys", queues=(), with_requests=True).collect()
    assert [one.sharding_key for one in by_key] == ["k1", None, None]
    assert by_key[0].properties["TTL"] == "9"


def test_what_is_refused(spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path) -> None:
    words: Any = {"namesrv": rocketmq.namesrv, "topic": "t", "checkpoint": str(tmp_path)}
    with pytest.raises(UsageError, match=r"can't write into the topic that it reads \(t\)"):
        mirror(spark, to_topic="t", **words)
    with pytest.raises(UsageError, match=r"can't write into the topic that it reads \(t\)"):
        mirror(spark, to_topic="t", **{**words, "topic": "s, t"})
    with pytest.raises(UsageError, match="mix its order up"):
        mirror(spark, to_topic="u", source_options=["minPartitions=8"], **words)
