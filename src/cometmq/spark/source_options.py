"""The options of the source: the table, and what they mean together.

Owns: SourceOptions, what the rest of the source reads. One rule: everything that can be seen to be
wrong without asking a server is refused here, in the same words for batch and stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cometmq.client.outgoing import MAX_GROUP_CHARS, check_name
from cometmq.errors import UsageError
from cometmq.spark.options import (
    Option,
    boolean,
    integer,
    parse,
    size_bytes,
    span_ms,
    text,
    timeout_ms,
)
from cometmq.spark.tls import TLS_OPTIONS, Access, access_of, with_access_file

EARLIEST, LATEST, GROUP = "earliest", "latest", "group"
DEFAULT_GROUP = "CID_COMETMQ_SPARK"
"""Pulls are made in some group's name; offsets are stored for it only when asked for."""
MAX_ROWS = 1 << 50
MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999

Offsets = dict[str, dict[str, dict[int, int | str]]]
"""Topic to broker to queue: an offset, or one of the words."""


def names(value: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(piece.strip() for piece in value.split(",") if piece.strip()))
    if not found:
        raise ValueError("must name at least one, separated by commas")
    return found


def group_name(value: str) -> str:
    check_name(text(value), "consumer group", MAX_GROUP_CHARS)
    return text(value)


def pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    return text(value)


def time_ms(value: str) -> int:
    """Milliseconds since 1970, or ISO 8601; a time without a zone is UTC."""
    word = value.strip()
    if word.isdecimal():
        if int(word) > MAX_TIME_MS:
            raise ValueError("is after the year 9999: must be milliseconds since 1970")
        return int(word)
    try:
        when = datetime.fromisoformat(word)
    except ValueError:
        raise ValueError(
            "must be milliseconds since 1970 or a time such as 2026-03-01T12:00:00+01:00"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return int(when.timestamp() * 1000)


def offsets(value: str) -> str | Offsets:
    """One of the words, or JSON: {"topic": {"broker": {"0": 42, "1": "latest"}}}."""
    word = value.strip()
    if word.lower() in (EARLIEST, LATEST, GROUP):
        return word.lower()
    wanted = (
        f"must be {EARLIEST}, {LATEST}, {GROUP}, or JSON by topic, broker and queue: "
        '{"orders": {"broker-a": {"0": 42, "1": "earliest"}}}'
    )
    found: Offsets = {}
    for topic, broker, queues in _by_broker(word, wanted):
        if not isinstance(queues, dict):
            raise ValueError(wanted)
        of_broker = found.setdefault(topic, {}).setdefault(broker, {})
        for number, given in queues.items():
            offset = given.strip().lower() if isinstance(given, str) else given
            is_word = offset in (EARLIEST, LATEST, GROUP)
            is_number = type(offset) is int and offset >= 0
            if not number.isdecimal() or not (is_word or is_number):
                raise ValueError(f"{topic}/{broker}/{number}: {given!r}; {wanted}")
            of_broker[int(number)] = offset
    return found


def assign(value: str) -> dict[str, dict[str, tuple[int, ...]]]:
    wanted = 'must be JSON by topic and broker: {"orders": {"broker-a": [0, 1]}}'
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for topic, broker, queues in _by_broker(value, wanted):
        is_list = isinstance(queues, list) and all(type(q) is int and q >= 0 for q in queues)
        if not is_list or not queues:
            raise ValueError(wanted)
        found.setdefault(topic, {})[broker] = tuple(sorted(set(queues)))
    return found


def _by_broker(value: str, wanted: str) -> list[tuple[str, str, Any]]:
    try:
        raw = json.loads(value)
    except ValueError:
        raise ValueError(wanted) from None
    if not isinstance(raw, dict) or not raw:
        raise ValueError(wanted)
    found = []
    for topic, brokers in raw.items():
        if not isinstance(brokers, dict) or not brokers:
            raise ValueError(wanted)
        found += [(topic, broker, queues) for broker, queues in brokers.items()]
    return found


TABLE = (
    Option("namesrv", text, None, "name servers as host:port, separated by ;", is_required=True),
    Option("topic", names, None, "topics to read, separated by commas"),
    Option("topicPattern", pattern, None, "a regular expression that whole topic names match"),
    Option("assign", assign, None, "queues to read, as JSON by topic and broker"),
    Option("group", group_name, None, "the consumer group in whose name is read"),
    Option("startingOffsets", offsets, None, "earliest, latest, group, or JSON by queue"),
    Option("endingOffsets", offsets, None, "batch only: latest, group, or JSON by queue"),
    Option("startingTimestamp", time_ms, None, "begin with what was stored at this time or later"),
    Option("endingTimestamp", time_ms, None, "batch only: end before what was stored at this time"),
    Option("maxOffsetsPerTrigger", integer(1, MAX_ROWS), None, "at most so many offsets a batch"),
    Option("maxBytesPerTrigger", size_bytes, None, "about so many bytes a batch, by samples"),
    Option("minOffsetsPerTrigger", integer(1, MAX_ROWS), None, "wait for so many offsets"),
    Option("maxTriggerDelay", span_ms, 15 * 60_000, "but no longer than this"),
    Option("minPartitions", integer(1, 100_000), None, "at least so many Spark partitions"),
    Option("maxRecordsPerPartition", integer(1, MAX_ROWS), None, "split longer ranges"),
    Option("failOnDataLoss", boolean, True, "false: go on with a warning and a count"),
    Option("tags", text, "*", "tags to read, with || between them; the broker filters"),
    Option("sql92", text, None, "a condition on properties; the broker filters"),
    Option("columns", names, None, "columns to decode, separated by commas"),
    Option("commitOffsetsToGroup", boolean, False, "store what is read as the group's offsets"),
    Option("pullBatchSize", integer(1, 100_000), 1024, "messages asked for in one pull"),
    Option("requestTimeout", timeout_ms, 10_000, "how long an answer of a server may take"),
    *TLS_OPTIONS,
)
STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitOffsetsToGroup",
)
BATCH_ONLY = ("endingOffsets", "endingTimestamp")


