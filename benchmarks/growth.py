"""How cost grows: server CPU per message as one thing at a time becomes larger.

Owns: the dimensions and their steps. For each step a send of 16x16 and, where it makes sense, a
pull of 32 at 16x1 are measured several times and the median counts. The last columns compare the
last step with the first: `flat` up to 1.25 times. One rule: within a dimension nothing else
changes, and where that can't be had the dimension says so.
Writes benchmarks/results/<utc date>-<commit>-growth.json and .md.

    growth.py --quick                     smaller steps, one second each
    growth.py --only topics,connections   some dimensions; names as in DIMENSIONS
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import harness
from harness import Fleet, LoadFailed, Run, Server, fill, say

QUEUES = 4
FLAT = 1.25
PULLED_PER_QUEUE = 64  # two full pulls from each queue


@dataclass
class Step:
    """One point: its label, what must be there before, and the generator's options."""

    label: str
    prepare: Callable[[Server], None]
    send: dict[str, object] | None
    pull: dict[str, object] | None = None


# --------------------------------------------------------------------------------------- dimensions


def messages_in_store(sizes: argparse.Namespace) -> Iterator[Step]:
    """Sends and pulls of one topic, while another fills the store."""
    held = 0
    for total in sizes.messages:

        def prepare(server: Server, more: int = total - held, is_first: bool = held == 0) -> None:
            if is_first:
                fill(server, "pulled", 100_000)
                harness.create_topics(server, "bench", 1, QUEUES)
            if more:
                fill(server, "store", more)

        held = total
        yield Step(f"{total:,}", prepare, {}, {"topic": "pulled"})


def queues_per_topic(sizes: argparse.Namespace) -> Iterator[Step]:
    """Sends and pulls go to all queues of one topic at random."""
    for queues in (1, 4, 64, 1024):

        def prepare(server: Server, queues: int = queues) -> None:
            fill(server, f"q{queues}-", queues * PULLED_PER_QUEUE, queues=queues)

        where: dict[str, object] = {"topic": f"q{queues}-", "queues": queues}
        yield Step(f"{queues:,}", prepare, where | {"random": True}, where)


def topics(sizes: argparse.Namespace) -> Iterator[Step]:
    """Sends and pulls go to all queues of all topics, four each, at random."""
    for count in sizes.topics:

        def prepare(server: Server, count: int = count) -> None:
            fill(server, f"t{count}-", count * QUEUES * PULLED_PER_QUEUE, topics=count)

        where: dict[str, object] = {"topic": f"t{count}-", "topics": count}
        yield Step(f"{count:,}", prepare, where | {"random": True}, where)


def idle_connections(sizes: argparse.Namespace) -> Iterator[Step]:
    """The load of 16 connections, beside others that only send their heartbeats."""
    for count in sizes.connections:
        hold: dict[str, object] = {"hold": count, "hold_kind": "heartbeat"} if count else {}
        yield Step(f"{count:,}", _one_topic, hold, hold | {"topic": "pulled"})


def active_connections(sizes: argparse.Namespace) -> Iterator[Step]:
    """All connections send or pull, one request in flight on each.

    From one to ten the cost falls: a busy server finds several requests in one wait.
    """
    for count in (1, *sizes.connections[1:]):
        load: dict[str, object] = {"connections": count, "window": 1}
        yield Step(f"{count:,} x1", _one_topic, load, load | {"topic": "pulled"})


def consumers_of_quiet_queues(sizes: argparse.Namespace) -> Iterator[Step]:
    """Long polls wait, each on a queue of its own that gets nothing."""
    for count in sizes.consumers:
        yield Step(f"{count:,}", _with_parked("quiet", count), _parked("quiet", count))


