"""History: what everybody did and was told, written down beside the cluster.

Owns: messages sent, acknowledgements, consumptions, recoveries, and the problems found. One rule:
it is outside all processes: crashes don't touch it, and no node reads it to decide anything.

A reply may arrive long after the broker that sent it has crashed and come back. So every entry
says which boot of the broker it came from, and is judged against all recoveries since.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

LOCK_US = 60_000_000  # a broker's lock on a queue lasts this long after its last renewal

Queue = tuple[str, str, int]
"""(broker, topic, queue id)"""


class Sent(msgspec.Struct):
    """A message as its producer made it."""

    token: str
    topic: str
    body: bytes
    tags: str = ""
    key: str = ""
    unique_key: str = ""
    waits_for_flush: bool = True
    attributes: dict[str, str] = {}
    """Properties beside these, as far as somebody asks for them."""


class Ack(msgspec.Struct, frozen=True):
    """A broker said: stored. `is_firm` if that promises to survive a power loss."""

    token: str
    log_offset: int
    is_firm: bool
    boot: int


class Recovery(msgspec.Struct):
    """What a broker believed when it came back."""

    boot: int
    log_begin: int
    log_end: int
    queue_ends: dict[tuple[str, int], int]
    is_lossless: bool
    """No byte was lost: the process was killed, or stopped in order."""

    def has(self, log_offset: int) -> bool:
        return self.log_begin <= log_offset < self.log_end


class Found(msgspec.Struct, frozen=True):
    """A record in a log that proved to be a message as it was sent."""

    token: str
    topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    size: int
    detail: object = None
    """The whole record, in runs with kinds."""


class _Lock(msgspec.Struct):
    """A queue given to one member of a group by one boot of a broker."""

    member: str
    boot: int
    asked_us: int


class History:
    """One run. `problems` is empty if all went well."""

    def __init__(self) -> None:
        self.is_on_disk: Callable[[str, int, int], bool] = lambda broker, boot, log_offset: True
        """(broker, boot, log offset): whether a record would survive a power loss right now."""
        self.locks: dict[tuple[str, Queue], _Lock] = {}
        """(group, queue) -> who was told to own it."""
        self.trusts_clocks = True
        """Whether a lock's minute is a minute."""
        self.sent: dict[str, Sent] = {}
        self.acks: dict[Queue, dict[int, Ack]] = {}
        self.consumed: dict[str, set[tuple[str, str, int, int, str]]] = {}
        self.excused: dict[tuple[str, Queue], int] = {}
        """(group, queue) -> offsets below this may have been skipped: an ASYNC_FLUSH broker lost
        messages that the group had consumed, and gave their numbers to new ones."""
        self.reached: dict[tuple[str, Queue], tuple[int, int]] = {}
        """(group, queue) -> how far it came, and in which boot of the broker."""
        self.recoveries: dict[str, list[Recovery]] = {}
        self.sync_brokers: dict[str, bool] = {}
        self.doomed: dict[str, None] = {}
        """Topics that an operator deletes now and then: nothing is promised for them."""
        self.log_begins: dict[str, int] = {}
        self.settings: dict[str, dict[str, str]] = {}
        """What name servers said they have saved."""
        self.topics: dict[str, dict[str, None]] = {}
        """Topics that brokers said they have made, in runs where that is a promise."""
        self.proven: dict[bytes, Found] = {}
        """Bytes of records that were looked at before: the same bytes need no second proof."""
        self.problems: list[str] = []
        self.ledger: object = None
        """What the kinds of this run note (kinds_base.Ledger); None in runs without."""
        self.healed_us = -1
        self.ack_count = 0
        self.lost_ack_count = 0
        self.consumed_count = 0

    def problem(self, text: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(text)

    # ----------------------------------------------------------------------------- what clients say

    def acked(
        self, place: Queue, offset: int, log_offset: int, token: str, boot: int, *, is_firm: bool
    ) -> None:
        self.ack_count += 1
        broker, topic, _ = place
        if topic in self.doomed:
            return
        if log_offset < self.log_begins.get(broker, 0):
            return
        for recovery in self._since(broker, boot):
            if not recovery.has(log_offset):
                self._lost(place, offset, token, recovery, is_firm=is_firm)
                return
        if is_firm and not self.is_on_disk(broker, boot, log_offset):
            self.problem(
                f"acknowledged but not on disk: {token} at {place} offset {offset}, log offset "
                f"{log_offset}"
            )
        table = self.acks.setdefault(place, {})
        former = table.get(offset)
        if former is not None and (former.token, former.log_offset) != (token, log_offset):
            self.problem(
                f"two messages acknowledged at {place} offset {offset}: {former.token} of boot "
                f"{former.boot}, {token} of boot {boot}"
            )
        table[offset] = Ack(token, log_offset, is_firm, boot)

    def _lost(
        self, place: Queue, offset: int, token: str, recovery: Recovery, *, is_firm: bool
    ) -> None:
        self.lost_ack_count += 1
        if is_firm or recovery.is_lossless:
            self.problem(
                f"acknowledged but gone: {token} at {place} offset {offset}; boot {recovery.boot} "
                f"found the log's end at {recovery.log_end}"
            )

    def reach(self, group: str, place: Queue, position: int, boot: int) -> None:
        """A group's member will go on at `position`, because the broker of `boot` said so."""
        broker, topic, _ = place
        if topic in self.doomed:
            return
        for recovery in self._since(broker, boot):
            position = self._judge_reach(group, place, position, recovery)
            boot = recovery.boot
        former, _ = self.reached.get((group, place), (0, 0))
        if position >= former:
            self.reached[group, place] = (position, boot)

    def _judge_reach(self, group: str, place: Queue, position: int, recovery: Recovery) -> int:
        """Returns where the group can still be."""
        broker, topic, queue_id = place
        end = recovery.queue_ends.get((topic, queue_id), 0)
        if position <= end:
            return position
        if recovery.is_lossless or self.sync_brokers[broker]:
            self.problem(
                f"{place} showed offsets up to {position} to {group}, but boot {recovery.boot} "
                f"found its end at {end}"
            )
        self.excused[group, place] = max(self.excused.get((group, place), 0), position)
        return end

    def consume(self, group: str, place: Queue, offset: int, token: str) -> None:
        self.consumed_count += 1
        self.consumed.setdefault(group, set()).add((*place, offset, token))

    def locked(
        self, group: str, place: Queue, member: str, boot: int, asked_us: int, now_us: int
    ) -> None:
        """A broker told a member that it owns a queue. Nobody else may, until the lock has run out
        or been given back; a broker that starts again has forgotten all locks."""
        if not self.trusts_clocks:
            return
        former = self.locks.get((group, place))
        if former is not None and former.member != member:
            if former.boot > boot:
                return  # old news
            if former.boot == boot and now_us - former.asked_us < LOCK_US:
                self.problem(
                    f"{place} belongs to {former.member} and to {member} of {group} at once"
                )
        self.locks[group, place] = _Lock(member, boot, asked_us)

    def unlocked(self, group: str, place: Queue, member: str) -> None:
        """A member gives a queue back, from this moment on."""
        former = self.locks.get((group, place))
        if former is not None and former.member == member:
            del self.locks[group, place]

    # ---------------------------------------------------------------------------- what brokers show

    def recovered(self, broker: str, recovery: Recovery) -> None:
        """A broker came back: judge everything said before against what it found."""
        self.recoveries.setdefault(broker, []).append(recovery)
        for place, table in self.acks.items():
            if place[0] != broker:
                continue
            for offset in [o for o, ack in table.items() if not recovery.has(ack.log_offset)]:
                ack = table.pop(offset)
                self._lost(place, offset, ack.token, recovery, is_firm=ack.is_firm)
        for (group, place), (position, boot) in self.reached.items():
            if place[0] == broker and boot < recovery.boot:
                position = self._judge_reach(group, place, position, recovery)
                self.reached[group, place] = (position, recovery.boot)

    def expired(self, broker: str, log_begin: int) -> None:
        """A full disk made a broker drop its oldest messages: nothing is promised for them."""
        for place, table in self.acks.items():
            if place[0] == broker:
                for offset in [o for o, ack in table.items() if ack.log_offset < log_begin]:
                    del table[offset]
        self.log_begins[broker] = max(self.log_begins.get(broker, 0), log_begin)

    def is_promised(self, broker: str, token: str) -> bool:
        """Whether a broker still owes this message to whoever asks for it."""
        return any(
            ack.token == token
            for place, table in self.acks.items()
            if place[0] == broker
            for ack in table.values()
        )

    def _since(self, broker: str, boot: int) -> list[Recovery]:
        return [one for one in self.recoveries.get(broker, ()) if one.boot > boot]
