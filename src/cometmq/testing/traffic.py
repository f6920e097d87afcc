"""What clients of the simulated cluster do: producers, and consumers in groups.

Owns: the roles that a testing.client.Client can play. One rule: a role knows only what the wire
told it; what it did goes to the History, and from there nothing comes back. Each role draws from
its own Random, so that one more draw shifts nobody else.
"""

from __future__ import annotations

import random
from functools import partial

import msgspec

from cometmq.message import StoredMessage
from cometmq.testing.client import TIMEOUT_MS, Answer, Client, RouteCache, Target, ignore
from cometmq.testing.history import History, Sent
from cometmq.wire import fastjson, message_id, properties, record
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode
from cometmq.wire.frame import Frame
from cometmq.wire.headers import (
    PullHeader,
    QueryConsumerOffsetHeader,
    SendHeader,
    UpdateConsumerOffsetHeader,
    send_v2_ext,
    to_ext,
)
from cometmq.wire.record import Piece

LOCK_INTERVAL_MS = 1_000
IDLE_MS = 400

# --------------------------------------------------------------------------------------- producers


class ProducerPlan(msgspec.Struct, frozen=True):
    """How a producer behaves."""

    topics: tuple[str, ...]
    mode: str  # sync, async, batch or oneway
    window: int
    interval_ms: int
    body_bytes: int
    no_wait_percent: int
    final_count: int
    firm_brokers: tuple[str, ...]
    queue_counts: dict[str, int] = {}
    """Of topics that a send may make: the same as the operator's, who else would take queues away
    with what is in them."""


class _Parcel(msgspec.Struct):
    messages: list[Sent]
    tries: int = 0


class Producer:
    """Sends, and sends again elsewhere when it isn't told that it worked."""

    def __init__(
        self, name: str, plan: ProducerPlan, routes: RouteCache, rng: random.Random
    ) -> None:
        self._name = name
        self._plan = plan
        self._routes = routes
        self._rng = rng
        self._count = 0
        self._again: list[_Parcel] = []
        self._in_flight = 0
        self._final = 0
        self.next_ms = 0

    @property
    def is_done(self) -> bool:
        return self._final >= self._plan.final_count and not self._in_flight and not self._again

    def told(self, client: Client, frame: Frame) -> None:
        """Producers are told nothing."""

    def wake(self, client: Client) -> None:
        self.next_ms = client.now_ms + 1 + self._rng.randrange(2 * self._plan.interval_ms)
        if client.is_healed and not self._again:
            self.next_ms = client.now_ms + IDLE_MS  # a retry wakes it earlier
        if self._in_flight >= self._plan.window:
            return
        if self._again:
            self._post(client, self._again.pop(0))
        elif not client.is_healed:
            self._post(client, self._make(client.history))
        elif self._final < self._plan.final_count:
            # Half of them at once, half when no excuse for silence is left; each as one burst.
            half = self._plan.final_count // 2
            if self._final < half or client.is_past_grace:
                for _ in range(half):
                    self._final += 1
                    self._post(client, self._make(client.history))

    def _make(self, history: History) -> _Parcel:
        plan, rng = self._plan, self._rng
        topic = rng.choice(plan.topics)
        count = rng.randrange(1, 6) if plan.mode == "batch" else 1
        waits = rng.randrange(100) >= plan.no_wait_percent
        messages = []
        for _ in range(count):
            self._count += 1
            token = f"{self._name}-{self._count}"
            body = f"{token}|".encode() + rng.randbytes(rng.randrange(plan.body_bytes))
            message = Sent(token, topic, body, waits_for_flush=waits)
            message.tags = rng.choice(("", "red", "blue"))
            message.key = f"key-{token}" if rng.randrange(2) else ""
            message.unique_key = f"{token:0>32}" if rng.randrange(2) else ""
            history.sent[token] = message
            messages.append(message)
        return _Parcel(messages)

    def _post(self, client: Client, parcel: _Parcel) -> None:
        targets = self._routes.get(client, parcel.messages[0].topic)
        if not targets:
            self._again.append(parcel)
            return
        target = self._rng.choice(targets)
        first = parcel.messages[0]
        is_batch = self._plan.mode == "batch"
        is_oneway = self._plan.mode == "oneway" and not client.is_healed
        if is_batch:
            body = record.join_batch(Piece(0, m.body, _properties(m)) for m in parcel.messages)
            text = "" if first.waits_for_flush else "WAIT\x01false\x02"
        else:
            body, text = first.body, _properties(first)
        header = SendHeader(
            producerGroup=f"group-{self._name}",
            topic=first.topic,
            defaultTopic="TBW102",
            defaultTopicQueueNums=self._plan.queue_counts.get(first.topic, 4),
            queueId=target.queue_id,
            sysFlag=0,
            bornTimestamp=client.now_ms,
            flag=0,
            properties=text,
            batch=is_batch,
        )
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        self._in_flight += not is_oneway
        client.ask(
            target.address,
            code,
            send_v2_ext(header),
            lambda answer: self._answered(client, parcel, target, answer),
            body=body,
            is_oneway=is_oneway,
        )

    def _answered(self, client: Client, parcel: _Parcel, target: Target, answer: Answer) -> None:
        self._in_flight -= 1
        if answer.is_ok:
            assert answer.frame is not None
            ext = answer.frame.ext
            place = (target.broker, target.topic, int(ext["queueId"]))
            is_firm = target.broker in self._plan.firm_brokers
            for number, (message, text) in enumerate(
                zip(parcel.messages, ext["msgId"].split(","), strict=True)
            ):
                client.history.acked(
                    place,
                    int(ext["queueOffset"]) + number,
                    message_id.parse_offset_id(text)[2],
                    message.token,
                    answer.boot,
                    is_firm=is_firm and message.waits_for_flush,
                )
            return
        parcel.tries += 1
        if parcel.tries < 6 or client.is_healed:
            self._again.append(parcel)
            self.next_ms = min(self.next_ms, client.now_ms + 1 + self._plan.interval_ms)


