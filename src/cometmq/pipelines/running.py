"""Running a stream to its end, or until it is told to stop, with a line for every batch.

Owns: progress, clean stops, the summary. One rule: a stop lets the batch under way come to its end
(for a while), so that nothing half-written needs to be done again; what a stop does cut off is
replayed by the next start.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.errors import CometError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = logging.getLogger("cometmq.pipelines")

Tell = Callable[[str], None]

POLL_S = 0.2
STOP_WAIT_S = 60.0
"""How long a stop waits for the batch under way."""
QUIET_S = 10.0
"""After so long without a finished batch a line says what is going on."""
LATE = "late, left out"
"""The figure for rows that came after the watermark had passed them."""
DUPLICATES = "duplicates dropped"
TIMELESS = "without a time, left out"
"""The figure for rows whose event time is missing, or is none."""
FIGURES = "cometmq"
NOTHING_SEEN = (-1, "")
SLOW_START = "failed to connect back"
"""Spark gives the Python process of a stream 10 s, and has no setting for it."""
MOST_STARTS = 5
TRACEBACK = "Traceback (most recent call last):"
CALLING = "An error occurred while calling "
WAITING = "Exception thrown in awaitResult"
"""How Py4J and Spark begin an error that says nothing: the cause does."""
_JAVA_ERROR = re.compile(r"^(?:: |Caused by: )(?:[a-z_]\w*\.)*(\w[\w$]*(?:: .+)?)$", re.MULTILINE)
_WORDLESS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Python's errors whose text alone tells nobody what happened: a KeyError's is the key."""


class PipelineFailed(CometError):
    """A pipeline ended with an error; the text is Spark's reason, without the stack."""


class Outcome(msgspec.Struct):
    """What a pipeline did."""

    name: str
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    lag: int | None = None
    is_stopped: bool = False
    """It was told to stop before it was done."""
    figures: dict[str, Any] = {}
    """More, by name, for the summary."""

    def lines(self) -> list[str]:
        """The summary, one fact a line."""
        rate = self.rows / self.seconds if self.seconds else 0.0
        told = [
            ("rows", f"{self.rows:,}"),
            ("batches", f"{self.batches:,}"),
            ("seconds", f"{self.seconds:.1f}"),
            ("rows/s", f"{rate:,.0f}"),
        ]
        if self.lag is not None:
            told.append(("lag", f"{self.lag:,}"))
        told += [(name, _shown(value)) for name, value in self.figures.items()]
        width = max(len(name) for name, _ in told)
        end = "stopped" if self.is_stopped else "done"
        return [f"{self.name}: {end}", *(f"  {name:<{width}}  {value}" for name, value in told)]


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def stopping_on_signals(
    stop: threading.Event, tell: Tell = to_stderr, after: str = "the batch under way"
) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask for a clean stop; a second one ends the program as usual."""

    def asked(number: int, _frame: object) -> None:
        for one, before in previous.items():
            signal.signal(one, before)
        tell(f"{signal.Signals(number).name}: stopping after {after}")
        stop.set()

    previous = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    for one in previous:
        signal.signal(one, asked)
    try:
        yield
    finally:
        for one, before in previous.items():
            signal.signal(one, before)


def run_stream(
    name: str,
    writer: DataStreamWriter,
    *,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Start a query and follow it until it ends (Trigger.AvailableNow) or `stop` is set."""
    began = time.monotonic()
    for starts_left in reversed(range(MOST_STARTS)):
        try:
            query = writer.start()
        except Exception as error:
            raise PipelineFailed(f"{name}: {reason_of(error)}") from error
        outcome = Outcome(name)
        try:
            _follow(query, outcome, tell, stop or threading.Event())
        finally:
            if query.isActive:
                query.stop()
            outcome.seconds = time.monotonic() - began
        failure = query.exception()
        if failure is None or outcome.is_stopped:
            break
        if not (starts_left and outcome.batches == 0 and SLOW_START in str(failure)):
            raise PipelineFailed(f"{name}: {reason_of(failure)}") from failure
        tell(f"{name}: the machine is too busy, Spark gave up on its own start: starting again")
    return outcome


def _follow(query: StreamingQuery, outcome: Outcome, tell: Tell, stop: threading.Event) -> None:
    seen, told_s = NOTHING_SEEN, time.monotonic()
    while True:
        is_active = query.isActive
        for progress in _fresh(query, seen):
            seen = _place(progress)
            if _count(outcome, progress):
                tell(_line(outcome, progress))
                told_s = time.monotonic()
        if not is_active:
            return
        if stop.is_set():
            outcome.is_stopped = True
            _stop(query, tell)
            for progress in _fresh(query, seen):
                _count(outcome, progress)
            return
        if time.monotonic() - told_s > QUIET_S:
            tell(f"{outcome.name}: {query.status['message'].lower()}")
            told_s = time.monotonic()
        stop.wait(POLL_S)


def _place(progress: Any) -> tuple[int, str]:
    """Reports in their order. An idle stream reports the batch that is yet to come, and that batch
    again when it has run: the number alone would take the second for the first."""
    return int(progress["batchId"]), str(progress["timestamp"])


