"""CometMQ beside its peers: Apache RocketMQ 4.9 and 5, Redis Streams, NATS JetStream, the C limit.

Owns: how the peers are got, started and told apart. Servers run one at a time on the same one core,
take turns shape by shape, and get the same generator; the JVMs are warmed first. One rule: a peer
is run as its makers ship it, with every setting that was changed named in the result, and a peer
that can't be had is a row that says why.
Writes benchmarks/results/<utc date>-<commit>-peers.json, .md and .png.

    peers.py                                everything, JVMs warmed for 60 s
    peers.py --servers comet,limit,redis --warm 5 --seconds 1 --repeats 1

The jars of Apache RocketMQ come from Maven Central as in tests/interop; redis-server and
nats-server are Debian's packages, installed here if this is root and they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import Fleet, LoadFailed, Run, Server, Unavailable, say, spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.interop

HOST = "127.0.0.1"
TOPIC = "bench"
QUEUES = 4
PULLED_MESSAGES = 400_000
FILL_TIMEOUT_S = 600
START_TIMEOUT_S = 120
INSTALL_TIMEOUT_S = 300
NATS_READERS = 16
JVM_HEAP = "4g"
# As in RocketMQ's runbroker.sh, which has 8g of heap for a larger machine.
JVM_OPTIONS = (
    "-server",
    f"-Xms{JVM_HEAP}",
    f"-Xmx{JVM_HEAP}",
    "-XX:+UseG1GC",
    "-XX:G1HeapRegionSize=16m",
    "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30",
    "-XX:MaxDirectMemorySize=8g",
    "-XX:-UsePerfData",
)
SHAPES = ((1, 1), (1, 64), (16, 16), (64, 1))
PULL = "pull 32 16x1"
SYNC = "sync 16x16"
COLUMNS = [*(f"send {n}x{w}" for n, w in SHAPES), PULL, SYNC]


# --------------------------------------------------------------------------------- Apache RocketMQ


def start_apache(name: str, *, is_sync: bool) -> Server:
    """One Apache name server and one broker, each in a JVM; the broker's time counts."""
    from tests.interop import jvm, servers, toolchain, versions

    try:
        tools = toolchain.prepare()
    except toolchain.Unavailable as reason:
        raise Unavailable(str(reason)) from None
    folder = harness.new_folder()
    home = jvm.jvm_home(folder / "home", "WARN")
    namesrv_port, port = servers.free_port(), servers.free_broker_port()
    flags = [*servers.APACHE_FLAGS, f"-Duser.home={home}", f"-Djava.io.tmpdir={home / 'tmp'}"]
    flags += [f"-Drocketmq.home.dir={home}"]
    for package in jvm.OPENS:
        flags += ["--add-opens", f"{package}=ALL-UNNAMED"]
    flags += ["-cp", f"{home / 'conf'}:{tools.server_classpath(name)}"]
    changed = {
        "flushDiskType": "SYNC_FLUSH" if is_sync else "ASYNC_FLUSH",
        "autoCreateTopicEnable": "true",
        "transientStorePoolEnable": "false",
        "diskMaxUsedSpaceRatio": "95",
    }
    places = {
        "listenPort": str(port),
        "bindAddress": HOST,
        "brokerIP1": HOST,
        "brokerIP2": HOST,
        "namesrvAddr": f"{HOST}:{namesrv_port}",
        "storePathRootDir": str(folder / "store"),
        "storePathCommitLog": str(folder / "store" / "commitlog"),
    }
    namesrv_conf = servers.write_conf(
        folder / "namesrv.conf", {"listenPort": str(namesrv_port), "bindAddress": HOST}
    )
    broker_conf = servers.write_conf(folder / "broker.conf", changed | places)
    env = {"ROCKETMQ_HOME": str(home)}
    began = time.monotonic()
    namesrv = [tools.java, "-Xmx256m", "-XX:-UsePerfData", *flags]
    namesrv += ["org.apache.rocketmq.namesrv.NamesrvStartup", "-c", str(namesrv_conf)]
    broker = [tools.java, *JVM_OPTIONS, *flags]
    broker += ["org.apache.rocketmq.broker.BrokerStartup", "-c", str(broker_conf)]
    server = Server(name, f"{HOST}:{port}", [], folder, 0)
    try:
        for command, log in ((namesrv, "namesrv.log"), (broker, "broker.log")):
            server.processes.append(spawn(command, folder, env=env, log=log))
            _await_text(server.processes[-1], "boot success", folder / log)
    except Unavailable:
        server.close()
        raise
    server.start_s = time.monotonic() - began
    java = harness.first_line(tools.java, "-version")
    server.settings = changed | {"version": versions.APACHE_SERVERS[name], "java": java}
    server.settings["JVM"] = " ".join(JVM_OPTIONS)
    server.idle = server.memory_mb()
    return server


