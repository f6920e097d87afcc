/*
 * The limit: what a SEND and a PULL cost when nothing but their honest work is done, in C.
 *
 * Owns: a broker's data path and nothing else. For a send: frame and header parsed, RocketMQ's
 * record with its CRC appended to a mapped log, a unit into the queue, an entry for each key into a
 * hash index, the reply with its message id. For a pull: units looked up, records copied, long
 * polls held. Flushes by fdatasync in a thread, with group commit in sync mode. One rule: it does
 * the work a broker can't leave out, with the cheapest means that are still correct, so that a
 * broker's distance from it is the cost of everything else (checks, settings, statistics, recovery,
 * retention).
 *
 * What it leaves out: topics are made by their first message, nothing survives a restart, the log
 * is one sparse file, the queues' files are segments of another, and in sync mode a pull may see a
 * message before it is durable.
 *
 *     limit_server --store DIR [--port 0] [--sync]      prints "ready broker=127.0.0.1:PORT"
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "remoting.h"

#define LOG_BYTES (64ull << 30)
#define UNIT_BYTES 20ull
#define UNITS_PER_SEGMENT 300000ull /* as RocketMQ's consume-queue files */
#define SEGMENT_BYTES (UNIT_BYTES * UNITS_PER_SEGMENT)
#define MOST_SEGMENTS 60000ull
#define INDEX_HEAD_BYTES 40ull
#define INDEX_SLOTS 5000000ull
#define INDEX_ENTRIES 20000000ull
#define INDEX_ENTRY_BYTES 20ull
#define INDEX_BYTES (INDEX_HEAD_BYTES + 4 * INDEX_SLOTS + INDEX_ENTRY_BYTES * INDEX_ENTRIES)
#define MOST_FRAME_BYTES (16u << 20)
#define MOST_PULL_BYTES (256u << 10)
#define MOST_QUEUES 65536u
#define READ_BYTES (64u << 10)
#define LOG_FLUSH_MS 500 /* these four as RocketMQ's defaults */
#define UNITS_FLUSH_MS 1000
#define UNITS_THOROUGH_FLUSH_MS 60000
#define UNITS_LEAST_BYTES 8192u
#define TICK_MS 200
#define ADDED_PROPERTIES "MSG_REGION\1DefaultRegion\2TRACE_ON\1true\2CLUSTER\1DefaultCluster\2"

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ms(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* -------------------------------------------------------------------------------------- CRC-32 */

static uint32_t crc_tables[8][256];

static void make_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
        crc_tables[0][byte] = value;
    }
    for (int table = 1; table < 8; table++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = crc_tables[table - 1][byte];
            crc_tables[table][byte] = value >> 8 ^ crc_tables[0][value & 255];
        }
}

/* Eight bytes a step; `crc` is inverted, before and after. */
static uint32_t crc_by_tables(uint32_t crc, const uint8_t *at, size_t size) {
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= crc;
        crc = 0;
        for (int byte = 0; byte < 8; byte++)
            crc ^= crc_tables[7 - byte][word >> 8 * byte & 255];
    }
    while (size--)
        crc = crc >> 8 ^ crc_tables[0][(crc ^ *at++) & 255];
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/*
 * 64 bytes a step by carry-less multiplication, after Gopal et al., "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009); constants for the reflected
 * CRC-32. Takes the greatest multiple of 16 in `size`, which must be at least 64.
 */
__attribute__((target("pclmul,sse4.1"))) static uint32_t
crc_by_folding(uint32_t crc, const uint8_t *at, size_t size) {
    const __m128i fold_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i fold_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i fold_4 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_32 = _mm_setr_epi32(-1, 0, -1, 0);
    const __m128i *from = (const __m128i *)at;
    __m128i lanes[4];
    for (int lane = 0; lane < 4; lane++)
        lanes[lane] = _mm_loadu_si128(from++);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
    for (size -= 64; size >= 64; size -= 64)
        for (int lane = 0; lane < 4; lane++) {
            __m128i low = _mm_clmulepi64_si128(lanes[lane], fold_64, 0x00);
            __m128i high = _mm_clmulepi64_si128(lanes[lane], fold_64, 0x11);
            lanes[lane] = _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128(from++));
        }
    __m128i all = lanes[0];
    for (int lane = 1; lane < 4; lane++) {
        __m128i low = _mm_clmulepi64_si128(all, fold_16, 0x00);
        __m128i high = _mm_clmulepi64_si128(all, fold_16, 0x11);
        all = _mm_xor_si128(_mm_xor_si128(low, high), lanes[lane]);
    }
    for (; size >= 16; size -= 16) {
        __m128i low = _mm_clmulepi64_si128(all, fold_16, 0x00);
        __m128i high = _mm_clmulepi64_si128(all, fold_16, 0x11);
        all = _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128(from++));
    }
    __m128i part = _mm_clmulepi64_si128(all, fold_16, 0x10);
    all = _mm_xor_si128(_mm_srli_si128(all, 8), part);
    part = _mm_srli_si128(all, 4);
    all = _mm_clmulepi64_si128(_mm_and_si128(all, low_32), fold_4, 0x00);
    all = _mm_xor_si128(all, part);
    part = _mm_clmulepi64_si128(_mm_and_si128(all, low_32), barrett, 0x10);
    part = _mm_clmulepi64_si128(_mm_and_si128(part, low_32), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(all, part), 1);
}
#endif

