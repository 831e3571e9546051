// The CPU trainer: GPT-2 and Llama in FP32, forward and backward by hand. Reads top to bottom:
// memory, linear layers, blocks, forward, loss, backward, update, then evaluation, samples,
// checkpoints and the loop. train_gpt.cu has the same functions in the same order.
//
// The linear layers can round their operands to BF16 or FP8 as the GPU would (model/precision.h);
// their products and everything else stay FP32. That makes this file the reference for the GPU's
// numerics, and shows FP8's effect on a loss curve without a GPU.
//
// Shapes: B sequences of T tokens, M = B * T, C channels, L blocks, H heads, G key/value heads, D
// head size, N = (H + 2G) * D, F feed-forward, V vocabulary, P padded vocabulary.
#include "kernels/cpu.h"
#include "kernels/cpu_gemm.h"
#include "model/plan.h"
#include "ranks/launch.h"
#include "train/run.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// What a block keeps for its backward pass.
typedef struct {
    float *residual;      // [M,C] its input
    float *norm1;         // [M,C]
    float *mean1, *rstd1; // [M]
    float *qkv;           // [M,N] rotated
    float *attention;     // [M,H*D]
    float *lse;           // [B,H,T]
    float *residual_mid;  // [M,C] after attention
    float *norm2;         // [M,C]
    float *mean2, *rstd2; // [M]
    float *fc1;           // [M,F], Llama [M,2F]
    float *activated;     // [M,F]
} Block;

typedef struct {
    Run run;
    Plan plan;
    void *memory;

    float *weights, *gradients, *exp_avg, *exp_avg_sq; // [layout.size]
    float *rounded;                                    // the weights as the linear layers see them
    Fp8Slot *slots;                                    // [fp8_slot_count]
    float *amax_history;                               // [fp8_slot_count, history_length]
    Fp8Counts *counts;                                 // [fp8_slot_count]
    bool counting;                                     // this step (--fp8-stats-interval)

    int *inputs, *targets; // [B,T]
    Block *blocks;         // [L]
    float *residual_out;   // [M,C] after the last block
    float *norm_out;       // [M,C]
    float *mean_out, *rstd_out;
    float *logits; // [chunk_rows,P]
    float *losses; // [M]
    float *rope;   // [T,D]
    int chunk_rows;

    float *d_residual, *d_norm, *d_qkv, *d_attention, *d_fc1, *d_activated;
    float *operand_a, *operand_b; // rounded operands of one product
    Bucket whole;                 // the part of the parameter space this rank holds: all of it
    float *snapshot;              // [3, layout.size] what a save in the background reads
    Fp8Slot *snapshot_slots;
    float *snapshot_history;
} Trainer;

// ---- memory -----------------------------------------------------------------------------------

static void plan_floats(Trainer *t, const char *category, const char *name, int64_t n,
                        float **pointer) {
    plan_buffer(&t->plan, category, name, n * (int64_t)sizeof(float), (void **)pointer);
}

static void plan_block(Trainer *t, Block *b, int64_t M) {
    static const char category[] = "activations";
    const ModelConfig *c = &t->run.config;
    int64_t C = c->channels, heads = (int64_t)c->num_heads * c->head_size;
    plan_floats(t, category, "block residual", M * C, &b->residual);
    plan_floats(t, category, "block norm1", M * C, &b->norm1);
    plan_floats(t, category, "block norm1 mean", M, &b->mean1);
    plan_floats(t, category, "block norm1 rstd", M, &b->rstd1);
    plan_floats(t, category, "block qkv", M * qkv_rows(c), &b->qkv);
    plan_floats(t, category, "block attention", M * heads, &b->attention);
    plan_floats(t, category, "block log-sum-exp", M * c->num_heads, &b->lse);
    plan_floats(t, category, "block residual mid", M * C, &b->residual_mid);
    plan_floats(t, category, "block norm2", M * C, &b->norm2);
    plan_floats(t, category, "block norm2 mean", M, &b->mean2);
    plan_floats(t, category, "block norm2 rstd", M, &b->rstd2);
    plan_floats(t, category, "block fc1", M * fc1_rows(c), &b->fc1);
    plan_floats(t, category, "block activated", M * c->ffn, &b->activated);
}

