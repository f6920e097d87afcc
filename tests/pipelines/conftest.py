"""One Spark session for all tests of the pipelines.

It is the one of tests/spark if that runs in the same process: a JVM has one SparkContext.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cometmq.spark.local import session

sys.path.insert(0, str(Path(__file__).parents[1]))

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Workers must run this tree, whatever else is installed.
    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    settings = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"}
    made = session("pipelines", master="local[2]", settings=settings, quiet=True)
    made.sparkContext.setLogLevel("OFF")
    yield made
    made.stop()