static uint32_t body_crc(const uint8_t *body, size_t size) {
    uint32_t crc = ~0u;
#if defined(__x86_64__)
    if (size >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        size_t folded = size & ~(size_t)15;
        crc = crc_by_folding(crc, body, folded);
        body += folded;
        size -= folded;
    }
#endif
    return ~crc_by_tables(crc, body, size) & 0x7FFFFFFF; /* RocketMQ clears the sign */
}

/* --------------------------------------------------------------------------------------- files */

typedef struct {
    int fd;
    uint8_t *bytes;
} Mapped;

static Mapped map_new_file(const char *folder, const char *name, uint64_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    Mapped made = {.fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644)};
    if (made.fd < 0 || ftruncate(made.fd, (off_t)size) < 0)
        die(path);
    made.bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, made.fd, 0);
    if (made.bytes == MAP_FAILED)
        die(path);
    return made;
}

static const char *store_folder;
static Mapped commit_log, units, key_index;
static uint64_t log_end;        /* the main thread's */
static uint64_t segments_taken; /* of the units' file */
static uint32_t index_number, index_count = 1;
static int64_t index_begin_ms;
static uint8_t store_host[8]; /* address and port, as in a record */
static bool is_sync;

/* --------------------------------------------------------------------------- topics and queues */

typedef struct Hold Hold;

typedef struct {
    uint64_t count, flushed;
    uint32_t *segments;
    Hold *holds;
    bool is_woken;
} Queue;

typedef struct {
    Text name;
    uint32_t key_hash; /* Java's hash of "topic#", which a key's hash goes on from */
    uint32_t queue_count;
    Queue **queues; /* made when first used; holds point at them, so they stay where they are */
} Topic;

static Topic **topics; /* open addressing */
static size_t topic_slots = 1024, topic_count;

static uint32_t java_hash(uint32_t hash, const uint8_t *at, size_t size) {
    while (size--)
        hash = hash * 31 + *at++;
    return hash;
}

static size_t topic_slot(Text name, uint32_t hash) {
    size_t slot = hash * 0x9E3779B1u & (topic_slots - 1);
    while (topics[slot] && !text_is(topics[slot]->name, (const char *)name.at, name.size))
        slot = (slot + 1) & (topic_slots - 1);
    return slot;
}

static Topic *find_topic(Text name, bool make) {
    uint32_t hash = java_hash(0, name.at, name.size);
    size_t slot = topic_slot(name, hash);
    if (topics[slot] || !make)
        return topics[slot];
    if (topic_count * 2 >= topic_slots) {
        Topic **before = topics;
        size_t slots_before = topic_slots;
        topic_slots *= 2;
        topics = calloc(topic_slots, sizeof *topics);
        for (size_t one = 0; one < slots_before; one++)
            if (before[one])
                topics[topic_slot(before[one]->name,
                                  java_hash(0, before[one]->name.at, before[one]->name.size))] =
                    before[one];
        free(before);
        slot = topic_slot(name, hash);
    }
    Topic *topic = calloc(1, sizeof *topic);
    uint8_t *copy = malloc(name.size);
    topic->name = (Text){put_bytes(copy, name.at, name.size) - name.size, name.size};
    topic->key_hash = hash * 31 + '#';
    topics[slot] = topic;
    topic_count++;
    return topic;
}

static Queue *find_queue(Topic *topic, uint32_t queue_id) {
    if (queue_id >= MOST_QUEUES)
        return NULL;
    if (queue_id >= topic->queue_count) {
        topic->queues = realloc(topic->queues, (queue_id + 1) * sizeof *topic->queues);
        while (topic->queue_count <= queue_id)
            topic->queues[topic->queue_count++] = NULL;
    }
    if (!topic->queues[queue_id])
        topic->queues[queue_id] = calloc(1, sizeof(Queue));
    return topic->queues[queue_id];
}

static uint8_t *unit_at(Queue *queue, uint64_t offset) {
    uint64_t segment = queue->segments[offset / UNITS_PER_SEGMENT];
    return units.bytes + segment * SEGMENT_BYTES + offset % UNITS_PER_SEGMENT * UNIT_BYTES;
}

static void put_unit(Queue *queue, uint64_t log_offset, uint32_t size, int64_t tags_code) {
    if (queue->count % UNITS_PER_SEGMENT == 0) {
        uint64_t have = queue->count / UNITS_PER_SEGMENT;
        queue->segments = realloc(queue->segments, (have + 1) * sizeof *queue->segments);
        if (segments_taken == MOST_SEGMENTS) {
            fputs("limit_server: no more queue segments\n", stderr);
            exit(1);
        }
        queue->segments[have] = (uint32_t)segments_taken++;
    }
    uint8_t *at = unit_at(queue, queue->count++);
    put64(put32(put64(at, log_offset), size), (uint64_t)tags_code);
}

/* ----------------------------------------------------------------------------------- key index */

static void open_index(void) {
    char name[32];
    if (key_index.bytes) {
        munmap(key_index.bytes, INDEX_BYTES);
        close(key_index.fd);
    }
    snprintf(name, sizeof name, "index%u", index_number++);
    key_index = map_new_file(store_folder, name, INDEX_BYTES);
    index_count = 1;
    index_begin_ms = 0;
}

