#include "precision.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    TensorId weight, bias;
} linears[LINEAR_COUNT] = {
    {"qkv", TENSOR_QKV_WEIGHT, TENSOR_QKV_BIAS},
    {"attention_out", TENSOR_ATTENTION_OUT_WEIGHT, TENSOR_ATTENTION_OUT_BIAS},
    {"fc1", TENSOR_FC1_WEIGHT, TENSOR_FC1_BIAS},
    {"fc2", TENSOR_FC2_WEIGHT, TENSOR_FC2_BIAS},
    {"head", TENSOR_HEAD_WEIGHT, TENSOR_COUNT},
};

// Returns why a layer is not in FP8, "" if FP8 is not requested, or NULL if the layer is in FP8.
static const char *reason_against_fp8(const Options *o, const ModelConfig *c,
                                      const NumberSupport *support, const LinearPrecision *lp) {
    bool head = lp->linear == LINEAR_HEAD;
    bool edge = lp->layer < o->num_layers_at_start_in_bf16 ||
                lp->layer >= c->num_layers - o->num_layers_at_end_in_bf16;
    double head_weights = (double)c->padded_vocab * c->channels;
    double block_weights = ((double)matmul_weights(c) - head_weights) / c->num_layers;
    double tokens = (double)o->micro_batch_size * c->seq_length;
    double multiply_adds = tokens * (head ? head_weights : block_weights);
    if (o->fp8_format == FP8_FORMAT_NONE) { return ""; }
    if (support->lacks_fp8 != NULL) { return support->lacks_fp8; }
    if (head && !o->fp8_lm_head) { return "--fp8-lm-head not given"; }
    if (!head && o->first_last_layers_bf16 && edge) { return "--first-last-layers-bf16"; }
    if (lp->outputs % 16 != 0 || lp->inputs % 16 != 0) { return "a side is not a multiple of 16"; }
    // kernels/adamw.cu counts the elements of an FP8 weight in 32 bits
    if ((int64_t)lp->outputs * lp->inputs > UINT32_MAX) { return "more than 2^32 weights"; }
    if (c->seq_length % 16 != 0) { return "--seq-length is not a multiple of 16"; }
    if (multiply_adds < support->fp8_gains_from) { return "too small to gain from FP8"; }
    return NULL;
}

Precision precision_decide(const Options *o, const ModelConfig *config, NumberSupport support) {
    bool delayed = o->fp8_recipe == FP8_RECIPE_DELAYED;
    // matmuls with blockwise scales have no fast accumulation
    bool blocks = o->fp8_recipe == FP8_RECIPE_BLOCKWISE;
    Precision p = {
        .config = config,
        .format = (Fp8Format)o->fp8_format,
        .recipe = (Fp8Recipe)o->fp8_recipe,
        .margin = delayed ? o->fp8_margin : 0,
        .e5m2_margin = delayed ? o->fp8_e5m2_margin : 0,
        .history_length = o->fp8_amax_history_len,
        .power_of_two = !o->fp8_blockwise_fp32_scales,
        .fast_forward = !blocks && o->fp8_fast_accumulation != FAST_NONE,
        .fast_backward = !blocks && o->fp8_fast_accumulation == FAST_ALL,
        .possible = support.lacks_fp8 == NULL,
        .step_tokens = (double)o->global_batch_size * o->seq_length,
        .count = config->num_layers * LINEAR_HEAD + 1,
    };
    p.linear = calloc_or_die((size_t)p.count, sizeof(LinearPrecision));
    for (int i = 0; i < p.count; i++) {
        bool head = i == p.count - 1;
        LinearPrecision *lp = &p.linear[i];
        lp->linear = head ? LINEAR_HEAD : (Linear)(i % LINEAR_HEAD);
        lp->layer = head ? 0 : i / LINEAR_HEAD;
        lp->weight = linears[lp->linear].weight;
        const TensorRow *row = tensor_row(lp->weight);
        if (head && config->tied_head) { lp->weight = TENSOR_TOKEN_EMBEDDING; }
        lp->bias = linears[lp->linear].bias;
        lp->outputs = dim_size(config, row->rows);
        lp->inputs = dim_size(config, row->cols);
        lp->reason = reason_against_fp8(o, config, &support, lp);
        lp->number = lp->wgrad = lp->reason == NULL ? NUMBER_FP8 : support.plain;
        p.used |= lp->number == NUMBER_FP8;
        if (lp->number == NUMBER_FP8) {
            // the head's dY is softmax - onehot, times a factor. Its values reach from 1 down to
            // the probability of a rare token, so one scale for all of them needs the range of E5M2
            bool wide = p.format != FP8_FORMAT_E4M3 || (head && !blocks);
            lp->type[OPERAND_X] = p.format == FP8_FORMAT_E5M2 ? FP8_E5M2 : FP8_E4M3;
            lp->type[OPERAND_W] = FP8_E4M3;
            lp->type[OPERAND_DY] = wide ? FP8_E5M2 : FP8_E4M3;
            lp->reason = !o->fp8_wgrad                 ? "--no-fp8-wgrad"
                         : p.format == FP8_FORMAT_E5M2 ? "no matmul takes two E5M2 operands"
                                                       : "";
            if (lp->reason[0] != '\0') { lp->wgrad = NUMBER_BF16; }
        }
        for (int operand = 0; operand < OPERAND_COUNT; operand++) {
            bool fixed = fp8_slot_is_fixed(&p, i * OPERAND_COUNT + operand);
            bool more = lp->type[operand] == FP8_E5M2 && !fixed;
            lp->target[operand] = fp8_target(lp->type[operand],
                                             p.margin + (more ? p.e5m2_margin : 0));
        }
    }
    return p;
}

