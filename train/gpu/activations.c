#include "activations.h"
#include "../../kernels/cpu.h"

#include <stdlib.h>
#include <string.h>

// ---- blocks -------------------------------------------------------------------------------------

// One of a block's buffers.
typedef struct {
    const char *name;
    size_t field;   // of Block
    int recomputed; // the least --recompute that does not keep it
    int64_t bytes;
} BlockBuffer;

enum { BLOCK_BUFFERS = 17 };

static bool weight_gradient_in_fp8(const Run *run, Linear linear, int layer) {
    return precision_of(&run->precision, linear, layer)->wgrad == NUMBER_FP8;
}

// Bytes of a linear layer's kept input of n values.
typedef struct {
    int64_t plain, columns;
} InputBytes;

static InputBytes input_bytes(const Run *run, Linear linear, int layer, int64_t n) {
    bool fp8 = weight_gradient_in_fp8(run, linear, layer);
    return (InputBytes){fp8 ? 0 : 2 * n, fp8 ? n : 0};
}

static void list_block_buffers(const Run *run, int layer, int64_t M,
                               BlockBuffer list[BLOCK_BUFFERS]) {
    const ModelConfig *c = &run->config;
    const int never = RECOMPUTE_BLOCK + 1, activations = RECOMPUTE_ACTIVATIONS,
              block = RECOMPUTE_BLOCK;
    int64_t heads = M * c->num_heads * c->head_size, C = M * c->channels, statistic = 4 * M;
    InputBytes norm1 = input_bytes(run, LINEAR_QKV, layer, C);
    InputBytes attention = input_bytes(run, LINEAR_ATTENTION_OUT, layer, heads);
    InputBytes norm2 = input_bytes(run, LINEAR_FC1, layer, C);
    InputBytes activated = input_bytes(run, LINEAR_FC2, layer, M * c->ffn);
    const BlockBuffer rows[BLOCK_BUFFERS] = {
        {"residual", offsetof(Block, residual), never, 2 * C},
        {"norm1", offsetof(Block, norm1.out.plain), activations, norm1.plain},
        {"norm1, FP8", offsetof(Block, norm1.out.columns), activations, norm1.columns},
        {"norm1 mean", offsetof(Block, norm1.mean), block, statistic},
        {"norm1 rstd", offsetof(Block, norm1.rstd), block, statistic},
        {"qkv", offsetof(Block, qkv), block, 2 * M * qkv_rows(c)},
        {"attention", offsetof(Block, attention.plain), block, 2 * heads},
        {"attention, FP8", offsetof(Block, attention.columns), activations, attention.columns},
        {"log-sum-exp", offsetof(Block, lse), block, statistic * c->num_heads},
        {"residual mid", offsetof(Block, residual_mid), block, 2 * C},
        {"norm2", offsetof(Block, norm2.out.plain), activations, norm2.plain},
        {"norm2, FP8", offsetof(Block, norm2.out.columns), activations, norm2.columns},
        {"norm2 mean", offsetof(Block, norm2.mean), block, statistic},
        {"norm2 rstd", offsetof(Block, norm2.rstd), block, statistic},
        {"fc1", offsetof(Block, fc1), block, 2 * M * fc1_rows(c)},
        {"activated", offsetof(Block, activated.plain), activations, activated.plain},
        {"activated, FP8", offsetof(Block, activated.columns), activations, activated.columns},
    };
    memcpy(list, rows, sizeof(rows));
}

static void **block_field(Block *b, const BlockBuffer *buffer) {
    return (void **)((char *)b + buffer->field);
}

// Every block's own buffers, and once those that are computed again, or where nothing is trained.
static void plan_blocks(Activations *a, const Run *run, Plan *plan, int64_t M) {
    BlockBuffer list[BLOCK_BUFFERS];
    int64_t shared_bytes[BLOCK_BUFFERS] = {0};
    int recompute = options_train(&run->options) ? run->options.recompute : RECOMPUTE_BLOCK;
    for (int l = 0; l < run->config.num_layers; l++) {
        list_block_buffers(run, l, M, list);
        for (int i = 0; i < BLOCK_BUFFERS; i++) {
            if (recompute >= list[i].recomputed) {
                shared_bytes[i] = max64(shared_bytes[i], list[i].bytes);
            } else {
                plan_buffer(plan, "every block's activations", list[i].name, list[i].bytes,
                            block_field(&a->blocks[l], &list[i]));
            }
        }
    }
    for (int i = 0; i < BLOCK_BUFFERS; i++) {
        plan_buffer(plan, "one block's activations", list[i].name, shared_bytes[i],
                    block_field(&a->shared, &list[i]));
    }
}

