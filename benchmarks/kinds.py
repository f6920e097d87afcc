"""What each kind of message costs a broker over its whole life, beside a plain send.

Owns: the lives (plain, delay level, timer, transaction, retry), SQL92 filters, and what a million
pending timers and half messages take. One rule: the broker process's own CPU clock is read, from
the first send until the last message stands in its real topic's queue; what the broker uses when
idle is taken off, and whatever could not be measured is a row that says why.

    kinds.py                       everything, with Apache RocketMQ 5.5.0 beside it if it can be had
    kinds.py --quick               a tenth of the messages
    kinds.py --servers plain       one of plain, comet, apache-5

Every server gets the same frames from the same client, on another core, with the same window; so
the plain send here is dearer than in run.py, whose generator keeps more in flight. A target is
reached where each path that was measured stays below it, held against its own plain send. Nobody
asks the broker anything while messages wait: a plain send does not wait, and would not pay for it.
Writes results/<utc date>-<commit>-kinds.json, .md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import LoadFailed, Server, Unavailable, say

from cometmq.client.received import ReceivedMessage, read_all
from cometmq.client.remote import Remote
from cometmq.errors import CometError
from cometmq.wire import properties
from cometmq.wire.codes import FLAG_ONEWAY, PullFlag, RequestCode, SysFlag
from cometmq.wire.frame import Frame, decode_frame, encode_frame
from cometmq.wire.headers import (
    EndTransactionHeader,
    PullHeader,
    SendBackHeader,
    SendHeader,
    send_v2_ext,
    to_ext,
)
from cometmq.wire.message_id import parse_offset_id

BODY = bytes(128)
GROUP = "kinds"
QUEUES = 4
CHUNK = 64  # frames in one write; two chunks are under way
GIVE_UP_S = 240
FAR_MS = 6 * 3_600_000
SQL = {
    "one condition": "city = 'Rome'",
    "two conditions": "amount > 100.0 AND city IN ('Rome', 'Oslo')",
}
TARGETS = {"delay level": 2.5, "timer": 2.5, "transaction": 4.0}
SQL_TARGET = 300_000
LATE_TARGET_MS = 100
PENDING_TARGET_MB = 200
RESTART_TARGET_S = 10.0
# Nobody is asked about a transaction meanwhile, and a busy machine refuses nothing.
CHANGED = {
    "transactionTimeOut": "3600000",
    "waitTimeMillsInSendQueue": "60000",
    "osPageCacheBusyTimeOutMills": "60000",
}
TITLES = {
    "plain": "CometMQ, plain path",
    "comet": "CometMQ, compiled path",
    "apache-5": "Apache RocketMQ 5.5.0",
}


# ---------------------------------------------------------------------------------------- servers


def start_comet(name: str, folder: Path | None = None) -> Server:
    """As shipped, but for ports, folders and CHANGED."""
    made = folder or harness.new_folder()
    settings = {
        "compiledPathEnable": str(name == "comet").lower(),
        **CHANGED,
    }
    conf = made / "broker.conf"
    conf.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    command = [sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"]
    command += ["--store", str(made / "store"), "--broker-conf", str(conf)]
    began = time.monotonic()
    process = harness.spawn([*command, "--log-level", "WARNING"], made)
    places = harness.await_ready(process, made)
    server = Server(name, places["broker"], [process], made, time.monotonic() - began, settings)
    server.idle = server.memory_mb()
    return server


def start_apache(name: str) -> Server:
    import peers

    server = peers.start_apache(name, is_sync=False)
    changed = {"enablePropertyFilter": "true", **CHANGED}
    with Remote(server.address, timeout_ms=30_000) as remote:
        text = "".join(f"{key}={value}\n" for key, value in changed.items())
        remote.call(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())
    server.settings |= changed
    return server


def start(name: str) -> Server:
    return start_apache(name) if name.startswith("apache") else start_comet(name)


def cpu_s(server: Server) -> float:
    """CPU time of the serving process, all its threads, by its own clock."""
    return time.clock_gettime((~server.watched.pid << 3) | 2)


class Meter:
    """CPU that a server used, without what it uses when idle."""

    def __init__(self, server: Server, idle_share: float) -> None:
        self._server, self._idle_share = server, idle_share
        self._cpu, self._wall = cpu_s(server), time.monotonic()

    def used_us(self, count: int) -> float:
        cpu, wall = cpu_s(self._server) - self._cpu, time.monotonic() - self._wall
        return max(cpu - wall * self._idle_share, 0.0) / count * 1e6


def idle_share(server: Server) -> float:
    began, cpu = time.monotonic(), cpu_s(server)
    time.sleep(1.0)
    return (cpu_s(server) - cpu) / (time.monotonic() - began)


# ---------------------------------------------------------------------------------------- client


class Pump:
    """Frames out in chunks, their answers in; at most two chunks are under way."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._opaque = 0

    def __enter__(self) -> Pump:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def run(self, requests: Iterable[Frame], *, keep: bool = False) -> list[Frame]:
        """All of them; the answers if they are to be kept. LoadFailed if one was refused."""
        kept: list[Frame] = []
        under_way = 0
        chunk: list[bytes] = []
        for request in requests:
            self._opaque += 1
            request.opaque = self._opaque
            chunk.append(encode_frame(request))
            if len(chunk) == CHUNK:
                under_way += self._write(chunk, request)
                while under_way >= 2 * CHUNK:
                    under_way -= self._take(kept if keep else None)
        if chunk:
            under_way += self._write(chunk, request)
        while under_way > 0:
            under_way -= self._take(kept if keep else None)
        return kept

    def _write(self, chunk: list[bytes], last: Frame) -> int:
        self._socket.sendall(b"".join(chunk))
        count = 0 if last.flag & FLAG_ONEWAY else len(chunk)
        chunk.clear()
        return count

    def _take(self, kept: list[Frame] | None) -> int:
        data = self._rest + self._socket.recv(1 << 18)
        at = count = 0
        while len(data) - at >= 4:
            (size,) = struct.unpack_from(">i", data, at)
            if len(data) - at < size + 4:
                break
            answer = decode_frame(data[at : at + size + 4])
            at += size + 4
            if not answer.is_response:
                continue
            count += 1
            if answer.code != 0:
                raise LoadFailed(f"refused with code {answer.code}: {answer.remark}")
            if kept is not None:
                kept.append(answer)
        self._rest = data[at:]
        return count


