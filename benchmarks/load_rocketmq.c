/*
 * RocketMQ's remoting protocol for the load generator: the frames that a Java client sends.
 *
 * Owns: SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320), PULL_MESSAGE (11) and HEART_BEAT (34),
 * with JSON or binary headers, and the check of their replies. One rule: every reply is parsed in
 * full and every pulled record is walked, so that a server can't win by answering wrongly.
 */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "load.h"
#include "remoting.h"

enum { JAVA_VERSION = 409, SUSPEND_MS = 15000 }; /* 4.9.8 */
#define GROUP "bench_group"

/* ------------------------------------------------------------------------------------ requests */

static uint64_t wall_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME_COARSE, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

static uint8_t *put_topic(uint8_t *at, const char *prefix, uint32_t number) {
    while (*prefix)
        *at++ = (uint8_t)*prefix++;
    return put_decimal(at, number);
}

/* As Java's client makes it: 16 bytes in hex, of which the last ones count. */
static uint8_t *put_unique_key(uint8_t *at, uint64_t sequence) {
    at = put_hex(PUT_TEXT(at, "7F000001"), (uint64_t)getpid(), 4);
    return put_hex(put_hex(at, run_id, 8), sequence, 12);
}

/* In the order in which Java's HashMap yields these names. */
static uint8_t *put_message_properties(uint8_t *at, uint64_t sequence, bool is_json) {
#define NAME_END (is_json ? PUT_TEXT(at, "\\u0001") : PUT_TEXT(at, "\1"))
#define VALUE_END (is_json ? PUT_TEXT(at, "\\u0002") : PUT_TEXT(at, "\2"))
    if (options.keys) {
        at = PUT_TEXT(at, "KEYS");
        at = NAME_END;
        for (uint32_t key = 0; key < options.keys; key++) {
            if (key)
                *at++ = ' ';
            at = put_decimal(PUT_TEXT(at, "order-"), sequence * options.keys + key);
        }
        at = VALUE_END;
    }
    at = PUT_TEXT(at, "UNIQ_KEY");
    at = NAME_END;
    at = put_unique_key(at, sequence);
    at = VALUE_END;
    at = PUT_TEXT(at, "WAIT");
    at = NAME_END;
    at = PUT_TEXT(at, "true");
    at = VALUE_END;
    at = PUT_TEXT(at, "TAGS");
    at = NAME_END;
    at = PUT_TEXT(at, "TagA");
    return VALUE_END;
#undef NAME_END
#undef VALUE_END
}

/* A field of a binary map whose value is written first and measured afterwards. */
static inline uint8_t *open_value(uint8_t *at, const char *name, size_t name_size) {
    return put_bytes(put16(at, (uint16_t)name_size), name, name_size) + 4;
}
#define OPEN_VALUE(at, name) open_value(at, name, sizeof(name) - 1)

static inline uint8_t *close_value(uint8_t *value, uint8_t *end) {
    put32(value - 4, (uint32_t)(end - value));
    return end;
}
#define BINARY_FIELD(at, name, literal)                                                            \
    (value = OPEN_VALUE(at, name), close_value(value, PUT_TEXT(value, literal)))
#define BINARY_NUMBER(at, name, number)                                                            \
    (value = OPEN_VALUE(at, name), close_value(value, put_decimal(value, number)))

static uint8_t *begin_binary(uint8_t *at, int code, int32_t id) {
    at = put16(at, (uint16_t)code);
    *at++ = 0; /* JAVA */
    at = put32(put16(at, JAVA_VERSION), (uint32_t)id);
    return put32(put32(at, 0), 0) + 4; /* flag, no remark; then the map, whose size comes later */
}

static uint8_t *begin_json(uint8_t *at, int code) {
    return PUT_TEXT(put_decimal(PUT_TEXT(at, "{\"code\":"), (uint64_t)code), ",\"extFields\":{");
}

static uint8_t *end_json(uint8_t *at, int32_t id) {
    at = PUT_TEXT(at, "},\"flag\":0,\"language\":\"JAVA\",\"opaque\":");
    at = put_decimal(at, (uint64_t)id);
    at = PUT_TEXT(at, ",\"serializeTypeCurrentRPC\":\"JSON\",\"version\":");
    return PUT_TEXT(put_decimal(at, JAVA_VERSION), "}");
}

