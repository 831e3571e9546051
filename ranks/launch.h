// From one command line to the ranks of a run, before any of them touches a GPU.
//
// With --gpus N this process becomes the starter: it runs itself N times, as torchrun would, with
// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and waits. It
// passes SIGTERM, SIGINT and SIGUSR1 on; its exit status is that of the first rank that failed, or
// 128 plus its signal. That rank's message is shown first, then the others are ended. No rank
// outlives the starter: the kernel kills them with it.
//
// Under torchrun, srun or mpirun (ranks/ranks.h) the process is a rank at once.
#ifndef LLM8_LAUNCH_H
#define LLM8_LAUNCH_H

#include "group.h"
#include "ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns in every rank, with the group whole and options->rank, ->ranks and ->group set; the
// starter exits here. Ranks other than 0 print nothing but errors from here on. What needs no other
// rank (--list-checkpoints, --verify, --sample-only, and --plan, which plans for as many ranks as
// it says) stays one process. Dies with one line on every rank when the ranks do not come together.
void launch(Ranks *ranks, Group *group, Options *options, char **argv);

// For a program that is one process whatever it was started as.
void launch_refuse(const Options *options, const char *program);

#ifdef __cplusplus
}
#endif

#endif
