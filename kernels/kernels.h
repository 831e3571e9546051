// Every GPU kernel's launcher. Shapes and meanings are those of cpu.h; activations, weights and
// their gradients are BF16 unless a comment says otherwise, statistics FP32. A launcher enqueues on
// gpu->stream and returns; the caller's buffers must stay valid until the stream has done the work.
// Pointers are 16-byte aligned and channel counts (C, F, D, P) multiples of 8; a tensor that is
// written in FP8 has rows and columns in multiples of 16.
//
// A launcher first calls gpu_family with its kernel family. Profiling adds the launcher's time to
// this family, and also the time of quantising the launcher's output.
//
// Sums have one fixed order, so that a repeated call gives the same bits. A kernel that sums over
// rows (weight and bias gradients) leaves partial sums in scratch and adds them up in a second
// launch.
#pragma once

#include "gemm.h"
#include "loss_terms.h"
#include "spikes.h"

BEGIN_C

// The largest sizes that the kernels take. Launchers check them, and so does a run before it starts
// (train/gpu/support.c).
enum { MAX_CHANNELS = 8192, MAX_HEAD_SIZE = 256 };

// Returns whether kernels can take a tensor [M,N]: they read 8 values at a time, and count rows,
// columns and vectors of 8 in an int.
enum { MAX_VALUES_LOG2 = 33 };
static inline bool gpu_tensor_fits(int64_t M, int64_t N) {
    return M > 0 && N > 0 && N % 8 == 0 && M * (N / 8) < (int64_t)1 << (MAX_VALUES_LOG2 - 3);
}
// Returns whether gpu_rope_forward and _backward can take queries, keys and values [M,N]: a thread
// rotates a pair of values, and an int counts the threads.
static inline bool gpu_rotary_fits(int64_t M, int64_t N) {
    return M > 0 && N > 0 && M * (N / 2) <= INT32_MAX;
}

// The buffer of a gradient of weights, in FP32 or BF16. With accumulate, a kernel adds the gradient
// to the buffer; otherwise it overwrites the buffer.
typedef struct {
    void *data; // NULL: not requested
    GpuType type;
    bool accumulate;
} Gradient;

// FP32 scratch of a launcher, and its size, which the launcher checks.
typedef struct {
    float *data;
    size_t bytes;
} Scratch;

// Returns the bytes of scratch for the sums of `columns` columns over M rows.
size_t partial_sums_bytes(int64_t M, int64_t columns);

// ---- tensors that matmuls read ----
//
// Hopper's FP8 tensor cores take both operands with the summed dimension contiguous, so a tensor
// [M,N] is written twice in one pass: as it is, and transposed.

// The scales of all FP8 tensors, on the device. SLOT_UPDATED: each step updates the scale from the
// history of amaxes. SLOT_WEIGHT: the tensor is a weight. A skipped step keeps the amax of a
// weight, because the weight does not change.
enum { SLOT_UPDATED = 1, SLOT_WEIGHT = 2 };
typedef struct {
    Fp8Scale *scales;
    float *history; // [count, length] delayed scaling: a ring buffer of each tensor's last amaxes
    float *targets; // [count] what amax * scale should be
    uint8_t *kinds; // [count] SLOT_UPDATED, SLOT_WEIGHT
    int count, length;
} Fp8Table;

// An FP8 form of a tensor: its codes, and the factors that turn codes back into values, which are
// the inverse of the tensor's scale or the inverse scales of its blocks. codes is NULL if the form
// is not requested.
typedef struct {
    uint8_t *codes;
    float *inverse;
} Fp8Form;