static uint8_t *end_header(uint8_t *frame, uint8_t *at) {
    uint8_t *header = frame + FRAME_HEAD_BYTES;
    if (options.is_binary) {
        uint8_t *map = header + BINARY_FIXED_BYTES;
        put32(map, (uint32_t)(at - map - 4));
    }
    put32(frame + 4, (uint32_t)options.is_binary << 24 | (uint32_t)(at - header));
    return at;
}

static void end_frame(Connection *connection, uint8_t *frame, uint8_t *at) {
    put32(frame, (uint32_t)(at - frame - 4));
    connection->out.end += (size_t)(at - frame);
}

static uint8_t *put_json_send(uint8_t *at, const Slot *slot, uint32_t topic, uint64_t sequence) {
    bool is_batch = options.batch > 1;
    at = begin_json(at, is_batch ? SEND_BATCH_MESSAGE : SEND_MESSAGE_V2);
    at = put_topic(PUT_TEXT(at, "\"a\":\"" GROUP "\",\"b\":\""), options.topic, topic);
    at = PUT_TEXT(at, "\",\"c\":\"TBW102\",\"d\":\"4\",\"e\":\"");
    at = put_decimal(at, slot->queue_id);
    at = put_decimal(PUT_TEXT(at, "\",\"f\":\"0\",\"g\":\""), wall_ms());
    at = PUT_TEXT(at, "\",\"h\":\"0\",\"i\":\"");
    at = put_message_properties(at, sequence, true);
    at = PUT_TEXT(at, "\",\"j\":\"0\",\"k\":\"false\",\"m\":\"");
    at = is_batch ? PUT_TEXT(at, "true\"") : PUT_TEXT(at, "false\"");
    return end_json(at, slot->id);
}

static uint8_t *put_binary_send(uint8_t *at, const Slot *slot, uint32_t topic, uint64_t sequence) {
    bool is_batch = options.batch > 1;
    uint8_t *value;
    at = begin_binary(at, is_batch ? SEND_BATCH_MESSAGE : SEND_MESSAGE_V2, slot->id);
    at = BINARY_FIELD(at, "a", GROUP);
    value = OPEN_VALUE(at, "b");
    at = close_value(value, put_topic(value, options.topic, topic));
    at = BINARY_FIELD(at, "c", "TBW102");
    at = BINARY_FIELD(at, "d", "4");
    at = BINARY_NUMBER(at, "e", slot->queue_id);
    at = BINARY_FIELD(at, "f", "0");
    at = BINARY_NUMBER(at, "g", wall_ms());
    at = BINARY_FIELD(at, "h", "0");
    value = OPEN_VALUE(at, "i");
    at = close_value(value, put_message_properties(value, sequence, false));
    at = BINARY_FIELD(at, "j", "0");
    at = BINARY_FIELD(at, "k", "false");
    return is_batch ? BINARY_FIELD(at, "m", "true") : BINARY_FIELD(at, "m", "false");
}

static uint8_t *put_batch_entry(uint8_t *at, const Slot *slot) {
    uint8_t *entry = at;
    at = put32(put32(put32(at + 4, 0), 0), 0); /* magic, CRC, flag: the broker makes its own */
    at = put_body(put32(at, options.body_bytes), slot->due_ns);
    uint8_t *properties = at + 2;
    at = put_message_properties(properties, message_sequence - 1, false);
    put16(properties - 2, (uint16_t)(at - properties));
    put32(entry, (uint32_t)(at - entry));
    return at;
}

static void ask_send(Connection *connection, Slot *slot) {
    uint32_t topic;
    next_target(&topic, &slot->queue_id);
    size_t entry_most = 512 + 32 * (size_t)options.keys + options.body_bytes;
    uint8_t *frame = room(&connection->out, rocketmq.request_bytes + options.batch * entry_most);
    uint8_t *at = frame + FRAME_HEAD_BYTES;
    at = options.is_binary ? put_binary_send(at, slot, topic, message_sequence)
                           : put_json_send(at, slot, topic, message_sequence);
    at = end_header(frame, at);
    if (options.batch > 1)
        for (uint32_t one = 0; one < options.batch; one++)
            at = put_batch_entry(at, slot);
    else
        at = put_body(at, slot->due_ns);
    slot->messages = options.batch;
    end_frame(connection, frame, at);
}

