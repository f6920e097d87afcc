"""Does a roll to the next log file stall a send? Small files, real disk, every turn timed.

Owns: one broker in this process, with its real driver, worker threads and files; only the socket is
missing. Sends are fed at a steady pace while flushes go on; a turn that rolled to the next log
file is compared with all others. One rule: what is timed is what a client would wait for: the
reading, the append, the dispatch and the writing of the answer.

    roll.py --file-mib 16 --rate 20000 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

from cometmq.config import BrokerConfig
from cometmq.net.clock import Clock
from cometmq.net.driver import _Connection
from cometmq.run import RunningBroker
from cometmq.wire import headers, properties
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame, encode_frame

BATCH = 16


class NoSocket:
    """A transport that takes everything."""

    def set_write_buffer_limits(self, *limits: int) -> None: ...
    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 5555) if name == "peername" else None

    def write(self, data: bytes) -> None: ...
    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...
    def abort(self) -> None: ...


def frame(body: bytes, number: int) -> bytes:
    header = headers.SendHeader(
        producerGroup="bench",
        topic="BenchmarkTest",
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=number % 4,
        sysFlag=0,
        bornTimestamp=0,
        flag=0,
        properties=properties.build({"UNIQ_KEY": f"{number:032X}", "TAGS": "a"}),
        reconsumeTimes=0,
    )
    ext = headers.send_v2_ext(header)
    return encode_frame(Frame(RequestCode.SEND_MESSAGE_V2, opaque=number, ext=ext, body=body))


async def measure(arguments: argparse.Namespace, folder: str) -> tuple[list[float], list[float]]:
    config = BrokerConfig(
        store_path=folder, listen_port=0, log_file_bytes=arguments.file_mib * 1024 * 1024
    )
    running = RunningBroker(config, Clock())
    await running.start()
    driver, store = running.driver, running.core.store
    connection = _Connection(driver)
    connection.connection_made(NoSocket())  # type: ignore[arg-type]
    body = b"x" * arguments.body
    rolled: list[float] = []
    others: list[float] = []
    number = 0
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < arguments.seconds:
        if number > passed * arguments.rate:
            await asyncio.sleep(0.0005)
            continue
        data = b"".join(frame(body, number + n) for n in range(BATCH))
        number += BATCH
        file_before = store._log.tail_begin
        at = time.perf_counter()
        connection.data_received(data)
        driver.settle(driver.clock())
        took_ms = (time.perf_counter() - at) * 1000
        (others if store._log.tail_begin == file_before else rolled).append(took_ms)
        await asyncio.sleep(0)
    await driver.stop()
    return rolled[1:], others  # the first is the first file


def show(name: str, turns: list[float]) -> None:
    turns = sorted(turns)
    if not turns:
        print(f"{name:20} none")
        return
    middle, late = turns[len(turns) // 2], turns[int(len(turns) * 0.99)]
    print(
        f"{name:20} {len(turns):7,} turns   p50 {middle:7.3f}  p99 {late:7.3f}  "
        f"max {turns[-1]:7.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file-mib", type=int, default=16)
    parser.add_argument("--rate", type=int, default=20_000, help="messages a second")
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rolled, others = asyncio.run(measure(arguments, folder))
    show("with a roll", rolled)
    show("without", others)
    slow = sum(took > 10 for took in rolled)
    print(f"rolls that took more than 10 ms: {slow} of {len(rolled)}")


if __name__ == "__main__":
    main()
