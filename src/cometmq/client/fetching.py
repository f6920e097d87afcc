"""Reading queues ahead of whoever asks: one loop a queue, and what they have brought so far.

Owns: the messages fetched and not handed out yet, and how many those may be. One rule: of each
queue messages are handed out in order, and a loop that was told to stop adds nothing.

    queue:   committed ... confirmed ... position ... fetched ... end of the queue
                             |            |            `- asked of the broker next
                             |            `- handed out next
                             `- handed out before the current poll: what auto commit stores

A pull is made while every limit is unmet, so one pull's worth a queue may come on top of each.

`take` hands out at once. `lend` gives many messages to a thread that hands them out one by one
without asking us each time; whatever looks at offsets or changes them takes back the rest first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable

from cometmq.client.in_flight import FlowLimits
from cometmq.client.reading import SQL, Filter, Pulled, PullStatus, Reader
from cometmq.client.received import ReceivedMessage
from cometmq.client.session import Session
from cometmq.errors import CometError, RequestRefused
from cometmq.message import MessageQueue
from cometmq.wire.codes import ResponseCode

log = logging.getLogger("cometmq.client")

ANSWER_MS = 10_000  # after the suspension; with 20 s of it, 30 s in all as RocketMQ has it
AFTER_ERROR_S = 1.0
MOST_AFTER_REFUSAL_S = 16.0
NOTHING_S = 0.1  # a broker that does not hold pulls must not be asked at full speed


class Flow:
    """One queue that is read: its offsets, and what was fetched and not handed out yet."""

    __slots__ = (
        "_batches",
        "committed",
        "count",
        "error",
        "fetched",
        "first_unconfirmed",
        "is_paused",
        "is_ready",
        "queue",
        "room",
        "size_bytes",
        "task",
        "trouble",
        "wanted",
    )

    def __init__(self, queue: MessageQueue, wanted: Filter, begin: int) -> None:
        self.queue = queue
        self.wanted = wanted
        self.fetched = begin
        self.committed: int | None = None
        self.first_unconfirmed: int | None = None
        """Where the messages begin that the current poll handed out, if it did."""
        self.count = 0
        self.size_bytes = 0
        self.is_paused = False
        self.is_ready = False
        self.error: RequestRefused | None = None
        self.trouble = ""
        self.room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._batches: deque[list[ReceivedMessage]] = deque()

    @property
    def position(self) -> int:
        """The offset that is handed out next."""
        return self._batches[0][0].queue_offset if self._batches else self.fetched

    @property
    def confirmed(self) -> int:
        """All before it was handed out, and more was asked for since."""
        return self.position if self.first_unconfirmed is None else self.first_unconfirmed

    def confirm_before(self, offset: int) -> None:
        """What was handed out before this offset is done with."""
        if self.first_unconfirmed is not None and offset > self.first_unconfirmed:
            self.first_unconfirmed = offset if offset < self.position else None

    def add(self, messages: list[ReceivedMessage]) -> None:
        self._batches.append(messages)
        self.count += len(messages)
        self.size_bytes += sum([one.size for one in messages])

    def take(self, most: int) -> list[ReceivedMessage]:
        """The next messages, at most one pull's worth."""
        batch = self._batches.popleft()
        if len(batch) > most:
            batch, rest = batch[:most], batch[most:]
            self._batches.appendleft(rest)
        self.count -= len(batch)
        self.size_bytes -= sum([one.size for one in batch])
        if self.first_unconfirmed is None:
            self.first_unconfirmed = batch[0].queue_offset
        return batch

    def forget(self, begin: int) -> None:
        """Drop what was fetched; it is fetched from there on."""
        self._batches.clear()
        self.count = self.size_bytes = 0
        self.fetched = begin

    def has_room(self, limits: FlowLimits) -> bool:
        if self.count >= limits.message_count or self.size_bytes >= limits.size_bytes:
            return False
        if limits.span is None or not self._batches:
            return True
        return self._batches[-1][-1].queue_offset - self.position < limits.span

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """The last that were taken are to be handed out again."""
        self._batches.appendleft(messages)
        self.count += len(messages)
        self.size_bytes += sum([one.size for one in messages])


