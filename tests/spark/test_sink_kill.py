"""The driver is killed at every step of a micro-batch and started again: nothing lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet as pq
from sink_help import count_topic, read_topic

from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode

BATCH = RequestCode.SEND_BATCH_MESSAGE
FILES, ROWS, BAD = 5, 1500, 4
WAIT_S = 240


class Driver:
    """The program in sink_driver.py, with all that it starts."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("sink_driver.py")), *arguments],
                stdout=out,
                stderr=out,
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

    def finish(self) -> None:
        assert self._process.wait(WAIT_S) == 0, self._log.read_text()[-3000:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _family(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def test_a_driver_killed_at_every_step(tmp_path: Path) -> None:
    source, hold = tmp_path / "in", tmp_path / "hold"
    for folder in (source, hold):
        folder.mkdir()
    for number in range(FILES):
        lines = [f"row {number * ROWS + n}" for n in range(ROWS)]
        for at in range(BAD):
            lines.insert(at * 300, "")  # no body: a bad row
        path = source / f"{number}.txt"
        path.write_text("\n".join(lines) + "\n")
        os.utime(path, (1_700_000_000 + number,) * 2)

    with LocalBroker() as broker:
        broker.create_topic("killed", queues=4)
        names = [str(tmp_path / name) for name in ("in", "checkpoint", "bad", "hold")]
        arguments = [broker.namesrv, "killed", *names]

        def started() -> Driver:
            return Driver(arguments, tmp_path / "driver.log")

        def stored() -> int:
            return count_topic(broker.namesrv, "killed")

        # In the middle of the sends of the first batch.
        broker.delay(BATCH, 0.2, times=100_000)
        driver = started()
        driver.wait_until(lambda: stored() >= 300)
        driver.kill()
        broker.clear_faults()
        middle = stored()
        assert 300 <= middle < ROWS

        # Messages are stored, and their answers are on their way for ever.
        broker.drop(BATCH, times=100_000, after=(ROWS - middle) // 100)
        driver = started()
        driver.wait_until(lambda: stored() > middle)
        time.sleep(1)
        driver.kill()
        broker.clear_faults()

        # All is acknowledged, and the commit has not begun; then the commit is done, and Spark has
        # not noted it.
        for point in ("before", "after"):
            (hold / point).touch()
            before = stored()
            driver = started()
            driver.wait_until((hold / "held").exists)
            driver.kill()
            assert (hold / "held").read_text().split()[0] == point
            assert point == "after" or stored() > before or before % ROWS == 0
            for name in (point, "held"):
                (hold / name).unlink()

        # The broker dies too, a little later.
        broker.restart(kill=True)
        started().finish()
        bodies = [one.body.decode() for one in read_topic(broker.namesrv, "killed")]

    assert sorted(bodies) == sorted(f"row {n}" for n in range(FILES * ROWS))
    bad = [
        (row["bad_batch"], row["bad_partition"], row["bad_row"])
        for path in sorted((tmp_path / "bad").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len(bad) == len(set(bad)) == FILES * BAD
