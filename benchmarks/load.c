/*
 * The load generator: many connections on one thread, and honest figures.
 *
 * Owns: the loop, when to ask, the clock, and what is counted. Sends and pulls run in a closed loop
 * (a window of requests is kept in flight on each connection), or sends run in an open loop: by a
 * fixed timetable, whatever the replies do, with latency counted from the time a send was due and
 * not from when it got out (no coordinated omission). One rule: nothing is counted but what was
 * answered rightly; all else shows up under errors, unanswered or undelivered.
 *
 *     load send  --address HOST:PORT --connections 16 --window 16 --body 128 --seconds 3
 *     load send  ... --rate 50000                     the same sends, open loop
 *     load send  ... --batch 64 --count 5000000       build a backlog
 *     load pull  ... --most 32 [--drain]              queue after queue, from the start on
 *     load mixed ... --consumers 4                    sends, and consumers at the queues' ends
 *     ... --hold 1000 --hold-kind idle|heartbeat|pull   the same beside quiet connections
 *     --protocol redis|nats: XADD and XREAD, or JetStream publishes and fetches
 *
 * Prints one line of JSON. Server CPU time is read from the clocks of the processes given by
 * --watch, exactly over the measured seconds.
 */
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000ull
#define READ_BYTES (64u << 10)
#define STAMP_BYTES 24u
#define FIRST_ID 1000000000 /* ids keep ten digits, as a long-lived client's have */
#define MOST_SLOTS (1u << 20)
#define GENERATIONS 1000u
#define BEAT_NS (30 * NS)
#define DRAIN_NS (10 * NS)
#define PLACING_NS (60 * NS)
#define MOST_WATCHED 8

Options options = {.mode = "send",
                   .protocol = "rocketmq",
                   .host = "127.0.0.1",
                   .connections = 1,
                   .window = 1,
                   .consumers = 4,
                   .body_bytes = 128,
                   .batch = 1,
                   .keys = 1,
                   .topic = "bench",
                   .topics = 1,
                   .queues = 4,
                   .limit = 65536,
                   .warmup_s = 0.5,
                   .seconds = 3,
                   .most = 32,
                   .hold_kind = "idle",
                   .hold_topic = "bench",
                   .hold_topics = 1,
                   .hold_queues = 4};
uint64_t now_ns, run_id, message_sequence;

typedef enum { PLACING, WARMING, MEASURING, DRAINING, DONE } Phase;

static const Protocol *protocol = &rocketmq;
static Phase phase = PLACING;
static Flow produced, consumed, held;
static Connection *connections, *producers;
static uint32_t connection_count, producer_count;
static int poller;
static uint64_t asked_messages, answered_messages; /* sends, over all phases */
static uint64_t delivered_messages; /* of this run, seen by consumers, over all phases */
static uint64_t unplaced, open_cursors, in_flight_sends;
static uint64_t phase_begin_ns, measure_begin_ns, measure_end_ns;
static double next_due_ns, due_step_ns;
static uint64_t limit_reached;
static bool is_limited;
static uint8_t *filler;
static int watched[MOST_WATCHED], watched_count;
static double server_cpu_s, generator_cpu_s;

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void refuse(const char *what) {
    fprintf(stderr, "load: %s\n", what);
    exit(2);
}

static void *need(size_t count, size_t size) {
    void *made = calloc(count ? count : 1, size);
    if (!made)
        die("memory");
    return made;
}

