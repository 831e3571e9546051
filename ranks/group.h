// The ranks of a run: how the processes find each other over TCP (rendezvous), what they agree on,
// and the watchdog. What the GPUs exchange is in train/gpu/comm.h.
//
// Rank 0 listens at MASTER_ADDR and MASTER_PORT. Every other rank opens a connection for each
// channel and one for the watchdogs, sends its rank and the run's token on each, and tries this
// again until rank 0 answers. Rank 0 answers once all ranks have connected. Then all ranks compare
// their program and options with rank 0's. A rank of another run, or without the run's secret, has
// another token, and is refused. Nothing is encrypted, so the port must be reachable only inside
// the cluster.
//
// If rank 0 is not on the machine of MASTER_ADDR, it listens on its own machine. The first rank on
// the machine of MASTER_ADDR is then the redirector: while the ranks connect, it listens there,
// learns from rank 0 where rank 0 listens, and tells this to every rank that connects.
//
// Each rank has a thread, the watchdog. At least four times a second it tells rank 0 which step its
// rank has reached, and it ends the process when a rank is lost. (NCCL's own error query does not
// notice a rank that hangs.) Rank 0 decides that a rank is lost if
// - its connection closes without a goodbye: its process has died;
// - it has been silent for --distributed-timeout: it is stopped, or its machine is gone;
// - its main thread has worked on one thing for that time: a file system hangs; or
// - all ranks have waited for each other for that time: a GPU or the network hangs.
// Rank 0 then tells every rank which rank is lost and at which step. Each rank prints this and
// exits with EXIT_LOST_RANK. Time in which the watching process itself was stopped does not count.
#pragma once

#include "../base/common.h"

BEGIN_C

typedef struct Watch Watch; // the watchdog: the connections, and the thread that reads them

typedef struct {
    int rank, ranks; // index of this process; number of processes on all machines
    // index of this process on its machine; number of processes on this machine (0: not known)
    int local_rank, local_ranks;
    Watch *watch; // NULL: no other rank is connected, and the calls below return at once
} Group;

// Where the ranks of a run connect, and how they recognise each other.
enum { TOKEN = 512 };
typedef struct {
    char host[256]; // MASTER_ADDR
    int port;
    bool elsewhere;    // rank 0 may be on another machine than `host`
    char token[TOKEN]; // the same text in all ranks of a run
} Rendezvous;

// Opens rank 0's socket. If `host` is a loopback address, the socket listens on this address alone,
// else on all addresses of this machine. If *port is 0, a free port is chosen and stored there.
// Returns -1 if it fails; error_text() says why.
int group_listen(const char *host, int *port);

// Connects to the other ranks within `seconds`. This is also the time limit of the watchdog, which
// runs afterwards. The caller has set all fields of *g but `watch`. listener: rank 0's socket if it
// is open already, else -1. identity: a text that says what this rank runs; it must be the same on
// every rank. On failure every connected rank gets the reason, which names the ranks that are
// missing or differ.
bool group_open(Group *g, const Rendezvous *rendezvous, int listener, const char *identity,
                double seconds);
// Says goodbye to the other ranks, so that they do not treat the end of this rank as a loss.
// Returns when all ranks have said goodbye.
void group_close(Group *g);

// All ranks make the following calls (group_agree to group_text) in the same order, and on
// each channel from one thread. If another rank ends, the calls do not return: the watchdog ends
// this process too.
typedef enum { CHANNEL_MAIN, CHANNEL_SAVE, CHANNELS } Channel;

// Whether `ok` is true on every rank. If not, error_text() on every rank becomes the text of the
// first rank that failed, with its number in front. The call is also a barrier.
bool group_agree(const Group *g, Channel channel, bool ok);
// group_broadcast copies rank 0's bytes to all ranks. group_gather copies every rank's bytes,
// `mine`, into `all` [ranks * bytes] on rank 0.
void group_broadcast(const Group *g, Channel channel, void *data, size_t bytes);
void group_gather(const Group *g, Channel channel, const void *mine, size_t bytes, void *all);
// Returns rank 0's text, `mine`, on every rank; the caller frees it. Uses the main channel.
char *group_text(const Group *g, const char *mine);

typedef enum {
    ACTIVITY_WORK,  // must end within the time limit
    ACTIVITY_WAIT,  // ends when the other ranks, or the GPU, make progress
    ACTIVITY_PAUSE, // has no time limit: it waits for a disk
} Activity;

// Reports what the main thread begins to do, and at which step. what: a short text. w may be NULL.
void watch_beat(Watch *w, int64_t step, Activity activity, const char *what);

// Sets a probe (for NCCL's asynchronous errors): a function that a separate thread calls at least
// four times a second. A call may block. If a call returns false, the run ends. NULL: stops the
// calls, after waiting for one that is under way.
typedef bool WatchProbe(void *argument);
void watch_probe(Watch *w, WatchProbe *probe, void *argument);

// For a thread whose call failed because another rank ended: gives the watchdog time to report the
// reason, and then ends the process with `fallback` as the message.
void watch_lost(Watch *w, const char *fallback) __attribute__((noreturn));

END_C
