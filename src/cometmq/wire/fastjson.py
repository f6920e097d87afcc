"""JSON as RocketMQ's peers really write it: a tolerant reader and a compact writer.

Reader: standard JSON goes through msgspec; what that refuses is read by hand: bare scalar keys
`{0:"a"}`, objects as keys `{{"queueId":0}:5}`, single quotes, trailing commas. Either way
`{"$ref":"$.a"}` is replaced by what it points at.
Writer: no white space (a Go client cuts bodies at commas by hand), scalar keys quoted unless the
asker is old, object keys bare. One rule: any bytes give a value that can be written again or a
BodyError, nothing else, in time and memory that grow no faster than the bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from cometmq.errors import BodyError

MAX_DEPTH = 64  # deeper nesting is refused; RocketMQ's own bodies stay below 8
MAX_REF_VALUES = 200_000  # what all references of a body may expand to; real ones stay below 1000
MAX_DIGITS = 400  # of an integer; Python's own limit of 4300 raises another error


class ObjectKey(dict[str, Any]):
    """A JSON object that stood as the key of a map; hashable by its items, in any order."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset((str(k), repr(v)) for k, v in self.items()))


def loads(raw: bytes | bytearray | memoryview) -> Any:
    """Bytes to plain Python values; BodyError names the position of what can't be read."""
    if not isinstance(raw, bytes):
        raw = bytes(raw)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _read_by_hand(raw)
    else:
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(value):
            raise BodyError(f"JSON nested deeper than {MAX_DEPTH}")
    return _References(value).resolve(value, 0, False) if b"$ref" in raw else value