// A tensor [M,N] that matmuls read: its forms, and how it is quantised. A tensor without codes is
// BF16. If a tensor is fused, kernels write only its FP8 forms. A tensor with SCALE_CURRENT cannot
// be fused, because its codes are computed from `bf16` after the amax is known.
typedef struct {
    Bf16 *bf16;            // [M,N]; NULL: not requested
    Fp8Form rows, columns; // [M,N], [N,M]
    Fp8Scale *scale;       // scale of the tensor; NULL: its blocks have scales, or it is BF16
    Fp8Type type;
    float target; // what amax * scale should be, unless the scale is given
    Scaling scaling;
    bool fused;        // kernels write no BF16, because no matmul reads it
    bool writes_amax;  // kernels write the amax to scale->amax (delayed scaling, SCALE_CURRENT)
    bool power_of_two; // the scales of blocks are rounded down to powers of two
} Operand;

static inline Operand operand_bf16(Bf16 *bf16) {
    Operand t = {0};
    t.bf16 = bf16;
    return t;
}

// A launcher with an argument of type Operand writes its output there. If the operand is fused, the
// kernel writes only the FP8 forms. Otherwise it writes bf16 and, with SCALE_CURRENT, the amax of
// bf16 to scale->amax; a second kernel then writes the FP8 forms from bf16. A fused output of a
// forward pass is E4M3.

// Writes the FP8 forms from out.bf16 [M,N]. With SCALE_CURRENT and out.writes_amax, it first
// measures the amax. sums receives the column sums of out.bf16, even if no FP8 form is requested.
// The time counts to FAMILY_QUANTIZE, or to FAMILY_ACTIVATIONS if only columns are summed.
void gpu_quantize(Gpu *gpu, Operand out, Gradient sums, Scratch scratch, int M, int N);
// Adds the counts of n FP8 codes (Fp8Counts) to *counts; n is a multiple of 16.
void gpu_count_codes(Gpu *gpu, Fp8Counts *counts, const uint8_t *codes, int64_t n, Fp8Type type);
// out [C,N] = the transpose of the FP8 codes x [N,C]; N and C are multiples of 16.
void gpu_transpose_codes(Gpu *gpu, uint8_t *out, const uint8_t *x, int N, int C);

// ---- embedding.cu ----
// A token's position counts from its document's start (cpu.h) or, if starts is NULL, from the
// beginning of its sequence.
void gpu_embedding_forward(Gpu *gpu, Bf16 *out, const int *tokens, const int *starts,
                           const Bf16 *wte, const Bf16 *wpe, int B, int T, int C);

// The rows 0 to M-1 of a batch, sorted by token. Run i consists of rows[starts[i]] to
// rows[starts[i+1] - 1], which all hold the same token. runs[0] is the number of runs, runs[1] the
// number of long runs; after these, runs has the indices of the long runs.
typedef struct {
    int *rows, *starts, *runs; // [M], [M+1], [embedding_runs_size(M)]
} TokenRuns;
enum { EMBEDDING_LONG_RUN = 32 }; // a run of at least this many rows is long
static inline int embedding_runs_size(int M) {
    return 2 + M / EMBEDDING_LONG_RUN;
}
// Adds each token's rows of dout to the token's row of dwte, in the order of `runs`. The arrays of
// `runs` are on the device, so that the launch does not depend on the tokens. If positions count
// from the beginnings of documents, a second call computes the gradient of wpe, with positions in
// place of tokens.
void gpu_embedding_backward(Gpu *gpu, Gradient dwte, const Bf16 *dout, const int *tokens,
                            TokenRuns runs, int M, int C);
void gpu_position_backward(Gpu *gpu, Gradient dwpe, const Bf16 *dout, int B, int T, int C);
// Sorts rows by token, on the host (embedding.c). tokens [M] are below V; counts is scratch [V+1].
void embedding_sort_tokens(TokenRuns out, const int *tokens, int M, int V, int *counts);

// ---- norm.cu ----
typedef struct {
    float *mean, *rstd;            // [M]
    const Bf16 *x, *weight, *bias; // [M,C], [C]; bias NULL: RMSNorm, and mean is not used
    float eps;
    int M, C;
} NormForward;
void gpu_norm_forward(Gpu *gpu, Operand out, NormForward n);

