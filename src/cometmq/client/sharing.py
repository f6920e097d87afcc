"""Which queues of a topic are ours, as the group's members share them.

Owns: asking a broker for the members and computing our share. One rule: if it can't be told
(nobody answers, or the broker does not list us even after a heartbeat), it is None and not
"no queues", so that what we read goes on.
"""

from __future__ import annotations

import logging

from cometmq.client.assignment import Strategy
from cometmq.client.routes import Route
from cometmq.client.session import Session
from cometmq.errors import CometError, NoRoute, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire import bodies
from cometmq.wire.codes import RequestCode, ResponseCode

log = logging.getLogger("cometmq.client")


class Sharing:
    """One group as a member sees it."""

    def __init__(self, session: Session, group: str, strategy: Strategy) -> None:
        self._session = session
        self._group = group
        self._strategy = strategy
        self._reasons: dict[str, str] = {}

    async def route(self, topic: str) -> Route | None:
        """None for a topic that does not exist: a consumer waits for it."""
        try:
            return await self._session.routes.need(topic)
        except NoRoute as error:
            self._say(topic, "topic_awaited", str(error))
            return None

    def _say(self, topic: str, event: str, reason: str) -> None:
        """Aloud only if it is another reason than before."""
        level = logging.DEBUG if self._reasons.get(topic) == reason else logging.WARNING
        log.log(level, "%s group=%s topic=%s reason=%s", event, self._group, topic, reason)
        self._reasons[topic] = reason

    async def share(self, topic: str) -> list[MessageQueue] | None:
        """Our queues of a topic; None if it can't be told now."""
        me = self._session.client_id
        try:
            route = await self.route(topic)
            if route is None or not route.to_read:
                return None
            members = await self.members(route)
            if me not in members:  # a broker that has just started, perhaps
                await self._session.beat()
                members = await self.members(route)
                if me not in members:
                    return None
            self._reasons.pop(topic, None)
            mine = self._strategy(self._group, me, sorted(route.to_read), sorted(members))
            return [self._session.wire_queue(one) for one in mine]
        except CometError as error:
            self._say(topic, "rebalance_failed", str(error))
            return None

    async def members(self, route: Route) -> list[str]:
        """The group's client ids as one of the topic's brokers knows them."""
        brokers = list(route.brokers.values())
        last: CometError | None = None
        for broker in self._session.rng.sample(brokers, len(brokers)):
            if broker.any is None:
                continue
            try:
                answer = await self._session.connections.call(
                    broker.any,
                    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                    {"consumerGroup": self._group},
                    timeout_ms=self._session.options.timeout_ms,
                    advertised_by=broker.name,
                )
            except CometError as error:
                is_empty = (
                    isinstance(error, RequestRefused) and error.code == ResponseCode.SYSTEM_ERROR
                )
                if not is_empty:
                    last = error
                continue
            ids = bodies.load_object(answer.body, "members of a group").get("consumerIdList")
            return [str(one) for one in ids or []]
        if last is not None:
            raise last
        return []
