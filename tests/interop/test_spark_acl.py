"""Source and sink of the Spark connector against Apache brokers that check every request.

No SparkSession here: the readers and the tasks are what talks to a broker, and the test calls them
as Spark does.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "spark"))

import pyarrow as pa
from sink_help import options, run_task

from cometmq import Admin
from cometmq.errors import CometError
from cometmq.spark.source import RocketMQDataSource

from .conftest import SIZES
from .servers import Server, Settings, selected_servers, start
from .test_python_acl import OWNER, READER, WAIT_S, _settings
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

TOPIC = "acl-spark"
KEYS = {"accessKey": OWNER.access_key, "secretKey": OWNER.secret_key}
WRONG = {"accessKey": OWNER.access_key, "secretKey": "not the secret"}
COUNT = 500


@pytest.fixture(scope="module")
def peer(toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if "apache-4" not in selected_servers():
        pytest.skip("apache-4 is not among COMETMQ_INTEROP_SERVERS")
    folder = tmp_path_factory.mktemp("spark-acl")
    settings = _settings("apache-4", Settings(folder, folder / "store", sizes=SIZES))
    running = start("apache-4", toolchain, settings)
    with Admin(namesrv=running.namesrv, credentials=OWNER) as admin:
        admin.create_topic(TOPIC, queues=2)
    yield running
    running.kill()


def source(peer: Server, keys: dict[str, str], **more: str) -> RocketMQDataSource:
    return RocketMQDataSource({"namesrv": peer.namesrv, "topic": TOPIC, **keys, **more})


def rows_of(reader: Any, partitions: Any) -> list[str]:
    return sorted(
        (
            body.decode()
            for one in partitions
            for batch in reader.read(one)
            for body in batch.column("body").to_pylist()
        ),
        key=int,
    )


def write(peer: Server, keys: dict[str, str], writer: str = "w", count: int = COUNT) -> int:
    body = pa.record_batch({"body": [str(n) for n in range(count)]})
    if count == 1:
        # Delayed, so that it goes as a request for one message: of a batch (320) release 4.9.7
        # checks the signature, and forgets to ask whether its sender may write.
        body = body.append_column("delay_level", pa.array([1], pa.int32()))
    chosen = options(peer.namesrv, topic=TOPIC, sendTimeout="3s", **keys)
    return run_task(chosen, [body], writer=writer)[0].messages


def test_with_the_right_keys_both_work(peer: Server) -> None:
    assert write(peer, KEYS) == COUNT
    found = source(peer, KEYS, columns="body", group="acl-group")
    expected = [str(n) for n in range(COUNT)]
    give_up = time.monotonic() + WAIT_S
    while True:  # Apache's broker shows a message a moment after it has answered
        reader = found.reader(found.schema())
        rows = rows_of(reader, reader.partitions())
        if len(rows) >= COUNT or time.monotonic() > give_up:
            break
        time.sleep(0.2)
    assert rows == expected
    stream: Any = source(
        peer,
        KEYS,
        columns="body",
        group="acl-group",
        startingOffsets="earliest",
        commitOffsetsToGroup="true",
    ).streamReader(found.schema())
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, stream.getDefaultReadLimit())
    assert rows_of(stream, stream.partitions(begin, end)) == expected
    stream.commit(end)
    stream.stop()
    with Admin(namesrv=peer.namesrv, credentials=OWNER) as admin:
        while (lag := admin.consumer_progress("acl-group", TOPIC).lag) and (
            time.monotonic() < give_up
        ):
            time.sleep(0.2)
    assert lag == 0


@pytest.mark.parametrize("keys", [WRONG, {}], ids=["wrong secret", "no key"])
def test_without_them_both_say_why_and_no_secret(peer: Server, keys: dict[str, str]) -> None:
    found = source(peer, keys, columns="body")
    with pytest.raises(CometError, match=r"(?i)signature|accesskey") as refused:
        reader: Any = found.reader(found.schema())
        rows_of(reader, reader.partitions())
    with pytest.raises(CometError, match=r"(?i)signature|accesskey") as unsent:
        write(peer, keys, "stranger")
    for error in (refused, unsent):
        assert "not the secret" not in str(error.value)


def test_who_may_only_read_reads(peer: Server) -> None:
    keys = {"accessKey": READER.access_key, "secretKey": READER.secret_key}
    found = source(peer, keys, columns="body", group="acl-readers")
    reader: Any = found.reader(found.schema())
    assert len(rows_of(reader, reader.partitions())) >= COUNT
    with pytest.raises(CometError, match=r"(?i)permission|perm"):
        write(peer, keys, "reader", count=1)
