#define _GNU_SOURCE // accept4

#include "group.h"

#include <arpa/inet.h>
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
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

// Between rank 0 and each other rank there is a connection for each channel, and one for the
// watchdogs. REDIRECT: a connection on which a redirector (group.h) learns or tells where rank 0
// listens.
enum { WATCHDOGS = CHANNELS, CONNECTIONS, REDIRECT = CONNECTIONS };
enum { HOST = 64 }; // room for a machine's name

// What the watchdogs send each other.
typedef struct {
    enum { BEAT, GOODBYE, LOST } kind;
    int32_t activity;
    int64_t step;
    double age;               // seconds since the rank's present activity began
    char text[sizeof(Error)]; // what the rank is doing; in a LOST note: which rank is lost
} Note;

typedef struct {
    int rank, files[CONNECTIONS]; // indexed by Channel or WATCHDOGS; -1: not connected
    char host[HOST];
    bool left, closed; // left: the peer has said goodbye; closed: its connection has ended
    double heard;      // when bytes of the peer's notes last came
    Note beat, coming; // coming: the note that is being received; `got` of its bytes have come
    size_t got;
} Peer;

struct Watch {
    int rank, ranks;
    // number of peers: on rank 0 one for each rank, itself included; elsewhere only rank 0
    int count;
    double limit, tick;   // seconds: how long a rank may be silent; time between two notes
    Peer *peers;          // [count]
    struct pollfd *polls; // one for each peer, and one for `quit`
    int quit;             // eventfd by which the watchdog's thread is ended
    int quit_probe;       // eventfd by which the probe's thread is ended
    pthread_t thread, probe_thread;
    WatchProbe *probe;
    void *argument;
    pthread_mutex_t mutex;  // protects the fields below, and the peers except `files`
    pthread_cond_t changed; // a peer has said goodbye
    // The watchdog's clock: `now` counts the seconds in which this process ran, and `read` is
    // wall_seconds() at the clock's last reading. heard, since and left are readings of this clock,
    // so no age is negative.
    double now, read;
    Note mine;
    double since; // when this rank began what `mine` says
    double left;  // when a peer last said goodbye
    bool leaving; // this rank has called group_close
};

// Reads the watchdog's clock. The caller holds the mutex. While the process runs, the watchdog
// reads the clock at least once a tick. So if two readings are further apart than two ticks, the
// process was stopped and could hear nobody, and this time counts as two ticks.
static double read_clock(Watch *w) {
    double time = wall_seconds();
    w->now += fmin(fmax(0, time - w->read), 2 * w->tick);
    w->read = time;
    return w->now;
}

// ---- TCP ----------------------------------------------------------------------------------------

static void set_option(int file, int level, int name, int value) {
    setsockopt(file, level, name, &value, sizeof(value)); // a failure here does no harm
}

static void set_timeout(int file, int name, double seconds) {
    double whole = floor(seconds);
    struct timeval most = {(time_t)whole, (suseconds_t)(1e6 * (seconds - whole))};
    setsockopt(file, SOL_SOCKET, name, &most, sizeof(most));
}

// Sets the timeout of connect and send, and that of recv, in seconds. 0 means no timeout.
static void set_timeouts(int file, double sends, double receives) {
    set_timeout(file, SO_SNDTIMEO, sends);
    set_timeout(file, SO_RCVTIMEO, receives);
}

static void close_file(int *file) {
    if (*file >= 0) { close(*file); }
    *file = -1;
}

// Opens a socket at the first of the host's addresses that works. With `listens`, the socket
// listens at the address, which must be this machine's. Otherwise it connects to the address within
// two seconds. Returns -1 if no address works; *why and errno then say why the last one did not.
static int open_socket(const char *host, int port, bool listens, const char **why) {
    char service[16];
    struct addrinfo *found, hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    snprintf(service, sizeof(service), "%d", port);
    int file = -1, error = 0, status = getaddrinfo(host, service, &hints, &found);
    if (status != 0) {
        *why = status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status);
        errno = 0;
        return -1;
    }
    for (const struct addrinfo *a = found; a != NULL && file < 0; a = a->ai_next) {
        file = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        bool ok = file >= 0;
        if (ok && listens) {
            set_option(file, SOL_SOCKET, SO_REUSEADDR, 1);
            if (a->ai_family == AF_INET6) { set_option(file, IPPROTO_IPV6, IPV6_V6ONLY, 0); }
            ok = bind(file, a->ai_addr, a->ai_addrlen) == 0 && listen(file, SOMAXCONN) == 0;
        } else if (ok) {
            set_timeouts(file, 2, 2);
            ok = connect(file, a->ai_addr, a->ai_addrlen) == 0;
        }
        if (ok) { break; }
        error = errno;
        *why = strerror(error == EINPROGRESS ? ETIMEDOUT : error);
        close_file(&file);
    }
    freeaddrinfo(found);
    errno = error;
    return file;
}

