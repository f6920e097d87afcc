"""kill -9 under load, again and again on one store: nothing that was acknowledged is lost.

Real processes. After each restart every acknowledged message is at its offset with its body, the
offsets of each queue have no gap and no repeat, and nothing is there that nobody sent. A killed
process leaves its pages to the kernel, so this holds for asynchronous flush as well.
`COMETMQ_KILLS` sets how many kills each mode gets.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from cometmq.client.remote import Remote
from cometmq.errors import CometError
from programs import SMALL, Program, read_queue, send, write_conf

KILLS = int(os.environ.get("COMETMQ_KILLS", "4"))
PRODUCERS = 6
QUEUES = 4
TOPIC = "orders"


class History:
    """What was sent, and what was acknowledged where."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sent: set[bytes] = set()
        self.acked: dict[tuple[int, int], bytes] = {}
        self.repeated: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._count = 0

    def next_message(self) -> tuple[int, bytes]:
        with self._lock:
            self._count += 1
            body = b"%08d" % self._count + b"x" * self.random.randrange(900)
            self.sent.add(body)
            return self._count, body

    def acknowledge(self, queue_id: int, offset: int, body: bytes) -> None:
        with self._lock:
            if (queue_id, offset) in self.acked:
                self.repeated.append((queue_id, offset))
            self.acked[queue_id, offset] = body


def _produce(address: str, history: History, stop: threading.Event) -> None:
    try:
        with Remote(address) as remote:
            while not stop.is_set():
                number, body = history.next_message()
                queue_id = number % QUEUES
                answer = send(remote, TOPIC, body, queue_id=queue_id, keys=f"k{number}")
                if answer.code == 0:
                    history.acknowledge(queue_id, int(answer.ext["queueOffset"]), body)
    except CometError:
        pass  # the server was killed under us: what was not answered may or may not be there


def _check(address: str, history: History) -> None:
    for queue_id in range(QUEUES):
        found = read_queue(address, TOPIC, queue_id)
        assert [message.queue_offset for message in found] == list(range(len(found)))
        assert all(message.body in history.sent for message in found)
        bodies = {(queue_id, message.queue_offset): message.body for message in found}
        for key, body in history.acked.items():
            if key[0] == queue_id:
                assert bodies.get(key) == body, f"acknowledged at {key} and lost"
    assert history.repeated == []


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_nothing_acknowledged_is_lost(tmp_path: Path, flush: str) -> None:
    conf = write_conf(tmp_path / "broker.conf", SMALL | {"flushDiskType": flush})
    history = History(seed=2026)
    for kill in range(KILLS + 1):
        program = Program(
            *("up", "--namesrv-port", "0", "--broker-port", "0", "--log-level", "WARNING"),
            *("--store", str(tmp_path / "store"), "--broker-conf", conf),
        )
        try:
            address = program.ready().broker
            if kill:
                _check(address, history)
            if kill == KILLS:
                assert program.stop() == 0
                break
            stop = threading.Event()
            producers = [
                threading.Thread(target=_produce, args=(address, history, stop))
                for _ in range(PRODUCERS)
            ]
            for producer in producers:
                producer.start()
            time.sleep(history.random.uniform(0.2, 1.5))
            program.kill()
            stop.set()
            for producer in producers:
                producer.join()
        finally:
            program.close()
    assert len(history.acked) > 100
