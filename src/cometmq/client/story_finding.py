"""Finding all that servers know of one message.

Owns: which topics, queues and groups are asked about it. One rule: looking changes nothing, and
whoever fails to answer leaves a line among the unknown, never a silent gap.

Copies of a message share its unique id, and brokers index that for every topic: the real one,
SCHEDULE_TOPIC_XXXX, the timers, the half messages, %RETRY% and %DLQ% of each group, the topic that
expired ones go to. An op record has no key: it is looked for from the half's time on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from cometmq.client import admin_messages, trace_story
from cometmq.client.admin_asking import (
    accepted,
    brokers_of,
    own_names,
    try_each,
)
from cometmq.client.admin_asking import topic_names as all_topics
from cometmq.client.admin_cluster import broker_config
from cometmq.client.admin_members import GroupSubscription, consumer_connections
from cometmq.client.admin_offsets import committed_offset, offset_at
from cometmq.client.admin_topics import topic as topic_settings
from cometmq.client.admin_topics import topic_groups
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.session import Session
from cometmq.client.story import (
    DLQ_PREFIX,
    GIVEN_UP_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    Found,
    GroupFacts,
    Story,
    home,
    is_visible,
    pop_retry_topics,
    tell,
)
from cometmq.client.trace_record import EndTransaction, Pub, Recall, SubBefore, TraceRecord
from cometmq.errors import CometError, NoRoute, RequestRefused, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import properties as props
from cometmq.wire.codes import TRANSACTION_MASK, PullFlag, RequestCode, ResponseCode, SysFlag
from cometmq.wire.headers import PullHeader, to_ext

KEPT_TOPICS = (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, GIVEN_UP_TOPIC)
MOST_TOPICS = 1_000  # looked through for a message of an unknown topic
MOST_OPS = 4_000  # op records read to find a half's end
PULL_COUNT = 32
_LEVEL = re.compile(r"(\d+)([smhd])")
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


async def story(session: Session, message_id: str, topic: str | None, *, trace_topic: str) -> Story:
    """All of one message, by either of its ids; RequestRefused if nobody knows of it."""
    if not message_id or " " in message_id:
        raise UsageError(f"message id {message_id!r}: must be a word")
    finder = _Finder(session, trace_topic)
    return tell(await finder.find(message_id, topic), session.now_ms())


class _Finder:
    """One search."""

    def __init__(self, session: Session, trace_topic: str) -> None:
        self.session = session
        self.trace_topic = trace_topic
        self.places: dict[str, str] = {}
        self.unknown: list[str] = []

    async def find(self, message_id: str, topic: str | None) -> Found:
        session = self.session
        known = await brokers_of(session)
        self.places = {name: known.any(name) for name in known.by_name}
        first: list[ReceivedMessage] = []
        key = message_id
        if admin_messages.read_id(message_id).kind == "offset":
            copy = await admin_messages.message(session, message_id, None)
            first = [copy]
            key = copy.properties.get(props.UNIQUE_KEY, "")
            topic = topic or session.unwrap(home(copy))
        trace = await self._trace(key or message_id)
        topic = topic or _topic_of(trace) or await self._look_everywhere(key)
        wire_topic = session.wrap(topic)
        groups = await self._groups(topic, trace)
        copies = await self._copies(key, wire_topic, groups) if key else first
        if not key:
            self.unknown.append("it has no unique id: copies of it can't be found")
        if not copies and not trace:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND,
                f"no broker has a message {message_id} of topic {topic!r}, and no trace names it",
            )
        found = Found(
            message_id=key or message_id,
            topic=topic,
            wire_topic=wire_topic,
            copies=copies,
            trace=trace,
            groups=groups,
            unknown=self.unknown,
        )
        await self._complete(found)
        return found

    # ---------------------------------------------------------------------------------- the trace

    async def _trace(self, key: str) -> list[TraceRecord]:
        told: list[TraceRecord] = []
        try:
            told = await trace_story.story(self.session, key, self.trace_topic)
        except CometError as error:
            if not isinstance(error, NoRoute):
                self.unknown.append(f"the trace could not be read: {error}")
        if not any(isinstance(one, Pub) for one in told):
            self.unknown.append(
                "no trace of its send: the producer's group and how long it took "
                "(Producer(trace=True) tells)"
            )
        if not any(isinstance(one, SubBefore) for one in told):
            self.unknown.append(
                "no trace of handlers: when and how often each group had it "
                "(Consumer(trace=True) tells)"
            )
        return told

    # ------------------------------------------------------------------------------------- copies

    async def _search(self, topics: Iterable[str], key: str) -> list[ReceivedMessage]:
        """Copies in these topics of all brokers; a broker that fails is noted."""
        session, wanted = self.session, list(topics)

        async def ask(broker: str, address: str) -> list[ReceivedMessage]:
            found: list[ReceivedMessage] = []
            for topic in wanted:
                found += await trace_story.find_by_key(session, broker, address, topic, key)
            return found

        done, failed = await try_each(self.places, ask)
        for name, error in failed.items():
            self.unknown.append(f"copies on broker {name}: {error}")
        return [
            one
            for part in done.values()
            for one in part
            if one.properties.get(props.UNIQUE_KEY) == key
        ]

    async def _copies(
        self, key: str, wire_topic: str, groups: list[GroupFacts]
    ) -> list[ReceivedMessage]:
        topics = [wire_topic, *KEPT_TOPICS]
        for one in groups:
            topics += [RETRY_PREFIX + one.wire_group, DLQ_PREFIX + one.wire_group]
            topics += pop_retry_topics(one.wire_group, wire_topic)
        found = await self._search(dict.fromkeys(topics), key)
        if any(props.TTL_UNTIL in one.properties for one in found):
            found += await self._search(await self._expired_topics(wire_topic), key)
        return [one for one in found if home(one) == wire_topic or one.stored_topic == wire_topic]

    async def _expired_topics(self, wire_topic: str) -> set[str]:
        """Where expired messages of a topic go, if anywhere."""
        try:
            settings = await topic_settings(self.session, self.session.unwrap(wire_topic))
        except CometError as error:
            self.unknown.append(f"where its topic's expired messages go: {error}")
            return set()
        named = (one.attributes.get("expired.topic", "") for one in settings.values())
        return {name for name in named if name}

    async def _look_everywhere(self, key: str) -> str:
        """The topic of a message that nobody named."""
        found = await self._search(KEPT_TOPICS, key)
        if not found:
            topics = own_names(self.session, await all_topics(self.session))
            if len(topics) > MOST_TOPICS:
                raise UsageError(
                    f"{len(topics)} topics are too many to look through (limit {MOST_TOPICS}): "
                    "give the message's topic"
                )
            wire_topics = [self.session.wrap(one) for one in topics]
            found = await self._search(wire_topics, key)
        if not found:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND,
                f"no broker has a message with the unique id {key}, and no trace names it",
            )
        return self.session.unwrap(home(found[0]))

    # ------------------------------------------------------------------------------------- groups

    async def _groups(self, topic: str, trace: list[TraceRecord]) -> list[GroupFacts]:
        names = {one.group for one in trace if isinstance(one, SubBefore)}
        try:
            names |= set(await topic_groups(self.session, topic))
        except CometError as error:
            self.unknown.append(f"which groups read topic {topic!r}: {error}")
        wrap = self.session.wrap
        return [GroupFacts(group=one, wire_group=wrap(one)) for one in sorted(names)]

    async def _complete(self, found: Found) -> None:
        """Offsets and filters of groups, delay levels, the end of a half."""
        await asyncio.gather(*(self._of_group(found, facts) for facts in found.groups))
        for broker in {one.broker for one in found.copies if one.stored_topic == SCHEDULE_TOPIC}:
            try:
                settings = await broker_config(self.session, broker)
                found.delays_ms[broker] = delay_levels(settings.get("messageDelayLevel", ""))
            except CometError as error:
                self.unknown.append(f"the delay levels of broker {broker}: {error}")
        await self._find_end(found)

    async def _of_group(self, found: Found, facts: GroupFacts) -> None:
        popped = pop_retry_topics(facts.wire_group, found.wire_topic)
        topics = (found.wire_topic, RETRY_PREFIX + facts.wire_group, *popped)
        seen = [one for one in found.copies if one.stored_topic in topics]
        try:
            for queue in {one.queue for one in seen}:
                offset = await self._offset(facts, queue)
                if offset is not None:
                    facts.offsets[queue] = offset
            await self._ask_filter(found, facts)
        except CometError as error:
            self.unknown.append(f"where group {facts.group} stands: {error}")

    async def _offset(self, facts: GroupFacts, queue: MessageQueue) -> int | None:
        queue = self.session.wire_queue(queue)
        address = self.places.get(queue.broker, "")
        where = (self.session, address, queue.broker, facts.wire_group)
        return await committed_offset(*where, queue.topic, queue.queue_id)

    async def _ask_filter(self, found: Found, facts: GroupFacts) -> None:
        """Whether the group's present subscription means the message: a broker is asked, by a
        pull of that one message."""
        try:
            group = await consumer_connections(self.session, facts.group)
        except RequestRefused as refused:
            if refused.code == ResponseCode.CONSUMER_NOT_ONLINE:
                return
            raise
        facts.is_broadcasting = group.message_model == "BROADCASTING"
        wanted = group.subscriptions.get(found.topic)
        shown = [one for one in found.copies if is_visible(found, one)]
        if wanted is not None and shown:
            pulled = await self._pull(shown[-1].queue, shown[-1].queue_offset, 1, wanted)
            facts.is_wanted = any(one.queue_offset == shown[-1].queue_offset for one in pulled)

    # -------------------------------------------------------------------------------- transactions

    async def _find_end(self, found: Found) -> None:
        """The op record of a half that was not committed."""
        halves = [one for one in found.copies if one.stored_topic == HALF_TOPIC]
        ended = (one.sys_flag & TRANSACTION_MASK == SysFlag.COMMIT for one in found.copies)
        given_up = any(one.stored_topic == GIVEN_UP_TOPIC for one in found.copies)
        if not halves or given_up or any(ended):
            return
        newest = max(halves, key=lambda one: one.store_ms)
        queue = MessageQueue(OP_TOPIC, newest.broker, 0)
        try:
            where = (self.session, self.places[newest.broker], newest.broker, OP_TOPIC, 0)
            offset = await offset_at(*where, newest.store_ms)
            for _ in range(MOST_OPS // PULL_COUNT):
                page = await self._pull(queue, offset, PULL_COUNT)
                if not page:
                    return
                for one in page:
                    if one.store_ms >= newest.store_ms and newest.queue_offset in _ended_by(one):
                        found.end_op = one
                        return
                offset = page[-1].queue_offset + 1
        except CometError as error:
            # No half was ended yet on this broker: there is no such topic.
            if not isinstance(error, RequestRefused) or error.code != ResponseCode.TOPIC_NOT_EXIST:
                self.unknown.append(f"whether its transaction was ended: {error}")
            return
        self.unknown.append(
            f"whether its transaction was ended: not among the {MOST_OPS} ends after it"
        )

    async def _pull(
        self, queue: MessageQueue, offset: int, most: int, by: GroupSubscription | None = None
    ) -> list[ReceivedMessage]:
        queue = self.session.wire_queue(queue)
        header = PullHeader(
            consumerGroup=admin_messages.TOOLS_GROUP,
            topic=queue.topic,
            queueId=queue.queue_id,
            queueOffset=offset,
            maxMsgNums=most,
            sysFlag=PullFlag.SUBSCRIPTION,
            subscription="*" if by is None else by.expression,
            expressionType="TAG" if by is None else by.kind,
        )
        answer = await self.session.connections.request(
            self.places[queue.broker],
            RequestCode.PULL_MESSAGE,
            to_ext(header),
            timeout_ms=self.session.options.timeout_ms,
            advertised_by=queue.broker,
        )
        if answer.code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY):
            return []
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            return []
        return read_all(accepted(answer).body, queue.broker)


def _topic_of(trace: list[TraceRecord]) -> str:
    for one in trace:
        if isinstance(one, (Pub, EndTransaction, Recall)) and one.topic:
            return one.topic
    return ""


def _ended_by(op: ReceivedMessage) -> set[int]:
    """The queue offsets of halves that an op record ends."""
    pieces = op.body.decode("ascii", "replace").split(",")
    return {int(one) for one in pieces if one.strip().isdecimal()}


def delay_levels(text: str) -> list[int]:
    """messageDelayLevel as ms by level; nothing if it can't be read."""
    found = [_LEVEL.fullmatch(word) for word in text.split()]
    return [int(one[1]) * _UNIT_MS[one[2]] for one in found if one is not None]
