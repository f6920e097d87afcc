"""Taking back a timed message before its time (370), and the handle that says which one.

    handle = URL-safe base64 of `v1 topic brokerName ms uniqueKey`
    v1 T b 1700000000001 K  <->  djEgVCBiIDE3MDAwMDAwMDAwMDEgSw==

Owns: the handle, and the marker that a recall stores. One rule: nothing is looked for: the marker
is a timed message itself, lands in the slot of the message it deletes, and acts when that is read.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from cometmq.broker import names
from cometmq.errors import RequestRefused, StoreError, StoreFull, StoreReadOnly
from cometmq.message import NewMessage
from cometmq.requests import Call, Reply
from cometmq.wire import properties
from cometmq.wire.codes import Perm, ResponseCode
from cometmq.wire.headers import RecallHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

TAG = "_RECALL_TAG_"
_FORM = "v1"


def handle_of(broker_name: str, message: NewMessage) -> str | None:
    """The handle of a message that was just sent to the timers' queue; None if it has none."""
    text = message.properties
    if message.topic != names.TIMER_TOPIC:
        return None
    slot_ms = properties.get(text, properties.TIMER_OUT_MS)
    topic = properties.get(text, properties.REAL_TOPIC) or ""
    key = properties.get(text, properties.UNIQUE_KEY)
    if slot_ms is None or key is None or topic.startswith(names.RETRY_PREFIX):
        return None
    # One more than the slot's time: floored once more it gives the same slot again.
    words = f"{_FORM} {topic} {broker_name} {int(slot_ms) + 1} {key}"
    return base64.urlsafe_b64encode(words.encode("utf-8")).decode("ascii")


def recall(broker: Broker, call: Call) -> Reply | None:
    """Store the marker that deletes a timed message."""
    try:
        return _recall(broker, call)
    except RequestRefused as refused:
        refused.ext = {properties.REGION: broker.config.region}
        raise


def _recall(broker: Broker, call: Call) -> Reply | None:
    header: RecallHeader = call.header
    config, now_ms = broker.config, call.now_ms
    if not config.is_recall_enabled:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            f"broker {config.name} does not let messages be recalled (recallMessageEnable)",
        )
    is_writable = config.permission & Perm.WRITE and now_ms >= config.accept_sends_from_ms
    if not is_writable or broker.is_stopping:
        raise RequestRefused(
            ResponseCode.SERVICE_NOT_AVAILABLE, f"broker {config.name} takes no messages now"
        )
    names.check_topic(header.topic)
    if broker.topics.get(header.topic) is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {header.topic!r} does not exist on {config.name}",
        )
    due_text, key = _parse(header.recallHandle, header.topic, config.name)
    left_ms = int(due_text) - now_ms
    if not 0 < left_ms < config.timer_max_delay_seconds * 1000:
        raise _illegal(f"its time is over or too far ahead ({left_ms} ms from now)")
    message = _marker(broker, call, due_text, key)
    try:
        stored = broker.put(message, now_ms, is_due=False)
    except (StoreFull, StoreReadOnly) as error:
        raise RequestRefused(ResponseCode.SERVICE_NOT_AVAILABLE, str(error)) from None
    except StoreError as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
    ext = {properties.REGION: config.region, "msgId": key}
    text = message.properties
    return broker.acknowledge(call, Reply(ext=ext), stored.end_offset, header.topic, text=text)


def _marker(broker: Broker, call: Call, due_text: str, key: str) -> NewMessage:
    header: RecallHeader = call.header
    table = {
        properties.TAGS: TAG,
        properties.TIMER_DELETES: key,  # as 5.5.0 writes it; later ones put the topic before it
        properties.UNIQUE_KEY: key,
        properties.TIMER_DELIVER_MS: due_text,
        "BORN_TIMESTAMP": str(call.now_ms),
    }
    if header.producerGroup:
        table[properties.PRODUCER_GROUP] = header.producerGroup
    return NewMessage(
        topic=header.topic,
        queue_id=0,
        body=b"0",
        properties=properties.build(table),
        born_ms=call.now_ms,
        born_host=broker.peers[call.conn].packed,
        store_host=broker.store_host,
    )


def _parse(handle: str, topic: str, broker_name: str) -> tuple[str, str]:
    """Time and unique key of a handle; RequestRefused says what is wrong with it."""
    try:
        padded = handle + "=" * (-len(handle) % 4)
        raw = base64.b64decode(padded, altchars=b"-_", validate=True)
        words = raw.decode("utf-8").split(" ")
    except (binascii.Error, ValueError):
        raise _illegal("it is not one") from None
    if len(words) != 5 or words[0] != _FORM or not words[4]:
        raise _illegal("it is not one of version 1")
    _, of_topic, of_broker, due_text, key = words
    if of_topic != topic:
        raise _illegal(f"it is of topic {of_topic!r}, not {topic!r}")
    if of_broker != broker_name:
        raise _illegal(f"it is of broker {of_broker!r}, this is {broker_name!r}")
    if not due_text.isascii() or not due_text.isdigit() or len(due_text) > 18:
        raise _illegal("its time is not a number")
    if properties.NAME_END in key or properties.VALUE_END in key:
        raise _illegal("its key has a control character in it")
    return due_text, key


def _illegal(why: str) -> RequestRefused:
    return RequestRefused(ResponseCode.ILLEGAL_OPERATION, f"bad recall handle: {why}")


def timer_check_point(broker: Broker, call: Call) -> Reply:
    """60: how far the timers have come, as the checkpoint's 56 bytes."""
    _need_timers(broker)
    return Reply(body=broker.timers.check_point())


def timer_metrics(broker: Broker, call: Call) -> Reply:
    """61: how many messages of each topic wait."""
    _need_timers(broker)
    return Reply(body=broker.timers.counts.encode())


def _need_timers(broker: Broker) -> None:
    if not broker.timers.is_enabled:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR, "timers are off on this broker (timerWheelEnable=false)"
        )
