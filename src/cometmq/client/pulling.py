"""Reading one queue: pull, hand on what came, pull again.

Owns: a queue that this consumer owns, and where its next pull begins. One rule: there is at most
one pull of a queue under way, and after `drop` nothing that comes is handed on.

A pull is answered by a callback, not awaited by a task: the usual round (answer, messages to the
workers, next pull) is one call. Refusals and lost connections end in a timer and the next try.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from cometmq.client.connection import Connection
from cometmq.client.in_flight import FlowLimits, InFlight
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.routes import LEADER
from cometmq.client.session import Session
from cometmq.client.tags import WantedTags
from cometmq.errors import CometError, NoRoute, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire.bodies import Subscription
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode
from cometmq.wire.frame import Frame

log = logging.getLogger("cometmq.client")

SUSPEND_MS = 15_000  # how long a broker may hold a pull of an empty queue
TIMEOUT_S = 30.0
NO_ROOM_S = 0.05
BROKER_BUSY_S = 0.02
AFTER_ERROR_S = 1.0
NO_HEARTBEAT_S = 0.1  # until a broker has our heartbeat; doubles up to AFTER_ERROR_S
LOCK_ALIVE_S = 30.0  # the broker says 60 s; half of it, so that two never think they have it

_MOVED = ResponseCode.PULL_OFFSET_MOVED
_EMPTY = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)
_NO_HEARTBEAT = (ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST)
_BUSY = (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL)


class PullRules:
    """What the pulls of one consumer have in common, and who gets what they bring."""

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        commits: bool,
        pull_batch: int,
        limits: FlowLimits,
        interval_ms: int,
        on_pulled: Callable[[PulledQueue, Sequence[ReceivedMessage]], None],
        on_moved: Callable[[PulledQueue, int], None],
    ) -> None:
        self.session = session
        self.group = group
        self.commits = commits
        """Clustering: pulls carry how far the group has come."""
        self.pull_batch = pull_batch
        self.limits = limits
        self.interval_ms = interval_ms
        self.on_pulled = on_pulled
        self.on_moved = on_moved
        self.is_paused = False
        """No new pulls of any queue; who ends it calls `pull` of each."""
        self.flow_waits = 0
        self.filtered = 0
        self._refreshing: set[str] = set()

    async def refresh(self, topic: str) -> None:
        """Ask for a route anew, once for all queues that want it."""
        if topic in self._refreshing:
            return
        self._refreshing.add(topic)
        try:
            await self.session.routes.refresh(topic)
        except CometError as error:
            log.debug("route_kept topic=%s reason=%s", topic, error)
        finally:
            self._refreshing.discard(topic)


class PulledQueue:
    """A queue that this consumer owns, from when it was taken until it is dropped."""

    def __init__(
        self,
        rules: PullRules,
        queue: MessageQueue,
        subscription: Subscription,
        *,
        offset: int,
        stored_offset: int | None,
    ) -> None:
        self.queue = queue
        self.window: InFlight[ReceivedMessage] = InFlight()
        self.window.advance_to(offset)
        self.next_offset = offset
        self.stored_offset = stored_offset
        """What the group's offset is where it is kept, as far as we know."""
        self.is_dropped = False
        self.is_stopped = False
        self.given_up: set[int] = set()
        """Offsets whose handler took too long: their results don't count any more."""
        self.line: deque[ReceivedMessage] = deque()
        """Ordered: what waits for the handler."""
        self.is_in_hand = False
        """Ordered: a worker has this queue."""
        self.is_suspended = False
        """Ordered: it waits after a failure."""
        self.line_topic = ""
        """Ordered: whose handler works on the line; lines of a retry topic have several."""
        self.needs_lock = False
        self.locked_at: float | None = None
        """Ordered: when its lock was last granted, by the loop's clock."""
        self.locked_ms = 0
        self.ends = 0.0
        """When the pull under way is given up, by the loop's clock."""
        self.last_pull_ms = 0
        self.last_done_ms = 0
        self._rules = rules
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_asked = False
        self._waits_for_room = False
        self._from_id = LEADER
        self._carried: int | None = None
        """The commit offset that the pull under way took with it."""
        self._trouble = ""
        self._heartbeat_wait_s = NO_HEARTBEAT_S
        self._fields = {
            "consumerGroup": rules.group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "queueOffset": "",
            "maxMsgNums": str(rules.pull_batch),
            "sysFlag": "",
            "commitOffset": "",
            "suspendTimeoutMillis": str(SUSPEND_MS),
            "subVersion": "",
            "expressionType": "",
        }
        self.subscription = subscription
        self.subscribe(subscription)

    def __repr__(self) -> str:
        one = self.queue
        state = (
            " dropped" if self.is_dropped else f" trouble={self._trouble}" if self._trouble else ""
        )
        return (
            f"<PulledQueue {one.topic} {one.broker}/{one.queue_id} next={self.next_offset} "
            f"in_flight={self.window.message_count}{state}>"
        )

    def subscribe(self, subscription: Subscription) -> None:
        """What is wanted of this queue from the next pull on."""
        self.subscription = subscription
        self._fields["subVersion"] = str(subscription.subVersion)
        self._fields["expressionType"] = subscription.expressionType
        is_tagged = subscription.expressionType == "TAG"
        self._tags = WantedTags(subscription.tagsSet if is_tagged else ())

    @property
    def is_lock_alive(self) -> bool:
        if not self.needs_lock:
            return True
        return self.locked_at is not None and self._loop.time() - self.locked_at < LOCK_ALIVE_S

    def locked(self) -> None:
        self.locked_at = self._loop.time()
        self.locked_ms = self._rules.session.now_ms()

    def drop(self) -> None:
        """Another consumer's now, or ours from another offset: nothing is handed on any more."""
        self.is_dropped = True
        self.window.is_dropped = True
        self._cancel_timer()

    def stop(self) -> None:
        """Pull no more; what is in flight still counts."""
        self.is_stopped = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -------------------------------------------------------------------------------------- asking

    def pull(self) -> None:
        """Ask for the next messages, now or when there is room for them."""
        if self.is_dropped or self._is_asked or self.is_stopped or self._rules.is_paused:
            return
        self._cancel_timer()
        if self.window.room(self._rules.limits) is not None:
            self._rules.flow_waits += 1
            self._waits_for_room = True
            self._later(NO_ROOM_S)
            return
        self._waits_for_room = False
        address = self._address()
        connection = None
        if address is not None:
            connection = self._rules.session.connections.known(address)
        if connection is None:
            self._is_asked = True
            self._rules.session.spawn(self._connect(address))
        else:
            self._ask(connection)

    def room_made(self) -> None:
        """Messages have finished."""
        if self._waits_for_room and self.window.room(self._rules.limits) is None:
            self.pull()

    def _ask(self, connection: Connection) -> None:
        fields = self._fields
        commit = self.window.commit_offset or 0
        self._carried = None
        flags = PullFlag.SUSPEND
        if commit > 0 and self._rules.commits and self._from_id == LEADER:
            flags |= PullFlag.COMMIT_OFFSET
            self._carried = commit
        fields["queueOffset"] = str(self.next_offset)
        fields["commitOffset"] = str(commit)
        fields["sysFlag"] = str(flags)
        opaque = connection.next_opaque()
        data = connection.frame(RequestCode.PULL_MESSAGE, fields, b"", opaque=opaque)
        self._is_asked = True
        self.ends = self._loop.time() + TIMEOUT_S
        connection.ask_raw(opaque, data, self)

    def _address(self) -> str | None:
        route = self._rules.session.routes.get(self.queue.topic)
        broker = None if route is None else route.brokers.get(self.queue.broker)
        if broker is None:
            return None
        found = broker.addresses.get(self._from_id)
        if found is None:  # the leader, or any follower while there is none
            self._from_id = LEADER if broker.leader else min(broker.addresses, default=LEADER)
            found = broker.any
        return found

    async def _connect(self, address: str | None) -> None:
        try:
            if address is None:
                text = f"broker {self.queue.broker} is in no route"
                raise NoRoute(self.queue.topic, text)
            connection = await self._rules.session.connections.get(address, self.queue.broker)
        except CometError as error:
            self.failed(error)
            return
        self._is_asked = False
        if not self.is_dropped and not self.is_stopped:
            self._ask(connection)

    def _later(self, seconds: float) -> None:
        if not self.is_dropped and not self.is_stopped and self._timer is None:
            self._timer = self._loop.call_later(seconds, self._pull_again)

    def _pull_again(self) -> None:
        self._timer = None
        self.pull()

    # ------------------------------------------------------------------------------------- answers

    def answered(self, frame: Frame) -> None:
        """A pull's answer."""
        self._is_asked = False
        if self.is_dropped or self.is_stopped:
            return
        code = frame.code
        if code != 0 and code not in _EMPTY and code != _MOVED:
            self._refused(code, frame)
            return
        try:
            next_offset = int(frame.ext["nextBeginOffset"])
            self._from_id = int(frame.ext["suggestWhichBrokerId"])
            messages = read_all(frame.body, self.queue.broker) if code == 0 else []
        except (CometError, KeyError, ValueError) as error:
            self._trouble_with(f"an answer that can't be understood: {error!r}")
            self._later(AFTER_ERROR_S)
            return
        if code == _MOVED:
            log.info(
                "offset_moved queue=%s before=%d after=%d",
                self.queue,
                self.next_offset,
                next_offset,
            )
            self._rules.on_moved(self, next_offset)
            return
        self._well()
        if self._carried is not None:
            self.stored_offset, self._carried = self._carried, None
        if messages:
            self._take(messages, next_offset)
        elif next_offset > self.next_offset:
            self.window.advance_to(next_offset)
        self.next_offset = next_offset
        if self._rules.interval_ms:
            self._later(self._rules.interval_ms / 1e3)
        else:
            self.pull()

    def _take(self, messages: list[ReceivedMessage], next_offset: int) -> None:
        self.last_pull_ms = self._rules.session.now_ms()
        came = len(messages)
        messages = self._tags.pick(messages)
        self._rules.filtered += came - len(messages)
        fresh = self.window.add(messages)
        self.window.advance_to(next_offset)
        if fresh:
            self._rules.on_pulled(self, fresh)

    def failed(self, error: Exception) -> None:
        """A pull that was not answered."""
        self._is_asked = False
        if self.is_dropped or self.is_stopped:
            return
        self._trouble_with(str(error))
        self._from_id = LEADER
        self._rules.session.spawn(self._rules.refresh(self.queue.topic))
        self._later(AFTER_ERROR_S)

    def _refused(self, code: int, frame: Frame) -> None:
        if code in _NO_HEARTBEAT:
            self._rules.session.beat_soon()
            self._later(self._heartbeat_wait_s)
            self._heartbeat_wait_s = min(self._heartbeat_wait_s * 2, AFTER_ERROR_S)
            return
        if code in _BUSY:
            self._later(BROKER_BUSY_S)
            return
        self.failed(RequestRefused(code, frame.remark or "no remark"))

    def _trouble_with(self, reason: str) -> None:
        if reason != self._trouble:
            log.warning("pull_failed queue=%s reason=%s", self.queue, reason)
            self._trouble = reason

    def _well(self) -> None:
        self._heartbeat_wait_s = NO_HEARTBEAT_S
        if self._trouble:
            log.info("pull_works_again queue=%s", self.queue)
            self._trouble = ""
