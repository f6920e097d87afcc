"""Half messages: kept out of sight until their producer ends them, and asked about if it doesn't.

Owns: RMQ_SYS_TRANS_HALF_TOPIC and RMQ_SYS_TRANS_OP_HALF_TOPIC, who has ended, and the check-back.
One rule: a half message is ended once; whatever says so (an op record, a newer copy of the half, a
committed copy in the log) is asked before it is delivered, and before it is asked about again.

A half is stored in queue 0 of the half topic. Its end is an op record that names its queue offset:
`17`, or `17,18,` for several, tag `d`. RocketMQ 5 reads both forms, 4.9 only the first, so that is
the one we write, in one piece with the committed message. A half that nobody ended is written again
at the tail before each check-back, so that the queue can be left behind: the copy counts
TRANSACTION_CHECK_TIMES and names the first one in TRAN_PREPARED_QUEUE_OFFSET, and an op record ends
the copy before it. The offsets of any copy end the transaction.

In memory is one bit for each half from `offset` on; everything below is done with.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from cometmq.broker import names
from cometmq.broker.delay import renewed
from cometmq.broker.half_records import (
    first_copy,
    immunity_ms,
    is_linked,
    newest_copy,
    number,
    op_offsets,
    op_record,
    with_key_of,
)
from cometmq.broker.marks import Marks
from cometmq.errors import MessageIllegal, StoreError
from cometmq.message import NewMessage, StoredMessage
from cometmq.ports import NEVER_MS, Out, Send
from cometmq.store.results import Appended
from cometmq.wire import headers, message_id, properties, record
from cometmq.wire.bodies import TopicConfig
from cometmq.wire.codes import FLAG_ONEWAY, TRANSACTION_MASK, Perm, RequestCode, SysFlag
from cometmq.wire.frame import Frame, encode_frame

if TYPE_CHECKING:
    from cometmq.broker.broker import Broker
    from cometmq.broker.offsets import Offsets
    from cometmq.broker.state import StateFile
    from cometmq.store.store import Store

log = logging.getLogger("cometmq.broker")

GROUP = "CID_RMQ_SYS_TRANS"
MOST_AT_ONCE = 200  # records looked at in one tick; the rest waits, so that requests get in
MOST_BYTES_AT_ONCE = 512 * 1024  # of check-backs in one tick
PAUSE_MS = 50  # between ticks that asked producers: 4000 check-backs a second, 10 MB
OPS_PAUSE_MS = 5  # between ticks that only passed ends: 100,000 of them a second
MOST_OPS_AT_ONCE = 500
RETRY_MS = 1_000  # after the store refused
_READ_WRITE = int(Perm.READ | Perm.WRITE)
_COMMIT = int(SysFlag.COMMIT)


class Half:
    """The half messages of a broker."""

    def __init__(self, store: Store, offsets: Offsets) -> None:
        self.commits = self.rollbacks = self.checks = self.unanswerable = 0
        self.discarded = self.repeated = self.healed = 0
        self.files: list[StateFile] = []  # its offsets are in consumerOffset.json
        self._offsets = offsets
        self._boot_end = store.max_log_offset
        self.offset = _begin(store, offsets, names.HALF_TOPIC)
        """The first half that is not done with."""
        self._saved_offset = self.offset
        self._op_offset = _begin(store, offsets, names.OP_TOPIC)
        self._marks = Marks(self.offset)
        self._pending: list[int] = []  # ended, op record not written yet
        self._pending_ms = NEVER_MS
        self._ended_upto = 0  # the log must be durable up to here before `offset` may be saved
        self._proof: tuple[int, int] | None = None  # an offset, and what it waits for
        self._pass_ms: int | None = None  # when the present check began
        self._next_ms = NEVER_MS  # of the next check, or of its next part
        self._is_waiting = False  # for the store to take messages again
        self._turn = 0
        self._read_ops(store)

    def _read_ops(self, store: Store) -> None:
        """Before anything is served: who had ended when this store was last open."""
        most = store.next_queue_offset(names.HALF_TOPIC, 0)
        for at in range(self._op_offset, store.max_offset(names.OP_TOPIC, 0)):
            stored = _read(store, names.OP_TOPIC, at)
            for offset in () if stored is None else op_offsets(stored):
                if self.offset <= offset < most:
                    self._marks.mark(offset)

    def open_count(self, store: Store) -> int:
        """Half messages that nobody has ended."""
        return store.next_queue_offset(names.HALF_TOPIC, 0) - self.offset - self._marks.count

    # --------------------------------------------------------------------------------------- ends

    def living(self, store: Store, stored: StoredMessage) -> int | None:
        """The queue offset under which this transaction is open; None if it is not."""
        at: int = stored.queue_offset
        is_older = stored.log_offset < self._boot_end
        if is_older or at < self.offset or self._marks.has(at):
            at = newest_copy(store, stored)
            if at < self.offset or self._marks.has(at):
                return None
        if is_older and self._is_committed(store, stored):
            return None
        return at

    def is_resumed(self, store: Store, given_up: StoredMessage) -> bool:
        """Whether a transaction that was given up is open again."""
        return any(
            one.queue_offset >= self.offset and not self._marks.has(one.queue_offset)
            for one in with_key_of(store, names.HALF_TOPIC, given_up)
        )

    def _is_unnoted(self, store: Store, stored: StoredMessage) -> bool:
        """Whether an open half is over though no op record says so: whoever had this store before
        us died between the two. The log knows."""
        if stored.log_offset >= self._boot_end:
            return False
        return newest_copy(store, stored) > stored.queue_offset or self._is_committed(store, stored)

    def _is_committed(self, store: Store, stored: StoredMessage) -> bool:
        """Whether a committed copy is in the log. A copy of a half that RocketMQ made to ask about
        it does not name the first one; there any commit with its key counts."""
        is_known = is_linked(stored)
        real_topic = properties.get(stored.properties, properties.REAL_TOPIC) or ""
        for topic in (real_topic, names.SCHEDULE_TOPIC, names.TIMER_TOPIC):
            for one in with_key_of(store, topic, stored):
                if one.sys_flag & TRANSACTION_MASK != _COMMIT:
                    continue
                half = store.message_at(one.prepared_offset)
                if half is not None and half.topic == names.HALF_TOPIC:
                    if not is_known or first_copy(half) == first_copy(stored):
                        return True
        return False

    def end(self, broker: Broker, at: int, message: NewMessage | None, now_ms: int) -> Appended:
        """End an open half: with its committed message, or None to roll it back.

        StoreError if the log takes nothing now; then nothing has changed.
        """
        assert at >= self.offset and not self._marks.has(at), at
        appended = self._put_ended(broker, at, message, now_ms, is_by_producer=True)
        self._marks.mark(at)
        is_commit = message is not None
        self._note_ended(appended.end_offset, int(is_commit), int(not is_commit))
        return appended

    def open_ends(self) -> tuple[int, int, int, bytearray]:
        """For the compiled path: from which queue offset and which log offset on a half is known to
        be open without another look, and the marks of those that are not, which it adds to."""
        return self.offset, self._boot_end, *self._marks.shared()

    def ended_many(self, count: int, commits: int, end_offset: int) -> None:
        """The compiled path has stored so many ends, and marked them."""
        self._marks.count += count
        self._note_ended(end_offset, commits, count - commits)

    def _note_ended(self, end_offset: int, commits: int, rollbacks: int) -> None:
        self._ended_upto = max(self._ended_upto, end_offset)
        self.commits += commits
        self.rollbacks += rollbacks

    def _put_ended(
        self,
        broker: Broker,
        at: int,
        message: NewMessage | None,
        now_ms: int,
        *,
        is_by_producer: bool = False,
    ) -> Appended:
        """Store a message, and that the half at `at` is over; `end_offset` is where both end."""
        config = broker.config
        is_due = not is_by_producer
        if message is None:
            # Only this record tells of a rollback; of a commit the message itself does, too.
            return broker.put(op_record(broker, [at], now_ms), now_ms, is_due=True)
        is_batched = config.transaction_op_interval_ms > 0 and is_by_producer
        if broker.is_stopping or not is_batched:
            op = op_record(broker, [at], now_ms)
            if len(message.body) + len(op.body) <= config.max_message_bytes:
                return broker.put_together(message, op, now_ms, is_due=is_due)
        if self._is_full(config.transaction_op_bytes):
            self._write_pending(broker, now_ms)
        appended = broker.put(message, now_ms, is_due=is_due)
        self._note_pending(broker, at, now_ms, config.transaction_op_interval_ms)
        return appended

    def _note_pending(self, broker: Broker, at: int, now_ms: int, wait_ms: int) -> None:
        self._pending.append(at)
        if self._is_full(broker.config.transaction_op_bytes):
            wait_ms = 0
        self._pending_ms = min(self._pending_ms, now_ms + wait_ms)
        broker.is_plan_old = True

    def _is_full(self, most_bytes: int) -> bool:
        count = len(self._pending)
        return bool(count) and (len(str(self._pending[-1])) + 1) * count >= most_bytes

    def _write_pending(self, broker: Broker, now_ms: int) -> None:
        """The op records that wait; StoreError if they must go on waiting."""
        while self._pending:
            count = max(broker.config.transaction_op_bytes // (len(str(self._pending[0])) + 1), 1)
            broker.put(op_record(broker, self._pending[:count], now_ms), now_ms, is_due=True)
            del self._pending[:count]
        self._pending_ms = NEVER_MS

    def stop(self, broker: Broker, now_ms: int) -> None:
        """The broker stops: leave nothing that only memory knows."""
        try:
            self._write_pending(broker, now_ms)
        except StoreError as error:
            log.error("ends not noted count=%d: %s", len(self._pending), error)
        self._save(broker.store, now_ms)

    # -------------------------------------------------------------------------------- check-back

    def next_ms(self, broker: Broker, now_ms: int) -> int:
        if broker.is_stopping:
            return NEVER_MS
        store = broker.store
        if self._saved_offset != self.offset and self._is_safe(store):
            return now_ms
        soonest = self._pending_ms
        if self._pass_ms is not None or self._has_work(store):
            longest_ms = broker.config.transaction_check_interval_ms
            self._next_ms = min(self._next_ms, now_ms + longest_ms)  # the clock was set back
            soonest = min(soonest, self._next_ms)
        return soonest

    def _has_work(self, store: Store) -> bool:
        return self.offset < store.max_offset(names.HALF_TOPIC, 0) or (
            self._op_offset < store.max_offset(names.OP_TOPIC, 0)
        )

    def tick(self, broker: Broker, now_ms: int, out: Out) -> None:
        """One part of a check: at most so many messages, then requests get in."""
        if broker.is_stopping:
            return
        store = broker.store
        try:
            if self._pending_ms <= now_ms:
                self._write_pending(broker, now_ms)
            if now_ms >= self._next_ms and (self._pass_ms is not None or self._has_work(store)):
                if self._pass_ms is None:
                    self._pass_ms = now_ms
                if not self._walk(broker, now_ms, out):
                    self._next_ms = now_ms + PAUSE_MS
                elif not self._walk_ops(store, now_ms):
                    self._next_ms = now_ms + OPS_PAUSE_MS
                else:
                    self._pass_ms = None
                    self._next_ms = now_ms + broker.config.transaction_check_interval_ms
        except StoreError as error:
            if not self._is_waiting:
                log.warning("check-back waits half=%d: %s", self.offset, error)
            self._is_waiting = True
            self._next_ms = now_ms + RETRY_MS
            if self._pending_ms <= now_ms:
                self._pending_ms = now_ms + RETRY_MS
        else:
            self._is_waiting = False
        finally:
            self._marks.forget_below(self.offset)
            self._save(store, now_ms)

    def _walk(self, broker: Broker, now_ms: int, out: Out) -> bool:
        """From half to half; False if some are left for the next tick."""
        store = broker.store
        end = store.max_offset(names.HALF_TOPIC, 0)
        begin = store.min_offset(names.HALF_TOPIC, 0)
        if self.offset < begin:
            log.warning("half messages expired from=%d to=%d", self.offset, begin)
            self.offset = begin
        count = size = 0
        while True:
            self.offset = max(self.offset, self._marks.next_clear(self.offset, end))
            if self.offset >= end:
                return True
            if count >= MOST_AT_ONCE or size >= MOST_BYTES_AT_ONCE:
                return False
            stored = _read(store, names.HALF_TOPIC, self.offset)
            if stored is None:
                log.error("half message can't be read offset=%d: skipped", self.offset)
            else:
                if not self._check(broker, stored, now_ms, out):
                    return True
                size += stored.size
            count += 1
            self.offset += 1

    def _check(self, broker: Broker, stored: StoredMessage, now_ms: int, out: Out) -> bool:
        """One open half; False if it, and with it all that follow, is too young."""
        config = broker.config
        assert self._pass_ms is not None
        table = properties.parse(stored.properties)
        times = number(table.get(properties.CHECK_TIMES), -1)
        if properties.CHECK_TIMES not in table:
            times = 0
        age_ms = now_ms - stored.born_ms
        if stored.store_ms >= self._pass_ms:
            return False
        is_over = times >= config.transaction_check_max
        is_over = is_over or age_ms > config.file_reserved_hours * 3_600_000
        own = table.get(properties.IMMUNITY_SEC)
        is_immune = not is_over and own is not None
        if own is not None:
            is_immune = is_immune and age_ms <= immunity_ms(own, config.transaction_timeout_ms)
        elif not is_over and 0 <= age_ms <= config.transaction_timeout_ms:
            return False
        if self._is_unnoted(broker.store, stored):
            self._put_ended(broker, stored.queue_offset, None, now_ms)
            self.healed += 1
            log.warning("ended before the last start, and not noted half=%d", stored.queue_offset)
        elif is_over:
            self._discard(broker, stored, times, now_ms, out)
        else:
            table.setdefault(properties.FIRST_HALF, str(stored.queue_offset))
            if not is_immune:
                table[properties.CHECK_TIMES] = str(times + 1)
            copy = renewed(stored, names.HALF_TOPIC, 0)
            copy.properties = properties.build(table)
            try:
                appended = self._put_ended(broker, stored.queue_offset, copy, now_ms)
            except MessageIllegal as error:
                log.error("half=%d can't be written again: %s", stored.queue_offset, error)
                self._discard(broker, stored, times, now_ms, out)
                return True
            self._ended_upto = appended.end_offset
            if not is_immune:
                self._ask(broker, copy, table, appended, out)
        return True

    def _discard(
        self, broker: Broker, stored: StoredMessage, times: int, now_ms: int, out: Out
    ) -> None:
        """Give up asking; the message goes where an operator finds it."""
        name = names.CHECK_MAX_TOPIC
        if broker.topics.get(name) is None:
            topic = TopicConfig(name, 1, 1, _READ_WRITE)
            broker.topics.put(topic, now_ms)
            broker.announce([topic], now_ms, out)
        try:
            moved = self._put_ended(broker, stored.queue_offset, renewed(stored, name, 0), now_ms)
            self._ended_upto = moved.end_offset
        except MessageIllegal as error:
            log.error("half message lost log_offset=%d: %s", stored.log_offset, error)
        self.discarded += 1
        unique_key = properties.get(stored.properties, properties.UNIQUE_KEY)
        log.warning("transaction given up id=%s checks=%d topic=%s", unique_key, times, name)

    def _ask(
        self,
        broker: Broker,
        half: NewMessage,
        table: dict[str, str],
        appended: Appended,
        out: Out,
    ) -> None:
        """39 to one producer of the group, in turn; if none is here, the next check asks again."""
        clients = broker.members.producers.get(table.get(properties.PRODUCER_GROUP, ""))
        if not clients:
            self.unanswerable += 1
            return
        self._turn += 1
        client = list(clients.values())[self._turn % len(clients)]
        unique_key = table.get(properties.UNIQUE_KEY)
        header = headers.CheckTransactionHeader(
            tranStateTableOffset=appended.queue_offset,
            commitLogOffset=appended.log_offset,
            topic=half.topic,
            msgId=unique_key,
            transactionId=unique_key,
            offsetMsgId=message_id.offset_id(half.store_host, appended.log_offset),
            bname=broker.config.name,
        )
        topic, queue_id = table.get(properties.REAL_TOPIC, ""), table.get(properties.REAL_QUEUE_ID)
        shown = msgspec.structs.replace(half, topic=topic, queue_id=number(queue_id, 0))
        encoded = record.prepare(shown)
        body = bytearray(encoded.size)
        record.write(
            body,
            0,
            encoded,
            queue_offset=appended.queue_offset,
            log_offset=appended.log_offset,
            store_ms=appended.store_ms,
        )
        frame = Frame(
            RequestCode.CHECK_TRANSACTION_STATE,
            opaque=broker.next_opaque(),
            flag=FLAG_ONEWAY,
            ext=headers.to_ext(header),
            body=bytes(body),
            serialize=client.serialize,
        )
        self.checks += 1
        out.append(Send(client.conn, encode_frame(frame)))

    def _walk_ops(self, store: Store, now_ms: int) -> bool:
        """Leave behind the op records that name no half from the saved offset on; False if some
        are left for the next tick. As fast as transactions can end: a start reads all that are
        left."""
        self._save(store, now_ms)
        end = store.max_offset(names.OP_TOPIC, 0)
        at = max(self._op_offset, store.min_offset(names.OP_TOPIC, 0))
        last = min(end, at + MOST_OPS_AT_ONCE)
        while at < last:
            stored = _read(store, names.OP_TOPIC, at)
            if stored is not None and any(o >= self._saved_offset for o in op_offsets(stored)):
                break
            at += 1
        if at != self._op_offset:
            self._op_offset = at
            self._offsets.commit(names.OP_TOPIC, GROUP, 0, at, now_ms, "check-back")
        return at == end or at < last

    def _is_safe(self, store: Store) -> bool:
        return self._proof is None or store.flushed_offset >= self._proof[1]

    def _save(self, store: Store, now_ms: int) -> None:
        """Note how far we came, once what ended the halves that we left behind is on disk: their
        copies, or their committed messages. Else a power loss takes these, and nobody asks."""
        if self._proof is None and self._saved_offset != self.offset:
            self._proof = (self.offset, self._ended_upto)
        if self._proof is not None and self._is_safe(store):
            self._saved_offset, self._proof = self._proof[0], None
            offset = self._saved_offset
            self._offsets.commit(names.HALF_TOPIC, GROUP, 0, offset, now_ms, "check-back")


def _begin(store: Store, offsets: Offsets, topic: str) -> int:
    """Where the last check left a queue; after a crash that may be beyond what survived."""
    saved = offsets.table.get((topic, GROUP), {}).get(0)
    if saved is None:
        saved = store.min_offset(topic, 0)
    return min(saved, store.max_offset(topic, 0))


def _read(store: Store, topic: str, offset: int) -> StoredMessage | None:
    unit = store.unit(topic, 0, offset)
    return None if unit is None else store.message_at(unit[0])
