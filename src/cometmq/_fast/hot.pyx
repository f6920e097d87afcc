# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, nonecheck=False
"""The per-message path, compiled: ordinary sends and pulls on whole buffers.

    feed      frames in -> records in the log's memory, replies in a buffer; stops before the first
              frame that is not ordinary
    deliver   records that waited (delay levels, timers) -> copies in their real topics
    walk      records of a log that is being recovered
    dispatch  records of all three -> units in queue memory, entries in the key index

Owns: nothing that lasts. Policy (which topics, which pulls, which limits) is worked out by the
broker, taught here and forgotten when it changes; positions live in the small objects that the
store shares with this file (QueueEnds, IndexHead) or come in and go out with each call. One rule:
what it does is byte for byte what the plain path does with the same frames; whatever it is not sure
of it leaves alone, and changes nothing for it.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
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
    MOST_REPLY_BYTES = 1048576  # replies of one call; the rest waits for the next

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


# ------------------------------------------------------------------------------- shared positions


cdef struct PinState:
    uint8_t* at  # NULL once released
    int64_t start  # what its first byte is in the space of bytes that it is part of
    int64_t end
    int used


cdef class Pin:
    """A mapped file that compiled code may touch, until `release`, which comes before unmapping."""

    cdef Py_buffer buffer
    cdef PinState state

    def __init__(self, buffer, int64_t start):
        PyObject_GetBuffer(buffer, &self.buffer, PyBUF_WRITABLE)
        self.state.at = <uint8_t*>self.buffer.buf
        self.state.start = start
        self.state.end = start + self.buffer.len
        self.state.used = 1

    def __dealloc__(self):
        if self.state.at != NULL:
            self.state.at = NULL
            PyBuffer_Release(&self.buffer)

    def release(self):
        if self.state.at != NULL:
            self.state.at = NULL
            PyBuffer_Release(&self.buffer)

    @property
    def is_released(self):
        return self.state.at == NULL

    def take_used(self):
        """Whether it was touched since the last time this was asked."""
        cdef bint used = self.state.used
        self.state.used = 0
        return used


cdef struct Queue:
    # What a send needs, in one line of memory.
    int64_t max_offset
    int64_t next_offset
    int64_t log_end
    PinState* tail
    void* ends  # the QueueEnds it is part of
    int32_t queue_id
    bint is_watched
    bint is_marked  # its last file is known to be dirty
    int32_t unused[3]
    # What only readers need.
    int64_t min_offset
    int64_t log_min
    PinState* read


cdef class QueueEnds:
    """store/ends.py's QueueEnds, with room for the pins of the compiled path."""

    cdef Queue* queue
    cdef readonly str topic
    cdef Pin _tail
    cdef Pin _read
    cdef object _mark

    def __cinit__(self, str topic, int queue_id):
        cdef void* room = NULL
        if posix_memalign(&room, 64, sizeof(Queue)):
            raise MemoryError()
        self.queue = <Queue*>room
        memset(self.queue, 0, sizeof(Queue))
        self.topic = topic
        self.queue.queue_id = queue_id
        self.queue.ends = <void*>self

    def __dealloc__(self):
        free(self.queue)

    @property
    def queue_id(self):
        return self.queue.queue_id

    @property
    def min_offset(self):
        return self.queue.min_offset

    @min_offset.setter
    def min_offset(self, int64_t value):
        self.queue.min_offset = value

    @property
    def max_offset(self):
        return self.queue.max_offset

    @max_offset.setter
    def max_offset(self, int64_t value):
        self.queue.max_offset = value

    @property
    def next_offset(self):
        return self.queue.next_offset

    @next_offset.setter
    def next_offset(self, int64_t value):
        self.queue.next_offset = value

    @property
    def log_end(self):
        return self.queue.log_end

    @log_end.setter
    def log_end(self, int64_t value):
        self.queue.log_end = value

    @property
    def log_min(self):
        return self.queue.log_min

    @log_min.setter
    def log_min(self, int64_t value):
        self.queue.log_min = value

    @property
    def is_watched(self):
        return self.queue.is_watched

    @is_watched.setter
    def is_watched(self, bint value):
        self.queue.is_watched = value

    @property
    def is_marked(self):
        return self.queue.is_marked

    @is_marked.setter
    def is_marked(self, bint value):
        self.queue.is_marked = value

    def pin_tail(self, Pin pin, object mark):
        """The file that the next unit goes to; None forgets it. `mark` notes that it is dirty."""
        self._tail = pin
        self._mark = mark
        self.queue.tail = &pin.state if pin is not None else NULL

    def pin_read(self, Pin pin):
        """The file that readers are in; None forgets it."""
        self._read = pin
        self.queue.read = &pin.state if pin is not None else NULL


