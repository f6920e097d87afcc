"""Wrong variants of pop, deduplication, sequences and expiry that the simulated cluster must catch;
see mutants.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from cometmq.broker import dedup, expired, send, ttl
from cometmq.broker.dedup import Dedup
from cometmq.broker.expired import Expired
from cometmq.broker.pop_order import OrderedPops
from cometmq.broker.pop_places import Places
from cometmq.broker.pop_revive import Revive
from cometmq.broker.pop_state import Pop
from cometmq.broker.proven import ProvenFile
from cometmq.broker.requests import TABLE
from cometmq.broker.sequences import Sequences
from cometmq.wire.codes import RequestCode

sys.path.insert(0, str(Path(__file__).parent))
from kind_mutants import SAFE, KindMutant

# ------------------------------------------------------------------------------------------- pop


def every_third_forgotten(real: Any) -> Any:
    """What nobody acknowledged is not stored again."""

    def back(self: Revive, broker: Any, point: Any, offset: int, *rest: Any) -> None:
        if offset % 3:
            real(self, broker, point, offset, *rest)

    return back


def acks_not_read(real: Any) -> Any:
    return lambda self, queue, ack: None


def no_checkpoint(real: Any) -> Any:
    """Some messages are given out without anything that brings them back."""

    def put_checkpoint(self: Pop, broker: Any, queue_id: int, point: Any, now_ms: int) -> int:
        if point.start % 3 == 0:
            return int(broker.store.max_log_offset)
        return int(real(self, broker, queue_id, point, now_ms))

    return put_checkpoint


def noted_at_once(real: Any) -> Any:
    """A group's offset is noted before the checkpoint that makes up for it is durable."""
    return lambda self, flushed, commit: real(self, 2**62, commit)


def ack_not_kept(real: Any) -> Any:
    """An acknowledgement is answered, and some are not stored."""

    def put_ack(self: Pop, broker: Any, queue_id: int, ack: Any, *rest: Any) -> int:
        if ack.start % 3 == 0:
            return int(broker.store.flushed_offset)
        return int(real(self, broker, queue_id, ack, *rest))

    return put_ack


def try_not_counted(real: Any) -> Any:
    def copy(self: Revive, broker: Any, point: Any, stored: Any, *, is_dead: bool) -> Any:
        message = real(self, broker, point, stored, is_dead=is_dead)
        message.reconsume_times = stored.reconsume_times
        return message

    return copy


def back_early(real: Any) -> Any:
    """A checkpoint is judged when it is read, a second before its time."""

    def judge(self: Revive, broker: Any, now_ms: int, out: Any) -> None:
        self._proven_ms = now_ms + 1_000
        real(self, broker, now_ms, out)

    return judge


def acks_not_waited_for(real: Any) -> Any:
    """A checkpoint is judged at its time, whether its acks have come or not."""

    def prove(self: Revive, broker: Any, now_ms: int) -> None:
        self._proof = None
        self._proven_ms = max(self._proven_ms, now_ms)

    return prove


def old_receipt_stays(real: Any) -> Any:
    """A changed invisible time does not end the former one."""

    def change(broker: Any, call: Any) -> Any:
        with mock.patch.object(broker.pop, "put_ack", lambda *args: broker.store.flushed_offset):
            return real(broker, call)

    return change


def never_blocked(real: Any) -> Any:
    return lambda self, place, attempt, now_ms: 0


def one_ends_all(real: Any) -> Any:
    """The first ack of an ordered pop is taken for all of them."""

    def acked(self: OrderedPops, place: Any, offset: int, pop_ms: int, now_ms: int) -> int:
        following = int(real(self, place, offset, pop_ms, now_ms))
        out = self.get(place)
        return following if following < 0 or out is None else out.offsets[-1] + 1

    return acked


def times_forgotten(real: Any) -> Any:
    def given_out(self: OrderedPops, *args: Any) -> Any:
        real(self, *args)
        return {}, 0

    return given_out


# --------------------------------------------------------------------------------- dedup, sequences


def keys_of_this_start(real: Any) -> Any:
    """The window is not read from the log again."""

    def in_index(broker: Any, topic: str, key: str, since_ms: int) -> Any:
        first = real(broker, topic, key, since_ms)
        is_old = first is not None and first.log_offset < broker.expired._boot_end
        return None if is_old else first

    return in_index


def index_alone(real: Any) -> Any:
    """What the index does not know yet is not compared."""

    def stored(self: Dedup, *args: Any, **more: Any) -> Any:
        first = real(self, *args, **more)
        self._recent.clear()
        return first

    return stored


def known_at_once(real: Any) -> Any:
    """A duplicate is answered though the first one is not durable."""

    def known_before(
        broker: Any, call: Any, header: Any, firsts: Any, *rest: Any, **more: Any
    ) -> Any:
        firsts = [msgspec.structs.replace(one, end_offset=0) for one in firsts]
        return real(broker, call, header, firsts, *rest, **more)

    return known_before


