"""What a broker has done, in plain integers, and rates over the last ten minutes.

Owns: counters and their samples. One rule: hot paths only add to integers; rates are computed when
somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

SAMPLE_MS = 1_000
KEEP_SAMPLES = 601  # ten minutes and one


class Counters(msgspec.Struct):
    """Everything since start."""

    put_count: int = 0
    put_bytes: int = 0
    put_failed: int = 0
    busy_queue_wait: int = 0
    busy_slow_append: int = 0
    busy_slow_disk: int = 0
    get_found: int = 0
    get_miss: int = 0
    get_count: int = 0
    get_bytes: int = 0
    flush_timeouts: int = 0
    notifications: int = 0
    topics_created: int = 0
    dead_letters: int = 0
    expired: int = 0


class Traffic(msgspec.Struct):
    """Messages and bytes of one topic, or of one group on one topic."""

    count: int = 0
    size: int = 0


_Sample = tuple[int, int, int, int, int]


class Stats:
    """Counters, per-topic and per-group traffic, and samples for rates."""

    def __init__(
        self, now_ms: int, make_traffic: Callable[[], Traffic] = lambda: Traffic()
    ) -> None:
        self.boot_ms = now_ms
        self._make_traffic = make_traffic
        self.counters = Counters()
        self.topics: dict[str, Traffic] = {}
        self.groups: dict[tuple[str, str], Traffic] = {}
        self.expired: dict[str, int] = {}
        """By topic: how often a message was kept from a consumer because its time was over."""
        self._samples: deque[_Sample] = deque(maxlen=KEEP_SAMPLES)
        self.next_sample_ms = now_ms

    def sample(self, now_ms: int) -> None:
        if now_ms < self.next_sample_ms:
            return
        self.next_sample_ms = now_ms + SAMPLE_MS
        c = self.counters
        self._samples.append((now_ms, c.put_count, c.get_found, c.get_miss, c.get_count))

    def rates(self, now_ms: int, which: str) -> str:
        """`10 s 1 min 10 min` averages as brokerStatus prints them."""
        c = self.counters
        now = (now_ms, c.put_count, c.get_found, c.get_miss, c.get_count)
        column = {"put": 1, "found": 2, "miss": 3, "transferred": 4}.get(which, 0)
        parts = []
        for span_ms in (10_000, 60_000, 600_000):
            old = self._at(now_ms - span_ms) or (self.boot_ms, 0, 0, 0, 0)
            seconds = max((now_ms - old[0]) / 1000, 0.001)
            if column:
                done = now[column] - old[column]
            else:
                done = (now[2] - old[2]) + (now[3] - old[3])
            parts.append(f"{done / seconds:.2f}")
        return " ".join(parts)

    def _at(self, at_ms: int) -> _Sample | None:
        """The newest sample not younger than `at_ms`'s second, else the oldest kept."""
        if not self._samples:
            return None
        for sample in self._samples:
            if sample[0] >= at_ms:
                return sample
        return self._samples[-1]

    def put(self, topic: str, count: int, size: int) -> None:
        self.counters.put_count += count
        self.counters.put_bytes += size
        traffic = self.of_topic(topic)
        traffic.count += count
        traffic.size += size

    def got(self, topic: str, group: str, count: int, size: int) -> None:
        self.counters.get_found += 1
        self.counters.get_count += count
        self.counters.get_bytes += size
        traffic = self.of_group(topic, group)
        traffic.count += count
        traffic.size += size

    def kept_back(self, topic: str, count: int) -> None:
        self.counters.expired += count
        self.expired[topic] = self.expired.get(topic, 0) + count

    def of_topic(self, topic: str) -> Traffic:
        traffic = self.topics.get(topic)
        if traffic is None:
            traffic = self.topics[topic] = self._make_traffic()
        return traffic

    def of_group(self, topic: str, group: str) -> Traffic:
        traffic = self.groups.get((topic, group))
        if traffic is None:
            traffic = self.groups[topic, group] = self._make_traffic()
        return traffic

    def forget_topic(self, topic: str) -> None:
        self.topics.pop(topic, None)
        self.expired.pop(topic, None)
        for key in [key for key in self.groups if key[0] == topic]:
            del self.groups[key]
