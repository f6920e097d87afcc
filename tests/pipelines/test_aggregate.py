"""Windows of event time, from a function and from a spec file that the command line runs; a clean
stop of the real process, and a restart that goes on."""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parents[1]))

from cometmq import Message, Producer
from cometmq.errors import UsageError
from cometmq.pipelines.aggregating import aggregate
from cometmq.pipelines.running import (
    LATE,
    MOST_STARTS,
    TIMELESS,
    Outcome,
    PipelineFailed,
    _count,
    _fresh,
    reason_of,
    run_stream,
)
from cometmq.pipelines.spec import read_spec, run_spec
from cometmq.testing.local import LocalBroker
from programs import Program
from spark_programs import read_topic

from .topics import send_born, table

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipelines" / "orders-by-minute.toml"
SOURCE = str(Path(__file__).parents[2] / "src")
NOON = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp() * 1000)
MINUTE = 60_000


def test_windows_into_a_topic_and_late_rows_counted(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    target = f"{rocketmq_topic[-40:]}-totals"
    rocketmq.create_topic(target)
    settings: dict[str, Any] = {
        "namesrv": rocketmq.namesrv,
        "topic": rocketmq_topic,
        "schema": "at timestamp, country string, amount double",
        "checkpoint": str(tmp_path / "checkpoint"),
        "by": ["country"],
        "sums": ["amount"],
        "event_time": "at",
        "to_topic": target,
    }
    for wrong, told in (
        ({"by": ["kontry"]}, "no field 'kontry'; did you mean 'country'?"),
        ({"sums": ["country"]}, r"sums 'country': its kind is string.*country double"),
        ({"schema": "at timestamp, messages int", "by": ["messages"]}, "by 'messages'"),
        ({"window": "1 minuto"}, "window '1 minuto': write a length"),
        ({"window": "0 minutes"}, "window '0 minutes'"),
        ({"late": "-1 hour"}, "late '-1 hour'"),
        ({"to_topic": rocketmq_topic}, "can't write into the topic that it reads"),
    ):
        with pytest.raises(UsageError, match=told):
            aggregate(spark, **(settings | wrong))

    def send(*rows: tuple[str, str, float]) -> None:
        with Producer("tests", namesrv=rocketmq.namesrv) as producer:
            for at, country, amount in rows:
                body = {"at": f"2026-03-01T{at}Z", "country": country, "amount": amount}
                producer.send(Message(rocketmq_topic, json.dumps(body).encode()))

    send(
        ("12:00:01", "NL", 1.5),
        ("12:00:59", "NL", 2),
        ("12:00:30", "N Z", 4),
        ("12:30:00", "NL", 9),
    )
    first = aggregate(spark, **settings)
    assert (first.rows, first.figures[LATE]) == (4, 0)
    assert first.figures[TIMELESS] == 0
    send(("12:00:07", "NL", 100), ("12:29:00", "NL", 1), ("13:00:00", "NL", 1), ("noon", "NL", 1))
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")  # keys are UTC all the same
    try:
        second = aggregate(spark, **settings)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert (second.figures[LATE], second.figures[TIMELESS]) == (1, 1)
    found = {one.keys[0]: json.loads(one.body) for one in read_topic(rocketmq.namesrv, target)}
    assert {key: (row["messages"], row["sum_amount"]) for key, row in found.items()} == {
        "20260301T120000-NL": (2, 3.5),
        "20260301T120000-N_Z": (1, 4),
        "20260301T122900-NL": (1, 1),
        "20260301T123000-NL": (1, 9),
    }
    assert found["20260301T120000-NL"]["window_end"].startswith("2026-03-01T")
    assert len(read_topic(rocketmq.namesrv, target)) == 4


def order(n: int, country: str, amount: float) -> bytes:
    return json.dumps({"order_id": str(n), "country": country, "amount": amount}).encode()


def test_the_example_runs_stops_cleanly_and_goes_on(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    changes = [
        f"source.namesrv={rocketmq.namesrv}",
        f"source.topic={rocketmq_topic}",
        f"sink.path={tmp_path}/lake",
        f"run.checkpoint={tmp_path}/checkpoint",
    ]
    send_born(
        rocketmq,
        rocketmq_topic,
        {
            order(1, "NL", 1.5): NOON,
            order(2, "NL", 2.0): NOON + 1,
            order(3, "DE", 4.0): NOON + MINUTE,
            b"no JSON": NOON + 1,
            order(4, "NL", 9.0): NOON + 30 * MINUTE,
        },
    )
    words = [word for change in changes for word in ("--set", change)]
    words += ["--set", "run.trigger=500 milliseconds", "--master", "local[1]"]
    words += ["--conf", "spark.sql.shuffle.partitions=1"]
    program = Program("pipeline", "run", str(EXAMPLE), *words, env={"PYTHONPATH": SOURCE})
    try:
        program.wait_for_error("starting Spark", 300)
        assert "5 rows" in program.wait_for_error("orders-by-minute: batch 0", 300)
        give_up = time.monotonic() + 300
        while len(list(tmp_path.glob("lake/country=*/*.parquet"))) < 2:
            assert time.monotonic() < give_up, program.error_text()
            time.sleep(0.1)
        program.process.send_signal(signal.SIGTERM)
        program.wait_for_error("SIGTERM: stopping after the batch under way", 300)
        assert program.process.wait(300) == 0, program.error_text()
        for pump in program._pumps:  # until all that it said is read
            pump.join(60)
        summary = [program._lines.get_nowait() for _ in range(program._lines.qsize())]
    finally:
        program.close()
    assert summary[0] == "orders-by-minute: stopped\n"
    facts = dict(line.strip().rsplit("  ", 1) for line in summary[1:])
    assert {name.strip(): value.strip() for name, value in facts.items()}[LATE] == "0"
    assert not list(tmp_path.glob("lake/_cometmq/*/staging/*")), "nothing half-written"
    assert not list(tmp_path.glob("lake/_cometmq/*/*.moving"))

    # The other half, in this process: it goes on, and tells no minute twice.
    later = NOON + 60 * MINUTE
    send_born(rocketmq, rocketmq_topic, {order(5, "DE", 1.0): NOON, order(6, "DE", 1.0): later})
    told: list[str] = []
    outcome = run_spec(spark, read_spec(EXAMPLE, changes), tell=told.append)
    assert (outcome.rows, outcome.figures[LATE], outcome.is_stopped) == (2, 1, False)
    assert any("2 rows" in line for line in told)
    rows = table(tmp_path / "lake", partitioning="hive")
    found = {(row["minute"].minute, row["country"]): (row["orders"], row["total"]) for row in rows}
    assert found == {(0, "NL"): (2, 3.5), (1, "DE"): (1, 4.0), (30, "NL"): (1, 9.0)}
    assert len(rows) == 3


def test_what_spark_finds_wrong_is_told_in_a_line(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    changes = [
        f"source.namesrv={rocketmq.namesrv}",
        f"source.topic={rocketmq_topic}",
        f"run.checkpoint={tmp_path}/checkpoint",
        f"sink.path={tmp_path}/lake",
    ]
    with pytest.raises(PipelineFailed, match=r"orders-by-minute: .*kontry") as caught:
        run_spec(spark, read_spec(EXAMPLE, [*changes, "transform.sql=SELECT kontry FROM source"]))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="json schema"):
        run_spec(spark, read_spec(EXAMPLE, [*changes, "transform.json=amount dubble"]))
    with pytest.raises(UsageError, match="keys, which the source has too"):
        run_spec(spark, read_spec(EXAMPLE, [*changes, "transform.json=keys string"]))


def test_the_reason_is_found_in_what_spark_wraps_it_in() -> None:
    proxy = (
        "An exception was raised by the Python Proxy. Return Message: Traceback (most recent call "
        'last):\n  File "x.py", line 1, in call\n    raise\nRuntimeError: the disk is full\n\n\tat '
        "py4j.Protocol.getReturnValue(Protocol.java:476)\n"
    )
    assert reason_of(Exception(proxy)) == "RuntimeError: the disk is full"
    ours = proxy.replace("RuntimeError: the", "cometmq.errors.UsageError: the")
    assert reason_of(Exception(ours)) == "the disk is full"
    assert reason_of(Exception("\n[TABLE] not found\nmore")) == "[TABLE] not found"
    assert reason_of(KeyError()) == "KeyError"
    assert reason_of(KeyError("amount")) == "KeyError: 'amount'"
    worker = proxy.replace(
        "RuntimeError: the disk is full",
        "pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the "
        'Python worker:\nTraceback (most recent call last):\n  File "y.py", line 2, in own\n'
        "ValueError: boom",
    )
    assert reason_of(Exception(worker)) == "ValueError: boom"
    java = (
        "An error occurred while calling o445.mkdirs.\n: java.lang.RuntimeException: java.io."
        "IOException: no\n\tat a.B.c(B.java:1)\nCaused by: java.io.IOException: /data: No space\n"
    )
    assert reason_of(Exception(java)) == "IOException: /data: No space"
    within = proxy.replace("RuntimeError: the disk is full", f"py4j.protocol.Py4JJavaError: {java}")
    assert reason_of(Exception(within)) == "IOException: /data: No space"
    waited = Exception("Exception thrown in awaitResult: \n=== Streaming Query ===")
    waited._cause = Exception("[STATE] not there")  # type: ignore[attr-defined]
    assert reason_of(waited) == "[STATE] not there"


class Reports:
    """A query's reports, as Spark hands them out."""

    def __init__(self, *reports: tuple[int, str, int]) -> None:
        self.recentProgress = [
            {
                "batchId": batch,
                "timestamp": f"2026-03-01T12:00:{second}Z",
                "numInputRows": rows,
                "sources": [],
                "observedMetrics": {},
                "stateOperators": [
                    {
                        "numRowsDroppedByWatermark": 1,
                        "customMetrics": {"numDroppedDuplicateRows": 2},
                    }
                ],
            }
            for batch, second, rows in reports
        ]


def test_a_batch_that_was_reported_idle_before_counts() -> None:
    query: Any = Reports((0, "01", 5), (1, "11", 0), (1, "21", 7))
    outcome = Outcome("x")
    assert [_count(outcome, one) for one in _fresh(query, (-1, ""))] == [True, False, True]
    assert (outcome.rows, outcome.batches, outcome.figures[LATE]) == (12, 2, 3)
    assert len(_fresh(query, (1, "2026-03-01T12:00:11Z"))) == 1


class Query:
    """One that ended before its first batch."""

    isActive = False  # noqa: N815 - Spark's
    recentProgress: tuple[Any, ...] = ()  # noqa: N815

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def exception(self) -> Exception | None:
        return self._failure


@pytest.mark.parametrize(("failures", "is_done"), [(2, True), (99, False)])
def test_a_start_that_spark_gave_up_is_made_again(failures: int, is_done: bool) -> None:
    slow = RuntimeError("[STREAM_FAILED] Python worker failed to connect back.")
    ends = [Query(slow) for _ in range(failures)] + [Query(None)]
    writer: Any = SimpleNamespace(start=lambda: ends.pop(0))
    lines: list[str] = []
    if is_done:
        assert run_stream("job", writer, tell=lines.append).rows == 0
        assert len(lines) == failures and "starting again" in lines[0]
    else:
        with pytest.raises(PipelineFailed, match="failed to connect back"):
            run_stream("job", writer, tell=lines.append)
        assert len(lines) == MOST_STARTS - 1


def test_other_failures_are_told_at_once() -> None:
    writer: Any = SimpleNamespace(start=lambda: Query(ValueError("no such column")))
    with pytest.raises(PipelineFailed, match="no such column"):
        run_stream("job", writer)