// out.bf16 is d_residual [M,C]. The norm's input gradient is added to d_residual in place, and the
// FP8 forms are written from the sum. column_sums receives the column sums of the new d_residual,
// which are the bias gradient of the linear layer that wrote x.
typedef struct {
    Gradient dweight, dbias, column_sums;
    const Bf16 *dout, *x, *weight;
    const float *mean, *rstd; // mean NULL: RMSNorm
    Scratch scratch;
    int M, C;
} NormBackward;
void gpu_norm_backward(Gpu *gpu, Operand out, NormBackward n);

// ---- activation.cu ----
// out = gelu(x + bias) of x [M,F] and bias [F], which may be NULL.
void gpu_gelu_forward(Gpu *gpu, Operand out, const Bf16 *x, const Bf16 *bias, int M, int F);
// dx = dout gelu'(x + bias); column_sums receives the column sums of dx. dx.bf16 may be dout.
void gpu_gelu_backward(Gpu *gpu, Operand dx, Gradient column_sums, const Bf16 *dout, const Bf16 *x,
                       const Bf16 *bias, Scratch scratch, int M, int F);
// out [M,F] = SwiGLU of x [M,2F], which has the columns of gate, then those of up.
void gpu_swiglu_forward(Gpu *gpu, Operand out, const Bf16 *x, int M, int F);
// dx [M,2F]; dx.bf16 may be x.
void gpu_swiglu_backward(Gpu *gpu, Operand dx, const Bf16 *dout, const Bf16 *x, int M, int F);

// ---- fused_matmul.cu ----
// FP8 matmuls with an activation in their epilogue. The activation's output is a fused
// Operand with SCALE_DELAYED: it is written only in FP8. Values are rounded as if gemm() and then
// the activation's kernel computed them. M, N and K are multiples of 16. gpu_has_fused_matmuls
// returns whether this driver and this build can run them on this GPU, which must have compute
// capability 9.0.
bool gpu_has_fused_matmuls(const Gpu *gpu);
// For GPT-2: fc1's forward matmul with GELU, and fc2's input gradient with GELU's derivative.

// The largest K of these matmuls. For larger K, a panel of B does not fit in shared memory, and
// gemm() with a separate activation kernel was faster.
enum { GELU_MATMUL_MAX_K = 768 };
// g.d [M,N] = the matmul's result; out = gelu(g.d + g.bias).
void gpu_matmul_gelu(Gpu *gpu, Gemm g, Operand out);
// dx = the matmul's result times gelu'(g.aux + g.bias); column_sums receives the column sums of dx.
// g.d is not written.
void gpu_matmul_gelu_backward(Gpu *gpu, Gemm g, Operand dx, Gradient column_sums, Scratch scratch);

// ---- rope.cu ----
// Each head of the queries and keys in a packed qkv [M,(H+2G)D] is normalised by RMSNorm if there
// are weights (QK norm; D up to MAX_HEAD_SIZE), and then rotated. D is even.
typedef struct {
    const float *table;                    // [T,D] (rope.h)
    const Bf16 *query_weight, *key_weight; // [D]; NULL: no norm
    float eps;
    int B, T, H, G, D;
} Rotary;
// out may be qkv. If it is another buffer, V, which is not rotated, is copied into it.
void gpu_rope_forward(Gpu *gpu, Bf16 *out, const Bf16 *qkv, Rotary r);

// d_qkv.bf16 [M,(H+2G)D] holds the gradient of the forward pass's output. The launcher replaces it
// by the gradient of the forward pass's input, with one exception: if d_qkv.fused is set, D is a
// multiple of 16 and there is no QK norm, then the input's gradient is written only to the FP8
// forms, and d_qkv.bf16 does not change.
typedef struct {
    Rotary rotary;
    const Bf16 *qkv; // the input of the forward pass; read only with QK norm
    Gradient dquery_weight, dkey_weight;
    Gradient column_sums; // column sums of the input's gradient: the bias gradient
    Scratch scratch;
} RotaryBackward;
void gpu_rope_backward(Gpu *gpu, Operand d_qkv, RotaryBackward b);

