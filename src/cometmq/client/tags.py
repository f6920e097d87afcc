"""Which messages a tag subscription means, looked at once more by the client.

Owns: that comparison. One rule: brokers compare hashes of tags, and two tags may have the same;
what is not meant is dropped here, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from cometmq.client.received import ReceivedMessage
from cometmq.wire import properties as props

M = TypeVar("M", bound=ReceivedMessage)


class WantedTags:
    """Tags, and beginnings of tags (`test-*`, which CometMQ's broker knows)."""

    __slots__ = ("_exact", "_prefixes")

    def __init__(self, tags: Iterable[str] = ()) -> None:
        self._exact = frozenset(tags)
        self._prefixes = tuple(tag[:-1] for tag in self._exact if tag.endswith("*"))

    def pick(self, messages: list[M]) -> list[M]:
        """Those that are meant; all if there are no tags."""
        exact, prefixes, get = self._exact, self._prefixes, props.get
        if not exact:
            return messages
        if not prefixes:
            return [one for one in messages if get(one.properties_text, props.TAGS) in exact]
        picked: list[M] = []
        for one in messages:
            tag = get(one.properties_text, props.TAGS)
            if tag is not None and (tag in exact or tag.startswith(prefixes)):
                picked.append(one)
        return picked
