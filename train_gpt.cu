// The GPU trainer: GPT-2 and Llama in BF16 with FP32 master weights, on one GPU. The functions of
// train_gpt.c in the same order, over a stream: a step is enqueued whole, and its loss and norm are
// read while the next one runs, so that the device never waits for the host.
//
// Shapes: B sequences of T tokens, M = B * T, C channels, L blocks, H heads, G key/value heads, D
// head size, N = (H + 2G) * D, F feed-forward, V vocabulary, P padded vocabulary. Activations and
// their gradients are BF16, statistics FP32.
#include "kernels/attention.h"
#include "kernels/cpu.h"
#include "kernels/gemm.h"
#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "kernels/verify.h"
#include "train/fit.h"
#include "train/plan.h"
#include "train/run.h"
#include "train/schedule.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// What a block keeps for its backward pass. With --recompute, blocks share the buffers that are
// computed again.
typedef struct {
    Bf16 *residual;       // [M,C] its input
    Bf16 *norm1;          // [M,C]
    float *mean1, *rstd1; // [M]
    Bf16 *qkv;            // [M,N] rotated
    Bf16 *attention;      // [M,H*D]
    float *lse;           // [B,H,T]
    Bf16 *residual_mid;   // [M,C] after attention
    Bf16 *norm2;          // [M,C]
    float *mean2, *rstd2; // [M]
    Bf16 *fc1;            // [M,F], Llama [M,2F]
    Bf16 *activated;      // [M,F]
} Block;

// A micro-batch's tokens, and their order for the embedding's gradient.
typedef struct {
    int *inputs, *targets; // [M]
    int *rows, *starts;    // [M], [M+1]
    int *runs;             // [1]
} Batch;

// A step's results on their way to the host.
typedef struct {
    StepState *state; // pinned
    double lr;
    cudaEvent_t begin, end;
    bool follows; // directly on the step before
} Pending;

enum {
    SLOTS = 2,  // batches that the host fills while the device works
    RESULTS = 3 // steps whose events are still of use: the one on its way, and the two before
};

typedef struct {
    Run run;
    Gpu gpu;
    Plan plan;
    void *memory;
    Bucket whole; // the part of the parameter space this rank holds: all of it

    Bf16 *weights;
    float *master;
    void *gradients;            // gradient_type
    void *exp_avg, *exp_avg_sq; // moment_type
    GpuType gradient_type, moment_type;
    uint8_t *decay; // a flag for each PARAM_ALIGN elements
    StepState *state;
    double *norm_scratch;

    Batch batch;               // on the device, one buffer from batch.inputs on
    Batch staging[SLOTS];      // pinned
    cudaEvent_t staged[SLOTS]; // when a staging buffer has been read
    int staging_turn;
    int *token_counts; // [V+1], host

    Block *blocks;      // [L]
    Bf16 *residual_out; // [M,C] after the last block
    Bf16 *norm_out;     // [M,C]
    float *mean_out, *rstd_out;
    Bf16 *logits;  // [chunk_rows,P]
    float *losses; // [M]
    float *rope;   // [T,D]
    int chunk_rows;

    Bf16 *d_residual;  // [M,C]
    Bf16 *d_norm;      // [M,C], and d_attention [M,H*D]: never alive together
    Bf16 *d_wide;      // d_fc1 [M,F or 2F], then d_qkv [M,N]
    Bf16 *d_activated; // [M,F]
    float *partial_sums;

    cudaGraphExec_t graphs[2]; // of a micro-step: the first of a step, the others
    bool warm[2];              // has run once, so that its plans are made
    Pending pending[RESULTS];
    int64_t enqueued; // steps enqueued by this process
    bool waiting;     // the last one has not been reported yet
    char *snapshot;   // host: master, moments, weights
} Trainer;

// ---- memory -----------------------------------------------------------------------------------

#define PLAN(t, category, name, count, pointer)                                             \
    plan_buffer(&(t)->plan, category, name, (int64_t)(count) * (int64_t)sizeof(*(pointer)), \
                (void **)&(pointer))

static void plan_state(Trainer *t) {
    const Options *o = &t->run.options;
    int64_t size = t->run.layout.size;
    bool sums = run_micro_batches(&t->run) > 1; // one micro-batch's gradients need no wider sum
    bool wide = o->grad_accum_dtype == GRADIENT_FP32 ||
                (o->grad_accum_dtype == GRADIENT_AUTO && sums);
    t->gradient_type = wide ? TYPE_F32 : TYPE_BF16;
    t->moment_type = o->adam_dtype == STATE_FP32 ? TYPE_F32 : TYPE_BF16;
    int64_t moment_bytes = size * gpu_type_bytes(t->moment_type);
    PLAN(t, "weights", "weights, BF16", size, t->weights);
    PLAN(t, "weights", "master weights", size, t->master);
    plan_buffer(&t->plan, "gradients", "gradients", size * gpu_type_bytes(t->gradient_type),
                &t->gradients);
    plan_buffer(&t->plan, "optimizer", "first moment", moment_bytes, &t->exp_avg);
    plan_buffer(&t->plan, "optimizer", "second moment", moment_bytes, &t->exp_avg_sq);
    PLAN(t, "optimizer", "decay flags", size / PARAM_ALIGN, t->decay);
    PLAN(t, "optimizer", "step state", 1, t->state);
    PLAN(t, "optimizer", "norm scratch", SUM_BLOCKS, t->norm_scratch);
}

// One of a block's buffers.
typedef struct {
    const char *name;
    size_t field;   // of Block
    int recomputed; // the least --recompute that does not keep it
    int64_t bytes;
} BlockBuffer;

enum { BLOCK_BUFFERS = 13 };