_sequence = iter(range(1, 1 << 60))


def sends(topic: str, count: int, extra: dict[str, str], *, flags: int = 0) -> Iterable[Frame]:
    """Sends as a Java client makes them, with properties of the kind."""
    for number in range(count):
        table = {"UNIQ_KEY": f"{next(_sequence):032X}", "WAIT": "true", "TAGS": "TagA", **extra}
        header = SendHeader(
            producerGroup=GROUP,
            topic=topic,
            defaultTopic="TBW102",
            defaultTopicQueueNums=QUEUES,
            queueId=number % QUEUES,
            sysFlag=flags,
            bornTimestamp=int(time.time() * 1e3),
            flag=0,
            properties=properties.build(table),
            reconsumeTimes=0,
        )
        yield Frame(RequestCode.SEND_MESSAGE_V2, ext=send_v2_ext(header), body=BODY, version=479)


def stored_count(remote: Remote, topic: str, queues: int) -> int:
    found = 0
    for queue_id in range(queues):
        ext = {"topic": topic, "queueId": str(queue_id)}
        found += int(remote.call(RequestCode.GET_MAX_OFFSET, ext).ext["offset"])
    return found


def await_count(
    server: Server, topic: str, count: int, queues: int = QUEUES, *, after_s: float = 0.0
) -> None:
    """Until all are there; nobody looks before `after_s`, when they may be: each look is a request
    for every queue, by the plain path, and would be charged to the messages that wait."""
    time.sleep(after_s)
    give_up = time.monotonic() + GIVE_UP_S
    with Remote(server.address, timeout_ms=30_000) as remote:
        while (found := stored_count(remote, topic, queues)) < count:
            if time.monotonic() > give_up:
                raise LoadFailed(
                    f"{server.name}: {found} of {count} in {topic} after {GIVE_UP_S} s"
                )
            time.sleep(0.1)


def pull(
    remote: Remote, topic: str, queue_id: int, offset: int, expression: str = "*", kind: str = "TAG"
) -> tuple[list[ReceivedMessage], int, int]:
    """Messages, the offset to go on from, and the queue's end."""
    header = PullHeader(
        consumerGroup=GROUP,
        topic=topic,
        queueId=queue_id,
        queueOffset=offset,
        maxMsgNums=32,
        sysFlag=PullFlag.SUBSCRIPTION,
        subscription=expression,
        expressionType=kind,
    )
    answer = remote.ask(RequestCode.PULL_MESSAGE, to_ext(header))
    if "nextBeginOffset" not in answer.ext:
        raise LoadFailed(f"pull of {topic}: code {answer.code} {answer.remark}")
    found = read_all(answer.body, "") if answer.code == 0 else []
    return found, int(answer.ext["nextBeginOffset"]), int(answer.ext["maxOffset"])


