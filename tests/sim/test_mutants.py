"""The simulated cluster catches wrong variants of the product; see mutants.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cometmq.testing import Outcome, draw, run_seed


def _load(stem: str) -> ModuleType:
    """A neighbour file; tests are imported by path and have no package."""
    name = f"cometmq_sim_{stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS: Any = tuple(
    mutant for stem in ("mutants", "kind_mutants", "once_mutants") for mutant in _load(stem).MUTANTS
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Any) -> None:
    with mutant.applied():
        first = getattr(mutant, "first", 0)
        for seed in range(first, first + mutant.within):
            problems = _play(mutant, seed).problems
            if problems:
                assert "mutants.py" not in problems[0], f"the mutant is broken: {problems[0]}"
                break
        else:
            pytest.fail(f"{mutant.name!r} lived {mutant.within} seeds: a checker is missing")
    # And it was the mutant: the real product passes the same seed.
    assert not _play(mutant, seed).problems


def _play(mutant: Any, seed: int) -> Outcome:
    kinds = getattr(mutant, "kinds", ())
    return run_seed(seed, draw(seed, flush=mutant.flush, always=mutant.always, kinds=kinds))
