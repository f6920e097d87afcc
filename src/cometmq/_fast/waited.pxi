# Messages that wait elsewhere before they come to their real topics: delay levels, timers, halves of
# transactions. Part of hot.pyx.
#
# Owns: where messages of a kind are kept, once that is taught, and their way in and out. One rule:
# what it adds to a message, writes once more or notes is byte for byte what broker/delay.py,
# timers.py, transaction.py and half.py do; before it changes anything it knows that all of it can be.


cdef struct Recent:
    # A timed message that was just stored: what entering it would have to read it again for.
    int64_t log_offset
    int64_t out_ms
    int32_t size
    int32_t topic_at  # its real topic, from its first byte on
    int32_t topic_size
    uint32_t topic_hash


cdef struct Stored:
    # A record that waited, and what its properties say. Places are counted from `at`.
    Bytes at
    int64_t log_offset
    int64_t size
    int32_t sys_flag
    int32_t store_ms_at
    int32_t reconsume_at
    int32_t body_at
    int32_t body_size
    Bytes topic
    int32_t topic_size
    Bytes text
    int32_t text_size
    Bytes real_topic
    int32_t real_topic_size
    int64_t real_queue
    Bytes unique
    int32_t unique_size
    Bytes words
    int32_t words_size
    Bytes group
    int32_t group_size
    int64_t tags_code
    int64_t out_ms
    bint is_later  # asks to be delayed or timed
    bint is_immune
    bint is_marker  # deletes another one
    bint is_brief  # may expire


cdef const char* BASE64 = (
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
)


cdef int put_base64(uint8_t* to, uint8_t* raw, int size) noexcept nogil:
    """URL-safe base64, padded; returns its size. Two bytes behind `raw` are overwritten."""
    cdef int i, at = 0
    cdef uint32_t bits
    cdef const char* letters = BASE64
    raw[size] = raw[size + 1] = 0
    for i in range(0, size, 3):
        bits = <uint32_t>raw[i] << 16 | <uint32_t>raw[i + 1] << 8 | raw[i + 2]
        to[at] = letters[bits >> 18]
        to[at + 1] = letters[bits >> 12 & 63]
        to[at + 2] = letters[bits >> 6 & 63]
        to[at + 3] = letters[bits & 63]
        at += 4
    if size % 3:
        to[at - 1] = c"="
        if size % 3 == 1:
            to[at - 2] = c"="
    return at


cdef inline bint is_text(Text* field, Stored* stored) noexcept nogil:
    """Whether a field names the unique key of a message."""
    return (
        field.size == stored.unique_size
        and field.size > 0
        and memcmp(field.at, stored.unique, field.size) == 0
    )


