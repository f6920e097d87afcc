"""One task of the sink: Arrow batches in, acknowledged messages out.

Owns: numbering, and cutting rows into requests. One rule: both depend on nothing but the rows in
their order, the layout and the options, so that every attempt of a task makes the same requests and
a broker can tell what it has.

Numbers (PRODUCER_SEQ) count the rows of one queue in their order; delayed rows, which travel alone,
have a count and a producer id of their own. A request takes rows of its queue until `batchMessages`
or `batchBytes` is reached, across Arrow batches; what is open at the end goes as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cometmq.errors import UsageError
from cometmq.spark.sink_bad import BadFile, BadRecords
from cometmq.spark.sink_encode import UniqueKeys, entries, split_entry
from cometmq.spark.sink_options import SinkOptions
from cometmq.spark.sink_place import Ints, Layout, buffers_of, first_turn
from cometmq.spark.sink_rows import NONE, Faults, Mask, Rows
from cometmq.spark.sink_send import SEND_BATCH, SEND_ONE, Request, TaskSender, Totals

MAX_ROWS = 2**32
MAX_TOPICS = 1000
SORT_IF_RUNS_SHORTER_THAN = 16


@dataclass(frozen=True)
class Identity:
    """Who writes: the same for every attempt of the same rows."""

    writer: str
    batch: int
    partition: int
    attempt: int
    """Of this attempt alone; only names temporary files."""


class _Open:
    """A request that is being filled."""

    __slots__ = ("bytes", "count", "first_row", "last_row", "pieces")

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        self.count = 0
        self.bytes = 0
        self.first_row = self.last_row = 0


class _Stream:
    """The rows of one topic and kind: how far each queue has counted, and its open request."""

    def __init__(self, layout: Layout, producer: str, is_delayed: bool) -> None:
        self.layout = layout
        self.producer = producer
        self.is_delayed = is_delayed
        self.next_n = np.zeros(len(layout.queues), np.int64)
        self.open = [_Open() for _ in layout.queues]


class Task:
    """Writes the rows of one attempt."""

    def __init__(
        self, options: SinkOptions, fields: list[str], identity: Identity, sender: TaskSender
    ) -> None:
        self._options = options
        self._fields = fields
        self._identity = identity
        self._sender = sender
        self._keys = UniqueKeys(identity.writer, identity.batch, identity.partition)
        self._start = first_turn(identity.partition, identity.batch)
        self._layouts: dict[str, Layout] = {}
        self._streams: dict[tuple[str, bool], _Stream] = {}
        self._row = 0
        self._bad: BadRecords | None = None
        self._ready: list[Request] = []

    def write(self, batches: Iterable[pa.RecordBatch]) -> tuple[Totals, BadFile | None, int]:
        """Totals, the file of bad rows, and how many are in it. All or an error."""
        try:
            for batch in batches:
                if batch.num_rows:
                    self._write_batch(batch)
                    self._send_ready()
            for stream in self._streams.values():
                for at in range(len(stream.open)):
                    self._close(stream, at)
            self._send_ready()
            totals = self._sender.finish()
            if self._bad is None:
                return totals, None, 0
            self._bad.close()
            return totals, BadFile(self._bad.temporary, self._bad.name), self._bad.count
        except BaseException:
            self._sender.give_up()
            if self._bad is not None:
                self._bad.discard()
            raise

    @property
    def topics(self) -> tuple[str, ...]:
        """Those that rows were for, so far."""
        return tuple(self._layouts)

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, []
        self._sender.put(ready)

    # ----------------------------------------------------------------------------------- one batch

    def _write_batch(self, batch: pa.RecordBatch) -> None:
        numbers = np.arange(self._row, self._row + batch.num_rows, dtype=np.int64)
        self._row += batch.num_rows
        if self._row > MAX_ROWS:
            raise UsageError(f"more than {MAX_ROWS} rows in one task: use more partitions")
        rows = Rows(batch, numbers, self._fields, self._options)
        places = self._places(rows)
        if rows.faults.reasons:
            batch, numbers = self._set_aside(batch, numbers, rows.faults)
            if not batch.num_rows:
                return
            rows = Rows(batch, numbers, self._fields, self._options)
            places = self._places(rows)
        is_delayed = rows.is_delayed
        for code, topic in enumerate(rows.topics):
            of_topic = rows.topic_codes == code
            for kind in (False, True):
                chosen = of_topic & (is_delayed == kind)
                if chosen.all():
                    self._take(self._stream(topic, kind), rows, places)
                elif chosen.any():
                    part = batch.filter(pa.array(chosen))
                    some = Rows(part, numbers[chosen], self._fields, self._options)
                    self._take(self._stream(topic, kind), some, places[chosen])

    def _set_aside(
        self, batch: pa.RecordBatch, numbers: Ints, faults: Faults
    ) -> tuple[pa.RecordBatch, Ints]:
        """The batch without its bad rows; UsageError if there is no place for them."""
        path, who = self._options.bad_records_path, self._identity
        reasons = faults.reasons
        bad = sorted(reasons)
        if path is None:
            first = bad[0]
            more = f" (and {len(bad) - 1} more of these {batch.num_rows} rows)" if bad[1:] else ""
            raise UsageError(
                f"row {numbers[first]} of partition {who.partition} can't be a message: "
                f"{reasons[first]}{more}. With the option badRecordsPath such rows are set aside"
            )
        if self._bad is None:
            kind = self._options.bad_records_format
            self._bad = BadRecords(path, kind, who.writer, who.batch, who.partition, who.attempt)
        self._bad.add(
            batch.take(pa.array(bad, pa.int64())),
            numbers[bad].tolist(),
            [reasons[at] for at in bad],
        )
        is_good = np.ones(batch.num_rows, bool)
        is_good[bad] = False
        return batch.filter(pa.array(is_good)), numbers[is_good]

    # -------------------------------------------------------------------------------------- queues

    def _layout(self, topic: str) -> Layout:
        found = self._layouts.get(topic)
        if found is None:
            if len(self._layouts) >= MAX_TOPICS:
                raise UsageError(f"more than {MAX_TOPICS} topics in one task: is `topic` right?")
            cut = (self._options.batch_messages, self._options.batch_bytes)
            found = self._layouts[topic] = Layout(topic, self._sender.queues(topic), cut)
        return found

    def _stream(self, topic: str, is_delayed: bool) -> _Stream:
        found = self._streams.get((topic, is_delayed))
        if found is None:
            layout, who = self._layout(topic), self._identity
            kind = ".d" if is_delayed else ""
            producer = f"{who.writer}.{who.partition}.{layout.fingerprint}{kind}"
            found = self._streams[topic, is_delayed] = _Stream(layout, producer, is_delayed)
        return found

    def _places(self, rows: Rows) -> Ints:
        """Of each row its queue's place in its topic's layout; faults for queues that aren't."""
        places = np.zeros(rows.count, np.int64)
        is_bad = np.zeros(rows.count, bool)
        is_bad[list(rows.faults.reasons)] = True
        for code, topic in enumerate(rows.topics):
            mask = (rows.topic_codes == code) & ~is_bad
            if not mask.any():
                continue
            layout = self._layout(topic)
            places[mask] = layout.in_turn(rows.numbers[mask], self._start)
            if rows.shard is not None:
                keyed = mask & _filled(rows.shard)
                if keyed.any():
                    keys = rows.shard if keyed.all() else rows.shard.filter(pa.array(keyed))
                    places[keyed] = layout.by_key(keys)
            self._place_by_id(rows, layout, mask & (rows.queue_id != NONE), places)
        return places

    def _place_by_id(self, rows: Rows, layout: Layout, mask: Mask, places: Ints) -> None:
        """Few queues, many rows: each queue is looked up once."""
        if not mask.any():
            return
        brokers: list[str | None] = [None]
        codes = np.zeros(rows.count, np.int64)
        if rows.broker is not None:
            coded = rows.broker.dictionary_encode()
            brokers += [name.decode() for name in coded.dictionary.to_pylist()]
            indices = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            codes = indices.astype(np.int64) + 1
        for broker_code, queue_id in np.unique(
            np.stack((codes[mask], rows.queue_id[mask])), axis=1
        ).T.tolist():
            same = mask & (codes == broker_code) & (rows.queue_id == queue_id)
            found = layout.find(brokers[broker_code], queue_id)
            if isinstance(found, str):
                rows.faults.add(same, found)
            else:
                places[same] = found

    # ------------------------------------------------------------------------------------ requests

    def _take(self, stream: _Stream, rows: Rows, places: Ints) -> None:
        """Number the rows, encode them, cut them into requests."""
        n, order = _numbered(places, stream.next_n)
        keys = self._keys.of(rows.numbers)
        encoded = entries(rows, keys, stream.producer, self._identity.batch, n)
        numbers = rows.numbers
        edges = _runs(places)
        if len(edges) - 1 > max(rows.count // SORT_IF_RUNS_SHORTER_THAN, len(stream.open)):
            encoded = encoded.take(pa.array(order))
            places, numbers = places[order], numbers[order]
            edges = _runs(places)
        offsets, data = buffers_of(encoded)
        view = memoryview(data.data)
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            self._fill(stream, int(places[begin]), offsets, view, numbers, begin, end)

    def _fill(
        self,
        stream: _Stream,
        at: int,
        offsets: Ints,
        view: memoryview,
        numbers: Ints,
        begin: int,
        end: int,
    ) -> None:
        """Rows begin to end, all of one queue, into its open request and those after it."""
        most_count = 1 if stream.is_delayed else self._options.batch_messages
        most_bytes = self._options.batch_bytes
        while begin < end:
            request = stream.open[at]
            last = min(end, begin + most_count - request.count)
            room_ends = int(offsets[begin]) + most_bytes - request.bytes
            upto = int(np.searchsorted(offsets[begin : last + 1], room_ends, "right")) - 1 + begin
            if upto <= begin:
                if request.count:
                    self._close(stream, at)
                    continue
                upto = begin + 1  # larger than a request may be: it travels alone
            first, behind = int(offsets[begin]), int(offsets[upto])
            request.pieces.append(view[first:behind])
            if not request.count:
                request.first_row = int(numbers[begin])
            request.last_row = int(numbers[upto - 1])
            request.count += upto - begin
            request.bytes += behind - first
            if request.count >= most_count or request.bytes >= most_bytes:
                self._close(stream, at)
            begin = upto

    def _close(self, stream: _Stream, at: int) -> None:
        filled = stream.open[at]
        if not filled.count:
            return
        stream.open[at] = _Open()
        body = b"".join(filled.pieces)
        code, properties = SEND_BATCH, "WAIT\x01true\x02"
        if stream.is_delayed or (filled.count == 1 and filled.bytes > self._options.batch_bytes):
            body, text = split_entry(body)
            code, properties = SEND_ONE, text.decode()
        self._ready.append(
            Request(
                stream.layout.queues[at],
                code,
                body,
                properties,
                filled.count,
                filled.first_row,
                filled.last_row,
            )
        )


def _numbered(places: Ints, next_n: Ints) -> tuple[Ints, Ints]:
    """Each row's number in its queue, and the rows sorted by queue; counts on in `next_n`."""
    order = np.argsort(places, kind="stable")
    counts = np.bincount(places, minlength=len(next_n))
    begins = np.cumsum(counts) - counts
    within = np.arange(len(places)) - np.repeat(begins, counts)
    n = np.empty(len(places), np.int64)
    n[order] = within + np.repeat(next_n, counts)
    next_n += counts
    return n, order


def _runs(places: Ints) -> Ints:
    """Where runs of equal places begin, and the end."""
    changes = np.flatnonzero(places[1:] != places[:-1]) + 1
    return np.concatenate(([0], changes, [len(places)]))


def _filled(column: pa.Array) -> Mask:
    lengths = column.is_valid().to_numpy(zero_copy_only=False)
    offsets, _ = buffers_of(column)
    return np.asarray(lengths, bool) & (offsets[1:] > offsets[:-1])
