"""The command line takes options by their whole names only."""

from __future__ import annotations

import pytest

from cometmq.cli.main import main


@pytest.mark.parametrize(
    "words",
    [
        ["broker", "--name", "127.0.0.1:9876"],  # would be taken for --namesrv
        ["namesrv", "--po", "9876"],
        ["up", "--log", "DEBUG"],
    ],
)
def test_no_abbreviations(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {words[1]}" in capsys.readouterr().err
