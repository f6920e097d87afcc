"""Pieces cut out of one buffer, all at once.

Owns: the few ways in which numpy and Arrow take many small pieces out of a contiguous buffer. One
rule: nothing here knows what the bytes mean, but for the length word that begins a record.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

COMPILED: ModuleType | None
try:
    COMPILED = import_module("cometmq._fast.walk")
except ImportError:  # installed without a C compiler
    COMPILED = None

LEAST_RECORD = 91
_MAGICS = (0xA7, 0xAB)

Data = bytes | np.ndarray[Any, np.dtype[np.uint8]]
"""A buffer."""
Ints = np.ndarray[Any, np.dtype[np.int64]]
ShortInts = np.ndarray[Any, np.dtype[np.int32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Piece = tuple[Data, int, int]
"""Some of a buffer: from a byte to another."""


def joined(pieces: Iterable[Piece]) -> bytes:
    """The pieces, one behind the other."""
    return b"".join(
        (data if isinstance(data, bytes) else data.data)[begin:end] for data, begin, end in pieces
    )


def cut(body: Data, begins: Any, ends: Any) -> pa.Array:
    """The pieces [begin, end) of a body; compiled if we are, else as `slices` does it."""
    if COMPILED is None:
        return slices(pa.py_buffer(body), begins, ends)
    offsets, values = COMPILED.cut(body, np.ascontiguousarray(begins), np.ascontiguousarray(ends))
    return binary(len(begins), offsets, values)


def binary(count: int, offsets: Any, values: Any) -> pa.Array:
    """So many pieces from their 32-bit offsets, one more than they, and bytes."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def repeated(text: str, count: int) -> pa.Array:
    """The same text in all rows. `pa.repeat` takes ten times as long."""
    raw = text.encode()
    bounds = np.arange(count + 1, dtype=np.int32) * len(raw)
    return binary(count, bounds, raw * count).view(pa.string())


def slices(buffer: pa.Buffer, begins: Any, ends: Any) -> pa.Array:
    """The pieces [begin, end) of a buffer: one copy each, made by Arrow.

    Pieces are in order and don't overlap, so that begins and ends in turn are valid offsets of an
    array in which every other value is a piece.
    """
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = begins
    bounds[1::2] = ends
    both = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(bounds), buffer])
    return both.take(numbers(np.arange(0, 2 * count - 1, 2, dtype=np.int32)))


def numbers(values: Any, kind: pa.DataType | None = None) -> pa.Array:
    """A numpy array as an Arrow array, without a copy.

    `pa.array` does it too, but looks for pandas each time, which takes longer than a batch where
    pandas is not installed.
    """
    values = np.ascontiguousarray(values)
    form = pa.from_numpy_dtype(values.dtype) if kind is None else kind
    return pa.Array.from_buffers(form, len(values), [None, pa.py_buffer(values)])


def nullable(values: Any, is_there: Any) -> pa.Array:
    """As `numbers`, with nulls where a mask is false."""
    form = pa.from_numpy_dtype(values.dtype)
    bits = pa.py_buffer(np.packbits(is_there, bitorder="little"))
    return pa.Array.from_buffers(form, len(values), [bits, pa.py_buffer(values)])


def flags(mask: Any) -> pa.Array:
    """A mask as an Arrow array of booleans."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])


def big_endian(data: Any, at: Any, kind: str) -> Any:
    """The numbers that begin at these bytes."""
    form = np.dtype(kind)
    raw = data[at[:, None] + np.arange(form.itemsize)]
    return np.ascontiguousarray(raw).reshape(-1).view(form)


_DIGITS = np.frombuffer(b"0123456789ABCDEF", np.uint8)


def hexed(raw: Any) -> pa.Array:
    """Rows of bytes as text in hexadecimal."""
    count, width = raw.shape
    text = np.empty((count, 2 * width), np.uint8)
    text[:, 0::2] = _DIGITS[raw >> 4]
    text[:, 1::2] = _DIGITS[raw & 15]
    bounds = np.arange(0, (count + 1) * 2 * width, 2 * width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(bounds), pa.py_buffer(text)]
    )


def text_column(raw: pa.Array) -> pa.Array:
    """Bytes as text; what is not UTF-8 is replaced, as our clients do."""
    try:
        return raw.cast(pa.string())  # checks it
    except pa.ArrowInvalid:
        values = [
            None if one is None else one.decode("utf-8", "replace") for one in raw.to_pylist()
        ]
        return pa.array(values, pa.string())


def record_starts(body: bytes) -> bytes:
    """Where the records of a body begin, as 64-bit numbers; ValueError(byte) where it breaks.

    First by looking for the magic numbers everywhere, which needs no loop; if bodies contain some,
    the chain of lengths does not close and it is walked.
    """
    if not body:
        return b""
    data = np.frombuffer(body, np.uint8)
    at = np.flatnonzero(data[4:] == 0xDA)
    for place, value in ((1, 0xA3), (2, 0x20)):
        at = at[at + 4 + place < len(data)]
        at = at[data[at + 4 + place] == value]
    at = at[at + 7 < len(data)]
    starts = at[np.isin(data[at + 7], _MAGICS)].astype(np.int64)
    if len(starts) and starts[0] == 0:
        ends = starts + big_endian(data, starts, ">u4").astype(np.int64)
        closes = bool((ends[:-1] == starts[1:]).all()) and int(ends[-1]) == len(body)
        if closes and bool((ends - starts >= LEAST_RECORD).all()):
            return starts.tobytes()
    return _walk(body)


def _walk(body: bytes) -> bytes:
    found = []
    at, end = 0, len(body)
    while at < end:
        size = int.from_bytes(body[at : at + 4], "big")
        if size < LEAST_RECORD or at + size > end:
            raise ValueError(at)
        found.append(at)
        at += size
    return np.array(found, np.int64).tobytes()
