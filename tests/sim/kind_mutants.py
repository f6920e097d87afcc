"""Wrong variants of the message kinds that the simulated cluster must catch; see mutants.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec

from cometmq.broker import delay, half, reply, retry, send, timed
from cometmq.broker.delay import Delay, real_message
from cometmq.broker.half import Half
from cometmq.broker.members import Members
from cometmq.broker.offsets import Offsets
from cometmq.broker.requests import TABLE
from cometmq.broker.sql92 import SqlFilter
from cometmq.broker.timers import Timers
from cometmq.requests import Reply
from cometmq.wire import properties
from cometmq.wire.codes import RequestCode


@dataclass(frozen=True)
class KindMutant:
    """As mutants.Mutant: one name replaced by what `make` builds from the real one, in runs with
    these kinds."""

    name: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    kinds: tuple[str, ...]
    within: int
    flush: str = ""
    always: tuple[str, ...] = ()
    first: int = 0
    """The seed to begin with, where the first ones are known to show nothing."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        wrong = self.make(getattr(self.owner, self.attribute))
        with mock.patch.object(self.owner, self.attribute, wrong):
            yield


# ---------------------------------------------------------------------------------------- levels


def second_early(real: Any) -> Any:
    """A level is looked at as if it were a second later."""

    def look(self: Delay, broker: Any, level: int, end: int, now_ms: int) -> Any:
        due_ms = real(self, broker, level, end, now_ms)
        if due_ms is not None:
            self._due[level] = due_ms = due_ms - 1_000
        return due_ms

    return look


def first_queue(real: Any) -> Any:
    """The queue that was asked for is forgotten on the way."""

    def real_message(stored: Any) -> Any:
        message = real(stored)
        if message is not None:
            message.queue_id = 0
        return message

    return real_message


def pairs_swapped(real: Any) -> Any:
    """Every fourth message of a level changes places with the next."""

    def deliver(self: Delay, broker: Any, level: int, now_ms: int) -> bool:
        offset = self.offsets.get(level, 0)
        end = broker.store.max_offset("SCHEDULE_TOPIC_XXXX", level - 1)
        if offset % 4 == 0 and offset + 1 < end:
            self.offsets[level] = offset + 1
            done = real(self, broker, level, now_ms)
            self.offsets[level], self._due[level] = offset, now_ms
            real(self, broker, level, now_ms)
            self.offsets[level] = offset + 2
            return bool(done)
        return bool(real(self, broker, level, now_ms))

    return deliver


def noted_ahead(real: Any) -> Any:
    """What is delivered is noted before it is durable."""

    def prove(self: Delay, store: Any, now_ms: int) -> None:
        if self.offsets != self._safe:
            self._safe = dict(self.offsets)
            self.file.changed(now_ms)

    return prove


def half_a_second_late(real: Any) -> Any:
    return lambda self, broker, now_ms: real(self, broker, now_ms) + 500


# ---------------------------------------------------------------------------------------- timers


def slot_early(real: Any) -> Any:
    """The slot before the right one."""

    def slot_for(config: Any, topic: str, text: str, now_ms: int) -> Any:
        slot_ms = real(config, topic, text, now_ms)
        return None if slot_ms is None else slot_ms - config.timer_precision_ms

    return slot_for


def roll_loses(real: Any) -> Any:
    """A message that should be stored again on its way is not."""

    def leave_one(self: Timers, broker: Any, leaving: Any, now_ms: int) -> bool:
        unit = self._log.unit(leaving.positions[-1])
        if unit is not None and unit.magic & 2 and unit.log_offset % 3 == 0:
            return True
        return bool(real(self, broker, leaving, now_ms))

    return leave_one


def checked_ahead(real: Any) -> Any:
    """The checkpoint is written though neither wheel nor messages are durable."""

    def take_flush(self: Timers, broker: Any, now_ms: int, out: Any) -> None:
        if self._is_unproven:
            self._log.take_dirty()
            if self._wheel is not None:
                self._wheel.is_dirty = False
            self._check = self._next_check(now_ms)
            self._check_file.changed(now_ms)

    return take_flush


def recall_ignored(real: Any) -> Any:
    """The marker of a recall is stored and does nothing."""

    def read_unit(self: Timers, broker: Any, leaving: Any, now_ms: int) -> None:
        real(self, broker, leaving, now_ms)
        leaving.deleted.clear()

    return read_unit


