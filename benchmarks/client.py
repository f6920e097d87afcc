"""Our client beside the official Java client: messages per second of the client's own CPU time.

Owns: which shapes are measured and how they are shown. Both clients work on the same CometMQ broker
in the same run, one at a time, shape by shape in turn: the broker on one core, the client on the
other, the JVM stopped while it is not its turn. One rule: CPU time is the whole process's (Netty,
garbage collection and compilation here, every thread there), and a client that can't be had is a
row that says why. Writes benchmarks/results/<utc date>-<commit>-client.json and .md.

    client.py                              everything; the JVM is warmed for 2 x 20 CPU s
    client.py --quick                      short runs, to see that it works
    client.py --only async,push --clients asyncio,java

client_worker.py does a shape with our client, java/ClientBench.java with Apache's. RocketMQ's own
benchmark programs are not used: they have no window, and don't tell their CPU time.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
from harness import LoadFailed, Run, Server, Unavailable, say

import cometmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.interop

WORKER = harness.HERE / "client_worker.py"
JAVA_SOURCE = harness.HERE / "java" / "ClientBench.java"
QUEUES = 4
BATCH = 32
SENT, BACKLOG = "sent", "backlog"
JAVA_LIMIT_S = 400
# As in RocketMQ's benchmark/runclass.sh, but for the collector: see --gc.
JVM_OPTIONS = ("-server", "-Xms1g", "-Xmx1g", "-XX:-UsePerfData")
FACES = {
    "blocking": ("blocking", "asyncio"),
    "blocking-uvloop": ("blocking", "uvloop"),
    "asyncio": ("asyncio", "asyncio"),
    "asyncio-uvloop": ("asyncio", "uvloop"),
}
JAVA = "java"


@dataclass(frozen=True)
class Shape:
    """One block of the report, and what each kind of client is told for it ("" if it has none)."""

    name: str
    blocking: str
    asyncio: str
    java: str
    window: int = 1
    batch: int = 1

    def word(self, client: str) -> str:
        return self.java if client == JAVA else getattr(self, FACES[client][0])

    @property
    def is_consuming(self) -> bool:
        return self.java in ("push", "poll")


SHAPES = (
    Shape("async 256", "async", "async", "async", window=256),
    Shape("async 4096", "async", "async", "async", window=4096),
    Shape("tasks 256", "", "tasks", "async", window=256),
    Shape("tasks 4096", "", "tasks", "async", window=4096),
    Shape("sync", "sync", "sync", "sync"),
    Shape("batch 32", "batch", "batch", "batch", batch=BATCH),
    Shape("push plain", "push plain", "push plain", "push"),
    Shape("push async", "push async", "push async", "push"),
    Shape("push batch 32", "push batch", "push batch", "push", batch=BATCH),
    Shape("poll", "", "poll", "poll"),
)
MEANING = """\
- async: `send_async` with a callback; asyncio: the oldest future is awaited when the window is
  full; Java: `send(message, callback)` behind a semaphore. The number is the window.
- tasks: as many tasks as the window, each of which awaits `send`; beside Java's async.
- sync: one `send` after the other. batch 32: one `send_batch` of 32 after the other.
- push: a consumer group of one member takes a backlog, 20 threads or tasks, pulls of 32, a handler
  that only counts: plain, async, or plain with lists of 32 (Java: consumeMessageBatchMaxSize).
