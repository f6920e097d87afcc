"""The compiled path under address and bounds checks: hostile bytes never touch memory of others.

Builds src/cometmq/_fast once more with gcc's address and undefined-behaviour sanitizers, in a copy,
and plays the twins' random and hostile traffic on it (`COMETMQ_CHECKED_SEEDS` sets for how long),
and what Spark's source is tested with, damage included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cometmq import _fast

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("COMETMQ_CHECKED_SEEDS", "12"))
CHECKS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g"

PLAY = """
import logging, sys
logging.disable(logging.CRITICAL)
sys.path.insert(0, sys.argv[1])
import test_compiled_path as twins_test
from cometmq._fast import hot
assert hot.__file__.startswith(sys.argv[2]), hot.__file__
for seed in range(10_000, 10_000 + int(sys.argv[3])):
    twins_test.test_random_and_hostile_traffic(seed)
    twins_test.test_random_and_hostile_traffic_with_messages_that_wait(seed)
twins_test.test_split_at_every_byte(1)
taken, seen = (sum(column) for column in zip(*twins_test.TAKEN))
print("compared", taken, "of", seen)
"""


def _library(name: str) -> str | None:
    """The sanitizer's runtime; gcc answers with the bare name where it has none."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if "/" in found else None


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose compiled path is built with checks."""
    if _fast.load()[0] is None:
        pytest.skip(f"no compiled path: {_fast.load()[1]}")
    if shutil.which("gcc") is None or _library("libasan.so") is None:
        pytest.skip("no gcc with its address sanitizer")
    pytest.importorskip("Cython")
    folder = tmp_path_factory.mktemp("checked")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "COMETMQ_FAST_FLAGS": CHECKS, "COMETMQ_FAST_LINK": CHECKS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-3000:]
    return folder


def play(folder: Path, *command: str) -> str:
    """Run Python on the copy; returns what it said."""
    preload = [one for name in ("libasan.so", "libubsan.so") if (one := _library(name))]
    played = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "LD_PRELOAD": " ".join(preload),
            # Python itself never frees some of its memory, and keeps small objects in pools of its
            # own, where the sanitizer could not see past their ends.
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 0, (played.stdout + played.stderr)[-6000:]
    return played.stdout


def test_hostile_traffic_under_address_checks(checked: Path) -> None:
    said = play(checked, "-c", PLAY, str(ROOT / "tests/property"), str(checked), str(SEEDS))
    assert "compared" in said


SPARK = """
import sys, pytest
failed = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]])
walk = sys.modules["cometmq._fast.walk"]
assert walk.__file__.startswith(sys.argv[1]), walk.__file__
sys.exit(failed)
"""


def test_what_spark_reads_under_address_checks(checked: Path) -> None:
    files = [str(ROOT / "tests/unit/spark" / f"test_{name}.py") for name in ("decode", "pulls")]
    assert " passed" in play(checked, "-c", SPARK, str(checked), *files)
