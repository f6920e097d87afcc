"""Delta and Iceberg tables that streams write to exactly once, without a jar.

Owns: how a micro-batch becomes a commit of such a table. One rule: the number of the batch is part
of the same commit as its rows, under the name of the stream's writer, so that a batch that is
replayed is seen to be there.

    Delta     `deltalake`: the protocol's own transaction (app id = writer, version = batch)
    Iceberg   `pyiceberg`: a table property `cometmq.batch.<writer>`, set in the transaction that
              appends; the snapshot's summary says writer and batch too

A batch passes through the driver (toArrow): it must fit in the driver's memory, several times. Keep
batches small (maxOffsetsPerTrigger, `rows_per_batch`), or use a Parquet lake, which executors write
without the driver. An Iceberg path is a folder, whose catalogue is an SQLite file in it, or
`catalog:NAME/namespace.table` of pyiceberg's own configuration.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cometmq.errors import UsageError
from cometmq.pipelines.files import Files
from cometmq.pipelines.lake import work_through

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

log = logging.getLogger("cometmq.pipelines")

MAX_BATCH_BYTES = 2 * 1024**3
"""Of a batch as Arrow has it: more would end the driver's process without a word."""
_FIRST_CATALOG = "catalog:"


def table_kind(files: Files) -> str | None:
    """Whose table a folder is: its files alone don't say which of them count. None: plain
    Parquet."""
    if files.exists("_delta_log"):
        return "Delta"
    if files.exists("catalog.db") or files.exists("metadata"):
        return "Iceberg"
    return None


def check_kind(files: Files, format: str) -> None:
    """UsageError if a lake that is there is of another format: rows of one can't be seen by who
    reads it as the other."""
    kind = table_kind(files)
    if kind is None and format != "parquet" and files.files_below("", ".parquet"):
        kind = "Parquet"
    if kind is not None and kind.lower() != format:
        raise UsageError(
            f"the lake {files.root} is written as {kind}, whose readers would not see rows in "
            f"{format}: use format={kind.lower()}, or another lake"
        )


def live_files(kind: str, path: str) -> list[str]:
    """The Parquet files that a table is made of now."""
    if kind == "Delta":
        return _delta_files(path)
    table = IcebergLake(path, "").table()
    return [task.file.file_path for task in table.scan().plan_files()]


def _delta_files(path: str) -> list[str]:
    """Below the path as Spark knows it: Delta's own addresses have the root escaped (a space is
    %20) and the rest not."""
    table = DeltaLake(path, "").table()
    root = f"{table.table_uri.removeprefix('file://').rstrip('/')}/"
    return [
        f"{path.rstrip('/')}/{one.removeprefix(root)}" if one.startswith(root) else one
        for one in table.file_uris()
    ]


def _arrow(rows: DataFrame) -> pa.Table:
    table = rows.toArrow()
    if table.nbytes > MAX_BATCH_BYTES:
        raise UsageError(
            f"a batch of {table.nbytes} bytes is too much for the driver (at most "
            f"{MAX_BATCH_BYTES}): make batches smaller, or use the format parquet"
        )
    return table


class DeltaLake:
    """One writer's hand on a Delta table."""

    def __init__(self, path: str, writer: str, partition_by: Sequence[str] = ()) -> None:
        try:
            import deltalake
        except ImportError:
            raise UsageError("format delta needs deltalake: pip install 'cometmq[lake]'") from None
        self._delta: Any = deltalake
        self.path = path
        self._writer = f"cometmq-{writer}"
        self._partition_by = list(partition_by)
        self.files_written = 0

    def write(self, rows: DataFrame, batch_id: int) -> int:
        """Append a batch; 1, or 0 if it had been there before."""
        if self._delta.DeltaTable.is_deltatable(self.path):
            done = self._delta.DeltaTable(self.path).transaction_version(self._writer)
            if done is not None and done >= batch_id:
                log.info("batch was published before lake=%s batch=%d", self.path, batch_id)
                work_through(rows)
                return 0
        mark = self._delta.Transaction(app_id=self._writer, version=batch_id)
        self._delta.write_deltalake(
            self.path,
            _arrow(rows),
            mode="append",
            partition_by=self._partition_by or None,
            commit_properties=self._delta.CommitProperties(app_transactions=[mark]),
        )
        self.files_written += 1
        return 1

    def table(self) -> Any:
        return self._delta.DeltaTable(self.path)

    def compact(self) -> dict[str, Any]:
        """Delta's own: small files merged in one commit; old files stay until a vacuum."""
        found: dict[str, Any] = self._delta.DeltaTable(self.path).optimize.compact()
        return found


