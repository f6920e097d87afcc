/*
 * NATS JetStream for the load generator: a publish with an acknowledgement as the send, a fetch
 * from a pull consumer as the pull.
 *
 * Owns: the text protocol, as far as these two need it. One rule: a publish counts when JetStream
 * has acknowledged it, which says that the stream stored it. The stream (BENCH, of all subjects
 * below the topic's name) and one pull consumer a connection (reader0, reader1, ...; no
 * acknowledgements) are made by whoever runs this.
 */

#include "load.h"
#include "remoting.h"

#define STREAM "BENCH"

static uint8_t *put_inbox(uint8_t *at, const Connection *connection) {
    return put_decimal(put_hex(PUT_TEXT(at, "_INBOX."), run_id, 16), connection->number);
}

static void greet(Connection *connection) {
    uint8_t *begin = room(&connection->out, 512), *at = begin;
    at = PUT_TEXT(
        at, "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true,"
            "\"no_responders\":true,\"protocol\":1,\"lang\":\"c\",\"version\":\"1\"}\r\nSUB ");
    at = PUT_TEXT(put_inbox(at, connection), ".* 1\r\n");
    connection->out.end += (size_t)(at - begin);
}

static void ask_send(Connection *connection, Slot *slot) {
    uint32_t topic;
    next_target(&topic, &slot->queue_id);
    uint8_t *begin = room(&connection->out, nats.request_bytes + options.body_bytes);
    uint8_t *at = PUT_TEXT(begin, "PUB ");
    for (const char *letter = options.topic; *letter; letter++)
        *at++ = (uint8_t)*letter;
    *at++ = '.';
    at = put_decimal(at, topic);
    *at++ = '.';
    at = put_decimal(at, slot->queue_id);
    *at++ = ' ';
    at = put_inbox(at, connection);
    *at++ = '.';
    at = put_decimal(at, (uint64_t)slot->id);
    *at++ = ' ';
    at = PUT_TEXT(put_decimal(at, options.body_bytes), "\r\n");
    at = PUT_TEXT(put_body(at, slot->due_ns), "\r\n");
    slot->messages = 1;
    connection->out.end += (size_t)(at - begin);
}

static void ask_pull(Connection *connection, Slot *slot) {
    uint8_t ask[64], *end = PUT_TEXT(ask, "{\"batch\":");
    end = PUT_TEXT(put_decimal(end, options.most), ",\"no_wait\":true}");
    size_t size = (size_t)(end - ask);
    uint8_t *begin = room(&connection->out, nats.request_bytes);
    uint8_t *at = PUT_TEXT(begin, "PUB $JS.API.CONSUMER.MSG.NEXT." STREAM ".reader");
    at = put_decimal(at, connection->number);
    *at++ = ' ';
    at = put_inbox(at, connection);
    *at++ = '.';
    at = put_decimal(at, (uint64_t)slot->id);
    *at++ = ' ';
    at = PUT_TEXT(put_decimal(at, size), "\r\n");
    at = PUT_TEXT(put_bytes(at, ask, size), "\r\n");
    connection->out.end += (size_t)(at - begin);
}

static Text next_word(Text *line) {
    while (line->size && *line->at == ' ')
        line->at++, line->size--;
    const uint8_t *stop = memchr(line->at, ' ', line->size);
    Text word = {line->at, stop ? (size_t)(stop - line->at) : line->size};
    line->at += word.size;
    line->size -= word.size;
    return word;
}

static void take_message(Connection *connection, Text subject, bool is_status, Text payload) {
    if (connection->role == CONSUMER) {
        Slot *slot = oldest_slot(connection);
        if (!slot) {
            count_error(connection->flow, UNKNOWN_ID);
        } else if (is_status) { /* no more messages for this fetch */
            pulled(connection, slot, 0, slot->messages, -1);
        } else {
            connection->flow->bytes += payload.size;
            if (++slot->messages == options.most)
                pulled(connection, slot, 0, slot->messages, -1);
        }
        return;
    }
    const uint8_t *dot = memrchr(subject.at, '.', subject.size);
    Text number = {dot + 1, dot ? (size_t)(subject.at + subject.size - dot - 1) : 0};
    Slot *slot = dot ? slot_by_id(connection, text_number(number)) : NULL;
    if (!slot)
        count_error(connection->flow, UNKNOWN_ID);
    else
        sent(connection, slot,
             !is_status && memmem(payload.at, payload.size, "\"seq\":", 6) ? 0 : 1);
}

static ptrdiff_t take(Connection *connection, const uint8_t *at, size_t size) {
    const uint8_t *stop = memchr(at, '\n', size);
    if (!stop)
        return 0;
    size_t line_size = (size_t)(stop - at) + 1;
    Text line = {at, line_size >= 2 ? line_size - 2 : 0};
    Text kind = next_word(&line);
    bool has_headers = TEXT_IS(kind, "HMSG");
    if (TEXT_IS(kind, "MSG") || has_headers) {
        Text words[5];
        int count = 0;
        while (line.size && count < 5)
            words[count++] = next_word(&line);
        if (count < 3)
            return -1;
        size_t payload_size = (size_t)text_number(words[count - 1]);
        size_t headers_size = has_headers ? (size_t)text_number(words[count - 2]) : 0;
        if (headers_size > payload_size)
            return -1;
        if (size < line_size + payload_size + 2)
            return 0;
        Text payload = {at + line_size + headers_size, payload_size - headers_size};
        take_message(connection, words[0], has_headers && payload.size == 0, payload);
        return (ptrdiff_t)(line_size + payload_size + 2);
    }
    if (TEXT_IS(kind, "PING")) {
        PUT_TEXT(room(&connection->out, 8), "PONG\r\n");
        connection->out.end += 6;
    } else if (kind.size && *kind.at == '-') {
        count_error(connection->flow, 1);
    }
    return (ptrdiff_t)line_size;
}

const Protocol nats = {"nats", 512, greet, ask_send, ask_pull, NULL, take};
