"""The pipeline `mirror`: a topic copied to a wider one, or to another cluster.

Owns: that pipeline. One rule: messages of one sharding key arrive in the order in which their queue
had them: a queue's share of a batch is read and written by one task, and batches follow each other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cometmq.errors import UsageError
from cometmq.pipelines.copying import COLUMNS, Order, as_copies, check_order
from cometmq.pipelines.files import Files
from cometmq.pipelines.reaching import (
    access_options,
    other_access,
    refuse_loop,
    sink_checked,
    source_checked,
    target_queues,
    words_to_options,
)
from cometmq.pipelines.running import Outcome, Tell, run_stream, to_stderr
from cometmq.pipelines.sinks import AVAILABLE_NOW, start_to

_TARGET = "cometmq-target"

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def mirror(
    spark: SparkSession,
    *,
    namesrv: str,
    topic: str,
    to_topic: str,
    checkpoint: str,
    to_namesrv: str | None = None,
    queues: int | None = None,
    order: Order = "sharding-key",
    starting_offsets: str = "earliest",
    group: str | None = None,
    commit: bool = False,
    rows_per_batch: int = 500_000,
    fail_on_data_loss: bool = True,
    bad_records: str | None = None,
    trigger: str = AVAILABLE_NOW,
    access: str | None = None,
    to_access: str | None = None,
    source_options: list[str] | None = None,
    sink_options: list[str] | None = None,
    tell: Tell = to_stderr,
    stop: threading.Event | None = None,
) -> Outcome:
    """Copy a topic to a wider one or to another cluster, in order per sharding key, exactly once.

    Ends when all that was there at its start is copied (trigger available-now), or goes on every
    interval. `queues`: make `to_topic` with so many if it isn't there. `order` says what keeps its
    order: messages of one sharding key (those without one are spread), of one first word of keys,
    of one queue, or nothing. With `starting_offsets=group` and `group` it moves what that group has
    not consumed yet; `commit` stores the progress as the group's offsets. Exactly once into
    CometMQ, at least once with equal unique keys into Apache RocketMQ. `access`: a file with ACL
    keys and TLS settings; `to_access`: the one of the other cluster.
    """
    target = to_namesrv or namesrv
    keys = access_options(access)
    source = keys | words_to_options(source_options, "source_options")
    sink = other_access(to_access, keys, "TO", target != namesrv)
    sink |= words_to_options(sink_options, "sink_options")
    if target == namesrv:
        refuse_loop("mirror", topic, to_topic)
    check_order(order, source)
    read = source_checked(
        {
            "namesrv": namesrv,
            "topic": topic,
            "startingOffsets": starting_offsets,
            "maxOffsetsPerTrigger": str(rows_per_batch),
            "failOnDataLoss": str(fail_on_data_loss).lower(),
            "columns": ",".join(COLUMNS),
            "commitOffsetsToGroup": str(commit).lower(),
            **({"group": group} if group else {}),
            **source,
        }
    )
    write = sink_checked(
        {
            "namesrv": target,
            "topic": to_topic,
            "dropReservedProperties": "true",
            **({"badRecordsPath": bad_records} if bad_records else {}),
            **sink,
        }
    )
    files = Files(spark, checkpoint)
    _check_target(files, to_topic, target, tell)
    found = target_queues(target, sink, to_topic, queues)
    _keep_target(files, to_topic, target)
    rows = spark.readStream.format("rocketmq").options(**read).load()
    name = f"mirror-{topic}"
    writer = start_to(
        spark,
        as_copies(rows, order=order, queues=found, with_requests=True),
        format="rocketmq",
        options=write,
        checkpoint=checkpoint,
        trigger=trigger,
        name=name,
    )
    tell(f"{name}: to {to_topic} at {target}, {len(found)} queues, order {order}")
    outcome = run_stream(name, writer, tell=tell, stop=stop)
    outcome.figures["into"] = f"{to_topic} ({len(found)} queues)"
    return outcome


def _former_target(files: Files) -> str:
    return files.read(_TARGET).decode() if files.exists(_TARGET) else ""


def _check_target(files: Files, topic: str, namesrv: str, tell: Tell) -> None:
    """A checkpoint says how far one copy has come: another target would get the rest alone."""
    target, before = f"{topic} at {namesrv}", _former_target(files)
    if before and before.partition(" at ")[0] != topic:
        raise UsageError(
            f"mirror: the checkpoint {files.root} is of a copy to {before}, not to {target}: give "
            "each target a checkpoint of its own"
        )
    if before and before != target:
        tell(f"mirror: the copy was to {before} up to now: taken for the same cluster")


def _keep_target(files: Files, topic: str, namesrv: str) -> None:
    """Once it is known to be there: a name that was mistyped must not bind the checkpoint."""
    target = f"{topic} at {namesrv}"
    if _former_target(files) != target:
        files.make_folder("")
        files.write(_TARGET, target.encode())