- poll: the pull consumer; Java: DefaultLitePullConsumer.
"""


# ------------------------------------------------------------------------------------------ servers


def source_state() -> str:
    """Changes when somebody edits our package; a run that saw two states is worth nothing."""
    digest = hashlib.sha256()
    for path in sorted(Path(cometmq.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def start_server() -> tuple[Server, str]:
    """CometMQ as harness starts it, and its name server's address."""
    folder = harness.new_folder()
    command = [sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"]
    command += ["--store", str(folder / "store"), "--log-level", "WARNING"]
    began = time.monotonic()
    process = harness.spawn(command, folder)
    places = harness.await_ready(process, folder)
    took = time.monotonic() - began
    return Server("comet", places["broker"], [process], folder, took), places["namesrv"]


def _become_client() -> None:
    os.sched_setaffinity(0, {harness.CORES.generator})
    harness._libc.prctl(harness._PR_SET_PDEATHSIG, signal.SIGKILL)


# ------------------------------------------------------------------------------------------ clients


class JavaClient:
    """A JVM that does one shape after the other, stopped in between."""

    def __init__(self, release: str, collector: str) -> None:
        from tests.interop import jvm, toolchain, versions

        try:
            tools = toolchain.prepare()
        except toolchain.Unavailable as reason:
            raise Unavailable(str(reason)) from None
        javac = shutil.which("javac")
        if javac is None:
            raise Unavailable("javac is not installed")
        folder = harness.new_folder()
        home = jvm.jvm_home(folder / "home", "ERROR")
        jars = f"{tools.drivers[release] / 'lib'}/*"
        classes = folder / "classes"
        subprocess.run(
            [javac, "-nowarn", "-cp", jars, "-d", str(classes), str(JAVA_SOURCE)], check=True
        )
        options = [*JVM_OPTIONS, f"-XX:+Use{collector}GC", f"-Duser.home={home}"]
        options += [f"-Djava.io.tmpdir={home / 'tmp'}", "-Drocketmq.client.logUseSlf4j=true"]
        for package in jvm.OPENS:
            options += ["--add-opens", f"{package}=ALL-UNNAMED"]
        command = [tools.java, *options, "-cp", f"{home / 'conf'}:{classes}:{jars}", "ClientBench"]
        with (folder / "log").open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                preexec_fn=_become_client,
            )
        harness._processes.append(self._process)
        self._log = folder / "log"
        self.settings = {
            "version": versions.CLIENTS[release],
            "java": harness.first_line(tools.java, "-version"),
            "JVM": " ".join([*JVM_OPTIONS, f"-XX:+Use{collector}GC"]),
        }
        self._process.send_signal(signal.SIGSTOP)

    def run(self, shape: str, words: dict[str, str]) -> Run:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.send_signal(signal.SIGCONT)
        try:
            line = " ".join([shape, *(f"{key}={value}" for key, value in words.items())])
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = ""
            while not answer.startswith("{"):
                answer = process.stdout.readline()
                if not answer:
                    raise LoadFailed(f"java ended: {_last_line(self._log)}")
            run: Run = json.loads(answer)
            if "failed" in run:
                raise LoadFailed(f"java: {run['failed']}")
            run["rss_mb"] = _rss_mb(process.pid)
            return run
        finally:
            process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(harness.STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_python(client: str, shape: str, words: dict[str, str]) -> Run:
    """One shape in a process of its own."""
    command = [sys.executable, str(WORKER), *FACES[client], shape]
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in words.items())],
        capture_output=True,
        text=True,
        timeout=JAVA_LIMIT_S,
        preexec_fn=_become_client,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise LoadFailed(f"{client}: {said[-1] if said else f'status {done.returncode}'}")
    run: Run = json.loads(done.stdout.strip().splitlines()[-1])
    return run


