"""Options of the Spark connector: one table for the source, one parser for every table.

Owns: how an option is written, checked and explained. One rule: nothing is guessed: an option that
is unknown, missing, malformed or contradicts another is an error that names it, says what would be
right, and never shows a secret.

    parsed = parse(SOURCE, {"namesrv": "localhost:9876", "TOPIC": "orders"})
    parsed["topic"]                 # by the name in the table, however the user spelt it

The sink has its own table (sink_options.py), read by the same `parse`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cometmq.errors import UsageError

Read = Callable[[str], Any]
"""Text to value; ValueError says what would be right."""


@dataclass(frozen=True)
class Option:
    """One option: its name as documented, how its text is read, and what it is for."""

    name: str
    read: Read
    default: Any = None
    help: str = ""
    is_required: bool = False
    is_secret: bool = False


def parse(
    table: Sequence[Option],
    options: Mapping[str, str],
    *,
    what: str = "the rocketmq source",
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Values by option name, defaults filled in; UsageError names what is wrong.

    `elsewhere`: names (in lower case) that belong to another use, with what to say about them.
    """
    by_name = {option.name.lower(): option for option in table}
    found: dict[str, Any] = {}
    for key, text in options.items():
        option = by_name.get(key.lower())
        if option is None:
            raise UsageError(_unknown(key, table, what, elsewhere or {}))
        if option.name in found:
            raise UsageError(f"option {option.name!r} of {what} is given twice")
        found[option.name] = _read(option, str(text), what)
    for option in table:
        if option.name not in found:
            if option.is_required:
                raise UsageError(f"{what} needs the option {option.name!r}: {option.help}")
            found[option.name] = option.default
    return found


def _read(option: Option, text: str, what: str) -> Any:
    try:
        return option.read(text)
    except ValueError as error:
        shown = "..." if option.is_secret else repr(text if len(text) < 200 else text[:200] + "...")
        raise UsageError(f"option {option.name!r} of {what} is {shown}: {error}") from None


def _unknown(key: str, table: Sequence[Option], what: str, elsewhere: Mapping[str, str]) -> str:
    if key.lower() in elsewhere:
        return f"option {key!r} is not for {what}: {elsewhere[key.lower()]}"
    names = {option.name.lower(): option.name for option in table}
    near = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6)
    if near:
        return f"unknown option {key!r} of {what}; did you mean {names[near[0]]!r}?"
    return f"unknown option {key!r} of {what}; known: {', '.join(sorted(names.values()))}"


def shown(table: Sequence[Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """What may be printed: without defaults, secrets replaced."""
    return {
        option.name: "..." if option.is_secret else values[option.name]
        for option in table
        if values.get(option.name) != option.default
    }


# ------------------------------------------------------------------------------- kinds of values


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def secret(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def boolean(value: str) -> bool:
    word = value.strip().lower()
    if word not in ("true", "false"):
        raise ValueError("must be true or false")
    return word == "true"


def one_of(*words: str) -> Read:
    """One of these words, in any case; the value is the word as it stands here."""
    by_lower = {word.lower(): word for word in words}

    def read(value: str) -> str:
        found = by_lower.get(value.strip().lower())
        if found is None:
            raise ValueError(f"must be one of {', '.join(words)}")
        return found

    return read


def integer(least: int, most: int) -> Read:
    def read(value: str) -> int:
        try:
            number = int(value.strip())
        except ValueError:
            raise ValueError(f"must be a whole number from {least} to {most}") from None
        if not least <= number <= most:
            raise ValueError(f"must be from {least} to {most}")
        return number

    return read


_BYTES = re.compile(r"(\d+)\s*(b|k|kb|kib|m|mb|mib|g|gb|gib)?", re.IGNORECASE)
_BYTE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SPAN = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_SPAN_UNITS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000}


def size_bytes(value: str) -> int:
    """`1048576`, `64k`, `16MB`, `1g`: units are powers of 1024, as in Spark's own settings."""
    found = _BYTES.fullmatch(value.strip())
    if found is None or int(found[1]) < 1:
        raise ValueError("must be a size such as 1048576, 512k, 16m or 1g")
    unit = (found[2] or "").lower()
    return int(found[1]) * _BYTE_UNITS[unit[:1]]


def span_ms(value: str) -> int:
    """`500ms`, `30s`, `15m`, `1h`, `1d`; a bare number is milliseconds."""
    found = _SPAN.fullmatch(value.strip())
    if found is None:
        raise ValueError("must be a time span such as 500ms, 30s, 15m or 1h")
    unit = (found[2] or "").lower()
    return int(found[1]) * (86_400_000 if unit == "d" else _SPAN_UNITS[unit])


def timeout_ms(value: str) -> int:
    """A span that leaves time for an answer."""
    found = span_ms(value)
    if not found:
        raise ValueError("must be more than nothing, such as 500ms or 30s")
    return found
