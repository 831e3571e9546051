#include "meet.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { IDENTITY_MAX = 1 << 16, HELLO_SECONDS = 5 };

typedef struct {
    char magic[8];
    int32_t rank, ranks, channel, identity_bytes;
    uint64_t process; // tells two processes of the same rank apart
    char host[GROUP_HOST];
} Hello;

typedef struct {
    char magic[8];
    int32_t ok;
    char text[sizeof(Error)];
} Welcome;

static const char magic[8] = "LLM8.c 1";

// Rank 0's view.
typedef struct {
    Group *group;
    const char *identity, *place; // where it listens
    uint64_t *process;            // [ranks]
    double until, seconds;
} Meeting;

static Hello own_hello(const Group *g, Channel channel, const char *identity) {
    Hello h = {.rank = g->rank, .ranks = g->ranks, .channel = channel};
    memcpy(h.magic, magic, sizeof(magic));
    if (gethostname(h.host, sizeof(h.host)) != 0) { strcpy(h.host, "?"); }
    h.host[sizeof(h.host) - 1] = '\0';
    h.process = (uint64_t)(1e9 * wall_seconds()) * 65536 + (uint64_t)(getpid() % 65536);
    h.identity_bytes = channel == CHANNEL_MAIN ? (int32_t)strlen(identity) + 1 : 0;
    return h;
}

// ---- rank 0 -------------------------------------------------------------------------------------

static void send_welcome(const Group *g, int newcomer, bool ok, const char *text) {
    Welcome w = {.ok = ok};
    memcpy(w.magic, magic, sizeof(magic));
    snprintf(w.text, sizeof(w.text), "%s", text);
    if (newcomer >= 0) { net_send(newcomer, &w, sizeof(w)); }
    for (int r = 1; r < g->ranks; r++) {
        int file = g->peers[CHANNEL_MAIN][r];
        if (file >= 0) { net_send(file, &w, sizeof(w)); } // who has gone needs no answer
    }
}

static bool refuse(Meeting *m, int newcomer, Error *err) {
    send_welcome(m->group, newcomer, false, err->text);
    if (newcomer >= 0) { close(newcomer); }
    return false;
}

// "rank 3", "ranks 2, 5-7", of those whose connections are not all there.
static void list_missing(const Group *g, char *out, size_t room) {
    int count = 0;
    size_t used = 0;
    char text[600] = "";
    for (int r = 1; r < g->ranks; r++) {
        int last = r;
        while (last < g->ranks && g->peers[CHANNELS - 1][last] < 0) { last++; }
        if (last == r) { continue; }
        if (used < sizeof(text) - 40) {
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%d", count ? ", " : "",
                                     r);
            if (last - r > 1) {
                used += (size_t)snprintf(text + used, sizeof(text) - used, "-%d", last - 1);
            }
        }
        count += last - r;
        r = last;
    }
    snprintf(out, room, "rank%s %s", count > 1 ? "s" : "", text);
}

// The first line in which two texts differ, of each.
static bool find_difference(const char *a, const char *b, char line_a[100], char line_b[100]) {
    while (*a != '\0' || *b != '\0') {
        size_t n = strcspn(a, "\n"), k = strcspn(b, "\n");
        if (n != k || memcmp(a, b, n) != 0) {
            snprintf(line_a, 100, "%.*s", (int)n, a);
            snprintf(line_b, 100, "%.*s", (int)k, b);
            return true;
        }
        a += n + (a[n] == '\n');
        b += k + (b[k] == '\n');
    }
    return false;
}

