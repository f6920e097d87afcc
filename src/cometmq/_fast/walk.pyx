# cython: language_level=3, boundscheck=False, wraparound=False
"""Pulls asked for, where their answers and records stand, what the records' heads say, where properties
are, and pieces of them copied out.

Owns: the walks over many records at once (layout: wire/record.py). One rule: nothing is read past
the end of a record; what breaks the format is refused as a whole, and the caller's plain way, which
gives the same results, finds the words for it.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memchr, memcmp, memcpy, memset

from cometmq._fast.headers cimport Head, Text, is_word, scan_binary, scan_json
from cometmq._fast.ints cimport get32, get64, put32, put_decimal

cdef int64_t LEAST = 91  # a record without body, topic and properties
cdef int BORN_V6 = 16, STORE_V6 = 32, V6_MORE = 12
cdef int64_t MAGIC_V1 = 0xDAA320A7, MAGIC_V2 = 0xDAA320AB
DEF MOST_NAMES = 8


cdef inline int64_t length_at(const unsigned char *data, int64_t at) noexcept nogil:
    return get32(data + at)


cdef inline int64_t number_at(const unsigned char *data, int64_t at) noexcept nogil:
    return <int64_t>get64(data + at)


cdef enum:
    SHORTS = 3
    LONGS = 10
    TOPIC = 6  # these two are begins, and the ends are the next
    PROPERTIES = 8


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
    large[0] = at
    large[stride] = number_at(data, at + 20)
    large[2 * stride] = number_at(data, at + 40)
    large[3 * stride] = number_at(data, place + 56)
    place = at + more + 88
    large[4 * stride] = place
    place += length_at(data, place - 4)
    large[5 * stride] = place
    if place + 3 > end:
        return False
    size = data[place]
    place += 1
    if magic == MAGIC_V2:
        size = size << 8 | data[place]
        place += 1
    large[TOPIC * stride] = place
    place += size
    large[(TOPIC + 1) * stride] = place
    if place + 2 > end:
        return False
    size = <int64_t>data[place] << 8 | data[place + 1]
    place += 2
    large[PROPERTIES * stride] = place
    large[(PROPERTIES + 1) * stride] = end
    return place + size == end


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


def read_records(
    const unsigned char[::1] data, const int64_t[::1] begins, const int64_t[::1] ends, tuple names
):
    """The records in these pieces of a buffer, piece after piece: (count, room, 64-bit numbers,
    32-bit numbers, records of each piece, whether all have one topic, places of properties).

    All numbers are native, field after field, each with room for so many of which `count` are
    there. 64 bits: where the record begins, queue_offset, born_ms, store_ms, and begin and end of
    body, topic and properties. 32 bits: queue_id, sys_flag, reconsume_times. Places: for each name
    the begin and end of its value in turn, -1 where there is none, of two with the same name the
    last; None if a property string is not made of name 0x01 value 0x02, both at least a byte long,
    again and again: then somebody else reads it. ValueError(byte) if a piece is not made of whole
    records, or one contradicts itself.
    """
    cdef int64_t pieces = begins.shape[0], piece, at, stop, size, row = 0, room = 0, before
    cdef int64_t topic = 0, topic_size = 0
    cdef bint is_plain = True, has_one_topic = True
    cdef Names wanted
    take_names(names, &wanted)
    if ends.shape[0] != pieces or data.shape[0] > 0x7FFFFFFF:
        raise ValueError("as many ends as begins, in less than 2 GiB")
    for piece in range(pieces):
        if begins[piece] < 0 or begins[piece] > ends[piece] or ends[piece] > data.shape[0]:
            raise ValueError(begins[piece])
        room += (ends[piece] - begins[piece]) // LEAST
    # Fields that are whole pages apart would push each other out of the cache: they are written
    # side by side, and take two and a half times as long.
    room = (room + 511) // 512 * 512 + 40
    cdef bytes longs = PyBytes_FromStringAndSize(NULL, 8 * LONGS * room)
    cdef bytes shorts = PyBytes_FromStringAndSize(NULL, 4 * SHORTS * room)
    cdef bytes counts = PyBytes_FromStringAndSize(NULL, 8 * pieces)
    cdef bytes values = PyBytes_FromStringAndSize(NULL, 8 * wanted.count * room)
    cdef int64_t *large = <int64_t *>PyBytes_AS_STRING(longs)
    cdef int32_t *small = <int32_t *>PyBytes_AS_STRING(shorts)
    cdef int64_t *counted = <int64_t *>PyBytes_AS_STRING(counts)
    cdef int32_t *places = <int32_t *>PyBytes_AS_STRING(values)
    cdef const unsigned char *raw = &data[0] if data.shape[0] else NULL
    for piece in range(pieces):
        at = begins[piece]
        stop = ends[piece]
        before = row
        while at < stop:
            size = length_at(raw, at) if stop - at >= LEAST else 0
            if size < LEAST or at + size > stop:
                raise ValueError(at)
            if not read_head(raw, at, stop, small + row, large + row, room):
                raise ValueError(at)
            if row == 0:
                topic = large[TOPIC * room]
                topic_size = large[(TOPIC + 1) * room] - topic
            elif has_one_topic:
                has_one_topic = (
                    large[(TOPIC + 1) * room + row] - large[TOPIC * room + row] == topic_size
                    and memcmp(raw + large[TOPIC * room + row], raw + topic, topic_size) == 0
                )
            if wanted.count and is_plain:
                is_plain = find_values(
                    <const char *>raw, large[PROPERTIES * room + row],
                    large[(PROPERTIES + 1) * room + row], &wanted, places + 2 * row, 2 * room,
                )
            row += 1
            at += size
        counted[piece] = row - before
    return row, room, longs, shorts, counts, has_one_topic, values if is_plain else None


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


cdef struct Pieces:
    const char *at[4]
    Py_ssize_t sizes[4]
    Py_ssize_t total


cdef int take_pieces(tuple pieces, Pieces *found) except -1:
    """Point to them; they must live as long."""
    cdef int place
    cdef bytes piece
    if len(pieces) != 4:
        raise ValueError("four pieces")
    found.total = 0
    for place in range(4):
        piece = pieces[place]
        found.at[place] = PyBytes_AS_STRING(piece)
        found.sizes[place] = len(piece)
        found.total += found.sizes[place]
    return 0


cdef inline Py_ssize_t put_request(uint8_t *to, Pieces *pieces, int64_t *numbers) noexcept nogil:
    """A frame with a JSON header: the pieces, and three numbers between them; returns its size."""
    cdef Py_ssize_t size = 8
    cdef int place
    for place in range(4):
        memcpy(to + size, pieces.at[place], pieces.sizes[place])
        size += pieces.sizes[place]
        if place < 3:
            size += put_decimal(to + size, numbers[place])
    put32(to, <uint32_t>(size - 4))
    put32(to + 4, <uint32_t>(size - 8))
    return size


def pull_requests(tuple pieces, list pulls):
    """Requests with these four pieces, one a pull, which has three numbers."""
    cdef Pieces parts
    cdef int64_t numbers[3]
    cdef Py_ssize_t at = 0
    take_pieces(pieces, &parts)
    cdef bytearray out = bytearray((parts.total + 8 + 3 * 20) * len(pulls))
    cdef uint8_t *to = <uint8_t *>PyByteArray_AS_STRING(out)
    for numbers[0], numbers[1], numbers[2] in pulls:
        at += put_request(to + at, &parts, numbers)
    return bytes(out[:at])


def stretch_requests(tuple pieces, int64_t begin, int64_t step, int64_t count, int64_t first):
    """The same for pulls of `step` messages from `begin` on, with ids from `first` on."""
    cdef Pieces parts
    cdef int64_t numbers[3]
    cdef int64_t number
    cdef Py_ssize_t at = 0
    take_pieces(pieces, &parts)
    cdef bytearray out = bytearray((parts.total + 8 + 3 * 20) * max(0, count))
    cdef uint8_t *to = <uint8_t *>PyByteArray_AS_STRING(out)
    numbers[1] = step
    for number in range(count):
        numbers[0] = begin + number * step
        numbers[2] = first + number
        at += put_request(to + at, &parts, numbers)
    return bytes(out[:at])


def take_answers(
    object source, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit_bytes, int64_t first,
    const int64_t[::1] planned, int64_t[::1] places,
):
    """The answers of success in a buffer: (how many came as planned, the others, where they end).

    As planned: to request `first` + n, not answered before, with planned[n] as the next offset; begin
    and end of its body go to places[2 * n], which is -1 before. The others: [(id of the request,
    next offset, lowest, highest, (buffer, begin, end of the body), None), ...]. It ends at a frame
    that is not whole, is no such answer, or that nobody understands.
    """
    cdef const unsigned char[::1] view = source
    cdef const uint8_t *begin
    cdef const uint8_t *split
    cdef const uint8_t *behind
    cdef Py_ssize_t length, head_size
    cdef int64_t offsets[3]
    cdef int64_t count = planned.shape[0], number, noted = 0
    cdef Head head
    cdef bint is_read
    cdef list found = []
    if not 0 <= at <= end <= view.shape[0] or places.shape[0] < 2 * count:
        raise ValueError("outside of the buffer, or too few places")
    if at == end:
        return 0, found, at
    begin = &view[0]
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
        number = head.opaque - first
        if (
            0 <= number < count
            and places[2 * number] < 0
            and offsets[0] == planned[number]
        ):
            places[2 * number] = split - begin
            places[2 * number + 1] = behind - begin
            noted += 1
        else:
            piece = (source, split - begin, behind - begin)
            found.append((head.opaque, offsets[0], offsets[1], offsets[2], piece, None))
        at += 4 + length
    return noted, found, at


# ------------------------------------------------------------------------------------------- pieces


def cut(const unsigned char[::1] body, const int64_t[::1] begins, const int64_t[::1] ends):
    """The pieces [begin, end) as an Arrow array has them: native 32-bit offsets, and values."""
    cdef int64_t limit = body.shape[0], count = begins.shape[0], row, total = 0, size
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
    cdef const unsigned char *data = &body[0] if limit else NULL
    total = 0
    for row in range(count):
        bounds[row] = <int32_t>total
        size = ends[row] - begins[row]
        memcpy(out + total, data + begins[row], size)
        total += size
    bounds[count] = <int32_t>total
    return offsets, values


def cut_places(const unsigned char[::1] body, const int32_t[::1] bounds):
    """The pieces between 32-bit begins and ends in turn: (how many are missing, a bit each that
    says whether it is there, offsets, values). -1: there is none."""
    cdef int64_t limit = body.shape[0], count = bounds.shape[0] // 2, row, total = 0, size, missing = 0
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
    cdef const unsigned char *data = &body[0] if limit else NULL
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