def read_queue(server: Server, topic: str, queue_id: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    offset = 0
    with Remote(server.address, timeout_ms=30_000) as remote:
        while True:
            page, following, end = pull(remote, topic, queue_id, offset)
            found += page
            if following >= end or following <= offset:
                return found
            offset = following


# ---------------------------------------------------------------------------------------- lives


@dataclass
class Bench:
    """One server under test, and the figures found."""

    server: Server
    count: int
    share: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)
    sql: dict[str, float] = field(default_factory=dict)
    late: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    turn: int = 0

    def topic(self, kind: str, queues: int = QUEUES) -> str:
        """A new topic for each run."""
        self.turn += 1
        name = f"kinds-{kind}-{self.turn}-"
        harness.create_topics(self.server, name, 1, queues)
        return name + "0"

    def meter(self) -> Meter:
        harness.settle()
        return Meter(self.server, self.share)


def plain(bench: Bench) -> float:
    topic = bench.topic("plain")
    meter = bench.meter()
    with Pump(bench.server.address) as pump:
        pump.run(sends(topic, bench.count, {}))
    await_count(bench.server, topic, bench.count)
    return meter.used_us(bench.count)


def delayed(bench: Bench) -> float:
    topic = bench.topic("delay")
    meter = bench.meter()
    with Pump(bench.server.address) as pump:
        pump.run(sends(topic, bench.count, {"DELAY": "1"}))
    await_count(bench.server, topic, bench.count, after_s=1.1)
    return meter.used_us(bench.count)


def timed(bench: Bench) -> float:
    topic = bench.topic("timer")
    meter = bench.meter()
    with Pump(bench.server.address) as pump:
        pump.run(sends(topic, bench.count, {"TIMER_DELAY_MS": "2000"}))
    await_count(bench.server, topic, bench.count, after_s=3.1)  # at the end of its slot
    return meter.used_us(bench.count)


def transaction(bench: Bench) -> float:
    topic = bench.topic("transaction")
    meter = bench.meter()
    with Pump(bench.server.address) as pump:
        extra = {"TRAN_MSG": "true", "PGROUP": GROUP}
        flags = int(SysFlag.PREPARED)
        halves = pump.run(sends(topic, bench.count, extra, flags=flags), keep=True)
        pump.run(_end(topic, half) for half in halves)
        await_count(bench.server, topic, bench.count)
    return meter.used_us(bench.count)


def _end(topic: str, half: Frame) -> Frame:
    header = EndTransactionHeader(
        producerGroup=GROUP,
        tranStateTableOffset=int(half.ext["queueOffset"]),
        commitLogOffset=parse_offset_id(half.ext["msgId"])[2],
        commitOrRollback=int(SysFlag.COMMIT),
        msgId=half.ext["transactionId"],
        transactionId=half.ext["transactionId"],
        topic=topic,
    )
    return Frame(RequestCode.END_TRANSACTION, ext=to_ext(header), flag=FLAG_ONEWAY, version=479)


def retried(bench: Bench) -> float:
    """The send-back and the second life; the first send is not counted."""
    topic = bench.topic("retry")
    group = f"{GROUP}-{bench.turn}"
    with Remote(bench.server.address, timeout_ms=30_000) as remote:
        config = {"groupName": group, "retryQueueNums": 1, "retryMaxTimes": 16}
        body = str({**config, "consumeEnable": 1}).replace("'", '"').encode()
        remote.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    with Pump(bench.server.address) as pump:
        stored = pump.run(sends(topic, bench.count, {}), keep=True)
        await_count(bench.server, topic, bench.count)
        meter = bench.meter()
        pump.run(_back(topic, group, one) for one in stored)
    await_count(bench.server, f"%RETRY%{group}", bench.count, 1, after_s=1.1)
    return meter.used_us(bench.count)