cdef class IndexHead:
    """store/ends.py's IndexHead: the numbers at the front of one index file."""

    cdef public int64_t begin_ms
    cdef public int64_t end_ms
    cdef public int64_t begin_offset
    cdef public int64_t end_offset
    cdef public int32_t slots_used
    cdef public int32_t count


cdef class Traffic:
    """broker/stats.py's Traffic: messages and bytes."""

    cdef public int64_t count
    cdef public int64_t size

    def __init__(self, count=0, size=0):
        self.count = count
        self.size = size


# ------------------------------------------------------------------------------ a table by bytes


cdef struct Slot:
    uint32_t hash
    int32_t size
    Bytes key
    void* value


cdef uint32_t fnv(Bytes p, Py_ssize_t size) noexcept nogil:
    cdef uint32_t value = 2166136261u
    cdef Py_ssize_t i
    for i in range(size):
        value = (value ^ p[i]) * 16777619u
    return value


cdef class Table:
    """bytes -> object, read without making a Python object of the key."""

    cdef Slot* slots
    cdef uint32_t mask
    cdef dict items

    def __cinit__(self):
        self.items = {}
        self.mask = 63
        self.slots = <Slot*>calloc(64, sizeof(Slot))
        if self.slots == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.slots)

    cdef void put(self, bytes key, object value):
        cdef bint is_new = key not in self.items
        self.items[key] = value
        if is_new and 2 * <uint32_t>len(self.items) <= self.mask:
            self.place(key, value)
        else:
            self.rebuild()

    cdef void clear(self):
        self.items.clear()
        memset(self.slots, 0, (<size_t>self.mask + 1) * sizeof(Slot))

    cdef void rebuild(self):
        """Place all anew, in a table at most a quarter full."""
        cdef uint32_t wanted = 64
        cdef Slot* slots
        cdef bytes key
        while wanted < 4 * <uint32_t>len(self.items):
            wanted *= 2
        if wanted > self.mask + 1:
            slots = <Slot*>calloc(wanted, sizeof(Slot))
            if slots == NULL:
                raise MemoryError()
            free(self.slots)
            self.slots = slots
            self.mask = wanted - 1
            for key, value in self.items.items():
                self.place(key, value)
            return
        memset(self.slots, 0, (<size_t>self.mask + 1) * sizeof(Slot))
        for key, value in self.items.items():
            self.place(key, value)

    cdef void place(self, bytes key, object value):
        cdef Bytes p = <Bytes>PyBytes_AS_STRING(key)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key)
        cdef uint32_t value_hash = fnv(p, size)
        cdef uint32_t at = value_hash & self.mask
        while self.slots[at].value != NULL:
            at = (at + 1) & self.mask
        self.slots[at].hash = value_hash
        self.slots[at].size = <int32_t>size
        self.slots[at].key = p
        self.slots[at].value = <void*>value

    cdef void* find(self, Bytes p, Py_ssize_t size, uint32_t value_hash) noexcept:
        cdef uint32_t at = value_hash & self.mask
        cdef Slot* slot
        while True:
            slot = &self.slots[at]
            if slot.value == NULL:
                return NULL
            if slot.hash == value_hash and slot.size == size and memcmp(slot.key, p, size) == 0:
                return slot.value
            at = (at + 1) & self.mask

    cdef Slot* guess(self, Py_ssize_t size, uint32_t value_hash) noexcept:
        """Where a key very likely is; NULL if it is not there. Looks at no key."""
        cdef uint32_t at = value_hash & self.mask
        cdef Slot* slot
        while True:
            slot = &self.slots[at]
            if slot.value == NULL:
                return NULL
            if slot.hash == value_hash and slot.size == size:
                return slot
            at = (at + 1) & self.mask


