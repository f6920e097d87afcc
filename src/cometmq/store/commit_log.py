"""The commit log: every message in arrival order, in files of one size.

Owns: where the next record goes, how far the log is durable, and reading a record back. One rule:
a record never crosses a file, and a file always keeps room for the blank record that closes it:

    record | record | ... | i32 bytes left, i32 blank magic, anything    if record + 8 > bytes left

What stands after the write position is zero, always: recovery cuts by zeroing, so a stale record
can't come back to life when new ones are shorter. It does not know queues, keys or the clock.

Staged (see staging.py), records are written to private memory and committed to the files later:

    ... flushed_at          ... committed_at                    ... write_at
        durable                 in the file, may be read             in memory of this process
"""

from __future__ import annotations

import struct

from cometmq.errors import MessageIllegal
from cometmq.message import StoredMessage
from cometmq.ports import Files, SyncTarget
from cometmq.store.ends import PLAIN, Makers
from cometmq.store.layout import COMMIT_LOG, StoreConfig, segment_name
from cometmq.store.segment import MappedPool, Segment, Segments
from cometmq.store.staging import Staging
from cometmq.wire import record
from cometmq.wire.record import BLANK_BYTES, Blank, Encoded, Scan

_SIZE_MAGIC = struct.Struct(">ii")
_MAGICS = frozenset((record.MAGIC_V1, record.MAGIC_V2))
_NO_BUFFER = memoryview(b"")


