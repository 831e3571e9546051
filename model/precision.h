// The one place that decides precision: for each linear layer, the number formats of its operands,
// and why. The trainers fill their layers from it at start-up; the printed table is the same
// answer.
//
// A linear layer has three products. With X [M,C] the input, W [N,C] the weight and dY [M,N] the
// output's gradient: forward X W', input gradient dY W, weight gradient dY' X.
#pragma once

#include "../kernels/fp8_format.h"
#include "model.h"

BEGIN_C

typedef enum {
    LINEAR_QKV,
    LINEAR_ATTENTION_OUT,
    LINEAR_FC1,
    LINEAR_FC2,
    LINEAR_HEAD, // one, not one a layer
    LINEAR_COUNT
} Linear;

typedef enum { OPERAND_X, OPERAND_W, OPERAND_DY, OPERAND_COUNT } OperandId;

typedef enum { NUMBER_FP32, NUMBER_BF16, NUMBER_FP8 } Number;

// What a product is computed for.
typedef enum {
    PASS_TRAIN,
    PASS_AGAIN,    // recomputation: by the scales of the first time
    PASS_EVAL,     // ranges are not recorded in the history
    PASS_EVAL_BF16 // the same, and no product is in FP8
} Pass;

// A linear layer, and its precision.
typedef struct {
    Linear linear;
    int layer;                   // 0 for the head
    int outputs, inputs;         // N, C
    TensorId weight;             // [N,C]; of a tied head the token embedding
    TensorId bias;               // [N]; TENSOR_COUNT: the head has none
    Number number;               // of the operands in the forward and input-gradient products
    Number wgrad;                // of the operands in the weight-gradient product
    Fp8Type type[OPERAND_COUNT]; // where they are FP8
    float target[OPERAND_COUNT]; // what amax * scale aims at
    const char *reason;          // why a product is not in FP8, or ""
} LinearPrecision;

typedef struct {
    const ModelConfig *config;
    Fp8Format format;
    Fp8Recipe recipe;
    int margin, e5m2_margin, history_length; // E5M2's margin is added to the other
    bool power_of_two;                       // scales of blocks are powers of two
    bool fast_forward, fast_backward; // partial sums stay in the tensor cores' narrower registers
    bool possible;                    // the device has FP8, or emulates it
    double step_tokens;               // of an optimizer step: every dY is divided by them
    int count;                        // linear layers: 4 L + 1
    LinearPrecision *linear;          // [count] by linear_index
} Precision;

// What the device offers.
typedef struct {
    Number plain;          // what is not FP8: NUMBER_FP32 or NUMBER_BF16
    const char *lacks_fp8; // why it has no FP8; NULL: it has FP8, or emulates it
    double fp8_gains_from; // multiply-adds of a block's forward products, or of the head's
} NumberSupport;

// The config must outlive the result.
Precision precision_decide(const Options *options, const ModelConfig *config,
                           NumberSupport support);
void precision_free(Precision *precision);

static inline int linear_index(const ModelConfig *config, Linear linear, int layer) {
    int block = linear == LINEAR_HEAD ? config->num_layers : layer;
    return block * LINEAR_HEAD + (linear == LINEAR_HEAD ? 0 : (int)linear);
}

static inline const LinearPrecision *precision_of(const Precision *p, Linear linear, int layer) {
    return &p->linear[linear_index(p->config, linear, layer)];
}

// Share of the linear layers' floating-point operations done in FP8, 0 to 1.
double precision_fp8_share(const Precision *precision);

// "FP8", "BF16" or "FP32", for the step's line.
const char *precision_name(const Precision *precision);

// A row of the precision table: consecutive blocks whose linear layers are treated alike.
typedef struct {
    const char *linear;
    int first, blocks; // the head has 0 blocks
    int outputs, inputs;
    const char *type[OPERAND_COUNT]; // "E4M3", "E5M2", "BF16", "FP32"
    const char *wgrad;               // "FP8", "BF16", "FP32"
    double flops_share;              // of the linear layers' operations
    const char *reason;
} PrecisionRow;

// The table: rows[precision->count] has room for the longest. Returns the number of rows.
int precision_rows(const Precision *precision, PrecisionRow *rows);
void precision_print(const Precision *precision);

// What an operand's scales belong to.
static inline Fp8Scales fp8_scales(const Precision *p, OperandId operand) {
    if (p->recipe != FP8_RECIPE_BLOCKWISE) { return SCALES_TENSOR; }
    return operand == OPERAND_W ? SCALES_SQUARE : SCALES_VECTOR;
}

// Every operand has a slot of scaling state, three to a linear layer, FP8 or not, so that a slot's
// index does not depend on the policy.
static inline int fp8_slot_index(const ModelConfig *config, Linear linear, int layer, OperandId o) {
    return linear_index(config, linear, layer) * OPERAND_COUNT + o;
}

static inline int fp8_slot_count(const ModelConfig *config) {
    return (config->num_layers * LINEAR_HEAD + 1) * OPERAND_COUNT;
}

// What the slot's scale aims at.
static inline float fp8_slot_target(const Precision *p, int slot) {
    return p->linear[slot / OPERAND_COUNT].target[slot % OPERAND_COUNT];
}

// The head's output gradient, (softmax - onehot) * factor, reaches the factor and never more (the
// z-loss multiplies the softmax, a soft cap the whole by 1 at most): its scale is known without
// measuring, and its slot fixed. Its blocks reach less: they are measured.
static inline bool fp8_slot_is_fixed(const Precision *p, int slot) {
    return p->recipe != FP8_RECIPE_BLOCKWISE &&
           slot == fp8_slot_index(p->config, LINEAR_HEAD, 0, OPERAND_DY);
}

// Whether the slot's tensor is quantised at all; and whether by a scale that follows its ranges.
static inline bool fp8_slot_in_use(const Precision *p, int slot) {
    return p->linear[slot / OPERAND_COUNT].number == NUMBER_FP8;
}
static inline bool fp8_slot_follows(const Precision *p, int slot) {
    return fp8_slot_in_use(p, slot) && !fp8_slot_is_fixed(p, slot);
}

// Sets the fixed slot among all slots, where the head is FP8.
void fp8_fix_slot(const Precision *precision, const Options *options, Fp8Slot *slots);

// "blocks.3.qkv.x", into out, which is returned.
const char *fp8_slot_name(const ModelConfig *config, int slot, char out[64]);

// The pass of evaluations and samples.
static inline Pass eval_pass(const Options *o) {
    return o->eval_precision == EVAL_BF16 ? PASS_EVAL_BF16 : PASS_EVAL;
}

END_C
