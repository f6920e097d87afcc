"""CometMQ beside the C limit: sends, pulls, flush modes, many topics, mixed traffic, latency.

Owns: which shapes are measured and how they are shown. A shape like 16x16 is 16 connections with 16
requests in flight on each. Servers take turns shape by shape; each shape runs several times and the
median counts. Writes benchmarks/results/<utc date>-<commit>.json, .md and .png. One rule: rates are
always shown with the server's CPU time per message, which is the steadier figure on a busy machine.

    run.py --quick                      everything but the backlog, one second each
    run.py --only send,pull             some groups; names as in GROUPS
    run.py --servers comet,limit        some servers
    run.py --check                      no figures: does what was sent come back as it was sent?
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harness
from harness import Fleet, LoadFailed, Run, Server, fill, say

from cometmq.client.remote import Remote
from cometmq.wire import headers, record
from cometmq.wire.codes import PullFlag, RequestCode

SHAPES = ((1, 1), (1, 64), (16, 16), (64, 1))
PULL_SHAPES = (*SHAPES[:1], (16, 1), *SHAPES[2:])
BODIES = (128, 1024)
QUEUES = 4
PEAK_SHAPE = "send 16x16 128 B"
PULLED_MESSAGES = 400_000
DRAIN_TIMEOUT_S = 3600
GROUPS = ("send", "pull", "sync", "topics", "mixed", "latency", "drain")


@dataclass
class Shape:
    """One row: what the generator is told."""

    name: str
    mode: str
    options: dict[str, object]
    share_of_peak: float | None = None
    """Open loop at this share of what the server reached at PEAK_SHAPE."""


@dataclass
class Group:
    """Shapes that share freshly started servers, and what these must hold before."""

    name: str
    shapes: list[Shape]
    is_sync: bool = False
    prepare: Callable[[Server], None] = lambda server: None


@dataclass
class Measured:
    """Everything of one run of this program."""

    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    starts: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)

    def rows(self) -> dict[str, dict[str, Run]]:
        return {
            shape: {name: harness.median_run(runs) for name, runs in by_server.items()}
            for shape, by_server in self.runs.items()
        }

    def peak(self, server: Server, seconds: float) -> float:
        """The rate at PEAK_SHAPE, measured now if it was not measured yet."""
        runs = self.runs.get(PEAK_SHAPE, {}).get(server.name)
        if not runs:
            runs = [
                harness.load(server, "send", connections=16, window=16, seconds=seconds)
                for _ in range(3)
            ]
        return float(harness.median_run(runs)["rate"])


# ------------------------------------------------------------------------------------------- shapes


def touch_all(server: Server, topic: str, topics: int) -> None:
    """One message to each queue, so that a shape measures the queues' use and not their making."""
    harness.create_topics(server, topic, topics, QUEUES)
    options = {"connections": 16, "window": 16, "topic": topic, "topics": topics}
    harness.load(server, "send", **options, count=topics * QUEUES, seconds=DRAIN_TIMEOUT_S)


def groups(arguments: argparse.Namespace) -> list[Group]:
    """All groups in the order in which they run; latency needs the peak that send found."""
    seconds = {"seconds": arguments.seconds, "warmup": arguments.warmup}
    shapes = [shape for shape in SHAPES if _wanted(shape, arguments)]
    pull_shapes = [shape for shape in PULL_SHAPES if _wanted(shape, arguments)]

    def closed(connections: int, window: int, **more: object) -> dict[str, object]:
        return {"connections": connections, "window": window, **seconds, **more}

    sends = [
        Shape(f"send {n}x{w} {_size(body)}", "send", closed(n, w, body=body))
        for body in BODIES
        for n, w in shapes
    ]
    pulls = [
        Shape(f"pull 32 {n}x{w} {_size(body)}", "pull", closed(n, w, topic=f"pull{body}-"))
        for body in BODIES
        for n, w in pull_shapes
    ]
    syncs = [Shape(f"sync send {n}x{w} 128 B", "send", closed(n, w)) for n, w in shapes]

    def topics(count: int) -> Group:  # servers of its own: none pays for another row's topics
        topic = f"t{count}-"
        options = closed(16, 16, topic=topic, topics=count, random=True)
        return Group(
            "topics",
            [Shape(f"send 16x16 {count:,} topics", "send", options)],
            prepare=lambda server: touch_all(server, topic, count),
        )

    mixed = [
        Shape("send 16x16 + 4 consumers", "mixed", closed(16, 16, consumers=4, topic="mixed")),
        Shape(
            "50% of peak + 4 consumers", "mixed", closed(16, 16, consumers=4, topic="mixed"), 0.5
        ),
    ]
    latencies = [
        Shape(f"open loop, {share:.0%} of peak", "send", closed(16, 16), share)
        for share in (0.5, 0.8)
    ]
    drains = [
        Shape(
            f"drain {arguments.backlog:,}",
            "pull",
            {"connections": 16, "drain": True, "seconds": DRAIN_TIMEOUT_S, "topic": "backlog"},
        ),
        Shape(
            "send 16x16 + drain",
            "mixed",
            closed(16, 16, consumers=16, topic="backlog") | {"from": 0},
        ),
    ]

    def prepare_pulls(server: Server) -> None:
        for body in BODIES:
            fill(server, f"pull{body}-", PULLED_MESSAGES, body=body)

    def one_topic(server: Server) -> None:
        harness.create_topics(server, "bench", 1, QUEUES)

    found = [
        Group("send", sends, prepare=one_topic),
        Group("pull", pulls, prepare=prepare_pulls),
        Group("sync", syncs, is_sync=True, prepare=one_topic),
        *(topics(count) for count in arguments.topics),
        Group("latency", latencies, prepare=one_topic),
        Group("mixed", mixed, prepare=lambda server: touch_all(server, "mixed", 1)),
    ]
    if arguments.backlog:
        prepare = lambda server: fill(server, "backlog", arguments.backlog)  # noqa: E731
        found.append(Group("drain", drains, prepare=prepare))
    return [group for group in found if group.name in arguments.only and group.shapes]


