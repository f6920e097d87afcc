"""How a core answers requests: the shape of its table, and the one place errors become answers.

Owns: Entry (a row of a core's request table), Call (what a handler is given), Reply (what it gives
back) and `serve`. One rule: a handler returns a Reply, returns None (it will answer later, or
nobody waits), or raises RequestRefused; only `serve` turns errors into frames.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from cometmq.errors import BodyError, HeaderError, RequestRefused
from cometmq.ports import ConnId, Out, Send
from cometmq.wire import headers
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame, reply_to

log = logging.getLogger("cometmq.requests")

CoreT = TypeVar("CoreT")


class Reply(msgspec.Struct, gc=False):
    """An answer before it is a frame."""

    code: int = 0
    remark: str | None = None
    ext: dict[str, str] = {}
    body: bytes = b""


class Call(msgspec.Struct, gc=False):
    """One request as a handler sees it."""

    conn: ConnId
    frame: Frame
    header: Any
    waited_ms: int
    now_ms: int
    out: Out

    def answer(self, reply: Reply, out: Out) -> None:
        """Send the answer, unless the request was oneway. `out` is that of the present turn."""
        if not self.frame.is_oneway:
            response = reply_to(self.frame, reply.code, reply.remark, reply.ext, reply.body)
            out.append(Send(self.conn, encode_frame(response)))


class Entry(Generic[CoreT]):
    """One row of a request table: how to read the header, and what to do."""

    __slots__ = ("handler", "parse")

    def __init__(
        self,
        handler: Callable[[CoreT, Call], Reply | None],
        header: type[msgspec.Struct] | Callable[[dict[str, str]], Any] | None = None,
    ) -> None:
        self.handler = handler
        if header is None:
            self.parse: Callable[[dict[str, str]], Any] = _no_header
        elif isinstance(header, type):
            kind = header
            self.parse = lambda ext: headers.parse(kind, ext)
        else:
            self.parse = header


def _no_header(ext: dict[str, str]) -> None:
    return None


class ServeStats(msgspec.Struct):
    """Counts of what `serve` saw."""

    requests: int = 0
    compiled: int = 0  # of these, done by the compiled path
    refused: int = 0
    unsupported: int = 0
    bugs: int = 0


def serve(
    core: CoreT,
    table: dict[int, Entry[CoreT]],
    conn: ConnId,
    frame: Frame,
    waited_ms: int,
    now_ms: int,
    out: Out,
    stats: ServeStats,
) -> None:
    """Find the handler, run it, answer. Oneway requests are never answered, not even errors."""
    stats.requests += 1
    call = Call(conn, frame, None, waited_ms, now_ms, out)
    entry = table.get(frame.code)
    if entry is None:
        stats.unsupported += 1
        remark = f" request type {frame.code} not supported"
        call.answer(Reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark), out)
        return
    reply: Reply | None
    try:
        call.header = entry.parse(frame.ext)
        reply = entry.handler(core, call)
    except RequestRefused as refused:
        stats.refused += 1
        reply = Reply(refused.code, refused.remark, refused.ext or {})
    except (HeaderError, BodyError) as error:
        stats.refused += 1
        reply = Reply(ResponseCode.INVALID_PARAMETER, f"{_name(frame.code)}: {error}")
    except Exception as error:
        stats.bugs += 1
        log.exception("bug code=%s conn=%s", _name(frame.code), conn)
        reply = Reply(
            ResponseCode.SYSTEM_ERROR,
            f"{_name(frame.code)} failed on the server: {type(error).__name__}: {error}",
        )
    if reply is not None:
        call.answer(reply, out)


def _name(code: int) -> str:
    try:
        return RequestCode(code).name
    except ValueError:
        return str(code)
