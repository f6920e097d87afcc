"""The blocking pull consumer and the blocking simple consumer, for plain code.

Owns: handing calls to the background loop. One rule: the same names and methods as the asyncio
ones, where each is described.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Unpack

from cometmq.client import pull_consumer as aio_pull
from cometmq.client import simple_consumer as aio_simple
from cometmq.client.background import background, on_loop
from cometmq.client.fetching import ANSWER_MS
from cometmq.client.pull_consumer import POLL_COUNT, POLL_S, PULL_COUNT
from cometmq.client.reading import ALL, Pulled, PulledRaw
from cometmq.client.received import ReceivedMessage
from cometmq.client.simple_consumer import INVISIBLE_S, RECEIVE_COUNT, WAIT_S, PoppedMessage
from cometmq.message import MessageQueue

if TYPE_CHECKING:
    from cometmq.client.keywords import OfPullConsumers, OfSimpleConsumers


class PullConsumer:
    """Takes messages when you ask for them.

    >>> with PullConsumer("billing", namesrv="127.0.0.1:9876") as consumer:
    ...     consumer.subscribe("orders", "paid")
    ...     for message in consumer:
    ...         print(message.body)
    """

    def __init__(self, group: str, **keywords: Unpack[OfPullConsumers]) -> None:
        self._inner = aio_pull.PullConsumer(group, **keywords)

    def __repr__(self) -> str:
        return repr(self._inner).replace("<PullConsumer", "<blocking PullConsumer", 1)

    def __enter__(self) -> PullConsumer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Message after message, until it is closed; each counts as done when the next is asked
        for. Whatever else is called between two of them takes effect with the next."""
        while not self._inner.session.is_closed:
            # The loop is asked for many at a time: a turn of it for each would cost more than
            # most handling. What is not handed out it takes back, whoever ends the loop and how.
            lent = background.run(self._inner.lend())
            while lent is not None and (message := lent.next()) is not None:
                yield message

    def start(self) -> None:
        """Join the group if there are subscriptions; Unreachable if no name server answers."""
        background.run(self._inner.start())

    def close(self) -> None:
        """Commit what is confirmed (with auto_commit), leave the group, end everything."""
        background.run(self._inner.close())

    def subscribe(self, topic: str, tags: str = ALL, *, sql: str = "") -> None:
        """Share the topic's queues with the other members of the group; again: another filter."""
        background.run(on_loop(lambda: self._inner.subscribe(topic, tags, sql=sql)))

    def unsubscribe(self, topic: str) -> None:
        """Leave the topic's queues to the others, from the next rebalance on."""
        background.run(on_loop(lambda: self._inner.unsubscribe(topic)))

    def assign(self, queues: Iterable[MessageQueue], tags: str = ALL, *, sql: str = "") -> None:
        """Read exactly these queues, whoever else does; replaces what was assigned before.

        Such a consumer is no member of its group, it only uses the group's offsets.
        """
        background.run(self._inner.assign(queues, tags, sql=sql))

    def assigned(self) -> list[MessageQueue]:
        """The queues that this consumer reads now."""
        return background.run(on_loop(lambda: self._inner.assigned()))

    def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic that can be read."""
        return background.run(self._inner.queues(topic))

    def poll(self, timeout_s: float = POLL_S, most: int = POLL_COUNT) -> list[ReceivedMessage]:
        """The next messages, in order within each queue; none after `timeout_s` without any.

        Says that all messages handed out before are done with. RequestRefused if a broker says that
        this consumer may not read a queue, or can't understand its filter.
        """
        return background.run(self._inner.poll(timeout_s, most))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Hand out from this offset on; one that the queue lacks becomes its nearest end."""
        background.run(on_loop(lambda: self._inner.seek(queue, offset)))

    def seek_to_begin(self, *queues: MessageQueue) -> None:
        """To the oldest message of these queues, or of all that are assigned."""
        background.run(self._inner.seek_to_begin(*queues))

    def seek_to_end(self, *queues: MessageQueue) -> None:
        """Behind the newest message of these queues, or of all that are assigned."""
        background.run(self._inner.seek_to_end(*queues))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Hand nothing out of these queues until `resume`; fetching ahead stops too."""
        background.run(on_loop(lambda: self._inner.pause(queues)))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        background.run(on_loop(lambda: self._inner.resume(queues)))

    def position(self, queue: MessageQueue) -> int:
        """The offset that poll hands out next."""
        return background.run(on_loop(lambda: self._inner.position(queue)))

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's stored offset; None if there is none. Any queue may be asked for."""
        return background.run(self._inner.committed(queue))

    def begin_offset(self, queue: MessageQueue) -> int:
        """The least offset that is still there."""
        return background.run(self._inner.begin_offset(queue))

    def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return background.run(self._inner.end_offset(queue))

    def offset_for_time(self, queue: MessageQueue, when: datetime | int) -> int:
        """The first offset stored at this time (or ms since 1970) or later; else the end.

        A RocketMQ 4 broker gives the nearest instead, which may be the message before that time.
        """
        return background.run(self._inner.offset_for_time(queue, when))

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store these offsets, or that all that was handed out is done with; returns when the
        brokers have them. All are tried; then the first error is raised.
        """
        background.run(self._inner.commit(offsets))

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        most: int = PULL_COUNT,
        tags: str = ALL,
        suspend_ms: int = 0,
        timeout_ms: int = ANSWER_MS,
        *,
        sql: str = "",
    ) -> Pulled:
        """One pull of any queue; no subscription is needed and no position is moved.

        `suspend_ms`: how long the broker waits for a message if the offset is the queue's end;
        `timeout_ms` is counted from then on.
        """
        return background.run(
            self._inner.pull(queue, offset, most, tags, suspend_ms, timeout_ms, sql=sql)
        )

    def pull_raw(
        self,
        queue: MessageQueue,
        offset: int,
        most: int = PULL_COUNT,
        tags: str = ALL,
        suspend_ms: int = 0,
        timeout_ms: int = ANSWER_MS,
        *,
        sql: str = "",
    ) -> PulledRaw:
        """As `pull`, with the records as they came."""
        return background.run(
            self._inner.pull_raw(queue, offset, most, tags, suspend_ms, timeout_ms, sql=sql)
        )


class SimpleConsumer:
    """Receives messages and acknowledges them one by one, over pop (5.x brokers).

    >>> with SimpleConsumer("billing", "orders", namesrv="127.0.0.1:9876") as consumer:
    ...     for message in consumer.receive():
    ...         consumer.ack(message)
    """

    def __init__(
        self, group: str, topic: str = "", tags: str = "*", **keywords: Unpack[OfSimpleConsumers]
    ) -> None:
        self._inner = aio_simple.SimpleConsumer(group, topic, tags, **keywords)

    def __repr__(self) -> str:
        return repr(self._inner).replace("<SimpleConsumer", "<blocking SimpleConsumer", 1)

    def __enter__(self) -> SimpleConsumer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        background.run(self._inner.start())

    def close(self) -> None:
        """Leave the group. What was received and not acknowledged returns in its time."""
        background.run(self._inner.close())

    def subscribe(self, topic: str, tags: str = ALL, *, sql: str = "") -> None:
        """Receive of this topic too; again: another filter."""
        background.run(on_loop(lambda: self._inner.subscribe(topic, tags, sql=sql)))

    def unsubscribe(self, topic: str) -> None:
        background.run(on_loop(lambda: self._inner.unsubscribe(topic)))

    def receive(
        self, most: int = RECEIVE_COUNT, invisible_s: float = INVISIBLE_S, wait_s: float = WAIT_S
    ) -> list[PoppedMessage]:
        """Some messages, or none after `wait_s`. Each is hidden from others for `invisible_s`.

        Of several brokers and topics each is asked in turn; an error is raised if all fail.
        """
        return background.run(self._inner.receive(most, invisible_s, wait_s))

    def ack(self, messages: PoppedMessage | Sequence[PoppedMessage]) -> None:
        """These are done with. One that was late (its invisible time is over) may come again.

        Several are acknowledged with one request to each broker. All brokers are tried; then the
        first error is raised.
        """
        background.run(self._inner.ack(messages))

    def change_invisible(self, message: PoppedMessage, seconds: float) -> None:
        """Hide it for so long from now on; its receipt is replaced, the former one is void."""
        background.run(self._inner.change_invisible(message, seconds))
