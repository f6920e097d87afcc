"""Fixtures for users' tests: `rocketmq` and `rocketmq_topic`.

Owns: two fixtures. One rule: pytest loads this file in every run of everybody who has CometMQ
installed, so it imports nothing of it before a test asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from cometmq.testing.local import LocalBroker

_NAME_CHARACTERS = 80  # of the test's name in a topic's; RocketMQ allows 127 in all


@pytest.fixture(scope="session")
def rocketmq() -> Iterator[LocalBroker]:
    """A name server and a broker in this process, in memory, for the whole run."""
    from cometmq.testing.local import LocalBroker

    with LocalBroker(store="memory") as broker:
        yield broker


@pytest.fixture
def rocketmq_topic(rocketmq: LocalBroker, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new topic, for this test alone; its faults end with it."""
    readable = re.sub(r"[^a-zA-Z0-9_-]+", "-", request.node.name)[:_NAME_CHARACTERS]
    topic = f"{readable}-{uuid4().hex[:12]}"
    rocketmq.create_topic(topic)
    yield topic
    rocketmq.clear_faults()
