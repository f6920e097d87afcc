"""Connections of an executor's worker: many pulls at once on one socket.

Owns: the sockets of this process that are not in use, and the shape of a pull on the wire. One
rule: a connection is kept for the next task only if every answer on it has been read.

A worker process serves task after task, so a kept connection saves each of them a connect. Pulls
are asked for in advance, dozens at a time, because a broker as shipped gives 32 messages for each
and a round trip for every 32 would be most of the time.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time

from cometmq.client.connection import MAX_ANSWER_BYTES, Credentials
from cometmq.client.reading import Filter
from cometmq.errors import ConnectionLost, RequestTimeout, Unreachable
from cometmq.message import MessageQueue
from cometmq.spark.gather import COMPILED
from cometmq.spark.tls import Access
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode
from cometmq.wire.frame import Frame, FrameReader, encode_frame
from cometmq.wire.headers import PullHeader, to_ext

RECEIVE_BYTES = 1 << 19
MOST_SENT_BYTES = 40 * 1024  # at once; the least that a receiving socket holds is 64 KiB
MOST_KEPT = 16  # connections; a worker talks to one broker or a few
_OFFSET, _COUNT, _OPAQUE = 7_777_777_777_777_777_777, 1_999_999_991, 1_888_888_887
_MOST_OPAQUE = 2**31 - 1
_LENGTHS = struct.Struct(">II").pack

Pull = tuple[int, int, int]
"""Offset, count, and id of the request."""
Answer = tuple[int, int, int, int, bytes, Frame | None]
"""To a pull: id of the request, next offset, lowest, highest, body. Or, if it is not simply that
all went well, the frame in the last place, and nothing but the id before it."""


class Link:
    """One blocking connection to a broker, for one task at a time."""

    def __init__(self, address: str, access: Access, timeout_ms: int) -> None:
        self.address = address
        self.access = access
        self.timeout_s = timeout_ms / 1e3
        self.credentials: Credentials | None = access.credentials()
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._opaque = 0
        self.waiting = 0
        """Requests without an answer yet."""
        host, _, port = address.rpartition(":")
        try:
            plain = socket.create_connection((host.strip("[]"), int(port)), self.timeout_s)
        except OSError as error:
            raise Unreachable(f"TCP connect to {address} failed: {error}") from None
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = plain
        context = access.context()
        if context is not None:
            try:
                self._socket = context.wrap_socket(plain, server_hostname=host.strip("[]"))
            except (OSError, ssl.SSLError) as error:
                plain.close()
                raise Unreachable(f"TLS with {address} failed: {error}") from None

    def close(self) -> None:
        self._socket.close()

    def is_fresh(self) -> bool:
        """Whether it is still open, with nothing on it that nobody asked for."""
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable

    def next_opaque(self) -> int:
        self._opaque = self._opaque + 1 if self._opaque < _MOST_OPAQUE else 1
        return self._opaque

    def send(self, requests: bytes, count: int) -> None:
        """All at once. They must be so few that the other side's buffer holds them: it may be
        busy writing to us."""
        self.waiting += count
        try:
            self._socket.sendall(requests)
        except OSError as error:
            raise ConnectionLost(f"connection to {self.address} lost: {error}") from None

    def receive(self) -> list[Answer]:
        """The next answers, at least one, to whichever requests."""
        give_up = time.monotonic() + self.timeout_s
        while True:
            left = give_up - time.monotonic()
            if left <= 0:
                raise RequestTimeout(
                    f"no answer from {self.address} in {self.timeout_s * 1e3:.0f} ms "
                    "(requestTimeout)"
                )
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                raise ConnectionLost(f"connection to {self.address} lost: {error}") from None
            if not data:
                raise ConnectionLost(f"connection closed by {self.address}")
            answers = self._answers(data)
            if answers:
                self.waiting -= len(answers)
                return answers

    def _answers(self, data: bytes) -> list[Answer]:
        reader = self._reader
        whole = reader.join(data)
        if whole is None:
            return []
        found: list[Answer] = []
        at = 0
        if COMPILED is not None:
            found, at = COMPILED.pull_answers(whole, MAX_ANSWER_BYTES)
        # What is no answer is a word to a member of a group, which we are not.
        found += [answer_of(one) for one in reader.split(whole, at) if one.is_response]
        if reader.error is not None:
            raise reader.error
        return found


def answer_of(frame: Frame) -> Answer:
    """The same by the plain way."""
    ext = frame.ext
    if frame.code == ResponseCode.SUCCESS:
        try:
            numbers = int(ext["nextBeginOffset"]), int(ext["minOffset"]), int(ext["maxOffset"])
        except (KeyError, ValueError):
            pass  # whoever asked says what is wrong
        else:
            return frame.opaque, *numbers, frame.body, None
    return frame.opaque, 0, 0, 0, b"", frame


class Links:
    """Connections of this process that wait for their next use."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Access], list[Link]] = {}
        self._count = 0
        self._pid = os.getpid()

    def take(self, address: str, access: Access, timeout_ms: int) -> Link:
        """A connection for the caller alone."""
        if self._pid != os.getpid():  # forked: these sockets are our parent's
            self._kept, self._count, self._pid = {}, 0, os.getpid()
        kept = self._kept.get((address, access))
        while kept:
            self._count -= 1
            link = kept.pop()
            if link.is_fresh():
                link.timeout_s = timeout_ms / 1e3
                return link
            link.close()
        return Link(address, access, timeout_ms)

    def give_back(self, link: Link) -> None:
        """Keep it if nothing is on its way on it; else it is closed."""
        if link.waiting or self._count >= MOST_KEPT:
            link.close()
            return
        self._kept.setdefault((link.address, link.access), []).append(link)
        self._count += 1


