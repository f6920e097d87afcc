"""The end of a pop: 200051 ack, 200151 batch of acks, 200053 another invisible time.

Owns: what becomes of a receipt. One rule: an ack is answered when it is stored as durably as a
message would be. One that is unknown or late is answered as well, and changes nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cometmq.broker import names, pop_receipts
from cometmq.broker.pop import check_invisible
from cometmq.broker.pop_order import NOT_OURS, Place
from cometmq.broker.pop_receipts import ORDERED_QUEUE, BatchedAck, Receipt
from cometmq.broker.pop_records import MOST_OFFSETS, Ack, Checkpoint
from cometmq.broker.pop_revive import revive_queue_count
from cometmq.errors import RequestRefused, StoreError
from cometmq.requests import Call, Reply
from cometmq.wire.codes import ResponseCode
from cometmq.wire.headers import AckHeader, ChangeInvisibleHeader

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

log = logging.getLogger("cometmq.broker")

SAME_MS = 1_000  # changes of one message in one millisecond that are told apart


def ack(broker: Broker, call: Call) -> Reply | None:
    """One message is done with."""
    header: AckHeader = call.header
    receipt = pop_receipts.parse(header.extraInfo)
    place = (header.topic, header.consumerGroup, header.queueId)
    least, most = _range(broker, place)
    if not least <= header.offset <= most:
        raise RequestRefused(
            ResponseCode.NO_MESSAGE,
            f"offset {header.offset} of queue {header.queueId} of {header.topic!r}: there are "
            f"{least} to {most}",
        )
    if receipt.is_ordered:
        if not _ack_in_order(broker, call, place, header.offset, receipt.pop_ms):
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"offset {header.offset} of queue {header.queueId} of {header.topic!r} is not out "
                f"to {header.consumerGroup!r}",
            )
        return Reply()
    _check_revive_queue(broker, receipt.revive_queue)
    one = _ack_of(place, receipt, header.offset)
    end = _put(broker, call, receipt.revive_queue, one, receipt.invisible_ms)
    return _answer(broker, call, Reply(), end)


def batch_ack(broker: Broker, call: Call) -> Reply | None:
    """Messages of several pops are done with. Offsets that can't be are passed over."""
    name, acks = pop_receipts.parse_batch(call.frame.body)
    if not acks:
        raise RequestRefused(ResponseCode.NO_MESSAGE, "a batch without acks")
    for one in acks:
        names.check_group(one.group)
        names.check_topic(one.topic)
        if one.revive_queue != ORDERED_QUEUE:
            _check_revive_queue(broker, one.revive_queue)
    end = 0
    for one in acks:
        end = max(end, _ack_some(broker, call, one, name or broker.config.name))
    return _answer(broker, call, Reply(), end)


def _ack_some(broker: Broker, call: Call, batched: BatchedAck, broker_name: str) -> int:
    """The acks of one pop; where they end in the log."""
    place = (batched.topic, batched.group, batched.queue_id)
    topic = broker.topics.get(batched.topic)
    if topic is None or batched.queue_id >= topic.readQueueNums:
        return 0
    store = broker.store
    least, most = (
        store.min_offset(batched.topic, batched.queue_id),
        store.max_offset(batched.topic, batched.queue_id),
    )
    offsets = tuple(one for one in batched.offsets if least <= one <= most)
    end = 0
    if batched.revive_queue == ORDERED_QUEUE:
        for offset in offsets:
            _ack_in_order(broker, call, place, offset, batched.pop_ms)
        return end
    for at in range(0, len(offsets), MOST_OFFSETS):
        one = Ack(
            batched.topic,
            batched.group,
            batched.queue_id,
            batched.start,
            batched.pop_ms,
            broker_name,
            offsets[at : at + MOST_OFFSETS],
            is_batch=True,
        )
        end = _put(broker, call, batched.revive_queue, one, batched.invisible_ms)
    return end


def change_invisible(broker: Broker, call: Call) -> Reply | None:
    """Hide a message for another time, from now on. Its receipt is void, the answer makes a new
    one: a new checkpoint first, then the old one's ack, so that nothing is ever without one."""
    header: ChangeInvisibleHeader = call.header
    receipt = pop_receipts.parse(header.extraInfo)
    place = (header.topic, header.consumerGroup, header.queueId)
    least, most = _range(broker, place)
    if not least <= header.offset < most:
        raise RequestRefused(
            ResponseCode.NO_MESSAGE,
            f"offset {header.offset} of queue {header.queueId} of {header.topic!r}: there are "
            f"{least} to {most - 1}",
        )
    check_invisible(broker, header.invisibleTime)
    if receipt.is_ordered:
        return _hide_in_order(broker, call, place, header, receipt)
    _check_revive_queue(broker, receipt.revive_queue)
    now_ms = call.now_ms
    pop_ms = _another_ms(receipt.pop_ms, now_ms)
    point = Checkpoint(
        header.topic,
        header.consumerGroup,
        header.queueId,
        header.offset,
        pop_ms,
        header.invisibleTime,
        receipt.broker,
        (header.offset,),
        is_suspended=header.suspend,
    )
    try:
        broker.pop.put_checkpoint(broker, receipt.revive_queue, point, now_ms)
        end = broker.pop.put_ack(
            broker,
            receipt.revive_queue,
            _ack_of(place, receipt, header.offset),
            receipt.invisible_ms,
            now_ms,
        )
    except StoreError as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
    broker.pop.changed += 1
    return _answer(broker, call, _new(pop_ms, header.invisibleTime, receipt.revive_queue), end)


