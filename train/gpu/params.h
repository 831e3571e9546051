// The parameters on the device, and everything that changes them: FP32 master weights, moments,
// gradients, the copies that the products read (BF16, or FP8 as it is and transposed), the FP8
// scaling state, the optimizer's step, and their way to and from a checkpoint.
//
// Several ranks (params_ranks.c): gradients lie in the arranged space of model/zero.h, master
// weights and moments are those of this rank's parts.
// Each bucket's gradients are exchanged by params_reduce() once they are complete, its new weights
// by params_update(), to be there after params_receive().
#ifndef LLM8_PARAMS_H
#define LLM8_PARAMS_H

#include "../../kernels/fp8.h"
#include "../../model/plan.h"
#include "../../model/zero.h"
#include "../run.h"
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Of a segment, all ranks' parts.
typedef struct {
    int64_t copies; // into the BF16 copies; -1: FP8 codes,
    uint8_t *codes; // as it is ("rows")
} SegmentPlace;

// Segments of AdamW's that follow each other, and their blocks.
typedef struct {
    int begin, count, blocks;
} BucketParts;

// Rows of Fp8Weights that follow each other.
typedef struct {
    int begin, tiles;
} WeightRows;

typedef struct {
    Gpu *gpu;
    Comm *comm;
    const Run *run;
    int64_t size; // of the parameter space

    ZeroLayout zero;
    int64_t state_size;         // elements of which this rank has master weights and moments
    float *master;              // [state_size]
    void *gradients;            // [zero.size] gradient_type
    void *exp_avg, *exp_avg_sq; // [state_size] moment_type
    GpuType gradient_type, moment_type;
    GradientPart *parts; // [num_parts] on the device: what this rank adds up for the norm
    int num_parts;
    ZeroRange *ranges;         // [num_ranges] what master weights and moments are
    int num_ranges, num_saved; // those of them in this rank's part of a checkpoint
    Bucket *saved;             // [num_saved] the same
    uint8_t *decay;            // a flag for each PARAM_ALIGN elements
    StepState *state;
    double *norm_scratch; // also of the sums of counts

    Bf16 *copies;           // of the parameters that are not FP8, one after another
    int64_t *copy_offset;   // [layout.count] into copies, -1: FP8
    uint8_t **codes;        // [2 * linear layers] FP8 weights: rows [N,C], then columns [C,N]
    SegmentPlace *places;   // [zero.count] several ranks: where segments of new weights travel
    Bf16 *plain;            // FP8 weights in BF16, at need: one, or several ranks' segment
    Fp8Scaling scaling;     // buffers on the device
    AdamWSegment *segments; // on the device: one rank: the parameters with copies; several: parts
    int segment_count, segment_blocks; // one rank's
    BucketParts *bucket_parts;         // [num_buckets] several ranks'
    Fp8Weights weights;                // those of FP8 layers
    WeightRows *bucket_rows;     // [num_buckets] those of them in a bucket; a tied one in none
    int tied_weight, tied_tiles; // a tied embedding's row, the last, and its tiles; the end: none
    bool fp8, delayed;
    bool counting;     // this step counts what FP8 loses (--fp8-stats-interval)
    Fp8Counts *counts; // [slots], NULL without that option
    bool measuring; // FP8 scales are measured in the step: tensorwise, or a slot has no history yet

    char *snapshot; // host memory for checkpoints: what this rank writes
    Fp8Slot *snapshot_slots;
    float *snapshot_history;
} Params;

// Fills in what follows from the run's options, and plans the buffers.
void params_plan(Params *p, const Run *run, Plan *plan);
void params_free_plan(Params *p);

// Once the plan has its memory: flags, targets, tables.
void params_start(Params *p, Gpu *gpu, Comm *comm);
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
// The weight in BF16 of an FP8 layer that has no copy, rounded from the master weights; until the
// next call.
const Bf16 *params_plain_weight(const Params *p, Linear linear, int layer);
// The inverse scale of an operand, on the device.
const float *params_scale_inv(const Params *p, Linear linear, int layer, Operand operand);
// Where an operand is quantised to. record: its range counts.
Fp8Out params_fp8_out(const Params *p, Linear linear, int layer, Operand operand, uint8_t *rows,
                      uint8_t *columns, bool record);

// Before a micro-batch's forward pass, where ranges are measured.
void params_clear_measured(const Params *p);
// What activations and gradients said of their range since the last update.
void params_forget_ranges(const Params *p);
// What FP8 loses, by slot: begin, with nothing counted; end, and fetch what was counted since.
// Waits for the device.
void params_begin_counting(Params *p);
void params_end_counting(Params *p, Fp8Counts *host);
// After an update, once its state is on the host: whether the next step measures.
void params_note_step(Params *p, const StepState *state);

// Norm, decision, scales, AdamW, the copies: enqueued. input: on the device.
void params_update(Params *p, const StepInput *input);

// The state to host memory, which then holds still for the background save. Waits for the device.
void params_snapshot(Params *p, Bf16 *scratch, int64_t scratch_elements, Snapshot *snapshot);

// The gradients, laid out as the parameters, to the host; all ranks call it. Waits for the device.
void params_fetch_gradients(Params *p, float *host);

// The table of FP8 weights to the device.
void params_send_weights(Params *p);
// The settings of AdamW on this rank's segments.
AdamWUpdate params_adamw(const Params *p, const StepInput *input);
// row[layout.count]: each parameter's in `weights`, -1: it has none.
void params_weight_rows(const Params *p, int *row);
// The parameter that is the weight of linear layer number `index` (model/precision.h).
int params_of_linear(const Params *p, int index);

// ---- params_ranks.c: several ranks; nothing happens where there is one ----

// How many collectives can be waited for: comm_open's slots.
int params_slots(const ParamLayout *layout);

// Which segments travel how; returns the BF16 copies' size. Then what they take on the device.
int64_t params_place_segments(Params *p);
void params_plan_segments(Params *p, Plan *plan);
// This rank's parts, to the device.
void params_send_segments(Params *p);

// In the last micro-batch's backward pass: the bucket's gradients are complete, and added up beside
// what follows; params_join waits for all.
void params_reduce(Params *p, int bucket);
void params_join(Params *p);
// In the first micro-batch's forward pass: the bucket's weights are read from here on.
void params_receive(Params *p, int bucket);
void params_receive_all(Params *p);

// Norm, loss, ranges and whether to stop, from each rank's own to all ranks'.
void params_agree(Params *p, const StepInput *input);
// AdamW on this rank's parts; the new weights are on their way.
void params_update_parts(Params *p, const AdamWUpdate *update);
// At the start: from the master weights to everything on every rank.
void params_publish(Params *p, const AdamWUpdate *update);
// A segment's weights in BF16, rounded from the master weights, to p->plain.
void params_gather_plain(Params *p, int segment);
// Dies where a rank has another FP8 scale than rank 0.
void params_check_scales(Params *p, const Fp8Slot *slots);
// values[n], on the device, become the sums over the ranks.
void params_sum(Params *p, double *values, int n);
// The same of a few counts on the host. Waits for the device.
void params_sum_counts(Params *p, int64_t *counts, int n);

#ifdef __cplusplus
}
#endif

#endif
