"""Small state files that may be missing, empty or damaged."""

from __future__ import annotations

import logging
import pathlib

import pytest
from fake_disk import FakeFiles

from cometmq.store.files import RealFiles
from cometmq.store.state_files import load_state

NAME = "config/consumerOffset.json"


@pytest.mark.parametrize("bad", [b"", b"   ", b'{"offsetTable":{"a', b"\0" * 100, b"[1]", b"\xff"])
def test_issue_1498_corrupt_config_falls_back(
    bad: bytes, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-written file must not cost all offsets: the backup is used, the bad one is kept."""
    files = RealFiles(tmp_path)
    files.replace(NAME, b'{"offsetTable":{"T@g":{0:1}}}')
    files.replace(NAME, b'{"offsetTable":{"T@g":{0:2}}}')
    (tmp_path / NAME).write_bytes(bad)
    with caplog.at_level(logging.ERROR):
        found = load_state(files, NAME)
    assert found is not None
    assert list(found["offsetTable"]["T@g"].values()) == [1]
    assert (tmp_path / (NAME + ".corrupt")).read_bytes() == bad
    assert NAME in caplog.text
    # The next save starts a new main file and does not lose the backup.
    files.replace(NAME, b'{"offsetTable":{}}')
    assert load_state(files, NAME) == {"offsetTable": {}}
    assert files.read(NAME + ".bak") is not None


def test_good_missing_and_both_bad() -> None:
    files = FakeFiles()
    assert load_state(files, NAME) is None
    files.write(NAME + ".bak", b'{"a":1}')
    assert load_state(files, NAME) == {"a": 1}
    files.write(NAME, b'{"a":2}')
    assert load_state(files, NAME) == {"a": 2}
    files.write(NAME, b"{")
    files.write(NAME + ".bak", b"{")
    assert load_state(files, NAME) is None
    assert files.read(NAME + ".corrupt") == b"{"
    assert files.read(NAME + ".bak.corrupt") == b"{"
