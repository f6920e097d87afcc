"""What the columns of a DataFrame mean to the sink.

Owns: the names and types that are understood. One rule: a schema that can't be written is refused
before a job starts, with every column that is wrong named at once.

    topic         string                     where it goes; the option `topic` without it
    body          binary or string           or all other columns, with bodyFormat=json
    tags          string                     one tag
    keys          string or array<string>    words to find it by
    properties    map<string,string>
    queue_id      int                        this queue; with `broker` if several brokers have it
    sharding_key  string or whole number     equal keys, same queue: where our producer puts them;
                                             with a queue_id it is only carried along
    delay_level   int                        1 to 18, 0 for none
    deliver_time  timestamp or bigint (ms)   not before
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
    VariantType,
    YearMonthIntervalType,
)

from cometmq.errors import UsageError
from cometmq.spark.sink_options import SinkOptions

BAD_COLUMNS = ("bad_reason", "bad_row", "bad_partition", "bad_batch")
"""What a row that is set aside gets beside its own columns."""
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_TYPES: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "topic": ((StringType,), "string"),
    "body": ((BinaryType, StringType), "binary or string"),
    "tags": ((StringType,), "string"),
    "keys": ((StringType, ArrayType), "string or array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "broker": ((StringType,), "string"),
    "queue_id": (_WHOLE, "a whole number"),
    "sharding_key": ((StringType, *_WHOLE), "string or a whole number"),
    "delay_level": (_WHOLE, "a whole number"),
    "deliver_time": ((TimestampType, LongType), "timestamp or bigint (milliseconds)"),
}


def check_schema(schema: StructType, options: SinkOptions) -> list[str]:
    """The columns that make up a JSON body (none with raw bodies); UsageError names all faults."""
    faults: list[str] = []
    fields: list[str] = []
    names = schema.fieldNames()
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"column {name!r} is there twice")
    for one in schema.fields:
        known = _TYPES.get(one.name)
        if options.is_json and (known is None or one.name == "body"):
            fields.append(one.name)
            unknown = _no_json(one.dataType)
            if unknown is not None:
                faults.append(
                    f"column {one.name!r} has the type {unknown.simpleString()}, which has no form "
                    "in JSON here: make it a string first"
                )
            elif one.name.lower() in _TYPES and one.name != "body":
                faults.append(
                    f"column {one.name!r} would go into the body: write {one.name.lower()!r}, or "
                    "give it another name"
                )
        elif known is None:
            faults.append(f"column {one.name!r} is unknown")
        elif not _fits(one.dataType, known[0]):
            faults.append(f"column {one.name!r} is {one.dataType.simpleString()}, not {known[1]}")
    if options.bad_records_path is not None:
        for name in fields:
            # Twice in one file, in whichever case, and Spark can't read it any more.
            if name.lower() in BAD_COLUMNS:
                faults.append(
                    f"column {name!r} has the name of a column that badRecordsPath adds: rename it "
                    "or leave it out"
                )
    faults += _combination_faults(names, fields, options)
    if faults:
        known_names = ", ".join(_TYPES)
        raise UsageError(
            f"the rocketmq sink can't write this: {'; '.join(faults)}. Columns it knows: "
            f"{known_names}; put others into the body (bodyFormat=json) or leave them out"
        )
    return fields


def _combination_faults(names: list[str], fields: list[str], options: SinkOptions) -> list[str]:
    faults: list[str] = []
    if options.is_json and not fields:
        faults.append("with bodyFormat=json no column is left to make a body of")
    if not options.is_json and "body" not in names:
        faults.append("there is no column 'body'")
    if "topic" not in names and options.topic is None:
        faults.append("there is neither a column nor an option 'topic'")
    if "delay_level" in names and "deliver_time" in names:
        faults.append("'delay_level' and 'deliver_time' exclude each other")
    if "broker" in names and "queue_id" not in names:
        faults.append("'broker' says whose 'queue_id' is meant, and that is missing")
    return faults


def _no_json(kind: DataType) -> DataType | None:
    """The part of a type that can't be written as JSON; None if there is none."""
    if isinstance(kind, VariantType | DayTimeIntervalType | YearMonthIntervalType):
        return kind
    inner: list[DataType] = []
    if isinstance(kind, ArrayType):
        inner = [kind.elementType]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    elif isinstance(kind, StructType):
        inner = [one.dataType for one in kind.fields]
    return next((found for one in inner if (found := _no_json(one)) is not None), None)


def _fits(kind: DataType, wanted: tuple[type[DataType], ...]) -> bool:
    if not isinstance(kind, wanted):
        return False
    if isinstance(kind, ArrayType):
        return isinstance(kind.elementType, StringType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return True