@dataclass(frozen=True)
class SourceOptions:
    """The options as the source uses them; pickled to the executors."""

    namesrv: str
    access: Access = field(repr=False)
    topics: tuple[str, ...] | None = None
    topic_pattern: str | None = None
    assign: dict[str, dict[str, tuple[int, ...]]] | None = None
    group: str = DEFAULT_GROUP
    start: str | int | Offsets = EARLIEST
    """A word, offsets by queue, or (an int) milliseconds."""
    end: str | int | Offsets = LATEST
    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    max_per_partition: int | None = None
    fails_on_loss: bool = True
    tags: str = "*"
    sql: str = ""
    columns: tuple[str, ...] | None = None
    commits: bool = False
    pull_count: int = 1024
    timeout_ms: int = 10_000

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
        """UsageError names what is wrong. `streaming` None: not known yet, both kinds pass."""
        values = parse(TABLE, with_access_file(options))
        _check_together(values, _given(options), streaming)
        start: str | int | Offsets | None = values["startingOffsets"]
        end: str | int | Offsets | None = values["endingOffsets"]
        if values["startingTimestamp"] is not None:
            start = values["startingTimestamp"]
        if values["endingTimestamp"] is not None:
            end = values["endingTimestamp"]
        # A stream begins with what is new, a batch with everything, as with Spark's Kafka source.
        default = LATEST if streaming else EARLIEST
        return cls(
            namesrv=values["namesrv"],
            access=access_of(values),
            topics=values["topic"],
            topic_pattern=values["topicPattern"],
            assign=values["assign"],
            group=values["group"] or DEFAULT_GROUP,
            start=default if start is None else start,
            end=LATEST if end is None else end,
            max_offsets=values["maxOffsetsPerTrigger"],
            max_bytes=values["maxBytesPerTrigger"],
            min_offsets=values["minOffsetsPerTrigger"],
            max_delay_ms=values["maxTriggerDelay"],
            min_partitions=values["minPartitions"],
            max_per_partition=values["maxRecordsPerPartition"],
            fails_on_loss=values["failOnDataLoss"],
            tags=values["tags"],
            sql=values["sql92"] or "",
            columns=values["columns"],
            commits=values["commitOffsetsToGroup"],
            pull_count=values["pullBatchSize"],
            timeout_ms=values["requestTimeout"],
        )