// ---- wide_matmul.cu ----
// FP8 matmuls of E4M3 operands with fast accumulation. What is said above of fused_matmul.cu holds
// for them too. g.d has the same bits as from gemm(), if gemm() sums in the order of K. A tile has
// WIDE_MATMUL_COLUMNS columns.
enum { WIDE_MATMUL_COLUMNS = 256 };
// For Llama: g.d [M,2F] (gate and up) = fc1's forward matmul; out [M,F] = SwiGLU of g.d, with the
// same bits as from gpu_swiglu_forward(). F is a multiple of 16, too.
void gpu_matmul_swiglu(Gpu *gpu, Gemm g, Operand out);
// For the head: g.d [M,N] = the logits, rounded to BF16. max_sums [tiles][M]: for each row of each
// tile, a pair {maximum, sum of exp(logit - maximum)} of the rounded logits in columns below V, or
// {-infinity, 0} if the tile has no such columns.
void gpu_matmul_max_sums(Gpu *gpu, Gemm g, Scratch max_sums, int V);
static inline int max_sums_tiles(int64_t N) {
    return (int)((N + WIDE_MATMUL_COLUMNS - 1) / WIDE_MATMUL_COLUMNS);
}
static inline int64_t max_sums_floats(int64_t M, int64_t N) {
    return 2 * M * max_sums_tiles(N);
}
// For Llama's QKV: g.d [M,(H+2G)D] = the result, rounded to BF16 and then rotated, with the same
// bits as from gpu_rope_forward(). Requires M = r.B * r.T, no QK norm and gpu_matmul_rotates(D).
void gpu_matmul_rope(Gpu *gpu, Gemm g, Rotary r);
static inline bool gpu_matmul_rotates(int D) {
    return D > 0 && D % 16 == 0 && WIDE_MATMUL_COLUMNS % D == 0;
}

// ---- loss.cu ----
// Writes the losses[M] of the rows of logits.bf16 [M,P]. A row whose target is -1 has loss and
// gradient 0.
//
// If terms.gradient_scale > 0, the gradient of the logits (cpu.h) is written, too. If the tensor is
// fused, the gradient is written only to the FP8 forms, and scratch is needed. Otherwise the
// gradient replaces logits.bf16.
// max_sums has what gpu_matmul_max_sums() has written. It is allowed only if the gradient goes to
// a fused tensor and there is no softcap. It is read before the FP8 forms are written, so it may
// lie in their memory. If max_sums.data is NULL, maxima and sums are computed from the logits.
void gpu_cross_entropy(Gpu *gpu, float *losses, Operand logits, Scratch scratch, Scratch max_sums,
                       const int *targets, int M, int V, int P, LossTerms terms);
static inline int64_t loss_scratch_floats(int64_t M) {
    return 2 * M;
}
// Sets *sum to the sum of the losses; with accumulate, adds the sum to *sum.
void gpu_sum_losses(Gpu *gpu, double *sum, const float *losses, int M, bool accumulate);

// ---- adamw.cu ----
// What one optimizer step decides on the device, so that the host need not wait for the norm.
// Between gpu_sum_of_squares and gpu_decide_step the trainer sums loss_sum, norm_squared and stop
// over the ranks, as one array of three numbers (train/gpu/params.c). So these fields must stay
// adjacent and in this order.
typedef struct {
    double loss_sum;      // sum of the step's losses
    double norm_squared;  // norm of the step's gradients, squared
    double stop;          // above 0: the run should end
    double own_loss_sum;  // the loss_sum of this rank alone
    float gradient_scale; // factor of the gradients: clipping, and tokens / targets
    int skipped;          // a SkipReason: SKIP_NONE, or why nothing is updated
    int64_t updates;      // number of AdamW steps so far, including this step unless it is skipped
    SpikeWindow window;   // losses and norms of the previous steps
    // nanoseconds (gpu_stamp): when this rank began the step, and when it had computed its last
    // gradient
    uint64_t began, computed;
} StepState;

