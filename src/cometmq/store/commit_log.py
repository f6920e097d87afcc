"""The commit log: every message in arrival order, in files of one size.

Owns: where the next record goes, how far the log is durable, and reading a record back. One rule:
a record never crosses a file, and a file always keeps room for the blank record that closes it:

    record | record | ... | i32 bytes left, i32 blank magic, anything    if record + 8 > bytes left

What stands after the write position is zero, always: recovery cuts by zeroing, so a stale record
can't come back to life when new ones are shorter. It does not know queues, keys or the clock.
"""

from __future__ import annotations

import struct

from cometmq.errors import MessageIllegal
from cometmq.ports import Files, SyncTarget
from cometmq.store.layout import COMMIT_LOG, StoreConfig
from cometmq.store.segment import MappedPool, Segment, Segments
from cometmq.wire import record
from cometmq.wire.record import BLANK_BYTES, Blank, Encoded, Scan

_SIZE_MAGIC = struct.Struct(">ii")
_MAGICS = frozenset((record.MAGIC_V1, record.MAGIC_V2))
_NO_BUFFER = memoryview(b"")


class CommitLog:
    """Appends records and reads them back; nothing is durable before `flushed_at`."""

    def __init__(self, files: Files, config: StoreConfig) -> None:
        self._pool = MappedPool(files, config.max_open_log_files)
        self.segments = Segments(self._pool, COMMIT_LOG, config.log_file_bytes)
        self.file_bytes = config.log_file_bytes
        self.write_at = 0
        self.flushed_at = 0
        # The file being written: a slice of its buffer (which pins it) and its bounds.
        self._view = _NO_BUFFER
        self._begin = 0
        self._end = 0

    @property
    def min_offset(self) -> int:
        return self.segments.start if self.segments.items else self.write_at

    # ------------------------------------------------------------------------------------- append

    def append(self, encoded: Encoded, queue_offset: int, store_ms: int) -> int:
        """Append; returns the record's offset, before the bytes are durable."""
        at = self.write_at
        if encoded.size + BLANK_BYTES > self._end - at:
            at = self._make_room(encoded.size)
        begin = self._begin
        try:
            record.write(
                self._view,
                at - begin,
                encoded,
                queue_offset=queue_offset,
                log_offset=at,
                store_ms=store_ms,
            )
        except struct.error as error:
            self._wipe(at, encoded.size)
            raise MessageIllegal(f"a number of the message does not fit: {error}") from None
        self.write_at = at + encoded.size
        return at

    def append_batch(
        self, batch: list[Encoded], queue_offsets: list[int], store_ms: int
    ) -> list[int]:
        """Append all in one file, or none."""
        size = sum(encoded.size for encoded in batch)
        at = self.write_at
        if size + BLANK_BYTES > self._end - at:
            at = self._make_room(size)
        offsets: list[int] = []
        position = at
        try:
            for encoded, queue_offset in zip(batch, queue_offsets, strict=True):
                record.write(
                    self._view,
                    position - self._begin,
                    encoded,
                    queue_offset=queue_offset,
                    log_offset=position,
                    store_ms=store_ms,
                )
                offsets.append(position)
                position += encoded.size
        except struct.error as error:
            self._wipe(at, size)
            raise MessageIllegal(f"a number of the message does not fit: {error}") from None
        assert position == at + size
        self.write_at = position
        return offsets

    def _make_room(self, size: int) -> int:
        """Close the file with a blank and go on in the next; returns the new write position."""
        if size + BLANK_BYTES > self.file_bytes:
            raise MessageIllegal(
                f"{size} bytes of records and the closing {BLANK_BYTES} "
                f"do not fit a log file of {self.file_bytes}"
            )
        following = self._segment_at(self._end)
        view = following.buffer[:]  # created before the blank: if the disk refuses, nothing changed
        left = self._end - self.write_at
        if left:
            assert left >= BLANK_BYTES, (self.write_at, self._end)
            record.write_blank(self._view, self.write_at - self._begin, left)
        self._view = view
        self._begin, self._end = following.start, following.end
        self.write_at = self._begin
        return self._begin

    def _segment_at(self, start: int) -> Segment:
        found = self.segments.find(start)
        return found if found is not None else self.segments.create(start)

    def _wipe(self, at: int, size: int) -> None:
        """Undo a half-written record: beyond the write position there are only zeros."""
        begin = at - self._begin
        self._view[begin : begin + size] = bytes(size)

    def prepare_next(self) -> bool:
        """Create the next file ahead once this one is three quarters full; True if it was made."""
        if self._end - self.write_at > self.file_bytes // 4 or not self._view:
            return False
        if self.segments.find(self._end) is not None:
            return False
        self.segments.create(self._end).buffer  # noqa: B018  mapping it creates it
        return True

    # --------------------------------------------------------------------------------------- read

    def scan(self, at: int, *, verify_crc: bool) -> Scan | Blank | None:
        """The record or blank that starts exactly here; None if none does.

        Not bound by the write position: recovery uses this to find that.
        """
        segment = self.segments.find(at)
        if segment is None:
            return None
        found = record.scan(segment.buffer, at - segment.start, segment.size, verify_crc=verify_crc)
        if type(found) is Scan:
            return found if found.log_offset == at else None
        if type(found) is Blank:
            return found if found.size == segment.end - at else None
        return None

    def view(self, at: int, size: int) -> memoryview | None:
        """The bytes of a record as a unit describes it; None if no such record stands there."""
        if at < self.segments.start or size < record.MIN_RECORD_BYTES or at + size > self.write_at:
            return None
        begin = at - self._begin
        if begin >= 0:
            buffer = self._view
        else:
            segment = self.segments.find(at)
            if segment is None:
                return None
            begin = at - segment.start
            buffer = segment.buffer
        if begin + size > len(buffer):
            return None
        stored_size, magic = _SIZE_MAGIC.unpack_from(buffer, begin)
        if stored_size != size or magic not in _MAGICS:
            return None
        return buffer[begin : begin + size]

    def next_file_start(self, at: int) -> int:
        return at - at % self.file_bytes + self.file_bytes

    # -------------------------------------------------------------------------- durable and bounds

    def dirty_targets(self) -> list[SyncTarget]:
        """The files that hold bytes between the durable and the write position."""
        found: list[SyncTarget] = []
        for segment in reversed(self.segments.items):
            if segment.end <= self.flushed_at:
                break
            if segment.start < self.write_at:
                found.append(segment.target())
        found.reverse()
        return found

    def start_at(self, write_at: int) -> None:
        """Set the write position after recovery; zeros must stand from here on."""
        self.write_at = write_at
        self.flushed_at = write_at
        segment = self.segments.find(write_at)
        if segment is not None:
            self._view = segment.buffer[:]
            self._begin, self._end = segment.start, segment.end
        else:
            # Nothing there yet, or the last file is full to its end: the first append makes it.
            assert write_at % self.file_bytes == 0, write_at
            self._view = _NO_BUFFER
            self._begin = self._end = write_at

    def release(self) -> None:
        """Let go of the file being written, so that it can be unmapped."""
        self._view = _NO_BUFFER

    def remove_unused(self) -> None:
        """Delete a file that was created ahead and never written."""
        self.segments.remove_after(max(self.write_at - 1, 0))

    def close(self) -> None:
        self.release()
        self._pool.close()

    def sweep(self) -> None:
        self._pool.sweep()
