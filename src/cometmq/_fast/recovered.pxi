# A log that is being recovered: its records, walked over and handed to dispatch. Part of hot.pyx.
#
# Owns: which queues the walk is sure of. One rule: it takes a record only where it is whole, ordinary
# and the next one of a queue that is known; where the log ends is for the plain path to say.


cdef class _Recovered(_Records):
    """Recovery, for as long as there is nothing to judge."""

    cdef Table walked  # topics of a log that is being recovered

    def __cinit__(self):
        self.walked = Table()

    def walk_queue(self, QueueEnds ends, bint is_schedule):
        """A record of this queue was dispatched by the plain path: `walk` may take the next one.
        `is_schedule`: its units tell when they are due."""
        cdef bytes name = ends.topic.encode("utf-8")
        cdef int queue_id = ends.queue.queue_id
        cdef _Topic known = self.walked.items.get(name)
        cdef _Topic made = known
        if known is None or queue_id >= known.count:
            made = new_topic(name, max(queue_id + 1, 2 * known.count if known is not None else 8), None)
            made.is_schedule = is_schedule
            for one in () if known is None else known.queues.kept:
                made.set(one)
            self.walked.put(name, made)
        made.set(ends)
        ends.queue.next_offset = ends.queue.max_offset  # where the walk is in this queue

    def walk_over(self):
        """The log is recovered."""
        self.walked.clear()

    def walk(
        self,
        object buffer,
        int64_t begin,
        int64_t position,
        bint checks_crc,
        tuple delays_ms,
    ):
        """Have records of a log file that begins at `begin`, from `position` on, wait for dispatch,
        as long as they are whole, ordinary and next in a queue that is known, and not too many;
        returns where the last ends. Whether the log ends there is for the plain path to say."""
        cdef Py_buffer view
        cdef Cooked cooked
        cdef _Topic topic
        cdef Queue* queue
        cdef void* known
        cdef Bytes p, text
        cdef int64_t end, size, at, body_size, store_ms, queue_offset
        cdef int32_t sys_flag, topic_size, text_size
        cdef int count = 0
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        end = begin + view.len
        try:
            while count < MOST_WALKED and position >= begin and end - position >= MIN_RECORD_BYTES:
                p = <Bytes>view.buf + (position - begin)
                size = <int32_t>get32(p)
                if get32(p + 4) != MAGIC_V1 or not MIN_RECORD_BYTES <= size <= end - position:
                    break
                if <int64_t>get64(p + 28) != position:
                    break
                sys_flag = <int32_t>get32(p + 36)
                if sys_flag & TRANSACTION_BITS not in (0, COMMITTED):
                    break  # enters no queue
                at = 68 if sys_flag & BORN_V6 else 56
                store_ms = <int64_t>get64(p + at)
                at += 40 if sys_flag & STORE_V6 else 28
                if at + 4 > size:
                    break
                body_size = <int32_t>get32(p + at)
                at += 4
                if body_size < 0 or at + body_size + 1 > size:
                    break
                if checks_crc and body_size:
                    if crc32(p + at, body_size) & 0x7FFFFFFF != get32(p + 8):
                        break
                at += body_size
                topic_size = p[at]
                at += 1
                if at + topic_size + 2 > size:
                    break
                known = self.walked.find(p + at, topic_size, fnv(p + at, topic_size))
                if known == NULL:
                    break
                topic = <_Topic>known
                at += topic_size
                text_size = <int32_t>get16(p + at)
                text = p + at + 2
                if at + 2 + text_size != size or text_size > MAX_PROPERTIES_BYTES:
                    break
                queue = topic.queue(<int32_t>get32(p + 12))
                if queue == NULL:
                    break
                queue_offset = <int64_t>get64(p + 20)
                if position + size > queue.log_end and queue_offset != queue.next_offset:
                    break
                if not self.cook_walked(topic, &cooked, text, text_size, store_ms, delays_ms):
                    break
                if not self.has_pending_room(1, cooked.key_count):
                    break
                self.await_dispatch(queue, &cooked, position, queue_offset, store_ms, size)
                if position + size > queue.log_end:
                    queue.next_offset += 1
                position += size
                count += 1
        finally:
            PyBuffer_Release(&view)
        return position

    def pass_over(
        self, object buffer, int64_t begin, int64_t position, int64_t end, bytes text
    ):
        """Step over whole records of a log file that begins at `begin`, from `position` up to `end`,
        as long as their properties are without `text`; returns where the first stands that has it,
        or that needs a closer look. Bodies are not checked."""
        cdef Py_buffer view
        cdef Bytes p
        cdef int64_t size, at, body_size
        cdef int32_t sys_flag, topic_size
        cdef const char* wanted = PyBytes_AS_STRING(text)
        cdef int wanted_size = <int>PyBytes_GET_SIZE(text)
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if end > begin + view.len:
                end = begin + view.len
            while position >= begin and end - position >= MIN_RECORD_BYTES:
                p = <Bytes>view.buf + (position - begin)
                size = <int32_t>get32(p)
                if get32(p + 4) != MAGIC_V1 or not MIN_RECORD_BYTES <= size <= end - position:
                    break
                if <int64_t>get64(p + 28) != position:
                    break
                sys_flag = <int32_t>get32(p + 36)
                at = 96 if sys_flag & BORN_V6 else 84
                at += 12 if sys_flag & STORE_V6 else 0
                if at + 4 > size:
                    break
                body_size = <int32_t>get32(p + at)
                at += 4 + body_size
                if body_size < 0 or at + 1 > size:
                    break
                topic_size = p[at]
                at += 1 + topic_size
                if at + 2 > size or not is_utf8(p + at - topic_size, p + at):
                    break
                if get16(p + at) > MAX_PROPERTIES_BYTES or at + 2 + <int64_t>get16(p + at) != size:
                    break
                if has_text(p + at + 2, <int32_t>get16(p + at), wanted, wanted_size):
                    break
                position += size
        finally:
            PyBuffer_Release(&view)
        return position

    cdef bint cook_walked(
        self,
        _Topic topic,
        Cooked* cooked,
        Bytes text,
        int32_t size,
        int64_t store_ms,
        tuple delays_ms,
    ):
        """Tags code and keys of a stored record; False if its properties need a closer look."""
        cdef Property one
        cdef Bytes next = text
        cdef Bytes name, value
        cdef Bytes words = NULL
        cdef Bytes unique = NULL
        cdef int32_t name_size, value_size
        cdef int32_t words_size = 0, unique_size = 0
        cdef int64_t level = 0
        cdef bint has_tags = False, has_level = False
        cooked.tags_code = 0
        cooked.key_count = 0
        if size and (text[size - 1] != 2 or memchr(text, 0, size) != NULL):
            return False
        while next < text + size:
            next = cut_property(next, text + size, &one)
            if next == NULL:
                return False
            name, name_size = one.name, one.name_size
            value, value_size = one.value, one.value_size
            if name_size == 4 and memcmp(name, b"TAGS", 4) == 0:
                if has_tags or not is_ascii(value, value_size):
                    return False
                has_tags = True
                cooked.tags_code = <int32_t>java_hash(0, value, value_size)
            elif name_size == 4 and memcmp(name, b"KEYS", 4) == 0:
                if words != NULL or not is_ascii(value, value_size):
                    return False
                words = value
                words_size = value_size
            elif name_size == 8 and memcmp(name, b"UNIQ_KEY", 8) == 0:
                if unique != NULL or not is_ascii(value, value_size):
                    return False
                unique = value
                unique_size = value_size
            elif topic.is_schedule and name_size == 5 and memcmp(name, b"DELAY", 5) == 0:
                level = digits(value, value_size, 9)
                if has_level or level < 0 or not delays_ms:
                    return False
                has_level = True
        if level > 0:
            cooked.tags_code = store_ms + <int64_t>delays_ms[min(level, len(delays_ms)) - 1]
        if unique != NULL:
            cooked.keys[0] = index_hash(java_hash(topic.key_hash, unique, unique_size))
            cooked.key_count = 1
        return add_words(cooked, topic.key_hash, words, words_size)
