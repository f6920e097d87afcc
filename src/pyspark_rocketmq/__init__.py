"""Found by PySpark 4.3 and newer on its own: the data source `rocketmq`, without registering.

Owns: the one name that PySpark looks for. One rule: it must import, whatever else is installed, as
one failing `pyspark_*` package breaks the discovery of all of them; so what is not there is said
when the format is used.
"""

from __future__ import annotations

from cometmq.spark.source import RocketMQDataSource as DefaultSource

__all__ = ["DefaultSource"]
