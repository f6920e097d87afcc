"""Every Python block of the client's pages runs, against a real broker.

The blocks of a page run in order in one namespace, with NAMESRV_ADDR set to a LocalBroker of the
page's own. Functions named test_... that a block defines are called, with the fixtures they name.
`run()` of a push consumer, which would not end, ends here once nothing more comes.

A block whose fence says ```python no-run is only compiled; its first line must be a comment that
says what it needs.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from cometmq.client import blocking, consumer
from cometmq.client.settling import Stats
from cometmq.testing.local import LocalBroker

DOCS = Path(__file__).parents[2] / "docs"
RUN = (
    "quick-start.md",
    "producing.md",
    "consuming.md",
    "pop.md",
    "guarantees.md",
    "migration.md",
    "admin.md",
    "delay.md",
    "retry-and-dead-letters.md",
    "transactions.md",
    "order.md",
    "request-reply.md",
    "trace.md",
    "filters.md",
    "ttl-and-deduplication.md",
)
COMPILED = (
    "embedded-broker.md",
    "outbox.md",
    "idempotence.md",
    "spark.md",
    "pipelines.md",
    "pipelines-analysis.md",
)
"""They need databases, are pieces of a reader's own test, or run beside the tests of Spark."""
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUIET_S = 0.25  # without anything new a consumer's run() ends
RUN_S = 10.0
PAGE_S = 40.0


class Block(NamedTuple):
    page: str
    line: int
    info: str
    text: str

    @property
    def code(self) -> types.CodeType:
        """With the page's own line numbers, so that a traceback leads there."""
        return compile("\n" * (self.line - 1) + self.text, self.page, "exec")


def blocks_of(page: str) -> list[Block]:
    text = (DOCS / page).read_text()
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1].strip(), found[2])
        for found in FENCE.finditer(text)
    ]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalBroker]:
    monkeypatch.setenv("HOME", str(tmp_path))  # a broadcasting consumer keeps its offsets there
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blocking.Consumer, "run", run_blocking)
    monkeypatch.setattr(consumer.Consumer, "run", run_async)
    with LocalBroker(store="memory") as running:
        monkeypatch.setenv("NAMESRV_ADDR", running.namesrv)
        yield running


def is_quiet(stats: Stats, seen: list[Any]) -> bool:
    """Whether it has come to something, and then to nothing more for a while."""
    now, count = time.monotonic(), stats.handled + stats.failed
    if not seen or seen[1] != count:
        seen[:] = [now, count]
    return count > 0 and now - seen[0] > QUIET_S


def run_blocking(self: blocking.Consumer) -> None:
    self.start()
    seen: list[Any] = []
    give_up = time.monotonic() + RUN_S
    while not is_quiet(self.stats, seen):
        assert time.monotonic() < give_up, f"{self!r} got nothing to handle"
        time.sleep(0.02)
    self.close()


async def run_async(self: consumer.Consumer) -> None:
    await self.start()
    seen: list[Any] = []
    async with asyncio.timeout(RUN_S):
        while not is_quiet(self.stats, seen):
            await asyncio.sleep(0.02)
    await self.close()


def call_tests(space: dict[str, Any], before: set[str], broker: LocalBroker) -> None:
    for name in sorted(space.keys() - before):
        if not name.startswith("test_") or not inspect.isfunction(space[name]):
            continue
        given: dict[str, Any] = {}
        for wanted in inspect.signature(space[name]).parameters:
            if wanted == "rocketmq":
                given[wanted] = broker
            else:
                assert wanted == "rocketmq_topic", f"{name} wants the fixture {wanted!r}"
                given[wanted] = f"{name}-{uuid4().hex[:8]}"
                broker.create_topic(given[wanted])
        result = space[name](**given)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def run_page(page: str, broker: LocalBroker, told: list[BaseException]) -> None:
    space: dict[str, Any] = {"__name__": page}
    try:
        for block in blocks_of(page):
            if not block.info:
                before = set(space)
                exec(block.code, space)
                call_tests(space, before, broker)
                broker.clear_faults()
    except BaseException as error:
        told.append(error)


@pytest.mark.parametrize("page", RUN)
def test_every_block_of_a_page_runs(page: str, broker: LocalBroker) -> None:
    assert any(not block.info for block in blocks_of(page))
    told: list[BaseException] = []
    # On a thread of its own: a block that waits for ever shall fail, not hang the run.
    thread = threading.Thread(target=run_page, args=(page, broker, told), daemon=True)
    thread.start()
    thread.join(PAGE_S)
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident or 0]
        where = [one for one in traceback.extract_stack(frame) if one.filename == page]
        pytest.fail(f"{page} still runs after {PAGE_S} s, at line {where[-1].lineno}")
    for error in told:
        raise error


@pytest.mark.parametrize("page", (*RUN, *COMPILED))
def test_every_block_is_python_and_says_why_it_is_not_run(page: str) -> None:
    blocks = blocks_of(page)
    assert blocks
    for block in blocks:
        where = f"{page}:{block.line}"
        assert block.code
        assert block.info in ("", "no-run"), f"{where}: ```python {block.info}"
        if block.info:
            reason = block.text.partition("\n")[0]
            assert reason.startswith("# needs "), f"{where}: say what it needs, in a first comment"


def test_the_blocks_of_the_embedded_broker_that_are_whole_run(broker: LocalBroker) -> None:
    whole = [one for one in blocks_of("embedded-broker.md") if "LocalBroker(" in one.text]
    assert len(whole) == 2
    for block in (*whole, blocks_of("embedded-broker.md")[1]):
        space: dict[str, Any] = {}
        exec(block.code, space)
        call_tests(space, set(), broker)


def test_anchors_between_pages_lead_somewhere() -> None:
    for page in (*RUN, *COMPILED):
        text = (DOCS / page).read_text()
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
            other = (DOCS / target).read_text() if target else text
            assert anchor in anchors(other), f"{page} links to {target}#{anchor}"


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