def _await_text(process: subprocess.Popen[Any], text: str, log: Path) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    process.wait()
    said = log.read_text(errors="replace").strip().splitlines()
    raise Unavailable(f"ended with status {process.returncode}: {said[-1] if said else ''}")


# --------------------------------------------------------------------------------- Debian packages


def need_program(program: str, package: str) -> str:
    """The path of a program; installs its Debian package where that is possible."""
    found = _find(program)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"  installing {package}")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", package]):
            try:
                subprocess.run(
                    ["apt-get", "-qq", *command],
                    env=env,
                    check=True,
                    capture_output=True,
                    timeout=INSTALL_TIMEOUT_S,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                raise Unavailable(f"apt-get {command[0]} {package}: {error}") from None
        found = _find(program)
    if found is None:
        raise Unavailable(f"{program} is not installed (Debian package {package})")
    return found


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def _await_port(server: Server, port: int) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up and server.watched.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.01)
    server.close()
    raise Unavailable(f"{server.name} does not listen")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def start_redis(*, is_sync: bool) -> Server:
    """Redis Streams with an append-only file; no snapshots beside it."""
    program = need_program("redis-server", "redis-server")
    folder, port = harness.new_folder(), _free_port()
    settings = {"appendonly": "yes", "appendfsync": "always" if is_sync else "everysec", "save": ""}
    command = [program, "--port", str(port), "--bind", HOST, "--dir", str(folder)]
    for key, value in settings.items():
        command += [f"--{key}", value]
    began = time.monotonic()
    process = spawn([*command, "--logfile", str(folder / "redis.log")], folder)
    server = Server("redis", f"{HOST}:{port}", [process], folder, 0, protocol="redis")
    _await_port(server, port)
    server.start_s = time.monotonic() - began
    server.settings = settings | {"version": harness.first_line(program, "--version")}
    server.idle = server.memory_mb()
    return server


def start_nats(*, is_sync: bool) -> Server:
    """NATS with a JetStream file store; this version can't be told to sync each message."""
    if is_sync:
        raise Unavailable("sync flush: Debian's nats-server has no setting for it")
    program = need_program("nats-server", "nats-server")
    folder, port = harness.new_folder(), _free_port()
    command = [program, "-a", HOST, "-p", str(port), "-js", "-sd", str(folder / "js")]
    began = time.monotonic()
    server = Server("nats", f"{HOST}:{port}", [spawn(command, folder)], folder, 0, protocol="nats")
    _await_port(server, port)
    server.start_s = time.monotonic() - began
    server.settings = {"version": harness.first_line(program, "--version"), "storage": "file"}
    server.idle = server.memory_mb()
    stream = {"name": "BENCH", "subjects": [f"{TOPIC}.>"], "storage": "file", "num_replicas": 1}
    ask_nats(server, "$JS.API.STREAM.CREATE.BENCH", stream | {"retention": "limits"})
    return server


def ask_nats(server: Server, subject: str, request: object, *, may_fail: bool = False) -> None:
    """One request to JetStream's API."""
    body = json.dumps(request).encode() if request is not None else b""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        lines = connection.makefile("rb")
        lines.readline()  # INFO
        connection.sendall(
            b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB _INBOX.setup 1\r\n'
            + f"PUB {subject} _INBOX.setup {len(body)}\r\n".encode()
            + body
            + b"\r\n"
        )
        while True:
            line = lines.readline()
            if line.startswith(b"PING"):
                connection.sendall(b"PONG\r\n")
            elif line.startswith(b"MSG"):
                answer = json.loads(lines.read(int(line.split()[-1])))
                if "error" in answer and not may_fail:
                    raise LoadFailed(f"nats: {subject}: {answer['error']}")
                return
            elif line.startswith(b"-ERR") or not line:
                raise LoadFailed(f"nats: {subject}: {line!r}")


def rewind_nats(server: Server) -> None:
    """Fresh pull consumers, which begin at the stream's start; the generator knows their names."""
    for number in range(NATS_READERS):
        name = f"reader{number}"
        ask_nats(server, f"$JS.API.CONSUMER.DELETE.BENCH.{name}", None, may_fail=True)
        config = {"durable_name": name, "ack_policy": "none", "deliver_policy": "all"}
        ask_nats(
            server,
            f"$JS.API.CONSUMER.DURABLE.CREATE.BENCH.{name}",
            {"stream_name": "BENCH", "config": config},
        )


# ---------------------------------------------------------------------------------------- measuring

