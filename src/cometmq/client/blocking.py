"""The blocking producers and the blocking push consumer, for plain code.

Owns: handing calls to the background loop. One rule: the same names and methods as the asyncio
clients; every one may be called from any thread, and what those await is waited for here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from cometmq.client import consumer as aio_consumer
from cometmq.client import producer as aio_producer
from cometmq.client import transaction as aio_transaction
from cometmq.client.background import background, on_loop
from cometmq.client.received import ReceivedMessage
from cometmq.client.selector import Selector
from cometmq.client.send_future import SendFuture
from cometmq.client.sending import Sending
from cometmq.client.transaction import Check, Work
from cometmq.client.workers import Handler
from cometmq.errors import UsageError, WindowFull
from cometmq.message import Message, MessageQueue, SendResult

if TYPE_CHECKING:
    from cometmq.client.keywords import OfConsumers, OfTracedProducers

SIGNAL_S = 0.5  # how late a signal may be noticed


class Producer:
    """Sends messages, from any thread.

    >>> with Producer("shop", namesrv="127.0.0.1:9876") as producer:
    ...     producer.send(Message("orders", b"..."))

    Keywords: those of client.producer.SendOptions and client.session.Options, and
    `on_full="wait"|"raise"`: what `send_async` does when `window` sends are under way.
    """

    def __init__(
        self,
        group: str = "DEFAULT_PRODUCER",
        *,
        on_full: str = "wait",
        **keywords: Unpack[OfTracedProducers],
    ) -> None:
        if on_full not in ("wait", "raise"):
            raise UsageError(f"on_full {on_full!r} must be 'wait' or 'raise'")
        self._inner = aio_producer.Producer(group, **keywords)
        self._on_full = on_full
        self._window = self._inner.send_options.window
        self._has_room = threading.Condition()
        self._ready: deque[tuple[Sending, SendFuture[SendResult]]] = deque()
        self._is_called = False
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return repr(self._inner).replace("<Producer", "<blocking Producer", 1)

    def start(self) -> None:
        self._loop = background.check()
        background.run(self._inner.start())

    def close(self) -> None:
        """Wait for the sends under way, leave the group, close the connections. Sends of other
        threads that still wait for room are refused."""
        background.check()
        with self._has_room:
            self._is_closed = True
            self._has_room.notify_all()
        background.run(self._inner.close())

    def flush(self) -> None:
        """Wait until every send that was begun has ended."""
        background.run(self._inner.flush())

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Send, and wait until the broker has it; SendFailed tells every attempt."""
        background.check()
        future: SendFuture[SendResult] = SendFuture()
        self._submit(future, message, queue, selector, timeout_ms, is_async=False, waits=True)
        return future.result()

    def send_async(
        self,
        message: Message,
        callback: Callable[[concurrent.futures.Future[SendResult]], None] | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> concurrent.futures.Future[SendResult]:
        """Begin to send; the future has the result. With `window` sends under way it waits for
        room, or raises WindowFull (`on_full`). The callback runs on the loop's thread, where
        nothing can wait: there, and in async handlers, it raises in any case."""
        future = SendFuture(callback)
        waits = self._on_full == "wait"
        self._submit(future, message, queue, selector, timeout_ms, is_async=True, waits=waits)
        return future

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Send without asking for an answer: fastest, and nobody knows whether it arrived."""
        self._check()
        future: SendFuture[SendResult] = SendFuture()
        sending = self._inner.make(message, queue, selector, None, is_async=False, future=future)
        background.run(self._inner.finished_oneway(sending))

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Send messages of one topic as one request; `split_batch` cuts what is too large."""
        background.check()
        self._check()
        future: SendFuture[SendResult] = SendFuture()
        sending = self._inner.make_batch(messages, queue, timeout_ms, future)
        self._enter(sending, future, waits=True)
        return future.result()

    def request(
        self, message: Message, *, timeout_ms: int = 3_000, selector: Selector | None = None
    ) -> ReceivedMessage:
        """Send, and wait for the reply of whoever consumes it; RequestTimeout if none comes."""
        return background.run(
            self._inner.request(message, timeout_ms=timeout_ms, selector=selector)
        )

    def reply(self, request: ReceivedMessage, body: bytes) -> SendResult:
        """Answer a message that was sent with `request`."""
        return background.run(self._inner.reply(request, body))

    def recall(self, topic: str, recall_handle: str) -> str:
        """Take back a timed message that was not delivered yet; returns its message id."""
        return background.run(self._inner.recall(topic, recall_handle))

    def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of a topic can be sent to."""
        return background.run(self._inner.queues(topic))

    def _submit(
        self,
        future: SendFuture[SendResult],
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout_ms: int | None,
        *,
        is_async: bool,
        waits: bool,
    ) -> None:
        if self._loop is None or self._loop is not background.running:
            self._check()
        sending = self._inner.make(
            message, queue, selector, timeout_ms, is_async=is_async, future=future
        )
        self._enter(sending, future, waits=waits)

    def _enter(self, sending: Sending, future: SendFuture[SendResult], *, waits: bool) -> None:
        """Hand it to the loop, when there is room."""
        if self._inner.under_way + len(self._ready) >= self._window:
            if not waits:
                raise WindowFull(f"{self._window} sends are under way (window)")
            if background.is_here():
                raise WindowFull(
                    f"{self._window} sends are under way (window), and a callback or an async "
                    f"handler can't wait for room: it is on the thread that would make some"
                )
            self._wait_for_room(sending.ends)
        self._ready.append((sending, future))
        if not self._is_called:  # one wake-up of the loop for all that gather until it runs
            self._is_called = True
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._begin_ready)

    def _check(self) -> None:
        """UsageError unless it was started, in this process."""
        if self._loop is None:
            raise UsageError("start the producer first: `with Producer(...)` or start()")
        if self._loop is not background.running:
            background.get()  # after a fork that says more
            raise UsageError("this producer was made by another process")

    def _begin_ready(self) -> None:
        self._is_called = False
        ready, inner = self._ready, self._inner
        taken = list(ready)  # in one step, while other threads append
        SendFuture.begin_all([future for _, future in taken])
        now = inner.loop.time()
        for sending, future in taken:
            ready.popleft()  # as it begins: the window counts both
            if future.running():
                if inner.is_closed:
                    sending.refused(UsageError(aio_producer.CLOSED))
                elif now < sending.ends:
                    inner.begin(sending)
                else:
                    sending.expired()
            elif inner.on_ended is not None:
                inner.on_ended()

    def _wait_for_room(self, ends: float) -> None:
        """Until there is room, or the time of the send is over: then the loop ends it. UsageError
        if the producer is closed meanwhile."""
        inner = self._inner
        with self._has_room:
            while True:
                if self._is_closed:
                    raise UsageError(aio_producer.CLOSED)
                inner.on_ended = self._ended  # first ask to be told, then look
                if inner.under_way + len(self._ready) < self._window:
                    return
                left_s = ends - inner.loop.time()
                if left_s <= 0:
                    return
                self._has_room.wait(left_s)

    def _ended(self) -> None:
        """A send has ended, and threads wait; on the loop's thread. They are woken when half the
        window is free: a wake-up for every single one would cost more than the send."""
        if self._inner.under_way + len(self._ready) <= self._window // 2:
            with self._has_room:
                self._inner.on_ended = None
                self._has_room.notify_all()


class TransactionProducer:
    """Sends messages together with your own work; see client.transaction.TransactionProducer.

    >>> with TransactionProducer("shop", check=look_it_up, namesrv=...) as producer:
    ...     with producer.transaction(Message("orders", b"...")):
    ...         database.commit()          # raises: rolled back; ends: committed
    """

    def __init__(self, group: str, check: Check, **keywords: Unpack[OfTracedProducers]) -> None:
        self._inner = aio_transaction.TransactionProducer(group, check, **keywords)

    def __repr__(self) -> str:
        return repr(self._inner).replace("<Trans", "<blocking Trans", 1)

    def start(self) -> None:
        background.run(self._inner.start())

    def close(self) -> None:
        background.run(self._inner.close())

    def __enter__(self) -> TransactionProducer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Message, work: Work, *, timeout_ms: int | None = None) -> SendResult:
        """Send a half message, run `work(message)` on another thread, end as it says: an Outcome,
        or None for COMMIT. If it raises, the message is rolled back and the error goes on."""
        return background.run(self._inner.send(message, work, timeout_ms=timeout_ms))

    @contextmanager
    def transaction(
        self, message: Message, *, timeout_ms: int | None = None
    ) -> Iterator[SendResult]:
        """A half message around a block: committed if it ends, rolled back if it raises."""
        context = self._inner.transaction(message, timeout_ms=timeout_ms)
        sent = background.run(_enter(context))
        try:
            yield sent
        except BaseException as error:
            if not background.run(_leave(context, error)):
                raise
        else:
            background.run(_leave(context, None))


class Consumer:
    """A member of a consumer group; see client.consumer.Consumer for the keywords.

    >>> with Consumer("billing", namesrv="127.0.0.1:9876") as consumer:
    ...     consumer.subscribe("orders", "paid || refunded", handle)
    ...     consumer.run()

    A handler takes one message (a list with batch=n). Returning acknowledges; raising, or returning
    Later(...), asks for redelivery. Plain handlers run on threads, async ones on the background
    loop.
    """

    def __init__(self, group: str, **keywords: Unpack[OfConsumers]) -> None:
        self._inner = aio_consumer.Consumer(group, **keywords)
        self._inner.is_loop_shared = True

    def __repr__(self) -> str:
        return repr(self._inner).replace("<Consumer", "<blocking Consumer", 1)

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this member has now."""
        return self._inner.queues

    @property
    def stats(self) -> aio_consumer.Stats:
        """Counts since the start."""
        return self._inner.stats

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subscribe(
        self,
        topic: str,
        tags: str | Handler = "*",
        handler: Handler | None = None,
        *,
        sql: str = "",
    ) -> None:
        """Have a topic's messages handled: all, those with `a || b` as their tag, or by SQL92."""
        background.run(on_loop(lambda: self._inner.subscribe(topic, tags, handler, sql=sql)))

    def unsubscribe(self, topic: str) -> None:
        background.run(on_loop(lambda: self._inner.unsubscribe(topic)))

    def pause(self) -> None:
        """Ask for no more messages, until `resume`; stay a member and keep the queues. What was
        fetched already, and what a pull under way brings, is handled all the same."""
        background.run(on_loop(self._inner.pause))

    def resume(self) -> None:
        background.run(on_loop(self._inner.resume))

    @property
    def is_paused(self) -> bool:
        return self._inner.is_paused

    def start(self) -> None:
        """Join the group and begin to consume, in the background."""
        background.run(self._inner.start())

    def run(self) -> None:
        """Consume until `close` is called, or until Ctrl-C or SIGTERM; then close in good order.

        Raises the SystemExit or KeyboardInterrupt of a handler, which ends it too.
        """
        with _closing_on_sigterm(self._inner):
            loop = background.check()
            future = asyncio.run_coroutine_threadsafe(self._inner.run_to_end(), loop)
            try:
                # In slices: a main thread that waits without end would not see a signal.
                while not future.done():
                    concurrent.futures.wait([future], SIGNAL_S)
                interrupt = future.result()
            except BaseException:
                self.close()
                raise
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Let handlers at work end, store offsets, leave the group; others take over at once."""
        background.run(self._inner.close())


@contextmanager
def _closing_on_sigterm(consumer: aio_consumer.Consumer) -> Iterator[None]:
    """SIGTERM closes the consumer, unless the program handles it in its own way."""
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if not is_ours:
        yield
        return

    def close(_number: int, _frame: object) -> None:
        asyncio.run_coroutine_threadsafe(consumer.close(), background.get())

    signal.signal(signal.SIGTERM, close)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _enter(context: Any) -> SendResult:
    sent: SendResult = await context.__aenter__()
    return sent


async def _leave(context: Any, error: BaseException | None) -> bool:
    if error is None:
        return bool(await context.__aexit__(None, None, None))
    return bool(await context.__aexit__(type(error), error, error.__traceback__))
