"""The end of a job: its producers are forgotten by the brokers.

Owns: telling them. One rule: it is a courtesy that never fails a job: a broker that does not hear
of it remembers the job's producers until they were idle for `producerSequenceHours`.

A `df.write` has a name of its own, and partitions times queues of producers under it. When it is
committed or aborted none of them sends again, except tasks that nobody waits for any more; those
are refused from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from cometmq.client.background import background
from cometmq.client.session import Session
from cometmq.errors import CometError
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.sink_send import session_for
from cometmq.wire import headers
from cometmq.wire.codes import RequestCode

log = logging.getLogger("cometmq.spark")

PATIENCE_S = 5.0


def end_job(options: SinkOptions, job: str, topics: Iterable[str]) -> None:
    """Tell all brokers of these topics that the job sends nothing any more."""
    wanted = sorted(set(topics))
    if not wanted:
        return
    try:
        background.run(_end(options, job, wanted))
    except (CometError, TimeoutError) as error:
        reason = str(error) or f"no answer within {PATIENCE_S:g} s"
        log.info("sink_end_untold writer=%s reason=%s", job, reason)


async def _end(options: SinkOptions, job: str, topics: list[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        session = await session_for(options)
        for topic in topics:
            await _end_in(session, job, topic)


async def _end_in(session: Session, job: str, topic: str) -> None:
    route = await session.routes.need(topic)
    ext = headers.to_ext(headers.EndProducersHeader(topic, job))
    for broker in sorted(route.brokers):
        try:
            await session.call(broker, topic, RequestCode.END_PRODUCERS, ext)
        except CometError as error:  # one that is away, or Apache RocketMQ's, which knows no such
            log.info("sink_end_untold writer=%s broker=%s reason=%s", job, broker, error)
