// The stand-ins for kernels compute in floats, by kernels/cpu.c: how those come from the device's
// buffers, and go back into them.
#ifndef LLM8_STANDIN_VALUES_H
#define LLM8_STANDIN_VALUES_H

#include "../../kernels/fp8.h"

// n values as floats, for the caller to free; NULL for NULL.
float *values_read(const void *x, GpuType type, int64_t n);
// Rounds them into out.
void values_write(void *out, GpuType type, const float *values, int64_t n);
// The same, and gives them back as they will be read.
void values_round(void *out, GpuType type, float *values, int64_t n);

// What a gradient's sums are added to: its values, or zeros. gradient_end writes them, unless the
// gradient is not wanted, and frees them.
float *gradient_begin(GradientOut out, int64_t n);
void gradient_end(GradientOut out, float *values, int64_t n);

// *amax = max(*amax, |x|), NaN being the largest; amax may be NULL.
void values_amax(float *amax, const float *x, int64_t n);

// x [M,N] to FP8, as kernels/quantize.cuh does. measured: by live->amax, unless the slot has a
// history; else by live->scale.
void values_to_fp8(Fp8Out out, bool measured, const float *x, int M, int N);

#endif
