"""The demo: a server, a shop that sends orders, two workers that bill them, told step by step.

Starts `cometmq up` on free ports with a temporary store and two workers as processes of their own,
kills one of them in the middle, lets Spark count the orders (demo_pipeline.py), and ends with a
table. Leaves nothing behind. Exit code 0 if every order was billed, and counted once.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import demo_pipeline

from cometmq import Admin, Consumer, Message, Outcome, Producer, TransactionProducer
from cometmq.client.received import ReceivedMessage
from cometmq.errors import SendFailed

TOPIC = "orders"
GROUP = "billing"
FIRST, SECOND = 60, 60  # orders before and after one worker dies
WAIT_S = 40.0
OPENS = datetime(2026, 3, 2, 9, tzinfo=UTC)
"""When the shop's day begins, by its own clock; an order comes every two minutes."""


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def step(text: str) -> None:
    print(f"\n{text}", flush=True)


# ------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def server(folder: str) -> Iterator[str]:
    """`cometmq up` as a child process; yields the name server's address."""
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"),
            *("--store", folder, "--log-level", "ERROR"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith("ready "):
            raise SystemExit(f"the server did not start: {line!r}")
        say(f"{line}   ({(time.monotonic() - began) * 1000:.0f} ms)")
        yield dict(part.split("=", 1) for part in line.split()[1:])["namesrv"]
    finally:
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(10)
        say(f"server stopped with exit code {code} in {(time.monotonic() - began) * 1000:.0f} ms")
    if code != 0:
        raise SystemExit(code)


class Worker:
    """A consumer in a process of its own, and the orders that it says it has billed."""

    def __init__(self, name: str, namesrv: str) -> None:
        self.name = name
        self.billed: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, "worker", namesrv], stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.billed.append(line.strip())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(15)


def work(namesrv: str) -> None:
    """What a worker does: the least code that consumes."""

    def bill(message: ReceivedMessage) -> None:
        print(message.keys[0], flush=True)

    with Consumer(GROUP, namesrv=namesrv, start="first") as consumer:
        consumer.subscribe(TOPIC, "paid || refunded", bill)
        consumer.run()


def wait_for(what: str, is_so: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > WAIT_S:
            raise SystemExit(f"waited {WAIT_S:.0f} s in vain until {what}")
        time.sleep(0.02)
    return time.monotonic() - began


# ----------------------------------------------------------------------------------------- the demo


def order(number: int) -> Message:
    tag = ("paid", "refunded", "open")[number % 3]
    body = {
        "order": number,
        "status": tag,
        "amount": 5 + number % 7 * 2.5,
        "at": (OPENS + timedelta(minutes=2 * number)).isoformat(),
    }
    return Message(TOPIC, json.dumps(body).encode(), tags=tag, keys=f"order-{number}")


def closing() -> Message:
    """What tells whoever counts by the hour that the last hour of orders is over."""
    at = OPENS + timedelta(minutes=2 * (FIRST + SECOND))
    return Message(TOPIC, json.dumps({"at": at.isoformat()}).encode(), tags="closed")


def expected(numbers: range) -> set[str]:
    """What the workers must bill: orders that are paid or refunded."""
    return {f"order-{number}" for number in numbers if number % 3 != 2}


def as_far_as_it_goes(what: str, act: Callable[[], object]) -> str:
    """Try a kind of message that a server may not have; what it says if it refuses."""
    try:
        act()
    except SendFailed as refused:
        say(f"{what}: refused by this server ({refused.__cause__ or refused})")
        return "refused by this server"
    except ZeroDivisionError:
        pass
    say(f"{what}: accepted")
    return "accepted"


def main() -> None:
    print("CometMQ demo: a shop, a broker, two workers")
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="cometmq-demo-") as folder, server(folder) as namesrv:
        step("1. A topic with eight queues, two workers of the group 'billing'")
        with Admin(namesrv=namesrv) as admin:
            admin.create_topic(TOPIC, 8)
        workers = [Worker("anna", namesrv), Worker("ben", namesrv)]
        anna, ben = workers
        try:
            run(namesrv, anna, ben, rows)
        finally:
            for worker in workers:
                worker.stop()
        with Admin(namesrv=namesrv) as admin:
            lag = admin.consumer_progress(GROUP).lag
        rows.append(("left behind by the group (open orders)", str(lag)))
        step("6. Spark counts the orders: a table, and a Parquet lake")
        rows += counted(namesrv)
        step("7. The end")
    print()
    width = max(len(left) for left, _ in rows)
    for left, right in rows:
        print(f"  {left:<{width}}  {right}")
    print("\nAll orders were billed.")