static void ask_pull(Connection *connection, Slot *slot) {
    const Cursor *cursor = slot->cursor;
    uint8_t *frame = room(&connection->out, rocketmq.request_bytes), *value;
    uint8_t *at = frame + FRAME_HEAD_BYTES;
    uint64_t flags = PULL_HAS_SUBSCRIPTION | (connection->is_long_poll ? PULL_MAY_SUSPEND : 0);
    uint64_t suspend_ms = connection->is_long_poll ? SUSPEND_MS : 0;
    if (options.is_binary) {
        at = begin_binary(at, PULL_MESSAGE, slot->id);
        at = BINARY_FIELD(at, "consumerGroup", GROUP);
        value = OPEN_VALUE(at, "topic");
        at = close_value(value, put_topic(value, cursor->topic, cursor->topic_number));
        at = BINARY_NUMBER(at, "queueId", cursor->queue_id);
        at = BINARY_NUMBER(at, "queueOffset", (uint64_t)cursor->next);
        at = BINARY_NUMBER(at, "maxMsgNums", options.most);
        at = BINARY_NUMBER(at, "sysFlag", flags);
        at = BINARY_FIELD(at, "commitOffset", "0");
        at = BINARY_NUMBER(at, "suspendTimeoutMillis", suspend_ms);
        at = BINARY_FIELD(at, "subscription", "*");
        at = BINARY_FIELD(at, "subVersion", "0");
        at = BINARY_FIELD(at, "expressionType", "TAG");
    } else {
        at =
            put_decimal(PUT_TEXT(begin_json(at, PULL_MESSAGE), "\"queueId\":\""), cursor->queue_id);
        at = put_decimal(PUT_TEXT(at, "\",\"maxMsgNums\":\""), options.most);
        at = put_decimal(PUT_TEXT(at, "\",\"sysFlag\":\""), flags);
        at = put_decimal(PUT_TEXT(at, "\",\"queueOffset\":\""), (uint64_t)cursor->next);
        at = PUT_TEXT(at, "\",\"commitOffset\":\"0\",\"topic\":\"");
        at = put_topic(at, cursor->topic, cursor->topic_number);
        at = put_decimal(PUT_TEXT(at, "\",\"suspendTimeoutMillis\":\""), suspend_ms);
        at = PUT_TEXT(at,
                      "\",\"subscription\":\"*\",\"subVersion\":\"0\",\"expressionType\":\"TAG\","
                      "\"consumerGroup\":\"" GROUP "\"");
        at = end_json(at, slot->id);
    }
    end_frame(connection, frame, end_header(frame, at));
}

/* The heartbeat of a client that only produces, under a name of its own. */
static void ask_beat(Connection *connection, Slot *slot) {
    uint8_t *frame = room(&connection->out, rocketmq.request_bytes);
    uint8_t *at = frame + FRAME_HEAD_BYTES;
    at = options.is_binary ? begin_binary(at, HEART_BEAT, slot->id)
                           : end_json(begin_json(at, HEART_BEAT), slot->id);
    at = end_header(frame, at);
    at = put_decimal(PUT_TEXT(at, "{\"clientID\":\"127.0.0.1@bench"), connection->number);
    at = PUT_TEXT(at,
                  "\",\"consumerDataSet\":[],\"producerDataSet\":[{\"groupName\":\"" GROUP "\"}]}");
    end_frame(connection, frame, at);
}

/* ------------------------------------------------------------------------------------- replies */

/* Walks the records of a pull's body; -1 if they are not what was asked for. */
static int64_t walk_records(Connection *connection, const Cursor *cursor, Text body) {
    int64_t count = 0;
    for (const uint8_t *at = body.at, *end = at + body.size; at < end; count++) {
        size_t left = (size_t)(end - at);
        if (left < RECORD_LEAST_BYTES)
            return -1;
        size_t size = get32(at + RECORD_SIZE), body_size = get32(at + RECORD_BODY_SIZE);
        if (size > left || size < RECORD_LEAST_BYTES || body_size > size - RECORD_LEAST_BYTES ||
            get32(at + RECORD_MAGIC) != RECORD_MAGIC_V1 ||
            get32(at + RECORD_QUEUE_ID) != cursor->queue_id ||
            (int64_t)get64(at + RECORD_QUEUE_OFFSET) != cursor->next + count)
            return -1;
        note_body(connection, at + RECORD_BODY, body_size);
        at += size;
    }
    return count;
}

