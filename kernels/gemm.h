// Matmuls through cuBLASLt.
//
// Row-major D[m,n] = alpha * op(A)[m,k] * op(B)[k,n] (+ beta * C), where op transposes if trans_a
// or trans_b is set. FP8 operands must both have k contiguous: trans_a is false and trans_b is true
// (Hopper's tensor cores take no other layout). Their codes are multiplied by scale_a and scale_b;
// scaling_a and scaling_b say which layout these scales have (fp8_format.h). Either both operands
// have scales of blocks or neither; at most one is SCALE_BLOCK_128X128. Every address is a multiple
// of 16 bytes.
//
// The plan (layouts, and cuBLASLt's first choice of an algorithm) of each shape is made once. A
// resumed run, which makes the same plans, computes the same bits.
#pragma once

#include "fp8_format.h"
#include "gpu.h"

BEGIN_C

// Bytes of gpu->workspace. The Makefile sets fewer for tests without a GPU: their matmuls do not
// use the workspace, but each step fills it with NaN.
#ifndef GEMM_WORKSPACE_BYTES
#define GEMM_WORKSPACE_BYTES ((size_t)64 << 20)
#endif

typedef enum {
    EPILOGUE_NONE,
    EPILOGUE_BIAS, // + bias[n]
    EPILOGUE_DGELU // D = A B * gelu'(aux[m,n])
} GemmEpilogue;

static inline GpuType gpu_fp8_type(Fp8Type type) {
    return type == FP8_E4M3 ? TYPE_E4M3 : TYPE_E5M2;
}

typedef struct {
    int m, n, k;
    int batch; // how many matmuls of this shape, whose operands lie one after another; 0: one
    const void *a, *b;
    const void *c; // added with factor beta: D itself, or another buffer of D's shape
    void *d;
    GpuType type_a, type_b, type_d; // C has D's type
    bool trans_a, trans_b;
    float alpha, beta;
    GemmEpilogue epilogue;
    void *bias, *aux; // BF16
    // on the device: the inverse scales, by which the codes of FP8 operands are multiplied
    const float *scale_a, *scale_b;
    Scaling scaling_a, scaling_b;
    bool fast_accumulation; // FP8 with one scale a tensor: keep partial sums in the tensor cores
    GpuFamily family;       // FAMILY_MATMULS unless it is set
} Gemm;

// Returns a matmul of BF16 into BF16, without transposition, addition or epilogue.
Gemm gemm_plain(int m, int n, int k, const Bf16 *a, const Bf16 *b, void *d);

void gemm(Gpu *gpu, Gemm g);

// Ends the program if the output `to`, of `bytes` bytes, overlaps A, B or aux, which are still read
// while the output is written. gemm() checks D; kernels with more outputs check those, too.
void gemm_check_apart(const Gemm *g, const char *name, const void *to, int64_t bytes);

// Returns whether cuBLASLt has an algorithm for the matmul; if not, error_text() is the reason.
bool gemm_supported(Gpu *gpu, Gemm g);

// Frees all plans.
void gemm_close(Gpu *gpu);

END_C
