"""A driver program for the tests that kill it: one topic to three places, exactly once each.

    python pipe_driver.py NAMESRV FROM TO FOLDER QUERY...

    topic      our source to our sink
    files      our source to Spark's own Parquet sink
    foreach    our source to a folder of Parquet a batch, overwritten if the batch comes again

FOLDER/hold may have a file `NAME.POINT`: there that query stops, says so by a file `held`, and
waits to be killed. Points, in the order of a micro-batch:

    latest     asked for the next offsets (all before is committed), nothing written yet
    planned    offsets are in the checkpoint, no task has begun
    read       a task has read its first rows
    before     (topic, foreach) all is sent, the commit has not begun
    after      (topic, foreach) the commit is done, Spark has not noted it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import cometmq.spark
from cometmq.spark.sink import StreamWriter
from cometmq.spark.source import RocketMQDataSource
from cometmq.spark.stream import StreamReader

ROWS_OF_A_BATCH = 1500


def stop_at(hold: str, point: str) -> None:
    """`hold`: FOLDER/hold/NAME."""
    wanted = Path(f"{hold}.{point}")
    if wanted.exists():
        wanted.with_name("held").write_text(wanted.name)
        time.sleep(600)


class HeldReader(StreamReader):
    hold: str

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.hold

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.hold = state[1]

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802
        found = super().latestOffset(start, limit)
        if "init" not in start and found != start:
            stop_at(self.hold, "latest")
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Any:
        stop_at(self.hold, "planned")
        return super().partitions(start, end)

    def read(self, partition: Any) -> Iterator[Any]:
        for batch in super().read(partition):
            middle = batch.num_rows // 2
            yield batch.slice(0, middle)
            stop_at(self.hold, "read")
            yield batch.slice(middle)


class HeldWriter(StreamWriter):
    hold: str

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        stop_at(self.hold, "before")
        super().commit(messages, batchId)
        stop_at(self.hold, "after")


class HeldDataSource(RocketMQDataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._hold = str(self.options.pop("hold"))

    @classmethod
    def name(cls) -> str:
        return "rocketmq-held"

    def streamReader(self, schema: Any) -> StreamReader:  # noqa: N802
        made: Any = super().streamReader(schema)
        held = HeldReader(made._options, made._schema)
        held.hold = self._hold
        return held

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:  # noqa: N802
        made: Any = super().streamWriter(schema, overwrite)
        held = HeldWriter(made._options, made._fields)
        held.hold = self._hold
        return held


def main(namesrv: str, source: str, target: str, folder: str, *wanted: str) -> None:
    spark = cometmq.spark.session("pipe", master="local[2,4]", quiet=True)
    spark.dataSource.register(HeldDataSource)

    def hold(name: str) -> str:
        return f"{folder}/hold/{name}"

    def rows(name: str) -> Any:
        reader = spark.readStream.format("rocketmq-held").option("hold", hold(name))
        reader = reader.option("namesrv", namesrv).option("topic", source)
        reader = reader.option("startingOffsets", "earliest").option("minPartitions", "3")
        return reader.option("maxOffsetsPerTrigger", str(ROWS_OF_A_BATCH)).load()

    def begin(name: str, writer: Any) -> Any:
        """One after the other: Spark gives the process of a source 10 s to start, which many at
        once do not manage on a busy machine."""
        checkpoint = f"{folder}/checkpoint-{name}"
        writer = writer.option("checkpointLocation", checkpoint)
        for _ in range(6):
            query = writer.queryName(name).trigger(availableNow=True).start()
            while query.isActive and not query.recentProgress:
                if Path(f"{folder}/hold/held").exists():
                    time.sleep(600)
                time.sleep(0.05)
            if query.exception() is None or "connect back" not in str(query.exception()):
                break
        return query

    def overwrite(frame: Any, number: int) -> None:
        stop_at(hold("foreach"), "before")
        frame.write.mode("overwrite").parquet(f"{folder}/foreach/batch={number}")
        stop_at(hold("foreach"), "after")

    columns = ["body", "tags", "queue_id"]
    to_topic = rows("topic").select("body", "tags").writeStream.format("rocketmq-held")
    to_topic = to_topic.option("hold", hold("topic")).option("batchMessages", "50")
    to_topic = to_topic.option("namesrv", namesrv).option("topic", target)
    to_files = rows("files").select(*columns).writeStream.format("parquet")
    to_each = rows("foreach").select(*columns).writeStream.foreachBatch(overwrite)
    writers = {
        "topic": to_topic,
        "files": to_files.option("path", f"{folder}/files"),
        "foreach": to_each,
    }
    for query in [begin(name, writers[name]) for name in wanted]:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
