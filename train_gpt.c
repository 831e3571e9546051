// The CPU trainer: GPT-2 and Llama (with Qwen's QKV bias and QK norm) in FP32, with hand-written
// backward passes. Read it from top to bottom: memory, layers, blocks, forward, loss, backward,
// update, evaluation, samples, checkpoints, the loop. train_gpt.cu has the same functions in the
// same order.
//
// The linear layers can round their operands to BF16 or FP8 as the GPU does (model/precision.h);
// the matmuls of the rounded operands and all else stay FP32. So this file is the reference for
// the GPU's numerics, and shows the effect of FP8 on a loss curve without a GPU.
//
// Shapes: B sequences of T tokens, M = B * T, C channels, L blocks, H heads, G key/value heads, D
// head size, N = (H + 2G) * D, F feed-forward, V vocabulary, P padded vocabulary.
#include "base/host.h"
#include "base/rng.h"
#include "kernels/cpu.h"
#include "model/plan.h"
#include "ranks/launch.h"
#include "train/metrics.h"
#include "train/run.h"
#include "train/run_data.h"
#include "train/start.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// A linear layer Y[M,N] = X[M,C] W' (+ bias): its parameters, and how its operands are rounded.
typedef struct {
    int N, C;
    const float *weight, *bias; // [N,C], [N]; bias NULL: none
    float *rounded;             // [N,C] the weight as matmuls read it; in FP32 runs it is `weight`
    float *dweight, *dbias;
    // number: format of the operands of the forward matmul and of the input gradient; wgrad:
    // format of the operands of the weight gradient
    NumberFormat number, wgrad;
    const Fp8Type *type; // [OPERAND_COUNT]
    int slot;            // index of X's scaling state; the states of W and dY follow
} CpuLinear;

// LayerNorm, or RMSNorm if bias is NULL.
typedef struct {
    const float *weight, *bias; // [C]
    float *dweight, *dbias;
    float *out;         // [M,C]
    float *mean, *rstd; // [M]
} CpuNorm;

// The layers of a block, and the tensors that its backward pass needs.
typedef struct {
    CpuNorm norm1, norm2;
    union {
        struct {
            CpuLinear qkv, attention_out, fc1, fc2;
        };
        CpuLinear linear[LINEAR_HEAD];
    };
    const float *query_norm, *key_norm; // [D] QK norm; NULL: none
    float *dquery_norm, *dkey_norm;
    float *residual;     // [M,C] the block's input
    float *qkv_out;      // [M,N]
    float *rotated;      // [M,N] what attention reads; without QK norm this is qkv_out
    float *qk_rstd;      // [M,H+G] rstd of QK norm
    float *attention;    // [M,H*D]
    float *lse;          // [B,H,T]
    float *residual_mid; // [M,C] the residual after attention
    float *fc1_out;      // [M,F], Llama [M,2F]
    float *activated;    // [M,F]
} CpuBlock;

typedef struct {
    Run run;
    Plan plan;
    void *memory;

    float *weights, *gradients, *exp_avg, *exp_avg_sq; // [layout.size]
    float *rounded;                                    // the weights, rounded for matmuls
    Fp8Scale *slots;                                   // [fp8_slot_count]
    float *amax_history;                               // [fp8_slot_count, history_length]
    Fp8Counts *counts;                                 // [fp8_slot_count]
    // whether the present step counts FP8 codes (--fp8-stats-interval)
    bool counting;

    int *inputs, *targets; // [B,T]
    // [B,T] where each token's document begins (kernels/cpu.h); NULL: documents are not kept apart.
    // attention_starts is `starts` if attention restarts at each document, else NULL;
    // position_starts is `starts` if positions restart at each document, else NULL
    int *starts, *attention_starts, *position_starts;
    const float *wte, *wpe; // [P,C], [positions,C]; wpe NULL: the model has none
    float *dwte, *dwpe;
    CpuBlock *blocks; // [L]
    CpuNorm final_norm;
    CpuLinear head;
    float *residual_out; // [M,C] the residual after the last block
    float *logits;       // [chunk_rows,P]
    float *losses;       // [M]
    float *rope;         // [T,D]
    int chunk_rows;

    float *d_residual, *d_norm, *d_qkv, *d_attention, *d_fc1, *d_activated;
    float *operand_a, *operand_b; // rounded operands of one matmul
    float *muon;                  // scratch of muon_orthogonalize
    Bucket whole;                 // all parameters, because there is one rank
    // [3, layout.size] copies of weights, exp_avg and exp_avg_sq, which a save in the background
    // reads
    float *snapshot;
    Fp8Scale *snapshot_slots;
    float *snapshot_history;
} Trainer;

// ---- memory -----------------------------------------------------------------------------------

static void plan_norm(Plan *plan, CpuNorm *norm, int64_t M, int C) {
    PLAN(plan, "norms", M * C, norm->out);
    PLAN(plan, "norms' means", M, norm->mean);
    PLAN(plan, "norms' rstds", M, norm->rstd);
}

static void plan_block(Plan *plan, CpuBlock *b, const ModelConfig *c, int64_t M) {
    int64_t heads = (int64_t)c->num_heads * c->head_size, normalised = c->qk_norm ? M : 0;
    PLAN(plan, "block residual", M * c->channels, b->residual);
    plan_norm(plan, &b->norm1, M, c->channels);
    PLAN(plan, "block qkv", M * qkv_rows(c), b->qkv_out);
    PLAN(plan, "block qkv, rotated", normalised * qkv_rows(c), b->rotated);
    PLAN(plan, "block qk rstd", normalised * (c->num_heads + c->num_groups), b->qk_rstd);
    PLAN(plan, "block attention", M * heads, b->attention);
    PLAN(plan, "block log-sum-exp", M * c->num_heads, b->lse);
    PLAN(plan, "block residual mid", M * c->channels, b->residual_mid);
    plan_norm(plan, &b->norm2, M, c->channels);
    PLAN(plan, "block fc1", M * fc1_rows(c), b->fc1_out);
    PLAN(plan, "block activated", M * c->ffn, b->activated);
}

