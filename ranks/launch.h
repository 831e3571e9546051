// From one command line to the ranks of a run, before any of them touches a GPU. Which of the
// processes that train together this one is, its starter says in the environment:
//
//   started by   variables
//   torchrun     RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; also anyone by hand
//   Open MPI     OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE ..._LOCAL_RANK ..._LOCAL_SIZE
//   Slurm        SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID
//
// The first of these that is set counts. Rank 0 is met at MASTER_ADDR:MASTER_PORT (two ports on
// where torchrun itself listens there: TORCHELASTIC_USE_AGENT_STORE=True); they may be left out on
// one machine, and under Slurm, where the step's first host and a port from the job's number stand
// in. LLM8_SECRET, 32 hexadecimal digits, is the ranks' secret. What does not fit together is
// refused, naming the variables.
//
// With --gpus N, where none is set, this process is the starter: it draws a secret, forks N ranks
// and waits. On each of several machines it takes NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT
// besides, and LLM8_SECRET. It passes the stop_signals on. When a rank fails it says which and how,
// and ends the others; its exit status is that of the first rank that failed, or 128 plus its
// signal. No rank outlives the starter: the kernel kills them with it.
#pragma once

#include "../model/options.h"
#include "group.h"

BEGIN_C

// What asks a run to save and to leave after the present step.
enum { STOP_SIGNALS = 5 };
extern const int stop_signals[STOP_SIGNALS];

// What the environment and --gpus say of the ranks, before they meet.
typedef struct {
    Group group;
    char host[256];     // where rank 0 is met
    int port;           // 0: any free one
    uint64_t secret[2]; // the ranks' (LLM8_SECRET, or the starter's); 0: none
    const char *source; // who started them
    bool starts;        // this process is to start --gpus ranks, from group.rank on
} Ranks;

bool ranks_read(Ranks *r, const Options *options);

// The GPU of a rank, of those that the process sees: where there is one, the starter has chosen it
// (srun --gpus-per-task 1, CUDA_VISIBLE_DEVICES).
bool ranks_device(const Group *g, int visible, int *device);

// Returns in every rank, with the group whole; the starter exits here. Ranks other than 0 print
// nothing but errors from here on. What needs no other rank (--list-checkpoints, --verify,
// --sample-only, and --plan, which plans for as many ranks as it says) stays one process. Dies with
// one line on every rank when the ranks do not come together.
void launch(Group *group, const Options *options);

// For a program that is one process whatever it was started as.
void launch_refuse(Group *group, const Options *options);

END_C
