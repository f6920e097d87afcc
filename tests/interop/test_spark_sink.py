"""The tasks of the Spark sink against every server: what holds where messages aren't numbered.

No SparkSession here: a task is what writes, and it gets its rows from the test.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "spark"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
from sink_help import options, run_task

from cometmq.client.received import ReceivedMessage
from spark_programs import read_topic

from .conftest import SIZES
from .servers import Server, Settings, selected_servers, start
from .test_python_pull import make_topic
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

SERVERS = [name for name in ("comet", "apache-4", "apache-5") if name in selected_servers()]
COUNT = 3000
DELIVERY_S = 30


@pytest.fixture(scope="module", params=SERVERS)
def peer(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(f"spark-sink-{request.param}")
    running = start(request.param, toolchain, Settings(folder, folder / "store", sizes=SIZES))
    yield running
    running.kill()


def rows(count: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": [f"body {n}" for n in range(count)],
            "tags": [f"tag{n % 3}" for n in range(count)],
            "keys": [[f"k{n}", "all"] for n in range(count)],
            "properties": pa.array(
                [[("n", str(n))] for n in range(count)], pa.map_(pa.string(), pa.string())
            ),
            "sharding_key": [f"s{n % 13}" for n in range(count)],
        }
    )


def read(peer: Server, topic: str, count: int) -> list[ReceivedMessage]:
    """What is stored; Apache's broker shows a message a moment after it has answered."""
    give_up = time.monotonic() + DELIVERY_S
    while len(found := read_topic(peer.namesrv, topic)) < count and time.monotonic() < give_up:
        time.sleep(0.1)
    return found


def test_rows_are_stored_in_order_and_again_only_where_nobody_counts(peer: Server) -> None:
    is_ours = peer.name == "comet"
    make_topic(peer, "sink-rows")
    chosen = options(peer.namesrv, topic="sink-rows", batchMessages=200)
    totals, _, _ = run_task(chosen, [rows(COUNT)])
    assert totals.messages == COUNT and totals.is_sequenced == is_ours
    found = read(peer, "sink-rows", COUNT)
    by_key: dict[str, list[int]] = {}
    for one in found:
        number = int(one.body.split()[1])
        assert one.tags == f"tag{number % 3}" and one.properties["KEYS"] == f"k{number} all"
        assert one.properties["n"] == str(number)
        by_key.setdefault(one.properties["__SHARDINGKEY"], []).append(number)
    assert sorted(n for numbers in by_key.values() for n in numbers) == list(range(COUNT))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())

    run_task(chosen, [rows(COUNT)], attempt=1)
    copies = 1 if is_ours else 2
    found = read(peer, "sink-rows", copies * COUNT)
    assert len(found) == copies * COUNT
    assert len({one.message_id for one in found}) == COUNT  # by which a consumer can tell


def test_delayed_rows(peer: Server) -> None:
    make_topic(peer, "sink-delayed")
    batch = pa.record_batch(
        {
            "body": ["now", "later"],
            "queue_id": pa.array([0, 0], pa.int32()),
            "delay_level": pa.array([0, 1], pa.int32()),
        }
    )
    run_task(options(peer.namesrv, topic="sink-delayed"), [batch])
    assert [one.body for one in read(peer, "sink-delayed", 1)] == [b"now"]
    assert [one.body for one in read(peer, "sink-delayed", 2)][-1] == b"later"