int group_listen(const char *host, int *port) {
    struct sockaddr_in6 address; // sockaddr_in has its port at the same place
    struct in_addr four;
    socklen_t length = sizeof(address);
    const char *why = "";
    bool local = strncmp(host, "127.", 4) == 0 && inet_pton(AF_INET, host, &four) == 1;
    bool own = local || strcmp(host, "::1") == 0;
    int file = open_socket(own ? host : "::", *port, true, &why);
    bool no_ipv6 = file < 0 && !own && errno != EADDRINUSE;
    if (no_ipv6) { file = open_socket("0.0.0.0", *port, true, &why); }
    if (file < 0) {
        fail("rank 0 cannot listen on port %d: %s", *port,
             errno == EADDRINUSE ? "another process has the port; set MASTER_PORT to a free one"
                                 : why);
    } else if (getsockname(file, (struct sockaddr *)&address, &length) == 0) {
        *port = ntohs(address.sin6_port);
    }
    return file;
}

// Whether the host's address is an address of this machine.
static bool is_here(const char *host) {
    const char *why;
    int file = open_socket(host, 0, true, &why);
    bool here = file >= 0;
    close_file(&file);
    return here;
}

// ---- notes --------------------------------------------------------------------------------------

// Sends a note to all peers without waiting. If a peer reads nothing and its buffer is full, the
// note is dropped; judge() notices that this peer is silent. If only a part of the note is sent,
// the connection is closed for sending, because the peer would misread a note after that part.
static void send_notes(Watch *w, int kind, const char *text) {
    Note note = w->mine;
    note.kind = kind;
    snprintf(note.text, sizeof(note.text), "%s", text);
    for (const Peer *p = w->peers; p < w->peers + w->count; p++) {
        int file = p->files[WATCHDOGS];
        ssize_t n = file < 0 ? 0 : send(file, &note, sizeof(note), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0 && n < (ssize_t)sizeof(note)) { shutdown(file, SHUT_WR); }
    }
}

// Receives the next note of a peer into p->coming. Returns false if the note has not arrived
// completely, or if the connection has ended.
static bool receive_note(const Watch *w, Peer *p) {
    while (!p->closed) {
        ssize_t n = recv(p->files[WATCHDOGS], (char *)&p->coming + p->got, sizeof(Note) - p->got,
                         MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return false; }
        p->closed = n <= 0;
        if (p->closed) { return false; }
        p->heard = w->now;
        p->got = (p->got + (size_t)n) % sizeof(Note);
        if (p->got > 0) { continue; }
        p->coming.text[sizeof(p->coming.text) - 1] = '\0';
        return true;
    }
    return false;
}

// ---- the watchdog -------------------------------------------------------------------------------

// Prints the reason and ends this process. Rank 0 first sends the reason to the other ranks, which
// then end too. The caller holds the watch's mutex, so that only one thread prints a reason.
__attribute__((noreturn)) PRINTF_LIKE(2, 3) static void end_run(Watch *w, const char *format, ...) {
    Error why = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(why.text, sizeof(why.text), format, args);
    va_end(args);
    if (w->rank == 0) { send_notes(w, LOST, why.text); }
    complain("%s; this rank ends at step %lld (exit status %d)", why.text, (long long)w->mine.step,
             EXIT_LOST_RANK);
    _exit(EXIT_LOST_RANK); // the main thread may hang, and exit() would hang with it
}