def counted(namesrv: str) -> list[tuple[str, str]]:
    with Producer("shop", namesrv=namesrv) as shop:
        shop.send(closing())
    try:
        return demo_pipeline.run(namesrv, TOPIC, FIRST + SECOND, say)
    except demo_pipeline.Unavailable as reason:
        say(f"SKIPPED: {reason}")
        return [("orders that Spark counted", "skipped: Spark can't run here")]


def run(namesrv: str, anna: Worker, ben: Worker, rows: list[tuple[str, str]]) -> None:
    with Producer("shop", namesrv=namesrv) as shop:
        wait_for("both workers share the queues", lambda: shares(namesrv) == [4, 4])
        say("each of them has four queues")

        step(f"2. The shop sends {FIRST} orders; only those paid or refunded concern the workers")
        for number in range(FIRST):
            shop.send(order(number))
        first = expected(range(FIRST))
        wait_for("all are billed", lambda: first <= {*anna.billed, *ben.billed})
        say(f"anna billed {len(anna.billed)}, ben {len(ben.billed)}, nobody the open ones")
        rows.append(("sent before the accident", str(FIRST)))

        step("3. Work and message together: a transaction that commits, one that rolls back")
        rows += transactions(namesrv)
        step("4. A message for later")
        delayed = Message(TOPIC, b"{}", tags="paid", keys="order-later", delay_level=1)
        what = as_far_as_it_goes("delayed by one second", lambda: shop.send(delayed))
        rows.append(("delayed message", what))
        later = {"order-later"} if what == "accepted" else set()

        step(f"5. {SECOND} more orders, and anna dies in the middle (kill -9)")
        for number in range(FIRST, FIRST + SECOND):
            shop.send(order(number))
            if number == FIRST + SECOND // 2:
                anna.kill()
                say("anna is gone; what she had not acknowledged goes to ben")
        everything = expected(range(FIRST + SECOND)) | later
        took = wait_for("ben has it all", lambda: everything <= {*anna.billed, *ben.billed})
        say(f"{took * 1000:.0f} ms after the last order everything is billed")
    times = Counter(anna.billed) + Counter(ben.billed)
    rows += [
        ("sent while a worker died", str(SECOND)),
        ("billed by anna, who died", str(len(anna.billed))),
        ("billed by ben", str(len(ben.billed))),
        ("orders billed", f"{len(everything)} of {len(everything)}"),
        ("billed twice (at least once is the promise)", str(sum(n > 1 for n in times.values()))),
    ]
    with Admin(namesrv=namesrv) as admin:
        (found,) = admin.messages_by_key(TOPIC, "order-7")
        say(f"found by its key: order-7, {found.body.decode()}, message id {found.message_id}")


def transactions(namesrv: str) -> list[tuple[str, str]]:
    with TransactionProducer(
        "shop-tx", check=lambda message: Outcome.COMMIT, namesrv=namesrv
    ) as shop:

        def commit() -> None:
            with shop.transaction(Message(TOPIC, b"{}", tags="open", keys="order-committed")):
                pass  # the database's commit would stand here

        def roll_back() -> None:
            with shop.transaction(Message(TOPIC, b"{}", tags="open", keys="order-undone")):
                raise ZeroDivisionError("the database said no")

        return [
            ("transaction that commits", as_far_as_it_goes("commit", commit)),
            ("transaction that rolls back", as_far_as_it_goes("rollback", roll_back)),
        ]


def shares(namesrv: str) -> list[int]:
    """How many queues each member of the group has."""
    with Admin(namesrv=namesrv) as admin:
        try:
            progress = admin.consumer_progress(GROUP)
        except Exception:
            return []  # nobody has joined yet
    counts = Counter(row.client_id for row in progress.queues if row.queue.topic == TOPIC)
    counts.pop("", None)
    return sorted(counts.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2])
    else:
        main()