static void plan_state(Trainer *t) {
    const Run *run = &t->run;
    Plan *plan = &t->plan;
    int64_t size = run->layout.size, slots = fp8_slot_count(&run->config);
    bool rounds = strcmp(precision_name(&run->precision), "FP32") != 0;
    bool delayed = run->precision.format != FP8_FORMAT_NONE &&
                   run->precision.recipe == FP8_RECIPE_DELAYED;
    bool saves = options_save(&run->options);
    int64_t history = delayed ? slots * run->precision.history_length : 0, muon = 0;
    int64_t learned = options_train(&run->options) ? size : 0;
    for (int i = 0; i < run->layout.count && learned > 0; i++) {
        const Param *p = &run->layout.params[i];
        if (run_by_muon(run, p)) { muon = max64(muon, muon_scratch(p->rows, p->cols)); }
    }
    plan_section(plan, "weights", PHASE_ALWAYS);
    PLAN(plan, "weights", size, t->weights);
    PLAN(plan, "rounded weights", rounds ? size : 0, t->rounded);
    plan_section(plan, "gradients", PHASE_ALWAYS);
    PLAN(plan, "gradients", learned, t->gradients);
    plan_section(plan, "optimizer", PHASE_ALWAYS);
    PLAN(plan, "first moment", learned, t->exp_avg);
    PLAN(plan, "second moment", learned, t->exp_avg_sq);
    PLAN(plan, "Newton-Schulz scratch", muon, t->muon);
    plan_section(plan, "scaling", PHASE_ALWAYS);
    PLAN(plan, "slots", slots, t->slots);
    PLAN(plan, "counts", run->options.fp8_stats_interval > 0 ? slots : 0, t->counts);
    PLAN(plan, "amax history", history, t->amax_history);
    plan_section(plan, "checkpoint", PHASE_ALWAYS);
    PLAN(plan, "snapshot", saves ? 3 * size : 0, t->snapshot);
    PLAN(plan, "snapshot slots", saves && delayed ? slots : 0, t->snapshot_slots);
    PLAN(plan, "snapshot amax history", saves ? history : 0, t->snapshot_history);
}

// How many blocks have activations of their own. A backward pass reads those of every block. In a
// run without backward passes, all blocks use the same buffers.
static int planned_blocks(const Trainer *t) {
    return options_train(&t->run.options) ? t->run.config.num_layers : 1;
}

static void plan_activations(Trainer *t) {
    enum { LOGITS = 16 << 20 }; // the most logits in a chunk, unless one row has more
    const ModelConfig *c = &t->run.config;
    Plan *plan = &t->plan;
    int64_t B = options_batch(&t->run.options);
    int64_t T = c->seq_length, M = B * T, C = c->channels;
    int64_t heads = (int64_t)c->num_heads * c->head_size;
    int64_t backward = options_train(&t->run.options) ? M : 0; // tokens of a backward pass
    t->blocks = calloc_or_die((size_t)c->num_layers, sizeof(CpuBlock));
    t->chunk_rows = (int)min64(M, max64(1, LOGITS / c->padded_vocab));
    if (precision_of(&t->run.precision, LINEAR_HEAD, 0)->number == NUMBER_FP8) {
        t->chunk_rows = (int)M; // a scale depends on all rows of a tensor, so there is one chunk
    }
    int64_t logits = (int64_t)t->chunk_rows * c->padded_vocab;
    plan_section(plan, "data", PHASE_ALWAYS);
    PLAN(plan, "rotary table", T * c->head_size, t->rope);
    PLAN(plan, "inputs", M, t->inputs);
    PLAN(plan, "targets", M, t->targets);
    PLAN(plan, "document starts", run_resets(&t->run) ? M : 0, t->starts);
    plan_section(plan, "activations", PHASE_STEP);
    for (int l = 0; l < planned_blocks(t); l++) { plan_block(plan, &t->blocks[l], c, M); }
    PLAN(plan, "last residual", M * C, t->residual_out);
    plan_norm(plan, &t->final_norm, M, c->channels);
    PLAN(plan, "losses", M, t->losses);
    plan_section(plan, "scratch", PHASE_STEP);
    PLAN(plan, "logits", logits, t->logits);
    PLAN(plan, "d residual", backward * C, t->d_residual);
    PLAN(plan, "d norm", backward * C, t->d_norm);
    PLAN(plan, "d qkv", backward * qkv_rows(c), t->d_qkv);
    PLAN(plan, "d attention", backward * heads, t->d_attention);
    PLAN(plan, "d fc1", backward * fc1_rows(c), t->d_fc1);
    PLAN(plan, "d activated", backward * c->ffn, t->d_activated);
    int64_t widest = max64(max64(C, qkv_rows(c)), max64(fc1_rows(c), heads));
    int64_t operand = max64(M * widest, logits);
    if (t->run.options.eval_precision == EVAL_BF16) { // the buffers also hold rounded weights
        operand = max64(operand, C * max64(widest, c->padded_vocab));
    }
    if (strcmp(precision_name(&t->run.precision), "FP32") == 0) { operand = 0; }
    PLAN(plan, "rounded operand", operand, t->operand_a);
    PLAN(plan, "rounded operand 2", operand, t->operand_b);
}

