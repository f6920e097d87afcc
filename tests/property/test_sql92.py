"""SQL92 filters against a tiny evaluator written a second time, the other way round.

The compiler decides everything by kinds beforehand; this reference walks a tree and looks at the
values it meets, tagged with their Java class, as RocketMQ's interpreter does. Random trees are
written out as text with random blanks, case and parentheses, so the parser is checked as well.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from cometmq.broker.sql92 import compile_sql
from cometmq.wire import properties

Tree = tuple[Any, ...]

NAMES = ("a", "b", "C", "TAGS", "$x_1")
TEXTS = ("5", "6", "-5", "5.0", "5.5", " 6", "3000000000", "true", "FALSE", "Rome", "it's", "")
TEXTS += ("NaN", "-0.0", "0", "1e3", "2147483648", "9223372036854775808", "null", "+7", "007")
INTS = (0, 5, 6, 7, 2147483647, 2147483648, 3000000000, 9223372036854775807)
DOUBLES = (5.0, 5.5, 0.5, 1000.0, 3e9)


class Thrown(Exception):
    """What ends an evaluation in Java."""


# --------------------------------------------------------------------------------------- reference


def evaluate(tree: Tree, found: dict[str, str]) -> Any:
    """None, a bool, or (class, value)."""
    verb, *parts = tree
    if verb == "name":
        return ("String", found[parts[0]]) if parts[0] in found else None
    if verb in ("String", "Integer", "Long", "Double"):
        return tree
    if verb in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[verb]
    if verb == "minus":
        value = evaluate(parts[0], found)
        is_number = isinstance(value, tuple) and value[0] != "String"
        return (value[0], -value[1]) if is_number else None
    if verb == "not":
        value = truth(parts[0], found)
        return None if value is None else not value
    if verb in ("and", "or"):
        ends = verb == "or"
        left = truth(parts[0], found)
        if left is ends:
            return ends
        right = truth(parts[1], found)
        if right is ends:
            return ends
        return None if left is None or right is None else not ends
    if verb == "is null":
        return evaluate(parts[0], found) is None
    if verb in ("=", "<>"):
        value = same(evaluate(parts[0], found), evaluate(parts[1], found))
        return value if verb == "=" or value is None else not value
    if verb == "between":
        low, high = (">=", *parts[:2]), ("<=", parts[0], parts[2])
        return evaluate(("and", low, high), found)
    if verb == "not between":
        low, high = ("<", *parts[:2]), (">", parts[0], parts[2])
        return evaluate(("or", low, high), found)
    if verb in ("in", "not in"):
        value = evaluate(parts[0], found)
        return None if value is None else (value[1] in parts[1]) == (verb == "in")
    if "contains" in verb or "with" in verb:
        return held(verb, evaluate(parts[0], found) if parts[1] else None, parts[1])
    left = evaluate(parts[0], found)
    right = None if left is None else evaluate(parts[1], found)
    if right is None:
        return None
    if left[0] == right[0] == "String":
        left, right = ("Double", number(left[1], "Double")), ("Double", number(right[1], "Double"))
    sign = compared(left, right)
    return {">": sign > 0, ">=": sign >= 0, "<": sign < 0, "<=": sign <= 0}[verb]


def truth(tree: Tree, found: dict[str, str]) -> bool | None:
    if tree[0] == "name":
        return False if tree[1] in found else None
    value = evaluate(tree, found)
    assert value is None or isinstance(value, bool)
    return value


def held(verb: str, value: Any, text: str) -> bool:
    if not isinstance(value, tuple) or value[0] != "String":
        return False
    kind = verb.removeprefix("not ")
    has = {"contains": text in value[1], "startswith": value[1].startswith(text)}
    has["endswith"] = value[1].endswith(text)
    return has[kind] == (verb == kind)


def same(left: Any, right: Any) -> bool | None:
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if left == right and type(left) is type(right):
        return True
    if isinstance(left, bool) and not isinstance(right, bool):
        if right[0] == "String":
            raise Thrown
        return False
    if isinstance(right, bool):
        if isinstance(left, bool) or left[0] != "String":
            return False
        return (left[1].lower() == "true") is right
    if left[0] == right[0] == "String":
        return bool(left[1] == right[1])
    return compared(left, right) == 0


def compared(left: Any, right: Any) -> int:
    (one, mine), (two, other) = left, right
    if one == "String":
        mine, one = number(mine, two), two
    elif two == "String":
        other, two = number(other, one), one
    if "Double" in (one, two):
        mine, other = float(mine), float(other)
        mine, other = (
            (math.isnan(n), 0.0 if math.isnan(n) else n, math.copysign(1, n) if n == 0 else 0)
            for n in (mine, other)
        )
    return int(mine > other) - int(mine < other)


def number(text: str, kind: str) -> float:
    if "_" in text:
        raise Thrown
    if kind == "Double":
        try:
            return float(text)
        except ValueError:
            raise Thrown from None
    limit = 2**31 if kind == "Integer" else 2**63
    if text != text.strip() or not text.lstrip("+-").isdigit():
        raise Thrown
    value = int(text)
    if not -limit <= value < limit:
        raise Thrown
    return value


# ------------------------------------------------------------------------------------- random trees


class Trees:
    """Trees that RocketMQ accepts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def condition(self, depth: int) -> Tree:
        rng = self.rng
        verbs = ["=", "<>", "order", "between", "in", "has", "is null", "constant", "name"]
        if depth > 0:
            verbs += ["and", "or", "not"] * 3
        verb = rng.choice(verbs)
        if verb in ("and", "or"):
            return verb, self.condition(depth - 1), self.condition(depth - 1)
        if verb == "not":
            return verb, self.condition(depth - 1)
        if verb in ("=", "<>"):
            left, right = self.value(depth), self.value(depth)
            if left[0] in ("true", "false") and right[0] in ("String", "Integer", "Long", "Double"):
                return verb, right, left
            return verb, left, right
        if verb == "order":
            return rng.choice((">", ">=", "<", "<=")), self.number(depth), self.number(depth)
        if verb == "between":
            low, high = self.number(depth), self.number(depth)
            kinds = ("Integer", "Long", "Double")
            if low[0] in kinds and high[0] in kinds and float(low[1]) > float(high[1]):
                low, high = high, low
            return rng.choice(("between", "not between")), self.number(depth), low, high
        if verb == "in":
            texts = tuple(rng.choice(TEXTS) for _ in range(rng.randint(1, 6)))
            return rng.choice(("in", "not in")), self.name(), texts
        if verb == "has":
            kind = rng.choice(("contains", "startswith", "endswith"))
            text = rng.choice((*TEXTS, "R", "5", "."))
            return rng.choice(("", "not ")) + kind, self.value(depth), text
        if verb == "is null":
            return verb, self.value(depth)
        return self.name() if verb == "name" else (rng.choice(("true", "false", "null")),)

    def name(self) -> Tree:
        return "name", self.rng.choice(NAMES)

    def number(self, depth: int) -> Tree:
        """What may be ordered: a property, a number, or the negative of anything."""
        kind = self.rng.randrange(8)
        if kind < 4:
            return self.name()
        if kind < 6:
            value = self.rng.choice(INTS)
            return "Integer" if value < 2**31 else "Long", value
        if kind < 7:
            return "Double", self.rng.choice(DOUBLES)
        return "minus", self.value(depth - 1)

    def value(self, depth: int) -> Tree:
        kind = self.rng.randrange(10)
        if kind < 6:
            return self.number(depth)
        if kind < 8:
            return "String", self.rng.choice(TEXTS)
        if kind < 9 or depth <= 0:
            return (self.rng.choice(("true", "false")),)
        found = self.condition(depth - 1)
        return found if found != ("null",) else self.name()  # NULL may only be asked for by IS

    # ---------------------------------------------------------------------------------- as text

    def text(self, tree: Tree) -> str:
        verb, *parts = tree
        if verb == "name":
            return str(parts[0])
        if verb == "String":
            return "'" + str(parts[0]).replace("'", "''") + "'"
        if verb in ("Integer", "Long", "Double"):
            return repr(parts[0])
        if verb in ("true", "false", "null"):
            return self.word(verb)
        if verb == "minus":
            return "-" + self.inner(parts[0])
        if verb == "not":
            return self.word("not") + " " + self.inner(parts[0])
        if verb == "is null":
            return f"{self.inner(parts[0])} {self.word('is null')}"
        if verb.endswith("between"):
            value, low, high = map(self.inner, parts)
            return f"{value} {self.word(verb)} {low} {self.word('and')} {high}"
        if verb in ("in", "not in"):
            texts = ",".join(self.text(("String", one)) for one in parts[1])
            return f"{parts[0][1]} {self.word(verb)} ({texts})"
        if isinstance(parts[1], str):
            return f"{self.inner(parts[0])} {self.word(verb)} {self.text(('String', parts[1]))}"
        return f"{self.inner(parts[0])}{self.blank()}{self.word(verb)}{self.blank()}" + self.inner(
            parts[1]
        )

    def inner(self, tree: Tree) -> str:
        simple = tree[0] in ("name", "String", "Integer", "Long", "Double", "true", "false", "null")
        if simple and self.rng.random() < 0.9:
            return self.text(tree)
        return f"({self.blank()}{self.text(tree)}{self.blank()})"

    def word(self, text: str) -> str:
        words = (self.rng.choice((one, one.upper(), one.title())) for one in text.split())
        return self.blank().join(words)

    def blank(self) -> str:
        return self.rng.choice((" ", " ", "\n", "\t ", " /* x */ ", " -- y\n"))