cdef class _Waited(_Recovered):
    """Messages of the kinds that are kept elsewhere first."""

    cdef _Topic schedule, timers, halves, ops
    cdef _Topic last_target  # where the last message that waited went; None if not known
    cdef int level_count
    cdef int64_t delays_ms[MOST_LEVELS]
    cdef bint takes_timed, takes_halves
    cdef int64_t precision_ms, max_delay_ms
    cdef bytes broker_name
    cdef int64_t kept
    cdef Recent* recent
    cdef uint32_t recent_head, recent_tail
    # which half messages are open, as far as this feed has asked, and what it has ended
    cdef object open_ends, ended
    cdef bint is_ends_known
    cdef int64_t ends_from, ends_boot, ends_begin
    cdef bytearray ends_bits
    cdef int64_t ended_count, ended_commits, ended_upto

    def __cinit__(self):
        self.recent = <Recent*>malloc(RECENT * sizeof(Recent))
        if self.recent == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.recent)

    def configure_kinds(
        self,
        *,
        list delays_ms,
        bint takes_timed,
        int64_t precision_ms,
        int64_t max_delay_ms,
        bint takes_halves,
        bytes broker_name,
    ):
        """What decides where messages of a kind are kept first. `delays_ms`: by level."""
        cdef int i
        self.level_count = len(delays_ms) if len(delays_ms) <= MOST_LEVELS else 0
        for i in range(self.level_count):
            self.delays_ms[i] = delays_ms[i]
        self.takes_timed = takes_timed
        self.precision_ms = precision_ms
        self.max_delay_ms = max_delay_ms
        self.takes_halves = takes_halves
        self.broker_name = broker_name
        if len(broker_name) > MAX_TOPIC_BYTES:
            self.takes_timed = False

    def learn_place(self, int kind, int queue_count, QueueEnds ends, Traffic traffic):
        """Messages of this kind are kept in this queue until `forget`."""
        cdef _Topic found
        if kind == DELAYED:
            found = self.schedule
        elif kind == TIMED:
            found = self.timers
        else:
            found = self.halves
        if found is None:
            found = new_topic(ends.topic.encode("utf-8"), queue_count, traffic)
            if kind == DELAYED:
                self.schedule = found
            elif kind == TIMED:
                self.timers = found
            else:
                self.halves = found
        found.set(ends)

    def learn_ends(self, QueueEnds ends, Traffic traffic, object open_ends, object ended):
        """Ends of transactions are noted in this queue, each in a record of its own, until
        `forget`. Asked before the first of a feed: `open_ends()`, for which half messages that is
        simple (the first queue offset, the first log offset) and which of these have ended (the
        queue offset of the first bit, the bits, which are added to). Told after the last: `ended(how
        many, how many of them commits, where the last ends in the log)`."""
        self.ops = new_topic(ends.topic.encode("utf-8"), 1, traffic)
        self.ops.set(ends)
        self.open_ends = open_ends
        self.ended = ended

    def take_kept(self):
        """How many messages went to a place to wait since this was last asked."""
        kept = self.kept
        self.kept = 0
        return kept

    # ------------------------------------------------------------------------------------------- in

    cdef inline _Topic home(self, int kind):
        """Where messages of a kind are kept; None if that was not taught."""
        if kind == DELAYED:
            return self.schedule
        return self.timers if kind == TIMED else self.halves

    cdef bint is_timed(
        self, Cooked* cooked, Bytes name, int32_t name_size, Bytes value, int32_t value_size
    ) noexcept:
        """Note when a message wants to come, from one of its properties; False: not ordinary."""
        cdef int64_t asked = digits(value, value_size, 15)
        if cooked.kind or asked < 0 or not self.takes_timed:
            return False
        if is_name(name, name_size, "TIMER_DELAY_MS", 14):
            asked += self.now_ms
        elif is_name(name, name_size, "TIMER_DELAY_SEC", 15):
            asked = self.now_ms + asked * 1000
        elif not is_name(name, name_size, "TIMER_DELIVER_MS", 16):
            return False
        cooked.kind = TIMED
        cooked.asked = asked
        return True

    cdef bint cook_kept(self, _Topic topic, Cooked* cooked, int32_t queue_id) noexcept:
        """Add what a message that is kept says of its real place: as broker/delay.py, timed.py and
        half_records.py do."""
        cdef uint8_t* text = cooked.text
        cdef int32_t size = cooked.size
        cdef uint8_t* p = text + size
        cdef int64_t left_ms
        if not topic.may_keep or size > MAX_PROPERTIES_BYTES - KEPT_ROOM_BYTES:
            return False
        if cooked.kind != DELAYED and cooked.unique_size > KEPT_ROOM_BYTES // 4:
            return False
        if has_text(text, size, "REAL_TOPIC", 10) or has_text(text, size, "REAL_QID", 8):
            return False
        if cooked.kind == DELAYED:
            if has_text(text, size, "TIMER_", 6):
                return False
            cooked.tags_code = self.store_ms + self.delays_ms[cooked.asked - 1]
        elif cooked.kind == TIMED:
            left_ms = cooked.asked - self.now_ms
            if left_ms <= 0 or left_ms > self.max_delay_ms or count_text(text, size, "TIMER_", 6) != 1:
                return False
            cooked.slot_ms = (cooked.asked - 1) // self.precision_ms * self.precision_ms
            p = put_number(p, "TIMER_OUT_MS", 12, cooked.slot_ms)
        else:
            if (
                has_text(text, size, "TRANSACTION_CHECK_TIMES", 23)
                or has_text(text, size, "TRAN_PREPARED_QUEUE_OFFSET", 26)
                or has_text(text, size, "__transactionId__", 17)
            ):
                return False
            p = put_text(p, b"__transactionId__\x01", 18)
            p = put_text(p, cooked.unique, cooked.unique_size)
            p[0] = 2
            p += 1
        p = put_text(p, b"REAL_TOPIC\x01", 11)
        cooked.real_topic_at = <int32_t>(p - text)
        p = put_bytes(p, topic.name)
        p[0] = 2
        p = put_number(p + 1, "REAL_QID", 8, queue_id)
        cooked.size = <int32_t>(p - text)
        return True

    cdef int recall_handle(self, _Topic topic, Cooked* cooked, uint8_t* to) noexcept:
        """As broker/recall.py makes it; returns its size."""
        cdef uint8_t words[MOST_HANDLE_WORDS + 3]
        cdef uint8_t* p = put_text(words, b"v1 ", 3)
        p = put_bytes(p, topic.name)
        p[0] = c" "
        p = put_bytes(p + 1, self.broker_name)
        p[0] = c" "
        p += 1 + put_decimal(p + 1, cooked.slot_ms + 1)
        p[0] = c" "
        p = put_text(p + 1, cooked.unique, cooked.unique_size)
        return put_base64(to, words, <int>(p - words))

    cdef inline void remember_timed(
        self, _Topic topic, Cooked* cooked, int64_t log_offset, int32_t size
    ) noexcept:
        """For `enter_timers`; of too many the oldest are forgotten."""
        cdef Recent* recent = &self.recent[self.recent_tail & (RECENT - 1)]
        recent.log_offset = log_offset
        recent.out_ms = cooked.slot_ms
        recent.size = size
        recent.topic_at = size - cooked.size + cooked.real_topic_at
        recent.topic_size = <int32_t>PyBytes_GET_SIZE(topic.name)
        recent.topic_hash = topic.name_hash
        self.recent_tail += 1
        if self.recent_tail - self.recent_head > RECENT:
            self.recent_head = self.recent_tail - RECENT

    cdef inline Recent* recall_timed(self, int64_t log_offset, int64_t size) noexcept:
        """What is remembered of the record there; NULL if nothing is."""
        cdef Recent* recent
        while self.recent_head != self.recent_tail:
            recent = &self.recent[self.recent_head & (RECENT - 1)]
            if recent.log_offset > log_offset:
                return NULL
            self.recent_head += 1
            if recent.log_offset == log_offset:
                return recent if recent.size == size else NULL
        return NULL

    # ------------------------------------------------------------------------------------------ out

    cdef bint read_stored(
        self, int64_t log_offset, int64_t size, Stored* found, bint is_whole
    ) noexcept:
        """A record and what its properties say; False if that needs a closer look. `is_whole`: its
        body is checked as well."""
        cdef Bytes p = self.record_at(log_offset, size)
        cdef int64_t at
        if p == NULL or get32(p + 4) != MAGIC_V1 or <int64_t>get64(p + 28) != log_offset:
            return False
        found.at = p
        found.log_offset = log_offset
        found.size = size
        found.sys_flag = <int32_t>get32(p + 36)
        at = 68 if found.sys_flag & BORN_V6 else 56
        found.store_ms_at = <int32_t>at
        at += 28 if found.sys_flag & STORE_V6 else 16
        found.reconsume_at = <int32_t>at
        if at + 16 > size:
            return False
        found.body_size = <int32_t>get32(p + at + 12)
        found.body_at = <int32_t>(at + 16)
        if found.body_size < 0:
            return False
        at += 16 + <int64_t>found.body_size
        if at + 1 > size:
            return False
        found.topic = p + at + 1
        found.topic_size = p[at]
        at += 1 + found.topic_size
        if at + 2 > size or at + 2 + <int64_t>get16(p + at) != size:
            return False
        found.text = p + at + 2
        found.text_size = <int32_t>get16(p + at)
        if found.text_size > MAX_PROPERTIES_BYTES:
            return False
        if is_whole and found.body_size:
            if crc32(p + found.body_at, found.body_size) & 0x7FFFFFFF != get32(p + 8):
                return False
        return self.read_properties(found)

    cdef bint read_properties(self, Stored* found) noexcept:
        cdef Bytes text = found.text
        cdef int32_t size = found.text_size
        cdef int32_t name_size, value_size
        cdef Property one
        cdef Bytes next = text
        cdef Bytes name, value
        cdef bint has_tags = False, is_twice = False
        found.real_topic = found.unique = found.words = found.group = NULL
        found.real_topic_size = found.unique_size = found.words_size = found.group_size = 0
        found.real_queue = found.out_ms = -1
        found.tags_code = 0
        found.is_later = found.is_immune = found.is_marker = found.is_brief = False
        if size == 0 or text[size - 1] != 2 or not is_utf8(text, text + size):
            return False
        while next < text + size:
            next = cut_property(next, text + size, &one)
            if next == NULL:
                return False
            name, name_size = one.name, one.name_size
            value, value_size = one.value, one.value_size
            if name_size == 4 and memcmp(name, b"TAGS", 4) == 0:
                is_twice |= has_tags
                has_tags = True
                if not is_ascii(value, value_size):
                    return False
                found.tags_code = <int32_t>java_hash(0, value, value_size)
            elif name_size == 4 and memcmp(name, b"KEYS", 4) == 0:
                is_twice |= found.words != NULL
                if not is_ascii(value, value_size):
                    return False
                found.words = value
                found.words_size = value_size
            elif name_size == 8 and memcmp(name, b"UNIQ_KEY", 8) == 0:
                is_twice |= found.unique != NULL
                if not is_ascii(value, value_size):
                    return False
                found.unique = value
                found.unique_size = value_size
            elif name_size == 10 and memcmp(name, b"REAL_TOPIC", 10) == 0:
                is_twice |= found.real_topic != NULL
                if not is_ascii(value, value_size):
                    return False
                found.real_topic = value
                found.real_topic_size = value_size
            elif name_size == 8 and memcmp(name, b"REAL_QID", 8) == 0:
                is_twice |= found.real_queue >= 0
                found.real_queue = digits(value, value_size, 5)
                if found.real_queue < 0:
                    return False
            elif name_size == 6 and memcmp(name, b"PGROUP", 6) == 0:
                is_twice |= found.group != NULL
                found.group = value
                found.group_size = value_size
            elif name_size > 6 and memcmp(name, b"TIMER_", 6) == 0:
                found.is_later = True
                if is_name(name, name_size, "TIMER_OUT_MS", 12):
                    is_twice |= found.out_ms >= 0
                    found.out_ms = digits(value, value_size, 18)
                    if found.out_ms < 0:
                        return False
                elif is_name(name, name_size, "TIMER_DEL_UNIQKEY", 17):
                    found.is_marker = True
            elif is_name(name, name_size, "DELAY", 5):
                found.is_later = True
            elif is_name(name, name_size, "TTL_MS", 6):
                found.is_brief = True
            elif is_name(name, name_size, "CHECK_IMMUNITY_TIME_IN_SECONDS", 30):
                found.is_immune = True
        return not is_twice and found.unique != NULL and found.real_topic != NULL

    cdef bint put_again(
        self,
        Stored* stored,
        int32_t sys_flag,
        int64_t prepared_offset,
        Bytes more,
        int32_t more_size,
        int64_t behind,
    ):
        """Write a message that waited once more, to its real place; `more`: properties that are
        added, `behind`: bytes that must be free after it. False: not ordinary, nothing is done."""
        cdef Cooked cooked
        cdef _Topic topic = self.last_target
        cdef Queue* queue
        cdef void* known
        cdef int64_t size, at
        cdef uint8_t* p
        if stored.is_brief or stored.real_queue < 0:
            return False
        if topic is None or not is_same(stored.real_topic, stored.real_topic_size, topic.name):
            known = self.topics.find(
                stored.real_topic,
                stored.real_topic_size,
                fnv(stored.real_topic, stored.real_topic_size),
            )
            if known == NULL:
                return False
            topic = self.last_target = <_Topic>known
        queue = topic.queue(<int32_t>stored.real_queue)
        if not topic.is_target or queue == NULL:
            return False
        if stored.body_size > self.max_message_bytes:
            return False
        if stored.text_size + more_size > MAX_PROPERTIES_BYTES:
            return False
        cooked.tags_code = stored.tags_code
        cooked.keys[0] = index_hash(java_hash(topic.key_hash, stored.unique, stored.unique_size))
        cooked.key_count = 1
        if not add_words(&cooked, topic.key_hash, stored.words, stored.words_size):
            return False
        at = stored.body_at + <int64_t>stored.body_size
        size = at + 3 + PyBytes_GET_SIZE(topic.name) + stored.text_size + more_size
        if (
            size > self.max_message_bytes + RECORD_OVERHEAD_BYTES
            or size + behind + BLANK_BYTES > self.log_end - self.write_at
            or not self.has_pending_room(2, cooked.key_count)
        ):
            return False
        p = self.log + (self.write_at - self.log_begin)
        memcpy(p, stored.at, at)
        put32(p, <uint32_t>size)
        if stored.body_size == 0:
            put32(p + 8, 0)
        put32(p + 12, queue.queue_id)
        put64(p + 20, queue.next_offset)
        put64(p + 28, self.write_at)
        put32(p + 36, sys_flag)
        put64(p + stored.store_ms_at, self.store_ms)
        put64(p + stored.reconsume_at + 4, prepared_offset)
        p += at
        p[0] = <uint8_t>PyBytes_GET_SIZE(topic.name)
        p = put_bytes(p + 1, topic.name)
        put16(p, stored.text_size + more_size)
        p = put_text(p + 2, stored.text, stored.text_size)
        if more_size:
            memcpy(p, more, more_size)
        self.appended(topic, queue, &cooked, size)
        return True

    def deliver_level(self, QueueEnds level, int64_t offset, int most, tuple log):
        """Messages of a delay level from `offset` on to their real topics, as long as they are due
        and it is simple; returns how many."""
        cdef Py_buffer view
        cdef Stored stored
        cdef Bytes unit
        cdef int count = 0
        self.open_log(log, &view)
        try:
            while count < most:
                unit = self.unit_at(level.queue, offset + count)
                if unit == NULL or <int64_t>get64(unit + 12) > self.now_ms:
                    break
                if not self.read_stored(
                    <int64_t>get64(unit), <int32_t>get32(unit + 8), &stored, True
                ):
                    break
                if stored.sys_flag & TRANSACTION_BITS not in (0, COMMITTED):
                    break
                if not self.put_again(
                    &stored,
                    stored.sys_flag,
                    <int64_t>get64(stored.at + stored.reconsume_at + 4),
                    NULL,
                    0,
                    0,
                ):
                    break
                count += 1
        finally:
            self.log = NULL
            PyBuffer_Release(&view)
        return count

    # --------------------------------------------------------------------------------------- timers

    def enter_timers(
        self,
        QueueEnds source,
        int64_t offset,
        int most,
        tuple log,
        object wheel,
        int64_t slots,
        int64_t precision_ms,
        object units,
        int64_t units_begin,
        int64_t units_end,
        int64_t units_limit,
        int64_t first_ms,
        int64_t write_ms,
        int64_t window_ms,
        list runs,
    ):
        """Messages of the timers' queue from `offset` on into their slots, as broker/timers.py's
        _enter_one does, as long as it is simple; returns how many, the last slot's time and where
        the last message ends. `units`: the last file of the timer log, in use from `units_begin` to
        `units_end`, at most to `units_limit`. `runs` is told of topics and how many of each."""
        cdef Py_buffer view, wheel_view, units_view
        cdef Stored stored
        cdef Bytes unit
        cdef uint8_t* slot
        cdef uint8_t* p
        cdef int64_t number, write_at_ms, prev, last_ms = -1, upto = 0
        cdef int64_t log_offset, out_ms
        cdef int32_t size, topic_size
        cdef uint32_t topic_hash
        cdef Bytes topic, record
        cdef Recent* recent
        cdef int count = 0
        cdef int64_t run = 0
        cdef Bytes run_topic = NULL
        cdef int32_t run_size = 0
        self.open_log(log, &view)
        PyObject_GetBuffer(wheel, &wheel_view, PyBUF_WRITABLE)
        PyObject_GetBuffer(units, &units_view, PyBUF_WRITABLE)
        try:
            if wheel_view.len != slots * TIMER_SLOT_BYTES:
                return 0, -1, 0
            if units_limit - units_begin > units_view.len:
                return 0, -1, 0
            while count < most and units_end + TIMER_UNIT_BYTES <= units_limit:
                unit = self.unit_at(source.queue, offset + count)
                if unit == NULL:
                    break
                log_offset, size = <int64_t>get64(unit), <int32_t>get32(unit + 8)
                recent = self.recall_timed(log_offset, size)
                record = NULL
                if recent != NULL:
                    record = self.record_at(log_offset, size)
                if record != NULL:
                    out_ms, topic_hash = recent.out_ms, recent.topic_hash
                    topic, topic_size = record + recent.topic_at, recent.topic_size
                else:
                    if not self.read_stored(log_offset, size, &stored, False) or stored.is_marker:
                        break
                    out_ms = stored.out_ms
                    topic, topic_size = stored.real_topic, stored.real_topic_size
                    topic_hash = java_hash(0, topic, topic_size)
                if out_ms < first_ms:
                    break
                if out_ms - write_ms >= window_ms or out_ms - write_ms > MOST_DELAY_MS:
                    break
                write_at_ms = write_ms if write_ms < out_ms else out_ms
                number = out_ms // precision_ms
                slot = <uint8_t*>wheel_view.buf + number % slots * TIMER_SLOT_BYTES
                if <int64_t>get64(slot) != number:
                    put64(slot, number)
                    put64(slot + 8, units_end)
                    put32(slot + 24, 1)
                    put32(slot + 28, 0)
                    prev = -1
                else:
                    prev = <int64_t>get64(slot + 16)
                    if <int64_t>get64(slot + 8) < 0:
                        put64(slot + 8, units_end)
                    put32(slot + 24, get32(slot + 24) + 1)
                put64(slot + 16, units_end)
                p = <uint8_t*>units_view.buf + (units_end - units_begin)
                put32(p, TIMER_UNIT_BYTES)
                put64(p + 4, prev)
                put32(p + 12, 1)
                put64(p + 16, write_at_ms)
                put32(p + 24, <uint32_t>(out_ms - write_at_ms))
                put64(p + 28, log_offset)
                put32(p + 36, <uint32_t>size)
                put32(p + 40, topic_hash)
                put64(p + 44, 0)
                units_end += TIMER_UNIT_BYTES
                upto = log_offset + size
                if out_ms > last_ms:
                    last_ms = out_ms
                if run and run_size == topic_size and memcmp(run_topic, topic, run_size) == 0:
                    run += 1
                else:
                    if run:
                        runs.append((run_topic[:run_size], run))
                    run = 1
                    run_topic, run_size = topic, topic_size
                count += 1
            if run:
                runs.append((run_topic[:run_size], run))
        finally:
            self.log = NULL
            PyBuffer_Release(&view)
            PyBuffer_Release(&wheel_view)
            PyBuffer_Release(&units_view)
        return count, last_ms, upto

    def check_timers(
        self,
        object units,
        int64_t begin,
        int64_t at,
        int64_t end,
        object wheel,
        int64_t slots,
        int64_t precision_ms,
        int64_t read_ms,
        int64_t log_end,
    ):
        """Units of one file of the timer log, which begins at `begin`, from `at` to `end`: as long
        as they are whole, as broker/timer_check.py judges, and slots from `read_ms` on know them;
        returns where the first stands of which that is not so. `log_end`: where the log ends."""
        cdef Py_buffer view, wheel_view
        cdef Bytes p, slot
        cdef int64_t log_offset, slot_ms, number
        cdef int32_t size
        PyObject_GetBuffer(units, &view, PyBUF_SIMPLE)
        PyObject_GetBuffer(wheel, &wheel_view, PyBUF_SIMPLE)
        try:
            if end > begin + view.len:
                end = begin + view.len
            if at < begin or wheel_view.len != slots * TIMER_SLOT_BYTES:
                return at
            while at + TIMER_UNIT_BYTES <= end:
                p = <Bytes>view.buf + (at - begin)
                if get32(p) != TIMER_UNIT_BYTES or get32(p + 12) > 0xF or get64(p + 44) != 0:
                    break
                log_offset = <int64_t>get64(p + 28)
                size = <int32_t>get32(p + 36)
                if log_offset < 0 or size <= 0 or log_offset > log_end - size:
                    break
                if <int64_t>get64(p + 4) >= at:
                    break
                slot_ms = <int64_t>get64(p + 16) + <int32_t>get32(p + 24)
                if slot_ms >= read_ms:
                    if slot_ms < 0:
                        break
                    number = slot_ms // precision_ms
                    slot = <Bytes>wheel_view.buf + number % slots * TIMER_SLOT_BYTES
                    if <int64_t>get64(slot) != number or <int64_t>get64(slot + 16) < at:
                        break
                at += TIMER_UNIT_BYTES
        finally:
            PyBuffer_Release(&view)
            PyBuffer_Release(&wheel_view)
        return at

    def timer_chain(
        self, object units, int64_t begin, int64_t end, int64_t at, int most, object positions
    ):
        """Steps back in the chain of a slot, from the unit at `at`, within one file of the timer log
        that is in use from `begin` to `end`, up to one that deletes; returns where to go on.
        `positions`, an array of 64-bit numbers, gets those passed."""
        cdef Py_buffer view
        cdef Bytes p
        cdef uint32_t magic
        cdef int64_t prev
        cdef int count = 0
        cdef int64_t* found = <int64_t*>malloc(max(most, 1) * sizeof(int64_t))
        if found == NULL:
            raise MemoryError()
        PyObject_GetBuffer(units, &view, PyBUF_SIMPLE)
        try:
            if end > begin + view.len:
                end = begin + view.len
            while count < most and begin <= at and at + TIMER_UNIT_BYTES <= end:
                p = <Bytes>view.buf + (at - begin)
                magic = get32(p + 12)
                if get32(p) != TIMER_UNIT_BYTES or magic > 0xF or magic & TIMER_DELETES:
                    break
                found[count] = at
                count += 1
                prev = <int64_t>get64(p + 4)
                at = prev if prev < at else -1
            positions.frombytes(
                PyBytes_FromStringAndSize(<char*>found, count * <Py_ssize_t>sizeof(int64_t))
            )
        finally:
            PyBuffer_Release(&view)
            free(found)
        return at

    def deliver_timed(
        self,
        object units,
        int64_t begin,
        int64_t end,
        object positions,
        int most,
        tuple log,
        list runs,
    ):
        """Messages of a slot to their real topics, from the last of `positions` backwards, as long
        as their units stand in this file of the timer log and it is simple; returns how many."""
        cdef Py_buffer view, units_view, positions_view
        cdef Stored stored
        cdef Bytes p
        cdef int64_t* at
        cdef Py_ssize_t left
        cdef uint8_t more[128]
        cdef uint8_t* stop
        cdef int count = 0
        cdef int64_t run = 0
        cdef Bytes run_topic = NULL
        cdef int32_t run_size = 0
        self.open_log(log, &view)
        PyObject_GetBuffer(units, &units_view, PyBUF_SIMPLE)
        PyObject_GetBuffer(positions, &positions_view, PyBUF_SIMPLE)
        at = <int64_t*>positions_view.buf
        left = positions_view.len // <Py_ssize_t>sizeof(int64_t)
        try:
            if end > begin + units_view.len:
                end = begin + units_view.len
            while count < most and left:
                left -= 1
                if at[left] < begin or at[left] + TIMER_UNIT_BYTES > end:
                    break
                p = <Bytes>units_view.buf + (at[left] - begin)
                if get32(p) != TIMER_UNIT_BYTES or get32(p + 12) != 1:
                    break
                if not self.read_stored(
                    <int64_t>get64(p + 28), <int32_t>get32(p + 36), &stored, True
                ):
                    break
                if stored.is_marker or has_text(stored.text, stored.text_size, "QUEUE_MS", 8):
                    break
                if stored.sys_flag & TRANSACTION_BITS not in (0, COMMITTED):
                    break
                stop = put_number(more, "TIMER_ENQUEUE_MS", 16, <int64_t>get64(p + 16))
                stop = put_number(stop, "TIMER_DEQUEUE_MS", 16, self.now_ms)
                if not self.put_again(
                    &stored, stored.sys_flag, 0, more, <int32_t>(stop - more), 0
                ):
                    break
                if run and run_size == stored.real_topic_size and (
                    memcmp(run_topic, stored.real_topic, run_size) == 0
                ):
                    run += 1
                else:
                    if run:
                        runs.append((run_topic[:run_size], run))
                    run = 1
                    run_topic = stored.real_topic
                    run_size = stored.real_topic_size
                count += 1
            if run:
                runs.append((run_topic[:run_size], run))
        finally:
            self.log = NULL
            PyBuffer_Release(&view)
            PyBuffer_Release(&units_view)
            PyBuffer_Release(&positions_view)
        return count

    # ------------------------------------------------------------------------- ends of transactions

    cdef bint end_transaction(self, Head* head):
        """Commit or roll back a half message, as broker/transaction.py does; False: not ordinary,
        nothing is done. Only oneway, as clients ask for it: an answer would have to wait."""
        cdef Text fields[END_FIELDS]
        cdef int64_t queue_offset, log_offset
        cdef int32_t kind
        cdef Stored stored
        cdef PinState* pin
        cdef int i
        cdef uint8_t body[20]
        cdef int body_size
        cdef Queue* queue
        cdef int64_t op_size
        if not head.flag & FLAG_ONEWAY or self.ops is None or self.halves is None:
            return False
        if not named_fields(head, fields, END_NAMES, END_SIZES, END_FIELDS):
            return False
        for i in range(END_FIELDS):
            if fields[i].escaped:
                return False
        if not (
            need_int64(&fields[1], &queue_offset)
            and need_int64(&fields[2], &log_offset)
            and need_int32(&fields[3], &kind)
        ):
            return False
        if fields[0].size == 0 or (kind != COMMITTED and kind != TRANSACTION_BITS):
            return False
        queue = self.ops.queue(0)
        pin = self.log_pins[(log_offset // self.file_bytes) % LOG_PINS] if log_offset >= 0 else NULL
        if queue == NULL or pin == NULL or pin.at == NULL:
            return False
        if log_offset < pin.start or log_offset + MIN_RECORD_BYTES > pin.end:
            return False
        if not self.read_stored(
            log_offset, <int32_t>get32(pin.at + (log_offset - pin.start)), &stored, True
        ):
            return False
        if not is_same(stored.topic, stored.topic_size, self.halves.name):
            return False
        if stored.is_immune or stored.is_later or <int64_t>get64(stored.at + 20) != queue_offset:
            return False
        if stored.group_size != fields[0].size or memcmp(stored.group, fields[0].at, stored.group_size):
            return False
        if not (is_text(&fields[4], &stored) or is_text(&fields[5], &stored)):
            return False
        if not self.is_open(queue_offset, log_offset):
            return False
        body_size = put_decimal(body, queue_offset)
        op_size = self.op_size(body_size)
        if stored.body_size + body_size > self.max_message_bytes:
            return False
        if kind == COMMITTED:
            if not self.put_again(
                &stored,
                stored.sys_flag & ~TRANSACTION_BITS | COMMITTED,
                log_offset,
                NULL,
                0,
                op_size,
            ):
                return False
        elif op_size + BLANK_BYTES > self.log_end - self.write_at or not self.has_pending_room(1, 0):
            return False
        self.put_op(queue, body, body_size, op_size)
        self.note_end(queue_offset)
        self.ended_commits += kind == COMMITTED
        self.kept += 1
        return True

    cdef bint is_open(self, int64_t queue_offset, int64_t log_offset):
        """Whether a half message is known to be open without another look."""
        cdef int64_t bit
        if not self.is_ends_known:
            first, boot, begin, self.ends_bits = self.open_ends()
            self.ends_from, self.ends_boot, self.ends_begin = first, boot, begin
            self.is_ends_known = True
        if log_offset < self.ends_boot or queue_offset < self.ends_from:
            return False
        bit = queue_offset - self.ends_begin
        if bit >> 3 >= PyByteArray_GET_SIZE(self.ends_bits):
            return True
        return not <uint8_t>PyByteArray_AS_STRING(self.ends_bits)[bit >> 3] >> (bit & 7) & 1

    cdef void note_end(self, int64_t queue_offset):
        """As broker/marks.py marks a number."""
        cdef int64_t bit = queue_offset - self.ends_begin
        cdef Py_ssize_t size = PyByteArray_GET_SIZE(self.ends_bits)
        if bit >> 3 >= size:
            PyByteArray_Resize(self.ends_bits, <Py_ssize_t>(bit >> 3) + 1)
            memset(PyByteArray_AS_STRING(self.ends_bits) + size, 0, (bit >> 3) + 1 - size)
        PyByteArray_AS_STRING(self.ends_bits)[bit >> 3] |= <char>(1 << (bit & 7))
        self.ended_count += 1
        self.ended_upto = self.write_at

    cdef int64_t op_size(self, int body_size):
        return (
            MIN_RECORD_BYTES + body_size + PyBytes_GET_SIZE(self.ops.name) + OP_TEXT_BYTES
            + 2 * PyBytes_GET_SIZE(self.store_host) - 16
        )

    cdef void put_op(self, Queue* queue, Bytes body, int body_size, int64_t size):
        """The record that says that a half message is over, as broker/half_records.py has it."""
        cdef Cooked cooked
        cdef bytes born_host = self.born_host
        cooked.text = self.scratch
        memcpy(cooked.text, b"TAGS\x01d\x02", OP_TEXT_BYTES)
        cooked.size = OP_TEXT_BYTES
        cooked.tags_code = c"d"
        cooked.key_count = 0
        self.born_host = self.store_host
        self.write(
            self.ops, self.ops, queue, &cooked, 0, 0, self.now_ms, 0, body, body_size, size
        )
        self.born_host = born_host
