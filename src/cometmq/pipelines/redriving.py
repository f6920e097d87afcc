"""Sending dead letters again, each once.

Owns: runs of a re-drive. One rule: what is to be sent is written down before the first byte leaves,
with a number for each letter; a run that was cut off is finished from there, with the same numbers,
before anything else is selected.

    <lake>/redrive/cometmq-writer                  the name under which brokers know this table
    <lake>/redrive/intents/<name>-<run>-*.parquet  what a run is to send: letter, queue, number
    <lake>/redrive/outcomes/...                    what became of it; published when a run is over
    <lake>/redrive/lock                            who is at it

Numbers (PRODUCER_SEQ, docs/ttl-and-deduplication.md): the letter's number, which grows over all
runs, is the sequence's batch, and n is always 0. So a broker stores each number once, passes over
one that it has or that is older, and lets numbers be left out (of letters that it refused). Within
a queue a letter is sent when the fate of the one before it is known, and not a moment earlier: if
the later one came first, the earlier one would count as old.
A broker that doesn't number (Apache RocketMQ) is asked for the message by its unique key before
anything whose fate is unknown is sent again; that needs its index (messageIndexEnable).
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq import Admin, Message, MessageQueue, Producer
from cometmq.client.admin import UnknownName
from cometmq.client.background import background
from cometmq.client.outgoing import SHARDING_KEY
from cometmq.client.trace_story import find_by_key
from cometmq.errors import CometError, NoRoute, SendFailed, UsageError
from cometmq.pipelines.files import Files
from cometmq.pipelines.lake import ParquetLake, writer_of
from cometmq.pipelines.owners import is_alive
from cometmq.pipelines.running import PipelineFailed, Tell
from cometmq.spark.sink_rows import OWN_NAMES
from cometmq.wire.codes import ResponseCode
from cometmq.wire.hashing import java_hash
from cometmq.wire.properties import PRODUCER_SEQ

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RESENT_FROM = "DLQ_RESENT_FROM"
"""Property of a message that was a dead letter: which."""
REDRIVES = "DLQ_REDRIVES"
"""How often it was, by now."""
SENT, FAILED, ALREADY, UNKNOWN = "sent", "failed", "already re-driven", "unknown"
GROUP = "COMETMQ_DLQ_REDRIVE"
AT_ONCE = 8
BLOCK = 256
TELL_S = 2.0
PATIENCE_S = 60.0
"""How long a letter is tried whose broker is busy or does not answer."""
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 5.0
_OF_ITS_DEATH = frozenset(
    (
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_REASON",
        "ORIGIN_GROUP",
        RESENT_FROM,
        REDRIVES,
    )
)
_MAYBE_LATER = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE))
_INTENTS = (
    "letter_id string, group string, origin_topic string, msg_id string, keys string, "
    "number bigint, broker string, queue_id int, status string, reason string"
)
_OUTCOMES = (
    "run bigint, letter_id string, group string, origin_topic string, msg_id string, keys string, "
    "status string, reason string, broker string, queue_id int, queue_offset bigint, time timestamp"
)


class Fate(msgspec.Struct, frozen=True):
    """What became of one letter."""

    status: str
    reason: str | None = None
    queue_offset: int | None = None


class Unknown(Exception):
    """Nobody can say whether a letter was stored; its queue must wait."""


class Redrive:
    """One process at work on one table."""

    def __init__(
        self,
        spark: SparkSession,
        lake: str,
        namesrv: str,
        tell: Tell,
        stop: threading.Event,
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        """`keywords`: of our clients, for keys and TLS."""
        self._spark, self._namesrv = spark, namesrv
        self._keywords = dict(keywords or {})
        self._tell, self._stop = tell, stop
        home = f"{lake}/redrive"
        self._name = writer_of(spark, home)
        self._files = Files(spark, home)
        self._intents = ParquetLake(spark, f"{home}/intents", self._name)
        self._outcomes = ParquetLake(spark, f"{home}/outcomes", self._name)
        self.is_stopped = False
        self._counts = {SENT: 0, FAILED: 0, ALREADY: 0, UNKNOWN: 0}

    def run(
        self, letters: DataFrame, where: str, most: int, abandon: bool = False
    ) -> dict[str, Any]:
        """Finish what was begun, then select and send; figures for the summary."""
        with Lock(self._files):
            last = self._intents.last_batch()
            if last >= 0 and not self._outcomes.is_published(last):
                self._tell(f"dlq: run {last} was cut off: it is finished first")
                self._intents.write(self._spark.range(0), last)  # if it was not yet all in place
                self._finish(last, is_resumed=True, abandon=abandon)
            if not self.is_stopped and self._select(letters, where, most, last + 1):
                self._finish(last + 1, is_resumed=False, abandon=False)
        return {f"re-drive: {name}": count for name, count in self._counts.items()}

    # ----------------------------------------------------------------------------------- selection

    def _select(self, letters: DataFrame, where: str, most: int, run: int) -> bool:
        """Write down what is to be sent; False if nothing is selected."""
        from pyspark.sql import functions as f

        chosen = letters.where(where)
        light = ["letter_id", "group", "origin_topic", "msg_id", "keys"]
        shard = f.col("properties")[f.lit(SHARDING_KEY)].alias("shard")
        done = self._sent_before()
        fresh = chosen if done is None else chosen.join(done, "letter_id", "left_anti")
        ordered = fresh.orderBy("dead_time", "letter_id").limit(most)
        rows = [tuple(one) for one in ordered.select(*light, shard).collect()]
        again = []
        if done is not None:
            known = chosen.join(done, "letter_id", "left_semi").orderBy("letter_id").limit(most)
            again = [tuple(one) for one in known.select(*light).collect()]
        if not rows and not again:
            self._tell("dlq: no letter is selected")
            return False
        planned = self._planned(rows, self._next_number())
        planned += [(*row, None, None, None, ALREADY, None) for row in again]
        table = self._spark.createDataFrame(planned, _INTENTS)
        whole = table.join(
            chosen.select("letter_id", "tags", "body", "properties", "redrives"), "letter_id"
        )
        self._intents.write(whole.coalesce(1), run)
        return True

    def _sent_before(self) -> DataFrame | None:
        if self._outcomes.last_batch() < 0:
            return None
        found = self._spark.read.schema(_OUTCOMES).parquet(self._outcomes.path)
        return found.where(f"status IN ('{SENT}', '{UNKNOWN}')").select("letter_id").distinct()

    def _next_number(self) -> int:
        if self._intents.last_batch() < 0:
            return 0
        found = self._spark.read.schema(_INTENTS).parquet(self._intents.path)
        last = found.selectExpr("max(number)").collect()[0][0]
        return 0 if last is None else int(last) + 1

    def _planned(self, rows: list[tuple[Any, ...]], number: int) -> list[tuple[Any, ...]]:
        """Each letter with its number and its queue, or with why it can't be sent."""
        planned = []
        with Admin(self._namesrv, **self._keywords) as admin:
            queues: dict[str, tuple[MessageQueue, ...] | str] = {}
            for *letter, shard in rows:
                topic = letter[2]
                if topic not in queues:
                    queues[topic] = _queues(admin, topic)
                found = queues[topic]
                if isinstance(found, str):
                    planned.append((*letter, None, None, None, FAILED, found))
                    continue
                at = abs(java_hash(shard)) if shard else number
                queue = found[at % len(found)]
                planned.append((*letter, number, queue.broker, queue.queue_id, None, None))
                number += 1
        return planned

    # ------------------------------------------------------------------------------------- sending

    def _finish(self, run: int, *, is_resumed: bool, abandon: bool) -> None:
        """Send what a run is to send, and publish what became of each letter."""
        intents = self._spark.read.parquet(*self._intents.files_of(run)).orderBy("number")
        fates: list[tuple[Any, ...]] = []
        waiting: dict[MessageQueue | None, str] = {}
        told_s = time.monotonic()
        with (
            Producer(GROUP, namesrv=self._namesrv, retries=0, **self._keywords) as producer,
            Admin(self._namesrv, **self._keywords) as admin,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            sender = Sender(producer, admin, f"dlq-{self._name}", self._stop, is_resumed)
            rows = iter(intents.toLocalIterator(prefetchPartitions=False))
            while block := list(islice(rows, BLOCK)):
                lanes: dict[MessageQueue | None, list[Any]] = {}
                for row in block:
                    lanes.setdefault(_queue_of(row), []).append(row)
                work = [(queue, lane) for queue, lane in lanes.items() if queue not in waiting]
                for done, unknown in pool.map(lambda one: sender.send_all(*one), work):
                    fates += [_outcome(run, row, fate) for row, fate in done]
                    if unknown is not None:
                        waiting[unknown[0]] = unknown[1]
                if self._stop.is_set():
                    self.is_stopped = True
                    self._tell(f"dlq: run {run} stopped: the next re-drive finishes it")
                    return
                if time.monotonic() - told_s > TELL_S:
                    self._tell(f"dlq: run {run}: {len(fates):,} letters sent or refused")
                    told_s = time.monotonic()
        if waiting and abandon:
            known = {fate[1] for fate in fates}
            lost = [row for row in intents.toLocalIterator() if row["letter_id"] not in known]
            fates += [_outcome(run, row, Fate(UNKNOWN, waiting[_queue_of(row)])) for row in lost]
        elif waiting:
            queue, why = next(iter(waiting.items()))
            assert queue is not None, "only what is sent can wait"
            raise PipelineFailed(
                f"dlq: nobody can say whether a letter for {queue.topic}/{queue.broker}/"
                f"{queue.queue_id} was stored ({why}), and {len(waiting)} queues wait: start the "
                "re-drive again, it goes on from there (with abandon=true such letters are closed "
                "as unknown)"
            )
        self._outcomes.write(self._spark.createDataFrame(fates, _OUTCOMES).coalesce(1), run)
        for fate in fates:
            self._counts[fate[6]] += 1
        self._tell(f"dlq: run {run}: {len(fates):,} outcomes in {self._outcomes.path}")


def _queues(admin: Admin, topic: str | None) -> tuple[MessageQueue, ...] | str:
    if not topic:
        return "the letter does not tell its origin topic"
    try:
        found = tuple(admin.topic_route(topic).to_send)
    except CometError as error:
        if not isinstance(error, NoRoute | UnknownName):
            raise
        return str(error)
    return found or f"topic {topic!r} has no queue that can be written"


def _queue_of(row: Any) -> MessageQueue | None:
    if row["number"] is None:
        return None
    return MessageQueue(row["origin_topic"], row["broker"], row["queue_id"])


def _outcome(run: int, row: Any, fate: Fate) -> tuple[Any, ...]:
    from datetime import UTC, datetime

    light = (row["letter_id"], row["group"], row["origin_topic"], row["msg_id"], row["keys"])
    place = (row["broker"], row["queue_id"], fate.queue_offset)
    return (run, *light, fate.status, fate.reason, *place, datetime.now(UTC))


class Sender:
    """Sends letters one after the other within a queue."""

    def __init__(
        self, producer: Producer, admin: Admin, name: str, stop: threading.Event, is_resumed: bool
    ) -> None:
        self._producer, self._admin = producer, admin
        self._name, self._stop, self._is_resumed = name, stop, is_resumed

    def send_all(
        self, queue: MessageQueue | None, rows: list[Any]
    ) -> tuple[list[tuple[Any, Fate]], tuple[MessageQueue, str] | None]:
        """What became of the letters; ends early when told to stop, and with the queue and the
        reason at one of which nobody knows."""
        done: list[tuple[Any, Fate]] = []
        for row in rows:
            if queue is None:
                done.append((row, Fate(row["status"], row["reason"])))
                continue
            if self._stop.is_set():
                break
            try:
                done.append((row, self.send(queue, row)))
            except Unknown as error:
                return done, (queue, str(error))
        return done, None

    def send(self, queue: MessageQueue, row: Any) -> Fate:
        """One letter, until its fate is known."""
        message = again(row, f"{self._name} {row['number']} 0")
        is_maybe_stored = False
        if self._is_resumed:  # what the run before us sent is long in the index, if it is anywhere
            try:
                at = self._find(message, queue, row["letter_id"])
            except CometError:
                is_maybe_stored = True
            else:
                if at is not None:
                    return Fate(SENT, queue_offset=at)
        wait_s, ends_s = FIRST_WAIT_S, time.monotonic() + PATIENCE_S
        while True:
            try:
                result = self._producer.send(message, queue=queue)
            except UsageError as error:
                return Fate(FAILED, str(error))
            except (SendFailed, NoRoute) as error:
                why = str(error)
                if isinstance(error, SendFailed):
                    is_maybe_stored = is_maybe_stored or error.is_maybe_stored
                    is_final = error.code is not None and error.code not in _MAYBE_LATER
                    if is_final and not is_maybe_stored:
                        return Fate(FAILED, why)
                if time.monotonic() >= ends_s or self._stop.is_set():
                    if is_maybe_stored:
                        raise Unknown(why) from None
                    return Fate(FAILED, why)
                self._stop.wait(wait_s)
                wait_s = min(wait_s * 2, MOST_WAIT_S)
                at = self._find_or_none(message, queue, row) if is_maybe_stored else None
                if at is not None:
                    return Fate(SENT, queue_offset=at)
                continue
            if not result.is_duplicate:
                return Fate(SENT, queue_offset=result.queue_offset)
            return Fate(SENT, queue_offset=self._find_soon(message, queue, row))

    def _find_soon(self, message: Message, queue: MessageQueue, row: Any) -> int | None:
        """Of one that is stored for certain: brokers write their index a moment later."""
        for wait_s in (0.0, 0.1, 0.5):
            self._stop.wait(wait_s)
            at = self._find_or_none(message, queue, row)
            if at is not None:
                return at
        return None

    def _find_or_none(self, message: Message, queue: MessageQueue, row: Any) -> int | None:
        try:
            return self._find(message, queue, row["letter_id"])
        except CometError:
            return None  # a broker that numbers tells duplicates anyway

    def _find(self, message: Message, queue: MessageQueue, letter_id: str) -> int | None:
        """The offset of the letter in its new place, if it is there. The original has the same
        unique id: only the property tells which is which."""
        broker = self._admin.topic_route(message.topic).brokers.get(queue.broker)
        address = None if broker is None else broker.leader or broker.any
        if address is None:
            raise NoRoute(message.topic, f"broker {queue.broker} is not registered")
        session = self._admin._inner.session
        wire_topic, key = session.wrap(message.topic), message.unique_id
        copies = background.run(find_by_key(session, queue.broker, address, wire_topic, key))
        for one in copies:
            is_there = (one.broker, one.queue_id) == (queue.broker, queue.queue_id)
            if is_there and one.properties.get(RESENT_FROM) == letter_id:
                return one.queue_offset
        return None


def again(row: Any, sequence: str) -> Message:
    """The message that a letter was, without what happened to it, and with what it is now."""
    before: dict[str, str] = row["properties"] or {}
    kept = {
        name: value
        for name, value in before.items()
        if name not in OWN_NAMES and name not in _OF_ITS_DEATH
    }
    kept |= {
        PRODUCER_SEQ: sequence,
        RESENT_FROM: row["letter_id"],
        REDRIVES: str(row["redrives"] + 1),
    }
    return Message(
        row["origin_topic"],
        bytes(row["body"]),
        tags=row["tags"] or "",
        keys=row["keys"] or "",
        properties=kept,
        sharding_key=before.get(SHARDING_KEY, ""),
        unique_id=row["msg_id"],
    )


class Lock:
    """One re-drive of a table at a time: two would give the same number to different letters."""

    NAME = "lock"

    def __init__(self, files: Files) -> None:
        self._files = files

    def __enter__(self) -> None:
        mine = {"host": platform.node(), "pid": os.getpid()}
        text = json.dumps(mine).encode()
        if self._files.claim(self.NAME, text):
            return
        other = self._other()
        if other.get("host") == mine["host"] and not is_alive(other.get("pid")):
            self._files.delete(self.NAME)
            if self._files.claim(self.NAME, text):
                return
        raise UsageError(
            f"another re-drive is at this table: process {other.get('pid')} on "
            f"{other.get('host')}. If it is not, delete {self._files.at(self.NAME)}"
        )

    def __exit__(self, *_: object) -> None:
        self._files.delete(self.NAME)

    def _other(self) -> dict[str, Any]:
        try:
            found = json.loads(self._files.read(self.NAME))
        except Exception:  # it went away, or is being written
            return {}
        return found if isinstance(found, dict) else {}
