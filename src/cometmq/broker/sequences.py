"""Producer sequences: PRODUCER_SEQ = "<producer> <batch> <n>", each message stored exactly once.

Owns: what was stored last of each (topic, queue, producer), and config/producerSequences.json. One
rule: what the log holds counts as stored and nothing else does, also after a crash: the file says
how far in the log it speaks for, and the rest of the log is read again at start.

    same batch, n = last + 1; or a later batch, or an unknown producer, n = 0      stored
    same batch, n <= last; or an earlier batch                                     a duplicate
    anything else                                                                  a gap: refused

Counted is what a client addressed: a delayed or timed message by its real topic and queue; copies
of our own making (their delivery, retries, dead letters) never are, and neither is what a consumer
sends to a retry topic. A producer that was idle for `producerSequenceHours` is forgotten; one too
many is refused, because forgetting another one could store its messages twice.

Producers whose names begin with the same word, up to a dot, belong to one writer: `job-7.0.x` and
`job-7.1.x` to `job-7`. A writer that will never send again says so (END_PRODUCERS), and its many
producers become one line: it has ended. What comes of it later, from a task that nobody waits for
any more, is refused.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.broker import names
from cometmq.broker.proven import ProvenFile
from cometmq.broker.state import StateFile
from cometmq.config import BrokerConfig
from cometmq.errors import RequestRefused, StoreCorrupt
from cometmq.ports import Out
from cometmq.requests import Call, Reply
from cometmq.store.results import Appended
from cometmq.store.state_files import load_state
from cometmq.store.store import Store
from cometmq.wire import properties
from cometmq.wire.codes import ResponseCode
from cometmq.wire.headers import EndProducersHeader
from cometmq.wire.record import Scan

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

NAME = properties.PRODUCER_SEQ
MARK = NAME + properties.NAME_END
FILE = "config/producerSequences.json"
SAVE_MS = 5_000
MOST_UNREAD_BYTES = 64 * 1024 * 1024  # of log behind the file; more is read at start in a second
MOST_ENDED = 10_000  # writers; the first one is forgotten for one more
ENDED_HOURS = 24  # tasks of a job that has ended may still try for so long
_HOUR_MS = 3_600_000
_MAX_I64 = 2**63 - 1
_FORM = re.compile(r"([A-Za-z0-9_.-]{1,127}) ([0-9]{1,19}) ([0-9]{1,19})", re.ASCII)
_WRITER = re.compile(r"[A-Za-z0-9_-]{1,127}", re.ASCII)
_OF_A_COPY = (properties.REAL_TOPIC, properties.REAL_QUEUE_ID, properties.TIMER_ROLL_TIMES)
_WAITING = frozenset((names.SCHEDULE_TOPIC, names.TIMER_TOPIC))
_NEVER_COUNTED = (names.RETRY_PREFIX, names.DEAD_LETTER_PREFIX)

_Key = tuple[str, int, str]


class Run(msgspec.Struct, frozen=True):
    """Consecutive messages of one producer's batch: n to n + count - 1."""

    producer: str
    batch: int
    n: int
    count: int = 1


class Last(msgspec.Struct, gc=False):
    """The last stored message of a producer in a queue."""

    batch: int
    n: int
    queue_offset: int
    log_offset: int
    end_offset: int
    used_ms: int


