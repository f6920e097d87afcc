"""What every benchmark here needs: servers on one core, the generator on another, and the report.

Owns: building the C programs, starting and stopping servers, running `load`, medians, and the files
in results/. One rule: servers are compared in one run, shape by shape in turn, each with its own
settings as shipped (only ports, folders and what a shape is about are changed), and whatever went
wrong is in the result: errors, a missing server, a generator that was the bottleneck.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cometmq.client.remote import Remote
from cometmq.errors import CometError

HERE = Path(__file__).resolve().parent
BUILD = HERE / ".build"
RESULTS = HERE / "results"
LOAD_SOURCES = ("load.c", "load_rocketmq.c", "load_redis.c", "load_nats.c")
LIMIT_SOURCES = ("limit_server.c",)
COMPILE = ("cc", "-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-pthread")
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30
GENERATOR_IS_BUSY = 0.97  # of its core: above, the figure is the generator's and not the server's
UPDATE_AND_CREATE_TOPIC = 17
UPDATE_AND_CREATE_TOPIC_LIST = 18
TOPICS_PER_REQUEST = 500
FILL_BATCH = 64
FILL_TRIES = 5
FILL_TIMEOUT_S = 3600

Run = dict[str, Any]


class Unavailable(Exception):
    """A server can't be had on this machine; the text says why."""


class LoadFailed(Exception):
    """The generator could not do what it was asked."""


# --------------------------------------------------------------------------------------- C programs


def build() -> None:
    """Compile what is older than its sources."""
    BUILD.mkdir(exist_ok=True)
    for program, sources in (("load", LOAD_SOURCES), ("limit_server", LIMIT_SOURCES)):
        target = BUILD / program
        inputs = [HERE / name for name in sources]
        newest = max(path.stat().st_mtime for path in [*inputs, *HERE.glob("*.h")])
        if target.exists() and target.stat().st_mtime > newest:
            continue
        if shutil.which(COMPILE[0]) is None:
            raise SystemExit("benchmarks need a C compiler: install the package gcc")
        subprocess.run([*COMPILE, *map(str, inputs), "-o", str(target)], check=True)


# ------------------------------------------------------------------------------------------ machine


def begin() -> None:
    """What every benchmark does first."""
    # Thousands of connections need as many descriptors, here and in every child.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that servers are ended and files go
    build()


@dataclass(frozen=True)
class Cores:
    """Where servers and the generator run; the same core if there is only one."""

    server: int
    generator: int

    @staticmethod
    def choose() -> Cores:
        usable = sorted(os.sched_getaffinity(0))
        return Cores(usable[0], usable[1] if len(usable) > 1 else usable[0])

    def __str__(self) -> str:
        if self.server == self.generator:
            return "servers and generator share the ONLY core of this machine: figures are too low"
        return f"servers pinned to core {self.server}, generator to core {self.generator}"


CORES = Cores.choose()


def machine() -> dict[str, str]:
    """What a reader must know of the machine; no names and no paths."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    compiler = first_line("cc", "--version")
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "compiler": f"{compiler}, -O2",
        "pinning": str(CORES),
    }


def commit() -> str:
    return first_line("git", "-C", str(HERE), "describe", "--always", "--dirty")


def first_line(*command: str) -> str:
    """What a program says of itself, e.g. its version."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (done.stdout or done.stderr).partition("\n")[0]


# ------------------------------------------------------------------------------------------ servers


