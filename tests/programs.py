"""Real CometMQ processes for tests: start, talk, stop, kill.

Owns: child processes and their output. One rule: whatever a test starts is gone when it ends.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cometmq.client.remote import Remote
from cometmq.message import StoredMessage
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import PullFlag, RequestCode
from cometmq.wire.frame import JSON, Frame

START_TIMEOUT_S = 90  # of a start that has to share the machine with much else

SMALL = {
    "mappedFileSizeCommitLog": "1048576",
    "mappedFileSizeConsumeQueue": "20000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
}
"""Small files, so that a test rolls through many of them."""


class Program:
    """One `cometmq` process."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        launcher: tuple[str, ...] = ("-m", "cometmq"),
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.errors: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._pumps: list[threading.Thread] = []
        for stream, take in (
            (self.process.stdout, self._lines.put),
            (self.process.stderr, self.errors.append),
        ):
            pump = threading.Thread(target=self._pump, args=(stream, take), daemon=True)
            pump.start()
            self._pumps.append(pump)
        self.places: dict[str, str] = {}

    @staticmethod
    def _pump(stream: object, take: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            take(line)  # type: ignore[operator]

    def ready(self) -> Program:
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                if self.process.poll() is not None:
                    break
                continue
            if line.startswith("ready "):
                self.places = dict(part.split("=", 1) for part in line.split()[1:])
                return self
        raise AssertionError(f"not ready: {self.error_text()}")

    def error_text(self) -> str:
        time.sleep(0.05)
        return "".join(self.errors)

    def wait_for_error(self, text: str, timeout_s: float = 10) -> str:
        """The first line on standard error that holds this text."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            for line in list(self.errors):
                if text in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"{text!r} not said: {self.error_text()}")

    @property
    def broker(self) -> str:
        return self.places["broker"]

    @property
    def namesrv(self) -> str:
        return self.places["namesrv"]

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for pump in self._pumps:
            pump.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def write_conf(path: Path, settings: dict[str, str]) -> str:
    path.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    return str(path)


def send(
    remote: Remote,
    topic: str,
    body: bytes,
    *,
    queue_id: int = 0,
    tag: str = "",
    keys: str = "",
    unique: str = "",
    code: int = RequestCode.SEND_MESSAGE_V2,
) -> Frame:
    """One send; the answer, whatever its code."""
    pairs = (("TAGS", tag), ("KEYS", keys), ("UNIQ_KEY", unique))
    table = {name: value for name, value in pairs if value}
    header = headers.SendHeader(
        producerGroup="test-producer",
        topic=topic,
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=queue_id,
        sysFlag=0,
        bornTimestamp=int(time.time() * 1000),
        flag=0,
        properties=properties.build(table),
    )
    is_v2 = code != RequestCode.SEND_MESSAGE
    ext = headers.send_v2_ext(header) if is_v2 else headers.to_ext(header)
    return remote.ask(code, ext, body)


def pull_ext(
    topic: str,
    queue_id: int,
    offset: int,
    *,
    tags: str = "*",
    suspend_ms: int = 0,
    group: str = "test-consumer",
    max_count: int = 32,
) -> dict[str, str]:
    flags = PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if suspend_ms else 0)
    return headers.to_ext(
        headers.PullHeader(
            consumerGroup=group,
            topic=topic,
            queueId=queue_id,
            queueOffset=offset,
            maxMsgNums=max_count,
            sysFlag=flags,
            suspendTimeoutMillis=suspend_ms,
            subscription=tags,
        )
    )


def read_queue(
    address: str, topic: str, queue_id: int, serialize: int = JSON
) -> list[StoredMessage]:
    """All messages of a queue from its least offset on."""
    found: list[StoredMessage] = []
    with Remote(address, serialize=serialize) as remote:
        where = {"topic": topic, "queueId": str(queue_id)}
        offset = int(remote.call(RequestCode.GET_MIN_OFFSET, where).ext["offset"])
        end = int(remote.call(RequestCode.GET_MAX_OFFSET, where).ext["offset"])
        while offset < end:
            answer = remote.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, queue_id, offset))
            found += record.decode_all(answer.body)
            assert int(answer.ext["nextBeginOffset"]) > offset, answer
            offset = int(answer.ext["nextBeginOffset"])
    return found