class Sequences:
    """All producers that number their messages."""

    def __init__(self, config: BrokerConfig, store: Store, now_ms: int) -> None:
        self.duplicates = self.gaps = self.refused_by_limit = 0
        self._limit = config.max_producer_sequences
        self._idle_ms = config.producer_sequence_hours * _HOUR_MS
        self._table: OrderedDict[_Key, Last] = OrderedDict()  # the longest unused first
        self._ended: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By topic and writer: when it was told. The oldest first."""
        self._proven = ProvenFile(FILE, self._encode, SAVE_MS)
        self.files: list[StateFile] = [self._proven.file]
        self._recover(store)
        # What was recovered is durable: a file that is missing can be written at once.
        self._proven.tick(store.max_log_offset, store.flushed_offset, now_ms)

    @property
    def count(self) -> int:
        return len(self._table)

    # ------------------------------------------------------------------------------------ the file

    def _encode(self, upto: int) -> bytes:
        keys = [
            [*key, one.batch, one.n, one.queue_offset, one.log_offset, one.used_ms]
            for key, one in self._table.items()
        ]
        ended = [[*which, ms] for which, ms in self._ended.items()]
        return msgspec.json.encode({"upto": upto, "forgotten": {}, "keys": keys, "ended": ended})

    def _recover(self, store: Store) -> None:
        """The file, then what the log holds beyond it."""
        stored = load_state(store.files, FILE)
        forgotten: dict[str, int] = {}
        if stored is None and store.files.read(FILE + ".corrupt") is None:
            # None was ever made here, or the kill came first: recovery has walked over all since.
            begin = store.stats.recovered.walk_from
            self._proven.changed()
        else:
            begin, forgotten = self._load(stored or {})
            self._proven.upto = begin
        if not store.min_log_offset <= begin <= store.max_log_offset:
            if begin > store.max_log_offset:
                log.error("sequences beyond the log upto=%d end=%d", begin, store.max_log_offset)
                self._table.clear()
            begin = store.min_log_offset
            self._proven.changed()
        try:
            self._read(store, begin, forgotten)
        except StoreCorrupt as error:
            log.error("sequences are read from the whole log again: %s", error)
            self._table.clear()
            self._read(store, store.min_log_offset, forgotten)

    def _load(self, stored: dict[str, Any]) -> tuple[int, dict[str, int]]:
        """Where to read on, -1 if the file can't be used; and where deleted topics ended."""
        try:
            upto = int(stored["upto"])
            forgotten = {str(name): int(at) for name, at in stored["forgotten"].items()}
            table: OrderedDict[_Key, Last] = OrderedDict()
            ended = OrderedDict(
                ((str(topic), str(writer)), int(ms))
                for topic, writer, ms in stored.get("ended", ())
            )
            for topic, queue_id, producer, batch, n, queue_offset, log_offset, ms in stored["keys"]:
                last = Last(int(batch), int(n), int(queue_offset), int(log_offset), 0, int(ms))
                table[str(topic), int(queue_id), str(producer)] = last
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.error("%s is not as expected: the log is read instead: %r", FILE, error)
            return -1, {}
        self._table, self._ended = table, ended
        return upto, forgotten

    def _read(self, store: Store, begin: int, forgotten: dict[str, int]) -> None:
        for found in store.records(begin, having=MARK):
            place, run = addressed(found), _parse(properties.get(found.properties, NAME) or "")
            if place is None or run is None or found.log_offset < forgotten.get(place[0], 0):
                continue
            if (place[0], _writer(run.producer)) in self._ended:
                continue
            last = Last(run.batch, run.n, found.queue_offset, found.log_offset, 0, found.store_ms)
            self._table[*place, run.producer] = last
            self._table.move_to_end((*place, run.producer))

    # ------------------------------------------------------------------------------------- a send

    def stored_already(self, topic: str, queue_id: int, run: Run, now_ms: int) -> int:
        """How many of these messages, from the first on, are stored; RequestRefused for a gap."""
        key = (topic, queue_id, run.producer)
        last = self._table.get(key)
        if last is not None and last.used_ms + self._idle_ms < now_ms:
            del self._table[key]
            last = None
        if last is None and self._ended:
            self._check_ended(topic, run.producer, now_ms)
        expected = 0
        if last is not None:
            if run.batch < last.batch:
                return self._duplicates(key, last, run.count, now_ms)
            if run.batch == last.batch:
                expected = last.n + 1
        if run.n > expected:
            self.gaps += 1
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"sequence gap: producer {run.producer!r} in {topic}/{queue_id} batch {run.batch}: "
                f"expected {expected}, got {run.n}",
            )
        if last is None:
            self._make_room(now_ms)
            return 0
        return self._duplicates(key, last, min(run.count, expected - run.n), now_ms)

    def _duplicates(self, key: _Key, last: Last, count: int, now_ms: int) -> int:
        if count:
            self.duplicates += count
            last.used_ms = now_ms
            self._table.move_to_end(key)
        return count

    def _make_room(self, now_ms: int) -> None:
        """Forget who was idle for too long; RequestRefused if that is not enough."""
        table = self._table
        while table and next(iter(table.values())).used_ms + self._idle_ms < now_ms:
            table.popitem(last=False)
        if len(table) >= self._limit:
            self.refused_by_limit += 1
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"{len(table)} producers number their messages here already "
                f"(maxProducerSequences={self._limit}); the next is forgotten when it was idle "
                f"for {self._idle_ms // _HOUR_MS} h (producerSequenceHours)",
            )

    def last(self, topic: str, queue_id: int, producer: str) -> Last:
        return self._table[topic, queue_id, producer]

    def stored(self, topic: str, queue_id: int, run: Run, appended: Appended, now_ms: int) -> None:
        """The last message of a run is in the log."""
        key = (topic, queue_id, run.producer)
        self._table[key] = Last(
            run.batch,
            run.n + run.count - 1,
            appended.queue_offset,
            appended.log_offset,
            appended.end_offset,
            now_ms,
        )
        self._table.move_to_end(key)
        self._proven.changed()

    def forget_topic(self, topic: str, log_end: int, now_ms: int) -> None:
        """A topic is deleted; what the log still holds of it does not count."""
        gone = [key for key in self._table if key[0] == topic]
        ended = [which for which in self._ended if which[0] == topic]
        if not gone and not ended:
            return
        for key in gone:
            del self._table[key]
        for which in ended:
            del self._ended[which]
        self._proven.amend(lambda raw: _without(raw, topic, log_end), now_ms)
        self._proven.changed()

    def end(self, topic: str, writer: str, now_ms: int) -> int:
        """This writer sends nothing any more; returns how many of its producers are forgotten."""
        gone = [key for key in self._table if key[0] == topic and _writer(key[2]) == writer]
        for key in gone:
            del self._table[key]
        self._ended[topic, writer] = now_ms
        self._ended.move_to_end((topic, writer))
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        self._proven.changed()
        return len(gone)

    def _check_ended(self, topic: str, producer: str, now_ms: int) -> None:
        ended = self._ended
        while ended and next(iter(ended.values())) + ENDED_HOURS * _HOUR_MS < now_ms:
            ended.popitem(last=False)
        writer = _writer(producer)
        if (topic, writer) in ended:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"sequence ended: writer {writer!r} has said that it sends nothing any more to "
                f"{topic!r}; a new one needs a name of its own",
            )

    # ------------------------------------------------------------------------------------ the turn

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        return self._proven.next_ms(broker.store.flushed_offset, now_ms)

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        store = broker.store
        if store.max_log_offset - self._proven.upto > MOST_UNREAD_BYTES:
            self._proven.changed()
        self._proven.tick(store.max_log_offset, store.flushed_offset, now_ms)

    def stop(self, store: Store, now_ms: int) -> None:
        """Spare the next start the reading of the log, if that needs no waiting."""
        if store.flushed_offset == store.max_log_offset > self._proven.upto:
            self._proven.changed()
            self._proven.tick(store.max_log_offset, store.flushed_offset, now_ms, at_once=True)


