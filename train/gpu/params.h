// The parameters on the device, and everything that changes them: FP32 master weights, moments and
// gradients of this rank's shard, the weights that matmuls read, and the FP8 scaling state. Also
// restores them from a checkpoint, and copies what a checkpoint saves to host memory. The part of
// the optimizer's state that does not fit on the device is in pinned host memory, where the same
// kernels update it (--optimizer-cpu-offload).
//
// The same code serves any number of ranks (ZeRO-1; model/zero.h explains segments, parts and the
// sharded layout). Gradients lie in the sharded layout, and a rank keeps and updates its part of
// every segment. A segment's new weights are gathered in place: in BF16, or as FP8 codes, to which
// each rank quantises its part. When a bucket's gradients are complete, params_reduce() exchanges
// them. params_update() sends a bucket's new weights, which are read after params_receive(). With
// one rank the collectives are no-ops.
#pragma once

#include "../../kernels/kernels.h"
#include "../../model/plan.h"
#include "../../model/zero.h"
#include "../state.h"
#include "comm.h"
#include "muon.h"

BEGIN_C

// Slots of collectives (comm.h). SLOT_SUMS: reduce-scatters of gradients; SLOT_WEIGHTS + b:
// all-gathers of bucket b's new weights; SLOT_AGREEMENT: all others.
enum { SLOT_SUMS, SLOT_AGREEMENT, SLOT_WEIGHTS };

// An array of the optimizer's state, with `count` elements. This rank keeps some elements of the
// parameter space, and numbers them from 0 (ZeroRange.kept). Element i of the array belongs to the
// `span` kept elements from number first + i * span on.
typedef struct {
    GpuType type;
    int64_t first, count;
    int span;          // 1, or MOMENT_BLOCK for the scales of 8-bit moments
    int64_t offloaded; // the first `offloaded` elements are in host memory, the rest on the device
    void *device;
    void *host; // in a run that saves: memory for all elements, from which a checkpoint is written
} StateArray;

// Returns the address of the array's element for the kept element with index `kept`, or NULL if
// the array has no such element. Kernels can use the address, even if it is in host memory.
void *state_address(const StateArray *a, int64_t kept);

// The weights that matmuls read.
typedef struct {
    void **segments; // [zero.count] BF16 or FP8
    bool *arriving;  // [num_buckets] whether new weights are on their way; params_receive resets it
    // fp8 [precision.count], in host memory, has a row for each linear layer's weight; the row of a
    // BF16 layer is zero. With blockwise scaling the rows point into two arrays on the device:
    // block_amax has the amaxes of the weights' blocks of 128 x 128, block_inverse the blocks'
    // inverse scales, first for the weights and then for the transposed weights.
    Fp8Weight *fp8;
    float *block_amax, *block_inverse; // [num_block_scales], [2, num_block_scales]
    int64_t num_block_scales;
} Weights;

// The optimizer's state that this rank keeps, and what an update needs.
typedef struct {
    StateArray arrays[STATE_ARRAYS];
    // [num_ranges] the elements that this rank keeps; a range is not split between host memory and
    // device memory
    ZeroRange *ranges;
    int num_ranges;
    AdamWUpdate adamw;      // `gradients`: zero.size elements; `weights`: weights sent as FP8 codes
    AdamWUpdate *updates;   // [num_buckets] copies of adamw, each with the segments of one bucket
    AdamWSegment *segments; // on the device, [num_ranges]
    GradientPart *parts;    // on the device, [num_parts]: parts of the sum for the gradients' norm
    int num_parts;
    double *norm_scratch; // on the device; params_sum_counts also uses it
    StepState *state;     // on the device
    Muon muon;
} OptimizerState;

// The buffers from which a checkpoint is written, besides the optimizer's arrays.
typedef struct {
    Bucket *ranges; // [num_ranges] the elements that this rank saves
    int num_ranges;
    Bf16 *gathered;   // on the device: a segment of FP8 weights in BF16
    uint64_t *hashes; // on the device: [STATE_ARRAYS]
    // in host memory: all weights (rank 0), the scaling state
    Bf16 *model;
    Fp8Scale *scales;
    float *history;
} Saved;

