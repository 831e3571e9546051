#define _GNU_SOURCE // accept4

#include "group.h"

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
    HOST = 64,           // most characters of a machine's name
    TEXT = 768,          // most bytes of the reason for which a meeting fails
    CALL_MOST = 1 << 26, // most bytes of a message
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

typedef struct {
    int64_t step;
    double age; // seconds since the rank began what it is doing
    int32_t doing;
    char what[44];
} Beat;

typedef struct {
    int rank, file; // file: the connection; -1: none
    char host[HOST];
    bool left, closed; // left: the peer has said goodbye; closed: its connection has ended
    bool broken;       // the connection was closed for an invalid message
    double heard;
    Beat beat;
    Message *coming; // being received: `got` bytes so far, counted from head
    size_t got;
    Message *first[CHANNELS];
    pthread_mutex_t sending; // held for a whole message, because several threads send
} Peer;

struct Watch {
    int rank, ranks;
    bool hub;  // this process is the hub
    int count; // peers: the hub has one for each rank (its own is unused); the other ranks have
               // one, the hub
    double limit, tick;
    Peer *peers;          // [count]
    struct pollfd *polls; // one for each peer, and one for `quit`
    int quit;             // eventfd by which the watchdog's thread is ended
    int quit_probe;       // eventfd by which the probe's thread is ended
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
    bool leaving;
};

// Reads the watchdog's clock. The mutex is held. In a running process the watchdog reads it at
// least once a tick. A longer time between two readings, in which the process was stopped and could
// hear nobody, counts as two ticks.
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

// Sets the timeouts of connect and send, and of recv. 0: none.
static void set_timeouts(int file, int sends, int receives) {
    struct timeval most[] = {{.tv_sec = sends}, {.tv_sec = receives}};
    setsockopt(file, SOL_SOCKET, SO_SNDTIMEO, &most[0], sizeof(most[0]));
    setsockopt(file, SOL_SOCKET, SO_RCVTIMEO, &most[1], sizeof(most[1]));
}

static void close_file(int *file) {
    if (*file >= 0) { close(*file); }
    *file = -1;
}

static bool is_loopback(const struct sockaddr *a) {
    return a->sa_family == AF_INET6
               ? IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr)
               : ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
}

// -1: errno says why.
static int listen_on(const struct sockaddr *address, socklen_t length) {
    int file = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (file < 0) { return -1; }
    set_option(file, SOL_SOCKET, SO_REUSEADDR, 1);
    if (address->sa_family == AF_INET6) { set_option(file, IPPROTO_IPV6, IPV6_V6ONLY, 0); }
    if (bind(file, address, length) == 0 && listen(file, SOMAXCONN) == 0) { return file; }
    int why = errno;
    close(file);
    errno = why;
    return -1;
}

static int listen_on_all(int port) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = six.sin6_port};
    int file = listen_on((struct sockaddr *)&six, sizeof(six));
    bool no_ipv6 = file < 0 && errno != EADDRINUSE;
    return no_ipv6 ? listen_on((struct sockaddr *)&four, sizeof(four)) : file;
}

// Whose address a host is, as this machine sees it.
typedef enum {
    ELSEWHERE, // another machine's, or no machine's
    HERE,
    LOOPBACK, // every machine's own: 127.0.0.1
} Whose;

// Listens if the address is of this machine; a loopback address only if `loopback` is set. If a
// name has several addresses, the first one that is not a loopback address counts; if all are
// loopback addresses, the socket listens on all addresses. -1: errno says why.
static int listen_here(const char *host, int port, bool loopback, Whose *whose) {
    struct addrinfo *found = NULL;
    if (strcmp(host, "localhost") == 0) { host = "127.0.0.1"; }
    bool number = resolve(host, port, AI_NUMERICHOST, &found) == 0, names_itself = false;
    if (!number && resolve(host, port, 0, &found) != 0) { found = NULL; }
    int file = -1;
    *whose = ELSEWHERE;
    for (const struct addrinfo *a = found; a != NULL && *whose == ELSEWHERE; a = a->ai_next) {
        bool own = is_loopback(a->ai_addr);
        names_itself = names_itself || (own && !number);
        if (own) { *whose = number ? LOOPBACK : ELSEWHERE; }
        if (own && (!number || !loopback)) { continue; }
        file = listen_on(a->ai_addr, a->ai_addrlen);
        bool ours = file >= 0 || errno == EADDRINUSE || errno == EACCES;
        if (ours && !own) { *whose = HERE; }
    }
    int why = errno;
    if (found != NULL) { freeaddrinfo(found); }
    errno = why;
    if (*whose != ELSEWHERE || !names_itself) { return file; }
    *whose = HERE;
    return listen_on_all(port);
}

