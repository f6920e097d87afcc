"""A pipeline of your own, written down: source, transform, sink, checkpoint, trigger, in TOML.

Owns: the format of spec files, and turning one into a running stream. One rule: everything wrong in
a file is found before Spark starts, and named by its place in the file.

    name = "orders-by-minute"

    [source]                                  # options of the format rocketmq
    namesrv = "localhost:9876"
    topic = "orders"
    startingOffsets = "earliest"

    [transform]
    json = "order_id string, country string, amount double"   # the body's fields become columns
    watermark = { column = "born_time", delay = "10 minutes" }
    sql = '''SELECT window(born_time, '1 minute').start AS minute, country,
                    count(*) AS orders, sum(amount) AS total
             FROM source GROUP BY window(born_time, '1 minute'), country'''
    # or: python = "my_job.py:transform", a function of one DataFrame that returns one

    [sink]
    format = "parquet"                        # rocketmq, parquet, delta, iceberg, console
    path = "lake/orders-by-minute"
    partition_by = ["country"]

    [run]
    checkpoint = "checkpoints/orders-by-minute"
    trigger = "available-now"                 # or an interval: "10 seconds"
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cometmq.errors import UsageError
from cometmq.pipelines.reaching import with_environment
from cometmq.pipelines.running import (
    Outcome,
    Tell,
    explained,
    reason_of,
    run_stream,
    to_stderr,
)
from cometmq.pipelines.sinks import check_partitions, checked_length, checked_trigger, start_to
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.source_options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Value = str | int | float | bool
_NO_SESSION = "SESSION_OR_CONTEXT_NOT_EXISTS"
_OF_A_FILE = "cometmq_transform_"
"""What the module of a transform's file is called by, before the file's own name."""


class Watermark(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How late an event may come, by which column."""

    column: str
    delay: str


