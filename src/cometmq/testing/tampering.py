"""TamperedCore: a core with faults around it, for the driver to run.

Owns: what is refused, answered otherwise, held back or never answered, and how far the core's clock
stands ahead. One rule: it speaks ports.Core on both sides and changes nothing but that: the core
inside is the real one and does not know, and neither does the driver.

A request that is watched for must not be taken by compiled code: while any fault is left, `receive`
takes nothing, and every frame comes through `handle`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import msgspec

from cometmq.ports import Close, ConnId, Core, Out, Peer, Send
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, encode_frame, frame_at, reply_to

_ANY_SIZE = 2**31 - 1  # our own answers: no limit is ours to check


class Refuse(msgspec.Struct, frozen=True):
    """Not executed, and answered so."""

    code: int
    remark: str


class Weaken(msgspec.Struct, frozen=True):
    """Executed; a success is answered with this code instead, and with all that it tells."""

    code: int
    remark: str


class HoldBack(msgspec.Struct, frozen=True):
    """Executed; the answer leaves so much later."""

    delay_ms: int


class Withhold(msgspec.Struct, frozen=True):
    """Executed and never answered."""


Act = Refuse | Weaken | HoldBack | Withhold


class Fault(msgspec.Struct, eq=False):
    """What becomes of some requests of one code. `hits` says how many it has met so far."""

    code: int
    act: Act
    after: int
    left: int
    hits: int = 0


class Faults:
    """The faults of one server or of several; those of one code act one after another."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    @property
    def is_any(self) -> bool:
        return bool(self._faults)

    def add(self, fault: Fault) -> None:
        if fault.left > 0:
            self._faults.append(fault)

    def clear(self) -> None:
        self._faults.clear()

    def meet(self, code: int) -> Act | None:
        """What is to become of a request that has just come; it is counted."""
        for fault in self._faults:
            if fault.code != code:
                continue
            if fault.after:
                fault.after -= 1
                return None
            fault.hits += 1
            fault.left -= 1
            if not fault.left:
                self._faults.remove(fault)
            return fault.act
        return None


