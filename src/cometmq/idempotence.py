"""A handler that does nothing on the second delivery of a message it has done already.

Owns: the decorator `idempotent` and three places to keep marks: memory, Redis, your SQL database.
One rule: a mark means that the handler has returned; whatever is in doubt is delivered again rather
than skipped. Knows no driver: it takes your connections (DB-API 2 or SQLAlchemy) and your redis-py
client. Tested with SQLite, PostgreSQL and Redis; MySQL is written by the book but not tested.

| store       | marks live in     | the handler's effect happens                                  |
|-------------|-------------------|---------------------------------------------------------------|
| SqlStore    | your database     | exactly once, for what it writes through `connection`         |
| RedisStore  | Redis, for ttl    | once while nobody crashes and Redis keeps its data; else more |
| MemoryStore | this process      | once in this process, while the mark isn't pushed out         |
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import logging
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Concatenate, Generic, Protocol, TypeVar

from cometmq.errors import CometError, UsageError
from cometmq.sql_session import SqlSession

log = logging.getLogger("cometmq.idempotence")

M = TypeVar("M", contravariant=True)
R = TypeVar("R")
C = TypeVar("C")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_NOTHING: Mapping[str, object] = MappingProxyType({})


class StillProcessing(CometError):
    """Another delivery of this message is being processed; don't acknowledge this one."""

    retriable = True

    def __init__(self, key: str, where: str) -> None:
        super().__init__(f"message {key!r} is still being processed ({where}); deliver it later")
        self.key = key


class Attempt(Protocol):
    """One delivery that is being processed. Ends with exactly one of `done` and `undone`."""

    @property
    def keywords(self) -> Mapping[str, object]:
        """What the handler gets besides the message."""

    def done(self) -> None:
        """The handler has returned: keep the mark."""

    def undone(self) -> None:
        """The handler has failed or asks for redelivery: leave no mark."""


class Store(Protocol):
    """Where marks are kept."""

    @property
    def may_change_thread(self) -> bool:
        """Whether an async handler's calls may go to a thread, so that the loop doesn't wait."""

    def begin(self, key: str) -> Attempt | None:
        """None: done already. Raises StillProcessing while another attempt is under way."""


class Decorator(Protocol):
    """Keeps a handler's types but for `connection`, which the store gives."""

    def __call__(self, handler: Callable[Concatenate[M, ...], R], /) -> Callable[[M], R]: ...


def idempotent(store: Store, *, key: Callable[..., str] | None = None) -> Decorator:
    """Wrap a handler of one message, plain or async: a message done once is not done again.

    >>> @idempotent(MemoryStore())
    ... def handle(message): ...

    `key` tells which deliveries are the same; by default the message's unique id, which a resent
    and a redelivered message keep. Give your own (an order's number, say) if producers may make two
    messages of one fact. The wrapped handler

    - returns None at once, which acknowledges, if this key was done;
    - raises StillProcessing, which doesn't acknowledge, while another delivery is being processed;
    - else runs. Its mark is kept when it returns; not when it raises or when its result asks for
      redelivery (has a `delay_level`, as `Later` has).

    An error of the store comes out and nothing is acknowledged. Consumers of different groups must
    not share marks: give each its own `group` (SqlStore, RedisStore) or its own MemoryStore.
    """

    def key_of(message: object) -> str:
        return _key(message if key is None else key(message))

    def decorate(handler: Callable[..., object]) -> Callable[[object], object]:
        is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            type(handler).__call__
        )
        if is_async:

            async def call(work: Callable[[], R]) -> R:
                return await asyncio.to_thread(work) if store.may_change_thread else work()

            @functools.wraps(handler)
            async def handle_async(message: object) -> object:
                name = key_of(message)
                attempt = await call(lambda: store.begin(name))
                if attempt is None:
                    return None
                try:
                    result: object = await handler(message, **attempt.keywords)  # type: ignore[misc]
                except BaseException:
                    _undo(attempt, name)  # here, in this thread: we may have been cancelled
                    raise
                await call(lambda: _end(attempt, result))
                return result

            return handle_async

        @functools.wraps(handler)
        def handle(message: object) -> object:
            name = key_of(message)
            attempt = store.begin(name)
            if attempt is None:
                return None
            try:
                result = handler(message, **attempt.keywords)
                _refuse_awaitable(result)
            except BaseException:
                _undo(attempt, name)
                raise
            _end(attempt, result)
            return result

        return handle

    return decorate  # type: ignore[return-value]  # one body for plain and async handlers