static double clock_s(clockid_t clock) {
    struct timespec time;
    if (clock_gettime(clock, &time) < 0)
        return 0;
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void read_clock(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    now_ns = (uint64_t)time.tv_sec * NS + (uint64_t)time.tv_nsec;
}

/* CPU time of the watched processes, all their threads, to the nanosecond. */
static double watched_cpu_s(void) {
    double sum = 0;
    clockid_t clock;
    for (int one = 0; one < watched_count; one++)
        if (clock_getcpuclockid(watched[one], &clock) == 0)
            sum += clock_s(clock);
    return sum;
}

/* ------------------------------------------------------------------------------------- figures */

void count_error(Flow *flow, int code) {
    int kind = 0;
    while (kind < flow->error_kinds && flow->error_codes[kind] != code)
        kind++;
    if (kind == MOST_ERRORS)
        return;
    if (kind == flow->error_kinds)
        flow->error_codes[flow->error_kinds++] = code;
    flow->error_counts[kind]++;
}

static void clear_flow(Flow *flow) { /* errors stay: those of the warm-up count too */
    flow->messages = flow->requests = flow->bytes = flow->empty = flow->wraps = 0;
    histogram_clear(&flow->latency);
}

/* -------------------------------------------------------------------------------------- bodies */

/* A body: whose run it is of, when it was due, its number, then filler. */
uint8_t *put_body(uint8_t *at, uint64_t due_ns) {
    uint64_t stamp[3] = {run_id, due_ns, message_sequence++};
    uint32_t stamped = options.body_bytes < STAMP_BYTES ? 0 : STAMP_BYTES;
    memcpy(at, stamp, stamped);
    memcpy(at + stamped, filler, options.body_bytes - stamped);
    return at + options.body_bytes;
}

/* A consumer got a body: how long was it under way? */
void note_body(Connection *connection, const uint8_t *body, size_t size) {
    uint64_t stamp[3];
    if (connection->flow != &consumed || size < STAMP_BYTES)
        return;
    memcpy(stamp, body, sizeof stamp);
    if (stamp[0] != run_id)
        return;
    delivered_messages++;
    if (phase >= MEASURING && stamp[1] >= measure_begin_ns && stamp[1] < measure_end_ns)
        histogram_add(&consumed.latency, now_ns - stamp[1]);
}

static uint64_t random_state;

static uint64_t next_random(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1Dull;
}

void next_target(uint32_t *topic, uint32_t *queue_id) {
    static uint64_t turn;
    uint64_t targets = (uint64_t)options.topics * options.queues;
    uint64_t target = options.is_random ? (next_random() >> 32) * targets >> 32 : turn++ % targets;
    *topic = (uint32_t)(target % options.topics);
    *queue_id = (uint32_t)(target / options.topics);
}

/* ----------------------------------------------------------------------------------- transport */

uint8_t *room(Buffer *buffer, size_t more) {
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
        if (!buffer->bytes)
            die("memory");
        buffer->size = size;
    }
    return buffer->bytes + buffer->end;
}

static void lose(Connection *connection) {
    count_error(connection->flow, LOST_CONNECTION);
    connection->is_lost = true;
    close(connection->fd);
}

static void wait_for_room(Connection *connection, bool waits) {
    if (connection->waits_for_room == waits)
        return;
    connection->waits_for_room = waits;
    struct epoll_event event = {EPOLLIN | (waits ? EPOLLOUT : 0), {.ptr = connection}};
    epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
}

static void write_out(Connection *connection) {
    Buffer *out = &connection->out;
    while (out->begin < out->end) {
        ssize_t wrote =
            send(connection->fd, out->bytes + out->begin, out->end - out->begin, MSG_NOSIGNAL);
        if (wrote < 0 && errno == EAGAIN) {
            wait_for_room(connection, true);
            return;
        }
        if (wrote < 0) {
            lose(connection);
            return;
        }
        out->begin += (size_t)wrote;
    }
    wait_for_room(connection, false);
}

/* -------------------------------------------------------------------------- requests in flight */

Slot *slot_by_id(Connection *connection, int64_t id) {
    uint64_t number = (uint64_t)(id - FIRST_ID) & (MOST_SLOTS - 1);
    if (id < FIRST_ID || number >= connection->slot_count)
        return NULL;
    Slot *slot = &connection->slots[number];
    return slot->is_open && slot->id == id ? slot : NULL;
}

Slot *oldest_slot(Connection *connection) {
    if (connection->order_begin == connection->order_end)
        return NULL;
    return &connection->slots[connection->order[connection->order_begin % connection->slot_count]];
}

