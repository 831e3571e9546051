// Decides the precision of each linear layer: the number formats of its operands, and the reason.
// The trainers set up their layers from this decision at start-up; precision_print prints it.
//
// A linear layer has three matmuls. With X [M,C] the input, W [N,C] the weight and dY [M,N] the
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
    LINEAR_HEAD, // a model has one head; the other linear layers are in every block
    LINEAR_COUNT
} Linear;

typedef enum { OPERAND_X, OPERAND_W, OPERAND_DY, OPERAND_COUNT } OperandId;

typedef enum { NUMBER_FP32, NUMBER_BF16, NUMBER_FP8 } NumberFormat;

// The pass over the model in which a matmul is computed.
typedef enum {
    PASS_TRAIN,
    PASS_RECOMPUTE, // recomputation in the backward pass, with the scales of the forward pass
    PASS_EVAL,      // amaxes are not recorded in the history
    PASS_EVAL_BF16  // like PASS_EVAL, but no matmul is in FP8
} Pass;

// A linear layer, and its precision.
typedef struct {
    Linear linear;
    int layer;           // 0 for the head
    int outputs, inputs; // N, C
    TensorId weight;     // [N,C]; of a tied head the token embedding
    TensorId bias;       // [N]; TENSOR_COUNT: the head has none
    NumberFormat number; // format of the operands of two matmuls: forward, and input gradient
    NumberFormat wgrad;  // format of the operands of the weight-gradient matmul
    Fp8Type type[OPERAND_COUNT]; // the FP8 type of each operand that is in FP8
    float target[OPERAND_COUNT]; // what amax * scale should be, for each operand in FP8
    const char *reason;          // why a matmul is not in FP8, or ""
} LinearPrecision;

typedef struct {
    const ModelConfig *config;
    Fp8Format format;
    Fp8Recipe recipe;
    int margin, e5m2_margin, history_length; // tensors in E5M2 have margin + e5m2_margin
    bool power_of_two;                       // blockwise scales are powers of two
    bool fast_forward, fast_backward; // partial sums stay in the tensor cores' narrower registers
    bool possible;                    // the device has FP8, or emulates it
    bool used;                        // some layer is in FP8
    double step_tokens;      // tokens of an optimizer step; each dY is divided by this number
    int count;               // linear layers: 4 L + 1
    LinearPrecision *linear; // [count] by linear_index
} Precision;

