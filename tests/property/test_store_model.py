"""The store against a list: whatever is done to it, in any order, it holds what a list would.

The model is one list of messages in log order. A kill keeps all of it (staged: a prefix that covers
what was committed); a power loss keeps a prefix
that covers all that was flushed; cleaning drops from the front. After each step everything that a
reader can ask is compared.
"""

from __future__ import annotations

import pathlib
import random
import sys

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "unit" / "store"))

from fake_disk import T0, FakeFiles, small

from cometmq.errors import StoreBusy
from cometmq.message import NewMessage
from cometmq.ports import Flush
from cometmq.store.layout import StoreConfig
from cometmq.store.results import FetchStatus
from cometmq.store.store import Store
from cometmq.wire import record

TOPICS = ("T", "%RETRY%g")
QUEUES = [(topic, queue_id) for topic in TOPICS for queue_id in (0, 1)]
KEYS = ("a", "b", "c")


class Sent(msgspec.Struct):
    """One message as the model knows it."""

    queue: tuple[str, int]
    number: int
    body: bytes
    key: str
    store_ms: int
    begin: int
    end: int


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a store with tiny files, mirrored in a list."""

    store: Store
    files: FakeFiles
    config: StoreConfig

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.dispatched = 0  # how many of `sent` are visible
        self.now = T0
        self.count = 0
        self.under_way: list[Flush] = []

    @initialize(
        mode=st.sampled_from(("async", "sync", "staged")),
        thorough_ms=st.sampled_from((10, 60_000)),
        stage_bytes=st.sampled_from((1100, 4096)),
    )
    def start(self, mode: str, thorough_ms: int, stage_bytes: int) -> None:
        self.config = small(
            log_file_bytes=2048,
            is_sync_flush=mode == "sync",
            is_staged=mode == "staged",
            stage_count=3,
            stage_bytes=stage_bytes,
            queue_flush_thorough_ms=thorough_ms,
            queue_file_bytes=20 * 8,
            index_entries=16,
        )
        self.files = FakeFiles()
        self.store = Store.open(self.files, self.config, self.now)
        # One durable message, so that the log is never lost as a whole: then numbers go on from
        # the queues (test_lost_log_keeps_numbers_and_offsets), which a list can't tell.
        self.append(("Z", 0), [0], "a", 0)
        self.flush_log(is_reported=True)
        self.dispatch()

    def new(self, queue: tuple[str, int], size: int, key: str) -> NewMessage:
        self.count += 1
        body = b"%d/" % self.count + b"x" * size
        return NewMessage(
            queue[0], queue[1], body, f"UNIQ_KEY\x01u{self.count}\x02KEYS\x01{key}\x02"
        )

    def note(self, message: NewMessage, number: int, store_ms: int, begin: int, end: int) -> None:
        queue = (message.topic, message.queue_id)
        key = message.properties.rpartition("\x01")[2][:-1]
        self.sent.append(Sent(queue, number, message.body, key, store_ms, begin, end))

    @rule(
        queue=st.sampled_from(QUEUES),
        sizes=st.lists(st.integers(0, 600), min_size=1, max_size=6),
        key=st.sampled_from(KEYS),
        step_ms=st.sampled_from((0, 1, 900, -500)),
    )
    def append(self, queue: tuple[str, int], sizes: list[int], key: str, step_ms: int) -> None:
        self.now += step_ms
        for size in sizes:
            message = self.new(queue, size, key)
            before = self.store.max_log_offset
            try:
                done = self.store.append(message, self.now)
            except StoreBusy:
                assert self.config.is_staged
                assert self.store.max_log_offset == before > self.store.committed_offset
                return
            self.note(message, done.queue_offset, done.store_ms, done.log_offset, done.end_offset)

    @rule(queue=st.sampled_from(QUEUES), sizes=st.lists(st.integers(0, 80), max_size=5))
    def append_batch(self, queue: tuple[str, int], sizes: list[int]) -> None:
        batch = [self.new(queue, size, "b") for size in sizes]
        try:
            appended = self.store.append_batch(batch, self.now)
        except StoreBusy:
            assert self.config.is_staged
            return
        for message, done in zip(batch, appended, strict=True):
            self.note(message, done.queue_offset, done.store_ms, done.log_offset, done.end_offset)

    @rule()
    def dispatch(self) -> None:
        arrivals = self.store.dispatch(self.now)
        limit = self.store.committed_offset
        if self.config.is_sync_flush:
            limit = self.store.flushed_offset
        new = [s for s in self.sent[self.dispatched :] if s.end <= limit]
        assert [(a.topic, a.queue_id, a.queue_offset) for a in arrivals] == [
            (*s.queue, s.number) for s in new
        ]
        self.dispatched += len(new)

    @rule(is_reported=st.booleans())
    def flush_log(self, is_reported: bool) -> None:
        self.now += 10_000
        self.end_flush()
        while (flush := self.store.take_flush(self.now)) is not None:
            for target in flush.targets:
                target.sync()
            if is_reported:
                self.store.flushed(flush.kind, self.now)
            else:
                self.power_loss(self.count)  # dies with the disk ahead of what it knew
                break

    @rule(step_ms=st.sampled_from((0, 100, 600)))
    def begin_flush(self, step_ms: int) -> None:
        self.now += step_ms
        flush = self.store.take_flush(self.now)
        if flush is not None:
            self.under_way.append(flush)

    @rule()
    def end_flush(self) -> None:
        while self.under_way:
            flush = self.under_way.pop(0)
            for target in flush.targets:
                target.sync()
            self.store.flushed(flush.kind, self.now)

    @rule()
    def flush_queues(self) -> None:
        self.now += 1000
        flush = self.store.take_queue_flush(self.now)
        if flush is not None:
            for target in flush.targets:
                target.sync()
            self.store.flushed("queues", self.now)

    @rule()
    def reopen(self) -> None:
        self.store.close(self.now)
        self.under_way.clear()
        assert "abort" not in self.files.seen
        self.store = Store.open(self.files, self.config, self.now)
        self.dispatched = len(self.sent)

    @rule()
    def kill(self) -> None:
        self.under_way.clear()
        committed = self.store.committed_offset
        self.files = self.files.copy()
        self.store = Store.open(self.files, self.config, self.now)
        assert self.store.max_log_offset >= committed
        self.sent = [s for s in self.sent if s.end <= self.store.max_log_offset]
        self.dispatched = len(self.sent)
        if not self.config.is_staged:
            assert committed >= (self.sent[-1].end if self.sent else 0)

    @rule(seed=st.integers(0, 2**32))
    def power_loss(self, seed: int) -> None:
        self.under_way.clear()
        durable = self.store.flushed_offset
        self.files = self.files.crash(random.Random(seed))
        self.store = Store.open(self.files, self.config, self.now)
        assert self.store.max_log_offset >= durable
        # Records that survived are a prefix; what is lost was never called durable.
        self.sent = [s for s in self.sent if s.end <= self.store.max_log_offset]
        self.dispatched = len(self.sent)

    @rule()
    @precondition(lambda self: len(self.sent) > 10)
    def clean(self) -> None:
        self.files.ratio = 0.87
        self.store.clean(self.now)
        self.files.ratio = 0.10
        self.store.clean(self.now)

    # -------------------------------------------------------------------------------------- checks

    @invariant()
    def reads_like_a_list(self) -> None:
        if not hasattr(self, "store"):
            return
        low_log = self.store.min_log_offset
        for queue in QUEUES:
            mine = [s for s in self.sent if s.queue == queue]
            visible = [s for s in self.sent[: self.dispatched] if s.queue == queue]
            assert [s.number for s in mine] == list(range(len(mine)))
            assert self.store.next_queue_offset(*queue) == len(mine)
            assert self.store.max_offset(*queue) == len(visible)
            kept = [s for s in visible if s.begin >= low_log]
            low = self.store.min_offset(*queue)
            assert low == len(visible) - len(kept)
            assert self.read(queue, low) == [(s.number, s.body) for s in kept]
            for at_ms in {s.store_ms for s in kept[:3]}:
                lower = [s.number for s in kept if s.store_ms >= at_ms]
                assert self.store.offset_by_time(*queue, at_ms) == lower[0]

    @rule(queue=st.sampled_from(QUEUES), key=st.sampled_from(KEYS), count=st.integers(1, 70))
    def find(self, queue: tuple[str, int], key: str, count: int) -> None:
        topic = queue[0]
        low_log = self.store.min_log_offset
        expected = [
            s.body
            for s in self.sent[: self.dispatched]
            if s.queue[0] == topic and s.key == key and s.begin >= low_log
        ]
        found = self.store.find_by_key(topic, key, count, 0, 2**62)
        assert [record.decode(r).body for r in found.records] == expected[-min(count, 64) :]

    @rule(n=st.integers(0, 10**6))
    @precondition(lambda self: self.sent)
    def record_at(self, n: int) -> None:
        s = self.sent[n % len(self.sent)]
        found = self.store.record_at(s.begin)
        if self.store.min_log_offset <= s.begin < self.store.committed_offset:
            assert found is not None
            assert record.decode(found).body == s.body
        else:
            assert found is None
        assert self.store.record_at(s.begin + 1) is None

    def read(self, queue: tuple[str, int], offset: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while (got := self.store.fetch(*queue, offset, 32)).status is FetchStatus.FOUND:
            found += [(m.queue_offset, m.body) for m in record.decode_all(got.body)]
            assert got.next_offset == offset + got.count
            offset = got.next_offset
        return found

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close(self.now)


StoreMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreModel = StoreMachine.TestCase
