"""Columns to JSON bodies, a whole Arrow batch at a time.

Owns: how a value of each type looks in JSON. One rule: as Spark's to_json does by default: fields
that are null are left out; NaN and infinities are texts; binary is base64; times are ISO 8601 in
UTC, of any year; keys of maps are texts of the same form. Plain columns are made in bulk; nested
ones value by value.
"""

from __future__ import annotations

import base64
import decimal
import math
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_CONTROLS = "".join(map(chr, range(0x20))) + '"\\'
_NEEDS_ESCAPE = '[\\x00-\\x1f"\\\\]'
_SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


def json_bodies(batch: pa.RecordBatch, fields: list[str]) -> pa.Array:
    """One JSON object a row, as large_binary."""
    pieces: list[Any] = []
    for name in fields:
        column = batch.column(name)
        if pa.types.is_null(column.type):
            continue
        head = f",{msgspec.json.encode(name).decode()}:"
        text = _texts(column)
        joined = _joined(head, text)
        pieces.append(pc.fill_null(joined, "") if joined.null_count else joined)
    if not pieces:
        return pa.array([b"{}"] * batch.num_rows, pa.large_binary())
    inner = _joined(*pieces)
    inner = pc.utf8_slice_codeunits(inner, 1)  # the first comma
    whole = _joined("{", inner, "}")
    return whole.cast(pa.large_binary())


def _texts(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return column.cast(pa.large_string())
    if pa.types.is_floating(kind):
        return _floats(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _quoted(_escaped(column.cast(pa.large_string())))
    if pa.types.is_decimal(kind) or pa.types.is_nested(kind) or pa.types.is_binary(kind):
        return _one_by_one(column)
    if pa.types.is_date(kind):
        return _quoted(column.cast(pa.large_string()))
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        naive = column.cast(pa.timestamp(kind.unit))
        return _quoted(pc.strftime(naive, f"%Y-%m-%dT%H:%M:%S{zone}").cast(pa.large_string()))
    return _one_by_one(column)


def _joined(*parts: Any) -> pa.Array:
    """Side by side, row by row; texts stand in every row."""
    kind = pa.large_string()
    every = [pa.scalar(part, kind) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*every, pa.scalar("", kind))


def _quoted(column: pa.Array) -> pa.Array:
    return _joined('"', column, '"')


def _floats(column: pa.Array) -> pa.Array:
    texts = column.cast(pa.large_string())
    finite = pc.is_finite(column)
    if pc.all(finite, min_count=0).as_py():
        return texts
    kind = pa.large_string()
    infinite = pc.if_else(
        pc.greater(column, 0), pa.scalar('"Infinity"', kind), pa.scalar('"-Infinity"', kind)
    )
    others = pc.if_else(pc.is_nan(column), pa.scalar('"NaN"', kind), infinite)
    return pc.if_else(finite, texts, others)


def _escaped(column: pa.Array) -> pa.Array:
    if not pc.any(pc.match_substring_regex(column, _NEEDS_ESCAPE), min_count=0).as_py():
        return column
    column = pc.replace_substring(column, "\\", "\\\\")
    for char in _CONTROLS:
        if char != "\\":
            safe = _SHORT.get(char, f"\\u{ord(char):04x}")
            column = pc.replace_substring(column, char, safe)
    return column


def _one_by_one(column: pa.Array) -> pa.Array:
    kind = column.type
    numbers = _times_as_numbers(kind)
    values = column if numbers == kind else column.cast(numbers)
    texts = [
        None if value is None else msgspec.json.encode(_plain(value, kind)).decode()
        for value in values.to_pylist()
    ]
    return pa.array(texts, pa.large_string())


def _times_as_numbers(kind: pa.DataType) -> pa.DataType:
    """Python has no dates outside of the years 1 to 9999, Spark has."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_map(kind):
        return pa.map_(_times_as_numbers(kind.key_type), _times_as_numbers(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_times_as_numbers(one.type)) for one in kind])
    if pa.types.is_list(kind):
        return pa.list_(_times_as_numbers(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_times_as_numbers(kind.value_type))
    return kind


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A Python value in a form that JSON has."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {
            _key(_plain(name, kind.key_type)): _plain(item, kind.item_type) for name, item in value
        }
    if pa.types.is_struct(kind):
        fields = ((one.name, one.type) for one in kind)
        return {n: _plain(value[n], t) for n, t in fields if value[n] is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    if pa.types.is_timestamp(kind):
        return f"{np.datetime64(value, kind.unit)}{'Z' if kind.tz else ''}"
    if pa.types.is_date32(kind):
        return str(np.datetime64(value, "D"))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        # As short as 32 bits allow, not with the digits that 64 bits make of it.
        return float(str(np.float32(value))) if pa.types.is_float32(kind) else value
    if isinstance(value, decimal.Decimal):
        return msgspec.Raw(format(value, "f").encode())
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _key(plain: Any) -> str:
    """The key of a map as a text: what it would be as a value, without more quotes."""
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
