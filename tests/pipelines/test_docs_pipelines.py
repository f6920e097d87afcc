"""The pages on pipelines hold: their Python runs, and every command and setting that they name is
one that there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cometmq.pipelines import catalogue, read_spec
from cometmq.testing.local import LocalBroker

ROOT = Path(__file__).parents[2]
PAGES = ("pipelines.md", "pipelines-analysis.md")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def blocks_of(page: str, *kinds: str) -> list[str]:
    return [found[2] for found in FENCE.finditer(text_of(page)) if found[1].strip() in kinds]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_when_pasted(
    page: str,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = blocks_of(page, "python")
    space: dict[str, Any] = {}
    with LocalBroker(store="memory") as broker:  # whose dead letters are none
        monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)
        exec(compile(block, page, "exec"), space)
    assert space["spark"] is spark
    out = capsys.readouterr().out
    if page == "pipelines.md":
        assert space["outcome"].rows == 100 and "archive: done" in out and "count=100" in out
    else:
        assert "dlq: done" in out


def commands(page: str) -> list[list[str]]:
    """The words of every `cometmq pipeline ...` in the page's blocks."""
    found = []
    for block in blocks_of(page, "", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("cometmq pipeline "):
                found.append(shlex.split(line, comments=True)[2:])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_have_settings_that_there_are(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ran = 0
    for what, *words in commands(page):
        if what == "list":
            continue
        name, *rest = words
        if what == "show":
            assert catalogue.find(name)
            continue
        assert what == "run" and rest[::2] == ["--set"] * (len(rest) // 2), words
        ran += 1
        if name.endswith(".toml"):
            assert read_spec(name, rest[1::2])
        else:
            assert catalogue.keywords(catalogue.find(name), rest[1::2])
            catalogue.refuse_secrets(rest[1::2])
    assert ran >= 4


def test_the_settings_that_the_tables_name_are_there() -> None:
    whole = text_of("pipelines.md")
    for name in ("archive", "replay", "mirror"):
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", whole, re.MULTILINE | re.DOTALL)
        assert section is not None
        table = re.search(r"^\| setting \|.*?\n\n", section[1], re.MULTILINE | re.DOTALL)
        assert table is not None
        told = {
            setting
            for line in table[0].strip().splitlines()[2:]
            for setting in re.findall(r"`(\w+)`", line.split("|")[1])
        }
        there = {setting for setting, _, _ in catalogue.settings_of(catalogue.find(name))}
        assert told and told <= there, told - there


@pytest.mark.parametrize("name", [name for name in catalogue.HOMES if name != "compact"])
def test_every_pipeline_that_talks_to_a_cluster_takes_its_keys(name: str) -> None:
    settings = {setting for setting, _, _ in catalogue.settings_of(catalogue.find(name))}
    assert {"namesrv", "access"} <= settings
