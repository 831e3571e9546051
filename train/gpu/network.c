#include "network.h"

#include "../../kernels/rope.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// ---- blocks -------------------------------------------------------------------------------------

// One of a block's buffers.
typedef struct {
    const char *name;
    size_t field;   // offset in Block
    int recomputed; // the lowest --recompute with which the buffer is recomputed and not kept
    int64_t bytes;
} BlockBuffer;

enum { BLOCK_BUFFERS = 22 };

// Lists the buffers of block b. The block's layers must be set up, because the formats of their
// inputs decide the sizes.
static void list_block_buffers(const Run *run, const Block *b, int64_t M,
                               BlockBuffer list[BLOCK_BUFFERS]) {
    const ModelConfig *c = &run->config;
    const int never = RECOMPUTE_BLOCK + 1, activations = RECOMPUTE_ACTIVATIONS,
              block = RECOMPUTE_BLOCK;
    int64_t heads = M * c->num_heads * c->head_size, C = M * c->channels, F = M * c->ffn;
    int64_t N = M * qkv_rows(c), statistic = 4 * M, mean = c->arch == ARCH_GPT2 ? statistic : 0;
    bool blockwise = run->precision.recipe == FP8_RECIPE_BLOCKWISE;
    // the bytes of a linear layer's input, of n values, in the form that its weight gradient reads:
    // BF16, or codes and scales
#define BF16(layer, n) (b->layer.wgrad_fp8 ? 0 : 2 * (n))
#define SCALES(layer)                                                                             \
    (b->layer.wgrad_fp8 && blockwise ? 4 * fp8_scale_count(SCALE_BLOCK_1X128, b->layer.C, (int)M) \
                                     : 0)
#define CODES(name, layer, n)                                                                 \
    {name ", FP8", offsetof(Block, layer.x.columns.codes), activations,                       \
     b->layer.wgrad_fp8 ? (n) : 0},                                                           \
    {                                                                                         \
        name ", scales", offsetof(Block, layer.x.columns.inverse), activations, SCALES(layer) \
    }
    const BlockBuffer rows[BLOCK_BUFFERS] = {
        {"residual", offsetof(Block, residual), never, 2 * C},
        {"norm1", offsetof(Block, qkv.x.bf16), activations, BF16(qkv, C)},
        CODES("norm1", qkv, C),
        {"norm1 mean", offsetof(Block, norm1.forward.mean), block, mean},
        {"norm1 rstd", offsetof(Block, norm1.forward.rstd), block, statistic},
        {"qkv", offsetof(Block, qkv_out), block, 2 * N},
        {"qkv, rotated", offsetof(Block, rotated), activations, c->qk_norm ? 2 * N : 0},
        {"attention", offsetof(Block, attention_out.x.bf16), block, 2 * heads},
        CODES("attention", attention_out, heads),
        {"log-sum-exp", offsetof(Block, lse), block, statistic * c->num_heads},
        {"residual mid", offsetof(Block, residual_mid), block, 2 * C},
        {"norm2", offsetof(Block, fc1.x.bf16), activations, BF16(fc1, C)},
        CODES("norm2", fc1, C),
        {"norm2 mean", offsetof(Block, norm2.forward.mean), block, mean},
        {"norm2 rstd", offsetof(Block, norm2.forward.rstd), block, statistic},
        {"fc1", offsetof(Block, fc1_out), block, 2 * M * fc1_rows(c)},
        {"activated", offsetof(Block, fc2.x.bf16), activations, BF16(fc2, F)},
        CODES("activated", fc2, F),
    };
    memcpy(list, rows, sizeof(rows));
}

static void **block_field(Block *b, const BlockBuffer *buffer) {
    return (void **)((char *)b + buffer->field);
}

