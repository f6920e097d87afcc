"""The offsets file of a broadcasting consumer: Java's bytes, and never lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cometmq.client.offset_store import LocalOffsets
from cometmq.errors import StoreCorrupt, StoreError, UsageError
from cometmq.message import MessageQueue

CLIENT = "192.168.1.5@12345#987654321"
FIRST = MessageQueue("t", "b", 0)
SECOND = MessageQueue("t", "b", 1)


@pytest.fixture
def store(tmp_path: Path) -> LocalOffsets:
    return LocalOffsets(CLIENT, "g", tmp_path)


def backup(store: LocalOffsets) -> Path:
    return store.path.with_name("offsets.json.bak")


def test_the_place_and_the_bytes_are_javas(store: LocalOffsets, tmp_path: Path) -> None:
    store.write({FIRST: 5})
    assert store.path == tmp_path / CLIENT / "g" / "offsets.json"
    expected = b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:5}}'
    assert store.path.read_bytes() == expected
    assert store.read() == {FIRST: 5}


def test_the_folder_is_in_the_home_directory_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".rocketmq_offsets" / CLIENT / "g" / "offsets.json"
    assert LocalOffsets(CLIENT, "g").path == expected


@pytest.mark.parametrize(
    "content",
    [
        # as Java writes it, indented
        b'{\n\t"offsetTable":{{\n\t\t"brokerName":"b",\n\t\t"queueId":0,\n\t\t"topic":"t"\n\t}:5'
        b',{\n\t\t"brokerName":"b",\n\t\t"queueId":1,\n\t\t"topic":"t"\n\t}:7\n\t}\n}',
        # with the keys in strings
        rb'{"offsetTable":{"{\"brokerName\":\"b\",\"queueId\":0,\"topic\":\"t\"}":5,'
        rb'"{\"brokerName\":\"b\",\"queueId\":1,\"topic\":\"t\"}":7}}',
    ],
)
def test_what_other_writers_left_can_be_read(store: LocalOffsets, content: bytes) -> None:
    store.path.parent.mkdir(parents=True)
    store.path.write_bytes(content)
    assert store.read() == {FIRST: 5, SECOND: 7}


def test_no_file_is_no_offsets(store: LocalOffsets) -> None:
    assert store.read() == {}


def test_other_queues_stay_and_offsets_may_go_back(store: LocalOffsets) -> None:
    store.write({FIRST: 5, SECOND: 6})
    store.write({FIRST: 2})
    assert store.read() == {FIRST: 2, SECOND: 6}


def test_the_former_version_is_the_backup_and_nothing_lies_about(store: LocalOffsets) -> None:
    store.write({FIRST: 1})
    store.write({FIRST: 2})
    assert b":1}" in backup(store).read_bytes()
    assert sorted(os.listdir(store.path.parent)) == ["offsets.json", "offsets.json.bak"]


def test_nothing_new_writes_nothing(store: LocalOffsets) -> None:
    store.write({FIRST: 1})
    store.write({FIRST: 2})
    before = backup(store).read_bytes()
    store.write({FIRST: 2})
    assert backup(store).read_bytes() == before


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b'{"offsetTable":{{"brokerName":"b","queu',
        b"\x00" * 64,
        b"[]",
        b'{"offsetTable":3}',
        b'{"offsetTable":{{"brokerName":"b","topic":"t"}:5}}',
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:"five"}}',
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:true}}',
    ],
)
def test_a_damaged_file_is_read_from_its_backup_which_survives_the_next_write(
    store: LocalOffsets, damaged: bytes
) -> None:
    store.write({FIRST: 1, SECOND: 8})
    store.write({FIRST: 2})
    store.path.write_bytes(damaged)
    assert store.read() == {FIRST: 1, SECOND: 8}
    store.write({FIRST: 3})
    assert store.read() == {FIRST: 3, SECOND: 8}
    store.path.write_bytes(damaged)
    assert store.read() == {FIRST: 1, SECOND: 8}


def test_no_whole_version_is_an_error_and_nothing_is_written_over(store: LocalOffsets) -> None:
    store.path.parent.mkdir(parents=True)
    store.path.write_bytes(b"{nonsense")
    with pytest.raises(StoreCorrupt, match=r"offsets\.json"):
        store.read()
    with pytest.raises(StoreCorrupt):
        store.write({FIRST: 1})
    assert store.path.read_bytes() == b"{nonsense"


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_crash_at_either_rename_leaves_a_whole_version(
    store: LocalOffsets, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    store.write({FIRST: 1})
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > fails_at:
            raise OSError("out of luck")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(StoreError, match="out of luck"):
        store.write({FIRST: 2})
    monkeypatch.undo()
    assert store.read() == {FIRST: 1}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\0b", "a..b", "x" * 256, "語" * 86]
)
def test_names_that_would_be_paths_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="client id"):
        LocalOffsets(name, "g", tmp_path)
    with pytest.raises(UsageError, match="group"):
        LocalOffsets(CLIENT, name, tmp_path)
