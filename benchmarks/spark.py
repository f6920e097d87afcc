"""What the Spark connector costs: CPU per row beside Parquet and beside rows, batches, streams.

Owns: the questions of the connector's design, each with its target. One rule: CPU time is that of
the JVM and of all its Python workers; things that are compared take turns in one run, and the
median of the turns counts. The broker is a process of its own and is not counted.

A row's cost is what a row more costs: each thing is done with few rows and with many, in as many
tasks, and the difference is divided. What a query costs before its first row (a tenth of a second
or two of planning and of starting tasks, for Parquet as well) is shown beside it, and is what the
micro-batches are asked about.

    spark.py                a topic of 1,000,000 messages, three turns
    spark.py --quick        a fifth of it, one turn

Writes results/<utc date>-<commit>-spark.json and .md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Server, say

HERE = Path(__file__).resolve().parent
QUEUES = 8
BODY_BYTES = 128
FOUR = ("topic", "queue_id", "queue_offset", "body")
ELEVEN = (
    *("topic", "broker", "queue_id", "queue_offset", "keys", "tags", "body"),
    *("born_time", "store_time", "reconsume_times", "msg_id"),
)
FEW = 10  # "few" rows are a tenth
BATCH_ROWS = 400  # of a micro-batch whose fixed cost is looked for
BATCHES = 40
WARM = 2  # the first micro-batches of a query
WARM_RUNS = 5  # of a query, before any counts
QUICK_TURNS = 3  # of everything that is not a source or sink of rows
TRIES = 3
TICKS = os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------- clocks


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads, those that ended included. By the kernel's clock
    of that process: ticks of /proc are a tenth of what some of these things take."""
    return time.clock_gettime((~pid << 3) | 2)  # 2: user and system time, as the scheduler counts


def waited_s(pid: int) -> float:
    """That of its children that it has waited for."""
    text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(text[13]) + int(text[14])) / TICKS


@dataclass
class Clocks:
    """What the JVM and its workers have used up to now."""

    at: float
    jvm_s: float
    waited_s: float
    """Of the JVM's children that ended. Python's daemon does not wait for its own: the time of
    those is nobody's, so workers are compared one by one."""
    workers_s: dict[int, float]

    @classmethod
    def read(cls, jvm: int) -> Clocks:
        workers = {}
        for pid in tree(jvm)[1:]:
            with suppress(OSError):
                workers[pid] = cpu_s(pid)
        return cls(time.monotonic(), cpu_s(jvm), waited_s(jvm), workers)


@dataclass
class Spent:
    """What one run took."""

    wall_s: float
    jvm_s: float
    python_s: float

    @property
    def cpu_s(self) -> float:
        return self.jvm_s + self.python_s