// Plans the blocks' buffers. A buffer that is recomputed is planned once, and all blocks share it;
// the others are planned for every block. In a run that does not train, all are shared.
static void plan_blocks(Network *n, Plan *plan, int64_t M) {
    const Run *run = n->run;
    BlockBuffer list[BLOCK_BUFFERS];
    int64_t shared_bytes[BLOCK_BUFFERS] = {0};
    int recompute = options_train(&run->options) ? run->options.recompute : RECOMPUTE_BLOCK;
    for (int l = 0; l < run->config.num_layers; l++) {
        Block *b = &n->blocks[l];
        for (int i = 0; i < LINEAR_HEAD; i++) {
            linear_plan(&b->linear[i], n->params, precision_of(&run->precision, (Linear)i, l),
                        plan);
        }
        list_block_buffers(run, b, M, list);
        plan_section(plan, "every block's activations", PHASE_STEP);
        for (int i = 0; i < BLOCK_BUFFERS; i++) {
            if (recompute >= list[i].recomputed) {
                shared_bytes[i] = max64(shared_bytes[i], list[i].bytes);
            } else {
                plan_buffer(plan, list[i].name, list[i].bytes, block_field(b, &list[i]));
            }
        }
    }
    plan_section(plan, "one block's activations", PHASE_STEP);
    for (int i = 0; i < BLOCK_BUFFERS; i++) {
        plan_buffer(plan, list[i].name, shared_bytes[i], block_field(&n->shared, &list[i]));
    }
}

// ---- scratch ------------------------------------------------------------------------------------

// Plans the codes [rows,k] of a form, and with blockwise scaling their scales.
static void plan_form(const Network *n, Plan *plan, const char *name, int64_t rows, int64_t k,
                      Fp8Form *form) {
    bool blocks = precision_scales(&n->run->precision, FP8_RECIPE_BLOCKWISE);
    int64_t scales = blocks ? fp8_scale_count(SCALE_BLOCK_1X128, (int)rows, (int)k) : 0;
    PLAN(plan, name, rows * k, form->codes);
    PLAN(plan, "scales", scales, form->inverse);
}

// The LM head works on chunk_rows rows at a time, so that the logits, in all forms that an FP8 head
// needs, take a limited amount of memory. Tests set the number of rows by LLM8_TEST_HEAD_ROWS.
static void plan_head(Network *n, Plan *plan, int64_t M) {
    const int64_t enough = (int64_t)4 << 30;
    LinearLayer *head = &n->head;
    const LinearPrecision *lp = precision_of(&n->run->precision, LINEAR_HEAD, 0);
    const char *test_rows = getenv("LLM8_TEST_HEAD_ROWS");
    bool fp8 = lp->number == NUMBER_FP8;
    linear_plan(head, n->params, lp, plan);
    int64_t P = head->N, C = head->C, rows = M;
    int64_t row_bytes = 2 * P + (fp8 ? P : 0) + (head->wgrad_fp8 ? P : 0);
    int64_t most_bytes = min64(enough + (enough >> 4), 2 * P * M); // 2 P M: all logits in BF16
    while (rows > 128 && rows * row_bytes > most_bytes) { rows = (rows + 1) / 2; }
    if (test_rows != NULL) { rows = max64(1, atoll(test_rows)); }
    rows = min64(M, round_up64(rows, 16));
    n->chunk_rows = (int)rows;
    int64_t wgrad_rows = head->wgrad_fp8 ? rows : 0, fp8_rows = fp8 ? rows : 0;
    plan_section(plan, "scratch of the head", PHASE_HEAD);
    PLAN(plan, "logits", rows * P, head->dy.bf16);
    plan_form(n, plan, "input, FP8", fp8_rows, C, &head->x.rows);
    plan_form(n, plan, "input, FP8, transposed", C, wgrad_rows, &head->x.columns);
    n->loss_scratch.bytes = (size_t)loss_scratch_floats(fp8_rows) * sizeof(float);
    plan_buffer(plan, "rows' log-sum-exp", (int64_t)n->loss_scratch.bytes,
                (void **)&n->loss_scratch.data);
    // until the loss writes these codes, their memory holds max_sums (start_head)
    plan_form(n, plan, "d logits, FP8", fp8_rows, P, &head->dy.rows);
    plan_form(n, plan, "d logits, FP8, transposed", P, wgrad_rows, &head->dy.columns);
}

