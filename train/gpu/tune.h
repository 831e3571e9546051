// Which of cuBLASLt's algorithms each product takes (--gemm-autotune): rank 0 times them in
// micro-steps between tune_begin and tune_end, unless an earlier run has, and all ranks take its
// choice, so that they, and a resumed run, compute the same. Kept in --save DIR/gemm_choices.txt.
#ifndef LLM8_TUNE_H
#define LLM8_TUNE_H

#include "../../kernels/gpu.h"
#include "../run.h"

#ifdef __cplusplus
extern "C" {
#endif

void tune_begin(Gpu *gpu, const Run *run);
void tune_end(Gpu *gpu, const Run *run);

#ifdef __cplusplus
}
#endif

#endif