def _wanted(shape: tuple[int, int], arguments: argparse.Namespace) -> bool:
    return not arguments.shapes or f"{shape[0]}x{shape[1]}" in arguments.shapes


def _size(body: int) -> str:
    return "1 KiB" if body == 1024 else f"{body} B"


# ---------------------------------------------------------------------------------------- measuring


def measure(group: Group, arguments: argparse.Namespace, measured: Measured) -> None:
    """Start the servers, let them take turns, stop them."""
    say(f"\n{group.name}")
    starters = {name: harness.STARTERS[name] for name in arguments.servers}
    with Fleet(starters, is_sync=group.is_sync, missing=measured.missing) as servers:
        for server in servers:
            began = time.monotonic()
            group.prepare(server)
            measured.settings[server.name] = server.settings
            measured.starts.setdefault(
                server.name, {"start_ms": round(server.start_s * 1000), **server.idle}
            )
            say(f"  {server.name:<6} ready, prepared in {time.monotonic() - began:.1f} s")
        for _ in range(arguments.repeats):
            for shape in group.shapes:
                for server in servers:
                    with harness.alone(server, servers):
                        _measure_one(shape, server, arguments, measured)
        for server in servers:
            used = {f"{key}_after_{group.name}": v for key, v in server.memory_mb().items()}
            measured.starts[server.name] |= used


def _measure_one(
    shape: Shape,
    server: Server,
    arguments: argparse.Namespace,
    measured: Measured,
) -> None:
    options = dict(shape.options)
    if shape.share_of_peak is not None:
        options["rate"] = round(shape.share_of_peak * measured.peak(server, arguments.seconds))
    harness.settle()
    try:
        run = harness.load(server, shape.mode, **options)
    except LoadFailed as error:
        say(f"  {shape.name:<30} {server.name:<6} FAILED: {error}")
        measured.missing[f"{shape.name}, {server.name}"] = str(error)
        return
    measured.runs.setdefault(shape.name, {}).setdefault(server.name, []).append(run)
    doubts = "; ".join(harness.problems(run))
    say(
        f"  {shape.name:<30} {server.name:<6} {run['rate']:>11,.0f}/s {run['cpu_us']:>8.2f} us CPU"
        f"  p50 {run.get('p50_us', 0):>9,.0f}  p99 {run.get('p99_us', 0):>9,.0f} us"
        f"{f'  !! {doubts}' if doubts else ''}"
    )


# --------------------------------------------------------------------------------------- the report