def _read_by_hand(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BodyError(f"body is not UTF-8 at byte {error.start}") from None
    reader = _Reader(text)
    value = reader.value(0)
    reader.skip()
    if reader.at != len(text):
        raise BodyError(f"unexpected text after JSON at character {reader.at}")
    return value


def _is_too_deep(value: Any) -> bool:
    """Walk level by level: no recursion, whatever the depth is."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?[LlDdFf]?")
_BARE = re.compile(r"[A-Za-z0-9_$.+-]+")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_WORDS = {"true": True, "false": False, "null": None}
_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
"""What stands in a string up to its end or the next escape, by the string's quote."""


class _Reader:
    """Recursive descent over text; every step either moves forward or raises BodyError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, what: str) -> BodyError:
        return BodyError(f"bad JSON at character {self.at}: expected {what}")

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BodyError(f"JSON nested deeper than {MAX_DEPTH}")
        head = self.peek()
        if head == "{":
            return self.object(depth)
        if head == "[":
            return self.array(depth)
        if head in ('"', "'") and head:
            return self.string()
        return self.scalar()

    def scalar(self) -> Any:
        match = _NUMBER.match(self.text, self.at)
        if match:
            self.at = match.end()
            digits = match.group().rstrip("LlDdFf")
            if match.group(1) or match.group(2):
                number = float(digits)
                if math.isinf(number):
                    raise BodyError("number beyond what a double can hold")
                return number
            if len(digits) > MAX_DIGITS:
                raise BodyError(f"number of more than {MAX_DIGITS} digits")
            return int(digits)
        word = _BARE.match(self.text, self.at)
        if word and word.group() in _WORDS:
            self.at = word.end()
            return _WORDS[word.group()]
        raise self.fail("a value")

    def string(self) -> str:
        quote = self.text[self.at]
        plain = _PLAIN[quote]
        self.at += 1
        parts: list[str] = []
        while True:
            match = plain.match(self.text, self.at)
            assert match is not None
            parts.append(match.group())
            self.at = match.end()
            mark = self.text[self.at : self.at + 1]
            self.at += 1
            if mark == quote:
                break
            if not mark:
                raise self.fail(f"a closing {quote}")
            parts.append(self.escape())
        text = "".join(parts)
        if _SURROGATE.search(text):  # join escaped pairs; a lone half becomes "?", as in Java
            units = text.encode("utf-16-be", "surrogatepass")
            text = _SURROGATE.sub("?", units.decode("utf-16-be", "surrogatepass"))
        return text

    def escape(self) -> str:
        mark = self.text[self.at : self.at + 1]
        self.at += 1
        if mark == "u":
            digits = self.text[self.at : self.at + 4]
            if not _HEX4.fullmatch(digits):
                raise self.fail("four hex digits")
            self.at += 4
            return chr(int(digits, 16))
        if not mark:
            raise self.fail("an escape")
        return _ESCAPES.get(mark, mark)

    def array(self, depth: int) -> list[Any]:
        self.at += 1
        found: list[Any] = []
        while True:
            head = self.peek()
            if head == "]":
                self.at += 1
                return found
            if head == ",":
                self.at += 1
                continue
            found.append(self.value(depth + 1))
            if self.peek() not in (",", "]"):
                raise self.fail("',' or ']'")

    def object(self, depth: int) -> dict[Any, Any]:
        self.at += 1
        found: dict[Any, Any] = {}
        while True:
            head = self.peek()
            if head == "}":
                self.at += 1
                return found
            if head == ",":
                self.at += 1
                continue
            key = self.key(head, depth)
            if self.peek() != ":":
                raise self.fail("':'")
            self.at += 1
            found[key] = self.value(depth + 1)
            if self.peek() not in (",", "}"):
                raise self.fail("',' or '}'")

    def key(self, head: str, depth: int) -> Any:
        if head == "{":
            return ObjectKey(self.value(depth + 1))
        if head in ('"', "'") and head:
            return self.string()
        bare = _BARE.match(self.text, self.at)
        if not bare:
            raise self.fail("a key")
        self.at = bare.end()
        return bare.group()


_STEP = re.compile(r"\.((?:\\.|[^.\[\]\\])+)|\[([0-9]{1,9})\]")
_ESCAPED = re.compile(r"\\(.)")


class _References:
    """Puts a copy of what `{"$ref":"$.a.b[0]"}` points at in its place.

    What can't be found, or holds the reference itself, stays as it is. The copies are counted: a
    few references to references would otherwise grow without bound.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.left = MAX_REF_VALUES
        self.open: set[int] = set()

    def resolve(self, value: Any, depth: int, is_copy: bool) -> Any:
        if is_copy:
            self.left -= 1
            if self.left < 0:
                raise BodyError(f"references that expand to more than {MAX_REF_VALUES} values")
        if depth > MAX_DEPTH:
            raise BodyError(f"JSON with its references nested deeper than {MAX_DEPTH}")
        if not isinstance(value, (list, dict)):
            return value
        self.open.add(id(value))
        found: Any = None
        if isinstance(value, dict) and len(value) == 1:
            found = self.find(value.get("$ref"))
        if found is not None and id(found) not in self.open:
            found = self.resolve(found, depth + 1, True)
        elif isinstance(value, list):
            found = [self.resolve(item, depth + 1, is_copy) for item in value]
        else:
            found = {
                self.key(key, depth, is_copy): self.resolve(item, depth + 1, is_copy)
                for key, item in value.items()
            }
        self.open.discard(id(value))
        return found

    def key(self, key: Any, depth: int, is_copy: bool) -> Any:
        if not isinstance(key, ObjectKey):
            return key
        found = self.resolve(dict(key), depth + 1, is_copy)
        return ObjectKey(found) if isinstance(found, dict) else key

    def find(self, path: Any) -> Any:
        """The object or array at a path; None if there is none."""
        if not isinstance(path, str) or not path.startswith("$"):
            return None
        target, at = self.root, 1
        while at < len(path):
            step = _STEP.match(path, at)
            if step is None:
                return None
            at = step.end()
            name, index = step.groups()
            try:
                if isinstance(target, list):
                    target = target[int(index)]
                else:  # the keys of an Integer map are written as indexes
                    target = target[index or _ESCAPED.sub(r"\1", name)]
            except (KeyError, IndexError, TypeError):
                return None
        return target if isinstance(target, (list, dict)) else None


def dumps(value: Any, *, bare_int_keys: bool = False, standard: bool = False) -> bytes:
    """Compact JSON. `bare_int_keys` for peers before 4.9.4; `standard` escapes as they ask for.

    Keys of maps may be str, int, or ObjectKey (bare, which every fastjson reads; in standard mode
    a string of JSON). Standard: ASCII only, `/` escaped, integers beyond 53 bits as strings.
    """
    parts: list[bytes] = []
    _write(value, parts, bare_int_keys and not standard, _standard if standard else _encode)
    return b"".join(parts)


_encode = msgspec.json.encode
_EXACT_INTEGERS = 2**53  # what a double holds; beyond it readers in JavaScript would round


def _standard(value: Any) -> bytes:
    if isinstance(value, str):
        return json.dumps(value).replace("/", "\\/").encode("ascii")
    if isinstance(value, int) and not -_EXACT_INTEGERS < value < _EXACT_INTEGERS:
        return b'"%d"' % value
    return _encode(value)


def _write(value: Any, parts: list[bytes], bare: bool, encode: Callable[[Any], bytes]) -> None:
    if isinstance(value, dict):
        comma = b"{"
        for key, item in value.items():
            parts.append(comma)
            if isinstance(key, str):
                parts.append(encode(key))
            elif isinstance(key, ObjectKey):
                _write_object_key(key, parts, bare, encode)
            else:
                parts.append(b"%d" % key if bare else b'"%d"' % key)
            parts.append(b":")
            _write(item, parts, bare, encode)
            comma = b","
        parts.append(b"}" if value else b"{}")
    elif isinstance(value, (list, tuple)):
        comma = b"["
        for item in value:
            parts.append(comma)
            _write(item, parts, bare, encode)
            comma = b","
        parts.append(b"]" if value else b"[]")
    else:
        parts.append(encode(value))


def _write_object_key(
    key: ObjectKey, parts: list[bytes], bare: bool, encode: Callable[[Any], bytes]
) -> None:
    if encode is _standard:
        inner: list[bytes] = []
        _write(dict(key), inner, bare, encode)
        parts.append(encode(b"".join(inner).decode("ascii")))
    else:
        _write(dict(key), parts, bare, encode)