static void put_key(const Topic *topic, Text key, uint64_t log_offset, int64_t store_ms) {
    if (index_count == INDEX_ENTRIES)
        open_index();
    int32_t hash = (int32_t)java_hash(topic->key_hash, key.at, key.size);
    hash = hash == INT32_MIN ? 0 : abs(hash);
    uint8_t *head = key_index.bytes;
    uint8_t *slot = head + INDEX_HEAD_BYTES + 4 * ((uint64_t)hash % INDEX_SLOTS);
    uint8_t *entry = head + INDEX_HEAD_BYTES + 4 * INDEX_SLOTS + INDEX_ENTRY_BYTES * index_count;
    if (index_count == 1) {
        index_begin_ms = store_ms;
        put64(head, (uint64_t)store_ms);
        put64(head + 16, log_offset);
    }
    uint32_t former = get32(slot);
    entry = put64(put32(entry, (uint32_t)hash), log_offset);
    put32(put32(entry, (uint32_t)((store_ms - index_begin_ms) / 1000)), former);
    put32(slot, index_count++);
    put64(head + 8, (uint64_t)store_ms);
    put64(head + 24, log_offset);
    put32(head + 32, get32(head + 32) + (former == 0)); /* slots in use */
    put32(head + 36, index_count);
}

/* --------------------------------------------------------------------------------- connections */

typedef struct {
    uint8_t *bytes;
    size_t begin, end, size;
} Buffer;

/* Makes room for `more` bytes behind the end. */
static uint8_t *room(Buffer *buffer, size_t more) {
    if (buffer->begin == buffer->end)
        buffer->begin = buffer->end = 0;
    if (buffer->size - buffer->end < more && buffer->begin) {
        memmove(buffer->bytes, buffer->bytes + buffer->begin, buffer->end - buffer->begin);
        buffer->end -= buffer->begin;
        buffer->begin = 0;
    }
    if (buffer->size - buffer->end < more) {
        size_t size = buffer->size ? buffer->size : READ_BYTES;
        while (size - buffer->end < more)
            size *= 2;
        buffer->bytes = realloc(buffer->bytes, size);
        buffer->size = size;
    }
    return buffer->bytes + buffer->end;
}

/* In sync mode: replies up to `reply_end` may leave when the log is durable up to `log_end`. */
typedef struct {
    uint64_t reply_end, log_end;
} Promise;

typedef struct {
    int fd;
    uint32_t generation;
    uint8_t host[8];
    Buffer in, out;
    uint64_t written, allowed, queued; /* reply bytes since the connection began */
    Promise *promises;
    size_t promise_begin, promise_end, promise_size;
    bool waits_for_room, is_dirty;
} Connection;

struct Hold {
    Hold *next;
    Queue *queue;
    int fd;
    uint32_t generation;
    int32_t opaque;
    int serialization;
    uint64_t offset;
    uint32_t queue_id, most;
    int64_t until_ms;
};

static Connection **connections; /* by file descriptor */
static size_t connection_slots;
static uint32_t generations;
static int *dirty; /* connections with replies that were not asked to be written yet */
static size_t dirty_count;
static Queue **woken; /* queues that got a message somebody waits for */
static size_t woken_count, woken_size;
static size_t hold_count;
static int poller;

static void mark_dirty(Connection *connection) {
    if (!connection->is_dirty) {
        connection->is_dirty = true;
        dirty[dirty_count++] = connection->fd;
    }
}

static void close_connection(Connection *connection) {
    connections[connection->fd] = NULL;
    close(connection->fd);
    free(connection->in.bytes);
    free(connection->out.bytes);
    free(connection->promises);
    free(connection);
}

/* Writes what may leave; false if the connection is gone. */
static bool write_replies(Connection *connection) {
    Buffer *out = &connection->out;
    while (connection->written < connection->allowed) {
        size_t size = (size_t)(connection->allowed - connection->written);
        ssize_t wrote = send(connection->fd, out->bytes + out->begin, size, MSG_NOSIGNAL);
        if (wrote < 0 && errno == EAGAIN) {
            if (!connection->waits_for_room) {
                struct epoll_event event = {EPOLLIN | EPOLLOUT, {.fd = connection->fd}};
                epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
                connection->waits_for_room = true;
            }
            return true;
        }
        if (wrote < 0) {
            close_connection(connection);
            return false;
        }
        out->begin += (size_t)wrote;
        connection->written += (uint64_t)wrote;
    }
    if (connection->waits_for_room) {
        struct epoll_event event = {EPOLLIN, {.fd = connection->fd}};
        epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
        connection->waits_for_room = false;
    }
    return true;
}

/* ------------------------------------------------------------------------------------- replies */

typedef struct {
    Connection *connection;
    int serialization;
    uint8_t *frame, *at, *map;
} Reply;

/* `most`: bytes that the header's fields and the body will take at most. */
static Reply begin_reply(Connection *connection, int serialization, int32_t opaque, int code,
                         size_t most) {
    Reply reply = {connection, serialization, room(&connection->out, most + 256), NULL, NULL};
    uint8_t *at = reply.frame + FRAME_HEAD_BYTES;
    if (serialization == JSON_HEADER) {
        at = put_decimal(PUT_TEXT(at, "{\"code\":"), (uint64_t)code);
        at = PUT_TEXT(at, ",\"flag\":1,\"language\":\"OTHER\",\"version\":409,\"opaque\":");
        if (opaque < 0)
            *at++ = '-';
        at = put_decimal(at, (uint64_t)llabs(opaque));
        at = PUT_TEXT(at, ",\"extFields\":{");
    } else {
        at = put16(at, (uint16_t)code);
        *at++ = 7; /* language: OTHER */
        at = put32(put16(at, 409), (uint32_t)opaque);
        at = put32(put32(at, FLAG_RESPONSE), 0);
        reply.map = at;
        at += 4;
    }
    reply.at = at;
    return reply;
}

