# Records in the log: written, found, and entered into queues and the key index. Part of hot.pyx.
#
# Owns: what was appended and is not dispatched yet. One rule: a record is written whole, takes its
# number in its queue, and waits here for dispatch, all in one step; what is found in a file that is
# not pinned, or not as its unit says, is left to the plain path.


cdef struct Pending:
    int64_t log_offset
    int64_t queue_offset
    int64_t tags_code
    int64_t store_ms
    Queue* queue
    uint32_t first_key
    int32_t key_count
    int32_t size


# What properties say, and the bytes that are stored: in `text`, with what the broker adds.
cdef struct Cooked:
    uint8_t* text
    int32_t size
    int64_t tags_code
    Bytes unique
    int32_t unique_size
    int32_t key_count
    uint32_t keys[MOST_KEYS]
    int kind
    int64_t asked  # a level, or the time
    int64_t slot_ms
    int32_t real_topic_at  # of one that is kept: where its real topic stands in the text


cdef inline bint add_words(Cooked* cooked, uint32_t seed, Bytes words, int32_t size) noexcept nogil:
    """The hashes of all words between blanks; False if they are too many. `seed`: the topic's."""
    cdef int32_t at = 0, stop
    while at < size:
        if words[at] == c" ":
            at += 1
            continue
        stop = at
        while stop < size and words[stop] != c" ":
            stop += 1
        if cooked.key_count >= MOST_KEYS:
            return False
        cooked.keys[cooked.key_count] = index_hash(java_hash(seed, words + at, stop - at))
        cooked.key_count += 1
        at = stop
    return True


