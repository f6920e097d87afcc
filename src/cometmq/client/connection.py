"""One connection to a server, and all connections of one client.

Owns: sockets, request ids, matching answers to requests, their deadlines. One rule: whoever asked
is always told: by the answer, by the deadline, or by the end of the connection, exactly once.

Requests of one turn of the loop leave in one write. Requests that the server makes of us arrive on
the same socket; they are handed to `on_request`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import ssl
import struct
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from cometmq.errors import ConnectionLost, RequestRefused, RequestTimeout, Unreachable
from cometmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE
from cometmq.wire.frame import Frame, FrameReader, encode_frame

log = logging.getLogger("cometmq.client")

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # a pull of many large messages; beyond, the server is broken
SWEEP_S = 0.05  # how exact a deadline is
MAX_OPAQUE = 2**31 - 1
CLOSE_ROUNDS = 100  # of a millisecond, for what was written to leave; then again for the rest


class Waiter(Protocol):
    """Who made a request; one of the two is called, once, and never before `ask_raw` returned."""

    ends: float
    """When to stop waiting, by the loop's clock."""

    def answered(self, frame: Frame) -> None: ...
    def failed(self, error: Exception) -> None: ...


class Stored(msgspec.Struct, gc=False, rename={"region": "MSG_REGION", "trace_on": "TRACE_ON"}):
    """What a broker tells of a message that it has stored."""

    msgId: str  # noqa: N815 - the wire's own names
    queueId: int  # noqa: N815
    queueOffset: int  # noqa: N815
    transactionId: str | None = None  # noqa: N815
    recallHandle: str | None = None  # noqa: N815
    region: str | None = None
    trace_on: str | None = None
    duplicate: str | None = None


class SendWaiter(Waiter, Protocol):
    """Who sent a message, and is told without a Frame in between if all is well."""

    def stored(self, told: Stored) -> None: ...


class _SendAnswer(msgspec.Struct, gc=False):
    """A send's answer, as far as the quick way looks at it."""

    code: int
    flag: int
    opaque: int
    extFields: Stored  # noqa: N815


_decode_send_answer = msgspec.json.Decoder(_SendAnswer, strict=False).decode
_LENGTHS = struct.Struct(">ii")
_pack_lengths = _LENGTHS.pack
MOST_QUICK_HEADER_BYTES = 64 * 1024