def report(measured: Measured, arguments: argparse.Namespace) -> None:
    rows = measured.rows()
    result: dict[str, Any] = {
        "commit": harness.commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine(),
        "settings": {
            "seconds per run": arguments.seconds,
            "runs per shape (median)": arguments.repeats,
            "queues per topic": QUEUES,
            "message": "JSON header V2 (310), UNIQ_KEY, one KEYS word, TAGS, WAIT",
            "servers": "settings as shipped; the limit server syncs by the same intervals",
        },
        "servers": {
            name: measured.starts[name] | {"settings": measured.settings[name]}
            for name in measured.starts
        },
        "missing": measured.missing,
        "shapes": rows,
    }
    markdown = "# CometMQ beside the C limit\n\n" + harness.describe(result) + "\n"
    markdown += _rates(rows, list(measured.starts)) + "\n\n" + _latencies(rows) + "\n"
    markdown += _notes(rows) + "\n## Start and memory\n\n" + _starts(measured) + "\n"
    say("\n" + markdown)
    path = harness.result_path("")
    harness.write_result(path, result, markdown)
    titles = {harness.TITLES[name]: name for name in measured.starts}
    harness.plot_bars(
        path,
        f"messages/s, commit {result['commit']}, {result['machine']['cpu']}",
        list(rows),
        {
            title: [rows[shape].get(name, {}).get("rate") for shape in rows]
            for title, name in titles.items()
        },
        "messages per second (log scale)",
    )


def _rates(rows: dict[str, dict[str, Run]], names: list[str]) -> str:
    others = [name for name in names if name != "limit"]
    head = ["shape"]
    head += [f"{name} {what}" for name in names for what in ("msg/s", "us")]
    head += [f"{name}/limit {what}" for name in others for what in ("rate", "CPU")]
    body = []
    for shape, by_server in rows.items():
        cells = [shape]
        for name in names:
            run = by_server.get(name)
            if run is None:
                cells += ["-", "-"]
                continue
            mark = " (!)" if "problems" in run else ""
            rate = run["rate"] if "consumed" not in run else run["consumed"]["rate"]
            both = f"{run['rate']:,.0f} in, {rate:,.0f} out"
            cells.append((both if "consumed" in run else f"{rate:,.0f}") + mark)
            cells.append(f"{run['cpu_us']:.2f}")
        limit = by_server.get("limit")
        for name in others:
            run = by_server.get(name)
            if run is None or limit is None:
                cells += ["-", "-"]
                continue
            cells.append(f"{run['rate'] / max(limit['rate'], 1e-9):.2f}")
            cells.append(f"{run['cpu_us'] / max(limit['cpu_us'], 1e-9):.2f}")
        body.append(cells)
    text = "Messages per second, and server CPU microseconds per message (us).\n\n"
    return text + harness.table(head, body)


def _latencies(rows: dict[str, dict[str, Run]]) -> str:
    """Where latency tells something: one in flight, and the open loops."""
    body = []
    for shape, by_server in rows.items():
        if not (" 1x1 " in shape or "of peak" in shape):
            continue
        for name, run in by_server.items():
            parts = [("", run)]
            if "consumed" in run:
                parts.append((", end to end", run["consumed"]))
            for what, part in parts:
                cells = [f"{part.get(key, 0):,.0f}" for key in ("p50_us", "p99_us")]
                cells += [f"{part.get(key, 0):,.0f}" for key in ("p999_us", "max_us")]
                body.append([f"{shape}{what}", name, f"{run['rate']:,.0f}", *cells])
    head = ["latency (us)", "server", "msg/s", "p50", "p99", "p99.9", "max"]
    text = "Open loops count latency from the time a send was due, not from when it got out.\n\n"
    return text + harness.table(head, body)


def _notes(rows: dict[str, dict[str, Run]]) -> str:
    lines = [
        f"- (!) {shape}, {name}: {'; '.join(run['problems'])}"
        for shape, by_server in rows.items()
        for name, run in by_server.items()
        if "problems" in run
    ]
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _starts(measured: Measured) -> str:
    body = []
    for name, facts in measured.starts.items():
        after = [value for key, value in facts.items() if key.startswith("anonymous_mb_after_")]
        cells = [f"{facts['start_ms']:,.0f}", f"{facts['rss_mb']:.0f}"]
        cells += [f"{facts['anonymous_mb']:.0f}", f"{max(after, default=0):.0f}"]
        body.append([harness.TITLES[name], *cells])
    head = ["server", "start to ready, ms", "RSS idle, MB", "not mapped files, MB"]
    return harness.table([*head, "the same at most after a group"], body)


# -------------------------------------------------------------------------------------------- check


def check(arguments: argparse.Namespace) -> int:
    """Send with the generator, read back with our own client, compare."""
    failures = 0
    starters = {name: harness.STARTERS[name] for name in arguments.servers}
    for is_sync in (False, True):
        with Fleet(starters, is_sync=is_sync, missing={}) as servers:
            for server in servers:
                for extra in ({}, {"binary": True}, {"batch": 7}, {"body": 1024, "keys": 3}):
                    wrong = _check_one(server, dict(extra))
                    failures += bool(wrong)
                    mode = "sync" if is_sync else "async"
                    say(f"{server.name:<6} {mode:<5} {extra!s:<28} {wrong or 'as it was sent'}")
    return 1 if failures else 0