cdef class _Records:
    """The log, queues and key index of a store, as far as compiled code knows them."""

    cdef Table topics
    cdef uint64_t touched  # of no use; keeps the compiler from leaving the reading out
    cdef uint8_t* scratch
    cdef Pending* pending
    cdef uint32_t* pending_keys
    cdef uint32_t pending_head, pending_tail, keys_head, keys_tail
    cdef list log_pin_objects
    cdef PinState* log_pins[LOG_PINS]
    # settings
    cdef int64_t file_bytes, max_message_bytes, in_memory_bytes
    cdef int max_fetch_count, max_cold_fetch_count, max_scan_units
    cdef int64_t max_fetch_bytes, max_cold_fetch_bytes
    cdef int64_t index_slots, index_entries
    cdef bint is_indexed
    cdef bytes store_host
    # the part of the log that is written to
    cdef uint8_t* log
    cdef int64_t log_begin, log_end, log_min, read_upto
    cdef int64_t store_ms, now_ms
    cdef bytes born_host
    cdef readonly int64_t write_at
    # sums until somebody takes them
    cdef int64_t appended_count, appended_bytes
    cdef readonly int64_t dispatched
    cdef readonly int64_t dispatched_ms
    cdef readonly bint is_indexing

    def __cinit__(self):
        self.topics = Table()
        self.log_pin_objects = [None] * LOG_PINS
        self.scratch = <uint8_t*>malloc(2 * MAX_PROPERTIES_BYTES + 1024)
        self.pending = <Pending*>malloc(PENDING * sizeof(Pending))
        self.pending_keys = <uint32_t*>malloc(PENDING_KEYS * sizeof(uint32_t))
        if self.scratch == NULL or self.pending == NULL or self.pending_keys == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.scratch)
        free(self.pending)
        free(self.pending_keys)

    def configure_store(
        self,
        *,
        int64_t file_bytes,
        int64_t max_message_bytes,
        int64_t in_memory_bytes,
        int max_fetch_count,
        int64_t max_fetch_bytes,
        int max_cold_fetch_count,
        int64_t max_cold_fetch_bytes,
        int max_scan_units,
        int64_t index_slots,
        int64_t index_entries,
        bint is_indexed,
    ):
        """The store's limits."""
        self.file_bytes = file_bytes
        self.max_message_bytes = max_message_bytes
        self.in_memory_bytes = in_memory_bytes
        self.max_fetch_count = min(max_fetch_count, MOST_FETCHED)
        self.max_fetch_bytes = max_fetch_bytes
        self.max_cold_fetch_count = min(max_cold_fetch_count, MOST_FETCHED)
        self.max_cold_fetch_bytes = max_cold_fetch_bytes
        self.max_scan_units = max_scan_units
        self.index_slots = index_slots
        self.index_entries = index_entries
        self.is_indexed = is_indexed

    def learn_log_file(self, Pin pin):
        """Records in this file can be read."""
        cdef int at = <int>((pin.state.start // self.file_bytes) % LOG_PINS)
        self.log_pin_objects[at] = pin
        self.log_pins[at] = &pin.state

    def forget_records(self):
        """What was appended and not dispatched: whoever dispatches reads it from the log."""
        self.pending_head = self.pending_tail
        self.keys_head = self.keys_tail

    # ----------------------------------------------------------------------------------- in and out

    cdef void open_log(self, tuple log, Py_buffer* view):
        """Where records are written and read: the memory being written to, which holds [begin, end)
        of the log; the write position; what is before `read_upto` may be read; where the log
        begins; store time and time. Whoever calls releases `view`."""
        tail, begin, end, write_at, read_upto, log_min, store_ms, now_ms = log
        self.log_begin = begin
        self.log_end = end
        self.write_at = write_at
        self.read_upto = read_upto
        self.log_min = log_min
        self.store_ms = store_ms
        self.now_ms = now_ms
        PyObject_GetBuffer(tail, view, PyBUF_SIMPLE)
        self.log = <uint8_t*>view.buf
        if view.len != self.log_end - self.log_begin or view.readonly:
            self.log_end = self.write_at  # no room

    cdef inline int64_t record_size(self, _Topic topic, int64_t body_size, int32_t text_size):
        return (
            MIN_RECORD_BYTES
            + body_size
            + PyBytes_GET_SIZE(topic.name)
            + text_size
            + PyBytes_GET_SIZE(self.born_host)
            + PyBytes_GET_SIZE(self.store_host)
            - 16
        )

    cdef bint has_pending_room(self, int count, int key_count) noexcept:
        return (
            self.pending_tail - self.pending_head + count <= PENDING
            and self.keys_tail - self.keys_head + key_count <= PENDING_KEYS
        )

    cdef void write(
        self,
        _Topic topic,
        _Topic counted,
        Queue* queue,
        Cooked* cooked,
        int32_t sys_flag,
        int32_t flag,
        int64_t born_ms,
        int32_t reconsume_times,
        Bytes body,
        int64_t body_size,
        int64_t size,
    ) noexcept:
        """Append one record of `topic`, which counts as one of `counted`; there is room for it."""
        cdef uint8_t* p = self.log + (self.write_at - self.log_begin)
        cdef Py_ssize_t born_size = PyBytes_GET_SIZE(self.born_host)
        cdef Py_ssize_t store_size = PyBytes_GET_SIZE(self.store_host)
        cdef Py_ssize_t name_size = PyBytes_GET_SIZE(topic.name)
        if born_size == 20:
            sys_flag |= BORN_V6
        if store_size == 20:
            sys_flag |= STORE_V6
        put32(p, <uint32_t>size)
        put32(p + 4, MAGIC_V1)
        put32(p + 8, crc32(body, body_size) & 0x7FFFFFFF)
        put32(p + 12, queue.queue_id)
        put32(p + 16, flag)
        put64(p + 20, queue.next_offset)
        put64(p + 28, self.write_at)
        put32(p + 36, sys_flag)
        put64(p + 40, born_ms)
        memcpy(p + 48, PyBytes_AS_STRING(self.born_host), born_size)
        p += 48 + born_size
        put64(p, self.store_ms)
        memcpy(p + 8, PyBytes_AS_STRING(self.store_host), store_size)
        p += 8 + store_size
        put32(p, reconsume_times)
        put64(p + 4, 0)
        put32(p + 12, <uint32_t>body_size)
        memcpy(p + 16, body, body_size)
        p += 16 + body_size
        p[0] = <uint8_t>name_size
        memcpy(p + 1, PyBytes_AS_STRING(topic.name), name_size)
        p += 1 + name_size
        put16(p, cooked.size)
        memcpy(p + 2, cooked.text, cooked.size)
        self.appended(counted, queue, cooked, size)

    cdef inline void await_dispatch(
        self,
        Queue* queue,
        Cooked* cooked,
        int64_t log_offset,
        int64_t queue_offset,
        int64_t store_ms,
        int64_t size,
    ) noexcept:
        """One more record waits for dispatch; there is room for it."""
        cdef Pending* pending = &self.pending[self.pending_tail & (PENDING - 1)]
        cdef int i
        soon(queue.tail)  # dispatch needs it
        pending.log_offset = log_offset
        pending.queue_offset = queue_offset
        pending.tags_code = cooked.tags_code
        pending.store_ms = store_ms
        pending.queue = queue
        pending.size = <int32_t>size
        pending.first_key = self.keys_tail
        pending.key_count = cooked.key_count
        for i in range(cooked.key_count):
            self.pending_keys[(self.keys_tail + i) & (PENDING_KEYS - 1)] = cooked.keys[i]
        self.keys_tail += cooked.key_count
        self.pending_tail += 1

    cdef inline void appended(
        self, _Topic counted, Queue* queue, Cooked* cooked, int64_t size
    ) noexcept:
        """A record was written: it takes its number, and waits for dispatch."""
        self.await_dispatch(queue, cooked, self.write_at, queue.next_offset, self.store_ms, size)
        queue.next_offset += 1
        self.write_at += size
        self.appended_count += 1
        self.appended_bytes += size
        counted.traffic.count += 1
        counted.traffic.size += size

    cdef inline Bytes record_at(self, int64_t log_offset, int64_t size) noexcept:
        """A record's bytes as a unit describes it; NULL if that needs a closer look."""
        cdef PinState* pin
        cdef Bytes p
        cdef uint32_t magic
        if log_offset < self.log_min or size < MIN_RECORD_BYTES:
            return NULL
        if log_offset + size > self.read_upto:
            return NULL
        pin = self.log_pins[(log_offset // self.file_bytes) % LOG_PINS]
        if pin == NULL or pin.at == NULL or log_offset < pin.start or log_offset + size > pin.end:
            return NULL
        pin.used = 1
        p = pin.at + (log_offset - pin.start)
        magic = get32(p + 4)
        if get32(p) != <uint32_t>size or (magic != MAGIC_V1 and magic != MAGIC_V2):
            return NULL
        return p

    cdef Bytes unit_at(self, Queue* queue, int64_t offset) noexcept:
        """A unit of a queue; NULL if that needs a closer look."""
        cdef PinState* pin
        cdef int64_t at = offset * UNIT_BYTES
        if queue.log_min != self.log_min or not queue.min_offset <= offset < queue.max_offset:
            return NULL
        pin = queue.read
        if pin == NULL or pin.at == NULL or not pin.start <= at < pin.end:
            pin = queue.tail
            if pin == NULL or pin.at == NULL or not pin.start <= at < pin.end:
                return NULL
        pin.used = 1
        return pin.at + (at - pin.start)

    # ------------------------------------------------------------------------------------- dispatch

    @property
    def pending_at(self):
        """The log offset of the first record that waits for dispatch; -1 if none does."""
        if self.pending_head == self.pending_tail:
            return -1
        return self.pending[self.pending_head & (PENDING - 1)].log_offset

    def drop_pending(self, int64_t position):
        """Forget records before `position`, and the one at it: the plain path takes that one."""
        cdef Pending* pending
        while self.pending_head != self.pending_tail:
            pending = &self.pending[self.pending_head & (PENDING - 1)]
            if pending.log_offset > position:
                return
            self.pending_head += 1
            self.keys_head = pending.first_key + pending.key_count

    def dispatch(
        self, int64_t position, int64_t limit, IndexHead index, object index_buffer, list arrivals
    ):
        """Units and keys of waiting records from `position` on, as long as it is simple; returns
        the position after the last. Those of watched queues are told in `arrivals`."""
        cdef Py_buffer view
        cdef uint8_t* entries = NULL
        cdef Pending* pending
        cdef Queue* queue
        cdef int64_t at
        cdef uint8_t* unit
        cdef bint has_unit, has_keys
        cdef int fetched = 0
        self.dispatched = 0
        self.is_indexing = False
        if index_buffer is not None:
            PyObject_GetBuffer(index_buffer, &view, PyBUF_WRITABLE)
            entries = <uint8_t*>view.buf
        try:
            while self.pending_head != self.pending_tail:
                if fetched == 0:
                    for fetched in range(PLACES_AHEAD):
                        self.fetch_places(fetched, entries)
                    fetched = PLACES_AHEAD
                fetched -= 1
                pending = &self.pending[self.pending_head & (PENDING - 1)]
                if pending.log_offset != position or position + pending.size > limit:
                    break
                queue = pending.queue
                at = pending.queue_offset * UNIT_BYTES
                # Of a walk, queue or index may have a record already.
                has_unit = position + pending.size <= queue.log_end
                if not has_unit and (
                    pending.queue_offset != queue.max_offset
                    or pending.log_offset < queue.log_end
                    or queue.tail == NULL
                    or queue.tail.at == NULL
                    or not queue.tail.start <= at < queue.tail.end
                ):
                    break
                has_keys = pending.key_count == 0 or not self.is_indexed or (
                    entries != NULL and pending.log_offset < index.end_offset
                )
                if not has_keys and (
                    entries == NULL
                    or index.count + pending.key_count > self.index_entries
                    or pending.log_offset == index.end_offset
                ):
                    break
                if not has_unit:
                    if not queue.is_marked:
                        queue.is_marked = True
                        (<QueueEnds>queue.ends)._mark()
                    unit = queue.tail.at + (at - queue.tail.start)
                    put64(unit, pending.log_offset)
                    put32(unit + 8, pending.size)
                    put64(unit + 12, pending.tags_code)
                    queue.tail.used = 1
                    queue.max_offset = pending.queue_offset + 1
                    queue.log_end = pending.log_offset + pending.size
                    if queue.is_watched:
                        arrivals.append(
                            (
                                <QueueEnds>queue.ends,
                                pending.queue_offset,
                                pending.tags_code,
                                pending.log_offset,
                            )
                        )
                if not has_keys:
                    self.enter_keys(index, entries, pending)
                self.dispatched_ms = pending.store_ms
                self.dispatched += 1
                position += pending.size
                self.pending_head += 1
                self.keys_head = pending.first_key + pending.key_count
        finally:
            if index_buffer is not None:
                PyBuffer_Release(&view)
        return position

    cdef inline void fetch_places(self, int number, uint8_t* entries) noexcept:
        """Bring near what this one of the waiting records will be entered into."""
        cdef Pending* pending
        cdef PinState* tail
        cdef int64_t at
        cdef int i
        if self.pending_tail - self.pending_head <= <uint32_t>number:
            return
        pending = &self.pending[(self.pending_head + number) & (PENDING - 1)]
        tail = pending.queue.tail
        if tail != NULL and tail.at != NULL:
            at = pending.queue_offset * UNIT_BYTES
            # Not only a hint, which is lost where an address must be looked up first. A page that
            # was never written is left alone: reading it would cost a fault of its own.
            if at % PAGE_BYTES >= UNIT_BYTES and tail.start <= at < tail.end:
                self.touched += tail.at[at - tail.start]
        if entries != NULL:
            for i in range(pending.key_count):
                soon(entries + self.slot_at(pending, i))

    cdef inline int64_t slot_at(self, Pending* pending, int number) noexcept:
        """Where a key's slot stands in an index file."""
        cdef uint32_t hashed = self.pending_keys[(pending.first_key + number) & (PENDING_KEYS - 1)]
        return INDEX_HEAD_BYTES + 4 * (<int64_t>hashed % self.index_slots)

    cdef void enter_keys(self, IndexHead index, uint8_t* file, Pending* pending) noexcept:
        """As store/key_index.py's IndexFile.put: the entry, then its slot, then the count."""
        cdef int i
        cdef uint32_t hashed
        cdef int64_t slot_at, seconds
        cdef int32_t former
        cdef uint8_t* entry
        for i in range(pending.key_count):
            hashed = self.pending_keys[(pending.first_key + i) & (PENDING_KEYS - 1)]
            slot_at = self.slot_at(pending, i)
            former = <int32_t>get32(file + slot_at)
            if not 0 < former < index.count:
                former = 0
                index.slots_used += 1
            if index.count == 1:
                index.begin_ms = pending.store_ms
                index.begin_offset = pending.log_offset
            seconds = 0
            if index.begin_ms > 0:
                seconds = (pending.store_ms - index.begin_ms) // 1000
                if seconds < 0 or pending.store_ms < index.begin_ms:
                    seconds = 0
                elif seconds > 0x7FFFFFFF:
                    seconds = 0x7FFFFFFF
            entry = (
                file
                + INDEX_HEAD_BYTES
                + 4 * self.index_slots
                + UNIT_BYTES * <int64_t>index.count
            )
            put32(entry, hashed)
            put64(entry + 4, pending.log_offset)
            put32(entry + 12, <uint32_t>seconds)
            put32(entry + 16, former)
            put32(file + slot_at, index.count)
            index.count += 1
            index.end_ms = pending.store_ms
            index.end_offset = pending.log_offset
            put64(file, index.begin_ms)
            put64(file + 8, index.end_ms)
            put64(file + 16, index.begin_offset)
            put64(file + 24, index.end_offset)
            put32(file + 32, index.slots_used)
            put32(file + 36, index.count)
            self.is_indexing = True