AttentionShape attention_shape_of(const Run *run, int B, int T) {
    const ModelConfig *c = &run->config;
    return (AttentionShape){
        B, T, c->num_heads, c->num_groups, c->head_size, run->options.deterministic, NULL};
}

void network_plan(Network *n, Params *params, Gpu *gpu, Plan *plan) {
    const Run *run = params->run;
    const ModelConfig *c = &run->config;
    int64_t T = c->seq_length, M = options_batch(&run->options) * T, C = c->channels;
    int64_t heads = (int64_t)c->num_heads * c->head_size, inputs = max64(C, heads);
    int64_t outputs = max64(fc1_rows(c), qkv_rows(c));
    int64_t sums = partial_sums_bytes(M, max64(outputs, 3 * C));
    bool trains = options_train(&run->options);
    int64_t fp8_rows = run->precision.used ? M : 0, d_rows = trains ? fp8_rows : 0;
    *n = (Network){.run = run, .gpu = gpu, .params = params};
    n->blocks = calloc_or_die((size_t)c->num_layers, sizeof(Block));
    plan_section(plan, "data", PHASE_ALWAYS);
    PLAN(plan, "sum of losses", 1, n->loss_sum);
    PLAN(plan, "rotary table", T * c->head_size, n->rope);
    plan_blocks(n, plan, M);
    plan_head(n, plan, M);
    plan_section(plan, "activations", PHASE_STEP);
    PLAN(plan, "last residual", M * C, n->residual_out);
    PLAN(plan, "last norm", M * C, n->head.x.bf16);
    PLAN(plan, "last norm's mean", c->arch == ARCH_GPT2 ? M : 0, n->final_norm.forward.mean);
    PLAN(plan, "last norm's rstd", M, n->final_norm.forward.rstd);
    PLAN(plan, "losses", M, n->losses);
    plan_section(plan, "scratch", PHASE_STEP);
    PLAN(plan, "d residual", trains ? M * C : 0, n->d_residual.bf16);
    PLAN(plan, "d norm, d attention", trains ? M * inputs : 0, n->d_norm);
    n->partial_sums.bytes = (size_t)sums;
    plan_buffer(plan, "partial sums", sums, (void **)&n->partial_sums.data);
    PLAN(plan, "input, d activated, d qkv", M * max64(max64(c->ffn, qkv_rows(c)), C),
         n->d_qkv.bf16);
    plan_form(n, plan, "d residual, FP8", d_rows, C, &n->d_residual.rows);
    plan_form(n, plan, "d residual, FP8, transposed", C, d_rows, &n->d_residual.columns);

    AttentionShape shape = attention_shape_of(run, options_batch(&run->options), c->seq_length);
    gpu->workspace_bytes = GEMM_WORKSPACE_BYTES;
    // enough for the scores of the deterministic backward pass, for a sequence of 8192 tokens and
    // 32 heads
    gpu->attention_bytes = attention_workspace(shape, (size_t)4608 << 20);
    plan_section(plan, "scratch", PHASE_ALWAYS);
    plan_buffer(plan, "workspace of matmuls", (int64_t)gpu->workspace_bytes, &gpu->workspace);
    plan_section(plan, "scratch of attention", PHASE_ATTENTION);
    plan_buffer(plan, "workspace of attention", (int64_t)gpu->attention_bytes,
                &gpu->attention_workspace);
    plan_section(plan, "scratch of forward matmuls", PHASE_FORWARD);
    plan_form(n, plan, "input, FP8", fp8_rows, inputs, &n->input.rows);
    plan_form(n, plan, "activated, FP8", fp8_rows, c->ffn, &n->activated.rows);
    plan_section(plan, "scratch of backward matmuls", PHASE_BACKWARD);
    plan_form(n, plan, "d fc1, d qkv, FP8", d_rows, outputs, &n->d_qkv.rows);
    plan_form(n, plan, "d fc1, d qkv, FP8, transposed", outputs, d_rows, &n->d_qkv.columns);
}

// ---- starting -----------------------------------------------------------------------------------

static void send_rope_table(Network *n) {
    const ModelConfig *c = &n->run->config;
    size_t bytes = (size_t)c->seq_length * (size_t)c->head_size * sizeof(float);
    FREED float *table = malloc_or_die(bytes);
    rope_table(table, c->seq_length, c->head_size, &c->rope);
    gpu_send(n->gpu, n->rope, table, bytes);
}