static float *tensor_of(Trainer *t, float *space, TensorId id, int layer) {
    const Param *p = param_find(&t->run.layout, id, layer);
    return p != NULL && space != NULL ? space + p->offset : NULL;
}

static void resolve_norm(Trainer *t, CpuNorm *norm, TensorId weight, int layer) {
    const TensorId bias = (TensorId)(weight + 1);
    bool layernorm = t->run.config.arch == ARCH_GPT2;
    norm->weight = tensor_of(t, t->weights, weight, layer);
    norm->dweight = tensor_of(t, t->gradients, weight, layer);
    norm->bias = layernorm ? tensor_of(t, t->weights, bias, layer) : NULL;
    norm->dbias = layernorm ? tensor_of(t, t->gradients, bias, layer) : NULL;
}

static CpuLinear resolve_linear(Trainer *t, Linear linear, int layer) {
    const LinearPrecision *lp = precision_of(&t->run.precision, linear, layer);
    float *rounded = t->rounded != NULL ? t->rounded : t->weights;
    return (CpuLinear){.N = lp->outputs,
                       .C = lp->inputs,
                       .weight = tensor_of(t, t->weights, lp->weight, layer),
                       .bias = tensor_of(t, t->weights, lp->bias, layer),
                       .rounded = tensor_of(t, rounded, lp->weight, layer),
                       .dweight = tensor_of(t, t->gradients, lp->weight, layer),
                       .dbias = tensor_of(t, t->gradients, lp->bias, layer),
                       .number = lp->number,
                       .wgrad = lp->wgrad,
                       .type = lp->type,
                       .slot = fp8_slot_index(&t->run.config, linear, layer, OPERAND_X)};
}

// Sets the pointers that a step uses. Call it after the plan has its memory.
static void resolve(Trainer *t) {
    const ModelConfig *c = &t->run.config;
    t->wte = tensor_of(t, t->weights, TENSOR_TOKEN_EMBEDDING, 0);
    t->wpe = tensor_of(t, t->weights, TENSOR_POSITION_EMBEDDING, 0);
    t->dwte = tensor_of(t, t->gradients, TENSOR_TOKEN_EMBEDDING, 0);
    t->dwpe = tensor_of(t, t->gradients, TENSOR_POSITION_EMBEDDING, 0);
    for (int l = 0; l < c->num_layers; l++) {
        CpuBlock *b = &t->blocks[l];
        if (l >= planned_blocks(t)) { *b = t->blocks[0]; }
        resolve_norm(t, &b->norm1, TENSOR_NORM1_WEIGHT, l);
        resolve_norm(t, &b->norm2, TENSOR_NORM2_WEIGHT, l);
        for (int i = 0; i < LINEAR_HEAD; i++) { b->linear[i] = resolve_linear(t, (Linear)i, l); }
        b->query_norm = tensor_of(t, t->weights, TENSOR_QUERY_NORM_WEIGHT, l);
        b->key_norm = tensor_of(t, t->weights, TENSOR_KEY_NORM_WEIGHT, l);
        b->dquery_norm = tensor_of(t, t->gradients, TENSOR_QUERY_NORM_WEIGHT, l);
        b->dkey_norm = tensor_of(t, t->gradients, TENSOR_KEY_NORM_WEIGHT, l);
        if (b->query_norm == NULL) { b->rotated = b->qkv_out; }
    }
    t->attention_starts = t->run.options.reset_attention_mask ? t->starts : NULL;
    t->position_starts = t->run.options.reset_position_ids ? t->starts : NULL;
    resolve_norm(t, &t->final_norm, TENSOR_FINAL_NORM_WEIGHT, 0);
    t->head = resolve_linear(t, LINEAR_HEAD, 0);
}

static void configure(Trainer *t) {
    const Options *options = &t->run.options;
    bool rounds = options->bf16 || options->fp8_format != FP8_FORMAT_NONE;
    run_configure(&t->run, (NumberSupport){rounds ? NUMBER_BF16 : NUMBER_FP32, NULL, 0});
}

static void plan_memory(Trainer *t) {
    plan_state(t);
    plan_activations(t);
}

static int64_t planned_bytes(void *group, const Options *options) {
    FREED Trainer *t = calloc_or_die(1, sizeof(Trainer));
    t->run.options = *options;
    t->run.group = *(const Group *)group;
    configure(t);
    plan_memory(t);
    int64_t bytes = t->plan.bytes;
    run_free_configuration(&t->run);
    free(t->blocks);
    plan_free(&t->plan);
    return bytes;
}