// Ends the run because p's rank is lost. reason: a format, which may have a %.1f for the seconds.
__attribute__((noreturn)) static void end_for(Watch *w, const Peer *p, const char *reason,
                                              double seconds) {
    char text[128];
    snprintf(text, sizeof(text), reason, seconds);
    end_run(w, "rank %d on %s %s, last heard at step %lld (%s)", p->rank, p->host, text,
            (long long)p->beat.step, p->beat.text);
}

void watch_lost(Watch *w, const char *fallback) {
    nanosleep(&(struct timespec){.tv_sec = 3}, NULL); // the watchdog should end the process first
    pthread_mutex_lock(&w->mutex);
    end_run(w, "%s", fallback);
}

// Reads the notes of a peer. Ends the run if the peer says that a rank is lost, or if its
// connection closes without a goodbye.
static void read_peer(Watch *w, Peer *p) {
    while (receive_note(w, p)) {
        if (p->coming.kind == LOST) { end_run(w, "%s", p->coming.text); }
        if (p->coming.kind == BEAT) { p->beat = p->coming; }
        if (p->coming.kind != GOODBYE) { continue; }
        p->left = true;
        w->left = p->heard;
        pthread_cond_broadcast(&w->changed);
    }
    if (!p->closed || p->left) { return; }
    // all ranks may be ending with the same fault: this pause lets the main thread of this rank
    // report it
    pthread_mutex_unlock(&w->mutex);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    pthread_mutex_lock(&w->mutex);
    end_for(w, p, "has exited unexpectedly (its connection closed)", 0);
}

