"""Records of RocketMQ's message trace, as clients write them into the trace topic.

Owns: their fields and bytes. One rule: what is written is what a Java client of 5.x would write;
what is read is what any of them wrote since 4.4, and what can't be read is passed over.

    body      record ...                             UTF-8
    record    field (0x01 field) ... 0x02            the first field is the kind

    Pub              time region group topic message_id tags keys store_host body_bytes cost_ms kind
                     offset_id is_success (client_host, only by old writers)
    SubBefore        time region group request_id message_id retry_times keys
    SubAfter         request_id message_id cost_ms is_success keys code time group
    EndTransaction   time region group topic message_id tags keys store_host kind transaction_id
                     state is_from_check
    Recall           time region group topic message_id is_success

Numbers are decimal, times in ms; booleans are `true` and `false`; a text that is missing is `null`.
Here a missing text is "", and "" is written as `null` too: Java's reader drops empty fields at the
end of a record and then fails on it. So a tag that really is `null` reads as none.
Old forms (Java: TraceDataEncoder): Pub without offset_id; SubAfter without code, time or group.
Example: Recall 5 r g t m true <-> 52 65 63 61 6c 6c 01 35 01 72 01 67 01 74 01 6d 01 74 72 75 65 02
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import TypeAlias

import msgspec

log = logging.getLogger("cometmq.client")

FIELD_END = "\x01"
RECORD_END = "\x02"
MISSING = "null"

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_NO_SEPARATORS = {1: " ", 2: " "}


class MessageKind(IntEnum):
    """Java's MessageType by ordinal."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class HandledCode(IntEnum):
    """What a handler's call came to; Java's ConsumeReturnType by ordinal."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


class TransactionState(Enum):
    """How a transaction was ended; the values are Java's."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"


class Pub(msgspec.Struct, frozen=True, kw_only=True):
    """A send has ended. Of a batch `message_id` and `offset_id` have several, joined by commas."""

    time_ms: int
    """When it began."""
    region: str
    group: str
    topic: str
    message_id: str
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    """The broker's address."""
    body_bytes: int = 0
    cost_ms: int = 0
    kind: int = MessageKind.NORMAL
    """A MessageKind, or a number that only newer clients know."""
    offset_id: str = ""
    is_success: bool = True
    client_host: str = ""


class SubBefore(msgspec.Struct, frozen=True, kw_only=True):
    """A handler was given a message; the SubAfter with the same `request_id` tells its end."""

    time_ms: int
    region: str
    group: str
    request_id: str
    message_id: str
    retry_times: int = 0
    keys: str = ""


class SubAfter(msgspec.Struct, frozen=True, kw_only=True):
    """A handler has ended."""

    request_id: str
    message_id: str
    cost_ms: int = 0
    """Of a call with several messages: one's share."""
    is_success: bool = True
    keys: str = ""
    code: int = HandledCode.SUCCESS
    """A HandledCode, or a number that only newer clients know."""
    time_ms: int = 0
    """0 from writers that don't tell it; nor do they tell the group."""
    group: str = ""


class EndTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A producer has told a broker what becomes of a half message."""

    time_ms: int
    region: str
    group: str
    topic: str
    message_id: str
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    kind: int = MessageKind.COMMITTED
    transaction_id: str = ""
    state: TransactionState = TransactionState.UNKNOWN
    is_from_check: bool = False


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    """A delayed message was called back."""

    time_ms: int
    region: str
    group: str
    topic: str
    message_id: str
    is_success: bool = True


TraceRecord: TypeAlias = Pub | SubBefore | SubAfter | EndTransaction | Recall


def message_ids(record: TraceRecord) -> list[str]:
    """The messages that a record tells of; several only for a batch."""
    return [one for one in record.message_id.split(",") if one]


def search_keys(record: TraceRecord) -> list[str]:
    """The words by which a record is to be found: message ids, then the messages' own keys."""
    keys = "" if isinstance(record, Recall) else record.keys
    words = " ".join((*message_ids(record), keys)).translate(_NO_SEPARATORS)
    return [word for word in words.split(" ") if word]


# ----------------------------------------------------------------------------------------- writing


def encode(record: TraceRecord) -> bytes:
    """One record's bytes; a body is any number of them, one after the other."""
    if isinstance(record, Pub):
        fields = _encoded_pub(record)
    elif isinstance(record, SubBefore):
        fields = [
            *("SubBefore", str(record.time_ms), record.region, record.group, record.request_id),
            *(record.message_id, str(record.retry_times), record.keys),
        ]
    elif isinstance(record, SubAfter):
        fields = [
            *("SubAfter", record.request_id, record.message_id, str(record.cost_ms)),
            *(_truth(record.is_success), record.keys, str(int(record.code))),
            *(str(record.time_ms), record.group),
        ]
    elif isinstance(record, EndTransaction):
        fields = [
            *("EndTransaction", str(record.time_ms), record.region, record.group, record.topic),
            *(record.message_id, record.tags, record.keys, record.store_host),
            *(str(int(record.kind)), record.transaction_id, record.state.value),
            _truth(record.is_from_check),
        ]
    else:
        fields = [
            *("Recall", str(record.time_ms), record.region, record.group, record.topic),
            *(record.message_id, _truth(record.is_success)),
        ]
    texts = (field.translate(_NO_SEPARATORS) or MISSING for field in fields)
    return (FIELD_END.join(texts) + RECORD_END).encode("utf-8", "replace")


