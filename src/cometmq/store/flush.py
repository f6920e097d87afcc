"""When to commit and sync what, and what that proves.

Owns: the flush rules and the times in the checkpoint. One rule: what a sync proves is fixed when
it is taken, not when it returns, because writing goes on meanwhile.

    log      sync mode: whenever there is anything; async: every 500 ms if 4 pages are dirty or a
             file was filled, and everything every 10 s
    commit   staged only (see staging.py): as soon as 4 pages or a full stage wait, and everything
             every 200 ms; a log flush covers only what was committed when it was taken
    queues   every second those with 2 dirty pages; every 60 s all of them, and the key index
The queues' time in the checkpoint moves only when no dirty queue was left out.
"""

from __future__ import annotations

import logging

import msgspec

from cometmq.ports import NEVER_MS, Flush, SyncTarget
from cometmq.store.checkpoint import Checkpoint
from cometmq.store.commit_log import CommitLog
from cometmq.store.key_index import KeyIndex
from cometmq.store.layout import PAGE_BYTES, StoreConfig
from cometmq.store.queues import Queues

log = logging.getLogger("cometmq.store")

COMMIT = "commit"
LOG = "log"
QUEUES = "queues"
NEXT_FILE = "next file"


class _Proof(msgspec.Struct):
    """What will be committed or durable once the flush under way succeeds."""

    commit_offset: int = 0
    commit_ms: int = 0
    log_offset: int = 0
    log_ms: int = 0
    queues_offset: int = 0
    queues_ms: int = 0
    index_ms: int = 0


