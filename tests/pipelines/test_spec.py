"""Spec files: whatever is wrong is named by its place, before a JVM starts."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from pyspark.sql import SparkSession

from cometmq import Message, Producer
from cometmq.errors import UsageError
from cometmq.pipelines.running import PipelineFailed
from cometmq.pipelines.spec import read_spec, run_spec
from cometmq.testing.local import LocalBroker

from .topics import lake_files

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
        ('format = "parquet"', 'format = "csv"', ["$.sink.format", "csv"]),
        ('path = "lake"', "", ["[sink]", "parquet", "path"]),
        ('format = "parquet"', 'format = "console"', ["[sink]", "console", "no path"]),
        ('path = "lake"', 'path = "lake"\nmode = "update"', ["append", "update"]),
        ('checkpoint = "checkpoint"', "", ["checkpoint"]),
        ('checkpoint = "checkpoint"', 'checkpoint = " "', ["[run]", "checkpoint", "empty"]),
        ("[run]", '[run]\ntrigger = "soon"', ["[run]", "soon", "available-now"]),
        ("[run]", '[run]\ntrigger = "10 s"', ["[run]", "10 s", "10 seconds"]),
        ("[run]", "[run]\ncheckpont = 1", ["[run]", "'checkpont'", "did you mean 'checkpoint'?"]),
        ("[run]", "[runs]", ["'runs'", "did you mean 'run'?"]),
        ('format = "parquet"', 'fromat = "parquet"', ["[sink]", "'fromat'", "'format'"]),
        ("[sink]", '[transform]\nquery = ""\n[sink]', ["[transform]", "'query'", "it has json"]),
        ("[run]", 'partition_by = ["_day"]\n[run]', ["[sink]", "'_day'", "begin with _"]),
        (
            'format = "parquet"',
            'format = "delta"\noptions = {compression = "zstd"}',
            ["[sink.options]", "compression", "delta takes none"],
        ),
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


OWN = """
from pyspark.sql import functions as f

def twice(text):
    return text + text

twice_of = f.udf(twice, "string", useArrow=False)

def good(rows):
    return rows.select(twice_of("keys").alias("keys"))

def bad(rows):
    return rows.select(f.udf(lambda text: {}[text], "string", useArrow=False)("keys").alias("x"))
"""


def test_a_transform_of_a_file_runs_on_workers_and_hides_no_module(
    spark: SparkSession, rocketmq: LocalBroker, rocketmq_topic: str, tmp_path: Path
) -> None:
    """The file lies where workers don't look for modules, under a name that Python has too."""
    (tmp_path / "queue.py").write_text(OWN)
    with Producer("tests", namesrv=rocketmq.namesrv) as producer:
        producer.send(Message(rocketmq_topic, b"x", keys="a"))
    changes = [
        f"source.namesrv={rocketmq.namesrv}",
        f"source.topic={rocketmq_topic}",
        "source.startingOffsets=earliest",
        f"sink.path={tmp_path}/lake",
        "sink.options.compression=gzip",
    ]

    def run(name: str) -> None:
        more = [f"transform.python=queue.py:{name}", f"run.checkpoint={tmp_path}/{name}"]
        run_spec(spark, read_spec(spec(tmp_path, GOOD), [*changes, *more]))

    run("good")
    (file,) = (parquet.ParquetFile(one) for one in lake_files(tmp_path / "lake"))
    assert file.read().to_pylist() == [{"keys": "aa"}]
    assert file.metadata.row_group(0).column(0).compression == "GZIP"
    assert sys.modules["queue"] is queue
    with pytest.raises(PipelineFailed, match=r"^one: KeyError: 'a'$"):
        run("bad")


def test_a_transform_may_need_a_session_to_be_loaded(tmp_path: Path) -> None:
    """As UDFs do whose type is a text; in a process without one."""
    code = (
        "from pyspark.sql.functions import udf\n@udf('string')\ndef f(x): return x\n"
        "def good(rows): return rows\n"
    )
    (tmp_path / "own.py").write_text(code)
    text = GOOD.replace("[sink]", '[transform]\npython = "own.py:good"\n[sink]')
    path = str(spec(tmp_path, text))
    asked = f"from cometmq.pipelines.spec import read_spec; print(read_spec({path!r}).name)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "one"


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
    code = (
        "import sys; from cometmq.pipelines.spec import read_spec; "
        f"read_spec({str(EXAMPLE)!r}); print('pyspark' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