static Slot *open_slot(Connection *connection, uint64_t due_ns) {
    uint32_t number = connection->free_slots[--connection->free_count];
    Slot *slot = &connection->slots[number];
    uint32_t generation = connection->generation++ % GENERATIONS;
    slot->id = (int32_t)(FIRST_ID + generation * MOST_SLOTS + number);
    slot->due_ns = due_ns;
    slot->messages = 0;
    slot->cursor = NULL;
    slot->is_open = true;
    connection->order[connection->order_end++ % connection->slot_count] = number;
    return slot;
}

static void close_slot(Connection *connection, Slot *slot) {
    slot->is_open = false;
    connection->order_begin++;
    connection->free_slots[connection->free_count++] = (uint32_t)(slot - connection->slots);
}

static void add_idle(Connection *connection, Cursor *cursor) {
    uint32_t at = (connection->idle_begin + connection->idle_count++) % connection->cursor_count;
    connection->idle[at] = cursor;
}

static void ask_send(Connection *connection, uint64_t due_ns) {
    protocol->ask_send(connection, open_slot(connection, due_ns));
    asked_messages += options.batch;
    in_flight_sends++;
}

static bool may_send(void) {
    return (phase == WARMING || phase == MEASURING) && options.rate == 0 &&
           (!options.count || asked_messages < options.count);
}

/* Keeps the window full: a producer's with sends, a consumer's with pulls of its idle queues. */
static void refill(Connection *connection) {
    if (connection->role == PRODUCER) {
        while (connection->free_count && may_send())
            ask_send(connection, now_ns);
    } else if (connection->role == CONSUMER && phase != DONE) {
        while (connection->free_count && connection->idle_count) {
            Slot *slot = open_slot(connection, now_ns);
            slot->cursor = connection->idle[connection->idle_begin];
            connection->idle_begin = (connection->idle_begin + 1) % connection->cursor_count;
            connection->idle_count--;
            protocol->ask_pull(connection, slot);
        }
    }
}

void sent(Connection *connection, Slot *slot, int code) {
    Flow *flow = connection->flow;
    in_flight_sends--;
    if (code != 0) {
        count_error(flow, code);
    } else {
        answered_messages += slot->messages;
        if (phase == MEASURING) {
            flow->messages += slot->messages;
            flow->requests++;
        }
        /* In an open loop each send that was due in time counts, however late its answer. */
        bool was_due = slot->due_ns >= measure_begin_ns && slot->due_ns < measure_end_ns;
        if (options.rate > 0 ? phase >= MEASURING && was_due : phase == MEASURING)
            histogram_add(&flow->latency, now_ns - slot->due_ns);
    }
    close_slot(connection, slot);
}

void pulled(Connection *connection, Slot *slot, int code, uint32_t messages, int64_t next) {
    Flow *flow = connection->flow;
    Cursor *cursor = slot->cursor;
    bool is_done = false;
    if (code != 0) {
        count_error(flow, code);
    } else {
        if (phase == MEASURING) {
            flow->messages += messages;
            flow->requests++;
            flow->empty += messages == 0;
            if (messages && !connection->is_long_poll)
                histogram_add(&flow->latency, now_ns - slot->due_ns);
        }
        if (!cursor->is_placed) {
            cursor->is_placed = true;
            unplaced--;
            cursor->next = next;
        } else if (messages == 0 && !connection->is_long_poll) {
            if (options.is_drain) {
                is_done = true;
                open_cursors--;
            } else { /* round again */
                flow->wraps++;
                cursor->next = options.from;
                cursor->text_next[0] = 0;
            }
        } else if (next >= 0) {
            cursor->next = next;
        }
    }
    close_slot(connection, slot);
    if (!is_done)
        add_idle(connection, cursor);
}

void beaten(Connection *connection, Slot *slot, int code) {
    if (code != 0)
        count_error(connection->flow, code);
    if (phase == PLACING)
        unplaced--;
    close_slot(connection, slot);
}

