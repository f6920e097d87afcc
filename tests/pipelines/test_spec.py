"""Spec files: whatever is wrong is named by its place, before a JVM starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cometmq.errors import UsageError
from cometmq.pipelines.spec import read_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipelines" / "orders-by-minute.toml"
GOOD = """
name = "one"
[source]
namesrv = "localhost:9876"
topic = "orders"
[sink]
format = "parquet"
path = "lake"
[run]
checkpoint = "checkpoint"
"""


def spec(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "one.toml"
    path.write_text(text)
    return path


def test_the_example_is_a_spec() -> None:
    found = read_spec(EXAMPLE, ["source.namesrv=10.0.0.1:9876", "sink.path=/data/x"])
    assert found.name == "orders-by-minute"
    assert found.source["namesrv"] == "10.0.0.1:9876" and found.sink.path == "/data/x"
    assert found.transform.watermark is not None


def test_changes_are_values_of_their_kind(tmp_path: Path) -> None:
    changes = [
        "source.maxOffsetsPerTrigger=500",
        "source.failOnDataLoss=false",
        "run.trigger=10 seconds",
        "transform.watermark.column=born_time",
        "transform.watermark.delay='5 minutes'",
        'sink.partition_by=["topic", "tags"]',
    ]
    found = read_spec(spec(tmp_path, GOOD), changes)
    assert found.source["maxOffsetsPerTrigger"] == 500 and found.source["failOnDataLoss"] is False
    assert found.run.trigger == "10 seconds"
    assert found.transform.watermark is not None and found.transform.watermark.delay == "5 minutes"
    assert found.sink.partition_by == ["topic", "tags"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "one"', "name = 7", ["$.name", "str"]),
        ("[run]", "[runs]", ["run"]),
        ('format = "parquet"', 'format = "csv"', ["$.sink.format", "csv"]),
        ('path = "lake"', "", ["[sink]", "parquet", "path"]),
        ('format = "parquet"', 'format = "console"', ["[sink]", "console", "no path"]),
        ('path = "lake"', 'path = "lake"\nmode = "update"', ["append", "update"]),
        ('checkpoint = "checkpoint"', "", ["checkpoint"]),
        ('checkpoint = "checkpoint"', 'checkpoint = " "', ["[run]", "checkpoint", "empty"]),
        ("[run]", '[run]\ntrigger = "soon"', ["[run]", "soon", "available-now"]),
        ("[run]", '[run]\ntrigger = "10 s"', ["[run]", "10 s", "10 seconds"]),
        ("[run]", "[run]\ncheckpont = 1", ["$.run", "checkpont"]),
        ('topic = "orders"', "", ["[source]", "topic", "topicPattern"]),
        (
            'topic = "orders"',
            'topic = "orders"\nstartingOffset = "x"',
            ["[source]", "did you mean"],
        ),
        ('topic = "orders"', 'topic = "orders"\npullBatchSize = 0', ["[source]", "pullBatchSize"]),
        ("[sink]", '[transform]\nsql = "x"\npython = "a:b"\n[sink]', ["[transform]", "give one"]),
        ("[sink]", '[transform]\npython = "nothing"\n[sink]', ["[transform]", "file.py:function"]),
        ("[sink]", '[transform]\npython = "gone.py:f"\n[sink]', ["[transform]", "gone.py"]),
        ("[sink]", '[transform]\npython = "json:nothing"\n[sink]', ["[transform]", "'nothing'"]),
        (
            "[sink]",
            '[transform]\nwatermark = {column = "born_time", delay = "long"}\n[sink]',
            ["[transform] watermark", "'long'", "10 minutes"],
        ),
        ("[sink]", "[sink", ["TOML", "line"]),
    ],
)
def test_what_is_wrong_is_named_by_its_place(
    tmp_path: Path, old: str, new: str, told: list[str]
) -> None:
    assert old in GOOD
    path = spec(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        read_spec(path)
    for word in (str(path), *told):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def f(rows:", "SyntaxError"),
        ("import no_such_thing", "no_such_thing"),
        ("1 / 0", "ZeroDiv"),
    ],
)
def test_a_transform_that_can_not_be_loaded_is_told(tmp_path: Path, code: str, told: str) -> None:
    (tmp_path / "own.py").write_text(code)
    text = GOOD.replace("[sink]", '[transform]\npython = "own.py:f"\n[sink]')
    with pytest.raises(UsageError, match=rf"own\.py:f.*{told}"):
        read_spec(spec(tmp_path, text))


def test_options_of_a_topic_as_sink_are_checked(tmp_path: Path) -> None:
    text = GOOD.replace('format = "parquet"\npath = "lake"', 'format = "rocketmq"')
    with pytest.raises(UsageError, match=r"\[sink.options\].*namesrv"):
        read_spec(spec(tmp_path, text))
    with pytest.raises(UsageError, match=r"\[sink.options\].*maxInFlight"):
        changes = ["sink.options.namesrv=localhost:1", "sink.options.maxInFlights=3"]
        read_spec(spec(tmp_path, text), changes)


@pytest.mark.parametrize("change", ["sink.path", "=1", "name.inner=1"])
def test_changes_that_are_none(tmp_path: Path, change: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        read_spec(spec(tmp_path, GOOD), [change])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read .*one.toml: No such file"):
        read_spec(tmp_path / "one.toml")


def test_no_jvm_is_needed_to_find_faults() -> None:
    """`cometmq pipeline` reads files, settings and help within a moment, without Spark."""
    import subprocess

    code = (
        "import sys; from cometmq.pipelines.spec import read_spec; "
        f"read_spec({str(EXAMPLE)!r}); print('pyspark' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