static void send_rope_table(Activations *a, const ModelConfig *c, const Gpu *gpu) {
    size_t bytes = (size_t)c->seq_length * (size_t)c->head_size * sizeof(float);
    float *table = malloc_or_die(bytes);
    rope_table(table, c->seq_length, c->head_size, &c->rope);
    gpu_send(gpu, a->rope, table, bytes);
    free(table);
}

void activations_start(Activations *a, const Run *run, const Gpu *gpu) {
    BlockBuffer list[BLOCK_BUFFERS];
    send_rope_table(a, &run->config, gpu);
    for (int l = 0; l < run->config.num_layers; l++) {
        list_block_buffers(run, l, 1, list);
        for (int i = 0; i < BLOCK_BUFFERS; i++) {
            void **field = block_field(&a->blocks[l], &list[i]);
            if (*field == NULL && list[i].bytes > 0) {
                *field = *block_field(&a->shared, &list[i]);
            }
        }
    }
}

// ---- scratch ------------------------------------------------------------------------------------

#define PLAN(category, name, count, pointer)                                          \
    plan_buffer(plan, category, name, (int64_t)(count) * (int64_t)sizeof(*(pointer)), \
                (void **)&(pointer))

// The LM head works on some rows at a time. An FP8 head's forms count as logits do.
static void plan_head(Activations *a, const Run *run, Plan *plan, int64_t M) {
    const int64_t enough = (int64_t)4 << 30;
    int64_t P = run->config.padded_vocab, C = run->config.channels;
    bool fp8 = precision_of(&run->precision, LINEAR_HEAD, 0)->number == NUMBER_FP8;
    bool wgrad = weight_gradient_in_fp8(run, LINEAR_HEAD, 0);
    int64_t row_bytes = 2 * P + (fp8 ? P : 0) + (wgrad ? P : 0), rows = M;
    int64_t most_bytes = min64(enough + (enough >> 4), 2 * P * M); // what a BF16 head would take
    while (rows > 128 && rows * row_bytes > most_bytes) { rows = (rows + 1) / 2; }
    const char *test_rows = getenv("LLM8_TEST_HEAD_ROWS"); // several chunks, for tests
    if (test_rows != NULL) { rows = atoi(test_rows); }
    rows = min64(M, round_up64(rows, 16));
    a->chunk_rows = (int)rows;
    plan->phase = PHASE_HEAD;
    PLAN("scratch of the head", "logits", rows * P, a->logits);
    PLAN("scratch of the head", "input, FP8", fp8 ? rows * C : 0, a->head_x.rows);
    PLAN("scratch of the head", "input, FP8, transposed", wgrad ? rows * C : 0, a->head_x.columns);
    PLAN("scratch of the head", "log-sum-exp", fp8 ? rows : 0, a->head_lse);
    PLAN("scratch of the head", "d logits, FP8", fp8 ? rows * P : 0, a->head_dy.rows);
    PLAN("scratch of the head", "d logits, FP8, transposed", wgrad ? rows * P : 0,
         a->head_dy.columns);
    plan->phase = PHASE_ALWAYS;
}

static void plan_operands(Activations *a, const Params *params, Plan *plan, int64_t M) {
    static const char category[] = "scratch of linear layers";
    const ModelConfig *c = &params->run->config;
    bool fp8 = params->fp8;
    int64_t C = c->channels, plain = max64(max64(c->ffn, qkv_rows(c)), C);
    int64_t widest = fp8 ? max64(plain, fc1_rows(c)) : 0, residual = fp8 ? C : 0;
    PLAN("scratch", "d activated, d qkv", M * plain, a->wide);
    PLAN("scratch", "d residual, FP8", M * residual, a->residual_fp8.rows);
    PLAN("scratch", "d residual, FP8, transposed", M * residual, a->residual_fp8.columns);
    plan->phase = PHASE_LINEAR;
    PLAN(category, "operand, FP8", M * widest, a->wide_fp8.rows);
    PLAN(category, "operand, FP8, transposed", M * widest, a->wide_fp8.columns);
    plan->phase = PHASE_ALWAYS;
}

