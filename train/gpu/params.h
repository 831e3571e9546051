// The parameters on the device, and everything that changes them: FP32 master weights, moments and
// gradients of this rank's shard, the weights that products read, the FP8 scaling state, and their
// way to and from a checkpoint. What of the optimizer's state the device has no room for lies in
// pinned host memory, where the same kernels update it (--optimizer-cpu-offload).
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
#include "../state.h"
#include "comm.h"
#include "muon.h"

BEGIN_C

// What can be waited for one by one: gradients' sums, what all ranks agree on, and from
// SLOT_WEIGHTS on each bucket's new weights.
enum { SLOT_SUMS, SLOT_AGREEMENT, SLOT_WEIGHTS };

// An array of the optimizer's state, of the elements that this rank keeps (ZeroRange.kept).
typedef struct {
    const char *name; // in a checkpoint
    GpuType type;
    int64_t count;
    int64_t offloaded; // elements in host memory, the first ones; the others are on the device
    void *device;
    void *host; // in a run that saves, room for all: a checkpoint is written from there
} StateArray;

enum { STATE_MASTER, STATE_EXP_AVG, STATE_EXP_AVG_SQ, STATE_ARRAYS };

// Where an element of it is, for kernels.
void *state_address(const StateArray *a, int64_t element);

// What products read.
typedef struct {
    void **segments; // [zero.count] BF16 or FP8
    bool *arriving;  // [num_buckets] on their way: params_receive has not been called
} Weights;

// How FP8 operands get their scales. What is not said to be in host memory is on the device.
typedef struct {
    bool used, delayed, blockwise;
    Fp8Scaling scaling;
    Fp8Counts *counts; // [slots]; NULL without --fp8-stats-interval
    // Blockwise scaling: of the linear layers' weights [precision.count], zero where it is BF16, in
    // host memory. Their amaxes lie together, as do their scales.
    Fp8Squares *squares;
    float *square_amax, *square_scales;
    int64_t num_squares;
    int num_tensors; // weights that are sent as codes
} Fp8State;

// What this rank keeps and updates, and what an update needs.
typedef struct {
    StateArray arrays[STATE_ARRAYS];
    // [num_ranges] the elements that this rank keeps; none is in part in host memory
    ZeroRange *ranges;
    int num_ranges;
    AdamWUpdate adamw;    // gradients [zero.size]; the weights that are sent as codes [num_tensors]
    AdamWUpdate *updates; // [num_buckets] the same, with a bucket's segments
    AdamWSegment *segments; // on the device, [num_ranges]
    GradientPart *parts;    // on the device, [num_parts]: of the gradients' norm
    int num_parts;
    double *norm_scratch; // on the device; params_sum_counts uses it too
    StepState *state;     // on the device
    Muon muon;
} OptimizerState;

// What a checkpoint is written from, beside the optimizer's arrays.
typedef struct {
    Bucket *ranges; // [num_ranges] the elements that this rank saves
    int num_ranges;
    Bf16 *gathered;   // on the device: a segment of FP8 weights in BF16
    uint64_t *hashes; // on the device: [STATE_ARRAYS]
    // in host memory: all weights (rank 0), the scaling state
    Bf16 *model;
    Fp8Slot *slots;
    float *history;
} Saved;

typedef struct {
    Gpu *gpu;
    Comm *comm;
    const Run *run;
    ZeroLayout zero;
    Weights weights;
    Fp8State fp8;
    OptimizerState optimizer;
    Saved saved;
} Params;

// Fills in what follows from the run's options, and plans the buffers, on the device and in host
// memory. So many bytes of the optimizer's state, at least, or all of it, are in host memory.
void params_plan(Params *p, const Run *run, Plan *plan, Plan *host, int64_t offload);
void params_free_plan(Params *p);
// Whether some of the optimizer's state is in host memory: a save writes it from there.
bool params_offloaded(const Params *p);
// Bytes of host memory that so many ranks of one machine need, this one, with its plan, among them.
int64_t params_host_bytes(const Params *p, const Plan *host, int ranks);

// Once the plans have their memory: tables, flags, scales.
void params_start(Params *p, Gpu *gpu, Comm *comm);

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
// Norm, decision, scales, Muon and AdamW, by the StepInput on the device; the new weights are on
// their way. loss_sum: of this rank's losses, on the device.
void params_update(Params *p, const double *loss_sum);
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
// the start of a run.
void params_publish(Params *p);

END_C
