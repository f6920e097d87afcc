"""CometMQ: RocketMQ's system in Python.

Owns: the public names. One rule: importing `cometmq` stays cheap, so nothing here pulls in a
server, a client or a framework.
"""

from cometmq.errors import CometError

__version__ = "0.1.0"

__all__ = ["CometError", "__version__"]