// The numbers that a step needs from the host. Kernels read them from device memory, so that a step
// can be captured as a CUDA graph.
typedef struct {
    double lr;
    int64_t step;
    double stop;    // 1: the run should end
    double targets; // number of the step's targets that no mask excludes, over all ranks
    double sigma;   // the value of --skip-spikes
    bool skip;      // --iterations-to-skip names the step
} StepInput;

// A range of the gradients' elements; first and n are multiples of 8. One thread block sums its
// squares.
typedef struct {
    int64_t first, n;
} GradientPart;

// Computes the gradients' norm, and fills in what gpu_decide_step reads: state->norm_squared = the
// sum of squares of parts[count], which is on the device; state->stop = input->stop;
// state->loss_sum = state->own_loss_sum = *loss_sum. scratch: [count].
void gpu_sum_of_squares(Gpu *gpu, StepState *state, const StepInput *input, const double *loss_sum,
                        double *scratch, const void *gradients, GpuType type,
                        const GradientPart *parts, int count);
// Decides by the loss per target and by the gradients' norm whether the step is skipped, and sets
// skipped, updates and window. The backward pass has divided the loss by `tokens`, but the update
// needs the gradients of the loss divided by input->targets. So norm_squared is multiplied by
// (tokens / targets)^2, and gradient_scale is tokens / targets. If clip > 0 and the norm is above
// clip, gradient_scale is also multiplied by clip / norm.
void gpu_decide_step(Gpu *gpu, StepState *state, const StepInput *input, double tokens, float clip);

// A contiguous range of parameters, and where their new weights are written. A segment may be a
// part of a matrix, and may begin anywhere in the matrix.
typedef struct {
    int64_t first, n; // elements of the parameter space, multiples of PARAM_ALIGN
    int64_t gradient; // index of the segment's first gradient in AdamWUpdate.gradients
    // the segment's master weights and moments, on the device or in pinned host memory
    float *master;
    void *exp_avg, *exp_avg_sq; // their type is AdamWUpdate.moment_type
    Bf16 *bf16;                 // the segment's BF16 weights; NULL: the weights are FP8
    uint8_t *fp8;               // the segment's FP8 weights
    int weight;                 // FP8: the segment belongs to this row of AdamWUpdate.weights
    int64_t weight_offset;      // FP8: index in that weight of the segment's first element
    // number of the segment's first thread block, counted over the segments of one launch
    int first_block;
    float lr_mult; // factor of StepInput.lr
    float weight_decay;
    bool muon; // updated by Muon: exp_avg is the momentum, and there is no exp_avg_sq
    Bf16 *exp_avg_scales, *exp_avg_sq_scales; // scales of 8-bit moments, on the device
} AdamWSegment;
int gpu_adamw_blocks(int64_t n); // thread blocks for a segment of n elements

// An FP8 weight [rows,columns], of which a rank may update parts. Its codes are E4M3.
typedef struct {
    int rows, columns;
    float target;    // what amax * scale should be
    Fp8Scale *scale; // NULL with SCALE_BLOCK_128X128
    // only with SCALE_BLOCK_128X128:
    bool power_of_two;
    float *amax;                // the amax of each block of 128 x 128, at the index of its scale
    float *inverse, *inverse_t; // inverse scales of the weight, and of its transpose (fp8_format.h)
} Fp8Weight;

typedef struct {
    GpuType moment_type; // type of AdamW's moments; Muon's momentum has momentum_type()
    void *gradients;     // only gpu_muon_momentum writes them
    GpuType gradient_type;
    const AdamWSegment *segments; // in device memory, as are weights and input
    int segment_count, segment_blocks;
    bool muon;          // some segments are Muon's
    Fp8Weight *weights; // the weights of FP8 segments
    int weight_count;
    Scaling scaling; // how all these weights are scaled
    StepInput *input;
    float beta1, beta2, eps, momentum;
    float floor;   // for 8-bit moments (moment_floor), else 0
    uint64_t seed; // for the stochastic rounding of moments
} AdamWUpdate;

