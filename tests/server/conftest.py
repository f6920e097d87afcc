"""Fixtures for tests that run real CometMQ processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs import Program, write_conf


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Start `cometmq ARGS`; all of them are gone after the test."""
    running: list[Program] = []

    def begin(*arguments: str, env: dict[str, str] | None = None) -> Program:
        program = Program(*arguments, env=env)
        running.append(program)
        return program

    yield begin
    for program in running:
        program.close()


@pytest.fixture
def up(start: Callable[..., Program], tmp_path: Path) -> Callable[..., Program]:
    """`cometmq up` on free ports with a store below tmp_path."""
    count = [0]

    def begin(settings: dict[str, str] | None = None, *arguments: str) -> Program:
        count[0] += 1
        conf = write_conf(tmp_path / f"broker-{count[0]}.conf", settings or {})
        return start(
            "up",
            *("--namesrv-port", "0", "--broker-port", "0"),
            *("--store", str(tmp_path / "store"), "--broker-conf", conf, *arguments),
        ).ready()

    return begin
