// Every GPU kernel's launcher. Shapes and meanings are those of cpu.h; activations, weights and
// their gradients are BF16 unless a comment says otherwise, statistics FP32. A launcher enqueues on
// the stream and returns; the caller's buffers must live until the stream gets there. Pointers are
// 16-byte aligned and channel counts (C, F, D, P) multiples of 8.
//
// Sums have one fixed order, so that a repeated call gives the same bits. A kernel that sums over
// rows (weight and bias gradients) leaves partial sums in `scratch` and adds them up in a second
// launch; the scratch is FP32, partial_sums_bytes() of it.
#ifndef LLM8_KERNELS_H
#define LLM8_KERNELS_H

#include "gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// A gradient of weights: FP32 or BF16, overwritten or added to.
typedef struct {
    void *data; // NULL: not wanted
    GpuType type;
    bool accumulate;
} GradientOut;

// Bytes of scratch for a sum over rows into `columns` columns.
size_t partial_sums_bytes(int64_t columns);

// ---- embedding.cu ----
void gpu_embedding_forward(Bf16 *out, const int *tokens, const Bf16 *wte, const Bf16 *wpe, int B,
                           int T, int C, cudaStream_t stream);

// The tokens' gradient adds up each token's rows in the order of `rows`, which lists the positions
// 0..M-1 sorted by token; run i is the rows [starts[i], starts[i+1]), all of one token. runs[0] is
// how many there are, runs[1] how many of them are long; those follow. (On the device, so that the
// launch does not depend on it.) Only adds.
enum { EMBEDDING_LONG_RUN = 32 }; // rows at least
static inline int embedding_runs_size(int M) {
    return 2 + M / EMBEDDING_LONG_RUN;
}
void gpu_embedding_backward(GradientOut dwte, const Bf16 *dout, const int *tokens, const int *rows,
                            const int *starts, const int *runs, int M, int C, cudaStream_t stream);
void gpu_position_backward(GradientOut dwpe, const Bf16 *dout, int B, int T, int C,
                           cudaStream_t stream);
// The host's part of it, in batches.c: rows[M], starts[M+1], runs[embedding_runs_size(M)] from
// tokens[M]; counts is scratch [V+1].
void embedding_sort_tokens(const int *tokens, int M, int V, int *counts, int *rows, int *starts,
                           int *runs);

// An `amax`, unless NULL, is where a kernel leaves the largest magnitude of what it writes, if that
// is larger than what is there; NaN is larger than all.

// ---- norm.cu ----
typedef struct {
    Bf16 *out; // NULL: the statistics alone
    float *mean, *rstd, *amax;
    const Bf16 *x, *weight, *bias; // bias NULL: RMSNorm, and mean is not used
    float eps;
    int M, C;
} NormForward;
void gpu_norm_forward(NormForward n, cudaStream_t stream);

// d_residual (in place) += the norm's input gradient. column_sums, when wanted, are those of the
// new d_residual: the bias gradient of the linear layer that wrote x.
typedef struct {
    Bf16 *d_residual;
    GradientOut dweight, dbias, column_sums;
    const Bf16 *dout, *x, *weight;
    const float *mean, *rstd; // mean NULL: RMSNorm
    float *scratch, *amax;    // of the new d_residual
    int M, C;
} NormBackward;
void gpu_norm_backward(NormBackward n, cudaStream_t stream);

// ---- activation.cu ----
void gpu_gelu_forward(Bf16 *out, float *amax, const Bf16 *x, int64_t n, cudaStream_t stream);
// dx = dout gelu'(x), and its column sums; x, dout, dx: [M,F]. dx may be dout.
typedef struct {
    Bf16 *dx;
    float *amax;
    GradientOut column_sums;
    const Bf16 *dout, *x;
    float *scratch;
    int M, F;
} GeluBackward;
void gpu_gelu_backward(GeluBackward g, cudaStream_t stream);
void gpu_swiglu_forward(Bf16 *out, float *amax, const Bf16 *x, int M, int F, cudaStream_t stream);
// dx may be x.
void gpu_swiglu_backward(Bf16 *dx, float *amax, const Bf16 *dout, const Bf16 *x, int M, int F,
                         cudaStream_t stream);
