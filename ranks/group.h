// The ranks of a run as processes that know each other: connections over TCP from every rank to
// rank 0, and what they agree on over them. What the GPUs exchange is train/gpu/comm.h.
//
// Calls on a channel are made by all ranks in the same order, from one thread a channel. A rank
// that dies or hangs while others wait for it ends those too (ranks/watch.h), so that no call here
// returns without the others' part.
#ifndef LLM8_GROUP_H
#define LLM8_GROUP_H

#include "watch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CHANNEL_MAIN, CHANNEL_SAVE, CHANNEL_WATCH, CHANNELS } Channel;

enum { GROUP_HOST = 64 };

typedef struct Group {
    int rank, ranks; // 0 of 1: one process, and every call below is free
    int local_rank;
    int *peers[CHANNELS];      // rank 0: [ranks], its own -1; others: [1], rank 0
    char (*hosts)[GROUP_HOST]; // [ranks] where they run; known to rank 0
    Watch *watch;              // NULL: one process
} Group;

// True where ok is on every rank. Otherwise err is the same on all: the first such rank's, with its
// number in front. Also a barrier.
bool group_agree(Group *g, Channel channel, bool ok, Error *err);

// Rank 0's bytes to all / every rank's to rank 0's all[ranks * bytes].
void group_broadcast(Group *g, Channel channel, void *data, size_t bytes);
void group_gather(Group *g, Channel channel, const void *mine, size_t bytes, void *all);

// Says goodbye to the others, who then do not take this rank's end for a loss.
void group_close(Group *g);

#ifdef __cplusplus
}
#endif

#endif
