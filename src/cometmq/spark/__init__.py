"""Topics in and out of Spark, in PySpark: `spark.read`, `spark.readStream`, `df.write`, all with
`.format("rocketmq")`.

Owns: the public names of the connector. One rule: importing this imports neither pyspark nor
pyarrow, so that a program may ask for Java or read help without them.

    import cometmq.spark

    spark = cometmq.spark.session("orders")            # finds Java, says what it does, or your own
    cometmq.spark.register(spark)                      # session() has done it already
    orders = (
        spark.readStream.format("rocketmq")
        .option("namesrv", "localhost:9876")
        .option("topic", "orders")
        .load()
    )

PySpark 4.2 or newer is needed: 4.2 brought `latestOffset(start, limit)` and Trigger.AvailableNow
for Python sources. From 4.3 on the format is found without `register`, by the installed package
`pyspark_rocketmq`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cometmq.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cometmq.spark.java import ensure_java
    from cometmq.spark.listener import LagListener
    from cometmq.spark.local import session

LOWEST_PYSPARK = (4, 2)

_HOMES = {
    "LagListener": "listener",
    "ensure_java": "java",
    "session": "local",
}

__all__ = ["LOWEST_PYSPARK", "LagListener", "check_pyspark", "ensure_java", "register", "session"]


def check_pyspark() -> None:
    """UsageError if PySpark is missing or too old."""
    try:
        import pyspark
    except ImportError:
        raise UsageError("PySpark is not installed: pip install 'cometmq[spark]'") from None
    found = tuple(int(piece) for piece in pyspark.__version__.split(".")[:2])
    if found < LOWEST_PYSPARK:
        wanted = ".".join(map(str, LOWEST_PYSPARK))
        raise UsageError(f"PySpark {pyspark.__version__} is too old: {wanted} or newer is needed")


def register(spark: SparkSession) -> None:
    """Make `.format("rocketmq")` known to this session; again does no harm."""
    check_pyspark()
    from cometmq.spark.source import RocketMQDataSource

    spark.dataSource.register(RocketMQDataSource)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cometmq.spark' has no attribute {name!r}")
    value = getattr(import_module(f"cometmq.spark.{home}"), name)
    globals()[name] = value
    return value
