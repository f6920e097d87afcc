"""Messages that live for a while: TTL_MS.

Owns: the properties TTL_MS (asked for, in ms) and TTL_UNTIL (when it is over, set by the broker).
One rule: the time counts from the moment at which a message is stored in the queue that it was
meant for, so of a delayed, timed or transactional one from its delivery; a copy in a retry topic
keeps the time of the first one, and dead letters live on.

A record with TTL_UNTIL carries SysFlag.MAY_EXPIRE: who reads a queue looks at that one bit, and
the compiled path leaves such records to the plain one.
"""

from __future__ import annotations

from cometmq.broker import names
from cometmq.errors import RequestRefused
from cometmq.message import NewMessage
from cometmq.wire import properties, record
from cometmq.wire.codes import ResponseCode, SysFlag

MARK = properties.TTL_MS + properties.NAME_END
"""What a property text has in it if it may have a TTL; looking for text is cheap."""
MOST_MS = 10 * 365 * 86_400_000  # ten years: more is a mistake in the unit
_ROOM_BYTES = 1024  # of properties, for what is added on the way to the queue
_UNTIL_MARK = properties.TTL_UNTIL + properties.NAME_END
_PLACES_TO_WAIT = frozenset((names.SCHEDULE_TOPIC, names.TIMER_TOPIC, names.HALF_TOPIC))


def check(text: str) -> None:
    """Refuse a TTL that nobody can understand; a text without one is fine."""
    value = properties.get(text, properties.TTL_MS)
    if value is None:
        return
    if _number(value) is None:
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"{properties.TTL_MS}={value[:40]!r} must be a whole number of milliseconds, 1 to "
            f"{MOST_MS} (ten years); leave it out for a message that does not expire",
        )
    size = len(text.encode("utf-8"))
    if size > properties.MAX_PROPERTIES_BYTES - _ROOM_BYTES:
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"properties of a message with {properties.TTL_MS} of {size} bytes, at most "
            f"{properties.MAX_PROPERTIES_BYTES - _ROOM_BYTES}",
        )


def _number(value: str) -> int | None:
    if not value.isascii() or not value.isdecimal() or len(value) > 15:
        return None
    found = int(value)
    return found if 0 < found <= MOST_MS else None


def stamp(message: NewMessage, now_ms: int) -> None:
    """Note on a message that enters its queue until when it lives, if it asks for that."""
    text = message.properties
    if MARK not in text or message.topic in _PLACES_TO_WAIT:
        return
    ttl_ms = _number(properties.get(text, properties.TTL_MS) or "")
    if ttl_ms is None:
        return
    is_again = message.topic.startswith(names.RETRY_PREFIX)
    if not (is_again and until_of(text) is not None):
        if _UNTIL_MARK in text:  # of a message that was passed on
            table = properties.parse(text)
            table.pop(properties.TTL_UNTIL, None)
            text = properties.build(table)
        elif not text.endswith(properties.VALUE_END):
            text += properties.VALUE_END
        text += f"{_UNTIL_MARK}{now_ms + ttl_ms}{properties.VALUE_END}"
        if len(text.encode("utf-8")) > properties.MAX_PROPERTIES_BYTES:
            return  # a message that can't be delivered would be worse than one that lives on
        message.properties = text
    message.sys_flag |= SysFlag.MAY_EXPIRE


def until_of(text: str) -> int | None:
    """When the message with these properties is over; None if never, as of one that has a
    TTL_UNTIL of its own making and no TTL_MS."""
    if MARK not in text or properties.get(text, properties.TTL_MS) is None:
        return None
    value = properties.get(text, properties.TTL_UNTIL)
    if value is None or not value.isascii() or not value.isdecimal() or len(value) > 18:
        return None
    return int(value)


def is_over(text: str, now_ms: int) -> bool:
    until_ms = until_of(text)
    return until_ms is not None and until_ms <= now_ms


def is_stale(view: memoryview, now_ms: int) -> bool:
    """Whether the time of the message in this record is over."""
    found = record.scan(view, 0, len(view), verify_crc=False)
    return isinstance(found, record.Scan) and is_over(found.properties, now_ms)


def forget(table: dict[str, str]) -> None:
    """Let a message live on, whatever it asked for."""
    table.pop(properties.TTL_MS, None)
    table.pop(properties.TTL_UNTIL, None)