class Transform(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What happens between source and sink; nothing, if it is empty."""

    json: str | None = None
    watermark: Watermark | None = None
    sql: str | None = None
    python: str | None = None


class Sink(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Where rows go. `options` are those of the format."""

    format: Literal["rocketmq", "parquet", "delta", "iceberg", "console"]
    path: str | None = None
    partition_by: list[str] = []
    mode: Literal["append", "update", "complete"] = "append"
    options: dict[str, Value] = {}


class Run(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """When a batch begins, and where progress is kept."""

    checkpoint: str
    trigger: str = "available-now"


class Spec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A whole spec file."""

    name: str
    source: dict[str, Value]
    sink: Sink
    run: Run
    transform: Transform = Transform()
    folder: str = ""
    """Of the file itself: relative names in `transform.python` begin there."""


def read_spec(path: str | Path, changes: Sequence[str] = ()) -> Spec:
    """A spec file, with `section.key=value` changes from a command line put over it."""
    place = Path(path)
    try:
        table = tomllib.loads(place.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"can't read {place}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{place} is not TOML: {error}") from None
    for change in changes:
        _change(table, change)
    _check_names(table, place)
    try:
        spec = msgspec.convert({**table, "folder": str(place.parent)}, Spec)
    except msgspec.ValidationError as error:
        raise UsageError(f"{place}: {error}") from None
    _check(spec, place)
    return spec


def _change(table: dict[str, Any], text: str) -> None:
    """`sink.options.topic=totals`: strings need no quotes."""
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--set {text!r}: write it as section.key=value")
    *sections, key = name.strip().split(".")
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UsageError(f"--set {text!r}: {section} is a value, not a section")
        table = inner
    try:
        table[key] = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = raw


def _check_names(table: Mapping[str, Any], place: Path) -> None:
    """msgspec would refuse an unknown name too, but knows no nearest one."""
    of_file = [name for name in Spec.__struct_fields__ if name != "folder"]
    sections = [("", table, of_file)]
    for name, kind in (("transform", Transform), ("sink", Sink), ("run", Run)):
        inner = table.get(name)
        if isinstance(inner, Mapping):
            sections.append((f"[{name}] ", inner, list(kind.__struct_fields__)))
    for section, values, known in sections:
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
                raise UsageError(f"{place}: {section}unknown field {name!r}; {hint}")


def _check(spec: Spec, place: Path) -> None:
    if spec.transform.sql is not None and spec.transform.python is not None:
        raise UsageError(f"{place}: [transform] has sql and python: give one")
    needs_path = spec.sink.format not in ("rocketmq", "console")
    if needs_path and not spec.sink.path:
        raise UsageError(f"{place}: [sink] of format {spec.sink.format} needs a path")
    if spec.sink.path and not needs_path:
        raise UsageError(f"{place}: [sink] of format {spec.sink.format} has no path")
    if spec.sink.mode != "append" and spec.sink.format not in ("rocketmq", "console"):
        raise UsageError(f"{place}: a lake takes mode append, not {spec.sink.mode}")
    if spec.sink.options and spec.sink.format in ("delta", "iceberg"):
        raise UsageError(
            f"{place}: [sink.options] has {', '.join(spec.sink.options)}: format "
            f"{spec.sink.format} takes none"
        )
    with _placed(place, "[sink] "):
        check_partitions(spec.sink.format, spec.sink.partition_by)
    with _placed(place, "[run] "):
        checked_trigger(spec.run.trigger)
        _filled("checkpoint", spec.run.checkpoint)
    with _placed(place, "[source] "):
        SourceOptions.parse(_options(spec.source), streaming=True)
    if spec.sink.format == "rocketmq":
        with _placed(place, "[sink.options] "):
            SinkOptions.read(_options(spec.sink.options))
    if spec.transform.watermark is not None:
        with _placed(place, "[transform] watermark: "):
            _filled("column", spec.transform.watermark.column)
            checked_length("delay", spec.transform.watermark.delay)
    if spec.transform.python is not None:
        with _placed(place, "[transform] "):
            _check_function(spec.transform.python, spec.folder)


def _filled(name: str, value: str) -> None:
    if not value.strip():
        raise UsageError(f"{name} is empty")


@contextmanager
def _placed(place: Path, section: str) -> Iterator[None]:
    """What is wrong, with where it stands."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {section}{error}") from None


def _options(values: Mapping[str, Value]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items()}


def run_spec(
    spark: SparkSession,
    spec: Spec,
    *,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run what a spec file says, until it is done or told to stop."""
    with explained(spec.name):
        source, sink = clusters_of(spec)
        reader = spark.readStream.format("rocketmq").options(**source)
        frame = transformed(spark, reader.load(), spec.transform, spec.folder)
        writer = start_to(
            spark,
            frame,
            format=spec.sink.format,
            path=spec.sink.path,
            partition_by=spec.sink.partition_by,
            options=sink,
            mode=spec.sink.mode,
            checkpoint=spec.run.checkpoint,
            trigger=spec.run.trigger,
            name=spec.name,
        )
    return run_stream(spec.name, writer, tell=tell, stop=stop)


def clusters_of(spec: Spec) -> tuple[dict[str, str], dict[str, str]]:
    """Options of source and sink, with keys and TLS of the environment where the file has none."""
    source, sink = _options(spec.source), _options(spec.sink.options)
    if spec.sink.format == "rocketmq":
        is_same = sink.get("namesrv") == source.get("namesrv")
        sink = with_environment(sink, "" if is_same else "TO")
    return with_environment(source), sink


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def transformed(
    spark: SparkSession, frame: DataFrame, transform: Transform, folder: str = ""
) -> DataFrame:
    """The rows that go on: body read as JSON, watermark set, SQL or Python applied, in this order.

    SQL finds the rows in the view `source`. Fields of the body become columns beside the source's
    own; one with a name that the source has too must be renamed in the body's schema or is refused.
    """
    if transform.json is not None:
        frame = with_json(frame, transform.json)
    if transform.watermark is not None:
        frame = frame.withWatermark(transform.watermark.column, transform.watermark.delay)
    if transform.python is not None:
        function = _function(transform.python, folder)
        _send_along(function)
        changed = function(frame)
        if not hasattr(changed, "writeStream"):
            raise UsageError(
                f"transform {transform.python} returned {type(changed).__name__}, not a DataFrame"
            )
        return changed
    if transform.sql is not None:
        frame.createOrReplaceTempView("source")
        return spark.sql(transform.sql)
    return frame


def with_json(frame: DataFrame, schema: str) -> DataFrame:
    """The body's JSON fields as columns; a body that isn't such JSON has nulls there."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    try:
        found = StructType.fromDDL(schema)
    except Exception as error:
        raise UsageError(f"json schema {schema!r}: {reason_of(error)}") from None
    fields = found.names if isinstance(found, StructType) else []
    doubled = sorted(set(fields) & set(frame.columns))
    if doubled:
        raise UsageError(
            f"json schema has {', '.join(doubled)}, which the source has too: read the body in "
            "SQL with from_json instead, under other names"
        )
    parsed = frame.withColumn("_json", f.from_json(f.col("body").cast("string"), schema))
    return parsed.select(*frame.columns, "_json.*")


def _check_function(text: str, folder: str) -> None:
    """Load it, as far as that can be done without Spark: a UDF with its type as text asks for a
    session. Then the file is loaded when there is one."""
    try:
        _function(text, folder)
    except UsageError as error:
        cause = error.__cause__
        if getattr(cause, "getCondition", lambda: None)() != _NO_SESSION:
            raise


def _split(text: str) -> tuple[str, str]:
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise UsageError(
            f"transform.python {text!r}: write it as package.module:function or file.py:function"
        )
    return where, name


def _function(text: str, folder: str) -> Callable[[DataFrame], DataFrame]:
    where, name = _split(text)
    try:
        if where.endswith(".py"):
            module = _module_at(Path(folder) / where)
        else:
            module = importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:  # whatever a file of the user's does when it is run
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UsageError(f"transform.python {text!r}: {what}{error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"transform.python {text!r}: there is no function {name!r} in {where}")
    function: Callable[[DataFrame], DataFrame] = found
    return function


def _module_at(path: Path) -> Any:
    # Under a name that nobody imports: a file queue.py must not take the place of Python's own.
    name = f"{_OF_A_FILE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"transform.python: there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # functions that Spark pickles name their module
    spec.loader.exec_module(module)
    return module


def _send_along(function: Callable[..., object]) -> None:
    """Let Spark send the file of a function to its workers, with all that is defined in it (UDFs):
    a name alone would do for a module that is installed there, not for a file of the driver's."""
    module = sys.modules.get(function.__module__ or "")
    if module is not None and module.__name__.startswith(_OF_A_FILE):
        from pyspark import cloudpickle

        pickler: Any = cloudpickle
        pickler.register_pickle_by_value(module)