class FlushPlan:
    """At most one flush of each kind is under way."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: Queues,
        index: KeyIndex | None,
        checkpoint: Checkpoint,
        config: StoreConfig,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._index = index
        self._checkpoint = checkpoint
        self._config = config
        self._under_way: dict[str, _Proof] = {}
        self.queues_at = 0  # the units and keys of all records before this are durable
        self._log_at_ms = 0
        self._log_all_at_ms = 0
        self._queues_at_ms = 0
        self._queues_all_at_ms = 0
        self._commit_at_ms = 0
        self._commit_after_ms = max(config.commit_interval_ms, config.commit_thorough_ms)
        self._committed_ms = 0  # no committed record is younger
        self.since_ms = 0  # when the commit or log flush under way was taken; 0: none is
        # Inside these bounds take_log has nothing to do; asking costs less than finding out.
        self.quiet_from_ms = 0
        self.quiet_until_ms = 0

    def start(self, now_ms: int, *, queues_at: int) -> None:
        config = self._config
        self.queues_at = queues_at
        self._log_at_ms = now_ms + config.flush_interval_ms
        self._log_all_at_ms = now_ms + config.flush_thorough_ms
        self._queues_at_ms = now_ms + config.queue_flush_interval_ms
        self._queues_all_at_ms = now_ms + config.queue_flush_thorough_ms

    # -------------------------------------------------------------------------------------- commit

    def take_commit(self, last_store_ms: int, now_ms: int) -> Flush | None:
        """What to bring from memory into the log's files now, if anything."""
        if not self._is_commit_wanted or not self._is_commit_due(now_ms):
            return None
        self._commit_at_ms = now_ms + self._commit_after_ms
        proof = _Proof(commit_offset=self._log.write_at, commit_ms=last_store_ms)
        self._under_way[COMMIT] = proof
        self.since_ms = self.since_ms or now_ms
        return Flush(COMMIT, self._log.take_writes())

    @property
    def _is_commit_wanted(self) -> bool:
        return self._log.write_at > self._log.committed_at and COMMIT not in self._under_way

    def _is_commit_due(self, now_ms: int) -> bool:
        assert self._log.staging is not None
        pages = self._log.write_at // PAGE_BYTES - self._log.committed_at // PAGE_BYTES
        return (
            pages >= self._config.commit_least_pages
            or self._log.staging.is_full_waiting
            or not _is_ahead(self._commit_at_ms, now_ms, self._commit_after_ms)
        )

    # ----------------------------------------------------------------------------------------- log

    def take_log(self, last_store_ms: int, now_ms: int) -> Flush | None:
        committed_at = self._log.committed_at
        if LOG in self._under_way or committed_at <= self._log.flushed_at:
            return None
        is_staged = self._log.staging is not None
        if not self._config.is_sync_flush and not self._is_log_due(now_ms):
            if not is_staged:
                self.quiet_from_ms = now_ms
                self.quiet_until_ms = self._log_at_ms
            return None
        log_ms = self._committed_ms if is_staged else last_store_ms
        self._under_way[LOG] = _Proof(log_offset=committed_at, log_ms=log_ms)
        self.since_ms = self.since_ms or now_ms
        return Flush(LOG, self._log.dirty_targets())

    def _is_log_due(self, now_ms: int) -> bool:
        config = self._config
        if _is_ahead(self._log_at_ms, now_ms, config.flush_interval_ms):
            return False
        self._log_at_ms = now_ms + config.flush_interval_ms
        if not _is_ahead(self._log_all_at_ms, now_ms, config.flush_thorough_ms):
            self._log_all_at_ms = now_ms + config.flush_thorough_ms
            return True
        written, flushed = self._log.committed_at, self._log.flushed_at
        file_bytes = self._log.file_bytes
        pages = written // PAGE_BYTES - flushed // PAGE_BYTES
        return pages >= config.flush_least_pages or written // file_bytes > flushed // file_bytes

    def stalled_ms(self, now_ms: int) -> int:
        """How long the commit or log flush under way has been so; 0 if none is."""
        return now_ms - self.since_ms if self.since_ms else 0

    def take_next_file(self) -> Flush | None:
        """What makes the next log file ahead, so that no append waits for the file system."""
        if NEXT_FILE in self._under_way:
            return None
        target = self._log.take_next()
        if target is None:
            return None
        self._under_way[NEXT_FILE] = _Proof()
        return Flush(NEXT_FILE, [target])

    def next_file_failed(self, reason: str, now_ms: int) -> None:
        """Tried again with the next tick; the append that needs it will say so, too."""
        self._under_way.pop(NEXT_FILE, None)
        log.error("next_log_file_refused reason=%s", reason)

    def sync_log(self, last_store_ms: int) -> None:
        """Commit and sync the log here and now; OSError if that fails."""
        self._log.commit()
        upto = self._log.write_at
        for target in self._log.dirty_targets():
            target.sync()
        self._log.flushed_at = upto
        self._checkpoint.update(log_ms=last_store_ms)

    # -------------------------------------------------------------------------------------- queues

    def take_queues(
        self, dispatched: int, dispatched_ms: int, now_ms: int, *, is_ms_over: bool
    ) -> Flush | None:
        """`dispatched`, `dispatched_ms`: how far dispatch has come, as log offset and time;
        `is_ms_over`: no record of that time is still to be dispatched."""
        config = self._config
        if QUEUES in self._under_way:
            return None
        if _is_ahead(self._queues_at_ms, now_ms, config.queue_flush_interval_ms):
            return None
        self._queues_at_ms = now_ms + config.queue_flush_interval_ms
        is_all = not _is_ahead(self._queues_all_at_ms, now_ms, config.queue_flush_thorough_ms)
        proof = _Proof()
        targets = self._take_queue_targets(
            dispatched, dispatched_ms, proof, is_all=is_all, is_ms_over=is_ms_over
        )
        if is_all:
            self._queues_all_at_ms = now_ms + config.queue_flush_thorough_ms
        if not targets:
            self._prove(proof)  # nothing was dirty: it is all durable already
            return None
        self._under_way[QUEUES] = proof
        return Flush(QUEUES, targets)

    def _take_queue_targets(
        self, dispatched: int, dispatched_ms: int, proof: _Proof, *, is_all: bool, is_ms_over: bool
    ) -> list[SyncTarget]:
        least_pages = 0 if is_all else self._config.queue_flush_least_pages
        targets = self._queues.take_dirty(least_pages=least_pages)
        if not self._queues.dirty:
            proof.queues_ms = dispatched_ms
        if is_all:
            proof.queues_offset = dispatched
            if self._index is not None:
                targets += self._index.take_dirty()
                proof.index_ms = self._index.durable_ms(is_ms_over=is_ms_over)
        if self._checkpoint.is_dirty:
            self._checkpoint.is_dirty = False
            targets.append(self._checkpoint.target())
        return targets

    def hurry_log(self, now_ms: int) -> None:
        """Make the next flush of the log a thorough one, and due."""
        self._log_at_ms = self._log_all_at_ms = now_ms
        self.quiet_until_ms = 0

    def hurry_queues(self, now_ms: int) -> None:
        """Make the next flush of queues a thorough one, and due."""
        self._queues_at_ms = self._queues_all_at_ms = now_ms

    def sync_queues(self, dispatched: int, dispatched_ms: int) -> None:
        """Sync queues, index and checkpoint here and now; OSError if that fails."""
        proof = _Proof()
        targets = self._take_queue_targets(
            dispatched, dispatched_ms, proof, is_all=True, is_ms_over=True
        )
        for target in targets:
            target.sync()
        self._prove(proof)
        self._checkpoint.is_dirty = False
        self._checkpoint.target().sync()

    # ------------------------------------------------------------------------------------- outcome

    def done(self, kind: str) -> None:
        proof = self._under_way.pop(kind, None)
        if proof is None:
            return
        if kind in (LOG, COMMIT):
            self.since_ms = 0
        if kind == NEXT_FILE:
            self._log.prepared()
        elif kind == COMMIT:
            self._log.committed(proof.commit_offset)
            self._committed_ms = max(self._committed_ms, proof.commit_ms)
        else:
            self._prove(proof)

    def _prove(self, proof: _Proof) -> None:
        self._log.flushed_at = max(self._log.flushed_at, proof.log_offset)
        self.queues_at = max(self.queues_at, proof.queues_offset)
        self._checkpoint.update(
            log_ms=proof.log_ms, queues_ms=proof.queues_ms, index_ms=proof.index_ms
        )

    @property
    def is_queue_work(self) -> bool:
        """Whether any unit or key is not durable yet."""
        return bool(self._queues.dirty) or (self._index is not None and self._index.is_dirty)

    def next_ms(self, now_ms: int) -> int:
        """When a commit or a flush may next be due."""
        soonest = NEVER_MS
        if self._is_commit_wanted:
            soonest = now_ms if self._is_commit_due(now_ms) else self._commit_at_ms
        if LOG not in self._under_way and self._log.committed_at > self._log.flushed_at:
            soonest = min(soonest, now_ms if self._config.is_sync_flush else self._log_at_ms)
        if QUEUES not in self._under_way and (self.is_queue_work or self._checkpoint.is_dirty):
            soonest = min(soonest, self._queues_at_ms)
        return soonest


def _is_ahead(at_ms: int, now_ms: int, interval_ms: int) -> bool:
    """Whether a deadline is still to come; one too far ahead was set before the clock stepped."""
    return 0 < at_ms - now_ms <= interval_ms
