# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, nonecheck=False
"""The per-message path, compiled: ordinary sends and pulls on whole buffers.

    feed      frames in -> records in the log's memory, replies in a buffer; stops before the first
              frame that is not ordinary
    deliver   records that waited (delay levels, timers) -> copies in their real topics
    walk      records of a log that is being recovered
    dispatch  records of all three -> units in queue memory, entries in the key index

It is written in five parts, of which this is the last: positions.pxi (what is shared with the store,
and what was taught), records.pxi (the log and dispatch), recovered.pxi (a log after a crash),
waited.pxi (kinds of messages that wait) and here what comes from the network and goes to it.

Owns: nothing that lasts. Policy (which topics, which pulls, which limits) is worked out by the
broker, taught here and forgotten when it changes; positions live in the small objects that the
store shares with this file (QueueEnds, IndexHead) or come in and go out with each call. One rule:
what it does is byte for byte what the plain path does with the same frames; whatever it is not sure
of it leaves alone, and changes nothing for it.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memchr, memcmp, memcpy, memset
from posix.stdlib cimport posix_memalign

from cometmq._fast.headers cimport (
    PULL_FIELDS,
    SEND_FIELDS,
    Head,
    Text,
    is_true,
    may_int32,
    may_int64,
    named_fields,
    need_int32,
    need_int64,
    scan_binary,
    scan_json,
    send_fields,
    unescape,
)
from cometmq._fast.ints cimport (
    Bytes,
    crc32,
    crc_start,
    get16,
    get32,
    get64,
    index_hash,
    is_utf8,
    java_hash,
    put16,
    put32,
    put64,
    put_decimal,
    put_hex,
    soon,
)
from cometmq._fast.texts cimport (
    Out,
    Property,
    count_text,
    cut_property,
    digits,
    ends_with,
    has_text,
    is_ascii,
    is_name,
    is_plain_json,
    is_same,
    make_room,
    put_bytes,
    put_entry,
    put_number,
    put_text,
)

crc_start()

cdef enum:
    SEND = 10
    SEND_V2 = 310
    SEND_BATCH = 320
    PULL = 11
    LITE_PULL = 361
    END_TRANSACTION = 37
    END_FIELDS = 6
    OP_TEXT_BYTES = 7

    FLAG_RESPONSE = 1
    FLAG_ONEWAY = 2

    # what feed is allowed to do this time
    MAY_SEND = 1
    MAY_PULL = 2
    IS_SYNC = 4
    IS_JUDGED = 8  # PRODUCER_SEQ was looked at by who calls

    # bits of a pull's sysFlag
    PULL_COMMITS = 1
    PULL_SUBSCRIBES = 4
    PULL_IS_LITE = 16

    NOT_ORDINARY_BITS = 0x8 | 0x40 | 0x80  # ended transactions and inner batches
    PREPARED = 0x4
    COMMITTED = 0x8
    TRANSACTION_BITS = 0xC

    # kinds of messages that are kept elsewhere first
    PLAIN = 0
    DELAYED = 1
    TIMED = 2
    HALF = 3

    TIMER_UNIT_BYTES = 52  # as in store/timer_log.py
    TIMER_SLOT_BYTES = 32  # as in store/timer_wheel.py
    TIMER_DELETES = 4
    MOST_DELAY_MS = 2147483647

    MOST_LEVELS = 64
    RECENT = 4096  # timed messages that are remembered until they enter the wheel; a power of two
    MOST_HANDLE_WORDS = 640  # bytes: two names, a number and a unique key that is not too long
    MOST_HANDLE_BYTES = 864  # the same in base64
    KEPT_ROOM_BYTES = 1024  # of properties, for what is added to a message that is kept
    BORN_V6 = 0x10
    STORE_V6 = 0x20

    MAY_EXPIRE = 0x40  # in the highest byte of a record's flags: it may be too late for it

    UNIT_BYTES = 20
    PAGE_BYTES = 4096
    BLANK_BYTES = 8
    INDEX_HEAD_BYTES = 40
    MIN_RECORD_BYTES = 91
    RECORD_OVERHEAD_BYTES = 65536
    MAX_PROPERTIES_BYTES = 32767
    MAX_TOPIC_BYTES = 127
    BATCH_HEAD_BYTES = 20

    PENDING = 65536  # records between append and dispatch; a power of two
    MOST_WALKED = 32768  # records of one walk, which is dispatched before the next
    PENDING_KEYS = 262144  # their key hashes; a power of two
    MOST_KEYS = 64  # of one message; more is not ordinary
    MOST_PIECES = 4096  # messages of one batch
    MOST_FETCHED = 1024
    LOG_PINS = 64
    AHEAD = 8  # frames read before the first of them is carried out; a power of two
    TOPICS_AHEAD = 7  # of these, whose topic is on its way
    QUEUES_AHEAD = 4  # and whose queue is
    PLACES_AHEAD = 16  # records whose places are fetched together before they are entered
    NEAR_QUEUES = 8  # queues of a topic that are found without another look
    MOST_REPLY_BYTES = 2097152  # replies of one call; the rest waits for the next

cdef uint32_t MAGIC_V1 = 0xDAA320A7
cdef uint32_t MAGIC_V2 = 0xDAA320AB
cdef int64_t BLANK_SIZE = 0x7FFFFFFF
cdef int64_t EXT_ADDRESS_MAX = -2147483649

cdef const char* SEND_NAMES[SEND_FIELDS]
cdef int SEND_SIZES[SEND_FIELDS]
cdef const char* END_NAMES[END_FIELDS]
cdef int END_SIZES[END_FIELDS]
cdef const char* PULL_NAMES[PULL_FIELDS]
cdef int PULL_SIZES[PULL_FIELDS]

SEND_NAMES[:] = [
    b"producerGroup", b"topic", b"defaultTopic", b"defaultTopicQueueNums", b"queueId", b"sysFlag",
    b"bornTimestamp", b"flag", b"properties", b"reconsumeTimes", b"unitMode",
    b"maxReconsumeTimes", b"batch", b"bname",
]
SEND_SIZES[:] = [13, 5, 12, 21, 7, 7, 13, 4, 10, 14, 8, 17, 5, 5]
END_NAMES[:] = [
    b"producerGroup", b"tranStateTableOffset", b"commitLogOffset", b"commitOrRollback", b"msgId",
    b"transactionId",
]
END_SIZES[:] = [13, 20, 15, 16, 5, 13]
PULL_NAMES[:] = [
    b"consumerGroup", b"topic", b"queueId", b"queueOffset", b"maxMsgNums", b"sysFlag",
    b"commitOffset", b"suspendTimeoutMillis", b"subVersion", b"subscription", b"expressionType",
    b"maxMsgBytes",
]
PULL_SIZES[:] = [13, 5, 7, 11, 10, 7, 12, 20, 10, 12, 14, 11]


include "positions.pxi"
include "records.pxi"
include "recovered.pxi"
include "waited.pxi"


cdef struct Ahead:
    # One frame that was read, and is carried out a few frames later: meanwhile the memory that it
    # will need comes near. With thousands of topics all of it is far away.
    Bytes stop
    Bytes body
    bint is_binary
    uint32_t hash  # of a send's topic
    int32_t queue_id
    Head head
    Text fields[SEND_FIELDS]  # of a send


cdef class Hot(_Waited):
    """One broker's compiled path. All calls come from the broker's own thread."""

    cdef Table passes
    cdef Ahead* ahead
    cdef Out replies
    cdef Out acks
    # settings
    cdef int64_t max_frame_bytes
    cdef bint is_lite_allowed
    cdef bytes added
    cdef bytes ack_head, ack_queue, ack_offset, ack_unique, ack_flag, ack_tail
    cdef bytes binary_head, binary_flag, binary_ext, binary_remark, pull_ext
    cdef bytes pull_head, pull_min, pull_max, pull_flag, pull_tail
    # of the buffer being fed
    cdef int allowed
    cdef readonly int64_t frames
    # sums until somebody takes them
    cdef int64_t fetched_count, fetched_bytes, pulls, requests

    def __cinit__(self):
        self.passes = Table()
        self.replies.room = self.acks.room = 65536
        self.replies.at = <uint8_t*>malloc(self.replies.room)
        self.acks.at = <uint8_t*>malloc(self.acks.room)
        self.ahead = <Ahead*>malloc(AHEAD * sizeof(Ahead))
        if self.replies.at == NULL or self.acks.at == NULL or self.ahead == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.replies.at)
        free(self.acks.at)
        free(self.ahead)

    # ----------------------------------------------------------------------------------- teaching

    def configure_broker(
        self,
        *,
        int64_t max_frame_bytes,
        bint is_lite_allowed,
        bytes added,
        bytes store_host,
        list ack_json,
        list pull_json,
        list ack_binary,
        list pull_binary,
    ):
        """What goes into every record and every answer. The lists are answers of the plain path,
        cut where a value goes (see broker/teach.py)."""
        self.max_frame_bytes = max_frame_bytes
        self.is_lite_allowed = is_lite_allowed
        self.added = added
        self.store_host = store_host
        (
            self.ack_head,
            self.ack_queue,
            self.ack_offset,
            self.ack_unique,
            self.ack_flag,
            self.ack_tail,
        ) = ack_json
        self.pull_head, self.pull_min, self.pull_max, self.pull_flag, self.pull_tail = pull_json
        self.binary_head, self.binary_flag, self.binary_ext = ack_binary
        self.binary_remark, self.pull_ext = pull_binary
        self.forget()

    def learn_queue(
        self,
        str topic,
        int queue_count,
        QueueEnds ends,
        Traffic traffic,
        *,
        bint is_open=True,
        bint is_target=False,
        bint may_keep=False,
    ):
        """Messages to this queue are ordinary until `forget`: those that clients send (`is_open`,
        `may_keep` those that wait elsewhere first), those that have waited (`is_target`). Without
        `ends` that is so for the topic, and for none of its queues yet."""
        cdef bytes name = topic.encode("utf-8")
        cdef _Topic found
        cdef Bytes p = <Bytes>PyBytes_AS_STRING(name)
        cdef void* known = self.topics.find(p, len(name), fnv(p, len(name)))
        if len(name) > MAX_TOPIC_BYTES:
            return
        if known == NULL:
            found = new_topic(name, queue_count, traffic)
            self.topics.put(name, found)
        else:
            found = <_Topic>known
        found.is_open |= is_open
        found.is_target |= is_target
        found.may_keep |= may_keep
        if ends is not None:
            found.set(ends)

    def learn_pull(
        self,
        str group,
        str topic,
        str text,
        *,
        int64_t sub_version,
        int queue_count,
        object codes,
        Traffic traffic,
        dict offsets,
        dict pulled,
        object commit,
        QueueEnds ends,
    ):
        """Pulls of this group from this queue are ordinary until `forget`. `text`: the filter that
        the request itself carries, None if the group's own applies; `codes`: None for all."""
        cdef bytes key = pass_key(group, topic, text)
        cdef Bytes p = <Bytes>PyBytes_AS_STRING(key)
        cdef void* known = self.passes.find(p, len(key), fnv(p, len(key)))
        cdef _Pass found
        cdef int i
        if known == NULL:
            found = _Pass()
            found.queues = _Queues(queue_count)
            found.traffic = traffic
            found.sub_version = sub_version
            found.accepts_all = codes is None
            if codes is not None:
                found.code_count = len(codes)
                found.codes = <int32_t*>malloc(max(len(codes), 1) * sizeof(int32_t))
                if found.codes == NULL:
                    raise MemoryError()
                for i, code in enumerate(sorted(codes)):
                    found.codes[i] = code
            found.offsets = offsets
            found.pulled = pulled
            found.commit = commit
            found.key = (topic, group)
            self.passes.put(key, found)
        else:
            found = <_Pass>known
        found.queues.set(ends.queue.queue_id, ends)

    def forget(self):
        """Everything taught about topics and pulls: something has changed."""
        self.topics.clear()
        self.passes.clear()
        self.schedule = self.timers = self.halves = self.ops = self.last_target = None

    def forget_pulls(self):
        self.passes.clear()

    # --------------------------------------------------------------------------------------- feed

    def feed(
        self,
        bytes data,
        Py_ssize_t at,
        object log,
        int64_t log_begin,
        int64_t log_end,
        int64_t write_at,
        int64_t read_upto,
        int64_t log_min,
        int64_t store_ms,
        int64_t now_ms,
        bytes born_host,
        int allowed,
    ):
        """Do what the frames from byte `at` on ask for; returns the byte where that ends.

        `log`: the memory being written to, which holds [log_begin, log_end) of the log; what is
        before `read_upto` may be read.
        """
        cdef Py_buffer view
        cdef Bytes begin = <Bytes>PyBytes_AS_STRING(data) + at
        cdef Bytes end = <Bytes>PyBytes_AS_STRING(data) + PyBytes_GET_SIZE(data)
        self.frames = 0
        self.is_ends_known = False
        self.ended_count = self.ended_commits = 0
        self.replies.size = self.acks.size = 0
        self.write_at = write_at
        self.read_upto = read_upto
        self.log_begin = log_begin
        self.log_end = log_end
        self.log_min = log_min
        self.store_ms = store_ms
        self.now_ms = now_ms
        self.born_host = born_host
        self.allowed = allowed
        PyObject_GetBuffer(log, &view, PyBUF_SIMPLE)
        self.log = <uint8_t*>view.buf
        if view.len != log_end - log_begin or view.readonly:
            self.allowed &= ~MAY_SEND
        try:
            begin = self.run(begin, end)
        finally:
            self.requests += self.frames
            self.log = NULL
            PyBuffer_Release(&view)
            if self.ended_count:
                self.ended(self.ended_count, self.ended_commits, self.ended_upto)
        return begin - <Bytes>PyBytes_AS_STRING(data)

    def take_replies(self):
        """What the last feed answered; None if nothing."""
        if self.replies.size == 0:
            return None
        return PyBytes_FromStringAndSize(<char*>self.replies.at, self.replies.size)

    def take_acks(self):
        """Answers to sends that must wait for the disk (only where feed was told so)."""
        if self.acks.size == 0:
            return None
        return PyBytes_FromStringAndSize(<char*>self.acks.at, self.acks.size)

    @property
    def is_full(self):
        """Whether the last feed stopped because it had answered enough for one turn."""
        return self.replies.size > MOST_REPLY_BYTES

    def take_sums(self):
        """Requests; messages and bytes appended; pulls, messages and bytes fetched: since the last
        time this was asked."""
        sums = (
            self.requests, self.appended_count, self.appended_bytes, self.pulls,
            self.fetched_count, self.fetched_bytes,
        )
        self.requests = self.appended_count = self.appended_bytes = 0
        self.pulls = self.fetched_count = self.fetched_bytes = 0
        return sums

    cdef Bytes run(self, Bytes p, Bytes end):
        """Carry out frames until one is not whole or not ordinary; returns where that one begins.

        Each is read AHEAD - 1 frames before it is carried out, and on the way its topic's place in
        the table, its topic and its queue are fetched, one after the other as each leads to the
        next. Nothing of that is kept: what is carried out looks everything up again.
        """
        cdef Bytes next = p  # the first frame that was not read yet
        cdef unsigned int read = 0, topics = 0, queues = 0, done = 0  # how many are so far
        cdef Ahead* frame
        while True:
            while next != NULL and read - done < AHEAD:
                frame = &self.ahead[read & (AHEAD - 1)]
                next = self.read(next, end, frame)
                if next != NULL:
                    read += 1
            if read == done:
                return p
            while topics < read and topics - done < TOPICS_AHEAD:
                self.fetch_topic(&self.ahead[topics & (AHEAD - 1)])
                topics += 1
            while queues < topics and queues - done < QUEUES_AHEAD:
                self.fetch_queue(&self.ahead[queues & (AHEAD - 1)])
                queues += 1
            frame = &self.ahead[done & (AHEAD - 1)]
            if self.replies.size > MOST_REPLY_BYTES or not self.one(frame):
                return p
            self.frames += 1
            done += 1
            p = frame.stop

    cdef Bytes read(self, Bytes p, Bytes end, Ahead* frame) noexcept:
        """One frame's parts; returns its end, NULL if it is not whole or not ordinary."""
        cdef Head* head = &frame.head
        cdef Text* fields = frame.fields
        cdef int64_t length
        cdef int64_t header_size
        cdef uint32_t mark
        if end - p < 8:
            return NULL
        length = <int32_t>get32(p)
        if length < 4 or length > self.max_frame_bytes - 4 or end - p < 4 + length:
            return NULL
        mark = get32(p + 4)
        header_size = mark & 0xFFFFFF
        if header_size > length - 4:
            return NULL
        frame.stop = p + 4 + length
        frame.body = p + 8 + header_size
        if mark >> 24 == 0:
            frame.is_binary = False
            if not scan_json(p + 8, frame.body, head):
                return NULL
        elif mark >> 24 == 1:
            frame.is_binary = True
            if not scan_binary(p + 8, frame.body, head):
                return NULL
        else:
            return NULL
        if head.flag & FLAG_RESPONSE:
            return NULL
        if head.code == SEND_V2 or head.code == SEND_BATCH:
            if not send_fields(head, fields):
                return NULL
        elif head.code == SEND:
            if not named_fields(head, fields, SEND_NAMES, SEND_SIZES, SEND_FIELDS):
                return NULL
        else:
            frame.queue_id = -1
            if head.code == PULL or head.code == LITE_PULL or head.code == END_TRANSACTION:
                return frame.stop
            return NULL
        if fields[0].at == NULL or fields[1].at == NULL or fields[2].at == NULL:
            return NULL
        if fields[1].escaped or fields[12].escaped or not need_int32(&fields[4], &frame.queue_id):
            return NULL
        if frame.queue_id < 0:
            return NULL
        frame.hash = fnv(fields[1].at, fields[1].size)
        soon(&self.topics.slots[frame.hash & self.topics.mask])
        return frame.stop

    cdef void fetch_topic(self, Ahead* frame) noexcept:
        cdef Slot* slot
        if frame.queue_id >= 0:
            slot = self.topics.guess(frame.fields[1].size, frame.hash)
            if slot != NULL:
                soon(slot.key)
                soon(slot.value)
                soon(<Bytes>slot.value + 64)

    cdef void fetch_queue(self, Ahead* frame) noexcept:
        cdef Slot* slot
        cdef Queue* queue
        if frame.queue_id >= 0:
            slot = self.topics.guess(frame.fields[1].size, frame.hash)
            if slot != NULL:
                soon(<void*>(<_Topic>slot.value).traffic)
                queue = (<_Topic>slot.value).queue(frame.queue_id)
                if queue != NULL:
                    soon(queue)

    cdef bint one(self, Ahead* frame):
        """Carry out one frame; False if it is not ordinary."""
        if frame.queue_id < 0:
            if frame.head.code == END_TRANSACTION:
                return self.allowed & MAY_SEND and self.end_transaction(&frame.head)
            return self.allowed & MAY_PULL and self.pull(&frame.head, frame.is_binary)
        return self.allowed & MAY_SEND and self.send(frame)

    # --------------------------------------------------------------------------------------- send

    cdef bint send(self, Ahead* frame):
        cdef Text* fields = frame.fields
        cdef int32_t sys_flag, flag, number = 0, reconsume_times = 0
        cdef int64_t born_ms
        cdef _Topic topic
        cdef void* found
        cdef Queue* queue
        if not (
            need_int32(&fields[3], &number)
            and need_int32(&fields[5], &sys_flag)
            and need_int64(&fields[6], &born_ms)
            and need_int32(&fields[7], &flag)
            and may_int32(&fields[9], &reconsume_times)
            and may_int32(&fields[11], &number)
        ):
            return False
        if sys_flag < 0 or sys_flag & NOT_ORDINARY_BITS:
            return False
        found = self.topics.find(fields[1].at, fields[1].size, frame.hash)
        if found == NULL:
            return False
        topic = <_Topic>found
        queue = topic.queue(frame.queue_id)
        if not topic.is_open or frame.queue_id >= topic.count:
            return False
        if frame.stop - frame.body > self.max_message_bytes:
            return False
        sys_flag &= ~(BORN_V6 | STORE_V6)
        if is_true(&fields[12]):
            if queue == NULL or sys_flag & PREPARED:
                return False
            return self.send_batch(
                &frame.head, frame.is_binary, topic, queue, &fields[8], sys_flag, born_ms,
                reconsume_times, frame.body, frame.stop,
            )
        return self.send_one(
            frame, topic, queue, &fields[8], sys_flag, flag, born_ms, reconsume_times,
        )

    cdef bint cook(self, _Topic topic, Cooked* cooked, bint may_keep, int32_t queue_id):
        """Read properties that stand in `cooked.text` and complete them; False: not ordinary.
        `may_keep`: it may be of a kind that is kept elsewhere first."""
        cdef uint8_t* text = cooked.text
        cdef int32_t size = cooked.size
        cdef int32_t name_size, value_size
        cdef Property found
        cdef Bytes next = text
        cdef Bytes name, value
        cdef Bytes words = NULL
        cdef int32_t words_size = 0
        cdef bint has_tags = False, has_wait = False
        cdef _Topic home = topic
        cooked.unique = NULL
        cooked.tags_code = 0
        cooked.key_count = 0
        cooked.kind = PLAIN
        if size and text[size - 1] != 2:
            text[size] = 2
            size += 1
        while next < text + size:
            next = cut_property(next, text + size, &found)
            if next == NULL:
                return False
            name, name_size = found.name, found.name_size
            value, value_size = found.value, found.value_size
            if name_size > 10 and not ends_with(name, name_size, "MSG_REGION", 10):
                if memcmp(name, b"TIMER_", 6) == 0:
                    if not may_keep or not self.is_timed(cooked, name, name_size, value, value_size):
                        return False
                    continue
                if is_name(name, name_size, "PRODUCER_SEQ", 12) and not self.allowed & IS_JUDGED:
                    return False
                if ends_with(name, name_size, "TRACE_ON", 8) or ends_with(
                    name, name_size, "CLUSTER", 7
                ) or ends_with(name, name_size, "POP_CK", 6):
                    return False
                continue
            if is_name(name, name_size, "TAGS", 4):
                if has_tags or not is_ascii(value, value_size):
                    return False
                has_tags = True
                cooked.tags_code = <int32_t>java_hash(0, value, value_size)
            elif is_name(name, name_size, "KEYS", 4):
                if words != NULL or not is_ascii(value, value_size):
                    return False
                words = value
                words_size = value_size
            elif is_name(name, name_size, "UNIQ_KEY", 8):
                if cooked.unique != NULL or not is_plain_json(value, value_size):
                    return False
                cooked.unique = value
                cooked.unique_size = value_size
            elif is_name(name, name_size, "WAIT", 4):
                if has_wait:
                    return False
                has_wait = True
                if self.allowed & IS_SYNC and is_name(value, value_size, "false", 5):
                    return False
            elif is_name(name, name_size, "DELAY", 5):
                cooked.asked = digits(value, value_size, 9)
                if value_size and value[0] == 48:
                    return False  # a level with zeros before it is written anew
                if not may_keep or cooked.kind or not 0 < cooked.asked <= self.level_count:
                    return False
                cooked.kind = DELAYED
            elif is_name(name, name_size, "TRAN_MSG", 8):
                if not may_keep or cooked.kind or not self.takes_halves:
                    return False
                if not is_name(value, value_size, "true", 4):
                    return False
                cooked.kind = HALF
            elif (
                is_name(name, name_size, "TTL_MS", 6)
                or (name_size >= 6 and memcmp(name, b"TIMER_", 6) == 0)
                or ends_with(name, name_size, "MSG_REGION", 10)
                or ends_with(name, name_size, "TRACE_ON", 8)
                or ends_with(name, name_size, "CLUSTER", 7)
                or ends_with(name, name_size, "POP_CK", 6)
            ):
                return False
        if cooked.unique == NULL:
            return False
        if size + PyBytes_GET_SIZE(self.added) > MAX_PROPERTIES_BYTES:
            return False
        memcpy(text + size, PyBytes_AS_STRING(self.added), PyBytes_GET_SIZE(self.added))
        cooked.size = size + <int32_t>PyBytes_GET_SIZE(self.added)
        if cooked.kind:
            home = self.home(cooked.kind)
            if home is None or not self.cook_kept(topic, cooked, queue_id):
                return False
        cooked.keys[0] = index_hash(java_hash(home.key_hash, cooked.unique, cooked.unique_size))
        cooked.key_count = 1
        return add_words(cooked, home.key_hash, words, words_size)

    cdef bint send_one(
        self,
        Ahead* frame,
        _Topic topic,
        Queue* queue,
        Text* properties,
        int32_t sys_flag,
        int32_t flag,
        int64_t born_ms,
        int32_t reconsume_times,
    ):
        cdef Cooked cooked
        cdef Head* head = &frame.head
        cdef Bytes body = frame.body
        cdef Bytes stop = frame.stop
        cdef int64_t size
        cdef int64_t log_offset = self.write_at
        cdef uint8_t handle[MOST_HANDLE_BYTES]
        cdef _Topic home = topic
        cdef _Topic counted = topic
        # An escaped text is at most six times as long as what it stands for.
        if properties.at == NULL or properties.size > MAX_PROPERTIES_BYTES:
            return False
        cooked.text = self.scratch
        cooked.size = unescape(properties, cooked.text)
        if not self.cook(topic, &cooked, True, frame.queue_id):
            return False
        if cooked.kind:
            home = self.home(cooked.kind)
            queue = home.queue(cooked.asked - 1 if cooked.kind == DELAYED else 0)
            if cooked.kind == HALF:
                if reconsume_times > 0:
                    return False
                counted = home
                sys_flag &= ~TRANSACTION_BITS
        if queue == NULL or sys_flag & TRANSACTION_BITS:
            return False
        size = self.record_size(home, stop - body, cooked.size)
        if (
            size > self.max_message_bytes + RECORD_OVERHEAD_BYTES
            or size + BLANK_BYTES > self.log_end - self.write_at
            or not self.has_pending_room(1, cooked.key_count)
        ):
            return False
        if not head.flag & FLAG_ONEWAY:
            if not self.acknowledge(
                head.opaque, frame.is_binary, &log_offset, 1, frame.queue_id, queue.next_offset,
                cooked.unique, cooked.unique_size,
                handle, self.recall_handle(topic, &cooked, handle) if cooked.kind == TIMED else 0,
            ):
                return False
        self.write(
            home, counted, queue, &cooked, sys_flag, flag, born_ms, reconsume_times, body,
            stop - body, size,
        )
        if cooked.kind:
            self.kept += 1
        if cooked.kind == TIMED:
            self.remember_timed(topic, &cooked, log_offset, <int32_t>size)
        return True

    cdef bint send_batch(
        self,
        Head* head,
        bint is_binary,
        _Topic topic,
        Queue* queue,
        Text* properties,
        int32_t sys_flag,
        int64_t born_ms,
        int32_t reconsume_times,
        Bytes body,
        Bytes stop,
    ):
        """All messages of a batch or none: measured first, then written."""
        cdef Cooked cooked
        cdef Bytes p
        cdef int64_t whole = 0, size, log_offset = self.write_at, bodies = 0
        cdef int64_t queue_offset = queue.next_offset
        cdef int64_t* log_offsets
        cdef int count = 0, key_count = 0, i
        cdef Bytes unique = NULL
        cdef int32_t unique_size = 0
        if body == stop or properties.size > MAX_PROPERTIES_BYTES:
            return False
        if not self.outer_unique(properties, &unique, &unique_size):
            return False
        cooked.text = self.scratch
        p = body
        while p < stop:
            if not self.piece(topic, p, stop, &cooked):
                return False
            size = self.record_size(topic, <int32_t>get32(p + 16), cooked.size)
            if size > self.max_message_bytes + RECORD_OVERHEAD_BYTES:
                return False
            whole += size
            bodies += <int32_t>get32(p + 16)
            count += 1
            key_count += cooked.key_count
            p += get32(p)
        if (
            count > MOST_PIECES
            or bodies > self.max_message_bytes
            or whole + BLANK_BYTES > self.log_end - self.write_at
            or not self.has_pending_room(count, key_count)
        ):
            return False
        log_offsets = <int64_t*>malloc(count * sizeof(int64_t))
        if log_offsets == NULL:
            return False
        p = body
        i = 0
        while p < stop:
            self.piece(topic, p, stop, &cooked)
            size = self.record_size(topic, <int32_t>get32(p + 16), cooked.size)
            log_offsets[i] = self.write_at
            self.write(
                topic, topic, queue, &cooked, sys_flag, <int32_t>get32(p + 12), born_ms, reconsume_times,
                p + BATCH_HEAD_BYTES, <int32_t>get32(p + 16), size,
            )
            p += get32(p)
            i += 1
        if not head.flag & FLAG_ONEWAY:
            # The pieces used the scratch: read the outer properties once more.
            self.outer_unique(properties, &unique, &unique_size)
            if not self.acknowledge(
                head.opaque, is_binary, log_offsets, count, queue.queue_id, queue_offset, unique,
                unique_size, NULL, 0,
            ):
                free(log_offsets)
                raise MemoryError()
        free(log_offsets)
        return True

    cdef bint outer_unique(self, Text* properties, Bytes* unique, int32_t* unique_size):
        """The unique key in a batch's own properties, if there is one; False: not ordinary."""
        cdef int32_t size
        cdef uint8_t* text = self.scratch
        cdef Property one
        cdef Bytes next = text
        unique[0] = NULL
        if properties.at == NULL:
            return True
        size = unescape(properties, text)
        if size and text[size - 1] != 2:
            text[size] = 2
            size += 1
        while next < text + size:
            next = cut_property(next, text + size, &one)
            if next == NULL:
                return False
            if is_name(one.name, one.name_size, "UNIQ_KEY", 8):
                if unique[0] != NULL or not is_plain_json(one.value, one.value_size):
                    return False
                unique[0] = one.value
                unique_size[0] = one.value_size
            elif self.allowed & IS_SYNC and is_name(one.name, one.name_size, "WAIT", 4):
                if is_name(one.value, one.value_size, "false", 5):
                    return False
            elif (
                is_name(one.name, one.name_size, "DELAY", 5)
                or is_name(one.name, one.name_size, "TRAN_MSG", 8)
                or is_name(one.name, one.name_size, "TTL_MS", 6)
                or (one.name_size > 6 and memcmp(one.name, b"TIMER_", 6) == 0)
            ):
                return False
        return True

    cdef bint piece(self, _Topic topic, Bytes p, Bytes stop, Cooked* cooked):
        """One message inside a batch; its lengths must add up."""
        cdef int64_t size, body_size, text_size
        cdef Bytes text
        if stop - p < BATCH_HEAD_BYTES + 2:
            return False
        size = <int32_t>get32(p)
        body_size = <int32_t>get32(p + 16)
        if body_size < 0 or size > stop - p or BATCH_HEAD_BYTES + body_size + 2 > size:
            return False
        text = p + BATCH_HEAD_BYTES + body_size
        text_size = get16(text)
        if text_size > MAX_PROPERTIES_BYTES or BATCH_HEAD_BYTES + body_size + 2 + text_size != size:
            return False
        if not is_utf8(text + 2, text + 2 + text_size):
            return False
        memcpy(cooked.text, text + 2, text_size)
        cooked.size = <int32_t>text_size
        return self.cook(topic, cooked, False, 0)

    cdef bint acknowledge(
        self,
        int32_t opaque,
        bint is_binary,
        int64_t* log_offsets,
        int count,
        int32_t queue_id,
        int64_t queue_offset,
        Bytes unique,
        int32_t unique_size,
        Bytes handle,
        int handle_size,
    ):
        """Answer a send: where its messages went. `handle`: of one that can be recalled."""
        cdef Out* out = &self.acks if self.allowed & IS_SYNC else &self.replies
        cdef int id_size = 2 * (<int>PyBytes_GET_SIZE(self.store_host) + 8)
        cdef Py_ssize_t begin = out.size
        cdef uint8_t* p
        cdef uint8_t* table
        cdef uint8_t* start
        cdef uint8_t number[20]
        cdef int ids_size = count * (id_size + 1) - 1
        if not make_room(out, 1024 + ids_size + unique_size + PyBytes_GET_SIZE(self.binary_ext)
                         + PyBytes_GET_SIZE(self.ack_head)
                         + handle_size):
            return False
        start = out.at + begin
        p = start + 8
        if not is_binary:
            p = put_bytes(p, self.ack_head)
            p = self.put_ids(p, log_offsets, count)
            p = put_bytes(p, self.ack_queue)
            p += put_decimal(p, queue_id)
            p = put_bytes(p, self.ack_offset)
            p += put_decimal(p, queue_offset)
            if unique != NULL:
                p = put_bytes(p, self.ack_unique)
                memcpy(p, unique, unique_size)
                p += unique_size
            if handle_size:
                p = put_text(p, b'","recallHandle":"', 18)
                p = put_text(p, handle, handle_size)
            p = put_bytes(p, self.ack_flag)
            p += put_decimal(p, opaque)
            p = put_bytes(p, self.ack_tail)
            put32(start + 4, <uint32_t>(p - start - 8))
        else:
            p = put_bytes(p, self.binary_head)
            put32(p, opaque)
            p = put_bytes(p + 4, self.binary_flag)
            table = p + 4
            p = put_bytes(table, self.binary_ext)
            put16(p, 5)
            memcpy(p + 2, b"msgId", 5)
            put32(p + 7, ids_size)
            p = self.put_ids(p + 11, log_offsets, count)
            p = put_entry(p, "queueId", 7, number, put_decimal(number, queue_id))
            p = put_entry(p, "queueOffset", 11, number, put_decimal(number, queue_offset))
            if unique != NULL:
                p = put_entry(p, "transactionId", 13, unique, unique_size)
            if handle_size:
                p = put_entry(p, "recallHandle", 12, handle, handle_size)
            put32(table - 4, <uint32_t>(p - table))
            put32(start + 4, 1 << 24 | <uint32_t>(p - start - 8))
        put32(start, <uint32_t>(p - start - 4))
        out.size = p - out.at
        return True

    cdef uint8_t* put_ids(self, uint8_t* p, int64_t* log_offsets, int count):
        cdef uint8_t raw[28]
        cdef int host_size = <int>PyBytes_GET_SIZE(self.store_host)
        cdef int i
        memcpy(raw, PyBytes_AS_STRING(self.store_host), host_size)
        for i in range(count):
            if i:
                p[0] = c","
                p += 1
            put64(raw + host_size, log_offsets[i])
            put_hex(p, raw, host_size + 8)
            p += 2 * (host_size + 8)
        return p

    # --------------------------------------------------------------------------------------- pull

    cdef bint pull(self, Head* head, bint is_binary):
        cdef Text fields[PULL_FIELDS]
        cdef int32_t queue_id, max_count, sys_flag, number = 0
        cdef int64_t offset, commit_offset = 0, suspend_ms = 0, sub_version = 0
        cdef _Pass allowed
        cdef void* found
        cdef Queue* queue
        if not named_fields(head, fields, PULL_NAMES, PULL_SIZES, PULL_FIELDS):
            return False
        if fields[0].at == NULL or fields[1].at == NULL or fields[0].escaped or fields[1].escaped:
            return False
        if not (
            need_int32(&fields[2], &queue_id)
            and need_int64(&fields[3], &offset)
            and need_int32(&fields[4], &max_count)
            and need_int32(&fields[5], &sys_flag)
            and may_int64(&fields[6], &commit_offset)
            and may_int64(&fields[7], &suspend_ms)
            and may_int64(&fields[8], &sub_version)
            and may_int32(&fields[11], &number)
        ):
            return False
        if head.flag & FLAG_ONEWAY or fields[9].escaped or fields[10].escaped:
            return False
        if sys_flag & PULL_IS_LITE or head.code == LITE_PULL:
            if not self.is_lite_allowed:
                return False
        found = self.find_pass(fields, sys_flag & PULL_SUBSCRIBES)
        if found == NULL:
            return False
        allowed = <_Pass>found
        if not sys_flag & PULL_SUBSCRIBES and allowed.sub_version < sub_version:
            return False
        if not 0 <= queue_id < allowed.queues.count:
            return False
        queue = allowed.queues.queues[queue_id]
        if queue == NULL:
            return False
        if sys_flag & PULL_COMMITS and commit_offset >= 0:
            committed = allowed.offsets.get(allowed.key)
            if committed is None or (<dict>committed).get(queue_id) != commit_offset:
                allowed.commit(queue_id, commit_offset, self.born_host)
        return self.fetch(head.opaque, is_binary, allowed, queue, offset, max(max_count, 1))

    cdef void* find_pass(self, Text* fields, bint has_text) noexcept:
        """The key is built as pass_key builds it."""
        cdef uint8_t* p = self.scratch
        cdef int32_t size = fields[0].size + fields[1].size + 2
        if size + fields[9].size > MAX_PROPERTIES_BYTES:
            return NULL
        p[0] = 1 if has_text else 0
        memcpy(p + 1, fields[0].at, fields[0].size)
        p += 1 + fields[0].size
        p[0] = 0
        memcpy(p + 1, fields[1].at, fields[1].size)
        p += 1 + fields[1].size
        if has_text:
            if fields[10].size and not (
                fields[10].size == 3 and memcmp(fields[10].at, b"TAG", 3) == 0
            ):
                return NULL
            p[0] = 0
            if fields[9].size:
                memcpy(p + 1, fields[9].at, fields[9].size)
            p += 1 + fields[9].size
        return self.passes.find(
            self.scratch, p - self.scratch, fnv(self.scratch, p - self.scratch)
        )

    cdef bint fetch(
        self,
        int32_t opaque,
        bint is_binary,
        _Pass allowed,
        Queue* queue,
        int64_t offset,
        int64_t max_count,
    ):
        """Collect records as store/reading.py does, and answer; only where some are found."""
        cdef Bytes parts[MOST_FETCHED]
        cdef int32_t sizes[MOST_FETCHED]
        cdef int64_t low = queue.min_offset, high = queue.max_offset
        cdef int64_t begin, end, wanted, log_offset, size, tags_code
        cdef int64_t hot_from = self.write_at - self.in_memory_bytes
        cdef int64_t size_sum = 0
        cdef PinState* pin
        cdef Bytes unit
        cdef Bytes stop
        cdef Bytes part
        cdef int count = 0, i
        cdef bint is_cold
        cdef Out* out = &self.replies
        cdef uint8_t* p
        if queue.log_min != self.log_min or not low <= offset < high:
            return False
        begin = offset * UNIT_BYTES
        pin = queue.read
        if pin == NULL or pin.at == NULL or not pin.start <= begin < pin.end:
            pin = queue.tail
            if pin == NULL or pin.at == NULL or not pin.start <= begin < pin.end:
                return False
        pin.used = 1
        wanted = max_count
        if not allowed.accepts_all and wanted < self.max_scan_units:
            wanted = self.max_scan_units
        if wanted > high - offset:
            wanted = high - offset
        end = begin + wanted * UNIT_BYTES
        if end > pin.end:
            end = pin.end
        unit = pin.at + (begin - pin.start)
        stop = pin.at + (end - pin.start)
        while unit < stop:
            log_offset = <int64_t>get64(unit)
            size = <int32_t>get32(unit + 8)
            if size == BLANK_SIZE:
                return False
            is_cold = log_offset < hot_from
            if count and (
                count >= max_count
                or count >= (self.max_cold_fetch_count if is_cold else self.max_fetch_count)
                or size_sum + size
                > (self.max_cold_fetch_bytes if is_cold else self.max_fetch_bytes)
            ):
                break
            offset += 1
            if not allowed.accepts_all:
                tags_code = <int64_t>get64(unit + 12)
                if tags_code > EXT_ADDRESS_MAX and not allowed.accepts(tags_code):
                    unit += UNIT_BYTES
                    continue
            unit += UNIT_BYTES
            part = self.record_at(log_offset, size)
            if part == NULL or part[36] & MAY_EXPIRE:
                return False
            parts[count] = part
            sizes[count] = <int32_t>size
            count += 1
            size_sum += size
        if count == 0 or not make_room(out, size_sum + 1024):
            return False
        p = self.put_pull_head(
            out.at + out.size, is_binary, opaque, offset, low, high, size_sum
        )
        for i in range(count):
            memcpy(p, parts[i], sizes[i])
            p += sizes[i]
        out.size = p - out.at
        pulled = allowed.pulled.get(allowed.key)
        if pulled is None:
            pulled = allowed.pulled[allowed.key] = {}
        (<dict>pulled)[queue.queue_id] = offset
        allowed.traffic.count += count
        allowed.traffic.size += size_sum
        self.pulls += 1
        self.fetched_count += count
        self.fetched_bytes += size_sum
        return True

    cdef uint8_t* put_pull_head(
        self,
        uint8_t* start,
        bint is_binary,
        int32_t opaque,
        int64_t next_offset,
        int64_t low,
        int64_t high,
        int64_t body_size,
    ):
        cdef uint8_t* p = start + 8
        cdef uint8_t* table
        cdef uint8_t number[20]
        if not is_binary:
            p = put_bytes(p, self.pull_head)
            p += put_decimal(p, next_offset)
            p = put_bytes(p, self.pull_min)
            p += put_decimal(p, low)
            p = put_bytes(p, self.pull_max)
            p += put_decimal(p, high)
            p = put_bytes(p, self.pull_flag)
            p += put_decimal(p, opaque)
            p = put_bytes(p, self.pull_tail)
            put32(start + 4, <uint32_t>(p - start - 8))
        else:
            p = put_bytes(p, self.binary_head)
            put32(p, opaque)
            p = put_bytes(p + 4, self.binary_remark)
            table = p + 4
            p = put_bytes(table, self.pull_ext)
            p = put_entry(p, "nextBeginOffset", 15, number, put_decimal(number, next_offset))
            p = put_entry(p, "minOffset", 9, number, put_decimal(number, low))
            p = put_entry(p, "maxOffset", 9, number, put_decimal(number, high))
            put32(table - 4, <uint32_t>(p - table))
            put32(start + 4, 1 << 24 | <uint32_t>(p - start - 8))
        put32(start, <uint32_t>(p - start - 4 + body_size))
        return p


cdef bytes pass_key(str group, str topic, object text):
    if text is None:
        return b"\0" + group.encode("utf-8") + b"\0" + topic.encode("utf-8")
    return (
        b"\1" + group.encode("utf-8") + b"\0" + topic.encode("utf-8") + b"\0" + text.encode("utf-8")
    )
