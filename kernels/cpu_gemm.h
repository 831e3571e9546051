// The FP32 matrix product of the CPU trainer.
//
// Row-major C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] (+ bias[n]) (+ addend[m,n]).
// The result does not depend on the number of threads: every element of C is summed in the same
// order whichever thread owns its tile.
#ifndef LLM8_CPU_GEMM_H
#define LLM8_CPU_GEMM_H

#include <stdbool.h>
#include <stddef.h>

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
const char *cpu_gemm_name(void); // which implementation was built, for the start-up lines

#endif
