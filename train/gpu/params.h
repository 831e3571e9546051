// The parameters on the device, and everything that changes them: FP32 master weights, moments and
// gradients of this rank's shard, the weights that products read, the FP8 scaling state, and their
// way to and from a checkpoint.
//
// Any number of ranks works the same way (ZeRO-1, model/zero.h): gradients lie in the arranged
// space; a rank keeps and updates its part of every segment. A segment's new weights are gathered
// in place: in BF16, or in FP8 as their owners quantise them. Each bucket's gradients are exchanged
// by params_reduce() once they are complete; its new weights are sent by params_update() and read
// after params_receive(). With one rank the collectives are no-ops.
#pragma once

#include "../../kernels/kernels.h"
#include "../../model/plan.h"
#include "../../model/zero.h"
#include "../run.h"
#include "comm.h"
#include "muon.h"

BEGIN_C

// What can be waited for one by one: gradients' sums, what all ranks agree on, and from
// SLOT_WEIGHTS on each bucket's new weights.
enum { SLOT_SUMS, SLOT_AGREEMENT, SLOT_WEIGHTS };

typedef struct {
    Gpu *gpu;
    Comm *comm;
    const Run *run;

    ZeroLayout zero;
    void **weights; // [zero.count] of a segment: BF16 or FP8
    // The optimizer's arrays: master weights and first moments [zero.kept], second moments
    // [zero.kept_adamw], gradients [zero.size]; the weights that are sent as codes [num_tensors].
    AdamWUpdate adamw;
    AdamWUpdate *updates; // [num_buckets] the same, with a bucket's segments
    ZeroRange *ranges;    // [num_ranges] the elements that this rank keeps
    Bucket *saved;        // [num_ranges] the same, as a checkpoint has them
    int num_ranges;
    AdamWSegment *segments; // on the device, [num_ranges]
    GradientPart *parts;    // on the device, [num_parts]: of the gradients' norm
    int num_parts;
    Muon muon;
    StepState *state;     // on the device
    double *norm_scratch; // also of params_sum_counts

    bool fp8, delayed, blockwise;
    Fp8Scaling scaling; // buffers on the device
    Fp8Counts *counts;  // on the device, [slots]; NULL without --fp8-stats-interval
    // Blockwise scaling: of the linear layers' weights [precision.count], zero where it is BF16.
    // Their amaxes lie together, as do their scales.
    Fp8Squares *squares;
    float *square_amax, *square_scales;
    int64_t num_squares;
    int num_tensors;

    bool
        *arriving; // [num_buckets] new weights are on their way: params_receive has not been called

    Bf16 *gathered; // a segment of FP8 weights in BF16, for model.safetensors
    char *snapshot; // host memory of checkpoints: what this rank writes
} Params;

// Fills in what follows from the run's options, and plans the buffers.
void params_plan(Params *p, const Run *run, Plan *plan);
void params_free_plan(Params *p);
// Bytes of host memory that so many ranks of one machine, this one among them, keep for
// checkpoints; 0: the run saves none.
int64_t params_host_bytes(const Params *p, int ranks);

// Once the plan has its memory: tables, flags, scales; host memory of checkpoints.
void params_start(Params *p, Gpu *gpu, Comm *comm);
void params_close(Params *p);

// From the first weights or a checkpoint to everything on the device, a parameter at a time.
void params_restore(Params *p, const Checkpoint *checkpoint);

// Where the weights of a parameter are: Bf16 *, or FP8 codes where *codes (which may be NULL where
// they are not); NULL where the model has no such parameter. The layer counts only inside the
// blocks.
void *params_weights(const Params *p, TensorId id, int layer, bool *codes);
// Where its gradient goes; data NULL where the model has none.
Gradient params_gradient(const Params *p, TensorId id, int layer);
// Fills in how an operand of an FP8 layer is quantised, in a training pass.
void params_scale(const Params *p, const LinearPrecision *lp, OperandId operand, Tensor *t);

// Before a micro-batch's forward pass: nothing has been measured in it.
void params_clear_measured(const Params *p);
// What FP8 loses, by slot: nothing is counted yet / fetches what was counted since, of all ranks,
// which waits for the device.
void params_clear_counts(Params *p);
void params_fetch_counts(Params *p, Fp8Counts *host);

// In the last micro-batch's backward pass: the bucket's gradients are complete, and are added up
// over the ranks beside what follows; params_join waits for all.
void params_reduce(Params *p, int bucket);
void params_join(Params *p);
// Norm, decision, scales, Muon and AdamW, by p->input; the new weights are on their way.
void params_update(Params *p);
// Waits for the bucket's new weights. False: they have been received before.
bool params_receive(Params *p, int bucket);
// Whether the next params_receive of every bucket waits. A captured graph has its own waits, at
// every run.
void params_expect(Params *p, bool arriving);

// values[n], on the device, become the sums over the ranks.
void params_sum(Params *p, double *values, int n);
// The same of n counts on the host. Waits for the device.
void params_sum_counts(Params *p, int64_t *counts, int n);

// The state to host memory, which then holds still for the background save. Waits for the device.
void params_snapshot(Params *p, Snapshot *snapshot);
// The gradients, laid out as the parameters, to the host; all ranks call it. Waits for the device.
void params_fetch_gradients(Params *p, float *host);

// Between params.c and params_io.c: from the master weights to the weights that products read, at
// the start of a run; host memory of checkpoints.
void params_publish(Params *p);
void params_allocate_snapshot(Params *p);

END_C