def _rss_mb(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return round(int(found[1]) / 1024, 1) if found else 0.0


def _last_line(log: Path) -> str:
    said = log.read_text(errors="replace").strip().splitlines()
    return said[-1] if said else "without a word"


# ---------------------------------------------------------------------------------------- measuring


class Bench:
    """The broker, the clients, and the runs of every shape so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.runs: dict[str, dict[str, list[Run]]] = {}
        self.missing: dict[str, str] = {}
        self.java_settings: dict[str, str] = {}
        self._groups = itertools.count()
        self._java: JavaClient | None = None
        self._namesrv = ""

    def measure(self) -> None:
        arguments = self.arguments
        shapes = [one for one in SHAPES if any(word in one.name for word in arguments.only)]
        clients = [one for one in arguments.clients if self._is_there(one)]
        server, self._namesrv = start_server()
        try:
            harness.create_topics(server, SENT, 1, QUEUES)
            if any(one.is_consuming for one in shapes):
                say(f"filling {arguments.backlog:,} messages")
                harness.fill(server, BACKLOG, arguments.backlog, queues=QUEUES)
            if self._java is not None:
                self._warm(shapes)
            for _ in range(arguments.repeats):
                for shape in shapes:
                    for client in clients:
                        if shape.word(client):
                            self._measure_one(shape, client)
        finally:
            if self._java is not None:
                self._java.close()
            server.close()

    def _is_there(self, client: str) -> bool:
        try:
            if client == JAVA:
                self._java = JavaClient(self.arguments.java, self.arguments.gc)
                self.java_settings = self._java.settings
            elif client.endswith("uvloop") and find_spec("uvloop") is None:
                raise Unavailable("uvloop is not installed")
        except Unavailable as reason:
            self.missing[client] = str(reason)
            say(f"  {client}: SKIPPED: {reason}")
            return False
        return True

    def _warm(self, shapes: list[Shape]) -> None:
        """Sends, then consumption, each for so much of the JVM's own CPU time.

        By the wall clock it was not enough: on a busy machine 20 s for all shapes together left
        async sends at a third of what they reached in the next pass.
        """
        warm = self.arguments.warm
        seconds = max(warm / 5, 0.5)
        for what, is_consuming in (("sends", False), ("consumption", True)):
            some = [one for one in shapes if one.is_consuming is is_consuming]
            used_s = 0.0
            for shape in itertools.cycle(some):
                if used_s >= warm:
                    break
                run = self._run(shape, JAVA, seconds)
                used_s += run["cpu_s"]
                say(
                    f"  warming the JVM, {what}: {used_s:.0f} of {warm:.0f} CPU s, {shape.name}"
                    f" {run['messages'] / max(run['cpu_s'], 1e-9):,.0f} per CPU s"
                )

    def _run(self, shape: Shape, client: str, seconds: float) -> Run:
        arguments = self.arguments
        words = {
            "namesrv": self._namesrv,
            "topic": f"{BACKLOG if shape.is_consuming else SENT}0",
            "group": f"bench-{client}-{next(self._groups)}",
            "body": str(arguments.body),
            "window": str(shape.window),
            "batch": str(shape.batch),
            "count": str(arguments.backlog),
            "seconds": str(seconds),
            "warmup": str(arguments.warmup),
        }
        if client == JAVA:
            assert self._java is not None
            return self._java.run(shape.word(client), words)
        return run_python(client, shape.word(client), words)

    def _measure_one(self, shape: Shape, client: str) -> None:
        harness.settle()
        try:
            run = self._run(shape, client, self.arguments.seconds)
        except (LoadFailed, subprocess.TimeoutExpired) as error:
            self.missing[f"{client}, {shape.name}"] = str(error)
            say(f"  {shape.name:<14} {client:<16} FAILED: {error}")
            return
        run["rate"] = run["messages"] / max(run["seconds"], 1e-9)
        run["per_cpu_s"] = run["messages"] / max(run["cpu_s"], 1e-9)
        run["cpu_us"] = run["cpu_s"] / max(run["messages"], 1) * 1e6
        self.runs.setdefault(shape.name, {}).setdefault(client, []).append(run)
        doubts = "; ".join(f"{count} x {what}" for what, count in run["errors"].items())
        say(
            f"  {shape.name:<14} {client:<16} {run['rate']:>9,.0f}/s"
            f" {run['per_cpu_s']:>9,.0f} per CPU s {run['cpu_us']:>8.2f} us CPU"
            f"  RSS {run['rss_mb']:>5,.0f} MB{f'  !! {doubts}' if doubts else ''}"
        )


def median(runs: list[Run]) -> Run:
    found: Run = {"repeats": len(runs)}
    for key in ("rate", "per_cpu_s", "cpu_us", "p50_us", "p99_us", "rss_mb"):
        values = [run[key] for run in runs if key in run]
        if values:
            found[key] = round(statistics.median(values), 2)
    per_cpu = [run["per_cpu_s"] for run in runs]
    found["per_cpu_s_range"] = [round(min(per_cpu)), round(max(per_cpu))]
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run["errors"])
    if errors:
        found["problems"] = [f"{count} x {what}" for what, count in sorted(errors.items())]
    return found


# --------------------------------------------------------------------------------------- the report


def report(bench: Bench) -> None:
    arguments = bench.arguments
    medians = {
        shape: {client: median(runs) for client, runs in by_client.items()}
        for shape, by_client in bench.runs.items()
    }
    result: dict[str, Any] = {
        "commit": harness.commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine(),
        "settings": {
            "seconds per run of sends": arguments.seconds,
            "runs per shape (median)": arguments.repeats,
            "message": f"{arguments.body} B, a tag, one key",
            "backlog": f"{arguments.backlog:,} messages in {QUEUES} queues, a new group each run",
            "broker": "CometMQ, compiled path, as shipped",
            "our client": "a fresh process each run",
        },
        "missing": bench.missing,
        "shapes": medians,
        "runs": bench.runs,
    }
    if bench.java_settings:
        shown = ", ".join(f"{key}={value}" for key, value in bench.java_settings.items())
        result["settings"]["java"] = (
            f"{shown}, warmed for {arguments.warm:.0f} CPU s of sends and as much of consumption"
        )
    if find_spec("uvloop") is not None:
        from importlib.metadata import version

        result["settings"]["uvloop"] = version("uvloop")
    markdown = "# Our client beside the Java client\n\n" + harness.describe(result) + "\n"
    markdown += MEANING + "\nCPU time is the client's, the whole process's. "
    markdown += "`x Java`: messages per CPU second as a multiple of Java's in this run.\n"
    for title, is_consuming in (("Sending", False), ("Consuming", True)):
        rows = _rows(bench, medians, is_consuming)
        if rows:
            head = ["shape", "client", "messages/s", "per CPU s", "range", "CPU us", "x Java"]
            head += ["p50 us", "p99 us", "RSS MB"]
            markdown += f"\n## {title}\n\n{_table(head, rows)}\n"
    markdown += _notes(medians)
    say("\n" + markdown)
    harness.write_result(harness.result_path("client"), result, markdown)


def _rows(bench: Bench, medians: dict[str, dict[str, Run]], is_consuming: bool) -> list[list[str]]:
    rows = []
    for shape in SHAPES:
        by_client = medians.get(shape.name, {})
        if shape.is_consuming is not is_consuming or not by_client:
            continue
        java = by_client.get(JAVA)
        for client in bench.arguments.clients:
            if not shape.word(client):
                continue
            run = by_client.get(client)
            if run is None:
                rows.append([shape.name, f"{client}: **skipped**", *["-"] * 8])
                continue
            mark = " (!)" if "problems" in run else ""
            ratio = f"{run['per_cpu_s'] / java['per_cpu_s']:.2f}" if java else "-"
            latency = [f"{run[key]:,.0f}" if key in run else "-" for key in ("p50_us", "p99_us")]
            figures = [f"{run['rate']:,.0f}{mark}", f"{run['per_cpu_s']:,.0f}"]
            low, high = run["per_cpu_s_range"]
            figures += [
                f"{low:,}-{high:,}",
                f"{run['cpu_us']:.2f}",
                ratio,
                *latency,
                f"{run['rss_mb']:,.0f}",
            ]
            rows.append([shape.name, client, *figures])
    return rows


def _table(head: list[str], rows: list[list[str]]) -> str:
    """harness.table, with the second column to the left as well."""
    width = max(len(row[1]) for row in [head, *rows])
    return harness.table(head, [[row[0], row[1].ljust(width), *row[2:]] for row in rows])


def _notes(medians: dict[str, dict[str, Run]]) -> str:
    lines = [
        f"- (!) {client}, {shape}: {'; '.join(run['problems'])}"
        for shape, by_client in medians.items()
        for client, run in by_client.items()
        if "problems" in run
    ]
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*FACES, JAVA]
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--seconds", type=float, default=4.0, help="of sends, per run (4)")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before each (1)")
    parser.add_argument("--repeats", type=int, default=5, help="runs per shape (5)")
    parser.add_argument("--warm", type=float, default=20.0, help="CPU s for the JVM, twice (20)")
    parser.add_argument("--backlog", type=int, default=500_000, help="messages to consume (500000)")
    parser.add_argument("--body", type=int, default=128, help="bytes (128)")
    parser.add_argument("--only", type=words, default=[""], help="words that shape names contain")
    parser.add_argument("--clients", type=words, default=known, help=",".join(known))
    parser.add_argument("--java", default="client-5", help="client-4 or client-5 (client-5)")
    parser.add_argument("--gc", default="Serial", help="G1, Serial or Parallel (Serial)")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it works")
    arguments = parser.parse_args()
    strange = set(arguments.clients) - set(known)
    if strange:
        parser.error(f"--clients: {', '.join(sorted(strange))}; known: {', '.join(known)}")
    if arguments.quick:
        arguments.seconds, arguments.warmup, arguments.repeats = 1.0, 0.5, 1
        arguments.warm, arguments.backlog = 5.0, 100_000
    harness.begin()
    say(f"commit {harness.commit()}; {harness.CORES}")
    bench = Bench(arguments)
    before = source_state()
    bench.measure()
    if source_state() != before:
        bench.missing["a clean run"] = "the package's source was EDITED during this run"
        say("\n!! the package's source was edited during this run: its figures are worth nothing")
    report(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
