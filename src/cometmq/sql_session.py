"""A user's own database connection, whatever its driver (DB-API 2 or SQLAlchemy).

Owns: finding dialect and paramstyle, statements with `?` for each value, rows as tuples. One rule:
it commits, rolls back and closes only when told to; the transaction is its owner's. Serves
`outbox.py` and `idempotence.py`; MySQL is written by the book but not tested.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from cometmq.errors import UsageError

IDS_PER_STATEMENT = 500
"""Old SQLite takes 999 bound values in one statement."""

_DIALECTS = {
    "sqlite3": "sqlite",
    "psycopg": "postgresql",
    "psycopg2": "postgresql",
    "pg8000": "postgresql",
    "pymysql": "mysql",
    "MySQLdb": "mysql",
    "mysql": "mysql",
    "mariadb": "mysql",
}


class _Session(Protocol):
    """What we may ask of a connection; of a cursor only execute, of a SQLAlchemy Session only
    connection, commit, rollback and close."""

    rowcount: int

    def connection(self) -> object: ...
    def execute(self, statement: str, bound: object = ..., /) -> object: ...
    def fetchall(self) -> Iterable[object]: ...
    def commit(self) -> object: ...
    def rollback(self) -> object: ...
    def close(self) -> object: ...


class SqlSession:
    """Someone's connection: statements come with `?` for each value. `owner` is who asks, by name:
    errors tell its user what to give it."""

    def __init__(
        self, owner: str, session: object, dialect: str | None, paramstyle: str | None
    ) -> None:
        self._owner = owner
        self.session: _Session = session  # type: ignore[assignment]  # checked by _connection
        connection = self._connection()
        engine = getattr(connection, "dialect", None)  # SQLAlchemy's
        if engine is not None and hasattr(connection, "exec_driver_sql"):
            found, style = str(engine.name), str(engine.paramstyle)
            found = "mysql" if found == "mariadb" else found
        else:
            found, style = driver_of(connection, paramstyle, owner)
        self.dialect = dialect or found
        self._paramstyle = paramstyle or style

    def _connection(self) -> object:
        """Asked for anew each time: a SQLAlchemy Session has another one after a commit."""
        session = self.session
        if callable(getattr(session, "get_bind", None)):
            connection: object = session.connection()
            refuse_async(connection, f"{type(session).__name__}.connection")
            return connection
        if hasattr(session, "exec_driver_sql") or callable(getattr(session, "cursor", None)):
            return session
        if callable(getattr(session, "execute", None)):
            # A cursor: its results may still be read, so another one of its connection.
            return getattr(session, "connection", session)
        raise UsageError(
            f"{type(session).__name__} is no connection: give a DB-API connection or cursor, "
            "or a SQLAlchemy Session or Connection"
        )

    def rows(self, text: str, *values: object) -> list[tuple[object, ...]]:
        return self._execute(text, values, wants_rows=True)[1]

    def run(self, text: str, *values: object) -> int:
        """How many rows it touched."""
        return self._execute(text, values, wants_rows=False)[0]

    def one(self, text: str, *values: object) -> object:
        """The only value of the only row."""
        ((value,),) = self.rows(text, *values)
        return value

    def run_for(self, text: str, ids: Iterable[int]) -> int:
        """`text` ends with `id IN`; any number of ids."""
        every = list(ids)
        count = 0
        for at in range(0, len(every), IDS_PER_STATEMENT):
            some = every[at : at + IDS_PER_STATEMENT]
            count += self.run(f"{text} ({marks_for(some)})", *some)
        return count

    def _execute(
        self, text: str, values: Sequence[object], *, wants_rows: bool
    ) -> tuple[int, list[tuple[object, ...]]]:
        statement, bound = bind(text, values, self._paramstyle)
        connection = self._connection()
        if hasattr(connection, "exec_driver_sql"):
            cursor = connection.exec_driver_sql(statement, bound or None)
            refuse_async(cursor, "exec_driver_sql")
        else:
            cursor = connection.cursor() if hasattr(connection, "cursor") else self.session
            refuse_async(cursor, "cursor")
            done = cursor.execute(statement, bound) if bound else cursor.execute(statement)
            refuse_async(done, "execute")
        try:
            rows = [_plain(row) for row in cursor.fetchall()] if wants_rows else []
            return int(cursor.rowcount), rows
        finally:
            if cursor is not self.session:
                cursor.close()

    def refuse_autocommit(self) -> None:
        """In that mode the mark would be there before the work is done."""
        connection = self._connection()
        pooled = getattr(connection, "connection", None)  # SQLAlchemy's: the driver's own knows
        connection = getattr(pooled, "driver_connection", connection)
        is_sqlite3 = driver_of(connection, "?", self._owner)[0] == "sqlite"
        mode = getattr(connection, "autocommit", None)
        if mode is True or (
            is_sqlite3 and mode is not False and getattr(connection, "isolation_level", "") is None
        ):
            raise UsageError(
                f"{self._owner}: connect gave a connection in autocommit mode; turn it off"
            )

    def commit(self) -> None:
        self.session.commit()

    def rollback(self) -> None:
        self.session.rollback()

    def close(self) -> None:
        self.session.close()


def driver_of(connection: object, paramstyle: str | None, owner: str) -> tuple[str, str]:
    """Dialect and paramstyle by the module (PEP 249) that this connection's class comes from."""
    for cls in type(connection).__mro__:
        parts = cls.__module__.split(".")
        for end in range(len(parts), 0, -1):
            module = sys.modules.get(".".join(parts[:end]))
            style = getattr(module, "paramstyle", None)
            if isinstance(style, str):
                return _DIALECTS.get(parts[0], parts[0]), style
    if paramstyle:
        return "", paramstyle
    raise UsageError(
        f"{type(connection).__module__}.{type(connection).__name__}: its module has no paramstyle; "
        f"give dialect= and paramstyle= to {owner}"
    )


def bind(
    text: str, values: Sequence[object], style: str
) -> tuple[str, tuple[object, ...] | dict[str, object]]:
    """`?` marks to the driver's; our statements have no `?`, `%` or `:` but these marks."""
    marks: dict[str, Callable[[int], str]] = {
        "qmark": lambda n: "?",
        "format": lambda n: "%s",
        "numeric": lambda n: f":{n}",
        "numeric_dollar": lambda n: f"${n}",
        "named": lambda n: f":p{n}",
        "pyformat": lambda n: f"%(p{n})s",
    }
    if style not in marks:
        raise UsageError(f"paramstyle {style!r} is not one of {', '.join(marks)}")
    pieces = text.split("?")
    assert len(pieces) == len(values) + 1, (text, len(values))
    statement = pieces[0] + "".join(
        marks[style](n) + piece for n, piece in enumerate(pieces[1:], start=1)
    )
    if style in ("named", "pyformat"):
        return statement, {f"p{n}": value for n, value in enumerate(values, start=1)}
    return statement, tuple(values)


def _plain(row: object) -> tuple[object, ...]:
    """A row as a tuple, whatever row factory the connection has."""
    values = row.values() if isinstance(row, Mapping) else row
    assert isinstance(values, Iterable)
    return tuple(bytes(one) if isinstance(one, memoryview) else one for one in values)


def marks_for(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def refuse_async(result: object, what: str) -> None:
    """An awaitable that nobody awaits would look like work done."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise UsageError(f"{what} is async; blocking calls are needed here")