static void plan_state(Trainer *t) {
    const Run *run = &t->run;
    int64_t size = run->layout.size, slots = fp8_slot_count(&run->config);
    int64_t history = slots * run->precision.history_length;
    bool rounds = strcmp(precision_name(&run->precision), "FP32") != 0;
    bool delayed = run->precision.format != FP8_FORMAT_NONE &&
                   run->precision.recipe == FP8_RECIPE_DELAYED;
    bool learns = options_train(&run->options), saves = options_save(&run->options);
    int64_t learned = learns ? size : 0;
    plan_floats(t, "weights", "weights", size, &t->weights);
    plan_floats(t, "weights", "rounded weights", rounds ? size : 0, &t->rounded);
    plan_floats(t, "gradients", "gradients", learned, &t->gradients);
    plan_floats(t, "optimizer", "first moment", learned, &t->exp_avg);
    plan_floats(t, "optimizer", "second moment", learned, &t->exp_avg_sq);
    plan_buffer(&t->plan, "scaling", "slots", slots * (int64_t)sizeof(Fp8Slot), (void **)&t->slots);
    plan_buffer(&t->plan, "scaling", "counts",
                run->options.fp8_stats_interval > 0 ? slots * (int64_t)sizeof(Fp8Counts) : 0,
                (void **)&t->counts);
    plan_floats(t, "scaling", "amax history", delayed ? history : 0, &t->amax_history);
    plan_floats(t, "checkpoint", "snapshot", saves ? 3 * size : 0, &t->snapshot);
    plan_buffer(&t->plan, "checkpoint", "snapshot slots",
                saves && delayed ? slots * (int64_t)sizeof(Fp8Slot) : 0,
                (void **)&t->snapshot_slots);
    plan_floats(t, "checkpoint", "snapshot amax history", saves && delayed ? history : 0,
                &t->snapshot_history);
}

static void plan_activations(Trainer *t) {
    enum { LOGITS = 16 << 20 }; // elements of a chunk of logits, at most (one row at least)
    const ModelConfig *c = &t->run.config;
    int64_t B = t->run.options.micro_batch_size, T = c->seq_length, M = B * T, C = c->channels;
    int64_t heads = (int64_t)c->num_heads * c->head_size;
    t->blocks = calloc_or_die((size_t)c->num_layers, sizeof(Block));
    t->chunk_rows = (int)min64(M, max64(1, LOGITS / c->padded_vocab));
    if (precision_of(&t->run.precision, LINEAR_HEAD, 0)->number == NUMBER_FP8) {
        t->chunk_rows = (int)M; // the range of a tensor is that of all its rows
    }
    plan_buffer(&t->plan, "data", "inputs", M * (int64_t)sizeof(int), (void **)&t->inputs);
    plan_buffer(&t->plan, "data", "targets", M * (int64_t)sizeof(int), (void **)&t->targets);
    for (int l = 0; l < c->num_layers; l++) { plan_block(t, &t->blocks[l], M); }
    plan_floats(t, "activations", "last residual", M * C, &t->residual_out);
    plan_floats(t, "activations", "last norm", M * C, &t->norm_out);
    plan_floats(t, "activations", "last norm mean", M, &t->mean_out);
    plan_floats(t, "activations", "last norm rstd", M, &t->rstd_out);
    plan_floats(t, "activations", "losses", M, &t->losses);
    plan_floats(t, "activations", "rotary table", T * c->head_size, &t->rope);
    plan_floats(t, "scratch", "logits", (int64_t)t->chunk_rows * c->padded_vocab, &t->logits);
    plan_floats(t, "scratch", "d residual", M * C, &t->d_residual);
    plan_floats(t, "scratch", "d norm", M * C, &t->d_norm);
    plan_floats(t, "scratch", "d qkv", M * qkv_rows(c), &t->d_qkv);
    plan_floats(t, "scratch", "d attention", M * heads, &t->d_attention);
    plan_floats(t, "scratch", "d fc1", M * fc1_rows(c), &t->d_fc1);
    plan_floats(t, "scratch", "d activated", M * c->ffn, &t->d_activated);
    int64_t widest = max64(max64(C, qkv_rows(c)), max64(fc1_rows(c), heads));
    int64_t operand = max64(M * widest, (int64_t)t->chunk_rows * c->padded_vocab);
    if (t->run.options.eval_precision == EVAL_BF16) { // a weight too
        operand = max64(operand, C * max64(widest, c->padded_vocab));
    }
    if (strcmp(precision_name(&t->run.precision), "FP32") == 0) { operand = 0; }
    plan_floats(t, "scratch", "rounded operand", operand, &t->operand_a);
    plan_floats(t, "scratch", "rounded operand 2", operand, &t->operand_b);
}

