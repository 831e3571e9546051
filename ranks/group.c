#define _GNU_SOURCE // accept4

#include "group.h"
#include "../base/siphash.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum {
    HOST = 64,            // characters of a machine's name
    GUESTS = 64,          // connections at a time that have not said which rank they are
    HELLO_MOST = 1 << 20, // bytes
    CALL_MOST = 1 << 26,
};

// Kinds of messages other than data on a channel, whose kind is the channel's number.
enum { KIND_BEAT = CHANNELS, KIND_BYE, KIND_LOST, KIND_HELLO = 0x4c384333 };

typedef struct {
    int32_t kind;
    uint32_t bytes;
} Header;

typedef struct Message {
    struct Message *next;
    Header head;
    char data[]; // [head.bytes]
} Message;

// The message of a meeting. A rank sends a hello, rank 0 answers, and the rank sends a second hello
// with its identity as text. When all ranks have connected, rank 0 sends each the reason why the
// meeting failed, or "". A hello contains the random number that the receiver has drawn for this
// connection, and is signed with the secret, so a recorded hello is useless on another connection.
typedef struct {
    uint64_t signature;            // of all fields after it
    uint64_t nonce[2], answers[2]; // the sender's random number; the receiver's, 0: not known yet
    int32_t rank, ranks;
    char host[HOST];
    char text[];
} Hello;

typedef struct {
    int64_t step;
    double age; // seconds since the rank began it
    int32_t doing;
    char what[44];
} Beat;

typedef struct {
    int file; // -1: none
    char host[HOST];
    uint64_t nonce[2], theirs[2]; // the random numbers of this side and of the other side
    bool known, left, closed; // the meeting is over; it has said goodbye; its connection has ended
    bool asked, broken;       // it has sent its first hello; it was closed for an invalid message
    double heard;
    Beat beat;
    Message *coming; // is being received: `got` bytes of it, counted from head
    size_t got;
    Message *first[CHANNELS];
    pthread_mutex_t sending; // held for a whole message, as several threads send
} Peer;

struct Watch {
    int rank, ranks;
    int count; // of peers: rank 0 has one for each rank (its own is unused), the others have rank 0
    char host[HOST];
    uint64_t secret[2];
    double limit, tick;
    Peer *peers;          // [count]; in a meeting rank 0's guests follow
    struct pollfd *polls; // one for each peer, and one more
    int quit;             // eventfd: tells the watchdog's thread to end
    int quit_probe;       // the same for the probe's thread
    pthread_t thread, probe_thread;
    WatchProbe *probe;
    void *argument;
    pthread_mutex_t mutex;  // protects the fields below, and the peers except `sending`
    pthread_cond_t changed; // a message or a goodbye has arrived
    // The watchdog's clock: `now` counts the seconds in which this process ran, and `read` is the
    // time of its last reading. heard, since and left are readings of it, so no age is negative.
    double now, read;
    Beat mine;
    double since; // when `mine` began
    double left;  // when a peer last said goodbye
    bool runs, leaving;
};

// Reads the watchdog's clock. The mutex is held. In a process that runs, the watchdog reads it at
// least once a tick; of a longer time, in which the process was stopped and could hear nobody, two
// ticks count.
static double read_clock(Watch *w) {
    double time = wall_seconds();
    w->now += fmin(fmax(0, time - w->read), 2 * w->tick);
    w->read = time;
    return w->now;
}

// ---- TCP ----------------------------------------------------------------------------------------

// Returns getaddrinfo's status. 0: the caller frees *found.
static int resolve(const char *host, int port, int flags, struct addrinfo **found) {
    char service[16];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    snprintf(service, sizeof(service), "%d", port);
    return getaddrinfo(host, service, &hints, found);
}

static void set_option(int file, int level, int name, int value) {
    setsockopt(file, level, name, &value, sizeof(value)); // a failure here does no harm
}

// Sets the timeout of connect and send. 0: none.
static void set_timeout(int file, double seconds) {
    long micro = (long)(1e6 * seconds);
    struct timeval time = {.tv_sec = micro / 1000000, .tv_usec = micro % 1000000};
    setsockopt(file, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
}

static bool is_loopback(const struct sockaddr *a) {
    return a->sa_family == AF_INET6
               ? IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr)
               : ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
}

