"""The asyncio clients.

Owns: their public names, the same as in `cometmq`. One rule: each client lives on the event loop it
was started on.

    from cometmq.aio import Consumer, Producer
    from cometmq import Message

    async with Producer("shop", namesrv="127.0.0.1:9876") as producer:
        await producer.send(Message("orders", b"..."))
"""

from cometmq.client.admin import Admin
from cometmq.client.consumer import Consumer
from cometmq.client.producer import Producer
from cometmq.client.pull_consumer import PullConsumer
from cometmq.client.simple_consumer import SimpleConsumer
from cometmq.client.transaction import TransactionProducer

__all__ = [
    "Admin",
    "Consumer",
    "Producer",
    "PullConsumer",
    "SimpleConsumer",
    "TransactionProducer",
]
