"""Pipelines by name, for the command line: each is a function that a job may import as well.

Owns: the list, and reading `key=value` settings into a function's keywords. One rule: the signature
of the function is the only description of its settings.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

from cometmq.errors import UsageError

HOMES = {
    "archive": "archiving",
    "compact": "compacting",
    "replay": "replaying",
    "mirror": "mirroring",
    "dlq": "dead_letters",
    "trace": "tracing",
    "dedupe": "deduping",
    "aggregate": "aggregating",
}
"""Name of a pipeline to the module whose function of that name it is."""
GIVEN = ("spark", "tell", "stop")
"""Keywords that whoever runs a pipeline provides, not its user."""


def find(name: str) -> Callable[..., Any]:
    """The function of a built-in pipeline."""
    if name not in HOMES:
        near = difflib.get_close_matches(name, HOMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(
            f"no pipeline {name!r}: {hint}Built in are {', '.join(HOMES)}; a file ends in .toml"
        )
    module = import_module(f"cometmq.pipelines.{HOMES[name]}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def summary_of(function: Callable[..., Any]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def settings_of(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """(name, kind, default) of each setting; the default is empty where one must be given."""
    hints = _hints(function)
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in GIVEN:
            continue
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        rows.append((name, _kind(hints.get(name, str)), default))
    return rows


def refuse_secrets(changes: Sequence[str]) -> None:
    """Every user of a machine can read the command lines of its processes."""
    from cometmq.spark.tls import TLS_OPTIONS

    hidden = {option.name.lower() for option in TLS_OPTIONS if option.is_secret}
    for change in changes:
        key, _, value = change.partition("=")
        words = [key.rpartition(".")[2]]
        if key.strip().replace("-", "_") in ("source_options", "sink_options"):
            words = [word.partition("=")[0] for word in value.split(",")]
        for word in words:
            if word.strip().lower() in hidden:
                raise UsageError(
                    f"--set {key.strip()}: {word.strip()} does not belong on a command line, where "
                    "every user of this machine can read it: put it into a file (--set "
                    "access=FILE; in a spec file source.accessFile) or into the environment"
                )


def keywords(function: Callable[..., Any], changes: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as keywords; UsageError names the wrong one, and what is missing."""
    parameters = inspect.signature(function).parameters
    hints = _hints(function)
    known = [name for name in parameters if name not in GIVEN]
    found: dict[str, Any] = {}
    for change in changes:
        name, equals, raw = change.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"--set {change!r}: write it as key=value")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
            raise UsageError(f"{function.__name__} has no setting {name!r}{hint}")
        if not raw.strip():  # most often a variable of a script that is not set
            raise UsageError(f"--set {change!r}: {name} is empty; give a value or leave it out")
        try:
            found[name] = _read(hints[name], raw)
        except ValueError:
            raise UsageError(f"--set {change!r}: {name} must be {_kind(hints[name])}") from None
    missing = [
        name
        for name in known
        if parameters[name].default is inspect.Parameter.empty and name not in found
    ]
    if missing:
        raise UsageError(
            f"{function.__name__} needs " + ", ".join(f"--set {m}=..." for m in missing)
        )
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Of the settings alone: what else a signature names may be imported for type checkers only."""
    texts = {
        name: hint
        for name, hint in function.__annotations__.items()
        if name not in (*GIVEN, "return")
    }
    holder = type("settings", (), {"__annotations__": texts})
    return typing.get_type_hints(holder, globalns=vars(sys.modules[function.__module__]))


def _options(hint: Any) -> list[Any]:
    """The kinds that a hint allows, None apart."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for one in typing.get_args(hint) if one is not type(None)]
    return [hint]


def _kind(hint: Any) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    told = []
    for one in _options(hint):
        if typing.get_origin(one) is Literal:
            told.append(" or ".join(repr(word) for word in typing.get_args(one)))
        elif typing.get_origin(one) is not None:
            told.append("words separated by commas")
        else:
            told.append(words.get(one, getattr(one, "__name__", str(one))))
    return " or ".join(told)


def _read(hint: Any, raw: str) -> Any:
    for one in _options(hint):
        try:
            return _read_as(one, raw)
        except ValueError:
            continue
    raise ValueError(raw)


def _read_as(hint: Any, raw: str) -> Any:
    if typing.get_origin(hint) is Literal:
        if raw not in typing.get_args(hint):
            raise ValueError(raw)
        return raw
    if typing.get_origin(hint) is not None:  # list[str], Sequence[str]
        return [word.strip() for word in raw.split(",") if word.strip()]
    if hint is bool:
        if raw.lower() not in ("true", "false"):
            raise ValueError(raw)
        return raw.lower() == "true"
    if hint in (int, float):
        return hint(raw)
    return raw