// Opens a socket that listens on an address; or, for a name, on the first of its addresses that
// this machine has and that is no loopback address. -1: errno says why; EINVAL: there is no such
// address.
static int listen_on(const char *host, int port, bool name) {
    struct addrinfo *found = NULL;
    int file = -1, why = EINVAL;
    if (resolve(host, port, name ? 0 : AI_NUMERICHOST, &found) != 0) { found = NULL; }
    for (const struct addrinfo *a = found; a != NULL && file < 0 && why != EADDRINUSE;
         a = a->ai_next) {
        if (name && is_loopback(a->ai_addr)) { continue; }
        file = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        set_option(file, SOL_SOCKET, SO_REUSEADDR, 1);
        if (a->ai_family == AF_INET6) { set_option(file, IPPROTO_IPV6, IPV6_V6ONLY, 0); }
        bool ok = file >= 0 && bind(file, a->ai_addr, a->ai_addrlen) == 0 &&
                  listen(file, SOMAXCONN) == 0;
        why = errno;
        if (!ok && file >= 0) { close(file); }
        if (!ok) { file = -1; }
    }
    if (found != NULL) { freeaddrinfo(found); }
    errno = why;
    return file;
}

int group_listen(const char *host, int *port) {
    struct sockaddr_in6 address; // sockaddr_in has its port at the same place
    socklen_t length = sizeof(address);
    int file = listen_on(strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, *port, false);
    if (file < 0 && errno == EINVAL) {
        file = listen_on(host, *port, true);
        bool elsewhere = file < 0 && (errno == EINVAL || errno == EADDRNOTAVAIL);
        if (elsewhere) { file = listen_on("::", *port, false); }
        bool no_ipv6 = elsewhere && file < 0 && errno != EADDRINUSE;
        if (no_ipv6) { file = listen_on("0.0.0.0", *port, false); }
    }
    if (file >= 0 && getsockname(file, (struct sockaddr *)&address, &length) == 0) {
        *port = ntohs(address.sin6_port);
        return file;
    }
    const char *advice = strerror(errno);
    if (errno == EADDRINUSE) {
        advice = "another process has the port; set MASTER_PORT to a free one";
    } else if (errno == EADDRNOTAVAIL) {
        advice = "not an address of this machine; MASTER_ADDR must be the one rank 0 runs on";
    }
    fail("rank 0 cannot listen on %s port %d: %s", host, *port, advice);
    return -1;
}

// Tries each address of the host once. *why: why the last one failed.
static int connect_once(const char *host, int port, double until, const char **why) {
    struct addrinfo *found;
    int file = -1, status = resolve(host, port, 0, &found);
    if (status != 0) {
        *why = status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status);
        return -1;
    }
    for (const struct addrinfo *a = found; a != NULL && file < 0; a = a->ai_next) {
        file = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        set_timeout(file, fmin(fmax(until - wall_seconds(), 0.001), 10));
        if (file < 0 || connect(file, a->ai_addr, a->ai_addrlen) != 0) {
            *why = strerror(errno == EINPROGRESS ? ETIMEDOUT : errno);
            if (file >= 0) { close(file); }
            file = -1;
        }
    }
    freeaddrinfo(found);
    return file;
}

// ---- messages -----------------------------------------------------------------------------------

// wait: blocks until the peer has taken the message. Without it, the message is dropped if the peer
// takes no more; judge() notices that peer by its silence.
static void send_message(Peer *p, bool wait, int kind, const void *data, size_t size) {
    Header head = {kind, (uint32_t)size};
    size_t sent = 0, bytes = sizeof(head) + size;
    assert(size <= CALL_MOST);
    if (p->file < 0) { return; }
    if (wait) {
        pthread_mutex_lock(&p->sending);
    } else if (pthread_mutex_trylock(&p->sending) != 0) {
        return;
    }
    char *frame = malloc_or_die(bytes);
    memcpy(frame, &head, sizeof(head));
    if (size > 0) { memcpy(frame + sizeof(head), data, size); }
    while (sent < bytes) {
        int flags = MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT);
        ssize_t n = send(p->file, frame + sent, bytes - sent, flags);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { break; }
        sent += (size_t)n;
    }
    if (sent > 0 && sent < bytes) { shutdown(p->file, SHUT_WR); } // nothing may follow a part
    free(frame);
    pthread_mutex_unlock(&p->sending);
}

