// The two FP8 formats, BF16, and the rule from amax to scale, in portable C that also compiles for
// the device. All code that quantises, on host and device, uses this file.
//
// E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): 1 sign, 4 exponent bits (bias
// 7), 3 mantissa bits; no infinity, NaN only as 0x7f and 0xff; largest 448, smallest 2^-9.
// E5M2: 1 sign, 5 exponent bits (bias 15), 2 mantissa bits; infinities 0x7c and 0xfc, NaN above
// them; largest 57344, smallest 2^-16.
//
// Encoding rounds to nearest, ties to even, and saturates: finite values above the largest one
// become the largest one. Infinities and NaN become NaN, 0x7f, so that FP8 hides no infinity that
// BF16 shows: the loss or the gradients' norm becomes NaN, and the step is skipped. (The GPU's
// instruction cvt.rn.satfinite alone would turn an infinity into the largest value.)
#pragma once

#include "../base/common.h"

#include <float.h>
#include <string.h>

typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Type;

HOST_DEVICE static inline float fp8_max(Fp8Type type) {
    return type == FP8_E4M3 ? 448.0f : 57344.0f;
}

HOST_DEVICE static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

HOST_DEVICE static inline float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// Returns the nearest value of the format as a float, or NaN for infinities and NaN. Adding and
// subtracting 1.5 * 2^23 times the spacing between the format's values near x rounds x to a
// multiple of that spacing.
HOST_DEVICE static inline float fp8_round(float x, Fp8Type type) {
    uint32_t mantissa_bits = type == FP8_E4M3 ? 3 : 2;
    uint32_t smallest_normal = (uint32_t)(type == FP8_E4M3 ? 127 - 6 : 127 - 14) << 23;
    float max = fp8_max(type);
    x += x * 0.0f; // NaN if x is infinite
    float clamped = x > max ? max : (x < -max ? -max : x);
    uint32_t exponent = float_bits(clamped) & 0x7f800000u;
    if (exponent < smallest_normal) { exponent = smallest_normal; }
    float magic = float_from_bits(exponent + ((23 - mantissa_bits) << 23) + 0x00400000u);
    float rounded = (clamped + magic) - magic;
    return float_from_bits((float_bits(rounded) & 0x7fffffffu) | (float_bits(x) & 0x80000000u));
}

HOST_DEVICE static inline uint8_t fp8_encode(float x, Fp8Type type) {
    float rounded = fp8_round(x, type);
    if (rounded != rounded) { return 0x7f; }
    uint32_t mantissa_bits = type == FP8_E4M3 ? 3 : 2, bias = type == FP8_E4M3 ? 7 : 15;
    uint32_t bits = float_bits(rounded);
    uint32_t sign = bits >> 24 & 0x80u, exponent = bits >> 23 & 0xffu;
    uint32_t smallest_normal = 127 - bias + 1;
    if (exponent >= smallest_normal) {
        uint32_t code = (bits & 0x7fffffffu) >> (23 - mantissa_bits);
        return (uint8_t)(sign | (code - ((127 - bias) << mantissa_bits)));
    }
    // a subnormal code is |x| divided by the smallest value
    float smallest = float_from_bits((smallest_normal - mantissa_bits) << 23);
    return (uint8_t)(sign | (uint32_t)(float_from_bits(bits & 0x7fffffffu) / smallest));
}

HOST_DEVICE static inline float fp8_decode(uint8_t code, Fp8Type type) {
    uint32_t mantissa_bits = type == FP8_E4M3 ? 3 : 2, bias = type == FP8_E4M3 ? 7 : 15;
    uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7f;
    uint32_t infinity = type == FP8_E4M3 ? 0x7f : 0x7c; // E4M3 has NaN where E5M2 has infinity
    if (magnitude >= infinity) {
        int is_infinity = type == FP8_E5M2 && magnitude == infinity;
        return float_from_bits(sign | (is_infinity ? 0x7f800000u : 0x7fc00000u));
    }
    if (magnitude >> mantissa_bits == 0) {
        float smallest = float_from_bits((127 - bias + 1 - mantissa_bits) << 23);
        return float_from_bits(sign | float_bits((float)magnitude * smallest));
    }
    return float_from_bits(sign | ((magnitude << (23 - mantissa_bits)) + ((127 - bias) << 23)));
}