static inline void put_field(Reply *reply, const char *name, size_t name_size, const void *value,
                             size_t size) {
    uint8_t *at = reply->at;
    if (reply->serialization == JSON_HEADER) {
        *at++ = '"';
        at = put_bytes(at, name, name_size);
        at = PUT_TEXT(at, "\":\"");
        at = put_bytes(at, value, size);
        at = PUT_TEXT(at, "\",");
    } else {
        at = put_bytes(put16(at, (uint16_t)name_size), name, name_size);
        at = put_bytes(put32(at, (uint32_t)size), value, size);
    }
    reply->at = at;
}
#define PUT_FIELD(reply, name, value, size) put_field(reply, name, sizeof(name) - 1, value, size)

static inline void put_number(Reply *reply, const char *name, size_t name_size, uint64_t number) {
    uint8_t digits[20];
    put_field(reply, name, name_size, digits, (size_t)(put_decimal(digits, number) - digits));
}
#define PUT_NUMBER(reply, name, number) put_number(reply, name, sizeof(name) - 1, number)

/* Ends the header; the body may follow at the place that it returns. */
static uint8_t *end_header(Reply *reply) {
    uint8_t *at = reply->at;
    if (reply->serialization == JSON_HEADER) {
        at -= at[-1] == ',';
        at = PUT_TEXT(at, "}}");
    } else {
        put32(reply->map, (uint32_t)(at - reply->map - 4));
    }
    uint32_t size = (uint32_t)(at - reply->frame - FRAME_HEAD_BYTES);
    put32(reply->frame + 4, (uint32_t)reply->serialization << 24 | size);
    return reply->at = at;
}

static void end_reply(Reply *reply, const uint8_t *end) {
    size_t size = (size_t)(end - reply->frame);
    put32(reply->frame, (uint32_t)size - 4);
    reply->connection->out.end += size;
    reply->connection->queued += size;
    mark_dirty(reply->connection);
}

static void answer_code(Connection *connection, int serialization, int32_t opaque, int code) {
    Reply reply = begin_reply(connection, serialization, opaque, code, 0);
    end_reply(&reply, end_header(&reply));
}

/* ---------------------------------------------------------------------------------------- send */

typedef struct {
    int serialization;
    int32_t code, opaque, flag;
    Text topic, properties, body;
    uint32_t queue_id, sys_flag, message_flag, reconsumed;
    int64_t born_ms;
    uint64_t queue_offset;
    uint32_t most;
    uint32_t pull_flag;
    int64_t suspend_ms;
    bool is_batch;
} Request;

/* Properties into the log: JSON's escapes undone, of which clients use \u00XX and the short ones.
 */
static uint8_t *put_properties(uint8_t *to, Text text, bool is_escaped) {
    if (!is_escaped)
        return put_bytes(to, text.at, text.size);
    for (const uint8_t *at = text.at, *end = at + text.size; at < end;) {
        if (*at != '\\') {
            *to++ = *at++;
        } else if (end - at >= 6 && at[1] == 'u') {
            unsigned unit = 0;
            for (int digit = 2; digit < 6; digit++)
                unit = unit << 4 | (unsigned)((at[digit] & 15) + (at[digit] > '9' ? 9 : 0));
            if (unit >= 0x800)
                *to++ = (uint8_t)(0xE0 | unit >> 12), *to++ = (uint8_t)(0x80 | (unit >> 6 & 63)),
                *to++ = (uint8_t)(0x80 | (unit & 63));
            else if (unit >= 0x80)
                *to++ = (uint8_t)(0xC0 | unit >> 6), *to++ = (uint8_t)(0x80 | (unit & 63));
            else
                *to++ = (uint8_t)unit;
            at += 6;
        } else {
            uint8_t next = end - at > 1 ? at[1] : '\\';
            *to++ = next == 'n' ? '\n' : next == 't' ? '\t' : next == 'r' ? '\r' : next;
            at += 2;
        }
    }
    return to;
}

typedef struct {
    Text unique_key, keys, tags;
} Known;

static Known find_known(const uint8_t *at, const uint8_t *end) {
    Known known = {0};
    while (at < end) {
        const uint8_t *split = memchr(at, 1, (size_t)(end - at));
        if (!split)
            break;
        const uint8_t *stop = memchr(split, 2, (size_t)(end - split));
        if (!stop)
            stop = end;
        Text name = {at, (size_t)(split - at)}, value = {split + 1, (size_t)(stop - split - 1)};
        if (TEXT_IS(name, "UNIQ_KEY"))
            known.unique_key = value;
        else if (TEXT_IS(name, "KEYS"))
            known.keys = value;
        else if (TEXT_IS(name, "TAGS"))
            known.tags = value;
        at = stop + 1;
    }
    return known;
}

/* One record at the log's end, its unit and its keys; returns the unique key, which is in the log.
 */
