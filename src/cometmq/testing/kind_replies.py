"""Request and reply in the simulated cluster.

Owns: clients that ask and a group that answers. One rule of theirs: a reply reaches the client that
asked, once at most, and its sender is told yes only if it did.
"""

from __future__ import annotations

import random

from cometmq.message import StoredMessage
from cometmq.testing.client import Answer, Client, RouteCache, ignore
from cometmq.testing.history import Sent
from cometmq.testing.kinds_base import KindPlan, KindProducer, Letter, beat_body, ledger_of
from cometmq.testing.traffic import Consumer, Share
from cometmq.wire import properties, record
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import SendHeader, send_v2_ext

TOPIC = "KAsks"
REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
BEAT_MS = 700
PATIENCE_MS = 4_000
PUSH_MS = 12_000  # a broker waits ten seconds for the one who asked
NAME = "SIM_REPLY"


class Asker(KindProducer):
    """Asks, and after healing asks again until it has an answer."""

    def __init__(self, name: str, plan: KindPlan, routes: RouteCache, rng: random.Random) -> None:
        super().__init__(name, plan, routes, rng)
        self._open: dict[str, tuple[Letter, int]] = {}
        self._mine: dict[str, None] = {}
        self._beat_ms = 0

    @property
    def is_done(self) -> bool:
        return super().is_done and not self._open

    def wake(self, client: Client) -> None:
        now_ms = client.now_ms
        if client.is_healed:
            for letter, asked_ms in list(self._open.values()):
                if not 0 <= now_ms - asked_ms < PATIENCE_MS:
                    self._open[letter.token] = (letter, now_ms)
                    self._again.append(letter)
        super().wake(client)
        if self._beat_ms <= now_ms or self._beat_ms > now_ms + BEAT_MS:
            self._beat_ms = now_ms + BEAT_MS
            found = self._routes.get(client, self.plan.topic)
            for address in dict.fromkeys(one.address for one in found):
                body = beat_body(self.name, [self.group])
                client.ask(address, RequestCode.HEART_BEAT, {}, ignore, body=body)
        self.next_ms = min(self.next_ms, self._beat_ms)

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        table = {
            "CORRELATION_ID": token,
            "REPLY_TO_CLIENT": self.name,
            "TTL": str(PATIENCE_MS),
        }
        letter = Letter(token, table, body)
        self._mine[token] = None
        if client.is_healed:
            self._open[token] = (letter, client.now_ms)
        return letter

    def told(self, client: Client, frame: Frame) -> None:
        if frame.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return
        history, ledger = client.history, ledger_of(client.history)
        table = properties.parse(frame.ext.get("properties", ""))
        token, reply = table.get("CORRELATION_ID", ""), table.get(NAME, "")
        if token not in self._mine:
            history.problem(f"{self.name} got the reply {reply!r} to {token!r}, of somebody else")
        sent = history.sent.get(reply)
        if sent is None or sent.body != frame.body or sent.attributes.get("to") != token:
            history.problem(f"{self.name} got a reply that nobody sent: {reply!r}")
        ledger.ask("pushed", reply)
        if ledger.asked["pushed", reply] > 1:
            history.problem(f"{self.name} got the reply {reply!r} twice")
        self._open.pop(token, None)
        client.told_code = 0


class Answerer(Consumer):
    """Answers every request, through the broker that it came from."""

    def take(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        for message in record.decode_all(frame.body):
            self._reply(client, share, message)
        self.go_on(client, share, frame, boot)

    def _reply(self, client: Client, share: Share, message: StoredMessage) -> None:
        history, ledger = client.history, ledger_of(client.history)
        table = properties.parse(message.properties)
        token = table["CORRELATION_ID"]
        ledger.ask("replies", token)
        name = f"reply.{token}.{ledger.asked['replies', token]}"
        body = f"{name}|yes".encode()
        history.sent[name] = Sent(name, REPLY_TOPIC, body, attributes={"to": token})
        header = SendHeader(
            producerGroup=self.plan.group,
            topic=REPLY_TOPIC,
            defaultTopic="TBW102",
            defaultTopicQueueNums=1,
            queueId=0,
            sysFlag=0,
            bornTimestamp=client.now_ms,
            flag=0,
            properties=properties.build(
                {
                    "MSG_TYPE": "reply",
                    "CORRELATION_ID": token,
                    "REPLY_TO_CLIENT": table["REPLY_TO_CLIENT"],
                    "TTL": table["TTL"],
                    NAME: name,
                }
            ),
        )

        def done(answer: Answer) -> None:
            if answer.is_ok and ("pushed", name) not in ledger.asked:
                history.problem(f"the reply {name!r} was acknowledged, and nobody has it")

        client.ask(
            share.target.address,
            RequestCode.SEND_REPLY_MESSAGE_V2,
            send_v2_ext(header),
            done,
            body=body,
            timeout_ms=PUSH_MS,
        )
