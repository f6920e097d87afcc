"""The property string of a message and its reserved names.

    name 0x01 value 0x02 name 0x01 value 0x02 ...          UTF-8

Writers end with 0x02; readers accept a last piece without it, drop pieces without 0x01, and let
the last of two equal names win (Java: MessageDecoder.string2messageProperties).
Example: {"TAGS": "TagA"} <-> 54 41 47 53 01 54 61 67 41 02
"""

from __future__ import annotations

from collections.abc import Mapping

NAME_END = "\x01"
VALUE_END = "\x02"
MAX_PROPERTIES_BYTES = 32767  # the length is a signed 16-bit field of the record

KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
RETRY_TOPIC = "RETRY_TOPIC"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
HALF = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
TRANSACTION_ID = "__transactionId__"
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
FIRST_HALF = "TRAN_PREPARED_QUEUE_OFFSET"
IMMUNITY_SEC = "CHECK_IMMUNITY_TIME_IN_SECONDS"
UNIQUE_KEY = "UNIQ_KEY"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
CLUSTER = "CLUSTER"
POP_CHECKPOINT = "POP_CK"
TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_OUT_MS = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
TIMER_DELETES = "TIMER_DEL_UNIQKEY"
TTL_MS = "TTL_MS"  # CometMQ's own, as are the following
TTL_UNTIL = "TTL_UNTIL"
PRODUCER_SEQ = "PRODUCER_SEQ"
DEAD_REASON = "DLQ_REASON"
EXPIRED_TOPIC = "EXPIRED_ORIGIN_TOPIC"
EXPIRED_QUEUE_ID = "EXPIRED_ORIGIN_QUEUE"
EXPIRED_OFFSET = "EXPIRED_ORIGIN_OFFSET"
EXPIRED_TTL_MS = "EXPIRED_TTL_MS"
KEY_SEPARATOR = " "
_MAX_I64 = 2**63 - 1


def parse(text: str) -> dict[str, str]:
    """Property string to a dict; tolerant as Java's reader is."""
    found: dict[str, str] = {}
    for piece in text.split(VALUE_END):
        name, mark, value = piece.partition(NAME_END)
        if mark and name and value:
            found[name] = value
    return found


def number(text: str | None) -> int | None:
    """Java's Long.parseLong; None if that would fail."""
    if text is None or not text.isascii() or len(text) > 20:
        return None
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdigit():
        return None
    found = int(text)
    return found if -_MAX_I64 - 1 <= found <= _MAX_I64 else None


def build(properties: Mapping[str, str]) -> str:
    """A dict to the property string, with the trailing separator."""
    return "".join(f"{k}{NAME_END}{v}{VALUE_END}" for k, v in properties.items())


def put(text: str, name: str, value: str) -> str:
    """The string with a property that it does not carry yet; who isn't sure asks `has` before."""
    return f"{text}{name}{NAME_END}{value}{VALUE_END}"


def has(text: str, name: str) -> bool:
    """Whether the string carries this name at all (value not looked at)."""
    return text.startswith(name + NAME_END) or (VALUE_END + name + NAME_END) in text


def get(text: str, name: str) -> str | None:
    """One value out of the string without building a dict; the last one wins."""
    if name not in text:  # the usual answer, and the cheapest
        return None
    at = text.rfind(f"\x02{name}\x01")
    if at >= 0:
        begin = at + 2 + len(name)
    elif text.startswith(f"{name}\x01"):
        begin = 1 + len(name)
    else:
        return None
    end = text.find(VALUE_END, begin)
    value = text[begin:] if end < 0 else text[begin:end]
    return value or parse(text).get(name)  # empty pieces don't count: an earlier one may