class Credentials(msgspec.Struct, frozen=True):
    """RocketMQ's ACL: an access key, and the secret that signs every request."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r}, secret_key=...)"

    def sign(self, ext: dict[str, str], body: bytes) -> dict[str, str]:
        """The fields with AccessKey and Signature; nothing may be added to them afterwards."""
        signed = {**ext, "AccessKey": self.access_key}
        if self.security_token:
            signed["SecurityToken"] = self.security_token
        content = "".join(signed[name] for name in sorted(signed)).encode() + body
        digest = hmac.new(self.secret_key.encode(), content, hashlib.sha1).digest()
        signed["Signature"] = base64.b64encode(digest).decode()
        return signed


class FutureWaiter:
    """A request whose answer is awaited."""

    __slots__ = ("ends", "future", "timeout_ms")

    def __init__(self, future: asyncio.Future[Frame], timeout_ms: int, ends: float) -> None:
        self.future = future
        self.timeout_ms = timeout_ms
        self.ends = ends

    def answered(self, frame: Frame) -> None:
        if not self.future.done():
            self.future.set_result(frame)

    def failed(self, error: Exception) -> None:
        if not self.future.done():
            if isinstance(error, RequestTimeout):
                error = RequestTimeout(f"{error} ({self.timeout_ms} ms)")
            self.future.set_exception(error)


class Connection(asyncio.Protocol):
    """An open connection. After `is_open` turned false it never comes back."""

    def __init__(
        self,
        address: str,
        credentials: Credentials | None,
        on_request: Callable[[Connection, Frame], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.address = address
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._credentials = credentials
        self._on_request = on_request
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._waiters: dict[int, Waiter] = {}
        self._sends: dict[int, SendWaiter] = {}
        """Those of the waiters that `send` made."""
        self._opaque = 0
        self._out: list[bytes] = []
        self._is_reading = False
        """What is written now leaves when all that has arrived was read; else in the next turn."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._why_closed = ""

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Connection {self.address} {state} waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        """Requests without an answer yet."""
        return len(self._waiters) + len(self._sends)

    # -------------------------------------------------------------------------------------- asking

    def next_opaque(self) -> int:
        self._opaque = self._opaque + 1 if self._opaque < MAX_OPAQUE else 1
        return self._opaque

    def ask_raw(self, opaque: int, data: bytes, waiter: Waiter) -> None:
        """Send a frame that was encoded with an id of `next_opaque`."""
        if not self.is_open:  # gone between the connect and now
            self._loop.call_soon(waiter.failed, self._lost("is closed", was_sent=False))
            return
        self._waiters[opaque] = waiter
        self._write(data)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def send(
        self, header: bytes, born_ms: int, properties: bytes, body: bytes, waiter: SendWaiter
    ) -> None:
        """An ordinary send on an open connection: `header` is of SendTemplate.plain."""
        self._opaque = opaque = self._opaque + 1 if self._opaque < MAX_OPAQUE else 1
        head = header % (born_ms, properties, opaque)
        size = len(head)
        self._sends[opaque] = waiter  # not before there is something to be written
        out = self._out
        if not out:
            self._flush_soon()
            if self._sweeper is None:
                self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        out += (_pack_lengths(4 + size + len(body), size), head, body)

    def frame(
        self, code: int, ext: dict[str, str], body: bytes, *, opaque: int, flag: int = 0
    ) -> bytes:
        """A request as it goes out, signed if this client has credentials."""
        if self._credentials is not None:
            ext = self._credentials.sign(ext, body)
        return encode_frame(Frame(code=code, opaque=opaque, flag=flag, ext=ext, body=body))

    def request(
        self, code: int, ext: dict[str, str], body: bytes, timeout_ms: int
    ) -> asyncio.Future[Frame]:
        """The answer, whatever its code; ConnectionLost or RequestTimeout."""
        future: asyncio.Future[Frame] = self._loop.create_future()
        if not self.is_open:
            future.set_exception(self._lost("is closed", was_sent=False))
            return future
        opaque = self.next_opaque()
        data = self.frame(code, ext, body, opaque=opaque)
        ends = self._loop.time() + timeout_ms / 1e3
        self.ask_raw(opaque, data, FutureWaiter(future, timeout_ms, ends))
        return future

    def oneway(self, code: int, ext: dict[str, str], body: bytes = b"") -> None:
        """A request that is never answered; dropped if the connection has just gone."""
        if self.is_open:
            opaque = self.next_opaque()
            self._write(self.frame(code, ext, body, opaque=opaque, flag=FLAG_ONEWAY))

    def reply(self, frame: Frame) -> None:
        """Answer a request of the server."""
        if self.is_open:
            self._write(encode_frame(frame))

    async def drained(self) -> None:
        """Wait while the other side reads slower than we write."""
        await self._can_write.wait()

    def close(self, reason: str = "closed by us") -> None:
        self._why_closed = self._why_closed or reason
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting until what was written has left."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if not self._out:
            self._flush_soon()
        self._out.append(data)

    def _flush_soon(self) -> None:
        if not self._is_reading:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _sweep(self) -> None:
        now = self._loop.time()
        for waiters in (self._waiters, self._sends):
            late = [opaque for opaque, waiter in waiters.items() if waiter.ends <= now]
            for opaque in late:
                waiters.pop(opaque).failed(RequestTimeout(f"no answer from {self.address} in time"))
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self.waiting else None

    def _lost(self, how: str, *, was_sent: bool) -> ConnectionLost:
        text = f"connection to {self.address} {how}"
        return ConnectionLost(text) if was_sent else Unreachable(text)

    # ------------------------------------------------------------------------------------ protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        whole = self._reader.join(data)
        if whole is None:
            return
        self._is_reading = True
        try:
            self._read(whole)
        finally:
            self._is_reading = False
            self._flush()

    def _read(self, whole: bytes) -> None:
        at = self._settle_sends(whole) if self._sends else 0
        for frame in self._reader.split(whole, at):
            if frame.is_response:
                found = self._waiters.pop(frame.opaque, None) or self._sends.pop(frame.opaque, None)
                if found is not None:
                    found.answered(frame)
            else:
                self._on_request(self, frame)
        if self._reader.error is not None:
            self._why_closed = f"sent what can't be understood: {self._reader.error}"
            assert self._transport is not None
            self._transport.abort()

    def _settle_sends(self, data: bytes) -> int:
        """Tell the senders of messages that were stored; returns where the first frame begins that
        says anything else, or is not whole: that one, and what follows, goes the plain way."""
        sends, unpack, decode = self._sends, _LENGTHS.unpack_from, _decode_send_answer
        at, end = 0, len(data)
        while end - at >= 8:
            length, size = unpack(data, at)
            begin, stop = at + 8, at + 4 + length
            # A body, another serialization, or a strange length: not a send's answer.
            if length != size + 4 or not 0 < size <= MOST_QUICK_HEADER_BYTES or stop > end:
                break
            try:
                answer = decode(data[begin:stop])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                break
            if answer.code or not answer.flag & FLAG_RESPONSE or answer.opaque not in sends:
                break
            at = stop
            sends.pop(answer.opaque).stored(answer.extFields)
        return at

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._can_write.set()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        why = self._why_closed or (f"broke: {error}" if error is not None else "was closed by it")
        waiters: list[Waiter] = [*self._waiters.values(), *self._sends.values()]
        self._waiters, self._sends = {}, {}
        for waiter in waiters:
            waiter.failed(self._lost(why, was_sent=True))
        self._on_lost(self)