static void send_all(Watch *w, int kind, const void *data, size_t bytes) {
    for (int r = 0; r < w->count; r++) { send_message(&w->peers[r], false, kind, data, bytes); }
}

static uint64_t sign(const Watch *w, const Hello *h, size_t bytes) {
    return siphash(w->secret, h->nonce, bytes - offsetof(Hello, nonce));
}

static void send_hello(Watch *w, Peer *p, const char *text) {
    size_t bytes = sizeof(Hello) + strlen(text) + 1;
    Hello *h = calloc_or_die(1, bytes);
    *h = (Hello){.rank = w->rank, .ranks = w->ranks};
    memcpy(h->nonce, p->nonce, sizeof(h->nonce));
    memcpy(h->answers, p->theirs, sizeof(h->answers));
    memcpy(h->host, w->host, HOST);
    strcpy(h->text, text);
    h->signature = sign(w, h, bytes);
    send_message(p, true, KIND_HELLO, h, bytes);
    free(h);
}

// Waits until a peer or `other` can be read, or until the given time; w->polls says which. It
// releases the mutex during the wait.
static void wait_for_input(Watch *w, int peers, int other, double until) {
    for (int i = 0; i < peers; i++) {
        int file = w->peers[i].closed ? -1 : w->peers[i].file;
        w->polls[i] = (struct pollfd){.fd = file, .events = POLLIN};
    }
    w->polls[peers] = (struct pollfd){.fd = other, .events = POLLIN};
    pthread_mutex_unlock(&w->mutex);
    poll(w->polls, (nfds_t)peers + 1, (int)ceil(1e3 * fmax(0, until - wall_seconds())));
    pthread_mutex_lock(&w->mutex);
}

// Whether such a message may arrive now. Rank 0 leaves last, and it alone says which rank is lost.
static bool check_header(const Watch *w, const Peer *p, const Header *h) {
    if ((h->kind == KIND_HELLO) == p->known) { return false; }
    switch (h->kind) {
    case KIND_HELLO: return h->bytes > sizeof(Hello) && h->bytes <= HELLO_MOST;
    case KIND_BEAT: return h->bytes == sizeof(Beat);
    case KIND_BYE: return h->bytes == 0 && (w->rank == 0 || w->leaving);
    case KIND_LOST: return h->bytes > 0 && h->bytes <= sizeof(Error) && w->rank > 0;
    default: return h->kind >= 0 && h->kind < CHANNELS && h->bytes <= CALL_MOST;
    }
}

// Whether the fields are valid: texts end with a NUL, and numbers are in range.
static bool check_content(const Message *m) {
    const Beat *b = (const Beat *)m->data;
    const Hello *h = (const Hello *)m->data;
    bool ends = m->head.bytes > 0 && m->data[m->head.bytes - 1] == '\0';
    switch (m->head.kind) {
    case KIND_HELLO: return ends && h->host[HOST - 1] == '\0';
    case KIND_BEAT: return ends && b->doing >= 0 && b->doing <= DOING_PAUSE && b->age >= 0;
    case KIND_LOST: return ends;
    default: return true;
    }
}

// Returns the next complete message of a peer, which the caller frees. NULL: it has not arrived
// completely, or the connection has ended, or was ended here because the message is invalid.
static Message *read_message(const Watch *w, Peer *p) {
    while (!p->closed) {
        if (p->coming == NULL) { p->coming = calloc_or_die(1, sizeof(Message)); }
        Message *m = p->coming;
        bool header = p->got < sizeof(Header);
        size_t due = sizeof(Header) + (header ? 0 : m->head.bytes);
        ssize_t n = recv(p->file, (char *)&m->head + p->got, due - p->got, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return NULL; }
        p->closed = n <= 0;
        if (p->closed) { return NULL; }
        p->heard = w->now;
        p->got += (size_t)n;
        if (p->got < due) { continue; }
        bool whole = !header || m->head.bytes == 0;
        p->broken = (header && !check_header(w, p, &m->head)) || (whole && !check_content(m));
        p->closed = p->broken;
        if (p->broken) { return NULL; }
        if (whole) {
            p->coming = NULL;
            p->got = 0;
            return m;
        }
        p->coming = realloc_or_die(m, sizeof(Message) + m->head.bytes);
    }
    return NULL;
}

