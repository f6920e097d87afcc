"""One message's whole story, told from what was found of it.

Owns: the events of a message's life and what became of it in each group. One rule: pure, and every
line stands on a record, a trace or an offset that says it; what nothing says is listed as unknown.

A message lives in copies, all with one unique id: what was sent may stand in the queue of a delay
level, among the timers or the half messages first; each try again of a group is a copy in
%RETRY%group (of pop in %RETRY%group_topic or %RETRY%group+topic), the end of tries one in
%DLQ%group, an expired one may go to another topic. story_finding.py finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from cometmq.client.received import ReceivedMessage
from cometmq.client.trace_record import (
    EndTransaction,
    HandledCode,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
    TransactionState,
)
from cometmq.message import MessageQueue
from cometmq.wire import properties as props
from cometmq.wire.codes import TRANSACTION_MASK, SysFlag

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = "rmq_sys_wheel_timer"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"

_RANKS = {"born": 0, "sent": 0, "given": 2, "handled": 3, "failed": 3, "sent back": 4, "moved": 4}
"""Of one millisecond: a copy is there (1) before somebody gets it, handles it, sends it back."""

GroupState = Literal[
    "acknowledged", "dead", "retrying", "waiting", "filtered", "passed", "not begun", "unknown"
]
MessageState = Literal[
    "visible",
    "expired",
    "delayed",
    "timed",
    "recalled",
    "half",
    "rolled back",
    "given up",
    "gone",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `what` is a word to switch on, `text` a line to read."""

    time_ms: int
    """0 if only the fact is known."""
    what: str
    text: str
    source: Literal["store", "trace"]
    group: str = ""
    broker: str = ""
    topic: str = ""
    queue_id: int = -1
    queue_offset: int = -1
    attempt: int = 0
    until_ms: int = 0
    """Delayed and sent back: when it is due."""