static void list_block_buffers(const ModelConfig *c, int64_t M, BlockBuffer list[BLOCK_BUFFERS]) {
    int64_t C = 2 * c->channels, heads = 2 * (int64_t)c->num_heads * c->head_size, statistic = 4;
    const int never = RECOMPUTE_BLOCK + 1;
    const BlockBuffer rows[BLOCK_BUFFERS] = {
        {"residual", offsetof(Block, residual), never, M * C},
        {"norm1", offsetof(Block, norm1), RECOMPUTE_ACTIVATIONS, M * C},
        {"norm1 mean", offsetof(Block, mean1), RECOMPUTE_BLOCK, M * statistic},
        {"norm1 rstd", offsetof(Block, rstd1), RECOMPUTE_BLOCK, M * statistic},
        {"qkv", offsetof(Block, qkv), RECOMPUTE_BLOCK, M * 2 * qkv_rows(c)},
        {"attention", offsetof(Block, attention), RECOMPUTE_BLOCK, M * heads},
        {"log-sum-exp", offsetof(Block, lse), RECOMPUTE_BLOCK, M * statistic * c->num_heads},
        {"residual mid", offsetof(Block, residual_mid), RECOMPUTE_BLOCK, M * C},
        {"norm2", offsetof(Block, norm2), RECOMPUTE_ACTIVATIONS, M * C},
        {"norm2 mean", offsetof(Block, mean2), RECOMPUTE_BLOCK, M * statistic},
        {"norm2 rstd", offsetof(Block, rstd2), RECOMPUTE_BLOCK, M * statistic},
        {"fc1", offsetof(Block, fc1), RECOMPUTE_BLOCK, M * 2 * fc1_rows(c)},
        {"activated", offsetof(Block, activated), RECOMPUTE_ACTIVATIONS, M * 2 * c->ffn},
    };
    memcpy(list, rows, sizeof(rows));
}

static void **block_field(Block *b, const BlockBuffer *buffer) {
    return (void **)((char *)b + buffer->field);
}

// Every block's own buffers, and once, in `shared`, those that are computed again.
static void plan_blocks(Trainer *t, Block *shared, int64_t M) {
    BlockBuffer list[BLOCK_BUFFERS];
    list_block_buffers(&t->run.config, M, list);
    for (int i = 0; i < BLOCK_BUFFERS; i++) {
        if (t->run.options.recompute >= list[i].recomputed) {
            plan_buffer(&t->plan, "one block's activations", list[i].name, list[i].bytes,
                        block_field(shared, &list[i]));
            continue;
        }
        for (int l = 0; l < t->run.config.num_layers; l++) {
            plan_buffer(&t->plan, "every block's activations", list[i].name, list[i].bytes,
                        block_field(&t->blocks[l], &list[i]));
        }
    }
}

// After plan_assign: the blocks learn where the shared buffers are.
static void share_recomputed(Trainer *t, Block *shared) {
    BlockBuffer list[BLOCK_BUFFERS];
    list_block_buffers(&t->run.config, 1, list);
    for (int l = 0; l < t->run.config.num_layers; l++) {
        for (int i = 0; i < BLOCK_BUFFERS; i++) {
            void **field = block_field(&t->blocks[l], &list[i]);
            if (*field == NULL) { *field = *block_field(shared, &list[i]); }
        }
    }
}

static AttentionShape attention_shape(const Trainer *t, int B, int T) {
    const ModelConfig *c = &t->run.config;
    return {B, T, c->num_heads, c->num_groups, c->head_size, t->run.options.deterministic};
}

static size_t batch_ints(int64_t M) {
    return (size_t)(4 * M + 2);
}

static Batch batch_in(int *ints, int64_t M) {
    return {ints, ints + M, ints + 2 * M, ints + 3 * M, ints + 4 * M + 1};
}

static void plan_activations(Trainer *t, Block *shared) {
    const Options *o = &t->run.options;
    const ModelConfig *c = &t->run.config;
    const int64_t logits_bytes = (int64_t)4 << 30;
    int64_t B = o->micro_batch_size, T = c->seq_length, M = B * T, C = c->channels,
            P = c->padded_vocab;
    int64_t heads = (int64_t)c->num_heads * c->head_size;
    int64_t wide = max64(fc1_rows(c), qkv_rows(c));
    t->chunk_rows = (int)M;
    while (t->chunk_rows > 128 && t->chunk_rows * P * 2 > logits_bytes + (logits_bytes >> 4)) {
        t->chunk_rows = (t->chunk_rows + 1) / 2;
    }
    if (o->lm_head_chunk_tokens > 0) { t->chunk_rows = (int)min64(M, o->lm_head_chunk_tokens); }
    t->blocks = (Block *)calloc_or_die((size_t)c->num_layers, sizeof(Block));
    plan_buffer(&t->plan, "data", "tokens and their order", (int64_t)(batch_ints(M) * sizeof(int)),
                (void **)&t->batch.inputs);
    plan_blocks(t, shared, M);
    PLAN(t, "activations", "last residual", M * C, t->residual_out);
    PLAN(t, "activations", "last norm", M * C, t->norm_out);
    PLAN(t, "activations", "last norm's mean", M, t->mean_out);
    PLAN(t, "activations", "last norm's rstd", M, t->rstd_out);
    PLAN(t, "activations", "losses", M, t->losses);
    PLAN(t, "activations", "rotary table", T * c->head_size, t->rope);
    PLAN(t, "scratch", "d residual", M * C, t->d_residual);
    PLAN(t, "scratch", "d norm, d attention", M * max64(C, heads), t->d_norm);
    plan_buffer(&t->plan, "scratch", "partial sums",
                (int64_t)partial_sums_bytes(max64(3 * C, wide)), (void **)&t->partial_sums);
    t->gpu.workspace_bytes = (size_t)64 << 20;
    plan_buffer(&t->plan, "scratch", "workspace of products", (int64_t)t->gpu.workspace_bytes,
                &t->gpu.workspace);
    t->plan.phase = PHASE_HEAD;
    PLAN(t, "scratch of the head", "logits", t->chunk_rows * P, t->logits);
    t->plan.phase = PHASE_BLOCKS;
    PLAN(t, "scratch of the blocks", "d fc1, d qkv", M * wide, t->d_wide);
    bool llama = c->arch == ARCH_LLAMA; // GPT-2's product writes d fc1 itself
    PLAN(t, "scratch of the blocks", "d activated", llama ? M * c->ffn : 0, t->d_activated);
    t->gpu.attention_bytes = attention_workspace(attention_shape(t, (int)B, (int)T),
                                                 (size_t)o->workspace_mib << 20);
    plan_buffer(&t->plan, "scratch of the blocks", "workspace of attention",
                (int64_t)t->gpu.attention_bytes, &t->gpu.attention_workspace);
    t->plan.phase = PHASE_ALWAYS;
}

