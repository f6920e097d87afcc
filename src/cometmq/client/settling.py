"""What becomes of a message once its handler has spoken, or has not for too long.

Owns: counting what is finished, and every way to a later try. One rule: a message is finished when
its handler returned, or when a broker has taken it back; what neither happened to stays in flight,
holds the group's offset back, and is handed out again.

    concurrent   back to the broker, which delivers it again after a delay; if no broker takes it,
                 to the handler again in 5 s
    ordered      the queue waits, then the same messages again; after the last try a copy to the
                 retry topic
    broadcasting there is no second try; it is counted
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cometmq.client.handling import EXITS, Later
from cometmq.client.pulling import PulledQueue
from cometmq.client.received import ReceivedMessage
from cometmq.client.send_back import FIRST_DELAY_LEVEL, SendBack
from cometmq.client.session import Session
from cometmq.client.workers import Job, Results, as_list
from cometmq.errors import CometError

log = logging.getLogger("cometmq.client")

HAND_AGAIN_S = 5.0  # a message that no broker takes back
SENDERS_BACK = 16  # send-backs under way at once
SAY_S = 1.0  # failures of handlers are told so often at most, with a count
SUSPEND_LEAST_MS, SUSPEND_MOST_MS = 10, 30_000
WATCH_MOST_S = 60.0


class Stats(msgspec.Struct):
    """Counts since the start."""

    handled: int = 0
    failed: int = 0
    """Messages whose handler raised or asked for a later try."""
    sent_back: int = 0
    handed_again: int = 0
    """Messages given to a handler once more because no broker took them back."""
    timed_out: int = 0
    lost_in_broadcast: int = 0
    """Failed messages of a broadcasting group: there is no second try."""


class TopicCounts(msgspec.Struct):
    """One topic's counts, and messages a second as of the last look."""

    done: int = 0
    failed: int = 0
    pulled: int = 0
    done_rate: float = 0.0
    failed_rate: float = 0.0
    pulled_rate: float = 0.0
    before: tuple[int, int, int] = (0, 0, 0)

    def look(self, seconds: float) -> None:
        """Rates since the look before."""
        done, failed, pulled = self.before
        self.done_rate = round((self.done - done) / seconds, 2)
        self.failed_rate = round((self.failed - failed) / seconds, 2)
        self.pulled_rate = round((self.pulled - pulled) / seconds, 2)
        self.before = (self.done, self.failed, self.pulled)


