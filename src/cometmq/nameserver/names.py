"""Which names, addresses and numbers a registration may carry.

Owns: the rules and the words of the refusal. One rule: a bad one refuses the whole request with
INVALID_PARAMETER before anything has changed. RocketMQ's own name server checks none of this and
hands whatever it was told to every client.

A broker also registers topics made of its own and its cluster's name (`broker-a`,
`DefaultCluster_REPLY_TOPIC`); its default name is the host's, dots and all, so those parts of a
topic's name need only be what a broker's name may be.
"""

from __future__ import annotations

import re

from cometmq.errors import RequestRefused
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import ResponseCode
from cometmq.wire.headers import RegisterBrokerHeader

MAX_NAME = 255  # characters of a topic, broker, cluster or zone name, and of an address
MAX_INT = 2**31 - 1  # queue counts, permissions and flags are Java ints

RETRY_PREFIX = "%RETRY%"
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]*")
_TOPIC_BYTES = bytes(number for number in range(128) if _TOPIC.fullmatch(chr(number)))
_ADDRESS = re.compile(r"[A-Za-z0-9._:%\[\]-]+:([0-9]{1,5})")


def refuse(what: str) -> RequestRefused:
    return RequestRefused(ResponseCode.INVALID_PARAMETER, what)


def check_header(
    header: RegisterBrokerHeader, zone: str | None, filter_servers: tuple[str, ...]
) -> None:
    check_name("clusterName", header.clusterName)
    check_name("brokerName", header.brokerName)
    check_address("brokerAddr", header.brokerAddr)
    if header.haServerAddr:
        check_address("haServerAddr", header.haServerAddr)
    if zone is not None:
        check_name("zone", zone)
    for server in filter_servers:
        check_address("filter server", server)


def check_name(what: str, name: str) -> None:
    """A broker's, cluster's or zone's name."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise refuse(
            f"{what} {name[:80]!r} must be 1 to {MAX_NAME} printable characters, "
            f"and has {len(name)}"
        )


def check_address(what: str, address: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or len(address) > MAX_NAME or int(match[1]) > 65535:
        raise refuse(f"{what} {address[:80]!r} must be host:port")


def check_topic(topic: str, *own_names: str) -> None:
    """A topic's name; `own_names` may stand in it as they are."""
    rest = topic
    for name in own_names:
        rest = rest.replace(name, "")
    if topic.startswith(RETRY_PREFIX):  # `%RETRY%group+topic`: what pop's newer retry topics say
        rest = rest.replace("+", "", 1)
    if not topic or len(topic) > MAX_NAME or not _TOPIC.fullmatch(rest):
        raise refuse(
            f"topic {topic[:80]!r} must be 1 to {MAX_NAME} characters of %|a-zA-Z0-9_- "
            f"and has {len(topic)}"
        )


def check_topics(topics: dict[str, TopicConfig], cluster: str, broker: str) -> None:
    """Every name and number of a topic table; quick, because it runs before any slicing."""
    if not topics:
        return
    joined = "".join(topics)
    is_plain = joined.isascii() and not joined.encode("ascii").translate(None, _TOPIC_BYTES)
    if not is_plain or max(map(len, topics)) > MAX_NAME or "" in topics:
        for name in topics:
            check_topic(name, broker, cluster)
    for name, one in topics.items():
        if not (
            0 <= one.readQueueNums <= MAX_INT
            and 0 <= one.writeQueueNums <= MAX_INT
            and 0 <= one.perm <= MAX_INT
            and 0 <= one.topicSysFlag <= MAX_INT
        ):
            raise refuse(
                f"topic {name} has readQueueNums={one.readQueueNums} "
                f"writeQueueNums={one.writeQueueNums} perm={one.perm} "
                f"topicSysFlag={one.topicSysFlag}; each must be 0 to {MAX_INT}"
            )