class TamperedCore:
    """ports.Core around another; `abandon` lets go of the core's files as a kill would."""

    def __init__(
        self, core: Core, faults: Faults, abandon: Callable[[], None], shift_ms: int
    ) -> None:
        self.core = core
        self.shift_ms = shift_ms
        self.is_killed = False
        self.is_tick_due = False
        self.errors: list[Exception] = []
        self.deadline_ms = core.deadline_ms
        self._faults = faults
        self._abandon = abandon
        self._guests: dict[ConnId, None] = {}  # neither dialled by us nor a broker of ours
        self._asked: Out = []
        self._withheld: dict[tuple[ConnId, int], Weaken | HoldBack | Withhold] = {}
        self._late: list[tuple[int, int, Send]] = []  # a heap: when, number, answer
        self._late_count = 0

    # ------------------------------------------------------------------------- the test's calls

    def move_clock(self, ms: int) -> None:
        self.shift_ms += ms
        self._tick_soon()

    def cut(self) -> None:
        """Close every connection that a client has opened."""
        self._asked += [Close(conn, "cut by the test") for conn in self._guests]
        self._tick_soon()

    def _tick_soon(self) -> None:
        self.is_tick_due = True
        self._plan()

    # ------------------------------------------------------------------------ the driver's calls

    def opened(self, conn: ConnId, peer: Peer, now_ms: int, out: Out) -> None:
        if peer.dialled is None:
            self._guests[conn] = None
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.opened(conn, peer, now_ms, out)

    def handle(self, conn: ConnId, frame: Frame, waited_ms: int, now_ms: int, out: Out) -> None:
        if self.is_killed:
            return
        act = None if frame.is_response else self._faults.meet(frame.code)
        if isinstance(act, Refuse):
            if not frame.is_oneway:
                out.append(Send(conn, encode_frame(reply_to(frame, act.code, act.remark))))
            return
        if act is not None and not frame.is_oneway:
            self._withheld[conn, frame.opaque] = act
        if frame.code == RequestCode.REGISTER_BROKER:
            self._guests.pop(conn, None)
        with _Tampering(self, now_ms, out) as now_ms:
            self.core.handle(conn, frame, waited_ms, now_ms, out)

    def receive(self, conn: ConnId, data: bytes, now_ms: int, out: Out) -> tuple[int, int]:
        if self.is_killed:
            return len(data), 0
        if self._faults.is_any:
            return 0, 0
        with _Tampering(self, now_ms, out) as now_ms:
            return self.core.receive(conn, data, now_ms, out)

    def settle(self, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.settle(now_ms, out)

    def closed(self, conn: ConnId, now_ms: int, out: Out) -> None:
        self._guests.pop(conn, None)
        for key in [key for key in self._withheld if key[0] == conn]:
            del self._withheld[key]
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.closed(conn, now_ms, out)

    def dial_failed(self, address: str, reason: str, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.dial_failed(address, reason, now_ms, out)

    def flushed(self, kind: str, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.flushed(kind, now_ms, out)

    def flush_failed(self, kind: str, reason: str, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.flush_failed(kind, reason, now_ms, out)

    def saved(self, name: str, reason: str | None, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.saved(name, reason, now_ms, out)

    def stalled(self, duration_ms: int, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.stalled(duration_ms, now_ms, out)

    def tick(self, now_ms: int, out: Out) -> None:
        self.is_tick_due = False
        out += self._asked
        self._asked.clear()
        while self._late and self._late[0][0] <= now_ms:
            out.append(heapq.heappop(self._late)[2])
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.tick(now_ms, out)

    def stop(self, now_ms: int, out: Out) -> None:
        with _Tampering(self, now_ms, out) as now_ms:
            if not self.is_killed:
                self.core.stop(now_ms, out)

    @property
    def is_stopped(self) -> bool:
        return self.is_killed or self.core.is_stopped

    def close(self, now_ms: int) -> None:
        if self.is_killed:
            self._abandon()
        else:
            self.core.close(now_ms + self.shift_ms)

    # ------------------------------------------------------------------------------------ inside

    def _plan(self) -> None:
        moment = self.core.deadline_ms - self.shift_ms
        if self._late:
            moment = min(moment, self._late[0][0])
        self.deadline_ms = 0 if self.is_tick_due else moment

    def _take_answers(self, out: Out, begin: int, now_ms: int) -> None:
        """Take the answers that must not leave now out of what was appended from `begin` on."""
        left: Out = []
        for effect in out[begin:]:
            if isinstance(effect, Send) and any(conn == effect.conn for conn, _ in self._withheld):
                data = b"".join(self._pass(effect, now_ms))
                if data:
                    left.append(Send(effect.conn, data))
            else:
                left.append(effect)
        out[begin:] = left

    def _pass(self, effect: Send, now_ms: int) -> Iterator[bytes]:
        """Of the frames in one piece of bytes those that may leave now."""
        at = 0
        while at < len(effect.data):
            found = frame_at(effect.data, at, _ANY_SIZE)
            assert found is not None, "a core sends whole frames"
            frame, end = found
            raw, at = effect.data[at:end], end
            act = None
            if frame.is_response:
                act = self._withheld.pop((effect.conn, frame.opaque), None)
            if act is None:
                yield raw
            elif isinstance(act, Weaken):
                if frame.code == ResponseCode.SUCCESS:
                    frame.code, frame.remark = act.code, act.remark
                    raw = encode_frame(frame)
                yield raw
            elif isinstance(act, HoldBack):
                self._late_count += 1
                late = (now_ms + act.delay_ms, self._late_count, Send(effect.conn, raw))
                heapq.heappush(self._late, late)


class _Tampering:
    """Around one call into the core: its time, what it sends, what it raises, its next deadline."""

    __slots__ = ("_begin", "_core", "_now_ms", "_out")

    def __init__(self, core: TamperedCore, now_ms: int, out: Out) -> None:
        self._core = core
        self._now_ms = now_ms
        self._out = out
        self._begin = len(out)

    def __enter__(self) -> int:
        return self._now_ms + self._core.shift_ms

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self._core.errors.append(error)
        if self._core._withheld:
            self._core._take_answers(self._out, self._begin, self._now_ms)
        self._core._plan()
