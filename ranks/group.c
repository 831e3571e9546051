#include "group.h"
#include "net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Before every message, so that ranks that are not at the same place are noticed.
typedef struct {
    uint32_t call, bytes;
} Header;

typedef enum { CALL_AGREE = 0x4c380001, CALL_BROADCAST, CALL_GATHER } Call;

static void lost(const Group *g, int rank) {
    char text[160];
    snprintf(text, sizeof(text), "rank %d has gone: %s", rank, net_reason());
    watch_lost(g->watch, text);
}

static int peer_of(const Group *g, Channel channel, int rank) {
    return g->peers[channel][g->rank == 0 ? rank : 0];
}

static void give(const Group *g, Channel channel, int rank, Call call, const void *data,
                 size_t bytes) {
    Header h = {call, (uint32_t)bytes};
    int file = peer_of(g, channel, rank);
    if (!net_send(file, &h, sizeof(h)) || !net_send(file, data, bytes)) { lost(g, rank); }
}

static void take(const Group *g, Channel channel, int rank, Call call, void *data, size_t bytes) {
    Header h;
    int file = peer_of(g, channel, rank);
    if (!net_receive(file, &h, sizeof(h), NET_FOREVER)) { lost(g, rank); }
    if (h.call != call || h.bytes != bytes) {
        die("rank %d is at another place in the program: it sent message %x of %u bytes where %x "
            "of %zu was due",
            rank, h.call, h.bytes, call, bytes);
    }
    if (!net_receive(file, data, bytes, NET_FOREVER)) { lost(g, rank); }
}

typedef struct {
    uint32_t ok;
    Error err;
} Verdict;

bool group_agree(Group *g, Channel channel, bool ok, Error *err) {
    if (g == NULL || g->ranks == 1) { return ok; }
    Verdict verdict = {.ok = ok}, theirs;
    if (!ok && err != NULL) { fail(&verdict.err, "rank %d: %s", g->rank, err->text); }
    if (g->rank != 0) {
        give(g, channel, 0, CALL_AGREE, &verdict, sizeof(verdict));
        take(g, channel, 0, CALL_AGREE, &verdict, sizeof(verdict));
    } else {
        for (int r = 1; r < g->ranks; r++) {
            take(g, channel, r, CALL_AGREE, &theirs, sizeof(theirs));
            if (verdict.ok && !theirs.ok) { verdict = theirs; }
        }
        for (int r = 1; r < g->ranks; r++) {
            give(g, channel, r, CALL_AGREE, &verdict, sizeof(verdict));
        }
    }
    return verdict.ok || fail(err, "%s", verdict.err.text);
}

void group_broadcast(Group *g, Channel channel, void *data, size_t bytes) {
    if (g == NULL || g->ranks == 1) { return; }
    if (g->rank != 0) { take(g, channel, 0, CALL_BROADCAST, data, bytes); }
    for (int r = 1; g->rank == 0 && r < g->ranks; r++) {
        give(g, channel, r, CALL_BROADCAST, data, bytes);
    }
}

void group_gather(Group *g, Channel channel, const void *mine, size_t bytes, void *all) {
    if (g == NULL || g->rank == 0) { memcpy(all, mine, bytes); }
    if (g == NULL || g->ranks == 1) { return; }
    if (g->rank != 0) { give(g, channel, 0, CALL_GATHER, mine, bytes); }
    for (int r = 1; g->rank == 0 && r < g->ranks; r++) {
        take(g, channel, r, CALL_GATHER, (char *)all + (size_t)r * bytes, bytes);
    }
}

void group_close(Group *g) {
    if (g == NULL) { return; }
    watch_stop(g->watch);
    for (int c = 0; c < CHANNELS && g->ranks > 1; c++) {
        for (int i = 0; i < (g->rank == 0 ? g->ranks : 1); i++) {
            if (g->peers[c][i] >= 0) { close(g->peers[c][i]); }
        }
        free(g->peers[c]);
    }
    free(g->hosts);
    *g = (Group){.ranks = 1};
}