class Settling:
    """Results of one consumer's handlers."""

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        retry: SendBack,
        is_ordered: bool,
        is_broadcasting: bool,
        max_reconsume_times: int,
        suspend_ms: int,
        consume_timeout_s: float,
        hand_out: Callable[[PulledQueue, Sequence[ReceivedMessage]], None],
        work_line: Callable[[PulledQueue], None],
        on_interrupt: Callable[[BaseException], None],
    ) -> None:
        self.stats = Stats()
        self.counts: dict[str, TopicCounts] = defaultdict(TopicCounts)
        """By topic on the wire."""
        self.is_closing = False
        self._session = session
        self._group = group
        self._retry = retry
        self._is_ordered = is_ordered
        self._is_broadcasting = is_broadcasting
        self._max_times = max_reconsume_times
        self._suspend_ms = suspend_ms
        self._consume_timeout_s = consume_timeout_s
        self._hand_out = hand_out
        self._work_line = work_line
        self._on_interrupt = on_interrupt
        self._to_send_back: deque[tuple[PulledQueue, ReceivedMessage, int]] = deque()
        self._sender_count = 0
        self._said_at = float("-inf")
        self._unsaid = 0

    @property
    def is_sending(self) -> bool:
        """Whether messages are on their way back."""
        return self._sender_count > 0

    # ------------------------------------------------------------------------------------- results

    def settle(self, results: Results) -> None:
        finished: dict[PulledQueue, list[int]] = {}
        done = results.done
        last: PulledQueue | None = None
        offsets: list[int] = []
        for _ in range(len(done)):
            given, owned, _ = done.popleft()
            if owned is not last:
                last, offsets = owned, finished.setdefault(owned, [])
            if isinstance(given, list):
                offsets += [one.queue_offset for one in given]
            elif given is not None:
                offsets.append(given.queue_offset)
        for owned, offsets in finished.items():
            self.stats.handled += len(offsets)
            self.counts[owned.queue.topic].done += len(offsets)
            self._finish(owned, offsets)
        while results.failed:
            job, verdict = results.failed.popleft()
            self._failed(job, verdict)
        while results.cut_off:
            self._cut_off(*results.cut_off.popleft())
        while results.lines:
            owned = results.lines.popleft()
            owned.is_in_hand = False
            self._work_line(owned)

    def _finish(self, owned: PulledQueue, offsets: Sequence[int]) -> None:
        if owned.given_up:
            owned.given_up.difference_update(offsets)
        owned.window.finish(offsets)  # of a dropped one too: its last offset may not be stored yet
        owned.last_done_ms = self._session.now_ms()
        owned.room_made()

    def _failed(self, job: Job, verdict: Later | BaseException) -> None:
        given, owned, _ = job
        messages = as_list(given)
        self.stats.failed += len(messages)
        self.counts[owned.queue.topic].failed += len(messages)
        self._say_failed(verdict, messages, owned)
        if owned.is_dropped:
            return
        if self._is_ordered:
            owned.line.extendleft(reversed(messages))
            delay_ms = verdict.delay_ms if isinstance(verdict, Later) else self._suspend_ms
            self._suspend(owned, messages, delay_ms)
            return
        if owned.given_up:
            late = {one.queue_offset for one in messages} & owned.given_up
            owned.given_up -= late
            messages = [one for one in messages if one.queue_offset not in late]
        if self._is_broadcasting:
            self.stats.lost_in_broadcast += len(messages)
            self._finish(owned, [one.queue_offset for one in messages])
            return
        level = verdict.delay_level if isinstance(verdict, Later) else 0
        self.send_back_soon(owned, messages, level)

    def _say_failed(
        self, verdict: Later | BaseException, messages: list[ReceivedMessage], owned: PulledQueue
    ) -> None:
        self._unsaid += len(messages)
        now = asyncio.get_running_loop().time()
        if now - self._said_at < SAY_S or isinstance(verdict, Later):
            return
        self._said_at = now
        log.warning(
            "handler_failed group=%s topic=%s queue=%s/%d queue_offset=%d count=%d action=%s",
            self._group,
            messages[0].topic,
            messages[0].broker,
            messages[0].queue_id,
            messages[0].queue_offset,
            self._unsaid,
            "none, broadcasting has no second try" if self._is_broadcasting else "again later",
            exc_info=verdict,
        )
        self._unsaid = 0

    def _cut_off(self, job: Job, error: BaseException) -> None:
        """Cancelled or interrupted: says nothing about the message, which is handed out again."""
        given, owned, _ = job
        if isinstance(error, EXITS):
            self._on_interrupt(error)
        if self.is_closing or owned.is_dropped:
            return
        messages = as_list(given)
        if self._is_ordered:
            owned.line.extendleft(reversed(messages))
            self._suspend(owned, [], self._suspend_ms)
        else:
            self._hand_again(owned, messages)

    # --------------------------------------------------------------------------------- later tries

    def _suspend(self, owned: PulledQueue, messages: list[ReceivedMessage], delay_ms: int) -> None:
        """Ordered: the same messages again in a while; those that had all their tries go away."""
        owned.is_suspended = True
        most = self._max_times
        tired = [one for one in messages if 0 <= most <= one.reconsume_times]
        for one in messages:
            if one not in tired:
                one.reconsume_times += 1
        if tired and not self._is_broadcasting:
            self._session.spawn(self._give_up(owned, tired, delay_ms))
            return
        delay_ms = min(max(delay_ms, SUSPEND_LEAST_MS), SUSPEND_MOST_MS)
        self._session.later(delay_ms / 1e3, self._resume, owned)

    async def _give_up(
        self, owned: PulledQueue, messages: list[ReceivedMessage], delay_ms: int
    ) -> None:
        """Ordered: a copy to the retry topic, whose count makes the broker see a dead letter."""
        for one in messages:
            try:
                await self._retry.send(one, max_times=self._max_times)
            except CometError as error:
                log.warning(
                    "retry_not_sent group=%s queue=%s reason=%s action=handle again",
                    self._group,
                    owned.queue,
                    error,
                )
                one.reconsume_times += 1
                await asyncio.sleep(min(max(delay_ms, SUSPEND_LEAST_MS), SUSPEND_MOST_MS) / 1e3)
                break
            self.stats.sent_back += 1
            if owned.line and owned.line[0] is one:
                owned.line.popleft()
            self._finish(owned, [one.queue_offset])
        self._resume(owned)

    def _resume(self, owned: PulledQueue) -> None:
        owned.is_suspended = False
        self._work_line(owned)

    def send_back_soon(
        self, owned: PulledQueue, messages: Iterable[ReceivedMessage], level: int
    ) -> None:
        self._to_send_back.extend((owned, one, level) for one in messages)
        while self._sender_count < min(SENDERS_BACK, len(self._to_send_back)):
            self._sender_count += 1
            self._session.spawn(self._send_backs())

    async def _send_backs(self) -> None:
        try:
            await self._send_all_back()
        finally:  # with no turn of the loop since it saw that nothing is left
            self._sender_count -= 1

    async def _send_all_back(self) -> None:
        while self._to_send_back:
            owned, message, level = self._to_send_back.popleft()
            if owned.is_dropped:
                continue
            try:
                is_back = await self._retry.back(message, level)
            except Exception:  # our own mistake; the message must not be stuck because of it
                log.exception("send_back_failed group=%s message=%r", self._group, message)
                is_back = False
            if is_back:
                self.stats.sent_back += 1
                self._finish(owned, [message.queue_offset])
            else:
                message.reconsume_times += 1
                self._hand_again(owned, [message])

    def _hand_again(self, owned: PulledQueue, messages: list[ReceivedMessage]) -> None:
        """To the handler once more, in a while; until then it holds the offset back."""
        self.stats.handed_again += len(messages)
        self._session.later(HAND_AGAIN_S, self._hand_out_again, owned, messages)

    def _hand_out_again(self, owned: PulledQueue, messages: list[ReceivedMessage]) -> None:
        if not owned.is_dropped:
            self._hand_out(owned, messages)

    # ------------------------------------------------------------------------------------ too slow

    async def watch(self, at_work: Callable[[], Iterable[Job | None]]) -> None:
        """Find handlers that have been at one message for too long.

        No clock is read for each message: what a worker had in hand at one look and still has at a
        later one, it had all the time between.
        """
        loop = asyncio.get_running_loop()
        seen: dict[int, tuple[Job, float]] = {}
        while True:
            await asyncio.sleep(min(self._consume_timeout_s / 10, WATCH_MOST_S))
            now = loop.time()
            jobs = {id(job): job for job in at_work() if job is not None}
            seen = {key: seen.get(key, (job, now)) for key, job in jobs.items()}
            for job, since in seen.values():
                if now - since > self._consume_timeout_s:
                    await self._took_too_long(job)

    async def _took_too_long(self, job: Job) -> None:
        given, owned, _ = job
        for one in as_list(given):
            if owned.is_dropped or one.queue_offset in owned.given_up:
                continue
            owned.given_up.add(one.queue_offset)
            is_back = self._is_broadcasting or await self._retry.back(one, FIRST_DELAY_LEVEL)
            log.warning(
                "handler_too_slow group=%s queue=%s queue_offset=%d sent_back=%s",
                self._group,
                owned.queue,
                one.queue_offset,
                is_back,
            )
            if is_back:
                self.stats.timed_out += 1
                owned.window.finish([one.queue_offset])
            elif one.queue_offset in owned.given_up:
                owned.given_up.discard(one.queue_offset)
            elif one.queue_offset in owned.window:
                # Its handler has failed meanwhile, and left to us what becomes of the message.
                self._hand_again(owned, [one])