def _properties(message: Sent) -> str:
    table = {
        properties.TAGS: message.tags,
        properties.KEYS: message.key,
        properties.UNIQUE_KEY: message.unique_key,
        properties.WAIT: "true" if message.waits_for_flush else "false",
    }
    return properties.build({name: value for name, value in table.items() if value})


# --------------------------------------------------------------------------------------- consumers


class ConsumerPlan(msgspec.Struct, frozen=True):
    """How the members of a group behave."""

    group: str
    topics: tuple[str, ...]
    tags: str  # "*" or one tag
    heartbeat_ms: int
    commit_ms: int
    suspend_ms: int
    commits_by_pull: bool
    is_ordered: bool  # a queue is pulled only by who holds its lock
    kind: str = ""  # of testing.kinds; "" for plain messages
    expression: str = ""  # SQL92, instead of tags
    pulls_by_expression: bool = False  # named by each pull, and not by heartbeats only


class Share:
    """One queue that a member owns."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.offset = -1  # not known yet
        self.committed = -1
        self.is_busy = False
        self.is_dropped = False
        self.is_locked = False
        self.was_asked_for = False
        self.again_ms = 0


class Consumer:
    """A group's member: heartbeats, shares queues by AVG, pulls with long polling, commits."""

    gets_all = True
    """Whether nothing of a queue may be passed over."""

    def __init__(
        self, name: str, plan: ConsumerPlan, routes: RouteCache, rng: random.Random
    ) -> None:
        self._name = name
        self._plan = plan
        self._routes = routes
        self._rng = rng
        self._shares: dict[tuple[str, str, int], Share] = {}
        self._unlocking: dict[tuple[str, str, int], None] = {}
        self._beat_ms = 0
        self._commit_ms = 0
        self._balance_ms = 0
        self._lock_ms = 0
        self.next_ms = 0

    @property
    def is_done(self) -> bool:
        return True

    @property
    def group(self) -> str:
        return self._plan.group

    @property
    def plan(self) -> ConsumerPlan:
        return self._plan

    @property
    def places(self) -> list[tuple[str, str, int]]:
        """The queues that this member takes to be its own."""
        return list(self._shares)

    def told(self, client: Client, frame: Frame) -> None:
        if frame.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            self._balance_ms = 0
            self.next_ms = client.now_ms

    def wake(self, client: Client) -> None:
        plan, now_ms = self._plan, client.now_ms
        targets = [t for topic in plan.topics for t in self._routes.get(client, topic)]
        addresses = dict.fromkeys(t.address for t in targets)
        if self._beat_ms <= now_ms or self._beat_ms > now_ms + plan.heartbeat_ms:
            self._beat_ms = now_ms + (plan.heartbeat_ms if addresses else 100)
            for address in addresses:
                client.ask(address, RequestCode.HEART_BEAT, {}, ignore, body=self._heartbeat())
        if self._balance_ms <= now_ms or self._balance_ms > now_ms + 5_000:
            self._balance_ms = now_ms + (2_000 if targets else 100)
            self._balance(client, targets)
        if self._commit_ms <= now_ms or self._commit_ms > now_ms + plan.commit_ms:
            self._commit_ms = now_ms + plan.commit_ms
            for share in self._shares.values():
                self._commit(client, share)
        self.next_ms = min(self._beat_ms, self._balance_ms)
        if any(share.offset != share.committed for share in self._shares.values()):
            self.next_ms = min(self.next_ms, self._commit_ms)
        if plan.is_ordered:
            if self._lock_ms <= now_ms or self._lock_ms > now_ms + LOCK_INTERVAL_MS:
                self._lock_ms = now_ms + LOCK_INTERVAL_MS
                self._lock(client)
            self.next_ms = min(self.next_ms, self._lock_ms)
        for share in self._shares.values():
            if not share.is_busy and share.again_ms <= now_ms:
                self._advance(client, share)
        for share in self._shares.values():
            if not share.is_busy:
                self.next_ms = min(self.next_ms, max(share.again_ms, now_ms + 1))

    def _heartbeat(self) -> bytes:
        plan = self._plan
        subscriptions = [
            {
                "topic": topic,
                "subString": plan.expression or plan.tags,
                "expressionType": "SQL92" if plan.expression else "TAG",
                "subVersion": 1,
                "tagsSet": [] if plan.tags == "*" or plan.expression else [plan.tags],
                "codeSet": [],
                "classFilterMode": False,
            }
            for topic in plan.topics
        ]
        consumer = {
            "groupName": plan.group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": subscriptions,
            "unitMode": False,
        }
        return msgspec.json.encode(
            {"clientID": self._name, "consumerDataSet": [consumer], "producerDataSet": []}
        )

    # ---------------------------------------------------------------------------- whose queue is it

    def _balance(self, client: Client, targets: list[Target]) -> None:
        if not targets:
            return
        address = self._rng.choice(list(dict.fromkeys(t.address for t in targets)))

        def share_out(answer: Answer) -> None:
            if answer.frame is None or not answer.is_ok:
                self._balance_ms = min(self._balance_ms, client.now_ms + 500)
                return
            ids: list[str] = sorted(fastjson.loads(answer.frame.body)["consumerIdList"])
            if self._name in ids:
                self._take(client, _average(ids, self._name, targets))
                self.next_ms = client.now_ms

        client.ask(
            address,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            {"consumerGroup": self._plan.group},
            share_out,
        )

    def _take(self, client: Client, mine: list[Target]) -> None:
        places = {target.place: target for target in mine}
        for place in [place for place in self._shares if place not in places]:
            share = self._shares.pop(place)
            share.is_dropped = True
            self._commit(client, share)
            if share.was_asked_for:
                self._unlock(client, share)
        for place, target in places.items():
            if place not in self._shares:
                self._shares[place] = Share(target)
                self._lock_ms = 0

    # ---------------------------------------------------------------------------------------- locks

    def _lock(self, client: Client) -> None:
        """Take or renew the locks of all shares, broker by broker."""
        by_address: dict[str, list[Share]] = {}
        for share in self._shares.values():
            share.was_asked_for = True
            by_address.setdefault(share.target.address, []).append(share)
        for address, shares in by_address.items():
            asked_us = client.now_us
            client.ask(
                address,
                RequestCode.LOCK_BATCH_MQ,
                {},
                partial(self._locked, client, shares, asked_us),
                body=self._lock_body(shares),
            )

    def _locked(self, client: Client, shares: list[Share], asked_us: int, answer: Answer) -> None:
        granted: set[tuple[str, str, int]] = set()
        if answer.frame is not None and answer.is_ok:
            found = fastjson.loads(answer.frame.body)["lockOKMQSet"]
            granted = {(one["brokerName"], one["topic"], one["queueId"]) for one in found}
        for share in shares:
            place = share.target.place
            share.is_locked = place in granted
            # An unlock that may still arrive would make a lock worth nothing.
            if share.is_locked and not share.is_dropped and place not in self._unlocking:
                client.history.locked(
                    self._plan.group, place, self._name, answer.boot, asked_us, client.now_us
                )
        self.next_ms = client.now_ms

    def _unlock(self, client: Client, share: Share) -> None:
        place = share.target.place
        client.history.unlocked(self._plan.group, place, self._name)
        self._unlocking[place] = None

        def done(answer: Answer) -> None:
            if answer.is_ok:
                self._unlocking.pop(place, None)

        client.ask(
            share.target.address,
            RequestCode.UNLOCK_BATCH_MQ,
            {},
            done,
            body=self._lock_body([share]),
        )

    def _lock_body(self, shares: list[Share]) -> bytes:
        places = [share.target.place for share in shares]
        queues = [{"brokerName": b, "topic": t, "queueId": q} for b, t, q in places]
        return msgspec.json.encode(
            {"consumerGroup": self._plan.group, "clientId": self._name, "mqSet": queues}
        )

    # ------------------------------------------------------------------------------------- progress

    def _advance(self, client: Client, share: Share) -> None:
        if self._plan.is_ordered and not share.is_locked:
            share.again_ms = client.now_ms + LOCK_INTERVAL_MS
            return
        share.is_busy = True
        if share.offset < 0:
            self._ask_offset(client, share)
        else:
            self._pull(client, share)

    def rest(self, client: Client, share: Share, wait_ms: int) -> None:
        share.is_busy = False
        share.again_ms = client.now_ms + wait_ms
        self.next_ms = min(self.next_ms, share.again_ms)

    def _ask_offset(self, client: Client, share: Share) -> None:
        target = share.target

        def start(answer: Answer) -> None:
            if answer.frame is not None and answer.is_ok:
                share.offset = share.committed = int(answer.frame.ext["offset"])
                self.rest(client, share, 0)
            elif answer.frame is not None and answer.frame.code == ResponseCode.QUERY_NOT_FOUND:
                share.offset = share.committed = 0
                self.rest(client, share, 0)
            else:
                self.rest(client, share, 300)

        header = QueryConsumerOffsetHeader(self._plan.group, target.topic, target.queue_id)
        client.ask(target.address, RequestCode.QUERY_CONSUMER_OFFSET, to_ext(header), start)

    def _pull(self, client: Client, share: Share) -> None:
        plan, target = self._plan, share.target
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        if plan.expression and not plan.pulls_by_expression:
            flags = PullFlag.SUSPEND
        commit = 0
        if plan.commits_by_pull and share.offset != share.committed:
            flags |= PullFlag.COMMIT_OFFSET
            commit = share.committed = share.offset
        asked = share.offset
        header = PullHeader(
            consumerGroup=plan.group,
            topic=target.topic,
            queueId=target.queue_id,
            queueOffset=asked,
            maxMsgNums=self._rng.randrange(1, 33),
            sysFlag=int(flags),
            commitOffset=commit,
            suspendTimeoutMillis=plan.suspend_ms,
            subVersion=1,
            subscription=plan.expression or plan.tags,
            expressionType="SQL92" if plan.expression else None,
        )
        client.ask(
            target.address,
            RequestCode.PULL_MESSAGE,
            to_ext(header),
            lambda answer: self._pulled(client, share, asked, answer),
            timeout_ms=plan.suspend_ms + TIMEOUT_MS,
        )

    def _pulled(self, client: Client, share: Share, asked: int, answer: Answer) -> None:
        frame = answer.frame
        if frame is None:
            self.rest(client, share, 200)
            return
        if frame.code == ResponseCode.SUCCESS:
            self._process(client, share, asked, frame)
            self.take(client, share, frame, answer.boot)
            return
        known = (
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        )
        if frame.code not in known:
            self.rest(client, share, 300)
            return
        self.go_on(client, share, frame, answer.boot)

    def take(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        """Messages were pulled; kinds that do something with them go on when that is done."""
        self.go_on(client, share, frame, boot)

    def go_on(self, client: Client, share: Share, frame: Frame, boot: int) -> None:
        """Ask for what follows next."""
        share.offset = int(frame.ext["nextBeginOffset"])
        client.history.reach(self._plan.group, share.target.place, share.offset, boot)
        self.rest(client, share, 0 if frame.code == ResponseCode.SUCCESS else 20)

    def is_mine(self, sent: Sent, message: StoredMessage) -> bool:
        """Whether a message, as it was sent, may come to this group like this."""
        return sent.topic == message.topic

    def _process(self, client: Client, share: Share, asked: int, frame: Frame) -> None:
        """Every message of an answer belongs to the queue, stands in order, and is as sent."""
        history, plan, place = client.history, self._plan, share.target.place
        at = asked
        for message in record.decode_all(frame.body):
            token = bytes(message.body).partition(b"|")[0].decode("utf-8", "replace")
            sent = history.sent.get(token)
            if sent is None or sent.body != message.body or not self.is_mine(sent, message):
                history.problem(
                    f"{plan.group} was given a message that nobody sent, or not to it: {token!r}"
                )
            if (message.topic, message.queue_id) != place[1:] or message.queue_offset < at:
                history.problem(
                    f"{plan.group} pulled {place} at {at} and got {message.topic} "
                    f"queue {message.queue_id} offset {message.queue_offset}"
                )
            is_gapless = self.gets_all and plan.tags == "*" and not plan.expression
            if is_gapless and message.queue_offset != at and at != asked:
                history.problem(
                    f"{plan.group} pulled {place}: offset {message.queue_offset} after {at - 1}"
                )
            at = message.queue_offset + 1
            history.consume(plan.group, place, message.queue_offset, token)
        if int(frame.ext["nextBeginOffset"]) < at:
            history.problem(f"{plan.group} on {place} is sent back to read again what it got")

    def _commit(self, client: Client, share: Share) -> None:
        if share.offset < 0 or share.offset == share.committed:
            return
        share.committed = share.offset
        target = share.target
        header = UpdateConsumerOffsetHeader(
            self._plan.group, target.topic, target.queue_id, share.offset
        )
        client.ask(
            target.address,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            to_ext(header),
            ignore,
            is_oneway=bool(self._rng.randrange(2)),
        )


def _average(ids: list[str], me: str, targets: list[Target]) -> list[Target]:
    """RocketMQ's AVG: neighbours share evenly, the first members take one more."""
    ordered = sorted(targets, key=lambda t: (t.topic, t.broker, t.queue_id))
    position, extra = ids.index(me), len(ordered) % len(ids)
    size = len(ordered) // len(ids) + (position < extra)
    begin = position * (len(ordered) // len(ids)) + min(position, extra)
    return ordered[begin : begin + size]
