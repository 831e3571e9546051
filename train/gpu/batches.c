#include "batches.h"

#include "../../kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

static size_t batch_bytes(const Batches *b) {
    return (size_t)(4 * (int64_t)b->tokens + 1 + embedding_runs_size(b->tokens)) * sizeof(int);
}

static Batch batch_in(int *ints, int64_t M) {
    return (Batch){ints, ints + M, ints + 2 * M, ints + 3 * M, ints + 4 * M + 1};
}

void batches_plan(Batches *b, int tokens, int vocab, Plan *plan) {
    *b = (Batches){.tokens = tokens, .vocab = vocab};
    plan_section(plan, "data", PHASE_ALWAYS);
    plan_buffer(plan, "tokens and their order", (int64_t)batch_bytes(b),
                (void **)&b->device.inputs);
}

void batches_start(Batches *b, Gpu *gpu) {
    b->gpu = gpu;
    b->device = batch_in(b->device.inputs, b->tokens);
    for (int i = 0; i < BATCH_SLOTS; i++) {
        int *ints;
        CUDA_CHECK(cudaMallocHost((void **)&ints, batch_bytes(b)));
        memset(ints, 0, batch_bytes(b));
        b->staging[i] = batch_in(ints, b->tokens);
        CUDA_CHECK(cudaEventCreateWithFlags(&b->staged[i], cudaEventDisableTiming));
    }
    b->counts = calloc_or_die((size_t)b->vocab + 1, sizeof(int));
}

void batches_close(Batches *b) {
    for (int i = 0; i < BATCH_SLOTS; i++) {
        CUDA_CHECK(cudaFreeHost(b->staging[i].inputs));
        CUDA_CHECK(cudaEventDestroy(b->staged[i]));
    }
    free(b->counts);
}

Batch *batches_next(Batches *b) {
    CUDA_CHECK(cudaEventSynchronize(b->staged[b->turn]));
    return &b->staging[b->turn];
}

void batches_send(Batches *b) {
    Batch *s = &b->staging[b->turn];
    embedding_sort_tokens(s->inputs, b->tokens, b->vocab, b->counts, s->rows, s->starts, s->runs);
    CUDA_CHECK(cudaMemcpyAsync(b->device.inputs, s->inputs, batch_bytes(b), cudaMemcpyHostToDevice,
                               b->gpu->stream));
    CUDA_CHECK(cudaEventRecord(b->staged[b->turn], b->gpu->stream));
    b->turn = (b->turn + 1) % BATCH_SLOTS;
}
