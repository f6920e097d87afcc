"""Replies: a consumer answers the one who sent a request, through this broker.

Owns: SEND_REPLY_MESSAGE (324, 325) and pushing the reply (326) to the client that waits for it. One
rule: the answer to the sender of a reply tells whether the other end has it, not merely whether it
was stored.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cometmq.broker import send
from cometmq.broker.members import Client
from cometmq.errors import RequestRefused, StoreError
from cometmq.ports import Send
from cometmq.requests import Call, Reply
from cometmq.wire import headers, message_id, properties
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame
from cometmq.wire.headers import SendHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

PUSH_TIMEOUT_MS = 10_000
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
PUSH_TIME = "PUSH_REPLY_TIME"


def send_reply(broker: Broker, call: Call) -> Reply | None:
    """Store a reply and push it to the client that it names."""
    header: SendHeader = call.header
    topic = send.check(broker, header, call)
    send.check_time(broker, header, call.now_ms)
    client_id = properties.get(header.properties or "", REPLY_TO_CLIENT)
    if not client_id:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"a reply without {REPLY_TO_CLIENT}: nobody to push it to",
            broker.send_ext,
        )
    ext = {**broker.send_ext, "msgId": "0", "queueId": str(max(header.queueId, 0))}
    ext["queueOffset"] = "0"
    if broker.config.is_reply_stored:
        message, _ = send.new_message(broker, call, header, topic)
        try:
            stored = broker.store.append(message, call.now_ms)
        except StoreError as error:
            log.warning("reply not stored client=%s: %s", client_id, error)
        else:
            broker.stats.put(header.topic, 1, stored.size)
            ext["msgId"] = message_id.offset_id(broker.store_host, stored.log_offset)
            ext["queueOffset"] = str(stored.queue_offset)
    client = broker.members.producer_of(client_id)
    if client is None:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"client {client_id!r}, which waits for this reply, is not connected here",
            ext,
        )
    _push(broker, call, header, client, Reply(ext=ext))
    return None


def _push(broker: Broker, call: Call, header: SendHeader, client: Client, reply: Reply) -> None:
    peer = broker.peers[call.conn]
    text = header.properties or ""
    if text and not text.endswith(properties.VALUE_END):  # as clients of 4.9 send them
        text += properties.VALUE_END
    pushed = headers.PushReplyHeader(
        producerGroup=header.producerGroup,
        topic=header.topic,
        defaultTopic=header.defaultTopic,
        defaultTopicQueueNums=header.defaultTopicQueueNums,
        queueId=header.queueId,
        sysFlag=header.sysFlag,
        bornTimestamp=header.bornTimestamp,
        flag=header.flag,
        bornHost=peer.address,
        storeHost=broker.address,
        storeTimestamp=call.now_ms,
        properties=text + f"{PUSH_TIME}\x01{call.now_ms}\x02",
        reconsumeTimes=header.reconsumeTimes,
        unitMode=header.unitMode,
    )
    opaque = broker.next_opaque()
    frame = Frame(
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
        opaque=opaque,
        ext=headers.to_ext(pushed),
        body=call.frame.body,
        serialize=client.serialize,
    )
    call.out.append(Send(client.conn, encode_frame(frame)))
    broker.forward(client.conn, opaque, call, call.now_ms + PUSH_TIMEOUT_MS, reply)
