"""A message done once is not done again; one that wasn't done is never skipped."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from cometmq.errors import UsageError
from cometmq.idempotence import MemoryStore, RedisStore, SqlStore, StillProcessing, idempotent


@dataclass
class Received:
    message_id: str
    keys: tuple[str, ...] = ()


@dataclass
class Later:
    delay_level: int = 3


ONE = Received("1")
Connect = Callable[[], sqlite3.Connection]


class FakeRedis:
    """Three commands of Redis; the real one is in tests/server/test_databases.py."""

    def __init__(self, *, decodes: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.lives: dict[str, timedelta] = {}
        self.decodes = decodes

    def set(self, name: str, value: str, *, nx: bool = False, px: timedelta) -> bool | None:
        if nx and name in self.values:
            return None
        self.values[name] = value
        self.lives[name] = px
        return True

    def get(self, name: str) -> str | bytes | None:
        found = self.values.get(name)
        return found if found is None or self.decodes else found.encode()

    def eval(self, script: str, numkeys: int, name: str, token: str) -> int:
        return int(self.values.get(name) == token and self.values.pop(name) == token)


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    def make() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db", timeout=0.1)

    SqlStore(make, group="g").create_table()
    with closing(make()) as connection:
        connection.execute("CREATE TABLE account (balance INTEGER)")
        connection.execute("INSERT INTO account VALUES (0)")
        connection.commit()
    return make


@pytest.fixture(params=["memory", "redis", "redis-text", "sql"])
def store(request: pytest.FixtureRequest, connect: Connect) -> object:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "sql":
        return SqlStore(connect, group="g")
    return RedisStore(FakeRedis(decodes=request.param == "redis-text"), group="g")


def balance(connect: Connect) -> int:
    with closing(connect()) as connection:
        found: int = connection.execute("SELECT balance FROM account").fetchone()[0]
        return found


def pay(message: Received, *, connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE account SET balance = balance + 10")


# --- every store


def test_the_second_delivery_does_nothing(store) -> None:
    runs: list[str] = []

    @idempotent(store)
    def handle(message: Received, **_: object) -> str:
        """What it does."""
        runs.append(message.message_id)
        return "result"

    assert handle.__doc__ == "What it does."
    assert handle(ONE) == "result"
    assert handle(ONE) is None
    assert handle(Received("2")) == "result"
    assert runs == ["1", "2"]


def test_a_handler_that_raises_leaves_no_mark(store) -> None:
    runs: list[int] = []

    @idempotent(store)
    def handle(message: Received, **_: object) -> None:
        runs.append(1)
        if len(runs) < 3:
            raise [KeyboardInterrupt, OSError][len(runs) - 1]("not now")

    for error in (KeyboardInterrupt, OSError):
        with pytest.raises(error, match="not now"):
            handle(ONE)
    handle(ONE)
    handle(ONE)
    assert len(runs) == 3


def test_a_result_that_asks_for_redelivery_leaves_no_mark(store) -> None:
    runs: list[int] = []

    @idempotent(store)
    def handle(message: Received, **_: object) -> Later | None:
        runs.append(1)
        return Later() if len(runs) == 1 else None

    assert handle(ONE) == Later()
    handle(ONE)
    handle(ONE)
    assert len(runs) == 2


def test_a_delivery_during_the_first_is_not_acknowledged(store) -> None:
    @idempotent(store)
    def handle(message: Received, **_: object) -> str:
        with pytest.raises(StillProcessing) as caught:
            handle(message)
        assert caught.value.retriable and caught.value.key == "1"
        return "first"

    assert handle(ONE) == "first"
    assert handle(ONE) is None


def test_a_key_of_ones_own(store) -> None:
    runs: list[str] = []

    @idempotent(store, key=lambda message: " ".join(message.keys))
    def handle(message: Received, **_: object) -> None:
        runs.append(message.message_id)

    handle(Received("1", keys=("order-7",)))
    handle(Received("2", keys=("order-7",)))
    handle(Received("3", keys=("order-8",)))
    assert runs == ["1", "3"]
    with pytest.raises(UsageError, match="not empty"):
        handle(Received("4"))


def test_async_handlers(store) -> None:
    runs: list[str] = []

    @idempotent(store)
    async def handle(message: Received, **_: object) -> str | Later:
        runs.append(message.message_id)
        await asyncio.sleep(0)
        if message.message_id == "slow":
            await asyncio.sleep(60)
        if message.message_id == "bad" and runs.count("bad") == 1:
            raise OSError
        return Later() if runs.count("later") == 1 else "done"

    async def deliver() -> None:
        assert await handle(ONE) == "done"
        assert await handle(ONE) is None
        with pytest.raises(OSError):
            await handle(Received("bad"))
        assert await handle(Received("bad")) == "done"
        assert await handle(Received("later")) == Later()
        assert await handle(Received("later")) == "done"
        assert await handle(Received("later")) is None
        slow = asyncio.create_task(handle(Received("slow")))
        while "slow" not in runs:
            await asyncio.sleep(0.001)
        with pytest.raises(StillProcessing):
            await handle(Received("slow"))
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        slow = asyncio.create_task(handle(Received("slow")))  # cancelled: no mark
        while runs.count("slow") < 2:
            await asyncio.sleep(0.001)
        slow.cancel()
        await asyncio.wait([slow])

    asyncio.run(deliver())


def test_an_object_with_an_async_call_is_async() -> None:
    class Handler:
        async def __call__(self, message: Received) -> str:
            return "done"

    handle = idempotent(MemoryStore())(Handler())
    assert asyncio.run(handle(ONE)) == "done"
    assert asyncio.run(handle(ONE)) is None


def test_a_plain_function_that_returns_a_coroutine_is_refused() -> None:
    async def work() -> None: ...

    store = MemoryStore()
    with pytest.raises(UsageError, match="async def"):
        idempotent(store)(lambda message: work())(ONE)
    assert len(store) == 0


def test_a_message_without_an_id_is_refused(store) -> None:
    handle = idempotent(store)(lambda message, **_: None)
    for wrong in (Received(""), object()):
        with pytest.raises(UsageError, match="message_id"):
            handle(wrong)


# --- memory


def test_memory_is_bounded_by_count_and_time() -> None:
    now = [0.0]
    store = MemoryStore(3, timedelta(seconds=10), clock=lambda: now[0])
    runs: list[str] = []
    handle = idempotent(store)(lambda message: runs.append(message.message_id))
    for name in "abcd":
        handle(Received(name))
    assert len(store) == 3
    handle(Received("d"))
    handle(Received("a"))  # pushed out: done again
    assert runs == list("abcda")
    now[0] = 10
    handle(Received("d"))
    assert runs == list("abcdad")
    assert len(store) == 1
    for wrong in ((0, timedelta(1)), (1, timedelta(0))):
        with pytest.raises(UsageError):
            MemoryStore(*wrong)


def test_memory_lets_one_of_many_threads_through() -> None:
    store, runs, refused = MemoryStore(), [], []
    barrier, go_on = threading.Barrier(8), threading.Event()

    @idempotent(store)
    def handle(message: Received) -> None:
        runs.append(1)
        go_on.wait(10)

    def deliver() -> None:
        barrier.wait()
        try:
            handle(ONE)
        except StillProcessing:
            refused.append(1)
            if len(refused) == 7:
                go_on.set()

    threads = [threading.Thread(target=deliver) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (len(runs), len(refused)) == (1, 7)


# --- Redis, the parts that need no server


def test_redis_marks_live_for_ttl_and_leases_for_lease() -> None:
    client = FakeRedis()
    store = RedisStore(client, group="g", lease=timedelta(seconds=9), ttl=timedelta(days=1))
    lives: list[timedelta] = []
    idempotent(store)(lambda message: lives.extend(client.lives.values()))(ONE)
    assert lives == [timedelta(seconds=9)]
    assert client.values == {"cometmq:done:g:1": "done"}
    assert client.lives == {"cometmq:done:g:1": timedelta(days=1)}


def test_redis_frees_only_its_own_lease_but_marks_what_it_did() -> None:
    client = FakeRedis()
    store = RedisStore(client, group="g")
    name = "cometmq:done:g:1"
    late = store.begin("1")
    del client.values[name]  # the lease is over, another takes it
    other = store.begin("1")
    token = client.values[name]
    late.undone()
    assert client.values[name] == token
    late.done()
    other.undone()
    assert client.values[name] == "done"


def test_redis_a_lease_that_ends_in_the_middle_is_tried_again() -> None:
    class Ending(FakeRedis):
        def get(self, name: str) -> None:
            self.values.clear()

    client = Ending()
    client.values["cometmq:done:g:1"] = "other"
    assert RedisStore(client, group="g").begin("1") is not None


def test_groups_are_named_and_apart(connect) -> None:
    client = FakeRedis()
    runs: list[str] = []
    for group in ("billing", "mail"):
        for store in (RedisStore(client, group=group), SqlStore(connect, group=group)):
            idempotent(store)(lambda message, **_: runs.append("run"))(ONE)
    assert len(runs) == 4
    for wrong in ("", "a:b"):
        with pytest.raises(UsageError, match="group"):
            RedisStore(client, group=wrong)
        with pytest.raises(UsageError, match="group"):
            SqlStore(connect, group=wrong)


def test_an_error_of_the_store_hides_none_of_the_handler(caplog) -> None:
    class Broken(FakeRedis):
        def eval(self, *_: object) -> int:
            raise ConnectionError("Redis is gone")

    @idempotent(RedisStore(Broken(), group="g"))
    def handle(message: Received) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        handle(ONE)
    assert "undo_failed key=1" in caplog.text


# --- SQL


def test_work_and_mark_are_committed_together(connect) -> None:
    handle = idempotent(SqlStore(connect, group="g"))(pay)
    handle(ONE)
    handle(ONE)
    assert balance(connect) == 10


def test_work_and_mark_are_rolled_back_together(connect) -> None:
    results: list[object] = [OSError("boom"), Later(), None]

    @idempotent(SqlStore(connect, group="g"))
    def handle(message: Received, *, connection: sqlite3.Connection) -> object:
        pay(message, connection=connection)
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(OSError):
        handle(ONE)
    assert balance(connect) == 0
    handle(ONE)
    assert balance(connect) == 0
    handle(ONE)
    assert balance(connect) == 10


def test_without_the_decorator(connect) -> None:
    store = SqlStore(connect, group="g")
    for expected in (10, 10):
        with store.transaction(ONE) as connection:
            if connection is not None:
                pay(ONE, connection=connection)
        assert balance(connect) == expected
    with pytest.raises(OSError), store.transaction("a key") as connection:
        assert connection is not None
        pay(ONE, connection=connection)
        raise OSError
    assert balance(connect) == 10
    with store.transaction("a key") as connection:
        assert connection is not None


def test_a_handler_that_rolls_back_is_not_acknowledged(connect) -> None:
    rolls_back = [True]

    @idempotent(SqlStore(connect, group="g"))
    def handle(message: Received, *, connection: sqlite3.Connection) -> None:
        pay(message, connection=connection)
        if rolls_back.pop():
            connection.rollback()

    with pytest.raises(UsageError, match="rolled back"):
        handle(ONE)
    rolls_back.append(False)
    handle(ONE)
    assert balance(connect) == 10


def _pay_and_die(path: str, dies: str) -> None:
    @idempotent(SqlStore(lambda: sqlite3.connect(path), group="g"))
    def handle(message: Received, *, connection: sqlite3.Connection) -> None:
        pay(message, connection=connection)
        if dies == "True":
            os._exit(9)

    handle(ONE)


def test_a_crash_in_the_handler_takes_work_and_mark_with_it(connect, tmp_path: Path) -> None:
    for dies, paid in ((True, 0), (False, 10), (True, 10)):
        ended = subprocess.run(
            [sys.executable, __file__, str(tmp_path / "shop.db"), str(dies)],
            timeout=30,
            check=False,
        )
        assert ended.returncode == (9 if dies and not paid else 0)
        assert balance(connect) == paid


def test_another_process_on_sqlite_is_still_processing_after_its_timeout(connect) -> None:
    """Another SqlStore knows nothing of the first, as in another process: SQLite's lock tells."""

    @idempotent(SqlStore(connect, group="g"))
    def handle(message: Received, *, connection: sqlite3.Connection) -> None:
        with pytest.raises(StillProcessing, match="write lock"):
            idempotent(SqlStore(connect, group="g"))(pay)(message)

    handle(ONE)


