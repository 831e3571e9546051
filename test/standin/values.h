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

// The scale of a tensor whose range live->amax is: the slot's, where that has a history. Announced,
// it is what products go by, and the range goes towards the history.
float values_measured_scale(Fp8Out out);
void values_announce_scale(Fp8Out out);

// n values to the codes out->rows, by this scale, and what they lose to the counts.
void values_encode(Fp8Out out, float scale, const float *x, int64_t n);
// From rows [M,N] to columns.
void values_transpose(Fp8Out out, int M, int N);
// x [M,N] to FP8, as kernels/quantize.cuh does. measured: by the measured scale, which is
// announced; else by live->scale, and the range goes to the slot.
void values_to_fp8(Fp8Out out, bool measured, const float *x, int M, int N);

#endif
