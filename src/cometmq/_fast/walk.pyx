# cython: language_level=3, boundscheck=False, wraparound=False
"""Where the records of a pull's body begin.

Owns: the walk from one record to the next. One rule: it reads length words and nothing else, never
past the end, and says where a body stops making sense; what a record holds is the caller's.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t

cdef int64_t LEAST = 91  # a record without body, topic and properties


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