class Connections:
    """The connections of one client, one for each address, opened when they are needed."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
        connect_timeout_ms: int = 3_000,
        on_request: Callable[[Connection, Frame], None] = lambda connection, frame: None,
        on_connected: Callable[[str], None] = lambda address: None,
    ) -> None:
        self._tls = tls
        self._credentials = credentials
        self._connect_timeout_ms = connect_timeout_ms
        self._on_request = on_request
        self._on_connected = on_connected
        self._open: dict[str, Connection] = {}
        self._dialling: dict[str, asyncio.Task[Connection]] = {}
        self._is_closed = False

    @property
    def is_signed(self) -> bool:
        return self._credentials is not None

    def known(self, address: str) -> Connection | None:
        """The open connection to an address, if there is one."""
        return self._open.get(address)

    async def get(self, address: str, advertised_by: str = "") -> Connection:
        """The connection to `host:port`; Unreachable says what was tried, and who told us of it."""
        found = self._open.get(address)
        if found is not None:
            return found
        task = self._dialling.get(address)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._dial(address))
            self._dialling[address] = task
            task.add_done_callback(lambda task: self._dialled(address, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if not task.cancelled() or (asker is not None and asker.cancelling()):
                raise
            # Not who asks was cancelled but the connecting, by our own close.
            raise Unreachable(f"TCP connect to {address} given up: this client is closed") from None
        except Unreachable as error:
            if not advertised_by:
                raise
            hint = f"{advertised_by} advertises that address (brokerIP1)"
            raise Unreachable(f"{error}; {hint}") from None

    def _dialled(self, address: str, task: asyncio.Task[Connection]) -> None:
        del self._dialling[address]
        if not task.cancelled():
            task.exception()  # who waited may be gone; then this is not worth a word

    async def _dial(self, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        if self._is_closed:
            raise Unreachable(f"TCP connect to {address} not tried: this client is closed")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise Unreachable(f"{address!r} is not an address: expected host:port")
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl": self._tls, "server_hostname": host.strip("[]")}
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1e3):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(address, self._credentials, self._on_request, self._forget),
                    host.strip("[]"),
                    int(port),
                    **options,
                )
        except TimeoutError:
            what = "TCP connect to" if self._tls is None else "TCP connect to, or TLS with,"
            text = f"{what} {address} got no answer in {self._connect_timeout_ms} ms"
            raise Unreachable(text) from None
        except ConnectionRefusedError:
            raise Unreachable(f"TCP connect to {address} refused") from None
        except OSError as error:
            # Who hangs up in the middle of it does not speak TLS, or not with us.
            is_hung_up = isinstance(error, (ConnectionResetError, ConnectionAbortedError))
            is_tls = isinstance(error, ssl.SSLError) or (is_hung_up and self._tls is not None)
            what = "TLS with" if is_tls else "TCP connect to"
            raise Unreachable(f"{what} {address} failed: {error}") from None
        if self._is_closed:
            connection.abort()
            raise Unreachable(f"TCP connect to {address} not used: this client is closed")
        if not connection.is_open:  # `_forget` has been called already: it must not be kept
            raise connection._lost("ended as soon as it was made", was_sent=False)
        self._open[address] = connection
        log.debug("connected address=%s", address)
        self._on_connected(address)
        return connection

    def _forget(self, connection: Connection) -> None:
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]

    async def request(
        self,
        address: str,
        code: int,
        ext: dict[str, str],
        body: bytes = b"",
        *,
        timeout_ms: int = 3_000,
        advertised_by: str = "",
    ) -> Frame:
        """The answer of a server, whatever its code."""
        connection = await self.get(address, advertised_by)
        return await connection.request(code, ext, body, timeout_ms)

    async def call(
        self,
        address: str,
        code: int,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int = 3_000,
        advertised_by: str = "",
    ) -> Frame:
        """The answer of a server; RequestRefused unless its code is 0."""
        answer = await self.request(
            address, code, ext or {}, body, timeout_ms=timeout_ms, advertised_by=advertised_by
        )
        if answer.code != 0:
            raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        return answer

    async def close(self) -> None:
        self._is_closed = True
        for task in list(self._dialling.values()):
            task.cancel()
        for connection in list(self._open.values()):
            connection.close()
        # Their ends are told by the loop; rounds let it, so that no socket is left behind. One
        # whose other side reads no more would wait for ever to be rid of what was written.
        for number in range(2 * CLOSE_ROUNDS):
            if not self._open and not self._dialling:
                return
            if number == CLOSE_ROUNDS:
                for connection in list(self._open.values()):
                    connection.abort()
            await asyncio.sleep(0.001)
