"""spark-submit to a master with a worker of their own, as docs/spark.md says: `cometmq` is nowhere
installed, and travels as a zip."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from conftest import send_numbers

from cometmq.spark.java import ensure_java
from cometmq.testing import LocalBroker
from spark_programs import read_topic

pytestmark = pytest.mark.large  # four JVMs

SOURCE = Path(__file__).parents[2] / "src"
HOME = Path(pyspark.__file__).parent
WAIT_S = 600


class Programs:
    """Spark's own programs, from the jars of PySpark."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        ensure_java()  # JAVA_HOME, for all that starts from here
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment = {**given, "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
        self.environment["SPARK_DAEMON_MEMORY"] = "256m"

    def start(self, name: str, *words: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *words]
            self._running.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def wait_for(self, name: str, pattern: str) -> str:
        give_up = time.monotonic() + WAIT_S
        while True:
            text = (self._folder / f"{name}.log").read_text()
            found = re.search(pattern, text)
            if found is not None:
                return found[1]
            assert time.monotonic() < give_up, text[-3000:]
            time.sleep(0.2)

    def close(self) -> None:
        for one in self._running:
            os.killpg(one.pid, signal.SIGTERM)
        for one in self._running:
            one.wait(60)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    try:
        yield made
    finally:
        made.close()


def python_without_cometmq(folder: Path) -> str:
    """One with all else that is installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (inside,) = folder.glob("lib/python*/site-packages")
    (inside / "others.pth").write_text(f"{HOME.parent}\n")
    python = str(folder / "bin" / "python")
    look = [python, "-c", "import pyspark, cometmq"]
    found = subprocess.run(look, env={}, capture_output=True, text=True, check=False)
    assert "No module named 'cometmq'" in found.stderr
    return python


def test_a_job_with_a_zip_on_a_cluster(tmp_path: Path, programs: Programs) -> None:
    travels = tmp_path / "cometmq.zip"  # a wheel is one, too: without what is compiled
    with zipfile.ZipFile(travels, "w") as made:
        for package in ("cometmq", "pyspark_rocketmq"):
            for path in (SOURCE / package).rglob("*.py"):
                made.write(path, path.relative_to(SOURCE))
    python = python_without_cometmq(tmp_path / "env")
    programs.start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    master = programs.wait_for("master.Master", r"Starting Spark master at (spark://\S+)")
    words = ("--host", "127.0.0.1", "-c", "2", "-m", "2g", "--webui-port", "0")
    programs.start("worker.Worker", *words, "-d", str(tmp_path / "work"), master)
    programs.wait_for("worker.Worker", r"(Successfully registered)")
    with LocalBroker() as broker:
        broker.create_topic("from", queues=4)
        broker.create_topic("to", queues=4)
        send_numbers(broker, "from", 1000, queues=4)
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "600m",
            "spark.executor.cores": "1",
            "spark.ui.enabled": "false",
        }
        conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        job = str(Path(__file__).with_name("submitted_job.py"))
        done = subprocess.run(
            [
                *(str(HOME / "bin" / "spark-submit"), "--master", master, *conf),
                *("--py-files", str(travels), job),
                *(broker.namesrv, "from", "to", str(tmp_path / "checkpoint")),
            ],
            env={
                **programs.environment,
                "PYTHONPATH": str(travels),
                "PYSPARK_PYTHON": python,
                "PYSPARK_DRIVER_PYTHON": python,
            },
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
        told = json.loads(line.removeprefix("TOLD "))
        assert told["master"] == master and told["read"] == 1000
        assert "cometmq.zip/cometmq" in told["driver"]
        assert told["executors"] and all("cometmq.zip/" in one for one in told["executors"])
        found = [int(one.body) for one in read_topic(broker.namesrv, "to")]
        assert sorted(found) == list(range(1000))
