"""Dead letters: a table with their history, a report, and the way back, which each takes once."""

from __future__ import annotations

import json
import platform
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from cometmq import Admin, Consumer, Later, Message, Producer
from cometmq.errors import UsageError
from cometmq.pipelines import redriving
from cometmq.pipelines.dead_letters import dlq
from cometmq.pipelines.files import Files
from cometmq.pipelines.redriving import Lock, Redrive, Sender
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode, ResponseCode
from spark_programs import read_topic

from .topics import table


def name_of(what: str) -> str:
    return f"{what}-{uuid4().hex[:8]}"


def let_die(broker: LocalBroker, group: str, topic: str, count: int) -> None:
    """A consumer of the topic gives up on everything, until the group has so many letters."""
    with (
        Consumer(group, namesrv=broker.namesrv, start="first") as consumer,
        Admin(broker.namesrv) as admin,
    ):
        consumer.subscribe(topic, lambda _: Later(delay_level=-1))
        consumer.start()
        give_up = time.monotonic() + 300
        while len(admin.dead_letters(group)) < count:
            assert time.monotonic() < give_up
            time.sleep(0.05)


def outcomes(lake: Path) -> dict[int, dict[str, str]]:
    """By run: of each key its status."""
    found: dict[int, dict[str, str]] = {}
    for row in table(lake / "redrive" / "outcomes"):
        found.setdefault(row["run"], {})[row["keys"]] = row["status"]
    return found


def test_letters_are_told_and_go_back_once(
    spark: SparkSession, rocketmq: LocalBroker, tmp_path: Path
) -> None:
    topic, group = name_of("orders"), name_of("billing")
    rocketmq.create_topic(topic)
    with Producer("shop", namesrv=rocketmq.namesrv) as producer:
        for key in ("A1", "A2", "B1"):
            message = Message(topic, b"body " + key.encode(), keys=key, tags="paid")
            message.properties["colour"] = "red"
            message.sharding_key = "s"
            producer.send(message)
    let_die(rocketmq, group, topic, 3)
    told: list[str] = []
    report = tmp_path / "report.html"
    settings: dict[str, Any] = {
        "namesrv": rocketmq.namesrv,
        "lake": str(tmp_path),
        "tell": told.append,
    }

    # The table holds the letters of all groups, found by their prefix, and the report counts them.
    first = dlq(spark, report=str(report), **settings)
    letters = {row["keys"]: row for row in table(tmp_path / "letters") if row["group"] == group}
    assert sorted(letters) == ["A1", "A2", "B1"] and first.rows >= 3
    one = letters["A1"]
    assert (one["origin_topic"], one["body"], one["tags"]) == (topic, b"body A1", "paid")
    assert one["origin_msg_id"] == one["msg_id"] and one["origin_offset_id"]
    assert one["letter_id"].startswith(f"%DLQ%{group}@{rocketmq.broker_name}/0/")
    assert one["reason"] == "its consumer asked for it after 0 retries" and one["redrives"] == 0
    assert one["redriven_from"] is None and one["born_time"] <= one["dead_time"]
    assert any(group in line and topic in line and " 3 " in line for line in told)
    page = report.read_text()
    assert group in page and "A1" in page and page.startswith("<!doctype html>")

    # A selection goes back, as it was; the table says where to.
    settings["groups"] = [group]
    again: dict[str, Any] = {"redrive": True, "where": "keys LIKE 'A%'"}
    with pytest.raises(UsageError, match=r"kyes.*Columns are letter_id"):
        dlq(spark, redrive=True, where="kyes = 'A1'", checkpoint=f"{tmp_path}/c2", **settings)
    second = dlq(spark, checkpoint=f"{tmp_path}/c2", **again, **settings)
    assert second.figures["re-drive: sent"] == 2
    arrived = {
        one.keys[0]: one
        for one in read_topic(rocketmq.namesrv, topic)
        if redriving.RESENT_FROM in one.properties
    }
    assert sorted(arrived) == ["A1", "A2"]
    back = arrived["A1"]
    assert (back.body, back.tags, back.properties["colour"]) == (b"body A1", "paid", "red")
    assert back.message_id == one["msg_id"] and back.reconsume_times == 0
    assert back.properties[redriving.RESENT_FROM] == one["letter_id"]
    rows = {row["keys"]: row for row in table(tmp_path / "redrive" / "outcomes")}
    place = (rows["A1"]["broker"], rows["A1"]["queue_id"], rows["A1"]["queue_offset"])
    assert place == (back.broker, back.queue_id, back.queue_offset)

    # Once more: nothing is sent, and each is told to have been; those that died again are told
    # from the first time.
    let_die(rocketmq, group, topic, 5)
    again["where"] += " AND redrives = 0"
    third = dlq(spark, checkpoint=f"{tmp_path}/c2", **again, **settings)
    assert third.figures["re-drive: sent"] == 0
    assert third.figures["re-drive: already re-driven"] == 2
    assert outcomes(tmp_path)[1] == {"A1": "already re-driven", "A2": "already re-driven"}
    assert len(read_topic(rocketmq.namesrv, topic)) == 5
    dead_again = [row for row in table(tmp_path / "letters") if row["redrives"] == 1]
    assert sorted(row["keys"] for row in dead_again) == ["A1", "A2"]
    by_key = {row["keys"]: row for row in dead_again}
    assert by_key["A1"]["redriven_from"] == one["letter_id"]
    assert by_key["A1"]["origin_topic"] == topic


