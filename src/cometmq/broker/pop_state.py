"""Pop in a broker: its state, and what it does by itself.

Owns: who waits, who is how far, what is out in order, and the reader of the revive topic. One rule:
every checkpoint and every ack passes through here into the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.broker import names, pop_records
from cometmq.broker.offsets import Offsets
from cometmq.broker.pop_assignment import RequestModes
from cometmq.broker.pop_order import OrderedPops, Place
from cometmq.broker.pop_places import Places
from cometmq.broker.pop_polls import PollKey, Polls
from cometmq.broker.pop_receipts import normal_topic
from cometmq.broker.pop_records import Ack, Checkpoint
from cometmq.broker.pop_revive import Revive, revive_queue_count
from cometmq.broker.watches import Watches
from cometmq.ports import ConnId, Out
from cometmq.store.dispatch import Arrival
from cometmq.store.state_files import load_state
from cometmq.store.store import Store

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker

CLEAN_MS = 60_000


class Pop:
    """The pops of a broker."""

    def __init__(self, store: Store, offsets: Offsets, watches: Watches, now_ms: int) -> None:
        self.boot_ms = now_ms
        self.given_out = self.acked = self.changed = 0
        self.polls = Polls(watches.watch, store.properties_at)
        self.order = OrderedPops(load_state(store.files, "config/consumerOrderInfo.json"))
        self.modes = RequestModes(load_state(store.files, "config/messageRequestMode.json"))
        self.places = Places(offsets)
        self.revive = Revive()
        self.files = [self.order.file, self.modes.file]
        self.stored_upto = 0
        """Where in the log the last thing ends that pop has stored."""
        self._draw = 0
        self._pops = 0
        self._clean_ms = now_ms + CLEAN_MS

    def draw(self) -> int:
        """0 to 99, each once in a hundred times: a core draws no lots."""
        self._draw = (self._draw + 37) % 100
        return self._draw

    def next_revive_queue(self, broker: Broker) -> int:
        self._pops += 1
        return self._pops % revive_queue_count(broker)

    # ------------------------------------------------------------------------------- into the log

    def put_checkpoint(self, broker: Broker, queue_id: int, point: Checkpoint, now_ms: int) -> int:
        """Store what brings messages back; where it ends in the log. StoreError if it can't be."""
        message = pop_records.checkpoint_message(broker.config, queue_id, point)
        message.born_ms = now_ms
        message.born_host = message.store_host = broker.store_host
        end = broker.put(message, now_ms, is_due=False).end_offset
        self.stored_upto = end
        return end

    def put_ack(
        self, broker: Broker, queue_id: int, ack: Ack, invisible_ms: int, now_ms: int
    ) -> int:
        """Store an acknowledgement; where it ends in the log. StoreError if it can't be."""
        message = pop_records.ack_message(broker.config, queue_id, ack, invisible_ms)
        message.born_ms = now_ms
        message.born_host = message.store_host = broker.store_host
        end = broker.put(message, now_ms, is_due=False).end_offset
        self.stored_upto = end
        return end

    # ------------------------------------------------------------------------------------ the turn

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        return min(
            self.polls.next_ms,
            self.places.next_ms(broker.store.flushed_offset, now_ms),
            self.revive.next_ms(broker, now_ms),
            self.modes.next_ms,
        )

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        for poll in self.polls.due(now_ms):
            poll.again(broker, poll, now_ms, out)
        self.modes.tick(broker, now_ms, out)
        self.revive.tick(broker, now_ms, out)
        self.note(broker, now_ms)
        if self.places.wants_hurry(now_ms):
            self.places.hurried(now_ms)
            broker.store.hurry_log(now_ms)
        if now_ms >= self._clean_ms:
            self._clean_ms = now_ms + CLEAN_MS
            self.order.clean(broker, now_ms)

    def note(self, broker: Broker, now_ms: int) -> None:
        """Offsets whose checkpoints are durable now go to where offsets are kept."""

        def commit(place: Place, offset: int) -> None:
            if place[1] == names.REVIVE_GROUP or broker.groups.get(place[1]) is not None:
                broker.offsets.commit(*place, offset, now_ms, "pop")

        self.places.release(broker.store.flushed_offset, commit)

    def stop(self, broker: Broker, now_ms: int, out: Out) -> None:
        """Answer who waits; the last offsets are noted when the log is durable."""
        for poll in self.polls.drain():
            poll.again(broker, poll, now_ms, out)
        self.note(broker, now_ms)
        if not self.places.is_settled:
            broker.store.hurry_log(now_ms)

    # ------------------------------------------------------------------------------------- wake-up

    def arrived(self, broker: Broker, arrival: Arrival, now_ms: int, out: Out) -> None:
        """A message came into a queue that somebody listens to."""
        for key in self.polls.arrived(
            arrival.topic, arrival.queue_id, arrival.tags_code, arrival.log_offset
        ):
            self.wake(broker, key, now_ms, out)

    def wake(self, broker: Broker, key: PollKey, now_ms: int, out: Out) -> None:
        """Let those who wait try, one after the other, until one leaves nothing."""
        for _ in range(self.polls.of_key(key)):
            poll = self.polls.take(key)
            if poll is None or not poll.again(broker, poll, now_ms, out):
                return

    def wake_place(self, broker: Broker, place: Place, now_ms: int, out: Out) -> None:
        """A queue may give out more to a group."""
        if not self.polls.count:
            return
        topic, group, queue_id = normal_topic(place[0], place[1]), place[1], place[2]
        for key in ((topic, group, queue_id), (topic, group, -1)):
            self.wake(broker, key, now_ms, out)

    def wake_group(self, broker: Broker, topic: str, group: str, now_ms: int, out: Out) -> None:
        for key in self.polls.keys_of(topic, group):
            self.wake(broker, key, now_ms, out)

    def look_sooner(self, place: Place, at_ms: int) -> None:
        """An ordered queue is free at another time than those who wait were told."""
        topic, group, queue_id = place
        for key in ((topic, group, queue_id), (topic, group, -1)):
            self.polls.look_at(key, at_ms)

    def drop_connection(self, conn: ConnId) -> None:
        self.polls.drop_connection(conn)

    def forget_topic(self, topic: str) -> None:
        self.places.forget(topic=topic)

    def forget_group(self, group: str, now_ms: int) -> None:
        self.places.forget(group=group)
        self.modes.forget_group(group, now_ms)

    def figures(self, broker: Broker) -> dict[str, int]:
        """What is counted, for those who look on."""
        revive = self.revive
        return {
            "cometmqPopGivenOut": self.given_out,
            "cometmqPopAcked": self.acked,
            "cometmqPopInvisibleChanged": self.changed,
            "cometmqPopInFlight": self.places.in_flight_sum,
            "cometmqPopPolling": self.polls.count,
            "cometmqPopPollingFull": self.polls.refused_by_limit,
            "cometmqPopRevived": revive.revived,
            "cometmqPopDeadLetters": revive.dead,
            "cometmqPopExpired": revive.expired,
            "cometmqPopPutAgain": revive.put_again,
            "cometmqPopCheckpointsPending": revive.pending,
            "cometmqPopReviveBehind": revive.behind(broker),
        }