def _another_ms(pop_ms: int, now_ms: int) -> int:
    """The time that the new receipt is told by. In the same millisecond as the old one both would
    be one to an ack, and that of the old one would end the new one as well."""
    is_taken = now_ms <= pop_ms < now_ms + SAME_MS
    return pop_ms + 1 if is_taken else now_ms


def _new(pop_ms: int, invisible_ms: int, revive_queue: int) -> Reply:
    ext = {
        "popTime": str(pop_ms),
        "invisibleTime": str(invisible_ms),
        "reviveQid": str(revive_queue),
    }
    return Reply(ResponseCode.SUCCESS, None, ext)


# ---------------------------------------------------------------------------------------- in order


def _ack_in_order(broker: Broker, call: Call, place: Place, offset: int, pop_ms: int) -> bool:
    """One of the messages that are out is done with; False if it is not out."""
    if offset < (broker.offsets.get(*place) or 0):
        return True
    pops = broker.pop
    following = pops.order.acked(place, offset, pop_ms, call.now_ms)
    if following < 0:
        return following != NOT_OURS
    broker.commit_offset(*place, following, call)
    pops.acked += 1
    pops.places.remove(place, 1)
    if not pops.order.blocked_until(place, None, call.now_ms):
        pops.wake_place(broker, place, call.now_ms, call.out)
    return True


def _hide_in_order(
    broker: Broker, call: Call, place: Place, header: ChangeInvisibleHeader, receipt: Receipt
) -> Reply:
    if header.offset < (broker.offsets.get(*place) or 0):
        return _new(0, 0, 0)
    until_ms = call.now_ms + header.invisibleTime
    broker.pop.order.hide(place, header.offset, receipt.pop_ms, until_ms, call.now_ms)
    broker.pop.changed += 1
    if not broker.pop.order.blocked_until(place, None, call.now_ms):
        broker.pop.wake_place(broker, place, call.now_ms, call.out)
    else:
        broker.pop.look_sooner(place, until_ms)
    return _new(receipt.pop_ms, until_ms - receipt.pop_ms, receipt.revive_queue)


# ------------------------------------------------------------------------------------------- parts


def _range(broker: Broker, place: Place) -> tuple[int, int]:
    """The offsets of a queue that there are; refused if there is no such queue."""
    topic, _, queue_id = place
    config = broker.topics.get(topic)
    if config is None:
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {topic!r} does not exist on {broker.config.name}",
        )
    if not 0 <= queue_id < config.readQueueNums:
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"queue {queue_id} of topic {topic!r}: it has {config.readQueueNums} read queues",
        )
    store = broker.store
    return store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)


def _check_revive_queue(broker: Broker, queue_id: int) -> None:
    count = revive_queue_count(broker)
    if not 0 <= queue_id < count:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"revive queue {queue_id} of a receipt: there are {count} (reviveQueueNum)",
        )


def _ack_of(place: Place, receipt: Receipt, offset: int) -> Ack:
    topic, group, queue_id = place
    return Ack(topic, group, queue_id, receipt.start, receipt.pop_ms, receipt.broker, (offset,))


def _put(broker: Broker, call: Call, revive_queue: int, one: Ack, invisible_ms: int) -> int:
    """Store an ack; where it ends in the log."""
    pops = broker.pop
    try:
        end = pops.put_ack(broker, revive_queue, one, invisible_ms, call.now_ms)
    except StoreError as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from None
    pops.acked += len(one.offsets)
    if one.pop_ms >= pops.boot_ms:
        place = (one.topic, one.group, one.queue_id)
        pops.places.remove(place, len(one.offsets))
        if broker.config.is_pop_limited:
            pops.wake_place(broker, place, call.now_ms, call.out)
    return end


def _answer(broker: Broker, call: Call, reply: Reply, end: int) -> Reply | None:
    topic = names.revive_topic(broker.config.cluster)
    return broker.acknowledge(call, reply, end, topic, text="") if end else reply