static void close_peer(Peer *p) {
    if (p->file >= 0) { close(p->file); }
    free(p->coming);
    *p = (Peer){.file = -1, .sending = PTHREAD_MUTEX_INITIALIZER};
}

// ---- the watchdog -------------------------------------------------------------------------------

// Ends this process, and on rank 0 all. The mutex is held, so that only one thread says why.
__attribute__((noreturn)) PRINTF_LIKE(2, 3) static void end_run(Watch *w, const char *format, ...) {
    Error why;
    va_list args;
    va_start(args, format);
    vsnprintf(why.text, sizeof(why.text), format, args);
    va_end(args);
    if (w->rank == 0) { send_all(w, KIND_LOST, why.text, strlen(why.text) + 1); }
    complain("%s; this rank ends at step %lld (exit status %d)", why.text, (long long)w->mine.step,
             EXIT_LOST_RANK);
    _exit(EXIT_LOST_RANK); // the main thread may hang, and exit() with it
}

// Ends the run because of a rank. reason: has a %.1f for the seconds.
__attribute__((noreturn)) static void end_for(Watch *w, int rank, const char *reason,
                                              double seconds) {
    const Peer *p = &w->peers[rank];
    char text[128];
    snprintf(text, sizeof(text), reason, seconds);
    end_run(w, "rank %d on %s %s, last heard at step %lld (%s)", rank, p->host, text,
            (long long)p->beat.step, p->beat.what);
}

void watch_lost(Watch *w, const char *fallback) {
    nanosleep(&(struct timespec){.tv_sec = 3}, NULL); // the watchdog should end the process first
    pthread_mutex_lock(&w->mutex);
    end_run(w, "%s", fallback);
}

// Reads the messages of a rank, and notices when it ends.
static void read_peer(Watch *w, int rank) {
    Peer *p = &w->peers[rank];
    for (Message *m, **last; (m = read_message(w, p)) != NULL;) {
        switch (m->head.kind) {
        case KIND_BEAT: memcpy(&p->beat, m->data, sizeof(Beat)); break;
        case KIND_BYE: p->left = true, w->left = p->heard; break;
        case KIND_LOST: end_run(w, "%s", m->data);
        default:
            for (last = &p->first[m->head.kind]; *last != NULL; last = &(*last)->next) {}
            *last = m;
            m = NULL;
        }
        free(m);
        pthread_cond_broadcast(&w->changed);
    }
    if (p->broken) { end_for(w, rank, "has sent what no rank sends", 0); }
    if (!p->closed || p->left) { return; }
    // if all ranks end with the same fault, this rank's main thread reports it in this time
    pthread_mutex_unlock(&w->mutex);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    pthread_mutex_lock(&w->mutex);
    end_for(w, rank, "has ended without a goodbye", 0);
}

// Ends the run if a rank is lost. Ranks other than 0 only watch for the silence of rank 0, with a
// little more time, so that a message of rank 0 arrives before.
static void judge(Watch *w, double now) {
    double limit = w->limit + (w->rank == 0 ? 0 : 2 * w->tick), longest = 0;
    int stuck = -1, behind = -1;
    bool all_wait = now - w->left > limit + 2 * w->tick; // they may have waited for who left
    for (int r = 0; r < w->count; r++) {
        const Peer *p = &w->peers[r];
        const Beat *b = &p->beat;
        if (p->left) { continue; }
        if (now - p->heard > limit) { end_for(w, r, "has been silent for %.1f s", now - p->heard); }
        // only a reported age counts: a rank that is not heard may do something else by now
        if (b->doing == DOING_WORK && b->age > fmax(limit, longest)) {
            stuck = r, longest = b->age;
        }
        all_wait = all_wait && b->doing == DOING_WAIT && b->age > limit + w->tick;
        if (behind < 0 || b->step < w->peers[behind].beat.step) { behind = r; }
    }
    if (w->rank != 0) { return; }
    if (stuck >= 0) { end_for(w, stuck, "has made no progress for %.1f s", longest); }
    if (!all_wait || behind < 0) { return; }
    end_for(w, behind, "waits, as all ranks do, for %.1f s: a GPU or the network hangs", limit);
}

