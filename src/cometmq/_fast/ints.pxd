# Numbers and texts in raw bytes: big-endian fields, decimal, hex, UTF-8, Java's hash, CRC-32.
#
# Owns: the smallest steps of the compiled path. One rule: nothing here reads beyond the `end` it is
# given, and nothing here touches a Python object.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

ctypedef const uint8_t* Bytes

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define cometmq_soon(p) __builtin_prefetch((p), 1)
    #else
    #define cometmq_soon(p) ((void)(p))
    #endif
    #include <stdint.h>
    #include <string.h>
    /* Not zero if one of eight bytes is not ASCII. */
    static inline uint64_t cometmq_high(const uint8_t *p) {
        uint64_t eight;
        memcpy(&eight, p, 8);
        return eight & 0x8080808080808080u;
    }
    /* The first byte that is 1 or 2 from `p` on, `end` if there is none: these divide properties.
       Eight at a time: a byte is zero if it borrows, and the lowest that does so is no mistake. */
    static inline const uint8_t *cometmq_mark(const uint8_t *p, const uint8_t *end) {
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        const uint64_t ones = 0x0101010101010101u;
        while (end - p >= 8) {
            uint64_t eight, is1, is2, found;
            memcpy(&eight, p, 8);
            is1 = eight ^ ones;
            is2 = eight ^ 2 * ones;
            found = (((is1 - ones) & ~is1) | ((is2 - ones) & ~is2)) & 0x80 * ones;
            if (found) return p + (__builtin_ctzll(found) >> 3);
            p += 8;
        }
    #endif
        while (p < end && *p != 1 && *p != 2) p++;
        return p;
    }
    """
    # Bring a line of memory near before it is needed; never fails, whatever the address.
    void soon "cometmq_soon"(const void* p) noexcept nogil
    uint64_t eight_high "cometmq_high"(Bytes p) noexcept nogil
    Bytes next_mark "cometmq_mark"(Bytes p, Bytes end) noexcept nogil


cdef inline uint32_t get32(Bytes p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline uint64_t get64(Bytes p) noexcept nogil:
    return (<uint64_t>get32(p) << 32) | get32(p + 4)


cdef inline uint32_t get16(Bytes p) noexcept nogil:
    return (<uint32_t>p[0] << 8) | p[1]


cdef inline void put16(uint8_t* p, uint32_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 8)
    p[1] = <uint8_t>value


cdef inline void put32(uint8_t* p, uint32_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 24)
    p[1] = <uint8_t>(value >> 16)
    p[2] = <uint8_t>(value >> 8)
    p[3] = <uint8_t>value


cdef inline void put64(uint8_t* p, uint64_t value) noexcept nogil:
    put32(p, <uint32_t>(value >> 32))
    put32(p + 4, <uint32_t>value)


cdef inline int put_decimal(uint8_t* p, int64_t value) noexcept nogil:
    """Write a number as text, at most 20 bytes; returns how many."""
    cdef uint8_t digits[20]
    cdef uint64_t rest
    cdef int count = 0, at = 0
    if value < 0:
        p[0] = c"-"
        at = 1
        rest = <uint64_t>0 - <uint64_t>value
    else:
        rest = <uint64_t>value
    while True:
        digits[count] = <uint8_t>(48 + rest % 10)
        count += 1
        rest = rest // 10
        if rest == 0:
            break
    while count:
        count -= 1
        p[at] = digits[count]
        at += 1
    return at


cdef inline void put_hex(uint8_t* p, Bytes raw, int size) noexcept nogil:
    """Upper-case hex, two bytes for each."""
    cdef int i
    cdef uint8_t high, low
    for i in range(size):
        high = raw[i] >> 4
        low = raw[i] & 15
        p[2 * i] = high + (48 if high < 10 else 55)
        p[2 * i + 1] = low + (48 if low < 10 else 55)


cdef inline int hex_value(uint8_t c) noexcept nogil:
    if 48 <= c <= 57:
        return c - 48
    if 65 <= c <= 70:
        return c - 55
    if 97 <= c <= 102:
        return c - 87
    return -1


cdef inline int utf8_size(Bytes p, Bytes end) noexcept nogil:
    """Bytes of the multi-byte character that begins here; 0 if it is not strict UTF-8."""
    cdef uint8_t first = p[0]
    cdef Py_ssize_t left = end - p
    if 0xC2 <= first <= 0xDF:
        return 2 if left >= 2 and (p[1] & 0xC0) == 0x80 else 0
    if 0xE0 <= first <= 0xEF:
        if left < 3 or (p[1] & 0xC0) != 0x80 or (p[2] & 0xC0) != 0x80:
            return 0
        if first == 0xE0 and p[1] < 0xA0:
            return 0
        if first == 0xED and p[1] >= 0xA0:
            return 0
        return 3
    if 0xF0 <= first <= 0xF4:
        if left < 4 or (p[1] & 0xC0) != 0x80 or (p[2] & 0xC0) != 0x80 or (p[3] & 0xC0) != 0x80:
            return 0
        if first == 0xF0 and p[1] < 0x90:
            return 0
        if first == 0xF4 and p[1] >= 0x90:
            return 0
        return 4
    return 0


cdef inline bint is_utf8(Bytes p, Bytes end) noexcept nogil:
    cdef int step
    while p < end:
        if p[0] < 0x80:
            p += 1
            while end - p >= 8 and not eight_high(p):
                p += 8
            continue
        step = utf8_size(p, end)
        if step == 0:
            return False
        p += step
    return True


cdef inline uint32_t java_hash(uint32_t begin, Bytes p, int size) noexcept nogil:
    """Java's String.hashCode of ASCII text, going on from the hash of what stands before."""
    cdef uint32_t value = begin
    while size >= 4:  # four at a time: they do not wait for each other
        value = value * 923521u + p[0] * 29791u + p[1] * 961u + p[2] * 31u + p[3]
        p += 4
        size -= 4
    while size > 0:
        value = value * 31 + p[0]
        p += 1
        size -= 1
    return value


