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

// A rank's hello is its only message of a meeting. The others are what who listens answers to it.
typedef enum {
    HELLO,
    ANSWER_WAIT,  // from rank 0: the verdict follows when all ranks have come. To rank 0: noted
    ANSWER_THERE, // rank 0 is at the address `text` and `port`
    ANSWER_BUSY,  // another run meets here: come again later
    ANSWER_END,   // the meeting is over. text: why it failed, or ""
} Answer;

typedef struct {
    uint64_t process; // a random number of the sender: a process that reaches itself knows it
    int32_t answer, rank, ranks;
    int32_t port; // where rank 0 listens
    char host[HOST];
    Meeting meeting; // the sender's; an answer has no secret
    char text[];     // of a hello: the sender's identity
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
    bool known, left, closed; // the meeting is over; it has said goodbye; its connection has ended
    bool broken;              // it was closed for an invalid message
    bool asks;                // a rank that waits to hear where rank 0 is
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
    uint64_t process; // a random number
    double limit, tick;
    Peer *peers;          // [count]; in a meeting guests follow
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
    ELSEWHERE, // of another machine, or of none
    HERE,
    LOOPBACK, // of each machine itself: 127.0.0.1
} Whose;

// Listens if the address is of this machine; a loopback address only if `loopback` is set. Of a
// name, the first address counts that is not a loopback one; if all are, the socket listens on all
// addresses. -1: errno says why.
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

static int port_of(int listener) {
    struct sockaddr_in6 address = {0}; // sockaddr_in has its port at the same place
    socklen_t length = sizeof(address);
    if (getsockname(listener, (struct sockaddr *)&address, &length) != 0) {
        die("no port: %s", strerror(errno));
    }
    return ntohs(address.sin6_port);
}