// Sets up the norm of x. below: the linear layer that writes x; NULL: the embeddings write x. Only
// LayerNorm has a mean and a bias.
static void start_norm(Network *n, NormLayer *norm, TensorId weight, int layer, const Bf16 *x,
                       const LinearLayer *below) {
    const ModelConfig *c = &n->run->config;
    const Params *p = n->params;
    const TensorId bias = (TensorId)(weight + 1);
    const bool layernorm = c->arch == ARCH_GPT2;
    NormForward *f = &norm->forward;
    assert(tensor_row(bias)->cols == DIM_NONE); // in the tensor table, the bias follows the weight
    f->x = x;
    f->weight = params_weights(p, weight, layer, NULL);
    f->bias = layernorm ? params_weights(p, bias, layer, NULL) : NULL;
    f->eps = (float)c->norm_eps;
    f->C = c->channels;
    norm->backward = (NormBackward){.dweight = params_gradient(p, weight, layer),
                                    .dout = n->d_norm,
                                    .x = x,
                                    .weight = f->weight,
                                    .mean = f->mean,
                                    .rstd = f->rstd,
                                    .scratch = n->partial_sums,
                                    .C = f->C};
    if (layernorm) { norm->backward.dbias = params_gradient(p, bias, layer); }
    if (below != NULL) { norm->backward.column_sums = below->dbias; }
    norm->d_residual = below != NULL ? below->dy : operand_bf16(n->d_residual.bf16);
}

static bool in_fp8(const LinearLayer *l) {
    return l->precision->number == NUMBER_FP8;
}

// Sets up a block's linear layer. x: the buffer of the layer's input, if the input is not kept. dy:
// the buffer of the gradient of the layer's output.
static void start_linear(Network *n, LinearLayer *l, const Operand *x, const Operand *dy) {
    const int recompute = n->run->options.recompute;
    // the last block's inputs are not recomputed: they are still in the shared buffers when its
    // backward pass begins
    l->recomputed = recompute != RECOMPUTE_NONE &&
                    l->precision->layer + 1 < n->run->config.num_layers;
    // fc2's output is the next block's input, which is kept
    l->matmul_recomputed = recompute == RECOMPUTE_BLOCK && l->precision->linear != LINEAR_FC2;
    if (l->x.bf16 == NULL) { l->x.bf16 = x->bf16; }
    l->dy.bf16 = dy->bf16;
    if (in_fp8(l)) {
        l->x.rows = x->rows;
        l->dy.rows = dy->rows;
    }
    if (l->wgrad_fp8) { l->dy.columns = dy->columns; }
    linear_start(l, n->params);
}

// Whether wide_matmul.cu can compute the layer's forward matmul.
static bool has_wide_matmul(const Network *n, const LinearLayer *l) {
    return l->w.rows.codes != NULL && l->bias == NULL && l->x.type == FP8_E4M3 &&
           !fp8_by_blocks(l->x.scaling) && l->fast_forward && gpu_has_fused_matmuls(n->gpu);
}

static void start_activation(Network *n, Block *b) {
    const Precision *precision = &n->run->precision;
    bool llama = n->run->config.arch == ARCH_LLAMA, fast = precision->fast_forward;
    bool none = !in_fp8(&b->fc1) && !in_fp8(&b->fc2), both = in_fp8(&b->fc1) && in_fp8(&b->fc2);
    b->fc1.adds_bias = none;
    if (!llama && !none) { b->gelu_bias = b->fc1.bias; }
    b->matmul_activates = both && b->fc2.x.fused &&
                          precision_scales(precision, FP8_RECIPE_DELAYED) &&
                          (llama ? fast : b->fc1.C <= GELU_MATMUL_MAX_K) &&
                          gpu_has_fused_matmuls(n->gpu);
    bool derives = b->matmul_activates && b->fc1.dy.fused;
    b->matmul_derives = !llama && (none || derives);
    if (llama) { b->fc1.dy.bf16 = b->fc1_out; } // SwiGLU's backward pass works in place
}