def consumers_of_busy_queues(sizes: argparse.Namespace) -> Iterator[Step]:
    """Long polls wait, each on a queue of its own, and the sends go to just these queues.

    Cost is per message sent, its delivery included. Topics grow with the consumers (4 queues each),
    and the fewer queues there are, the more messages one woken pull takes along.
    """
    for count in sizes.consumers[1:]:
        busy = {"topic": "busy", "topics": count // QUEUES, "random": True}
        yield Step(f"{count:,}", _with_parked("busy", count), _parked("busy", count) | busy)


def lag(sizes: argparse.Namespace) -> Iterator[Step]:
    """Pulls that begin so many messages before the end of a backlog."""
    whole = sizes.messages[-1]
    for count in (min(100_000, whole), *[one for one in sizes.messages if one > 100_000]):

        def prepare(server: Server, is_first: bool = count == min(100_000, whole)) -> None:
            if is_first:
                fill(server, "backlog", whole)

        where: dict[str, object] = {"topic": "backlog", "from": (whole - count) // QUEUES}
        yield Step(f"{count:,}", prepare, None, where)


def _one_topic(server: Server) -> None:
    if "pulled" not in server.settings:
        fill(server, "pulled", 100_000)
        harness.create_topics(server, "bench", 1, QUEUES)
        server.settings["pulled"] = "100,000 messages"


def _parked(topic: str, count: int) -> dict[str, object]:
    if not count:
        return {}
    parked: dict[str, object] = {"hold": count, "hold_kind": "pull", "hold_topic": topic}
    return parked | {"hold_topics": count // QUEUES, "hold_queues": QUEUES}


def _with_parked(topic: str, count: int) -> Callable[[Server], None]:
    def prepare(server: Server) -> None:
        harness.create_topics(server, "bench", 1, QUEUES)
        if count:
            fill(server, topic, count * 64, topics=count // QUEUES)

    return prepare


DIMENSIONS: dict[str, Callable[[argparse.Namespace], Iterator[Step]]] = {
    "messages": messages_in_store,
    "queues": queues_per_topic,
    "topics": topics,
    "idle-connections": idle_connections,
    "active-connections": active_connections,
    "quiet-consumers": consumers_of_quiet_queues,
    "busy-consumers": consumers_of_busy_queues,
    "lag": lag,
}


# ---------------------------------------------------------------------------------------- measuring


@dataclass
class Point:
    dimension: str
    label: str
    server: str
    send: Run | None
    pull: Run | None


def measure(name: str, arguments: argparse.Namespace, missing: dict[str, str]) -> Iterator[Point]:
    """All steps of one dimension on freshly started servers, which take turns."""
    say(f"\n{name}: {(DIMENSIONS[name].__doc__ or '').splitlines()[0]}")
    starters = {one: harness.STARTERS[one] for one in arguments.servers}
    with Fleet(starters, is_sync=False, missing=missing) as servers:
        for step in DIMENSIONS[name](arguments):
            for server in servers:
                try:
                    step.prepare(server)
                    with harness.alone(server, servers):
                        send = _median(server, "send", step.send, arguments)
                        pull = _median(server, "pull", step.pull, arguments)
                except LoadFailed as error:
                    say(f"  {step.label:>12}  {server.name:<6} FAILED: {error}")
                    missing[f"{name} {step.label}, {server.name}"] = str(error)
                    continue
                figures = _text("send", send) + _text("pull", pull)
                say(f"  {step.label:>12}  {server.name:<6} {figures}")
                yield Point(name, step.label, server.name, send, pull)


def _median(
    server: Server, mode: str, options: dict[str, object] | None, arguments: argparse.Namespace
) -> Run | None:
    if options is None:
        return None
    shape = {"connections": 16, "window": 16 if mode == "send" else 1}
    times = {"seconds": arguments.seconds, "warmup": arguments.warmup}
    runs = []
    for _ in range(arguments.repeats):
        harness.settle()
        runs.append(harness.load(server, mode, **(shape | times | options)))
    return harness.median_run(runs)


def _text(what: str, run: Run | None) -> str:
    if run is None:
        return ""
    doubts = f" !! {'; '.join(run['problems'])}" if "problems" in run else ""
    return f"  {what} {run['rate']:>11,.0f}/s {run['cpu_us']:>8.2f} us CPU{doubts}"


# --------------------------------------------------------------------------------------- the report


def growth(points: list[Point], what: str) -> float | None:
    """What a message costs at the last step over what it costs at the first."""
    costs = [run["cpu_us"] for run in (getattr(point, what) for point in points) if run]
    return costs[-1] / max(costs[0], 1e-9) if len(costs) > 1 else None


def rows(points: list[Point]) -> list[list[str]]:
    found = []
    for dimension in dict.fromkeys(point.dimension for point in points):
        for server in dict.fromkeys(point.server for point in points):
            group = [one for one in points if (one.dimension, one.server) == (dimension, server)]
            for number, point in enumerate(group):
                cells = [dimension if number == 0 else "", point.label, point.server]
                for run in (point.send, point.pull):
                    mark = " (!)" if run and "problems" in run else ""
                    cells.append(f"{run['rate']:,.0f}{mark}" if run else "-")
                    cells.append(f"{run['cpu_us']:.2f}" if run else "-")
                is_last = number == len(group) - 1
                cells += [
                    _flat(growth(group, what)) if is_last else "" for what in ("send", "pull")
                ]
                found.append(cells)
    return found


def _flat(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"flat ({ratio:.2f})" if ratio <= FLAT else f"GROWS {ratio:.2f}x"


def report(points: list[Point], arguments: argparse.Namespace, missing: dict[str, str]) -> None:
    result: dict[str, Any] = {
        "commit": harness.commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine(),
        "settings": {
            "seconds per run": arguments.seconds,
            "runs per step (median)": arguments.repeats,
            "load": "send 16x16 and pull 32 at 16x1, 128 B, async flush, unless the step says else",
        },
        "missing": missing,
        "points": [vars(point) for point in points],
    }
    head = ["dimension", "step", "server", "send msg/s", "send us", "pull msg/s", "pull us"]
    markdown = "# How cost grows\n\n" + harness.describe(result) + "\n"
    for name in dict.fromkeys(point.dimension for point in points):
        markdown += f"- {name}: {' '.join((DIMENSIONS[name].__doc__ or '').split())}\n"
    markdown += "\nus: server CPU microseconds per message.\n\n"
    markdown += harness.table([*head, "send flat?", "pull flat?"], rows(points)) + "\n"
    say("\n" + markdown)
    harness.write_result(harness.result_path("growth"), result, markdown)


def parse_arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="per run (2)")
    parser.add_argument("--warmup", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3, help="runs per step (3)")
    parser.add_argument("--only", type=words, default=list(DIMENSIONS), help=",".join(DIMENSIONS))
    parser.add_argument(
        "--servers", type=words, default=["comet"], help="comet,plain,limit (comet)"
    )
    parser.add_argument("--quick", action="store_true", help="small steps, 1 s, 1 run per step")
    arguments = parser.parse_args()
    for name, known in (("only", tuple(DIMENSIONS)), ("servers", tuple(harness.STARTERS))):
        strange = set(getattr(arguments, name)) - set(known)
        if strange:
            parser.error(f"--{name}: {', '.join(sorted(strange))}; known: {', '.join(known)}")
    arguments.messages = [0, 1_000_000, 5_000_000]
    arguments.topics = [1, 100, 1_000, 10_000]
    arguments.connections = [0, 10, 100, 1_000, 5_000]
    arguments.consumers = [0, 100, 1_000, 5_000]
    if arguments.quick:
        arguments.seconds, arguments.warmup, arguments.repeats = 1.0, 0.3, 1
        arguments.messages = [0, 100_000, 300_000]
        arguments.topics = [1, 100, 1_000]
        arguments.connections = [0, 10, 100, 1_000]
        arguments.consumers = [0, 100, 1_000]
    return arguments


def main() -> int:
    arguments = parse_arguments()
    harness.begin()
    say(f"commit {harness.commit()}; {harness.CORES}")
    missing: dict[str, str] = {}
    points = [point for name in arguments.only for point in measure(name, arguments, missing)]
    report(points, arguments, missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
