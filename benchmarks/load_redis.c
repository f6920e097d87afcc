/*
 * Redis Streams for the load generator: XADD as the send, XREAD COUNT n as the pull.
 *
 * Owns: RESP, as far as these two need it. One rule: a queue is a stream of its own, and the cost
 * of a message on the wire is not made smaller or larger than a client library would make it.
 */
#include "load.h"
#include "remoting.h"

static uint8_t *put_bulk_head(uint8_t *at, size_t size) {
    *at++ = '$';
    return PUT_TEXT(put_decimal(at, size), "\r\n");
}

static uint8_t *put_stream(uint8_t *at, const char *topic, uint32_t number, uint32_t queue_id) {
    uint8_t name[256], *end = name;
    while (*topic)
        *end++ = (uint8_t)*topic++;
    end = put_decimal(end, number);
    *end++ = '-';
    end = put_decimal(end, queue_id);
    size_t size = (size_t)(end - name);
    return PUT_TEXT(put_bytes(put_bulk_head(at, size), name, size), "\r\n");
}

static void ask_send(Connection *connection, Slot *slot) {
    uint32_t topic;
    next_target(&topic, &slot->queue_id);
    uint8_t *begin = room(&connection->out, redis.request_bytes + options.body_bytes);
    uint8_t *at = PUT_TEXT(begin, "*5\r\n$4\r\nXADD\r\n");
    at = put_stream(at, options.topic, topic, slot->queue_id);
    at = PUT_TEXT(at, "$1\r\n*\r\n$1\r\nb\r\n");
    at = put_body(put_bulk_head(at, options.body_bytes), slot->due_ns);
    at = PUT_TEXT(at, "\r\n");
    slot->messages = 1;
    connection->out.end += (size_t)(at - begin);
}

static void ask_pull(Connection *connection, Slot *slot) {
    const Cursor *cursor = slot->cursor;
    const char *next = cursor->text_next[0] ? cursor->text_next : "0";
    uint8_t count[20];
    size_t count_size = (size_t)(put_decimal(count, options.most) - count);
    uint8_t *begin = room(&connection->out, redis.request_bytes);
    uint8_t *at = PUT_TEXT(begin, "*6\r\n$5\r\nXREAD\r\n$5\r\nCOUNT\r\n");
    at = PUT_TEXT(put_bytes(put_bulk_head(at, count_size), count, count_size), "\r\n");
    at = PUT_TEXT(at, "$7\r\nSTREAMS\r\n");
    at = put_stream(at, cursor->topic, cursor->topic_number, cursor->queue_id);
    at = PUT_TEXT(put_bytes(put_bulk_head(at, strlen(next)), next, strlen(next)), "\r\n");
    connection->out.end += (size_t)(at - begin);
}

/* A value's first line: its kind, its number, and where the line ends; NULL if it is not whole. */
static const uint8_t *read_line(const uint8_t *at, const uint8_t *end, char *kind,
                                int64_t *number) {
    const uint8_t *stop = at < end ? memchr(at, '\n', (size_t)(end - at)) : NULL;
    if (!stop)
        return NULL;
    *kind = (char)*at;
    *number = text_number((Text){at + 1, (size_t)(stop - at - 1)});
    return stop + 1;
}

static const uint8_t *read_bulk(const uint8_t *at, const uint8_t *end, Text *text) {
    char kind;
    int64_t size;
    at = read_line(at, end, &kind, &size);
    if (!at || kind != '$' || size < 0 || end - at < size + 2)
        return NULL;
    *text = (Text){at, (size_t)size};
    return at + size + 2;
}

/* [[stream, [[id, [field, body]], ...]]]; NULL if it is not whole yet. */
static const uint8_t *read_entries(Connection *connection, const uint8_t *at, const uint8_t *end,
                                   uint32_t *messages, Text *last_id) {
    char kind;
    int64_t count;
    Text text;
    if (!(at = read_line(at, end, &kind, &count)) || !(at = read_bulk(at, end, &text)) ||
        !(at = read_line(at, end, &kind, &count)))
        return NULL;
    for (int64_t one = 0; one < count; one++) {
        int64_t parts;
        if (!(at = read_line(at, end, &kind, &parts)) || !(at = read_bulk(at, end, last_id)) ||
            !(at = read_line(at, end, &kind, &parts)) || !(at = read_bulk(at, end, &text)) ||
            !(at = read_bulk(at, end, &text)))
            return NULL;
        connection->flow->bytes += text.size;
    }
    *messages = (uint32_t)count;
    return at;
}

static ptrdiff_t take(Connection *connection, const uint8_t *at, size_t size) {
    const uint8_t *end = at + size;
    char kind;
    int64_t number;
    const uint8_t *next = read_line(at, end, &kind, &number);
    if (!next)
        return 0;
    Slot *slot = oldest_slot(connection);
    if (!slot)
        return -1;
    if (kind == '-') {
        if (connection->role == PRODUCER)
            sent(connection, slot, 1);
        else
            pulled(connection, slot, 1, 0, -1);
        return next - at;
    }
    if (connection->role == PRODUCER) {
        Text id;
        if (kind != '$' || number <= 0)
            return -1;
        if (!(next = read_bulk(at, end, &id)))
            return 0;
        sent(connection, slot, 0);
        return next - at;
    }
    if (kind != '*')
        return -1;
    uint32_t messages = 0;
    if (number > 0) { /* else: nothing new */
        Text last_id;
        uint64_t bytes_before = connection->flow->bytes;
        if (!(next = read_entries(connection, next, end, &messages, &last_id))) {
            connection->flow->bytes = bytes_before;
            return 0;
        }
        if (last_id.size >= sizeof slot->cursor->text_next)
            return -1;
        memcpy(slot->cursor->text_next, last_id.at, last_id.size);
        slot->cursor->text_next[last_id.size] = 0;
    }
    pulled(connection, slot, 0, messages, -1);
    return next - at;
}

static void greet(Connection *connection) {
    (void)connection;
}

const Protocol redis = {"redis", 1024, greet, ask_send, ask_pull, NULL, take};
