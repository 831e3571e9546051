// Copies the tokens of micro-batches to the device: the host fills one pinned buffer while the
// device still reads the other.
#pragma once

#include "../../kernels/kernels.h"
#include "network.h"

BEGIN_C

enum { BATCH_SLOTS = 2 };

typedef struct {
    int *inputs, *targets; // [M]
    TokenRuns runs;        // runs of equal inputs, for the embedding's gradient
    // NULL unless attention or positions restart at each document.
    int *documents; // AttentionShape.documents: the caller may set the starts [M], which are 0 at
                    // first; batches_send sets the rest
    // NULL unless positions restart at each document and the model has a table of positions.
    int *positions; // [M]
    TokenRuns position_runs;
} Batch;

typedef struct {
    Gpu *gpu;
    AttentionShape shape; // shape of a whole micro-batch
    int tokens, vocab;    // M, V
    bool has_documents, has_positions;
    Batch device;                    // its arrays lie in one buffer, which begins at device.inputs
    Batch staging[BATCH_SLOTS];      // pinned
    cudaEvent_t staged[BATCH_SLOTS]; // completes when the device has read this buffer
    int turn;
    int *counts; // [max(T,V)+1], host: scratch of the counting sort of tokens or positions
} Batches;

void batches_plan(Batches *b, const Run *run, Plan *plan);
// Call it after the plan has its memory.
void batches_start(Batches *b, Gpu *gpu);
void batches_close(Batches *b);

// Returns the buffer to fill next. Waits until the device has read the buffer's old content.
Batch *batches_next(Batches *b);
// Enqueues the copy of the buffer that batches_next returned, which holds B sequences of T tokens.
void batches_send(Batches *b, int B, int T);

END_C
