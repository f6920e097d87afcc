"""Transactions in the simulated cluster: half messages, their ends, and the question about them.

Owns: producers that commit, roll back, or never say; and the check of the half topic, its op
records and what came out. One rule of theirs: a half is unseen until its producer commits it, then
there once; rolled back it never is; unended it is asked about, so often, and then put aside, once.
"""

from __future__ import annotations

import random

import msgspec

from cometmq.broker import names
from cometmq.testing.client import Answer, Client, RouteCache, Target, ignore
from cometmq.testing.kinds_base import (
    ATTEMPT,
    Attempt,
    KindPlan,
    KindProducer,
    Letter,
    Promise,
    Record,
    View,
    beat_body,
    check_promises,
    ledger_of,
    lot,
)
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import TRANSACTION_MASK, RequestCode, SysFlag
from cometmq.wire.frame import Frame
from cometmq.wire.headers import CheckTransactionHeader, EndTransactionHeader, to_ext

TOPIC = "KTransactions"
BEAT_MS = 700
COMMIT, ROLLBACK, NEVER = "commit", "rollback", "never"


def fate(token: str) -> str:
    """What the producer's own books say of a transaction, whoever looks into them."""
    return (COMMIT, COMMIT, COMMIT, ROLLBACK, ROLLBACK, NEVER)[lot(token, 6)]


