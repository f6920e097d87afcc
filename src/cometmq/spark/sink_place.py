"""Which queue a row goes to.

Owns: the layout of a topic and the choice within it. One rule: the choice depends on nothing but
the layout, the row and its number within its task: a task that is run again puts every row where it
put it before, however Spark cuts the rows into Arrow batches.

    queue_id (and broker)   that queue, whatever the key
    sharding_key            the queue our producer's hash_of picks (and Java's by hash)
    neither                 STRIPE rows to a queue, then to the next; tasks and batches start apart
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cometmq.message import MessageQueue
from cometmq.wire.hashing import java_hash

STRIPE = 256
MAX_HASHED_IN_BULK = 64

Ints = npt.NDArray[np.int64]


class Layout:
    """The queues of one topic that rows are spread over, as this attempt of a task sees them.

    The fingerprint is part of the producer id. Should the queues change between two attempts, a
    row may go to another queue, and a number of a sequence may stand for another row. Under the
    former producer id a broker could take such a row for one that it has, and it would be lost.
    """

    __slots__ = ("_by_id", "_by_name", "fingerprint", "queues", "topic")

    def __init__(self, topic: str, queues: Sequence[MessageQueue], cut: tuple[int, int]) -> None:
        self.topic = topic
        self.queues = tuple(queues)
        self._by_name = {(one.broker, one.queue_id): at for at, one in enumerate(self.queues)}
        self._by_id: dict[int, list[int]] = {}
        for at, one in enumerate(self.queues):
            self._by_id.setdefault(one.queue_id, []).append(at)
        text = ";".join(f"{one.broker}:{one.queue_id}" for one in self.queues)
        whole = f"{text} {cut[0]} {cut[1]} {STRIPE}"
        self.fingerprint = hashlib.sha256(whole.encode()).hexdigest()[:8]

    def in_turn(self, rows: Ints, start: int) -> Ints:
        return (rows // STRIPE + start) % len(self.queues)

    def by_key(self, keys: pa.Array) -> Ints:
        """For keys that are large_binary without nulls."""
        return np.abs(java_hashes(keys)) % len(self.queues)

    def find(self, broker: str | None, queue_id: int) -> int | str:
        """The queue's place, or why there is none."""
        if broker is not None:
            at = self._by_name.get((broker, queue_id))
            if at is not None:
                return at
            return f"topic {self.topic!r} has no queue {queue_id} to write on broker {broker!r}"
        places = self._by_id.get(queue_id, [])
        if len(places) == 1:
            return places[0]
        if not places:
            return f"topic {self.topic!r} has no queue {queue_id} to write (it has {self._known()})"
        brokers = ", ".join(self.queues[at].broker for at in places)
        return (
            f"queue {queue_id} of topic {self.topic!r} is on several brokers ({brokers}): "
            "say which in a column 'broker'"
        )

    def _known(self) -> str:
        return f"{len(self.queues)}: {self.queues[0].queue_id} to {self.queues[-1].queue_id}"


def first_turn(partition: int, batch: int) -> int:
    """Where a task starts, so that small tasks don't all write to queue 0."""
    return zlib.crc32(f"{partition} {batch}".encode())


def java_hashes(keys: pa.Array) -> Ints:
    """Java's String.hashCode of large_binary UTF-8 texts without nulls, as signed numbers."""
    count = len(keys)
    offsets, data = buffers_of(keys)
    lengths = offsets[1:] - offsets[:-1]
    most = int(lengths.max(initial=0))
    if most > MAX_HASHED_IN_BULK or (data[offsets[0] : offsets[-1]] > 0x7F).any():
        texts = (key.as_py().decode("utf-8", "surrogatepass") for key in keys)
        return np.fromiter((java_hash(text) for text in texts), np.int64, count)
    hashes = np.zeros(count, np.uint32)
    left = np.argsort(-lengths, kind="stable")  # those that have a character at `at` come first
    ends = np.searchsorted(-lengths[left], -np.arange(1, most + 1), side="right")
    for at in range(most):
        having = left[: ends[at]]
        hashes[having] = hashes[having] * np.uint32(31) + data[offsets[having] + at]
    return hashes.view(np.int32).astype(np.int64)


def buffers_of(array: pa.Array) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Offsets (one more than rows) and bytes of a large_binary array."""
    found: list[Any] = array.buffers()
    begin = array.offset
    offsets = np.frombuffer(found[1], np.int64, len(array) + 1, begin * 8) if found[1] else None
    if offsets is None or not len(array):
        offsets = np.zeros(len(array) + 1, np.int64)
    data = np.frombuffer(found[2], np.uint8) if found[2] is not None else np.zeros(0, np.uint8)
    return offsets, data
