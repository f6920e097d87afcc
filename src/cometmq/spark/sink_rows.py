"""One Arrow batch as messages to be: columns in one form, rows that can't be messages found.

Owns: the limits of a row. One rule: whether a row is bad depends on the row and the options alone,
never on a clock or a broker's mood: a row that is left out of one attempt and kept in the next
would shift the numbers of all that follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.client.outgoing import MAX_DELAY_LEVEL, RESERVED, check_topic
from cometmq.errors import UsageError
from cometmq.spark.sink_json import json_bodies
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.sink_place import Ints, buffers_of
from cometmq.wire import properties as props

SEQUENCE = props.PRODUCER_SEQ
OWN_NAMES = RESERVED | {
    SEQUENCE,
    props.TIMER_OUT_MS,
    props.TIMER_ENQUEUE_MS,
    props.TIMER_DEQUEUE_MS,
    props.TIMER_ROLL_TIMES,
    props.TIMER_DELETES,
    "TIMER_DELAY_LEVEL",
    "POP_CK_OFFSET",
    "1ST_POP_TIME",
    "INNER_NUM",
    "INNER_BASE",
    "DUP_INFO",
    "__CRC32#",
}
"""Those a user's message may not have, and those a message gets on its way, which a copy of it must
not carry on."""
MAX_USER_PROPERTY_BYTES = props.MAX_PROPERTIES_BYTES - 1023
"""What a row may say of itself; the rest is for the sink's names and those a broker adds."""
MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999
NONE = -1

Mask = npt.NDArray[np.bool_]


