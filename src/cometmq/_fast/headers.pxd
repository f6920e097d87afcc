# Request headers in both serializations, scanned in place.
#
# Owns: what a header must look like for the compiled path to take it. One rule: it takes only what
# the plain path (wire/frame.py, wire/headers.py) would read to the same values; everything else is
# "not ordinary" (0, NULL) and is left to the plain path, which knows all of it and words the errors.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from cometmq._fast.ints cimport (
    Bytes,
    get16,
    get32,
    hex_value,
    is_utf8,
    plain_json,
    utf8_size,
)

cdef enum:
    MOST_ENTRIES = 32
    SEND_FIELDS = 14
    PULL_FIELDS = 12

cdef struct Text:
    Bytes at
    int32_t size
    bint escaped  # has JSON escapes: the bytes are not the text itself

cdef struct Entry:
    Text key
    Text value

cdef struct Head:
    int32_t code
    int32_t opaque
    int32_t flag
    int count
    Entry entries[MOST_ENTRIES]


# ------------------------------------------------------------------------------------------ JSON


cdef inline Bytes skip_space(Bytes p, Bytes end) noexcept nogil:
    while p < end and (p[0] == c" " or p[0] == c"\n" or p[0] == c"\r" or p[0] == c"\t"):
        p += 1
    return p


cdef inline Bytes scan_text(Bytes p, Bytes end, Text* found) noexcept nogil:
    """The string that begins at the quote `p`; returns what follows, NULL if not ordinary."""
    cdef uint8_t c
    cdef int step, high, low
    p += 1
    found.at = p
    found.escaped = False
    while True:
        while p < end and plain_json[p[0]]:
            p += 1
        if p >= end:
            return NULL
        c = p[0]
        if c == c'"':
            found.size = <int32_t>(p - found.at)
            return p + 1
        if c == c"\\":
            found.escaped = True
            if end - p < 2:
                return NULL
            c = p[1]
            if c == c"u":
                # Only ASCII: fastjson escapes the separators of properties, and little else.
                if end - p < 6 or p[2] != c"0" or p[3] != c"0":
                    return NULL
                high = hex_value(p[4])
                low = hex_value(p[5])
                if high < 0 or high > 7 or low < 0:
                    return NULL
                p += 6
            elif c == c'"' or c == c"\\" or c == c"/" or c == c"b" or c == c"f" or c == c"n":
                p += 2
            elif c == c"r" or c == c"t":
                p += 2
            else:
                return NULL
        elif c < 0x80:  # a control character
            return NULL
        else:
            step = utf8_size(p, end)
            if step == 0:
                return NULL
            p += step


cdef inline int32_t unescape(Text* text, uint8_t* to) noexcept nogil:
    """Copy a scanned string without its escapes; never longer than it was."""
    cdef Bytes p = text.at
    cdef Bytes end = p + text.size
    cdef uint8_t* begin = to
    cdef uint8_t c
    if not text.escaped:
        memcpy(to, p, text.size)
        return text.size
    while p < end:
        c = p[0]
        if c != c"\\":
            to[0] = c
            p += 1
        elif p[1] == c"u":
            to[0] = <uint8_t>(hex_value(p[4]) << 4 | hex_value(p[5]))
            p += 6
        else:
            c = p[1]
            if c == c"b":
                c = 8
            elif c == c"f":
                c = 12
            elif c == c"n":
                c = 10
            elif c == c"r":
                c = 13
            elif c == c"t":
                c = 9
            to[0] = c
            p += 2
        to += 1
    return <int32_t>(to - begin)


cdef inline Bytes scan_int32(Bytes p, Bytes end, int32_t* found) noexcept nogil:
    """A JSON integer of 32 bits; NULL if it is anything else."""
    cdef bint negative = False
    cdef int64_t value = 0
    cdef int digits = 0
    if p < end and p[0] == c"-":
        negative = True
        p += 1
    if p >= end or not (48 <= p[0] <= 57):
        return NULL
    if p[0] == 48 and p + 1 < end and 48 <= p[1] <= 57:
        return NULL  # JSON has no leading zeros
    while p < end and 48 <= p[0] <= 57:
        value = value * 10 + (p[0] - 48)
        digits += 1
        if digits > 10:
            return NULL
        p += 1
    if p < end and (p[0] == c"." or p[0] == c"e" or p[0] == c"E"):
        return NULL
    if negative:
        value = -value
    if not (-2147483648 <= value <= 2147483647):
        return NULL
    found[0] = <int32_t>value
    return p