static void trainer_open(Trainer *t, const Options *options) {
    *t = (Trainer){0};
    bool rounds = options->bf16 || options->fp8_format != FP8_FORMAT_NONE;
    Error err;
    NumberSupport support = {rounds ? NUMBER_BF16 : NUMBER_FP32, NULL, 0};
    if (!run_configure(&t->run, options, support, &err)) { die("%s", err.text); }
    run_announce(&t->run);
    options_note_gpu_only(options);
    t->whole = (Bucket){0, t->run.layout.size};
    plan_state(t);
    plan_activations(t);
    if (options->plan) {
        plan_print(&t->plan, stdout);
        exit(EXIT_SUCCESS);
    }
    char device[128], size[32];
    snprintf(device, sizeof(device), "CPU, %d thread%s, matrix products: %s", omp_get_max_threads(),
             omp_get_max_threads() > 1 ? "s" : "", cpu_gemm_name());
    t->run.memory_bytes = (double)t->plan.bytes;
    run_start(&t->run, device);
    printf("  memory      %s (--plan lists it)\n", format_bytes(size, (double)t->plan.bytes));
    t->memory = aligned_alloc(PLAN_ALIGN, (size_t)t->plan.bytes);
    if (t->memory == NULL) { die("out of memory: the plan needs %s (--plan)", size); }
    memset(t->memory, 0, (size_t)t->plan.bytes);
    plan_assign(&t->plan, t->memory);
    const ModelConfig *c = &t->run.config;
    rope_table(t->rope, c->seq_length, c->head_size, &c->rope);
    for (int i = 0; i < fp8_slot_count(c); i++) {
        t->slots[i].scale = t->slots[i].scale_inv = 1.0f;
    }
    fp8_fix_slot(&t->run.precision, &t->run.options, t->slots);
}

static int trainer_close(Trainer *t) {
    int status = run_close(&t->run);
    free(t->blocks);
    free(t->memory);
    plan_free(&t->plan);
    return status;
}

// ---- linear layers ----------------------------------------------------------------------------

static float *tensor_of(Trainer *t, float *space, TensorId id, int layer) {
    const Param *p = param_find(&t->run.layout, id, layer);
    return p != NULL ? space + p->offset : NULL;
}

static float *weight_of(Trainer *t, TensorId id, int layer) {
    return tensor_of(t, t->weights, id, layer);
}

static float *gradient_of(Trainer *t, TensorId id, int layer) {
    return tensor_of(t, t->gradients, id, layer);
}

// The scale to quantise x by. Delayed slots with a history have one; the others measure x. When
// recording, the slot takes it over, and x's range goes towards the history.
static float fp8_choose_scale(Trainer *t, int slot_index, const float *x, int64_t n, bool record) {
    const Precision *p = &t->run.precision;
    Fp8Slot *slot = &t->slots[slot_index];
    bool delayed = p->recipe == FP8_RECIPE_DELAYED;
    if (fp8_slot_is_fixed(p->config, slot_index)) { return slot->scale; }
    if (delayed && slot->count > 0 && !record) { return slot->scale; }
    float amax = tensor_amax(x, n), scale = slot->scale;
    if (!delayed || slot->count == 0) {
        scale = fp8_scale(amax, fp8_slot_target(p, slot_index), 1.0f);
    }
    if (record) {
        // by their bits, so that NaN counts as the largest and spoils the entry
        if (delayed && float_bits(amax) > float_bits(slot->amax)) { slot->amax = amax; }
        slot->scale = scale;
        slot->scale_inv = 1.0f / scale;
    }
    return scale;
}

static float fp8_scale_for(Trainer *t, int slot, const float *x, int64_t n, bool record) {
    float scale = fp8_choose_scale(t, slot, x, n, record);
    if (record && t->counting) {
        Fp8Type type = t->run.precision.linear[slot / OPERAND_COUNT].type[slot % OPERAND_COUNT];
        count_fp8(&t->counts[slot], x, n, scale, type);
    }
    return scale;
}

// Rounds one operand of a linear layer's product; returns the factor its product is to be
// multiplied by. `out` may be x where nothing is rounded.
static float round_operand(Trainer *t, Number number, Linear linear, int layer, Operand operand,
                           float scale, float *out, const float *x, int64_t n) {
    Fp8Type type = precision_of(&t->run.precision, linear, layer)->type[operand];
    if (number == NUMBER_FP8) {
        round_to_fp8(out, x, n, scale, type);
        return 1.0f / scale;
    }
    round_to_bf16(out, x, n);
    return 1.0f;
}

