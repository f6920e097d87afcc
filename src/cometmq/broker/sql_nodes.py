"""What each operator of a SQL92 filter means: typed nodes that carry a Python closure.

Owns: RocketMQ's evaluation (rocketmq-filter's Comparison-, Logic-, Unary- and ConstantExpression).
Three-valued: True, False, or None for "unknown"; ValueError where Java throws. One rule: the kind
of every value is known when the expression is compiled (properties are text or missing), so all
decisions about conversion are made once, and a message costs only the calls.

A closure calls each part at most once, so the steps of an evaluation are bounded by the nodes.
Parts have no effects; where Java evaluates one twice (BETWEEN) that can't be told from once.
"""

from __future__ import annotations

import operator
import re
import struct
import unicodedata
from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

Properties = Mapping[str, str]
Value = bool | int | float | str | None
Run = Callable[[Properties], Value]
Truth = Callable[[Properties], bool | None]
Convert = Callable[[Value], int]


class Kind(Enum):
    """What a part yields when it yields anything."""

    NULL = "NULL"
    BOOLEAN = "a condition"
    TEXT = "text"
    INT = "an int32"
    LONG = "an int64"
    DOUBLE = "a double"


class Node(msgspec.Struct, frozen=True):
    """A part of an expression. `truth` is set on conditions, `name` on bare properties."""

    kind: Kind
    run: Run
    at: int
    depth: int = 1
    truth: Truth | None = None
    name: str | None = None
    is_constant: bool = False
    value: Value = None


