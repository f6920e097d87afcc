"""A SparkSession for programs that run Spark themselves: demo, pipelines, tests, notebooks.

Owns: the settings that suit the connector, and what is said while a JVM starts. One rule: a start
that takes seconds is never silent, and what the user set before is left as it is.

A session of your own does as well; then only `cometmq.spark.register(spark)` is needed, and on
PySpark 4.3 not even that.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from cometmq.spark import check_pyspark, register
from cometmq.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Renames by FileSystem instead of FileContext: a micro-batch's fixed cost falls to less than
    # half on a local disk, and to the same guarantees (rename without overwriting).
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
}
LOCAL_SETTINGS = {
    # A worker imports numpy and Arrow before it answers; on a busy laptop 15 s are too few.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",  # 200 is for clusters; here each costs milliseconds
    # Over TCP a task begins 40 ms late: the JVM writes to its Python worker twice, without
    # TCP_NODELAY, and the second part waits for the worker's delayed acknowledgement of the first.
    "spark.python.unix.domain.socket.enabled": str(hasattr(socket, "AF_UNIX")).lower(),
}
TICK_S = 1.0


def session(
    name: str = "cometmq",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    quiet: bool = False,
    out: TextIO | None = None,
) -> SparkSession:
    """A SparkSession that knows the format `rocketmq`; the one that runs already, if one does.

    `master`: `local[*]` unless spark-submit or the environment says otherwise. `settings` win over
    ours. A line on `out` (standard error) tells how the start goes, unless `quiet`.
    """
    check_pyspark()
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    if found is None:
        is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # then the JVM is there already
        if not is_submitted:
            ensure_java()
        if master is None and not is_submitted and "SPARK_REMOTE" not in os.environ:
            master = "local[*]"
        builder = SparkSession.builder.appName(name)
        if master is not None:
            builder = builder.master(master)
        defaults = dict(SETTINGS)
        if master is not None and master.startswith("local"):
            defaults |= LOCAL_SETTINGS
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        for key, value in (defaults | dict(settings or {})).items():
            builder = builder.config(key, value)
        # Workers run the same Python as we do, not whatever `python3` is.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        with _told(f"starting Spark ({master or 'as submitted'})", quiet, out or sys.stderr):
            found = builder.getOrCreate()
        if not is_submitted and "SPARK_REMOTE" not in os.environ:
            found.sparkContext.setLogLevel("WARN")
            _hush(found)
    register(found)
    return found


def _hush(spark: SparkSession) -> None:
    """Not a warning for every query that `register` stands in for what PySpark found by itself."""
    jvm: Any = spark.sparkContext._jvm
    levels = jvm.org.apache.logging.log4j
    name = "org.apache.spark.sql.execution.datasources.DataSourceManager"
    levels.core.config.Configurator.setLevel(name, levels.Level.ERROR)


@contextmanager
def _told(what: str, quiet: bool, out: TextIO) -> Iterator[None]:
    """A line that grows while something takes its time, and ends with how long it took."""
    if quiet:
        yield
        return
    began = time.monotonic()
    is_over = threading.Event()
    out.write(f"{what} ")
    out.flush()

    def tick() -> None:
        while not is_over.wait(TICK_S):
            out.write(".")
            out.flush()

    ticking = threading.Thread(target=tick, name="cometmq-progress", daemon=True)
    ticking.start()
    end = "failed"
    try:
        yield
        end = "ready"
    finally:
        is_over.set()
        ticking.join()
        out.write(f" {end} after {time.monotonic() - began:.1f} s\n")
        out.flush()