PEERS: dict[str, Callable[[bool], Server]] = {
    "comet": harness.STARTERS["comet"],
    "plain": harness.STARTERS["plain"],
    "limit": harness.STARTERS["limit"],
    "apache-4": lambda is_sync: start_apache("apache-4", is_sync=is_sync),
    "apache-5": lambda is_sync: start_apache("apache-5", is_sync=is_sync),
    "redis": lambda is_sync: start_redis(is_sync=is_sync),
    "nats": lambda is_sync: start_nats(is_sync=is_sync),
}
harness.TITLES.update(
    {
        "apache-4": "Apache RocketMQ 4.9",
        "apache-5": "Apache RocketMQ 5",
        "redis": "Redis Streams",
        "nats": "NATS JetStream",
    }
)


class Measured:
    """The runs of all servers and shapes, and what could not be had."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, list[Run]]] = {}
        self.missing: dict[str, str] = {}
        self.servers: dict[str, dict[str, Any]] = {}

    def add(self, server: Server, shape: str, run: Run) -> None:
        self.runs.setdefault(server.name, {}).setdefault(shape, []).append(run)
        doubts = "; ".join(harness.problems(run))
        say(
            f"  {shape:<14} {server.name:<9} {run['rate']:>11,.0f}/s {run['cpu_us']:>8.2f} us CPU"
            f"  p50 {run.get('p50_us', 0):>9,.0f} us{f'  !! {doubts}' if doubts else ''}"
        )


def prepare(server: Server, arguments: argparse.Namespace, is_sync: bool) -> None:
    """The topic, with something to pull in it; and a JVM gets the time to compile its code."""
    harness.create_topics(server, TOPIC, 1, QUEUES)
    wide: dict[str, object] = {"connections": 16, "window": 16}
    if not is_sync:
        harness.load(server, "send", **wide, count=PULLED_MESSAGES, seconds=FILL_TIMEOUT_S)
    if server.name.startswith("apache"):
        say(f"  {server.name}: warming for {arguments.warm:.0f} s")
        part = arguments.warm if is_sync else arguments.warm / 3
        harness.load(server, "send", **wide, seconds=part)
        if not is_sync:
            harness.load(server, "send", connections=64, window=1, seconds=part / 2)
            harness.load(server, "send", connections=1, window=64, seconds=part / 2)
            harness.load(server, "pull", connections=16, seconds=part)


def measure(is_sync: bool, arguments: argparse.Namespace, measured: Measured) -> None:
    """One flush mode: all servers started, then measured in turn."""
    say(f"\n{'SYNC' if is_sync else 'ASYNC'} flush")
    starters = {name: PEERS[name] for name in arguments.servers if name not in measured.missing}
    missing: dict[str, str] = {}
    with Fleet(starters, is_sync=is_sync, missing=missing) as servers:
        for name, reason in missing.items():
            measured.missing[f"{name} {SYNC}" if is_sync else name] = reason
        for server in servers:
            with harness.alone(server, servers):
                prepare(server, arguments, is_sync)
            key = "sync settings" if is_sync else "settings"
            facts = measured.servers.setdefault(
                server.name, {"start_ms": round(server.start_s * 1000), **server.idle}
            )
            facts[key] = server.settings
        for _ in range(arguments.repeats):
            if is_sync:
                _measure_shape(SYNC, "send", 16, 16, servers, arguments, measured)
                continue
            for connections, window in SHAPES:
                shape = f"send {connections}x{window}"
                _measure_shape(shape, "send", connections, window, servers, arguments, measured)
            _measure_shape(PULL, "pull", 16, 1, servers, arguments, measured)


def _measure_shape(
    shape: str,
    mode: str,
    connections: int,
    window: int,
    servers: list[Server],
    arguments: argparse.Namespace,
    measured: Measured,
) -> None:
    options: dict[str, object] = {"connections": connections, "window": window}
    options |= {"seconds": arguments.seconds, "warmup": arguments.warmup}
    for server in servers:
        with harness.alone(server, servers):
            harness.settle()
            time.sleep(0.2)  # timers that fell due while it was stopped
            try:
                if mode == "pull" and server.protocol == "nats":
                    rewind_nats(server)
                    run = harness.load(server, mode, **options, drain=True)
                else:
                    run = harness.load(server, mode, **options)
            except LoadFailed as error:
                measured.missing[f"{server.name} {shape}"] = str(error)
                say(f"  {shape:<14} {server.name:<9} FAILED: {error}")
                continue
            measured.add(server, shape, run)


# --------------------------------------------------------------------------------------- the report


def report(measured: Measured, arguments: argparse.Namespace) -> None:
    medians = {
        server: {shape: harness.median_run(runs) for shape, runs in by_shape.items()}
        for server, by_shape in measured.runs.items()
    }
    result: dict[str, Any] = {
        "commit": harness.commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine(),
        "settings": {
            "seconds per run": arguments.seconds,
            "runs per shape (median)": arguments.repeats,
            "message": "128 B; RocketMQ's by JSON header V2 with UNIQ_KEY, one KEYS word, TAGS",
            "queues": f"{QUEUES}; a Redis stream each, a NATS subject each in one stream",
            "JVM": f"{' '.join(JVM_OPTIONS)}, on the one core that all servers get, "
            f"warmed for {arguments.warm:.0f} s",
            "others": "stopped (SIGSTOP) while one is measured",
        },
        "missing": measured.missing,
        "servers": measured.servers,
        "shapes": medians,
    }
    for name, facts in measured.servers.items():
        shown = [f"{key}={value}" for key, value in facts["settings"].items() if key != "JVM"]
        result["settings"][harness.TITLES[name]] = ", ".join(shown)
    markdown = "# CometMQ beside its peers\n\n" + harness.describe(result) + "\n"
    markdown += "Messages per second.\n\n"
    markdown += _table(medians, arguments, measured, lambda run: f"{run['rate']:,.0f}")
    markdown += "\n\nServer CPU microseconds per message.\n\n"
    markdown += _table(medians, arguments, measured, lambda run: f"{run['cpu_us']:.2f}")
    markdown += "\n\nLatency p50 / p99 in microseconds.\n\n"
    markdown += _table(
        medians,
        arguments,
        measured,
        lambda run: f"{run.get('p50_us', 0):,.0f} / {run.get('p99_us', 0):,.0f}",
    )
    base = "apache-4" if "apache-4" in medians else "limit"
    markdown += f"\n\nRate as a multiple of that of {harness.TITLES[base]}.\n\n"
    markdown += _ratios(medians, arguments, measured, base) + "\n\n" + _starts(measured) + "\n"
    markdown += _notes(medians)
    say("\n" + markdown)
    path = harness.result_path("peers")
    harness.write_result(path, result, markdown)
    harness.plot_bars(
        path,
        f"messages/s on one core, commit {result['commit']}",
        COLUMNS,
        {
            harness.TITLES[name]: [by_shape.get(shape, {}).get("rate") for shape in COLUMNS]
            for name, by_shape in medians.items()
        },
        "messages per second (log scale)",
    )


def _table(
    medians: dict[str, dict[str, Run]],
    arguments: argparse.Namespace,
    measured: Measured,
    cell: Callable[[Run], str],
) -> str:
    body = []
    for name in arguments.servers:
        title = harness.TITLES[name]
        if name not in medians:
            why = measured.missing.get(name, "not measured")
            body.append([f"{title}: skipped: {why}", *["-"] * len(COLUMNS)])
            continue
        cells = []
        for shape in COLUMNS:
            run = medians[name].get(shape)
            skipped = f"{name} {shape}" in measured.missing
            mark = " (!)" if run and "problems" in run else ""
            cells.append(cell(run) + mark if run else "skipped" if skipped else "-")
        body.append([title, *cells])
    return harness.table(["server", *COLUMNS], body)


def _ratios(
    medians: dict[str, dict[str, Run]],
    arguments: argparse.Namespace,
    measured: Measured,
    base: str,
) -> str:
    rates = {shape: run["rate"] for shape, run in medians.get(base, {}).items()}
    scaled = {
        name: {
            shape: {"rate": run["rate"] / rates[shape]}
            for shape, run in by_shape.items()
            if rates.get(shape)
        }
        for name, by_shape in medians.items()
    }
    return _table(scaled, arguments, measured, lambda run: f"{run['rate']:.2f}")


def _starts(measured: Measured) -> str:
    body = [
        [harness.TITLES[name], f"{facts['start_ms']:,}", f"{facts['rss_mb']:,.0f}"]
        for name, facts in measured.servers.items()
    ]
    return harness.table(["server", "start to ready, ms", "RSS then, MB"], body)


def _notes(medians: dict[str, dict[str, Run]]) -> str:
    lines = [
        f"- (!) {harness.TITLES[name]}, {shape}: {'; '.join(run['problems'])}"
        for name, by_shape in medians.items()
        for shape, run in by_shape.items()
        if "problems" in run
    ]
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [name for name in PEERS if name != "plain"]
    parser.add_argument("--seconds", type=float, default=3.0, help="per run (3)")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before each (0.5)")
    parser.add_argument("--repeats", type=int, default=3, help="runs per shape (3)")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds of load for a JVM (60)")
    parser.add_argument(
        "--servers", type=lambda text: text.split(","), default=default, help=",".join(PEERS)
    )
    parser.add_argument("--no-sync", action="store_true", help="leave the synchronous flush out")
    arguments = parser.parse_args()
    strange = set(arguments.servers) - set(PEERS)
    if strange:
        parser.error(f"--servers: {', '.join(sorted(strange))}; known: {', '.join(PEERS)}")
    harness.begin()
    say(f"commit {harness.commit()}; {harness.CORES}")
    measured = Measured()
    measure(False, arguments, measured)
    if not arguments.no_sync:
        measure(True, arguments, measured)
    report(measured, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
