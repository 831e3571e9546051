// The stand-ins for kernels compute in floats, by kernels/cpu.c: how those come from the device's
// buffers, and go back into them.
#ifndef LLM8_STANDIN_VALUES_H
#define LLM8_STANDIN_VALUES_H

#include "../../kernels/cpu.h"
#include "../../kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wunused-parameter" // streams: all is done when a call returns

static inline void values_free(float **values) {
    free(*values);
}

// In front of a declaration: the values are freed at the end of its block.
#define FREED __attribute__((cleanup(values_free)))

float *values_new(int64_t n);
// n values as floats; NULL for NULL.
float *values_read(const void *x, GpuType type, int64_t n);
static inline float *bf16_read(const Bf16 *x, int64_t n) {
    return values_read(x, TYPE_BF16, n);
}
// Rounds them into out.
void values_write(void *out, GpuType type, const float *values, int64_t n);
// The same, and gives them back as they will be read.
void values_round(void *out, GpuType type, float *values, int64_t n);

// Whether STANDIN_OWN_PRODUCTS says so of the products of our own (products.c).
bool own_products(const char *what);

// What a gradient's sums are added to: its values, or zeros. gradient_end writes them, unless the
// gradient is not requested.
float *gradient_begin(Gradient out, int64_t n);
void gradient_end(Gradient out, const float *values, int64_t n);

// *amax = max(*amax, |x|), NaN being the largest; amax may be NULL.
void values_amax(float *amax, const float *x, int64_t n);

// The scale of a tensor whose amax is live->amax: the slot's, where that has a history. Announced,
// it is what products go by, and the amax goes to the slot.
float values_measured_scale(Tensor q);
void values_announce_scale(Tensor q);

// n values to FP8 codes by this scale.
void values_encode(uint8_t *codes, Tensor q, float scale, const float *x, int64_t n);
// x [M,N] to the FP8 forms that are requested, if any, by the scale that the tensor says.
void values_to_fp8(Tensor out, const float *x, int M, int N);
// What a producer of [M,N] does with its values (kernels.h), which become what it leaves.
void values_produce(Tensor out, float *values, int M, int N);

#endif
