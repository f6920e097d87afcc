/*
 * RocketMQ's remoting bytes, as the load generator and the limit server both need them.
 *
 * Owns: the frame's layout, a scanner for JSON and binary headers, and the places of the fields of
 * a stored record. One rule: nothing here allocates or does I/O, and a scan never reads past the
 * end that it was given.
 *
 *    frame   u32 length of the rest, u8 serialization (0 JSON, 1 binary), u24 header length,
 *            header, body
 *    binary  i16 code, i8 language, i16 version, i32 opaque, i32 flag, i32+bytes remark,
 *            i32 size of the map, then its entries: i16+bytes name, i32+bytes value
 */
#ifndef COMETMQ_BENCH_REMOTING_H
#define COMETMQ_BENCH_REMOTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { JSON_HEADER = 0, BINARY_HEADER = 1 };
enum { FRAME_HEAD_BYTES = 8, BINARY_FIXED_BYTES = 17 };
enum { FLAG_RESPONSE = 1, FLAG_ONEWAY = 2 };

enum {
    SEND_MESSAGE = 10,
    PULL_MESSAGE = 11,
    CREATE_TOPIC = 17,
    CREATE_TOPICS = 18,
    GET_MAX_OFFSET = 30,
    GET_MIN_OFFSET = 31,
    HEART_BEAT = 34,
    SEND_MESSAGE_V2 = 310,
    SEND_BATCH_MESSAGE = 320,
};

enum {
    SUCCESS = 0,
    NOT_SUPPORTED = 3,
    SERVICE_NOT_AVAILABLE = 14,
    PULL_NOT_FOUND = 19,
    PULL_RETRY_IMMEDIATELY = 20,
    PULL_OFFSET_MOVED = 21,
};

enum { PULL_MAY_SUSPEND = 2, PULL_HAS_SUBSCRIPTION = 4 };

/* Where the fields of a stored record are, with IPv4 hosts. */
enum {
    RECORD_SIZE = 0,
    RECORD_MAGIC = 4,
    RECORD_CRC = 8,
    RECORD_QUEUE_ID = 12,
    RECORD_FLAG = 16,
    RECORD_QUEUE_OFFSET = 20,
    RECORD_LOG_OFFSET = 28,
    RECORD_SYS_FLAG = 36,
    RECORD_BORN_MS = 40,
    RECORD_BORN_HOST = 48,
    RECORD_STORE_MS = 56,
    RECORD_STORE_HOST = 64,
    RECORD_RECONSUMED = 72,
    RECORD_PREPARED = 76,
    RECORD_BODY_SIZE = 84,
    RECORD_BODY = 88,
    RECORD_LEAST_BYTES = 91,
};
#define RECORD_MAGIC_V1 0xDAA320A7u

/* ---------------------------------------------------------------------------- big-endian bytes */

static inline uint16_t get16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return __builtin_bswap16(value);
}

static inline uint32_t get32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return __builtin_bswap32(value);
}

static inline uint64_t get64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return __builtin_bswap64(value);
}

static inline uint8_t *put16(uint8_t *at, uint16_t value) {
    value = __builtin_bswap16(value);
    memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

static inline uint8_t *put32(uint8_t *at, uint32_t value) {
    value = __builtin_bswap32(value);
    memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

static inline uint8_t *put64(uint8_t *at, uint64_t value) {
    value = __builtin_bswap64(value);
    memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

static inline uint8_t *put_bytes(uint8_t *at, const void *bytes, size_t size) {
    memcpy(at, bytes, size);
    return at + size;
}

/* A literal: its length is known to the compiler, which makes plain moves of the copy. */
#define PUT_TEXT(at, literal) put_bytes(at, literal, sizeof(literal) - 1)

static inline uint8_t *put_decimal(uint8_t *at, uint64_t value) {
    uint8_t digits[20];
    int count = 0;
    do {
        digits[count++] = (uint8_t)('0' + value % 10);
        value /= 10;
    } while (value);
    while (count)
        *at++ = digits[--count];
    return at;
}

static inline uint8_t *put_hex(uint8_t *at, uint64_t value, int digits) {
    for (int shift = (digits - 1) * 4; shift >= 0; shift -= 4)
        *at++ = (uint8_t) "0123456789ABCDEF"[value >> shift & 15];
    return at;
}

/* --------------------------------------------------------------------------------- header scan */

typedef struct {
    const uint8_t *at;
    size_t size;
} Text;

static inline bool text_is(Text text, const char *literal, size_t size) {
    return text.size == size && memcmp(text.at, literal, size) == 0;
}
#define TEXT_IS(text, literal) text_is(text, literal, sizeof(literal) - 1)

/* A decimal number with an optional sign; what follows the digits is left alone. */
static inline int64_t text_number(Text text) {
    const uint8_t *at = text.at, *end = text.at + text.size;
    bool is_negative = at < end && *at == '-';
    uint64_t value = 0;
    for (at += is_negative; at < end && (unsigned)(*at - '0') < 10; at++)
        value = value * 10 + (unsigned)(*at - '0');
    return is_negative ? -(int64_t)value : (int64_t)value;
}

/*
 * Walks the members of a header: those of the JSON object itself and those of its extFields, in one
 * flat sequence. In a JSON header a text value is handed out as it stands, escapes and all.
 */
typedef struct {
    const uint8_t *at, *end;
    int serialization;
    int depth;
    bool is_broken;
} HeaderScan;

static inline HeaderScan scan_json(const uint8_t *header, size_t size) {
    return (HeaderScan){.at = header, .end = header + size, .serialization = JSON_HEADER};
}

static inline const uint8_t *skip_blank(const uint8_t *at, const uint8_t *end) {
    while (at < end && (*at <= ' ' || *at == ','))
        at++;
    return at;
}

/* `at` is behind the opening quote; returns the place of the closing one, or NULL. */
static inline const uint8_t *closing_quote(const uint8_t *at, const uint8_t *end) {
#if defined(__SSE2__) /* most texts are short: one step of 16 bytes finds their end */
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\');
    while (end - at >= 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)at);
        unsigned quotes = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, quote));
        unsigned both = quotes | (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, slash));
        if (!both) {
            at += 16;
            continue;
        }
        int first = __builtin_ctz(both);
        if (quotes >> first & 1)
            return at + first;
        at += first + 2;
    }