@dataclass
class Server:
    """A running server. `close` leaves neither processes nor files."""

    name: str
    address: str
    processes: list[subprocess.Popen[Any]]
    folder: Path
    start_s: float
    settings: dict[str, str] = field(default_factory=dict)
    protocol: str = "rocketmq"
    idle: dict[str, float] = field(default_factory=dict)

    @property
    def watched(self) -> subprocess.Popen[Any]:
        """The process whose CPU time counts: the one that serves the messages."""
        return self.processes[-1]

    def memory_mb(self) -> dict[str, float]:
        """Resident memory, and the part of it that is not just mapped files."""
        fields = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.watched.pid}/status").read_text().splitlines()
            if ":" in line
        )
        return {
            "rss_mb": round(int(fields["VmRSS"].split()[0]) / 1024, 1),
            "anonymous_mb": round(int(fields["RssAnon"].split()[0]) / 1024, 1),
        }

    def close(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def spawn(
    command: Sequence[str], folder: Path, *, env: dict[str, str] | None = None, log: str = "log"
) -> subprocess.Popen[Any]:
    """A server process on the servers' core; its standard error goes to a file in its folder."""
    with (folder / log).open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={**os.environ, **(env or {})},
            preexec_fn=_become_server,
        )
    _processes.append(process)
    return process