// The weights as the linear layers see them; once an optimizer step.
static void round_weights(Trainer *t) {
    const ModelConfig *c = &t->run.config;
    if (t->rounded == NULL) { return; }
    for (int i = 0; i < t->run.precision.count; i++) {
        bool head = i == t->run.precision.count - 1;
        Linear linear = head ? LINEAR_HEAD : (Linear)(i % LINEAR_HEAD);
        int layer = head ? 0 : i / LINEAR_HEAD, outputs, inputs;
        linear_shape(c, linear, &outputs, &inputs);
        int64_t n = (int64_t)outputs * inputs;
        const float *w = weight_of(t, linear_weight(c, linear), layer);
        Number number = precision_of(&t->run.precision, linear, layer)->number;
        int slot = fp8_slot_index(c, linear, layer, OPERAND_W);
        float *rounded = t->rounded + (w - t->weights);
        round_to_bf16(rounded, w, n); // FP8 too starts there, as it does where ranks exchange BF16
        if (number != NUMBER_FP8) { continue; }
        float scale = fp8_scale_for(t, slot, rounded, n, true);
        round_operand(t, number, linear, layer, OPERAND_W, scale, rounded, rounded, n);
    }
}

static const float *linear_operand_w(Trainer *t, Linear linear, int layer) {
    float *space = t->rounded != NULL ? t->rounded : t->weights;
    return tensor_of(t, space, linear_weight(&t->run.config, linear), layer);
}

static float slot_inverse(Trainer *t, Linear linear, int layer, Operand operand) {
    bool fp8 = precision_of(&t->run.precision, linear, layer)->number == NUMBER_FP8;
    return fp8 ? t->slots[fp8_slot_index(&t->run.config, linear, layer, operand)].scale_inv : 1.0f;
}

// y[M,N] = x[M,C] W' (+ bias) (+ addend)
static void linear_forward(Trainer *t, Linear linear, int layer, float *y, const float *x,
                           const float *bias, const float *addend, int M, Pass pass) {
    const ModelConfig *c = &t->run.config;
    const LinearPrecision *lp = precision_of(&t->run.precision, linear, layer);
    int outputs, inputs;
    linear_shape(c, linear, &outputs, &inputs);
    Number number = pass == PASS_EVAL_BF16 && lp->number == NUMBER_FP8 ? NUMBER_BF16 : lp->number;
    const float *w = linear_operand_w(t, linear, layer);
    float alpha = 1.0f;
    if (number != NUMBER_FP32) {
        int64_t n = (int64_t)M * inputs;
        int slot = fp8_slot_index(c, linear, layer, OPERAND_X);
        float scale = number == NUMBER_FP8 ? fp8_scale_for(t, slot, x, n, pass == PASS_TRAIN)
                                           : 1.0f;
        alpha = round_operand(t, number, linear, layer, OPERAND_X, scale, t->operand_a, x, n);
        x = t->operand_a;
    }
    if (number == NUMBER_FP8) { alpha *= slot_inverse(t, linear, layer, OPERAND_W); }
    if (number != lp->number) {
        round_to_bf16(t->operand_b, weight_of(t, linear_weight(c, linear), layer),
                      (int64_t)outputs * inputs);
        w = t->operand_b;
    }
    cpu_gemm((CpuGemm){.m = M,
                       .n = outputs,
                       .k = inputs,
                       .a = x,
                       .b = w,
                       .c = y,
                       .bias = bias,
                       .addend = addend,
                       .trans_b = true,
                       .alpha = alpha});
}

