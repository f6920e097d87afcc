"""All consume queues of a store.

Owns: lookup by topic and queue id, loading, which queue files are dirty, and the numbers of queues
that were deleted. One rule: memory and open files stay bounded with tens of thousands of queues: a
queue is a few small objects, its files are mapped on use and unmapped when others need the room;
a dirty file is remembered by name, so that the next flush syncs it even if it was unmapped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

from cometmq.ports import Files, SyncTarget
from cometmq.store.consume_queue import ConsumeQueue
from cometmq.store.ends import PLAIN, Makers
from cometmq.store.layout import (
    CONSUME_QUEUE,
    MAX_QUEUE_ID,
    PAGE_BYTES,
    StoreConfig,
    is_topic_name,
    queue_folder,
)
from cometmq.store.segment import MappedPool, Segment, Segments

log = logging.getLogger("cometmq.store")

MOST_LOOKED_AT = 4_000  # dirty queue files in one take_dirty that does not take all


class Queues:
    """The consume queues by (topic, queue id)."""

    def __init__(self, files: Files, config: StoreConfig, make: Makers = PLAIN) -> None:
        self._files = files
        self._config = config
        self._make = make
        limit = config.max_open_queue_files or files.queue_map_limit
        self.pool = MappedPool(files, limit, make.pin)
        self._watched: set[tuple[str, int]] = set()
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._ids: dict[str, list[int]] = {}
        self.dirty: dict[Segment, ConsumeQueue] = {}
        # Numbers of deleted queues: a topic made again in this run goes on where it ended.
        self._retired: dict[tuple[str, int], int] = {}
        self.queue_set = object()
        """Another one whenever a queue has come or gone."""

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(self._queues.values())

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._queues.get((topic, queue_id))

    def need(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made if it is new; UsageError if the topic can't be a folder's name."""
        queue = self._queues.get((topic, queue_id))
        return queue if queue is not None else self._add(topic, queue_id)

    def ids(self, topic: str) -> list[int]:
        return sorted(self._ids.get(topic, ()))

    def _add(self, topic: str, queue_id: int) -> ConsumeQueue:
        folder = queue_folder(topic, queue_id)
        segments = Segments(self.pool, folder, self._config.queue_file_bytes)
        ends = self._make.queue_ends(topic, queue_id)
        ends.is_watched = (topic, queue_id) in self._watched
        queue = ConsumeQueue(ends, segments, self.dirty)
        retired = self._retired.get((topic, queue_id), 0)
        if retired:
            queue.restart(retired)  # OSError if there is no room: then the number stays known
            del self._retired[topic, queue_id]
        self._queues[topic, queue_id] = queue
        self._ids.setdefault(topic, []).append(queue_id)
        self.queue_set = object()
        return queue

    def watch(self, topic: str, queue_id: int, is_watched: bool) -> None:
        """Whether somebody waits for messages of this queue, which may not exist yet."""
        if is_watched:
            self._watched.add((topic, queue_id))
        else:
            self._watched.discard((topic, queue_id))
        queue = self._queues.get((topic, queue_id))
        if queue is not None:
            queue.ends.is_watched = is_watched

    def load(self) -> None:
        """Open every queue found on disk; folders that can't be ours are left alone."""
        for topic in self._files.folders(CONSUME_QUEUE):
            if not is_topic_name(topic):
                log.warning("stray_folder name=%s/%s action=ignored", CONSUME_QUEUE, topic)
                continue
            for name in self._files.folders(f"{CONSUME_QUEUE}/{topic}"):
                if not name.isdigit() or str(int(name)) != name or int(name) > MAX_QUEUE_ID:
                    log.warning("stray_folder name=%s/%s/%s", CONSUME_QUEUE, topic, name)
                    continue
                self._add(topic, int(name)).load()

    def remove_topic(self, topic: str) -> int:
        """Delete a topic's queues and their files; returns how many there were."""
        ids = self._ids.pop(topic, [])
        self.queue_set = object()
        for queue_id in ids:
            queue = self._queues.pop((topic, queue_id))
            for segment in queue.segments.items:
                self.dirty.pop(segment, None)
                segment.remove()
            if queue.ends.next_offset:
                self._retired[topic, queue_id] = queue.ends.next_offset
        if ids:
            self._files.remove_folder(f"{CONSUME_QUEUE}/{topic}")
        return len(ids)

    def take_dirty(self, *, least_pages: int) -> list[SyncTarget]:
        """What to sync now; those with fewer dirty pages stay dirty (0 takes all).

        Unless all are taken, only so many are looked at, and the next time others: with tens of
        thousands of dirty queues the look alone would hold up the loop.
        """
        targets: list[SyncTarget] = []
        look = (
            self.dirty.items() if least_pages == 0 else islice(self.dirty.items(), MOST_LOOKED_AT)
        )
        for segment, queue in list(look):
            # The queues share this dict: change it, never replace it.
            del self.dirty[segment]
            is_full = queue.max_offset * 20 >= segment.end
            if least_pages == 0 or is_full or queue.dirty_pages(PAGE_BYTES) >= least_pages:
                segment.is_dirty = False
                queue.ends.is_marked = False
                queue.flush_taken()
                targets.append(segment.target())
            else:
                self.dirty[segment] = queue  # behind the others
        return targets

    def close(self) -> None:
        self.pool.close()
