"""Disks that fail, stall and fill up, under the load of the crash tests.

Owns: what a broker may do when its disk no longer does what it should. One rule: refuse by name or
die, but never acknowledge what is not safe and never lose what was acknowledged; whoever only reads
is served all the while.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from journey import MODES, SOME_MODES, Journey, Victim, wait_until
from load import TOPICS

from cometmq.client.remote import Remote
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame
from programs import pull_ext, send

MIB = 1024 * 1024
DISK_BYTES = 40 * MIB
FILLER_BYTES = 31 * MIB
QUICK_S = 0.2
HEARTBEAT = b'{"clientID":"stall-test","producerDataSet":[{"groupName":"p"}],"consumerDataSet":[]}'


# -------------------------------------------------------------------------------- a sync that fails


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ["eio-log", "eio-queue"])
def test_after_a_failed_sync_nothing_is_acknowledged(tmp_path: Path, mode: str, point: str) -> None:
    with Journey(tmp_path, mode, seed=5) as journey:
        program = journey.start(point, nth=2)
        program.ready()
        load = journey.load(program)
        wait_until(lambda: journey.history.acked_count > 200, 60, "some load")
        journey.arm()
        program.wait_for_error("read-only until restart")
        time.sleep(0.1)  # answers on their way
        acked, seen = journey.history.acked_count, journey.history.seen_count
        with Remote(program.broker) as remote:
            for topic in TOPICS:
                answer = send(remote, topic, b"refused")
                assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE, answer
                assert "Input/output error" in (answer.remark or ""), answer
            assert _pull(remote).code == ResponseCode.SUCCESS
        time.sleep(0.3)
        assert journey.history.acked_count == acked
        assert journey.history.refusals.keys() <= {ResponseCode.SERVICE_NOT_AVAILABLE}
        assert journey.history.refusals[ResponseCode.SERVICE_NOT_AVAILABLE] > 20
        load.stop()
        assert journey.history.faults == []
        assert journey.history.seen_count >= seen
        assert program.stop() == 0
        assert (journey.store / "abort").exists(), "a clean stop can't be promised"
        journey.end()


def test_a_start_whose_sync_fails_says_so_and_the_next_one_recovers(tmp_path: Path) -> None:
    with Journey(tmp_path, "SYNC_FLUSH", seed=5) as journey:
        journey.kill_sometime(is_loaded=True)
        program = journey.start("eio-log", is_late=False)
        assert program.process.wait(20) == 1
        assert "Input/output error" in program.error_text()
        journey.end()


# ------------------------------------------------------------------------------- a disk that stalls


@pytest.mark.parametrize("mode", MODES)
def test_a_stalled_disk_holds_up_nobody_who_reads(tmp_path: Path, mode: str) -> None:
    """Sends that must wait for the disk are told after syncFlushTimeout; a kill then loses
    nothing that was acknowledged."""
    with Journey(tmp_path, mode, seed=6, conf={"syncFlushTimeout": "400"}) as journey:
        program = journey.start("stalled-disk")
        program.ready()
        history = journey.history
        load = journey.load(program)
        wait_until(lambda: history.acked_count > 200, 60, "some load")
        journey.arm()
        time.sleep(0.2)  # answers on their way
        acked = history.acked_count
        answers = _answer_times(program, seconds=1.5)
        # Not the very slowest: the machine may be busy with something else.
        assert answers[len(answers) * 95 // 100] < QUICK_S, answers[-5:]
        assert answers[-1] < 1.0
        if mode == "SYNC_FLUSH":
            assert history.acked_count == acked
            assert history.refusals.keys() <= {
                ResponseCode.FLUSH_DISK_TIMEOUT,
                ResponseCode.SYSTEM_BUSY,
            }
            assert history.refusals[ResponseCode.FLUSH_DISK_TIMEOUT] >= 8
        else:
            assert history.acked_count > acked
            assert history.refusals == {}
        journey.control.unlink()
        acked = history.acked_count
        wait_until(lambda: history.acked_count > acked + 100, 60, "sends after the stall")
        journey.arm()
        time.sleep(0.3)
        program.kill()
        load.stop()
        journey.end()


def _answer_times(program: Victim, seconds: float) -> list[float]:
    """How long pulls and heartbeats took, in seconds, sorted."""
    times: list[float] = []
    give_up = time.monotonic() + seconds
    with Remote(program.broker) as remote:
        while time.monotonic() < give_up:
            began = time.monotonic()
            assert _pull(remote).code == ResponseCode.SUCCESS
            middle = time.monotonic()
            remote.call(RequestCode.HEART_BEAT, body=HEARTBEAT)
            times += (middle - began, time.monotonic() - middle)
            time.sleep(0.02)
    return sorted(times)


def _pull(remote: Remote) -> Frame:
    where = {"topic": "orders", "queueId": "0"}
    least = int(remote.call(RequestCode.GET_MIN_OFFSET, where).ext["offset"])
    return remote.ask(RequestCode.PULL_MESSAGE, pull_ext("orders", 0, least))


# ---------------------------------------------------------------------------------------- full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MiB, 31 of them taken by somebody else's `filler`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"can't mount a small disk here: {done.stderr.strip()}")
    try:
        (folder / "filler").write_bytes(bytes(FILLER_BYTES))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


FULL = {"cleanResourceInterval": "100", "cleanFileForciblyEnable": "false"}


@pytest.mark.parametrize("mode", SOME_MODES)
def test_a_full_disk_refuses_by_name_and_goes_on_once_there_is_room(
    tmp_path: Path, disk: Path, mode: str
) -> None:
    with Journey(tmp_path, mode, seed=7, conf=FULL, store=disk / "store") as journey:
        program = journey.start_and_check()
        history = journey.history
        load = journey.load(program, kept_log_files=None)
        unavailable = ResponseCode.SERVICE_NOT_AVAILABLE
        wait_until(lambda: history.refusals.get(unavailable, 0) > 50, 60, "a full disk")
        load.stop()
        assert history.refusals.keys() == {unavailable}
        _assert_refused(program)
        journey.check(program)

        assert program.stop() == 0
        program = journey.start_and_check()
        time.sleep(0.3)
        _assert_refused(program)
        program.kill()
        program = journey.start_and_check()

        (disk / "filler").unlink()
        time.sleep(0.3)
        acked = history.acked_count
        load = journey.load(program, kept_log_files=None)
        wait_until(lambda: history.acked_count > acked + 100, 60, "sends once there is room")
        load.stop()
        journey.end()


def _assert_refused(program: Victim) -> None:
    with Remote(program.broker) as remote:
        answer = send(remote, "orders", b"refused")
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE, answer
        assert "full" in (answer.remark or ""), answer
        assert _pull(remote).code == ResponseCode.SUCCESS


def _log_begin(journey: Journey) -> int:
    """Where the log begins; 0 while there is none, or while its first file goes."""
    return min((int(file.name) for file in journey.log_files), default=0)


def test_the_oldest_messages_make_room_when_that_is_allowed(tmp_path: Path, disk: Path) -> None:
    conf = {"cleanResourceInterval": "100"}
    with Journey(tmp_path, "ASYNC_FLUSH", seed=8, conf=conf, store=disk / "store") as journey:
        program = journey.start_and_check()
        load = journey.load(program, kept_log_files=None)
        journey.history.aged_to = 2**62  # any file may go
        wait_until(lambda: _log_begin(journey) > 1 * MIB, 60, "files that made room")
        acked = journey.history.acked_count
        wait_until(lambda: journey.history.acked_count > acked + 200, 60, "sends meanwhile")
        load.stop()
        journey.check(program)
        program.kill()
        journey.end()


@pytest.mark.parametrize("mode", SOME_MODES)
def test_a_disk_filled_by_others_kills_or_refuses_but_loses_nothing(
    tmp_path: Path, disk: Path, mode: str
) -> None:
    """Known gap: between two looks at the disk (cleanResourceInterval) somebody may fill it. Files
    are made of holes, and the kernel answers a write into a hole without room with SIGBUS: the
    process dies at once. Acknowledged messages are where they were, and are served once there is
    room for a start."""
    with Journey(tmp_path, mode, seed=9, store=disk / "store") as journey:
        program = journey.start_and_check()
        load = journey.load(program, kept_log_files=None)
        wait_until(lambda: journey.history.acked_count > 500, 60, "some load")
        _fill(disk / "more")
        wait_until(
            lambda: (
                program.process.poll() is not None or sum(journey.history.refusals.values()) > 50
            ),
            60,
            "a broker that notices",
        )
        load.stop()
        outcome = program.process.poll()
        assert outcome in (None, -signal.SIGBUS), (outcome, program.error_text())
        program.kill()

        program = journey.start()
        again = _ready_or_dead(program)
        program.kill()
        print(f"{mode}: full while running {outcome}, start on the full disk {again}")

        (disk / "more").unlink()
        journey.end()


def _fill(path: Path) -> None:
    """Take what is left, to the last page."""
    with path.open("wb", buffering=0) as sink:
        for size in (MIB, 4096):
            try:
                while sink.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    assert shutil.disk_usage(path).free < 4096


def _ready_or_dead(program: Victim) -> str:
    """How a start on a full disk ends: ready, a sentence that says why not, or SIGBUS."""
    try:
        program.ready()
        return "ready"
    except AssertionError:
        code = program.process.wait(10)
        assert code in (1, -signal.SIGBUS), (code, program.error_text())
        if code == 1:
            assert "No space left" in program.error_text(), program.error_text()
        return program.error_text().strip().splitlines()[-1] if code == 1 else "SIGBUS"
