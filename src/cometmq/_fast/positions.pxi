# Positions that the store and the compiled path share, and what was taught: files, queues, topics,
# pulls. Part of hot.pyx.
#
# Owns: the memory behind QueueEnds, IndexHead and Traffic, and the table that finds a topic by its
# bytes. One rule: a pin is asked whether its file is still mapped each time before it is touched.


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
    cdef uint32_t name_hash  # Java's hash of its name
    cdef uint32_t key_hash  # the same of `topic#`
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
    made.name_hash = java_hash(0, <Bytes>PyBytes_AS_STRING(name), <int>len(name))
    made.key_hash = made.name_hash * 31 + 35  # "#"
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