class Refused(Exception):
    """The expression means nothing to RocketMQ; `at` is the index of the character."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at = at
        self.reason = reason


# ---------------------------------------------------------------------------------------- operands


def constant(kind: Kind, value: Value, at: int) -> Node:
    def run(properties: Properties) -> Value:
        return value

    def truth(properties: Properties) -> bool | None:
        assert value is None or isinstance(value, bool)
        return value

    is_condition = kind in (Kind.BOOLEAN, Kind.NULL)
    return Node(kind, run, at, truth=truth if is_condition else None, is_constant=True, value=value)


def variable(name: str, at: int) -> Node:
    def run(properties: Properties) -> Value:
        return properties.get(name)

    return Node(Kind.TEXT, run, at, name=name)


def integer(text: str, at: int) -> Node:
    """An int32 if it fits, else an int64. Its sign is not part of it: `-2147483648` is an int64."""
    digits = text.rstrip("lL")
    if len(digits) > 19 or (number := int(digits)) > _MOST_LONG:
        raise Refused(at, f"number {digits[:24]} is beyond 64 bits")
    return constant(Kind.INT if number <= _MOST_INT else Kind.LONG, number, at)


def decimal(text: str, at: int) -> Node:
    number = float(text)
    if number == 0.0:
        raise Refused(at, "a decimal number that is zero; RocketMQ refuses it, write 0")
    if number == float("inf"):
        raise Refused(at, "a decimal number beyond a double")
    return constant(Kind.DOUBLE, number, at)


# --------------------------------------------------------------------------------------- operators


def negate(part: Node, at: int) -> Node:
    """The negative of a number; of anything else (a property is text) NULL."""
    inner = part.run

    def number(properties: Properties) -> Value:
        value = inner(properties)
        return -value if isinstance(value, int | float) else None

    def nothing(properties: Properties) -> Value:
        inner(properties)  # may throw
        return None

    if part.kind in (Kind.INT, Kind.LONG, Kind.DOUBLE):
        return Node(part.kind, number, at, part.depth + 1)
    return Node(Kind.NULL, nothing, at, part.depth + 1)


def condition(part: Node) -> Truth:
    """A part as a condition. A bare property is one, but its text is never true: False or NULL."""
    if part.truth is not None:
        return part.truth
    if part.name is None:
        raise Refused(part.at, f"a condition is expected, this is {_named(part)}")
    name = part.name
    return lambda properties: None if properties.get(name) is None else False


def negation(part: Node, at: int) -> Node:
    inner = condition(part)

    def run(properties: Properties) -> bool | None:
        value = inner(properties)
        return None if value is None else not value

    return _truth(run, at, part)


def conjunction(parts: list[Node]) -> Node:
    return _chain(parts, deciding=False)


def disjunction(parts: list[Node]) -> Node:
    return _chain(parts, deciding=True)


def _chain(parts: list[Node], *, deciding: bool) -> Node:
    """AND ends at the first False, OR at the first True; NULL is remembered. Left to right."""
    conditions = tuple(condition(part) for part in parts)
    otherwise = not deciding
    if len(conditions) == 2:
        first, second = conditions

        def pair(properties: Properties) -> bool | None:
            one = first(properties)
            if one is deciding:
                return deciding
            two = second(properties)
            if two is deciding:
                return deciding
            return None if one is None or two is None else otherwise

        return _truth(pair, parts[0].at, *parts)

    def run(properties: Properties) -> bool | None:
        result: bool | None = otherwise
        for one in conditions:
            value = one(properties)
            if value is deciding:
                return deciding
            if value is None:
                result = None
        return result

    return _truth(run, parts[0].at, *parts)


def is_null(part: Node, *, is_not: bool) -> Node:
    inner = part.run

    def run(properties: Properties) -> bool | None:
        return (inner(properties) is None) is not is_not

    return _truth(run, part.at, part)


def equal(left: Node, right: Node, *, is_not: bool) -> Node:
    """`=` and `<>`. Missing: on the left NULL, on the right not equal, on both sides equal."""
    for part in (left, right):
        if part.is_constant and part.kind is Kind.NULL:
            raise Refused(part.at, "NULL can't be compared; write IS NULL")
    if left.is_constant and right.is_constant and left.kind is Kind.BOOLEAN:
        if right.kind is not Kind.BOOLEAN:
            raise Refused(right.at, f"{_named(left)} can't be compared with {_named(right)}")
    left_run, right_run = left.run, right.run
    same = _same(left.kind, right.kind)
    name, constant_text = left.name, right.value
    if name is not None and right.is_constant and right.kind is Kind.TEXT:

        def compare(properties: Properties) -> bool | None:
            mine = properties.get(name)
            return None if mine is None else (mine == constant_text) is not is_not

        return _truth(compare, left.at, left, right)

    def run(properties: Properties) -> bool | None:
        mine, other = left_run(properties), right_run(properties)
        if mine is None:
            return None if other is not None else not is_not
        if other is None:
            return is_not
        return same(mine, other) is not is_not

    return _truth(run, left.at, left, right)


def order(sign: str, left: Node, right: Node) -> Node:
    """`>` `>=` `<` `<=`: numbers only; two properties are compared as doubles."""
    test = _ordering(sign, left, right)
    left_run, right_run = left.run, right.run
    name, limit = left.name, right.value
    if name is not None and right.is_constant and right.kind is Kind.DOUBLE:
        assert isinstance(limit, float) and limit != 0.0, limit
        is_plain, compare = _PLAIN.fullmatch, _FLOAT_SIGNS[sign]

        def common(properties: Properties) -> bool | None:
            """Double.compare differs from ours only for NaN and for two zeros."""
            value = properties.get(name)
            if value is None:
                return None
            return compare(float(value), limit) if is_plain(value) else test(value, limit)

        return _truth(common, left.at, left, right)

    def run(properties: Properties) -> bool | None:
        value = left_run(properties)
        return None if value is None else test(value, right_run(properties))

    return _truth(run, left.at, left, right)


def between(part: Node, low: Node, high: Node, *, is_not: bool) -> Node:
    """`part >= low AND part <= high`, or for NOT `part < low OR part > high`."""
    first = _ordering("<" if is_not else ">=", part, low)
    second = _ordering(">" if is_not else "<=", part, high)
    if low.is_constant and high.is_constant and not is_not:
        to_low, to_high = _CONVERT[low.kind, high.kind]
        if to_low(low.value) > to_high(high.value):
            raise Refused(low.at, f"BETWEEN {low.value} AND {high.value}: the first is greater")
    run_part, run_low, run_high = part.run, low.run, high.run

    def run(properties: Properties) -> bool | None:
        value = run_part(properties)
        if value is None:
            return None
        one = first(value, run_low(properties))
        if one is is_not:  # True ends NOT BETWEEN, False ends BETWEEN
            return is_not
        two = second(value, run_high(properties))
        return two if one is not None or two is is_not else None

    return _truth(run, part.at, part, low, high)


def within(part: Node, texts: list[str], *, is_not: bool) -> Node:
    name = part.name
    if name is None:
        raise Refused(part.at, f"IN needs a property before it, this is {_named(part)}")
    wanted = frozenset(texts)

    def run(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else (value in wanted) is not is_not

    return _truth(run, part.at, part)


_HOLDS: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def holds(verb: str, part: Node, text: str, *, is_not: bool) -> Node:
    """CONTAINS and its kin: False, also in their NOT form, for what is missing or not text."""
    inner, test = part.run, _HOLDS[verb]

    def run(properties: Properties) -> bool | None:
        if not text:
            return False
        value = inner(properties)
        return isinstance(value, str) and test(value, text) is not is_not

    return _truth(run, part.at, part)


def _truth(run: Truth, at: int, *parts: Node) -> Node:
    return Node(Kind.BOOLEAN, run, at, max(part.depth for part in parts) + 1, truth=run)


def _named(part: Node) -> str:
    if part.name is not None:
        return f"property {part.name}"
    return f"the constant {part.value!r}" if part.is_constant else part.kind.value


# -------------------------------------------------------------------------------------- comparison

_FLOAT_SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_PLAIN = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")  # a number to Java and to Python alike
_SIGNS: dict[str, Callable[[int, int], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def _ordering(sign: str, left: Node, right: Node) -> Callable[[Value, Value], bool | None]:
    """Compares a value that is there with one that may be missing."""
    for part in (left, right):
        is_number = part.kind in (Kind.INT, Kind.LONG, Kind.DOUBLE)
        if part.truth is not None or (part.is_constant and not is_number):
            raise Refused(part.at, f"only numbers can be compared by {sign}, not {_named(part)}")
    test = _SIGNS[sign]
    if Kind.NULL in (left.kind, right.kind):
        return lambda mine, other: None
    to_left, to_right = _CONVERT[left.kind, right.kind]

    def run(mine: Value, other: Value) -> bool | None:
        return None if other is None else test(to_left(mine), to_right(other))

    return run


def _same(left: Kind, right: Kind) -> Callable[[Value, Value], bool]:
    """Equality of two values that are there."""
    if left is right is Kind.TEXT or Kind.NULL in (left, right):
        return lambda mine, other: mine == other
    if left is Kind.BOOLEAN and right is Kind.TEXT:
        return _cast_fails
    both = _CONVERT.get((left, right))
    if both is None:
        return lambda mine, other: False
    to_left, to_right = both
    return lambda mine, other: to_left(mine) == to_right(other)


def _cast_fails(mine: Value, other: Value) -> bool:
    """Java casts the wrong side here: `TRUE = a` throws for every text, `a = TRUE` does not."""
    raise ValueError("a Boolean is no String")


def _int32(value: Value) -> int:
    return _whole(value, _MOST_INT)


def _int64(value: Value) -> int:
    return _whole(value, _MOST_LONG)


_MOST_INT = 2**31 - 1
_MOST_LONG = 2**63 - 1


def _whole(value: Value, most: int) -> int:
    """Integer.valueOf: a sign and decimal digits (of any script in Java's 16 bits), no blanks."""
    assert isinstance(value, str)
    if len(value) < 10 and value.isascii() and value.isdigit():
        return int(value)
    digits = value[1:] if value[:1] in ("+", "-") else value
    if not digits.isascii():
        if any(digit > "\uffff" for digit in digits):
            raise ValueError(value)
        digits = "".join(str(unicodedata.decimal(digit)) for digit in digits)
    if not digits.isdigit():
        raise ValueError(value)
    digits = digits.lstrip("0")
    if len(digits) > 19:
        raise ValueError(value)
    number = int(digits or "0")
    if value[0] == "-":
        number = -number
    if not -most - 1 <= number <= most:
        raise ValueError(value)
    return number


_DECIMAL = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?")
_HEXADECIMAL = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
)
_SPECIAL = {"NaN": "nan", "Infinity": "inf"}
_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # what String.trim takes away