// What follows the hello on the main channel. A connection that breaks off is none.
static bool read_identity(Meeting *m, int file, const Hello *h, bool *broken, Error *err) {
    char theirs[100], ours[100], *text = malloc_or_die(IDENTITY_MAX);
    *broken = h->identity_bytes < 1 || h->identity_bytes > IDENTITY_MAX ||
              !net_receive(file, text, (size_t)h->identity_bytes, wall_seconds() + HELLO_SECONDS);
    bool differs = false;
    if (!*broken) {
        text[h->identity_bytes - 1] = '\0';
        differs = find_difference(text, m->identity, theirs, ours);
    }
    free(text);
    return !differs ||
           fail(
               err,
               "rank %d on %s runs something else: '%s', where rank 0 has '%s'; all ranks need the "
               "same program and options",
               h->rank, h->host, theirs, ours);
}

// A rank that came and died may come again.
static void forget_dead(Group *g, int rank) {
    bool dead = false;
    for (int c = 0; c < CHANNELS; c++) {
        dead = dead || (g->peers[c][rank] >= 0 && net_closed(g->peers[c][rank]));
    }
    for (int c = 0; dead && c < CHANNELS; c++) {
        if (g->peers[c][rank] >= 0) { close(g->peers[c][rank]); }
        g->peers[c][rank] = -1;
    }
}

static bool seat(Meeting *m, int file, const Hello *h, Error *err) {
    Group *g = m->group;
    if (h->ranks != g->ranks) {
        return fail(err, "rank %d on %s was started as one of %d ranks, rank 0 as one of %d",
                    h->rank, h->host, h->ranks, g->ranks);
    }
    if (h->rank < 1 || h->rank >= g->ranks) {
        return fail(err, "another process, on %s, says that it is rank %d of %d", h->host, h->rank,
                    h->ranks);
    }
    forget_dead(g, h->rank);
    int *place = &g->peers[h->channel][h->rank];
    bool other = h->channel != CHANNEL_MAIN && g->peers[CHANNEL_MAIN][h->rank] >= 0 &&
                 m->process[h->rank] != h->process;
    if (*place >= 0 || other) {
        return fail(err, "two processes say that they are rank %d: one on %s, one on %s", h->rank,
                    g->hosts[h->rank], h->host);
    }
    if (h->channel == CHANNEL_MAIN) {
        m->process[h->rank] = h->process;
        memcpy(g->hosts[h->rank], h->host, GROUP_HOST);
    } else if (m->process[h->rank] != h->process) {
        close(file); // the rest of one that is gone
        return true;
    }
    *place = file;
    return true;
}

// One more connection: a rank's, or a stranger's, which is sent away.
static bool admit(Meeting *m, int file, Error *err) {
    Hello h;
    bool broken = !net_receive(file, &h, sizeof(h), wall_seconds() + HELLO_SECONDS);
    if (!broken) { broken = memcmp(h.magic, magic, sizeof(magic)) != 0; }
    if (!broken) { broken = h.channel < 0 || h.channel >= CHANNELS; }
    h.host[GROUP_HOST - 1] = '\0';
    bool same = true;
    if (!broken && h.channel == CHANNEL_MAIN) { same = read_identity(m, file, &h, &broken, err); }
    if (broken) {
        warn("a connection to %s was not a rank's, and is ignored", m->place);
        close(file);
        return true;
    }
    return (same && seat(m, file, &h, err)) || refuse(m, file, err);
}

static bool is_whole(Group *g) {
    bool whole = true;
    for (int r = 1; r < g->ranks; r++) {
        for (int c = 0; c < CHANNELS; c++) { whole = whole && g->peers[c][r] >= 0; }
    }
    for (int r = 1; whole && r < g->ranks; r++) {
        forget_dead(g, r);
        whole = g->peers[0][r] >= 0;
    }
    return whole;
}

