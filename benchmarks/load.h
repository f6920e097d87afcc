/*
 * What the parts of the load generator share: options, connections, requests in flight, statistics.
 *
 * Owns: these types, and the line between the loop (load.c) and the protocols (load_rocketmq.c,
 * load_redis.c, load_nats.c): a protocol writes requests into a connection's output and takes
 * replies from its input; when to ask, and what a reply means for the figures, is the loop's. One
 * rule: no allocation per message; buffers grow to their size while connections warm up.
 */
#ifndef COMETMQ_BENCH_LOAD_H
#define COMETMQ_BENCH_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "histogram.h"

typedef struct {
    const char *mode, *protocol, *host;
    int port;
    uint32_t connections, window, consumers; /* consumers: connections that pull, in `mixed` */
    uint32_t body_bytes, batch, keys;
    bool is_binary, is_random;
    const char *topic;
    uint32_t topics, queues;
    double rate; /* messages per second; 0: closed loop */
    uint32_t limit;
    double warmup_s, seconds;
    uint64_t count; /* stop after so many messages; 0: when time is over */
    uint32_t most;  /* messages a pull */
    int64_t from;
    bool is_from_end, is_drain, is_long_poll;
    uint32_t held;
    const char *hold_kind, *hold_topic;
    uint32_t hold_topics, hold_queues;
} Options;

/* One queue that a connection reads, and how far it has come. */
typedef struct {
    const char *topic; /* a prefix; the number of the topic follows it */
    uint32_t topic_number, queue_id;
    int64_t next;
    char text_next[24]; /* Redis: its ids are text */
    bool is_placed;     /* next is an offset that the server named, or the one to begin with */
} Cursor;

/* One request in flight. */
typedef struct {
    uint64_t due_ns; /* latency counts from here: when it was sent or, in an open loop, was due */
    int32_t id;
    uint32_t messages, queue_id;
    Cursor *cursor;
    bool is_open;
} Slot;

enum { MOST_ERRORS = 32 };

/* The figures of one kind of traffic. */
typedef struct {
    uint64_t messages, requests, bytes, empty, wraps;
    uint64_t error_counts[MOST_ERRORS];
    int error_codes[MOST_ERRORS], error_kinds;
    Histogram latency;
} Flow;

/* Codes for what is wrong on our side of the line; the server's own codes are positive. */
enum { BAD_REPLY = -1, BAD_RECORD = -2, UNKNOWN_ID = -3, LOST_CONNECTION = -4 };

typedef struct {
    uint8_t *bytes;
    size_t begin, end, size;
} Buffer;

typedef enum { PRODUCER, CONSUMER, IDLER } Role;

typedef struct Connection {
    int fd;
    uint32_t number;
    Role role;
    Flow *flow;
    bool is_long_poll, waits_for_room, is_dirty, is_lost;
    Buffer in, out;
    Slot *slots;
    uint32_t slot_count, free_count, *free_slots;
    uint32_t *order;
    uint64_t order_begin, order_end; /* slots as they were asked, for protocols in order */
    uint32_t generation;
    Cursor *cursors, **idle; /* idle: a ring of cursors that are not being pulled */
    uint32_t cursor_count, idle_begin, idle_count;
} Connection;

typedef struct {
    const char *name;
    size_t request_bytes; /* that a request takes at most beside its bodies */
    void (*greet)(Connection *);
    void (*ask_send)(Connection *, Slot *);
    void (*ask_pull)(Connection *, Slot *);
    void (*ask_beat)(Connection *, Slot *); /* NULL: the protocol has none */
    /* One reply at `at`: bytes that it took, 0 if it is not whole yet, -1 if it makes no sense. */
    ptrdiff_t (*take)(Connection *, const uint8_t *at, size_t size);
} Protocol;

extern const Protocol rocketmq, redis, nats;

extern Options options;
extern uint64_t now_ns; /* read once per turn of the loop and after each read */
extern uint64_t run_id; /* marks the bodies of this run */
extern uint64_t message_sequence;

/* From load.c, for the protocols. */
uint8_t *room(Buffer *buffer, size_t more);
uint8_t *put_body(uint8_t *at, uint64_t due_ns);
void note_body(Connection *connection, const uint8_t *body, size_t size);
void next_target(uint32_t *topic, uint32_t *queue_id);
void count_error(Flow *flow, int code);
Slot *slot_by_id(Connection *connection, int64_t id);
Slot *oldest_slot(Connection *connection);
void sent(Connection *connection, Slot *slot, int code);
/* A pull's answer. `messages` 0 and code 0: nothing there; `next`: offset to go on from, -1: as is.
 */
void pulled(Connection *connection, Slot *slot, int code, uint32_t messages, int64_t next);
void beaten(Connection *connection, Slot *slot, int code);

#endif