cdef inline Bytes scan_ext(Bytes p, Bytes end, Head* head) noexcept nogil:
    """The object of extFields, texts only, from its brace on."""
    cdef Entry* entry
    p = skip_space(p + 1, end)
    if p < end and p[0] == c"}":
        return p + 1
    while p < end:
        if head.count >= MOST_ENTRIES or p[0] != c'"':
            return NULL
        entry = &head.entries[head.count]
        p = scan_text(p, end, &entry.key)
        if p == NULL or entry.key.escaped:
            return NULL
        p = skip_space(p, end)
        if p >= end or p[0] != c":":
            return NULL
        p = skip_space(p + 1, end)
        if p >= end or p[0] != c'"':
            return NULL
        p = scan_text(p, end, &entry.value)
        if p == NULL:
            return NULL
        head.count += 1
        p = skip_space(p, end)
        if p >= end:
            return NULL
        if p[0] == c"}":
            return p + 1
        if p[0] != c",":
            return NULL
        p = skip_space(p + 1, end)
    return NULL


cdef inline bint is_word(Text* text, const char* word, int size) noexcept nogil:
    return text.size == size and not text.escaped and memcmp(text.at, word, size) == 0


cdef inline bint scan_json(Bytes p, Bytes end, Head* head) noexcept nogil:
    """A whole JSON header; False if it is not ordinary."""
    cdef Text key, text
    cdef int32_t number
    cdef int seen = 0, bit
    head.code = head.opaque = head.flag = 0
    head.count = 0
    p = skip_space(p, end)
    if p >= end or p[0] != c"{":
        return False
    p = skip_space(p + 1, end)
    while p < end:
        if p[0] != c'"':
            return False
        p = scan_text(p, end, &key)
        if p == NULL or key.escaped:
            return False
        p = skip_space(p, end)
        if p >= end or p[0] != c":":
            return False
        p = skip_space(p + 1, end)
        if p >= end:
            return False
        bit = 0
        if is_word(&key, "extFields", 9):
            bit = 1
            if p[0] != c"{":
                return False
            p = scan_ext(p, end, head)
        elif is_word(&key, "code", 4):
            bit = 2
            p = scan_int32(p, end, &head.code)
        elif is_word(&key, "opaque", 6):
            bit = 4
            p = scan_int32(p, end, &head.opaque)
        elif is_word(&key, "flag", 4):
            bit = 8
            p = scan_int32(p, end, &head.flag)
        elif is_word(&key, "version", 7):
            bit = 16
            p = scan_int32(p, end, &number)
        elif p[0] == c'"':
            # language, serializeTypeCurrentRPC and what nobody knows; a remark is a text, too
            p = scan_text(p, end, &text)
        elif end - p >= 4 and memcmp(p, b"null", 4) == 0:
            p += 4
        else:
            return False
        if p == NULL or seen & bit:
            return False
        seen |= bit
        p = skip_space(p, end)
        if p >= end:
            return False
        if p[0] == c"}":
            return seen & 3 == 3 and skip_space(p + 1, end) == end
        if p[0] != c",":
            return False
        p = skip_space(p + 1, end)
    return False


# ---------------------------------------------------------------------------------------- binary


cdef inline bint scan_binary(Bytes p, Bytes end, Head* head) noexcept nogil:
    """A whole ROCKETMQ header; False if it is not ordinary."""
    cdef Py_ssize_t size
    cdef Entry* entry
    if end - p < 21:
        return False
    head.code = <int32_t>get16(p)
    head.opaque = <int32_t>get32(p + 5)
    head.flag = <int32_t>get32(p + 9)
    head.count = 0
    if get32(p + 13) != 0:  # a remark
        return False
    if <Py_ssize_t><int32_t>get32(p + 17) != end - p - 21:
        return False
    p += 21
    while p < end:
        if head.count >= MOST_ENTRIES or end - p < 6:
            return False
        entry = &head.entries[head.count]
        size = <Py_ssize_t>get16(p)
        p += 2
        if size > 0x7FFF or size + 4 > end - p:
            return False
        entry.key.at = p
        entry.key.size = <int32_t>size
        entry.key.escaped = False
        p += size
        size = <Py_ssize_t><int32_t>get32(p)
        p += 4
        if size < 0 or size > end - p:
            return False
        entry.value.at = p
        entry.value.size = <int32_t>size
        entry.value.escaped = False
        p += size
        if not is_utf8(entry.key.at, entry.key.at + entry.key.size):
            return False
        if not is_utf8(entry.value.at, p):
            return False
        head.count += 1
    return True