typedef struct {
    Gpu *gpu;
    Comm *comm;
    Run *run;
    ZeroLayout zero;
    Weights weights;
    Fp8Table fp8;      // indexed by fp8_slot_index; count 0: no layer is in FP8
    Scaling *scaling;  // [fp8.count] in host memory; final after params_restore
    bool measures;     // some scales are SCALE_CURRENT
    Fp8Counts *counts; // [fp8.count] on the device; NULL without --fp8-stats-interval
    bool counting;     // the step that is being enqueued counts codes
    OptimizerState optimizer;
    Saved saved;
} Params;

// Fills in what follows from the run's options, and plans the buffers on the device and in host
// memory. offload: at least this many bytes of the optimizer's state are in host memory; all of the
// state if it is smaller.
void params_plan(Params *p, Run *run, Plan *plan, Plan *host, int64_t offload);
void params_free_plan(Params *p);
// Whether some of the optimizer's state is in host memory, from where a save writes it.
bool params_offloaded(const Params *p);
// Bytes of host memory that all ranks of this machine need, or this rank alone if the number of
// ranks on the machine is not known. host: this rank's plan.
double params_host_bytes(const Params *p, const Plan *host);

// Sends tables and flags to the device. Call it after the plans have their memory.
void params_start(Params *p, Gpu *gpu, Comm *comm);

// Fills the optimizer's state from the checkpoint that the run resumes, or with initial weights,
// and makes the weights that matmuls read. Decides how FP8 operands get their scales. Returns
// whether the run has to be calibrated (model/precision.h).
bool params_restore(Params *p);

// Returns the address of a parameter's weights. Sets *codes to whether they are FP8 codes;
// otherwise they are Bf16. codes may be NULL if the parameter is never in FP8. Returns NULL if the
// model has no such parameter. layer is ignored for parameters outside the blocks.
void *params_weights(const Params *p, TensorId id, int layer, bool *codes);
// Returns the buffer of a parameter's gradient. Its data is NULL if the model has no such
// parameter.
Gradient params_gradient(const Params *p, TensorId id, int layer);

// Sets all amaxes to 0, if some scales are measured (Params.measures). Call it before a
// micro-batch's forward pass.
void params_clear_measured(const Params *p);
// Calls fp8_calibrate with the amaxes of all ranks. Waits for the device.
void params_calibrate(Params *p);
// params_start_counts sets the counts of FP8 codes (--fp8-stats-interval) to 0 and begins to count.
// params_fetch_counts ends the counting, and fetches the sums over all ranks, indexed by
// fp8_slot_index. It waits for the device.
void params_start_counts(Params *p);
void params_fetch_counts(Params *p, Fp8Counts *host);

// Starts to add up the bucket's gradients over the ranks, while the backward pass continues. Call
// it in the last micro-batch's backward pass, when these gradients are complete. comm_join waits
// for the sums of all buckets.
void params_reduce(Params *p, int bucket);
// Enqueues the optimizer's step, which reads the StepInput on the device: the norm, the decision
// whether to skip the step, the FP8 scales, Muon and AdamW. It also starts to send the new weights
// to all ranks. loss_sum: the sum of this rank's losses, on the device.
void params_update(Params *p, const double *loss_sum);
// Waits for the bucket's new weights. Returns false if they have been received before.
bool params_receive(Params *p, int bucket);
// Sets whether the next params_receive of every bucket waits. A captured graph contains its own
// waits, which happen in every replay.
void params_expect(Params *p, bool arriving);

// Replaces values[n], on the device, by their sums over the ranks.
void params_sum(Params *p, double *values, int n);
// Replaces counts[n], on the host, by their sums over the ranks. Waits for the device.
void params_sum_counts(Params *p, int64_t *counts, int n);

// Sets hashes[STATE_ARRAYS], on the device, to the hashes of all state that this rank keeps, on the
// device and in host memory.
void params_hash_state(const Params *p, uint64_t *hashes);
// Copies the state to host memory, from where a thread saves it. Waits for the device.
void params_snapshot(Params *p, Snapshot *snapshot);
// Copies the gradients to the host, laid out as the parameters; all ranks call it. Waits for the
// device.
void params_fetch_gradients(Params *p, float *host);

// Makes the weights that matmuls read from the master weights. params_restore calls it at the
// start of a run.
void params_publish(Params *p);

END_C
