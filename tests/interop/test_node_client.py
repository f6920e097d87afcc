"""A Node client of the remoting protocol (npm's ali-ons, plain JavaScript) against every server.

What it does is written in `node/main.js`; what must have come of it, here. Apache is the control.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from cometmq import Admin

from .servers import Server
from .toolchain import CACHE, HERE

pytestmark = pytest.mark.interop

NODE_PROJECT = HERE / "node"
TIMEOUT_S = 180


@pytest.fixture(scope="session")
def node_project() -> Path:
    """With its packages; no Node, or no way to them, and the test is skipped by that name."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("interop: node and npm are not installed")
    home = CACHE / "node"
    home.mkdir(parents=True, exist_ok=True)
    for one in NODE_PROJECT.iterdir():
        shutil.copy(one, home)
    command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    got = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=TIMEOUT_S)
    if got.returncode != 0:
        pytest.skip(f"interop: the Node client can't be had: {got.stderr.strip()[-200:]}")
    return home


def test_messages_tags_sql_and_a_retry(any_server: Server, node_project: Path) -> None:
    topic = f"node-{any_server.name}"
    with Admin(any_server.namesrv) as admin:  # this client does not create topics
        admin.create_topic(topic, queues=4)
    played = subprocess.run(
        ["node", "main.js", any_server.namesrv, topic],
        cwd=node_project,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert played.returncode == 0, played.stderr[-3000:]
    seen = json.loads(played.stdout.splitlines()[-1])
    assert sorted(seen["all"]) == sorted(f"{n}/{int(n == 7)}" for n in range(50))
    assert sorted(seen["odd"]) == sorted(f"{n}/0" for n in range(1, 50, 2))
    assert sorted(seen["late"]) == sorted(f"{n}/0" for n in range(41, 50))
