"""Driver and workers are killed at every step of a micro-batch: nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet as pq
from sink_help import count_topic, read_topic

from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode

BATCH = RequestCode.SEND_BATCH_MESSAGE
ROWS, BAD = 1500, 4  # of each file
WAIT_S = 600  # a JVM on a busy machine
SOURCE = str(Path(__file__).parents[2] / "src")


class Driver:
    """The program in sink_driver.py, with all that it starts."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("sink_driver.py")), *arguments],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": SOURCE},
            )

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        give_up = time.monotonic() + WAIT_S
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"did not come so far: {self._log.read_text()[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Driver and JVM, at once; the Python workers find out by themselves, and may send on."""
        family = _family(self._process.pid)
        for pid in (pid for pid in family if "pyspark.daemon" not in _command(pid)):
            _kill(pid)
        self._process.wait()
        give_up = time.monotonic() + 30
        while any(_command(pid) for pid in family) and time.monotonic() < give_up:
            time.sleep(0.05)
        for pid in family:
            if "pyspark.daemon" in _command(pid):
                _kill(pid)

    def kill_workers(self) -> int:
        """The Python workers alone: Spark runs their tasks again."""
        daemons = [pid for pid in _family(self._process.pid) if "pyspark.daemon" in _command(pid)]
        workers = [pid for pid in daemons if _parent(pid) in daemons]
        for pid in workers:
            _kill(pid)
        return len(workers)

    def finish(self) -> None:
        assert self._process.wait(WAIT_S) == 0, self._log.read_text()[-3000:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _family(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


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

    def start(self) -> Driver:
        names = [str(self.folder / name) for name in ("in", "checkpoint", "bad", "hold")]
        return Driver([self._broker.namesrv, "killed", *names], self.folder / "driver.log")

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
        driver.kill()
        broker.clear_faults()
        middle = world.stored()
        assert 300 <= middle < ROWS

        # Messages are stored, and their answers are on their way for ever.
        broker.drop(BATCH, times=100_000, after=(ROWS - middle) // 100)
        driver = world.start()
        driver.wait_until(lambda: world.stored() > middle)
        time.sleep(1)
        driver.kill()
        broker.clear_faults()

        # All is acknowledged, and the commit has not begun; then the commit is done, and Spark has
        # not noted it.
        for point in ("before", "after"):
            (world.hold / point).touch()
            driver = world.start()
            driver.wait_until((world.hold / "held").exists)
            driver.kill()
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
