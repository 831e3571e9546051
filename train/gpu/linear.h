// The linear layers on the GPU, resolved at the start of a run: what their three products read and
// write, in the precision that the policy (model/precision.h) gives each layer. After that nothing
// is looked up, and only these structs say which precision a layer has.
#pragma once

#include "params.h"

BEGIN_C

// A linear layer Y[M,N] = X[M,C] W' (+ bias). w.fp8 NULL: the layer is BF16.
typedef struct {
    const LinearPrecision *precision;
    int N, C;
    // x keeps bf16, or fp8_t and scales_t, from the forward pass for the weight gradient. The other
    // forms of x, and all forms of dy, are scratch. w.bf16 NULL: products read FP8 alone.
    Tensor x, w, dy;
    Bf16 *bias; // [N] or NULL
    Gradient dweight, dbias;
    bool wgrad_fp8;                   // the weight gradient's operands are in FP8 too
    bool fast_forward, fast_backward; // FP8 products keep partial sums in the tensor cores
    GpuFamily family;
    const Fp8Scaling *scaling;
    Fp8Counts *counts; // [OPERAND_COUNT], on the device; NULL: codes are never counted
    // The input is not kept, but recomputed before the backward pass; so is the forward product.
    bool recomputed, product_recomputed;
} LinearLayer;

// The activation between fc1 and fc2. Where both layers are in BF16, fc2's input-gradient product
// applies GELU's derivative. Where both are in FP8, their products may apply GELU and its
// derivative, and fc1's may apply SwiGLU, in training passes whose scales are given. Where a layer
// is in FP8, GELU adds fc1's bias: cuBLASLt's epilogue that adds it slows a wide FP8 product by a
// quarter.
typedef struct {
    const LinearLayer *fc1, *fc2;
    bool gated; // SwiGLU, else GELU
    Bf16 *in;   // [M,F] fc1's output, of SwiGLU [M,2F]
    Bf16 *bias; // [F] which GELU adds; NULL: fc1's product adds it, or there is none
    bool derivative_in_product, in_fp8_products;
    Scratch scratch; // partial sums
} Activation;

// Sets up the layer, and plans its transposed FP8 weight, and also its FP8 weight where ranks make
// it from BF16.
void linear_plan(LinearLayer *l, const Params *p, const LinearPrecision *lp, Plan *plan);
// Once the plan has its memory.
void linear_start(LinearLayer *l, const Params *p);

// The input in the forms that a pass requests from its producer.
Tensor linear_input(const LinearLayer *l, Pass pass);

// Makes what products read from the weight that has been received: the transposed codes, or both
// FP8 forms from BF16.
void linear_receive(Gpu *gpu, const LinearLayer *l);

// y [M,N] = x W' (+ bias) (+ addend [M,N])
void linear_forward(Gpu *gpu, const LinearLayer *l, Bf16 *y, Tensor x, const Bf16 *addend, int M,
                    Pass pass);

// The same of the head in a training pass, into dy.bf16, whose first V columns are the vocabulary.
// The product also leaves what the loss needs of each row (gpu_product_max_sums).
void linear_logits(Gpu *gpu, const LinearLayer *l, Tensor x, Scratch max_sums, int V, int M);

// The same of queries, keys and values in a pass of training, without a bias. The product rotates
// queries and keys too (gpu_product_rope).
void linear_rotary(Gpu *gpu, const LinearLayer *l, Bf16 *y, Tensor x, Rotary r, Pass pass);

// dx [M,C] = dy W, and dW (+)= dy' x, where dy is the layer's.
void linear_backward(Gpu *gpu, const LinearLayer *l, Bf16 *dx, Tensor x, int M, bool accumulate);

// From a->in to the activation's output, as fc2 reads it.
Tensor activation_forward(Gpu *gpu, const Activation *a, int M, Pass pass);
// fc1's forward product and the activation.
Tensor linear_activation(Gpu *gpu, const Activation *a, Tensor x, int M, Pass pass);
// fc2's backward pass and the activation's, to fc1's dy. d_activated: [M,F] scratch.
void linear_activation_backward(Gpu *gpu, const Activation *a, Bf16 *d_activated, int M,
                                bool accumulate);

// A gradient that is overwritten, or added to.
static inline Gradient gradient_into(Gradient g, bool accumulate) {
    g.accumulate = accumulate;
    return g;
}

static const Gradient no_sums = {NULL, TYPE_F32, false};

END_C