def _given(options: Mapping[str, str]) -> set[str]:
    return {key.lower() for key in options}


def _check_together(values: Mapping[str, Any], given: set[str], streaming: bool | None) -> None:
    chosen = [name for name in ("topic", "topicPattern", "assign") if values[name] is not None]
    if len(chosen) != 1:
        what = "none of them" if not chosen else " and ".join(chosen)
        raise UsageError(f"give one of the options topic, topicPattern and assign; given: {what}")
    for one, other in (
        ("startingOffsets", "startingTimestamp"),
        ("endingOffsets", "endingTimestamp"),
    ):
        if values[one] is not None and values[other] is not None:
            raise UsageError(f"the options {one} and {other} contradict each other: give one")
    _check_order(values)
    if values["endingOffsets"] == EARLIEST:
        raise UsageError("endingOffsets 'earliest' would read nothing")
    if values["sql92"] is not None and values["tags"] != "*":
        raise UsageError("a broker filters by tags or by sql92, not by both: give one")
    needs_group = values["commitOffsetsToGroup"] or GROUP in (
        *_words(values["startingOffsets"]),
        *_words(values["endingOffsets"]),
    )
    if needs_group and values["group"] is None:
        raise UsageError(
            "commitOffsetsToGroup and offsets from 'group' need the option 'group': its name"
        )
    least, most = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
    if least is not None and most is not None and least > most:
        raise UsageError(f"minOffsetsPerTrigger {least} is more than maxOffsetsPerTrigger {most}")
    if least is None and "maxtriggerdelay" in given:
        raise UsageError("maxTriggerDelay says how long to wait for minOffsetsPerTrigger: give it")
    wrong = BATCH_ONLY if streaming else STREAM_ONLY if streaming is False else ()
    for name in wrong:
        if name.lower() in given:
            kind = "batch read" if streaming else "stream"
            raise UsageError(f"the option {name!r} is for a {kind} only")


def _check_order(values: Mapping[str, Any]) -> None:
    """An end before its start would read nothing, and nobody would know why."""
    first, last = values["startingTimestamp"], values["endingTimestamp"]
    if first is not None and last is not None and first > last:
        raise UsageError(f"endingTimestamp {last} is before startingTimestamp {first}: swap them")
    starts, ends = _exact(values["startingOffsets"]), _exact(values["endingOffsets"])
    for place in sorted(starts.keys() & ends.keys()):
        if starts[place] > ends[place]:
            raise UsageError(
                f"endingOffsets of {'/'.join(map(str, place))}, {ends[place]}, is before its "
                f"startingOffsets, {starts[place]}"
            )


def _exact(value: str | Offsets | None) -> dict[tuple[str, str, int], int]:
    """The offsets that are numbers, by topic, broker and queue."""
    return {
        (topic, broker, number): offset
        for topic, brokers in (value.items() if isinstance(value, dict) else ())
        for broker, queues in brokers.items()
        for number, offset in queues.items()
        if isinstance(offset, int)
    }


def _words(value: str | Offsets | None) -> set[str]:
    if isinstance(value, dict):
        of_queues = (queues for brokers in value.values() for queues in brokers.values())
        return {one for queues in of_queues for one in queues.values() if isinstance(one, str)}
    return set() if value is None else {value}
