"""Wrong variants of the product that the simulated cluster must catch.

One rule: a mutant is a mistake somebody could make, in one place; a mutant that lives is a missing
checker. Each says within how many seeds, counted from 0, it is caught; `flush` and `always` pin the
kind of run in which the mistake can show at all, everything else is left to the seed. The simulator
was ordered with the first five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cometmq.broker.broker import Broker
from cometmq.broker.holds import Holds
from cometmq.broker.locks import QueueLocks
from cometmq.broker.members import ConsumerGroup, Members
from cometmq.broker.offsets import Offsets
from cometmq.nameserver.routes import Routes
from cometmq.nameserver.settings import Settings
from cometmq.ports import Out
from cometmq.requests import Call, Reply
from cometmq.store import commit_log
from cometmq.store.consume_queue import ConsumeQueue
from cometmq.store.flush import FlushPlan
from cometmq.store.key_index import KeyIndex
from cometmq.store.recovery import Recovery
from cometmq.store.segment import Segment
from cometmq.store.store import Store

Patch = Callable[[], Any]


@dataclass(frozen=True)
class Mutant:
    name: str
    patches: tuple[Patch, ...]
    within: int
    flush: str = ""
    always: tuple[str, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch())
            yield


def _method(owner: type, name: str, make: Callable[[Any], Any]) -> Patch:
    """Replace a method by what `make` builds from the real one."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


# ------------------------------------------------------------------------------------------ broker


def _ack_at_once(real: Any) -> Any:
    def acknowledge(
        self: Broker, call: Call, reply: Reply, end_offset: int, topic: str, text: str
    ) -> Reply | None:
        return real(self, call, reply, 0, topic, text)

    return acknowledge


def _commit_one_more(real: Any) -> Any:
    def commit(
        self: Offsets, topic: str, group: str, queue_id: int, offset: int, now_ms: int, peer: str
    ) -> None:
        real(self, topic, group, queue_id, offset + 1, now_ms, peer)

    return commit


def _forget_third_parked(real: Any) -> Any:
    def release(self: Broker, now_ms: int, out: Out) -> None:
        if len(self._parked) >= 3:
            del self._parked[2]
        real(self, now_ms, out)

    return release


def _no_clamp(real: Any) -> Any:
    return lambda self, now_ms: None


def _lose_due_holds(real: Any) -> Any:
    def due(self: Holds, now_ms: int) -> Any:
        return real(self, now_ms)[1:]

    return due


def _lock_for_anybody(real: Any) -> Any:
    """Whoever asks last owns a queue, as if the others had let go."""

    def lock(
        self: QueueLocks, group: str, topic: str, queue_id: int, client_id: str, now_ms: int
    ) -> bool:
        self._groups.get(group, {}).pop((topic, queue_id), None)
        return bool(real(self, group, topic, queue_id, client_id, now_ms))

    return lock


def _lack_the_last_member(real: Any) -> Any:
    """The list of a group's members ends one too early."""
    return lambda self: real(self)[:-1] if len(self.members) > 2 else real(self)


def _keep_who_left(real: Any) -> Any:
    """A lost connection stays a member."""
    return lambda self, conn: []


# ------------------------------------------------------------------------------------------- store


def _no_crc(real: Any) -> Any:
    def scan(buffer: Any, at: int, end: int, *, verify_crc: bool) -> Any:
        return real(buffer, at, end, verify_crc=False)

    return scan


def _prove_what_is_written_now(real: Any) -> Any:
    def done(self: FlushPlan, kind: str) -> None:
        real(self, kind)
        if kind == "log":
            self._log.flushed_at = self._log.write_at

    return done


def _believe_a_failed_flush(real: Any) -> Any:
    return lambda self, kind, reason, now_ms: self.flushed(kind, now_ms)


def _leave_stale_bytes(real: Any) -> Any:
    return lambda self, at, *, is_durable=True: None


def _number_from_units(real: Any) -> Any:
    """After recovery numbering goes on one too early."""

    def settle(self: Recovery, end: int, report: Any) -> None:
        real(self, end, report)
        for queue in self._queues:
            queue.ends.next_offset = max(queue.ends.next_offset - 1, 0)

    return settle


def _index_forgets_at_a_new_file(real: Any) -> Any:
    def put(
        self: KeyIndex, topic: str, keys: list[str], log_offset: int, store_ms: int, now_ms: int
    ) -> None:
        if self.items and self.items[-1].is_full:
            self._add(now_ms)
            return
        real(self, topic, keys, log_offset, store_ms, now_ms)

    return put


def _unit_of_the_next_record(real: Any) -> Any:
    """Now and then a unit tells a size that is not its record's."""

    def put(self: ConsumeQueue, index: int, log_offset: int, size: int, tags_code: int) -> bool:
        return bool(real(self, index, log_offset, size + (index % 50 == 49), tags_code))

    return put


def _forget_brokers(real: Any) -> Any:
    """The name server takes any lost connection for the broker's own."""

    def keys_of(self: Routes, conn: Any) -> Any:
        return real(self, conn) or list(self.members)

    return keys_of


def _dispatch_all(real: Any) -> Any:
    """Units are written, and shown, before their records are durable."""

    def dispatch(self: Store, now_ms: int) -> Any:
        flushed, self._log.flushed_at = self._log.flushed_at, self._log.write_at
        try:
            return real(self, now_ms)
        finally:
            self._log.flushed_at = flushed

    return dispatch


