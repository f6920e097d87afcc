"""What a handler says about a message, and calling plain user code from the loop.

Owns: the words for "again, later". One rule: returning anything else acknowledges; raising asks for
redelivery; a cancelled or interrupted handler says nothing, and the message stays unacknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

G = TypeVar("G")
T = TypeVar("T")

EXITS = (KeyboardInterrupt, SystemExit)
"""What ends a program. asyncio stops its loop when one leaves a task, whoever else runs there."""


async def on_thread(act: Callable[[G], T], given: G) -> T:
    """Call it on another thread; raises what it raises.

    The error comes back as a value: a future that got StopIteration would never end.
    """

    def run() -> tuple[list[T], BaseException | None]:
        try:
            return [act(given)], None
        except BaseException as error:
            return [], error

    found, error = await asyncio.to_thread(run)
    if error is not None:
        raise error
    return found[0]


class Later(msgspec.Struct, frozen=True):
    """Returned by a handler: deliver this message again.

    `delay_level`: 0 lets the broker choose (longer with each time); 1 to 18 are RocketMQ's levels;
    -1 sends it to the group's dead letters at once. In ordered consumption `delay_ms` is how long
    the queue waits.
    """

    delay_level: int = 0
    delay_ms: int = 1_000
