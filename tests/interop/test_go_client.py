"""The official Go client, scenario by scenario, against every server.

What a scenario checks is written in `go/main.go`; each runs in a process of its own, on topics of
its own. Apache RocketMQ is the control.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .servers import Server
from .toolchain import CACHE, HERE

pytestmark = pytest.mark.interop

GO_PROJECT = HERE / "go"
BUILD_TIMEOUT_S = 300
SCENARIO_TIMEOUT_S = 180
SCENARIOS = (
    "send",
    "batch",
    "tags",
    "sql",
    "orderly",
    "broadcast",
    "retry",
    "delay",
    "transactions",
    "pull",
    "request",
    "admin",
    "trace",
)


@pytest.fixture(scope="session")
def go_program() -> Path:
    """Built once; no Go, or no way to its modules, and every test here is skipped by that name."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("interop: go is not installed")
    sources = sorted(GO_PROJECT.iterdir())
    print_of = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:16]
    program = CACHE / f"go-{print_of}" / "interop"
    if not program.exists():
        download = [go, "mod", "download"]
        got = subprocess.run(
            download, cwd=GO_PROJECT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
        if got.returncode != 0:
            pytest.skip(f"interop: the Go client can't be had: {got.stderr.strip()[-200:]}")
        subprocess.run(
            [go, "build", "-o", str(program), "."],
            cwd=GO_PROJECT,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    return program


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(any_server: Server, go_program: Path, scenario: str) -> None:
    if (any_server.name, scenario) == ("apache-5", "request"):
        pytest.skip("this client's replies have no body, on which RocketMQ 5.5.0 fails")
    played = subprocess.run(
        [str(go_program), any_server.namesrv, scenario, any_server.name],
        env={**os.environ, "BROKER": any_server.broker},
        capture_output=True,
        text=True,
        timeout=SCENARIO_TIMEOUT_S,
    )
    assert played.returncode == 0, played.stderr[-3000:]
