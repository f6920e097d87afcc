"""Pipelines against Apache brokers that check every request: the keys come from a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cometmq import Admin, Consumer, Later, Message, Producer
from cometmq.errors import CometError
from cometmq.pipelines import dlq, mirror

from .conftest import SIZES
from .servers import Server, Settings, selected_servers, start
from .test_python_acl import OWNER, _settings
from .test_spark import spark  # noqa: F401 - a fixture
from .toolchain import Toolchain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.interop

WAIT_S = 120
BODIES = [b"%d" % n for n in range(200)]


@pytest.fixture(scope="module", params=["apache-4", "apache-5"])
def peer(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param not in selected_servers():
        pytest.skip(f"{request.param} is not among COMETMQ_INTEROP_SERVERS")
    folder = tmp_path_factory.mktemp(f"pipelines-{request.param}")
    settings = _settings(request.param, Settings(folder, folder / "store", sizes=SIZES))
    running = start(request.param, toolchain, settings)
    yield running
    running.kill()


def keys_in(path: Path, secret: str = OWNER.secret_key) -> str:
    path.write_text(f"accessKey: {OWNER.access_key}\nsecretKey: {secret}\n")
    return str(path)


def send(peer: Server, topic: str, bodies: list[bytes]) -> None:
    with Admin(peer.namesrv, credentials=OWNER) as admin:
        admin.create_topic(topic, queues=2)
    with Producer("shop", namesrv=peer.namesrv, credentials=OWNER) as producer:
        for body in bodies:
            producer.send(Message(topic, body))
    wait_for(peer, topic, bodies)


def wait_for(peer: Server, topic: str, bodies: list[bytes]) -> None:
    """Apache's broker shows a message a moment after it has answered."""
    give_up = time.monotonic() + WAIT_S
    with Admin(peer.namesrv, credentials=OWNER) as admin:
        while True:
            found = [
                one.body
                for queue in admin.topic_route(topic).to_read
                for one in admin.queue_messages(queue, most=1000)
            ]
            if sorted(found) == sorted(bodies):
                return
            assert time.monotonic() < give_up, f"{len(found)} of {len(bodies)} in {topic}"
            time.sleep(0.2)


def test_mirror(spark: SparkSession, peer: Server, tmp_path: Path) -> None:  # noqa: F811
    send(peer, "acl-origin", BODIES)
    words: Any = {"namesrv": peer.namesrv, "topic": "acl-origin", "to_topic": "acl-copy"}
    words |= {"queues": 4, "tell": lambda line: None}
    wrong = keys_in(tmp_path / "wrong", "not the secret")
    with pytest.raises(CometError) as refused:
        mirror(spark, access=wrong, checkpoint=str(tmp_path / "w"), **words)
    assert "not the secret" not in str(refused.value)
    right = keys_in(tmp_path / "tools.yml")
    outcome = mirror(spark, access=right, checkpoint=str(tmp_path / "c"), **words)
    assert outcome.rows == len(BODIES)
    wait_for(peer, "acl-copy", BODIES)


def test_dead_letters_go_back(spark: SparkSession, peer: Server, tmp_path: Path) -> None:  # noqa: F811
    send(peer, "acl-dying", BODIES[:3])
    words: Any = {"namesrv": peer.namesrv, "credentials": OWNER}
    give_up = time.monotonic() + WAIT_S
    with Consumer("acl-billing", start="first", **words) as consumer:
        consumer.subscribe("acl-dying", lambda _: Later(delay_level=-1))
        consumer.start()
        with Admin(peer.namesrv, credentials=OWNER) as admin:
            while len(admin.dead_letters("acl-billing")) < 3:
                assert time.monotonic() < give_up
                time.sleep(0.2)
    outcome = dlq(
        spark,
        namesrv=peer.namesrv,
        groups=["acl-billing"],
        lake=str(tmp_path / "lake"),
        access=keys_in(tmp_path / "tools.yml"),
        redrive=True,
        tell=lambda line: None,
    )
    assert outcome.figures["re-drive: sent"] == 3, outcome.figures
    wait_for(peer, "acl-dying", BODIES[:3] * 2)
