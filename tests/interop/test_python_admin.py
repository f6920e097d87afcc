"""Our Admin against Apache's brokers, and CometMQ's: the same scenarios, the same answers; and what
it sees of the official Java consumer.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cometmq.client.admin import Admin
from cometmq.client.admin_members import ConsumerProgress
from cometmq.errors import CometError

from .conftest import SIZES
from .driver import Driver
from .servers import Server, Settings, selected_servers, start
from .toolchain import Toolchain
from .versions import CLIENTS

sys.path.insert(0, str(Path(__file__).parents[1]))

from admin_scenarios import SCENARIOS, Scenario, play, send, until

pytestmark = pytest.mark.interop

JOIN_S = 40


@pytest.fixture(scope="module", params=["comet", "apache-4", "apache-5"])
def peer(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param not in selected_servers():
        pytest.skip(f"{request.param} is not among COMETMQ_INTEROP_SERVERS")
    folder = tmp_path_factory.mktemp(f"admin-{request.param}")
    running = start(request.param, toolchain, Settings(folder, folder / "store", sizes=SIZES))
    yield running
    running.kill()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_scenario(scenario: Scenario, peer: Server) -> None:
    asyncio.run(play(scenario, peer.namesrv))


@contextlib.contextmanager
def java_member(driver: Driver, topic: str, group: str) -> Iterator[None]:
    """The official push consumer, which reads until it is killed."""
    words = ["rebalance-member", "--namesrv", driver.server.namesrv]
    words += ["--topic", topic, "--group", group]
    with (driver.folder / "java-member.log").open("wb") as log:
        process = subprocess.Popen(
            [*driver._java(), "interop.Scenario", *words],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def test_a_java_consumer_is_seen_and_moved(driver: Driver) -> None:
    topic, group = f"AdminJava-{driver.client}", f"AdminJavaGroup-{driver.client}"

    async def work() -> None:
        async with Admin(driver.server.namesrv, timeout_ms=10_000) as admin:
            await admin.create_topic(topic, 2)
            await admin.create_group(group)
            with java_member(driver, topic, group):
                await until(lambda: is_online(admin), bool, timeout_s=JOIN_S)
                for number in range(4):
                    await send(admin, topic, b"shared-%d" % number, number % 2)
                # Java commits every 5 s, first after 10 s.
                progress = await until(lambda: all_read(admin), caught_up, timeout_s=JOIN_S)
                online = await admin.consumer_connections(group)
                [client] = online.clients
                release = CLIENTS[driver.client]
                assert (client.language, client.version_name) == ("JAVA", release)
                assert online.subscriptions[topic].expression == "*"
                assert {one.client_id for one in progress.queues if one.queue.topic == topic} == {
                    client.client_id
                }
                running = await admin.consumer_running_info(
                    group, client.client_id, with_stacks=True
                )
                assert topic in {queue.topic for queue in running.queues}
                assert running.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
                assert any(state.last_pull is not None for state in running.queues.values())
                assert topic in running.subscriptions
                assert "consumeOKTPS" in running.rates[topic]
                assert "java" in running.stacks
                moved = await admin.reset_offset(group, topic, "earliest")
                assert set(moved.values()) == {0}
                await until(count_read, lambda count: count >= 8, timeout_s=JOIN_S)

    async def is_online(admin: Admin) -> bool:
        try:
            online = await admin.consumer_connections(group)
            running = await admin.consumer_running_info(group, online.clients[0].client_id)
        except CometError:
            return False
        return len([queue for queue in running.queues if queue.topic == topic]) == 2

    async def all_read(admin: Admin) -> ConsumerProgress:
        return await admin.consumer_progress(group)

    def caught_up(progress: ConsumerProgress) -> bool:
        offsets = [one.consumer_offset for one in progress.queues if one.queue.topic == topic]
        return offsets == [2, 2]

    async def count_read() -> int:
        return (driver.folder / "java-member.log").read_text(errors="replace").count("shared-")

    asyncio.run(work())
