"""What a handler says about a message.

Owns: the words for "again, later". One rule: returning anything else acknowledges; raising asks for
redelivery; a cancelled or interrupted handler says nothing, and the message stays unacknowledged.
"""

from __future__ import annotations

import msgspec


class Later(msgspec.Struct, frozen=True):
    """Returned by a handler: deliver this message again.

    `delay_level`: 0 lets the broker choose (longer with each time); 1 to 18 are RocketMQ's levels;
    -1 sends it to the group's dead letters at once. In ordered consumption `delay_ms` is how long
    the queue waits.
    """

    delay_level: int = 0
    delay_ms: int = 1_000