cdef class _Queues:
    """The queues of one topic by number; those that were not taught are NULL."""

    cdef Queue** queues
    cdef int count
    cdef list kept

    def __cinit__(self, int count):
        self.count = count
        self.kept = []
        self.queues = <Queue**>calloc(max(count, 1), sizeof(Queue*))
        if self.queues == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.queues)

    cdef void set(self, int queue_id, QueueEnds ends):
        if 0 <= queue_id < self.count and self.queues[queue_id] != ends.queue:
            self.kept.append(ends)
            self.queues[queue_id] = ends.queue


cdef class _Topic:
    """A topic that may be sent to without asking anybody."""

    # In the order of use: what one message reads stands in two lines of memory.
    cdef int count
    cdef uint32_t key_hash  # Java's hash of `topic#`
    cdef bint is_open  # to clients
    cdef bint is_target  # of messages that were kept elsewhere
    cdef bint is_schedule  # its units tell when they are due
    cdef bint may_keep  # its messages may be of a kind that is kept elsewhere first
    cdef bytes name
    cdef Traffic traffic
    cdef Queue* near[NEAR_QUEUES]  # the first of `queues`
    cdef _Queues queues

    cdef inline Queue* queue(self, int32_t queue_id) noexcept:
        """NULL if it was not taught."""
        if not 0 <= queue_id < self.count:
            return NULL
        if queue_id < NEAR_QUEUES:
            return self.near[queue_id]
        return self.queues.queues[queue_id]

    cdef void set(self, QueueEnds ends):
        self.queues.set(ends.queue.queue_id, ends)
        if ends.queue.queue_id < min(self.count, NEAR_QUEUES):
            self.near[ends.queue.queue_id] = ends.queue


cdef _Topic new_topic(bytes name, int queue_count, Traffic traffic):
    cdef _Topic made = _Topic()
    made.name = name
    made.queues = _Queues(queue_count)
    made.count = made.queues.count
    made.traffic = traffic
    made.key_hash = java_hash(0, <Bytes>PyBytes_AS_STRING(name), <int>len(name)) * 31 + 35  # "#"
    return made


cdef class _Pass:
    """A pull (group, topic, filter) that was allowed, and what serving it needs."""

    cdef _Queues queues
    cdef Traffic traffic
    cdef int64_t sub_version
    cdef bint accepts_all
    cdef int code_count
    cdef int32_t* codes
    cdef dict offsets  # (topic, group) -> queue id -> committed offset
    cdef dict pulled  # the same, of pulls
    cdef object commit  # called with (queue id, offset, address) when it changes
    cdef tuple key

    def __dealloc__(self):
        free(self.codes)

    cdef bint accepts(self, int64_t tags_code) noexcept:
        cdef int32_t code = <int32_t><uint32_t><uint64_t>tags_code
        cdef int low = 0, high = self.code_count, middle
        while low < high:
            middle = (low + high) >> 1
            if self.codes[middle] < code:
                low = middle + 1
            else:
                high = middle
        return low < self.code_count and self.codes[low] == code


# --------------------------------------------------------------------------------------- growing


cdef struct Out:
    uint8_t* at
    Py_ssize_t size
    Py_ssize_t room


cdef bint make_room(Out* out, Py_ssize_t more) noexcept:
    """Room for `more` bytes; False if there is no memory."""
    cdef Py_ssize_t wanted = out.room
    cdef uint8_t* grown
    if out.room - out.size >= more:
        return True
    while wanted - out.size < more:
        wanted *= 2
    grown = <uint8_t*>realloc(out.at, wanted)
    if grown == NULL:
        return False
    out.at = grown
    out.room = wanted
    return True


