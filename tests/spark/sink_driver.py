"""A driver program for the tests that kill it: text files to a topic, one micro-batch a file.

    python sink_driver.py NAMESRV TOPIC SOURCE CHECKPOINT BAD HOLD

HOLD is a folder. Where a file `before` or `after` lies in it, the commit of the sink stops before
or after its work, says so by a file `held`, and waits to be killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import cometmq.spark
from cometmq.spark.sink import StreamWriter
from cometmq.spark.source import RocketMQDataSource


class HeldWriter(StreamWriter):
    hold: str

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        self._stop_at("before", batchId)
        super().commit(messages, batchId)
        self._stop_at("after", batchId)

    def _stop_at(self, point: str, batch: int) -> None:
        if (Path(self.hold) / point).exists():
            (Path(self.hold) / "held").write_text(f"{point} {batch}")
            time.sleep(600)


class HeldDataSource(RocketMQDataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._hold = str(self.options.pop("hold"))

    @classmethod
    def name(cls) -> str:
        return "rocketmq-held"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:  # noqa: N802
        made = super().streamWriter(schema, overwrite)
        assert isinstance(made, StreamWriter)
        held = HeldWriter(made._options, made._fields)
        held.hold = self._hold
        return held


def main(namesrv: str, topic: str, source: str, checkpoint: str, bad: str, hold: str) -> None:
    spark = cometmq.spark.session(
        "driver",
        master="local[2,4]",  # a task whose worker was killed is tried again
        quiet=True,
        settings={
            "spark.sql.files.maxPartitionBytes": "4k",
            "spark.sql.files.openCostInBytes": "1k",
        },
    )
    spark.dataSource.register(HeldDataSource)
    query = (
        spark.readStream.format("text")
        .option("maxFilesPerTrigger", "1")
        .load(source)
        .withColumnRenamed("value", "body")
        .writeStream.format("rocketmq-held")
        .options(namesrv=namesrv, topic=topic, badRecordsPath=bad, hold=hold, batchMessages="100")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