class Faults:
    """The rows of one batch that can't be messages, each with the first reason found."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    def add(self, mask: Mask, reason: str | Callable[[int], str]) -> None:
        for at in np.flatnonzero(mask).tolist():
            if at not in self.reasons:
                self.reasons[at] = reason if isinstance(reason, str) else reason(at)


class Rows:
    """Columns of one batch; texts and bodies are large_binary, absent numbers are NONE."""

    def __init__(
        self, batch: pa.RecordBatch, numbers: Ints, fields: list[str], options: SinkOptions
    ) -> None:
        self.count = batch.num_rows
        self.numbers = numbers
        """Of each row its number within the task, bad rows counted."""
        self.faults = Faults()
        self._batch = batch
        self._options = options
        self._names = set(batch.schema.names)
        self.topics, self.topic_codes = self._read_topics()
        self.body = self._read_body(fields)
        self.tags = self._text("tags", forbidden=b"\x01\x02|")
        self.keys = self._read_keys()
        self.shard = self._text("sharding_key")
        self.broker = self._text("broker")
        self.properties = self._read_properties()
        self.queue_id = self._number("queue_id", 0, 2**31 - 1)
        self.delay_level = self._number("delay_level", 0, MAX_DELAY_LEVEL)
        self.delay_level[self.delay_level == 0] = NONE
        self.deliver_ms = self._read_deliver_ms()
        self._check_properties_size()

    @property
    def is_delayed(self) -> Mask:
        return np.asarray((self.delay_level != NONE) | (self.deliver_ms != NONE), bool)

    # --------------------------------------------------------------------------------- the columns

    def _read_topics(self) -> tuple[list[str], Ints]:
        default = self._options.topic
        if "topic" not in self._names:
            assert default is not None, "check_schema wants a topic"
            return [default], np.zeros(self.count, np.int64)
        coded = pc.dictionary_encode(self._batch.column("topic"))
        topics: list[str] = coded.dictionary.to_pylist()
        codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        if default is not None and (codes == -1).any():
            codes[codes == -1] = len(topics)
            topics.append(default)
        self.faults.add(codes == -1, "topic is null, and there is no option 'topic'")
        for code, topic in enumerate(topics):
            try:
                check_topic(topic)
                if topic.startswith("%RETRY%"):
                    raise UsageError(f"topic {topic!r}: batches can't go to a retry topic")
            except UsageError as error:
                self.faults.add(codes == code, str(error))
        return topics, codes

    def _read_body(self, fields: list[str]) -> pa.Array:
        if fields:
            body = json_bodies(self._batch, fields)
        else:
            body = _binary(self._batch.column("body"))
        most = self._options.max_message_bytes
        lengths = lengths_of(body)
        if body.null_count:
            self.faults.add(_nulls(body), "body is null")
        self.faults.add(lengths == 0, "body is empty: RocketMQ refuses such messages")
        self.faults.add(
            lengths > most,
            lambda at: f"body of {lengths[at]} bytes; at most {most} (option maxMessageBytes)",
        )
        return body

    def _text(self, name: str, forbidden: bytes = b"\x01\x02") -> pa.Array | None:
        if name not in self._names:
            return None
        column = self._batch.column(name)
        if pa.types.is_integer(column.type):
            column = column.cast(pa.large_string())
        column = _binary(column)
        self._forbid(column, name, forbidden)
        return column

    def _forbid(self, column: pa.Array, name: str, forbidden: bytes) -> None:
        for number in forbidden:
            mask = _having(column, bytes((number,)))
            if mask is None:
                continue
            if number == ord("|"):
                reason = f"{name}: a message has one tag; | is for subscriptions"
            else:
                reason = f"{name} contains the byte {number}, which separates properties"
            self.faults.add(mask, reason)

    def _read_keys(self) -> pa.Array | None:
        if "keys" not in self._names or not pa.types.is_nested(self._batch.column("keys").type):
            return self._text("keys")
        column = self._batch.column("keys")
        words = _binary(column.flatten())
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        row_of = np.repeat(np.arange(self.count), counts)
        wrong = (lengths_of(words) == 0) | _nulls(words)
        spaces = _having(words, b" ")
        if spaces is not None:
            wrong |= spaces
        self.faults.add(
            _rows_having(row_of, wrong, self.count),
            lambda at: (
                f"keys {column[at].as_py()!r}: a key is one word, not null or empty; spaces "
                "separate keys"
            ),
        )
        is_first = np.concatenate(([True], row_of[1:] != row_of[:-1]))[: len(words)]
        separators = pc.if_else(pa.array(is_first), large(b""), large(b" "))
        flat = pc.binary_join_element_wise(separators, pc.fill_null(words, b""), large(b""))
        joined = regrouped(flat, counts)
        self._forbid(joined, "keys", b"\x01\x02")
        return joined

    def _read_properties(self) -> pa.Array | None:
        """Of each row its properties as they stand in a message, joined."""
        if "properties" not in self._names:
            return None
        column = self._batch.column("properties")
        is_there = ~_nulls(column)
        ends = column.offsets.to_numpy().astype(np.int64)
        counts = np.where(is_there, ends[1:] - ends[:-1], 0)
        names = column.keys.slice(ends[0], ends[-1] - ends[0])
        values = column.items.slice(ends[0], ends[-1] - ends[0])
        row_of = np.repeat(np.arange(self.count), ends[1:] - ends[:-1])
        is_kept = is_there[row_of] & self._property_choice(names, row_of)
        if not is_kept.all():
            chosen = pa.array(is_kept)
            names, values, row_of = names.filter(chosen), values.filter(chosen), row_of[is_kept]
            counts = np.bincount(row_of, minlength=self.count)
        names, values = _binary(names), _binary(values)
        wrong = (lengths_of(names) == 0) | (lengths_of(values) == 0) | _nulls(values)
        self.faults.add(
            _rows_having(row_of, wrong, self.count),
            "properties: names and values are texts, not null or empty",
        )
        for part in (names, values):
            for number in b"\x01\x02":
                mask = _having(part, bytes((number,)))
                if mask is not None:
                    self.faults.add(
                        _rows_having(row_of, mask, self.count),
                        f"properties contain the byte {number}, which separates them",
                    )
        flat = pc.binary_join_element_wise(
            names, large(b"\x01"), pc.fill_null(values, b""), large(b"\x02"), large(b"")
        )
        return regrouped(flat, counts)

    def _property_choice(self, names: pa.Array, row_of: Ints) -> Mask:
        """Which properties to keep: those that aren't the system's own."""
        coded = pc.dictionary_encode(names)
        known = coded.dictionary.to_pylist()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        own = np.array([name in OWN_NAMES for name in known], bool)
        is_own = own[codes] if len(known) else np.zeros(0, bool)
        if not self._options.drops_reserved and is_own.any():
            which = sorted(name for name in known if name in OWN_NAMES)
            self.faults.add(
                _rows_having(row_of, is_own, self.count),
                f"properties have a name that is RocketMQ's own (of {', '.join(which)}): use the "
                "column for it, or the option dropReservedProperties",
            )
        return ~is_own

    def _number(self, name: str, least: int, most: int) -> Ints:
        if name not in self._names:
            return np.full(self.count, NONE, np.int64)
        column = self._batch.column(name)
        found = _integers(column)
        wrong = ~_nulls(column) & ((found < least) | (found > most))
        self.faults.add(wrong, lambda at: f"{name} {found[at]}; must be {least} to {most}")
        return found

    def _read_deliver_ms(self) -> Ints:
        if "deliver_time" not in self._names:
            return np.full(self.count, NONE, np.int64)
        column = self._batch.column("deliver_time")
        raw = _integers(column)
        is_there = ~_nulls(column)
        if pa.types.is_timestamp(column.type):
            per_ms = {"us": 1000, "ns": 1_000_000}.get(column.type.unit, 1)
            raw[is_there] //= per_ms
        wrong = is_there & ((raw < 0) | (raw > MAX_TIME_MS))
        self.faults.add(wrong, lambda at: f"deliver_time {raw[at]} ms is not between 1970 and 9999")
        return raw

    def _check_properties_size(self) -> None:
        whole = np.zeros(self.count, np.int64)
        for column in (self.tags, self.keys, self.shard, self.properties):
            if column is not None:
                whole += lengths_of(column) + 16
        self.faults.add(
            whole > MAX_USER_PROPERTY_BYTES,
            lambda at: (
                f"tags, keys and properties of {whole[at]} bytes; at most {MAX_USER_PROPERTY_BYTES}"
            ),
        )


# -------------------------------------------------------------------------------------- arrays


def large(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.large_binary())


def lengths_of(column: pa.Array) -> Ints:
    """Bytes of each value of a large_binary column; 1 for null, which is no length at all."""
    found: Any = pc.fill_null(pc.binary_length(column), 1)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)


def regrouped(flat: pa.Array, counts: Ints) -> pa.Array:
    """Values that stand side by side joined to one for each row, without a copy."""
    offsets, _ = buffers_of(flat)
    ends = np.concatenate(([0], np.cumsum(counts)))
    rows = pa.py_buffer(np.ascontiguousarray(offsets[ends]))
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(counts), [None, rows, flat.buffers()[2]]
    )


def _binary(column: pa.Array) -> pa.Array:
    return column.cast(pa.large_binary())


def _integers(column: pa.Array) -> Ints:
    """A copy, with NONE for nulls."""
    found = pc.fill_null(column.cast(pa.int64()), NONE).to_numpy(zero_copy_only=False)
    return np.array(found, np.int64)


def _nulls(column: pa.Array) -> Mask:
    if not column.null_count:
        return np.zeros(len(column), bool)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), bool)


def _having(column: pa.Array, needle: bytes) -> Mask | None:
    """Which values contain a byte; None if none does, which one look at all bytes tells."""
    offsets, data = buffers_of(column)
    if not (data[offsets[0] : offsets[-1]] == needle[0]).any():
        return None
    found = pc.fill_null(pc.match_substring(column, needle), False)
    return np.asarray(found.to_numpy(zero_copy_only=False), bool)


def _rows_having(row_of: Ints, mask: Mask, count: int) -> Mask:
    found = np.zeros(count, bool)
    found[row_of[mask]] = True
    return found
