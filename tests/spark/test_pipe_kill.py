"""A topic to a topic and to Parquet; driver and workers are killed: 0 lost, 0 doubled."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from conftest import send_numbers

from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode
from spark_programs import SparkProgram, count_topic, read_topic

SEND = RequestCode.SEND_BATCH_MESSAGE


class Pipes:
    """A filled topic, three queries that read it, and what must be there in the end."""

    def __init__(self, folder: Path, broker: LocalBroker, rows: int, *queries: str) -> None:
        self.broker = broker
        self._queries = queries or ("topic", "files", "foreach")
        self._rows = rows
        self._folder = folder
        self._hold = folder / "hold"
        self._hold.mkdir()
        broker.create_topic("from", queues=4)
        broker.create_topic("to", queues=3)
        send_numbers(broker, "from", rows, queues=4)

    def start(self, dice: random.Random | None = None) -> SparkProgram:
        """The queries begin one after the other; with dice in any order."""
        queries = list(self._queries)
        if dice is not None:
            dice.shuffle(queries)
        arguments = [self.broker.namesrv, "from", "to", str(self._folder), *queries]
        program = str(Path(__file__).with_name("pipe_driver.py"))
        return SparkProgram([program, *arguments], self._folder / "driver.log")

    def kill_at(self, point: str) -> None:
        """Run until one query has come to this point, and kill all."""
        (self._hold / point).touch()
        driver = self.start()
        driver.wait_until((self._hold / "held").exists)
        driver.kill_driver()
        assert (self._hold / "held").read_text() == point
        for path in self._hold.iterdir():
            path.unlink()

    def written(self) -> int:
        return count_topic(self.broker.namesrv, "to")

    def traces(self) -> int:
        """Grows with all that any of the queries does."""
        seen = self.written()
        for name in ("files", "foreach"):
            for _, folders, files in os.walk(self._folder / name):
                seen += len(folders) + len(files)
        return seen

    def check(self) -> None:
        expected = [str(n) for n in range(self._rows)]
        if "topic" in self._queries:
            found = [one.body.decode() for one in read_topic(self.broker.namesrv, "to")]
            assert sorted(found, key=int) == expected
        if "files" in self._queries:  # what its log names counts, files of failed attempts do not
            assert self._bodies(_files_of(self._folder / "files")) == expected
        if "foreach" in self._queries:
            assert self._bodies(sorted((self._folder / "foreach").rglob("*.parquet"))) == expected

    @staticmethod
    def _bodies(files: list[Path]) -> list[str]:
        table = ds.dataset([str(path) for path in files]).to_table(["body"])
        return sorted((body.decode() for body in table["body"].to_pylist()), key=int)


def _files_of(folder: Path) -> list[Path]:
    """What the file sink has committed."""
    named = {
        json.loads(line)["path"].removeprefix("file://")
        for log in (folder / "_spark_metadata").glob("[0-9]*")
        for line in log.read_text().splitlines()[1:]
    }
    return sorted(map(Path, named))


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        yield running


def test_killed_in_the_middle(tmp_path: Path, broker: LocalBroker) -> None:
    pipes = Pipes(tmp_path, broker, 4000, "files", "topic")
    pipes.kill_at("files.read")
    broker.delay(SEND, 0.1, times=100_000)
    driver = pipes.start()
    driver.wait_until(lambda: pipes.written() >= 300)
    driver.kill_driver()
    assert pipes.written() < 4000
    driver = pipes.start()
    seen = pipes.written()
    driver.wait_until(lambda: pipes.written() >= seen + 200)
    assert driver.kill_workers() >= 1
    broker.clear_faults()
    driver.finish()
    pipes.check()


POINTS = {
    "topic": ("latest", "planned", "read", "before", "after"),
    "files": ("latest", "planned", "read"),
    "foreach": ("latest", "planned", "read", "before", "after"),
}


@pytest.mark.large
@pytest.mark.parametrize("query", POINTS)
def test_killed_at_every_step(tmp_path: Path, broker: LocalBroker, query: str) -> None:
    pipes = Pipes(tmp_path, broker, 20_000, query)
    for point in POINTS[query]:
        pipes.kill_at(f"{query}.{point}")
    # All of a batch was done, and Spark's note of it never came to the disk.
    pipes.kill_at(f"{query}.latest")
    checkpoint = tmp_path / f"checkpoint-{query}"
    newest, committed = (
        max(int(path.name) for path in (checkpoint / name).iterdir() if path.name.isdecimal())
        for name in ("offsets", "commits")
    )
    assert newest == committed
    commits = checkpoint / "commits"
    for name in (f"{newest}", f".{newest}.crc"):
        (commits / name).unlink(missing_ok=True)
    broker.restart(kill=True)
    pipes.start().finish()
    pipes.check()


@pytest.mark.large
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_time(tmp_path: Path, broker: LocalBroker, seed: int) -> None:
    """Driver or workers, at moments that nobody chose, with a slow broker that loses answers."""
    dice = random.Random(seed)
    pipes = Pipes(tmp_path, broker, 20_000)
    for _ in range(6):
        broker.clear_faults()
        broker.delay(SEND, 0.05, times=100_000)
        broker.drop(SEND, times=2, after=dice.randrange(40))
        begun = pipes.traces()
        driver = pipes.start(dice)
        driver.wait_until(lambda: pipes.traces() != begun)  # noqa: B023 - called at once
        time.sleep(dice.uniform(0, 2))
        for _ in range(dice.randrange(3)):
            driver.kill_workers()
            time.sleep(dice.uniform(0, 1))
        driver.kill_driver()
    broker.clear_faults()
    pipes.start().finish()
    pipes.check()