void precision_free(Precision *p) {
    free(p->linear);
    *p = (Precision){0};
}

double precision_fp8_share(const Precision *p) {
    double fp8 = 0, all = 0;
    for (const LinearPrecision *lp = p->linear; lp < p->linear + p->count; lp++) {
        double product = (double)lp->outputs * lp->inputs;
        all += 3 * product;
        if (lp->number == NUMBER_FP8) { fp8 += 2 * product; }
        if (lp->wgrad == NUMBER_FP8) { fp8 += product; }
    }
    return fp8 / all;
}

const char *precision_name(const Precision *p) {
    if (p->used) { return "FP8"; }
    return p->linear[0].number == NUMBER_BF16 ? "BF16" : "FP32";
}

static const char *number_name(NumberFormat number, const char *fp8) {
    return number == NUMBER_FP8 ? fp8 : number == NUMBER_BF16 ? "BF16" : "FP32";
}

int precision_rows(const Precision *p, PrecisionRow *rows) {
    int count = 0;
    for (int linear = 0; linear < LINEAR_COUNT; linear++) {
        int layers = linear == LINEAR_HEAD ? 1 : p->config->num_layers;
        for (int first = 0, next; first < layers; first = next) {
            const LinearPrecision *lp = precision_of(p, (Linear)linear, first);
            for (next = first + 1; next < layers; next++) {
                const LinearPrecision *other = precision_of(p, (Linear)linear, next);
                if (lp->number != other->number || lp->wgrad != other->wgrad ||
                    strcmp(lp->reason, other->reason) != 0) {
                    break;
                }
            }
            PrecisionRow *row = &rows[count++];
            *row = (PrecisionRow){.linear = linears[linear].name,
                                  .first = first,
                                  .blocks = linear == LINEAR_HEAD ? 0 : next - first,
                                  .outputs = lp->outputs,
                                  .inputs = lp->inputs,
                                  .wgrad = number_name(lp->wgrad, "FP8"),
                                  .reason = lp->reason};
            row->flops_share = (double)lp->outputs * lp->inputs * (next - first) /
                               (double)matmul_weights(p->config);
            for (int i = 0; i < OPERAND_COUNT; i++) {
                const char *fp8 = lp->type[i] == FP8_E4M3 ? "E4M3" : "E5M2";
                row->type[i] = number_name(lp->number, fp8);
            }
        }
    }
    return count;
}

