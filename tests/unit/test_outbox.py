"""The outbox on real SQLite files: what is committed is sent, in order, at least once."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from cometmq.errors import ConnectionLost, UsageError
from cometmq.message import Message, MessageQueue, SendResult, SendStatus
from cometmq.outbox import ERROR_TEXT_CHARS, Outbox, Relay, Relayed

STORED = SendResult(SendStatus.SEND_OK, "", "", MessageQueue("t", "b", 0), 0)


class Producer:
    """Keeps what it is given; refuses bodies in `refused`."""

    def __init__(self, *refused: bytes, before: Callable[[Message], None] | None = None) -> None:
        self.sent: list[Message] = []
        self.tried: list[bytes] = []
        self.refused = set(refused)
        self.before = before

    def send(self, message: Message) -> SendResult:
        self.tried.append(message.body)
        if self.before:
            self.before(message)
        if message.body in self.refused:
            raise ConnectionLost(f"no way for {message.body!r}")
        self.sent.append(message)
        return STORED

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.sent]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def connect(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    path = tmp_path / "shop.db"

    def make() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=20)

    with closing(make()) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        Outbox().create_table(connection)
        Outbox().create_table(connection)  # a second time does no harm
        connection.commit()
    return make


def fill(connect: Callable[[], sqlite3.Connection], *bodies: bytes, key: str = "") -> None:
    with closing(connect()) as connection:
        for body in bodies:
            Outbox().add(connection, Message("orders", body, sharding_key=key))
        connection.commit()


def apart(function: str, *arguments: object) -> subprocess.Popen[bytes]:
    """This file's function in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, function, *map(str, arguments)])


def count(connect: Callable[[], sqlite3.Connection], where: str = "1 = 1") -> int:
    with closing(connect()) as connection:
        found: int = connection.execute(
            f"SELECT COUNT(*) FROM cometmq_outbox WHERE {where}"
        ).fetchone()[0]
        return found


def test_a_row_lives_and_dies_with_the_transaction(connect) -> None:
    with closing(connect()) as connection:
        Outbox().add(connection, Message("orders", b"1"))
        assert connection.in_transaction
        assert count(connect) == 0
        connection.rollback()
        assert count(connect) == 0
        Outbox().add(connection.cursor(), Message("orders", b"2"))
        assert connection.in_transaction
        connection.commit()
    assert count(connect) == 1


def test_a_cursors_pending_rows_survive_an_add(connect) -> None:
    with closing(connect()) as connection:
        cursor = connection.execute("VALUES (1), (2)")
        Outbox().add(cursor, Message("orders", b"1"))
        assert cursor.fetchall() == [(1,), (2,)]


def test_every_field_arrives(connect) -> None:
    due = datetime(2031, 5, 6, 7, 8, 9, 123_456, timezone(timedelta(hours=2)))
    message = Message(
        "orders",
        bytes(range(256)),
        tags="paid",
        keys=["a", "b"],
        properties={"x": "ÿ?%s:1", "'": '"'},
        sharding_key="customer-1",
        deliver_at=due,
        flag=7,
        waits_for_storage=False,
        ttl=timedelta(seconds=90, microseconds=1_999),
    )
    with closing(connect()) as connection:
        unique_id = Outbox().add(connection, message)
        given = Outbox().add(connection, Message("t", b"x", delay_level=3, unique_id="MINE"))
        connection.commit()
    assert message.unique_id == ""
    assert len(unique_id) == 32 and unique_id == unique_id.upper() and int(unique_id, 16)
    assert given == "MINE"
    producer = Producer()
    assert Relay(Outbox(), connect, producer).run_once() == Relayed(2, 0, 0, 0)
    assert producer.sent[0] == Message(
        "orders",
        bytes(range(256)),
        tags="paid",
        keys="a b",
        properties={"x": "ÿ?%s:1", "'": '"'},
        sharding_key="customer-1",
        deliver_at=datetime(2031, 5, 6, 5, 8, 9, 124_000, UTC),
        flag=7,
        unique_id=unique_id,
        waits_for_storage=False,
        ttl=timedelta(seconds=90, milliseconds=1),
    )
    assert producer.sent[1] == Message("t", b"x", delay_level=3, unique_id="MINE")