@dataclass
class Bench:
    spark: Any
    server: Server
    namesrv: str
    folder: Path
    count: int
    turns: int
    jvm: int
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    made: int = 0

    def spent(self, act: Callable[[], object]) -> Spent:
        before = Clocks.read(self.jvm)
        act()
        after = Clocks.read(self.jvm)
        of_workers = sum(
            now_s - before.workers_s.get(pid, 0.0) for pid, now_s in after.workers_s.items()
        )
        return Spent(
            after.at - before.at,
            after.jvm_s - before.jvm_s,
            of_workers + after.waited_s - before.waited_s,
        )

    def in_turn(self, acts: dict[str, Callable[[], object]]) -> dict[str, list[Spent]]:
        for name, act in acts.items():
            # The JVM compiles what it runs, and goes on for several runs; of rows Python does all.
            for _ in range(1 if "rows" in name else WARM_RUNS):
                act()
        found: dict[str, list[Spent]] = {name: [] for name in acts}
        # What is quick is disturbed more easily: it goes more often.
        for turn in range(self.turns * QUICK_TURNS):
            for name, act in acts.items():
                if turn % QUICK_TURNS == 0 or "rows" not in name:
                    found[name].append(self.spent(act))
        return found

    @property
    def sizes(self) -> tuple[int, int]:
        """Few rows, and all."""
        return self.count // FEW, self.count

    def new(self, what: str) -> str:
        self.made += 1
        return f"{what}-{self.made}"

    def topic(self, queues: int = QUEUES) -> str:
        prefix = self.new("made") + "-"
        harness.create_topics(self.server, prefix, 1, queues)
        return f"{prefix}0"

    def read(
        self, topic: str, columns: Sequence[str], form: str = "rocketmq", **more: object
    ) -> Any:
        reader = self.spark.read.format(form).option("namesrv", self.namesrv)
        reader = reader.option("topic", topic).option("columns", ",".join(columns))
        for key, value in more.items():
            reader = reader.option(key, str(value))
        return reader.load()

    def stream(self, topic: str, columns: Sequence[str], most: int) -> Any:
        reader = self.spark.readStream.format("rocketmq").option("namesrv", self.namesrv)
        reader = reader.option("topic", topic).option("columns", ",".join(columns))
        reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", most)
        return reader.load()

    def run_stream(self, frame: Any, form: str, **options: str) -> list[Any]:
        """All of it, batch after batch; the progress of each that had rows."""
        for _ in range(TRIES - 1):
            with suppress(Exception):  # Spark gives a stream's Python process 10 s to start
                return self._run_stream(frame, form, options)
        return self._run_stream(frame, form, options)

    def _run_stream(self, frame: Any, form: str, options: dict[str, str]) -> list[Any]:
        writer = frame.writeStream.format(form).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(self.folder / self.new("checkpoint")))
        for key, value in options.items():
            writer = writer.option(key, value)
        query = writer.start()
        query.awaitTermination()
        return [one for one in query.recentProgress if one["numInputRows"]]

    def tell(self, what: str, found: str, target: str = "", reached: bool | None = None) -> None:
        verdict = "" if reached is None else "reached" if reached else "MISSED"
        self.rows.append([what, found, target, verdict])
        say(f"  {what:<58} {found:>12}  {target:>12}  {verdict}")


