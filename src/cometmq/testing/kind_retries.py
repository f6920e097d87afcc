"""Retries and dead letters in the simulated cluster.

Owns: a group that fails, and the check of what became of its messages. One rule of theirs: a
message that is sent back is there once more for each time it was sent back, counted one higher and
a level later; after its last try it is a dead letter, as often as that was asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cometmq.broker import names
from cometmq.message import StoredMessage
from cometmq.testing.client import Answer, Client
from cometmq.testing.history import Sent
from cometmq.testing.kinds_base import (
    ATTEMPT,
    Promise,
    Record,
    View,
    check_promises,
    ledger_of,
    lot,
)
from cometmq.testing.traffic import Consumer, Share
from cometmq.wire import properties, record
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import SendBackHeader, to_ext

TOPIC = "KRetries"
GROUP = "GRetries"
RETRY = names.RETRY_PREFIX + GROUP
DEAD = names.DEAD_LETTER_PREFIX + GROUP
MOST_TIMES = 2
FIRST_LEVEL = 3


def failures(token: str) -> int:
    """How often the group fails to handle a message; more than MOST_TIMES: it never can."""
    return lot(token, MOST_TIMES + 2)


class FailingConsumer(Consumer):
    """Sends back what it can't handle, and goes on only when the broker has it."""

    def is_mine(self, sent: Sent, message: StoredMessage) -> bool:
        return message.topic in (sent.topic, RETRY)

    def take(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        history, ledger = client.history, ledger_of(client.history)
        failed: list[StoredMessage] = []
        for message in record.decode_all(frame.body):
            token = bytes(message.body).partition(b"|")[0].decode()
            times = message.reconsume_times
            is_again = message.topic == RETRY
            if is_again != (times > 0) or times > failures(token):
                history.problem(f"{GROUP} got {token} from {message.topic}, tried {times} times")
            if times < failures(token):
                failed.append(message)
        left = [len(failed)]
        is_sound = [True]

        def done(key: tuple[Any, ...], answer: Answer) -> None:
            left[0] -= 1
            if answer.is_ok:
                broker = share.target.broker
                is_firm = history.sync_brokers[broker]
                ledger.promises.append(Promise(broker, answer.boot, is_firm, key))
            else:
                is_sound[0] = False
            if not left[0]:
                if is_sound[0]:
                    self.go_on(client, share, frame, boot)
                else:
                    self.rest(client, share, 300)

        if not failed:
            self.go_on(client, share, frame, boot)
        for message in failed:
            name = properties.get(message.properties, ATTEMPT) or ""
            key = ("back", name, message.reconsume_times + 1)
            ledger.ask(share.target.broker, *key)
            header = SendBackHeader(
                offset=message.log_offset,
                group=GROUP,
                delayLevel=0,
                originMsgId=name,
                originTopic=message.topic,
                maxReconsumeTimes=MOST_TIMES,
            )
            client.ask(
                share.target.address,
                RequestCode.CONSUMER_SEND_MSG_BACK,
                to_ext(header),
                partial(done, key),
            )


def _count(view: View) -> dict[tuple[Any, ...], int]:
    """How often each message came back, by its number of tries."""
    have: dict[tuple[Any, ...], int] = {}
    for one in view.records:
        is_back = (
            one.topic == names.SCHEDULE_TOPIC and one.table.get(properties.REAL_TOPIC) == RETRY
        )
        if is_back or one.topic == DEAD:
            key = ("back", one.attempt, one.reconsume_times)
            have[key] = have.get(key, 0) + 1
    return have


def check(view: View) -> None:
    for one in view.records:
        if one.topic == names.SCHEDULE_TOPIC and one.table.get(properties.REAL_TOPIC) == RETRY:
            _judge_retry(view, one)
        elif one.topic == DEAD and one.reconsume_times != MOST_TIMES + 1:
            view.problem(f"{one.attempt} is a dead letter after {one.reconsume_times} tries")
    have = _count(view)
    for key, count in have.items():
        asked = view.ledger.asked.get((view.name, *key), 0)
        if count > asked:
            view.problem(f"{key[1]} came back {count} times as try {key[2]}, asked {asked} times")
    check_promises(view, "back", have)


def _judge_retry(view: View, one: Record) -> None:
    times = one.reconsume_times
    if not 1 <= times <= MOST_TIMES or one.delay_level != FIRST_LEVEL + times - 1:
        view.problem(f"{one.attempt} waits in level {one.delay_level} for try {times}")
    if one.table.get(properties.RETRY_TOPIC) != TOPIC:
        view.problem(f"{one.attempt} forgot where it came from")


def unmet(view: View) -> list[str]:
    """Every message has had all tries that it needs."""
    have = _count(view)
    texts: list[str] = []
    if any(group == GROUP and place[0] == view.name for group, place in view.history.excused):
        return texts  # a power loss made the group skip messages, as it may without SYNC_FLUSH
    for one in view.records:
        if one.topic != TOPIC or one.log_offset < view.begin:
            continue
        if (view.name, one.attempt) in view.ledger.excused:
            continue
        token = view.ledger.attempts[one.attempt].token
        for times in range(1, failures(token) + 1):
            if ("back", one.attempt, times) not in have:
                texts.append(f"{view.name}: {one.attempt} never came to try {times}")
                break
    return texts[:5]