def test_sqlite_never_waits_for_a_handler_of_the_same_thread(tmp_path: Path) -> None:
    """Two coroutines: the second would block the loop that the first needs to end."""

    def patient() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "shop.db", timeout=60)

    store = SqlStore(patient, group="g")
    store.create_table()

    @idempotent(store)
    async def handle(message: Received, **_: object) -> str:
        await asyncio.sleep(0.05)
        return "done"

    async def both() -> list[object]:
        two = (handle(ONE), handle(Received("2")))
        return await asyncio.gather(*two, return_exceptions=True)

    first, second = asyncio.run(asyncio.wait_for(both(), 5))
    assert first == "done"
    assert isinstance(second, StillProcessing)


def test_connections_are_closed_and_context_managers_left(connect) -> None:
    made: list[sqlite3.Connection] = []
    left: list[int] = []

    def counted() -> sqlite3.Connection:
        made.append(connect())
        return made[-1]

    @contextmanager
    def pooled():
        yield counted()
        left.append(1)
        made[-1].close()

    handle = idempotent(SqlStore(counted, group="g"))(pay)
    handle(ONE)
    handle(ONE)
    handle = idempotent(SqlStore(pooled, group="h"))(pay)
    handle(ONE)
    handle(ONE)
    assert balance(connect) == 20
    assert (len(made), len(left)) == (4, 2)
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.cursor()