typedef struct {
    int64_t code, id, flag, next, queue_id, queue_offset;
    size_t message_id_size;
} Answer;

static bool parse_answer(const uint8_t *header, size_t size, int serialization, Answer *answer) {
    HeaderStart start = {0};
    HeaderScan scan =
        serialization == JSON_HEADER ? scan_json(header, size) : scan_binary(header, size, &start);
    *answer = (Answer){start.code, start.opaque, start.flag, -1, -1, -1, 0};
    Text name, value;
    while (next_member(&scan, &name, &value)) {
        if (TEXT_IS(name, "code"))
            answer->code = text_number(value);
        else if (TEXT_IS(name, "opaque"))
            answer->id = text_number(value);
        else if (TEXT_IS(name, "flag"))
            answer->flag = text_number(value);
        else if (TEXT_IS(name, "queueId"))
            answer->queue_id = text_number(value);
        else if (TEXT_IS(name, "queueOffset"))
            answer->queue_offset = text_number(value);
        else if (TEXT_IS(name, "msgId"))
            answer->message_id_size = value.size;
        else if (TEXT_IS(name, "nextBeginOffset"))
            answer->next = text_number(value);
    }
    return !scan.is_broken;
}

static void take_pull(Connection *connection, Slot *slot, const Answer *answer, Text body) {
    int code = (int)answer->code;
    int64_t messages = 0;
    if (code == SUCCESS) {
        messages = walk_records(connection, slot->cursor, body);
        if (messages <= 0 || answer->next < slot->cursor->next + messages) {
            code = BAD_RECORD;
            messages = 0;
        }
        connection->flow->bytes += body.size;
    } else if (answer->next < 0) {
        code = code == PULL_NOT_FOUND || code == PULL_RETRY_IMMEDIATELY ? BAD_REPLY : code;
    } else if (code == PULL_NOT_FOUND || code == PULL_RETRY_IMMEDIATELY) {
        code = SUCCESS;
    } else if (code == PULL_OFFSET_MOVED && !slot->cursor->is_placed) {
        code = SUCCESS;
    }
    pulled(connection, slot, code, (uint32_t)messages, answer->next);
}

static ptrdiff_t take(Connection *connection, const uint8_t *at, size_t size) {
    if (size < FRAME_HEAD_BYTES)
        return 0;
    size_t frame_size = (size_t)get32(at) + 4;
    if (frame_size < FRAME_HEAD_BYTES || frame_size > 64u << 20)
        return -1;
    if (size < frame_size) {
        room(&connection->in, frame_size - size);
        return 0;
    }
    uint32_t mark = get32(at + 4);
    size_t header_size = mark & 0xFFFFFF;
    Answer answer;
    if (header_size > frame_size - FRAME_HEAD_BYTES ||
        !parse_answer(at + FRAME_HEAD_BYTES, header_size, (int)(mark >> 24), &answer))
        return -1;
    if (!(answer.flag & FLAG_RESPONSE)) /* the broker asks us something; nobody here answers */
        return (ptrdiff_t)frame_size;
    Slot *slot = slot_by_id(connection, answer.id);
    if (!slot) {
        count_error(connection->flow, UNKNOWN_ID);
    } else if (connection->role == PRODUCER) {
        int code = (int)answer.code;
        bool is_whole = answer.queue_id == slot->queue_id && answer.queue_offset >= 0 &&
                        answer.message_id_size == 33 * (size_t)slot->messages - 1;
        sent(connection, slot, code == SUCCESS && !is_whole ? BAD_REPLY : code);
    } else if (connection->role == CONSUMER) {
        Text body = {at + FRAME_HEAD_BYTES + header_size,
                     frame_size - FRAME_HEAD_BYTES - header_size};
        take_pull(connection, slot, &answer, body);
    } else {
        beaten(connection, slot, (int)answer.code);
    }
    return (ptrdiff_t)frame_size;
}

static void greet(Connection *connection) {
    (void)connection;
}

const Protocol rocketmq = {"rocketmq", 2048, greet, ask_send, ask_pull, ask_beat, take};