class GroupPart(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the message in one group."""

    group: str
    state: GroupState
    text: str
    attempts: int = 0
    """How often a handler of the group is known to have had it."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is the message's own, `groups` tell of who reads it; `unknown` what nobody could
    tell, and why."""

    message_id: str
    topic: str
    state: MessageState
    events: tuple[Event, ...]
    groups: tuple[GroupPart, ...]
    unknown: tuple[str, ...] = ()


class GroupFacts(msgspec.Struct, kw_only=True):
    """What was found of a group. Offsets are those of the queues in which copies stand."""

    group: str
    wire_group: str
    offsets: dict[MessageQueue, int] = msgspec.field(default_factory=dict)
    is_wanted: bool | None = None
    """Whether its subscription means the message; None if nobody is online to tell."""
    is_broadcasting: bool = False


class Found(msgspec.Struct, kw_only=True):
    """All that was found of one message. Topics of copies are as on the wire."""

    message_id: str
    topic: str
    wire_topic: str
    copies: list[ReceivedMessage]
    trace: list[TraceRecord]
    groups: list[GroupFacts]
    end_op: ReceivedMessage | None = None
    """The op record that ends its half, if it was looked for."""
    delays_ms: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """By broker: its delay levels."""
    unknown: list[str] = msgspec.field(default_factory=list)


def tell(found: Found, now_ms: int) -> Story:
    """The story of what was found."""
    copies = sorted(found.copies, key=lambda one: (one.store_ms, one.broker, one.log_offset))
    found.copies = copies
    events = [*_born(found), *_traced(found.trace)]
    for copy in copies:
        events += _of_copy(found, copy)
        if is_visible(found, copy) and is_expired(copy, now_ms):
            events.append(_expired(copy))
    if found.end_op is not None:
        events.append(_rolled_back(found.end_op))
    # Clocks of clients and brokers differ, and much happens within a millisecond; what is first by
    # its nature stands first.
    events.sort(key=lambda one: (one.what != "born", one.time_ms, _RANKS.get(one.what, 1)))
    groups = tuple(_group(found, facts, now_ms) for facts in found.groups)
    return Story(
        message_id=found.message_id,
        topic=found.topic,
        state=_state(found, now_ms),
        events=tuple(events),
        groups=groups,
        unknown=tuple(found.unknown),
    )


# ------------------------------------------------------------------------------------------- copies


def real_topic(copy: ReceivedMessage) -> str:
    """Where a copy stands, or is to go."""
    return copy.properties.get(props.REAL_TOPIC, "") if is_kept(copy) else copy.stored_topic


def is_kept(copy: ReceivedMessage) -> bool:
    """Whether a copy waits out of sight."""
    return copy.stored_topic in (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC)


def home(copy: ReceivedMessage) -> str:
    """The topic that the message was sent to, whichever copy this is."""
    topic, names = real_topic(copy), copy.properties
    if props.EXPIRED_TOPIC in names:
        return names[props.EXPIRED_TOPIC]
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) or copy.stored_topic == GIVEN_UP_TOPIC:
        known = names.get(props.RETRY_TOPIC) or names.get("DLQ_ORIGIN_TOPIC")
        popped = topic.removeprefix(RETRY_PREFIX + pop_group(copy))[1:] if pop_group(copy) else ""
        return known or popped or names.get(props.REAL_TOPIC) or topic
    return topic


def pop_retry_topics(group: str, topic: str) -> tuple[str, str]:
    """Where messages come back that were popped and not acknowledged."""
    return f"{RETRY_PREFIX}{group}_{topic}", f"{RETRY_PREFIX}{group}+{topic}"


def pop_group(copy: ReceivedMessage) -> str:
    """The group for which a copy came back that was popped; "" if that is not what it is."""
    group = copy.properties.get("ORIGIN_GROUP", "")
    is_popped = group and copy.stored_topic.startswith(pop_retry_topics(group, ""))
    return group if is_popped else ""


def is_expired(copy: ReceivedMessage, now_ms: int) -> bool:
    """Whether a copy with a time to live is no longer given to anybody."""
    until = copy.properties.get(props.TTL_UNTIL, "")
    return props.TTL_MS in copy.properties and until.isdecimal() and int(until) <= now_ms


def is_marker(copy: ReceivedMessage) -> bool:
    """Whether it takes back a timed message, and is not one itself."""
    return copy.stored_topic == TIMER_TOPIC and props.TIMER_DELETES in copy.properties


def is_visible(found: Found, copy: ReceivedMessage) -> bool:
    return copy.stored_topic == found.wire_topic


def due_ms(found: Found, copy: ReceivedMessage) -> int:
    """When a delayed or timed copy goes on; 0 if that is not known."""
    text = copy.properties
    if copy.stored_topic == TIMER_TOPIC:
        asked = text.get(props.TIMER_DELIVER_MS) or text.get(props.TIMER_OUT_MS, "")
        return int(asked) if asked.isdecimal() else 0
    level = text.get(props.DELAY, "")
    delays = found.delays_ms.get(copy.broker, [])
    if not level.isdecimal() or not delays:
        return 0
    return copy.store_ms + delays[min(max(int(level), 1), len(delays)) - 1]


def _has_gone_on(found: Found, copy: ReceivedMessage) -> bool:
    """Whether a kept copy was delivered: its successor stands behind it in the same log."""
    topic = real_topic(copy)
    return any(
        one.stored_topic == topic
        and one.broker == copy.broker
        and one.log_offset > copy.log_offset
        and one.reconsume_times == copy.reconsume_times
        for one in found.copies
    )


def _state(found: Found, now_ms: int) -> MessageState:
    copies = found.copies
    shown = [one for one in copies if is_visible(found, one)]
    if shown:
        return "expired" if all(is_expired(one, now_ms) for one in shown) else "visible"
    if any(is_marker(one) for one in copies):
        return "recalled"
    if any(one.stored_topic == GIVEN_UP_TOPIC for one in copies):
        return "given up"
    if any(one.stored_topic == TIMER_TOPIC for one in copies):
        return "timed"
    own = [one for one in copies if one.stored_topic == SCHEDULE_TOPIC]
    if any(real_topic(one) == found.wire_topic for one in own):
        return "delayed"
    if any(one.stored_topic == HALF_TOPIC for one in copies):
        return "half" if found.end_op is None else "rolled back"
    return "gone"


# ------------------------------------------------------------------------------------------- events


def _born(found: Found) -> list[Event]:
    """Its sender's clock and address, which every copy carries."""
    if not found.copies:
        return []
    first = found.copies[0]
    host, port = first.sender
    group = first.properties.get(props.PRODUCER_GROUP, "")
    by = f" by producer group {group}" if group else ""
    return [
        Event(
            time_ms=first.born_ms,
            what="born",
            text=f"made{by} at {host}:{port}, {len(first.body)} bytes",
            source="store",
            group=group,
        )
    ]


def _at(copy: ReceivedMessage) -> str:
    return f"{copy.stored_topic} {copy.broker}/{copy.queue_id} @{copy.queue_offset}"


def _event(copy: ReceivedMessage, what: str, text: str, group: str = "", until: int = 0) -> Event:
    return Event(
        time_ms=copy.store_ms,
        what=what,
        text=text,
        source="store",
        group=group,
        broker=copy.broker,
        topic=copy.stored_topic,
        queue_id=copy.queue_id,
        queue_offset=copy.queue_offset,
        attempt=copy.reconsume_times,
        until_ms=until,
    )


def _of_copy(found: Found, copy: ReceivedMessage) -> list[Event]:
    topic, text = copy.stored_topic, copy.properties
    if is_marker(copy):
        return [_event(copy, "recalled", "called back before its time")]
    if topic == TIMER_TOPIC:
        rolls = text.get(props.TIMER_ROLL_TIMES)
        again = f", for the {rolls}. time" if rolls else ""
        return [_event(copy, "timed", f"waits among the timers{again}", until=due_ms(found, copy))]
    if topic == SCHEDULE_TOPIC:
        return [_scheduled(found, copy)]
    if topic == HALF_TOPIC:
        times = text.get(props.CHECK_TIMES)
        if times is None:
            return [_event(copy, "half", f"half message stored: {_at(copy)}")]
        return [_event(copy, "checked", f"its producers were asked about it, time {times}")]
    if topic == GIVEN_UP_TOPIC:
        return [_event(copy, "given up", "asked too often: moved to " + _at(copy))]
    if props.EXPIRED_TOPIC in text and topic != text[props.EXPIRED_TOPIC]:
        return [_event(copy, "moved", f"expired, and moved to {_at(copy)}")]
    if pop_group(copy):
        group = pop_group(copy)
        said = f"received by group {group} and not acknowledged in time: again in {_at(copy)}"
        return [_event(copy, "came back", said, group)]
    if topic.startswith(RETRY_PREFIX):
        group = topic.removeprefix(RETRY_PREFIX)
        said = f"back for try {copy.reconsume_times + 1} of group {group}: {_at(copy)}"
        return [_event(copy, "came back", said, group)]
    if topic.startswith(DLQ_PREFIX):
        group, why = topic.removeprefix(DLQ_PREFIX), text.get(props.DEAD_REASON, "")
        said = f"given up by group {group}{why and f' ({why})'}: {_at(copy)}"
        return [_event(copy, "dead letter", said, group)]
    return [_shown(copy)]


def _scheduled(found: Found, copy: ReceivedMessage) -> Event:
    level, topic, until = copy.properties.get(props.DELAY), real_topic(copy), due_ms(found, copy)
    if not topic.startswith(RETRY_PREFIX):
        return _event(copy, "delayed", f"waits at delay level {level}", until=until)
    group = topic.removeprefix(RETRY_PREFIX)
    said = f"group {group} sent it back (try {copy.reconsume_times}), delay level {level}"
    return _event(copy, "sent back", said, group, until)


def _shown(copy: ReceivedMessage) -> Event:
    text = copy.properties
    if copy.sys_flag & TRANSACTION_MASK == SysFlag.COMMIT:
        return _event(copy, "committed", f"committed and visible: {_at(copy)}")
    if "DLQ_RESENT_FROM" in text:
        return _event(copy, "resent", f"sent again from {text['DLQ_RESENT_FROM']}: {_at(copy)}")
    if props.TIMER_OUT_MS in text or props.REAL_TOPIC in text:
        return _event(copy, "delivered", f"its time came, visible: {_at(copy)}")
    return _event(copy, "stored", f"stored and visible: {_at(copy)}")


def _expired(copy: ReceivedMessage) -> Event:
    text = copy.properties
    said = f"its time to live of {text[props.TTL_MS]} ms is over: nobody gets it any more"
    event = _event(copy, "expired", said)
    return msgspec.structs.replace(event, time_ms=int(text[props.TTL_UNTIL]))


def _rolled_back(op: ReceivedMessage) -> Event:
    return _event(op, "rolled back", "its producer rolled it back")


def _traced(records: list[TraceRecord]) -> list[Event]:
    return [event for record in records for event in _of_record(record, records)]


def _of_record(record: TraceRecord, records: list[TraceRecord]) -> list[Event]:
    if isinstance(record, Pub):
        what = "sent" if record.is_success else "send failed"
        end = "acknowledged" if record.is_success else "not acknowledged with SEND_OK"
        said = f"sent by group {record.group}, {end} after {record.cost_ms} ms"
        return [_trace_event(record.time_ms, what, said, record.group)]
    if isinstance(record, EndTransaction):
        word = {TransactionState.COMMIT: "commit", TransactionState.ROLLBACK: "roll back"}
        said = f"group {record.group} said: {word.get(record.state, 'not known yet')}"
        said += ", when asked" if record.is_from_check else ""
        return [_trace_event(record.time_ms, "ended", said, record.group)]
    if isinstance(record, Recall):
        said = "recall asked for" if record.is_success else "recall asked for, and refused"
        return [_trace_event(record.time_ms, "recall", said, record.group)]
    if isinstance(record, SubBefore):
        said = f"given to a handler of group {record.group}, try {record.retry_times + 1}"
        return [_trace_event(record.time_ms, "given", said, record.group, record.retry_times)]
    began = _began(record, records)
    group = record.group or (began.group if began is not None else "")
    time_ms = record.time_ms or (began.time_ms + record.cost_ms if began is not None else 0)
    if record.is_success:
        said = f"handled by group {group} in {record.cost_ms} ms"
        return [_trace_event(time_ms, "handled", said, group)]
    known = [code for code in HandledCode if code == record.code]
    why = known[0].name.lower().replace("_", " ") if known else f"code {record.code}"
    said = f"the handler of group {group} failed after {record.cost_ms} ms: {why}"
    return [_trace_event(time_ms, "failed", said, group)]


def _began(record: SubAfter, records: list[TraceRecord]) -> SubBefore | None:
    for one in records:
        if isinstance(one, SubBefore) and one.request_id == record.request_id:
            return one
    return None


def _trace_event(time_ms: int, what: str, text: str, group: str, attempt: int = 0) -> Event:
    return Event(
        time_ms=time_ms, what=what, text=text, source="trace", group=group, attempt=attempt
    )


# ------------------------------------------------------------------------------------------- groups


def _group(found: Found, facts: GroupFacts, now_ms: int) -> GroupPart:
    """The newest copy that concerns the group decides."""
    group = facts.group
    retry, dead = RETRY_PREFIX + facts.wire_group, DLQ_PREFIX + facts.wire_group
    handled = [one for one in _traced(found.trace) if one.group == group]
    given = sum(one.what == "given" for one in handled)
    returns = [one for one in found.copies if real_topic(one) == retry and is_kept(one)]
    letters = [one for one in found.copies if one.stored_topic == dead]
    popped = [one for one in found.copies if pop_group(one) == facts.wire_group]
    tries = len({one.reconsume_times for one in (*returns, *popped)}) + len(letters)

    def part(state: GroupState, text: str, more: int = 0) -> GroupPart:
        return GroupPart(group=group, state=state, text=text, attempts=max(given, tries + more))

    if letters:
        return part("dead", f"in {dead} since try {letters[-1].reconsume_times}")
    waiting = [one for one in returns if not _has_gone_on(found, one)]
    if waiting:
        return part("retrying", f"try {waiting[-1].reconsume_times + 1} is to come")
    if any(one.what == "handled" for one in handled):
        return part("acknowledged", "a handler returned, its trace says", 1)
    if popped:
        last = popped[-1]
        if (facts.offsets.get(last.queue) or 0) > last.queue_offset:
            said = "comes back unless it is acknowledged"
            return part("passed", f"received for try {last.reconsume_times + 1}; it {said}", 1)
        return part("retrying", f"try {last.reconsume_times + 1} is to come")
    own = [one for one in found.copies if one.stored_topic == retry]
    return _by_offset(found, facts, own, part)


def _by_offset(
    found: Found, facts: GroupFacts, retries: list[ReceivedMessage], part: Callable[..., GroupPart]
) -> GroupPart:
    """Without a trace: what the group's offsets say."""
    if facts.is_broadcasting:
        return part("unknown", "it broadcasts: its members keep their offsets themselves")
    copies = retries[-1:] or [one for one in found.copies if is_visible(found, one)]
    if not copies:
        return part("waiting", "not to be seen by any group")
    offsets = [facts.offsets.get(one.queue) for one in copies]
    if all(one is None for one in offsets):
        return part("not begun", "it has no offset in this queue")
    for copy, offset in zip(copies, offsets, strict=True):
        if offset is None or offset <= copy.queue_offset:
            at = "none" if offset is None else str(offset)
            said = f"its offset {at} has not passed {copy.queue_offset}: in work, or to come"
            return part("waiting", said)
    if retries:
        return part("acknowledged", "its offset has passed the last try", 1)
    if facts.is_wanted is None:
        return part("passed", "its offset has passed; nobody is online to tell its filter")
    if not facts.is_wanted:
        return part("filtered", "its offset has passed, and its filter does not mean the message")
    return part(
        "acknowledged", "its offset has passed (a reset or a later start looks the same)", 1
    )