// The whole plan of a run, from its options alone.
static bool trainer_plan(Trainer *t, const Options *options, Block *shared, Error *err) {
    *t = Trainer();
    if (!run_configure(&t->run, options, NUMBER_BF16, err)) { return false; }
    *shared = Block();
    t->whole = {0, t->run.layout.size};
    plan_state(t);
    plan_activations(t, shared);
    return true;
}

static int64_t planned_bytes(const Options *options) {
    Trainer *t = (Trainer *)malloc_or_die(sizeof(Trainer));
    Block shared;
    int64_t bytes = trainer_plan(t, options, &shared, NULL) ? t->plan.bytes : INT64_MAX;
    run_free_configuration(&t->run);
    free(t->blocks);
    plan_free(&t->plan);
    free(t);
    return bytes;
}

// --plan: needs no GPU.
static void print_plan(const Options *options) {
    Trainer *t = (Trainer *)malloc_or_die(sizeof(Trainer));
    Block shared;
    Error err;
    size_t free_bytes, memory = (size_t)(options->device_memory_gib * 0x1p30);
    if (memory == 0 && cudaMemGetInfo(&free_bytes, &memory) != cudaSuccess) {
        memory = (size_t)80 << 30; // no GPU here: an 80 GB one
    }
    if (!trainer_plan(t, options, &shared, &err)) { die("%s", err.text); }
    options_print(&t->run.options, stdout);
    precision_print(&t->run.precision);
    plan_print(&t->plan, stdout);
    fit_print(options, planned_bytes, (int64_t)memory);
    exit(EXIT_SUCCESS);
}

// Before anything is allocated or read.
static void check_memory(const Trainer *t) {
    size_t free_bytes, all_bytes;
    char need[32], have[32], advice[128];
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (t->plan.bytes + FIT_OVERHEAD_BYTES / 2 > (int64_t)free_bytes) {
        fit_advice(&t->run.options, planned_bytes, (int64_t)free_bytes, advice);
        die("the run needs %s of device memory, %s are free: try %s (--plan lists it)",
            format_bytes(need, (double)t->plan.bytes), format_bytes(have, (double)free_bytes),
            advice);
    }
}

static void allocate(Trainer *t, Block *shared) {
    CUDA_CHECK(cudaMalloc(&t->memory, (size_t)t->plan.bytes));
    CUDA_CHECK(cudaMemsetAsync(t->memory, 0, (size_t)t->plan.bytes, t->gpu.stream));
    plan_assign(&t->plan, t->memory);
    share_recomputed(t, shared);
    int64_t M = (int64_t)t->run.options.micro_batch_size * t->run.config.seq_length;
    t->batch = batch_in(t->batch.inputs, M);
    for (int i = 0; i < SLOTS; i++) {
        int *ints;
        CUDA_CHECK(cudaMallocHost((void **)&ints, batch_ints(M) * sizeof(int)));
        memset(ints, 0, batch_ints(M) * sizeof(int));
        t->staging[i] = batch_in(ints, M);
        CUDA_CHECK(cudaEventCreateWithFlags(&t->staged[i], cudaEventDisableTiming));
    }
    for (int i = 0; i < RESULTS; i++) {
        CUDA_CHECK(cudaMallocHost((void **)&t->pending[i].state, sizeof(StepState)));
        CUDA_CHECK(cudaEventCreate(&t->pending[i].begin));
        CUDA_CHECK(cudaEventCreate(&t->pending[i].end));
    }
    t->token_counts = (int *)calloc_or_die((size_t)t->run.config.vocab + 1, sizeof(int));
}

