"""Popped messages in a store that changes hands: whoever has it when their time is over brings them
back, and knows what was acknowledged at whomever's.

The first owner gives out all messages of a topic, takes some acknowledgements and some changes of
the invisible time, and stops, cleanly or by kill -9. The second takes acknowledgements for the
first one's receipts, and brings back exactly the rest. The third must find nothing left to do. An
ordered queue stays taken, too.
"""

import asyncio
import time
from pathlib import Path

import pytest

from cometmq.client.remote import Remote
from cometmq.client.simple_consumer import PoppedMessage, SimpleConsumer
from cometmq.wire import headers
from cometmq.wire.codes import RequestCode

from .servers import (
    Chain,
    Launcher,
    Server,
    Settings,
    free_broker_port,
    selected_chains,
    selected_servers,
)

pytestmark = pytest.mark.interop

TOPIC, ORDERED_TOPIC, GROUP, ORDERED_GROUP = "Popped", "PoppedInOrder", "poppers", "orderly"
COUNT = 40
INVISIBLE_S = 60  # the second owner must be up by then, and has some acknowledgements to take
BACK_S = 60  # beyond that, on a busy machine; Apache's broker takes its time after a start
SIZES = {
    "mappedFileSizeCommitLog": str(1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 256),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "mappedFileSizeTimerLog": str(52 * 100 + 30),
}


CHAINS = (
    Chain(("comet", "apache-5", "comet")),
    Chain(("apache-5", "comet", "apache-5")),
    Chain(("comet", "apache-5", "comet"), is_killed=True),
    Chain(("apache-5", "comet", "apache-5"), is_killed=True),
)


@pytest.mark.parametrize("chain", selected_chains(CHAINS), ids=str)
def test_popped_messages_go_from_server_to_server(
    chain: Chain, launcher: Launcher, tmp_path: Path
) -> None:
    if not set(chain.owners) <= selected_servers():
        pytest.skip("COMETMQ_INTEROP_SERVERS leaves out one of them")
    store, port = tmp_path / "store", free_broker_port()

    def start(step: int) -> Server:
        folder = tmp_path / f"step-{step}-{chain.owners[step]}"
        return launcher.start(chain.owners[step], Settings(folder, store, port, SIZES))

    def end(server: Server) -> None:
        if chain.is_killed:
            time.sleep(12)  # offsets are saved every 5 s, the note about order by Apache every 10
            server.kill()
        else:
            server.stop()

    first = start(0)
    for topic, queues in ((TOPIC, 4), (ORDERED_TOPIC, 1)):
        make_topic(first, topic, queues)
        put(first, topic, queues)
    began = time.monotonic()
    popped, in_order = asyncio.run(give_out(first))
    end(first)
    second = start(1)
    asyncio.run(bring_back(second, popped, in_order, began + INVISIBLE_S))
    end(second)
    third = start(2)
    asyncio.run(nothing_left(third))
    third.kill()


async def give_out(server: Server) -> tuple[dict[int, PoppedMessage], list[PoppedMessage]]:
    """What is out, by number; and of the ordered topic."""
    async with SimpleConsumer(GROUP, TOPIC, namesrv=server.namesrv) as one:
        popped = await receive(one, COUNT, 30, INVISIBLE_S)
        assert sorted(popped) == list(range(COUNT))
        await one.ack(popped[0])
        await one.ack([popped[number] for number in range(1, 10)])
        for number in range(10, 14):
            await one.change_invisible(popped[number], INVISIBLE_S + 5)
        await one.ack([popped[10], popped[11]])
    async with SimpleConsumer(
        ORDERED_GROUP, ORDERED_TOPIC, namesrv=server.namesrv, ordered=True
    ) as one:
        in_order = await one.receive(most=4, invisible_s=180, wait_s=5)
        assert [int(each.body) for each in in_order] == [0, 1, 2, 3]
        await one.ack(in_order[0])
    return popped, in_order


async def bring_back(
    server: Server,
    popped: dict[int, PoppedMessage],
    in_order: list[PoppedMessage],
    over_at: float,
) -> None:
    async with SimpleConsumer(GROUP, TOPIC, namesrv=server.namesrv) as one:
        await one.ack([popped[number] for number in range(20, 25)])
        await one.ack(popped[25])
        assert time.monotonic() < over_at, "too slow a machine: these acks were late"
    async with SimpleConsumer(
        ORDERED_GROUP, ORDERED_TOPIC, namesrv=server.namesrv, ordered=True
    ) as one:
        assert await one.receive(most=4, wait_s=1) == [], "the queue is taken"
        await one.ack(in_order[1:])
        following = await one.receive(most=2, invisible_s=60, wait_s=10)
        assert [int(each.body) for each in following] == [4, 5]
        await one.ack(following)
    async with SimpleConsumer(GROUP, TOPIC, namesrv=server.namesrv) as one:
        expected = {12, 13, *range(14, 20), *range(26, COUNT)}
        back = await receive(one, len(expected), INVISIBLE_S + BACK_S, 300)
        assert set(back) == expected
        for each in back.values():
            assert each.reconsume_times == 1
            assert each.topic == TOPIC
            assert "1ST_POP_TIME" in each.properties
        await one.ack(list(back.values()))
        assert await receive(one, 1, 6, 300) == {}


async def nothing_left(server: Server) -> None:
    async with SimpleConsumer(GROUP, TOPIC, namesrv=server.namesrv) as one:
        assert await receive(one, 1, 12, 60) == {}
    async with SimpleConsumer(
        ORDERED_GROUP, ORDERED_TOPIC, namesrv=server.namesrv, ordered=True
    ) as one:
        following = await one.receive(most=2, invisible_s=60, wait_s=10)
        assert [int(each.body) for each in following] == [6, 7]


async def receive(
    one: SimpleConsumer, count: int, timeout_s: float, invisible_s: float
) -> dict[int, PoppedMessage]:
    """By number; none comes twice."""
    found: dict[int, PoppedMessage] = {}
    give_up = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < give_up:
        for each in await one.receive(most=32, invisible_s=invisible_s, wait_s=2):
            assert int(each.body) not in found, each
            found[int(each.body)] = each
    return found


def make_topic(server: Server, topic: str, queues: int) -> None:
    header = headers.CreateTopicHeader(topic, queues, queues, 6, defaultTopic="TBW102")
    with Remote(server.broker, timeout_ms=10_000) as remote:
        remote.call(RequestCode.UPDATE_AND_CREATE_TOPIC, headers.to_ext(header))


def put(server: Server, topic: str, queues: int) -> None:
    with Remote(server.broker, timeout_ms=10_000) as remote:
        for number in range(COUNT):
            header = headers.SendHeader(
                producerGroup="poppers",
                topic=topic,
                defaultTopic="TBW102",
                defaultTopicQueueNums=1,
                queueId=number % queues,
                sysFlag=0,
                bornTimestamp=time.time_ns() // 1_000_000,
                flag=0,
            )
            ext = headers.send_v2_ext(header)
            remote.call(RequestCode.SEND_MESSAGE_V2, ext, b"%d" % number)