def _key(message: object) -> str:
    found = message if isinstance(message, str) else getattr(message, "message_id", None)
    if not isinstance(found, str) or not found:
        raise UsageError(
            f"no key to tell this {type(message).__name__} by: it must have a message_id, "
            "or key= must give a text that is not empty"
        )
    return found


def _refuse_awaitable(result: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise UsageError("a handler that is awaited must be written as async def to be idempotent")


def _end(attempt: Attempt, result: object) -> None:
    asks_again = result is not None and hasattr(result, "delay_level")
    if asks_again:
        attempt.undone()
    else:
        attempt.done()


def _undo(attempt: Attempt, key: str) -> None:
    """The handler's own error matters more than one of the store."""
    try:
        attempt.undone()
    except Exception:
        log.warning("undo_failed key=%s", key, exc_info=True)


class MemoryStore:
    """Marks in this process: the newest `limit` of them, each for `ttl`.

    Holds across redeliveries to this process only. After a restart, in another process, after `ttl`
    or when `limit` newer messages were done, a redelivered message is processed again.
    """

    may_change_thread = False  # nothing here waits

    def __init__(
        self,
        limit: int = 100_000,
        ttl: timedelta = timedelta(hours=1),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit < 1 or ttl <= timedelta(0):
            raise UsageError(f"MemoryStore(limit={limit}, ttl={ttl}): both must be above zero")
        self._limit = limit
        self._ttl_s = ttl.total_seconds()
        self._clock = clock
        self._lock = threading.Lock()
        self._done: OrderedDict[str, float] = OrderedDict()  # key -> until when, soonest first
        self._processing: set[str] = set()  # as many as handlers run at once

    def __len__(self) -> int:
        return len(self._done)

    def begin(self, key: str) -> Attempt | None:
        with self._lock:
            now_s = self._clock()
            while self._done and next(iter(self._done.values())) <= now_s:
                self._done.popitem(last=False)
            if key in self._done:
                return None
            if key in self._processing:
                raise StillProcessing(key, "in this process")
            self._processing.add(key)
        return _Ends(_NOTHING, lambda: self._finish(key, True), lambda: self._finish(key, False))

    def _finish(self, key: str, is_done: bool) -> None:
        with self._lock:
            self._processing.discard(key)
            if is_done:
                self._done[key] = self._clock() + self._ttl_s
                if len(self._done) > self._limit:
                    self._done.popitem(last=False)


class RedisStore:
    """Marks in Redis. `client`: a blocking redis-py client of yours.

    A delivery takes the key for `lease`; a handler that returns turns it into a mark for `ttl`, one
    that raises frees it, and a crash frees it when the lease is over. What holds:

    - Two deliveries don't run at once, as long as none runs longer than `lease`.
    - A message whose mark was written is not processed again within `ttl`.
    - **Not exactly once.** Effect and mark are two systems: a crash after the effect and before the
      mark, a mark that can't be written, and a Redis that loses data (restart without AOF, failover
      before replication, eviction) let the message be processed again. Never is one skipped that
      wasn't done.
    """

    may_change_thread = True

    def __init__(
        self,
        client: object,
        *,
        group: str,
        lease: timedelta = timedelta(minutes=5),
        ttl: timedelta = timedelta(days=7),
        prefix: str = "cometmq:done",
    ) -> None:
        if type(client).__module__.startswith("redis.asyncio"):
            raise UsageError("RedisStore needs redis.Redis, not redis.asyncio; async handlers too")
        if min(lease, ttl) < timedelta(milliseconds=1):
            raise UsageError(f"RedisStore(lease={lease}, ttl={ttl}): both must be above zero")
        self._client = client
        self._prefix = f"{prefix}:{_group(group)}:"
        self._lease = lease
        self._ttl = ttl

    def begin(self, key: str) -> Attempt | None:
        client: _RedisClient = self._client  # type: ignore[assignment]
        name = self._prefix + key
        token = uuid.uuid4().hex
        # Twice: the lease may end between SET and GET. A third time would only be a busier race.
        for _ in range(2):
            if client.set(name, token, nx=True, px=self._lease):
                return _Ends(
                    _NOTHING,
                    # Also if the lease is over and another has it: the work is done.
                    lambda: client.set(name, _DONE, px=self._ttl),
                    lambda: client.eval(_FREE_IF_OURS, 1, name, token),
                )
            found = client.get(name)
            if found in (_DONE, _DONE.encode()):
                return None
            if found is not None:
                break
        raise StillProcessing(key, f"Redis key {name}")


class _RedisClient(Protocol):
    def set(
        self, name: str, value: str, *, nx: bool = False, px: timedelta | None = None
    ) -> object: ...
    def get(self, name: str) -> object: ...
    def eval(self, script: str, numkeys: int, *keys_and_args: str) -> object: ...


_DONE = "done"  # a token is 32 hex digits, never this
_FREE_IF_OURS = """if redis.call('get', KEYS[1]) == ARGV[1] then
    return redis.call('del', KEYS[1])
end
return 0"""


class SqlStore(Generic[C]):
    """Marks in your database, each written in the handler's own transaction.

    >>> @idempotent(SqlStore(connect, group="billing"))
    ... def handle(message, *, connection):
    ...     connection.execute("UPDATE account ...")

    or, without the decorator, with `connection` None if the message was done already:

    >>> with store.transaction(message) as connection:
    ...     if connection is not None: ...

    What the handler writes through `connection` and the mark are committed together when it
    returns, and rolled back together when it raises or asks for redelivery: **the effect on this
    database happens exactly once**, whatever crashes, as long as the mark is kept (`forget`). It
    does not hold for anything else the handler does (mail, HTTP, another database), nor if the
    handler commits: on `connection` neither commit() nor sqlite3's `with connection:`.

    `connect` gives, for each delivery, a new DB-API connection, SQLAlchemy Connection or Session,
    which is closed afterwards (a pool's goes back), or a context manager around one
    (psycopg_pool's `pool.connection`). Not one in autocommit mode.

    A second delivery while the first runs: on PostgreSQL, and anywhere within one SqlStore, it
    raises StillProcessing at once; on SQLite, from elsewhere, after the connection's timeout: a
    SQLite file has one writer, so there handlers run one at a time. On other databases it waits for
    the first one's row lock. With an async handler, these calls block the event loop.
    """

    may_change_thread = False  # a sqlite3 connection belongs to its thread

    def __init__(
        self,
        connect: Callable[[], C | AbstractContextManager[C]],
        *,
        group: str,
        table: str = "cometmq_done",
        dialect: str | None = None,
        paramstyle: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not _NAME.fullmatch(table):
            raise UsageError(
                f"table {table!r}: the name goes into SQL text, so it must be a letter or _, "
                "then letters, digits and _, at most 63 in all"
            )
        self._connect = connect
        self._group = _group(group)
        self.table = table
        self._dialect = dialect
        self._paramstyle = paramstyle
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}  # key -> the thread that processes it

    def create_table(self) -> None:
        """Make the table unless it is there, over a connection of its own, committed."""
        with self._alone() as sql:
            sql.run(self.schema())

    def schema(self) -> str:
        """The statement that makes the table, for your migrations; the same for all databases."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.table} (consumer_group VARCHAR(255) NOT NULL,"
            " message_key VARCHAR(255) NOT NULL, done_at_ms BIGINT NOT NULL,"
            " PRIMARY KEY (consumer_group, message_key))"
        )

    def forget(self, older_than: timedelta) -> int:
        """Delete this group's marks older than that; call it now and then, the table only grows.

        Keep them longer than a message can be redelivered (retries, a reset offset).
        """
        before_ms = int((self._clock() - older_than.total_seconds()) * 1000)
        with self._alone() as sql:
            return sql.run(
                f"DELETE FROM {self.table} WHERE consumer_group = ? AND done_at_ms < ?",
                *(self._group, before_ms),
            )

    @contextmanager
    def transaction(self, message: object) -> Generator[C | None, None, None]:
        """A connection whose transaction holds the mark; None if the message is done.

        `message`: a received message, or a key of your own (a text that is not empty). Commits when
        the block ends, rolls back when it raises.
        """
        key = _key(message)
        attempt = self.begin(key)
        if attempt is None:
            yield None
            return
        try:
            yield attempt.keywords["connection"]  # type: ignore[misc]
        except BaseException:
            _undo(attempt, key)
            raise
        attempt.done()

    def begin(self, key: str) -> Attempt | None:
        with self._lock:
            if key in self._open:
                raise StillProcessing(key, "in this process")
            busy_threads = set(self._open.values())
            self._open[key] = threading.get_ident()
        stack = ExitStack()
        stack.callback(self._closed, key)
        try:
            sql = self._enter(stack)
            sql.refuse_autocommit()
            if sql.dialect == "sqlite" and threading.get_ident() in busy_threads:
                # Waiting for its write lock here would keep the one who has it from going on.
                raise StillProcessing(key, "SQLite has one writer, and this thread has begun")
            is_new = self._write_mark(sql, key)
            if not is_new:
                sql.rollback()
        except BaseException:
            stack.close()
            raise
        if not is_new:
            stack.close()
            return None

        def done() -> None:
            with stack:
                self._check_mark(sql, key)
                sql.commit()

        def undone() -> None:
            with stack:
                sql.rollback()

        return _Ends({"connection": sql.session}, done, undone)

    def _write_mark(self, sql: SqlSession, key: str) -> bool:
        """False: there was one."""
        if sql.dialect == "postgresql":
            # An INSERT would wait for the other's transaction; a lock can be tried.
            named = "\0".join((self.table, self._group, key)).encode()
            number = int.from_bytes(hashlib.sha256(named).digest()[:8], "big", signed=True)
            if not sql.one("SELECT pg_try_advisory_xact_lock(?)", number):
                raise StillProcessing(key, f"in a transaction on {self.table}")
        is_mysql = sql.dialect == "mysql"
        try:
            count = sql.run(
                f"INSERT {'IGNORE ' if is_mysql else ''}INTO {self.table}"
                " (consumer_group, message_key, done_at_ms) VALUES (?, ?, ?)"
                + ("" if is_mysql else " ON CONFLICT DO NOTHING"),
                *(self._group, key, int(self._clock() * 1000)),
            )
        except Exception as error:
            if _is_sqlite_busy(error):
                raise StillProcessing(key, "or another holds SQLite's write lock") from error
            raise
        return count > 0

    def _check_mark(self, sql: SqlSession, key: str) -> None:
        """A handler may have rolled back, or swallowed an error after which PostgreSQL turns COMMIT
        into a rollback without a word; then its work is gone, and must not be acknowledged."""
        if not sql.one(
            f"SELECT COUNT(*) FROM {self.table} WHERE consumer_group = ? AND message_key = ?",
            *(self._group, key),
        ):
            raise UsageError(f"the handler of {key!r} rolled back the transaction it was given")

    def _closed(self, key: str) -> None:
        with self._lock:
            self._open.pop(key, None)

    def _enter(self, stack: ExitStack) -> SqlSession:
        got = self._connect()
        if _is_connection(got):
            stack.callback(got.close)  # type: ignore[union-attr]
            session: object = got
        elif isinstance(got, AbstractContextManager):
            session = stack.enter_context(got)
        else:
            raise UsageError(
                f"SqlStore: connect gave {type(got).__name__}, which is neither a connection nor a "
                "context manager around one"
            )
        return SqlSession("SqlStore", session, self._dialect, self._paramstyle)

    @contextmanager
    def _alone(self) -> Generator[SqlSession, None, None]:
        with ExitStack() as stack:
            sql = self._enter(stack)
            yield sql
            sql.commit()


class _Ends:
    """An attempt made of two functions."""

    def __init__(
        self,
        keywords: Mapping[str, object],
        done: Callable[[], object],
        undone: Callable[[], object],
    ) -> None:
        self.keywords = keywords
        self._done = done
        self._undone = undone

    def done(self) -> None:
        self._done()

    def undone(self) -> None:
        self._undone()


def _is_connection(got: object) -> bool:
    return any(callable(getattr(got, name, None)) for name in ("cursor", "exec_driver_sql")) or (
        callable(getattr(got, "get_bind", None))
    )


def _is_sqlite_busy(error: BaseException) -> bool:
    """sqlite3's SQLITE_BUSY (5) with any extension; SQLAlchemy keeps the driver's error as orig."""
    cause = getattr(error, "orig", error)
    code = getattr(cause, "sqlite_errorcode", 0)
    return isinstance(code, int) and code & 0xFF == 5


def _group(group: str) -> str:
    if not group or ":" in group:  # : ends it in Redis's keys
        raise UsageError(
            f"group {group!r}: give the consumer group's name (no colon), because without it one "
            "group's marks would hide another's messages"
        )
    return group
