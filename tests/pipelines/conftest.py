"""One Spark session for all tests of the pipelines."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from cometmq.spark.local import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    made = session("pipelines", master="local[2]", quiet=True)
    yield made
    made.stop()
