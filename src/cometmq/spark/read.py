"""What an executor does: a partition's ranges of queues to RecordBatches.

Owns: which pulls are made, in what order their answers count, and what is done when they fail. One
rule: the rows of a partition are exactly those of its ranges that pass the filter, each once and in
order; what is missing is an error, or a warning if the user said so.

A range is cut into windows, one pull each, asked for a round at a time:

    range   |--window--|--window--|--window--| ... |------- probe -------|
    pull     offset ->    offset ->   ...            asks for more than the others

All windows of a round but its last are equal, and a stretch of them is asked for and answered as a
whole (client.py). A broker may give less than a window (it has limits of its own): then each window
is looked at by itself, the rest is asked for again, and windows become smaller. The last of a round
asks for more, and if it gets more, they become larger. With a filter nobody knows how far a pull
gets; windows are long then, and each is asked for until it is done. The next round is on its way
while this one is decoded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from cometmq.client.reading import Filter, make_filter
from cometmq.errors import (
    CometError,
    ConnectionLost,
    DataLost,
    HeaderError,
    NoRoute,
    RequestRefused,
    RequestTimeout,
)
from cometmq.message import MessageQueue
from cometmq.spark.client import Answer, Link, PullRequest, Stretch, links
from cometmq.spark.cluster import Cluster
from cometmq.spark.decode import Records, properties_for, wanted_rows
from cometmq.spark.gather import Data, Ints, Piece, joined, numbers, repeated
from cometmq.spark.plan import Range, text_of
from cometmq.spark.source_options import SourceOptions
from cometmq.spark.worker import get_ready
from cometmq.wire.codes import ResponseCode
from cometmq.wire.frame import Frame

log = logging.getLogger("cometmq.spark")

BATCH_ROWS = 8192  # a RecordBatch: 1 k and 32 k were slower
BATCH_BYTES = 3 * 1024 * 1024  # of records; much larger ones leave the processor's caches
ROUND_BYTES = 1900 * 1024
"""Our broker gives a connection 2 MiB of answers in one go, by its compiled path; what was asked
for beyond that waits for turns of the plain one, and costs it three times as much."""
FILTER_WINDOW = 4096  # offsets; a broker looks at 800 or so for one pull
FILTER_PULLS = 8
PATIENCE_S = 60.0  # for a broker that is away or busy; then the task fails and Spark tries again
STUCK_S = 5.0  # for one that says there is nothing where there was something
WAIT_S, MOST_WAIT_S = 0.05, 2.0
_BUSY = (
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.FLOW_CONTROL,
    ResponseCode.BROKER_DISPATCH_NOT_COMPLETE,
    ResponseCode.GO_AWAY,
)


class Window:
    """Some offsets that are asked for together; `cursor` is how far they have been answered."""

    __slots__ = ("bodies", "cursor", "end", "is_probe", "rows")

    def __init__(self, cursor: int, end: int, is_probe: bool = False) -> None:
        self.cursor = cursor
        self.end = end
        self.is_probe = is_probe
        self.bodies: list[Piece] = []
        self.rows = 0
        """So many at least; with a filter nobody has counted."""


class Round:
    """What is asked for at once: stretches, and behind them single windows."""

    __slots__ = ("stretches", "windows")

    def __init__(self, stretches: list[Stretch], windows: list[Window]) -> None:
        self.stretches = stretches
        self.windows = windows

    @property
    def end(self) -> int:
        return self.windows[-1].end if self.windows else self.stretches[-1].end

    def is_empty(self) -> bool:
        return not self.stretches and not self.windows

    def waits(self) -> bool:
        """Whether a stretch lacks answers."""
        return bool(self.stretches) and self.stretches[-1].left > 0

    def divide(self) -> dict[int, Window]:
        """The stretch that lacks answers, window by window; those that lack theirs, by the ids of
        their requests."""
        stretch = self.stretches.pop()
        windows, open_ones = [], {}
        for number in range(stretch.count):
            window = Window(stretch.begin + number * stretch.step, int(stretch.ends[number]))
            begin, end = stretch.places[2 * number : 2 * number + 2].tolist()
            if begin >= 0:
                assert stretch.data is not None
                window.bodies.append((stretch.data, begin, end))
                window.rows, window.cursor = stretch.step, window.end
            else:
                open_ones[stretch.first + number] = window
            windows.append(window)
        self.windows[:0] = windows
        return open_ones


class RangeReader:
    """The records of one range, as a broker sends them."""

    def __init__(self, one: Range, options: SourceOptions, wanted: Filter) -> None:
        self._range = one
        self._queue: MessageQueue = one.queue
        self._options = options
        self._is_filtered = wanted != Filter()
        self._request = PullRequest(options.group, one.queue, wanted, options.access.credentials())
        self._address = one.address
        self._link: Link | None = None
        self._step = options.pull_count
        self._is_learnt = False
        self._pull_bytes = 0
        self._round = Round([], [])
        """That which is under way."""
        self._asked: dict[int, Window] = {}
        self._trouble: CometError | None = None
        self._trouble_since: float | None = None
        self._wait_s = WAIT_S

    def rounds(self) -> Iterator[Round]:
        """All of them, answered, in the order of their offsets. What a body has behind the end of
        its window is the next window's."""
        try:
            at = self._begin(self._range.begin)
            while not self._round.is_empty():
                self._settle()
                done = self._round
                at = self._begin(max(at, done.end))
                yield done
        finally:
            self._let_go()

    def _begin(self, at: int) -> int:
        """Plan the next round from this offset on and ask for it; returns where it ends."""
        self._round, at = self._plan(at)
        self._ask(self._round.stretches, self._round.windows)
        return at

    def _let_go(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            links.give_back(link)

    # -------------------------------------------------------------------------------------- rounds

    def _plan(self, at: int) -> tuple[Round, int]:
        """The next round from this offset on, and where it ends."""
        end = self._range.end
        windows: list[Window] = []
        if self._is_filtered:
            while at < end and len(windows) < FILTER_PULLS:
                windows.append(Window(at, min(end, at + FILTER_WINDOW)))
                at = windows[-1].end
            return Round([], windows), at
        count = 0
        if self._is_learnt:
            count = min(self._request.most_at_once, ROUND_BYTES // max(1, self._pull_bytes))
            count = max(1, count)
        step = self._step
        full = min(count, (end - at) // step)
        stretches = [Stretch(at, step, full)] if full else []
        at += full * step
        if at < end and full < count:  # the last of them
            windows.append(Window(at, end))
            at = end
        if at < end:
            windows.append(Window(at, min(end, at + self._options.pull_count), is_probe=True))
            # It may get less than it asked for: the next round is planned when that is known.
        return Round(stretches, windows), at

    def _ask(self, stretches: Sequence[Stretch], windows: Sequence[Window]) -> None:
        """Send the pulls for these, in their order; they are asked again if that fails."""
        if not stretches and not windows:
            return
        try:
            if self._link is None:
                access, timeout_ms = self._options.access, self._options.timeout_ms
                self._link = links.take(self._where(), access, timeout_ms)
            link = self._link
            most, is_filtered = self._options.pull_count, self._is_filtered
            pulls = []
            count = len(windows)
            for stretch in stretches:
                stretch.first = link.next_opaques(stretch.count)
                count += stretch.count
            for window in windows:
                opaque, rows = link.next_opaques(), window.end - window.cursor
                pulls.append((window.cursor, most if is_filtered else min(rows, most), opaque))
                self._asked[opaque] = window
            link.send(self._request.encode(stretches, pulls), count)
        except (ConnectionLost, RequestTimeout) as error:
            self._failed(error)

    def _settle(self) -> None:
        """Until all of the round is done; asks again for what an answer left open."""
        current = self._round
        while True:
            while self._asked or current.waits():
                try:
                    assert self._link is not None
                    answers = self._link.receive(current.stretches)
                except (ConnectionLost, RequestTimeout) as error:
                    self._failed(error)
                    break
                self._sort(answers)
            open_ones = [window for window in current.windows if window.cursor < window.end]
            if not open_ones:
                break
            if self._trouble is not None:
                self._endure(open_ones)
            self._ask([], open_ones)
        for stretch in current.stretches:
            largest = int((stretch.places[1::2] - stretch.places[0::2]).max())
            self._pull_bytes = max(largest, self._pull_bytes * 7 // 8)
            self._trouble_since = None

    # ------------------------------------------------------------------------------------- answers

    def _sort(self, answers: Sequence[Answer]) -> None:
        """Answers to the windows that they are for."""
        for opaque, following, low, high, body, frame in answers:
            if opaque not in self._asked and self._round.waits():
                # One of the stretch, and not as planned.
                self._asked |= self._round.divide()
            window = self._asked.pop(opaque, None)
            if window is None:
                continue
            if frame is None and following > window.cursor:
                self._trouble_since = None
                self._take(window, body, following)
            elif frame is None:
                self._lacking(window, ResponseCode.SUCCESS, None, following, low, high)
            else:
                self._answered(window, frame)

    def _answered(self, window: Window, frame: Frame) -> None:
        code = frame.code
        if code not in (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ):
            self._refused(frame)
            return
        try:
            following = int(frame.ext["nextBeginOffset"])
            low, high = int(frame.ext["minOffset"]), int(frame.ext["maxOffset"])
        except (KeyError, ValueError):
            raise HeaderError(
                f"{self._address} answered a pull of {text_of(self._queue)} without offsets: "
                f"{frame.ext}"
            ) from None
        self._lacking(window, code, frame.remark, following, low, high)

    def _lacking(
        self, window: Window, code: int, remark: str | None, following: int, low: int, high: int
    ) -> None:
        """An answer that brings nothing."""
        if window.cursor < low:
            self._lose(window, low, f"the queue begins at {low} now (retention)")
        elif window.cursor >= high:
            # Deleted and made anew, or reset. Or a follower that took over is behind for a moment.
            why = f"the queue is from {low} to {high} now (made anew, or reset)"
            self._trouble = DataLost(text_of(self._queue), window.cursor, window.end, why)
        elif following > window.cursor and code != ResponseCode.PULL_OFFSET_MOVED:
            if not self._is_filtered:
                self._lose(window, following, "the broker can't read them (removed or damaged)")
            window.cursor = max(window.cursor, following)
        else:  # a reset of the group's offset is told once in place of an answer; or it is busy
            why = f"the broker says code {code} {remark}, next {following}"
            self._trouble = DataLost(text_of(self._queue), window.cursor, window.end, why)

    def _take(self, window: Window, body: Piece, following: int) -> None:
        got = following - window.cursor
        wanted = window.end - window.cursor
        window.bodies.append(body)
        window.cursor = following
        if self._is_filtered:
            return
        window.rows += min(got, wanted)
        self._pull_bytes = max(body[2] - body[1], self._pull_bytes * 7 // 8)
        if window.is_probe:
            # How much a pull gives here. At the range's end it tells nothing.
            if got < wanted:
                window.end = following
                self._step, self._is_learnt = got, True
            elif wanted == self._options.pull_count:
                self._step, self._is_learnt = got, True
        elif got < wanted:
            self._step = max(1, got)

    def _refused(self, frame: Frame) -> None:
        remark = frame.remark or "no remark"
        what = f"pull of {text_of(self._queue)} at {self._address}: {remark}"
        error = RequestRefused(frame.code, what, frame.ext)
        is_gone = frame.code == ResponseCode.TOPIC_NOT_EXIST
        if is_gone:
            self._address = ""  # it may have moved; if not, that is found out there
        elif frame.code not in _BUSY or (self._is_filtered and "filter" in remark.lower()):
            raise error
        self._trouble = error

    def _failed(self, error: CometError) -> None:
        """The connection is of no more use; whoever waits for an answer asks again."""
        if self._round.waits():
            self._round.divide()
        self._asked.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._address = ""
        self._trouble = error

    def _endure(self, open_ones: Sequence[Window]) -> None:
        """Wait a little; after long enough, give up."""
        error, self._trouble = self._trouble, None
        assert error is not None
        now = time.monotonic()
        limit_s = STUCK_S if isinstance(error, DataLost) else PATIENCE_S
        if self._trouble_since is None:
            self._trouble_since, self._wait_s = now, WAIT_S
            what = error.what if isinstance(error, DataLost) else error
            log.warning("pull_failed reason=%s action=try again", what)
        elif now - self._trouble_since > limit_s:
            if isinstance(error, DataLost):
                self._lose_all(open_ones, error.why)
                return
            raise error
        time.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, MOST_WAIT_S)

    def _where(self) -> str:
        """The broker's address: as planned, or asked for anew after a failure."""
        if self._address:
            return self._address
        with Cluster(self._options) as cluster:
            try:
                self._address = cluster.address_of(self._queue)
            except NoRoute as error:
                raise ConnectionLost(str(error)) from None
        return self._address

    # ---------------------------------------------------------------------------------------- loss

    def _lose(self, window: Window, following: int, why: str) -> None:
        """What lies before `following` is gone."""
        end = min(following, window.end)
        self._tell(window.cursor, end, why)
        window.cursor = end

    def _lose_all(self, windows: Sequence[Window], why: str) -> None:
        self._tell(windows[0].cursor, windows[-1].end, why)
        for window in windows:
            window.cursor = window.end

    def _tell(self, begin: int, end: int, why: str) -> None:
        error = DataLost(text_of(self._queue), begin, end, why)
        if self._options.fails_on_loss:
            raise error
        log.warning("data_lost count=%d reason=%s", end - begin, error.what)


class PartitionReader:
    """A partition's ranges to RecordBatches of the schema."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._wanted = make_filter(options.tags, options.sql)
        self._properties = properties_for(schema.names)
        if self._wanted.tags:
            self._properties = tuple({*self._properties, b"TAGS"})
        self._forget()

    def _forget(self) -> None:
        # Bodies that wait to be decoded. Of some in one buffer: where each begins and ends there,
        # and the offset that its window ends before.
        self._parts: list[tuple[Data, Ints, Ints, Ints]] = []
        self._brokers: list[str] = []
        """Of each body."""
        self._rows = 0
        self._bytes = 0

    def read(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        get_ready()
        for one in ranges:
            for done in RangeReader(one, self._options, self._wanted).rounds():
                for stretch in done.stretches:
                    yield from self._add_stretch(stretch, one.broker)
                for window in done.windows:
                    for data, begin, end in window.bodies:
                        part = (data, _ints(begin), _ints(end), _ints(window.end))
                        yield from self._add(part, one.broker)
                    self._rows += window.rows
        yield from self._flush()

    def _add_stretch(self, stretch: Stretch, broker: str) -> Iterator[pa.RecordBatch]:
        assert stretch.data is not None
        begins, ends = stretch.places[0::2], stretch.places[1::2]
        count = max(1, BATCH_ROWS // stretch.step)
        for at in range(0, stretch.count, count):
            some = slice(at, at + count)
            part = (stretch.data, begins[some], ends[some], stretch.ends[some])
            yield from self._add(part, broker)
            self._rows += stretch.step * len(part[1])

    def _add(self, part: tuple[Data, Ints, Ints, Ints], broker: str) -> Iterator[pa.RecordBatch]:
        """Some bodies in a buffer; those before make a batch if there are enough of them."""
        data, begins, ends, _ = part
        is_large = self._rows >= BATCH_ROWS or self._bytes >= BATCH_BYTES
        # Bodies of one buffer need not be copied together.
        is_fair = self._rows >= BATCH_ROWS // 2 or self._bytes >= BATCH_BYTES // 2
        if is_large or (is_fair and self._parts[-1][0] is not data):
            yield from self._flush()
        self._parts.append(part)
        self._brokers += [broker] * len(begins)
        self._bytes += int((ends - begins).sum())

    def _flush(self) -> Iterator[pa.RecordBatch]:
        if not self._parts:
            return
        parts, brokers = self._parts, self._brokers
        self._forget()
        data = parts[0][0]
        begins, ends, limits = (np.concatenate([part[at] for part in parts]) for at in (1, 2, 3))
        if any(part[0] is not data for part in parts):
            data = joined(
                (part[0], begin, end)
                for part in parts
                for begin, end in zip(part[1].tolist(), part[2].tolist(), strict=True)
            )
            ends = np.cumsum(ends - begins)
            begins = np.concatenate([[0], ends[:-1]])
        records = Records(data, begins, ends, names=self._properties)
        is_inside = records.queue_offset < np.repeat(limits, records.counts)
        if not is_inside.all():  # rows of the next window, or behind the partition's end
            records.keep(is_inside)
        tags = wanted_rows(records, self._wanted)
        if tags is not None:
            records.keep(tags)
        if not len(records):
            return
        broker = None
        if "broker" in self._schema.names:
            broker = _brokers(brokers, records)
        columns = records.columns(self._schema.names, broker)
        yield pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _ints(value: int) -> Ints:
    return np.array([value], np.int64)


def _brokers(names: Sequence[str], records: Records) -> pa.Array:
    if names.count(names[0]) == len(names):
        return repeated(names[0], len(records))
    return pa.array(names, pa.string()).take(numbers(records.parts.astype(np.int64)))