static Text append(const Connection *from, const Request *request, Topic *topic, Queue *queue,
                   Text body, uint32_t message_flag, Text properties, bool is_escaped,
                   int64_t store_ms) {
    uint8_t *record = commit_log.bytes + log_end, *at = record + RECORD_BODY;
    put32(record + RECORD_MAGIC, RECORD_MAGIC_V1);
    put32(record + RECORD_CRC, body_crc(body.at, body.size));
    put32(record + RECORD_QUEUE_ID, request->queue_id);
    put32(record + RECORD_FLAG, message_flag);
    put64(record + RECORD_QUEUE_OFFSET, queue->count);
    put64(record + RECORD_LOG_OFFSET, log_end);
    put32(record + RECORD_SYS_FLAG, request->sys_flag);
    put64(record + RECORD_BORN_MS, (uint64_t)request->born_ms);
    put_bytes(record + RECORD_BORN_HOST, from->host, sizeof from->host);
    put64(record + RECORD_STORE_MS, (uint64_t)store_ms);
    put_bytes(record + RECORD_STORE_HOST, store_host, sizeof store_host);
    put32(record + RECORD_RECONSUMED, request->reconsumed);
    put64(record + RECORD_PREPARED, 0);
    put32(record + RECORD_BODY_SIZE, (uint32_t)body.size);
    at = put_bytes(at, body.at, body.size);
    *at++ = (uint8_t)topic->name.size;
    at = put_bytes(at, topic->name.at, topic->name.size);
    uint8_t *text = at + 2;
    uint8_t *own_end = put_properties(text, properties, is_escaped);
    at = own_end;
    if (at > text && at[-1] != 2)
        *at++ = 2;
    at = PUT_TEXT(at, ADDED_PROPERTIES);
    put16(text - 2, (uint16_t)(at - text));
    uint32_t size = (uint32_t)(at - record);
    put32(record + RECORD_SIZE, size);

    Known known = find_known(text, own_end);
    int32_t tags_code = (int32_t)java_hash(0, known.tags.at, known.tags.size);
    put_unit(queue, log_end, size, tags_code);
    if (known.unique_key.size)
        put_key(topic, known.unique_key, log_end, store_ms);
    for (Text words = known.keys; words.size;) {
        const uint8_t *gap = memchr(words.at, ' ', words.size);
        Text word = {words.at, gap ? (size_t)(gap - words.at) : words.size};
        if (word.size)
            put_key(topic, word, log_end, store_ms);
        size_t used = word.size + (gap != NULL);
        words = (Text){words.at + used, words.size - used};
    }
    log_end += size;
    return known.unique_key;
}

static uint8_t *put_message_id(uint8_t *at, uint64_t log_offset) {
    for (int byte = 0; byte < 8; byte++)
        at = put_hex(at, store_host[byte], 2);
    return put_hex(at, log_offset, 16);
}

static void serve_send(Connection *connection, const Request *request, int64_t store_ms) {
    /* Escapes only shrink; each message of a batch adds a record's fixed part and our properties.
     */
    size_t most = request->body.size * 16 + request->properties.size + (1u << 16);
    Topic *topic = find_topic(request->topic, true);
    Queue *queue = find_queue(topic, request->queue_id);
    if (!queue || topic->name.size > 127 || log_end + most > LOG_BYTES) {
        answer_code(connection, request->serialization, request->opaque, SERVICE_NOT_AVAILABLE);
        return;
    }
    uint64_t first_offset = queue->count;
    size_t batch_most = request->is_batch ? request->body.size / 22 + 1 : 1;
    Reply reply = begin_reply(connection, request->serialization, request->opaque, SUCCESS,
                              batch_most * 33 + 512);
    uint8_t one_id[33], *ids = one_id, *id_end = one_id;
    Text unique_key = {0};
    if (!request->is_batch) {
        id_end = put_message_id(id_end, log_end);
        unique_key = append(connection, request, topic, queue, request->body, request->message_flag,
                            request->properties, request->serialization == JSON_HEADER, store_ms);
    } else {
        ids = id_end = malloc(batch_most * 33);
        const uint8_t *at = request->body.at, *end = at + request->body.size;
        while (end - at >= 22) {
            size_t entry_size = get32(at), body_size = get32(at + 16);
            if (entry_size < 22 || entry_size > (size_t)(end - at) || body_size > entry_size - 22)
                break;
            Text body = {at + 20, body_size};
            Text properties = {body.at + body_size + 2, get16(body.at + body_size)};
            if (properties.size > entry_size - 22 - body_size)
                break;
            if (id_end > ids)
                *id_end++ = ',';
            id_end = put_message_id(id_end, log_end);
            append(connection, request, topic, queue, body, get32(at + 12), properties, false,
                   store_ms);
            at += entry_size;
        }
    }
    PUT_FIELD(&reply, "msgId", ids, (size_t)(id_end - ids));
    PUT_NUMBER(&reply, "queueId", request->queue_id);
    PUT_NUMBER(&reply, "queueOffset", first_offset);
    if (unique_key.size && unique_key.size < 128)
        PUT_FIELD(&reply, "transactionId", unique_key.at, unique_key.size);
    PUT_FIELD(&reply, "MSG_REGION", "DefaultRegion", 13);
    PUT_FIELD(&reply, "TRACE_ON", "true", 4);
    end_reply(&reply, end_header(&reply));
    if (ids != one_id)
        free(ids);
    if (queue->holds && !queue->is_woken) {
        queue->is_woken = true;
        if (woken_count == woken_size)
            woken = realloc(woken, (woken_size = woken_size ? woken_size * 2 : 64) * sizeof *woken);
        woken[woken_count++] = queue;
    }
}

/* ---------------------------------------------------------------------------------------- pull */

/* Answers with messages, or with the code that says why not. */
static void answer_pull(Connection *connection, int serialization, int32_t opaque, Queue *queue,
                        uint64_t offset, uint32_t most) {
    uint64_t count = queue ? queue->count : 0, next = offset;
    int code = SUCCESS;
    size_t bytes = 0;
    if (offset > count) {
        code = PULL_OFFSET_MOVED;
        next = count;
    } else if (offset == count) {
        code = PULL_NOT_FOUND;
    }
    for (; code == SUCCESS && next < count && next - offset < most; next++) {
        size_t size = get32(unit_at(queue, next) + 8);
        if (bytes && bytes + size > MOST_PULL_BYTES)
            break;
        bytes += size;
    }
    Reply reply = begin_reply(connection, serialization, opaque, code, bytes + 512);
    PUT_FIELD(&reply, "suggestWhichBrokerId", "0", 1);
    PUT_NUMBER(&reply, "nextBeginOffset", next);
    PUT_NUMBER(&reply, "minOffset", 0);
    PUT_NUMBER(&reply, "maxOffset", count);
    uint8_t *body = end_header(&reply);
    if (code == SUCCESS)
        for (uint64_t one = offset; one < next; one++) {
            const uint8_t *unit = unit_at(queue, one);
            body = put_bytes(body, commit_log.bytes + get64(unit), get32(unit + 8));
        }
    end_reply(&reply, body);
}