// dx[M,C] = dy[M,N] W, dW += dy' x, dbias += the column sums of dy (where there is one)
static void linear_backward(Trainer *t, Linear linear, int layer, float *dx, float *dbias,
                            const float *dy, const float *x, int M) {
    const ModelConfig *c = &t->run.config;
    const LinearPrecision *lp = precision_of(&t->run.precision, linear, layer);
    int outputs, inputs;
    linear_shape(c, linear, &outputs, &inputs);
    int64_t dy_size = (int64_t)M * outputs, x_size = (int64_t)M * inputs;
    if (dbias != NULL) { bias_backward(dbias, dy, M, outputs); }
    const float *dy_operand = dy;
    float alpha = 1.0f, dy_scale = 1.0f;
    if (lp->number != NUMBER_FP32) {
        int slot = fp8_slot_index(c, linear, layer, OPERAND_DY);
        if (lp->number == NUMBER_FP8) { dy_scale = fp8_scale_for(t, slot, dy, dy_size, true); }
        alpha = round_operand(t, lp->number, linear, layer, OPERAND_DY, dy_scale, t->operand_a, dy,
                              dy_size);
        dy_operand = t->operand_a;
    }
    cpu_gemm((CpuGemm){.m = M,
                       .n = inputs,
                       .k = outputs,
                       .a = dy_operand,
                       .b = linear_operand_w(t, linear, layer),
                       .c = dx,
                       .alpha = alpha * slot_inverse(t, linear, layer, OPERAND_W)});
    if (lp->wgrad != NUMBER_FP32) {
        float x_scale = t->slots[fp8_slot_index(c, linear, layer, OPERAND_X)].scale;
        alpha = round_operand(t, lp->wgrad, linear, layer, OPERAND_DY, dy_scale, t->operand_a, dy,
                              dy_size);
        alpha *= round_operand(t, lp->wgrad, linear, layer, OPERAND_X, x_scale, t->operand_b, x,
                               x_size);
        dy_operand = t->operand_a;
        x = t->operand_b;
    }
    float *dw = gradient_of(t, linear_weight(c, linear), layer);
    cpu_gemm((CpuGemm){.m = outputs,
                       .n = inputs,
                       .k = M,
                       .a = dy_operand,
                       .b = x,
                       .c = dw,
                       .addend = dw,
                       .trans_a = true,
                       .alpha = alpha});
}

// ---- blocks -----------------------------------------------------------------------------------

static void norm_forward(Trainer *t, TensorId weight, int layer, float *out, float *mean,
                         float *rstd, const float *x, int M) {
    const ModelConfig *c = &t->run.config;
    const float *w = weight_of(t, weight, layer);
    if (c->arch == ARCH_LLAMA) {
        rmsnorm_forward(out, rstd, x, w, M, c->channels, (float)c->norm_eps);
    } else {
        const float *bias = weight_of(t, (TensorId)(weight + 1), layer);
        layernorm_forward(out, mean, rstd, x, w, bias, M, c->channels, (float)c->norm_eps);
    }
}

static void norm_backward(Trainer *t, TensorId weight, int layer, float *dx, const float *dout,
                          const float *x, const float *mean, const float *rstd, int M) {
    const ModelConfig *c = &t->run.config;
    const float *w = weight_of(t, weight, layer);
    float *dw = gradient_of(t, weight, layer);
    if (c->arch == ARCH_LLAMA) {
        rmsnorm_backward(dx, dw, dout, x, w, rstd, M, c->channels);
    } else {
        float *dbias = gradient_of(t, (TensorId)(weight + 1), layer);
        layernorm_backward(dx, dw, dbias, dout, x, w, mean, rstd, M, c->channels);
    }
}

// From blocks[l].residual to `out`, the next block's residual.
static void block_forward(Trainer *t, int l, float *out, int B, int T, Pass pass) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    Block *b = &t->blocks[l];
    norm_forward(t, TENSOR_NORM1_WEIGHT, l, b->norm1, b->mean1, b->rstd1, b->residual, M);
    linear_forward(t, LINEAR_QKV, l, b->qkv, b->norm1, weight_of(t, TENSOR_QKV_BIAS, l), NULL, M,
                   pass);
    if (c->arch == ARCH_LLAMA) { rope_apply(b->qkv, t->rope, B, T, H, G, D, false); }
    attention_forward(b->attention, b->lse, b->qkv, B, T, H, G, D);
    linear_forward(t, LINEAR_ATTENTION_OUT, l, b->residual_mid, b->attention,
                   weight_of(t, TENSOR_ATTENTION_OUT_BIAS, l), b->residual, M, pass);
    norm_forward(t, TENSOR_NORM2_WEIGHT, l, b->norm2, b->mean2, b->rstd2, b->residual_mid, M);
    linear_forward(t, LINEAR_FC1, l, b->fc1, b->norm2, weight_of(t, TENSOR_FC1_BIAS, l), NULL, M,
                   pass);
    if (c->arch == ARCH_LLAMA) {
        swiglu_forward(b->activated, b->fc1, M, c->ffn);
    } else {
        gelu_forward(b->activated, b->fc1, (int64_t)M * c->ffn);
    }
    linear_forward(t, LINEAR_FC2, l, out, b->activated, weight_of(t, TENSOR_FC2_BIAS, l),
                   b->residual_mid, M, pass);
}

