"""docs/spark.md holds: its Python runs as it stands, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

from cometmq.spark import sink_columns, sink_options, source_options
from cometmq.spark.schema import COLUMNS
from cometmq.testing.local import LocalBroker

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_page_runs_when_pasted(
    spark: Any,
    rocketmq: LocalBroker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", rocketmq.namesrv)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path / "checkpoint"))
    text = PAGE.read_text()
    blocks = list(FENCE.finditer(text))
    assert len(blocks) == 3
    space: dict[str, Any] = {}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], "docs/spark.md", "exec"), space)
    try:
        assert space["spark"] is spark
        found = {row.country: (row.sales, row.amount) for row in space["by_country"].collect()}
        amounts = {"IT": range(0, 1000, 3), "CH": [n for n in range(1000) if n % 3]}
        assert found == {
            country: (len(numbers), sum(n % 50 for n in numbers))
            for country, numbers in amounts.items()
        }
        assert "200 large sales" in capsys.readouterr().out
        large = space["large"].load()
        body = f.get_json_object(large.body.cast("string"), "$.amount").cast("int")
        counted = large.select(f.min(body), f.max(body), f.countDistinct("keys")).first()
        assert tuple(counted) == (40, 49, 200)
    finally:
        spark.streams.removeListener(space["listener"])


def columns_told(part: str) -> list[str]:
    """The names in the first column of the table below `### Columns`."""
    table = re.search(r"### Columns\n\n(.*?)\n\n", part, re.DOTALL)
    assert table is not None
    firsts = [line.split("|")[1] for line in table[1].splitlines()[2:]]
    return [name for first in firsts for name in re.findall(r"`(\w+)`", first)]


def test_the_tables_of_columns_and_options_are_complete() -> None:
    reading, writing = PAGE.read_text().split("\n## Writing\n", 1)
    assert columns_told(reading) == list(COLUMNS)
    assert sorted(columns_told(writing)) == sorted(sink_columns._TYPES)
    for option in source_options.TABLE:
        assert f"| `{option.name}` |" in reading
    for option in sink_options.TABLE:
        assert f"| `{option.name}` |" in writing
