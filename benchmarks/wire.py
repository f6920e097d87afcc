"""Sends and pulls over a real socket against `cometmq up`, and what they cost the server.

Prints messages/s, and server CPU microseconds per message (the steadier figure on a busy machine),
for several shapes (connections x in flight). Requests are encoded once and re-sent with only their
ids changed, so that the generator, plain Python, costs as little as it can; at the pipelined shapes
the generator and not the server may still be the limit, which the CPU figure is not touched by.
One line a run is appended to benchmarks/results/wire.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cometmq.client.remote import Remote
from cometmq.wire import headers, properties
from cometmq.wire.codes import PullFlag, RequestCode
from cometmq.wire.frame import Frame, encode_frame

TOPIC = "BenchmarkTest"
RESULTS = Path(__file__).parent / "results" / "wire.jsonl"
SHAPES = ((1, 1), (1, 64), (16, 16), (64, 1))


def _send_frame(body_bytes: int, queue_id: int) -> bytes:
    header = headers.SendHeader(
        producerGroup="bench",
        topic=TOPIC,
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=queue_id,
        sysFlag=0,
        bornTimestamp=int(time.time() * 1000),
        flag=0,
        properties=properties.build(
            {"KEYS": "k1", "UNIQ_KEY": "7F000001000078308DB1420C00000000", "TAGS": "a"}
        ),
        reconsumeTimes=0,
    )
    return encode_frame(
        Frame(
            RequestCode.SEND_MESSAGE_V2,
            opaque=1_000_000,
            ext=headers.send_v2_ext(header),
            body=b"x" * body_bytes,
        )
    )


def _pull_frame(queue_id: int) -> bytes:
    header = headers.PullHeader(
        consumerGroup="bench",
        topic=TOPIC,
        queueId=queue_id,
        queueOffset=0,
        maxMsgNums=32,
        sysFlag=int(PullFlag.SUBSCRIPTION),
        subscription="*",
    )
    return encode_frame(
        Frame(RequestCode.PULL_MESSAGE, opaque=1_000_000, ext=headers.to_ext(header))
    )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Flow:
    """One connection that keeps `in_flight` requests outstanding."""

    def __init__(self, address: str, frame: bytes, in_flight: int) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frame = frame
        self.done = 0
        self.need = 0
        self.buffer = bytearray()
        self.socket.sendall(frame * in_flight)

    def receive(self) -> int:
        """Count complete answers, and send one new request for each."""
        self.buffer += self.socket.recv(1 << 20)
        count, at, buffer = 0, 0, self.buffer
        while len(buffer) - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if len(buffer) - at - 4 < size:
                break
            at += 4 + size
            count += 1
        if at:
            del buffer[:at]
        if count:
            self.socket.sendall(self.frame * count)
        return count


def measure(
    address: str, pid: int, frames: list[bytes], connections: int, in_flight: int, seconds: float
) -> tuple[float, float]:
    """(requests per second, server CPU us per request)."""
    selector = selectors.DefaultSelector()
    flows = [
        _Flow(address, frames[number % len(frames)], in_flight) for number in range(connections)
    ]
    for flow in flows:
        selector.register(flow.socket, selectors.EVENT_READ, flow)
    for phase_seconds in (seconds / 4, seconds):  # the first one only warms up
        done = 0
        cpu, began = _cpu_seconds(pid), time.monotonic()
        while time.monotonic() - began < phase_seconds:
            for key, _ in selector.select(0.1):
                done += key.data.receive()
        took, cpu = time.monotonic() - began, _cpu_seconds(pid) - cpu
    for flow in flows:
        flow.socket.close()
    return done / took, cpu / max(done, 1) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape")
    parser.add_argument("--body", type=int, default=128, help="bytes per message")
    parser.add_argument("--sync", action="store_true", help="SYNC_FLUSH")
    arguments = parser.parse_args()
    results: dict[str, object] = {"body": arguments.body, "sync": arguments.sync}
    with tempfile.TemporaryDirectory(prefix="cometmq-bench-") as folder:
        conf = Path(folder) / "broker.conf"
        conf.write_text(f"flushDiskType={'SYNC_FLUSH' if arguments.sync else 'ASYNC_FLUSH'}\n")
        command = [sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0"]
        command += ["--broker-port", "0", "--store", folder + "/store"]
        command += ["--broker-conf", str(conf), "--log-level", "WARNING"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(server.pid, {cores[0]})
            os.sched_setaffinity(0, {cores[1]})
        try:
            assert server.stdout is not None
            places = dict(part.split("=", 1) for part in server.stdout.readline().split()[1:])
            address = places["broker"]
            with Remote(address) as remote:
                remote.call(RequestCode.GET_BROKER_RUNTIME_INFO)
            print(f"{'shape':>8}  {'requests/s':>11}  {'messages/s':>11}  {'CPU us/message':>14}")
            sends = [_send_frame(arguments.body, queue_id) for queue_id in range(8)]
            for connections, in_flight in SHAPES:
                rate, cpu = measure(
                    address, server.pid, sends, connections, in_flight, arguments.seconds
                )
                name = f"{connections}x{in_flight}"
                print(f"{name:>8}  {rate:>11,.0f}  {rate:>11,.0f}  {cpu:>14.1f}   send")
                results[f"send {name}"] = [round(rate), round(cpu, 2)]
            pulls = [_pull_frame(queue_id) for queue_id in range(8)]
            rate, cpu = measure(address, server.pid, pulls, 16, 1, arguments.seconds)
            cost = f"{cpu / 32:>14.2f}   pull of 32"
            print(f"{'16x1':>8}  {rate:>11,.0f}  {rate * 32:>11,.0f}  {cost}")
            results["pull 16x1"] = [round(rate * 32), round(cpu / 32, 3)]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(10)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    results = {"commit": commit, "at": time.strftime("%Y-%m-%dT%H:%M:%S")} | results
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
