"""One store that is killed, started and checked, again and again.

Owns: starting victims, the checks after each start, and the counts for the summary. One rule: a
start is never followed by load before everything that was promised so far has been looked up, over
the wire and in the files.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import store_check
from kind_points import KIND_POINTS
from load import GROUP, KEPT_LOG_FILES, QUEUES, History, Load, Place
from points import POINTS, Point

from cometmq.client.remote import Remote
from cometmq.config import BROKER_KEYS
from cometmq.message import StoredMessage
from cometmq.wire import record
from cometmq.wire.codes import RequestCode, ResponseCode
from programs import Program, pull_ext, write_conf

LAUNCHER = str(Path(__file__).with_name("points.py"))
PLAIN_KEY = "compiledPathEnable"
MODES = ("SYNC_FLUSH", "ASYNC_FLUSH")
KILLS = int(os.environ.get("COMETMQ_KILLS", "10"))
IS_LONG = KILLS > 10
SOME_MODES = MODES if IS_LONG else MODES[:1]  # where one mode says nearly all about the other
HAS_PLAIN_KEY = any(key.name == PLAIN_KEY for key in BROKER_KEYS)
RANDOM = "random moment"
REACH_TIMEOUT_S = 40.0


def has_compiled_path() -> bool:
    return importlib.util.find_spec("cometmq._fast.hot") is not None if HAS_PLAIN_KEY else False


KEYS_ASKED = 40
SLOTS, ENTRIES = 200, 600

TINY = {
    "mappedFileSizeCommitLog": str(256 * 1024),
    "mappedFileSizeConsumeQueue": str(200 * 20),
    "maxHashSlotNum": str(SLOTS),
    "maxIndexNum": str(ENTRIES),
    "flushIntervalConsumeQueue": "50",
    "flushConsumeQueueThoroughInterval": "300",
    "flushIntervalCommitLog": "100",
    "flushConsumerOffsetInterval": "100",
    "fileReservedTime": "1",
}
"""So small that a second of load rolls through files of every kind, flushes, saves and expires."""


@dataclass
class Tally:
    """What all journeys of this run did; printed at the end."""

    kills: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    acked: int = 0
    checked: int = 0
    seen: int = 0
    starts: int = 0


TALLY = Tally()


class Victim(Program):
    """A `cometmq up` that dies or fails as told."""

    def __init__(self, *arguments: str, point: str = "", nth: int = 1, control: str = "") -> None:
        launcher = (LAUNCHER, point, str(nth), "--") if point else ("-m", "cometmq")
        super().__init__(*arguments, env={"CRASH_CONTROL": control}, launcher=launcher)
        self.point = point

    def error_text(self) -> str:
        if self.process.poll() is None:
            return super().error_text()
        for pump in self._pumps:
            pump.join(5)
        return "".join(self.errors)

    def wait_dead(self, *, or_ready: bool = False) -> bool:
        """Until the point has killed it; AssertionError if it never does, or dies otherwise.

        With `or_ready` getting ready is no error: then the answer is False.
        """
        give_up = time.monotonic() + REACH_TIMEOUT_S
        while self.process.poll() is None:
            if time.monotonic() > give_up:
                raise AssertionError(f"{self.point} was never reached; it said {self.error_text()}")
            if or_ready and not self._lines.empty():
                return False
            time.sleep(0.005)
        code = self.process.returncode
        said = self.error_text()
        assert code in (-signal.SIGKILL, -signal.SIGALRM), (code, said)
        assert f"point reached: {self.point}" in said, (code, said)
        return True

    def check_words(self) -> None:
        """Whatever it says on its way: never a traceback."""
        said = self.error_text()
        assert "Traceback" not in said and "bug in" not in said, said


class Journey:
    """Kills on one store, in one flush mode."""

    def __init__(
        self,
        folder: Path,
        flush: str,
        seed: int,
        conf: dict[str, str] | None = None,
        store: Path | None = None,
    ) -> None:
        self.folder = folder
        self.store = store or folder / "store"
        self.control = folder / "control"
        self.history = History(seed)
        self.random = random.Random(seed + 1)
        self.settings = TINY | {"flushDiskType": flush} | (conf or {})
        self.rounds = 0
        self.diary: list[str] = [f"seed={seed} flush={flush}"]
        self._program: Victim | None = None

    # ------------------------------------------------------------------------------------- programs

    def start(self, point: str = "", nth: int = 1, *, is_late: bool = True) -> Victim:
        """A new process on the store. With `is_late` the point sleeps until `self.arm`."""
        self.close()
        self.control.unlink(missing_ok=True)
        settings = dict(self.settings)
        known = POINTS.get(point) or KIND_POINTS.get(point)
        if known is not None and known.is_plain and HAS_PLAIN_KEY:
            settings[PLAIN_KEY] = "false"
        conf = write_conf(self.folder / "broker.conf", settings)
        self._program = Victim(
            *("up", "--namesrv-port", "0", "--broker-port", "0", "--log-level", "WARNING"),
            *("--store", str(self.store), "--broker-conf", conf),
            point=point,
            nth=nth,
            control=str(self.control) if is_late else "",
        )
        TALLY.starts += 1
        return self._program

    def arm(self) -> None:
        self.control.write_text("")

    def close(self) -> None:
        if self._program is not None:
            program, self._program = self._program, None
            program.close()
            program.check_words()

    def __enter__(self) -> Journey:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._program is not None:
            self._program.close()
        if kind is not None:
            history = self.history
            self._note(
                f"acked={history.acked_count} seen={history.seen_count} "
                f"refusals={history.refusals} faults={history.faults[:5]}"
            )
            print(f"the store is kept in {self.store}; what happened to it:", file=sys.stderr)
            print("\n".join(self.diary), file=sys.stderr)

    # ---------------------------------------------------------------------------------------- kills

    @property
    def is_dirty(self) -> bool:
        """Whether the next start has something to recover."""
        return (self.store / "abort").exists() and len(self.log_files) > 1

    @property
    def log_files(self) -> list[Path]:
        return sorted((self.store / "commitlog").glob("[0-9]*"))

    def kill_at(self, point: Point) -> None:
        """One kill at a chosen point. Begins and ends with a dead or never started process."""
        if point.when == "start":
            if (point.is_dirty_start and not self.is_dirty) or not self._kill_start(point):
                self.kill_sometime(is_loaded=True)
                # How often a start comes by depends on the load before, and that on the machine.
                is_reached = self._kill_start(point) or self._kill_start(point, nth=1)
                assert is_reached, f"{point.name} was never reached"
        else:
            nth = self.random.randint(1, point.nth)
            self._note(f"{point.name} nth={nth}")
            program = self.start_and_check(point.name, nth)
            if point.when == "load":
                self.arm()
            load = self.load(program)
            if point.when == "stop":
                time.sleep(self.random.uniform(0.05, 0.3))
                self.arm()
                program.process.terminate()
            try:
                program.wait_dead()
            finally:
                load.stop()
        self._killed(point.name)

    def _kill_start(self, point: Point, nth: int = 0) -> bool:
        """False if this start did not come by the point: that depends on what there is to do."""
        nth = nth or self.random.randint(1, point.nth)
        self._note(f"{point.name} nth={nth}")
        if self.start(point.name, nth, is_late=False).wait_dead(or_ready=True):
            return True
        self._note("not reached")
        TALLY.missed[point.name] += 1
        self.close()
        return False

    def kill_sometime(self, *, is_loaded: bool = False) -> None:
        """One kill -9 at a random moment: mostly under load, sometimes during the start."""
        delay_s = self.random.uniform(0.02, 0.5)
        if not is_loaded and self.random.random() < 0.2:
            self._note(f"{RANDOM} of the start, after {delay_s:.3f} s")
            program = self.start()
            time.sleep(delay_s)
            program.kill()
        else:
            self._note(f"{RANDOM} under load, after {delay_s * 2:.3f} s")
            program = self.start_and_check()
            load = self.load(program)
            time.sleep(delay_s * 2)
            program.kill()
            load.stop()
        self._killed(RANDOM)

    def load(self, program: Victim, kept_log_files: int | None = KEPT_LOG_FILES) -> Load:
        self.rounds += 1
        return Load(program.broker, self.history, self.store, self.rounds, kept_log_files)

    def _note(self, text: str) -> None:
        self.diary.append(f"{len(self.diary)} {text}")

    def _killed(self, name: str) -> None:
        TALLY.kills[name] += 1
        self.close()

    def end(self) -> None:
        """A last check of everything, a clean stop, and the files as that leaves them."""
        program = self.start_and_check()
        assert program.stop() == 0, program.error_text()
        self._check_files(is_stopped=True)
        self.close()
        TALLY.acked += self.history.acked_count
        TALLY.seen += self.history.seen_count

    # --------------------------------------------------------------------------------------- checks

    def start_and_check(self, point: str = "", nth: int = 1) -> Victim:
        program = self.start(point, nth)
        program.ready()
        self.check(program)
        self._note_committed(program)
        return program

    def check(self, program: Victim) -> None:
        """Everything that was ever promised, on a broker that nobody sends to."""
        found = self._check_files()
        assert self.history.faults == [], self.history.faults[:5]
        with Remote(program.broker, timeout_ms=10_000) as remote:
            numbers: dict[int, tuple[Place, int]] = {}
            for topic in sorted(self.history.topics):
                for queue_id in range(QUEUES):
                    self._check_queue(remote, (topic, queue_id), found, numbers)
            self._check_keys(remote, found)

    def _check_files(self, *, is_stopped: bool = False) -> store_check.Found:
        found = store_check.check(self.store, slots=SLOTS, entries=ENTRIES, is_stopped=is_stopped)
        assert found.faults == [], "\n".join(found.faults)
        assert found.log_begin <= self.history.aged_to, "files are gone that were not to go"
        return found

    def _check_queue(
        self,
        remote: Remote,
        place: Place,
        found: store_check.Found,
        numbers: dict[int, tuple[Place, int]],
    ) -> None:
        history = self.history
        where = {"topic": place[0], "queueId": str(place[1])}
        least = int(remote.call(RequestCode.GET_MIN_OFFSET, where).ext["offset"])
        end = int(remote.call(RequestCode.GET_MAX_OFFSET, where).ext["offset"])
        assert (least, end) == found.queues.get(place, (0, 0)), (place, least, end)
        acked, seen = history.acked.get(place, {}), history.seen.get(place, {})
        messages = _read(remote, place, least, end)
        if messages is None:
            assert not acked, f"topic {place[0]} had acknowledged messages and is not known"
            return
        assert [message.queue_offset for message in messages] == list(range(least, end)), place
        there: dict[int, int] = {}
        log_offsets = {message.queue_offset: message.log_offset for message in messages}
        for message in messages:
            number = history.number_of(message.body)
            assert number is not None, f"{place} {message.queue_offset} was never sent"
            twin = numbers.setdefault(number, (place, message.queue_offset))
            assert twin == (place, message.queue_offset), f"message {number} is there twice"
            there[message.queue_offset] = number
        for offset, promise in list(acked.items()):
            if offset >= least:
                assert there.get(offset) == promise.number, (
                    f"{place} {offset} was acknowledged as {promise.number} at log offset "
                    f"{promise.log_offset}, and is {there.get(offset)}; the queue is {least} to "
                    f"{end}, the log {found.log_begin} to {found.log_end}"
                )
                assert log_offsets[offset] == promise.log_offset, (place, offset, promise)
            else:
                assert promise.log_offset < history.aged_to, f"{place} {offset} was dropped"
                del acked[offset]
        for offset, number in list(seen.items()):
            if offset >= least:
                assert there.get(offset) == number, f"{place} {offset} was seen as {number}"
            else:
                del seen[offset]
        TALLY.checked += len(there)
        self._check_committed(remote, place, end)

    def _check_committed(self, remote: Remote, place: Place, end: int) -> None:
        offset = _committed(remote, place)
        before = self.history.committed.get(place, 0)
        if offset is None:
            assert before == 0, f"{place}: the group was at {before} and is unknown"
            return
        assert offset <= end, f"{place}: the group is at {offset}, the queue ends at {end}"
        assert offset in self.history.tried_commits.get(place, set()), f"{place} {offset}"
        assert offset >= before, f"{place}: the group was at {before} and is at {offset}"

    def _note_committed(self, program: Victim) -> None:
        """What a start read from disk is there for good: no later start may know less."""
        with Remote(program.broker) as remote:
            for place in self.history.tried_commits:
                offset = _committed(remote, place)
                if offset is not None:
                    self.history.committed[place] = offset

    def _check_keys(self, remote: Remote, found: store_check.Found) -> None:
        """Some acknowledged messages, the newest among them, are found by their key."""
        promises = [
            (place[0], promise)
            for place, queue in self.history.acked.items()
            for promise in queue.values()
            if promise.log_offset >= found.log_begin
        ]
        promises.sort(key=lambda one: one[1].log_offset)
        chosen = promises[-10:]
        chosen += self.random.sample(promises, min(KEYS_ASKED, len(promises)))
        for topic, promise in chosen:
            ext = {
                "topic": topic,
                "key": promise.key,
                "maxNum": "32",
                "beginTimestamp": "0",
                "endTimestamp": str(2**62),
            }
            answer = remote.ask(RequestCode.QUERY_MESSAGE, ext)
            bodies = [one.body for one in record.decode_all(answer.body)]
            numbers = [self.history.number_of(body) for body in bodies]
            assert numbers == [promise.number], (topic, promise, answer.code, numbers)


def _committed(remote: Remote, place: Place) -> int | None:
    where = {"topic": place[0], "queueId": str(place[1]), "consumerGroup": GROUP}
    answer = remote.ask(RequestCode.QUERY_CONSUMER_OFFSET, where | {"setZeroIfNotFound": "false"})
    return None if answer.code == ResponseCode.QUERY_NOT_FOUND else int(answer.ext["offset"])


def _read(remote: Remote, place: Place, offset: int, end: int) -> list[StoredMessage] | None:
    """A whole queue; None if its topic is not known."""
    found: list[StoredMessage] = []
    while offset < end:
        answer = remote.ask(
            RequestCode.PULL_MESSAGE, pull_ext(*place, offset, group="checker", max_count=1000)
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        assert answer.code == ResponseCode.SUCCESS, (place, offset, end, answer)
        found += record.decode_all(answer.body)
        following = int(answer.ext["nextBeginOffset"])
        offset = following
    return found


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
    give_up = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < give_up, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