def _check_one(server: Server, extra: dict[str, object]) -> str:
    topic, count = f"check{len(extra)}{'-'.join(extra)}", 4_200
    harness.create_topics(server, topic, 2, QUEUES)
    options: dict[str, object] = {"connections": 3, "window": 5, "topic": topic, "topics": 2}
    run = harness.load(server, "send", **options, **extra, count=count, seconds=60)
    if harness.problems(run):
        return "; ".join(harness.problems(run))
    numbers: list[int] = []
    unique: set[str] = set()
    for number in range(2):
        for queue_id in range(QUEUES):
            messages = _read_queue(server.address, f"{topic}{number}", queue_id)
            if [one.queue_offset for one in messages] != list(range(len(messages))):
                return f"queue {queue_id}: offsets are not gapless"
            for one in messages:
                body = one.body
                _, _, sequence = struct.unpack_from("=QQQ", body)
                letters = bytes(97 + at % 26 for at in range(len(body) - 24))
                if len(body) != extra.get("body", 128) or body[24:] != letters:
                    return f"message {sequence}: another body"
                table = dict(part.split("\x01") for part in one.properties.split("\x02") if part)
                if table.get("TAGS") != "TagA" or table.get("WAIT", "true") != "true":
                    return f"message {sequence}: properties are {table}"
                if len(table["KEYS"].split()) != extra.get("keys", 1):
                    return f"message {sequence}: KEYS are {table['KEYS']!r}"
                numbers.append(sequence)
                unique.add(table["UNIQ_KEY"])
    if sorted(numbers) != list(range(len(numbers))) or len(numbers) < count:
        return f"{len(numbers)} messages instead of {count}, or not each once"
    if len(unique) != len(numbers):
        return f"only {len(unique)} unique keys in {len(numbers)} messages"
    pulled = harness.load(server, "pull", topic=topic, topics=2, drain=True, seconds=60)
    if harness.problems(pulled) or pulled["messages"] != len(numbers):
        return f"the generator pulled {pulled['messages']} of {len(numbers)}: {pulled['errors']}"
    return ""


def _read_queue(address: str, topic: str, queue_id: int) -> list[Any]:
    found: list[Any] = []
    with Remote(address) as remote:
        end = int(
            remote.call(RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": str(queue_id)}).ext[
                "offset"
            ]
        )
        while len(found) < end:
            header = headers.PullHeader(
                consumerGroup="check",
                topic=topic,
                queueId=queue_id,
                queueOffset=len(found),
                maxMsgNums=32,
                sysFlag=int(PullFlag.SUBSCRIPTION),
                subscription="*",
            )
            answer = remote.call(RequestCode.PULL_MESSAGE, headers.to_ext(header))
            at = 0
            while at < len(answer.body):  # with the CRC, which pulls don't check otherwise
                message = record.decode(answer.body, at, verify_crc=True)
                found.append(message)
                at += message.size
    return found


# --------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="per run (3)")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before each (0.5)")
    parser.add_argument("--repeats", type=int, default=3, help="runs per shape (3)")
    parser.add_argument("--backlog", type=int, default=5_000_000, help="messages to drain; 0: none")
    parser.add_argument("--topics", type=words, default=["1", "1000", "10000"], help="1,1000,10000")
    parser.add_argument("--shapes", type=words, default=[], help="only these, e.g. 1x1,16x16")
    parser.add_argument("--only", type=words, default=list(GROUPS), help=",".join(GROUPS))
    parser.add_argument("--servers", type=words, default=list(harness.STARTERS))
    parser.add_argument("--quick", action="store_true", help="1 s, 1 run per shape, no backlog")
    parser.add_argument("--check", action="store_true", help="compare what comes back; no figures")
    arguments = parser.parse_args()
    arguments.topics = [int(count) for count in arguments.topics]
    for name, known in (("only", GROUPS), ("servers", tuple(harness.STARTERS))):
        strange = set(getattr(arguments, name)) - set(known)
        if strange:
            parser.error(f"--{name}: {', '.join(sorted(strange))}; known: {', '.join(known)}")
    if arguments.quick:
        arguments.seconds, arguments.warmup, arguments.repeats = 1.0, 0.3, 1
        arguments.backlog = 0
    return arguments


def main() -> int:
    arguments = parse_arguments()
    harness.begin()
    if arguments.check:
        return check(arguments)
    say(f"commit {harness.commit()}; {harness.CORES}")
    measured = Measured()
    for group in groups(arguments):
        measure(group, arguments, measured)
    report(measured, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
