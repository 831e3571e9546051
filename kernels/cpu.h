// The FP32 definition of every operation, forward and backward. train_gpt.c calls these functions,
// and every GPU kernel is tested against them.
//
// Shapes: B sequences of T tokens, M = B * T tokens, C channels, H query heads and G key/value
// heads of size D, N = (H + 2G) * D the row of a packed query-key-value, F the feed-forward width,
// V the vocabulary. Everything is row-major. The gradient of a tensor x is named dx. Results do not
// depend on the number of threads.
#pragma once

#include "fp8_format.h"
#include "loss_terms.h"
#include "moments.h"
#include "rope.h"

#include <stdbool.h>
#include <stdint.h>

BEGIN_C

// Row-major C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] (+ bias[n]) (+ addend[m,n]).
typedef struct {
    int m, n, k;
    const float *a;      // [m,k], or [k,m] when trans_a
    const float *b;      // [k,n], or [n,k] when trans_b
    float *c;            // [m,n]
    const float *bias;   // [n], or NULL
    const float *addend; // [m,n], or NULL; may be c
    bool trans_a, trans_b;
    float alpha;
} CpuGemm;

void cpu_gemm(CpuGemm g);

// Some functions take starts [B,T]: where in its sequence each token's document begins. NULL: each
// sequence is one document.

// out[M,C] = wte[token] (+ wpe[position], when wpe is not NULL); positions count from the
// document's start.
void embedding_forward(float *out, const int *tokens, const int *starts, const float *wte,
                       const float *wpe, int B, int T, int C);
// Adds to dwte and, if dwpe is not NULL, to dwpe.
void embedding_backward(float *dwte, float *dwpe, const float *dout, const int *tokens,
                        const int *starts, int B, int T, int C);

// LayerNorm (Ba, Kiros and Hinton, "Layer Normalization", 2016). If bias or dbias is NULL, RMSNorm,
// which uses no mean (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). mean and
// rstd [M] are kept for the backward pass.
void cpu_norm_forward(float *out, float *mean, float *rstd, const float *x, const float *weight,
                      const float *bias, int M, int C, float eps);
// Adds to dx, dweight and dbias.
void cpu_norm_backward(float *dx, float *dweight, float *dbias, const float *dout, const float *x,
                       const float *weight, const float *mean, const float *rstd, int M, int C);

// QK norm (Henry et al., "Query-Key Normalization for Transformers", 2020, in Qwen3's form): out
// [M,N] = qkv, with each head of the queries and keys normalised by RMSNorm. One weight [D] is for
// all query heads, the other for all key heads. rstd [M,H+G] is kept for the backward pass.
void qk_norm_forward(float *out, float *rstd, const float *qkv, const float *query_weight,
                     const float *key_weight, int M, int H, int G, int D, float eps);
// Replaces the gradient of out in dqkv [M,N] by the gradient of qkv. Adds to dquery_weight and
// dkey_weight.
void qk_norm_backward(float *dqkv, float *dquery_weight, float *dkey_weight, const float *qkv,
                      const float *query_weight, const float *key_weight, const float *rstd, int M,
                      int H, int G, int D);

// Rotates queries and keys of qkv [M,N] in place by the angles of rope_table, in Hugging Face's
// order: element i of a head is paired with i + D/2. With `inverse` the rotation is reversed, which
// turns the output's gradient into the input's.
void rope_apply(float *qkv, const float *table, int B, int T, int H, int G, int D, bool inverse);

// Causal attention inside documents, with grouped keys and values, softmax(QK'/sqrt(D))V.
// out is [M,H*D]. lse [B,H,T], the log of each row's sum of exponentials, is for the backward pass.
void attention_forward(float *out, float *lse, const float *qkv, const int *starts, int B, int T,
                       int H, int G, int D);
// Overwrites dqkv [M,N].
void attention_backward(float *dqkv, const float *dout, const float *out, const float *lse,
                        const float *qkv, const int *starts, int B, int T, int H, int G, int D);

// Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), the tanh form. n elements.
void gelu_forward(float *out, const float *x, int64_t n);
void gelu_backward(float *dx, const float *dout, const float *x, int64_t n); // overwrites dx

// Shazeer, "GLU Variants Improve Transformer" (2020): out[M,F] = silu(gate) * up, where x [M,2F]
// holds the gate's F columns, then the up-projection's.
void swiglu_forward(float *out, const float *x, int M, int F);
void swiglu_backward(float *dx, const float *dout, const float *x, int M, int F); // overwrites dx

// Softmax cross-entropy over the first V of each row's P columns. losses[M]; a row whose target is
// negative is left out, with loss 0. With terms.gradient_scale > 0 the logits become the gradient
// of the loss that training minimises (loss_terms.h). The gradient is 0 in rows that are left out
// and in columns from V on. Elsewhere, with y the capped logit, the gradient is
//   ((1 + 2 z_loss lse) softmax - onehot) * gradient_scale * (1 - (y / softcap)^2)
void cross_entropy(float *losses, float *logits, const int *targets, int M, int V, int P,
                   LossTerms terms);

