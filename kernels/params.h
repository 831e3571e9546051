// The parameters on the device, and everything that changes them: FP32 master weights, moments,
// gradients, the copies that the products read (BF16, or FP8 as it is and transposed), the FP8
// scaling state, the optimizer's step, and their way to and from a checkpoint.
#ifndef LLM8_PARAMS_H
#define LLM8_PARAMS_H

#include "../train/plan.h"
#include "../train/run.h"
#include "fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Gpu *gpu;
    const Run *run;
    int64_t size; // of the parameter space

    float *master;              // [size]
    void *gradients;            // [size] gradient_type
    void *exp_avg, *exp_avg_sq; // [size] moment_type
    GpuType gradient_type, moment_type;
    uint8_t *decay; // a flag for each PARAM_ALIGN elements
    StepState *state;
    double *norm_scratch;

    Bf16 *copies;           // of the parameters that are not FP8, one after another
    int64_t *copy_offset;   // [layout.count] into copies, -1: FP8
    uint8_t **codes;        // [2 * linear layers] FP8 weights: rows [N,C], then columns [C,N]
    Fp8Scaling scaling;     // buffers on the device
    AdamWSegment *segments; // on the device: the parameters with copies
    int segment_count, segment_blocks;
    Fp8Weights weights;         // those of FP8 layers
    int tied_weight, tied_tile; // where a tied embedding's row and tiles begin; the end: none
    bool fp8, delayed;
    bool measuring; // FP8 scales are measured in the step: tensorwise, or a slot has no history yet

    char *snapshot; // host memory for checkpoints
    Fp8Slot *snapshot_slots;
    float *snapshot_history;
} Params;

// Fills in what follows from the run's options, and plans the buffers.
void params_plan(Params *p, const Run *run, Plan *plan);
void params_free_plan(Params *p);

// Elements of the largest weight that has no BF16 copy.
int64_t params_largest_coded(const Params *p);

// Once the plan has its memory: flags, targets.
void params_start(Params *p, Gpu *gpu);
// Host memory for checkpoints, pinned where the system allows it.
void params_allocate_snapshot(Params *p);
void params_close(Params *p);

// From FP32 values or a checkpoint to everything on the device.
void params_restore(Params *p, bool resumed, const Checkpoint *checkpoint);

// BF16 copy of a parameter; NULL where the model has none, or it is FP8. The layer counts only
// inside the blocks.
Bf16 *params_copy(const Params *p, TensorId id, int layer);
// Where a parameter's gradient goes; data NULL where the model has none.
GradientOut params_gradient(const Params *p, TensorId id, int layer, bool accumulate);
// FP8 weight of a linear layer: [N,C], or transposed [C,N].
const uint8_t *params_codes(const Params *p, Linear linear, int layer, bool transposed);
// A linear layer's weight in BF16, rounded from the master weights into out (its size rounded up to
// PARAM_ALIGN).
void params_plain_weight(const Params *p, Linear linear, int layer, Bf16 *out);
// The inverse scale of an operand, on the device.
const float *params_scale_inv(const Params *p, Linear linear, int layer, Operand operand);
// Where an operand is quantised to. record: its range counts.
Fp8Out params_fp8_out(const Params *p, Linear linear, int layer, Operand operand, uint8_t *rows,
                      uint8_t *columns, bool record);

// Before a micro-batch's forward pass, where ranges are measured.
void params_clear_measured(const Params *p);
// What activations and gradients said of their range since the last update.
void params_forget_ranges(const Params *p);
// After an update, once its state is on the host: whether the next step measures.
void params_note_step(Params *p, const StepState *state);

// Norm, decision, scales, AdamW, the copies: enqueued. input: on the device.
void params_update(Params *p, const StepInput *input);

// The state to host memory, which then holds still for the background save. Waits for the device.
void params_snapshot(Params *p, Bf16 *scratch, int64_t scratch_elements, Snapshot *snapshot);

#ifdef __cplusplus
}
#endif

#endif