def nowhere(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


@dataclass
class Cost:
    """CPU microseconds for a row more; milliseconds before the first."""

    jvm_us: float
    python_us: float
    start_ms: float
    whole_us: float
    """Of a row of the many, its share of the start included."""
    best_rows_s: float

    @property
    def both_us(self) -> float:
        return self.jvm_us + self.python_us


def cost(few: list[Spent], many: list[Spent], rows: tuple[int, int]) -> Cost:
    def middle(runs: list[Spent], what: str) -> float:
        return float(statistics.median(getattr(one, what) for one in runs))

    def more_us(what: str) -> float:
        return (middle(many, what) - middle(few, what)) / (rows[1] - rows[0]) * 1e6

    jvm, python = more_us("jvm_s"), more_us("python_s")
    return Cost(
        jvm,
        python,
        middle(few, "cpu_s") * 1e3 - (jvm + python) * rows[0] / 1e3,
        middle(many, "cpu_s") / rows[1] * 1e6,
        max(rows[1] / one.wall_s for one in many),
    )


def show_cost(bench: Bench, what: str, found: Cost) -> None:
    bench.tell(
        f"{what}: CPU us for a row more (JVM + Python)",
        f"{found.jvm_us:.2f} + {found.python_us:.2f}",
    )
    bench.tell(f"{what}: CPU ms before the first row", f"{found.start_ms:.0f}")
    bench.figures[what] = asdict(found)


# ---------------------------------------------------------------------------------------- questions


def source(bench: Bench, few: str, many: str) -> None:
    for columns in (ELEVEN, FOUR):
        acts: dict[str, Callable[[], object]] = {}
        for name, topic in (("few", few), ("many", many)):
            lake = str(bench.folder / bench.new("lake"))
            bench.read(topic, columns).write.parquet(lake)
            acts[f"parquet {name}"] = lambda lake=lake: nowhere(bench.spark.read.parquet(lake))
            acts[f"arrow {name}"] = lambda topic=topic, columns=columns: nowhere(
                bench.read(topic, columns, minPartitions=QUEUES)
            )
            for form in ("rows", "lazy-rows"):
                acts[f"{form} {name}"] = lambda topic=topic, columns=columns, form=form: nowhere(
                    bench.read(topic, columns, f"rocketmq-{form}", minPartitions=QUEUES)
                )
        found = bench.in_turn(acts)
        costs = {
            name: cost(found[f"{name} few"], found[f"{name} many"], bench.sizes)
            for name in ("parquet", "arrow", "rows", "lazy-rows")
        }
        n = len(columns)
        show_cost(bench, f"Parquet, {n} columns", costs["parquet"])
        show_cost(bench, f"source, {n} columns", costs["arrow"])
        show_cost(bench, f"source of tuples, {n} columns", costs["rows"])
        show_cost(bench, f"source of lazy tuples, {n} columns", costs["lazy-rows"])
        ratio = costs["arrow"].both_us / costs["parquet"].both_us
        less = costs["rows"].both_us / costs["arrow"].both_us
        bench.tell(f"source / Parquet, {n} columns", f"{ratio:.2f}x", "<= 2.5x", ratio <= 2.5)
        whole = costs["arrow"].whole_us / costs["parquet"].whole_us
        bench.tell(
            f"source / Parquet, {n} columns, starts included",
            *(f"{whole:.2f}x", "<= 2.5x", whole <= 2.5),
        )
        bench.tell(f"tuples / source, {n} columns", f"{less:.1f}x", ">= 8x", less >= 8)
        lazy = costs["lazy-rows"].both_us / costs["arrow"].both_us
        bench.tell(f"lazy tuples / source, {n} columns", f"{lazy:.1f}x")
        bench.figures[f"source, {n} columns"] |= {
            "of_parquet": ratio,
            "tuples": less,
            "lazy_tuples": lazy,
        }


def sink(bench: Bench) -> None:
    def frame(rows: int) -> Any:
        return bench.spark.range(0, rows, 1, 4).selectExpr(
            f"cast(rpad(cast(id as string), {BODY_BYTES}, 'x') as binary) as body",
            "'paid' as tags",
            "concat('order-', id) as keys",
        )

    def write(form: str, rows: int) -> None:
        writer = frame(rows).write.format(form).mode("append").option("namesrv", bench.namesrv)
        writer.option("topic", bench.topic()).save()

    few, many = bench.sizes
    found = bench.in_turn(
        {
            "made few": lambda: nowhere(frame(few)),
            "made many": lambda: nowhere(frame(many)),
            "arrow few": lambda: write("rocketmq", few),
            "arrow many": lambda: write("rocketmq", many),
            "rows few": lambda: write("rocketmq-rows", few),
            "rows many": lambda: write("rocketmq-rows", many),
        }
    )
    made, arrow, rows = (
        cost(found[f"{name} few"], found[f"{name} many"], bench.sizes)
        for name in ("made", "arrow", "rows")
    )
    show_cost(bench, "rows made, and written nowhere", made)
    show_cost(bench, "sink", arrow)
    show_cost(bench, "sink of rows", rows)
    less = (rows.both_us - made.both_us) / (arrow.both_us - made.both_us)
    bench.tell("sink of rows / sink", f"{less:.1f}x", ">= 5x", less >= 5)
    whole = rows.both_us / arrow.both_us
    bench.tell("sink of rows / sink, making the rows included", f"{whole:.1f}x")
    bench.figures["sink"] |= {"rows": less, "rows_made_included": whole}


def batches(bench: Bench) -> None:
    """The time of a micro-batch that has next to nothing to do, and what of it is Spark's own: a
    Python source that makes its rows, and a Python sink that drops them."""
    prefix = bench.new("small") + "-"
    harness.fill(bench.server, prefix, BATCHES * BATCH_ROWS, queues=QUEUES, body=BODY_BYTES)
    topic = f"{prefix}0"

    def ours(form: str) -> list[Any]:
        frame = bench.stream(topic, ("body", "tags"), BATCH_ROWS)
        if form == "noop":
            return bench.run_stream(frame, form)
        return bench.run_stream(frame, form, namesrv=bench.namesrv, topic=bench.topic())

    def floor(form: str) -> list[Any]:
        reader = bench.spark.readStream.format("floor").option("batches", BATCHES)
        frame = reader.option("rows", BATCH_ROWS).load()
        return bench.run_stream(frame, "noop" if form == "noop" else "floor")

    for what, form, target in (("", "noop", 120), (" with the sink", "rocketmq", 200)):
        found: dict[str, list[list[Any]]] = {"Spark's own": [], "": []}
        cpu: dict[str, list[float]] = {"Spark's own": [], "": []}
        for turn in range(1 + bench.turns):
            for name, run in (("Spark's own", floor), ("", ours)):
                done: list[list[Any]] = []
                spent = bench.spent(lambda run=run, form=form, done=done: done.append(run(form)))
                if turn:  # the first warms up
                    found[name].append(done[0][WARM:])
                    cpu[name].append(spent.cpu_s / len(done[0]) * 1000)
        for who, runs in found.items():
            name = f"micro-batch{what}" + (f", {who}" if who else "")
            rounds = [one["durationMs"] for run in runs for one in run]
            took = sorted(one["triggerExecution"] for one in rounds)
            middle, best = statistics.median(took), took[len(took) // 10]
            if who:
                bench.tell(f"{name}, median ms", f"{middle:.0f}")
            else:
                bench.tell(f"{name}, median ms", f"{middle:.0f}", f"<= {target}", middle <= target)
            bench.tell(f"{name}, the best tenth, ms", f"{best}")
            cpu_ms = statistics.median(cpu[who])
            bench.tell(f"{name}, CPU ms (with its share of the query's start)", f"{cpu_ms:.0f}")
            parts = {
                key: statistics.median(one.get(key, 0) for one in rounds) for key in rounds[-1]
            }
            say("    " + ", ".join(f"{key} {value:.0f}" for key, value in parts.items()))
            bench.figures[name] = {"median_ms": middle, "best_ms": best, "cpu_ms": cpu_ms} | parts


def streaming(bench: Bench, topic: str) -> None:
    """Rows a second of a stream in batches of a quarter, beside one batch read of it all."""
    took: dict[str, list[float]] = {"batch": [], "stream": []}
    cpu: dict[str, list[float]] = {"batch": [], "stream": []}

    def stream() -> float:
        done = bench.run_stream(bench.stream(topic, FOUR, bench.count // 4), "noop")
        return float(sum(one["durationMs"]["triggerExecution"] for one in done)) / 1000

    stream()
    for _ in range(max(bench.turns, 2)):
        spent = bench.spent(lambda: nowhere(bench.read(topic, FOUR)))
        took["batch"].append(spent.wall_s)
        cpu["batch"].append(spent.cpu_s)
        spent = bench.spent(lambda: took["stream"].append(stream()))
        cpu["stream"].append(spent.cpu_s)
    middle = {name: statistics.median(values) for name, values in took.items()}
    ratio = middle["batch"] / middle["stream"]
    for name, seconds in middle.items():
        bench.tell(f"{name}, 4 columns, rows/s", f"{bench.count / seconds:,.0f}")
    bench.tell("stream / batch, rows/s", f"{ratio:.2f}", ">= 0.6", ratio >= 0.6)
    of_cpu = statistics.median(cpu["batch"]) / statistics.median(cpu["stream"])
    bench.tell("stream / batch, rows per CPU s", f"{of_cpu:.2f}")
    bench.figures["streaming"] = {"of_batch": ratio, "of_batch_by_cpu": of_cpu}


@contextmanager
def on_cores(root: int, cores: set[int]) -> Any:
    """All threads of a process tree on these cores; those they make later inherit it."""

    def put(where: set[int]) -> None:
        for pid in tree(root):
            with suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with suppress(OSError):
                        os.sched_setaffinity(int(thread), where)

    everywhere = os.sched_getaffinity(0)
    put(cores)
    try:
        yield
    finally:
        put(everywhere)


def growth(bench: Bench, topic: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        bench.tell("growth from 1 to 2 cores", "SKIPPED: one core")
        return
    best: dict[int, Spent] = {}
    for _ in range(max(bench.turns, 2)):
        for number in (1, 2):
            with on_cores(bench.jvm, set(cores[1::-1][:number])):
                spent = bench.spent(lambda: nowhere(bench.read(topic, FOUR)))
            if number not in best or spent.wall_s < best[number].wall_s:
                best[number] = spent
    for number, one in best.items():
        cores_got = one.cpu_s / one.wall_s
        where = f"source on {number} core{'s' * (number > 1)}"
        bench.tell(f"{where}, best rows/s", f"{bench.count / one.wall_s:,.0f}")
        bench.tell(f"{where}: of the cores it got", f"{cores_got:.2f}")
        bench.tell(f"{where}: CPU us a row", f"{one.cpu_s / bench.count * 1e6:.2f}")
        bench.figures[where] = {"rows_s": bench.count / one.wall_s, "cores_got": cores_got}
    grown = best[1].wall_s / best[2].wall_s
    bench.tell("growth from 1 to 2 cores", f"{grown:.2f}x")
    bench.figures["growth"] = grown


# ---------------------------------------------------------------------------------------------- run


def start_server() -> tuple[Server, str]:
    folder = harness.new_folder()
    command = [sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"]
    command += ["--store", str(folder / "store"), "--log-level", "WARNING"]
    began = time.monotonic()
    process = harness.spawn(command, folder)
    os.sched_setaffinity(process.pid, os.sched_getaffinity(0))
    places = harness.await_ready(process, folder)
    took = time.monotonic() - began
    return Server("comet", places["broker"], [process], folder, took), places["namesrv"]


def start_spark() -> Any:
    # Workers import the row source from here, and run the same tree as we do.
    paths = [str(HERE), *(one for one in sys.path if one.endswith("src"))]
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])
    import spark_rows

    import cometmq.spark

    spark = cometmq.spark.session(
        "cometmq-bench",
        master="local[2]",
        settings={"spark.driver.memory": "2g", "spark.local.dir": str(harness.new_folder())},
    )
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(spark_rows.RowSource)
    spark.dataSource.register(spark_rows.LazyRowSource)
    spark.dataSource.register(spark_rows.Floor)
    return spark


QUESTIONS = ("source", "sink", "batches", "streaming", "growth")


def measure(bench: Bench, chosen: Sequence[str]) -> None:
    prefixes = [bench.new(name) + "-" for name in ("few", "full")]
    for prefix, rows in zip(prefixes, bench.sizes, strict=True):
        harness.fill(bench.server, prefix, rows, queues=QUEUES, body=BODY_BYTES)
    few, full = (f"{prefix}0" for prefix in prefixes)
    questions: dict[str, Callable[[], None]] = {
        "source": lambda: source(bench, few, full),
        "sink": lambda: sink(bench),
        "batches": lambda: batches(bench),
        "streaming": lambda: streaming(bench, full),
        "growth": lambda: growth(bench, full),
    }
    for name in chosen:
        try:
            questions[name]()
        except Exception as error:  # the others have their answers all the same
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            bench.tell(f"{name}: FAILED: {reason}", "-")
            bench.figures[f"{name} failed"] = reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a fifth of it, one turn")
    parser.add_argument("--count", type=int, default=1_000_000, help="messages of the topic")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default=",".join(QUESTIONS), help="some of " + str(QUESTIONS))
    parser.add_argument("--no-result", action="store_true", help="write no file")
    arguments = parser.parse_args()
    count = arguments.count // 5 if arguments.quick else arguments.count
    turns = 1 if arguments.quick else arguments.turns
    harness.begin()
    server, namesrv = start_server()
    spark = start_spark()
    import pyspark

    jvm = spark.sparkContext._gateway.proc.pid
    bench = Bench(spark, server, namesrv, harness.new_folder(), count, turns, jvm)
    load_before = os.getloadavg()[0]
    try:
        measure(bench, arguments.only.split(","))
    finally:
        spark.stop()
        server.close()
    result: dict[str, Any] = {
        "commit": harness.commit(),
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": harness.machine() | {"pinning": "none"},
        "settings": {
            "spark": f"{pyspark.__version__}, local[2], {harness.first_line('java', '-version')}",
            "topic": f"{count:,} messages of {BODY_BYTES} B in {QUEUES} queues, a tag, a unique id",
            "turns (median)": str(turns),
            "load average before and after": f"{load_before:.1f}, {os.getloadavg()[0]:.1f}",
        },
        "figures": bench.figures,
    }
    text = harness.table(["", "found", "target", ""], bench.rows)
    markdown = f"# The Spark connector\n\n{harness.describe(result)}\n{NOTES}\n{text}\n"
    say("\n" + markdown)
    if not arguments.no_result:
        harness.write_result(harness.result_path("spark"), result, markdown)


NOTES = """\
CPU time is that of the JVM and of Python's workers, in this run; the broker's is not in it. Source
and Parquet go to Spark's `noop` sink. Wall times (ms, rows/s) depend on what else the machine did:
see the load average; ratios and CPU times are the steadier figures. A row more: many rows less few
rows, in as many tasks. Of the sinks' ratio the cost of making the rows, which is neither's, is
subtracted from both. "Spark's own" micro-batch: a Python source that makes its rows, a Python sink
that drops them. "Tuples": each record read whole by the plain codec, properties to a dict, as a
source of rows is usually written; "lazy tuples": by our client's messages, which read only what is
asked for.
"""


if __name__ == "__main__":
    main()
