# cython: language_level=3, boundscheck=False, wraparound=False
"""Pulls asked for, where their answers and records begin, what their heads say, where properties stand,
and pieces of them copied out.

Owns: the walks over many records at once (layout: wire/record.py). One rule: nothing is read past
the end of a record; what breaks the format is refused as a whole, and the caller's plain way, which
gives the same results, finds the words for it.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcmp, memcpy, memset

from cometmq._fast.headers cimport Head, Text, is_word, scan_binary, scan_json
from cometmq._fast.ints cimport get32, put32, put_decimal

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


cdef enum:
    SHORTS = 3
    LONGS = 9


cdef inline bint read_head(
    const unsigned char *data, int64_t at, int64_t limit, int32_t *small, int64_t *large,
    int64_t stride,
) noexcept nogil:
    """The fields of the record at `at`, `stride` numbers apart; False if it contradicts itself."""
    cdef int64_t end, magic, more, place, size
    cdef int32_t flags
    if at < 0 or at > limit - LEAST:
        return False
    end = at + length_at(data, at)
    magic = length_at(data, at + 4)
    flags = <int32_t>length_at(data, at + 36)
    more = V6_MORE if flags & BORN_V6 else 0
    place = at + more  # of what follows the sender's host
    more += V6_MORE if flags & STORE_V6 else 0
    if end > limit or at + LEAST + more > end or (magic != MAGIC_V1 and magic != MAGIC_V2):
        return False
    small[0] = <int32_t>length_at(data, at + 12)
    small[stride] = flags
    small[2 * stride] = <int32_t>length_at(data, at + more + 72)
    large[0] = number_at(data, at + 20)
    large[stride] = number_at(data, at + 40)
    large[2 * stride] = number_at(data, place + 56)
    place = at + more + 88
    large[3 * stride] = place
    place += length_at(data, place - 4)
    large[4 * stride] = place
    if place + 3 > end:
        return False
    size = data[place]
    place += 1
    if magic == MAGIC_V2:
        size = size << 8 | data[place]
        place += 1
    large[5 * stride] = place
    place += size
    large[6 * stride] = place
    if place + 2 > end:
        return False
    size = <int64_t>data[place] << 8 | data[place + 1]
    place += 2
    large[7 * stride] = place
    large[8 * stride] = end
    return place + size == end


def record_heads(bytes body, bytes begins):
    """(32-bit numbers, 64-bit numbers) of the records at these begins, field after field.

    All numbers are native. 32 bits: queue_id, sys_flag, reconsume_times. 64 bits: queue_offset,
    born_ms, store_ms, and the begin and end of body, topic and properties. ValueError(byte) for a
    record that contradicts itself, or that is none.
    """
    cdef const unsigned char *data = <const unsigned char *>PyBytes_AS_STRING(body)
    cdef const int64_t *starts = <const int64_t *>PyBytes_AS_STRING(begins)
    cdef int64_t limit = len(body), count = len(begins) // 8, row
    cdef bytes shorts = PyBytes_FromStringAndSize(NULL, 4 * SHORTS * count)
    cdef bytes longs = PyBytes_FromStringAndSize(NULL, 8 * LONGS * count)
    cdef int32_t *small = <int32_t *>PyBytes_AS_STRING(shorts)
    cdef int64_t *large = <int64_t *>PyBytes_AS_STRING(longs)
    for row in range(count):
        if not read_head(data, starts[row], limit, small + row, large + row, count):
            raise ValueError(starts[row])
    return shorts, longs


cdef struct Names:
    int count
    const char *at[MOST_NAMES]
    int64_t sizes[MOST_NAMES]


cdef int take_names(tuple names, Names *found) except -1:
    """Point to the names, which must live as long."""
    cdef int kind
    cdef bytes name
    if len(names) > MOST_NAMES:
        raise ValueError(f"at most {MOST_NAMES} names at once")
    found.count = len(names)
    for kind in range(found.count):
        name = names[kind]
        found.at[kind] = PyBytes_AS_STRING(name)
        found.sizes[kind] = len(name)
    return 0


cdef inline bint find_values(
    const char *data, int64_t begin, int64_t end, Names *names, int32_t *out, int64_t stride
) noexcept nogil:
    """Begin and end of each name's value in a property string, `stride` numbers apart, -1 where
    there is none; False if the string breaks the format."""
    cdef const char *at = data + begin
    cdef const char *stop = data + end
    cdef const char *middle
    cdef const char *last
    cdef int kind
    for kind in range(names.count):
        out[kind * stride] = out[kind * stride + 1] = -1
    while at < stop:
        last = <const char *>memchr(at, 2, stop - at)
        if last == NULL:
            return False
        middle = <const char *>memchr(at, 1, last - at)
        if middle == NULL or middle == at or middle + 1 == last:
            return False
        if memchr(middle + 1, 1, last - middle - 1) != NULL:
            return False
        for kind in range(names.count):
            if middle - at == names.sizes[kind] and memcmp(at, names.at[kind], middle - at) == 0:
                out[kind * stride] = <int32_t>(middle + 1 - data)
                out[kind * stride + 1] = <int32_t>(last - data)
        at = last + 1
    return True


def join_records(list bodies, tuple names):
    """Bodies joined: (whole, begins of its records as `record_starts` has them, `record_heads`,
    `property_places` of these names).

    Records are walked right behind the copy of their body, while it is near: once memory has to
    be fetched for each of them, that takes longer than all the rest. ValueError(byte) if a body is
    not made of whole records.
    """
    cdef int64_t total = 0, at = 0, stop, size, row = 0, room, field, each
    cdef bytes body, out
    cdef Names wanted
    cdef bint is_plain = True
    take_names(names, &wanted)
    for body in bodies:
        total += len(body)
    if total > 0x7FFFFFFF:
        raise ValueError(total)
    room = total // LEAST
    each = 8 * (LONGS + 1) + 4 * SHORTS + 8 * wanted.count
    cdef bytes whole = PyBytes_FromStringAndSize(NULL, total)
    cdef unsigned char *data = <unsigned char *>PyBytes_AS_STRING(whole)
    cdef int64_t *large = <int64_t *>malloc(max(1, room * each))
    if large == NULL:
        raise MemoryError
    cdef int64_t *begins = large + LONGS * room
    cdef int32_t *places = <int32_t *>(begins + room)
    cdef int32_t *small = places + 2 * wanted.count * room
    cdef bytes starts, shorts, longs
    cdef list values = []
    try:
        for body in bodies:
            size = len(body)
            memcpy(data + at, PyBytes_AS_STRING(body), size)
            stop = at + size
            while at < stop:
                size = length_at(data, at) if stop - at >= LEAST else 0
                if size < LEAST or at + size > stop:
                    raise ValueError(at)
                if not read_head(data, at, stop, small + row, large + row, room):
                    raise ValueError(at)
                if wanted.count and is_plain:
                    is_plain = find_values(
                        <const char *>data, large[7 * room + row], large[8 * room + row], &wanted,
                        places + 2 * row, 2 * room,
                    )
                begins[row] = at
                row += 1
                at += size
        starts = PyBytes_FromStringAndSize(<char *>begins, 8 * row)
        shorts = PyBytes_FromStringAndSize(NULL, 4 * SHORTS * row)
        longs = PyBytes_FromStringAndSize(NULL, 8 * LONGS * row)
        for field in range(SHORTS):
            memcpy(PyBytes_AS_STRING(shorts) + 4 * field * row, small + field * room, 4 * row)
        for field in range(LONGS):
            memcpy(PyBytes_AS_STRING(longs) + 8 * field * row, large + field * room, 8 * row)
        for field in range(wanted.count):
            values.append(PyBytes_FromStringAndSize(<char *>(places + 2 * field * room), 8 * row))
    finally:
        free(large)
    return whole, starts, (shorts, longs), values if is_plain else None


def property_places(bytes body, bytes begin_bytes, bytes end_bytes, tuple names):
    """For each of the names the native 32-bit begin and end of its value in every property string.

    -1 where there is none; of two with the same name the last counts. None if a string is not made
    of name 0x01 value 0x02, both at least a byte long, again and again: then somebody else reads it.
    """
    cdef const char *data = PyBytes_AS_STRING(body)
    cdef const int64_t *begins = <const int64_t *>PyBytes_AS_STRING(begin_bytes)
    cdef const int64_t *ends = <const int64_t *>PyBytes_AS_STRING(end_bytes)
    cdef int64_t limit = len(body), count = len(begin_bytes) // 8, row
    cdef Names wanted
    take_names(names, &wanted)
    if len(end_bytes) != len(begin_bytes):
        raise ValueError("as many ends as begins")
    cdef bytes found = PyBytes_FromStringAndSize(NULL, 8 * count * wanted.count)
    cdef int32_t *out = <int32_t *>PyBytes_AS_STRING(found)
    for row in range(count):
        if begins[row] < 0 or ends[row] > limit or begins[row] > ends[row]:
            raise ValueError(begins[row])
        if not find_values(data, begins[row], ends[row], &wanted, out + 2 * row, 2 * count):
            return None
    return [found[8 * count * kind : 8 * count * (kind + 1)] for kind in range(wanted.count)]


# ------------------------------------------------------------------------------------------ answers


cdef inline bint number_in(Text* text, int64_t* found) noexcept nogil:
    """A text of nothing but digits, at most 18."""
    cdef int32_t place
    cdef int64_t value = 0
    if text.escaped or not (1 <= text.size <= 18):
        return False
    for place in range(text.size):
        if not (48 <= text.at[place] <= 57):
            return False
        value = value * 10 + (text.at[place] - 48)
    found[0] = value
    return True


cdef inline bint offsets_in(Head* head, int64_t* found) noexcept nogil:
    """nextBeginOffset, minOffset and maxOffset, each once."""
    cdef int entry, seen = 0, which
    cdef Text* key
    for entry in range(head.count):
        key = &head.entries[entry].key
        if is_word(key, "nextBeginOffset", 15):
            which = 0
        elif is_word(key, "minOffset", 9):
            which = 1
        elif is_word(key, "maxOffset", 9):
            which = 2
        else:
            continue
        if seen & (1 << which) or not number_in(&head.entries[entry].value, &found[which]):
            return False
        seen |= 1 << which
    return seen == 7


def pull_requests(tuple pieces, list pulls):
    """Frames with JSON headers, one a pull: these four pieces, and its three numbers between them.
    """
    cdef const char *texts[4]
    cdef Py_ssize_t sizes[4]
    cdef Py_ssize_t total = 0, at = 0, size
    cdef int place
    cdef bytes piece
    if len(pieces) != 4:
        raise ValueError("four pieces")
    for place in range(4):
        piece = pieces[place]
        texts[place] = PyBytes_AS_STRING(piece)
        sizes[place] = len(piece)
        total += sizes[place]
    cdef bytearray out = bytearray((total + 8 + 3 * 20) * len(pulls))
    cdef uint8_t *to = <uint8_t *>PyByteArray_AS_STRING(out)
    cdef int64_t numbers[3]
    for numbers[0], numbers[1], numbers[2] in pulls:
        size = 8
        for place in range(4):
            memcpy(to + at + size, texts[place], sizes[place])
            size += sizes[place]
            if place < 3:
                size += put_decimal(to + at + size, numbers[place])
        put32(to + at, <uint32_t>(size - 4))
        put32(to + at + 4, <uint32_t>(size - 8))
        at += size
    return bytes(out[:at])


def pull_answers(bytes data, Py_ssize_t limit_bytes):
    """([(id of the request, next offset, lowest, highest, body, None), ...], where they end).

    As far as they are whole answers of success; another frame, or one that nobody understands, is
    where it ends.
    """
    cdef const uint8_t *begin = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef const uint8_t *split
    cdef const uint8_t *behind
    cdef Py_ssize_t end = len(data), at = 0, length, head_size
    cdef int64_t offsets[3]
    cdef Head head
    cdef bint is_read
    cdef list found = []
    while end - at >= 8:
        length = <int32_t>get32(begin + at)
        if not (4 <= length <= limit_bytes - 4) or end - at < 4 + length:
            break
        head_size = get32(begin + at + 4) & 0xFFFFFF
        split = begin + at + 8 + head_size
        behind = begin + at + 4 + length
        if split > behind:
            break
        if begin[at + 4] == 0:
            is_read = scan_json(begin + at + 8, split, &head)
        elif begin[at + 4] == 1:
            is_read = scan_binary(begin + at + 8, split, &head)
        else:
            is_read = False
        if not is_read or head.code != 0 or not head.flag & 1 or not offsets_in(&head, offsets):
            break
        found.append((
            head.opaque, offsets[0], offsets[1], offsets[2],
            PyBytes_FromStringAndSize(<const char *>split, behind - split), None,
        ))
        at += 4 + length
    return found, at


# ------------------------------------------------------------------------------------------- pieces


def cut(bytes body, const int64_t[::1] begins, const int64_t[::1] ends):
    """The pieces [begin, end) as an Arrow array has them: native 32-bit offsets, and values."""
    cdef const char *data = PyBytes_AS_STRING(body)
    cdef int64_t limit = len(body), count = begins.shape[0], row, total = 0, size
    if ends.shape[0] != count:
        raise ValueError("as many ends as begins")
    for row in range(count):
        if begins[row] < 0 or begins[row] > ends[row] or ends[row] > limit:
            raise ValueError(begins[row])
        total += ends[row] - begins[row]
    if total > 0x7FFFFFFF:
        raise ValueError(total)
    cdef bytes offsets = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
    cdef bytes values = PyBytes_FromStringAndSize(NULL, total)
    cdef int32_t *bounds = <int32_t *>PyBytes_AS_STRING(offsets)
    cdef char *out = PyBytes_AS_STRING(values)
    total = 0
    for row in range(count):
        bounds[row] = <int32_t>total
        size = ends[row] - begins[row]
        memcpy(out + total, data + begins[row], size)
        total += size
    bounds[count] = <int32_t>total
    return offsets, values


def cut_places(bytes body, bytes places):
    """The pieces between native 32-bit begins and ends in turn: (how many are missing, a bit each
    that says whether it is there, offsets, values). -1: there is none."""
    cdef const char *data = PyBytes_AS_STRING(body)
    cdef const int32_t *bounds = <const int32_t *>PyBytes_AS_STRING(places)
    cdef int64_t limit = len(body), count = len(places) // 8, row, total = 0, size, missing = 0
    for row in range(count):
        if bounds[2 * row] < 0:
            missing += 1
            continue
        if bounds[2 * row] > bounds[2 * row + 1] or bounds[2 * row + 1] > limit:
            raise ValueError(bounds[2 * row])
        total += bounds[2 * row + 1] - bounds[2 * row]
    if total > 0x7FFFFFFF:
        raise ValueError(total)
    cdef bytes is_there = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef bytes offsets = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
    cdef bytes values = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t *bits = <uint8_t *>PyBytes_AS_STRING(is_there)
    cdef int32_t *into = <int32_t *>PyBytes_AS_STRING(offsets)
    cdef char *out = PyBytes_AS_STRING(values)
    memset(bits, 0, (count + 7) // 8)
    total = 0
    for row in range(count):
        into[row] = <int32_t>total
        if bounds[2 * row] >= 0:
            size = bounds[2 * row + 1] - bounds[2 * row]
            memcpy(out + total, data + bounds[2 * row], size)
            total += size
            bits[row >> 3] |= 1 << (row & 7)
    into[count] = <int32_t>total
    return missing, is_there, offsets, values


def are_same(bytes body, const int64_t[::1] begins, const int64_t[::1] ends):
    """Whether all the pieces are equal."""
    cdef const char *data = PyBytes_AS_STRING(body)
    cdef int64_t limit = len(body), count = begins.shape[0], row, size
    if ends.shape[0] != count:
        raise ValueError("as many ends as begins")
    for row in range(count):
        if begins[row] < 0 or begins[row] > ends[row] or ends[row] > limit:
            raise ValueError(begins[row])
        size = ends[row] - begins[row]
        if size != ends[0] - begins[0] or memcmp(data + begins[row], data + begins[0], size) != 0:
            return False
    return True


def are_below(
    const int64_t[::1] values, const int64_t[::1] places, const int64_t[::1] bounds,
    const int64_t[::1] limits,
):
    """Whether every value is below the limit of the part that its place is in; part n is from
    bounds[n] to bounds[n + 1], and places are in order."""
    cdef int64_t count = values.shape[0], parts = limits.shape[0], row, part = 0
    if places.shape[0] != count or bounds.shape[0] != parts + 1:
        raise ValueError("as many places as values, and a bound more than limits")
    for row in range(count):
        while part < parts and places[row] >= bounds[part + 1]:
            part += 1
        if part == parts or values[row] >= limits[part]:
            return False
    return True
