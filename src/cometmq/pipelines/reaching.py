"""The clusters that a pipeline reads from and writes to: keys and TLS, options by word, admin,
target topics.

Owns: what pipelines ask of a cluster besides Spark's reading and writing, and in whose name. Two
rules: a topic is made only where its number of queues was asked for; secrets come from a file or
from the environment, never from a command line.

    COMETMQ_ACCESS_KEY  COMETMQ_SECRET_KEY  COMETMQ_TLS  COMETMQ_TLS_CA_FILE ...    or in one file:
    COMETMQ_ACCESS_FILE
    COMETMQ_TO_...      of the cluster that mirror writes to, if it is another one
    COMETMQ_FROM_...    of the cluster that replay reads from, if it is another one
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cometmq.client.blocking_admin import Admin
from cometmq.errors import NoRoute, UsageError
from cometmq.message import MessageQueue
from cometmq.spark.options import parse
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.source_options import SourceOptions, names
from cometmq.spark.tls import ACCESS_FILE, TLS_OPTIONS, Access, access_of, with_access_file

_NAMES = {option.name.lower(): option.name for option in TLS_OPTIONS}
_CAPITAL = re.compile(r"(?=[A-Z])")


def words_to_options(words: Sequence[str] | None, what: str) -> dict[str, str]:
    """`name=value` words as options; values may hold secrets, so errors show names only."""
    found: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{what}: write each as name=value ({name.strip()[:40]!r} is not)")
        found[name.strip()] = value
    return found


def source_checked(options: dict[str, str], *, streaming: bool = True) -> dict[str, str]:
    """Options as they are; UsageError at once for what Spark would tell as the failure of a run."""
    SourceOptions.parse(options, streaming=streaming)
    return options


def sink_checked(options: dict[str, str]) -> dict[str, str]:
    SinkOptions.read(options)
    return options


def refuse_loop(pipeline: str, topics: str, to_topic: str | None) -> None:
    """UsageError if a pipeline would read what it writes, and so never come to an end."""
    if to_topic is not None and to_topic in topic_names(topics):
        raise UsageError(f"{pipeline} can't write into the topic that it reads ({to_topic})")


def topic_names(topics: str) -> tuple[str, ...]:
    """Names separated by commas; UsageError if there is none."""
    try:
        return names(topics)
    except ValueError as error:
        raise UsageError(f"topic {topics!r} {error}") from None


def access_options(access: str | None, which: str = "") -> dict[str, str]:
    """Options of source or sink for keys and TLS: the file that `access` names, else what the
    environment has for this cluster (`which`: none, TO or FROM). UsageError if they are wrong."""
    found = {}
    if access is not None:
        found[ACCESS_FILE] = access
    else:
        for option in TLS_OPTIONS:
            value = os.environ.get(variable_of(option.name, which))
            if value:
                found[option.name] = value
    access_in(found)
    return found


def other_access(
    access: str | None, own: Mapping[str, str], which: str, is_other: bool
) -> dict[str, str]:
    """Of a second cluster: keys of the first are never shown to another one."""
    return access_options(access, which) if is_other or access is not None else dict(own)


def variable_of(option: str, which: str = "") -> str:
    """`tlsCaFile` to COMETMQ_TLS_CA_FILE; with TO: COMETMQ_TO_TLS_CA_FILE."""
    words = _CAPITAL.sub("_", option).upper()
    return "_".join(("COMETMQ", which, words) if which else ("COMETMQ", words))


def with_environment(options: Mapping[str, str], which: str = "") -> dict[str, str]:
    """Options of a spec file, with the environment's keys and TLS if they have none of them."""
    if any(name.lower() in _NAMES for name in options):
        return dict(options)
    return {**options, **access_options(None, which)}


def client_keywords(options: Mapping[str, str]) -> dict[str, Any]:
    """For any client of ours: the credentials and TLS that options of the source or sink say."""
    return access_in(options).client_keywords()


def access_in(options: Mapping[str, str]) -> Access:
    own = {name: value for name, value in options.items() if name.lower() in _NAMES}
    return access_of(parse(TLS_OPTIONS, with_access_file(own), what="the connection"))


def admin_of(namesrv: str, options: Mapping[str, str]) -> Admin:
    return Admin(namesrv, **client_keywords(options))


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