// Plans the memory, starts the run (run_start), and allocates the memory. Before the call, all of
// *t must be zero, except run.options and run.group.
static void trainer_open(Trainer *t) {
    const Options *options = &t->run.options;
    char device[128], size[32], have[32], words[80] = "";
    configure(t);
    run_announce(&t->run);
    options_note_idle(options, false);
    t->whole = (Bucket){0, t->run.layout.size};
    plan_memory(t);
    double memory = host_memory(NULL);
    const bool fits = (double)t->plan.bytes <= memory;
    Options fit;
    if (!fits && run_find_fit(&t->run, memory, planned_bytes, &t->run.group, &fit)) {
        run_say_fit(&t->run, &fit, words);
    }
    if (options->plan) {
        plan_print(&t->plan, "Memory plan", stdout);
        if (words[0] != '\0') { printf("What fits %s\n  %s\n", format_bytes(have, memory), words); }
        exit_answered();
    }
    if (!fits) {
        die("out of memory: the plan needs %s, %s are available: try %s%sa smaller model (--plan)",
            format_bytes(size, (double)t->plan.bytes), format_bytes(have, memory), words,
            words[0] != '\0' ? ", or " : "");
    }
    snprintf(device, sizeof(device), "CPU, %d thread%s", omp_get_max_threads(),
             plural(omp_get_max_threads()));
    t->run.memory_bytes = (double)t->plan.bytes;
    run_start(&t->run, device);
    printf("  memory      %s (--plan lists it)\n", format_bytes(size, (double)t->plan.bytes));
    t->memory = aligned_alloc(PLAN_ALIGN, (size_t)t->plan.bytes);
    if (t->memory == NULL) { die("out of memory: the plan needs %s (--plan)", size); }
    memset(t->memory, 0, (size_t)t->plan.bytes);
    plan_assign(&t->plan, t->memory);
    resolve(t);
    const ModelConfig *c = &t->run.config;
    rope_table(t->rope, c->seq_length, c->head_size, &c->rope);
}

static int trainer_close(Trainer *t) {
    int status = run_close(&t->run);
    free(t->blocks);
    free(t->memory);
    plan_free(&t->plan);
    return status;
}

// ---- linear layers ----------------------------------------------------------------------------

// Why an operand is rounded.
typedef enum {
    FOR_TRAINING,   // the matmul sums over the operand's columns
    FOR_EVALUATION, // like FOR_TRAINING, but the amax does not enter the history
    FOR_WGRAD       // the weight gradient sums over the operand's rows, with FOR_TRAINING's scale
} Purpose;

// Returns the scale of the whole tensor x. With delayed scaling it is the slot's scale. With
// tensorwise scaling, or if the slot's scale is not known yet, it is computed from the amax of x.
// In training, the slot receives the scale and, with delayed scaling, also the amax, which enters
// the history later.
static float fp8_scale_for(Trainer *t, int slot_index, Purpose purpose, const float *x, int64_t n) {
    const Precision *p = &t->run.precision;
    Fp8Scale *slot = &t->slots[slot_index];
    bool delayed = p->recipe == FP8_RECIPE_DELAYED, known = delayed && fp8_scale_known(slot);
    bool record = purpose == FOR_TRAINING;
    float scale = slot->scale;
    if (purpose == FOR_WGRAD || fp8_slot_is_fixed(p, slot_index) || (known && !record)) {
        return scale;
    }
    float amax = tensor_amax(x, n);
    if (!known) { scale = fp8_scale(amax, fp8_slot_target(p, slot_index), 1.0f); }
    // amaxes are compared as integers, so that NaN is larger than any number
    if (record && delayed && float_bits(amax) > float_bits(slot->amax)) { slot->amax = amax; }
    if (record) {
        slot->scale = scale;
        slot->scale_inv = 1.0f / scale;
    }
    return scale;
}

// Rounds an operand of the layer: X or W, which are [rows,C], or dY [rows,N]. Returns a factor by
// which the matmul's result must be multiplied.
static float round_operand(Trainer *t, const CpuLinear *l, OperandId operand, NumberFormat number,
                           Purpose purpose, float *out, const float *x, int rows) {
    const Precision *p = &t->run.precision;
    int columns = operand == OPERAND_DY ? l->N : l->C, slot = l->slot + (int)operand;
    int64_t n = (int64_t)rows * columns;
    Fp8Type type = l->type[operand];
    Scaling scaling = fp8_slot_scaling(p, slot);
    Fp8Counts *counts = t->counting && purpose == FOR_TRAINING ? &t->counts[slot] : NULL;
    if (number != NUMBER_FP8) {
        round_to_bf16(out, x, n);
        return 1.0f;
    }
    if (fp8_by_blocks(scaling)) {
        bool square = scaling == SCALE_BLOCK_128X128;
        Fp8Blocks blocks = {.rows = rows,
                            .columns = columns,
                            .height = square || purpose == FOR_WGRAD ? FP8_BLOCK : 1,
                            .width = square || purpose != FOR_WGRAD ? FP8_BLOCK : 1,
                            .type = type,
                            .power_of_two = p->power_of_two};
        round_blocks_to_fp8(out, x, blocks, counts);
        return 1.0f;
    }
    float scale = fp8_scale_for(t, slot, purpose, x, n);
    if (counts != NULL) { count_fp8(counts, x, n, scale, type); }
    round_to_fp8(out, x, n, scale, type);
    return 1.0f / scale;
}

// Rounds a weight for the matmuls. This is done once in each optimizer step.
static void linear_round_weight(Trainer *t, CpuLinear *l) {
    if (t->rounded == NULL) { return; }
    // the FP8 weight is rounded from the BF16 weight, as on the GPU
    round_to_bf16(l->rounded, l->weight, (int64_t)l->N * l->C);
    if (l->number == NUMBER_FP8) {
        round_operand(t, l, OPERAND_W, l->number, FOR_TRAINING, l->rounded, l->rounded, l->N);
    }
}

static void round_weights(Trainer *t) {
    for (int l = 0; l < t->run.config.num_layers; l++) {
        for (int i = 0; i < LINEAR_HEAD; i++) { linear_round_weight(t, &t->blocks[l].linear[i]); }
    }
    linear_round_weight(t, &t->head);
}

