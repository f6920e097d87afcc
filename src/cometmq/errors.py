"""Every error CometMQ raises on purpose.

Owns: the error tree. One rule: an error carries data (code, key, path, offsets) in typed fields;
its text names what was tried, the value that was wrong and the way out. Whoever decides whether to
try again reads `retriable`, never the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar


class CometError(Exception):
    """The root: `except CometError` catches all that CometMQ raises on purpose."""

    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Callable[..., CometError], tuple[object, ...]]:
        """Whole in another process, too. Python itself would call the class with the text alone."""
        return _made_again, (type(self), self.args, dict(self.__dict__))


def _made_again(
    kind: type[CometError], arguments: tuple[object, ...], fields: dict[str, object]
) -> CometError:
    """An error as it was, without the constructor that made its text."""
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(fields)
    return error


class UsageError(CometError, ValueError):
    """The caller's mistake, found before any byte left the process."""


class WireError(CometError):
    """The peer's bytes break the format. The connection can't be understood any further."""


class FrameError(WireError):
    """The length words of a frame don't make sense or pass the limit."""


class HeaderError(WireError):
    """The header of a frame can't be decoded."""


class BodyError(WireError):
    """A JSON or binary body can't be decoded."""


class RecordCorrupt(WireError):
    """A stored message's bytes contradict themselves."""


class RequestRefused(CometError):
    """The server's "no": a response code and a remark that says why."""

    def __init__(self, code: int, remark: str, ext: dict[str, str] | None = None) -> None:
        super().__init__(f"refused with code {code}: {remark}")
        self.code = code
        self.remark = remark
        self.ext = ext


class ConnectionLost(CometError):
    """The connection ended before an answer came; the request may or may not have been done."""

    retriable = True


class Unreachable(ConnectionLost):
    """No connection could be made, or it had ended before: the request was certainly not done."""


class RequestTimeout(CometError):
    """No answer in time; the request may or may not have been done."""

    retriable = True


class NoRoute(CometError):
    """Nobody can say where a topic's queues are; `reason` tells which of the causes it is."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"no route for topic {topic!r}: {reason}")
        self.topic = topic
        self.reason = reason


class SendFailed(CometError):
    """A message was not acknowledged. `attempts` says what each try came to; `code` is the last
    refusal's; `is_maybe_stored`: one of them may have been stored although no answer came."""

    def __init__(
        self, text: str, attempts: list[str], *, code: int | None, is_maybe_stored: bool
    ) -> None:
        super().__init__(text)
        self.attempts = attempts
        self.code = code
        self.is_maybe_stored = is_maybe_stored


class WindowFull(CometError):
    """Too many sends are under way; nothing was sent. Wait for some, or raise the window."""

    retriable = True


class StoreError(CometError):
    """Something is wrong with what is on disk or with writing it."""


class StoreCorrupt(StoreError):
    """Files on disk contradict the format and can't be repaired by cutting a tail."""


class StoreLocked(StoreError):
    """Another process has this store open."""


class StoreFull(StoreError):
    """No room, or a limit of the store is reached; nothing was written."""


class StoreBusy(StoreError):
    """The store can't take more at this moment; nothing was written, and soon it can."""

    retriable = True


class MessageIllegal(StoreError):
    """A message breaks a limit of the store (body, properties, topic); nothing was written."""


class StoreReadOnly(StoreError):
    """The store refuses to write (failed flush, disk full, shutting down); nothing was written."""


class ConfigError(CometError):
    """A setting is wrong: names the key, the value and what would be right."""


class DataLost(CometError):
    """Messages that were to be read are not there any more: `begin` to `end` of `queue`, or from
    `begin` on if nobody knows how many there were (then `end` is the same)."""

    def __init__(self, queue: str, begin: int, end: int, why: str) -> None:
        which = f"from offset {begin} to {end - 1}" if end > begin else f"from offset {begin} on"
        self.what = f"messages of {queue} {which} are lost: {why}"
        super().__init__(
            f"{self.what}. To go on without them set failOnDataLoss=false; to begin anew, use "
            "another checkpoint"
        )
        self.queue = queue
        self.begin = begin
        self.end = end
        self.why = why