// What the device offers.
typedef struct {
    NumberFormat plain;    // the format without FP8: NUMBER_FP32 or NUMBER_BF16
    const char *lacks_fp8; // why the device has no FP8; NULL: it has FP8, or emulates it
    // FP8 is used in a block (or the head) if its forward matmuls have at least this many
    // multiply-adds
    double fp8_gains_from;
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

// Returns the share of the linear layers' floating-point operations that are in FP8, 0 to 1.
double precision_fp8_share(const Precision *precision);

// Returns whether some layer is in FP8 and scaled by this recipe.
static inline bool precision_scales(const Precision *p, Fp8Recipe recipe) {
    return p->used && p->recipe == recipe;
}

// Returns "FP8", "BF16" or "FP32".
const char *precision_name(const Precision *precision);

// A row of the precision table: consecutive blocks in which a linear layer has the same precision.
typedef struct {
    const char *linear;
    int first, blocks; // the head has 0 blocks
    int outputs, inputs;
    const char *type[OPERAND_COUNT]; // "E4M3", "E5M2", "BF16", "FP32"
    const char *wgrad;               // "FP8", "BF16", "FP32"
    double flops_share;              // share of the linear layers' operations
    const char *reason;
} PrecisionRow;

// Fills in the table, which has at most precision->count rows. Returns the number of rows.
int precision_rows(const Precision *precision, PrecisionRow *rows);
void precision_print(const Precision *precision);

// Every operand of a linear layer has a slot of scaling state, even if it is not in FP8, so that a
// slot's index does not depend on the precision.
static inline int fp8_slot_index(const ModelConfig *config, Linear linear, int layer, OperandId o) {
    return linear_index(config, linear, layer) * OPERAND_COUNT + o;
}

static inline int fp8_slot_count(const ModelConfig *config) {
    return (config->num_layers * LINEAR_HEAD + 1) * OPERAND_COUNT;
}

// Returns the value that amax * scale of a slot should have.
static inline float fp8_slot_target(const Precision *p, int slot) {
    return p->linear[slot / OPERAND_COUNT].target[slot % OPERAND_COUNT];
}

// Returns whether a slot's scale is fixed. Only the scale of the head's output gradient is fixed.
// This gradient is factor * (softmax - onehot), so no element is larger than the factor, and no
// amax is needed. (fp8_fix_slot also allows for the z-loss, which multiplies the softmax; a soft
// cap multiplies the gradient by at most 1.) But with blockwise scaling the gradient's amaxes are
// measured, because the magnitudes in a block can be much smaller than the factor.
static inline bool fp8_slot_is_fixed(const Precision *p, int slot) {
    return p->recipe != FP8_RECIPE_BLOCKWISE &&
           slot == fp8_slot_index(p->config, LINEAR_HEAD, 0, OPERAND_DY);
}

// fp8_slot_in_use returns whether the slot's tensor is quantised, fp8_slot_uses_amax whether it is
// quantised with scales that are computed from its amaxes.
static inline bool fp8_slot_in_use(const Precision *p, int slot) {
    return p->linear[slot / OPERAND_COUNT].number == NUMBER_FP8;
}
static inline bool fp8_slot_uses_amax(const Precision *p, int slot) {
    return fp8_slot_in_use(p, slot) && !fp8_slot_is_fixed(p, slot);
}

// Returns how the slot's tensor gets its scales.
static inline Scaling fp8_slot_scaling(const Precision *p, int slot) {
    bool weight = slot % OPERAND_COUNT == OPERAND_W, fixed = fp8_slot_is_fixed(p, slot);
    if (p->recipe == FP8_RECIPE_BLOCKWISE) {
        return weight ? SCALE_BLOCK_128X128 : SCALE_BLOCK_1X128;
    }
    return p->recipe == FP8_RECIPE_TENSORWISE && !fixed ? SCALE_CURRENT : SCALE_DELAYED;
}

// Sets the scale that is fixed (fp8_slot_is_fixed), if the head is in FP8 and the recipe fixes it.
void fp8_fix_slot(const Precision *precision, const Options *options, Fp8Scale *slots);

// Calibration: a run with delayed scaling may begin with tensors that have no scale yet (from
// scratch, --load, a checkpoint without their scales). Before its first step, such a run computes
// the forward and backward pass of its first micro-batch FP8_CALIBRATIONS times, without an update.
// An amax is measured before the values are encoded. So, where a scale made values saturate in one
// pass, the next pass has a better scale.
enum { FP8_CALIBRATIONS = 3 };
// Returns whether the run has delayed scaling and tensors without a scale.
bool fp8_is_uncalibrated(const Precision *precision, const Fp8Scale *slots);
// Sets the scales of slots without a history. Call it before the first calibration pass, to guess
// scales, and after each pass, to compute the scales from the pass's amaxes. It sets the amaxes of
// activations and gradients to 0.
void fp8_calibrate(const Precision *precision, Fp8Scale *slots);

// Writes a slot's name, as "blocks.3.qkv.x", into out, and returns it.
const char *fp8_slot_name(const ModelConfig *config, int slot, char out[64]);

// Returns whether a pass belongs to a training step: PASS_TRAIN or PASS_RECOMPUTE.
static inline bool pass_trains(Pass pass) {
    return pass == PASS_TRAIN || pass == PASS_RECOMPUTE;
}

// Returns the pass that evaluations and samples use.
static inline Pass eval_pass(const Options *o) {
    return o->eval_precision == EVAL_BF16 ? PASS_EVAL_BF16 : PASS_EVAL;
}

END_C