static void start_head(Network *n) {
    const Run *run = n->run;
    LinearLayer *head = &n->head;
    linear_start(head, n->params);
    if (!has_wide_matmul(n, head) || !head->dy.fused) { return; }
    if (run->config.loss.softcap > 0.0f) { return; }
    n->max_sums.data = (float *)head->dy.rows.codes;
    n->max_sums.bytes = (size_t)n->chunk_rows * (size_t)head->N;
}

void network_start(Network *n) {
    const ModelConfig *c = &n->run->config;
    const Params *p = n->params;
    bool llama = c->arch == ARCH_LLAMA;
    const LinearLayer *below = NULL; // the last layer of the previous block
    send_rope_table(n);
    n->d_attention = n->d_norm;
    n->d_fc1 = n->d_qkv;
    n->input.bf16 = n->activated.bf16 = n->d_activated = n->d_qkv.bf16;
    n->wte = params_weights(p, TENSOR_TOKEN_EMBEDDING, 0, NULL);
    n->wpe = params_weights(p, TENSOR_POSITION_EMBEDDING, 0, NULL);
    n->dwte = params_gradient(p, TENSOR_TOKEN_EMBEDDING, 0);
    n->dwpe = params_gradient(p, TENSOR_POSITION_EMBEDDING, 0);
    for (int l = 0; l < c->num_layers; l++) {
        Block *b = &n->blocks[l];
        BlockBuffer list[BLOCK_BUFFERS];
        list_block_buffers(n->run, b, 1, list);
        for (int i = 0; i < BLOCK_BUFFERS; i++) {
            void **field = block_field(b, &list[i]);
            if (*field == NULL && list[i].bytes > 0) {
                *field = *block_field(&n->shared, &list[i]);
            }
        }
        if (!c->qk_norm) { b->rotated = b->qkv_out; }
        start_linear(n, &b->qkv, &n->input, &n->d_qkv);
        start_linear(n, &b->attention_out, &n->input, &n->d_residual);
        start_linear(n, &b->fc1, &n->input, &n->d_fc1);
        start_linear(n, &b->fc2, &n->activated, &n->d_residual);
        start_activation(n, b);
        start_norm(n, &b->norm1, TENSOR_NORM1_WEIGHT, l, b->residual, below);
        start_norm(n, &b->norm2, TENSOR_NORM2_WEIGHT, l, b->residual_mid, &b->attention_out);
        b->rope = (RotaryBackward){
            .rotary = {.table = llama ? n->rope : NULL,
                       .query_weight = params_weights(p, TENSOR_QUERY_NORM_WEIGHT, l, NULL),
                       .key_weight = params_weights(p, TENSOR_KEY_NORM_WEIGHT, l, NULL),
                       .eps = (float)c->norm_eps,
                       .H = c->num_heads,
                       .G = c->num_groups,
                       .D = c->head_size},
            .qkv = b->qkv_out,
            .dquery_weight = params_gradient(p, TENSOR_QUERY_NORM_WEIGHT, l),
            .dkey_weight = params_gradient(p, TENSOR_KEY_NORM_WEIGHT, l),
            .column_sums = b->qkv.dbias,
            .scratch = n->partial_sums};
        b->matmul_rotates = llama && !c->qk_norm && gpu_matmul_rotates(c->head_size) &&
                            has_wide_matmul(n, &b->qkv);
        below = &b->fc2;
    }
    start_norm(n, &n->final_norm, TENSOR_FINAL_NORM_WEIGHT, 0, n->residual_out, below);
    start_head(n);
}

void network_receive(Network *n, int bucket) {
    const ModelConfig *c = &n->run->config;
    if (!params_receive(n->params, bucket)) { return; }
    if (bucket == (c->tied_head ? 0 : c->num_layers + 1)) { linear_receive(n->gpu, &n->head); }
    if (bucket == 0 || bucket > c->num_layers) { return; }
    for (int i = 0; i < LINEAR_HEAD; i++) {
        linear_receive(n->gpu, &n->blocks[bucket - 1].linear[i]);
    }
}
