# cython: language_level=3, boundscheck=False, wraparound=False
"""Where the records of a pull's body begin, what their heads say, and where properties stand.

Owns: the walks over many records at once (layout: wire/record.py). One rule: nothing is read past
the end of a record; what breaks the format is refused as a whole, and the caller's plain way, which
gives the same results, finds the words for it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memchr, memcmp

cdef int64_t LEAST = 91  # a record without body, topic and properties
cdef int BORN_V6 = 16, STORE_V6 = 32, V6_MORE = 12
cdef int64_t MAGIC_V1 = 0xDAA320A7, MAGIC_V2 = 0xDAA320AB
DEF MOST_NAMES = 8


cdef inline int64_t length_at(const unsigned char *data, int64_t at) noexcept nogil:
    return (
        <int64_t>data[at] << 24
        | <int64_t>data[at + 1] << 16
        | <int64_t>data[at + 2] << 8
        | <int64_t>data[at + 3]
    )


def record_starts(bytes body):
    """Native 64-bit begins of all records; ValueError if the body is not made of whole ones."""
    cdef const unsigned char *data = <const unsigned char *>PyBytes_AS_STRING(body)
    cdef int64_t end = len(body), at = 0, size, count = 0
    while at < end:
        size = length_at(data, at) if end - at >= LEAST else 0
        if size < LEAST or at + size > end:
            raise ValueError(at)
        count += 1
        at += size
    cdef bytes found = PyBytes_FromStringAndSize(NULL, 8 * count)
    cdef int64_t *out = <int64_t *>PyBytes_AS_STRING(found)
    at = 0
    cdef int64_t number
    for number in range(count):
        out[number] = at
        at += length_at(data, at)
    return found


cdef inline int64_t number_at(const unsigned char *data, int64_t at) noexcept nogil:
    return length_at(data, at) << 32 | length_at(data, at + 4)


def record_heads(bytes body, bytes begins):
    """(32-bit numbers, 64-bit numbers) of the records at these begins, field after field.

    All numbers are native. 32 bits: queue_id, sys_flag, reconsume_times. 64 bits: queue_offset, born_ms, store_ms, and the
    begin and end of body, topic and properties. ValueError(byte) for a record that contradicts
    itself, or that is none.
    """
    cdef const unsigned char *data = <const unsigned char *>PyBytes_AS_STRING(body)
    cdef const int64_t *starts = <const int64_t *>PyBytes_AS_STRING(begins)
    cdef int64_t limit = len(body), count = len(begins) // 8, row, at, end, magic, more, place, size
    cdef int32_t flags
    cdef bytes shorts = PyBytes_FromStringAndSize(NULL, 4 * 3 * count)
    cdef bytes longs = PyBytes_FromStringAndSize(NULL, 8 * 9 * count)
    cdef int32_t *small = <int32_t *>PyBytes_AS_STRING(shorts)
    cdef int64_t *large = <int64_t *>PyBytes_AS_STRING(longs)
    for row in range(count):
        at = starts[row]
        if at < 0 or at > limit - LEAST:
            raise ValueError(at)
        end = at + length_at(data, at)
        magic = length_at(data, at + 4)
        flags = <int32_t>length_at(data, at + 36)
        more = V6_MORE if flags & BORN_V6 else 0
        place = at + more  # of what follows the sender's host
        more += V6_MORE if flags & STORE_V6 else 0
        if end > limit or at + LEAST + more > end or (magic != MAGIC_V1 and magic != MAGIC_V2):
            raise ValueError(at)
        small[row] = <int32_t>length_at(data, at + 12)
        small[count + row] = flags
        small[2 * count + row] = <int32_t>length_at(data, at + more + 72)
        large[row] = number_at(data, at + 20)
        large[count + row] = number_at(data, at + 40)
        large[2 * count + row] = number_at(data, place + 56)
        place = at + more + 88
        large[3 * count + row] = place
        place += length_at(data, place - 4)
        large[4 * count + row] = place
        if place + 3 > end:
            raise ValueError(at)
        size = data[place]
        place += 1
        if magic == MAGIC_V2:
            size = size << 8 | data[place]
            place += 1
        large[5 * count + row] = place
        place += size
        large[6 * count + row] = place
        if place + 2 > end:
            raise ValueError(at)
        size = <int64_t>data[place] << 8 | data[place + 1]
        place += 2
        large[7 * count + row] = place
        large[8 * count + row] = end
        if place + size != end:
            raise ValueError(at)
    return shorts, longs


def property_places(bytes body, bytes begin_bytes, bytes end_bytes, tuple names):
    """For each of the names the native 32-bit begin and end of its value in every property string.

    -1 where there is none; of two with the same name the last counts. None if a string is not made
    of name 0x01 value 0x02, both at least a byte long, again and again: then somebody else reads it.
    """
    cdef const char *data = PyBytes_AS_STRING(body)
    cdef const char *wanted[MOST_NAMES]
    cdef int64_t lengths[MOST_NAMES]
    cdef int32_t *outs[MOST_NAMES]
    cdef const int64_t *begins = <const int64_t *>PyBytes_AS_STRING(begin_bytes)
    cdef const int64_t *ends = <const int64_t *>PyBytes_AS_STRING(end_bytes)
    cdef int64_t limit = len(body), count = len(begin_bytes) // 8, row
    cdef int kinds = len(names), kind
    cdef const char *at
    cdef const char *stop
    cdef const char *middle
    cdef const char *last
    if kinds > MOST_NAMES:
        raise ValueError(f"at most {MOST_NAMES} names at once")
    if len(end_bytes) != len(begin_bytes):
        raise ValueError("as many ends as begins")
    cdef list found = []
    cdef bytes out, name
    for kind in range(kinds):
        name = names[kind]
        wanted[kind] = PyBytes_AS_STRING(name)
        lengths[kind] = len(name)
        out = PyBytes_FromStringAndSize(NULL, 8 * count)
        outs[kind] = <int32_t *>PyBytes_AS_STRING(out)
        found.append(out)
    for row in range(count):
        if begins[row] < 0 or ends[row] > limit or begins[row] > ends[row]:
            raise ValueError(begins[row])
        for kind in range(kinds):
            outs[kind][2 * row] = outs[kind][2 * row + 1] = -1
        at, stop = data + begins[row], data + ends[row]
        while at < stop:
            last = <const char *>memchr(at, 2, stop - at)
            if last == NULL:
                return None
            middle = <const char *>memchr(at, 1, last - at)
            if middle == NULL or middle == at or middle + 1 == last:
                return None
            if memchr(middle + 1, 1, last - middle - 1) != NULL:
                return None
            for kind in range(kinds):
                if middle - at == lengths[kind] and memcmp(at, wanted[kind], lengths[kind]) == 0:
                    outs[kind][2 * row] = <int32_t>(middle + 1 - data)
                    outs[kind][2 * row + 1] = <int32_t>(last - data)
            at = last + 1
    return found
