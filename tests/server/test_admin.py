"""The Admin against a real CometMQ broker over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from admin_scenarios import SCENARIOS, Scenario, play, send
from cometmq.client.admin import Admin, PartlyDone
from cometmq.errors import RequestRefused, Unreachable
from cometmq.message import MessageQueue
from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode
from programs import Program, write_conf


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory") as running:
        yield running


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_scenario(scenario: Scenario, broker: LocalBroker) -> None:
    asyncio.run(play(scenario, broker.namesrv))


def test_names_live_in_a_namespace(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Admin(broker.namesrv, namespace="shop") as admin:
            await admin.create_topic("orders", 1)
            await admin.create_group("billing")
            assert await admin.topics() == ["orders"]
            assert await admin.groups() == ["billing"]
            await send(admin, "shop%orders", b"x", KEYS="k")
            [found] = await admin.messages_by_key("orders", "k")
            assert (found.topic, found.stored_topic) == ("orders", "shop%orders")
            queue = MessageQueue("orders", broker.broker_name, 0)
            assert await admin.reset_offset("billing", "orders", "latest") == {queue: 1}
            assert await admin.committed_offsets("billing", "orders") == {queue: 1}
            assert list((await admin.topic_stats("orders")).queues) == [queue]
            assert [one.queue for one in (await admin.consumer_progress("billing")).queues] == [
                queue
            ]
        async with Admin(broker.namesrv) as admin:
            assert "shop%orders" in await admin.topics()

    asyncio.run(work())


def test_a_refusal_keeps_its_code_and_names_the_broker(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Admin(broker.namesrv) as admin:
            broker.fail(
                RequestCode.UPDATE_AND_CREATE_TOPIC, response_code=ResponseCode.NO_PERMISSION
            )
            with pytest.raises(RequestRefused, match=broker.broker_name) as refused:
                await admin.create_topic("refused")
            assert refused.value.code == ResponseCode.NO_PERMISSION
            assert "LocalBroker.fail" in refused.value.remark

    asyncio.run(work())


def test_settings_that_are_not_live_are_refused(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Admin(broker.namesrv) as admin:
            with pytest.raises(RequestRefused, match="brokerName") as refused:
                await admin.update_broker_config({"brokerName": "other"})
            assert refused.value.code == ResponseCode.NO_PERMISSION

    asyncio.run(work())


def test_old_brokers_without_351_are_asked_for_all_topics(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Admin(broker.namesrv) as admin:
            await admin.create_topic("old", 2)
            broker.fail(
                RequestCode.GET_TOPIC_CONFIG,
                response_code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            )
            assert (await admin.topic("old"))[broker.broker_name].read_queues == 2

    asyncio.run(work())


def test_nobody_online_on_an_old_broker_offsets_are_committed(broker: LocalBroker) -> None:
    async def work() -> None:
        async with Admin(broker.namesrv) as admin:
            await admin.create_topic("plain", 1)
            await admin.create_group("plain-group")
            await send(admin, "plain", b"x")
            queue = MessageQueue("plain", broker.broker_name, 0)
            for code in (ResponseCode.CONSUMER_NOT_ONLINE, ResponseCode.SYSTEM_ERROR):
                broker.fail(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, response_code=code)
                assert await admin.reset_offset("plain-group", "plain", "latest") == {queue: 1}
                assert await admin.committed_offsets("plain-group", "plain") == {queue: 1}
            broker.fail(
                RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
                response_code=ResponseCode.CONSUMER_NOT_ONLINE,
            )
            now = await admin.reset_offset("plain-group", "plain", "latest", force=False)
            assert now == {queue: 1}

    asyncio.run(work())


def test_one_broker_failing_does_not_hide_the_others(
    start: Callable[..., Program], up: Callable[..., Program], tmp_path: Path
) -> None:
    first = up({"brokerName": "alpha"})
    second = start(
        "broker",
        *("--namesrv", first.namesrv, "--port", "0", "--store", str(tmp_path / "beta")),
        *("--conf", write_conf(tmp_path / "beta.conf", {"brokerName": "beta"})),
    ).ready()

    async def work() -> None:
        async with Admin(first.namesrv) as admin:
            assert await admin.create_topic("both", 2) == ["alpha", "beta"]
            assert set(await admin.topic("both")) == {"alpha", "beta"}
            assert len((await admin.topic_route("both")).to_send) == 4
            assert await admin.create_topic("one", 2, brokers="beta") == ["beta"]
            assert set(await admin.topic("one")) == {"beta"}
            assert len((await admin.topic_stats("both")).queues) == 4
            await admin.create_group("readers")
            assert set(await admin.group("readers")) == {"alpha", "beta"}
            moved = await admin.reset_offset("readers", "both", "latest")
            assert len(moved) == 4
            await admin.update_broker_config({"fileReservedTime": "51"}, "beta")
            assert (await admin.broker_config("alpha"))["fileReservedTime"] != "51"
            second.process.send_signal(19)  # it no longer answers, and stays registered
            async with Admin(first.namesrv, timeout_ms=500) as quick:
                with pytest.raises(PartlyDone, match="beta: no answer from") as failed:
                    await quick.create_group("writers")
                assert list(failed.value.done) == ["alpha"]
                assert list(failed.value.failed) == ["beta"]
                with pytest.raises(PartlyDone, match="done on alpha"):
                    await quick.topic_stats("both")

    asyncio.run(work())
    second.process.send_signal(18)


def test_unreachable_name_servers_are_named() -> None:
    async def work() -> None:
        async with Admin("127.0.0.1:1", connect_timeout_ms=500) as admin:
            with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 refused"):
                await admin.topics()

    asyncio.run(work())
