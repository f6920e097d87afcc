"""`cometmq pipeline`: run a built-in pipeline or a spec file, list what there is.

Owns: the words of that command. One rule: settings are read and checked before a JVM starts.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from cometmq.errors import CometError

INTERRUPTED = 130
"""As shells count a program that Ctrl-C has ended."""
LOG_LEVEL = "spark.log.level"
_TOLD_BY_US = (
    "sql.execution.streaming.runtime.MicroBatchExecution",
    "sql.execution.streaming.runtime.ResolveWriteToStream",
    "sql.execution.datasources.FileFormatWriter",
    "sql.execution.datasources.v2.AppendDataExec",
    "sql.execution.datasources.v2.DataWritingSparkTask",
    "sql.execution.datasources.v2.WriteToDataSourceV2Exec",
    "util.Utils",
)
"""What of Spark says no more than the error that it raises."""
_MASTER = re.compile(r"local(\[(\*|[1-9]\d*)(,\s*\d+)?\])?|local-cluster\[.+\]|yarn|[\w-]+://.+")
_TRIED_ONCE = ("executor.Executor", "scheduler.TaskSetManager")
"""A failed task of a cluster is tried again, and its log is all that tells of it."""
JAVA_ENDS_S = 5.0
"""How long a JVM may take to end that was told to."""


def add_parser(commands: Any) -> None:
    """Put the command into the parser."""
    pipeline = commands.add_parser("pipeline", help="run a Spark pipeline over topics")
    words = pipeline.add_subparsers(dest="what", required=True, metavar="WHAT")
    run = words.add_parser("run", help="run a built-in pipeline or a spec file", allow_abbrev=False)
    run.add_argument("name", metavar="NAME-or-FILE", help="a built-in pipeline, or a .toml file")
    run.add_argument("--master", default=None, help="Spark's master (local[*])")
    run.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting; of a spec file: section.key=value. May be given several times",
    )
    run.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark's own. May be given several times",
    )
    run.add_argument(
        "--before-retention",
        action="store_true",
        help="archive: run ahead of the brokers' deletion, and say if it falls behind",
    )
    words.add_parser("list", help="the built-in pipelines")
    show = words.add_parser("show", help="what a built-in pipeline does, and its settings")
    show.add_argument("name", metavar="NAME")


def command(arguments: argparse.Namespace) -> int:
    """Run it; 0 done or stopped, 1 failed, 2 misused, 130 interrupted for the second time."""
    try:
        if arguments.what == "list":
            return _list()
        if arguments.what == "show":
            return _show(arguments.name)
        return _run(arguments)
    except KeyboardInterrupt:
        print("cometmq pipeline: interrupted", file=sys.stderr)
        return INTERRUPTED
    except CometError as error:
        print(f"cometmq pipeline: {error}", file=sys.stderr)
        from cometmq.errors import ConfigError, UsageError

        return 2 if isinstance(error, UsageError | ConfigError) else 1


def _list() -> int:
    from cometmq.pipelines import catalogue

    for name in catalogue.HOMES:
        print(f"{name:<10} {catalogue.summary_of(catalogue.find(name))}")
    return 0


def _show(name: str) -> int:
    import inspect

    from cometmq.pipelines import catalogue

    function = catalogue.find(name)
    print(f"{name}: {inspect.getdoc(function)}\n")
    rows = catalogue.settings_of(function)
    width = max(len(row[0]) for row in rows)
    for setting, kind, default in rows:
        print(f"  {setting:<{width}}  {kind}, {f'default {default}' if default else 'required'}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from cometmq.pipelines import catalogue
    from cometmq.pipelines.running import explained, stopping_on_signals

    if arguments.before_retention:
        arguments.changes.append("before_retention=true")
    _check_master(arguments.master)
    catalogue.refuse_secrets(arguments.changes)
    stop = threading.Event()
    work: Any
    if arguments.name.endswith(".toml"):
        from cometmq.pipelines.spec import read_spec, run_spec

        spec = read_spec(arguments.name, arguments.changes)
        name = spec.name

        def work(spark: Any) -> Any:
            return run_spec(spark, spec, stop=stop)
    else:
        function = catalogue.find(arguments.name)
        keywords = catalogue.keywords(function, arguments.changes)
        name = arguments.name

        def work(spark: Any) -> Any:
            return function(spark, stop=stop, **keywords)

    from cometmq.spark.local import session

    settings = _conf(arguments.conf)
    _quiet_errors()
    # Twice: a SparkContext that starts puts a handler of its own in the place of ours.
    with stopping_on_signals(stop, after="Spark's start"), explained(name):
        spark = _unless_stopped(
            lambda: session(f"cometmq {name}", master=arguments.master, settings=settings), stop
        )
    _quiet_java(spark, settings)
    if stop.is_set():
        print(f"{name}: stopped before it began")
        _end(spark)
        return 0
    with stopping_on_signals(stop), explained(name):
        outcome = _unless_stopped(lambda: work(spark), stop)
    if outcome is None:
        print(
            f"{name}: stopped; Spark was told to end too: the next start does the last batch again"
        )
    else:
        for line in outcome.lines():
            print(line)
    _end(spark)
    return 0


def _unless_stopped(work: Callable[[], Any], stop: threading.Event) -> Any:
    """What it returns; None if it failed because the JVM was ended by the signal that we got: of a
    terminal, systemd and the like, which send it to a whole group."""
    try:
        return work()
    except Exception:
        if stop.is_set() and _is_java_gone():
            return None
        raise


def _is_java_gone() -> bool:
    from pyspark import SparkContext

    java = getattr(SparkContext._gateway, "proc", None)
    if java is None:  # it did not come to be, or belongs to spark-submit
        return SparkContext._gateway is None
    try:
        java.wait(JAVA_ENDS_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(spark: Any) -> None:
    with contextlib.suppress(Exception):  # there may be no JVM any more
        spark.stop()


def _quiet_errors() -> None:
    """PySpark logs an error of a query as pages of JSON, before it raises it; the line that we
    print says the same."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")


def _quiet_java(spark: Any, settings: dict[str, str]) -> None:
    """Spark logs the stack of a failure at every layer that it passes, some hundred lines, before
    the query has it, of which we print the cause. `--conf spark.log.level=WARN` shows them all."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # of Spark Connect, or gone
        return
    if LOG_LEVEL in settings:
        spark.sparkContext.setLogLevel(settings[LOG_LEVEL])
        return
    is_local = spark.sparkContext.master.startswith("local")
    log4j = jvm.org.apache.logging.log4j
    for name in (*_TOLD_BY_US, *(_TRIED_ONCE if is_local else ())):
        log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)


def _check_master(master: str | None) -> None:
    """Spark would tell it with a stack, and after some seconds."""
    from cometmq.errors import UsageError

    if master is not None and not _MASTER.fullmatch(master):
        raise UsageError(
            f"--master {master!r}: write local, local[2] (threads), local[*] (all cores), "
            "spark://host:7077, yarn or k8s://..."
        )


def _conf(words: list[str]) -> dict[str, str]:
    from cometmq.errors import UsageError

    for word in words:
        if "=" not in word:
            raise UsageError(f"--conf {word!r}: write it as key=value")
    return dict(word.split("=", 1) for word in words)