// dbias[N] += the column sums of dout [M,N]
void bias_backward(float *dbias, const float *dout, int M, int N);

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float gradient_scale; // factor of every gradient, for clipping
    float floor;          // v is at least floor m^2 before the update (moments.h)
    int64_t step;         // from 1, for the bias correction
} AdamW;

// Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
void adamw_update(float *weights, float *m, float *v, const float *gradients, int64_t n, AdamW a);

// How stored moments are rounded: stochastically, with random bits from `key` and from an element's
// index in the parameter space. first: this index of the array's first element.
typedef struct {
    int64_t first;
    uint32_t key;
} MomentRounding;

// Returns the key of an optimizer step. Each BF16 moment has its own key; 8-bit moments share the
// key of the first moment.
uint32_t moment_key(uint64_t seed, int64_t step, Moment which);
// Encodes a moment (moments.h) to codes [n] and scales [ceil(n / MOMENT_BLOCK)]. Codes of m are in
// two's complement. If rounding is NULL, each value is rounded to the nearest code.
void moment_encode(uint8_t *codes, uint16_t *scales, Moment which, const float *x, int64_t n,
                   const MomentRounding *rounding);
// Decodes codes [n] to the moment x. The first code is element `skip` of its block.
void moment_decode(float *x, Moment which, const uint8_t *codes, const uint16_t *scales, int skip,
                   int64_t n);
// Replaces x by what is read back after x is stored in 8 bits, or in BF16.
void moment_round(float *x, Moment which, int64_t n, MomentRounding rounding);
void moment_round_bf16(float *x, int64_t n, MomentRounding rounding);

// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), with the
// scale and the weight decay of Liu et al., "Muon is Scalable for LLM Training" (2025), equations 1
// and 4, in three parts.

// m = momentum m + g, gradients = g + momentum m (Nesterov's look-ahead), for the scaled gradient g
void muon_momentum(float *gradients, float *m, int64_t n, float momentum, float gradient_scale);

// x [rows,columns], with the singular value decomposition x = U Z V', becomes scale U S V'. Five
// Newton-Schulz steps by MUON_A, _B and _C bring the singular values S near 1: a singular value of
// at least 0.0015 of x's Frobenius norm becomes a value between 0.68 and 1.21. scratch:
// [muon_scratch(rows, columns)]
#define MUON_A 3.4445f
#define MUON_B (-4.7750f)
#define MUON_C 2.0315f
enum { MUON_STEPS = 5 };
#define MUON_EPSILON 1e-7f // added to the Frobenius norm by which x is divided
void muon_orthogonalize(float *x, int rows, int columns, float scale, float *scratch);
static inline int64_t muon_scratch(int rows, int columns) {
    int64_t side = rows < columns ? rows : columns;
    return (int64_t)rows * columns + 2 * side * side;
}
// Returns the scale that gives an update of any shape the root mean square `factor`. (The root mean
// square of AdamW's updates does not depend on the shape either.)
float muon_scale(float factor, int rows, int columns);

// weights -= lr (update + weight_decay weights)
void muon_update(float *weights, const float *update, int64_t n, float lr, float weight_decay);

double sum_of_squares(const float *x, int64_t n);

// Returns the largest |x|. NaN counts as larger than infinity.
float tensor_amax(const float *x, int64_t n);

// out = the FP8 value nearest to x * scale, saturated. out is not divided by scale.
void round_to_fp8(float *out, const float *x, int64_t n, float scale, Fp8Type type);
// Adds the counts of the codes of x * scale to *counts.
void count_fp8(Fp8Counts *counts, const float *x, int64_t n, float scale, Fp8Type type);

// A tensor [rows,columns] in blocks of height x width. Height and width are 1 or FP8_BLOCK; blocks
// at the edges are smaller.
typedef struct {
    int rows, columns, height, width;
    Fp8Type type;
    bool power_of_two; // scales are powers of two
    // `codes` and `factors` are outputs for blocks of 128 x 128 whose scales are not powers of two;
    // for other blocks both are NULL. The factors [ceil(rows/128),ceil(columns/128)] turn codes
    // back into values. A factor is computed as amax / (the format's largest value), not as the
    // inverse of the scale, so that encoding the decoded values gives the same codes and factors.
    uint8_t *codes;
    float *factors;
} Fp8Blocks;

// out = the FP8 value nearest to x times the scale of its block, divided by that scale again; out
// may be x. If counts is not NULL, adds the counts of the codes to *counts.
void round_blocks_to_fp8(float *out, const float *x, Fp8Blocks blocks, Fp8Counts *counts);

void round_to_bf16(float *out, const float *x, int64_t n);

END_C
