// Which of the processes that train together this one is, as its starter says in the environment:
//
//   started by   variables
//   torchrun     RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; also --gpus, and anyone by hand
//   Open MPI     OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE ..._LOCAL_RANK ..._LOCAL_SIZE
//   Slurm        SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID
//
// The first of these that is set counts. Rank 0 is met at MASTER_ADDR:MASTER_PORT (two ports on
// where torchrun itself listens there: TORCHELASTIC_USE_AGENT_STORE=True); they may be left out on
// one machine, and under Slurm, where the step's first host and a port from the job's number stand
// in. --gpus N on each of several machines takes NNODES and NODE_RANK besides. What does not fit
// together is refused, naming the variables.
#ifndef LLM8_RANKS_H
#define LLM8_RANKS_H

#include "../model/options.h"
#include "net.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int rank, ranks;             // of all machines
    int local_rank, local_ranks; // of this one; 0: how many is not known
    char host[NET_HOST];         // where rank 0 is met
    int port;                    // 0: any free one, which the starter hands on
    const char *source;          // who started them
    bool starts;                 // this process is to start --gpus ranks, from `rank` on
} Ranks;

bool ranks_read(Ranks *r, const Options *options, Error *err);

// The GPU of a rank, of those that the process sees: where there is one, the starter has chosen it
// (srun --gpus-per-task 1, CUDA_VISIBLE_DEVICES).
bool ranks_device(const Ranks *r, int visible, int *device, Error *err);

#ifdef __cplusplus
}
#endif

#endif