static void *watch_thread(void *argument) {
    Watch *w = argument;
    double next = 0;
    bool quits = false;
    pthread_mutex_lock(&w->mutex);
    while (!quits) {
        double now = read_clock(w);
        if (now >= next) {
            next = now + w->tick;
            w->mine.age = now - w->since;
            if (w->rank == 0) { w->peers[0].beat = w->mine, w->peers[0].heard = now; }
            bool said = w->leaving && w->rank != 0; // a goodbye is the last message
            if (!said) { send_all(w, KIND_BEAT, &w->mine, sizeof(w->mine)); }
            judge(w, now);
        }
        wait_for_input(w, w->count, w->quit, wall_seconds() + next - now);
        for (int r = 0; r < w->count; r++) {
            if (w->polls[r].revents != 0) { read_peer(w, r); }
        }
        quits = w->polls[w->count].revents != 0;
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static void set_doing(Watch *w, Doing doing, const char *what) {
    w->mine.doing = (int32_t)doing;
    snprintf(w->mine.what, sizeof(w->mine.what), "%s", what);
    w->since = read_clock(w);
}

void watch_beat(Watch *w, int64_t step, Doing doing, const char *what) {
    if (w == NULL) { return; }
    pthread_mutex_lock(&w->mutex);
    w->mine.step = step;
    set_doing(w, doing, what);
    pthread_mutex_unlock(&w->mutex);
}

// Runs in a thread of its own, because a probe that hangs must not delay the watchdog's messages.
static void *run_probe(void *argument) {
    Watch *w = argument;
    struct pollfd quit = {.fd = w->quit_probe, .events = POLLIN};
    while (poll(&quit, 1, (int)(1e3 * w->tick)) <= 0) {
        if (w->probe(w->argument)) { continue; }
        pthread_mutex_lock(&w->mutex);
        end_run(w, "rank %d: %s", w->rank, error_text());
    }
    return NULL;
}

void watch_probe(Watch *w, WatchProbe *probe, void *argument) {
    if (w == NULL) { return; }
    if (w->probe != NULL) {
        eventfd_write(w->quit_probe, 1);
        pthread_join(w->probe_thread, NULL);
        close(w->quit_probe);
    }
    w->probe = probe;
    w->argument = argument;
    if (probe == NULL) { return; }
    w->quit_probe = eventfd(0, EFD_CLOEXEC);
    if (w->quit_probe < 0 || pthread_create(&w->probe_thread, NULL, run_probe, w) != 0) {
        die("the probe's thread cannot be started: %s", strerror(errno));
    }
}

// ---- what ranks agree on ------------------------------------------------------------------------

// Receives the next message of a rank. Meanwhile the main thread counts as waiting for that rank.
static void receive_call(const Group *g, int rank, Channel channel, void *data, size_t bytes) {
    Watch *w = g->watch;
    Message **first = &w->peers[rank].first[channel], *m;
    pthread_mutex_lock(&w->mutex);
    Beat before = w->mine;
    bool waits = *first == NULL && channel == CHANNEL_MAIN;
    if (waits) { set_doing(w, DOING_WAIT, before.what); }
    while (*first == NULL) { pthread_cond_wait(&w->changed, &w->mutex); }
    if (waits) { set_doing(w, (Doing)before.doing, before.what); }
    m = *first;
    *first = m->next;
    pthread_mutex_unlock(&w->mutex);
    if (m->head.bytes != bytes) {
        die("rank %d is at another point of the program: it sent %u bytes instead of %zu", rank,
            m->head.bytes, bytes);
    }
    memcpy(data, m->data, bytes);
    free(m);
}

void group_broadcast(const Group *g, Channel channel, void *data, size_t bytes) {
    if (g->watch == NULL) { return; }
    if (g->rank != 0) { receive_call(g, 0, channel, data, bytes); }
    for (int r = 1; g->rank == 0 && r < g->ranks; r++) {
        send_message(&g->watch->peers[r], true, (int)channel, data, bytes);
    }
}

void group_gather(const Group *g, Channel channel, const void *mine, size_t bytes, void *all) {
    if (g->watch != NULL && g->rank != 0) {
        send_message(&g->watch->peers[0], true, (int)channel, mine, bytes);
        return;
    }
    memcpy(all, mine, bytes);
    for (int r = 1; g->watch != NULL && r < g->ranks; r++) {
        receive_call(g, r, channel, (char *)all + (size_t)r * bytes, bytes);
    }
}

bool group_agree(const Group *g, Channel channel, bool ok) {
    Error verdict = {0}; // "": ok
    if (g->watch == NULL) { return ok; }
    if (!ok) {
        snprintf(verdict.text, sizeof(verdict.text), "rank %d: %.700s", g->rank, error_text());
    }
    Error *all = calloc_or_die((size_t)g->ranks, sizeof(Error));
    group_gather(g, channel, &verdict, sizeof(verdict), all);
    for (int r = g->ranks - 1; r >= 0; r--) {
        if (all[r].text[0] != '\0') { verdict = all[r]; }
    }
    free(all);
    group_broadcast(g, channel, &verdict, sizeof(verdict));
    verdict.text[sizeof(verdict.text) - 1] = '\0';
    return verdict.text[0] == '\0' || fail("%s", verdict.text);
}

// ---- the meeting --------------------------------------------------------------------------------

// Counts the ranks that have not connected, and lists them: "2, 3, 5".
static int list_missing(const Watch *w, char *text, size_t room) {
    int count = 0;
    size_t used = 0;
    for (int r = 1; r < w->ranks; r++) {
        if (w->peers[r].file >= 0) { continue; }
        if (used + 20 < room) {
            const char *format = used + 40 < room ? "%s%d" : "%s...";
            used += (size_t)snprintf(text + used, room - used, format, count > 0 ? ", " : "", r);
        }
        count++;
    }
    return count;
}

void group_draw(uint64_t number[2]) {
    size_t bytes = 2 * sizeof(*number);
    if (getrandom(number, bytes, 0) != (ssize_t)bytes) {
        die("no random numbers: %s", strerror(errno));
    }
}

static bool is_answer(const Watch *w, const Peer *p, const Message *m) {
    const Hello *h = (const Hello *)m->data;
    return h->signature == sign(w, h, m->head.bytes) &&
           memcmp(h->answers, p->nonce, sizeof(p->nonce)) == 0;
}

// Makes a guest the rank that it says it is. *differs: the first rank whose identity differs, which
// all are told when all have connected. False: the guest cannot be that rank.
static bool seat(Watch *w, Peer *guest, const Hello *h, const char *identity, Error *differs) {
    Peer *p = &w->peers[h->rank > 0 && h->rank < w->ranks ? h->rank : 0];
    size_t line = 0, at = 0;
    if (h->ranks != w->ranks || h->rank < 0 || h->rank >= w->ranks) {
        return fail("rank %d on %s was started as one of %d ranks, rank 0 as one of %d", h->rank,
                    h->host, h->ranks, w->ranks);
    }
    if (h->rank == 0 || p->file >= 0) {
        return fail("two processes say that they are rank %d: one on %s, one on %s", h->rank,
                    p->host, h->host);
    }
    p->file = guest->file;
    memcpy(p->nonce, guest->nonce, sizeof(p->nonce));
    memcpy(p->theirs, h->nonce, sizeof(p->theirs));
    memcpy(p->host, h->host, HOST);
    guest->file = -1;
    for (; h->text[at] == identity[at] && identity[at] != '\0'; at++) {
        if (identity[at] == '\n') { line = at + 1; }
    }
    if (h->text[at] != identity[at] && differs->text[0] == '\0') {
        fail("rank %d: on %s, it runs something else: '%.*s', where rank 0 has '%.*s'; all ranks "
             "need the same program and options",
             h->rank, h->host, (int)strcspn(h->text + line, "\n"), h->text + line,
             (int)strcspn(identity + line, "\n"), identity + line);
        *differs = error_kept();
    }
    return true;
}

// Reads all connections at the same time, so that a silent one delays nobody. If there are too many
// guests, the oldest connection is closed.
static bool meet_as_first(Watch *w, int listener, const char *place, const char *identity,
                          double seconds) {
    double now = wall_seconds(), until = now + seconds, tell = now + 10;
    Error verdict = {0}; // why the meeting fails; "": it does not
    int all = w->ranks + w->ranks + GUESTS, guests = 0;
    char missing[600];
    bool ok = true;
    for (int count; ok && (count = list_missing(w, missing, sizeof(missing))) > 0;) {
        const char *ranks = count > 1 ? "ranks" : "rank";
        now = wall_seconds();
        if (now >= until) {
            ok = fail("%s %s of %d did not connect to %s within %.0f s (--distributed-timeout)",
                      ranks, missing, w->ranks, place, seconds);
            break;
        }
        if (now >= tell) {
            warn("waiting at %s for %s %s of %d", place, ranks, missing, w->ranks);
            tell = now + 60;
        }
        wait_for_input(w, all, listener, fmin(until, tell));
        for (int i = 0; ok && i < all; i++) {
            Peer *p = &w->peers[i];
            Message *m = w->polls[i].revents != 0 ? read_message(w, p) : NULL;
            const Hello *h = m != NULL ? (const Hello *)m->data : NULL;
            if (h != NULL && i >= w->ranks && is_answer(w, p, m)) {
                ok = seat(w, p, h, identity, &verdict);
                if (!ok) { send_hello(w, p, error_text()); }
            } else if (h != NULL) { // each guest may send one first hello
                p->closed = i < w->ranks || p->asked;
                p->asked = true;
                memcpy(p->theirs, h->nonce, sizeof(p->theirs));
                if (!p->closed) { send_hello(w, p, ""); }
            }
            free(m);
            if (!p->closed) { continue; }
            if (i >= w->ranks) {
                warn("a connection to %s is ignored: it is not from a rank with this LLM8_SECRET",
                     place);
            }
            close_peer(p); // a rank that connected and died may connect again
        }
        int file = w->polls[all].revents != 0 ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (file >= 0) {
            Peer *guest = &w->peers[w->ranks + guests++ % (all - w->ranks)];
            close_peer(guest);
            guest->file = file;
            group_draw(guest->nonce);
            set_timeout(file, 10);
        }
    }
    if (!ok) { verdict = error_kept(); }
    for (int r = 1; r < all; r++) { // a closed connection gets no answer
        Peer *p = &w->peers[r];
        if (r < w->ranks) { send_hello(w, p, verdict.text); }
        if (r >= w->ranks) { close_peer(p); }
    }
    return verdict.text[0] == '\0' || fail("%s", verdict.text);
}

// Says hello to rank 0 over a new connection. *itself: the socket has connected to itself, which
// can happen on a port where no process listens.
static bool introduce(Watch *w, const char *host, int port, const char *identity, double patience,
                      bool *itself) {
    Peer *p = &w->peers[0];
    group_draw(p->nonce);
    send_hello(w, p, "");
    for (bool told = false;; told = true) {
        Message *m = NULL;
        while (m == NULL && !p->closed && wall_seconds() < patience) {
            wait_for_input(w, 1, -1, patience);
            errno = 0;
            m = read_message(w, p);
        }
        if (m == NULL && p->got > 0) {
            return fail("what answers at %s port %d is not rank 0 of an llm8.c run: are "
                        "MASTER_ADDR and MASTER_PORT right?",
                        host, port);
        }
        if (m == NULL) {
            const char *why = !p->closed   ? "it said nothing"
                              : errno == 0 ? "it closed the connection"
                                           : strerror(errno);
            return fail("rank 0 at %s port %d gave no answer before all ranks had come: %s", host,
                        port, why);
        }
        const Hello *h = (const Hello *)m->data;
        bool answer = is_answer(w, p, m) && h->rank == 0, last = told || !answer;
        *itself = memcmp(h->nonce, p->nonce, sizeof(p->nonce)) == 0;
        memcpy(p->theirs, h->nonce, sizeof(p->theirs));
        memcpy(p->host, h->host, HOST);
        bool welcome = h->text[0] == '\0' || fail("%s", h->text);
        free(m);
        if (!answer) {
            return fail("what answers at %s port %d has another LLM8_SECRET than this rank", host,
                        port);
        }
        if (last) { return welcome; }
        send_hello(w, p, identity);
    }
}

static bool meet_as_other(Watch *w, const char *host, int port, const char *identity,
                          double seconds) {
    const char *why = "";
    double now = wall_seconds(), until = now + seconds, tell = now + 10, pause = 0.01;
    Peer *p = &w->peers[0];
    for (;; pause = fmin(2 * pause, 0.5)) {
        p->file = connect_once(host, port, until, &why);
        now = wall_seconds();
        if (p->file >= 0) {
            bool itself = false,
                 met = introduce(w, host, port, identity, until + seconds / 8 + 5, &itself);
            if (!itself) { return met; }
            close_peer(p);
        } else if (now + pause >= until) {
            return fail("rank 0 was not reached at %s port %d within %.0f s "
                        "(--distributed-timeout): %s; are MASTER_ADDR and MASTER_PORT those of "
                        "rank 0, and does it run?",
                        host, port, seconds, why);
        } else if (now >= tell) {
            warn("waiting for rank 0 at %s port %d: %s", host, port, why);
            tell = now + 60;
        }
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * pause)}, NULL);
    }
}