def test_no_field_of_a_message_is_forgotten() -> None:
    """A new one needs a column; until then it would be lost without a word."""
    elsewhere = {"keys": "message_keys", "deliver_at": "deliver_at_ms", "ttl": "ttl_ms"}
    (table, *_) = Outbox().schema("sqlite")
    for field in Message.__struct_fields__:
        assert f" {elsewhere.get(field, field)} " in table, field


def test_a_table_of_an_earlier_version_goes_on_and_gets_the_new_column(tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "old.db")

    outbox, producer = Outbox(), Producer()
    with closing(connect()) as connection:
        for statement in outbox.schema("sqlite"):
            connection.execute(statement.replace("    ttl_ms BIGINT,\n", ""))
        outbox.add(connection, Message("t", b"1"))
        with pytest.raises(UsageError, match=r"create_table once, or ALTER TABLE .* ttl_ms"):
            outbox.add(connection, Message("t", b"2", ttl=timedelta(seconds=9)))
        connection.commit()
        assert Relay(outbox, connect, producer).run_once() == Relayed(1, 0, 0, 0)
        outbox.create_table(connection)
        outbox.add(connection, Message("t", b"2", ttl=timedelta(seconds=9)))
        connection.commit()
    assert Relay(outbox, connect, producer).run_once() == Relayed(1, 0, 0, 0)
    assert [(one.body, one.ttl) for one in producer.sent] == [
        (b"1", None),
        (b"2", timedelta(seconds=9)),
    ]


def test_rows_go_in_order_of_id_and_in_batches(connect) -> None:
    bodies = [b"%d" % n for n in range(7)]
    fill(connect, *bodies)
    producer = Producer()
    relay = Relay(Outbox(), connect, producer, batch_rows=3)
    assert relay.run_once() == Relayed(3, 0, 4, 0)
    assert relay.run_once() == Relayed(3, 0, 1, 0)
    assert relay.run_once() == Relayed(1, 0, 0, 0)
    assert relay.run_once() == Relayed(0, 0, 0, 0)
    assert producer.bodies == bodies


def test_a_failed_row_waits_longer_each_time_then_is_stuck(connect) -> None:
    fill(connect, b"bad", b"good")
    clock, producer = Clock(), Producer(b"bad")

    class Half(random.Random):
        def random(self) -> float:
            return 0.5

    relay = Relay(
        Outbox(),
        connect,
        producer,
        max_tries=4,
        first_delay_s=10,
        max_delay_s=15,
        clock=clock,
        rng=Half(),
    )
    assert relay.run_once() == Relayed(1, 1, 1, 0)
    for delay_s in (7.5, 11.25):  # 10 and 15, shortened by half of a half
        clock.now += delay_s - 0.01
        assert relay.run_once() == Relayed(0, 0, 1, 0)
        clock.now += 0.02
        assert relay.run_once() == Relayed(0, 1, 1, 0)
    assert relay.stuck() == []
    clock.now += 12
    assert relay.run_once() == Relayed(0, 1, 0, 1)
    clock.now += 1e6
    assert relay.run_once() == Relayed(0, 0, 0, 1)
    (stuck,) = relay.stuck()
    assert (stuck.topic, stuck.tries) == ("orders", 4)
    assert stuck.error == "ConnectionLost: no way for b'bad'"
    assert stuck.created_at.tzinfo is UTC
    assert producer.tried.count(b"bad") == 4


def test_retry_and_discard_are_for_stuck_rows_only(connect) -> None:
    fill(connect, b"a", b"b", b"fine")
    producer = Producer(b"a", b"b")
    relay = Relay(Outbox(), connect, producer, max_tries=1)
    relay.run_once()
    fill(connect, b"new")
    first, second = relay.stuck()
    everything = range(-1000, 1000)
    producer.refused.clear()
    assert relay.retry([first.id]) == 1
    assert relay.discard(everything) == 1
    assert relay.retry(everything) == 0
    assert relay.run_once() == Relayed(2, 0, 0, 0)
    assert sorted(producer.bodies) == [b"a", b"fine", b"new"]
    assert producer.sent[-1].unique_id != second.unique_id