// y[M,N] = x[M,C] W' (+ bias) (+ addend)
static void linear_forward(Trainer *t, const CpuLinear *l, float *y, const float *x,
                           const float *addend, int M, Pass pass) {
    bool to_bf16 = pass == PASS_EVAL_BF16 && l->number == NUMBER_FP8;
    NumberFormat number = to_bf16 ? NUMBER_BF16 : l->number;
    Purpose purpose = pass == PASS_TRAIN ? FOR_TRAINING : FOR_EVALUATION;
    const float *w = l->rounded;
    float alpha = number == NUMBER_FP8 ? t->slots[l->slot + OPERAND_W].scale_inv : 1.0f;
    if (number != NUMBER_FP32) {
        alpha *= round_operand(t, l, OPERAND_X, number, purpose, t->operand_a, x, M);
        x = t->operand_a;
    }
    if (to_bf16) {
        round_to_bf16(t->operand_b, l->weight, (int64_t)l->N * l->C);
        w = t->operand_b;
    }
    cpu_gemm((CpuGemm){M, l->N, l->C, x, w, y, l->bias, addend, .trans_b = true, .alpha = alpha});
}

// dx[M,C] = dy[M,N] W, dW += dy' x, dbias += the column sums of dy (if the layer has a bias)
static void linear_backward(Trainer *t, const CpuLinear *l, float *dx, const float *dy,
                            const float *x, int M) {
    const float *dy_operand = dy;
    float alpha = l->number == NUMBER_FP8 ? t->slots[l->slot + OPERAND_W].scale_inv : 1.0f;
    if (l->dbias != NULL) { bias_backward(l->dbias, dy, M, l->N); }
    if (l->number != NUMBER_FP32) {
        dy_operand = t->operand_a;
        alpha *= round_operand(t, l, OPERAND_DY, l->number, FOR_TRAINING, t->operand_a, dy, M);
    }
    cpu_gemm((CpuGemm){M, l->C, l->N, dy_operand, l->rounded, dx, .alpha = alpha});
    alpha = 1.0f;
    if (l->wgrad != NUMBER_FP32) {
        alpha = round_operand(t, l, OPERAND_DY, l->wgrad, FOR_WGRAD, t->operand_a, dy, M);
        alpha *= round_operand(t, l, OPERAND_X, l->wgrad, FOR_WGRAD, t->operand_b, x, M);
        x = t->operand_b;
    }
    float *dw = l->dweight;
    cpu_gemm(
        (CpuGemm){l->N, l->C, M, dy_operand, x, dw, .addend = dw, .trans_a = true, .alpha = alpha});
}

// ---- blocks -----------------------------------------------------------------------------------

static void norm_forward(Trainer *t, const CpuNorm *n, const float *x, int M) {
    const ModelConfig *c = &t->run.config;
    cpu_norm_forward(n->out, n->mean, n->rstd, x, n->weight, n->bias, M, c->channels,
                     (float)c->norm_eps);
}

// d_residual += the norm's input gradient
static void norm_backward(Trainer *t, const CpuNorm *n, const float *x, int M) {
    cpu_norm_backward(t->d_residual, n->dweight, n->dbias, t->d_norm, x, n->weight, n->mean,
                      n->rstd, M, t->run.config.channels);
}

static void activation_forward(Trainer *t, const CpuBlock *b, int M) {
    const ModelConfig *c = &t->run.config;
    if (c->arch == ARCH_LLAMA) {
        swiglu_forward(b->activated, b->fc1_out, M, c->ffn);
    } else {
        gelu_forward(b->activated, b->fc1_out, (int64_t)M * c->ffn);
    }
}

// Computes `out`, the next block's residual, from b->residual.
static void block_forward(Trainer *t, const CpuBlock *b, float *out, int B, int T, Pass pass) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    norm_forward(t, &b->norm1, b->residual, M);
    linear_forward(t, &b->qkv, b->qkv_out, b->norm1.out, NULL, M, pass);
    if (b->query_norm != NULL) {
        qk_norm_forward(b->rotated, b->qk_rstd, b->qkv_out, b->query_norm, b->key_norm, M, H, G, D,
                        (float)c->norm_eps);
    }
    if (c->arch == ARCH_LLAMA) { rope_apply(b->rotated, t->rope, B, T, H, G, D, false); }
    attention_forward(b->attention, b->lse, b->rotated, t->attention_starts, B, T, H, G, D);
    linear_forward(t, &b->attention_out, b->residual_mid, b->attention, b->residual, M, pass);
    norm_forward(t, &b->norm2, b->residual_mid, M);
    linear_forward(t, &b->fc1, b->fc1_out, b->norm2.out, NULL, M, pass);
    activation_forward(t, b, M);
    linear_forward(t, &b->fc2, out, b->activated, b->residual_mid, M, pass);
}

static void activation_backward(Trainer *t, const CpuBlock *b, int M) {
    const ModelConfig *c = &t->run.config;
    if (c->arch == ARCH_LLAMA) {
        swiglu_backward(t->d_fc1, t->d_activated, b->fc1_out, M, c->ffn);
    } else {
        gelu_backward(t->d_fc1, t->d_activated, b->fc1_out, (int64_t)M * c->ffn);
    }
}

