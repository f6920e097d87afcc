"""Errors stay whole on their way to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import cometmq
from cometmq.errors import CometError, NoRoute, RequestRefused, SendFailed

EXAMPLES: dict[str, Any] = {
    "attempts": ["broker-a: timeout"],
    "begin": 3,
    "code": 17,
    "done": {"broker-a": "yes"},
    "end": 7,
    "ext": {"a": "b"},
    "failed": {"broker-b": RequestRefused(1, "no", {"c": "d"})},
    "is_maybe_stored": True,
    "known": ["one", "two"],
}
"""Arguments of constructors by name; a text for all others."""


def all_kinds() -> list[type[CometError]]:
    """Every error class of the package; modules that need what is not installed have none."""
    for module in pkgutil.walk_packages(cometmq.__path__, "cometmq."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue
    found: list[type[CometError]] = []
    waiting = [CometError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return sorted(
        (kind for kind in found if kind.__module__.startswith("cometmq.")),
        key=lambda kind: (kind.__module__, kind.__qualname__),
    )


def example(kind: type[CometError]) -> CometError:
    if kind.__init__ is Exception.__init__ or kind.__init__ is ValueError.__init__:
        return kind("what is wrong")
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, one in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        value = EXAMPLES.get(name, f"the {name}")
        if one.kind is one.KEYWORD_ONLY:
            keywords[name] = value
        elif one.kind is one.POSITIONAL_OR_KEYWORD:
            arguments.append(value)
        else:
            arguments.append("what is wrong")
            break
    return kind(*arguments, **keywords)


def seen(error: BaseException) -> object:
    """All that a reader of an error has; errors in its fields likewise."""
    fields = {
        name: {
            key: seen(one) if isinstance(one, BaseException) else one for key, one in each.items()
        }
        if isinstance(each, dict)
        else each
        for name, each in error.__dict__.items()
    }
    return type(error), str(error), error.args, fields


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_an_error_survives_pickling(kind: type[CometError], protocol: int) -> None:
    error = example(kind)
    error.add_note("of a worker")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert seen(again) == seen(error)
    assert seen(copy.copy(error)) == seen(error)


def test_the_fields_are_there_by_name() -> None:
    failed = SendFailed("not sent", ["a: refused"], code=2, is_maybe_stored=True)
    again = pickle.loads(pickle.dumps(failed))
    assert (again.attempts, again.code, again.is_maybe_stored) == (["a: refused"], 2, True)
    route = pickle.loads(pickle.dumps(NoRoute("orders", "it does not exist")))
    assert (route.topic, route.reason) == ("orders", "it does not exist")
