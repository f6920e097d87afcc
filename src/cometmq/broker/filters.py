"""Tag filters: which queue units a subscription wants.

    *            everything                 A || B       messages tagged A or B
    test-*       beyond RocketMQ: every tag that begins with `test-` (may stand among others)

Exact tags are decided by the 32-bit hash in the consume queue, as in RocketMQ: a collision passes
and the client compares the text. A prefix can't be decided by a hash, so units are let through and
the record's TAGS property is compared. One rule: a filter is built once per subscription and is
immutable.
"""

from __future__ import annotations

import msgspec

from cometmq.errors import RequestRefused
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

    @property
    def accepts_all(self) -> bool:
        return not self.codes and not self.prefixes

    def accepts_code(self, tags_code: int) -> bool:
        """By the queue unit alone: False is final, True may still need the tag's text."""
        if self.prefixes or not self.codes:
            return True
        code = tags_code & 0xFFFFFFFF
        return (code - 0x1_0000_0000 if code & 0x8000_0000 else code) in self.codes

    def accepts_tag(self, tag: str | None) -> bool:
        """By the tag's text; asked only when there are prefixes."""
        if tag is None:
            return False
        return tag in self.tags or tag.startswith(self.prefixes)


ALL = TagFilter()


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
    """The filter of a heartbeat's subscription; codes win where a client sent no tags."""
    if subscription.expressionType not in ("TAG", ""):
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR,
            f"the broker does not support filters of type {subscription.expressionType}; use TAG",
        )
    if subscription.subString.strip() == "*" and not subscription.tagsSet:
        return ALL
    if subscription.tagsSet:
        return from_tags(subscription.tagsSet)
    if subscription.codeSet:
        return TagFilter(frozenset(subscription.codeSet))
    return parse_tags(subscription.subString)


def _refuse(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark)