static void serve_pull(Connection *connection, const Request *request) {
    Topic *topic = find_topic(request->topic, true);
    Queue *queue = find_queue(topic, request->queue_id);
    bool may_hold = request->pull_flag & PULL_MAY_SUSPEND && request->suspend_ms > 0;
    if (!queue || !may_hold || request->queue_offset != queue->count) {
        answer_pull(connection, request->serialization, request->opaque, queue,
                    request->queue_offset, request->most);
        return;
    }
    Hold *hold = malloc(sizeof *hold);
    *hold = (Hold){.next = queue->holds,
                   .queue = queue,
                   .fd = connection->fd,
                   .generation = connection->generation,
                   .opaque = request->opaque,
                   .serialization = request->serialization,
                   .offset = request->queue_offset,
                   .queue_id = request->queue_id,
                   .most = request->most,
                   .until_ms = now_ms(CLOCK_MONOTONIC) + request->suspend_ms};
    queue->holds = hold;
    hold_count++;
}

/* Answers the holds of a queue that are due; a connection that is gone takes its holds along. */
static void resume_holds(Queue *queue, int64_t now) {
    for (Hold **link = &queue->holds; *link;) {
        Hold *hold = *link;
        Connection *connection = connections[hold->fd];
        bool is_gone = !connection || connection->generation != hold->generation;
        if (!is_gone && hold->offset >= queue->count && hold->until_ms > now) {
            link = &hold->next;
            continue;
        }
        if (!is_gone)
            answer_pull(connection, hold->serialization, hold->opaque, queue, hold->offset,
                        hold->most);
        *link = hold->next;
        free(hold);
        hold_count--;
    }
}

static void resume_all_holds(int64_t now) {
    for (size_t slot = 0; slot < topic_slots && hold_count; slot++)
        for (uint32_t one = 0; topics[slot] && one < topics[slot]->queue_count; one++)
            if (topics[slot]->queues[one] && topics[slot]->queues[one]->holds)
                resume_holds(topics[slot]->queues[one], now);
}

/* ------------------------------------------------------------------------------------ requests */

static bool parse_request(const uint8_t *frame, size_t size, Request *request) {
    uint32_t mark = get32(frame + 4);
    size_t header_size = mark & 0xFFFFFF;
    *request = (Request){.serialization = (int)(mark >> 24)};
    if (header_size > size - FRAME_HEAD_BYTES || request->serialization > BINARY_HEADER)
        return false;
    const uint8_t *header = frame + FRAME_HEAD_BYTES;
    request->body = (Text){header + header_size, size - FRAME_HEAD_BYTES - header_size};
    HeaderStart start = {0};
    HeaderScan scan = request->serialization == JSON_HEADER
                          ? scan_json(header, header_size)
                          : scan_binary(header, header_size, &start);
    request->code = start.code;
    request->opaque = start.opaque;
    request->flag = start.flag;
    Text name, value;
    while (next_member(&scan, &name, &value)) {
        if (name.size == 1) { /* a V2 send; a switch, because these are the frequent ones */
            switch (*name.at) {
            case 'b':
                request->topic = value;
                break;
            case 'e':
                request->queue_id = (uint32_t)text_number(value);
                break;
            case 'f':
                request->sys_flag = (uint32_t)text_number(value);
                break;
            case 'g':
                request->born_ms = text_number(value);
                break;
            case 'h':
                request->message_flag = (uint32_t)text_number(value);
                break;
            case 'i':
                request->properties = value;
                break;
            case 'j':
                request->reconsumed = (uint32_t)text_number(value);
                break;
            case 'm':
                request->is_batch = TEXT_IS(value, "true");
                break;
            }
        } else if (TEXT_IS(name, "code")) {
            request->code = (int32_t)text_number(value);
        } else if (TEXT_IS(name, "opaque")) {
            request->opaque = (int32_t)text_number(value);
        } else if (TEXT_IS(name, "flag")) {
            request->flag = (int32_t)text_number(value);
        } else if (TEXT_IS(name, "topic")) {
            request->topic = value;
        } else if (TEXT_IS(name, "queueId")) {
            request->queue_id = (uint32_t)text_number(value);
        } else if (TEXT_IS(name, "queueOffset")) {
            request->queue_offset = (uint64_t)text_number(value);
        } else if (TEXT_IS(name, "maxMsgNums")) {
            request->most = (uint32_t)text_number(value);
        } else if (TEXT_IS(name, "sysFlag")) {
            request->pull_flag = (uint32_t)text_number(value);
        } else if (TEXT_IS(name, "suspendTimeoutMillis")) {
            request->suspend_ms = text_number(value);
        }
    }
    return !scan.is_broken;
}

static void serve_offset(Connection *connection, const Request *request) {
    Queue *queue = find_queue(find_topic(request->topic, true), request->queue_id);
    Reply reply = begin_reply(connection, request->serialization, request->opaque, SUCCESS, 64);
    uint64_t offset = request->code == GET_MAX_OFFSET && queue ? queue->count : 0;
    PUT_NUMBER(&reply, "offset", offset);
    end_reply(&reply, end_header(&reply));
}