#endif
    while (at < end) {
        if (*at == '"')
            return at;
        at += *at == '\\' ? 2 : 1;
    }
    return NULL;
}

static inline bool next_json_member(HeaderScan *scan, Text *name, Text *value) {
    const uint8_t *at = scan->at, *end = scan->end;
    for (;;) {
        at = skip_blank(at, end);
        if (at >= end)
            return false;
        if (*at == '{') {
            scan->depth++;
            at++;
        } else if (*at == '}') {
            at++;
            if (--scan->depth <= 0)
                return false;
        } else if (*at == '"') {
            const uint8_t *stop = closing_quote(at + 1, end);
            if (!stop)
                break;
            *name = (Text){at + 1, (size_t)(stop - at - 1)};
            at = stop + 1;
            while (at < end && (*at == ':' || *at <= ' '))
                at++;
            if (at >= end)
                break;
            if (*at == '{') /* extFields: its members follow */
                continue;
            if (*at == '"') {
                stop = closing_quote(at + 1, end);
                if (!stop)
                    break;
                *value = (Text){at + 1, (size_t)(stop - at - 1)};
                scan->at = stop + 1;
            } else {
                for (stop = at; stop < end && *stop != ',' && *stop != '}'; stop++)
                    ;
                *value = (Text){at, (size_t)(stop - at)};
                scan->at = stop;
            }
            return true;
        } else {
            break;
        }
    }
    scan->is_broken = true;
    return false;
}

/* The entries of a binary header's map; `at` stands at its first entry. */
static inline bool next_binary_member(HeaderScan *scan, Text *name, Text *value) {
    const uint8_t *at = scan->at;
    size_t left = (size_t)(scan->end - at);
    if (left == 0)
        return false;
    scan->is_broken = true;
    if (left < 6)
        return false;
    size_t name_size = get16(at);
    if (left < 6 + name_size)
        return false;
    size_t value_size = get32(at + 2 + name_size);
    if (left - 6 - name_size < value_size)
        return false;
    *name = (Text){at + 2, name_size};
    *value = (Text){at + 6 + name_size, value_size};
    scan->at = at + 6 + name_size + value_size;
    scan->is_broken = false;
    return true;
}

typedef struct {
    int32_t code, opaque, flag;
} HeaderStart;

/* Reads the fixed part of a binary header and stands the scan at its map. */
static inline HeaderScan scan_binary(const uint8_t *header, size_t size, HeaderStart *start) {
    HeaderScan scan = {.serialization = BINARY_HEADER, .is_broken = true};
    scan.at = scan.end = header;
    if (size < BINARY_FIXED_BYTES + 4)
        return scan;
    start->code = (int16_t)get16(header);
    start->opaque = (int32_t)get32(header + 5);
    start->flag = (int32_t)get32(header + 9);
    size_t remark = get32(header + 13);
    if (remark > size - BINARY_FIXED_BYTES - 4)
        return scan;
    const uint8_t *map = header + BINARY_FIXED_BYTES + remark;
    size_t map_size = get32(map);
    if (map_size > size - BINARY_FIXED_BYTES - 4 - remark)
        return scan;
    scan.at = map + 4;
    scan.end = scan.at + map_size;
    scan.is_broken = false;
    return scan;
}

static inline bool next_member(HeaderScan *scan, Text *name, Text *value) {
    return scan->serialization == JSON_HEADER ? next_json_member(scan, name, value)
                                              : next_binary_member(scan, name, value);
}

#endif