class Lent:
    """Messages that another thread hands out one by one, until it has all or we want the rest."""

    __slots__ = ("_count", "_is_over", "_lock", "_messages", "_parts")

    def __init__(self, parts: list[tuple[Flow, list[ReceivedMessage]]]) -> None:
        self._parts = parts
        self._messages = [one for _, batch in parts for one in batch]
        self._count = 0
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[ReceivedMessage]:
        return self._messages

    def next(self) -> ReceivedMessage | None:
        """From any thread; None: ask for more."""
        with self._lock:
            if self._is_over or self._count == len(self._messages):
                return None
            self._count += 1
            return self._messages[self._count - 1]

    def end(
        self,
    ) -> tuple[tuple[Flow, int] | None, list[tuple[Flow, list[ReceivedMessage]]]]:
        """Nothing more is handed out: (whose the last was that is, and its offset; the rest)."""
        with self._lock:
            self._is_over = True
            given = self._count
        last: tuple[Flow, int] | None = None
        rest: list[tuple[Flow, list[ReceivedMessage]]] = []
        for flow, batch in self._parts:
            if given:
                last = flow, batch[min(given, len(batch)) - 1].queue_offset
            if given < len(batch):
                rest.append((flow, batch[given:]))
            given = max(0, given - len(batch))
        return last, rest