class CommitLog:
    """Appends records and reads them back; nothing is durable before `flushed_at`."""

    def __init__(self, files: Files, config: StoreConfig, make: Makers = PLAIN) -> None:
        self._pool = MappedPool(files, config.max_open_log_files, make.pin)
        self.segments = Segments(self._pool, COMMIT_LOG, config.log_file_bytes)
        self.file_bytes = config.log_file_bytes
        self.write_at = 0
        self.flushed_at = 0
        # The newest file: a slice of its buffer (which pins it) and its bounds.
        self._file_view = _NO_BUFFER
        self._file_begin = 0
        self._file_end = 0
        self._next_start = -1
        # Where records are written: that file, or the stage that covers a part of it.
        self.tail_view = _NO_BUFFER
        self.tail_begin = 0
        self.tail_end = 0
        self.staging = Staging(files, config) if config.is_staged else None
        self._committed_at = 0  # only if staged

    @property
    def min_offset(self) -> int:
        return self.segments.start if self.segments.items else self.write_at

    @property
    def committed_at(self) -> int:
        """What is before this may be read; the write position unless records are staged."""
        return self.write_at if self.staging is None else self._committed_at

    # ------------------------------------------------------------------------------------- append

    def append(self, encoded: Encoded, queue_offset: int, store_ms: int) -> int:
        """Append; returns the record's offset, before the bytes are durable."""
        at = self.write_at
        if encoded.size + BLANK_BYTES > self.tail_end - at:
            at = self._make_room(encoded.size)
        begin = self.tail_begin
        try:
            record.write(
                self.tail_view,
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
        if size + BLANK_BYTES > self.tail_end - at:
            at = self._make_room(size)
        offsets: list[int] = []
        position = at
        try:
            for encoded, queue_offset in zip(batch, queue_offsets, strict=True):
                record.write(
                    self.tail_view,
                    position - self.tail_begin,
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
        if self.staging is not None:
            return self._make_staged_room(self.staging, size)
        following = self._segment_at(self.tail_end)
        view = following.buffer[:]  # created before the blank: if the disk refuses, nothing changed
        left = self.tail_end - self.write_at
        if left:
            assert left >= BLANK_BYTES, (self.write_at, self.tail_end)
            record.write_blank(self.tail_view, self.write_at - self.tail_begin, left)
        self.tail_view = self._file_view = view
        self.tail_begin, self.tail_end = self._file_begin, self._file_end = (
            following.start,
            following.end,
        )
        self.write_at = self.tail_begin
        return self.tail_begin

    def _make_staged_room(self, staging: Staging, size: int) -> int:
        """Go on in a fresh stage, of the same file if the record fits that."""
        if size + BLANK_BYTES > staging.stage_bytes:
            raise MessageIllegal(
                f"{size} bytes of records and {BLANK_BYTES} more do not fit a buffer of "
                f"{staging.stage_bytes} (transientStorePoolBytes)"
            )
        staging.need_free()
        upto = self.write_at
        if size + BLANK_BYTES > self._file_end - self.write_at:
            following = self._segment_at(self._file_end)
            view = following.buffer[:]  # if the disk refuses, nothing changed
            left = self._file_end - self.write_at
            if left:
                assert self.tail_end - self.write_at >= BLANK_BYTES, (self.write_at, self.tail_end)
                record.write_blank(self.tail_view, self.write_at - self.tail_begin, left)
                upto += BLANK_BYTES
            self._file_view = view
            self._file_begin, self._file_end = following.start, following.end
            self.write_at = following.start
        staging.end_last(upto, self._committed_at)
        self._take_stage(staging)
        return self.write_at

    def _take_stage(self, staging: Staging) -> None:
        """A stage from the write position on, at most to the end of the file."""
        at = self.write_at
        size = min(staging.stage_bytes, self._file_end - at)
        name = segment_name(COMMIT_LOG, self._file_begin)
        self.tail_view = staging.take(name, at, at - self._file_begin, size)
        self.tail_begin, self.tail_end = at, at + size

    def _segment_at(self, start: int) -> Segment:
        found = self.segments.find(start)
        return found if found is not None else self.segments.create(start)

    def _wipe(self, at: int, size: int) -> None:
        """Undo a half-written record: beyond the write position there are only zeros. (In a stage
        there may be anything: only what is before the write position leaves it.)"""
        begin = at - self.tail_begin
        self.tail_view[begin : begin + size] = bytes(size)

    def take_next(self) -> SyncTarget | None:
        """What creates the next file, once this one is half full; `prepared` must follow."""
        if self._file_end - self.write_at > self.file_bytes // 2 or not self._file_view:
            return None
        if self.segments.find(self._file_end) is not None:
            return None
        self._next_start = self._file_end
        name = segment_name(COMMIT_LOG, self._next_start)
        return self._pool.files.making(name, self.file_bytes)

    def prepared(self) -> None:
        """The file that take_next asked for is there: map it, so that it is ready for the append
        that needs it. That one may have come meanwhile, and made it itself."""
        is_wanted = self._next_start == self._file_end and bool(self._file_view)
        if is_wanted and self.segments.find(self._next_start) is None:
            self.segments.create(self._next_start).buffer  # noqa: B018  reading it maps it

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

    def message(self, at: int) -> StoredMessage | None:
        """The whole message that starts exactly here, its body checked; None if none does."""
        segment = self.segments.find(at)
        if segment is None:
            return None
        begin = at - segment.start
        found = record.decode_at(segment.buffer, begin, segment.size, verify_crc=True)
        return found if found is not None and found.log_offset == at else None

    def properties(self, at: int) -> str | None:
        """The property string of the record that starts exactly here; None if none does."""
        segment = self.segments.find(at)
        if segment is None:
            return None
        return record.properties_of(segment.buffer, at - segment.start, segment.size, at)

    def view(self, at: int, size: int) -> memoryview | None:
        """The bytes of a record as a unit describes it; None if no such record stands there."""
        if at < self.segments.start or size < record.MIN_RECORD_BYTES or at + size > self.write_at:
            return None
        if self.staging is not None and at + size > self._committed_at:
            return None
        begin = at - self._file_begin
        if begin >= 0:
            buffer = self._file_view
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
        """The files that hold bytes between the durable and the committed position."""
        found: list[SyncTarget] = []
        committed_at = self.committed_at
        for segment in reversed(self.segments.items):
            if segment.end <= self.flushed_at:
                break
            if segment.start < committed_at:
                found.append(segment.target())
        found.reverse()
        return found

    def take_writes(self) -> list[SyncTarget]:
        """What commits all that is staged; committed(write position) must follow once it is done.
        Until then no stage is used again."""
        assert self.staging is not None
        self.staging.is_read = True
        return self.staging.writes(self._committed_at, self.write_at)

    def committed(self, upto: int) -> None:
        """What take_writes gave is done: the files hold all before `upto`."""
        assert self.staging is not None
        self._committed_at = max(self._committed_at, upto)
        self.staging.is_read = False
        self.staging.release(self._committed_at)

    def commit(self) -> None:
        """Commit here and now, whatever is under way elsewhere; OSError if that fails."""
        if self.staging is not None and self._committed_at < self.write_at:
            for target in self.staging.writes(self._committed_at, self.write_at):
                target.sync()
            self._committed_at = self.write_at
            self.staging.release(self._committed_at)

    def start_at(self, write_at: int) -> None:
        """Set the write position after recovery; zeros must stand from here on."""
        self.write_at = write_at
        self._committed_at = write_at
        self.flushed_at = write_at
        segment = self.segments.find(write_at)
        if segment is not None:
            self._file_view = segment.buffer[:]
            self._file_begin, self._file_end = segment.start, segment.end
        else:
            # Nothing there yet, or the last file is full to its end: the first append makes it.
            assert write_at % self.file_bytes == 0, write_at
            self._file_view = _NO_BUFFER
            self._file_begin = self._file_end = write_at
        self.tail_view = self._file_view
        self.tail_begin, self.tail_end = self._file_begin, self._file_end
        if self.staging is not None and segment is not None:
            self._take_stage(self.staging)

    def release(self) -> None:
        """Let go of the file being written, so that it can be unmapped."""
        self.tail_view = self._file_view = _NO_BUFFER

    def remove_unused(self) -> None:
        """Delete a file that was created ahead and never written."""
        self.segments.remove_after(max(self.write_at - 1, 0))

    def close(self) -> None:
        self.release()
        if self.staging is not None:
            self.staging.close()
        self._pool.close()

    def sweep(self) -> None:
        self._pool.sweep()