def test_the_text_of_an_error_is_bounded_and_storable(connect) -> None:
    def fail(message: Message) -> None:
        raise RuntimeError("\0\udc80" + "x" * 100_000)

    fill(connect, b"a")
    relay = Relay(Outbox(), connect, Producer(before=fail), max_tries=1)
    relay.run_once()
    text = relay.stuck()[0].error
    assert text.startswith(r"RuntimeError: \0\udc80xxx")
    assert len(text) == ERROR_TEXT_CHARS


def test_a_failed_row_holds_back_its_key_and_no_other(connect) -> None:
    clock, producer = Clock(), Producer(b"a1")
    fill(connect, b"a0", b"a1", b"a2", key="a")
    fill(connect, b"b0", key="b")
    fill(connect, b"none")
    fill(connect, b"a3", key="a")
    relay = Relay(Outbox(), connect, producer, max_tries=2, clock=clock)
    assert relay.run_once() == Relayed(3, 1, 3, 0)
    assert producer.bodies == [b"a0", b"b0", b"none"]
    fill(connect, b"b1", key="b")
    assert relay.run_once() == Relayed(1, 0, 3, 0)  # a2, a3 wait for a1, which waits for its time
    clock.now += 1000
    assert relay.run_once() == Relayed(0, 1, 2, 1)
    clock.now += 1000
    assert relay.run_once() == Relayed(0, 0, 2, 1)  # the stuck one holds them too
    producer.refused.clear()
    relay.retry([relay.stuck()[0].id])
    assert relay.run_once() == Relayed(3, 0, 0, 0)
    assert producer.bodies[-3:] == [b"a1", b"a2", b"a3"]


def test_many_held_back_rows_leave_room_for_others_in_a_batch(connect) -> None:
    for key in (b"a", b"b"):
        fill(connect, *[key + b"%d" % n for n in range(9)], key=key.decode())
    producer, now = Producer(b"a0", b"b0"), [1e6]
    relay = Relay(Outbox(), connect, producer, max_tries=2, batch_rows=2, clock=lambda: now[0])
    assert relay.run_once().failed == 1  # a0; a1 was left
    assert relay.run_once().failed == 1  # b0
    fill(connect, b"free")
    assert relay.run_once() == Relayed(1, 0, 18, 0)  # both wait for their next try
    now[0] += 1000
    for _ in range(2):
        relay.run_once()
    fill(connect, b"free too")
    assert relay.run_once() == Relayed(1, 0, 16, 2)  # both are stuck
    assert producer.bodies == [b"free", b"free too"]


def test_discarding_a_stuck_row_frees_its_key(connect) -> None:
    producer = Producer(b"a0")
    fill(connect, b"a0", b"a1", key="a")
    relay = Relay(Outbox(), connect, producer, max_tries=1)
    relay.run_once()
    relay.discard([relay.stuck()[0].id])
    assert relay.run_once() == Relayed(1, 0, 0, 0)
    assert producer.bodies == [b"a1"]


def test_sent_rows_go_after_their_time_at_once_or_never(connect) -> None:
    clock = Clock()
    fill(connect, b"a")
    relay = Relay(Outbox(), connect, Producer(), keep_sent=timedelta(hours=1), clock=clock)
    relay.run_once()
    clock.now += 3599
    relay.run_once()
    assert count(connect, "state = 'sent'") == 1
    Relay(Outbox(), connect, Producer(), keep_sent=None, clock=lambda: 1e9).run_once()
    assert count(connect) == 1
    clock.now += 2
    relay.run_once()
    assert count(connect) == 0
    fill(connect, b"b")
    Relay(Outbox(), connect, Producer(), keep_sent=timedelta(0), clock=clock).run_once()
    assert count(connect) == 0


