"""Pull bodies to Arrow RecordBatches, in bulk.

Owns: which bytes of a record become which column. One rule: no Python runs per message: records are
found by one walk, and every column is gathered at once by numpy and Arrow. What that can't do
(hosts of IPv6 with a broker's id, compressed bodies, text that is not UTF-8, properties that break
the format) is done one by one, for the messages it concerns or for their batch.

Layout of a record: wire/record.py. All offsets here are into one buffer, in which the bodies of
many pulls stand with anything between them, as they came from the socket; it is below 2 GiB, the
reach of Arrow's 32-bit offsets. The plain way, without the compiled walk, joins them first.
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
    Data,
    Ints,
    Mask,
    ShortInts,
    big_endian,
    cut,
    flags,
    hexed,
    joined,
    numbers,
    record_starts,
    repeated,
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

_FIELDS = (
    *("starts", "queue_id", "queue_offset", "sys_flag", "born_ms", "store_ms", "reconsume_times"),
    *("body_begin", "body_end", "topic_begin", "topic_end", "properties_begin", "properties_end"),
)


class Records:
    """The records in some pieces of a buffer, piece after piece: where each begins, and its
    header's fields."""

    def __init__(
        self,
        data: Data,
        begins: Ints | None = None,
        ends: Ints | None = None,
        *,
        names: Sequence[bytes] = (),
    ) -> None:
        """All of the buffer if no pieces are named. `names`: of properties that will be asked for,
        which are found in passing."""
        if len(data) > MAX_BODY_BYTES:
            raise RecordCorrupt(f"{len(data)} bytes of messages at once; at most {MAX_BODY_BYTES}")
        if begins is None or ends is None:
            begins, ends = np.array([0], np.int64), np.array([len(data)], np.int64)
        self._names = tuple(names)
        self._places: dict[bytes, ShortInts] = {}
        if COMPILED is not None:
            with suppress(ValueError):  # the plain way says what is wrong
                found = COMPILED.read_records(data, begins, ends, self._names)
                self.data = data
                self._take(*found)
                return
        self.data = joined([(data, *piece) for piece in zip(begins, ends, strict=True)])
        bounds = np.concatenate([[0], np.cumsum(ends - begins)])
        self.starts: Ints = np.frombuffer(_starts(self.data), np.int64)
        edges = np.searchsorted(self.starts, bounds)
        if not np.isin(bounds, [*self.starts[edges[edges < len(self)]], len(self.data)]).all():
            raise RecordCorrupt(f"one of {len(begins)} bodies of pulls breaks off within a record")
        self.counts: Ints = np.diff(edges).astype(np.int64)
        self._has_one_topic: bool | None = None
        self._read_heads_plainly()

    def _take(
        self,
        count: int,
        room: int,
        longs: bytes,
        shorts: bytes,
        counts: bytes,
        has_one_topic: bool,
        places: bytes | None,
    ) -> None:
        """What the compiled walk found."""
        (
            self.starts,
            self.queue_offset,
            self.born_ms,
            self.store_ms,
            self.body_begin,
            self.body_end,
            self.topic_begin,
            self.topic_end,
            self.properties_begin,
            self.properties_end,
        ) = np.frombuffer(longs, np.int64).reshape(10, room)[:, :count]
        self.queue_id, self.sys_flag, self.reconsume_times = np.frombuffer(
            shorts, np.int32
        ).reshape(3, room)[:, :count]
        self.counts = np.frombuffer(counts, np.int64)
        self._has_one_topic = has_one_topic
        if places is not None:
            found = np.frombuffer(places, np.int32).reshape(len(self._names), 2 * room)
            self._places = dict(zip(self._names, found[:, : 2 * count], strict=True))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def parts(self) -> Ints:
        """In which piece of the buffer each record is."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def keep(self, mask: Mask) -> None:
        """Only those from now on."""
        self.counts = np.bincount(self.parts[mask], minlength=len(self.counts)).astype(np.int64)
        for name in _FIELDS:
            setattr(self, name, getattr(self, name)[mask])
        self._places = {
            name: np.ascontiguousarray(found.reshape(-1, 2)[mask]).reshape(-1)
            for name, found in self._places.items()
        }

    def _read_heads_plainly(self) -> None:
        """The same with numpy, for who has no compiled path."""
        starts, count = self.starts, len(self.starts)
        data = np.frombuffer(self.data, np.uint8)
        packed = slices(pa.py_buffer(self.data), starts, starts + 88)
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
            self.store_ms = big_endian(data, after_born + 56, ">i8").astype(np.int64)
            times = big_endian(data, after_store + 72, ">i4")
            sizes = big_endian(data, after_store + 84, ">u4").astype(np.int64)
        else:
            self.store_ms = heads["store_ms"].astype(np.int64)
            times = heads["reconsume_times"]
            sizes = heads["body_size"].astype(np.int64)
        self.reconsume_times = times.astype(np.int32)
        self.body_begin = after_store + 88
        self.body_end = self.body_begin + sizes
        if count and bool((self.body_end + 3 > ends).any()):
            raise self._contradiction(self.body_end + 3 > ends)
        length = data[self.body_end].astype(np.int64)
        self.topic_begin = self.body_end + 1
        if is_odd:
            wide = big_endian(data, self.body_end, ">u2").astype(np.int64)
            length = np.where(is_v2, wide, length)
            self.topic_begin = np.where(is_v2, self.body_end + 2, self.topic_begin)
        self.topic_end = self.topic_begin + length
        if count and bool((self.topic_end + 2 > ends).any()):
            raise self._contradiction(self.topic_end + 2 > ends)
        self.properties_begin = self.topic_end + 2
        self.properties_end = ends
        written = big_endian(data, self.topic_end, ">u2").astype(np.int64)
        if count and bool((self.properties_begin + written != ends).any()):
            raise self._contradiction(self.properties_begin + written != ends)

    def _contradiction(self, where: Any) -> RecordCorrupt:
        at = int(self.starts[int(np.flatnonzero(where)[0])])
        return RecordCorrupt(f"a record at byte {at} has lengths that contradict each other")

    # ------------------------------------------------------------------------------------- columns

    def _topics(self) -> pa.Array:
        if not len(self):
            return pa.array([], pa.string())
        first = bytes(self.data[int(self.topic_begin[0]) : int(self.topic_end[0])])
        if self._has_one_topic is None:
            found = slices(pa.py_buffer(self.data), self.topic_begin, self.topic_end)
            self._has_one_topic = bool(pc.all(pc.equal(found, pa.scalar(first))).as_py())
        if self._has_one_topic:
            return repeated(first.decode("utf-8", "replace"), len(self))
        return text_column(cut(self.data, self.topic_begin, self.topic_end))

    def bodies(self) -> pa.Array:
        """Bodies as their senders had them."""
        found = cut(self.data, self.body_begin, self.body_end)
        packed = np.flatnonzero(self.sys_flag & _COMPRESSED)
        if not len(packed):
            return found
        whole = [
            decompress(found[int(row)].as_py(), int(self.sys_flag[row])) for row in packed.tolist()
        ]
        mask = np.zeros(len(self), np.bool_)
        mask[packed] = True
        return pc.replace_with_mask(found, flags(mask), pa.array(whole))

    def properties(self, names: Sequence[bytes] = ()) -> props.Properties | props.Places:
        """To be asked for the columns of these names; or for any, and for the whole."""
        if names and self._places.keys() >= set(names):
            return props.Places(self.data, self._places)
        return props.Properties(self._property_texts())

    def _property_texts(self) -> pa.Array:
        return cut(self.data, self.properties_begin, self.properties_end)

    def _offset_ids(self) -> pa.Array:
        """The broker's own ids: its host and the place in its log, in hexadecimal."""
        count = len(self)
        is_long = self.sys_flag & _STORE_V6 != 0
        after_born = self.starts + np.where(self.sys_flag & _BORN_V6, 12, 0)
        if not is_long.any():
            data = np.frombuffer(self.data, np.uint8)
            host_at = after_born + 64
            raw = np.empty((count, 16), np.uint8)
            raw[:, :8] = data[host_at[:, None] + np.arange(8)]
            raw[:, 8:] = data[self.starts[:, None] + np.arange(28, 36)]
            return hexed(raw)
        ids = []
        for row, start in enumerate(self.starts.tolist()):
            at = int(after_born[row]) + 64
            host = bytes(self.data[at : at + (20 if is_long[row] else 8)])
            ids.append((host + bytes(self.data[start + 28 : start + 36])).hex().upper())
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


def wanted_rows(records: Records, wanted: Filter) -> Mask | None:
    """Brokers compare hashes of tags; this looks at the tags themselves. None: all are wanted."""
    if not wanted.tags or not len(records):
        return None
    tags = records.properties([b"TAGS"]).column(b"TAGS")
    exact = [tag for tag in wanted.tags if not tag.endswith("*")]
    mask = pc.is_in(tags, value_set=pa.array(exact, pa.string()))
    for tag in wanted.tags:
        if tag.endswith("*"):
            mask = pc.or_(mask, pc.fill_null(pc.starts_with(tags, tag[:-1]), False))
    found: Mask = mask.to_numpy(zero_copy_only=False)
    return None if found.all() else found
