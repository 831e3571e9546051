#include "batches.h"

#include "../run_data.h"

#include <stdlib.h>
#include <string.h>

// Memory from which arrays of numbers are taken one after another. If ints is NULL, the numbers are
// only counted.
typedef struct {
    int *ints;
    int64_t count;
} Arena;

static int *take(Arena *room, int64_t n) {
    int *array = room->ints != NULL ? room->ints + room->count : NULL;
    room->count += n;
    return array;
}

static void take_runs(Arena *room, TokenRuns *runs, int M) {
    runs->rows = take(room, M);
    runs->starts = take(room, M + 1);
    runs->runs = take(room, embedding_runs_size(M));
}

static Batch batch_in(const Batches *b, Arena *room) {
    Batch batch = {.inputs = take(room, b->tokens)};
    batch.targets = take(room, b->tokens);
    take_runs(room, &batch.runs, b->tokens);
    if (b->has_documents) {
        batch.documents = take(room, (int64_t)attention_documents_size(b->shape));
    }
    if (b->has_positions) {
        batch.positions = take(room, b->tokens);
        take_runs(room, &batch.position_runs, b->tokens);
    }
    return batch;
}

static size_t batch_bytes(const Batches *b) {
    Arena room = {0};
    batch_in(b, &room);
    return (size_t)room.count * sizeof(int);
}

void batches_plan(Batches *b, const Run *run, Plan *plan) {
    const Options *o = &run->options;
    AttentionShape shape = attention_shape_of(run, options_batch(o), o->seq_length);
    *b = (Batches){.shape = shape,
                   .tokens = shape.B * shape.T,
                   .vocab = run->config.vocab,
                   .has_documents = run_resets(run),
                   .has_positions = o->reset_position_ids && run->config.arch == ARCH_GPT2};
    plan_section(plan, "data", PHASE_ALWAYS);
    plan_buffer(plan, "tokens and their order", (int64_t)batch_bytes(b),
                (void **)&b->device.inputs);
}

void batches_start(Batches *b, Gpu *gpu) {
    b->gpu = gpu;
    b->device = batch_in(b, &(Arena){b->device.inputs, 0});
    for (int i = 0; i < BATCH_SLOTS; i++) {
        int *ints;
        CUDA_CHECK(cudaMallocHost((void **)&ints, batch_bytes(b)));
        memset(ints, 0, batch_bytes(b));
        b->staging[i] = batch_in(b, &(Arena){ints, 0});
        CUDA_CHECK(cudaEventCreateWithFlags(&b->staged[i], cudaEventDisableTiming));
    }
    b->counts = calloc_or_die((size_t)max64(b->vocab, b->shape.T) + 1, sizeof(int));
}

void batches_close(Batches *b) {
    for (int i = 0; i < BATCH_SLOTS; i++) {
        CUDA_CHECK(cudaFreeHost(b->staging[i].inputs));
        CUDA_CHECK(cudaEventDestroy(b->staged[i]));
    }
    free(b->counts);
}

Batch *batches_next(Batches *b) {
    Batch *s = &b->staging[b->turn];
    CUDA_CHECK(cudaEventSynchronize(b->staged[b->turn]));
    if (b->has_documents) { memset(s->documents, 0, (size_t)b->tokens * sizeof(int)); }
    return s;
}

void batches_send(Batches *b, int B, int T) {
    Batch *s = &b->staging[b->turn];
    embedding_sort_tokens(s->runs, s->inputs, b->tokens, b->vocab, b->counts);
    if (b->has_documents) {
        AttentionShape shape = b->shape;
        shape.B = B;
        shape.T = T;
        attention_share_work(b->gpu, shape, s->documents);
    }
    if (b->has_positions) {
        for (int i = 0; i < B * T; i++) { s->positions[i] = i % T - s->documents[i]; }
        embedding_sort_tokens(s->position_runs, s->positions, b->tokens, b->shape.T, b->counts);
    }
    CUDA_CHECK(cudaMemcpyAsync(b->device.inputs, s->inputs, batch_bytes(b), cudaMemcpyHostToDevice,
                               b->gpu->stream));
    CUDA_CHECK(cudaEventRecord(b->staged[b->turn], b->gpu->stream));
    b->turn = (b->turn + 1) % BATCH_SLOTS;
}