// Host memory for checkpoints, pinned where the system allows it, so that copying is fast.
static void allocate_snapshot(Trainer *t) {
    const Options *o = &t->run.options;
    if (o->save[0] == '\0' || o->sample_only) { return; }
    size_t per_element = 4 + 2 + 2 * (size_t)gpu_type_bytes(t->moment_type);
    size_t bytes = (size_t)t->run.layout.size * per_element;
    t->snapshot = (char *)malloc_or_die(bytes);
    if (cudaHostRegister(t->snapshot, bytes, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError(); // copies are slower then, nothing else
    }
}

static void set_decay_flags(Trainer *t) {
    const ParamLayout *layout = &t->run.layout;
    size_t flags_bytes = (size_t)(layout->size / PARAM_ALIGN);
    uint8_t *flags = (uint8_t *)calloc_or_die(flags_bytes, 1);
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        int64_t begin = p->offset / PARAM_ALIGN,
                end = (p->offset + param_size(p) - 1) / PARAM_ALIGN;
        memset(flags + begin, tensor_row(p->id)->decay, (size_t)(end - begin + 1));
    }
    CUDA_CHECK(
        cudaMemcpyAsync(t->decay, flags, flags_bytes, cudaMemcpyHostToDevice, t->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    free(flags);
}

static void trainer_open(Trainer *t, const Options *options) {
    Block shared;
    Error err;
    char device[320], size[32];
    if (options->plan) { print_plan(options); }
    if (!trainer_plan(t, options, &shared, &err)) { die("%s", err.text); }
    run_announce(&t->run);
    if (!gpu_open(&t->gpu, options->device, &err)) { die("%s", err.text); }
    check_memory(t);
    const ModelConfig *c = &t->run.config;
    if (c->channels % 8 != 0 || c->ffn % 8 != 0 || qkv_rows(c) % 8 != 0 ||
        c->padded_vocab % 8 != 0) {
        die("the GPU trainer needs --hidden-size, --ffn-hidden-size, head sizes and "
            "--make-vocab-size-divisible-by to be multiples of 8");
    }
    snprintf(device, sizeof(device), "%s, compute capability %d.%d, %s", t->gpu.name,
             t->gpu.capability / 10, t->gpu.capability % 10,
             format_bytes(size, (double)t->gpu.memory));
    t->run.peak_flops = gpu_peak_flops(&t->gpu);
    t->run.memory_bytes = (double)t->plan.bytes;
    run_start(&t->run, device);
    printf("  memory      %s planned (--plan lists it)\n",
           format_bytes(size, (double)t->plan.bytes));
    allocate(t, &shared);
    allocate_snapshot(t);
    set_decay_flags(t);
    size_t rope_bytes = (size_t)c->seq_length * (size_t)c->head_size * sizeof(float);
    float *table = (float *)malloc_or_die(rope_bytes);
    rope_table(table, c->seq_length, c->head_size, (float)c->rope_theta);
    CUDA_CHECK(cudaMemcpyAsync(t->rope, table, rope_bytes, cudaMemcpyHostToDevice, t->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    free(table);
}

static int trainer_close(Trainer *t) {
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    int status = run_close(&t->run);
    for (int i = 0; i < SLOTS; i++) {
        if (t->graphs[i] != NULL) { CUDA_CHECK(cudaGraphExecDestroy(t->graphs[i])); }
        CUDA_CHECK(cudaFreeHost(t->staging[i].inputs));
        CUDA_CHECK(cudaEventDestroy(t->staged[i]));
    }
    for (int i = 0; i < RESULTS; i++) {
        CUDA_CHECK(cudaFreeHost(t->pending[i].state));
        CUDA_CHECK(cudaEventDestroy(t->pending[i].begin));
        CUDA_CHECK(cudaEventDestroy(t->pending[i].end));
    }
    if (t->snapshot != NULL && cudaHostUnregister(t->snapshot) != cudaSuccess) {
        cudaGetLastError();
    }
    CUDA_CHECK(cudaFree(t->memory));
    gpu_close(&t->gpu);
    free(t->snapshot);
    free(t->token_counts);
    free(t->blocks);
    plan_free(&t->plan);
    return status;
}

// ---- linear layers ----------------------------------------------------------------------------

static Bf16 *weight_of(const Trainer *t, TensorId id, int layer) {
    const Param *p = param_find(&t->run.layout, id, layer);
    return p != NULL ? t->weights + p->offset : NULL;
}

// Where a tensor's gradient goes: overwritten by the first micro-batch of a step, added to by
// others.
static GradientOut gradient_of(const Trainer *t, TensorId id, int layer, bool accumulate) {
    const Param *p = param_find(&t->run.layout, id, layer);
    if (p == NULL) { return {NULL, t->gradient_type, false}; }
    return {(char *)t->gradients + p->offset * gpu_type_bytes(t->gradient_type), t->gradient_type,
            accumulate};
}

static Gemm plain_gemm(int m, int n, int k, const Bf16 *a, const Bf16 *b, void *d) {
    Gemm g = {};
    g.m = m;
    g.n = n;
    g.k = k;
    g.a = a;
    g.b = b;
    g.d = d;
    g.type_a = g.type_b = g.type_d = TYPE_BF16;
    g.alpha = 1.0f;
    return g;
}

// y[M,N] = x[M,C] W' (+ bias) (+ addend)
static void linear_forward(Trainer *t, Linear linear, int layer, Bf16 *y, const Bf16 *x, Bf16 *bias,
                           const Bf16 *addend, int M) {
    const ModelConfig *c = &t->run.config;
    int outputs, inputs;
    linear_shape(c, linear, &outputs, &inputs);
    const Bf16 *w = weight_of(t, linear_weight(c, linear), layer);
    gpu_family(&t->gpu, linear == LINEAR_HEAD ? FAMILY_HEAD_PRODUCTS : FAMILY_PRODUCTS);
    Gemm g = plain_gemm(M, outputs, inputs, x, w, y);
    g.trans_b = true;
    g.c = addend;
    g.beta = addend != NULL ? 1.0f : 0.0f;
    g.epilogue = bias != NULL ? EPILOGUE_BIAS : EPILOGUE_NONE;
    g.bias = bias;
    gemm(&t->gpu, g);
}

// dx[M,C] = dy[M,N] W, dW (+)= dy' x. With gelu_input, x came out of a GELU: dx is then the
// gradient of what went in.
static void linear_backward(Trainer *t, Linear linear, int layer, Bf16 *dx, const Bf16 *dy,
                            const Bf16 *x, Bf16 *gelu_input, int M, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    int outputs, inputs;
    linear_shape(c, linear, &outputs, &inputs);
    TensorId weight = linear_weight(c, linear);
    gpu_family(&t->gpu, linear == LINEAR_HEAD ? FAMILY_HEAD_PRODUCTS : FAMILY_PRODUCTS);
    Gemm g = plain_gemm(M, inputs, outputs, dy, weight_of(t, weight, layer), dx);
    g.epilogue = gelu_input != NULL ? EPILOGUE_DGELU : EPILOGUE_NONE;
    g.aux = gelu_input;
    gemm(&t->gpu, g);
    GradientOut dw = gradient_of(t, weight, layer, accumulate);
    g = plain_gemm(outputs, inputs, M, dy, x, dw.data);
    g.trans_a = true;
    g.type_d = dw.type;
    g.c = accumulate ? dw.data : NULL;
    g.beta = accumulate ? 1.0f : 0.0f;
    gemm(&t->gpu, g);
}

// ---- blocks -----------------------------------------------------------------------------------

static void norm_forward(Trainer *t, TensorId weight, int layer, Bf16 *out, float *mean,
                         float *rstd, const Bf16 *x, int M) {
    const ModelConfig *c = &t->run.config;
    const Bf16 *bias = c->arch == ARCH_GPT2 ? weight_of(t, (TensorId)(weight + 1), layer) : NULL;
    gpu_family(&t->gpu, FAMILY_NORMS);
    gpu_norm_forward(out, mean, rstd, x, weight_of(t, weight, layer), bias, M, c->channels,
                     (float)c->norm_eps, t->gpu.stream);
}

// column_sums: of the new d_residual, the bias gradient of the linear layer below.
static void norm_backward(Trainer *t, TensorId weight, int layer, const Bf16 *dout, const Bf16 *x,
                          const float *mean, const float *rstd, GradientOut column_sums, int M,
                          bool accumulate) {
    const ModelConfig *c = &t->run.config;
    bool layernorm = c->arch == ARCH_GPT2;
    NormBackward n = {};
    n.d_residual = t->d_residual;
    n.dweight = gradient_of(t, weight, layer, accumulate);
    if (layernorm) { n.dbias = gradient_of(t, (TensorId)(weight + 1), layer, accumulate); }
    n.column_sums = column_sums;
    n.dout = dout;
    n.x = x;
    n.weight = weight_of(t, weight, layer);
    n.mean = layernorm ? mean : NULL;
    n.rstd = rstd;
    n.scratch = t->partial_sums;
    n.M = M;
    n.C = c->channels;
    gpu_family(&t->gpu, FAMILY_NORMS);
    gpu_norm_backward(n, t->gpu.stream);
}

static void activation_forward(Trainer *t, Block *b, int M) {
    const ModelConfig *c = &t->run.config;
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (c->arch == ARCH_LLAMA) {
        gpu_swiglu_forward(b->activated, b->fc1, M, c->ffn, t->gpu.stream);
    } else {
        gpu_gelu_forward(b->activated, b->fc1, (int64_t)M * c->ffn, t->gpu.stream);
    }
}

// From blocks[l].residual to `out`, the next block's residual.
static void block_forward(Trainer *t, int l, Bf16 *out, int B, int T) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    Block *b = &t->blocks[l];
    norm_forward(t, TENSOR_NORM1_WEIGHT, l, b->norm1, b->mean1, b->rstd1, b->residual, M);
    linear_forward(t, LINEAR_QKV, l, b->qkv, b->norm1, weight_of(t, TENSOR_QKV_BIAS, l), NULL, M);
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (c->arch == ARCH_LLAMA) {
        gpu_rope_apply(b->qkv, t->rope, B, T, H, G, D, false, t->gpu.stream);
    }
    gpu_family(&t->gpu, FAMILY_ATTENTION);
    attention_forward_gpu(&t->gpu, attention_shape(t, B, T), b->attention, b->lse, b->qkv);
    linear_forward(t, LINEAR_ATTENTION_OUT, l, b->residual_mid, b->attention,
                   weight_of(t, TENSOR_ATTENTION_OUT_BIAS, l), b->residual, M);
    norm_forward(t, TENSOR_NORM2_WEIGHT, l, b->norm2, b->mean2, b->rstd2, b->residual_mid, M);
    linear_forward(t, LINEAR_FC1, l, b->fc1, b->norm2, weight_of(t, TENSOR_FC1_BIAS, l), NULL, M);
    activation_forward(t, b, M);
    linear_forward(t, LINEAR_FC2, l, out, b->activated, weight_of(t, TENSOR_FC2_BIAS, l),
                   b->residual_mid, M);
}

// The bias gradient of the linear layer that wrote block l's output residual (none above the
// first).
static GradientOut fc2_bias_gradient(const Trainer *t, int l, bool accumulate) {
    if (l < 0) { return {NULL, t->gradient_type, false}; }
    return gradient_of(t, TENSOR_FC2_BIAS, l, accumulate);
}

// What was not kept of block l is computed again, by the same kernels: the same bits.
static void recompute_block(Trainer *t, int l, int B, int T) {
    Block *b = &t->blocks[l];
    int recompute = t->run.options.recompute, M = B * T;
    if (recompute == RECOMPUTE_BLOCK && l + 1 < t->run.config.num_layers) {
        block_forward(t, l, t->d_norm, B, T); // its output is there already: thrown away
    } else if (recompute == RECOMPUTE_ACTIVATIONS) {
        norm_forward(t, TENSOR_NORM1_WEIGHT, l, b->norm1, b->mean1, b->rstd1, b->residual, M);
        norm_forward(t, TENSOR_NORM2_WEIGHT, l, b->norm2, b->mean2, b->rstd2, b->residual_mid, M);
        activation_forward(t, b, M);
    }
}

// d_residual goes in as the gradient of the block's output, out as that of its input.
static void block_backward(Trainer *t, int l, int B, int T, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    cudaStream_t stream = t->gpu.stream;
    Block *b = &t->blocks[l];
    bool gelu = c->arch == ARCH_GPT2;
    recompute_block(t, l, B, T);
    linear_backward(t, LINEAR_FC2, l, gelu ? t->d_wide : t->d_activated, t->d_residual,
                    b->activated, gelu ? b->fc1 : NULL, M, accumulate);
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (gelu) {
        gpu_column_sums(gradient_of(t, TENSOR_FC1_BIAS, l, accumulate), t->d_wide, t->partial_sums,
                        M, c->ffn, stream);
    } else {
        gpu_swiglu_backward(t->d_wide, t->d_activated, b->fc1, M, c->ffn, stream);
    }
    linear_backward(t, LINEAR_FC1, l, t->d_norm, t->d_wide, b->norm2, NULL, M, accumulate);
    norm_backward(t, TENSOR_NORM2_WEIGHT, l, t->d_norm, b->residual_mid, b->mean2, b->rstd2,
                  gradient_of(t, TENSOR_ATTENTION_OUT_BIAS, l, accumulate), M, accumulate);
    linear_backward(t, LINEAR_ATTENTION_OUT, l, t->d_norm, t->d_residual, b->attention, NULL, M,
                    accumulate);
    gpu_family(&t->gpu, FAMILY_ATTENTION);
    attention_backward_gpu(&t->gpu, attention_shape(t, B, T), t->d_wide, t->d_norm, b->attention,
                           b->lse, b->qkv);
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (c->arch == ARCH_LLAMA) { gpu_rope_apply(t->d_wide, t->rope, B, T, H, G, D, true, stream); }
    GradientOut dbias = gradient_of(t, TENSOR_QKV_BIAS, l, accumulate);
    if (dbias.data != NULL) {
        gpu_column_sums(dbias, t->d_wide, t->partial_sums, M, qkv_rows(c), stream);
    }
    linear_backward(t, LINEAR_QKV, l, t->d_norm, t->d_wide, b->norm1, NULL, M, accumulate);
    norm_backward(t, TENSOR_NORM1_WEIGHT, l, t->d_norm, b->residual, b->mean1, b->rstd1,
                  fc2_bias_gradient(t, l - 1, accumulate), M, accumulate);
}

// ---- forward, loss, backward --------------------------------------------------------------------

// From the batch's inputs [B,T] to norm_out.
static void model_forward(Trainer *t, int B, int T) {
    const ModelConfig *c = &t->run.config;
    gpu_embedding_forward(
        t->blocks[0].residual, t->batch.inputs, weight_of(t, TENSOR_TOKEN_EMBEDDING, 0),
        weight_of(t, TENSOR_POSITION_EMBEDDING, 0), B, T, c->channels, t->gpu.stream);
    for (int l = 0; l < c->num_layers; l++) {
        Bf16 *out = l + 1 < c->num_layers ? t->blocks[l + 1].residual : t->residual_out;
        block_forward(t, l, out, B, T);
    }
    norm_forward(t, TENSOR_FINAL_NORM_WEIGHT, 0, t->norm_out, t->mean_out, t->rstd_out,
                 t->residual_out, B * T);
}

// The LM head and the loss, some rows at a time, so that the logits never exist whole. The sum of
// the losses goes (or is added) to state->loss. With gradient_scale > 0 also goes backward, into
// d_norm and the head's weights.
static void head_loss(Trainer *t, int M, float gradient_scale, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    for (int row = 0; row < M; row += t->chunk_rows) {
        int rows = (int)min64(t->chunk_rows, M - row);
        const Bf16 *x = t->norm_out + (size_t)row * c->channels;
        linear_forward(t, LINEAR_HEAD, 0, t->logits, x, NULL, NULL, rows);
        gpu_family(&t->gpu, FAMILY_LOSS);
        gpu_cross_entropy(t->losses + row, t->logits, t->batch.targets + row, rows, c->vocab,
                          c->padded_vocab, gradient_scale, t->gpu.stream);
        if (gradient_scale > 0) {
            linear_backward(t, LINEAR_HEAD, 0, t->d_norm + (size_t)row * c->channels, t->logits, x,
                            NULL, rows, accumulate || row > 0);
        }
    }
    gpu_family(&t->gpu, FAMILY_LOSS);
    gpu_sum_losses(&t->state->loss, t->losses, M, accumulate, t->gpu.stream);
}

// From d_norm, the gradient of norm_out, down to the embeddings.
static void model_backward(Trainer *t, int B, int T, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    cudaStream_t stream = t->gpu.stream;
    gpu_family(&t->gpu, FAMILY_NORMS);
    size_t residual_bytes = (size_t)B * T * c->channels * sizeof(Bf16);
    CUDA_CHECK(cudaMemsetAsync(t->d_residual, 0, residual_bytes, stream));
    norm_backward(t, TENSOR_FINAL_NORM_WEIGHT, 0, t->d_norm, t->residual_out, t->mean_out,
                  t->rstd_out, fc2_bias_gradient(t, c->num_layers - 1, accumulate), B * T,
                  accumulate);
    for (int l = c->num_layers - 1; l >= 0; l--) { block_backward(t, l, B, T, accumulate); }
    gpu_family(&t->gpu, FAMILY_EMBEDDINGS);
    GradientOut dwte = gradient_of(t, TENSOR_TOKEN_EMBEDDING, 0, true);
    if (!accumulate && !c->tied_head) { // with a tied head, the head's product has written it
        size_t bytes = (size_t)c->padded_vocab * c->channels * gpu_type_bytes(dwte.type);
        CUDA_CHECK(cudaMemsetAsync(dwte.data, 0, bytes, stream));
    }
    gpu_embedding_backward(dwte, t->d_residual, t->batch.inputs, t->batch.rows, t->batch.starts,
                           t->batch.runs, B * T, c->channels, stream);
    if (c->arch == ARCH_GPT2) {
        GradientOut dwpe = gradient_of(t, TENSOR_POSITION_EMBEDDING, 0, accumulate);
        gpu_position_backward(dwpe, t->d_residual, B, T, c->channels, stream);
    }
}

// ---- update -----------------------------------------------------------------------------------

// Norm, decision, AdamW; the optimizer's step number is counted on the device.
static void model_update(Trainer *t, int64_t step, double lr) {
    const Options *o = &t->run.options;
    double step_tokens = (double)o->global_batch_size * o->seq_length;
    gpu_family(&t->gpu, FAMILY_OPTIMIZER);
    gpu_sum_of_squares(t->state, t->norm_scratch, t->gradients, t->gradient_type,
                       t->run.layout.size, false, t->gpu.stream);
    gpu_decide_step(t->state, step_tokens, (float)o->clip_grad, t->gpu.stream);
    AdamWUpdate u = {};
    u.master = t->master;
    u.exp_avg = t->exp_avg;
    u.exp_avg_sq = t->exp_avg_sq;
    u.moment_type = t->moment_type;
    u.weights = t->weights;
    u.gradients = t->gradients;
    u.gradient_type = t->gradient_type;
    u.decay = t->decay;
    u.n = t->run.layout.size;
    u.lr = (float)lr;
    u.beta1 = (float)o->adam_beta1;
    u.beta2 = (float)o->adam_beta2;
    u.eps = (float)o->adam_eps;
    u.weight_decay = (float)o->weight_decay;
    u.seed = (uint64_t)o->seed + 2 * (uint64_t)step;
    gpu_adamw_update(&u, t->state, t->gpu.stream);
}

// Sends the staging buffer's batch to the device.
static void send_batch(Trainer *t, int64_t M) {
    int turn = t->staging_turn;
    Batch *s = &t->staging[turn];
    embedding_sort_tokens(s->inputs, (int)M, t->run.config.vocab, t->token_counts, s->rows,
                          s->starts, s->runs);
    CUDA_CHECK(cudaMemcpyAsync(t->batch.inputs, s->inputs, batch_ints(M) * sizeof(int),
                               cudaMemcpyHostToDevice, t->gpu.stream));
    CUDA_CHECK(cudaEventRecord(t->staged[turn], t->gpu.stream));
    t->staging_turn = (turn + 1) % SLOTS;
}

// The staging buffer to fill next, once the device has read what was in it.
static Batch *next_staging(Trainer *t) {
    CUDA_CHECK(cudaEventSynchronize(t->staged[t->staging_turn]));
    return &t->staging[t->staging_turn];
}

static void micro_step(Trainer *t, bool accumulate) {
    const Options *o = &t->run.options;
    int B = o->micro_batch_size, T = o->seq_length;
    float gradient_scale = (float)(1.0 / ((double)o->global_batch_size * T));
    model_forward(t, B, T);
    head_loss(t, B * T, gradient_scale, accumulate);
    model_backward(t, B, T, accumulate);
}

// A micro-step runs once launch by launch, which makes its plans, then is captured and replayed.
static void micro_step_by_graph(Trainer *t, bool accumulate) {
    if (!t->run.options.cuda_graphs || !t->warm[accumulate]) {
        micro_step(t, accumulate);
        t->warm[accumulate] = true;
        return;
    }
    if (t->graphs[accumulate] == NULL) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(t->gpu.stream, cudaStreamCaptureModeThreadLocal));
        micro_step(t, accumulate);
        CUDA_CHECK(cudaStreamEndCapture(t->gpu.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&t->graphs[accumulate], graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(t->graphs[accumulate], t->gpu.stream));
}

static void dump_gradients(Trainer *t) {
    const Run *run = &t->run;
    size_t n = (size_t)run->layout.size;
    if (run->options.dump_gradients[0] == '\0') { return; }
    float *gradients = (float *)malloc_or_die(n * sizeof(float));
    double loss;
    gpu_to_float(t->master, t->gradients, t->gradient_type, (int64_t)n, t->gpu.stream); // leaving
    CUDA_CHECK(cudaMemcpyAsync(gradients, t->master, n * sizeof(float), cudaMemcpyDeviceToHost,
                               t->gpu.stream));
    CUDA_CHECK(cudaMemcpyAsync(&loss, &t->state->loss, sizeof(loss), cudaMemcpyDeviceToHost,
                               t->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    double tokens = (double)run->options.global_batch_size * run->options.seq_length;
    run_maybe_dump(run, gradients, loss / tokens);
}

// Waits for the step that is on its way, and reports it.
static void finish_step(Trainer *t) {
    if (!t->waiting) { return; }
    int64_t last = t->enqueued - 1;
    Pending *p = &t->pending[last % RESULTS];
    cudaEvent_t from = p->follows ? t->pending[(last - 1) % RESULTS].end : p->begin;
    float ms;
    CUDA_CHECK(cudaEventSynchronize(p->end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, from, p->end));
    StepResult result = {};
    result.loss = p->state->loss;
    result.norm = sqrt(p->state->norm_squared);
    result.lr = p->lr;
    result.seconds = 1e-3 * ms;
    result.skipped = p->state->skipped != 0;
    t->waiting = false;
    run_report(&t->run, result);
}

static void train_step(Trainer *t) {
    Run *run = &t->run;
    const Options *o = &run->options;
    int64_t M = (int64_t)o->micro_batch_size * o->seq_length, ahead = t->waiting ? 1 : 0;
    int64_t step = run->progress.step + ahead;
    cudaStream_t stream = t->gpu.stream;
    Pending *p = &t->pending[t->enqueued % RESULTS];
    p->lr = learning_rate(o, step);
    p->follows = t->waiting;
    CUDA_CHECK(cudaEventRecord(p->begin, stream));
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        Batch *s = next_staging(t);
        run_batch(run, ahead, micro, s->inputs, s->targets);
        send_batch(t, M);
        micro_step_by_graph(t, micro > 0);
    }
    dump_gradients(t);
    model_update(t, step, p->lr);
    CUDA_CHECK(
        cudaMemcpyAsync(p->state, t->state, sizeof(StepState), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaEventRecord(p->end, stream));
    finish_step(t); // the one before, while this one runs
    t->enqueued++;
    t->waiting = true;
    if (run_needs_result(run, step + 1)) { finish_step(t); }
}

// ---- evaluation, samples, checkpoints ---------------------------------------------------------

static void maybe_evaluate(Trainer *t) {
    Run *run = &t->run;
    if (t->waiting || !run_should_eval(run)) { return; }
    int B = run->options.micro_batch_size, T = run->options.seq_length;
    int64_t samples = run_eval_samples(run);
    double begin = wall_seconds(), sum = 0;
    for (int64_t sample = 0; sample < samples; sample += B) {
        Batch *s = next_staging(t);
        run_eval_batch(run, sample, s->inputs, s->targets);
        send_batch(t, (int64_t)B * T);
        model_forward(t, B, T);
        head_loss(t, B * T, 0.0f, sample > 0);
    }
    CUDA_CHECK(
        cudaMemcpyAsync(&sum, &t->state->loss, sizeof(sum), cudaMemcpyDeviceToHost, t->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    run_report_eval(run, sum / (double)(samples * T), wall_seconds() - begin);
}

// The logits after tokens[0..n), read from the device. The sequence is padded to a power of two, so
// that few attention plans serve all lengths; what follows a position does not change it.
static void next_logits(Trainer *t, const int *tokens, int n, Bf16 *logits) {
    const ModelConfig *c = &t->run.config;
    int T = 64;
    while (T < n) { T *= 2; }
    T = (int)min64(T, c->seq_length);
    Batch *s = next_staging(t);
    memset(s->inputs, 0, (size_t)T * sizeof(int));
    memcpy(s->inputs, tokens, (size_t)n * sizeof(int));
    send_batch(t, (int64_t)t->run.options.micro_batch_size * c->seq_length);
    model_forward(t, 1, T);
    linear_forward(t, LINEAR_HEAD, 0, t->logits, t->norm_out + (size_t)(n - 1) * c->channels, NULL,
                   NULL, 1);
    CUDA_CHECK(cudaMemcpyAsync(logits, t->logits, (size_t)c->vocab * sizeof(Bf16),
                               cudaMemcpyDeviceToHost, t->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
}

static void print_sample(Trainer *t) {
    Run *run = &t->run;
    const Options *o = &run->options;
    int V = run->config.vocab;
    int *tokens = (int *)malloc_or_die((size_t)(o->sample_length + 1) * sizeof(int));
    Bf16 *codes = (Bf16 *)malloc_or_die((size_t)V * sizeof(Bf16));
    float *logits = (float *)malloc_or_die(2 * (size_t)V * sizeof(float)), *scratch = logits + V;
    tokens[0] = run_first_token(run);
    printf("sample after step %lld:\n", (long long)run->progress.step);
    for (int i = 0; i < o->sample_length; i++) {
        int n = (int)min64(i + 1, run->config.seq_length);
        next_logits(t, tokens + i + 1 - n, n, codes);
        for (int v = 0; v < V; v++) { logits[v] = bf16_decode(codes[v]); }
        tokens[i + 1] = sample_token(o, logits, scratch, V, i);
        run_print_token(run, tokens[i + 1]);
        fflush(stdout);
    }
    printf("\n");
    free(tokens);
    free(codes);
    free(logits);
}

static void maybe_sample(Trainer *t) {
    if (!t->waiting && run_should_sample(&t->run)) { print_sample(t); }
}

// Copies the state, which is the only pause; the writing goes on in a thread.
static void maybe_save(Trainer *t) {
    Run *run = &t->run;
    if (t->waiting || !run_should_save(run)) { return; }
    saver_wait(&run->saver);
    size_t size = (size_t)run->layout.size, moment_bytes = size * gpu_type_bytes(t->moment_type);
    char *master = t->snapshot, *exp_avg = master + 4 * size, *exp_avg_sq = exp_avg + moment_bytes;
    char *weights = exp_avg_sq + moment_bytes;
    cudaStream_t stream = t->gpu.stream;
    CUDA_CHECK(cudaMemcpyAsync(master, t->master, 4 * size, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(exp_avg, t->exp_avg, moment_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(
        cudaMemcpyAsync(exp_avg_sq, t->exp_avg_sq, moment_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(weights, t->weights, 2 * size, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    Snapshot s = {};
    s.model_dtype = DTYPE_BF16;
    s.model = weights;
    s.num_ranges = 1;
    s.ranges = &t->whole;
    s.moment_dtype = t->moment_type == TYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
    s.master = master;
    s.exp_avg = exp_avg;
    s.exp_avg_sq = exp_avg_sq;
    run_save(run, &s);
}

static void restore_moment(Trainer *t, const Checkpoint *c, const char *kind, void *device,
                           float *host) {
    Error err;
    int64_t size = t->run.layout.size;
    if (!checkpoint_read(c, kind, 0, size, host, &err)) { die("%s", err.text); }
    if (t->moment_type == TYPE_BF16) {
        Bf16 *codes = (Bf16 *)host; // in place: each code is written at or before what it came from
        for (int64_t i = 0; i < size; i++) { codes[i] = bf16_encode(host[i]); }
    }
    CUDA_CHECK(cudaMemcpy(device, host, (size_t)size * gpu_type_bytes(t->moment_type),
                          cudaMemcpyHostToDevice));
}

// The initial weights, or those of the checkpoint that --resume names.
static void trainer_restore(Trainer *t) {
    Run *run = &t->run;
    Checkpoint c;
    Error err;
    int64_t size = run->layout.size;
    float *host = (float *)malloc_or_die((size_t)size * sizeof(float));
    bool resumed = run_restore(run, &c);
    if (!resumed) {
        model_init(&run->layout, host, (uint64_t)run->options.seed);
    } else if (!checkpoint_read(&c, "master", 0, size, host, &err)) {
        die("%s", err.text);
    }
    CUDA_CHECK(cudaMemcpy(t->master, host, (size_t)size * sizeof(float), cudaMemcpyHostToDevice));
    gpu_to_bf16(t->weights, t->master, size, t->gpu.stream);
    if (resumed) {
        restore_moment(t, &c, "exp_avg", t->exp_avg, host);
        restore_moment(t, &c, "exp_avg_sq", t->exp_avg_sq, host);
        checkpoint_close(&c);
    }
    StepState state = {};
    state.updates = run->progress.step - run->progress.skipped;
    state.skips = run->progress.skipped;
    CUDA_CHECK(cudaMemcpy(t->state, &state, sizeof(state), cudaMemcpyHostToDevice));
    free(host);
}

// ---- the loop ---------------------------------------------------------------------------------

// Times cuBLASLt's algorithms in micro-steps whose results are thrown away, or reads the choice
// that an earlier run made.
static void tune_products(Trainer *t) {
    const Options *o = &t->run.options;
    char path[PATH_LENGTH];
    Error err;
    if (!o->gemm_autotune) { return; }
    path_format(path, "%s/gemm_choices.txt", o->save);
    bool kept = o->save[0] != '\0';
    if (kept && path_exists(path) && !gemm_read_choices(&t->gpu, path, &err)) {
        die("%s", err.text);
    }
    Batch *s = next_staging(t);
    run_batch(&t->run, 0, 0, s->inputs, s->targets);
    send_batch(t, (int64_t)o->micro_batch_size * o->seq_length);
    double begin = wall_seconds();
    gemm_autotune(&t->gpu, true);
    for (int accumulate = 0; accumulate < 2; accumulate++) { micro_step(t, accumulate); }
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    gemm_autotune(&t->gpu, false);
    printf("  products    tuned in %.1f s\n", wall_seconds() - begin);
    if (kept && !gemm_write_choices(&t->gpu, path, &err)) { warn("%s", err.text); }
}

// One more step, launch by launch, by kernel family. Its learning rate is 0.
static void profile_step(Trainer *t) {
    Run *run = &t->run;
    double ms[FAMILY_COUNT], all = 0;
    if (!run->options.profile) { return; }
    gpu_profile_begin(&t->gpu);
    for (int micro = 0; micro < run_micro_batches(run); micro++) { micro_step(t, micro > 0); }
    model_update(t, run->progress.step, 0.0);
    gpu_profile_end(&t->gpu, ms);
    for (int i = 0; i < FAMILY_COUNT; i++) { all += ms[i]; }
    MetricsRecord *r = metrics_begin("profile");
    printf("profile of a step, launch by launch: %.2f ms\n", all);
    for (int i = 0; i < FAMILY_COUNT; i++) {
        const char *name = gpu_family_name((GpuFamily)i);
        printf("  %-14s %8.2f ms %5.1f%%\n", name, ms[i], 100 * ms[i] / all);
        metrics_number(r, name, ms[i]);
    }
    metrics_end(&run->metrics, r);
}

int main(int argc, char **argv) {
    static Options options;
    static Trainer t;
    options_parse(&options, argc, argv);
    if (options.verify) { return verify(&options); }
    trainer_open(&t, &options);
    trainer_restore(&t);
    if (options.sample_only) {
        print_sample(&t);
        return trainer_close(&t);
    }
    tune_products(&t);
    while (run_goes_on(&t.run)) {
        train_step(&t);
        maybe_evaluate(&t);
        maybe_sample(&t);
        maybe_save(&t);
    }
    finish_step(&t);
    maybe_save(&t);
    profile_step(&t);
    return trainer_close(&t);
}
