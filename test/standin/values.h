// The stand-ins for kernels compute in floats, by kernels/cpu.c: how those come from the device's
// buffers, and go back into them.
#ifndef LLM8_STANDIN_VALUES_H
#define LLM8_STANDIN_VALUES_H

#include "../../kernels/kernels.h"

// n values as floats, for the caller to free; NULL for NULL.
float *values_read(const void *x, GpuType type, int64_t n);
// Rounds them into out.
void values_write(void *out, GpuType type, const float *values, int64_t n);
// The same, and gives them back as they will be read.
void values_round(void *out, GpuType type, float *values, int64_t n);

// What a gradient's sums are added to: its values, or zeros. gradient_end writes them, unless the
// gradient is not requested, and frees them.
float *gradient_begin(Gradient out, int64_t n);
void gradient_end(Gradient out, float *values, int64_t n);

// *amax = max(*amax, |x|), NaN being the largest; amax may be NULL.
void values_amax(float *amax, const float *x, int64_t n);

// The scale of a tensor whose amax is live->amax: the slot's, where that has a history. Announced,
// it is what products go by, and the amax goes to the slot.
float values_measured_scale(Fp8Tensor q);
void values_announce_scale(Fp8Tensor q);

// n values to FP8 codes by this scale, and what they lose to the counts.
void values_encode(uint8_t *codes, Fp8Tensor q, float scale, const float *x, int64_t n);
// x [M,N] to the FP8 forms that are requested, by the scale that q says.
void values_to_fp8(Operand out, Fp8Tensor q, const float *x, int M, int N);
// What a producer of [M,N] does with its values, which it then frees (kernels.h).
void values_produce(Operand out, Fp8Tensor q, float *values, int M, int N);

#endif
