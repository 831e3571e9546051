// FP8 on the GPU: the launchers that write FP8, and the scaling state's update.
//
// Hopper's FP8 tensor cores want both operands with the summed dimension contiguous, so a tensor
// [M,N] is written twice in one pass: as it is ("rows") and transposed ("columns", [N,M]).
//
// Where the scale comes from. Given: a delayed slot with a history has its scale before the kernel
// starts, so the kernel that computes a tensor also quantises it, and on the way gathers its range
// for the next scale. Measured (tensorwise scaling, and delayed slots without a history): the
// producer writes BF16 and leaves the range in live->amax; gpu_quantize then derives the scale from
// it.
#ifndef LLM8_FP8_H
#define LLM8_FP8_H

#include "fp8_format.h"
#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// What the products of the present micro-step use. The slots, which are saved, change only between
// steps.
typedef struct {
    float scale_inv; // first, and the struct 16 bytes: cuBLASLt wants its address 16-byte aligned
    float scale;
    float amax; // measured in this micro-step
    float unused;
} Fp8Live;

// Where a quantised tensor goes.
typedef struct {
    uint8_t *rows, *columns; // [M,N], [N,M]; NULL: not wanted
    Fp8Type type;
    float target; // what amax * scale aims at
    Fp8Live *live;
    Fp8Slot *slot;     // NULL: tensorwise scaling
    bool record;       // the range goes towards the slot's history
    Fp8Counts *counts; // NULL: not wanted
} Fp8Out;

// M and N are multiples of 16.

// x [M,N] in BF16. measured: by live->amax, unless the slot has a history; else by live->scale.
// sums: x's column sums, where wanted.
void gpu_quantize(Fp8Out out, bool measured, GradientOut sums, const Bf16 *x, float *scratch, int M,
                  int N, cudaStream_t stream);
// *amax = max(*amax, |x|)
void gpu_amax(float *amax, const void *x, GpuType type, int64_t n, cudaStream_t stream);

// The fused producers; scales given.

// The norm with its statistics; n.out and n.amax are not used.
void gpu_norm_forward_fp8(Fp8Out out, NormForward n, cudaStream_t stream);
// The same by the statistics in n.mean and n.rstd.
void gpu_normalize_fp8(Fp8Out out, NormForward n, cudaStream_t stream);
// d_residual goes on in BF16 as well.
void gpu_norm_backward_fp8(Fp8Out out, NormBackward n, cudaStream_t stream);
void gpu_gelu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream);
void gpu_gelu_backward_fp8(Fp8Out out, GradientOut sums, const Bf16 *dout, const Bf16 *x,
                           float *scratch, int M, int F, cudaStream_t stream);
void gpu_swiglu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream);
void gpu_swiglu_backward_fp8(Fp8Out out, const Bf16 *dout, const Bf16 *x, int M, int F,
                             cudaStream_t stream);
// Turns back d_qkv [M,N] (which stays as it is) on the way.
void gpu_rope_backward_fp8(Fp8Out out, const Bf16 *d_qkv, const float *table, int B, int T, int H,
                           int G, int D, cudaStream_t stream);

// Rows of the loss: logits [M,P], and what gpu_cross_entropy_forward left of them.
typedef struct {
    const Bf16 *logits;
    const float *lse;
    const int *targets;
} LossRows;
// The loss's gradient by the logits, (softmax - onehot) * gradient_scale.
void gpu_cross_entropy_backward_fp8(Fp8Out out, const LossRows *rows, float gradient_scale, int M,
                                    int V, int P, cudaStream_t stream);

// The weight of an FP8 layer, [N,C] in E4M3, N and C multiples of 16.
typedef struct {
    Fp8Out out;
    const Bf16 *copy; // [N,C] its BF16 copy, where several ranks have one of it
    int64_t first;    // element of the parameter space
    int N, C;
    int first_block; // its first tile, of all matrices' counted together
} Fp8Weight;

typedef struct {
    Fp8Weight *rows; // on the device
    int count;
    int tiles;   // of those that a call is about: blocks of its launch
    bool counts; // the rows have counts
} Fp8Weights;

int gpu_fp8_weight_tiles(int N, int C);

// All FP8 weights are quantised from BF16: the master weights rounded, or their copy.

// The optimizer's step on all of the weights: updates master and moments, and quantises the new
// weights by the given scales; or, measured, only leaves their ranges in live->amax. The update's
// arrays are the parameter space.
void gpu_adamw_update_fp8(Fp8Weights weights, bool measured, const AdamWUpdate *update,
                          const StepState *state, cudaStream_t stream);
// Those from row `begin` on, from the master weights (NULL: from their copies): their codes; their
// ranges. Nothing after a skipped step; state NULL: not after a step.
void gpu_quantize_weights(Fp8Weights weights, int begin, bool measured, const float *master,
                          const StepState *state, cudaStream_t stream);
void gpu_measure_weights(Fp8Weights weights, int begin, const float *master, const StepState *state,
                         cudaStream_t stream);

// The same by segments, which may be parts of weights: ZeRO-1. Only rows are written.
typedef enum {
    PARTS_GIVEN,   // codes by live->scale; the range goes to the slot
    PARTS_MEASURE, // no codes; the range goes to live->amax
    PARTS_MEASURED // codes by the scale that live->amax gives
} PartsMode;
// The optimizer's step on all segments; PARTS_GIVEN or PARTS_MEASURE.
void gpu_adamw_update_parts(const AdamWUpdate *update, const Fp8Weights *weights, PartsMode mode,
                            const StepState *state, cudaStream_t stream);
// From the master weights: the codes, or their range; state NULL: not after a step, and the BF16
// copies as well.
void gpu_publish_parts(const AdamWUpdate *update, const Fp8Weights *weights, PartsMode mode,
                       const StepState *state, cudaStream_t stream);
// The scale that live->amax gives becomes that of each weight without a copy. state as above.
void gpu_announce_scales(const Fp8Weights *weights, const StepState *state, cudaStream_t stream);
// columns from rows, of the weights from row `begin` on.
void gpu_transpose_weights(Fp8Weights weights, int begin, cudaStream_t stream);

// SLOT_FOLLOWS: the slot's scale follows the ranges of its tensor. SLOT_WEIGHT: its range outlives
// a skipped step, since the weights stay as they are.
enum { SLOT_FOLLOWS = 1, SLOT_WEIGHT = 2 };

typedef struct {
    Fp8Slot *slots;
    Fp8Live *live;
    float *history; // [count, history_length]
    float *targets; // [count]
    uint8_t *used;  // [count] SLOT_FOLLOWS, SLOT_WEIGHT
    int count, history_length;
    bool delayed, most_recent;
} Fp8Scaling;

// Once an optimizer step, after the decision: enters the ranges into the history and renews the
// scales; after a skipped step forgets those of activations and gradients. state->unmeasured is
// then the number of slots in use without a history (0 for tensorwise scaling).
void gpu_fp8_update(const Fp8Scaling *scaling, StepState *state, const StepInput *input,
                    cudaStream_t stream);
// live from the slots: at the start of a run.
void gpu_fp8_load_scales(const Fp8Scaling *scaling, cudaStream_t stream);
// Those of activations and gradients since the last update.
void gpu_fp8_forget_ranges(const Fp8Scaling *scaling, cudaStream_t stream);
// Before a micro-step: no range has been measured.
void gpu_fp8_clear_measured(const Fp8Scaling *scaling, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
