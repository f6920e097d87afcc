"""Points inside what the broker does with message kinds: delays, timers, retries, transactions.

Owns: the list of these points. One rule: that of points.py, whose tools it uses: the product knows
nothing of this. Each stands between two steps that a crash may part, and its docstring or name says
which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from points import Install, Point, Trap, after, at_sync, at_turn, before, new_file, soon

KIND_POINTS: dict[str, Point] = {}


def kind_point(
    name: str,
    when: str = "load",
    nth: int = 1,
    *,
    is_plain: bool = False,
    is_compiled: bool = False,
) -> Callable[[Install], Install]:
    def add(install: Install) -> Install:
        KIND_POINTS[name] = Point(name, when, nth, install, is_plain, is_compiled)
        return install

    return add


def is_file(ending: str) -> Callable[..., bool]:
    return lambda files, name, content: name.endswith(ending)


def at_save(ending: str, wrap: Callable[..., None]) -> Install:
    def install(trap: Trap) -> None:
        from cometmq.store.files import RealFiles

        wrap(RealFiles, "replace", trap, is_file(ending))

    return install


def stored_in(topic: str) -> Install:
    """A message of this topic is in the log; nobody knows yet."""

    def install(trap: Trap) -> None:
        from cometmq.store.store import Store

        after(Store, "append", trap, lambda store, message, now_ms: message.topic == topic)

    return install


def some_done(name: str, count_of: Callable[[Any], int]) -> Install:
    """Compiled code has done something for several messages, and nobody has noted it."""

    def install(trap: Trap) -> None:
        from cometmq.store.store import Store

        original = getattr(Store, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            done = original(*args, **options)
            if count_of(done):
                trap.hit()
            return done

        setattr(Store, name, wrapped)

    return install


# ------------------------------------------------------------------------------------- delay levels

kind_point("delay-kept", nth=20, is_plain=True)(stored_in("SCHEDULE_TOPIC_XXXX"))
kind_point("delays-during", nth=40, is_compiled=True)(at_turn("deliver_level", soon))
kind_point("delays-delivered", nth=10, is_compiled=True)(some_done("deliver_level", int))
kind_point("delay-before-save", nth=2)(at_save("delayOffset.json", before))
kind_point("delay-saved", nth=2)(at_save("delayOffset.json", after))


@kind_point("delay-before-deliver", nth=20, is_plain=True)
def _(trap: Trap) -> None:
    from cometmq.broker.delay import Delay

    before(Delay, "_deliver", trap)


@kind_point("delay-delivered", nth=40, is_plain=True)
def _(trap: Trap) -> None:
    """The copy is in the log; delayOffset.json does not know."""
    from cometmq.broker.delay import Delay

    after(Delay, "_deliver", trap)


# ------------------------------------------------------------------------------------------- timers

kind_point("timer-kept", nth=20, is_plain=True)(stored_in("rmq_sys_wheel_timer"))
kind_point("timers-enter-during", nth=40, is_compiled=True)(at_turn("enter_timers", soon))
kind_point("timers-entered", nth=10, is_compiled=True)(
    some_done("enter_timers", lambda done: int(done.count))
)
kind_point("timers-leave-during", nth=10, is_compiled=True)(at_turn("deliver_timed", soon))
kind_point("timers-delivered", nth=5, is_compiled=True)(
    some_done("deliver_timed", lambda done: int(done.count))
)
kind_point("timer-new-file-empty", nth=1)(new_file("/timerlog/"))
kind_point("timer-log-before-sync", nth=3)(at_sync("timerlog/", before))
kind_point("timer-log-synced", nth=3)(at_sync("timerlog/", after))
kind_point("timer-wheel-before-sync", nth=3)(at_sync("timerwheel", before))
kind_point("timer-wheel-synced", nth=3)(at_sync("timerwheel", after))
kind_point("timer-before-check", nth=3)(at_save("timercheck", before))
kind_point("timer-checked", nth=3)(at_save("timercheck", after))


@kind_point("timer-logged", nth=30)
def _(trap: Trap) -> None:
    """The unit is in the timer log; its slot does not show it."""
    from cometmq.store.timer_log import TimerLog

    after(TimerLog, "append", trap)


@kind_point("timer-entered", nth=30)
def _(trap: Trap) -> None:
    """The slot shows the unit; the queue may be read again from before it."""
    from cometmq.store.timer_wheel import TimerWheel

    after(TimerWheel, "add_to", trap)


@kind_point("timer-before-deliver", nth=20)
def _(trap: Trap) -> None:
    from cometmq.broker.timers import Timers

    before(Timers, "_deliver", trap)


@kind_point("timer-delivered", nth=40)
def _(trap: Trap) -> None:
    """Often in the midst of a slot."""
    from cometmq.broker.timers import Timers

    after(Timers, "_deliver", trap)


@kind_point("timer-rolled", nth=5)
def _(trap: Trap) -> None:
    """A message that is too far away for the wheel is stored once more."""
    from cometmq.broker.timers import Timers

    after(Timers, "_deliver", trap, lambda *_, is_rolled=False: is_rolled)


@kind_point("timers-recovered-log", when="start")
def _(trap: Trap) -> None:
    """The timer log is cut where it can't be believed; slots may still point behind that."""
    from cometmq.store.timer_log import TimerLog

    after(TimerLog, "recover", trap)