cdef inline uint8_t* put_bytes(uint8_t* p, bytes text) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text)
    memcpy(p, PyBytes_AS_STRING(text), size)
    return p + size


cdef inline uint8_t* put_entry(uint8_t* p, const char* key, int key_size, Bytes raw, int size) noexcept:
    """One entry of a binary header's map."""
    put16(p, key_size)
    memcpy(p + 2, key, key_size)
    put32(p + 2 + key_size, size)
    memcpy(p + 6 + key_size, raw, size)
    return p + 6 + key_size + size


# ---------------------------------------------------------------------------------------- message


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
    raw[size] = raw[size + 1] = 0
    for i in range(0, size, 3):
        bits = <uint32_t>raw[i] << 16 | <uint32_t>raw[i + 1] << 8 | raw[i + 2]
        to[at] = BASE64[bits >> 18]
        to[at + 1] = BASE64[bits >> 12 & 63]
        to[at + 2] = BASE64[bits >> 6 & 63] if i + 1 < size else c"="
        to[at + 3] = BASE64[bits & 63] if i + 2 < size else c"="
        at += 4
    return at


cdef inline bint is_text(Text* field, Stored* stored) noexcept nogil:
    """Whether a field names the unique key of a message."""
    return (
        field.size == stored.unique_size
        and field.size > 0
        and memcmp(field.at, stored.unique, field.size) == 0
    )


cdef inline bint is_same(Bytes p, int32_t size, bytes text) noexcept:
    return size == PyBytes_GET_SIZE(text) and memcmp(p, PyBytes_AS_STRING(text), size) == 0


cdef inline bint has_text(Bytes p, int32_t size, const char* text, int text_size) noexcept nogil:
    """Whether a text stands anywhere in another."""
    cdef Bytes stop = p + size - text_size
    while p <= stop:
        p = <Bytes>memchr(p, text[0], stop - p + 1)
        if p == NULL:
            return False
        if memcmp(p, text, text_size) == 0:
            return True
        p += 1
    return False


cdef inline int count_text(Bytes p, int32_t size, const char* text, int text_size) noexcept nogil:
    """How often a text stands in another; it does not overlap itself."""
    cdef int count = 0
    cdef int32_t at = 0
    while at + text_size <= size:
        if p[at] == <uint8_t>text[0] and memcmp(p + at, text, text_size) == 0:
            count += 1
            at += text_size
        else:
            at += 1
    return count


cdef inline int64_t digits(Bytes p, int32_t size, int most) noexcept nogil:
    """A number of plain digits, at most so many; -1 if it is anything else."""
    cdef int64_t value = 0
    cdef int32_t i
    if size < 1 or size > most:
        return -1
    for i in range(size):
        if not 48 <= p[i] <= 57:
            return -1
        value = value * 10 + p[i] - 48
    return value


cdef inline uint8_t* put_text(uint8_t* p, Bytes text, Py_ssize_t size) noexcept nogil:
    memcpy(p, text, size)
    return p + size


cdef inline uint8_t* put_number(uint8_t* p, const char* name, int name_size, int64_t value) noexcept:
    """One property with a number."""
    p = put_text(p, <Bytes>name, name_size)
    p[0] = 1
    p += 1 + put_decimal(p + 1, value)
    p[0] = 2
    return p + 1


cdef inline bint is_name(Bytes p, Py_ssize_t size, const char* name, int name_size) noexcept nogil:
    return size == name_size and memcmp(p, name, name_size) == 0


cdef inline bint ends_with(Bytes p, Py_ssize_t size, const char* name, int name_size) noexcept nogil:
    return size >= name_size and memcmp(p + size - name_size, name, name_size) == 0


cdef inline bint is_ascii(Bytes p, int32_t size) noexcept nogil:
    cdef int32_t i
    for i in range(size):
        if p[i] >= 0x80:
            return False
    return True


cdef inline bint is_plain_json(Bytes p, int32_t size) noexcept nogil:
    """Whether a text goes into JSON as it is."""
    cdef int32_t i
    for i in range(size):
        if p[i] < 0x20 or p[i] >= 0x7F or p[i] == c'"' or p[i] == c"\\":
            return False
    return True