class Fetching:
    """The loops of one consumer's queues, and what they have brought."""

    def __init__(
        self,
        session: Session,
        reader: Reader,
        *,
        limits: FlowLimits,
        messages_for_all: int,
        pull_count: int,
        suspend_ms: int,
    ) -> None:
        self._session = session
        self._reader = reader
        self._limits = limits
        self._messages_for_all = messages_for_all
        self._pull_count = pull_count
        self._suspend_ms = suspend_ms
        self._count = 0
        self._ready: deque[Flow] = deque()
        self._unconfirmed: list[Flow] = []
        self._lent: Lent | None = None
        self._waiting_for_room: set[Flow] = set()
        self._refreshing: set[str] = set()
        self.arrived = asyncio.Event()
        """Set when there may be something to take."""

    # ---------------------------------------------------------------------------------- handing out

    def confirm(self) -> None:
        """All that was handed out is done with."""
        self.take_back()
        self._confirm()

    def _confirm(self) -> None:
        for flow in self._unconfirmed:
            flow.first_unconfirmed = None
        self._unconfirmed.clear()

    def take(self, most: int) -> list[ReceivedMessage]:
        """Fetched messages, a pull's worth from each queue in turn."""
        return [one for _, batch in self._take(most) for one in batch]

    def lend(self, most: int) -> Lent | None:
        """As `take`, for one who hands them out one by one; asking for the next says that the one
        before is done with. None if there is nothing."""
        assert self._lent is None, "what is lent is taken back first, by confirm"
        parts = self._take(most)
        if not parts:
            return None
        self._lent = Lent(parts)
        return self._lent

    def take_back(self) -> None:
        """End what is lent: as if only what was handed out had ever been taken."""
        lent, self._lent = self._lent, None
        if lent is None:
            return
        last, rest = lent.end()
        self._confirm()
        if last is not None:
            its, offset = last
            its.first_unconfirmed = offset
            self._unconfirmed.append(its)
        for flow, batch in reversed(rest):
            flow.put_back(batch)
            self._count += len(batch)
            self._make_ready(flow)

    def _take(self, most: int) -> list[tuple[Flow, list[ReceivedMessage]]]:
        found: list[tuple[Flow, list[ReceivedMessage]]] = []
        ready, left = self._ready, most
        while ready and left:
            flow = ready.popleft()
            if flow.is_paused or not flow.count:
                flow.is_ready = False
                continue
            if flow.first_unconfirmed is None:
                self._unconfirmed.append(flow)
            batch = flow.take(left)
            found.append((flow, batch))
            left -= len(batch)
            if not flow.count:
                flow.is_ready = False
            elif left:
                ready.append(flow)
            else:
                ready.appendleft(flow)
        if found:
            self._count -= most - left
            self._room_made()
        return found

    def refusal(self, flows: Iterable[Flow]) -> RequestRefused | None:
        """A refusal that waiting will not change: no permission, or a filter not understood."""
        for flow in flows:
            error = flow.error
            if error is None or flow.is_paused:
                continue
            if error.code in (ResponseCode.NO_PERMISSION, ResponseCode.SUBSCRIPTION_PARSE_FAILED):
                return error
            # "the broker does not support consumer to filter message by SQL92"
            if error.code == ResponseCode.SYSTEM_ERROR and flow.wanted.kind == SQL:
                return error
        return None

    def _make_ready(self, flow: Flow) -> None:
        if flow.count and not flow.is_paused and not flow.is_ready:
            flow.is_ready = True
            self._ready.append(flow)
        if self._ready:
            self.arrived.set()

    def _room_made(self) -> None:
        for flow in self._waiting_for_room:
            flow.room.set()

    # -------------------------------------------------------------------------------------- control

    def begin(self, flow: Flow) -> None:
        flow.task = self._session.spawn(self._fetch(flow))

    def stop(self, flow: Flow) -> None:
        """Read it no more. Its offsets stay as they are, for a last commit."""
        self.take_back()
        self._interrupt(flow, flow.position)

    def seek(self, flow: Flow, offset: int) -> None:
        """Go on there. It counts as said that all before it is done with."""
        self.take_back()
        is_running = flow.task is not None
        self._interrupt(flow, offset)
        flow.first_unconfirmed = None
        flow.committed = None
        if is_running:
            self.begin(flow)

    def refilter(self, flow: Flow, wanted: Filter) -> None:
        """Go on where it is, with another filter."""
        self.take_back()
        is_running = flow.task is not None
        self._interrupt(flow, flow.position)
        flow.wanted = wanted
        if is_running:
            self.begin(flow)

    def pause(self, flow: Flow) -> None:
        self.take_back()
        flow.is_paused = True

    def resume(self, flow: Flow) -> None:
        flow.is_paused = False
        flow.room.set()
        self._make_ready(flow)

    def _interrupt(self, flow: Flow, offset: int) -> None:
        """End its loop, forget its pull under way and what was fetched."""
        if flow.task is not None:
            flow.task.cancel()
            flow.task = None
        self._waiting_for_room.discard(flow)
        self._forget(flow, offset)

    def _forget(self, flow: Flow, offset: int) -> None:
        self._count -= flow.count
        flow.forget(offset)
        self._room_made()

    # ------------------------------------------------------------------------------------- the loop

    async def _fetch(self, flow: Flow) -> None:
        refusals = 0
        loop = asyncio.get_running_loop()
        while True:
            await self._until_room(flow)
            asked_at = loop.time()
            try:
                pulled = await self._reader.pull(
                    flow.queue,
                    flow.fetched,
                    flow.wanted,
                    most=self._pull_count,
                    suspend_ms=self._suspend_ms,
                    timeout_ms=ANSWER_MS,
                )
            except RequestRefused as error:
                flow.error = error
                wait_s = min(AFTER_ERROR_S * 2**refusals, MOST_AFTER_REFUSAL_S)
                refusals += 1
                await self._after_error(flow, error, wait_s)
                continue
            except CometError as error:
                await self._after_error(flow, error, AFTER_ERROR_S)
                continue
            if flow.trouble:
                log.info("pull_works_again %s", self._of(flow))
                flow.error, flow.trouble, refusals = None, "", 0
            if not pulled.messages and pulled.next_offset == flow.fetched:
                if loop.time() - asked_at < NOTHING_S:
                    await asyncio.sleep(NOTHING_S)
            elif pulled.status is PullStatus.OFFSET_ILLEGAL:
                self._moved(flow, pulled)
            else:
                flow.fetched = pulled.next_offset
                if pulled.messages:
                    flow.add(pulled.messages)
                    self._count += len(pulled.messages)
                    self._make_ready(flow)

    async def _until_room(self, flow: Flow) -> None:
        while (
            flow.is_paused
            or not flow.has_room(self._limits)
            or self._count >= self._messages_for_all
        ):
            flow.room.clear()
            self._waiting_for_room.add(flow)
            await flow.room.wait()
        self._waiting_for_room.discard(flow)

    async def _after_error(self, flow: Flow, error: CometError, wait_s: float) -> None:
        text = str(error)
        level = logging.DEBUG if text == flow.trouble else logging.WARNING
        log.log(level, "pull_failed %s reason=%s next_s=%.0f", self._of(flow), text, wait_s)
        flow.trouble = text
        await asyncio.sleep(wait_s)
        topic = flow.queue.topic
        if topic in self._refreshing:  # once for all queues that want it
            return
        self._refreshing.add(topic)
        try:
            await self._session.routes.refresh(topic)
        except CometError as why:
            log.debug("route_kept topic=%s reason=%s", topic, why)
        finally:
            self._refreshing.discard(topic)

    def _moved(self, flow: Flow, pulled: Pulled) -> None:
        """The broker does not have the offset, or somebody reset it."""
        self.take_back()
        before, after = flow.fetched, pulled.next_offset
        log.warning("offset_moved %s before=%d after=%d", self._of(flow), before, after)
        if after > before:  # old ones were removed; those that we have fetched still count
            flow.fetched = after
        else:  # reset, or the broker lost its end: what we hold may not be what is there
            self._forget(flow, after)
            flow.first_unconfirmed = None
            flow.committed = None

    def _of(self, flow: Flow) -> str:
        one = flow.queue
        return f"group={self._reader.group} queue={one.topic}@{one.broker}:{one.queue_id}"
