"""Type checkers know every keyword of the clients, and no others."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cometmq import aio
from cometmq.client import keywords
from cometmq.client.sending import SendOptions
from cometmq.client.session import Options


def keys(kind: type) -> set[str]:
    return set(kind.__annotations__)


def own(client: type) -> set[str]:
    """The arguments that a client names itself, but for what tells which client it is."""
    found = inspect.signature(client).parameters.values()
    named = {one.name for one in found if one.kind is inspect.Parameter.KEYWORD_ONLY}
    return named - {"namesrv"}


def test_what_all_clients_have() -> None:
    fields = {one.name for one in msgspec.structs.fields(Options)}
    assert keys(keywords.OfAll) == fields
    assert keys(keywords.OfAdmins) == own(aio.Admin)


def test_what_producers_have() -> None:
    fields = {one.name for one in msgspec.structs.fields(SendOptions)}
    assert keys(keywords.OfProducers) - keys(keywords.OfAll) == fields
    more = keys(keywords.OfTracedProducers) - keys(keywords.OfProducers)
    assert more == own(aio.Producer)


@pytest.mark.parametrize(
    ("client", "kind"),
    [
        (aio.Consumer, keywords.OfConsumers),
        (aio.PullConsumer, keywords.OfPullConsumers),
        (aio.SimpleConsumer, keywords.OfSimpleConsumers),
    ],
)
def test_what_consumers_have(client: type, kind: type) -> None:
    assert keys(kind) - keys(keywords.OfAll) == own(client)


GOOD = """
from cometmq import Admin, Consumer, Message, Producer, PullConsumer, SimpleConsumer

with Producer("shop", namesrv="127.0.0.1:9876", retries=1, trace=True) as producer:
    offset: int = producer.send(Message("orders", b"1")).queue_offset
consumer = Consumer("billing", namesrv="127.0.0.1:9876", batch=2, ordered=True)
pulling = PullConsumer("audit", start="first", auto_commit=False)
popping = SimpleConsumer("audit", "orders", timeout_ms=1000)
admin = Admin("127.0.0.1:9876", timeout_ms=1000)
"""
BAD = """
from cometmq import Consumer, Producer, PullConsumer
from cometmq.aio import Producer as AsyncProducer

Producer("shop", nmaesrv="x")
AsyncProducer("shop", retries="x")
Consumer("shop", batch="x")
PullConsumer("shop", pull_cuont=1)
"""


def test_a_type_checker_finds_wrong_keywords(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "good.py", "bad.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line.split(":")[:2] for line in found] == [["bad.py", str(n)] for n in (5, 6, 7, 8)]
    for name, line in zip(("nmaesrv", "retries", "batch", "pull_cuont"), found, strict=True):
        assert f'"{name}"' in line