def _back(topic: str, group: str, stored: Frame) -> Frame:
    at = parse_offset_id(stored.ext["msgId"])[2]
    header = SendBackHeader(at, group, 1, stored.ext["transactionId"], topic, maxReconsumeTimes=16)
    return Frame(RequestCode.CONSUMER_SEND_MSG_BACK, ext=to_ext(header), version=479)


LIVES: dict[str, Callable[[Bench], float]] = {
    "plain send": plain,
    "delay level": delayed,
    "timer": timed,
    "transaction": transaction,
    "retry": retried,
}


def filtered(bench: Bench) -> None:
    """Evaluated messages a second of one core, of pulls that find one message in a hundred."""
    topic = bench.topic("sql", 1)

    def made() -> Iterable[Frame]:
        for number in range(bench.count):
            extra = {"amount": "250.5", "city": "Bern" if number % 100 else "Rome", "source": "web"}
            (frame,) = sends(topic, 1, extra)
            yield frame

    with Pump(bench.server.address) as pump:
        pump.run(made())
    await_count(bench.server, topic, bench.count, 1)
    for name, expression in SQL.items():
        with Remote(bench.server.address, timeout_ms=30_000) as remote:
            meter = bench.meter()
            offset, end, taken = 0, 1, 0
            while offset < end:
                found, following, end = pull(remote, topic, 0, offset, expression, "SQL92")
                taken += len(found)
                if following <= offset:
                    break
                offset = following
        if taken != -(-bench.count // 100):
            raise LoadFailed(f"{bench.server.name}: {expression} found {taken}")
        bench.sql[name] = 1e6 / max(meter.used_us(bench.count), 1e-3)


def lateness(bench: Bench, rate: int, seconds: float) -> None:
    """How late deliveries are at a rate with which the broker keeps up."""
    topic = bench.topic("late", 1)
    kinds = {"delay level": {"DELAY": "2"}, "timer": {"TIMER_DELAY_MS": "5000"}}
    for kind, extra in kinds.items():
        begin = len(read_queue(bench.server, topic, 0))
        count = 0
        before = int(time.time() * 1e3)
        with Pump(bench.server.address) as pump:
            began = time.monotonic()
            while (gone := time.monotonic() - began) < seconds:
                more = int(gone * rate) - count
                pump.run(_to_one_queue(sends(topic, more, extra)))
                count += more
                time.sleep(0.005)
        await_count(bench.server, topic, begin + count, 1)
        found = read_queue(bench.server, topic, 0)[begin:]
        if kind == "timer":  # due at the end of its slot
            bench.late[kind] = [
                one.store_ms - int(one.properties["TIMER_OUT_MS"]) - 1000 for one in found
            ]
            continue
        kept = read_queue(bench.server, "SCHEDULE_TOPIC_XXXX", 1)
        due = {one.message_id: one.store_ms + 5000 for one in kept if one.store_ms >= before}
        bench.late[kind] = [one.store_ms - due[one.message_id] for one in found]


def _to_one_queue(frames: Iterable[Frame]) -> Iterable[Frame]:
    for frame in frames:
        frame.ext["e"] = "0"
        yield frame


# ---------------------------------------------------------------------------------------- pending


def pending(name: str, kind: str, count: int) -> dict[str, float]:
    """What so many messages that wait take, and how long a start with them takes."""
    server = start_comet(name)
    folder, processes = server.folder, list(server.processes)
    try:
        topic = "kinds-pending-0"
        harness.create_topics(server, "kinds-pending-", 1, QUEUES)
        flags, extra = 0, {"TIMER_DELIVER_MS": ""}
        if kind == "half messages":
            flags, extra = int(SysFlag.PREPARED), {"TRAN_MSG": "true", "PGROUP": GROUP}
        idle = idle_share(server)
        meter, before = Meter(server, idle), server.memory_mb()
        with Pump(server.address) as pump:
            for done in range(0, count, 10_000):
                if kind == "timers":  # spread over hours
                    due = int(time.time() * 1e3) + FAR_MS + FAR_MS * done // count
                    extra = {"TIMER_DELIVER_MS": str(due)}
                pump.run(sends(topic, min(10_000, count - done), extra, flags=flags))
        field_name = "cometmqTimersPending" if kind == "timers" else "cometmqHalfMessages"
        _await_status(server, field_name, count)
        found = {"cpu_us": meter.used_us(count)}
        after = server.memory_mb()
        found |= {key: after[key] - before[key] for key in after}
        for what, how in (("stop", signal.SIGTERM), ("kill", signal.SIGKILL)):
            began = time.monotonic()
            server.watched.send_signal(how)
            server.watched.wait(120)
            found[f"{what}_s"] = time.monotonic() - began
            server = start_comet(name, folder)
            processes += server.processes
            found[f"start_after_{what}_s"] = server.start_s
            found[f"start_cpu_after_{what}_s"] = cpu_s(server)
            _await_status(server, field_name, count)
            found[f"anonymous_after_{what}_mb"] = server.memory_mb()["anonymous_mb"]
            found["idle_anonymous_mb"] = before["anonymous_mb"]
        return found
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


def _await_status(server: Server, name: str, wanted: int) -> None:
    give_up = time.monotonic() + GIVE_UP_S
    with Remote(server.address, timeout_ms=30_000) as remote:
        while True:
            body = remote.call(RequestCode.GET_BROKER_RUNTIME_INFO).body.decode()
            said = re.search(rf'"{name}":"(\d+)"', body)
            if said is not None and int(said[1]) == wanted:
                return
            if time.monotonic() > give_up:
                raise LoadFailed(f"{name} is {said and said[1]}, not {wanted}")
            time.sleep(0.2)


# ------------------------------------------------------------------------------------------- report


def verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "MISSED"


def measure(name: str, count: int, repeats: int) -> Bench:
    server = start(name)
    bench = Bench(server, count)
    try:
        warm = 3 if name.startswith("apache") else 1
        bench.count = max(count // 4, 1000)
        for _ in range(warm):
            for run in LIVES.values():
                run(bench)
        bench.count = count
        bench.share = idle_share(server)
        for kind, run in LIVES.items():
            values = [run(bench) for _ in range(repeats)]
            bench.cpu[kind] = statistics.median(values)
            say(f"  {TITLES[name]:24} {kind:12} {bench.cpu[kind]:8.2f} us CPU a message")
        filtered(bench)
        for kind, rate in bench.sql.items():
            say(f"  {TITLES[name]:24} SQL, {kind:15} {rate:10,.0f} evaluated/s of one core")
        lateness(bench, 1000, 3.0)
        for kind, late in bench.late.items():
            say(f"  {TITLES[name]:24} {kind:12} late: most {max(late)} ms, of {len(late)}")
    except (LoadFailed, CometError) as error:
        bench.notes.append(str(error))
        say(f"  {TITLES[name]:24} FAILED: {error}")
    finally:
        server.close()
    return bench


def report(
    benches: dict[str, Bench], waits: dict[str, dict[str, dict[str, float]]], count: int
) -> tuple[str, dict[str, Any]]:
    lines = ["# Kinds of messages", "", "Broker CPU of one message's whole life, us:", ""]
    base = benches.get("plain")
    fast = benches.get("comet")
    head = ["kind", *(TITLES[name] for name in benches)]
    head += ["of plain path's send", "of compiled send", "target", ""]
    rows = []
    for kind in LIVES:
        row = [
            kind,
            *(f"{one.cpu[kind]:.1f}" if kind in one.cpu else "-" for one in benches.values()),
        ]
        ratios: list[float | None] = []
        for one in (base, fast):
            known = one is not None and kind in one.cpu
            ratios.append(one.cpu[kind] / one.cpu["plain send"] if known and one else None)
        row += [f"{ratio:.2f}x" if ratio is not None else "-" for ratio in ratios]
        target = TARGETS.get(kind)
        known_ratios = [ratio for ratio in ratios if ratio is not None]
        row += [f"{target}x" if target else "", ""]
        if target is not None and known_ratios:
            row[-1] = verdict(max(known_ratios) <= target)
        rows.append(row)
    lines += [harness.table(head, rows), "", "SQL92, evaluated messages a second of one core:", ""]
    rows = []
    for kind, expression in SQL.items():
        rates = [one.sql.get(kind) for one in benches.values()]
        row = [f"`{expression}`", *("-" if rate is None else f"{rate:,.0f}" for rate in rates)]
        best = max(
            (
                rate
                for name, one in benches.items()
                if name != "apache-5"
                for rate in [one.sql.get(kind)]
                if rate is not None
            ),
            default=None,
        )
        rows.append([*row, f"{SQL_TARGET:,}", "" if best is None else verdict(best >= SQL_TARGET)])
    lines.append(
        harness.table(["expression", *(TITLES[name] for name in benches), "target", ""], rows)
    )
    lines += ["", "Late by, ms (at 1000 a second; timers after the end of their slot):", ""]
    rows = []
    for kind in ("delay level", "timer"):
        for name, one in benches.items():
            if kind in one.late:
                late = sorted(one.late[kind])
                early = sum(ms < 0 for ms in late)
                figures = [
                    str(late[len(late) // 2]),
                    str(late[len(late) * 99 // 100]),
                    str(late[-1]),
                ]
                rows.append(
                    [
                        f"{kind}, {TITLES[name]}",
                        *figures,
                        str(early),
                        str(LATE_TARGET_MS),
                        "" if name == "apache-5" else verdict(late[-1] <= LATE_TARGET_MS),
                    ]
                )
    lines.append(harness.table(["", "median", "p99", "most", "early", "target", ""], rows))
    for kind, found in waits.items():
        for name, one in found.items():
            lines += ["", f"{count:,} pending {kind}, {TITLES[name]}:", ""]
            grown = one["anonymous_mb"]
            start_s = max(one["start_after_stop_s"], one["start_after_kill_s"])
            rows = [
                ["CPU to take one, us", f"{one['cpu_us']:.1f}", "", ""],
                [
                    "anonymous memory, MB more",
                    f"{grown:.1f}",
                    str(PENDING_TARGET_MB),
                    verdict(grown <= PENDING_TARGET_MB),
                ],
                ["resident memory with mapped files, MB more", f"{one['rss_mb']:.1f}", "", ""],
                [
                    "anonymous after a restart, MB more",
                    f"{one['anonymous_after_kill_mb'] - one['idle_anonymous_mb']:.1f}",
                    str(PENDING_TARGET_MB),
                    "",
                ],
                ["stop, s", f"{one['stop_s']:.2f}", "", ""],
                ["CPU of a start after kill -9, s", f"{one['start_cpu_after_kill_s']:.2f}", "", ""],
                ["start after a clean stop, s", f"{one['start_after_stop_s']:.2f}", "", ""],
                [
                    "start after kill -9, s",
                    f"{one['start_after_kill_s']:.2f}",
                    f"{RESTART_TARGET_S:.0f}",
                    verdict(start_s <= RESTART_TARGET_S),
                ],
            ]
            lines.append(harness.table(["", "found", "target", ""], rows))
    result = {
        "cpu_us": {name: one.cpu for name, one in benches.items()},
        "sql_per_s": {name: one.sql for name, one in benches.items()},
        "late_most_ms": {
            name: {kind: max(late) for kind, late in one.late.items()}
            for name, one in benches.items()
        },
        "pending": waits,
        "failed": {name: one.notes for name, one in benches.items() if one.notes},
    }
    return "\n".join(lines) + "\n", result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages")
    parser.add_argument("--servers", default="plain,comet,apache-5")
    parser.add_argument("--count", type=int, default=40_000, help="messages of each kind")
    parser.add_argument("--pending", type=int, default=1_000_000, help="0: not measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-result", action="store_true", help="write no file")
    arguments = parser.parse_args()
    tenth = 10 if arguments.quick else 1
    count, waiting = arguments.count // tenth, arguments.pending // tenth
    harness.begin()
    benches: dict[str, Bench] = {}
    missing: dict[str, str] = {}
    for name in arguments.servers.split(","):
        try:
            benches[name] = measure(name, count, 1 if arguments.quick else arguments.repeats)
        except Unavailable as reason:
            missing[name] = str(reason)
            say(f"  {TITLES[name]}: SKIPPED: {reason}")
    waits: dict[str, dict[str, dict[str, float]]] = {}
    ours = [name for name in benches if name != "apache-5"][-1:]
    for kind in ("timers", "half messages") if waiting and ours else ():
        say(f"  {waiting:,} pending {kind}")
        waits[kind] = {ours[0]: pending(ours[0], kind, waiting)}
    text, figures = report(benches, waits, waiting)
    result: dict[str, Any] = {
        "commit": harness.commit(),
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": harness.machine(),
        "settings": {"messages": str(count), "body": f"{len(BODY)} bytes"},
        "missing": missing,
        **figures,
    }
    markdown = text.replace("\n\n", "\n\n" + harness.describe(result) + "\n", 1)
    say("\n" + markdown)
    if not arguments.no_result:
        harness.write_result(harness.result_path("kinds"), result, markdown)


if __name__ == "__main__":
    main()
