"""The columns of the source, and the choice of some of them.

Owns: names, types and order of the columns. One rule: a choice names columns that exist, each once,
with the type that it has here; only what is chosen is decoded.

    topic           string      the topic it was read from (a group's retry topic too)
    broker          string
    queue_id        int
    queue_offset    bigint
    keys            string      as the sender joined them, with spaces; null without any
    tags            string      null without any
    body            binary      decompressed
    born_time       timestamp   by the sender's clock
    store_time      timestamp   by the broker's clock
    reconsume_times int
    msg_id          string      the sender's unique id, else the broker's
    properties      map         all of them, RocketMQ's own included
    sys_flag        int         as stored: says whether and how the body was compressed
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from cometmq.errors import UsageError

COLUMNS: dict[str, DataType] = {
    "topic": StringType(),
    "broker": StringType(),
    "queue_id": IntegerType(),
    "queue_offset": LongType(),
    "keys": StringType(),
    "tags": StringType(),
    "body": BinaryType(),
    "born_time": TimestampType(),
    "store_time": TimestampType(),
    "reconsume_times": IntegerType(),
    "msg_id": StringType(),
    "properties": MapType(StringType(), StringType()),
    "sys_flag": IntegerType(),
}

MAY_LACK = ("keys", "tags")
"""Columns that are null where a message has no such thing."""


def schema_of(columns: Sequence[str] | None = None) -> StructType:
    """The schema of all columns, or of these in this order."""
    chosen = list(COLUMNS) if columns is None else list(columns)
    for name in chosen:
        if name not in COLUMNS:
            raise UsageError(f"the rocketmq source has no column {name!r}; {_known()}")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"a column is chosen twice: {', '.join(chosen)}")
    return StructType([StructField(name, COLUMNS[name]) for name in chosen])


def check_schema(schema: StructType, columns: Sequence[str] | None) -> None:
    """A schema that the user gave (or that we gave): its columns are ours, with our types."""
    if not schema.fields:
        raise UsageError(f"the schema names no column; {_known()}")
    schema_of(schema.names)
    for field in schema.fields:
        wanted = COLUMNS[field.name]
        if field.dataType.simpleString() != wanted.simpleString():
            raise UsageError(
                f"column {field.name!r} of the schema is {field.dataType.simpleString()}; the "
                f"rocketmq source has it as {wanted.simpleString()}: cast it after reading"
            )
        if field.name in MAY_LACK and not field.nullable:
            # Spark would believe it: wrong counts of nulls, or a NullPointerException.
            raise UsageError(
                f"column {field.name!r} of the schema is NOT NULL, and messages may lack it: leave "
                "NOT NULL out and filter after reading"
            )
    if columns is not None and list(columns) != schema.names:
        raise UsageError(
            f"the schema names the columns {', '.join(schema.names)} and the option 'columns' "
            f"{', '.join(columns)}: give one of the two"
        )


def _known() -> str:
    return "its columns are " + ", ".join(COLUMNS)
