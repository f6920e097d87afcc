"""The checkpoint: how far each part of the store is known to be on disk, as store times.

     0 i64 log ms     8 i64 queues ms    16 i64 index ms
    24 i64 leader's flushed offset       32 i64 confirmed offset        zeros to 4096

Owns: these five numbers. One rule: a time is written only after everything up to it is durable
(RocketMQ's own may run ahead, its bug 678), so recovery may skip what is older. The last two are
kept for RocketMQ's replication and only carried along.
"""

from __future__ import annotations

import logging
import struct

from cometmq.ports import Files, SyncTarget
from cometmq.store.layout import CHECKPOINT, CHECKPOINT_BYTES

log = logging.getLogger("cometmq.store")

_FIELDS = struct.Struct(">qqqqq")


class Checkpoint:
    """Times are 0 until known. Changing them marks the file dirty; the store syncs it."""

    def __init__(self, files: Files) -> None:
        content = files.read(CHECKPOINT)
        if content is not None and len(content) != CHECKPOINT_BYTES:
            log.error("checkpoint_bad size=%d action=begin anew", len(content))
            files.write(CHECKPOINT, bytes(CHECKPOINT_BYTES))
        self._mapped = files.map(CHECKPOINT, CHECKPOINT_BYTES)
        fields = _FIELDS.unpack_from(self._mapped.buffer, 0)
        self.log_ms, self.queues_ms, self.index_ms = (max(0, ms) for ms in fields[:3])
        self._leader_flushed, self._confirmed = fields[3:]
        self.is_dirty = False

    def update(self, *, log_ms: int = 0, queues_ms: int = 0, index_ms: int = 0) -> None:
        """Raise times; a smaller one is ignored."""
        if log_ms > self.log_ms or queues_ms > self.queues_ms or index_ms > self.index_ms:
            self.log_ms = max(self.log_ms, log_ms)
            self.queues_ms = max(self.queues_ms, queues_ms)
            self.index_ms = max(self.index_ms, index_ms)
            self._write()

    def rewind(self, log_ms: int) -> None:
        """After a cut, times beyond the last record would vouch for what is yet to come."""
        if max(self.log_ms, self.queues_ms, self.index_ms) > log_ms:
            self.log_ms = min(self.log_ms, log_ms)
            self.queues_ms = min(self.queues_ms, log_ms)
            self.index_ms = min(self.index_ms, log_ms)
            self._write()

    def rewind_queues(self, queues_ms: int) -> None:
        """Units from this time on are about to be written again, and are not durable until then."""
        if self.queues_ms > queues_ms:
            self.queues_ms = max(queues_ms, 0)
            self._write()
            self._mapped.sync()

    def rewind_index(self, index_ms: int) -> None:
        """The same for the key index: no file that ends later than this is vouched for."""
        if self.index_ms > index_ms:
            self.index_ms = max(index_ms, 0)
            self._write()
            self._mapped.sync()

    def _write(self) -> None:
        _FIELDS.pack_into(
            self._mapped.buffer,
            0,
            self.log_ms,
            self.queues_ms,
            self.index_ms,
            self._leader_flushed,
            self._confirmed,
        )
        self.is_dirty = True

    def target(self) -> SyncTarget:
        return self._mapped

    def close(self) -> None:
        self._mapped.close()