def queue_not_entered_first(real: Any) -> Any:
    """After a start slots are read before what stands in the queue has entered them."""

    def leave(self: Timers, broker: Any, now_ms: int) -> None:
        self._enter_upto = 0
        real(self, broker, now_ms)

    return leave


# --------------------------------------------------------------------------------------- retries


def not_counted(real: Any) -> Any:
    """The number of tries stays as it was."""

    def send_back(broker: Any, call: Any) -> Any:
        put = broker.put

        def less(message: Any, now_ms: int, *, is_due: bool) -> Any:
            message.reconsume_times -= 1
            return put(message, now_ms, is_due=is_due)

        with mock.patch.object(broker, "put", less):
            return real(broker, call)

    return send_back


def dead_twice(real: Any) -> Any:
    """A dead letter is stored twice."""

    def send_back(broker: Any, call: Any) -> Any:
        put = broker.put

        def double(message: Any, now_ms: int, *, is_due: bool) -> Any:
            if message.topic.startswith("%DLQ%"):
                put(msgspec.structs.replace(message), now_ms, is_due=is_due)
            return put(message, now_ms, is_due=is_due)

        with mock.patch.object(broker, "put", double):
            return real(broker, call)

    return send_back


def one_more_try(real: Any) -> Any:
    return lambda group, asked, version: real(group, asked, version) + 1


def back_without_message(real: Any) -> Any:
    """A consumer is told that its message is kept, and every fifth is not."""

    def send_back(broker: Any, call: Any) -> Any:
        return Reply() if call.header.offset % 5 == 0 else real(broker, call)

    return send_back


# ---------------------------------------------------------------------------------- transactions


def at_once(real: Any) -> Any:
    """A half goes to its topic like any message."""
    return lambda message, unique_key: None


def committed_anyway(real: Any) -> Any:
    """A rollback is taken for a commit."""

    def end(self: Half, broker: Any, at: int, message: Any, now_ms: int) -> Any:
        if message is None:
            stored = half._read(broker.store, "RMQ_SYS_TRANS_HALF_TOPIC", at)
            if stored is not None:
                message = real_message(stored)
                message.sys_flag = message.sys_flag & ~12 | 8
        return real(self, broker, at, message, now_ms)

    return end


def ended_again(real: Any) -> Any:
    """Whether a half was ended before is not asked of the log."""
    return lambda self, store, stored: False


def no_op_record(real: Any) -> Any:
    """The end of a half is not written down."""

    def put_ended(
        self: Half, broker: Any, at: int, message: Any, now_ms: int, *, is_by_producer: bool = False
    ) -> Any:
        if not is_by_producer or message is None:
            return real(self, broker, at, message, now_ms, is_by_producer=is_by_producer)
        return broker.put(message, now_ms, is_due=False)

    return put_ended


def wrong_group(real: Any) -> Any:
    """Whoever is connected is asked, of whatever group."""

    def ask(self: Half, broker: Any, one: Any, table: Any, appended: Any, out: Any) -> None:
        groups = sorted(broker.members.producers)
        table = {**table, properties.PRODUCER_GROUP: groups[-1] if groups else ""}
        real(self, broker, one, table, appended, out)

    return ask


def asked_for_ever(real: Any) -> Any:
    """The number of questions is not counted."""

    def check(self: Half, broker: Any, stored: Any, now_ms: int, out: Any) -> bool:
        text = stored.properties.replace("TRANSACTION_CHECK_TIMES", "FORGOTTEN_CHECK_TIMES__")
        return bool(
            real(self, broker, msgspec.structs.replace(stored, properties=text), now_ms, out)
        )

    return check


def given_up_early(real: Any) -> Any:
    """One question less than is set."""

    def check(self: Half, broker: Any, stored: Any, now_ms: int, out: Any) -> bool:
        most = broker.config.transaction_check_max
        config = msgspec.structs.replace(broker.config, transaction_check_max=most - 1)
        with mock.patch.object(broker, "config", config):
            return bool(real(self, broker, stored, now_ms, out))

    return check


def saved_ahead(real: Any) -> Any:
    """Halves are left behind before what ended them is durable."""

    def is_safe(self: Half, store: Any) -> bool:
        return True

    return is_safe


# ------------------------------------------------------------------------------- sql, order, reply


def unknown_passes(real: Any) -> Any:
    """An expression lets pass what it can't decide."""

    def accepts_record(self: Any, *args: Any) -> bool:
        return real(self, *args) or "color" not in args[0]

    return accepts_record


