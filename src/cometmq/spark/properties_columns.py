"""The properties of many messages as columns.

Owns: taking the property strings of a batch apart, for all its messages at once. One rule: the
result is what wire/properties.py makes of each string; a batch in which one breaks the format is
handed to it whole.

    name 0x01 value 0x02 name 0x01 value 0x02 ...       of message after message, contiguous
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from cometmq.spark.gather import (
    COMPILED,
    Data,
    ShortInts,
    nullable,
    numbers,
    slices,
    text_column,
)
from cometmq.wire import properties as wire

_MAP = pa.map_(pa.string(), pa.string())


class Places:
    """Some properties of a batch, found by the compiled walk (_fast/walk.pyx) in their buffer:
    of each name begin and end in turn, -1 where a message has none."""

    def __init__(self, data: Data, places: dict[bytes, ShortInts]) -> None:
        self._data = data
        self._places = places

    def column(self, name: bytes) -> pa.Array:
        """One property of every message; null where it is not."""
        assert COMPILED is not None  # who else found the places?
        places = self._places[name]
        count = len(places) // 2
        missing, is_there, offsets, values = COMPILED.cut_places(self._data, places)
        if missing == count:
            return pa.nulls(count, pa.string())
        buffers = [pa.py_buffer(one) for one in (is_there, offsets, values)]
        if not missing:
            buffers[0] = None
        return text_column(pa.Array.from_buffers(pa.binary(), count, buffers, missing))


class Properties:
    """The properties of a batch: `packed` has one binary value a message."""

    def __init__(self, packed: pa.Array) -> None:
        self._packed = packed
        self._count = count = len(packed)
        _, bounds, values = packed.buffers()
        self._bounds = np.frombuffer(bounds, np.int32, count + 1).astype(np.int64)
        self._values = values if values is not None else pa.py_buffer(b"")
        data = np.frombuffer(self._values, np.uint8)[: int(self._bounds[-1])]
        self._data = data
        self._middles = np.flatnonzero(data == 1)
        self._ends = np.flatnonzero(data == 2)
        self._begins = np.empty_like(self._ends)
        if len(self._ends):
            self._begins[0] = 0
            self._begins[1:] = self._ends[:-1] + 1
        self._is_plain = self._looks_plain()

    def _looks_plain(self) -> bool:
        """Every entry has a name, one 0x01, a value and 0x02, and none spans two messages."""
        middles, ends, begins = self._middles, self._ends, self._begins
        if len(middles) != len(ends):
            return False
        if not len(ends):
            return len(self._data) == 0
        if not ((middles > begins) & (ends > middles + 1)).all():
            return False
        bounds = self._bounds
        filled = bounds[1:][bounds[1:] > bounds[:-1]]
        return bool((self._data[filled - 1] == 2).all())

    @cached_property
    def _texts(self) -> list[dict[str, str]]:
        """One by one: the slow and tolerant way."""
        return [wire.parse(raw.decode("utf-8", "replace")) for raw in self._packed.to_pylist()]

    def _cut(self, begins: Any, ends: Any) -> pa.Array:
        return text_column(slices(self._values, begins, ends))

    def column(self, name: bytes) -> pa.Array:
        """One property of every message; null where it is not."""
        if not self._is_plain:
            return pa.array([one.get(name.decode()) for one in self._texts], pa.string())
        found = np.flatnonzero(self._middles - self._begins == len(name))
        for place, character in enumerate(name):
            found = found[self._data[self._begins[found] + place] == character]
        values = self._cut(self._middles[found] + 1, self._ends[found])
        rows = np.searchsorted(self._bounds, self._begins[found], "right") - 1
        if len(found) == self._count and bool((rows == np.arange(self._count)).all()):
            return values
        picked = np.full(self._count, -1, np.int64)
        picked[rows] = np.arange(len(found))  # of two with the same name the last counts
        return values.take(nullable(picked, picked >= 0))

    def as_map(self) -> pa.Array:
        """All properties of every message."""
        if not self._is_plain:
            return pa.array([list(one.items()) for one in self._texts], _MAP)
        names = self._cut(self._begins, self._middles)
        values = self._cut(self._middles + 1, self._ends)
        bounds = np.searchsorted(self._ends, self._bounds).astype(np.int32)
        if self._has_twins(names, bounds):
            return pa.array([list(one.items()) for one in self._texts], _MAP)
        return pa.MapArray.from_arrays(numbers(bounds), names, values)

    def _has_twins(self, names: pa.Array, bounds: Any) -> bool:
        """Whether a message has two properties of one name; the last would count."""
        if not len(names):
            return False
        encoded = names.dictionary_encode()
        codes = encoded.indices.to_numpy().astype(np.int64)
        rows = np.repeat(np.arange(self._count), np.diff(bounds))
        places = rows * len(encoded.dictionary) + codes
        if bool((places[1:] > places[:-1]).all()):  # names in the same order everywhere
            return False
        return len(np.unique(places)) < len(places)
