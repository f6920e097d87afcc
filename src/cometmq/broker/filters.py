"""Filters: which messages a subscription wants, by tags or by an SQL92 expression (sql92.py).

    *            everything                 A || B       messages tagged A or B
    test-*       beyond RocketMQ: every tag that begins with `test-` (may stand among others)

Exact tags are decided by the 32-bit hash in the consume queue, as in RocketMQ: a collision passes
and the client compares the text. A prefix can't be decided by a hash, so units are let through and
the record's TAGS property is compared. One rule: a filter is built once per subscription, is
immutable, and is asked in two steps: by the queue unit, then (`needs_record`) by the record.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cometmq.broker.sql92 import CHARS_PER_PULL, MAX_NODES, SqlFilter, compile_sql
from cometmq.errors import RequestRefused
from cometmq.store.layout import EXT_ADDRESS_MAX
from cometmq.wire import properties
from cometmq.wire.bodies import Subscription
from cometmq.wire.codes import ResponseCode
from cometmq.wire.hashing import java_hash

MAX_EXPRESSION = 16_384  # characters
MAX_TAGS = 1_024


class TagFilter(msgspec.Struct, frozen=True):
    """`codes` and `prefixes`; both empty means everything."""

    codes: frozenset[int] = frozenset()
    tags: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    max_scan = None  # the store's own limit
    max_chars = CHARS_PER_PULL

    @property
    def needs_record(self) -> bool:
        return bool(self.prefixes)

    @property
    def accepts_all(self) -> bool:
        return not self.codes and not self.prefixes

    def accepts_code(self, tags_code: int) -> bool:
        """By the queue unit alone: False is final, True may still need the tag's text.

        An address into consumequeue_ext (a store that RocketMQ wrote) stands for any code."""
        if self.prefixes or not self.codes or tags_code <= EXT_ADDRESS_MAX:
            return True
        code = tags_code & 0xFFFFFFFF
        return (code - 0x1_0000_0000 if code & 0x8000_0000 else code) in self.codes

    def accepts_record(self, text: str) -> bool:
        """By the property string of a stored message; asked only when there are prefixes."""
        tag = properties.get(text, properties.TAGS)
        if tag is None:
            return False
        return tag in self.tags or tag.startswith(self.prefixes)


ALL = TagFilter()


class RetryFilter(msgspec.Struct, frozen=True):
    """On a retry topic: each message by the group's filter of the topic that it came from."""

    find: Callable[[str], SqlFilter | None]

    accepts_all = False
    needs_record = True
    max_scan = 100
    max_chars = CHARS_PER_PULL // MAX_NODES

    def accepts_code(self, tags_code: int) -> bool:
        return True

    def accepts_record(self, text: str) -> bool:
        found = properties.parse(text)
        origin = self.find(found.get(properties.RETRY_TOPIC, ""))
        return origin is None or origin.accepts(found)


Filter = TagFilter | SqlFilter | RetryFilter

SQL92 = "SQL92"


def is_tags(kind: str | None) -> bool:
    """Whether an expressionType means tags; C++ and Node send none."""
    return kind in (None, "", "TAG")


def by_expression(kind: str | None, expression: str | None) -> SqlFilter:
    """The filter of any other type; RequestRefused with 23 says what is wrong with it."""
    if kind != SQL92:
        raise _refuse(f"there are no filters of type {str(kind)[:40]!r}; use TAG or {SQL92}")
    if not expression:
        raise _refuse(f"a subscription of type {SQL92} without an expression")
    return compile_sql(expression)


def parse_tags(expression: str | None) -> TagFilter:
    """A tag expression to a filter; RequestRefused with 23 says what is wrong with it."""
    if expression is None or expression.strip() in ("", "*"):
        return ALL
    if len(expression) > MAX_EXPRESSION:
        raise _refuse(f"tag expression of {len(expression)} characters, at most {MAX_EXPRESSION}")
    tags = [tag.strip() for tag in expression.split("||")]
    tags = [tag for tag in tags if tag]
    if not tags:
        raise _refuse(f"tag expression {expression!r} names no tag; write `A || B` or `*`")
    return from_tags(tags)


def from_tags(tags: list[str] | tuple[str, ...]) -> TagFilter:
    """A filter from single tags, some of which may end with `*`."""
    if len(tags) > MAX_TAGS:
        raise _refuse(f"{len(tags)} tags in one expression, at most {MAX_TAGS}")
    if "*" in tags:
        return ALL
    prefixes = tuple(sorted({tag[:-1] for tag in tags if len(tag) > 1 and tag.endswith("*")}))
    exact = frozenset(tag for tag in tags if not tag.endswith("*"))
    return TagFilter(frozenset(java_hash(tag) for tag in exact), exact, prefixes)


def of_subscription(subscription: Subscription) -> TagFilter:
    """The tags of a heartbeat's subscription; codes win where a client sent no tags."""
    assert is_tags(subscription.expressionType)
    if subscription.subString.strip() == "*" and not subscription.tagsSet:
        return ALL
    if subscription.tagsSet:
        return from_tags(subscription.tagsSet)
    if subscription.codeSet:
        return TagFilter(frozenset(subscription.codeSet))
    return parse_tags(subscription.subString)


def _refuse(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark)