def pushed_twice(real: Any) -> Any:
    def push(broker: Any, call: Any, header: Any, client: Any, answer: Any) -> None:
        real(broker, call, header, client, answer)
        call.out.append(call.out[-1])

    return push


def told_at_once(real: Any) -> Any:
    """The sender of a reply hears yes before the other end has it."""

    def push(broker: Any, call: Any, header: Any, client: Any, answer: Any) -> None:
        real(broker, call, header, client, answer)
        call.answer(answer, call.out)

    return push


def any_client(real: Any) -> Any:
    """A reply goes to whoever produces."""

    def producer_of(self: Members, client_id: str) -> Any:
        return next(reversed(self._producer_clients.values()), None)

    return producer_of


def two_ahead(real: Any) -> Any:
    """Whoever takes a queue over begins two messages later."""

    def get(self: Offsets, topic: str, group: str, queue_id: int) -> int | None:
        offset = real(self, topic, group, queue_id)
        return offset + 2 if offset and topic == "KOrdered" else offset

    return get


SAFE = "SYNC_FLUSH"
BACK = TABLE[RequestCode.CONSUMER_SEND_MSG_BACK]

MUTANTS = (
    KindMutant("levels a second early", Delay, "_look", second_early, ("levels",), 5),
    KindMutant("levels forget the queue", delay, "real_message", first_queue, ("levels",), 5),
    KindMutant("levels out of order", Delay, "_deliver", pairs_swapped, ("levels",), 10),
    KindMutant(
        "levels noted before they are durable",
        Delay,
        "_prove",
        noted_ahead,
        ("levels",),
        10,
        "ASYNC_FLUSH",
        ("queues_ahead", "slow_sync"),
    ),
    KindMutant("levels half a second late", Delay, "next_ms", half_a_second_late, ("levels",), 5),
    KindMutant("timers a slot early", timed, "slot_for", slot_early, ("timers",), 5),
    KindMutant("a roll loses one", Timers, "_leave_one", roll_loses, ("timers",), 10),
    KindMutant(
        "timers checked before they are durable",
        Timers,
        "_take_flush",
        checked_ahead,
        ("timers",),
        30,
        "",
        ("power", "everything"),
    ),
    KindMutant("a recall does nothing", Timers, "_read_unit", recall_ignored, ("timers",), 10),
    KindMutant(
        "slots read before the queue has entered",
        Timers,
        "_leave",
        queue_not_entered_first,
        ("timers",),
        10,
        "",
        ("kill", "power"),
        first=20,
    ),
    KindMutant("tries are not counted", BACK, "handler", not_counted, ("retries",), 5),
    KindMutant("a dead letter twice", BACK, "handler", dead_twice, ("retries",), 5),
    KindMutant("one try too many", retry, "most_times", one_more_try, ("retries",), 5),
    KindMutant("sent back, and not kept", BACK, "handler", back_without_message, ("retries",), 5),
    KindMutant("a half seen at once", send, "as_half", at_once, ("transactions",), 5),
    KindMutant("a rollback commits", Half, "end", committed_anyway, ("transactions",), 5),
    KindMutant(
        "a half ended again after a crash",
        Half,
        "_is_committed",
        ended_again,
        ("transactions",),
        20,
        "",
        ("kill",),
        first=5,
    ),
    KindMutant(
        "an end without its op record", Half, "_put_ended", no_op_record, ("transactions",), 10
    ),
    KindMutant("the wrong group is asked", Half, "_ask", wrong_group, ("transactions",), 10),
    KindMutant("questions are not counted", Half, "_check", asked_for_ever, ("transactions",), 5),
    KindMutant("given up too early", Half, "_check", given_up_early, ("transactions",), 5),
    KindMutant(
        "halves left behind too early",
        Half,
        "_is_safe",
        saved_ahead,
        ("transactions",),
        15,
        SAFE,
        ("power", "slow_sync"),
        first=60,
    ),
    KindMutant("what is unknown passes", SqlFilter, "accepts_record", unknown_passes, ("sql",), 10),
    KindMutant("a reply twice", reply, "_push", pushed_twice, ("replies",), 5),
    KindMutant("a reply believed at once", reply, "_push", told_at_once, ("replies",), 5),
    KindMutant("a reply to anybody", Members, "producer_of", any_client, ("replies",), 10),
    KindMutant("an offset skips ahead", Offsets, "get", two_ahead, ("ordered",), 20, first=5),
)