/* Serves every whole frame in the input; false if the bytes are no frames. */
static bool serve_input(Connection *connection, int64_t store_ms) {
    Buffer *in = &connection->in;
    Request request;
    while (in->end - in->begin >= FRAME_HEAD_BYTES) {
        const uint8_t *frame = in->bytes + in->begin;
        size_t size = (size_t)get32(frame) + 4;
        if (size < FRAME_HEAD_BYTES || size > MOST_FRAME_BYTES)
            return false;
        if (in->end - in->begin < size) {
            room(in, size - (in->end - in->begin));
            break;
        }
        if (!parse_request(frame, size, &request))
            return false;
        switch (request.code) {
        case SEND_MESSAGE_V2:
        case SEND_BATCH_MESSAGE:
            serve_send(connection, &request, store_ms);
            break;
        case PULL_MESSAGE:
            serve_pull(connection, &request);
            break;
        case GET_MAX_OFFSET:
        case GET_MIN_OFFSET:
            serve_offset(connection, &request);
            break;
        case CREATE_TOPIC: /* topics make themselves */
        case CREATE_TOPICS:
        case HEART_BEAT:
            answer_code(connection, request.serialization, request.opaque, SUCCESS);
            break;
        default:
            if (!(request.flag & FLAG_ONEWAY))
                answer_code(connection, request.serialization, request.opaque, NOT_SUPPORTED);
        }
        in->begin += size;
    }
    return true;
}

/* --------------------------------------------------------------------------------------- flush */

static pthread_mutex_t flush_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t flush_wanted = PTHREAD_COND_INITIALIZER;
static uint64_t flush_upto;           /* under the lock */
static _Atomic uint64_t flushed_upto; /* the flusher's */
static int flush_event;

/* Sync mode: whatever was asked for while the last fdatasync ran is covered by the next one. */
static void *flush_on_demand(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&flush_lock);
        while (flush_upto == atomic_load(&flushed_upto))
            pthread_cond_wait(&flush_wanted, &flush_lock);
        uint64_t upto = flush_upto;
        pthread_mutex_unlock(&flush_lock);
        if (fdatasync(commit_log.fd) < 0)
            die("fdatasync");
        atomic_store(&flushed_upto, upto);
        if (eventfd_write(flush_event, 1) < 0)
            die("eventfd");
    }
    return NULL;
}

typedef struct {
    uint8_t *at;
    size_t size;
} Range;

static Range *ranges; /* under the lock: what the flusher is to sync of the units' file */
static size_t range_count, range_size;

static void add_range(Queue *queue) {
    if (range_count == range_size)
        ranges = realloc(ranges, (range_size = range_size ? range_size * 2 : 64) * sizeof *ranges);
    uint64_t last = queue->count - 1, first = last - last % UNITS_PER_SEGMENT;
    if (first <
        queue->flushed) /* a segment's rest, when it was just left, waits for the next minute */
        first = queue->flushed;
    uintptr_t begin = (uintptr_t)unit_at(queue, first) & ~(uintptr_t)4095;
    uintptr_t end = (uintptr_t)unit_at(queue, last) + UNIT_BYTES;
    ranges[range_count++] = (Range){(uint8_t *)begin, end - begin};
    queue->flushed = queue->count;
}

/* On the main thread, once a second: the queues with two dirty pages, which alone are worth it. */
static void collect_dirty_queues(void) {
    pthread_mutex_lock(&flush_lock);
    for (size_t slot = 0; slot < topic_slots && range_count < 1u << 16; slot++)
        for (uint32_t one = 0; topics[slot] && one < topics[slot]->queue_count; one++) {
            Queue *queue = topics[slot]->queues[one];
            if (queue && (queue->count - queue->flushed) * UNIT_BYTES >= UNITS_LEAST_BYTES)
                add_range(queue);
        }
    pthread_mutex_unlock(&flush_lock);
}

/* The log twice a second in async mode, the queues that were collected in both, all at times. */
static void *flush_by_time(void *unused) {
    (void)unused;
    for (int turn = 1;; turn++) {
        struct timespec pause = {0, LOG_FLUSH_MS * 1000000L};
        nanosleep(&pause, NULL);
        if (!is_sync && fdatasync(commit_log.fd) < 0)
            die("fdatasync");
        if (turn % (UNITS_THOROUGH_FLUSH_MS / LOG_FLUSH_MS) == 0 && fdatasync(units.fd) < 0)
            die("fdatasync");
        for (;;) {
            Range range = {0};
            pthread_mutex_lock(&flush_lock);
            if (range_count)
                range = ranges[--range_count];
            pthread_mutex_unlock(&flush_lock);
            if (!range.size)
                break;
            if (msync(range.at, range.size, MS_SYNC) < 0)
                die("msync");
        }
    }
    return NULL;
}

/* What was queued since the last promise may leave when the log is durable up to here. */
static void promise_replies(Connection *connection) {
    if (connection->promise_begin == connection->promise_end)
        connection->promise_begin = connection->promise_end = 0;
    if (connection->promise_end == connection->promise_size) {
        connection->promise_size = connection->promise_size ? connection->promise_size * 2 : 16;
        connection->promises =
            realloc(connection->promises, connection->promise_size * sizeof(Promise));
    }
    connection->promises[connection->promise_end++] = (Promise){connection->queued, log_end};
}

static bool release_replies(Connection *connection) {
    uint64_t durable = atomic_load(&flushed_upto);
    while (connection->promise_begin < connection->promise_end &&
           connection->promises[connection->promise_begin].log_end <= durable)
        connection->allowed = connection->promises[connection->promise_begin++].reply_end;
    return write_replies(connection);
}

