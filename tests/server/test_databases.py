"""Outbox and idempotence against real servers: PostgreSQL and Redis, each started here.

Needs the servers' binaries (Debian: postgresql, redis-server) and psycopg, redis and SQLAlchemy;
what is missing is skipped with the reason.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import UsageError
from cometmq.idempotence import RedisStore, SqlStore, StillProcessing, idempotent
from cometmq.message import Message, MessageQueue, SendResult, SendStatus
from cometmq.outbox import Outbox, Relay, Relayed

STORED = SendResult(SendStatus.SEND_OK, "", "", MessageQueue("t", "b", 0), 0)
START_TIMEOUT_S = 30


@dataclass
class Received:
    message_id: str


ONE = Received("1")


class Producer:
    """Shared by threads: list.append is atomic."""

    def __init__(self, *refused: bytes, wait_s: float = 0) -> None:
        self.sent: list[Message] = []
        self.refused = set(refused)
        self.wait_s = wait_s

    def send(self, message: Message) -> SendResult:
        if message.body in self.refused:
            raise OSError("refused")
        self.sent.append(message)
        time.sleep(self.wait_s)
        return STORED

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.sent]


# --- servers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ends(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def until_ready(
    process: subprocess.Popen[bytes], probe: Callable[[], object], output: Path
) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            probe()
            return
        except Exception:
            if process.poll() is not None or time.monotonic() > give_up:
                process.kill()
                raise AssertionError(f"not ready: {output.read_text()}") from None
            time.sleep(0.1)


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = str(found[-1]) if found else shutil.which("initdb")
    if not initdb:
        pytest.skip("no PostgreSQL server: no initdb in /usr/lib/postgresql/*/bin nor in PATH")
    # Not below tmp_path: another user can't enter there, and PostgreSQL refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="cometmq-postgres-"))
    who: dict[str, Any] = {"cwd": folder}
    if os.getuid() == 0:
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            shutil.rmtree(folder)
            pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        who |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    cluster, port, output = folder / "cluster", free_port(), folder / "output"
    try:
        subprocess.run(
            [initdb, "-D", cluster, "-U", "tester", "--auth=trust", "--no-sync", "-E", "UTF8"],
            check=True,
            capture_output=True,
            **who,
        )
        options = (f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=")
        options += ("fsync=off", "shared_buffers=16MB")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [Path(initdb).with_name("postgres"), "-D", cluster]
                + [word for option in options for word in ("-c", option)],
                stdout=file,
                stderr=file,
                **who,
            )
        url = f"postgresql://tester@127.0.0.1:{port}/postgres"
        until_ready(process, lambda: psycopg.connect(url).close(), output)
        yield url
        ends(process, signal.SIGINT)  # the fast shutdown
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def postgres(postgres_url: str) -> Callable[..., Any]:
    """Makes psycopg connections to a server whose tables are empty."""
    import psycopg

    def connect(**options: Any) -> Any:
        return psycopg.connect(postgres_url, **options)

    with connect() as connection:
        connection.execute("DROP TABLE IF EXISTS cometmq_outbox, cometmq_done, account")
        connection.execute("CREATE TABLE account (balance INTEGER)")
        connection.execute("INSERT INTO account VALUES (0)")
        Outbox().create_table(connection)
        Outbox().create_table(connection)
    SqlStore(connect, group="g").create_table()
    return connect


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    redis = pytest.importorskip("redis", reason="redis (redis-py) is not installed")
    binary = shutil.which("redis-server")
    if not binary:
        pytest.skip("no Redis server: redis-server is not in PATH")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    with (folder / "output").open("wb") as file:
        process = subprocess.Popen(
            [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            stdout=file,
            stderr=file,
        )

    def probe() -> None:
        with redis.Redis(port=port) as client:
            client.ping()

    until_ready(process, probe, folder / "output")
    yield port
    ends(process, signal.SIGTERM)


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def redis_client(redis_port: int, request: pytest.FixtureRequest) -> Iterator[Any]:
    import redis

    with redis.Redis(port=redis_port, decode_responses=request.param) as client:
        client.flushall()
        yield client


# --- outbox on PostgreSQL


def fill(connect: Callable[..., Any], *bodies: bytes, key: str = "") -> list[str]:
    with connect() as connection:
        return [
            Outbox().add(connection, Message("t", body, sharding_key=key, properties={"%": "?"}))
            for body in bodies
        ]


def test_postgres_a_row_lives_and_dies_with_the_transaction(postgres) -> None:
    with closing(postgres()) as connection:
        Outbox().add(connection, Message("t", b"1"))
        assert Relay(Outbox(), postgres, Producer()).run_once() == Relayed(0, 0, 0, 0)
        connection.rollback()
        Outbox().add(connection.cursor(), Message("t", b"2\0\xff", keys=["a", "b"]))
        connection.commit()
    producer = Producer()
    assert Relay(Outbox(), postgres, producer).run_once() == Relayed(1, 0, 0, 0)
    assert producer.bodies == [b"2\0\xff"]
    assert producer.sent[0].keys == "a b"


def test_postgres_a_ttl_is_kept_also_by_a_table_of_an_earlier_version(postgres) -> None:
    from psycopg.rows import dict_row

    brief = Message("t", b"brief", ttl=timedelta(seconds=9))
    outbox, producer = Outbox(), Producer()
    relay = Relay(outbox, lambda: postgres(row_factory=dict_row), producer)
    with closing(postgres()) as connection:
        connection.execute("ALTER TABLE cometmq_outbox DROP COLUMN ttl_ms")
        outbox.add(connection, Message("t", b"plain"))
        with pytest.raises(UsageError, match="create_table once, or ALTER TABLE"):
            outbox.add(connection, brief)
        connection.commit()  # the refusal has not spoilt the transaction
        assert relay.run_once() == Relayed(1, 0, 0, 0)
        outbox.create_table(connection)
        outbox.add(connection, brief)
        connection.commit()
    assert relay.run_once() == Relayed(1, 0, 0, 0)
    assert [one.ttl for one in producer.sent] == [None, brief.ttl]


def test_postgres_failures_stuck_retry_discard(postgres) -> None:
    fill(postgres, b"a0", b"a1", key="a")
    fill(postgres, b"b0", b"free", key="")
    producer, now = Producer(b"a0", b"b0"), [1e6]
    relay = Relay(Outbox(), postgres, producer, max_tries=2, clock=lambda: now[0])
    assert relay.run_once() == Relayed(1, 2, 3, 0)
    assert relay.run_once() == Relayed(0, 0, 3, 0)
    now[0] += 1000
    assert relay.run_once() == Relayed(0, 2, 1, 2)
    a0, b0 = relay.stuck()
    assert (a0.tries, a0.error) == (2, "OSError: refused")
    producer.refused.clear()
    assert relay.retry([a0.id, 99999]) == 1
    assert relay.discard([b0.id]) == 1
    assert relay.run_once() == Relayed(2, 0, 0, 0)
    assert producer.bodies == [b"free", b"a0", b"a1"]
    now[0] += 1e6
    assert relay.run_once() == Relayed(0, 0, 0, 0)
    with closing(postgres()) as connection:
        assert connection.execute("SELECT COUNT(*) FROM cometmq_outbox").fetchone() == (0,)


def test_postgres_relays_at_once_send_each_row_once_and_keys_in_order(postgres) -> None:
    rows, names = 400, ("", "a", "b", "c", "hot", "hot")
    with postgres() as connection:
        for n in range(rows):
            key = names[n % len(names)]
            Outbox().add(connection, Message("t", b"%d" % n, sharding_key=key))
    producer = Producer(wait_s=0.0005)
    failures: list[BaseException] = []

    def relay_until_empty(number: int) -> None:
        # One of them in autocommit mode: the claim must hold by itself.
        relay = Relay(Outbox(), lambda: postgres(autocommit=number == 0), producer, batch_rows=9)
        try:
            while relay.run_once().waiting:
                pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=relay_until_empty, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(map(int, producer.bodies)) == list(range(rows))
    for key in set(names) - {""}:
        numbers = [int(one.body) for one in producer.sent if one.sharding_key == key]
        assert numbers == sorted(numbers)


def test_postgres_a_row_locked_by_another_is_skipped_not_waited_for(postgres) -> None:
    fill(postgres, b"a0", b"a1", key="a")
    fill(postgres, b"free")
    producer = Producer()
    with closing(postgres()) as other:
        other.execute("SELECT 1 FROM cometmq_outbox WHERE body = %s FOR UPDATE", [b"a0"])
        # a1 could be claimed, but an earlier one of its key is in another's hands
        assert Relay(Outbox(), postgres, producer).run_once() == Relayed(1, 0, 2, 0)
    assert producer.bodies == [b"free"]
    assert Relay(Outbox(), postgres, producer).run_once() == Relayed(2, 0, 0, 0)


def _relay_that_dies(url: str) -> None:
    import psycopg

    class Deadly:
        def send(self, message: Message) -> SendResult:
            print(message.unique_id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            return STORED

    Relay(Outbox(), lambda: psycopg.connect(url), Deadly(), lease_s=0.5).run_once()


def test_postgres_a_relay_killed_between_send_and_mark_sends_again(postgres, postgres_url) -> None:
    (unique_id,) = fill(postgres, b"0")
    died = subprocess.run(
        [sys.executable, __file__, postgres_url], capture_output=True, text=True, check=False
    )
    assert (died.returncode, died.stdout.strip()) == (-signal.SIGKILL, unique_id), died.stderr
    producer = Producer()
    give_up = time.monotonic() + 10
    while Relay(Outbox(), postgres, producer).run_once().waiting and time.monotonic() < give_up:
        time.sleep(0.05)
    assert [message.unique_id for message in producer.sent] == [unique_id]


def test_postgres_dict_rows_and_async_connections(postgres, postgres_url) -> None:
    import asyncio

    import psycopg
    from psycopg.rows import dict_row

    fill(postgres, b"0")
    producer = Producer(b"0")
    relay = Relay(Outbox(), lambda: postgres(row_factory=dict_row), producer, max_tries=1)
    assert relay.run_once() == Relayed(0, 1, 0, 1)
    assert len(relay.stuck()) == 1

    async def add() -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            with pytest.raises(UsageError, match="async"):
                Outbox().add(connection, Message("t", b"x"))

    asyncio.run(add())


# --- SQLAlchemy on both databases


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")
    if request.param == "sqlite":
        made = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    else:
        request.getfixturevalue("postgres")
        url = request.getfixturevalue("postgres_url")
        made = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    yield made
    made.dispose()


def test_sqlalchemy_sessions_and_connections(engine) -> None:
    from sqlalchemy.orm import Session, sessionmaker

    with engine.begin() as connection:
        Outbox().create_table(connection)
    with Session(engine) as session:
        Outbox().add(session, Message("t", b"rolled back"))
        assert session.in_transaction()
        session.rollback()
        Outbox().add(session, Message("t", b"by session", sharding_key="k"))
        session.commit()
    with engine.connect() as connection:
        Outbox().add(connection, Message("t", b"by connection", sharding_key="k"))
        connection.commit()
    producer = Producer(b"by connection")
    assert Relay(Outbox(), engine.connect, producer, max_tries=1).run_once() == Relayed(1, 1, 0, 1)
    by_session = Relay(Outbox(), sessionmaker(engine), producer)
    producer.refused.clear()
    assert by_session.retry([one.id for one in by_session.stuck()]) == 1
    assert by_session.run_once() == Relayed(1, 0, 0, 0)
    assert producer.bodies == [b"by session", b"by connection"]


def test_sqlalchemy_idempotence(engine) -> None:
    from sqlalchemy import text
    from sqlalchemy.orm import sessionmaker

    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS account"))
        connection.execute(text("CREATE TABLE account (balance INTEGER)"))
        connection.execute(text("INSERT INTO account VALUES (0)"))
    results: list[Exception | None] = [OSError(), None]

    def pay(message: Received, *, connection: Any) -> None:
        connection.execute(text("UPDATE account SET balance = balance + 10"))
        error = results.pop(0)
        if error:
            raise error

    for group, connect in (("session", sessionmaker(engine)), ("connection", engine.connect)):
        store = SqlStore(connect, group=group)
        store.create_table()
        handle = idempotent(store)(pay)
        results[:] = [OSError(), None]
        with pytest.raises(OSError):
            handle(ONE)
        handle(ONE)
        handle(ONE)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT balance FROM account")).scalar() == 20
    loose = engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(UsageError, match="autocommit"):
        SqlStore(loose.connect, group="g").begin("2")


def test_sqlalchemy_a_busy_sqlite_file_is_still_processing(tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")
    path = tmp_path / "shop.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0.05})
    store = SqlStore(engine.connect, group="g")
    store.create_table()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StillProcessing):
            store.begin("1")
    engine.dispose()


# --- idempotence on PostgreSQL


def balance(connect: Callable[..., Any]) -> int:
    with closing(connect()) as connection:
        return int(connection.execute("SELECT balance FROM account").fetchone()[0])


def pay(message: Received, *, connection: Any) -> None:
    connection.execute("UPDATE account SET balance = balance + 10")


def test_postgres_work_and_mark_are_one_transaction(postgres) -> None:
    handle = idempotent(SqlStore(postgres, group="g"))(pay)
    handle(ONE)
    handle(ONE)
    assert balance(postgres) == 10

    @idempotent(SqlStore(postgres, group="g"))
    def fail(message: Received, *, connection: Any) -> None:
        pay(message, connection=connection)
        raise OSError

    with pytest.raises(OSError):
        fail(Received("2"))
    assert balance(postgres) == 10
    handle(Received("2"))
    assert balance(postgres) == 20


def test_postgres_a_second_delivery_elsewhere_is_refused_at_once(postgres) -> None:
    """Two stores know nothing of each other, as in two processes: the database tells."""

    def impatient() -> Any:
        return postgres(options="-c lock_timeout=2000")

    @idempotent(SqlStore(postgres, group="g"))
    def handle(message: Received, *, connection: Any) -> None:
        with pytest.raises(StillProcessing):  # not LockNotAvailable: it doesn't wait at all
            idempotent(SqlStore(impatient, group="g"))(pay)(message)
        idempotent(SqlStore(postgres, group="other"))(pay)(message)
        idempotent(SqlStore(postgres, group="g"))(pay)(Received("2"))

    handle(ONE)
    assert balance(postgres) == 20


def test_postgres_many_deliveries_at_once_have_one_effect(postgres) -> None:
    outcomes: list[str] = []

    def deliver() -> None:
        for _ in range(20):
            try:
                idempotent(SqlStore(postgres, group="g"))(pay)(ONE)
                outcomes.append("acknowledged")
                return
            except StillProcessing:
                time.sleep(0.05)

    threads = [threading.Thread(target=deliver) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["acknowledged"] * 6
    assert balance(postgres) == 10


def test_postgres_a_swallowed_error_is_not_acknowledged(postgres) -> None:
    """COMMIT of a failed transaction is a silent ROLLBACK; the message would be lost."""
    import psycopg

    @idempotent(SqlStore(postgres, group="g"))
    def handle(message: Received, *, connection: Any) -> None:
        pay(message, connection=connection)
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM nowhere")

    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        handle(ONE)
    idempotent(SqlStore(postgres, group="g"))(pay)(ONE)
    assert balance(postgres) == 10


def test_postgres_autocommit_is_refused_and_old_marks_go(postgres) -> None:
    with pytest.raises(UsageError, match="autocommit"):
        SqlStore(lambda: postgres(autocommit=True), group="g").begin("1")
    store = SqlStore(postgres, group="g")
    idempotent(store)(pay)(ONE)
    assert store.forget(timedelta(hours=1)) == 0
    assert store.forget(timedelta(seconds=-1)) == 1


# --- idempotence on Redis


def test_redis_once_and_groups_apart(redis_client) -> None:
    runs: list[str] = []
    for group in ("a", "b"):
        handle = idempotent(RedisStore(redis_client, group=group))(
            lambda message: runs.append(message.message_id)
        )
        handle(ONE)
        handle(ONE)
    assert runs == ["1", "1"]
    assert 0 < redis_client.pttl("cometmq:done:a:1") <= 7 * 86_400_000


def test_redis_concurrent_failed_and_crashed_deliveries(redis_client) -> None:
    store = RedisStore(redis_client, group="g", lease=timedelta(milliseconds=300))

    @idempotent(store)
    def handle(message: Received) -> None:
        with pytest.raises(StillProcessing):
            handle(message)
        raise OSError

    with pytest.raises(OSError):
        handle(ONE)
    assert redis_client.get("cometmq:done:g:1") is None  # free at once
    assert store.begin("1") is not None  # and then that process crashes
    with pytest.raises(StillProcessing):
        store.begin("1")
    time.sleep(0.35)
    attempt = store.begin("1")
    assert attempt is not None
    attempt.done()
    assert store.begin("1") is None


def test_redis_a_late_one_frees_nothing_that_is_anothers(redis_client) -> None:
    store = RedisStore(redis_client, group="g", lease=timedelta(milliseconds=50))
    late = store.begin("1")
    time.sleep(0.1)
    current = RedisStore(redis_client, group="g").begin("1")
    assert late is not None and current is not None
    late.undone()
    with pytest.raises(StillProcessing):
        store.begin("1")
    current.done()
    assert store.begin("1") is None


def test_redis_with_an_async_handler(redis_client) -> None:
    import asyncio

    import redis.asyncio

    runs: list[str] = []

    @idempotent(RedisStore(redis_client, group="g"))
    async def handle(message: Received) -> None:
        runs.append(message.message_id)

    async def twice() -> None:
        await handle(ONE)
        await handle(ONE)
        client = redis.asyncio.Redis()
        with pytest.raises(UsageError, match="asyncio"):
            RedisStore(client, group="g")
        await client.aclose()

    asyncio.run(twice())
    assert runs == ["1"]


def test_a_redis_that_is_away_lets_nothing_be_acknowledged() -> None:
    redis = pytest.importorskip("redis", reason="redis (redis-py) is not installed")
    runs: list[str] = []
    with redis.Redis(port=free_port()) as client:
        handle = idempotent(RedisStore(client, group="g"))(lambda message: runs.append("run"))
        with pytest.raises(redis.exceptions.ConnectionError):
            handle(ONE)
    assert runs == []


if __name__ == "__main__":  # a process of its own for the kill test
    _relay_that_dies(sys.argv[1])
