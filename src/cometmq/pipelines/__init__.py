"""Ready-made pipelines over topics, all in PySpark: functions to import, or `cometmq pipeline run`.

Owns: the public names. One rule: importing this imports neither pyspark nor a pipeline.

    import cometmq.spark
    from cometmq.pipelines import archive

    spark = cometmq.spark.session("archive")
    archive(spark, namesrv="localhost:9876", topic="orders", lake="lake")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.pipelines.aggregating import aggregate
    from cometmq.pipelines.archiving import archive
    from cometmq.pipelines.compacting import compact
    from cometmq.pipelines.dead_letters import dlq
    from cometmq.pipelines.deduping import dedupe
    from cometmq.pipelines.mirroring import mirror
    from cometmq.pipelines.replaying import replay
    from cometmq.pipelines.running import Outcome, PipelineFailed
    from cometmq.pipelines.spec import Spec, read_spec, run_spec
    from cometmq.pipelines.tracing import trace

_HOMES = {
    "Outcome": "running",
    "PipelineFailed": "running",
    "Spec": "spec",
    "aggregate": "aggregating",
    "archive": "archiving",
    "compact": "compacting",
    "dedupe": "deduping",
    "dlq": "dead_letters",
    "mirror": "mirroring",
    "read_spec": "spec",
    "replay": "replaying",
    "run_spec": "spec",
    "trace": "tracing",
}

__all__ = [
    "Outcome",
    "PipelineFailed",
    "Spec",
    "aggregate",
    "archive",
    "compact",
    "dedupe",
    "dlq",
    "mirror",
    "read_spec",
    "replay",
    "run_spec",
    "trace",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cometmq.pipelines' has no attribute {name!r}")
    value = getattr(import_module(f"cometmq.pipelines.{home}"), name)
    globals()[name] = value
    return value
