"""Built-in pipelines by name, and their settings from a command line."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cometmq.cli import pipeline
from cometmq.cli.pipeline import INTERRUPTED
from cometmq.errors import UsageError
from cometmq.pipelines import catalogue
from cometmq.pipelines.running import Outcome

MINE = ("dlq", "trace", "dedupe", "aggregate")


@pytest.fixture(autouse=True)
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = {name: catalogue.HOMES[name] for name in MINE}
    monkeypatch.setattr(catalogue, "HOMES", homes)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    pipeline.add_parser(parser.add_subparsers())
    return pipeline.command(parser.parse_args(["pipeline", *words]))


def test_list_says_what_each_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MINE)
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", MINE)
def test_show_tells_every_setting(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", name) == 0
    told = capsys.readouterr().out
    for setting, kind, default in catalogue.settings_of(catalogue.find(name)):
        end = f"default {default}" if default else "required"
        assert any(line.split() == f"{setting} {kind}, {end}".split() for line in told.splitlines())
    assert "spark" not in [one[0] for one in catalogue.settings_of(catalogue.find(name))]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dlk"], ["no pipeline 'dlk'", "did you mean 'dlq'?"]),
        (["xyz"], ["no pipeline 'xyz'", "dlq, trace, dedupe, aggregate", ".toml"]),
        (["gone.toml"], ["can't read gone.toml"]),
        (["dlq"], ["--set namesrv=...", "--set lake=..."]),
        (["dlq", "--set", "lake"], ["'lake'", "key=value"]),
        (["dlq", "--set", "lakes=x"], ["no setting 'lakes'", "did you mean 'lake'?"]),
        (["dlq", "--set", "most=many"], ["most must be a whole number"]),
        (["dlq", "--set", "redrive=yes"], ["redrive must be true or false"]),
        (["dlq", "--set", "spark=x"], ["no setting 'spark'"]),
        (["dlq", "--before-retention"], ["no setting 'before_retention'"]),
        (["dlq", "--set", "lake="], ["'lake='", "lake is empty"]),
        (["dlq", "--set", "groups= "], ["groups is empty"]),
        (["dlq", "--master", "local[0]"], ["--master 'local[0]'", "local[2]", "spark://host:7077"]),
        (["aggregate", "--set", "format=csv"], ["format must be 'parquet' or 'delta'"]),
    ],
)
def test_misuse_ends_with_2_before_spark_starts(
    words: list[str],
    told: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def session(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("cometmq.spark.local.session", session)
    assert run("run", *words) == 2
    error = capsys.readouterr().err
    for word in told:
        assert word in error


class Session:
    """One whose JVM is gone: whatever is asked of it fails."""

    def stop(self) -> None:
        raise ConnectionRefusedError


def given(monkeypatch: pytest.MonkeyPatch, start: Callable[[], object], work: Any) -> None:
    """`cometmq pipeline run` with a start of Spark and a pipeline of our own."""
    monkeypatch.setattr("cometmq.spark.local.session", lambda *_, **__: start())
    monkeypatch.setattr(catalogue, "find", lambda _: work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_spark_starts_stops_it_before_it_begins(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(spark: object, *, stop: threading.Event) -> Outcome:
        raise AssertionError("it has begun")

    def start() -> Session:
        signal.raise_signal(number)
        return Session()

    given(monkeypatch, start, work)
    assert run("run", "archive") == 0
    told = capsys.readouterr()
    assert told.out == "archive: stopped before it began\n"
    assert told.err == f"{number.name}: stopping after Spark's start\n"

    def impatient() -> Session:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return Session()

    given(monkeypatch, impatient, work)
    assert run("run", "archive") == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_a_signal_that_ends_the_jvm_too_is_a_stop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(spark: object, *, stop: threading.Event) -> Outcome:
        signal.raise_signal(signal.SIGTERM)
        raise ConnectionRefusedError("[Errno 111]")

    def broken(spark: object, *, stop: threading.Event) -> Outcome:
        raise ConnectionRefusedError("[Errno 111]")

    monkeypatch.setattr("cometmq.cli.pipeline._is_java_gone", lambda: True)
    given(monkeypatch, Session, work)
    assert run("run", "archive") == 0
    assert "archive: stopped; Spark was told to end too" in capsys.readouterr().out
    given(monkeypatch, Session, broken)
    assert run("run", "archive") == 1
    monkeypatch.setattr("cometmq.cli.pipeline._is_java_gone", lambda: False)
    given(monkeypatch, Session, work)
    assert run("run", "archive") == 1
    assert "[Errno 111]" in capsys.readouterr().err


def test_settings_have_the_kinds_of_the_signature() -> None:
    found = catalogue.keywords(
        catalogue.find("dlq"),
        ["namesrv=a:1", "lake=x=y", "groups=one, two", "most=7", "redrive=true"],
    )
    assert found == {
        "namesrv": "a:1",
        "lake": "x=y",
        "groups": ["one", "two"],
        "most": 7,
        "redrive": True,
    }


def test_what_can_be_seen_to_be_wrong_is_told_without_spark() -> None:
    nothing: object = None
    dlq = catalogue.find("dlq")
    with pytest.raises(UsageError, match="redrive=true"):
        dlq(nothing, namesrv="a:1", lake="x", where="true")
    with pytest.raises(UsageError, match=r"'10 seconds'.*re-drive with trigger=available-now"):
        dlq(nothing, namesrv="a:1", lake="x", redrive=True, trigger="10 seconds")
    with pytest.raises(UsageError, match="'startingOffsets' of the rocketmq source is 'firs'"):
        catalogue.find("trace")(nothing, namesrv="a:1", lake="x", starting_offsets="firs")
    with pytest.raises(UsageError, match="most 0"):
        dlq(nothing, namesrv="a:1", lake="x", redrive=True, most=0)
    with pytest.raises(UsageError, match="soon"):
        catalogue.find("trace")(nothing, namesrv="a:1", lake="x", trigger="soon")
    with pytest.raises(UsageError, match="to_topic or to lake"):
        catalogue.find("dedupe")(nothing, namesrv="a:1", topic="t", checkpoint="c")
    with pytest.raises(UsageError, match="within 'long'"):
        catalogue.find("dedupe")(
            nothing, namesrv="a:1", topic="t", checkpoint="c", lake="l", within="long"
        )
    with pytest.raises(UsageError, match="the topic that it reads"):
        catalogue.find("dedupe")(nothing, namesrv="a:1", topic="s,t", checkpoint="c", to_topic="t")