static void receive(Connection *connection) {
    Buffer *in = &connection->in;
    size_t left = in->size - in->end;
    uint8_t *to = room(in, left >= READ_BYTES / 2 ? 1 : READ_BYTES / 2);
    ssize_t got = recv(connection->fd, to, in->size - in->end, 0);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        lose(connection);
        return;
    }
    in->end += (size_t)got;
    read_clock();
    while (in->begin < in->end) {
        ptrdiff_t took = protocol->take(connection, in->bytes + in->begin, in->end - in->begin);
        if (took < 0) {
            count_error(connection->flow, BAD_REPLY);
            lose(connection);
            return;
        }
        if (took == 0)
            break;
        in->begin += (size_t)took;
    }
    refill(connection);
    write_out(connection);
}

/* ----------------------------------------------------------------------------------- timetable */

static Connection *next_free_producer(void) {
    static uint32_t turn;
    for (uint32_t tried = 0; tried < producer_count; tried++) {
        Connection *connection = &producers[turn++ % producer_count];
        if (connection->free_count && !connection->is_lost)
            return connection;
    }
    return NULL;
}

/* Open loop: asks for everything that is due by now. */
static void send_what_is_due(void) {
    static Connection **touched;
    uint32_t touched_count = 0;
    if (!touched)
        touched = need(producer_count, sizeof *touched);
    while (next_due_ns <= (double)now_ns && next_due_ns < (double)measure_end_ns) {
        Connection *connection = in_flight_sends < options.limit ? next_free_producer() : NULL;
        if (!connection) { /* stays due; its latency goes on counting */
            limit_reached += !is_limited;
            is_limited = true;
            break;
        }
        is_limited = false;
        ask_send(connection, (uint64_t)next_due_ns);
        next_due_ns += due_step_ns;
        if (!connection->is_dirty) {
            connection->is_dirty = true;
            touched[touched_count++] = connection;
        }
    }
    for (uint32_t one = 0; one < touched_count; one++) {
        touched[one]->is_dirty = false;
        write_out(touched[one]);
    }
}

static void beat_hearts(void) {
    static uint64_t next_ns;
    if (strcmp(options.hold_kind, "heartbeat") != 0 || now_ns < next_ns)
        return;
    next_ns = now_ns + BEAT_NS;
    for (uint32_t one = 0; one < connection_count; one++)
        if (connections[one].role == IDLER && connections[one].free_count) {
            protocol->ask_beat(&connections[one], open_slot(&connections[one], now_ns));
            write_out(&connections[one]);
        }
}

static void begin_phase(Phase next) {
    phase = next;
    phase_begin_ns = now_ns;
    if (phase == WARMING) {
        next_due_ns = (double)now_ns;
        due_step_ns = options.rate > 0 ? (double)NS * options.batch / options.rate : 0;
        /* Known from the start, so that what is due in the measured seconds is told from what
         * isn't. */
        measure_begin_ns = now_ns + (uint64_t)(options.warmup_s * (double)NS);
        measure_end_ns = measure_begin_ns + (uint64_t)(options.seconds * (double)NS);
        for (uint32_t one = 0; one < connection_count; one++) {
            if (connections[one].flow == &held)
                continue;
            refill(&connections[one]);
            write_out(&connections[one]);
        }
    } else if (phase == MEASURING) {
        clear_flow(&produced);
        clear_flow(&consumed);
        clear_flow(&held);
        limit_reached = 0;
        measure_begin_ns = now_ns;
        if (options.rate == 0)
            measure_end_ns = now_ns + (uint64_t)(options.seconds * (double)NS);
        server_cpu_s = -watched_cpu_s();
        generator_cpu_s = -clock_s(CLOCK_PROCESS_CPUTIME_ID);
    } else if (phase == DRAINING) {
        if (now_ns < measure_end_ns || options.rate == 0)
            measure_end_ns = now_ns;
        server_cpu_s += watched_cpu_s();
        generator_cpu_s += clock_s(CLOCK_PROCESS_CPUTIME_ID);
    }
}

static bool is_mode(const char *mode) {
    return strcmp(options.mode, mode) == 0;
}

static bool has_work_ended(void) {
    if (options.count && answered_messages >= options.count)
        return true;
    if (options.count && asked_messages >= options.count && in_flight_sends == 0)
        return true;
    return is_mode("pull") && options.is_drain && open_cursors == 0;
}