# ---------------------------------------------------------------------------------------- fields


cdef inline bint take(Text* fields, int number, Text* value) noexcept nogil:
    """Keep a value; False if it came twice."""
    if fields[number].at != NULL:
        return False
    fields[number] = value[0]
    return True


cdef inline bint send_fields(Head* head, Text* fields) noexcept nogil:
    """Sort the entries of a one-letter send header (310, 320): a is 0, n is 13."""
    cdef int i, number
    cdef Entry* entry
    for i in range(SEND_FIELDS):
        fields[i].at = NULL
        fields[i].size = 0
        fields[i].escaped = False
    for i in range(head.count):
        entry = &head.entries[i]
        if entry.key.size == 1:
            number = entry.key.at[0] - 97
            if 0 <= number < SEND_FIELDS and not take(fields, number, &entry.value):
                return False
    return True


cdef inline bint named_fields(
    Head* head, Text* fields, const char** names, const int* sizes, int count
) noexcept nogil:
    """Sort entries by their names, as a send of code 10 or a pull has them."""
    cdef int i, number
    cdef Entry* entry
    for i in range(count):
        fields[i].at = NULL
        fields[i].size = 0
        fields[i].escaped = False
    for i in range(head.count):
        entry = &head.entries[i]
        for number in range(count):
            if entry.key.size == sizes[number]:
                if memcmp(entry.key.at, names[number], sizes[number]) == 0:
                    if not take(fields, number, &entry.value):
                        return False
                    break
    return True


cdef inline int number_of(Text* text, int64_t* found) noexcept nogil:
    """A field as a number: 1 if it is one, 0 if it is absent or empty, -1 if not ordinary."""
    cdef Bytes p = text.at
    cdef Bytes end
    cdef bint negative = False
    cdef int64_t value = 0
    if p == NULL or text.size == 0:
        return 0
    if text.escaped or text.size > 19:
        return -1
    end = p + text.size
    if p[0] == c"-":
        negative = True
        p += 1
    if p == end or end - p > 18:
        return -1
    while p < end:
        if not (48 <= p[0] <= 57):
            return -1
        value = value * 10 + (p[0] - 48)
        p += 1
    found[0] = -value if negative else value
    return 1


cdef inline bint need_int32(Text* text, int32_t* found) noexcept nogil:
    """A required field of 32 bits; False if it is not ordinary."""
    cdef int64_t value = 0
    if number_of(text, &value) != 1 or not (-2147483648 <= value <= 2147483647):
        return False
    found[0] = <int32_t>value
    return True


cdef inline bint may_int32(Text* text, int32_t* found) noexcept nogil:
    """An optional field of 32 bits, left as it is when absent; False if it is not ordinary."""
    cdef int64_t value = 0
    cdef int kind = number_of(text, &value)
    if kind < 0 or not (-2147483648 <= value <= 2147483647):
        return False
    if kind:
        found[0] = <int32_t>value
    return True


cdef inline bint need_int64(Text* text, int64_t* found) noexcept nogil:
    return number_of(text, found) == 1


cdef inline bint may_int64(Text* text, int64_t* found) noexcept nogil:
    return number_of(text, found) >= 0


cdef inline bint is_true(Text* text) noexcept nogil:
    """Java's Boolean.parseBoolean: "true" in any case."""
    return (
        text.size == 4
        and text.at[0] | 32 == c"t"
        and text.at[1] | 32 == c"r"
        and text.at[2] | 32 == c"u"
        and text.at[3] | 32 == c"e"
    )