class TransactionProducer(KindProducer):
    """Sends halves; ends some at once, some when asked, some never."""

    def __init__(self, name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> None:
        super().__init__(name, plan, routes, rng)
        self._beat_ms = 0

    @property
    def group(self) -> str:
        # Several groups: whoever is asked must be of the right one.
        return f"group-{self.name.partition('.')[0]}"

    def wake(self, client: Client) -> None:
        super().wake(client)
        if self._beat_ms <= client.now_ms or self._beat_ms > client.now_ms + BEAT_MS:
            self._beat_ms = client.now_ms + BEAT_MS
            found = self._routes.get(client, self.plan.topic)
            for address in dict.fromkeys(one.address for one in found):
                body = beat_body(self.name, [self.group])
                client.ask(address, RequestCode.HEART_BEAT, {}, ignore, body=body)
        self.next_ms = min(self.next_ms, self._beat_ms)

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        table = {properties.HALF: "true", properties.PRODUCER_GROUP: self.group}
        if self.rng.randrange(5) == 0:
            table[properties.DELAY] = "1"
        return Letter(token, table, body, sys_flag=int(SysFlag.PREPARED))

    def place_of(self, attempt: Attempt, ext: dict[str, str]) -> tuple[str, int]:
        return names.HALF_TOPIC, 0

    def stored(
        self,
        client: Client,
        letter: Letter,
        attempt: Attempt,
        target: Target,
        answer: Answer,
        log_offset: int,
    ) -> None:
        assert answer.frame is not None
        if fate(letter.token) == NEVER or self.rng.randrange(3) == 0:
            return  # the broker will have to ask
        offset = int(answer.frame.ext["queueOffset"])
        self._end(client, target.address, attempt, log_offset, offset, is_asked=False)

    def _end(
        self,
        client: Client,
        address: str,
        attempt: Attempt,
        log_offset: int,
        queue_offset: int,
        *,
        is_asked: bool,
    ) -> None:
        ledger = ledger_of(client.history)
        decision = fate(attempt.token)
        header = EndTransactionHeader(
            producerGroup=self.group,
            tranStateTableOffset=queue_offset,
            commitLogOffset=log_offset,
            commitOrRollback=int(SysFlag.COMMIT if decision == COMMIT else SysFlag.ROLLBACK),
            msgId=f"{attempt.name:0>32}",
            transactionId=f"{attempt.name:0>32}",
            fromTransactionCheck=is_asked,
        )
        ledger.ask(attempt.broker, decision, attempt.name)

        def done(answer: Answer) -> None:
            if answer.is_ok:
                is_firm = self.is_firm(attempt.broker)
                key = ("end", attempt.name, decision)
                ledger.promises.append(Promise(attempt.broker, answer.boot, is_firm, key))

        is_oneway = bool(self.rng.randrange(2))
        client.ask(address, RequestCode.END_TRANSACTION, to_ext(header), done, is_oneway=is_oneway)

    def told(self, client: Client, frame: Frame) -> None:
        """39: how did it end?"""
        if frame.code != RequestCode.CHECK_TRANSACTION_STATE:
            return
        history, ledger = client.history, ledger_of(client.history)
        header = headers.parse(CheckTransactionHeader, frame.ext)
        (message,) = record.decode_all(frame.body)
        table = properties.parse(message.properties)
        attempt = ledger.attempts.get(table.get(ATTEMPT, ""))
        if attempt is None or table.get(properties.PRODUCER_GROUP) != self.group:
            history.problem(f"{self.name} of {self.group} was asked about {table}")
            return
        ledger.ask("checks", attempt.name)
        found = self._routes.get(client, self.plan.topic)
        address = next((one.address for one in found if one.broker == attempt.broker), None)
        is_silent = fate(attempt.token) == NEVER or self.rng.randrange(4) == 0
        if address is not None and not is_silent:
            self._end(
                client,
                address,
                attempt,
                header.commitLogOffset,
                header.tranStateTableOffset,
                is_asked=True,
            )


class _Chain(msgspec.Struct):
    """One transaction in a log: its half, and the copies made of it."""

    newest: int = -1
    first: Record | None = None
    is_ended: bool = False
    commits: int = 0
    discards: int = 0


class _Walk:
    """Follows every half through the log."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.chains: dict[str, _Chain] = {}
        self._by_offset: dict[int, str] = {}

    def look(self, one: Record) -> None:
        if one.topic == names.OP_TOPIC:
            for text in one.body.decode().rstrip(",").split(","):
                self._op(int(text))
            return
        attempt = self.view.ledger.attempts.get(one.attempt)
        if attempt is None or attempt.topic != TOPIC:
            return
        chain = self.chains.setdefault(one.attempt, _Chain())
        if one.topic == names.HALF_TOPIC:
            self._half(chain, one)
        elif one.topic == names.CHECK_MAX_TOPIC:
            chain.discards += 1
            most = self.view.broker.config.transaction_check_max
            if one.table.get(properties.CHECK_TIMES) != str(most):
                times = one.table.get(properties.CHECK_TIMES)
                self.view.problem(f"{one.attempt} was given up after {times} questions, not {most}")
        elif one.topic == names.SCHEDULE_TOPIC or not one.delay_level:
            self._commit(chain, one)

    def _half(self, chain: _Chain, one: Record) -> None:
        view = self.view
        if chain.first is None:
            chain.first = one
        if chain.is_ended or chain.commits or chain.discards:
            view.problem(f"half {one.attempt} was asked about after its end")
        times = int(one.table.get(properties.CHECK_TIMES, "0"))
        if times > view.broker.config.transaction_check_max:
            view.problem(f"half {one.attempt} was asked about {times} times")
        chain.newest = one.queue_offset
        self._by_offset[one.queue_offset] = one.attempt

    def _op(self, offset: int) -> None:
        name = self._by_offset.get(offset)
        if name is None:
            if not self.view.has_lost_begin:
                self.view.problem(f"an op record ends half {offset}, which is not there")
            return
        chain = self.chains[name]
        if chain.newest == offset:
            chain.is_ended = True
            is_rolled_back = (self.view.name, ROLLBACK, name) in self.view.ledger.asked
            if not (chain.commits or chain.discards or is_rolled_back):
                self.view.problem(f"half {name} was ended, and nobody asked for it")

    def _commit(self, chain: _Chain, one: Record) -> None:
        view = self.view
        if (view.name, COMMIT, one.attempt) not in view.ledger.asked:
            view.problem(f"half {one.attempt} was delivered, and nobody committed it")
        if one.sys_flag & TRANSACTION_MASK != int(SysFlag.COMMIT):
            view.problem(f"{one.attempt} was delivered without the mark of a commit")
        if chain.first is None and not view.has_lost_begin:
            view.problem(f"{one.attempt} was delivered without a half")
        if chain.is_ended:
            view.problem(f"half {one.attempt} was delivered after its end")
        chain.commits += 1


def walk(view: View) -> _Walk:
    found = _Walk(view)
    for one in view.records:
        found.look(one)
    return found


def check(view: View) -> None:
    found = walk(view)
    is_noted = view.broker.config.transaction_op_interval_ms == 0
    have: dict[tuple[str, ...], int] = {}
    for name, chain in found.chains.items():
        if chain.commits + chain.discards > 1:
            view.problem(f"half {name}: {chain.commits} times out, {chain.discards} times aside")
        is_ended = chain.is_ended or not is_noted
        # Several ends may be said yes to, if a crash took the first one back.
        have["end", name, COMMIT] = 99 if chain.commits and is_ended else 0
        have["end", name, ROLLBACK] = 99 if chain.is_ended and not chain.commits else 0
    check_promises(view, "end", have)


def unmet(view: View) -> list[str]:
    texts = []
    for name, chain in walk(view).chains.items():
        if chain.first is None or chain.first.log_offset < view.begin:
            continue
        decision = fate(view.ledger.attempts[name].token)
        is_over = chain.commits or chain.discards
        if decision == ROLLBACK and not is_over:
            # Left behind without a word counts as well: a crash forgets op records that wait to be
            # written (transactionOpBatchInterval), not that the half was done with.
            is_asked = (view.name, ROLLBACK, name) in view.ledger.asked
            is_over = chain.is_ended or (is_asked and chain.newest < view.broker.half.offset)
        if not is_over:
            texts.append(f"{view.name}: half {name} ({decision}) never came to an end")
    return texts[:5]