// Turns d_residual from the gradient of the block's output into the gradient of its input.
static void block_backward(Trainer *t, const CpuBlock *b, int B, int T) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    linear_backward(t, &b->fc2, t->d_activated, t->d_residual, b->activated, M);
    activation_backward(t, b, M);
    linear_backward(t, &b->fc1, t->d_norm, t->d_fc1, b->norm2.out, M);
    norm_backward(t, &b->norm2, b->residual_mid, M);
    linear_backward(t, &b->attention_out, t->d_attention, t->d_residual, b->attention, M);
    attention_backward(t->d_qkv, t->d_attention, b->attention, b->lse, b->rotated,
                       t->attention_starts, B, T, H, G, D);
    if (c->arch == ARCH_LLAMA) { rope_apply(t->d_qkv, t->rope, B, T, H, G, D, true); }
    if (b->query_norm != NULL) {
        qk_norm_backward(t->d_qkv, b->dquery_norm, b->dkey_norm, b->qkv_out, b->query_norm,
                         b->key_norm, b->qk_rstd, M, H, G, D);
    }
    linear_backward(t, &b->qkv, t->d_norm, t->d_qkv, b->norm1.out, M);
    norm_backward(t, &b->norm1, b->residual, M);
}

// ---- forward, loss, backward --------------------------------------------------------------------

// Computes the output of the final norm from inputs [B,T].
static void model_forward(Trainer *t, int B, int T, Pass pass) {
    const ModelConfig *c = &t->run.config;
    plan_guard_poison(&t->plan);
    embedding_forward(t->blocks[0].residual, t->inputs, t->position_starts, t->wte, t->wpe, B, T,
                      c->channels);
    for (int l = 0; l < c->num_layers; l++) {
        float *out = l + 1 < c->num_layers ? t->blocks[l + 1].residual : t->residual_out;
        block_forward(t, &t->blocks[l], out, B, T, pass);
    }
    norm_forward(t, &t->final_norm, t->residual_out, B * T);
}

// Computes the logits of `rows` rows of the final norm's output, from row number `row` on. Returns
// the address of these rows in the norm's output.
static const float *head_forward(Trainer *t, int row, int rows, Pass pass) {
    const float *x = t->final_norm.out + (size_t)row * t->run.config.channels;
    linear_forward(t, &t->head, t->logits, x, NULL, rows, pass);
    return x;
}

// Computes the LM head and the loss, one chunk of rows at a time, so that the logits of all rows
// are never in memory together. Returns the sum of the losses. If gradient_scale > 0, also computes
// d_norm and adds to the gradient of the head's weight.
static double head_loss(Trainer *t, int M, float gradient_scale, Pass pass) {
    const ModelConfig *c = &t->run.config;
    double sum = 0;
    LossTerms terms = c->loss;
    terms.gradient_scale = gradient_scale;
    for (int row = 0; row < M; row += t->chunk_rows) {
        int rows = (int)min64(t->chunk_rows, M - row);
        const float *x = head_forward(t, row, rows, pass);
        cross_entropy(t->losses + row, t->logits, t->targets + row, rows, c->vocab, c->padded_vocab,
                      terms);
        if (gradient_scale > 0) {
            linear_backward(t, &t->head, t->d_norm + (size_t)row * c->channels, t->logits, x, rows);
        }
    }
    for (int i = 0; i < M; i++) { sum += t->losses[i]; }
    return sum;
}

// Goes backward from d_norm, the gradient of the final norm's output, down to the embeddings.
static void model_backward(Trainer *t, int B, int T) {
    const ModelConfig *c = &t->run.config;
    memset(t->d_residual, 0, (size_t)B * T * c->channels * sizeof(float));
    norm_backward(t, &t->final_norm, t->residual_out, B * T);
    for (int l = c->num_layers - 1; l >= 0; l--) { block_backward(t, &t->blocks[l], B, T); }
    embedding_backward(t->dwte, t->dwpe, t->d_residual, t->inputs, t->position_starts, B, T,
                       c->channels);
}

// ---- update -----------------------------------------------------------------------------------

// Moves the step's amaxes into their history, and updates the delayed scales. A skipped step does
// neither: it drops the amaxes of activations and gradients, but keeps the amaxes of the weights,
// because the weights have not changed.
static void scaling_update(Trainer *t, bool skipped) {
    const Run *run = &t->run;
    const Precision *p = &run->precision;
    if (t->amax_history == NULL) { return; }
    for (int i = 0; i < fp8_slot_count(&run->config); i++) {
        if (skipped && i % OPERAND_COUNT != OPERAND_W) { t->slots[i].amax = 0.0f; }
        if (skipped) { continue; }
        fp8_scale_update(&t->slots[i], t->amax_history + (int64_t)i * p->history_length,
                         p->history_length, fp8_slot_target(p, i));
    }
}

// Returns AdamW's settings except the learning rate and the weight decay, which depend on the
// tensor.
static AdamW adamw_settings(const Run *run, double norm, double factor) {
    const Options *o = &run->options;
    bool clipped = o->clip_grad > 0 && norm > o->clip_grad;
    return (AdamW){.beta1 = (float)o->adam_beta1,
                   .beta2 = (float)o->adam_beta2,
                   .eps = (float)o->adam_eps,
                   .gradient_scale = (float)(clipped ? o->clip_grad / norm * factor : factor),
                   .floor = o->adam_dtype == STATE_8BIT
                                ? (float)moment_floor(o->adam_beta1, o->adam_beta2)
                                : 0.0f,
                   .step = run->progress.step + 1 - run->progress.skipped};
}