def _encoded_pub(record: Pub) -> list[str]:
    fields = [
        *("Pub", str(record.time_ms), record.region, record.group, record.topic),
        *(record.message_id, record.tags, record.keys, record.store_host),
        *(str(record.body_bytes), str(record.cost_ms), str(int(record.kind))),
        *(record.offset_id, _truth(record.is_success)),
    ]
    return [*fields, record.client_host] if record.client_host else fields


def _truth(value: bool) -> str:
    return "true" if value else "false"


# ----------------------------------------------------------------------------------------- reading


def decode(body: bytes) -> list[TraceRecord]:
    """The records of a trace message, in their order. Raises nothing: records of unknown kinds and
    broken ones are left out, so that one client's mistake does not hide what others wrote."""
    found: list[TraceRecord] = []
    for piece in body.decode("utf-8", "replace").split(RECORD_END):
        kind, *fields = piece.split(FIELD_END)
        read = _READERS.get(kind)
        if read is None:
            continue
        try:
            found.append(read(fields))
        except (ValueError, IndexError) as error:
            log.debug("trace_record_broken kind=%s fields=%d reason=%s", kind, len(fields), error)
    return found


def _text(fields: list[str], at: int) -> str:
    return "" if fields[at] == MISSING else fields[at]


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a number")
    return int(text)


def _is_true(text: str) -> bool:
    return text.lower() == "true"


def _pub(fields: list[str]) -> Pub:
    has_offset_id = len(fields) > 12
    return Pub(
        time_ms=_number(fields[0]),
        region=_text(fields, 1),
        group=_text(fields, 2),
        topic=_text(fields, 3),
        message_id=_text(fields, 4),
        tags=_text(fields, 5),
        keys=_text(fields, 6),
        store_host=_text(fields, 7),
        body_bytes=_number(fields[8]),
        cost_ms=_number(fields[9]),
        kind=_number(fields[10]),
        offset_id=_text(fields, 11) if has_offset_id else "",
        is_success=_is_true(fields[12 if has_offset_id else 11]),
        client_host=_text(fields, 13) if len(fields) > 13 else "",
    )


def _sub_before(fields: list[str]) -> SubBefore:
    return SubBefore(
        time_ms=_number(fields[0]),
        region=_text(fields, 1),
        group=_text(fields, 2),
        request_id=_text(fields, 3),
        message_id=_text(fields, 4),
        retry_times=_number(fields[5]),
        keys=_text(fields, 6) if len(fields) > 6 else "",
    )


def _sub_after(fields: list[str]) -> SubAfter:
    return SubAfter(
        request_id=_text(fields, 0),
        message_id=_text(fields, 1),
        cost_ms=_number(fields[2]),
        is_success=_is_true(fields[3]),
        keys=_text(fields, 4) if len(fields) > 4 else "",
        code=_number(fields[5]) if len(fields) > 5 else HandledCode.SUCCESS,
        time_ms=_number(fields[6]) if len(fields) > 6 and fields[6] else 0,
        group=_text(fields, 7) if len(fields) > 7 else "",
    )


def _end_transaction(fields: list[str]) -> EndTransaction:
    return EndTransaction(
        time_ms=_number(fields[0]),
        region=_text(fields, 1),
        group=_text(fields, 2),
        topic=_text(fields, 3),
        message_id=_text(fields, 4),
        tags=_text(fields, 5),
        keys=_text(fields, 6),
        store_host=_text(fields, 7),
        kind=_number(fields[8]),
        transaction_id=_text(fields, 9),
        state=TransactionState(fields[10]),
        is_from_check=_is_true(fields[11]),
    )


def _recall(fields: list[str]) -> Recall:
    return Recall(
        time_ms=_number(fields[0]),
        region=_text(fields, 1),
        group=_text(fields, 2),
        topic=_text(fields, 3),
        message_id=_text(fields, 4),
        is_success=_is_true(fields[5]),
    )


_READERS: dict[str, Callable[[list[str]], TraceRecord]] = {
    "Pub": _pub,
    "SubBefore": _sub_before,
    "SubAfter": _sub_after,
    "EndTransaction": _end_transaction,
    "Recall": _recall,
}
