// The linear layers on the GPU, resolved at the start of a run: what their three products read and
// write, in the precision that the policy (model/precision.h) gives each layer. After that nothing
// is looked up, and nothing but these structs says which precision a layer has.
#pragma once

#include "params.h"

BEGIN_C

// A linear layer Y[M,N] = X[M,C] W' (+ bias).
typedef struct {
    const LinearPrecision *precision;
    int N, C;
    Operand weight; // [N,C]; bf16 NULL where products read FP8 alone; fp8 NULL: the layer is BF16
    Bf16 *bias;     // [N] or NULL
    Gradient dweight, dbias;
    Fp8Tensor x, w, dy;               // all zero where the layer is BF16
    bool wgrad_fp8;                   // the weight gradient's operands are FP8 too
    bool fast_forward, fast_backward; // FP8 partial sums stay in the tensor cores
    GpuFamily family;

    // The input as the weight gradient reads it: bf16, or fp8_t; kept from the forward pass.
    Operand input;
    // It is not kept, but computed again before the backward pass; with it, its forward product.
    bool recomputed, product_recomputed;
    // Scratch: the forms of the input that are not kept, and of the output's gradient.
    Operand input_scratch, gradient;
} LinearLayer;

// Points the layer to its parameters, and plans its transposed FP8 weight (and its FP8 weight,
// where it is made here from BF16).
void linear_plan(LinearLayer *l, const Params *p, const LinearPrecision *lp, Plan *plan);
// Once the plan has its memory.
void linear_start(LinearLayer *l, const Params *p);
// How operands get their scales, as params.h says it now: after the start and whenever measuring or
// counting changes.
void linear_set_scaling(LinearLayer *l, const Params *p);

// The forms of the input that a pass asks its producer for, and how they are quantised.
Operand linear_input(const LinearLayer *l, Pass pass);
Fp8Tensor linear_x(const LinearLayer *l, Pass pass);

// The FP8 weight from what has been received: transposed codes, or both forms from BF16.
void linear_receive(Gpu *gpu, const LinearLayer *l);

// The product x W', and that of the input's gradient, dy W with dy in l->gradient.
Gemm linear_product(const LinearLayer *l, Bf16 *y, Operand x, int M, Pass pass);
Gemm linear_input_gradient(const LinearLayer *l, Bf16 *dx, int M);

// y [M,N] = x W' (+ bias) (+ addend [M,N])
void linear_forward(Gpu *gpu, const LinearLayer *l, Bf16 *y, Operand x, const Bf16 *addend, int M,
                    Pass pass);

// dW (+)= dy' x
void linear_weight_gradient(Gpu *gpu, const LinearLayer *l, Operand x, int M, bool accumulate);

// dx [M,C] = dy W, and the weight gradient. gelu_input [M,C], unless NULL: x came out
// of a GELU, and dx becomes the gradient of its input.
void linear_backward(Gpu *gpu, const LinearLayer *l, Bf16 *dx, Operand x, Bf16 *gelu_input, int M,
                     bool accumulate);

// Where a gradient is written: over the old one, or added to it.
static inline Gradient gradient_into(Gradient g, bool accumulate) {
    g.accumulate = accumulate;
    return g;
}

END_C
