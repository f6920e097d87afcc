"""Pop under a seed: any order of sends, pops, acks, changes, stops and power cuts.

Checked all the way: nothing that was acknowledged in time comes again (except what a kill -9 may
repeat, said below), nothing comes while somebody holds it, and in the end everything that was never
acknowledged is still there.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from cometmq.broker import timers
from cometmq.testing.disk import SimulatedFiles
from cometmq.wire.codes import RequestCode as C

from . import harness, pops
from .conftest import Benches
from .harness import Bench
from .pops import Got, pop

QUEUES = 3
SAVED_MS = 9_000  # offsets are saved every 5 s, once their checkpoints are durable


class Model:
    """What the clients of one group know."""

    def __init__(self) -> None:
        self.sent: set[bytes] = set()
        self.done: set[bytes] = set()
        self.late: set[bytes] = set()  # acknowledged when it may have been too late
        self.may_repeat: set[bytes] = set()
        self.held: dict[bytes, tuple[Got, int, int]] = {}  # receipt, popped at, until
        self.done_at: dict[bytes, int] = {}

    def got(self, some: list[Got], now_ms: int, invisible_ms: int) -> None:
        for one in some:
            body = one.body
            assert body in self.sent
            if body not in self.may_repeat:
                assert body not in self.done, (body, "was acknowledged")
                if body in self.held:
                    until_ms = self.held[body][2]
                    assert now_ms >= until_ms, (body, now_ms, until_ms)
            self.held[body] = (one, now_ms, now_ms + invisible_ms)

    def acked(self, body: bytes, now_ms: int) -> None:
        _, _, until_ms = self.held.pop(body)
        if now_ms < until_ms:
            self.done.add(body)
        else:
            self.late.add(body)

    def killed(self, now_ms: int) -> None:
        """Offsets of the last seconds were not saved: what was given out then is given out again,
        and its checkpoints bring it back as well; what came back then comes back again."""
        recent = {
            one
            for one, (_, at_ms, until_ms) in self.held.items()
            if now_ms - at_ms < SAVED_MS or 0 <= now_ms - until_ms < SAVED_MS
        }
        self.may_repeat |= recent | self.recent_done(now_ms)

    def recent_done(self, now_ms: int) -> set[bytes]:
        return {one for one, at_ms in self.done_at.items() if now_ms - at_ms < 2 * SAVED_MS}


def step(rng: random.Random, bench: Bench, model: Model, number: int) -> None:
    what = rng.randrange(10)
    now_ms = bench.now_ms
    if what < 3:
        for at in range(rng.randrange(1, 8)):
            body = b"%d-%d" % (number, at)
            bench.sent(body=body, queue=rng.randrange(QUEUES), queues=QUEUES)
            model.sent.add(body)
    elif what < 6:
        invisible_ms = rng.choice([1_500, 4_000, 9_999, 20_000])
        how: dict[str, Any] = {"invisibleTime": invisible_ms, "maxMsgNums": rng.randrange(1, 12)}
        if rng.randrange(3) == 0:
            how["queueId"] = rng.randrange(QUEUES)
        model.got(pop(bench, **how), now_ms, invisible_ms)
    elif what < 8 and model.held:
        some = rng.sample(sorted(model.held), rng.randrange(1, len(model.held) + 1))
        for body in some:
            if pops.ack(bench, model.held[body][0]).code == 0:
                model.done_at[body] = now_ms
                model.acked(body, now_ms)
    elif what < 9 and model.held:
        body = rng.choice(sorted(model.held))
        one, at_ms, until_ms = model.held[body]
        if now_ms < until_ms:
            invisible_ms = rng.choice([2_000, 8_000, 30_000])
            new = pops.changed(bench, one, invisible_ms)
            model.held[body] = (new, at_ms, now_ms + invisible_ms)
    bench.advance(rng.choice([0, 1, 300, 1_000, 2_500, 6_000]))


def drain(bench: Bench, model: Model) -> set[bytes]:
    """Everything that still comes, until nothing does."""
    found: set[bytes] = set()
    quiet = 0
    while quiet < 8:
        some = pop(bench, invisibleTime=3_600_000)
        model.got(some, bench.now_ms, 3_600_000)
        found |= {one.body for one in some}
        quiet = 0 if some else quiet + 1
        bench.advance(6_000)
    return found


def play(rng: random.Random, bench: Bench, benches: Benches, how: str) -> None:
    model = Model()
    bench.sent(body=b"first", queues=QUEUES)
    model.sent.add(b"first")
    for life in range(3):
        for number in range(25):
            step(rng, bench, model, 1000 * life + number)
        if how == "stop":
            bench.stop()
            assert bench.broker.is_stopped
            bench.close()
        else:
            model.killed(bench.now_ms)
            bench.crash()
        bench = benches(now_ms=bench.now_ms + rng.choice([0, 500, 5_000, 60_000]))
    rest = {body for body in model.sent if body not in model.done | model.late}
    assert rest <= drain(bench, model)
    assert bench.broker.pop.revive.pending == 0
    assert bench.json(C.GET_BROKER_RUNTIME_INFO)


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("seed", range(12))
def test_stops(benches: Benches, monkeypatch: pytest.MonkeyPatch, seed: int, how: str) -> None:
    monkeypatch.setattr(timers.Timers.__init__, "__defaults__", (8192,))
    rng = random.Random(f"{seed} {how}")
    play(rng, benches(), benches, how)


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_skips_no_message(
    benches: Benches, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever of the log was lost: a durable message that nobody acknowledged is still there,
    though offsets are saved and synced on their own."""
    rng = random.Random(f"{seed} power")
    disk = SimulatedFiles(rng)
    monkeypatch.setattr(harness, "TestFiles", lambda folder: disk)
    monkeypatch.setattr(timers.Timers.__init__, "__defaults__", (2048,))
    bench, model = benches(), Model()
    ends: dict[bytes, int] = {}
    durable: set[bytes] = set()
    bench.sent(body=b"first", queues=QUEUES)
    for life in range(2):
        for number in range(25):
            bench.keeps_flushes = rng.randrange(3) > 0  # a log that is slow to reach the disk
            while bench.kept_flushes and not bench.keeps_flushes:
                bench.flush()
            model.may_repeat = model.sent = sent = AnyMessage()
            step(rng, bench, model, 1000 * life + number)
            ends.update(dict.fromkeys(sent.added - set(ends), bench.store.max_log_offset))
        safe = bench.store.flushed_offset
        durable |= {body for body, end in ends.items() if end <= safe}
        now_ms = bench.now_ms
        bench.crash()
        disk.lose_power(rng.choice([0, 30, 60, 100]))
        bench = benches(now_ms=now_ms)
        model.held.clear()
        ends = {}
    model.may_repeat = model.sent = AnyMessage()
    assert durable - model.done - model.late <= drain(bench, model)


class AnyMessage(set[bytes]):
    """Messages that may come, once or often: all."""

    def __init__(self) -> None:
        super().__init__()
        self.added: set[bytes] = set()

    def add(self, body: bytes) -> None:
        self.added.add(body)

    def __contains__(self, body: object) -> bool:
        return True
