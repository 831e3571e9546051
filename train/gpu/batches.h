// A micro-batch's tokens on their way to the device: the host fills one pinned buffer while the
// device still reads the other.
#pragma once

#include "../../kernels/gpu.h"
#include "../../model/plan.h"

BEGIN_C

enum { BATCH_SLOTS = 2 };

// A micro-batch's tokens, and their order for the embedding's gradient (kernels.h).
typedef struct {
    int *inputs, *targets; // [M]
    int *rows, *starts;    // [M], [M+1]
    int *runs;             // [embedding_runs_size]
} Batch;

typedef struct {
    Gpu *gpu;
    int tokens, vocab;               // M, V
    Batch device;                    // all of it in one buffer, which begins at device.inputs
    Batch staging[BATCH_SLOTS];      // pinned
    cudaEvent_t staged[BATCH_SLOTS]; // recorded when a staging buffer has been read
    int turn;
    int *counts; // [V+1], host
} Batches;

void batches_plan(Batches *b, int tokens, int vocab, Plan *plan);
// Once the plan has its memory.
void batches_start(Batches *b, Gpu *gpu);
void batches_close(Batches *b);

// The buffer to fill next; waits until the device has read what was in it.
Batch *batches_next(Batches *b);
// Enqueues its copy to the device.
void batches_send(Batches *b);

END_C
