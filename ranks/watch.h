// The wall-clock watchdog: a thread on every rank that tells rank 0 four times a second how far its
// rank is, and ends the process when some rank is lost. NCCL's own error query misses a rank that
// hangs.
//
// Rank 0 judges. A rank is lost when its connection closes without a goodbye (it died), when it has
// been silent for --distributed-timeout (stopped, or its machine is gone), or when its main thread
// has not gone on for as long while it was working (a file system that hangs). When all wait for
// each other for as long, a GPU or the network hangs. Rank 0 then tells every rank which rank at
// which step, and each prints that and exits with EXIT_LOST_RANK. Time in which the watching
// process itself was stopped does not count.
#ifndef LLM8_WATCH_H
#define LLM8_WATCH_H

#include "../base/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Watch Watch;
struct Group;

typedef enum {
    DOING_WORK,  // must end by itself
    DOING_WAIT,  // ends when the other ranks, or the GPU, go on
    DOING_PAUSE, // may take as long as it takes: a disk
} Doing;

// seconds: --distributed-timeout
Watch *watch_start(struct Group *group, double seconds);
// Says goodbye.
void watch_stop(Watch *w);

// What this rank's main thread begins to do, at which step. what: a string literal. w may be NULL.
void watch_beat(Watch *w, int64_t step, Doing doing, const char *what);

// Called as often; ends the run where it returns false (NCCL's asynchronous errors).
typedef bool WatchProbe(void *argument, Error *err);
void watch_probe(Watch *w, WatchProbe *probe, void *argument);

// For a thread that has met a closed connection: lets the watch say why, ends the process in any
// case.
void watch_lost(Watch *w, const char *fallback) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif

#endif