def test_autocommit_is_refused(connect) -> None:
    def wrong() -> sqlite3.Connection:
        connection = connect()
        connection.isolation_level = None
        return connection

    with pytest.raises(UsageError, match="autocommit"):
        idempotent(SqlStore(wrong, group="g"))(pay)(ONE)
    idempotent(SqlStore(connect, group="g"))(pay)(ONE)
    assert balance(connect) == 10


def test_marks_are_forgotten_by_age_and_group(connect) -> None:
    now = [1000.0]
    ours = SqlStore(connect, group="g", clock=lambda: now[0])
    theirs = SqlStore(connect, group="h", clock=lambda: now[0])
    idempotent(ours)(pay)(ONE)
    idempotent(theirs)(pay)(ONE)
    now[0] += 100
    idempotent(ours)(pay)(Received("2"))
    assert ours.forget(timedelta(seconds=50)) == 1
    assert ours.forget(timedelta(seconds=50)) == 0
    idempotent(ours)(pay)(ONE)
    idempotent(theirs)(pay)(ONE)
    assert balance(connect) == 40


@pytest.mark.parametrize("table", ["", "a b", "a;b", "a\n", "x" * 64])
def test_a_table_name_that_is_no_identifier_is_refused(connect, table) -> None:
    with pytest.raises(UsageError, match="table"):
        SqlStore(connect, group="g", table=table)


def test_what_is_no_connection_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a connection"):
        SqlStore(lambda: 5, group="g").create_table()


if __name__ == "__main__":  # a process of its own for the crash test
    _pay_and_die(*sys.argv[1:])