/* Open loop: sends that were due in the measured seconds and still wait for a place in flight. */
static uint64_t unsent(void) {
    if (options.rate == 0 || next_due_ns >= (double)measure_end_ns)
        return 0;
    return (uint64_t)(((double)measure_end_ns - next_due_ns) / due_step_ns) + 1;
}

/* Consumers that began at the end must get everything; others have a backlog before it. */
static bool must_deliver(void) {
    return is_mode("mixed") && options.is_from_end && options.body_bytes >= STAMP_BYTES;
}

static void advance_phase(void) {
    if (phase == PLACING) {
        if (unplaced == 0)
            begin_phase(WARMING);
        else if (now_ns - phase_begin_ns > PLACING_NS)
            refuse("consumers or heartbeats were not answered in 60 s");
    }
    if (phase == WARMING && now_ns >= measure_begin_ns)
        begin_phase(MEASURING);
    if (phase == MEASURING && (now_ns >= measure_end_ns || has_work_ended()))
        begin_phase(DRAINING);
    if (phase == DRAINING) {
        bool are_consumers_behind = must_deliver() && delivered_messages < answered_messages;
        bool is_over = now_ns - phase_begin_ns > DRAIN_NS;
        if (is_over || (in_flight_sends == 0 && unsent() == 0 && !are_consumers_behind))
            begin_phase(DONE);
    }
}

static bool is_anybody_left(void) {
    for (uint32_t one = 0; one < connection_count; one++)
        if (!connections[one].is_lost)
            return true;
    return false;
}

static void run(void) {
    struct epoll_event events[256];
    read_clock();
    phase_begin_ns = now_ns;
    for (uint32_t one = 0; one < connection_count; one++) { /* those that must find their place */
        Connection *connection = &connections[one];
        if (connection->role == CONSUMER && connection->cursor_count &&
            !connection->cursors[0].is_placed)
            refill(connection);
        write_out(connection);
    }
    while (phase != DONE && is_anybody_left()) {
        /* An open loop spins: the generator has a core of its own, and a sleep would come late. */
        bool is_spinning = options.rate > 0 && phase >= WARMING && (phase < DRAINING || unsent());
        int count = epoll_wait(poller, events, 256, is_spinning ? 0 : 1);
        read_clock();
        for (int one = 0; one < count; one++) {
            Connection *connection = events[one].data.ptr;
            if (connection->is_lost)
                continue;
            if (events[one].events & EPOLLOUT)
                write_out(connection);
            if (events[one].events & ~(uint32_t)EPOLLOUT && !connection->is_lost)
                receive(connection);
        }
        read_clock();
        beat_hearts();
        advance_phase();
        if (options.rate > 0 && phase >= WARMING && phase < DONE)
            send_what_is_due(); /* after the end too: what was due before it counts */
    }
}

/* --------------------------------------------------------------------------------- connections */

static void connect_to_server(Connection *connection) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port)};
    if (inet_pton(AF_INET, options.host, &address.sin_addr) != 1)
        refuse("the address must be a number like 127.0.0.1:10911");
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    connection->fd = fd;
    struct epoll_event event = {EPOLLIN, {.ptr = connection}};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0)
        die("epoll");
}

static void give_slots(Connection *connection, uint32_t count) {
    if (count > MOST_SLOTS)
        refuse("too many requests in flight on one connection");
    connection->slot_count = connection->free_count = count;
    connection->slots = need(count, sizeof *connection->slots);
    connection->free_slots = need(count, sizeof *connection->free_slots);
    connection->order = need(count, sizeof *connection->order);
    for (uint32_t slot = 0; slot < count; slot++)
        connection->free_slots[slot] = count - 1 - slot;
}

/*
 * Queues are dealt out like cards; with more connections than queues several read the same one. In
 * a pull's window there are `least` places: a connection with fewer queues reads some more than
 * once.
 */