def test_a_claimed_row_is_nobody_elses_until_the_lease_is_over(connect) -> None:
    clock, other = Clock(), Producer()
    beside = Relay(Outbox(), connect, other, lease_s=60, clock=clock)
    seen: list[Relayed] = []

    def while_sending(message: Message) -> None:
        if message.body == b"a0":
            fill(connect, b"a2", key="a")
            seen.append(beside.run_once())

    fill(connect, b"a0", b"a1", key="a")
    fill(connect, b"free")
    producer = Producer(before=while_sending)
    assert Relay(Outbox(), connect, producer, lease_s=60, clock=clock).run_once().sent == 3
    assert seen == [Relayed(0, 0, 4, 0)]
    assert beside.run_once().sent == 1
    assert other.bodies == [b"a2"]


def test_rows_another_relay_takes_in_the_same_moment_hold_back_their_key(connect) -> None:
    """What PostgreSQL's SKIP LOCKED can come to: the claim didn't see the other's earlier rows."""
    fill(connect, b"a0", b"a1", b"a2", key="a")
    fill(connect, b"free")
    relay = Relay(Outbox(), connect, Producer())
    sql = relay._open()
    try:
        rows = relay._claim(sql, "c", 1_000_000)
        assert [row.body for row in rows] == [b"a0", b"a1", b"a2", b"free"]
        assert relay._behind_others(sql, rows) == set()
        assert relay._behind_others(sql, rows[1:]) == {rows[1].id, rows[2].id}
        assert relay._behind_others(sql, [rows[0], rows[2], rows[3]]) == {rows[2].id}
    finally:
        sql.close()


def test_a_slow_batch_ends_at_half_of_the_lease(connect) -> None:
    clock = Clock()

    def slow(message: Message) -> None:
        clock.now += 20

    fill(connect, b"0", b"1", b"2", b"3")
    producer = Producer(before=slow)
    relay = Relay(Outbox(), connect, producer, lease_s=60, clock=clock)
    assert relay.run_once() == Relayed(2, 0, 2, 0)
    assert count(connect, "claimed_until_ms > 0") == 0  # the rest is free at once
    assert relay.run_once() == Relayed(2, 0, 0, 0)
    assert producer.bodies == [b"0", b"1", b"2", b"3"]


def test_a_send_that_outlived_its_lease_still_counts(connect) -> None:
    clock, beside = Clock(), Producer()

    def very_slow(message: Message) -> None:
        clock.now += 100
        assert Relay(Outbox(), connect, beside, clock=clock).run_once().sent == 1

    fill(connect, b"0")
    producer = Producer(before=very_slow)
    assert Relay(Outbox(), connect, producer, lease_s=60, clock=clock).run_once().waiting == 0
    assert beside.sent == producer.sent  # a duplicate, with the same unique id
    assert count(connect, "state = 'sent'") == 1


def _relay_that_dies(path: str, journal: str) -> None:
    class Deadly:
        def send(self, message: Message) -> SendResult:
            with open(journal, "a") as file:
                file.write(f"{message.unique_id} {message.body.decode()}\n")
            if message.body == b"1":
                os._exit(9)  # sent, not marked
            return STORED

    Relay(Outbox(), lambda: sqlite3.connect(path), Deadly(), lease_s=0.5).run_once()


def test_a_relay_killed_between_send_and_mark_sends_again_with_the_same_id(
    connect, tmp_path: Path
) -> None:
    fill(connect, b"0", b"1", b"2", key="k")
    journal = tmp_path / "journal"
    process = apart("_relay_that_dies", tmp_path / "shop.db", journal)
    assert process.wait(30) == 9
    first = [line.split() for line in journal.read_text().splitlines()]
    assert [body for _, body in first] == ["0", "1"]

    producer = Producer()
    relay = Relay(Outbox(), connect, producer)
    give_up = time.monotonic() + 10
    while relay.run_once().waiting and time.monotonic() < give_up:
        time.sleep(0.05)
    assert producer.bodies == [b"1", b"2"]  # again, and in order
    assert producer.sent[0].unique_id == first[1][0]


def _relay_until_empty(path: str, journal: str) -> None:
    class Journal:
        def send(self, message: Message) -> SendResult:
            with open(journal, "a") as file:
                file.write(f"{message.body.decode()}\n")
            time.sleep(0.001)
            return STORED

    relay = Relay(Outbox(), lambda: sqlite3.connect(path, timeout=20), Journal(), batch_rows=7)
    while relay.run_once().waiting:
        pass


