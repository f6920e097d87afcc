"""The operator of a simulated cluster: creates topics, deletes some, resets offsets, asks by key.

Owns: what goes through a broker's and a name server's admin requests in a run. One rule: what a
server said it has done is written down as done, and checked after every crash.
"""

from __future__ import annotations

import random

import msgspec

from cometmq.testing.client import Answer, Client, ignore
from cometmq.testing.history import History
from cometmq.wire import record
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import (
    CreateTopicHeader,
    PutKVHeader,
    QueryMessageHeader,
    ResetOffsetHeader,
    TopicHeader,
    to_ext,
)

KV_NAMESPACE = "SIMULATION"
SET_INTERVAL_MS = 100


class AdminPlan(msgspec.Struct, frozen=True):
    """What an operator does; `brokers` maps names to addresses."""

    brokers: dict[str, str]
    topics: dict[str, int]  # with their queue counts
    doomed: tuple[str, ...]
    reset_groups: tuple[str, ...]
    interval_ms: int
    name_servers: dict[str, str]
    trusts_topics: bool
    more_topics: dict[str, int] = {}  # that are only made
    attributes: dict[str, str] = {}  # of topics, as an operator writes them


class Admin:
    """Creates the topics, and once things have healed again; in between resets and deletes."""

    def __init__(self, plan: AdminPlan, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng
        self._missing: dict[tuple[str, str], None] = {}
        self._is_final = False
        self._settings = 0
        self._questions: dict[tuple[str, str], None] = {}
        self._want_all()
        self.next_ms = 0

    def _want_all(self) -> None:
        topics = [*self._plan.topics, *self._plan.doomed, *self._plan.more_topics]
        self._missing = {(broker, topic): None for broker in self._plan.brokers for topic in topics}

    @property
    def is_done(self) -> bool:
        return self._is_final and not self._missing and not self._questions

    def told(self, client: Client, frame: Frame) -> None:
        """Operators are told nothing."""

    def wake(self, client: Client) -> None:
        plan = self._plan
        self.next_ms = client.now_ms + 500
        if client.is_healed and not self._is_final:
            self._is_final = True
            self._want_all()
            self._choose_questions(client.history)
        if self._missing:
            for broker, topic in list(self._missing):
                self._create(client, broker, topic)
            return
        for broker, token in list(self._questions):
            self._find(client, broker, token)
        if client.is_healed:
            return
        self.next_ms = client.now_ms + 1 + self._rng.randrange(2 * SET_INTERVAL_MS)
        self._set(client)
        is_due = self._rng.randrange(plan.interval_ms) < SET_INTERVAL_MS
        if not is_due or not (plan.doomed or plan.reset_groups):
            return
        broker = self._rng.choice(list(plan.brokers))
        if plan.doomed and (not plan.reset_groups or self._rng.randrange(2)):
            topic = self._rng.choice(plan.doomed)
            self._missing[broker, topic] = None
            client.ask(
                plan.brokers[broker],
                RequestCode.DELETE_TOPIC_IN_BROKER,
                to_ext(TopicHeader(topic)),
                ignore,
            )
        else:
            # To the beginning: whatever is skipped afterwards is a fault.
            header = ResetOffsetHeader(
                self._rng.choice(list(plan.topics)), self._rng.choice(plan.reset_groups), 0, True
            )
            client.ask(
                plan.brokers[broker],
                RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
                to_ext(header),
                ignore,
            )

    def _set(self, client: Client) -> None:
        """A setting at a name server, each key once."""
        self._settings += 1
        server = self._rng.choice(list(self._plan.name_servers))
        key, value = f"{client.now_ms}-{self._settings}", str(self._rng.randrange(1000))

        def kept(answer: Answer) -> None:
            if answer.is_ok:
                client.history.settings.setdefault(server, {})[key] = value

        client.ask(
            self._plan.name_servers[server],
            RequestCode.PUT_KV_CONFIG,
            to_ext(PutKVHeader(KV_NAMESPACE, key, value)),
            kept,
        )

    def _create(self, client: Client, broker: str, topic: str) -> None:
        count = {**self._plan.more_topics, **self._plan.topics}.get(topic, 2)

        def made(answer: Answer) -> None:
            if answer.is_ok:
                self._missing.pop((broker, topic), None)
                if self._plan.trusts_topics:
                    client.history.topics.setdefault(broker, {})[topic] = None

        client.ask(
            self._plan.brokers[broker],
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            to_ext(
                CreateTopicHeader(
                    topic, count, count, 6, attributes=self._plan.attributes.get(topic)
                )
            ),
            made,
        )

    def _choose_questions(self, history: History) -> None:
        """Some acknowledged messages with a key, to be found by it."""
        keyed = [
            (place[0], ack.token)
            for place, table in history.acks.items()
            for ack in table.values()
            if history.sent[ack.token].key
        ]
        for question in self._rng.sample(keyed, min(len(keyed), 6)):
            self._questions[question] = None

    def _find(self, client: Client, broker: str, token: str) -> None:
        sent = client.history.sent[token]

        def found(answer: Answer) -> None:
            if answer.frame is None:
                return
            if sent.body in [one.body for one in record.decode_all(answer.frame.body)]:
                self._questions.pop((broker, token), None)
            elif not client.history.is_promised(broker, token):
                self._questions.pop((broker, token), None)  # lost since, and allowed to be
            elif client.is_past_grace:  # before, it may be acknowledged and not yet visible
                client.history.problem(
                    f"{broker} does not find {token} by its key: code {answer.frame.code}"
                )

        header = QueryMessageHeader(sent.topic, sent.key, 32, 0, 2**62)
        client.ask(self._plan.brokers[broker], RequestCode.QUERY_MESSAGE, to_ext(header), found)
