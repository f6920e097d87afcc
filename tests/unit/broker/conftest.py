"""The fixtures of the broker's tests: `bench` with defaults, `benches` for anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Bench

Benches = Callable[..., Bench]


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[Benches]:
    """Makes a Bench; on the same store as the one before, unless `folder` says otherwise."""
    made: list[Bench] = []

    def make(*, folder: str = "store", **settings: Any) -> Bench:
        bench = Bench(tmp_path / folder, **settings)
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.close()
        assert bench.broker.served.bugs == 0, "a handler raised what it should not"


@pytest.fixture
def bench(benches: Benches) -> Bench:
    return benches()
