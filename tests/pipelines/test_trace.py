"""The trace topic: records read as the client reads them, and what they come to by window."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cometmq import Message, Producer
from cometmq.client import trace_record as records_of
from cometmq.client.trace_record import Pub, Recall, SubAfter, SubBefore
from cometmq.errors import UsageError
from cometmq.pipelines.report import MOST_CELL_CHARS, Plot, Report, Table
from cometmq.pipelines.tracing import records, trace
from cometmq.testing.local import LocalBroker

from .topics import table

NOON = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp() * 1000)


def message(n: int, sent_ms: int, took_ms: int, *, fails: int = 0) -> list[Any]:
    """A message that was sent, maybe failed some times, and was handled so long after."""
    ids: dict[str, Any] = {"message_id": f"ID{n}"}
    found: list[Any] = [
        Pub(
            time_ms=sent_ms,
            region="r",
            group="shop",
            topic="orders",
            cost_ms=2,
            keys=f"k{n}",
            **ids,
        )
    ]
    for attempt in range(fails + 1):
        is_last = attempt == fails
        request: dict[str, Any] = {"request_id": f"R{n}-{attempt}", **ids}
        end_ms = sent_ms + took_ms if is_last else sent_ms + attempt + 1
        found += [
            SubBefore(time_ms=end_ms - 1, region="r", group="g", retry_times=attempt, **request),
            SubAfter(cost_ms=1, is_success=is_last, time_ms=end_ms, group="g", **request),
        ]
    return found


def test_records_are_read_as_the_client_reads_them(spark: SparkSession) -> None:
    old = b"Pub\x015\x01r\x01g\x01t\x01OLD\x01\x01null\x01h\x017\x013\x010\x01true\x02"
    broken = b"Pub\x01five\x01r\x02SubAfter\x01only\x02Unknown\x011\x02\x02"
    body = b"".join(
        records_of.encode(one)
        for one in [
            *message(1, NOON, 5, fails=1),
            Recall(time_ms=1, region="r", group="g", topic="t", message_id="x"),
            SubAfter(request_id="R", message_id="LATE", cost_ms=4),
            Pub(time_ms=9, region="r", group="g", topic="t", message_id="B1,B2", is_success=False),
        ]
    )
    whole = old + broken + body
    rows = spark.createDataFrame(
        [(whole, datetime(2026, 3, 1))], "body binary, store_time timestamp"
    )
    found = records(rows).selectExpr("*", "unix_millis(time) AS ms").collect()
    wanted = [
        (type(one).__name__, name, one)
        for one in records_of.decode(whole)
        if not isinstance(one, Recall)
        for name in records_of.message_ids(one)
    ]
    assert [(row.kind, row.msg_id) for row in found] == [(kind, name) for kind, name, _ in wanted]
    assert {row.msg_id for row in found} == {"OLD", "ID1", "LATE", "B1", "B2"}
    for row, (_, _, one) in zip(found, wanted, strict=True):
        assert (row.ms or 0) == one.time_ms and (row.group or "") == one.group
        assert (row.keys or "") == one.keys
        if not isinstance(one, SubBefore):
            assert (row.is_success, row.cost_ms) == (one.is_success, one.cost_ms)
        if not isinstance(one, Pub):
            assert row.request_id == one.request_id
        else:
            assert row.topic == one.topic


def test_latency_by_window_topic_and_group(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    told = [one for n in range(100) for one in message(n, NOON + n, n + 1)]
    told += message(200, NOON + 60_000, 700, fails=2)
    told.append(
        Pub(
            time_ms=NOON, region="r", group="shop", topic="orders", message_id="F", is_success=False
        )
    )
    # From a client that does not trace its sends: handled, with a latency that nobody knows.
    told += message(300, NOON, 5)[1:]
    with Producer("tracer", namesrv=rocketmq.namesrv) as producer:
        for first in range(0, len(told), 50):
            body = b"".join(records_of.encode(one) for one in told[first : first + 50])
            producer.send(Message(rocketmq_topic, body))
            producer.send(Message(rocketmq_topic, body))  # traces come at least once
    settings: dict[str, Any] = {"namesrv": rocketmq.namesrv, "topic": rocketmq_topic}
    with pytest.raises(UsageError, match="window 'long'"):
        trace(spark, lake=str(tmp_path), window="long", **settings)
    outcome = trace(spark, lake=str(tmp_path), **settings)
    assert outcome.figures["handled"] == 102
    rows = {
        (row["window_start"].replace(tzinfo=UTC).minute, row["topic"]): row
        for row in table(tmp_path / "latency")
    }
    first = rows[0, "orders"]
    assert (first["group"], first["handled"], first["failures"], first["retries"]) == (
        "g",
        100,
        0,
        0,
    )
    assert (first["p50_ms"], first["p95_ms"], first["p99_ms"]) == (50, 95, 99)
    assert first["max_ms"] == 100
    second = rows[1, "orders"]
    assert (second["handled"], second["failures"], second["retries"]) == (1, 2, 2)
    assert second["p99_ms"] == 700
    assert rows[0, None]["handled"] == 1 and rows[0, None]["p50_ms"] is None
    sends = {row["window_start"].minute: row for row in table(tmp_path / "sends")}
    assert (sends[0]["sends"], sends[0]["failures"], sends[0]["p50_ms"]) == (100, 1, 2)
    slow = [row for row in table(tmp_path / "slowest") if row["window_start"].minute == 0]
    assert [row["keys"] for row in slow if row["topic"]] == [f"k{n}" for n in range(99, 89, -1)]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 2 and "polyline" in page and "orders → g" in page
    assert "<script" not in page and "http-equiv" not in page and "src=" not in page
    # Again, with nothing new: the same tables, no record twice.
    again = trace(spark, lake=str(tmp_path), **settings)
    assert again.rows == 0 and again.figures["records"] == outcome.figures["records"]
    assert len(table(tmp_path / "latency")) == len(rows)


def test_reports_show_texts_as_texts_and_have_bounds() -> None:
    rows = [("<b>&", 1234, None, 0.26), ("x" * 1000, 1, True, 1.0)]
    lines = {"p<50": [(NOON + n, float(n)) for n in range(5000)], "empty": []}
    report = Report(
        "Of <things>", "n", [Table("t", ["a", "b", "c", "d"], rows), Plot("p", "ms", lines)]
    )
    page = report.at("x.html").decode()
    assert "<b>&<" not in page and "&lt;b&gt;&amp;" in page and "Of &lt;things&gt;" in page
    assert "p&lt;50" in page and len(page) < 40_000
    text = report.at("x.txt").decode()
    assert "1,234" in text and "-" in text and "<b>&" in text
    assert max(len(line) for line in text.splitlines()) < MOST_CELL_CHARS + 60
    # Long latencies and short windows can be read at the axes.
    plot = Plot("p", "ms", {"p50": [(NOON, 187.5), (NOON + 10_000, 34_000.0)]})
    page = Report("r", "", [plot]).as_html()
    assert ">12,500 ms<" in page and "e+0" not in page
    assert "12:00:00</text>" in page and "12:00:10</text>" in page
    empty = Report("e", "", [Plot("p", "", {}), Table("t", ["a"], [])])
    assert "nothing to plot" in empty.as_html() and "(none)" in empty.as_text()