static void give_cursors(Connection *connection, const char *topic, uint32_t topics,
                         uint32_t queues, uint32_t number, uint32_t readers, bool is_from_end,
                         uint32_t least) {
    uint64_t all = (uint64_t)topics * queues;
    uint32_t count = number < all ? (uint32_t)((all - number + readers - 1) / readers) : 1;
    if (count < least)
        count = least;
    connection->cursors = need(count, sizeof *connection->cursors);
    connection->idle = need(count, sizeof *connection->idle);
    connection->cursor_count = count;
    for (uint32_t one = 0; one < count; one++) {
        uint64_t target = (number + (uint64_t)one * readers) % all;
        Cursor *cursor = &connection->cursors[one];
        cursor->topic = topic;
        cursor->topic_number = (uint32_t)(target % topics);
        cursor->queue_id = (uint32_t)(target / topics);
        cursor->is_placed = !is_from_end;
        /* An offset beyond the end is answered with the end. */
        cursor->next = is_from_end ? INT64_MAX / 4 : options.from;
        add_idle(connection, cursor);
        unplaced += is_from_end;
        open_cursors += !is_from_end;
    }
}

static Connection *add_connection(Role role, Flow *flow) {
    Connection *connection = &connections[connection_count];
    connection->number = connection_count++;
    connection->role = role;
    connection->flow = flow;
    connect_to_server(connection);
    return connection;
}

static void open_connections(void) {
    bool is_pull = is_mode("pull"), is_mixed = is_mode("mixed");
    uint32_t consumer_count = is_pull ? options.connections : is_mixed ? options.consumers : 0;
    connections = need(options.held + options.connections + consumer_count, sizeof *connections);
    for (uint32_t one = 0; one < options.held; one++) {
        bool pulls = strcmp(options.hold_kind, "pull") == 0;
        Connection *connection = add_connection(pulls ? CONSUMER : IDLER, &held);
        if (pulls) {
            connection->is_long_poll = true;
            give_cursors(connection, options.hold_topic, options.hold_topics, options.hold_queues,
                         one, options.held, true, 1);
            give_slots(connection, connection->cursor_count);
        } else {
            give_slots(connection, 1);
            unplaced += strcmp(options.hold_kind, "heartbeat") == 0;
        }
        protocol->greet(connection);
    }
    for (uint32_t one = 0; one < consumer_count; one++) {
        Connection *connection = add_connection(CONSUMER, &consumed);
        connection->is_long_poll = is_mixed || options.is_long_poll;
        give_cursors(connection, options.topic, options.topics, options.queues, one, consumer_count,
                     options.is_from_end,
                     connection->is_long_poll || options.is_drain ? 1 : options.window);
        /* A client keeps one pull waiting on each of its queues. */
        give_slots(connection,
                   connection->is_long_poll ? connection->cursor_count : options.window);
        protocol->greet(connection);
    }
    producers = &connections[connection_count];
    if (is_pull)
        return;
    producer_count = options.connections;
    uint32_t slots = options.window;
    if (options.rate > 0 && slots < options.limit / producer_count + 1)
        slots = options.limit / producer_count + 1;
    for (uint32_t one = 0; one < producer_count; one++) {
        Connection *connection = add_connection(PRODUCER, &produced);
        give_slots(connection, slots < MOST_SLOTS ? slots : MOST_SLOTS);
        protocol->greet(connection);
    }
}

/* -------------------------------------------------------------------------------------- report */

static void print_flow(const Flow *flow, double seconds) {
    const Histogram *latency = &flow->latency;
    printf("\"messages\":%llu,\"requests\":%llu,\"rate\":%.1f", (unsigned long long)flow->messages,
           (unsigned long long)flow->requests, seconds > 0 ? (double)flow->messages / seconds : 0);
    if (latency->count)
        printf(",\"mean_us\":%.1f,\"p50_us\":%.1f,\"p99_us\":%.1f,\"p999_us\":%.1f,\"max_us\":%.1f",
               latency->sum_ns / (double)latency->count / 1e3,
               (double)histogram_ns(latency, 0.5) / 1e3, (double)histogram_ns(latency, 0.99) / 1e3,
               (double)histogram_ns(latency, 0.999) / 1e3, (double)latency->most_ns / 1e3);
    if (flow != &produced)
        printf(",\"bytes\":%llu,\"empty\":%llu,\"wraps\":%llu", (unsigned long long)flow->bytes,
               (unsigned long long)flow->empty, (unsigned long long)flow->wraps);
    printf(",\"errors\":{");
    for (int kind = 0; kind < flow->error_kinds; kind++)
        printf("%s\"%d\":%llu", kind ? "," : "", flow->error_codes[kind],
               (unsigned long long)flow->error_counts[kind]);
    printf("}");
}

