#include "values.h"

float *values_new(int64_t n) {
    return malloc_or_die((size_t)n * sizeof(float));
}

// A loop for each type: a switch for each element took a tenth of a run's time.
static void decode(float *values, const void *x, GpuType type, int64_t n) {
    const uint8_t *codes = x;
    switch (type) {
    case TYPE_F32: memcpy(values, x, (size_t)n * sizeof(float)); return;
    case TYPE_BF16:
        for (int64_t i = 0; i < n; i++) { values[i] = bf16_decode(((const Bf16 *)x)[i]); }
        return;
    case TYPE_E4M3:
        for (int64_t i = 0; i < n; i++) { values[i] = fp8_decode(codes[i], FP8_E4M3); }
        return;
    case TYPE_E5M2:
        for (int64_t i = 0; i < n; i++) { values[i] = fp8_decode(codes[i], FP8_E5M2); }
        return;
    case TYPE_MOMENT8: break; // a code alone says nothing
    }
    die("stand-in: type %d", type);
}

float *values_read(const void *x, GpuType type, int64_t n) {
    if (x == NULL) { return NULL; }
    float *values = values_new(n);
    decode(values, x, type, n);
    return values;
}

void values_write(void *out, GpuType type, const float *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (type == TYPE_F32) {
            ((float *)out)[i] = values[i];
        } else {
            ((Bf16 *)out)[i] = bf16_encode(values[i]);
        }
    }
}

void values_round(void *out, GpuType type, float *values, int64_t n) {
    values_write(out, type, values, n);
    decode(values, out, type, n);
}

float *gradient_begin(Gradient out, int64_t n) {
    if (out.data != NULL && out.accumulate) { return values_read(out.data, out.type, n); }
    return calloc_or_die((size_t)n, sizeof(float));
}

void gradient_end(Gradient out, const float *values, int64_t n) {
    if (out.data != NULL) { values_write(out.data, out.type, values, n); }
}

void values_amax(float *amax, const float *x, int64_t n) {
    if (amax == NULL) { return; }
    // not by tensor_amax, whose parallel region is too slow for single values and short blocks
    uint32_t largest = float_bits(*amax);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    *amax = float_from_bits(largest);
}

void values_set_scale(Fp8Scale *s, float target) {
    s->scale = fp8_scale(s->amax, target, 1.0f);
    s->scale_inv = 1.0f / s->scale;
}

void values_encode(uint8_t *codes, Fp8Type type, float scale, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) { codes[i] = fp8_encode(x[i] * scale, type); }
}

static void transpose(uint8_t *out, const uint8_t *x, int N, int C) {
    for (int i = 0; i < N * C; i++) { out[i % C * N + i / C] = x[i]; }
}

void gpu_transpose_codes(Gpu *gpu, uint8_t *out, const uint8_t *x, int N, int C) {
    gpu_family(gpu, FAMILY_QUANTIZE);
    transpose(out, x, N, C);
}

// Encodes a form [rows,k] by blocks. The values are BF16 numbers.
static void encode_blocks(uint8_t *codes, float *scales, Operand q, const float *x, int rows,
                          int k) {
    int height = q.scaling == SCALE_BLOCK_128X128 ? FP8_BLOCK : 1;
    for (int top = 0; top < rows; top += height) {
        for (int left = 0; left < k; left += FP8_BLOCK) {
            int down = rows - top < height ? rows - top : height;
            int n = k - left < FP8_BLOCK ? k - left : FP8_BLOCK;
            float amax = 0.0f;
            for (int i = top; i < top + down; i++) { values_amax(&amax, x + i * k + left, n); }
            float scale = fp8_block_scale(amax, q.target, q.power_of_two);
            scales[fp8_scale_index(q.scaling, rows, k, top, left)] = 1.0f / scale;
            for (int i = top; i < top + down; i++) {
                values_encode(codes + i * k + left, q.type, scale, x + i * k + left, n);
            }
        }
    }
}

static void blocks_to_fp8(Operand out, const float *values, int M, int N) {
    FREED float *x = values_new(M * N), *transposed = values_new(M * N);
    round_to_bf16(x, values, M * N);
    for (int i = 0; i < M * N; i++) { transposed[i % N * M + i / N] = x[i]; }
    if (out.rows.codes != NULL) { encode_blocks(out.rows.codes, out.rows.inverse, out, x, M, N); }
    if (out.columns.codes != NULL) {
        encode_blocks(out.columns.codes, out.columns.inverse, out, transposed, N, M);
    }
}

void values_to_fp8(Operand out, const float *x, int M, int N) {
    if (out.rows.codes == NULL && out.columns.codes == NULL) { return; }
    if (M % 16 != 0 || N % 16 != 0) { die("stand-in: FP8 of %d x %d", M, N); }
    if (fp8_by_blocks(out.scaling)) {
        blocks_to_fp8(out, x, M, N);
        return;
    }
    FREED float *room = values_new(M * N);
    uint8_t *codes = out.rows.codes != NULL ? out.rows.codes : (uint8_t *)room;
    if (out.scaling == SCALE_CURRENT) { values_set_scale(out.scale, out.target); }
    values_encode(codes, out.type, out.scale->scale, x, M * N);
    if (out.columns.codes != NULL) { transpose(out.columns.codes, codes, M, N); }
    if (out.scaling == SCALE_DELAYED && out.writes_amax) {
        values_amax(&out.scale->amax, x, M * N);
    }
}

void values_produce(Operand out, float *values, int M, int N) {
    if (!out.fused) {
        bool measured = out.scaling == SCALE_CURRENT && out.writes_amax;
        values_round(out.bf16, TYPE_BF16, values, M * N);
        values_amax(measured ? &out.scale->amax : NULL, values, M * N);
    }
    values_to_fp8(out, values, M, N);
}
