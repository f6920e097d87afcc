"""Transactions that one server began and another ends, in one store directory.

Each owner delivers what is committed, forgets what is rolled back, and leaves two transactions
open; the next one asks about just these two, ends them as the producer says, and shows every
message once. Chains without CometMQ would prove nothing new; the control is that Apache's brokers
take ours for their own.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cometmq import aio
from cometmq.client.blocking import Consumer, TransactionProducer
from cometmq.client.received import ReceivedMessage
from cometmq.client.transaction import Outcome
from cometmq.message import Message

from .servers import (
    Chain,
    Launcher,
    Server,
    Settings,
    free_broker_port,
    selected_chains,
    selected_servers,
)
from .test_store_interchange import SIZES

pytestmark = pytest.mark.interop

TOPIC, GROUP = "Orders", "shop"
PROMPT = {
    "transactionTimeOut": "1000",
    "transactionCheckInterval": "1000",
    "transactionCheckMax": "1000",  # Apache takes 15 s and more to stop, and goes on asking
}
# Until the kill nothing is asked: RocketMQ forgets in a crash what it has written again to ask.
PATIENT = {**PROMPT, "transactionTimeOut": "60000"}
# RocketMQ 5 gathers ends for 3 s; who is asked within these is asked about what is ended.
APACHE_5 = {"transactionOpBatchInterval": "100"}
WITHIN_S = 60
QUIET_S = 4  # some checks long


CHAINS = (
    Chain(("comet", "apache-4", "comet")),
    Chain(("comet", "apache-5", "comet")),
    Chain(("apache-4", "comet", "apache-4")),
    Chain(("apache-5", "comet", "apache-5")),
    Chain(("comet", "apache-4"), is_killed=True),
    Chain(("comet", "apache-5"), is_killed=True),
    Chain(("apache-4", "comet"), is_killed=True),
    Chain(("apache-5", "comet"), is_killed=True),
)
# A crash makes RocketMQ 5 forget a rollback of the last 3 s: the producer is asked once more.
FORGETTING = (Chain(("apache-5", "comet"), is_killed=True),)
OUTCOMES = {
    "commit": Outcome.COMMIT,
    "rollback": Outcome.ROLLBACK,
    "open commit": Outcome.UNKNOWN,
    "open rollback": Outcome.UNKNOWN,
}


@pytest.mark.parametrize("chain", selected_chains(CHAINS), ids=str)
def test_open_transactions_go_from_server_to_server(
    chain: Chain, launcher: Launcher, tmp_path: Path
) -> None:
    if not set(chain.owners) <= selected_servers():
        pytest.skip("COMETMQ_INTEROP_SERVERS leaves out one of them")
    store, port = tmp_path / "store", free_broker_port()
    delivered: list[bytes] = []
    left: set[bytes] = set()
    last = len(chain.owners) - 1
    for step, owner in enumerate(chain.owners):
        folder = tmp_path / f"step-{step}-{owner}"
        pace = PATIENT if chain.is_killed and step < last else PROMPT
        if owner == "apache-5" and pace is PROMPT:
            pace = {**PROMPT, **APACHE_5}
        server = launcher.start(owner, Settings(folder, store, port, {**SIZES, **pace}))
        if step == 0:
            asyncio.run(create_topic(server))
        asked: list[bytes] = []
        seen: list[bytes] = []

        def check(
            message: ReceivedMessage, asked: list[bytes] = asked, step: int = step
        ) -> Outcome:
            if message.body.startswith(b"%d" % step):
                return Outcome.UNKNOWN  # for the next one
            asked.append(message.body)
            return Outcome.COMMIT if message.body.endswith(b"commit") else Outcome.ROLLBACK

        with (
            TransactionProducer(GROUP, check, namesrv=server.namesrv) as producer,
            Consumer(f"looks-{step}", namesrv=server.namesrv, start="first") as consumer,
        ):
            consumer.subscribe(TOPIC, "*", lambda message, seen=seen: seen.append(message.body))
            consumer.start()
            for name, outcome in OUTCOMES.items():
                body = f"{step} {name}".encode()
                producer.send(Message(TOPIC, body), lambda _, outcome=outcome: outcome)
            delivered += [body for body in left if body.endswith(b"commit")]
            delivered.append(b"%d commit" % step)
            await_all(seen, delivered)
            await_all(asked, left)
            if not chain.is_killed or step == last:
                time.sleep(QUIET_S)
            assert sorted(seen) == sorted(delivered)
            forgotten = {b"0 rollback"} if chain in FORGETTING else set()
            assert left <= set(asked) <= left | forgotten
        left = {b"%d open commit" % step, b"%d open rollback" % step}
        if chain.is_killed or step == last:
            server.kill()
        else:
            server.stop()


async def create_topic(server: Server) -> None:
    async with aio.Admin(namesrv=server.namesrv) as admin:
        await admin.create_topic(TOPIC, 1)


def await_all(found: list[bytes], wanted: list[bytes] | set[bytes]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not set(found) >= set(wanted):
        assert time.monotonic() < deadline, f"{found} after {WITHIN_S} s, not all of {wanted}"
        time.sleep(0.1)
