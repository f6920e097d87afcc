"""RealFiles on a real disk."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from cometmq.errors import StoreCorrupt, StoreLocked, UsageError
from cometmq.store.files import RealFiles


@pytest.fixture
def files(tmp_path: pathlib.Path) -> RealFiles:
    return RealFiles(tmp_path / "store")


def test_mapped_files_are_sparse_and_of_exact_size(files: RealFiles) -> None:
    mapped = files.map("commitlog/00000000000000000000", 1 << 30)
    mapped.buffer[:5] = b"hello"
    mapped.sync()
    found = os.stat(os.path.join(files.root, "commitlog/00000000000000000000"))
    assert found.st_size == 1 << 30
    assert found.st_blocks * 512 <= 64 * 1024
    assert files.files("commitlog") == [("00000000000000000000", 1 << 30)]
    assert mapped.close()


def test_a_file_of_another_size_is_never_resized(files: RealFiles) -> None:
    files.write("a", b"12345")
    with pytest.raises(StoreCorrupt, match="5 bytes, expected exactly 10"):
        files.map("a", 10)
    with pytest.raises(StoreCorrupt):
        files.zero_from("a", 2, 10)
    assert files.read("a") == b"12345"


def test_an_empty_file_gets_its_size(files: RealFiles) -> None:
    """A kill or a power loss came between the file and its size; there is nothing in it to lose."""
    files.write("a", b"")
    mapped = files.map("a", 4096)
    mapped.buffer[4000:4003] = b"abc"
    mapped.sync()
    assert mapped.close()
    assert files.read("a") == bytes(4000) + b"abc" + bytes(93)


def test_close_waits_for_slices(files: RealFiles) -> None:
    mapped = files.map("a", 4096)
    view = mapped.buffer[10:20]
    assert not mapped.close()
    mapped.buffer[10:13] = b"abc"
    assert bytes(view[:3]) == b"abc"
    view.release()
    assert mapped.close()
    assert mapped.close()


def test_zero_from(files: RealFiles) -> None:
    files.write("a", b"x" * 10_000)
    files.zero_from("a", 3, 10_000)
    assert files.read("a") == b"xxx" + bytes(9997)
    files.zero_from("a", 10_000, 10_000, is_durable=False)
    assert files.read("a") == b"xxx" + bytes(9997)


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../b", "a//b", "", "a\0b", ".", "a/."])
def test_names_stay_below_the_root(files: RealFiles, name: str) -> None:
    for act in (files.read, files.remove, files.remove_folder, files.folders, files.target):
        with pytest.raises(UsageError):
            act(name)
    with pytest.raises(UsageError):
        files.map(name, 10)
    with pytest.raises(UsageError):
        files.write(name, b"")


def test_replace_keeps_the_former_version(files: RealFiles) -> None:
    files.replace("config/topics.json", b"1")
    assert files.read("config/topics.json.bak") is None
    files.replace("config/topics.json", b"2")
    files.replace("config/topics.json", b"3")
    assert files.read("config/topics.json") == b"3"
    assert files.read("config/topics.json.bak") == b"2"
    assert [name for name, _ in files.files("config")] == ["topics.json", "topics.json.bak"]


def test_replace_after_a_crash_between_its_two_renames(files: RealFiles) -> None:
    """Then main and backup are one file, and renaming one over the other does nothing."""
    files.replace("a", b"1")
    os.link(os.path.join(files.root, "a"), os.path.join(files.root, "a.bak"))
    files.replace("a", b"2")
    assert files.read("a") == b"2"
    assert files.read("a.bak") == b"1"
    assert [name for name, _ in files.files("x")] == []
    assert not os.path.exists(os.path.join(files.root, "a.bak.tmp"))


def test_main_file_is_never_missing_while_replaced(files: RealFiles) -> None:
    files.replace("a", b"0")
    missing = 0
    is_done = threading.Event()

    def look() -> None:
        nonlocal missing
        while not is_done.is_set():
            missing += files.read("a") is None

    thread = threading.Thread(target=look)
    thread.start()
    for n in range(50):
        files.replace("a", b"%d" % n)
    is_done.set()
    thread.join()
    assert missing == 0


def test_failed_sync_is_never_followed_by_success(
    files: RealFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = files.map("a", 4096)
    mapped.sync()
    real = os.fdatasync

    def fail(fd: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="input/output"):
        mapped.sync()
    monkeypatch.setattr(os, "fdatasync", real)  # the kernel would now say that all is well
    with pytest.raises(OSError, match="nothing since is believed"):
        mapped.sync()
    with pytest.raises(OSError, match="nothing since is believed"):
        files.target("a").sync()
    mapped.close()
    with pytest.raises(OSError, match="nothing since is believed"):
        files.map("a", 4096).sync()


def test_sync_after_close_and_after_removal(files: RealFiles) -> None:
    mapped = files.map("q/a", 4096)
    assert mapped.close()
    mapped.sync()  # the flusher was given it before it was unmapped
    files.remove("q/a")
    mapped.sync()
    files.target("q/a").sync()
    again = files.map("q/b", 4096)
    files.remove_folder("q")
    again.sync()


def test_sync_and_close_may_meet(files: RealFiles) -> None:
    """Unmapping on one thread while another syncs must not close a descriptor in use."""
    for n in range(100):
        mapped = files.map(f"m{n}", 4096)
        mapped.buffer[0] = 1
        errors: list[BaseException] = []

        def sync(target=mapped, errors=errors) -> None:  # type: ignore[no-untyped-def]
            try:
                target.sync()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=sync)
        thread.start()
        mapped.close()
        thread.join()
        assert not errors
    open_fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in _fds()]
    assert not [path for path in open_fds if path.startswith(files.root)]


def _fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_lock_is_seen_in_this_process_and_in_others(files: RealFiles) -> None:
    files.lock()
    with pytest.raises(StoreLocked, match=files.root):
        RealFiles(files.root).lock()
    script = (
        "import fcntl, os, sys\n"
        f"fd = os.open({files.root + '/lock'!r}, os.O_RDWR)\n"
        "try:\n"
        "    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, 0)\n"
        "except OSError:\n"
        "    sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
    assert pathlib.Path(files.root, "lock").stat().st_size == 4
    files.unlock()
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert pathlib.Path(files.root, "lock").read_bytes() == b"lock"
    other = RealFiles(files.root)
    other.lock()
    other.unlock()


def test_reading_the_lock_file_is_refused(files: RealFiles) -> None:
    """Closing any descriptor of it would drop the record lock."""
    with pytest.raises(UsageError):
        files.read("lock")


def test_listing_and_ratio(files: RealFiles) -> None:
    assert files.folders("none") == []
    assert files.files("none") == []
    files.write("c/b/1", b"x")
    files.write("c/a/1", b"x")
    files.write("c/z", b"xyz")
    assert files.folders("c") == ["a", "b"]
    assert files.files("c") == [("z", 3)]
    assert 0.0 < files.used_ratio() <= 1.0
    assert files.modified_ms("c/z") > 1_600_000_000_000
    files.rename("c/z", "c/y")
    assert files.read("c/z") is None