class IcebergLake:
    """One writer's hand on an Iceberg table."""

    def __init__(self, path: str, writer: str, partition_by: Sequence[str] = ()) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its own dependencies
                import pyiceberg.catalog  # noqa: F401
        except ImportError:
            raise UsageError(
                "format iceberg needs pyiceberg: pip install 'cometmq[lake]'"
            ) from None
        self.path = path
        self._writer = writer
        self._partition_by = list(partition_by)
        self._catalog, self._name = _catalog_of(path)
        self._mark = f"cometmq.batch.{writer}"
        self.files_written = 0

    def write(self, rows: DataFrame, batch_id: int) -> int:
        """Append a batch; 1, or 0 if it had been there before."""
        table = self._table(rows)
        if int(table.properties.get(self._mark, "-1")) >= batch_id:
            log.info("batch was published before lake=%s batch=%d", self.path, batch_id)
            work_through(rows)
            return 0
        data = _arrow(rows).cast(table.schema().as_arrow())
        summary = {"cometmq.writer": self._writer, "cometmq.batch": str(batch_id)}
        with table.transaction() as transaction:
            transaction.append(data, snapshot_properties=summary)
            transaction.set_properties({self._mark: str(batch_id)})
        self.files_written += 1
        return 1

    def table(self) -> Any:
        return self._catalog.load_table(self._name)

    def _table(self, rows: DataFrame) -> Any:
        from pyiceberg.exceptions import NoSuchTableError
        from pyspark.sql.pandas.types import to_arrow_schema

        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            pass
        namespace = self._name.rpartition(".")[0]
        self._catalog.create_namespace_if_not_exists(namespace)
        schema = to_arrow_schema(rows.schema, timezone="UTC")
        table = self._catalog.create_table(self._name, schema)
        if self._partition_by:
            with table.update_spec() as spec:
                for column in self._partition_by:
                    spec.add_identity(column)
        return self._catalog.load_table(self._name)


def is_on_this_machine(path: str) -> bool:
    return "://" not in path or path.startswith("file://")


def _catalog_of(path: str) -> tuple[Any, str]:
    from pyiceberg.catalog import load_catalog

    if path.startswith(_FIRST_CATALOG):
        name, slash, table = path.removeprefix(_FIRST_CATALOG).partition("/")
        if not slash or "." not in table:
            raise UsageError(f"iceberg path {path!r}: write it as catalog:NAME/namespace.table")
        return load_catalog(name), table
    if not is_on_this_machine(path):
        raise UsageError(
            f"iceberg path {path!r}: tables outside this machine need a catalogue of yours: "
            "catalog:NAME/namespace.table, with NAME in .pyiceberg.yaml"
        )
    from pyiceberg.catalog.sql import SqlCatalog

    folder = Path(path.removeprefix("file:").removeprefix("//")).absolute()
    if {"#", "?"} & set(str(folder)):
        raise UsageError(f"iceberg path {path!r}: an address can't have # or ? in it")
    folder.mkdir(parents=True, exist_ok=True)
    # Not escaped: pyiceberg would take a %20 for a part of the folder's name.
    where = f"file://{folder}"
    found = SqlCatalog("cometmq", uri=f"sqlite:///{folder / 'catalog.db'}", warehouse=where)
    return found, "cometmq.messages"
