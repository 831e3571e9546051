#include "group.h"
#include "net.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef enum { MESSAGE_BEAT = 1, MESSAGE_BYE, MESSAGE_LOST } MessageKind;

enum { MESSAGE_TEXT = 424 };

typedef struct {
    int32_t kind, doing;
    int64_t step;
    double age;              // seconds the rank has been at it
    char text[MESSAGE_TEXT]; // what it does; what to print when a rank is lost
} Message;

// What is known of another rank.
typedef struct {
    int file;
    bool left; // said goodbye
    double heard;
    Message last, coming;
    size_t got; // bytes of `coming`
} Peer;

struct Watch {
    Group *group;
    double limit, tick;
    pthread_t thread;
    int wake[2];
    double left; // when the last rank so far said goodbye
    int count;   // of peers: rank 0 has one a rank, its own unused; the others have rank 0
    Peer *peers;
    pthread_mutex_t mutex; // of all that follows
    Message mine;
    double since;
    bool leaving;
    WatchProbe *probe;
    void *argument;
};

void watch_beat(Watch *w, int64_t step, Doing doing, const char *what) {
    if (w == NULL) { return; }
    pthread_mutex_lock(&w->mutex);
    w->mine.step = step;
    w->mine.doing = doing;
    snprintf(w->mine.text, sizeof(w->mine.text), "%s", what);
    w->since = wall_seconds();
    pthread_mutex_unlock(&w->mutex);
}

void watch_probe(Watch *w, WatchProbe *probe, void *argument) {
    if (w == NULL) { return; }
    pthread_mutex_lock(&w->mutex);
    w->probe = probe;
    w->argument = argument;
    pthread_mutex_unlock(&w->mutex);
}

static Message own_message(Watch *w) {
    pthread_mutex_lock(&w->mutex);
    Message m = w->mine;
    m.age = wall_seconds() - w->since;
    pthread_mutex_unlock(&w->mutex);
    return m;
}

static void end_process(Watch *w, const char *why) {
    Message m = own_message(w);
    complain("%s; this rank ends at step %lld (exit status %d)", why, (long long)m.step,
             EXIT_LOST_RANK);
    _exit(EXIT_LOST_RANK); // the main thread may hang, and exit() with it
}

// A peer that takes no more, stopped or dead, is judged by its silence.
static void send_message(const Peer *p, const Message *m) {
    if (p->file < 0) { return; }
    ssize_t sent = send(p->file, m, sizeof(*m), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0 && sent < (ssize_t)sizeof(*m)) { shutdown(p->file, SHUT_WR); }
}

static void send_all(Watch *w, const Message *m) {
    for (int i = 0; i < w->count; i++) { send_message(&w->peers[i], m); }
}

// Rank 0 has found a rank lost: all end.
PRINTF_LIKE(2, 3) static void announce(Watch *w, const char *format, ...) {
    Message m = {.kind = MESSAGE_LOST};
    va_list args;
    va_start(args, format);
    vsnprintf(m.text, sizeof(m.text), format, args);
    va_end(args);
    if (w->group->rank == 0) { send_all(w, &m); }
    end_process(w, m.text);
}

static int rank_of(const Watch *w, int i) {
    return w->group->rank == 0 ? i : 0;
}

// "rank 3 on node7", into out.
static const char *name_of(const Watch *w, int i, char out[GROUP_HOST + 32]) {
    const Group *g = w->group;
    snprintf(out, GROUP_HOST + 32, "rank %d%s%s", rank_of(w, i), g->hosts != NULL ? " on " : "",
             g->hosts != NULL ? g->hosts[rank_of(w, i)] : "");
    return out;
}

static void handle(Watch *w, Peer *p) {
    p->heard = wall_seconds();
    if (p->coming.kind == MESSAGE_LOST) { end_process(w, p->coming.text); }
    if (p->coming.kind == MESSAGE_BYE) {
        p->left = true;
        w->left = p->heard;
    } else {
        p->last = p->coming;
    }
}