/* ---------------------------------------------------------------------------------------- loop */

static void accept_all(int listener) {
    for (;;) {
        struct sockaddr_in peer;
        socklen_t size = sizeof peer;
        int fd = accept4(listener, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if ((size_t)fd >= connection_slots) {
            size_t slots = connection_slots ? connection_slots * 2 : 1024;
            while ((size_t)fd >= slots)
                slots *= 2;
            connections = realloc(connections, slots * sizeof *connections);
            dirty = realloc(dirty, slots * sizeof *dirty);
            memset(connections + connection_slots, 0,
                   (slots - connection_slots) * sizeof *connections);
            connection_slots = slots;
        }
        Connection *connection = calloc(1, sizeof *connection);
        connection->fd = fd;
        connection->generation = ++generations;
        memcpy(connection->host, &peer.sin_addr, 4);
        put32(connection->host + 4, ntohs(peer.sin_port));
        connections[fd] = connection;
        struct epoll_event event = {EPOLLIN, {.fd = fd}};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static bool read_input(Connection *connection, int64_t store_ms) {
    Buffer *in = &connection->in;
    uint8_t *to = room(in, in->size - in->end >= READ_BYTES / 2 ? 1 : READ_BYTES / 2);
    ssize_t got = recv(connection->fd, to, in->size - in->end, 0);
    if (got < 0 && errno == EAGAIN)
        return true;
    if (got <= 0)
        return false;
    in->end += (size_t)got;
    return serve_input(connection, store_ms);
}

/* One write a connection for all replies of its last read and for the pulls that it woke. */
static void write_dirty(void) {
    for (size_t one = 0; one < dirty_count; one++) {
        Connection *connection = connections[dirty[one]];
        if (!connection || !connection->is_dirty)
            continue;
        connection->is_dirty = false;
        if (is_sync) {
            promise_replies(connection);
            release_replies(connection);
        } else {
            connection->allowed = connection->queued;
            write_replies(connection);
        }
    }
    dirty_count = 0;
}

static void ask_for_flush(void) {
    if (log_end == flush_upto)
        return;
    pthread_mutex_lock(&flush_lock);
    flush_upto = log_end;
    pthread_cond_signal(&flush_wanted);
    pthread_mutex_unlock(&flush_lock);
}

static void serve(int listener) {
    struct epoll_event events[256];
    int64_t next_scan = 0;
    for (;;) {
        int count = epoll_wait(poller, events, 256, TICK_MS);
        int64_t store_ms = now_ms(CLOCK_REALTIME);
        for (int one = 0; one < count; one++) {
            int fd = events[one].data.fd;
            if (fd == listener) {
                accept_all(listener);
                continue;
            }
            if (fd == flush_event) {
                eventfd_t value;
                eventfd_read(flush_event, &value);
                for (size_t each = 0; each < connection_slots; each++)
                    if (connections[each])
                        release_replies(connections[each]);
                continue;
            }
            Connection *connection = connections[fd];
            if (!connection)
                continue;
            if (events[one].events & EPOLLOUT && !write_replies(connection))
                continue;
            if (events[one].events & ~(uint32_t)EPOLLOUT && !read_input(connection, store_ms)) {
                close_connection(connection);
                continue;
            }
            for (size_t each = 0; each < woken_count; each++) {
                woken[each]->is_woken = false;
                resume_holds(woken[each], INT64_MIN);
            }
            woken_count = 0;
            write_dirty();
        }
        if (store_ms >= next_scan) {
            next_scan = store_ms + UNITS_FLUSH_MS;
            collect_dirty_queues();
            resume_all_holds(now_ms(CLOCK_MONOTONIC));
            write_dirty();
        }
        if (is_sync)
            ask_for_flush();
    }
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"store", required_argument, NULL, 's'},
        {"port", required_argument, NULL, 'p'},
        {"sync", no_argument, NULL, 'y'},
        {0}
    };
    int port = 0;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (option == 's')
            store_folder = optarg;
        else if (option == 'p')
            port = atoi(optarg);
        else if (option == 'y')
            is_sync = true;
        else
            return 2;
    }
    if (!store_folder) {
        fputs("limit_server: --store DIR is needed\n", stderr);
        return 2;
    }
    make_crc_tables();
    topics = calloc(topic_slots, sizeof *topics);
    commit_log = map_new_file(store_folder, "commitlog", LOG_BYTES);
    units = map_new_file(store_folder, "units", MOST_SEGMENTS * SEGMENT_BYTES);
    open_index();

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr = {htonl(INADDR_LOOPBACK)},
                                  .sin_port = htons((uint16_t)port)};
    socklen_t size = sizeof address;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, size) < 0 || listen(listener, 4096) < 0 ||
        getsockname(listener, (struct sockaddr *)&address, &size) < 0)
        die("listen");
    memcpy(store_host, &address.sin_addr, 4);
    put32(store_host + 4, ntohs(address.sin_port));

    poller = epoll_create1(EPOLL_CLOEXEC);
    flush_event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event event = {EPOLLIN, {.fd = listener}};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = flush_event;
    epoll_ctl(poller, EPOLL_CTL_ADD, flush_event, &event);
    pthread_t thread;
    pthread_create(&thread, NULL, flush_by_time, NULL);
    if (is_sync)
        pthread_create(&thread, NULL, flush_on_demand, NULL);
    printf("ready broker=127.0.0.1:%d\n", ntohs(address.sin_port));
    fflush(stdout);
    serve(listener);
}
