"""CometMQ: RocketMQ's system in Python.

Owns: the public names. One rule: importing `cometmq` stays cheap, so a client is imported when its
name is first used, and nothing here pulls in a server or a framework.

    from cometmq import Consumer, Message, Producer

    with Producer("shop", namesrv="127.0.0.1:9876") as producer:
        producer.send(Message("orders", b"..."))

The clients here block; those of `cometmq.aio` have the same names and methods for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cometmq.errors import CometError

if TYPE_CHECKING:
    from cometmq.client.blocking import Consumer, Producer, TransactionProducer
    from cometmq.client.blocking_admin import Admin
    from cometmq.client.blocking_pull import PullConsumer, SimpleConsumer
    from cometmq.client.compression import Compression
    from cometmq.client.connection import Credentials
    from cometmq.client.handling import Later
    from cometmq.client.outgoing import split_batch
    from cometmq.client.received import ReceivedMessage
    from cometmq.client.transaction import Outcome
    from cometmq.message import Message, MessageQueue, SendResult, SendStatus

__version__ = "0.1.0"

_HOMES = {
    "Admin": "client.blocking_admin",
    "Compression": "client.compression",
    "Consumer": "client.blocking",
    "Credentials": "client.connection",
    "Later": "client.handling",
    "Message": "message",
    "MessageQueue": "message",
    "Outcome": "client.transaction",
    "Producer": "client.blocking",
    "PullConsumer": "client.blocking_pull",
    "ReceivedMessage": "client.received",
    "SendResult": "message",
    "SendStatus": "message",
    "SimpleConsumer": "client.blocking_pull",
    "TransactionProducer": "client.blocking",
    "split_batch": "client.outgoing",
}

__all__ = [
    "Admin",
    "CometError",
    "Compression",
    "Consumer",
    "Credentials",
    "Later",
    "Message",
    "MessageQueue",
    "Outcome",
    "Producer",
    "PullConsumer",
    "ReceivedMessage",
    "SendResult",
    "SendStatus",
    "SimpleConsumer",
    "TransactionProducer",
    "__version__",
    "split_batch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cometmq' has no attribute {name!r}")
    value = getattr(import_module(f"cometmq.{home}"), name)
    globals()[name] = value
    return value
