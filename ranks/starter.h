// The process that starts the ranks of its machine and waits for them: see launch.h.
#ifndef LLM8_STARTER_H
#define LLM8_STARTER_H

#include "ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

// The rank's environment variable with rank 0's listening socket.
#define STARTER_LISTENER "LLM8_LISTENER"

// Starts r->local_ranks ranks from r->rank on. listener: rank 0's socket, or -1. Returns the exit
// status.
int starter_run(const Ranks *r, int listener, char **argv);

#ifdef __cplusplus
}
#endif

#endif