cdef class Hot:
    """One broker's compiled path. All calls come from the broker's own thread."""

    cdef Table topics
    cdef Table passes
    cdef Table walked  # topics of a log that is being recovered
    cdef Ahead* ahead
    cdef uint64_t touched  # of no use; keeps the compiler from leaving the reading out
    cdef Out replies
    cdef Out acks
    cdef uint8_t* scratch
    cdef Pending* pending
    cdef uint32_t* pending_keys
    cdef uint32_t pending_head, pending_tail, keys_head, keys_tail
    cdef list log_pin_objects
    cdef PinState* log_pins[LOG_PINS]
    # settings
    cdef int64_t file_bytes, max_message_bytes, max_frame_bytes, in_memory_bytes
    cdef int max_fetch_count, max_cold_fetch_count, max_scan_units
    cdef int64_t max_fetch_bytes, max_cold_fetch_bytes
    cdef int64_t index_slots, index_entries
    cdef bint is_indexed, is_lite_allowed
    cdef bytes added, store_host
    cdef bytes ack_head, ack_queue, ack_offset, ack_unique, ack_flag, ack_tail
    cdef bytes binary_head, binary_flag, binary_ext, binary_remark, pull_ext
    cdef bytes pull_head, pull_min, pull_max, pull_flag, pull_tail
    # where messages of a kind are kept, once that is taught
    cdef _Topic schedule, timers, halves, ops
    cdef object may_end, ended
    cdef int level_count
    cdef int64_t delays_ms[MOST_LEVELS]
    cdef bint takes_timed, takes_halves
    cdef int64_t precision_ms, max_delay_ms
    cdef bytes broker_name
    cdef int64_t kept
    # the buffer being fed
    cdef uint8_t* log
    cdef int64_t log_begin, log_end, log_min, read_upto
    cdef int64_t store_ms, now_ms
    cdef bytes born_host
    cdef int allowed
    # what came of it
    cdef readonly int64_t write_at
    cdef readonly int64_t frames
    # sums until somebody takes them
    cdef int64_t appended_count, appended_bytes, fetched_count, fetched_bytes, pulls, requests
    cdef readonly int64_t dispatched
    cdef readonly int64_t dispatched_ms
    cdef readonly bint is_indexing

    def __cinit__(self):
        self.topics = Table()
        self.passes = Table()
        self.walked = Table()
        self.log_pin_objects = [None] * LOG_PINS
        self.replies.room = self.acks.room = 65536
        self.replies.at = <uint8_t*>malloc(self.replies.room)
        self.acks.at = <uint8_t*>malloc(self.acks.room)
        self.scratch = <uint8_t*>malloc(2 * MAX_PROPERTIES_BYTES + 1024)
        self.ahead = <Ahead*>malloc(AHEAD * sizeof(Ahead))
        self.pending = <Pending*>malloc(PENDING * sizeof(Pending))
        self.pending_keys = <uint32_t*>malloc(PENDING_KEYS * sizeof(uint32_t))
        if (
            self.replies.at == NULL
            or self.acks.at == NULL
            or self.scratch == NULL
            or self.ahead == NULL
            or self.pending == NULL
            or self.pending_keys == NULL
        ):
            raise MemoryError()

    def __dealloc__(self):
        free(self.replies.at)
        free(self.acks.at)
        free(self.scratch)
        free(self.ahead)
        free(self.pending)
        free(self.pending_keys)

    # ----------------------------------------------------------------------------------- teaching

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

    def learn_ends(self, QueueEnds ends, Traffic traffic, object may_end, object ended):
        """Ends of transactions are noted in this queue, each in a record of its own, until
        `forget`. Asked before each: `may_end(queue offset, log offset)` of the half message; told
        after it: `ended(queue offset, where that ends in the log, whether it was a commit)`."""
        self.ops = new_topic(ends.topic.encode("utf-8"), 1, traffic)
        self.ops.set(ends)
        self.may_end = may_end
        self.ended = ended

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

    def learn_log_file(self, Pin pin):
        """Records in this file can be read."""
        cdef int at = <int>((pin.state.start // self.file_bytes) % LOG_PINS)
        self.log_pin_objects[at] = pin
        self.log_pins[at] = &pin.state

    def forget(self):
        """Everything taught about topics and pulls: something has changed."""
        self.topics.clear()
        self.passes.clear()
        self.schedule = self.timers = self.halves = self.ops = None

    def forget_pulls(self):
        self.passes.clear()

    def forget_records(self):
        """What was appended and not dispatched: whoever dispatches reads it from the log."""
        self.pending_head = self.pending_tail
        self.keys_head = self.keys_tail

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

    def take_kept(self):
        """How many messages went to a place to wait since this was last asked."""
        kept = self.kept
        self.kept = 0
        return kept

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
        cdef int32_t at = 0, middle, stop, name_size, value_size
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
        while at < size:
            middle = at
            while middle < size and text[middle] != 1 and text[middle] != 2:
                middle += 1
            if middle >= size or text[middle] == 2:
                return False
            stop = middle + 1
            while text[stop] != 2:  # there is one: the text ends with it
                if text[stop] == 1:
                    return False
                stop += 1
            name = text + at
            name_size = middle - at
            value = text + middle + 1
            value_size = stop - middle - 1
            at = stop + 1
            if name_size == 0 or value_size == 0:
                return False
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
        at = 0
        while at < words_size:
            if words[at] == c" ":
                at += 1
                continue
            stop = at
            while stop < words_size and words[stop] != c" ":
                stop += 1
            if cooked.key_count >= MOST_KEYS:
                return False
            cooked.keys[cooked.key_count] = index_hash(
                java_hash(home.key_hash, words + at, stop - at)
            )
            cooked.key_count += 1
            at = stop
        return True

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
        p = put_bytes(p, topic.name)
        p[0] = 2
        p = put_number(p + 1, "REAL_QID", 8, queue_id)
        cooked.size = <int32_t>(p - text)
        return True

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
        cdef int32_t size, at = 0, middle, stop
        cdef uint8_t* text = self.scratch
        unique[0] = NULL
        if properties.at == NULL:
            return True
        size = unescape(properties, text)
        if size and text[size - 1] != 2:
            text[size] = 2
            size += 1
        while at < size:
            middle = at
            while middle < size and text[middle] != 1 and text[middle] != 2:
                middle += 1
            if middle >= size or text[middle] == 2:
                return False
            stop = middle + 1
            while text[stop] != 2:
                if text[stop] == 1:
                    return False
                stop += 1
            if middle == at or stop == middle + 1:
                return False
            if is_name(text + at, middle - at, "UNIQ_KEY", 8):
                if unique[0] != NULL or not is_plain_json(text + middle + 1, stop - middle - 1):
                    return False
                unique[0] = text + middle + 1
                unique_size[0] = stop - middle - 1
            elif self.allowed & IS_SYNC and is_name(text + at, middle - at, "WAIT", 4):
                if is_name(text + middle + 1, stop - middle - 1, "false", 5):
                    return False
            at = stop + 1
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

    # -------------------------------------------------------------------- messages that waited

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
        cdef int32_t at = 0, middle, stop, name_size, value_size
        cdef Bytes name, value
        cdef bint has_tags = False, is_twice = False
        found.real_topic = found.unique = found.words = found.group = NULL
        found.real_topic_size = found.unique_size = found.words_size = found.group_size = 0
        found.real_queue = found.out_ms = -1
        found.tags_code = 0
        found.is_later = found.is_immune = found.is_marker = found.is_brief = False
        if size == 0 or text[size - 1] != 2 or not is_utf8(text, text + size):
            return False
        while at < size:
            middle = at
            while middle < size and text[middle] != 1 and text[middle] != 2:
                middle += 1
            if middle >= size or text[middle] == 2:
                return False
            stop = middle + 1
            while text[stop] != 2:  # there is one: the text ends with it
                if text[stop] == 1:
                    return False
                stop += 1
            name = text + at
            name_size = middle - at
            value = text + middle + 1
            value_size = stop - middle - 1
            at = stop + 1
            if name_size == 0 or value_size == 0:
                return False
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
        cdef _Topic topic
        cdef Queue* queue
        cdef void* known
        cdef int64_t size, at
        cdef uint8_t* p
        cdef int32_t word = 0, stop
        if stored.is_brief or stored.real_queue < 0:
            return False
        known = self.topics.find(
            stored.real_topic, stored.real_topic_size, fnv(stored.real_topic, stored.real_topic_size)
        )
        if known == NULL:
            return False
        topic = <_Topic>known
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
        while word < stored.words_size:
            if stored.words[word] == c" ":
                word += 1
                continue
            stop = word
            while stop < stored.words_size and stored.words[stop] != c" ":
                stop += 1
            if cooked.key_count >= MOST_KEYS:
                return False
            cooked.keys[cooked.key_count] = index_hash(
                java_hash(topic.key_hash, stored.words + word, stop - word)
            )
            cooked.key_count += 1
            word = stop
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
        cdef int64_t number, write_at_ms, prev, first, last_ms = -1, upto = 0
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
                if not self.read_stored(
                    <int64_t>get64(unit), <int32_t>get32(unit + 8), &stored, False
                ):
                    break
                if stored.is_marker or stored.out_ms < first_ms:
                    break
                if stored.out_ms - write_ms >= window_ms or stored.out_ms - write_ms > MOST_DELAY_MS:
                    break
                write_at_ms = write_ms if write_ms < stored.out_ms else stored.out_ms
                number = stored.out_ms // precision_ms
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
                put32(p + 24, <uint32_t>(stored.out_ms - write_at_ms))
                put64(p + 28, stored.log_offset)
                put32(p + 36, <uint32_t>stored.size)
                put32(p + 40, java_hash(0, stored.real_topic, stored.real_topic_size))
                put64(p + 44, 0)
                units_end += TIMER_UNIT_BYTES
                upto = stored.log_offset + stored.size
                if stored.out_ms > last_ms:
                    last_ms = stored.out_ms
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
        if not self.may_end(queue_offset, log_offset):
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
        self.ended(queue_offset, self.write_at, kind == COMMITTED)
        self.kept += 1
        return True

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

    # ----------------------------------------------------------------------------------- recovery

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
        cdef int32_t at = 0, middle, stop, name_size, value_size
        cdef Bytes name, value
        cdef Bytes words = NULL
        cdef Bytes unique = NULL
        cdef int32_t words_size = 0, unique_size = 0
        cdef int64_t level = 0
        cdef bint has_tags = False, has_level = False
        cooked.tags_code = 0
        cooked.key_count = 0
        if size and (text[size - 1] != 2 or memchr(text, 0, size) != NULL):
            return False
        while at < size:
            middle = at
            while text[middle] != 1 and text[middle] != 2:  # there is one: the text ends with it
                middle += 1
            if text[middle] == 2:
                return False
            stop = middle + 1
            while text[stop] != 2:
                if text[stop] == 1:
                    return False
                stop += 1
            name = text + at
            name_size = middle - at
            value = text + middle + 1
            value_size = stop - middle - 1
            at = stop + 1
            if name_size == 0 or value_size == 0:
                return False
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
        at = 0
        while at < words_size:
            if words[at] == c" ":
                at += 1
                continue
            stop = at
            while stop < words_size and words[stop] != c" ":
                stop += 1
            if cooked.key_count >= MOST_KEYS:
                return False
            cooked.keys[cooked.key_count] = index_hash(
                java_hash(topic.key_hash, words + at, stop - at)
            )
            cooked.key_count += 1
            at = stop
        return True

    # ----------------------------------------------------------------------------------- dispatch

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


cdef bytes pass_key(str group, str topic, object text):
    if text is None:
        return b"\0" + group.encode("utf-8") + b"\0" + topic.encode("utf-8")
    return (
        b"\1" + group.encode("utf-8") + b"\0" + topic.encode("utf-8") + b"\0" + text.encode("utf-8")
    )