// Replaces the gradients of the blocks' matrices by their Muon updates, one matrix at a time.
static void muon_updates(Trainer *t, float gradient_scale) {
    const Run *run = &t->run;
    float momentum = (float)run->options.muon_momentum;
    float factor = (float)run->options.muon_extra_scale_factor;
    for (const Param *p = run->layout.params; p < run->layout.params + run->layout.count; p++) {
        float *x = t->gradients + p->offset;
        int rows[HF_PARTS];
        if (!run_by_muon(run, p)) { continue; }
        muon_momentum(x, t->exp_avg + p->offset, param_size(p), momentum, gradient_scale);
        int count = param_matrices(&run->config, p, rows);
        for (int k = 0; k < count; x += (int64_t)rows[k++] * p->cols) {
            muon_orthogonalize(x, rows[k], p->cols, muon_scale(factor, rows[k], p->cols), t->muon);
        }
    }
}

// Rounds the moments to --adam-dtype. Muon's momentum has no 8-bit format: with --adam-dtype 8bit
// it is rounded to BF16.
static void round_moments(Trainer *t, const Param *p) {
    const Run *run = &t->run;
    const StateType type = run->options.adam_dtype;
    float *moments[] = {t->exp_avg + p->offset, t->exp_avg_sq + p->offset};
    bool muon = run_by_muon(run, p), bf16 = type == STATE_BF16 || (type == STATE_8BIT && muon);
    for (Moment which = MOMENT_FIRST; which <= (muon ? MOMENT_FIRST : MOMENT_SECOND); which++) {
        MomentRounding rounding = {p->offset,
                                   moment_key((uint64_t)run->options.seed, run->progress.step,
                                              bf16 ? which : MOMENT_FIRST)};
        if (bf16) {
            moment_round_bf16(moments[which], param_size(p), rounding);
        } else if (type == STATE_8BIT) {
            moment_round(moments[which], which, param_size(p), rounding);
        }
    }
}

// Updates the weights. factor: the update multiplies all gradients by it. norm: the norm of the
// gradients after this multiplication.
static void model_update(Trainer *t, double norm, double factor, double lr) {
    const Run *run = &t->run;
    AdamW adamw = adamw_settings(run, norm, factor);
    muon_updates(t, adamw.gradient_scale);
    for (const Param *p = run->layout.params; p < run->layout.params + run->layout.count; p++) {
        float *w = t->weights + p->offset, *g = t->gradients + p->offset;
        int64_t n = param_size(p);
        adamw.lr = (float)lr * param_lr_mult(p, &run->options);
        adamw.weight_decay = param_decay(p, &run->options);
        if (run_by_muon(run, p)) {
            muon_update(w, g, n, adamw.lr, adamw.weight_decay);
        } else {
            adamw_update(w, t->exp_avg + p->offset, t->exp_avg_sq + p->offset, g, n, adamw);
        }
        round_moments(t, p);
    }
    round_weights(t);
}

static void train_step(Trainer *t) {
    Run *run = &t->run;
    const Options *o = &run->options;
    int B = o->micro_batch_size, T = o->seq_length;
    double begin = wall_seconds(), loss = 0;
    double tokens = run->precision.step_tokens, targets = (double)run_step_targets(run, 0);
    t->counting = run_counts_fp8(run, run->progress.step + 1);
    memset(t->gradients, 0, (size_t)run->layout.size * sizeof(float));
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        run_batch(run, 0, micro, t->inputs, t->targets, t->starts);
        model_forward(t, B, T, PASS_TRAIN);
        loss += head_loss(t, B * T, (float)(1.0 / tokens), PASS_TRAIN);
        model_backward(t, B, T);
    }
    double factor = tokens / targets, squares = sum_of_squares(t->gradients, run->layout.size);
    StepResult result = {.loss = loss / targets,
                         .norm = sqrt(squares * factor * factor),
                         .lr = learning_rate(o, run->progress.step)};
    if (o->dump_gradients[0] != '\0') { run_dump(run, t->gradients, result.loss); }
    int64_t step = run->progress.step + 1;
    result.skipped = step_skip(&run->progress.window, o->skip_spikes,
                               options_next_skip(o, step) == step, result.loss, result.norm);
    scaling_update(t, result.skipped);
    if (!result.skipped) { model_update(t, result.norm, factor, result.lr); }
    or_die(plan_guard_check(&t->plan));
    result.seconds = wall_seconds() - begin;
    run_report(run, result);
    if (!t->counting) { return; }
    run_report_fp8(run, t->counts);
    memset(t->counts, 0, (size_t)fp8_slot_count(&run->config) * sizeof(Fp8Counts));
    t->counting = false;
}

// ---- evaluation, samples, checkpoints ---------------------------------------------------------

// Makes each sequence of the batch one document. tokens: the number of tokens in the batch.
static void one_document_each(Trainer *t, size_t tokens) {
    if (t->starts != NULL) { memset(t->starts, 0, tokens * sizeof(int)); }
}

static void choice_losses(void *trainer, const int *inputs, const int *targets, int B, int T,
                          float *losses) {
    Trainer *t = trainer;
    size_t tokens = (size_t)B * (size_t)T;
    Pass pass = eval_pass(&t->run.options);
    memcpy(t->inputs, inputs, tokens * sizeof(int));
    memcpy(t->targets, targets, tokens * sizeof(int));
    one_document_each(t, tokens);
    model_forward(t, B, T, pass);
    head_loss(t, B * T, 0.0f, pass);
    memcpy(losses, t->losses, tokens * sizeof(float));
}

