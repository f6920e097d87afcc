"""What a store must hold after a kill, kind by kind.

Owns: the promises of every message kind, spelled out against the records of the log. One rule: it
judges what stands in the log, which it reads by itself (store_check.py), by what the Ledger knows;
the broker is only asked what a filter selects.

A `boot` is one life of a broker. What it delivers later is delivered once in a boot; after a kill
the next one may deliver again what the last one had not noted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable

from kinds import (
    DEAD_TOPIC,
    LEVELS_S,
    MOST_TRIES,
    REPLY_TOPIC,
    RETRY_TOPIC,
    STEP_QUEUES,
    TOPICS,
    Ledger,
    Sent,
    pull_by_sql,
)
from store_check import SCHEDULE_TOPIC, TIMER_TOPIC, Found, Record

from cometmq.client.remote import Remote
from cometmq.wire import record
from cometmq.wire.codes import ResponseCode

HALF_TOPIC, OP_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
COMMITTED = 0x8
KNOWN_TOPICS = {*TOPICS, RETRY_TOPIC, DEAD_TOPIC, REPLY_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC}


class KindCheck:
    """One look at a store. `boots` are the log offsets at which each boot began to write."""

    def __init__(self, ledger: Ledger, found: Found, boots: list[int]) -> None:
        self.ledger = ledger
        self.found = found
        self._boots = boots
        self.by_number: dict[int, list[Record]] = defaultdict(list)
        for one in found.records.values():
            if one.topic == OP_TOPIC or "TIMER_DEL_UNIQKEY" in one.properties:
                continue
            if one.topic not in KNOWN_TOPICS and one.topic != HALF_TOPIC:
                continue  # the broker's own
            sent = ledger.find(one.body)
            assert sent is not None, f"{one.topic} has {one}, which nobody sent"
            self.by_number[sent.number].append(one)

    def check(self) -> None:
        """What holds at any time."""
        for sent in list(self.ledger.sent.values()):
            records = self.by_number.get(sent.number, [])
            if sent.log_offset is not None:
                there = self.found.records.get(sent.log_offset)
                assert there is not None and there in records, f"{sent} is lost: {there}"
            self._check_twins(sent, records)
            if sent.topic == "delayed":
                self._check_delayed(sent, records)
            elif sent.topic == "timed":
                self._check_timed(sent, records)
            elif sent.topic == "work":
                self._check_work(sent, records)
            elif sent.topic == "orders":
                self._check_order(sent, records)
            else:
                strays = {one.topic for one in records} - {sent.topic, REPLY_TOPIC}
                assert not strays, f"{sent} is in {strays}"

    def _check_twins(self, sent: Sent, records: list[Record]) -> None:
        """What its sender stored, it stored once."""
        first = HALF_TOPIC if sent.topic == "orders" else sent.topic
        if sent.topic in ("delayed", "timed"):
            return
        own = [
            one
            for one in records
            if one.topic == first and "TRANSACTION_CHECK_TIMES" not in one.properties
        ]
        assert len(own) <= 1, f"{sent} is there {len(own)} times: {own}"

    def _boot_of(self, one: Record) -> int:
        return bisect_right(self._boots, one.at)

    def _check_once_a_boot(self, sent: Sent, copies: Iterable[Record], most: int) -> None:
        counts = Counter(self._boot_of(one) for one in copies)
        too_many = {boot: count for boot, count in counts.items() if count > most}
        assert not too_many, f"{sent}: by boot {too_many} copies, at most {most} in each"

    # ------------------------------------------------------------------------------- delay and time

    def _check_delayed(self, sent: Sent, records: list[Record]) -> None:
        kept = [one for one in records if one.topic == SCHEDULE_TOPIC]
        copies = [one for one in records if one.topic == "delayed"]
        assert len(kept) <= 1, f"{sent} waits {len(kept)} times"
        assert kept or not copies, f"{sent} never waited"
        for one in copies:
            least_ms = kept[0].store_ms + LEVELS_S[sent.level - 1] * 1000
            assert one.store_ms >= least_ms, f"{sent} is {least_ms - one.store_ms} ms early"
        self._check_once_a_boot(sent, copies, 1)

    def _check_timed(self, sent: Sent, records: list[Record]) -> None:
        kept = [one for one in records if one.topic == TIMER_TOPIC]
        copies = [one for one in records if one.topic == "timed"]
        assert sum("TIMER_ROLL_TIMES" not in one.properties for one in kept) <= 1, sent
        for one in copies:
            assert one.store_ms >= sent.due_ms, f"{sent} is {sent.due_ms - one.store_ms} ms early"
        assert not (sent.is_recalled and copies), f"{sent} was taken back, and came: {copies}"
        self._check_once_a_boot(sent, copies, max(len(kept), 1))

    # -------------------------------------------------------------------------------------- retries

    def _check_work(self, sent: Sent, records: list[Record]) -> None:
        ledger = self.ledger
        origins = [one for one in records if one.topic == "work"]
        for times in range(MOST_TRIES + 1):
            topic = SCHEDULE_TOPIC if times < MOST_TRIES else DEAD_TOPIC
            kept = [
                one for one in records if one.topic == topic and one.reconsume_times == times + 1
            ]
            tried = ledger.backs_tried[sent.number, times]
            assert len(kept) <= tried, f"{sent}: sent back {tried} times, stored {len(kept)}"
            if (sent.number, times) in ledger.backs_acked:
                assert kept, f"{sent} was sent back after try {times}, and is lost"
            copies = [
                one
                for one in records
                if one.topic == RETRY_TOPIC and one.reconsume_times == times + 1
            ]
            if copies:
                delay_ms = LEVELS_S[times + 2] * 1000
                least_ms = min(one.store_ms for one in kept) + delay_ms
                early = [one for one in copies if one.store_ms < least_ms]
                assert not early, f"{sent}: its retry {times + 1} is early: {early}"
            self._check_once_a_boot(sent, copies, len(kept))
            for one in (*kept, *copies):
                self._check_origin(sent, one, origins[0])
        dead = [one for one in records if one.topic == DEAD_TOPIC]
        assert all(one.reconsume_times == MOST_TRIES + 1 for one in dead), (sent, dead)
        assert sent.fails or len(records) == len(origins), f"{sent} was never sent back: {records}"

    def _check_origin(self, sent: Sent, one: Record, origin: Record) -> None:
        told = one.properties.get("ORIGIN_MESSAGE_ID")
        first_id = (origin.store_host + origin.at.to_bytes(8, "big")).hex().upper()
        assert told == first_id, f"{sent} says that it was {told} first, not {first_id}"
        assert one.properties.get("RETRY_TOPIC") == "work", (sent, one.properties)
        if one.topic == DEAD_TOPIC:
            names = ("DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID")
            wanted = ("work", origin.properties["UNIQ_KEY"])
            assert tuple(one.properties.get(name) for name in names) == wanted, one.properties
            assert "DELAY" not in one.properties, one.properties

    # --------------------------------------------------------------------------------- transactions

    def _check_order(self, sent: Sent, records: list[Record]) -> None:
        halves = [one for one in records if one.topic == HALF_TOPIC]
        shown = [one for one in records if one.topic == "orders"]
        assert len(shown) <= 1, f"{sent} was delivered {len(shown)} times: {shown}"
        if shown:
            assert sent.fate == "commit", f"{sent} was rolled back, and came: {shown}"
            assert sent.end_tried, f"{sent} came before anybody committed it"
            assert shown[0].sys_flag & 0xC == COMMITTED, shown
            assert halves and halves[0].at < shown[0].at, (sent, halves)
        if sent.ended_in is not None and sent.fate == "commit":
            assert shown, f"{sent} was committed, and is not there: {halves}"

    # --------------------------------------------------------------------------------- what is left

    def open_ends(self) -> list[str]:
        """Promised, and not come yet."""
        return [
            f"{sent} {[(one.topic, one.reconsume_times) for one in self._of(sent)]}"
            for sent in list(self.ledger.sent.values())
            if not self._is_complete(sent)
        ]

    def _of(self, sent: Sent) -> list[Record]:
        return self.by_number.get(sent.number, [])

    def _is_complete(self, sent: Sent) -> bool:
        records = self._of(sent)
        topics = {one.topic for one in records}
        if sent.topic == "delayed":
            return SCHEDULE_TOPIC not in topics or "delayed" in topics
        if sent.topic == "timed":
            return TIMER_TOPIC not in topics or "timed" in topics or sent.is_recall_tried
        if sent.topic == "work" and topics:
            return DEAD_TOPIC in topics if sent.fails else sent.number in self.ledger.done
        if sent.topic == "orders" and topics:
            return "orders" in topics if sent.fate == "commit" else sent.end_tried
        if sent.topic == "steps" and topics:
            one = records[0]
            return self.ledger.steps_seen.get(one.queue_id, -1) >= one.queue_offset
        return True

    def last_due_ms(self) -> int:
        """When the last of all that ever waited is due."""
        due_ms = 0
        for records in self.by_number.values():
            for one in records:
                if one.topic == SCHEDULE_TOPIC:
                    due_ms = max(due_ms, one.store_ms + LEVELS_S[one.queue_id] * 1000)
                elif one.topic == TIMER_TOPIC:
                    due_ms = max(due_ms, int(one.properties["TIMER_DELIVER_MS"]))
        return due_ms

    def copy_count(self) -> int:
        """All that was ever delivered later."""
        return sum(
            one.topic in ("delayed", "timed", RETRY_TOPIC, DEAD_TOPIC, "orders")
            for records in self.by_number.values()
            for one in records
        )

    def check_filter(self, address: str) -> None:
        """The SQL expression selects just what it says."""
        with Remote(address, timeout_ms=10_000) as remote:
            for queue_id in range(STEP_QUEUES):
                selected, offset = [], 0
                while True:
                    answer = pull_by_sql(remote, queue_id, offset)
                    if answer.code == ResponseCode.SUCCESS:
                        selected += [one.queue_offset for one in record.decode_all(answer.body)]
                    elif answer.code != ResponseCode.PULL_RETRY_IMMEDIATELY:
                        break
                    offset = int(answer.ext["nextBeginOffset"])
                # A kill may come between the first message of a topic and the note of the topic;
                # then nothing of it was acknowledged.
                is_known = answer.code != ResponseCode.TOPIC_NOT_EXIST
                found = [
                    (one.queue_offset, self.ledger.sent[int(one.body[:10])])
                    for records in self.by_number.values()
                    for one in records
                    if (one.topic, one.queue_id) == ("events", queue_id)
                ]
                wanted = [
                    queue_offset
                    for queue_offset, sent in found
                    if sent.is_wanted and (is_known or sent.log_offset is not None)
                ]
                assert selected == sorted(wanted), (queue_id, selected, wanted)
