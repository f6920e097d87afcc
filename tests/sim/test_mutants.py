"""The simulated cluster catches wrong variants of the product; see mutants.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cometmq.testing.simulate import run_seed
from cometmq.testing.swarm import draw


def _load() -> ModuleType:
    """The neighbour file; tests are imported by path and have no package."""
    name = "cometmq_sim_mutants"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("mutants.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS: Any = _load().MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Any) -> None:
    with mutant.applied():
        for seed in range(mutant.within):
            outcome = run_seed(seed, draw(seed, flush=mutant.flush, always=mutant.always))
            if outcome.problems:
                return
    pytest.fail(f"{mutant.name!r} lived through {mutant.within} seeds: a checker is missing")