def test_relays_in_several_processes_send_each_row_once_and_keys_in_order(
    connect, tmp_path: Path
) -> None:
    rows = 150
    with closing(connect()) as connection:
        for n in range(rows):
            key = ("", "a", "b", "c")[n % 4]
            Outbox().add(connection, Message("t", b"%s-%d" % (key.encode(), n), sharding_key=key))
        connection.commit()
    journal = tmp_path / "journal"  # O_APPEND: one line a write, in order of sending
    relays = [apart("_relay_until_empty", tmp_path / "shop.db", journal) for _ in range(3)]
    assert [process.wait(60) for process in relays] == [0, 0, 0]
    sent = journal.read_text().split()
    assert len(sent) == rows
    assert len(set(sent)) == rows
    for key in "abc":
        numbers = [int(one.split("-")[1]) for one in sent if one.startswith(key)]
        assert numbers == sorted(numbers)


def test_run_sends_until_stopped_and_survives_the_database(connect) -> None:
    stop, producer = threading.Event(), Producer()
    calls = [0]

    def shaky() -> sqlite3.Connection:
        calls[0] += 1
        if calls[0] == 1:
            raise sqlite3.OperationalError("not today")
        return connect()

    fill(connect, *[b"%d" % n for n in range(5)])
    relay = Relay(Outbox(), shaky, producer, batch_rows=2, poll_interval_s=0.02)
    thread = threading.Thread(target=relay.run, args=(stop,))
    thread.start()
    give_up = time.monotonic() + 10
    while len(producer.sent) < 5 and time.monotonic() < give_up:
        time.sleep(0.01)
    fill(connect, b"later")
    while len(producer.sent) < 6 and time.monotonic() < give_up:
        time.sleep(0.01)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert producer.bodies == [b"0", b"1", b"2", b"3", b"4", b"later"]
    assert calls[0] == 2


def test_stop_is_seen_between_two_sends(connect) -> None:
    stop = threading.Event()
    fill(connect, b"0", b"1", b"2")
    producer = Producer(before=lambda message: stop.set())
    Relay(Outbox(), connect, producer).run(stop)
    assert producer.bodies == [b"0"]
    assert count(connect, "state = 'waiting' AND claimed_until_ms = 0") == 2


def test_an_autocommit_connection_with_odd_rows_serves_a_relay(connect) -> None:
    def odd() -> sqlite3.Connection:
        connection = connect()
        connection.isolation_level = None
        connection.row_factory = lambda cursor, row: {
            column[0]: value for column, value in zip(cursor.description, row, strict=True)
        }
        return connection

    fill(connect, b"a0", b"a1", key="a")
    producer = Producer(b"a1")
    assert Relay(Outbox(), odd, producer, max_tries=1).run_once() == Relayed(1, 1, 0, 1)
    assert Relay(Outbox(), odd, producer).stuck()[0].tries == 1


@pytest.mark.parametrize(
    "name", ["", "1st", "a b", "a;DROP TABLE b", "a.b", 'a"', "tabelle\n", "ä", "x" * 49]
)
def test_a_table_name_that_is_no_identifier_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="outbox table"):
        Outbox(name)