// d_residual goes in as the gradient of the block's output, out as that of its input.
static void block_backward(Trainer *t, int l, int B, int T) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    Block *b = &t->blocks[l];
    linear_backward(t, LINEAR_FC2, l, t->d_activated, gradient_of(t, TENSOR_FC2_BIAS, l),
                    t->d_residual, b->activated, M);
    if (c->arch == ARCH_LLAMA) {
        swiglu_backward(t->d_fc1, t->d_activated, b->fc1, M, c->ffn);
    } else {
        gelu_backward(t->d_fc1, t->d_activated, b->fc1, (int64_t)M * c->ffn);
    }
    linear_backward(t, LINEAR_FC1, l, t->d_norm, gradient_of(t, TENSOR_FC1_BIAS, l), t->d_fc1,
                    b->norm2, M);
    norm_backward(t, TENSOR_NORM2_WEIGHT, l, t->d_residual, t->d_norm, b->residual_mid, b->mean2,
                  b->rstd2, M);
    linear_backward(t, LINEAR_ATTENTION_OUT, l, t->d_attention,
                    gradient_of(t, TENSOR_ATTENTION_OUT_BIAS, l), t->d_residual, b->attention, M);
    attention_backward(t->d_qkv, t->d_attention, b->attention, b->lse, b->qkv, B, T, H, G, D);
    if (c->arch == ARCH_LLAMA) { rope_apply(t->d_qkv, t->rope, B, T, H, G, D, true); }
    linear_backward(t, LINEAR_QKV, l, t->d_norm, gradient_of(t, TENSOR_QKV_BIAS, l), t->d_qkv,
                    b->norm1, M);
    norm_backward(t, TENSOR_NORM1_WEIGHT, l, t->d_residual, t->d_norm, b->residual, b->mean1,
                  b->rstd1, M);
}

// ---- forward, loss, backward --------------------------------------------------------------------

// From inputs [B,T] to norm_out.
static void model_forward(Trainer *t, int B, int T, Pass pass) {
    const ModelConfig *c = &t->run.config;
    embedding_forward(t->blocks[0].residual, t->inputs, weight_of(t, TENSOR_TOKEN_EMBEDDING, 0),
                      weight_of(t, TENSOR_POSITION_EMBEDDING, 0), B, T, c->channels);
    for (int l = 0; l < c->num_layers; l++) {
        float *out = l + 1 < c->num_layers ? t->blocks[l + 1].residual : t->residual_out;
        block_forward(t, l, out, B, T, pass);
    }
    norm_forward(t, TENSOR_FINAL_NORM_WEIGHT, 0, t->norm_out, t->mean_out, t->rstd_out,
                 t->residual_out, B * T);
}

// The LM head and the loss, some rows at a time, so that the logits never exist whole. Returns the
// sum of the losses. With gradient_scale > 0 also goes backward, into d_norm and the head's
// weights.
static double head_loss(Trainer *t, int M, float gradient_scale, Pass pass) {
    const ModelConfig *c = &t->run.config;
    double sum = 0;
    for (int row = 0; row < M; row += t->chunk_rows) {
        int rows = (int)min64(t->chunk_rows, M - row);
        const float *x = t->norm_out + (size_t)row * c->channels;
        linear_forward(t, LINEAR_HEAD, 0, t->logits, x, NULL, NULL, rows, pass);
        cross_entropy(t->losses + row, t->logits, t->targets + row, rows, c->vocab, c->padded_vocab,
                      gradient_scale);
        if (gradient_scale > 0) {
            linear_backward(t, LINEAR_HEAD, 0, t->d_norm + (size_t)row * c->channels, NULL,
                            t->logits, x, rows);
        }
    }
    for (int i = 0; i < M; i++) { sum += t->losses[i]; }
    return sum;
}

// From d_norm, the gradient of norm_out, down to the embeddings.
static void model_backward(Trainer *t, int B, int T) {
    const ModelConfig *c = &t->run.config;
    memset(t->d_residual, 0, (size_t)B * T * c->channels * sizeof(float));
    norm_backward(t, TENSOR_FINAL_NORM_WEIGHT, 0, t->d_residual, t->d_norm, t->residual_out,
                  t->mean_out, t->rstd_out, B * T);
    for (int l = c->num_layers - 1; l >= 0; l--) { block_backward(t, l, B, T); }
    embedding_backward(gradient_of(t, TENSOR_TOKEN_EMBEDDING, 0),
                       gradient_of(t, TENSOR_POSITION_EMBEDDING, 0), t->d_residual, t->inputs, B, T,
                       c->channels);
}

