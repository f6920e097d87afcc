"""What a million pending timers cost: memory, entering, a restart, a crowded second.

Owns: one broker core on real files, driven without sockets. One rule: its clock is a number, so
days of timers pass in seconds; only CPU time and memory are measured.

    timers.py                      a million, spread over two days
    timers.py --count 100000

Anonymous memory is what this process needs for itself; pages of mapped files are the system's to
take back. Prints one line a step.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from cometmq.broker.broker import Broker, Identity, store_config
from cometmq.config import BrokerConfig
from cometmq.message import NewMessage
from cometmq.ports import Flush, Out, Save
from cometmq.store.files import RealFiles
from cometmq.store.store import Store
from cometmq.wire import properties

BEGIN_MS = 1_700_000_000_000
SPREAD_MS = 2 * 86_400_000 - 60_000
BATCH = 500
BODY = bytes(100)


class Machine:
    """A broker and what its driver would do."""

    def __init__(self, folder: Path, now_ms: int) -> None:
        config = BrokerConfig(store_path=str(folder))
        self.now_ms = now_ms
        self.files = RealFiles(folder, spare_bytes=1 << 30)
        self.store = Store.open(self.files, store_config(config, 1 << 30), now_ms)
        self.broker = Broker(config, Identity("127.0.0.1", 10911), self.store, now_ms)

    def turn(self) -> None:
        out: Out = []
        self.broker.tick(self.now_ms, out)
        self.broker.settle(self.now_ms, out)
        while out:
            effect = out.pop(0)
            if isinstance(effect, Flush):
                for target in effect.targets:
                    target.sync()
                self.broker.flushed(effect.kind, self.now_ms, out)
            elif isinstance(effect, Save):
                self.files.replace(effect.name, effect.content)
                self.broker.saved(effect.name, None, self.now_ms, out)

    def send(self, due_ms: int, number: int) -> None:
        table = {"TIMER_DELIVER_MS": str(due_ms), "UNIQ_KEY": f"{number:032X}"}
        message = NewMessage("T", number % 8, BODY, properties.build(table))
        self.broker.put(message, self.now_ms, is_due=False)


def memory_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def say(what: str, began: tuple[float, float], count: int = 0) -> None:
    cpu, wall = time.process_time() - began[0], time.monotonic() - began[1]
    each = f" {cpu / count * 1e6:6.1f} us each" if count else ""
    print(
        f"{what:34} cpu {cpu:7.2f} s wall {wall:7.2f} s{each:17}"
        f" anonymous {memory_mib('RssAnon'):6.1f} MiB, mapped {memory_mib('RssFile'):6.1f} MiB",
        flush=True,
    )


def now() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=1_000_000)
    count: int = parser.parse_args().count
    folder = Path(tempfile.mkdtemp(prefix="cometmq-timers-"))
    try:
        run(folder, count)
    finally:
        shutil.rmtree(folder)


def run(folder: Path, count: int) -> None:
    began = now()
    machine = Machine(folder, BEGIN_MS)
    say("empty", began)
    timers = machine.broker.timers

    began = now()
    for number in range(count):
        machine.send(BEGIN_MS + 3_600_000 + SPREAD_MS * number // count, number)
        if number % BATCH == BATCH - 1:
            machine.now_ms += 10
            machine.turn()
    while timers.unread(machine.store):
        machine.turn()
    assert timers.pending == count, timers.pending
    say(f"{count:,} sent and entered", began, count)

    began = now()
    machine.broker.close(machine.now_ms)
    say("clean stop", began)
    began = now()
    machine = Machine(folder, machine.now_ms + 1000)
    timers = machine.broker.timers
    assert timers.pending == count, timers.pending
    say(f"start with {count:,} pending", began)

    began = now()
    machine.store.abandon()
    machine = Machine(folder, machine.now_ms + 1000)
    timers = machine.broker.timers
    assert timers.pending == count, timers.pending
    say("start after a kill", began)

    began = now()
    crowd = min(count // 10, 50_000)
    due_ms = machine.now_ms + 10_000
    for number in range(crowd):
        machine.send(due_ms, count + number)
        if number % BATCH == BATCH - 1:
            machine.turn()
    while timers.unread(machine.store):
        machine.turn()
    say(f"{crowd:,} more for one second", began, crowd)
    machine.now_ms = due_ms + 1000
    began = now()
    longest, turns = 0.0, 0
    while timers.delivered < crowd:
        turn_began = time.monotonic()
        machine.turn()
        longest, turns = max(longest, time.monotonic() - turn_began), turns + 1
    say(f"delivered in {turns} turns", began, crowd)
    print(f"longest turn {longest * 1000:.1f} ms, syncs included")
    machine.broker.close(machine.now_ms)


if __name__ == "__main__":
    main()