cdef inline uint32_t index_hash(uint32_t value) noexcept nogil:
    """The key index's form of a hash: absolute, and 0 where Java's abs stays negative."""
    if value == 0x80000000u:
        return 0
    return <uint32_t>0 - value if value & 0x80000000u else value


cdef extern from *:
    """
    /* CRC-32 (IEEE), sixteen bytes a step. The table is made once, when the module is loaded. */
    #include <stdint.h>
    #include <stddef.h>
    static uint32_t cometmq_crc_table[16][256];
    static void cometmq_crc_start(void) {
        for (uint32_t n = 0; n < 256; n++) {
            uint32_t c = n;
            for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            cometmq_crc_table[0][n] = c;
        }
        for (uint32_t n = 0; n < 256; n++)
            for (int t = 1; t < 16; t++) {
                uint32_t c = cometmq_crc_table[t - 1][n];
                cometmq_crc_table[t][n] = cometmq_crc_table[0][c & 255] ^ (c >> 8);
            }
    }
    static uint32_t cometmq_crc(const uint8_t *p, size_t size) {
        uint32_t (*t)[256] = cometmq_crc_table;
        uint32_t c = 0xFFFFFFFFu;
        while (size >= 16) {
            uint32_t a = c ^ (p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24);
            c = t[15][a & 255] ^ t[14][a >> 8 & 255] ^ t[13][a >> 16 & 255] ^ t[12][a >> 24]
              ^ t[11][p[4]] ^ t[10][p[5]] ^ t[9][p[6]] ^ t[8][p[7]]
              ^ t[7][p[8]] ^ t[6][p[9]] ^ t[5][p[10]] ^ t[4][p[11]]
              ^ t[3][p[12]] ^ t[2][p[13]] ^ t[1][p[14]] ^ t[0][p[15]];
            p += 16; size -= 16;
        }
        while (size--) c = t[0][(c ^ *p++) & 255] ^ (c >> 8);
        return ~c;
    }
    /* 1 for what stands in a JSON string as itself: ASCII but controls, quote and backslash. */
    static const uint8_t cometmq_plain[256] = {
        [0x20] = 1, [0x21] = 1, [0x23 ... 0x5B] = 1, [0x5D ... 0x7F] = 1,
    };
    """
    const uint8_t plain_json "cometmq_plain"[256]
    void crc_start "cometmq_crc_start"() noexcept nogil
    uint32_t crc32 "cometmq_crc"(Bytes p, size_t size) noexcept nogil
