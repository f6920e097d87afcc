"""The clusters that a pipeline reads from and writes to: options by word, admin, target topics.

Owns: what the copying and archiving pipelines ask of a cluster besides Spark's reading and writing.
One rule: a topic is made only where its number of queues was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cometmq.client.blocking_admin import Admin
from cometmq.errors import NoRoute, UsageError
from cometmq.message import MessageQueue
from cometmq.spark.options import parse
from cometmq.spark.tls import TLS_OPTIONS, access_of


def words_to_options(words: Sequence[str] | None, what: str) -> dict[str, str]:
    """`name=value` words as options; values may hold secrets, so errors show names only."""
    found: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{what}: write each as name=value ({name.strip()[:40]!r} is not)")
        found[name.strip()] = value
    return found


def admin_of(namesrv: str, options: Mapping[str, str]) -> Admin:
    """An Admin with the credentials and the TLS that options of the source or the sink say."""
    names = {option.name.lower() for option in TLS_OPTIONS}
    own = {name: value for name, value in options.items() if name.lower() in names}
    access = access_of(parse(TLS_OPTIONS, own, what="the connection"))
    return Admin(namesrv, **access.client_keywords())


def target_queues(
    namesrv: str, options: Mapping[str, str], topic: str, queues: int | None
) -> tuple[MessageQueue, ...]:
    """The queues of a topic that is written to; it is made if `queues` says how many it gets."""
    if queues is not None and queues < 1:
        raise UsageError(f"queues is {queues}: a topic has at least one")
    with admin_of(namesrv, options) as admin:
        try:
            return tuple(sorted(admin.topic_route(topic).to_send))
        except NoRoute:
            if queues is None:
                raise UsageError(
                    f"topic {topic!r} does not exist at {namesrv}: create it, or say with the "
                    "setting queues how many queues it gets"
                ) from None
        admin.create_topic(topic, queues)
        return tuple(sorted(admin.topic_route(topic).to_send))
