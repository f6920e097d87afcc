"""The data source `rocketmq`: what Spark asks first, and who answers what follows.

Owns: the class that PySpark registers. One rule: it stays light: no pyarrow, nothing that an older
PySpark lacks, no connection; readers and writers are imported when they are asked for, because
PySpark loads this class in every program that uses any Python data source.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from cometmq.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class RocketMQDataSource(DataSource):
    """Topics of CometMQ or Apache RocketMQ as DataFrames; options: source_options.py and
    sink_options.py."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        # A plain dict: it is pickled, and knows no case-insensitive names of PySpark's own.
        self.options: MutableMapping[str, Any] = dict(options.items())

    def __repr__(self) -> str:  # options hold secrets
        return "<RocketMQDataSource>"

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        from cometmq.spark.schema import schema_of
        from cometmq.spark.source_options import SourceOptions

        return schema_of(SourceOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from cometmq.spark import check_pyspark

        check_pyspark()
        from cometmq.spark.batch import make_reader

        return make_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        from cometmq.spark import check_pyspark

        check_pyspark()
        from cometmq.spark.stream import make_reader

        return make_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from cometmq.spark import check_pyspark

        check_pyspark()
        writer: DataSourceWriter = _sink().batch_writer(self.options, schema, overwrite)
        return writer

    def streamWriter(  # noqa: N802 - Spark calls it by this name and by these keywords
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from cometmq.spark import check_pyspark

        check_pyspark()
        writer: DataSourceStreamWriter = _sink().stream_writer(self.options, schema, overwrite)
        return writer


def _sink() -> Any:
    try:
        return import_module("cometmq.spark.sink")
    except ModuleNotFoundError as error:
        if error.name != "cometmq.spark.sink":
            raise
        raise UsageError("this build of CometMQ can't write from Spark: it has no sink") from None