links = Links()
"""Those of this process. Module state on purpose: that is what outlives a task in a worker."""


class PullRequest:
    """Pulls of one queue with one filter; only offset, count and id differ from one to the next."""

    def __init__(self, group: str, queue: MessageQueue, wanted: Filter) -> None:
        self._ext = to_ext(
            PullHeader(
                consumerGroup=group,
                topic=queue.topic,
                queueId=queue.queue_id,
                queueOffset=_OFFSET,
                maxMsgNums=_COUNT,
                sysFlag=PullFlag.SUBSCRIPTION,
                subscription=wanted.text,
                expressionType=wanted.kind,
                withExpired=True,
            )
        )
        # The frame is made once by the codec itself, with numbers that stand for those to come.
        raw = encode_frame(Frame(RequestCode.PULL_MESSAGE, _OPAQUE, ext=self._ext))
        head = raw[8:]
        pieces = []
        for number in (_OFFSET, _COUNT, _OPAQUE):  # in this order, as the codec writes them
            assert head.count(b"%d" % number) == 1, "a text of the request contains our marks"
            before, _, head = head.partition(b"%d" % number)
            pieces.append(before)
        self._pieces = (*pieces, head)
        self.most_at_once = max(1, MOST_SENT_BYTES // (len(raw) + 150))  # 150: a signature
        """So many requests fit into what a socket's buffer holds for sure."""

    def encode(self, link: Link, pulls: list[Pull]) -> bytes:
        """Requests for so many messages from these offsets on, one behind the other."""
        if link.credentials is not None:
            return b"".join(self._signed(link.credentials, *pull) for pull in pulls)
        if COMPILED is not None:
            found: bytes = COMPILED.pull_requests(self._pieces, pulls)
            return found
        return plain_requests(self._pieces, pulls)

    def _signed(self, credentials: Credentials, offset: int, count: int, opaque: int) -> bytes:
        ext = {**self._ext, "queueOffset": str(offset), "maxMsgNums": str(count)}
        ext = credentials.sign(ext, b"")
        return encode_frame(Frame(RequestCode.PULL_MESSAGE, opaque, ext=ext))


def plain_requests(pieces: tuple[bytes, ...], pulls: list[Pull]) -> bytes:
    """Frames with JSON headers: these pieces, and the numbers of a pull between them."""
    frames = []
    first, second, third, last = pieces
    for offset, count, opaque in pulls:
        head = b"%b%d%b%d%b%d%b" % (first, offset, second, count, third, opaque, last)
        # Length of what follows, then the header's: serialization 0 (JSON) is its first byte.
        frames.append(_LENGTHS(len(head) + 4, len(head)) + head)
    return b"".join(frames)