def test_another_table_name_works(connect) -> None:
    outbox, producer = Outbox("_events2"), Producer()
    with closing(connect()) as connection:
        outbox.create_table(connection)
        outbox.add(connection, Message("t", b"x"))
        connection.commit()
    assert Relay(outbox, connect, producer).run_once() == Relayed(1, 0, 0, 0)
    assert count(connect) == 0


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("", b"x"), "topic must be a text"),
        (Message("bad topic", b"x"), "only letters"),
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), "belongs to the system"),
        (Message("t", "text"), "must be bytes, got str"),  # type: ignore[arg-type]
        (Message("t", b""), "must not be empty"),
        (Message("t", b"x" * (4 * 1024 * 1024 + 1)), "at most 4194304"),
        (Message("t", b"x", delay_level=19), "must be 1 to 18"),
        (Message("t", b"x", delay_level=1, deliver_at=datetime.now(UTC)), "not both"),
        (Message("t", b"x", properties={"KEYS": "k"}), "use the field keys"),
        (Message("t", b"x", properties={"a": "x" * 40_000}), "at most 32767"),
        (Message("t", b"x", tags="a||b"), "one tag"),
        (Message("t", b"x", keys=["a b"]), "one word"),
        (Message("t", b"x", flag=2**31), "32 bits"),
        (Message("t", b"x", ttl=timedelta(0)), "at least 1 ms"),
        (Message("t", b"x", unique_id="a\x01b"), "byte 1 or 2"),
    ],
)
def test_a_message_that_can_never_be_sent_is_refused_and_no_row_written(
    connect, message, text
) -> None:
    with closing(connect()) as connection:
        with pytest.raises(UsageError, match=text):
            Outbox().add(connection, message)
        connection.commit()
    assert count(connect) == 0


def test_a_larger_limit_may_be_given(connect) -> None:
    large = Message("t", b"x" * (4 * 1024 * 1024 + 1))
    with closing(connect()) as connection:
        Outbox(max_message_bytes=5_000_000).add(connection, large)
        connection.commit()
    assert count(connect) == 1


def test_what_is_no_connection_is_refused() -> None:
    class Stranger:
        def cursor(self) -> None: ...

    for wrong, text in ((object(), "no connection"), (Stranger(), "no paramstyle")):
        with pytest.raises(UsageError, match=text):
            Outbox().add(wrong, Message("t", b"x"))


def test_async_drivers_and_producers_are_refused_not_ignored(connect) -> None:
    class AsyncCursor:
        async def execute(self, text: str, values: object) -> None: ...

    class AsyncConnection:
        def cursor(self) -> AsyncCursor:
            return AsyncCursor()

    with pytest.raises(UsageError, match="async"):
        Outbox(paramstyle="qmark").add(AsyncConnection(), Message("t", b"x"))

    class AsyncProducer:
        async def send(self, message: Message) -> SendResult:
            return STORED

    with pytest.raises(UsageError, match="blocking producer"):
        Relay(Outbox(), connect, AsyncProducer())

    class Disguised:
        def send(self, message: Message) -> object:
            return AsyncProducer().send(message)

    fill(connect, b"0")
    with pytest.raises(UsageError, match="blocking producer"):
        Relay(Outbox(), connect, Disguised()).run()
    assert count(connect, "state = 'waiting'") == 1


@pytest.mark.parametrize(
    "wrong", [{"batch_rows": 0}, {"batch_rows": 501}, {"max_tries": 0}, {"lease_s": 0}]
)
def test_settings_out_of_range_are_refused(connect, wrong) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Relay(Outbox(), connect, Producer(), **wrong)


@pytest.mark.parametrize(
    ("style", "statement", "bound"),
    [
        ("qmark", "a = ? AND b = ?", (1, 2)),
        ("format", "a = %s AND b = %s", (1, 2)),
        ("numeric", "a = :1 AND b = :2", (1, 2)),
        ("numeric_dollar", "a = $1 AND b = $2", (1, 2)),
        ("named", "a = :p1 AND b = :p2", {"p1": 1, "p2": 2}),
        ("pyformat", "a = %(p1)s AND b = %(p2)s", {"p1": 1, "p2": 2}),
    ],
)
def test_marks_are_written_as_the_driver_asks(style, statement, bound) -> None:
    from cometmq.sql_session import bind

    assert bind("a = ? AND b = ?", (1, 2), style) == (statement, bound)


def test_a_schema_for_each_dialect_and_a_clear_word_for_others() -> None:
    assert len(Outbox().schema("sqlite")) == len(Outbox().schema("postgresql")) == 3
    (mysql,) = Outbox().schema("mysql")
    assert "LONGBLOB" in mysql and "INDEX cometmq_outbox_key" in mysql
    with pytest.raises(UsageError, match="oracle"):
        Outbox().schema("oracle")


if __name__ == "__main__":  # see apart
    globals()[sys.argv[1]](*sys.argv[2:])
