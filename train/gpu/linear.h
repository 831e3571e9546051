// The linear layers on the GPU, resolved at the start of a run: what their three products read and
// write, in the precision that the policy (model/precision.h) gives each layer. After that nothing
// is looked up, and nothing but these structs says which precision a layer has.
#pragma once

#include "params.h"

BEGIN_C

// A linear layer Y[M,N] = X[M,C] W' (+ bias). w.fp8 NULL: the layer is BF16.
typedef struct {
    const LinearPrecision *precision;
    int N, C;
    // x: bf16, or fp8_t and scales_t, are kept from the forward pass, as the weight gradient reads
    // them; the other forms, and dy's, are scratch. w.bf16 NULL: products read FP8 alone.
    Tensor x, w, dy;
    Bf16 *bias; // [N] or NULL
    Gradient dweight, dbias;
    bool wgrad_fp8;                   // the weight gradient's operands are FP8 too
    bool fast_forward, fast_backward; // FP8 partial sums stay in the tensor cores
    GpuFamily family;
    const Fp8Scaling *scaling;
    Fp8Counts *counts; // [OPERAND_COUNT], on the device; NULL: codes are never counted
    // The input is not kept, but computed again before the backward pass; with it, its forward
    // product.
    bool recomputed, product_recomputed;
} LinearLayer;

// What stands between fc1 and fc2. GELU's derivative may be applied by the product that makes its
// output's gradient, where both layers are BF16; where both are FP8, GELU and its derivative by
// their products, in training passes while scales are given. Otherwise GELU adds fc1's bias:
// cuBLASLt's epilogue that adds it slows a wide FP8 product by a quarter.
typedef struct {
    const LinearLayer *fc1, *fc2;
    bool gated; // SwiGLU, else GELU
    Bf16 *in;   // [M,F] fc1's output, of SwiGLU [M,2F]
    Bf16 *bias; // [F] that GELU adds; NULL: fc1's product adds it, or there is none
    bool derivative_in_product, in_fp8_products;
    Scratch scratch; // partial sums
} Activation;

// Points the layer to its parameters, and plans its transposed FP8 weight (and its FP8 weight,
// where it is made here from BF16).
void linear_plan(LinearLayer *l, const Params *p, const LinearPrecision *lp, Plan *plan);
// Once the plan has its memory.
void linear_start(LinearLayer *l, const Params *p);

// The forms of the input that a pass asks its producer for.
Tensor linear_input(const LinearLayer *l, Pass pass);

// The FP8 weight from what has been received: transposed codes, or both forms from BF16.
void linear_receive(Gpu *gpu, const LinearLayer *l);

// y [M,N] = x W' (+ bias) (+ addend [M,N])
void linear_forward(Gpu *gpu, const LinearLayer *l, Bf16 *y, Tensor x, const Bf16 *addend, int M,
                    Pass pass);

// dx [M,C] = dy W, and dW (+)= dy' x, by the layer's dy.
void linear_backward(Gpu *gpu, const LinearLayer *l, Bf16 *dx, Tensor x, int M, bool accumulate);

// From a->in to the activation's output, as fc2 reads it.
Tensor activation_forward(Gpu *gpu, const Activation *a, int M, Pass pass);
// fc1's forward product and the activation.
Tensor linear_activation(Gpu *gpu, const Activation *a, Tensor x, int M, Pass pass);
// fc2's backward pass and the activation's, to fc1's dy. d_activated: [M,F] scratch.
void linear_activation_backward(Gpu *gpu, const Activation *a, Bf16 *d_activated, int M,
                                bool accumulate);

// Where a gradient is written: over the old one, or added to it.
static inline Gradient gradient_into(Gradient g, bool accumulate) {
    g.accumulate = accumulate;
    return g;
}

static const Gradient no_sums = {NULL, TYPE_F32, false};

END_C
