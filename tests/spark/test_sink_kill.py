"""Driver and workers are killed at every step of a micro-batch: nothing is lost or doubled."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet as pq
import pytest

from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode
from spark_programs import SparkProgram, count_topic, read_topic

BATCH = RequestCode.SEND_BATCH_MESSAGE
ROWS, BAD = 1500, 4  # of each file

pytestmark = pytest.mark.large  # minutes; test_pipe_kill.py has the quick one of this kind


class World:
    """Files to read, a broker to write to, and what must be there in the end."""

    def __init__(self, folder: Path, broker: LocalBroker, files: int) -> None:
        self.folder = folder
        self.hold = folder / "hold"
        self.hold.mkdir()
        self._broker = broker
        self._files = files
        (folder / "in").mkdir()
        for number in range(files):
            lines = [f"row {number * ROWS + n}" for n in range(ROWS)]
            for at in range(BAD):
                lines.insert(at * 300, "")  # no body: a bad row
            path = folder / "in" / f"{number}.txt"
            path.write_text("\n".join(lines) + "\n")
            os.utime(path, (1_700_000_000 + number,) * 2)
        broker.create_topic("killed", queues=4)

    def start(self) -> SparkProgram:
        names = [str(self.folder / name) for name in ("in", "checkpoint", "bad", "hold")]
        program = str(Path(__file__).with_name("sink_driver.py"))
        arguments = [program, self._broker.namesrv, "killed", *names]
        return SparkProgram(arguments, self.folder / "driver.log")

    def stored(self) -> int:
        return count_topic(self._broker.namesrv, "killed")

    def check(self) -> None:
        bodies = [one.body.decode() for one in read_topic(self._broker.namesrv, "killed")]
        assert sorted(bodies) == sorted(f"row {n}" for n in range(self._files * ROWS))
        bad = [
            (row["bad_batch"], row["bad_partition"], row["bad_row"])
            for path in sorted((self.folder / "bad").glob("*.parquet"))
            for row in pq.read_table(path).to_pylist()
        ]
        assert len(bad) == len(set(bad)) == self._files * BAD


def test_a_driver_killed_at_every_step(tmp_path: Path) -> None:
    with LocalBroker() as broker:
        world = World(tmp_path, broker, files=5)

        # In the middle of the sends of the first batch.
        broker.delay(BATCH, 0.2, times=100_000)
        driver = world.start()
        driver.wait_until(lambda: world.stored() >= 300)
        driver.kill_driver()
        broker.clear_faults()
        middle = world.stored()
        assert 300 <= middle < ROWS

        # Messages are stored, and their answers are on their way for ever.
        broker.drop(BATCH, times=100_000, after=(ROWS - middle) // 100)
        driver = world.start()
        driver.wait_until(lambda: world.stored() > middle)
        time.sleep(1)
        driver.kill_driver()
        broker.clear_faults()

        # All is acknowledged, and the commit has not begun; then the commit is done, and Spark has
        # not noted it.
        for point in ("before", "after"):
            (world.hold / point).touch()
            driver = world.start()
            driver.wait_until((world.hold / "held").exists)
            driver.kill_driver()
            assert (world.hold / "held").read_text().split()[0] == point
            assert world.stored() >= ROWS
            for name in (point, "held"):
                (world.hold / name).unlink()

        broker.restart(kill=True)  # it knows the numbers from its log
        world.start().finish()
        world.check()


def test_workers_killed_in_the_middle_of_batches(tmp_path: Path) -> None:
    with LocalBroker() as broker:
        world = World(tmp_path, broker, files=2)
        broker.delay(BATCH, 0.15, times=100_000)
        driver = world.start()
        killed = 0
        for seen in (300, 1200, ROWS + 300):
            driver.wait_until(lambda: world.stored() >= seen)  # noqa: B023 - called at once
            killed += driver.kill_workers()
        driver.finish()
        assert killed >= 3
        world.check()