static void receive(Watch *w, int i) {
    Peer *p = &w->peers[i];
    char name[GROUP_HOST + 32];
    for (;;) {
        ssize_t got = recv(p->file, (char *)&p->coming + p->got, sizeof(Message) - p->got,
                           MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) { return; }
        if (got <= 0) { break; }
        p->got += (size_t)got;
        if (p->got == sizeof(Message)) {
            p->got = 0;
            p->coming.text[MESSAGE_TEXT - 1] = '\0';
            handle(w, p);
        }
    }
    if (!p->left) {
        // a fault that all ranks share is said by their main threads, this one's too
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        announce(w, "%s has ended without a goodbye, last heard at step %lld (%s)",
                 name_of(w, i, name), (long long)p->last.step, p->last.text);
    }
    close(p->file);
    p->file = -1;
}

static void announce_silence(Watch *w, int i, double now) {
    const Peer *p = &w->peers[i];
    char name[GROUP_HOST + 32];
    announce(w, "%s has been silent for %.1f s, last heard at step %lld (%s)", name_of(w, i, name),
             now - p->heard, (long long)p->last.step, p->last.text);
}

static void judge_silence(Watch *w, double now) {
    double grace = w->group->rank == 0 ? 0 : 2 * w->tick; // rank 0's word comes first
    for (int i = 0; i < w->count; i++) {
        const Peer *p = &w->peers[i];
        bool silent = p->file >= 0 && !p->left && now - p->heard > w->limit + grace;
        if (silent) { announce_silence(w, i, now); }
    }
}

// That all wait for a rank which has stopped meanwhile.
static void judge_wait(Watch *w, int rank, const Message *m, double now) {
    char name[GROUP_HOST + 32];
    for (int i = 1; i < w->count; i++) {
        const Peer *p = &w->peers[i];
        if (!p->left && now - p->heard > 4 * w->tick) { announce_silence(w, i, now); }
    }
    announce(w,
             "no rank has gone on for %.1f s: %s waits at step %lld (%s), as all do; a GPU or the "
             "network hangs",
             w->limit, name_of(w, rank, name), (long long)m->step, m->text);
}

// Rank 0: judges what the ranks last said they do. A rank that works too long is stuck; ranks that
// wait are, once all wait, and then one that is steps behind is named first. (A rank that leaves
// may be what they waited for.)
static void judge_progress(Watch *w, double now) {
    Message mine = own_message(w);
    const Message *last = NULL;
    double longest = 0;
    char name[GROUP_HOST + 32];
    int rank = 0;
    bool all_wait = now - w->left > w->limit + 2 * w->tick;
    for (int r = 0; r < w->count; r++) {
        const Peer *p = &w->peers[r];
        const Message *m = r == 0 ? &mine : &p->last;
        double age = m->age + (r == 0 ? 0 : now - p->heard);
        if (r > 0 && p->left) { continue; }
        // by its own word alone: a rank that is not heard may long do something else
        bool stuck = m->doing == DOING_WORK && m->age > w->limit;
        all_wait = all_wait && m->doing == DOING_WAIT && age > w->limit + 2 * w->tick;
        if ((stuck && m->age > longest) || (all_wait && (last == NULL || m->step < last->step))) {
            last = m;
            rank = r;
            longest = stuck ? m->age : longest;
        }
    }
    if (longest > 0) {
        announce(w, "%s has not gone on for %.1f s at step %lld (%s)", name_of(w, rank, name),
                 longest, (long long)last->step, last->text);
    } else if (all_wait && last != NULL) {
        judge_wait(w, rank, last, now);
    }
}

static void run_probe(Watch *w) {
    Error err;
    pthread_mutex_lock(&w->mutex);
    bool ok = w->probe == NULL || w->probe(w->argument, &err);
    pthread_mutex_unlock(&w->mutex);
    if (!ok) { announce(w, "rank %d: %s", w->group->rank, err.text); }
}

// While this process was stopped, or starved, nobody could be heard: that time is left out.
static void leave_out(Watch *w, double seconds) {
    pthread_mutex_lock(&w->mutex);
    w->since += seconds;
    pthread_mutex_unlock(&w->mutex);
    for (int i = 0; i < w->count; i++) { w->peers[i].heard += seconds; }
}

