"""SQL92 subscriptions in the simulated cluster.

Owns: messages with properties, groups that filter by them, and plain Python functions that say
what each expression means. One rule of theirs: a group gets what its expression is true of, all of
it and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from cometmq.message import StoredMessage
from cometmq.testing.client import Client
from cometmq.testing.history import Sent
from cometmq.testing.kinds_base import KindProducer, Letter
from cometmq.testing.traffic import Consumer

TOPIC = "KSql"

Meaning = Callable[[int | None, str | None], bool]

EXPRESSIONS: dict[str, Meaning] = {
    "size > 5": lambda size, color: size is not None and size > 5,
    "size BETWEEN 2 AND 6 AND color = 'red'": lambda size, color: (
        size is not None and 2 <= size <= 6 and color == "red"
    ),
    "color IS NULL OR size < 3": lambda size, color: (
        color is None or (size is not None and size < 3)
    ),
    "color IN ('red', 'blue') AND NOT (size = 4)": lambda size, color: (
        color in ("red", "blue") and size is not None and size != 4
    ),
    "color <> 'red'": lambda size, color: color is not None and color != "red",
    "4 <> size": lambda size, color: size != 4,
}
"""What they mean to RocketMQ: what is missing on the left of a comparison makes it neither true nor
false, on the right it differs from everything."""


class SqlProducer(KindProducer):
    """Messages with a size and a color, or without."""

    def make(self, client: Client, token: str, body: bytes) -> Letter:
        table = {}
        if self.rng.randrange(5):
            table["size"] = str(self.rng.randrange(9))
        if self.rng.randrange(4):
            table["color"] = self.rng.choice(("red", "blue", "green"))
        return Letter(token, table, body)


def wants(expression: str, sent: Sent) -> bool:
    size = sent.attributes.get("size")
    meaning = EXPRESSIONS[expression]
    return meaning(None if size is None else int(size), sent.attributes.get("color"))


class SqlConsumer(Consumer):
    """Judges what it is given; what it is not given is judged at the end (checkers.missing)."""

    def is_mine(self, sent: Sent, message: StoredMessage) -> bool:
        return super().is_mine(sent, message) and wants(self.plan.expression, sent)
