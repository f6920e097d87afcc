from array import array
from collections.abc import Callable, Iterable

LogPlace = tuple[memoryview, int, int, int, int, int, int, int]

class Pin:
    def __init__(self, buffer: memoryview, start: int) -> None: ...
    def release(self) -> None: ...
    def take_used(self) -> bool: ...
    @property
    def is_released(self) -> bool: ...

class QueueEnds:
    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    next_offset: int
    log_end: int
    log_min: int
    is_watched: bool
    is_marked: bool
    def __init__(self, topic: str, queue_id: int) -> None: ...
    def pin_tail(self, pin: Pin | None, mark: Callable[[], None]) -> None: ...
    def pin_read(self, pin: Pin | None) -> None: ...

class IndexHead:
    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    slots_used: int
    count: int

class Traffic:
    count: int
    size: int
    def __init__(self, count: int = 0, size: int = 0) -> None: ...

class Hot:
    write_at: int
    frames: int
    dispatched: int
    dispatched_ms: int
    is_indexing: bool
    def configure_store(
        self,
        *,
        file_bytes: int,
        max_message_bytes: int,
        in_memory_bytes: int,
        max_fetch_count: int,
        max_fetch_bytes: int,
        max_cold_fetch_count: int,
        max_cold_fetch_bytes: int,
        max_scan_units: int,
        index_slots: int,
        index_entries: int,
        is_indexed: bool,
    ) -> None: ...
    def configure_broker(
        self,
        *,
        max_frame_bytes: int,
        is_lite_allowed: bool,
        added: bytes,
        store_host: bytes,
        ack_json: list[bytes],
        pull_json: list[bytes],
        ack_binary: list[bytes],
        pull_binary: list[bytes],
    ) -> None: ...
    def configure_kinds(
        self,
        *,
        delays_ms: list[int],
        takes_timed: bool,
        precision_ms: int,
        max_delay_ms: int,
        takes_halves: bool,
        broker_name: bytes,
    ) -> None: ...
    def learn_place(
        self, kind: int, queue_count: int, ends: QueueEnds, traffic: Traffic | None
    ) -> None: ...
    def learn_ends(
        self,
        ends: QueueEnds,
        traffic: Traffic,
        open_ends: Callable[[], tuple[int, int, int, bytearray]],
        ended: Callable[[int, int, int], None],
    ) -> None: ...
    def learn_queue(
        self,
        topic: str,
        queue_count: int,
        ends: QueueEnds | None,
        traffic: Traffic,
        *,
        is_open: bool = True,
        is_target: bool = False,
        may_keep: bool = False,
    ) -> None: ...
    def learn_pull(
        self,
        group: str,
        topic: str,
        text: str | None,
        *,
        sub_version: int,
        queue_count: int,
        codes: Iterable[int] | None,
        traffic: Traffic,
        offsets: dict[tuple[str, str], dict[int, int]],
        pulled: dict[tuple[str, str], dict[int, int]],
        commit: Callable[[int, int, bytes], None],
        ends: QueueEnds,
    ) -> None: ...
    def learn_log_file(self, pin: Pin) -> None: ...
    def forget(self) -> None: ...
    def forget_pulls(self) -> None: ...
    def forget_records(self) -> None: ...
    def feed(
        self,
        data: bytes,
        at: int,
        log: memoryview,
        log_begin: int,
        log_end: int,
        write_at: int,
        read_upto: int,
        log_min: int,
        store_ms: int,
        now_ms: int,
        born_host: bytes,
        allowed: int,
    ) -> int: ...
    def deliver_level(self, level: QueueEnds, offset: int, most: int, log: LogPlace) -> int: ...
    def enter_timers(
        self,
        source: QueueEnds,
        offset: int,
        most: int,
        log: LogPlace,
        wheel: memoryview,
        slots: int,
        precision_ms: int,
        units: memoryview,
        units_begin: int,
        units_end: int,
        units_limit: int,
        first_ms: int,
        write_ms: int,
        window_ms: int,
        runs: list[tuple[bytes, int]],
    ) -> tuple[int, int, int]: ...
    def check_timers(
        self,
        units: memoryview,
        begin: int,
        at: int,
        end: int,
        wheel: memoryview,
        slots: int,
        precision_ms: int,
        read_ms: int,
        log_end: int,
    ) -> int: ...
    def timer_chain(
        self, units: memoryview, begin: int, end: int, at: int, most: int, positions: array[int]
    ) -> int: ...
    def deliver_timed(
        self,
        units: memoryview,
        begin: int,
        end: int,
        positions: array[int],
        most: int,
        log: LogPlace,
        runs: list[tuple[bytes, int]],
    ) -> int: ...
    def take_replies(self) -> bytes | None: ...
    def take_acks(self) -> bytes | None: ...
    def take_kept(self) -> int: ...
    @property
    def is_full(self) -> bool: ...
    def take_sums(self) -> tuple[int, int, int, int, int, int]: ...
    def walk_queue(self, ends: QueueEnds, is_schedule: bool) -> None: ...
    def walk_over(self) -> None: ...
    def walk(
        self,
        buffer: memoryview,
        begin: int,
        position: int,
        checks_crc: bool,
        delays_ms: tuple[int, ...],
    ) -> int: ...
    def pass_over(
        self, buffer: memoryview, begin: int, position: int, end: int, text: bytes
    ) -> int: ...
    @property
    def pending_at(self) -> int: ...
    def drop_pending(self, position: int) -> None: ...
    def dispatch(
        self,
        position: int,
        limit: int,
        index: IndexHead | None,
        index_buffer: memoryview | None,
        arrivals: list[tuple[QueueEnds, int, int, int]],
    ) -> int: ...