def file_ahead(real: Any) -> Any:
    """What the file says is not only of the part of the log that it speaks for."""

    def tick(self: ProvenFile, end: int, flushed: int, now_ms: int, **more: Any) -> None:
        real(self, flushed, flushed, now_ms, **more)

    return tick


def log_not_read(real: Any) -> Any:
    """At a start the file alone is believed."""
    return lambda self, store, begin, forgotten: None


def stored_again(real: Any) -> Any:
    """A number that was the last is taken for the next."""

    def stored_already(self: Sequences, topic: str, queue_id: int, run: Any, now_ms: int) -> int:
        found = int(real(self, topic, queue_id, run, now_ms))
        return found if found < run.count or run.n % 3 else found - 1

    return stored_already


def number_at_once(real: Any) -> Any:
    """A repeated number is answered though it is not durable."""

    def last(self: Sequences, *args: Any) -> Any:
        return msgspec.structs.replace(real(self, *args), end_offset=0)

    return last


# --------------------------------------------------------------------------------------------- ttl


def served_anyway(real: Any) -> Any:
    return lambda view, now_ms: False


def kept_back_early(real: Any) -> Any:
    return lambda view, now_ms: real(view, now_ms + 1_000)


def moved_again(real: Any) -> Any:
    """What a start finds expired is moved, whether it was before or not."""
    return lambda broker, target, stored, until_ms: False


def not_moved(real: Any) -> Any:
    def move(self: Expired, broker: Any, topic: str, queue_id: int, offset: int, *rest: Any) -> Any:
        return real(self, broker, topic, queue_id, offset, *rest) if offset % 3 else None

    return move


CHANGE = TABLE[RequestCode.CHANGE_MESSAGE_INVISIBLETIME]
POP, ORDER = ("pop",), ("pop_ordered",)
CRASHES = ("kill", "power")

MUTANTS = (
    KindMutant("revive forgets some", Revive, "_back", every_third_forgotten, POP, 5),
    KindMutant("acks are not read", Revive, "_match", acks_not_read, POP, 5),
    KindMutant("no checkpoint for some", Pop, "put_checkpoint", no_checkpoint, POP, 5),
    KindMutant(
        "pop noted before its checkpoint is durable",
        Places,
        "release",
        noted_at_once,
        POP,
        10,
        "ASYNC_FLUSH",
        ("queues_ahead", "slow_sync"),
        first=20,
    ),
    KindMutant("an ack answered and not kept", Pop, "put_ack", ack_not_kept, POP, 5),
    KindMutant("a pop's try is not counted", Revive, "_copy", try_not_counted, POP, 5),
    KindMutant("back a second early", Revive, "_judge", back_early, POP, 5),
    KindMutant("acks are not waited for", Revive, "_prove", acks_not_waited_for, POP, 10),
    KindMutant("a changed receipt stays good", CHANGE, "handler", old_receipt_stays, POP, 5),
    KindMutant(
        "an ordered queue is never taken", OrderedPops, "blocked_until", never_blocked, ORDER, 5
    ),
    KindMutant("one ordered ack ends all", OrderedPops, "acked", one_ends_all, ORDER, 10),
    KindMutant("ordered tries forgotten", OrderedPops, "given_out", times_forgotten, ORDER, 5),
    KindMutant(
        "keys are forgotten at a start",
        dedup,
        "_in_index",
        keys_of_this_start,
        ("dedup",),
        5,
        "",
        ("kill",),
    ),
    KindMutant(
        "keys only from the index",
        Dedup,
        "stored",
        index_alone,
        ("dedup",),
        10,
        SAFE,
        ("slow_sync",),
    ),
    KindMutant(
        "a duplicate answered before it is durable",
        send,
        "_known_before",
        known_at_once,
        ("dedup",),
        10,
        SAFE,
        ("slow_sync",),
    ),
    KindMutant(
        "sequences ahead of the log",
        ProvenFile,
        "tick",
        file_ahead,
        ("sequences",),
        10,
        "ASYNC_FLUSH",
        ("queues_ahead", "slow_sync"),
        first=3,
    ),
    KindMutant(
        "sequences not read from the log",
        Sequences,
        "_read",
        log_not_read,
        ("sequences",),
        5,
        "",
        CRASHES,
    ),
    KindMutant("a number again", Sequences, "stored_already", stored_again, ("sequences",), 5),
    KindMutant(
        "a number answered before it is durable",
        Sequences,
        "last",
        number_at_once,
        ("sequences",),
        10,
        SAFE,
        ("slow_sync",),
    ),
    KindMutant("expired and served", ttl, "is_stale", served_anyway, ("ttl",), 5),
    KindMutant("expired a second early", ttl, "is_stale", kept_back_early, ("ttl",), 5),
    KindMutant(
        "expired, moved again", expired, "_is_there", moved_again, ("ttl",), 10, "", CRASHES
    ),
    KindMutant("expired, not moved", Expired, "_move", not_moved, ("ttl",), 5),
)