void precision_print(const Precision *p) {
    FREED PrecisionRow *rows = calloc_or_die((size_t)p->count, sizeof(PrecisionRow));
    int count = precision_rows(p, rows);
    printf("Precision\n  %-14s %-9s %-16s %-5s %-5s %-5s %-6s\n", "linear layer", "blocks",
           "out x in", "X", "W", "dY", "wgrad");
    for (const PrecisionRow *row = rows; row < rows + count; row++) {
        char shape[32], where[32] = "";
        snprintf(shape, sizeof(shape), "%d x %d", row->outputs, row->inputs);
        if (row->blocks > 0) {
            snprintf(where, sizeof(where), row->blocks > 1 ? "%d-%d" : "%d", row->first,
                     row->first + row->blocks - 1);
        }
        printf("  %-14s %-9s %-16s %-5s %-5s %-5s %-6s %s\n", row->linear, where, shape,
               row->type[OPERAND_X], row->type[OPERAND_W], row->type[OPERAND_DY], row->wgrad,
               row->reason);
    }
    if (p->format == FP8_FORMAT_NONE) { return; }
    printf("  %.1f%% of the linear layers' FLOPs in FP8; ", 100 * precision_fp8_share(p));
    if (p->recipe == FP8_RECIPE_DELAYED) {
        printf("delayed scaling, history %d, margin %d (E5M2: %d)", p->history_length, p->margin,
               p->margin + p->e5m2_margin);
    } else if (p->recipe == FP8_RECIPE_BLOCKWISE) {
        printf("blockwise scaling, 1 x %d and %d x %d, %s scales", FP8_BLOCK, FP8_BLOCK, FP8_BLOCK,
               p->power_of_two ? "power-of-two" : "FP32");
    } else {
        printf("tensorwise scaling");
    }
    printf("; %s accumulation forward, %s backward\n", p->fast_forward ? "fast" : "split",
           p->fast_backward ? "fast" : "split");
}

// The largest log-sum-exp of a token's logits that the fixed scale allows for. Above it gradients
// saturate, but the z-loss keeps log-sum-exps near 0.
enum { LARGEST_LSE = 100 };

void fp8_fix_slot(const Precision *p, const Options *o, Fp8Scale *slots) {
    int index = fp8_slot_index(p->config, LINEAR_HEAD, 0, OPERAND_DY);
    float factor = (float)(1.0 / p->step_tokens);
    factor *= (float)(1.0 + 2.0 * o->z_loss_coeff * LARGEST_LSE);
    if (!fp8_slot_in_use(p, index) || !fp8_slot_is_fixed(p, index)) { return; }
    slots[index] = (Fp8Scale){.scale = 1.0f};
    fp8_rescale(&slots[index], factor, fp8_slot_target(p, index));
}

bool fp8_is_uncalibrated(const Precision *p, const Fp8Scale *slots) {
    bool unknown = false;
    for (int i = 0; i < fp8_slot_count(p->config) && p->recipe == FP8_RECIPE_DELAYED; i++) {
        unknown |= fp8_slot_uses_amax(p, i) && !fp8_scale_known(&slots[i]);
    }
    return unknown;
}

// Guesses a tensor's scale before its first amax is known. Gradients are divided by the number of a
// step's tokens, so their scale is multiplied by this number.
static float first_scale(const Precision *p, int slot) {
    OperandId operand = (OperandId)(slot % OPERAND_COUNT);
    return operand == OPERAND_X   ? 0.5f
           : operand == OPERAND_W ? 1024.0f
                                  : fp8_slot_target(p, slot) * (float)p->step_tokens;
}

void fp8_calibrate(const Precision *p, Fp8Scale *slots) {
    // the next micro-batches may have larger amaxes; a weight's amax is the same in all of them
    const float headroom = 2.0f;
    for (int i = 0; i < fp8_slot_count(p->config); i++) {
        Fp8Scale *s = &slots[i];
        bool weight = i % OPERAND_COUNT == OPERAND_W;
        if (fp8_slot_uses_amax(p, i) && s->count == 0) {
            if (!fp8_scale_known(s)) { s->scale = first_scale(p, i); }
            fp8_rescale(s, weight ? s->amax : headroom * s->amax, fp8_slot_target(p, i));
            if (s->scale == 1.0f) { // 1 would mean that the scale is unknown
                s->scale = nextafterf(1.0f, 0.0f);
                s->scale_inv = 1.0f / s->scale;
            }
        }
        if (!weight) { s->amax = 0.0f; }
    }
}

const char *fp8_slot_name(const ModelConfig *config, int slot, char out[64]) {
    static const char *const operands[OPERAND_COUNT] = {"x", "w", "dy"};
    int index = slot / OPERAND_COUNT;
    const char *operand = operands[slot % OPERAND_COUNT];
    if (index == config->num_layers * LINEAR_HEAD) {
        snprintf(out, 64, "head.%s", operand);
    } else {
        snprintf(out, 64, "blocks.%d.%s.%s", index / LINEAR_HEAD, linears[index % LINEAR_HEAD].name,
                 operand);
    }
    return out;
}
