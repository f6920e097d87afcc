"""What the compiled path may do without asking: taught after the plain path has done it once.

Owns: the answers it is given to copy, and which sends and pulls are ordinary. One rule: nothing is
taught that a later change could make wrong: topics, groups, members and settings tell of every
change, and what hung on it is forgotten at once. What is not taught takes the plain path, which is
always right.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from cometmq.broker import dedup, names
from cometmq.broker.filters import Filter, TagFilter
from cometmq.message import NewMessage
from cometmq.wire import message_id
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import FLAG_RESPONSE, Perm, PullFlag
from cometmq.wire.frame import JSON, ROCKETMQ, Frame, encode_frame
from cometmq.wire.headers import PullHeader

if TYPE_CHECKING:
    from cometmq._fast.hot import Hot, QueueEnds, Traffic
    from cometmq.broker.broker import Broker

MAX_INT32 = 2**31 - 1
_OPAQUE = 1_234_567_891
_MARKS = ("@1@", "@2@", "@3@", "@4@")
_DELAYED, _TIMED, _HALF = 1, 2, 3  # as in _fast/hot.pyx
_KINDS = {names.SCHEDULE_TOPIC: _DELAYED, names.TIMER_TOPIC: _TIMED, names.HALF_TOPIC: _HALF}


class Teacher:
    """Keeps one broker's compiled path in step with the broker."""

    def __init__(self, broker: Broker, hot: Hot) -> None:
        self._broker = broker
        self._hot = hot
        broker.topics.file.on_change = hot.forget
        broker.groups.file.on_change = hot.forget_pulls
        broker.members.on_change = hot.forget_pulls

    def configure(self) -> None:
        """The settings are new: everything is forgotten, and the answers are cut again."""
        broker = self._broker
        ids = dict(zip(("msgId", "queueId", "queueOffset", "transactionId"), _MARKS, strict=True))
        offsets = dict(zip(("nextBeginOffset", "minOffset", "maxOffset"), _MARKS, strict=False))
        ack = Frame(0, _OPAQUE, FLAG_RESPONSE, ext={**broker.send_ext, **ids})
        pull = Frame(0, _OPAQUE, FLAG_RESPONSE, remark="FOUND")
        pull.ext = {"suggestWhichBrokerId": "0", **offsets}
        self._hot.configure_broker(
            max_frame_bytes=broker.config.max_frame_bytes,
            is_lite_allowed=broker.config.is_lite_pull_enabled,
            added=broker.added_properties.encode("utf-8"),
            store_host=broker.store_host,
            ack_json=_cut(ack, (*_MARKS, str(_OPAQUE))),
            pull_json=_cut(pull, (*_MARKS[:3], str(_OPAQUE))),
            ack_binary=_binary(ack, before="msgId"),
            pull_binary=_binary(pull, before="nextBeginOffset")[1:],
        )
        config = broker.config
        self._hot.configure_kinds(
            delays_ms=list(broker.delay.delays_ms),
            # Where slots are bounded, how full one is must be asked.
            takes_timed=config.is_timer_enabled and config.timer_most_per_slot >= MAX_INT32,
            precision_ms=config.timer_precision_ms,
            max_delay_ms=config.timer_max_delay_seconds * 1000,
            takes_halves=not config.rejects_transactions,
            broker_name=config.name.encode("utf-8"),
        )

    def sent(self, topic: TopicConfig, message: NewMessage) -> None:
        """A send to this topic was stored, in its queue or in the place where messages of its kind
        wait: the next one needs no more checks."""
        broker, name = self._broker, topic.topicName
        if broker.is_born(name) or name.startswith(names.RETRY_PREFIX):
            return
        if dedup.window_ms(topic):
            return  # each message is compared with those before
        if topic.order and not broker.config.permission & Perm.WRITE:
            return
        ends = broker.store.queue_ends(message.topic, message.queue_id)
        if ends is None:
            return
        kind = _KINDS.get(message.topic) if message.topic != name else None
        if kind is None and message.topic != name:
            return
        if kind is not None:
            place = broker.topics.get(message.topic)
            self._hot.learn_place(
                kind,
                1 if place is None else place.writeQueueNums,
                cast("QueueEnds", ends),
                cast("Traffic", broker.stats.of_topic(message.topic)) if kind == _HALF else None,
            )
        self._hot.learn_queue(
            name,
            max(topic.readQueueNums, topic.writeQueueNums),
            cast("QueueEnds", ends) if kind is None else None,
            cast("Traffic", broker.stats.of_topic(name)),
            may_keep=name not in _KINDS,
        )

    def delivered(self, message: NewMessage) -> None:
        """A message that waited was stored in its real place: the next one can go there too."""
        broker, name = self._broker, message.topic
        topic = broker.topics.get(name)
        ends = broker.store.queue_ends(name, message.queue_id)
        if topic is None or ends is None or name in _KINDS or name in broker.own_topics:
            return
        self._hot.learn_queue(
            name,
            max(topic.readQueueNums, topic.writeQueueNums),
            cast("QueueEnds", ends),
            cast("Traffic", broker.stats.of_topic(name)),
            is_open=False,
            is_target=True,
        )

    def ended(self, log_offset: int) -> None:
        """A transaction was ended, whose half stands there: so can the next one."""
        broker = self._broker
        broker.store.warm_log(log_offset)
        ends = broker.store.queue_ends(names.OP_TOPIC, 0)
        if ends is not None and not broker.config.transaction_op_interval_ms:
            self._hot.learn_ends(
                cast("QueueEnds", ends),
                cast("Traffic", broker.stats.of_topic(names.OP_TOPIC)),
                broker.half.open_ends,
                broker.half.ended_many,
            )

    def pulled(self, header: PullHeader, wants: Filter, offset: int) -> None:
        """A pull was answered with messages from `offset` on: so can the next one."""
        if not isinstance(wants, TagFilter) or wants.needs_record:
            return  # the compiled path knows tag codes, nothing of what a record says
        broker = self._broker
        topic = broker.topics.get(header.topic)
        ends = broker.store.queue_ends(header.topic, header.queueId)
        if ends is None or topic is None:
            return
        sub_version = 0
        is_own = bool(header.sysFlag & PullFlag.SUBSCRIPTION)
        if not is_own:
            sub_version = (
                broker.members.consumers[header.consumerGroup]
                .subscriptions[header.topic]
                .subVersion
            )
        self._hot.learn_pull(
            header.consumerGroup,
            header.topic,
            (header.subscription or "") if is_own else None,
            sub_version=sub_version,
            queue_count=topic.readQueueNums,
            codes=None if wants.accepts_all else wants.codes,
            traffic=cast("Traffic", broker.stats.of_group(header.topic, header.consumerGroup)),
            offsets=broker.offsets.table,
            pulled=broker.offsets.pulled,
            commit=partial(self._commit, header.topic, header.consumerGroup),
            ends=cast("QueueEnds", ends),
        )
        broker.store.warm_read(header.topic, header.queueId, offset)

    def _commit(self, topic: str, group: str, queue_id: int, offset: int, peer: bytes) -> None:
        broker = self._broker
        broker.is_plan_old = True
        host, port = message_id.unpack_host(peer)
        broker.offsets.commit(topic, group, queue_id, offset, broker.fed_ms, f"{host}:{port}")


def _cut(frame: Frame, marks: tuple[str, ...]) -> list[bytes]:
    """A JSON header without its values."""
    frame.serialize = JSON
    rest = encode_frame(frame)[8:]
    parts: list[bytes] = []
    for mark in marks:
        part, _, rest = rest.partition(mark.encode())
        parts.append(part)
    return [*parts, rest]


def _binary(frame: Frame, before: str) -> list[bytes]:
    """A binary header's constant parts: before the opaque, from there to the map, and the entries
    that stand before the first with a value of its own."""
    frame.serialize = ROCKETMQ
    raw = encode_frame(frame)[8:]
    map_at = 17 + len((frame.remark or "").encode())
    entries = raw[map_at + 4 :]
    return [raw[:5], raw[9:map_at], entries[: entries.index(before.encode()) - 2]]