// Ends the run if a rank is lost. Rank 0 judges all ranks. The other ranks only watch whether rank
// 0 is silent. Their limit is slightly longer, so that rank 0's message arrives first.
static void judge(Watch *w, double now) {
    double limit = w->limit + (w->rank == 0 ? 0 : 2 * w->tick), longest = 0;
    const Peer *stuck = NULL, *behind = NULL;
    // a rank that said goodbye may have kept the others waiting, so their time begins anew then
    bool all_wait = now - w->left > limit + 2 * w->tick;
    for (const Peer *p = w->peers; p < w->peers + w->count; p++) {
        const Note *b = &p->beat;
        if (p->left) { continue; }
        if (now - p->heard > limit) { end_for(w, p, "has been silent for %.1f s", now - p->heard); }
        // the age is that in the last note, since which a silent rank may have begun something else
        if (b->activity == ACTIVITY_WORK && b->age > fmax(limit, longest)) {
            stuck = p, longest = b->age;
        }
        all_wait = all_wait && b->activity == ACTIVITY_WAIT && b->age > limit + w->tick;
        if (behind == NULL || b->step < behind->beat.step) { behind = p; }
    }
    if (w->rank > 0) { return; }
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
            if (w->rank == 0) { w->peers[0].beat = w->mine, w->peers[0].heard = now; }
            bool goodbye_sent = w->leaving && w->rank > 0; // nothing is sent after a goodbye
            if (!goodbye_sent) { send_notes(w, BEAT, w->mine.text); }
            judge(w, now);
        }
        for (int r = 0; r < w->count; r++) {
            const Peer *p = &w->peers[r];
            w->polls[r] = (struct pollfd){.fd = p->closed ? -1 : p->files[WATCHDOGS],
                                          .events = POLLIN};
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

static void set_activity(Watch *w, Activity activity, const char *what) {
    w->mine.activity = (int32_t)activity;
    snprintf(w->mine.text, sizeof(w->mine.text), "%s", what);
    w->since = read_clock(w);
}

void watch_beat(Watch *w, int64_t step, Activity activity, const char *what) {
    if (w == NULL) { return; }
    pthread_mutex_lock(&w->mutex);
    w->mine.step = step;
    set_activity(w, activity, what);
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

// Sends or receives bytes; if the peer has ended, the watchdog ends this process.
static void move_bytes(Watch *w, int file, bool sends, void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        char *at = (char *)data + done;
        ssize_t n = sends ? send(file, at, bytes - done, MSG_NOSIGNAL)
                          : recv(file, at, bytes - done, MSG_WAITALL);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { watch_lost(w, "a connection to another rank has ended"); }
        done += (size_t)n;
    }
}

// Sends bytes to a peer, or receives the peer's next bytes. On the main channel, the main thread
// counts as waiting meanwhile.
static void exchange(Watch *w, const Peer *p, Channel channel, bool sends, void *data,
                     size_t bytes) {
    uint64_t size = bytes;
    Note before;
    pthread_mutex_lock(&w->mutex);
    before = w->mine;
    if (channel == CHANNEL_MAIN) { set_activity(w, ACTIVITY_WAIT, before.text); }
    pthread_mutex_unlock(&w->mutex);
    move_bytes(w, p->files[channel], sends, &size, sizeof(size));
    if (size != bytes) {
        die("rank %d is at another point of the program: it sent %zu bytes instead of %zu", p->rank,
            (size_t)size, bytes);
    }
    move_bytes(w, p->files[channel], sends, data, bytes);
    pthread_mutex_lock(&w->mutex);
    if (channel == CHANNEL_MAIN) { set_activity(w, (Activity)before.activity, before.text); }
    pthread_mutex_unlock(&w->mutex);
}

void group_broadcast(const Group *g, Channel channel, void *data, size_t bytes) {
    Watch *w = g->watch;
    if (w == NULL) { return; }
    if (g->rank > 0) { exchange(w, &w->peers[0], channel, false, data, bytes); }
    for (int r = 1; r < w->count; r++) { exchange(w, &w->peers[r], channel, true, data, bytes); }
}

void group_gather(const Group *g, Channel channel, const void *mine, size_t bytes, void *all) {
    Watch *w = g->watch;
    if (g->rank > 0) {
        exchange(w, &w->peers[0], channel, true, (void *)mine, bytes);
        return;
    }
    memcpy(all, mine, bytes);
    for (int r = 1; r < g->ranks; r++) {
        exchange(w, &w->peers[r], channel, false, (char *)all + (size_t)r * bytes, bytes);
    }
}

char *group_text(const Group *g, const char *mine) {
    size_t bytes = strlen(mine) + 1;
    group_broadcast(g, CHANNEL_MAIN, &bytes, sizeof(bytes));
    char *text = calloc_or_die(bytes, 1);
    if (g->rank == 0) { memcpy(text, mine, bytes); }
    group_broadcast(g, CHANNEL_MAIN, text, bytes);
    text[bytes - 1] = '\0';
    return text;
}

bool group_agree(const Group *g, Channel channel, bool ok) {
    Error verdict = {0}; // "": ok
    if (g->watch == NULL) { return ok; }
    if (!ok) {
        snprintf(verdict.text, sizeof(verdict.text), "rank %d: %.700s", g->rank, error_text());
    }
    FREED Error *all = calloc_or_die((size_t)g->ranks, sizeof(Error));
    group_gather(g, channel, &verdict, sizeof(verdict), all);
    for (int r = g->ranks - 1; r >= 0; r--) {
        if (all[r].text[0] != '\0') { verdict = all[r]; }
    }
    group_broadcast(g, channel, &verdict, sizeof(verdict));
    verdict.text[sizeof(verdict.text) - 1] = '\0';
    return verdict.text[0] == '\0' || fail("%s", verdict.text);
}

// ---- the rendezvous -----------------------------------------------------------------------------

// The first message on a connection. A rank sends a Hello to rank 0 on each of its connections.
// Once the rendezvous has ended, rank 0 answers with a Hello on the watchdogs' connection. In a
// Hello from rank 0 to a redirector, or from a redirector, `connection` is REDIRECT.
typedef struct {
    uint32_t magic;
    int32_t rank, ranks, connection;
    // in a Hello with REDIRECT: the port on which rank 0 listens; 0: not known yet
    int32_t port;
    char host[HOST], token[TOKEN];
    // rank 0's answer: why the rendezvous has failed, or "" if all ranks have come. A redirector's
    // answer: the address of rank 0's machine, or "" if rank 0 is on the same machine
    char text[sizeof(Error)];
} Hello;
enum { MAGIC = 0x4c384336 };
// seconds in which a Hello must come; a slower rank connects again
static const double HELLO_SECONDS = 0.5;

typedef struct {
    Watch *w;
    const Rendezvous *rendezvous;
    Hello mine;
    char address[400], within[64]; // for messages: where ranks connect, and within which time
    double limit;                  // seconds within which all ranks must connect
    bool warned;                   // this rank has warned that another rank was refused
} Attempt;

// What has arrived on a connection: a Hello, something else, or nothing. ENDED: the peer has
// closed the connection.
typedef enum { HELLO, FOREIGN, SILENCE, ENDED } Arrival;

static Arrival receive_hello(int file, double seconds, Hello *h) {
    set_timeouts(file, 2, seconds);
    ssize_t bytes = recv(file, h, sizeof(*h), MSG_WAITALL);
    h->host[HOST - 1] = h->token[TOKEN - 1] = h->text[sizeof(h->text) - 1] = '\0';
    if (bytes <= 0) { return bytes < 0 ? SILENCE : ENDED; }
    return bytes == sizeof(*h) && h->magic == MAGIC ? HELLO : FOREIGN;
}

static bool send_hello(int file, const Hello *h) {
    return send(file, h, sizeof(*h), MSG_NOSIGNAL) == sizeof(*h);
}

static void answer(const Attempt *attempt, int file, const char *text) {
    Hello h = attempt->mine;
    memset(h.token, 0, sizeof(h.token));
    snprintf(h.text, sizeof(h.text), "%s", text);
    send_hello(file, &h); // if this fails, the other rank connects again
}

static bool has_ended(int file) {
    char byte;
    return file < 0 || recv(file, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

// Assigns a new connection to the rank that opened it, or closes the connection. Returns false if
// the rendezvous fails.
static bool assign_connection(Attempt *attempt, int file) {
    const Watch *w = attempt->w;
    Hello h;
    bool heard = receive_hello(file, HELLO_SECONDS, &h) == HELLO, ok = true;
    bool known = heard && h.rank > 0 && h.rank < w->ranks && h.connection >= 0 &&
                 h.connection < CONNECTIONS;
    Peer *p = known ? &w->peers[h.rank] : NULL;
    int *current = known ? &p->files[h.connection] : NULL;
    if (!heard) {
        warn("a connection to %s is ignored: it is not from a rank", attempt->address);
    } else if (strcmp(h.token, attempt->mine.token) != 0) {
        if (!attempt->warned) {
            warn("rank %d on %s is not let in at %s: it is of another run, or has another "
                 "LLM8_SECRET",
                 h.rank, h.host, attempt->address);
        }
        attempt->warned = true; // warns once, although the rank connects again and again
    } else if (h.connection == REDIRECT) {
        // rank 0 has connected to itself, by an address that is_here() did not recognise
    } else if (p == NULL || h.ranks != w->ranks) {
        ok = fail("rank %d on %s was started as one of %d ranks, rank 0 as one of %d", h.rank,
                  h.host, h.ranks, w->ranks);
    } else if (!has_ended(*current)) {
        ok = fail("two processes say that they are rank %d: one on %s, one on %s", h.rank, p->host,
                  h.host);
    } else {
        close_file(current); // the earlier connection of this rank has ended
        *current = file;
        memcpy(p->host, h.host, HOST);
        return true;
    }
    if (!ok) { answer(attempt, file, error_text()); }
    close(file);
    return ok;
}

// Returns how many ranks have not connected, and sets error_text() to a list of these ranks.
static int count_missing(const Attempt *attempt, const char *verb, const char *within) {
    char text[600] = "";
    int count = 0;
    for (int r = 1; r < attempt->w->ranks; r++) {
        size_t used = strlen(text), room = sizeof(text) - used;
        bool there = true;
        for (int i = 0; i < CONNECTIONS; i++) { there &= attempt->w->peers[r].files[i] >= 0; }
        if (there || ++count == 0 || room < 20) { continue; }
        snprintf(text + used, room, room < 40 ? "%s..." : "%s%d", count > 1 ? ", " : "", r);
    }
    fail("rank%s %s of %d %s to %s%s", plural(count), text, attempt->w->ranks, verb,
         attempt->address, within);
    return count;
}

// The redirector (group.h), which tells ranks where rank 0 listens.
typedef struct {
    Attempt attempt;
    int listener; // -1: this rank is no redirector
    pthread_t thread;
} Redirector;

// The redirector's thread, which ends when its socket is shut down.
static void *redirect_ranks(void *argument) {
    Redirector *d = argument;
    char address[128] = "";
    d->attempt.mine.connection = REDIRECT;
    for (;;) {
        struct sockaddr_storage from;
        socklen_t length = sizeof(from);
        int file = accept4(d->listener, (struct sockaddr *)&from, &length, SOCK_CLOEXEC);
        if (file < 0 && errno == EINVAL) { return NULL; }
        Hello h;
        bool ours = file >= 0 && receive_hello(file, HELLO_SECONDS, &h) == HELLO &&
                    strcmp(h.token, d->attempt.mine.token) == 0;
        if (ours && h.connection == REDIRECT) {
            d->attempt.mine.port = h.port;
            getnameinfo((struct sockaddr *)&from, length, address, sizeof(address), NULL, 0,
                        NI_NUMERICHOST);
            if (is_here(address)) { *address = '\0'; }
        }
        bool four = strncmp(address, "::ffff:", 7) == 0; // an IPv4-mapped IPv6 address
        if (ours) { answer(&d->attempt, file, address + (four ? 7 : 0)); }
        close_file(&file);
    }
}

// On rank 0: tells the redirector on which port rank 0 listens. If this fails, attempt->address
// says why.
static bool tell_redirector(Attempt *attempt, int port) {
    const Rendezvous *m = attempt->rendezvous;
    const char *why = "it gives no answer; has it another LLM8_SECRET?";
    Hello h = attempt->mine;
    h.connection = REDIRECT;
    h.port = port;
    int file = open_socket(m->host, m->port, false, &why);
    bool told = file >= 0 && send_hello(file, &h) && receive_hello(file, 2, &h) == HELLO &&
                h.connection == REDIRECT;
    close_file(&file);
    if (told) {
        snprintf(attempt->address, sizeof(attempt->address), "%s port %d", attempt->mine.host,
                 port);
    } else {
        snprintf(attempt->address, sizeof(attempt->address),
                 "%s port %d (rank 0 reaches no other rank there: %s)", m->host, m->port, why);
    }
    return told;
}

// On rank 0: waits until all ranks have connected, and answers them. Returns false if the
// rendezvous has failed.
static bool receive_ranks(Attempt *attempt, int listener) {
    const Rendezvous *m = attempt->rendezvous;
    const double start = wall_seconds(), until = start + attempt->limit;
    double warning = start + 10;
    int port = m->port;
    bool ok = true, tells = m->elsewhere && !is_here(m->host);
    // tries again, because another run may use the port only until its ranks have connected
    while (listener < 0 && (listener = group_listen(m->host, &port)) < 0) {
        if (wall_seconds() > fmin(until, start + 10)) { return false; }
        // the redirector may have the port: rank 0 then takes any, and tells the redirector which
        if (m->elsewhere) { tells = true, port = 0; }
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    while (ok && count_missing(attempt, "did not connect", attempt->within) > 0) {
        double now = wall_seconds(), next = tells ? now + 0.1 : warning;
        struct pollfd waits = {.fd = listener, .events = POLLIN};
        if (now >= until) {
            ok = false;
        } else if (now >= warning) {
            count_missing(attempt, "must still connect", "");
            warn("waiting: %s", error_text());
            warning = now + 60;
        } else if (poll(&waits, 1, (int)ceil(1e3 * (fmin(until, next) - now))) > 0) {
            int file = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            ok = file < 0 || assign_connection(attempt, file);
        } else if (tells) {
            tells = !tell_redirector(attempt, port);
        }
    }
    close(listener);
    for (int r = 1; r < attempt->w->ranks; r++) {
        int file = attempt->w->peers[r].files[WATCHDOGS];
        if (file >= 0) { answer(attempt, file, ok ? "" : error_text()); }
    }
    return ok;
}

// Connects to rank 0 at an address, once for each channel and once for the watchdogs. *why: why a
// connection could not be opened.
static bool connect_to(Attempt *attempt, const Rendezvous *at, const char **why) {
    int *files = attempt->w->peers[0].files;
    for (int i = 0; i < CONNECTIONS; i++) {
        close_file(&files[i]);
        files[i] = open_socket(at->host, at->port, false, why);
        attempt->mine.connection = i;
        if (files[i] < 0 || !send_hello(files[i], &attempt->mine)) { return false; }
    }
    return true;
}

// On the other ranks: connects to rank 0, again and again until rank 0 answers. Returns false if
// the rendezvous has failed.
static bool reach_rank_0(Attempt *attempt) {
    const Rendezvous *m = attempt->rendezvous;
    const double start = wall_seconds();
    double warning = start + 10, pause = 0.01;
    Rendezvous at = *m;
    bool sent = false; // a redirector has said where rank 0 is
    for (;;) {
        const char *why = "";
        Hello h = {0};
        snprintf(attempt->address, sizeof(attempt->address), "%s port %d", at.host, at.port);
        if (connect_to(attempt, &at, &why)) {
            // waits longer than rank 0, so that rank 0 can still say why the rendezvous has failed
            double patience = attempt->limit * 1.125 + 5 - (wall_seconds() - start);
            int file = attempt->w->peers[0].files[WATCHDOGS];
            Arrival arrival = receive_hello(file, fmax(1, patience), &h);
            bool redirects = arrival == HELLO && h.connection == REDIRECT;
            if (redirects && h.port > 0 && !sent) {
                sent = true;
                at.port = h.port;
                if (h.text[0] != '\0') { snprintf(at.host, sizeof(at.host), "%.255s", h.text); }
                continue;
            }
            // if nobody listens, the socket may connect to itself (TCP's simultaneous open)
            bool rank_0 = arrival == HELLO && !redirects && h.rank != attempt->mine.rank;
            if (rank_0 && h.text[0] == '\0') {
                memcpy(attempt->w->peers[0].host, h.host, HOST);
                return true;
            }
            if (rank_0) { return fail("%s", h.text); }
            if (arrival == FOREIGN) {
                return fail("what answers at %s is not rank 0 of an llm8.c run: are MASTER_ADDR "
                            "and MASTER_PORT right?",
                            attempt->address);
            }
            why = redirects ? "it has not yet come there to say where it listens"
                  : arrival == SILENCE
                      ? "it said nothing"
                      : "it closed the connection; is it of another run, or has another "
                        "LLM8_SECRET?";
        }
        double now = wall_seconds();
        bool ends = now >= start + attempt->limit;
        if (ends || now >= warning) {
            fail("rank 0 was not reached at %s%s: %s; are MASTER_ADDR and MASTER_PORT those of "
                 "rank 0, and does it run?",
                 attempt->address, ends ? attempt->within : "", why);
            if (ends) { return false; }
            warn("waiting: %s", error_text());
            warning = now + 60;
        }
        at = *m;
        sent = false;
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * pause)}, NULL);
        pause = fmin(2 * pause, 0.5);
    }
}

// Whether all ranks run what rank 0 runs. identity: see group_open.
static bool agree_on(const Group *g, const char *host, const char *identity) {
    FREED char *of_first = group_text(g, identity);
    size_t line = 0, at = 0;
    for (; identity[at] == of_first[at] && identity[at] != '\0'; at++) {
        if (identity[at] == '\n') { line = at + 1; }
    }
    bool ok = identity[at] == of_first[at] ||
              fail("on %s, it runs something else: '%.*s', where rank 0 has '%.*s'; all ranks need "
                   "the same program and options",
                   host, (int)strcspn(identity + line, "\n"), identity + line,
                   (int)strcspn(of_first + line, "\n"), of_first + line);
    return group_agree(g, CHANNEL_MAIN, ok);
}

// Makes the watchdog's state for a rank that has no connections yet.
static Watch *make_watch(const Group *g, double seconds) {
    Watch *w = calloc_or_die(1, sizeof(Watch));
    *w = (Watch){.rank = g->rank,
                 .ranks = g->ranks,
                 .tick = fmin(0.25, seconds / 16),
                 .quit = -1,
                 .mutex = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER};
    w->limit = seconds - 3 * w->tick; // so that all ranks have ended within `seconds`
    w->count = g->rank == 0 ? g->ranks : 1;
    w->peers = calloc_or_die((size_t)g->ranks, sizeof(Peer));
    w->polls = calloc_or_die((size_t)g->ranks + 1, sizeof(struct pollfd));
    for (int r = 0; r < g->ranks; r++) {
        w->peers[r] = (Peer){.rank = r, .beat = {.activity = ACTIVITY_PAUSE, .text = "starting"}};
        for (int i = 0; i < CONNECTIONS; i++) { w->peers[r].files[i] = -1; }
    }
    return w;
}

bool group_open(Group *g, const Rendezvous *rendezvous, int listener, const char *identity,
                double seconds) {
    if (g->ranks == 1) { return true; }
    Watch *w = g->watch = make_watch(g, seconds);
    Attempt attempt = {
        w, rendezvous, {.magic = MAGIC, .rank = g->rank, .ranks = g->ranks}, .limit = seconds};
    snprintf(attempt.address, sizeof(attempt.address), "%s port %d", rendezvous->host,
             rendezvous->port);
    snprintf(attempt.within, sizeof(attempt.within), " within %.0f s (--distributed-timeout)",
             seconds);
    if (gethostname(attempt.mine.host, HOST - 1) != 0) { strcpy(attempt.mine.host, "?"); }
    memcpy(attempt.mine.token, rendezvous->token, sizeof(rendezvous->token));
    memcpy(w->peers[g->rank].host, attempt.mine.host, HOST);
    Redirector redirector = {.attempt = attempt, .listener = -1};
    int port = rendezvous->port;
    if (rendezvous->elsewhere && g->rank > 0 && g->local_rank == 0 && is_here(rendezvous->host)) {
        // the result is -1 if another rank listens there already
        redirector.listener = group_listen(rendezvous->host, &port);
        if (redirector.listener >= 0 &&
            pthread_create(&redirector.thread, NULL, redirect_ranks, &redirector) != 0) {
            die("the redirector's thread cannot be started: %s", strerror(errno));
        }
    }
    bool ok = g->rank == 0 ? receive_ranks(&attempt, listener) : reach_rank_0(&attempt);
    if (redirector.listener >= 0) {
        shutdown(redirector.listener, SHUT_RD);
        pthread_join(redirector.thread, NULL);
        close(redirector.listener);
    }
    w->read = wall_seconds();
    set_activity(w, ACTIVITY_WORK, "starting");
    for (Peer *p = w->peers; p < w->peers + w->count; p++) {
        p->closed = p->files[WATCHDOGS] < 0;
        for (int i = 0; i < CONNECTIONS; i++) {
            set_timeouts(p->files[i], 0, 0);
            set_option(p->files[i], IPPROTO_TCP, TCP_NODELAY, 1); // sends small data without delay
            set_option(p->files[i], SOL_SOCKET, SO_KEEPALIVE, 1);
        }
    }
    if (ok) {
        w->quit = eventfd(0, EFD_CLOEXEC);
        if (w->quit < 0 || pthread_create(&w->thread, NULL, watch_thread, w) != 0) {
            die("the watchdog's thread cannot be started: %s", strerror(errno));
        }
        ok = agree_on(g, attempt.mine.host, identity);
    }
    if (!ok) { group_close(g); }
    return ok;
}

void group_close(Group *g) {
    Watch *w = g->watch;
    if (w == NULL) { return; }
    watch_probe(w, NULL, NULL);
    if (w->quit >= 0) { // the watchdog runs
        pthread_mutex_lock(&w->mutex);
        w->leaving = true;
        set_activity(w, ACTIVITY_WAIT, "ending"); // waits for ranks that still save
        if (w->rank > 0) { send_notes(w, GOODBYE, ""); }
        for (Peer *p = w->peers; p < w->peers + w->count; p++) {
            while (p->files[WATCHDOGS] >= 0 && !p->left) {
                pthread_cond_wait(&w->changed, &w->mutex);
            }
        }
        if (w->rank == 0) { send_notes(w, GOODBYE, ""); }
        pthread_mutex_unlock(&w->mutex);
        eventfd_write(w->quit, 1);
        pthread_join(w->thread, NULL);
        close(w->quit);
    }
    for (int r = 0; r < w->ranks; r++) {
        for (int i = 0; i < CONNECTIONS; i++) { close_file(&w->peers[r].files[i]); }
    }
    free(w->peers);
    free(w->polls);
    free(w);
    g->watch = NULL;
}