static void report(void) {
    double seconds = (double)(measure_end_ns - measure_begin_ns) / 1e9;
    printf("{\"mode\":\"%s\",\"protocol\":\"%s\",\"seconds\":%.6f,", options.mode, protocol->name,
           seconds);
    print_flow(is_mode("pull") ? &consumed : &produced, seconds);
    if (is_mode("mixed")) {
        uint64_t missing = must_deliver() && delivered_messages < answered_messages
                               ? answered_messages - delivered_messages
                               : 0;
        printf(",\"undelivered\":%llu,\"consumed\":{", (unsigned long long)missing);
        print_flow(&consumed, seconds);
        printf("}");
    }
    if (options.held) {
        printf(",\"held\":{\"connections\":%u,", options.held);
        print_flow(&held, seconds);
        printf("}");
    }
    if (options.rate > 0)
        printf(",\"wanted_rate\":%.1f,\"limit_reached\":%llu", options.rate,
               (unsigned long long)limit_reached);
    printf(",\"unanswered\":%llu,\"generator_cpu_s\":%.6f",
           (unsigned long long)(in_flight_sends + unsent()), generator_cpu_s);
    if (watched_count)
        printf(",\"server_cpu_s\":%.6f", server_cpu_s);
    printf("}\n");
}

/* ------------------------------------------------------------------------------------- options */

typedef enum { IS_TEXT, IS_COUNT, IS_LARGE, IS_REAL, IS_FLAG } Kind;

static const struct {
    const char *name;
    Kind kind;
    void *to;
    uint32_t least;
} plain_options[] = {
    {"protocol",    IS_TEXT,  &options.protocol,     0},
    {"connections", IS_COUNT, &options.connections,  1},
    {"window",      IS_COUNT, &options.window,       1},
    {"consumers",   IS_COUNT, &options.consumers,    1},
    {"body",        IS_COUNT, &options.body_bytes,   1},
    {"batch",       IS_COUNT, &options.batch,        1},
    {"keys",        IS_COUNT, &options.keys,         0},
    {"binary",      IS_FLAG,  &options.is_binary,    0},
    {"random",      IS_FLAG,  &options.is_random,    0},
    {"topic",       IS_TEXT,  &options.topic,        0},
    {"topics",      IS_COUNT, &options.topics,       1},
    {"queues",      IS_COUNT, &options.queues,       1},
    {"rate",        IS_REAL,  &options.rate,         0},
    {"limit",       IS_COUNT, &options.limit,        1},
    {"warmup",      IS_REAL,  &options.warmup_s,     0},
    {"seconds",     IS_REAL,  &options.seconds,      0},
    {"count",       IS_LARGE, &options.count,        0},
    {"most",        IS_COUNT, &options.most,         1},
    {"drain",       IS_FLAG,  &options.is_drain,     0},
    {"long-poll",   IS_FLAG,  &options.is_long_poll, 0},
    {"hold",        IS_COUNT, &options.held,         0},
    {"hold-kind",   IS_TEXT,  &options.hold_kind,    0},
    {"hold-topic",  IS_TEXT,  &options.hold_topic,   0},
    {"hold-topics", IS_COUNT, &options.hold_topics,  1},
    {"hold-queues", IS_COUNT, &options.hold_queues,  1},
};

static uint64_t parse_number(const char *name, const char *text, uint64_t least, uint64_t most) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text == '-' || end == text || *end || value < least || value > most) {
        fprintf(stderr, "load: --%s: a number of at least %llu, not %s\n", name,
                (unsigned long long)least, text);
        exit(2);
    }
    return value;
}

static bool is_option(const char *name, const char *option) {
    return strcmp(name, option) == 0;
}