class Killed(BaseException):
    """The process is gone."""


class Mortal(Sender):
    """Dies at its n-th letter: before it is sent, or when the broker has it."""

    lives, is_late, sent = 0, False, 0

    def send(self, queue: Any, row: Any) -> Any:
        Mortal.lives -= 1
        if Mortal.lives < 0 or (Mortal.lives == 0 and not Mortal.is_late):
            raise Killed
        found = super().send(queue, row)
        if Mortal.lives == 0:
            raise Killed
        return found


def some_letters(spark: SparkSession, topic: str, keys: list[str]) -> Any:
    rows = [
        (f"%DLQ%g@b/0/{n}", "g", topic, f"ID{topic}{n}", key, "tag", key.encode(), {"p": "q"}, 0, n)
        for n, key in enumerate(keys)
    ]
    return spark.createDataFrame(
        rows,
        "letter_id string, group string, origin_topic string, msg_id string, keys string, "
        "tags string, body binary, properties map<string,string>, redrives int, n int",
    ).selectExpr("*", "timestamp_millis(n) AS dead_time")


@pytest.mark.parametrize(("lives", "is_late"), [(3, True), (6, True)])
def test_killed_at_any_letter_each_goes_back_once(
    spark: SparkSession,
    rocketmq: LocalBroker,
    rocketmq_topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lives: int,
    is_late: bool,
) -> None:
    keys = [f"K{n}" for n in range(6)]
    letters = some_letters(spark, rocketmq_topic, [*keys, "X0"])
    monkeypatch.setattr(redriving, "Sender", Mortal)
    Mortal.lives, Mortal.is_late = lives, is_late
    stop = threading.Event()

    def process() -> Redrive:
        return Redrive(spark, str(tmp_path), rocketmq.namesrv, lambda _: None, stop)

    with pytest.raises(Killed):
        process().run(letters, "keys LIKE 'K%'", 100)
    assert not list((tmp_path / "redrive" / "outcomes").glob("*.parquet")), "nothing half-written"
    # Another process, with another selection: what was begun comes first.
    Mortal.lives = 1000
    figures = process().run(letters, "keys = 'X0'", 100)
    assert figures["re-drive: sent"] == 7
    found = sorted(one.body.decode() for one in read_topic(rocketmq.namesrv, rocketmq_topic))
    assert found == [*keys, "X0"]
    told = {row["keys"]: row for row in table(tmp_path / "redrive" / "outcomes")}
    places = {
        (one.queue_id, one.queue_offset): one.body.decode()
        for one in read_topic(rocketmq.namesrv, rocketmq_topic)
    }
    for key, row in told.items():
        assert places[row["queue_id"], row["queue_offset"]] == key


def test_lost_answers_busy_brokers_and_topics_that_are_not(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    good = some_letters(spark, rocketmq_topic, ["A", "B", "C"])
    homeless = some_letters(spark, "gone-topic", ["D"]).selectExpr(
        "concat(letter_id, 'x') AS letter_id", "* EXCEPT (letter_id)"
    )
    stop = threading.Event()
    one = Redrive(spark, str(tmp_path), rocketmq.namesrv, lambda _: None, stop)
    fault = rocketmq.drop(RequestCode.SEND_MESSAGE_V2)  # stored, and never answered
    busy = rocketmq.fail(RequestCode.SEND_MESSAGE_V2, response_code=ResponseCode.SYSTEM_BUSY)
    figures = one.run(good.unionByName(homeless), "true", 100)
    assert fault.hits == 1 and busy.hits == 1
    assert (figures["re-drive: sent"], figures["re-drive: failed"]) == (3, 1)
    found = [one.body for one in read_topic(rocketmq.namesrv, rocketmq_topic)]
    assert sorted(found) == [b"A", b"B", b"C"]
    rows = {row["keys"]: row for row in table(tmp_path / "redrive" / "outcomes")}
    assert rows["D"]["status"] == "failed" and "gone-topic" in rows["D"]["reason"]
    assert all(rows[key]["queue_offset"] is not None for key in "ABC")
    # What failed may be tried again, also when it is selected with what was sent.
    figures = one.run(good.unionByName(homeless), "true", 100)
    assert (figures["re-drive: sent"], figures["re-drive: failed"]) == (3, 2)
    assert figures["re-drive: already re-driven"] == 3


def test_one_re_drive_at_a_time(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, str(tmp_path))
    path = tmp_path / "lock"
    with Lock(files):
        assert json.loads(path.read_text())["pid"]
    assert not path.exists()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    with pytest.raises(UsageError, match=r"process 1 on elsewhere.*delete .*lock"), Lock(files):
        pass
    mine = {"host": platform.node(), "pid": 2**22 + 1}
    path.write_text(json.dumps(mine))
    with Lock(files):
        assert json.loads(path.read_text()) != mine, "its owner is dead"