@pytest.mark.parametrize("seed", range(8))
def test_the_compiler_agrees_with_the_reference(seed: int) -> None:
    trees = Trees(seed)
    answers = {"true": 0, "false": 0, "None": 0, "thrown": 0}
    for _ in range(400):
        tree = trees.condition(3)
        text = trees.text(tree)
        compiled = compile_sql(text)
        for _ in range(3):
            found = {n: trees.rng.choice(TEXTS) for n in NAMES if trees.rng.random() < 0.7}
            try:
                wanted = str(truth(tree, found)).replace("True", "true").replace("False", "false")
            except Thrown:
                wanted = "thrown"
            try:
                got = str(compiled.run(found)).replace("True", "true").replace("False", "false")
            except ValueError:
                got = "thrown"
            assert got == wanted, (text, found)
            answers[wanted] += 1
            # The property string, with what else may stand in it, says the same.
            pieces = [*found.items(), ("KEYS", "a"), ("xa", "5"), ("aa", "6")]
            if found and trees.rng.random() < 0.3:
                pieces.append((trees.rng.choice(list(found)), trees.rng.choice(TEXTS)))
            trees.rng.shuffle(pieces)
            line = "".join(f"{name}\x01{value}\x02" for name, value in pieces)
            line = line[: len(line) - trees.rng.randrange(2)]
            assert compiled.accepts_record(line) == compiled.accepts(properties.parse(line)), line
    assert min(answers.values()) > 50, answers
