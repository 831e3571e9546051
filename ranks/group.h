// The ranks of a run as processes that know each other: how they find each other over TCP, what
// they agree on then, and the watchdog. What the GPUs exchange is train/gpu/comm.h.
//
// Rank 0 listens; every other rank connects to it and says which rank it is. Once all have come
// and run the same program with the same options, the group is whole. Each side of a connection
// proves that it has the ranks' secret, where they have one. Nothing is encrypted or signed after
// that, so the port belongs inside a cluster. A message that no rank would send ends the run.
//
// A thread of each rank reads its connections. It is the watchdog: it tells rank 0 how far its rank
// is, four times a second, and ends the process when some rank is lost. NCCL's own error query
// misses a rank that hangs. Rank 0 judges. A rank is lost when its connection closes without a
// goodbye (it died), when it has been silent for --distributed-timeout (it is stopped, or its
// machine is gone), or when its main thread has worked at one thing for as long (a file system that
// hangs). When all ranks wait for each other for as long, a GPU or the network hangs. Rank 0 then
// tells every rank which rank at which step, and each prints that and exits with EXIT_LOST_RANK.
// Time in which the watching process itself was stopped does not count.
#pragma once

#include "../base/common.h"

BEGIN_C

typedef struct Watch Watch; // the connections, and the thread that reads them

typedef struct {
    int rank, ranks;             // this process, and how many there are on all machines
    int local_rank, local_ranks; // of this machine; local_ranks is 0 where it is not known
    Watch *watch;                // NULL: no other rank is connected, and every call below is free
} Group;

// A socket on which rank 0 listens; *port 0 becomes any free one. An address, or localhost, is
// listened on alone, and so is a name's. Where the name means none of this machine's addresses
// here, or a loopback one (Debian's own name is 127.0.1.1), others know it by another address, and
// all are listened on. -1: err says why.
int group_listen(const char *host, int *port);

// 128 random bits: a secret.
void group_draw(uint64_t number[2]);

// Meets the others at host:port within `seconds`, which is the watchdog's limit from then on.
// g: its numbers are set. listener: rank 0's, where there is one already, else -1. secret: 0, where
// there is none. identity: lines of text, the same on every rank, that say what it runs. On failure
// every rank that came gets the reason, which names the ranks that are missing or differ.
bool group_open(Group *g, const char *host, int port, int listener, const uint64_t secret[2],
                const char *identity, double seconds);
// Says goodbye to the others, who then do not take this rank's end for a loss. Rank 0 leaves last.
void group_close(Group *g);

// All ranks make these calls in the same order, from one thread a channel. No rank's end makes them
// return: it ends this process too.
typedef enum { CHANNEL_MAIN, CHANNEL_SAVE, CHANNELS } Channel;

// True where ok is on every rank. Otherwise err is the same on all: the first such rank's, with its
// number in front. Also a barrier.
bool group_agree(const Group *g, Channel channel, bool ok);
// Rank 0's bytes to all / every rank's to rank 0's all[ranks * bytes].
void group_broadcast(const Group *g, Channel channel, void *data, size_t bytes);
void group_gather(const Group *g, Channel channel, const void *mine, size_t bytes, void *all);

typedef enum {
    DOING_WORK,  // must end within the time limit
    DOING_WAIT,  // ends when the other ranks, or the GPU, get on
    DOING_PAUSE, // has no time limit: a disk
} Doing;

// What this rank's main thread begins to do, at which step. what: a short text. w may be NULL.
void watch_beat(Watch *w, int64_t step, Doing doing, const char *what);

// Called four times a second, in a thread of its own, where it may block; ends the run where it
// returns false (NCCL's asynchronous errors). NULL: no more; waits for a call that is being made.
typedef bool WatchProbe(void *argument);
void watch_probe(Watch *w, WatchProbe *probe, void *argument);

// For a thread whose call failed because another rank ended: lets the watch say why, and ends the
// process in any case.
void watch_lost(Watch *w, const char *fallback) __attribute__((noreturn));

END_C