// Muon's momentum has no 8-bit form: Newton-Schulz steps would amplify its rounding.
HOST_DEVICE static inline GpuType momentum_type(GpuType moment_type) {
    return moment_type == TYPE_MOMENT8 ? TYPE_BF16 : moment_type;
}

// FP8 weights are quantised from the master weights rounded to BF16.

// Updates all segments, unless the step is skipped. The gradient buffer already holds the update of
// Muon's segments. With SCALE_DELAYED, gpu_adamw also writes FP8 weights, by their present scales;
// otherwise only gpu_quantize_weights writes FP8 weights. The amaxes of the new weights go to
// Fp8Weight.scale->amax or, with SCALE_BLOCK_128X128, to Fp8Weight.amax.
void gpu_adamw(Gpu *gpu, const AdamWUpdate *update, const StepState *state);
// gpu_measure_weights and gpu_quantize_weights read the master weights. gpu_measure_weights
// measures the amaxes of FP8 weights. gpu_quantize_weights writes the FP8 weights by the scales
// that are computed from these amaxes. After a skipped step neither does anything. state is NULL at
// the start of a run; gpu_quantize_weights then writes the BF16 weights, too.
void gpu_measure_weights(Gpu *gpu, const AdamWUpdate *update, const StepState *state);
void gpu_quantize_weights(Gpu *gpu, const AdamWUpdate *update, const StepState *state);
// Sets the scales of all weights by their amaxes; with SCALE_DELAYED, only the scales that are not
// known yet. After a skipped step nothing is done. state is NULL at the start of a run.
void gpu_set_weight_scales(Gpu *gpu, const AdamWUpdate *update, const StepState *state);

// Updates the scales of delayed scaling. Call it in every optimizer step, after gpu_decide_step. It
// enters the step's amaxes into the history and computes the new scales. If the step is skipped, it
// only sets the amaxes of activations and gradients to 0.
void gpu_fp8_update(Gpu *gpu, const Fp8Table *table, const StepState *state);
// Sets every amax to 0, before a micro-step.
void gpu_fp8_clear_amaxes(Gpu *gpu, const Fp8Table *table);

// Runs muon_momentum (cpu.h) on Muon's segments, unless the step is skipped. The gradients of these
// segments become the input of the Newton-Schulz steps.
void gpu_muon_momentum(Gpu *gpu, const AdamWUpdate *update, const StepState *state);

// Matrices in the gradient buffer, of n elements each; n is a multiple of 8.
typedef struct {
    void *gradients;
    GpuType type;
    // [count] on the device: the index of each matrix's first element, a multiple of 8
    const int64_t *offsets;
    int count;
    int64_t n;
} MuonMatrices;
enum { MUON_PARTS = 128 }; // parts into which the sum of a matrix's squares is cut
// Sets x [count,n] to the matrices, each divided by its Frobenius norm. partials is scratch [count,
// MUON_PARTS].
void gpu_muon_normalize(Gpu *gpu, Bf16 *x, double *partials, MuonMatrices m);
// Copies the matrices of x back into the gradient buffer.
void gpu_muon_store(Gpu *gpu, MuonMatrices m, const Bf16 *x);

void gpu_to_bf16(Gpu *gpu, Bf16 *out, const float *x, int64_t n);

// ---- hash.cu ----
// *nanoseconds = the device's time. This launcher does not call gpu_family.
void gpu_stamp(Gpu *gpu, uint64_t *nanoseconds);
// *sum += the hash of the data (hash_words in base/rng.h). bytes is a multiple of 8; `first` is the
// index that hash_words gives to the data's first 8-byte word.
void gpu_hash(Gpu *gpu, uint64_t *sum, const void *data, int64_t bytes, int64_t first);

END_C
