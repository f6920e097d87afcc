"""One message's story: what clients told of it in the trace topic.

Owns: finding a message's trace records, and their order. One rule: all brokers of the trace topic
are asked, and a broker that fails is named; half a story is never passed off as a whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.client.admin_asking import accepted, each, readers, route_of
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.session import Session
from cometmq.client.trace_record import (
    EndTransaction,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
    decode,
    message_ids,
)
from cometmq.errors import UsageError
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.headers import QueryMessageHeader, to_ext

if TYPE_CHECKING:
    from cometmq.client.admin import Admin

TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
MOST_PER_QUERY = 64  # brokers cap it there
END_OF_TIME_MS = 2**63 - 1

_ORDER = {Pub: 0, EndTransaction: 1, Recall: 2, SubBefore: 3, SubAfter: 4}


async def story(
    asker: Admin | Session, message_id: str, topic: str = TRACE_TOPIC
) -> list[TraceRecord]:
    """Everything that clients told about one message, by time; NoRoute if nobody traces there.

    Trace messages are found by the index of their keys, which brokers write a moment after they
    stored a message; and clients send them up to 5 s after the event.
    """
    session = asker if isinstance(asker, Session) else asker.session
    if not message_id or " " in message_id:
        raise UsageError(f"message id {message_id!r}: must be a word")
    route = await route_of(session, topic)

    async def ask(broker: str, address: str) -> list[ReceivedMessage]:
        return await find_by_key(session, broker, address, topic, message_id)

    parts = await each(readers(route), ask, f"looking for {message_id!r} in topic {topic!r}")
    records = [
        record
        for messages in parts.values()
        for message in messages
        for record in decode(message.body)
        if message_id in message_ids(record)
    ]
    return by_time(list(dict.fromkeys(records)))  # a trace message may have been stored twice


async def find_by_key(
    session: Session, broker: str, address: str, topic: str, key: str
) -> list[ReceivedMessage]:
    """All of a broker's messages of a topic with a key: 12, again with earlier times for as long as
    answers are full, because brokers give the newest."""
    found: dict[int, ReceivedMessage] = {}
    end_ms = END_OF_TIME_MS
    while True:
        answer = await session.connections.request(
            address,
            RequestCode.QUERY_MESSAGE,
            to_ext(QueryMessageHeader(topic, key, MOST_PER_QUERY, 0, end_ms)),
            timeout_ms=session.options.timeout_ms,
            advertised_by=broker,
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            break
        page = read_all(accepted(answer).body, broker)
        is_new = any(one.log_offset not in found for one in page)
        found.update((one.log_offset, one) for one in page if one.stored_topic == topic)
        if len(page) < MOST_PER_QUERY or not is_new:
            break
        end_ms = min(one.store_ms for one in page)
    return list(found.values())


def by_time(records: list[TraceRecord]) -> list[TraceRecord]:
    """Sorted; a SubAfter that does not tell its time stands where its SubBefore says it ended."""
    began = {one.request_id: one.time_ms for one in records if isinstance(one, SubBefore)}

    def place(record: TraceRecord) -> tuple[int, int]:
        time_ms = record.time_ms
        if isinstance(record, SubAfter) and not time_ms:
            time_ms = began.get(record.request_id, 0) + record.cost_ms
        return time_ms, _ORDER[type(record)]

    return sorted(records, key=place)