// ---- update -----------------------------------------------------------------------------------

// A step whose loss or norm is not finite leaves no trace: what its activations and gradients said
// of their range is forgotten (the weights' still holds).
static void scaling_update(Trainer *t, bool skipped) {
    const Run *run = &t->run;
    const Precision *p = &run->precision;
    if (t->amax_history == NULL) { return; }
    for (int i = 0; i < fp8_slot_count(&run->config); i++) {
        if (skipped && i % OPERAND_COUNT != OPERAND_W) { t->slots[i].amax = 0.0f; }
        if (skipped) { continue; }
        fp8_slot_update(&t->slots[i], t->amax_history + (int64_t)i * p->history_length,
                        p->history_length, fp8_slot_target(p, i), p->most_recent,
                        (run->progress.step + 1) % p->interval == 0);
    }
}

// All but the weight decay, which is a tensor's.
static AdamW adamw_settings(const Run *run, double norm, double lr) {
    const Options *o = &run->options;
    bool clipped = o->clip_grad > 0 && norm > o->clip_grad;
    return (AdamW){.lr = (float)lr,
                   .beta1 = (float)o->adam_beta1,
                   .beta2 = (float)o->adam_beta2,
                   .eps = (float)o->adam_eps,
                   .gradient_scale = clipped ? (float)(o->clip_grad / norm) : 1.0f,
                   .step = run->progress.step + 1 - run->progress.skipped};
}

static void model_update(Trainer *t, double norm, double lr) {
    const Run *run = &t->run;
    const Options *o = &run->options;
    AdamW adamw = adamw_settings(run, norm, lr);
    for (int i = 0; i < run->layout.count; i++) {
        const Param *p = &run->layout.params[i];
        adamw.weight_decay = tensor_row(p->id)->decay ? (float)o->weight_decay : 0.0f;
        adamw_update(t->weights + p->offset, t->exp_avg + p->offset, t->exp_avg_sq + p->offset,
                     t->gradients + p->offset, param_size(p), adamw);
    }
    round_weights(t);
}

static void report_counts(Trainer *t) {
    run_report_fp8(&t->run, t->counts);
    memset(t->counts, 0, (size_t)fp8_slot_count(&t->run.config) * sizeof(Fp8Counts));
    t->counting = false;
}

static void train_step(Trainer *t) {
    Run *run = &t->run;
    const Options *o = &run->options;
    int B = o->micro_batch_size, T = o->seq_length;
    double begin = wall_seconds(), loss = 0;
    double step_tokens = (double)o->global_batch_size * T;
    t->counting = run_counts_fp8(run, run->progress.step + 1);
    memset(t->gradients, 0, (size_t)run->layout.size * sizeof(float));
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        run_batch(run, 0, micro, t->inputs, t->targets);
        model_forward(t, B, T, PASS_TRAIN);
        loss += head_loss(t, B * T, (float)(1.0 / step_tokens), PASS_TRAIN);
        model_backward(t, B, T);
    }
    StepResult result = {.loss = loss / step_tokens,
                         .norm = sqrt(sum_of_squares(t->gradients, run->layout.size)),
                         .lr = learning_rate(o, run->progress.step)};
    run_maybe_dump(run, t->gradients, result.loss);
    result.skipped = !run_finite(result.loss, result.norm);
    scaling_update(t, result.skipped);
    if (!result.skipped) { model_update(t, result.norm, result.lr); }
    result.seconds = wall_seconds() - begin;
    run_report(run, result);
    if (t->counting) { report_counts(t); }
}

// ---- evaluation, samples, checkpoints ---------------------------------------------------------

static void choice_losses(void *trainer, const int *inputs, const int *targets, int B, int T,
                          float *losses) {
    Trainer *t = trainer;
    size_t tokens = (size_t)B * (size_t)T;
    Pass pass = eval_pass(&t->run.options);
    memcpy(t->inputs, inputs, tokens * sizeof(int));
    memcpy(t->targets, targets, tokens * sizeof(int));
    model_forward(t, B, T, pass);
    head_loss(t, B * T, 0.0f, pass);
    memcpy(losses, t->losses, tokens * sizeof(float));
}

