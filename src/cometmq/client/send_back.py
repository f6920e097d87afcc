"""A message that could not be handled, on its way to the group's retry topic.

Owns: CONSUMER_SEND_MSG_BACK, and sending a copy ourselves where the broker refuses that. One rule:
True means that a broker has taken the message over; on anything else it is still ours.
"""

from __future__ import annotations

import logging

from cometmq.client.consumer_offsets import RETRY_PREFIX
from cometmq.client.received import ReceivedMessage
from cometmq.client.session import INNER_GROUP, Session
from cometmq.errors import CometError, RequestRefused
from cometmq.wire import properties
from cometmq.wire.codes import RequestCode
from cometmq.wire.headers import SendBackHeader, SendHeader, send_v2_ext, to_ext

log = logging.getLogger("cometmq.client")

TIMEOUT_MS = 5_000
FIRST_DELAY_LEVEL = 3  # of the first retry: 10 s; each time one level more
DEFAULT_TIMES = 16


class SendBack:
    """Retries of one group."""

    def __init__(self, session: Session, group: str, max_times: int) -> None:
        self._session = session
        self._group = group
        self._max_times = DEFAULT_TIMES if max_times < 0 else max_times
        self._trouble: tuple[object, ...] = ()
        self.retry_topic = f"{RETRY_PREFIX}{group}"

    async def back(self, message: ReceivedMessage, delay_level: int) -> bool:
        """To the broker that stored it; if that won't, a copy to the retry topic."""
        try:
            await self._ask(message, delay_level)
        except CometError as error:
            first = error
        else:
            self._trouble = ()
            return True
        try:
            await self.send(message, max_times=self._max_times, delay_level=delay_level)
        except CometError as second:
            self._say(first, second)
            return False
        return True

    async def _ask(self, message: ReceivedMessage, delay_level: int) -> None:
        header = SendBackHeader(
            offset=message.log_offset,
            group=self._group,
            delayLevel=delay_level,
            originMsgId=message.message_id,
            originTopic=self._session.wrap(message.topic),
            maxReconsumeTimes=self._max_times,
        )
        await self._session.call(
            message.broker,
            message.stored_topic,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            to_ext(header),
            timeout_ms=TIMEOUT_MS,
        )

    async def send(self, message: ReceivedMessage, *, max_times: int, delay_level: int = 0) -> None:
        """A copy as Java's client makes it: delayed, one more in its count, its origin kept.

        `delay_level` as in CONSUMER_SEND_MSG_BACK: 0 leaves it to the count, below 0 there are no
        more tries, which a count at its most tells the broker.
        """
        session, times = self._session, message.reconsume_times
        if delay_level < 0:
            times = max(times, max_times)
        route = await session.routes.need(self.retry_topic)
        if not route.to_send:
            raise CometError(route.why_not_sent)
        queue = session.rng.choice(route.to_send)
        table = dict(message.properties)
        table.pop(properties.HALF, None)
        table.setdefault(properties.RETRY_TOPIC, session.wrap(message.topic))
        table.setdefault(properties.ORIGIN_MESSAGE_ID, message.message_id)
        table[properties.DELAY] = str(delay_level if delay_level > 0 else FIRST_DELAY_LEVEL + times)
        header = SendHeader(
            producerGroup=INNER_GROUP,
            topic=self.retry_topic,
            defaultTopic="TBW102",
            defaultTopicQueueNums=4,
            queueId=queue.queue_id,
            sysFlag=0,  # the body is whole again
            bornTimestamp=message.born_ms,
            flag=message.flag,
            properties=properties.build(table),
            reconsumeTimes=times + 1,
            maxReconsumeTimes=max_times,
        )
        await session.call(
            queue.broker,
            self.retry_topic,
            RequestCode.SEND_MESSAGE_V2,
            send_v2_ext(header),
            message.body,
            timeout_ms=TIMEOUT_MS,
        )

    def _say(self, first: CometError, second: CometError) -> None:
        """Once for each change of what is wrong; texts differ from message to message."""
        trouble = (*_kind(first), *_kind(second))
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning(
                "send_back_failed group=%s reason=%s; and a copy to %s: %s "
                "action=keep and handle again",
                self._group,
                first,
                self.retry_topic,
                second,
            )


def _kind(error: CometError) -> tuple[object, ...]:
    return type(error), error.code if isinstance(error, RequestRefused) else None
