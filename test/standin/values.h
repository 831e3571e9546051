// The stand-ins for kernels compute in floats, by kernels/cpu.c. These functions read the floats
// from the device's buffers and write them back.
#ifndef LLM8_STANDIN_VALUES_H
#define LLM8_STANDIN_VALUES_H

#include "../../kernels/cpu.h"
#include "../../kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wunused-parameter" // streams: a call has done all its work

float *values_new(int64_t n);
// n values as floats; NULL where x is NULL.
float *values_read(const void *x, GpuType type, int64_t n);
static inline float *bf16_read(const Bf16 *x, int64_t n) {
    return values_read(x, TYPE_BF16, n);
}
// Rounds values into out.
void values_write(void *out, GpuType type, const float *values, int64_t n);
// The same; the values become what will be read from out.
void values_round(void *out, GpuType type, float *values, int64_t n);

// Whether STANDIN_OWN_MATMULS is `what` (matmuls.c).
bool own_matmuls(const char *what);

// What a gradient's sums are added to: its old values, or zeros. gradient_end writes the sums if
// the gradient is requested.
float *gradient_begin(Gradient out, int64_t n);
void gradient_end(Gradient out, const float *values, int64_t n);

// *amax = max(*amax, |x|), NaN being the largest; amax may be NULL.
void values_amax(float *amax, const float *x, int64_t n);

// Sets the scale that follows from the measured amax.
void values_set_scale(Fp8Scale *s, float target);

// Encodes n values by this scale.
void values_encode(uint8_t *codes, Fp8Type type, float scale, const float *x, int64_t n);
// Writes x [M,N] to the FP8 forms that are requested, by the tensor's scale.
void values_to_fp8(Operand out, const float *x, int M, int N);
// Writes a producer's values [M,N] as the operand says (kernels.h). The values become what can be
// read from it.
void values_produce(Operand out, float *values, int M, int N);

#endif
