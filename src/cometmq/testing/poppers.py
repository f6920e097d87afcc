"""Clients of the simulated cluster that pop: they receive, acknowledge, put off, or forget.

Owns: what the kinds `pop` and `pop_ordered` share on the client's side. One rule: a popper knows
only the receipts that it was given; what it was told goes to the ledger.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from cometmq.client.receipts import (
    PopAnswer,
    Receipt,
    batch_ack_body,
    parse_receipt,
    receipts_of,
    times_before,
)
from cometmq.client.received import ReceivedMessage, read_all
from cometmq.testing.client import TIMEOUT_MS, Answer, Client, RouteCache, ignore
from cometmq.testing.history import History, Sent
from cometmq.testing.kind_sql import wants as wants_by_expression
from cometmq.testing.kinds_base import ATTEMPT
from cometmq.testing.traffic import ConsumerPlan
from cometmq.wire import bodies, properties
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import AckHeader, ChangeInvisibleHeader, PopHeader, to_ext

MOST_TIMES = 2
"""Of a group: how often a message comes back before it is a dead letter."""
GROUP_MS = 3_000
LEAST_WAIT_MS = 20
LEAST_INVISIBLE_MS = 1_000


class Got(msgspec.Struct):
    """A message that was received, and what came with it."""

    broker: str
    address: str
    boot: int
    receipt: Receipt
    topic: str
    """The one whose queue it was taken from."""
    token: str
    attempt: str
    times: int

    @property
    def place(self) -> tuple[str, str, int, int]:
        return (self.broker, self.topic, self.receipt.queue_id, self.receipt.offset)


class _Later(msgspec.Struct):
    at_ms: int
    act: Callable[[Client], None]


class Broker(msgspec.Struct):
    """How a popper stands with one broker."""

    name: str
    address: str
    is_busy: bool = False
    again_ms: int = 0
    group_ms: int = 0
    attempt: str = ""
    tries: int = 0
    """Of the attempt."""


class Popper:
    """A member of a group that pops from all brokers, one request to each at a time."""

    is_ordered = False

    def __init__(
        self, name: str, plan: ConsumerPlan, routes: RouteCache, rng: random.Random
    ) -> None:
        self.name = name
        self.plan = plan
        self.rng = rng
        self.next_ms = 0
        self._routes = routes
        self._brokers: dict[str, Broker] = {}
        self._later: list[_Later] = []

    @property
    def is_done(self) -> bool:
        return True

    def told(self, client: Client, frame: Frame) -> None:
        """Poppers share nothing out, so nobody tells them anything."""

    def wake(self, client: Client) -> None:
        now_ms = client.now_ms
        for target in self._routes.get(client, self.plan.topics[0]):
            one = self._brokers.setdefault(target.broker, Broker(target.broker, target.address))
            one.address = target.address
        due = [one for one in self._later if one.at_ms <= now_ms]
        self._later = [one for one in self._later if one.at_ms > now_ms]
        for later in due:
            later.act(client)
        self.next_ms = now_ms + 300
        for broker in self._brokers.values():
            self._set_group(client, broker)
            if not broker.is_busy and broker.again_ms <= now_ms:
                self._pop(client, broker)
            if not broker.is_busy:
                self.next_ms = min(self.next_ms, max(broker.again_ms, now_ms + 1))
        for later in self._later:
            self.next_ms = min(self.next_ms, max(later.at_ms, now_ms + 1))

    def later(self, client: Client, wait_ms: int, act: Callable[[Client], None]) -> None:
        self._later.append(_Later(client.now_ms + wait_ms, act))
        self.next_ms = min(self.next_ms, client.now_ms + wait_ms)

    def _set_group(self, client: Client, broker: Broker) -> None:
        """Tell a broker now and then how often a message may come back: it may have forgotten."""
        if broker.group_ms > client.now_ms or client.is_past_grace:
            return
        broker.group_ms = client.now_ms + GROUP_MS
        body = msgspec.json.encode({"groupName": self.plan.group, "retryMaxTimes": MOST_TIMES})
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        client.ask(broker.address, code, {}, ignore, body=body)

    # -------------------------------------------------------------------------------------- receive

    def _pop(self, client: Client, broker: Broker) -> None:
        plan, rng = self.plan, self.rng
        broker.is_busy = True
        header = PopHeader(
            consumerGroup=plan.group,
            topic=plan.topics[0],
            queueId=rng.choice((-1, -1, 0, 1)),
            maxMsgNums=rng.choice((1, 2, 5, 32)),
            invisibleTime=rng.choice((LEAST_INVISIBLE_MS, 1_500, 3_000)),
            pollTime=rng.choice((0, plan.suspend_ms)),
            initMode=0,
            bornTime=rng.choice((0, client.now_ms)),
            expType="SQL92" if plan.expression else "TAG",
            exp=plan.expression or plan.tags,
            order=self.is_ordered,
            attemptId=self._attempt(broker),
        )
        client.ask(
            broker.address,
            RequestCode.POP_MESSAGE,
            to_ext(header),
            lambda answer: self._popped(client, broker, header, answer),
            timeout_ms=header.pollTime + TIMEOUT_MS,
        )

    def _attempt(self, broker: Broker) -> str | None:
        return None

    def _popped(self, client: Client, broker: Broker, header: PopHeader, answer: Answer) -> None:
        broker.is_busy = False
        frame = answer.frame
        known = (ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT)
        wait_ms = LEAST_WAIT_MS + self.rng.randrange(100)
        if frame is None or frame.code not in known:
            wait_ms = 300
        broker.again_ms = client.now_ms + wait_ms
        self.next_ms = min(self.next_ms, broker.again_ms)
        if frame is not None and frame.code == ResponseCode.SUCCESS:
            some = self._read(client.history, broker, frame, answer.boot)
            if not some:
                client.history.problem(f"{self.plan.group} was told FOUND, and got nothing")
            self.take(client, broker, header, some)
        elif frame is not None:
            self.missed(broker)

    def missed(self, broker: Broker) -> None:
        """There was nothing."""

    def _read(self, history: History, broker: Broker, frame: Frame, boot: int) -> list[Got]:
        told = bodies.convert(frame.ext, PopAnswer, "pop")
        messages = read_all(frame.body, broker.name)
        handles = receipts_of(told, messages, broker.name)
        found = []
        for message, handle in zip(messages, handles, strict=True):
            receipt = parse_receipt(handle)
            times = message.reconsume_times
            if self.is_ordered:
                times = times_before(told, message)
            found.append(self._got(history, broker, message, receipt, times, boot))
        return found

    def _got(
        self,
        history: History,
        broker: Broker,
        message: ReceivedMessage,
        receipt: Receipt,
        times: int,
        boot: int,
    ) -> Got:
        group, topic = self.plan.group, self.plan.topics[0]
        token = message.body.partition(b"|")[0].decode("utf-8", "replace")
        sent = history.sent.get(token)
        if sent is None or sent.body != message.body or sent.topic != topic:
            history.problem(f"{group} received a message that nobody sent to it: {token!r}")
        elif not is_wanted(self.plan, sent):
            history.problem(f"{group} received {token}, which it did not ask for")
        attempt = properties.get(message.properties_text, ATTEMPT) or ""
        real = receipt.real_topic(topic, group)
        got = Got(broker.name, broker.address, boot, receipt, real, token, attempt, times)
        history.consume(group, (broker.name, real, receipt.queue_id), receipt.offset, token)
        return got

    def take(self, client: Client, broker: Broker, header: PopHeader, some: list[Got]) -> None:
        """Do something with what was received."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- the end

    def ack(self, client: Client, got: Got, then: Callable[[Answer], None]) -> None:
        receipt = got.receipt
        header = AckHeader(
            self.plan.group, got.topic, receipt.queue_id, str(receipt), receipt.offset
        )
        client.ask(got.address, RequestCode.ACK_MESSAGE, to_ext(header), then)

    def ack_all(self, client: Client, some: list[Got], then: Callable[[Answer], None]) -> None:
        """In one request; all are of one broker."""
        pairs = [(self.plan.topics[0], got.receipt) for got in some]
        body = batch_ack_body(some[0].broker, self.plan.group, pairs)
        client.ask(some[0].address, RequestCode.BATCH_ACK_MESSAGE, {}, then, body=body)

    def change(
        self,
        client: Client,
        got: Got,
        invisible_ms: int,
        then: Callable[[Answer], None],
        *,
        suspend: bool = False,
    ) -> None:
        receipt = got.receipt
        header = ChangeInvisibleHeader(
            self.plan.group,
            got.topic,
            receipt.queue_id,
            str(receipt),
            receipt.offset,
            invisible_ms,
            suspend,
        )
        code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        client.ask(got.address, code, to_ext(header), then)


def renewed(got: Got, answer: Answer) -> Got:
    """The message with the receipt that a change has given it."""
    assert answer.frame is not None
    ext = answer.frame.ext
    receipt = msgspec.structs.replace(
        got.receipt,
        start_offset=got.receipt.offset,
        pop_ms=int(ext["popTime"]),
        invisible_ms=int(ext["invisibleTime"]),
        revive_queue=int(ext["reviveQid"]),
    )
    return msgspec.structs.replace(got, receipt=receipt, boot=answer.boot)


def is_wanted(plan: ConsumerPlan, sent: Sent) -> bool:
    """Whether a group is to get a message like this."""
    if plan.expression:
        return wants_by_expression(plan.expression, sent)
    return plan.tags == "*" or sent.tags in plan.tags.split(" || ")