static void validate(Trainer *t) {
    Run *run = &t->run;
    int B = run->options.micro_batch_size, T = run->options.seq_length;
    Pass pass = eval_pass(&run->options);
    int sources = run->valid_data.count;
    double begin = wall_seconds();
    FREED double *losses = calloc_or_die((size_t)sources, sizeof(double));
    for (int i = 0; i < sources; i++) {
        int64_t samples = run_eval_samples(run, i);
        for (int64_t sample = 0; sample < samples && run_stop_signal() == 0; sample += B) {
            run_eval_batch(run, i, sample, t->inputs, t->targets, t->starts);
            model_forward(t, B, T, pass);
            losses[i] += head_loss(t, B * T, 0.0f, pass);
        }
        losses[i] /= (double)run_eval_targets(run, i);
    }
    run_report_eval(run, losses, wall_seconds() - begin);
}

static void evaluate(Trainer *t) {
    if (t->run.valid_data.count > 0) { validate(t); }
    run_score_choices(&t->run, (ChoiceModel){.trainer = t, .losses = choice_losses});
}

static float *next_logits(void *trainer, const int *tokens, int n) {
    Trainer *t = trainer;
    Pass pass = eval_pass(&t->run.options);
    memcpy(t->inputs, tokens, (size_t)n * sizeof(int));
    one_document_each(t, (size_t)n);
    model_forward(t, 1, n, pass);
    head_forward(t, n - 1, 1, pass);
    return t->logits;
}

// Saves a checkpoint if one is due. Training waits for the previous save and while the state is
// copied; a thread writes the copy.
static void maybe_save(Trainer *t) {
    Run *run = &t->run;
    if (!run_should_save(run)) { return; }
    run_wait_for_save(run);
    size_t size = (size_t)run->layout.size, bytes = size * sizeof(float);
    if (t->snapshot_slots != NULL) {
        size_t slots = (size_t)fp8_slot_count(&run->config);
        size_t history = slots * (size_t)run->precision.history_length;
        memcpy(t->snapshot_slots, t->slots, slots * sizeof(Fp8Scale));
        memcpy(t->snapshot_history, t->amax_history, history * sizeof(float));
    }
    Snapshot s = {.model_dtype = DTYPE_F32,
                  .model = t->snapshot,
                  .num_ranges = 1,
                  .ranges = &t->whole,
                  .slots = t->snapshot_slots,
                  .amax_history = t->snapshot_history};
    const float *const arrays[] = {t->weights, t->exp_avg, t->exp_avg_sq};
    for (int i = STATE_MASTER; i <= STATE_EXP_AVG_SQ; i++) {
        float *copy = memcpy(t->snapshot + (size_t)i * size, arrays[i], bytes);
        s.state[i] = (SavedArray){DTYPE_F32, run->layout.size, copy,
                                  hash_words(arrays[i], (int64_t)bytes, 0)};
    }
    run_save(run, s);
}

// Rounds the weights that a run begins with, and calibrates the FP8 scales that are not known yet
// (model/precision.h).
static void begin_rounding(Trainer *t) {
    const Precision *p = &t->run.precision;
    int B = t->run.options.micro_batch_size, T = t->run.options.seq_length;
    bool uncalibrated = fp8_is_uncalibrated(p, t->slots);
    round_weights(t);
    if (!uncalibrated || !run_has_steps(&t->run)) { return; }
    fp8_calibrate(p, t->slots);
    for (int i = 0; i < FP8_CALIBRATIONS; i++) {
        run_batch(&t->run, 0, 0, t->inputs, t->targets, t->starts);
        model_forward(t, B, T, PASS_TRAIN);
        head_loss(t, B * T, (float)(1.0 / p->step_tokens), PASS_TRAIN);
        model_backward(t, B, T);
        fp8_calibrate(p, t->slots);
    }
}

// Sets the initial weights, or the state of the checkpoint that --resume names.
static void trainer_restore(Trainer *t) {
    Run *run = &t->run;
    int64_t size = run->layout.size, learned = t->exp_avg != NULL ? size : 0;
    run_restore(run);
    if (!run->options.resumes) {
        run_first_weights(run, 0, size, t->weights);
    } else {
        run_read_state(run, STATE_MASTER, 0, size, t->weights);
        run_read_state(run, STATE_EXP_AVG, 0, learned, t->exp_avg);
        for (int i = 0; i < run->layout.count && learned > 0; i++) {
            const Param *p = &run->layout.params[i];
            if (run_by_muon(run, p)) { continue; } // Muon has no second moment
            run_read_state(run, STATE_EXP_AVG_SQ, p->offset, p->offset + param_size(p),
                           t->exp_avg_sq + p->offset);
        }
    }
    run_read_scaling(run, t->slots, t->amax_history);
    checkpoint_close(&run->start);
    begin_rounding(t);
}

// ---- the loop ---------------------------------------------------------------------------------

int main(int argc, char **argv) {
    static Trainer t;
    Options *options = &t.run.options;
    threads_spin_briefly(argv);
    options_parse(options, argc, argv);
    if (options->verify) { die("--verify is for the GPU trainer: ./train_gptcu --verify"); }
    launch_refuse(&t.run.group, options);
    run_resolve_options(&t.run);
    trainer_open(&t);
    trainer_restore(&t);
    if (!options_train(options)) {
        if (options->eval_only) { evaluate(&t); }
        if (options->sample_only) { run_sample(&t.run, next_logits, &t); }
        return trainer_close(&t);
    }
    if (t.run.progress.eval_left) { evaluate(&t); }
    while (run_goes_on(&t.run)) {
        train_step(&t);
        if (t.run.progress.eval_left) { evaluate(&t); }
        if (run_should_sample(&t.run)) { run_sample(&t.run, next_logits, &t); }
        maybe_save(&t);
    }
    maybe_save(&t);
    return trainer_close(&t);
}
