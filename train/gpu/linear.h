// The linear layers on the GPU: what their three matmuls read and write, in the precision that
// model/precision.h has decided for each layer. The decision is read only at the start of a run;
// later code knows a layer's precision from these structs.
#pragma once

#include "params.h"

BEGIN_C

// A linear layer Y[M,N] = X[M,C] W' (+ bias). w.rows.codes NULL: the layer is BF16.
typedef struct {
    const LinearPrecision *precision;
    int N, C;
    // One form of x is kept from the forward pass, because the weight gradient reads it: x.columns
    // (FP8) or x.bf16. The other forms of x, and all forms of dy, are scratch. w.bf16 NULL: the
    // weight exists only in FP8.
    Operand x, w, dy;
    Bf16 *bias;     // [N] or NULL
    bool adds_bias; // the forward matmul adds the bias
    Gradient dweight, dbias;
    bool wgrad_fp8; // the weight gradient's operands are in FP8 too
    // fast accumulation (gemm.h) in the FP8 matmuls of the forward and of the backward pass
    bool fast_forward, fast_backward;
    GpuFamily family;
    // [OPERAND_COUNT], on the device: counts of FP8 codes, from the steps in which *counting is
    // true. NULL: codes are never counted.
    Fp8Counts *counts;
    const bool *counting;
    bool recomputed;        // the input is not kept, but recomputed before the backward pass
    bool matmul_recomputed; // the layer's forward matmul is recomputed too
} LinearLayer;

// Sets up the layer. For an FP8 layer, plans the buffer of the transposed FP8 weight. If every rank
// makes the FP8 weight from the BF16 weight, also plans the FP8 weight's buffer.
void linear_plan(LinearLayer *l, const Params *p, const LinearPrecision *lp, Plan *plan);
// Call it after the plan has its memory.
void linear_start(LinearLayer *l, const Params *p);

// Whether a pass computes the layer's matmul. A result that was kept is not computed again.
static inline bool linear_runs(const LinearLayer *l, Pass pass) {
    return pass != PASS_RECOMPUTE || l->matmul_recomputed;
}

// Returns the layer's input as an operand that has only the forms that a kernel must write in this
// pass.
Operand linear_input(const LinearLayer *l, Pass pass);

// Makes the forms of the received weight that matmuls read: from FP8 codes, the transposed codes;
// from a BF16 weight of an FP8 layer, the codes and the transposed codes.
void linear_receive(Gpu *gpu, const LinearLayer *l);

// Returns the forward matmul y [M,N] = x W', which gemm() or one of our own matmuls (kernels.h)
// is to compute. Also counts the codes of x.
Gemm linear_matmul(Gpu *gpu, const LinearLayer *l, Bf16 *y, const Operand *x, int M, Pass pass);
// y [M,N] = x W' (+ bias) (+ addend [M,N]), if the pass computes this matmul (linear_runs).
void linear_forward(Gpu *gpu, const LinearLayer *l, Bf16 *y, Operand x, const Bf16 *addend, int M,
                    Pass pass);

// These functions read dy from l->dy. linear_input_gradient returns the matmul dx [M,C] = dy W,
// which the caller runs. linear_weight_gradient computes dW (+)= dy' x. linear_backward computes
// dx and dW.
Gemm linear_input_gradient(const LinearLayer *l, Bf16 *dx, int M);
void linear_weight_gradient(Gpu *gpu, const LinearLayer *l, Operand x, int M, bool accumulate);
void linear_backward(Gpu *gpu, const LinearLayer *l, Bf16 *dx, Operand x, int M, bool accumulate);

// Returns g with `accumulate`, which tells a kernel to add to the gradient and not to overwrite it.
static inline Gradient gradient_into(Gradient g, bool accumulate) {
    g.accumulate = accumulate;
    return g;
}

static const Gradient no_sums = {NULL, TYPE_F32, false};

END_C
