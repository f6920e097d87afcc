"""What a busy page cache does to sends: records in mapped files against staged ones.

Two brokers with all defaults, the second with transientStorePoolEnable, are sent to in turn, first
in peace and then beside a process that keeps the page cache dirty: it writes and reads files on the
same disk, more than the kernel lets stand unwritten. Sends go by a timetable (open loop), latency
counts from when a send was due. One rule: both brokers meet the same pressure in one run, in turns.

    python benchmarks/page_cache.py --rate 20000 --seconds 4 --repeats 3
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import (
    CORES,
    Run,
    Server,
    await_ready,
    begin,
    create_topics,
    load,
    machine,
    median_run,
    new_folder,
    say,
    settle,
    spawn,
    table,
)

WAYS = {"mapped": "false", "staged": "true"}
CHUNK_BYTES = 4 << 20


def start(name: str, staged: str) -> Server:
    folder = new_folder()
    settings = {"flushDiskType": "ASYNC_FLUSH", "transientStorePoolEnable": staged}
    conf = folder / "broker.conf"
    conf.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    command = [sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"]
    command += ["--store", str(folder / "store"), "--broker-conf", str(conf)]
    began = time.monotonic()
    process = spawn([*command, "--log-level", "WARNING"], folder)
    places = await_ready(process, folder)
    return Server(name, places["broker"], [process], folder, time.monotonic() - began, settings)


def press(folder: Path, size: int) -> None:
    """For ever: write `size` bytes in files, never synced, and read them again."""
    chunk = mmap.mmap(-1, CHUNK_BYTES)
    chunk[:] = os.urandom(CHUNK_BYTES)
    while True:
        for number in range(size >> 30):
            fd = os.open(folder / f"pressure{number}", os.O_RDWR | os.O_CREAT)
            for at in range(0, 1 << 30, CHUNK_BYTES):
                os.pwrite(fd, chunk, at)
            os.close(fd)
        for number in range(size >> 30):
            with open(folder / f"pressure{number}", "rb", buffering=0) as source:
                while source.readinto(chunk):
                    pass


@contextmanager
def pressure(gib: int, warmup_s: float) -> Iterator[None]:
    if not gib:
        yield
        return
    folder = new_folder()
    command = [sys.executable, __file__, "--press", str(folder), "--gib", str(gib)]
    process = subprocess.Popen(
        command, preexec_fn=lambda: os.sched_setaffinity(0, {CORES.generator})
    )
    try:
        time.sleep(warmup_s)
        if process.poll() is not None:
            raise SystemExit("the process that fills the page cache has ended")
        yield
    finally:
        process.kill()
        process.wait()
        for path in folder.iterdir():
            path.unlink()
        settle()


def dirty_mb() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Dirty:"):
            return int(line.split()[1]) // 1024
    return 0


def ms(us: float) -> str:
    return f"{us / 1000:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=20_000, help="sends a second")
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gib", type=int, default=8, help="size of the files of the pressure")
    parser.add_argument("--press", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.press:
        press(args.press, args.gib << 30)
    begin()
    for key, value in machine().items():
        say(f"- {key}: {value}")
    servers = {way: start(way, staged) for way, staged in WAYS.items()}
    options = {"connections": args.connections, "body": args.body, "topic": "bench", "topics": 1}
    options |= {"seconds": args.seconds, "window": 65536 // args.connections}
    runs: dict[tuple[str, str], list[Run]] = {}
    try:
        for server in servers.values():
            create_topics(server, "bench", 1, 4)
        for state, gib in (("peace", 0), ("pressure", args.gib)):
            with pressure(gib, 5):
                for _ in range(args.repeats):
                    for way, server in servers.items():
                        run = load(server, "send", **options, rate=args.rate)
                        runs.setdefault((state, way), []).append(run)
                        say(
                            f"  {state} {way}: {run['rate']:.0f}/s p50 {ms(run['p50_us'])} p99 "
                            f"{ms(run['p99_us'])} p99.9 {ms(run['p999_us'])} max "
                            f"{ms(run['max_us'])} ms, {run['cpu_us']} us CPU, dirty {dirty_mb()} MB"
                            f" {run['errors'] or ''}"
                        )
        for way, server in servers.items():
            say(f"  {way}: {server.memory_mb()}")
    finally:
        for server in servers.values():
            server.close()
    rows = []
    for (state, way), found in runs.items():
        middle = median_run(found)
        worst = max(run["max_us"] for run in found)
        rows.append(
            [
                f"{state}, {way}",
                f"{middle['rate']:,.0f}",
                *(ms(middle[key]) for key in ("p50_us", "p99_us", "p999_us", "max_us")),
                ms(worst),
                f"{middle['cpu_us']:.2f}",
                "; ".join(middle.get("problems", [])) or "none",
            ]
        )
    head = ["median of runs", "sends/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms"]
    say("\n" + table([*head, "worst ms", "CPU us", "problems"], rows))


if __name__ == "__main__":
    main()
