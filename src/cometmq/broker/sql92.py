"""SQL92 filters: the grammar of RocketMQ's SelectorParser, its lexer, and the limits.

    or        = and { OR and }
    and       = equality { AND equality }
    equality  = compared { ("=" | "<>") compared | IS [NOT] NULL }
    compared  = unary { (">" | ">=" | "<" | "<=") unary | [NOT] BETWEEN unary AND unary
                      | [NOT] IN "(" string { "," string } ")"
                      | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) string }
    unary     = ("+" | "-" | NOT) unary | string | number | TRUE | FALSE | NULL | name | "(" or ")"

One rule: what RocketMQ accepts is accepted and means the same (sql_nodes.py), however odd; the
tests hold its answers. As there, tokens are read one ahead and no further, and whatever follows a
whole expression is ignored: `a = 1 junk` is `a = 1`. What RocketMQ leaves unbounded has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import msgspec

from cometmq.broker import sql_nodes as nodes
from cometmq.broker.sql_nodes import Kind, Node, Properties, Refused, Truth
from cometmq.errors import RequestRefused
from cometmq.wire import properties
from cometmq.wire.codes import ResponseCode

MAX_EXPRESSION = 16_384  # characters, as for tags
MAX_NODES = 512  # operands and operators; also the most steps that one message costs
MAX_DEPTH = 64  # parentheses and operators within each other: Python's stack is the limit behind it
MAX_LIST = 1_024  # texts of one IN
MAX_CACHED = 256  # compiled expressions kept; RocketMQ keeps 100
STEPS_PER_PULL = 100_000  # some 30 ms; a pull with an expression of many nodes looks at less
CHARS_PER_PULL = 16_000_000  # of properties, by each node; some 30 ms where texts are searched


class SqlFilter(msgspec.Struct, frozen=True):
    """A compiled expression: immutable, shared by all who wrote the same text."""

    expression: str
    steps: int
    run: Truth
    wanted: tuple[tuple[str, str, str], ...] = ()
    """The properties it names: each with how it stands in a property string, first and later."""

    accepts_all = False
    needs_record = True

    @property
    def max_scan(self) -> int:
        """How many messages one pull may look at."""
        return max(32, STEPS_PER_PULL // self.steps)

    @property
    def max_chars(self) -> int:
        """How many characters of property strings it may look through."""
        return CHARS_PER_PULL // self.steps

    def accepts_code(self, tags_code: int) -> bool:
        """The queue unit knows nothing of properties."""
        return True

    def accepts_record(self, text: str) -> bool:
        """By the property string of a stored message."""
        found: dict[str, str] = {}
        for name, first, later in self.wanted:  # properties.get, without its calls
            begin = text.rfind(later)
            if begin >= 0:
                begin += len(later)
            elif text.startswith(first):
                begin = len(first)
            else:
                continue
            end = text.find("\x02", begin)
            value = text[begin:] if end < 0 else text[begin:end]
            if not value:  # it does not count: an earlier one may
                return self.accepts(properties.parse(text))
            found[name] = value
        try:
            return self.run(found) is True
        except ValueError:
            return False

    def accepts(self, found: Properties) -> bool:
        """Only True delivers: NULL and what throws in Java do not."""
        try:
            return self.run(found) is True
        except ValueError:
            return False


@lru_cache(maxsize=MAX_CACHED)
def compile_sql(expression: str) -> SqlFilter:
    """An expression to a filter; RequestRefused with 23 says where it breaks and why."""
    if len(expression) > MAX_EXPRESSION:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"SQL92 expression of {len(expression)} characters, at most {MAX_EXPRESSION}",
        )
    parser = _Parser(expression)
    try:
        run = nodes.condition(parser.any_of())
    except Refused as refused:
        raise RequestRefused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"SQL92 expression refused at character {refused.at + 1}: {refused.reason}; it is "
            f"{_around(expression, refused.at)}",
        ) from None
    wanted = tuple((one, f"{one}\x01", f"\x02{one}\x01") for one in sorted(parser.names))
    return SqlFilter(expression, parser.count, run, wanted)


def _around(expression: str, at: int) -> str:
    """The place in the text, with a mark; a remark is no place for 16 KiB."""
    begin, end = max(0, at - 24), at + 24
    before = ("..." if begin else "") + expression[begin:at]
    after = expression[at:end] + ("..." if end < len(expression) else "")
    return f"{before!r} <here> {after!r}"


# ------------------------------------------------------------------------------------------- lexer

_TOKEN = re.compile(
    r"""(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?
               |[0-9]+[eE][+-]?[0-9]+)
    |(?P<integer>0|[1-9][0-9]*[lL]?)
    |(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<sign><>|>=|<=|[=<>(),+-])""",
    re.VERBOSE,
)
_BLANKS = re.compile(r"[ \t\n\r\f]+|--[^\n\r]*[\n\r]")  # a line comment must be ended by its line
_KEYWORDS = frozenset(
    "NOT AND OR BETWEEN IN TRUE FALSE NULL IS CONTAINS STARTSWITH ENDSWITH".split()
)


class _Token(msgspec.Struct, frozen=True, gc=False):
    """`kind` is the keyword or sign itself, or string, integer, float, name, end."""

    kind: str
    text: str
    at: int


def _token(source: str, at: int) -> tuple[_Token, int]:
    """The token that starts at or after `at`, and where the next may start."""
    while True:
        if blank := _BLANKS.match(source, at):
            at = blank.end()
        elif source.startswith("/*", at):
            end = source.find("*/", at + 2)
            if end < 0:
                raise Refused(at, "a comment that does not end")
            at = end + 2
        else:
            break
    if at == len(source):
        return _Token("end", "", at), at
    if source[at] == "'":
        return _string(source, at)
    found = _TOKEN.match(source, at)
    if found is None:
        raise Refused(at, f"the character {source[at]!r} has no meaning here")
    text, kind = found[0], str(found.lastgroup)
    if kind == "sign":
        kind = text
    elif kind == "name" and text.upper() in _KEYWORDS:
        kind = text.upper()
    return _Token(kind, text, at), found.end()


def _string(source: str, at: int) -> tuple[_Token, int]:
    """`'...'` with `''` for a quote. Where the end is missing it ends at the last lone quote."""
    end, last = at + 1, -1
    while (end := source.find("'", end)) >= 0:
        last = end + 1
        if not source.startswith("'", end + 1):
            break
        end += 2
    if last < 0:
        raise Refused(at, "a text that does not end; quotes within it are doubled")
    return _Token("string", source[at + 1 : last - 1].replace("''", "'"), at), last


# ------------------------------------------------------------------------------------------ parser

_HOLDS = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_LITERALS: dict[str, tuple[Kind, bool | None]] = {
    "TRUE": (Kind.BOOLEAN, True),
    "FALSE": (Kind.BOOLEAN, False),
    "NULL": (Kind.NULL, None),
}


class _Parser:
    """Recursive descent, one token ahead. `count`: nodes so far; `names`: properties so far."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self.names: set[str] = set()
        self._source = source
        self._at = 0
        self._depth = 0
        self._next: _Token | None = None

    def any_of(self) -> Node:
        return self._chain("OR", self._all_of, nodes.disjunction)

    def _all_of(self) -> Node:
        return self._chain("AND", self._equality, nodes.conjunction)

    def _chain(
        self, word: str, part: Callable[[], Node], join: Callable[[list[Node]], Node]
    ) -> Node:
        parts = [part()]
        while self._peek().kind == word:
            self._take()
            parts.append(part())
        return parts[0] if len(parts) == 1 else self._made(join(parts))

    def _equality(self) -> Node:
        left = self._compared()
        while (sign := self._peek().kind) in ("=", "<>", "IS"):
            self._take()
            if sign == "IS":
                is_not = self._skip("NOT")
                self._expect("NULL")
                left = self._made(nodes.is_null(left, is_not=is_not))
            else:
                left = self._made(nodes.equal(left, self._compared(), is_not=sign == "<>"))
        return left

    def _compared(self) -> Node:
        left = self._unary()
        while True:
            sign = self._peek().kind
            if sign in (">", ">=", "<", "<="):
                self._take()
                left = nodes.order(sign, left, self._unary())
            elif sign in ("NOT", "BETWEEN", "IN", *_HOLDS):
                is_not = self._skip("NOT")
                left = self._special(left, self._take(), is_not=is_not)
            else:
                return left
            left = self._made(left)

    def _special(self, left: Node, verb: _Token, *, is_not: bool) -> Node:
        if verb.kind == "BETWEEN":
            low = self._unary()
            self._expect("AND")
            return nodes.between(left, low, self._unary(), is_not=is_not)
        if verb.kind == "IN":
            return nodes.within(left, self._list(), is_not=is_not)
        if verb.kind in _HOLDS:
            text = self._expect("string").text
            return nodes.holds(verb.kind, left, text, is_not=is_not)
        raise Refused(
            verb.at, f"after NOT a BETWEEN, IN or CONTAINS is expected, not {_shown(verb)}"
        )

    def _list(self) -> list[str]:
        self._expect("(")
        texts = [self._expect("string").text]
        while self._skip(","):
            token = self._expect("string")
            if len(texts) == MAX_LIST:
                raise Refused(token.at, f"more than {MAX_LIST} texts in one IN")
            texts.append(token.text)
        self._expect(")")
        return texts

    def _unary(self) -> Node:
        token = self._take()
        kind = token.kind
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refused(token.at, f"more than {MAX_DEPTH} levels of nesting")
        if kind == "+":
            found = self._unary()
        elif kind == "-":
            found = nodes.negate(self._unary(), token.at)
        elif kind == "NOT":
            found = nodes.negation(self._unary(), token.at)
        elif kind == "(":
            found = self.any_of()
            self._expect(")")
        elif kind == "string":
            found = nodes.constant(Kind.TEXT, token.text, token.at)
        elif kind == "integer":
            found = nodes.integer(token.text, token.at)
        elif kind == "float":
            found = nodes.decimal(token.text, token.at)
        elif kind == "name":
            self.names.add(token.text)
            found = nodes.variable(token.text, token.at)
        elif kind in _LITERALS:
            found = nodes.constant(*_LITERALS[kind], token.at)
        else:
            raise Refused(token.at, f"a value is expected, not {_shown(token)}")
        self._depth -= 1
        return self._made(found)

    def _made(self, node: Node) -> Node:
        self.count += 1
        if self.count > MAX_NODES:
            raise Refused(node.at, f"more than {MAX_NODES} operands and operators")
        if node.depth > MAX_DEPTH:
            raise Refused(node.at, f"more than {MAX_DEPTH} levels of nesting")
        return node

    def _peek(self) -> _Token:
        if self._next is None:
            self._next, self._at = _token(self._source, self._at)
        return self._next

    def _take(self) -> _Token:
        token = self._peek()
        self._next = None
        return token

    def _skip(self, kind: str) -> bool:
        if self._peek().kind != kind:
            return False
        self._take()
        return True

    def _expect(self, kind: str) -> _Token:
        token = self._take()
        if token.kind != kind:
            wanted = "a quoted text" if kind == "string" else kind
            raise Refused(token.at, f"{wanted} is expected, not {_shown(token)}")
        return token


def _shown(token: _Token) -> str:
    return "the end" if token.kind == "end" else repr(token.text[:40])