def _become_server() -> None:
    """In the child: on the servers' core, and gone when the benchmark is killed."""
    os.sched_setaffinity(0, {CORES.server})
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def await_ready(process: subprocess.Popen[Any], folder: Path, log: str = "log") -> dict[str, str]:
    """The places named in the line `ready name=place ...`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready "):
            return dict(part.split("=", 1) for part in line.split()[1:])
    process.wait()
    said = (folder / log).read_text(errors="replace").strip().splitlines()
    raise Unavailable(said[-1] if said else f"ended with status {process.returncode}")


def new_folder() -> Path:
    """A temporary folder that is gone when the benchmark ends, however it ends."""
    folder = Path(tempfile.mkdtemp(prefix="cometmq-bench-"))
    _folders.append(folder)
    return folder


_processes: list[subprocess.Popen[Any]] = []
_folders: list[Path] = []
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


@atexit.register
def _leave_nothing() -> None:
    for process in _processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def start_comet(name: str, *, is_compiled: bool, is_sync: bool) -> Server:
    """CometMQ's name server and broker in one process, with everything on."""
    folder = new_folder()
    settings = {"flushDiskType": "SYNC_FLUSH" if is_sync else "ASYNC_FLUSH"}
    if not is_compiled:
        settings["compiledPathEnable"] = "false"
    conf = folder / "broker.conf"
    conf.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    command = [sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"]
    command += ["--store", str(folder / "store"), "--broker-conf", str(conf)]
    command += ["--log-level", "WARNING"]
    began = time.monotonic()
    process = spawn(command, folder)
    return _started(name, process, folder, began, settings)


def start_limit(name: str, *, is_sync: bool) -> Server:
    """The C server that does nothing but the work of a send and a pull."""
    folder = new_folder()
    command = [str(BUILD / "limit_server"), "--store", str(folder)]
    began = time.monotonic()
    process = spawn(command + ["--sync"] * is_sync, folder)
    return _started(name, process, folder, began, {"flush": "sync" if is_sync else "async"})


def _started(
    name: str,
    process: subprocess.Popen[Any],
    folder: Path,
    began: float,
    settings: dict[str, str],
) -> Server:
    try:
        places = await_ready(process, folder)
    except Unavailable:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    took = time.monotonic() - began
    server = Server(name, places["broker"], [process], folder, took, settings)
    server.idle = server.memory_mb()
    return server


Starter = Callable[[bool], Server]

STARTERS: dict[str, Starter] = {
    "comet": lambda is_sync: start_comet("comet", is_compiled=True, is_sync=is_sync),
    "plain": lambda is_sync: start_comet("plain", is_compiled=False, is_sync=is_sync),
    "limit": lambda is_sync: start_limit("limit", is_sync=is_sync),
}
TITLES = {
    "comet": "CometMQ, compiled path",
    "plain": "CometMQ, plain path",
    "limit": "C limit",
}


class Fleet:
    """The servers of one group of shapes, started together and measured in turn."""

    def __init__(
        self, starters: dict[str, Starter], *, is_sync: bool, missing: dict[str, str]
    ) -> None:
        self.servers: list[Server] = []
        self._starters = starters
        self._is_sync = is_sync
        self._missing = missing

    def __enter__(self) -> list[Server]:
        for name, starter in self._starters.items():
            if name in self._missing:
                continue
            try:
                self.servers.append(starter(self._is_sync))
            except Unavailable as reason:
                self._missing[name] = str(reason)
                say(f"  {TITLES.get(name, name)}: SKIPPED: {reason}")
        return self.servers

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.close()


@contextmanager
def alone(server: Server, servers: Sequence[Server]) -> Iterator[None]:
    """Stop the others while one is measured: an idle JVM's timers take the same core."""
    others = [process for one in servers if one is not server for process in one.processes]
    for process in others:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in others:
            process.send_signal(signal.SIGCONT)


def create_topics(server: Server, prefix: str, topics: int, queues: int) -> None:
    """Topics `prefix0` and so on; nothing to do where a queue is made by its first use."""
    if server.protocol != "rocketmq" or server.name == "limit":
        return
    names = [f"{prefix}{number}" for number in range(topics)]
    try:
        with Remote(server.address, timeout_ms=60_000) as remote:
            if topics <= 16 or not _create_lists(remote, names, queues):
                _create_one_by_one(remote, names, queues)
    except CometError as error:
        raise LoadFailed(f"{server.name}: creating {topics} topics: {error}") from None


def _create_one_by_one(remote: Remote, names: list[str], queues: int) -> None:
    for name in names:
        ext = {"topic": name, "readQueueNums": str(queues), "writeQueueNums": str(queues)}
        ext |= {"perm": "6", "defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG"}
        ext |= {"topicSysFlag": "0", "order": "false"}
        remote.call(UPDATE_AND_CREATE_TOPIC, ext)


def _create_lists(remote: Remote, names: list[str], queues: int) -> bool:
    for begin in range(0, len(names), TOPICS_PER_REQUEST):
        configs = [
            {"topicName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
            for name in names[begin : begin + TOPICS_PER_REQUEST]
        ]
        body = json.dumps({"topicConfigList": configs}).encode()
        try:
            remote.call(UPDATE_AND_CREATE_TOPIC_LIST, body=body)
        except CometError:
            if begin == 0:
                return False  # a server that knows only code 17
            raise
    return True


# ------------------------------------------------------------------------------------------ running


def load(server: Server, mode: str, **options: object) -> Run:
    """Run the generator once; option names as in load.c, with `_` for `-`."""
    command = [str(BUILD / "load"), "--address", server.address, "--protocol", server.protocol]
    command += ["--watch", str(server.watched.pid)]
    for name, value in options.items():
        if value is True:
            command.append("--" + name.replace("_", "-"))
        elif value is not None and value is not False:
            command += ["--" + name.replace("_", "-"), str(value)]
    done = subprocess.run(
        [*command, mode],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {CORES.generator}),
    )
    if done.returncode != 0:
        raise LoadFailed(f"{server.name}: {done.stderr.strip() or f'status {done.returncode}'}")
    run: Run = json.loads(done.stdout)
    messages = run["messages"] + run.get("consumed", {}).get("messages", 0)
    run["cpu_us"] = round(run["server_cpu_s"] / max(messages, 1) * 1e6, 3)
    run["generator_share"] = round(run["generator_cpu_s"] / max(run["seconds"], 1e-9), 3)
    return run


def fill(
    server: Server, topic: str, messages: int, *, topics: int = 1, queues: int = 4, body: int = 128
) -> None:
    """So many messages in batches, dealt out evenly over all queues."""
    create_topics(server, topic, topics, queues)
    options: dict[str, object] = {"connections": 2, "window": 2, "batch": FILL_BATCH, "body": body}
    options |= {"topic": topic, "topics": topics, "queues": queues, "seconds": FILL_TIMEOUT_S}
    for _ in range(FILL_TRIES):  # a server that was busy for a moment refuses some
        run = load(server, "send", **options, count=messages)
        messages -= run["messages"]
        if messages <= 0:
            return
    raise LoadFailed(f"{server.name}: filling {topic}: {messages} missing, {run['errors']}")


def settle() -> None:
    """Write back what the run before left dirty, so that nobody pays for his predecessor."""
    os.sync()


def problems(run: Run) -> list[str]:
    """What makes a run's figures doubtful."""
    found = []
    for where, part in (("", run), ("consumers: ", run.get("consumed", {}))):
        for code, count in part.get("errors", {}).items():
            found.append(f"{where}{count} errors of code {code}")
    for name in ("unanswered", "undelivered", "limit_reached"):
        if run.get(name):
            found.append(f"{run[name]} {name.replace('_', ' ')}")
    if "wanted_rate" not in run and run["generator_share"] > GENERATOR_IS_BUSY:
        found.append("generator-bound")
    return found


def median_run(runs: list[Run]) -> Run:
    """Median of each figure over equal runs, with the rate's range and everybody's problems."""
    found: Run = {"repeats": len(runs)}
    for key in ("rate", "cpu_us", "p50_us", "p99_us", "p999_us", "max_us", "generator_share"):
        values = [run[key] for run in runs if key in run]
        if values:
            found[key] = round(statistics.median(values), 3)
    rates = [run["rate"] for run in runs]
    found["rate_range"] = [min(rates), max(rates)]
    consumed = [run["consumed"] for run in runs if "consumed" in run]
    if consumed:
        found["consumed"] = {
            key: round(statistics.median([one[key] for one in consumed if key in one] or [0]), 3)
            for key in ("rate", "p50_us", "p99_us", "p999_us", "max_us")
        }
    wrong = sorted({problem for run in runs for problem in problems(run)})
    if wrong:
        found["problems"] = wrong
    return found


def say(text: str) -> None:
    print(text, flush=True)


# ------------------------------------------------------------------------------------------ results


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose source reads as a table too."""
    body = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(
        "-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths)
    )
    return "\n".join([line(head), rule + "|", *map(line, body)])


def result_path(kind: str) -> Path:
    """results/<utc date>-<commit>[-kind], without a suffix."""
    RESULTS.mkdir(exist_ok=True)
    stem = f"{time.strftime('%Y-%m-%d', time.gmtime())}-{commit()}"
    return RESULTS / (f"{stem}-{kind}" if kind else stem)


def write_result(path: Path, result: dict[str, Any], markdown: str) -> None:
    path.with_name(path.name + ".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_name(path.name + ".md").write_text(markdown)
    say(f"\nwritten: {RESULTS.name}/{path.name}.json and .md")


def describe(result: dict[str, Any]) -> str:
    """The head of every Markdown result: what was measured, where, with which settings."""
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [f"- {key}: {value}" for key, value in result["settings"].items()]
    for name, reason in result.get("missing", {}).items():
        lines.append(f"- {TITLES.get(name, name)}: **skipped**: {reason}")
    return f"Commit {result['commit']}, {result['at']}.\n\n" + "\n".join(lines) + "\n"


def plot_bars(
    path: Path, title: str, labels: list[str], series: dict[str, list[float | None]], unit: str
) -> None:
    """Horizontal bars, one group a shape; skipped, and said so, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        say("NO PLOT: matplotlib is missing; pip install 'cometmq[bench]' brings it")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.8 / max(len(series), 1)
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.45 * len(labels) * max(1, len(series) / 2)))
    for number, (name, values) in enumerate(series.items()):
        places = [row + number * height for row in range(len(labels))]
        bars = axes.barh(places, [value or 0 for value in values], height, label=name)
        texts = ["" if value is None else f"{value:,.0f}" for value in values]
        axes.bar_label(bars, texts, padding=2, fontsize=7)
    middle = height * (len(series) - 1) / 2
    axes.set_yticks([row + middle for row in range(len(labels))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.01)
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path.with_name(path.name + ".png"), dpi=110)
    pyplot.close(figure)