def _keep_tail_of_log(real: Any) -> Any:
    """Recovery believes what it read, without making it durable."""

    def cut(self: Recovery, end: int, report: Any, *, is_clean: bool) -> None:
        segment = self._log.segments.find(end)
        if segment is not None:
            segment.zero_from(end - segment.start, is_durable=False)

    return cut


def _drop_before_units_are_safe(real: Any) -> Any:
    """Cleaning asks whether the log is durable, and not whether its queues are."""

    def clean(self: Store, now_ms: int, force: bool = False) -> Any:
        self._flush.queues_at = self._log.flushed_at
        return real(self, now_ms, force)

    return clean


def _keep_units_of_lost_records(real: Any) -> Any:
    """Recovery cuts the log and leaves the queues as they are."""
    return lambda self, log_offset: False


def _believe_a_failed_save(real: Any) -> Any:
    """The name server takes a Save that failed for one that worked."""
    return lambda self, reason, out: real(self, None, out)


def _forget_settings(real: Any) -> Any:
    """The name server answers before its file is written."""

    def when_saved(self: Settings, call: Call, is_changed: bool) -> Any:
        real(self, call, is_changed)
        return Reply()

    return when_saved


MUTANTS = (
    Mutant(
        "ack before durable",
        (_method(Broker, "acknowledge", _ack_at_once),),
        within=5,
        flush="SYNC_FLUSH",
        always=("power", "slow_sync"),
    ),
    Mutant(
        "skip CRC at recovery",
        (lambda: mock.patch.object(commit_log.record, "scan", _no_crc(commit_log.record.scan)),),
        within=40,
        always=("power", "everything", "flip"),
    ),
    Mutant(
        "queue unit before record",
        (_method(Store, "dispatch", _dispatch_all),),
        within=5,
        flush="SYNC_FLUSH",
        always=("power", "slow_sync"),
    ),
    Mutant(
        "offset commit beyond end",
        (_method(Offsets, "commit", _commit_one_more),),
        within=5,
    ),
    Mutant(
        "drop a parked reply",
        (_method(Broker, "_release_flushed", _forget_third_parked),),
        within=5,
        flush="SYNC_FLUSH",
    ),
    Mutant(
        "a flush proves what was written meanwhile",
        (_method(FlushPlan, "done", _prove_what_is_written_now),),
        within=15,
        flush="SYNC_FLUSH",
        always=("power", "slow_sync"),
    ),
    Mutant(
        "go on after a failed sync",
        (_method(Store, "flush_failed", _believe_a_failed_flush),),
        within=5,
        flush="SYNC_FLUSH",
        always=("power", "failed_sync"),
    ),
    Mutant(
        "recovery leaves stale bytes behind the end",
        (_method(Segment, "zero_from", _leave_stale_bytes),),
        within=10,
        always=("power", "everything"),
    ),
    Mutant(
        "numbers given twice after recovery",
        (_method(Recovery, "_settle", _number_from_units),),
        within=5,
        always=("kill",),
    ),
    Mutant(
        "index loses a key at each new file",
        (_method(KeyIndex, "put", _index_forgets_at_a_new_file),),
        within=5,
    ),
    Mutant(
        "groups keep offsets beyond a cut end",
        (_method(Broker, "_clamp_offsets", _no_clamp),),
        within=60,
        flush="ASYNC_FLUSH",
        always=("power",),
    ),
    Mutant(
        "a held pull is never answered",
        (_method(Holds, "due", _lose_due_holds),),
        within=10,
    ),
    Mutant(
        "units with a wrong size",
        (_method(ConsumeQueue, "put", _unit_of_the_next_record),),
        within=30,
    ),
    Mutant(
        "any lost connection removes all brokers",
        (_method(Routes, "keys_of", _forget_brokers),),
        within=10,
        always=("client_kill", "reset"),
    ),
    Mutant(
        "log files dropped before their units are safe",
        (_method(Store, "clean", _drop_before_units_are_safe),),
        within=15,
        always=("fill", "power", "everything"),
    ),
    Mutant(
        "a name server's settings acknowledged before they are saved",
        (_method(Settings, "_when_saved", _forget_settings),),
        within=20,
        always=("everything", "slow_sync"),
    ),
    Mutant(
        "a name server believes a failed save",
        (_method(Settings, "saved", _believe_a_failed_save),),
        within=30,
        always=("everything", "failed_sync", "full"),
    ),
    Mutant(
        "queues keep units of records that are lost",
        (_method(ConsumeQueue, "cut", _keep_units_of_lost_records),),
        within=30,
        flush="ASYNC_FLUSH",
        always=("queues_ahead",),
    ),
    Mutant(
        "a lock is given to whoever asks",
        (_method(QueueLocks, "lock", _lock_for_anybody),),
        within=10,
        always=("lock", "client_kill"),
    ),
    Mutant(
        "the list of members lacks the last",
        (_method(ConsumerGroup, "client_ids", _lack_the_last_member),),
        within=10,
    ),
    Mutant(
        "a lost connection stays a member",
        (_method(Members, "drop", _keep_who_left),),
        within=10,
        always=("client_kill",),
    ),
    Mutant(
        "recovery does not sync what it keeps",
        (_method(Recovery, "_cut_log", _keep_tail_of_log),),
        within=10,
        always=("kill", "power"),
    ),
)