/* Those whose value is more than a number or a text; false if this is none of them. */
static bool parse_special(const char *name, char *value) {
    if (is_option(name, "address")) {
        char *colon = strrchr(value, ':');
        if (!colon)
            refuse("--address needs host:port");
        *colon = 0;
        options.host = value;
        options.port = (int)parse_number(name, colon + 1, 1, 65535);
    } else if (is_option(name, "from")) {
        options.is_from_end = strcmp(value, "end") == 0;
        options.from =
            options.is_from_end ? 0 : (int64_t)parse_number(name, value, 0, INT64_MAX / 4);
    } else if (is_option(name, "watch")) {
        if (watched_count == MOST_WATCHED)
            refuse("too many --watch");
        watched[watched_count++] = (int)parse_number(name, value, 1, INT32_MAX);
    } else {
        return false;
    }
    return true;
}

static void parse_option(const char *name, char *value, bool *took_value) {
    *took_value = true;
    for (size_t one = 0; one < sizeof plain_options / sizeof *plain_options; one++) {
        if (!is_option(name, plain_options[one].name))
            continue;
        void *to = plain_options[one].to;
        Kind kind = plain_options[one].kind;
        if (kind == IS_FLAG) {
            *(bool *)to = true;
            *took_value = false;
            return;
        }
        if (!value)
            break;
        if (kind == IS_TEXT)
            *(const char **)to = value;
        else if (kind == IS_COUNT)
            *(uint32_t *)to =
                (uint32_t)parse_number(name, value, plain_options[one].least, UINT32_MAX);
        else if (kind == IS_LARGE)
            *(uint64_t *)to = parse_number(name, value, 0, UINT64_MAX);
        else
            *(double *)to = strtod(value, NULL);
        return;
    }
    if (!value || !parse_special(name, value)) {
        fprintf(stderr, "load: --%s: unknown, or its value is missing\n", name);
        exit(2);
    }
}

/* The mode may stand anywhere; consumers of `mixed` begin at the end unless told otherwise. */
static void parse_options(int argc, char **argv) {
    options.mode = NULL;
    for (int at = 1; at < argc; at++)
        if (strcmp(argv[at], "mixed") == 0)
            options.is_from_end = true;
    for (int at = 1; at < argc; at++) {
        bool took_value = false;
        if (strncmp(argv[at], "--", 2) == 0)
            parse_option(argv[at] + 2, at + 1 < argc ? argv[at + 1] : NULL, &took_value);
        else
            options.mode = argv[at];
        at += took_value;
    }
}

static void check_options(void) {
    if (!options.mode || (!is_mode("send") && !is_mode("pull") && !is_mode("mixed")))
        refuse("say what to do: send, pull or mixed");
    if (options.count || options.is_drain)
        options.warmup_s = 0;
    if (strcmp(options.protocol, "redis") == 0)
        protocol = &redis;
    else if (strcmp(options.protocol, "nats") == 0)
        protocol = &nats;
    else if (strcmp(options.protocol, "rocketmq") != 0)
        refuse("unknown --protocol; known: rocketmq, redis, nats");
    if (protocol != &rocketmq && (options.batch > 1 || is_mode("mixed") || options.held))
        refuse("batches, mixed runs and held connections are for rocketmq only");
    if (protocol == &nats && is_mode("pull") && options.window > 1)
        refuse("a NATS fetch has no id in its messages: one in flight on a connection");
    if (strcmp(options.hold_kind, "idle") != 0 && strcmp(options.hold_kind, "heartbeat") != 0 &&
        strcmp(options.hold_kind, "pull") != 0)
        refuse("unknown --hold-kind; known: idle, heartbeat, pull");
    if (!options.port)
        refuse("--address is needed");
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    check_options();
    if (getrandom(&run_id, sizeof run_id, 0) < 0)
        die("random");
    random_state = run_id | 1;
    filler = need(options.body_bytes, 1);
    for (uint32_t byte = 0; byte < options.body_bytes; byte++)
        filler[byte] = (uint8_t)('a' + byte % 26);
    poller = epoll_create1(EPOLL_CLOEXEC);
    open_connections();
    run();
    report();
    return 0;
}
