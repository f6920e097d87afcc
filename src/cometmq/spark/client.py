"""Connections of an executor's worker: many pulls at once on one socket.

Owns: the sockets of this process that are not in use, and the shape of a pull on the wire. One
rule: a connection is kept for the next task only if every answer on it has been read.

A worker process serves task after task, so a kept connection saves each of them a connect. Pulls
are asked for in advance, dozens at a time, because a broker as shipped gives 32 messages for each
and a round trip for every 32 would be most of the time. For the same reason nothing is done in
Python for each: a `Stretch` of them is asked for, and noted as answered, as a whole.

What comes stays where it was received, in buffers of a few megabytes, until columns are made of it:

    buffer   |frame|frame|frame| ... |frame|fra            a frame that has no room left
    next     |frame|frame| ...                             begins the next buffer
                ^ a piece: the body of a frame
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from cometmq.client.connection import MAX_ANSWER_BYTES, Credentials
from cometmq.client.reading import Filter
from cometmq.errors import ConnectionLost, RequestTimeout, Unreachable
from cometmq.message import MessageQueue
from cometmq.spark.gather import COMPILED, Data, Ints, Piece
from cometmq.spark.tls import Access
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode
from cometmq.wire.frame import Frame, FrameReader, encode_frame
from cometmq.wire.headers import PullHeader, to_ext

BUFFER_BYTES = 3 * 1024 * 1024  # 8,192 messages of 128 bytes with all their heads: one batch
LEAST_ROOM = 16 * 1024  # to receive into
MOST_SENT_BYTES = 56 * 1024  # at once; the least that a receiving socket holds is 64 KiB
MOST_KEPT = 16  # connections; a worker talks to one broker or a few
_OFFSET, _COUNT, _OPAQUE = 7_777_777_777_777_777_777, 1_999_999_991, 1_888_888_887
_MOST_OPAQUE = 2**31 - 1
_LENGTHS = struct.Struct(">II").pack

Pull = tuple[int, int, int]
"""Offset, count, and id of the request."""
Answer = tuple[int, int, int, int, Piece, Frame | None]
"""To a pull: id of the request, next offset, lowest, highest, body. Or, if it is not simply that
all went well, the frame in the last place, and nothing but the id before it."""
_NO_PLACES: Ints = np.empty(0, np.int64)


class Stretch:
    """Pulls of `step` messages, one behind the other from an offset on. They are expected to be
    answered each with just those, which is nearly always so."""

    __slots__ = ("begin", "count", "data", "ends", "first", "left", "places", "step")

    def __init__(self, begin: int, step: int, count: int) -> None:
        self.begin = begin
        self.step = step
        self.count = count
        self.ends: Ints = np.arange(1, count + 1, dtype=np.int64) * step + begin
        self.first = 0
        """Id of the first request; the others follow."""
        self.places: Ints = np.full(2 * count, -1, np.int64)
        """Begin and end of each body in the buffer, in turn; -1 as long as there is no answer."""
        self.data: Data | None = None
        """That buffer, of all of them."""
        self.left = count

    @property
    def end(self) -> int:
        return self.begin + self.step * self.count

    def pulls(self) -> list[Pull]:
        begins = range(self.begin, self.end, self.step)
        ids = range(self.first, self.first + self.count)
        return list(zip(begins, repeat(self.step), ids, strict=False))

    def split(self) -> Stretch | None:
        """Keep what is answered; the rest as another, or None if that is not all behind it."""
        done = self.count - self.left
        if (self.places[: 2 * done] < 0).any():
            return None
        rest = Stretch(self.begin + done * self.step, self.step, self.left)
        rest.first = self.first + done
        self.count, self.left = done, 0
        self.ends, self.places = self.ends[:done], self.places[: 2 * done]
        return rest


class Link:
    """One blocking connection to a broker, for one task at a time."""

    def __init__(self, address: str, access: Access, timeout_ms: int) -> None:
        self.address = address
        self.access = access
        self.timeout_s = timeout_ms / 1e3
        self._data = np.empty(0, np.uint8)
        self._begin = 0
        """In the buffer: where the next frame begins, and where what was received ends."""
        self._end = 0
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

    def next_opaques(self, count: int = 1) -> int:
        """The first of so many ids."""
        first = self._opaque + 1 if self._opaque + count <= _MOST_OPAQUE else 1
        self._opaque = first + count - 1
        return first

    def send(self, requests: bytes, count: int) -> None:
        """All at once. They must be so few that the other side's buffer holds them: it may be
        busy writing to us."""
        self.waiting += count
        try:
            self._socket.sendall(requests)
        except OSError as error:
            raise ConnectionLost(f"connection to {self.address} lost: {error}") from None

    def receive(self, stretches: list[Stretch]) -> list[Answer]:
        """The next answers, at least one, to whichever requests. Those of the last stretch that
        came as planned are noted there, and not returned; if they come into another buffer, the
        stretch is divided."""
        give_up = time.monotonic() + self.timeout_s
        while True:
            left = give_up - time.monotonic()
            if left <= 0:
                raise RequestTimeout(
                    f"no answer from {self.address} in {self.timeout_s * 1e3:.0f} ms "
                    "(requestTimeout)"
                )
            self._make_room()
            self._socket.settimeout(left)
            try:
                size = self._socket.recv_into(self._data[self._end :].data)
            except TimeoutError:
                continue
            except OSError as error:
                raise ConnectionLost(f"connection to {self.address} lost: {error}") from None
            if not size:
                raise ConnectionLost(f"connection closed by {self.address}")
            self._end += size
            noted, answers = self._answers(stretches)
            if noted or answers:
                self.waiting -= noted + len(answers)
                return answers

    def _make_room(self) -> None:
        """Another buffer if the frame that has begun, or will, does not fit into this one. What was
        received before stays as it is."""
        data, begin, end = self._data, self._begin, self._end
        need = LEAST_ROOM
        if end - begin >= 4:
            need = 4 + int.from_bytes(data[begin : begin + 4], "big")
        if begin + need <= len(data):
            return
        self._data = np.empty(max(BUFFER_BYTES, need), np.uint8)
        self._data[: end - begin] = data[begin:end]
        self._begin, self._end = 0, end - begin

    def _answers(self, stretches: list[Stretch]) -> tuple[int, list[Answer]]:
        """How many were noted, and the others."""
        data, end = self._data, self._end
        found: list[Answer] = []
        count = 0
        stretch = self._stretch_here(stretches)
        while True:
            if COMPILED is not None:
                plan: tuple[int, Ints, Ints] = 0, _NO_PLACES, _NO_PLACES
                if stretch is not None:
                    plan = stretch.first, stretch.ends, stretch.places
                noted, others, self._begin = COMPILED.take_answers(
                    data, self._begin, end, MAX_ANSWER_BYTES, *plan
                )
                found += others
                if noted:
                    assert stretch is not None
                    stretch.data = data
                    stretch.left -= noted
                    count += noted
            # What the compiled way left is not whole, or not simply an answer that all went well.
            frame = self._next_frame()
            if frame is None:
                return count, found
            if frame.is_response:  # if not: a word to a member of a group, which we are not
                found.append(answer_of(frame))

    def _stretch_here(self, stretches: list[Stretch]) -> Stretch | None:
        """The one whose answers are, or can be, in the buffer of now."""
        last = stretches[-1] if stretches else None
        if last is None or last.data is None or last.data is self._data:
            return last
        rest = last.split() if last.left else None
        if rest is not None:
            stretches.append(rest)
        return rest

    def _next_frame(self) -> Frame | None:
        """One by the codec; None if it is not whole yet."""
        begin = self._begin
        if self._end - begin < 4:
            return None
        behind = begin + 4 + int.from_bytes(self._data[begin : begin + 4], "big", signed=True)
        reader = FrameReader(MAX_ANSWER_BYTES)
        if begin + 8 <= behind <= begin + MAX_ANSWER_BYTES:
            if behind > self._end:
                return None
            frames = reader.feed(self._data[begin:behind].tobytes())
        else:  # no such length: the codec says so
            frames = reader.feed(self._data[begin : begin + 4].tobytes())
        if reader.error is not None:
            raise reader.error
        self._begin = behind
        return frames[0]


def answer_of(frame: Frame) -> Answer:
    """The same by the plain way."""
    ext = frame.ext
    if frame.code == ResponseCode.SUCCESS:
        try:
            numbers = int(ext["nextBeginOffset"]), int(ext["minOffset"]), int(ext["maxOffset"])
        except (KeyError, ValueError):
            pass  # whoever asked says what is wrong
        else:
            return frame.opaque, *numbers, (frame.body, 0, len(frame.body)), None
    return frame.opaque, 0, 0, 0, (b"", 0, 0), frame


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

    def __init__(
        self,
        group: str,
        queue: MessageQueue,
        wanted: Filter,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials
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
        if credentials is not None:
            raw = self._signed(credentials, _OFFSET, _COUNT, _OPAQUE)
        self.most_at_once = max(1, MOST_SENT_BYTES // len(raw))
        """So many requests fit into what a socket's buffer holds for sure."""

    def encode(self, stretches: Sequence[Stretch], pulls: list[Pull]) -> bytes:
        """Requests for stretches and single pulls, one behind the other."""
        if COMPILED is None or self._credentials is not None:
            pulls = [pull for stretch in stretches for pull in stretch.pulls()] + pulls
            if self._credentials is None:
                return plain_requests(self._pieces, pulls)
            return b"".join(self._signed(self._credentials, *pull) for pull in pulls)
        found = [
            COMPILED.stretch_requests(self._pieces, one.begin, one.step, one.count, one.first)
            for one in stretches
        ]
        return b"".join([*found, COMPILED.pull_requests(self._pieces, pulls)])

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