static void listen_to_peers(Watch *w, struct pollfd *p, double until) {
    double left = fmax(0, until - wall_seconds());
    for (int i = 0; i < w->count; i++) {
        p[i] = (struct pollfd){.fd = w->peers[i].file, .events = POLLIN};
    }
    p[w->count] = (struct pollfd){.fd = w->wake[0], .events = POLLIN};
    if (poll(p, (nfds_t)w->count + 1, (int)ceil(1e3 * left)) <= 0) { return; }
    for (int i = 0; i < w->count; i++) {
        if (p[i].fd >= 0 && p[i].revents != 0) { receive(w, i); }
    }
}

// Rank 0 leaves last, so that someone watches until the end; the others wait for its goodbye.
static bool may_leave(Watch *w, bool *said) {
    const Message bye = {.kind = MESSAGE_BYE};
    pthread_mutex_lock(&w->mutex);
    bool alone = w->leaving, leaving = alone;
    pthread_mutex_unlock(&w->mutex);
    for (int i = 0; i < w->count; i++) {
        alone = alone && (w->peers[i].left || w->peers[i].file < 0);
    }
    if (leaving && !*said && (alone || w->group->rank != 0)) {
        send_all(w, &bye);
        *said = true;
    }
    return alone;
}

static void *watch_thread(void *argument) {
    Watch *w = argument;
    struct pollfd *p = calloc_or_die((size_t)w->count + 1, sizeof(*p));
    double last = wall_seconds(), next = last;
    bool said = false; // goodbye: nothing may follow it
    while (!may_leave(w, &said)) {
        double now = wall_seconds();
        if (now - last > w->tick + 1) { leave_out(w, now - last - w->tick); }
        last = now;
        if (now >= next) {
            Message m = own_message(w);
            if (!said) { send_all(w, &m); }
            judge_silence(w, now);
            if (w->group->rank == 0) { judge_progress(w, now); }
            run_probe(w);
            next = now + w->tick;
        }
        listen_to_peers(w, p, next);
    }
    free(p);
    return NULL;
}

Watch *watch_start(Group *g, double seconds) {
    Watch *w = calloc_or_die(1, sizeof(Watch));
    double tick = fmin(0.25, seconds / 16);
    *w = (Watch){.group = g,
                 .limit = seconds - 3 * tick, // so that all have ended by then
                 .tick = tick,
                 .count = g->rank == 0 ? g->ranks : 1,
                 .mutex = PTHREAD_MUTEX_INITIALIZER,
                 .mine = {.kind = MESSAGE_BEAT, .text = "starting"},
                 .since = wall_seconds()};
    w->peers = calloc_or_die((size_t)w->count, sizeof(Peer));
    for (int i = 0; i < w->count; i++) {
        w->peers[i] = (Peer){.file = g->peers[CHANNEL_WATCH][i],
                             .heard = w->since,
                             .last = {.doing = DOING_PAUSE, .text = "starting"}};
    }
    if (pipe(w->wake) != 0 || pthread_create(&w->thread, NULL, watch_thread, w) != 0) {
        die("the watchdog's thread cannot be started: %s", strerror(errno));
    }
    return w;
}

void watch_stop(Watch *w) {
    if (w == NULL) { return; }
    pthread_mutex_lock(&w->mutex);
    w->leaving = true;
    w->mine.doing = DOING_PAUSE; // the last save of another rank may take long
    snprintf(w->mine.text, sizeof(w->mine.text), "ending");
    pthread_mutex_unlock(&w->mutex);
    if (write(w->wake[1], "", 1) == 1) { pthread_join(w->thread, NULL); }
    close(w->wake[0]), close(w->wake[1]);
    for (int i = 0; i < w->count; i++) { w->group->peers[CHANNEL_WATCH][i] = w->peers[i].file; }
    free(w->peers);
    free(w);
}

void watch_lost(Watch *w, const char *fallback) {
    nanosleep(&(struct timespec){.tv_sec = 3}, NULL); // the watch's thread ends the process first
    if (w != NULL) { end_process(w, fallback); }
    complain("%s (exit status %d)", fallback, EXIT_LOST_RANK);
    _exit(EXIT_LOST_RANK);
}