def _double(value: Value) -> int:
    """Double.valueOf, then a number that orders as Double.compare does."""
    assert isinstance(value, str)
    text = value.strip(_JAVA_BLANKS)
    if found := _DECIMAL.fullmatch(text):
        return _rank(float(found[1]))
    if found := _HEXADECIMAL.fullmatch(text):
        try:
            return _rank(float.fromhex(found[1]))
        except OverflowError:
            return _rank(float("-inf" if text[0] == "-" else "inf"))
    sign = text[:1] if text[:1] in ("+", "-") else ""
    special = _SPECIAL.get(text.removeprefix(sign))
    if special is None:
        raise ValueError(value)
    return _rank(float(sign + special))


_DOUBLE = struct.Struct(">d")
_BITS = struct.Struct(">q")


def _rank(value: Value) -> int:
    """-inf < ... < -0.0 < 0.0 < ... < inf < NaN, each equal to itself: Double.compare."""
    assert isinstance(value, int | float)
    number = float(value)
    (bits,) = _BITS.unpack(_DOUBLE.pack(number))
    assert isinstance(bits, int)
    if number != number:
        return _MOST_LONG  # Java has one NaN
    return bits if bits >= 0 else bits ^ _MOST_LONG


def _plain(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _boolean(value: Value) -> int:
    """Boolean.valueOf."""
    assert isinstance(value, str)
    return value.lower() == "true"


_CONVERT: dict[tuple[Kind, Kind], tuple[Convert, Convert]] = {
    (Kind.INT, Kind.INT): (_plain, _plain),
    (Kind.INT, Kind.LONG): (_plain, _plain),
    (Kind.INT, Kind.DOUBLE): (_rank, _rank),
    (Kind.INT, Kind.TEXT): (_plain, _int32),
    (Kind.LONG, Kind.INT): (_plain, _plain),
    (Kind.LONG, Kind.LONG): (_plain, _plain),
    (Kind.LONG, Kind.DOUBLE): (_rank, _rank),
    (Kind.LONG, Kind.TEXT): (_plain, _int64),
    (Kind.DOUBLE, Kind.INT): (_rank, _rank),
    (Kind.DOUBLE, Kind.LONG): (_rank, _rank),
    (Kind.DOUBLE, Kind.DOUBLE): (_rank, _rank),
    (Kind.DOUBLE, Kind.TEXT): (_rank, _double),
    (Kind.TEXT, Kind.INT): (_int32, _plain),
    (Kind.TEXT, Kind.LONG): (_int64, _plain),
    (Kind.TEXT, Kind.DOUBLE): (_double, _rank),
    (Kind.TEXT, Kind.TEXT): (_double, _double),
    (Kind.TEXT, Kind.BOOLEAN): (_boolean, _plain),
    (Kind.BOOLEAN, Kind.BOOLEAN): (_plain, _plain),
}
"""Left and right kind -> how each becomes a number that orders as Java compares the two. Kinds that
are not here differ whatever their values."""
