"""The smallest client: one blocking connection that asks and waits.

Owns: a socket, request ids, and matching answers to requests. One rule: it is for scripts, tests
and start-up work, from one thread; producers and consumers are more than this.
"""

from __future__ import annotations

import socket
import time

from cometmq.errors import ConnectionLost, RequestRefused, RequestTimeout
from cometmq.wire.codes import FLAG_ONEWAY
from cometmq.wire.frame import JSON, MAX_FRAME_BYTES, Frame, FrameReader, encode_frame


class Remote:
    """A connection to a name server or a broker."""

    def __init__(
        self, address: str, *, timeout_ms: int = 3_000, serialize: int = JSON, version: int = 479
    ) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self._timeout_ms = timeout_ms
        self._serialize = serialize
        self._version = version
        self._opaque = 0
        self._reader = FrameReader(4 * MAX_FRAME_BYTES)
        self._answers: dict[int, Frame] = {}
        self.pushed: list[Frame] = []
        """Requests that the server sent us, e.g. NOTIFY_CONSUMER_IDS_CHANGED."""
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout_ms / 1e3)
        except OSError as error:
            raise ConnectionLost(f"TCP connect to {address} failed: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(
        self, code: int, ext: dict[str, str] | None = None, body: bytes = b"", *, flag: int = 0
    ) -> int:
        """Send a request; returns its id for `wait`."""
        self._opaque += 1
        frame = Frame(
            code=code,
            opaque=self._opaque,
            flag=flag,
            version=self._version,
            ext=ext or {},
            body=body,
            serialize=self._serialize,
        )
        try:
            self._socket.sendall(encode_frame(frame))
        except OSError as error:
            raise ConnectionLost(f"connection to {self.address} lost: {error}") from error
        return self._opaque

    def oneway(self, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> None:
        """Send a request that is not answered."""
        self.send(code, ext, body, flag=FLAG_ONEWAY)

    def wait(self, opaque: int, timeout_ms: int | None = None) -> Frame:
        """The answer to a request, whatever its code."""
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        give_up = time.monotonic() + limit_ms / 1e3
        while opaque not in self._answers:
            self._receive(give_up, f"no answer from {self.address} in {limit_ms} ms")
        return self._answers.pop(opaque)

    def wait_pushed(self, timeout_ms: int) -> Frame:
        """The next request that the server sends us."""
        give_up = time.monotonic() + timeout_ms / 1e3
        while not self.pushed:
            self._receive(give_up, f"{self.address} sent nothing in {timeout_ms} ms")
        return self.pushed.pop(0)

    def ask(
        self,
        code: int,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int | None = None,
    ) -> Frame:
        """Send and wait; the answer may carry any code."""
        return self.wait(self.send(code, ext, body), timeout_ms)

    def call(
        self,
        code: int,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int | None = None,
    ) -> Frame:
        """Send and wait; RequestRefused unless the answer's code is 0."""
        answer = self.ask(code, ext, body, timeout_ms=timeout_ms)
        if answer.code != 0:
            raise RequestRefused(answer.code, answer.remark or "no remark", answer.ext)
        return answer

    def _receive(self, give_up: float, otherwise: str) -> None:
        left = give_up - time.monotonic()
        if left <= 0:
            raise RequestTimeout(otherwise)
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError:
            raise RequestTimeout(otherwise) from None
        except OSError as error:
            raise ConnectionLost(f"connection to {self.address} lost: {error}") from error
        if not data:
            raise ConnectionLost(f"connection closed by {self.address}")
        for frame in self._reader.feed(data):
            if frame.is_response:
                self._answers[frame.opaque] = frame
            else:
                self.pushed.append(frame)
        if self._reader.error is not None:
            raise self._reader.error