@kind_point("timers-recovered", when="start")
def _(trap: Trap) -> None:
    from cometmq.broker.timers import Timers

    after(Timers, "_start", trap)


# ------------------------------------------------------------------------------------- transactions


@kind_point("half-stored", nth=20, is_plain=True)
def _(trap: Trap) -> None:
    stored_in("RMQ_SYS_TRANS_HALF_TOPIC")(trap)


@kind_point("end-before", nth=20)
def _(trap: Trap) -> None:
    from cometmq.broker.half import Half

    before(Half, "end", trap)


@kind_point("end-stored", nth=20)
def _(trap: Trap) -> None:
    """A transaction is over in the log; its producer does not know."""
    from cometmq.broker.half import Half

    after(Half, "end", trap)


@kind_point("end-without-op", nth=10, is_plain=True)
def _(trap: Trap) -> None:
    """The committed message, or a copy of the half, is in the log, the op record behind it is
    not."""
    from cometmq.store.commit_log import CommitLog
    from cometmq.wire import record

    append_batch, write = CommitLog.append_batch, record.write
    is_inside = False

    def watched(*args: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return append_batch(*args)
        finally:
            is_inside = False

    def counted(buffer: Any, at: int, encoded: Any, **places: int) -> None:
        if is_inside and encoded.message.topic == "RMQ_SYS_TRANS_OP_HALF_TOPIC":
            trap.hit()
        write(buffer, at, encoded, **places)

    CommitLog.append_batch = watched  # type: ignore[method-assign,assignment]
    record.write = counted


@kind_point("end-noted-in-memory", nth=10)
def _(trap: Trap) -> None:
    """With transactionOpBatchInterval the op record is written later."""
    from cometmq.broker.half import Half

    after(Half, "_note_pending", trap)


@kind_point("check-before-ask", nth=5)
def _(trap: Trap) -> None:
    """The half is written again at the tail; its producer was not asked."""
    from cometmq.broker.half import Half

    before(Half, "_ask", trap)


@kind_point("check-asked", nth=5)
def _(trap: Trap) -> None:
    from cometmq.broker.half import Half

    after(Half, "_ask", trap)


@kind_point("half-offset-noted", nth=4)
def _(trap: Trap) -> None:
    from cometmq.broker.half import Half

    after(Half, "_save", trap)


@kind_point("half-ops-read", when="start")
def _(trap: Trap) -> None:
    from cometmq.broker.half import Half

    after(Half, "_read_ops", trap)


# -------------------------------------------------------------------------------- retries, replies


def before_answer(prefix: str, code: int) -> Install:
    """The message is stored, the answer not given."""

    def install(trap: Trap) -> None:
        from cometmq.broker.broker import Broker

        def is_it(
            broker: Any, call: Any, reply: Any, end_offset: int, topic: str, **_: Any
        ) -> bool:
            return call.frame.code == code and topic.startswith(prefix)

        before(Broker, "acknowledge", trap, is_it)

    return install


kind_point("back-stored", nth=10)(before_answer("%RETRY%", 36))
kind_point("dead-stored", nth=5)(before_answer("%DLQ%", 36))
kind_point("recall-stored", nth=5)(before_answer("timed", 370))


@kind_point("dead-topic-made", nth=1)
def _(trap: Trap) -> None:
    """The first dead letter of a group makes its topic; only memory knows it when it is stored."""
    stored_in("%DLQ%workers")(trap)


@kind_point("reply-pushed", nth=5)
def _(trap: Trap) -> None:
    from cometmq.broker import reply

    after(reply, "_push", trap)


@kind_point("lock-taken", nth=10)
def _(trap: Trap) -> None:
    from cometmq.broker.locks import QueueLocks

    after(QueueLocks, "lock", trap)
