"""Producers and consumers of a run on a SimLoop, each on a machine of its own.

Owns: what they send and how their handlers behave. One rule: what a killed process still does is
not recorded; the simulator lets its tasks hear of a cancellation, which a real one would not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from cometmq.client.consumer import Consumer
from cometmq.client.handling import Later
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage
from cometmq.client.session import World
from cometmq.errors import CometError, UsageError
from cometmq.message import Message
from cometmq.testing.client_checks import Acked, Place, Sent, token_of

if TYPE_CHECKING:
    from cometmq.testing.client_runs import ClientRun

TOPIC, GROUP = "Orders", "billing"


class Flow:
    """Messages of one sharding key: each is sent until it is acknowledged, then the next."""

    def __init__(self, key: str, count: int) -> None:
        self.key = key
        self.count = count
        self.next = 0


def unsent(flows: list[Flow]) -> list[str]:
    return [f"{one.key} is at {one.next} of {one.count}" for one in flows if one.next < one.count]


class Sender:
    """A producer on a machine of its own, with its flows."""

    def __init__(self, run: ClientRun, flows: list[Flow]) -> None:
        self.flows = flows
        self._run = run
        world = run.world()
        self._rng = run.loop.rng(f"sender {world.ip}")
        self.process = run.loop.network.process(world.ip)
        self._name = f"producer {world.ip}"
        self._living = self.process.spawn(self._live(world))

    async def _live(self, world: World) -> None:
        self._producer = Producer("shop", namesrv=self._run.namesrv, world=world)
        await self._producer.start()
        await asyncio.gather(*(self._flow(flow) for flow in self.flows))

    async def _flow(self, flow: Flow) -> None:
        gap_s = self._run.plan.gap_s
        while flow.next < flow.count:
            await asyncio.sleep(self._rng.random() * 2 * gap_s)
            number = flow.next
            is_sent = await self._send(f"{flow.key}.{number}", flow.key, number)
            if self._rng.randrange(4) == 0:  # one that has no key, and is not tried again
                free = f"{flow.key}-free{number}"
                await self._send(free, "", number)
            if is_sent:
                flow.next = number + 1

    async def _send(self, token: str, key: str, number: int) -> bool:
        record, loop = self._run.record, self._run.loop
        body = f"{token}|".encode() + b"x" * self._rng.choice((0, 10, 300))
        record.sent.setdefault(token, Sent(key, number, loop.time()))
        message = Message(TOPIC, body, sharding_key=key, keys=token)
        try:
            if self._rng.randrange(2):
                result = await self._producer.send(message)
            else:
                result = await self._producer.send_async(message)
        except CometError as error:
            loop.note(f"{self._name}: {token} failed: {error}")
            return False
        if not self.process.is_up:
            return False
        queue = result.queue
        where = (queue.broker, queue.topic, queue.queue_id, result.queue_offset)
        loop.note(f"{self._name}: {token} acked at {where}")
        record.acked.setdefault(token, Acked(where, result.status, loop.time()))
        return True

    async def close(self) -> None:
        await asyncio.wait([self._living])
        await self.process.spawn(self._producer.close())
        await self._run.check_left(self.process, self._name)


class HandlerFailed(Exception):
    """What handlers raise here."""


class Member:
    """A consumer of the group on a machine of its own."""

    def __init__(self, run: ClientRun) -> None:
        self._run = run
        plan, world = run.plan, run.world()
        self._is_leaving = False
        self.process = run.loop.network.process(world.ip)
        self._options: dict[str, Any] = {
            "ordered": plan.is_ordered,
            "start": "first",
            "concurrency": plan.concurrency,
            "pull_batch": plan.pull_batch,
            "batch": plan.batch,
            "consume_timeout_s": plan.consume_timeout_s,
            "close_timeout_s": 10.0,
            "namesrv": run.namesrv,
            "world": world,
        }

    async def join(self) -> None:
        await self._within(self._join())

    async def _join(self) -> None:
        self._consumer = Consumer(GROUP, **self._options)
        self._name = self._consumer.session.client_id
        self._consumer.subscribe(TOPIC, self._handle)
        try:
            await self._consumer.start()
        except UsageError:
            if not self._is_leaving:
                raise

    async def _within(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in this process; its kill by somebody else is not an end of ours."""
        task = self.process.spawn(work)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def leave(self) -> None:
        self._is_leaving = True
        await self._within(self._consumer.close())
        await self._run.check_left(self.process, self._name)

    def kill(self) -> None:
        self.process.kill()

    async def _handle(self, given: ReceivedMessage | list[ReceivedMessage]) -> Later | None:
        if not self.process.is_up:
            return None
        messages = given if isinstance(given, list) else [given]
        record, run = self._run.record, self._run
        places: list[tuple[Place, str]] = [
            ((one.broker, one.stored_topic, one.queue_id, one.queue_offset), token_of(one.body))
            for one in messages
        ]
        record.began(self._name, places)
        took_s, says = run.outcome_of([token for _, token in places])
        try:
            if took_s is not None:
                await asyncio.sleep(took_s)
        except asyncio.CancelledError:
            for place, token in places:
                record.cut_off(self._name, place, token)
            raise
        if not self.process.is_up:
            return None
        for place, token in places:
            record.ended(self._name, place, token, is_ok=says == "ok")
        if says == "raise":
            raise HandlerFailed(places[0][1])
        return Later(1, 100) if says == "later" else None