static bool cannot_listen(const char *host, int port) {
    return fail("rank 0 cannot listen on %s port %d: %s", host, port,
                errno == EADDRINUSE ? "another process has the port; set MASTER_PORT to a free one"
                                    : strerror(errno));
}

// Rank 0's socket: it listens at the meeting place. If that may be an address of this machine that
// the machine itself does not know, it listens on all addresses. -1: errno says why.
static int listen_first(const char *host, int port, Whose *whose) {
    int file = listen_here(host, port, true, whose);
    return *whose == ELSEWHERE ? listen_on_all(port) : file;
}

int group_listen(const char *host, int *port) {
    Whose whose;
    struct sockaddr_in6 address = {0}; // sockaddr_in has its port at the same place
    socklen_t length = sizeof(address);
    int file = listen_first(host, *port, &whose);
    if (file < 0) {
        cannot_listen(host, *port);
    } else if (getsockname(file, (struct sockaddr *)&address, &length) == 0) {
        *port = ntohs(address.sin6_port);
    }
    return file;
}

// Tries each address of the host once, for two seconds. *why: why the last one failed.
static int connect_once(const char *host, int port, const char **why) {
    struct addrinfo *found;
    int file = -1, status = resolve(host, port, 0, &found);
    if (status != 0) {
        *why = status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status);
        return -1;
    }
    for (const struct addrinfo *a = found; a != NULL && file < 0; a = a->ai_next) {
        file = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        set_timeouts(file, 2, 2);
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

// flags: MSG_DONTWAIT sends only what can be sent at once. Nothing may follow an incomplete
// message, so after one the connection is closed for sending.
static void send_frame(int file, int flags, int kind, const void *data, size_t size) {
    Header head = {kind, (uint32_t)size};
    size_t sent = 0, bytes = sizeof(head) + size;
    assert(size <= CALL_MOST);
    char *frame = malloc_or_die(bytes);
    memcpy(frame, &head, sizeof(head));
    if (size > 0) { memcpy(frame + sizeof(head), data, size); }
    while (sent < bytes) {
        ssize_t n = send(file, frame + sent, bytes - sent, MSG_NOSIGNAL | flags);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { break; }
        sent += (size_t)n;
    }
    if (sent > 0 && sent < bytes) { shutdown(file, SHUT_WR); }
    free(frame);
}

// wait: blocks until the peer has taken the message. Without it, the message is dropped if the peer
// takes no more; judge() notices that peer by its silence.
static void send_message(Peer *p, bool wait, int kind, const void *data, size_t size) {
    if (p->file < 0) { return; }
    if (wait) {
        pthread_mutex_lock(&p->sending);
    } else if (pthread_mutex_trylock(&p->sending) != 0) {
        return;
    }
    send_frame(p->file, wait ? 0 : MSG_DONTWAIT, kind, data, size);
    pthread_mutex_unlock(&p->sending);
}

static void send_all(Watch *w, int kind, const void *data, size_t bytes) {
    for (int r = 0; r < w->count; r++) { send_message(&w->peers[r], false, kind, data, bytes); }
}

// Whether a message of this kind may arrive now. The hub leaves last, and only the hub says which
// rank is lost.
static bool check_header(const Watch *w, const Header *h) {
    switch (h->kind) {
    case KIND_BEAT: return h->bytes == sizeof(Beat);
    case KIND_BYE: return h->bytes == 0 && (w->hub || w->leaving);
    case KIND_LOST: return h->bytes == sizeof(Error) && !w->hub;
    default: return h->kind >= 0 && h->kind < CHANNELS && h->bytes <= CALL_MOST;
    }
}

#define ENDS(text) ((text)[sizeof(text) - 1] == '\0')

// Whether the fields are valid: texts end with a NUL, and numbers are in range.
static bool check_content(const Message *m) {
    const Beat *b = (const Beat *)m->data;
    switch (m->head.kind) {
    case KIND_BEAT: return ENDS(b->what) && b->doing >= 0 && b->doing <= DOING_PAUSE && b->age >= 0;
    case KIND_LOST: return ENDS(((const Error *)m->data)->text);
    default: return true;
    }
}

// Returns the next complete message of a peer, which the caller frees. NULL: it has not arrived
// completely, or the connection has ended, or read_message has ended it because the message is
// invalid.
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
        p->broken = (header && !check_header(w, &m->head)) || (whole && !check_content(m));
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

// ---- the watchdog -------------------------------------------------------------------------------

// Prints the reason and ends this process; on the hub, all processes. The caller holds the watch's
// mutex, so that only one thread prints a reason.
__attribute__((noreturn)) PRINTF_LIKE(2, 3) static void end_run(Watch *w, const char *format, ...) {
    Error why = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(why.text, sizeof(why.text), format, args);
    va_end(args);
    if (w->hub) { send_all(w, KIND_LOST, &why, sizeof(why)); }
    complain("%s; this rank ends at step %lld (exit status %d)", why.text, (long long)w->mine.step,
             EXIT_LOST_RANK);
    _exit(EXIT_LOST_RANK); // the main thread may hang, and exit() would hang with it
}

// Ends the run because of a rank. reason: a format, which may have a %.1f for the seconds.
__attribute__((noreturn)) static void end_for(Watch *w, const Peer *p, const char *reason,
                                              double seconds) {
    char text[128];
    snprintf(text, sizeof(text), reason, seconds);
    end_run(w, "rank %d on %s %s, last heard at step %lld (%s)", p->rank, p->host, text,
            (long long)p->beat.step, p->beat.what);
}

void watch_lost(Watch *w, const char *fallback) {
    nanosleep(&(struct timespec){.tv_sec = 3}, NULL); // the watchdog should end the process first
    pthread_mutex_lock(&w->mutex);
    end_run(w, "%s", fallback);
}

// Reads the messages of a rank, and notices when it ends.
static void read_peer(Watch *w, Peer *p) {
    for (Message *m, **last; (m = read_message(w, p)) != NULL;) {
        switch (m->head.kind) {
        case KIND_BEAT: memcpy(&p->beat, m->data, sizeof(Beat)); break;
        case KIND_BYE: p->left = true, w->left = p->heard; break;
        case KIND_LOST: end_run(w, "%s", ((const Error *)m->data)->text);
        default:
            for (last = &p->first[m->head.kind]; *last != NULL; last = &(*last)->next) {}
            *last = m;
            m = NULL;
        }
        free(m);
        pthread_cond_broadcast(&w->changed);
    }
    if (p->broken) { end_for(w, p, "has sent what no rank sends", 0); }
    if (!p->closed || p->left) { return; }
    // all ranks may be ending with the same fault: this pause lets the main thread of this rank
    // report it
    pthread_mutex_unlock(&w->mutex);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    pthread_mutex_lock(&w->mutex);
    end_for(w, p, "has ended without a goodbye", 0);
}

// Ends the run if a rank is lost. The ranks other than the hub only watch whether the hub is
// silent, with a slightly longer limit, so that the hub's message arrives first.
static void judge(Watch *w, double now) {
    double limit = w->limit + (w->hub ? 0 : 2 * w->tick), longest = 0;
    const Peer *stuck = NULL, *behind = NULL;
    // the others may have waited for a rank that has just said goodbye
    bool all_wait = now - w->left > limit + 2 * w->tick;
    for (int r = 0; r < w->count; r++) {
        const Peer *p = &w->peers[r];
        const Beat *b = &p->beat;
        if (p->left) { continue; }
        if (now - p->heard > limit) { end_for(w, p, "has been silent for %.1f s", now - p->heard); }
        // only a reported age counts: a rank that is not heard from may be doing something else by
        // now
        if (b->doing == DOING_WORK && b->age > fmax(limit, longest)) {
            stuck = p, longest = b->age;
        }
        all_wait = all_wait && b->doing == DOING_WAIT && b->age > limit + w->tick;
        if (behind == NULL || b->step < behind->beat.step) { behind = p; }
    }
    if (!w->hub) { return; }
    if (stuck != NULL) { end_for(w, stuck, "has made no progress for %.1f s", longest); }
    if (!all_wait || behind == NULL) { return; }
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
            if (w->hub) { w->peers[w->rank].beat = w->mine, w->peers[w->rank].heard = now; }
            bool said = w->leaving && !w->hub; // a goodbye is the last message
            if (!said) { send_all(w, KIND_BEAT, &w->mine, sizeof(w->mine)); }
            judge(w, now);
        }
        for (int r = 0; r < w->count; r++) {
            const Peer *p = &w->peers[r];
            w->polls[r] = (struct pollfd){.fd = p->closed ? -1 : p->file, .events = POLLIN};
        }
        w->polls[w->count] = (struct pollfd){.fd = w->quit, .events = POLLIN};
        pthread_mutex_unlock(&w->mutex);
        poll(w->polls, (nfds_t)w->count + 1, (int)ceil(1e3 * (next - now)));
        pthread_mutex_lock(&w->mutex);
        for (int r = 0; r < w->count; r++) {
            if (w->polls[r].revents != 0) { read_peer(w, &w->peers[r]); }
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

// Receives the next message of a peer. Meanwhile the main thread counts as waiting.
static void receive_call(Watch *w, int peer, Channel channel, void *data, size_t bytes) {
    Message **first = &w->peers[peer].first[channel], *m;
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
        die("rank %d is at another point of the program: it sent %u bytes instead of %zu",
            w->peers[peer].rank, m->head.bytes, bytes);
    }
    memcpy(data, m->data, bytes);
    free(m);
}

void group_broadcast(const Group *g, Channel channel, void *data, size_t bytes) {
    Watch *w = g->watch;
    if (w == NULL) { return; }
    // peers[0] is rank 0 if this rank is the hub, and else the hub
    if (g->rank != 0) { receive_call(w, 0, channel, data, bytes); }
    for (int r = w->hub ? 1 : 0; r < w->count && (w->hub || g->rank == 0); r++) {
        send_message(&w->peers[r], true, (int)channel, data, bytes);
    }
}

void group_gather(const Group *g, Channel channel, const void *mine, size_t bytes, void *all) {
    Watch *w = g->watch;
    size_t whole = (size_t)g->ranks * bytes;
    char *part = w != NULL && w->hub && g->rank != 0 ? malloc_or_die(whole) : all;
    if (w != NULL && !w->hub) { send_message(&w->peers[0], true, (int)channel, mine, bytes); }
    for (int r = 0; (w == NULL || w->hub) && r < g->ranks; r++) {
        if (r == g->rank) {
            memcpy(part + (size_t)r * bytes, mine, bytes);
        } else {
            receive_call(w, r, channel, part + (size_t)r * bytes, bytes);
        }
    }
    if (part != all) { // the hub passes the bytes on
        send_message(&w->peers[0], true, (int)channel, part, whole);
        free(part);
    }
    if (w != NULL && !w->hub && g->rank == 0) { receive_call(w, 0, channel, all, whole); }
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

// What the hub answers to a rank's hello.
typedef enum {
    HELLO,
    ANSWER_AGAIN, // another run meets here: come again later
    ANSWER_WAIT,  // wait until all ranks have come
    ANSWER_END,   // the meeting is over. text: why it failed, or ""
} Answer;

typedef struct {
    uint64_t process; // random: by it a process notices that it has connected to itself
    int32_t answer, rank, ranks;
    char host[HOST], run[RUN_NAME], secret[SECRET];
    char text[TEXT];
} Hello;

// One rank's part in a meeting.
typedef struct {
    Watch *w;
    const Group *group;
    const Meeting *meeting;
    Hello mine;
    char place[320], why[TEXT]; // where the hub is; why it cannot be reached
    int file, listener;         // the connection to the hub; this rank's listening socket; -1: none
    enum { SEEKS, WAITS, IS_HUB, HAS_MET } stage;
    Whose whose;     // whose address the meeting place has
    bool strange;    // a rank of another run has come
    double answered; // when another run last answered
    double asked;    // when `file` was opened
    int seated;      // how many ranks have connected to this hub
} Part;

static void draw(void *number, size_t bytes) {
    if (getrandom(number, bytes, 0) != (ssize_t)bytes) {
        die("no random numbers: %s", strerror(errno));
    }
}

void group_draw(Meeting *meeting) {
    uint64_t number[2];
    draw(number, sizeof(number));
    snprintf(meeting->secret, sizeof(meeting->secret), "%016lx%016lx", number[0], number[1]);
}

static const char *name_of(const char *run) {
    return *run != '\0' ? run : "a run without a number";
}

static void say(const Part *part, int file, Answer answer, const char *text) {
    Hello h = part->mine;
    h.answer = (int32_t)answer;
    if (answer != HELLO) { memset(h.secret, 0, sizeof(h.secret)); }
    snprintf(h.text, sizeof(h.text), "%s", text);
    send_frame(file, 0, KIND_HELLO, &h, sizeof(h));
}

typedef enum { HEARD, NOTHING, NOISE } Heard;

// Reads a message that has begun to arrive.
static Heard hear(int file, Hello *h) {
    Header head;
    errno = 0;
    ssize_t n = recv(file, &head, sizeof(head), MSG_WAITALL);
    if (n <= 0) { return NOTHING; }
    bool whole = n == sizeof(head) && head.kind == KIND_HELLO && head.bytes == sizeof(*h) &&
                 recv(file, h, sizeof(*h), MSG_WAITALL) == sizeof(*h);
    return whole && ENDS(h->host) && ENDS(h->run) && ENDS(h->secret) && ENDS(h->text) ? HEARD
                                                                                      : NOISE;
}

// Counts the ranks that have not come to this hub, or have died since, and lists them: "2, 3, 5".
static int list_missing(Part *part, char *text, size_t room) {
    int count = 0;
    size_t used = 0;
    for (int r = 0; r < part->w->ranks; r++) {
        int *file = &part->w->peers[r].file;
        char byte;
        bool there = *file >= 0 && recv(*file, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0;
        if (r == part->w->rank || (there && errno == EAGAIN)) { continue; }
        close_file(file);
        if (used + 20 < room) {
            const char *format = used + 40 < room ? "%s%d" : "%s...";
            used += (size_t)snprintf(text + used, room - used, format, count > 0 ? ", " : "", r);
        }
        count++;
    }
    part->seated = part->w->ranks - 1 - count;
    return count;
}

// Assigns a new connection to the rank that its hello names. False: there is no such rank, or that
// rank is connected already.
static bool seat(Part *part, int file, const Hello *h) {
    Watch *w = part->w;
    char missing[64];
    if (h->ranks != w->ranks || h->rank < 0 || h->rank >= w->ranks) {
        return fail("rank %d on %s was started as one of %d ranks, rank %d as one of %d", h->rank,
                    h->host, h->ranks, w->rank, w->ranks);
    }
    Peer *p = &w->peers[h->rank];
    // the process that connected as this rank may have died
    if (p->file >= 0) { list_missing(part, missing, sizeof(missing)); }
    if (h->rank == w->rank || p->file >= 0) {
        return fail("two processes say that they are rank %d: one on %s, one on %s", h->rank,
                    p->host, h->host);
    }
    p->file = file;
    memcpy(p->host, h->host, HOST);
    part->seated++;
    part->stage = IS_HUB;
    say(part, file, ANSWER_WAIT, "");
    return true;
}

// Answers the process that has connected. False: the meeting fails.
static bool answer_guest(Part *part, int file) {
    const char *run = part->mine.run;
    Hello h;
    bool ok = true, seated = false;
    if (part->stage == WAITS) {
        // the hub is elsewhere: the connection is closed, so that the rank looks for the hub again
    } else if (hear(file, &h) != HEARD || h.answer != HELLO) {
        warn("a connection to %s is ignored: it is not from a rank", part->place);
    } else if (h.process == part->mine.process) {
        part->stage = IS_HUB; // this rank has reached itself, by an address not known as its own
    } else if (strcmp(h.run, run) != 0) {
        say(part, file, ANSWER_AGAIN, "");
        if (!part->strange) {
            warn("rank %d of another run came to %s, and has to wait: %s, here %s", h.rank,
                 part->place, name_of(h.run), name_of(run));
        }
        part->strange = true;
    } else if (strcmp(h.secret, part->mine.secret) != 0) {
        say(part, file, ANSWER_END,
            "who listens at MASTER_ADDR and MASTER_PORT has another LLM8_SECRET than this rank");
        warn("rank %d on %s is not let in at %s: it has another LLM8_SECRET", h.rank, h.host,
             part->place);
    } else {
        ok = seated = seat(part, file, &h);
        if (!ok) { say(part, file, ANSWER_END, error_text()); }
    }
    if (!seated) { close(file); }
    return ok;
}

// Takes the hub's answer. False: the meeting has failed.
static bool take_answer(Part *part) {
    Peer *hub = &part->w->peers[0];
    Hello h = {0};
    Heard heard = hear(part->file, &h);
    const char *how = errno == 0 ? "it closed the connection" : strerror(errno);
    // a socket may connect to itself (TCP's simultaneous open) if nobody listens
    bool own = heard == HEARD && h.process == part->mine.process, waits = part->stage == WAITS;
    if (heard == NOISE || (heard == HEARD && h.answer == HELLO && !own)) {
        return fail("what answers at %s is not rank 0 of an llm8.c run: are MASTER_ADDR and "
                    "MASTER_PORT right?",
                    part->place);
    }
    if (heard == NOTHING && waits) {
        return fail("who listens at %s gave no answer before all ranks had come: %s", part->place,
                    how);
    }
    if (heard == HEARD && h.answer == ANSWER_WAIT) {
        part->stage = WAITS;
        hub->rank = h.rank;
        memcpy(hub->host, h.host, HOST);
        return true;
    }
    if (heard == HEARD && h.answer == ANSWER_END && (waits || h.text[0] != '\0')) {
        part->stage = HAS_MET;
        return h.text[0] == '\0' || fail("%s", h.text);
    }
    if (heard == HEARD && h.answer == ANSWER_AGAIN) {
        part->answered = wall_seconds();
        snprintf(part->why, sizeof(part->why), "another run meets there: %s, here %s",
                 name_of(h.run), name_of(part->mine.run));
    } else {
        snprintf(part->why, sizeof(part->why), "%s", how);
    }
    close_file(&part->file);
    return true;
}

// Becomes the hub, or says hello to it. False: the meeting fails.
static bool reach(Part *part) {
    const Meeting *m = part->meeting;
    const char *why = part->why;
    bool first = part->mine.rank == 0;
    if (first && part->listener < 0) {
        part->listener = listen_first(m->host, m->port, &part->whose);
        bool here = part->whose != ELSEWHERE, busy = errno == EADDRINUSE;
        // the port may be that of another run, whose ranks may soon have met
        bool waits = busy && wall_seconds() < part->answered + 10;
        if (part->listener < 0 && here && !waits) { return cannot_listen(m->host, m->port); }
        if (part->listener >= 0 && here) {
            part->stage = IS_HUB;
            return true;
        }
    }
    part->file = connect_once(m->host, m->port, &why);
    part->asked = wall_seconds();
    if (part->file >= 0) {
        say(part, part->file, HELLO, "");
        why = "it said nothing";
    } else if (!first && part->group->local_rank == 0) {
        // this machine's first rank is not rank 0, which is therefore on another machine
        part->listener = listen_here(m->host, m->port, false, &part->whose);
        if (part->listener >= 0) { part->stage = IS_HUB; }
    }
    if (why != part->why) { snprintf(part->why, sizeof(part->why), "%s", why); }
    return true;
}

// Returns a hint at the likely cause, for the end of an error message, or "".
static const char *hint(const Part *part) {
    if (part->whose == LOOPBACK && part->group->local_ranks != part->mine.ranks) {
        return "; each machine has that address itself: if the ranks are on several machines, set "
               "MASTER_ADDR to rank 0's";
    }
    if (part->mine.rank == 0 && part->stage == SEEKS && part->whose == ELSEWHERE) {
        return "; rank 0's machine does not have that address, and no rank on the machine that has "
               "it has come: set MASTER_ADDR to rank 0's machine";
    }
    return "";
}

// Reports which ranks are missing. fails: as the reason why the meeting fails; otherwise as a
// warning.
static bool tell(Part *part, double limit, bool fails) {
    char missing[600], within[64] = "";
    if (fails) {
        snprintf(within, sizeof(within), " within %.0f s (--distributed-timeout)", limit);
    }
    if (part->stage == IS_HUB) {
        int count = list_missing(part, missing, sizeof(missing));
        fail("%s %s of %d %s to %s%s%s", count > 1 ? "ranks" : "rank", missing, part->mine.ranks,
             fails ? "did not connect" : "must still connect", part->place, within, hint(part));
    } else if (part->stage == WAITS) {
        fail("who listens at %s gave no answer before all ranks had come: it said nothing",
             part->place);
    } else {
        fail("%s was not reached at %s%s: %s%s; are MASTER_ADDR and MASTER_PORT those of rank 0, "
             "and does it run?",
             part->mine.rank == 0 ? "another rank" : "rank 0", part->place, within, part->why,
             hint(part));
    }
    if (!fails) { warn("waiting: %s", error_text()); }
    return !fails;
}

// Meets the other ranks. It waits for all connections together, so that a silent one delays nobody;
// if too many are silent, the oldest one is closed. False: the meeting has failed.
static bool meet(Part *part, double limit) {
    enum { OWN, LISTENER, GUESTS, ALL = 64 };
    struct pollfd polls[ALL];
    const double start = wall_seconds();
    double warning = start + 2, next = start, pause = 0.01;
    int oldest = GUESTS;
    char missing[64];
    bool ok = true;
    for (int i = 0; i < ALL; i++) { polls[i] = (struct pollfd){.fd = -1, .events = POLLIN}; }
    part->answered = start;
    while (ok && part->stage != HAS_MET) {
        double now = wall_seconds();
        // a rank that waits for the hub has a longer limit, so that the hub ends first and says why
        double until = start + (part->stage == WAITS ? 1.125 * limit + 5 : limit);
        bool early = now < start + 10;
        if (part->seated == part->mine.ranks - 1 &&
            list_missing(part, missing, sizeof(missing)) == 0) {
            break;
        }
        if (now >= until) {
            ok = tell(part, limit, true);
            break;
        }
        if (now >= warning) {
            if (part->stage != WAITS && (!early || *hint(part) != '\0')) {
                tell(part, limit, false);
            }
            warning = early ? start + 10 : now + 60;
        }
        // who listens at the meeting place has not answered this rank's hello, and may be no rank:
        // closes the connection, so that this rank tries again
        if (part->stage != WAITS && now > part->asked + 2) { close_file(&part->file); }
        bool seeks = part->stage == SEEKS && part->file < 0;
        if (seeks && now >= next) {
            ok = reach(part);
            now = wall_seconds();
            next = now + pause;
            pause = fmin(2 * pause, 0.5);
        }
        polls[OWN].fd = part->file;
        polls[LISTENER].fd = part->listener;
        double again = part->stage != SEEKS ? until : part->file < 0 ? next : part->asked + 2;
        int wait = (int)ceil(1e3 * fmax(0, fmin(again, fmin(until, warning)) - now));
        if (!ok || poll(polls, ALL, wait) <= 0) { continue; }
        if (polls[OWN].revents != 0) { ok = take_answer(part); }
        for (int i = GUESTS; i < ALL && ok; i++) {
            if (polls[i].fd < 0 || polls[i].revents == 0) { continue; }
            ok = answer_guest(part, polls[i].fd);
            polls[i].fd = -1;
        }
        int file = polls[LISTENER].revents != 0 ? accept4(part->listener, NULL, NULL, SOCK_CLOEXEC)
                                                : -1;
        if (file < 0) { continue; }
        set_timeouts(file, 10, 2);
        close_file(&polls[oldest].fd);
        polls[oldest].fd = file;
        oldest = oldest + 1 < ALL ? oldest + 1 : GUESTS;
    }
    for (int i = GUESTS; i < ALL; i++) { close_file(&polls[i].fd); }
    close_file(&part->listener);
    return ok;
}

// Whether this rank runs what rank 0 runs.
static bool agree_on(const Group *g, const char *host, const char *identity) {
    uint32_t bytes = (uint32_t)strlen(identity);
    group_broadcast(g, CHANNEL_MAIN, &bytes, sizeof(bytes));
    char *of_first = calloc_or_die((size_t)bytes + 1, 1);
    if (g->rank == 0) { memcpy(of_first, identity, bytes); }
    group_broadcast(g, CHANNEL_MAIN, of_first, bytes);
    size_t line = 0, at = 0;
    for (; identity[at] == of_first[at] && identity[at] != '\0'; at++) {
        if (identity[at] == '\n') { line = at + 1; }
    }
    bool ok = identity[at] == of_first[at] ||
              fail("on %s, it runs something else: '%.*s', where rank 0 has '%.*s'; all ranks need "
                   "the same program and options",
                   host, (int)strcspn(identity + line, "\n"), identity + line,
                   (int)strcspn(of_first + line, "\n"), of_first + line);
    free(of_first);
    return group_agree(g, CHANNEL_MAIN, ok);
}

bool group_open(Group *g, const Meeting *meeting, int listener, const char *identity,
                double seconds) {
    if (g->ranks == 1) { return true; }
    Watch *w = g->watch = calloc_or_die(1, sizeof(Watch));
    *w = (Watch){.rank = g->rank,
                 .ranks = g->ranks,
                 .tick = fmin(0.25, seconds / 16),
                 .quit = -1,
                 .mutex = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER};
    w->limit = seconds - 3 * w->tick; // so that all ranks have ended within `seconds`
    w->peers = calloc_or_die((size_t)g->ranks, sizeof(Peer));
    w->polls = calloc_or_die((size_t)g->ranks + 1, sizeof(struct pollfd));
    for (int r = 0; r < g->ranks; r++) {
        w->peers[r] = (Peer){.rank = r, .file = -1, .sending = PTHREAD_MUTEX_INITIALIZER};
    }
    Part part = {w, g, meeting, {.rank = g->rank, .ranks = g->ranks}, .file = -1, .whose = HERE};
    part.listener = listener;
    part.stage = listener >= 0 ? IS_HUB : SEEKS;
    snprintf(part.place, sizeof(part.place), "%s port %d", meeting->host, meeting->port);
    draw(&part.mine.process, sizeof(part.mine.process));
    if (gethostname(part.mine.host, HOST - 1) != 0) { strcpy(part.mine.host, "?"); }
    memcpy(part.mine.run, meeting->run, sizeof(meeting->run));
    memcpy(part.mine.secret, meeting->secret, sizeof(meeting->secret));
    memcpy(w->peers[g->rank].host, part.mine.host, HOST);
    bool ok = meet(&part, seconds);
    w->hub = part.stage == IS_HUB;
    w->count = w->hub ? g->ranks : 1;
    Error verdict = {0};
    if (!ok) { verdict = error_kept(); }
    if (!w->hub) { w->peers[0].file = part.file; }
    w->read = wall_seconds();
    set_doing(w, DOING_WORK, "starting");
    for (int r = 0; r < w->count; r++) {
        Peer *p = &w->peers[r];
        if (w->hub && p->file >= 0) { say(&part, p->file, ANSWER_END, verdict.text); }
        p->closed = p->file < 0;
        p->beat = (Beat){.doing = DOING_PAUSE, .what = "starting"};
        set_timeouts(p->file, 0, 0);
        set_option(p->file, IPPROTO_TCP, TCP_NODELAY, 1); // sends small messages without delay
        set_option(p->file, SOL_SOCKET, SO_KEEPALIVE, 1);
    }
    if (ok) {
        w->quit = eventfd(0, EFD_CLOEXEC);
        if (w->quit < 0 || pthread_create(&w->thread, NULL, watch_thread, w) != 0) {
            die("the watchdog's thread cannot be started: %s", strerror(errno));
        }
        ok = agree_on(g, part.mine.host, identity);
        verdict = error_kept();
    }
    if (!ok) { group_close(g); }
    return ok || fail_again(verdict);
}

void group_close(Group *g) {
    Watch *w = g->watch;
    if (w == NULL) { return; }
    watch_probe(w, NULL, NULL);
    if (w->quit >= 0) { // the watchdog runs
        pthread_mutex_lock(&w->mutex);
        w->leaving = true;
        set_doing(w, DOING_WAIT, "ending"); // waits for ranks that still save
        if (!w->hub) { send_all(w, KIND_BYE, NULL, 0); }
        for (int r = 0; r < w->count; r++) {
            Peer *p = &w->peers[r];
            while (p->file >= 0 && !p->left) { pthread_cond_wait(&w->changed, &w->mutex); }
        }
        if (w->hub) { send_all(w, KIND_BYE, NULL, 0); }
        pthread_mutex_unlock(&w->mutex);
        eventfd_write(w->quit, 1);
        pthread_join(w->thread, NULL);
        close(w->quit);
    }
    for (int r = 0; r < w->ranks; r++) {
        close_file(&w->peers[r].file);
        free(w->peers[r].coming);
    }
    free(w->peers);
    free(w->polls);
    free(w);
    g->watch = NULL;
}