// Encodes x as BF16, rounded to nearest even; NaN stays NaN.
HOST_DEVICE static inline uint16_t bf16_encode(float x) {
    uint32_t bits = float_bits(x);
    if (x != x) { return (uint16_t)(bits >> 16 | 0x40u); }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

HOST_DEVICE static inline float bf16_decode(uint16_t code) {
    return float_from_bits((uint32_t)code << 16);
}

// Returns the largest magnitude that a scaled tensor should have: the format's largest value,
// divided by 2^margin.
HOST_DEVICE static inline float fp8_target(Fp8Type type, int margin) {
    float target = fp8_max(type);
    for (int i = 0; i < margin; i++) { target *= 0.5f; }
    for (int i = 0; i > margin; i--) { target *= 2.0f; }
    return target;
}

// Returns the scale with amax * scale = target, limited to FP32's normal numbers. Returns
// `previous` if amax is zero, infinite or NaN.
HOST_DEVICE static inline float fp8_scale(float amax, float target, float previous) {
    if (!(amax > 0.0f && amax <= FLT_MAX)) { return previous; }
    float scale = target / amax;
    return scale < FLT_MIN ? FLT_MIN : (scale > FLT_MAX ? FLT_MAX : scale);
}

// ---- blocks ----
//
// With blockwise scaling an operand [rows,k] of a matmul that sums over k has many scales:
// activations and gradients have one for each block of 1 x 128 values, weights one for each block
// of 128 x 128 (DeepSeek-V3 Technical Report, 2024, section 3.3). A block at an edge is smaller.

enum { FP8_BLOCK = 128 };

// How a tensor is scaled, in all steps of a run. With SCALE_DELAYED and SCALE_CURRENT, it has one
// scale. With SCALE_BLOCK_1X128 and SCALE_BLOCK_128X128, each block has a scale, which is computed
// from the amax of the block's values rounded to BF16. The scales have the layout that cuBLASLt
// reads.
typedef enum {
    SCALE_DELAYED, // the scale is known before the values are: delayed scaling, or a fixed scale
    // the scale is computed from the amax of the tensor's current values: tensorwise scaling; in a
    // run that does not train, also tensors of delayed scaling without a known scale
    SCALE_CURRENT,
    SCALE_BLOCK_1X128,  // blocks of 1 x 128: [ceil(k/128)][rows, rounded up to 4]
    SCALE_BLOCK_128X128 // blocks of 128 x 128: [ceil(rows/128)][ceil(k/128), rounded up to 4]
} Scaling;

HOST_DEVICE static inline int fp8_by_blocks(Scaling scaling) {
    return scaling == SCALE_BLOCK_1X128 || scaling == SCALE_BLOCK_128X128;
}

HOST_DEVICE static inline int64_t fp8_scale_index(Scaling scaling, int rows, int k, int row,
                                                  int column) {
    int blocks = (k + FP8_BLOCK - 1) / FP8_BLOCK;
    if (!fp8_by_blocks(scaling)) { return 0; }
    if (scaling == SCALE_BLOCK_1X128) {
        return (int64_t)(column / FP8_BLOCK) * ((rows + 3) / 4 * 4) + row;
    }
    return (int64_t)(row / FP8_BLOCK) * ((blocks + 3) / 4 * 4) + column / FP8_BLOCK;
}

// Returns how many scales an operand has, padding included.
HOST_DEVICE static inline int64_t fp8_scale_count(Scaling scaling, int rows, int k) {
    int down = (rows + FP8_BLOCK - 1) / FP8_BLOCK, across = (k + FP8_BLOCK - 1) / FP8_BLOCK;
    if (!fp8_by_blocks(scaling)) { return 1; }
    if (scaling == SCALE_BLOCK_1X128) { return (int64_t)across * ((rows + 3) / 4 * 4); }
    return (int64_t)down * ((across + 3) / 4 * 4);
}

// Returns a block's scale. If power_of_two, the scale is rounded down to a power of two, so that
// multiplying by it and by its inverse is exact. (The smallest scale, FP32's smallest normal
// number, is a power of two.)
HOST_DEVICE static inline float fp8_block_scale(float amax, float target, int power_of_two) {
    float scale = fp8_scale(amax, target, 1.0f);
    return power_of_two ? float_from_bits(float_bits(scale) & 0x7f800000u) : scale;
}

// ---- scaling state ----

// The scale of a tensor that has only one scale. `amax` is the largest magnitude of this step so
// far; fp8_scale_enter resets it. Before any amax is known, scale is 1 and count is 0.
typedef struct {
    float scale_inv; // the first field, because cuBLASLt needs a 16-byte aligned address
    float scale;
    float amax;
    int count; // how many amaxes have entered the history
} Fp8Scale;

// Counts of a tensor's codes: of all codes, and of those that are the format's largest magnitude,
// zero, and subnormal but not zero.
typedef struct {
    unsigned long long elements, largest, zero, subnormal;
} Fp8Counts;

HOST_DEVICE static inline void fp8_count(Fp8Counts *counts, uint8_t code, Fp8Type type) {
    uint32_t magnitude = code & 0x7f, mantissa_bits = type == FP8_E4M3 ? 3 : 2;
    counts->elements++;
    counts->largest += magnitude == (type == FP8_E4M3 ? 0x7e : 0x7b);
    counts->zero += magnitude == 0;
    counts->subnormal += magnitude != 0 && magnitude >> mantissa_bits == 0;
}

HOST_DEVICE static inline void fp8_rescale(Fp8Scale *s, float amax, float target) {
    s->scale = fp8_scale(amax, target, s->scale);
    s->scale_inv = 1.0f / s->scale;
}

// Returns whether the scale was computed from amaxes of the tensor: by its history, or by
// calibration (model/precision.h).
HOST_DEVICE static inline int fp8_scale_known(const Fp8Scale *s) {
    return s->count > 0 || s->scale != 1.0f;
}

// The next two functions update a scale, once in each optimizer step, on the host or the device.

// Returns the largest amax of the history, a ring buffer of `length` amaxes, as if this step's amax
// were already in it. The function reads only the entries first, first + step, first + 2 step and
// so on, so that several threads can share the entries.
HOST_DEVICE static inline float fp8_scale_largest(const Fp8Scale *s, const float *history,
                                                  int length, int first, int step) {
    int newest = s->count % length, known = s->count < length ? s->count + 1 : length;
    float largest = 0.0f;
    for (int i = first; i < known; i += step) {
        float amax = i == newest ? s->amax : history[i];
        if (amax > largest) { largest = amax; }
    }
    return largest;
}

// Writes this step's amax to the history, computes the scale from `largest` (the result of
// fp8_scale_largest), and sets the amax to 0. If the amax is zero, infinite or NaN, history and
// scale do not change.
HOST_DEVICE static inline void fp8_scale_enter(Fp8Scale *s, float *history, int length,
                                               float target, float largest) {
    float amax = s->amax;
    s->amax = 0.0f;
    if (!(amax > 0.0f && amax <= FLT_MAX)) { return; }
    history[s->count % length] = amax;
    s->count++;
    fp8_rescale(s, largest, target);
}

static inline void fp8_scale_update(Fp8Scale *s, float *history, int length, float target) {
    fp8_scale_enter(s, history, length, target, fp8_scale_largest(s, history, length, 0, 1));
}