def _without(raw: bytes, topic: str, log_end: int) -> bytes:
    """The file's text, as if nobody had ever sent to a topic up to there in the log."""
    told = msgspec.json.decode(raw)
    told["keys"] = [key for key in told["keys"] if key[0] != topic]
    told["ended"] = [one for one in told["ended"] if one[0] != topic]
    told["forgotten"][topic] = log_end
    return msgspec.json.encode(told)


def end_producers(broker: Broker, call: Call) -> Reply:
    """9001: the producers of one writer have sent their last."""
    header: EndProducersHeader = call.header
    if not _WRITER.fullmatch(header.writer):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"writer {header.writer[:160]!r} must be 1 to 127 of A-Z a-z 0-9 _ -: what the names "
            "of its producers have before their first dot",
        )
    if broker.topics.get(header.topic) is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {header.topic!r} does not exist on {broker.config.name}",
        )
    forgotten = broker.sequences.end(header.topic, header.writer, call.now_ms)
    return Reply(ext={"forgotten": str(forgotten)})


def _writer(producer: str) -> str:
    return producer.partition(".")[0]


# ---------------------------------------------------------------------------------------- messages


def run_of(topic: str, queue_id: int, texts: list[str]) -> Run | None:
    """What the messages of one request say of themselves; None if they are not numbered.

    RequestRefused if they say it in a way that can't be kept.
    """
    first = properties.get(texts[0], NAME)
    if topic.startswith(_NEVER_COUNTED) or (first is None and len(texts) == 1):
        return None
    if first is None:
        for text in texts:
            if MARK in text and properties.get(text, NAME) is not None:
                raise _refuse("in a batch all messages have one or none has")
        return None
    run = _parse(first)
    if run is None:
        raise _refuse(
            f"{first[:160]!r} is not `producer batch n`: 1 to 127 of A-Z a-z 0-9 _ . -, then two "
            "whole numbers of 64 bits, with single spaces"
        )
    if queue_id < 0:
        raise _refuse("the request must name its queue")
    if (properties.get(texts[0], properties.HALF) or "").lower() == "true":
        raise _refuse("a transactional message can't have one: it may be rolled back")
    head = f"{run.producer} {run.batch} "
    for text in texts:
        for name in _OF_A_COPY:
            if name in text and properties.has(text, name):
                raise _refuse(f"{name} is of a copy that a broker made; remove it to send anew")
    for n, text in enumerate(texts[1:], run.n + 1):
        value = properties.get(text, NAME)
        if value != f"{head}{n}" and _parse(value or "") != Run(run.producer, run.batch, n):
            raise _refuse(
                f"in a batch {first!r} must be followed by {head + str(n)!r}, not {value!r}"
            )
    return Run(run.producer, run.batch, run.n, len(texts))


def _parse(value: str) -> Run | None:
    found = _FORM.fullmatch(value)
    if found is None:
        return None
    batch, n = int(found[2]), int(found[3])
    return Run(found[1], batch, n) if batch <= _MAX_I64 and n <= _MAX_I64 else None


def _refuse(why: str) -> RequestRefused:
    return RequestRefused(ResponseCode.MESSAGE_ILLEGAL, f"{NAME}: {why}")


def addressed(found: Scan) -> tuple[str, int] | None:
    """The topic and queue that a client addressed this record to; None for a copy of our own."""
    text = found.properties
    is_waiting = found.topic in _WAITING
    if not is_waiting:
        is_copy = any(properties.has(text, name) for name in _OF_A_COPY)
        is_counted = not is_copy and not found.topic.startswith(_NEVER_COUNTED)
        return (found.topic, found.queue_id) if is_counted else None
    topic = properties.get(text, properties.REAL_TOPIC) or ""
    queue = properties.get(text, properties.REAL_QUEUE_ID) or ""
    if topic.startswith(_NEVER_COUNTED) or properties.has(text, properties.TIMER_ROLL_TIMES):
        return None
    return (topic, int(queue)) if topic and queue.isdecimal() else None