static bool receive_ranks(Meeting *m, int listener, Error *err) {
    double told = wall_seconds();
    char missing[640];
    while (!is_whole(m->group)) {
        double now = wall_seconds(), until = now + 10 < m->until ? now + 10 : m->until;
        int file = net_accept(listener, until);
        if (file >= 0) {
            if (!admit(m, file, err)) { return false; }
            continue;
        }
        list_missing(m->group, missing, sizeof(missing));
        if (wall_seconds() >= m->until) {
            fail(err, "%s of %d did not come to %s within %.0f s (--distributed-timeout)", missing,
                 m->group->ranks, m->place, m->seconds);
            return refuse(m, -1, err);
        }
        if (wall_seconds() - told >= 10) {
            warn("waiting at %s for %s of %d", m->place, missing, m->group->ranks);
            told = wall_seconds() + 50;
        }
    }
    send_welcome(m->group, -1, true, "");
    return true;
}

static bool meet_as_first(Group *g, const Ranks *r, int listener, const char *identity,
                          double seconds, Error *err) {
    char place[NET_NAME];
    if (listener < 0) { listener = net_listen(r->host, r->port, err); }
    if (listener < 0) { return false; }
    g->hosts = calloc_or_die((size_t)g->ranks, sizeof(*g->hosts));
    memcpy(g->hosts[0], own_hello(g, CHANNEL_MAIN, identity).host, GROUP_HOST);
    Meeting m = {.group = g,
                 .identity = identity,
                 .place = net_name(place, r->host, net_port(listener)),
                 .process = calloc_or_die((size_t)g->ranks, sizeof(uint64_t)),
                 .until = wall_seconds() + seconds,
                 .seconds = seconds};
    bool ok = receive_ranks(&m, listener, err);
    free(m.process);
    close(listener);
    return ok;
}

// ---- the others ---------------------------------------------------------------------------------

static bool await_welcome(const Group *g, const char *place, double until, Error *err) {
    Welcome w;
    if (!net_receive(g->peers[CHANNEL_MAIN][0], &w, sizeof(w), until)) {
        return fail(err, "rank 0 at %s gave no answer before all ranks had come: %s", place,
                    net_reason());
    }
    if (memcmp(w.magic, magic, sizeof(magic)) != 0) {
        return fail(err,
                    "what answers at %s is not rank 0 of an llm8.c run: are MASTER_ADDR and "
                    "MASTER_PORT right?",
                    place);
    }
    w.text[sizeof(w.text) - 1] = '\0';
    return w.ok || fail(err, "%s", w.text);
}

static bool meet_as_other(Group *g, const Ranks *r, const char *identity, double seconds,
                          Error *err) {
    char place[NET_NAME];
    double until = wall_seconds() + seconds;
    uint64_t process = own_hello(g, CHANNEL_MAIN, identity).process;
    net_name(place, r->host, r->port);
    for (int c = 0; c < CHANNELS; c++) { // all, before rank 0 can have a reason to leave
        g->peers[c][0] = net_connect(r->host, r->port, until, err);
        if (g->peers[c][0] < 0) { return false; }
    }
    for (int c = 0; c < CHANNELS; c++) {
        Hello h = own_hello(g, (Channel)c, identity);
        h.process = process;
        int file = g->peers[c][0];
        if (!net_send(file, &h, sizeof(h)) ||
            (c == CHANNEL_MAIN && !net_send(file, identity, (size_t)h.identity_bytes))) {
            break; // rank 0 says why
        }
    }
    return await_welcome(g, place, until + seconds / 8 + HELLO_SECONDS, err);
}

bool meet(Group *g, const Ranks *r, int listener, const char *identity, double seconds,
          Error *err) {
    *g = (Group){.rank = r->rank, .ranks = r->ranks, .local_rank = r->local_rank};
    int count = r->rank == 0 ? r->ranks : 1;
    for (int c = 0; c < CHANNELS && r->ranks > 1; c++) {
        g->peers[c] = malloc_or_die((size_t)count * sizeof(int));
        for (int i = 0; i < count; i++) { g->peers[c][i] = -1; }
    }
    bool ok = r->ranks == 1 || (r->rank == 0 ? meet_as_first(g, r, listener, identity, seconds, err)
                                             : meet_as_other(g, r, identity, seconds, err));
    if (!ok) { group_close(g); }
    return ok;
}