AttentionShape attention_shape_of(const Run *run, int B, int T) {
    const ModelConfig *c = &run->config;
    return (AttentionShape){
        B, T, c->num_heads, c->num_groups, c->head_size, run->options.deterministic};
}

static void plan_workspaces(Gpu *gpu, const Run *run, Plan *plan) {
    AttentionShape shape = attention_shape_of(run, run->options.micro_batch_size,
                                              run->config.seq_length);
    gpu->workspace_bytes = (size_t)64 << 20;
    gpu->attention_bytes = attention_workspace(shape, (size_t)run->options.workspace_mib << 20);
    plan_buffer(plan, "scratch", "workspace of products", (int64_t)gpu->workspace_bytes,
                &gpu->workspace);
    plan->phase = PHASE_ATTENTION;
    plan_buffer(plan, "scratch of attention", "workspace of attention",
                (int64_t)gpu->attention_bytes, &gpu->attention_workspace);
    plan->phase = PHASE_ALWAYS;
}

void activations_plan(Activations *a, const Params *params, Gpu *gpu, Plan *plan) {
    static const char kept[] = "activations", scratch[] = "scratch";
    const Run *run = params->run;
    const ModelConfig *c = &run->config;
    int64_t T = c->seq_length, M = run->options.micro_batch_size * T, C = c->channels;
    int64_t heads = (int64_t)c->num_heads * c->head_size;
    int64_t widest = max64(max64(fc1_rows(c), qkv_rows(c)), 3 * C);
    *a = (Activations){.blocks = calloc_or_die((size_t)c->num_layers, sizeof(Block))};
    plan_blocks(a, run, plan, M);
    PLAN(kept, "last residual", M * C, a->residual_out);
    PLAN(kept, "last norm", M * C, a->norm_out.out.plain);
    PLAN(kept, "last norm's mean", M, a->norm_out.mean);
    PLAN(kept, "last norm's rstd", M, a->norm_out.rstd);
    PLAN(kept, "losses", M, a->losses);
    PLAN(kept, "rotary table", T * c->head_size, a->rope);
    bool trains = options_train(&run->options);
    PLAN(scratch, "d residual", trains ? M * C : 0, a->d_residual);
    PLAN(scratch, "d norm, d attention", trains ? M * max64(C, heads) : 0, a->d_norm);
    plan_buffer(plan, scratch, "partial sums", (int64_t)partial_sums_bytes(widest),
                (void **)&a->partial_sums);
    plan_workspaces(gpu, run, plan);
    plan_operands(a, params, plan, M);
    plan_head(a, run, plan, M);
}

void activations_free(Activations *a) {
    free(a->blocks);
}

// ---- operands -----------------------------------------------------------------------------------

// Whether a block's input of a linear layer is computed again in the backward pass. The last
// block's is still there.
static bool is_recomputed(const Run *run, LinearId id) {
    return run->options.recompute != RECOMPUTE_NONE && id.layer + 1 < run->config.num_layers;
}

Matrix activations_input(const Activations *a, const Params *params, LinearId id,
                         const Matrix *kept) {
    Matrix x = *kept;
    bool kept_here = id.pass == PASS_AGAIN ||
                     (id.pass == PASS_TRAIN && !is_recomputed(params->run, id));
    bool product_follows = id.pass != PASS_AGAIN ||
                           params->run->options.recompute == RECOMPUTE_BLOCK;
    if (x.plain == NULL) { x.plain = a->wide; }
    if (!kept_here) { x.columns = NULL; }
    if (linear_is_fp8(params, id) && product_follows) { x.rows = a->wide_fp8.rows; }
    return x;
}

Matrix activations_gradient(const Params *params, LinearId id, Bf16 *plain, const Matrix *scratch) {
    Matrix dy = {.plain = plain};
    if (linear_is_fp8(params, id)) { dy.rows = scratch->rows; }
    if (weight_gradient_in_fp8(params->run, id.linear, id.layer)) { dy.columns = scratch->columns; }
    return dy;
}
