"""Rows to RocketMQ's batch entries, in bulk.

Owns: the bytes of an entry and the deterministic unique key. One rule: the same rows in the same
task of the same batch become the same bytes, whatever the time, the machine or the attempt.

    entry       size i32, 0 i32, 0 i32, flag i32 = 0, body length i32, body, properties length i16,
                properties
    unique key  upper-case hex of 16 bytes, in the shape of Java's (ip, pid, node, ms of the month,
                counter): 8 bytes hash, row number's upper 2, 0 i16, 2 bytes hash, its lower 2.
                The hash is of writer, batch and partition. Tools that read a time out of it read
                the first minute of the month, which is never after the message was stored in it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.client.outgoing import SHARDING_KEY
from cometmq.spark.sink_place import Ints
from cometmq.spark.sink_rows import NONE, SEQUENCE, Rows, large, lengths_of

HEAD_BYTES = 20
_FOUR_DIGITS = np.frombuffer(b"".join(b"%04X" % n for n in range(1 << 16)), np.uint32)
"""The hex of every 16-bit number, as the four bytes of its text."""


class UniqueKeys:
    """The unique keys of one task."""

    def __init__(self, writer: str, batch: int, partition: int) -> None:
        digest = hashlib.sha256(f"{writer} {batch} {partition}".encode()).digest()
        raw = digest[:8] + bytes(4) + digest[8:10] + bytes(2)
        self._blank = np.frombuffer(raw.hex().upper().encode(), np.uint32)

    def of(self, numbers: Ints) -> npt.NDArray[np.uint8]:
        """(rows, 32) characters."""
        out = np.empty((len(numbers), 8), np.uint32)  # four characters each
        out[:] = self._blank
        out[:, 4] = _FOUR_DIGITS[numbers >> 16]
        out[:, 7] = _FOUR_DIGITS[numbers & 0xFFFF]
        return out.view(np.uint8)


def entries(
    rows: Rows, keys: npt.NDArray[np.uint8], producer: str, batch: int, n: Ints
) -> pa.Array:
    """The batch entry of every row, as large_binary whose bytes stand side by side."""
    parts: list[Any] = [
        large(b"UNIQ_KEY\x01"),
        fixed(keys),
        large(f"\x02{SEQUENCE}\x01{producer} {batch} ".encode()),
        pa.array(n).cast(pa.large_string()).cast(pa.large_binary()),
        large(b"\x02"),
    ]
    for name, column in (
        ("TAGS", rows.tags),
        ("KEYS", rows.keys),
        (SHARDING_KEY, rows.shard),
        ("DELAY", _digits(rows.delay_level)),
        ("TIMER_DELIVER_MS", _digits(rows.deliver_ms)),
    ):
        if column is not None:
            parts += _field(name, column)
    if rows.properties is not None:
        parts.append(rows.properties)
    property_bytes = np.zeros(rows.count, np.int64)
    for part in parts:
        if isinstance(part, pa.Scalar):
            property_bytes += len(part.as_py())
        else:
            property_bytes += lengths_of(part)
    body_bytes = lengths_of(rows.body)
    head = np.zeros((rows.count, 5), ">i4")
    head[:, 0] = HEAD_BYTES + body_bytes + 2 + property_bytes
    head[:, 4] = body_bytes
    tail = property_bytes.astype(">i2")
    return pc.binary_join_element_wise(
        fixed(head.view(np.uint8)),
        rows.body,
        fixed(tail.view(np.uint8).reshape(-1, 2)),
        *parts,
        large(b""),
    )


def split_entry(entry: bytes) -> tuple[bytes, bytes]:
    """(body, properties) of one entry, for a message that has to travel alone."""
    size = int.from_bytes(entry[16:HEAD_BYTES], "big")
    return entry[HEAD_BYTES : HEAD_BYTES + size], entry[HEAD_BYTES + size + 2 :]


def fixed(table: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of equally many bytes as large_binary, without a copy."""
    count, width = table.shape
    offsets = np.arange(count + 1, dtype=np.int64) * width
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        count,
        [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(table))],
    )


def _digits(numbers: Ints) -> pa.Array | None:
    if (numbers == NONE).all():
        return None
    texts = pa.array(numbers, mask=numbers == NONE).cast(pa.large_string())
    return texts.cast(pa.large_binary())


def _field(name: str, column: pa.Array) -> list[Any]:
    """A property as pieces to join; nothing where the value is null or empty."""
    head, end = large(f"{name}\x01".encode()), large(b"\x02")
    is_none = lengths_of(column) == 0
    if not column.null_count and not is_none.any():
        return [head, column, end]
    joined = pc.binary_join_element_wise(head, column, end, large(b""))
    return [pc.if_else(pa.array(is_none), large(b""), pc.fill_null(joined, large(b"")))]
