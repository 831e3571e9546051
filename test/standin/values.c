#include "values.h"

#include "../../kernels/cpu.h"

#include <stdlib.h>
#include <string.h>

static float decode(const void *x, GpuType type, int64_t i) {
    switch (type) {
    case TYPE_F32: return ((const float *)x)[i];
    case TYPE_BF16: return bf16_decode(((const Bf16 *)x)[i]);
    case TYPE_E4M3: return fp8_decode(((const uint8_t *)x)[i], FP8_E4M3);
    case TYPE_E5M2: return fp8_decode(((const uint8_t *)x)[i], FP8_E5M2);
    }
    die("stand-in: type %d", type);
}

float *values_read(const void *x, GpuType type, int64_t n) {
    if (x == NULL) { return NULL; }
    float *values = malloc_or_die((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) { values[i] = decode(x, type, i); }
    return values;
}

void values_write(void *out, GpuType type, const float *values, int64_t n) {
    if (type == TYPE_F32) {
        memcpy(out, values, (size_t)n * sizeof(float));
        return;
    }
    Bf16 *codes = out;
    for (int64_t i = 0; i < n; i++) { codes[i] = bf16_encode(values[i]); }
}

void values_round(void *out, GpuType type, float *values, int64_t n) {
    values_write(out, type, values, n);
    for (int64_t i = 0; i < n; i++) { values[i] = decode(out, type, i); }
}

float *gradient_begin(GradientOut out, int64_t n) {
    if (out.data != NULL && out.accumulate) { return values_read(out.data, out.type, n); }
    return calloc_or_die((size_t)n, sizeof(float));
}

void gradient_end(GradientOut out, float *values, int64_t n) {
    if (out.data != NULL) { values_write(out.data, out.type, values, n); }
    free(values);
}

void values_amax(float *amax, const float *x, int64_t n) {
    if (amax == NULL) { return; }
    float largest = tensor_amax(x, n);
    if (float_bits(largest) > float_bits(*amax)) { *amax = largest; }
}

float values_measured_scale(Fp8Out out) {
    bool known = out.slot != NULL && out.slot->count > 0;
    return known ? out.slot->scale : fp8_scale(out.live->amax, out.target, 1.0f);
}

void values_announce_scale(Fp8Out out) {
    out.live->scale = values_measured_scale(out);
    out.live->scale_inv = 1.0f / out.live->scale;
    if (out.slot != NULL && out.record) { values_amax(&out.slot->amax, &out.live->amax, 1); }
}

void values_encode(Fp8Out out, float scale, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) { out.rows[i] = fp8_encode(x[i] * scale, out.type); }
    if (out.counts != NULL) { count_fp8(out.counts, x, n, scale, out.type); }
}

void values_transpose(Fp8Out out, int M, int N) {
    for (int64_t i = 0; i < (int64_t)M * N; i++) { out.columns[i % N * M + i / N] = out.rows[i]; }
}

void values_to_fp8(Fp8Out out, bool measured, const float *x, int M, int N) {
    int64_t n = (int64_t)M * N;
    Fp8Out whole = out;
    if (M % 16 != 0 || N % 16 != 0) { die("stand-in: FP8 of %d x %d", M, N); }
    if (out.rows == NULL) { whole.rows = malloc_or_die((size_t)n); }
    if (measured) { values_announce_scale(out); }
    values_encode(whole, out.live->scale, x, n);
    if (out.columns != NULL) { values_transpose(whole, M, N); }
    if (!measured && out.record) { values_amax(&out.slot->amax, x, n); }
    if (out.rows == NULL) { free(whole.rows); }
}
