"""Real cores behind the real driver on a SimLoop, asked by a client that is plain asyncio."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine

import pytest

from cometmq.config import BrokerConfig
from cometmq.testing.loop import SimLoop, Trace, simulate
from cometmq.testing.server_on_loop import SimServer, sim_broker, sim_name_server
from cometmq.wire import record
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, FrameReader, encode_frame
from cometmq.wire.headers import PullHeader, SendHeader, send_v2_ext, to_ext

NAMESRV = "10.0.0.1:9876"
BROKER = "10.0.1.1:10911"
TOPIC = "Orders"


class Caller:
    """One connection of a client that asks and waits, as a program would that is written today."""

    def __init__(self, address: str, timeout_s: float = 3.0) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host, int(port))
        self._timeout_s = timeout_s
        self._opaque = 0

    async def __aenter__(self) -> Caller:
        self._reader, self._writer = await asyncio.open_connection(*self._place)
        self._frames = FrameReader()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, code: int, ext: dict[str, str], body: bytes = b"") -> Frame:
        self._opaque += 1
        self._writer.write(encode_frame(Frame(code, self._opaque, ext=ext, body=body)))
        async with asyncio.timeout(self._timeout_s):
            while True:
                data = await self._reader.read(65536)
                if not data:
                    raise ConnectionError("the server closed the connection")
                for frame in self._frames.feed(data):
                    if frame.is_response and frame.opaque == self._opaque:
                        return frame


def servers(loop: SimLoop, *, flush: str = "SYNC_FLUSH") -> tuple[SimServer, SimServer]:
    config = BrokerConfig(
        flush=flush,
        namesrv=NAMESRV,
        store_path="simulated",
        log_file_bytes=1 << 17,
        queue_file_bytes=20 * 1000,
        index_slots=100,
        index_entries=1000,
        max_message_bytes=65536,
        register_period_ms=10_000,
    )
    return sim_name_server(loop, NAMESRV), sim_broker(loop, BROKER, config)


async def create(broker: Caller) -> None:
    ext = {"topic": TOPIC, "readQueueNums": "2", "writeQueueNums": "2"}
    ext |= {"perm": "6", "defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG"}
    ext |= {"topicSysFlag": "0", "order": "false"}
    answer = await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


async def send(broker: Caller, body: bytes) -> int:
    header = SendHeader(
        producerGroup="group",
        topic=TOPIC,
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=1,
        sysFlag=0,
        bornTimestamp=1_700_000_000_000,
        flag=0,
        properties="TAGS\x01red\x02",
    )
    answer = await broker.ask(RequestCode.SEND_MESSAGE_V2, send_v2_ext(header), body)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return int(answer.ext["queueOffset"])


async def pull(broker: Caller, at: int) -> list[bytes]:
    header = PullHeader(
        consumerGroup="readers",
        topic=TOPIC,
        queueId=1,
        queueOffset=at,
        maxMsgNums=32,
        sysFlag=4,
        commitOffset=0,
        suspendTimeoutMillis=0,
        subVersion=1,
        subscription="*",
    )
    answer = await broker.ask(RequestCode.PULL_MESSAGE, to_ext(header))
    assert answer.code == ResponseCode.SUCCESS, (answer.code, answer.remark)
    return [one.body for one in record.decode_all(answer.body)]


async def route(name_server: Caller) -> dict[str, str]:
    answer = await name_server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": TOPIC})
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    found = json.loads(answer.body)["brokerDatas"]
    return {one["brokerName"]: next(iter(one["brokerAddrs"].values())) for one in found}


async def journey(loop: SimLoop) -> None:
    """A topic, messages, a pull, a crash, and the same pull again."""
    name_server, broker = servers(loop)
    await name_server.start()
    await broker.start()
    bodies = [f"message {number}".encode() for number in range(20)]
    async with Caller(BROKER) as client:
        await create(client)
        assert [await send(client, body) for body in bodies] == list(range(20))
        assert await pull(client, 0) == bodies
        async with Caller(NAMESRV) as other:
            assert await route(other) == {"broker-a": BROKER}
        broker.crash()
        with pytest.raises(ConnectionError):
            await pull(client, 0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("10.0.1.1", 10911)
    await broker.restart()
    assert broker.boot == 2
    async with Caller(BROKER) as client:
        assert await pull(client, 3) == bodies[3:]
        assert await send(client, b"one more") == 20
        assert await pull(client, 20) == [b"one more"]
    await broker.stop()
    await name_server.stop()
    loop.note(f"log worker jobs and all: {loop.time():.6f}")


def test_what_was_acknowledged_is_pulled_before_and_after_a_crash() -> None:
    threads = threading.active_count()
    trace = simulate(1, journey)
    assert trace.events > 100 and trace.time_s < 20
    assert threading.active_count() == threads, "no thread is left, and none did anything"


def test_the_same_seed_is_the_same_run() -> None:
    first = simulate(5, journey)
    assert simulate(5, journey) == first
    assert simulate(6, journey).hash != first.hash


def test_another_process_with_another_hash_seed_runs_the_same() -> None:
    program = (
        "import runpy, sys; from cometmq.testing.loop import simulate;"
        f"print(simulate(5, runpy.run_path({__file__!r})['journey']).hash)"
    )
    hashes = set()
    for hash_seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        hashes.add(done.stdout.strip())
    assert hashes == {simulate(5, journey).hash}


def played(main: Callable[[SimLoop], Coroutine[object, None, None]], seed: int = 3) -> Trace:
    return simulate(seed, main, longest_s=3_600)


def test_a_power_loss_keeps_what_a_sync_flush_acknowledged() -> None:
    async def main(loop: SimLoop) -> None:
        name_server, broker = servers(loop)
        await name_server.start()
        await broker.start()
        async with Caller(BROKER) as client:
            await create(client)
            await send(client, b"durable")
        broker.crash()
        broker.files.lose_power(0)
        await asyncio.sleep(5)
        await broker.start()
        async with Caller(BROKER) as client:
            assert await pull(client, 0) == [b"durable"]

    for seed in range(5):
        played(main, seed)


def test_a_broker_cut_off_is_silent_and_comes_back() -> None:
    async def main(loop: SimLoop) -> None:
        name_server, broker = servers(loop)
        await name_server.start()
        await broker.start()
        async with Caller(BROKER) as client:
            await create(client)
            loop.network.cut("10.0.1.1")
            with pytest.raises(TimeoutError):
                await send(client, b"on its way")
            loop.network.heal("10.0.1.1")
            await asyncio.sleep(1)
        async with Caller(BROKER) as client:
            assert await pull(client, 0) == [b"on its way"], "no answer is not a no"
        loop.network.cut("10.0.1.1")
        # The cut is the machine's: its own connection to the name server is silent too, and after
        # two minutes the name server takes it for gone.
        await asyncio.sleep(150)
        async with Caller(NAMESRV) as client:
            answer = await client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": TOPIC})
            assert answer.code == ResponseCode.TOPIC_NOT_EXIST
            loop.network.heal("10.0.1.1")
            await asyncio.sleep(30)
            assert await route(client) == {"broker-a": BROKER}

    assert played(main).time_s > 180


def test_an_asynchronous_flush_answers_before_a_slow_disk() -> None:
    async def main(loop: SimLoop) -> None:
        name_server, broker = servers(loop, flush="ASYNC_FLUSH")
        await name_server.start()
        await broker.start()
        async with Caller(BROKER) as client:
            await create(client)
            broker.pace.slow_percent, broker.pace.slow_us = 100, 2_000_000
            began = loop.time()
            for _ in range(20):
                await send(client, bytes(1000))
            assert loop.time() - began < 1
        await broker.stop()

    played(main)


def test_a_process_that_ends_at_a_sync_is_down() -> None:
    async def main(loop: SimLoop) -> None:
        name_server, broker = servers(loop)
        await name_server.start()
        await broker.start()
        async with Caller(BROKER) as client:
            await create(client)
            broker.files.ends_in = 0
            with pytest.raises(ConnectionError):
                await send(client, b"perhaps")
        assert broker.core is None and broker.failure is not None
        broker.files.ends_in = -1
        await broker.start()
        async with Caller(BROKER) as client:
            assert await pull(client, 0) == [b"perhaps"], "a kill loses no page"

    played(main)


async def storm(loop: SimLoop, *, flush: str = "SYNC_FLUSH") -> None:
    """Senders that try again, while the broker is killed, cut off, reset and stalled."""
    rng = loop.rng("storm")
    name_server, broker = servers(loop, flush=flush)
    await name_server.start()
    await broker.start()
    async with Caller(BROKER) as client:
        await create(client)
    acked: dict[bytes, int] = {}

    async def produce(name: str) -> None:
        for number in range(25):
            body = f"{name}-{number}".encode()
            while body not in acked:
                try:
                    async with asyncio.timeout(2), Caller(BROKER, 0.5) as client:
                        acked[body] = await send(client, body)
                except (OSError, TimeoutError):
                    await asyncio.sleep(0.1)
            await asyncio.sleep(rng.random() / 20)

    async def trouble() -> None:
        host, network = BROKER.partition(":")[0], loop.network
        for turn in range(1000):
            await asyncio.sleep(rng.random() / 10)
            fault = rng.randrange(4) if turn else 0
            if fault == 0:
                broker.crash()
                if rng.randrange(2):
                    broker.files.lose_power(50)
                await asyncio.sleep(rng.random() / 4)
                await broker.start()
            elif fault == 1:
                network.cut(host)
                await asyncio.sleep(rng.random())
                network.heal(host)
            elif fault == 2:
                network.reset(BROKER)
            else:
                network.stall(BROKER)
                await asyncio.sleep(rng.random())
                network.go_on(BROKER)

    troubling = asyncio.create_task(trouble())
    await asyncio.gather(*(produce(f"producer{number}") for number in range(4)))
    troubling.cancel()
    await asyncio.gather(troubling, return_exceptions=True)
    loop.network.heal("10.0.1.1")
    loop.network.go_on(BROKER)
    await broker.restart()
    stored: list[bytes] = []
    async with Caller(BROKER) as client:
        while len(stored) <= max(acked.values()):
            stored += await pull(client, len(stored))
    assert len(acked) == 100
    assert all(stored[at] == body for body, at in acked.items()), "acked, and not where it was told"
    assert broker.boot > 2


def test_an_address_in_use_stops_a_start() -> None:
    async def main(loop: SimLoop) -> None:
        name_server, broker = servers(loop)
        await name_server.start()
        await loop.create_server(asyncio.Protocol, "10.0.1.1", 10911)
        with pytest.raises(OSError, match="in use"):
            await broker.start()
        assert broker.core is None

    played(main)


def test_a_storm_loses_nothing_that_was_acknowledged() -> None:
    for seed in range(4):
        played(storm, seed)
    assert played(storm, 0) == played(storm, 0)


def test_a_storm_finds_out_who_acknowledges_too_early() -> None:
    def is_found(seed: int) -> bool:
        try:
            played(lambda loop: storm(loop, flush="ASYNC_FLUSH"), seed)
        except AssertionError:
            return True
        return False

    assert any(is_found(seed) for seed in range(10))