bool group_open(Group *g, const char *host, int port, int listener, const uint64_t secret[2],
                const char *identity, double seconds) {
    int rank = g->rank, ranks = g->ranks;
    if (ranks == 1) { return true; }
    Watch *w = g->watch = calloc_or_die(1, sizeof(Watch));
    *w = (Watch){.rank = rank,
                 .ranks = ranks,
                 .count = rank == 0 ? ranks : 1,
                 .secret = {secret[0], secret[1]},
                 .tick = fmin(0.25, seconds / 16),
                 .mutex = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER};
    w->limit = seconds - 3 * w->tick; // so that all ranks have ended within `seconds`
    if (gethostname(w->host, HOST - 1) != 0) { strcpy(w->host, "?"); }
    size_t all = (size_t)(rank == 0 ? 2 * ranks + GUESTS : 1);
    w->peers = calloc_or_die(all, sizeof(Peer));
    w->polls = calloc_or_die(all + 1, sizeof(struct pollfd));
    for (size_t i = 0; i < all; i++) { w->peers[i].file = -1, close_peer(&w->peers[i]); }
    pthread_mutex_lock(&w->mutex);
    if (rank == 0) {
        char place[320];
        if (listener < 0) { listener = group_listen(host, &port); }
        memcpy(w->peers[0].host, w->host, HOST);
        snprintf(place, sizeof(place), "%s port %d", host, port);
        w->runs = listener >= 0 && meet_as_first(w, listener, place, identity, seconds);
        if (listener >= 0) { close(listener); }
    } else {
        w->runs = meet_as_other(w, host, port, identity, seconds);
    }
    set_doing(w, DOING_WORK, "starting");
    for (int r = 0; r < w->count; r++) {
        Peer *p = &w->peers[r];
        p->known = true;
        p->closed = p->file < 0;
        p->heard = w->now;
        p->beat = (Beat){.doing = DOING_PAUSE, .what = "starting"};
        set_timeout(p->file, 0);
        set_option(p->file, IPPROTO_TCP, TCP_NODELAY, 1); // sends small messages without delay
        set_option(p->file, SOL_SOCKET, SO_KEEPALIVE, 1);
    }
    pthread_mutex_unlock(&w->mutex);
    w->quit = eventfd(0, EFD_CLOEXEC);
    if (w->runs && pthread_create(&w->thread, NULL, watch_thread, w) != 0) {
        die("the watchdog's thread cannot be started: %s", strerror(errno));
    }
    if (w->runs) { return true; }
    group_close(g);
    return false;
}

void group_close(Group *g) {
    Watch *w = g->watch;
    if (w == NULL) { return; }
    watch_probe(w, NULL, NULL);
    if (w->runs) {
        pthread_mutex_lock(&w->mutex);
        w->leaving = true;
        set_doing(w, DOING_WAIT, "ending"); // waits for ranks that still save
        if (w->rank != 0) { send_all(w, KIND_BYE, NULL, 0); }
        for (int r = 0; r < w->count; r++) {
            Peer *p = &w->peers[r];
            while (p->file >= 0 && !p->left) { pthread_cond_wait(&w->changed, &w->mutex); }
        }
        if (w->rank == 0) { send_all(w, KIND_BYE, NULL, 0); }
        pthread_mutex_unlock(&w->mutex);
        eventfd_write(w->quit, 1);
        pthread_join(w->thread, NULL);
    }
    close(w->quit);
    for (int r = 0; r < w->count; r++) { close_peer(&w->peers[r]); }
    free(w->peers);
    free(w->polls);
    free(w);
    g->watch = NULL;
}
