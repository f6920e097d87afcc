# Texts in raw bytes: names and values, properties, and buffers that grow.
#
# Owns: how a property string is cut, and the small questions that are asked of its parts. One rule:
# nothing here reads beyond the end it is given, and nothing here knows what a property means.
#
# Properties are `name 1 value 2 name 1 value 2`, as in wire/properties.py.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport realloc
from libc.string cimport memchr, memcmp, memcpy

from cometmq._fast.ints cimport Bytes, eight_high, next_mark, put16, put32, put_decimal


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
    cdef Bytes stop = p + size - text_size
    while p <= stop:
        p = <Bytes>memchr(p, text[0], stop - p + 1)
        if p == NULL:
            break
        if memcmp(p, text, text_size) == 0:
            count += 1
            p += text_size
        else:
            p += 1
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
    cdef int32_t i = 0
    while size - i >= 8:
        if eight_high(p + i):
            return False
        i += 8
    while i < size:
        if p[i] >= 0x80:
            return False
        i += 1
    return True


cdef struct Property:
    Bytes name
    Bytes value
    int32_t name_size
    int32_t value_size


cdef inline Bytes cut_property(Bytes p, Bytes end, Property* found) noexcept nogil:
    """The property that begins at `p`; returns where the next one does, NULL if this one has no
    name, no value, or not one of each. What stands from `p` to `end` ends with a 2."""
    cdef Bytes middle = next_mark(p, end)
    cdef Bytes stop
    if middle == p or middle >= end or middle[0] == 2:
        return NULL
    stop = next_mark(middle + 1, end)
    if stop == middle + 1 or stop >= end or stop[0] == 1:
        return NULL
    found.name = p
    found.name_size = <int32_t>(middle - p)
    found.value = middle + 1
    found.value_size = <int32_t>(stop - middle - 1)
    return stop + 1


cdef inline bint is_plain_json(Bytes p, int32_t size) noexcept nogil:
    """Whether a text goes into JSON as it is."""
    cdef int32_t i
    for i in range(size):
        if p[i] < 0x20 or p[i] >= 0x7F or p[i] == c'"' or p[i] == c"\\":
            return False
    return True


cdef struct Out:
    uint8_t* at
    Py_ssize_t size
    Py_ssize_t room


cdef inline bint make_room(Out* out, Py_ssize_t more) noexcept:
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