def _fresh(query: StreamingQuery, seen: tuple[int, str]) -> list[Any]:
    return [one for one in query.recentProgress if _place(one) > seen]


def _count(outcome: Outcome, progress: Any) -> bool:
    """False for a report that says only that nothing came."""
    found = _lag(progress)
    if found is not None:
        outcome.lag, lost = found
        if lost:
            outcome.figures["offsets lost"] = lost
    for name, count in _state_figures(progress).items():
        outcome.figures[name] = outcome.figures.get(name, 0) + count
    rows = int(progress["numInputRows"])
    if rows == 0:
        return False
    outcome.rows += rows
    outcome.batches += 1
    return True


def with_figure(rows: DataFrame, name: str, count: Column) -> DataFrame:
    """Have something counted in every batch, and told in the summary under this name."""
    return rows.observe(FIGURES, count.alias(name))


def _state_figures(progress: Any) -> dict[str, int]:
    """What the stateful steps of a batch left out, by the name under which it is told, and what
    `with_figure` counts.

    Of a stream with such steps the figures are there from the first batch on, 0 or not: whoever
    reads a summary sees that late rows were counted and none came.
    """
    observed = (progress["observedMetrics"] or {}).get(FIGURES)
    found: dict[str, int] = {} if observed is None else observed.asDict()
    for one in progress["stateOperators"]:
        found[LATE] = found.get(LATE, 0) + int(one["numRowsDroppedByWatermark"])
        dropped = (one.get("customMetrics") or {}).get("numDroppedDuplicateRows")
        if dropped is not None:
            found[DUPLICATES] = found.get(DUPLICATES, 0) + int(dropped)
    return found


def _line(outcome: Outcome, progress: Any) -> str:
    took_s = max(int(progress["durationMs"].get("triggerExecution", 0)) / 1000, 0.001)
    rows = int(progress["numInputRows"])
    lag = "" if outcome.lag is None else f"  lag {outcome.lag:,}"
    return (
        f"{outcome.name}: batch {progress['batchId']}  {rows:,} rows  {rows / took_s:,.0f} rows/s"
        f"{lag}  total {outcome.rows:,}"
    )


def _lag(progress: Any) -> tuple[int, int] | None:
    """(messages behind the end of the topics when the batch was planned, offsets given up)."""
    from cometmq.spark.listener import lag_of

    offsets = [(_text(one["endOffset"]), _text(one["latestOffset"])) for one in progress["sources"]]
    found = lag_of(offsets, query_id="")
    return None if found is None else (found.total, found.lost)


def _text(offset: Any) -> str | None:
    """Spark hands an offset on as JSON text or as the value it stands for."""
    return offset if offset is None or isinstance(offset, str) else json.dumps(offset)


def _stop(query: StreamingQuery, tell: Tell) -> None:
    ends_s = time.monotonic() + STOP_WAIT_S
    before = _last(query)
    # A run with many batches goes from one to the next within the look of an eye: the report of
    # the one under way is the sign that it is over.
    while query.isActive and query.status["isTriggerActive"] and _last(query) == before:
        if time.monotonic() >= ends_s:
            break
        time.sleep(POLL_S / 4)
    if query.isActive and time.monotonic() >= ends_s:
        tell(f"the batch under way takes longer than {STOP_WAIT_S:.0f} s: it will be done again")
    query.stop()


def _last(query: StreamingQuery) -> tuple[int, str]:
    found = query.recentProgress
    return _place(found[-1]) if found else NOTHING_SEEN


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Errors of Spark's as PipelineFailed, with the line that a person needs."""
    try:
        yield
    except CometError:
        raise
    except Exception as error:
        raise PipelineFailed(f"{name}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The line of an error that a person needs: Spark wraps a Python error in pages of stack."""
    text = str(error)
    found = _told_by_python(text)
    if not found:
        found = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if CALLING in found:
        found = _told_by_java(text) or found
    cause = getattr(error, "_cause", None)
    if found.startswith(WAITING) and cause is not None:
        return reason_of(cause)
    if not found or (isinstance(error, _WORDLESS) and type(error).__module__ == "builtins"):
        return ": ".join(filter(None, (type(error).__name__, found)))
    return found


def _told_by_python(text: str) -> str:
    for line in reversed(text.splitlines()):
        name, colon, rest = line.strip().partition(": ")
        if colon and "." in name and name.split(".")[-1][:1].isupper() and " " not in name:
            if not name.startswith(("cometmq.", "pyspark.errors", "builtins.")):
                continue
            if not rest.endswith(":"):  # else it announces the error of another process
                return rest or line.strip()
    _, is_python, trace = text.rpartition(TRACEBACK)
    if is_python:  # of a batch's own function: the line after the indented ones
        for line in trace.splitlines()[1:]:
            if line and not line[0].isspace():
                return line
    return ""


def _told_by_java(text: str) -> str:
    """The innermost cause, without the package that its class is of."""
    found = _JAVA_ERROR.findall(text)
    return "" if not found else str(found[-1]).strip()
