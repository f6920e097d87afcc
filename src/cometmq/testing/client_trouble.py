"""Trouble for clients on a SimLoop: the network, the servers, and who comes and goes.

Owns: the faults, when and where they strike. One rule: all of them are over after `heal`.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from cometmq.testing.client_members import Sender

if TYPE_CHECKING:
    from cometmq.testing.client_runs import ClientRun

FAULTS = (
    "delay stall reset cut refuse slow-disk crash power-loss names-crash "
    "join leave kill kill-producer"
).split()
GREMLINS = 2


class Trouble:
    """Two gremlins, each of which does one thing after the other."""

    def __init__(self, run: ClientRun) -> None:
        self.is_over = False
        self.faults: dict[str, int] = {}
        self._run = run

    async def make(self) -> None:
        ends = self._run.loop.time() + self._run.plan.trouble_s
        await asyncio.gather(*(self._gremlin(number, ends) for number in range(GREMLINS)))

    async def _gremlin(self, number: int, ends: float) -> None:
        rng = self._run.loop.rng(f"gremlin {number}")
        while True:
            await asyncio.sleep(rng.random() * self._run.plan.calm_s)
            if self._run.loop.time() >= ends or not self._run.plan.faults:
                break
            fault = rng.choice(self._run.plan.faults)
            self._run.loop.note(f"gremlin {number}: {fault}")
            if await self._fault(fault, rng):
                self.faults[fault] = self.faults.get(fault, 0) + 1
        await asyncio.sleep(max(0.0, ends - self._run.loop.time()))

    def _somewhere(self, rng: random.Random) -> str:
        """A server, as host and port or as a machine, or a member's machine."""
        servers = [one.address for one in (*self._run.brokers.values(), *self._run.names)]
        members = [one.process.host for one in self._run.members]
        members += [one.process.host for one in self._run.senders]
        found = rng.choice(servers if rng.randrange(2) or not members else members)
        return found.partition(":")[0] if rng.randrange(2) else found

    @staticmethod
    def _duration_s(rng: random.Random) -> float:
        return rng.random() * rng.choice((1.0, 10.0, 10.0, 100.0))

    async def _fault(self, fault: str, rng: random.Random) -> bool:
        network = self._run.loop.network
        if fault == "delay":
            network.delay(0, rng.choice((0.05, 0.5, 2.0)))
            await asyncio.sleep(self._duration_s(rng))
            network.delay(0.000_05, 0.001)
        elif fault == "stall":
            address = self._somewhere(rng)
            network.stall(address)
            await asyncio.sleep(self._duration_s(rng))
            network.go_on(address)
        elif fault == "reset":
            network.reset(self._somewhere(rng))
        elif fault in ("cut", "refuse"):
            address = self._somewhere(rng)
            (network.cut if fault == "cut" else network.refuse)(address)
            await asyncio.sleep(self._duration_s(rng))
            network.heal(address)
        elif fault == "slow-disk":
            server = rng.choice(list(self._run.brokers.values()))
            server.pace.slow_percent, server.pace.slow_us = 30, rng.choice((100_000, 8_000_000))
            await asyncio.sleep(self._duration_s(rng))
            server.pace.slow_percent = 0
        elif fault in ("crash", "power-loss"):
            return await self._crash(rng, loses_power=fault == "power-loss")
        elif fault == "names-crash":
            server = rng.choice(self._run.names)
            if server.core is None:
                return False
            server.crash()
            await asyncio.sleep(self._duration_s(rng))
            await server.start()
        else:
            return await self._change_members(fault, rng)
        return True

    async def _crash(self, rng: random.Random, *, loses_power: bool) -> bool:
        name = rng.choice(list(self._run.brokers))
        server = self._run.brokers[name]
        if server.core is None:
            return False
        self._run.record.look()
        if loses_power:
            self._run.record.loses_power(name)
        server.crash()
        if loses_power:
            server.files.lose_power(rng.choice((0, 50, 100)))
        await asyncio.sleep(self._duration_s(rng))
        await self._start(name)
        return True

    async def _start(self, name: str) -> None:
        self._run.record.started_s[name] = self._run.loop.time()
        await self._run.brokers[name].start()
        self._run.record.look()

    async def _change_members(self, fault: str, rng: random.Random) -> bool:
        if fault == "kill-producer":
            sender = rng.choice(self._run.senders)
            if not sender.process.is_up:  # the other gremlin is at it
                return False
            sender.process.kill()
            await asyncio.sleep(rng.random() * 2)
            self._run.senders[self._run.senders.index(sender)] = Sender(self._run, sender.flows)
            return True
        if fault == "join":
            if len(self._run.members) > self._run.plan.consumer_count:
                return False
            await self._run.join()
            return True
        if not self._run.members:
            return False
        member = self._run.members.pop(rng.randrange(len(self._run.members)))
        if fault == "kill":
            member.kill()
        else:
            await member.leave()
        if rng.randrange(2):
            await asyncio.sleep(self._duration_s(rng))
            await self._run.join()
        return True

    async def heal(self) -> None:
        """The end of all faults, of handlers too."""
        self._run.loop.note("heal")
        self.is_over = True
        for server in (*self._run.names, *self._run.brokers.values()):
            server.pace.slow_percent = 0
        for server in self._run.names:
            if server.core is None:
                await server.start()
        for name, server in self._run.brokers.items():
            if server.core is None:
                await self._start(name)
        while len(self._run.members) < self._run.plan.consumer_count:
            await self._run.join()
