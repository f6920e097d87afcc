"""A stream into memory, for tests that ask what each micro-batch brought."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException

from cometmq.pipelines.running import MOST_STARTS, SLOW_START

WAIT_S = 300  # a JVM on a busy machine


class Stream:
    """A stream into a list, batch by batch, with a checkpoint of its own."""

    def __init__(self, spark: Any, namesrv: str, checkpoint: Path) -> None:
        self.spark = spark
        self.namesrv = namesrv
        self.checkpoint = checkpoint
        self.batches: dict[int, list[int]] = {}
        self.fails_in_batch: int | None = None

    def frame(self, **options: object) -> Any:
        reader = self.spark.readStream.format("rocketmq").option("namesrv", self.namesrv)
        for key, value in options.items():
            reader = reader.option(key, str(value))
        return reader.load()

    def start(self, *, now: bool = True, **options: object) -> Any:
        def take(frame: Any, number: int) -> None:
            found = sorted(int(row.body) for row in frame.select("body").collect())
            if number == self.fails_in_batch:
                raise RuntimeError("failed on purpose")
            self.batches[number] = found

        writer = self.frame(**options).writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        trigger = {"availableNow": True} if now else {"processingTime": "0 seconds"}
        return writer.trigger(**trigger).start()

    def run(self, **options: object) -> list[int]:
        """All that is there now; returns what this run brought."""
        before = set(self.batches)
        for tries_left in reversed(range(MOST_STARTS)):
            query = self.start(**options)
            try:
                assert query.awaitTermination(WAIT_S), "the run did not end"
                break
            except StreamingQueryException as error:  # Spark gives its own process 10 s to start
                if not tries_left or SLOW_START not in str(error):
                    raise
        return sorted(
            n for number, rows in self.batches.items() if number not in before for n in rows
        )

    def all(self) -> list[int]:
        return sorted(number for rows in self.batches.values() for number in rows)

    def wait_for(self, query: Any, wanted: list[int]) -> None:
        ends = time.monotonic() + WAIT_S
        while self.all() != wanted:
            if query.exception() is not None:
                raise query.exception()
            assert time.monotonic() < ends, f"got {len(self.all())} of {len(wanted)}"
            time.sleep(0.05)
