"""Pull bodies to Arrow RecordBatches, in bulk.

Owns: which bytes of a record become which column. One rule: no Python runs per message: records are
found by one walk, and every column is gathered at once by numpy and Arrow. What that can't do
(hosts of IPv6 with a broker's id, compressed bodies, text that is not UTF-8, properties that break
the format) is done one by one, for the messages it concerns or for their batch.

Layout of a record: wire/record.py. All offsets here are into one contiguous body, which may be many
pulls joined; it is below 2 GiB, the reach of Arrow's 32-bit offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.client.compression import decompress
from cometmq.client.reading import Filter
from cometmq.errors import RecordCorrupt
from cometmq.spark import properties_columns as props
from cometmq.spark.gather import (
    COMPILED,
    LEAST_RECORD,
    big_endian,
    cut,
    flags,
    hexed,
    numbers,
    record_starts,
    slices,
    text_column,
)
from cometmq.wire.codes import SysFlag
from cometmq.wire.record import MAGIC_V1, MAGIC_V2

MAX_BODY_BYTES = 2**31 - 1
_V1, _V2 = MAGIC_V1 & 0xFFFFFFFF, MAGIC_V2 & 0xFFFFFFFF
_BORN_V6, _STORE_V6 = int(SysFlag.BORN_HOST_V6), int(SysFlag.STORE_HOST_V6)
_COMPRESSED = int(SysFlag.COMPRESSED)
_PROPERTY_OF = {"keys": b"KEYS", "tags": b"TAGS", "msg_id": b"UNIQ_KEY"}

_HEAD = np.dtype(
    [
        ("size", ">u4"),
        ("magic", ">u4"),
        ("crc", ">u4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("log_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_ms", ">i8"),
        ("born_host", "V8"),
        ("store_ms", ">i8"),
        ("store_host", "V8"),
        ("reconsume_times", ">i4"),
        ("prepared", ">i8"),
        ("body_size", ">u4"),
    ]
)
assert _HEAD.itemsize == 88

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Records:
    """The records of some bodies, which are contiguous from now on: where each begins, and its
    header's fields."""

    def __init__(self, *bodies: bytes, names: Sequence[bytes] = ()) -> None:
        """`names`: of properties that will be asked for, which are found in passing."""
        size = sum(map(len, bodies))
        if size > MAX_BODY_BYTES:
            raise RecordCorrupt(f"{size} bytes of messages at once; at most {MAX_BODY_BYTES}")
        heads: tuple[bytes, bytes] | None = None
        places: list[bytes] | None = None
        if COMPILED is not None:
            with suppress(ValueError):  # the plain way says what is wrong
                found = COMPILED.join_records(list(bodies), tuple(names))
                self.body, starts, heads, places = found
        if heads is None:
            self.body = b"".join(bodies)
            starts = _starts(self.body)
        self.starts: Ints = np.frombuffer(starts, np.int64)
        self._bytes = np.frombuffer(self.body, np.uint8)
        self._buffer = pa.py_buffer(self.body)
        self._places = {} if places is None else dict(zip(names, places, strict=True))
        if heads is None:
            self._read_heads_plainly()
        else:
            self._take_heads(*heads)

    def __len__(self) -> int:
        return len(self.starts)

    def are_before(self, ends: Ints, bounds: Ints) -> bool:
        """Whether all offsets are before the end that holds for their part of the body."""
        if COMPILED is not None:
            found: bool = COMPILED.are_below(self.queue_offset, self.starts, bounds, ends)
            return found
        return bool((self.queue_offset < ends[parts_of(self.starts, bounds)]).all())

    def keep(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Only those from now on."""
        self.starts = self.starts[mask]
        self._places = {}
        self._read_heads()

    def _read_heads(self) -> None:
        if COMPILED is not None:
            try:
                found = COMPILED.record_heads(self.body, self.starts.tobytes())
            except ValueError:
                pass  # the plain way says what is wrong
            else:
                self._take_heads(*found)
                return
        self._read_heads_plainly()

    def _take_heads(self, small: bytes, large: bytes) -> None:
        shape = (-1, len(self.starts)) if len(self.starts) else (3, 0)
        self.queue_id, self.sys_flag, self.reconsume_times = np.frombuffer(small, np.int32).reshape(
            shape
        )
        shape = (-1, len(self.starts)) if len(self.starts) else (9, 0)
        (
            self.queue_offset,
            self.born_ms,
            self.store_ms,
            self.body_begin,
            self.body_end,
            self.topic_begin,
            self.topic_end,
            self.properties_begin,
            self.properties_end,
        ) = np.frombuffer(large, np.int64).reshape(shape)

    def _read_heads_plainly(self) -> None:
        """The same with numpy, for who has no compiled path."""
        starts, count = self.starts, len(self.starts)
        packed = slices(self._buffer, starts, starts + 88, pa.binary())
        heads: Any = np.frombuffer(packed.buffers()[2] or b"", _HEAD, count)
        self.sys_flag = heads["sys_flag"].astype(np.int32)
        magic = heads["magic"]
        is_v2 = magic == _V2
        wrong = np.flatnonzero(~(is_v2 | (magic == _V1)))
        if len(wrong):
            at = int(starts[wrong[0]])
            raise RecordCorrupt(f"no record at byte {at} of a pull's body: magic {magic[wrong[0]]}")
        # An IPv6 host takes 12 bytes more, and moves what follows.
        is_odd = bool(is_v2.any() or (self.sys_flag & (_BORN_V6 | _STORE_V6)).any())
        after_born = starts + np.where(self.sys_flag & _BORN_V6, 12, 0)
        after_store = after_born + np.where(self.sys_flag & _STORE_V6, 12, 0)
        ends = starts + heads["size"].astype(np.int64)
        if count and bool((after_store + LEAST_RECORD > ends).any()):
            raise self._contradiction(after_store + LEAST_RECORD > ends)
        self.queue_id = heads["queue_id"].astype(np.int32)
        self.queue_offset = heads["queue_offset"].astype(np.int64)
        self.born_ms = heads["born_ms"].astype(np.int64)
        if is_odd:
            self.store_ms = big_endian(self._bytes, after_born + 56, ">i8").astype(np.int64)
            times = big_endian(self._bytes, after_store + 72, ">i4")
            sizes = big_endian(self._bytes, after_store + 84, ">u4").astype(np.int64)
        else:
            self.store_ms = heads["store_ms"].astype(np.int64)
            times = heads["reconsume_times"]
            sizes = heads["body_size"].astype(np.int64)
        self.reconsume_times = times.astype(np.int32)
        self.body_begin = after_store + 88
        self.body_end = self.body_begin + sizes
        if count and bool((self.body_end + 3 > ends).any()):
            raise self._contradiction(self.body_end + 3 > ends)
        length = self._bytes[self.body_end].astype(np.int64)
        self.topic_begin = self.body_end + 1
        if is_odd:
            wide = big_endian(self._bytes, self.body_end, ">u2").astype(np.int64)
            length = np.where(is_v2, wide, length)
            self.topic_begin = np.where(is_v2, self.body_end + 2, self.topic_begin)
        self.topic_end = self.topic_begin + length
        if count and bool((self.topic_end + 2 > ends).any()):
            raise self._contradiction(self.topic_end + 2 > ends)
        self.properties_begin = self.topic_end + 2
        self.properties_end = ends
        written = big_endian(self._bytes, self.topic_end, ">u2").astype(np.int64)
        if count and bool((self.properties_begin + written != ends).any()):
            raise self._contradiction(self.properties_begin + written != ends)

    def _contradiction(self, where: Any) -> RecordCorrupt:
        at = int(self.starts[int(np.flatnonzero(where)[0])])
        return RecordCorrupt(f"a record at byte {at} has lengths that contradict each other")

    # ------------------------------------------------------------------------------------- columns

    def _topics(self) -> pa.Array:
        if not len(self):
            return pa.array([], pa.string())
        first = self.body[int(self.topic_begin[0]) : int(self.topic_end[0])]
        if COMPILED is not None:
            is_same: bool = COMPILED.are_same(self.body, self.topic_begin, self.topic_end)
        else:
            topics = slices(self._buffer, self.topic_begin, self.topic_end, pa.binary())
            is_same_length = bool((self.topic_end - self.topic_begin == len(first)).all())
            whole = pa.py_buffer(first * len(self))
            is_same = is_same_length and topics.buffers()[2].equals(whole)
        if is_same:
            return pa.repeat(pa.scalar(first.decode("utf-8", "replace")), len(self))
        return text_column(cut(self.body, self.topic_begin, self.topic_end, pa.binary()))

    def bodies(self) -> pa.Array:
        """Bodies as their senders had them."""
        found = cut(self.body, self.body_begin, self.body_end, pa.binary())
        packed = np.flatnonzero(self.sys_flag & _COMPRESSED)
        if not len(packed):
            return found
        whole = [
            decompress(found[int(row)].as_py(), int(self.sys_flag[row])) for row in packed.tolist()
        ]
        mask = np.zeros(len(self), np.bool_)
        mask[packed] = True
        return pc.replace_with_mask(found, flags(mask), pa.array(whole, pa.binary()))

    def properties(self, names: Sequence[bytes] = ()) -> props.Properties | props.Places:
        """To be asked for the columns of these names; or for any, and for the whole."""
        begins, ends = self.properties_begin, self.properties_end
        if names and self._places.keys() >= set(names):
            return props.Places(self.body, self._places)
        if names and COMPILED is not None:
            found = COMPILED.property_places(
                self.body, begins.tobytes(), ends.tobytes(), tuple(names)
            )
            if found is not None:
                return props.Places(self.body, dict(zip(names, found, strict=True)))
        return props.Properties(self._property_texts())

    def _property_texts(self) -> pa.Array:
        return cut(self.body, self.properties_begin, self.properties_end, pa.binary())

    def _offset_ids(self) -> pa.Array:
        """The broker's own ids: its host and the place in its log, in hexadecimal."""
        count = len(self)
        is_long = self.sys_flag & _STORE_V6 != 0
        after_born = self.starts + np.where(self.sys_flag & _BORN_V6, 12, 0)
        if not is_long.any():
            host_at = after_born + 64
            raw = np.empty((count, 16), np.uint8)
            raw[:, :8] = self._bytes[host_at[:, None] + np.arange(8)]
            raw[:, 8:] = self._bytes[self.starts[:, None] + np.arange(28, 36)]
            return hexed(raw)
        ids = []
        for row, start in enumerate(self.starts.tolist()):
            at = int(after_born[row]) + 64
            host = self.body[at : at + (20 if is_long[row] else 8)]
            ids.append((host + self.body[start + 28 : start + 36]).hex().upper())
        return pa.array(ids, pa.string())

    def columns(self, names: Sequence[str], broker: pa.Array) -> list[pa.Array]:
        """The columns of these names; `broker` is told by whoever asked for the records."""
        wanted = properties_for(names)
        properties = self.properties(wanted) if wanted else None
        makers: dict[str, Callable[[], pa.Array]] = {
            "topic": self._topics,
            "broker": lambda: broker,
            "queue_id": lambda: numbers(self.queue_id),
            "queue_offset": lambda: numbers(self.queue_offset),
            "body": self.bodies,
            "born_time": lambda: _times(self.born_ms),
            "store_time": lambda: _times(self.store_ms),
            "reconsume_times": lambda: numbers(self.reconsume_times),
            "properties": lambda: props.Properties(self._property_texts()).as_map(),
            "sys_flag": lambda: numbers(self.sys_flag),
        }
        if properties is not None:
            makers["keys"] = lambda: properties.column(b"KEYS")
            makers["tags"] = lambda: properties.column(b"TAGS")
            makers["msg_id"] = lambda: _ids(properties, self._offset_ids)
        return [makers[name]() for name in names]


def _starts(body: bytes) -> bytes:
    try:
        return record_starts(body)
    except ValueError as error:
        raise RecordCorrupt(
            f"a pull's body of {len(body)} bytes breaks off or contradicts itself at byte {error}"
        ) from None


def parts_of(starts: Ints, bounds: Ints) -> Ints:
    """In which part of the body each record is; part n begins at bounds[n]."""
    return np.searchsorted(bounds, starts, "right") - 1


def properties_for(columns: Sequence[str]) -> tuple[bytes, ...]:
    """Names of the properties that these columns are made of."""
    return tuple(_PROPERTY_OF[name] for name in columns if name in _PROPERTY_OF)


def _ids(
    properties: props.Properties | props.Places, otherwise: Callable[[], pa.Array]
) -> pa.Array:
    unique = properties.column(b"UNIQ_KEY")
    return unique if not unique.null_count else pc.coalesce(unique, otherwise())


def _times(ms: Ints) -> pa.Array:
    micros = np.clip(ms, -(2**53), 2**53) * 1000
    return numbers(micros, pa.timestamp("us", tz="UTC"))


def wanted_rows(records: Records, wanted: Filter) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Brokers compare hashes of tags; this looks at the tags themselves. None: all are wanted."""
    if not wanted.tags or not len(records):
        return None
    tags = records.properties([b"TAGS"]).column(b"TAGS")
    exact = [tag for tag in wanted.tags if not tag.endswith("*")]
    mask = pc.is_in(tags, value_set=pa.array(exact, pa.string()))
    for tag in wanted.tags:
        if tag.endswith("*"):
            mask = pc.or_(mask, pc.fill_null(pc.starts_with(tags, tag[:-1]), False))
    found: np.ndarray[Any, np.dtype[np.bool_]] = mask.to_numpy(zero_copy_only=False)
    return None if found.all() else found