int group_listen(const char *host, int *port) {
    Whose whose;
    int file = listen_here(host, *port, true, &whose);
    if (file < 0 && whose == ELSEWHERE) { file = listen_on_all(*port); }
    if (file < 0) { cannot_listen(host, *port); }
    if (file >= 0) { *port = port_of(file); }
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
        set_timeout(file, 2);
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

// Waits until a peer or `other` can be read, or until the clock reads `until`, at most a tick;
// w->polls says which. It releases the mutex during the wait.
static void wait_for_input(Watch *w, int peers, int other, double until) {
    for (int i = 0; i < peers; i++) {
        int file = w->peers[i].closed ? -1 : w->peers[i].file;
        w->polls[i] = (struct pollfd){.fd = file, .events = POLLIN};
    }
    w->polls[peers] = (struct pollfd){.fd = other, .events = POLLIN};
    double seconds = fmax(0, fmin(until - w->now, w->tick));
    pthread_mutex_unlock(&w->mutex);
    poll(w->polls, (nfds_t)peers + 1, (int)ceil(1e3 * seconds));
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
    case KIND_HELLO:
        return ends && h->host[HOST - 1] == '\0' &&
               h->meeting.run[sizeof(h->meeting.run) - 1] == '\0' &&
               h->meeting.secret[sizeof(h->meeting.secret) - 1] == '\0';
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
        wait_for_input(w, w->count, w->quit, next);
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

static void draw(void *number, size_t bytes) {
    if (getrandom(number, bytes, 0) != (ssize_t)bytes) {
        die("no random numbers: %s", strerror(errno));
    }
}

static const char *name_of(const char *run) {
    return *run != '\0' ? run : "a run without a number";
}

void group_draw(Meeting *meeting) {
    uint64_t number[2];
    draw(number, sizeof(number));
    snprintf(meeting->secret, sizeof(meeting->secret), "%016lx%016lx", number[0], number[1]);
}

// One rank's part in a meeting. peers[0] is its connection to who listens at host:port: rank 0, or
// a rank at the meeting place that knows where rank 0 is. After the peers of the watch come guests,
// which are connections that have not said which rank they are.
typedef struct {
    Watch *w;
    const Group *group;
    const Meeting *meeting;
    const char *identity;
    char host[256];
    int port;
    char place[320], why[640]; // where that is; why there is no connection
    Whose whose;               // the address of the meeting place
    int listener;              // of rank 0, or of a rank at the place; -1: none
    bool reached;              // rank 0: it is at the place. Others: rank 0 has answered
    bool told;                 // where rank 0 is, by itself or by a rank at the place
    bool strange;              // a rank of another run has come
    double busy;               // when another run last answered
    bool over;
    Error differs; // the first rank that runs something else
    int guests;    // have come
} Part;

static void send_hello(const Part *part, Peer *p, Answer answer, int port, const char *text) {
    const Watch *w = part->w;
    size_t bytes = sizeof(Hello) + strlen(text) + 1;
    Hello *h = calloc_or_die(1, bytes);
    *h = (Hello){.process = w->process, .answer = (int32_t)answer, .rank = w->rank};
    h->ranks = w->ranks;
    h->port = port;
    h->meeting = *part->meeting;
    if (answer != HELLO) { memset(h->meeting.secret, 0, sizeof(h->meeting.secret)); }
    memcpy(h->host, w->host, HOST);
    strcpy(h->text, text);
    send_message(p, true, KIND_HELLO, h, bytes);
    free(h);
}

static void set_place(Part *part, const char *host, int port) {
    snprintf(part->host, sizeof(part->host), "%s", host);
    part->port = port;
    snprintf(part->place, sizeof(part->place), "%s port %d", part->host, port);
}

// Makes a guest the rank that it says it is. A rank whose identity differs is kept in
// part->differs, of which all are told when all have connected. False: the guest cannot be that
// rank.
static bool seat(Part *part, Peer *guest, const Hello *h) {
    const char *identity = part->identity;
    Watch *w = part->w;
    Peer *p = &w->peers[h->rank > 0 && h->rank < w->ranks ? h->rank : 0];
    size_t line = 0, at = 0;
    if (h->ranks != w->ranks || h->rank < 0 || h->rank >= w->ranks) {
        return fail("rank %d on %s was started as one of %d ranks, rank 0 as one of %d", h->rank,
                    h->host, h->ranks, w->ranks);
    }
    if (h->rank == 0 || p->file >= 0) {
        return fail("two processes say that they are rank %d: one on %s, one on %s", h->rank,
                    h->rank == 0 ? w->host : p->host, h->host);
    }
    p->file = guest->file;
    memcpy(p->host, h->host, HOST);
    guest->file = -1;
    send_hello(part, p, ANSWER_WAIT, 0, "");
    for (; h->text[at] == identity[at] && identity[at] != '\0'; at++) {
        if (identity[at] == '\n') { line = at + 1; }
    }
    if (h->text[at] != identity[at] && part->differs.text[0] == '\0') {
        fail("rank %d: on %s, it runs something else: '%.*s', where rank 0 has '%.*s'; all ranks "
             "need the same program and options",
             h->rank, h->host, (int)strcspn(h->text + line, "\n"), h->text + line,
             (int)strcspn(identity + line, "\n"), identity + line);
        part->differs = error_kept();
    }
    return true;
}

// Keeps where rank 0 is, which has connected to this rank, and tells the ranks that have asked.
static void note_rank_0(Part *part, const Peer *guest, int port) {
    Watch *w = part->w;
    struct sockaddr_storage address;
    socklen_t length = sizeof(address);
    char host[256];
    if (getpeername(guest->file, (struct sockaddr *)&address, &length) != 0 ||
        getnameinfo((struct sockaddr *)&address, length, host, sizeof(host), NULL, 0,
                    NI_NUMERICHOST) != 0) {
        return;
    }
    set_place(part, host, port);
    part->told = true;
    for (int i = w->count; i < w->count + w->ranks + GUESTS; i++) {
        Peer *p = &w->peers[i];
        if (!p->asks) { continue; }
        send_hello(part, p, ANSWER_THERE, part->port, part->host);
        close_peer(p);
    }
}

// Answers a guest. False: the meeting fails.
static bool answer_guest(Part *part, Peer *guest, const Hello *h) {
    const Meeting *mine = part->meeting;
    Watch *w = part->w;
    guest->broken = h->answer != HELLO;
    guest->closed = true;
    if (guest->broken) { return true; }
    if (h->process == w->process) {
        // by an address that its machine does not know as its own
        if (w->rank == 0) { part->reached = true; }
    } else if (strcmp(h->meeting.run, mine->run) != 0) {
        send_hello(part, guest, ANSWER_BUSY, 0, "");
        if (!part->strange) {
            warn("rank %d of another run came to %s, and has to wait: %s, here %s", h->rank,
                 part->place, name_of(h->meeting.run), name_of(mine->run));
        }
        part->strange = true;
    } else if (strcmp(h->meeting.secret, mine->secret) != 0) {
        send_hello(part, guest, ANSWER_END, 0,
                   "who listens at MASTER_ADDR and MASTER_PORT has another LLM8_SECRET than this "
                   "rank");
        warn("rank %d on %s is not let in at %s: it has another LLM8_SECRET", h->rank, h->host,
             part->place);
    } else if (w->rank == 0) {
        guest->closed = false;
        if (seat(part, guest, h)) { return true; }
        send_hello(part, guest, ANSWER_END, 0, error_text());
        return false;
    } else if (h->rank == 0) {
        send_hello(part, guest, ANSWER_WAIT, 0, "");
        note_rank_0(part, guest, h->port);
    } else if (part->told) {
        send_hello(part, guest, ANSWER_THERE, part->port, part->host);
    } else {
        guest->asks = true;
        guest->closed = false;
    }
    return true;
}

static bool is_stranger(const Part *part) {
    return fail(
        "what answers at %s is not rank 0 of an llm8.c run: are MASTER_ADDR and MASTER_PORT "
        "right?",
        part->place);
}

// Takes the answer of who listens. False: the meeting has failed.
static bool take_answer(Part *part, Peer *p, const Hello *h) {
    Watch *w = part->w;
    // a socket may connect to itself if nobody listens
    if (h->process != w->process && h->answer == HELLO) { return is_stranger(part); }
    if (h->answer == ANSWER_END && (part->reached || h->text[0] != '\0')) {
        part->over = true;
        return h->text[0] == '\0' || fail("%s", h->text);
    }
    if (h->answer == ANSWER_WAIT && w->rank > 0) {
        part->reached = true;
        memcpy(p->host, h->host, HOST);
        return true;
    }
    if (h->answer == ANSWER_WAIT) { part->told = true; }
    if (h->answer == ANSWER_THERE && w->rank > 0) {
        set_place(part, h->text, h->port);
        part->told = true;
    }
    if (h->answer == ANSWER_BUSY) {
        part->busy = w->now;
        snprintf(part->why, sizeof(part->why), "another run meets there: %s, here %s",
                 name_of(h->meeting.run), name_of(part->meeting->run));
    }
    close_peer(p);
    return true;
}

// Opens rank 0's socket: at the meeting place, or where another machine can reach it.
static bool listen_first(Part *part) {
    const Meeting *m = part->meeting;
    part->listener = listen_here(m->host, m->port, true, &part->whose);
    part->reached = part->listener >= 0;
    if (part->whose == ELSEWHERE) { part->listener = listen_on_all(m->port); }
    if (part->listener < 0 && errno == EADDRINUSE) { // by another run, which may soon have met
        part->listener = part->whose == ELSEWHERE ? listen_on_all(0)
                                                  : listen_here(m->host, 0, true, &part->whose);
    }
    return part->listener >= 0 || cannot_listen(m->host, m->port);
}

// Tries to reach who listens, and says hello. False: the meeting fails.
static bool reach(Part *part) {
    const Meeting *m = part->meeting;
    const char *why = part->why;
    Watch *w = part->w;
    Peer *p = &w->peers[0];
    Whose whose;
    if (w->rank == 0 && part->whose != ELSEWHERE) {
        int file = listen_here(m->host, m->port, true, &whose);
        if (file >= 0) {
            close(part->listener);
            part->listener = file;
            part->reached = true;
            return true;
        }
        if (w->now > part->busy + 10) { return cannot_listen(m->host, m->port); }
    }
    p->file = connect_once(part->host, part->port, &why);
    double time = wall_seconds(); // time in which this process was blocked counts in full
    w->now += time - w->read;
    w->read = time;
    if (p->file >= 0) {
        set_timeout(p->file, 10);
        p->heard = w->now;
        send_hello(part, p, HELLO, w->rank == 0 ? port_of(part->listener) : 0, part->identity);
        if (part->listener < 0) { why = "it said nothing"; } // else it may be this process
    } else if (part->listener < 0 && !part->told && part->group->local_rank == 0) {
        // this machine's first rank is not rank 0, which is therefore on another machine
        part->listener = listen_here(m->host, m->port, false, &part->whose);
        if (part->listener >= 0) { why = "this machine has that address, and rank 0 has not come"; }
    }
    if (why != part->why) { snprintf(part->why, sizeof(part->why), "%s", why); }
    return true;
}

// What else may be wrong. "": nothing.
static const char *hint(const Part *part) {
    const Group *g = part->group;
    bool first = g->rank == 0, knows = part->told || part->reached;
    if (part->whose == LOOPBACK && g->local_ranks != g->ranks && (first || g->local_rank == 0)) {
        return "; each machine has that address itself: if the ranks are on several machines, set "
               "MASTER_ADDR to rank 0's";
    }
    if (first && !knows && part->busy > 0) { return "; another run meets there"; }
    if (first && !knows && part->whose == ELSEWHERE) {
        return "; rank 0's machine does not have that address, and no rank on the machine that has "
               "it has come: set MASTER_ADDR to rank 0's machine";
    }
    return "";
}

// The connection has ended. False: the meeting has failed.
static bool lose_connection(Part *part, const Peer *p) {
    const char *how = errno == 0 ? "it closed the connection" : strerror(errno);
    if (p->broken || p->got > 0) { return is_stranger(part); }
    if (part->listener < 0) { snprintf(part->why, sizeof(part->why), "%s", how); }
    return !part->reached ||
           fail("rank 0 at %s gave no answer before all ranks had come: %s", part->place, how);
}

// Reads a connection that can be read. False: the meeting fails.
static bool read_connection(Part *part, int number) {
    Watch *w = part->w;
    Peer *p = &w->peers[number];
    errno = 0;
    Message *m = read_message(w, p);
    const Hello *h = m != NULL ? (const Hello *)m->data : NULL;
    bool ok = true, guest = number >= w->count, silent = h == NULL && p->closed && !p->asks;
    if (number == 0 && h != NULL) { ok = take_answer(part, p, h); }
    if (number == 0 && silent) { ok = lose_connection(part, p); }
    if (guest && h != NULL) { ok = answer_guest(part, p, h); }
    if (guest && (silent || p->broken)) {
        warn("a connection to %s is ignored: it is not from a rank", part->place);
    }
    if (number > 0 && !guest && h != NULL) { p->closed = true; } // it has said all
    free(m);
    if (p->closed) { close_peer(p); } // a rank that connected and died may connect again
    return ok;
}

// Reads all connections at the same time, so that a silent one delays nobody. If there are too many
// guests, the oldest connection is closed.
static bool meet(Part *part, double seconds) {
    Watch *w = part->w;
    double tell = 2, next = 0, pause = 0.01;
    int count, all = w->count + w->ranks + GUESTS;
    char missing[600];
    bool first = w->rank == 0;
    while (!part->over) {
        count = first ? list_missing(w, missing, sizeof(missing)) : 1;
        const char *ranks = count > 1 ? "ranks" : "rank";
        double now = read_clock(w), until = seconds;
        if (count == 0) { break; }
        if (!first && part->reached) { until = tell = 1.125 * seconds + 5; } // rank 0 ends before
        if (now >= until && first) {
            return fail("%s %s of %d did not connect to %s within %.0f s (--distributed-timeout)%s",
                        ranks, missing, w->ranks, part->place, seconds, hint(part));
        }
        if (now >= until && part->reached) {
            return fail("rank 0 at %s gave no answer before all ranks had come: it said nothing",
                        part->place);
        }
        if (now >= until) {
            return fail("rank 0 was not reached at %s within %.0f s (--distributed-timeout): %s%s; "
                        "are MASTER_ADDR and MASTER_PORT those of rank 0, and does it run?",
                        part->place, seconds, part->why, hint(part));
        }
        bool warns = now >= tell && (now >= 10 || *hint(part) != '\0');
        if (warns && first) {
            warn("waiting at %s for %s %s of %d%s", part->place, ranks, missing, w->ranks,
                 hint(part));
        } else if (warns) {
            warn("waiting for rank 0 at %s: %s%s", part->place, part->why, hint(part));
        }
        if (now >= tell) { tell = now < 10 ? 10 : now + 60; }
        // a program that is no rank may say nothing; a rank 0 elsewhere must keep trying
        if (first && now > w->peers[0].heard + 2) { close_peer(&w->peers[0]); }
        bool tries = !part->reached && w->peers[0].file < 0;
        if (tries && now >= next) {
            if (!reach(part)) { return false; }
            next = w->now + pause;
            pause = fmin(2 * pause, 0.5);
        }
        wait_for_input(w, all, part->listener, tries ? next : until);
        for (int i = 0; i < all; i++) {
            bool ready = w->peers[i].file >= 0 && w->polls[i].revents != 0;
            if (ready && !read_connection(part, i)) { return false; }
        }
        bool comes = w->polls[all].revents != 0;
        int file = comes ? accept4(part->listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (file >= 0) {
            Peer *guest = &w->peers[w->count + part->guests++ % (all - w->count)];
            close_peer(guest);
            guest->file = file;
            set_timeout(file, 10);
        }
    }
    return true;
}

bool group_open(Group *g, const Meeting *meeting, int listener, const char *identity,
                double seconds) {
    int rank = g->rank, ranks = g->ranks;
    if (ranks == 1) { return true; }
    assert(rank == 0 || listener < 0);
    Watch *w = g->watch = calloc_or_die(1, sizeof(Watch));
    *w = (Watch){.rank = rank,
                 .ranks = ranks,
                 .count = rank == 0 ? ranks : 1,
                 .tick = fmin(0.25, seconds / 16),
                 .read = wall_seconds(),
                 .mutex = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER};
    w->limit = seconds - 3 * w->tick; // so that all ranks have ended within `seconds`
    if (gethostname(w->host, HOST - 1) != 0) { strcpy(w->host, "?"); }
    draw(&w->process, sizeof(w->process));
    int all = w->count + ranks + GUESTS;
    w->peers = calloc_or_die((size_t)all, sizeof(Peer));
    w->polls = calloc_or_die((size_t)all + 1, sizeof(struct pollfd));
    for (int i = 0; i < all; i++) { w->peers[i].file = -1, close_peer(&w->peers[i]); }
    Part part = {w, g, meeting, identity, .listener = listener, .whose = HERE};
    set_place(&part, meeting->host, meeting->port);
    part.reached = listener >= 0;
    pthread_mutex_lock(&w->mutex);
    bool listens = rank != 0 || listener >= 0 || listen_first(&part);
    w->runs = listens && meet(&part, seconds);
    if (rank == 0) {
        Error verdict = w->runs ? part.differs : error_kept();
        for (int r = 1; r < ranks; r++) {
            send_hello(&part, &w->peers[r], ANSWER_END, 0, verdict.text);
        }
        w->runs = verdict.text[0] == '\0' || fail("%s", verdict.text);
        close_peer(&w->peers[0]);
        memcpy(w->peers[0].host, w->host, HOST);
    }
    for (int i = w->count; i < all; i++) { close_peer(&w->peers[i]); }
    if (part.listener >= 0) { close(part.listener); }
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
