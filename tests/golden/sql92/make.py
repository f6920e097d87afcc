"""Makes answers.json: random SQL92 expressions and properties, and what RocketMQ answers.

    python tests/golden/sql92/make.py [CASES [SEED]] [--check]

Needs java and the server jars that the interop suite keeps in .cache/interop (`make interop`).
`--check` writes nothing and compares CometMQ with RocketMQ on so many fresh cases. One rule: the
table in tests/unit/broker/test_sql92.py is asked as well, so that it stays RocketMQ's word.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
JARS = ROOT / ".cache" / "interop" / "server-5.5.0" / "lib"

sys.path.insert(0, str(ROOT / "tests" / "unit"))

NAMES = ["a", "b", "c", "TAGS", "A1", "_x", "$y"]
VALUES = [
    *("5", "6", "-5", "+6", "05", "5.0", "5.5", " 6", "6 ", "\t6.0\n", "3000000000", "2147483647"),
    *("2147483648", "-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775808", "true", "TRUE", "True", "false", "x", "Rome", "it's", "NaN", "-NaN"),
    *("Infinity", "-Infinity", "+Infinity", "infinity", "nan", "1e3", "1E3", "1e400", "-1e400"),
    *("0", "-0", "0.0", "-0.0", "1d", "1.5f", "1.5L", "0x10", "0x1p3", "0x1p99999", "0x.8P1"),
    *("1_0", "٣", "５", "𝟓", "½", "é", "", "+", "-", ".", "5.", ".5", "1e", "0" * 25 + "5"),
    *("4.9e-324", "1e-400", "9007199254740993", "9007199254740992.0", "０5", "\u00a05", "null"),
]
LITERALS = [
    *("5", "6", "0", "5.0", "5.5", "0.0", ".5", "5.", "1e3", "1E400", "2147483647", "2147483648"),
    *("2147483648L", "9223372036854775807", "9223372036854775808", "5L", "5l", "0L", "007", "07.5"),
    *("9007199254740993", "9007199254740992.0", "'5'", "'x'", "'Rome'", "'it''s'", "''", "' '"),
    *("'5", "'a''", "TRUE", "FALSE", "NULL", "true", "null", "1" + "0" * 23, "4.9e-324", "''''"),
]
SOUP = [
    *NAMES,
    *LITERALS,
    *"( ) , = <> > >= < <= + - and or not between in is null contains startswith --c".split(),
    *("--c\n", "/*c*/", "/*", "#", "!", "\n", "é", "ſtartswith", "\u212a", ".", " "),
]


class Maker:
    """Random expressions: mostly sound, some broken, some soup."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def case(self) -> tuple[str, dict[str, str]]:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.8:
            text = self.expression(rng.randint(0, 3))
        elif kind < 0.88:
            text = " ".join(rng.choice(SOUP) for _ in range(rng.randint(1, 9)))
        else:
            letters = list(self.expression(2))
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(letters) + 1)
                letters[at : at + rng.randint(0, 1)] = rng.choice(([], [rng.choice(SOUP)]))
            text = "".join(letters)
        if rng.random() < 0.05:
            text += rng.choice((" junk", " #", " junk #", " not", " -- x", " /* y */ and a = 5"))
        return text, {name: rng.choice(VALUES) for name in NAMES if rng.random() < 0.6}

    def expression(self, depth: int) -> str:
        rng = self.rng
        text = self.condition(depth)
        while rng.random() < 0.35:
            text += f" {rng.choice(('and', 'OR', 'AND', 'or'))} {self.condition(depth)}"
        if rng.random() < 0.06:
            text += rng.choice((" = TRUE", " > 5", " is null", " <> TRUE", " = a"))
        return text

    def condition(self, depth: int) -> str:
        rng, kind, unary = self.rng, self.rng.random(), self.unary
        is_not = rng.choice(("", "", "NOT ", "not "))
        if kind < 0.35:
            return f"{unary(depth)} {rng.choice(('=', '<>'))} {unary(depth)}"
        if kind < 0.55:
            return f"{unary(depth)} {rng.choice(('>', '>=', '<', '<='))} {unary(depth)}"
        if kind < 0.67:
            return f"{unary(depth)} {is_not}between {unary(depth - 1)} AND {unary(depth - 1)}"
        if kind < 0.77:
            texts = ", ".join(self.text() for _ in range(rng.randint(1, 6)))
            left = unary(depth) if rng.random() < 0.2 else rng.choice(NAMES)
            return f"{left} {is_not}in ({texts})"
        if kind < 0.87:
            verb = rng.choice(("contains", "STARTSWITH", "EndsWith"))
            return f"{unary(depth)} {is_not}{verb} {self.text()}"
        if kind < 0.94:
            return f"{unary(depth)} is {rng.choice(('', 'not '))}null"
        return unary(depth)

    def unary(self, depth: int) -> str:
        kind = self.rng.random()
        if kind < 0.72 or depth <= 0:
            return self.rng.choice(NAMES if self.rng.random() < 0.6 else LITERALS)
        if kind < 0.80:
            return self.rng.choice(("-", "- ", "+")) + self.unary(depth - 1)
        if kind < 0.87:
            return "NOT " + self.unary(depth - 1)
        return f"({self.expression(depth - 1)})"

    def text(self) -> str:
        if self.rng.random() < 0.05:
            return self.rng.choice(LITERALS)
        return self.rng.choice(("'5'", "'x'", "'Rome'", "''", "'it''s'", "' '", "'6'", "'true'"))


def ask_java(cases: list[tuple[str, dict[str, str]]]) -> list[str]:
    lines = []
    for expression, properties in cases:
        words = [expression, *(word for pair in properties.items() for word in pair)]
        lines.append("\t".join(word.encode().hex() for word in words))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{JARS}/*"
        subprocess.run(["javac", "-cp", path, "-d", folder, str(HERE / "Oracle.java")], check=True)
        run = subprocess.run(
            ["java", "-cp", f"{path}:{folder}", "Oracle"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=True,
        )
    found = [line[1:] for line in run.stdout.splitlines() if line.startswith("=")]
    assert len(found) == len(cases), (len(found), len(cases))
    return found


def main() -> int:
    from broker.test_sql92 import CASES, answer

    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    count, seed = [*numbers, *(2000, 1)[len(numbers) :]]
    table = [(text, found, wanted) for rows in CASES.values() for text, found, wanted in rows]
    told = ask_java([(text, found) for text, found, _ in table])
    wrong = [(row, java) for row, java in zip(table, told, strict=True) if row[2] != java]
    maker = Maker(seed)
    cases = [maker.case() for _ in range(count)]
    answers = ask_java(cases)
    if "--check" in sys.argv:
        for (text, found), java in zip(cases, answers, strict=True):
            if answer(text, found) != java:
                wrong.append(((text, found, answer(text, found)), java))
    else:
        rows = [[*case, java] for case, java in zip(cases, answers, strict=True)]
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (HERE / "answers.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    for row, java in wrong[:20]:
        print(f"java says {java}: {row}")
    print(f"{len(table)} of the table, {count} random {dict(Counter(answers))}, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
