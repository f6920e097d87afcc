"""What a timed message says of itself: when it wants to come, where to, and what is added to it.

Owns: the TIMER_ properties. One rule: pure functions of a message and the time; where it waits is
the business of timers.py.
"""

from __future__ import annotations

from cometmq.broker import names
from cometmq.broker.delay import real_message, renewed, with_real_place
from cometmq.config import BrokerConfig
from cometmq.errors import MessageIllegal, StoreError
from cometmq.message import NewMessage, StoredMessage
from cometmq.wire import properties

_NOT_TIMED = frozenset((names.TIMER_TOPIC, names.HALF_TOPIC, names.OP_TOPIC))
_ASKED = (
    (properties.TIMER_DELAY_SEC, 1000, True),
    (properties.TIMER_DELAY_MS, 1, True),
    (properties.TIMER_DELIVER_MS, 1, False),
)


def slot_for(config: BrokerConfig, topic: str, text: str, now_ms: int) -> int | None:
    """The slot of a message with these properties; None if it is not timed, or due already.
    MessageIllegal or StoreError if it can't be taken."""
    if "TIMER_" not in text or topic in _NOT_TIMED:
        return None
    if (properties.number(properties.get(text, properties.DELAY)) or 0) > 0:
        return None  # a level wins
    if properties.get(text, properties.TIMER_OUT_MS) is not None:
        return None  # it was timed already
    due_ms = _due_ms(text, now_ms)
    if due_ms is None:
        return None
    if not config.is_timer_enabled:
        raise StoreError("timed messages are off on this broker (timerWheelEnable=false)")
    if due_ms <= now_ms:
        if properties.get(text, properties.TIMER_DELETES) is not None:
            raise MessageIllegal("the time of the message to be recalled is over")
        return None
    most = config.timer_max_delay_seconds
    if due_ms - now_ms > most * 1000:
        raise MessageIllegal(
            f"delivery in {due_ms - now_ms} ms, at most in {most * 1000} (timerMaxDelaySec)"
        )
    precision_ms = config.timer_precision_ms
    # A slot is read when it is over: the end of the one before an exact multiple is that multiple.
    return (due_ms - 1) // precision_ms * precision_ms


def _due_ms(text: str, now_ms: int) -> int | None:
    """When a message wants to be delivered; None if it doesn't say. MessageIllegal if it says it
    in a way that nobody understands."""
    for name, unit_ms, is_relative in _ASKED:
        value = properties.get(text, name)
        if value is None:
            continue
        found = properties.number(value)
        if found is None:
            raise MessageIllegal(f"{name}={value[:40]!r} is not a number")
        return now_ms + found * unit_ms if is_relative else found
    return None


def keep(message: NewMessage, slot_ms: int) -> None:
    """Address a message to the timers' queue instead; it remembers where it wanted to go."""
    text = message.properties
    if properties.TIMER_OUT_MS in text or not text.endswith(properties.VALUE_END):
        table = properties.parse(text)
        table.pop(properties.TIMER_OUT_MS, None)
        text = properties.build(table)
    text = properties.put(text, properties.TIMER_OUT_MS, str(slot_ms))
    message.properties = with_real_place(text, message.topic, message.queue_id)
    message.topic = names.TIMER_TOPIC
    message.queue_id = 0


def leaving(
    stored: StoredMessage, entered_ms: int, now_ms: int, *, is_rolled: bool
) -> NewMessage | None:
    """The copy that goes to the real topic, or once more to the timers' queue; None if it can't go
    anywhere."""
    message = renewed(stored, names.TIMER_TOPIC, 0) if is_rolled else real_message(stored)
    text = stored.properties
    is_marker = properties.get(text, properties.TIMER_DELETES) is not None and not is_rolled
    if message is None or message.topic == names.HALF_TOPIC or is_marker:
        return None
    message.prepared_offset = 0
    if not is_rolled and "QUEUE_MS" not in text and text.endswith(properties.VALUE_END):
        text = properties.put(text, properties.TIMER_ENQUEUE_MS, str(entered_ms))
        message.properties = properties.put(text, properties.TIMER_DEQUEUE_MS, str(now_ms))
        return message
    table = properties.parse(text)
    table[properties.TIMER_ENQUEUE_MS] = str(entered_ms)
    table[properties.TIMER_DEQUEUE_MS] = str(now_ms)
    if is_rolled:
        times = properties.number(table.get(properties.TIMER_ROLL_TIMES)) or 0
        table[properties.TIMER_ROLL_TIMES] = str(times + 1)
    message.properties = properties.build(table)
    return message
