"""Queue files in memory: none of them holds a descriptor, and the limit follows from that."""

from __future__ import annotations

import io
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_disk import T0, FakeFiles, small

from cometmq.config import BrokerConfig, apply
from cometmq.errors import ConfigError
from cometmq.store import files as files_module
from cometmq.store.files import RealFiles
from cometmq.store.layout import StoreConfig
from cometmq.store.store import Store

QUEUE = "consumequeue/T/0/00000000000000000000"
is_unheld = pytest.mark.skipif(
    files_module._find_unheld() is None, reason="neither Python 3.13 nor the compiled mapping"
)

MANY = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from cometmq.message import NewMessage
from cometmq.store.files import RealFiles
from cometmq.store.layout import StoreConfig
from cometmq.store.results import FetchStatus
from cometmq.store.store import Store
config = StoreConfig(log_file_bytes=1 << 24, index_enabled=False)
store = Store.open(RealFiles(sys.argv[1]), config, 1_700_000_000_000)
queues = [(f"T{topic}", queue) for topic in range(60) for queue in range(100)]
for turn in range(2):
    for topic, queue in queues:
        store.append(NewMessage(topic, queue, b"%d" % turn), 1_700_000_000_000)
    store.dispatch(1_700_000_000_000)
assert len(store._queues.pool) == len(queues), len(store._queues.pool)
for topic, queue in queues:
    assert store.fetch(topic, queue, 0, 32).count == 2
print("mapped", len(store._queues.pool), "open", len(os.listdir("/proc/self/fd")))
sys.stdout.flush()
os._exit(0)  # syncing thousands of files is not what this is about
"""


@is_unheld
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="not Linux")
def test_six_thousand_queues_with_256_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[1] == "6000"
    assert int(words[3]) < 50
    assert "open_files_limited" not in done.stderr


@is_unheld
def test_a_queue_file_holds_no_descriptor_and_a_log_file_does(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)

    def held() -> int:
        return sum(
            os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path))
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        )

    queue = files.map(QUEUE, 4000)
    assert held() == 0
    log = files.map("commitlog/00000000000000000000", 4096)
    assert held() == 2  # ours, and Python's copy
    queue.buffer[:5] = b"units"
    queue.sync()
    assert files.read(QUEUE) == b"units" + bytes(3995)
    assert queue.close()
    assert queue.close()
    assert log.close()
    queue.sync()  # by name: it need not be mapped, and not be there
    files.remove(QUEUE)
    queue.sync()
    assert held() == 0


def test_a_file_is_not_unmapped_while_a_slice_is_out(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    queue = files.map(QUEUE, 4000)
    part = queue.buffer[10:20]
    assert not queue.close()
    queue.buffer[10:13] = b"abc"
    assert bytes(part[:3]) == b"abc"
    part.release()
    assert queue.close()
    again = files.map(QUEUE, 4000)
    assert bytes(again.buffer[10:13]) == b"abc"
    assert again.close()


def test_without_either_way_descriptors_are_held_and_the_limit_is_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_find_unheld", lambda: None)
    files = RealFiles(tmp_path)
    assert files.queue_map_limit == 4096
    assert isinstance(files.map(QUEUE, 4000), files_module.RealMappedFile)


@is_unheld
@pytest.mark.parametrize(
    ("system", "limit"),
    [("65530\n", 48_000), ("1048576\n", 48_000), ("20000\n", 11_808), ("8192\n", 2_048)],
)
def test_the_limit_follows_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, limit: int
) -> None:
    files = RealFiles(tmp_path)
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.StringIO(system))
    assert files.queue_map_limit == limit


def test_the_setting_wins() -> None:
    assert Store.open(FakeFiles(), small(), T0)._queues.pool.limit == 8
    assert Store.open(FakeFiles(), StoreConfig(), T0)._queues.pool.limit == 4096
    with pytest.raises(ConfigError, match="maxOpenQueueFiles"):
        apply(BrokerConfig(), {"maxOpenQueueFiles": "3"}, source="broker.conf")
    with pytest.raises(ConfigError, match="max_open_queue_files"):
        small(max_open_queue_files=3)


def test_the_compiled_mapping_behaves_as_pythons(tmp_path: Path) -> None:
    mapping = pytest.importorskip("cometmq._fast.mapping")
    path = tmp_path / "f"
    path.write_bytes(bytes(8192))
    for make in (mapping.Mapping, lambda fd, size: mmap.mmap(fd, size)):
        fd = os.open(path, os.O_RDWR)
        mapped = make(fd, 8192)
        os.close(fd)
        view = memoryview(mapped)
        assert (view.readonly, view.format, view.itemsize, len(mapped)) == (False, "B", 1, 8192)
        view[:3] = b"xyz"
        part = view[1:3]
        view.release()
        with pytest.raises(BufferError):
            mapped.close()
        mapped.madvise(mmap.MADV_RANDOM)
        assert bytes(part) == b"yz"
        part.release()
        mapped.close()
        mapped.close()
        for use in (memoryview, lambda one: one.madvise(mmap.MADV_RANDOM)):
            with pytest.raises(ValueError, match="closed"):
                use(mapped)
        assert path.read_bytes()[:3] == b"xyz"
    with pytest.raises(OSError, match="descriptor"):
        mapping.Mapping(-1, 4096)
    with pytest.raises(ValueError, match="size"):
        mapping.Mapping(0, 0)


def test_a_file_made_ahead_never_touches_what_a_kill_left(tmp_path: Path) -> None:
    """A kill between linking and unlinking leaves a second name of a log file that is in use."""
    files = RealFiles(tmp_path)
    files.making("commitlog/00000000000000000000", 4096).sync()
    first = tmp_path / "commitlog" / "00000000000000000000"
    first.write_bytes(b"x" * 4096)
    (tmp_path / "next.tmp").hardlink_to(first)
    files.making("commitlog/00000000000000004096", 4096).sync()
    assert first.read_bytes() == b"x" * 4096
    assert not (tmp_path / "next.tmp").exists()
    files.making("commitlog/00000000000000000000", 4096).sync()  # it is there: nothing happens
    assert first.read_bytes() == b"x" * 4096
