// Finds out which rank of a run this process is, or starts the ranks (--gpus), before a GPU is
// used. A launcher, such as torchrun, says in the environment which rank a process is; launch.c has
// a table of launchers and their variables. The ranks connect at MASTER_ADDR:MASTER_PORT. (If
// TORCHELASTIC_USE_AGENT_STORE is True, torchrun itself listens on that port: the ranks' port is
// higher by 2, and rank 0 may be on another machine.) MASTER_ADDR may be unset if all ranks are on
// one machine, and under Slurm, where the step's first host is used. If MASTER_PORT is unset, the
// port is computed from the variables that identify the run, or is 29500 if none of these is set.
// The ranks' token (group.h) consists of the variables that identify the run and LLM8_SECRET, which
// may be any text. Variables that contradict each other are refused; the error names them.
//
// With --gpus N, if no launcher has set its variables, this process is the launcher: it draws a
// secret, forks N ranks and waits. For a run on several machines, such a launcher is started on
// each. It then needs NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, and uses LLM8_SECRET instead
// of drawing a secret. A launcher passes the stop_signals on to its ranks. When a rank fails, the
// launcher says which rank and how, and ends the other ranks; the launcher's exit status is that of
// the first rank that failed, or 128 plus that rank's signal. If the launcher dies, the kernel
// kills its ranks.
#pragma once

#include "../model/options.h"
#include "group.h"

BEGIN_C

// The signals after which a run finishes the present step, saves, and ends.
enum { STOP_SIGNALS = 6 };
extern const int stop_signals[STOP_SIGNALS];

// What the environment and --gpus say about the ranks, before the rendezvous.
typedef struct {
    Group group;
    Rendezvous rendezvous; // port 0: any free port
    const char *source;    // what set the rank, for messages: "torchrun", "srun", ...
    bool starts;           // this process is to start --gpus ranks, from group.rank on
} Ranks;

bool ranks_read(Ranks *r, const Options *options);

// Finds this rank's GPU among the `visible` GPUs that the process sees. If the process sees only
// one GPU, the launcher has chosen it, and it is this rank's GPU (srun --gpus-per-task 1,
// CUDA_VISIBLE_DEVICES).
bool ranks_device(const Group *g, int visible, int *device);

// If this process is the launcher, starts the ranks and does not return. In each rank the call
// returns when all ranks have connected; if one does not connect, each rank dies with one line.
// From then on, ranks other than 0 print only errors and warnings. --list-checkpoints,
// --sample-only and --plan need no other rank and stay one process. With --plan, *group has the
// number of ranks to plan for.
void launch(Group *group, const Options *options);

// Sets *group in a program that is always one process. Dies if the process is one of several ranks.
void launch_refuse(Group *group, const Options *options);

END_C
