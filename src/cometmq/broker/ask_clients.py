"""Questions that a broker passes on to one of its consumers: 307 and 309.

Owns: finding the member that is asked for, and the message that 309 hands it. One rule: whoever
asked gets the client's own answer, or why there is none (offline, gone, too slow).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.errors import RequestRefused, UsageError
from cometmq.ports import ConnId, Send
from cometmq.requests import Call
from cometmq.wire import message_id
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame
from cometmq.wire.headers import ClientOfGroupHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker
    from cometmq.broker.members import Client

FORWARD_TIMEOUT_MS = 10_000


def running_info(broker: Broker, call: Call) -> None:
    """307: what a client is doing."""
    _pass_on(broker, call, RequestCode.GET_CONSUMER_RUNNING_INFO, dict(call.frame.ext), b"")


def consume_directly(broker: Broker, call: Call) -> None:
    """309: one client handles one message now; its result is told, no offset moves."""
    header: ClientOfGroupHeader = call.header
    _member(broker, header)  # before anything is read
    body = _stored(broker, header.msgId) if header.msgId else call.frame.body
    ext = {**call.frame.ext, "brokerName": broker.config.name}
    _pass_on(broker, call, RequestCode.CONSUME_MESSAGE_DIRECTLY, ext, body)


def _stored(broker: Broker, text: str) -> bytes:
    """The record of an offset id; a unique id has to be looked up by whoever asks."""
    try:
        log_offset = message_id.parse_offset_id(text)[2]
    except UsageError as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
    raw = broker.store.record_at(log_offset)
    if raw is None:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"no message {text} on {broker.config.name}: nothing begins at log offset {log_offset}",
        )
    return raw


def _pass_on(broker: Broker, call: Call, code: int, ext: dict[str, str], body: bytes) -> None:
    conn, client = _member(broker, call.header)
    opaque = broker.next_opaque()
    frame = Frame(code, opaque=opaque, ext=ext, body=body, serialize=client.serialize)
    call.out.append(Send(conn, encode_frame(frame)))
    broker.forward(conn, opaque, call, call.now_ms + FORWARD_TIMEOUT_MS)


def _member(broker: Broker, header: ClientOfGroupHeader) -> tuple[ConnId, Client]:
    live = broker.members.consumers.get(header.consumerGroup)
    for conn, member in live.members.items() if live is not None else ():
        if member.client.client_id == header.clientId:
            return conn, member.client
    raise RequestRefused(
        ResponseCode.SYSTEM_ERROR,
        f"client {header.clientId!r} of group {header.consumerGroup!r} is not online here",
    )
