"""The demo's last act: Spark reads the shop's topic, prints a table, and fills a Parquet lake.

Owns: what the demo shows of Spark. One rule: whatever takes seconds says so while it does, and the
lake must hold what the topic holds, or the demo fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]

BODY = "order int, status string, amount double, at timestamp"
TICK_S = 1.0
TRIES = 5


class Unavailable(Exception):
    """Spark can't run here; the text says why and what helps."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """A line that grows by a dot a second, and ends with how long it took."""
    began, is_over = time.monotonic(), threading.Event()
    print(f"  {what} ", end="", flush=True)

    def tick() -> None:
        while not is_over.wait(TICK_S):
            print(".", end="", flush=True)

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        is_over.set()
        ticking.join()
        print(f" {time.monotonic() - began:.1f} s", flush=True)


@contextlib.contextmanager
def errors_kept_aside() -> Iterator[None]:
    """What a JVM says on standard error while it starts would tear our line; shown if it fails."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        kept = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def start(folder: Path) -> SparkSession:
    """A Spark of our own on two cores, all of whose files are below the folder."""
    import cometmq.spark
    from cometmq.errors import ConfigError, UsageError

    places = {"spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    try:
        with progress("Spark starts a JVM, which takes a while"), errors_kept_aside():
            spark = cometmq.spark.session(
                "cometmq-demo", master="local[2]", settings=places, quiet=True
            )
    except (UsageError, ConfigError) as reason:  # no PySpark, or no Java
        raise Unavailable(str(reason)) from None
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run(namesrv: str, topic: str, wanted: int, say: Say) -> list[tuple[str, str]]:
    """The table and the lake; rows for the demo's own table. SystemExit if they don't agree."""
    with tempfile.TemporaryDirectory(prefix="cometmq-demo-spark-") as name:
        folder = Path(name)
        spark = start(folder)
        try:
            in_topic = table(spark, namesrv, topic, say)
            in_lake = fill_lake(spark, namesrv, topic, folder, say)
        finally:
            spark.stop()
    if not in_topic == in_lake == wanted:
        raise SystemExit(f"{wanted} orders sent; topic: {in_topic}, lake: {in_lake}")
    return [
        ("orders that Spark counted in the topic", str(in_topic)),
        ("orders in the Parquet lake, each once", str(in_lake)),
    ]


def table(spark: SparkSession, namesrv: str, topic: str, say: Say) -> int:
    """A batch read: the topic as it is now, as a DataFrame."""
    from pyspark.sql import functions as f

    rows = spark.read.format("rocketmq").option("namesrv", namesrv).option("topic", topic).load()
    orders = rows.select(f.from_json(f.col("body").cast("string"), BODY).alias("o")).select("o.*")
    counted = (
        orders.where("order is not null")
        .groupBy("status")
        .agg(f.count("*").alias("orders"), f.round(f.sum("amount"), 2).alias("amount"))
        .orderBy("status")
    )
    with progress("its first query reads the topic"):
        found = counted.collect()
    say(f"{'status':<10}{'orders':>8}{'amount':>12}")
    for row in found:
        say(f"{row.status:<10}{row.orders:>8}{row.amount:>12,.2f}")
    return sum(int(row.orders) for row in found)


def fill_lake(spark: SparkSession, namesrv: str, topic: str, folder: Path, say: Say) -> int:
    """The built-in pipeline `aggregate`: hours by event time, into Parquet, exactly once."""
    from pyspark.sql import functions as f

    from cometmq.pipelines import PipelineFailed, aggregate

    lake = str(folder / "lake")
    told: list[str] = []

    def once() -> None:
        aggregate(
            spark,
            namesrv=namesrv,
            topic=topic,
            schema=BODY,
            checkpoint=str(folder / "checkpoint"),
            window="1 hour",
            by=["status"],
            sums=["amount"],
            event_time="at",
            late="0 seconds",
            lake=lake,
            tell=told.append,
        )

    with progress("the pipeline 'aggregate' writes each hour's orders to a lake"):
        for left in range(TRIES - 1, -1, -1):
            try:
                once()
                break
            except PipelineFailed as failed:
                # Spark gives a stream's Python process 10 s to start; a busy machine needs more.
                # The checkpoint makes it go on, and nothing is written twice.
                if not left or "connect back" not in str(failed):
                    raise
    for line in told:
        if ": batch " in line:
            say(line)
    rows = spark.read.parquet(lake)
    rows = rows.withColumn("hour", f.date_format("window_start", "HH:mm"))
    found = rows.orderBy("window_start", "status").collect()
    files = sum(1 for _ in Path(lake).glob("*.parquet"))
    say(f"read back from {files} Parquet file{'s' * (files != 1)}:")
    say(f"{'hour':<8}{'status':<10}{'orders':>8}{'amount':>12}")
    for row in found:
        say(f"{row.hour:<8}{row.status:<10}{row.messages:>8}{row.sum_amount:>12,.2f}")
    return sum(int(row.messages) for row in found)