static void validate(Trainer *t) {
    Run *run = &t->run;
    int B = run->options.micro_batch_size, T = run->options.seq_length;
    int64_t samples = run_eval_samples(run);
    Pass pass = eval_pass(&run->options);
    double begin = wall_seconds(), sum = 0;
    for (int64_t sample = 0; sample < samples; sample += B) {
        run_eval_batch(run, sample, t->inputs, t->targets);
        model_forward(t, B, T, pass);
        sum += head_loss(t, B * T, 0.0f, pass);
    }
    run_report_eval(run, sum / (double)(samples * T), wall_seconds() - begin);
}

static void evaluate(Trainer *t) {
    if (t->run.has_valid) { validate(t); }
    run_score_choices(&t->run, (ChoiceModel){.trainer = t, .losses = choice_losses});
}

static void maybe_evaluate(Trainer *t) {
    if (run_should_eval(&t->run)) { evaluate(t); }
}

static const float *next_logits(void *trainer, const int *tokens, int n) {
    Trainer *t = trainer;
    Pass pass = eval_pass(&t->run.options);
    memcpy(t->inputs, tokens, (size_t)n * sizeof(int));
    model_forward(t, 1, n, pass);
    linear_forward(t, LINEAR_HEAD, 0, t->logits,
                   t->norm_out + (size_t)(n - 1) * t->run.config.channels, NULL, NULL, 1, pass);
    return t->logits;
}

static void maybe_sample(Trainer *t) {
    if (run_should_sample(&t->run)) { run_sample(&t->run, next_logits, t); }
}

// Copies the state, which is the only pause; the writing goes on in a thread.
static void maybe_save(Trainer *t) {
    Run *run = &t->run;
    if (!run_should_save(run)) { return; }
    saver_wait(&run->saver);
    size_t size = (size_t)run->layout.size, bytes = size * sizeof(float);
    memcpy(t->snapshot, t->weights, bytes);
    memcpy(t->snapshot + size, t->exp_avg, bytes);
    memcpy(t->snapshot + 2 * size, t->exp_avg_sq, bytes);
    if (t->snapshot_slots != NULL) {
        size_t slots = (size_t)fp8_slot_count(&run->config);
        size_t history = slots * (size_t)run->precision.history_length;
        memcpy(t->snapshot_slots, t->slots, slots * sizeof(Fp8Slot));
        memcpy(t->snapshot_history, t->amax_history, history * sizeof(float));
    }
    Snapshot s = {.model_dtype = DTYPE_F32,
                  .model = t->snapshot,
                  .num_ranges = 1,
                  .ranges = &t->whole,
                  .moment_dtype = DTYPE_F32,
                  .master = t->snapshot,
                  .exp_avg = t->snapshot + size,
                  .exp_avg_sq = t->snapshot + 2 * size,
                  .slots = t->snapshot_slots,
                  .amax_history = t->snapshot_history};
    run_save(run, &s);
}

// The first weights, or those of the checkpoint that --resume names.
static void trainer_restore(Trainer *t) {
    Run *run = &t->run;
    Checkpoint c;
    Error err;
    int64_t size = run->layout.size;
    if (!run_restore(run, &c)) {
        run_first_weights(run, t->weights);
    } else {
        int64_t learned = t->exp_avg != NULL ? size : 0;
        if (!checkpoint_read(&c, "master", 0, size, t->weights, &err) ||
            !checkpoint_read(&c, "exp_avg", 0, learned, t->exp_avg, &err) ||
            !checkpoint_read(&c, "exp_avg_sq", 0, learned, t->exp_avg_sq, &err)) {
            die("%s", err.text);
        }
        if (t->amax_history != NULL &&
            !checkpoint_read_scaling(&c, &run->precision, t->slots, t->amax_history, &err)) {
            die("%s", err.text);
        }
        fp8_fix_slot(&t->run.precision, &t->run.options, t->slots);
        checkpoint_close(&c);
    }
    round_weights(t);
}

// ---- the loop ---------------------------------------------------------------------------------

int main(int argc, char **argv) {
    Options options;
    Trainer t;
    options_parse(&options, argc, argv);
    launch_refuse(&options, argv[0]);
    trainer_open(&t, &options);
    trainer_restore(&t);
    if (!options_train(&options)) {
        if (options.eval_only) { evaluate(&t); }
        if (options.sample_only) { run_sample(&t.run, next_logits, &t); }
        return trainer_close(&t);
    }
    while (run_goes_on(&t.run)) {
        train_step(&t);
        maybe_evaluate(&t);
        maybe_sample(&t);
        maybe_save(&t);
    }
    maybe_save(&t);
    return trainer_close(&t);
}