void gpu_column_sums(GradientOut sums, const Bf16 *x, float *scratch, int M, int N,
                     cudaStream_t stream);

// ---- rope.cu ----
void gpu_rope_apply(Bf16 *qkv, const float *table, int B, int T, int H, int G, int D, bool inverse,
                    cudaStream_t stream);

// ---- loss.cu ----
void gpu_cross_entropy(float *losses, Bf16 *logits, const int *targets, int M, int V, int P,
                       float gradient_scale, cudaStream_t stream);
// The losses and, unless NULL, each row's log-sum-exp; the logits stay.
void gpu_cross_entropy_forward(float *losses, float *lse, const Bf16 *logits, const int *targets,
                               int M, int V, int P, cudaStream_t stream);
// *sum (+)= the losses' sum
void gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate, cudaStream_t stream);

// ---- adamw.cu ----
// What one optimizer step decides on the device, so that the host need not wait for the norm.
typedef struct {
    double loss;          // the sum of the step's losses
    double norm_squared;  // of the gradients
    double stop;          // several ranks: how many are asked to end
    double own_loss;      // several ranks: the sum of this one's losses
    float gradient_scale; // clipping
    int skipped;          // 1: loss or norm is not finite, nothing is updated
    int64_t updates;      // AdamW steps made, this one included unless skipped
    int64_t skips;        // steps skipped so far
    int unmeasured;       // FP8 slots in use that have no history yet
} StepState;

// What a step needs from the host; sent along, so that a step can be a captured graph.
typedef struct {
    double lr;
    int64_t step;
    int renew_scale; // delayed FP8 scaling: whether this step renews the scales (--fp8-interval)
    double stop;     // several ranks: 1 where this one is asked to end
} StepInput;

// Elements of the gradients, multiples of PARAM_ALIGN; a block's work.
typedef struct {
    int64_t first, n;
} GradientPart;

// state->norm_squared = the sum of squares of the parts, a table on the device of `count` rows.
// scratch[count]
void gpu_sum_of_squares(StepState *state, double *scratch, const void *gradients, GpuType type,
                        const GradientPart *parts, int count, cudaStream_t stream);
// Reads loss and norm_squared; sets gradient_scale, skipped, updates, skips. tokens divides the
// loss.
void gpu_decide_step(StepState *state, double tokens, float clip, cudaStream_t stream);

// Parameters that lie together, and where their new weights go.
typedef struct {
    int64_t first, n; // elements of the parameter space, multiples of PARAM_ALIGN
    int64_t gradient; // where their gradients begin
    int64_t state;    // where their master weights and moments do
    Bf16 *weights;    // the BF16 copy, rounded to nearest; NULL: they are part of an FP8 weight
    int weight;       // which one: a row of Fp8Weights
    int first_block;  // of all segments' blocks, counted together
} AdamWSegment;

typedef struct {
    float *master;
    void *exp_avg, *exp_avg_sq; // moment_type
    GpuType moment_type;
    const void *gradients;
    GpuType gradient_type;
    const uint8_t *decay;         // a flag for each PARAM_ALIGN elements of the parameter space
    const AdamWSegment *segments; // on the device: what gpu_adamw_update is about
    int segment_count, segment_blocks;
    const StepInput *input; // on the device
    float beta1, beta2, eps, weight_decay;
    uint64_t seed; // of the stochastic rounding of BF16 moments
} AdamWUpdate;
int gpu_adamw_blocks(int64_t n); // of a segment
// Segments with BF16 copies, of arrays that are all the parameter space.
void gpu_adamw_update(const AdamWUpdate *update, const StepState *state, cudaStream_t stream);

void gpu_to_bf16(Bf16 *out, const float *x, int64_t n, cudaStream_t stream);
void gpu_to_float(float *out, const void *x, GpuType type, int64_t n, cudaStream_t stream);

// ---- attention_plain.cu ----
void attention_plain_forward(Bf16 *out, float *lse, const Bf16 *qkv, int B, int T, int H, int G,
                             int D, cudaStream_t stream);
void attention_plain_backward(Bf16 *d_qkv, const Bf16 *d_out, const Bf16 *out, const float *lse,
                              const Bf16 *qkv, int B, int T, int H, int G, int D,
                              cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
